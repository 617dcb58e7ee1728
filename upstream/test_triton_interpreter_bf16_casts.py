"""Casts to bfloat16 under the interpreter are those of PyTorch."""

import os

os.environ["TRITON_INTERPRET"] = "1"

import pytest  # noqa: E402
import torch  # noqa: E402
import triton  # noqa: E402
import triton.language as tl  # noqa: E402

TIES = [1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 1 + 2**-8 + 2**-20]
LIMITS = [0.0, -0.0, 1e-40, -1e-39, 3.4e38, float("inf"), float("-inf"), float("nan")]


@triton.jit
def cast_kernel(x_ptr, out_ptr, SIZE: tl.constexpr):
    offsets = tl.arange(0, SIZE)
    tl.store(out_ptr + offsets, tl.load(x_ptr + offsets).to(tl.bfloat16))


def check(x):
    out = torch.empty(len(x), dtype=torch.bfloat16)
    cast_kernel[(1,)](x, out, SIZE=len(x))
    expected = x.bfloat16()
    torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(out.signbit()[~out.isnan()], expected.signbit()[~out.isnan()])


def test_float32_is_rounded_to_nearest_even():
    check(torch.randn(64, generator=torch.Generator().manual_seed(0)))
    check(torch.tensor(TIES + [-x for x in TIES]))


def test_limits():
    check(torch.tensor(LIMITS))


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32, torch.int64])
def test_an_integer_is_its_value(dtype):
    check(torch.tensor([0, 1, 2, 3, 100, 101, 126, 127], dtype=dtype))
