"""Texts as token ids, and batches of similar length without padding.

    texts -> Tokens.of(tokenizer, texts) -> batches(tokens.lengths, budget) -> tokens.batch(texts)

The longest texts come first: what does not fit in memory fails at once. ``batches`` gives the
numbers of the texts, by which the caller puts results in their order.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from fastplm.errors import ArgumentTypeError, ArgumentValueError, check
from fastplm.models._base import most_positions
from fastplm.models._ragged import RaggedBatch

_AT_ONCE = 10_000  # texts


@dataclass(frozen=True)
class Batch:
    """Some texts, as a model of fastplm takes them.

    Args:
        ids: int64 [B, T], padded at the right.
        rows: their tokens alone, [N].
    """

    ids: Tensor
    rows: RaggedBatch


@dataclass(frozen=True)
class Tokens:
    """The token ids of texts, one text after another.

    Args:
        ids: int32 [N].
        offsets: int64 [texts + 1]; text i is ``ids[offsets[i] : offsets[i + 1]]``.
        words: int32 [N], the number of each token's word, -1 for a special token; None for texts
            that are not split into words.
        cut: the numbers of the texts that were longer than the limit.
    """

    ids: np.ndarray
    offsets: np.ndarray
    words: np.ndarray | None
    cut: list[int]

    @classmethod
    def of(
        cls,
        where: str,
        tokenizer: Any,
        texts: Sequence[str] | Sequence[Sequence[str]],
        limit: int | None = None,
        *,
        split: bool = False,
    ) -> Tokens:
        """Tokenize texts, with the special tokens of the tokenizer.

        Args:
            where: the caller, for errors.
            tokenizer: a fast one.
            texts: strings, or with ``split`` lists of words.
            limit: tokens of a text at most; the rest is cut off. None = no limit.
            split: whether the texts are lists of words.

        Raises:
            ArgumentTypeError, ArgumentValueError: a tokenizer or texts of another kind.
        """
        check(
            getattr(tokenizer, "is_fast", False),
            where,
            "tokenizer",
            f"a {type(tokenizer).__name__}",
            "a fast tokenizer",
            "Load it with transformers.AutoTokenizer.",
            ArgumentTypeError,
        )
        kind = list | tuple if split else str
        wrong = next((i for i, text in enumerate(texts) if not isinstance(text, kind)), None)
        check(
            wrong is None and not isinstance(texts, str),
            where,
            "texts",
            f"a {type(texts if wrong is None else texts[wrong]).__name__}"
            + ("" if wrong is None else f" at {wrong}"),
            "lists of words" if split else "a list of strings",
            "Pass a list, even of one text.",
            ArgumentTypeError,
        )
        before_words = tokenizer.backend_tokenizer.pre_tokenizer
        check(
            not split or getattr(before_words, "add_prefix_space", True),
            where,
            "tokenizer",
            "a byte-level tokenizer that adds no space before a word",
            "one that splits a word alone as it does inside a text",
            "Load it with add_prefix_space=True.",
        )
        ids: list[int] = []
        words: list[int] = []
        lengths: list[int] = []
        cut: list[int] = []
        for first in range(0, len(texts), _AT_ONCE):
            encodings = tokenizer(
                list(texts[first : first + _AT_ONCE]),
                is_split_into_words=split,
                truncation=limit is not None,
                max_length=limit,
                return_attention_mask=False,
                return_token_type_ids=False,
                verbose=False,  # about texts longer than the model, which is our business
            ).encodings
            for number, encoding in enumerate(encodings, first):
                ids += encoding.ids
                lengths.append(len(encoding.ids))
                if split:
                    words += [-1 if word is None else word for word in encoding.word_ids]
                if encoding.overflowing:
                    cut.append(number)
        offsets = np.zeros(len(lengths) + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        return cls(
            np.array(ids, np.int32), offsets, np.array(words, np.int32) if split else None, cut
        )

    @property
    def lengths(self) -> np.ndarray:
        """int64 [texts]."""
        return np.diff(self.offsets)

    def places(self, texts: np.ndarray) -> np.ndarray:
        """int64 [N]: where the tokens of some texts are, text by text."""
        return ranges(self.offsets[texts], self.lengths[texts])

    def batch(self, texts: np.ndarray, pad_token_id: int = 0) -> Batch:
        """The tokens of some texts as a batch."""
        lengths = self.lengths[texts]
        seqlen = int(lengths.max())
        mask = np.arange(seqlen) < lengths[:, None]
        ids = np.full(mask.shape, pad_token_id, np.int64)
        ids[mask] = self.ids[self.places(texts)]
        cu_seqlens = np.zeros(len(texts) + 1, np.int32)
        np.cumsum(lengths, out=cu_seqlens[1:])
        rows = RaggedBatch(
            positions=torch.from_numpy(np.flatnonzero(mask)),
            cu_seqlens=torch.from_numpy(cu_seqlens),
            max_seqlen=seqlen,
            key_mask=None,
            batch=len(texts),
            seqlen=seqlen,
        )
        return Batch(torch.from_numpy(ids), rows)


def ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """int64 [sum of lengths]: ``starts[i]``, ``starts[i] + 1``, … of each i, one after another."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    return np.arange(total) + np.repeat(starts - (ends - lengths), lengths)


def batches(lengths: np.ndarray, budget: int) -> Iterator[np.ndarray]:
    """The numbers of the texts of each batch, the longest texts first; of none without a token.

    Args:
        lengths: int64 [texts], tokens of each.
        budget: tokens of a batch at most; a longer text is a batch of its own.
    """
    order = np.argsort(-lengths, kind="stable")
    order = order[: np.count_nonzero(lengths)]
    start = total = 0
    for end, length in enumerate(lengths[order].tolist()):
        if total + length > budget and end > start:
            yield order[start:end]
            start, total = end, 0
        total += length
    if start < len(order):
        yield order[start:]


def longest_input(tokenizer: Any, config: Any) -> int | None:
    """The most tokens of a text that a model takes; None where there is no limit."""
    limits = [limit for limit in (most_positions(config), tokenizer.model_max_length) if limit]
    # Transformers' 1e30 stands for "no limit".
    return min((int(limit) for limit in limits if limit < 1 << 30), default=None)


def limit_of(where: str, tokenizer: Any, config: Any, max_length: int | None) -> int | None:
    """``max_length``, which may not exceed the model's limit, or by default that limit."""
    longest = longest_input(tokenizer, config)
    if max_length is None:
        return longest
    special = tokenizer.num_special_tokens_to_add()
    check(
        special < max_length <= (longest or max_length),
        where,
        "max_length",
        max_length,
        f"{special + 1} to {longest or 'any number'}, what this model takes",
        "Choose a number in between.",
        ArgumentValueError,
    )
    return max_length


def progress_bar(total: int | None, what: str, show: bool) -> Any:
    """A bar on stderr: tokens done, and the time that is left; None = ``total`` is set later.

    Use it as a context, and call ``update(tokens)`` after each batch.
    """
    each = 0.2 if sys.stderr.isatty() else 30.0  # seconds; a log gets few lines
    return tqdm(
        total=total,
        desc=what,
        unit=" tokens",
        unit_scale=True,
        mininterval=each,
        disable=not show,
    )
