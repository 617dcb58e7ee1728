"""The indices of a corpus on disk: runs of sentences, and sequences packed into blocks.

``sentence_chunks`` and ``pack_sequences`` run the operators of these names of
``csrc/index/index.cpp`` and, where those were not built, the references ``<name>_ref``, which give
the same numbers. Arrays may be memory maps.
"""

from __future__ import annotations

import bisect
import warnings
from collections.abc import Callable
from typing import NoReturn

import numpy as np
import torch

from fastplm import _extension
from fastplm.errors import DataError, check, fail

_COMPILED = _extension.lacks("pack_sequences", "CPU") is None
_MOST_CAPACITY = 1 << 24
_Empty = Callable[..., np.ndarray]


def sentence_chunks(
    sentences: np.ndarray, documents: np.ndarray, room: int, empty: _Empty = np.empty
) -> np.ndarray:
    """Cut documents into runs of sentences of ``room`` tokens or more.

    The last run of a document may have fewer; a run of one token is left out.

    Args:
        sentences: int64 ``[sentences + 1]``, where each begins in the tokens, and their number.
        documents: int64 ``[documents + 1]``, the same in the sentences.
        room: tokens that end a run, 1 or more.
        empty: makes the result, e.g. in a file, as ``empty(shape, dtype)``; that and a few bytes
            are all the memory that is needed.

    Returns:
        int64 ``[3, runs]``: first sentence, the one after the last, document.

    Raises:
        DataError: a document is not within the sentences.
    """
    if not _COMPILED:
        return sentence_chunks_ref(sentences, documents, room, empty)
    build = torch.ops.fastplm_C.sentence_chunks
    arguments = _tensor(sentences), _tensor(documents), room
    count = build(*arguments, torch.empty(3, 0, dtype=torch.int64, device="cpu"))
    if count < 0:
        _refuse_documents()
    chunks = empty((3, count), np.int64)
    build(*arguments, torch.from_numpy(chunks))
    return chunks


def sentence_chunks_ref(
    sentences: np.ndarray, documents: np.ndarray, room: int, empty: _Empty = np.empty
) -> np.ndarray:
    """The specification of ``sentence_chunks``; needs memory for all runs."""
    found = []
    for document in range(len(documents) - 1):
        begin, last = int(documents[document]), int(documents[document + 1])
        if not 0 <= begin <= last < len(sentences):
            _refuse_documents()
        while begin < last:
            full = int(sentences[begin]) + room
            end = begin + 1 + int(np.searchsorted(sentences[begin + 1 : last], full))
            if sentences[end] - sentences[begin] >= 2:
                found.append((begin, end, document))
            begin = end
    chunks = empty((3, len(found)), np.int64)
    chunks[:] = np.array(found, dtype=np.int64).reshape(-1, 3).T
    return chunks


def pack_sequences(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Pack sequences into few bins of ``capacity`` tokens: best fit, longest first.

    Sequences, in the order of falling length and equal ones by index, each go into the bin with the
    least room that still holds it; of several such bins into the one that was filled last. Takes
    ``O(n log capacity)``.

    Args:
        lengths: int64 ``[n]``, each 1 to ``capacity``.
        capacity: 1 to 2^24.

    Returns:
        ``offsets`` int64 ``[bins + 1]`` and ``members`` int64 ``[n]``: bin b holds the sequences
        ``members[offsets[b]:offsets[b + 1]]``, in the order in which they were put there.

    Raises:
        ArgumentValueError: the capacity or a length is outside its range.

    Source: Ding et al. 2024, "Fewer Truncations Improve Language Modeling", arXiv 2404.10830.
    """
    where, lengths = "pack_sequences", np.ascontiguousarray(lengths, dtype=np.int64)
    expected = f"1 to {_MOST_CAPACITY}"
    check(1 <= capacity <= _MOST_CAPACITY, where, "capacity", capacity, expected, "Change it.")
    smallest, largest = (lengths.min(), lengths.max()) if len(lengths) else (1, 1)
    got, expected = f"lengths from {smallest} to {largest}", f"1 to {capacity}, the capacity"
    fix = "Cut longer sequences and leave out empty ones."
    check(1 <= smallest and largest <= capacity, where, "lengths", got, expected, fix)
    if _COMPILED:
        offsets, members = torch.ops.fastplm_C.pack_sequences(_tensor(lengths), capacity)
        return offsets.numpy(), members.numpy()
    return pack_sequences_ref(lengths, capacity)


def pack_sequences_ref(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """The specification of ``pack_sequences``."""
    bins: list[list[int]] = []
    rooms = [capacity]  # ascending: those of `with_room` that are not empty, and an empty bin's
    with_room: dict[int, list[list[int]]] = {}
    for index in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[index])
        room = rooms[bisect.bisect_left(rooms, length)]
        if room == capacity:
            chosen: list[int] = []
            bins.append(chosen)
        else:
            chosen = with_room[room].pop()
            if not with_room[room]:
                rooms.remove(room)
        chosen.append(index)
        left = room - length
        if left > 0:
            others = with_room.setdefault(left, [])
            if not others:
                bisect.insort(rooms, left)
            others.append(chosen)
    offsets = np.cumsum([0, *map(len, bins)], dtype=np.int64)
    return offsets, np.array([index for members in bins for index in members], dtype=np.int64)


def _tensor(array: np.ndarray) -> torch.Tensor:
    """The same memory as a tensor; the operators that read it leave it as it is."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array)


def _refuse_documents() -> NoReturn:
    got = "boundaries that descend or lie outside the sentences"
    expected = "ascending ones, the last of them the number of sentences"
    fix = "Call TokenStore.validate first."
    fail("sentence_chunks", "documents", got, expected, fix, DataError)
