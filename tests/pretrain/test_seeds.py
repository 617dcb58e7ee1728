"""Several runs that differ in their seed."""

from __future__ import annotations

import json
import math
import shutil

import pytest
import torch


def test_seeds(run, tmp_path, curve, capsys):
    out, options = tmp_path / "out", {"seeds": 2, "steps": 4}
    run(out, **options)
    done = (out / "seed-0" / "metrics.json").read_bytes()
    # As a process leaves it that was killed in the second run, after its first checkpoint.
    for folder, names in ((out, ()), (out / "seed-1", ("model", "checkpoint-4"))):
        for name in ("metrics.json", "manifest.json"):
            (folder / name).unlink()
        for name in names:
            shutil.rmtree(folder / name)
    capsys.readouterr()
    metrics = run(out, resume=True, **options)
    said = capsys.readouterr()
    assert "all 4 steps of it: nothing was changed" in said.err and "seed 1" in said.out
    assert (out / "seed-0" / "metrics.json").read_bytes() == done
    parts = [json.loads((out / f"seed-{i}" / "metrics.json").read_text()) for i in range(2)]
    assert parts[1]["starts"] == [0, 2] and [each["seed"] for each in metrics["seeds"]] == [0, 1]
    losses = torch.tensor([part["held_out"]["mlm_loss"] for part in parts], dtype=torch.float64)
    assert losses[0] != losses[1]
    found = metrics["held_out"]["mlm_loss"]
    assert found["mean"] == pytest.approx(losses.mean().item())
    # Student's t of one degree of freedom.
    width = math.tan(math.pi * 0.475) * losses.std().item() / 2**0.5
    assert found["half_width"] == pytest.approx(width)
    assert "held out: mlm loss" in said.out
    # One seed is the run that it was, without folders.
    alone = run(tmp_path / "one", steps=4, seed=1)
    assert curve(alone) == curve(parts[1])
    assert not list((tmp_path / "one").glob("seed-*"))


@pytest.mark.slow
def test_killed_seeds_are_resumed(run, arguments, killed, tmp_path, curve):
    out, options = tmp_path / "out", {"seeds": 2, "steps": 4}
    whole = run(tmp_path / "whole", threads=1, **options)
    # Before the first checkpoint of a seed it begins again; after it, it continues.
    for steps, seed in ((1, 0), (3, 0), (1, 1), (3, 1)):
        again = {"resume": True} if out.exists() else {}
        killed(arguments(out, threads=1, **options, **again), steps, seed)
    metrics = run(out, resume=True, threads=1, **options)
    assert metrics["held_out"] == whole["held_out"] and metrics["loss"] == whole["loss"]
    for seed in ("seed-0", "seed-1"):
        assert curve(out / seed) == curve(tmp_path / "whole" / seed)
    # More seeds continue the run.
    metrics = run(out, resume=True, steps=4, seeds=3)
    assert [each["seed"] for each in metrics["seeds"]] == [0, 1, 2]


@pytest.mark.slow
def test_seeds_in_two_processes(arguments, in_two_processes, run, tmp_path):
    options = {"seeds": 2, "steps": 2, "dropout": 0}
    in_two_processes(arguments(tmp_path / "two", batch_size=2, **options))
    two = json.loads((tmp_path / "two" / "metrics.json").read_text())
    one = run(tmp_path / "one", **options)
    assert two["loss"]["mean"] == pytest.approx(one["loss"]["mean"], rel=1e-4)
    in_two_processes(arguments(tmp_path / "two", batch_size=2, resume=True, **options))


def test_seeds_that_do_not_fit(arguments, refused, run, tmp_path, bert):
    words = arguments(tmp_path / "out", seed=2**32 - 1, seeds=2)
    refused(words, "`seeds` got 2 with --seed 4294967295")
    # One run has no folders of seeds, and several have no checkpoint of their own.
    metrics = (bert / "metrics.json").read_bytes()
    refused(arguments(bert, seeds=2, resume=True), "`seeds` got 2; expected 1, as in the run")
    assert (bert / "metrics.json").read_bytes() == metrics and not list(bert.glob("seed-*"))
    run(tmp_path / "two", seeds=2, steps=1)
    words = arguments(tmp_path / "two", seeds=1, resume=True)
    refused(words, "`seeds` got 1; expected 2 or more, as in the runs")
