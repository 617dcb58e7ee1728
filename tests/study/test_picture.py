"""The picture of a study."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fastplm.study.picture import _points, draw, panels
from fastplm.study.results import Scores
from fastplm.study.table import page

from .conftest import BASE, BETTER


def test_the_picture(study, tmp_path):
    results = study(BETTER, BASE)
    draw(tmp_path / "a.png", results)
    states = {"sentiment": [(0.5, Scores(np.array(BASE)))]}
    rows = {name: replace(row, milestones=states) for name, row in results.rows.items()}
    published = {"sentiment": {"5-gram": 0.61, "LSTM": 0.7}}
    draw(tmp_path / "b.png", replace(results, rows=rows, published=published))
    assert "sentiment, as published: 5-gram 0.610, LSTM 0.700." in page(
        replace(results, published=published), [], picture=False
    )
    assert panels(results) == ["sentiment"]
    assert all((tmp_path / f"{name}.png").stat().st_size > 5000 for name in "ab")


def test_a_picture_is_as_wide_as_what_can_be_told(study):
    """An interval of three seeds on their plateau reaches far beyond any score."""
    from matplotlib.figure import Figure

    results = study(BETTER, [[0.2, 0.2], [0.9, 0.9], [0.4, 0.4]])
    wide = results.rows["15 %"].scores["sentiment"].interval
    assert wide.low < 0.1
    limits = []
    for early in ((), ("a reason",)):
        scores = {"sentiment": replace(results.rows["15 %"].scores["sentiment"], early=early)}
        rows = results.rows | {"15 %": replace(results.rows["15 %"], scores=scores)}
        axis = Figure().subplots()
        _points(axis, replace(results, rows=rows), "sentiment")
        limits.append(axis.get_xlim())
    assert limits[0][0] < wide.low and 0.05 < limits[1][0] < 0.2
