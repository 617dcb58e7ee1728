"""ops.bias_gelu against its reference: output and gradients, by the error budget."""

from __future__ import annotations

import functools

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
