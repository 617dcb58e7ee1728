"""Losses and detection on text that was held out of the training."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from fastplm.train.losses import (
    PAIR_LABELS,
    check_counts_all_batches,
    counted_labels,
    pair_logits,
    summed,
    tokens_and_sequences,
)
from fastplm.train.trainer import DETECTION_COUNTS, detection


@torch.no_grad()
def evaluate(
    model: torch.nn.Module,
    dataset: Dataset,
    collator: Callable,
    batch_size: int,
    token_loss: str = "mlm_loss",
) -> dict[str, Any]:
    """The mean losses of a model of a pre-training in evaluation mode.

    ``token_loss`` is the name of the loss over tokens.

    Returns:
        The loss over tokens (nats a label; not of a unigram generator) and the number of samples,
        of packed rows the sequences in them; a loss that nothing has a label for is left out;
        for ELECTRA also ``rtd_loss`` and ``detection``'s values, and under "words" those of
        ``detection_at_base_rate`` for the tokens that could have been replaced, or, where its
        discriminator predicts tokens, ``discriminator_mlm_loss``; with pairs of segments also
        ``next_sentence_loss`` and ``next_sentence_accuracy``, or the same of ``sentence_order``.

    Raises:
        ArgumentTypeError: a model that is not of fastplm.
    """
    check_counts_all_batches("evaluate", model)
    module: Any = model  # mypy takes the attributes of a module for tensors
    was_training, device = model.training, next(model.parameters()).device
    model.eval()
    sums: dict[str, float] = {}
    word_scores: list[torch.Tensor] = []
    replaced_words: list[torch.Tensor] = []

    def add(name: str, value: Any) -> None:
        sums[name] = sums.get(name, 0.0) + float(value)

    for batch in DataLoader(dataset, batch_size=batch_size, collate_fn=collator):
        batch = {
            name: value.to(device) if isinstance(value, torch.Tensor) else value
            for name, value in batch.items()
        }
        pair_labels = {name: batch.pop(name) for name in PAIR_LABELS if name in batch}
        # Divided by 1, the means are sums.
        if _is_joint(model):
            ones = {"num_items_in_batch": 1, "num_tokens_in_batch": 1}
            outputs = model(**batch, **ones, output_replaced_ids=True)
        else:
            outputs = model(**batch, num_items_in_batch=1)
        tokens, sequences = tokens_and_sequences(batch)
        add("samples", sequences)
        add("labels", counted_labels(model, batch["labels"]).ne(-100).sum())
        if not _is_joint(model):
            add(token_loss, outputs["loss"])
        else:
            add("tokens", tokens)
        for name in ("mlm_loss", "rtd_loss", "discriminator_mlm_loss", *DETECTION_COUNTS):
            if name in outputs:
                add(name, outputs[name])
        if "rtd_loss" in outputs:
            words = _could_be_replaced(batch, collator).cpu()
            replaced_ids = outputs["replaced_ids"]
            scores = module.discriminator(replaced_ids, batch["attention_mask"]).logits
            word_scores.append(scores.cpu()[words])
            replaced_words.append((replaced_ids.cpu() != _originals(batch).cpu())[words])
        for label, values in pair_labels.items():
            name, answers = PAIR_LABELS[label], pair_logits(outputs)
            if answers is None:
                continue  # the model has no head for pairs
            add(f"{name}_loss", summed(answers, values))
            add(f"{name}_accuracy", (answers.argmax(-1) == values).sum())
    model.train(was_training)

    result: dict[str, Any] = {"samples": int(sums["samples"])}

    def add_mean(name: str, count: str) -> None:
        if name in sums and sums[count] > 0:
            result[name] = sums[name] / sums[count]

    add_mean(token_loss, "labels")
    if "discriminator_mlm_loss" in sums:
        predicted = "tokens" if module.config.objective == "all_tokens_mlm" else "labels"
        add_mean("discriminator_mlm_loss", predicted)
    if sums.get("total", 0) > 0:
        add_mean("rtd_loss", "total")
        result.update(detection(sums))
        result["words"] = detection_at_base_rate(
            torch.cat(word_scores).float(), torch.cat(replaced_words)
        )
    for pair in PAIR_LABELS.values():
        for name in (f"{pair}_loss", f"{pair}_accuracy"):
            add_mean(name, "samples")
    return result


def detection_at_base_rate(scores: torch.Tensor, replaced: torch.Tensor) -> dict[str, float]:
    """How well replaced tokens are told from originals, independent of their shares.

    Six in seven tokens are original, so a weak detector best answers "original" always, and
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
    originals = _originals(batch)
    special = torch.tensor(collator.tokenizer.all_special_ids, device=originals.device)
    return ~torch.isin(originals, special) & batch["attention_mask"].bool()


def _is_joint(model: torch.nn.Module) -> bool:
    return hasattr(model, "discriminator")
