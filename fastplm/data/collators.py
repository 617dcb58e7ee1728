"""Collators for masked and for causal language modelling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fastplm import ops
from fastplm.data._collate import Collator, positions_of, scatter_labels, without_full_mask
from fastplm.data.words import word_ids, word_starts
from fastplm.errors import DataError, FastplmError, check
from fastplm.ops.mask_tokens import mask_settings as check_settings

_PROBABILITIES = ("mlm_probability", "mask_replace_prob", "random_replace_prob")
#: What the collator hands on to the op.
_SETTINGS = (*_PROBABILITIES, "max_predictions", "sampling", "unit", "max_ngram")


@dataclass(eq=False)
class DataCollatorForMaskedTokens(Collator):
    """Batches for masked language modelling, next-sentence and sentence-order prediction, ELECTRA.

    Does the work of ``transformers.DataCollatorForLanguageModeling``, for samples that are dicts,
    with masks that are a pure function of (seed, epoch, sample index): the same at any batch size,
    worker count and world size, on the CPU and on a GPU, padded and packed.

    Args:
        tokenizer, seed, block_size, packed, position_offset, unpad: see ``Collator``.
        mlm_probability: share of the maskable tokens that is chosen.
        mask_replace_prob: share of the chosen tokens that becomes ``[MASK]``.
        random_replace_prob: share of the chosen tokens that becomes a random token.
        max_predictions: most tokens chosen in one row; by default the share of a full row.
        unit: what is chosen whole: "token", "word" or "ngram" (runs of words, ALBERT's).
        max_ngram: most words of a run.
        sampling: "exact", as BERT's authors, or "bernoulli", as Transformers.

    Returns:
        What ``Collator.pad`` returns, with ``input_ids`` corrupted and, beside them, ``labels``
        (int64, the shape of ``input_ids``, -100 where nothing was chosen) and ``masked_positions``
        (int64 [P], flat, -1 in unused slots), without ``special_tokens_mask``. Special tokens,
        those of a ``special_tokens_mask`` and padding are never chosen.

    Raises:
        ArgumentValueError: a sample is longer than ``block_size``, or a setting is of no use.
        DataError: the tokenizer has no mask token, or see ``Collator.pad``.

    Warns:
        UserWarning: more tokens should have been chosen than ``max_predictions``, see ``dropped``;
            or see ``Collator.pad``.
    """

    mlm_probability: float = 0.15
    mask_replace_prob: float = 0.8
    random_replace_prob: float = 0.1
    max_predictions: int | None = None
    unit: str = "token"
    max_ngram: int = 3
    sampling: str = "exact"

    op: ClassVar[str | None] = "mask_tokens"

    def __post_init__(self) -> None:
        super().__post_init__()
        # Looked up once: the properties of a tokenizer are slow.
        special = special_ids(self.tokenizer)
        self._vocab_size = len(self.tokenizer)
        self._mask_token_id = mask_token_id(type(self).__name__, self.tokenizer)
        self._padding_is_special = self._pad_token_id() in special
        self._check_settings(len(special))
        words = {} if self.unit == "token" else {"words": word_starts(self.tokenizer)}
        self.keep(special_ids=special, **words)

    def corrupt(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Choose and corrupt the tokens to predict."""
        batch = dict(batch)
        input_ids: Tensor = batch["input_ids"]
        maskable = self._maskable(batch, batch.pop("special_tokens_mask", None))
        constants = self.constants(input_ids.device)
        words = None if self.unit == "token" else word_ids(input_ids, constants["words"])
        row = 0 if self.packed else slice(None)
        masked = ops.mask_tokens(
            input_ids[row],
            maskable=None if maskable is None else maskable[row],
            special_ids=constants["special_ids"],
            word_ids=None if words is None else words[row],
            cu_seqlens=batch["cu_seq_lens_q"] if self.packed else None,
            sample_index=batch["sample_index"],
            seed=self.seed,
            step=self._epoch,
            **self._settings(),
        )
        self.count_dropped(masked.dropped, "Raise max_predictions.")
        batch["input_ids"] = masked.input_ids.view(input_ids.shape)
        batch["labels"] = scatter_labels(input_ids, masked.positions, masked.labels)
        batch["masked_positions"] = masked.positions
        return without_full_mask(batch)

    def _maskable(self, batch: dict[str, Any], special: Tensor | None) -> Tensor | None:
        """A mask of the tokens that may be chosen; None, the fastest, where their ids say so."""
        maskable = None if special is None else special == 0
        if self.packed or self._padding_is_special:  # what fills a packed row is in no sequence
            return maskable
        inside = batch["attention_mask"] != 0
        return inside if maskable is None else maskable & inside

    def _settings(self) -> dict[str, Any]:
        """The settings of the op, in the order in which it checks them."""
        ids = {"vocab_size": self._vocab_size, "mask_token_id": self._mask_token_id}
        return ids | {name: getattr(self, name) for name in _SETTINGS}

    def _check_settings(self, special_count: int) -> None:
        """Raise the errors of the op now, and with the name of the collator."""
        try:
            settings = self._settings().values()
            check_settings(1, 1, 1, special_count, self.unit != "token", *settings)
        except FastplmError as error:
            text = str(error).replace("mask_tokens", type(self).__name__, 1)
            raise type(error)(text) from None


@dataclass(eq=False)
class DataCollatorForCausalTokens(Collator):
    """Batches for causal language modelling: the labels are the tokens themselves.

    Args:
        tokenizer, seed, block_size, packed, position_offset, unpad: see ``Collator``; nothing is
            random here.

    Returns:
        What ``Collator.pad`` returns, without ``special_tokens_mask``, and ``labels`` (int64, the
        shape of ``input_ids``): -100 for padding and, in a packed row, for the first token of each
        sequence, which the token before it must not predict. The models of Transformers shift them.
        From packed ``position_ids`` a model with ``use_cache=False`` makes a mask [N, N], which is
        slow; it makes none if the batch has an ``attention_mask`` of ones.

    Raises:
        ArgumentValueError: a sample is longer than ``block_size``.
        DataError: see ``Collator.pad``.
    """

    random: ClassVar[bool] = False

    def corrupt(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Add the labels; nothing is corrupted."""
        batch = {key: value for key, value in batch.items() if key != "special_tokens_mask"}
        input_ids: Tensor = batch["input_ids"]
        if self.packed:
            tokens = torch.arange(input_ids.shape[1], device=input_ids.device)
            first = batch["position_ids"] == self.position_offset
            no_label = first | (tokens >= batch["cu_seq_lens_q"][-1])
        else:
            no_label = batch["attention_mask"] == 0
        return without_full_mask(batch | {"labels": input_ids.masked_fill(no_label, -100)})

    def rows(self, batch: dict[str, Any]) -> dict[str, Any]:
        rows = super().rows(batch)
        # The last token of each sequence among them, which has no label.
        return rows | {"loss_positions": positions_of(rows["unpad"], batch["input_ids"])}


def special_ids(tokenizer: Any) -> Tensor:
    """The ids of a tokenizer's special tokens, added ones too: int64, ascending, each once."""
    ids = {i for i in tokenizer.all_special_ids if i is not None}
    ids |= {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    return torch.tensor(sorted(ids), dtype=torch.int64, device="cpu")


def mask_token_id(where: str, tokenizer: Any) -> int:
    """The id of a tokenizer's mask token, which it must have."""
    mask, got = tokenizer.mask_token_id, "one without a mask token"
    fix = "Add it with tokenizer.add_special_tokens({'mask_token': '<mask>'})."
    check(mask is not None, where, "tokenizer", got, "a mask token", fix, DataError)
    return mask
