"""The hidden states of chosen layers: no other layer, head or row is computed."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import transformers

from fastplm.inference.embed import embed
from fastplm.models import AutoModel

from ..models.conftest import FAMILIES, PREFIXES, pair, small_config
from .conftest import TEXTS, WORDS, hold, of_texts


@pytest.mark.parametrize("name", ["BertForMaskedLM", "BartForConditionalGeneration", "T5Model"])
def test_heads_and_decoders_are_left_out(name, tokenizer):
    model, _ = pair(name)
    inner = model.base_model
    inner = getattr(inner, "encoder", None) if model.config.is_encoder_decoder else inner
    assert np.array_equal(embed(model, tokenizer, TEXTS), embed(inner, tokenizer, TEXTS))


def test_models_of_transformers_alone(tokenizer):
    """Padded batches, for a class without a drop-in class and for a parent."""
    config = transformers.DistilBertConfig(
        vocab_size=37, dim=16, hidden_dim=24, n_layers=2, n_heads=2, initializer_range=0.3
    )
    model = transformers.DistilBertModel(config).eval()
    for theirs in (model, pair("BertModel")[1]):
        hold(
            theirs,
            copy.deepcopy(theirs),
            lambda m: embed(m, tokenizer, TEXTS, layers=(0, 1, 2)),
            lambda m: of_texts(m, tokenizer, (0, 1, 2)),
        )


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_no_layer_above_the_chosen_ones_runs(family, tokenizer):
    model, _ = pair(f"{PREFIXES[family]}Model")
    backbone = model.encoder if model.config.is_encoder_decoder else model
    blocks = getattr(backbone, "h", None) or getattr(backbone, "layers", None)
    blocks = blocks or getattr(backbone, "block", None)
    if blocks is None:
        encoder = getattr(backbone, "encoder", None) or backbone.transformer  # DistilBERT
        blocks = encoder.albert_layer_groups if family == "albert" else encoder.layer
    ran = []
    for block in set(blocks):
        block.register_forward_hook(lambda *_: ran.append(1))
    for layer in (0, 1, 2):
        ran.clear()
        embed(model, tokenizer, TEXTS, layers=(layer,), batch_tokens=1000)
        assert len(ran) <= max(layer, 1)  # the embeddings are the first layer's input


def test_the_last_layer_computes_only_the_tokens_that_are_read(tokenizer):
    model, _ = pair("BertModel")
    rows = []
    model.encoder.layer[-1].intermediate.dense.register_forward_hook(
        lambda module, inputs, output: rows.append(output.shape[-2])
    )
    embed(model, tokenizer, TEXTS, pooling="cls", batch_tokens=1000)
    embed(model, tokenizer, WORDS, words="first", batch_tokens=1000)
    # This model's pooler also reads the first token of each text.
    assert rows == [len(TEXTS), 9 + len(WORDS)]  # nine of the words have a token


def test_vectors_are_repeatable_in_a_model_that_is_being_trained(tokenizer):
    model = AutoModel.from_config(small_config("bert", hidden_dropout_prob=0.5)).train()
    first = embed(model, tokenizer, TEXTS)
    assert np.array_equal(first, embed(model, tokenizer, TEXTS)) and model.training
    assert not any(module._forward_hooks for module in model.modules())
