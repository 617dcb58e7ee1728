from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from fastplm.cli import main
from fastplm.data import DataCollatorForMaskedTokens, load_tokenizer
from fastplm.models import ElectraForJointPreTraining
from fastplm.pretrain import compare, demo, trainer
from fastplm.pretrain.run import PretrainArguments, rehearse
from fastplm.run.folder import last_checkpoint


@pytest.fixture
def clock(monkeypatch):
    """Replaces the clock of the demo's measurements; only the test advances it."""
    clock = SimpleNamespace(now=0.0)
    for module in (compare, demo, trainer):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    return clock


@pytest.fixture
def steps_taken(monkeypatch, clock):
    """The steps of the optimizer; a function of their number gives the time of each."""
    taken = SimpleNamespace(number=0, seconds=lambda number: 0.0)
    step = torch.optim.AdamW.step

    def timed(self, closure=None):
        taken.number += 1
        clock.now += taken.seconds(taken.number)
        return step(self, closure)

    monkeypatch.setattr(torch.optim.AdamW, "step", timed)
    return taken


@pytest.mark.parametrize(
    "seconds, left, steps, said",
    [
        (0.02, 170, 2200, "102.4 k tokens/s: 2,200 steps in about 44 seconds."),
        (0.1, 170, 1360, "20.5 k tokens/s: 1,360 steps in about 2 minutes, instead of 2,200."),
        (
            2.0,
            150,
            demo.LEAST_STEPS,
            "1.0 k tokens/s: 400 steps in about 13 minutes, instead of 2,200; fewer would show "
            "too little.",
        ),
        # The preparation of the data alone took longer than the demo should.
        (
            0.02,
            -10,
            demo.LEAST_STEPS,
            "102.4 k tokens/s: 400 steps in about 8 seconds, instead of 2,200; fewer would show "
            "too little.",
        ),
    ],
)
def test_steps_follow_from_speed(seconds, left, steps, said, clock, monkeypatch, capsys):
    def rehearse(args):
        clock.now = 100
        return SimpleNamespace(seconds=seconds)

    monkeypatch.setattr(demo, "rehearse", rehearse)
    args = SimpleNamespace(batch_size=32, block_size=64)
    assert demo._choose_steps(args, 100 + left) == steps
    assert capsys.readouterr().out == f"This machine trains at {said}\n"


@pytest.mark.slow
@pytest.mark.parametrize("seconds, steps", [(0.25, 18), (4.0, 3)])
def test_few_steps_are_timed(seconds, steps, steps_taken, corpus, tmp_path, capfd):
    """Five steps do not count, then steps of some seconds, but at least three."""
    # The first steps are slow, and other load delays a later one.
    steps_taken.seconds = lambda number: {1: 100, 5: 100, 7: 3 * seconds}.get(number, seconds)
    out = tmp_path / "out"
    args = PretrainArguments(
        arch="electra-tiny",
        corpus=[corpus],
        out=out,
        cache=tmp_path / "cache",
        vocab_size=120,
        block_size=32,
        batch_size=4,
        steps=1000,
    ).plan()
    assert rehearse(args).seconds == seconds
    assert steps_taken.number == 5 + steps
    assert not list(out.rglob("*"))
    assert "".join(capfd.readouterr()) == ""


@pytest.mark.parametrize("seconds, rounds", [(1.0, 5), (4.0, 2), (100.0, 1)])
def test_a_slow_machine_compares_fewer_times(seconds, rounds, clock, electra, monkeypatch):
    model = ElectraForJointPreTraining.from_pretrained(last_checkpoint(electra))
    tokenizer = load_tokenizer(electra / "tokenizer")
    samples = [{"input_ids": tokenizer("The garden.")["input_ids"], "sample_index": 0}]
    steps = []

    def step(module, *args):
        steps.append(module)
        clock.now += seconds * (2 if len(steps) <= 3 else 1)  # the first steps are slow
        return 1.0

    monkeypatch.setattr(compare, "_forward_backward", step)
    monkeypatch.setattr(compare, "_peak_bytes", lambda *args: 1)
    batches = [DataCollatorForMaskedTokens(tokenizer)(samples)] * 2
    rows = compare.compare(model, batches, bf16=False, time_limit=100)
    assert len(steps) == 3 * len(batches) * (1 + rounds)
    assert len(set(map(id, steps))) == 3 and steps[:3] * (len(steps) // 3) == steps
    assert all(row.milliseconds == 1000 * seconds for row in rows)


@pytest.mark.slow
def test_checks_hold_with_another_seed(tmp_path, capsys):
    assert demo.demo(tmp_path, minutes=0.001, seed=1), capsys.readouterr().out


def test_threads_option(tmp_path, monkeypatch):
    """A busy machine prints a hint that names the option."""
    before, seen = torch.get_num_threads(), []
    monkeypatch.setattr(demo, "_demo", lambda *_: seen.append(torch.get_num_threads()) or True)
    assert main(["demo", "--out", str(tmp_path), "--threads", "3"]) == 0
    assert seen == [3] and torch.get_num_threads() == before
