"""Linear layer and softmax cross-entropy in one pass over the vocabulary, forward and backward.

    Z = X W^T + b      loss_n = (m_n - Z[n, target_n]) + log(l_n)      P = exp(Z - m) / l
    dZ = g (P - onehot(target))      dX = dZ W      dW = dZ^T X      db = colsum(dZ)

where dZ[n, target_n] is taken as g (exp(-loss_n) - 1), so that a row that is certain of its target
has gradient 0 whatever the rounding of its recomputed logits.

Source: Wijmans et al. 2024 (arXiv 2411.09009), algorithms 1-3, without gradient filtering (in
pre-training the softmax is flat); running maximum and sum as in Milakov and Gimelshein 2018
(arXiv 1805.02867). No sum needs an atomic, so every bit repeats.

Legend: N rows · V vocabulary · E row width · m row maximum · l row sum of exp(z - m), in natural
        units: z - m is taken before the factor log2(e) of exp2, so a large common offset of the
        logits costs no digits · g upstream gradient of a row's loss · dz gradient of a logit

The rows that count are addressed through `order`, which lists them first, in their order; `count`
says how many there are and stays on the device. A tile past it ends at once, so ignored rows cost
nothing in the products and their content is never read.

Forward: a program owns a tile of rows and one split of the vocabulary; a second kernel combines the
splits. Backward, for rows that one tile holds (E <= 128): Z is recomputed in registers, once by the
owner of dX, once by that of dW. Wider rows would recompute it for every tile of E; there, dZ is
computed once, by chunks of the vocabulary that a bounded scratch holds, and both products read it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch
import triton
import triton.language as tl

from fastplm.triton_kernels._launch import arch_of, dot, launch, nearest_arch, upcast_dot

_LOG2E = tl.constexpr(1.4426950408889634)

# Few enough columns to occupy a device with the 20 row tiles of a small batch, enough to amortise
# the partial results of a split. Not of N: how many rows count, only the device knows.
_SPLIT_COLUMNS = 4096
# 64 MiB in half precision: about the L2 of a large device, which then serves both readers of dZ.
_SCRATCH_ELEMENTS = 1 << 25

# (arch, 16-bit?, BLOCK_E of rows that one tile holds | 0 for wider rows) ->
#   (BLOCK_N, BLOCK_V, BLOCK_E, num_warps, num_stages) of forward, dX, dW and, for wider rows, dZ.
# Not measured on a device yet: chosen with the compile lane, which holds them to no spills.
_CONFIGS = {
    (80, True, 16): ((128, 64, 16, 4, 2), (64, 64, 16, 4, 2), (64, 64, 16, 4, 2)),
    (80, True, 32): ((128, 64, 32, 4, 2), (64, 64, 32, 4, 2), (64, 64, 32, 4, 2)),
    (80, True, 64): ((128, 64, 64, 4, 2), (64, 64, 64, 4, 2), (64, 64, 64, 4, 2)),
    (80, True, 128): ((128, 64, 128, 8, 2), (64, 64, 128, 8, 2), (64, 64, 128, 8, 2)),
    (80, True, 0): (
        (128, 128, 32, 8, 3),
        (128, 64, 128, 8, 3),
        (64, 128, 128, 8, 2),
        (128, 128, 32, 8, 3),
    ),
    (80, False, 16): ((32, 64, 16, 4, 1), (32, 32, 16, 4, 1), (32, 32, 16, 4, 1)),
    (80, False, 32): ((32, 64, 32, 4, 1), (32, 32, 32, 4, 1), (32, 32, 32, 4, 1)),
    (80, False, 64): ((32, 64, 64, 8, 1), (32, 32, 64, 8, 1), (32, 32, 64, 8, 1)),
    (80, False, 128): ((32, 64, 128, 8, 1), (32, 32, 128, 8, 1), (32, 32, 128, 8, 1)),
    (80, False, 0): (
        (64, 64, 32, 8, 2),
        (64, 32, 64, 8, 2),
        (32, 64, 64, 8, 2),
        (64, 64, 32, 8, 2),
    ),
    (90, True, 64): ((128, 128, 64, 8, 3), (128, 64, 64, 8, 3), (64, 128, 64, 8, 3)),
    (90, True, 128): ((128, 128, 128, 8, 3), (128, 64, 128, 8, 3), (64, 128, 128, 8, 3)),
    (90, True, 0): (
        (128, 128, 64, 8, 4),
        (128, 64, 256, 8, 4),
        (64, 128, 256, 8, 4),
        (128, 128, 64, 8, 4),
    ),
    (100, True, 16): ((128, 64, 16, 4, 2), (64, 64, 16, 4, 2), (64, 64, 16, 8, 2)),
    (100, True, 32): ((128, 64, 32, 4, 2), (64, 64, 32, 4, 2), (64, 64, 32, 8, 2)),
    (100, True, 64): ((128, 128, 64, 8, 3), (128, 64, 64, 8, 3), (64, 64, 64, 8, 3)),
    (100, True, 128): ((128, 128, 128, 8, 3), (128, 64, 128, 8, 3), (64, 64, 128, 8, 3)),
    (100, True, 0): (
        (128, 128, 64, 8, 4),
        (128, 64, 128, 8, 4),
        (64, 128, 256, 8, 4),
        (128, 128, 64, 8, 4),
    ),
}


def _config(which: int, device: torch.device, weight: torch.Tensor) -> dict[str, int]:
    half, width = weight.dtype.itemsize == 2, weight.shape[1]
    block_e = 0 if _is_wide(width) else max(16, triton.next_power_of_2(width))
    known = tuple(arch for arch, h, e in _CONFIGS if (h, e) == (half, block_e))
    config = _CONFIGS[nearest_arch(arch_of(device), known), half, block_e][which]
    names = ("BLOCK_N", "BLOCK_V", "BLOCK_E", "num_warps", "num_stages")
    return dict(zip(names, config, strict=True))


def _is_wide(width: int) -> bool:
    return width > 128


@triton.jit
def _load_tile(ptr, offs_r, mask_r, stride_r, start_e, E: tl.constexpr, BLOCK_E: tl.constexpr):
    """Rows ``offs_r``, columns ``start_e`` … of a [*, E] matrix, 0 where masked or past E."""
    offs_e = start_e + tl.arange(0, BLOCK_E)
    ptrs = ptr + offs_r.to(tl.int64)[:, None] * stride_r + offs_e[None, :]
    return tl.load(ptrs, mask=mask_r[:, None] & (offs_e < E)[None, :], other=0.0)


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
    offs_v,
    mask_v,
    stride_xn,
    stride_wv,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """X W^T of one tile, for rows wider than a tile: both operands pass by. [BLOCK_N, BLOCK_V]"""
    z = tl.zeros([rows.shape[0], offs_v.shape[0]], tl.float32)
    for start_e in range(0, E, BLOCK_E):
        x = _load_tile(x_ptr, rows, used, stride_xn, start_e, E, BLOCK_E)  # [BLOCK_N, BLOCK_E]
        w = _load_tile(w_ptr, offs_v, mask_v, stride_wv, start_e, E, BLOCK_E)  # [BLOCK_V, BLOCK_E]
        z = dot(x, tl.trans(w), z, UPCAST)
    return z


@triton.jit
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
    # sizes
    N,
    V,
    split_columns,
    # strides
    stride_xn,
    stride_wv,
    # constexprs
    E: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_E: tl.constexpr,
    HAS_BIAS: tl.constexpr,
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

    m_i = tl.full([BLOCK_N], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_N], tl.float32)
    picked = tl.zeros([BLOCK_N], tl.float32)  # the logit of the target, from the tile that has it
    first_v = split * split_columns
    for start_v in range(first_v, tl.minimum(first_v + split_columns, V), BLOCK_V):
        offs_v = start_v + tl.arange(0, BLOCK_V)
        mask_v = offs_v < V
        if E <= BLOCK_E:
            w = _load_tile(w_ptr, offs_v, mask_v, stride_wv, 0, E, BLOCK_E)  # [BLOCK_V, BLOCK_E]
            z = tl.zeros([BLOCK_N, BLOCK_V], tl.float32)
            z = dot(x, tl.trans(w), z, UPCAST)
        else:
            z = _streamed_products(
                x_ptr, w_ptr, rows, used, offs_v, mask_v, stride_xn, stride_wv, E, BLOCK_E, UPCAST
            )
        z += _load_bias(bias_ptr, offs_v, V, HAS_BIAS)[None, :]  # [BLOCK_N, BLOCK_V]

        # -inf - -inf is NaN: a row that has seen no finite logit yet keeps a reference point of 0.
        m_new = tl.maximum(m_i, tl.max(z, 1))
        m_ref = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.exp2((z - m_ref[:, None]) * _LOG2E)
        l_i = l_i * tl.exp2((m_i - m_ref) * _LOG2E) + tl.sum(p, 1)
        picked += tl.sum(tl.where(offs_v[None, :] == target[:, None], z, 0.0), 1)
        m_i = m_new

    offs_s = split.to(tl.int64) * N + start_n + tl.arange(0, BLOCK_N)
    tl.store(split_max_ptr + offs_s, m_i, mask=used)
    tl.store(split_sum_ptr + offs_s, l_i, mask=used)
    tl.store(split_picked_ptr + offs_s, picked, mask=used)


@triton.jit
def _linear_cross_entropy_combine_kernel(
    # pointers
    target_ptr,
    order_ptr,
    count_ptr,
    split_max_ptr,
    split_sum_ptr,
    split_picked_ptr,
    loss_ptr,
    max_ptr,
    sum_ptr,
    # sizes
    N,
    V,
    num_splits,
    # constexprs
    BLOCK_N: tl.constexpr,
):
    """Loss, maximum and sum of every row from those of its splits; 0 for ignored rows."""
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    exists = offs_n < N
    used = offs_n < tl.load(count_ptr).to(tl.int32)
    rows = tl.load(order_ptr + offs_n, mask=exists, other=0)

    m_i = tl.full([BLOCK_N], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_N], tl.float32)
    picked = tl.zeros([BLOCK_N], tl.float32)
    offs_s = offs_n.to(tl.int64)
    for _ in range(0, num_splits):
        m_s = tl.load(split_max_ptr + offs_s, mask=used, other=0.0)
        l_s = tl.load(split_sum_ptr + offs_s, mask=used, other=1.0)
        picked += tl.load(split_picked_ptr + offs_s, mask=used, other=0.0)
        m_new = tl.maximum(m_i, m_s)
        m_ref = tl.where(m_new == float("-inf"), 0.0, m_new)
        l_i = l_i * tl.exp2((m_i - m_ref) * _LOG2E) + l_s * tl.exp2((m_s - m_ref) * _LOG2E)
        m_i = m_new
        offs_s += N

    # No split has met a target outside the vocabulary: a NaN maximum makes loss and gradients NaN.
    target = tl.load(target_ptr + rows, mask=used, other=0)
    m_i = tl.where((target >= 0) & (target < V), m_i, float("nan"))
    loss = (m_i - picked) + tl.log(l_i)
    tl.store(loss_ptr + rows, tl.where(used, loss, 0.0), mask=exists)
    tl.store(max_ptr + rows, tl.where(used, m_i, 0.0), mask=exists)
    tl.store(sum_ptr + rows, tl.where(used, l_i, 0.0), mask=exists)


@triton.jit
def _load_row_scalars(target_ptr, g_ptr, loss_ptr, max_ptr, sum_ptr, rows, used):
    """(target, dz of the target, m, g / l) of a tile of rows; an unused slot gives dz = 0."""
    target = tl.load(target_ptr + rows, mask=used, other=-1).to(tl.int32)
    g = tl.load(g_ptr + rows, mask=used, other=0.0)
    loss = tl.load(loss_ptr + rows, mask=used, other=0.0)
    # exp2(-inf) is 0 whatever the bias; any finite maximum could overflow to inf * 0.
    m = tl.load(max_ptr + rows, mask=used, other=float("inf"))
    l_i = tl.load(sum_ptr + rows, mask=used, other=1.0)
    return target, g * (tl.exp2(-loss * _LOG2E) - 1.0), m, g / l_i


@triton.jit
def _grad_logits(z, offs_v, target, dz_target, m, g_over_l):
    """g (P - onehot) of one tile; the vectors come expanded, so either orientation will do."""
    return tl.where(offs_v == target, dz_target, tl.exp2((z - m) * _LOG2E) * g_over_l)


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
    loss_ptr,
    max_ptr,
    sum_ptr,
    dz_ptr,
    # sizes
    V,
    chunk_start,
    # strides
    stride_xn,
    stride_wv,
    stride_dzn,
    # constexprs
    E: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_E: tl.constexpr,
    HAS_BIAS: tl.constexpr,
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
        x_ptr, w_ptr, rows, used, offs_v, offs_v < V, stride_xn, stride_wv, E, BLOCK_E, UPCAST
    )
    z += _load_bias(bias_ptr, offs_v, V, HAS_BIAS)[None, :]  # [BLOCK_N, BLOCK_V]
    target, dz_target, m, g_over_l = _load_row_scalars(
        target_ptr, g_ptr, loss_ptr, max_ptr, sum_ptr, rows, used
    )
    dz = _grad_logits(
        z, offs_v[None, :], target[:, None], dz_target[:, None], m[:, None], g_over_l[:, None]
    )
    offs_n = start_n + tl.arange(0, BLOCK_N)
    ptrs = dz_ptr + offs_n.to(tl.int64)[:, None] * stride_dzn + offs_c[None, :]
    tl.store(ptrs, dz.to(dz_ptr.dtype.element_ty), mask=used[:, None])


@triton.jit
def _linear_cross_entropy_bwd_input_kernel(
    # pointers
    x_ptr,
    w_ptr,
    bias_ptr,
    target_ptr,
    order_ptr,
    count_ptr,
    g_ptr,
    loss_ptr,
    max_ptr,
    sum_ptr,
    dz_ptr,
    split_dx_ptr,
    # sizes
    N,
    V,
    chunk_start,
    split_columns,
    # strides
    stride_xn,
    stride_wv,
    stride_dzn,
    # constexprs
    E: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_E: tl.constexpr,
    HAS_BIAS: tl.constexpr,
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
    offs_n = start_n + tl.arange(0, BLOCK_N)
    offs_e = start_e + tl.arange(0, BLOCK_E)
    dx_ptrs = split_dx_ptr + (split.to(tl.int64) * N + offs_n)[:, None] * E + offs_e[None, :]
    mask_dx = used[:, None] & (offs_e < E)[None, :]
    # The first chunk starts from nothing, each further one from what the last one left.
    dx = tl.load(dx_ptrs, mask=mask_dx & (chunk_start > 0), other=0.0)  # [BLOCK_N, BLOCK_E]
    if not FROM_SCRATCH:
        x = _load_tile(x_ptr, rows, used, stride_xn, 0, E, BLOCK_E)  # [BLOCK_N, BLOCK_E]
        target, dz_target, m, g_over_l = _load_row_scalars(
            target_ptr, g_ptr, loss_ptr, max_ptr, sum_ptr, rows, used
        )

    first_v = chunk_start + split * split_columns
    for start_v in range(first_v, tl.minimum(first_v + split_columns, V), BLOCK_V):
        offs_v = start_v + tl.arange(0, BLOCK_V)
        mask_v = offs_v < V
        w = _load_tile(w_ptr, offs_v, mask_v, stride_wv, start_e, E, BLOCK_E)  # [BLOCK_V, BLOCK_E]
        if FROM_SCRATCH:
            ptrs = dz_ptr + offs_n.to(tl.int64)[:, None] * stride_dzn
            ptrs += (offs_v - chunk_start)[None, :]
            dz = tl.load(ptrs, mask=used[:, None], other=0.0)  # [BLOCK_N, BLOCK_V]
        else:
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
            )
        dx = dot(dz.to(w.dtype), w, dx, UPCAST)
    tl.store(dx_ptrs, dx, mask=mask_dx)


@triton.jit
def _linear_cross_entropy_reduce_input_kernel(
    # pointers
    order_ptr,
    count_ptr,
    split_dx_ptr,
    dx_ptr,
    # sizes
    N,
    num_splits,
    # constexprs
    E: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """dX from slots to rows, its splits summed in order; 0 for ignored rows."""
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
    loss_ptr,
    max_ptr,
    sum_ptr,
    dz_ptr,
    dw_ptr,
    db_ptr,
    # sizes
    V,
    chunk_start,
    # strides
    stride_xn,
    stride_wv,
    stride_dzn,
    # constexprs
    E: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_E: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    FROM_SCRATCH: tl.constexpr,
    NEED_WEIGHT: tl.constexpr,
    NEED_BIAS: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """One tile of dW (and of db) over all rows that count, in order."""
    start_c, start_e = tl.program_id(0) * BLOCK_V, tl.program_id(1) * BLOCK_E
    count = tl.load(count_ptr).to(tl.int32)
    offs_c = start_c + tl.arange(0, BLOCK_V)
    offs_v = chunk_start + offs_c
    mask_v = offs_v < V
    if not FROM_SCRATCH:
        w = _load_tile(w_ptr, offs_v, mask_v, stride_wv, 0, E, BLOCK_E)  # [BLOCK_V, BLOCK_E]
        bias = _load_bias(bias_ptr, offs_v, V, HAS_BIAS)
    dw = tl.zeros([BLOCK_V, BLOCK_E], tl.float32)
    db = tl.zeros([BLOCK_V], tl.float32)

    for start_n in range(0, count, BLOCK_N):
        rows, used = _load_slots(order_ptr, count, start_n, BLOCK_N)
        x = _load_tile(x_ptr, rows, used, stride_xn, start_e, E, BLOCK_E)  # [BLOCK_N, BLOCK_E]
        # dZ is made transposed, so that it is the left operand of the second product as it stands.
        if FROM_SCRATCH:
            offs_n = start_n + tl.arange(0, BLOCK_N)
            ptrs = dz_ptr + offs_n.to(tl.int64)[:, None] * stride_dzn + offs_c[None, :]
            dz_t = tl.trans(tl.load(ptrs, mask=used[:, None], other=0.0))  # [BLOCK_V, BLOCK_N]
        else:
            z_t = tl.zeros([BLOCK_V, BLOCK_N], tl.float32)
            z_t = dot(w, tl.trans(x), z_t, UPCAST) + bias[:, None]
            target, dz_target, m, g_over_l = _load_row_scalars(
                target_ptr, g_ptr, loss_ptr, max_ptr, sum_ptr, rows, used
            )
            dz_t = _grad_logits(
                z_t,
                offs_v[:, None],
                target[None, :],
                dz_target[None, :],
                m[None, :],
                g_over_l[None, :],
            )
        if NEED_WEIGHT:
            dw = dot(dz_t.to(x.dtype), x, dw, UPCAST)
        if NEED_BIAS:
            db += tl.sum(dz_t.to(tl.float32), 1)

    if NEED_WEIGHT:
        offs_e = start_e + tl.arange(0, BLOCK_E)
        ptrs = dw_ptr + offs_v.to(tl.int64)[:, None] * E + offs_e[None, :]
        mask = mask_v[:, None] & (offs_e < E)[None, :]
        tl.store(ptrs, dw.to(dw_ptr.dtype.element_ty), mask=mask)
    if NEED_BIAS:  # every tile of E has the same sum
        tl.store(db_ptr + offs_v, db.to(db_ptr.dtype.element_ty), mask=mask_v & (start_e == 0))


def _order(target: torch.Tensor, ignore_index: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(all rows, those that count first and in order; how many count), without a host sync."""
    ignored = target == ignore_index
    return torch.argsort(ignored, stable=True), (~ignored).sum()


def _operands(
    input: torch.Tensor,
    linear_weight: torch.Tensor,
    linear_bias: torch.Tensor | None,
    target: torch.Tensor,
    order: torch.Tensor,
    count: torch.Tensor,
) -> dict[str, object]:
    """The keywords that all product kernels share."""
    return dict(
        x_ptr=input,
        w_ptr=linear_weight,
        # Without a bias the pointer is never read; any tensor will do.
        bias_ptr=linear_weight if linear_bias is None else linear_bias,
        target_ptr=target,
        order_ptr=order,
        count_ptr=count,
        V=linear_weight.shape[0],
        stride_xn=input.stride(0),
        stride_wv=linear_weight.stride(0),
        E=input.shape[1],
        HAS_BIAS=linear_bias is not None,
        UPCAST=upcast_dot(input.dtype),
    )


def _split_columns(block_v: int) -> int:
    return triton.cdiv(_SPLIT_COLUMNS, block_v) * block_v


def linear_cross_entropy_fwd(
    input: torch.Tensor,
    linear_weight: torch.Tensor,
    linear_bias: torch.Tensor | None,
    target: torch.Tensor,
    ignore_index: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Launch the forward: loss, row maximum and row sum, fp32 [N]."""
    rows, vocab, device = input.shape[0], linear_weight.shape[0], input.device
    order, count = _order(target, ignore_index)
    config = _config(0, device, linear_weight)
    columns = _split_columns(config["BLOCK_V"])
    splits = triton.cdiv(vocab, columns)
    split_max, split_sum, split_picked = input.new_empty(3, splits, rows, dtype=torch.float32)
    launch(
        _linear_cross_entropy_fwd_kernel,
        (triton.cdiv(rows, config["BLOCK_N"]), splits),
        device,
        split_max_ptr=split_max,
        split_sum_ptr=split_sum,
        split_picked_ptr=split_picked,
        N=rows,
        split_columns=columns,
        **_operands(input, linear_weight, linear_bias, target, order, count),
        **config,
    )
    loss, row_max, row_sum = (input.new_empty(rows, dtype=torch.float32) for _ in range(3))
    launch(
        _linear_cross_entropy_combine_kernel,
        (triton.cdiv(rows, 128),),
        device,
        target_ptr=target,
        order_ptr=order,
        count_ptr=count,
        split_max_ptr=split_max,
        split_sum_ptr=split_sum,
        split_picked_ptr=split_picked,
        loss_ptr=loss,
        max_ptr=row_max,
        sum_ptr=row_sum,
        N=rows,
        V=vocab,
        num_splits=splits,
        BLOCK_N=128,
    )
    return loss, row_max, row_sum


def linear_cross_entropy_bwd(
    grad_loss: torch.Tensor,
    input: torch.Tensor,
    linear_weight: torch.Tensor,
    linear_bias: torch.Tensor | None,
    target: torch.Tensor,
    loss: torch.Tensor,
    row_max: torch.Tensor,
    row_sum: torch.Tensor,
    ignore_index: int,
    need_input: bool,
    need_weight: bool,
    need_bias: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Launch the backward: gradients of input, weight and bias, without elements if not needed."""
    (rows, width), vocab, device = input.shape, linear_weight.shape[0], input.device
    wide = _is_wide(width)
    order, count = _order(target, ignore_index)
    grad_input = input.new_empty((rows, width) if need_input else (0,))
    grad_weight = input.new_empty((vocab, width) if need_weight else (0,))
    grad_bias = input.new_empty(vocab if need_bias else 0)

    config_x, config_w = _config(1, device, linear_weight), _config(2, device, linear_weight)
    split_columns = _split_columns(config_x["BLOCK_V"])
    chunk_columns = vocab
    scratch = input  # never read
    if wide:
        config_z = _config(3, device, linear_weight)
        chunk_columns = _chunk_columns(rows, vocab, config_x, config_w, config_z)
        split_columns = chunk_columns
        scratch = input.new_empty(rows, chunk_columns)
    splits = triton.cdiv(chunk_columns, split_columns)
    split_dx = input.new_empty(splits, rows if need_input else 0, width, dtype=torch.float32)

    shared = dict(
        g_ptr=grad_loss,
        loss_ptr=loss,
        max_ptr=row_max,
        sum_ptr=row_sum,
        dz_ptr=scratch,
        stride_dzn=scratch.stride(0),
        **_operands(input, linear_weight, linear_bias, target, order, count),
    )
    for chunk_start in range(0, vocab, chunk_columns):
        columns = min(chunk_columns, vocab - chunk_start)
        if wide:
            launch(
                _linear_cross_entropy_bwd_logits_kernel,
                (triton.cdiv(rows, config_z["BLOCK_N"]), triton.cdiv(columns, config_z["BLOCK_V"])),
                device,
                chunk_start=chunk_start,
                **shared,
                **config_z,
            )
        if need_input:
            launch(
                _linear_cross_entropy_bwd_input_kernel,
                (
                    triton.cdiv(rows, config_x["BLOCK_N"]),
                    triton.cdiv(width, config_x["BLOCK_E"]),
                    splits,
                ),
                device,
                split_dx_ptr=split_dx,
                N=rows,
                chunk_start=chunk_start,
                split_columns=split_columns,
                FROM_SCRATCH=wide,
                **shared,
                **config_x,
            )
        if need_weight or need_bias:
            launch(
                _linear_cross_entropy_bwd_weight_kernel,
                (
                    triton.cdiv(columns, config_w["BLOCK_V"]),
                    triton.cdiv(width, config_w["BLOCK_E"]) if need_weight else 1,
                ),
                device,
                dw_ptr=grad_weight,
                db_ptr=grad_bias,
                chunk_start=chunk_start,
                FROM_SCRATCH=wide,
                NEED_WEIGHT=need_weight,
                NEED_BIAS=need_bias,
                **shared,
                **config_w,
            )
    if need_input:
        launch(
            _linear_cross_entropy_reduce_input_kernel,
            (triton.cdiv(rows, 32), triton.cdiv(width, 64)),
            device,
            order_ptr=order,
            count_ptr=count,
            split_dx_ptr=split_dx,
            dx_ptr=grad_input,
            N=rows,
            num_splits=splits,
            E=width,
            BLOCK_N=32,
            BLOCK_E=64,
        )
    return grad_input, grad_weight, grad_bias


def _chunk_columns(rows: int, vocab: int, *configs: dict[str, int]) -> int:
    """Columns of dZ in the scratch: whole tiles of every kernel that writes or reads it."""
    block = max(config["BLOCK_V"] for config in configs)
    wanted = min(vocab, _SCRATCH_ELEMENTS // max(rows, 1))
    return max(triton.cdiv(wanted, block), 1) * block


def compile_cases() -> Iterator[tuple[str, Callable[[], object]]]:
    """Every shipped configuration: a label ("slow: …" for the long lane) and what launches it."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for width in (128, 768, 17, 16, 64, 256, 1024):
            always = width == 128 or (width == 768 and dtype is torch.bfloat16)
            label = f"{str(dtype)[6:]} E={width}"
            yield label if always else f"slow: {label}", functools.partial(_case, dtype, width)


def _case(dtype: torch.dtype, width: int) -> None:
    input = torch.empty(512, width, dtype=dtype, device="meta")
    weight = torch.empty(30522, width, dtype=dtype, device="meta")
    target = torch.empty(512, dtype=torch.int64, device="meta")
    bias = weight[:, 0].contiguous()
    loss, row_max, row_sum = linear_cross_entropy_fwd(input, weight, bias, target, -100)
    linear_cross_entropy_bwd(
        loss, input, weight, bias, target, loss, row_max, row_sum, -100, True, True, True
    )
