"""What the attention kernels share: their argument structures, tiles in memory, dropout.

The structures exist inside kernels alone; the host passes plain arguments. Give their fields by
position: Triton's cache of compiled code hashes the text of the kernels, not of these classes, so a
field may change its place only with a change to the text of every kernel.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from fastplm.triton_kernels._launch import dot
from fastplm.triton_kernels._philox import philox

# Triton must not specialise kernels on these numbers, which change from batch to batch: a separate
# kernel for multiples of 16 would not be faster. ``stride_sh`` is the number of rows: statistics
# begin at any row, so they are loaded one by one.
COUNTS = (
    *("num_seqs", "seqlen_q", "seqlen_k", "threshold", "stride_mb", "stride_sh", "left", "right"),
)

#: A launch without an attention mask: None is a constant, which removes the kernel's parameter.
NO_ATTN_MASK = dict.fromkeys(("attn_mask_ptr", "stride_ab", "stride_ah", "stride_at", "MASK_STEP"))

LOG2E = tl.constexpr(1.4426950408889634)

# The stream of ``reference.philox.Stream.DROPOUT`` and its number of rounds.
DROPOUT_STREAM = tl.constexpr(3)
DROPOUT_ROUNDS = tl.constexpr(7)


class Tensor(NamedTuple):
    """[B, H, T, D], or [N, H, D] with ``stride_b`` 0."""

    ptr: Any
    stride_b: Any
    stride_h: Any
    stride_t: Any


class Rows(NamedTuple):
    """[T, D]: the rows of one head of one sequence."""

    ptr: Any
    stride: Any


class AttnMask(NamedTuple):
    """[Tq, Tk] of one head: 0 where a query may not see a key.

    Each kernel makes it inline: under Triton 3.6 a helper cannot return None if there is no mask.
    """

    ptr: Any
    stride: Any
    STEP: Any  # divides the number of keys: so many neighbours all exist, or none


class Numbers(NamedTuple):
    scale: Any
    scale_log2: Any  # times log2(e)
    max_distance: Any


class Dropout(NamedTuple):
    seed_ptr: Any
    sample_ptr: Any
    threshold: Any
    keep_scale: Any


class Head(NamedTuple):
    """One head of one sequence, and what is the same for all of its tiles."""

    b: Any
    h: Any
    length_q: Any
    length_k: Any
    floor: Any  # query i sees keys j >= i + floor; None: no bound
    diagonal: Any  # and j <= i + diagonal; None: no bound
    shift: Any  # query i stands at position i + shift
    mask_ptr: Any  # [words], the key mask, see ``keys_allowed``
    attn_mask: Any  # AttnMask or None
    bias_ptr: Any  # [2 * max_distance + 1]
    numbers: Numbers
    dropout: Dropout


class Tile(NamedTuple):
    """The constants of a kernel."""

    HEAD_DIM: Any
    BLOCK_D: Any
    BLOCK_Q: Any
    BLOCK_K: Any
    PRECISION: Any


@triton.jit
def multiply(a, b, acc, PRECISION: tl.constexpr):
    """``acc + a @ b`` in the dtype of the tiles; fp32 is multiplied in TF32 if PRECISION says so.

    Triton passes such tiles to the tensor cores as they are. These ignore the low 13 bits, so the
    operands are truncated, not rounded.
    """
    if PRECISION == "tf32":
        return tl.dot(a, b, acc, input_precision="tf32")
    return dot(a, b, acc, PRECISION == "upcast")


# --- tiles in memory ------------------------------------------------------------------------------


@triton.jit
def bounds(cu_ptr, b, seqlen):
    """(first packed row, length) of sequence ``b``; a dense batch has no packed rows."""
    first = b * 0
    length = seqlen
    if cu_ptr is not None:
        first = tl.load(cu_ptr + b).to(tl.int64)
        length = (tl.load(cu_ptr + b + 1) - first).to(tl.int32)
    return first, length


@triton.jit
def rows_of(tensor, b, h, first):
    """The rows of head ``h`` of sequence ``b``; in a dense batch ``first`` is 0."""
    ptr = tensor.ptr + b * tensor.stride_b + h * tensor.stride_h + first * tensor.stride_t
    return Rows(ptr, tensor.stride_t)


@triton.jit
def stats_head(cu_ptr, b, h, first, seqlen, stride_h):
    """Offset of that head's first row in the statistics [H, rows]."""
    row = first
    if cu_ptr is None:
        row = b * seqlen
    return h * stride_h + row


@triton.jit
def load_rows(rows, offs_t, mask_t, TILE: tl.constexpr):
    """Rows ``offs_t`` as a [len(offs_t), BLOCK_D] tile, 0 where masked."""
    offs_d = tl.arange(0, TILE.BLOCK_D)
    ptrs = rows.ptr + offs_t.to(tl.int64)[:, None] * rows.stride + offs_d[None, :]
    return tl.load(ptrs, mask=mask_t[:, None] & (offs_d < TILE.HEAD_DIM)[None, :], other=0.0)


@triton.jit
def store_rows(rows, tile, offs_t, mask_t, TILE: tl.constexpr):
    offs_d = tl.arange(0, TILE.BLOCK_D)
    ptrs = rows.ptr + offs_t.to(tl.int64)[:, None] * rows.stride + offs_d[None, :]
    mask = mask_t[:, None] & (offs_d < TILE.HEAD_DIM)[None, :]
    tl.store(ptrs, tile.to(rows.ptr.dtype.element_ty), mask=mask)


@triton.jit
def zero_spare_rows(ptr, cu_ptr, num_seqs, num_rows, row_size, stride):
    """All programs together write 0 behind the last sequence of [rows, H, D], a row at a time."""
    BLOCK: tl.constexpr = 1024
    if cu_ptr is not None:
        first = tl.load(cu_ptr + num_seqs) + tl.program_id(0)
        for row in range(first, num_rows, tl.num_programs(0)):
            place = (tl.full((), 0, tl.int64) + row) * stride
            for start in range(0, row_size, BLOCK):
                offs = start + tl.arange(0, BLOCK)
                zeros = tl.zeros([BLOCK], ptr.dtype.element_ty)
                tl.store(ptr + place + offs, zeros, mask=offs < row_size)


@triton.jit
def keys_allowed(mask_ptr, start_k, length_k, BLOCK_K: tl.constexpr):
    """[BLOCK_K] bool: the keys from ``start_k`` on that exist and that the key mask lets through.

    The mask holds 64 keys in a word, so that one load brings what a thread needs of a tile. Of
    bytes, a thread loads one for each of its columns, and ptxas lets each load wait for the last.
    A bit's place is key = 32 group + 8 step + 2 lane + parity: where the tile is a matmul's, all
    but the lane are places in a thread's registers, so that only one shift is not a constant.
    """
    offs_k = start_k + tl.arange(0, BLOCK_K)
    allowed = (offs_k >= 0) & (offs_k < length_k)
    if mask_ptr is not None:  # where no key is, the bit is 0
        GROUPS: tl.constexpr = (BLOCK_K + 31) // 32
        STEPS: tl.constexpr = BLOCK_K // GROUPS // 8
        group = tl.reshape(tl.arange(0, GROUPS), [GROUPS, 1, 1, 1])
        step = tl.reshape(tl.arange(0, STEPS), [1, STEPS, 1, 1])
        lane = tl.reshape(tl.arange(0, 4), [1, 1, 4, 1])
        parity = tl.reshape(tl.arange(0, 2), [1, 1, 1, 2])
        bits = tl.zeros([GROUPS, 1, 4, 1], tl.int32)
        for i in tl.static_range(0, GROUPS, 2):
            first = start_k + 32 * i
            word = tl.load(mask_ptr + first // 64, mask=(first >= 0) & (first < length_k), other=0)
            if BLOCK_K < 64:
                word = word >> (start_k & 63)
            bits = tl.where(group == i, word.to(tl.int32) >> (2 * lane), bits)
            if GROUPS > 1:
                bits = tl.where(group == i + 1, (word >> 32).to(tl.int32) >> (2 * lane), bits)
        bits = (bits >> (8 * step + parity)) & 1  # [GROUPS, STEPS, 4, 2]
        allowed = tl.reshape(bits, [BLOCK_K]) != 0
    return allowed


@triton.jit(do_not_specialize=["seqlen_k", "words", "stride_mb"])
def _attention_key_bits_kernel(
    # pointers
    mask_ptr,
    cu_k_ptr,
    bits_ptr,
    # sizes
    seqlen_k,
    words,
    # strides
    stride_mb,
    # constexprs
    BLOCK_W: tl.constexpr,
):
    # One program packs words of one sequence, 64 keys each; a key that does not exist is 0.
    tiles = tl.cdiv(words, BLOCK_W)
    b = (tl.program_id(0) // tiles).to(tl.int64)
    offs_w = tl.program_id(0) % tiles * BLOCK_W + tl.arange(0, BLOCK_W)
    first_k, length_k = bounds(cu_k_ptr, b, seqlen_k)
    bit = tl.arange(0, 64)
    offs_k = offs_w.to(tl.int64)[:, None] * 64 + bit[None, :]
    ptrs = mask_ptr + b * stride_mb + first_k + offs_k
    allowed = tl.load(ptrs, mask=offs_k < length_k, other=0) != 0  # [BLOCK_W, 64]
    bits = tl.sum(allowed.to(tl.int64) << bit[None, :].to(tl.int64), 1)
    tl.store(bits_ptr + b * words + offs_w, bits, mask=offs_w < words)


@triton.jit
def in_window(head, allowed, at_q, at_k):
    """What is left of ``allowed`` by causality and window; ``at_q``, ``at_k`` broadcast to it."""
    if head.diagonal is not None:
        allowed = allowed & (at_k <= at_q + head.diagonal)
    if head.floor is not None:
        allowed = allowed & (at_k >= at_q + head.floor)
    return allowed


@triton.jit
def pairs_allowed(head, allowed, at_q, at_k):
    """What is left of ``allowed`` by the attention mask; ``at_q`` and ``at_k`` broadcast to it."""
    if head.attn_mask is not None:
        STEP: tl.constexpr = head.attn_mask.STEP
        ptrs = head.attn_mask.ptr + at_q.to(tl.int64) * head.attn_mask.stride + at_k
        # The same for STEP keys, so that one load brings them all.
        exists = at_k // STEP * STEP < head.length_k
        exists = exists & (at_q >= 0) & (at_q < head.length_q)
        allowed = allowed & (tl.load(ptrs, mask=exists, other=0) != 0)
    return allowed


# --- dropout --------------------------------------------------------------------------------------


@triton.jit
def keep_mask(head, offs_q, start_k, BLOCK_K: tl.constexpr):
    """[BLOCK_Q, BLOCK_K] bool: the probabilities that dropout keeps (``dropout_keep_mask``).

    One Philox call gives the bytes of 16 keys: those that one thread of a tensor-core tile holds in
    64 columns, so that threads exchange nothing. ``start_k`` is a multiple of BLOCK_K.
    """
    BLOCK_Q: tl.constexpr = offs_q.shape[0]
    GROUPS: tl.constexpr = (BLOCK_K + 63) // 64
    WORDS: tl.constexpr = 4 if BLOCK_K >= 64 else BLOCK_K // 16
    sample = head.b
    if head.dropout.sample_ptr is not None:
        sample = tl.load(head.dropout.sample_ptr + head.b)
    call = (start_k // 64 * 4 + tl.arange(0, 4 * GROUPS)).to(tl.uint32)
    last = (call << 16) | (head.h.to(tl.uint32) << 4) | DROPOUT_STREAM
    zero = tl.zeros([BLOCK_Q, 4 * GROUPS], tl.uint32)
    word0, word1, word2, word3 = philox(
        tl.load(head.dropout.seed_ptr),
        zero + offs_q.to(tl.uint32)[:, None],
        zero + sample.to(tl.uint32),
        zero + (sample >> 32).to(tl.uint32),
        zero + last[None, :],
        DROPOUT_ROUNDS,
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
    return tl.reshape(byte.to(tl.int32) >= head.dropout.threshold, [BLOCK_Q, BLOCK_K])


# --- scores ---------------------------------------------------------------------------------------


@triton.jit
def masked_scores(q, k, offs_q, offs_k, mask_k, head, TILE: tl.constexpr):
    """[BLOCK_Q, BLOCK_K] raw scores, -inf where a query may not see a key."""
    s = tl.zeros([q.shape[0], k.shape[0]], tl.float32)
    s = multiply(q, tl.trans(k), s, TILE.PRECISION)
    allowed = in_window(head, mask_k[None, :], offs_q[:, None], offs_k[None, :])
    allowed = pairs_allowed(head, allowed, offs_q[:, None], offs_k[None, :])
    return tl.where(allowed, s, float("-inf"))
