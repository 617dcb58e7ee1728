"""What a run of fine-tuning prints."""

from __future__ import annotations

import re

import pytest
from huggingface_hub import ModelCard

from fastplm.finetune.report import summary
from fastplm.finetune.run import finetune
from fastplm.run.seeds import interval

from .conftest import sentence


def test_summary():
    seeds = [{"scores": {"accuracy": value}} for value in (1.0, 2.0, 3.0)]
    given = {"seeds": seeds, "most_frequent_label": None}
    scores = {"accuracy": interval([1.0, 2.0, 3.0])}
    shown = "accuracy 2.0000 ± 2.4841  (95 % interval of 3 seeds)"
    assert summary({**given, "scores": scores}) == shown
    alone = {**given, "seeds": seeds[:1], "scores": {"accuracy": interval([0.25])}}
    assert summary(alone) == "accuracy 0.2500  (1 seed, no interval)"


def test_the_card_of_each_seed(arguments):
    args = arguments("classification", steps=1, seeds=2)
    for result in finetune(args)["seeds"]:
        card = ModelCard.load(f"{result['model']}/README.md")
        assert card.data.pipeline_tag == "text-classification" and card.data.base_model is None
        found = {each.metric_type: each.metric_value for each in card.data.eval_results}
        assert found == result["scores"]
        assert f"of `{args.model}` for the task `classification` on " in card.text
        assert f"| seed | {result['seed']} |" in card.text
        assert "fastplm finetune --task classification " in card.text


@pytest.mark.slow
def test_labels_are_announced(arguments, tmp_path, capsys):
    path = tmp_path / "data.tsv"
    labels = ["yes"] * 5 + ["no"] * 20 + ["No", "nan"] * 2
    rows = (f"{sentence(i)}\t{label}" for i, label in enumerate(labels))
    path.write_text("\n".join(("text\tlabel", *rows)))
    finetune(arguments("classification", data=path, steps=1))
    said = capsys.readouterr().err
    assert re.search(r"(?m)^labels +no 18, yes 4, No 2, nan 2; to judge by: no 2, yes 1$", said), (
        said
    )
    assert "labels 'no' (20) and 'No' (2) differ only in case" in said
    assert "Warning: 'nan' (2) may stand for labels that are missing" in said
    finetune(arguments("regression", out="scores", steps=1))
    assert "\nlabels" not in capsys.readouterr().err
