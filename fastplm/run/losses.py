"""What the losses of a pre-training are divided by, over all batches of an optimizer step."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastplm.errors import ArgumentTypeError, check

#: For each label of a pair the name of its loss.
PAIR_LABELS = {"next_sentence_label": "next_sentence", "sentence_order_label": "sentence_order"}
# The logits that answer it: of BERT and ALBERT, each of which can learn both labels.
_PAIR_LOGITS = ("seq_relationship_logits", "sop_logits")

# Causal models for Transformers, but their labels are not shifted.
_NOT_SHIFTED = {"XLMWithLMHeadModel", "XLNetLMHeadModel"}


def counts_all_batches(model: nn.Module) -> bool:
    """Whether a model divides its own loss by ``num_items_in_batch``, as those of fastplm do."""
    return "num_items_in_batch" in inspect.signature(type(model).forward).parameters


def check_counts_all_batches(where: str, model: nn.Module) -> None:
    """Check that a model is one of fastplm's, as its loss is to be added up over batches.

    Raises:
        ArgumentTypeError: it divides its loss by its own batch.
    """
    got = f"a {type(model).__name__}, which divides its loss by its own batch"
    expected = "a model of fastplm.models, which takes num_items_in_batch"
    fix = "Call fastplm.accelerate(model) first, or take the class of fastplm.models."
    check(counts_all_batches(model), where, "model", got, expected, fix, ArgumentTypeError)


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


def pair_logits(outputs: Mapping[str, Any]) -> Tensor | None:
    """The logits [B, 2] of a model's pairs; None if it has no head for them."""
    return next((outputs[name] for name in _PAIR_LOGITS if name in outputs), None)


def summed(logits: Tensor, labels: Tensor) -> Tensor:
    """The cross-entropies of all labels but -100, added up in fp32."""
    logits = logits.reshape(-1, logits.shape[-1])
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits, labels.reshape(-1), reduction="sum")
