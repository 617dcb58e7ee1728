"""Collators: lists of samples in, batches for the models out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from fastplm import ops
from fastplm._checks import check

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass
class DataCollatorForMaskedTokens:
    """Batches for masked language modelling, next-sentence prediction and ELECTRA.

    The drop-in for ``transformers.DataCollatorForLanguageModeling`` whose masks are a pure function
    of (seed, sample index): the same at any batch size, worker count and world size. Samples are
    dicts with ``input_ids`` and, where they have them, ``token_type_ids``,
    ``next_sentence_label`` and ``sample_index``. Without a ``sample_index`` one is drawn from
    torch's global generator, as the collator of Transformers draws its masks.

    Args:
        tokenizer: gives the ids of padding, mask and special tokens, and the vocabulary's size.
        seed: of the masks.
        mlm_probability: share of the maskable tokens that is chosen.
        mask_replace_prob: share of the chosen tokens that becomes ``[MASK]``.
        random_replace_prob: share of the chosen tokens that becomes a random token.
        max_predictions: most tokens chosen in one row; by default the share of a full row.
        block_size: rows are padded to this length; by default to the longest of the batch.

    Returns:
        A dict with ``input_ids`` (corrupted), ``attention_mask``, ``labels`` (int64 [B, T], -100
        where nothing was chosen), ``masked_positions`` (int64 [P], flat, -1 in unused slots),
        ``sample_index`` (int64 [B]) and, where the samples have them, ``token_type_ids`` and
        ``next_sentence_label``.

    Raises:
        ArgumentValueError: a sample is longer than ``block_size``.
    """

    tokenizer: PreTrainedTokenizerBase
    seed: int = 0
    mlm_probability: float = 0.15
    mask_replace_prob: float = 0.8
    random_replace_prob: float = 0.1
    max_predictions: int | None = None
    block_size: int | None = None

    def __post_init__(self) -> None:
        special = [i for i in self.tokenizer.all_special_ids if i is not None]
        self._special = torch.tensor(sorted(special), dtype=torch.int64)

    def __call__(self, samples: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
        input_ids = self._pad(samples, "input_ids", self.tokenizer.pad_token_id)
        real = self._pad([{"real": _ones(sample)} for sample in samples], "real", 0)
        if "sample_index" in samples[0]:
            sample_index = torch.tensor([int(sample["sample_index"]) for sample in samples])
        else:
            sample_index = torch.randint(1 << 62, (len(samples),))
        masked = ops.mask_tokens(
            input_ids,
            vocab_size=len(self.tokenizer),
            mask_token_id=self.tokenizer.mask_token_id,
            maskable=real.bool() & ~torch.isin(input_ids, self._special),
            mlm_probability=self.mlm_probability,
            mask_replace_prob=self.mask_replace_prob,
            random_replace_prob=self.random_replace_prob,
            max_predictions=self.max_predictions,
            sample_index=sample_index,
            seed=self.seed,
        )
        labels = torch.full_like(input_ids, -100)
        used = masked.positions >= 0
        labels.view(-1)[masked.positions[used]] = masked.labels[used]
        batch = {
            "input_ids": masked.input_ids,
            "attention_mask": real,
            "labels": labels,
            "masked_positions": masked.positions,
            "sample_index": sample_index,
        }
        if "token_type_ids" in samples[0]:
            batch["token_type_ids"] = self._pad(samples, "token_type_ids", 0)
        if "next_sentence_label" in samples[0]:
            batch["next_sentence_label"] = torch.tensor(
                [int(sample["next_sentence_label"]) for sample in samples]
            )
        return batch

    def _pad(self, samples: Sequence[dict[str, Any]], key: str, value: int) -> Tensor:
        rows = [torch.as_tensor(sample[key], dtype=torch.int64) for sample in samples]
        padded = pad_sequence(rows, batch_first=True, padding_value=value)
        if self.block_size is None:
            return padded
        missing = self.block_size - padded.shape[1]
        check(
            missing >= 0,
            "DataCollatorForMaskedTokens",
            key,
            f"a row of {padded.shape[1]} tokens",
            f"at most block_size = {self.block_size}",
            "Cut it, or raise block_size.",
        )
        return torch.nn.functional.pad(padded, (0, missing), value=value)


def _ones(sample: dict[str, Any]) -> Tensor:
    """Which tokens of a sample are real: all, or those its own attention mask names."""
    given = sample.get("attention_mask")
    return torch.ones(len(sample["input_ids"])) if given is None else torch.as_tensor(given)
