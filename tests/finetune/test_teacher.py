"""Fine-tuning with a teacher."""

from __future__ import annotations

import json
import shutil

import pytest
import transformers

from fastplm.data import train_tokenizer
from fastplm.errors import DataError
from fastplm.finetune.run import finetune


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


def test_teachers_that_do_not_fit(arguments, teacher, checkpoint, files, tmp_path):
    path = teacher("classification")
    other = tmp_path / "other.tsv"
    other.write_text(files["classification"].read_text("utf-8-sig").replace("\n-1\t", "\nmaybe\t"))
    args = arguments("classification", teacher=path, data=other)
    with pytest.raises(DataError, match="`teacher` got .*, with the labels -1, 1; .* 1, maybe"):
        finetune(args)
    with pytest.raises(DataError, match="`teacher` got .*, which has 2 outputs; expected one"):
        finetune(arguments("regression", teacher=path))
    with pytest.raises(DataError, match="`teacher` got .*, which lacks 2 weights of a BertForQue"):
        finetune(arguments("qa", teacher=checkpoint("bert")))
    tagger = shutil.copytree(teacher("tagging"), tmp_path / "tagger")
    tokenizer = train_tokenizer(["something of other words"] * 9, 40, tmp_path / "cache")
    tokenizer.save_pretrained(tagger)
    with pytest.raises(
        DataError, match="`teacher` got .*, whose tokens are others; expected the to"
    ):
        finetune(arguments("tagging", teacher=tagger))
    assert not (tmp_path / "out").exists()  # nothing was written
