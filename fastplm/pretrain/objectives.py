"""The pre-training objectives: the samples, the collator and the special tokens of each.

``FAMILIES`` of ``presets`` says which architecture learns which objective.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import Dataset

from fastplm import models
from fastplm.data import (
    BlockDataset,
    Collator,
    DataCollatorForCausalTokens,
    DataCollatorForDenoising,
    DataCollatorForMaskedTokens,
    DataCollatorForSpanCorruption,
    NextSentencePairs,
    PretrainingStream,
    SentenceChunks,
    SentenceOrderPairs,
    TokenStore,
)
from fastplm.data.blocks import check_enough_tokens, room_for_text
from fastplm.pretrain.presets import FAMILIES, NOISES
from fastplm.pretrain.short_blocks import ShortBlocks, ShortPairs
from fastplm.run.flops import flops_a_token

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from fastplm.pretrain.settings import PretrainPlan


def _too_few(what: str, there: int, needed: int) -> str:
    return f"{there:,} {what}{'' if there == 1 else 's'}, of {needed:,} that a sample takes"


class DocumentBlocks(Dataset):
    """Blocks of one size of the documents one after the other, each followed by its end.

    Only the last, partial block of the whole corpus is left out. Item i is
    ``{"input_ids": int64 [block_size]}``.

    Args:
        store: the tokens.
        block_size: tokens a block, the ends and the special tokens around it included.
        eos_token_id: the id that ends a document.
        cls_token_id, sep_token_id: the ids put before and after each block; none by default.

    Raises:
        DataError: fewer tokens than one block needs; or see ``TokenStore.validate``.
    """

    def __init__(
        self,
        store: TokenStore,
        block_size: int,
        eos_token_id: int,
        *,
        cls_token_id: int | None = None,
        sep_token_id: int | None = None,
    ) -> None:
        self.store, self.block_size, self.eos_token_id = store, block_size, eos_token_id
        around = ((cls_token_id,), (sep_token_id,))
        self._around = [[i for i in ids if i is not None] for ids in around]
        self._text = room_for_text("DocumentBlocks", block_size, cls_token_id, sep_token_id)
        check_enough_tokens("DocumentBlocks", store, self._text)
        store.validate()

    def __len__(self) -> int:
        return (len(self.store) + len(self.store.documents) - 1) // self._text

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        first, last = index * self._text, (index + 1) * self._text
        documents = range(len(self.store.documents) - 1)
        # The documents that end before the block, and those that end before the next one.
        before, within = (
            bisect.bisect_left(documents, place, key=self._place_of_end) for place in (first, last)
        )
        text = self.store.tokens[first - before : last - within].astype(np.int64)
        ends = [self._place_of_end(document) - first for document in documents[before:within]]
        # An end goes before the token that has its place, not counting the other ends.
        block = np.insert(text, np.array(ends, np.int64) - np.arange(len(ends)), self.eos_token_id)
        before_it, after_it = self._around
        if before_it or after_it:
            block = np.concatenate([before_it, block, after_it]).astype(np.int64)
        return {"input_ids": torch.from_numpy(block)}

    def _place_of_end(self, document: int) -> int:
        """Where the end of a document is in the text with all ends."""
        store = self.store
        return int(store.sentences[store.documents[document + 1]]) + document


class Objective:
    """How a model learns from text."""

    #: The name of the loss over tokens, to which one over pairs may be added.
    token_loss: str
    collator_class: type[Collator]
    #: The special tokens of a sample.
    special = 0
    #: What a tokenizer must have, see ``load_tokenizer``.
    needs: tuple[str, ...] = ("pad", "mask", "cls", "sep")

    def __init__(self, args: PretrainPlan, tokenizer: PreTrainedTokenizerBase) -> None:
        self.args, self.tokenizer = args, tokenizer

    @property
    def tokens(self) -> int:
        """The tokens of text that one sample needs."""
        return self.args.block_size - self.special

    def mean_length(self, block_size: int) -> float:
        """The tokens of a full sample of this size that the model, or its encoder, reads; in the
        mean where samples differ. It needs no tokenizer."""
        return block_size

    @property
    def _lengths(self) -> list[tuple[float, float]]:
        """The tokens that short pieces of a mean sample have, and whole samples; how long each."""
        args, whole = self.args, self.mean_length(self.args.block_size)
        if args.short_block_size is None:
            return [(whole, whole)]
        share, short = args.short_share, self.mean_length(args.short_block_size)
        return [(share * args.pieces * short, short), ((1 - share) * whole, whole)]

    @property
    def source_length(self) -> float:
        """The mean over all steps of ``mean_length``, for what stands in the place of a sample."""
        return sum(tokens for tokens, _ in self._lengths)

    @property
    def target_length(self) -> int:
        """The tokens of a decoder for a full sample; 0 without one."""
        return 0

    @property
    def tokens_a_step(self) -> float:
        """The tokens of both sides, of the full samples of an optimizer step, in the mean."""
        return self.args.samples_a_step * (self.source_length + self.target_length)

    def flops_a_token(self, config: Any) -> float:
        """The FLOPs of forward and backward, for each token of full samples."""
        masked = self.args.preset.mlm_probability
        return sum(
            tokens
            / self.source_length
            * flops_a_token(config, round(length), self.target_length, masked=masked)
            for tokens, length in self._lengths
        )

    def lacks(self, store: TokenStore) -> str:
        """What a store has too little of for one sample; empty if it gives one."""
        return "" if len(store) >= self.tokens else _too_few("token", len(store), self.tokens)

    def source(self, store: TokenStore) -> Dataset:
        """The pieces of the corpus that a training stream shuffles; at least one."""
        return BlockDataset(store, self.tokens)

    def samples(self, stream: PretrainingStream) -> Dataset:
        """The stream itself, or what is made of each of its elements."""
        return stream

    def short_first(self, samples: Dataset, store: TokenStore) -> Dataset:
        """The samples of a run that begins with short ones."""
        return ShortBlocks(samples, self.args.pieces, self.args.short_samples)

    def collator(self, **settings: Any) -> Collator:
        """Pads samples (``pad``) and corrupts them (``corrupt``); called, it does both.

        Args:
            settings: other ones than the run's.
        """
        size, seed = self.args.block_size, self.args.seed
        settings = self.settings | settings
        return self.collator_class(self.tokenizer, seed=seed, block_size=size, **settings)

    def judge(self) -> Collator:
        """The collator of held-out text."""
        return self.collator()

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of the collator beside the seed and the block size."""
        return {}


class MaskedTokens(Objective):
    """Masked language modelling: BERT's 80 % ``[MASK]``, 10 % random, 10 % unchanged."""

    token_loss = "mlm_loss"
    collator_class = DataCollatorForMaskedTokens
    special = 2

    @property
    def ends(self) -> dict[str, int]:
        """The tokens around a segment."""
        names = ("cls_token_id", "sep_token_id")
        return {name: getattr(self.tokenizer, name) for name in names}

    def source(self, store: TokenStore) -> Dataset:
        size, ends = self.args.block_size, self.ends
        if self.args.separators:
            return DocumentBlocks(store, size, ends["sep_token_id"], **ends)
        return BlockDataset(store, size, **ends)

    def judge(self) -> Collator:
        """15 % of the tokens, each of them ``[MASK]``, with whatever masks the model has learned.

        So masked models have comparable losses. A token that is left as it is can be copied, so
        where some are, the loss is below that of the tokens' frequency with nothing learned.
        """
        return self.collator(
            mlm_probability=0.15, mask_replace_prob=1.0, random_replace_prob=0.0, unit="token"
        )

    @property
    def settings(self) -> dict[str, Any]:
        names = ("mlm_probability", "mask_replace_prob", "random_replace_prob")
        return dict(zip(names, self.args.mask_shares, strict=True)) | {"unit": self.args.unit}


class ReplacedTokens(MaskedTokens):
    """ELECTRA: every token chosen for the generator becomes ``[MASK]``, unless asked otherwise."""


class SentenceOrder(MaskedTokens):
    """Masked language modelling over pairs of segments, which are in their order or not."""

    pairs: type[NextSentencePairs] | type[SentenceOrderPairs] = SentenceOrderPairs
    special = 3
    #: The documents that a pair needs.
    documents = 1

    def mean_length(self, block_size: int) -> float:
        return self.pairs.expected_length(block_size)

    def lacks(self, store: TokenStore) -> str:
        documents = len(store.documents) - 1
        if documents < self.documents:
            return _too_few("document", documents, self.documents)
        # With more tokens than documents, one of these has two tokens and gives two segments.
        return super().lacks(store) or (
            "" if len(store) > documents else "documents of one token each"
        )

    def source(self, store: TokenStore) -> Dataset:
        return SentenceChunks(store, self.args.block_size)

    def samples(self, stream: PretrainingStream) -> Dataset:
        return self.pairs(stream, **self.ends)

    def short_first(self, samples: Dataset, store: TokenStore) -> Dataset:
        args, short = self.args, self.args.short_samples
        source = SentenceChunks(store, args.block_size // args.pieces)
        stream = PretrainingStream(
            source, seed=args.seed, length=sum(map(len, short)) * args.pieces
        )
        return ShortPairs(self.samples(stream), samples, args.pieces, short)


class NextSentence(SentenceOrder):
    """The same over pairs whose second segment follows the first, or is of another document."""

    pairs = NextSentencePairs
    documents = 2


class CausalTokens(Objective):
    """Each token from those before it, the end of each document among them."""

    token_loss = "clm_loss"
    collator_class = DataCollatorForCausalTokens
    needs: tuple[str, ...] = ("eos",)

    def source(self, store: TokenStore) -> Dataset:
        return DocumentBlocks(store, self.args.block_size, self.tokenizer.eos_token_id)


class LeftToRight(CausalTokens):
    """The same for an encoder with a causal mask: ``[CLS] …``, each document ended by ``[SEP]``.

    So a block begins and ends its texts with the tokens that fine-tuning puts around them.

    Source: Devlin et al. 2019 (arXiv 1810.04805), §5.1, "LTR & No NSP".
    """

    special = 1
    needs = ("pad", "cls", "sep")

    def source(self, store: TokenStore) -> Dataset:
        ids = self.tokenizer
        return DocumentBlocks(
            store, self.args.block_size, ids.sep_token_id, cls_token_id=ids.cls_token_id
        )


class Spans(Objective):
    """T5: spans become sentinels, and the decoder says what was there.

    A block is as long as its corrupted form, the encoder's input, fits ``block_size``.
    """

    token_loss = "spans_loss"
    collator_class = DataCollatorForSpanCorruption
    needs = ("pad", "eos", "<extra_id_0>")

    @property
    def tokens(self) -> int:
        # It depends on the number of sentinels, which the collator has looked up.
        collator: Any = self.collator()
        return collator.raw_size

    @property
    def target_length(self) -> int:
        collator: Any = self.collator()
        return collator.target_size


class Denoising(Objective):
    """BART: sentences permuted and spans infilled, or other noise; the decoder says the original.

    The beginning and the end of a text are put around it after the noise.
    """

    token_loss = "denoise_loss"
    collator_class = DataCollatorForDenoising
    special = 2
    needs = ("pad", "mask", "bos", "eos")

    @property
    def settings(self) -> dict[str, Any]:
        chosen = self.args.noise
        if chosen is None:
            return {}
        return {
            setting: share if name in chosen else 0.0 for name, (setting, share) in NOISES.items()
        }

    def mean_length(self, block_size: int) -> float:
        text = block_size - self.special
        return DataCollatorForDenoising.expected_length(text, **self.settings) + self.special

    @property
    def target_length(self) -> int:
        return self.args.block_size


OBJECTIVES: Mapping[str, type[Objective]] = {
    "mlm": MaskedTokens,
    "mlm+nsp": NextSentence,
    "mlm+sop": SentenceOrder,
    "rtd": ReplacedTokens,
    "clm": CausalTokens,
    "spans": Spans,
    "denoise": Denoising,
}


def objective_of(args: PretrainPlan) -> type[Objective]:
    """How the model of a run learns."""
    kind = OBJECTIVES[str(args.objective)]
    encoder = "mlm" in FAMILIES[args.preset.family].classes
    return LeftToRight if kind is CausalTokens and encoder else kind


def build_model(family: str, objective: str, config: Any) -> PreTrainedModel:
    """The untrained model of a family that learns an objective."""
    return getattr(models, FAMILIES[family].classes[objective])(config)
