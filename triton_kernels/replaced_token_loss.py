"""Replaced-token detection: dot product, sigmoid and binary cross-entropy of each row in one pass.

    z = h . w + b        loss = softplus(x)             x = -z where the token is replaced, else z
    s = sigmoid(x) * (-1 where replaced), the slope dloss/dz
    dz = g s             dh = dz w     dw = sum dz h    db = sum dz     g the upstream gradient

Source: Clark et al. 2020 (ELECTRA, arXiv 2003.10555), section 2, L_Disc.

Legend: N rows · E row width · R row groups; h a tile of rows, w the weight, b the bias.

dh needs no h, as it is of rank one. With "mean" and "sum" g is one number, so that dw is g times
the sum of s h, which the forward takes while the rows are in registers: h is read once, and the
backward only writes dh. With "none", or where a row is too wide for the registers, the backward
reads h again.

One program owns a group of rows. It writes its sums into partials [., R], which a second kernel
adds up: no atomics, and since groups follow from the shapes alone, the bits repeat. A row that does
not count is loaded as 0 and its slope is 0, so that even a NaN in it cannot reach a sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from fastplm.triton_kernels._launch import cdiv, launch, next_power_of_2

# A row gets as few warps as can hold it (one up to 2 KB), because each of its warps computes the
# logit's last sums, sigmoid and loss. A row has up to four parts, each of 16 bytes for each thread,
# so its width need not be a power of two (768 = 3 x 256).
_BYTES_PER_WARP = 32 * 16
_MAX_PARTS = 4
_MAX_WARPS = 8
# The rows of a group are a multiple of this. 32,768 rows are then 1024 groups: 7 to 8 warps for
# each SM of an H200, with 6 KB (768 columns of bf16) in flight for each.
_ROWS = 16
# One program adds up all partials of some columns, in one tile.
_MAX_GROUPS = 1024


class _Tile(NamedTuple):
    """Rows in a tile, columns of a part, parts, warps."""

    rows: int
    part: int
    parts: int
    warps: int


@lru_cache
def _tile(width: int, stride: int, itemsize: int) -> _Tile:
    """The tile for rows of ``width`` elements that lie ``stride`` elements apart."""
    needed = cdiv(width * itemsize, _MAX_PARTS * _BYTES_PER_WARP)
    warps = min(_MAX_WARPS, next_power_of_2(needed))
    if needed == 4:
        warps = 8  # with four parts of four warps the loop spills on sm_86
    part = min(warps * _BYTES_PER_WARP // itemsize, max(16, next_power_of_2(width)))
    parts = min(_MAX_PARTS, cdiv(width, part))
    block_n = (8, 4, 4, 2)[parts - 1]
    if warps >= 4:
        block_n //= 2  # a whole tile of such rows spills on sm_90
    if width * itemsize % 16 or stride * itemsize % 16:
        block_n //= 2  # elements are loaded one by one, each into its own register
    return _Tile(block_n, part, parts, warps)


def _groups(rows: int) -> tuple[int, int]:
    """(number of groups, rows of each); without rows there is one group, which finds none."""
    blocks = max(1, cdiv(rows, _ROWS))
    blocks_per_group = cdiv(blocks, _MAX_GROUPS)
    return cdiv(blocks, blocks_per_group), blocks_per_group * _ROWS


def sums_weight_gradient(input: torch.Tensor) -> bool:
    """Whether rows of this width stay in registers, so that the forward can sum s h."""
    return input.shape[1] * input.element_size() <= _MAX_WARPS * _MAX_PARTS * _BYTES_PER_WARP


@triton.jit
def _softplus_and_sigmoid(x):
    """``log(1 + exp(x))`` and its derivative, to full relative precision on both sides."""
    # log(1 + e) = 2 atanh(t) with t = e / (2 + e) <= 1/3: this many terms of the series are exact
    # in fp32, where the hardware's logarithm of a number near 1 is not.
    e = tl.exp(-tl.abs(x))
    t = e / (2.0 + e)
    s = t * t
    series = 1.0 / 13 + s * (1.0 / 15)
    series = 1.0 / 11 + s * series
    series = 1.0 / 9 + s * series
    series = 1.0 / 7 + s * series
    series = 1.0 / 5 + s * series
    series = 1.0 / 3 + s * series
    softplus = tl.maximum(x, 0.0) + 2.0 * t * (1.0 + s * series)
    return softplus, tl.where(x >= 0.0, 1.0, e) / (1.0 + e)


@triton.jit
def _counted_rows(mask_ptr, offs_n, exists, HAS_MASK: tl.constexpr):
    """[BLOCK_N] bool: the rows that exist and that count."""
    counted = exists
    if HAS_MASK:
        counted = counted & (tl.load(mask_ptr + offs_n, mask=exists, other=0) != 0)
    return counted


@triton.jit
def _load_rows(
    h_ptr,
    offs_n,
    counted,
    start_e,
    stride_hn,
    WIDTH: tl.constexpr,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
):
    """A tile of rows from column ``start_e`` on: PARTS of [BLOCK_N, PART]."""
    h = ()
    for i in tl.static_range(PARTS):
        offs_e = start_e + i * PART + tl.arange(0, PART)
        ptrs = h_ptr + offs_n[:, None] * stride_hn + offs_e[None, :]
        mask = counted[:, None] & (offs_e < WIDTH)[None, :]
        h = h + (tl.load(ptrs, mask=mask, other=0.0),)
    return h


@triton.jit
def _load_weight(w_ptr, start_e, WIDTH: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr):
    """PARTS of fp32 [PART]."""
    w = ()
    for i in tl.static_range(PARTS):
        offs_e = start_e + i * PART + tl.arange(0, PART)
        w = w + (tl.load(w_ptr + offs_e, mask=offs_e < WIDTH, other=0.0).to(tl.float32),)
    return w


@triton.jit
def _dot(h, w, PARTS: tl.constexpr):
    """[BLOCK_N] of rows in PARTS with w."""
    acc = h[0].to(tl.float32) * w[0][None, :]  # [BLOCK_N, PART]
    for i in tl.static_range(1, PARTS):
        acc += h[i].to(tl.float32) * w[i][None, :]
    return tl.sum(acc, 1)


@triton.jit
def _add_rows(dw, dz, h, PARTS: tl.constexpr):
    """dw + sum dz h, PARTS of [PART]."""
    total = ()
    for i in tl.static_range(PARTS):
        total = total + (dw[i] + tl.sum(dz[:, None] * h[i].to(tl.float32), 0),)
    return total


# The ids of rows are loaded four at a time where ``num_rows`` is a multiple of 16.
@triton.jit(do_not_specialize=["num_groups"])
def _replaced_token_loss_fwd_kernel(
    # pointers
    h_ptr,
    w_ptr,
    b_ptr,
    replaced_ptr,
    original_ptr,
    mask_ptr,
    loss_ptr,
    slope_ptr,
    partial_ptr,
    partial_counts_ptr,
    partial_dw_ptr,
    # sizes
    num_rows,
    num_groups,
    rows_per_group,
    # strides
    stride_hn,
    # constexprs
    WIDTH: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_IDS: tl.constexpr,
    HAS_MASK: tl.constexpr,
    ROW_LOSSES: tl.constexpr,
    COUNTS: tl.constexpr,
    NEED_DW: tl.constexpr,
):
    group = tl.program_id(0)
    w = _load_weight(w_ptr, 0, WIDTH, PART, PARTS)
    b = 0.0
    if HAS_BIAS:
        b = tl.load(b_ptr).to(tl.float32)
    dw = ()
    for _ in tl.static_range(PARTS):
        dw = dw + (tl.zeros([PART], tl.float32),)
    db = 0.0
    losses = 0.0
    total = 0
    found = 0
    flagged = 0
    positives = 0
    correct = 0

    first = group.to(tl.int64) * rows_per_group
    rows = tl.minimum(rows_per_group, num_rows - first).to(tl.int32)
    offs_n = first + tl.arange(0, BLOCK_N)
    exists = offs_n < num_rows
    counted = _counted_rows(mask_ptr, offs_n, exists, HAS_MASK)
    h = _load_rows(h_ptr, offs_n, counted, 0, stride_hn, WIDTH, PART, PARTS)
    for start in range(BLOCK_N, rows + BLOCK_N, BLOCK_N):
        # The next tile is loaded while this one is computed.
        next_offs_n = offs_n + BLOCK_N
        # A vector is compared: Triton 3.9's interpreter takes no scalar comparison in a mask.
        next_exists = (next_offs_n < num_rows) & (start + tl.zeros([BLOCK_N], tl.int32) < rows)
        next_counted = _counted_rows(mask_ptr, next_offs_n, next_exists, HAS_MASK)
        next_h = _load_rows(h_ptr, next_offs_n, next_counted, 0, stride_hn, WIDTH, PART, PARTS)
        token = tl.load(replaced_ptr + offs_n, mask=exists, other=0)
        if HAS_IDS:
            replaced = token != tl.load(original_ptr + offs_n, mask=exists, other=0)
        else:
            replaced = token != 0

        z = _dot(h, w, PARTS)
        for start_e in range(PART * PARTS, WIDTH, PART * PARTS):
            rest = _load_rows(h_ptr, offs_n, counted, start_e, stride_hn, WIDTH, PART, PARTS)
            z += _dot(rest, _load_weight(w_ptr, start_e, WIDTH, PART, PARTS), PARTS)
        z += b
        loss, slope = _softplus_and_sigmoid(tl.where(replaced, -z, z))
        loss = tl.where(counted, loss, 0.0)
        slope = tl.where(counted, tl.where(replaced, -slope, slope), 0.0)
        tl.store(slope_ptr + offs_n, slope, mask=exists)
        if ROW_LOSSES:
            tl.store(loss_ptr + offs_n, loss, mask=exists)
        if NEED_DW:
            dw = _add_rows(dw, slope, h, PARTS)
        db += tl.sum(slope, 0)
        losses += tl.sum(loss, 0)
        total += tl.sum(counted.to(tl.int32), 0)
        if COUNTS:
            is_replaced = counted & replaced
            is_flagged = counted & (z > 0.0)
            is_correct = counted & (is_replaced == is_flagged)
            found += tl.sum((is_replaced & is_flagged).to(tl.int32), 0)
            flagged += tl.sum(is_flagged.to(tl.int32), 0)
            positives += tl.sum(is_replaced.to(tl.int32), 0)
            correct += tl.sum(is_correct.to(tl.int32), 0)
        offs_n, exists, counted, h = next_offs_n, next_exists, next_counted, next_h

    tl.store(partial_ptr + group, db)
    tl.store(partial_ptr + num_groups + group, losses)
    tl.store(partial_counts_ptr + group, total)
    if COUNTS:
        tl.store(partial_counts_ptr + num_groups + group, found)
        tl.store(partial_counts_ptr + 2 * num_groups + group, flagged)
        tl.store(partial_counts_ptr + 3 * num_groups + group, positives)
        tl.store(partial_counts_ptr + 4 * num_groups + group, correct)
    if NEED_DW:
        for i in tl.static_range(PARTS):
            offs_e = i * PART + tl.arange(0, PART)
            ptrs = partial_dw_ptr + group.to(tl.int64) * WIDTH + offs_e
            tl.store(ptrs, dw[i], mask=offs_e < WIDTH)


@triton.jit
def _replaced_token_loss_bwd_kernel(
    # pointers
    dloss_ptr,
    denominator_ptr,
    slope_ptr,
    h_ptr,
    w_ptr,
    mask_ptr,
    sum_dw_ptr,
    sum_db_ptr,
    dh_ptr,
    dw_ptr,
    db_ptr,
    partial_ptr,
    partial_dw_ptr,
    # sizes
    num_rows,
    rows_per_group,
    # strides
    stride_dloss,
    stride_hn,
    # constexprs
    WIDTH: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
    HAS_MASK: tl.constexpr,
    COMMON: tl.constexpr,
    HAS_SUMS: tl.constexpr,
    NEED_DH: tl.constexpr,
    NEED_DW: tl.constexpr,
):
    tile_e, group = tl.program_id(0), tl.program_id(1)
    start_e = tile_e * (PART * PARTS)
    scale = 1.0
    if COMMON:
        scale = tl.div_rn(tl.load(dloss_ptr), tl.load(denominator_ptr))
    if HAS_SUMS:
        if group == 0:
            if NEED_DW:
                for i in tl.static_range(PARTS):
                    offs_e = start_e + i * PART + tl.arange(0, PART)
                    dw_sum = tl.load(sum_dw_ptr + offs_e, mask=offs_e < WIDTH, other=0.0)
                    dw_sum = (scale * dw_sum).to(dw_ptr.dtype.element_ty)
                    tl.store(dw_ptr + offs_e, dw_sum, mask=offs_e < WIDTH)
            if tile_e == 0:
                db_sum = scale * tl.load(sum_db_ptr)
                tl.store(db_ptr, db_sum.to(db_ptr.dtype.element_ty))

    w = _load_weight(w_ptr, start_e, WIDTH, PART, PARTS)
    dw = ()
    for _ in tl.static_range(PARTS):
        dw = dw + (tl.zeros([PART], tl.float32),)
    db = 0.0
    first = group.to(tl.int64) * rows_per_group
    rows = tl.minimum(rows_per_group, num_rows - first).to(tl.int32)
    for start in range(0, rows, BLOCK_N):
        offs_n = first + start + tl.arange(0, BLOCK_N)
        exists = offs_n < num_rows
        counted = _counted_rows(mask_ptr, offs_n, exists, HAS_MASK)
        dz = scale * tl.load(slope_ptr + offs_n, mask=counted, other=0.0)  # [BLOCK_N]
        if not COMMON:
            dz *= tl.load(dloss_ptr + offs_n * stride_dloss, mask=counted, other=0.0)
        if not HAS_SUMS:
            db += tl.sum(dz, 0)
            if NEED_DW:
                h = _load_rows(h_ptr, offs_n, counted, start_e, stride_hn, WIDTH, PART, PARTS)
                dw = _add_rows(dw, dz, h, PARTS)
        if NEED_DH:
            for i in tl.static_range(PARTS):
                offs_e = start_e + i * PART + tl.arange(0, PART)
                # A row that does not count is written 0 even if the weight is not finite.
                dh = tl.where(counted[:, None], dz[:, None] * w[i][None, :], 0.0)
                dh = dh.to(dh_ptr.dtype.element_ty)  # [BLOCK_N, PART]
                ptrs = dh_ptr + offs_n[:, None] * WIDTH + offs_e[None, :]
                tl.store(ptrs, dh, mask=exists[:, None] & (offs_e < WIDTH)[None, :])

    if not HAS_SUMS:
        if NEED_DW:
            for i in tl.static_range(PARTS):
                offs_e = start_e + i * PART + tl.arange(0, PART)
                ptrs = partial_dw_ptr + group.to(tl.int64) * WIDTH + offs_e
                tl.store(ptrs, dw[i], mask=offs_e < WIDTH)
        if tile_e == 0:
            tl.store(partial_ptr + group, db)


@triton.jit
def _replaced_token_loss_sum_kernel(
    # pointers
    partial_ptr,
    partial_counts_ptr,
    partial_dw_ptr,
    normalizer_ptr,
    loss_ptr,
    denominator_ptr,
    counts_ptr,
    dw_ptr,
    db_ptr,
    # sizes
    num_groups,
    # constexprs
    NUM_DW: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_E: tl.constexpr,
    NEED_LOSS: tl.constexpr,
    COUNTS: tl.constexpr,
    IS_MEAN: tl.constexpr,
    HAS_NORMALIZER: tl.constexpr,
):
    tile_e = tl.program_id(0)
    offs_r = tl.arange(0, BLOCK_R)
    mask_r = offs_r < num_groups
    if tile_e * BLOCK_E < NUM_DW:
        offs_e = tile_e * BLOCK_E + tl.arange(0, BLOCK_E)
        mask_e = offs_e < NUM_DW
        ptrs = partial_dw_ptr + offs_r[:, None].to(tl.int64) * NUM_DW + offs_e[None, :]
        dw = tl.load(ptrs, mask=mask_r[:, None] & mask_e[None, :], other=0.0)  # [BLOCK_R, BLOCK_E]
        tl.store(dw_ptr + offs_e, tl.sum(dw, 0).to(dw_ptr.dtype.element_ty), mask=mask_e)
    else:  # the last program
        db = tl.sum(tl.load(partial_ptr + offs_r, mask=mask_r, other=0.0), 0)
        tl.store(db_ptr, db.to(db_ptr.dtype.element_ty))
        if NEED_LOSS:
            loss = tl.load(partial_ptr + num_groups + offs_r, mask=mask_r, other=0.0)
            denominator = 1.0
            if IS_MEAN:
                if HAS_NORMALIZER:
                    denominator = tl.load(normalizer_ptr)
                else:
                    total = tl.load(partial_counts_ptr + offs_r, mask=mask_r, other=0)
                    denominator = tl.sum(total, 0).to(tl.float32)
                denominator = tl.where(denominator == 0.0, 1.0, denominator)
            tl.store(denominator_ptr, denominator)
            tl.store(loss_ptr, tl.div_rn(tl.sum(loss, 0), denominator))
        if COUNTS:
            for i in tl.static_range(5):
                counts = partial_counts_ptr + i * num_groups + offs_r
                count = tl.load(counts, mask=mask_r, other=0).to(tl.int64)
                # The total is the first of the partials and the last of the counts.
                tl.store(counts_ptr + (i + 4) % 5, tl.sum(count, 0))


def _as_bytes(flags: torch.Tensor) -> torch.Tensor:
    return flags.view(torch.uint8) if flags.dtype is torch.bool else flags


def _mask_arguments(mask: torch.Tensor | None, other: torch.Tensor) -> dict[str, object]:
    # Without a mask the pointer is never read, so it may be that of any tensor.
    return dict(mask_ptr=_as_bytes(other if mask is None else mask), HAS_MASK=mask is not None)


def replaced_token_loss_fwd(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    replaced: torch.Tensor,
    original: torch.Tensor | None,
    mask: torch.Tensor | None,
    normalizer: torch.Tensor | None,
    reduction: str,
    need_counts: bool,
    sum_weight: bool,
) -> tuple[torch.Tensor, ...]:
    """Launch the forward: loss, slope, denominator, sum of s h, sum of s, counts.

    Returns:
        loss fp32 [] or, with "none", [N]; slope fp32 [N]; denominator and sum of s fp32 [], empty
        with "none"; sum of s h fp32 [E], empty without ``sum_weight``; counts int64 [5], empty
        without ``need_counts``.
    """
    rows, width = input.shape
    tile = _tile(width, input.stride(0), input.element_size())
    groups, rows_per_group = _groups(rows)
    reduced = reduction != "none"
    slope = input.new_empty(rows, dtype=torch.float32)
    loss = slope.new_empty(() if reduced else rows)
    denominator = slope.new_empty(() if reduced else 0)
    weight_sum = slope.new_empty(width if sum_weight else 0)
    bias_sum = slope.new_empty(() if reduced else 0)
    counts = replaced.new_empty(5 if need_counts else 0, dtype=torch.int64)
    partial = slope.new_empty(2, groups)
    partial_counts = replaced.new_empty((5 if need_counts else 1, groups), dtype=torch.int32)
    partial_weight = slope.new_empty((groups, width) if sum_weight else 0)
    launch(
        _replaced_token_loss_fwd_kernel,
        (groups,),
        input.device,
        h_ptr=input,
        w_ptr=weight,
        b_ptr=weight if bias is None else bias,
        replaced_ptr=_as_bytes(replaced),
        original_ptr=_as_bytes(replaced if original is None else original),
        loss_ptr=loss,
        slope_ptr=slope,
        partial_ptr=partial,
        partial_counts_ptr=partial_counts,
        partial_dw_ptr=partial_weight,
        num_rows=rows,
        num_groups=groups,
        rows_per_group=rows_per_group,
        stride_hn=input.stride(0),
        WIDTH=width,
        BLOCK_N=tile.rows,
        PART=tile.part,
        PARTS=tile.parts,
        HAS_BIAS=bias is not None,
        HAS_IDS=original is not None,
        ROW_LOSSES=not reduced,
        COUNTS=need_counts,
        NEED_DW=sum_weight,
        num_warps=tile.warps,
        **_mask_arguments(mask, replaced),
    )
    if reduced or need_counts:
        _sum(
            partial,
            partial_weight,
            weight_sum,
            bias_sum if reduced else partial.new_empty(()),
            groups,
            partial_counts_ptr=partial_counts,
            normalizer_ptr=slope if normalizer is None else normalizer.to(torch.float32),
            loss_ptr=loss,
            denominator_ptr=denominator,
            counts_ptr=counts,
            NEED_LOSS=reduced,
            COUNTS=need_counts,
            IS_MEAN=reduction == "mean",
            HAS_NORMALIZER=normalizer is not None,
        )
    return loss, slope, denominator, weight_sum, bias_sum, counts


def replaced_token_loss_bwd(
    grad_loss: torch.Tensor,
    slope: torch.Tensor,
    denominator: torch.Tensor | None,
    weight: torch.Tensor,
    mask: torch.Tensor | None,
    input: torch.Tensor | None,
    weight_sum: torch.Tensor | None,
    bias_sum: torch.Tensor | None,
    need_input: bool,
    need_weight: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Launch the backward: gradients of input [N, E], weight [E], bias []; empty if not needed."""
    rows, width = slope.shape[0], weight.shape[0]
    stride = width if input is None else input.stride(0)
    tile = _tile(width, stride, weight.element_size())
    groups, rows_per_group = _groups(rows)
    common = denominator is not None
    has_sums = common and (weight_sum is not None or not need_weight)
    by_rows = need_input or not has_sums
    grad_input = weight.new_empty((rows, width) if need_input else 0)
    grad_weight = weight.new_empty(width if need_weight else 0)
    grad_bias = weight.new_empty(())
    partial = slope.new_empty(0 if has_sums else groups)
    partial_weight = slope.new_empty((groups, width) if need_weight and not has_sums else 0)
    launch(
        _replaced_token_loss_bwd_kernel,
        # Without rows to go through, one group scales the sums.
        (cdiv(width, tile.part * tile.parts), groups if by_rows else 1),
        slope.device,
        dloss_ptr=grad_loss,
        denominator_ptr=slope if denominator is None else denominator,
        slope_ptr=slope,
        h_ptr=weight if input is None else input,
        w_ptr=weight,
        sum_dw_ptr=slope if weight_sum is None else weight_sum,
        sum_db_ptr=slope if bias_sum is None else bias_sum,
        dh_ptr=grad_input,
        dw_ptr=grad_weight,
        db_ptr=grad_bias,
        partial_ptr=partial,
        partial_dw_ptr=partial_weight,
        num_rows=rows,
        rows_per_group=rows_per_group if by_rows else 0,
        stride_dloss=0 if common else grad_loss.stride(0),
        stride_hn=stride,
        WIDTH=width,
        # Half a tile where rows are read: a whole one spills on sm_100.
        BLOCK_N=tile.rows if has_sums else max(1, tile.rows // 2),
        PART=tile.part,
        PARTS=tile.parts,
        COMMON=common,
        HAS_SUMS=has_sums,
        NEED_DH=need_input,
        NEED_DW=need_weight,
        num_warps=tile.warps,
        **_mask_arguments(mask, slope),
    )
    if not has_sums:
        _sum(
            partial,
            partial_weight,
            grad_weight,
            grad_bias,
            groups,
            partial_counts_ptr=partial,
            normalizer_ptr=partial,
            loss_ptr=partial,
            denominator_ptr=partial,
            counts_ptr=partial,
            NEED_LOSS=False,
            COUNTS=False,
            IS_MEAN=False,
            HAS_NORMALIZER=False,
        )
    return grad_input, grad_weight, grad_bias


def _sum(
    partial: torch.Tensor,
    partial_weight: torch.Tensor,
    weight_out: torch.Tensor,
    bias_out: torch.Tensor,
    groups: int,
    **arguments: object,
) -> None:
    """Add up the partials of all groups."""
    width = weight_out.shape[0]
    few = groups <= 128
    launch(
        _replaced_token_loss_sum_kernel,
        (cdiv(width, 16) + 1,),
        partial.device,
        partial_ptr=partial,
        partial_dw_ptr=partial_weight,
        dw_ptr=weight_out,
        db_ptr=bias_out,
        num_groups=groups,
        NUM_DW=width,
        BLOCK_R=128 if few else _MAX_GROUPS,
        BLOCK_E=16,
        num_warps=4 if few else 16,
        **arguments,
    )


def compile_cases() -> Iterator[tuple[str, Callable[[], object]]]:
    """Every shipped configuration, as a label and a function that launches it (on meta tensors)."""
    cases = (
        # width, mask, ids, reduction, slow
        (768, True, True, "mean", False),
        (40, False, False, "none", False),
        (256, False, False, "sum", True),
        (768, True, False, "none", True),
        (1, True, False, "mean", True),
        (255, True, True, "mean", True),
        (1024, True, True, "mean", True),
        (4096, False, False, "mean", True),
        (10000, True, True, "mean", True),
    )
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        for *case, slow in cases:
            width, has_mask, has_ids, reduction = case
            label = (
                f"{'slow: ' if slow else ''}{str(dtype)[6:]} E={width} {reduction} "
                f"{'mask' if has_mask else 'no mask'} {'ids' if has_ids else 'flags'}"
            )
            yield label, lambda d=dtype, c=case: _case(d, *c)


def _case(dtype: torch.dtype, width: int, has_mask: bool, has_ids: bool, reduction: str) -> None:
    input = torch.empty(4096, width, dtype=dtype, device="meta")
    weight = torch.empty(width, dtype=dtype, device="meta")
    ids = torch.empty(4096, dtype=torch.int64, device="meta")
    flags = ids.bool()
    mask = flags if has_mask else None
    labels = (ids, ids) if has_ids else (flags, None)
    normalizer = torch.empty((), device="meta") if reduction == "mean" and has_ids else None
    can_sum = reduction != "none" and sums_weight_gradient(input)
    for need_counts, sum_weight in ((False, False), (False, can_sum), (True, can_sum)):
        forward = (weight[0], *labels, mask, normalizer, reduction, need_counts, sum_weight)
        loss, slope, denominator, weight_sum, bias_sum, _ = replaced_token_loss_fwd(
            input, weight, *forward
        )
    saved = (None, input, None, None)
    if reduction != "none":
        saved = (denominator, None if can_sum else input, weight_sum if can_sum else None, bias_sum)
    for need in ((True, True), (True, False), (False, True)):
        replaced_token_loss_bwd(loss, slope, saved[0], weight, mask, *saved[1:], *need)
