"""The reduction that the losses share."""

from __future__ import annotations

import torch


def reduce_loss(
    loss: torch.Tensor,
    counted: torch.Tensor | None,
    reduction: str,
    normalizer: torch.Tensor | None,
) -> torch.Tensor:
    """The losses of rows [N], 0 where they do not count, as their ``reduction``.

    Args:
        loss: fp32 or fp64 [N].
        counted: bool [N], the rows of the mean's denominator; None = all.
        reduction: "mean" | "sum" | "none".
        normalizer: [], in place of that denominator.

    Returns:
        [N] for "none", else []. A denominator of 0 counts as 1, so that the mean over no row is 0
        with gradient 0: a step on such a batch must survive.
    """
    if reduction == "none":
        return loss
    total = loss.sum()
    if reduction == "sum":
        return total
    if normalizer is None:
        counted = torch.ones_like(loss, dtype=torch.bool) if counted is None else counted
        normalizer = counted.sum()
    return total / normalizer.to(loss.dtype).masked_fill(normalizer == 0, 1.0)
