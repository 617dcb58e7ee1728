"""The reduction of a loss, which its operator takes with it: autograd then has one node to walk,
not one more for each step of the reduction."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fastplm._registry import Op
from fastplm.ops._common import kernels
from fastplm.reference._reduce import denominator_of, reduce_loss


def run_loss(op: Op, call: Any, backend: str, losses: int = 1) -> tuple[Tensor, ...]:
    """The outputs of an operator, of which the first ones are losses.

    It passes no gradient to the normalizer: if that needs one, the division is here.
    """
    if call.normalizer is None or not call.normalizer.requires_grad:
        return op(call, backend)
    outputs = op(call._replace(normalizer=None, reduction="sum"), backend)
    reduced = (reduce_loss(one, None, call.reduction, call.normalizer) for one in outputs[:losses])
    return *reduced, *outputs[losses:]


def reduced(call: Any, outputs: tuple[Tensor, ...], losses: int = 1) -> tuple[Tensor, ...]:
    """The outputs of a forward of rows, the first ones reduced; behind these their denominator: []
    for "mean", else without elements."""
    parts, others = outputs[:losses], outputs[losses:]
    if call.reduction == "mean":
        counted = call.target != call.ignore_index
        denominator = denominator_of(parts[0], counted, call.normalizer)
        return *(part.sum() / denominator for part in parts), denominator, *others
    if call.reduction == "sum":
        parts = tuple(part.sum() for part in parts)
    return *parts, parts[0].new_empty(0), *others


def reduced_on_triton(
    call: Any, outputs: tuple[Tensor, ...], losses: int = 1
) -> tuple[Tensor, ...]:
    """The same by kernels, which read how many rows count in the last output."""
    if call.reduction != "mean":
        return reduced(call, outputs, losses)
    mean = kernels("linear_cross_entropy").mean
    means = [mean(part, outputs[-1], call.normalizer) for part in outputs[:losses]]
    return *(part for part, _ in means), means[0][1], *outputs[losses:]


def grad_of_rows(grad: Tensor, saved: Any) -> Tensor:
    """[N], from the gradient of the reduced loss."""
    if saved.denominator is not None:
        grad = grad / saved.denominator
    return grad.expand(saved.input.shape[0])
