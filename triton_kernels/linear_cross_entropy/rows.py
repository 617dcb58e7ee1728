"""The rows that count, their order, and their mean loss.

A slot is a place in ``order``, which lists the rows that count first. A ``Part`` is the slots that
take one of the two data flows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from fastplm.triton_kernels._launch import cast, cdiv, launch
from fastplm.triton_kernels.linear_cross_entropy.tiles import (
    COUNT_STRIDE,
    ORDER_START,
    load_slots,
    load_tile,
)

# Block sizes of the kernels of one program: the order of rows, and sums over rows.
_ORDER_BLOCK = 2048
_SUM_BLOCK = 8192


@triton.jit(do_not_specialize=["kept_rows", "ignore_index"])
def _linear_cross_entropy_order_kernel(
    # pointers
    target_ptr,
    order_ptr,
    count_ptr,
    # sizes
    N,
    kept_rows,
    ignore_index,
    # constexprs
    BLOCK: tl.constexpr,
):
    """Write all rows, those that count first and in order, and how many of these lie among the
    first ``kept_rows`` slots and after them."""
    count = tl.zeros([], tl.int32)
    for start in range(0, N, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        counts = offs < N
        counts = counts & (tl.load(target_ptr + offs, mask=counts, other=0) != ignore_index)
        count += tl.sum(counts.to(tl.int32), 0)
    head = tl.arange(0, 2 * COUNT_STRIDE)
    both = tl.where(head == COUNT_STRIDE, tl.maximum(count - kept_rows, 0), 0)
    both = tl.where(head == 0, tl.minimum(count, kept_rows), both)
    tl.store(count_ptr + head, both.to(tl.int64))

    first = tl.zeros([], tl.int32)  # slot of the next row that counts
    for start in range(0, N, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        exists = offs < N
        counts = exists & (tl.load(target_ptr + offs, mask=exists, other=0) != ignore_index)
        before = first + tl.cumsum(counts.to(tl.int32), 0) - counts.to(tl.int32)
        slot = tl.where(counts, before, count + offs - before)
        tl.store(order_ptr + slot, offs.to(tl.int64), mask=exists)
        first += tl.sum(counts.to(tl.int32), 0)


@triton.jit
def _linear_cross_entropy_mean_kernel(
    # pointers
    loss_ptr,
    count_ptr,
    normalizer_ptr,
    mean_ptr,
    denominator_ptr,
    # sizes
    N,
    # constexprs
    BLOCK: tl.constexpr,
):
    """The sum of all losses over the number of rows that count, or a given one, if it is not 0."""
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, N, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        total += tl.load(loss_ptr + offs, mask=offs < N, other=0.0)
    if normalizer_ptr is None:
        denominator = tl.load(count_ptr) + tl.load(count_ptr + COUNT_STRIDE)
    else:
        denominator = tl.load(normalizer_ptr)
    denominator = denominator.to(tl.float32)
    denominator = tl.where(denominator == 0.0, 1.0, denominator)
    tl.store(denominator_ptr, denominator)
    tl.store(mean_ptr, tl.div_rn(tl.sum(total, 0), denominator))


@triton.jit(do_not_specialize=["stride_g"])
def _linear_cross_entropy_scale_kernel(
    # pointers
    g_ptr,
    order_ptr,
    count_ptr,
    scale_ptr,
    # strides
    stride_g,
    # constexprs
    BLOCK: tl.constexpr,
):
    """The largest |g| of the rows that count; a NaN stays."""
    scale = tl.zeros([BLOCK], tl.float32)
    count = tl.load(count_ptr).to(tl.int32)
    for start in range(0, count, BLOCK):
        rows, used = load_slots(order_ptr, count, start, BLOCK)
        g = tl.abs(tl.load(g_ptr + rows * stride_g, mask=used, other=0.0))
        scale = tl.where((g > scale) | (g != g), g, scale)
    bad = tl.sum((scale != scale).to(tl.int32), 0) > 0
    tl.store(scale_ptr, tl.where(bad, float("nan"), tl.max(scale, 0)))


@triton.jit(do_not_specialize=["N"])
def _linear_cross_entropy_slots_kernel(
    # pointers
    x_ptr,
    order_ptr,
    count_ptr,
    g_ptr,
    scale_ptr,
    share_ptr,
    slots_ptr,
    # sizes
    N,
    # strides
    stride_xn,
    stride_g,
    # constexprs
    E: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_E: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Rows of X by slot, 0 in unused ones; with ``g_ptr`` times their share of g, g / scale."""
    start_n = tl.program_id(0) * BLOCK_N
    count = tl.load(count_ptr).to(tl.int32)
    rows, used = load_slots(order_ptr, count, start_n, BLOCK_N)
    x = load_tile(x_ptr, rows, used, stride_xn, tl.program_id(1) * BLOCK_E, E, BLOCK_E)
    x = x.to(tl.float32)  # [BLOCK_N, BLOCK_E]
    offs_n = start_n + tl.arange(0, BLOCK_N)
    offs_e = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    if g_ptr is not None:
        scale = tl.load(scale_ptr)
        share = tl.load(g_ptr + rows * stride_g, mask=used, other=0.0)
        share = tl.div_rn(share, tl.where(scale == 0.0, 1.0, scale))
        x *= share[:, None]
        tl.store(share_ptr + offs_n, share, mask=offs_n < N)
    ptrs = slots_ptr + offs_n.to(tl.int64)[:, None] * E + offs_e[None, :]
    exists = (offs_n < N)[:, None] & (offs_e < E)[None, :]
    tl.store(ptrs, cast(x, slots_ptr.dtype.element_ty, UPCAST), mask=exists)


class Part(NamedTuple):
    """The slots that take one of the data flows; used ones come first."""

    order: torch.Tensor
    count: torch.Tensor
    kept: bool

    @property
    def rows(self) -> int:
        return self.order.shape[0]

    def arguments(self) -> dict[str, torch.Tensor]:
        return dict(order_ptr=self.order, count_ptr=self.count)


def write_order(
    target: torch.Tensor, ignore_index: int, kept_rows: int, order: torch.Tensor
) -> None:
    """Launch the write of ``order`` [4 + N] int64: two counts (see ``parts_of``), then all rows."""
    launch(
        _linear_cross_entropy_order_kernel,
        (1,),
        target.device,
        target_ptr=target,
        order_ptr=order[ORDER_START:],
        count_ptr=order,
        N=target.shape[0],
        kept_rows=kept_rows,
        ignore_index=ignore_index,
        BLOCK=_ORDER_BLOCK,
        num_warps=8,
    )


def parts_of(order: torch.Tensor, kept_rows: int) -> list[Part]:
    """The slots that keep their logits and those that do not, without a host sync."""
    rows = order.shape[0] - ORDER_START
    parts = []
    if kept_rows:
        parts.append(Part(order[ORDER_START : ORDER_START + kept_rows], order, True))
    if kept_rows < rows:
        order, count = order[ORDER_START + kept_rows :], order[COUNT_STRIDE.value :]
        parts.append(Part(order, count, False))
    return parts


def mean(
    loss: torch.Tensor, order: torch.Tensor, normalizer: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the mean of a forward's losses [N]. Returns the mean and its denominator, fp32 []."""
    mean, denominator = (loss.new_empty(()) for _ in range(2))
    launch(
        _linear_cross_entropy_mean_kernel,
        (1,),
        loss.device,
        loss_ptr=loss,
        count_ptr=order,
        normalizer_ptr=normalizer,
        mean_ptr=mean,
        denominator_ptr=denominator,
        N=loss.shape[0],
        BLOCK=_SUM_BLOCK,
        num_warps=16,
    )
    return mean, denominator


def fill_slots(
    part: Part,
    operands: dict[str, Any],
    slots: torch.Tensor,
    g: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    share: torch.Tensor | None = None,
) -> None:
    """Launch the copy of the rows that count into their slots, [slots, E]."""
    input, width = operands["x_ptr"], operands["E"]
    launch(
        _linear_cross_entropy_slots_kernel,
        (cdiv(part.rows, 32), cdiv(width, 64)),
        input.device,
        x_ptr=input,
        slots_ptr=slots,
        g_ptr=g,
        scale_ptr=scale,
        share_ptr=share,
        N=part.rows,
        stride_xn=input.stride(0),
        stride_g=0 if g is None else g.stride(0),
        E=width,
        BLOCK_N=32,
        BLOCK_E=64,
        UPCAST=operands["UPCAST"],
        **part.arguments(),
    )


def largest(part: Part, g: torch.Tensor, scale: torch.Tensor) -> None:
    """Launch the largest magnitude of g among the rows that count."""
    launch(
        _linear_cross_entropy_scale_kernel,
        (1,),
        g.device,
        g_ptr=g,
        scale_ptr=scale,
        stride_g=g.stride(0),
        BLOCK=_ORDER_BLOCK,
        num_warps=8,
        **part.arguments(),
    )
