"""The backward kernels, FlashAttention-2's algorithm 2.

tile    A program handles a head whose scores are one tile, and computes the softmax again.
stream  One kernel computes dQ and delta, a second one dK and dV.

Symbols: as in the package.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fastplm.triton_kernels.attention.bias import (
    FAR_LEFT,
    FAR_RIGHT,
    NEAR,
    NO_BIAS,
    add_bias,
    bias_ranges,
)
from fastplm.triton_kernels.attention.tiles import (
    COUNTS,
    LOG2E,
    AttnMask,
    Dropout,
    Head,
    Numbers,
    Tensor,
    Tile,
    bounds,
    in_window,
    keep_mask,
    keys_allowed,
    load_rows,
    masked_scores,
    multiply,
    pairs_allowed,
    rows_of,
    stats_head,
    store_rows,
    zero_spare_rows,
)


@triton.jit
def tile_step(dk, dv, k, v, query, d_out, d_query, head, start_q, offs_k, TILE: tl.constexpr):
    """dQ of a tile of queries, and what they add to dK and dV; the tile holds all of their keys."""
    offs_q = start_q + tl.arange(0, TILE.BLOCK_Q)
    mask_q = offs_q < head.length_q
    q = load_rows(query, offs_q, mask_q, TILE)  # [BLOCK_Q, BLOCK_D]
    do = load_rows(d_out, offs_q, mask_q, TILE)  # [BLOCK_Q, BLOCK_D]

    # Made again rather than kept, to save registers.
    mask_k = keys_allowed(head.mask_ptr, 0, head.length_k, TILE.BLOCK_K)
    s = masked_scores(q, k, offs_q, offs_k, mask_k, head, TILE)
    m_i = tl.max(s, 1) * head.numbers.scale_log2
    m_i = tl.where(m_i == float("-inf"), 0.0, m_i)
    p = tl.exp2(s * head.numbers.scale_log2 - m_i[:, None])  # [BLOCK_Q, BLOCK_K]
    l_i = tl.sum(p, 1)
    p = p * (1.0 / tl.where(l_i == 0.0, 1.0, l_i))[:, None]

    # dV comes before dP, so that fewer tiles are alive at once: that saves registers.
    z_p = p
    if head.dropout.seed_ptr is not None:
        keep = keep_mask(head, offs_q, 0, TILE.BLOCK_K)
        z_p = tl.where(keep, p * head.dropout.keep_scale, 0.0)
    z_p = z_p.to(do.dtype)
    dv = multiply(tl.trans(z_p), do, dv, TILE.PRECISION)

    dp = tl.zeros([TILE.BLOCK_Q, TILE.BLOCK_K], tl.float32)
    dp = multiply(do, tl.trans(v), dp, TILE.PRECISION)  # [BLOCK_Q, BLOCK_K]
    if head.dropout.seed_ptr is not None:
        # Instead of keeping the mask or drawing it again: a probability that was kept is not 0,
        # unless it is too small for its dtype, and then its gradient is too.
        dp = tl.where(z_p != 0.0, dp * head.dropout.keep_scale, 0.0)
    delta = tl.sum(p * dp, 1)
    ds = (p * (dp - delta[:, None])).to(q.dtype)
    dk = multiply(tl.trans(ds), q, dk, TILE.PRECISION)
    dq = tl.zeros([TILE.BLOCK_Q, TILE.BLOCK_D], tl.float32)
    dq = multiply(ds, k, dq, TILE.PRECISION)
    store_rows(d_query, dq * head.numbers.scale, offs_q, mask_q, TILE)
    return dk, dv


@triton.jit
def tile_head(
    row,
    num_heads,
    first_q,
    length_q,
    first_k,
    length_k,
    tensors,
    mask_ptr,
    stride_mb,
    attn_mask,
    numbers,
    dropout,
    left,
    right,
    IS_CAUSAL: tl.constexpr,
    MASK_STEP: tl.constexpr,
    TILE: tl.constexpr,
):
    """All three gradients of one head, whose scores are one tile of keys by one of queries."""
    b, h = (row // num_heads).to(tl.int64), (row % num_heads).to(tl.int64)
    query, key, value, d_out, d_query, d_key, d_value = tensors
    q_rows = rows_of(query, b, h, first_q)
    k_rows = rows_of(key, b, h, first_k)
    v_rows = rows_of(value, b, h, first_k)
    do_rows = rows_of(d_out, b, h, first_q)
    dq_rows = rows_of(d_query, b, h, first_q)
    dk_rows = rows_of(d_key, b, h, first_k)
    dv_rows = rows_of(d_value, b, h, first_k)
    mask_row = None
    if mask_ptr is not None:
        mask_row = mask_ptr + b * stride_mb
    attn_rows = None
    if attn_mask.ptr is not None:
        attn_ptr = attn_mask.ptr + b * attn_mask.stride_b + h * attn_mask.stride_h
        attn_rows = AttnMask(attn_ptr, attn_mask.stride_t, MASK_STEP)

    offs_k = tl.arange(0, TILE.BLOCK_K)
    mask_k = keys_allowed(mask_row, 0, length_k, TILE.BLOCK_K)
    k = load_rows(k_rows, offs_k, mask_k, TILE)  # [BLOCK_K, BLOCK_D]
    v = load_rows(v_rows, offs_k, mask_k, TILE)  # [BLOCK_K, BLOCK_D]
    dk = tl.zeros([TILE.BLOCK_K, TILE.BLOCK_D], tl.float32)
    dv = tl.zeros([TILE.BLOCK_K, TILE.BLOCK_D], tl.float32)
    # Not unrolled: the compiler would mix the steps, which needs too many registers on sm_120.
    for start_q in range(0, TILE.BLOCK_K, TILE.BLOCK_Q):
        shift, floor, diagonal = 0, None, None
        if IS_CAUSAL:
            shift = length_k - length_q
            diagonal = shift
        elif right is not None:
            diagonal = right
        if left is not None:
            floor = shift - left
        head = Head(
            b,
            h,
            length_q,
            length_k,
            floor,
            diagonal,
            None,
            mask_row,
            attn_rows,
            None,
            numbers,
            dropout,
        )
        dk, dv = tile_step(dk, dv, k, v, q_rows, do_rows, dq_rows, head, start_q, offs_k, TILE)

    exists = offs_k < length_k  # masked keys too: their gradient is 0, and is written
    store_rows(dk_rows, dk * numbers.scale, offs_k, exists, TILE)
    store_rows(dv_rows, dv, offs_k, exists, TILE)


@triton.jit(do_not_specialize=[*COUNTS, "num_rows_q", "num_rows_k"])
def _attention_tile_bwd_kernel(
    # pointers
    q_ptr,
    k_ptr,
    v_ptr,
    mask_ptr,
    attn_mask_ptr,
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
    MASK_STEP: tl.constexpr,
    PERSISTENT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    # A program handles one head, or if PERSISTENT several. Where an SM has room for one program
    # only, it then loads K and V of the next head while it computes this one (with three stages on
    # sm_90).
    TILE: tl.constexpr = Tile(HEAD_DIM, BLOCK_D, BLOCK_Q, BLOCK_K, PRECISION)
    row_size = num_heads * HEAD_DIM
    zero_spare_rows(dq_ptr, cu_q_ptr, num_seqs, num_rows_q, row_size, stride_dqt)
    zero_spare_rows(dk_ptr, cu_k_ptr, num_seqs, num_rows_k, row_size, stride_dkt)
    zero_spare_rows(dv_ptr, cu_k_ptr, num_seqs, num_rows_k, row_size, stride_dkt)
    tensors = (
        Tensor(q_ptr, stride_qb, stride_qh, stride_qt),
        Tensor(k_ptr, stride_kb, stride_kh, stride_kt),
        Tensor(v_ptr, stride_vb, stride_vh, stride_vt),
        Tensor(do_ptr, stride_dob, stride_doh, stride_dot),
        Tensor(dq_ptr, stride_dqb, stride_dqh, stride_dqt),
        Tensor(dk_ptr, stride_dkb, stride_dkh, stride_dkt),
        Tensor(dv_ptr, stride_dkb, stride_dkh, stride_dkt),
    )
    attn_mask = Tensor(attn_mask_ptr, stride_ab, stride_ah, stride_at)
    numbers = Numbers(scale, scale_log2, None)
    dropout = Dropout(seed_ptr, sample_ptr, threshold, keep_scale)
    # In 64 bits where programs loop, which saves registers there, and takes more elsewhere.
    first = tl.program_id(0).to(tl.int64 if PERSISTENT else tl.int32)
    first_q, length_q = bounds(cu_q_ptr, first // num_heads, seqlen_q)
    first_k, length_k = bounds(cu_k_ptr, first // num_heads, seqlen_k)
    if PERSISTENT:
        total = (first * 0 + num_seqs) * num_heads
        for row in tl.range(first, total, tl.num_programs(0)):  # flat (sequence, head)
            tile_head(
                row,
                num_heads,
                first_q,
                length_q,
                first_k,
                length_k,
                tensors,
                mask_ptr,
                stride_mb,
                attn_mask,
                numbers,
                dropout,
                left,
                right,
                IS_CAUSAL,
                MASK_STEP,
                TILE,
            )
            # Bounds are loaded one head ahead: Triton does not pipeline a load whose address is
            # itself loaded.
            b = tl.minimum(row + tl.num_programs(0), total - 1) // num_heads
            first_q, length_q = bounds(cu_q_ptr, b, seqlen_q)
            first_k, length_k = bounds(cu_k_ptr, b, seqlen_k)
    else:
        tile_head(
            first,
            num_heads,
            first_q,
            length_q,
            first_k,
            length_k,
            tensors,
            mask_ptr,
            stride_mb,
            attn_mask,
            numbers,
            dropout,
            left,
            right,
            IS_CAUSAL,
            MASK_STEP,
            TILE,
        )


@triton.jit
def probabilities(s, m_i, log2l, head, distance, BIAS: tl.constexpr):
    """P of one tile from raw scores and the row statistics, which broadcast to it."""
    if BIAS == NO_BIAS:
        s = s * head.numbers.scale_log2 - m_i
    else:
        s = (add_bias(s, head, distance, BIAS) - m_i) * LOG2E
    return tl.exp2(s - log2l)


@triton.jit
def dq_range(
    dq,
    far_left,
    far_right,
    q,
    do,
    m_i,
    log2l,
    delta,
    key,
    value,
    head,
    offs_q,
    start,
    end,
    TILE: tl.constexpr,
    PLACE: tl.constexpr,
):
    """What the keys in [start, end) add to dQ, and to the bias gradient of the far distances."""
    BLOCK_K: tl.constexpr = TILE.BLOCK_K
    BIAS: tl.constexpr = NO_BIAS if head.bias_ptr is None else PLACE
    # Whether a key may be hidden from a query.
    MASKED: tl.constexpr = head.bias_ptr is not None or PLACE != FAR_LEFT
    for start_k in range(start, end, BLOCK_K):
        offs_k = start_k + tl.arange(0, BLOCK_K)
        mask_k = offs_k >= 0
        if MASKED:
            mask_k = keys_allowed(head.mask_ptr, start_k, head.length_k, BLOCK_K)
        k = load_rows(key, offs_k, mask_k, TILE)  # [BLOCK_K, BLOCK_D]
        v = load_rows(value, offs_k, mask_k, TILE)  # [BLOCK_K, BLOCK_D]
        s = tl.zeros([q.shape[0], BLOCK_K], tl.float32)
        s = multiply(q, tl.trans(k), s, TILE.PRECISION)  # [BLOCK_Q, BLOCK_K]
        distance = offs_k[None, :] - offs_q[:, None] - head.shift
        p = probabilities(s, m_i[:, None], log2l[:, None], head, distance, BIAS)
        if MASKED:
            allowed = in_window(head, mask_k[None, :], offs_q[:, None], offs_k[None, :])
            allowed = pairs_allowed(head, allowed, offs_q[:, None], offs_k[None, :])
            p = tl.where(allowed, p, 0.0)
        dp = tl.zeros([q.shape[0], BLOCK_K], tl.float32)
        dp = multiply(do, tl.trans(v), dp, TILE.PRECISION)  # [BLOCK_Q, BLOCK_K]
        if head.dropout.seed_ptr is not None:
            keep = keep_mask(head, offs_q, start_k, BLOCK_K)
            dp = tl.where(keep, dp * head.dropout.keep_scale, 0.0)
        ds = p * (dp - delta[:, None])
        if BIAS == FAR_LEFT:
            far_left += tl.sum(ds, 1)
        elif BIAS == FAR_RIGHT:
            far_right += tl.sum(ds, 1)
        elif BIAS == NEAR:
            far_left += tl.sum(tl.where(distance <= -head.numbers.max_distance, ds, 0.0), 1)
            far_right += tl.sum(tl.where(distance >= head.numbers.max_distance, ds, 0.0), 1)
        dq = multiply(ds.to(k.dtype), k, dq, TILE.PRECISION)
    return dq, far_left, far_right


@triton.jit(do_not_specialize=[*COUNTS, "num_rows", "max_distance"])
def _attention_stream_bwd_dq_kernel(
    # pointers
    q_ptr,
    k_ptr,
    v_ptr,
    mask_ptr,
    attn_mask_ptr,
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
    MASK_STEP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    # One program handles one tile of queries and loops over the keys in order.
    TILE: tl.constexpr = Tile(HEAD_DIM, BLOCK_D, BLOCK_Q, BLOCK_K, PRECISION)
    row_size = num_heads * HEAD_DIM
    zero_spare_rows(dq_ptr, cu_q_ptr, num_seqs, num_rows, row_size, stride_dqt)
    num_tiles = tl.cdiv(seqlen_q, BLOCK_Q)
    tile = num_tiles - 1 - tl.program_id(0) % num_tiles
    row = (tl.program_id(0) // num_tiles).to(tl.int64)  # flat (sequence, head)
    b, h = row // num_heads, row % num_heads
    first_q, length_q = bounds(cu_q_ptr, b, seqlen_q)
    first_k, length_k = bounds(cu_k_ptr, b, seqlen_k)
    query = rows_of(Tensor(q_ptr, stride_qb, stride_qh, stride_qt), b, h, first_q)
    key = rows_of(Tensor(k_ptr, stride_kb, stride_kh, stride_kt), b, h, first_k)
    value = rows_of(Tensor(v_ptr, stride_vb, stride_vh, stride_vt), b, h, first_k)
    output = rows_of(Tensor(out_ptr, stride_ob, stride_oh, stride_ot), b, h, first_q)
    d_out = rows_of(Tensor(do_ptr, stride_dob, stride_doh, stride_dot), b, h, first_q)
    d_query = rows_of(Tensor(dq_ptr, stride_dqb, stride_dqh, stride_dqt), b, h, first_q)
    stats = stats_head(cu_q_ptr, b, h, first_q, seqlen_q, stride_sh)
    if mask_ptr is not None:
        mask_ptr += b * stride_mb

    start_q = tile * BLOCK_Q
    offs_q = start_q + tl.arange(0, BLOCK_Q)
    mask_q = offs_q < length_q
    q = load_rows(query, offs_q, mask_q, TILE)  # [BLOCK_Q, BLOCK_D]
    do = load_rows(d_out, offs_q, mask_q, TILE)  # [BLOCK_Q, BLOCK_D]
    out = load_rows(output, offs_q, mask_q, TILE)  # [BLOCK_Q, BLOCK_D]
    # rowsum(O * dO) = rowsum(P * dP)
    delta = tl.sum(out.to(tl.float32) * do.to(tl.float32), 1)
    tl.store(delta_ptr + stats + offs_q, delta, mask=mask_q)
    # Where there is no query, exp2(… - inf) is 0, whatever the bias.
    m_i = tl.load(m_ptr + stats + offs_q, mask=mask_q, other=float("inf"))
    log2l = tl.load(log2l_ptr + stats + offs_q, mask=mask_q, other=0.0)
    dq = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
    far_left = tl.zeros([BLOCK_Q], tl.float32)
    far_right = tl.zeros([BLOCK_Q], tl.float32)

    # Where query i stands, i + shift, and the keys that it sees: from i + floor to i + diagonal.
    shift, floor, diagonal = 0, None, None
    if IS_CAUSAL:
        shift = length_k - length_q
        diagonal = shift
    elif right is not None:
        diagonal = right
    if left is not None:
        floor = shift - left
    end_k = length_k + 0
    near = length_k // BLOCK_K * BLOCK_K  # without a bias: tiles before it need no mask
    if diagonal is not None:
        end_k = tl.maximum(tl.minimum(length_k, start_q + BLOCK_Q + diagonal), 0)
        near = tl.maximum(tl.minimum(length_k, start_q + 1 + diagonal), 0) // BLOCK_K * BLOCK_K
    if mask_ptr is not None or attn_mask_ptr is not None:
        near = 0
    if start_q >= length_q:
        end_k = 0
    begin = 0
    if left is not None:
        begin = tl.maximum(start_q + floor, 0) // BLOCK_K * BLOCK_K
        near = begin
    near, far = tl.minimum(near, end_k), end_k
    if bias_ptr is not None:
        bias_ptr += h * (2 * max_distance + 1)
        near, far = bias_ranges(start_q, BLOCK_Q, shift, max_distance, BLOCK_K)
        near = tl.minimum(tl.maximum(near, begin), end_k)
        far = tl.minimum(tl.maximum(far, begin), end_k)
    numbers = Numbers(scale, scale_log2, max_distance)
    dropout = Dropout(seed_ptr, sample_ptr, threshold, keep_scale)
    attn_mask = None
    if attn_mask_ptr is not None:
        attn_ptr = attn_mask_ptr + b * stride_ab + h * stride_ah
        attn_mask = AttnMask(attn_ptr, stride_at, MASK_STEP)
    head = Head(
        b,
        h,
        length_q,
        length_k,
        floor,
        diagonal,
        shift,
        mask_ptr,
        attn_mask,
        bias_ptr,
        numbers,
        dropout,
    )
    # [begin, near), [near, far), [far, end_k): with a bias, the keys far to the left, near, and far
    # to the right; else the tiles that need no mask (none with a window), and the others.
    FIRST: tl.constexpr = NEAR if bias_ptr is None and left is not None else FAR_LEFT
    for PLACE in tl.static_range(FIRST, NEAR + 1 if bias_ptr is None else FAR_RIGHT + 1):
        start = near if PLACE == NEAR else (far if PLACE == FAR_RIGHT else begin)
        end = near if PLACE == FAR_LEFT else (far if PLACE == NEAR else end_k)
        dq, far_left, far_right = dq_range(
            dq,
            far_left,
            far_right,
            q,
            do,
            m_i,
            log2l,
            delta,
            key,
            value,
            head,
            offs_q,
            start,
            end,
            TILE,
            PLACE,
        )
    store_rows(d_query, dq * scale, offs_q, mask_q, TILE)
    if far_ptr is not None:  # [H, B * tiles, 2]
        far_ptr += 2 * (h * num_seqs * num_tiles + b * num_tiles + tile)
        tl.store(far_ptr, tl.sum(far_left, 0))
        tl.store(far_ptr + 1, tl.sum(far_right, 0))


@triton.jit
def dkdv_range(
    dk,
    dv,
    k,
    v,
    query,
    d_out,
    stat_rows,
    head,
    offs_k,
    start_k,
    start,
    end,
    TILE: tl.constexpr,
    PLACE: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):
    """What the queries in [start, end) add to dK and dV.

    Transposed scores can be first operands from registers. But a thread draws the dropout bits of
    scores that are not transposed; of transposed ones it would draw those that others need.
    """
    BLOCK_Q: tl.constexpr = TILE.BLOCK_Q
    BLOCK_K: tl.constexpr = TILE.BLOCK_K
    PRECISION: tl.constexpr = TILE.PRECISION
    m_ptr, log2l_ptr, delta_ptr = stat_rows
    BIAS: tl.constexpr = NO_BIAS if head.bias_ptr is None else PLACE
    # Whether causality or a window may hide a key from a query.
    MASKED: tl.constexpr = head.bias_ptr is not None or PLACE == NEAR
    for start_q in range(start, end, BLOCK_Q):
        offs_q = start_q + tl.arange(0, BLOCK_Q)
        mask_q = offs_q < head.length_q
        q = load_rows(query, offs_q, mask_q, TILE)  # [BLOCK_Q, BLOCK_D]
        do = load_rows(d_out, offs_q, mask_q, TILE)  # [BLOCK_Q, BLOCK_D]
        m_i = tl.load(m_ptr + offs_q, mask=mask_q, other=float("inf"))
        log2l = tl.load(log2l_ptr + offs_q, mask=mask_q, other=0.0)
        delta = tl.load(delta_ptr + offs_q, mask=mask_q, other=0.0)
        # Queries by keys, or keys by queries if TRANSPOSED.
        if TRANSPOSED:
            at_q, at_k = offs_q[None, :], offs_k[:, None]
            m_i, log2l, delta = m_i[None, :], log2l[None, :], delta[None, :]
            s = tl.zeros([BLOCK_K, BLOCK_Q], tl.float32)
            s = multiply(k, tl.trans(q), s, PRECISION)
            dp = tl.zeros([BLOCK_K, BLOCK_Q], tl.float32)
            dp = multiply(v, tl.trans(do), dp, PRECISION)
        else:
            at_q, at_k = offs_q[:, None], offs_k[None, :]
            m_i, log2l, delta = m_i[:, None], log2l[:, None], delta[:, None]
            s = tl.zeros([BLOCK_Q, BLOCK_K], tl.float32)
            s = multiply(q, tl.trans(k), s, PRECISION)
            dp = tl.zeros([BLOCK_Q, BLOCK_K], tl.float32)
            dp = multiply(do, tl.trans(v), dp, PRECISION)
        distance = at_k - at_q - head.shift
        p = probabilities(s, m_i, log2l, head, distance, BIAS)
        if MASKED and head.diagonal is not None:
            p = tl.where(at_k <= at_q + head.diagonal, p, 0.0)
        if MASKED and head.floor is not None:
            p = tl.where(at_k >= at_q + head.floor, p, 0.0)
        if head.attn_mask is not None:
            p = tl.where(pairs_allowed(head, at_k < head.length_k, at_q, at_k), p, 0.0)
        z_p = p
        if head.dropout.seed_ptr is not None:
            keep = keep_mask(head, offs_q, start_k, BLOCK_K)
            keep = tl.trans(keep) if TRANSPOSED else keep
            z_p = tl.where(keep, p * head.dropout.keep_scale, 0.0)
            dp = tl.where(keep, dp * head.dropout.keep_scale, 0.0)
        z_p = z_p.to(do.dtype)
        ds = (p * (dp - delta)).to(q.dtype)
        dv = multiply(z_p if TRANSPOSED else tl.trans(z_p), do, dv, PRECISION)
        dk = multiply(ds if TRANSPOSED else tl.trans(ds), q, dk, PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=[*COUNTS, "num_rows", "max_distance"])
def _attention_stream_bwd_dkdv_kernel(
    # pointers
    q_ptr,
    k_ptr,
    v_ptr,
    mask_ptr,
    attn_mask_ptr,
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
    stride_dkb,
    stride_dkh,
    stride_dkt,
    # constexprs
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    MASK_STEP: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    # One program handles one tile of keys and loops over the queries in order.
    TILE: tl.constexpr = Tile(HEAD_DIM, BLOCK_D, BLOCK_Q, BLOCK_K, PRECISION)
    row_size = num_heads * HEAD_DIM
    zero_spare_rows(dk_ptr, cu_k_ptr, num_seqs, num_rows, row_size, stride_dkt)
    zero_spare_rows(dv_ptr, cu_k_ptr, num_seqs, num_rows, row_size, stride_dkt)
    num_tiles = tl.cdiv(seqlen_k, BLOCK_K)
    tile = tl.program_id(0) % num_tiles
    row = (tl.program_id(0) // num_tiles).to(tl.int64)  # flat (sequence, head)
    b, h = row // num_heads, row % num_heads
    first_q, length_q = bounds(cu_q_ptr, b, seqlen_q)
    first_k, length_k = bounds(cu_k_ptr, b, seqlen_k)
    if tile * BLOCK_K >= length_k:
        return
    query = rows_of(Tensor(q_ptr, stride_qb, stride_qh, stride_qt), b, h, first_q)
    key = rows_of(Tensor(k_ptr, stride_kb, stride_kh, stride_kt), b, h, first_k)
    value = rows_of(Tensor(v_ptr, stride_vb, stride_vh, stride_vt), b, h, first_k)
    d_out = rows_of(Tensor(do_ptr, stride_dob, stride_doh, stride_dot), b, h, first_q)
    d_key = rows_of(Tensor(dk_ptr, stride_dkb, stride_dkh, stride_dkt), b, h, first_k)
    d_value = rows_of(Tensor(dv_ptr, stride_dkb, stride_dkh, stride_dkt), b, h, first_k)
    stats = stats_head(cu_q_ptr, b, h, first_q, seqlen_q, stride_sh)
    if mask_ptr is not None:
        mask_ptr += b * stride_mb

    start_k = tile * BLOCK_K
    offs_k = start_k + tl.arange(0, BLOCK_K)
    mask_k = keys_allowed(mask_ptr, start_k, length_k, BLOCK_K)
    k = load_rows(key, offs_k, mask_k, TILE)  # [BLOCK_K, BLOCK_D]
    v = load_rows(value, offs_k, mask_k, TILE)  # [BLOCK_K, BLOCK_D]
    dk = tl.zeros([BLOCK_K, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_K, BLOCK_D], tl.float32)

    # Where query i stands, i + shift, and the keys that it sees: from i + floor to i + diagonal.
    shift, floor, diagonal = 0, None, None
    if IS_CAUSAL:
        shift = length_k - length_q
        diagonal = shift
    elif right is not None:
        diagonal = right
    if left is not None:
        floor = shift - left
    begin, behind, end_q = 0, 0, length_q + 0
    if diagonal is not None:
        # From the first query that sees this tile, rounded down to a tile of queries; tiles from
        # ``behind`` on see all of it.
        begin = tl.maximum(start_k - diagonal, 0) // BLOCK_Q * BLOCK_Q
        behind = tl.maximum(start_k + BLOCK_K - 1 - diagonal + BLOCK_Q - 1, 0) // BLOCK_Q * BLOCK_Q
        behind = tl.minimum(behind, length_q)
    if left is not None:
        end_q = tl.minimum(length_q, start_k + BLOCK_K - floor)
        behind = end_q
    ahead = begin
    if bias_ptr is not None:  # a query far before a key sees it far to the right, and vice versa
        bias_ptr += h * (2 * max_distance + 1)
        ahead, behind = bias_ranges(start_k, BLOCK_K, -shift, max_distance, BLOCK_Q)
        ahead = tl.minimum(tl.maximum(ahead, begin), end_q)
        behind = tl.minimum(tl.maximum(behind, begin), end_q)
    numbers = Numbers(scale, scale_log2, max_distance)
    dropout = Dropout(seed_ptr, sample_ptr, threshold, keep_scale)
    attn_mask = None
    if attn_mask_ptr is not None:
        attn_ptr = attn_mask_ptr + b * stride_ab + h * stride_ah
        attn_mask = AttnMask(attn_ptr, stride_at, MASK_STEP)
    head = Head(
        b,
        h,
        length_q,
        length_k,
        floor,
        diagonal,
        shift,
        mask_ptr,
        attn_mask,
        bias_ptr,
        numbers,
        dropout,
    )
    # [begin, ahead), [ahead, behind), [behind, end_q): with a bias, these keys lie far to the
    # right of the queries, near, and far to the left; else all but the last need a causal mask,
    # with a window all.
    FIRST: tl.constexpr = NEAR if bias_ptr is None and left is not None else FAR_LEFT
    for PLACE in tl.static_range(FIRST, NEAR + 1 if bias_ptr is None else FAR_RIGHT + 1):
        start = ahead if PLACE == NEAR else (behind if PLACE == FAR_LEFT else begin)
        end = ahead if PLACE == FAR_RIGHT else (behind if PLACE == NEAR else end_q)
        stat_rows = (m_ptr + stats, log2l_ptr + stats, delta_ptr + stats)
        dk, dv = dkdv_range(
            dk,
            dv,
            k,
            v,
            query,
            d_out,
            stat_rows,
            head,
            offs_k,
            start_k,
            start,
            end,
            TILE,
            PLACE,
            TRANSPOSED,
        )
    # A masked key changed its own row alone. Its gradient is 0, and is written.
    exists = offs_k < length_k
    if mask_ptr is not None:
        dk = tl.where(mask_k[:, None], dk, 0.0)
        dv = tl.where(mask_k[:, None], dv, 0.0)
    store_rows(d_key, dk * scale, offs_k, exists, TILE)
    store_rows(d_value, dv, offs_k, exists, TILE)
