"""Students that are made of a teacher."""

from __future__ import annotations

import pytest
import torch
from transformers import AlbertConfig, BertConfig, GPT2Config

import fastplm.models
from fastplm.distill.models import change_vocabulary, copy_weights, spread_layers
from fastplm.distill.objectives import layers_of, uniform_layers

from .conftest import SIZES


def test_layers_at_equal_distances():
    assert spread_layers(6, 12) == [0, 2, 4, 7, 9, 11]  # DistilBERT's
    assert spread_layers(1, 5) == [0] and spread_layers(3, 3) == [0, 1, 2]
    assert spread_layers(2, 6) == [0, 5]
    assert uniform_layers(4, 12) == [2, 5, 8, 11]  # TinyBERT's
    assert uniform_layers(1, 5) == [4]


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("BertForMaskedLM", BertConfig(**SIZES, hidden_size=8, num_hidden_layers=4)),
        (
            "AlbertForMaskedLM",
            AlbertConfig(
                **{**SIZES, "vocab_size": 31},
                hidden_size=8,
                num_hidden_layers=4,
                num_hidden_groups=4,
            ),
        ),
        ("GPT2LMHeadModel", GPT2Config(vocab_size=31, n_embd=8, n_head=2, n_layer=4)),
    ],
    ids=["bert", "albert", "gpt2"],
)
def test_a_student_begins_with_layers_of_the_teacher(kind, config):
    teacher = getattr(fastplm.models, kind)(config)
    smaller = type(config)(
        **{
            **config.to_dict(),
            config.attribute_map.get("num_hidden_layers", "num_hidden_layers"): 2,
        }
    )
    if kind.startswith("Albert"):
        smaller.num_hidden_groups = 2
    student = getattr(fastplm.models, kind)(smaller)
    copy_weights(student, teacher, [1, 3])

    def layers(model):
        return model.base_model.h if kind.startswith("GPT2") else layers_of(model)

    for ours, theirs in zip(layers(student), (layers(teacher)[1], layers(teacher)[3]), strict=True):
        for name, value in ours.state_dict().items():
            assert torch.equal(value, theirs.state_dict()[name])
    ids = torch.arange(6)[None]
    embedded = [model.get_input_embeddings()(ids) for model in (student, teacher)]
    assert torch.equal(*embedded)
    assert torch.equal(*(model.get_output_embeddings().weight for model in (student, teacher)))


def test_tokens_of_both_vocabularies_keep_their_embedding(word_tokenizer):
    old = word_tokenizer(["[PAD]", "a", "b", "c"], pad_token="[PAD]")
    new = word_tokenizer(["c", "[PAD]", "d", "a", "e"], pad_token="[PAD]")
    config = BertConfig(**{**SIZES, "vocab_size": 4}, hidden_size=8, num_hidden_layers=1)
    student = fastplm.models.BertModel(config)
    before = student.get_input_embeddings().weight.detach().clone()
    change_vocabulary(student, new, old, copied=True)
    after = student.get_input_embeddings().weight
    assert after.shape == (5, 8) and student.config.vocab_size == 5
    assert torch.equal(after[[0, 1, 3]], before[[3, 0, 1]])
    assert bool((after[[2, 4]] != 0).all())
    assert student.config.pad_token_id == 1
