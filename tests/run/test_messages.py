"""The one line that a user gets if the input, the machine or a library ends a run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fastplm import cli
from fastplm.data._folder import first_process

PORT = {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    "variables, words",
    [
        ({"WORLD_SIZE": "2"}, "got 2 without MASTER_ADDR, MASTER_PORT, RANK; expected the"),
        ({"WORLD_SIZE": "2", "RANK": "1", **PORT, "MASTER_PORT": "x"}, "2 with MASTER_PORT='x'"),
        ({"WORLD_SIZE": "two"}, "got 'two'"),
        ({"WORLD_SIZE": "0"}, "got '0'"),
    ],
)
def test_half_of_torchruns_variables(variables, words, refused, arguments, tmp_path, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    refused(arguments(tmp_path / "out"), "`WORLD_SIZE`", words, "torchrun --nproc-per-node")
    assert not (tmp_path / "out").exists()


def test_each_process_says_which_it_is(refused, arguments, tmp_path, monkeypatch):
    for name, value in {"WORLD_SIZE": "2", "RANK": "1", **PORT}.items():
        monkeypatch.setenv(name, value)
    line = refused(arguments(tmp_path / "out", resume=True, overwrite=True), "`overwrite`")
    assert line.startswith("fastplm: error: rank 1: ")


def test_what_follows_from_the_end_of_another_process(monkeypatch):
    error = RuntimeError("[../gloo/transport/tcp/pair.cc:553] Connection closed by peer [::1]")
    assert cli._line_of(error) is None
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(cli, "_A_MOMENT", 0)
    assert cli._line_of(error).startswith("it lost another process")
    assert cli._line_of(RuntimeError("a bug")) is None


@pytest.mark.parametrize("name", ["out", "cache", "tokenizer"])
def test_names_that_are_no_text(name, refused, arguments, tmp_path):
    words = arguments(tmp_path / "out", vocab_size=None if name == "tokenizer" else 120)
    words += [f"--{name}", os.fsdecode(bytes(tmp_path) + b"/\xff")]
    refused(words, f"pretrain: `{name}` got", r"\udcff', with a byte that is not UTF-8")


@pytest.mark.parametrize("command", ("info", "score"))
@pytest.mark.parametrize("given", ("tritn", "Triton", "triton ", "nonsense"))
def test_a_backend_that_is_none(given, command):
    words = [command] if command == "info" else [command, *("--model", "x", "--data", "y")]
    ran = run_with({"FASTPLM_BACKEND": given}, *words)
    nearest = "Choose one of" if given == "nonsense" else "Choose 'triton', or another"
    assert ran.returncode == 2 and len(ran.stderr.splitlines()) == 1
    assert f"`FASTPLM_BACKEND` got {given!r}; expected auto | " in ran.stderr
    assert nearest in ran.stderr


def test_an_empty_variable_is_unset(monkeypatch):
    """CONTRIBUTING lists the variables that the library reads."""
    text = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text()
    names = re.findall(r"`([A-Z][A-Z_]+)`", text.split("## Environment variables")[1])
    unset = run_with({}, "info", without=names)
    empty = run_with(dict.fromkeys(names, ""), "info")
    assert empty.returncode == unset.returncode == 0 and empty.stdout == unset.stdout
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "")
    cli._check_launch("pretrain")
    assert cli._processes() == 1 and first_process()


def run_with(variables, *words, without=()):
    environment = {name: value for name, value in os.environ.items() if name not in without}
    return subprocess.run(
        [sys.executable, "-m", "fastplm", *words],
        env=environment | variables,
        capture_output=True,
        text=True,
    )


def test_a_current_folder_that_was_deleted(arguments, tmp_path, monkeypatch, capsys):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert cli.main(["info"]) == 2
    assert "`current folder` got one that was deleted" in capsys.readouterr().err
