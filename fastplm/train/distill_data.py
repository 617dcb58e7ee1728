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
from fastplm.data._files import lines_of
from fastplm.data._folder import say
from fastplm.errors import DataError, check

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

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
            return [
                {"input_ids": sample[name], "sample_index": sample["sample_index"]}
                for sample in samples
            ]

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
        stores: tuple[TokenStore, TokenStore, TokenStore],
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
    check(
        len(corpus) == len(translation),
        _WHERE,
        "translation",
        f"{len(translation)} files for {len(corpus)} of the corpus",
        "as many files, in the same order",
        "Name a translation for each file.",
        DataError,
    )
    sides: tuple[list[str], list[str]] = ([], [])
    for pair in zip(corpus, translation, strict=True):
        lines = [[line.strip() for line in lines_of(Path(path))] for path in pair]
        check(
            len(lines[0]) == len(lines[1]),
            _WHERE,
            "translation",
            f"{pair[1]}, a file of {len(lines[1]):,} lines",
            f"{len(lines[0]):,}, one for each line of {pair[0]}",
            "Give files that belong together.",
            DataError,
        )
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
) -> tuple[TokenStore, TokenStore, TokenStore]:
    """The tokens of the sentences for the teacher and for the student, and of the translations.

    Raises:
        DataError: a line has no token in one of the vocabularies.
    """
    source, translation = lines
    stores = (
        tokenize(source, teacher_tokenizer, cache),
        tokenize(source, tokenizer, cache),
        tokenize(translation, tokenizer, cache),
    )
    for store in stores:
        found = len(store.documents) - 1
        check(
            found == len(source),
            _WHERE,
            "corpus",
            f"{len(source) - found:,} lines without any token in the vocabulary",
            "words in each line of both sides",
            "Remove these pairs of lines.",
            DataError,
        )
    return stores
