"""Fine-tuning with a teacher: its predictions are a part of the loss."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers

from fastplm.data import train_tokenizer
from fastplm.errors import ArgumentValueError, DataError
from fastplm.finetune.models import teacher_logits
from fastplm.finetune.run import (
    FeatureDataset,
    FinetuneArguments,
    build_model,
    finetune,
    make_trainer,
    prepare_task,
)

NOUNS = "river house teacher garden train letter window forest engine island".split()
COUNT = 30
TASKS = ("classification", "regression", "tagging", "qa", "choice")


def sentence(i: int) -> str:
    return f"the {NOUNS[i % 10]} saw the {NOUNS[(i * 3 + 1) % 10]}{' again' * (i % 4)}"


def content(task: str) -> str:
    """A file of this task."""
    if task == "tagging":
        words = (sentence(i).split() for i in range(COUNT))
        return "\n\n".join(
            "\n".join(f"{w}\t{'N' if w in NOUNS else 'X'}" for w in s) for s in words
        )
    if task == "qa":
        paragraphs = []
        for i in range(COUNT):
            answers = [{"text": sentence(i).split()[1], "answer_start": 4}]
            question = {"id": str(i), "question": "what saw?", "answers": answers}
            paragraphs.append({"context": sentence(i), "qas": [question]})
        return json.dumps({"data": [{"paragraphs": paragraphs}]})
    if task == "choice":
        lines = (
            {"question": "what?", "choices": [sentence(i), "the"], "answer": i % 2}
            for i in range(COUNT)
        )
        return "\n".join(map(json.dumps, lines))
    labels = [("yes", "no")[i % 2] if task == "classification" else i % 3 / 2 for i in range(COUNT)]
    rows = (f"{sentence(i)}\t{label}" for i, label in enumerate(labels))
    return "\n".join(("text\tlabel", *rows))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("teacher")
    tokenizer = train_tokenizer([sentence(i) for i in range(COUNT)], 60, path / "cache")
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    for name, width in (("student", 16), ("larger", 32)):
        torch.manual_seed(width)
        config = transformers.BertConfig(
            vocab_size=len(tokenizer), hidden_size=width, initializer_range=0.3, **sizes
        )
        transformers.BertModel(config).save_pretrained(path / name)
        tokenizer.save_pretrained(path / name)
    for task in TASKS:
        (path / task).write_text(content(task))
    return path


@pytest.fixture
def arguments(folder, tmp_path):
    def build(task: str, model: str = "student", out: str = "out", **options) -> FinetuneArguments:
        settings = {"model": folder / model, "data": folder / task, "out": tmp_path / out}
        settings |= {"steps": 2, "batch_size": 8, "log_every": 1, "learning_rate": 1e-3}
        return FinetuneArguments(task=task, **settings | options).plan()

    return build


@pytest.fixture
def teacher(arguments):
    """The folder of a model that was fine-tuned for a task."""

    def build(task: str) -> Path:
        return Path(
            finetune(arguments(task, "larger", f"teacher-{task}", steps=4))["seeds"][0]["model"]
        )

    return build


def soft_by_hand(task: str, model, teacher, batch, temperature: float) -> torch.Tensor:
    """The distance of two models on a padded batch, without dropout, row by row."""
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask", "token_type_ids")}
    with torch.no_grad():
        ours, theirs = model(**inputs), teacher(**inputs)
    if task == "regression":
        return (ours.logits - theirs.logits).square().mean()
    found = []
    names = ("start_logits", "end_logits") if task == "qa" else ("logits",)
    for name in names:
        for row in range(len(batch["input_ids"])):
            pairs = [(ours[name][row], theirs[name][row])]
            if task == "qa":
                length = int(batch["attention_mask"][row].sum())
                pairs = [(ours[name][row, :length], theirs[name][row, :length])]
            if task == "tagging":
                at = (batch["labels"][row] != -100).nonzero()[:, 0].tolist()
                pairs = [(ours[name][row, i], theirs[name][row, i]) for i in at]
            for student, right in pairs:
                p = (right / temperature).softmax(-1)
                q = (student / temperature).softmax(-1)
                found.append((p * (p / q).log()).sum() * temperature**2)
    return torch.stack(found).mean()


@pytest.mark.parametrize("task", TASKS)
def test_the_loss_has_the_predictions_of_the_teacher(task, arguments, teacher, tmp_path):
    path = teacher(task)
    options = {"teacher": path, "teacher_weight": 0.25, "teacher_temperature": 3.0, "dropout": 0.0}
    args = arguments(task, **options)
    prepared = prepare_task(args)
    features = FeatureDataset(prepared.features(prepared.train)[0])
    kind = getattr(transformers, prepared.auto)
    loaded = kind.from_pretrained(path).eval()
    features.teacher = teacher_logits(args, prepared, features.features, torch.device("cpu"))
    model = build_model(args, prepared, 0)
    trainer = make_trainer(args, prepared, model, features, 0, tmp_path)
    batch = trainer.data_collator([features[i] for i in range(6)])
    assert len({len(features[i]["input_ids"]) for i in range(6)}) > 1 or task == "choice"
    plain = {name: value for name, value in batch.items() if name != "teacher"}
    hard = prepared.outputs(model, **plain)["loss"]
    soft = soft_by_hand(task, build_model(args, prepared, 0).eval(), loaded, batch, 3.0)
    found = prepared.outputs(model, **batch)["loss"]
    torch.testing.assert_close(found, 0.75 * hard + 0.25 * soft)
    assert abs(soft - hard) > 1e-3


@pytest.mark.slow
def test_a_student_of_a_run(arguments, teacher, tmp_path, capsys):
    """Labels of another order are matched by name; the teacher is no part of the model."""
    path = teacher("classification")
    config = json.loads((path / "config.json").read_text())
    plain = finetune(arguments("classification", out="plain"))
    args = arguments("classification", out="a", teacher=path, teacher_weight=1.0)
    first = finetune(args)
    assert f"teacher    {path}: 1 of the loss, temperature 2" in capsys.readouterr().err
    losses = [[e["loss"] for e in run["seeds"][0]["history"]] for run in (plain, first)]
    assert losses[0] != losses[1]
    state = transformers.AutoModelForSequenceClassification.from_pretrained(path)
    for part in (state.classifier.weight, state.classifier.bias):
        part.data = part.data.flip(0)
    swapped = tmp_path / "swapped"
    state.config.id2label = {0: config["id2label"]["1"], 1: config["id2label"]["0"]}
    state.config.label2id = {name: i for i, name in state.config.id2label.items()}
    state.save_pretrained(swapped)
    transformers.AutoTokenizer.from_pretrained(path).save_pretrained(swapped)
    again = finetune(arguments("classification", out="b", teacher=swapped, teacher_weight=1.0))
    assert [e["loss"] for e in again["seeds"][0]["history"]] == losses[1]
    names = transformers.AutoModelForSequenceClassification.from_pretrained(
        first["seeds"][0]["model"]
    ).state_dict()
    assert not [name for name in names if "teacher" in name]


def test_teachers_that_do_not_fit(arguments, teacher, folder, tmp_path):
    path = teacher("classification")
    other = tmp_path / "other.tsv"
    other.write_text(content("classification").replace("yes", "maybe"))
    args = arguments("classification", teacher=path)
    args = args.changed(data=other)
    with pytest.raises(DataError, match="`teacher` got .*, with the labels no, yes; .* maybe, no"):
        finetune(args)
    with pytest.raises(DataError, match="`teacher` got .*, which has 2 outputs; expected one"):
        finetune(arguments("regression", teacher=path))
    with pytest.raises(DataError, match="`teacher` got .*, which lacks 2 weights of a BertForQue"):
        finetune(arguments("qa", teacher=folder / "larger"))
    tagger = teacher("tagging")
    tokenizer = train_tokenizer(["something of other words"] * 9, 40, tmp_path / "cache")
    tokenizer.save_pretrained(tagger)
    with pytest.raises(
        DataError, match="`teacher` got .*, whose tokens are others; expected the to"
    ):
        finetune(arguments("tagging", teacher=tagger))
    assert not (tmp_path / "out").exists()  # nothing was written
    with pytest.raises(ArgumentValueError, match="`teacher_weight` got 0.3; .*--teacher beside it"):
        arguments("tagging", teacher_weight=0.3)
    with pytest.raises(ArgumentValueError, match="`teacher_weight` got 1.1"):
        arguments("tagging", teacher=path, teacher_weight=1.1)
    with pytest.raises(ArgumentValueError, match="`teacher` got .* with --task seq2seq"):
        arguments("seq2seq", teacher=path)
