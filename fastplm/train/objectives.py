"""The pre-training objectives: what each makes of text, and which class of which family learns it.

An objective is three things: a stream of samples over a token store, a collator that corrupts
them, and the tokens that a vocabulary must have for that. ``FAMILIES`` says which architecture can
learn which of them.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import Dataset

from fastplm import models
from fastplm._checks import check, check_choice
from fastplm.data import (
    BlockDataset,
    DataCollatorForCausalTokens,
    DataCollatorForMaskedTokens,
    NextSentencePairs,
    PretrainingStream,
    SentenceChunks,
    SentenceOrderPairs,
    TokenStore,
)
from fastplm.data.blocks import check_enough_tokens
from fastplm.data.denoising import DataCollatorForDenoising
from fastplm.data.span_corruption import DataCollatorForSpanCorruption
from fastplm.train.choices import FAMILIES, UNITS

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from fastplm.train.pretrain import PretrainArguments


class EndedDocuments(Dataset):
    """Blocks of one size of the documents one after the other, each followed by its end.

    Only the last, partial block of the whole corpus is left out. Item i is
    ``{"input_ids": int64 [block_size]}``.

    Args:
        store: the tokens.
        block_size: tokens a block, the ends included.
        eos_token_id: the id that ends a document.

    Raises:
        DataError: fewer tokens than one block needs; or see ``TokenStore.validate``.
    """

    def __init__(self, store: TokenStore, block_size: int, eos_token_id: int) -> None:
        self.store, self.block_size, self.eos_token_id = store, block_size, eos_token_id
        check_enough_tokens("EndedDocuments", store, block_size)
        store.validate()

    def __len__(self) -> int:
        return (len(self.store) + len(self.store.documents) - 1) // self.block_size

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        first, last = index * self.block_size, (index + 1) * self.block_size
        documents = range(len(self.store.documents) - 1)
        # The documents that end before the block, and those that end before the next one.
        before, within = (
            bisect.bisect_left(documents, place, key=self._place_of_end) for place in (first, last)
        )
        text = self.store.tokens[first - before : last - within].astype(np.int64)
        ends = [self._place_of_end(document) - first for document in documents[before:within]]
        # An end goes before the token that has its place, not counting the other ends.
        block = np.insert(text, np.array(ends, np.int64) - np.arange(len(ends)), self.eos_token_id)
        return {"input_ids": torch.from_numpy(block)}

    def _place_of_end(self, document: int) -> int:
        """Where the end of a document is in the text with all ends."""
        store = self.store
        return int(store.sentences[store.documents[document + 1]]) + document


@dataclass(frozen=True)
class Objective:
    """How a model learns from text.

    Args:
        token_loss: the name of the loss over tokens, beside that over pairs if there is one.
        needs: what a tokenizer must have, see ``load_tokenizer``.
        masks: tokens are chosen by ``--unit``.
    """

    token_loss: str
    needs: tuple[str, ...] = ("pad", "mask", "cls", "sep")
    masks: bool = False

    def source(
        self, args: PretrainArguments, store: TokenStore, tokenizer: PreTrainedTokenizerBase
    ) -> Dataset:
        """The pieces of the corpus that a training stream shuffles.

        Raises:
            DataError: the corpus is too small for one of them.
        """
        raise NotImplementedError

    def samples(self, stream: PretrainingStream, tokenizer: PreTrainedTokenizerBase) -> Dataset:
        """The stream itself, or what is made of each of its elements."""
        return stream

    def collator(self, args: PretrainArguments, tokenizer: PreTrainedTokenizerBase) -> Any:
        """Pads samples (``pad``) and corrupts them (``corrupt``); called, it does both."""
        raise NotImplementedError


@dataclass(frozen=True)
class MaskedTokens(Objective):
    """Masked language modelling over blocks or, with ``pairs``, over pairs of segments.

    Args:
        pairs: what makes them of runs of sentences.
        always_mask: every chosen token becomes ``[MASK]``, as for ELECTRA's generator, instead of
            BERT's 80 % ``[MASK]``, 10 % random, 10 % unchanged.
    """

    token_loss: str = "mlm_loss"
    masks: bool = True
    pairs: type[NextSentencePairs] | type[SentenceOrderPairs] | None = None
    always_mask: bool = False

    def source(
        self, args: PretrainArguments, store: TokenStore, tokenizer: PreTrainedTokenizerBase
    ) -> Dataset:
        if self.pairs is not None:
            return SentenceChunks(store, args.block_size)
        return BlockDataset(store, args.block_size, **_ends(tokenizer))

    def samples(self, stream: PretrainingStream, tokenizer: PreTrainedTokenizerBase) -> Dataset:
        if self.pairs is None:
            return stream
        return self.pairs(stream, **_ends(tokenizer))

    def collator(self, args: PretrainArguments, tokenizer: PreTrainedTokenizerBase) -> Any:
        return DataCollatorForMaskedTokens(
            tokenizer,
            seed=args.seed,
            mlm_probability=args.preset.mlm_probability,
            mask_replace_prob=1.0 if self.always_mask else 0.8,
            random_replace_prob=0.0 if self.always_mask else 0.1,
            block_size=args.block_size,
            unit=str(args.unit),
        )


@dataclass(frozen=True)
class CausalTokens(Objective):
    """Each token from those before it, the end of each document among them."""

    token_loss: str = "clm_loss"
    needs: tuple[str, ...] = ("eos",)

    def source(
        self, args: PretrainArguments, store: TokenStore, tokenizer: PreTrainedTokenizerBase
    ) -> Dataset:
        return EndedDocuments(store, args.block_size, tokenizer.eos_token_id)

    def collator(self, args: PretrainArguments, tokenizer: PreTrainedTokenizerBase) -> Any:
        return DataCollatorForCausalTokens(tokenizer, block_size=args.block_size)


@dataclass(frozen=True)
class Spans(Objective):
    """T5: spans become sentinels, and the decoder says what was there.

    A block is as long as its corrupted form, the encoder's input, fits ``block_size``.
    """

    token_loss: str = "spans_loss"
    needs: tuple[str, ...] = ("pad", "eos", "<extra_id_0>")

    def source(
        self, args: PretrainArguments, store: TokenStore, tokenizer: PreTrainedTokenizerBase
    ) -> Dataset:
        # It depends on the number of sentinels, which the collator has looked up.
        return BlockDataset(store, self.collator(args, tokenizer).raw_size)

    def collator(self, args: PretrainArguments, tokenizer: PreTrainedTokenizerBase) -> Any:
        return DataCollatorForSpanCorruption(tokenizer, seed=args.seed, block_size=args.block_size)


@dataclass(frozen=True)
class Denoising(Objective):
    """BART: sentences permuted and spans infilled, and the decoder says the original.

    The beginning and the end of a text are put around it after the noise.
    """

    token_loss: str = "denoise_loss"
    needs: tuple[str, ...] = ("pad", "mask", "bos", "eos")

    def source(
        self, args: PretrainArguments, store: TokenStore, tokenizer: PreTrainedTokenizerBase
    ) -> Dataset:
        return BlockDataset(store, args.block_size - 2)

    def collator(self, args: PretrainArguments, tokenizer: PreTrainedTokenizerBase) -> Any:
        return DataCollatorForDenoising(tokenizer, seed=args.seed, block_size=args.block_size)


OBJECTIVES: Mapping[str, Objective] = {
    "mlm": MaskedTokens(),
    "mlm+nsp": MaskedTokens(pairs=NextSentencePairs),
    "mlm+sop": MaskedTokens(pairs=SentenceOrderPairs),
    "rtd": MaskedTokens(always_mask=True),
    "clm": CausalTokens(),
    "spans": Spans(),
    "denoise": Denoising(),
}


def choose_objective(arch: str, family: str, objective: str | None) -> str:
    """The objective of a run; the family's usual one where none is named.

    Raises:
        ArgumentValueError: the family cannot learn it.
    """
    able = tuple(FAMILIES[family].classes)
    if objective is None:
        return able[0]
    check_choice("pretrain", "objective", objective, tuple(OBJECTIVES))
    check(
        objective in able,
        "pretrain",
        "objective",
        f"{objective} with {arch}",
        f"{' or '.join(able)}, what {arch} can learn",
        "Leave the option out, or choose another architecture.",
    )
    return objective


def choose_unit(family: str, objective: str, unit: str | None) -> str | None:
    """What masks are made of: the family's usual unit; None where nothing is masked.

    Raises:
        ArgumentValueError: there is no such unit, or the objective masks none.
    """
    if not OBJECTIVES[objective].masks:
        check(
            unit is None,
            "pretrain",
            "unit",
            f"{unit} with objective {objective}",
            "no unit, as this objective does not mask tokens",
            "Leave the option out.",
        )
        return None
    if unit is None:
        return FAMILIES[family].unit
    check_choice("pretrain", "unit", unit, UNITS)
    return unit


def build_model(family: str, objective: str, config: Any) -> PreTrainedModel:
    """The untrained model of a family that learns an objective."""
    return getattr(models, FAMILIES[family].classes[objective])(config)


def _ends(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    return {"cls_token_id": tokenizer.cls_token_id, "sep_token_id": tokenizer.sep_token_id}
