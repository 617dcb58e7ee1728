"""A forward for sm_90 whose warp groups have roles. It is not chosen until it has been timed.

A producer copies tiles of Q, K and V. Two consumers of 64 queries each take turns: the softmax of
one runs during the matmuls of the other. A consumer's softmax of a tile of keys also runs during
its own matmuls: those of the next tile's scores and of the last tile's output.

Source: FlashAttention-3 (Shah et al. 2024, arXiv 2407.08608), algorithm 2 and section 3.1.

It does what ``_attention_stream_fwd_kernel`` does, with the same arguments, except dropout and
bias: with either, the other units are busy longer than the tensor cores, and roles gain nothing.
A block computes one tile of queries after another, so that the copies of the next tile run during
the end of this one.

Rows are copied one by one (``cp.async``), not by a tensor map. So any stride, packed rows and a key
mask work, and a masked key is 0 in shared memory, as in the other kernels.

Each buffer has two barriers: ``full`` counts the threads of the producer whose copies have landed,
``free`` the consumers that have read it. The n-th use of one of S buffers waits for the phase
n // S. Consumer w may issue its matmuls when the other one has arrived at ``turns[w]``.

Symbols: as in the package; W which consumer · n tiles of keys, done tiles of queries, so far
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from fastplm.triton_kernels._launch import INTERPRETED, Fixed, arch_of, cdiv, sm_count
from fastplm.triton_kernels.attention.tiles import (
    COUNTS,
    NO_ATTN_MASK,
    Tensor,
    bounds,
    rows_of,
    stats_head,
)

if TYPE_CHECKING:
    from fastplm.triton_kernels.attention.launch import Shape


@gluon.jit
def _own(number, FACTOR: gl.constexpr = 1):
    """``number``, an int32 and a multiple of ``FACTOR``, that the compiler computes in this role.

    Else it would compute what follows from arguments alone before the roles separate, and all roles
    would keep it in registers, which are scarce.
    """
    own = gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [number], dtype=gl.int32, is_pure=False, pack=1
    )
    return gl.multiple_of(own, FACTOR) if FACTOR > 1 else own


@gluon.jit
def _tile_of(item, sizes, cu_q_ptr, cu_k_ptr, options: gl.constexpr):
    """The sequence and head of a tile of queries, its start, both sequences, its tiles of keys.

    There is at least one tile of keys, masked if there are no keys, so that both consumers and the
    producer take the same number of steps. There is none if there are no queries.
    """
    num_tiles, num_heads, seqlen_q, seqlen_k = sizes
    BLOCK_Q: gl.constexpr = options[0]
    start_q = (num_tiles - 1 - item % num_tiles) * 2 * BLOCK_Q  # the longest causal ones first
    row = (item // num_tiles).to(gl.int64)  # flat (sequence, head)
    b, h = row // num_heads, row % num_heads
    first_q, length_q = bounds(cu_q_ptr, b, seqlen_q)
    first_k, length_k = bounds(cu_k_ptr, b, seqlen_k)
    end_k = length_k + 0
    if options[3]:
        end_k = gl.minimum(length_k, start_q + 2 * BLOCK_Q + length_k - length_q)
    tiles_k = gl.maximum(gl.cdiv(end_k, options[1]), 1)
    if start_q >= length_q:
        tiles_k = tiles_k * 0
    return b, h, start_q, first_q, length_q, first_k, length_k, tiles_k


@gluon.jit
def _keys_allowed(mask_ptr, offs_k, length_k):
    """[BLOCK_K] bool: the keys of this tile that exist and that the key mask lets through."""
    allowed = offs_k < length_k
    if mask_ptr is not None:
        allowed = allowed & (gl.load(mask_ptr + offs_k, mask=allowed, other=0) != 0)
    return allowed


@gluon.jit
def _copy_rows(tile, ptr, offs_t, mask_t, stride_t, layout: gl.constexpr):
    """Rows ``offs_t`` into shared memory, 0 where masked."""
    offs_d = gl.arange(0, tile.shape[1], gl.SliceLayout(0, layout))
    ptrs = ptr + offs_t.to(gl.int64)[:, None] * stride_t + offs_d[None, :]
    mask = gl.expand_dims(mask_t, 1) & (offs_d >= 0)[None, :]
    async_copy.async_copy_global_to_shared(tile, ptrs, mask)


@gluon.jit
def _produce(pointers, items, sizes, strides, tiles, full, free, options: gl.constexpr):
    q_ptr, k_ptr, v_ptr, mask_ptr, cu_q_ptr, cu_k_ptr = pointers
    q_steps, k_steps, v_steps, stride_mb = strides
    items, stride_mb = _own(items), _own(stride_mb)
    sizes = [_own(size) for size in sizes]
    q_b, q_h, q_t = [_own(step, 16) for step in q_steps]
    k_b, k_h, k_t = [_own(step, 16) for step in k_steps]
    v_b, v_h, v_t = [_own(step, 16) for step in v_steps]
    q_tiles, k_tiles, v_tiles = tiles
    q_full, k_full, v_full = full
    q_free, k_free, v_free = free
    BLOCK_Q: gl.constexpr = options[0]
    BLOCK_K: gl.constexpr = options[1]
    STAGES: gl.constexpr = options[2]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    rows: gl.constexpr = gl.SliceLayout(1, layout)
    n = 0
    done = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        b, h, start_q, first_q, length_q, first_k, length_k, tiles_k = _tile_of(
            item, sizes, cu_q_ptr, cu_k_ptr, options
        )
        if tiles_k > 0:
            q_head = rows_of(Tensor(q_ptr, q_b, q_h, q_t), b, h, first_q).ptr
            k_head = rows_of(Tensor(k_ptr, k_b, k_h, k_t), b, h, first_k).ptr
            v_head = rows_of(Tensor(v_ptr, v_b, v_h, v_t), b, h, first_k).ptr
            mask_row = mask_ptr
            if mask_ptr is not None:
                mask_row = mask_ptr + b * stride_mb + first_k
            mbarrier.wait(q_free.index(done % 2), (done // 2 & 1) ^ 1)
            for w in gl.static_range(2):
                offs_q = start_q + w * BLOCK_Q + gl.arange(0, BLOCK_Q, rows)
                tile = q_tiles.index(done % 2 * 2 + w)
                _copy_rows(tile, q_head, offs_q, offs_q < length_q, q_t, layout)
            async_copy.mbarrier_arrive(q_full.index(done % 2), increment_count=False)
            for i in range(tiles_k):
                stage = n % STAGES
                is_free = (n // STAGES & 1) ^ 1
                offs_k = i * BLOCK_K + gl.arange(0, BLOCK_K, rows)
                allowed = _keys_allowed(mask_row, offs_k, length_k)
                mbarrier.wait(k_free.index(stage), is_free)
                _copy_rows(k_tiles.index(stage), k_head, offs_k, allowed, k_t, layout)
                async_copy.mbarrier_arrive(k_full.index(stage), increment_count=False)
                mbarrier.wait(v_free.index(stage), is_free)
                _copy_rows(v_tiles.index(stage), v_head, offs_k, allowed, v_t, layout)
                async_copy.mbarrier_arrive(v_full.index(stage), increment_count=False)
                n += 1
            done += 1


@gluon.jit
def _softmax(s, m_i, l_i, offs_q, start_k, mask_ptr, keys, factor, IS_CAUSAL: gl.constexpr):
    """(P, m, l, what to rescale the output by) after one tile of raw scores."""
    length_k, whole, diagonal = keys
    if start_k >= whole:
        # A thread's columns share bits 1 and 2: the others are constants.
        columns = gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout))
        offs_k = start_k + _own(columns & 6) + (columns & -7)
        allowed = gl.expand_dims(_keys_allowed(mask_ptr, offs_k, length_k), 0)
        if IS_CAUSAL:
            allowed = allowed & (offs_k[None, :] <= offs_q[:, None] + diagonal)
        s = gl.where(allowed, s, float("-inf"))
    # -inf - -inf is NaN: a row that has seen no key yet keeps a reference point of 0.
    m_new = gl.maximum(m_i, gl.max(s, 1) * factor)
    m_ref = gl.where(m_new == float("-inf"), 0.0, m_new)
    alpha = gl.exp2(m_i - m_ref)
    p = gl.exp2(s * factor - m_ref[:, None])
    return p, m_new, l_i * alpha + gl.sum(p, 1), alpha


@gluon.jit
def _consume(
    W: gl.constexpr,
    pointers,
    numbers,
    sizes,
    strides,
    tiles,
    full,
    free,
    turns,
    options: gl.constexpr,
):
    mask_ptr, cu_q_ptr, cu_k_ptr, out_ptr, m_ptr, log2l_ptr = pointers
    items, factor = numbers
    out_b, out_h, out_t, stride_mb, stride_sh = strides
    out_b, out_h, out_t = _own(out_b, 16), _own(out_h, 16), _own(out_t, 16)
    items, stride_mb, stride_sh = _own(items), _own(stride_mb), _own(stride_sh)
    sizes = [_own(size) for size in sizes]
    q_tiles, k_tiles, v_tiles = tiles
    q_full, k_full, v_full = full
    q_free, k_free, v_free = free
    BLOCK_Q: gl.constexpr = options[0]
    BLOCK_K: gl.constexpr = options[1]
    STAGES: gl.constexpr = options[2]
    IS_CAUSAL: gl.constexpr = options[3]
    HEAD_DIM: gl.constexpr = q_tiles.shape[2]
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_K, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    out_rows: gl.constexpr = gl.SliceLayout(1, o_layout)
    store_layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    mine, others = turns.index(W), turns.index(1 - W)
    no_scores = gl.full([BLOCK_Q, BLOCK_K], 0.0, gl.float32, s_layout)
    n = 0
    done = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        b, h, start_q, first_q, length_q, first_k, length_k, tiles_k = _tile_of(
            item, sizes, cu_q_ptr, cu_k_ptr, options
        )
        if tiles_k > 0:
            start_q += W * BLOCK_Q
            diagonal = length_k - length_q  # query i sees keys j <= i + diagonal
            whole = length_k // BLOCK_K * BLOCK_K  # tiles before it need no mask
            if IS_CAUSAL:
                whole = gl.minimum(length_k, start_q + 1 + diagonal) // BLOCK_K * BLOCK_K
            mask_row = mask_ptr
            if mask_ptr is not None:
                mask_row = mask_ptr + b * stride_mb + first_k
                whole = 0
            keys = (length_k, whole, diagonal)
            offs_q = start_q + gl.arange(0, BLOCK_Q, rows)
            m_i = gl.full([BLOCK_Q], float("-inf"), gl.float32, rows)
            l_i = gl.full([BLOCK_Q], 0.0, gl.float32, rows)
            acc = gl.full([BLOCK_Q, HEAD_DIM], 0.0, gl.float32, o_layout)
            q = q_tiles.index(done % 2 * 2 + W)

            mbarrier.wait(q_full.index(done % 2), done // 2 & 1)
            mbarrier.wait(k_full.index(n % STAGES), n // STAGES & 1)
            fence_async_shared()
            mbarrier.wait(mine, n & 1)
            k = k_tiles.index(n % STAGES).permute((1, 0))
            s = warpgroup_mma(q, k, no_scores, use_acc=False, is_async=True)
            mbarrier.arrive(others)
            s = warpgroup_mma_wait(0, [s])
            mbarrier.arrive(k_free.index(n % STAGES))
            p, m_i, l_i, alpha = _softmax(s, m_i, l_i, offs_q, 0, mask_row, keys, factor, IS_CAUSAL)
            for i in range(1, tiles_k):
                last = n % STAGES
                last_phase = n // STAGES & 1
                n += 1
                p16 = gl.convert_layout(p.to(k_tiles.dtype), p_layout)
                mbarrier.wait(k_full.index(n % STAGES), n // STAGES & 1)
                mbarrier.wait(v_full.index(last), last_phase)
                fence_async_shared()
                mbarrier.wait(mine, n & 1)
                k = k_tiles.index(n % STAGES).permute((1, 0))
                s = warpgroup_mma(q, k, no_scores, use_acc=False, is_async=True)
                acc = warpgroup_mma(p16, v_tiles.index(last), acc, is_async=True)
                mbarrier.arrive(others)
                s = warpgroup_mma_wait(1, [s])
                mbarrier.arrive(k_free.index(n % STAGES))
                p, m_i, l_i, alpha = _softmax(
                    s, m_i, l_i, offs_q, i * BLOCK_K, mask_row, keys, factor, IS_CAUSAL
                )
                acc = warpgroup_mma_wait(0, [acc])
                mbarrier.arrive(v_free.index(last))
                acc = acc * gl.convert_layout(alpha, out_rows)[:, None]
            mbarrier.arrive(q_free.index(done % 2))
            p16 = gl.convert_layout(p.to(k_tiles.dtype), p_layout)
            mbarrier.wait(v_full.index(n % STAGES), n // STAGES & 1)
            fence_async_shared()
            acc = warpgroup_mma(p16, v_tiles.index(n % STAGES), acc, is_async=True)
            acc = warpgroup_mma_wait(0, [acc])
            mbarrier.arrive(v_free.index(n % STAGES))
            n += 1
            done += 1

            alive = l_i != 0.0
            l_i = gl.where(alive, l_i, 1.0)
            out = acc * gl.convert_layout(1.0 / l_i, out_rows)[:, None]
            out = gl.convert_layout(out.to(out_ptr.dtype.element_ty), store_layout)
            head = rows_of(Tensor(out_ptr, out_b, out_h, out_t), b, h, first_q).ptr
            offs = start_q + gl.arange(0, BLOCK_Q, gl.SliceLayout(1, store_layout))
            offs_d = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, store_layout))
            ptrs = head + offs.to(gl.int64)[:, None] * out_t + offs_d[None, :]
            gl.store(ptrs, out, mask=(offs < length_q)[:, None] & (offs_d >= 0)[None, :])
            row = stats_head(cu_q_ptr, b, h, first_q, sizes[2], stride_sh) + offs_q
            gl.store(m_ptr + row, gl.where(alive, m_i, 0.0), mask=offs_q < length_q)
            gl.store(log2l_ptr + row, gl.log2(l_i), mask=offs_q < length_q)


@gluon.jit
def _zero_spare_rows(ptr, cu_ptr, num_seqs, num_rows, row_size):
    """All programs together write 0 behind the last sequence of a contiguous [rows, H, D]."""
    BLOCK: gl.constexpr = 1024
    layout: gl.constexpr = gl.BlockedLayout([8], [32], [4], [0])
    if cu_ptr is not None:
        end = num_rows.to(gl.int64) * row_size
        begin = gl.load(cu_ptr + num_seqs).to(gl.int64) * row_size
        begin += gl.program_id(0).to(gl.int64) * BLOCK
        zero = gl.full([BLOCK], 0.0, ptr.dtype.element_ty, layout)
        for start in range(begin, end, gl.num_programs(0).to(gl.int64) * BLOCK):
            offs = start + gl.arange(0, BLOCK, layout)
            gl.store(ptr + offs, zero, mask=offs < end)


@gluon.jit
def _phases(size: gl.constexpr, threads: gl.constexpr):
    """Barriers that so many threads (or consumers) arrive at."""
    barriers = gl.allocate_shared_memory(gl.int64, [size, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(size):
        mbarrier.init(barriers.index(i), threads)
    return barriers


# fmt: off
@gluon.jit(do_not_specialize=[*COUNTS, "num_rows"])
def _attention_ping_pong_fwd_kernel(
    # pointers
    q_ptr, k_ptr, v_ptr, mask_ptr, cu_q_ptr, cu_k_ptr, seed_ptr, sample_ptr,
    out_ptr, m_ptr, log2l_ptr,
    # sizes
    num_seqs, num_heads, num_rows, seqlen_q, seqlen_k, scale_log2, threshold, keep_scale,
    # strides
    stride_qb, stride_qh, stride_qt, stride_kb, stride_kh, stride_kt,
    stride_vb, stride_vh, stride_vt, stride_mb, stride_ob, stride_oh, stride_ot, stride_sh,
    # constexprs
    HEAD_DIM: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr, REGISTERS: gl.constexpr, IS_CAUSAL: gl.constexpr, PRECISION: gl.constexpr,
):
    # fmt: on
    # A program takes tiles of queries as far apart as there are programs.
    gl.static_assert(seed_ptr is None)
    _zero_spare_rows(out_ptr, cu_q_ptr, num_seqs, num_rows, num_heads * HEAD_DIM)
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    q_tiles = gl.allocate_shared_memory(dtype, [4, BLOCK_Q, HEAD_DIM], swizzled)
    k_tiles = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_K, HEAD_DIM], swizzled)
    v_tiles = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_K, HEAD_DIM], swizzled)
    full = (_phases(2, 128), _phases(STAGES, 128), _phases(STAGES, 128))
    free = (_phases(2, 2), _phases(STAGES, 2), _phases(STAGES, 2))
    turns = _phases(2, 1)
    mbarrier.arrive(turns.index(0))

    num_tiles = gl.cdiv(seqlen_q, 2 * BLOCK_Q)
    items = num_tiles * num_seqs * num_heads
    sizes = (num_tiles, num_heads, seqlen_q, seqlen_k)
    options: gl.constexpr = (BLOCK_Q, BLOCK_K, STAGES, IS_CAUSAL)
    inputs = (q_ptr, k_ptr, v_ptr, mask_ptr, cu_q_ptr, cu_k_ptr)
    outputs = (mask_ptr, cu_q_ptr, cu_k_ptr, out_ptr, m_ptr, log2l_ptr)
    q_steps = (stride_qb, stride_qh, stride_qt)
    k_steps = (stride_kb, stride_kh, stride_kt)
    v_steps = (stride_vb, stride_vh, stride_vt)
    strides = (stride_ob, stride_oh, stride_ot, stride_mb, stride_sh)
    numbers = (items, scale_log2)
    steps = (q_steps, k_steps, v_steps, stride_mb)
    tiles = (q_tiles, k_tiles, v_tiles)
    gl.warp_specialize(
        [
            (_produce, (inputs, items, sizes, steps, tiles, full, free, options)),
            (_consume, (0, outputs, numbers, sizes, strides, tiles, full, free, turns, options)),
            (_consume, (1, outputs, numbers, sizes, strides, tiles, full, free, turns, options)),
        ],
        [4, 4],
        [REGISTERS, REGISTERS],
    )


def ping_pong(
    shape: Shape, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[Any, tuple[int], Fixed] | None:
    """Kernel, grid and arguments of a forward that this kernel serves."""
    steps = [step for name, step in shape.shared.items() if name[:8] in _STEPS]
    serves = (
        not INTERPRETED
        and arch_of(shape.device) == 90
        and (shape.dtype.itemsize, shape.head_dim, shape.kind) == (2, 64, "plain")
        and shape.streams
        # Each copy moves 16 bytes.
        and all(step % 16 == 0 for step in steps)
        and all(tensor.data_ptr() % 16 == 0 for tensor in (query, key, value))
    )
    return _launch_of(shape) if serves else None


_STEPS = ("stride_q", "stride_k", "stride_v")


@functools.lru_cache(maxsize=1024)
def _launch_of(shape: Shape) -> tuple[Any, tuple[int], Fixed]:
    tiles = cdiv(shape.seqlen_q, 128) * shape.batch * shape.heads
    shared = {name: value for name, value in shape.shared.items() if name not in NO_ATTN_MASK}
    fixed = Fixed(
        num_rows=shape.rows_q,
        stride_sh=shape.rows_q,
        **shape.strides("o", shape.like_query[1]),
        **shared,
        BLOCK_Q=64,
        BLOCK_K=128,
        STAGES=4,
        # A consumer's; the producer has the rest of 504. Other numbers spill in one of the two.
        REGISTERS=232 if shape.ragged else 224,
        num_warps=4,
    )
    return _attention_ping_pong_fwd_kernel, (min(tiles, sm_count(shape.device)),), fixed
