"""ops.rms_norm against its reference, and the layers on it against PyTorch's and T5's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.models.t5 import modeling_t5

import fastplm
import fastplm.models.t5  # registers the drop-in class of T5's layer norm
from fastplm import _extension, ops
from fastplm.models._base import switch_modules
from fastplm.nn import RMSNorm
from fastplm.reference.rms_norm import rms_norm_ref
from fastplm.testing import assert_within_budget

from ..samples import backends_of

LACKING = _extension.lacks("rms_norm", "CPU")
needs_csrc = pytest.mark.skipif(LACKING is not None, reason=str(LACKING))
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
BOTH = ("input", "weight")


def run(input: torch.Tensor, weight: torch.Tensor, *, eps: float = 1e-6) -> torch.Tensor:
    with fastplm.use_backend("cpp"):
        return ops.rms_norm(input, weight, eps=eps)


def made(*shape: int, dtype=torch.float32, weight_dtype=None) -> dict[str, torch.Tensor]:
    weight = 1 + torch.randn(shape[-1]) / 2
    return {"input": torch.randn(shape).to(dtype), "weight": weight.to(weight_dtype or dtype)}


def check(inputs, function=run, reference=rms_norm_ref, **settings) -> None:
    if settings:
        function, reference = (_with(f, settings) for f in (function, reference))
    assert_within_budget(function, reference, inputs, wrt=BOTH)


def _with(function, settings):
    return lambda **inputs: function(**inputs, **settings)


# --- the reference --------------------------------------------------------------------------------


def test_the_reference_is_the_formula():
    """The formula on numbers whose square sum is exact: 3, 4 and thirteen times 5."""
    input = torch.tensor([3.0, 4.0] + 13 * [5.0] + [0.0]).double()
    expected = input * 16**0.5 / (25 + 13 * 25) ** 0.5
    assert torch.allclose(rms_norm_ref(input, torch.ones(16).double(), eps=0.0), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_reference_is_t5_and_pytorch(dtype):
    """In 16 bits they agree up to a rounding, as T5 rounds twice."""
    inputs = made(30, 64, dtype=dtype)
    layer = modeling_t5.T5LayerNorm(64).to(dtype)
    layer.weight.data = inputs["weight"]
    ours = rms_norm_ref(**inputs)
    torch.testing.assert_close(ours, layer(inputs["input"]))
    torch.testing.assert_close(ours, F.rms_norm(inputs["input"], (64,), inputs["weight"], 1e-6))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("weight_dtype", DTYPES, ids=str)
def test_the_result_has_the_dtype_of_t5(dtype, weight_dtype):
    inputs = made(3, 16, dtype=dtype, weight_dtype=weight_dtype)
    layer = modeling_t5.T5LayerNorm(16).to(weight_dtype)
    assert layer(inputs["input"]).dtype is weight_dtype
    assert ops.rms_norm(**inputs).dtype is weight_dtype


# --- backend "cpp" --------------------------------------------------------------------------------


@needs_csrc
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "shape", [(1, 1), (5, 15), (16,), (4, 63), (33, 64), (2, 3, 65), (130, 768), (0, 8), (3, 0)]
)
def test_shapes_and_dtypes(shape, dtype):
    check(made(*shape, dtype=dtype))


@needs_csrc
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("weight_dtype", DTYPES, ids=str)
def test_an_input_and_a_weight_of_two_dtypes(dtype, weight_dtype):
    check(made(70, 96, dtype=dtype, weight_dtype=weight_dtype))


@needs_csrc
@pytest.mark.parametrize("eps", [0.0, 1e-6, 1e-2, 1.0])
@pytest.mark.parametrize("scale", [1e-12, 1e-3, 1.0, 1e4, 1e15])
def test_magnitudes(scale, eps):
    inputs = made(40, 100)
    inputs["input"] *= scale
    check(inputs, eps=eps)


@needs_csrc
def test_rows_of_very_different_size():
    """Each row is compared with the reference alone, so that no row's error hides another's."""
    inputs = made(8, 96)
    for exponent, row in zip(range(-20, 20, 5), inputs["input"], strict=True):
        check({"input": row[None] * 2.0**exponent, "weight": inputs["weight"]})


@needs_csrc
def test_a_large_offset():
    """Rows with a large common offset: their gradient is a small difference of large numbers."""
    inputs = made(50, 64)
    inputs["input"] = 100 + inputs["input"]
    check(inputs)


@needs_csrc
def test_thousands_of_rows():
    check(made(5000, 24))


@needs_csrc
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_not_finite(dtype):
    """A row of zeros, overflowing numbers, infinities or NaN does not affect other rows."""
    input = torch.randn(7, 40)
    input[1] = 0
    for row, value in ((2, 3e38), (3, float("inf")), (4, float("-inf")), (5, float("nan"))):
        input[row, row] = value
    input, weight = input.to(dtype).requires_grad_(), torch.ones(40, dtype=dtype)
    out, expected = run(input, weight), rms_norm_ref(input, weight)
    torch.testing.assert_close(out, expected, equal_nan=True)
    (grad,) = torch.autograd.grad(out.sum(), input)
    (expected_grad,) = torch.autograd.grad(expected.sum(), input)
    # A square that overflows makes the scale 0, and the formula's gradient 0 times infinity.
    others = [0, 1, 3, 4, 5, 6]
    torch.testing.assert_close(grad[others], expected_grad[others], equal_nan=True)
    assert dtype is torch.float16 or (grad[2] == 0).all()


# --- the layers -----------------------------------------------------------------------------------

LARGE = (256, 96)


def pytorchs(**kwargs) -> nn.Module:
    return nn.RMSNorm(LARGE[-1], eps=1e-6, **kwargs)


def t5s(dtype=torch.float32) -> nn.Module:
    return modeling_t5.T5LayerNorm(LARGE[-1]).to(dtype)


def switched(layer: nn.Module) -> nn.Module:
    switch_modules(nn.Sequential(layer))
    return layer


@needs_csrc
def test_t5_in_16_bits_takes_hidden_states_in_32():
    layer, large = switched(t5s(torch.bfloat16)), torch.randn(LARGE)
    assert backends_of(layer, large) == ["cpp"]
    assert layer(large).dtype is torch.bfloat16


def test_what_pytorch_alone_can_do_stays_pytorchs():
    large = torch.randn(4, *LARGE)
    for layer, input in (
        (pytorchs(elementwise_affine=False), large),
        (nn.RMSNorm(LARGE), large),
        (pytorchs(), large.bfloat16()),
    ):
        expected = layer(input)
        assert backends_of(switched(layer), input) == []
        assert torch.equal(layer(input), expected)


@needs_csrc
def test_without_eps_it_is_that_of_the_dtype():
    layer, large = nn.RMSNorm(LARGE[-1]), torch.randn(LARGE) * 1e-4
    expected = layer(large)
    assert backends_of(switched(layer), large) == ["cpp"]
    torch.testing.assert_close(layer(large), expected)
    assert isinstance(layer, RMSNorm)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_on_a_gpu_t5_is_pytorch(dtype):
    layer = switched(t5s(dtype).cuda())
    input = torch.randn(LARGE, dtype=dtype, device="cuda")
    assert torch.equal(layer(input), F.rms_norm(input, LARGE[-1:], layer.weight, 1e-6))
    assert_within_budget(
        lambda input, weight: F.rms_norm(input, LARGE[-1:], weight, 1e-6),
        rms_norm_ref,
        {"input": input, "weight": layer.weight.detach()},
        wrt=BOTH,
    )
