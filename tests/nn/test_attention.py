"""nn.FusedAttention against torch.nn.MultiheadAttention and the formula in plain PyTorch."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.func import functional_call

from fastplm import ops
from fastplm.errors import ArgumentTypeError, ArgumentValueError
from fastplm.nn import FusedAttention
from fastplm.reference.attention import attention_ref, attention_varlen_ref
from fastplm.testing import assert_within_budget

EMBED, HEADS = 32, 4
LENGTHS, CONTEXT_LENGTHS = (9, 4, 0, 6), (5, 11, 3, 1)


def reference(input, context=None, cu_seqlens=None, max_seqlen=None, parameters=None, **options):
    """The module in terms of plain PyTorch, with separate projections."""
    source = input if context is None else context
    kinds = []  # weights and biases, each for query, key and value
    for kind in ("weight", "bias"):
        if f"kv_proj.{kind}" in parameters:
            both = parameters[f"kv_proj.{kind}"].chunk(2)
            kinds.append((parameters[f"q_proj.{kind}"], *both))
        elif f"qkv_proj.{kind}" in parameters:
            kinds.append(parameters[f"qkv_proj.{kind}"].chunk(3))
        else:
            kinds.append((None,) * 3)
    projections = zip((input, source, source), *kinds, strict=True)
    heads = [nn.functional.linear(*each).unflatten(-1, (HEADS, -1)) for each in projections]
    if cu_seqlens is None:
        heads = [each.transpose(1, 2) for each in heads]
        out = attention_ref(*heads, **options).transpose(1, 2)
    else:
        cu_seqlens_context = options.pop("cu_seqlens_context", cu_seqlens)
        max_seqlen_context = options.pop("max_seqlen_context", max_seqlen)
        bounds = (cu_seqlens, cu_seqlens_context, max_seqlen, max_seqlen_context)
        out = attention_varlen_ref(*heads, *bounds, **options)
    weight, bias = parameters["out_proj.weight"], parameters.get("out_proj.bias")
    return nn.functional.linear(out.flatten(-2), weight, bias)


def hold(module, inputs, candidate=None, base=None, **fixed):
    """Checks that ``module``'s output and gradients are as near to the truth as the formula's.

    Floating tensors of ``inputs`` get gradients; ``table`` is the table of T5's bias.
    """
    candidate = module.__call__ if candidate is None else candidate
    names = [name for name, _ in module.named_parameters()]
    parameters = {name: parameter.detach() for name, parameter in module.named_parameters()}

    def split(given):
        own = {name: given.pop(name) for name in names}
        if "table" in given:
            given["relative_bias"] = ops.T5RelativeBias(given.pop("table"), bidirectional=False)
        return own, given | fixed

    class Call(nn.Module):
        """A module to run under functional_call, which replaces parameters for its forward."""

        def __init__(self):
            super().__init__()
            self.module = module

        def forward(self, given):
            return candidate(**given)

    call = Call()

    def run(**given):
        own, given = split(given)
        return functional_call(call, {f"module.{name}": own[name] for name in names}, (given,))

    def formula(**given):
        own, given = split(given)
        options = {"dropout_p": module.dropout if module.training else 0.0, "scale": module.scale}
        return (base or reference)(parameters=own, **given, **options)

    assert_within_budget(run, formula, inputs | parameters, wrt=[*inputs, *names])


def bounds(lengths):
    ends = torch.tensor((0, *lengths), dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return ends, max(lengths)


def padding(lengths):
    return torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("cross", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_equals_the_formula(cross, masked, is_causal, bias):
    module = FusedAttention(EMBED, HEADS, bias=bias)
    inputs = {"input": torch.randn(3, 9, EMBED)}
    if cross:
        inputs["context"] = torch.randn(3, 17, EMBED)
    key_mask = torch.rand(3, 17 if cross else 9) > 0.4 if masked else None
    hold(module, inputs, key_mask=key_mask, is_causal=is_causal)


@pytest.mark.parametrize("cross", [False, True])
def test_head_dim_and_scale_of_ones_own(cross):
    module = FusedAttention(EMBED, HEADS, head_dim=12, bias=False, scale=1.0)
    assert module.qkv_proj.weight.shape == (3 * HEADS * 12, EMBED)
    assert module.out_proj.weight.shape == (EMBED, HEADS * 12)
    inputs = {"input": torch.randn(2, 9, EMBED)}
    if cross:
        inputs["context"] = torch.randn(2, 5, EMBED)
    hold(module, inputs)


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


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_a_context_of_another_width(bias, ragged):
    module = FusedAttention(EMBED, HEADS, context_dim=24, bias=bias)
    assert module.kv_proj.weight.shape == (2 * EMBED, 24) and "context_dim=24" in repr(module)
    if not ragged:
        inputs = {"input": torch.randn(3, 9, EMBED), "context": torch.randn(3, 17, 24)}
        return hold(module, inputs, key_mask=torch.rand(3, 17) > 0.4)
    starts, longest = bounds(LENGTHS)
    of_context, longest_context = bounds(CONTEXT_LENGTHS)
    inputs = {
        "input": torch.randn(sum(LENGTHS), EMBED),
        "context": torch.randn(sum(CONTEXT_LENGTHS), 24),
    }
    ends = dict(cu_seqlens_context=of_context, max_seqlen_context=longest_context)
    hold(module, inputs, cu_seqlens=starts, max_seqlen=longest, **ends)


def test_a_context_of_another_width_equals_torchs():
    """In torch, keys and values may come from two contexts of two widths; here there is one."""
    theirs = nn.MultiheadAttention(EMBED, HEADS, kdim=24, vdim=24, batch_first=True)
    ours = FusedAttention(EMBED, HEADS, context_dim=24)
    query, key, value = theirs.in_proj_bias.chunk(3)
    ours.load_state_dict(
        {
            "q_proj.weight": theirs.q_proj_weight,
            "q_proj.bias": query,
            "kv_proj.weight": torch.cat((theirs.k_proj_weight, theirs.v_proj_weight)),
            "kv_proj.bias": torch.cat((key, value)),
            "out_proj.weight": theirs.out_proj.weight,
            "out_proj.bias": theirs.out_proj.bias,
        }
    )
    mask = torch.rand(5, 7) < 0.6
    mask[:, 0] = True

    def candidate(input, context):
        return ours.to(input.dtype)(input, context, attn_mask=mask)

    def base(input, context):
        return theirs.to(input.dtype)(input, context, context, attn_mask=~mask)[0]

    inputs = {"input": torch.randn(2, 5, EMBED), "context": torch.randn(2, 7, 24)}
    assert_within_budget(candidate, base, inputs, wrt=list(inputs))


@pytest.mark.parametrize("cross", [False, True])
@pytest.mark.parametrize("shape", [(1, 1), (3, 1), (3, HEADS), ()])
def test_a_dense_mask(shape, cross):
    module = FusedAttention(EMBED, HEADS)
    inputs = {"input": torch.randn(3, 9, EMBED)}
    if cross:
        inputs["context"] = torch.randn(3, 17, EMBED)
    seqlen_k = 17 if cross else 9
    mask = torch.rand(*shape, 9, seqlen_k) > 0.4
    hold(module, inputs, attn_mask=mask, key_mask=torch.rand(3, seqlen_k) > 0.2)


@pytest.mark.parametrize("is_causal", [False, True])
def test_relative_bias(is_causal):
    inputs = {"input": torch.randn(2, 9, EMBED), "table": torch.randn(8, HEADS)}
    hold(FusedAttention(EMBED, HEADS), inputs, is_causal=is_causal)


# --- dropout --------------------------------------------------------------------------------------


def test_dropout_equals_the_formula_with_its_seed_and_samples():
    module = FusedAttention(EMBED, HEADS, dropout=0.3)
    assert module.training
    inputs = {"input": torch.randn(2, 9, EMBED)}
    hold(module, inputs, seed=7, sample_index=torch.tensor([5, 2**40]))


def test_dropout_is_replayed_by_seed_and_off_in_eval():
    module = FusedAttention(EMBED, HEADS, dropout=0.3)
    input = torch.randn(2, 9, EMBED)
    drawn = []
    for _ in range(2):
        torch.manual_seed(1)
        drawn += [module(input), module(input)]
    assert torch.equal(drawn[0], drawn[2]) and torch.equal(drawn[1], drawn[3])
    assert not torch.equal(drawn[0], drawn[1]), "each call draws a seed of its own"
    assert torch.equal(module(input, seed=3), module(input, seed=torch.tensor(3)))
    assert not torch.equal(module(input, seed=3), module(input, seed=4))
    swapped = module(input.flip(0), seed=3, sample_index=torch.tensor([1, 0])).flip(0)
    assert torch.equal(module(input, seed=3), swapped)

    module.eval()
    plain = FusedAttention(EMBED, HEADS)
    plain.load_state_dict(module.state_dict())
    assert torch.equal(module(input, seed=3), plain(input))
    module.train().dropout = 0.0
    assert torch.equal(module(input, seed=3), plain(input))


# --- packed batches -------------------------------------------------------------------------------


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("cross", [False, True])
def test_a_ragged_batch_equals_the_formula(cross, is_causal):
    cu_seqlens, max_seqlen = bounds(LENGTHS)
    fixed = {"cu_seqlens": cu_seqlens, "max_seqlen": max_seqlen, "is_causal": is_causal}
    inputs = {"input": torch.randn(sum(LENGTHS) + 3, EMBED), "table": torch.randn(8, HEADS)}
    rows = sum(LENGTHS) + 3
    if cross:
        rows = sum(CONTEXT_LENGTHS)
        inputs["context"] = torch.randn(rows, EMBED)
        fixed["cu_seqlens_context"], fixed["max_seqlen_context"] = bounds(CONTEXT_LENGTHS)
    module = FusedAttention(EMBED, HEADS, dropout=0.2)
    hold(module, inputs, key_mask=torch.rand(rows) > 0.2, seed=3, **fixed)


@pytest.mark.parametrize("cross", [False, True])
def test_padded_and_ragged_are_the_same(cross):
    """The module runs on packed rows, the formula on padded ones, also with dropout and T5's
    bias."""
    mask, context_mask = padding(LENGTHS), padding(CONTEXT_LENGTHS)
    module = FusedAttention(EMBED, HEADS, dropout=0.2)
    inputs = {"input": torch.randn(*mask.shape, EMBED), "table": torch.randn(8, HEADS)}
    ragged = dict(zip(("cu_seqlens", "max_seqlen"), bounds(LENGTHS), strict=True))
    if cross:
        inputs["context"] = torch.randn(*context_mask.shape, EMBED)
        names = ("cu_seqlens_context", "max_seqlen_context")
        ragged |= zip(names, bounds(CONTEXT_LENGTHS), strict=True)

    def candidate(input, context=None, **given):
        if context is not None:
            context = context[context_mask]
        return module(input[mask], context, **ragged, **given)

    def base(**given):
        return reference(**given, key_mask=context_mask if cross else mask)[mask]

    hold(module, inputs, candidate, base, seed=3)


# --- decoding -------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [(1,) * 7, (4, 1, 2)])
def test_step_by_step_equals_the_whole_causal_pass(steps):
    module = FusedAttention(EMBED, HEADS)
    key_mask = torch.rand(2, 7) > 0.3

    def candidate(input, **given):
        outs, past, done = [], None, 0
        for length in steps:
            new, done = input[:, done : done + length], done + length
            out, past = module(
                new, past=past, use_cache=True, is_causal=True, key_mask=key_mask[:, :done], **given
            )
            assert past[0].shape == past[1].shape == (2, HEADS, done, EMBED // HEADS)
            outs.append(out)
        return torch.cat(outs, 1)

    def base(**given):
        return reference(is_causal=True, key_mask=key_mask, **given)

    inputs = {"input": torch.randn(2, 7, EMBED), "table": torch.randn(8, HEADS)}
    hold(module, inputs, candidate, base)


def test_the_keys_of_a_context_are_projected_once():
    module = FusedAttention(EMBED, HEADS)
    key_mask = torch.rand(2, 5) > 0.3

    def candidate(input, context):
        options = {"key_mask": key_mask, "use_cache": True}
        first, past = module(input[:, :1], context, **options)
        second, again = module(input[:, 1:], context[:, :0], past=past, **options)
        assert all(new is old for new, old in zip(again, past, strict=True))
        return torch.cat((first, second), 1)

    inputs = {"input": torch.randn(2, 4, EMBED), "context": torch.randn(2, 5, EMBED)}
    hold(module, inputs, candidate, lambda **given: reference(**given, key_mask=key_mask))


# --- layout, compile, errors ----------------------------------------------------------------------


@pytest.mark.parametrize("ragged", [False, True])
def test_packed_projections_are_not_copied(monkeypatch, ragged):
    seen = []
    for name in ("attention", "attention_varlen"):
        op = getattr(ops, name)
        monkeypatch.setattr(
            ops, name, lambda *args, op=op, **kw: seen.append(args[:3]) or op(*args, **kw)
        )
    module = FusedAttention(EMBED, HEADS)
    module.qkv_proj.register_forward_hook(lambda *call: seen.append(call[2]))
    cu_seqlens, max_seqlen = bounds((3, 4))
    if ragged:
        module(torch.randn(7, EMBED), cu_seqlens=cu_seqlens, max_seqlen=max_seqlen)
    else:
        module(torch.randn(1, 7, EMBED))
    projected, heads = seen
    storages = {each.untyped_storage().data_ptr() for each in (projected, *heads)}
    assert len(storages) == 1 and all(each.stride(-1) == 1 for each in heads)


@pytest.mark.parametrize("ragged", [False, True])
def test_compiles_to_one_graph(ragged):
    module = FusedAttention(EMBED, HEADS, dropout=0.2)
    table = torch.randn(8, HEADS)
    lengths = ((3, 4), (7, 0)) if ragged else ((2, 5), (2, 5))
    torch._dynamo.reset()
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for each in lengths:
            options = {
                "is_causal": True,
                "relative_bias": ops.T5RelativeBias(table, False),
                "seed": 3,
            }
            if ragged:
                options |= {"cu_seqlens": bounds(each)[0], "max_seqlen": 7}
            input = torch.randn(*((7,) if ragged else (2, 5)), EMBED)
            assert torch.equal(compiled(input, **options), module(input, **options))


def test_bad_arguments_raise_typed_errors():
    with pytest.raises(ArgumentValueError, match="embed_dim"):
        FusedAttention(30, 4)
    with pytest.raises(ArgumentValueError, match="head_dim"):
        FusedAttention(30, 4, head_dim=0)
    with pytest.raises(ArgumentValueError, match="dropout"):
        FusedAttention(EMBED, HEADS, dropout=1.5)
    module = FusedAttention(EMBED, HEADS)
    dense, flat, (ends, longest) = torch.randn(2, 3, EMBED), torch.randn(6, EMBED), bounds((2, 4))
    ragged = {"cu_seqlens": ends, "max_seqlen": longest}
    past = torch.randn(2, HEADS, 4, EMBED // HEADS)
    for match, arguments, options in (
        ("input", (torch.randn(2, 3, EMBED + 1),), {}),
        ("input", (flat,), {}),
        ("input", (dense,), ragged),
        ("context", (dense, torch.randn(2, EMBED)), {}),
        ("context", (flat, dense), ragged),
        ("max_seqlen", (flat,), {"cu_seqlens": ends}),
        ("max_seqlen", (dense,), {"max_seqlen": 3}),
        ("cu_seqlens_context", (flat, flat), ragged),
        ("cu_seqlens_context", (flat,), ragged | {"cu_seqlens_context": ends}),
        ("cu_seqlens_context", (dense, dense), {"cu_seqlens_context": ends}),
        ("max_seqlen_context", (flat, flat), ragged | {"cu_seqlens_context": ends}),
        ("past", (flat,), ragged | {"past": (past, past)}),
        ("use_cache", (flat,), ragged | {"use_cache": True}),
        (r"past\[0\]", (dense,), {"past": (past[:1], past[:1])}),
        (r"past\[1\]", (dense,), {"past": (past, past[:, :, 1:])}),
        ("key_mask", (dense,), {"past": (past, past), "key_mask": torch.ones(2, 3).bool()}),
    ):
        with pytest.raises(ArgumentValueError, match=f"`{match}`"):
            module(*arguments, **options)
    wide = FusedAttention(EMBED, HEADS, context_dim=24)
    for match, module_of, arguments, options in (
        ("attn_mask", module, (flat,), ragged | {"attn_mask": torch.ones(6, 6).bool()}),
        ("attn_mask", module, (dense,), {"attn_mask": torch.ones(2, 3, 3).bool()}),
        ("context", wide, (dense,), {}),
        ("context", wide, (dense, dense), {}),
    ):
        with pytest.raises(ArgumentValueError, match=f"`{match}`"):
            module_of(*arguments, **options)
    with pytest.raises(ArgumentValueError, match="context_dim"):
        FusedAttention(EMBED, HEADS, context_dim=0)
    with pytest.raises(ArgumentTypeError, match="key_mask"):
        module(dense, key_mask=torch.ones(2, 3))
    with pytest.raises(ArgumentTypeError, match="past"):
        module(dense, past=(past.double(), past.double()))
