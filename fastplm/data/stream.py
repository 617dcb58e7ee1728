"""The endless training stream, in which every sample has one place."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from fastplm.errors import TooLittleTextError, check
from fastplm.reference.philox import Stream, draw

# Each turn changes one half by a function of the other. Four turns give a pseudo-random order.
_TURNS = 6
_WINDOW = 1024


class PretrainingStream(Dataset):
    """A map-style dataset over the endless, shuffled repetition of another one.

    Item i is element ``permute(i mod n, n, epoch = i div n)`` of the dataset of n elements, with
    ``sample_index = i`` added. Reading it in sequence is shuffled training: which worker or process
    reads an item, and whether the run was resumed in between, cannot change it.

    Args:
        dataset: map-style, of dicts.
        seed: of the permutations.
        length: the number of samples of the whole run.
        copies: with a number, ``sample_index`` is ``(epoch mod copies) * n + element``: what is
            drawn by it (masks) is drawn in so many ways for each element, and then again. BERT's
            data was made so, with 10 (Liu et al. 2019, arXiv 1907.11692, §4.1).

    Raises:
        TooLittleTextError: the dataset is empty.
    """

    def __init__(
        self, dataset: Dataset, *, seed: int, length: int, copies: int | None = None
    ) -> None:
        self.dataset, self.seed, self.length, self.copies = dataset, seed, length, copies
        self.size = len(dataset)  # type: ignore[arg-type]
        where, fix = "PretrainingStream", "Give more text or a smaller block size."
        check(self.size > 0, where, "dataset", "none", "one or more", fix, TooLittleTextError)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < self.length:
            raise IndexError(index)
        window, place = divmod(index, _WINDOW)
        element = _elements(window, self.size, self.seed)[place]
        drawn = index
        if self.copies is not None:
            drawn = index // self.size % self.copies * self.size + element
        return {**self.dataset[element], "sample_index": drawn}


# A thousand places are drawn in about the time of one, and samples are read in sequence.
@functools.lru_cache(maxsize=8)
def _elements(window: int, size: int, seed: int) -> list[int]:
    samples = torch.arange(window * _WINDOW, (window + 1) * _WINDOW, device="cpu")
    return permute(samples % size, size, seed, samples // size).tolist()


def permute(index: Tensor, size: int, seed: int, epoch: Tensor) -> Tensor:
    """Where a keyed permutation of ``range(size)`` sends each index.

    A Feistel network (Luby and Rackoff 1988) over ``Z_a x Z_b``, the smallest such square grid that
    holds ``size`` elements; an index that leaves the range is sent on until it is back in it. So it
    needs no table, whatever the size.

    Args:
        index: int64, each in ``[0, size)``.
        size: the number of elements.
        seed: the key.
        epoch: int64, broadcast with ``index``; each epoch has its own permutation.

    Returns:
        int64 of the shape of ``index``.
    """
    rows = math.isqrt(size - 1) + 1
    columns = -(-size // rows)

    def word(turn: int, half: Tensor) -> Tensor:
        return draw(seed, Stream.SHUFFLE, sample_index=half, position=turn, step=epoch)[0]

    def shuffle(x: Tensor) -> Tensor:
        left, right = x // columns, x % columns
        for turn in range(0, _TURNS, 2):
            left = (left + word(turn, right)) % rows
            right = (right + word(turn + 1, left)) % columns
        return left * columns + right

    result = shuffle(index)
    while (result >= size).any():
        result = torch.where(result >= size, shuffle(result), result)
    return result
