"""The forward: row statistics from logits that are kept, or computed tile by tile."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from fastplm.triton_kernels._launch import cast, cdiv, dot, launch, max_with_index
from fastplm.triton_kernels.linear_cross_entropy import configs, products
from fastplm.triton_kernels.linear_cross_entropy.backward import Row, grad_logits, row_scalars
from fastplm.triton_kernels.linear_cross_entropy.rows import Part, fill_slots
from fastplm.triton_kernels.linear_cross_entropy.sample import draw_sample
from fastplm.triton_kernels.linear_cross_entropy.tiles import (
    LOG2E,
    Operands,
    Tile,
    load_bias,
    load_slots,
    load_weight,
    load_x,
    streamed_products,
)


class Statistics(NamedTuple):
    """Where to write what the forward says of each row, [N] each."""

    loss_ptr: Any
    log_probability_ptr: Any
    max_ptr: Any
    sum_ptr: Any
    argmax_ptr: Any
    label_smoothing: Any


@triton.jit
def fold_tile(
    z, m_i, l_i, total, argmax, start_v, seen, V, WITH_ARGMAX: tl.constexpr, SMOOTHED: tl.constexpr
):
    """What is known of the rows after one tile more, ``seen`` columns after the first.

    (z - m of that tile, its m, its sum of exponentials; then the four: m [BLOCK_N], l [BLOCK_N],
    sum of z - m of the columns seen [BLOCK_N], argmax int32 [BLOCK_N])
    """
    if WITH_ARGMAX:
        m_tile, index = max_with_index(z)
        argmax = tl.where(m_tile > m_i, start_v + index, argmax)
    else:
        m_tile = tl.max(z, 1)
    # -inf - -inf is NaN: a row that has seen no finite logit yet keeps a reference point of 0.
    m_new = tl.maximum(m_i, m_tile)
    m_ref = tl.where(m_new == float("-inf"), 0.0, m_new)
    z -= m_ref[:, None]
    if SMOOTHED:
        exists = start_v + tl.arange(0, z.shape[1]) < V
        m_old = tl.where(m_i == float("-inf"), 0.0, m_i)
        total += seen * (m_old - m_ref) + tl.sum(tl.where(exists[None, :], z, 0.0), 1)
    l_tile = tl.sum(tl.exp2(z * LOG2E), 1)
    l_i = l_i * tl.exp2((m_i - m_ref) * LOG2E) + l_tile
    return z, m_ref, l_tile, m_new, l_i, total, argmax


@triton.jit
def store_statistics(
    statistics,
    rows,
    exists,
    used,
    target,
    m_i,
    l_i,
    picked,
    total,
    argmax,
    V,
    SMOOTHED: tl.constexpr,
):
    """What the forward says of a row; 0 (argmax -1) for ignored ones. (log p of the target, m)"""
    # No tile has met a target outside the vocabulary: a NaN maximum makes loss and gradients NaN.
    m_i = tl.where((target >= 0) & (target < V), m_i, float("nan"))
    loss = (m_i - picked) + tl.log(l_i)
    log_probability = 0.0 - loss
    tl.store(
        statistics.log_probability_ptr + rows, tl.where(used, log_probability, 0.0), mask=exists
    )
    if SMOOTHED:
        label_smoothing = statistics.label_smoothing
        loss = (1.0 - label_smoothing) * loss + label_smoothing * (tl.log(l_i) - total / V)
    tl.store(statistics.loss_ptr + rows, tl.where(used, loss, 0.0), mask=exists)
    tl.store(statistics.max_ptr + rows, tl.where(used, m_i, 0.0), mask=exists)
    tl.store(statistics.sum_ptr + rows, tl.where(used, l_i, 0.0), mask=exists)
    if statistics.argmax_ptr is not None:
        tl.store(statistics.argmax_ptr + rows, tl.where(used, argmax, -1).to(tl.int64), mask=exists)
    return log_probability, m_i


@triton.jit(do_not_specialize=["N"])
def _linear_cross_entropy_fwd_kernel(
    # pointers
    x_ptr,
    w_ptr,
    bias_ptr,
    target_ptr,
    order_ptr,
    count_ptr,
    split_max_ptr,
    split_sum_ptr,
    split_picked_ptr,
    split_total_ptr,
    split_argmax_ptr,
    tile_max_ptr,
    tile_sum_ptr,
    # sizes
    N,
    V,
    split_columns,
    inverse_temperature,
    # strides
    stride_xn,
    stride_wv,
    # constexprs
    E: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_E: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    TEMPERED: tl.constexpr,
    UPCAST: tl.constexpr,
):
    # Neighbouring programs read the same split of W, from the L2.
    TILE: tl.constexpr = Tile(E, BLOCK_N, BLOCK_V, BLOCK_E, HAS_BIAS, UPCAST)
    operands = Operands(x_ptr, w_ptr, bias_ptr, V, stride_xn, stride_wv)
    start_n, split = tl.program_id(0) * BLOCK_N, tl.program_id(1)
    count = tl.load(count_ptr).to(tl.int32)
    if start_n >= count:
        return
    rows, used = load_slots(order_ptr, count, start_n, BLOCK_N)
    # A target that does not fit in 32 bits is out of range, which the combining kernel sees.
    target = tl.load(target_ptr + rows, mask=used, other=-1).to(tl.int32)
    if E <= BLOCK_E:
        x = load_x(operands, rows, used, 0, TILE)  # [BLOCK_N, BLOCK_E]

    offs_n = start_n + tl.arange(0, BLOCK_N)
    m_i = tl.full([BLOCK_N], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_N], tl.float32)
    picked = tl.zeros([BLOCK_N], tl.float32)  # the logit of the target, from the tile that has it
    total = tl.zeros([BLOCK_N], tl.float32)  # sum of z - m, of the columns seen
    argmax = tl.zeros([BLOCK_N], tl.int32)
    first_v = tl.minimum(split * split_columns, V)
    num_tiles = tl.cdiv(tl.minimum(split_columns, V - first_v), BLOCK_V)
    offs_t = split.to(tl.int64) * (split_columns // BLOCK_V) * N + offs_n
    for tile in range(0, num_tiles):
        start_v = first_v + tile * BLOCK_V
        offs_v = start_v + tl.arange(0, BLOCK_V)
        if E <= BLOCK_E:
            w = load_weight(operands, start_v, 0, TILE)
            z = tl.zeros([BLOCK_N, BLOCK_V], tl.float32)
            z = dot(x, tl.trans(w), z, UPCAST)
        else:
            z = streamed_products(operands, rows, used, start_v, TILE)
        z += load_bias(operands, offs_v, HAS_BIAS)[None, :]  # [BLOCK_N, BLOCK_V]
        picked += tl.sum(tl.where(offs_v[None, :] == target[:, None], z, 0.0), 1)
        z, m_ref, l_tile, m_i, l_i, total, argmax = fold_tile(
            z,
            m_i,
            l_i,
            total,
            argmax,
            start_v,
            tile * BLOCK_V,
            V,
            split_argmax_ptr is not None,
            split_total_ptr is not None,
        )
        if tile_sum_ptr is not None:
            if TEMPERED:
                l_tile = tl.sum(tl.exp2(z * (LOG2E * inverse_temperature)), 1)
            tl.store(tile_max_ptr + offs_t, m_ref, mask=used)
            tl.store(tile_sum_ptr + offs_t, l_tile, mask=used)
            offs_t += N

    offs_s = split.to(tl.int64) * N + offs_n
    tl.store(split_max_ptr + offs_s, m_i, mask=used)
    tl.store(split_sum_ptr + offs_s, l_i, mask=used)
    tl.store(split_picked_ptr + offs_s, picked, mask=used)
    if split_total_ptr is not None:
        tl.store(split_total_ptr + offs_s, total, mask=used)
    if split_argmax_ptr is not None:
        tl.store(split_argmax_ptr + offs_s, argmax, mask=used)


@triton.jit(do_not_specialize=["N"])
def _linear_cross_entropy_combine_kernel(
    # pointers
    target_ptr,
    order_ptr,
    count_ptr,
    split_max_ptr,
    split_sum_ptr,
    split_picked_ptr,
    split_total_ptr,
    split_argmax_ptr,
    loss_ptr,
    log_probability_ptr,
    max_ptr,
    sum_ptr,
    argmax_ptr,
    # sizes
    N,
    V,
    split_columns,
    label_smoothing,
    # constexprs
    BLOCK_N: tl.constexpr,
):
    """What the forward says of each row, from its splits; 0 (argmax -1) for ignored rows."""
    statistics = Statistics(
        loss_ptr, log_probability_ptr, max_ptr, sum_ptr, argmax_ptr, label_smoothing
    )
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    exists = offs_n < N
    used = offs_n < tl.load(count_ptr).to(tl.int32)
    rows = tl.load(order_ptr + offs_n, mask=exists, other=0)

    m_i = tl.full([BLOCK_N], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_N], tl.float32)
    picked = tl.zeros([BLOCK_N], tl.float32)
    total = tl.zeros([BLOCK_N], tl.float32)
    argmax = tl.zeros([BLOCK_N], tl.int32)
    offs_s = offs_n.to(tl.int64)
    for first_v in range(0, V, split_columns):
        m_s = tl.load(split_max_ptr + offs_s, mask=used, other=0.0)
        l_s = tl.load(split_sum_ptr + offs_s, mask=used, other=1.0)
        picked += tl.load(split_picked_ptr + offs_s, mask=used, other=0.0)
        if split_argmax_ptr is not None:
            index = tl.load(split_argmax_ptr + offs_s, mask=used, other=0)
            argmax = tl.where(m_s > m_i, index, argmax)
        m_new = tl.maximum(m_i, m_s)
        m_ref = tl.where(m_new == float("-inf"), 0.0, m_new)
        l_i = l_i * tl.exp2((m_i - m_ref) * LOG2E) + l_s * tl.exp2((m_s - m_ref) * LOG2E)
        if split_total_ptr is not None:
            columns = tl.minimum(split_columns, V - first_v)
            m_old = tl.where(m_i == float("-inf"), 0.0, m_i)
            m_split = tl.where(m_s == float("-inf"), 0.0, m_s)
            total += first_v * (m_old - m_ref) + columns * (m_split - m_ref)
            total += tl.load(split_total_ptr + offs_s, mask=used, other=0.0)
        m_i = m_new
        offs_s += N

    target = tl.load(target_ptr + rows, mask=used, other=0)
    SMOOTHED: tl.constexpr = split_total_ptr is not None
    store_statistics(
        statistics, rows, exists, used, target, m_i, l_i, picked, total, argmax, V, SMOOTHED
    )


@triton.jit
def kept_logits(
    z_ptr,
    bias_ptr,
    offs_n,
    used,
    start_v,
    V,
    stride_zn,
    BLOCK_V: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """A tile of stored products with their bias: -inf past V. [len(offs_n), BLOCK_V] fp32

    Rows are padded to whole cache lines, V is not. A load masked at V would be compiled to loads of
    two bytes.
    """
    offs_v = start_v + tl.arange(0, BLOCK_V)
    ptrs = z_ptr + offs_n.to(tl.int64)[:, None] * stride_zn + offs_v[None, :]
    stored = used[:, None] & (offs_v < stride_zn)[None, :]
    z = tl.load(ptrs, mask=stored, other=0.0).to(tl.float32)
    if HAS_BIAS:
        if start_v + BLOCK_V <= V:
            bias = tl.load(bias_ptr + offs_v)
        else:
            bias = tl.load(bias_ptr + offs_v, mask=offs_v < V, other=0.0)
        z += bias.to(tl.float32)[None, :]
    return tl.where((offs_v < V)[None, :], z, float("-inf"))


@triton.jit(do_not_specialize=["N"])
def _linear_cross_entropy_rows_kernel(
    # pointers
    bias_ptr,
    target_ptr,
    order_ptr,
    count_ptr,
    loss_ptr,
    log_probability_ptr,
    max_ptr,
    sum_ptr,
    argmax_ptr,
    tile_max_ptr,
    tile_sum_ptr,
    z_ptr,
    # sizes
    N,
    V,
    label_smoothing,
    inverse_temperature,
    # strides
    stride_zn,
    # constexprs
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SMOOTHED: tl.constexpr,
    TEMPERED: tl.constexpr,
    READS: tl.constexpr,
    WRITES: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Rows of kept logits: their statistics (``READS``), then D in their place (``WRITES``).

    If tokens are sampled, that happens between the two, which are then two launches. D of an unused
    slot is 0, whatever its memory holds, because the products read it too.
    """
    statistics = Statistics(
        loss_ptr, log_probability_ptr, max_ptr, sum_ptr, argmax_ptr, label_smoothing
    )
    start_n = tl.program_id(0) * BLOCK_N
    offs_n = start_n + tl.arange(0, BLOCK_N)
    exists = offs_n < N
    count = tl.load(count_ptr).to(tl.int32)
    used = offs_n < count
    rows = tl.load(order_ptr + offs_n, mask=exists, other=0)
    target = tl.load(target_ptr + rows, mask=used, other=-1)
    if READS:
        # Before the loop. Its sums over the block contain barriers, so all warps have read the
        # logit of the target before one of them writes D.
        met = used & (target >= 0) & (target < V)
        picked = tl.load(z_ptr + offs_n.to(tl.int64) * stride_zn + target, mask=met, other=0.0)
        picked = picked.to(tl.float32)
        if HAS_BIAS:
            picked += tl.load(bias_ptr + target, mask=met, other=0.0).to(tl.float32)
        m_i = tl.full([BLOCK_N], float("-inf"), tl.float32)
        l_i = tl.zeros([BLOCK_N], tl.float32)
        total = tl.zeros([BLOCK_N], tl.float32)  # sum of z - m, of the columns seen
        argmax = tl.zeros([BLOCK_N], tl.int32)
        offs_t = offs_n.to(tl.int64)
        for start_v in range(0, tl.where(start_n < count, V, 0), BLOCK_V):
            z = kept_logits(z_ptr, bias_ptr, offs_n, used, start_v, V, stride_zn, BLOCK_V, HAS_BIAS)
            z, m_ref, l_tile, m_i, l_i, total, argmax = fold_tile(
                z, m_i, l_i, total, argmax, start_v, start_v, V, argmax_ptr is not None, SMOOTHED
            )
            if tile_sum_ptr is not None:
                if TEMPERED:
                    l_tile = tl.sum(tl.exp2(z * (LOG2E * inverse_temperature)), 1)
                tl.store(tile_max_ptr + offs_t, m_ref, mask=used)
                tl.store(tile_sum_ptr + offs_t, l_tile, mask=used)
                offs_t += N
        log_probability, m_i = store_statistics(
            statistics, rows, exists, used, target, m_i, l_i, picked, total, argmax, V, SMOOTHED
        )
    else:
        log_probability = tl.load(log_probability_ptr + rows, mask=used, other=0.0)
        m_i = tl.load(max_ptr + rows, mask=used, other=0.0)
        l_i = tl.load(sum_ptr + rows, mask=used, other=0.0)
    if WRITES:
        d_target, m_i, one_over_l, spread = row_scalars(
            used.to(tl.float32), log_probability, m_i, l_i, used, V, label_smoothing, SMOOTHED
        )
        row = Row(target, d_target, m_i, one_over_l, spread)
        for start_v in range(0, V, BLOCK_V):
            z = kept_logits(z_ptr, bias_ptr, offs_n, used, start_v, V, stride_zn, BLOCK_V, HAS_BIAS)
            offs_v = start_v + tl.arange(0, BLOCK_V)
            d = grad_logits(z, offs_v, row, SMOOTHED, False)
            d = tl.where(used[:, None] & (offs_v < V)[None, :], d, 0.0)
            ptrs = z_ptr + offs_n.to(tl.int64)[:, None] * stride_zn + offs_v[None, :]
            mask = exists[:, None] & (offs_v < stride_zn)[None, :]
            tl.store(ptrs, cast(d, z_ptr.dtype.element_ty, UPCAST), mask=mask)


def forward_kept(
    part: Part,
    weight: torch.Tensor,
    operands: dict[str, Any],
    statistics: dict[str, Any],
    draw: dict[str, Any] | None,
    grad_logits: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """Launch the forward of the rows that keep their logits, which end as D in ``grad_logits``."""
    input, vocab = operands["x_ptr"], operands["V"]
    fill_slots(part, operands, slots)
    products.multiply(slots, weight.t(), grad_logits[:, : products.whole_vectors(vocab)])
    block_n, block_v, num_warps = configs.rows_config(input)
    tiles = cdiv(vocab, block_v)
    tile_max, tile_sum = (
        None if draw is None else input.new_empty(tiles, part.rows, dtype=torch.float32)
        for _ in range(2)
    )
    inverse_temperature = 1.0 if draw is None else draw["inverse_temperature"]

    def walk(**what: bool) -> None:
        launch(
            _linear_cross_entropy_rows_kernel,
            (cdiv(part.rows, block_n),),
            input.device,
            bias_ptr=operands["bias_ptr"],
            tile_max_ptr=tile_max,
            tile_sum_ptr=tile_sum,
            z_ptr=grad_logits,
            N=part.rows,
            V=vocab,
            inverse_temperature=inverse_temperature,
            stride_zn=grad_logits.stride(0),
            BLOCK_N=block_n,
            BLOCK_V=block_v,
            HAS_BIAS=operands["HAS_BIAS"],
            SMOOTHED=statistics["label_smoothing"] > 0,
            TEMPERED=inverse_temperature != 1.0,
            UPCAST=operands["UPCAST"],
            num_warps=num_warps,
            **what,
            **part.arguments(),
            **statistics,
        )

    if draw is None:
        walk(READS=True, WRITES=True)
    else:
        walk(READS=True, WRITES=False)
        draw_sample(part, operands, draw, tile_max, tile_sum, block_v, grad_logits)
        walk(READS=False, WRITES=True)


def forward_recomputed(
    part: Part,
    operands: dict[str, Any],
    statistics: dict[str, Any],
    draw: dict[str, Any] | None,
) -> None:
    """Launch the forward of the rows whose logits are never stored."""
    input, rows, vocab = operands["x_ptr"], part.rows, operands["V"]
    with_argmax, smoothed = (
        statistics["argmax_ptr"] is not None,
        statistics["label_smoothing"] > 0,
    )
    config = configs.forward_config(with_argmax or smoothed, input)
    columns = configs.split_columns_of(config["BLOCK_V"])
    splits, tiles = cdiv(vocab, columns), cdiv(vocab, config["BLOCK_V"])

    def partial(count: int, needed: bool = True, dtype: torch.dtype = torch.float32) -> Any:
        return input.new_empty(count, rows, dtype=dtype) if needed else None

    inverse_temperature = 1.0 if draw is None else draw["inverse_temperature"]
    tile_max, tile_sum = (partial(tiles, draw is not None) for _ in range(2))
    partials = dict(
        split_max_ptr=partial(splits),
        split_sum_ptr=partial(splits),
        split_picked_ptr=partial(splits),
        split_total_ptr=partial(splits, smoothed),
        split_argmax_ptr=partial(splits, with_argmax, torch.int32),
    )
    launch(
        _linear_cross_entropy_fwd_kernel,
        (cdiv(rows, config["BLOCK_N"]), splits),
        input.device,
        target_ptr=statistics["target_ptr"],
        tile_max_ptr=tile_max,
        tile_sum_ptr=tile_sum,
        N=rows,
        split_columns=columns,
        inverse_temperature=inverse_temperature,
        TEMPERED=inverse_temperature != 1.0,
        **part.arguments(),
        **partials,
        **operands,
        **config,
    )
    launch(
        _linear_cross_entropy_combine_kernel,
        (cdiv(rows, 128),),
        input.device,
        N=rows,
        V=vocab,
        split_columns=columns,
        BLOCK_N=128,
        **part.arguments(),
        **partials,
        **statistics,
    )
    if draw is not None:
        draw_sample(part, operands, draw, tile_max, tile_sum, config["BLOCK_V"], None)
