"""Rows of elements in tiles of whole rows: what the kernels of norms share.

Legend: N rows · E row width · R row groups · K vectors that are summed over rows.

A row is in PARTS parts [BLOCK_N, PART], as many as its width needs. Sums over rows are made without
atomics: a program owns a group of rows and writes its sums into partials [R, K, E], which
``add_groups`` adds up. The groups follow from N alone, so the bits repeat.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from fastplm.triton_kernels._launch import INTERPRETED, cast, cdiv, launch, next_power_of_2
from fastplm.triton_kernels._philox import philox

# A row has parts of 8 elements for each of its threads (16 bytes, in 16 bits; what one draw of
# dropout decides), so its width need not be a power of two (768 = 3 x 256). It gets so many warps
# that a thread holds few of its elements: the backward has five to seven registers for each.
_ELEMENTS = 24
_PER_WARP = 32 * 8
# The rows of a group are a multiple of this. 32,768 rows are then 256 groups: two for each SM of
# an H200, which has room for both.
_ROWS = 16
_MAX_GROUPS = 256

# The stream of ``reference.philox.Stream.HIDDEN`` and its number of rounds.
_STREAM = tl.constexpr(11)
_ROUNDS = tl.constexpr(7)
_IS_INTERPRETED = tl.constexpr(INTERPRETED)


class Tile(NamedTuple):
    """Columns of a part, parts, rows side by side, warps."""

    part: int
    parts: int
    rows: int
    warps: int


@lru_cache
def tile_of(width: int) -> Tile:
    """The tile for rows of ``width`` elements."""
    warps_per_row = next_power_of_2(cdiv(width, 32 * _ELEMENTS))
    part = min(warps_per_row * _PER_WARP, max(16, next_power_of_2(width)))
    if width == 3 * part // 2:
        part //= 2  # three parts, and no columns that do not exist
    warps = max(4, warps_per_row)
    rows = warps * _PER_WARP // part
    return Tile(part, cdiv(width, part), min(_ROWS, max(1, rows)), warps)


@lru_cache(maxsize=1024)
def groups_of(rows: int) -> tuple[int, int]:
    """(number of groups, rows of each); without rows there is one group, which finds none."""
    blocks = max(1, cdiv(rows, _ROWS))
    blocks_per_group = cdiv(blocks, _MAX_GROUPS)
    return cdiv(blocks, blocks_per_group), blocks_per_group * _ROWS


@triton.jit
def load_rows(
    ptr,
    offs_n,
    exists,
    stride,
    WIDTH: tl.constexpr,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
):
    """A tile of rows as it is in memory, 0 where there is nothing: PARTS of [BLOCK_N, PART]."""
    tile = ()
    for i in tl.static_range(PARTS):
        offs_e = i * PART + tl.arange(0, PART)
        ptrs = ptr + offs_n[:, None] * stride + offs_e[None, :]
        mask = exists[:, None] & (offs_e < WIDTH)[None, :]
        tile = tile + (tl.load(ptrs, mask=mask, other=0.0),)
    return tile


@triton.jit
def load_vector(ptr, i, WIDTH: tl.constexpr, BLOCK_N: tl.constexpr, PART: tl.constexpr):
    """Part ``i`` of a vector in fp32, once for each row: [BLOCK_N, PART].

    So each thread loads what it needs. A vector [PART] would be handed over in shared memory.
    """
    offs_e = tl.zeros([BLOCK_N, 1], tl.int32) + (i * PART + tl.arange(0, PART))[None, :]
    return tl.load(ptr + offs_e, mask=offs_e < WIDTH, other=0.0).to(tl.float32)


@triton.jit
def rounded(tile, dtype: tl.constexpr):
    """An fp32 tile in ``dtype``."""
    return cast(tile, dtype, _IS_INTERPRETED and dtype == tl.bfloat16)


@triton.jit
def store_part(ptr, tile, i, offs_n, exists, WIDTH: tl.constexpr, PART: tl.constexpr):
    """Store part ``i`` [BLOCK_N, PART] of rows that lie one after another."""
    offs_e = i * PART + tl.arange(0, PART)
    ptrs = ptr + offs_n[:, None] * WIDTH + offs_e[None, :]
    tl.store(
        ptrs,
        rounded(tile, ptr.dtype.element_ty),
        mask=exists[:, None] & (offs_e < WIDTH)[None, :],
    )


@triton.jit
def load_seed(seed_ptr, BLOCK_N: tl.constexpr, PART: tl.constexpr):
    """The seed, once for each draw of a part: [BLOCK_N, 16 * BLOCKS].

    A load decides which thread has what, and here a thread has one draw. Otherwise each draw would
    be made by all 8 threads whose elements it decides for. Rows must be loaded later, as the
    compiler starts from the last load.
    """
    BLOCKS: tl.constexpr = (PART + 127) // 128
    return tl.load(seed_ptr + tl.zeros([BLOCK_N, 16 * BLOCKS], tl.int32))


@triton.jit
def _choices(seed, c0, c1, c2, c3, threshold):
    """What draws decide, as the reference has it: bit j is set where choice j keeps its element."""
    words = philox(seed, c0, c1, c2, c3, _ROUNDS)
    choices = tl.zeros(c0.shape, tl.int32)
    for j in tl.static_range(8):
        half = ((words[j // 2] >> (j % 2 * 16)) & 0xFFFF).to(tl.int32)
        choices |= (half >= threshold).to(tl.int32) << j
    return choices


@triton.jit
def draws_of(
    random,
    threshold,
    offs_n,
    exists,
    WIDTH: tl.constexpr,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
):
    """What decides which elements of rows dropout keeps: PARTS of ``_choices`` for ``kept``.

    The draws are those of ``reference.dropout``: ``keep_mask_of_rows`` with sample indices, else
    ``keep_mask``. One decides for 8 elements, 16 apart, of a block of 128.
    """
    seed, sample_ptr, position_ptr = random
    BLOCKS: tl.constexpr = (PART + 127) // 128
    zero = tl.zeros([offs_n.shape[0], 16 * BLOCKS], tl.uint32)
    draw = tl.arange(0, 16 * BLOCKS)[None, :]
    tile = ()
    for i in tl.static_range(PARTS):
        if sample_ptr is not None:
            sample = tl.load(sample_ptr + offs_n, mask=exists, other=0)[:, None]
            at = zero
            if position_ptr is not None:
                at += tl.load(position_ptr + offs_n, mask=exists, other=0).to(tl.uint32)[:, None]
            low, high = zero + sample.to(tl.uint32), zero + (sample >> 32).to(tl.uint32)
            last = zero + ((i * PART // 8 + draw) << 4 | _STREAM).to(tl.uint32)
            choices = _choices(seed, at, low, high, last, threshold)
        else:
            # Element e of a part is element s + e of a block: a draw of lane (s + e) mod 16.
            first = (offs_n * WIDTH + i * PART)[:, None]  # [BLOCK_N, 1] int64
            place = (first % 128).to(tl.int32)  # s
            lane = place % 16 + draw % 16
            number = first // 128 * 16 + draw // 16 * 16 + lane % 16  # [BLOCK_N, 16 * BLOCKS]
            low, high = number.to(tl.uint32), (number >> 32).to(tl.uint32)
            choices = _choices(seed, low, high, zero, zero + _STREAM, threshold)
            if WIDTH % 128 != 0:  # some elements of a lane are in the next block
                number += 16
                low, high = number.to(tl.uint32), (number >> 32).to(tl.uint32)
                choices |= _choices(seed, low, high, zero, zero + _STREAM, threshold) << 8
                choices = choices >> (place // 16 + lane // 16)
        tile = tile + (choices,)
    return tile


@triton.jit
def kept(choices, PART: tl.constexpr):
    """[BLOCK_N, PART] bool: the elements of a part that its draws [BLOCK_N, 16 * BLOCKS] keep."""
    BLOCKS: tl.constexpr = (PART + 127) // 128
    UNITS: tl.constexpr = PART // BLOCKS // 16
    choices = tl.reshape(choices, [choices.shape[0], BLOCKS, 1, 16])
    unit = tl.reshape(tl.arange(0, UNITS), [1, 1, UNITS, 1])
    return tl.reshape(choices >> unit & 1, [choices.shape[0], PART]) != 0


@triton.jit
def statistics(z, eps, IS_RMS: tl.constexpr, WIDTH: tl.constexpr, PART: tl.constexpr):
    """xhat before it is scaled, in parts of fp32 [BLOCK_N, PART], and rstd [BLOCK_N]."""
    PARTS: tl.constexpr = len(z)
    centred = ()
    mean = tl.zeros([z[0].shape[0]], tl.float32)
    if not IS_RMS:
        total = z[0].to(tl.float32)
        for i in tl.static_range(1, PARTS):
            total += z[i].to(tl.float32)
        mean = tl.sum(total, 1) / WIDTH
    squares = tl.zeros(z[0].shape, tl.float32)
    for i in tl.static_range(PARTS):
        x = z[i].to(tl.float32)
        if not IS_RMS:
            x -= mean[:, None]
            if (i + 1) * PART > WIDTH:
                x = tl.where((i * PART + tl.arange(0, PART) < WIDTH)[None, :], x, 0.0)
        squares += x * x
        centred = centred + (x,)
    variance = tl.sum(squares, 1) / WIDTH
    return centred, tl.div_rn(1.0, tl.sqrt_rn(variance + eps))


@triton.jit
def _store_sum(ptr, total, offs_e, mask):
    if ptr is not None:
        tl.store(ptr + offs_e, rounded(total, ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_groups"])
def _add_groups_kernel(
    # pointers
    partial_ptr,
    sum0_ptr,
    sum1_ptr,
    sum2_ptr,
    sum3_ptr,
    # sizes
    num_groups,
    # constexprs
    COUNT: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    # One program adds up all partials of some columns of one vector.
    offs_r = tl.arange(0, BLOCK_R)
    offs_e = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    mask_e = offs_e < WIDTH
    which = tl.program_id(1).to(tl.int64)
    ptrs = partial_ptr + offs_r.to(tl.int64)[:, None] * (COUNT * WIDTH)
    ptrs += (which * WIDTH + offs_e)[None, :]
    partial = tl.load(ptrs, mask=(offs_r < num_groups)[:, None] & mask_e[None, :], other=0.0)
    total = tl.sum(partial, 0)  # [BLOCK_E]
    _store_sum(sum0_ptr, total, offs_e, mask_e & (which == 0))
    _store_sum(sum1_ptr, total, offs_e, mask_e & (which == 1))
    _store_sum(sum2_ptr, total, offs_e, mask_e & (which == 2))
    _store_sum(sum3_ptr, total, offs_e, mask_e & (which == 3))


@lru_cache(maxsize=1024)
def _block_r(groups: int) -> int:
    return max(128, next_power_of_2(groups))


def add_groups(partial: torch.Tensor, sums: Sequence[torch.Tensor | None]) -> None:
    """Write sums over R of fp32 partials [R, K, E] into K <= 4 vectors [E]; None: not wanted."""
    groups, count, width = partial.shape
    wanted = count
    while wanted and sums[wanted - 1] is None:
        wanted -= 1
    block_r = _block_r(groups)
    names = ("sum0_ptr", "sum1_ptr", "sum2_ptr", "sum3_ptr")
    pointers = dict(zip(names, (*sums[:count], None, None, None), strict=False))
    launch(
        _add_groups_kernel,
        (-(-width // 16), wanted),
        partial.device,
        partial_ptr=partial,
        **pointers,
        num_groups=groups,
        COUNT=count,
        WIDTH=width,
        BLOCK_R=block_r,
        BLOCK_E=16,
        num_warps=max(4, block_r // 64),
    )
