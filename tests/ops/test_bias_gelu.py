"""ops.bias_gelu against its reference: output and gradients, by the error budget."""

from __future__ import annotations

import functools
import importlib

import pytest
import torch
import torch.nn.functional as F

import fastplm
from fastplm import ops
from fastplm._registry import OPS
from fastplm.ops.gelu import FORMS
from fastplm.reference.bias_gelu import bias_gelu_ref
from fastplm.testing import assert_within_budget, poisoned_memory

from ..pairwise import pairwise

BACKENDS = tuple(name for name in OPS["bias_gelu"].backends if name != "eager")
each_backend = pytest.mark.parametrize("backend", BACKENDS)
both_forms = pytest.mark.parametrize("approximate", FORMS)
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
each_dtype = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
BOTH = ("input", "bias")
NAN, INF = float("nan"), float("inf")


def run(backend: str, **inputs):
    if backend == "cpp" and inputs["input"].device.type == "cuda":
        pytest.skip("the cpp backend of bias_gelu is for CPU tensors")
    with fastplm.use_backend(backend):
        return ops.bias_gelu(**inputs)


def make(device, *shape: int, dtype=torch.float32, bias_dtype=None, approximate="none") -> dict:
    return dict(
        input=torch.randn(shape, device=device).to(dtype),
        bias=torch.randn(shape[-1], device=device).to(bias_dtype or dtype),
        approximate=approximate,
    )


def check(backend: str, inputs: dict, wrt=BOTH) -> None:
    assert_within_budget(functools.partial(run, backend), bias_gelu_ref, inputs, wrt=wrt)


def gradients(backend: str, inputs: dict, upstream=None):
    leaves = {name: inputs[name].detach().requires_grad_() for name in BOTH}
    with poisoned_memory():
        out = run(backend, **inputs | leaves)
        upstream = torch.ones_like(out) if upstream is None else upstream
        return out.detach(), *torch.autograd.grad(out, list(leaves.values()), upstream)


# --- the reference --------------------------------------------------------------------------------


@both_forms
def test_the_reference_is_pytorchs(approximate):
    inputs = make("cpu", 30, 64, approximate=approximate)
    expected = F.gelu(inputs["input"] + inputs["bias"], approximate=approximate)
    assert torch.equal(bias_gelu_ref(**inputs), expected)
    alone = bias_gelu_ref(inputs["input"], None, approximate=approximate)
    assert torch.equal(alone, F.gelu(inputs["input"], approximate=approximate))


# --- the kernels ----------------------------------------------------------------------------------


@pairwise(
    backend=BACKENDS,
    dtype=DTYPES,
    approximate=FORMS,
    rows=(0, 1, 63, 257),
    width=(1, 40, 512, 1025),
    bias={"same": None, "fp32": torch.float32},
)
def test_shapes_and_dtypes(device, backend, dtype, approximate, rows, width, bias):
    """The rows are more than a tile, and more than a group of them; the widths than a tile."""
    check(backend, make(device, rows, width, dtype=dtype, bias_dtype=bias, approximate=approximate))


@each_backend
@each_dtype
@both_forms
def test_every_magnitude_alone(device, backend, dtype, approximate):
    """Numbers of one factor of two at a time, so that no large one hides the error of a small one.

    They go to -8; below it the value is lost in 1 + tanh even in fp64.
    """
    inputs = make(device, 1, 16, dtype=dtype, approximate=approximate)
    inputs["bias"] = None
    for exponent in range(-7, 3):
        for sign in (1.0, -1.0):
            numbers = sign * 2.0**exponent * (1 + torch.rand(40, 16, device=device))
            check(backend, inputs | {"input": numbers.to(dtype)}, wrt=("input",))


@each_backend
@each_dtype
@both_forms
def test_what_is_not_finite(device, backend, dtype, approximate):
    """Values are those of fp64, as PyTorch's fp32 on a CPU makes NaN of infinity; gradients have
    PyTorch's pattern."""
    values = [INF, -INF, NAN, 1e30, -1e30, 3e38, -3e38, 1e4, -1e4, 0.0, -0.0, 1e-40]
    input = torch.tensor(values, device=device).to(dtype)[:, None]
    inputs = dict(input=input, bias=torch.zeros(1, device=device), approximate=approximate)
    out, grad, _ = gradients(backend, inputs)
    _, expected_grad, _ = gradients("eager", inputs)
    exact = bias_gelu_ref(input.double(), None, approximate=approximate).to(dtype)
    torch.testing.assert_close(out, exact, equal_nan=True)
    torch.testing.assert_close(grad, expected_grad, equal_nan=True)


@each_backend
def test_a_sum_with_the_bias_is_not_rounded(device, backend):
    """In bf16 256 + 0.5 would be 256: the slopes of both are 1, and the values differ."""
    input = torch.full((4, 8), 256.0, device=device, dtype=torch.bfloat16)
    bias = torch.full((8,), -255.5, device=device)
    assert torch.equal(run(backend, input=input, bias=bias), bias_gelu_ref(input, bias))
    assert (run(backend, input=input, bias=bias) < 0.4).all()


@each_backend
@each_dtype
@both_forms
def test_without_a_bias(device, backend, dtype, approximate):
    inputs = make(device, 63, 100, dtype=dtype, approximate=approximate) | {"bias": None}
    check(backend, inputs, wrt=("input",))


@each_backend
def test_a_frozen_bias_gets_no_sum(device, backend):
    inputs = make(device, 63, 100)
    check(backend, inputs, wrt=("input",))
    inputs["input"].requires_grad_()
    out = run(backend, **inputs)
    (grad,) = torch.autograd.grad(out.sum(), inputs["input"])
    expected = gradients(backend, inputs)[1]
    assert torch.equal(grad, expected)
    saved = OPS["bias_gelu"].saved.declared(inputs["input"], inputs["bias"], "none", False)
    *_, found = OPS["bias_gelu"].backends[backend].backward(torch.ones_like(out), saved)
    assert found.numel() == 0


@each_backend
@pytest.mark.parametrize("shape", [(64,), (2, 3, 64), (0, 64), (2, 0, 64)])
def test_rows_of_any_dimensions(device, backend, shape):
    inputs = make(device, *shape)
    check(backend, inputs)
    assert run(backend, **inputs).shape == shape


@each_backend
@each_dtype
def test_rows_in_wider_rows(device, backend, dtype):
    """The rows are half of those of a gated feed-forward block, and so is the gradient."""
    inputs = make(device, 70, 64, dtype=dtype)
    wide = torch.randn(70, 128, device=device).to(dtype)
    expected = gradients(backend, inputs | {"input": wide[:, 64:].clone()}, wide[:, :64].clone())
    found = gradients(backend, inputs | {"input": wide[:, 64:]}, wide[:, :64])
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@each_dtype
def test_groups_of_many_rows(device, monkeypatch, dtype):
    kernels = importlib.import_module("fastplm.triton_kernels.bias_gelu")
    monkeypatch.setattr(kernels, "_MAX_GROUPS", 4)
    monkeypatch.setattr(kernels, "_groups", kernels._groups.__wrapped__)  # without its cache
    for rows in (64, 65, 150):
        check("triton", make(device, rows, 40, dtype=dtype, bias_dtype=torch.float32))


@pytest.mark.slow
@each_backend
@each_dtype
@pytest.mark.parametrize("width", [9001, 16384])
def test_many_columns(device, backend, dtype, width):
    check(backend, make(device, 5, width, dtype=dtype, bias_dtype=torch.float32))


@pytest.mark.slow
@each_backend
def test_many_rows(device, backend):
    inputs = make(device, 32768, 16, dtype=torch.bfloat16, bias_dtype=torch.float32)
    check(backend, inputs)
