"""Layers that replace PyTorch's and Transformers': when they run an op, and in which models."""

from __future__ import annotations

import sys

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn
from transformers.activations import ACT2FN, gelu_new
from transformers.models.t5.modeling_t5 import T5LayerNorm
from transformers.pytorch_utils import Conv1D

import fastplm
import fastplm.models.t5  # registers the drop-in class of T5's layer norm
from fastplm import _extension, _registry, hf, models, ops
from fastplm.models._base import drop_in_for, restore_modules, switch_modules
from fastplm.nn import Dropout
from fastplm.testing import assert_within_budget

from .samples import backends_of, ops_of

pytestmark = pytest.mark.skipif(_extension._MISSING is not None, reason="csrc/ is not built")
LARGE = (256, 96)


def gelu_tanh(input):
    return F.gelu(input, approximate="tanh")


#: A layer, and the layer of PyTorch or Transformers that it replaces, or that layer's function.
LAYERS = {
    "GELU": (lambda: nn.GELU("tanh"), gelu_tanh),
    "gelu_new": (lambda: ACT2FN["gelu_new"], ACT2FN["gelu_new"]),
    "gelu_pytorch_tanh": (lambda: ACT2FN["gelu_pytorch_tanh"], gelu_tanh),
    "nn.RMSNorm": (lambda: nn.RMSNorm(LARGE[-1], eps=1e-6), nn.RMSNorm(LARGE[-1], eps=1e-6)),
    "T5LayerNorm": (lambda: T5LayerNorm(LARGE[-1]), T5LayerNorm(LARGE[-1])),
    "Dropout": (lambda: nn.Dropout(0.1), None),
}


@pytest.mark.parametrize(("make", "theirs"), LAYERS.values(), ids=LAYERS)
def test_a_layer_takes_its_op_where_it_is_faster(make, theirs):
    layer, large = make(), torch.randn(LARGE)
    holder, kind = nn.Sequential(layer), type(layer)
    switch_modules(holder)
    assert type(layer).__module__.startswith("fastplm.") and isinstance(layer, kind)
    assert backends_of(layer, large) == ["cpp"]
    assert backends_of(layer, large[:4]) == []
    assert backends_of(torch.vmap(layer, randomness="different"), large) == []
    for backend in ("eager", "torch", "triton"):
        with fastplm.use_backend(backend):
            assert backends_of(layer, large) == []
    if theirs is not None:
        for input in (large, large[:4]):
            ours, parents = (lambda input, f=f: f(input) for f in (layer, theirs))
            assert_within_budget(ours, parents, {"input": input})
    if kind is not nn.RMSNorm:  # nn.RMSNorm takes one dtype alone
        assert backends_of(layer, large.bfloat16()) == ["cpp"]
    assert backends_of(layer.double(), large.double()) == []
    assert backends_of(layer.to("meta"), large.double().to("meta")) == []
    restore_modules(holder)
    assert type(layer) is kind


@pytest.mark.parametrize("name", (*LAYERS, "Linear", "Conv1D"))
def test_on_another_device_a_layer_asks_no_rule_and_no_choice(monkeypatch, name):
    linear = {"Linear": lambda: nn.Linear(96, 32), "Conv1D": lambda: Conv1D(32, 96)}
    layer = (linear.get(name) or LAYERS[name][0])().to("meta")
    switch_modules(holder := nn.Sequential(layer))
    assert drop_in_for(layer) or type(layer).__module__.startswith("fastplm.")
    for function in ("slower", "requested"):
        monkeypatch.setattr(_registry, function, lambda *_: pytest.fail("it is of a CPU"))
    assert holder(torch.randn(LARGE, device="meta")).is_meta


def test_on_another_device_no_fast_path_asks_anything(monkeypatch):
    """Neither that of attention nor, before it, that of the attention of Transformers' models."""
    query = torch.randn(2, 3, 8, 16, device="meta")
    for module in ("fastplm.ops.attention", "fastplm.ops.linear"):
        monkeypatch.setattr(sys.modules[module], "fast_choice", lambda op: pytest.fail("on a CPU"))
    ops.linear(query, query[0, 0])
    starts = torch.tensor([0, 4, 8], dtype=torch.int32, device="meta")
    with fastplm.use_backend("eager"):
        hf.fastplm_attention_forward(nn.Identity(), query, query, query, None, is_causal=False)
        ops.attention(query, query, query)
        rows = query[0].transpose(0, 1)
        ops.attention_varlen(rows, rows, rows, starts, starts, 4, 4)


SIZES = dict(vocab_size=37, pad_token_id=0, bos_token_id=1, eos_token_id=2)
T5 = dict(d_model=64, d_kv=32, num_layers=1, num_heads=2, decoder_start_token_id=0)
GPT = dict(n_embd=64, n_layer=1, n_head=2, n_positions=256)
BERT = dict(hidden_size=64, num_hidden_layers=1, num_attention_heads=2)
#: For each family: its configuration, an op, and how often a model runs the op.
MODELS = {
    "Albert": (BERT | dict(embedding_size=16, intermediate_size=256), "bias_gelu", 1),
    "GPT2": (GPT, "gelu", 1),
    "OpenAIGPT": (GPT, "bias_gelu", 1),
    "T5, gated": (T5 | dict(d_ff=256, feed_forward_proj="gated-gelu"), "bias_gelu", 1),
    # The encoder has two blocks. The decoder makes a cache, so its modules run.
    "T5": (T5 | dict(d_ff=96), "dropout_add_layer_norm", 2),
    # The ends of the attention block and of the feed-forward block.
    "Bert": (BERT | dict(intermediate_size=64), "dropout_add_layer_norm", 2),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_run_ops_and_are_given_back_without(name):
    sizes, op, count = MODELS[name]
    family = name.split(",")[0]
    options = {"hidden_act": "gelu_new"} if family == "Albert" else {}
    config = getattr(transformers, f"{family}Config")(**sizes, **SIZES, **options)
    given = {"input_ids": torch.randint(3, 37, (8, 128))}
    if family == "T5":
        given["decoder_input_ids"] = given["input_ids"]
    parent = getattr(transformers, f"{family}Model")(config).train(op == "dropout")
    ours = getattr(models, f"{family}Model")(config).train(op == "dropout")
    for model in (ours, fastplm.accelerate(parent)):
        assert ops_of(lambda model=model: model(**given)).count(op) == count
    assert op not in ops_of(lambda: fastplm.restore(parent)(**given))
    # All models share OpenAI's activation module, those of Transformers, too.
    assert type(gelu_new) is transformers.activations.NewGELUActivation
    assert not any(isinstance(module, Dropout) for module in parent.modules())
