"""T5's relative bias: the table by distance, how scores get it, and its gradient.

The bias depends only on the distance between query and key, and is constant beyond max_distance on
either side. The kernels take one row of 2 * max_distance + 1 values for each head. A tile that lies
beyond max_distance adds one scalar. The gradient of these two far values is one sum for each tile,
computed together with dQ. For the near distances a separate kernel adds the dS tiles of equal
distance over the batch, then reduces the sum by bucket once.

Source: Raffel et al. 2020, section 2.1.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from fastplm.triton_kernels._launch import cdiv, launch, next_power_of_2
from fastplm.triton_kernels.attention.configs import config_of
from fastplm.triton_kernels.attention.tiles import (
    COUNTS,
    LOG2E,
    AttnMask,
    Dropout,
    Head,
    Tensor,
    Tile,
    bounds,
    keep_mask,
    keys_allowed,
    load_rows,
    multiply,
    pairs_allowed,
    rows_of,
    stats_head,
)

# How a range of tiles gets its bias: no bias, the scalar of the far left or right, or a look-up.
NO_BIAS = tl.constexpr(0)
FAR_LEFT = tl.constexpr(1)
NEAR = tl.constexpr(2)
FAR_RIGHT = tl.constexpr(3)


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
    # One program writes a part of one head's row: the bias by distance instead of by bucket.
    h = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    bucket = tl.load(buckets_ptr + offs, mask=offs < width, other=0)
    bias = tl.load(weight_ptr + bucket * stride_wb + h * stride_wh).to(tl.float32)
    tl.store(rows_ptr + h * width + offs, bias, mask=offs < width)


@triton.jit
def add_bias(s, head, distance, BIAS: tl.constexpr):
    """Scaled scores with the bias [2 * numbers.max_distance + 1] of this head."""
    max_distance = head.numbers.max_distance
    if BIAS == FAR_LEFT:
        bias = tl.load(head.bias_ptr)
    elif BIAS == FAR_RIGHT:
        bias = tl.load(head.bias_ptr + 2 * max_distance)
    else:
        near = tl.minimum(tl.maximum(distance, -max_distance), max_distance)
        bias = tl.load(head.bias_ptr + near + max_distance)
    return s * head.numbers.scale + bias


@triton.jit
def bias_ranges(first, size, shift, max_distance, BLOCK: tl.constexpr):
    """(start, end) of the tiles, BLOCK wide, that are near rows ``first … first + size - 1``.

    The distance from row r to a position x is x - r - shift. Tiles before ``start`` lie at a
    distance of -max_distance or less, tiles from ``end`` on at max_distance or more.
    """
    start = tl.maximum(first + shift - max_distance + 1, 0) // BLOCK * BLOCK
    end = tl.maximum(first + size - 1 + shift + max_distance + BLOCK - 1, 0) // BLOCK * BLOCK
    return start, end


@triton.jit(do_not_specialize=[*COUNTS, "max_distance", "steps"])
def _attention_bwd_dbias_kernel(
    # pointers
    q_ptr,
    k_ptr,
    v_ptr,
    mask_ptr,
    attn_mask_ptr,
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
    left,
    right,
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
    stride_ab,
    stride_ah,
    stride_at,
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
    MASK_STEP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    # One program owns one head and one kind of tile: all whose elements (r, c) stand at the
    # distance BLOCK_K * block - BLOCK_Q * slice + c - r, for one block diagonal and one slice of
    # BLOCK_Q of its rows. It adds dS of ``steps`` such tiles, over sequences and queries, and only
    # then reduces by bucket.
    TILE: tl.constexpr = Tile(HEAD_DIM, BLOCK_D, BLOCK_Q, BLOCK_K, PRECISION)
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
    if left is not None:  # no element of such a tile is in a window
        last = block * BLOCK_K + BLOCK_K - 1 - kind % SLICES * BLOCK_Q
        end_step = tl.where(last < -left, first_step, end_step)
    if right is not None:
        first = block * BLOCK_K - kind % SLICES * BLOCK_Q - BLOCK_Q + 1
        end_step = tl.where(first > right, first_step, end_step)
    for step in range(first_step, end_step):
        b = step // tiles
        first_q, length_q = bounds(cu_q_ptr, b, seqlen_q)
        first_k, length_k = bounds(cu_k_ptr, b, seqlen_k)
        diagonal = length_k - length_q
        shift = 0
        if IS_CAUSAL:
            shift = diagonal
        start_q = (step % tiles).to(tl.int32) * BLOCK_K - (shift % BLOCK_K + BLOCK_K) % BLOCK_K
        start_k = start_q + shift + block * BLOCK_K
        # A quarter of the tiles on these diagonals lies outside the scores of a sequence.
        if (start_q < length_q) & (start_k < length_k) & (start_k + BLOCK_K > 0):
            offs_q = start_q + rows
            offs_k = start_k + columns
            mask_q = (offs_q >= 0) & (offs_q < length_q)
            row_mask_ptr = None
            if mask_ptr is not None:
                row_mask_ptr = mask_ptr + b * stride_mb
            mask_k = keys_allowed(row_mask_ptr, start_k, length_k, BLOCK_K)

            query = rows_of(Tensor(q_ptr, stride_qb, stride_qh, stride_qt), b, h, first_q)
            key = rows_of(Tensor(k_ptr, stride_kb, stride_kh, stride_kt), b, h, first_k)
            value = rows_of(Tensor(v_ptr, stride_vb, stride_vh, stride_vt), b, h, first_k)
            d_out = rows_of(Tensor(do_ptr, stride_dob, stride_doh, stride_dot), b, h, first_q)
            stats = stats_head(cu_q_ptr, b, h, first_q, seqlen_q, stride_sh) + offs_q
            q = load_rows(query, offs_q, mask_q, TILE)  # [BLOCK_Q, BLOCK_D]
            do = load_rows(d_out, offs_q, mask_q, TILE)  # [BLOCK_Q, BLOCK_D]
            k = load_rows(key, offs_k, mask_k, TILE)  # [BLOCK_K, BLOCK_D]
            v = load_rows(value, offs_k, mask_k, TILE)  # [BLOCK_K, BLOCK_D]
            m_i = tl.load(m_ptr + stats, mask=mask_q, other=float("inf"))
            log2l = tl.load(log2l_ptr + stats, mask=mask_q, other=0.0)
            delta = tl.load(delta_ptr + stats, mask=mask_q, other=0.0)

            s = tl.zeros([BLOCK_Q, BLOCK_K], tl.float32)
            s = multiply(q, tl.trans(k), s, PRECISION)  # [BLOCK_Q, BLOCK_K]
            allowed = mask_q[:, None] & mask_k[None, :]
            if IS_CAUSAL:
                allowed = allowed & (distance <= 0)
            elif right is not None:
                allowed = allowed & (distance <= right)
            if left is not None:
                allowed = allowed & (distance >= -left)
            attn_mask = None
            if attn_mask_ptr is not None:
                attn_ptr = attn_mask_ptr + b * stride_ab + h * stride_ah
                attn_mask = AttnMask(attn_ptr, stride_at, MASK_STEP)
            dropout = Dropout(seed_ptr, sample_ptr, threshold, keep_scale)
            head = Head(
                b,
                h,
                length_q,
                length_k,
                None,
                None,
                None,
                None,
                attn_mask,
                None,
                None,
                dropout,
            )
            allowed = pairs_allowed(head, allowed, offs_q[:, None], offs_k[None, :])
            s = (s * scale + bias - m_i[:, None]) * LOG2E
            p = tl.where(allowed, tl.exp2(s - log2l[:, None]), 0.0)
            dp = tl.zeros([BLOCK_Q, BLOCK_K], tl.float32)
            dp = multiply(do, tl.trans(v), dp, PRECISION)  # [BLOCK_Q, BLOCK_K]
            if seed_ptr is not None:
                keep = keep_mask(head, offs_q, start_k, BLOCK_K)
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


def bias_rows(bias_weight: torch.Tensor | None, buckets: torch.Tensor | None) -> dict[str, Any]:
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


#: Programs that the kernel of the near distances should have: several waves on the largest GPU. The
#: number fixes the groups of the sums, hence their bits, so it does not depend on the device.
_BIAS_PROGRAMS = 1024
#: A program adds at least this many tiles, so that its reduction by bucket takes little time.
_BIAS_TILES = 4


def bias_gradient(
    shape: Any,
    shared: dict[str, Any],
    far: torch.Tensor,
    buckets: torch.Tensor,
    grad_bias: torch.Tensor,
) -> None:
    config = config_of("dbias", shape, shape.kind)
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
