"""Families whose layers and heads are BERT's or RoBERTa's: each class is its parent's."""

from __future__ import annotations

import inspect

import pytest
import torch
import transformers

import fastplm
from fastplm import models

from .conftest import (
    CLONED,
    CLONES,
    LENGTH,
    PADDINGS,
    ROWS,
    compared,
    config_of,
    inputs_of,
    parent_of,
    small_config,
)

every_clone = pytest.mark.parametrize("name", CLONED)


@every_clone
def test_equals_its_parent(hold_drop_in, name):
    hold_drop_in(getattr(models, name), config_of(name), "right")


@pytest.mark.parametrize("padding", ["none", "left", "dead row"])
@pytest.mark.parametrize(
    "name", [name for name in CLONED if name.endswith(("MaskedLM", "ForPreTraining"))]
)
def test_equals_its_parent_with_other_padding(hold_drop_in, name, padding):
    hold_drop_in(getattr(models, name), config_of(name), padding)


@every_clone
def test_checkpoints_go_both_ways(round_trip, name):
    round_trip(getattr(models, name), config_of(name))


@every_clone
def test_arguments_come_in_the_parents_order(name):
    ours = getattr(models, name)
    theirs = list(inspect.signature(parent_of(ours).forward).parameters)
    theirs = [argument for argument in theirs if argument != "kwargs"]
    assert list(inspect.signature(ours.forward).parameters)[: len(theirs)] == theirs


@every_clone
def test_accelerate_and_restore(name):
    torch.manual_seed(1)
    stock = getattr(transformers, name)(config_of(name)).eval()
    kinds = [type(module) for module in stock.modules()]
    fastplm.accelerate(stock)
    assert type(stock) is getattr(models, name)
    assert [type(m) for m in stock.modules()] == [
        type(m) for m in getattr(models, name)(config_of(name)).modules()
    ]
    assert [type(module) for module in fastplm.restore(stock).modules()] == kinds


@pytest.mark.parametrize("unpad", [None, 30, False])
def test_task_ids_of_ernie_are_packed(hold, unpad):
    name, mask = "ErnieForMaskedLM", PADDINGS["right"]
    config = config_of(name)
    tasks = torch.randint(0, config.task_type_vocab_size, (ROWS, LENGTH))
    given = {**inputs_of(name, config, mask), "task_type_ids": tasks}
    ours = models.ErnieForMaskedLM(config).eval()
    parent = transformers.ErnieForMaskedLM(config).eval()
    run = lambda model, **more: compared(model(**given, **more), given, name)  # noqa: E731
    hold(ours, parent, lambda model: run(model, unpad=unpad), run)


@pytest.mark.parametrize("family", CLONES)
def test_a_frozen_one_gives_the_same(family):
    """Those with BERT's embeddings run in one call of csrc/."""
    name = next(name for name in CLONED if CLONED[name] == family and name.endswith("Model"))
    model = getattr(models, name)(small_config(family)).eval()
    given = inputs_of(name, model.config, PADDINGS["right"])
    with torch.no_grad():
        expected = compared(model(**given), given, name)["last_hidden_state"]
        found = compared(fastplm.freeze(model)(**given), given, name)["last_hidden_state"]
    torch.testing.assert_close(found, expected)
