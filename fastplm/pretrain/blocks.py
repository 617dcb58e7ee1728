"""The blocks of a pre-training: with the ends of documents between them, or short ones first.

``ShortBlocks``: [B, T] -> [B * pieces, T / pieces], with as many tokens, in the first samples of a
run, or of each stage. A block is cut; a pair of segments cannot be, so there are short pairs in the
place of one.

Source: Devlin et al. 2019 (arXiv 1810.04805), section A.2: 90 % of the steps of BERT are of 128
    tokens, the others of 512, to learn the positions. Press et al. 2021 (arXiv 2012.15832),
    section 4: so a causal model learns faster, too.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from fastplm.data import Collator, TokenStore
from fastplm.data._collate import Samples
from fastplm.data.blocks import check_enough_tokens, room_for_text

#: The sample indices of whole samples; those of pieces that would be among them are above.
_WHOLE = 1 << 40
_PIECES = "pieces"


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


class ShortBlocks(Dataset):
    """Samples of a run, of which some are cut into pieces of one length.

    Item i is ``{"pieces": samples}`` where ``short`` has i, and else ``whole[i]``. A block is cut
    as it is, so its first piece alone begins with [CLS], and its last ends with [SEP].

    Args:
        whole: the samples of a run: ``input_ids`` int64 [T], ``sample_index``.
        pieces: of a sample.
        short: the indices of the samples that are cut.
    """

    def __init__(self, whole: Dataset, pieces: int, short: Sequence[range]) -> None:
        self.whole, self.pieces, self.short = whole, pieces, short

    def __len__(self) -> int:
        return len(self.whole)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Several items at once, as DataLoader asks for them."""
        cut = [any(index in part for part in self.short) for index in indices]
        short = self._cut([index for index, is_cut in zip(indices, cut, strict=True) if is_cut])
        of_whole = [index for index, is_cut in zip(indices, cut, strict=True) if not is_cut]
        pieces, whole = iter(short), iter(_several(self.whole, of_whole))
        return [{_PIECES: next(pieces)} if is_cut else next(whole) for is_cut in cut]

    def _cut(self, indices: list[int]) -> list[list[dict[str, Any]]]:
        """The pieces of each of some samples."""
        return [self._pieces(sample) for sample in _several(self.whole, indices)]

    def _pieces(self, sample: dict[str, Any]) -> list[dict[str, Any]]:
        size = len(sample["input_ids"]) // self.pieces
        return [
            {
                name: value[piece * size : (piece + 1) * size] if _is_row(value) else value
                for name, value in sample.items()
            }
            | {"sample_index": sample["sample_index"] + piece * _WHOLE}
            for piece in range(self.pieces)
        ]


def _several(dataset: Any, indices: list[int]) -> list[dict[str, Any]]:
    """Items of a dataset, all at once where it can."""
    if hasattr(dataset, "__getitems__"):
        return dataset.__getitems__(indices) if indices else []
    return [dataset[index] for index in indices]


def _is_row(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0


class ShortPairs(ShortBlocks):
    """The same of pairs of segments: in the place of a whole pair are several short ones.

    Args:
        pairs: short ones, ``pieces`` times as many as ``short`` has indices, which begin with 0.
        whole, pieces, short: see ``ShortBlocks``.
    """

    def __init__(self, pairs: Dataset, whole: Dataset, pieces: int, short: Sequence[range]) -> None:
        super().__init__(whole, pieces, short)
        self.pairs = pairs

    def _cut(self, indices: list[int]) -> list[list[dict[str, Any]]]:
        ranges = [range(index * self.pieces, (index + 1) * self.pieces) for index in indices]
        found = _several(self.pairs, [number for each in ranges for number in each])
        samples = [each | {"sample_index": each["sample_index"] + _WHOLE} for each in found]
        places = range(0, len(samples), self.pieces)
        return [samples[place : place + self.pieces] for place in places]


class ShortFirst:
    """A collator of ``ShortBlocks``, whose batches are of pieces or of whole samples.

    Args:
        collator: of whole samples; its ``block_size`` is their length.
        pieces: of a sample.
    """

    def __init__(self, collator: Collator, pieces: int) -> None:
        assert collator.block_size is not None
        self.collator = collator
        self.short = replace(collator, block_size=collator.block_size // pieces)
        self.short._dropped = collator._dropped  # what did not fit is counted together
        self.op, self.needs_cpu = collator.op, collator.needs_cpu

    def __call__(self, samples: Samples) -> dict[str, Any]:
        return self.corrupt(self.pad(samples))

    def pad(self, samples: Samples) -> dict[str, Any]:
        """The tensors of whole samples, or of pieces."""
        if _PIECES not in samples[0]:
            return self.collator.pad(samples)
        return self.short.pad([piece for sample in samples for piece in sample[_PIECES]])

    def corrupt(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Add the noise of the objective to them."""
        is_short = batch["input_ids"].shape[1] == self.short.block_size
        return (self.short if is_short else self.collator).corrupt(batch)
