"""Text as words: the vocabulary of the systems before subwords."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from fastplm.data.blocks import split_sentences
from fastplm.errors import DataError, TooLittleTextError, check, message

#: The first words of every vocabulary: padding, unknown, and a sentence's two ends.
SPECIAL_WORDS = ("<pad>", "<unk>", "<s>", "</s>")
PAD, UNK, BEGIN, END = range(len(SPECIAL_WORDS))
_FILE = "words.json"
#: Bytes of a word, its two ends among them; and what is written for them beside the 256 bytes.
WORD_BYTES = 50
_SENTENCE_BEGIN, _SENTENCE_END, _WORD_BEGIN, _WORD_END, _NO_BYTE = range(256, 261)


class Words:
    """A vocabulary of words, the most frequent first.

    Words are what BERT's pre-tokenizer cuts a text into: runs of letters and digits, and each
    punctuation mark. Case is kept.

    Args:
        names: the words, ``SPECIAL_WORDS`` first.

    Raises:
        DataError: the names do not begin so, or one stands there twice.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = list(names)
        self.ids = {name: index for index, name in enumerate(self.names)}
        first = tuple(self.names[: len(SPECIAL_WORDS)])
        whole = first == SPECIAL_WORDS and len(self.ids) == len(self.names)
        expected = f"words that begin with {', '.join(SPECIAL_WORDS)}, each of them once"
        check(whole, "Words", "names", list(first), expected, "Use Words.train.", DataError)

    def __len__(self) -> int:
        return len(self.names)

    @classmethod
    def train(cls, documents: Iterable[str], size: int) -> Words:
        """The ``size`` most frequent words of documents, ties in the order of the alphabet.

        Raises:
            TooLittleTextError: there is no word.
        """
        counts: Counter[str] = Counter()
        for document in documents:
            counts.update(split_words(document))
        found = sorted(counts.keys() - set(SPECIAL_WORDS), key=lambda w: (-counts[w], w))
        if not found:
            text = message("Words.train", "documents", "no word", "some text", "Give more text.")
            raise TooLittleTextError(text)
        return cls([*SPECIAL_WORDS, *found[: size - len(SPECIAL_WORDS)]])

    def save(self, folder: str | Path) -> None:
        """Write ``words.json``."""
        text = json.dumps(self.names, ensure_ascii=False, indent=0)
        (Path(folder) / _FILE).write_text(text, "utf-8")

    def save_pretrained(self, folder: str | Path) -> None:
        """``save``, under the name of tokenizers."""
        self.save(folder)

    @classmethod
    def load(cls, folder: str | Path) -> Words:
        """Read ``words.json``.

        Raises:
            DataError: it is missing or damaged.
        """
        path = Path(folder) / _FILE
        try:
            names = json.loads(path.read_text("utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            expected, fix = "a folder that `fastplm classic` wrote", "Check the path."
            raise DataError(message("Words.load", "folder", path, expected, fix)) from error
        return cls(names)

    def encode(self, text: str, room: int | None = None) -> list[int]:
        """The ids of the words of a text between ``<s>`` and ``</s>``, ``room`` at most in all."""
        ids = [self.ids.get(word, UNK) for word in split_words(text)]
        if room is not None:
            ids = ids[: room - 2]
        return [BEGIN, *ids, END]


def split_words(text: str) -> list[str]:
    """Runs of letters and digits, and punctuation marks."""
    return [word for word, _ in _pre_tokenizer().pre_tokenize_str(text)]


_known: list[Any] = []


def _pre_tokenizer() -> Any:
    if not _known:
        from tokenizers import pre_tokenizers

        _known.append(pre_tokenizers.BertPreTokenizer())
    return _known[0]


def word_bytes(words: Sequence[str]) -> Tensor:
    """The UTF-8 bytes of words, as ELMo reads them.

    A word is its begin, at most 48 bytes, its end, and then padding; the ends of a sentence have a
    symbol of their own between the same two, and ``<pad>`` is padding alone.

    Args:
        words: N of them.

    Returns:
        int64 [N, 50], 0 to 260.
    """
    rows = np.full((len(words), WORD_BYTES), _NO_BYTE, dtype=np.int64)
    for row, word in zip(rows, words, strict=True):
        if word == SPECIAL_WORDS[PAD]:
            continue
        inside = list(word.encode()[: WORD_BYTES - 2])
        if word == SPECIAL_WORDS[BEGIN]:
            inside = [_SENTENCE_BEGIN]
        elif word == SPECIAL_WORDS[END]:
            inside = [_SENTENCE_END]
        row[0] = _WORD_BEGIN
        row[1 : 1 + len(inside)] = inside
        row[1 + len(inside)] = _WORD_END
    return torch.from_numpy(rows)


class Sentences(Dataset):
    """The sentences of documents in their order, with a mark where a document begins.

    Item i is ``{"index": i}``: what a sample is made of beside the sentence (its neighbours, its
    letters) the collator of a system knows.

    Args:
        documents: an iterable of texts.
        length: words of a sentence at most; what is longer is cut.

    Raises:
        TooLittleTextError: fewer than four sentences.
    """

    def __init__(self, documents: Iterable[str], length: int) -> None:
        self.words: list[list[str]] = []
        self.begins: list[bool] = []
        self.cut = 0
        for document in documents:
            first = True
            for sentence in split_sentences(document):
                words = split_words(sentence)
                if not words:
                    continue
                self.cut += max(0, len(words) - length)
                self.words.append(words[:length])
                self.begins.append(first)
                first = False
        if len(self.words) < 4:
            got, expected = f"{len(self.words)} sentences", "four at least"
            raise TooLittleTextError(
                message("Sentences", "documents", got, expected, "Give more text.")
            )

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: int) -> dict[str, int]:
        return {"index": index}
