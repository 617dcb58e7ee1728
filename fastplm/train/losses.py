"""The losses of classes that know their own batch alone, over all that one optimizer step sees.

Most of Transformers' classes (RoBERTa, ALBERT, T5, BART among them) take any keyword, so that its
Trainer hands them ``num_items_in_batch`` and leaves the rest to them; but they divide by the labels
of their batch regardless. Accumulated batches would add up to so many times the loss, and batches
of few labels would weigh as much as those of many. So their losses are made of their logits here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

#: For each label of a pair: the name of its loss, and the logits that answer it.
PAIR_LABELS = {
    "next_sentence_label": ("next_sentence", "seq_relationship_logits"),
    "sentence_order_label": ("sentence_order", "sop_logits"),
}


def counts_all_batches(model: nn.Module) -> bool:
    """Whether a model divides its own loss by ``num_items_in_batch``, as those of fastplm do."""
    return "num_items_in_batch" in inspect.signature(type(model).forward).parameters


def counted_labels(model: Any, labels: Tensor) -> Tensor:
    """The labels that count: all, or all but the first column where the model shifts them."""
    return labels[..., 1:] if _shifts_labels(model) else labels


def outputs_with_loss(
    call: Callable[..., Any],
    model: Any,
    *,
    labels: Tensor,
    num_items_in_batch: int | Tensor = 1,
    num_sequences_in_batch: int | Tensor = 1,
    sentence_order_label: Tensor | None = None,
    **inputs: Any,
) -> dict[str, Any]:
    """A model's outputs and its share of the loss of a step.

    Args:
        call: the model, or what it is wrapped in.
        model: the model itself.
        labels: int64 [B, T], -100 = none.
        num_items_in_batch: labels of the step, over all its batches and processes.
        num_sequences_in_batch: rows of it.
        sentence_order_label: int64 [B].
        inputs: what else the batch has; what the model does not take is left out.

    Returns:
        The outputs and ``loss``; with pairs also its parts ``mlm_loss`` and
        ``sentence_order_loss``.
    """
    taken = inspect.signature(type(model).forward).parameters
    inputs = {name: value for name, value in inputs.items() if name in taken}
    if "use_cache" in taken:
        inputs["use_cache"] = False
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(labels)
    outputs = dict(call(**inputs))
    logits = outputs["logits"] if "logits" in outputs else outputs["prediction_logits"]
    if _shifts_labels(model):
        logits = logits[:, :-1]
    token_loss = summed(logits, counted_labels(model, labels)) / num_items_in_batch
    if sentence_order_label is None:
        return {**outputs, "loss": token_loss}
    pair_loss = summed(outputs["sop_logits"], sentence_order_label) / num_sequences_in_batch
    return {
        **outputs,
        "loss": token_loss + pair_loss,
        "mlm_loss": token_loss,
        "sentence_order_loss": pair_loss,
    }


def summed(logits: Tensor, labels: Tensor) -> Tensor:
    """The cross-entropies of all labels but -100, added up in fp32."""
    logits = logits.reshape(-1, logits.shape[-1])
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits, labels.reshape(-1), reduction="sum")


def _shifts_labels(model: Any) -> bool:
    return getattr(model, "loss_type", None) == "ForCausalLM"
