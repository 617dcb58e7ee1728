"""ops.geglu against its reference: output and gradient, by the error budget."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F

import fastplm
from fastplm import ops
from fastplm._registry import OPS
from fastplm.ops.geglu import ACTIVATIONS
from fastplm.reference.geglu import geglu_ref
from fastplm.testing import assert_within_budget, poisoned_memory

from ..pairwise import pairwise

BACKENDS = tuple(name for name in OPS["geglu"].backends if name != "eager")
each_backend = pytest.mark.parametrize("backend", BACKENDS)
each_activation = pytest.mark.parametrize("activation", ACTIVATIONS)
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def run(backend: str, **inputs):
    with fastplm.use_backend(backend):
        return ops.geglu(**inputs)


def check(backend: str, inputs: dict) -> None:
    assert_within_budget(functools.partial(run, backend), geglu_ref, inputs, wrt=("input",))


@each_activation
def test_the_reference_is_pytorchs(activation):
    input = torch.randn(30, 64)
    first, factor = input.chunk(2, -1)
    form = "tanh" if activation == "gelu_tanh" else "none"
    active = F.silu(first) if activation == "silu" else F.gelu(first, approximate=form)
    assert torch.equal(geglu_ref(input, activation), active * factor)


@pairwise(
    backend=BACKENDS,
    dtype=DTYPES,
    activation=ACTIVATIONS,
    rows=(0, 1, 63, 257),
    width=(1, 40, 512, 1025),
)
def test_shapes_and_dtypes(device, backend, dtype, activation, rows, width):
    """The rows are more than a tile; the widths, too."""
    input = torch.randn(rows, 2 * width, device=device).to(dtype)
    check(backend, dict(input=input, activation=activation))


@each_backend
@each_activation
def test_every_magnitude_alone(device, backend, activation):
    """Numbers of one factor of two at a time: no large one hides the error of a small one."""
    for exponent in range(-7, 3):
        for sign in (1.0, -1.0):
            numbers = sign * 2.0**exponent * (1 + torch.rand(40, 16, device=device))
            factor = torch.randn(40, 16, device=device)
            check(backend, dict(input=torch.cat((numbers, factor), 1), activation=activation))


@each_backend
@pytest.mark.parametrize("shape", [(64,), (2, 3, 64), (0, 64), (2, 0, 64)])
def test_rows_of_any_dimensions(device, backend, shape):
    input = torch.randn(shape, device=device)
    out = run(backend, input=input)
    assert out.shape == (*shape[:-1], 32)
    torch.testing.assert_close(out, geglu_ref(input))


@each_backend
def test_rows_apart_and_repeats(device, backend):
    """Rows of a wider tensor are read where they lie, and the bits repeat."""
    wide = torch.randn(37, 3, 100, device=device)
    found = []
    for _ in range(2):
        input = wide[:, 1].detach().requires_grad_()
        with poisoned_memory():
            out = run(backend, input=input)
            found.append((out.detach(), torch.autograd.grad(out.square().sum(), input)[0]))
    dense = run(backend, input=wide[:, 1].contiguous())
    assert torch.equal(found[0][0], dense)
    assert all(map(torch.equal, *found))
