"""The best match of every row of two packed batches, from similarities that exist in tiles only.

    s_ij = q_i . k_j / (|q_i| |k_j|)        rows i and j of one pair of sets
    score_i = max_j s_ij    score_j = max_i s_ij

A program takes a tile of queries of one pair and goes through the pair's keys. It keeps the best
match of its queries in registers, and writes for each key the best match among its queries. If the
longest set of queries takes several tiles, a second kernel finds the best of these, in the order of
the tiles. If similarities are equal the first row wins, so results repeat bit for bit.

Legend: Nq, Nk rows of queries and of keys · E row width · tile: of BLOCK_Q queries of one pair
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import triton
import triton.language as tl

from fastplm.triton_kernels._launch import (
    arch_of,
    cdiv,
    dot,
    launch,
    nearest_arch,
    next_power_of_2,
    upcast_dot,
)

# Kind of call -> arch -> (BLOCK_Q, BLOCK_K, BLOCK_E, num_warps, num_stages). "uneven": the width is
# no multiple of 16, so elements are loaded one at a time, which takes more registers.
# None was measured on a device yet: the compile tests, which allow no spills, chose them.
_TABLE = {
    "long": {
        80: (128, 128, 32, 8, 3),
        86: (64, 64, 32, 8, 3),
        90: (128, 128, 64, 8, 3),
        100: (64, 64, 32, 8, 3),
    },
    "short": {
        80: (64, 64, 64, 4, 3),
        86: (64, 64, 32, 8, 3),
        90: (64, 64, 64, 4, 3),
        100: (64, 64, 32, 8, 3),
    },
    "uneven": {80: (64, 64, 32, 8, 3)},
    "fp32": {80: (64, 32, 32, 8, 2), 100: (32, 32, 32, 4, 2)},
}
# Sets of at most so many rows are short.
_SHORT = 64
_BLOCK_N = 256  # keys of a program that compares tiles


@triton.jit
def _largest(s, AXIS: tl.constexpr):
    """The largest along an axis and the first place of it; a NaN is larger than all."""
    is_nan = s != s
    best = tl.max(tl.where(is_nan, float("-inf"), s), AXIS)
    offs = tl.expand_dims(tl.arange(0, s.shape[AXIS]), 1 - AXIS)
    # One reduction finds the place and whether there is a NaN: its places come before all others.
    many: tl.constexpr = s.shape[AXIS]
    found = s == tl.expand_dims(best, AXIS)
    at = tl.min(tl.where(is_nan, offs - many, tl.where(found, offs, many)), AXIS)
    return tl.where(at < 0, float("nan"), best), tl.where(at < 0, at + many, at)


@triton.jit
def _later_wins(best, other):
    """Whether ``other``, which comes later, is the larger one; NaN is larger than all."""
    return (other > best) | ((other != other) & (best == best))


@triton.jit(do_not_specialize=["num_keys", "tiles_q"])
def _maxsim_fwd_kernel(
    # pointers
    q_ptr,
    k_ptr,
    scale_q_ptr,
    scale_k_ptr,
    cu_q_ptr,
    cu_k_ptr,
    score_ptr,
    index_ptr,
    tile_score_ptr,
    tile_index_ptr,
    # sizes
    num_keys,
    tiles_q,
    width,
    # strides
    stride_qn,
    stride_kn,
    # constexprs
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_E: tl.constexpr,
    NORMALIZE: tl.constexpr,
    UPCAST: tl.constexpr,
):
    pair, tile = tl.program_id(0) // tiles_q, tl.program_id(0) % tiles_q
    first_q, end_q = tl.load(cu_q_ptr + pair).to(tl.int64), tl.load(cu_q_ptr + pair + 1)
    first_k, end_k = tl.load(cu_k_ptr + pair).to(tl.int64), tl.load(cu_k_ptr + pair + 1)
    length_k = (end_k - first_k).to(tl.int32)
    row_q = first_q + tile * BLOCK_Q + tl.arange(0, BLOCK_Q)  # [BLOCK_Q]
    mask_q = row_q < end_q
    if (first_q + tile * BLOCK_Q >= end_q) | (length_k == 0):
        return
    if NORMALIZE:
        scale_q = tl.load(scale_q_ptr + row_q, mask=mask_q, other=0.0)
    # 64 bits for the corner of a tile, 32 for the way inside.
    tile_q_ptr = q_ptr + (first_q + tile * BLOCK_Q) * stride_qn
    best = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    place = tl.zeros([BLOCK_Q], tl.int32)
    for start in range(0, length_k, BLOCK_K):
        row_k = first_k + start + tl.arange(0, BLOCK_K)  # [BLOCK_K]
        mask_k = row_k < end_k
        tile_k_ptr = k_ptr + (first_k + start) * stride_kn
        s = tl.zeros([BLOCK_Q, BLOCK_K], tl.float32)
        for first_e in range(0, width, BLOCK_E):
            offs_e = first_e + tl.arange(0, BLOCK_E)
            mask_e = offs_e < width
            ptrs = tile_q_ptr + tl.arange(0, BLOCK_Q)[:, None] * stride_qn + offs_e[None, :]
            q = tl.load(ptrs, mask=mask_q[:, None] & mask_e[None, :], other=0.0)
            ptrs = tile_k_ptr + tl.arange(0, BLOCK_K)[:, None] * stride_kn + offs_e[None, :]
            k = tl.load(ptrs, mask=mask_k[:, None] & mask_e[None, :], other=0.0)
            s = dot(q, tl.trans(k), s, UPCAST)  # [BLOCK_Q, BLOCK_K]
        if NORMALIZE:
            scale_k = tl.load(scale_k_ptr + row_k, mask=mask_k, other=0.0)
            s = s * scale_q[:, None] * scale_k[None, :]
        here, at = _largest(tl.where(mask_k[None, :], s, float("-inf")), 1)  # [BLOCK_Q]
        later = _later_wins(best, here)
        best, place = tl.where(later, here, best), tl.where(later, start + at, place)
        here, at = _largest(tl.where(mask_q[:, None], s, float("-inf")), 0)  # [BLOCK_K]
        offs = tile * num_keys.to(tl.int64) + row_k
        tl.store(tile_score_ptr + offs, here, mask=mask_k)
        tl.store(tile_index_ptr + offs, first_q + tile * BLOCK_Q + at, mask=mask_k)
    tl.store(score_ptr + row_q, best, mask=mask_q)
    tl.store(index_ptr + row_q, first_k + place, mask=mask_q)


@triton.jit(do_not_specialize=["num_keys", "tiles_k"])
def _maxsim_keys_kernel(
    # pointers
    cu_q_ptr,
    cu_k_ptr,
    tile_score_ptr,
    tile_index_ptr,
    score_ptr,
    index_ptr,
    # sizes
    num_keys,
    tiles_k,
    # constexprs
    BLOCK_Q: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    pair, part = tl.program_id(0) // tiles_k, tl.program_id(0) % tiles_k
    length_q = tl.load(cu_q_ptr + pair + 1) - tl.load(cu_q_ptr + pair)
    first_k, end_k = tl.load(cu_k_ptr + pair).to(tl.int64), tl.load(cu_k_ptr + pair + 1)
    row_k = first_k + part * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    mask = (row_k < end_k) & (length_q > 0)
    best = tl.full([BLOCK_N], float("-inf"), tl.float32)
    place = tl.full([BLOCK_N], -1, tl.int64)
    for tile in range(0, tl.cdiv(length_q, BLOCK_Q)):
        offs = tile * num_keys.to(tl.int64) + row_k
        here = tl.load(tile_score_ptr + offs, mask=mask, other=float("-inf"))
        at = tl.load(tile_index_ptr + offs, mask=mask, other=-1)
        later = _later_wins(best, here)
        best, place = tl.where(later, here, best), tl.where(later, at, place)
    tl.store(score_ptr + row_k, best, mask=mask)
    tl.store(index_ptr + row_k, place, mask=mask)


def maxsim_fwd(
    query: torch.Tensor,
    key: torch.Tensor,
    scale_q: torch.Tensor | None,
    scale_k: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    score: torch.Tensor,
    index: torch.Tensor,
) -> None:
    """Launch the forward.

    Args:
        scale_q, scale_k: fp32 [Nq] and [Nk], factors of the similarities, or None.
        score, index: fp32 and int64 [Nq + Nk], written where a row has a match.
    """
    (queries, width), keys, device = query.shape, key.shape[0], query.device
    pairs = cu_seqlens_q.shape[0] - 1
    kind = "short" if max(max_seqlen_q, max_seqlen_k) <= _SHORT else "long"
    if query.element_size() == 4:
        kind = "fp32"
    elif width % 16:
        kind = "uneven"
    config = _TABLE[kind][nearest_arch(arch_of(device), tuple(_TABLE[kind]))]
    block_q, block_k, block_e, warps, stages = config
    tiles_q = cdiv(max_seqlen_q, block_q)
    several = tiles_q > 1
    tile_score, tile_index = score[queries:], index[queries:]
    if several:
        tile_score, tile_index = score.new_empty(tiles_q, keys), index.new_empty(tiles_q, keys)
    launch(
        _maxsim_fwd_kernel,
        (pairs * tiles_q,),
        device,
        q_ptr=query,
        k_ptr=key,
        scale_q_ptr=scale_q,
        scale_k_ptr=scale_k,
        cu_q_ptr=cu_seqlens_q,
        cu_k_ptr=cu_seqlens_k,
        score_ptr=score,
        index_ptr=index,
        tile_score_ptr=tile_score,
        tile_index_ptr=tile_index,
        num_keys=keys,
        tiles_q=tiles_q,
        width=width,
        stride_qn=query.stride(0),
        stride_kn=key.stride(0),
        BLOCK_Q=block_q,
        BLOCK_K=block_k,
        BLOCK_E=min(block_e, max(16, next_power_of_2(width))),
        NORMALIZE=scale_q is not None,
        UPCAST=upcast_dot(query.dtype),
        num_warps=warps,
        num_stages=stages,
    )
    if several:
        tiles_k = cdiv(max_seqlen_k, _BLOCK_N)
        launch(
            _maxsim_keys_kernel,
            (pairs * tiles_k,),
            device,
            cu_q_ptr=cu_seqlens_q,
            cu_k_ptr=cu_seqlens_k,
            tile_score_ptr=tile_score,
            tile_index_ptr=tile_index,
            score_ptr=score[queries:],
            index_ptr=index[queries:],
            num_keys=keys,
            tiles_k=tiles_k,
            BLOCK_Q=block_q,
            BLOCK_N=_BLOCK_N,
            num_warps=4,
        )


def compile_cases() -> Iterator[tuple[str, Callable[[], object]]]:
    """Every shipped configuration, as a label and a function that launches it (on meta tensors)."""
    cases = (
        # width, longest set, normalize, slow
        (768, 512, True, False),
        (384, 64, True, False),
        (40, 512, False, True),
        (384, 64, False, True),
        (16, 64, True, True),
    )
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        for *case, slow in cases:
            width, longest, normalize = case
            label = f"E={width} {'short' if longest <= _SHORT else 'long'} sets"
            label = f"{str(dtype)[6:]} {label} {'cosine' if normalize else 'dot'}"
            yield f"{'slow: ' if slow else ''}{label}", lambda d=dtype, c=case: _case(d, *c)


def _case(dtype: torch.dtype, width: int, longest: int, normalize: bool) -> None:
    query = torch.empty(4096, width, dtype=dtype, device="meta")
    ends = torch.empty(33, dtype=torch.int32, device="meta")
    scale = torch.empty(4096, device="meta") if normalize else None
    score = torch.empty(8192, device="meta")
    maxsim_fwd(query, query, scale, scale, ends, ends, longest, longest, score, score.long())
