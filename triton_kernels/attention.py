"""Flash-style attention, forward and backward.

    S = scale * Q K^T + mask      P = softmax(S)      O = P V
    dV = P^T dO     dP = dO V^T     dS = P * (dP - delta)     delta = rowsum(O * dO)
    dQ = scale * dS K               dK = scale * dS^T Q

Source: FlashAttention-2 (Dao 2023, arXiv 2307.08691), algorithms 1 and 2, with the backward in two
kernels (one owns dK and dV, one owns dQ) so that no sum needs an atomic and every bit repeats.

Legend: B batch · H heads · Tq/Tk query/key length · D head dim (BLOCK_D, its power of two)
        m_i running row maximum · l_i running row sum, in base-2 units (log2(e) * scale is folded
        into one multiplication and exp2 is the hardware's own).

The forward saves m and log2(l) apart, not their sum: scores of a row that share a large offset
would lose the digits of l in it, and the backward's P = exp2(S - m - log2(l)) would no longer add
up to 1.

A masked key is loaded as 0, so that even a NaN behind the mask cannot reach a sum. A row that may
attend to nothing has l = 0; it gets output 0, m = log2(l) = 0 and, as all its p are 0, gradient 0.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch
import triton
import triton.language as tl

from fastplm.triton_kernels._launch import (
    INTERPRETED,
    arch_of,
    dot,
    launch,
    nearest_arch,
    upcast_dot,
)

_LOG2E = tl.constexpr(1.4426950408889634)

# (arch, 16-bit?, BLOCK_D) -> (BLOCK_Q, BLOCK_K, num_warps, num_stages) of forward, dK/dV and dQ.
# Not measured on a device yet: large tiles that the compile lane finds free of spills, under Triton
# 3.6.0 and 3.7.1.
_CONFIGS = {
    (80, True, 16): ((128, 64, 8, 2), (64, 64, 8, 2), (64, 64, 4, 2)),
    (80, True, 32): ((128, 64, 8, 2), (64, 64, 8, 2), (64, 64, 4, 2)),
    (80, True, 64): ((128, 64, 8, 2), (32, 64, 4, 2), (64, 64, 4, 2)),
    (80, True, 128): ((128, 32, 8, 2), (32, 64, 8, 2), (64, 32, 4, 2)),
    (80, False, 16): ((32, 32, 8, 1), (32, 32, 4, 1), (32, 32, 4, 1)),
    (80, False, 32): ((32, 32, 8, 1), (32, 32, 4, 1), (32, 32, 4, 1)),
    (80, False, 64): ((32, 32, 8, 1), (32, 32, 8, 1), (32, 32, 8, 1)),
    (80, False, 128): ((16, 32, 8, 1), (16, 32, 8, 1), (32, 16, 8, 1)),
    (90, True, 64): ((128, 128, 8, 2), (128, 64, 8, 2), (128, 64, 8, 2)),
    (90, True, 128): ((128, 64, 8, 2), (64, 64, 8, 1), (64, 64, 8, 2)),
}

_DELTA_ROWS = 16

# The backward rebuilds the scores of the forward and must get the same bits. Tensor cores sum over
# D in one order whatever the tile; the interpreter's BLAS does not, so there all tiles are alike.
_INTERPRETER_CONFIG = dict(BLOCK_Q=32, BLOCK_K=32, num_warps=4, num_stages=1)


def _config(which: int, device: torch.device, dtype: torch.dtype, block_d: int) -> dict[str, int]:
    if INTERPRETED:
        return _INTERPRETER_CONFIG
    known = tuple(arch for arch, half, d in _CONFIGS if (half, d) == (dtype.itemsize == 2, block_d))
    arch = nearest_arch(arch_of(device), known)
    block_q, block_k, warps, stages = _CONFIGS[arch, dtype.itemsize == 2, block_d][which]
    return dict(BLOCK_Q=block_q, BLOCK_K=block_k, num_warps=warps, num_stages=stages)


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
def _keys_allowed(mask_ptr, offs_k, seqlen_k, HAS_MASK: tl.constexpr):
    """[BLOCK_K] bool: the keys of this tile that exist and that the key mask lets through."""
    allowed = offs_k < seqlen_k
    if HAS_MASK:
        allowed = allowed & (tl.load(mask_ptr + offs_k, mask=allowed, other=0) != 0)
    return allowed


@triton.jit
def _attention_fwd_kernel(
    # pointers
    q_ptr,
    k_ptr,
    v_ptr,
    mask_ptr,
    out_ptr,
    m_ptr,
    log2l_ptr,
    # sizes
    num_heads,
    seqlen_q,
    seqlen_k,
    scale_log2,
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
    # constexprs
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    HAS_MASK: tl.constexpr,
    UPCAST: tl.constexpr,
):
    # One program owns one tile of queries of one head; tiles of a head are neighbours in L2.
    num_tiles = tl.cdiv(seqlen_q, BLOCK_Q)
    tile = tl.program_id(0) % num_tiles
    row = (tl.program_id(0) // num_tiles).to(tl.int64)  # flat (batch, head)
    b, h = row // num_heads, row % num_heads
    q_ptr += b * stride_qb + h * stride_qh
    k_ptr += b * stride_kb + h * stride_kh
    v_ptr += b * stride_vb + h * stride_vh
    out_ptr += b * stride_ob + h * stride_oh
    mask_ptr += b * stride_mb

    offs_q = tile * BLOCK_Q + tl.arange(0, BLOCK_Q)
    mask_q = offs_q < seqlen_q
    q = _load_rows(q_ptr, offs_q, mask_q, stride_qt, HEAD_DIM, BLOCK_D)  # [BLOCK_Q, BLOCK_D]

    m_i = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_Q], tl.float32)
    acc = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)

    diagonal = seqlen_k - seqlen_q  # query i sees keys j <= i + diagonal
    end_k = seqlen_k
    if IS_CAUSAL:
        end_k = tl.maximum(tl.minimum(seqlen_k, (tile + 1) * BLOCK_Q + diagonal), 0)
    for start_k in range(0, end_k, BLOCK_K):
        offs_k = start_k + tl.arange(0, BLOCK_K)
        mask_k = _keys_allowed(mask_ptr, offs_k, seqlen_k, HAS_MASK)
        k = _load_rows(k_ptr, offs_k, mask_k, stride_kt, HEAD_DIM, BLOCK_D)  # [BLOCK_K, BLOCK_D]
        v = _load_rows(v_ptr, offs_k, mask_k, stride_vt, HEAD_DIM, BLOCK_D)  # [BLOCK_K, BLOCK_D]

        s = tl.zeros([BLOCK_Q, BLOCK_K], tl.float32)
        s = dot(q, tl.trans(k), s, UPCAST) * scale_log2  # [BLOCK_Q, BLOCK_K]
        allowed = mask_k[None, :]
        if IS_CAUSAL:
            allowed = allowed & (offs_k[None, :] <= offs_q[:, None] + diagonal)
        s = tl.where(allowed, s, float("-inf"))

        # -inf - -inf is NaN: a row that has seen no key yet keeps a reference point of 0.
        m_new = tl.maximum(m_i, tl.max(s, 1))
        m_ref = tl.where(m_new == float("-inf"), 0.0, m_new)
        alpha = tl.exp2(m_i - m_ref)
        p = tl.exp2(s - m_ref[:, None])
        l_i = l_i * alpha + tl.sum(p, 1)
        acc = dot(p.to(v.dtype), v, acc * alpha[:, None], UPCAST)
        m_i = m_new

    alive = l_i != 0.0
    l_i = tl.where(alive, l_i, 1.0)
    out = acc / l_i[:, None]
    _store_rows(out_ptr, out, offs_q, mask_q, stride_ot, HEAD_DIM, BLOCK_D)
    tl.store(m_ptr + row * seqlen_q + offs_q, tl.where(alive, m_i, 0.0), mask=mask_q)
    tl.store(log2l_ptr + row * seqlen_q + offs_q, tl.log2(l_i), mask=mask_q)


@triton.jit
def _attention_delta_kernel(
    # pointers
    out_ptr,
    do_ptr,
    delta_ptr,
    # sizes
    num_heads,
    seqlen_q,
    # strides
    stride_ob,
    stride_oh,
    stride_ot,
    stride_dob,
    stride_doh,
    stride_dot,
    # constexprs
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
):
    num_tiles = tl.cdiv(seqlen_q, BLOCK_Q)
    tile = tl.program_id(0) % num_tiles
    row = (tl.program_id(0) // num_tiles).to(tl.int64)
    b, h = row // num_heads, row % num_heads
    offs_q = tile * BLOCK_Q + tl.arange(0, BLOCK_Q)
    mask_q = offs_q < seqlen_q
    out_ptr += b * stride_ob + h * stride_oh
    do_ptr += b * stride_dob + h * stride_doh
    out = _load_rows(out_ptr, offs_q, mask_q, stride_ot, HEAD_DIM, BLOCK_D)  # [BLOCK_Q, BLOCK_D]
    do = _load_rows(do_ptr, offs_q, mask_q, stride_dot, HEAD_DIM, BLOCK_D)  # [BLOCK_Q, BLOCK_D]
    delta = tl.sum(out.to(tl.float32) * do.to(tl.float32), 1)
    tl.store(delta_ptr + row * seqlen_q + offs_q, delta, mask=mask_q)


@triton.jit
def _scores_bwd(
    q,
    k,
    v,
    do,
    m_i,
    log2l,
    delta,
    offs_q,
    offs_k,
    mask_k,
    diagonal,
    scale_log2,
    IS_CAUSAL: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """P and dS of one [BLOCK_Q, BLOCK_K] tile, from the saved row statistics."""
    s = tl.zeros([q.shape[0], k.shape[0]], tl.float32)
    s = dot(q, tl.trans(k), s, UPCAST) * scale_log2
    allowed = mask_k[None, :]
    if IS_CAUSAL:
        allowed = allowed & (offs_k[None, :] <= offs_q[:, None] + diagonal)
    p = tl.where(allowed, tl.exp2(s - m_i[:, None] - log2l[:, None]), 0.0)
    dp = tl.zeros([q.shape[0], k.shape[0]], tl.float32)
    dp = dot(do, tl.trans(v), dp, UPCAST)
    return p, p * (dp - delta[:, None])


@triton.jit
def _attention_bwd_dkdv_kernel(
    # pointers
    q_ptr,
    k_ptr,
    v_ptr,
    mask_ptr,
    do_ptr,
    m_ptr,
    log2l_ptr,
    delta_ptr,
    dk_ptr,
    dv_ptr,
    # sizes
    num_heads,
    seqlen_q,
    seqlen_k,
    scale,
    scale_log2,
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
    stride_dkb,
    stride_dkh,
    stride_dkt,
    # constexprs
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    HAS_MASK: tl.constexpr,
    UPCAST: tl.constexpr,
):
    # One program owns one tile of keys and walks over the queries in order.
    num_tiles = tl.cdiv(seqlen_k, BLOCK_K)
    tile = tl.program_id(0) % num_tiles
    row = (tl.program_id(0) // num_tiles).to(tl.int64)
    b, h = row // num_heads, row % num_heads
    q_ptr += b * stride_qb + h * stride_qh
    k_ptr += b * stride_kb + h * stride_kh
    v_ptr += b * stride_vb + h * stride_vh
    do_ptr += b * stride_dob + h * stride_doh
    dk_ptr += b * stride_dkb + h * stride_dkh
    dv_ptr += b * stride_dkb + h * stride_dkh
    mask_ptr += b * stride_mb

    offs_k = tile * BLOCK_K + tl.arange(0, BLOCK_K)
    mask_k = _keys_allowed(mask_ptr, offs_k, seqlen_k, HAS_MASK)
    k = _load_rows(k_ptr, offs_k, mask_k, stride_kt, HEAD_DIM, BLOCK_D)  # [BLOCK_K, BLOCK_D]
    v = _load_rows(v_ptr, offs_k, mask_k, stride_vt, HEAD_DIM, BLOCK_D)  # [BLOCK_K, BLOCK_D]
    dk = tl.zeros([BLOCK_K, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_K, BLOCK_D], tl.float32)

    diagonal = seqlen_k - seqlen_q
    start = 0
    if IS_CAUSAL:  # the first query that sees this tile, rounded down to a tile of queries
        start = tl.maximum(tile * BLOCK_K - diagonal, 0) // BLOCK_Q * BLOCK_Q
    for start_q in range(start, seqlen_q, BLOCK_Q):
        offs_q = start_q + tl.arange(0, BLOCK_Q)
        mask_q = offs_q < seqlen_q
        q = _load_rows(q_ptr, offs_q, mask_q, stride_qt, HEAD_DIM, BLOCK_D)  # [BLOCK_Q, BLOCK_D]
        do = _load_rows(do_ptr, offs_q, mask_q, stride_dot, HEAD_DIM, BLOCK_D)
        m_i = tl.load(m_ptr + row * seqlen_q + offs_q, mask=mask_q, other=0.0)
        log2l = tl.load(log2l_ptr + row * seqlen_q + offs_q, mask=mask_q, other=0.0)
        delta = tl.load(delta_ptr + row * seqlen_q + offs_q, mask=mask_q, other=0.0)
        p, ds = _scores_bwd(
            q,
            k,
            v,
            do,
            m_i,
            log2l,
            delta,
            offs_q,
            offs_k,
            mask_k,
            diagonal,
            scale_log2,
            IS_CAUSAL,
            UPCAST,
        )
        dv = dot(tl.trans(p.to(do.dtype)), do, dv, UPCAST)
        dk = dot(tl.trans(ds.to(q.dtype)), q, dk, UPCAST)

    exists = offs_k < seqlen_k  # masked keys exist too: their gradient is a written 0
    _store_rows(dk_ptr, dk * scale, offs_k, exists, stride_dkt, HEAD_DIM, BLOCK_D)
    _store_rows(dv_ptr, dv, offs_k, exists, stride_dkt, HEAD_DIM, BLOCK_D)


@triton.jit
def _attention_bwd_dq_kernel(
    # pointers
    q_ptr,
    k_ptr,
    v_ptr,
    mask_ptr,
    do_ptr,
    m_ptr,
    log2l_ptr,
    delta_ptr,
    dq_ptr,
    # sizes
    num_heads,
    seqlen_q,
    seqlen_k,
    scale,
    scale_log2,
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
    # constexprs
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    HAS_MASK: tl.constexpr,
    UPCAST: tl.constexpr,
):
    # One program owns one tile of queries and walks over the keys in order.
    num_tiles = tl.cdiv(seqlen_q, BLOCK_Q)
    tile = tl.program_id(0) % num_tiles
    row = (tl.program_id(0) // num_tiles).to(tl.int64)
    b, h = row // num_heads, row % num_heads
    q_ptr += b * stride_qb + h * stride_qh
    k_ptr += b * stride_kb + h * stride_kh
    v_ptr += b * stride_vb + h * stride_vh
    do_ptr += b * stride_dob + h * stride_doh
    dq_ptr += b * stride_dqb + h * stride_dqh
    mask_ptr += b * stride_mb

    offs_q = tile * BLOCK_Q + tl.arange(0, BLOCK_Q)
    mask_q = offs_q < seqlen_q
    q = _load_rows(q_ptr, offs_q, mask_q, stride_qt, HEAD_DIM, BLOCK_D)  # [BLOCK_Q, BLOCK_D]
    do = _load_rows(do_ptr, offs_q, mask_q, stride_dot, HEAD_DIM, BLOCK_D)  # [BLOCK_Q, BLOCK_D]
    m_i = tl.load(m_ptr + row * seqlen_q + offs_q, mask=mask_q, other=0.0)
    log2l = tl.load(log2l_ptr + row * seqlen_q + offs_q, mask=mask_q, other=0.0)
    delta = tl.load(delta_ptr + row * seqlen_q + offs_q, mask=mask_q, other=0.0)
    dq = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)

    diagonal = seqlen_k - seqlen_q
    end_k = seqlen_k
    if IS_CAUSAL:
        end_k = tl.maximum(tl.minimum(seqlen_k, (tile + 1) * BLOCK_Q + diagonal), 0)
    for start_k in range(0, end_k, BLOCK_K):
        offs_k = start_k + tl.arange(0, BLOCK_K)
        mask_k = _keys_allowed(mask_ptr, offs_k, seqlen_k, HAS_MASK)
        k = _load_rows(k_ptr, offs_k, mask_k, stride_kt, HEAD_DIM, BLOCK_D)  # [BLOCK_K, BLOCK_D]
        v = _load_rows(v_ptr, offs_k, mask_k, stride_vt, HEAD_DIM, BLOCK_D)  # [BLOCK_K, BLOCK_D]
        _, ds = _scores_bwd(
            q,
            k,
            v,
            do,
            m_i,
            log2l,
            delta,
            offs_q,
            offs_k,
            mask_k,
            diagonal,
            scale_log2,
            IS_CAUSAL,
            UPCAST,
        )
        dq = dot(ds.to(k.dtype), k, dq, UPCAST)

    _store_rows(dq_ptr, dq * scale, offs_q, mask_q, stride_dqt, HEAD_DIM, BLOCK_D)


def _strides(letter: str, tensor: torch.Tensor) -> dict[str, int]:
    """Keywords ``stride_<letter>b, …h, …t`` of a [B, H, T, D] tensor."""
    return {f"stride_{letter}{axis}": tensor.stride(i) for i, axis in enumerate("bht")}


def _mask_arguments(key_mask: torch.Tensor | None, query: torch.Tensor) -> dict[str, object]:
    # Without a mask the pointer is never read; any tensor will do.
    mask = query if key_mask is None else key_mask.view(torch.uint8)
    stride = 0 if key_mask is None else key_mask.stride(0)
    return dict(mask_ptr=mask, stride_mb=stride, HAS_MASK=key_mask is not None)


def _like_projection(batch: int, heads: int, length: int, dim: int, like: torch.Tensor):
    """[B, H, T, D] over [B, T, H, D] memory: the layout that projections read and write."""
    return like.new_empty(batch, length, heads, dim).transpose(1, 2)


def attention_fwd(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_mask: torch.Tensor | None,
    is_causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the forward: (output [B, H, Tq, D], fp32 [2, B, H, Tq] holding m and log2(l))."""
    batch, heads, seqlen_q, head_dim = query.shape
    block_d = max(16, triton.next_power_of_2(head_dim))
    out = _like_projection(batch, heads, seqlen_q, head_dim, query)
    stats = query.new_empty(2, batch, heads, seqlen_q, dtype=torch.float32)
    config = _config(0, query.device, query.dtype, block_d)
    launch(
        _attention_fwd_kernel,
        (triton.cdiv(seqlen_q, config["BLOCK_Q"]) * batch * heads,),
        query.device,
        q_ptr=query,
        k_ptr=key,
        v_ptr=value,
        out_ptr=out,
        m_ptr=stats[0],
        log2l_ptr=stats[1],
        num_heads=heads,
        seqlen_q=seqlen_q,
        seqlen_k=key.shape[2],
        scale_log2=scale * _LOG2E.value,
        **_strides("q", query),
        **_strides("k", key),
        **_strides("v", value),
        **_strides("o", out),
        HEAD_DIM=head_dim,
        BLOCK_D=block_d,
        IS_CAUSAL=is_causal,
        UPCAST=upcast_dot(query.dtype),
        **_mask_arguments(key_mask, query),
        **config,
    )
    return out, stats


def attention_bwd(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_mask: torch.Tensor | None,
    out: torch.Tensor,
    stats: torch.Tensor,
    is_causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Launch the backward: gradients of query, key and value, in their shapes."""
    batch, heads, seqlen_q, head_dim = query.shape
    seqlen_k = key.shape[2]
    block_d = max(16, triton.next_power_of_2(head_dim))
    grad_query = _like_projection(batch, heads, seqlen_q, head_dim, query)
    grad_key = _like_projection(batch, heads, seqlen_k, head_dim, key)
    grad_value = _like_projection(batch, heads, seqlen_k, head_dim, value)
    delta = torch.empty_like(stats[0])
    launch(
        _attention_delta_kernel,
        (triton.cdiv(seqlen_q, _DELTA_ROWS) * batch * heads,),
        query.device,
        out_ptr=out,
        do_ptr=grad_out,
        delta_ptr=delta,
        num_heads=heads,
        seqlen_q=seqlen_q,
        **_strides("o", out),
        **_strides("do", grad_out),
        HEAD_DIM=head_dim,
        BLOCK_D=block_d,
        BLOCK_Q=_DELTA_ROWS,
    )
    shared = dict(
        q_ptr=query,
        k_ptr=key,
        v_ptr=value,
        do_ptr=grad_out,
        m_ptr=stats[0],
        log2l_ptr=stats[1],
        delta_ptr=delta,
        num_heads=heads,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        scale=scale,
        scale_log2=scale * _LOG2E.value,
        **_strides("q", query),
        **_strides("k", key),
        **_strides("v", value),
        **_strides("do", grad_out),
        HEAD_DIM=head_dim,
        BLOCK_D=block_d,
        IS_CAUSAL=is_causal,
        UPCAST=upcast_dot(query.dtype),
        **_mask_arguments(key_mask, query),
    )
    config = _config(1, query.device, query.dtype, block_d)
    launch(
        _attention_bwd_dkdv_kernel,
        (triton.cdiv(seqlen_k, config["BLOCK_K"]) * batch * heads,),
        query.device,
        dk_ptr=grad_key,
        dv_ptr=grad_value,
        **_strides("dk", grad_key),
        **shared,
        **config,
    )
    config = _config(2, query.device, query.dtype, block_d)
    launch(
        _attention_bwd_dq_kernel,
        (triton.cdiv(seqlen_q, config["BLOCK_Q"]) * batch * heads,),
        query.device,
        dq_ptr=grad_query,
        **_strides("dq", grad_query),
        **shared,
        **config,
    )
    return grad_query, grad_key, grad_value


def compile_cases() -> Iterator[tuple[str, Callable[[], object]]]:
    """Every shipped configuration: a label ("slow: …" for the long lane) and what launches it."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for head_dim in (64, 32, 128, 16, 80):
            always = head_dim in (64, 128) if dtype is torch.bfloat16 else head_dim == 64
            for is_causal, has_mask in ((False, True), (True, False)):
                label = f"{str(dtype)[6:]} D={head_dim} {'causal' if is_causal else 'key mask'}"
                yield (
                    label if always else f"slow: {label}",
                    functools.partial(_case, dtype, head_dim, is_causal, has_mask),
                )


def _case(dtype: torch.dtype, head_dim: int, is_causal: bool, has_mask: bool) -> None:
    qkv = torch.empty(2, 512, 3, 4, head_dim, dtype=dtype, device="meta")
    query, key, value = qkv.permute(2, 0, 3, 1, 4)
    key_mask = torch.empty(2, 512, dtype=torch.bool, device="meta") if has_mask else None
    out, stats = attention_fwd(query, key, value, key_mask, is_causal, 0.125)
    attention_bwd(out, query, key, value, key_mask, out, stats, is_causal, 0.125)
