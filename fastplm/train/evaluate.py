"""Losses and detection on text that was held out of the training."""

from __future__ import annotations

import math
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
        ``mlm_loss`` (nats a masked token; not of a unigram generator) and the number of samples;
        for ELECTRA also ``rtd_loss`` and ``detection``'s values, and under "words" those of
        ``detection_at_base_rate`` for the tokens that could have been replaced, or, where its
        discriminator predicts tokens, ``discriminator_mlm_loss``; with next-sentence pairs
        also ``next_sentence_loss`` and ``next_sentence_accuracy``.
    """
    module: Any = model  # mypy takes the attributes of a module for tensors
    was_training, device = model.training, next(model.parameters()).device
    model.eval()
    sums: dict[str, float] = {}
    word_scores: list[torch.Tensor] = []
    replaced_words: list[torch.Tensor] = []

    def add(name: str, value: Any) -> None:
        sums[name] = sums.get(name, 0.0) + float(value)

    for batch in DataLoader(dataset, batch_size=batch_size, collate_fn=collator):
        words = _could_be_replaced(batch, collator)
        batch = {name: value.to(device) for name, value in batch.items()}
        pair_labels = batch.pop("next_sentence_label", None)
        # Divided by 1, the model's means are sums.
        outputs = model(
            **batch,
            num_items_in_batch=1,
            **({"num_tokens_in_batch": 1, "output_replaced_ids": True} if _is_joint(model) else {}),
        )
        add("samples", len(batch["input_ids"]))
        add("labels", batch["labels"].ne(-100).sum())
        add("tokens", batch["attention_mask"].sum())
        if not _is_joint(model):
            add("mlm_loss", outputs["loss"])
        for name in ("mlm_loss", "rtd_loss", "discriminator_mlm_loss", *DETECTION_COUNTS):
            if name in outputs:
                add(name, outputs[name])
        if "rtd_loss" in outputs:
            replaced_ids = outputs["replaced_ids"]
            scores = module.discriminator(replaced_ids, batch["attention_mask"]).logits
            word_scores.append(scores.cpu()[words])
            replaced_words.append((replaced_ids.cpu() != _originals(batch).cpu())[words])
        if pair_labels is not None:
            scores = outputs["seq_relationship_logits"].float()
            add(
                "next_sentence_loss",
                torch.nn.functional.cross_entropy(scores, pair_labels, reduction="sum"),
            )
            add("next_sentence_accuracy", (scores.argmax(-1) == pair_labels).sum())
    model.train(was_training)

    result: dict[str, Any] = {"samples": int(sums["samples"])}
    if "mlm_loss" in sums:
        result["mlm_loss"] = sums["mlm_loss"] / sums["labels"]
    if "discriminator_mlm_loss" in sums:
        predicted = "tokens" if module.config.objective == "all_tokens_mlm" else "labels"
        result["discriminator_mlm_loss"] = sums["discriminator_mlm_loss"] / sums[predicted]
    if "rtd_loss" in sums:
        result["rtd_loss"] = sums["rtd_loss"] / sums["total"]
        result.update(detection(sums))
        result["words"] = detection_at_base_rate(
            torch.cat(word_scores).float(), torch.cat(replaced_words)
        )
    for name in ("next_sentence_loss", "next_sentence_accuracy"):
        if name in sums:
            result[name] = sums[name] / sums["samples"]
    return result


def detection_at_base_rate(scores: torch.Tensor, replaced: torch.Tensor) -> dict[str, float]:
    """How well replaced tokens are told from originals, whatever the share of the two.

    Of the tokens six in seven are original, so a weak detector best answers "original" always, and
    its accuracy says nothing. Here a token counts as found if its probability is above the share of
    replaced tokens, and the loss is held against that of the best constant answer, which is this
    share. Always answering "original" has balanced accuracy 0.5, and so has every constant.

    Args:
        scores: fp32 [N], logits of "replaced".
        replaced: bool [N].

    Returns:
        Precision and recall of the replaced class, balanced accuracy and its standard error, the
        cross-entropy and that of the best constant answer, in nats.
    """
    share = replaced.double().mean().item()
    found = scores.double().sigmoid() > share
    positives, negatives = replaced.sum().item(), (~replaced).sum().item()
    recall = (found & replaced).sum().item() / max(positives, 1)
    specificity = (~found & ~replaced).sum().item() / max(negatives, 1)
    variance = recall * (1 - recall) / max(positives, 1)
    variance += specificity * (1 - specificity) / max(negatives, 1)
    loss = torch.nn.functional.binary_cross_entropy_with_logits(scores, replaced.float())
    entropy = -sum(p * math.log(p) for p in (share, 1 - share) if p > 0)
    return {
        "share_replaced": share,
        "precision": (found & replaced).sum().item() / max(found.sum().item(), 1),
        "recall": recall,
        "balanced_accuracy": (recall + specificity) / 2,
        "balanced_accuracy_error": variance**0.5 / 2,
        "loss": loss.item(),
        "loss_of_best_constant": entropy,
    }


def _originals(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.where(batch["labels"] == -100, batch["input_ids"], batch["labels"])


def _could_be_replaced(batch: dict[str, torch.Tensor], collator: Any) -> torch.Tensor:
    special = torch.tensor(collator.tokenizer.all_special_ids)
    return ~torch.isin(_originals(batch), special) & batch["attention_mask"].bool()


def _is_joint(model: torch.nn.Module) -> bool:
    return hasattr(model, "discriminator")
