"""The cells of a study: which there are, and on which choices they wait."""

from __future__ import annotations

import shutil

import pytest

from fastplm.errors import DataError
from fastplm.study.cells import Store
from fastplm.study.grid import HELD_OUT, MEAN, STUDIES, read_grid

from .conftest import changed, finish, plan_of


def test_the_cells_of_a_grid(place):
    plan = plan_of()
    labels = [cell.label for cell in plan.cells.values() if not cell.provisional]
    assert labels[:2] == ["15 % at 5.0e-4, seed 0", "15 % at 1.0e-3, seed 0"]
    assert "40 %, seed 0" in labels and "40 %, seed 1: pairs" in labels
    # The judges of 15 % wait for its learning rate.
    assert not plan.complete and not any(label.startswith("15 %, ") for label in labels)
    first = next(cell for cell in plan.cells.values() if cell.label == "40 %, seed 0")
    assert first.words == (
        *("--arch=bert-tiny", "--objective=mlm", "--corpus", str(place / "stories.txt")),
        *("--steps=3", "--batch-size=4", "--block-size=32", "--vocab-size=120"),
        *("--precision=fp32", "--mlm-probability=0.40", "--lr=1.0e-3", "--seed=0"),
        *(f"--cache={'cache'}", "--threads=1", "--report-to=none"),
    )


def test_the_rate_with_the_lowest_loss_is_taken(place):
    plan = plan_of()
    by_label = {cell.label: cell for cell in plan.cells.values() if not cell.provisional}
    finish(by_label["15 % at 5.0e-4, seed 0"], held_out={"mlm_loss": 4.0})
    assert not plan_of().complete, "one rate is not known yet"
    finish(by_label["15 % at 1.0e-3, seed 0"], held_out={"mlm_loss": 3.5})
    plan = plan_of()
    assert plan.complete and plan.variants["15 %"].rate == "1.0e-3"
    assert plan.variants["15 %"].tried == {"5.0e-4": 4.0, "1.0e-3": 3.5}
    # The first seed is the cell that was tried.
    assert plan.variants["15 %"].trainings[0].key == by_label["15 % at 1.0e-3, seed 0"].key
    finish(by_label["15 % at 1.0e-3, seed 0"], held_out={}, diverged=True)
    assert plan_of().variants["15 %"].rate == "5.0e-4", "a rate that diverges loses"
    finish(by_label["15 % at 5.0e-4, seed 0"], held_out={}, diverged=True)
    with pytest.raises(DataError, match="15 %, which diverged at 5.0e-4, 1.0e-3"):
        plan_of()


def test_a_rate_at_which_the_discriminator_learns_is_taken(place):
    """One of a lower loss may suit the generator alone; one that diverges is worse still."""
    by_label = {cell.label: cell for cell in plan_of().cells.values()}
    low, high = (by_label[f"15 % at {rate}, seed 0"] for rate in ("5.0e-4", "1.0e-3"))
    learned = {"mlm_loss": 4.9, "rtd_loss": 0.41, "words_balanced_accuracy": 0.61}
    not_yet = {"mlm_loss": 4.7, "rtd_loss": 0.45, "words_balanced_accuracy": 0.5}
    for held_out, other, rate in (
        ((learned, not_yet), {}, "5.0e-4"),
        ((not_yet, not_yet | {"mlm_loss": 4.6}), {}, "1.0e-3"),
        ((not_yet, {}), {"diverged": True}, "5.0e-4"),
    ):
        finish(low, held_out=held_out[0])
        finish(high, held_out=held_out[1], **other)
        assert plan_of().variants["15 %"].rate == rate


def test_variants_of_one_shape_share_the_model_without_pretraining(place):
    """A masking rate does not change new weights; a vocabulary does."""
    changed(place, "lr: [5.0e-4, 1.0e-3]", "lr: 5.0e-4")

    def scratch():
        return {v.scratch["sentiment"].key for v in plan_of().variants.values()}

    assert len(scratch()) == 1
    changed(place, "0.40, lr", "0.40, vocab_size: 130, lr")
    assert len(scratch()) == 2


def test_models_that_read_from_left_to_right_have_new_weights_of_their_own(all_data):
    """A model of new weights is one of the same attention, too."""
    variants = plan_of("causal-or-masked", "tiny", all_data).variants
    ours, theirs = (variants[name].scratch["tags"] for name in ("BERT", "BERT, left to right"))
    assert ours.key != theirs.key


def test_a_model_of_another_variant(place):
    second = '  second: {start_from: {variant: "40 %"}, vocab_size: null}'
    changed(place, "judges:", f"{second}\njudges:")
    plan = plan_of()
    ours, theirs = plan.variants["second"].trainings, plan.variants["40 %"].trainings
    assert [cell.needs for cell in ours] == [(each,) for each in theirs]
    folder = Store("cells").at(theirs[1]) / "run/model"
    assert f"--start-from={folder}" in ours[1].words


def test_variants_that_share_their_models(place):
    """Nothing is trained for a variant that takes another one's models, and few may judge it."""
    frozen = '  frozen: {model_of: "40 %", finetune: {freeze: true}, judges: [sentiment]}'
    changed(place, "judges:", f"{frozen}\njudges:")
    planned = plan_of().variants
    theirs, ours = planned["40 %"], planned["frozen"]
    assert ours.trainings == theirs.trainings and list(ours.evaluations) == [("sentiment", 1.0)]
    cells = ours.evaluations["sentiment", 1.0]
    assert [cell.label for cell in cells] == [
        f"frozen of 40 %, seed {seed}: sentiment" for seed in (0, 1)
    ]
    assert not ours.scratch and theirs.scratch, "new weights cannot be frozen"
    assert all("--freeze" in cell.words and cell.config is not None for cell in cells)


def test_new_weights_have_other_seeds_in_each_row(place):
    """Nothing of them is pre-trained: with the same seeds all rows would be one training."""
    new = '  new: {model_of: "40 %", finetune: {from_scratch: true}, judges: [sentiment]}'
    changed(place, "judges:", f"{new}\njudges:")
    planned = plan_of().variants
    cells = planned["new"].evaluations["sentiment", 1.0]
    assert [[w for w in cell.words if "seed=" in w] for cell in cells] == [
        ["--seed=0"],
        ["--seed=2"],
    ]
    theirs = planned["40 %"].evaluations["sentiment", 1.0]
    assert not any("seed=" in word for cell in theirs for word in cell.words)


def test_states_of_a_training_are_judged(place):
    """They are known when the training is finished: those after equal shares of its steps."""
    changed(place, "question:", "curve: 2\nquestion:")
    changed(place, "arch: bert-tiny\n  objective: mlm", "arch: electra-tiny")
    states = [cell for cell in plan_of().cells.values() if "after 50%" in cell.label]
    assert states and all(cell.provisional for cell in states)
    trainings = plan_of().variants["40 %"].trainings
    for number, cell in enumerate(trainings, 1):
        assert "--states=2" in cell.words
        finish(cell, held_out={})
        for step in (1, 2, 3, 4):
            (Store("cells").at(cell) / f"run/checkpoint-{step}").mkdir(parents=True)
        # Where other seeds are not finished, those of this one can be judged.
        states = plan_of().variants["40 %"].evaluations["pairs", 0.5]
        assert [state.provisional for state in states] == [False] * number + [True] * (2 - number)
        assert f"--model={Store('cells').at(cell) / 'run/checkpoint-2'}" in states[number - 1].words
    judged = plan_of().variants["40 %"].evaluations
    for cell, training in zip(judged["pairs", 0.5], trainings, strict=True):
        state = Store("cells").at(training) / "run/checkpoint-2"
        assert {f"--model={state}", "--part=discriminator"} <= {*cell.words}
    for cell, training in zip(judged["pairs", 1.0], trainings, strict=True):
        assert f"--model={Store('cells').at(training) / 'run/discriminator'}" in cell.words
    (Store("cells").at(trainings[0]) / "run/checkpoint-40").mkdir()
    with pytest.raises(DataError, match="no state after 50% of its steps"):
        plan_of()
    finish(trainings[0], held_out={}, diverged=True)
    (judge, _) = plan_of().variants["40 %"].evaluations["pairs", 0.5]
    assert not judge.provisional and judge.needs == trainings[:1], "it ends without a model"
    shutil.rmtree(Store("cells").at(trainings[1]) / "run")
    with pytest.raises(DataError, match="no state after 50% of its steps"):
        plan_of()
    changed(place, "arch: electra-tiny", "arch: electra-tiny\n  two_stage: true")
    with pytest.raises(DataError, match="which has two stages"):
        plan_of()


@pytest.mark.parametrize("size", ["tiny", "small", "full"])
@pytest.mark.parametrize("name", sorted(path.stem for path in STUDIES.glob("*.yaml")))
def test_every_study_that_comes_along_can_be_planned(all_data, name, size):
    """All its settings are valid together, in each size; and its claims are of what it judges."""
    grid = read_grid(name, size)
    plan = plan_of(name, size, all_data)
    assert len(plan.cells) > 4 and all(cell.cost > 0 for cell in plan.cells.values())
    judged = {judge for each in plan.variants.values() for judge, _ in each.evaluations}
    asked = {on for claim in grid.claims for on in claim.on} - {MEAN}
    assert asked <= judged | {on for on in asked if on.startswith(HELD_OUT)}


def test_studies_share_their_trainings(all_data):
    """A model is trained once for several studies, as often as each of them needs it."""
    keys = {}
    for name in ("objectives", "electra", "causal-or-masked"):
        for variant, each in plan_of(name, "tiny", all_data).variants.items():
            keys[name, variant] = [cell.key for cell in each.trainings]
    ours, theirs = keys["objectives", "ELECTRA"], keys["electra", "generator 1/4"]
    assert theirs and theirs == ours[: len(theirs)] != keys["objectives", "MLM"][: len(theirs)]
    assert keys["causal-or-masked", "ELECTRA"] == ours
    assert keys["causal-or-masked", "BERT"] == keys["objectives", "MLM"]
