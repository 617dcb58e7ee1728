"""The settings of fine-tuning: which go together, and which only some tasks have."""

from __future__ import annotations

import argparse

import pytest

from fastplm import cli
from fastplm.errors import ArgumentValueError
from fastplm.finetune.settings import LIBRARIES, FinetuneArguments
from fastplm.finetune.tasks import TASKS


def test_command_line_knows_every_task_and_setting():
    commands = next(
        action
        for action in cli._parser()._actions
        if isinstance(action, argparse._SubParsersAction)
    )
    options = {action.dest: action for action in commands.choices["finetune"]._actions}
    assert set(options["task"].choices) == {*TASKS}
    assert set(options["library"].choices) == set(LIBRARIES)
    assert options.keys() - {"help", "config"} == FinetuneArguments.__dataclass_fields__.keys()


@pytest.mark.parametrize(
    "changes, expected",
    [
        *(
            ({name: value}, f"`{name}`")
            for name, value in {
                "steps": 10**19,
                "epochs": 0.0,
                "dropout": 1.0,
                "max_length": 8,
                "library": "keras",
                "features": "first",
                "teacher_weight": 1.1,
                "layer_decay": 1.1,
            }.items()
        ),
        ({"layer_decay": 0.0}, "`layer_decay` got"),
        ({"layer_decay": 0.5, "freeze": True}, "`layer_decay` got 0.5 with --freeze; expected no"),
        ({"freeze": True, "from_scratch": True}, "`from_scratch` got True with --freeze"),
        ({"teacher_weight": 0.3}, "`teacher_weight` got 0.3; .*--teacher beside it"),
        ({"optimizer": "adafactor", "weight_decay": 0.1}, "got 0.1; expected nothing with"),
        ({"max_samples": [20, 10]}, "`max_samples` got"),
        ({"max_samples": [10, 10]}, "`max_samples` got"),
        ({"max_samples": [10, 0]}, "`max_samples` got"),
        ({"learning_rate": [1e-4, 1e-4]}, "`learning_rate` got"),
        ({"learning_rate": [1e-4, 0.0]}, "`learning_rate` got"),
        ({"learning_rate": [1e-4]}, "`learning_rate` got"),
        (
            {"learning_rate": [1e-4, 1e-3], "max_samples": [10, 20]},
            "with --max-samples .* one rate",
        ),
        ({"task": "qa", "threshold": 0}, "`threshold` got 0 with --task qa"),
        ({"task": "choice", "both_orders": True}, "`both_orders` got True with --task choice"),
        ({"task": "tagging", "pooling": "max"}, "`pooling` got max with --task tagging"),
        ({"task": "qa", "features": "mix"}, "`features` got mix with --task qa"),
        ({"task": "qa", "head": "bilstm"}, "`head` got bilstm with --task qa"),
        ({"own_head": True}, "`own_head` got True with --task pair"),
        (
            {"task": "sop", "own_head": True, "steps": None, "seeds": 2},
            "with --seeds 2; expected one",
        ),
        ({"task": "seq2seq", "teacher": "x"}, "`teacher` got x with --task seq2seq"),
    ],
)
def test_wrong_settings(changes, expected):
    settings = {"task": "pair", "model": "m", "data": "d", "out": "o", "steps": 3, **changes}
    with pytest.raises(ArgumentValueError, match=expected):
        FinetuneArguments(**settings)


@pytest.mark.parametrize(
    "start, changes, expected",
    [
        ("bart", {"task": "pair", "beams": 8}, "with --task pair; expected --task seq2seq"),
        ("bart", {"warm": "none"}, "`warm` got none"),
        ("bart", {"encoder": "x"}, "either --model or --encoder"),
        ("bart", {"model": None}, "--model DIR, or --encoder DIR"),
        ("bart", {"source_vocab_size": 400}, "`source_vocab_size` got 400"),
        ("bertshare", {"warm": "encoder"}, "one set of weights"),
        ("bertshare", {"decoder": "x"}, "one checkpoint for both parts"),
        ("bertshare", {"library": "transformers"}, "--library fastplm"),
        ("new source", {"library": "transformers"}, "--library fastplm"),
        ("bart", {"eval_targets": "x"}, "--eval-data, too"),
        ("bart", {"eval_data": "x", "eval_targets": "x"}, "for both --data and --eval-data"),
        ("bart", {"targets": "x", "text_columns": ["a", "b"]}, "Leave one of the two options out"),
    ],
)
def test_wrong_settings_of_writers(start, changes, expected, writing):
    with pytest.raises(ArgumentValueError, match=expected):
        writing(start, **changes)
