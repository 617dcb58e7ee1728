"""DeBERTa's attention: scores of contents and of positions, whose products exist in tiles only.

    s_ij = q_i . k_j + q_i . pk_{i-j} + k_j . pq_{i-j}      o = dropout(softmax(scale s)) v

A table has a row for each place, the distance i - j plus reach - 1. A tile of BLOCK queries and
BLOCK keys sees 2 BLOCK - 1 places, in a low and a high block. Query i sees of a pair of columns
that are BLOCK apart only one, so that both products make one tile, whose rows are then turned: the
element of key j stands at (i - j - 1) mod BLOCK, and back again by the same number. So gradients
take the same way as scores, and no two of them meet.

The gradients of the tables are sums over all tiles. A program owns tiles of keys of one head, and
goes through them in order: what the high block gets is kept for the next queries, whose low
block it is. So each block is added once to the program's partial sums, which a last kernel adds up
by the rows of the table. Nothing is atomic, and results repeat bit for bit.

Legend: N rows · H heads · D head dim · T length · places [2 reach - 1]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
import triton
import triton.language as tl

from fastplm.triton_kernels._launch import (
    arch_of,
    cdiv,
    launch,
    nearest_arch,
    next_power_of_2,
    sm_count,
    upcast_dot,
)
from fastplm.triton_kernels.attention.tiles import (
    LOG2E,
    Dropout,
    Head,
    Rows,
    Tensor,
    Tile,
    bounds,
    keep_mask,
    load_rows,
    multiply,
    rows_of,
    stats_head,
    store_rows,
    zero_spare_rows,
)

# Kind of call -> arch -> BLOCK and warps of the forward, of dQ, of dK and dV.
# None was measured on a device yet: the compile tests, which allow no spills, chose them.
_TABLE = {
    "half": {80: ((32, 4), (32, 4), (32, 8))},
    "half, wide": {
        80: ((32, 8), (32, 8), (32, 8)),
        100: ((32, 8), (16, 8), (16, 8)),
        120: ((32, 8), (16, 8), (16, 8)),
    },
    "fp32": {80: ((16, 4), (16, 4), (16, 8))},
}


_BLOCK_P = 32  # partial sums that are added at a time
_COUNTS = ("num_seqs", "num_rows", "seqlen", "reach", "threshold", "stride_sh")


@triton.jit
def turned(tile, BLOCK: tl.constexpr, AXIS: tl.constexpr):
    """Element n of line m of a tile comes from (m - n - 1) mod BLOCK, along the axis."""
    m, n = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK)[None, :]
    if AXIS == 0:  # key n of query m: from m - n - 1, of column n
        return tl.gather(tile, (m - n - 1) & (BLOCK - 1), 0)
    return tl.gather(tile, (m - n - 1) & (BLOCK - 1), 1)


@triton.jit
def back(tile, BLOCK: tl.constexpr, AXIS: tl.constexpr):
    """What undoes ``turned``."""
    m, n = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK)[None, :]
    if AXIS == 0:  # place m of key n: of query m + n + 1
        return tl.gather(tile, (m + n + 1) & (BLOCK - 1), 0)
    return tl.gather(tile, (m - n - 1) & (BLOCK - 1), 1)


@triton.jit
def is_low(BLOCK: tl.constexpr, AXIS: tl.constexpr):
    """[BLOCK, BLOCK] bool: whether a product of a position is that of the low block of places."""
    m, n = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK)[None, :]
    if AXIS == 0:  # place m, key n
        return m + n >= BLOCK - 1
    return n >= m  # query m, place n


@triton.jit
def load_places(table, first, reach, TILE: tl.constexpr):
    """The rows of a block of places, [BLOCK, BLOCK_D]."""
    places = first + tl.arange(0, TILE.BLOCK_Q)
    return load_rows(table, places, (places >= 0) & (places < 2 * reach - 1), TILE)


@triton.jit
def products(q, k, pk_rows, pq_rows, first, reach, TILE: tl.constexpr):
    """[BLOCK, BLOCK] all products of a tile; ``first`` is the place of its low block."""
    BLOCK: tl.constexpr = TILE.BLOCK_Q
    zero = tl.zeros([BLOCK, BLOCK], tl.float32)
    s = multiply(q, tl.trans(k), zero, TILE.PRECISION)
    if pk_rows is not None:
        low = load_places(pk_rows, first, reach, TILE)
        high = load_places(pk_rows, first + BLOCK, reach, TILE)
        low = multiply(q, tl.trans(low), zero, TILE.PRECISION)  # [queries, places]
        high = multiply(q, tl.trans(high), zero, TILE.PRECISION)
        s += turned(tl.where(is_low(BLOCK, 1), low, high), BLOCK, 1)
    if pq_rows is not None:
        low = load_places(pq_rows, first, reach, TILE)
        high = load_places(pq_rows, first + BLOCK, reach, TILE)
        low = multiply(low, tl.trans(k), zero, TILE.PRECISION)  # [places, keys]
        high = multiply(high, tl.trans(k), zero, TILE.PRECISION)
        s += turned(tl.where(is_low(BLOCK, 0), low, high), BLOCK, 0)
    return s


@triton.jit
def keys_seen(mask_ptr, offs_k, length):
    """[BLOCK] bool: the keys that exist and that the key mask lets through."""
    exists = offs_k < length
    if mask_ptr is not None:
        exists = exists & (tl.load(mask_ptr + offs_k, mask=exists, other=0) != 0)
    return exists


@triton.jit(do_not_specialize=[*_COUNTS])
def _disentangled_attention_fwd_kernel(
    # pointers
    q_ptr,
    k_ptr,
    v_ptr,
    pk_ptr,
    pq_ptr,
    mask_ptr,
    cu_ptr,
    seed_ptr,
    sample_ptr,
    out_ptr,
    m_ptr,
    log2l_ptr,
    # sizes
    num_seqs,
    num_heads,
    num_rows,
    seqlen,
    reach,
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
    stride_ob,
    stride_oh,
    stride_ot,
    stride_mb,
    stride_sh,
    # constexprs
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    # One program handles one tile of queries and loops over the keys in order.
    TILE: tl.constexpr = Tile(HEAD_DIM, BLOCK_D, BLOCK, BLOCK, PRECISION)
    zero_spare_rows(out_ptr, cu_ptr, num_seqs, num_rows, num_heads * HEAD_DIM, stride_ot)
    num_tiles = tl.cdiv(seqlen, BLOCK)
    start_q = tl.program_id(0) % num_tiles * BLOCK
    row = (tl.program_id(0) // num_tiles).to(tl.int64)  # flat (sequence, head)
    dropout = Dropout(seed_ptr, sample_ptr, threshold, keep_scale)
    b, h = row // num_heads, row % num_heads
    first, length = bounds(cu_ptr, b, seqlen)
    stats = stats_head(cu_ptr, b, h, first, seqlen, stride_sh)
    if mask_ptr is not None:
        mask_ptr += b * stride_mb + first
    # Not by a helper, which under Triton 3.6 cannot return None for a term that there is not.
    stride_p = num_heads * HEAD_DIM
    pk_rows = None
    if pk_ptr is not None:
        pk_rows = Rows(pk_ptr + h * HEAD_DIM, stride_p)
    pq_rows = None
    if pq_ptr is not None:
        pq_rows = Rows(pq_ptr + h * HEAD_DIM, stride_p)
    head = Head(b, h, length, length, None, None, 0, mask_ptr, None, None, None, dropout)
    if start_q >= head.length_q:
        return
    key = rows_of(Tensor(k_ptr, stride_kb, stride_kh, stride_kt), head.b, head.h, first)
    value = rows_of(Tensor(v_ptr, stride_vb, stride_vh, stride_vt), head.b, head.h, first)
    query = rows_of(Tensor(q_ptr, stride_qb, stride_qh, stride_qt), head.b, head.h, first)
    offs_q = start_q + tl.arange(0, BLOCK)
    mask_q = offs_q < head.length_q
    q = load_rows(query, offs_q, mask_q, TILE)  # [BLOCK, BLOCK_D]
    m_i = tl.full([BLOCK], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK], tl.float32)
    acc = tl.zeros([BLOCK, BLOCK_D], tl.float32)
    for start_k in range(0, head.length_k, BLOCK):
        offs_k = start_k + tl.arange(0, BLOCK)
        mask_k = keys_seen(head.mask_ptr, offs_k, head.length_k)
        k = load_rows(key, offs_k, mask_k, TILE)
        v = load_rows(value, offs_k, mask_k, TILE)
        s = products(q, k, pk_rows, pq_rows, start_q - start_k - BLOCK + reach, reach, TILE)
        s = tl.where(mask_k[None, :], s * scale_log2, float("-inf"))
        # -inf - -inf is NaN: a row that has seen no key yet keeps a reference point of 0.
        m_new = tl.maximum(m_i, tl.max(s, 1))
        m_ref = tl.where(m_new == float("-inf"), 0.0, m_new)
        alpha = tl.exp2(m_i - m_ref)
        p = tl.exp2(s - m_ref[:, None])  # [BLOCK, BLOCK]
        l_i = l_i * alpha + tl.sum(p, 1)
        if seed_ptr is not None:
            p = tl.where(keep_mask(head, offs_q, start_k, BLOCK), p, 0.0)
        acc = multiply(p.to(v.dtype), v, acc * alpha[:, None], PRECISION)
        m_i = m_new
    alive = l_i != 0.0
    l_i = tl.where(alive, l_i, 1.0)
    out = rows_of(Tensor(out_ptr, stride_ob, stride_oh, stride_ot), head.b, head.h, first)
    store_rows(out, acc * (keep_scale / l_i)[:, None], offs_q, mask_q, TILE)
    tl.store(m_ptr + stats + offs_q, tl.where(alive, m_i, 0.0), mask=mask_q)
    tl.store(log2l_ptr + stats + offs_q, tl.log2(l_i), mask=mask_q)


@triton.jit
def score_gradient(
    q,
    k,
    v,
    do,
    m_i,
    log2l,
    delta,
    mask_k,
    offs_q,
    start_k,
    scale_log2,
    pk_rows,
    pq_rows,
    first,
    reach,
    head,
    TILE: tl.constexpr,
):
    """(dS of a tile, without the scale; what dV is made of), both [BLOCK, BLOCK] in fp32."""
    BLOCK: tl.constexpr = TILE.BLOCK_Q
    s = products(q, k, pk_rows, pq_rows, first, reach, TILE)
    p = tl.exp2(s * scale_log2 - m_i[:, None] - log2l[:, None])
    p = tl.where(mask_k[None, :] & (offs_q < head.length_q)[:, None], p, 0.0)
    kept = p
    if head.dropout.seed_ptr is not None:
        keep = keep_mask(head, offs_q, start_k, BLOCK)
        kept = tl.where(keep, p * head.dropout.keep_scale, 0.0)
    dp = multiply(do, tl.trans(v), tl.zeros([BLOCK, BLOCK], tl.float32), TILE.PRECISION)
    if head.dropout.seed_ptr is not None:  # what was kept is not 0, unless its gradient is
        dp = tl.where(kept != 0.0, dp * head.dropout.keep_scale, 0.0)
    return p * (dp - delta[:, None]), kept


@triton.jit(do_not_specialize=[*_COUNTS])
def _disentangled_attention_bwd_dq_kernel(
    # pointers
    q_ptr,
    k_ptr,
    v_ptr,
    pk_ptr,
    pq_ptr,
    mask_ptr,
    cu_ptr,
    seed_ptr,
    sample_ptr,
    out_ptr,
    do_ptr,
    m_ptr,
    log2l_ptr,
    delta_ptr,
    dq_ptr,
    # sizes
    num_seqs,
    num_heads,
    num_rows,
    seqlen,
    reach,
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
    stride_ob,
    stride_oh,
    stride_ot,
    stride_dob,
    stride_doh,
    stride_dot,
    stride_mb,
    stride_sh,
    # constexprs
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    # One program handles one tile of queries and loops over the keys in order.
    TILE: tl.constexpr = Tile(HEAD_DIM, BLOCK_D, BLOCK, BLOCK, PRECISION)
    zero_spare_rows(dq_ptr, cu_ptr, num_seqs, num_rows, num_heads * HEAD_DIM, stride_ot)
    num_tiles = tl.cdiv(seqlen, BLOCK)
    start_q = tl.program_id(0) % num_tiles * BLOCK
    row = (tl.program_id(0) // num_tiles).to(tl.int64)  # flat (sequence, head)
    dropout = Dropout(seed_ptr, sample_ptr, threshold, keep_scale)
    b, h = row // num_heads, row % num_heads
    first, length = bounds(cu_ptr, b, seqlen)
    stats = stats_head(cu_ptr, b, h, first, seqlen, stride_sh)
    if mask_ptr is not None:
        mask_ptr += b * stride_mb + first
    # Not by a helper, which under Triton 3.6 cannot return None for a term that there is not.
    stride_p = num_heads * HEAD_DIM
    pk_rows = None
    if pk_ptr is not None:
        pk_rows = Rows(pk_ptr + h * HEAD_DIM, stride_p)
    pq_rows = None
    if pq_ptr is not None:
        pq_rows = Rows(pq_ptr + h * HEAD_DIM, stride_p)
    head = Head(b, h, length, length, None, None, 0, mask_ptr, None, None, None, dropout)
    if start_q >= head.length_q:
        return
    query = rows_of(Tensor(q_ptr, stride_qb, stride_qh, stride_qt), head.b, head.h, first)
    key = rows_of(Tensor(k_ptr, stride_kb, stride_kh, stride_kt), head.b, head.h, first)
    value = rows_of(Tensor(v_ptr, stride_vb, stride_vh, stride_vt), head.b, head.h, first)
    out = rows_of(Tensor(out_ptr, stride_ob, stride_oh, stride_ot), head.b, head.h, first)
    d_out = rows_of(Tensor(do_ptr, stride_dob, stride_doh, stride_dot), head.b, head.h, first)
    d_query = rows_of(Tensor(dq_ptr, stride_ob, stride_oh, stride_ot), head.b, head.h, first)
    offs_q = start_q + tl.arange(0, BLOCK)
    mask_q = offs_q < head.length_q
    q = load_rows(query, offs_q, mask_q, TILE)  # [BLOCK, BLOCK_D]
    do = load_rows(d_out, offs_q, mask_q, TILE)
    o = load_rows(out, offs_q, mask_q, TILE)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    tl.store(delta_ptr + stats + offs_q, delta, mask=mask_q)
    m_i = tl.load(m_ptr + stats + offs_q, mask=mask_q, other=0.0)
    log2l = tl.load(log2l_ptr + stats + offs_q, mask=mask_q, other=0.0)
    dq = tl.zeros([BLOCK, BLOCK_D], tl.float32)
    for start_k in range(0, head.length_k, BLOCK):
        offs_k = start_k + tl.arange(0, BLOCK)
        mask_k = keys_seen(head.mask_ptr, offs_k, head.length_k)
        k = load_rows(key, offs_k, mask_k, TILE)
        v = load_rows(value, offs_k, mask_k, TILE)
        place = start_q - start_k - BLOCK + reach
        ds, _ = score_gradient(
            q,
            k,
            v,
            do,
            m_i,
            log2l,
            delta,
            mask_k,
            offs_q,
            start_k,
            scale_log2,
            pk_rows,
            pq_rows,
            place,
            reach,
            head,
            TILE,
        )
        dq = multiply(ds.to(k.dtype), k, dq, PRECISION)
        if pk_rows is not None:
            ds = back(ds, BLOCK, 1).to(q.dtype)  # [queries, places]
            zero = tl.zeros_like(ds)
            low = load_places(pk_rows, place, reach, TILE)
            dq = multiply(tl.where(is_low(BLOCK, 1), ds, zero), low, dq, PRECISION)
            high = load_places(pk_rows, place + BLOCK, reach, TILE)
            dq = multiply(tl.where(is_low(BLOCK, 1), zero, ds), high, dq, PRECISION)
    store_rows(d_query, dq * scale, offs_q, mask_q, TILE)


@triton.jit
def add_rows(sums, tile, first, reach, TILE: tl.constexpr):
    """Add a tile to a block of places in a program's own sums, which nobody else reads now."""
    places = first.to(tl.int64) + tl.arange(0, TILE.BLOCK_Q)
    offs_d = tl.arange(0, TILE.BLOCK_D)
    exists = (places >= 0) & (places < 2 * reach - 1)
    mask = exists[:, None] & (offs_d < TILE.HEAD_DIM)[None, :]
    ptrs = sums + places[:, None] * TILE.HEAD_DIM + offs_d[None, :]
    tl.store(ptrs, tl.load(ptrs, mask=mask, other=0.0) + tile, mask=mask)


@triton.jit(do_not_specialize=[*_COUNTS])
def _disentangled_attention_bwd_dkdv_kernel(
    # pointers
    q_ptr,
    k_ptr,
    v_ptr,
    pk_ptr,
    pq_ptr,
    mask_ptr,
    cu_ptr,
    seed_ptr,
    sample_ptr,
    do_ptr,
    m_ptr,
    log2l_ptr,
    delta_ptr,
    dk_ptr,
    dv_ptr,
    dpk_ptr,
    dpq_ptr,
    # sizes
    num_seqs,
    num_heads,
    num_rows,
    seqlen,
    reach,
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
    stride_ob,
    stride_oh,
    stride_ot,
    stride_dob,
    stride_doh,
    stride_dot,
    stride_mb,
    stride_sh,
    # constexprs
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    # A program handles tiles of keys of one head, of all sequences in turn, and loops over the
    # queries. Each sequence counts its tiles from another one, as its last may be empty.
    TILE: tl.constexpr = Tile(HEAD_DIM, BLOCK_D, BLOCK, BLOCK, PRECISION)
    row_size = num_heads * HEAD_DIM
    zero_spare_rows(dk_ptr, cu_ptr, num_seqs, num_rows, row_size, stride_ot)
    zero_spare_rows(dv_ptr, cu_ptr, num_seqs, num_rows, row_size, stride_ot)
    program = tl.program_id(0)
    h = (program % num_heads).to(tl.int64)
    dropout = Dropout(seed_ptr, sample_ptr, threshold, keep_scale)
    # Not by a helper, which under Triton 3.6 cannot return None for a term that there is not.
    pk_rows = None
    if pk_ptr is not None:
        pk_rows = Rows(pk_ptr + h * HEAD_DIM, row_size)
    pq_rows = None
    if pq_ptr is not None:
        pq_rows = Rows(pq_ptr + h * HEAD_DIM, row_size)
    own = program.to(tl.int64) * (2 * reach.to(tl.int64) - 1) * HEAD_DIM
    low_1, low_0 = is_low(BLOCK, 1), is_low(BLOCK, 0)
    num_tiles = tl.cdiv(seqlen, BLOCK)
    step = tl.num_programs(0) // num_heads
    for tile in range((program // num_heads).to(tl.int64), (h * 0 + num_seqs) * num_tiles, step):
        b = tile // num_tiles
        start_k = ((tile + b) % num_tiles).to(tl.int32) * BLOCK
        first, length = bounds(cu_ptr, b, seqlen)
        length = tl.where(start_k < length, length, 0)  # 0: the sequence has no such tile
        stats = stats_head(cu_ptr, b, h, first, seqlen, stride_sh)
        mask_row = None
        if mask_ptr is not None:
            mask_row = mask_ptr + b * stride_mb + first
        head = Head(b, h, length, length, None, None, 0, mask_row, None, None, None, dropout)
        query = rows_of(Tensor(q_ptr, stride_qb, stride_qh, stride_qt), b, h, first)
        key = rows_of(Tensor(k_ptr, stride_kb, stride_kh, stride_kt), b, h, first)
        value = rows_of(Tensor(v_ptr, stride_vb, stride_vh, stride_vt), b, h, first)
        d_out = rows_of(Tensor(do_ptr, stride_dob, stride_doh, stride_dot), b, h, first)
        d_key = rows_of(Tensor(dk_ptr, stride_ob, stride_oh, stride_ot), b, h, first)
        d_value = rows_of(Tensor(dv_ptr, stride_ob, stride_oh, stride_ot), b, h, first)
        offs_k = start_k + tl.arange(0, BLOCK)
        mask_k = keys_seen(mask_row, offs_k, length)
        k = load_rows(key, offs_k, mask_k, TILE)  # [BLOCK, BLOCK_D]
        v = load_rows(value, offs_k, mask_k, TILE)
        dk = tl.zeros([BLOCK, BLOCK_D], tl.float32)
        dv = tl.zeros([BLOCK, BLOCK_D], tl.float32)
        # Of the high block of places, which is the low one of the next queries.
        dpk = tl.zeros([BLOCK, BLOCK_D], tl.float32)
        dpq = tl.zeros([BLOCK, BLOCK_D], tl.float32)
        for start_q in range(0, head.length_q, BLOCK):
            offs_q = start_q + tl.arange(0, BLOCK)
            mask_q = offs_q < head.length_q
            q = load_rows(query, offs_q, mask_q, TILE)
            do = load_rows(d_out, offs_q, mask_q, TILE)
            m_i = tl.load(m_ptr + stats + offs_q, mask=mask_q, other=0.0)
            log2l = tl.load(log2l_ptr + stats + offs_q, mask=mask_q, other=0.0)
            delta = tl.load(delta_ptr + stats + offs_q, mask=mask_q, other=0.0)
            place = start_q - start_k - BLOCK + reach
            ds, kept = score_gradient(
                q,
                k,
                v,
                do,
                m_i,
                log2l,
                delta,
                mask_k,
                offs_q,
                start_k,
                scale_log2,
                pk_rows,
                pq_rows,
                place,
                reach,
                head,
                TILE,
            )
            dv = multiply(tl.trans(kept.to(do.dtype)), do, dv, PRECISION)
            if pk_rows is not None:
                turn = back(ds, BLOCK, 1).to(q.dtype)  # [queries, places]
                zero = tl.zeros_like(turn)
                dpk = multiply(tl.trans(tl.where(low_1, turn, zero)), q, dpk, PRECISION)
                add_rows(dpk_ptr + own, dpk, place, reach, TILE)
                dpk = tl.zeros([BLOCK, BLOCK_D], tl.float32)
                dpk = multiply(tl.trans(tl.where(low_1, zero, turn)), q, dpk, PRECISION)
            if pq_rows is not None:
                turn = back(ds, BLOCK, 0).to(q.dtype)  # [places, keys]
                zero = tl.zeros_like(turn)
                low, high = tl.where(low_0, turn, zero), tl.where(low_0, zero, turn)
                rows = load_places(pq_rows, place, reach, TILE)
                dk = multiply(tl.trans(low), rows, dk, PRECISION)
                rows = load_places(pq_rows, place + BLOCK, reach, TILE)
                dk = multiply(tl.trans(high), rows, dk, PRECISION)
                dpq = multiply(low, k, dpq, PRECISION)
                add_rows(dpq_ptr + own, dpq, place, reach, TILE)
                dpq = tl.zeros([BLOCK, BLOCK_D], tl.float32)
                dpq = multiply(high, k, dpq, PRECISION)
            dk = multiply(tl.trans(ds.to(q.dtype)), q, dk, PRECISION)
        last = tl.cdiv(head.length_q, BLOCK) * BLOCK - start_k - BLOCK + reach
        if pk_rows is not None:
            add_rows(dpk_ptr + own, dpk, last, reach, TILE)
        if pq_rows is not None:
            add_rows(dpq_ptr + own, dpq, last, reach, TILE)
        tl.debug_barrier()  # the next tile of keys adds to these sums
        exists = offs_k < length  # masked keys too: their gradient is 0, and is written
        store_rows(d_key, dk * scale, offs_k, exists, TILE)
        store_rows(d_value, dv, offs_k, exists, TILE)


@triton.jit(do_not_specialize=["programs", "reach"])
def _disentangled_attention_tables_kernel(
    # pointers
    sums_ptr,
    ends_ptr,
    grad_ptr,
    # sizes
    programs,
    num_heads,
    reach,
    scale,
    # constexprs
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    # One program adds up one row of one head: its places, of all programs of the head in order.
    row, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    offs_d, mask_d = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_D) < HEAD_DIM
    total = tl.zeros([BLOCK_D], tl.float32)
    for place in range(tl.load(ends_ptr + row), tl.load(ends_ptr + row + 1)):
        for first in range(0, programs, BLOCK_P):
            offs_p = first + tl.arange(0, BLOCK_P)
            at = (offs_p.to(tl.int64) * num_heads + h) * (2 * reach - 1) + place
            ptrs = sums_ptr + at[:, None] * HEAD_DIM + offs_d[None, :]
            mask = (offs_p < programs)[:, None] & mask_d[None, :]
            total += tl.sum(tl.load(ptrs, mask=mask, other=0.0), 0)
    grad = grad_ptr + (row * num_heads + h) * HEAD_DIM + offs_d
    tl.store(grad, (total * scale).to(grad_ptr.dtype.element_ty), mask=mask_d)


# --- launchers ------------------------------------------------------------------------------------


class _Shape:
    """Sizes of a call in either layout, and the arguments that its kernels share."""

    def __init__(self, call: Any) -> None:
        query = call.query
        self.packed, self.device = call.cu_seqlens is not None, query.device
        if self.packed:
            self.batch, (self.rows, self.heads, self.dim) = (
                call.cu_seqlens.shape[0] - 1,
                query.shape,
            )
            self.seqlen = call.max_seqlen
        else:
            self.batch, self.heads, self.seqlen, self.dim = query.shape
            self.rows = self.batch * self.seqlen
        self.is_empty = 0 in (self.batch, self.heads, self.seqlen)
        self.reach = (call.buckets.shape[0] + 1) // 2
        kind = "half" if query.dtype.itemsize == 2 else "fp32"
        if kind == "half" and self.dim > 64:
            kind = "half, wide"
        table = _TABLE[kind]
        self.configs = table[nearest_arch(arch_of(self.device), tuple(table))]
        threshold = call.dropout_threshold
        places = [
            None if table is None else table.index_select(0, call.buckets)
            for table in (call.pos_key, call.pos_query)
        ]
        width = max(self.heads, 1) * self.dim
        if self.packed:
            self.like = query.shape, (width, self.dim, 1)
        else:
            self.like = query.shape, (max(self.seqlen, 1) * width, self.dim, width, 1)
        mask = call.key_mask
        self.shared = dict(
            q_ptr=query,
            k_ptr=call.key,
            v_ptr=call.value,
            pk_ptr=places[0],
            pq_ptr=places[1],
            mask_ptr=None if mask is None else mask.contiguous().view(torch.uint8),
            cu_ptr=call.cu_seqlens,
            seed_ptr=call.seed,
            sample_ptr=None if call.seed is None else call.sample_index,
            num_seqs=self.batch,
            num_heads=self.heads,
            num_rows=self.rows,
            seqlen=self.seqlen,
            reach=self.reach,
            scale_log2=call.scale * LOG2E.value,
            threshold=threshold,
            keep_scale=256 / (256 - threshold) if threshold < 256 else 0.0,
            **self.strides("q", query.stride()),
            **self.strides("k", call.key.stride()),
            **self.strides("v", call.value.stride()),
            **self.strides("o", self.like[1]),
            stride_mb=0 if self.packed or mask is None else self.seqlen,
            stride_sh=self.rows,
            HEAD_DIM=self.dim,
            BLOCK_D=max(16, next_power_of_2(self.dim)),
            PRECISION="upcast" if upcast_dot(query.dtype) else "ieee",
        )

    def strides(self, letter: str, steps: tuple[int, ...]) -> dict[str, int]:
        """Keywords ``stride_<letter>b, …h, …t``."""
        steps = (0, steps[1], steps[0]) if self.packed else steps[:3]
        return {f"stride_{letter}{axis}": step for axis, step in zip("bht", steps, strict=True)}

    def tiles(self, kernel: int) -> tuple[int, dict[str, int]]:
        """The number of tiles of a sequence, and the configuration, of one of the kernels."""
        block, warps = self.configs[kernel]
        return cdiv(self.seqlen, block), dict(BLOCK=block, num_warps=warps)


def disentangled_attention_fwd(call: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the forward: the output, and the statistics of rows, fp32 [2, H, rows]."""
    shape = _Shape(call)
    out = call.query.new_empty_strided(*shape.like)
    stats = call.query.new_empty((2, shape.heads, shape.rows), dtype=torch.float32)
    if shape.packed:
        stats.zero_()  # those of spare rows are written by no kernel
    if shape.is_empty:
        return out.zero_(), stats.zero_()
    tiles, config = shape.tiles(0)
    launch(
        _disentangled_attention_fwd_kernel,
        (tiles * shape.batch * shape.heads,),
        shape.device,
        out_ptr=out,
        m_ptr=stats[0],
        log2l_ptr=stats[1],
        **shape.shared,
        **config,
        num_stages=2,
    )
    return out, stats


def disentangled_attention_bwd(
    grad_out: torch.Tensor, call: Any, out: torch.Tensor, stats: torch.Tensor, ends: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Launch the backward: the gradients of query, key, value, and of both tables.

    ``ends`` are int32 [buckets + 1], the first place of each row of the tables.
    """
    shape, query = _Shape(call), call.query
    if grad_out.stride(-1) != 1:
        grad_out = grad_out.contiguous()
    grads = [query.new_empty_strided(*shape.like) for _ in range(3)]
    tables = [
        query.new_empty(0 if table is None else table.shape)
        for table in (call.pos_key, call.pos_query)
    ]
    if shape.is_empty:
        return tuple(grad.zero_() for grad in (*grads, *tables))
    delta = torch.empty_like(stats[0])
    shared = shape.shared | dict(
        do_ptr=grad_out,
        m_ptr=stats[0],
        log2l_ptr=stats[1],
        delta_ptr=delta,
        scale=call.scale,
        num_stages=1,
        **shape.strides("do", grad_out.stride()),
    )
    tiles, config = shape.tiles(1)
    launch(
        _disentangled_attention_bwd_dq_kernel,
        (tiles * shape.batch * shape.heads,),
        shape.device,
        out_ptr=out,
        dq_ptr=grads[0],
        **config,
        **shared,
    )
    tiles, config = shape.tiles(2)
    # A program fills an SM, and has sums of its own: their size does not grow with the batch.
    programs = min(tiles * shape.batch, max(1, sm_count(shape.device) // shape.heads))
    size = programs * shape.heads, 2 * shape.reach - 1, shape.dim
    sums = [
        query.new_zeros(size, dtype=torch.float32) if table.numel() else None for table in tables
    ]
    launch(
        _disentangled_attention_bwd_dkdv_kernel,
        (programs * shape.heads,),
        shape.device,
        dk_ptr=grads[1],
        dv_ptr=grads[2],
        dpk_ptr=sums[0],
        dpq_ptr=sums[1],
        **config,
        **shared,
    )
    for partial, grad in zip(sums, tables, strict=True):
        if partial is not None:
            launch(
                _disentangled_attention_tables_kernel,
                (grad.shape[0], shape.heads),
                shape.device,
                sums_ptr=partial,
                ends_ptr=ends,
                grad_ptr=grad,
                programs=programs,
                num_heads=shape.heads,
                reach=shape.reach,
                scale=call.scale,
                HEAD_DIM=shape.dim,
                BLOCK_D=shape.shared["BLOCK_D"],
                BLOCK_P=_BLOCK_P,
                num_warps=4,
            )
    return (*grads, *tables)


def compile_cases() -> Iterator[tuple[str, Callable[[], object]]]:
    """Every shipped configuration, as a label and a function that launches it (on meta tensors)."""
    cases = (
        # head dim, terms, packed, key mask, dropout, slow
        (64, "both", True, False, True, False),
        (64, "both", False, True, False, False),
        (64, "c2p", True, True, True, True),
        (64, "p2c", True, False, False, True),
        (128, "both", True, False, True, True),
        (40, "both", False, True, True, True),
        (16, "both", True, True, False, True),
    )
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        for *case, slow in cases:
            dim, terms, packed, mask, dropout = case
            if dtype is torch.float32 and dim > 64:
                continue
            label = f"{str(dtype)[6:]} D={dim} {terms} {'packed' if packed else 'dense'}"
            label += f"{' mask' if mask else ''}{' dropout' if dropout else ''}"
            yield f"{'slow: ' if slow else ''}{label}", lambda d=dtype, c=case: _case(d, *c)


def _case(
    dtype: torch.dtype, dim: int, terms: str, packed: bool, mask: bool, dropout: bool
) -> None:
    def empty(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    rows = (4096, 12, dim) if packed else (8, 12, 512, dim)
    query, table = empty(*rows), empty(512, 12, dim)
    call = SimpleNamespace(
        query=query,
        key=query,
        value=query,
        pos_key=None if terms == "p2c" else table,
        pos_query=None if terms == "c2p" else table,
        buckets=torch.zeros(1023, dtype=torch.int64, device="meta"),
        key_mask=empty(*(rows[:1] if packed else (8, 512)), dtype=torch.bool) if mask else None,
        cu_seqlens=empty(9, dtype=torch.int32) if packed else None,
        max_seqlen=512,
        seed=empty(dtype=torch.int64) if dropout else None,
        sample_index=None,
        dropout_threshold=26 if dropout else 0,
        scale=0.07,
    )
    out, stats = disentangled_attention_fwd(call)
    disentangled_attention_bwd(out, call, out, stats, empty(513, dtype=torch.int64))
