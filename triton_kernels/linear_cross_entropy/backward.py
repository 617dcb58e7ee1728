"""The backward: dZ, and the gradients of the input, the weight and the bias from it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from fastplm.triton_kernels._launch import cdiv, dot, launch
from fastplm.triton_kernels.linear_cross_entropy import configs, products
from fastplm.triton_kernels.linear_cross_entropy.rows import Part, fill_slots, largest
from fastplm.triton_kernels.linear_cross_entropy.tiles import (
    LOG2E,
    Operands,
    Tile,
    load_bias,
    load_slots,
    load_weight,
    load_x,
    streamed_products,
    tile_ptrs,
)

# A few rows split the vocabulary into at most so many parts, to use more of a device.
MOST_SPLITS = tl.constexpr(16)


class Logits(NamedTuple):
    """Another op's gradient of logits: ``write(dz, chunk_start, columns)`` launches it into a
    buffer, a tile of ``config`` each."""

    write: Callable[[torch.Tensor, int, int], None]
    config: dict[str, int]


class Saved(NamedTuple):
    """Statistics of the forward and g, [N] each, and the numbers needed to use them."""

    target_ptr: Any
    g_ptr: Any
    log_probability_ptr: Any
    max_ptr: Any
    sum_ptr: Any
    label_smoothing: Any
    stride_g: Any


class Row(NamedTuple):
    """What dZ of a tile of rows is made from, see ``row_scalars``."""

    target: Any
    dz_target: Any
    m: Any
    g_over_l: Any
    spread: Any


@triton.jit
def load_row_scalars(saved, rows, used, V, SMOOTHED: tl.constexpr):
    target = tl.load(saved.target_ptr + rows, mask=used, other=-1).to(tl.int32)
    g = tl.load(saved.g_ptr + rows * saved.stride_g, mask=used, other=0.0)
    log_probability = tl.load(saved.log_probability_ptr + rows, mask=used, other=0.0)
    m = tl.load(saved.max_ptr + rows, mask=used, other=0.0)
    l_i = tl.load(saved.sum_ptr + rows, mask=used, other=0.0)
    dz_target, m, g_over_l, spread = row_scalars(
        g, log_probability, m, l_i, used, V, saved.label_smoothing, SMOOTHED
    )
    return Row(target, dz_target, m, g_over_l, spread)


@triton.jit
def row_scalars(g, log_probability, m, l_i, used, V, label_smoothing, SMOOTHED: tl.constexpr):
    """(dz of the target, m, g / l, g s / V) of a tile of rows; an unused slot has dz = 0."""
    # exp2(-inf) is 0 whatever the bias; any finite maximum could overflow to inf * 0.
    m = tl.where(used, m, float("inf"))
    l_i = tl.where(used, l_i, 1.0)
    d_target = tl.exp2(log_probability * LOG2E) - 1.0
    spread = g * 0.0
    if SMOOTHED:
        spread = g * (label_smoothing / V)
        d_target += label_smoothing - label_smoothing / V
    return g * d_target, m, g / l_i, spread


@triton.jit
def grad_logits(z, offs_v, row, SMOOTHED: tl.constexpr, TRANSPOSED: tl.constexpr):
    """g (P - q) of one tile, of rows by columns or, TRANSPOSED, of columns by rows."""
    if TRANSPOSED:
        offs_v, target, dz_target = offs_v[:, None], row.target[None, :], row.dz_target[None, :]
        m, g_over_l, spread = row.m[None, :], row.g_over_l[None, :], row.spread[None, :]
    else:
        offs_v, target = offs_v[None, :], row.target.to(tl.int32)[:, None]
        dz_target, m = row.dz_target[:, None], row.m[:, None]
        g_over_l, spread = row.g_over_l[:, None], row.spread[:, None]
    dz = tl.exp2((z - m) * LOG2E) * g_over_l
    if SMOOTHED:
        dz -= spread
    return tl.where(offs_v == target, dz_target, dz)


@triton.jit
def _linear_cross_entropy_bwd_logits_kernel(
    # pointers
    x_ptr,
    w_ptr,
    bias_ptr,
    target_ptr,
    order_ptr,
    count_ptr,
    g_ptr,
    log_probability_ptr,
    max_ptr,
    sum_ptr,
    dz_ptr,
    # sizes
    V,
    chunk_start,
    label_smoothing,
    # strides
    stride_xn,
    stride_wv,
    stride_dzn,
    stride_g,
    # constexprs
    E: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_E: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SMOOTHED: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """One tile of dZ into a buffer that holds the columns from ``chunk_start`` on."""
    TILE: tl.constexpr = Tile(E, BLOCK_N, BLOCK_V, BLOCK_E, HAS_BIAS, UPCAST)
    operands = Operands(x_ptr, w_ptr, bias_ptr, V, stride_xn, stride_wv)
    saved = Saved(
        target_ptr, g_ptr, log_probability_ptr, max_ptr, sum_ptr, label_smoothing, stride_g
    )
    start_n, start_c = tl.program_id(0) * BLOCK_N, tl.program_id(1) * BLOCK_V
    count = tl.load(count_ptr).to(tl.int32)
    if start_n >= count:
        return
    rows, used = load_slots(order_ptr, count, start_n, BLOCK_N)
    offs_c = start_c + tl.arange(0, BLOCK_V)
    offs_v = chunk_start + offs_c
    z = streamed_products(operands, rows, used, chunk_start + start_c, TILE)
    z += load_bias(operands, offs_v, HAS_BIAS)[None, :]  # [BLOCK_N, BLOCK_V]
    row = load_row_scalars(saved, rows, used, V, SMOOTHED)
    dz = grad_logits(z, offs_v, row, SMOOTHED, False)
    ptrs = tile_ptrs(dz_ptr, start_n, start_c, stride_dzn, BLOCK_N, BLOCK_V)
    tl.store(ptrs, dz.to(dz_ptr.dtype.element_ty), mask=used[:, None])


@triton.jit
def few_rows_splits(count, N, BLOCK_N: tl.constexpr):
    """(splits of the vocabulary, slots of each) of dX of ``count`` rows of N: the fewer rows, the
    more splits, in the memory of one split of all."""
    tiles = tl.maximum(tl.cdiv(count, BLOCK_N), 1)
    return tl.minimum(tl.cdiv(N, BLOCK_N) // tiles, MOST_SPLITS), tiles * BLOCK_N


@triton.jit(do_not_specialize=["N"])
def _linear_cross_entropy_bwd_input_kernel(
    # pointers
    x_ptr,
    w_ptr,
    bias_ptr,
    target_ptr,
    order_ptr,
    count_ptr,
    g_ptr,
    log_probability_ptr,
    max_ptr,
    sum_ptr,
    dz_ptr,
    split_dx_ptr,
    # sizes
    N,
    V,
    chunk_start,
    chunk_columns,
    split_columns,
    label_smoothing,
    # strides
    stride_xn,
    stride_wv,
    stride_dzn,
    stride_g,
    # constexprs
    E: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_E: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SMOOTHED: tl.constexpr,
    DZ_IS_STORED: tl.constexpr,
    FEW_ROWS: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """One tile of dX, by slot and in fp32: the sum over one split of the vocabulary or, if dZ is
    stored, over one chunk more of it.

    ``FEW_ROWS``: few slots are used, so the memory of one split of all slots has many of these.
    """
    TILE: tl.constexpr = Tile(E, BLOCK_N, BLOCK_V, BLOCK_E, HAS_BIAS, UPCAST)
    operands = Operands(x_ptr, w_ptr, bias_ptr, V, stride_xn, stride_wv)
    saved = Saved(
        target_ptr, g_ptr, log_probability_ptr, max_ptr, sum_ptr, label_smoothing, stride_g
    )
    start_n, start_e = tl.program_id(0) * BLOCK_N, tl.program_id(1) * BLOCK_E
    split = tl.program_id(2)
    count = tl.load(count_ptr).to(tl.int32)
    if start_n >= count:
        return
    split_rows = N
    if FEW_ROWS:
        num_splits, split_rows = few_rows_splits(count, N, BLOCK_N)
        split_columns = tl.cdiv(tl.cdiv(V, BLOCK_V), num_splits) * BLOCK_V
        if split >= num_splits:
            return
    rows, used = load_slots(order_ptr, count, start_n, BLOCK_N)
    split_dx_ptr += split.to(tl.int64) * split_rows * E
    mask_dx = used[:, None] & (start_e + tl.arange(0, BLOCK_E) < E)[None, :]
    dx = tl.zeros([BLOCK_N, BLOCK_E], tl.float32)
    if chunk_start > 0:  # the sum over the chunks before
        dx_ptrs = tile_ptrs(split_dx_ptr, start_n, start_e, E, BLOCK_N, BLOCK_E)
        dx = tl.load(dx_ptrs, mask=mask_dx, other=0.0)
    if not DZ_IS_STORED:
        if E <= BLOCK_E:
            x = load_x(operands, rows, used, 0, TILE)  # [BLOCK_N, BLOCK_E]
        row = load_row_scalars(saved, rows, used, V, SMOOTHED)

    first_v = chunk_start + split * split_columns
    end_v = tl.minimum(tl.minimum(first_v + split_columns, chunk_start + chunk_columns), V)
    for start_v in range(first_v, end_v, BLOCK_V):
        w = load_weight(operands, start_v, start_e, TILE)
        if DZ_IS_STORED:
            start_c = start_v - chunk_start
            ptrs = tile_ptrs(dz_ptr, start_n, start_c, stride_dzn, BLOCK_N, BLOCK_V)
            dz = tl.load(ptrs, mask=used[:, None], other=0.0)  # [BLOCK_N, BLOCK_V]
        else:
            offs_v = start_v + tl.arange(0, BLOCK_V)
            if E <= BLOCK_E:
                z = tl.zeros([BLOCK_N, BLOCK_V], tl.float32)
                z = dot(x, tl.trans(w), z, UPCAST)
            else:
                z = streamed_products(operands, rows, used, start_v, TILE)
            z += load_bias(operands, offs_v, HAS_BIAS)[None, :]
            dz = grad_logits(z, offs_v, row, SMOOTHED, False)
        dx = dot(dz.to(w.dtype), w, dx, UPCAST)
    dx_ptrs = tile_ptrs(split_dx_ptr, start_n, start_e, E, BLOCK_N, BLOCK_E)
    tl.store(dx_ptrs, dx, mask=mask_dx)


@triton.jit(do_not_specialize=["N"])
def _linear_cross_entropy_reduce_input_kernel(
    # pointers
    order_ptr,
    count_ptr,
    split_dx_ptr,
    g_ptr,
    dx_ptr,
    # sizes
    N,
    num_splits,
    # strides
    stride_g,
    # constexprs
    E: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_E: tl.constexpr,
    FEW_ROWS_BLOCK_N: tl.constexpr,
):
    """dX from slots to rows, its splits summed in order, times g if given; 0 for ignored rows.

    ``FEW_ROWS_BLOCK_N``: the slots of a tile where ``few_rows_splits`` says the splits, else 0.
    """
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_e = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    exists = (offs_n < N)[:, None] & (offs_e < E)[None, :]
    count = tl.load(count_ptr).to(tl.int32)
    used = exists & (offs_n < count)[:, None]
    dx = tl.zeros([BLOCK_N, BLOCK_E], tl.float32)
    offs_s = offs_n.to(tl.int64)
    split_rows = N
    if FEW_ROWS_BLOCK_N:
        num_splits, split_rows = few_rows_splits(count, N, FEW_ROWS_BLOCK_N)
    for _ in range(0, num_splits):
        ptrs = split_dx_ptr + offs_s[:, None] * E + offs_e[None, :]
        dx += tl.load(ptrs, mask=used, other=0.0)
        offs_s += split_rows
    rows = tl.load(order_ptr + offs_n, mask=offs_n < N, other=0)
    if g_ptr is not None:
        g = tl.load(g_ptr + rows * stride_g, mask=offs_n < N, other=0.0)
        dx = tl.where(used, dx * g[:, None], 0.0)
    tl.store(
        dx_ptr + rows[:, None] * E + offs_e[None, :], dx.to(dx_ptr.dtype.element_ty), mask=exists
    )


@triton.jit
def _linear_cross_entropy_bwd_weight_kernel(
    # pointers
    x_ptr,
    w_ptr,
    bias_ptr,
    target_ptr,
    order_ptr,
    count_ptr,
    g_ptr,
    log_probability_ptr,
    max_ptr,
    sum_ptr,
    dz_ptr,
    dw_ptr,
    db_ptr,
    # sizes
    V,
    chunk_start,
    label_smoothing,
    # strides
    stride_xn,
    stride_wv,
    stride_dzn,
    stride_g,
    # constexprs
    E: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_E: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SMOOTHED: tl.constexpr,
    DZ_IS_STORED: tl.constexpr,
    ACCUMULATES: tl.constexpr,
    NEED_WEIGHT: tl.constexpr,
    NEED_BIAS: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """One tile of dW over all rows that count, in order; of db, too, where dZ is in registers.

    A load that feeds a sum beside the product would race: Triton (3.6 to 3.9, sm_90) gives it too
    few buffers for a product that still runs.
    """
    TILE: tl.constexpr = Tile(E, BLOCK_N, BLOCK_V, BLOCK_E, HAS_BIAS, UPCAST)
    operands = Operands(x_ptr, w_ptr, bias_ptr, V, stride_xn, stride_wv)
    saved = Saved(
        target_ptr, g_ptr, log_probability_ptr, max_ptr, sum_ptr, label_smoothing, stride_g
    )
    tl.static_assert(not (DZ_IS_STORED and NEED_BIAS))
    start_c, start_e = tl.program_id(0) * BLOCK_V, tl.program_id(1) * BLOCK_E
    count = tl.load(count_ptr).to(tl.int32)
    if ACCUMULATES and count == 0:
        return
    offs_c = start_c + tl.arange(0, BLOCK_V)
    offs_v = chunk_start + offs_c
    mask_v = offs_v < V
    mask_dw = mask_v[:, None] & (start_e + tl.arange(0, BLOCK_E) < E)[None, :]
    if not DZ_IS_STORED:
        if E <= BLOCK_E:
            w = load_weight(operands, chunk_start + start_c, 0, TILE)
        bias = load_bias(operands, offs_v, HAS_BIAS)
    dw = tl.zeros([BLOCK_V, BLOCK_E], tl.float32)
    db = tl.zeros([BLOCK_V], tl.float32)
    if ACCUMULATES:  # what ``backward_kept`` has written, of the other rows
        if NEED_WEIGHT:
            dw_ptrs = tile_ptrs(dw_ptr, chunk_start + start_c, start_e, E, BLOCK_V, BLOCK_E)
            dw = tl.load(dw_ptrs, mask=mask_dw, other=0.0)
        if NEED_BIAS:
            db = tl.load(db_ptr + offs_v, mask=mask_v, other=0.0)

    next_rows, next_used = load_slots(order_ptr, count, 0, BLOCK_N)
    for start_n in range(0, count, BLOCK_N):
        rows, used = next_rows, next_used
        # Loaded one tile before they are needed: else the copies of x, whose addresses they give,
        # would run only one iteration ahead, whatever the stages. With dZ in registers it spills.
        if DZ_IS_STORED:
            next_rows, next_used = load_slots(order_ptr, count, start_n + BLOCK_N, BLOCK_N)
        else:
            rows, used = load_slots(order_ptr, count, start_n, BLOCK_N)
        x = load_x(operands, rows, used, start_e, TILE)  # [BLOCK_N, BLOCK_E]
        # dZ is computed transposed, as the second product needs it as its left operand.
        if DZ_IS_STORED:
            ptrs = tile_ptrs(dz_ptr, start_n, start_c, stride_dzn, BLOCK_N, BLOCK_V)
            dz_t = tl.trans(tl.load(ptrs, mask=used[:, None], other=0.0))  # [BLOCK_V, BLOCK_N]
        elif E > BLOCK_E:
            z = streamed_products(operands, rows, used, chunk_start + start_c, TILE)
            z += bias[None, :]  # [BLOCK_N, BLOCK_V]
            row = load_row_scalars(saved, rows, used, V, SMOOTHED)
            dz_t = tl.trans(grad_logits(z, offs_v, row, SMOOTHED, False))
        else:
            z_t = tl.zeros([BLOCK_V, BLOCK_N], tl.float32)
            z_t = dot(w, tl.trans(x), z_t, UPCAST) + bias[:, None]
            row = load_row_scalars(saved, rows, used, V, SMOOTHED)
            dz_t = grad_logits(z_t, offs_v, row, SMOOTHED, True)
        if NEED_WEIGHT:
            dw = dot(dz_t.to(x.dtype), x, dw, UPCAST)
        if NEED_BIAS:
            db += tl.sum(dz_t, 1)

    if NEED_WEIGHT:
        dw_ptrs = tile_ptrs(dw_ptr, chunk_start + start_c, start_e, E, BLOCK_V, BLOCK_E)
        tl.store(dw_ptrs, dw.to(dw_ptr.dtype.element_ty), mask=mask_dw)
    if NEED_BIAS:
        # Every tile of E has the same sum. A vector is compared: Triton 3.9's interpreter takes no
        # scalar comparison in a mask.
        first = start_e + tl.zeros([BLOCK_V], tl.int32) == 0
        tl.store(db_ptr + offs_v, db.to(db_ptr.dtype.element_ty), mask=mask_v & first)


@triton.jit
def _linear_cross_entropy_bwd_bias_kernel(
    # pointers
    dz_ptr,
    count_ptr,
    share_ptr,
    scale_ptr,
    db_ptr,
    # sizes
    V,
    chunk_start,
    # strides
    stride_dzn,
    # constexprs
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    ACCUMULATES: tl.constexpr,
):
    """db of one tile of columns, summed over rows in order: of stored dZ, or of D times each row's
    share of g.

    Stored rows are whole tiles, so columns past V may be read; they are not written.
    """
    start_c = tl.program_id(0) * BLOCK_V
    offs_v = chunk_start + start_c + tl.arange(0, BLOCK_V)
    mask_v = offs_v < V
    count = tl.load(count_ptr).to(tl.int32)
    db = tl.zeros([BLOCK_V], tl.float32)
    for start_n in range(0, count, BLOCK_N):
        offs_n = start_n + tl.arange(0, BLOCK_N)
        used = offs_n < count
        ptrs = tile_ptrs(dz_ptr, start_n, start_c, stride_dzn, BLOCK_N, BLOCK_V)
        dz = tl.load(ptrs, mask=used[:, None], other=0.0).to(tl.float32)
        if share_ptr is not None:
            dz *= tl.load(share_ptr + offs_n, mask=used, other=0.0)[:, None]
        db += tl.sum(dz, 0)
    if scale_ptr is not None:
        db *= tl.load(scale_ptr)
    if ACCUMULATES:  # what ``backward_kept`` has written, of the other rows
        db += tl.load(db_ptr + offs_v, mask=mask_v, other=0.0)
    tl.store(db_ptr + offs_v, db.to(db_ptr.dtype.element_ty), mask=mask_v)


def backward_kept(
    part: Part,
    operands: dict[str, Any],
    slots: torch.Tensor,
    *,
    dx_ptr: torch.Tensor | None,
    dw_ptr: torch.Tensor | None,
    db_ptr: torch.Tensor | None,
    w: torch.Tensor,
    g: torch.Tensor,
    d: torch.Tensor,
) -> None:
    """Launch the backward of the rows that kept D.

    dW is ``scale`` times the product of D and the rows of X times their shares of g, g / scale. All
    rows of a mean have one g, which is the scale: their share is 1, and nothing is rounded.
    """
    input, vocab, width = (operands[name] for name in ("x_ptr", "V", "E"))
    columns = products.whole_vectors(vocab)
    if dx_ptr is not None:
        split_dx = input.new_empty(1, part.rows, width, dtype=torch.float32)
        products.multiply(d[:, :columns], w, split_dx[0])
        _reduce_input(part, split_dx, g, dx_ptr)
    if dw_ptr is None and db_ptr is None:
        return
    if g.stride(0) == 0:
        scale, share = g[0], None
    else:
        scale, share, slots = g.new_empty(()), g.new_empty(part.rows), torch.empty_like(slots)
        largest(part, g, scale)
        fill_slots(part, operands, slots, g, scale, share)
    if dw_ptr is not None:
        product = dw_ptr
        if product.dtype is not torch.float32 or columns > vocab:
            product = dw_ptr.new_empty(columns, width, dtype=torch.float32)
        products.multiply(d[:, :columns].t(), slots, product)
        torch.mul(product[:vocab], scale, out=dw_ptr)
    if db_ptr is not None:
        _bias_gradient(part, d, vocab, db_ptr, share=share, scale=scale)


def _bias_gradient(
    part: Part,
    dz: torch.Tensor,
    vocab: int,
    db: torch.Tensor,
    *,
    chunk_start: int = 0,
    columns: int | None = None,
    share: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    accumulates: bool = False,
) -> None:
    """Launch db of the columns of ``dz``, which are those of the vocabulary from chunk_start on."""
    block_n, block_v, num_warps = configs.BIAS_TILE
    assert dz.stride(0) % block_v == 0, "a tile would read past the last row"
    launch(
        _linear_cross_entropy_bwd_bias_kernel,
        (cdiv(columns or vocab, block_v),),
        dz.device,
        dz_ptr=dz,
        count_ptr=part.count,
        share_ptr=share,
        scale_ptr=scale,
        db_ptr=db,
        V=vocab,
        chunk_start=chunk_start,
        stride_dzn=dz.stride(0),
        BLOCK_N=block_n,
        BLOCK_V=block_v,
        ACCUMULATES=accumulates,
        num_warps=num_warps,
    )


def _reduce_input(
    part: Part,
    split_dx: torch.Tensor,
    g: torch.Tensor | None,
    dx: torch.Tensor,
    few_rows_block_n: int = 0,
) -> None:
    """Launch the sum of ``split_dx`` [splits, slots, E] into the rows of dX, times g if given."""
    splits, _, width = split_dx.shape
    rows = part.rows
    launch(
        _linear_cross_entropy_reduce_input_kernel,
        (cdiv(rows, 32), cdiv(width, 64)),
        dx.device,
        split_dx_ptr=split_dx,
        g_ptr=g,
        dx_ptr=dx,
        N=rows,
        num_splits=splits,
        stride_g=0 if g is None else g.stride(0),
        E=width,
        BLOCK_N=32,
        BLOCK_E=64,
        FEW_ROWS_BLOCK_N=few_rows_block_n,
        **part.arguments(),
    )


def backward_recomputed(
    part: Part,
    operands: dict[str, Any],
    *,
    dx_ptr: torch.Tensor | None,
    dw_ptr: torch.Tensor | None,
    db_ptr: torch.Tensor | None,
    accumulates: bool,
    few_rows: bool = False,
    logits: Logits | None = None,
    **scalars: Any,
) -> None:
    """Launch the backward of the rows whose logits were not stored.

    Args:
        few_rows: probably none of these rows counts. So dZ is not stored, each tile of E computes
            it again, and the programs of the three launches end at once if no row counts.
        logits: what writes another op's dZ, instead of this op's; such a dZ is always read from a
            buffer.
    """
    input, rows, vocab, width = operands["x_ptr"], part.rows, operands["V"], operands["E"]
    device = input.device
    # With wide rows, in a second part and for another op, dZ is written once and read by products.
    stores_dz = not few_rows and (configs.is_wide(width) or accumulates or logits is not None)
    prefix = "wide " if stores_dz else ""
    config_x, config_w = (configs.config_of(prefix + which, input) for which in ("dX", "dW"))
    if stores_dz and (accumulates or not configs.is_wide(width)):
        config_w = configs.config_of("wide dW with more", input)
    config_z = configs.config_of("wide dZ", input) if stores_dz else {}
    if logits is not None:
        config_z = logits.config
    dz, chunk_columns = input, vocab  # the buffer is never read
    split_columns = configs.split_columns_of(config_x["BLOCK_V"])
    if stores_dz:
        chunk_columns = configs.chunk_columns_of(rows, vocab, config_x, config_w, config_z)
        dz = input.new_empty(rows, chunk_columns)
        split_columns = configs.wide_split_columns(rows, width, chunk_columns, config_x)
    splits, split_rows = cdiv(min(chunk_columns, vocab), split_columns), rows
    if few_rows:
        splits = MOST_SPLITS.value
        split_rows = cdiv(rows, config_x["BLOCK_N"]) * config_x["BLOCK_N"]
    shared = dict(**scalars, dz_ptr=dz, stride_dzn=dz.stride(0))
    if dx_ptr is not None:
        split_dx = input.new_empty(
            1 if few_rows else splits, split_rows, width, dtype=torch.float32
        )
    for chunk_start in range(0, vocab, chunk_columns):
        columns = min(chunk_columns, vocab - chunk_start)
        if logits is not None:
            logits.write(dz, chunk_start, columns)
        elif stores_dz:
            launch(
                _linear_cross_entropy_bwd_logits_kernel,
                (cdiv(rows, config_z["BLOCK_N"]), cdiv(columns, config_z["BLOCK_V"])),
                device,
                chunk_start=chunk_start,
                **shared,
                **part.arguments(),
                **operands,
                **config_z,
            )
        if dx_ptr is not None:
            launch(
                _linear_cross_entropy_bwd_input_kernel,
                (
                    cdiv(rows, config_x["BLOCK_N"]),
                    cdiv(width, config_x["BLOCK_E"]),
                    splits,
                ),
                device,
                split_dx_ptr=split_dx,
                N=rows,
                chunk_start=chunk_start,
                chunk_columns=chunk_columns,
                split_columns=split_columns,
                DZ_IS_STORED=stores_dz,
                FEW_ROWS=few_rows,
                **shared,
                **part.arguments(),
                **operands,
                **config_x,
            )
        sums_bias = db_ptr is not None and not stores_dz
        if dw_ptr is not None or sums_bias:
            tiles_e = cdiv(width, config_w["BLOCK_E"]) if dw_ptr is not None else 1
            launch(
                _linear_cross_entropy_bwd_weight_kernel,
                (cdiv(columns, config_w["BLOCK_V"]), tiles_e),
                device,
                dw_ptr=dw_ptr,
                db_ptr=db_ptr if sums_bias else None,
                chunk_start=chunk_start,
                DZ_IS_STORED=stores_dz,
                ACCUMULATES=accumulates,
                NEED_WEIGHT=dw_ptr is not None,
                NEED_BIAS=sums_bias,
                **shared,
                **part.arguments(),
                **operands,
                **config_w,
            )
        if db_ptr is not None and stores_dz:
            _bias_gradient(
                part,
                dz,
                vocab,
                db_ptr,
                chunk_start=chunk_start,
                columns=columns,
                accumulates=accumulates,
            )
    if dx_ptr is not None:
        _reduce_input(part, split_dx, None, dx_ptr, config_x["BLOCK_N"] if few_rows else 0)
