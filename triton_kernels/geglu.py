"""The gate of a feed-forward, of rows that hold what is activated and its factor, and its gradient.

    y = a p(a) b        da = dy b (p + a dp/da)        db = dy a p
    p = Phi, its approximation by a tanh, or the logistic function: GELU, "gelu_tanh" or SiLU

Source: Shazeer 2020 (arXiv 2002.05202), equation 6.

Legend: N rows · F row width of y; a, b, y tiles of rows; x holds rows [a, b] of 2 F.

Each element is computed by itself: no sums, no atomics.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import triton
import triton.language as tl

from fastplm.triton_kernels._launch import INTERPRETED, cast, launch
from fastplm.triton_kernels.bias_gelu import _distribution, _tile


@triton.jit
def _gate(a, SILU: tl.constexpr, TANH: tl.constexpr, SHORT: tl.constexpr):
    """p(a) and its derivative."""
    if SILU:
        e = tl.exp2(-1.4426950408889634 * tl.abs(a))
        r = 1.0 / (1.0 + e)
        return tl.where(a < 0.0, e * r, r), e * r * r
    return _distribution(a, TANH, SHORT)


@triton.jit(do_not_specialize=["num_rows"])
def _geglu_fwd_kernel(
    # pointers
    x_ptr,
    y_ptr,
    # sizes
    num_rows,
    # strides
    stride_xn,
    # constexprs
    WIDTH: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_F: tl.constexpr,
    SILU: tl.constexpr,
    TANH: tl.constexpr,
    UPCAST: tl.constexpr,
):
    num_tiles_f: tl.constexpr = (WIDTH + BLOCK_F - 1) // BLOCK_F
    tile_n, tile_f = tl.program_id(0) // num_tiles_f, tl.program_id(0) % num_tiles_f
    offs_n = tile_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_f = tile_f * BLOCK_F + tl.arange(0, BLOCK_F)
    mask = (offs_n < num_rows)[:, None] & (offs_f < WIDTH)[None, :]

    x_ptrs = x_ptr + offs_n[:, None] * stride_xn + offs_f[None, :]
    x = tl.load(x_ptrs, mask=mask, other=0.0)
    b = tl.load(x_ptrs + WIDTH, mask=mask, other=0.0).to(tl.float32)
    a = x.to(tl.float32)  # [BLOCK_N, BLOCK_F]
    p, _ = _gate(a, SILU, TANH, x.dtype != tl.float32)
    y = cast(a * p * b, y_ptr.dtype.element_ty, UPCAST)
    tl.store(y_ptr + offs_n[:, None] * WIDTH + offs_f[None, :], y, mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def _geglu_bwd_kernel(
    # pointers
    dy_ptr,
    x_ptr,
    dx_ptr,
    # sizes
    num_rows,
    # strides
    stride_dyn,
    stride_xn,
    # constexprs
    WIDTH: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_F: tl.constexpr,
    SILU: tl.constexpr,
    TANH: tl.constexpr,
    UPCAST: tl.constexpr,
):
    num_tiles_f: tl.constexpr = (WIDTH + BLOCK_F - 1) // BLOCK_F
    tile_n, tile_f = tl.program_id(0) // num_tiles_f, tl.program_id(0) % num_tiles_f
    offs_n = tile_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_f = tile_f * BLOCK_F + tl.arange(0, BLOCK_F)
    mask = (offs_n < num_rows)[:, None] & (offs_f < WIDTH)[None, :]

    x_ptrs = x_ptr + offs_n[:, None] * stride_xn + offs_f[None, :]
    x = tl.load(x_ptrs, mask=mask, other=0.0)
    b = tl.load(x_ptrs + WIDTH, mask=mask, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + offs_n[:, None] * stride_dyn + offs_f[None, :], mask=mask, other=0.0)
    a, dy = x.to(tl.float32), dy.to(tl.float32)  # [BLOCK_N, BLOCK_F]
    p, slope = _gate(a, SILU, TANH, x.dtype != tl.float32)
    dx_ptrs = dx_ptr + offs_n[:, None] * (2 * WIDTH) + offs_f[None, :]
    da = cast(dy * b * (p + a * slope), dx_ptr.dtype.element_ty, UPCAST)
    tl.store(dx_ptrs, da, mask=mask)
    tl.store(dx_ptrs + WIDTH, cast(dy * a * p, dx_ptr.dtype.element_ty, UPCAST), mask=mask)


def _launch(kernel: Callable, input: torch.Tensor, activation: str, **arguments: object) -> None:
    rows, width = input.shape[0], input.shape[1] // 2
    tile = _tile(width, input.dtype.itemsize)
    launch(
        kernel,
        (-(-rows // tile.rows) * tile.tiles,),
        input.device,
        x_ptr=input,
        num_rows=rows,
        stride_xn=input.stride(0),
        WIDTH=width,
        BLOCK_N=tile.rows,
        BLOCK_F=tile.columns,
        SILU=activation == "silu",
        TANH=activation == "gelu_tanh",
        UPCAST=INTERPRETED and input.dtype is torch.bfloat16,
        num_warps=tile.warps,
        **arguments,
    )


def geglu_fwd(input: torch.Tensor, activation: str) -> torch.Tensor:
    """Launch the forward for rows [N, 2 F]."""
    out = input.new_empty(input.shape[0], input.shape[1] // 2)
    _launch(_geglu_fwd_kernel, input, activation, y_ptr=out)
    return out


def geglu_bwd(grad: torch.Tensor, input: torch.Tensor, activation: str) -> torch.Tensor:
    """Launch the backward: the gradient [N, 2 F]."""
    found = input.new_empty(input.shape)
    given = dict(dy_ptr=grad, dx_ptr=found, stride_dyn=grad.stride(0))
    _launch(_geglu_bwd_kernel, input, activation, **given)
    return found


def compile_cases() -> Iterator[tuple[str, Callable[[], object]]]:
    """Every shipped configuration, as a label and a function that launches it (on meta tensors)."""
    cases = ((1152, "gelu", False), (3072, "silu", False), (1024, "gelu_tanh", True))
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        for width, activation, slow in (*cases, (101, "gelu", True), (101, "silu", True)):
            label = f"{'slow: ' if slow else ''}{str(dtype)[6:]} F={width} {activation}"
            yield label, lambda case=(dtype, width, activation): _case(*case)


def _case(dtype: torch.dtype, width: int, activation: str) -> None:
    input = torch.empty(4096, 2 * width, dtype=dtype, device="meta")
    geglu_bwd(geglu_fwd(input, activation), input, activation)
