"""Token ids, and batches of similar length."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import fastplm
from fastplm.errors import ArgumentTypeError, ArgumentValueError
from fastplm.inference._batches import Tokens, batches, limit_of, longest_input, ranges

from ..commands import TellsNoRest
from ..models.conftest import small_config
from .conftest import TEXTS


def test_batches_hold_each_text_once_and_no_more_tokens_than_the_budget():
    lengths = np.array([3, 50, 1, 7, 0, 7, 20, 2])
    found = [texts.tolist() for texts in batches(lengths, 21)]
    assert found == [[1], [6], [3, 5, 0, 7, 2]]  # 50 is more than the budget; 0 has no token
    assert not list(batches(np.array([], np.int64), 5))


def test_tokens_are_those_of_the_tokenizer(tokenizer):
    tokens = Tokens.of("test", tokenizer, TEXTS)
    for i, text in enumerate(TEXTS):
        begin, end = tokens.offsets[i : i + 2]
        assert tokens.ids[begin:end].tolist() == tokenizer(text)["input_ids"]
    assert tokens.cut == [] and tokens.words is None


def test_a_batch_is_a_padded_one_and_its_tokens(tokenizer):
    tokens = Tokens.of("test", tokenizer, TEXTS)
    chosen = np.array([6, 0, 3])
    batch = tokens.batch(chosen, pad_token_id=9)
    padded = tokenizer([TEXTS[i] for i in chosen], padding=True, return_tensors="pt")
    mask = padded["attention_mask"].bool()
    assert torch.equal(batch.ids, padded["input_ids"].masked_fill(~mask, 9))
    assert torch.equal(batch.rows.token_mask(), mask)
    assert torch.equal(batch.rows.pack(batch.ids)[0], padded["input_ids"][mask])
    assert batch.rows.cu_seqlens.tolist() == [0, *mask.sum(1).cumsum(0).tolist()]
    assert tokens.batch(np.array([1, 5])).rows.positions.tolist() == list(range(6))


def test_words_have_the_numbers_of_the_words_given(tokenizer):
    tokens = Tokens.of("test", tokenizer, [["ab", "\u200b", "c"], []], split=True)
    assert tokens.words.tolist() == [-1, 0, 0, 2, -1, -1, -1]


@pytest.mark.parametrize("kind", [lambda tokenizer: tokenizer, TellsNoRest])
def test_long_texts_are_cut_off_and_named(kind, tokenizer):
    tokens = Tokens.of("test", kind(tokenizer), TEXTS, limit=6)
    assert tokens.cut == [0, 2, 4, 6]
    assert max(tokens.lengths) == 6
    whole = Tokens.of("test", tokenizer, TEXTS)
    assert [*(whole.lengths > 6).nonzero()[0]] == tokens.cut
    assert tokens.ids[tokens.offsets[1:] - 1].tolist() == [3] * len(TEXTS)  # [SEP] is not cut off


def test_no_command_asks_a_tokenizer_for_what_it_cuts_off():
    """Some versions do not tell; see ``windows`` of finetuning and ``Tokens.of``."""
    sources = Path(fastplm.__file__).parent.rglob("*.py")
    asks = ("return_overflowing_tokens", ".overflowing", "overflow_to_sample_mapping")
    assert not [file for file in sources if any(name in file.read_text() for name in asks)]


def test_what_a_model_takes(tokenizer):
    assert longest_input(tokenizer, small_config("bert", max_position_embeddings=9)) == 9
    assert longest_input(tokenizer, small_config("roberta", max_position_embeddings=9)) == 7
    assert longest_input(tokenizer, small_config("t5")) == 16
    assert limit_of("test", tokenizer, small_config("bert"), 5) == 5
    assert limit_of("test", tokenizer, small_config("bert"), 17) == 17  # the tokenizer's is 16
    assert limit_of("test", tokenizer, small_config("t5"), 1000) == 1000
    for wrong in (2, 21):
        with pytest.raises(ArgumentValueError, match="`max_length` got .*; expected 3 to 20"):
            limit_of("test", tokenizer, small_config("bert"), wrong)


@pytest.mark.parametrize(
    "texts, split, got",
    [("a text", False, "a str"), (["a", 3], False, "a int at 1"), (["a b"], True, "a str at 0")],
)
def test_texts_of_another_kind_are_refused(tokenizer, texts, split, got):
    with pytest.raises(ArgumentTypeError, match=f"`texts` got {got}; expected"):
        Tokens.of("test", tokenizer, texts, split=split)


def test_ranges():
    assert ranges(np.array([5, 0, 9]), np.array([2, 0, 3])).tolist() == [5, 6, 9, 10, 11]
    assert ranges(np.array([], np.int64), np.array([], np.int64)).tolist() == []
