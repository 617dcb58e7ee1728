"""One token a row, by the inverse of the distribution function (see the package)."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from fastplm.triton_kernels._launch import cdiv, launch, next_power_of_2
from fastplm.triton_kernels._philox import philox
from fastplm.triton_kernels.linear_cross_entropy.rows import Part
from fastplm.triton_kernels.linear_cross_entropy.tiles import (
    LOG2E,
    Operands,
    Tile,
    load_bias,
    load_weight,
)

# The stream of ``reference.philox.Stream.SAMPLE`` and the rounds of that file's default.
_SAMPLE_STREAM = tl.constexpr(2)
_ROUNDS = tl.constexpr(10)


@triton.jit
def uniform(seed_ptr, sample_index_ptr, position_ptr, row):
    """The number of a row in (0, 1), fp64: ``reference.philox.uniform`` of its first word."""
    sample_index = row
    if sample_index_ptr is not None:
        sample_index = tl.load(sample_index_ptr + row)
    position = row * 0
    if position_ptr is not None:
        position = tl.load(position_ptr + row)
    word, _, _, _ = philox(
        tl.load(seed_ptr),
        position.to(tl.uint32),
        sample_index.to(tl.uint32),
        (sample_index >> 32).to(tl.uint32),
        (row * 0 + _SAMPLE_STREAM).to(tl.uint32),
        _ROUNDS,
    )
    return (word.to(tl.float64) + 0.5) * 2.3283064365386963e-10


@triton.jit
def inverse_cdf(p, level, offs):
    """The first of ``offs`` at which the running share of p exceeds ``level`` fp64, and how far
    into it the level lies, in [0, 1); never one with p = 0."""
    # fp64: in fp32 the sum over a vocabulary would favour or starve the tokens at its end.
    p = p.to(tl.float64)
    running = tl.cumsum(p, 0)
    total = tl.sum(p, 0)
    # The last with any weight, should rounding put the level at the end.
    last = tl.max(tl.where(p > 0.0, offs, 0), 0)
    threshold = level * total
    chosen = tl.minimum(tl.sum((running <= threshold).to(tl.int32), 0), last)
    here = offs == chosen
    before = tl.sum(tl.where(here, running - p, 0.0), 0)
    weight = tl.sum(tl.where(here, p, 0.0), 0)
    rest = (threshold - before) / weight
    return chosen, tl.minimum(tl.maximum(rest, 0.0), 1.0), total


@triton.jit
def _linear_cross_entropy_sample_kernel(
    # pointers
    x_ptr,
    w_ptr,
    bias_ptr,
    order_ptr,
    count_ptr,
    tile_max_ptr,
    tile_sum_ptr,
    z_ptr,
    seed_ptr,
    sample_index_ptr,
    position_ptr,
    sample_ptr,
    # sizes
    N,
    V,
    num_tiles,
    inverse_temperature,
    # strides
    stride_xn,
    stride_wv,
    stride_zn,
    # constexprs
    E: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_E: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """One token of one row: its tile by the sums of tiles, then its place in that tile."""
    TILE: tl.constexpr = Tile(E, None, BLOCK_V, BLOCK_E, HAS_BIAS, None)
    operands = Operands(x_ptr, w_ptr, bias_ptr, V, stride_xn, stride_wv)
    slot = tl.program_id(0)
    row = tl.load(order_ptr + slot)
    if slot >= tl.load(count_ptr).to(tl.int32):
        tl.store(sample_ptr + row, -1)
        return
    level = uniform(seed_ptr, sample_index_ptr, position_ptr, row)
    scale = LOG2E * inverse_temperature

    offs_t = tl.arange(0, BLOCK_T)
    mask_t = offs_t < num_tiles
    offs_s = offs_t.to(tl.int64) * N + slot
    m_t = tl.load(tile_max_ptr + offs_s, mask=mask_t, other=float("-inf"))  # [BLOCK_T]
    l_t = tl.load(tile_sum_ptr + offs_s, mask=mask_t, other=0.0)
    m = tl.max(m_t, 0)
    weight = l_t * tl.exp2((m_t - m) * scale)
    tile, rest, total = inverse_cdf(tl.where(mask_t, weight, 0.0), level, offs_t)

    offs_v = tile * BLOCK_V + tl.arange(0, BLOCK_V)
    mask_v = offs_v < V
    z = load_bias(operands, offs_v, HAS_BIAS)  # [BLOCK_V]
    if z_ptr is not None:
        ptrs = z_ptr + slot.to(tl.int64) * stride_zn + offs_v
        z += tl.load(ptrs, mask=mask_v, other=0.0).to(tl.float32)
    else:
        for start_e in range(0, E, BLOCK_E):
            offs_e = start_e + tl.arange(0, BLOCK_E)
            x = tl.load(x_ptr + row * stride_xn + offs_e, mask=offs_e < E, other=0.0)  # [BLOCK_E]
            w = load_weight(operands, tile * BLOCK_V, start_e, TILE)
            z += tl.sum(w.to(tl.float32) * x.to(tl.float32)[None, :], 1)
    # Relative to this tile's own maximum: one far below the row's would underflow.
    m_z = tl.max(z, 0)
    p = tl.exp2((z - tl.where(m_z == float("-inf"), 0.0, m_z)) * scale)
    column, _, _ = inverse_cdf(p, rest, tl.arange(0, BLOCK_V))
    # An infinity minus itself: NaN reaches the total, and so does an infinite sum.
    finite = (total == total) & (total < float("inf"))
    token = tl.where(finite, tile * BLOCK_V + column, 0)
    tl.store(sample_ptr + row, token.to(tl.int64))


def draw_sample(
    part: Part,
    operands: dict[str, Any],
    draw: dict[str, Any],
    tile_max: torch.Tensor | None,
    tile_sum: torch.Tensor | None,
    block_v: int,
    logits: torch.Tensor | None,
) -> None:
    """Launch the draw of one token a row, by the sums of tiles of ``block_v`` columns."""
    tiles = cdiv(operands["V"], block_v)
    launch(
        _linear_cross_entropy_sample_kernel,
        (part.rows,),
        operands["x_ptr"].device,
        tile_max_ptr=tile_max,
        tile_sum_ptr=tile_sum,
        z_ptr=logits,
        N=part.rows,
        num_tiles=tiles,
        stride_zn=0 if logits is None else logits.stride(0),
        BLOCK_T=next_power_of_2(tiles),
        BLOCK_V=block_v,
        BLOCK_E=min(64, next_power_of_2(operands["E"])),
        num_warps=4,
        **part.arguments(),
        **draw,
        **{name: operands[name] for name in _SAMPLED},
    )


_SAMPLED = ("x_ptr", "w_ptr", "bias_ptr", "V", "stride_xn", "stride_wv", "E", "HAS_BIAS")
