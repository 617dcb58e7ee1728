"""Standard output and error of every command, in every encoding, and where nobody reads them."""

from __future__ import annotations

import ast
import errno
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tqdm import tqdm

import fastplm
from fastplm.cli import _parser, main
from fastplm.run.stdio import lasting_streams

COMMANDS = ["", *next(action for action in _parser()._actions if action.choices).choices]
every_command = pytest.mark.parametrize("command", COMMANDS)
TEXT = "… – 日本 é \udce9"
#: The environment of a shell whose encoding is not UTF-8.
ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


def a_stream(encoding):
    return io.TextIOWrapper(io.BytesIO(), encoding, errors="strict")


def written(stream):
    return stream.buffer.getvalue().decode(stream.encoding)


@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "utf-8"])
def test_what_cannot_be_encoded_is_escaped(encoding, monkeypatch):
    """In results, lines beside them and progress bars."""
    out, err = a_stream(encoding), a_stream(encoding)
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    with lasting_streams():
        print(TEXT)
        print(TEXT, file=sys.stderr)
        list(tqdm([1], desc=TEXT))
    assert (sys.stdout, sys.stderr) == (out, err)
    shown = TEXT.encode(encoding, "backslashreplace").decode(encoding)
    assert written(out) == f"{shown}\n"
    assert written(err).startswith(f"{shown}\n\r{shown}") and "1/1" in written(err)


@every_command
@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_help_in_every_encoding(command, encoding, monkeypatch):
    monkeypatch.setattr(sys, "stdout", a_stream(encoding))
    with pytest.raises(SystemExit) as end:
        main([*command.split(), "--help"])
    assert end.value.code == 0
    assert written(sys.stdout).startswith(f"usage: fastplm {command}".rstrip())


def test_streams_that_keep_text_are_left_alone(monkeypatch):
    """Such as those of a notebook."""
    out = io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    with lasting_streams():
        print(TEXT)
        assert sys.stdout is out
    assert out.getvalue() == f"{TEXT}\n"


class Failing(io.RawIOBase):
    """A binary stream that fails."""

    def __init__(self, error, terminal=False):
        self.error, self.terminal = error, terminal

    def writable(self):
        return True

    def isatty(self):
        return self.terminal

    def write(self, data):
        raise OSError(self.error, os.strerror(self.error))


@pytest.mark.parametrize(
    "name, error, terminal, raises",
    [
        ("stdout", errno.EPIPE, False, False),
        ("stdout", errno.EIO, True, False),  # of a terminal that was closed
        ("stdout", errno.ENOSPC, False, True),
        ("stderr", errno.EPIPE, False, False),
        ("stderr", errno.EIO, True, False),
        ("stderr", errno.ENOSPC, False, False),
    ],
)
def test_only_a_result_that_is_lost_on_a_disk_is_an_error(
    name, error, terminal, raises, monkeypatch, capsys
):
    raw = Failing(error, terminal)
    monkeypatch.setattr(sys, name, io.TextIOWrapper(raw, "utf-8", write_through=True))
    with lasting_streams():
        if raises:
            with pytest.raises(OSError, match="No space left"):
                print("a result")
        else:
            print("a line", file=getattr(sys, name))
            print("another", file=getattr(sys, name), flush=True)


def ran(words, environment=None, **options):
    """(exit code, stdout, stderr) of a command in a process, in bytes."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})}
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    words = [sys.executable, "-m", "fastplm", *words]
    done = subprocess.run(words, env=environment, **options)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("words", ["--help", "--version", "nothing", "pretrain --config nothing"])
def test_nobody_reads(words):
    """A pipe whose reader has left, and streams that were closed, change no exit code."""
    code, *_ = ran(words.split())
    for name, number in (("stdout", 1), ("stderr", 2)):
        reader, writer = os.pipe()
        os.close(reader)
        found, out, err = ran(words.split(), **{name: writer})
        os.close(writer)
        assert found == code and b"Exception" not in (out or b"") + (err or b"")
        found, out, err = ran(words.split(), preexec_fn=lambda number=number: os.close(number))
        assert found == code and b"Exception" not in out + err


def test_a_result_that_finds_no_room(monkeypatch, capsys):
    full = io.TextIOWrapper(Failing(errno.ENOSPC), "utf-8", write_through=True)
    monkeypatch.setattr(sys, "stdout", full)
    monkeypatch.setattr(fastplm, "info", lambda **_: "what works")
    assert main(["info"]) == 2
    line = capsys.readouterr().err
    assert line.startswith("fastplm: error: the system refused: ") and line.count("\n") == 1


CLOSED = """
import os, sys
from fastplm.run.stdio import lasting_streams
with lasting_streams():
    file = os.open(sys.argv[1], os.O_CREAT | os.O_WRONLY)
    print("out"), print("err", file=sys.stderr)
    os.write(1, b"raw"), os.write(2, b"raw")
    sys.exit(0 if file > 2 and sys.stdin.read() == "" else 1)
"""


def test_no_file_takes_the_number_of_a_closed_stream(tmp_path):
    path = tmp_path / "file"
    words = [sys.executable, "-c", CLOSED, str(path)]
    subprocess.run(words, preexec_fn=lambda: [os.close(each) for each in (0, 1, 2)], check=True)
    assert path.read_bytes() == b""


#: Functions that read and write text, and the number of the argument that is the encoding.
TEXT_FILES = {"read_text": 0, "write_text": 1}


def test_no_file_depends_on_the_locale():
    """Each that the package reads or writes as text has an encoding of its own."""
    found = []
    for path in Path(fastplm.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            name = getattr(getattr(node, "func", None), "attr", "")
            if isinstance(node, ast.Call) and name in TEXT_FILES:
                named = any(each.arg == "encoding" for each in node.keywords)
                if not named and len(node.args) <= TEXT_FILES[name]:
                    found.append(f"{path}:{node.lineno}")
    assert not found


@pytest.mark.slow
def test_words_are_saved_under_every_locale(tmp_path):
    (tmp_path / "a.txt").write_text("é ñ 日. … a b.\n\n" * 40, "utf-8")
    words = f"classic --system elmo --corpus {tmp_path}/a.txt --steps 1 --out {tmp_path}/out"
    code, out, err = ran([*words.split(), "--batch-size", "2"], ASCII)
    assert code == 0, err
    assert "日" in (tmp_path / "out" / "model" / "words.json").read_text("utf-8")


@pytest.mark.slow
def test_a_name_that_the_locale_cannot_read(tmp_path):
    code, _, err = ran(["classic", *"--system elmo --corpus a --steps 1 --out é".split()], ASCII)
    assert code == 2 and b"export LC_ALL=C.UTF-8" in err and err.count(b"\n") == 1
