"""The launchers of the forward and the backward."""

from __future__ import annotations

from typing import Any

import torch

from fastplm.triton_kernels._launch import upcast_dot
from fastplm.triton_kernels.linear_cross_entropy import products
from fastplm.triton_kernels.linear_cross_entropy.backward import backward_kept, backward_recomputed
from fastplm.triton_kernels.linear_cross_entropy.forward import forward_kept, forward_recomputed
from fastplm.triton_kernels.linear_cross_entropy.rows import parts_of, write_order

# Offsets inside a tile of 128 rows are computed in 32 bits.
_MAX_STRIDE = 1 << 23


def operands_of(
    input: torch.Tensor, linear_weight: torch.Tensor, linear_bias: torch.Tensor | None
) -> dict[str, Any]:
    """The keywords that all product kernels share."""
    if linear_weight.stride(0) >= _MAX_STRIDE:
        linear_weight = linear_weight.contiguous()
    return dict(
        x_ptr=input,
        w_ptr=linear_weight,
        # Without a bias the pointer is never read, so it may be that of any tensor.
        bias_ptr=linear_weight if linear_bias is None else linear_bias,
        V=linear_weight.shape[0],
        stride_xn=input.stride(0),
        stride_wv=linear_weight.stride(0),
        E=input.shape[1],
        HAS_BIAS=linear_bias is not None,
        UPCAST=upcast_dot(input.dtype),
    )


def sums_like(grad: torch.Tensor) -> torch.Tensor:
    """An fp32 tensor in which the parts of a gradient are summed."""
    return grad if grad.dtype is torch.float32 else torch.empty_like(grad, dtype=torch.float32)


def linear_cross_entropy_fwd(
    loss: torch.Tensor,
    log_probability: torch.Tensor,
    row_max: torch.Tensor,
    row_sum: torch.Tensor,
    argmax: torch.Tensor,
    sample: torch.Tensor,
    grad_logits: torch.Tensor,
    slots: torch.Tensor,
    order: torch.Tensor,
    *,
    input: torch.Tensor,
    linear_weight: torch.Tensor,
    linear_bias: torch.Tensor | None,
    target: torch.Tensor,
    seed: torch.Tensor | None,
    sample_index: torch.Tensor | None,
    position: torch.Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    temperature: float,
    need_argmax: bool,
    kept_rows: int,
) -> None:
    """Launch the forward, which writes the nine tensors before the keywords.

    Statistics fp32 [N]; argmax and sample int64 [N], or without elements; ``grad_logits``
    [kept_rows, V padded] in the dtype of ``input``, or without elements. The backward also reads
    ``slots`` [copied_rows + kept_rows, E], the copy of W that products read, if one is needed, and
    the rows that keep their logits; and ``order`` int64 [4 + N].
    """
    vocab = linear_weight.shape[0]
    weight, kept = products.weight_of(linear_weight, slots, kept_rows)
    products.copy_to(weight, linear_weight)
    write_order(target, ignore_index, kept_rows, order)
    parts = parts_of(order, kept_rows)
    operands = operands_of(input, weight[:vocab], linear_bias)
    statistics = dict(
        target_ptr=target,
        loss_ptr=loss,
        log_probability_ptr=log_probability,
        max_ptr=row_max,
        sum_ptr=row_sum,
        argmax_ptr=argmax if need_argmax else None,
        label_smoothing=label_smoothing,
    )
    draw = None
    if seed is not None:
        draw = dict(
            seed_ptr=seed,
            sample_index_ptr=sample_index,
            position_ptr=position,
            sample_ptr=sample,
            inverse_temperature=1.0 / temperature,
        )
    for part in parts:
        if part.kept:
            forward_kept(part, weight, operands, statistics, draw, grad_logits, kept)
        else:
            forward_recomputed(part, operands, statistics, draw)


def linear_cross_entropy_bwd(
    grad_input: torch.Tensor,
    grad_weight: torch.Tensor,
    grad_bias: torch.Tensor,
    *,
    grad_loss: torch.Tensor,
    input: torch.Tensor,
    linear_weight: torch.Tensor,
    linear_bias: torch.Tensor | None,
    target: torch.Tensor,
    log_probability: torch.Tensor,
    row_max: torch.Tensor,
    row_sum: torch.Tensor,
    grad_logits: torch.Tensor,
    slots: torch.Tensor,
    order: torch.Tensor,
    ignore_index: int,
    label_smoothing: float,
    overflow_unlikely: bool,
    need_input: bool,
    need_weight: bool,
    need_bias: bool,
) -> None:
    """Launch the backward, which writes the three gradients; those not needed have no elements.

    ``grad_loss`` fp32 [N] has any stride; 0 if all rows have one gradient. ``overflow_unlikely`` is
    ``few_rows`` of ``backward_recomputed``, for the rows that do not keep their logits.
    """
    parts = parts_of(order, grad_logits.shape[0])
    if not parts:
        grad_weight.zero_()
        grad_bias.zero_()
        return
    weight, kept = products.weight_of(linear_weight, slots, grad_logits.shape[0])
    operands = operands_of(input, weight[: linear_weight.shape[0]], linear_bias)
    dw, db = grad_weight, grad_bias
    if len(parts) > 1:
        dw, db = sums_like(dw), sums_like(db)
    # A gradient that is not needed is None, here and below.
    grads = dict(
        dx_ptr=grad_input if need_input else None,
        dw_ptr=dw if need_weight else None,
        db_ptr=db if need_bias else None,
    )
    for number, part in enumerate(parts):
        if part.kept:
            backward_kept(part, operands, kept, **grads, w=weight, g=grad_loss, d=grad_logits)
            continue
        backward_recomputed(
            part,
            operands,
            **grads,
            accumulates=number > 0,
            few_rows=overflow_unlikely and number > 0,
            target_ptr=target,
            g_ptr=grad_loss,
            log_probability_ptr=log_probability,
            max_ptr=row_max,
            sum_ptr=row_sum,
            label_smoothing=label_smoothing,
            stride_g=grad_loss.stride(0),
            SMOOTHED=label_smoothing > 0,
        )
    for grad, total in ((grad_weight, dw), (grad_bias, db)):
        if total is not grad:
            grad.copy_(total)
