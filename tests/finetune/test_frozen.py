"""Frozen encoders: each text is computed once, and nothing else changes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from fastplm.finetune import frozen
from fastplm.finetune.data import prepare_task
from fastplm.finetune.models import build_model
from fastplm.finetune.run import compute_once, finetune
from fastplm.finetune.settings import LIBRARIES
from fastplm.finetune.tasks._task import Task, predict
from fastplm.finetune.trainer import make_trainer
from fastplm.testing import FORWARD_FACTOR, check_error

from .conftest import COUNT


def trained(task: Task) -> tuple:
    """The losses of a run in fp64, and its trainer."""
    trainer = make_trainer(task, build_model(task, 3).double(), 3, task.args.out)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return torch.tensor(losses, dtype=torch.float64), trainer


def calls_of(monkeypatch) -> list[int]:
    """A list to which each forward of an encoder adds its number of texts."""
    calls: list[int] = []
    forward = transformers.BertModel.forward

    def counted(self, input_ids=None, **inputs):
        given = inputs["attention_mask"] if input_ids is None else input_ids
        calls.append(given.shape[0])
        return forward(self, input_ids, **inputs)

    monkeypatch.setattr(transformers.BertModel, "forward", counted)
    return calls


@pytest.mark.slow
@pytest.mark.parametrize(
    "task, options", [("classification", {}), ("tagging", {"features": "mix"})]
)
def test_each_example_is_computed_once(task, options, arguments, monkeypatch):
    """No epoch or seed computes an example twice. The encoder's weights stay, the head's change."""
    options = {"freeze": True, "steps": 20, "seeds": 2, "learning_rate": 1e-2, **options}
    args = arguments(task, library="transformers", **options)
    calls = calls_of(monkeypatch)
    metrics = finetune(args)
    # The examples to train on are also those to score, and some of them are equal.
    assert sum(calls) <= COUNT
    before = transformers.AutoModel.from_pretrained(args.model).state_dict()
    heads = []
    for run in metrics["seeds"]:
        state = load_file(Path(run["model"]) / "model.safetensors")
        for name, value in before.items():
            for prefix in ("bert.", "encoder."):
                if prefix + name in state:
                    assert torch.equal(state[prefix + name], value)
                    break
            else:
                assert "pooler." in name and "features" in options
        heads.append(state["classifier.weight"])
        losses = [entry["loss"] for entry in run["history"]]
        assert sum(losses[-5:]) < sum(losses[:5])
    assert not torch.equal(*heads)


@pytest.mark.slow
@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize(
    "task, options",
    [
        ("regression", {}),
        ("tagging", {"features": "last-four", "model": "deep"}),
        ("classification", {"pooling": "cls", "model": "albert"}),
        ("tagging", {}),
        ("classification", {"head": "bilstm"}),
        ("classification", {"model": "electra"}),
    ],
)
def test_what_is_remembered_changes_no_loss(task, options, library, arguments, monkeypatch):
    """Remembered states change no loss, nor does the library, nor an encoder without gradients."""
    options = {"freeze": True, "dropout": 0.0, "steps": 8, "batch_size": 8, **options}
    losses, _ = trained(prepare_task(arguments(task, library=library, **options)))  # keeps nothing
    prepared = prepare_task(arguments(task, library=library, **options))
    trainer = make_trainer(prepared, build_model(prepared, 3).double(), 3, prepared.args.out)
    compute_once(trainer)
    kept = prepared.dataset.kept
    assert len(kept) == len({tuple(f["input_ids"]) for f in prepared.dataset.features})
    trainer.train()
    again = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    # The remembered states are fp32.
    torch.testing.assert_close(torch.tensor(again).double(), losses, rtol=1e-5, atol=1e-6)
    theirs, _ = trained(prepare_task(arguments(task, library=LIBRARIES[0], **options)))
    check_error("losses", losses.float(), theirs, [theirs.float()], FORWARD_FACTOR)


@pytest.mark.slow
def test_a_new_pooler_is_trained(arguments):
    for model, name in (
        ("poolerless", "bert.pooler.dense.weight"),
        ("albert-mlm", "albert.pooler.weight"),
    ):
        for library in LIBRARIES:
            args = arguments("classification", model, freeze=True, library=library, steps=6)
            task = prepare_task(args)
            before = build_model(task, 3).state_dict()[name].clone()
            _, trainer = trained(task)
            learned = [n for n, p in trainer.model.named_parameters() if p.requires_grad]
            assert name in learned and len([n for n in learned if "encoder" in n]) == 0
            assert not torch.equal(trainer.model.state_dict()[name].float(), before)
    model = build_model(prepare_task(arguments("classification", freeze=True)), 3)
    assert not any(p.requires_grad for n, p in model.named_parameters() if "pooler" in n)


def test_too_many_states_are_not_kept(arguments, monkeypatch):
    monkeypatch.setattr(frozen, "MOST_BYTES", 100)
    task = prepare_task(arguments("classification", freeze=True, steps=20))
    trainer = make_trainer(task, build_model(task, 3), 3, task.args.out)
    compute_once(trainer)
    assert not task.dataset.kept
    assert len(predict(trainer, task, task.dataset.features)) == len(task.dataset)
