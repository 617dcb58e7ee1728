"""Flash-style attention, forward and backward: padded, ragged, causal, dropout, T5's bias.

    S = scale * Q K^T + bias + mask     P = softmax(S)     O = (Z * P) V
    dV = (Z * P)^T dO     dP = Z * (dO V^T)     dS = P * (dP - delta)     delta = rowsum(P * dP)
    dQ = scale * dS K     dK = scale * dS^T Q     dbias = dS

where Z is 0 for a dropped probability and 1 / (1 - p) for a kept one.

Source: FlashAttention-2 (Dao 2023, arXiv 2307.08691), algorithms 1 and 2; T5's bias: Raffel et al.
2020, §2.1; dropout bits: Philox4x32-7 (Salmon et al. 2011).

Legend: B batch · H heads · Tq/Tk query/key length · D head dim (BLOCK_D, its power of two)
        m_i row maximum · l_i row sum. exp2 is the hardware's own: log2(e) * scale is folded into
        one multiply-add per score, and m_i is in base-2 units (natural ones under a bias).

Two families, chosen from dtype and shapes alone (``_forward_config``, ``needs_statistics``):

row     the whole row of keys lies in one tile (Tk <= 256 in 16 bits): no online softmax, and K and
        V stay with a program for some tiles of queries. Up to 128 queries and keys the backward is
        one kernel, a head in one tile: it rebuilds the softmax, so it reads neither O nor row
        statistics, and all three gradients take 5 matmuls.
stream  tiles of keys pass by (FlashAttention-2). The backward has one kernel that owns dQ (and
        computes delta on its way), then one that owns dK and dV: 7 matmuls, and in exchange no fp32
        dQ in memory and no atomic. A masked key costs nothing there but its own row: it is set to 0
        once, at the end.

Keys and values of up to 512 rows resident in shared memory were tried as tiles of one program: the
code spilled, and an SM had room for one program alone.

No sum ever depends on the order in which programs run, so every bit repeats; and a tile of masked
keys adds exact zeros, so a padded and a ragged batch get the same bits.

The streaming forward saves m and log2(l) apart, not their sum: scores of a row that share a large
offset would lose the digits of l in it, and the backward's P = exp2(S - m - log2(l)) would no
longer add up to 1.

A masked key is loaded as 0, so that even a NaN behind the mask cannot reach a sum. A row that may
attend to nothing has l = 0; it gets output 0, m = log2(l) = 0 and, as all its p are 0, gradient 0.

T5's bias depends on the distance alone and is constant from max_distance on, on either side. The
kernels take it as one row of 2 * max_distance + 1 values a head; a tile that is far away adds one
scalar. The gradient of the far values is one sum per tile, taken where dQ is computed; for the
near band a kernel of its own adds dS tiles of equal distance over the batch, and then reduces by
bucket once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton
import triton.language as tl

from fastplm.triton_kernels._launch import (
    INTERPRETED,
    Fixed,
    arch_of,
    cdiv,
    dot,
    is_recording,
    launch,
    nearest_arch,
    next_power_of_2,
    sm_count,
    upcast_dot,
)
from fastplm.triton_kernels._philox import philox

# What a kernel of its own for a multiple of 16 would gain nothing by, and what changes from batch
# to batch: numbers of sequences, rows and tokens. ``stride_sh`` is the number of rows: statistics
# start anywhere in it, so that they are loaded one by one.
_COUNTS = ("num_seqs", "seqlen_q", "seqlen_k", "threshold", "stride_sh")

_LOG2E = tl.constexpr(1.4426950408889634)

# The stream of ``reference.philox.Stream.DROPOUT`` and its number of rounds.
_DROPOUT_STREAM = tl.constexpr(3)
_DROPOUT_ROUNDS = tl.constexpr(7)


@triton.jit
def _dot(a, b, acc, PRECISION: tl.constexpr):
    """``acc + a @ b`` in the dtype of the tiles; fp32 is multiplied in TF32 if PRECISION says so.

    Triton hands such tiles to the tensor cores as they are, and those ignore the low 13 bits: the
    operands are cut, not rounded.
    """
    if PRECISION == "tf32":
        return tl.dot(a, b, acc, input_precision="tf32")
    return dot(a, b, acc, PRECISION == "upcast")


# --- tiles in memory ------------------------------------------------------------------------------


@triton.jit
def _bounds(cu_ptr, b, seqlen):
    """(first packed row, length) of sequence ``b``; a dense batch has no packed rows."""
    first = b * 0
    length = seqlen
    if cu_ptr is not None:
        first = tl.load(cu_ptr + b).to(tl.int64)
        length = (tl.load(cu_ptr + b + 1) - first).to(tl.int32)
    return first, length


@triton.jit
def _head(ptr, b, h, first, stride_b, stride_h, stride_t):
    """Row 0 of head ``h`` of sequence ``b``; a ragged batch has stride_b 0, a dense one first 0."""
    return ptr + b * stride_b + h * stride_h + first * stride_t


@triton.jit
def _stats_head(cu_ptr, b, h, first, seqlen, stride_h):
    """Offset of that row in [H, rows] statistics: a dense sequence owns ``seqlen`` rows."""
    row = first
    if cu_ptr is None:
        row = b * seqlen
    return h * stride_h + row


@triton.jit
def _load_rows(ptr, offs_t, mask_t, stride_t, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rows ``offs_t`` of a [T, D] matrix as a [len(offs_t), BLOCK_D] tile, 0 where masked."""
    offs_d = tl.arange(0, BLOCK_D)
    ptrs = ptr + offs_t.to(tl.int64)[:, None] * stride_t + offs_d[None, :]
    return tl.load(ptrs, mask=mask_t[:, None] & (offs_d < HEAD_DIM)[None, :], other=0.0)


@triton.jit
def _store_rows(ptr, tile, offs_t, mask_t, stride_t, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    offs_d = tl.arange(0, BLOCK_D)
    ptrs = ptr + offs_t.to(tl.int64)[:, None] * stride_t + offs_d[None, :]
    mask = mask_t[:, None] & (offs_d < HEAD_DIM)[None, :]
    tl.store(ptrs, tile.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def _zero_spare_rows(ptr, cu_ptr, num_seqs, num_rows, row_size):
    """All programs together write 0 behind the last sequence of a contiguous [rows, H, D]."""
    BLOCK: tl.constexpr = 1024
    if cu_ptr is not None:
        end = tl.full((), 0, tl.int64) + num_rows
        end = end * row_size
        # With many short sequences even the number of elements of all programs is past 2^31.
        begin = tl.load(cu_ptr + num_seqs).to(tl.int64) * row_size
        begin += tl.program_id(0).to(tl.int64) * BLOCK
        for start in range(begin, end, tl.num_programs(0).to(tl.int64) * BLOCK):
            offs = start + tl.arange(0, BLOCK)
            tl.store(ptr + offs, tl.zeros([BLOCK], ptr.dtype.element_ty), mask=offs < end)


@triton.jit
def _keys_allowed(mask_ptr, offs_k, seqlen_k):
    """[BLOCK_K] bool: the keys of this tile that exist and that the key mask lets through."""
    allowed = (offs_k >= 0) & (offs_k < seqlen_k)
    if mask_ptr is not None:
        allowed = allowed & (tl.load(mask_ptr + offs_k, mask=allowed, other=0) != 0)
    return allowed


# --- dropout --------------------------------------------------------------------------------------


@triton.jit
def _keep(seed_ptr, sample_ptr, b, h, offs_q, start_k, threshold, BLOCK_K: tl.constexpr):
    """[BLOCK_Q, BLOCK_K] bool: the probabilities that dropout keeps (``dropout_keep_mask``).

    One Philox call gives the bytes of 16 keys: those that one thread of a tensor-core tile owns in
    64 columns, so that the words never leave the thread. ``start_k`` is a multiple of BLOCK_K.
    """
    BLOCK_Q: tl.constexpr = offs_q.shape[0]
    GROUPS: tl.constexpr = (BLOCK_K + 63) // 64
    WORDS: tl.constexpr = 4 if BLOCK_K >= 64 else BLOCK_K // 16
    sample = b
    if sample_ptr is not None:
        sample = tl.load(sample_ptr + b)
    call = (start_k // 64 * 4 + tl.arange(0, 4 * GROUPS)).to(tl.uint32)
    last = (call << 16) | (h.to(tl.uint32) << 4) | _DROPOUT_STREAM
    zero = tl.zeros([BLOCK_Q, 4 * GROUPS], tl.uint32)
    word0, word1, word2, word3 = philox(
        tl.load(seed_ptr),
        zero + offs_q.to(tl.uint32)[:, None],
        zero + sample.to(tl.uint32),
        zero + (sample >> 32).to(tl.uint32),
        zero + last[None, :],
        _DROPOUT_ROUNDS,
    )  # [BLOCK_Q, 4 * GROUPS] each
    # key = 64 group + 16 word + 8 half + 2 call + parity, of the byte 2 half + parity of its word.
    # All but the call are places in a thread's registers, so that index and shift are constants
    # (but for the first word of a tile of fewer than 64 keys).
    index = tl.reshape(tl.arange(0, WORDS), [1, 1, WORDS, 1, 1, 1])
    if BLOCK_K < 64:
        index += start_k % 64 // 16
    half = tl.reshape(tl.arange(0, 2), [1, 1, 1, 2, 1, 1])
    parity = tl.reshape(tl.arange(0, 2), [1, 1, 1, 1, 1, 2])
    by_call: tl.constexpr = [BLOCK_Q, GROUPS, 1, 1, 4, 1]
    words = tl.where(
        index < 2,
        tl.where(index == 0, tl.reshape(word0, by_call), tl.reshape(word1, by_call)),
        tl.where(index == 2, tl.reshape(word2, by_call), tl.reshape(word3, by_call)),
    )
    byte = (words >> (16 * half + 8 * parity).to(tl.uint32)) & 0xFF
    return tl.reshape(byte.to(tl.int32) >= threshold, [BLOCK_Q, BLOCK_K])


# --- scores ---------------------------------------------------------------------------------------

# How a range of tiles gets T5's bias: none, one scalar of the far left or right, or a table lookup.
_NO_BIAS = tl.constexpr(0)
_FAR_LEFT = tl.constexpr(1)
_NEAR = tl.constexpr(2)
_FAR_RIGHT = tl.constexpr(3)


@triton.jit(do_not_specialize=["width"])
def _bias_rows_kernel(
    # pointers
    weight_ptr,
    buckets_ptr,
    rows_ptr,
    # sizes
    width,
    # strides
    stride_wb,
    stride_wh,
    # constexprs
    BLOCK_N: tl.constexpr,
):
    # One program writes a part of one head's row: the table by distance instead of by bucket.
    h = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    bucket = tl.load(buckets_ptr + offs, mask=offs < width, other=0)
    bias = tl.load(weight_ptr + bucket * stride_wb + h * stride_wh).to(tl.float32)
    tl.store(rows_ptr + h * width + offs, bias, mask=offs < width)


@triton.jit
def _add_bias(s, bias_ptr, distance, scale, max_distance, BIAS: tl.constexpr):
    """Scaled scores with the bias [2 * max_distance + 1] of this head."""
    if BIAS == _FAR_LEFT:
        bias = tl.load(bias_ptr)
    elif BIAS == _FAR_RIGHT:
        bias = tl.load(bias_ptr + 2 * max_distance)
    else:
        near = tl.minimum(tl.maximum(distance, -max_distance), max_distance)
        bias = tl.load(bias_ptr + near + max_distance)
    return s * scale + bias


@triton.jit
def _bias_ranges(first, size, shift, max_distance, BLOCK: tl.constexpr):
    """Where the tiles of the other side, BLOCK wide, are near those rows: (start, end).

    Rows ``first … first + size - 1``; the distance of a position x to row r is x - r - shift. All
    of a tile before ``start`` is max_distance or more behind, all from ``end`` on as far ahead.
    """
    start = tl.maximum(first + shift - max_distance + 1, 0) // BLOCK * BLOCK
    end = tl.maximum(first + size - 1 + shift + max_distance + BLOCK - 1, 0) // BLOCK * BLOCK
    return start, end


@triton.jit
def _softmax_step(
    s,
    v,
    m_i,
    l_i,
    acc,
    factor,
    seed_ptr,
    sample_ptr,
    b,
    h,
    offs_q,
    start_k,
    threshold,
    HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One tile of keys: rescale what was, add P V.

    ``s`` are raw scores, or scaled ones with a bias; ``factor`` makes their base-2 logarithms.
    """
    # -inf - -inf is NaN: a row that has seen no key yet keeps a reference point of 0.
    if HAS_BIAS:
        # A large bias must not be rounded once more: the difference comes first.
        m_new = tl.maximum(m_i, tl.max(s, 1))
        m_ref = tl.where(m_new == float("-inf"), 0.0, m_new)
        alpha = tl.exp2((m_i - m_ref) * factor)
        p = tl.exp2((s - m_ref[:, None]) * factor)  # [BLOCK_Q, BLOCK_K]
    else:
        m_new = tl.maximum(m_i, tl.max(s, 1) * factor)
        m_ref = tl.where(m_new == float("-inf"), 0.0, m_new)
        alpha = tl.exp2(m_i - m_ref)
        p = tl.exp2(s * factor - m_ref[:, None])  # [BLOCK_Q, BLOCK_K]
    l_i = l_i * alpha + tl.sum(p, 1)
    if seed_ptr is not None:
        keep = _keep(seed_ptr, sample_ptr, b, h, offs_q, start_k, threshold, p.shape[1])
        p = tl.where(keep, p, 0.0)
    acc = _dot(p.to(v.dtype), v, acc * alpha[:, None], PRECISION)
    return m_new, l_i, acc


@triton.jit
def _store_output(
    out_ptr,
    m_ptr,
    log2l_ptr,
    acc,
    m_i,
    l_i,
    offs_q,
    mask_q,
    stride_ot,
    keep_scale,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_STATS: tl.constexpr,
):
    alive = l_i != 0.0
    l_i = tl.where(alive, l_i, 1.0)
    out = acc * (keep_scale / l_i)[:, None]
    _store_rows(out_ptr, out, offs_q, mask_q, stride_ot, HEAD_DIM, BLOCK_D)
    if HAS_STATS:
        tl.store(m_ptr + offs_q, tl.where(alive, m_i, 0.0), mask=mask_q)
        tl.store(log2l_ptr + offs_q, tl.log2(l_i), mask=mask_q)


@triton.jit(do_not_specialize=[*_COUNTS, "num_rows", "tiles_q"])
def _attention_row_fwd_kernel(
    # pointers
    q_ptr,
    k_ptr,
    v_ptr,
    mask_ptr,
    cu_q_ptr,
    cu_k_ptr,
    seed_ptr,
    sample_ptr,
    out_ptr,
    m_ptr,
    log2l_ptr,
    # sizes
    num_seqs,
    num_heads,
    num_rows,
    seqlen_q,
    seqlen_k,
    tiles_q,
    scale_log2,
    threshold,
    keep_scale,
    # strides
    stride_qb,
    stride_qh,
    stride_qt,
    stride_kb,
    stride_kh,
    stride_kt,
    stride_vb,
    stride_vh,
    stride_vt,
    stride_mb,
    stride_ob,
    stride_oh,
    stride_ot,
    stride_sh,
    # constexprs
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    HAS_STATS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    # One program owns some consecutive tiles of queries of one head; K and V stay with it.
    _zero_spare_rows(out_ptr, cu_q_ptr, num_seqs, num_rows, num_heads * HEAD_DIM)
    runs = tl.cdiv(tl.cdiv(seqlen_q, BLOCK_Q), tiles_q)
    run = tl.program_id(0) % runs
    row = (tl.program_id(0) // runs).to(tl.int64)  # flat (sequence, head)
    b, h = row // num_heads, row % num_heads
    first_q, length_q = _bounds(cu_q_ptr, b, seqlen_q)
    first_k, length_k = _bounds(cu_k_ptr, b, seqlen_k)
    q_ptr = _head(q_ptr, b, h, first_q, stride_qb, stride_qh, stride_qt)
    k_ptr = _head(k_ptr, b, h, first_k, stride_kb, stride_kh, stride_kt)
    v_ptr = _head(v_ptr, b, h, first_k, stride_vb, stride_vh, stride_vt)
    out_ptr = _head(out_ptr, b, h, first_q, stride_ob, stride_oh, stride_ot)
    stats = _stats_head(cu_q_ptr, b, h, first_q, seqlen_q, stride_sh)
    if mask_ptr is not None:
        mask_ptr += b * stride_mb + first_k

    offs_k = tl.arange(0, BLOCK_K)
    mask_k = _keys_allowed(mask_ptr, offs_k, length_k)
    k = _load_rows(k_ptr, offs_k, mask_k, stride_kt, HEAD_DIM, BLOCK_D)  # [BLOCK_K, BLOCK_D]
    v = _load_rows(v_ptr, offs_k, mask_k, stride_vt, HEAD_DIM, BLOCK_D)  # [BLOCK_K, BLOCK_D]

    diagonal = length_k - length_q  # query i sees keys j <= i + diagonal
    first_tile = run * tiles_q * BLOCK_Q
    end_q = tl.minimum(first_tile + tiles_q * BLOCK_Q, length_q)
    for start_q in range(first_tile, end_q, BLOCK_Q):
        offs_q = start_q + tl.arange(0, BLOCK_Q)
        mask_q = offs_q < length_q
        q = _load_rows(q_ptr, offs_q, mask_q, stride_qt, HEAD_DIM, BLOCK_D)  # [BLOCK_Q, BLOCK_D]
        # Looked up again rather than kept: registers are scarcer than loads.
        mask_k = _keys_allowed(mask_ptr, offs_k, length_k)
        s = _masked_scores(q, k, offs_q, offs_k, mask_k, diagonal, IS_CAUSAL, PRECISION)
        m_i, l_i, acc = _softmax_step(
            s,
            v,
            tl.full([BLOCK_Q], float("-inf"), tl.float32),
            tl.zeros([BLOCK_Q], tl.float32),
            tl.zeros([BLOCK_Q, BLOCK_D], tl.float32),
            scale_log2,
            seed_ptr,
            sample_ptr,
            b,
            h,
            offs_q,
            0,
            threshold,
            False,
            PRECISION,
        )
        _store_output(
            out_ptr,
            m_ptr + stats,
            log2l_ptr + stats,
            acc,
            m_i,
            l_i,
            offs_q,
            mask_q,
            stride_ot,
            keep_scale,
            HEAD_DIM,
            BLOCK_D,
            HAS_STATS,
        )


@triton.jit
def _masked_scores(
    q, k, offs_q, offs_k, mask_k, diagonal, IS_CAUSAL: tl.constexpr, PRECISION: tl.constexpr
):
    """[BLOCK_Q, BLOCK_K] raw scores, -inf where a query may not see a key."""
    s = tl.zeros([q.shape[0], k.shape[0]], tl.float32)
    s = _dot(q, tl.trans(k), s, PRECISION)
    allowed = mask_k[None, :]
    if IS_CAUSAL:
        allowed = allowed & (offs_k[None, :] <= offs_q[:, None] + diagonal)
    return tl.where(allowed, s, float("-inf"))


@triton.jit
def _attend_range(
    m_i,
    l_i,
    acc,
    q,
    k_ptr,
    v_ptr,
    mask_ptr,
    bias_ptr,
    seed_ptr,
    sample_ptr,
    b,
    h,
    offs_q,
    start,
    end,
    length_k,
    diagonal,
    shift,
    max_distance,
    scale,
    scale_log2,
    threshold,
    stride_kt,
    stride_vt,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    BIAS: tl.constexpr,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The tiles of keys in [start, end); without MASKED every query sees every one of them."""
    for start_k in range(start, end, BLOCK_K):
        offs_k = start_k + tl.arange(0, BLOCK_K)
        mask_k = offs_k >= 0
        if MASKED:
            mask_k = _keys_allowed(mask_ptr, offs_k, length_k)
        k = _load_rows(k_ptr, offs_k, mask_k, stride_kt, HEAD_DIM, BLOCK_D)  # [BLOCK_K, BLOCK_D]
        v = _load_rows(v_ptr, offs_k, mask_k, stride_vt, HEAD_DIM, BLOCK_D)  # [BLOCK_K, BLOCK_D]

        s = tl.zeros([q.shape[0], BLOCK_K], tl.float32)
        s = _dot(q, tl.trans(k), s, PRECISION)  # [BLOCK_Q, BLOCK_K]
        factor = scale_log2
        if BIAS != _NO_BIAS:
            distance = offs_k[None, :] - offs_q[:, None] - shift
            s = _add_bias(s, bias_ptr, distance, scale, max_distance, BIAS)
            factor = _LOG2E
        if MASKED:
            allowed = mask_k[None, :]
            if IS_CAUSAL:
                allowed = allowed & (offs_k[None, :] <= offs_q[:, None] + diagonal)
            s = tl.where(allowed, s, float("-inf"))
        m_i, l_i, acc = _softmax_step(
            s,
            v,
            m_i,
            l_i,
            acc,
            factor,
            seed_ptr,
            sample_ptr,
            b,
            h,
            offs_q,
            start_k,
            threshold,
            BIAS != _NO_BIAS,
            PRECISION,
        )
    return m_i, l_i, acc


@triton.jit(do_not_specialize=[*_COUNTS, "num_rows", "max_distance"])
def _attention_stream_fwd_kernel(
    # pointers
    q_ptr,
    k_ptr,
    v_ptr,
    mask_ptr,
    cu_q_ptr,
    cu_k_ptr,
    bias_ptr,
    seed_ptr,
    sample_ptr,
    out_ptr,
    m_ptr,
    log2l_ptr,
    # sizes
    num_seqs,
    num_heads,
    num_rows,
    seqlen_q,
    seqlen_k,
    max_distance,
    scale,
    scale_log2,
    threshold,
    keep_scale,
    # strides
    stride_qb,
    stride_qh,
    stride_qt,
    stride_kb,
    stride_kh,
    stride_kt,
    stride_vb,
    stride_vh,
    stride_vt,
    stride_mb,
    stride_ob,
    stride_oh,
    stride_ot,
    stride_sh,
    # constexprs
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    HAS_STATS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    # One program owns one tile of queries of one head; tiles of a head are neighbours in L2, and
    # the longest causal ones come first.
    _zero_spare_rows(out_ptr, cu_q_ptr, num_seqs, num_rows, num_heads * HEAD_DIM)
    num_tiles = tl.cdiv(seqlen_q, BLOCK_Q)
    tile = num_tiles - 1 - tl.program_id(0) % num_tiles
    row = (tl.program_id(0) // num_tiles).to(tl.int64)  # flat (sequence, head)
    b, h = row // num_heads, row % num_heads
    first_q, length_q = _bounds(cu_q_ptr, b, seqlen_q)
    first_k, length_k = _bounds(cu_k_ptr, b, seqlen_k)
    if tile * BLOCK_Q >= length_q:
        return
    q_ptr = _head(q_ptr, b, h, first_q, stride_qb, stride_qh, stride_qt)
    k_ptr = _head(k_ptr, b, h, first_k, stride_kb, stride_kh, stride_kt)
    v_ptr = _head(v_ptr, b, h, first_k, stride_vb, stride_vh, stride_vt)
    out_ptr = _head(out_ptr, b, h, first_q, stride_ob, stride_oh, stride_ot)
    stats = _stats_head(cu_q_ptr, b, h, first_q, seqlen_q, stride_sh)
    if mask_ptr is not None:
        mask_ptr += b * stride_mb + first_k

    start_q = tile * BLOCK_Q
    offs_q = start_q + tl.arange(0, BLOCK_Q)
    mask_q = offs_q < length_q
    q = _load_rows(q_ptr, offs_q, mask_q, stride_qt, HEAD_DIM, BLOCK_D)  # [BLOCK_Q, BLOCK_D]
    m_i = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_Q], tl.float32)
    acc = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)

    diagonal = length_k - length_q  # query i sees keys j <= i + diagonal
    shift = 0  # and stands at position i + shift
    end_k = length_k + 0
    whole = length_k // BLOCK_K * BLOCK_K  # tiles before it need no mask
    if IS_CAUSAL:
        shift = diagonal
        end_k = tl.maximum(tl.minimum(length_k, start_q + BLOCK_Q + diagonal), 0)
        whole = tl.maximum(tl.minimum(length_k, start_q + 1 + diagonal), 0) // BLOCK_K * BLOCK_K
    if bias_ptr is None:
        if mask_ptr is not None:
            whole = 0
        for MASKED in tl.static_range(0 if mask_ptr is None else 1, 2):
            m_i, l_i, acc = _attend_range(
                m_i,
                l_i,
                acc,
                q,
                k_ptr,
                v_ptr,
                mask_ptr,
                None,
                seed_ptr,
                sample_ptr,
                b,
                h,
                offs_q,
                whole if MASKED else 0,
                end_k if MASKED else whole,
                length_k,
                diagonal,
                shift,
                max_distance,
                scale,
                scale_log2,
                threshold,
                stride_kt,
                stride_vt,
                HEAD_DIM,
                BLOCK_D,
                BLOCK_K,
                IS_CAUSAL,
                _NO_BIAS,
                MASKED == 1,
                PRECISION,
            )
    else:
        bias_ptr += h * (2 * max_distance + 1)
        near, far = _bias_ranges(start_q, BLOCK_Q, shift, max_distance, BLOCK_K)
        near, far = tl.minimum(near, end_k), tl.minimum(far, end_k)
        for BIAS in tl.static_range(_FAR_LEFT, _FAR_RIGHT + 1):
            m_i, l_i, acc = _attend_range(
                m_i,
                l_i,
                acc,
                q,
                k_ptr,
                v_ptr,
                mask_ptr,
                bias_ptr,
                seed_ptr,
                sample_ptr,
                b,
                h,
                offs_q,
                0 if BIAS == _FAR_LEFT else (near if BIAS == _NEAR else far),
                near if BIAS == _FAR_LEFT else (far if BIAS == _NEAR else end_k),
                length_k,
                diagonal,
                shift,
                max_distance,
                scale,
                scale_log2,
                threshold,
                stride_kt,
                stride_vt,
                HEAD_DIM,
                BLOCK_D,
                BLOCK_K,
                IS_CAUSAL,
                BIAS,
                True,
                PRECISION,
            )
    _store_output(
        out_ptr,
        m_ptr + stats,
        log2l_ptr + stats,
        acc,
        m_i,
        l_i,
        offs_q,
        mask_q,
        stride_ot,
        keep_scale,
        HEAD_DIM,
        BLOCK_D,
        HAS_STATS,
    )


@triton.jit
def _tile_bwd_step(
    dk,
    dv,
    k,
    v,
    mask_k,
    q_ptr,
    do_ptr,
    dq_ptr,
    seed_ptr,
    sample_ptr,
    b,
    h,
    start_q,
    offs_k,
    length_q,
    diagonal,
    scale,
    scale_log2,
    threshold,
    keep_scale,
    stride_qt,
    stride_dot,
    stride_dqt,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """dQ of a tile of queries, and what they add to dK and dV; the tile holds all of their keys."""
    offs_q = start_q + tl.arange(0, BLOCK_Q)
    mask_q = offs_q < length_q
    q = _load_rows(q_ptr, offs_q, mask_q, stride_qt, HEAD_DIM, BLOCK_D)  # [BLOCK_Q, BLOCK_D]
    do = _load_rows(do_ptr, offs_q, mask_q, stride_dot, HEAD_DIM, BLOCK_D)  # [BLOCK_Q, BLOCK_D]

    s = _masked_scores(q, k, offs_q, offs_k, mask_k, diagonal, IS_CAUSAL, PRECISION)
    m_i = tl.max(s, 1) * scale_log2
    m_i = tl.where(m_i == float("-inf"), 0.0, m_i)
    p = tl.exp2(s * scale_log2 - m_i[:, None])  # [BLOCK_Q, BLOCK_K]
    l_i = tl.sum(p, 1)
    p = p * (1.0 / tl.where(l_i == 0.0, 1.0, l_i))[:, None]

    # dV before dP: the fewer tiles are alive at once, the fewer registers it takes.
    z_p = p
    if seed_ptr is not None:
        keep = _keep(seed_ptr, sample_ptr, b, h, offs_q, 0, threshold, BLOCK_K)
        z_p = tl.where(keep, p * keep_scale, 0.0)
    z_p = z_p.to(do.dtype)
    dv = _dot(tl.trans(z_p), do, dv, PRECISION)

    dp = tl.zeros([BLOCK_Q, BLOCK_K], tl.float32)
    dp = _dot(do, tl.trans(v), dp, PRECISION)  # [BLOCK_Q, BLOCK_K]
    if seed_ptr is not None:
        # Instead of keeping (or drawing) the mask: what was kept is not 0, unless it is too small
        # for its dtype, and then so is its gradient.
        dp = tl.where(z_p != 0.0, dp * keep_scale, 0.0)
    delta = tl.sum(p * dp, 1)
    ds = (p * (dp - delta[:, None])).to(q.dtype)
    dk = _dot(tl.trans(ds), q, dk, PRECISION)
    dq = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
    dq = _dot(ds, k, dq, PRECISION)
    _store_rows(dq_ptr, dq * scale, offs_q, mask_q, stride_dqt, HEAD_DIM, BLOCK_D)
    return dk, dv


@triton.jit
def _tile_bwd_head(
    row,
    first_q,
    length_q,
    first_k,
    length_k,
    q_ptr,
    k_ptr,
    v_ptr,
    mask_ptr,
    seed_ptr,
    sample_ptr,
    do_ptr,
    dq_ptr,
    dk_ptr,
    dv_ptr,
    num_heads,
    scale,
    scale_log2,
    threshold,
    keep_scale,
    stride_qb,
    stride_qh,
    stride_qt,
    stride_kb,
    stride_kh,
    stride_kt,
    stride_vb,
    stride_vh,
    stride_vt,
    stride_mb,
    stride_dob,
    stride_doh,
    stride_dot,
    stride_dqb,
    stride_dqh,
    stride_dqt,
    stride_dkb,
    stride_dkh,
    stride_dkt,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """All three gradients of one head, whose scores are one tile of keys by one of queries."""
    b, h = row // num_heads, row % num_heads
    q_row = _head(q_ptr, b, h, first_q, stride_qb, stride_qh, stride_qt)
    k_row = _head(k_ptr, b, h, first_k, stride_kb, stride_kh, stride_kt)
    v_row = _head(v_ptr, b, h, first_k, stride_vb, stride_vh, stride_vt)
    do_row = _head(do_ptr, b, h, first_q, stride_dob, stride_doh, stride_dot)
    dq_row = _head(dq_ptr, b, h, first_q, stride_dqb, stride_dqh, stride_dqt)
    dk_row = _head(dk_ptr, b, h, first_k, stride_dkb, stride_dkh, stride_dkt)
    dv_row = _head(dv_ptr, b, h, first_k, stride_dkb, stride_dkh, stride_dkt)
    mask_row = None
    if mask_ptr is not None:
        mask_row = mask_ptr + b * stride_mb + first_k

    offs_k = tl.arange(0, BLOCK_K)
    mask_k = _keys_allowed(mask_row, offs_k, length_k)
    k = _load_rows(k_row, offs_k, mask_k, stride_kt, HEAD_DIM, BLOCK_D)  # [BLOCK_K, BLOCK_D]
    v = _load_rows(v_row, offs_k, mask_k, stride_vt, HEAD_DIM, BLOCK_D)  # [BLOCK_K, BLOCK_D]
    dk = tl.zeros([BLOCK_K, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_K, BLOCK_D], tl.float32)
    # Not unrolled: steps that are scheduled together take more registers than there are (sm_120).
    for start_q in range(0, BLOCK_K, BLOCK_Q):
        dk, dv = _tile_bwd_step(
            dk,
            dv,
            k,
            v,
            mask_k,
            q_row,
            do_row,
            dq_row,
            seed_ptr,
            sample_ptr,
            b,
            h,
            start_q,
            offs_k,
            length_q,
            length_k - length_q,
            scale,
            scale_log2,
            threshold,
            keep_scale,
            stride_qt,
            stride_dot,
            stride_dqt,
            HEAD_DIM,
            BLOCK_D,
            BLOCK_Q,
            BLOCK_K,
            IS_CAUSAL,
            PRECISION,
        )

    exists = offs_k < length_k  # masked keys exist too: their gradient is a written 0
    _store_rows(dk_row, dk * scale, offs_k, exists, stride_dkt, HEAD_DIM, BLOCK_D)
    _store_rows(dv_row, dv, offs_k, exists, stride_dkt, HEAD_DIM, BLOCK_D)


@triton.jit(do_not_specialize=[*_COUNTS, "num_rows_q", "num_rows_k"])
def _attention_tile_bwd_kernel(
    # pointers
    q_ptr,
    k_ptr,
    v_ptr,
    mask_ptr,
    cu_q_ptr,
    cu_k_ptr,
    seed_ptr,
    sample_ptr,
    do_ptr,
    dq_ptr,
    dk_ptr,
    dv_ptr,
    # sizes
    num_seqs,
    num_heads,
    num_rows_q,
    num_rows_k,
    seqlen_q,
    seqlen_k,
    scale,
    scale_log2,
    threshold,
    keep_scale,
    # strides
    stride_qb,
    stride_qh,
    stride_qt,
    stride_kb,
    stride_kh,
    stride_kt,
    stride_vb,
    stride_vh,
    stride_vt,
    stride_mb,
    stride_dob,
    stride_doh,
    stride_dot,
    stride_dqb,
    stride_dqh,
    stride_dqt,
    stride_dkb,
    stride_dkh,
    stride_dkt,
    # constexprs
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    PERSISTENT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    # A program owns a head, or takes every so-many-th one if PERSISTENT: where an SM has room for
    # one program alone, keys and values of the next head are fetched under the arithmetic of this
    # one (with three stages on sm_90).
    row_size = num_heads * HEAD_DIM
    _zero_spare_rows(dq_ptr, cu_q_ptr, num_seqs, num_rows_q, row_size)
    _zero_spare_rows(dk_ptr, cu_k_ptr, num_seqs, num_rows_k, row_size)
    _zero_spare_rows(dv_ptr, cu_k_ptr, num_seqs, num_rows_k, row_size)
    first = tl.program_id(0).to(tl.int64)
    first_q, length_q = _bounds(cu_q_ptr, first // num_heads, seqlen_q)
    first_k, length_k = _bounds(cu_k_ptr, first // num_heads, seqlen_k)
    if PERSISTENT:
        total = (first * 0 + num_seqs) * num_heads
        for row in tl.range(first, total, tl.num_programs(0)):  # flat (sequence, head)
            _tile_bwd_head(
                row,
                first_q,
                length_q,
                first_k,
                length_k,
                q_ptr,
                k_ptr,
                v_ptr,
                mask_ptr,
                seed_ptr,
                sample_ptr,
                do_ptr,
                dq_ptr,
                dk_ptr,
                dv_ptr,
                num_heads,
                scale,
                scale_log2,
                threshold,
                keep_scale,
                stride_qb,
                stride_qh,
                stride_qt,
                stride_kb,
                stride_kh,
                stride_kt,
                stride_vb,
                stride_vh,
                stride_vt,
                stride_mb,
                stride_dob,
                stride_doh,
                stride_dot,
                stride_dqb,
                stride_dqh,
                stride_dqt,
                stride_dkb,
                stride_dkh,
                stride_dkt,
                HEAD_DIM,
                BLOCK_D,
                BLOCK_Q,
                BLOCK_K,
                IS_CAUSAL,
                PRECISION,
            )
            # Carried from head to head: loads whose addresses were loaded are not fetched ahead.
            b = tl.minimum(row + tl.num_programs(0), total - 1) // num_heads
            first_q, length_q = _bounds(cu_q_ptr, b, seqlen_q)
            first_k, length_k = _bounds(cu_k_ptr, b, seqlen_k)
    else:
        _tile_bwd_head(
            first,
            first_q,
            length_q,
            first_k,
            length_k,
            q_ptr,
            k_ptr,
            v_ptr,
            mask_ptr,
            seed_ptr,
            sample_ptr,
            do_ptr,
            dq_ptr,
            dk_ptr,
            dv_ptr,
            num_heads,
            scale,
            scale_log2,
            threshold,
            keep_scale,
            stride_qb,
            stride_qh,
            stride_qt,
            stride_kb,
            stride_kh,
            stride_kt,
            stride_vb,
            stride_vh,
            stride_vt,
            stride_mb,
            stride_dob,
            stride_doh,
            stride_dot,
            stride_dqb,
            stride_dqh,
            stride_dqt,
            stride_dkb,
            stride_dkh,
            stride_dkt,
            HEAD_DIM,
            BLOCK_D,
            BLOCK_Q,
            BLOCK_K,
            IS_CAUSAL,
            PRECISION,
        )


@triton.jit
def _probabilities(
    s,
    m_i,
    log2l,
    bias_ptr,
    distance,
    scale,
    scale_log2,
    max_distance,
    BIAS: tl.constexpr,
):
    """P of one tile from raw scores and the row statistics, which broadcast to it."""
    if BIAS == _NO_BIAS:
        s = s * scale_log2 - m_i
    else:
        s = (_add_bias(s, bias_ptr, distance, scale, max_distance, BIAS) - m_i) * _LOG2E
    return tl.exp2(s - log2l)


@triton.jit
def _dq_range(
    dq,
    far_left,
    far_right,
    q,
    do,
    m_i,
    log2l,
    delta,
    k_ptr,
    v_ptr,
    mask_ptr,
    bias_ptr,
    seed_ptr,
    sample_ptr,
    b,
    h,
    offs_q,
    start,
    end,
    length_k,
    diagonal,
    shift,
    max_distance,
    scale,
    scale_log2,
    threshold,
    keep_scale,
    stride_kt,
    stride_vt,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    BIAS: tl.constexpr,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """What the keys in [start, end) add to dQ, and to the bias gradient of the far distances.

    Without MASKED every query sees every one of them.
    """
    for start_k in range(start, end, BLOCK_K):
        offs_k = start_k + tl.arange(0, BLOCK_K)
        mask_k = offs_k >= 0
        if MASKED:
            mask_k = _keys_allowed(mask_ptr, offs_k, length_k)
        k = _load_rows(k_ptr, offs_k, mask_k, stride_kt, HEAD_DIM, BLOCK_D)  # [BLOCK_K, BLOCK_D]
        v = _load_rows(v_ptr, offs_k, mask_k, stride_vt, HEAD_DIM, BLOCK_D)  # [BLOCK_K, BLOCK_D]
        s = tl.zeros([q.shape[0], BLOCK_K], tl.float32)
        s = _dot(q, tl.trans(k), s, PRECISION)  # [BLOCK_Q, BLOCK_K]
        distance = offs_k[None, :] - offs_q[:, None] - shift
        p = _probabilities(
            s,
            m_i[:, None],
            log2l[:, None],
            bias_ptr,
            distance,
            scale,
            scale_log2,
            max_distance,
            BIAS,
        )
        if MASKED:
            allowed = mask_k[None, :]
            if IS_CAUSAL:
                allowed = allowed & (offs_k[None, :] <= offs_q[:, None] + diagonal)
            p = tl.where(allowed, p, 0.0)
        dp = tl.zeros([q.shape[0], BLOCK_K], tl.float32)
        dp = _dot(do, tl.trans(v), dp, PRECISION)  # [BLOCK_Q, BLOCK_K]
        if seed_ptr is not None:
            keep = _keep(seed_ptr, sample_ptr, b, h, offs_q, start_k, threshold, BLOCK_K)
            dp = tl.where(keep, dp * keep_scale, 0.0)
        ds = p * (dp - delta[:, None])
        if BIAS == _FAR_LEFT:
            far_left += tl.sum(ds, 1)
        elif BIAS == _FAR_RIGHT:
            far_right += tl.sum(ds, 1)
        elif BIAS == _NEAR:
            far_left += tl.sum(tl.where(distance <= -max_distance, ds, 0.0), 1)
            far_right += tl.sum(tl.where(distance >= max_distance, ds, 0.0), 1)
        dq = _dot(ds.to(k.dtype), k, dq, PRECISION)
    return dq, far_left, far_right


@triton.jit(do_not_specialize=[*_COUNTS, "num_rows", "max_distance"])
def _attention_stream_bwd_dq_kernel(
    # pointers
    q_ptr,
    k_ptr,
    v_ptr,
    mask_ptr,
    cu_q_ptr,
    cu_k_ptr,
    bias_ptr,
    seed_ptr,
    sample_ptr,
    out_ptr,
    do_ptr,
    m_ptr,
    log2l_ptr,
    delta_ptr,
    dq_ptr,
    far_ptr,
    # sizes
    num_seqs,
    num_heads,
    num_rows,
    seqlen_q,
    seqlen_k,
    max_distance,
    scale,
    scale_log2,
    threshold,
    keep_scale,
    # strides
    stride_qb,
    stride_qh,
    stride_qt,
    stride_kb,
    stride_kh,
    stride_kt,
    stride_vb,
    stride_vh,
    stride_vt,
    stride_mb,
    stride_ob,
    stride_oh,
    stride_ot,
    stride_sh,
    stride_dob,
    stride_doh,
    stride_dot,
    stride_dqb,
    stride_dqh,
    stride_dqt,
    # constexprs
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr,
):
    # One program owns one tile of queries and walks over the keys in order.
    _zero_spare_rows(dq_ptr, cu_q_ptr, num_seqs, num_rows, num_heads * HEAD_DIM)
    num_tiles = tl.cdiv(seqlen_q, BLOCK_Q)
    tile = num_tiles - 1 - tl.program_id(0) % num_tiles
    row = (tl.program_id(0) // num_tiles).to(tl.int64)  # flat (sequence, head)
    b, h = row // num_heads, row % num_heads
    first_q, length_q = _bounds(cu_q_ptr, b, seqlen_q)
    first_k, length_k = _bounds(cu_k_ptr, b, seqlen_k)
    q_ptr = _head(q_ptr, b, h, first_q, stride_qb, stride_qh, stride_qt)
    k_ptr = _head(k_ptr, b, h, first_k, stride_kb, stride_kh, stride_kt)
    v_ptr = _head(v_ptr, b, h, first_k, stride_vb, stride_vh, stride_vt)
    out_ptr = _head(out_ptr, b, h, first_q, stride_ob, stride_oh, stride_ot)
    do_ptr = _head(do_ptr, b, h, first_q, stride_dob, stride_doh, stride_dot)
    dq_ptr = _head(dq_ptr, b, h, first_q, stride_dqb, stride_dqh, stride_dqt)
    stats = _stats_head(cu_q_ptr, b, h, first_q, seqlen_q, stride_sh)
    if mask_ptr is not None:
        mask_ptr += b * stride_mb + first_k

    start_q = tile * BLOCK_Q
    offs_q = start_q + tl.arange(0, BLOCK_Q)
    mask_q = offs_q < length_q
    q = _load_rows(q_ptr, offs_q, mask_q, stride_qt, HEAD_DIM, BLOCK_D)  # [BLOCK_Q, BLOCK_D]
    do = _load_rows(do_ptr, offs_q, mask_q, stride_dot, HEAD_DIM, BLOCK_D)  # [BLOCK_Q, BLOCK_D]
    out = _load_rows(out_ptr, offs_q, mask_q, stride_ot, HEAD_DIM, BLOCK_D)  # [BLOCK_Q, BLOCK_D]
    # rowsum(O * dO) = rowsum(P * dP), and O is at hand
    delta = tl.sum(out.to(tl.float32) * do.to(tl.float32), 1)
    tl.store(delta_ptr + stats + offs_q, delta, mask=mask_q)
    # Where there is no query, exp2(… - inf) is 0, whatever the bias.
    m_i = tl.load(m_ptr + stats + offs_q, mask=mask_q, other=float("inf"))
    log2l = tl.load(log2l_ptr + stats + offs_q, mask=mask_q, other=0.0)
    dq = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
    far_left = tl.zeros([BLOCK_Q], tl.float32)
    far_right = tl.zeros([BLOCK_Q], tl.float32)

    diagonal = length_k - length_q
    shift = 0
    end_k = length_k + 0
    near = length_k // BLOCK_K * BLOCK_K  # without a bias: tiles before it need no mask
    if IS_CAUSAL:
        shift = diagonal
        end_k = tl.maximum(tl.minimum(length_k, start_q + BLOCK_Q + diagonal), 0)
        near = tl.maximum(tl.minimum(length_k, start_q + 1 + diagonal), 0) // BLOCK_K * BLOCK_K
    if mask_ptr is not None:
        near = 0
    if start_q >= length_q:
        end_k = 0
    near, far = tl.minimum(near, end_k), end_k
    if bias_ptr is not None:
        bias_ptr += h * (2 * max_distance + 1)
        near, far = _bias_ranges(start_q, BLOCK_Q, shift, max_distance, BLOCK_K)
        near, far = tl.minimum(near, end_k), tl.minimum(far, end_k)
    # [0, near), [near, far), [far, end_k): under a bias far to the left, near, and far to the
    # right; else the tiles without and with a mask.
    for PLACE in tl.static_range(_FAR_LEFT, _NEAR + 1 if bias_ptr is None else _FAR_RIGHT + 1):
        dq, far_left, far_right = _dq_range(
            dq,
            far_left,
            far_right,
            q,
            do,
            m_i,
            log2l,
            delta,
            k_ptr,
            v_ptr,
            mask_ptr,
            bias_ptr,
            seed_ptr,
            sample_ptr,
            b,
            h,
            offs_q,
            near if PLACE == _NEAR else (far if PLACE == _FAR_RIGHT else 0),
            near if PLACE == _FAR_LEFT else (far if PLACE == _NEAR else end_k),
            length_k,
            diagonal,
            shift,
            max_distance,
            scale,
            scale_log2,
            threshold,
            keep_scale,
            stride_kt,
            stride_vt,
            HEAD_DIM,
            BLOCK_D,
            BLOCK_K,
            IS_CAUSAL,
            _NO_BIAS if bias_ptr is None else PLACE,
            bias_ptr is not None or PLACE != _FAR_LEFT,
            PRECISION,
        )
    _store_rows(dq_ptr, dq * scale, offs_q, mask_q, stride_dqt, HEAD_DIM, BLOCK_D)
    if far_ptr is not None:  # [H, B * tiles, 2]
        far_ptr += 2 * (h * num_seqs * num_tiles + b * num_tiles + tile)
        tl.store(far_ptr, tl.sum(far_left, 0))
        tl.store(far_ptr + 1, tl.sum(far_right, 0))


@triton.jit
def _dkdv_range(
    dk,
    dv,
    k,
    v,
    q_ptr,
    do_ptr,
    m_ptr,
    log2l_ptr,
    delta_ptr,
    bias_ptr,
    seed_ptr,
    sample_ptr,
    b,
    h,
    offs_k,
    start_k,
    start,
    end,
    length_q,
    diagonal,
    shift,
    max_distance,
    scale,
    scale_log2,
    threshold,
    keep_scale,
    stride_qt,
    stride_dot,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BIAS: tl.constexpr,
    MASKED: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """What the queries in [start, end) add to dK and dV; causality counts if MASKED.

    Transposed scores are first operands straight from registers; but dropout draws for the layout
    of scores that are not, and each thread would draw what others need.
    """
    for start_q in range(start, end, BLOCK_Q):
        offs_q = start_q + tl.arange(0, BLOCK_Q)
        mask_q = offs_q < length_q
        q = _load_rows(q_ptr, offs_q, mask_q, stride_qt, HEAD_DIM, BLOCK_D)  # [BLOCK_Q, BLOCK_D]
        do = _load_rows(do_ptr, offs_q, mask_q, stride_dot, HEAD_DIM, BLOCK_D)
        m_i = tl.load(m_ptr + offs_q, mask=mask_q, other=float("inf"))
        log2l = tl.load(log2l_ptr + offs_q, mask=mask_q, other=0.0)
        delta = tl.load(delta_ptr + offs_q, mask=mask_q, other=0.0)
        # Queries by keys, or keys by queries if TRANSPOSED.
        if TRANSPOSED:
            at_q, at_k = offs_q[None, :], offs_k[:, None]
            m_i, log2l, delta = m_i[None, :], log2l[None, :], delta[None, :]
            s = tl.zeros([BLOCK_K, BLOCK_Q], tl.float32)
            s = _dot(k, tl.trans(q), s, PRECISION)
            dp = tl.zeros([BLOCK_K, BLOCK_Q], tl.float32)
            dp = _dot(v, tl.trans(do), dp, PRECISION)
        else:
            at_q, at_k = offs_q[:, None], offs_k[None, :]
            m_i, log2l, delta = m_i[:, None], log2l[:, None], delta[:, None]
            s = tl.zeros([BLOCK_Q, BLOCK_K], tl.float32)
            s = _dot(q, tl.trans(k), s, PRECISION)
            dp = tl.zeros([BLOCK_Q, BLOCK_K], tl.float32)
            dp = _dot(do, tl.trans(v), dp, PRECISION)
        distance = at_k - at_q - shift
        p = _probabilities(s, m_i, log2l, bias_ptr, distance, scale, scale_log2, max_distance, BIAS)
        if MASKED:
            p = tl.where(at_k <= at_q + diagonal, p, 0.0)
        z_p = p
        if seed_ptr is not None:
            keep = _keep(seed_ptr, sample_ptr, b, h, offs_q, start_k, threshold, BLOCK_K)
            keep = tl.trans(keep) if TRANSPOSED else keep
            z_p = tl.where(keep, p * keep_scale, 0.0)
            dp = tl.where(keep, dp * keep_scale, 0.0)
        z_p = z_p.to(do.dtype)
        ds = (p * (dp - delta)).to(q.dtype)
        dv = _dot(z_p if TRANSPOSED else tl.trans(z_p), do, dv, PRECISION)
        dk = _dot(ds if TRANSPOSED else tl.trans(ds), q, dk, PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=[*_COUNTS, "num_rows", "max_distance"])
def _attention_stream_bwd_dkdv_kernel(
    # pointers
    q_ptr,
    k_ptr,
    v_ptr,
    mask_ptr,
    cu_q_ptr,
    cu_k_ptr,
    bias_ptr,
    seed_ptr,
    sample_ptr,
    do_ptr,
    m_ptr,
    log2l_ptr,
    delta_ptr,
    dk_ptr,
    dv_ptr,
    # sizes
    num_seqs,
    num_heads,
    num_rows,
    seqlen_q,
    seqlen_k,
    max_distance,
    scale,
    scale_log2,
    threshold,
    keep_scale,
    # strides
    stride_qb,
    stride_qh,
    stride_qt,
    stride_kb,
    stride_kh,
    stride_kt,
    stride_vb,
    stride_vh,
    stride_vt,
    stride_mb,
    stride_sh,
    stride_dob,
    stride_doh,
    stride_dot,
    stride_dkb,
    stride_dkh,
    stride_dkt,
    # constexprs
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    # One program owns one tile of keys and walks over the queries in order.
    row_size = num_heads * HEAD_DIM
    _zero_spare_rows(dk_ptr, cu_k_ptr, num_seqs, num_rows, row_size)
    _zero_spare_rows(dv_ptr, cu_k_ptr, num_seqs, num_rows, row_size)
    num_tiles = tl.cdiv(seqlen_k, BLOCK_K)
    tile = tl.program_id(0) % num_tiles
    row = (tl.program_id(0) // num_tiles).to(tl.int64)  # flat (sequence, head)
    b, h = row // num_heads, row % num_heads
    first_q, length_q = _bounds(cu_q_ptr, b, seqlen_q)
    first_k, length_k = _bounds(cu_k_ptr, b, seqlen_k)
    if tile * BLOCK_K >= length_k:
        return
    q_ptr = _head(q_ptr, b, h, first_q, stride_qb, stride_qh, stride_qt)
    k_ptr = _head(k_ptr, b, h, first_k, stride_kb, stride_kh, stride_kt)
    v_ptr = _head(v_ptr, b, h, first_k, stride_vb, stride_vh, stride_vt)
    do_ptr = _head(do_ptr, b, h, first_q, stride_dob, stride_doh, stride_dot)
    dk_ptr = _head(dk_ptr, b, h, first_k, stride_dkb, stride_dkh, stride_dkt)
    dv_ptr = _head(dv_ptr, b, h, first_k, stride_dkb, stride_dkh, stride_dkt)
    stats = _stats_head(cu_q_ptr, b, h, first_q, seqlen_q, stride_sh)
    if mask_ptr is not None:
        mask_ptr += b * stride_mb + first_k

    start_k = tile * BLOCK_K
    offs_k = start_k + tl.arange(0, BLOCK_K)
    mask_k = _keys_allowed(mask_ptr, offs_k, length_k)
    k = _load_rows(k_ptr, offs_k, mask_k, stride_kt, HEAD_DIM, BLOCK_D)  # [BLOCK_K, BLOCK_D]
    v = _load_rows(v_ptr, offs_k, mask_k, stride_vt, HEAD_DIM, BLOCK_D)  # [BLOCK_K, BLOCK_D]
    dk = tl.zeros([BLOCK_K, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_K, BLOCK_D], tl.float32)

    diagonal = length_k - length_q
    shift = 0
    begin, behind = 0, 0
    if IS_CAUSAL:
        # From the first query that sees this tile, rounded down to a tile of queries; tiles from
        # ``behind`` on see all of it.
        shift = diagonal
        begin = tl.maximum(start_k - diagonal, 0) // BLOCK_Q * BLOCK_Q
        behind = tl.maximum(start_k + BLOCK_K - 1 - diagonal + BLOCK_Q - 1, 0) // BLOCK_Q * BLOCK_Q
        behind = tl.minimum(behind, length_q)
    ahead = begin
    if bias_ptr is not None:  # a query far before a key sees it far to the right, and vice versa
        bias_ptr += h * (2 * max_distance + 1)
        ahead, behind = _bias_ranges(start_k, BLOCK_K, -shift, max_distance, BLOCK_Q)
        ahead = tl.minimum(tl.maximum(ahead, begin), length_q)
        behind = tl.minimum(tl.maximum(behind, begin), length_q)
    # [begin, ahead), [ahead, behind), [behind, length_q): under a bias the tile is far to the right
    # of the queries, near, and far to the left; else causality is in question, and not.
    for PLACE in tl.static_range(_FAR_LEFT, _NEAR + 1 if bias_ptr is None else _FAR_RIGHT + 1):
        dk, dv = _dkdv_range(
            dk,
            dv,
            k,
            v,
            q_ptr,
            do_ptr,
            m_ptr + stats,
            log2l_ptr + stats,
            delta_ptr + stats,
            bias_ptr,
            seed_ptr,
            sample_ptr,
            b,
            h,
            offs_k,
            start_k,
            ahead if PLACE == _NEAR else (behind if PLACE == _FAR_LEFT else begin),
            ahead if PLACE == _FAR_RIGHT else (behind if PLACE == _NEAR else length_q),
            length_q,
            diagonal,
            shift,
            max_distance,
            scale,
            scale_log2,
            threshold,
            keep_scale,
            stride_qt,
            stride_dot,
            HEAD_DIM,
            BLOCK_D,
            BLOCK_Q,
            BLOCK_K,
            _NO_BIAS if bias_ptr is None else PLACE,
            IS_CAUSAL and (bias_ptr is not None or PLACE == _NEAR),
            TRANSPOSED,
            PRECISION,
        )
    # What a masked key took part in stayed in its own row. It exists: its gradient is a written 0.
    exists = offs_k < length_k
    if mask_ptr is not None:
        dk = tl.where(mask_k[:, None], dk, 0.0)
        dv = tl.where(mask_k[:, None], dv, 0.0)
    _store_rows(dk_ptr, dk * scale, offs_k, exists, stride_dkt, HEAD_DIM, BLOCK_D)
    _store_rows(dv_ptr, dv, offs_k, exists, stride_dkt, HEAD_DIM, BLOCK_D)


@triton.jit(do_not_specialize=[*_COUNTS, "max_distance", "steps"])
def _attention_bwd_dbias_kernel(
    # pointers
    q_ptr,
    k_ptr,
    v_ptr,
    mask_ptr,
    cu_q_ptr,
    cu_k_ptr,
    bias_ptr,
    buckets_ptr,
    seed_ptr,
    sample_ptr,
    do_ptr,
    m_ptr,
    log2l_ptr,
    delta_ptr,
    near_ptr,
    # sizes
    num_seqs,
    num_heads,
    num_buckets,
    seqlen_q,
    seqlen_k,
    max_distance,
    steps,
    scale,
    scale_log2,
    threshold,
    keep_scale,
    # strides
    stride_qb,
    stride_qh,
    stride_qt,
    stride_kb,
    stride_kh,
    stride_kt,
    stride_vb,
    stride_vh,
    stride_vt,
    stride_mb,
    stride_sh,
    stride_dob,
    stride_doh,
    stride_dot,
    # constexprs
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr,
):
    # One program owns one head and one kind of tile: all whose elements (r, c) stand at the
    # distance BLOCK_K * block - BLOCK_Q * slice + c - r, for one block diagonal and one slice of
    # BLOCK_Q of its rows. It adds dS of ``steps`` such tiles, over sequences and queries, and only
    # then reduces by bucket.
    SLICES: tl.constexpr = BLOCK_K // BLOCK_Q
    h = (tl.program_id(0) % num_heads).to(tl.int64)
    reach = tl.cdiv(max_distance, BLOCK_K)
    kinds = (2 * reach + 1) * SLICES
    kind = tl.program_id(0) // num_heads % kinds
    part = tl.program_id(0) // num_heads // kinds
    parts = tl.num_programs(0) // num_heads // kinds
    block = kind // SLICES - reach
    rows = kind % SLICES * BLOCK_Q + tl.arange(0, BLOCK_Q)
    columns = tl.arange(0, BLOCK_K)
    distance = block * BLOCK_K + columns[None, :] - rows[:, None]  # [BLOCK_Q, BLOCK_K]
    near = tl.minimum(tl.maximum(distance, -max_distance), max_distance)
    bias = tl.load(bias_ptr + h * (2 * max_distance + 1) + near + max_distance)

    # Tiles of keys are aligned, as dropout draws for aligned keys; one tile of queries more than
    # the longest sequence has makes room for the rest.
    tiles = tl.cdiv(seqlen_q, BLOCK_K) + 1
    acc = tl.zeros([BLOCK_Q, BLOCK_K], tl.float32)
    first_step = part.to(tl.int64) * steps
    end_step = tl.minimum(first_step + steps, tiles.to(tl.int64) * num_seqs)
    for step in range(first_step, end_step):
        b = step // tiles
        first_q, length_q = _bounds(cu_q_ptr, b, seqlen_q)
        first_k, length_k = _bounds(cu_k_ptr, b, seqlen_k)
        diagonal = length_k - length_q
        shift = 0
        if IS_CAUSAL:
            shift = diagonal
        start_q = (step % tiles).to(tl.int32) * BLOCK_K - (shift % BLOCK_K + BLOCK_K) % BLOCK_K
        start_k = start_q + shift + block * BLOCK_K
        # A quarter of the diagonals' tiles lies beside the scores of a sequence.
        if (start_q < length_q) & (start_k < length_k) & (start_k + BLOCK_K > 0):
            offs_q = start_q + rows
            offs_k = start_k + columns
            mask_q = (offs_q >= 0) & (offs_q < length_q)
            row_mask_ptr = None
            if mask_ptr is not None:
                row_mask_ptr = mask_ptr + b * stride_mb + first_k
            mask_k = _keys_allowed(row_mask_ptr, offs_k, length_k)

            q_row = _head(q_ptr, b, h, first_q, stride_qb, stride_qh, stride_qt)
            k_row = _head(k_ptr, b, h, first_k, stride_kb, stride_kh, stride_kt)
            v_row = _head(v_ptr, b, h, first_k, stride_vb, stride_vh, stride_vt)
            do_row = _head(do_ptr, b, h, first_q, stride_dob, stride_doh, stride_dot)
            stats = _stats_head(cu_q_ptr, b, h, first_q, seqlen_q, stride_sh) + offs_q
            q = _load_rows(
                q_row, offs_q, mask_q, stride_qt, HEAD_DIM, BLOCK_D
            )  # [BLOCK_Q, BLOCK_D]
            do = _load_rows(
                do_row, offs_q, mask_q, stride_dot, HEAD_DIM, BLOCK_D
            )  # [BLOCK_Q, BLOCK_D]
            k = _load_rows(
                k_row, offs_k, mask_k, stride_kt, HEAD_DIM, BLOCK_D
            )  # [BLOCK_K, BLOCK_D]
            v = _load_rows(
                v_row, offs_k, mask_k, stride_vt, HEAD_DIM, BLOCK_D
            )  # [BLOCK_K, BLOCK_D]
            m_i = tl.load(m_ptr + stats, mask=mask_q, other=float("inf"))
            log2l = tl.load(log2l_ptr + stats, mask=mask_q, other=0.0)
            delta = tl.load(delta_ptr + stats, mask=mask_q, other=0.0)

            s = tl.zeros([BLOCK_Q, BLOCK_K], tl.float32)
            s = _dot(q, tl.trans(k), s, PRECISION)  # [BLOCK_Q, BLOCK_K]
            allowed = mask_q[:, None] & mask_k[None, :]
            if IS_CAUSAL:
                allowed = allowed & (distance <= 0)
            s = (s * scale + bias - m_i[:, None]) * _LOG2E
            p = tl.where(allowed, tl.exp2(s - log2l[:, None]), 0.0)
            dp = tl.zeros([BLOCK_Q, BLOCK_K], tl.float32)
            dp = _dot(do, tl.trans(v), dp, PRECISION)  # [BLOCK_Q, BLOCK_K]
            if seed_ptr is not None:
                keep = _keep(seed_ptr, sample_ptr, b, h, offs_q, start_k, threshold, BLOCK_K)
                dp = tl.where(keep, dp * keep_scale, 0.0)
            acc += p * (dp - delta[:, None])

    in_band = (distance > -max_distance) & (distance < max_distance)
    bucket = tl.where(in_band, tl.load(buckets_ptr + near + max_distance), -1)
    near_ptr += ((h * parts + part) * kinds + kind) * num_buckets
    for index in range(0, num_buckets):
        total = tl.sum(tl.sum(tl.where(bucket == index, acc, 0.0), 1), 0)
        tl.store(near_ptr + index, total)


@triton.jit(do_not_specialize=["num_near", "num_far", "max_distance"])
def _attention_bwd_dbias_sum_kernel(
    # pointers
    near_ptr,
    far_ptr,
    buckets_ptr,
    dbias_ptr,
    # sizes
    num_heads,
    num_buckets,
    num_near,
    num_far,
    max_distance,
    # constexprs
    BLOCK_N: tl.constexpr,
    BUCKETS: tl.constexpr,
):
    # One program adds up the parts of one head, always in the same order.
    h = tl.program_id(0).to(tl.int64)
    offs_b = tl.arange(0, BUCKETS)
    total = tl.zeros([BUCKETS], tl.float32)
    for start in range(0, num_near, BLOCK_N):
        offs_n = start + tl.arange(0, BLOCK_N)
        mask = (offs_n < num_near)[:, None] & (offs_b < num_buckets)[None, :]
        ptrs = near_ptr + (h * num_near + offs_n)[:, None] * num_buckets + offs_b[None, :]
        total += tl.sum(tl.load(ptrs, mask=mask, other=0.0), 0)
    left = tl.zeros([BLOCK_N], tl.float32)
    right = tl.zeros([BLOCK_N], tl.float32)
    for start in range(0, num_far, BLOCK_N):
        offs_n = start + tl.arange(0, BLOCK_N)
        ptrs = far_ptr + 2 * (h * num_far + offs_n)
        left += tl.load(ptrs, mask=offs_n < num_far, other=0.0)
        right += tl.load(ptrs + 1, mask=offs_n < num_far, other=0.0)
    total += tl.where(offs_b == tl.load(buckets_ptr), tl.sum(left, 0), 0.0)
    last = tl.load(buckets_ptr + 2 * max_distance)
    total += tl.where(offs_b == last, tl.sum(right, 0), 0.0)
    ptrs = dbias_ptr + offs_b.to(tl.int64) * num_heads + h
    tl.store(ptrs, total.to(dbias_ptr.dtype.element_ty), mask=offs_b < num_buckets)


# --- launchers ------------------------------------------------------------------------------------


def _block_d(head_dim: int) -> int:
    return max(16, next_power_of_2(head_dim))


def _row_limit(dtype: torch.dtype, head_dim: int) -> int:
    """The longest row of keys that the forward holds in one tile; fp32 always streams."""
    if dtype.itemsize != 2:
        return 0
    return {16: 128, 32: 128, 64: 256, 128: 128}.get(_block_d(head_dim), 0)


def _tile_limit(dtype: torch.dtype, head_dim: int) -> int:
    """The longest queries and keys of a head that the backward holds in one program."""
    if dtype.itemsize != 2:
        return 0
    return {16: 128, 32: 128, 64: 128, 128: 64}.get(_block_d(head_dim), 0)


def needs_statistics(
    dtype: torch.dtype, head_dim: int, max_seqlen_q: int, max_seqlen_k: int, has_bias: bool
) -> bool:
    """Whether the backward streams, and so reads O and row statistics, which the forward keeps."""
    return has_bias or max(max_seqlen_q, max_seqlen_k) > _tile_limit(dtype, head_dim)


class _Shape:
    """Sizes of a call in either layout, and what its launches take of them.

    Made once for all calls of the same sizes, strides and options: the layers of a model.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        device: torch.device,
        query_shape: tuple[int, ...],
        key_shape: tuple[int, ...],
        strides: tuple[tuple[int, ...], ...],
        mask_stride: int,
        num_seqs: int | None,
        max_seqlen_q: int,
        max_seqlen_k: int,
        has_bias: bool,
        dropout_threshold: int | None,
        is_causal: bool,
        scale: float,
        allow_tf32: bool,
    ) -> None:
        self.dtype, self.device, self.has_bias = dtype, device, has_bias
        self.seqlen_q, self.seqlen_k = max_seqlen_q, max_seqlen_k
        self.ragged = num_seqs is not None
        if num_seqs is not None:
            self.batch, (self.rows_q, self.heads, self.head_dim) = num_seqs, query_shape
            self.rows_k = key_shape[0]
        else:
            self.batch, self.heads, length, self.head_dim = query_shape
            self.rows_q, self.rows_k = self.batch * length, self.batch * key_shape[2]
        self.like_query, self.like_key = self.output(query_shape), self.output(key_shape)
        self.block_d = _block_d(self.head_dim)
        self.precision = "tf32" if allow_tf32 else "upcast" if upcast_dot(dtype) else "ieee"
        self.streams = needs_statistics(dtype, self.head_dim, max_seqlen_q, max_seqlen_k, has_bias)
        # What a streaming kernel carries besides the scores; its registers hang on it.
        has_dropout = dropout_threshold is not None
        self.kind = _STREAM_KINDS[2 * has_bias + has_dropout]
        threshold, self.scale = dropout_threshold or 0, scale
        self.shared = dict(
            num_seqs=self.batch,
            num_heads=self.heads,
            seqlen_q=max_seqlen_q,
            seqlen_k=max_seqlen_k,
            scale_log2=scale * _LOG2E.value,
            threshold=threshold,
            keep_scale=256 / (256 - threshold) if threshold < 256 else 0.0,
            **self.strides("q", strides[0]),
            **self.strides("k", strides[1]),
            **self.strides("v", strides[2]),
            stride_mb=mask_stride,
            HEAD_DIM=self.head_dim,
            BLOCK_D=self.block_d,
            IS_CAUSAL=is_causal,
            PRECISION=self.precision,
        )

    @property
    def is_empty(self) -> bool:
        """Whether no query has a key."""
        return 0 in (self.batch, self.heads, self.seqlen_q, self.seqlen_k)

    def strides(self, letter: str, steps: tuple[int, ...]) -> dict[str, int]:
        """Keywords ``stride_<letter>b, …h, …t``."""
        steps = (0, steps[1], steps[0]) if self.ragged else steps[:3]
        return {f"stride_{letter}{axis}": step for axis, step in zip("bht", steps, strict=True)}

    def output(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shape and strides of [N, H, D], or [B, H, T, D] over the [B, T, H, D] of projections."""
        width = max(self.heads, 1) * self.head_dim
        if self.ragged:
            return shape, (width, self.head_dim, 1)
        return shape, (max(shape[2], 1) * width, self.head_dim, width, 1)

    def empty_stats(self, query: torch.Tensor) -> torch.Tensor:
        """fp32 [2, H, rows of query]: m and log2(l); no rows where the backward needs neither."""
        if not self.streams:
            return query.new_empty((2, self.heads, 0), dtype=torch.float32)
        stats = query.new_empty((2, self.heads, self.rows_q), dtype=torch.float32)
        return stats.zero_() if self.ragged else stats  # spare rows are written by no kernel

    def grid(self, length: int, block: int) -> tuple[int]:
        """A program for every tile of every head."""
        return (cdiv(length, block) * self.batch * self.heads,)

    @functools.cached_property
    def forward(self) -> tuple[Any, tuple[int], Fixed]:
        """Kernel, grid and arguments of the forward."""
        kernel, config = _forward_config(self)
        fixed = Fixed(
            num_rows=self.rows_q,
            stride_sh=self.rows_q if self.streams else 1,
            HAS_STATS=self.streams,
            **self.strides("o", self.like_query[1]),
            **self.shared,
            **config,
        )
        if kernel is _attention_stream_fwd_kernel:
            fixed |= dict(scale=self.scale)
        tiles = config.get("tiles_q", 1)
        return kernel, self.grid(self.seqlen_q, config["BLOCK_Q"] * tiles), fixed

    @functools.cached_property
    def tile_backward(self) -> tuple[tuple[int], Fixed]:
        """Grid and arguments of the backward of a head in one tile."""
        config = _config("tile_bwd", self, _tile_kind(self))
        programs = self.batch * self.heads
        if config["PERSISTENT"]:
            programs = min(programs, sm_count(self.device))
        fixed = Fixed(
            num_rows_q=self.rows_q,
            num_rows_k=self.rows_k,
            scale=self.scale,
            **self.strides("dq", self.like_query[1]),
            **self.strides("dk", self.like_key[1]),
            **self.shared,
            **config,
        )
        return (programs,), fixed

    @functools.cached_property
    def stream_dq(self) -> tuple[tuple[int], Fixed]:
        """Grid and arguments of the streaming backward of the queries."""
        config = _config("stream_dq", self, self.kind)
        fixed = Fixed(
            num_rows=self.rows_q,
            scale=self.scale,
            stride_sh=self.rows_q,
            **self.strides("o", self.like_query[1]),
            **self.strides("dq", self.like_query[1]),
            **self.shared,
            **config,
        )
        return self.grid(self.seqlen_q, config["BLOCK_Q"]), fixed

    @functools.cached_property
    def stream_dkdv(self) -> tuple[tuple[int], Fixed]:
        """Grid and arguments of the streaming backward of keys and values."""
        config = _config("stream_dkdv", self, self.kind)
        fixed = Fixed(
            num_rows=self.rows_k,
            scale=self.scale,
            stride_sh=self.rows_q,
            **self.strides("dk", self.like_key[1]),
            **self.shared,
            **config,
        )
        return self.grid(self.seqlen_k, config["BLOCK_K"]), fixed


_kept_shape = functools.lru_cache(maxsize=1024)(_Shape)


def _shape_of(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_mask: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    bias_weight: torch.Tensor | None,
    seed: torch.Tensor | None,
    dropout_threshold: int,
    is_causal: bool,
    scale: float,
    allow_tf32: bool,
) -> _Shape:
    make = _Shape if is_recording() else _kept_shape
    return make(
        query.dtype,
        query.device,
        query.shape,
        key.shape,
        (query.stride(), key.stride(), value.stride()),
        0 if key_mask is None or cu_seqlens_q is not None else key_mask.stride(0),
        None if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1,
        max_seqlen_q,
        max_seqlen_k,
        bias_weight is not None,
        None if seed is None else dropout_threshold,
        is_causal,
        scale,
        allow_tf32,
    )


def _pointers(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_mask: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    seed: torch.Tensor | None,
    sample_index: torch.Tensor | None,
) -> dict[str, torch.Tensor | None]:
    """Those that all kernels share."""
    return dict(
        q_ptr=query,
        k_ptr=key,
        v_ptr=value,
        mask_ptr=None if key_mask is None else key_mask.view(torch.uint8),
        cu_q_ptr=cu_seqlens_q,
        cu_k_ptr=cu_seqlens_k,
        seed_ptr=seed,
        sample_ptr=None if seed is None else sample_index,
    )


def _bias_rows(bias_weight: torch.Tensor | None, buckets: torch.Tensor | None) -> dict[str, object]:
    """T5's table by distance, fp32 [H, 2 * max_distance + 1], and its half width."""
    if bias_weight is None or buckets is None:
        return dict(bias_ptr=None, max_distance=0)
    heads, width = bias_weight.shape[1], buckets.numel()
    rows = bias_weight.new_empty(heads, width, dtype=torch.float32)
    launch(
        _bias_rows_kernel,
        (heads, cdiv(width, 256)),
        bias_weight.device,
        weight_ptr=bias_weight,
        buckets_ptr=buckets,
        rows_ptr=rows,
        width=width,
        stride_wb=bias_weight.stride(0),
        stride_wh=bias_weight.stride(1),
        BLOCK_N=256,
        num_warps=4,
        num_stages=1,
    )
    return dict(bias_ptr=rows, max_distance=width // 2)


#: Queries and keys from which ``_attention_sm90`` is chosen; None: never, as it was not timed yet.
ping_pong_from: int | None = None


def attention_fwd(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_mask: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    bias_weight: torch.Tensor | None,
    buckets: torch.Tensor | None,
    seed: torch.Tensor | None,
    sample_index: torch.Tensor | None,
    dropout_threshold: int,
    is_causal: bool,
    scale: float,
    allow_tf32: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the forward.

    Args:
        buckets: int64 [2 * max_distance + 1], the row of ``bias_weight`` for each distance.
        dropout_threshold: bytes below it drop a probability.
        allow_tf32: whether fp32 is multiplied in TF32; a backward takes that of its forward.
        The others as ``ops.attention`` (dense) and ``ops.attention_varlen`` (with ``cu_seqlens``).

    Returns:
        The output in the shape of ``query``, and the row statistics fp32 [2, H, rows or 0].
    """
    shape = _shape_of(
        query,
        key,
        value,
        key_mask,
        cu_seqlens_q,
        max_seqlen_q,
        max_seqlen_k,
        bias_weight,
        seed,
        dropout_threshold,
        is_causal,
        scale,
        allow_tf32,
    )
    out, stats = query.new_empty_strided(*shape.like_query), shape.empty_stats(query)
    if shape.is_empty:
        return out.zero_(), stats.zero_()
    pointers = _pointers(
        query, key, value, key_mask, cu_seqlens_q, cu_seqlens_k, seed, sample_index
    )
    kernel, grid, fixed = shape.forward
    if ping_pong_from is not None and min(max_seqlen_q, max_seqlen_k) >= ping_pong_from:
        from fastplm.triton_kernels._attention_sm90 import ping_pong  # which imports this module

        kernel, grid, fixed = ping_pong(shape, query, key, value) or shape.forward
    bias = _bias_rows(bias_weight, buckets) if kernel is _attention_stream_fwd_kernel else {}
    m, log2l = stats.unbind() if shape.streams else (stats, stats)  # empty, and not written
    launch(
        kernel,
        grid,
        shape.device,
        fixed=fixed,
        out_ptr=out,
        m_ptr=m,
        log2l_ptr=log2l,
        **pointers,
        **bias,
    )
    return out, stats


def attention_bwd(
    grad_out: torch.Tensor,
    out: torch.Tensor,
    stats: torch.Tensor,
    bias_grad: bool,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_mask: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    bias_weight: torch.Tensor | None,
    buckets: torch.Tensor | None,
    seed: torch.Tensor | None,
    sample_index: torch.Tensor | None,
    dropout_threshold: int,
    is_causal: bool,
    scale: float,
    allow_tf32: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Launch the backward: gradients of query, key, value and, with ``bias_grad``, bias_weight."""
    shape = _shape_of(
        query,
        key,
        value,
        key_mask,
        cu_seqlens_q,
        max_seqlen_q,
        max_seqlen_k,
        bias_weight,
        seed,
        dropout_threshold,
        is_causal,
        scale,
        allow_tf32,
    )
    grad_query = query.new_empty_strided(*shape.like_query)
    grad_key, grad_value = (query.new_empty_strided(*shape.like_key) for _ in range(2))
    grad_bias = query.new_empty(0)
    if bias_weight is not None and bias_grad:
        grad_bias = bias_weight.new_empty(bias_weight.shape)
    if shape.is_empty:
        grads = (grad_query, grad_key, grad_value, grad_bias)
        return tuple(grad.zero_() for grad in grads)  # type: ignore[return-value]
    shared: dict[str, Any] = dict(
        do_ptr=grad_out,
        **shape.strides("do", grad_out.stride()),
        **_pointers(query, key, value, key_mask, cu_seqlens_q, cu_seqlens_k, seed, sample_index),
    )
    if not shape.streams:
        grid, fixed = shape.tile_backward
        launch(
            _attention_tile_bwd_kernel,
            grid,
            shape.device,
            fixed=fixed,
            dq_ptr=grad_query,
            dk_ptr=grad_key,
            dv_ptr=grad_value,
            **shared,
        )
        return grad_query, grad_key, grad_value, grad_bias

    m, log2l = stats.unbind()
    shared |= dict(m_ptr=m, log2l_ptr=log2l, delta_ptr=torch.empty_like(m))
    shared |= _bias_rows(bias_weight, buckets)
    grid, fixed = shape.stream_dq
    far = None
    if bias_weight is not None and bias_grad:
        far = query.new_empty(shape.heads, grid[0] // shape.heads, 2, dtype=torch.float32)
    launch(
        _attention_stream_bwd_dq_kernel,
        grid,
        shape.device,
        fixed=fixed,
        out_ptr=out,
        dq_ptr=grad_query,
        far_ptr=far,
        **shared,
    )
    grid, fixed = shape.stream_dkdv
    launch(
        _attention_stream_bwd_dkdv_kernel,
        grid,
        shape.device,
        fixed=fixed,
        dk_ptr=grad_key,
        dv_ptr=grad_value,
        **shared,
    )
    if far is not None and buckets is not None:
        _launch_bias_gradient(shape, shared, far, buckets, grad_bias)
    return grad_query, grad_key, grad_value, grad_bias


#: Programs of the near-band kernel to aim for: some waves on the largest GPU. It decides in which
#: groups the band is summed, hence its bits, so it does not depend on the device.
_BIAS_PROGRAMS = 1024
#: Tiles a program adds at least, so that its reduction by bucket is a small part of it.
_BIAS_TILES = 4


def _launch_bias_gradient(
    shape: _Shape,
    shared: dict[str, Any],
    far: torch.Tensor,
    buckets: torch.Tensor,
    grad_bias: torch.Tensor,
) -> None:
    config = _config("dbias", shape, shape.kind)
    block_k, num_buckets = config["BLOCK_K"], grad_bias.shape[0]
    kinds = (2 * cdiv(shared["max_distance"], block_k) + 1) * (block_k // config["BLOCK_Q"])
    tiles = shape.batch * (cdiv(shape.seqlen_q, block_k) + 1)
    most = max(1, _BIAS_PROGRAMS // (kinds * shape.heads))
    parts = min(cdiv(tiles, _BIAS_TILES), most)
    near = far.new_empty(shape.heads, parts, kinds, num_buckets)
    launch(
        _attention_bwd_dbias_kernel,
        (parts * kinds * shape.heads,),
        shape.device,
        buckets_ptr=buckets,
        near_ptr=near,
        num_buckets=num_buckets,
        steps=cdiv(tiles, parts),
        scale=shape.scale,
        stride_sh=shape.rows_q,
        **shape.shared,
        **shared,
        **config,
    )
    launch(
        _attention_bwd_dbias_sum_kernel,
        (shape.heads,),
        shape.device,
        near_ptr=near,
        far_ptr=far,
        buckets_ptr=buckets,
        dbias_ptr=grad_bias,
        num_heads=shape.heads,
        num_buckets=num_buckets,
        num_near=parts * kinds,
        num_far=far.shape[1],
        max_distance=shared["max_distance"],
        BLOCK_N=64,
        BUCKETS=next_power_of_2(num_buckets),
        num_warps=4,
        num_stages=1,
    )


# --- launch table ---------------------------------------------------------------------------------
#
# Not measured on a device yet: chosen by what the compile lane says of the machine code, among the
# configurations that spill no register under Triton 3.7.1 in any variant of the kernel. (Under
# 3.6.0 the fp32 forward with a bias does, and nothing else of the compile lane's short list.)
# docs/kernels.md holds the instruction mix and the occupancy it was chosen by.
#
# A loop issues the copies of a later tile after the products of this one, and waits for all but the
# n - 2 latest tiles at n stages (LDGDEPBAR and DEPBAR in the machine code of every architecture):
# with 2 nothing is on its way while it computes, with 3 one tile is. Where 3 would leave an SM room
# for one block instead of two, it stays at 2: then the blocks fill each other's waits. sm_100 has
# many blocks of 2 still.
# 86 has what sm_80 does not fit, for 99 KB of shared memory a block (``_launch.table_arch``).

_LENGTHS = (64, 128, 256)
_TILE_KINDS = (64, 128, "128 dropout")
_STREAM_KINDS = ("plain", "dropout", "bias", "bias dropout")

# "tf32 …": of fp32 in TF32. The tensor cores of sm_90 take 32-bit operands by rows of the sum's
# dimension alone: V is copied there 4 bytes at a time, and K, which two products of dQ read, is
# loaded without a copy ahead.
# Configurations: BLOCK_Q, BLOCK_K, num_warps, num_stages (and TRANSPOSED for dK and dV, PERSISTENT
# for tile_bwd), keyed by (arch, 16 bit?, BLOCK_D), in the order of the kinds above; the last one
# given serves all further kinds, and 64 serves smaller head dims that have none of their own.
_TABLE: dict[str, dict[tuple[int, bool, int], tuple[tuple[int, ...], ...]]] = {
    "row_fwd": {
        (80, True, 64): ((64, 64, 4, 1), (64, 128, 4, 1), (32, 256, 8, 1)),
        (90, True, 64): ((64, 64, 4, 1), (64, 128, 4, 1), (128, 256, 8, 1)),
        (100, True, 64): ((64, 64, 4, 1), (64, 128, 4, 1), (64, 256, 8, 1)),
        (80, True, 128): ((64, 64, 4, 1), (64, 128, 8, 1)),
        (90, True, 128): ((64, 64, 4, 1), (64, 128, 4, 1)),
        (100, True, 128): ((64, 64, 4, 1), (64, 128, 4, 1)),
    },
    "tile_bwd": {
        (80, True, 16): ((64, 64, 4, 1, 0), (128, 128, 8, 1, 0)),
        (90, True, 16): ((64, 64, 4, 1, 0), (128, 128, 8, 3, 1), (128, 128, 8, 1, 0)),
        (100, True, 16): ((64, 64, 4, 1, 0), (128, 128, 8, 1, 0), (128, 128, 8, 1, 0)),
        (80, True, 32): ((64, 64, 4, 1, 0), (16, 128, 8, 1, 0)),
        (90, True, 32): ((64, 64, 4, 1, 0), (128, 128, 8, 3, 1), (128, 128, 8, 1, 0)),
        (100, True, 32): ((64, 64, 4, 1, 0), (128, 128, 8, 1, 0), (128, 128, 8, 1, 0)),
        (80, True, 64): ((64, 64, 4, 1, 0), (32, 128, 8, 1, 0), (32, 128, 8, 1, 0)),
        (90, True, 64): ((64, 64, 4, 1, 0), (128, 128, 8, 3, 1), (128, 128, 8, 1, 0)),
        (100, True, 64): ((64, 64, 4, 1, 0), (128, 128, 8, 1, 0), (128, 128, 8, 1, 0)),
        (80, True, 128): ((64, 64, 8, 1, 0),),
        (90, True, 128): ((64, 64, 8, 1, 0),),
        (100, True, 128): ((64, 64, 4, 1, 0),),
    },
    "stream_fwd": {
        (80, True, 64): ((128, 64, 8, 3), (128, 64, 8, 3), (128, 64, 8, 3)),
        (86, True, 64): ((128, 64, 8, 3), (128, 64, 8, 3), (128, 64, 8, 2)),
        (90, True, 64): ((128, 64, 8, 3), (128, 64, 8, 3), (64, 64, 4, 3)),
        (100, True, 64): ((64, 64, 4, 2), (128, 64, 8, 2), (128, 64, 8, 1)),
        (80, True, 128): ((64, 64, 8, 1), (64, 64, 8, 1), (32, 64, 8, 1)),
        (90, True, 128): ((128, 64, 8, 3), (128, 64, 8, 3), (128, 64, 8, 3)),
        (100, True, 128): ((128, 64, 8, 2), (64, 64, 8, 1), (64, 64, 8, 1)),
        (80, True, 256): ((64, 64, 8, 1), (64, 64, 8, 1), (32, 64, 8, 1)),
        (90, True, 256): ((64, 64, 8, 1), (64, 64, 8, 1), (32, 64, 8, 1)),
        (100, True, 256): ((64, 64, 8, 1), (64, 64, 8, 1), (64, 64, 8, 2)),
        (80, False, 64): ((16, 64, 8, 1), (32, 64, 8, 1), (16, 64, 4, 1)),
        (80, False, 128): ((32, 64, 8, 1), (32, 64, 8, 1), (16, 32, 8, 1)),
    },
    "decode": {
        (80, True, 64): ((16, 64, 4, 3), (16, 64, 4, 3), (16, 64, 4, 3)),
        (90, True, 64): ((16, 64, 4, 3), (16, 64, 4, 3), (16, 64, 4, 3)),
        (100, True, 64): ((16, 64, 4, 2), (16, 64, 4, 2), (16, 64, 4, 2)),
        (80, True, 128): ((16, 64, 4, 2), (16, 64, 4, 2), (16, 64, 4, 2)),
        (90, True, 128): ((16, 64, 4, 3), (16, 64, 4, 3), (16, 64, 4, 3)),
        (100, True, 128): ((16, 64, 4, 2), (16, 64, 4, 2), (16, 64, 4, 2)),
        (80, True, 256): ((16, 64, 4, 2), (16, 64, 4, 2), (16, 64, 8, 1)),
        (90, True, 256): ((16, 64, 4, 2), (16, 64, 4, 2), (16, 64, 8, 1)),
        (100, True, 256): ((16, 64, 4, 2), (16, 64, 4, 2), (16, 64, 4, 1)),
        (80, False, 64): ((16, 64, 4, 1), (16, 64, 4, 1), (16, 64, 4, 1)),
        (80, False, 128): ((16, 64, 8, 1), (16, 64, 8, 1), (16, 64, 16, 1)),
    },
    "stream_dq": {
        (80, True, 64): ((32, 64, 4, 1), (64, 64, 4, 2), (32, 64, 8, 1)),
        (86, True, 64): ((32, 64, 4, 1), (64, 64, 4, 2), (32, 64, 8, 1), (16, 64, 4, 1)),
        (90, True, 64): ((64, 64, 4, 3), (64, 64, 4, 3), (64, 64, 4, 3), (64, 64, 4, 1)),
        (100, True, 64): ((64, 64, 4, 2), (64, 64, 4, 2), (64, 64, 4, 1)),
        (80, True, 128): ((64, 64, 8, 1), (64, 64, 8, 1), (32, 64, 4, 1)),
        (90, True, 128): ((64, 64, 4, 2), (64, 64, 4, 2), (32, 64, 8, 3)),
        (100, True, 128): ((64, 64, 4, 2), (64, 64, 4, 2), (128, 64, 8, 1)),
        (80, True, 256): ((32, 64, 8, 1),),
        (86, True, 256): ((16, 64, 8, 1),),
        (90, True, 256): ((32, 64, 8, 1), (32, 64, 8, 1), (16, 64, 8, 1)),
        (100, True, 256): ((64, 64, 8, 1), (64, 64, 8, 1), (32, 64, 8, 1)),
        (80, False, 64): ((16, 64, 8, 1), (16, 64, 8, 1), (16, 64, 8, 1)),
        (80, False, 128): ((16, 16, 8, 1), (16, 16, 8, 1), (16, 16, 8, 1)),
    },
    "stream_dkdv": {
        (80, True, 64): (
            (32, 64, 4, 1, 1),
            (16, 64, 4, 1, 0),
            (32, 64, 4, 1, 1),
            (32, 64, 8, 1, 1),
        ),
        (90, True, 64): (
            (64, 64, 4, 1, 1),
            (64, 64, 4, 3, 0),
            (32, 64, 4, 3, 1),
            (32, 64, 4, 3, 1),
        ),
        (100, True, 64): ((64, 64, 4, 1, 1), (64, 64, 4, 1, 0), (32, 64, 4, 1, 1)),
        (80, True, 128): ((32, 64, 4, 1, 1), (64, 64, 8, 1, 0), (32, 64, 8, 1, 1)),
        (90, True, 128): (
            (32, 64, 8, 3, 1),
            (128, 64, 8, 1, 0),
            (16, 64, 8, 3, 1),
            (16, 64, 8, 3, 0),
        ),
        (100, True, 128): ((64, 64, 4, 1, 1), (64, 64, 4, 1, 0), (32, 64, 4, 2, 1)),
        (80, True, 256): ((32, 64, 8, 1, 1), (16, 64, 8, 1, 0), (16, 64, 8, 1, 0)),
        (86, True, 256): (
            (16, 64, 8, 1, 0),
            (16, 64, 8, 1, 0),
            (16, 64, 8, 1, 0),
            (16, 32, 8, 1, 0),
        ),
        (90, True, 256): (
            (32, 64, 8, 1, 0),
            (32, 64, 8, 1, 0),
            (16, 64, 8, 1, 0),
            (16, 32, 8, 1, 0),
        ),
        (100, True, 256): ((32, 64, 8, 1, 1), (32, 64, 8, 1, 1), (32, 64, 8, 1, 0)),
        (80, False, 64): ((16, 64, 8, 1, 0), (16, 64, 8, 1, 0), (16, 32, 8, 1, 0)),
        (90, False, 64): ((16, 64, 8, 1, 0), (16, 64, 8, 1, 0), (16, 32, 8, 1, 0)),
        (100, False, 64): ((16, 64, 8, 1, 0), (16, 64, 8, 1, 0), (32, 32, 8, 1, 0)),
        (80, False, 128): ((16, 16, 8, 1, 0), (16, 16, 8, 1, 0), (16, 32, 8, 1, 0)),
        (90, False, 128): ((16, 32, 8, 1, 0), (16, 32, 8, 1, 0), (16, 16, 4, 1, 0)),
        (100, False, 128): ((16, 32, 8, 1, 0),),
    },
    "dbias": {
        (80, True, 64): ((32, 64, 4, 1),),
        (90, True, 64): ((64, 64, 8, 1),),
        (100, True, 64): ((64, 64, 8, 1),),
        (80, True, 128): ((32, 64, 8, 1),),
        (90, True, 128): ((64, 64, 8, 1),),
        (100, True, 128): ((32, 64, 8, 1),),
        (80, True, 256): ((32, 64, 8, 1),),
        (90, True, 256): ((32, 64, 8, 1),),
        (100, True, 256): ((32, 64, 8, 1),),
        (80, False, 64): ((16, 64, 8, 1),),
        (80, False, 128): ((16, 64, 16, 1),),
    },
    "tf32 stream_fwd": {
        (80, False, 64): ((128, 64, 8, 3), (128, 64, 8, 3), (128, 64, 8, 3), (128, 32, 8, 2)),
        (86, False, 64): ((128, 64, 8, 3), (128, 64, 8, 3), (128, 32, 8, 2)),
        (90, False, 64): ((128, 64, 8, 3),),
        (100, False, 64): ((128, 64, 8, 2), (64, 64, 4, 1), (128, 64, 8, 2), (64, 32, 4, 1)),
        (80, False, 128): ((64, 64, 8, 1), (32, 64, 8, 1), (64, 64, 8, 1), (32, 64, 8, 1)),
        (90, False, 128): ((128, 64, 8, 2), (128, 32, 8, 2), (128, 32, 8, 2), (32, 64, 8, 1)),
        (100, False, 128): ((64, 64, 8, 1), (32, 64, 8, 1), (64, 64, 8, 1), (32, 64, 8, 1)),
    },
    "tf32 decode": {
        (80, False, 64): ((16, 64, 4, 2),),
        (90, False, 64): ((16, 64, 4, 3),),
        (80, False, 128): ((16, 64, 8, 1),),
    },
    "tf32 stream_dq": {
        (80, False, 64): ((64, 32, 4, 2), (32, 64, 4, 2), (64, 32, 4, 2), (32, 64, 4, 2)),
        (90, False, 64): ((64, 64, 4, 2), (64, 64, 4, 1), (64, 32, 4, 2), (64, 64, 8, 2)),
        (100, False, 64): ((64, 64, 4, 2), (64, 64, 4, 2), (64, 32, 4, 1)),
        (80, False, 128): ((32, 64, 8, 1),),
        (86, False, 128): ((16, 64, 8, 1),),
        (90, False, 128): ((32, 32, 8, 1),),
        (100, False, 128): ((64, 64, 8, 1), (32, 64, 8, 1)),
    },
    "tf32 stream_dkdv": {
        (80, False, 64): (
            (32, 64, 4, 1, 1),
            (32, 64, 8, 1, 1),
            (32, 64, 4, 1, 1),
            (32, 32, 8, 1, 0),
        ),
        (90, False, 64): (
            (32, 64, 4, 1, 1),
            (32, 64, 8, 1, 1),
            (32, 64, 4, 1, 1),
            (32, 64, 8, 1, 0),
        ),
        (100, False, 64): (
            (32, 64, 4, 1, 1),
            (32, 64, 4, 1, 0),
            (32, 64, 4, 1, 1),
            (32, 64, 8, 1, 0),
        ),
        (80, False, 128): ((32, 64, 8, 1, 0), (32, 64, 8, 1, 0), (16, 64, 8, 1, 0)),
        (86, False, 128): ((16, 64, 8, 1, 0),),
        (90, False, 128): ((32, 64, 8, 1, 0), (32, 64, 8, 1, 0), (16, 64, 8, 1, 0)),
        (100, False, 128): ((32, 64, 8, 1, 0),),
    },
    "tf32 dbias": {
        (80, False, 64): ((32, 64, 8, 1),),
        (90, False, 64): ((64, 64, 8, 1),),
        (100, False, 64): ((32, 64, 8, 1),),
        (80, False, 128): ((32, 64, 8, 1),),
    },
}

#: Up to here a tile of queries is as small as a matmul may be: decoding with a cache.
_DECODE_QUERIES = 16
#: Tiles of queries for which a program of the row kernel keeps its keys and values.
_ROW_TILES = 2


def _length_class(seqlen: int) -> int:
    """The tile that holds a whole row: 64, 128 or 256."""
    return max(64, next_power_of_2(seqlen))


def _tile_kind(shape: _Shape) -> str | int:
    longest = _length_class(max(shape.seqlen_q, shape.seqlen_k))
    return "128 dropout" if longest == 128 and shape.kind == "dropout" else longest


def _config(kernel: str, shape: _Shape, kind: str | int) -> dict[str, int]:
    """The launch configuration of a kernel: ``kind`` is a length class or what a stream carries."""
    if INTERPRETED:
        config = _interpreter_config(kernel, kind, shape.dtype)
    else:
        table = _TABLE[f"tf32 {kernel}" if shape.precision == "tf32" else kernel]
        half, block_d = shape.dtype.itemsize == 2, shape.block_d
        if all(entry[1:] != (half, block_d) for entry in table):
            block_d = 64
        known = tuple(entry[0] for entry in table if entry[1:] == (half, block_d))
        arch = nearest_arch(arch_of(shape.device), known)
        last = "PERSISTENT" if kernel == "tile_bwd" else "TRANSPOSED"
        names = ("BLOCK_Q", "BLOCK_K", "num_warps", "num_stages", last)
        kinds = {"row_fwd": _LENGTHS, "tile_bwd": _TILE_KINDS}.get(kernel, _STREAM_KINDS)
        chosen = table[arch, half, block_d]
        config = dict(zip(names, chosen[min(kinds.index(kind), len(chosen) - 1)], strict=False))
    return config | dict(tiles_q=_ROW_TILES) if kernel == "row_fwd" else config


def _interpreter_config(kernel: str, kind: str | int, dtype: torch.dtype) -> dict[str, int]:
    if kernel == "row_fwd":
        return dict(BLOCK_Q=64, BLOCK_K=int(kind))
    if kernel == "tile_bwd":
        block = 64 if kind == 64 else 128
        return dict(BLOCK_Q=block, BLOCK_K=block, PERSISTENT=kind == 128)
    # The backward rebuilds the scores of the forward and must get the same bits. Tensor cores sum
    # over D in one order whatever the tile; the interpreter's BLAS does not, so all are alike.
    config = dict(BLOCK_Q=32, BLOCK_K=64)
    if kernel == "stream_dkdv":
        config["TRANSPOSED"] = dtype.itemsize == 2 and kind != "dropout"
    return config


def _forward_config(shape: _Shape) -> tuple[Any, dict[str, int]]:
    whole_row = not shape.has_bias and shape.seqlen_k <= _row_limit(shape.dtype, shape.head_dim)
    if shape.seqlen_q > _DECODE_QUERIES and whole_row:
        return _attention_row_fwd_kernel, _config("row_fwd", shape, _length_class(shape.seqlen_k))
    kernel = "decode" if shape.seqlen_q <= _DECODE_QUERIES else "stream_fwd"
    return _attention_stream_fwd_kernel, _config(kernel, shape, shape.kind)


def compile_cases() -> Iterator[tuple[str, Callable[[], object]]]:
    """Every shipped configuration: a label ("slow: …" for the long lane) and what launches it."""
    variants = {
        "padded": dict(has_mask=True),
        "causal": dict(is_causal=True),
        "ragged": dict(ragged=True),
        "dropout": dict(has_mask=True, has_dropout=True),
        "bias": dict(has_bias=True),
        "everything": dict(ragged=True, is_causal=True, has_mask=True, has_dropout=True),
        "everything and bias": dict(
            ragged=True, is_causal=True, has_mask=True, has_dropout=True, has_bias=True
        ),
    }
    always = {
        ("bfloat16", 64, 128, "padded"),
        ("bfloat16", 64, 128, "everything"),
        ("bfloat16", 64, 256, "ragged"),
        ("bfloat16", 64, 1024, "ragged"),
        ("bfloat16", 64, 1024, "everything"),
        ("bfloat16", 64, 1024, "everything and bias"),
        ("bfloat16", 128, 1024, "causal"),
        ("float32", 64, 1024, "everything and bias"),
        ("tf32", 64, 1024, "ragged"),
        ("tf32", 64, 1024, "everything and bias"),
    }
    for dtype, head_dims in (
        ("bfloat16", (64, 16, 32, 80, 128, 256)),
        ("float16", (64,)),
        ("float32", (64, 80)),
        ("tf32", (64, 80)),
    ):
        for head_dim in head_dims:
            case = functools.partial(
                meta_case,
                torch.float32 if dtype == "tf32" else getattr(torch, dtype),
                head_dim,
                allow_tf32=dtype == "tf32",
            )
            for seqlen in (64, 128, 256, 1024):
                for name, options in variants.items():
                    label = f"{dtype} D={head_dim} T={seqlen} {name}"
                    slow = "" if (dtype, head_dim, seqlen, name) in always else "slow: "
                    yield slow + label, functools.partial(case, seqlen, seqlen, **options)
            yield (
                f"slow: {dtype} D={head_dim} one query to 512 keys",
                functools.partial(case, 1, 512),
            )


def meta_case(
    dtype: torch.dtype,
    head_dim: int,
    seqlen_q: int,
    seqlen_k: int,
    *,
    ragged: bool = False,
    is_causal: bool = False,
    has_mask: bool = False,
    has_dropout: bool = False,
    has_bias: bool = False,
    allow_tf32: bool = False,
    batch: int = 8,
    heads: int = 4,
) -> None:
    """Launch forward and backward on meta tensors that are views of packed projections."""

    def meta(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def project(length: int) -> tuple[torch.Tensor, ...]:
        if ragged:
            return meta(batch * length, 3, heads, head_dim, dtype=dtype).unbind(1)
        return meta(batch, length, 3, heads, head_dim, dtype=dtype).permute(2, 0, 3, 1, 4).unbind()

    query, (_, key, value) = project(seqlen_q)[0], project(seqlen_k)
    cu_seqlens = meta(batch + 1, dtype=torch.int32) if ragged else None
    keys = (batch * seqlen_k,) if ragged else (batch, seqlen_k)
    arguments: dict[str, Any] = dict(
        query=query,
        key=key,
        value=value,
        key_mask=meta(*keys, dtype=torch.bool) if has_mask else None,
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_k=cu_seqlens,
        max_seqlen_q=seqlen_q,
        max_seqlen_k=seqlen_k,
        bias_weight=meta(32, heads, dtype=torch.float32) if has_bias else None,
        buckets=meta(257, dtype=torch.int64) if has_bias else None,
        seed=meta(dtype=torch.int64) if has_dropout else None,
        sample_index=meta(batch, dtype=torch.int64) if has_dropout else None,
        dropout_threshold=26 if has_dropout else 0,
        is_causal=is_causal,
        scale=0.125,
        allow_tf32=allow_tf32,
    )
    out, stats = attention_fwd(**arguments)
    attention_bwd(out, out, stats, has_bias, **arguments)
