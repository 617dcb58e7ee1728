"""ops.dropout_add_layer_norm and dropout_add_rms_norm against the reference, and that against
PyTorch's functions one after another."""

from __future__ import annotations

import functools
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import fastplm
from fastplm import ops
from fastplm._registry import OPS
from fastplm.errors import BackendError
from fastplm.reference import philox
from fastplm.reference.dropout_add_layer_norm import dropout_add_layer_norm_ref
from fastplm.testing import assert_within_budget, poisoned_memory

from ..pairwise import pairwise
from ..samples import Operators, Sample, kernels, run, to

MODULE = sys.modules["fastplm.ops.dropout_add_layer_norm"]
LAYER_NORM = Sample("dropout_add_layer_norm", ops.dropout_add_layer_norm, None, ())
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
BACKENDS = pytest.mark.parametrize("backend", kernels(LAYER_NORM))
ALL = ("input", "residual", "weight", "bias", "linear_bias")
TWO = ("input", "residual")


def made(
    rows: int | tuple[int, ...],
    width: int,
    dtype=torch.float32,
    residual_dtype=None,
    weight_dtype=None,
    *,
    dropout_p: float = 0.3,
    numbered: str = "by element",
    is_rms: bool = False,
) -> dict[str, Any]:
    rows = (rows,) if isinstance(rows, int) else rows
    inputs = dict(
        input=torch.randn(*rows, width).to(dtype),
        residual=torch.randn(*rows, width).to(residual_dtype or dtype),
        weight=(1 + torch.randn(width) / 2).to(weight_dtype or dtype),
        eps=1e-6,
    )
    if not is_rms:
        biases = torch.randn(2, width).to(weight_dtype or dtype)
        inputs |= dict(bias=biases[0], linear_bias=biases[1])
    if dropout_p:
        inputs |= dict(dropout_p=dropout_p, seed=torch.tensor(5))
        row = torch.arange(inputs["input"].numel() // width)
        if numbered != "by element":
            inputs["sample_index"] = (row // 3 << 33) + row
        if numbered == "by position":
            inputs["position"] = row % 3
    return inputs


def candidate(backend: str, inputs: dict[str, Any], **settings: Any) -> Any:
    """The op on inputs with or without a bias."""
    is_layer_norm = "bias" in inputs
    function = ops.dropout_add_layer_norm if is_layer_norm else ops.dropout_add_rms_norm
    return run(LAYER_NORM._replace(function=function), backend, inputs | settings)


def reference(**inputs: Any) -> Any:
    return dropout_add_layer_norm_ref(**inputs, is_rms="bias" not in inputs)


def wrt(inputs: dict[str, Any]) -> list[str]:
    return [name for name in ALL if name in inputs]


def check(device, backend: str, inputs: dict[str, Any], which: str = "out") -> None:
    """The error of one result and of its gradients, or of both results together."""

    def chosen(results):
        if which == "both":
            return torch.cat([results[0].flatten(), results[1].flatten().to(results[0].dtype)])
        return results[("out", "sum").index(which)]

    assert_within_budget(
        lambda **inputs: chosen(candidate(backend, inputs, return_sum=True)),
        lambda **inputs: chosen(reference(**inputs)),
        to(device, inputs),
        wrt=[n for n in wrt(inputs) if which != "sum" or n not in ("weight", "bias")],
    )


# --- the reference --------------------------------------------------------------------------------


@pytest.mark.parametrize("numbered", ["by element", "by sample", "by position"])
@pytest.mark.parametrize("is_rms", [False, True])
def test_the_reference_is_pytorchs_functions_one_after_another(is_rms, numbered):
    inputs = made(33, 40, torch.float64, numbered=numbered, is_rms=is_rms)
    numbers = {name: inputs.get(name) for name in ("seed", "sample_index", "position")}
    expected = inputs["input"] + inputs.get("linear_bias", 0.0)
    expected = ops.dropout(expected, inputs["dropout_p"], **numbers) + inputs["residual"]
    out, sum = reference(**inputs)
    torch.testing.assert_close(sum, expected)
    weight, bias = inputs["weight"], inputs.get("bias")
    if is_rms:
        expected = F.rms_norm(expected, (40,), weight, 1e-6)
    else:
        expected = F.layer_norm(expected, (40,), weight, bias, 1e-6)
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("backend", ["eager", *kernels(LAYER_NORM)])
@pytest.mark.parametrize("is_rms", [False, True])
def test_dtypes_and_the_sum_that_is_normalised(device, backend, is_rms):
    """The statistics are those of the sum after it was rounded to the dtype of the residual."""
    dtypes = (torch.float16, torch.bfloat16, torch.float32)
    inputs = to(device, made((2, 3), 40, *dtypes, is_rms=is_rms))
    out, sum = candidate(backend, inputs, return_sum=True)
    assert (out.dtype, sum.dtype) == dtypes[:2] and out.shape == sum.shape == (2, 3, 40)
    assert torch.equal(candidate(backend, inputs), out)
    if is_rms:
        expected = F.rms_norm(sum.float(), (40,), inputs["weight"], 1e-6)
    else:
        expected = F.layer_norm(sum.float(), (40,), inputs["weight"], inputs["bias"], 1e-6)
    torch.testing.assert_close(out, expected.half(), rtol=1e-3, atol=1e-3)


# --- the kernels ----------------------------------------------------------------------------------

SHAPES = ((1, 1), (63, 15), (19, 40), (65, 64), (33, 128), (5, 255), (9, 312), (0, 40))
SHAPES += ((3, 384), (5, 768), (3, 1000), (2, 1024))


@BACKENDS
@pairwise(
    shape={f"{rows}x{width}": (rows, width) for rows, width in SHAPES},
    dtype=DTYPES,
    residual_dtype=DTYPES,
    weight_dtype=DTYPES,
    dropout_p=(0.0, 0.1),
    numbered=("by element", "by sample", "by position"),
    is_rms={"layer norm": False, "rms": True},
)
def test_shapes_dtypes_and_options(
    device, backend, shape, dtype, residual_dtype, weight_dtype, dropout_p, numbered, is_rms
):
    options = dict(dropout_p=dropout_p, numbered=numbered, is_rms=is_rms)
    check(device, backend, made(*shape, dtype, residual_dtype, weight_dtype, **options))


@BACKENDS
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((3, 4096), torch.bfloat16),
        ((300, 16), torch.float32),
        pytest.param((32768, 8), torch.bfloat16, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_wide_rows_and_many_rows(device, backend, shape, dtype):
    """The sums are over several tiles of several groups of rows."""
    check(device, backend, made(*shape, dtype))


@BACKENDS
@pytest.mark.parametrize("which", ["sum", "both"])
@pytest.mark.parametrize("residual_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("is_rms", [False, True])
def test_the_gradient_of_the_sum_is_added(device, backend, residual_dtype, is_rms, which):
    check(device, backend, made((3, 7), 72, torch.float32, residual_dtype, is_rms=is_rms), which)


@BACKENDS
@pytest.mark.parametrize("linear_bias", [False, True])
@pytest.mark.parametrize("dropout_p", [0.0, 0.5, 1.0])
def test_without_linear_bias_and_with_all_dropped(device, backend, linear_bias, dropout_p):
    inputs = made(20, 48, dropout_p=dropout_p)
    if not linear_bias:
        del inputs["linear_bias"]
    check(device, backend, inputs)


@BACKENDS
@pytest.mark.parametrize("is_rms", [False, True])
@pytest.mark.parametrize("scale", [1e-12, 1e-3, 1e4, 1e15])
def test_magnitudes(device, backend, scale, is_rms):
    inputs = made(20, 100, is_rms=is_rms)
    for name in (*TWO, "linear_bias"):
        inputs[name] = scale * inputs.get(name, torch.zeros(()))
    if is_rms:
        del inputs["linear_bias"]
    check(device, backend, inputs)


@BACKENDS
def test_a_large_offset(device, backend):
    """Rows with a large common offset: their variance is a small difference of large numbers."""
    inputs = made(50, 64)
    inputs["residual"] = 100 + inputs["residual"]
    check(device, backend, inputs)


@BACKENDS
def test_where_no_row_is_nothing_is_summed(device, backend):
    """With eps = 0 a row of zeros has no scale: what is behind the last row must not be summed."""
    check(device, backend, made(17, 40, dropout_p=0.0) | dict(eps=0.0))


@BACKENDS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_not_finite_stays_in_its_row(device, backend, dtype):
    inputs = to(device, made(6, 40, dtype, dropout_p=0.0))
    for row, value in ((1, float("inf")), (2, float("-inf")), (3, float("nan"))):
        inputs["input"][row, row] = value
    inputs["residual"][4] = inputs["input"][4] = inputs["linear_bias"][:] = 0.0
    leaves = {name: inputs[name].clone().requires_grad_() for name in TWO}
    out, expected = candidate(backend, inputs | leaves), reference(**inputs | leaves)[0]
    torch.testing.assert_close(out, expected, equal_nan=True, rtol=1e-2, atol=1e-2)
    for function in (out, expected):
        grads = torch.autograd.grad(function.sum(), list(leaves.values()))
        for grad in grads:
            assert grad.isnan().any(1).tolist() == [False, True, True, True, False, False]


# --- dropout --------------------------------------------------------------------------------------


@BACKENDS
@pairwise(
    width=(16, 40, 100, 128, 255, 256, 312, 384),
    numbered=("by element", "by sample", "by position"),
    seed=(0, -1, 2**63 - 1, -(2**63), 2**40 + 1),
)
def test_exactly_what_dropout_drops(device, backend, width, numbered, seed):
    inputs = made(21, width, numbered=numbered) | dict(seed=torch.tensor(seed))
    inputs |= dict(input=torch.ones(21, width), residual=torch.zeros(21, width))
    del inputs["linear_bias"]
    inputs = to(device, inputs)
    numbers = {name: inputs.get(name) for name in ("seed", "sample_index", "position")}
    expected = ops.dropout(inputs["input"], inputs["dropout_p"], **numbers)
    _, sum = candidate(backend, inputs, return_sum=True)
    assert torch.equal(sum, expected)
    # The gradient of the sum passes just where the sum is not 0.
    leaf = inputs["input"].requires_grad_()
    (grad,) = torch.autograd.grad(candidate(backend, inputs, return_sum=True)[1].sum(), leaf)
    assert torch.equal(grad, expected)


@BACKENDS
def test_a_choice_that_is_the_threshold_keeps_its_element(device, backend):
    word, *_ = philox.draw(5, philox.Stream.HIDDEN, sample_index=0, position=3, rounds=7)
    share = (int(word) & 0xFFFF) / 65536  # element 3 has the first choice of draw 3
    inputs = made(1, 40) | dict(input=torch.ones(1, 40), residual=torch.zeros(1, 40))
    for dropout_p, is_kept in ((share, True), (share + 2.0**-16, False)):
        call = to(device, inputs | dict(dropout_p=dropout_p, linear_bias=None))
        assert bool(candidate(backend, call, return_sum=True)[1][0, 3] != 0) == is_kept


@BACKENDS
def test_what_is_dropped_may_be_anything(device, backend):
    inputs = to(device, made(20, 40))
    dropped = ops.dropout(torch.ones_like(inputs["input"]), 0.3, seed=inputs["seed"]) == 0
    expected = candidate(backend, inputs)
    inputs["input"][dropped] = float("nan")
    assert torch.equal(candidate(backend, inputs), expected)


@BACKENDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_does_not_depend_on_those_beside_it(device, backend, dtype):
    """Bit for bit, forward and backward, at any split of a batch whose rows are numbered."""
    inputs = to(device, made(40, 96, dtype, weight_dtype=torch.float32, numbered="by position"))
    by_row = ("input", "residual", "sample_index", "position")

    def results(part: slice) -> list[torch.Tensor]:
        rows = {name: inputs[name][part] for name in by_row}
        leaves = {name: rows[name].clone().requires_grad_() for name in TWO}
        out = candidate(backend, inputs | rows | leaves)
        return [out, *torch.autograd.grad(out.square().sum(), list(leaves.values()))]

    whole = results(slice(None))
    for cuts in ((0, 1, 40), (0, 17, 23, 40)):
        parts = [results(slice(*ends)) for ends in zip(cuts, cuts[1:], strict=False)]
        for expected, *pieces in zip(whole, *parts, strict=True):
            assert torch.equal(torch.cat(pieces), expected)


# --- what the layers call -------------------------------------------------------------------------


def backward(inputs: dict[str, Any], backend: str, needs: dict[str, bool]) -> tuple[Any, ...]:
    """The arguments of the operator fastplm::dropout_add_layer_norm_bwd, and what it returns."""
    with Operators() as operators:
        leaves = {name: inputs[name].requires_grad_(needs[name]) for name in wrt(inputs)}
        out, sum = candidate(backend, inputs | leaves, return_sum=True)
        (out.sum() + sum.square().sum()).backward()
    operator, arguments = operators.calls[-1]
    assert operator.__name__.startswith("dropout_add_layer_norm_bwd")
    return arguments, operator(*arguments)


@BACKENDS
@pytest.mark.parametrize(
    "need", [("residual",), ("input",), ("linear_bias",), ("weight", "bias"), ALL]
)
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_a_gradient_that_is_not_needed_is_not_computed(device, backend, dropout_p, need):
    inputs = to(device, made(19, 40, dropout_p=dropout_p))
    _, expected = backward(inputs, backend, dict.fromkeys(ALL, True))
    with poisoned_memory():
        arguments, grads = backward(inputs, backend, {name: name in need for name in ALL})
    saved = MODULE.Saved(*arguments[1:-1])
    assert saved.grad_sum is not None and saved.sum.shape == (19, 40)
    for name, grad, whole in zip(ALL, grads, expected, strict=True):
        if name in need:
            assert torch.equal(grad, whole)
        else:
            assert grad.numel() == 0


@BACKENDS
def test_without_dropout_one_gradient_serves_input_and_residual(device, backend):
    inputs = to(device, made(19, 40, dropout_p=0.0))
    _, (of_input, of_residual, *_) = backward(inputs, backend, dict.fromkeys(ALL, True))
    assert torch.equal(of_input, of_residual)


def test_a_seed_is_drawn_only_where_it_is_needed():
    inputs = made(5, 16, dropout_p=0.0)
    state = torch.get_rng_state()
    expected = ops.dropout_add_layer_norm(**inputs)
    rows = torch.arange(5)
    given = dict(seed=7, sample_index=rows, position=rows)
    assert torch.equal(ops.dropout_add_layer_norm(**inputs, **given), expected)
    assert torch.equal(torch.get_rng_state(), state)
    first, second = (ops.dropout_add_layer_norm(**inputs, dropout_p=0.5) for _ in range(2))
    assert not torch.equal(first, second)


def test_what_the_kernels_leave_to_the_reference(device):
    wide = functools.partial(made, 2, dropout_p=0.0)
    for inputs, why in (
        (wide(4097), "rows of more than 4096 elements"),
        (wide(16, weight_dtype=torch.float64), "float64"),
        (wide(16, residual_dtype=torch.float64), "float64"),
    ):
        inputs = to(device, inputs)
        with pytest.raises(BackendError, match=why):
            candidate("triton", inputs)
        torch.testing.assert_close(candidate("auto", inputs), reference(**inputs)[0])


def test_what_it_is_told_wrongly_it_calls_by_the_name_of_the_function():
    inputs = made(5, 16, is_rms=True)
    with pytest.raises(fastplm.FastplmError, match="^dropout_add_rms_norm: `weight` got shape"):
        ops.dropout_add_rms_norm(**inputs | dict(weight=torch.ones(15)))
    assert OPS["dropout_add_layer_norm"].call is MODULE.Call
