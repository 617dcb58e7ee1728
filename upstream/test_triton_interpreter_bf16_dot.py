"""tl.dot of bfloat16 tiles under the interpreter."""

import os

os.environ["TRITON_INTERPRET"] = "1"

import torch  # noqa: E402
import triton  # noqa: E402
import triton.language as tl  # noqa: E402


@triton.jit
def product_kernel(a_ptr, b_ptr, c_ptr, SIZE: tl.constexpr):
    index = tl.arange(0, SIZE)
    offsets = index[:, None] * SIZE + index[None, :]
    tl.store(c_ptr + offsets, tl.dot(tl.load(a_ptr + offsets), tl.load(b_ptr + offsets)))


def test_a_product_is_that_of_the_values():
    torch.manual_seed(0)
    a, b = torch.randn(2, 16, 16).bfloat16()
    c = torch.empty(16, 16)
    product_kernel[(1,)](a, b, c, SIZE=16)
    torch.testing.assert_close(c, a.float() @ b.float())
