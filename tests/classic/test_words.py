"""Text as words, and words as bytes."""

from __future__ import annotations

import pytest

from fastplm.classic.words import BEGIN, END, UNK, Sentences, Words, split_words, word_bytes
from fastplm.errors import DataError, TooLittleTextError

from .conftest import WORDS


def test_vocabulary():
    words = Words.train(["b a, b c", "c a b"], size=7)
    assert words.names == ["<pad>", "<unk>", "<s>", "</s>", "b", "a", "c"]
    assert words.encode(split_words("a zebra, b")) == [BEGIN, 5, UNK, UNK, 4, END]
    with pytest.raises(TooLittleTextError):
        Words.train([" \n"], size=7)


def test_vocabulary_on_disk(tmp_path):
    WORDS.save_pretrained(tmp_path)
    assert Words.load(tmp_path).names == WORDS.names
    (tmp_path / "words.json").write_text('["a", "b"]')
    with pytest.raises(DataError, match="begin with <pad>"):
        Words.load(tmp_path)
    with pytest.raises(DataError, match="fastplm classic"):
        Words.load(tmp_path / "none")


def test_word_bytes():
    rows = word_bytes(["hi", "ü", "x" * 60, "<s>", "</s>", "<pad>"]).tolist()
    assert rows[0] == [258, 104, 105, 259, *[260] * 46]
    assert rows[1][:4] == [258, 0xC3, 0xBC, 259]
    assert rows[2] == [258, *[ord("x")] * 48, 259]
    assert rows[3][:3] == [258, 256, 259] and rows[4][:3] == [258, 257, 259]
    assert rows[5] == [260] * 50


def test_sentences():
    found = Sentences(["One two. Three!\nFour five six seven.", "\n", "Eight."], length=3)
    assert found.words == [["One", "two", "."], ["Three", "!"], ["Four", "five", "six"],
                           ["Eight", "."]]  # fmt: skip
    assert found.begins == [True, False, False, True] and found.cut == 2
    with pytest.raises(TooLittleTextError, match="four at least"):
        Sentences(["One. Two."], length=3)
