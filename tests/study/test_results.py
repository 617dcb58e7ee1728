"""Scores of variants, and what is too early to tell."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from fastplm.study.cells import Plan
from fastplm.study.grid import Evaluation, read_grid
from fastplm.study.results import UNRECORDED, Scores, _mean_of, _not_above, _of_evaluation, results

from .conftest import BASE, BETTER


def test_fine_tuning_must_be_better_than_from_new_weights():
    model = np.array([[0.80, 0.81, 0.79], [0.82, 0.80, 0.81], [0.81, 0.80, 0.80]])
    assert not _not_above(model, np.array([0.55, 0.58, 0.60]), lower=False)
    assert _not_above(model, np.array([0.70, 0.95, 0.75]), lower=False), "too much noise"
    assert _not_above(model, np.array([0.81, 0.80, 0.82]), lower=False)
    assert _not_above(np.full((1, 1), 0.5), np.array([0.5]), lower=False), "the same is no gain"
    assert not _not_above(-model, np.array([-0.55, -0.58, -0.60]), lower=True)


@pytest.mark.parametrize("chance", [0.5, 0.75, None])
def test_scores_of_one_answer_to_all_say_nothing(chance):
    """In two balanced classes new weights may be below chance, and 52 % above them."""
    film = Evaluation("film", "finetune", {"task": "classification"}, "model", True, None, None)
    points = [
        [{"examples": 9, "scores": {"accuracy": values, "f1": [0.1, 0.1]}}] for values in BASE
    ]
    contents = [{"points": each} | ({"chance": chance} if chance else {}) for each in points]
    [(_, scores)] = _of_evaluation(film, contents, None, (), True)
    assert ["one answer" in reason for reason in scores.early] == [True] * (chance == 0.75)
    one = [{**contents[0], "points": [{"examples": 9, "scores": {"accuracy": [0.70, 0.81, 0.80]}}]}]
    [(_, scores)] = _of_evaluation(film, one, None, (), False)  # of a model that is there
    assert bool(scores.early) == (chance == 0.75), "0.77 is above it, and its interval is not"
    [(_, scores)] = _of_evaluation(replace(film, figure="f1"), contents, None, (), True)
    assert not scores.early, "it is the chance of another figure"


def test_the_mean_over_tasks():
    """As GLUE's, of each seed; minimal pairs and losses are not among them."""
    film = Evaluation("film", "finetune", {"task": "classification"}, "model", True, None, None)
    grid = SimpleNamespace(
        evaluations={"film": film, "tags": film, "blimp": replace(film, command="score")}
    )
    scores = {
        "film": Scores(np.array([[0.6, 0.7], [0.8, 0.7]]), early=("a reason",)),
        "tags": Scores(np.array([[0.8, 0.9], [0.8, 0.9]])),
        "blimp": Scores(np.array([[0.5] * 67] * 2), fixed=True),
    }
    mean = _mean_of(grid, scores)["mean"]
    assert mean.values == pytest.approx(np.array([[0.7, 0.8], [0.8, 0.8]]))
    assert mean.early == ("a reason",) and not mean.fixed
    order = replace(film, options={"task": "sop"})  # no task of GLUE's
    with_order = SimpleNamespace(evaluations=grid.evaluations | {"order": order})
    assert (_mean_of(with_order, scores)["mean"].values == mean.values).all()
    for lacking in (
        {"film": scores["film"], "blimp": scores["blimp"]},
        scores | {"tags": Scores(np.array([[0.8], [0.8]]))},
        scores | {"tags": replace(scores["tags"], lower=True)},
    ):
        assert _mean_of(grid, lacking) == {}


def test_seeds_that_matter_are_those_of_models_past_their_plateau(study):
    """The spread of the plateau's end is no spread of scores; alone it is shown all the same."""
    results = study(BETTER, [[0.2, 0.2], [0.7, 0.7], [0.4, 0.4]])
    alone = study(BETTER, BETTER).spreads["sentiment"]
    assert results.spreads["sentiment"].rows > 5 * alone.rows
    scores = {"sentiment": replace(results.rows["15 %"].scores["sentiment"], early=("a reason",))}
    early = results.rows | {"15 %": replace(results.rows["15 %"], scores=scores)}
    found = replace(results, rows=early).spreads["sentiment"]
    assert (found.rows, found.degrees) == (pytest.approx(alone.rows), 2)
    only = {"15 %": early["15 %"]}
    assert replace(results, rows=only).spreads["sentiment"].rows > 0.1


def test_the_devices_are_those_of_trainings(place):
    contents = [
        {"parameters": 1},
        {"parameters": 1, "device": "cpu"},
        {"points": [], "device": "a"},
    ]
    plan = Plan({}, {str(number): each for number, each in enumerate(contents)})
    store = SimpleNamespace(done=lambda content: {"code": "0", **content})
    found = results(read_grid("grid.yaml"), plan, store)
    assert (found.devices, found.codes) == ((UNRECORDED, "cpu"), ("0",))
