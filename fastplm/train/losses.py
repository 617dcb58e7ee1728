"""The losses over all batches of an optimizer step, for classes that divide by their own batch.

Most classes of Transformers (RoBERTa, ALBERT, T5 and BART, for example) accept any keyword. The
Trainer therefore passes ``num_items_in_batch`` and does not divide by it, and the class ignores it:
the loss of two accumulated batches would be twice too large. Here it is computed from the logits.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

#: For each label of a pair the name of its loss.
PAIR_LABELS = {
    "next_sentence_label": "next_sentence",
    "sentence_order_label": "sentence_order",
}
# The logits that answer it: of BERT and ALBERT, each of which can learn both labels.
_PAIR_LOGITS = ("seq_relationship_logits", "sop_logits")

# Where the sequences of a packed row lie; Transformers' classes have no parameters of these names.
_PACKED = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
# Causal models for Transformers, but their labels are not shifted.
_NOT_SHIFTED = {"XLMWithLMHeadModel", "XLNetLMHeadModel"}


def counts_all_batches(model: nn.Module) -> bool:
    """Whether a model divides its own loss by ``num_items_in_batch``, as those of fastplm do."""
    return "num_items_in_batch" in inspect.signature(type(model).forward).parameters


def shifts_labels(model: nn.Module) -> bool:
    """Whether the labels of a model are its tokens, each predicted from those before it.

    Not every class that does so says it by ``loss_type``: GPT-2's has none.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if getattr(model, "loss_type", None) == "ForCausalLM":
        return True
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return False
    names = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()) - _NOT_SHIFTED
    return any(base.__name__ in names for base in type(model).__mro__)


def counted_labels(model: Any, labels: Tensor) -> Tensor:
    """The labels that count: all, or all but the first column where the model shifts them."""
    return labels[..., 1:] if shifts_labels(model) else labels


def tokens_and_sequences(batch: Mapping[str, Any]) -> tuple[Tensor, int]:
    """How many tokens a batch has, padding left out, and how many sequences, packed or in rows."""
    ends = batch.get("cu_seq_lens_q")
    if ends is not None:
        return ends[-1].long(), len(ends) - 1
    mask = batch.get("attention_mask")
    tokens = torch.ones_like(batch["input_ids"]) if mask is None else mask
    return tokens.sum(), len(batch["input_ids"])


def outputs_with_loss(
    call: Callable[..., Any],
    model: Any,
    *,
    labels: Tensor,
    num_items_in_batch: int | Tensor = 1,
    num_sequences_in_batch: int | Tensor = 1,
    **inputs: Any,
) -> dict[str, Any]:
    """A model's outputs and its share of the loss of a step.

    Args:
        call: the model, or what it is wrapped in.
        model: the model itself.
        labels: int64 [B, T], -100 = none.
        num_items_in_batch: labels of the step, over all its batches and processes.
        num_sequences_in_batch: rows of it.
        inputs: what else the batch has, the labels of pairs among it, which its head for pairs
            answers whatever they say; what the model does not take is left out.

    Returns:
        The outputs and ``loss``; with pairs also its parts ``mlm_loss`` and
        ``next_sentence_loss`` or ``sentence_order_loss``.
    """
    parameters = inspect.signature(type(model).forward).parameters
    taken = set(parameters)
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        taken.update(_PACKED)  # they are handed down to the attention
    pair_labels = {name: inputs.pop(name) for name in PAIR_LABELS if name in inputs}
    inputs = {name: value for name, value in inputs.items() if name in taken}
    if "use_cache" in taken:
        inputs["use_cache"] = False
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(labels)
    outputs = dict(call(**inputs))
    logits = outputs["logits"] if "logits" in outputs else outputs["prediction_logits"]
    if shifts_labels(model):
        logits = logits[:, :-1]
    loss = summed(logits, counted_labels(model, labels)) / num_items_in_batch
    answers = pair_logits(outputs)
    parts = {"mlm_loss": loss} if pair_labels and answers is not None else {}
    for label, values in pair_labels.items():
        if answers is not None:
            part = summed(answers, values) / num_sequences_in_batch
            parts[f"{PAIR_LABELS[label]}_loss"] = part
            loss = loss + part
    return {**outputs, **parts, "loss": loss}


def pair_logits(outputs: Mapping[str, Any]) -> Tensor | None:
    """The logits [B, 2] of a model's pairs; None if it has no head for them."""
    return next((outputs[name] for name in _PAIR_LOGITS if name in outputs), None)


def summed(logits: Tensor, labels: Tensor) -> Tensor:
    """The cross-entropies of all labels but -100, added up in fp32."""
    logits = logits.reshape(-1, logits.shape[-1])
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits, labels.reshape(-1), reduction="sum")
