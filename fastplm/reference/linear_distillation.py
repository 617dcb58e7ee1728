"""Reference of ``ops.linear_distillation``: the specification, in plain differentiable PyTorch."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from fastplm.reference._reduce import reduce_loss
from fastplm.reference.linear_cross_entropy import cross_entropy_of_rows, logits_of_rows


class LinearDistillation(NamedTuple):
    """A loss on soft targets, and its two parts for the log.

    Args:
        loss: ``distillation_weight * temperature**2 * distillation + cross_entropy_weight *
            cross_entropy``, the only one of the three with a gradient.
        distillation: the divergence itself, without weight and without ``temperature**2``.
        cross_entropy: of the targets at temperature 1, without weight; 0 where none are given.

    All are [] or, with ``reduction="none"``, [N].
    """

    loss: torch.Tensor
    distillation: torch.Tensor
    cross_entropy: torch.Tensor


def linear_distillation_ref(
    input: torch.Tensor,
    linear_weight: torch.Tensor,
    teacher_input: torch.Tensor,
    teacher_weight: torch.Tensor,
    target: torch.Tensor | None = None,
    *,
    linear_bias: torch.Tensor | None = None,
    teacher_bias: torch.Tensor | None = None,
    temperature: float = 1.0,
    divergence: str = "forward_kl",
    beta: float = 0.5,
    distillation_weight: float = 1.0,
    cross_entropy_weight: float = 0.0,
    mask: torch.Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    normalizer: torch.Tensor | None = None,
) -> LinearDistillation:
    """A divergence of two softmaxes over the vocabulary, as ``ops.linear_distillation`` defines it.

    Args: those of ``ops.linear_distillation``; the teacher's are constants.
    """
    counts = rows_chosen(input, target, mask, ignore_index) != ignore_index
    logits = logits_of_rows(input, linear_weight, linear_bias, counts)
    with torch.no_grad():
        teacher = logits_of_rows(teacher_input, teacher_weight, teacher_bias, counts)
        log_p = (teacher.to(logits.dtype) / temperature).log_softmax(1)
    log_q = (logits / temperature).log_softmax(1)
    distilled = divergence_of_rows(log_p, log_q, divergence, beta)
    weights = distillation_weight * temperature**2, cross_entropy_weight
    return _combined(logits, distilled, target, counts, weights, reduction, normalizer)


def linear_distillation_topk_ref(
    input: torch.Tensor,
    linear_weight: torch.Tensor,
    teacher_indices: torch.Tensor,
    teacher_probabilities: torch.Tensor,
    target: torch.Tensor | None = None,
    *,
    linear_bias: torch.Tensor | None = None,
    renormalize: bool = True,
    temperature: float = 1.0,
    distillation_weight: float = 1.0,
    cross_entropy_weight: float = 0.0,
    mask: torch.Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    normalizer: torch.Tensor | None = None,
) -> LinearDistillation:
    """The forward KL to given probabilities, as ``ops.linear_distillation_topk`` defines it.

    Args: those of ``ops.linear_distillation_topk``. A row that counts and has an index outside
        [0, V) is NaN.
    """
    counts = rows_chosen(input, target, mask, ignore_index) != ignore_index
    logits = logits_of_rows(input, linear_weight, linear_bias, counts)
    p = probabilities_of_rows(teacher_probabilities, counts, renormalize, logits.dtype)
    known = (teacher_indices >= 0) & (teacher_indices < logits.shape[1])
    indices = teacher_indices.masked_fill(~known, 0)
    log_q = (logits / temperature).log_softmax(1).gather(1, indices)
    log_q = log_q * torch.ones_like(p).masked_fill(~known & (p != 0), float("nan"))
    distilled = _expected(p, p.log() - log_q)
    weights = distillation_weight * temperature**2, cross_entropy_weight
    return _combined(logits, distilled, target, counts, weights, reduction, normalizer)


def rows_chosen(
    input: torch.Tensor, target: torch.Tensor | None, mask: torch.Tensor | None, ignore_index: int
) -> torch.Tensor:
    """int64 [N]: ``ignore_index`` in rows that do not count, else the target, or some number."""
    if target is None:
        target = torch.full((input.shape[0],), ~ignore_index, device=input.device)
    return target if mask is None else target.masked_fill(~mask, ignore_index)


def probabilities_of_rows(
    probabilities: torch.Tensor, counts: torch.Tensor, renormalize: bool, dtype: torch.dtype
) -> torch.Tensor:
    """[N, K] in ``dtype``, 0 in rows that do not count."""
    probabilities = probabilities.detach().to(dtype).masked_fill(~counts[:, None], 0.0)
    if not renormalize:
        return probabilities
    total = probabilities.sum(1, keepdim=True)
    return probabilities / total.masked_fill(total == 0, 1.0)


def divergence_of_rows(
    log_p: torch.Tensor, log_q: torch.Tensor, divergence: str, beta: float
) -> torch.Tensor:
    """[N], of the teacher's log-probabilities [N, V] and the student's."""
    divergence = kl_of_limit(divergence, beta)
    if divergence == "forward_kl":
        return _expected(log_p.exp(), log_p - log_q)
    if divergence == "reverse_kl":
        return _expected(log_q.exp(), log_q - log_p)
    # A word that neither gives any probability takes no part; -inf would have no gradient.
    nowhere = log_p.isneginf() & log_q.isneginf()
    log_m = torch.logaddexp(
        log_p.masked_fill(nowhere, 0.0) + math.log(beta),
        log_q.masked_fill(nowhere, 0.0) + math.log1p(-beta),
    )
    p, q = log_p.exp(), log_q.exp()
    return beta * _expected(p, log_p - log_m) + (1 - beta) * _expected(q, log_q - log_m)


def kl_of_limit(divergence: str, beta: float) -> str:
    """The divergence that "js" stands for at the ends of ``beta``."""
    if divergence != "js":
        return divergence
    return {0.0: "forward_kl", 1.0: "reverse_kl"}.get(beta, "js")


def _expected(weight: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """[N], the sum of ``value`` by these probabilities; 0 times an infinite value is 0."""
    return (weight * value.masked_fill(weight == 0, 0.0)).sum(1)


def _combined(
    logits: torch.Tensor,
    distillation: torch.Tensor,
    target: torch.Tensor | None,
    counts: torch.Tensor,
    weights: tuple[float, float],
    reduction: str,
    normalizer: torch.Tensor | None,
) -> LinearDistillation:
    """The weighted sum and its parts, from the divergence of all rows [N]."""
    distillation = distillation.masked_fill(~counts, 0.0)
    cross_entropy = torch.zeros_like(distillation)
    if target is not None:
        cross_entropy = cross_entropy_of_rows(logits, target, counts)
    loss = torch.zeros_like(distillation)
    # A weight of 0 takes out even what is infinite.
    for weight, part in zip(weights, (distillation, cross_entropy), strict=True):
        if weight != 0:
            loss = loss + weight * part
    parts = loss, distillation.detach(), cross_entropy.detach()
    return LinearDistillation(*(reduce_loss(part, counts, reduction, normalizer) for part in parts))
