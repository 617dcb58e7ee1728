"""Text as words: the vocabulary of the systems before subwords."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from tokenizers.pre_tokenizers import BertPreTokenizer
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
        right = first == SPECIAL_WORDS and len(self.ids) == len(self.names)
        expected = f"words that begin with {', '.join(SPECIAL_WORDS)}, each of them once"
        check(right, "Words", "names", list(first), expected, "Use Words.train.", DataError)

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
        got, fix = "no word", "Give more text."
        check(bool(found), "Words.train", "documents", got, "some text", fix, TooLittleTextError)
        return cls([*SPECIAL_WORDS, *found[: size - len(SPECIAL_WORDS)]])

    def save_pretrained(self, folder: str | Path) -> None:
        """Write ``words.json``."""
        text = json.dumps(self.names, ensure_ascii=False, indent=0)
        (Path(folder) / _FILE).write_text(text, "utf-8")

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

    def encode(self, words: Iterable[str]) -> list[int]:
        """The ids of words between ``<s>`` and ``</s>``; ``split_words`` makes them of a text."""
        return [BEGIN, *(self.ids.get(word, UNK) for word in words), END]


def split_words(text: str) -> list[str]:
    """Runs of letters and digits, and punctuation marks."""
    return [word for word, _ in BertPreTokenizer().pre_tokenize_str(text)]


def word_bytes(words: Sequence[str]) -> Tensor:
    """The UTF-8 bytes of words, as ELMo reads them.

    A word is its begin, at most 48 bytes, its end, and then padding; the ends of a sentence have a
    symbol of their own between the same two, and ``<pad>`` is padding alone.

    Args:
        words: N of them.

    Returns:
        int64 [N, 50], 0 to 260.
    """
    ends = {SPECIAL_WORDS[BEGIN]: [_SENTENCE_BEGIN], SPECIAL_WORDS[END]: [_SENTENCE_END]}
    rows = np.full((len(words), WORD_BYTES), _NO_BYTE, dtype=np.int64)
    for row, word in zip(rows, words, strict=True):
        if word != SPECIAL_WORDS[PAD]:
            inside = ends.get(word) or word.encode()[: WORD_BYTES - 2]
            row[: len(inside) + 2] = [_WORD_BEGIN, *inside, _WORD_END]
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
            sentences = [*filter(None, map(split_words, split_sentences(document)))]
            self.cut += sum(max(0, len(words) - length) for words in sentences)
            self.words += [words[:length] for words in sentences]
            self.begins += [number == 0 for number in range(len(sentences))]
        enough, got = len(self.words) >= 4, f"{len(self.words)} sentences"
        fix = "Give more text."
        check(enough, "Sentences", "documents", got, "four at least", fix, TooLittleTextError)

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: int) -> dict[str, int]:
        return {"index": index}
