"""ops.linear against its reference, which is PyTorch's own."""

from __future__ import annotations

import sys

import pytest
import torch
import torch.nn.utils.prune
import transformers.pytorch_utils
from torch import nn
from torch.func import functional_call

import fastplm
from fastplm import _extension, ops
from fastplm._backends import record_decisions
from fastplm.errors import BackendError
from fastplm.models._base import Conv1D
from fastplm.nn import Linear
from fastplm.ops.linear import OP
from fastplm.reference.linear import linear_ref
from fastplm.testing import assert_repeatable, assert_within_budget, poisoned_memory

MODULE = sys.modules["fastplm.ops.linear"]  # the attribute of this name is the function
LACKING = _extension.lacks("linear", "CPU")
pytestmark = pytest.mark.skipif(LACKING is not None, reason=str(LACKING))
#: (N, K, M): whole tiles of 12 x 32, partial ones, less than a tile, slices of 384, several blocks.
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
#: Whole tiles of 4 or 8 rows, 4 or 48 columns and 16 of K; partial tiles; K of several times 384
#: and 768, which are summed apart; several threads' parts; and more rows than one pass takes.
FEW = ((1, 1, 1), (4, 16, 48), (8, 32, 96), (3, 15, 47), (9, 770, 49), (48, 1601, 3), (2, 40, 901))
#: One row and a few, with several slices of K that are no whole steps.
SLICES = ((1, 1603, 40), (4, 770, 95))
HALF = ((64, 17, 5), (131, 385, 50))
#: One tile of 24 rows and 64 columns; partial ones; K that is not whole fours; two threads' rows.
IN_PLACE = ((24, 384, 64), (23, 6, 72), (5, 768, 8), (241, 386, 9), (383, 4, 200))
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
WRT = ("input", "weight", "bias")


def make(rows=63, depth=40, columns=33, dtype=torch.float32) -> dict[str, torch.Tensor]:
    return dict(
        input=torch.randn(rows, depth).to(dtype),
        weight=torch.randn(columns, depth).to(dtype),
        bias=torch.randn(columns).to(dtype),
    )


def by_columns(matrix: torch.Tensor) -> torch.Tensor:
    return matrix.t().contiguous().t()


def run(**inputs: torch.Tensor) -> torch.Tensor:
    with fastplm.use_backend("cpp"):
        return ops.linear(**inputs)


def check(inputs: dict[str, torch.Tensor]) -> None:
    assert_within_budget(run, linear_ref, inputs, wrt=[name for name in WRT if name in inputs])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(shape):
    check(make(*shape))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("transposed", [False, True], ids=["linear", "conv1d"])
@pytest.mark.parametrize("shape", FEW + SLICES + HALF + IN_PLACE, ids=str)
def test_few_rows_and_half_precision(shape, transposed, dtype):
    inputs = make(*shape, dtype=dtype)
    if transposed:
        inputs["weight"] = by_columns(inputs["weight"])
    check(inputs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_has_the_same_product_among_any_number_of_rows(dtype):
    inputs = make(383, 390, 70, dtype)
    whole = run(**inputs)
    for rows in (5, 24, 100, 241):
        assert torch.equal(run(**inputs | {"input": inputs["input"][:rows]}), whole[:rows])


@pytest.mark.parametrize("offset", [0.0, 3.0])
@pytest.mark.parametrize("transposed", [False, True], ids=["linear", "conv1d"])
@pytest.mark.parametrize("rows", [3, 4, 9])
def test_long_sums_lose_no_more_than_in_pytorch(rows, transposed, offset):
    inputs = make(rows, 12_000, 40)
    inputs["input"] += offset
    if transposed:
        inputs["weight"] = by_columns(inputs["weight"])
    check(inputs)


@pytest.mark.parametrize("rows", [1, 9])
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("transposed", [False, True], ids=["linear", "conv1d"])
def test_every_number_of_16_bits(transposed, dtype, rows):
    """A product with one does not change subnormal numbers, infinities and NaN."""
    numbers = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)[:, None]
    weight = torch.cat([numbers, torch.zeros_like(numbers)], 1)
    inputs = torch.tensor([[1.0, 0.0]], dtype=dtype).expand(rows, -1)
    out = run(input=inputs, weight=by_columns(weight) if transposed else weight)
    torch.testing.assert_close(out, numbers.t().expand(rows, -1), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("shape", [(2, 5, 40), (40,), (3, 0, 40), (1,) * 7 + (2, 40)], ids=str)
def test_any_number_of_dimensions(shape):
    inputs = make() | dict(input=torch.randn(shape))
    check(inputs)
    assert run(**inputs).shape == (*shape[:-1], 33)


def test_the_operator_refuses_an_empty_weight():
    with pytest.raises(RuntimeError, match="weight must not be empty"):
        torch.ops.fastplm_C.linear(torch.randn(2, 0), torch.randn(3, 0), None)


def test_without_a_bias():
    inputs = make()
    del inputs["bias"]
    check(inputs)


@pytest.mark.parametrize("which", ["input", "weight", "both"])
def test_matrices_that_lie_by_columns(which):
    inputs = make()
    for name in ("input", "weight"):
        if which in (name, "both"):
            inputs[name] = by_columns(inputs[name])
    check(inputs)


def test_neither_rows_nor_columns_lie_together():
    inputs = make()
    inputs["input"] = torch.randn(63, 80)[:, ::2]
    inputs["weight"] = torch.randn(66, 80)[::2, ::2]
    check(inputs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [5, 63])
@pytest.mark.parametrize("transposed", [False, True], ids=["linear", "conv1d"])
def test_what_is_not_finite_stays_in_its_row_and_column(transposed, rows, dtype):
    inputs = make(rows, dtype=dtype)
    inputs["input"][3, 5] = float("nan")
    inputs["weight"][7, 2] = float("inf")
    if transposed:
        inputs["weight"] = by_columns(inputs["weight"])
    with poisoned_memory():
        got, expected = run(**inputs), linear_ref(**inputs)
    assert torch.equal(got.isnan(), expected.isnan())
    assert torch.equal(got.isinf(), expected.isinf())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [5, 100])
def test_repeats_with_any_number_of_threads(rows, dtype):
    inputs = make(rows, 500, 300, dtype)
    assert_repeatable(run, inputs, wrt=WRT, threads=(1, 2, 3))


@pytest.mark.parametrize("rows, depth, columns", [(20, 1280, 33), (50, 1540, 63), (400, 3072, 100)])
def test_long_slices_are_those_of_any_number_of_threads(rows, depth, columns):
    """A block's columns depend on the threads; its slices of the sums must not."""
    inputs = make(rows, depth, columns)
    assert_repeatable(run, inputs, threads=(1, 2, 3, 4))
    check(inputs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 4])
def test_the_ends_of_slices_are_those_of_any_number_of_threads(rows, dtype):
    """Each thread adds up the slices of some columns, the last of which are no whole unit."""
    inputs = make(rows, 1540, 6001, dtype)
    inputs["weight"] = by_columns(inputs["weight"])
    assert_repeatable(run, inputs, threads=(1, 2, 3, 4))
    check(inputs)


# --- when it runs ---------------------------------------------------------------------------------


def backend_of(*arguments: torch.Tensor) -> str:
    with record_decisions() as decisions:
        ops.linear(*arguments)
    return decisions[-1].backend


@pytest.fixture
def few_rows(measured) -> None:
    """A table in which csrc/ is faster for products of 2 to 48 rows with a large weight."""
    measured.ours = lambda op, form, dtype, sizes: 2 <= sizes[0] <= 48 and sizes[1] >= 1 << 17


def test_it_runs_where_it_was_measured_to_be_faster(few_rows):
    weight = torch.randn(512, 512)

    def ours(weight):
        return [n for n in (1, 2, 48, 49) if goes(n, weight)]

    def goes(count, weight):
        rows = torch.randn(count, weight.shape[1]).to(weight.dtype)
        faster = OP.layer(rows, weight, None) is not None
        assert faster == (backend_of(rows, weight) == "cpp")
        return faster

    assert ours(weight) == ours(by_columns(weight)) == ours(weight.half()) == [2, 48]
    assert ours(torch.randn(8, 512)) == []
    eight = torch.randn(8, 512)
    assert backend_of(eight.double(), weight.double()) == "stock"
    assert 'by the rule "a test" (measured: 2.00)' in fastplm.explain(
        ops.linear, torch.randn(49, 512), weight
    )
    with torch.autocast("cpu", torch.bfloat16):
        assert backend_of(eight, weight) == "stock"
        assert ops.linear(eight, weight).dtype is torch.bfloat16


@pytest.mark.parametrize("threads", [1, 2])
def test_a_weight_is_told_apart_by_how_it_lies(measured, monkeypatch, threads):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    alone, seen = ", 1 thread" if threads == 1 else "", []
    measured.ours = lambda op, form, dtype, sizes: seen.append((form, dtype, sizes))
    weight = torch.randn(16, 8)
    OP.layer(torch.randn(3, 8), weight, None)
    OP.layer(torch.randn(2, 3, 8).half(), by_columns(weight.half()), None)
    assert seen == [
        ("linear" + alone, torch.float32, (3, 128, 128)),
        ("conv1d" + alone, torch.float16, (6, 128, 128)),
    ]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_of_few_rows(few_rows, dtype):
    """The backward chooses the faster of csrc/ and PyTorch for each product."""
    inputs = make(8, 512, 512, dtype)
    assert backend_of(*inputs.values()) == "cpp"
    assert_within_budget(ops.linear, linear_ref, inputs, wrt=WRT)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(8, 512), (2, 4, 512), (1, 3, 512)], ids=str)
def test_a_layer_without_gradients_takes_one_call(few_rows, shape, dtype, monkeypatch):
    layer = Linear(512, 384).to(dtype)
    wide = torch.randn(*shape[:-1], 1024).to(dtype)
    calls = []
    monkeypatch.setattr(OP, "public", lambda *arguments: calls.append(arguments))
    for rows in (wide[..., :512], wide[..., :512].contiguous()):

        def run_layer(input, weight, bias):
            return functional_call(layer, {"weight": weight, "bias": bias}, (input,))

        def detached(**inputs):
            with torch.no_grad():
                return run_layer(**inputs)

        inputs = dict(input=rows, weight=layer.weight.detach(), bias=layer.bias.detach())
        assert_within_budget(detached, linear_ref, inputs)
    assert calls == []
    layer(rows)
    assert len(calls) == 1  # with gradients


@pytest.mark.parametrize("bad", ["bias", "dtype", "shape"])
def test_a_layer_refuses_what_pytorch_refuses(few_rows, bad):
    layer, rows = Linear(512, 512), torch.randn(8, 512)
    if bad == "bias":
        layer.bias = nn.Parameter(layer.bias.bfloat16())
    elif bad == "dtype":
        rows = rows.bfloat16()
    else:
        rows = rows[:, :500]
    with torch.no_grad(), pytest.raises((RuntimeError, ValueError)):
        layer(rows)


def test_a_batch_of_one_token_each_goes_through_it(few_rows):
    """GPT-2 generates with Conv1D, whose weight lies by rows."""
    layer, tokens = Conv1D(512, 512), torch.randn(4, 1, 512)
    with record_decisions() as decisions:
        out = layer(tokens)
    assert [decision.backend for decision in decisions] == ["cpp"]
    torch.testing.assert_close(out, transformers.pytorch_utils.Conv1D.forward(layer, tokens))
    with record_decisions() as decisions:
        layer(tokens[:1])
    assert decisions == []


def test_a_layer_whose_weights_are_no_parameters_any_more():
    """The weight is parametrized, pruned, or given by ``functional_call``."""
    rows = torch.randn(3, 8)
    for change in (
        lambda layer: nn.utils.parametrizations.weight_norm(layer),
        lambda layer: nn.utils.parametrizations.orthogonal(layer, "weight"),
        lambda layer: nn.utils.prune.l1_unstructured(layer, "bias", 2),
        lambda layer: nn.utils.parametrize.register_parametrization(layer, "bias", nn.Tanh()),
        lambda layer: layer.register_parameter("bias", None),
    ):
        layer = Linear(8, 8)
        change(layer)
        torch.testing.assert_close(layer(rows), nn.Linear.forward(layer, rows))
    given = {"weight": torch.randn(8, 8), "bias": torch.randn(8)}
    out = functional_call(Linear(8, 8), given, (rows,))
    torch.testing.assert_close(out, nn.functional.linear(rows, **given))


# --- compiled -------------------------------------------------------------------------------------


def graphs_of(function):
    """(the function compiled for any shape, a list of the targets in each of its graphs)."""
    seen = []

    def keep(graph, inputs):
        seen.append({node.target for node in graph.graph.nodes})
        return graph

    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, dynamic=True, backend=keep), seen


OPERATOR = torch.ops.fastplm.linear_fwd.default


def test_a_compiled_layer_chooses_when_it_runs(measured, monkeypatch):
    """The rows decide for each product in one graph: forward, gradients of input and weight."""
    measured.ours = lambda op, form, dtype, sizes: sizes[0] >= 48
    layer = Linear(96, 64)
    compiled, seen = graphs_of(layer)
    products, original = [], MODULE._is_faster

    def is_faster(a, b):
        products.extend([a.shape[0]] * original(a, b))
        return original(a, b)

    monkeypatch.setattr(MODULE, "_is_faster", is_faster)
    for rows, ours in ((47, [64]), (48, [48, 48, 64]), (90, [90, 90, 64])):
        rows = torch.randn(1, rows, 96, requires_grad=True)
        expected = nn.Linear.forward(layer, rows)
        grads = torch.autograd.grad(expected.sin().sum(), (rows, layer.weight))
        products.clear()
        out = compiled(rows)
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(
            torch.autograd.grad(out.sin().sum(), (rows, layer.weight)), grads
        )
        assert products == ours
        with fastplm.use_backend("eager", "linear"):
            torch.testing.assert_close(compiled(rows), expected)
    # There is one graph for each setting.
    assert [OPERATOR in targets for targets in seen] == [True, False]


@pytest.mark.parametrize("case", ["few rows", "transform", "autocast", "fp64", "subclass"])
def test_a_compiled_layer_is_pytorchs_where_it_does_not_pay(measured, case):
    measured.ours = lambda op, form, dtype, sizes: sizes[0] < 48 if case == "few rows" else True
    layer, rows = Linear(96, 64), torch.randn(3, 60, 96)
    compiled, seen = graphs_of(torch.vmap(layer) if case == "transform" else layer)
    if case == "fp64":
        layer.double()
        rows = rows.double()
    elif case == "subclass":
        rows = rows.as_subclass(type("Named", (torch.Tensor,), {}))
    with torch.autocast("cpu", torch.bfloat16, enabled=case == "autocast"):
        out, expected = compiled(rows), nn.Linear.forward(layer, rows)
    torch.testing.assert_close(out, expected)
    assert [OPERATOR in targets for targets in seen] == [False]


def test_an_exported_layer_has_pytorchs_operators(measured):
    measured.ours = lambda op, form, dtype, sizes: True
    program = torch.export.export(Linear(96, 64), (torch.randn(60, 96),))
    assert OPERATOR not in {node.target for node in program.graph.nodes}


# --- what is refused ------------------------------------------------------------------------------


def test_a_bias_of_another_dtype_is_refused(few_rows):
    large = torch.randn(256, 256)
    with pytest.raises(TypeError, match="`bias` got torch.bfloat16; expected torch.float32"):
        ops.linear(large, large, torch.randn(256).bfloat16())
    with torch.autocast("cpu", torch.bfloat16):  # converts input, weight and bias
        ops.linear(large, large, torch.randn(256).bfloat16())


def test_a_forced_backend_that_cannot_run():
    with fastplm.use_backend("cpp"), pytest.raises(BackendError, match="one dtype"):
        ops.linear(torch.randn(2, 3).double(), torch.randn(4, 3).double())
