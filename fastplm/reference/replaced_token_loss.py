"""Reference of ``ops.replaced_token_loss``: the specification, in plain differentiable PyTorch."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from fastplm.reference._reduce import reduce_loss


class DetectionCounts(NamedTuple):
    """Counts of tokens, for accuracy, precision and recall: int64, 0-d, on the input's device.

    A token is predicted as replaced if its logit is above 0; at probability one half it is
    predicted as original. Counts of several batches, devices or steps may be added.

    Args:
        true_positives: replaced tokens that are predicted as replaced.
        predicted_positives: tokens that are predicted as replaced.
        positives: replaced tokens.
        correct: tokens whose prediction is right.
        total: all tokens whose mask is True.
    """

    true_positives: torch.Tensor
    predicted_positives: torch.Tensor
    positives: torch.Tensor
    correct: torch.Tensor
    total: torch.Tensor

    # A ratio whose denominator is 0 has the numerator 0 too.

    @property
    def accuracy(self) -> torch.Tensor:
        """Share of right predictions: fp32, 0-d; 0 if there is no token."""
        return self.correct / self.total.clamp(min=1)

    @property
    def precision(self) -> torch.Tensor:
        """Share of replaced tokens among those predicted as replaced; 0 if there is none."""
        return self.true_positives / self.predicted_positives.clamp(min=1)

    @property
    def recall(self) -> torch.Tensor:
        """Share of the replaced tokens that are predicted as replaced; 0 if there is none."""
        return self.true_positives / self.positives.clamp(min=1)


def replaced_token_loss_ref(
    input: torch.Tensor,
    weight: torch.Tensor,
    replaced: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    *,
    bias: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    reduction: str = "mean",
    normalizer: torch.Tensor | None = None,
    return_counts: bool = False,
) -> Any:
    """``softplus(z) - y z`` of ``z = input @ weight + bias`` and ``y = replaced``, reduced.

    Args: those of ``ops.replaced_token_loss``.

    Returns:
        [] or, with "none", [N]; fp32, or fp64 for fp64 inputs. A row that does not count is 0 and
        passes no gradient.
    """
    if not isinstance(replaced, torch.Tensor):
        ids, original_ids = replaced
        replaced = ids != original_ids
    if mask is not None:
        # A row that does not count may be NaN, and 0 * NaN is NaN.
        input = input.masked_fill(~mask[:, None], 0.0)
    logit = F.linear(input, weight[None, :], None if bias is None else bias.reshape(1)).squeeze(1)
    logit = logit if logit.dtype is torch.float64 else logit.float()
    if mask is not None:
        logit = logit.masked_fill(~mask, 0.0)
    # softplus(z) - y z is softplus(-z) for y = 1: without the difference of two large numbers.
    # Subtracted from 0, not negated, so that a vanished loss is +0.
    loss = 0.0 - F.logsigmoid(torch.where(replaced, logit, -logit))
    if mask is not None:
        loss = loss.masked_fill(~mask, 0.0)
    loss = reduce_loss(loss, mask, reduction, normalizer)
    if not return_counts:
        return loss
    counted = torch.ones_like(replaced) if mask is None else mask
    replaced, flagged = replaced & counted, (logit > 0) & counted
    return loss, DetectionCounts(
        true_positives=(flagged & replaced).sum(),
        predicted_positives=flagged.sum(),
        positives=replaced.sum(),
        correct=((flagged == replaced) & counted).sum(),
        total=counted.sum(),
    )
