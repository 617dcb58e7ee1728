"""Losses of the user's, what a parent's loss takes, and the gradients of logits: in every class."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

import fastplm
from fastplm import models

from .conftest import CLASSES, CLONED, in_dtype_of, inputs_of, pair, parent_of

#: Few tokens are padding, so that each window has a token and each row is defined.
MASK = torch.tensor([[1] * 9, [1] * 7 + [0] * 2, [1] * 8 + [0], [1] * 7 + [0] * 2])
#: Every class with a loss.
NAMES = [
    name
    for name in CLASSES | CLONED
    if {"labels", "start_positions"} & inputs_of(name, pair(name)[1].config, MASK).keys()
]
every_loss = pytest.mark.parametrize("name", NAMES)
ASKING = [name for name in NAMES if getattr(models, name)._named_by_parent is not None]


def models_of(name, way="class", **changed):
    """(a model by a class of ours or by ``accelerate``, its parent), without dropout."""
    model, parent = pair(name, **changed)
    return (model if way == "class" else fastplm.accelerate(copy.deepcopy(parent))), parent


def batch_of(name, model):
    torch.manual_seed(0)
    return inputs_of(name, model.config, MASK)


def outcome(model, given):
    """The loss, or the class of the error."""
    try:
        loss = model(**given).loss
        return "None" if loss is None else "a loss"
    except Exception as error:
        return type(error)


def test_the_list_of_classes_whose_parents_ask_their_loss_function():
    """A class that is not here computes its loss by itself, as its parent does."""
    causal = {n for n in NAMES if n.endswith(("ForCausalLM", "LMHeadModel"))} - {"BartForCausalLM"}
    others = {"ModernBertForMaskedLM", "ModernBertForQuestionAnswering", "EuroBertForMaskedLM"}
    assert {*ASKING} == causal | others


@pytest.mark.parametrize("way", ["class", "accelerate"])
@every_loss
def test_a_loss_function_of_the_users_is_asked_as_the_parent_asks_it(hold, name, way):
    ours, parent = models_of(name, way)
    given, calls = batch_of(name, ours), []

    def function(*args, **kwargs):
        calls.append((len(args), [*kwargs]))
        read = [one for one in (*args, *kwargs.values()) if isinstance(one, Tensor)]
        return sum(one.square().mean() for one in read if one.is_floating_point())

    ours.loss_function = parent.loss_function = function
    found = []
    for model in (ours, parent):
        calls.clear()
        model(**given, output_hidden_states=True)
        found.append([(count, {*names}) for count, names in calls])
    assert found[0] == found[1]
    assert len(found[0]) == (name in ASKING)
    hold(ours, parent, lambda model: {"loss": model(**given).loss})


KEYWORDS = {
    "ignore_index": dict(ignore_index=5),
    "ignore_index that hides no -100": dict(ignore_index=5, hides=False),
    "num_items_in_batch": dict(num_items_in_batch=torch.tensor(7)),
    "an int": dict(num_items_in_batch=7),
    "shift_labels": dict(shift_labels=None),
    "label_smoothing": dict(label_smoothing=0.5),
    "weight": dict(weight=torch.ones(37)),
    "problem_type": dict(problem_type="regression"),
    "vocab_size": dict(vocab_size=37),
    "labels": dict(pooled_logits=torch.ones(())),
}


@pytest.mark.parametrize("keyword", KEYWORDS)
@every_loss
def test_each_keyword_does_what_it_does_in_the_parent(hold, name, keyword):
    ours, parent = models_of(name)
    given, options = batch_of(name, ours), dict(KEYWORDS[keyword])
    if name not in ASKING and "num_items_in_batch" in options:
        return  # the parent ignores it: `docs/models.md`
    if options.pop("hides", True) and "ignore_index" in options:
        if name in ASKING and "labels" in given:
            given["labels"] = given["labels"].masked_fill(given["labels"] == -100, 5)
    if "shift_labels" in options and "labels" in given:
        options["shift_labels"] = given["labels"].roll(1, -1)
    given |= options
    assert outcome(ours, given) == outcome(parent, given)
    if outcome(parent, given) == "a loss":
        hold(ours, parent, lambda model: {"loss": model(**given).loss})


@pytest.mark.parametrize("loss_type", ["ForCausalLM", "ForMaskedLM", "ForTokenClassification"])
@pytest.mark.parametrize("name", ASKING)
def test_a_loss_type_of_the_configuration_is_that_of_the_parent(hold, name, loss_type):
    ours, parent = models_of(name, loss_type=loss_type)
    given = batch_of(name, ours)
    assert outcome(ours, given) == outcome(parent, given)
    if outcome(parent, given) == "a loss":
        hold(ours, parent, lambda model: {"loss": model(**given).loss})


@pytest.mark.parametrize("mode", ["output_logits", "eval"])
@every_loss
def test_the_loss_is_a_function_of_the_logits_that_are_returned(hold, name, mode):
    ours, parent = models_of(name)
    ours.train(mode == "output_logits")
    given = batch_of(name, ours)

    def run(model):
        asked = mode == "output_logits" and hasattr(ours, "_compute") and model is ours
        out = model(**in_dtype_of(model, given), **({"output_logits": True} if asked else {}))
        logits = {key: value for key, value in out.items() if key.endswith("logits")}
        assert logits
        grads = torch.autograd.grad(out.loss, [*logits.values()], retain_graph=True)
        return {"loss": out.loss, **dict(zip(logits, grads, strict=True))}

    hold(ours, parent, run)
