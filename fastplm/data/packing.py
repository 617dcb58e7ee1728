"""Whole documents side by side in one block: training without padding."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from fastplm.data._numbers import map_file, refuse_file
from fastplm.data.blocks import TokenStore, check_enough_tokens, room_for_text
from fastplm.data.index import pack_sequences

_PLACES = 20


class PackedDocuments(Dataset):
    """Blocks of at most ``block_size`` tokens that hold several documents, none of them torn apart.

    A document that is longer than a block is cut into pieces that fill one, and a rest. Pieces are
    then packed into few blocks by ``pack_sequences``; every token of the corpus is in one of them.
    The packing is found once and kept beside the tokens.

    Item i is ``{"input_ids": int64 [tokens], "sequence_lengths": list[int]}``, and the lengths add
    up to ``tokens``. The samples of a ``PretrainingStream`` over this have the ``sample_index`` of
    the block; that of a sequence in it is ``sequence_index(sample_index, place)``.

    Args:
        store: the tokens.
        block_size: most tokens of a block, special ones included.
        cls_token_id, sep_token_id: ids put before and after each piece (``[CLS]`` and ``[SEP]``, or
            the beginning and the end of a text); none by default.

    Raises:
        DataError: see ``TokenStore.validate``.
    """

    def __init__(
        self,
        store: TokenStore,
        block_size: int,
        *,
        cls_token_id: int | None = None,
        sep_token_id: int | None = None,
    ) -> None:
        self.store, self.block_size = store, block_size
        self.cls_token_id, self.sep_token_id = cls_token_id, sep_token_id
        room = room_for_text("PackedDocuments", block_size, cls_token_id, sep_token_id)
        self._special = block_size - room
        check_enough_tokens("PackedDocuments", store, 1)
        folder = store.derive(f"packed-{block_size}-{self._special}", self._build)
        self._offsets, self._begin, self._length = (
            map_file(folder / f"{name}.bin", np.int64) for name in ("offsets", "begin", "length")
        )
        pieces = len(self._begin)
        if not self._offsets[-1] == pieces == len(self._length):
            got = f"{len(self._length)} lengths of {pieces} pieces"
            refuse_file(folder / "offsets.bin", got, f"{self._offsets[-1]} of both")

    def _build(self, folder: Path) -> None:
        room = self.block_size - self._special
        ends = self.store.sentences[self.store.documents]
        pieces = -(-np.diff(ends) // room)
        within = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        begin = np.repeat(ends[:-1], pieces) + within * room
        length = np.minimum(np.repeat(ends[1:], pieces) - begin, room)
        offsets, members = pack_sequences(length + self._special, self.block_size)
        offsets.tofile(folder / "offsets.bin")
        begin[members].tofile(folder / "begin.bin")
        length[members].tofile(folder / "length.bin")

    def __reduce__(self) -> tuple[Any, ...]:
        special = {"cls_token_id": self.cls_token_id, "sep_token_id": self.sep_token_id}
        return functools.partial(PackedDocuments, self.store, self.block_size, **special), ()

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        pieces = slice(self._offsets[index], self._offsets[index + 1])
        lengths = self._length[pieces] + self._special
        ids = np.empty(lengths.sum(), dtype=np.int64)
        ends = np.cumsum(lengths)
        if self.cls_token_id is not None:
            ids[ends - lengths] = self.cls_token_id
        if self.sep_token_id is not None:
            ids[ends - 1] = self.sep_token_id
        after_cls = int(self.cls_token_id is not None)
        for start, begin, length in zip(
            (ends - lengths + after_cls).tolist(),
            self._begin[pieces].tolist(),
            self._length[pieces].tolist(),
            strict=True,
        ):
            ids[start : start + length] = self.store.tokens[begin : begin + length]
        return {"input_ids": torch.from_numpy(ids), "sequence_lengths": lengths.tolist()}


def sequence_index(sample_index: int | Tensor, place: int | Tensor) -> int | Tensor:
    """The sample index of one of the sequences of a packed block: ``sample_index * 2^20 + place``.

    So each sequence has random choices of its own, which do not depend on what else is in a batch.

    Args:
        sample_index: of the block, below 2^43; int or int64 tensor.
        place: of the sequence in the block: 0, 1, 2 ….
    """
    return (sample_index << _PLACES) + place
