"""What the kernels share: their argument structures, and tiles in memory.

The structures exist inside kernels alone; the host passes plain arguments. Give their fields by
position: Triton's cache of compiled code hashes the text of the kernels, not of these classes, so a
field may change its place only with a change to the text of every kernel.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from fastplm.triton_kernels._launch import dot

LOG2E = tl.constexpr(1.4426950408889634)
# Two int64 counts stand before the order of rows, each at a multiple of 16 bytes.
COUNT_STRIDE = tl.constexpr(2)
ORDER_START = 2 * COUNT_STRIDE.value


class Operands(NamedTuple):
    """X [N, E], W [V, E] and b [V]."""

    x_ptr: Any
    w_ptr: Any
    bias_ptr: Any
    V: Any
    stride_xn: Any
    stride_wv: Any


class Tile(NamedTuple):
    """The constants of a kernel."""

    E: Any
    BLOCK_N: Any
    BLOCK_V: Any
    BLOCK_E: Any
    HAS_BIAS: Any
    UPCAST: Any


@triton.jit
def load_tile(ptr, offs_r, mask_r, stride_r, start_e, E: tl.constexpr, BLOCK_E: tl.constexpr):
    """Rows ``offs_r``, columns ``start_e`` … of a [*, E] matrix, 0 where masked or past E."""
    offs_e = start_e + tl.arange(0, BLOCK_E)
    ptrs = ptr + offs_r.to(tl.int64)[:, None] * stride_r + offs_e[None, :]
    return tl.load(ptrs, mask=mask_r[:, None] & (offs_e < E)[None, :], other=0.0)


@triton.jit
def tile_ptrs(ptr, start_r, start_c, stride_r, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    """[BLOCK_R, BLOCK_C] of a matrix; 64 bits for the corner, 32 for the way inside the tile."""
    ptr += (start_r + tl.zeros([], tl.int64)) * stride_r + start_c
    return ptr + (tl.arange(0, BLOCK_R)[:, None] * stride_r + tl.arange(0, BLOCK_C)[None, :])


@triton.jit
def load_x(operands, rows, used, start_e, TILE: tl.constexpr):
    """[BLOCK_N, BLOCK_E]"""
    return load_tile(operands.x_ptr, rows, used, operands.stride_xn, start_e, TILE.E, TILE.BLOCK_E)


@triton.jit
def load_weight(operands, start_v, start_e, TILE: tl.constexpr):
    """A tile of W, 0 past V or E. [BLOCK_V, BLOCK_E]"""
    mask_v = start_v + tl.arange(0, TILE.BLOCK_V) < operands.V
    mask_e = start_e + tl.arange(0, TILE.BLOCK_E) < TILE.E
    ptrs = tile_ptrs(
        operands.w_ptr, start_v, start_e, operands.stride_wv, TILE.BLOCK_V, TILE.BLOCK_E
    )
    return tl.load(ptrs, mask=mask_v[:, None] & mask_e[None, :], other=0.0)


@triton.jit
def load_slots(order_ptr, count, start_n, BLOCK_N: tl.constexpr):
    """(rows int64, used bool) of the slots ``start_n`` …, both [BLOCK_N]."""
    offs_n = start_n + tl.arange(0, BLOCK_N)
    used = offs_n < count
    return tl.load(order_ptr + offs_n, mask=used, other=0), used


@triton.jit
def load_bias(operands, offs_v, HAS_BIAS: tl.constexpr):
    """[BLOCK_V] fp32: -inf past the vocabulary, which takes these columns out of the softmax."""
    exists = offs_v < operands.V
    bias = tl.zeros(offs_v.shape, tl.float32)
    if HAS_BIAS:
        bias = tl.load(operands.bias_ptr + offs_v, mask=exists, other=0.0).to(tl.float32)
    return tl.where(exists, bias, float("-inf"))


@triton.jit
def streamed_products(operands, rows, used, start_v, TILE: tl.constexpr):
    """X W^T of one tile, for rows wider than a tile: both operands pass by. [BLOCK_N, BLOCK_V]"""
    z = tl.zeros([rows.shape[0], TILE.BLOCK_V], tl.float32)
    for start_e in range(0, TILE.E, TILE.BLOCK_E):
        x = load_x(operands, rows, used, start_e, TILE)  # [BLOCK_N, BLOCK_E]
        w = load_weight(operands, start_v, start_e, TILE)
        z = dot(x, tl.trans(w), z, TILE.UPCAST)
    return z
