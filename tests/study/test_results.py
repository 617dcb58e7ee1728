"""What is said of figures: budgets that cannot speak, claims, and the files of a study."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from fastplm.study.claims import AGREES, CANNOT, DISAGREES, compare
from fastplm.study.grid import Claim, Judge, read_grid
from fastplm.study.picture import _points, draw, panels
from fastplm.study.results import (
    UNRECORDED,
    Results,
    Row,
    Scores,
    _devices,
    _mean_of,
    _not_above,
    _of_judge,
    too_early,
)
from fastplm.study.statistics import interval
from fastplm.study.table import _edge, content, page, write_tables

PAST = {"mlm_loss": 3.0, "unigram_loss": 6.0, "bigram_loss": 4.5}
#: The figures of an encoder-decoder that can copy seven of ten labels.
COPIED = {"unigram_loss": 6.0, "bigram_loss": 4.5, "missing_share": 0.3, "encoder_similarity": 0.1}


@pytest.mark.parametrize(
    "held_out, said",
    [
        ([PAST, PAST], ""),
        ([PAST, PAST | {"mlm_loss": 4.48}], "its mlm_loss is not clearly below the bigram loss"),
        ([PAST | {"mlm_loss": 6.1}], "below the unigram loss"),
        ([PAST | {"words_balanced_accuracy": 0.53}], "balanced accuracy is not clearly above .5"),
        ([PAST | {"words_balanced_accuracy": 0.71}], ""),
        ([PAST | {"words_balanced_accuracy": 0.71, "mlm_loss": 4.9}], ""),
        (
            [PAST | {"words_balanced_accuracy": 0.71, "mlm_loss": 6.1}],
            "its mlm_loss is not clearly below the unigram loss",
        ),
        ([PAST | {"discriminator_mlm_loss": 3.9, "mlm_loss": 4.9}], ""),
        (
            [PAST | {"discriminator_mlm_loss": 4.48, "mlm_loss": 4.9}],
            "its discriminator_mlm_loss is not clearly below the bigram loss",
        ),
        (
            [PAST | {"discriminator_mlm_loss": 1.2, "discriminator_chosen_loss": 4.6}],
            "its discriminator_chosen_loss is not clearly below the bigram loss",
        ),
        ([PAST | {"discriminator_mlm_loss": 1.2, "discriminator_chosen_loss": 4.1}], ""),
        ([{"spans_loss": 3.0}], ""),
        ([COPIED | {"denoise_loss": 1.30}], ""),
        (
            [COPIED | {"denoise_loss": 1.34}],
            "not clearly below the bigram loss of the 30% of its labels that are not in its source",
        ),
        ([COPIED | {"denoise_loss": 1.30, "encoder_similarity": 0.999}], "gives all tokens one"),
        ([{}], "it diverged, or no text was held out"),
    ],
)
def test_a_budget_that_cannot_speak(held_out, said):
    reasons = too_early(held_out)
    assert bool(reasons) == bool(said) and said in " ".join(reasons)


def test_fine_tuning_must_be_better_than_from_new_weights():
    model = np.array([[0.80, 0.81, 0.79], [0.82, 0.80, 0.81], [0.81, 0.80, 0.80]])
    assert not _not_above(model, np.array([0.55, 0.58, 0.60]), lower=False)
    assert _not_above(model, np.array([0.70, 0.95, 0.75]), lower=False), "too much noise"
    assert _not_above(model, np.array([0.81, 0.80, 0.82]), lower=False)
    assert _not_above(np.full((1, 1), 0.5), np.array([0.5]), lower=False), "the same is no gain"
    assert not _not_above(-model, np.array([-0.55, -0.58, -0.60]), lower=True)


@pytest.fixture
def study(place):
    """A function that makes the results of two variants from scores."""
    grid = read_grid("grid.yaml")

    def make(ours, theirs, on="sentiment", **options):
        claims = (Claim("40 %", "15 %", (on,), "Wettig et al. 2023"),)
        facts = dict.fromkeys(("steps", "parameters", "vocab_size"), None)
        facts |= {
            "tokenizer": "a",
            "learning_rate": "1e-3",
            "rates": {"1e-3": 3.5, "1e-2": None},
            "seeds": 3,
        }
        times = dict.fromkeys(("train_seconds", "train_cpu_seconds", "judge_cpu_seconds"), 60.0)
        rows = {
            name: Row(
                name, None, {on: Scores(np.array(values), **options)}, {}, 2.00001e13, facts, times
            )
            for name, values in {"15 %": theirs, "40 %": ours}.items()
        }
        return Results(replace(grid, claims=claims), rows, ("c0de",), {"torch": "2.13"})

    return make


BASE = [[0.70, 0.71], [0.72, 0.71], [0.69, 0.70]]
BETTER = [[0.80, 0.82], [0.82, 0.80], [0.79, 0.80]]


@pytest.mark.parametrize("chance", [0.5, 0.75, None])
def test_scores_of_one_answer_to_all_say_nothing(chance):
    """In two balanced classes new weights may be below chance, and 52 % above them."""
    film = Judge("film", "finetune", {}, "model", True, None, None)
    points = [
        [{"examples": 9, "scores": {"accuracy": values, "f1": [0.1, 0.1]}}] for values in BASE
    ]
    contents = [{"points": each} | ({"chance": chance} if chance else {}) for each in points]
    [(_, scores)] = _of_judge(film, contents, None, (), True)
    assert ["one answer" in reason for reason in scores.early] == [True] * (chance == 0.75)
    one = [{**contents[0], "points": [{"examples": 9, "scores": {"accuracy": [0.70, 0.81, 0.80]}}]}]
    [(_, scores)] = _of_judge(film, one, None, (), False)  # of a model that is there
    assert bool(scores.early) == (chance == 0.75), "0.77 is above it, and its interval is not"
    [(_, scores)] = _of_judge(replace(film, figure="f1"), contents, None, (), True)
    assert not scores.early, "it is the chance of another figure"


def test_the_mean_over_tasks():
    """As GLUE's, of each seed; minimal pairs and losses are not among them."""
    film = Judge("film", "finetune", {}, "model", True, None, None)
    grid = SimpleNamespace(
        judges={"film": film, "tags": film, "blimp": replace(film, command="score")}
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
    with_order = SimpleNamespace(judges=grid.judges | {"order": order})
    assert (_mean_of(with_order, scores)["mean"].values == mean.values).all()
    for lacking in (
        {"film": scores["film"], "blimp": scores["blimp"]},
        scores | {"tags": Scores(np.array([[0.8], [0.8]]))},
        scores | {"tags": replace(scores["tags"], lower=True)},
    ):
        assert _mean_of(grid, lacking) == {}


def test_a_claim_that_holds(study):
    (found,) = compare(study(BETTER, BASE))
    assert found.verdict == AGREES and found.difference.interval.mean == pytest.approx(0.1)
    assert "The paper found 40 % better than 15 % (Wettig et al. 2023)" in found.text
    assert "+0.1000" in found.text and found.text.endswith(f"{AGREES}.")


def test_a_judge_that_the_paper_does_not_have(study):
    results = study(BETTER, BASE)
    claims = tuple(replace(claim, beyond=("sentiment",)) for claim in results.grid.claims)
    (found,) = compare(replace(results, grid=replace(results.grid, claims=claims)))
    assert "Wettig et al. 2023). By sentiment, which the paper does not have: here" in found.text


def test_differences_that_are_all_the_same_are_no_test(study):
    """As of few examples: their variance is 0, and any t would be infinite."""
    ours, theirs = [[0.75, 0.75]] * 2, [[0.5, 0.5]] * 2
    (found,) = compare(study(ours, theirs))
    assert found.verdict == CANNOT and "no test" in found.text


def test_a_seed_that_diverged_is_said(study):
    results = study(BETTER, BASE)
    row = replace(results.rows["15 %"], diverged=("15 %, seed 1",))
    text = page(replace(results, rows=results.rows | {"15 %": row}), [], picture=False)
    assert "15 %, seed 1: it diverged, or what it needs did, and so it has no figures." in text


def test_a_claim_that_does_not_hold(study):
    (found,) = compare(study(BASE, BETTER))
    assert found.verdict == DISAGREES
    (loss,) = compare(study(BASE, BETTER, on="held out: mlm_loss", lower=True))
    assert loss.verdict == AGREES, "of a loss, less is more"


@pytest.mark.parametrize(
    "ours, theirs, options",
    [
        ([[0.70, 0.70], [0.75, 0.74], [0.69, 0.71]], BASE, {}),  # inside the noise
        (BASE, BASE, {}),
        ([[0.9, 0.9]], [[0.7, 0.7]], {}),  # one seed
        (BETTER, BASE, {"early": ("its mlm_loss is not clearly below the unigram loss",)}),
        (BETTER[:2], BASE, {}),  # not as many seeds
    ],
)
def test_what_cannot_be_told(ours, theirs, options, study):
    (found,) = compare(study(ours, theirs, **options))
    assert found.verdict == CANNOT and CANNOT in found.text.lower()
    assert ("Too early to tell: 40 % and 15 %: its mlm_loss" in found.text) == bool(options)


def test_several_claims_are_corrected_together(study):
    """One comparison at p = .03 agrees; among five of them none does."""
    ours = np.array(BASE) + np.array([[0.05], [0.08], [0.04]])
    results = study(ours, BASE)
    (alone,) = compare(results)
    many = replace(results.grid, claims=results.grid.claims * 5)
    together = compare(replace(results, grid=many))
    assert alone.verdict == AGREES and {each.verdict for each in together} == {CANNOT}
    assert together[0].p == pytest.approx(5 * alone.p)
    assert "after Holm's correction for 5 comparisons" in together[0].text


def test_a_claim_about_a_curve_is_one_about_each_point(study):
    results = study(BETTER, BASE)
    rows = {
        name: replace(row, scores={f"sentiment {n}": row.scores["sentiment"] for n in (100, 1000)})
        for name, row in results.rows.items()
    }
    found = compare(replace(results, rows=rows))
    assert [each.on for each in found] == ["sentiment 100", "sentiment 1000"]


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
    devices = _devices([{"parameters": 1}, {"parameters": 1, "device": "cpu"}, {"points": []}])
    assert devices == (UNRECORDED, "cpu"), "of trainings alone"
    made = replace(results, devices=("cpu", UNRECORDED))
    shown = page(made, [], picture=False)
    assert f"Trained on cpu and {UNRECORDED}.\n\nCPU seconds of trainings on different" in shown
    assert "Trained on" not in page(replace(results, devices=(UNRECORDED,)), [], picture=False)


@pytest.mark.parametrize(
    "tried, said",
    [
        ({"1e-3": 2.0, "2e-3": 1.0, "4e-3": 1.5}, ""),
        ({"5e-4": 1.0, "1e-3": 2.0}, " The lowest of them is the best: a lower one may be better."),
        (
            {"1e-3": 2.0, "2e-3": 1.0},
            " The highest of them is the best: a higher one may be better.",
        ),
        ({"1e-3": 2.0, "2e-3": 1.0, "4e-3": None}, ""),  # the highest diverged
        ({"1e-3": 2.0, "2e-3": 1.0, "4e-3": 1.04}, " Within 0.05 nats of it: 4e-3."),
        (
            {"1e-3": 1.04, "2e-3": 1.0},
            " The highest of them is the best: a higher one may be better. Within 0.05 nats of it: "
            "1e-3.",
        ),
        ({"1e-3": 1.0}, ""),
        ({"1e-3": None, "2e-3": None}, ""),
    ],
)
def test_a_rate_at_the_end_of_those_that_were_tried(tried, said):
    assert _edge(min(tried, key=lambda rate: tried[rate] or math.inf), tried) == said


def test_a_rate_at_which_the_discriminator_learned_nothing():
    said = " 1e-3 is taken, as at 2e-3 the discriminator learned nothing."
    assert _edge("1e-3", {"5e-4": 5.5, "1e-3": 4.7, "2e-3": 4.5}) == said
    said += " The lowest of them is the best: a lower one may be better."
    assert _edge("1e-3", {"1e-3": 4.7, "2e-3": 4.5}) == said
    assert "learned nothing" not in _edge("1e-3", {"2e-3": 4.5, "1e-3": 4.5})  # a tie


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


def test_the_picture(study, tmp_path):
    results = study(BETTER, BASE)
    draw(tmp_path / "a.png", results)
    states = {"sentiment": [(0.5, Scores(np.array(BASE)))]}
    rows = {name: replace(row, states=states) for name, row in results.rows.items()}
    published = {"sentiment": {"5-gram": 0.61, "LSTM": 0.7}}
    draw(tmp_path / "b.png", replace(results, rows=rows, published=published))
    assert "sentiment, as published: 5-gram 0.610, LSTM 0.700." in page(
        replace(results, published=published), [], picture=False
    )
    assert panels(results) == ["sentiment"]
    assert all((tmp_path / f"{name}.png").stat().st_size > 5000 for name in "ab")
