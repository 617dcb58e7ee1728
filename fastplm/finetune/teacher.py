"""What a fine-tuning learns from a fine-tuned teacher beside its labels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastplm.finetune.settings import FinetuneArguments
from fastplm.nn._rows import IGNORE_INDEX, batch_share

#: The logit of what is outside of a text: its probability is 0.
_OUTSIDE = torch.finfo(torch.float32).min


def of_batch(logits: Sequence[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """The logits of a teacher for each feature, padded to those of a batch."""
    pad = torch.nn.utils.rnn.pad_sequence
    return tuple(pad(list(each), True, _OUTSIDE) for each in zip(*logits, strict=True))


def with_teacher(
    args: FinetuneArguments,
    names: Sequence[str],
    outputs: Any,
    teacher: tuple[Tensor, ...],
    batch: dict[str, Any],
) -> Any:
    """The outputs of a model, whose loss becomes ``(1 - A) loss + A soft``.

    ``soft`` is ``T^2 KL(teacher || student)`` of the probabilities at temperature T, the mean over
    what is classified (examples; labelled words; first and last tokens of answers). Scores of a
    regression are compared by their squared difference.

    Args:
        args: ``teacher_weight`` is A, ``teacher_temperature`` T.
        names: of the logits in ``outputs``.
        outputs: of the model, with its loss.
        teacher: its logits, in the order of ``names``.
        batch: the inputs of the model.

    Source: Hinton et al. 2015 (arXiv 1503.02531), §2; Sanh et al. 2019 (arXiv 1910.01108), §3
        (the second step); Jiao et al. 2020 (arXiv 1909.10351), equation 10, which has A = 1 and
        T = 1.
    """
    labels = batch.get("labels", batch.get("mc_labels"))
    soft: Any = 0.0
    for name, theirs in zip(names, teacher, strict=True):
        ours = outputs[name]
        ours = ours.to(torch.promote_types(ours.dtype, torch.float32))
        if args.task == "regression":
            soft = soft + (ours - theirs).square().mean()
            continue
        if args.task == "qa":
            ours = ours.masked_fill(~batch["attention_mask"].bool(), _OUTSIDE)
        counted = labels != IGNORE_INDEX if args.task == "tagging" and labels is not None else None
        soft = soft + _divergence(ours, theirs, args.teacher_temperature, counted) / len(names)
    share = 1.0 if labels is None else batch_share(labels, batch.get("num_items_in_batch"))
    weight = args.teacher_weight
    outputs["loss"] = (1 - weight) * outputs["loss"] + weight * share * soft
    return outputs


def _divergence(
    student: Tensor, teacher: Tensor, temperature: float, counted: Tensor | None
) -> Tensor:
    """The mean over rows of ``T^2 KL(teacher || student)``; logits [..., classes]."""
    ours, theirs = (each.div(temperature).log_softmax(-1) for each in (student, teacher))
    rows = F.kl_div(ours, theirs, reduction="none", log_target=True).sum(-1) * temperature**2
    if counted is None:
        return rows.mean()
    return rows.where(counted, 0.0).sum() / counted.sum().clamp(min=1)
