"""Texts as token ids, and batches of similar length without padding.

    texts -> Tokens.of(tokenizer, texts) -> batches(tokens.lengths, budget) -> tokens.batch(texts)

The longest texts come first: what does not fit in memory fails at once. ``batches`` gives the
numbers of the texts, by which the caller puts results in their order.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from fastplm.data.tokenizer import for_words
from fastplm.errors import ArgumentTypeError, check, fail
from fastplm.models._base import most_positions
from fastplm.models._ragged import RaggedBatch

_AT_ONCE = 10_000  # texts
_PROBED = 256  # tokens of a vocabulary that are tried as a text
#: What a tokenizer is to leave out, warnings of texts that are longer than the model among it.
ONLY_IDS = {"return_attention_mask": False, "return_token_type_ids": False, "verbose": False}


@dataclass(frozen=True)
class Batch:
    """Some texts, as a model of fastplm takes them."""

    ids: Tensor  # int64 [B, T], padded at the right
    rows: RaggedBatch  # their tokens alone, [N]


@dataclass(frozen=True)
class Tokens:
    """The token ids of texts, one text after another."""

    ids: np.ndarray  # int32 [N]
    offsets: np.ndarray  # int64 [texts + 1]; text i is ids[offsets[i] : offsets[i + 1]]
    #: int32 [N], the number of each token's word, -1 for a special token; None for texts that are
    #: not split into words.
    words: np.ndarray | None
    cut: list[int]  # the numbers of the texts that were longer than the limit

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
        """Tokenize texts, or with ``split`` lists of words, with the tokenizer's special tokens.

        A word has the tokens that it has inside a text. A text is cut off after ``limit`` tokens.
        """
        got, fix = f"a {type(tokenizer).__name__}", "Load it with transformers.AutoTokenizer."
        fast = getattr(tokenizer, "is_fast", False)
        check(fast, where, "tokenizer", got, "a fast tokenizer", fix, ArgumentTypeError)
        if split:
            check_texts(where, "texts", texts, "lists of words", list | tuple)
        else:
            check_texts(where, "texts", texts)
        tokenizer = for_words(where, tokenizer) if split else tokenizer
        ids: list[int] = []
        words: list[int] = []
        lengths: list[int] = []
        cut: list[int] = []
        for first in range(0, len(texts), _AT_ONCE):
            some = list(texts[first : first + _AT_ONCE])
            options = {"is_split_into_words": split, **ONLY_IDS}
            for number, encoding in enumerate(tokenizer(some, **options).encodings, first):
                if limit is not None and len(encoding.ids) > limit:
                    cut.append(number)
                    room = {"truncation": True, "max_length": limit}
                    (encoding,) = tokenizer([some[number - first]], **room, **options).encodings
                ids += encoding.ids
                lengths.append(len(encoding.ids))
                if split:
                    words += [-1 if word is None else word for word in encoding.word_ids]
        words_of = np.array(words, np.int32) if split else None
        return cls(np.array(ids, np.int32), offsets_of(lengths), words_of, cut)

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
        rows = RaggedBatch(
            positions=torch.from_numpy(np.flatnonzero(mask)),
            cu_seqlens=torch.from_numpy(offsets_of(lengths, np.int32)),
            max_seqlen=seqlen,
            key_mask=None,
            batch=len(texts),
            seqlen=seqlen,
        )
        return Batch(torch.from_numpy(ids), rows)


def around(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The tokens that a tokenizer puts before a text, and those that it puts after it."""
    # A vocabulary may lack any letter, but none of its own tokens.
    text = " ".join(["a", *islice(tokenizer.get_vocab(), _PROBED)])
    one = tokenizer(text, return_special_tokens_mask=True, **ONLY_IDS)
    ids, added = one["input_ids"], one["special_tokens_mask"]
    of_text = [place for place, its in enumerate(added) if not its]
    return (ids[: of_text[0]], ids[of_text[-1] + 1 :]) if of_text else ([], [])


def begun(start: list[int], ids: list[int]) -> list[int]:
    """``ids`` with the tokens ``start`` before them, unless they begin with these."""
    return ids if ids[: len(start)] == start else start + ids


def padded(rows: Sequence[Any], pad: int | None, device: torch.device) -> dict[str, Tensor]:
    """``input_ids`` [B, T] of rows of ids, and their ``attention_mask`` if there is padding."""
    ids = [torch.as_tensor(row, device="cpu") for row in rows]
    inputs = {"input_ids": pad_sequence(ids, True, pad or 0)}
    lengths = torch.tensor([len(row) for row in rows], device="cpu")
    seqlen = inputs["input_ids"].shape[1]
    if int(lengths.min()) < seqlen:
        inputs["attention_mask"] = torch.arange(seqlen, device="cpu") < lengths[:, None]
    return {name: value.to(device) for name, value in inputs.items()}


@contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """In this block dropout is off, and no gradient is recorded."""
    trained = [module for module in model.modules() if module.training]
    for module in trained:
        module.training = False
    try:
        with torch.inference_mode():
            yield
    finally:
        for module in trained:
            module.training = True


def check_texts(
    where: str, argument: str, texts: Any, expected: str = "a list of strings", kind: Any = str
) -> None:
    """Check that ``texts`` is a list, and its elements are of ``kind``."""
    wrong = next((i for i, text in enumerate(texts) if not isinstance(text, kind)), None)
    if isinstance(texts, str) or wrong is not None:
        at = "" if wrong is None else f" at {wrong}"
        got = f"a {type(texts if wrong is None else texts[wrong]).__name__}{at}"
        fail(where, argument, got, expected, "Pass a list, even of one text.", ArgumentTypeError)


def offsets_of(lengths: Sequence[int] | np.ndarray, dtype: type = np.int64) -> np.ndarray:
    """[n + 1]: where each of n parts begins, and where the last one ends."""
    offsets: np.ndarray = np.zeros(len(lengths) + 1, dtype)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """int64 [sum of lengths]: ``starts[i]``, ``starts[i] + 1``, … of each i, one after another."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    return np.arange(total) + np.repeat(starts - (ends - lengths), lengths)


def batches(lengths: np.ndarray, budget: int) -> Iterator[np.ndarray]:
    """The numbers of the texts of each batch, the longest texts first; of none without a token."""
    order = np.argsort(-lengths, kind="stable")
    order = order[: np.count_nonzero(lengths)]
    for start, end in cuts(lengths[order], budget):
        yield order[start:end]


def cuts(lengths: np.ndarray, budget: int) -> Iterator[tuple[int, int]]:
    """(first, last + 1) of runs of at most ``budget`` tokens; a longer text is a run of its own."""
    start = total = 0
    for end, length in enumerate(lengths.tolist()):
        if total + length > budget and end > start:
            yield start, end
            start, total = end, 0
        total += length
    if start < len(lengths):
        yield start, len(lengths)


def longest_input(tokenizer: Any, config: Any) -> int | None:
    """The most tokens of a text that a model takes; None where there is no limit."""
    limits = [limit for limit in (most_positions(config), tokenizer.model_max_length) if limit]
    # Transformers' 1e30 stands for "no limit".
    return min((int(limit) for limit in limits if limit < 1 << 30), default=None)


def limit_of(where: str, tokenizer: Any, config: Any, max_length: int | None) -> int | None:
    """``max_length``, at most the model's positions; by default what ``longest_input`` says.

    A ``max_length`` that is given is stronger than the tokenizer's ``model_max_length``.
    """
    if max_length is None:
        return longest_input(tokenizer, config)
    special, most = tokenizer.num_special_tokens_to_add(), most_positions(config)
    expected = f"{special + 1} to {most or 'any number'}, what this model takes"
    fits = special < max_length <= (most or max_length)
    check(fits, where, "max_length", max_length, expected, "Choose a number in between.")
    return max_length


def progress_bar(total: int | None, what: str, show: bool, unit: str = "tokens") -> Any:
    """A bar on stderr: tokens done, and the time that is left; None = ``total`` is set later.

    Use it as a context, and call ``update(tokens)`` after each batch.
    """
    each = 0.2 if sys.stderr.isatty() else 30.0  # seconds; a log gets few lines
    options: dict[str, Any] = {"unit": f" {unit}", "unit_scale": True, "mininterval": each}
    return tqdm(total=total, desc=what, disable=not show, **options)
