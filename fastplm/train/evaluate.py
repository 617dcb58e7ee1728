"""Losses and detection on text that was held out of the training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from fastplm.train.trainer import DETECTION_COUNTS, detection


@torch.no_grad()
def evaluate(
    model: torch.nn.Module, dataset: Dataset, collator: Callable, batch_size: int
) -> dict[str, Any]:
    """The mean losses of a model in evaluation mode.

    Args:
        model: ``BertForMaskedLM``, ``BertForPreTraining`` or ``ElectraForJointPreTraining``.
        dataset: of samples for the collator.
        collator: ``DataCollatorForMaskedTokens``.
        batch_size: samples at once.

    Returns:
        ``mlm_loss`` (nats a masked token) and the number of samples; for ELECTRA also ``rtd_loss``
        and ``detection``'s values; with next-sentence pairs also ``next_sentence_loss`` and
        ``next_sentence_accuracy``.
    """
    was_training, device = model.training, next(model.parameters()).device
    model.eval()
    sums: dict[str, float] = {}

    def add(name: str, value: Any) -> None:
        sums[name] = sums.get(name, 0.0) + float(value)

    for batch in DataLoader(dataset, batch_size=batch_size, collate_fn=collator):
        batch = {name: value.to(device) for name, value in batch.items()}
        pair_labels = batch.pop("next_sentence_label", None)
        # Divided by 1, the model's means are sums.
        outputs = model(
            **batch,
            num_items_in_batch=1,
            **({"num_tokens_in_batch": 1} if _is_joint(model) else {}),
        )
        add("samples", len(batch["input_ids"]))
        add("labels", batch["labels"].ne(-100).sum())
        add("tokens", batch["attention_mask"].sum())
        add("mlm_loss", outputs.get("mlm_loss", outputs["loss"]))
        for name in ("rtd_loss", *DETECTION_COUNTS):
            if name in outputs:
                add(name, outputs[name])
        if pair_labels is not None:
            scores = outputs["seq_relationship_logits"].float()
            add(
                "next_sentence_loss",
                torch.nn.functional.cross_entropy(scores, pair_labels, reduction="sum"),
            )
            add("next_sentence_accuracy", (scores.argmax(-1) == pair_labels).sum())
    model.train(was_training)

    result = {"samples": int(sums["samples"]), "mlm_loss": sums["mlm_loss"] / sums["labels"]}
    if "rtd_loss" in sums:
        result["rtd_loss"] = sums["rtd_loss"] / sums["tokens"]
        result.update(detection(sums))
    for name in ("next_sentence_loss", "next_sentence_accuracy"):
        if name in sums:
            result[name] = sums[name] / sums["samples"]
    return result


def _is_joint(model: torch.nn.Module) -> bool:
    return hasattr(model, "discriminator")
