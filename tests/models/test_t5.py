"""fastplm.models.t5: tests beyond test_contract.py and test_seq2seq.py."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers.models.t5 import modeling_t5

import fastplm.hf
from fastplm import models
from fastplm._backends import record_decisions
from fastplm.models import T5ForConditionalGeneration, T5Model
from fastplm.models._base import switch_modules

from . import conftest
from .conftest import LENGTH, PADDINGS, ROWS, changed, small_config

CONFIG = small_config("t5", num_labels=3)
#: A model with gated GELU, and with an untied head whose input is not scaled.
V1_1 = dict(is_gated_act=True, dense_act_fn="gelu_new")
V1_1 |= dict(tie_word_embeddings=False, scale_decoder_outputs=False)
HOLES = torch.tensor(
    [[1, 0, 1, 1, 1, 1, 0, 0, 1], [0, 1, 1, 0, 0, 1, 1, 0, 0], [1] * 8 + [0], [0] * 3 + [1] * 6]
)


def inputs_of(name, padding="right"):
    return conftest.inputs_of(name, CONFIG, PADDINGS[padding])


@pytest.mark.parametrize("options", [{}, {"decoder_unpad": False}], ids=str)
@pytest.mark.parametrize("fields", [{}, V1_1], ids=["v1.0", "v1.1"])
def test_holes_in_the_source_equal_the_parents(hold_drop_in, fields, options):
    config = changed(CONFIG, **fields)
    given = {"attention_mask": HOLES}
    hold_drop_in(T5ForConditionalGeneration, config, "right", given=given, **options)


def test_a_decoder_with_a_cache_equals_the_parents(hold_drop_in):
    hold_drop_in(T5Model, CONFIG, "left", given={"use_cache": True})


@pytest.mark.parametrize("enabled", [True, False], ids=["autocast", "fp32"])
@pytest.mark.parametrize("gated", [False, True])
def test_a_feed_forward_layer_under_autocast(gated, enabled):
    """Equal to the parent's, bit for bit, with a second matrix that reads what the first made."""
    config = changed(CONFIG, **(V1_1 | {"dense_act_fn": "relu"} if gated else {}))
    parent = modeling_t5.T5LayerFF(config).DenseReluDense
    ours = copy.deepcopy(parent)
    switch_modules(ours)
    assert type(ours) is not type(parent)
    found = []
    for layer in (parent, ours):
        read = []
        layer.wo.register_forward_pre_hook(lambda wo, args, read=read: read.append(args[0].dtype))
        torch.manual_seed(3)
        x = torch.randn(5, 7, config.d_model, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            out = layer(x)
        out.float().square().sum().backward()
        found.append((out, x.grad, *(weight.grad for weight in layer.parameters())))
    assert read == [torch.bfloat16 if enabled else torch.float32]
    for ours_is, parents in zip(*found, strict=True):
        assert ours_is.dtype == parents.dtype and torch.equal(ours_is, parents)


def test_no_layer_gets_a_dense_bias(monkeypatch):
    """Layers pass the table on as the position bias, also for a padded batch."""
    seen, inner = [], fastplm.hf._relative_bias

    def spy(module, query, key, position_bias):
        seen.append(position_bias)
        return inner(module, query, key, position_bias)

    monkeypatch.setattr(fastplm.hf, "_relative_bias", spy)
    model, given = T5ForConditionalGeneration(CONFIG), inputs_of("T5ForConditionalGeneration")
    for unpad in (None, False):
        with record_decisions() as decisions:
            model(**given, unpad=unpad, decoder_unpad=unpad)
        assert [decision.op for decision in decisions].count("attention") == 6
    assert len(seen) == 12 and not any(isinstance(bias, torch.Tensor) for bias in seen)


def test_a_table_goes_with_a_complete_mask():
    query = torch.randn(1, 2, 3, 8)
    bias = fastplm.ops.T5RelativeBias(torch.randn(8, 2))
    mask = torch.ones(1, 1, 3, 3, dtype=torch.bool).tril()
    found, _ = fastplm.hf.fastplm_attention_forward(
        torch.nn.Identity(), query, query, query, mask, scaling=1.0, position_bias=bias
    )
    wanted = fastplm.ops.attention(
        query, query, query, attn_mask=mask, scale=1.0, relative_bias=bias
    )
    assert torch.equal(found, wanted.transpose(1, 2))


def test_a_decoder_without_inputs_is_the_parents_error():
    given = inputs_of("T5Model") | {"decoder_input_ids": None}
    with pytest.raises(ValueError, match="exactly one of input_ids"):
        T5Model(CONFIG)(**given)


def test_a_classifiers_decoder_of_another_length_is_the_parents_error():
    given = inputs_of("T5ForSequenceClassification")
    given["decoder_input_ids"] = torch.full((ROWS, LENGTH + 2), 5)
    with pytest.raises(IndexError):
        models.T5ForSequenceClassification(CONFIG)(**given)


@pytest.mark.parametrize("unpad", [None, 20])
def test_question_answering_computes_every_row_of_the_decoder(unpad):
    given = inputs_of("T5ForQuestionAnswering")
    given["decoder_input_ids"] = given["input_ids"]
    given["decoder_attention_mask"] = given["attention_mask"]
    model = models.T5ForQuestionAnswering(changed(CONFIG, num_labels=2))
    assert torch.equal(model(**given).loss, model(**given, decoder_unpad=unpad).loss)
