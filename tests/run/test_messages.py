"""The one line that a user gets if the input, the machine or a library ends a run."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fastplm import cli
from fastplm.data import _numbers
from fastplm.data._folder import first_process, verify
from fastplm.errors import DataError
from fastplm.inference._encoder import load_encoder
from fastplm.pretrain import report
from fastplm.pretrain import run as pretrain
from fastplm.pretrain.dry_run import _bytes, _duration
from fastplm.run.checkpoint import config_at, weights_at
from fastplm.run.folder import writing

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


def test_a_lost_process_is_no_full_disk(tmp_path):
    """A checkpoint waits for all processes while it is written."""
    error = RuntimeError("[../gloo/transport/tcp/pair.cc:553] Connection closed by peer [::1]")
    with pytest.raises(RuntimeError, match="gloo") as raised, writing("pretrain", tmp_path):
        raise error
    assert raised.value is error
    with pytest.raises(DataError, match="cannot be written"), writing("pretrain", tmp_path):
        raise RuntimeError("PytorchStreamWriter failed")


@pytest.mark.parametrize("name", ["out", "cache", "tokenizer"])
def test_names_that_are_no_text(name, refused, arguments, tmp_path):
    words = arguments(tmp_path / "out", vocab_size=None if name == "tokenizer" else 120)
    words += [f"--{name}", os.fsdecode(bytes(tmp_path) + b"/\xff")]
    refused(words, f"pretrain: `{name}` got", r"\udcff', with a byte that is not UTF-8")


def test_a_picture_that_fails(run, tmp_path, monkeypatch, capsys):
    def draw(path, *_):
        path.write_bytes(b"half of a picture")
        raise ValueError("'nosuch' is not a valid value for backend\nsupported are many")

    monkeypatch.setattr(report, "_draw_losses", draw)
    metrics = run(tmp_path / "out", steps=1)
    shown = capsys.readouterr()
    assert "loss.png was not drawn, as matplotlib failed: 'nosuch' is not" in shown.err
    assert "none was drawn" in shown.out and "many" not in shown.err
    assert metrics["picture"] is None and verify(tmp_path / "out") is None
    assert not (tmp_path / "out" / "loss.png").exists()


@pytest.mark.slow
def test_nobody_reads_the_result(command):
    reader, writer = os.pipe()
    os.close(reader)
    words, environment = command
    ran = subprocess.run([*words, "info"], env=environment, stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert ran.returncode == 0 and b"rror" not in ran.stderr and b"pipe" not in ran.stderr


@pytest.fixture
def edited(checkpoint, tmp_path):
    """A checkpoint whose config.json has another value."""

    def edit(**settings):
        folder = shutil.copytree(checkpoint, tmp_path / "run" / "checkpoint-3")
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | settings))
        return folder

    return edit


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"hidden_dropout_prob": float("nan")}, "hidden_dropout_prob: nan; expected a probability"),
        ({"attention_probs_dropout_prob": 1.5}, "attention_probs_dropout_prob: 1.5; expected"),
        ({"architectures": 5}, "architectures: 5; expected a list of names"),
        ({"architectures": [5]}, "architectures: a list; expected a list of names"),
        ({"chunk_size_feed_forward": 7}, "chunk_size_feed_forward: 7; expected 0: the parts"),
        ({"return_dict": False}, "return_dict: False; expected true"),
        ({"hidden_size": "x"}, "'hidden_size'"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"initializer_range": float("nan")}, "initializer_range: nan; expected a small positive"),
    ],
)
def test_settings_that_fail_later(edited, settings, words):
    folder = edited(**settings)
    # Some versions of Transformers refuse some of these values, with their own messages.
    with pytest.raises(DataError) as caught:
        config_at("finetune", "model", folder)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_the_configuration_is_looked_at_before_the_tokenizer(edited):
    with pytest.raises(DataError, match="`model` got .*'hidden_size': TypeError"):
        load_encoder("embed", edited(hidden_size="x"))


def test_the_name_of_a_model_that_is_not_here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name = "somebody/no-such-model"
    with pytest.raises(DataError, match=f"no such file.*hf download {name} --local-dir"):
        config_at("finetune", "model", name)
    with pytest.raises(DataError, match="Check the path, and"):
        config_at("finetune", "model", f"./{name}")


def test_a_file_in_the_place_of_a_folder(tmp_path):
    (tmp_path / "model").write_text("")
    with pytest.raises(DataError, match="expected nothing in the way, which .*model is. Move it"):
        with writing("pretrain", tmp_path):
            (tmp_path / "model").mkdir()


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


def test_a_weight_of_another_shape(edited):
    from fastplm.models import BertForMaskedLM

    with pytest.raises(DataError) as caught:
        weights_at("score", "model", edited(vocab_size=77), "a checkpoint", BertForMaskedLM)
    said = str(caught.value)
    assert "word_embeddings.weight has shape (21, 16), and (77, 16) by config.json" in said
    assert "above report" not in said


def test_too_many_open_files_say_nothing_about_a_folder(tmp_path, monkeypatch):
    path = tmp_path / "tokens.bin"
    np.arange(4).tofile(path)

    def memmap(*_):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))

    monkeypatch.setattr(np, "memmap", memmap)
    with pytest.raises(OSError) as caught:
        _numbers.map_file(path, np.int64)
    line = cli._line_of(caught.value)
    assert line.startswith("this process has too many open files, at ") and "ulimit -n" in line


@pytest.mark.slow
@pytest.mark.parametrize(
    "value, words", [(float("nan"), "the weight {} holds NaN"), (3e38, "is 3e+38 in {}")]
)
def test_weights_that_are_no_numbers(value, words, refused, arguments, tmp_path, monkeypatch):
    make, name = pretrain.make_model, "bert.encoder.layer.1.output.dense.weight"

    def spoilt(*args):
        model = make(*args)
        model.get_parameter(name).data.fill_(value)
        return model

    monkeypatch.setattr(pretrain, "make_model", spoilt)
    line = refused(arguments(tmp_path / "out"), "at step 1", words.format(name), code=3)
    assert "learning rate" not in line


def test_units_that_fit():
    assert [_duration(x) for x in (2e-5, 0.4, 1.06, 75, 21132, 1e6)] == [
        *("0.02 ms", "400 ms", "1.06 s", "1.25 minutes", "5.87 hours", "11.6 days")
    ]
    sizes = [_bytes(x) for x in (0, 1 << 20, 279_000_000, 80 << 30)]
    assert sizes == ["0.00 KiB", "1.00 MiB", "266 MiB", "80.0 GiB"]


def test_the_summary_says_what_its_two_kinds_of_figures_are(tmp_path):
    metrics = {
        "history": [{"loss": 2.0}],
        "held_out": {"balanced_accuracy": 0.5, "words": {"balanced_accuracy": 0.75}},
        **dict(parameters=1, precision="fp32", tokens_per_second=1.0, train_seconds=1.0),
        **dict(models={}, picture="loss.png"),
    }
    shown = report.summary(metrics)
    assert "held out: balanced accuracy            0.5000" in shown
    assert "held out, by share: balanced accuracy  0.7500" in shown
    assert "\n(by share " in shown and "above 0.5)" in shown
    del metrics["held_out"]["words"]
    assert "by share" not in report.summary(metrics)
