"""Reference of ``ops.linear_cross_entropy``: the specification, in plain differentiable PyTorch."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from fastplm.reference._reduce import reduce_loss
from fastplm.reference.philox import Stream, draw, uniform


class RowStatistics(NamedTuple):
    """Statistics of the logits of each row, without gradient.

    Args:
        argmax: int64 [N], the most likely token, the first one of equals; -1 in ignored rows.
        logsumexp: [N], of the logits; 0 in ignored rows.
        log_probability: [N], of the target, without label smoothing; 0 in ignored rows.
    """

    argmax: torch.Tensor
    logsumexp: torch.Tensor
    log_probability: torch.Tensor


def linear_cross_entropy_ref(
    input: torch.Tensor,
    linear_weight: torch.Tensor,
    target: torch.Tensor,
    *,
    linear_bias: torch.Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    normalizer: torch.Tensor | None = None,
) -> torch.Tensor:
    """Cross-entropy of the logits ``input W^T + b``, as ``ops.linear_cross_entropy`` defines it.

    Args: those of ``ops.linear_cross_entropy``; weight and bias are rounded to the dtype of
        ``input``.

    Returns:
        0-d, or [N] for "none"; fp32 (fp64 for fp64 inputs). A row whose target is neither
        ``ignore_index`` nor in [0, V) has a NaN loss and NaN gradients.
    """
    counts = target != ignore_index
    logits = logits_of_rows(input, linear_weight, linear_bias, counts)
    loss = cross_entropy_of_rows(logits, target, counts, label_smoothing)
    return reduce_loss(loss, counts, reduction, normalizer)


@torch.no_grad()
def row_statistics_ref(
    input: torch.Tensor,
    linear_weight: torch.Tensor,
    target: torch.Tensor,
    *,
    linear_bias: torch.Tensor | None = None,
    ignore_index: int = -100,
) -> RowStatistics:
    """``RowStatistics`` of the same logits."""
    counts = target != ignore_index
    logits = logits_of_rows(input, linear_weight, linear_bias, counts)
    return RowStatistics(
        argmax=logits.argmax(1).masked_fill(~counts, -1),
        logsumexp=logits.logsumexp(1).masked_fill(~counts, 0.0),
        log_probability=0.0 - cross_entropy_of_rows(logits, target, counts),
    )


@torch.no_grad()
def sample_ref(
    input: torch.Tensor,
    linear_weight: torch.Tensor,
    target: torch.Tensor,
    *,
    linear_bias: torch.Tensor | None = None,
    ignore_index: int = -100,
    temperature: float = 1.0,
    seed: int | torch.Tensor,
    sample_index: torch.Tensor | None = None,
    position: torch.Tensor | None = None,
) -> torch.Tensor:
    """One token for each row from ``softmax(logits / temperature)``, by the inverse of its
    distribution function at one uniform number: the first token at which the running sum of
    probabilities exceeds it.

    Args: those of ``ops.linear_cross_entropy_with_sample``.

    Returns:
        int64 [N]; -1 in ignored rows, 0 in a row with a NaN or an infinite largest logit.
    """
    counts = target != ignore_index
    logits = logits_of_rows(input, linear_weight, linear_bias, counts)
    level = uniform_level(seed, input.shape[0], sample_index, position, input.device)
    weights = ((logits - logits.amax(1, keepdim=True)) / temperature).exp()
    # fp64: rounding of an fp32 sum would change the probabilities of the last tokens.
    distribution = weights.double().cumsum(1)  # [N, V]
    threshold = level[:, None] * distribution[:, -1:]
    # Strictly above, so that a token of probability 0 is never drawn.
    sample = torch.searchsorted(distribution, threshold, right=True).squeeze(1)
    sample = sample.masked_fill(~distribution[:, -1].isfinite(), 0)
    return sample.masked_fill(~counts, -1)


def gumbel_sample_ref(
    logits: torch.Tensor, temperature: float = 1.0, generator: torch.Generator | None = None
) -> torch.Tensor:
    """The same distribution drawn by its other definition, ``argmax(logits / T + Gumbel noise)``.

    Not the same bits: one random number for each logit instead of one for each row.

    Source: Gumbel 1954; Maddison, Tarlow and Minka 2014 (arXiv 1411.0030), §2.
    """
    noise = torch.empty(logits.shape, dtype=torch.float64, device=logits.device)
    noise.exponential_(generator=generator)
    return (logits.double() / temperature - noise.log()).argmax(-1)


def uniform_level(
    seed: int | torch.Tensor,
    rows: int,
    sample_index: torch.Tensor | None,
    position: torch.Tensor | None,
    device: torch.device,
) -> torch.Tensor:
    """The uniform number of each row: fp64 [N] in (0, 1)."""
    if sample_index is None:
        sample_index = torch.arange(rows, device=device)
    word, *_ = draw(
        seed,
        Stream.SAMPLE,
        sample_index=sample_index,
        position=torch.zeros_like(sample_index) if position is None else position,
    )
    return uniform(word)


def cross_entropy_of_rows(
    logits: torch.Tensor, target: torch.Tensor, counts: torch.Tensor, label_smoothing: float = 0.0
) -> torch.Tensor:
    """[N], 0 in rows that do not count, NaN in those whose target is not in [0, V)."""
    known = (target >= 0) & (target < logits.shape[1])
    loss = F.cross_entropy(
        logits,
        target.masked_fill(~(counts & known), 0),
        reduction="none",
        label_smoothing=label_smoothing,
    )
    loss = loss * torch.ones_like(loss).masked_fill(counts & ~known, float("nan"))
    return loss.masked_fill(~counts, 0.0)


def logits_of_rows(
    input: torch.Tensor,
    linear_weight: torch.Tensor,
    linear_bias: torch.Tensor | None,
    counts: torch.Tensor,
) -> torch.Tensor:
    """[N, V]; fp32, or fp64 for fp64 inputs."""
    # An ignored row may be NaN, and 0 * NaN is NaN.
    rows = input.masked_fill(~counts[:, None], 0.0)
    bias = None if linear_bias is None else linear_bias.to(rows.dtype)
    logits = F.linear(rows, linear_weight.to(rows.dtype), bias)
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
