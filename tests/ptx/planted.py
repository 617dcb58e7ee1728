"""Kernels with faults, and their results on CPU tensors inside ``emulated``."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fastplm.triton_kernels._launch import launch

_DEVICE = torch.device("cpu")


@triton.jit
def _product_and_sum_kernel(
    dz_ptr,
    x_ptr,
    out_ptr,
    sum_ptr,
    rows,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """dZ^T X and the sum of dZ. One load feeds both; Triton (seen on 3.7.1, sm_90) then keeps as
    many copies in flight as there are buffers while the last product still reads one of them."""
    offs_n, offs_v = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_V)
    offs_e = tl.arange(0, BLOCK_E)
    acc = tl.zeros([BLOCK_V, BLOCK_E], tl.float32)
    total = tl.zeros([BLOCK_V], tl.float32)
    for start in range(0, rows, BLOCK_N):
        row = (start + offs_n)[:, None]
        dz_t = tl.trans(tl.load(dz_ptr + row * BLOCK_V + offs_v[None, :]))
        x = tl.load(x_ptr + row * BLOCK_E + offs_e[None, :])
        acc = tl.dot(dz_t, x, acc)
        total += tl.sum(dz_t.to(tl.float32), 1)
    tl.store(out_ptr + offs_v[:, None] * BLOCK_E + offs_e[None, :], acc)
    tl.store(sum_ptr + offs_v, total)


@triton.jit
def _copy_kernel(x_ptr, out_ptr, size, first, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs, mask=offs < size, other=0.0)
    tl.store(out_ptr + first + offs, x, mask=offs < size)


def product_and_sum() -> float:
    """The largest error of the product."""
    torch.manual_seed(0)
    dz, x = torch.randn(512, 128).bfloat16(), torch.randn(512, 128).bfloat16()
    out, total = torch.empty(128, 128), torch.empty(128)
    launch(
        _product_and_sum_kernel,
        (1,),
        _DEVICE,
        dz_ptr=dz,
        x_ptr=x,
        out_ptr=out,
        sum_ptr=total,
        rows=512,
        BLOCK_N=64,
        BLOCK_V=128,
        BLOCK_E=128,
        num_warps=8,
        num_stages=4,
    )
    return (out - dz.float().T @ x.float()).abs().max().nan_to_num(9.0).item()


def copy(size: int = 300, first: int = 0, dtype: torch.dtype = torch.float32) -> float:
    """The number of 300 numbers that were not copied."""
    x = (100 * torch.randn(300)).to(dtype)
    freed = [x.clone() for _ in range(8)]  # the next allocation may get this memory
    del freed
    out = torch.empty(300, dtype=dtype)
    arguments = dict(x_ptr=x, out_ptr=out, size=size, first=first, BLOCK=128, num_warps=4)
    launch(_copy_kernel, (3,), _DEVICE, **arguments)
    return (out != x).sum().item()


def read_past_the_end() -> float:
    return copy(size=301)


def write_too_little() -> float:
    return copy(size=299)


def write_too_few_integers() -> float:
    return copy(size=299, dtype=torch.int32)


def write_past_the_end() -> float:
    return copy(first=4)
