"""Reference of ``ops.replaced_token_loss``: the specification, in plain differentiable PyTorch."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fastplm.reference._reduce import reduce_loss


def replaced_token_loss_ref(
    input: torch.Tensor,
    weight: torch.Tensor,
    replaced: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    reduction: str = "mean",
    normalizer: torch.Tensor | None = None,
) -> torch.Tensor:
    """``softplus(z) - y z`` of ``z = input @ weight + bias`` and ``y = replaced``, reduced.

    Args:
        input: [N, E].
        weight: [E].
        replaced: bool [N].
        bias: [] or [1].
        mask: bool [N], True = counts.
        reduction: "mean" | "sum" | "none".
        normalizer: [], in place of the mean's denominator.

    Returns:
        [] or, with "none", [N]; fp32, or fp64 for fp64 inputs. A row that does not count is 0 and
        passes no gradient.
    """
    if mask is not None:
        # A row that does not count must not matter even if it is NaN, and 0 * NaN would.
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
    return reduce_loss(loss, mask, reduction, normalizer)
