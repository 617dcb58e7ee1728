"""``--config FILE``, and the file of settings that a run writes."""

from __future__ import annotations

import dataclasses
import json
import re
import sys

import pytest
import yaml

from fastplm import cli
from fastplm.classic.settings import ClassicArguments
from fastplm.distill.settings import DistillArguments
from fastplm.finetune.settings import FinetuneArguments
from fastplm.inference.score_settings import ScoreArguments
from fastplm.inference.settings import EmbedArguments, PromptArguments
from fastplm.pretrain.settings import PretrainArguments
from fastplm.run import config_file
from fastplm.run.settings import CALL, NumberOr, Numbers

COMMANDS = [
    *(PretrainArguments, FinetuneArguments, DistillArguments, ClassicArguments),
    *(EmbedArguments, PromptArguments, ScoreArguments),
]


def parsed(*words: str) -> dict:
    found = vars(cli._parser().parse_args(list(map(str, words))))
    found.pop("config", None)
    return found


def a_value(each: dataclasses.Field) -> object:
    """A value that the option takes, other than its default."""
    number, choices = each.metadata["number"], each.metadata["choices"]
    value: object = "some 'text': with # signs"
    if each.type == "bool":
        return True
    if isinstance(number, Numbers):
        return [3, 5]
    number = number.each if isinstance(number, NumberOr) else number
    if choices is not None:
        value = list(choices)[-1]
    elif number is not None:
        value = number.kind(max(number.low, 0.25 if number.kind is float else 3))
    return [value, value] if "Sequence" in str(each.type) else value


@pytest.mark.parametrize("arguments", COMMANDS, ids=lambda kind: kind.where)
@pytest.mark.parametrize("form", ["yaml", "json"])
def test_every_setting_of_every_command(arguments, form, tmp_path):
    """A file gives each option the same value as the command line."""
    known = {each.name: each for each in dataclasses.fields(arguments)}
    needed = {
        each.name: a_value(each)
        for each in known.values()
        if each.metadata["required"]
        or (each.default is dataclasses.MISSING and each.default_factory is dataclasses.MISSING)
    }
    for each in known.values():
        if each.name in CALL:
            continue
        group = each.metadata["excludes"]
        settings = {each.name: a_value(each)} | {
            name: value
            for name, value in needed.items()
            if group is None or known[name].metadata["excludes"] != group
        }
        words = []
        for name, value in settings.items():
            option = f"--{name.replace('_', '-')}"
            if isinstance(value, list) and isinstance(known[name].metadata["number"], Numbers):
                words += [option, ",".join(map(str, value))]
            elif isinstance(value, list):
                words += [option, *value]
            else:
                words += [option] if value is True else [f"{option}={value}"]
        file = tmp_path / f"settings.{form}"
        dump = json.dumps if form == "json" else yaml.safe_dump
        file.write_text(dump(settings))
        assert parsed(arguments.where, "--config", file) == parsed(arguments.where, *words)


@pytest.mark.parametrize("spelling", ["lr", "learning-rate", "learning_rate"])
@pytest.mark.parametrize("command", ["pretrain", "distill", "finetune", "classic"])
def test_a_rate_has_both_names(command, spelling, tmp_path):
    """In every command that trains, on the command line and in a file."""
    kind = {each.where: each for each in COMMANDS}[command]
    (own,) = {"lr", "learning_rate"} & {each.name for each in dataclasses.fields(kind)}
    file = tmp_path / "settings.yaml"
    file.write_text(f"{spelling}: 0.5\nout: there\n")
    needed = [word for each in dataclasses.fields(kind) for word in words_needed(each)]
    found = parsed(command, *needed, "--config", file)
    assert found[own] == 0.5 and found["out"] == "there"
    option = f"--{spelling.replace('_', '-')}"
    assert parsed(command, *needed, "--out=o", "--config", file, option, "0.25")[own] == 0.25


def words_needed(each: dataclasses.Field) -> list[str]:
    """The words of an option that must be given, but for --out."""
    missing = each.default is dataclasses.MISSING and each.default_factory is dataclasses.MISSING
    if each.name == "out" or not (missing or each.metadata["required"]):
        return []
    value = a_value(each)
    return [f"--{each.name.replace('_', '-')}", *(value if isinstance(value, list) else [value])]


@pytest.mark.slow
def test_a_run_does_it_again(arguments, run, curve, tmp_path):
    first = run(tmp_path / "first", steps=3)
    written = tmp_path / "first" / "settings.yaml"
    assert set(yaml.safe_load(written.read_text())) >= {"arch", "steps", "corpus", "lr", "out"}
    words = ["pretrain", "--config", str(written), "--out", str(tmp_path / "second")]
    assert cli.main(words) == 0
    assert curve(tmp_path / "second") == curve(first)
    # A run's own settings name the folder in which a resumed run continues.
    assert cli.main(["pretrain", f"--config={written}", "--steps", "4", "--resume"]) == 0
    assert len(curve(tmp_path / "first")) == 4
    assert yaml.safe_load(written.read_text())["steps"] == 4


def test_the_command_line_counts(tmp_path):
    file = tmp_path / "settings.yaml"
    file.write_text("arch: bert-tiny\nsteps: 5\nvocab-size: 300\nout: there\ncorpus: a.txt\n")
    found = parsed("pretrain", "--steps", 7, "--conf", file)
    assert (found["steps"], found["arch"], found["corpus"]) == (7, "bert-tiny", ["a.txt"])
    found = parsed("pretrain", "--config", file, "--tokenizer", "folder")
    assert found["tokenizer"] == "folder" and "vocab_size" not in found
    assert "--config" not in str(found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.yaml", "stepz: 5", "with the setting 'stepz'; expected settings of pretrain. Did you"),
        ("a.yaml", "steps: 5\nsteps: 6", "it has 'steps' twice"),
        ("a.json", '{"steps": 5, "steps": 6}', "it has 'steps' twice"),
        ("a.yaml", "steps: {a: 1}", "with steps: a dict; expected a text or a number"),
        ("a.yaml", "arch: yes", "with arch: True; expected a text or a number. Write it in quotes"),
        ("a.yaml", "steps: [1, 2]", "with steps: a list; expected one value"),
        ("a.yaml", "adversarial: 1", "with adversarial: '1'; expected true or false"),
        ("a.yaml", "resume: true", "with the setting resume; expected no setting of one call"),
        ("a.yaml", "- steps", "which holds no settings"),
        ("a.yaml", "", "which holds no settings"),
        ("a.yaml", "a: [", "while parsing a flow"),
        ("a.yaml", "config: b.yaml", "with the setting 'config'"),
        ("a.json", "{" * 9, "Expecting property name"),
        ("a.json", "[" * 100_000, "recursion"),
        ("a.yaml", "[" * 100_000, "recursion"),
        ("a.yaml", "a: !!python/name:os.system", "could not determine a constructor"),
        ("a.yaml", "batch-size: 5\nbatch_size: 7", "in two spellings; expected it once"),
        ("a.yaml", "? [1, 2]\n: 3", "unhashable"),
        ("a.yaml", "{[a]: b}", "`config`"),
        ("a.yaml", 'threads: !!int ""', "`config`"),
        ("a.yaml", "adversarial: !!bool maybe", "`config`"),
        ("a.yaml", "threads: !!timestamp foo", "`config`"),
        (
            "a.yaml",
            "tokenizer: a\nvocab-size: 300",
            "tokenizer and vocab_size; expected one of the",
        ),
        ("a.yaml", "no-nsp: true\nobjective: clm", "objective in two spellings; expected it once"),
        ("a.yaml", "no-nsp: maybe", "no-nsp: 'maybe'; expected true or false"),
        ("a.yaml", "lr: 1\nlearning-rate: 2", "learning-rate in two spellings; expected it once"),
        ("a.yaml", "arch: bert-tny", "arch: 'bert-tny'; expected bert-tiny | "),
        ("a.yaml", "lr: 0", "lr: '0'; expected a number above 0. Change it."),
        (
            "a.yaml",
            "keep-checkpoints: some",
            "'some'; expected a whole number from 1 to 1000000000, or",
        ),
        ("a.yaml", "corpus: []", "corpus: nothing; expected a value or several"),
        ("a.yaml", "lr: &a [&b [1, 2], *b, *b]", "lr: a list; expected a text or a number"),
        ("a.yaml", "x" * (1 << 20) + ":", "larger than 1,048,576 bytes"),
        ("../../../../../../../../dev/zero", None, "which is no regular file"),
        ("b.yaml", None, "No such file"),
    ],
)
def test_files_that_are_none(name, text, words, refused, arguments, tmp_path):
    if text is not None:
        (tmp_path / name).write_text(text)
    line = refused([*arguments(tmp_path / "out"), "--config", str(tmp_path / name)], words)
    assert line.startswith("fastplm: error: pretrain: `config` got ")


def test_numbers_are_those_of_a_command_line(tmp_path, refused, arguments):
    file = tmp_path / "a.yaml"
    file.write_text("block-size: 010\nout: 1.10\nseed: 0x10\n")
    words = ["pretrain", "--arch", "bert-tiny", "--steps", "1"]
    refused([*words, "--config", str(file)], "with seed: '0x10'; expected a whole number from 0 to")
    file.write_text("block-size: 010\nout: 1.10\n")
    found = parsed(*words, "--config", file)
    assert found["block_size"] == 10 and found["out"] == "1.10"


@pytest.mark.parametrize(
    "text", ["a\nseed: 9 #", "\x85", "\u2028b", "'\"", "\x07", "-x: y", "1", "no"]
)
def test_odd_texts_stay_what_they_are(text, tmp_path):
    """A setting, and the folder's name in the comment, may be odd texts."""
    out = tmp_path / f"o{text}"
    out.mkdir()
    args = FinetuneArguments("seq2seq", "d", out, model="m", prefix=text).plan()
    config_file.write_settings(out, args)
    found = parsed("finetune", "--config", out / "settings.yaml")
    given = {name: found[name] for name in args.given}
    assert given == {name: str(value) for name, value in args.given.items()}
    assert "seed" not in found


def test_two_hyphens_are_no_value(refused, arguments, tmp_path):
    words = arguments(tmp_path / "out", steps=None)
    refused([*words, "--steps=--"], "argument --steps: expected one argument, another one than --")


def test_a_value_out_of_range(refused, arguments, tmp_path):
    file = tmp_path / "a.yaml"
    file.write_text("steps: -5")
    words = arguments(tmp_path / "out", steps=None)
    refused([*words, "--config", str(file)], f"{file}, with steps: '-5'; expected a whole number")
    refused([*words, "--config"], "argument --config: expected one argument")


def test_the_result_is_not_the_file_of_settings(refused, tmp_path):
    file = tmp_path / "a.yaml"
    file.write_text("model: m\ndata: d\n")
    words = ["score", "--config", str(file), "--out", str(file), "--overwrite"]
    refused(words, "which is --config; expected another file")
    assert file.read_text() == "model: m\ndata: d\n"


@pytest.mark.parametrize("arguments", COMMANDS[:3], ids=lambda kind: kind.where)
def test_each_option_has_one_topic(arguments, capsys):
    names = [name for topic in arguments.topics.values() for name in topic]
    assert sorted(names) == sorted(each.name for each in dataclasses.fields(arguments))
    with pytest.raises(SystemExit):
        cli.main([arguments.where, "--help"])
    text = capsys.readouterr().out
    titles = [line for line in text.splitlines() if re.fullmatch(r"\S.*:", line)]
    assert titles[-len(arguments.topics) :] == [f"{title}:" for title in arguments.topics]
    # The most important options are on the first screen.
    assert text.splitlines()[0].startswith(f"usage: fastplm {arguments.where} --")
    assert len(text.splitlines()[0]) <= 110


def test_what_logs_is_there(refused, arguments, tmp_path, monkeypatch):
    words = arguments(tmp_path / "out", report_to="wandb")
    monkeypatch.setitem(sys.modules, "wandb", None)
    refused(words, "`report_to` got wandb; expected a package that is installed. pip install wandb")


def test_paths_are_declared_where_the_settings_are():
    """The checks of outputs know a command's inputs; its help may describe them in any way."""
    for arguments in COMMANDS:
        for each in dataclasses.fields(arguments):
            path = "Path" in str(each.type)
            assert path == bool(each.metadata["path"]), (arguments, each.name)


SHIPPED = sorted(config_file.SHIPPED.glob("*/*.yaml"))


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.stem)
def test_settings_that_come_along(file, refused, tmp_path, monkeypatch):
    """By their name; a file of this name in the folder counts first, a folder does not."""
    command, given = file.parent.name, config_file.read("", str(file))
    kind = {each.where: each for each in COMMANDS}[command]
    needed = ["--corpus", "embedded", "--out", "out"]
    monkeypatch.chdir(tmp_path)
    (tmp_path / file.stem).mkdir()
    found = parsed(command, "--config", file.stem, *needed)
    alone = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
    assert found == parsed(command, *alone, *needed)
    assert kind(**{name: found[name] for name in found if name != "command"}).arch == given["arch"]
    refused([command, "--config", file.stem[:-1], *needed], f"Did you mean {file.stem}?")
    (tmp_path / "out").mkdir()  # what the command writes there is compared with what it reads
    refused([command, "--config", file.stem, *needed, "--resume"], "out, which holds no run")
    (tmp_path / file.stem).rmdir()
    (tmp_path / file.stem).write_text("steps: 7\narch: bert-tiny")
    assert parsed(command, "--config", file.stem, *needed)["steps"] == 7
