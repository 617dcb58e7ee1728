"""Short blocks first: most steps of a run are trained on pieces of its blocks.

[B, T] -> [B * pieces, T / pieces], with as many tokens, in the first samples of a run
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from fastplm.data import Collator
from fastplm.data._collate import Samples

#: The sample indices of blocks; those of their other pieces are above.
_BLOCKS = 1 << 40


class ShortFirst:
    """A collator that cuts the first samples of a run into pieces of one length.

    A block is cut as it is, so its first piece alone begins with [CLS], and its last ends with
    [SEP].

    Source: Devlin et al. 2019 (arXiv 1810.04805), section A.2: 90 % of the steps of BERT are of 128
        tokens, the others of 512, to learn the positions. Press et al. 2021 (arXiv 2012.15832),
        section 4: so a causal model learns faster, too.

    Args:
        collator: of whole blocks; its ``block_size`` is the length of a sample.
        pieces: of a block.
        until: the index of the first sample that is not cut.
    """

    def __init__(self, collator: Collator, pieces: int, until: int) -> None:
        assert collator.block_size is not None
        self.collator, self.pieces, self.until = collator, pieces, until
        self.short = replace(collator, block_size=collator.block_size // pieces)
        self.short._dropped = collator._dropped  # what did not fit is counted together
        self.op = collator.op

    def __call__(self, samples: Samples) -> dict[str, Any]:
        return self.corrupt(self.pad(samples))

    def pad(self, samples: Samples) -> dict[str, Any]:
        """The tensors of whole blocks, or of their pieces."""
        if samples[0]["sample_index"] >= self.until:
            return self.collator.pad(samples)
        return self.short.pad([piece for sample in samples for piece in self._cut(sample)])

    def corrupt(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Add the noise of the objective to them."""
        is_short = batch["input_ids"].shape[1] == self.short.block_size
        return (self.short if is_short else self.collator).corrupt(batch)

    def _cut(self, sample: dict[str, Any]) -> Iterator[dict[str, Any]]:
        size, fields = self.short.block_size, {"input_ids", *self.collator.token_fields}
        assert size is not None
        for piece in range(self.pieces):
            part = slice(piece * size, (piece + 1) * size)
            yield {
                name: value[part] if name in fields else value for name, value in sample.items()
            } | {"sample_index": int(sample["sample_index"]) + piece * _BLOCKS}
