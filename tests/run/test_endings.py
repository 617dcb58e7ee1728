"""What fails after the last step of a training leaves its model, and is done by ``--resume``."""

from __future__ import annotations

import json
import shutil

import pytest
import transformers

from fastplm.classic.elmo import ElmoForLanguageModeling
from fastplm.cli import _commands, main

_COMMON = "--steps 2 --batch-size 4 --log-every 1 --threads 1"
_STEPS = f"{_COMMON} --save-every 2"
_TEXT = f"{_STEPS} --corpus {{text}} --block-size 16 --cache {{cache}} --precision fp32"
_SIZE = "--layers 1 --hidden 16 --heads 2 --tokenizer {model} --objective mlm"
_CLASSIC = "classic --corpus {text} --hidden 16 --vocab-size 60 --system"
#: The command lines of trainings, each with the model that it saves.
WORDS = {
    "pretrain": (f"pretrain --arch bert-tiny {_SIZE} {_TEXT}", "model"),
    "pretrain --seeds": (f"pretrain --arch bert-tiny {_SIZE} {_TEXT} --seeds 2", "seed-1/model"),
    "distill": (f"distill --recipe distilbert --teacher {{model}} {_TEXT}", "model"),
    "finetune": (
        f"finetune --task classification --model {{model}} --data {{table}} {_STEPS}",
        "seed-0/model",
    ),
    "classic": (f"{_CLASSIC} elmo --embedding 8 {_STEPS}", "model"),
    "classic word2vec": (f"{_CLASSIC} word2vec --steps 2", "vectors.kv"),
}
_CARD = ("fastplm.run.card.write_card", "the model card")
_OF_TEXT = [
    ("fastplm.pretrain.stream.metrics_of", "the report of the scores"),
    ("fastplm.pretrain.report.plot_losses", "the picture of the losses"),
    _CARD,
    ("fastplm.run.runner.write_json", "the writing of metrics.json"),
]
#: By command, what comes after the last step, in its order: a function, and how a line calls it.
ENDINGS = {
    "pretrain": [("fastplm.pretrain.evaluate.evaluate", "the evaluation"), *_OF_TEXT],
    "pretrain --seeds": [("fastplm.pretrain.seeds._means", "the report of the seeds")],
    "distill": [("fastplm.distill.run.held_out_losses", "the evaluation"), *_OF_TEXT],
    "finetune": [
        ("fastplm.finetune.tasks._task.Task.evaluate", "the evaluation of seed 0"),
        ("fastplm.finetune.tasks._task.Task.reading", "the evaluation of seed 0"),
        (_CARD[0], "the model card of seed 0"),
        ("fastplm.finetune.run._write_predictions", "the writing of the predictions of seed 0"),
        ("fastplm.finetune.run.write_hashed", "the writing of metrics.json"),
    ],
    "classic": [
        ("fastplm.classic.train._held_out", "the evaluation"),
        ("fastplm.classic.train.curve", "the writing of metrics.json"),
    ],
    "classic word2vec": [("fastplm.run.runner.write_json", "the writing of metrics.json")],
}


@pytest.fixture
def trained(monkeypatch) -> list[int]:
    """The number of the step before each step that a test trains."""
    steps = []
    step = transformers.Trainer.training_step

    def counted(self, *args, **kwargs):
        steps.append(self.state.global_step)
        return step(self, *args, **kwargs)

    monkeypatch.setattr(transformers.Trainer, "training_step", counted)
    return steps


def fail(*args, **kwargs):
    raise ValueError("planted")


@pytest.fixture(scope="module")
def places(checkpoint, tmp_path_factory):
    """The files and folders that the command lines name."""
    work = tmp_path_factory.mktemp("endings")
    letters = "abcdefghijklmnop"
    lines = [" ".join(letters[(i + j * j) % 16] for j in range(12)) for i in range(120)]
    (work / "text.txt").write_text("\n\n".join(". ".join(lines[i : i + 4]) for i in range(116)))
    rows = [f"{line}\t{i % 2}" for i, line in enumerate(lines[:24])]
    (work / "table.tsv").write_text("\n".join(["text\tlabel", *rows]) + "\n")
    names = {"text": "text.txt", "table": "table.tsv", "cache": "cache"}
    return {"model": checkpoint} | {name: work / file for name, file in names.items()}


def _loads(command, path):
    if command == "classic":
        return ElmoForLanguageModeling.from_pretrained(path)
    if command == "classic word2vec":
        from gensim.models import KeyedVectors

        return KeyedVectors.load(str(path))
    transformers.AutoTokenizer.from_pretrained(path)
    kind = transformers.AutoModelForSequenceClassification if command == "finetune" else None
    return (kind or transformers.AutoModelForMaskedLM).from_pretrained(path)


def test_every_command_that_trains_is_here():
    trains = {each.settings.where for each in _commands() if hasattr(each.settings, "resume")}
    assert trains == {name.split()[0] for name in WORDS}


@pytest.mark.parametrize("command", WORDS)
def test_what_fails_after_the_last_step_leaves_the_model(
    command, places, tmp_path, monkeypatch, capsys, trained
):
    words, name = WORDS[command]
    out = tmp_path / "out"
    words = [*words.format(**places).split(), "--out", str(out)]
    resumable = command != "classic word2vec"
    for target, what in ENDINGS[command]:
        again = ["--resume"] if out.exists() else []
        shutil.rmtree(out / name, ignore_errors=True)
        with monkeypatch.context() as planted:
            planted.setattr(target, fail)
            with pytest.raises(ValueError, match="planted"):
                main([*words, *again])
        (line,) = [row for row in capsys.readouterr().err.splitlines() if "after the last" in row]
        assert f"after the last step, {what}" in line and "failed (ValueError: planted)" in line
        assert ("--resume does the rest" in line) == resumable
        assert _loads(command, out / name)
        if "metrics.json" not in what or "finetune" not in command:
            assert str(out / name) in line
        assert not (out / "metrics.json").exists() and len(trained) in (0, 2, 4)
    if resumable:
        steps = len(trained)
        assert main([*words, "--resume"]) == 0 and len(trained) == steps
        assert (out / "metrics.json").is_file() and _loads(command, out / name)


#: What may fail between two steps: a function, and how a line calls it.
BETWEEN = {
    "pretrain": ("fastplm.pretrain.stream.TextRun._scores", "the evaluation"),
    "distill": ("fastplm.pretrain.stream.TextRun._scores", "the evaluation"),
    "finetune": ("fastplm.finetune.tasks._task.Task.evaluate", "the evaluation"),
    "classic": ("fastplm.run.trainer.Progress.on_log", "the report of the loss"),
    "pretrain, reports": ("fastplm.run.trainer.Progress.on_log", "the report of the loss"),
}


@pytest.mark.parametrize("command", BETWEEN)
def test_what_fails_between_steps_loses_none(
    command, places, tmp_path, monkeypatch, capsys, trained
):
    target, what = BETWEEN[command]
    words, _ = WORDS[command.split(",")[0]]
    words = words.format(**places).split()
    words += ["--eval-every", "1"] if what == "the evaluation" else []
    out, whole = tmp_path / "out", tmp_path / "whole"
    with monkeypatch.context() as planted:
        planted.setattr(target, fail)
        with pytest.raises(ValueError, match="planted"):
            main([*words, "--out", str(out)])
    assert f"at step 1 {what} failed (ValueError: planted)" in capsys.readouterr().err
    assert main([*words, "--out", str(out), "--resume"]) == 0 and trained == [0, 1]
    assert main([*words, "--out", str(whole)]) == 0
    losses = []
    for folder in (out, whole):
        (file,) = [*folder.glob("metrics.json")]
        metrics = json.loads(file.read_text())
        of = metrics["seeds"][0] if command == "finetune" else metrics
        losses.append([(row["step"], row["loss"]) for row in of["history"]])
    assert losses[0] == losses[1] and [step for step, _ in losses[0]] == [1, 2]


@pytest.mark.parametrize("command", ["pretrain", "distill", "finetune", "classic"])
def test_a_report_that_fails_at_the_end_of_the_training_leaves_all(
    command, places, tmp_path, monkeypatch, capsys
):
    """As TensorBoard's, which flushes what it holds then."""
    words, name = WORDS[command]
    out = tmp_path / "out"

    words = [*words.format(**places).split(), "--out", str(out)]
    with monkeypatch.context() as planted:
        planted.setattr("fastplm.run.trainer.Progress.on_train_end", fail)
        with pytest.raises(ValueError, match="planted"):
            main(words)
    assert "after the last step, the end of the training failed" in capsys.readouterr().err
    assert _loads(command, out / name)
    assert main([*words, "--resume"]) == 0 and (out / "metrics.json").is_file()


def test_an_error_of_the_machine_is_one_of_its_lines(places, tmp_path, monkeypatch, capsys):
    """It has the exit code of one, and the line on what failed is before it."""

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("fastplm.run.card.write_card", full)
    words = [*WORDS["pretrain"][0].format(**places).split(), "--out", str(tmp_path / "out")]
    assert main(words) == 2
    *_, what, error = capsys.readouterr().err.splitlines()
    assert "after the last step, the model card failed. The training is saved in" in what
    assert error.startswith("fastplm: error: ") and "No space left" in error
    assert _loads("pretrain", tmp_path / "out" / "model")
