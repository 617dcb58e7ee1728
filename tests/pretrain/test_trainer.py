"""The Trainer of a pre-training: stages, batches and processes."""

from __future__ import annotations

import json

import pytest
import torch
import transformers

from fastplm import _extension
from fastplm.pretrain import run as module
from fastplm.testing import FORWARD_FACTOR, check_error

from .conftest import check_logged


@pytest.mark.slow
def test_two_stages(run, tmp_path):
    out = tmp_path / "out"
    options = {"arch": "electra-tiny", "two_stage": True, "steps": 9, "log_every": 3, "warmup": 2}
    options["save_every"] = 9
    metrics = run(out, **options)
    history = metrics["history"]
    # The generator has four steps, and the last ends a window of the log; the discriminator has
    # five.
    assert [entry["step"] for entry in history] == [1, 3, 4, 6, 9]
    assert ["rtd_loss" in entry for entry in history] == [False, False, False, True, True]
    assert history[2]["mlm_loss"] < history[0]["mlm_loss"]
    assert history[4]["rtd_loss"] < history[3]["rtd_loss"]
    for entry in history:  # each has one of the two losses, without its weight of 50
        part = torch.tensor(entry.get("rtd_loss", entry["mlm_loss"]))
        check_logged(part, entry["loss"])
    # The rate goes up in two steps and down to the end, twice.
    factors = [0.0, 1.0, 1 / 2, 1 / 2, 1 / 3]
    assert [entry["learning_rate"] for entry in history] == [1e-3 * factor for factor in factors]
    assert json.loads((out / "run.json").read_text())["two_stage"] is True
    assert transformers.ElectraForPreTraining.from_pretrained(out / "discriminator")


# The run resumes from the last checkpoint of the first stage, or from one of the second.


@pytest.mark.parametrize(
    "options",
    [
        *(
            pytest.param({"arch": arch}, marks=pytest.mark.slow)
            for arch in ("bert-tiny", "albert-tiny", "electra-tiny")
        ),
        pytest.param({"arch": "electra-tiny", "two_stage": True}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_two_processes_are_one_with_twice_the_batch(
    options, run, arguments, in_two_processes, tmp_path, monkeypatch
):
    options = {**options, "dropout": 0, "steps": 4, "save_every": 100}
    one = run(tmp_path / "one", batch_size=8, **options)
    accumulated = run(tmp_path / "accumulated", gradient_accumulation=2, **options)
    in_two_processes(arguments(tmp_path / "two", **options))
    two = json.loads((tmp_path / "two" / "metrics.json").read_text())
    assert two["processes"] == 2
    make_model = module.make_model
    monkeypatch.setattr(module, "make_model", lambda *args: make_model(*args).double())
    exact = run(tmp_path / "exact", batch_size=8, **options)
    names = [name for name in one["history"][0] if name.endswith("loss")]
    curves = [
        torch.tensor([[entry[name] for name in names] for entry in metrics["history"]])
        for metrics in (exact, two, one, accumulated)
    ]
    gold, out, *bases = (curve.double() / curves[0] for curve in curves)
    assert out.shape == (4, len(names))
    check_error("losses", out.float(), gold, [base.float() for base in bases], FORWARD_FACTOR)


ARCHS = ("bert", "roberta", "albert", "electra", "gpt", "gpt2", "bart", "t5")


@pytest.mark.skipif(_extension.lacks("dropout_rows", "CPU") is not None, reason="no csrc/")
@pytest.mark.parametrize(
    "arch",
    [pytest.param(f"{arch}-tiny", marks=[pytest.mark.slow] * (arch != "albert")) for arch in ARCHS],
)
def test_dropout_does_not_depend_on_the_batch(
    arch, run, arguments, in_two_processes, tmp_path, request
):
    """The losses of one batch, of accumulated batches and of two processes differ by rounding."""
    options = {"arch": arch, "steps": 2, "dropout": 0.1, "save_every": 100}
    if arch != "t5-tiny":
        options["attention_dropout"] = 0.1
    if arch not in ("bert-tiny", "albert-tiny", "electra-tiny"):
        options["vocab_size"] = 300

    def losses(metrics):
        history = metrics["history"]
        names = [name for name in history[0] if name.endswith("loss")]
        return torch.tensor([[entry[name] for name in names] for entry in history])

    one = losses(run(tmp_path / "one", batch_size=8, **options))
    runs = []
    for count in (2, 4):
        parts = {"batch_size": 8 // count, "gradient_accumulation": count}
        runs.append(run(tmp_path / f"{count} parts", **parts, **options))
    if request.node.get_closest_marker("slow"):
        in_two_processes(arguments(tmp_path / "two", **options))
        runs.append(json.loads((tmp_path / "two" / "metrics.json").read_text()))
    for metrics in runs:
        torch.testing.assert_close(losses(metrics), one, rtol=1e-5, atol=1e-6)
    other = losses(run(tmp_path / "other", batch_size=8, **options | {"dropout": 0.11}))
    assert ((other - one).abs() > 1e-4 * one)[0].any(), "dropout is seen in these digits"
