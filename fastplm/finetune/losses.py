"""What a fine-tuning learns beside the loss of its model's class."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.loss.loss_utils import ForSequenceClassificationLoss

from fastplm import ops
from fastplm.finetune.settings import FinetuneArguments
from fastplm.models._heads import shifted
from fastplm.nn._rows import IGNORE_INDEX, batch_share

#: The logit of what is outside of a text: its probability is 0.
OUTSIDE = torch.finfo(torch.float32).min


def in_both_orders(
    model: Any,
    *,
    labels: Tensor | None = None,
    num_items_in_batch: int | Tensor | None = None,
    output_hidden_states: bool = False,
    unpad: bool | None = None,
    **batch: Tensor,
) -> dict[str, Any]:
    """Classify pairs of texts, given in both orders [B, 2, T], by the sum of their two states.

    The code adds the logits of the two orders. Their sum equals the logits of the summed states, as
    the classifier of a GPT is linear and has no bias.

    Source: Radford et al. 2018, §3.3, Similarity.
    """
    outputs = model(
        **{name: value.flatten(0, 1) for name, value in batch.items()},
        output_hidden_states=output_hidden_states,
        unpad=unpad,
    )
    logits = outputs["logits"].unflatten(0, (-1, 2)).sum(1)  # [B, labels]
    loss = None
    if labels is not None:
        config = getattr(model, "module", model).config
        loss = ForSequenceClassificationLoss(labels, logits, config)
        loss = loss * batch_share(labels, num_items_in_batch)
    return {"loss": loss, "logits": logits, "hidden_states": outputs.get("hidden_states")}


def labels_of(batch: dict[str, Any]) -> Tensor | None:
    """What the mean of a batch's loss is taken over, if it has labels."""
    return batch.get("labels", batch.get("mc_labels"))


def with_language_model(
    model: Any, batch: dict[str, Any], weight: float, run: Callable[..., Any]
) -> Any:
    """The outputs of ``run``, with ``weight`` times a language-model loss added to their loss.

    Every token is predicted from the tokens before it. No language-model head is needed: the token
    embeddings of a GPT are also the weight of its output projection.

    Source: Radford et al. 2018, §3.2, equation 5.
    """
    labels = labels_of(batch)
    if labels is None:
        return run(model, **batch)
    outputs = run(model, **batch, output_hidden_states=True, unpad=True)
    ids, kept = batch["input_ids"], batch["attention_mask"].bool()
    targets = shifted(ids.masked_fill(~kept, IGNORE_INDEX).flatten(0, -2))
    assert targets is not None
    table = getattr(model, "module", model).get_input_embeddings().weight
    loss = ops.linear_cross_entropy(
        outputs["hidden_states"][-1].flatten(0, -2), table, targets.flatten()
    )
    share = batch_share(labels, batch.get("num_items_in_batch"))
    outputs["loss"] = outputs["loss"] + weight * share * loss
    return outputs


def of_batch(logits: Sequence[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """The logits of a teacher for each feature, padded to those of a batch."""
    pad = torch.nn.utils.rnn.pad_sequence
    return tuple(pad(list(each), True, OUTSIDE) for each in zip(*logits, strict=True))


def with_teacher(
    args: FinetuneArguments,
    outputs: Any,
    pairs: Sequence[tuple[Tensor, Tensor]],
    batch: dict[str, Any],
    distance: Callable[[Tensor, Tensor, dict[str, Any]], Tensor],
) -> Any:
    """The outputs of a model, whose loss becomes ``(1 - A) loss + A soft``.

    ``soft`` is the mean of ``distance``, see ``Task.distance``, over ``pairs``.

    Args:
        args: ``teacher_weight`` is A.
        outputs: of the model, with its loss.
        pairs: the logits of the model and those of the teacher.
        batch: the inputs of the model.
        distance: of two tensors of logits in a batch.

    Source: Hinton et al. 2015 (arXiv 1503.02531), §2; Sanh et al. 2019 (arXiv 1910.01108), §3
        (the second step); Jiao et al. 2020 (arXiv 1909.10351), equation 10, which has A = 1 and
        T = 1.
    """
    labels = labels_of(batch)
    soft: Any = 0.0
    for ours, theirs in pairs:
        ours = ours.to(torch.promote_types(ours.dtype, torch.float32))
        soft = soft + distance(ours, theirs, batch) / len(pairs)
    share = 1.0 if labels is None else batch_share(labels, batch.get("num_items_in_batch"))
    weight = args.teacher_weight
    outputs["loss"] = (1 - weight) * outputs["loss"] + weight * share * soft
    return outputs


def divergence(
    student: Tensor, teacher: Tensor, temperature: float, counted: Tensor | None = None
) -> Tensor:
    """The mean of ``T^2 KL(teacher || student)`` over rows, or those counted; [..., classes]."""
    ours, theirs = (each.div(temperature).log_softmax(-1) for each in (student, teacher))
    rows = F.kl_div(ours, theirs, reduction="none", log_target=True).sum(-1) * temperature**2
    if counted is None:
        return rows.mean()
    return rows.where(counted, 0.0).sum() / counted.sum().clamp(min=1)
