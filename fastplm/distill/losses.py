"""The losses of knowledge distillation, each a sum over tokens or sequences.

The caller divides by what an optimizer step sees, so that accumulated batches and several processes
give the loss of one large batch.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

#: What a score is made of.
Pair = tuple[Tensor, Tensor]
#: The scores [sequences, H, T, T] that are held at once.
_SCORES_AT_ONCE = 1 << 22


def cosine_distance(student: Tensor, teacher: Tensor, mask: Tensor | None = None) -> Tensor:
    """``sum over tokens of 1 - cos(student, teacher)``.

    Args:
        student, teacher: [B, T, E].
        mask: bool [B, T], the tokens that count; None = all.

    Returns:
        fp32 [].

    Source: Sanh et al. 2019 (arXiv 1910.01108), §2.
    """
    return _sum(1 - F.cosine_similarity(_wide(student), _wide(teacher), dim=-1), mask)


def squared_distance(student: Tensor, teacher: Tensor, mask: Tensor | None = None) -> Tensor:
    """``sum over rows of mean over the width of (student - teacher)^2``; arguments as above.

    Source: Jiao et al. 2020 (arXiv 1909.10351), equations 8 and 9; Reimers and Gurevych 2020
    (arXiv 2004.09813), §3.
    """
    return _sum((_wide(student) - _wide(teacher)).square().mean(-1), mask)


def detection_divergence(
    student: Tensor, teacher: Tensor, temperature: float, mask: Tensor | None = None
) -> Tensor:
    """``sum over tokens of KL(teacher || student)`` of "was this token replaced?", times T^2.

    Args:
        student, teacher: [B, T], logits.
        temperature: T, which divides both.
        mask: as above.
    """
    student, teacher = _wide(student) / temperature, _wide(teacher) / temperature
    crossed = F.binary_cross_entropy_with_logits(student, teacher.sigmoid(), reduction="none")
    own = F.binary_cross_entropy_with_logits(teacher, teacher.sigmoid(), reduction="none")
    return _sum(crossed - own, mask) * temperature**2


def relation_divergence(
    student: Pair, teacher: Pair, heads: int, mask: Tensor | None = None
) -> Tensor:
    """``sum over tokens, mean over heads of KL(relation of the teacher || of the student)``.

    A relation is ``softmax(A B^T / sqrt(d))`` of a head, row by row: attention for queries and
    keys, and for A = B the relations of queries, keys or values. Neither model's [B, H, T, T] is
    kept: it is computed for some sequences at a time, with its gradient.

    Args:
        student, teacher: (A, B), [B, T, W] each; the widths W of the two models may differ.
        heads: H, the parts into which each width is split.
        mask: bool [B, T], the tokens; padding is neither a row nor a key.

    Returns:
        fp32 [] (fp64 for fp64); it can be differentiated once, for the student.

    Source: Wang et al. 2020 (arXiv 2002.10957), equations 6 to 10; Wang et al. 2021 (arXiv
    2012.15828), equations 4 to 6.
    """
    return _Scores.apply(*student, *teacher, mask, heads, _relation_rows)


def score_distance(student: Pair, teacher: Pair, heads: int, mask: Tensor | None = None) -> Tensor:
    """``sum over tokens, mean over heads and keys of (score of the student - of the teacher)^2``.

    A score is ``A B^T / sqrt(d)``, before the softmax; the rest is as in ``relation_divergence``.

    Source: Jiao et al. 2020 (arXiv 1909.10351), equation 7.
    """
    return _Scores.apply(*student, *teacher, mask, heads, _squared_rows)


def _wide(values: Tensor) -> Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))


def _sum(rows: Tensor, mask: Tensor | None) -> Tensor:
    return rows.sum() if mask is None else rows.where(mask, 0).sum()


class _Scores(torch.autograd.Function):
    """A distance of two models' scores; its gradient is made beside it, some sequences at a time.

    ``rows(student, teacher, keys)`` has the distance of each row [B, H, T] and the gradient of its
    sum for the student's scores [B, H, T, T]; ``keys`` is bool [B, 1, 1, T] or None.
    """

    @staticmethod
    def forward(
        ctx: Any,
        first: Tensor,
        second: Tensor,
        teacher_first: Tensor,
        teacher_second: Tensor,
        mask: Tensor | None,
        heads: int,
        rows: Any,
    ) -> Tensor:
        batch, seqlen, _ = first.shape
        step = max(1, _SCORES_AT_ONCE // max(heads * seqlen * seqlen, 1))
        total = _wide(first.new_zeros(()))
        wanted = any(ctx.needs_input_grad[:2])
        grads = (torch.empty_like(first), torch.empty_like(second)) if wanted else ()
        for begin in range(0, batch, step):
            part = slice(begin, begin + step)
            a, b = _heads(first[part], heads), _heads(second[part], heads)
            c, d = _heads(teacher_first[part], heads), _heads(teacher_second[part], heads)
            keys = None if mask is None else mask[part, None, None, :]
            distance, grad = rows(_scores(a, b), _scores(c, d), keys)
            if mask is not None:
                inside = mask[part, None, :]
                distance, grad = distance.where(inside, 0), grad.where(inside[..., None], 0)
            total = total + distance.sum() / heads
            if wanted:
                grad = (grad / (heads * a.shape[-1] ** 0.5)).to(a.dtype)
                for out, value in zip(grads, (grad @ b, grad.transpose(-1, -2) @ a), strict=True):
                    out[part] = value.transpose(1, 2).flatten(2)
        ctx.save_for_backward(*grads)
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        saved = ctx.saved_tensors or (None, None)
        grads = (None if each is None else grad.to(each.dtype) * each for each in saved)
        return *grads, *[None] * 5


def _heads(values: Tensor, heads: int) -> Tensor:
    """[B, T, W] -> [B, H, T, d]."""
    return values.unflatten(-1, (heads, -1)).transpose(1, 2)


def _scores(first: Tensor, second: Tensor) -> Tensor:
    """fp32 [B, H, T, T]."""
    return _wide(first @ second.transpose(-1, -2)) / first.shape[-1] ** 0.5


def _relation_rows(student: Tensor, teacher: Tensor, keys: Tensor | None) -> tuple[Tensor, Tensor]:
    if keys is not None:
        # Not minus infinity: a sequence may have no token at all.
        lowest = torch.finfo(student.dtype).min
        student, teacher = student.where(keys, lowest), teacher.where(keys, lowest)
    log_student, log_teacher = student.log_softmax(-1), teacher.log_softmax(-1)
    expected = log_teacher.exp()
    terms = expected * (log_teacher - log_student)
    if keys is not None:
        terms = terms.where(keys, 0)
    return terms.sum(-1), log_student.exp() - expected


def _squared_rows(student: Tensor, teacher: Tensor, keys: Tensor | None) -> tuple[Tensor, Tensor]:
    difference = student - teacher
    count: Any = student.shape[-1]
    if keys is not None:
        difference = difference.where(keys, 0)
        count = keys.sum(-1, keepdim=True).clamp(min=1)
    grad = 2 * difference / count
    return (difference * grad).sum(-1) / 2, grad
