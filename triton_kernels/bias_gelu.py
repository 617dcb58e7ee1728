"""The GELU of rows with a bias, and its gradients, each in one pass.

    z = x + b        y = z p(z)        s = dy (p + z dp/dz)        dx = s        db = sum s
    p(z) = Phi(z), the distribution function of the normal distribution
         or 1 / (1 + exp(-2 u)), u = sqrt(2/pi) (z + 0.044715 z^3)

Source: Hendrycks and Gimpel 2016 (arXiv 1606.08415), section 2.

Legend: N rows · F row width · R row groups; x, y, dx, dy tiles of rows, b the bias.

One program of the backward owns some columns of a group of rows. It writes its sums of s, which are
not rounded, into partials [R, 1, F] for ``add_groups``: no atomics, and as groups follow from the
shapes alone, the bits repeat.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from fastplm.triton_kernels._launch import (
    INTERPRETED,
    Fixed,
    cast,
    cdiv,
    launch,
    next_power_of_2,
)
from fastplm.triton_kernels._rows import add_groups

# A thread loads 16 bytes of each row of a tile. So a tile has as many columns as its warps take.
_BYTES_PER_WARP = 32 * 16
_MAX_WARPS = 4
# The rows of a group are a multiple of this, and those of a tile a divisor of it.
_ROWS = 16
_MAX_GROUPS = 512


@triton.jit
def _phi(z, SHORT: tl.constexpr):
    """Phi(z) and its derivative, the density of the normal distribution."""
    if SHORT:
        # log2 Phi(-|z|) as a polynomial. Up to |z| = 5.2 Phi(-|z|) is within 1e-7 of it, beyond it
        # falls faster. This takes half the instructions of erf, which in fp32 is more exact.
        a = tl.abs(z)
        q = 6.684045210108336e-07 - 2.1998561573781557e-08 * a
        q = -8.758783060488432e-06 + a * q
        q = 6.258443265752001e-05 + a * q
        q = -0.00022825454169459746 + a * q
        q = -0.00011480197390487614 + a * q
        q = 0.007098438230269626 + a * q
        q = -0.05255268423605014 + a * q
        q = -0.45918048454266286 + a * q
        q = -1.151109690576403 + a * q
        q = tl.exp2(-0.9999998818833182 + a * q)
        p = tl.where(z < 0.0, q, 1.0 - q)
    else:
        p = 0.5 + 0.5 * tl.erf(z * 0.70710678118654752)
    return p, 0.39894228040143268 * tl.exp2(-0.72134752044448170 * z * z)


@triton.jit
def _logistic(z):
    """1 / (1 + exp(-2 u)) and its derivative, to full relative precision on both sides."""
    square = z * z
    u = z * (0.79788456080286536 + 0.035677408136300125 * square)
    e = tl.exp2(-2.8853900817779268 * tl.abs(u))
    r = 1.0 / (1.0 + e)
    p = tl.where(u < 0.0, e * r, r)
    return p, e * r * r * (1.5957691216057307 + 0.21406444881780075 * square)


@triton.jit
def _distribution(z, TANH: tl.constexpr, SHORT: tl.constexpr):
    if TANH:
        return _logistic(z)
    return _phi(z, SHORT)


@triton.jit(do_not_specialize=["num_rows"])
def _bias_gelu_fwd_kernel(
    # pointers
    x_ptr,
    b_ptr,
    y_ptr,
    # sizes
    num_rows,
    # strides
    stride_xn,
    # constexprs
    WIDTH: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_F: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    TANH: tl.constexpr,
    UPCAST: tl.constexpr,
):
    num_tiles_f: tl.constexpr = (WIDTH + BLOCK_F - 1) // BLOCK_F
    tile_n, tile_f = tl.program_id(0) // num_tiles_f, tl.program_id(0) % num_tiles_f
    offs_n = tile_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_f = tile_f * BLOCK_F + tl.arange(0, BLOCK_F)
    mask_f = offs_f < WIDTH
    mask = (offs_n < num_rows)[:, None] & mask_f[None, :]

    x = tl.load(x_ptr + offs_n[:, None] * stride_xn + offs_f[None, :], mask=mask, other=0.0)
    z = x.to(tl.float32)  # [BLOCK_N, BLOCK_F]
    if HAS_BIAS:
        z += tl.load(b_ptr + offs_f, mask=mask_f, other=0.0).to(tl.float32)[None, :]
    p, _ = _distribution(z, TANH, x.dtype != tl.float32)
    y = cast(z * p, y_ptr.dtype.element_ty, UPCAST)
    tl.store(y_ptr + offs_n[:, None] * WIDTH + offs_f[None, :], y, mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def _bias_gelu_bwd_kernel(
    # pointers
    dy_ptr,
    x_ptr,
    b_ptr,
    dx_ptr,
    partial_ptr,
    # sizes
    num_rows,
    rows_per_group,
    # strides
    stride_dyn,
    stride_xn,
    # constexprs
    WIDTH: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_F: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    NEED_DB: tl.constexpr,
    TANH: tl.constexpr,
    UPCAST: tl.constexpr,
):
    num_tiles_f: tl.constexpr = (WIDTH + BLOCK_F - 1) // BLOCK_F
    group, tile_f = tl.program_id(0) // num_tiles_f, tl.program_id(0) % num_tiles_f
    offs_f = tile_f * BLOCK_F + tl.arange(0, BLOCK_F)
    mask_f = offs_f < WIDTH
    b = tl.zeros([BLOCK_F], tl.float32)
    if HAS_BIAS:
        b = tl.load(b_ptr + offs_f, mask=mask_f, other=0.0).to(tl.float32)
    db = tl.zeros([BLOCK_F], tl.float32)

    first = group.to(tl.int64) * rows_per_group
    rows = tl.minimum(rows_per_group, num_rows - first).to(tl.int32)
    for start in range(0, rows, BLOCK_N):
        offs_n = first + start + tl.arange(0, BLOCK_N)
        mask = (offs_n < num_rows)[:, None] & mask_f[None, :]
        x = tl.load(x_ptr + offs_n[:, None] * stride_xn + offs_f[None, :], mask=mask, other=0.0)
        dy = tl.load(dy_ptr + offs_n[:, None] * stride_dyn + offs_f[None, :], mask=mask, other=0.0)
        z = x.to(tl.float32) + b[None, :]  # [BLOCK_N, BLOCK_F]
        p, slope = _distribution(z, TANH, x.dtype != tl.float32)
        s = dy.to(tl.float32) * (p + z * slope)
        if NEED_DB:
            db += tl.sum(s, 0)
        dx = cast(s, dx_ptr.dtype.element_ty, UPCAST)
        tl.store(dx_ptr + offs_n[:, None] * WIDTH + offs_f[None, :], dx, mask=mask)
    if NEED_DB:
        tl.store(partial_ptr + group.to(tl.int64) * WIDTH + offs_f, db, mask=mask_f)


class _Tile(NamedTuple):
    """Rows and columns of a tile, tiles of a row, warps."""

    rows: int
    columns: int
    tiles: int
    warps: int


@lru_cache
def _tile(width: int, itemsize: int) -> _Tile:
    rows = 2 if width * itemsize % 16 else 4  # elements are loaded one by one, each with its mask
    warps = min(_MAX_WARPS, next_power_of_2(cdiv(width * itemsize, _BYTES_PER_WARP)))
    full = warps * _BYTES_PER_WARP // itemsize
    columns = min(full, max(16, next_power_of_2(width)))
    return _Tile(min(_ROWS, rows * full // columns), columns, cdiv(width, columns), warps)


@lru_cache(maxsize=1024)
def _fixed(
    width: int, dtype: torch.dtype, has_bias: bool, approximate: str, **more: Any
) -> tuple[_Tile, Fixed]:
    """What the launches for rows of one kind share."""
    tile = _tile(width, dtype.itemsize)
    return tile, Fixed(
        WIDTH=width,
        BLOCK_N=tile.rows,
        BLOCK_F=tile.columns,
        HAS_BIAS=has_bias,
        TANH=approximate == "tanh",
        UPCAST=INTERPRETED and dtype is torch.bfloat16,
        num_warps=tile.warps,
        **more,
    )


@lru_cache(maxsize=1024)
def _groups(rows: int) -> tuple[int, int]:
    """(number of groups, rows of each); without rows there is one group, which finds none."""
    blocks = max(1, cdiv(rows, _ROWS))
    blocks_per_group = cdiv(blocks, _MAX_GROUPS)
    return cdiv(blocks, blocks_per_group), blocks_per_group * _ROWS


def bias_gelu_fwd(input: torch.Tensor, bias: torch.Tensor | None, approximate: str) -> torch.Tensor:
    """Launch the forward for rows [N, F]."""
    rows, width = input.shape
    tile, fixed = _fixed(width, input.dtype, bias is not None, approximate)
    out = input.new_empty(rows, width)
    launch(
        _bias_gelu_fwd_kernel,
        (-(-rows // tile.rows) * tile.tiles,),
        input.device,
        fixed=fixed,
        x_ptr=input,
        b_ptr=input if bias is None else bias,
        y_ptr=out,
        num_rows=rows,
        stride_xn=input.stride(0),
    )
    return out


def bias_gelu_bwd(
    grad: torch.Tensor,
    input: torch.Tensor,
    bias: torch.Tensor | None,
    approximate: str,
    need_bias: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the backward: gradients of input [N, F] and bias [F]; empty if not needed."""
    rows, width = input.shape
    groups, rows_per_group = _groups(rows)
    grad_input = input.new_empty(rows, width)
    need_bias = need_bias and bias is not None
    partial = input.new_empty((groups, 1, width) if need_bias else 0, dtype=torch.float32)
    form = (width, input.dtype, bias is not None, approximate)
    tile, fixed = _fixed(*form, NEED_DB=need_bias)
    launch(
        _bias_gelu_bwd_kernel,
        (groups * tile.tiles,),
        input.device,
        fixed=fixed,
        dy_ptr=grad,
        x_ptr=input,
        b_ptr=input if bias is None else bias,
        dx_ptr=grad_input,
        partial_ptr=partial,
        num_rows=rows,
        rows_per_group=rows_per_group,
        stride_dyn=grad.stride(0),
        stride_xn=input.stride(0),
    )
    if not need_bias:
        return grad_input, input.new_empty(0)
    grad_bias = torch.empty_like(bias)
    add_groups(partial, [grad_bias])
    return grad_input, grad_bias


def compile_cases() -> Iterator[tuple[str, Callable[[], object]]]:
    """Every shipped configuration, as a label and a function that launches it (on meta tensors)."""
    cases = (
        # width, approximate, dtype of the bias, slow
        (3072, "none", torch.float32, False),
        (1024, "tanh", None, False),
        (512, "none", torch.float32, True),
        (100, "tanh", None, True),
        (1501, "none", torch.float32, True),
        (16384, "tanh", torch.float32, True),
    )
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        for width, approximate, of_bias, slow in cases:
            label = f"{'slow: ' if slow else ''}{str(dtype)[6:]} F={width} {approximate}"
            yield label, lambda case=(dtype, width, approximate, of_bias or dtype): _case(*case)


def _case(dtype: torch.dtype, width: int, approximate: str, of_bias: torch.dtype) -> None:
    input = torch.empty(4096, width, dtype=dtype, device="meta")
    bias = torch.empty(width, dtype=of_bias, device="meta")
    for beside in (bias, None):
        out = bias_gelu_fwd(input, beside, approximate)
        bias_gelu_bwd(out, input, beside, approximate, True)
