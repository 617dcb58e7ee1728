"""Ctrl-C and SIGTERM end a training after its step, with a checkpoint; others come by time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from fastplm.cli import main
from fastplm.run import interrupt


@pytest.fixture
def signalled(monkeypatch):
    """A step of the training gets a signal, or several."""
    from transformers import Trainer

    step = Trainer.training_step

    def arrange(at, *numbers):
        def wrapped(self, *args, **kwargs):
            if self.state.global_step == at:
                for number in numbers:
                    os.kill(os.getpid(), number)
                    time.sleep(0.01)
            return step(self, *args, **kwargs)

        monkeypatch.setattr(Trainer, "training_step", wrapped)

    return arrange


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda each: each.name)
def test_a_signal_loses_no_step(number, run, arguments, curve, signalled, tmp_path, capfd):
    whole = run(tmp_path / "whole", save_every=1000)
    out = tmp_path / "out"
    signalled(2, number)
    assert main(arguments(out, save_every=1000)) == 128 + number
    shown = capfd.readouterr().err
    assert "a checkpoint is written after this step" in shown
    assert shown.splitlines()[-1].endswith("--resume")
    assert [path.name for path in out.glob("checkpoint-*")] == ["checkpoint-3"]
    signalled(-1)
    assert main(arguments(out, save_every=1000, resume=True)) == 0
    assert curve(out) == curve(whole)
    name = "model/model.safetensors"
    assert (out / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_a_second_signal_ends_at_once(arguments, signalled, tmp_path, capfd):
    signalled(2, signal.SIGINT, signal.SIGINT)
    out = tmp_path / "out"
    assert main(arguments(out, save_every=1000)) == 130
    assert not [*out.glob("checkpoint-*")]
    assert "there is no checkpoint yet" in capfd.readouterr().err.splitlines()[-1]


@pytest.mark.slow
def test_a_checkpoint_by_time(run, monkeypatch, tmp_path):
    monkeypatch.setattr(interrupt, "_SAVE_SECONDS", 0.0)
    run(tmp_path / "out", save_every=1000, steps=3)
    kept = sorted(path.name for path in (tmp_path / "out").glob("checkpoint-*"))
    assert kept == ["checkpoint-2", "checkpoint-3"]  # the two newest


@pytest.mark.slow
def test_handlers_are_set_back(run, tmp_path):
    before = [signal.getsignal(number) for number in interrupt._SIGNALS]
    run(tmp_path / "out", steps=1)
    assert [signal.getsignal(number) for number in interrupt._SIGNALS] == before
    assert not interrupt._Stop.heard


BUSY = """
import hashlib, sys
from fastplm.run import interrupt
interrupt._Stop.heard = True
with interrupt.interruptible(["pretrain"], sys.argv[1]):
    print("busy", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 1 << 28)  # minutes, and it looks at no signal
"""


@pytest.mark.slow
def test_a_step_may_take_long_but_two_signals_end_it(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", BUSY, str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        assert process.stdout.readline() == b"busy\n"
        process.send_signal(signal.SIGTERM)
        time.sleep(interrupt._PATIENCE + 2)
        assert process.poll() is None  # the process waits for its step
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 128 + signal.SIGTERM
