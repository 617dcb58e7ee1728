"""No command overwrites its inputs, two never write one output, and no output is incomplete.

The tables have a row for every command that writes, and a column for every kind of output.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

from fastplm import cli
from fastplm.cli import main
from fastplm.data import _output
from fastplm.data._folder import acquire_lock, atomic_write, release_lock
from fastplm.data._output import result
from fastplm.errors import DataError
from fastplm.run.folder import claimed

#: Each command's words without --out; words in capitals are inputs.
COMMANDS = {
    "embed": "embed --model MODEL --data DATA",
    "score": "score --model MODEL --data DATA",
    "bertscore": "score --metric bertscore --model MODEL --data DATA --references MORE "
    "--baseline OTHER",
    "pairs": "score --metric minimal-pairs --model MODEL --data DATA --published OTHER",
    "prompt": "prompt --model MODEL --prompt OTHER --data DATA --shots 1 --shots-data MORE",
    "pretrain": "pretrain --arch bert-tiny --steps 1 --corpus DATA --tokenizer MODEL",
    "finetune": "finetune --task classification --model MODEL --data DATA --eval-data MORE",
    "seq2seq": "finetune --task seq2seq --encoder MODEL --data DATA --targets OTHER "
    "--eval-data MORE --eval-targets LAST",
    "distill": "distill --recipe distilbert --teacher MODEL --corpus DATA --steps 1",
    "classic": "classic --system elmo --corpus DATA --steps 1",
}
FILES = ("embed", "score", "bertscore", "pairs", "prompt")
INPUTS = [
    (command, word)
    for command, words in COMMANDS.items()
    for word in words.split()
    if word.isupper()
]
every_input = pytest.mark.parametrize(("command", "word"), INPUTS)
every_file = pytest.mark.parametrize("command", FILES)


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder of inputs that are never read, as the error comes before."""
    monkeypatch.chdir(tmp_path)
    inside = tmp_path / "inputs"
    (inside / "MODEL").mkdir(parents=True)
    (inside / "MODEL" / "config.json").write_text("{}")
    for name in ("DATA", "MORE", "OTHER", "LAST"):
        (inside / f"{name}.npy").write_text(f"text\tlabel\n{name}\t1\n")
    return inside


def path_of(place, word):
    return place / ("MODEL" if word == "MODEL" else f"{word}.npy")


def argv(command, place, out, *options):
    words = (str(path_of(place, w)) if w.isupper() else w for w in COMMANDS[command].split())
    return [*words, "--out", str(out), *options]


def contents(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }


@pytest.fixture
def refused(capsys, place):
    """The command ends with one line, and changes nothing."""

    def refused(words, *parts):
        before = contents(place.parent)
        capsys.readouterr()
        assert main(words) == 2
        shown = capsys.readouterr()
        (line,) = shown.err.splitlines()
        assert not shown.out and all(part in line for part in parts), line
        assert contents(place.parent) == before

    return refused


# --- an output is an input ------------------------------------------------------------------------


@every_input
@pytest.mark.parametrize("link", ["", "link to it", "hard link"])
def test_an_output_that_is_an_input(command, word, link, place, refused):
    out = path_of(place, word)
    if link == "link to it":
        out = place / "link.npy"
        out.symlink_to(path_of(place, word), target_is_directory=word == "MODEL")
    elif link and word != "MODEL":
        out = place / "link.npy"
        os.link(path_of(place, word), out)
    if command == "embed" and word == "MODEL" and out.suffix != ".npy":
        return  # the name is refused
    refused(argv(command, place, out, "--overwrite"), "`out` got", "--")


@every_input
@pytest.mark.parametrize("overwrite", [False, True])
def test_an_output_around_an_input(command, word, overwrite, place, refused):
    if command == "embed":
        place = place.rename(place.with_suffix(".npy"))
    options = ["--overwrite"] if overwrite else []
    refused(argv(command, place, place, *options), "`out` got", "a folder around --")


@every_file
def test_an_output_that_is_a_file_of_a_checkpoint(command, place, refused):
    out = place / "MODEL" / "weights.npy"
    out.write_text("weights")
    refused(argv(command, place, out, "--overwrite"), "which is in --model")


@pytest.mark.parametrize("command", ["pretrain", "distill", "classic"])
def test_an_output_inside_the_texts(command, place, refused):
    """A run's own text files would be read as texts when it is resumed."""
    path_of(place, "DATA").unlink()
    path_of(place, "DATA").mkdir()
    refused(argv(command, place, path_of(place, "DATA") / "run"), "which is in --corpus")


@pytest.mark.parametrize("command", sorted(COMMANDS.keys() - set(FILES)))
@pytest.mark.parametrize("out", [".", "sub/.."])
def test_the_current_folder_is_not_moved(command, out, place, monkeypatch, refused):
    here = place.parent / "here"
    (here / "sub").mkdir(parents=True)
    monkeypatch.chdir(here)
    refused(argv(command, place, out, "--overwrite"), "the current folder or one around it")
    monkeypatch.chdir(here / "sub")
    refused(argv(command, place, here, "--overwrite"), "the current folder or one around it")


# --- nothing is moved or replaced before all is checked -------------------------------------------


@pytest.mark.parametrize("command", COMMANDS)
def test_an_input_that_is_wrong_moves_nothing(command, place, refused):
    out = place.parent / "out.npy"
    if command in FILES:
        out.write_text("mine")
    else:
        (out / "model").mkdir(parents=True)
        (out / "model" / "mine.txt").write_text("mine")
    refused(argv(command, place, out, "--overwrite"))


@pytest.mark.slow
def test_a_link_stays_and_its_folder_is_moved(place, tmp_path, monkeypatch, capsys):
    corpus = tmp_path / "texts.txt"
    corpus.write_text("\n\n".join(f"The river {i} follows the house {i % 7}." for i in range(400)))
    real, link = tmp_path / "real", tmp_path / "link"
    real.mkdir()
    (real / "mine.txt").write_text("mine")
    link.symlink_to(real, target_is_directory=True)
    words = f"pretrain --arch bert-tiny --steps 1 --corpus {corpus} --vocab-size 120 --block-size 8"
    words += f" --batch-size 4 --cache {tmp_path / 'cache'} --out {link} --overwrite"
    assert main(words.split()) == 0
    assert link.is_symlink() and (real / "metrics.json").is_file()
    assert contents(tmp_path / "real.old-1") == {"mine.txt": b"mine"}
    assert "was moved to" in capsys.readouterr().err


@pytest.mark.parametrize("command", COMMANDS)
def test_what_is_there_is_renamed(command, tmp_path, capsys):
    """In all commands; nothing is deleted, nor is anything moved by one that fails."""
    kinds = {each.settings.where: each.settings for each in cli._commands()}
    helps = {f.metadata["help"] for k in kinds.values() for f in fields(k) if f.name == "overwrite"}
    assert len(helps) == 1 and "OUT.old-1" in next(iter(helps)) and kinds.keys() <= COMMANDS.keys()
    out = tmp_path / "out.npy"

    def write(text, error=None):
        with contextlib.suppress(ZeroDivisionError):
            if command in FILES:
                with result(out) as part:
                    part.write_text(text)
                    1 / (error is None)
                return
            with claimed(command, out, resume=False, overwrite=True) as begin:
                1 / (error is None)
                begin()
                (out / "text").write_text(text)

    texts = ("first", "second", "third")
    for text in texts:
        write("half", error=True)
        write(text)
    assert len([*tmp_path.iterdir()]) == 3
    for name, text in zip((".old-1", ".old-2", ""), texts, strict=True):
        path = Path(f"{out}{name}")
        assert (path if command in FILES else path / "text").read_text() == text
    kind = "file" if command in FILES else "folder"
    said = f"The {kind} {out} was moved to {out}.old-2, as --overwrite asks."
    assert said in capsys.readouterr().err


# --- two at once ----------------------------------------------------------------------------------


def _never(holder):
    raise AssertionError(holder)


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("overwrite", [False, True])
def test_two_at_once(command, overwrite, place, refused):
    out = place.parent / "out.npy"
    lock = out.with_name(".out.npy.lock")
    if command not in FILES:
        out.mkdir()
        lock = out / "run.lock"
    handle = acquire_lock(lock, _never)
    options = ["--overwrite"] if overwrite else []
    try:
        refused(argv(command, place, out, *options), f"process {os.getpid()} of", "`out` got")
    finally:
        release_lock(lock, handle)


RACE = """
import sys, time
from pathlib import Path
from fastplm.run.folder import claimed
out = Path(sys.argv[1])
print("ready", flush=True)
sys.stdin.readline()
with claimed("pretrain", out, resume=False, overwrite=True) as make_room:
    make_room()
    (out / "mine").write_text(sys.argv[2])
    time.sleep(1)
    assert (out / "mine").read_text() == sys.argv[2]
"""


@pytest.mark.slow
def test_several_that_move_one_folder(tmp_path):
    """One process gets the folder; the old one is moved once, and no process moves another's."""
    out = tmp_path / "out"
    out.mkdir()
    (out / "before").write_text("before")
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", RACE, str(out), str(number)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(3)
    ]
    for racer in racers:
        assert racer.stdout.readline() == "ready\n"
    for racer in racers:
        racer.stdin.write("go\n")
        racer.stdin.flush()
    shown = [racer.communicate(timeout=60)[1] for racer in racers]
    codes = [racer.returncode for racer in racers]
    assert codes.count(0) == 1, shown
    assert all("DataError" in text and "where process" in text for text in shown if "Error" in text)
    assert contents(tmp_path / "out.old-1") == {"before": b"before"}
    assert (out / "mine").read_text() == str(codes.index(0))
    assert not (tmp_path / "out.old-2").exists() and not (out / "run.lock").exists()


# --- whole or not at all --------------------------------------------------------------------------


@pytest.fixture
def embedding(checkpoint, tmp_path):
    (tmp_path / "texts.txt").write_text("a b\nc d e\n")
    words = f"embed --model {checkpoint} --data {tmp_path / 'texts.txt'}".split()
    return [*words, "--out", str(tmp_path / "out.npy")]


def test_a_full_disk_is_one_line(embedding, tmp_path, monkeypatch, capsys):
    """If the disk has no room for a page of a memory map, the process would be killed."""

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    before = contents(tmp_path)
    assert main(embedding) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert "`out` got" in line and "No space left" in line and "--resume" not in line
    assert contents(tmp_path) == before


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="the system has no such call")
def test_room_is_taken_before_it_is_written(tmp_path):
    path = tmp_path / "array.npy"
    np.lib.format.open_memmap(path, "w+", np.float32, (1 << 20,))
    if path.stat().st_blocks * 512 >= path.stat().st_size:
        pytest.skip("this file system makes no holes")
    _output.reserve(path)
    assert path.stat().st_blocks * 512 >= path.stat().st_size


def test_room_without_a_call_of_the_system(tmp_path, monkeypatch):
    monkeypatch.delattr(os, "posix_fallocate", raising=False)
    monkeypatch.setattr(_output, "_AT_ONCE", 1000)
    path = tmp_path / "array.npy"
    array = np.lib.format.open_memmap(path, "w+", np.float32, (1 << 14,))
    array[:] = np.arange(1 << 14)
    array.flush()
    before = path.read_bytes()
    _output.reserve(path)
    assert path.read_bytes() == before
    assert path.stat().st_blocks * 512 >= path.stat().st_size


KILLED = """
import sys, time
from fastplm.inference import embed
from fastplm.cli import main
def slow(path):
    print("here", flush=True)
    time.sleep(60)
embed.reserve = slow
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_what_a_killed_process_left_is_removed(embedding, tmp_path):
    words = [sys.executable, "-c", KILLED, *embedding]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout.readline() == "here\n"
    assert main(embedding) == 2  # the other process is still writing
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert len([*tmp_path.glob(".out.npy.*")]) == 2  # the part written so far, and the lock
    assert main(embedding) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"texts.txt", "out.npy"}
    assert np.load(tmp_path / "out.npy").shape == (2, 16)


def test_a_link_to_a_file_stays(embedding, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out.npy").symlink_to(tmp_path / "elsewhere" / "vectors.npy")
    assert main(embedding) == 2  # the link exists, though its target does not
    assert main([*embedding, "--overwrite"]) == 0
    assert (tmp_path / "out.npy").is_symlink()
    assert np.load(tmp_path / "elsewhere" / "vectors.npy").shape == (2, 16)


def test_a_device_is_not_replaced(place, refused):
    for command in ("score", "prompt"):
        refused(argv(command, place, "/dev/null", "--overwrite"), "a device or a pipe")


def test_files_have_the_usual_rights(embedding, tmp_path):
    assert main(embedding) == 0
    (tmp_path / "usual").touch()
    assert (tmp_path / "out.npy").stat().st_mode == (tmp_path / "usual").stat().st_mode


def test_an_error_keeps_what_was_there(tmp_path):
    path = tmp_path / "out.tsv"
    with atomic_write(path) as part:
        part.write_text("first")
        assert not path.exists()
    with pytest.raises(ZeroDivisionError), atomic_write(path) as part:
        part.write_text("half")
        raise ZeroDivisionError
    assert path.read_text() == "first" and [*tmp_path.iterdir()] == [path]


# --- Ctrl-C ---------------------------------------------------------------------------------------


def interrupted(words, monkeypatch, capsys, where):
    def stop(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(where, stop)
        assert main(words) == 130
    return capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("overwrite", [False, True])
def test_ctrl_c_in_embed(overwrite, embedding, monkeypatch, capsys):
    """The command has no checkpoints; the message repeats it as it was given."""
    words = [*embedding, "--overwrite"] if overwrite else embedding
    line = interrupted(words, monkeypatch, capsys, "fastplm.inference.embed.reserve")
    assert "nothing was written" in line and "checkpoint yet" not in line
    assert line.endswith("--overwrite") == overwrite


def test_ctrl_c_before_the_old_run_is_moved(place, tmp_path, monkeypatch, capsys):
    """The folder has another run's checkpoints, which --resume would continue."""
    corpus = tmp_path / "texts.txt"
    corpus.write_text("\n\n".join(f"The river {i} follows the house {i % 7}." for i in range(400)))
    out = tmp_path / "run"
    words = f"pretrain --arch bert-tiny --steps 1 --corpus {corpus} --vocab-size 120 --block-size 8"
    words = f"{words} --batch-size 4 --cache {tmp_path / 'cache'} --out {out}".split()
    assert main(words) == 0
    time.sleep(0.3)
    before = contents(out)
    where = "fastplm.pretrain.run.read_text"
    line = interrupted([*words, "--overwrite"], monkeypatch, capsys, where)
    assert "nothing was written" in line and line.endswith("--overwrite")
    assert contents(out) == before
    shutil.rmtree(out / "checkpoint-1")
    where = "transformers.Trainer.training_step"
    line = interrupted([*words, "--overwrite"], monkeypatch, capsys, where)
    assert "there is no checkpoint yet" in line and line.endswith("--overwrite")


def test_names_with_odd_letters(tmp_path):
    """A file name may contain special characters of glob patterns."""
    path = tmp_path / "a[b]*.tsv"
    other = tmp_path / ".ab.tsv.1.part"
    other.write_text("mine")
    with _output.results("score", [path], {}, overwrite=False), atomic_write(path) as part:
        part.write_text("text")
    assert path.read_text() == "text" and other.exists()


def test_a_folder_that_cannot_be_written(tmp_path, monkeypatch):
    def denied(*_):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(_output.os, "open", denied)
    with pytest.raises(DataError, match=re.escape("cannot be written (Permission denied)")):
        with _output.results("score", [tmp_path / "out"], {}, overwrite=False):
            pass


def test_nothing_of_a_missing_path_is_asked(tmp_path):
    inputs = {"model": ["google-bert/bert-base-uncased"], "corpus": [Path("embedded")]}
    with _output.results("score", [tmp_path / "out"], inputs, overwrite=False):
        assert (tmp_path / ".out.lock").exists()
    assert not [*tmp_path.iterdir()]
