"""The forward kernels, FlashAttention-2's algorithm 1.

row     A program handles several tiles of queries, whose keys all lie in one tile.
stream  A program handles one tile of queries and loops over tiles of keys.

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
def softmax_step(
    s, v, m_i, l_i, acc, factor, head, offs_q, start_k, HAS_BIAS: tl.constexpr, TILE: tl.constexpr
):
    """One tile of keys: rescale what was, add P V.

    ``s`` are raw scores, or scaled ones with a bias; ``factor`` makes their base-2 logarithms.
    """
    # -inf - -inf is NaN: a row that has seen no key yet keeps a reference point of 0.
    if HAS_BIAS:
        # The difference comes first, so that a large bias is not rounded a second time.
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
    if head.dropout.seed_ptr is not None:
        keep = keep_mask(head, offs_q, start_k, p.shape[1])
        p = tl.where(keep, p, 0.0)
    acc = multiply(p.to(v.dtype), v, acc * alpha[:, None], TILE.PRECISION)
    return m_new, l_i, acc


@triton.jit
def store_output(
    out,
    m_ptr,
    log2l_ptr,
    acc,
    m_i,
    l_i,
    offs_q,
    mask_q,
    keep_scale,
    TILE: tl.constexpr,
    HAS_STATS: tl.constexpr,
):
    alive = l_i != 0.0
    l_i = tl.where(alive, l_i, 1.0)
    result = acc * (keep_scale / l_i)[:, None]
    store_rows(out, result, offs_q, mask_q, TILE)
    if HAS_STATS:
        tl.store(m_ptr + offs_q, tl.where(alive, m_i, 0.0), mask=mask_q)
        tl.store(log2l_ptr + offs_q, tl.log2(l_i), mask=mask_q)


@triton.jit(do_not_specialize=[*COUNTS, "num_rows", "tiles_q"])
def _attention_row_fwd_kernel(
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
    # constexprs
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    MASK_STEP: tl.constexpr,
    HAS_STATS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    # One program handles consecutive tiles of queries of one head, and loads K and V once.
    TILE: tl.constexpr = Tile(HEAD_DIM, BLOCK_D, BLOCK_Q, BLOCK_K, PRECISION)
    row_size = num_heads * HEAD_DIM
    zero_spare_rows(out_ptr, cu_q_ptr, num_seqs, num_rows, row_size, stride_ot)
    runs = tl.cdiv(tl.cdiv(seqlen_q, BLOCK_Q), tiles_q)
    run = tl.program_id(0) % runs
    row = (tl.program_id(0) // runs).to(tl.int64)  # flat (sequence, head)
    b, h = row // num_heads, row % num_heads
    first_q, length_q = bounds(cu_q_ptr, b, seqlen_q)
    first_k, length_k = bounds(cu_k_ptr, b, seqlen_k)
    query = rows_of(Tensor(q_ptr, stride_qb, stride_qh, stride_qt), b, h, first_q)
    key = rows_of(Tensor(k_ptr, stride_kb, stride_kh, stride_kt), b, h, first_k)
    value = rows_of(Tensor(v_ptr, stride_vb, stride_vh, stride_vt), b, h, first_k)
    out = rows_of(Tensor(out_ptr, stride_ob, stride_oh, stride_ot), b, h, first_q)
    stats = stats_head(cu_q_ptr, b, h, first_q, seqlen_q, stride_sh)
    if mask_ptr is not None:
        mask_ptr += b * stride_mb

    offs_k = tl.arange(0, BLOCK_K)
    mask_k = keys_allowed(mask_ptr, 0, length_k, BLOCK_K)
    k = load_rows(key, offs_k, mask_k, TILE)  # [BLOCK_K, BLOCK_D]
    v = load_rows(value, offs_k, mask_k, TILE)  # [BLOCK_K, BLOCK_D]

    # Where query i stands, i + shift, and the keys that it sees: from i + floor to i + diagonal.
    shift, floor, diagonal = 0, None, None
    if IS_CAUSAL:
        shift = length_k - length_q
        diagonal = shift
    elif right is not None:
        diagonal = right
    if left is not None:
        floor = shift - left
    numbers = Numbers(None, scale_log2, None)
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
        None,
        mask_ptr,
        attn_mask,
        None,
        numbers,
        dropout,
    )
    first_tile = run * tiles_q * BLOCK_Q
    end_q = tl.minimum(first_tile + tiles_q * BLOCK_Q, length_q)
    for start_q in range(first_tile, end_q, BLOCK_Q):
        offs_q = start_q + tl.arange(0, BLOCK_Q)
        mask_q = offs_q < length_q
        q = load_rows(query, offs_q, mask_q, TILE)  # [BLOCK_Q, BLOCK_D]
        # Loaded again rather than kept, to save registers.
        mask_k = keys_allowed(mask_ptr, 0, length_k, BLOCK_K)
        s = masked_scores(q, k, offs_q, offs_k, mask_k, head, TILE)
        m_i = tl.full([BLOCK_Q], float("-inf"), tl.float32)
        l_i = tl.zeros([BLOCK_Q], tl.float32)
        acc = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
        m_i, l_i, acc = softmax_step(s, v, m_i, l_i, acc, scale_log2, head, offs_q, 0, False, TILE)
        m_row, log2l_row = m_ptr + stats, log2l_ptr + stats
        store_output(
            out, m_row, log2l_row, acc, m_i, l_i, offs_q, mask_q, keep_scale, TILE, HAS_STATS
        )


@triton.jit
def attend_range(
    m_i, l_i, acc, q, key, value, head, offs_q, start, end, TILE: tl.constexpr, PLACE: tl.constexpr
):
    """The tiles of keys in [start, end)."""
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
        factor = head.numbers.scale_log2
        if BIAS != NO_BIAS:
            distance = offs_k[None, :] - offs_q[:, None] - head.shift
            s = add_bias(s, head, distance, BIAS)
            factor = LOG2E
        if MASKED:
            allowed = in_window(head, mask_k[None, :], offs_q[:, None], offs_k[None, :])
            allowed = pairs_allowed(head, allowed, offs_q[:, None], offs_k[None, :])
            s = tl.where(allowed, s, float("-inf"))
        m_i, l_i, acc = softmax_step(
            s, v, m_i, l_i, acc, factor, head, offs_q, start_k, BIAS != NO_BIAS, TILE
        )
    return m_i, l_i, acc


@triton.jit(do_not_specialize=[*COUNTS, "num_rows", "max_distance"])
def _attention_stream_fwd_kernel(
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
    # constexprs
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    MASK_STEP: tl.constexpr,
    HAS_STATS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    # One program handles one tile of queries of one head. The programs of a head are neighbours, so
    # that its K and V stay in the L2. If causal, the tiles with the most keys come first.
    TILE: tl.constexpr = Tile(HEAD_DIM, BLOCK_D, BLOCK_Q, BLOCK_K, PRECISION)
    row_size = num_heads * HEAD_DIM
    zero_spare_rows(out_ptr, cu_q_ptr, num_seqs, num_rows, row_size, stride_ot)
    num_tiles = tl.cdiv(seqlen_q, BLOCK_Q)
    tile = num_tiles - 1 - tl.program_id(0) % num_tiles
    row = (tl.program_id(0) // num_tiles).to(tl.int64)  # flat (sequence, head)
    b, h = row // num_heads, row % num_heads
    first_q, length_q = bounds(cu_q_ptr, b, seqlen_q)
    first_k, length_k = bounds(cu_k_ptr, b, seqlen_k)
    if tile * BLOCK_Q >= length_q:
        return
    query = rows_of(Tensor(q_ptr, stride_qb, stride_qh, stride_qt), b, h, first_q)
    key = rows_of(Tensor(k_ptr, stride_kb, stride_kh, stride_kt), b, h, first_k)
    value = rows_of(Tensor(v_ptr, stride_vb, stride_vh, stride_vt), b, h, first_k)
    out = rows_of(Tensor(out_ptr, stride_ob, stride_oh, stride_ot), b, h, first_q)
    stats = stats_head(cu_q_ptr, b, h, first_q, seqlen_q, stride_sh)
    if mask_ptr is not None:
        mask_ptr += b * stride_mb

    start_q = tile * BLOCK_Q
    offs_q = start_q + tl.arange(0, BLOCK_Q)
    mask_q = offs_q < length_q
    q = load_rows(query, offs_q, mask_q, TILE)  # [BLOCK_Q, BLOCK_D]
    m_i = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_Q], tl.float32)
    acc = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)

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
    begin = 0
    if left is not None:
        begin = tl.maximum(start_q + floor, 0) // BLOCK_K * BLOCK_K
        near = begin
    far = end_k
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
    # to the right; else the tiles that need no mask (none with a mask or a window), and the others.
    MASKED: tl.constexpr = mask_ptr is not None or attn_mask_ptr is not None or left is not None
    FIRST: tl.constexpr = NEAR if bias_ptr is None and MASKED else FAR_LEFT
    LAST: tl.constexpr = NEAR if bias_ptr is None else FAR_RIGHT
    for PLACE in tl.static_range(FIRST, LAST + 1):
        start = near if PLACE == NEAR else (far if PLACE == FAR_RIGHT else begin)
        end = near if PLACE == FAR_LEFT else (far if PLACE == NEAR else end_k)
        m_i, l_i, acc = attend_range(
            m_i, l_i, acc, q, key, value, head, offs_q, start, end, TILE, PLACE
        )
    m_row, log2l_row = m_ptr + stats, log2l_ptr + stats
    store_output(out, m_row, log2l_row, acc, m_i, l_i, offs_q, mask_q, keep_scale, TILE, HAS_STATS)
