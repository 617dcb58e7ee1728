"""Encoder-decoders whose parts are loaded from checkpoints, or new."""

from __future__ import annotations

import pytest
import torch
import transformers

import fastplm.models
from fastplm.finetune.data import prepare_task
from fastplm.finetune.models import build_model


@pytest.mark.parametrize("warm", ["both", "encoder", "decoder", "none"])
@pytest.mark.parametrize("library", ["fastplm", "transformers"])
def test_which_parts_are_warm(warm, library, writing, writers):
    args = writing("bert2bert", warm=warm, library=library, target_vocab_size=None)
    model = build_model(prepare_task(args), 0)
    known = transformers.BertModel.from_pretrained(writers / "bert").state_dict()
    name = "encoder.layer.1.intermediate.dense.weight"
    parts = {"encoder": model.encoder, "decoder": model.decoder.bert}
    for part, backbone in parts.items():
        loaded = torch.equal(backbone.state_dict()[name], known[name])
        assert loaded == (warm in ("both", part))
    assert any(".crossattention." in name for name, _ in model.decoder.named_parameters())
    ours = type(model) is fastplm.models.EncoderDecoderModel
    assert ours == (library == "fastplm")


@pytest.mark.parametrize("warm", ["both", "none"])
def test_shared_weights(warm, writing):
    args = writing("bertshare", warm=warm)
    model = build_model(prepare_task(args), 0)
    weights = dict(model.decoder.bert.named_parameters())
    for name, weight in model.encoder.named_parameters():
        assert name.startswith("pooler.") or weights[name] is weight


def test_a_new_vocabulary_leaves_the_layers_warm(writing, writers):
    args = writing("bert2bert")
    task = prepare_task(args)
    model = build_model(task, 0)
    known = transformers.BertModel.from_pretrained(writers / "bert").state_dict()
    found = model.decoder.bert.state_dict()
    name = "encoder.layer.0.attention.self.query.weight"
    assert torch.equal(found[name], known[name])
    assert len(found["embeddings.word_embeddings.weight"]) == len(task.target_tokenizer)
