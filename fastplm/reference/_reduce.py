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
        with gradient 0, and a step on such a batch changes nothing.
    """
    if reduction == "none":
        return loss
    total = loss.sum()
    return total if reduction == "sum" else total / denominator_of(loss, counted, normalizer)


def denominator_of(
    loss: torch.Tensor, counted: torch.Tensor | None, normalizer: torch.Tensor | None
) -> torch.Tensor:
    """[], in the dtype of ``loss``: what ``reduce_loss`` divides by for a mean."""
    if normalizer is not None:
        return normalizer.to(loss.dtype).masked_fill(normalizer == 0, 1.0)
    counted = torch.ones_like(loss, dtype=torch.bool) if counted is None else counted
    return counted.sum().clamp(min=1).to(loss.dtype)
