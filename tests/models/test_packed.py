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
from fastplm._backends import record_notes
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
OF_VOCABULARY = ("MaskedLM", "CausalLM", "LMHeadModel", "BertForPreTraining", "ErnieForPreTraining")
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


@pytest.mark.parametrize("changed", [False, True], ids=["", "a head of the user's"])
@pytest.mark.parametrize("name", [name for name in TAKEN if name.endswith(OF_VOCABULARY)])
def test_logits_of_a_packed_row_are_those_of_its_tokens(name, changed):
    """Not of a padded batch, but where a head of the user's may read the rows beside."""
    model, inputs = model_and_inputs(name)
    if changed:
        model.get_output_embeddings().register_forward_hook(lambda *_: None)
    with record_notes() as notes:
        found = model(**packed(inputs), output_logits=True)
    wanted = model(**inputs, output_logits=True)
    key = "prediction_logits" if "PreTraining" in name else "logits"
    same({"": found[key]}, {"": wanted[key][SEEN][None]})
    if changed:
        return
    assert "logits of 24 rows" in "\n".join(notes)
    slopes = gradients(model, found.loss)
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


# --- what is refused, and what else a row may hold ------------------------------------------------


def test_what_the_collator_of_transformers_returns():
    """Also position ids alone, from which a causal model of Transformers finds the texts."""
    for name in ("DebertaV2ForMaskedLM", "EsmForMaskedLM", "GPT2LMHeadModel"):
        model, inputs = model_and_inputs(name)
        ids = inputs["input_ids"]
        samples = [dict(input_ids=one[seen]) for one, seen in zip(ids, SEEN, strict=True)]
        labels = ids.masked_fill(~SEEN, -100).index_fill(1, torch.tensor([0]), -100)
        wanted = model(ids, attention_mask=MASK, labels=labels).loss
        for bounds in (True, False) if "GPT2" in name else (True,):
            batch = DataCollatorWithFlattening(return_flash_attn_kwargs=bounds)(samples)
            torch.testing.assert_close(model(**batch).loss, wanted)


def test_spare_rows_and_a_mask_of_the_row():
    """Our collators fill a row up; others pass a mask of its tokens, too."""
    model, inputs = model_and_inputs("ModernBertForMaskedLM")
    wanted, row = model.eval()(**inputs), packed(inputs)
    for name in ("input_ids", "labels"):
        filler = -100 if name == "labels" else 0
        row[name] = nn.functional.pad(row[name], (0, 3), value=filler)
    found = model(**row, attention_mask=torch.ones(1, 27, dtype=torch.int64))
    same({"": found.loss}, {"": wanted.loss})
    same({"": found.logits[:, :24]}, {"": wanted.logits[SEEN][None]})
    hidden = MASK.index_fill(1, torch.tensor([1]), 0)
    inputs |= {"attention_mask": hidden, "labels": inputs["labels"].masked_fill(hidden == 0, -100)}
    found = model(**packed(inputs), attention_mask=hidden[SEEN][None])
    same({"": found.loss}, {"": model(**inputs).loss})


def test_arguments_are_those_of_the_row():
    """Positions, flat labels, embeddings; a tuple is returned as elsewhere."""
    model, inputs = model_and_inputs("BertForMaskedLM")
    model, row = model.eval(), packed(inputs)
    wanted = model(**row)
    places = (row["labels"][0] != -100).nonzero()[:, 0]
    slots = torch.cat((places, torch.tensor([-1])))
    found = model(**row, masked_positions=slots, reduction="none").loss
    torch.testing.assert_close(found[:-1].mean(), wanted.loss)
    loss, logits = model(**row | {"labels": row["labels"].flatten(), "return_dict": False})
    same(dict(loss=loss, logits=logits), dict(loss=wanted.loss, logits=wanted.logits))
    embeds = model.get_input_embeddings()(row.pop("input_ids")).detach().requires_grad_()
    loss = model(inputs_embeds=embeds, **row).loss
    torch.testing.assert_close(loss, wanted.loss)
    loss.backward()
    assert embeds.grad[0, : LENGTHS[0]].ne(0).any(-1).all(), "of each token of a text with labels"
    rows = model.bert(inputs_embeds=embeds, output_rows=places, **BOUNDS).last_hidden_state
    states = model.bert(inputs_embeds=embeds, **BOUNDS).last_hidden_state
    torch.testing.assert_close(rows[:, 0], states[0, places])


def test_hidden_states_of_a_row_are_those_of_the_graph():
    model, inputs = model_and_inputs("BertForMaskedLM")
    out = model(**packed(inputs), output_hidden_states=True)
    slopes = torch.autograd.grad(out.loss, out.hidden_states)
    assert all(one.shape[:2] == (1, 24) and one.any() for one in slopes)


def test_compiles_as_a_whole():
    torch._dynamo.reset()
    model, inputs = model_and_inputs("BertForMaskedLM")
    row, by_name = packed(inputs), of_name("BertForMaskedLM")
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    same({"": compiled(**row).loss}, {"": model(**row).loss})
    row["position_ids"] = positions_of("BertForMaskedLM")
    compiled = torch.compile(by_name, backend="eager", fullgraph=True)
    same({"": compiled(**row).logits}, {"": by_name(**row).logits})


@pytest.mark.parametrize("name", ["BertModel", "BertForSequenceClassification", "ModernBertModel"])
def test_frozen_models_take_packed_rows(name):
    model, inputs = model_and_inputs(name)
    row, model = packed(inputs), model.float().eval()
    with torch.no_grad():
        wanted = model(**row)[0]
        torch.testing.assert_close(fastplm.freeze(model)(**row)[0], wanted)


IDS = torch.randint(5, 30, (1, 24))
WRONG = {
    "three": (dict(max_length_k=None), "`max_length_k` got None"),
    "rows": (dict(input_ids=IDS.view(2, 12)), "`cu_seq_lens_q` got a value with a batch"),
    "floats": (dict(cu_seq_lens_q=BORDERS.float()), "`cu_seq_lens_q`"),
    "no text": (dict(cu_seq_lens_q=BORDERS[:1]), "`cu_seq_lens_q` got no text"),
    "too long": (dict.fromkeys(PACKED[:2], BORDERS + 1), "`cu_seq_lens_q` got 1 … 25"),
    "longest": (dict(max_length_q=5), "`max_length_q` got 5; expected at least 9"),
    "other keys": (dict(cu_seq_lens_k=BORDERS + 1), "`cu_seq_lens_k` got other"),
    "a full mask": (dict(attention_mask=torch.ones(1, 1, 24, 24)), "`attention_mask` got 4 dim"),
    "weights": (dict(output_attentions=True), "`cu_seq_lens_q` got a packed row with output_att"),
    "cache": (dict(use_cache=True), "`cu_seq_lens_q` got a packed row with use_cache"),
    "an encoder": (dict(encoder_hidden_states=torch.randn(1, 4, 16)), "`cu_seq_lens_q`"),
    "labels": (dict(labels=torch.ones(1, 23)), "`labels` got shape .1, 23. with a packed row of 4"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_does_not_fit_is_refused(wrong):
    given, message = WRONG[wrong]
    model = models.BertForMaskedLM(config_of("BertForMaskedLM"))
    with pytest.raises((ArgumentValueError, UnsupportedError, TypeError), match=message):
        model(**{"input_ids": IDS, **BOUNDS, **given})


@pytest.mark.parametrize(
    "name", [name for name in TAKEN if name.endswith(("SequenceClassification", "Prediction"))]
)
def test_labels_of_another_number_of_texts_name_the_cause(name):
    """By class; and by name, where a head reads the first or last token of the row alone."""
    labels = torch.tensor([1, 0, 1])
    with pytest.raises(ArgumentValueError, match="`labels` got shape .3,. with a packed row of 4"):
        getattr(models, name)(with_classes(name, config_of(name)))(IDS, labels=labels, **BOUNDS)
    if reads_attention(name):
        message = "`cu_seq_lens_q` got a packed row of 4 texts, with labels of shape .4,."
        with pytest.raises(UnsupportedError, match=message):
            of_name(name)(IDS, labels=torch.tensor([1, 0, 1, 1]), **BOUNDS)


def test_an_attention_without_a_class_takes_more_tokens_than_positions():
    """The positions of each text count, not the tokens of the row."""
    sizes = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24)
    config = transformers.BioGptConfig(vocab_size=40, max_position_embeddings=12, **sizes)
    parent = transformers.BioGptModel(config).eval()
    model = fastplm.accelerate(copy.deepcopy(parent))
    assert type(model) is transformers.BioGptModel
    row = dict(input_ids=IDS, position_ids=torch.cat([torch.arange(n) for n in LENGTHS])[None])
    ids = torch.zeros_like(MASK).masked_scatter(SEEN, IDS)
    with torch.no_grad():
        wanted = model(ids, attention_mask=MASK).last_hidden_state[SEEN][None]
        torch.testing.assert_close(model(**row, **BOUNDS).last_hidden_state, wanted)
        # Without borders it is one text, as in Transformers.
        torch.testing.assert_close(model(**row)[0], parent(**row)[0])
    with pytest.raises(ArgumentValueError, match="`input_ids` got 24 tokens; expected at most 12"):
        model(IDS)
    with pytest.raises(ArgumentValueError, match="`position_ids` got None"):
        model(IDS, **BOUNDS)
