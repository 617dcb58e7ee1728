"""Parallel text for multilingual distillation, and batches of text as it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch.utils.data import Dataset

from fastplm.data import Collator, TokenStore, tokenize
from fastplm.data._folder import say
from fastplm.data.sources import texts_of
from fastplm.errors import DataError, check

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: The tokens of the sentences for the teacher and for the student, and of the translations.
Stores = tuple[TokenStore, TokenStore, TokenStore]
_WHERE = "distill"


@dataclass(eq=False)
class PlainCollator(Collator):
    """Batches of text without any noise and without labels."""

    random: ClassVar[bool] = False

    def corrupt(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Nothing is corrupted."""
        return {name: value for name, value in batch.items() if name != "special_tokens_mask"}


@dataclass(eq=False)
class ParallelCollator(PlainCollator):
    """Batches of ``ParallelText``: the sentences, then their translations, and the teacher's.

    Args:
        tokenizer: the student's.
        teacher_tokenizer: the teacher's.

    Returns:
        What ``Collator.pad`` returns for twice as many rows, and ``teacher_input_ids`` and
        ``teacher_attention_mask``.
    """

    teacher_tokenizer: Any = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._teacher = PlainCollator(self.teacher_tokenizer)

    def pad(self, samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
        def side(name: str) -> list[dict[str, Any]]:
            return [{"input_ids": s[name], "sample_index": s["sample_index"]} for s in samples]

        teacher = self._teacher.pad(side("teacher"))
        return {
            **super().pad([*side("source"), *side("translation")]),
            "teacher_input_ids": teacher["input_ids"],
            "teacher_attention_mask": teacher["attention_mask"],
        }


class ParallelText(Dataset):
    """Sentences and their translations, as tokens of two vocabularies.

    Item i is ``{"teacher", "source", "translation"}``: int64 ids, cut to ``block_size`` with the
    special tokens around them.

    Args:
        teacher, source, translation: the sentences for the teacher, the same for the student, and
            their translations; a document each.
        ends: the (first, last) special token of the teacher and of the student.
        block_size: most tokens of a sentence.
        first, last: the range of sentences; all by default.
    """

    def __init__(
        self,
        stores: Stores,
        ends: tuple[tuple[int, int], tuple[int, int]],
        block_size: int,
        first: int = 0,
        last: int | None = None,
    ) -> None:
        self.stores, self.block_size = stores, block_size
        self.ends = (ends[0], ends[1], ends[1])
        self.first = first
        self.last = len(stores[0].documents) - 1 if last is None else last
        for store in stores:
            store.validate()

    def __len__(self) -> int:
        return self.last - self.first

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        names = ("teacher", "source", "translation")
        return {
            name: self._sentence(store, ends, self.first + index)
            for name, store, ends in zip(names, self.stores, self.ends, strict=True)
        }

    def _sentence(self, store: TokenStore, ends: tuple[int, int], index: int) -> torch.Tensor:
        begin, end = store.sentences[store.documents[index : index + 2]]
        text = store.tokens[begin : min(end, begin + self.block_size - 2)].astype(np.int64)
        return torch.from_numpy(np.concatenate([[ends[0]], text, [ends[1]]]))


def parallel_lines(
    corpus: Sequence[str | Path], translation: Sequence[str | Path]
) -> tuple[list[str], list[str]]:
    """The lines of files and the lines of their translations, without pairs of which one is blank.

    Raises:
        DataError: the files do not belong together, or hold no pair.
    """
    got = f"{len(translation)} files for {len(corpus)} of the corpus"
    fix = "Name a translation for each file."
    as_many, expected = len(corpus) == len(translation), "as many files, in the same order"
    check(as_many, _WHERE, "translation", got, expected, fix, DataError)
    sides: tuple[list[str], list[str]] = ([], [])
    for pair in zip(corpus, translation, strict=True):
        lines = [[(text or "").strip() for _, text in texts_of(path)] for path in pair]
        got = f"{pair[1]}, a file of {len(lines[1]):,} lines"
        expected = f"{len(lines[0]):,}, one for each line of {pair[0]}"
        as_many, fix = len(lines[0]) == len(lines[1]), "Give files that belong together."
        check(as_many, _WHERE, "translation", got, expected, fix, DataError)
        for all_of, own in zip(sides, lines, strict=True):
            all_of.extend(own)
    whole = [bool(source and target) for source, target in zip(*sides, strict=True)]
    check(any(whole), _WHERE, "corpus", "no pair of lines", "text", "Check the files.", DataError)
    if not all(whole):
        say(f"{whole.count(False):,} pairs of lines are left out, as one side is blank.")
    kept = [[line for line, keep in zip(side, whole, strict=True) if keep] for side in sides]
    return kept[0], kept[1]


def parallel_stores(
    lines: tuple[list[str], list[str]],
    teacher_tokenizer: PreTrainedTokenizerBase,
    tokenizer: PreTrainedTokenizerBase,
    cache: str | Path,
) -> Stores:
    """The tokens of the sentences for the teacher and for the student, and of the translations.

    Raises:
        DataError: a line has no token in one of the vocabularies.
    """
    source, translation = lines
    ours, translated = (tokenize(lines, tokenizer, cache) for lines in (source, translation))
    stores = (tokenize(source, teacher_tokenizer, cache), ours, translated)
    for store in stores:
        missing = len(source) - len(store.documents) + 1
        got = f"{missing:,} lines without any token in the vocabulary"
        expected, fix = "words in each line of both sides", "Remove these pairs of lines."
        check(missing == 0, _WHERE, "corpus", got, expected, fix, DataError)
    return stores
