"""ops.linear_int8 against its reference, bit for bit without a bias, and at extremes."""

from __future__ import annotations

import pytest
import torch

import fastplm
from fastplm import _extension, ops
from fastplm.errors import ArgumentValueError, UnsupportedError
from fastplm.reference.linear_int8 import linear_int8_ref, pack_int8, quantize_rows, unpack_int8
from fastplm.testing import check_error

LACKING = _extension.lacks("linear_int8", "CPU")
needs_csrc = pytest.mark.skipif(LACKING is not None, reason=str(LACKING))
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
#: Tiles of every height, panels and steps that are not full, more rows than are quantized at once.
SHAPES = [
    *((rows, 40, 13) for rows in range(1, 26)),
    *((7, columns, 8) for columns in (1, 15, 16, 17, 31, 33, 64, 65, 130)),
    *((5, 20, depth) for depth in (1, 3, 4, 5, 15, 16, 17, 31, 64, 769)),
    (300, 65, 31),
    (2053, 3, 9),
]


def cpp(*arguments) -> torch.Tensor:
    with fastplm.use_backend("cpp"):
        return ops.linear_int8(*arguments)


def made(rows: int, columns: int, depth: int, dtype=torch.float32):
    spread = torch.logspace(-3, 3, rows)[:, None]  # each row needs a scale of its own
    weight, scale = ops.quantize_int8(torch.randn(columns, depth) * torch.rand(columns, 1))
    return (
        (torch.randn(rows, depth) * spread).to(dtype),
        weight,
        scale,
        torch.randn(columns).to(dtype),
    )


# --- the reference --------------------------------------------------------------------------------


def test_the_reference_is_the_formula():
    """One product by hand: rows of 2 and 254 steps, and a column of 127."""
    weight, scale = ops.quantize_int8(torch.tensor([[127.0, -64.0, 0.0]]))
    input = torch.tensor([[1.0, 0.5, 0.25], [-254.0, 2.0, 0.0]])
    quanta, of_rows = quantize_rows(input)
    assert quanta.tolist() == [[127, 64, 32], [-127, 1, 0]]  # 63.5 and 31.75 are rounded
    assert torch.equal(of_rows, torch.tensor([1.0, 254.0]) / 127)
    out = linear_int8_ref(input.double(), weight, scale)
    expected = [(127 * 127 - 64 * 64) / 127, 2.0 * (-127 * 127 - 64)]
    assert torch.allclose(out[:, 0], torch.tensor(expected).double())


@pytest.mark.parametrize(("columns", "depth"), [(1, 1), (16, 4), (17, 5), (40, 13)])
def test_a_packed_weight_is_unpacked(columns, depth):
    quanta = torch.randint(-127, 128, (columns, depth), dtype=torch.int8)
    packed = pack_int8(quanta)
    assert packed.is_contiguous() and packed.shape[2:] == (16, 4)
    assert torch.equal(unpack_int8(packed, columns, depth), quanta)


def test_the_result_is_that_of_the_numbers_that_the_integers_stand_for():
    """The formula is a product of rounded rows and a rounded weight, in fp64."""
    input, weight, scale, bias = made(9, 40, 13)
    quanta, of_rows = quantize_rows(input)
    rows = quanta.double() * of_rows.double()[:, None]
    columns = ops.dequantize_int8(weight, scale.double(), 13)
    gold = torch.nn.functional.linear(rows, columns, bias.double())
    base = torch.nn.functional.linear(rows.float(), columns.float(), bias)
    check_error("out", linear_int8_ref(input, weight, scale, bias), gold, [base], 2.0)


# --- backend "cpp" --------------------------------------------------------------------------------


@needs_csrc
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_without_a_bias_it_is_the_reference_bit_for_bit(shape, dtype):
    input, weight, scale, _ = made(*shape, dtype)
    assert torch.equal(cpp(input, weight, scale), linear_int8_ref(input, weight, scale))


@needs_csrc
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_with_a_bias_it_is_within_the_budget(dtype):
    input, weight, scale, bias = made(30, 70, 50, dtype)
    base = linear_int8_ref(input, weight, scale, bias)
    quanta, of_rows = quantize_rows(input.float())
    sums = quanta.double() @ unpack_int8(weight, 70, 50).double().t()
    gold = sums * of_rows.double()[:, None] * scale.double() + bias.double()
    check_error("out", cpp(input, weight, scale, bias), gold, [base], 2.0)


@needs_csrc
@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_sums(sign):
    """All of the 8 bits in both factors: a pair of products does not fit into 16 bits."""
    depth = 66_000
    input, column = torch.ones(2, depth), torch.full((1, depth), float(sign))
    weight, scale = ops.quantize_int8(column)
    out = cpp(input, weight, scale)
    assert torch.equal(out, linear_int8_ref(input, weight, scale))
    assert torch.equal(
        out, torch.full((2, 1), sign * depth * 127.0 * 127.0) * (1 / torch.tensor(127.0)) ** 2
    )


@needs_csrc
def test_a_longer_sum_is_refused():
    depth = 140_000
    weight, scale = ops.quantize_int8(torch.ones(1, depth))
    with pytest.raises(ArgumentValueError, match="at most 133144"):
        ops.linear_int8(torch.ones(1, depth), weight, scale)


@needs_csrc
def test_the_row_beside_does_not_matter():
    input, weight, scale, bias = made(30, 40, 13)
    whole = cpp(input, weight, scale, bias)
    for row in (0, 7, 29):
        assert torch.equal(cpp(input[row : row + 1], weight, scale, bias)[0], whole[row])


@needs_csrc
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf], ids=str)
@pytest.mark.parametrize("place", [0, 12, 39])
def test_what_is_not_finite_makes_its_row_nan(value, place):
    input, weight, scale, bias = made(5, 20, 40)
    input[2, place] = value
    out = cpp(input, weight, scale, bias)
    assert torch.equal(out.isnan().all(1), torch.tensor([False, False, True, False, False]))
    assert torch.equal(out.isnan(), linear_int8_ref(input, weight, scale, bias).isnan())


@needs_csrc
def test_rows_of_the_smallest_and_largest_numbers():
    tiny, huge = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
    sizes = torch.tensor([0.0, tiny / 4, tiny, 2.0**-119, 2.0**-118, huge])[:, None]
    input = torch.randn(6, 40).clamp(-1, 1) * sizes
    weight, scale = ops.quantize_int8(torch.randn(20, 40) / 40)
    out = cpp(input, weight, scale)
    assert torch.equal(out, linear_int8_ref(input, weight, scale))
    assert not out[:3].any() and out[3:].any(1).all() and out.isfinite().all()


@needs_csrc
def test_halves_are_rounded_to_even():
    """A row whose largest number is 127 is its own integers; halves lie in between."""
    input = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 63.5, 64.5] * 4])
    weight, scale = ops.quantize_int8(torch.eye(36))
    expected = [127.0, 0.0, 2.0, 2.0, 0.0, -2.0, -2.0, 64.0, 64.0] * 4
    assert cpp(input, weight, scale)[0].tolist() == expected


@needs_csrc
def test_views_and_more_dimensions():
    input, weight, scale, bias = made(12, 40, 13)
    expected = cpp(input, weight, scale, bias)
    assert torch.equal(
        cpp(input.view(3, 2, 2, 13), weight, scale, bias), expected.view(3, 2, 2, 40)
    )
    assert torch.equal(cpp(input.t().contiguous().t(), weight, scale, bias), expected)
    assert torch.equal(cpp(input[0], weight, scale, bias), expected[0])
    assert cpp(input[:0], weight, scale, bias).shape == (0, 40)


@needs_csrc
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_change_nothing(threads):
    input, weight, scale, bias = made(300, 200, 64)
    before, expected = torch.get_num_threads(), cpp(input, weight, scale, bias)
    try:
        torch.set_num_threads(threads)
        assert torch.equal(cpp(input, weight, scale, bias), expected)
    finally:
        torch.set_num_threads(before)


def test_forward_mode_ad_is_refused():
    input, weight, scale, bias = made(2, 4, 5)
    with pytest.raises(UnsupportedError, match="requires a gradient"):
        torch.func.jvp(lambda x: ops.linear_int8(x, weight, scale, bias), (input,), (input,))


def test_a_gradient_is_refused():
    input, weight, scale, bias = made(2, 4, 5)
    with pytest.raises(UnsupportedError, match="fastplm.dequantize"):
        ops.linear_int8(input, weight, scale, bias.clone().requires_grad_())
    with pytest.raises(UnsupportedError, match="fastplm.dequantize"):
        ops.linear_int8(input.requires_grad_(), weight, scale, bias)
    with torch.no_grad():
        ops.linear_int8(input, weight, scale, bias)
