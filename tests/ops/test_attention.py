"""ops.attention and ops.attention_varlen against their reference: by the budget, on difficult
inputs, with every combination of layout, mask, bias and dropout; and dropout's bits one by one."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import sys
from types import SimpleNamespace

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

import fastplm
from fastplm import _backends, ops
from fastplm._backends import accepts_all
from fastplm._registry import OPS
from fastplm.reference.attention import attention_ref, attention_varlen_ref, dropout_keep_mask
from fastplm.testing import (
    LAYOUTS,
    BudgetExceeded,
    ProductsInTF32,
    assert_within_budget,
    poisoned_memory,
)

from ..pairwise import pairwise

BACKENDS = ("cpp", "triton")
QKV = ("query", "key", "value")
NAN = float("nan")
LARGE_SAMPLE = 2**40 + 1

RAGGED = {"dense": False, "ragged": True}
CAUSAL = {"full": False, "causal": True}
#: A call with a bias, and one with dropout alone, may each have their own kernels.
ALL_EXTRAS = ("plain", "dropout", "bias and dropout")
HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}

each_backend = pytest.mark.parametrize("backend", BACKENDS)
dense_and_ragged = pytest.mark.parametrize("ragged", RAGGED.values(), ids=RAGGED)
full_and_causal = pytest.mark.parametrize("is_causal", CAUSAL.values(), ids=CAUSAL)
all_extras = pytest.mark.parametrize("extras", ALL_EXTRAS)
layouts_and_extras = pytest.mark.parametrize(
    ("ragged", "extras"),
    ((False, "plain"), (False, "dropout"), (True, "bias and dropout")),
    ids=("dense-plain", "dense-dropout", "ragged-bias-and-dropout"),
)
half_precision = pytest.mark.parametrize("dtype", HALF.values(), ids=HALF)


# --- calls ----------------------------------------------------------------------------------------


def attend(dense, varlen, bias_weight=None, bidirectional=True, max_distance=20, **inputs):
    """The op for the inputs; the bias' table is an argument, so that it gets a gradient.

    A max_distance of 20 is short, so that whole tiles lie in the last bucket.
    """
    if bias_weight is not None:
        inputs["relative_bias"] = ops.T5RelativeBias(bias_weight, bidirectional, max_distance)
    return (varlen if "cu_seqlens_q" in inputs else dense)(**inputs)


reference = functools.partial(attend, attention_ref, attention_varlen_ref)


def run(backend: str, **inputs):
    if backend == "cpp" and inputs["query"].is_cuda:
        pytest.skip(f"the {backend} backend of attention is for CPU tensors")
    with fastplm.use_backend(backend):
        return attend(ops.attention, ops.attention_varlen, **inputs)


def leaves(inputs: dict) -> tuple[str, ...]:
    return tuple(name for name in (*QKV, "bias_weight") if name in inputs)


def check(backend: str, inputs: dict) -> None:
    candidate = functools.partial(run, backend)
    assert_within_budget(candidate, reference, inputs, wrt=leaves(inputs))


def out_and_grads(backend: str, inputs: dict, upstream=None):
    """The output and the gradients by name, for a random ``upstream`` gradient by default."""
    names = leaves(inputs)
    inputs = inputs | {name: inputs[name].detach().requires_grad_() for name in names}
    out = run(backend, **inputs)
    if upstream is None:
        upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(0)).to(out)
    grads = torch.autograd.grad(out, [inputs[name] for name in names], upstream)
    return out.detach(), dict(zip(names, grads, strict=True))


# --- inputs ---------------------------------------------------------------------------------------


def make(device, batch=2, heads=2, seqlen_q=33, seqlen_k=33, head_dim=32, dtype=torch.float32):
    def draw(length):
        return torch.randn(batch, heads, length, head_dim, device=device).to(dtype)

    return dict(query=draw(seqlen_q), key=draw(seqlen_k), value=draw(seqlen_k))


def heads_for(extras: str) -> int:
    """The batch is large enough for the gradient of the table, which lies in a few buckets a head:
    with few numbers, a kernel's error and PyTorch's, which bounds it, are chance."""
    return 4 if "bias" in extras else 1


def with_extras(inputs: dict, extras="bias and dropout", dropout_p=0.1, dtype=None) -> dict:
    """The arguments of bias (one-sided in causal calls) and dropout; ``dtype`` is the table's."""
    inputs, query = dict(inputs), inputs["query"]
    if "bias" in extras:
        weight = torch.randn(16, query.shape[1], device=query.device)
        inputs["bias_weight"] = weight.to(dtype or query.dtype)
        inputs["bidirectional"] = not inputs.get("is_causal", False)
    if "dropout" in extras:
        inputs |= dict(dropout_p=dropout_p, seed=-3)
    return inputs


def hide(inputs: dict, key_mask: torch.Tensor) -> dict:
    """A dense call with these keys masked, and NaN behind the mask."""
    hole = ~key_mask.to(inputs["key"].device)
    hidden = {
        name: inputs[name].masked_fill(hole[:, None, :, None], NAN) for name in ("key", "value")
    }
    return inputs | hidden | {"key_mask": ~hole}


def up_to(lengths, longest: int) -> torch.Tensor:
    return torch.arange(longest) < torch.tensor(lengths).reshape(-1, 1)


def pack_rows(padded: torch.Tensor, lengths, spare: int = 0) -> torch.Tensor:
    """[B, H, T, D] -> [N + spare, H, D], with ``lengths`` rows each; spare rows hold NaN."""
    rows = padded.new_full((sum(lengths) + spare, padded.shape[1], padded.shape[3]), NAN)
    for sequence, length, end in zip(padded, lengths, itertools.accumulate(lengths), strict=True):
        rows[end - length : end] = sequence[:, :length].transpose(0, 1)
    return rows


def pack(inputs: dict, lengths_q, lengths_k=None, spare=(3, 5)) -> dict:
    """The packed call of the first rows of a dense one; spare rows hold NaN without a mask."""
    lengths_k = lengths_q if lengths_k is None else lengths_k
    packed = dict(inputs)
    for name, lengths, rows in (("q", lengths_q, spare[0]), ("k", lengths_k, spare[1])):
        for tensor in ("query",) if name == "q" else ("key", "value"):
            packed[tensor] = pack_rows(inputs[tensor], lengths, rows)
        packed[f"cu_seqlens_{name}"] = torch.tensor(
            [0, *itertools.accumulate(lengths)], dtype=torch.int32, device=inputs["query"].device
        )
    packed["max_seqlen_q"], packed["max_seqlen_k"] = (inputs[n].shape[2] for n in QKV[:2])
    if "key_mask" in inputs:
        exists = up_to(lengths_k, packed["max_seqlen_k"])
        packed["key_mask"] = F.pad(inputs["key_mask"][exists], (0, spare[1]), value=True)
    return packed


# --- every combination ----------------------------------------------------------------------------

KINDS = ("full", "key mask", "causal", "cross")


def combination(device, ragged, kind, extras, dtype=torch.float32) -> dict:
    seqlen_q, seqlen_k = (21, 29) if kind == "cross" else (29, 29)
    inputs = make(device, 2, seqlen_q=seqlen_q, seqlen_k=seqlen_k, head_dim=16, dtype=dtype)
    inputs["is_causal"] = kind == "causal"
    if kind == "key mask":  # left padding and holes, and a sample without any key
        key_mask = torch.rand(2, seqlen_k) < 0.6
        key_mask[0, :9], key_mask[1] = False, False
        inputs = hide(inputs, key_mask)
    inputs = with_extras(inputs, extras)
    if "dropout" in extras:
        inputs["sample_index"] = torch.tensor([4, LARGE_SAMPLE], device=device)
    if ragged and kind == "cross":  # the second sequence has queries and no key
        return pack(inputs, (21, 6), (15, 0))
    # The longest sequence comes last: the packed call has no padding before it.
    return pack(inputs, (12, 29)) if ragged else inputs


@pairwise(
    3,
    backend=BACKENDS,
    ragged=RAGGED,
    kind=KINDS,
    extras=("plain", "dropout", "bias", "bias and dropout"),
    dtype={"fp32": torch.float32, **HALF},
)
def test_every_combination(device, backend, ragged, kind, extras, dtype):
    check(backend, combination(device, ragged, kind, extras, dtype))


# --- shapes ---------------------------------------------------------------------------------------


@pairwise(
    3, backend=BACKENDS, seqlen=(1, 63, 65, 257), ragged=RAGGED, is_causal=CAUSAL, extras=ALL_EXTRAS
)
def test_lengths(device, backend, seqlen, ragged, is_causal, extras):
    heads = heads_for(extras) if seqlen < 100 else 1
    inputs = make(device, 1, heads, seqlen_q=seqlen, seqlen_k=seqlen, head_dim=16)
    inputs = with_extras(inputs | {"is_causal": is_causal}, extras)
    check(backend, pack(inputs, (seqlen,)) if ragged else inputs)


@pairwise(
    3,
    backend=BACKENDS,
    seqlen_k=(40, 65, 130, 257, 513),
    head_dim=(64, 128),
    is_causal=CAUSAL,
    extras=("plain", "dropout"),
    ragged=RAGGED,
)
def test_length_classes(device, backend, seqlen_k, head_dim, extras, is_causal, ragged):
    """The number of keys decides the kernel; 16 bits have more kernels than 32."""
    inputs = make(device, 1, 1, 20, seqlen_k, head_dim, dtype=torch.float16)
    inputs = hide(inputs | {"is_causal": is_causal}, torch.rand(1, seqlen_k) < 0.9)
    inputs = with_extras(inputs, extras)
    check(backend, pack(inputs, (20,), (seqlen_k,)) if ragged else inputs)


@pytest.mark.slow
@each_backend
@dense_and_ragged
@pytest.mark.parametrize("seqlen_k", (130, 300))
def test_length_classes_with_a_bias(device, backend, seqlen_k, ragged):
    inputs = make(device, 1, 4, 20, seqlen_k, 16, dtype=torch.float16)
    inputs = hide(inputs | {"is_causal": True}, torch.rand(1, seqlen_k) < 0.9)
    inputs = with_extras(inputs, dtype=torch.float32)
    check(backend, pack(inputs, (20,), (seqlen_k,)) if ragged else inputs)


@pytest.mark.slow
@each_backend
@layouts_and_extras
def test_kernel_for_many_keys_on_sequences_of_few(device, backend, ragged, extras):
    inputs = make(device, 3, 1, seqlen_q=20, seqlen_k=513, head_dim=16, dtype=torch.float16)
    inputs = with_extras(hide(inputs, up_to((3, 0, 70), 513)), extras)
    check(backend, pack(inputs, (20, 1, 0), (3, 0, 70)) if ragged else inputs)


@pairwise(backend=BACKENDS, head_dim=(1, 16, 32, 40, 64, 80, 96, 128), extras=ALL_EXTRAS)
def test_head_dims(device, backend, head_dim, extras):
    inputs = make(device, batch=1, seqlen_q=20, seqlen_k=40, head_dim=head_dim)
    check(backend, with_extras(inputs, extras))


@pairwise(
    3, backend=BACKENDS, head_dim=(40, 64, 160, 256), ragged=RAGGED, extras=ALL_EXTRAS, dtype=HALF
)
def test_head_dims_in_half_precision(device, backend, head_dim, ragged, extras, dtype):
    inputs = make(device, 1, 1, seqlen_q=20, seqlen_k=70, head_dim=head_dim, dtype=dtype)
    inputs = with_extras(inputs | {"is_causal": True}, extras)
    check(backend, pack(inputs, (20,), (70,)) if ragged else inputs)


@pairwise(
    3,
    backend=BACKENDS,
    lengths={"1-65": (1, 65), "17-65": (17, 65), "40-17": (40, 17)},
    is_causal=CAUSAL,
    ragged=RAGGED,
    extras=ALL_EXTRAS,
)
def test_cross_lengths(device, backend, lengths, is_causal, ragged, extras):
    """If causal, these are a cache of keys (with one query at least), or queries without a key."""
    seqlen_q, seqlen_k = lengths
    # The errors within a gradient's row have one direction, so the error of two rows is chance.
    heads = 4 if seqlen_q == 1 else heads_for(extras)
    inputs = make(device, 2, heads, seqlen_q=seqlen_q, seqlen_k=seqlen_k, head_dim=16)
    inputs = with_extras(inputs | {"is_causal": is_causal}, extras)
    if ragged:
        check(backend, pack(inputs, (seqlen_q, 1), (5, seqlen_k)))
    else:
        check(backend, hide(inputs, up_to((seqlen_k, 5), seqlen_k)))


@dense_and_ragged
def test_causal_is_bottom_right_aligned(device, ragged):
    """The last query sees every key, for any two lengths (a key/value cache)."""
    inputs = make(device, batch=1, seqlen_q=3, seqlen_k=10)
    last = inputs | {"query": inputs["query"][:, :, -1:]}
    if ragged:
        inputs, last = pack(inputs, (3,), (10,), spare=(0, 0)), pack(last, (1,), (10,), (0, 0))
    causal = run("auto", **inputs, is_causal=True)
    torch.testing.assert_close(causal[-1:] if ragged else causal[:, :, -1:], run("auto", **last))


@each_backend
@dense_and_ragged
@pytest.mark.parametrize("empty", ("batch", "query", "key"))
def test_empty(device, backend, empty, ragged):
    sizes = {"batch": dict(batch=0), "query": dict(seqlen_q=0), "key": dict(seqlen_k=0)}[empty]
    inputs = with_extras(make(device, **sizes))
    if ragged:
        lengths = [[tensor.shape[2]] * tensor.shape[0] for tensor in (inputs[n] for n in QKV)]
        for spare in ((0, 0), (3, 5)):
            check(backend, pack(inputs, *lengths[:2], spare=spare))
    else:
        check(backend, inputs)


@each_backend
def test_only_sequences_of_length_0(device, backend):
    inputs = with_extras(make(device))
    check(backend, pack(inputs, (0, 0)))
    check(backend, pack(inputs, (0, 0)) | dict(max_seqlen_q=0, max_seqlen_k=0))


# --- masks ----------------------------------------------------------------------------------------


@pairwise(
    3,
    backend=BACKENDS,
    is_causal=CAUSAL,
    lengths={"none": (65, 65), "some": (65, 7), "dead": (1, 0)},
    extras=ALL_EXTRAS,
)
def test_key_mask_hides_even_nan(device, backend, is_causal, lengths, extras):
    inputs = make(device, heads=heads_for(extras), seqlen_q=20, seqlen_k=65, head_dim=16)
    inputs["is_causal"] = is_causal
    check(backend, with_extras(hide(inputs, up_to(lengths, 65)), extras))


@pytest.mark.slow
@each_backend
@dense_and_ragged
def test_left_padding_and_holes(device, backend, ragged):
    inputs = make(device, 2, 4, seqlen_q=30, seqlen_k=70, head_dim=16) | {"is_causal": True}
    key_mask = torch.rand(2, 70) < 0.5
    key_mask[0, :66] = False
    inputs = with_extras(hide(inputs, key_mask))
    check(backend, pack(inputs, (30, 25), (70, 50)) if ragged else inputs)


@each_backend
@dense_and_ragged
def test_dead_rows_are_zero_with_zero_gradient(device, backend, ragged):
    inputs = make(device, seqlen_q=5, seqlen_k=3)
    inputs["key_mask"] = torch.tensor([[True] * 3, [False] * 3], device=device)
    inputs["is_causal"] = True
    inputs = pack(inputs, (5, 5), (3, 3), spare=(0, 0)) if ragged else inputs
    ones = torch.ones_like(inputs["query"])
    out, grads = out_and_grads(backend, inputs, ones)

    def sequence(tensor, b, length):  # [length, …]
        return tensor[b * length :][:length] if ragged else tensor[b].transpose(0, 1)

    first, second = (sequence(out, b, 5) for b in range(2))
    assert not second.any() and not first[:2].any() and first[2:].all()
    assert not sequence(grads["query"], 1, 5).any()
    assert not sequence(grads["query"], 0, 5)[:2].any()
    assert not sequence(grads["key"], 1, 3).any() and not sequence(grads["value"], 1, 3).any()
    assert all(grad.isfinite().all() for grad in grads.values())


@each_backend
@all_extras
def test_spare_rows_are_zero_with_zero_gradient_and_never_matter(device, backend, extras):
    inputs = with_extras(make(device, heads=1, seqlen_q=20, seqlen_k=30), extras)
    tight = pack(inputs, (20, 4), (9, 30), spare=(0, 0))
    spare = pack(inputs, (20, 4), (9, 30), spare=(70, 70))
    upstream = torch.randn_like(spare["query"])  # fixed, so that both calls get the same
    out, grads = out_and_grads(backend, spare, upstream)
    expected, expected_grads = out_and_grads(backend, tight, upstream[:24])
    assert torch.equal(out[:24], expected) and not out[24:].any()
    for name, grad in grads.items():
        rows = len(expected_grads[name])
        assert torch.equal(grad[:rows], expected_grads[name]) and not grad[rows:].any()


# --- a dense mask ---------------------------------------------------------------------------------


def dense_mask(kind: str, batch: int, heads: int, seqlen_q: int, seqlen_k: int) -> torch.Tensor:
    """A mask for the argument ``attn_mask``: random ones have rows and columns that are False."""
    shape = {
        "random": (batch, heads, seqlen_q, seqlen_k),
        "of a sample": (batch, 1, seqlen_q, seqlen_k),
        "of a head": (1, heads, seqlen_q, seqlen_k),
        "of all": (seqlen_q, seqlen_k),
        "of keys": (batch, 1, 1, seqlen_k),
        "of queries": (batch, heads, seqlen_q, 1),
    }.get(kind, (seqlen_q, seqlen_k))
    if kind in ("all", "nothing"):
        return torch.full(shape, kind == "all")
    places = torch.arange(seqlen_k) - torch.arange(seqlen_q)[:, None]
    if kind == "causal":
        return places <= seqlen_k - seqlen_q
    if kind == "prefix":  # all queries see a prefix; the rest is causal
        return (places <= seqlen_k - seqlen_q) | (torch.arange(seqlen_k) < seqlen_k // 3)
    if kind == "blocks":
        return torch.arange(seqlen_q)[:, None] // 7 == torch.arange(seqlen_k) // 7
    mask = torch.rand(shape) < 0.6
    if shape[-2] > 1:
        mask[..., ::5, :] = False
    return mask


MASK_KINDS = (
    *("random", "of a sample", "of a head", "of all", "of keys", "of queries"),
    *("all", "nothing", "causal", "prefix", "blocks"),
)


@pairwise(
    2,
    backend=BACKENDS,
    mask=MASK_KINDS,
    beside=("nothing", "key mask", "causal", "cross", "few queries"),
    extras=("plain", "dropout", "bias", "bias and dropout"),
)
def test_dense_masks(device, backend, mask, beside, extras):
    sizes = {"cross": (37, 29), "few queries": (3, 29)}.get(beside, (29, 29))
    inputs = make(device, 2, heads_for(extras) * 2, *sizes, head_dim=16)
    inputs["is_causal"] = beside == "causal"
    if beside == "key mask":  # masked keys hold NaN
        inputs = hide(inputs, up_to((29, 17), 29))
    inputs["attn_mask"] = dense_mask(mask, *inputs["query"].shape[:3], sizes[1]).to(device)
    check(backend, with_extras(inputs, extras))


@pytest.mark.slow
@pairwise(
    2,
    backend=BACKENDS,
    seqlen=(1, 63, 65, 130, 257),
    extras=ALL_EXTRAS,
    dtype=HALF,
    is_causal=CAUSAL,
)
def test_lengths_with_a_dense_mask(device, backend, seqlen, extras, dtype, is_causal):
    """The lengths decide the kernel."""
    batch = 2 if seqlen < 100 else 1
    inputs = make(device, batch, 2, seqlen, seqlen, head_dim=40, dtype=dtype)
    mask = torch.rand(batch, 2, seqlen, seqlen) < 0.5
    mask[..., seqlen // 2, :] = False
    inputs |= {"attn_mask": mask.to(device), "is_causal": is_causal}
    check(backend, with_extras(inputs, extras, dtype=torch.float32))


def test_a_dense_mask_of_three_dimensions_says_what_to_do():
    """A mask [B, Tq, Tk] is refused, as it would be broadcast as [H, Tq, Tk]."""
    inputs = make("cpu", 2, 2, 5, 5)
    with pytest.raises(
        ValueError, match=r"`attn_mask` got 3 dimensions \(2, 5, 5\).*mask\[:, None\]"
    ):
        ops.attention(**inputs, attn_mask=torch.ones(2, 5, 5, dtype=torch.bool))


def test_a_dense_mask_is_no_argument_of_ragged_batches():
    with pytest.raises(TypeError, match="attn_mask"):
        ops.attention_varlen(
            **pack(make("cpu"), (33, 9)), attn_mask=torch.ones(1, dtype=torch.bool)
        )


# --- windows --------------------------------------------------------------------------------------

WINDOWS = {
    "two": (1, 0),
    "left": (16, None),
    "right": (None, 16),
    "both": (9, 20),
    "wide": (64, 64),
    "whole tiles": (63, 128),
}
LONGER = {"many keys": (20, 300), "many queries": (300, 40), "few": (3, 300), "one": (1, 90)}


@pairwise(
    3,
    backend=BACKENDS,
    window=WINDOWS,
    seqlen=(1, 63, 65, 257),
    ragged=RAGGED,
    is_causal=CAUSAL,
    extras=("plain", "dropout", "bias and dropout"),
)
def test_windows(device, backend, window, seqlen, ragged, is_causal, extras):
    heads = heads_for(extras) if seqlen < 100 else 1
    inputs = make(device, 1, heads, seqlen_q=seqlen, seqlen_k=seqlen, head_dim=16)
    inputs = with_extras(inputs | {"is_causal": is_causal, "window": window}, extras)
    check(backend, pack(inputs, (seqlen,)) if ragged else inputs)


@pairwise(
    2,
    backend=BACKENDS,
    window=WINDOWS,
    lengths=LONGER,
    dtype={"fp32": torch.float32, **HALF},
    head_dim=(40, 64),
    is_causal=CAUSAL,
    extras=ALL_EXTRAS,
)
def test_windows_of_cross_lengths(
    device, backend, window, lengths, dtype, head_dim, is_causal, extras
):
    """Some queries have no key in their window, and some keys are in none: NaN is there."""
    inputs = make(device, 2, heads_for(extras), *lengths, head_dim=head_dim, dtype=dtype)
    inputs = hide(inputs, torch.rand(2, lengths[1]) < 0.6)
    inputs = with_extras(inputs | {"is_causal": is_causal, "window": window}, extras)
    check(backend, inputs)
    if not is_causal:
        del inputs["key_mask"]
        inputs |= make(device, 2, heads_for(extras), *lengths, head_dim=head_dim, dtype=dtype)
        check(backend, pack(inputs, (lengths[0], 1), (lengths[1] // 2, lengths[1])))


@pairwise(
    2, backend=BACKENDS, window=WINDOWS, mask=("random", "causal", "blocks"), extras=ALL_EXTRAS
)
def test_windows_beside_a_dense_mask(device, backend, window, mask, extras):
    inputs = make(device, 2, heads_for(extras), 70, 70, head_dim=16)
    inputs["attn_mask"] = dense_mask(mask, *inputs["query"].shape[:3], 70).to(device)
    check(backend, with_extras(inputs | {"window": window}, extras))


@each_backend
@full_and_causal
@dense_and_ragged
def test_keys_in_no_window_are_never_read(device, backend, is_causal, ragged):
    """They are NaN, where masked loads would show; their gradient is 0. Those of a tile that a
    window touches may be read."""
    queries, keys, window = 40, 600, (30, 20)
    inputs = make(device, 2, 1, queries, keys, head_dim=16) | {"window": window}
    inputs["is_causal"] = is_causal
    seen = slice(keys - queries - 30, None) if is_causal else slice(0, queries + 20)
    far = torch.ones(keys, dtype=torch.bool)
    far[max(seen.start - 128, 0) : None if is_causal else seen.stop + 128] = False
    poisoned = dict(inputs)
    for name in ("key", "value"):
        poisoned[name] = inputs[name].masked_fill(far.to(device)[:, None], NAN)
    if ragged:
        lengths = (queries, queries), (keys, keys), (0, 0)
        inputs, poisoned = pack(inputs, *lengths), pack(poisoned, *lengths)
    expected, expected_grads = out_and_grads(backend, inputs)
    out, grads = out_and_grads(backend, poisoned)
    assert far.sum() > 300 and torch.equal(out, expected)
    for name, grad in grads.items():
        assert torch.equal(grad, expected_grads[name])
    dk = grads["key"].unflatten(0, (2, keys)) if ragged else grads["key"].transpose(1, 2)
    assert not dk[:, far].any() and dk[:, ~far].any()


@each_backend
@full_and_causal
@all_extras
def test_rows_read_the_tiles_of_their_window_alone(device, backend, is_causal, extras):
    """NaN in the last keys reaches the queries whose tile sees them; NaN in the last queries
    reaches the gradients of the keys that they see. The others have the same bits."""
    inputs = make(device, 1, 1, 700, 700, head_dim=16) | {"window": (17, 15)}
    inputs = with_extras(inputs | {"is_causal": is_causal}, extras)
    upstream = torch.randn_like(inputs["query"])
    expected, expected_grads = out_and_grads(backend, inputs, upstream)
    near = slice(0, 700 - 100 - 17 - 2 * 128)
    for names in (("key", "value"), ("query",)):
        poisoned = dict(inputs)
        for name in names:
            poisoned[name] = inputs[name].clone()
            poisoned[name][:, :, 600:] = NAN
        out, grads = out_and_grads(backend, poisoned, upstream)
        assert out.isnan().any() and torch.equal(out[:, :, near], expected[:, :, near])
        for name in QKV:
            assert torch.equal(grads[name][:, :, near], expected_grads[name][:, :, near])


@each_backend
@full_and_causal
@dense_and_ragged
def test_a_window_that_hides_nothing_costs_nothing(device, backend, is_causal, ragged, monkeypatch):
    """The kernels get none, on both sides or on one."""
    calls = []
    right = OPS["attention"].backends[backend]

    def forward(call):
        calls.append((call.window_left, call.window_right))
        return right.forward(call)

    spied = dataclasses.replace(right, forward=forward)
    monkeypatch.setitem(OPS["attention"].backends, backend, spied)
    inputs = make(device, seqlen_q=20, seqlen_k=30) | {"is_causal": is_causal}
    inputs = pack(inputs, (20, 9), (30, 9)) if ragged else inputs
    inputs["query"].requires_grad_()
    expected = run(backend, **inputs)
    most_left, most_right = (29 if is_causal else 19), 29
    for window in ((None, None), (most_left, most_right), (most_left, None), (10**6, 10**6)):
        assert torch.equal(run(backend, **inputs, window=window), expected)
    run(backend, **inputs, window=(most_left - 1, most_right))
    run(backend, **inputs, window=(most_left, most_right - 1))
    right_side = -1 if is_causal else most_right - 1
    assert calls == [(-1, -1)] * 5 + [(most_left - 1, -1), (-1, right_side)]


@each_backend
def test_rows_without_a_key_in_their_window(device, backend):
    """Causal queries before the first key, and queries whose window ends before the first key that
    is not masked, give 0 and get no gradient."""
    inputs = make(device, 1, 1, seqlen_q=80, seqlen_k=80) | {"window": (5, 3)}
    key_mask = torch.arange(80) % 40 >= 20
    inputs = hide(inputs, key_mask[None])
    out, grads = out_and_grads(backend, inputs)
    seen = torch.stack([key_mask[max(i - 5, 0) : i + 4].any() for i in range(80)])
    assert 0 < seen.sum() < 60 and (out[0, 0].any(-1).cpu() == seen).all()
    assert (grads["query"][0, 0].any(-1).cpu() <= seen).all()
    check(backend, inputs)


def test_an_example_of_a_window():
    """A query's window is in place: it stands at its own index, or as ``is_causal`` aligns it."""
    value = torch.eye(6)[None, None]
    query = torch.zeros(1, 1, 3, 6)
    for is_causal, window, rows in (
        (False, (0, 0), ((0,), (1,), (2,))),
        (False, (1, 0), ((0,), (0, 1), (1, 2))),
        (False, (0, 2), ((0, 1, 2), (1, 2, 3), (2, 3, 4))),
        (True, (1, 5), ((2, 3), (3, 4), (4, 5))),
        (True, (None, 0), (range(4), range(5), range(6))),
    ):
        for backend in ("eager", *BACKENDS):
            out = run(
                backend,
                **dict(query=query, key=value, value=value, window=window, is_causal=is_causal),
            )
            for row, keys in zip(out[0, 0], rows, strict=True):
                assert row.nonzero().flatten().tolist() == [*keys]


# --- views ----------------------------------------------------------------------------------------


@pairwise(seqlen_q=(1, 3, 5), hidden=("nothing", "the end", "the beginning"), layout=LAYOUTS)
def test_few_queries(seqlen_q, hidden, layout):
    """In decoding from a cache, keys are read in place, but masked keys have no effect."""
    cpu = torch.device("cpu")
    inputs = make(cpu, 6, seqlen_q=seqlen_q, seqlen_k=37) | {"is_causal": True}
    inputs |= {name: layout(inputs[name]) for name in QKV[1:]}
    if hidden != "nothing":
        key_mask = up_to((37, 20, 30, 37, 9, 25), 37)
        inputs = hide(inputs, key_mask.flip(1) if hidden == "the beginning" else key_mask)
    check("cpp", inputs)


@each_backend
@dense_and_ragged
def test_packed_projection_with_unlike_key_and_value_strides(device, backend, ragged):
    packed = torch.randn(2, 20, 3, 2, 32, device=device)
    if ragged:
        query, key, _ = packed.flatten(0, 1).unbind(1)
        lengths = torch.tensor([0, 11, 38], dtype=torch.int32, device=device)
        layout = dict(cu_seqlens_q=lengths, cu_seqlens_k=lengths, max_seqlen_q=30, max_seqlen_k=30)
    else:
        query, key, _ = packed.permute(2, 0, 3, 1, 4)
        layout = {}
    value = LAYOUTS["gapped"](torch.randn(key.shape, device=device))
    assert query.data_ptr() == packed.data_ptr() and key.stride() != value.stride()
    check(backend, dict(query=query, key=key, value=value, **layout))


@pytest.mark.parametrize("threads", (2, 5, 13))
@dense_and_ragged
def test_any_number_of_threads_computes_every_head(ragged, threads):
    inputs = with_extras(make(torch.device("cpu"), batch=3, heads=4, head_dim=16))
    inputs = pack(inputs, (33, 5, 0)) if ragged else inputs
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        expected, expected_grads = out_and_grads("cpp", inputs)
        torch.set_num_threads(threads)
        for _ in range(5):
            with poisoned_memory():
                out, grads = out_and_grads("cpp", inputs)
            assert torch.equal(out, expected)
            assert all(torch.equal(grads[name], expected_grads[name]) for name in grads)
    finally:
        torch.set_num_threads(before)


@each_backend
@pytest.mark.parametrize("far", ("batch", "head", "row", "packed head", "packed row"))
def test_elements_past_2_to_the_31(device, backend, far):
    """The rows are in one huge buffer; the system commits only the few pages that are used.

    An offset that wrapped at 32 bits would read zeros from the half before the base.
    """
    try:
        buffer = torch.empty(2**32 + 4096, dtype=torch.float16, device=device)
    except RuntimeError as error:
        pytest.skip(f"no room for a buffer of 8 GiB: {error}")
    small = make(device, seqlen_q=5, seqlen_k=5, head_dim=16, dtype=torch.float16)
    small = pack(small, (5, 2), spare=(0, 0)) if far.startswith("packed") else small
    dim = {"batch": 0, "head": 1, "row": 2, "packed head": 1, "packed row": 0}[far]
    views = {}
    for i, name in enumerate(QKV):
        tensor = small[name]
        strides = list(tensor.stride())
        strides[dim] = -(-(2**31) // (tensor.shape[dim] - 1) // 8) * 8 + 16
        views[name] = buffer.as_strided(tensor.shape, strides, 2**31 + 1024 * i)
        views[name].copy_(tensor)
    assert all(torch.equal(views[name], small[name]) for name in QKV)
    check(backend, with_extras(small | views))


# --- scores ---------------------------------------------------------------------------------------


@each_backend
@pytest.mark.parametrize("scale", (None, 1.0, 0.01), ids=("default", "t5", "small"))
def test_scale(device, backend, scale):
    check(backend, with_extras(make(device, 1, 4, 20, 20, head_dim=16)) | {"scale": scale})


@each_backend
@all_extras
@pytest.mark.parametrize("kind", ("one-hot", "offset", "large bias"))
def test_extreme_scores(device, backend, kind, extras):
    inputs = make(device, batch=1, heads=4, seqlen_q=20, seqlen_k=70, head_dim=16)
    if kind == "one-hot":
        inputs["query"] = inputs["query"] * 30
    elif kind == "offset":  # every score of a row is shifted by the same large amount
        inputs["key"] = inputs["key"] + 50
    inputs = with_extras(inputs, extras + kind)
    if kind == "large bias":  # one head has one large bucket, the next has only large ones
        inputs["bias_weight"][3, 0], inputs["bias_weight"][:, 1] = 50.0, 1000.0
    check(backend, inputs)


@each_backend
@dense_and_ragged
def test_nan_in_a_query_stays_in_its_row(device, backend, ragged):
    inputs = make(device, seqlen_q=20, seqlen_k=20)
    inputs["query"][0, 0, 3, 0] = NAN
    check(backend, pack(inputs, (20, 20)) if ragged else inputs)


# --- bias -----------------------------------------------------------------------------------------


@pairwise(
    backend=BACKENDS,
    ragged=RAGGED,
    table={
        "32": (32, True, 128),
        "32-causal": (32, False, 128),
        "4": (4, True, 2),
        "2-causal": (2, False, 2),
    },
)
def test_other_tables(device, backend, table, ragged):
    buckets, bidirectional, max_distance = table
    inputs = make(device, 1, 4 if buckets < 32 else 2, seqlen_q=45, seqlen_k=45, head_dim=16)
    inputs["bias_weight"] = torch.randn(buckets, inputs["query"].shape[1], device=device)
    inputs |= dict(bidirectional=bidirectional, max_distance=max_distance, scale=1.0)
    check(backend, pack(inputs, (45,)) if ragged else inputs)


@pytest.mark.slow
@each_backend
@half_precision
def test_table_in_another_dtype(device, backend, dtype):
    """Under autocast the table of the model stays fp32."""
    inputs = make(device, 1, 4, 20, 20, dtype=dtype)
    check(backend, with_extras(inputs, dtype=torch.float32))
    check(backend, with_extras(make(device, 1, 4, 20, 20), dtype=dtype))


# --- dropout --------------------------------------------------------------------------------------


def recovered_mask(
    backend, lengths_q, lengths_k, ragged, device, sample_index, dropout_p, seed, dtype
):
    """The probabilities that dropout keeps, for each sequence [H, Tq, Tk], read from the output.

    All scores are equal, so no probability is 0. The values are one-hot: key j alone writes to
    column j. As there are more keys than columns, key j writes to column j % 64 in copy j // 64 of
    the sample; dropout is the same in all copies.
    """
    heads, head_dim, copies = 2, 64, -(-max(lengths_k) // 64)
    batch, seqlen_q, seqlen_k = len(lengths_q), max(lengths_q), max(lengths_k)
    value = torch.eye(copies * head_dim)[:seqlen_k].unflatten(1, (copies, head_dim))
    value = value.permute(1, 0, 2)[None, :, None].expand(batch, -1, heads, -1, -1).flatten(0, 1)
    zeros = torch.zeros(batch * copies, heads, seqlen_q, head_dim)
    inputs = dict(query=zeros, key=torch.zeros_like(value), value=value)
    inputs = {name: tensor.to(device, dtype) for name, tensor in inputs.items()}
    lengths_q, lengths_k = (
        [length for length in lengths for _ in range(copies)] for lengths in (lengths_q, lengths_k)
    )
    inputs["key_mask"] = up_to(lengths_k, seqlen_k).to(device)
    if ragged:
        inputs = pack(inputs, lengths_q, lengths_k)
    sample_index = sample_index.repeat_interleave(copies).to(device)
    out = run(backend, **inputs, dropout_p=dropout_p, seed=seed, sample_index=sample_index)
    rows = list(out[: sum(lengths_q)].split(lengths_q)) if ragged else out.transpose(1, 2).unbind()
    masks = []
    for first in range(0, len(rows), copies):
        mask = torch.cat(rows[first : first + copies], -1)[..., : lengths_k[first]]
        masks.append(mask[: lengths_q[first]].transpose(0, 1).cpu() != 0)
    return masks


@pairwise(
    backend=BACKENDS,
    ragged=RAGGED,
    draws={
        "0.001": (0.001, 0, torch.float32),
        "0.1": (0.1, -1, torch.float16),
        "0.5": (0.5, 2**63 - 1, torch.float32),
        "0.999": (0.999, torch.tensor(-(2**40) + 5), torch.float16),
    },
)
def test_dropout_mask_is_that_of_the_reference(device, backend, draws, ragged):
    dropout_p, seed, dtype = draws
    lengths_q, lengths_k, sample_index = (70, 3), (17, 130), torch.tensor([LARGE_SAMPLE, 2**63 - 1])
    expected = dropout_keep_mask(seed, sample_index, 2, 70, 130, dropout_p)
    seed = seed.to(device) if isinstance(seed, torch.Tensor) else seed
    masks = recovered_mask(
        backend, lengths_q, lengths_k, ragged, device, sample_index, dropout_p, seed, dtype
    )
    for b, mask in enumerate(masks):
        assert torch.equal(mask, expected[b, :, : lengths_q[b], : lengths_k[b]])


@pairwise(backend=BACKENDS, ragged=RAGGED, dropout_p=(0.001, 0.5, 0.999, 1.0))
def test_extreme_rates(device, backend, dropout_p, ragged):
    inputs = make(device, heads=1, seqlen_q=20, seqlen_k=40, head_dim=16)
    inputs = with_extras(inputs, dropout_p=dropout_p)
    inputs = pack(inputs, (20, 7), (40, 9)) if ragged else inputs
    check(backend, inputs)
    if dropout_p == 1.0:
        out, grads = out_and_grads(backend, inputs)
        assert not out.any() and not any(grad.any() for grad in grads.values())


# --- padded and packed, bit for bit ---------------------------------------------------------------


@pairwise(
    backend=("eager", *BACKENDS),
    kind=("self", "key mask", "causal", "cache", "cross", "window"),
    case={
        "fp32-40-dropout": (torch.float32, 40, "dropout"),
        "fp32-70-bias": (torch.float32, 70, "bias and dropout"),
        "fp16-130-dropout": (torch.float16, 130, "dropout"),
    },
)
def test_padded_and_ragged_agree_bit_for_bit(device, backend, kind, case):
    dtype, longest, extras = case
    lengths_k = lengths_q = (longest, 0, 9)
    if kind == "cache":  # equal caches, as a padded batch has one alignment
        lengths_k, lengths_q = (longest, 9, 14), (longest - 9, 0, 5)
    elif kind == "cross":
        lengths_q = (3, 7, longest // 2)
    sizes = dict(seqlen_q=max(lengths_q), seqlen_k=longest, head_dim=16, dtype=dtype)
    padded = make(device, batch=3, heads=1, **sizes) | {"is_causal": kind in ("causal", "cache")}
    exists_q, exists_k = up_to(lengths_q, sizes["seqlen_q"]), up_to(lengths_k, longest)
    seen = torch.rand(3, longest) < (0.6 if kind == "key mask" else 1.0)
    padded = hide(padded, exists_k & seen)
    padded = with_extras(padded, extras)
    padded["sample_index"] = torch.tensor([9, 2, LARGE_SAMPLE], device=device)
    if kind == "window":
        padded["window"] = (7, 33)
    ragged = pack(padded, lengths_q, lengths_k)
    if kind != "key mask":
        del ragged["key_mask"]

    upstream = torch.randn_like(padded["query"])
    upstream = upstream.masked_fill(~exists_q.to(device)[:, None, :, None], 0.0)
    out, grads = out_and_grads(backend, padded, upstream)
    packed_upstream = pack_rows(upstream, lengths_q, spare=3).nan_to_num(1.0)
    packed_out, packed_grads = out_and_grads(backend, ragged, packed_upstream)

    def same(packed, dense, lengths):
        rows = sum(lengths)
        return torch.equal(packed[:rows], pack_rows(dense, lengths)) and not packed[rows:].any()

    assert same(packed_out, out, lengths_q)
    assert same(packed_grads["query"], grads["query"], lengths_q)
    assert same(packed_grads["key"], grads["key"], lengths_k)
    assert same(packed_grads["value"], grads["value"], lengths_k)
    if "bias" in extras:
        assert torch.equal(packed_grads["bias_weight"], grads["bias_weight"])


# --- anything -------------------------------------------------------------------------------------


@st.composite
def calls(draw):
    torch.manual_seed(draw(st.integers(0, 2**32)))
    # With few elements even PyTorch's error is chance.
    batch, heads = draw(st.integers(1, 2)), draw(st.integers(3, 4))
    longest = draw(st.integers(1, 40)), draw(st.integers(1, 70))
    inputs = make(
        "cpu",
        batch,
        heads,
        *longest,
        head_dim=draw(st.sampled_from((8, 24, 32, 48))),
        dtype=draw(st.sampled_from((torch.float32, torch.float16))),
    )
    lengths = [draw(st.lists(st.integers(0, n), min_size=batch, max_size=batch)) for n in longest]
    layouts = {name: draw(st.sampled_from(tuple(LAYOUTS))) for name in QKV}
    inputs["is_causal"] = draw(st.booleans())
    if draw(st.booleans()):
        inputs["window"] = tuple(draw(st.none() | st.integers(0, 70)) for _ in range(2))
    if draw(st.booleans()):
        key_mask = torch.rand(batch, longest[1]) < draw(st.sampled_from((0.1, 0.5, 0.95)))
        key_mask &= up_to(lengths[1], longest[1])
        # In an expanded tensor, NaN in the first row would be in every row.
        inputs = inputs | {"key_mask": key_mask}
        inputs = inputs if "expanded" in layouts.values() else hide(inputs, key_mask)
    if draw(st.booleans()):
        sizes = (batch, heads, *longest)
        shape = [n if draw(st.booleans()) else 1 for n in sizes]
        inputs["attn_mask"] = torch.rand(shape) < draw(st.sampled_from((0.1, 0.5, 0.95)))
    if draw(st.booleans()):
        buckets, max_distance = draw(st.sampled_from(((8, 20), (32, 128), (4, 3))))
        inputs["bias_weight"] = torch.randn(buckets, heads).to(inputs["query"].dtype)
        inputs |= dict(bidirectional=draw(st.booleans()), max_distance=max_distance)
    if draw(st.booleans()):
        inputs |= dict(
            dropout_p=draw(st.sampled_from((0.1, 0.5, 0.9))),
            seed=draw(st.integers(-(2**63), 2**63 - 1)),
            sample_index=torch.randint(2**63 - 1, (batch,)),
        )
    if "attn_mask" not in inputs and draw(st.booleans()):
        inputs = pack(inputs, *lengths, spare=(draw(st.integers(0, 5)), draw(st.integers(1, 5))))
    return inputs | {name: LAYOUTS[layouts[name]](inputs[name]) for name in QKV}


@pytest.mark.slow
@each_backend
# Shrinking a failure would take minutes under the interpreter.
@settings(phases=(Phase.generate,), max_examples=20, deadline=None, derandomize=True)
@given(inputs=calls())
def test_property(backend, inputs):
    check(backend, inputs)


# --- fp32 in TF32 ---------------------------------------------------------------------------------


def tell(precision: str, of=torch.backends.cuda.matmul) -> functools.partial:
    return functools.partial(setattr, of, "fp32_precision", precision)


def tell_of_tf32(allowed: bool) -> functools.partial:
    """Allows TF32 by the older flag."""
    return functools.partial(setattr, torch.backends.cuda.matmul, "allow_tf32", allowed)


#: Settings of PyTorch for fp32 products on a GPU, in order, and whether they allow TF32.
TOLD = {
    "nothing": ((), False),
    "allow_tf32": ((tell_of_tf32(True),), True),
    "no tf32": ((tell_of_tf32(True), tell_of_tf32(False)), False),
    **{
        said: ((functools.partial(torch.set_float32_matmul_precision, said),), said != "highest")
        for said in ("high", "medium", "highest")
    },
    "products in tf32": ((tell("tf32"),), True),
    "all in tf32": ((tell("tf32", torch.backends),), True),
    "all in tf32 but products": ((tell("tf32", torch.backends), tell("ieee")), False),
    "no tf32, then tf32": ((tell_of_tf32(False), tell("tf32")), True),
    "tf32, then no tf32": ((tell("tf32"), tell_of_tf32(False)), False),
}


@pytest.fixture
def nothing_told(monkeypatch):
    """PyTorch's precision of fp32 products is the default again afterwards."""
    # PyTorch's own test helpers forbid to change it; another test of the process may import them.
    settings = torch.backends.disable_global_flags.__globals__
    monkeypatch.setitem(settings, "__allow_nonbracketed_mutation_flag", True)
    yield
    torch.set_float32_matmul_precision("highest")
    for of in (torch.backends, torch.backends.cuda.matmul, torch.backends.mkldnn.matmul):
        tell("none", of)()


@pytest.fixture
def allowed(monkeypatch, nothing_told):
    """Whether the launchers of forward and backward were allowed TF32, call by call."""
    backends = OPS["attention"].backends
    right = backends["triton"]

    def forward(call):
        found.append(call.allow_tf32)
        return right.forward(call)

    def backward(grad, saved):
        found.append(saved.call.allow_tf32)
        return right.backward(grad, saved)

    found = []
    spied = dataclasses.replace(right, forward=forward, backward=backward)
    monkeypatch.setitem(backends, "triton", spied)
    return found


@pytest.mark.parametrize(("told", "expected"), TOLD.values(), ids=TOLD)
def test_tf32_is_allowed_where_pytorch_allows_it(device, allowed, told, expected):
    for setting in told:
        setting()
    out_and_grads("triton", make(device, seqlen_q=9, seqlen_k=9))
    assert allowed == [expected] * 2
    for dtype in HALF.values():
        out_and_grads("triton", make(device, seqlen_q=9, seqlen_k=9, dtype=dtype))
    assert allowed[2:] == [False] * 4


@pytest.mark.parametrize("compiled", (False, True), ids=("eager", "compiled"))
def test_a_backward_has_the_precision_of_its_forward(device, allowed, compiled):
    """A compiled call has the precision set when it runs, not that of its trace."""
    torch._dynamo.reset()
    inputs = make(device, seqlen_q=9, seqlen_k=9)
    leaf = [inputs[name].requires_grad_() for name in QKV]
    call = functools.partial(run, "triton")
    if compiled:
        call = torch.compile(call, fullgraph=True, backend="aot_eager")
    for precision, other in (("tf32", "ieee"), ("ieee", "tf32"), ("tf32", "ieee")):
        tell(precision)()
        out = call(**inputs)
        tell(other)()
        torch.autograd.grad(out.sum(), leaf)
        assert allowed == [precision == "tf32"] * 2
        allowed.clear()


def in_tf32(**inputs):
    with ProductsInTF32():
        return reference(**inputs)


@pytest.mark.gpu  # the interpreter knows no TF32; tests/ptx runs what is compiled
@dense_and_ragged
@all_extras
def test_it_errs_as_products_in_tf32_do(nothing_told, ragged, extras):
    inputs = make("cuda", heads=heads_for(extras), seqlen_q=70, seqlen_k=150, head_dim=64)
    inputs = with_extras(inputs, extras)
    inputs = pack(inputs, (70, 33), (150, 70)) if ragged else inputs
    tell("tf32")()
    triton = functools.partial(run, "triton")
    with pytest.raises(BudgetExceeded):
        assert_within_budget(triton, reference, inputs)
    assert_within_budget(triton, reference, inputs, wrt=leaves(inputs), peers=[in_tf32])


# --- errors ---------------------------------------------------------------------------------------


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


LENGTH_ERRORS = (
    (dict(cu_seqlens_q=int32(1, 33, 42)), "`cu_seqlens_q` got 1 … 42"),
    (dict(cu_seqlens_q=int32(-1, 2, 3)), "`cu_seqlens_q` got -1 … 3"),
    (dict(cu_seqlens_q=int32(0, 33, 30)), "`cu_seqlens_q` got 0 … 30 with lengths from -3"),
    (dict(cu_seqlens_q=int32(0, 33, 46)), "at most 45 (the rows of the tensor)"),
    (dict(cu_seqlens_k=int32(0, 33, 48)), "`cu_seqlens_k` got 0 … 48"),
    (dict(max_seqlen_q=32), "`max_seqlen_q` got 32; expected at least 33"),
    (dict(max_seqlen_k=32), "`max_seqlen_k` got 32; expected at least 33"),
)


@pytest.mark.parametrize("backend", ("eager", *BACKENDS))
@pytest.mark.parametrize(("change", "words"), LENGTH_ERRORS)
def test_lengths_are_looked_at_on_a_cpu(backend, change, words):
    with fastplm.use_backend(backend), pytest.raises(ValueError) as caught:
        ops.attention_varlen(**pack(make("cpu"), (33, 9)) | change)
    assert str(caught.value).startswith("attention_varlen: ") and words in str(caught.value)


def test_a_dropout_that_has_no_counters_left():
    query = torch.zeros(1, 1, 1, 8)
    keys = torch.zeros(1, 1, 1, 8).expand(1, 1, 2**20 + 1, 8)
    with pytest.raises(ValueError, match="`dropout_p` got 0.1 with 1048577 keys and 1 heads"):
        ops.attention(query, keys, keys, dropout_p=0.1)
    many = torch.zeros(1, 1, 1, 8).expand(1, 2**12, 1, 8)
    with pytest.raises(ValueError, match="`dropout_p` got 0.1 with 1 keys and 4096 heads"):
        ops.attention(many, many, many, dropout_p=0.1)


@dense_and_ragged
@pytest.mark.parametrize(("dtype", "most"), ((torch.float32, 128), (torch.bfloat16, 256)))
def test_a_head_dim_without_a_kernel_runs_elsewhere_and_says_so(ragged, dtype, most):
    inputs = make("cpu", seqlen_q=9, seqlen_k=9, head_dim=most + 8, dtype=dtype)
    function = ops.attention_varlen if ragged else ops.attention
    inputs = pack(inputs, (9, 4)) if ragged else inputs
    reason = f"not triton: head dim {most + 8} is over {most}"
    assert reason in fastplm.explain(function, **inputs)
    check("auto", inputs)


# --- cuDNN's forward ------------------------------------------------------------------------------


class _CuDNN:
    """What ``aten::_scaled_dot_product_cudnn_attention`` returns, by a matrix of scores."""

    def __call__(self, query, key, value, bias, statistics, dropout_p, is_causal, debug, *, scale):
        assert bias is None and dropout_p == 0.0 and not debug
        wide = torch.float64
        scores = query.to(wide) @ key.to(wide).transpose(2, 3) * scale
        if is_causal:
            queries, keys = (torch.arange(size) for size in scores.shape[2:])
            scores = scores.masked_fill(keys > queries[:, None], -torch.inf)
        out = (scores.softmax(-1) @ value.to(wide)).to(query.dtype)
        logsumexp = scores.logsumexp(-1, keepdim=True).float()
        return out, logsumexp if statistics else logsumexp * NAN, *[None] * 7


class _CuDNNBackward:
    """What ``aten::_scaled_dot_product_cudnn_attention_backward`` returns."""

    def __init__(self):
        self.calls = 0

    def __call__(self, grad, query, key, value, out, logsumexp, seed, offset, *others, scale):
        self.calls += 1
        *undefined, queries, keys, dropout_p, is_causal = others
        assert undefined == [None] * 3 and dropout_p == 0.0 and seed.shape == offset.shape == ()
        assert (queries, keys) == (query.shape[2], key.shape[2])
        leaves = [one.detach().double().requires_grad_() for one in (query, key, value)]
        with torch.enable_grad():
            expected, sums, *_ = _CuDNN()(*leaves, None, True, 0.0, is_causal, False, scale=scale)
        torch.testing.assert_close(logsumexp, sums.detach())
        torch.testing.assert_close(out.double(), expected.detach(), atol=1e-2, rtol=1e-2)
        return [one.to(query.dtype) for one in torch.autograd.grad(expected, leaves, grad.double())]


@pytest.fixture
def cudnn(monkeypatch):
    """The backend "cudnn" on a CPU; its backward is interpreted, or PyTorch's."""
    attention = sys.modules["fastplm.ops.attention"]
    monkeypatch.setattr(
        torch.ops.aten, "_scaled_dot_product_cudnn_attention", SimpleNamespace(default=_CuDNN())
    )
    name, backward = "_scaled_dot_product_cudnn_attention_backward", _CuDNNBackward()
    monkeypatch.setattr(torch.ops.aten, name, SimpleNamespace(default=backward))
    monkeypatch.setattr(attention, "of_cudnn", backward, raising=False)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: False)
    backends = OPS["attention"].backends
    made = dataclasses.replace(backends["cudnn"], rejects=accepts_all)
    monkeypatch.setitem(backends, "cudnn", made)
    return attention


@half_precision
@full_and_causal
@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k"), ((33, 33), (128, 128), (130, 130), (200, 70), (20, 512), (513, 513))
)
def test_cudnns_forward_and_the_backward_that_is_faster(
    cudnn, dtype, is_causal, seqlen_q, seqlen_k
):
    """Up to 128 tokens our backward reads no statistics, beyond it those of cuDNN, whose backward
    runs from 512 keys on."""
    if is_causal and seqlen_q != seqlen_k:
        pytest.skip("cuDNN aligns causality at the first key")
    cpu = torch.device("cpu")
    inputs = make(cpu, 2, 1, seqlen_q, seqlen_k, head_dim=64, dtype=dtype)
    check("cudnn", inputs | dict(is_causal=is_causal))
    assert (cudnn.of_cudnn.calls > 0) == (seqlen_k >= 512)


def test_cudnns_backward_runs_nowhere_else(cudnn, monkeypatch):
    """Not where "auto" chooses cuDNN, nor below 512 keys, nor with deterministic algorithms."""
    others = {name: one for name, one in OPS["attention"].backends.items() if name != "cpp"}
    monkeypatch.setattr(OPS["attention"], "backends", others)
    inputs = make(torch.device("cpu"), heads=1, seqlen_q=9, seqlen_k=512, head_dim=64)
    query, key, value = (inputs[name].half().requires_grad_() for name in ("query", "key", "value"))

    def run(keys=512):
        ops.attention(query, key[:, :, :keys], value[:, :, :keys]).sum().backward()

    run()
    with fastplm.use_backend("cudnn", "attention"):
        run(511)
        monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
        run()
    assert cudnn.of_cudnn.calls == 0


def test_pytorch_takes_the_calls_of_cudnn(monkeypatch):
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: False)
    attention = sys.modules["fastplm.ops.attention"]
    with torch.device("meta"), fastplm.use_backend("cudnn", "attention"):
        query = torch.empty(2, 3, 512, 64, dtype=torch.bfloat16)
        call = attention.Call(
            query, query, query, *[None] * 4, 512, 512, None, False, 0, None, None, 0.0, True, 0.125
        )
        assert attention._cudnn_backward_row(call) is not None
        call = call._replace(reorders=True)
        out, logsumexp = attention._cudnn_forward(call)
        grads = attention._cudnn_backward(out, attention.Saved(call, out, logsumexp, False))
        assert logsumexp.shape == attention._statistics(call, "cudnn").shape
        assert [one.shape for one in (out, *grads[:3])] == [query.shape] * 4


#: Forwards on an H100 in 16 bits, head dim 64: (queries, keys, causal, who runs them).
FORWARDS = (
    (128, 128, False, "cudnn"),
    (17, 64, False, "cudnn"),
    (512, 512, False, "cudnn"),
    (512, 128, False, "cudnn"),
    (1024, 1024, True, "cudnn"),
    (512, 512, True, "cudnn"),
    (256, 256, True, "triton"),
    (128, 512, False, "triton"),
    (1, 512, False, "triton"),
    (1, 512, True, "triton"),
    (512, 1024, True, "triton"),
)


@pytest.mark.parametrize(("queries", "keys", "is_causal", "runs"), FORWARDS)
def test_the_faster_forward_of_a_size_runs(monkeypatch, queries, keys, is_causal, runs):
    """By the rows of an H100; whatever else a call has, ours runs it."""
    attention = sys.modules["fastplm.ops.attention"]
    monkeypatch.setattr(attention, "_capability", lambda index: (9, 0))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    # PyTorch 2.11 starts the GPU for a fake tensor on it.
    monkeypatch.setattr(torch._subclasses.fake_tensor, "init_gpu_context", lambda device: None)
    monkeypatch.setattr(_backends, "_WHY_NOT_NVIDIA", {0: None})
    monkeypatch.setattr(torch.backends.cuda, "SDPAParams", lambda *given: given)
    allowed = [True]
    monkeypatch.setattr(torch.backends.cuda, "can_use_cudnn_attention", lambda _: allowed[0])

    def chosen(dtype=torch.bfloat16, dim=64, **changed):
        with FakeTensorMode(), torch.device("cuda"):
            query = torch.empty(2, 3, queries, dim, dtype=dtype)
            key = torch.empty(2, 3, keys, dim, dtype=dtype)
            given = {name: make() for name, make in changed.items()}
            call = attention.Call(
                query, key, key, *[None] * 4, queries, keys, None, False, 0, None, None, 0.0,
                is_causal, 0.125,
            )._replace(**given)  # fmt: skip
            return OPS["attention"].resolve(call)

    assert chosen() == chosen(torch.float16) == runs
    assert chosen(dim=128) == "triton", "it was not measured"
    masks = dict(
        key_mask=lambda: torch.ones(2, keys, dtype=torch.bool),
        seed=lambda: torch.zeros((), dtype=torch.int64),
        bias_weight=lambda: torch.zeros(32, 3),
        attn_mask=lambda: torch.ones(2, 3, queries, keys, dtype=torch.bool),
    )
    for name, mask in masks.items():
        assert chosen(**{name: mask}) == "triton", name
    monkeypatch.setattr(attention, "_capability", lambda index: (8, 0))
    assert chosen() == "triton", "it was not measured"
    monkeypatch.setattr(attention, "_capability", lambda index: (9, 0))
    allowed[0] = False
    assert chosen() == "triton"
