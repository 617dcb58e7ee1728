"""The rows that the layers of a drop-in model compute: padding is never kept silently."""

from __future__ import annotations

import copy
import logging
from pathlib import Path

import pytest
import torch
import transformers
from transformers.integrations.neftune import activate_neftune
from transformers.utils import logging as transformers_logging

import fastplm
from fastplm import models
from fastplm.models._ragged import PADDING_REASONS

from .conftest import changed, small_config

LENGTHS = torch.tensor([[9], [4], [2]])
MASK = (torch.arange(9) < LENGTHS).long()
TOKENS, ALL = int(MASK.sum()), MASK.numel()
IDS = torch.randint(3, 37, MASK.shape) * MASK  # 0 is the id of padding


@pytest.fixture
def said(caplog, monkeypatch):
    """The warnings of Transformers' logger, also those that it gives only once."""
    transformers_logging.enable_propagation()
    logging.Logger.warning_once.cache_clear()
    yield lambda: [record.getMessage() for record in caplog.records]
    transformers_logging.disable_propagation()


def rows(model) -> int:
    """The number of the batch's rows that a layer computes."""
    found = []
    layer = model.base_model.encoder.layer[0].intermediate.dense
    hook = layer.register_forward_pre_hook(lambda _, args: found.append(args[0].shape[:-1].numel()))
    with torch.no_grad():
        model(input_ids=IDS, attention_mask=MASK)
    hook.remove()
    return found[0]


def config():
    return copy.deepcopy(small_config("bert"))


@pytest.fixture
def stock():
    """A model of Transformers; to make it sets the attention in its configuration."""
    model = transformers.BertForMaskedLM(config())
    assert model.config._attn_implementation == "sdpa"
    return model


@pytest.fixture
def folder(stock, tmp_path):
    stock.save_pretrained(tmp_path)
    return tmp_path


def used_before(name):
    made = config()
    transformers.BertForMaskedLM._from_config(made, attn_implementation=name)
    assert made._attn_implementation == name
    return made


KIND = models.BertForMaskedLM
LEFT_OUT = {
    "a configuration used before": lambda folder, stock: KIND(used_before("sdpa")),
    "a configuration that was given before": lambda folder, stock: KIND(stock.config),
    "from_pretrained with it": lambda folder, stock: KIND.from_pretrained(
        folder, config=stock.config
    ),
    "_from_config": lambda folder, stock: KIND._from_config(stock.config),
    "an Auto class with it": lambda folder, stock: models.AutoModelForMaskedLM.from_config(
        stock.config
    ),
    "an Auto class from a folder": lambda folder, stock: (
        models.AutoModelForMaskedLM.from_pretrained(folder, config=stock.config)
    ),
    "accelerate": lambda folder, stock: fastplm.accelerate(stock),
}


@pytest.mark.parametrize("way", LEFT_OUT)
def test_padding_is_left_out(said, folder, stock, way):
    before = stock.config._attn_implementation
    assert rows(LEFT_OUT[way](folder, stock)) == TOKENS
    assert way == "accelerate" or stock.config._attn_implementation == before
    assert not said()


@pytest.mark.parametrize("name", ("sdpa", "eager"))
def test_another_attention_is_asked_for_in_the_call(said, folder, name):
    model = KIND.from_pretrained(folder, attn_implementation=name)
    assert rows(model) == ALL
    (line,) = said()
    assert line.startswith(
        f"BertForMaskedLM: with attn_implementation='{name}' padding is computed"
    )
    KIND.from_pretrained(folder, attn_implementation=name)
    assert len(said()) == 1


def test_another_attention_is_set_later(said):
    model = KIND(config())
    model.set_attn_implementation("sdpa")
    assert rows(model) == ALL
    (line,) = said()
    assert "padding is computed" in line
    model.set_attn_implementation("fastplm")
    assert rows(model) == TOKENS and len(said()) == 1


def test_a_configuration_that_says_another_name_is_left_aside_with_a_word(said):
    assert rows(KIND(used_before("eager"))) == TOKENS
    (line,) = said()
    assert "the configuration says attn_implementation='eager'" in line


SIZES = dict(vocab_size=37, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
MODEL = KIND(config())
REASONS = {
    "attention": (lambda: KIND._from_config(config(), attn_implementation="sdpa"), {}),
    "mask": (lambda: MODEL, {"attention_mask": MASK[:, None, None].expand(-1, 1, 9, -1).bool()}),
    "weights": (lambda: MODEL, {"output_attentions": True}),
    "asked": (lambda: MODEL, {"unpad": False}),
    "chunks": (lambda: KIND(changed(config(), chunk_size_feed_forward=3)), {}),
    "layers": (lambda: own_layer(KIND(config())), {}),
    "inputs": (lambda: adapted(), {"lang_ids": torch.zeros(len(IDS), dtype=torch.int64)}),
    "noise": (lambda: noised(KIND(config())), {}),
    "cache": (lambda: models.BertLMHeadModel(changed(config(), is_decoder=True)), {}),
    "length": (lambda: stretched(), {}),
    "traced": (lambda: torch.compile(MODEL, backend="eager"), {}),
}


def stretched():
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1000.0}
    sizes = {**SIZES, "max_position_embeddings": 8, "rope_parameters": rope}
    return models.NomicBertModel(transformers.NomicBertConfig(**sizes))


def adapted():
    sizes = {**SIZES, "languages": ["a", "b"], "default_language": "a"}
    return fastplm.accelerate(transformers.XmodForMaskedLM(transformers.XmodConfig(**sizes)))


class Wrapped(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *args, **kwargs):
        return self.inner(*args, **kwargs)


def own_layer(model):
    layer = model.bert.encoder.layer[0]
    layer.attention = Wrapped(layer.attention)
    return model


def noised(model):
    activate_neftune(model, 5.0)
    return model


def test_explain_says_what_is_computed():
    labels = torch.where(torch.arange(9) == 1, IDS, -100)
    given = {"attention_mask": MASK, "labels": labels, "output_logits": False}
    lines = fastplm.explain(MODEL.eval(), IDS, **given).splitlines()
    assert lines[0] == (
        f"BertModel: {TOKENS} of {ALL} rows, padding left out; 3 of them in the last layer; "
        "attention by 'fastplm'"
    )
    assert lines[1] == "BertForMaskedLM: head and loss of 3 labelled rows, without logits"
    said = fastplm.explain(MODEL, IDS[:1], attention_mask=MASK[:1])
    assert said.startswith("BertModel: 9 rows, no padding; attention by 'fastplm'")


@pytest.mark.slow
@pytest.mark.parametrize("reason", PADDING_REASONS)
def test_explain_says_why_padding_is_kept(reason):
    make, inputs = REASONS[reason]
    arguments = {"input_ids": IDS, "attention_mask": MASK} | inputs
    said = fastplm.explain(make().train(reason == "noise"), **arguments)
    assert said.splitlines()[0].split("; ")[0].endswith(PADDING_REASONS[reason].split("; ")[0])


def test_the_questions_list_every_reason():
    page = (Path(__file__).parents[2] / "docs/faq.md").read_text()
    section = " ".join(page.split("## When is padding not removed?")[1].split("\n## ")[0].split())
    for reason in PADDING_REASONS.values():
        assert reason.split(":")[0].split(",")[0].split(" (")[0] in section.replace("`", "")


def test_parts_of_a_pair_that_were_made_before():
    decoder = config()
    decoder.is_decoder = decoder.add_cross_attention = True
    parts = transformers.BertModel(config()), transformers.BertLMHeadModel(decoder)
    model = models.EncoderDecoderModel(encoder=parts[0], decoder=parts[1])
    for part in (model.encoder, model.decoder):
        assert part.config._attn_implementation == "fastplm"


def test_a_part_with_attention_of_its_own_keeps_it():
    sizes = dict(hidden_size=16, num_decoder_layers=1, num_decoder_attention_heads=2)
    decoder = transformers.ProphetNetConfig(vocab_size=37, decoder_ffn_dim=16, **sizes)
    both = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(config(), decoder)
    model = models.EncoderDecoderModel(both)
    assert model.encoder.config._attn_implementation == "fastplm"
    assert model.decoder.config._attn_implementation == "eager"
