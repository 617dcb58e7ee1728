"""Reference of ``ops.linear_cross_entropy``: the specification, in plain differentiable PyTorch."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fastplm.reference._reduce import reduce_loss


def linear_cross_entropy_ref(
    input: torch.Tensor,
    linear_weight: torch.Tensor,
    target: torch.Tensor,
    *,
    linear_bias: torch.Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    normalizer: torch.Tensor | None = None,
) -> torch.Tensor:
    """Cross-entropy of the logits ``input W^T + b``, as ``ops.linear_cross_entropy`` defines it.

    Args:
        input: [N, E].
        linear_weight: [V, E].
        target: int64 [N]; ``ignore_index`` takes the row out of the loss and of every gradient.
        linear_bias: [V].
        reduction: "mean" | "sum" | "none".
        normalizer: 0-d; replaces the mean's denominator, the number of rows that count.

    Returns:
        0-d, or [N] for "none"; fp32 (fp64 for fp64 inputs). A row whose target is neither
        ``ignore_index`` nor in [0, V) has a NaN loss and NaN gradients.
    """
    counts = target != ignore_index
    known = (target >= 0) & (target < linear_weight.shape[0])
    # An ignored row must not matter even if it is NaN, and 0 * NaN would.
    rows = input.masked_fill(~counts[:, None], 0.0)
    logits = F.linear(rows, linear_weight, linear_bias)  # [N, V]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    loss = F.cross_entropy(logits, target.masked_fill(~(counts & known), 0), reduction="none")
    loss = loss * torch.ones_like(loss).masked_fill(counts & ~known, float("nan"))
    loss = loss.masked_fill(~counts, 0.0)
    return reduce_loss(loss, counts, reduction, normalizer)
