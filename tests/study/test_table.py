"""The files of a study."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from fastplm.study.claims import compare
from fastplm.study.results import UNRECORDED
from fastplm.study.statistics import interval
from fastplm.study.table import _edge, content, page, write_tables

from .conftest import BASE, BETTER


def test_the_files(study, tmp_path):
    results = study(BETTER, BASE)
    claims = compare(results)
    write_tables(tmp_path, results, claims, picture=True)
    lines = [line.split("\t") for line in (tmp_path / "table.tsv").read_text().splitlines()]
    assert lines[0][0] == "variant" and lines[2][:2] == ["40 %", "20000000000000.0"]
    found = interval(np.array(BETTER))
    at = lines[0].index("sentiment")
    assert lines[2][at : at + 3] == [f"{v:.6g}" for v in (found.mean, found.low, found.high)]
    written = json.loads((tmp_path / "table.json").read_text())
    assert written == json.loads(json.dumps(content(results, claims)))
    assert written["variants"][1]["scores"]["sentiment"]["values"] == BETTER
    assert "seconds" not in (tmp_path / "table.tsv").read_text(), "times would differ each time"
    assert (tmp_path / "times.tsv").read_text().splitlines()[1].split("\t")[2:] == ["60.0"] * 3
    rates = [line.split("\t") for line in (tmp_path / "rates.tsv").read_text().splitlines()]
    assert rates[1:3] == [["15 %", "1e-3", "3.5", "yes"], ["15 %", "1e-2", "", "no"]]
    text = page(results, claims, picture=True)
    assert "![" in text and claims[0].text in text
    said = (
        "Held-out loss of 15 %, 40 % by learning rate (seed 0): 1e-3: 3.5000, 1e-2: –. The lowest"
    )
    assert text.count("by learning rate (") == 1 and said in text, "both have the same"
    assert "The losses by learning rate are sums" in text
    made = replace(results, devices=("cpu", UNRECORDED))
    shown = page(made, [], picture=False)
    assert f"Trained on cpu and {UNRECORDED}.\n\nCPU seconds of trainings on different" in shown
    assert "Trained on" not in page(replace(results, devices=(UNRECORDED,)), [], picture=False)


def test_a_seed_that_diverged_is_said(study):
    results = study(BETTER, BASE)
    row = replace(results.rows["15 %"], diverged=("15 %, seed 1",))
    text = page(replace(results, rows=results.rows | {"15 %": row}), [], picture=False)
    assert "15 %, seed 1: it diverged, or what it needs did, and so it has no figures." in text


LOWEST = " The lowest of them is the best: a lower one may be better."
HIGHEST = " The highest of them is the best: a higher one may be better."
PASSED = " 1e-3 is taken, as at 2e-3 the discriminator learned nothing."


@pytest.mark.parametrize(
    "chosen, tried, said",
    [
        ("2e-3", {"1e-3": 2.0, "2e-3": 1.0, "4e-3": 1.5}, ""),
        ("5e-4", {"5e-4": 1.0, "1e-3": 2.0}, LOWEST),
        ("2e-3", {"1e-3": 2.0, "2e-3": 1.0}, HIGHEST),
        ("2e-3", {"1e-3": 2.0, "2e-3": 1.0, "4e-3": None}, ""),  # the highest diverged
        ("2e-3", {"1e-3": 2.0, "2e-3": 1.0, "4e-3": 1.04}, " Within 0.05 nats of it: 4e-3."),
        ("2e-3", {"1e-3": 1.04, "2e-3": 1.0}, f"{HIGHEST} Within 0.05 nats of it: 1e-3."),
        ("1e-3", {"1e-3": 1.0}, ""),
        ("1e-3", {"1e-3": None, "2e-3": None}, ""),
        ("1e-3", {"5e-4": 5.5, "1e-3": 4.7, "2e-3": 4.5}, PASSED),
        ("1e-3", {"1e-3": 4.7, "2e-3": 4.5}, PASSED + LOWEST),
        ("1e-3", {"2e-3": 4.5, "1e-3": 4.5}, f"{LOWEST} Within 0.05 nats of it: 2e-3."),  # a tie
    ],
)
def test_what_is_said_of_the_rate_that_is_taken(chosen, tried, said):
    assert _edge(chosen, tried) == said
