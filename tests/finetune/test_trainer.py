"""The steps of a fine-tuning: both libraries, and batches that depend on the seed alone."""

from __future__ import annotations

import itertools
import statistics

import pytest
import torch

from fastplm.finetune.data import prepare_task
from fastplm.finetune.models import build_model, usual_learning_rate
from fastplm.finetune.run import finetune
from fastplm.finetune.settings import LIBRARIES
from fastplm.finetune.tasks._task import FeatureDataset
from fastplm.finetune.trainer import make_trainer
from fastplm.run.optimizer import Adafactor
from fastplm.testing import FORWARD_FACTOR, check_error

from .conftest import FILES, LETTERS, STARTS, needs_csrc

SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "task, model, options",
    [
        *((task, "bert", {}) for task in ("regression", "qa")),
        *(
            pytest.param(task, "bert", {}, marks=SLOW)
            for task in FILES
            if task not in ("regression", "qa")
        ),
        ("pair", "gpt2", {"both_orders": True, "lm_weight": 0.5}),
        ("choice", "gpt", {"lm_weight": 0.5}),
        pytest.param("choice", "gpt2", {}, marks=SLOW),
        pytest.param("regression", "gpt", {"both_orders": True}, marks=SLOW),
        pytest.param("classification", "gpt", {"lm_weight": 2.0}, marks=SLOW),
    ],
)
def test_both_libraries_have_the_same_losses(task, model, options, arguments, tmp_path):
    """Both libraries have the same batches, order, head and steps, and differ by rounding alone.

    The questions' windows have one length, as Transformers' softmax includes padding.
    """

    def losses(library):
        prepared = prepare_task(arguments(task, model, library=library, dropout=0.0, **options))
        if task == "qa":
            usual = statistics.mode(prepared.dataset.lengths)
            windows = [f for f in prepared.dataset.features if len(f["input_ids"]) == usual]
            prepared.dataset = FeatureDataset(windows)
        trainer = make_trainer(prepared, build_model(prepared, 3).double(), 3, tmp_path / "out")
        trainer.train()
        values = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        assert len(values) == prepared.args.steps
        return torch.tensor(values, dtype=torch.float64)

    ours, gold = map(losses, LIBRARIES)
    # In fp64, results may differ only by the rounding of an fp32 number.
    check_error("losses", ours.float(), gold, [gold.float()], FORWARD_FACTOR)


@pytest.mark.slow
@pytest.mark.parametrize("start", ["t5", "bart", "bert2bert"])
def test_both_libraries_write_the_same_losses(start, writing):
    runs = [finetune(writing(start, library, library=library)) for library in LIBRARIES]
    ours, theirs = ([entry["loss"] for entry in run["seeds"][0]["history"]] for run in runs)
    assert ours == pytest.approx(theirs, rel=1e-4)


@pytest.mark.slow
def test_batches_depend_on_the_seed_alone(arguments, tmp_path):
    def batches(library, seed):
        task = prepare_task(arguments("classification", library=library, steps=18))
        model = build_model(task, seed)
        trainer = make_trainer(task, model, seed, tmp_path / "out")
        seen, collate = [], trainer.data_collator

        def record(features):
            batch = collate(features)
            seen.append(batch["input_ids"].tolist())
            return batch

        trainer.data_collator = record
        trainer.train()
        return seen[:18], model.state_dict()

    ours, weights = batches("fastplm", 0)
    again, same_weights = batches("fastplm", 0)
    assert all(torch.equal(weights[name], same_weights[name]) for name in weights)
    other, other_weights = batches("fastplm", 1)
    assert not all(torch.equal(weights[name], other_weights[name]) for name in weights)
    # The runs have dropout, drawn differently by the libraries, and two epochs.
    theirs, _ = batches("transformers", 0)
    assert ours == again == theirs != other
    assert ours[:4] != ours[14:]
    # Samples of similar length share a batch; in the order of the file they would not.
    grouped = sum(len(batch) * len(batch[0]) for batch in ours[:14])
    lengths = prepare_task(arguments("classification")).dataset.lengths
    parts = [lengths[i : i + 4] for i in range(0, len(lengths), 4)]
    assert grouped < sum(len(part) * max(part) for part in parts)


@needs_csrc
@pytest.mark.parametrize(
    "task, model",
    [
        *(pytest.param(task, "bert", marks=SLOW) for task in FILES),
        *itertools.product(("pair", "regression", "classification", "choice"), LETTERS),
    ],
)
def test_dropout_does_not_depend_on_the_batch(task, model, arguments, one_step_of):
    whole, *split = one_step_of(arguments(task, model, dropout=0.1))
    assert split == pytest.approx([whole] * len(split), rel=1e-5)
    if model == "bert":
        other, *_ = one_step_of(arguments(task, dropout=0.11))
        assert abs(other - whole) > 1e-4 * whole, "dropout is seen in these digits"


@needs_csrc
@pytest.mark.slow
@pytest.mark.parametrize("start", STARTS)
def test_dropout_of_writers_does_not_depend_on_the_batch(start, writing, one_step_of):
    whole, *split = one_step_of(writing(start, dropout=0.1))
    assert split == pytest.approx([whole] * len(split), rel=1e-5)


def test_a_score_at_the_end_of_an_epoch_is_taken_once(arguments):
    """The Trainer asks for scores after the last step of an epoch, and after the epoch."""
    options = {"steps": None, "epochs": 2, "max_samples": 20, "batch_size": 10, "eval_every": 1}
    result = finetune(arguments("classification", **options))["seeds"][0]
    assert result["steps"] == 4
    assert [entry["step"] for entry in result["scores_by_step"]] == [1, 2, 3]


@pytest.mark.slow
def test_scores_on_the_way_change_nothing(writing):
    plain = finetune(writing("bart", "plain", dropout=0.1))["seeds"][0]
    scored = finetune(writing("bart", "scored", dropout=0.1, eval_every=2))["seeds"][0]
    assert [e["loss"] for e in plain["history"]] == [e["loss"] for e in scored["history"]]
    assert plain["scores"] == scored["scores"]
    assert [entry["step"] for entry in scored["scores_by_step"]] == [2]
    assert scored["scores_by_step"][0].keys() >= scored["scores"].keys()


@pytest.mark.slow
def test_adafactor_learns_at_a_constant_rate(writing):
    args = writing("t5", steps=20, optimizer="adafactor", learning_rate=0.02, log_every=1)
    assert args.weight_decay == 0.0
    assert usual_learning_rate(args, None) == 1e-3
    task = prepare_task(args)
    trainer = make_trainer(task, build_model(task, 0), 0, args.out)
    trainer.train()
    assert isinstance(trainer.optimizer.optimizer, Adafactor)
    rates = [entry["learning_rate"] for entry in trainer.state.log_history if "loss" in entry]
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert rates[:2] == [0.0, 0.01] and set(rates[2:]) == {0.02}
    assert losses[-1] < 0.8 * losses[0]
