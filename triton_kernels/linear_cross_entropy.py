"""Linear layer and softmax cross-entropy in one pass over the vocabulary, forward and backward.

    Z = X W^T + b      loss_n = log(l_n) - sum_v q_nv (Z_nv - m_n)      P = exp(Z - m) / l
    q = (1 - s) onehot(target) + s / V        dZ = g (P - q)
    dX = dZ W          dW = dZ^T X            db = colsum(dZ)

where dZ[n, target_n] is taken as g (exp(log P[n, target_n]) - 1 + s - s / V), so that a row that is
certain of its target has gradient 0 whatever the rounding of its recomputed logits.

Source: Wijmans et al. 2024 (arXiv 2411.09009), algorithms 1-3, without gradient filtering (in
pre-training the softmax is flat); running maximum and sum as in Milakov and Gimelshein 2018
(arXiv 1805.02867). No sum needs an atomic, so every bit repeats.

Legend: N rows · V vocabulary · E row width · m row maximum · l row sum of exp(z - m), in natural
        units: z - m is taken before the factor log2(e) of exp2, so a large common offset of the
        logits costs no digits · s label smoothing · g upstream gradient of a row's loss · dz
        gradient of a logit · D = P - q, dZ at g = 1 · slot: a row's place among those that count

The rows that count are addressed through `order`, which lists them first, in their order; `count`
says how many there are and stays on the device. A tile past it ends at once, so ignored rows cost
nothing in the products and their content is never read.

Two data flows, each for its share of the slots:

Kept logits, for the first slots, as many as the caller expects to count and memory allows: Z, dX
and dW are plain products of a stored matrix, which the vendor's library makes over all these slots,
used or not. Between them one kernel walks along each row, twice: for its statistics, then to turn Z
into D in place (0 in unused slots). g waits on the rows of the other operand, so that the upstream
gradient need not be known before.

Recompute, for the others: Z is never stored, and no tile without a row that counts is computed. In
the forward a program owns a tile of rows and one split of the vocabulary; a second kernel combines
the splits. The backward of rows that one tile holds (E <= 128) computes Z again in registers, once
for the owner of dX, once for that of dW. Wider rows would do so for every tile of E; there, dZ is
computed once, by chunks of the vocabulary that a bounded scratch holds, and the products read it.

Sampling: a token of softmax(Z / T) by the inverse of its distribution function at one uniform
number a row. The forward leaves the sum of every tile; another kernel chooses the tile and, in it,
the token, from the kept logits or from those of that tile alone, computed again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from fastplm.triton_kernels._launch import (
    arch_of,
    cast,
    cdiv,
    dot,
    is_recording,
    launch,
    max_with_index,
    nearest_arch,
    next_power_of_2,
    upcast_dot,
)
from fastplm.triton_kernels._philox import philox

_LOG2E = tl.constexpr(1.4426950408889634)
# The stream of ``reference.philox.Stream.SAMPLE`` and the rounds of that file's default.
_SAMPLE_STREAM = tl.constexpr(2)
_ROUNDS = tl.constexpr(10)
# Before the order of rows stand two counts, int64, each at a multiple of 16 bytes.
_COUNT_STRIDE = tl.constexpr(2)
_ORDER_START = 2 * _COUNT_STRIDE.value

# Few enough columns to occupy a device with the 20 row tiles of a small batch, enough to amortise
# the partial results of a split. Not of N: how many rows count, only the device knows.
_SPLIT_COLUMNS = 4096
# Columns enough for the owners of dW to fill a large device, in at most 512 MiB of 16 bits; never
# more than a part of the vocabulary, or a small batch would hold all its logits after all.
_SCRATCH_ELEMENTS = 1 << 28
_SCRATCH_PARTS = 4
# The way inside a tile of 128 rows is counted in 32 bits.
_MAX_STRIDE = 1 << 23
# Elements of 16 bits in a vector of 16 bytes.
_VECTOR = 8
# Of the kernels that are one program: the order of rows, sums over rows.
_ORDER_BLOCK = 2048
_SUM_BLOCK = 8192

# (arch, 16-bit?, which) -> (BLOCK_N, BLOCK_V, BLOCK_E, num_warps, num_stages). BLOCK_E is the width
# that one tile holds, or for wide rows the part of it that passes by (forward, dZ) or is owned (dX,
# dW). "With more": argmax or label smoothing, or for dW the sum of another part, need registers.
# Not measured on a device yet: chosen with the compile lane, which holds them to no spills.
_CONFIGS = {
    (80, True, "forward 16"): (128, 64, 16, 4, 2),
    (80, True, "forward 32"): (128, 64, 32, 4, 2),
    (80, True, "forward 64"): (64, 64, 64, 4, 2),
    (80, True, "forward 128"): (128, 64, 128, 8, 2),
    (80, True, "dX 16"): (64, 64, 16, 4, 2),
    (80, True, "dX 32"): (64, 64, 32, 4, 2),
    (80, True, "dX 64"): (64, 64, 64, 4, 2),
    (80, True, "dX 128"): (64, 64, 128, 8, 2),
    (80, True, "dW 16"): (64, 64, 16, 4, 2),
    (80, True, "dW 32"): (64, 64, 32, 4, 2),
    (80, True, "dW 64"): (64, 64, 64, 4, 2),
    (80, True, "dW 128"): (64, 64, 128, 4, 2),
    (80, True, "wide forward"): (128, 128, 32, 8, 3),
    (80, True, "wide forward with more"): (128, 64, 32, 4, 3),
    (80, True, "wide dZ"): (128, 128, 32, 8, 3),
    (80, True, "wide dX"): (128, 64, 128, 8, 3),
    (80, True, "wide dW"): (64, 64, 128, 4, 2),
    (80, True, "wide dW with more"): (64, 64, 128, 4, 2),
    (80, False, "forward 16"): (64, 32, 16, 4, 1),
    (80, False, "forward 32"): (32, 64, 32, 4, 1),
    (80, False, "forward 64"): (32, 32, 64, 4, 1),
    (80, False, "forward 128"): (32, 32, 128, 8, 1),
    (80, False, "dX 16"): (32, 32, 16, 4, 1),
    (80, False, "dX 32"): (32, 32, 32, 4, 1),
    (80, False, "dX 64"): (32, 32, 64, 8, 1),
    (80, False, "dX 128"): (32, 32, 128, 8, 1),
    (80, False, "dW 16"): (32, 32, 16, 4, 1),
    (80, False, "dW 32"): (32, 32, 32, 4, 1),
    (80, False, "dW 64"): (32, 32, 64, 8, 1),
    (80, False, "dW 128"): (32, 32, 128, 8, 1),
    (80, False, "wide forward"): (64, 64, 32, 8, 2),
    (80, False, "wide forward with more"): (64, 64, 32, 8, 2),
    (80, False, "wide dZ"): (64, 64, 32, 8, 2),
    (80, False, "wide dX"): (64, 32, 64, 8, 2),
    (80, False, "wide dW"): (32, 64, 64, 8, 2),
    (80, False, "wide dW with more"): (32, 64, 64, 8, 1),
    # On sm_86 or sm_120 the tiles of sm_80 spill.
    (86, True, "forward 32"): (128, 32, 32, 4, 2),
    (86, True, "forward 128"): (128, 32, 128, 8, 2),
    (86, False, "wide forward"): (64, 64, 32, 8, 1),
    (86, False, "wide forward with more"): (64, 64, 32, 8, 1),
    (86, True, "wide forward with more"): (128, 32, 32, 4, 3),
    (86, False, "dX 128"): (32, 16, 128, 8, 1),
    (90, False, "dX 128"): (32, 32, 128, 8, 1),
    (90, False, "wide forward"): (64, 64, 32, 8, 2),
    (90, False, "wide forward with more"): (64, 64, 32, 8, 2),
    (90, True, "forward 32"): (128, 64, 32, 8, 2),
    (90, True, "forward 64"): (128, 128, 64, 8, 3),
    (90, True, "forward 128"): (128, 128, 128, 8, 3),
    (90, True, "dX 64"): (128, 64, 64, 8, 3),
    (90, True, "dX 128"): (128, 64, 128, 8, 3),
    (90, True, "dW 64"): (64, 128, 64, 8, 3),
    (90, True, "dW 128"): (64, 128, 128, 8, 3),
    (90, True, "wide forward"): (128, 128, 64, 8, 4),
    (90, True, "wide forward with more"): (128, 64, 64, 8, 4),
    (90, True, "wide dZ"): (128, 128, 64, 8, 4),
    (90, True, "wide dX"): (128, 64, 256, 8, 4),
    (90, True, "wide dW"): (64, 128, 256, 8, 4),
    (90, True, "wide dW with more"): (64, 128, 256, 8, 4),
    (100, True, "forward 16"): (128, 64, 16, 4, 2),
    (100, True, "forward 32"): (128, 64, 32, 4, 2),
    (100, True, "forward 64"): (128, 64, 64, 4, 3),
    (100, True, "forward 128"): (128, 64, 128, 8, 3),
    (100, True, "dX 16"): (64, 64, 16, 4, 2),
    (100, True, "dX 32"): (64, 64, 32, 4, 2),
    (100, True, "dX 64"): (128, 64, 64, 8, 3),
    (100, True, "dX 128"): (128, 64, 128, 8, 3),
    (100, True, "dW 16"): (64, 64, 16, 8, 2),
    (100, True, "dW 32"): (64, 64, 32, 8, 2),
    (100, True, "dW 64"): (64, 64, 64, 8, 3),
    (100, True, "dW 128"): (64, 64, 128, 8, 3),
    (100, True, "wide forward"): (128, 64, 64, 8, 4),
    (100, True, "wide forward with more"): (128, 64, 64, 8, 4),
    (100, True, "wide dZ"): (128, 128, 64, 8, 4),
    (100, True, "wide dX"): (128, 64, 128, 8, 4),
    (100, True, "wide dW"): (64, 128, 256, 8, 4),
    (100, True, "wide dW with more"): (64, 128, 128, 8, 4),
}
# Of the two kernels that only read and write stored logits (BLOCK_N, BLOCK_V, num_warps): 16 bytes
# a thread and load. Four rows an SM are 32 MB of BERT's vocabulary at once, which the L2 of an H100
# holds until they are read again; more of them, or of 100,000 words, it would not.
_ROW_CONFIGS = {
    (80, True): (1, 4096, 16),
    (80, False): (1, 4096, 16),
    (86, False): (1, 2048, 8),
    (90, False): (1, 4096, 16),
}
_BIAS_TILE = (128, 64, 4)
# Programs that dX of wide rows should have: a few for each SM of a large device.
_WANTED_PROGRAMS = 512


def _config(which: str, input: torch.Tensor) -> dict[str, int]:
    half, width = input.dtype.itemsize == 2, input.shape[1]
    if which in ("forward", "dX", "dW"):
        which = f"{which} {max(16, next_power_of_2(width))}"
    # Tools change the table between recordings.
    look_up = _look_up.__wrapped__ if is_recording() else _look_up
    return look_up(which, half, arch_of(input.device))


@functools.lru_cache
def _look_up(which: str, half: bool, arch: int) -> dict[str, int]:
    known = tuple(arch for arch, h, name in _CONFIGS if (h, name) == (half, which))
    config = _CONFIGS[nearest_arch(arch, known), half, which]
    names = ("BLOCK_N", "BLOCK_V", "BLOCK_E", "num_warps", "num_stages")
    return dict(zip(names, config, strict=True))


def _row_config(input: torch.Tensor) -> tuple[int, int, int]:
    half = input.dtype.itemsize == 2
    known = tuple(arch for arch, h in _ROW_CONFIGS if h == half)
    return _ROW_CONFIGS[nearest_arch(arch_of(input.device), known), half]


def _forward_config(more: bool, input: torch.Tensor) -> dict[str, int]:
    """``more``: argmax or label smoothing, which need registers."""
    which = "forward"
    if _is_wide(input.shape[1]):
        which = "wide forward with more" if more else "wide forward"
    return _config(which, input)


def _is_wide(width: int) -> bool:
    return width > 128


@triton.jit
def _load_tile(ptr, offs_r, mask_r, stride_r, start_e, E: tl.constexpr, BLOCK_E: tl.constexpr):
    """Rows ``offs_r``, columns ``start_e`` … of a [*, E] matrix, 0 where masked or past E."""
    offs_e = start_e + tl.arange(0, BLOCK_E)
    ptrs = ptr + offs_r.to(tl.int64)[:, None] * stride_r + offs_e[None, :]
    return tl.load(ptrs, mask=mask_r[:, None] & (offs_e < E)[None, :], other=0.0)


@triton.jit
def _tile_ptrs(ptr, start_r, start_c, stride_r, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    """[BLOCK_R, BLOCK_C] of a matrix; 64 bits for the corner, 32 for the way inside the tile."""
    ptr += (start_r + tl.zeros([], tl.int64)) * stride_r + start_c
    return ptr + (tl.arange(0, BLOCK_R)[:, None] * stride_r + tl.arange(0, BLOCK_C)[None, :])


@triton.jit
def _load_weight(
    w_ptr,
    start_v,
    V,
    stride_wv,
    start_e,
    E: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """A tile of W, 0 past V or E. [BLOCK_V, BLOCK_E]"""
    mask_v = start_v + tl.arange(0, BLOCK_V) < V
    mask_e = start_e + tl.arange(0, BLOCK_E) < E
    ptrs = _tile_ptrs(w_ptr, start_v, start_e, stride_wv, BLOCK_V, BLOCK_E)
    return tl.load(ptrs, mask=mask_v[:, None] & mask_e[None, :], other=0.0)


@triton.jit
def _load_slots(order_ptr, count, start_n, BLOCK_N: tl.constexpr):
    """(rows int64, used bool) of the slots ``start_n`` …, both [BLOCK_N]."""
    offs_n = start_n + tl.arange(0, BLOCK_N)
    used = offs_n < count
    return tl.load(order_ptr + offs_n, mask=used, other=0), used


@triton.jit
def _load_bias(bias_ptr, offs_v, V, HAS_BIAS: tl.constexpr):
    """[BLOCK_V] fp32: -inf past the vocabulary, which takes these columns out of the softmax."""
    exists = offs_v < V
    bias = tl.zeros(offs_v.shape, tl.float32)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + offs_v, mask=exists, other=0.0).to(tl.float32)
    return tl.where(exists, bias, float("-inf"))


@triton.jit
def _streamed_products(
    x_ptr,
    w_ptr,
    rows,
    used,
    start_v,
    V,
    stride_xn,
    stride_wv,
    E: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_E: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """X W^T of one tile, for rows wider than a tile: both operands pass by. [BLOCK_N, BLOCK_V]"""
    z = tl.zeros([rows.shape[0], BLOCK_V], tl.float32)
    for start_e in range(0, E, BLOCK_E):
        x = _load_tile(x_ptr, rows, used, stride_xn, start_e, E, BLOCK_E)  # [BLOCK_N, BLOCK_E]
        w = _load_weight(w_ptr, start_v, V, stride_wv, start_e, E, BLOCK_V, BLOCK_E)
        z = dot(x, tl.trans(w), z, UPCAST)
    return z


@triton.jit
def _fold_tile(
    z, m_i, l_i, total, argmax, start_v, seen, V, WITH_ARGMAX: tl.constexpr, SMOOTHED: tl.constexpr
):
    """What is known of the rows after one tile more, ``seen`` columns after the first.

    (z - m of that tile, its m, its sum of exponentials; then the four: m [BLOCK_N], l [BLOCK_N],
    sum of z - m of the columns seen [BLOCK_N], argmax int32 [BLOCK_N])
    """
    if WITH_ARGMAX:
        m_tile, index = max_with_index(z)
        argmax = tl.where(m_tile > m_i, start_v + index, argmax)
    else:
        m_tile = tl.max(z, 1)
    # -inf - -inf is NaN: a row that has seen no finite logit yet keeps a reference point of 0.
    m_new = tl.maximum(m_i, m_tile)
    m_ref = tl.where(m_new == float("-inf"), 0.0, m_new)
    z -= m_ref[:, None]
    if SMOOTHED:
        exists = start_v + tl.arange(0, z.shape[1]) < V
        m_old = tl.where(m_i == float("-inf"), 0.0, m_i)
        total += seen * (m_old - m_ref) + tl.sum(tl.where(exists[None, :], z, 0.0), 1)
    l_tile = tl.sum(tl.exp2(z * _LOG2E), 1)
    l_i = l_i * tl.exp2((m_i - m_ref) * _LOG2E) + l_tile
    return z, m_ref, l_tile, m_new, l_i, total, argmax


@triton.jit
def _store_statistics(
    loss_ptr,
    log_probability_ptr,
    max_ptr,
    sum_ptr,
    argmax_ptr,
    rows,
    exists,
    used,
    target,
    m_i,
    l_i,
    picked,
    total,
    argmax,
    V,
    label_smoothing,
    SMOOTHED: tl.constexpr,
):
    """What the forward says of a row; 0 (argmax -1) for ignored ones. (log p of the target, m)"""
    # No tile has met a target outside the vocabulary: a NaN maximum makes loss and gradients NaN.
    m_i = tl.where((target >= 0) & (target < V), m_i, float("nan"))
    loss = (m_i - picked) + tl.log(l_i)
    log_probability = 0.0 - loss
    tl.store(log_probability_ptr + rows, tl.where(used, log_probability, 0.0), mask=exists)
    if SMOOTHED:
        loss = (1.0 - label_smoothing) * loss + label_smoothing * (tl.log(l_i) - total / V)
    tl.store(loss_ptr + rows, tl.where(used, loss, 0.0), mask=exists)
    tl.store(max_ptr + rows, tl.where(used, m_i, 0.0), mask=exists)
    tl.store(sum_ptr + rows, tl.where(used, l_i, 0.0), mask=exists)
    if argmax_ptr is not None:
        tl.store(argmax_ptr + rows, tl.where(used, argmax, -1).to(tl.int64), mask=exists)
    return log_probability, m_i


@triton.jit(do_not_specialize=["kept_rows", "ignore_index"])
def _linear_cross_entropy_order_kernel(
    # pointers
    target_ptr,
    order_ptr,
    count_ptr,
    # sizes
    N,
    kept_rows,
    ignore_index,
    # constexprs
    BLOCK: tl.constexpr,
):
    """All rows, those that count first and in order; how many of these there are among the first
    ``kept_rows`` slots and after them."""
    count = tl.zeros([], tl.int32)
    for start in range(0, N, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        counts = offs < N
        counts = counts & (tl.load(target_ptr + offs, mask=counts, other=0) != ignore_index)
        count += tl.sum(counts.to(tl.int32), 0)
    head = tl.arange(0, 2 * _COUNT_STRIDE)
    both = tl.where(head == _COUNT_STRIDE, tl.maximum(count - kept_rows, 0), 0)
    both = tl.where(head == 0, tl.minimum(count, kept_rows), both)
    tl.store(count_ptr + head, both.to(tl.int64))

    first = tl.zeros([], tl.int32)  # slot of the next row that counts
    for start in range(0, N, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        exists = offs < N
        counts = exists & (tl.load(target_ptr + offs, mask=exists, other=0) != ignore_index)
        before = first + tl.cumsum(counts.to(tl.int32), 0) - counts.to(tl.int32)
        slot = tl.where(counts, before, count + offs - before)
        tl.store(order_ptr + slot, offs.to(tl.int64), mask=exists)
        first += tl.sum(counts.to(tl.int32), 0)


@triton.jit
def _linear_cross_entropy_mean_kernel(
    # pointers
    loss_ptr,
    count_ptr,
    normalizer_ptr,
    mean_ptr,
    denominator_ptr,
    # sizes
    N,
    # constexprs
    BLOCK: tl.constexpr,
):
    """The sum of all losses over how many rows count, or over a given number: 0 is taken for 1."""
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, N, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        total += tl.load(loss_ptr + offs, mask=offs < N, other=0.0)
    if normalizer_ptr is None:
        denominator = tl.load(count_ptr) + tl.load(count_ptr + _COUNT_STRIDE)
    else:
        denominator = tl.load(normalizer_ptr)
    denominator = denominator.to(tl.float32)
    denominator = tl.where(denominator == 0.0, 1.0, denominator)
    tl.store(denominator_ptr, denominator)
    tl.store(mean_ptr, tl.div_rn(tl.sum(total, 0), denominator))


@triton.jit(do_not_specialize=["stride_g"])
def _linear_cross_entropy_scale_kernel(
    # pointers
    g_ptr,
    order_ptr,
    count_ptr,
    scale_ptr,
    # strides
    stride_g,
    # constexprs
    BLOCK: tl.constexpr,
):
    """The largest |g| of the rows that count; a NaN stays."""
    scale = tl.zeros([BLOCK], tl.float32)
    count = tl.load(count_ptr).to(tl.int32)
    for start in range(0, count, BLOCK):
        rows, used = _load_slots(order_ptr, count, start, BLOCK)
        g = tl.abs(tl.load(g_ptr + rows * stride_g, mask=used, other=0.0))
        scale = tl.where((g > scale) | (g != g), g, scale)
    bad = tl.sum((scale != scale).to(tl.int32), 0) > 0
    tl.store(scale_ptr, tl.where(bad, float("nan"), tl.max(scale, 0)))


@triton.jit(do_not_specialize=["N"])
def _linear_cross_entropy_fwd_kernel(
    # pointers
    x_ptr,
    w_ptr,
    bias_ptr,
    target_ptr,
    order_ptr,
    count_ptr,
    split_max_ptr,
    split_sum_ptr,
    split_picked_ptr,
    split_total_ptr,
    split_argmax_ptr,
    tile_max_ptr,
    tile_sum_ptr,
    # sizes
    N,
    V,
    split_columns,
    inverse_temperature,
    # strides
    stride_xn,
    stride_wv,
    # constexprs
    E: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_E: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    TEMPERED: tl.constexpr,
    UPCAST: tl.constexpr,
):
    # Neighbouring programs share a split: its part of W comes from the L2.
    start_n, split = tl.program_id(0) * BLOCK_N, tl.program_id(1)
    count = tl.load(count_ptr).to(tl.int32)
    if start_n >= count:
        return
    rows, used = _load_slots(order_ptr, count, start_n, BLOCK_N)
    # A target that does not fit in 32 bits is out of range, which the combining kernel sees.
    target = tl.load(target_ptr + rows, mask=used, other=-1).to(tl.int32)
    if E <= BLOCK_E:
        x = _load_tile(x_ptr, rows, used, stride_xn, 0, E, BLOCK_E)  # [BLOCK_N, BLOCK_E]

    offs_n = start_n + tl.arange(0, BLOCK_N)
    m_i = tl.full([BLOCK_N], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_N], tl.float32)
    picked = tl.zeros([BLOCK_N], tl.float32)  # the logit of the target, from the tile that has it
    total = tl.zeros([BLOCK_N], tl.float32)  # sum of z - m, of the columns seen
    argmax = tl.zeros([BLOCK_N], tl.int32)
    first_v = tl.minimum(split * split_columns, V)
    num_tiles = tl.cdiv(tl.minimum(split_columns, V - first_v), BLOCK_V)
    offs_t = split.to(tl.int64) * (split_columns // BLOCK_V) * N + offs_n
    for tile in range(0, num_tiles):
        start_v = first_v + tile * BLOCK_V
        offs_v = start_v + tl.arange(0, BLOCK_V)
        if E <= BLOCK_E:
            w = _load_weight(w_ptr, start_v, V, stride_wv, 0, E, BLOCK_V, BLOCK_E)
            z = tl.zeros([BLOCK_N, BLOCK_V], tl.float32)
            z = dot(x, tl.trans(w), z, UPCAST)
        else:
            z = _streamed_products(
                x_ptr,
                w_ptr,
                rows,
                used,
                start_v,
                V,
                stride_xn,
                stride_wv,
                E,
                BLOCK_V,
                BLOCK_E,
                UPCAST,
            )
        z += _load_bias(bias_ptr, offs_v, V, HAS_BIAS)[None, :]  # [BLOCK_N, BLOCK_V]
        picked += tl.sum(tl.where(offs_v[None, :] == target[:, None], z, 0.0), 1)
        z, m_ref, l_tile, m_i, l_i, total, argmax = _fold_tile(
            z,
            m_i,
            l_i,
            total,
            argmax,
            start_v,
            tile * BLOCK_V,
            V,
            split_argmax_ptr is not None,
            split_total_ptr is not None,
        )
        if tile_sum_ptr is not None:
            if TEMPERED:
                l_tile = tl.sum(tl.exp2(z * (_LOG2E * inverse_temperature)), 1)
            tl.store(tile_max_ptr + offs_t, m_ref, mask=used)
            tl.store(tile_sum_ptr + offs_t, l_tile, mask=used)
            offs_t += N

    offs_s = split.to(tl.int64) * N + offs_n
    tl.store(split_max_ptr + offs_s, m_i, mask=used)
    tl.store(split_sum_ptr + offs_s, l_i, mask=used)
    tl.store(split_picked_ptr + offs_s, picked, mask=used)
    if split_total_ptr is not None:
        tl.store(split_total_ptr + offs_s, total, mask=used)
    if split_argmax_ptr is not None:
        tl.store(split_argmax_ptr + offs_s, argmax, mask=used)


@triton.jit(do_not_specialize=["N"])
def _linear_cross_entropy_combine_kernel(
    # pointers
    target_ptr,
    order_ptr,
    count_ptr,
    split_max_ptr,
    split_sum_ptr,
    split_picked_ptr,
    split_total_ptr,
    split_argmax_ptr,
    loss_ptr,
    log_probability_ptr,
    max_ptr,
    sum_ptr,
    argmax_ptr,
    # sizes
    N,
    V,
    split_columns,
    label_smoothing,
    # constexprs
    BLOCK_N: tl.constexpr,
):
    """What the forward says of each row, from its splits; 0 (argmax -1) for ignored rows."""
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    exists = offs_n < N
    used = offs_n < tl.load(count_ptr).to(tl.int32)
    rows = tl.load(order_ptr + offs_n, mask=exists, other=0)

    m_i = tl.full([BLOCK_N], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_N], tl.float32)
    picked = tl.zeros([BLOCK_N], tl.float32)
    total = tl.zeros([BLOCK_N], tl.float32)
    argmax = tl.zeros([BLOCK_N], tl.int32)
    offs_s = offs_n.to(tl.int64)
    for first_v in range(0, V, split_columns):
        m_s = tl.load(split_max_ptr + offs_s, mask=used, other=0.0)
        l_s = tl.load(split_sum_ptr + offs_s, mask=used, other=1.0)
        picked += tl.load(split_picked_ptr + offs_s, mask=used, other=0.0)
        if split_argmax_ptr is not None:
            index = tl.load(split_argmax_ptr + offs_s, mask=used, other=0)
            argmax = tl.where(m_s > m_i, index, argmax)
        m_new = tl.maximum(m_i, m_s)
        m_ref = tl.where(m_new == float("-inf"), 0.0, m_new)
        l_i = l_i * tl.exp2((m_i - m_ref) * _LOG2E) + l_s * tl.exp2((m_s - m_ref) * _LOG2E)
        if split_total_ptr is not None:
            columns = tl.minimum(split_columns, V - first_v)
            m_old = tl.where(m_i == float("-inf"), 0.0, m_i)
            m_split = tl.where(m_s == float("-inf"), 0.0, m_s)
            total += first_v * (m_old - m_ref) + columns * (m_split - m_ref)
            total += tl.load(split_total_ptr + offs_s, mask=used, other=0.0)
        m_i = m_new
        offs_s += N

    _store_statistics(
        loss_ptr,
        log_probability_ptr,
        max_ptr,
        sum_ptr,
        argmax_ptr,
        rows,
        exists,
        used,
        tl.load(target_ptr + rows, mask=used, other=0),
        m_i,
        l_i,
        picked,
        total,
        argmax,
        V,
        label_smoothing,
        split_total_ptr is not None,
    )


@triton.jit
def _kept_logits(
    z_ptr,
    bias_ptr,
    offs_n,
    used,
    start_v,
    V,
    stride_zn,
    BLOCK_V: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """A tile of stored products with their bias: -inf past V. [len(offs_n), BLOCK_V] fp32

    The rows are padded to whole cache lines, V is not: a load that ends there would be made of two
    bytes a time.
    """
    offs_v = start_v + tl.arange(0, BLOCK_V)
    ptrs = z_ptr + offs_n.to(tl.int64)[:, None] * stride_zn + offs_v[None, :]
    stored = used[:, None] & (offs_v < stride_zn)[None, :]
    z = tl.load(ptrs, mask=stored, other=0.0).to(tl.float32)
    if HAS_BIAS:
        if start_v + BLOCK_V <= V:
            bias = tl.load(bias_ptr + offs_v)
        else:
            bias = tl.load(bias_ptr + offs_v, mask=offs_v < V, other=0.0)
        z += bias.to(tl.float32)[None, :]
    return tl.where((offs_v < V)[None, :], z, float("-inf"))


@triton.jit(do_not_specialize=["N"])
def _linear_cross_entropy_rows_kernel(
    # pointers
    bias_ptr,
    target_ptr,
    order_ptr,
    count_ptr,
    loss_ptr,
    log_probability_ptr,
    max_ptr,
    sum_ptr,
    argmax_ptr,
    tile_max_ptr,
    tile_sum_ptr,
    z_ptr,
    # sizes
    N,
    V,
    label_smoothing,
    inverse_temperature,
    # strides
    stride_zn,
    # constexprs
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SMOOTHED: tl.constexpr,
    TEMPERED: tl.constexpr,
    READS: tl.constexpr,
    WRITES: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Rows of kept logits: their statistics (``READS``), then D in their place (``WRITES``).

    A sample is drawn between the two, in launches of their own. D of an unused slot is 0, whatever
    stands there, so that the products may run over it.
    """
    start_n = tl.program_id(0) * BLOCK_N
    offs_n = start_n + tl.arange(0, BLOCK_N)
    exists = offs_n < N
    count = tl.load(count_ptr).to(tl.int32)
    used = offs_n < count
    rows = tl.load(order_ptr + offs_n, mask=exists, other=0)
    target = tl.load(target_ptr + rows, mask=used, other=-1)
    if READS:
        # Before the loop, whose sums over the block hold barriers: by the time that one warp writes
        # D all others have read the logit of the target.
        met = used & (target >= 0) & (target < V)
        picked = tl.load(z_ptr + offs_n.to(tl.int64) * stride_zn + target, mask=met, other=0.0)
        picked = picked.to(tl.float32)
        if HAS_BIAS:
            picked += tl.load(bias_ptr + target, mask=met, other=0.0).to(tl.float32)
        m_i = tl.full([BLOCK_N], float("-inf"), tl.float32)
        l_i = tl.zeros([BLOCK_N], tl.float32)
        total = tl.zeros([BLOCK_N], tl.float32)  # sum of z - m, of the columns seen
        argmax = tl.zeros([BLOCK_N], tl.int32)
        offs_t = offs_n.to(tl.int64)
        for start_v in range(0, tl.where(start_n < count, V, 0), BLOCK_V):
            z = _kept_logits(
                z_ptr, bias_ptr, offs_n, used, start_v, V, stride_zn, BLOCK_V, HAS_BIAS
            )
            z, m_ref, l_tile, m_i, l_i, total, argmax = _fold_tile(
                z, m_i, l_i, total, argmax, start_v, start_v, V, argmax_ptr is not None, SMOOTHED
            )
            if tile_sum_ptr is not None:
                if TEMPERED:
                    l_tile = tl.sum(tl.exp2(z * (_LOG2E * inverse_temperature)), 1)
                tl.store(tile_max_ptr + offs_t, m_ref, mask=used)
                tl.store(tile_sum_ptr + offs_t, l_tile, mask=used)
                offs_t += N
        log_probability, m_i = _store_statistics(
            loss_ptr,
            log_probability_ptr,
            max_ptr,
            sum_ptr,
            argmax_ptr,
            rows,
            exists,
            used,
            target,
            m_i,
            l_i,
            picked,
            total,
            argmax,
            V,
            label_smoothing,
            SMOOTHED,
        )
    else:
        log_probability = tl.load(log_probability_ptr + rows, mask=used, other=0.0)
        m_i = tl.load(max_ptr + rows, mask=used, other=0.0)
        l_i = tl.load(sum_ptr + rows, mask=used, other=0.0)
    if WRITES:
        d_target, m_i, one_over_l, spread = _row_scalars(
            used.to(tl.float32), log_probability, m_i, l_i, used, V, label_smoothing, SMOOTHED
        )
        for start_v in range(0, V, BLOCK_V):
            z = _kept_logits(
                z_ptr, bias_ptr, offs_n, used, start_v, V, stride_zn, BLOCK_V, HAS_BIAS
            )
            offs_v = start_v + tl.arange(0, BLOCK_V)
            d = _grad_logits(
                z,
                offs_v[None, :],
                target.to(tl.int32)[:, None],
                d_target[:, None],
                m_i[:, None],
                one_over_l[:, None],
                spread[:, None],
                SMOOTHED,
            )
            d = tl.where(used[:, None] & (offs_v < V)[None, :], d, 0.0)
            ptrs = z_ptr + offs_n.to(tl.int64)[:, None] * stride_zn + offs_v[None, :]
            mask = exists[:, None] & (offs_v < stride_zn)[None, :]
            tl.store(ptrs, cast(d, z_ptr.dtype.element_ty, UPCAST), mask=mask)


@triton.jit
def _uniform(seed_ptr, sample_index_ptr, position_ptr, row):
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
def _inverse_cdf(p, level, offs):
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
    slot = tl.program_id(0)
    row = tl.load(order_ptr + slot)
    if slot >= tl.load(count_ptr).to(tl.int32):
        tl.store(sample_ptr + row, -1)
        return
    level = _uniform(seed_ptr, sample_index_ptr, position_ptr, row)
    scale = _LOG2E * inverse_temperature

    offs_t = tl.arange(0, BLOCK_T)
    mask_t = offs_t < num_tiles
    offs_s = offs_t.to(tl.int64) * N + slot
    m_t = tl.load(tile_max_ptr + offs_s, mask=mask_t, other=float("-inf"))  # [BLOCK_T]
    l_t = tl.load(tile_sum_ptr + offs_s, mask=mask_t, other=0.0)
    m = tl.max(m_t, 0)
    weight = l_t * tl.exp2((m_t - m) * scale)
    tile, rest, total = _inverse_cdf(tl.where(mask_t, weight, 0.0), level, offs_t)

    offs_v = tile * BLOCK_V + tl.arange(0, BLOCK_V)
    mask_v = offs_v < V
    z = _load_bias(bias_ptr, offs_v, V, HAS_BIAS)  # [BLOCK_V]
    if z_ptr is not None:
        ptrs = z_ptr + slot.to(tl.int64) * stride_zn + offs_v
        z += tl.load(ptrs, mask=mask_v, other=0.0).to(tl.float32)
    else:
        for start_e in range(0, E, BLOCK_E):
            offs_e = start_e + tl.arange(0, BLOCK_E)
            x = tl.load(x_ptr + row * stride_xn + offs_e, mask=offs_e < E, other=0.0)  # [BLOCK_E]
            w = _load_weight(w_ptr, tile * BLOCK_V, V, stride_wv, start_e, E, BLOCK_V, BLOCK_E)
            z += tl.sum(w.to(tl.float32) * x.to(tl.float32)[None, :], 1)
    # Relative to this tile's own maximum: one far below the row's would underflow.
    m_z = tl.max(z, 0)
    p = tl.exp2((z - tl.where(m_z == float("-inf"), 0.0, m_z)) * scale)
    column, _, _ = _inverse_cdf(p, rest, tl.arange(0, BLOCK_V))
    # An infinity minus itself: NaN reaches the total, and so does an infinite sum.
    finite = (total == total) & (total < float("inf"))
    token = tl.where(finite, tile * BLOCK_V + column, 0)
    tl.store(sample_ptr + row, token.to(tl.int64))


@triton.jit
def _load_row_scalars(
    target_ptr,
    g_ptr,
    log_probability_ptr,
    max_ptr,
    sum_ptr,
    rows,
    used,
    V,
    label_smoothing,
    stride_g,
    SMOOTHED: tl.constexpr,
):
    """(target, dz of the target, m, g / l, g s / V) of a tile of rows; see ``_row_scalars``."""
    target = tl.load(target_ptr + rows, mask=used, other=-1).to(tl.int32)
    g = tl.load(g_ptr + rows * stride_g, mask=used, other=0.0)
    log_probability = tl.load(log_probability_ptr + rows, mask=used, other=0.0)
    m = tl.load(max_ptr + rows, mask=used, other=0.0)
    l_i = tl.load(sum_ptr + rows, mask=used, other=0.0)
    dz_target, m, g_over_l, spread = _row_scalars(
        g, log_probability, m, l_i, used, V, label_smoothing, SMOOTHED
    )
    return target, dz_target, m, g_over_l, spread


@triton.jit
def _row_scalars(g, log_probability, m, l_i, used, V, label_smoothing, SMOOTHED: tl.constexpr):
    """(dz of the target, m, g / l, g s / V) of a tile of rows; an unused slot has dz = 0."""
    # exp2(-inf) is 0 whatever the bias; any finite maximum could overflow to inf * 0.
    m = tl.where(used, m, float("inf"))
    l_i = tl.where(used, l_i, 1.0)
    d_target = tl.exp2(log_probability * _LOG2E) - 1.0
    spread = g * 0.0
    if SMOOTHED:
        spread = g * (label_smoothing / V)
        d_target += label_smoothing - label_smoothing / V
    return g * d_target, m, g / l_i, spread


@triton.jit
def _grad_logits(z, offs_v, target, dz_target, m, g_over_l, spread, SMOOTHED: tl.constexpr):
    """g (P - q) of one tile; the vectors come expanded, so either orientation will do."""
    dz = tl.exp2((z - m) * _LOG2E) * g_over_l
    if SMOOTHED:
        dz -= spread
    return tl.where(offs_v == target, dz_target, dz)


@triton.jit
def _linear_cross_entropy_bwd_logits_kernel(
    # pointers
    x_ptr,
    w_ptr,
    bias_ptr,
    target_ptr,
    order_ptr,
    count_ptr,
    g_ptr,
    log_probability_ptr,
    max_ptr,
    sum_ptr,
    dz_ptr,
    # sizes
    V,
    chunk_start,
    label_smoothing,
    # strides
    stride_xn,
    stride_wv,
    stride_dzn,
    stride_g,
    # constexprs
    E: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_E: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SMOOTHED: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """One tile of dZ into the scratch, which holds the columns from ``chunk_start`` on."""
    start_n, start_c = tl.program_id(0) * BLOCK_N, tl.program_id(1) * BLOCK_V
    count = tl.load(count_ptr).to(tl.int32)
    if start_n >= count:
        return
    rows, used = _load_slots(order_ptr, count, start_n, BLOCK_N)
    offs_c = start_c + tl.arange(0, BLOCK_V)
    offs_v = chunk_start + offs_c
    z = _streamed_products(
        x_ptr,
        w_ptr,
        rows,
        used,
        chunk_start + start_c,
        V,
        stride_xn,
        stride_wv,
        E,
        BLOCK_V,
        BLOCK_E,
        UPCAST,
    )
    z += _load_bias(bias_ptr, offs_v, V, HAS_BIAS)[None, :]  # [BLOCK_N, BLOCK_V]
    target, dz_target, m, g_over_l, spread = _load_row_scalars(
        target_ptr,
        g_ptr,
        log_probability_ptr,
        max_ptr,
        sum_ptr,
        rows,
        used,
        V,
        label_smoothing,
        stride_g,
        SMOOTHED,
    )
    dz = _grad_logits(
        z,
        offs_v[None, :],
        target[:, None],
        dz_target[:, None],
        m[:, None],
        g_over_l[:, None],
        spread[:, None],
        SMOOTHED,
    )
    ptrs = _tile_ptrs(dz_ptr, start_n, start_c, stride_dzn, BLOCK_N, BLOCK_V)
    tl.store(ptrs, dz.to(dz_ptr.dtype.element_ty), mask=used[:, None])


@triton.jit(do_not_specialize=["N"])
def _linear_cross_entropy_bwd_input_kernel(
    # pointers
    x_ptr,
    w_ptr,
    bias_ptr,
    target_ptr,
    order_ptr,
    count_ptr,
    g_ptr,
    log_probability_ptr,
    max_ptr,
    sum_ptr,
    dz_ptr,
    split_dx_ptr,
    # sizes
    N,
    V,
    chunk_start,
    chunk_columns,
    split_columns,
    label_smoothing,
    # strides
    stride_xn,
    stride_wv,
    stride_dzn,
    stride_g,
    # constexprs
    E: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_E: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SMOOTHED: tl.constexpr,
    FROM_SCRATCH: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """One tile of dX, by slot and in fp32: over one split or, from scratch, over one chunk more."""
    start_n, start_e = tl.program_id(0) * BLOCK_N, tl.program_id(1) * BLOCK_E
    split = tl.program_id(2)
    count = tl.load(count_ptr).to(tl.int32)
    if start_n >= count:
        return
    rows, used = _load_slots(order_ptr, count, start_n, BLOCK_N)
    split_dx_ptr += split.to(tl.int64) * N * E
    mask_dx = used[:, None] & (start_e + tl.arange(0, BLOCK_E) < E)[None, :]
    dx = tl.zeros([BLOCK_N, BLOCK_E], tl.float32)
    if chunk_start > 0:  # each further chunk starts from what the last one left
        dx_ptrs = _tile_ptrs(split_dx_ptr, start_n, start_e, E, BLOCK_N, BLOCK_E)
        dx = tl.load(dx_ptrs, mask=mask_dx, other=0.0)
    if not FROM_SCRATCH:
        x = _load_tile(x_ptr, rows, used, stride_xn, 0, E, BLOCK_E)  # [BLOCK_N, BLOCK_E]
        target, dz_target, m, g_over_l, spread = _load_row_scalars(
            target_ptr,
            g_ptr,
            log_probability_ptr,
            max_ptr,
            sum_ptr,
            rows,
            used,
            V,
            label_smoothing,
            stride_g,
            SMOOTHED,
        )

    first_v = chunk_start + split * split_columns
    end_v = tl.minimum(tl.minimum(first_v + split_columns, chunk_start + chunk_columns), V)
    for start_v in range(first_v, end_v, BLOCK_V):
        w = _load_weight(w_ptr, start_v, V, stride_wv, start_e, E, BLOCK_V, BLOCK_E)
        if FROM_SCRATCH:
            start_c = start_v - chunk_start
            ptrs = _tile_ptrs(dz_ptr, start_n, start_c, stride_dzn, BLOCK_N, BLOCK_V)
            dz = tl.load(ptrs, mask=used[:, None], other=0.0)  # [BLOCK_N, BLOCK_V]
        else:
            offs_v = start_v + tl.arange(0, BLOCK_V)
            z = tl.zeros([BLOCK_N, BLOCK_V], tl.float32)
            z = dot(x, tl.trans(w), z, UPCAST)
            z += _load_bias(bias_ptr, offs_v, V, HAS_BIAS)[None, :]
            dz = _grad_logits(
                z,
                offs_v[None, :],
                target[:, None],
                dz_target[:, None],
                m[:, None],
                g_over_l[:, None],
                spread[:, None],
                SMOOTHED,
            )
        dx = dot(dz.to(w.dtype), w, dx, UPCAST)
    dx_ptrs = _tile_ptrs(split_dx_ptr, start_n, start_e, E, BLOCK_N, BLOCK_E)
    tl.store(dx_ptrs, dx, mask=mask_dx)


@triton.jit(do_not_specialize=["N"])
def _linear_cross_entropy_reduce_input_kernel(
    # pointers
    order_ptr,
    count_ptr,
    split_dx_ptr,
    g_ptr,
    dx_ptr,
    # sizes
    N,
    num_splits,
    # strides
    stride_g,
    # constexprs
    E: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """dX from slots to rows, its splits summed in order, times g if given; 0 for ignored rows."""
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_e = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    exists = (offs_n < N)[:, None] & (offs_e < E)[None, :]
    used = exists & (offs_n < tl.load(count_ptr).to(tl.int32))[:, None]
    dx = tl.zeros([BLOCK_N, BLOCK_E], tl.float32)
    offs_s = offs_n.to(tl.int64)
    for _ in range(0, num_splits):
        ptrs = split_dx_ptr + offs_s[:, None] * E + offs_e[None, :]
        dx += tl.load(ptrs, mask=used, other=0.0)
        offs_s += N
    rows = tl.load(order_ptr + offs_n, mask=offs_n < N, other=0)
    if g_ptr is not None:
        g = tl.load(g_ptr + rows * stride_g, mask=offs_n < N, other=0.0)
        dx = tl.where(used, dx * g[:, None], 0.0)
    tl.store(
        dx_ptr + rows[:, None] * E + offs_e[None, :], dx.to(dx_ptr.dtype.element_ty), mask=exists
    )


@triton.jit
def _linear_cross_entropy_bwd_weight_kernel(
    # pointers
    x_ptr,
    w_ptr,
    bias_ptr,
    target_ptr,
    order_ptr,
    count_ptr,
    g_ptr,
    log_probability_ptr,
    max_ptr,
    sum_ptr,
    dz_ptr,
    dw_ptr,
    db_ptr,
    # sizes
    V,
    chunk_start,
    label_smoothing,
    # strides
    stride_xn,
    stride_wv,
    stride_dzn,
    stride_g,
    # constexprs
    E: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_E: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SMOOTHED: tl.constexpr,
    FROM_SCRATCH: tl.constexpr,
    ACCUMULATES: tl.constexpr,
    NEED_WEIGHT: tl.constexpr,
    NEED_BIAS: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """One tile of dW over all rows that count, in order; of db, too, where dZ is in registers.

    A load that feeds a sum beside the product would race: Triton (3.6 to 3.9, sm_90) gives it too
    few buffers for a product that still runs.
    """
    tl.static_assert(not (FROM_SCRATCH and NEED_BIAS))
    start_c, start_e = tl.program_id(0) * BLOCK_V, tl.program_id(1) * BLOCK_E
    count = tl.load(count_ptr).to(tl.int32)
    if ACCUMULATES and count == 0:
        return
    offs_c = start_c + tl.arange(0, BLOCK_V)
    offs_v = chunk_start + offs_c
    mask_v = offs_v < V
    mask_dw = mask_v[:, None] & (start_e + tl.arange(0, BLOCK_E) < E)[None, :]
    if not FROM_SCRATCH:
        w = _load_weight(w_ptr, chunk_start + start_c, V, stride_wv, 0, E, BLOCK_V, BLOCK_E)
        bias = _load_bias(bias_ptr, offs_v, V, HAS_BIAS)
    dw = tl.zeros([BLOCK_V, BLOCK_E], tl.float32)
    db = tl.zeros([BLOCK_V], tl.float32)
    if ACCUMULATES:  # what the rows of the other data flow left
        dw_ptrs = _tile_ptrs(dw_ptr, chunk_start + start_c, start_e, E, BLOCK_V, BLOCK_E)
        dw = tl.load(dw_ptrs, mask=mask_dw, other=0.0)

    next_rows, next_used = _load_slots(order_ptr, count, 0, BLOCK_N)
    for start_n in range(0, count, BLOCK_N):
        rows, used = next_rows, next_used
        # Asked for a tile before they are needed: copies that begin with a look at the order run
        # one iteration ahead, whatever the stages. Beside dZ in registers that would spill.
        if FROM_SCRATCH:
            next_rows, next_used = _load_slots(order_ptr, count, start_n + BLOCK_N, BLOCK_N)
        else:
            rows, used = _load_slots(order_ptr, count, start_n, BLOCK_N)
        x = _load_tile(x_ptr, rows, used, stride_xn, start_e, E, BLOCK_E)  # [BLOCK_N, BLOCK_E]
        # dZ is made transposed, so that it is the left operand of the second product as it stands.
        if FROM_SCRATCH:
            ptrs = _tile_ptrs(dz_ptr, start_n, start_c, stride_dzn, BLOCK_N, BLOCK_V)
            dz_t = tl.trans(tl.load(ptrs, mask=used[:, None], other=0.0))  # [BLOCK_V, BLOCK_N]
        else:
            z_t = tl.zeros([BLOCK_V, BLOCK_N], tl.float32)
            z_t = dot(w, tl.trans(x), z_t, UPCAST) + bias[:, None]
            target, dz_target, m, g_over_l, spread = _load_row_scalars(
                target_ptr,
                g_ptr,
                log_probability_ptr,
                max_ptr,
                sum_ptr,
                rows,
                used,
                V,
                label_smoothing,
                stride_g,
                SMOOTHED,
            )
            dz_t = _grad_logits(
                z_t,
                offs_v[:, None],
                target[None, :],
                dz_target[None, :],
                m[None, :],
                g_over_l[None, :],
                spread[None, :],
                SMOOTHED,
            )
        if NEED_WEIGHT:
            dw = dot(dz_t.to(x.dtype), x, dw, UPCAST)
        if NEED_BIAS:
            db += tl.sum(dz_t, 1)

    if NEED_WEIGHT:
        dw_ptrs = _tile_ptrs(dw_ptr, chunk_start + start_c, start_e, E, BLOCK_V, BLOCK_E)
        tl.store(dw_ptrs, dw.to(dw_ptr.dtype.element_ty), mask=mask_dw)
    if NEED_BIAS:
        # Every tile of E has the same sum. A vector is compared: Triton 3.9's interpreter takes no
        # scalar comparison in a mask.
        first = start_e + tl.zeros([BLOCK_V], tl.int32) == 0
        tl.store(db_ptr + offs_v, db.to(db_ptr.dtype.element_ty), mask=mask_v & first)


@triton.jit(do_not_specialize=["N"])
def _linear_cross_entropy_slots_kernel(
    # pointers
    x_ptr,
    order_ptr,
    count_ptr,
    g_ptr,
    scale_ptr,
    share_ptr,
    slots_ptr,
    # sizes
    N,
    # strides
    stride_xn,
    stride_g,
    # constexprs
    E: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_E: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Rows of X by slot, 0 in unused ones; with ``g_ptr`` times their share of g, g / scale."""
    start_n = tl.program_id(0) * BLOCK_N
    count = tl.load(count_ptr).to(tl.int32)
    rows, used = _load_slots(order_ptr, count, start_n, BLOCK_N)
    x = _load_tile(x_ptr, rows, used, stride_xn, tl.program_id(1) * BLOCK_E, E, BLOCK_E)
    x = x.to(tl.float32)  # [BLOCK_N, BLOCK_E]
    offs_n = start_n + tl.arange(0, BLOCK_N)
    offs_e = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    if g_ptr is not None:
        scale = tl.load(scale_ptr)
        share = tl.load(g_ptr + rows * stride_g, mask=used, other=0.0)
        share = tl.div_rn(share, tl.where(scale == 0.0, 1.0, scale))
        x *= share[:, None]
        tl.store(share_ptr + offs_n, share, mask=offs_n < N)
    ptrs = slots_ptr + offs_n.to(tl.int64)[:, None] * E + offs_e[None, :]
    exists = (offs_n < N)[:, None] & (offs_e < E)[None, :]
    tl.store(ptrs, cast(x, slots_ptr.dtype.element_ty, UPCAST), mask=exists)


@triton.jit
def _linear_cross_entropy_bwd_bias_kernel(
    # pointers
    dz_ptr,
    count_ptr,
    share_ptr,
    scale_ptr,
    db_ptr,
    # sizes
    V,
    chunk_start,
    # strides
    stride_dzn,
    # constexprs
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    ACCUMULATES: tl.constexpr,
):
    """db of one tile of columns from stored dZ, or D and the rows' shares of g, in their order.

    The stored rows are whole tiles: past V there is nothing to sum, but something to read.
    """
    start_c = tl.program_id(0) * BLOCK_V
    offs_v = chunk_start + start_c + tl.arange(0, BLOCK_V)
    mask_v = offs_v < V
    count = tl.load(count_ptr).to(tl.int32)
    db = tl.zeros([BLOCK_V], tl.float32)
    for start_n in range(0, count, BLOCK_N):
        offs_n = start_n + tl.arange(0, BLOCK_N)
        used = offs_n < count
        ptrs = _tile_ptrs(dz_ptr, start_n, start_c, stride_dzn, BLOCK_N, BLOCK_V)
        dz = tl.load(ptrs, mask=used[:, None], other=0.0).to(tl.float32)
        if share_ptr is not None:
            dz *= tl.load(share_ptr + offs_n, mask=used, other=0.0)[:, None]
        db += tl.sum(dz, 0)
    if scale_ptr is not None:
        db *= tl.load(scale_ptr)
    if ACCUMULATES:  # what the rows of the other data flow left
        db += tl.load(db_ptr + offs_v, mask=mask_v, other=0.0)
    tl.store(db_ptr + offs_v, db.to(db_ptr.dtype.element_ty), mask=mask_v)


class _Part(NamedTuple):
    """Slots of rows that take one of the data flows: those that count come first."""

    order: torch.Tensor
    count: torch.Tensor
    kept: bool

    @property
    def rows(self) -> int:
        return self.order.shape[0]

    def arguments(self) -> dict[str, torch.Tensor]:
        return dict(order_ptr=self.order, count_ptr=self.count)


def _order(target: torch.Tensor, ignore_index: int, kept_rows: int, order: torch.Tensor) -> None:
    """Launch what writes ``order`` [4 + N] int64: two counts (see ``_parts``), then all rows."""
    launch(
        _linear_cross_entropy_order_kernel,
        (1,),
        target.device,
        target_ptr=target,
        order_ptr=order[_ORDER_START:],
        count_ptr=order,
        N=target.shape[0],
        kept_rows=kept_rows,
        ignore_index=ignore_index,
        BLOCK=_ORDER_BLOCK,
        num_warps=8,
    )


def _parts(order: torch.Tensor, kept_rows: int) -> list[_Part]:
    """The slots that keep their logits and those that do not, without a host sync."""
    rows = order.shape[0] - _ORDER_START
    parts = []
    if kept_rows:
        parts.append(_Part(order[_ORDER_START : _ORDER_START + kept_rows], order, True))
    if kept_rows < rows:
        order, count = order[_ORDER_START + kept_rows :], order[_COUNT_STRIDE.value :]
        parts.append(_Part(order, count, False))
    return parts


def _operands(
    input: torch.Tensor,
    linear_weight: torch.Tensor,
    linear_bias: torch.Tensor | None,
    parts: list[_Part],
) -> dict[str, Any]:
    """The keywords that all product kernels share; those of rows that keep nothing read W."""
    if not all(part.kept for part in parts):
        linear_weight = linear_weight.to(input.dtype)
    if linear_weight.stride(0) >= _MAX_STRIDE:
        linear_weight = linear_weight.contiguous()
    return dict(
        x_ptr=input,
        w_ptr=linear_weight,
        # Without a bias the pointer is never read; any tensor will do.
        bias_ptr=linear_weight if linear_bias is None else linear_bias,
        V=linear_weight.shape[0],
        stride_xn=input.stride(0),
        stride_wv=linear_weight.stride(0),
        E=input.shape[1],
        HAS_BIAS=linear_bias is not None,
        UPCAST=upcast_dot(input.dtype),
    )


def _split_columns(block_v: int) -> int:
    return cdiv(_SPLIT_COLUMNS, block_v) * block_v


def _padded(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """W in ``dtype``, with rows of 0 up to a multiple of 8.

    The vendor's kernels want every side of a matrix in whole vectors of 16 bytes.
    """
    vocab, width = weight.shape
    if vocab % _VECTOR == 0:
        return weight.to(dtype)
    padded = weight.new_empty(_whole_vectors(vocab), width, dtype=dtype)
    padded[:vocab] = weight
    padded[vocab:] = 0.0
    return padded


def _whole_vectors(columns: int) -> int:
    return cdiv(columns, _VECTOR) * _VECTOR


def _multiply(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    """``out[...] = a @ b`` by the vendor's library, ``out`` in the dtype of ``a`` or fp32.

    How it sums is what ``torch.backends.cuda.matmul`` allows, as in ``nn.Linear``: in fp32, of fp32
    in TF32 if asked; parts of a sum that it splits may be added up in 16 bits.
    """
    if out.device.type == "meta":
        return
    if out.device.type == "cpu":  # the interpreter's: products of 16 bits would be slow, or rounded
        for some, result in zip(a.split(32), out.split(32), strict=True):
            result.copy_(some.float() @ b.float())
    elif out.dtype is a.dtype:
        torch.mm(a, b, out=out)
    elif a.dtype is torch.float16 and torch.backends.cuda.matmul.allow_fp16_accumulation:
        out.copy_(a @ b)  # whoever allows that gets no other sum from PyTorch
    else:
        torch.mm(a, b, out_dtype=out.dtype, out=out)


def linear_cross_entropy_fwd(
    loss: torch.Tensor,
    log_probability: torch.Tensor,
    row_max: torch.Tensor,
    row_sum: torch.Tensor,
    argmax: torch.Tensor,
    sample: torch.Tensor,
    grad_logits: torch.Tensor,
    slots: torch.Tensor,
    order: torch.Tensor,
    *,
    input: torch.Tensor,
    linear_weight: torch.Tensor,
    linear_bias: torch.Tensor | None,
    target: torch.Tensor,
    seed: torch.Tensor | None,
    sample_index: torch.Tensor | None,
    position: torch.Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    temperature: float,
    need_argmax: bool,
    kept_rows: int,
) -> None:
    """Launch the forward, which writes the nine tensors before the keywords.

    Statistics fp32 [N]; argmax and sample int64 [N], or without elements; ``grad_logits``
    [kept_rows, V padded] in the dtype of ``input``, or without elements. What a backward reads
    again: the rows that keep their logits, ``slots`` [kept_rows, E]; ``order`` int64 [4 + N].
    """
    _order(target, ignore_index, kept_rows, order)
    parts = _parts(order, kept_rows)
    operands = _operands(input, linear_weight, linear_bias, parts)
    statistics = dict(
        target_ptr=target,
        loss_ptr=loss,
        log_probability_ptr=log_probability,
        max_ptr=row_max,
        sum_ptr=row_sum,
        argmax_ptr=argmax if need_argmax else None,
        label_smoothing=label_smoothing,
    )
    draw = None
    if seed is not None:
        draw = dict(
            seed_ptr=seed,
            sample_index_ptr=sample_index,
            position_ptr=position,
            sample_ptr=sample,
            inverse_temperature=1.0 / temperature,
        )
    for part in parts:
        if part.kept:
            _forward_kept(part, linear_weight, operands, statistics, draw, grad_logits, slots)
        else:
            _forward_recomputed(part, operands, statistics, draw)


def mean(
    loss: torch.Tensor, order: torch.Tensor, normalizer: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the mean of the losses [N] of a forward: it and what it divides by, fp32 []."""
    mean, denominator = (loss.new_empty(()) for _ in range(2))
    launch(
        _linear_cross_entropy_mean_kernel,
        (1,),
        loss.device,
        loss_ptr=loss,
        count_ptr=order,
        normalizer_ptr=normalizer,
        mean_ptr=mean,
        denominator_ptr=denominator,
        N=loss.shape[0],
        BLOCK=_SUM_BLOCK,
        num_warps=16,
    )
    return mean, denominator


def _forward_kept(
    part: _Part,
    weight: torch.Tensor,
    operands: dict[str, Any],
    statistics: dict[str, Any],
    draw: dict[str, Any] | None,
    grad_logits: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """Launch the forward of the rows that keep their logits, which end as D in ``grad_logits``."""
    input, vocab = operands["x_ptr"], operands["V"]
    _slots(part, operands, slots)
    _multiply(slots, _padded(weight, input.dtype).t(), grad_logits[:, : _whole_vectors(vocab)])
    block_n, block_v, num_warps = _row_config(input)
    tiles = cdiv(vocab, block_v)
    tile_max, tile_sum = (
        None if draw is None else input.new_empty(tiles, part.rows, dtype=torch.float32)
        for _ in range(2)
    )
    inverse_temperature = 1.0 if draw is None else draw["inverse_temperature"]

    def walk(**what: bool) -> None:
        launch(
            _linear_cross_entropy_rows_kernel,
            (cdiv(part.rows, block_n),),
            input.device,
            bias_ptr=operands["bias_ptr"],
            tile_max_ptr=tile_max,
            tile_sum_ptr=tile_sum,
            z_ptr=grad_logits,
            N=part.rows,
            V=vocab,
            inverse_temperature=inverse_temperature,
            stride_zn=grad_logits.stride(0),
            BLOCK_N=block_n,
            BLOCK_V=block_v,
            HAS_BIAS=operands["HAS_BIAS"],
            SMOOTHED=statistics["label_smoothing"] > 0,
            TEMPERED=inverse_temperature != 1.0,
            UPCAST=operands["UPCAST"],
            num_warps=num_warps,
            **what,
            **part.arguments(),
            **statistics,
        )

    if draw is None:
        walk(READS=True, WRITES=True)
    else:
        walk(READS=True, WRITES=False)
        _sample(part, operands, draw, tile_max, tile_sum, block_v, grad_logits)
        walk(READS=False, WRITES=True)


def _slots(
    part: _Part,
    operands: dict[str, Any],
    slots: torch.Tensor,
    g: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    share: torch.Tensor | None = None,
) -> None:
    """Launch what moves the rows that count into their slots, [slots, E]."""
    input, width = operands["x_ptr"], operands["E"]
    launch(
        _linear_cross_entropy_slots_kernel,
        (cdiv(part.rows, 32), cdiv(width, 64)),
        input.device,
        x_ptr=input,
        slots_ptr=slots,
        g_ptr=g,
        scale_ptr=scale,
        share_ptr=share,
        N=part.rows,
        stride_xn=input.stride(0),
        stride_g=0 if g is None else g.stride(0),
        E=width,
        BLOCK_N=32,
        BLOCK_E=64,
        UPCAST=operands["UPCAST"],
        **part.arguments(),
    )


def _forward_recomputed(
    part: _Part,
    operands: dict[str, Any],
    statistics: dict[str, Any],
    draw: dict[str, Any] | None,
) -> None:
    """Launch the forward of the rows whose logits are never stored."""
    input, rows, vocab = operands["x_ptr"], part.rows, operands["V"]
    with_argmax, smoothed = (
        statistics["argmax_ptr"] is not None,
        statistics["label_smoothing"] > 0,
    )
    config = _forward_config(with_argmax or smoothed, input)
    columns = _split_columns(config["BLOCK_V"])
    splits, tiles = cdiv(vocab, columns), cdiv(vocab, config["BLOCK_V"])

    def partial(count: int, needed: bool = True, dtype: torch.dtype = torch.float32) -> Any:
        return input.new_empty(count, rows, dtype=dtype) if needed else None

    inverse_temperature = 1.0 if draw is None else draw["inverse_temperature"]
    tile_max, tile_sum = (partial(tiles, draw is not None) for _ in range(2))
    partials = dict(
        split_max_ptr=partial(splits),
        split_sum_ptr=partial(splits),
        split_picked_ptr=partial(splits),
        split_total_ptr=partial(splits, smoothed),
        split_argmax_ptr=partial(splits, with_argmax, torch.int32),
    )
    launch(
        _linear_cross_entropy_fwd_kernel,
        (cdiv(rows, config["BLOCK_N"]), splits),
        input.device,
        target_ptr=statistics["target_ptr"],
        tile_max_ptr=tile_max,
        tile_sum_ptr=tile_sum,
        N=rows,
        split_columns=columns,
        inverse_temperature=inverse_temperature,
        TEMPERED=inverse_temperature != 1.0,
        **part.arguments(),
        **partials,
        **operands,
        **config,
    )
    launch(
        _linear_cross_entropy_combine_kernel,
        (cdiv(rows, 128),),
        input.device,
        N=rows,
        V=vocab,
        split_columns=columns,
        BLOCK_N=128,
        **part.arguments(),
        **partials,
        **statistics,
    )
    if draw is not None:
        _sample(part, operands, draw, tile_max, tile_sum, config["BLOCK_V"], None)


def _sample(
    part: _Part,
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


def linear_cross_entropy_bwd(
    grad_input: torch.Tensor,
    grad_weight: torch.Tensor,
    grad_bias: torch.Tensor,
    *,
    grad_loss: torch.Tensor,
    input: torch.Tensor,
    linear_weight: torch.Tensor,
    linear_bias: torch.Tensor | None,
    target: torch.Tensor,
    log_probability: torch.Tensor,
    row_max: torch.Tensor,
    row_sum: torch.Tensor,
    grad_logits: torch.Tensor,
    slots: torch.Tensor,
    order: torch.Tensor,
    ignore_index: int,
    label_smoothing: float,
    need_input: bool,
    need_weight: bool,
    need_bias: bool,
) -> None:
    """Launch the backward, which writes the three gradients; those not needed have no elements.

    ``grad_loss`` fp32 [N], of any stride: 0 where all rows have the same.
    """
    parts = _parts(order, grad_logits.shape[0])
    if not parts:
        grad_weight.zero_()
        grad_bias.zero_()
        return
    operands = _operands(input, linear_weight, linear_bias, parts)
    dw, db = grad_weight, grad_bias
    if len(parts) > 1:  # the parts add up in fp32
        dw, db = dw.float(), db.float()
    # What is not needed is None, here and below.
    grads = dict(
        dx_ptr=grad_input if need_input else None,
        dw_ptr=dw if need_weight else None,
        db_ptr=db if need_bias else None,
    )
    for number, part in enumerate(parts):
        if part.kept:
            _backward_kept(
                part, operands, slots, **grads, w=linear_weight, g=grad_loss, d=grad_logits
            )
            continue
        _backward_recomputed(
            part,
            operands,
            **grads,
            accumulates=number > 0,
            target_ptr=target,
            g_ptr=grad_loss,
            log_probability_ptr=log_probability,
            max_ptr=row_max,
            sum_ptr=row_sum,
            label_smoothing=label_smoothing,
            stride_g=grad_loss.stride(0),
            SMOOTHED=label_smoothing > 0,
        )
    for grad, total in ((grad_weight, dw), (grad_bias, db)):
        if total is not grad:
            grad.copy_(total)


def _backward_kept(
    part: _Part,
    operands: dict[str, Any],
    slots: torch.Tensor,
    *,
    dx_ptr: torch.Tensor | None,
    dw_ptr: torch.Tensor | None,
    db_ptr: torch.Tensor | None,
    w: torch.Tensor,
    g: torch.Tensor,
    d: torch.Tensor,
) -> None:
    """Launch the backward of the rows that kept D.

    dW is ``scale`` times the product of D and the rows of X by their shares of g, g / scale. All
    rows of a mean have one g, which is the scale: they take no rounding.
    """
    input, vocab, width = (operands[name] for name in ("x_ptr", "V", "E"))
    columns = _whole_vectors(vocab)
    if dx_ptr is not None:
        split_dx = input.new_empty(1, part.rows, width, dtype=torch.float32)
        _multiply(d[:, :columns], _padded(w, input.dtype), split_dx[0])
        _reduce_input(part, split_dx, g, dx_ptr)
    if dw_ptr is None and db_ptr is None:
        return
    if g.stride(0) == 0:
        scale, share = g[0], None
    else:
        scale, share, slots = g.new_empty(()), g.new_empty(part.rows), torch.empty_like(slots)
        _scale(part, g, scale)
        _slots(part, operands, slots, g, scale, share)
    if dw_ptr is not None:
        product = dw_ptr
        if product.dtype is not torch.float32 or columns > vocab:
            product = dw_ptr.new_empty(columns, width, dtype=torch.float32)
        _multiply(d[:, :columns].t(), slots, product)
        torch.mul(product[:vocab], scale, out=dw_ptr)
    if db_ptr is not None:
        _bias_gradient(part, d, vocab, db_ptr, share=share, scale=scale)


def _scale(part: _Part, g: torch.Tensor, scale: torch.Tensor) -> None:
    """Launch the largest magnitude of g that counts."""
    launch(
        _linear_cross_entropy_scale_kernel,
        (1,),
        g.device,
        g_ptr=g,
        scale_ptr=scale,
        stride_g=g.stride(0),
        BLOCK=_ORDER_BLOCK,
        num_warps=8,
        **part.arguments(),
    )


def _bias_gradient(
    part: _Part,
    dz: torch.Tensor,
    vocab: int,
    db: torch.Tensor,
    *,
    chunk_start: int = 0,
    columns: int | None = None,
    share: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    accumulates: bool = False,
) -> None:
    """Launch db of the columns ``chunk_start`` … of the vocabulary, which ``dz`` holds."""
    block_n, block_v, num_warps = _BIAS_TILE
    assert dz.stride(0) % block_v == 0, "a tile would read past the last row"
    launch(
        _linear_cross_entropy_bwd_bias_kernel,
        (cdiv(columns or vocab, block_v),),
        dz.device,
        dz_ptr=dz,
        count_ptr=part.count,
        share_ptr=share,
        scale_ptr=scale,
        db_ptr=db,
        V=vocab,
        chunk_start=chunk_start,
        stride_dzn=dz.stride(0),
        BLOCK_N=block_n,
        BLOCK_V=block_v,
        ACCUMULATES=accumulates,
        num_warps=num_warps,
    )


def _reduce_input(
    part: _Part, split_dx: torch.Tensor, g: torch.Tensor | None, dx: torch.Tensor
) -> None:
    """Launch the sum of ``split_dx`` [splits, slots, E] into the rows of dX, times g if given."""
    splits, rows, width = split_dx.shape
    launch(
        _linear_cross_entropy_reduce_input_kernel,
        (cdiv(rows, 32), cdiv(width, 64)),
        dx.device,
        split_dx_ptr=split_dx,
        g_ptr=g,
        dx_ptr=dx,
        N=rows,
        num_splits=splits,
        stride_g=0 if g is None else g.stride(0),
        E=width,
        BLOCK_N=32,
        BLOCK_E=64,
        **part.arguments(),
    )


def _backward_recomputed(
    part: _Part,
    operands: dict[str, Any],
    *,
    dx_ptr: torch.Tensor | None,
    dw_ptr: torch.Tensor | None,
    db_ptr: torch.Tensor | None,
    accumulates: bool,
    **scalars: Any,
) -> None:
    """Launch the backward of the rows whose logits were not stored."""
    input, rows, vocab, width = operands["x_ptr"], part.rows, operands["V"], operands["E"]
    device = input.device
    # All products read a stored dZ. A second part is the rare case, and gets no kernel of its own.
    wide = _is_wide(width) or accumulates
    prefix = "wide " if wide else ""
    config_x, config_w = (_config(prefix + which, input) for which in ("dX", "dW"))
    if accumulates:
        config_w = _config("wide dW with more", input)
    config_z = _config("wide dZ", input) if wide else {}
    scratch, chunk_columns = input, vocab  # the scratch is never read
    split_columns = _split_columns(config_x["BLOCK_V"])
    if wide:
        chunk_columns = _chunk_columns(rows, vocab, config_x, config_w, config_z)
        scratch = input.new_empty(rows, chunk_columns)
        split_columns = _wide_split_columns(rows, width, chunk_columns, config_x)
    splits = cdiv(min(chunk_columns, vocab), split_columns)
    shared = dict(**scalars, dz_ptr=scratch, stride_dzn=scratch.stride(0))
    if dx_ptr is not None:
        split_dx = input.new_empty(splits, rows, width, dtype=torch.float32)
    for chunk_start in range(0, vocab, chunk_columns):
        columns = min(chunk_columns, vocab - chunk_start)
        if wide:
            launch(
                _linear_cross_entropy_bwd_logits_kernel,
                (cdiv(rows, config_z["BLOCK_N"]), cdiv(columns, config_z["BLOCK_V"])),
                device,
                chunk_start=chunk_start,
                **shared,
                **part.arguments(),
                **operands,
                **config_z,
            )
        if dx_ptr is not None:
            launch(
                _linear_cross_entropy_bwd_input_kernel,
                (
                    cdiv(rows, config_x["BLOCK_N"]),
                    cdiv(width, config_x["BLOCK_E"]),
                    splits,
                ),
                device,
                split_dx_ptr=split_dx,
                N=rows,
                chunk_start=chunk_start,
                chunk_columns=chunk_columns,
                split_columns=split_columns,
                FROM_SCRATCH=wide,
                **shared,
                **part.arguments(),
                **operands,
                **config_x,
            )
        sums_bias = db_ptr is not None and not wide
        if dw_ptr is not None or sums_bias:
            tiles_e = cdiv(width, config_w["BLOCK_E"]) if dw_ptr is not None else 1
            launch(
                _linear_cross_entropy_bwd_weight_kernel,
                (cdiv(columns, config_w["BLOCK_V"]), tiles_e),
                device,
                dw_ptr=dw_ptr,
                db_ptr=db_ptr if sums_bias else None,
                chunk_start=chunk_start,
                FROM_SCRATCH=wide,
                ACCUMULATES=accumulates,
                NEED_WEIGHT=dw_ptr is not None,
                NEED_BIAS=sums_bias,
                **shared,
                **part.arguments(),
                **operands,
                **config_w,
            )
        if db_ptr is not None and wide:
            _bias_gradient(
                part,
                scratch,
                vocab,
                db_ptr,
                chunk_start=chunk_start,
                columns=columns,
                accumulates=accumulates,
            )
    if dx_ptr is not None:
        _reduce_input(part, split_dx, None, dx_ptr)


def _wide_split_columns(rows: int, width: int, chunk_columns: int, config: dict[str, int]) -> int:
    """Columns of a split of dX: few rows would leave most of a device without a program.

    All splits together, in fp32, take no more than a scratch of 16 bits.
    """
    tiles = cdiv(rows, config["BLOCK_N"]) * cdiv(width, config["BLOCK_E"])
    splits = min(_WANTED_PROGRAMS // max(tiles, 1), chunk_columns // (2 * width))
    splits = max(splits, 1)
    return cdiv(cdiv(chunk_columns, splits), config["BLOCK_V"]) * config["BLOCK_V"]


def _chunk_columns(rows: int, vocab: int, *configs: dict[str, int]) -> int:
    """Columns of dZ in the scratch: whole tiles of every kernel that writes or reads it."""
    block = max(config["BLOCK_V"] for config in configs)
    wanted = min(cdiv(vocab, _SCRATCH_PARTS), _SCRATCH_ELEMENTS // max(rows, 1))
    return max(cdiv(wanted, block), 1) * block


_KEPT = {0: "", 512: " kept", 256: " half kept"}
_OPTIONS: dict[str, dict[str, Any]] = {
    "": {},
    " smoothed": {"label_smoothing": 0.1},
    " of rows": {"reduces": False},
    " sampled, argmax, smoothed": {
        "temperature": 1.0,
        "need_argmax": True,
        "label_smoothing": 0.1,
    },
    " sampled at T": {"temperature": 0.5},
}


def compile_cases() -> Iterator[tuple[str, Callable[[], object]]]:
    """Every shipped configuration: a label ("slow: …" for the long lane) and what launches it."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for width in (128, 768, 17, 16, 64, 256, 1024):
            for kept_rows in (0, 512, 256):  # of 512
                # Wide rows run the same kernels, whatever their width, but for the masks.
                if kept_rows and width in (17, 16, 64):
                    continue
                label = f"{str(dtype)[6:]} E={width}{_KEPT[kept_rows]}"
                default = (width, kept_rows) in ((128, 0), (768, 0), (768, 512))
                for option, arguments in _OPTIONS.items():
                    if option and not (default or width == 64 or dtype is torch.bfloat16):
                        continue
                    if option and kept_rows == 256:
                        continue
                    always = default and (dtype is torch.bfloat16 or (width == 128 and not option))
                    if (width, kept_rows) == (768, 0):  # as always, but for its options
                        always &= not option
                    case = functools.partial(meta_case, dtype, width, kept_rows, **arguments)
                    yield label + option if always else f"slow: {label}{option}", case


def meta_case(
    dtype: torch.dtype,
    width: int,
    kept_rows: int,
    *,
    rows: int = 512,
    vocab: int = 30522,
    label_smoothing: float = 0.0,
    need_argmax: bool = False,
    temperature: float | None = None,
    reduces: bool = True,
) -> None:
    """Launch forward and backward on meta tensors; with a ``temperature`` it samples.

    Unless it ``reduces`` to a mean, each row has an upstream gradient of its own.
    """

    def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    ids = functools.partial(meta, rows, dtype=torch.int64)
    loss, log_probability, row_max, row_sum = (meta(rows) for _ in range(4))
    columns = cdiv(vocab, 64) * 64
    grad_logits = meta(kept_rows, columns, dtype=dtype) if kept_rows else meta(0, dtype=dtype)
    slots = meta(kept_rows, width, dtype=dtype)
    order = meta(_ORDER_START + rows, dtype=torch.int64)
    same = dict(
        input=meta(rows, width, dtype=dtype),
        linear_weight=meta(vocab, width, dtype=dtype),
        linear_bias=meta(vocab, dtype=dtype),
        target=ids(),
        ignore_index=-100,
        label_smoothing=label_smoothing,
    )
    linear_cross_entropy_fwd(
        loss,
        log_probability,
        row_max,
        row_sum,
        ids(),
        ids(),
        grad_logits,
        slots,
        order,
        seed=None if temperature is None else meta(dtype=torch.int64),
        sample_index=ids(),
        position=ids(),
        temperature=temperature or 1.0,
        need_argmax=need_argmax,
        kept_rows=kept_rows,
        **same,
    )
    grad_loss = loss
    if reduces:
        total, _ = mean(loss, order, None)
        grad_loss = total.expand(rows)
    linear_cross_entropy_bwd(
        meta(rows, width, dtype=dtype),
        meta(vocab, width, dtype=dtype),
        meta(vocab, dtype=dtype),
        grad_loss=grad_loss,
        log_probability=log_probability,
        row_max=row_max,
        row_sum=row_sum,
        grad_logits=grad_logits,
        slots=slots,
        order=order,
        need_input=True,
        need_weight=True,
        need_bias=True,
        **same,
    )
