"""Losses of the user's, what a parent's loss takes, and the gradients of logits: in every class."""

from __future__ import annotations

import contextlib
import copy
import inspect

import pytest
import torch
import transformers
from torch import Tensor

import fastplm
from fastplm import models
from fastplm.testing import KeptDouble

from .conftest import CLASSES, CLONED, config_of, in_dtype_of, inputs_of, pair, small_config
from .test_like import batch, stock

#: Few tokens are padding, so that each window has a token and each row is defined.
MASK = torch.tensor([[1] * 9, [1] * 7 + [0] * 2, [1] * 8 + [0], [1] * 7 + [0] * 2])
#: Every class with a loss, and those whose parents ask their ``loss_function``.
NAMES = [
    name
    for name in CLASSES | CLONED
    if {"labels", "start_positions"} & inputs_of(name, config_of(name), MASK).keys()
]
ASKING = [name for name in NAMES if getattr(models, name)._named_by_parent is not None]
every_loss = pytest.mark.parametrize("name", NAMES)


def outcome(model, given):
    """Whether there is a loss, or the class of the error."""
    try:
        return model(**given).loss is not None
    except Exception as error:
        return type(error)


def losses_of(*batches):
    """The function from a model to its loss of each batch, all in the dtype of the model."""

    def run(model):
        # Transformers' losses convert to fp32.
        kept = KeptDouble() if model.dtype is torch.float64 else contextlib.nullcontext()
        with kept:
            found = [model(**in_dtype_of(model, given)).loss for given in batches]
        return {"loss": sum(found), **{f"loss {at}": one for at, one in enumerate(found)}}

    return run


def test_which_parents_ask_their_loss_function():
    """A class that is not here computes its loss by itself, as its parent does."""
    causal = {n for n in NAMES if n.endswith(("ForCausalLM", "LMHeadModel"))} - {"BartForCausalLM"}
    others = {"ModernBertForMaskedLM", "ModernBertForQuestionAnswering", "EuroBertForMaskedLM"}
    assert {*ASKING} == causal | others


@pytest.mark.parametrize(
    ("name", "way"), [(n, "class") for n in NAMES] + [(n, "accelerate") for n in ASKING]
)
def test_a_loss_function_of_the_users_is_asked_as_the_parent_asks_it(hold, name, way):
    ours, parent = pair(name)
    if way == "accelerate":
        ours = fastplm.accelerate(copy.deepcopy(parent))
    given, calls = inputs_of(name, ours.config, MASK), []

    def function(*args, **kwargs):
        calls.append((len(args), {*kwargs}))
        read = [one for one in (*args, *kwargs.values()) if isinstance(one, Tensor)]
        return sum(one.square().mean() for one in read if one.is_floating_point())

    ours.loss_function = parent.loss_function = function
    found = []
    given |= dict(class_weights=torch.ones(3)) if name in ASKING else {}
    for model, options in ((parent, {}), (ours, {}), (ours, {"unpad": True})):
        calls.clear()
        if not options or name in ASKING:
            model(**given, output_hidden_states=True, **options)
            found.append([*calls])
    assert all(one == found[0] for one in found)
    assert len(found[0]) == (name in ASKING)
    if name in ASKING:
        hold(ours, parent, losses_of(given))


def keywords_of(name, given):
    """Inputs with each keyword that a loss of Transformers takes, and some that it does not."""
    labels = given.get("labels")
    cases = [dict(label_smoothing=0.5), dict(vocab_size=37)]
    cases += [dict(problem_type="regression"), dict(ignore_index=5), dict(pooled_logits=None)]
    if name in ASKING:  # others ignore it, which ours do not: see docs/models.md
        cases += [dict(num_items_in_batch=one) for one in (7, torch.tensor(7))]
    if labels is not None and labels.dtype == torch.int64:
        cases += [dict(shift_labels=labels.roll(1, -1))]
    if labels is not None and name in ASKING:
        cases += [dict(ignore_index=5, labels=labels.masked_fill(labels == -100, 5))]
    return [given | case for case in cases]


@every_loss
def test_each_keyword_does_what_it_does_in_the_parent(hold, name):
    ours, parent = pair(name)
    batches = keywords_of(name, inputs_of(name, ours.config, MASK))
    outcomes = [outcome(parent, given) for given in batches]
    assert [outcome(ours, given) for given in batches] == outcomes
    fine = [given for given, had in zip(batches, outcomes, strict=True) if had is True]
    if name in ASKING:
        hold(ours, parent, losses_of(*fine))
        return
    for model in (ours, parent):  # they have no effect
        first, *others = (model(**given).loss for given in fine)
        assert all(torch.equal(first, one) for one in others)


@pytest.mark.parametrize("loss_type", ["ForCausalLM", "ForMaskedLM", "ForTokenClassification"])
@pytest.mark.parametrize("name", ASKING)
def test_a_loss_type_of_the_configuration_is_that_of_the_parent(hold, name, loss_type):
    ours, parent = pair(name)
    ours.loss_type = parent.loss_type = loss_type
    given = inputs_of(name, ours.config, MASK)
    assert outcome(ours, given) == outcome(parent, given)
    if outcome(parent, given) is True:
        hold(ours, parent, losses_of(given))


@pytest.mark.parametrize("sparse", [-100, 5])
def test_sparse_predictions_of_modernbert_reach_the_users_loss(hold, sparse):
    name = "ModernBertForMaskedLM"
    ours, parent = pair(name, sparse_prediction=True, sparse_pred_ignore_index=sparse)
    given = inputs_of(name, ours.config, MASK)
    given["labels"][given["labels"] == -100] = sparse
    hold(ours, parent, losses_of(given, given | dict(ignore_index=7)))
    ours.loss_function = parent.loss_function = lambda logits, labels, **_: (
        logits.square().mean() * len(labels)
    )
    hold(ours, parent, losses_of(given))


@every_loss
def test_the_loss_is_a_function_of_the_logits_that_are_returned(hold, name):
    """In ``eval()`` mode, and while training where they are asked for."""
    ours, parent = pair(name)
    given, has_option = inputs_of(name, ours.config, MASK), hasattr(ours, "_compute")
    has_option |= name == "ElectraForPreTraining"

    def run(model):
        found = {}
        for training in (False, True):
            asks = {"output_logits": True} if training and has_option and model is ours else {}
            out = model.train(training)(**in_dtype_of(model, given), **asks)
            logits = {key: value for key, value in out.items() if key.endswith("logits")}
            loss = out.loss + (out.mc_loss if "mc_loss" in out else 0)
            grads = torch.autograd.grad(loss, [*logits.values()], retain_graph=True)
            found |= {f"{key} {training}": one for key, one in zip(logits, grads, strict=True)}
        return {"loss": loss, **found}

    hold(ours, parent, run)


@pytest.mark.parametrize("way", ["decoder", "decoder alone", "own attention", "seq2seq"])
def test_classes_that_accelerate_makes_ask_as_their_parents(way):
    parent = stock(way)
    ours = fastplm.accelerate(copy.deepcopy(parent))
    given, calls = batch(ours), []
    shape = given.get("decoder_input_ids", given["input_ids"]).shape
    given["labels"] = torch.arange(shape.numel()).view(shape) % 2
    if "SequenceClassification" in type(parent).__name__:
        given["labels"] = given["labels"][:, 0]

    def function(**given):
        calls.append({*given})
        return given["logits"].square().mean()

    found = []
    for model in (parent, ours):
        calls.clear()
        model.loss_function = function
        loss = model(**given).loss
        found.append(([*calls], loss))
    assert found[0][0] == found[1][0]
    torch.testing.assert_close(found[0][1].double(), found[1][1].double())
    asks = "loss_function" in inspect.unwrap(type(parent).forward).__code__.co_names
    assert (ours._named_by_parent is not None) == asks


@pytest.mark.parametrize("name", ["BertLMHeadModel", "EuroBertForMaskedLM"])
def test_a_loss_function_of_a_subclass_is_asked(name):
    def function(self, logits, **_):
        return logits.square().mean()

    kind = type("Own", (getattr(models, name),), {"loss_function": function})
    model = kind(config_of(name)).eval()
    out = model(**inputs_of(name, model.config, MASK))
    assert torch.equal(out.loss, out.logits.square().mean())


def test_a_loss_of_distilbert_with_options_is_asked(hold):
    ours, parent = pair("DistilBertForMaskedLM")
    given = inputs_of("DistilBertForMaskedLM", ours.config, MASK)
    for options in (dict(label_smoothing=0.3), dict(ignore_index=5), dict(reduction="sum")):
        ours.mlm_loss_fct = parent.mlm_loss_fct = torch.nn.CrossEntropyLoss(**options)
        case = dict(given)
        if "ignore_index" in options:
            case["labels"] = given["labels"].masked_fill(given["labels"] == -100, 5)
        hold(ours, parent, losses_of(case))


@pytest.mark.filterwarnings("ignore:Version v4.12.0:FutureWarning")
def test_an_encoder_decoder_computes_its_loss_by_itself(hold):
    """As its parent does, whatever its decoder would ask; and it is a function of its logits."""
    parts = [small_config("bert"), small_config("bert")]
    config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(*parts)
    config.decoder_start_token_id, config.pad_token_id = 1, 0
    ours = models.EncoderDecoderModel(copy.deepcopy(config)).eval()
    parent = transformers.EncoderDecoderModel(copy.deepcopy(config)).eval()
    given = inputs_of("EncoderDecoderModel", config, MASK)
    for model in (ours, parent):
        model.loss_function = model.decoder.loss_function = lambda *_, **__: 1 / 0

    def run(model):
        out = model(**given, decoder_ignore_index=5)
        return {"loss": out.loss, "logits": torch.autograd.grad(out.loss, out.logits)[0]}

    def loss(model):
        return {"loss": model(**given).loss}

    hold(ours, parent, loss)
    found = [run(model) for model in (ours, parent)]
    for name, one in found[0].items():
        torch.testing.assert_close(one, found[1][name], rtol=1e-4, atol=1e-6)
