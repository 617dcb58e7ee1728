"""Query and key rotated by their positions, or back, in one launch.

    (a, b) -> (a c - b s, b c + a s)        a, b the elements i and i + D/2 of a head

Source: Su et al. 2021 (arXiv 2104.09864), equation 34.

Legend: B batch · T length · H heads of query, G of key · D head dim; c, s cosine and sine.

A program owns some positions and a group of the heads of one of the two tensors, for which it
loads cosine and sine once. Results may lie where the heads do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache

import torch
import triton
import triton.language as tl

from fastplm.triton_kernels._launch import (
    INTERPRETED,
    Fixed,
    cast,
    cdiv,
    launch,
    next_power_of_2,
)

# The loads of so many heads are in flight together.
_GROUP = 4
_WARPS = 4
# A thread has 8 elements of each half of a head: 16 bytes of 16 bits.
_ELEMENTS = _WARPS * 32 * 8


@triton.jit
def _rotate_heads(
    x_ptr,
    y_ptr,
    c,
    s,
    first,
    offs_x,
    offs_y,
    exists,
    stride_xh,
    stride_yh,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_D: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Rotate the heads from ``first`` on, by c and s [BLOCK_T, BLOCK_D]."""
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    offs_d = tl.arange(0, BLOCK_D)
    for i in tl.static_range(GROUP):
        head = first + i
        mask = exists & (head < HEADS)
        xs = x_ptr + offs_x + head * stride_xh + offs_d[None, :]
        ys = y_ptr + offs_y + head * stride_yh + offs_d[None, :]
        a = tl.load(xs, mask=mask, other=0.0).to(tl.float32)  # [BLOCK_T, BLOCK_D]
        b = tl.load(xs + HALF, mask=mask, other=0.0).to(tl.float32)
        tl.store(ys, cast(a * c - b * s, dtype, UPCAST), mask=mask)
        tl.store(ys + HALF, cast(b * c + a * s, dtype, UPCAST), mask=mask)


@triton.jit(do_not_specialize=["seqlen"])
def _rotary_kernel(
    # pointers
    q_ptr,
    k_ptr,
    c_ptr,
    s_ptr,
    out_q_ptr,
    out_k_ptr,
    # sizes
    seqlen,
    # strides
    stride_qb,
    stride_qh,
    stride_qt,
    stride_kb,
    stride_kh,
    stride_kt,
    stride_cb,
    stride_ct,
    stride_sb,
    stride_st,
    stride_oqb,
    stride_oqh,
    stride_oqt,
    stride_okb,
    stride_okh,
    stride_okt,
    # constexprs
    HEADS_Q: tl.constexpr,
    HEADS_K: tl.constexpr,
    GROUP: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    INVERSE: tl.constexpr,
    UPCAST: tl.constexpr,
):
    groups_q: tl.constexpr = (HEADS_Q + GROUP - 1) // GROUP
    groups: tl.constexpr = groups_q + (HEADS_K + GROUP - 1) // GROUP
    tiles = tl.cdiv(seqlen, BLOCK_T)
    group, tile = tl.program_id(0) % groups, tl.program_id(0) // groups
    b, t = (tile // tiles).to(tl.int64), (tile % tiles).to(tl.int64) * BLOCK_T
    offs_t = t + tl.arange(0, BLOCK_T)
    offs_d = tl.arange(0, BLOCK_D)
    exists = (offs_t < seqlen)[:, None] & (offs_d < HALF)[None, :]

    cs = c_ptr + b * stride_cb + offs_t[:, None] * stride_ct + offs_d[None, :]
    ss = s_ptr + b * stride_sb + offs_t[:, None] * stride_st + offs_d[None, :]
    c = tl.load(cs, mask=exists, other=0.0).to(tl.float32)  # [BLOCK_T, BLOCK_D]
    s = tl.load(ss, mask=exists, other=0.0).to(tl.float32)
    if INVERSE:
        s = -s
    if group < groups_q:
        _rotate_heads(
            q_ptr,
            out_q_ptr,
            c,
            s,
            (group * GROUP).to(tl.int64),
            b * stride_qb + offs_t[:, None] * stride_qt,
            b * stride_oqb + offs_t[:, None] * stride_oqt,
            exists,
            stride_qh,
            stride_oqh,
            HEADS_Q,
            GROUP,
            HALF,
            BLOCK_D,
            UPCAST,
        )
    else:
        _rotate_heads(
            k_ptr,
            out_k_ptr,
            c,
            s,
            ((group - groups_q) * GROUP).to(tl.int64),
            b * stride_kb + offs_t[:, None] * stride_kt,
            b * stride_okb + offs_t[:, None] * stride_okt,
            exists,
            stride_kh,
            stride_okh,
            HEADS_K,
            GROUP,
            HALF,
            BLOCK_D,
            UPCAST,
        )


@lru_cache(maxsize=1024)
def _fixed(heads_q: int, heads_k: int, dim: int, dtype: torch.dtype, inverse: bool) -> Fixed:
    """What the launches for heads of one kind share."""
    block = max(16, next_power_of_2(dim // 2))
    return Fixed(
        HEADS_Q=heads_q,
        HEADS_K=heads_k,
        GROUP=_GROUP,
        HALF=dim // 2,
        BLOCK_T=max(1, _ELEMENTS // block),
        BLOCK_D=block,
        INVERSE=inverse,
        UPCAST=INTERPRETED and dtype is torch.bfloat16,
        num_warps=_WARPS,
    )


def rotary(
    query: torch.Tensor,
    key: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    inverse: bool,
    out_query: torch.Tensor,
    out_key: torch.Tensor,
) -> None:
    """Launch for query [B, H, T, D], key [B, G, T, D], cos and sin [B or 1, T, D]."""
    batch, heads_q, length, dim = query.shape
    heads_k = key.shape[1]
    fixed = _fixed(heads_q, heads_k, dim, query.dtype, inverse)
    groups = cdiv(heads_q, _GROUP) + cdiv(heads_k, _GROUP)
    strides = {}
    for name, one in dict(q=query, k=key, oq=out_query, ok=out_key).items():
        of_batch, of_head, of_row, _ = one.stride()
        strides |= {f"stride_{name}b": of_batch, f"stride_{name}h": of_head}
        strides[f"stride_{name}t"] = of_row
    one_for_all = cos.shape[0] == 1
    launch(
        _rotary_kernel,
        (batch * cdiv(length, fixed["BLOCK_T"]) * groups,),
        query.device,
        fixed=fixed,
        q_ptr=query,
        k_ptr=key,
        c_ptr=cos,
        s_ptr=sin,
        out_q_ptr=out_query,
        out_k_ptr=out_key,
        seqlen=length,
        stride_cb=0 if one_for_all else cos.stride(0),
        stride_ct=cos.stride(1),
        stride_sb=0 if one_for_all else sin.stride(0),
        stride_st=sin.stride(1),
        **strides,
    )


def compile_cases() -> Iterator[tuple[str, Callable[[], object]]]:
    """Every shipped configuration, as a label and a function that launches it (on meta tensors)."""
    cases = (
        # heads, head dim, dtype of cos and sin, slow
        (12, 64, torch.float32, False),
        (16, 128, None, False),
        (5, 40, torch.float32, True),
        (12, 96, None, True),
    )
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        for heads, dim, of_angles, slow in cases:
            label = f"{'slow: ' if slow else ''}{str(dtype)[6:]} H={heads} D={dim}"
            yield label, lambda case=(dtype, heads, dim, of_angles or dtype): _case(*case)


def _case(dtype: torch.dtype, heads: int, dim: int, of_angles: torch.dtype) -> None:
    product = torch.empty(1, 4096, 3, heads, dim, dtype=dtype, device="meta")
    query, key, _ = (one.transpose(1, 2) for one in product.unbind(2))
    angles = torch.empty(1, 4096, dim, dtype=of_angles, device="meta")
    outs = [one.new_empty(1, 4096, heads, dim).transpose(1, 2) for one in (query, key)]
    rotary(query, key, angles, angles, False, *outs)
    both = product[:, :, :2].flatten(2, 3).transpose(1, 2)
    rotary(both, both[:, :0], angles, angles, True, both, both[:, :0])
