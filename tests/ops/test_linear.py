"""ops.linear against its reference, which is PyTorch's own."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

import fastplm
from fastplm import _extension, ops
from fastplm._backends import record_decisions
from fastplm._checks import BackendError
from fastplm.nn import Linear
from fastplm.reference.linear import linear_ref
from fastplm.testing import (
    LAYOUTS,
    BudgetExceeded,
    assert_repeatable,
    assert_within_budget,
    poisoned_memory,
)

MODULE = sys.modules["fastplm.ops.linear"]  # the name is the function's
LACKING = _extension.lacks("product", "CPU")
pytestmark = pytest.mark.skipif(LACKING is not None, reason=str(LACKING))
#: (N, K, M): whole tiles of 12 x 32, edges, less than a tile, slices of 384, several blocks.
SHAPES = (
    (24, 32, 64),
    (1, 1, 1),
    (13, 17, 33),
    (63, 384, 65),
    (257, 40, 130),
    (5, 769, 31),
    (540, 390, 20),
    (0, 8, 3),
    (7, 8, 0),
)
WRT = ("input", "weight", "bias")


def make(rows=63, depth=40, columns=33) -> dict[str, torch.Tensor]:
    return dict(
        input=torch.randn(rows, depth),
        weight=torch.randn(columns, depth),
        bias=torch.randn(columns),
    )


def run(**inputs: torch.Tensor) -> torch.Tensor:
    with fastplm.use_backend("cpp"):
        return ops.linear(**inputs)


def check(inputs: dict[str, torch.Tensor]) -> None:
    assert_within_budget(run, linear_ref, inputs, wrt=[name for name in WRT if name in inputs])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(shape):
    check(make(*shape))


@pytest.mark.parametrize("shape", [(2, 5, 40), (40,), (3, 0, 40)], ids=str)
def test_any_number_of_dimensions(shape):
    inputs = make() | dict(input=torch.randn(shape))
    check(inputs)
    assert run(**inputs).shape == (*shape[:-1], 33)


def test_without_a_bias():
    inputs = make()
    del inputs["bias"]
    check(inputs)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_layouts(layout):
    check({name: layout(tensor) for name, tensor in make().items()})


@pytest.mark.parametrize("which", ["input", "weight", "both"])
def test_matrices_that_lie_by_columns(which):
    inputs = make()
    for name in ("input", "weight"):
        if which in (name, "both"):
            inputs[name] = inputs[name].t().contiguous().t()
    check(inputs)


def test_neither_rows_nor_columns_lie_together():
    inputs = make()
    inputs["input"] = torch.randn(63, 80)[:, ::2]
    inputs["weight"] = torch.randn(66, 80)[::2, ::2]
    check(inputs)


def test_an_upstream_gradient_without_strides():
    inputs = make()
    weight = inputs["weight"].requires_grad_()
    (got,) = torch.autograd.grad(run(**inputs).sum(), weight)
    (expected,) = torch.autograd.grad(linear_ref(**inputs).sum(), weight)
    torch.testing.assert_close(got, expected)


def test_what_is_not_finite_stays_in_its_row_and_column():
    inputs = make()
    inputs["input"][3, 5] = float("nan")
    inputs["weight"][7, 2] = float("inf")
    with poisoned_memory():
        got, expected = run(**inputs), linear_ref(**inputs)
    assert torch.equal(got.isnan(), expected.isnan())
    assert torch.equal(got.isinf(), expected.isinf())


def test_large_offsets_cost_no_more_than_they_do_in_pytorch():
    inputs = make(63, 500, 33)
    inputs["input"] += 1000.0
    check(inputs)


def test_repeats_with_any_number_of_threads():
    inputs = make(100, 500, 300)
    assert_repeatable(run, inputs, wrt=WRT, threads=(1, 2, 3))


def test_gradients_of_gradients():
    inputs = make(3, 4, 2)

    def penalty(function):
        leaves = [tensor.clone().requires_grad_() for tensor in inputs.values()]
        out = function(*leaves)
        grads = torch.autograd.grad(out.square().sum(), leaves, create_graph=True)
        return torch.autograd.grad(sum(grad.square().sum() for grad in grads), leaves)

    got = penalty(lambda *leaves: run(**dict(zip(inputs, leaves, strict=True))))
    for ours, theirs in zip(got, penalty(linear_ref), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("frozen", WRT)
def test_what_needs_no_gradient_gets_none(frozen):
    inputs = {name: tensor.requires_grad_(name != frozen) for name, tensor in make().items()}
    run(**inputs).square().sum().backward()
    for name, tensor in inputs.items():
        assert (tensor.grad is None) == (name == frozen)


def test_operator():
    inputs = make()
    for tensor in inputs.values():
        tensor.requires_grad_()
    torch.library.opcheck(torch.ops.fastplm.linear_fwd.default, (*inputs.values(), "cpp"))


def test_compiles_without_graph_breaks():
    torch._dynamo.reset()
    inputs = make()
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(**inputs), linear_ref(**inputs))


# --- when it runs ---------------------------------------------------------------------------------


def backend_of(*arguments: torch.Tensor) -> str:
    with record_decisions() as decisions:
        ops.linear(*arguments)
    return decisions[-1].backend


@pytest.fixture(params=[False, True], ids=["fast blas", "slow blas"])
def slow(request, monkeypatch) -> bool:
    monkeypatch.setattr(MODULE, "_BLAS_IS_SLOW", request.param)
    return request.param


def test_only_where_pytorch_is_slow(slow):
    large, small = torch.randn(256, 256), torch.randn(8, 256)
    assert backend_of(large, large) == ("cpp" if slow else "eager")
    assert backend_of(small, large) == "eager"
    assert backend_of(large.double(), large.double()) == "eager"
    assert backend_of(large.bfloat16(), large.bfloat16()) == "eager"
    with torch.autocast("cpu", torch.bfloat16):
        assert backend_of(large, large) == "eager"
        assert ops.linear(large, large).dtype is torch.bfloat16


@pytest.mark.parametrize("backend", ["auto", "eager", "torch", "cpp", "triton"])
def test_a_layer_runs_under_any_setting(slow, backend):
    layer, rows = Linear(256, 256), torch.randn(256, 256)
    with fastplm.use_backend(backend):
        out = layer(rows)
    torch.testing.assert_close(out, nn.Linear.forward(layer, rows))


def test_a_layer_under_transforms(slow):
    layer, rows = Linear(256, 256), torch.randn(256, 256)
    torch.testing.assert_close(torch.vmap(layer)(rows), layer(rows))
    grad = torch.func.grad(lambda x: layer(x).sum())(rows)
    torch.testing.assert_close(grad, layer.weight.sum(0).expand(256, -1))


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(input=torch.randn(63, 41)), r"`input` .*shape \(63, 41\)"),
        (dict(weight=torch.randn(33)), "`weight`"),
        (dict(bias=torch.randn(32)), r"`bias` .*shape \(32,\)"),
        (dict(input=torch.ones(63, 40, dtype=torch.int64)), "`input`"),
    ],
)
def test_errors(change, message):
    with pytest.raises((ValueError, TypeError), match=message):
        ops.linear(**make() | change)


def test_a_bias_of_another_dtype_is_refused_as_by_torch(slow):
    large = torch.randn(256, 256)
    with pytest.raises(RuntimeError, match="dtype"):
        ops.linear(large, large, torch.randn(256).bfloat16())


def test_a_forced_backend_that_cannot_run():
    with fastplm.use_backend("cpp"), pytest.raises(BackendError, match="fp32"):
        ops.linear(torch.randn(2, 3).double(), torch.randn(4, 3).double())


# --- the net catches ------------------------------------------------------------------------------


@pytest.mark.parametrize("bug", ["a slice twice", "no bias", "a column of another"])
def test_planted_bugs(bug):
    inputs = make(63, 500, 33)

    def wrong(input, weight, bias):
        if bug == "no bias":
            return run(input=input, weight=weight, bias=0 * bias)
        out = run(input=input, weight=weight, bias=bias)
        if bug == "a slice twice":
            return out + input[:, 256:] @ weight[:, 256:].t()
        return torch.cat([out[:, :32], out[:, :1]], 1)

    with pytest.raises(BudgetExceeded):
        assert_within_budget(wrong, linear_ref, inputs, wrt=WRT)
