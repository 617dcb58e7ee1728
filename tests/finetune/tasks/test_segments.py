"""Pairs of running text as tasks: made, probed, and judged with the head of a pre-training."""

from __future__ import annotations

import json
import re

import pytest
import torch
import transformers

from fastplm.errors import ArgumentValueError, DataError
from fastplm.finetune.data import prepare_task
from fastplm.finetune.report import summary
from fastplm.finetune.run import finetune
from fastplm.finetune.tasks import task_class

from ..conftest import documents

TASKS = ("sop", "nsp")


@pytest.fixture
def judged(arguments):
    """The settings of a run that judges the head of a pre-training, with changes."""

    def build(task: str, model="bert", **options):
        options |= {"steps": None, "learning_rate": None, "max_length": 32, "own_head": True}
        return arguments(task, model, **options)

    return build


@pytest.mark.parametrize("task", TASKS)
def test_pairs_of_text(task, arguments, files):
    """Classes are balanced, and each label is right; all models get the same pairs."""
    prepared = prepare_task(arguments(task, max_length=32))
    assert prepared.names == list(task_class(task).classes)
    texts = [" ".join(document.split()) for document in documents(40)]
    others = prepare_task(arguments(task, "gpt2", max_length=32))
    for examples, same in ((prepared.train, others.train), (prepared.test, others.test)):
        assert examples == same
        labels = [prepared.right(example) for example in examples]
        assert labels.count(task_class(task).classes[1]) == len(labels) // 2 > 2
        for example, label in zip(examples, labels, strict=True):
            own = texts[int(re.match(r"document (\d+),", example.place)[1]) - 1]
            first, second = example.texts
            follows = f"{first} {second}" in own
            assert follows == (label == task_class(task).classes[0])
            if not follows and task == "sop":
                assert f"{second} {first}" in own
            elif not follows:
                assert first in own and second not in own
                assert any(second in text for text in texts)
    groups = [{example.group for example in part} for part in (prepared.train, prepared.test)]
    assert not groups[0] & groups[1]


def test_a_probe_of_pairs(arguments, tmp_path):
    metrics = finetune(arguments("sop", freeze=True, pooling="mean", max_length=32), print)
    assert metrics["scores"].keys() == {"accuracy"} and metrics["main_score"] == "accuracy"
    records = json.loads((tmp_path / "out" / "seed-0" / "predictions.json").read_text())
    assert {record["label"] for record in records["predictions"]} == {"in order", "swapped"}
    assert re.fullmatch(r"document \d+, pair \d+", records["predictions"][0]["id"])


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("model", ["bert", "albert"])
def test_the_head_of_a_pre_training(model, task, judged, arguments, checkpoint, tmp_path):
    """The predictions are those of Transformers' class, and nothing is trained or copied."""
    metrics = finetune(judged(task, model), print)
    folder = tmp_path / "out" / "seed-0"
    records = json.loads((folder / "predictions.json").read_text())["predictions"]
    loaded = transformers.AutoModelForPreTraining.from_pretrained(checkpoint(model)).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint(model))
    name = {"bert": "seq_relationship_logits", "albert": "sop_logits"}[model]
    right = 0
    for record in records:
        batch = tokenizer(*record["texts"], truncation=True, max_length=32, return_tensors="pt")
        with torch.no_grad():
            answer = task_class(task).classes[int(loaded(**batch)[name].argmax())]
        assert answer == record["prediction"]
        right += answer == record["label"]
    (result,) = metrics["seeds"]
    assert result["scores"] == {"accuracy": right / len(records)}
    assert result["steps"] == 0 and not (folder / "model").exists()
    args = arguments(task)
    assert len(records) == len(task_class(task).read(args, args.data, None, 32))
    assert summary(metrics).startswith(f"accuracy {right / len(records):.4f}")


def test_pairs_that_are_refused(arguments, judged, checkpoint, tmp_path):
    one = tmp_path / "one.txt"
    one.write_text(documents(1, least=9)[0])
    args = judged("nsp", data=one)
    with pytest.raises(DataError, match="pairs of one document alone .*expected two documents"):
        prepare_task(args)
    one.write_text("a sentence\n\nanother\n\nand a third\n")
    with pytest.raises(DataError, match="no document of two sentences"):
        prepare_task(args)
    with pytest.raises(
        ArgumentValueError, match="`own_head` got True with .*, a electra; expected"
    ):
        prepare_task(judged("sop", "electra"))
    headless = tmp_path / "headless"
    transformers.BertModel.from_pretrained(checkpoint("bert")).save_pretrained(headless)
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint("bert"))
    tokenizer.save_pretrained(headless)
    with pytest.raises(DataError, match=r"lacks \d+ weights of a BertForPreTraining"):
        finetune(judged("sop", headless))
