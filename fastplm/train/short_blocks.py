"""Short blocks first: most steps of a run are trained on pieces of its blocks.

[B, T] -> [B * pieces, T / pieces], with as many tokens, in the first samples of a run, or of each
stage. A block is cut; a pair of segments cannot be, so there are short pairs in the place of one.

Source: Devlin et al. 2019 (arXiv 1810.04805), section A.2: 90 % of the steps of BERT are of 128
    tokens, the others of 512, to learn the positions. Press et al. 2021 (arXiv 2012.15832),
    section 4: so a causal model learns faster, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.utils.data import Dataset

from fastplm.data import Collator
from fastplm.data._collate import Samples

#: The sample indices of whole samples; those of pieces that would be among them are above.
_WHOLE = 1 << 40
_PIECES = "pieces"


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
        if not any(index in part for part in self.short):
            return self.whole[index]
        return {_PIECES: self._pieces(index)}

    def _pieces(self, index: int) -> list[dict[str, Any]]:
        sample = self.whole[index]
        size = len(sample["input_ids"]) // self.pieces
        return [
            {
                name: value[piece * size : (piece + 1) * size] if _is_row(value) else value
                for name, value in sample.items()
            }
            | {"sample_index": sample["sample_index"] + piece * _WHOLE}
            for piece in range(self.pieces)
        ]


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

    def _pieces(self, index: int) -> list[dict[str, Any]]:
        first = index * self.pieces
        found = [self.pairs[first + piece] for piece in range(self.pieces)]
        return [sample | {"sample_index": sample["sample_index"] + _WHOLE} for sample in found]


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
        self.op = collator.op

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
