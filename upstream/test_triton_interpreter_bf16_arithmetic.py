"""Arithmetic on bfloat16 under the interpreter, where results are exact numbers of bfloat16."""

import os

os.environ["TRITON_INTERPRET"] = "1"

import pytest  # noqa: E402
import torch  # noqa: E402
import triton  # noqa: E402
import triton.language as tl  # noqa: E402

SIZE = 8
X = torch.tensor([-3, -2, -1.5, -1, 0.5, 1, 2, 4]).bfloat16()
Y = torch.tensor([1, -4, 2, -1, 0.5, -2, 8, 3]).bfloat16()


@triton.jit
def kernel(x_ptr, y_ptr, out_ptr, WHAT: tl.constexpr, SIZE: tl.constexpr):
    offsets = tl.arange(0, SIZE)
    x, y = tl.load(x_ptr + offsets), tl.load(y_ptr + offsets)
    if WHAT == "add":
        out = x + y
    elif WHAT == "sub":
        out = x - y
    elif WHAT == "mul":
        out = x * y
    elif WHAT == "neg":
        out = -x
    elif WHAT == "less":
        out = tl.where(x < y, x, y)
    elif WHAT == "fma":
        out = tl.fma(x, y, y)
    elif WHAT == "sum":
        out = tl.sum(x, 0, keep_dims=True).broadcast_to([SIZE])
    else:
        out = tl.cumsum(x, 0)
    tl.store(out_ptr + offsets, out)


EXPECTED = {
    "add": X + Y,
    "sub": X - Y,
    "mul": X * Y,
    "neg": -X,
    "less": torch.minimum(X, Y),
    "fma": X * Y + Y,
    "sum": X.sum().expand(SIZE),
    "cumsum": X.cumsum(0),
}


@pytest.mark.parametrize("what", EXPECTED)
def test_the_values_are_computed(what):
    out = torch.empty(SIZE, dtype=torch.bfloat16)
    kernel[(1,)](X, Y, out, WHAT=what, SIZE=SIZE)
    torch.testing.assert_close(out, EXPECTED[what], rtol=0, atol=0)
