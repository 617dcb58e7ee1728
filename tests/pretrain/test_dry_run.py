"""What a dry run says, and that it is what the run needs."""

from __future__ import annotations

import json
import re

import pytest
import transformers

from fastplm.cli import _parser, main
from fastplm.data import pairs
from fastplm.errors import ArgumentValueError
from fastplm.pretrain import dry_run
from fastplm.pretrain import run as module
from fastplm.pretrain.objectives import objective_of
from fastplm.study.costs import cost_of

from .conftest import flops_of


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
    planned = re.search(r"7 steps of (\d+) tokens \(4 samples\): (\d+) tokens", rows["training"])
    of_step, tokens = map(int, planned.groups())
    # A pair has fewer tokens than a block of 32.
    assert 0.9 * 128 < of_step < 128 and abs(tokens - 7 * of_step) <= 7
    flops = float(rows["FLOPs"].split()[1])
    assert flops == pytest.approx(metrics["flops_per_token"] * tokens, rel=0.01)
    assert metrics["flops"] == pytest.approx(flops, rel=0.1)
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


SHORT = {"short_block_size": 16, "short_share": 0.9}


@pytest.mark.parametrize(
    ("arch", "objective", "short"),
    [
        pytest.param("bart-tiny", "denoise", {}, id="denoise"),
        pytest.param("bert-tiny", "mlm+nsp", {}, id="nsp", marks=pytest.mark.slow),
        pytest.param("albert-tiny", "mlm+sop", SHORT, id="sop, short", marks=pytest.mark.slow),
    ],
)
def test_a_budget_pays_for_the_tokens_that_are_read(
    run, settings, corpus, tmp_path, monkeypatch, arch, objective, short
):
    """BART's span that became one token is not read, nor what was cut from a pair."""
    monkeypatch.setattr("fastplm.pretrain.trainer._TIMED_SECONDS", 0.0)
    few = corpus.read_text().replace("\n\n", "\n").split("\n", 70)  # 70 short, and a long one
    (tmp_path / "few.txt").write_text("\n".join(few[:-1]) + "\n\n" + few[-1])
    budget = {"steps": None, "flops": 4e10, "block_size": 64, "vocab_size": 300}
    budget |= {"arch": arch, "objective": objective, "corpus": tmp_path / "few.txt", **short}
    metrics = run(tmp_path / "out", **budget)
    a_step = 4e10 / metrics["arguments"]["steps"]
    assert abs(metrics["flops"] - 4e10) < 2 * a_step
    args = settings(tmp_path / "no", dry_run=True, **budget)
    figures = dry_run.dry_run(args)
    assert figures["steps"] == metrics["arguments"]["steps"]
    assert 4e10 - a_step < figures["flops"] <= 4e10
    config = transformers.AutoConfig.from_pretrained(tmp_path / "out" / "model")
    expected = pytest.approx(figures["flops"], rel=1e-12)
    assert cost_of("pretrain", args.changed(flops=None, steps=figures["steps"]), config) == expected
    if short:
        of_pieces, of_whole = map(pairs.SentenceOrderPairs.expected_length, (16, 64))
        length = objective_of(args, None).source_length
        assert length == pytest.approx(0.9 * 4 * of_pieces + 0.1 * of_whole)


def test_a_dry_run_of_a_budget(settings, tmp_path, bert, monkeypatch):
    monkeypatch.setattr("fastplm.pretrain.trainer._TIMED_SECONDS", 0.0)
    options = {"flops": 1e9, "seeds": 2, "start_from": bert / "model", "vocab_size": None}
    args = settings(tmp_path / "out", steps=None, dry_run=True, **options)
    figures = dry_run.dry_run(args)
    a_step = flops_of(json.loads((bert / "metrics.json").read_text()), bert)
    steps = figures["steps"]
    assert steps == 1e9 // a_step > 1 and figures["flops"] == steps * a_step
    assert f"1e+09 FLOPs pay for {steps} steps" in figures["rows"]["budget"]
    assert figures["rows"]["seeds"] == "2 runs; the figures are of one"
    assert not (tmp_path / "out").exists()


def test_units_that_fit():
    assert [dry_run._duration(x) for x in (2e-5, 0.4, 1.06, 75, 21132, 1e6)] == [
        *("0.02 ms", "400 ms", "1.06 s", "1.25 minutes", "5.87 hours", "11.6 days")
    ]
    sizes = [dry_run._bytes(x) for x in (0, 1 << 20, 279_000_000, 80 << 30)]
    assert sizes == ["0.00 KiB", "1.00 MiB", "266 MiB", "80.0 GiB"]
