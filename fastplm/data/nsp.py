"""Next-sentence prediction: pairs of segments, half of them torn apart.

Source: Devlin et al. 2019, "BERT: Pre-training of Deep Bidirectional Transformers", appendix A.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from fastplm._checks import DataError, check
from fastplm.data.blocks import TokenStore, check_enough_tokens
from fastplm.data.stream import PretrainingStream
from fastplm.reference.philox import Stream, draw, fixed_point

_SHORT_PROBABILITY = 0.1
_WORD = 1 << 32


class SentenceChunks(Dataset):
    """Runs of sentences of one document that fill a block: what pairs are made of.

    Sentences are added until the run has ``block_size - 3`` tokens or the document ends, as BERT's
    data is cut; every sentence is in one run. Item i is ``{"chunk": i}``.

    Args:
        store: the tokens.
        block_size: tokens a pair, ``[CLS]`` and two ``[SEP]`` included.

    Attributes:
        begin, end: int64 ``[chunks]``, the first sentence of each run and the one after its last.
        document: int64 ``[chunks]``, the document of each run.

    Raises:
        DataError: fewer tokens than one block needs, or no second document to take a random
            segment from.
    """

    def __init__(self, store: TokenStore, block_size: int) -> None:
        check(block_size >= 5, "SentenceChunks", "block_size", block_size, "5 or more", "Raise it.")
        self.store, self.block_size = store, block_size
        check_enough_tokens("SentenceChunks", store, block_size - 3)
        check(
            len(store.documents) > 2,
            "SentenceChunks",
            "store",
            "a corpus of one document",
            "two or more, since a random segment comes from another document",
            "Separate documents by blank lines, or train without pairs (--no-nsp).",
            DataError,
        )
        chunks = []
        for document, (sentence, last) in enumerate(
            zip(store.documents[:-1].tolist(), store.documents[1:].tolist(), strict=True)
        ):
            while sentence < last:
                full = store.sentences[sentence] + block_size - 3
                end = min(int(np.searchsorted(store.sentences, full)), last)
                if store.sentences[end] - store.sentences[sentence] >= 2:
                    chunks.append((sentence, end, document))
                sentence = end
        self.begin, self.end, self.document = np.array(chunks, dtype=np.int64).reshape(-1, 3).T

    def __len__(self) -> int:
        return len(self.begin)

    def __getitem__(self, index: int) -> dict[str, int]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return {"chunk": index}


class NextSentencePairs(Dataset):
    """``[CLS] A [SEP] B [SEP]``, where B follows A in half of the pairs and is random in the other.

    A run of sentences is split in two at a random sentence. With probability 1/2 the second segment
    is replaced by sentences from another document. One pair in ten is cut to a random shorter
    length. A pair that is too long loses tokens one by one from the longer segment, from its front
    or its end with equal chance. All of it is a pure function of (seed, sample index).

    Item i is ``{"input_ids", "token_type_ids": int64 [length], "next_sentence_label": int,
    "sample_index": int}``; label 0 means that B follows A, 1 that it is random, as in
    Transformers' ``BertForPreTraining``.

    Args:
        stream: a stream over ``SentenceChunks``.
        cls_token_id, sep_token_id: the ids put around the segments.
    """

    def __init__(self, stream: PretrainingStream, *, cls_token_id: int, sep_token_id: int) -> None:
        self.stream = stream
        self.cls_token_id, self.sep_token_id = cls_token_id, sep_token_id

    def __len__(self) -> int:
        return len(self.stream)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Several items at once, as DataLoader asks for them."""
        items = [self.stream[index] for index in indices]
        samples = torch.tensor([item["sample_index"] for item in items])[:, None]
        chunks: SentenceChunks = self.stream.dataset  # type: ignore[assignment]
        # Two counters hold the choices, the others one bit for each token that may be removed.
        counters = torch.arange(2 + -(-chunks.block_size // 128))[None, :]
        words = torch.stack(
            draw(self.stream.seed, Stream.PAIR, sample_index=samples, position=counters), dim=-1
        ).numpy()
        return [self._pair(chunks, item, row) for item, row in zip(items, words, strict=True)]

    def _pair(self, chunks: SentenceChunks, item: dict[str, Any], words: Any) -> dict[str, Any]:
        store, chunk = chunks.store, item["chunk"]
        (is_short, short_length, is_random, split), (other, sentence, _, _) = words[:2].tolist()
        limit = chunks.block_size - 3
        if is_short < fixed_point(_SHORT_PROBABILITY):
            limit = 2 + short_length * (limit - 1) // _WORD
        begin, end = int(chunks.begin[chunk]), int(chunks.end[chunk])
        start, stop = int(store.sentences[begin]), int(store.sentences[end])
        if end - begin > 1:
            middle = int(store.sentences[begin + 1 + split * (end - begin - 1) // _WORD])
        else:
            middle = (start + stop) // 2
        first, second = store.tokens[start:middle], store.tokens[middle:stop]
        label = int(is_random < fixed_point(0.5))
        if label:
            room = max(1, limit - len(first))
            second = self._random_segment(chunks, chunk, other, sentence, room)
        first, second = _truncate(first, second, limit, words[2:])
        separator = [self.sep_token_id]
        ids = np.concatenate([[self.cls_token_id], first, separator, second, separator])
        types = np.zeros(len(ids), dtype=np.int64)
        types[len(first) + 2 :] = 1
        return {
            "input_ids": torch.from_numpy(ids.astype(np.int64)),
            "token_type_ids": torch.from_numpy(types),
            "next_sentence_label": label,
            "sample_index": item["sample_index"],
        }

    def _random_segment(
        self, chunks: SentenceChunks, chunk: int, other: int, sentence: int, room: int
    ) -> np.ndarray:
        """Whole sentences of another document, until there are ``room`` tokens or it ends."""
        store = chunks.store
        count = len(store.documents) - 1
        document = (int(chunks.document[chunk]) + 1 + other * (count - 1) // _WORD) % count
        begin, end = int(store.documents[document]), int(store.documents[document + 1])
        first = begin + sentence * (end - begin) // _WORD
        full = store.sentences[first] + room
        last = min(int(np.searchsorted(store.sentences, full)), end)
        return store.tokens[store.sentences[first] : store.sentences[last]]


def _truncate(
    first: np.ndarray, second: np.ndarray, limit: int, words: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Remove tokens from the longer segment, front or end by coin, until both fit in ``limit``.

    What touches the other segment is kept where one is far too long: with sentences longer than a
    block there would be more coins than tokens.
    """
    first, second = first[-limit:], second[:limit]
    excess = max(0, len(first) + len(second) - limit)
    # The longer one shrinks until both are equal; then they take turns, the second one first.
    from_first = min(max(0, len(first) - len(second)), excess)
    from_second = min(max(0, len(second) - len(first)), excess)
    rest = excess - from_first - from_second
    from_second += rest - rest // 2
    from_first += rest // 2
    coins = (words.reshape(-1, 1) >> np.arange(32)) & 1
    coins = coins.reshape(-1)[:excess]
    front = int(coins[:from_first].sum())
    first = first[front : len(first) - (from_first - front)]
    front = int(coins[from_first:].sum())
    return first, second[front : len(second) - (from_second - front)]
