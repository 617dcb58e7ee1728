"""The table of docs/systems.md: each class, command, option and test file it names is there."""

from __future__ import annotations

import argparse
import importlib
import re

import pytest
from pages import ROOT

from fastplm import cli, models

ROWS = [
    [cell.strip() for cell in line.strip("|\n").split("|")]
    for line in (ROOT / "docs" / "systems.md").read_text().splitlines()
    if line.startswith("| ") and not line.startswith(("| system", "|---"))
]


def named(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def resolve(name: str) -> object:
    """A class of ``fastplm.models``, or the object at this path inside fastplm."""
    if hasattr(models, name):
        return getattr(models, name)
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(f"fastplm.{module}"), attribute)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0][:30])
def test_what_a_row_names_exists(row):
    _, classes, command, tests = row
    for name in named(classes):
        assert name == "Word2Vec" or resolve(name)
    (choices,) = (
        action.choices
        for action in cli._parser()._actions
        if isinstance(action, argparse._SubParsersAction)
    )
    # An option alone belongs to the command before it.
    actions: dict[str, argparse.Action] = {}
    for words in map(str.split, named(command)):
        if words[0] in choices:
            actions = choices[words[0]]._option_string_actions
        for option, value in zip(words, [*words[1:], ""], strict=True):
            if option.startswith("--"):
                assert option in actions, option
                known = actions[option].choices
                given = value and not value.startswith("--")
                assert not (known and given) or value in known, f"{option} {value}"
    assert named(tests)
    for path in named(tests):
        assert (ROOT / path).exists(), path


def test_every_command_that_trains_or_scores_is_there():
    text = " ".join(word for _, _, command, _ in ROWS for word in named(command))
    for command in ("pretrain", "finetune", "distill", "embed", "score", "prompt", "classic"):
        assert re.search(rf"\b{command}\b", text), command
