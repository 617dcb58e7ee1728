"""nn.FusedAttention against torch.nn.MultiheadAttention and the reference op."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.func import functional_call

from fastplm._checks import ArgumentTypeError, ArgumentValueError
from fastplm.nn import FusedAttention
from fastplm.reference.attention import attention_ref
from fastplm.testing import assert_within_budget

EMBED, HEADS = 32, 4


def reference(input, context, key_mask, is_causal, **parameters):
    """The module in terms of plain PyTorch, with separate projections."""
    source = input if context is None else context
    projections = zip(
        (input, source, source),
        parameters["qkv_proj.weight"].chunk(3),
        parameters.get("qkv_proj.bias", torch.empty(0)).chunk(3)
        if "qkv_proj.bias" in parameters
        else (None,) * 3,
        strict=True,
    )
    query, key, value = (
        nn.functional.linear(*arguments).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        for arguments in projections
    )
    out = attention_ref(query, key, value, key_mask=key_mask, is_causal=is_causal)
    out = out.transpose(1, 2).flatten(2)
    return nn.functional.linear(out, parameters["out_proj.weight"], parameters.get("out_proj.bias"))


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("cross", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_equals_the_formula(cross, masked, is_causal, bias):
    module = FusedAttention(EMBED, HEADS, bias=bias)
    inputs = {
        "input": torch.randn(3, 9, EMBED),
        "context": torch.randn(3, 17, EMBED) if cross else None,
        "is_causal": is_causal,
        "key_mask": torch.rand(3, 17 if cross else 9) > 0.4 if masked else None,
        **{name: parameter.detach() for name, parameter in module.named_parameters()},
    }
    wrt = [name for name, value in inputs.items() if getattr(value, "is_floating_point", bool)()]

    def candidate(input, context, key_mask, is_causal, **parameters):
        options = {"key_mask": key_mask, "is_causal": is_causal}
        return functional_call(module, parameters, (input, context), options)

    assert_within_budget(candidate, reference, inputs, wrt=wrt)


def test_equals_torchs_multihead_attention_with_its_weights():
    theirs = nn.MultiheadAttention(EMBED, HEADS, batch_first=True)
    ours = FusedAttention(EMBED, HEADS)
    ours.qkv_proj.weight = theirs.in_proj_weight
    ours.qkv_proj.bias = theirs.in_proj_bias
    ours.out_proj = theirs.out_proj
    mask = torch.ones(2, 7, dtype=torch.bool)
    mask[1, 4:] = False

    def candidate(input):
        return ours.to(input.dtype)(input, key_mask=mask)

    def base(input):
        return theirs.to(input.dtype)(input, input, input, key_padding_mask=~mask)[0]

    assert_within_budget(candidate, base, {"input": torch.randn(2, 7, EMBED)}, wrt=["input"])


def test_bad_shapes_raise_typed_errors():
    with pytest.raises(ArgumentValueError, match="embed_dim"):
        FusedAttention(30, 4)
    module = FusedAttention(EMBED, HEADS)
    with pytest.raises(ArgumentValueError, match="input"):
        module(torch.randn(2, 3, EMBED + 1))
    with pytest.raises(ArgumentValueError, match="context"):
        module(torch.randn(2, 3, EMBED), torch.randn(2, EMBED))
    with pytest.raises(ArgumentTypeError, match="key_mask"):
        module(torch.randn(2, 3, EMBED), key_mask=torch.ones(2, 3))
