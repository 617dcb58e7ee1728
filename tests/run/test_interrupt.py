"""Ctrl-C and SIGTERM end a training after its step, with a checkpoint; others come by time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from fastplm import cli
from fastplm.cli import main
from fastplm.run import config_file, interrupt
from fastplm.run.folder import RECORD
from fastplm.study.cell import _awaited


@pytest.fixture(autouse=True)
def _heard():
    """No signal is ignored, as SIGINT is where pytest is a background job of a script."""
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in usual.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


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


#: A command line of each command that says how to continue, without --out.
WORDS = {
    "pretrain": "pretrain --arch bert-tiny --corpus a --steps 2",
    "finetune": "finetune --task qa --model m --data d",
    "distill": "distill --recipe distilbert --teacher m --steps 2",
    "classic": "classic --system elmo --corpus a",
    "embed": "embed --model m --data d",
    "score": "score --model m --data d",
    "prompt": "prompt --model m --data d --prompt p",
    "demo": "demo --minutes 3",
}
TRAIN = ("pretrain", "finetune", "distill", "classic")


@pytest.fixture
def ended(tmp_path, monkeypatch, capsys):
    """Calls a command that a signal ends; gives the words that it prints, and what it was given."""
    monkeypatch.chdir(tmp_path)
    given = []

    def call(leave):
        def run(self=None, **values):
            given.append(values)
            if leave:
                leave(tmp_path / values["out"])
            raise KeyboardInterrupt(signal.SIGTERM)

        monkeypatch.setattr(cli._Command, "__call__", run)
        monkeypatch.setattr(cli, "_demo", run)

    def ended(words, leave=None):
        call(leave)
        assert main(words) == 143
        line = capsys.readouterr().err.splitlines()[-1]
        assert line.startswith("fastplm: interrupted; ")
        shell = ["bash", "-c", f"printf '%s\\0' {line.split(' with: ')[1]}"]
        program, *again = subprocess.check_output(shell).split(b"\0")[:-1]
        assert program == b"fastplm"
        return [os.fsdecode(word) for word in again], given.pop()

    return ended


def a_record(out):
    """What a run writes before its first checkpoint."""
    out.mkdir(exist_ok=True)
    (out / RECORD).write_text("{}")


def a_checkpoint(out):
    a_record(out)
    (out / "checkpoint-2").mkdir(exist_ok=True)


def a_file(out):
    out.write_text("results")


def settings_of(values):
    return {name: value for name, value in values.items() if name not in ("resume", "overwrite")}


ODD_NAMES = ["out", "my 'out'", "--x", "ö…", "a\nb\t\x1b[1m", os.fsdecode(b"\xff")]
STATES = {
    command: [None, a_record, a_checkpoint] if command in (*TRAIN, "demo") else [None, a_file]
    for command in WORDS
}


@pytest.mark.parametrize(
    "command, leave", [(command, leave) for command, states in STATES.items() for leave in states]
)
@pytest.mark.parametrize("out", ODD_NAMES)
def test_what_is_printed_runs_as_printed(command, leave, out, ended):
    """With the same settings, and the option that what was left needs."""
    words = [*WORDS[command].split(), f"--out={out}"]
    again, given = ended(words, leave)
    _, found = ended(again, leave)
    assert settings_of(found) == settings_of(given)
    asked = {"resume", "overwrite"} & {*found}
    if leave is None or command == "demo":
        assert not asked
    elif command in TRAIN and (leave is a_checkpoint or command == "finetune"):
        assert asked == {"resume"}
    else:
        assert asked == {"overwrite"}


@pytest.mark.parametrize("option", ["--resume", "--res", "--overwrite", "--overw"])
@pytest.mark.parametrize("command", TRAIN)
def test_resume_takes_the_place_of_overwrite(command, option, ended):
    words = [*WORDS[command].split(), option, "--out", "out"]
    again, _ = ended(words, a_checkpoint)
    assert again == [*WORDS[command].split(), "--out", "out", "--resume"]


SHIPPED_OF = {file.parent.name: file.stem for file in config_file.SHIPPED.glob("*/*.yaml")}


@pytest.mark.parametrize("form", ["--config NAME", "--config=NAME", "--con NAME"])
@pytest.mark.parametrize(
    "command, place",
    [
        (command, place)
        for command in WORDS
        for place in ("name", "here", "above", "in the folder", "shipped")
        if command != "demo" and (place != "shipped" or command in SHIPPED_OF)
    ],
)
def test_with_a_file_of_settings(command, place, form, ended, tmp_path, monkeypatch):
    """One here or elsewhere, the one that a run wrote, or one that comes along; with --resume."""
    out = "out"
    if place == "shipped":
        name = out = SHIPPED_OF[command]  # a folder called like it
    else:
        name = {"here": "./a.yaml", "above": "../a.yaml"}.get(place, "a")
        if place == "in the folder" and command in TRAIN:
            name = "out/settings.yaml"
        (tmp_path / "below" / "out").mkdir(parents=True)
        monkeypatch.chdir(tmp_path / "below")
        if command not in TRAIN:
            os.rmdir("out")
        Path(name).write_text("threads: 3\n")
    words = [*WORDS[command].split(), *form.replace("NAME", name).split(), "--out", out]
    leave = (lambda out: a_checkpoint(Path.cwd() / out.name)) if command in TRAIN else None
    again, given = ended(words, leave)
    assert ("--resume" in again) == (command in TRAIN)
    assert place == "shipped" or given["threads"] == 3
    again, found = ended(again, None)
    assert settings_of(found) == settings_of(given)
    assert settings_of(ended(again, None)[1]) == settings_of(given)


@pytest.mark.parametrize("number", interrupt._SIGNALS, ids=lambda each: each.name)
@pytest.mark.parametrize("command", [*WORDS, "cell"])
def test_a_signal_that_is_ignored_stays_so(command, number, tmp_path, monkeypatch):
    """As SIGINT is in a background job of a shell script, and in what such a command starts."""

    def run(self=None, **values):
        assert signal.getsignal(number) is signal.SIG_IGN
        os.kill(os.getpid(), number)
        time.sleep(0.01)
        shows = "import signal, sys; sys.exit(signal.getsignal(int(sys.argv[1])) is signal.SIG_IGN)"
        child = [sys.executable, "-S", "-c", shows, str(int(number))]
        return 1 - subprocess.run(child).returncode

    monkeypatch.setattr(cli._Command, "__call__", run)
    monkeypatch.setattr(cli, "_demo", run)
    before = signal.signal(number, signal.SIG_IGN)
    try:
        if command == "cell":  # of a study, which waits for its command
            assert _awaited(SimpleNamespace(wait=run)) == 0
        else:
            assert main([*WORDS[command].split(), "--out", str(tmp_path / "out")]) == 0
        assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, before)


def test_every_command_that_writes_is_here():
    (commands,) = (each.choices for each in cli._parser()._actions if each.choices)
    writes = {name for name in commands if any(a.dest == "out" for a in commands[name]._actions)}
    assert writes == {*WORDS}


#: A training as a background job of a shell script, which gets Ctrl-C in its second step.
JOB = """
import os, signal
from transformers import Trainer
from fastplm.cli import main
step = Trainer.training_step
def training_step(self, *args, **kwargs):
    os.kill(os.getpid(), signal.SIGINT)
    return step(self, *args, **kwargs)
Trainer.training_step = training_step
raise SystemExit(main(os.environ["WORDS"].split()))
"""


@pytest.mark.slow
def test_a_background_job_of_a_script_goes_on(arguments, command, tmp_path):
    (python, *_), environment = command
    words = " ".join(arguments(tmp_path / "out", steps=2))
    environment = environment | {"WORDS": words, "JOB": JOB}
    script = [*("sh", "-c"), f'{python} -c "$JOB" & wait $!']
    ran = subprocess.run(script, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0 and "interrupted" not in ran.stderr, ran.stderr
    assert (tmp_path / "out" / "metrics.json").is_file()


def test_a_program_is_named_as_it_was_called(monkeypatch, tmp_path):
    for called, printed in (
        (str(Path(cli.__file__).with_name("__main__.py")), f"{sys.executable} -m fastplm"),
        ("/usr/bin/pytest", "fastplm"),
        (str(tmp_path / "fastplm"), str(tmp_path / "fastplm")),
    ):
        monkeypatch.setattr(sys, "argv", [called])
        assert interrupt._program() == printed
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "fastplm").write_text("")
    (tmp_path / "fastplm").chmod(0o755)
    assert interrupt._program() == "fastplm"


def test_a_training_of_several_processes_goes_on(ended, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    asked = {"resume": False, "overwrite": True}
    a_checkpoint(Path("out"))
    told = interrupt._how_to_go_on(["pretrain", "--overwrite"], Path("out"), 0, asked)
    assert told.endswith("the same command without --overwrite and with --resume")
