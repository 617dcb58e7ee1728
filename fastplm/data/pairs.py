"""Pairs of segments: next-sentence prediction (BERT) and sentence order prediction (ALBERT).

Sources: Devlin et al. 2019, "BERT: Pre-training of Deep Bidirectional Transformers", appendix A.2;
Lan et al. 2020, "ALBERT: A Lite BERT", arXiv 1909.11942, section 3.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from fastplm.data._numbers import map_file, new_file, refuse_file
from fastplm.data.blocks import TokenStore, check_enough_tokens
from fastplm.data.index import sentence_chunks
from fastplm.data.stream import PretrainingStream
from fastplm.errors import TooLittleTextError, check
from fastplm.reference.philox import Stream, draw, fixed_point

_SHORT_PROBABILITY = 0.1
_WORD = 1 << 32
_Pair = tuple[np.ndarray, np.ndarray]


class SentenceChunks(Dataset):
    """Runs of sentences of one document that fill a block: what pairs are made of.

    Sentences are added until the run has ``block_size - 3`` tokens or the document ends, as BERT's
    data is cut; every sentence is in one run, but runs of one token are left out. Item i is
    ``{"chunk": i}``. The runs are found once and kept beside the tokens.

    Args:
        store: the tokens.
        block_size: tokens a pair, ``[CLS]`` and two ``[SEP]`` included.

    Attributes:
        begin, end: int64 ``[chunks]``, the first sentence of each run and the one after its last.
        document: int64 ``[chunks]``, the document of each run.
        lone: the share of the runs that are one sentence.

    Raises:
        TooLittleTextError: fewer tokens than one block needs.
        DataError: see ``TokenStore.validate``.
    """

    def __init__(self, store: TokenStore, block_size: int) -> None:
        check(block_size >= 5, "SentenceChunks", "block_size", block_size, "5 or more", "Raise it.")
        self.store, self.block_size = store, block_size
        check_enough_tokens("SentenceChunks", store, block_size - 3)
        file = store.derive(f"chunks-{block_size}", self._build) / "chunks.bin"
        chunks = map_file(file, np.int64)
        if len(chunks) % 3 or not _are_runs(chunks.reshape(3, -1)[:, [0, -1]], store):
            refuse_file(file, "which has other contents", "the runs of sentences of its store")
        self.begin, self.end, self.document = chunks.reshape(3, -1)

    def _build(self, folder: Path) -> None:
        store = self.store

        def empty(shape: tuple[int, int], dtype: type[np.generic]) -> np.ndarray:
            where, got, fix = "SentenceChunks", "documents of one token", "Give more text."
            expected = "a document of two tokens at least"
            check(shape[1] > 0, where, "store", got, expected, fix, TooLittleTextError)
            return new_file(folder / "chunks.bin")(shape, dtype)

        sentence_chunks(store.sentences, store.documents, self.block_size - 3, empty)

    @property
    def lone(self) -> float:
        return float((self.end - self.begin == 1).mean())

    def __reduce__(self) -> tuple[Any, ...]:
        return SentenceChunks, (self.store, self.block_size)

    def __len__(self) -> int:
        return len(self.begin)

    def __getitem__(self, index: int) -> dict[str, int]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return {"chunk": index}


def _are_runs(chunks: np.ndarray, store: TokenStore) -> bool:
    begin, end, document = chunks
    if document.min() < 0 or document.max() >= len(store.documents) - 1:
        return False
    first, last = store.documents[document], store.documents[document + 1]
    return bool(((first <= begin) & (begin < end) & (end <= last)).all())


class _SegmentPairs(Dataset):
    """Pairs of segments; a subclass says what a pair with label 1 is."""

    label: str
    #: Whether a run of one sentence is cut in its middle; else its label is always 1.
    cuts_a_lone_sentence: bool

    def __init__(self, stream: PretrainingStream, *, cls_token_id: int, sep_token_id: int) -> None:
        self.stream = stream
        self.chunks: SentenceChunks = stream.dataset  # type: ignore[assignment]
        self.cls_token_id, self.sep_token_id = cls_token_id, sep_token_id

    @staticmethod
    def expected_length(block_size: int) -> float:
        """The mean number of tokens of a pair, ``[CLS]`` and two ``[SEP]`` included.

        It is that of runs that fill a block; where a document ends, pairs are shorter.
        """
        limit = block_size - 3
        shortened = (2 + limit) / 2  # each length from 2 to the limit is as likely
        return limit + _SHORT_PROBABILITY * (shortened - limit) + 3

    def __len__(self) -> int:
        return len(self.stream)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Several items at once, as DataLoader asks for them."""
        items = [self.stream[index] for index in indices]
        samples = torch.tensor([item["sample_index"] for item in items], device="cpu")[:, None]
        # Two counters hold the choices, the others one bit for each token that may be removed.
        counters = torch.arange(2 + -(-self.chunks.block_size // 128), device="cpu")[None, :]
        words = torch.stack(
            draw(self.stream.seed, Stream.PAIR, sample_index=samples, position=counters), dim=-1
        ).numpy()
        return [self._pair(item, row) for item, row in zip(items, words, strict=True)]

    def _pair(self, item: dict[str, Any], words: np.ndarray) -> dict[str, Any]:
        chunks, chunk = self.chunks, item["chunk"]
        store = chunks.store
        (is_short, short_length, is_spoilt, split), more = words[:2].tolist()
        limit = chunks.block_size - 3
        if is_short < fixed_point(_SHORT_PROBABILITY):
            limit = 2 + short_length * (limit - 1) // _WORD
        begin, end = int(chunks.begin[chunk]), int(chunks.end[chunk])
        start, stop = int(store.sentences[begin]), int(store.sentences[end])
        if end - begin > 1:
            middle = int(store.sentences[begin + 1 + split * (end - begin - 1) // _WORD])
        else:
            middle = (start + stop) // 2 if self.cuts_a_lone_sentence else stop
        # A segment that alone is too long keeps its end at the other one: with sentences longer
        # than a block there would be fewer coins than tokens to remove.
        pair = store.tokens[start:middle][-limit:], store.tokens[middle:stop][:limit]
        label = int(is_spoilt < fixed_point(0.5) or middle == stop)
        if label:
            pair = self._spoil(chunk, pair, limit, more)
        first, second = _truncate(*pair, limit, words[2:])
        separator = 1 + len(first)
        ids = np.empty(separator + len(second) + 2, dtype=np.int64)
        ids[0], ids[separator], ids[-1] = self.cls_token_id, self.sep_token_id, self.sep_token_id
        ids[1:separator], ids[separator + 1 : -1] = first, second
        types = np.zeros(len(ids), dtype=np.int64)
        types[separator + 1 :] = 1
        return {
            "input_ids": torch.from_numpy(ids),
            "token_type_ids": torch.from_numpy(types),
            self.label: label,
            "sample_index": item["sample_index"],
        }

    def _spoil(self, chunk: int, pair: _Pair, limit: int, words: list[int]) -> _Pair:
        """What a pair becomes if its label is 1; ``words`` are four more random words."""
        raise NotImplementedError


class NextSentencePairs(_SegmentPairs):
    """``[CLS] A [SEP] B [SEP]``, where B follows A in half of the pairs and is random in the other.

    A run of sentences is split in two at a random sentence. With probability 1/2 the second segment
    is replaced by sentences from another document; always, if the run is one sentence, which has no
    second part. The replaced part is not used in this epoch (BERT's data begins the next run with
    it, so that a pair depends on all pairs before it). One pair in ten is cut to a random shorter
    length. A pair that is too long loses tokens one by one from the longer segment, from its front
    or its end with equal chance. All of it is a pure function of (seed, sample index).

    Item i is ``{"input_ids", "token_type_ids": int64 [length], "next_sentence_label": int,
    "sample_index": int}``; label 0 means that B follows A, 1 that it is random, as in
    Transformers' ``BertForPreTraining``.

    Args:
        stream: a stream over ``SentenceChunks``.
        cls_token_id, sep_token_id: the ids put around the segments.

    Raises:
        TooLittleTextError: there is no second document to take a random segment from.
    """

    label = "next_sentence_label"
    cuts_a_lone_sentence = False

    def __init__(self, stream: PretrainingStream, *, cls_token_id: int, sep_token_id: int) -> None:
        super().__init__(stream, cls_token_id=cls_token_id, sep_token_id=sep_token_id)
        where, got = "NextSentencePairs", "a corpus of one document"
        expected = "two or more, since a random segment comes from another document"
        fix = "Separate documents by blank lines, or train without pairs (--no-nsp)."
        several = len(self.chunks.store.documents) > 2
        check(several, where, "stream", got, expected, fix, TooLittleTextError)

    def _spoil(self, chunk: int, pair: _Pair, limit: int, words: list[int]) -> _Pair:
        """Whole sentences of another document, until the pair is full or the document ends."""
        store, (first, _), (other, sentence, _, _) = self.chunks.store, pair, words
        count = len(store.documents) - 1
        document = (int(self.chunks.document[chunk]) + 1 + other * (count - 1) // _WORD) % count
        begin, end = int(store.documents[document]), int(store.documents[document + 1])
        start = begin + sentence * (end - begin) // _WORD
        full = store.sentences[start] + max(1, limit - len(first))
        last = min(int(np.searchsorted(store.sentences, full)), end)
        return first, store.tokens[store.sentences[start] : store.sentences[last]][:limit]


class SentenceOrderPairs(_SegmentPairs):
    """``[CLS] A [SEP] B [SEP]``: two consecutive segments, exchanged in half of the pairs.

    Cut, shortened and truncated as ``NextSentencePairs``, but both segments are of one document,
    so a corpus of one document will do. A run of one sentence is cut in its middle, as the order of
    its halves can be learned too (ALBERT's data pairs it with another document, labelled 1).

    Item i is ``{"input_ids", "token_type_ids": int64 [length], "sentence_order_label": int,
    "sample_index": int}``; label 0 means that B follows A, 1 that A follows B, as in Transformers'
    ``AlbertForPreTraining``.

    Args:
        stream: a stream over ``SentenceChunks``.
        cls_token_id, sep_token_id: the ids put around the segments.
    """

    label = "sentence_order_label"
    cuts_a_lone_sentence = True

    def _spoil(self, chunk: int, pair: _Pair, limit: int, words: list[int]) -> _Pair:
        # Before they are truncated, so that their lengths do not tell.
        return pair[1], pair[0]


def _truncate(first: np.ndarray, second: np.ndarray, limit: int, words: np.ndarray) -> _Pair:
    """Remove tokens from the longer segment, front or end by coin, until both fit in ``limit``."""
    excess = max(0, len(first) + len(second) - limit)
    # The longer one shrinks until both are equal; then they take turns, the second one first.
    from_first = min(max(0, len(first) - len(second)), excess)
    from_second = min(max(0, len(second) - len(first)), excess)
    rest = excess - from_first - from_second
    from_second += rest - rest // 2
    from_first += rest // 2
    coins = int.from_bytes(words.astype("<u4").tobytes(), "little")  # one bit each
    front = (coins & ((1 << from_first) - 1)).bit_count()
    first = first[front : len(first) - (from_first - front)]
    front = (coins >> from_first & ((1 << from_second) - 1)).bit_count()
    return first, second[front : len(second) - (from_second - front)]
