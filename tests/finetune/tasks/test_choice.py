"""Answers to choose from."""

from __future__ import annotations

from fastplm.finetune.data import prepare_task
from fastplm.finetune.models import DELIMITER, EXTRACT, START


def test_choices_share_the_question(arguments):
    task = prepare_task(arguments("choice", "gpt2"))
    features, _ = task.features(task.train)
    batch = task.collator()([dict(features[1]), dict(features[2])])
    shown = [
        [task.tokenizer.decode(row[: last + 1]) for row, last in zip(rows, lasts, strict=True)]
        for rows, lasts in zip(batch["input_ids"], batch["mc_token_ids"], strict=True)
    ]
    begin = f"{START}ab{DELIMITER}"
    assert shown == [
        [f"{begin}{choice}{EXTRACT}" for choice in ("c", "de", "ff")],
        [f"{begin}{choice}{EXTRACT}" for choice in ("c", "de", "fff")],
    ]
    assert batch["mc_labels"].tolist() == [1, 2]
