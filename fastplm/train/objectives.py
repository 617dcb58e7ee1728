"""The pre-training objectives: what each makes of text, and which class of which family learns it.

An objective is a stream of samples over a token store, a collator that corrupts them, and the
tokens that a vocabulary must have for it. ``FAMILIES`` says which architecture learns which.
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
from fastplm.train.choices import FAMILIES

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from fastplm.train.arguments import PretrainArguments


class DocumentBlocks(Dataset):
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
        check_enough_tokens("DocumentBlocks", store, block_size)
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
    """

    token_loss: str
    needs: tuple[str, ...] = ("pad", "mask", "cls", "sep")

    def tokens(self, args: PretrainArguments, tokenizer: PreTrainedTokenizerBase) -> int:
        """The tokens of text that one sample needs."""
        raise NotImplementedError

    def enough(
        self, args: PretrainArguments, store: TokenStore, tokenizer: PreTrainedTokenizerBase
    ) -> bool:
        """Whether a store gives one sample at least."""
        return len(store) >= self.tokens(args, tokenizer)

    def source(
        self, args: PretrainArguments, store: TokenStore, tokenizer: PreTrainedTokenizerBase
    ) -> Dataset:
        """The pieces of the corpus that a training stream shuffles.

        Raises:
            DataError: the corpus is too small for one of them.
        """
        return BlockDataset(store, self.tokens(args, tokenizer))

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
    pairs: type[NextSentencePairs] | type[SentenceOrderPairs] | None = None
    always_mask: bool = False

    def tokens(self, args: PretrainArguments, tokenizer: PreTrainedTokenizerBase) -> int:
        return args.block_size - (2 if self.pairs is None else 3)

    def enough(
        self, args: PretrainArguments, store: TokenStore, tokenizer: PreTrainedTokenizerBase
    ) -> bool:
        if not super().enough(args, store, tokenizer):
            return False
        # Two segments of one document, or a second document for a random segment.
        documents = len(store.documents) - 1
        pairs = len(store) > documents and (self.pairs is not NextSentencePairs or documents > 1)
        return self.pairs is None or pairs

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

    def tokens(self, args: PretrainArguments, tokenizer: PreTrainedTokenizerBase) -> int:
        return args.block_size

    def source(
        self, args: PretrainArguments, store: TokenStore, tokenizer: PreTrainedTokenizerBase
    ) -> Dataset:
        return DocumentBlocks(store, args.block_size, tokenizer.eos_token_id)

    def collator(self, args: PretrainArguments, tokenizer: PreTrainedTokenizerBase) -> Any:
        return DataCollatorForCausalTokens(tokenizer, block_size=args.block_size)


@dataclass(frozen=True)
class Spans(Objective):
    """T5: spans become sentinels, and the decoder says what was there.

    A block is as long as its corrupted form, the encoder's input, fits ``block_size``.
    """

    token_loss: str = "spans_loss"
    needs: tuple[str, ...] = ("pad", "eos", "<extra_id_0>")

    def tokens(self, args: PretrainArguments, tokenizer: PreTrainedTokenizerBase) -> int:
        # It depends on the number of sentinels, which the collator has looked up.
        return self.collator(args, tokenizer).raw_size

    def collator(self, args: PretrainArguments, tokenizer: PreTrainedTokenizerBase) -> Any:
        return DataCollatorForSpanCorruption(tokenizer, seed=args.seed, block_size=args.block_size)


@dataclass(frozen=True)
class Denoising(Objective):
    """BART: sentences permuted and spans infilled, and the decoder says the original.

    The beginning and the end of a text are put around it after the noise.
    """

    token_loss: str = "denoise_loss"
    needs: tuple[str, ...] = ("pad", "mask", "bos", "eos")

    def tokens(self, args: PretrainArguments, tokenizer: PreTrainedTokenizerBase) -> int:
        return args.block_size - 2

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


def build_model(family: str, objective: str, config: Any) -> PreTrainedModel:
    """The untrained model of a family that learns an objective."""
    return getattr(models, FAMILIES[family].classes[objective])(config)


def _ends(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    return {"cls_token_id": tokenizer.cls_token_id, "sep_token_id": tokenizer.sep_token_id}
