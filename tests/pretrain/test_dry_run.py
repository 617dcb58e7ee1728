from __future__ import annotations

import pytest

from fastplm.cli import _parser, main
from fastplm.errors import ArgumentValueError
from fastplm.pretrain import dry_run
from fastplm.pretrain import run as module


@pytest.fixture
def few_steps(monkeypatch):
    """Three steps are timed, even if they are short."""
    monkeypatch.setattr("fastplm.pretrain.trainer._TIMED_SECONDS", 0.0)


@pytest.mark.slow
def test_dry_run(arguments, corpus, tmp_path, capfd, monkeypatch, run):
    out, cache = tmp_path / "out", tmp_path / "cache"
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "scratch"))
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr("fastplm.pretrain.trainer._TIMED_SECONDS", 0.0)
    assert main(arguments(out, cache=cache, steps=7, dry_run=True)) == 0
    shown = capfd.readouterr()
    rows = {line.split("  ")[0]: line for line in shown.out.splitlines()}
    assert not out.exists() and not cache.exists() and not any((tmp_path / "scratch").iterdir())
    assert "Warning" not in shown.err
    # The run itself prints the same figures.
    monkeypatch.undo()
    metrics = run(out, steps=7)
    announced = capfd.readouterr().err
    assert rows["model"] in announced and rows["vocabulary"] in announced.replace(" (found", "\n")
    assert f"{metrics['parameters']:,} parameters" in rows["model"]
    assert "6,264 tokens" in rows["corpus"] and "6,264 tokens" in announced
    assert "7 steps of 128 tokens (4 samples): 896 tokens" in rows["training"]
    assert f"{metrics['flops_per_token'] * 896:.3g}" in rows["FLOPs"]
    # A pair has fewer tokens than a block.
    assert 0 < metrics["flops"] <= metrics["flops_per_token"] * 896
    for name in ("memory", "speed", "time", "learning rate", "device", "precision"):
        assert name in rows


def test_a_dry_run_counts_bytes(arguments, tmp_path, few_steps):
    settings = vars(_parser().parse_args(arguments(tmp_path / "out", dry_run=True)))
    settings.pop("command")
    figures = dry_run.dry_run(module.PretrainArguments(**settings))
    weights = 4 * figures["parameters"]
    assert figures["weights_bytes"] == weights
    # Two moments of each weight, and the steps of AdamW.
    assert 2 * weights <= figures["optimizer_bytes"] < 2.1 * weights
    assert figures["micro_batch_bytes"] > weights  # it includes the gradients
    assert figures["seconds"] == 6 * figures["seconds_per_step"]


@pytest.mark.slow
def test_a_dry_run_reads_the_beginning(arguments, tmp_path, monkeypatch, few_steps):
    settings = vars(_parser().parse_args(arguments(tmp_path / "out", dry_run=True)))
    settings.pop("command")
    args = module.PretrainArguments(**settings).plan()
    whole = dry_run.dry_run(args)
    monkeypatch.setattr(dry_run, "_LETTERS", 10_000)
    part = dry_run.dry_run(args)
    assert "estimated from the first 10," in part["rows"]["corpus"]
    assert "estimated" not in whole["rows"]["corpus"]
    assert abs(part["corpus_tokens"] - whole["corpus_tokens"]) < 0.05 * whole["corpus_tokens"]


@pytest.mark.slow
def test_a_dry_run_times_both_stages(arguments, tmp_path, monkeypatch, few_steps):
    options = {"arch": "electra-tiny", "two_stage": True, "dry_run": True, "steps": 10}
    settings = vars(_parser().parse_args(arguments(tmp_path / "out", **options)))
    settings.pop("command")
    seconds, rehearse, stages = [], module.rehearse, []

    def recorded(*args, **kwargs):
        found = rehearse(*args, **kwargs)
        seconds.append(found.seconds)
        stages.append(found.trainer.model.config.stage)
        return found

    monkeypatch.setattr(module, "rehearse", recorded)
    figures = dry_run.dry_run(module.PretrainArguments(**settings))
    assert stages == [1, 2]
    assert figures["seconds"] == pytest.approx(10 * sum(seconds) / 2)
    with pytest.raises(ArgumentValueError, match="dry_run"):
        module.pretrain(module.PretrainArguments(**settings))
    # The moments belong to one of two equal encoders, with its head.
    assert figures["optimizer_bytes"] < 1.5 * figures["weights_bytes"]


def test_a_dry_run_neither_resumes_nor_overwrites(arguments, tmp_path, refused):
    for option in ("resume", "overwrite"):
        refused(arguments(tmp_path / "out", dry_run=True, **{option: True}), "dry_run", option)
