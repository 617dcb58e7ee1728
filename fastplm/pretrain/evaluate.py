"""Losses and detection on text that was held out of the training."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from fastplm.models._heads import MaskedLM, SequencePairPreTraining
from fastplm.nn._rows import IGNORE_INDEX, labelled_positions
from fastplm.pretrain.trainer import DETECTION_COUNTS, detection
from fastplm.run.losses import (
    PAIR_LABELS,
    check_counts_all_batches,
    counted_labels,
    pair_logits,
    summed,
    tokens_and_sequences,
)

#: Rows whose logits are in memory at once.
_ROWS = 1024
#: Tokens that are counted at most, in either text.
_COUNTED = 1 << 24


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
        of packed rows the sequences in them; a loss that nothing has a label for is left out; of a
        masked model, ELECTRA's generator too, ``mlm_accuracy``: the share of the masked tokens that
        it finds most probable;
        for ELECTRA also ``rtd_loss`` and ``detection``'s values, and under "words" those of
        ``detection_at_base_rate`` for the tokens that could have been replaced, or, where its
        discriminator predicts tokens, ``discriminator_mlm_loss``; with pairs of segments also
        ``next_sentence_loss`` and ``next_sentence_accuracy``, or the same of ``sentence_order``;
        where it predicts all tokens, ``discriminator_chosen_loss``, the loss of its softmax alone,
        without copies, over the tokens that the generator had to predict; of an encoder-decoder
        ``encoder_similarity``, the mean cosine of any two tokens' encoder outputs (near 1 the
        encoder gives all tokens one output, and the decoder ignores it), and ``missing_share``, the
        share of the labels that are not in the source: the others can be copied.

    Raises:
        ArgumentTypeError: a model that is not of fastplm.
    """
    check_counts_all_batches("evaluate", model)
    module: Any = model  # mypy takes the attributes of a module for tensors
    was_training, device = model.training, next(model.parameters()).device
    is_joint = hasattr(model, "discriminator")
    masked = module.generator if is_joint else module
    model.eval()
    sums: dict[str, float] = {}
    of_words: list[tuple[torch.Tensor, torch.Tensor]] = []
    encoded: list[torch.Tensor] = []

    def add(name: str, value: Any) -> None:
        sums[name] = sums.get(name, 0.0) + float(value)

    for batch in DataLoader(dataset, batch_size=batch_size, collate_fn=collator):
        batch = {
            name: value.to(device) if isinstance(value, torch.Tensor) else value
            for name, value in batch.items()
        }
        pair_labels = {name: batch.pop(name) for name in PAIR_LABELS if name in batch}
        # Divided by 1, the means are sums.
        ones: dict[str, Any] = {"num_items_in_batch": 1}
        joint = {"num_tokens_in_batch": 1, "output_replaced_ids": True}
        ones |= joint if is_joint else {"output_logits": False}
        with _kept_rows(masked) as rows:
            outputs = model(**batch, **ones)
        if rows:
            add("mlm_accuracy", _correct(masked, rows[0], batch))
        if outputs.get("encoder_last_hidden_state") is not None:
            encoded.append(_unit_sum(outputs["encoder_last_hidden_state"]))
            add("missing_share", _missing(batch))
        tokens, sequences = tokens_and_sequences(batch)
        add("samples", sequences)
        add("labels", counted_labels(model, batch["labels"]).ne(IGNORE_INDEX).sum())
        if not is_joint:
            add(token_loss, outputs["loss"])
        else:
            add("tokens", tokens)
        for name in ("mlm_loss", "rtd_loss", "discriminator_mlm_loss", *DETECTION_COUNTS):
            if name in outputs:
                add(name, outputs[name])
        predicts = "discriminator_mlm_loss" in outputs  # not in the first of two stages
        if predicts and module.config.objective == "all_tokens_mlm":
            add("discriminator_chosen_loss", _over_chosen(module, outputs["replaced_ids"], batch))
        if "rtd_loss" in outputs:
            of_words.append(_detected(module, outputs["replaced_ids"], batch, collator))
        for name, value in _of_pairs(outputs, pair_labels):
            add(name, value)
    model.train(was_training)

    result: dict[str, Any] = {"samples": int(sums["samples"])}

    def add_mean(name: str, count: str) -> None:
        if name in sums and sums[count] > 0:
            result[name] = sums[name] / sums[count]

    add_mean(token_loss, "labels")
    add_mean("mlm_accuracy", "labels")
    if "discriminator_mlm_loss" in sums:
        predicted = "tokens" if module.config.objective == "all_tokens_mlm" else "labels"
        add_mean("discriminator_mlm_loss", predicted)
        add_mean("discriminator_chosen_loss", "labels")
    if encoded:
        result["encoder_similarity"] = _similarity(encoded)
        add_mean("missing_share", "labels")
    if sums.get("total", 0) > 0:
        add_mean("rtd_loss", "total")
        result.update(detection(sums))
        scores, replaced = (torch.cat(part) for part in zip(*of_words, strict=True))
        result["words"] = detection_at_base_rate(scores.float(), replaced)
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


@contextmanager
def _kept_rows(model: Any) -> Iterator[list[torch.Tensor]]:
    """In this block the rows [P, 1, E] that the head of a masked model reads are kept."""
    rows: list[torch.Tensor] = []
    if not isinstance(model, MaskedLM | SequencePairPreTraining):
        yield rows
        return

    def keep(module: Any, given: Any, output: Any) -> None:
        rows.append(output.last_hidden_state)

    handle = model.base_model.register_forward_hook(keep)
    try:
        yield rows
    finally:
        handle.remove()


def _similarity(sums: list[torch.Tensor]) -> float:
    """The mean cosine of two tokens, ``(|sum u|^2 - n) / (n (n - 1))``, of all ``_unit_sum``."""
    *total, count = torch.stack(sums).sum(0).tolist()
    square = math.fsum(value * value for value in total)
    return (square - count) / max(count * (count - 1), 1.0)


def _correct(model: Any, rows: torch.Tensor, batch: dict[str, torch.Tensor]) -> int:
    """How many labels are the most probable tokens, by the rows that the head has read."""
    labels, positions = batch["labels"].flatten(), batch.get("masked_positions")
    if positions is None:
        positions = labelled_positions(batch["labels"])
    used = positions >= 0
    transform, decoder = model._head()
    rows = rows.to(next(model.parameters()).dtype)  # under autocast they are of another one
    correct = 0
    for part, wanted in zip(
        rows[: len(used), 0][used].split(_ROWS), labels[positions[used]].split(_ROWS), strict=True
    ):
        logits = decoder(part if transform is None else transform(part))
        correct += int((logits.argmax(-1) == wanted).sum())
    return correct


def ngram_losses(train: np.ndarray, held_out: np.ndarray, vocab_size: int) -> dict[str, float]:
    """How well counts of a training text predict a held-out text: what a model has to beat.

    ``p(w) = (c(w) + 1) / (N + V)`` and
    ``p(w | v) = (c(v, w) + t(v) p(w)) / (c(v) + t(v))``, where t(v) is the number of different
    tokens that follow v. The first token of the held-out text has no one before it.

    Args:
        train: int [N], the token ids of the training text; the last 2^24 are counted.
        held_out: int [M], two or more; the first 2^24 count.
        vocab_size: V.

    Returns:
        ``unigram_loss`` and ``bigram_loss``, the mean of ``-log p`` in nats a token.

    Source: Witten and Bell 1991 ("The Zero-Frequency Problem"), method C; Chen and Goodman 1998.
    """
    train, held_out = train[-_COUNTED:].astype(np.int64), held_out[:_COUNTED].astype(np.int64)
    alone = (np.bincount(train, minlength=vocab_size) + 1) / (len(train) + vocab_size)
    pairs, counts = np.unique(train[:-1] * vocab_size + train[1:], return_counts=True)
    before = pairs // vocab_size
    follow = np.bincount(before, weights=counts, minlength=vocab_size)
    different = np.bincount(before, minlength=vocab_size)
    first, second = held_out[:-1], held_out[1:]
    wanted = first * vocab_size + second
    place = np.searchsorted(pairs, wanted).clip(max=max(len(pairs) - 1, 0))
    seen = np.where(pairs[place] == wanted, counts[place], 0) if len(pairs) else 0
    # What nothing followed has the probabilities of single tokens.
    kinds = np.maximum(different[first], 1)
    together = (seen + kinds * alone[second]) / (follow[first] + kinds)
    return {
        "unigram_loss": float(-np.log(alone[held_out]).mean()),
        "bigram_loss": float(-np.log(together).mean()),
    }


def _detected(
    model: Any, replaced_ids: torch.Tensor, batch: dict[str, torch.Tensor], collator: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """A discriminator's logits [N] of the tokens that could be replaced, and which of them are.

    One that learns of the chosen tokens alone (ELECTRA 15 %) is judged by these.
    """
    chosen = batch["labels"] != IGNORE_INDEX
    originals = batch["labels"].where(chosen, batch["input_ids"])
    special = torch.tensor(collator.tokenizer.all_special_ids, device=originals.device)
    words = ~torch.isin(originals, special) & batch["attention_mask"].bool()
    if model.config.objective == "rtd_masked":
        words &= chosen
    inputs = {"input_ids": replaced_ids, "attention_mask": batch["attention_mask"]}
    scores = model.discriminator(**inputs).logits
    return scores[words].cpu(), (replaced_ids != originals)[words].cpu()


def _of_pairs(outputs: Any, labels: dict[str, torch.Tensor]) -> Iterator[tuple[str, Any]]:
    """The summed loss of pairs of segments, and the right answers; nothing without a head."""
    answers = pair_logits(outputs) if labels else None
    if answers is None:
        return
    for label, values in labels.items():
        yield f"{PAIR_LABELS[label]}_loss", summed(answers, values)
        yield f"{PAIR_LABELS[label]}_accuracy", (answers.argmax(-1) == values).sum()


def _over_chosen(
    model: Any, replaced_ids: torch.Tensor, batch: dict[str, torch.Tensor]
) -> torch.Tensor:
    """The summed loss of All-Tokens MLM over the chosen tokens, without its copy mechanism.

    With it most of the loss is the surprise that a token was replaced. That has nothing to do with
    the language, and a unigram or a bigram has no such part.
    """
    chosen = batch["labels"] != IGNORE_INDEX
    inputs = {"input_ids": replaced_ids, "attention_mask": batch["attention_mask"]}
    hidden = model.discriminator.base_model(**inputs).last_hidden_state
    loss: torch.Tensor = model._predict(hidden[chosen], batch["labels"][chosen], reduction="sum")
    return loss


def _missing(batch: dict[str, torch.Tensor]) -> int:
    """How many labels [B, S] are not among the tokens [B, T] of their source, each used once."""
    sources, labels = batch["input_ids"], batch["labels"]
    size = int(max(sources.max(), labels.max())) + 1

    def counts(ids: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        rows = size * torch.arange(len(ids), device=ids.device)[:, None]
        return torch.bincount((rows + ids)[seen], minlength=size * len(ids))

    seen = batch.get("attention_mask", torch.ones_like(sources)).bool()
    lacking = counts(labels, labels != IGNORE_INDEX) - counts(sources, seen)
    return int(lacking.clamp(min=0).sum())


def _unit_sum(states: torch.Tensor) -> torch.Tensor:
    """[E + 1]: the sum of the unit vectors of states [B, T, E], and their number; those of padding
    are zeros, and do not count."""
    units = torch.nn.functional.normalize(states.flatten(0, 1).double(), dim=-1)
    return torch.cat([units.sum(0), units.any(-1).sum()[None]])
