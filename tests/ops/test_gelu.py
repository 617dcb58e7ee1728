"""ops.gelu against its reference, which is PyTorch's own."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.activations import ACT2FN

import fastplm
from fastplm import _extension, ops
from fastplm.errors import BackendError
from fastplm.models._base import switch_modules
from fastplm.nn import GELU
from fastplm.ops.gelu import FORMS
from fastplm.reference.gelu import gelu_ref
from fastplm.testing import assert_within_budget

from ..samples import backends_of

LACKING = _extension.lacks("gelu_tanh", "CPU")
needs_csrc = pytest.mark.skipif(LACKING is not None, reason=str(LACKING))
both_forms = pytest.mark.parametrize("approximate", FORMS)
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
tanh_ref = functools.partial(gelu_ref, approximate="tanh")


def run(input: torch.Tensor) -> torch.Tensor:
    with fastplm.use_backend("cpp"):
        return ops.gelu(input, approximate="tanh")


def check(input: torch.Tensor, function=run) -> None:
    assert_within_budget(function, tanh_ref, {"input": input}, wrt=("input",))


# --- backend "cpp" --------------------------------------------------------------------------------


@needs_csrc
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [0, 1, 15, 16, 63, 64, 65, 1000, 20_001])
def test_sizes_and_dtypes(size, dtype):
    check(torch.randn(size).to(dtype))


@needs_csrc
@pytest.mark.parametrize("scale", [1e-30, 1e-3, 0.1, 3.0, 30.0, 1e4])
def test_magnitudes(scale):
    check(torch.randn(5000) * scale)


@needs_csrc
@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("exponent", range(-12, 3))
def test_every_magnitude_alone(exponent, sign):
    """Numbers of one factor of two at a time, so that no large one hides the error of a small one.

    They go to -8; below it the value is lost in 1 + tanh even in fp64.
    """
    check(sign * 2.0**exponent * (1 + torch.rand(3000)))


@needs_csrc
def test_far_from_0_it_is_the_input_or_0():
    far = torch.tensor([20.0, 1e3, 1e10, 3e38])
    assert torch.equal(run(far), far)
    assert (run(-far) == 0).all()


@needs_csrc
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_not_finite(dtype):
    """Values are those of fp64, also if they overflow on the way; gradients have PyTorch's pattern.

    PyTorch's fp32 value is no measure on Arm: x (1 + tanh u) overflows there before it is halved.
    """
    values = [float("inf"), float("-inf"), float("nan"), 1e30, -1e30, 3e38, -3e38, 0.0, -0.0, 1e-40]
    input = torch.tensor(values).to(dtype).requires_grad_()
    out, expected = run(input), tanh_ref(input)
    exact = tanh_ref(input.detach().double()).to(dtype)
    torch.testing.assert_close(out, exact, equal_nan=True)
    assert torch.equal(out[-3:-1].signbit(), torch.tensor([False, True]))
    (grad,) = torch.autograd.grad(out.sum(), input)
    (expected_grad,) = torch.autograd.grad(expected.sum(), input)
    torch.testing.assert_close(grad, expected_grad, equal_nan=True)


# --- what is PyTorch's ----------------------------------------------------------------------------


def test_without_a_tanh_and_in_fp64_it_is_pytorch():
    input = torch.randn(500)
    assert torch.equal(ops.gelu(input), F.gelu(input))
    for approximate in FORMS:
        expected = F.gelu(input.double(), approximate=approximate)
        assert torch.equal(ops.gelu(input.double(), approximate=approximate), expected)


@pytest.mark.gpu
@both_forms
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_on_a_gpu_it_is_pytorch(dtype, approximate):
    input = torch.randn(500, dtype=dtype, device="cuda")
    expected = F.gelu(input, approximate=approximate)
    assert torch.equal(ops.gelu(input, approximate=approximate), expected)


def test_calls_that_a_forced_backend_refuses():
    with pytest.raises(BackendError, match="float64"):
        run(torch.randn(4).double())
    with pytest.raises(BackendError, match="without a tanh"), fastplm.use_backend("cpp"):
        ops.gelu(torch.randn(4))


# --- the layers -----------------------------------------------------------------------------------

LARGE = (256, 300)


def test_what_transformers_writes_in_python_stays():
    theirs, large = ACT2FN["gelu_python_tanh"], torch.randn(LARGE)
    expected = theirs(large)
    switch_modules(nn.Sequential(theirs))
    assert backends_of(theirs, large) == [] and torch.equal(theirs(large), expected)
    assert backends_of(GELU(), large) == [] and torch.equal(GELU()(large), F.gelu(large))
