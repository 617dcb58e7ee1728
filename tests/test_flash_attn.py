"""``fastplm.flash_attn``: what the package ``flash_attn`` documents, against its formulas."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import T5Config
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.t5.modeling_t5 import T5Attention

from fastplm import ops, use_backend
from fastplm.errors import UnsupportedError
from fastplm.flash_attn import flash_attn_forward, flash_attn_func, flash_attn_varlen_func

WINDOWS = ((-1, -1), (2, -1), (1, 3), (2, 0))


def expected(q, k, v, causal, window, scale=None):
    """By the masks of the package's documentation, with bottom-right alignment."""
    k, v = (one.repeat_interleave(q.shape[2] // one.shape[2], 2) for one in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * (
        q.shape[-1] ** -0.5 if scale is None else scale
    )
    rows = torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1]
    distance = torch.arange(k.shape[1]) - rows
    left, right = (math.inf if bound < 0 else bound for bound in window)
    seen = (distance >= -left) & (distance <= (0 if causal else right))
    weights = scores.masked_fill(~seen, -math.inf).softmax(-1).nan_to_num()
    return torch.einsum("bhqk,bkhd->bqhd", weights, v)


def tensors(queries, keys, heads=4, groups=2):
    torch.manual_seed(0)
    sizes = ((queries, heads), (keys, groups), (keys, groups))
    return [
        torch.randn(2, length, count, 8, dtype=torch.float64, requires_grad=True)
        for length, count in sizes
    ]


def check(ours, theirs, inputs):
    torch.testing.assert_close(ours, theirs)
    weights = torch.randn_like(ours)
    for one, other in zip(
        torch.autograd.grad((ours * weights).sum(), inputs),
        torch.autograd.grad((theirs * weights).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("causal, keys", [(False, 6), (True, 6), (True, 9)])
def test_a_batch_without_padding(causal, keys, window):
    inputs = tensors(6, keys)
    ours = flash_attn_func(*inputs, causal=causal, window_size=window, softmax_scale=0.3)
    check(ours, expected(*inputs, causal, window, 0.3), inputs)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_packed_sequences_equal_each_alone(causal, window, groups):
    packed = [one.flatten(0, 1)[:10] for one in tensors(6, 6, groups=groups)]
    starts = torch.tensor([0, 6, 10], dtype=torch.int32)
    options = dict(causal=causal, window_size=window)
    ours = flash_attn_varlen_func(*packed, starts, starts, 6, 6, **options)
    parts = slice(0, 6), slice(6, 10)
    alone = [expected(*(one[None, part] for one in packed), causal, window)[0] for part in parts]
    check(ours, torch.cat(alone), packed)


def test_queries_and_keys_may_be_cut_differently():
    q, k, v = tensors(6, 9)
    of_q, of_k = (torch.tensor(x, dtype=torch.int32) for x in ([0, 2, 6], [0, 5, 9]))
    ours = flash_attn_varlen_func(q[0], k[0], v[0], of_q, of_k, 4, 5, causal=True)
    parts = (slice(0, 2), slice(0, 5)), (slice(2, 6), slice(5, 9))
    alone = [expected(q[:1, a], k[:1, b], v[:1, b], True, (-1, -1))[0] for a, b in parts]
    torch.testing.assert_close(ours, torch.cat(alone))
    # As a batch that is moved to a device: the same numbers in other memory, and then others.
    same, windowed = of_q.clone(), dict(window_size=(1, 1))
    ours = flash_attn_varlen_func(q[0], q[0], q[0], of_q, same, 4, 4, **windowed)
    alone = [expected(*[q[:1, a]] * 3, False, (1, 1))[0] for a, _ in parts]
    torch.testing.assert_close(ours, torch.cat(alone))
    other = torch.tensor([0, 4, 6], dtype=torch.int32)
    with pytest.raises(UnsupportedError, match="window_size"):
        flash_attn_varlen_func(q[0], q[0], q[0], of_q, other, 4, 4, **windowed)
    with pytest.raises(UnsupportedError, match="window_size.* got .1, 1.; expected"):
        flash_attn_varlen_func(q[0], k[0], v[0], of_q, of_k, 4, 5, window_size=(1, 1))
    with pytest.raises(UnsupportedError, match="window_size"):
        flash_attn_func(q, k, v, window_size=(1, 1))


def test_dropout_drops_and_keeps_the_mean():
    q, k, v = (one.detach().float() for one in tensors(6, 6))
    ones, same = torch.ones_like(v), dict(dropout_p=0.5)
    torch.manual_seed(1)
    out = torch.stack([flash_attn_func(q, k, ones, **same) for _ in range(200)])
    assert out.std(0).min() > 0.1 and (out.mean(0) - 1).abs().max() < 0.3
    torch.manual_seed(1)
    assert torch.equal(flash_attn_func(q, k, ones, **same), out[0])


@pytest.mark.parametrize(
    "name, value",
    [
        ("softcap", 30.0),
        ("return_attn_probs", True),
        *((name, torch.zeros(4)) for name in ("alibi_slopes", "s_aux", "block_table")),
    ],
)
def test_what_is_not_computed_is_refused(name, value):
    q, k, v = tensors(6, 6)
    starts = torch.tensor([0, 6], dtype=torch.int32)
    with pytest.raises(UnsupportedError, match=f"`{name}` got .*Use attn_implementation='eager'"):
        flash_attn_varlen_func(q[0], k[0], v[0], starts, starts, 6, 6, **{name: value})
    if name != "block_table":
        with pytest.raises(UnsupportedError, match=name):
            flash_attn_func(q, k, v, **{name: value})


def layer(is_decoder, buckets=32, distance=128, cross=False):
    torch.manual_seed(0)
    config = T5Config(
        d_model=32,
        num_heads=4,
        d_kv=8,
        relative_attention_num_buckets=buckets,
        relative_attention_max_distance=distance,
        is_decoder=is_decoder,
    )
    own = not cross
    return T5Attention(config, own, layer_idx=0, is_causal=is_decoder and own).double().eval()


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("length", [1, 2, 17, 70])
@pytest.mark.parametrize("buckets, distance", [(32, 128), (8, 20), (16, 64)])
@pytest.mark.parametrize("is_decoder", [False, True])
def test_the_bias_of_t5_is_read_back_into_its_table(is_decoder, buckets, distance, length, masked):
    module, inputs = layer(is_decoder, buckets, distance), tensors(length, length, groups=4)
    mask = None
    if masked:
        keys = torch.arange(length) < torch.tensor([[length], [max(length // 2, 1)]])
        mask = keys[:, None, None].expand(-1, 1, length, -1)
        mask = mask.tril() if is_decoder else mask

    def output(attention):
        q, k, v = (one.transpose(1, 2) for one in inputs)
        bias = module.compute_bias(length, length)
        return attention(module, q, k, v, mask, scaling=1.0, position_bias=bias)[0]

    table = module.relative_attention_bias.weight
    check(output(flash_attn_forward), output(sdpa_attention_forward), [*inputs, table])


@pytest.mark.parametrize("is_decoder", [False, True])
def test_the_triton_kernels_take_the_table(is_decoder):
    module, found = layer(is_decoder).float(), []
    q, k, v = (one.detach().float().transpose(1, 2) for one in tensors(17, 17, groups=4))
    for backend in ("triton", "eager"):
        with use_backend(backend):
            given = dict(scaling=1.0, position_bias=module.compute_bias(17, 17))
            out, _ = flash_attn_forward(module, q, k, v, None, **given)
        (grad,) = torch.autograd.grad(out.square().sum(), module.relative_attention_bias.weight)
        found.append((out, grad))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


def test_what_cannot_be_read_back_is_added(monkeypatch):
    calls = []
    attention = ops.attention
    monkeypatch.setattr(ops, "attention", lambda *a, **b: calls.append(b) or attention(*a, **b))
    torch.manual_seed(0)

    def equal(module, queries, keys, bias, mask=None, groups=4, fused=0, **options):
        calls.clear()
        inputs = tensors(queries, keys, groups=groups)
        module.num_key_value_groups = 4 // groups
        q, k, v = (one.transpose(1, 2) for one in inputs)
        if bias is not None:
            bias = bias.double()
        both = [
            one(module, q, k, v, mask, position_bias=bias, **options)[0]
            for one in (flash_attn_forward, sdpa_attention_forward)
        ]
        check(*both, inputs)
        assert len(calls) == fused

    encoder, decoder = layer(False), layer(True)
    equal(decoder, 2, 6, decoder.compute_bias(2, 6, past_seen_tokens=4), torch.ones(2, 1, 2, 6) > 0)
    equal(decoder, 1, 6, decoder.compute_bias(1, 6, past_seen_tokens=5))
    numbers = torch.randn(2, 1, 6, 6, dtype=torch.float64)
    equal(encoder, 6, 6, encoder.compute_bias(6, 6), numbers)
    equal(torch.nn.Identity(), 6, 6, torch.randn(1, 4, 6, 6))  # causal, as Transformers takes it
    equal(torch.nn.Identity(), 6, 6, torch.randn(1, 4, 6, 6), is_causal=False)
    equal(torch.nn.Identity(), 6, 6, torch.randn(2, 1, 6, 6), torch.ones(6, 6).tril() > 0)
    equal(torch.nn.Identity(), 6, 6, None, numbers)
    # No bias, or one of zeros.
    equal(torch.nn.Identity(), 6, 6, None, groups=2, fused=1, scaling=0.5)
    equal(torch.nn.Identity(), 3, 6, None, numbers[:, :, :3] > 0, groups=2, fused=1)
    equal(layer(True, cross=True), 3, 6, torch.zeros(1, 4, 3, 6), fused=1)
    # Causal without a mask: the keys behind the queries are the empty rest of a static cache.
    equal(torch.nn.Identity(), 3, 6, None, fused=1)
    equal(torch.nn.Identity(), 3, 6, torch.randn(1, 4, 3, 6))
    equal(decoder, 3, 6, decoder.compute_bias(3, 6), fused=1)
    equal(torch.nn.Identity(), 6, 3, None, fused=1)
    equal(torch.nn.Identity(), 6, 3, torch.randn(1, 4, 6, 3))
    # Tables that the op does not take, and a bias for each text.
    for kind, settings in ((False, (5, 20)), (False, (32, 8)), (True, (64, 20)), (True, (7, 20))):
        module = layer(kind, *settings)
        equal(module, 6, 6, module.compute_bias(6, 6))
    equal(encoder, 6, 6, encoder.compute_bias(6, 6) * torch.ones(2, 1, 1, 1))
    # A class of the user's may have another bias.
    own = type("T5Attention", (T5Attention,), {})(encoder.config, True, 0).double()
    equal(own, 6, 6, torch.randn(1, 4, 6, 6))


@pytest.mark.parametrize(
    "name, value",
    [
        ("softcap", 30.0),
        ("s_aux", torch.zeros(4)),
        ("a_name_to_come", torch.zeros(4)),
        *((name, torch.zeros(4, dtype=torch.long)) for name in ("indices", "block_indices")),
        ("cu_seq_lens_q", torch.tensor([0, 6])),
    ],
)
def test_what_a_layer_does_not_compute_is_refused(name, value):
    inputs = [one.transpose(1, 2) for one in tensors(6, 6)]
    with pytest.raises(UnsupportedError, match=f"`{name}` got "):
        flash_attn_forward(torch.nn.Identity(), *inputs, None, **{name: value})
    flash_attn_forward(torch.nn.Identity(), *inputs, None, **{name: None})


def test_queries_that_a_model_cut_off_need_a_mask():
    """Gemma 4 keeps the last queries alone in layers that share keys, where a name has no "flash":
    so without a mask nobody knows where they stand."""
    module = torch.nn.Identity()
    module.is_kv_shared_layer = True
    inputs = [one.transpose(1, 2) for one in tensors(3, 6)]
    with pytest.raises(UnsupportedError, match="`attention_mask` got None .* 'flash' in it"):
        flash_attn_forward(module, *inputs, None)
    flash_attn_forward(module, *inputs, torch.ones(1, 1, 3, 6) > 0)
