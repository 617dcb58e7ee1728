"""The threads of a run, and a warning where they wait for each other."""

from __future__ import annotations

import pytest
import torch

from fastplm.run import threads as module
from fastplm.run.folder import read_record


@pytest.mark.parametrize("threads, times, said", [(2, (5, 9), 0), (2, (9, 5), 1), (1, (), 0)])
def test_busy_cores(threads, times, said, monkeypatch):
    used = []

    def milliseconds():
        used.append(torch.get_num_threads())
        return float(times[len(used) - 1])

    monkeypatch.setattr(module, "_milliseconds", milliseconds)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        line = module.busy_cores()
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert used == ([threads, 1] if times else [])
    assert bool(line) == bool(said) and (not said or "--threads 1" in line)


@pytest.mark.slow
def test_threads(run, tmp_path, monkeypatch):
    from transformers import Trainer

    seen, step = set(), Trainer.training_step

    def spied(self, *args, **kwargs):
        seen.add(torch.get_num_threads())
        return step(self, *args, **kwargs)

    monkeypatch.setattr(Trainer, "training_step", spied)
    before = torch.get_num_threads()
    run(tmp_path / "out", steps=1, threads=3)
    assert seen == {3} and torch.get_num_threads() == before
    assert read_record("pretrain", tmp_path / "out")["threads"] == 3
