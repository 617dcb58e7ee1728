"""ops.attention against its reference: forward and gradients, by the budget, on nasty inputs."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import fastplm
from fastplm import ops
from fastplm.reference.attention import attention_ref
from fastplm.testing import LAYOUTS, assert_repeatable, assert_within_budget

BACKENDS = ("torch", "triton")
QKV = ("query", "key", "value")


def run(backend: str, **inputs):
    if backend == "torch" and inputs["query"].is_cuda:
        pytest.skip("the torch backend of attention is for CPU tensors")
    with fastplm.use_backend(backend):
        return ops.attention(**inputs)


def check(backend: str, inputs: dict, wrt=QKV) -> None:
    assert_within_budget(functools.partial(run, backend), attention_ref, inputs, wrt=wrt)


def make(device, batch=2, heads=2, seqlen_q=33, seqlen_k=33, head_dim=32, dtype=torch.float32):
    def draw(length):
        return torch.randn(batch, heads, length, head_dim, device=device).to(dtype)

    return dict(query=draw(seqlen_q), key=draw(seqlen_k), value=draw(seqlen_k))


def mask_keys(inputs: dict, lengths, poison: bool = False) -> dict:
    """Right padding after each length, NaN in the masked keys and values if ``poison``."""
    key = inputs["key"]
    key_mask = torch.arange(key.shape[2])[None, :] < torch.tensor(lengths)[:, None]
    key_mask = key_mask.to(key.device)
    if poison:
        hole = ~key_mask[:, None, :, None]
        inputs = inputs | {n: inputs[n].masked_fill(hole, float("nan")) for n in ("key", "value")}
    return inputs | {"key_mask": key_mask}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("seqlen", (1, 63, 65, 257))
@pytest.mark.parametrize("is_causal", (False, True), ids=("full", "causal"))
def test_lengths(device, backend, seqlen, is_causal):
    inputs = make(device, batch=1, seqlen_q=seqlen, seqlen_k=seqlen, head_dim=16)
    check(backend, inputs | {"is_causal": is_causal})


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("head_dim", (1, 32, 40, 64, 80, 96, 128))
def test_head_dims(device, backend, head_dim):
    check(backend, make(device, batch=1, seqlen_q=20, seqlen_k=40, head_dim=head_dim))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16), ids=("fp16", "bf16"))
@pytest.mark.parametrize("is_causal", (False, True), ids=("full", "causal"))
def test_half_precision(device, backend, dtype, is_causal):
    inputs = make(device, seqlen_q=70, seqlen_k=70, head_dim=64, dtype=dtype)
    check(backend, mask_keys(inputs, (70, 41)) | {"is_causal": is_causal})


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("is_causal", (False, True), ids=("full", "causal"))
@pytest.mark.parametrize("lengths", ((65, 65), (65, 7), (1, 0)), ids=("none", "some", "dead"))
def test_key_mask_hides_even_nan(device, backend, is_causal, lengths):
    inputs = mask_keys(make(device, seqlen_q=65, seqlen_k=65), lengths, poison=True)
    check(backend, inputs | {"is_causal": is_causal})


@pytest.mark.parametrize("backend", BACKENDS)
def test_left_padding_and_holes(device, backend):
    inputs = make(device, seqlen_q=40, seqlen_k=40)
    key_mask = torch.rand(2, 40, device=device) < 0.5
    key_mask[0, :9] = False
    check(backend, inputs | {"key_mask": key_mask, "is_causal": True})


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("is_causal", (False, True), ids=("full", "causal"))
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), ((1, 65), (17, 65), (65, 17), (130, 64)))
def test_cross_lengths(device, backend, seqlen_q, seqlen_k, is_causal):
    inputs = make(device, seqlen_q=seqlen_q, seqlen_k=seqlen_k, head_dim=16)
    check(backend, mask_keys(inputs, (seqlen_k, 5)) | {"is_causal": is_causal})


def test_causal_is_bottom_right_aligned(device):
    """The last query sees every key, whatever the two lengths are (a key/value cache)."""
    inputs = make(device, seqlen_q=3, seqlen_k=10)
    whole = ops.attention(**inputs, is_causal=True)
    last = ops.attention(inputs["query"][:, :, -1:], inputs["key"], inputs["value"])
    torch.testing.assert_close(whole[:, :, -1:], last)


@pytest.mark.parametrize("backend", BACKENDS)
def test_dead_rows_are_zero_with_zero_gradient(device, backend):
    inputs = make(device, seqlen_q=5, seqlen_k=3)
    inputs = {name: tensor.requires_grad_() for name, tensor in inputs.items()}
    key_mask = torch.tensor([[True] * 3, [False] * 3], device=device)
    out = run(backend, **inputs, key_mask=key_mask, is_causal=True)
    assert not out[1].any() and not out[0, :, :2].any() and out[0, :, 2:].all()
    out.sum().backward()
    assert not inputs["query"].grad[1].any() and not inputs["query"].grad[0, :, :2].any()
    assert not inputs["key"].grad[1].any() and not inputs["value"].grad[1].any()
    assert all(tensor.grad.isfinite().all() for tensor in inputs.values())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_layouts(device, backend, layout):
    inputs = make(device, seqlen_q=20, seqlen_k=20)
    check(backend, {name: layout(tensor) for name, tensor in inputs.items()})


@pytest.mark.parametrize("backend", BACKENDS)
def test_packed_projection_with_unlike_key_and_value_strides(device, backend):
    packed = torch.randn(2, 20, 3, 2, 32, device=device)
    query, key, _ = packed.permute(2, 0, 3, 1, 4)
    value = LAYOUTS["gapped"](torch.randn(2, 2, 20, 32, device=device))
    check(backend, dict(query=query, key=key, value=value))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("scale", (None, 1.0, 0.01), ids=("default", "t5", "small"))
def test_scale(device, backend, scale):
    check(backend, make(device, head_dim=16) | {"scale": scale})


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ("one-hot", "offset"))
def test_extreme_scores(device, backend, kind):
    inputs = make(device, seqlen_q=40, seqlen_k=40)
    if kind == "one-hot":
        inputs["query"] = inputs["query"] * 30
    else:  # every score of a row is shifted by the same large amount
        inputs["key"] = inputs["key"] + 50
    # Stock PyTorch saves one logsumexp, which loses digits here; its gradients are its own error.
    check(backend, inputs, wrt=QKV if backend == "triton" else ())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("empty", ("batch", "query", "key"))
def test_empty(device, backend, empty):
    sizes = {"batch": dict(batch=0), "query": dict(seqlen_q=0), "key": dict(seqlen_k=0)}[empty]
    check(backend, make(device, **sizes))


@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_in_a_query_stays_in_its_row(device, backend):
    inputs = make(device, seqlen_q=20, seqlen_k=20)
    inputs["query"][0, 0, 3, 0] = float("nan")
    check(backend, inputs)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    st.sampled_from(BACKENDS),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 70),
    st.integers(1, 70),
    st.sampled_from((8, 24, 32, 48)),
    st.booleans(),
    st.lists(st.integers(0, 70), min_size=3, max_size=3),
    st.sampled_from(tuple(LAYOUTS)),
)
def test_property(backend, batch, heads, seqlen_q, seqlen_k, head_dim, is_causal, lengths, layout):
    inputs = make("cpu", batch, heads, seqlen_q, seqlen_k, head_dim)
    inputs = {name: LAYOUTS[layout](tensor) for name, tensor in inputs.items()}
    inputs = mask_keys(inputs, lengths[:batch]) | {"is_causal": is_causal}
    # The gradients of stock PyTorch are a little worse than its eager formula's on some draws.
    check(backend, inputs, wrt=QKV if backend == "triton" else ())


@pytest.mark.parametrize("backend", BACKENDS)
def test_repeats_bit_for_bit(device, backend):
    inputs = mask_keys(make(device, seqlen_q=70, seqlen_k=70), (70, 33))
    assert_repeatable(functools.partial(run, backend), inputs, wrt=QKV)


@pytest.mark.parametrize("backend", BACKENDS)
def test_opcheck(device, backend):
    if backend == "torch" and device.type == "cuda":
        pytest.skip("the torch backend of attention is for CPU tensors")
    inputs = mask_keys(make(device, seqlen_q=9, seqlen_k=7), (7, 0))
    qkv = [inputs[name].requires_grad_() for name in QKV]
    arguments = (*qkv, inputs["key_mask"], True, 0.5, backend)
    torch.library.opcheck(torch.ops.fastplm.attention_fwd, arguments)


def test_compiles_without_graph_breaks_or_recompiles(device):
    inputs = mask_keys(make(device), (33, 9))
    count = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(ops.attention, fullgraph=True, backend=count)
    for _ in range(3):
        torch.testing.assert_close(compiled(**inputs), ops.attention(**inputs))
    assert count.frame_count == 1
    with fastplm.use_backend("eager"):
        compiled(**inputs)
    assert count.frame_count == 2


def test_autocast_as_linear(device):
    with torch.autocast(device.type, torch.bfloat16):
        assert ops.attention(**make(device)).dtype is torch.bfloat16


def test_backward_runs_on_the_backend_of_its_forward(device):
    inputs = make(device)
    query = inputs.pop("query").requires_grad_()
    with fastplm.use_backend("triton"):
        out = ops.attention(query, **inputs)
    assert out.grad_fn is not None
    with fastplm.use_backend("eager"):
        (grad,) = torch.autograd.grad(out.sum(), query)
    assert grad.shape == query.shape


def test_float64_runs_on_the_cpu_default():
    inputs = make("cpu", dtype=torch.float64)
    out = ops.attention(**inputs, is_causal=True)
    torch.testing.assert_close(
        out, F.scaled_dot_product_attention(*inputs.values(), is_causal=True)
    )


@pytest.mark.parametrize(
    ("change", "error", "words"),
    (
        (dict(query=None), TypeError, "`query` got a NoneType"),
        (dict(query=torch.zeros(2, 3, 4)), ValueError, "`query` got 3 dimensions"),
        (dict(key=torch.zeros(2, 2, 7, 16)), ValueError, "`key` got shape (2, 2, 7, 16)"),
        (dict(value=torch.zeros(2, 2, 9, 32)), ValueError, "`value` got shape (2, 2, 9, 32)"),
        (dict(key=torch.zeros(2, 2, 33, 32).half()), TypeError, "`key` got torch.float16"),
        (dict(query=torch.zeros(2, 2, 5, 32).long()), TypeError, "`query` got torch.int64"),
        (dict(key_mask=torch.ones(2, 33)), TypeError, "`key_mask` got torch.float32"),
        (dict(key_mask=torch.ones(2, 5).bool()), ValueError, "`key_mask` got shape (2, 5)"),
        (dict(dropout_p=0.1), NotImplementedError, "`dropout_p` got 0.1"),
        (dict(relative_bias=object()), NotImplementedError, "`relative_bias` got a object"),
    ),
)
def test_errors_name_argument_got_expected_fix(change, error, words):
    with pytest.raises(error) as caught:
        ops.attention(**make("cpu") | change)
    assert isinstance(caught.value, fastplm.FastplmError)
    assert words in str(caught.value) and "expected" in str(caught.value)


def test_a_head_dim_without_a_kernel_runs_elsewhere_and_says_so():
    inputs = make("cpu", head_dim=160)
    assert "not triton: head dim 160 is over 128" in fastplm.explain(ops.attention, **inputs)
    check("torch", inputs)


def test_a_forced_backend_that_cannot_run_says_every_reason():
    with fastplm.use_backend("cuda"), pytest.raises(RuntimeError) as caught:
        ops.attention(**make("cpu"))
    for words in ("backend 'cuda' was forced", "triton: ", "torch: can run it", "eager: "):
        assert words in str(caught.value)
