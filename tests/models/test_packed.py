"""Packed rows equal the padded batch in every class and way, or are refused by name."""

from __future__ import annotations

import copy
import functools
import inspect

import pytest
import torch
import transformers
from torch import nn
from transformers import DataCollatorWithFlattening

import fastplm
from fastplm import models
from fastplm.errors import ArgumentValueError, UnsupportedError
from fastplm.hf import NAME, PACKED

from .conftest import (
    CLASSES,
    CLONED,
    PADDINGS,
    config_of,
    gradients,
    has_decoder,
    inputs_of,
    parent_of,
    small_config,
    with_classes,
)
from .test_like import MADE, stock

MASK = PADDINGS["right"]
SEEN, LENGTHS = MASK.bool(), MASK.sum(1)
BORDERS = nn.functional.pad(LENGTHS.cumsum(0), (1, 0)).int()
BOUNDS = dict(zip(PACKED, (BORDERS, BORDERS, 9, 9), strict=True))
OF_CHOICES = ("MultipleChoice", "DoubleHeadsModel")
#: Classes of ours that Transformers lacks.
OURS = ("DebertaV2ForPreTraining", "ElectraForJointPreTraining")
ALL = [*CLASSES, *CLONED, *OURS]
TAKEN = [name for name in ALL if not has_decoder(name) and not name.endswith(OF_CHOICES)]


def packed(inputs):
    """A batch padded by ``MASK`` as one row; what has no value for each token stays."""
    given = {name: one for name, one in inputs.items() if name != "attention_mask"}
    flat = {
        name: one[SEEN][None]
        for name, one in given.items()
        if isinstance(one, torch.Tensor) and one.shape[:2] == MASK.shape
    }
    return given | flat | BOUNDS


def model_and_inputs(name):
    torch.manual_seed(2)
    if name in OURS:
        small = small_config("deberta_v2")
        if name == "DebertaV2ForPreTraining":
            model, labels = models.DebertaV2ForPreTraining(small), {"ElectraForPreTraining"}
        else:
            parts = [small_config("electra").to_dict() for _ in range(2)]
            config = models.ElectraJointConfig(generator=parts[0], discriminator=parts[1])
            model, labels = models.ElectraForJointPreTraining(config), {"BertForMaskedLM"}
        inputs = inputs_of(*labels, small, MASK) | {"sample_index": torch.arange(len(MASK))}
    else:
        config = with_classes(name, config_of(name))
        config.classifier_pooling = "mean"
        model = getattr(models, name)(config)
        inputs = inputs_of(name, model.config, MASK)
        if "ForCausalLM" in name or name.endswith("LMHeadModel"):
            inputs["labels"][:, 0] = inputs["input_ids"][:, 0]  # which no token of a text predicts
    return model.double(), inputs


def of_tokens(outputs, token_by_token):
    """The outputs as of a packed row: what has a value for each token, [1, N, …]."""
    found = {}
    for name, one in outputs.items():
        for at, state in enumerate(one if isinstance(one, tuple) else (one,)):
            if isinstance(state, torch.Tensor):
                flat = state.shape[:2] == MASK.shape and (state.dim() > 2 or name in token_by_token)
                found[f"{name} {at}"] = state[SEEN][None] if flat else state
    return found


def same(found, wanted):
    assert found.keys() == wanted.keys()
    for name, one in wanted.items():
        torch.testing.assert_close(
            found[name], one, rtol=1e-6, atol=1e-8, msg=f"{name}: {{}}".format
        )


@pytest.mark.parametrize("name", TAKEN)
def test_a_packed_row_equals_the_padded_batch(name):
    model, inputs = model_and_inputs(name)
    question = {"exclude_padding": True} if name.endswith("QuestionAnswering") else {}
    flat = ("start_logits", "end_logits", *(("logits",) if "ForPreTraining" in name else ()))
    more = {} if name.startswith("ElectraForJoint") else {"output_hidden_states": True}
    for training in (False, True):
        model.train(training)
        states = {} if training else more
        torch.manual_seed(1)
        found = model(**packed(inputs), **states)
        slopes = gradients(model, found.loss) if "loss" in found else {}
        torch.manual_seed(1)
        wanted = model(**inputs, **question, **states)
        same(of_tokens(found, ()), of_tokens(wanted, flat))
        if "loss" in wanted:
            same(slopes, gradients(model, wanted.loss))


@pytest.mark.parametrize("name", [name for name in ALL if name not in TAKEN])
def test_two_sides_and_choices_are_refused(name):
    model = getattr(models, name)(config_of(name))
    expected = "as a text has several choices" if name.endswith(OF_CHOICES) else "with an encoder"
    with pytest.raises(UnsupportedError, match=f"{name}: `cu_seq_lens_q`.*{expected}"):
        model(torch.randint(5, 30, (1, 24)), **BOUNDS)


@pytest.mark.parametrize("way", MADE)
def test_classes_that_accelerate_makes(way):
    model = fastplm.accelerate(stock(way))
    ids = torch.randint(4, 30, MASK.shape).masked_fill(~SEEN, 1)
    inputs = {"input_ids": ids, "attention_mask": MASK}
    if model.config.is_encoder_decoder:
        with pytest.raises(UnsupportedError, match="`cu_seq_lens_q`.*with an encoder"):
            model(ids[SEEN][None], **BOUNDS)
        return
    model.requires_grad_(True)
    for given in (inputs, packed(inputs)):
        model.zero_grad()
        out = model(**given, **({"use_cache": False} if "CausalLM" in type(model).__name__ else {}))
        out = {name: one for name, one in out.items() if isinstance(one, torch.Tensor)}
        found = of_tokens(out, ())
        (found.get("logits 0", found.get("last_hidden_state 0")).square().sum()).backward()
        slopes = {
            name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
        }
        if given is inputs:
            wanted = found, slopes
    same(found, wanted[0])
    same(slopes, wanted[1])


# --- by name --------------------------------------------------------------------------------------


@functools.cache
def of_name(name, implementation=NAME):
    torch.manual_seed(2)
    config = copy.deepcopy(with_classes(name, config_of(name)))
    kind = parent_of(getattr(models, name))
    return kind._from_config(config, attn_implementation=implementation).eval().double()


def positions_of(model):
    first = 0
    if CLASSES.get(model) in ("roberta", "roberta_prelayernorm", "mpnet") or model in CLONED:
        first = 0 if model.startswith("Ernie") else (config_of(model).pad_token_id or 0) + 1
    return torch.cat([torch.arange(n) + first for n in LENGTHS])[None]


def reads_attention(name):
    """Whether a class of Transformers has an attention by name."""
    return CLASSES.get(name) not in ("deberta_v2", "mpnet", "openai")


BY_NAME = [name for name in (*CLASSES, *CLONED) if reads_attention(name)]
#: What Transformers' heads say of the whole row.
_OF_A_ROW = ("SequenceClassification", "NextSentencePrediction", *OF_CHOICES)


@pytest.mark.parametrize("name", BY_NAME)
def test_by_name_a_packed_row_equals_the_padded_batch_or_is_refused(name):
    model = of_name(name)
    inputs = inputs_of(name, model.config, MASK)
    row = packed(inputs)
    if "position_ids" in inspect.signature(type(model).forward).parameters:
        row["position_ids"] = positions_of(name)
    if name.endswith(OF_CHOICES):
        row = {"input_ids": torch.randint(5, 30, (1, 24))} | BOUNDS
    refused = has_decoder(name) or name.startswith(("Bart", "Esm")) or name.endswith(_OF_A_ROW)
    pairs = ("BertForPreTraining", "AlbertForPreTraining", "ErnieForPreTraining")
    if refused or name in pairs or name.endswith("QuestionAnswering"):
        with pytest.raises(UnsupportedError, match=f"{name}: `cu_seq_lens_q` got a packed row"):
            model(**row)
        return
    found = of_tokens(model(**row), ())
    wanted = of_tokens(model(**inputs), ("logits",) if "ForPreTraining" in name else ())
    key = "logits 0" if "logits 0" in wanted else "last_hidden_state 0"
    same({key: found[key]}, {key: wanted[key]})
    if "loss 0" in found:
        torch.testing.assert_close(found["loss 0"], wanted["loss 0"], rtol=1e-5, atol=1e-6)
