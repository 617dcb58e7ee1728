"""Sentences, and the vocabulary of most of their words."""

from __future__ import annotations

from fastplm.classic.words import Words

SENTENCES = [["the", "cat", "sat"], ["a", "dog", "ran", "to", "the", "zoo"], ["stop"]]
WORDS = Words(["<pad>", "<unk>", "<s>", "</s>", "the", "cat", "sat", "a", "dog", "ran", "to"])
