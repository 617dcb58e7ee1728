"""Label words of a prompt that a model cannot tell apart, or does not know."""

from __future__ import annotations

import pytest
import tokenizers
import torch
import transformers

from fastplm.errors import ArgumentValueError
from fastplm.inference.prompt import Prompt, score_labels
from fastplm.models import BertForMaskedLM

VOCABULARY = ["[PAD]", "[UNK]", "[MASK]", "it", "was", "great", "bad", "the", "film"]


@pytest.fixture(scope="module")
def bert():
    """A tiny model and a tokenizer of whole words in small letters."""
    words = tokenizers.models.WordLevel(dict(zip(VOCABULARY, range(9), strict=True)), "[UNK]")
    plain = tokenizers.Tokenizer(words)
    plain.normalizer = tokenizers.normalizers.Lowercase()
    plain.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="[PAD]", unk_token="[UNK]", mask_token="[MASK]"
    )
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.BertConfig(vocab_size=9, num_hidden_layers=1, **sizes)
    return BertForMaskedLM(config), tokenizer


def score(bert, labels):
    return score_labels(*bert, Prompt("{text} it was {label}", labels), [("the film",)]).texts


@pytest.mark.parametrize(
    "labels, said",
    [
        ({"good": ["grand"], "bad": ["bad"]}, r"the word 'grand' of 'good', .* \[UNK\]"),
        ({"good": ["great"], "bad": ["bad", "so awful"]}, r"the word 'so awful' of 'bad'"),
        (
            {"good": ["great"], "bad": ["GREAT"]},
            "'great' of 'good' and 'GREAT' of 'bad', .*: great;",
        ),
        ({"a": ["bad", "great"], "b": ["it"], "c": ["Bad"]}, "'bad' of 'a' and 'Bad' of 'c'"),
    ],
)
def test_words_that_say_nothing(labels, said, bert):
    with pytest.raises(ArgumentValueError, match=f"prompt: `labels` got .*{said}"):
        score(bert, labels)


def test_words_that_say_something(bert):
    # Labels may contain an unknown part, or a word twice, if they still differ.
    labels = {"good": ["great", "Great"], "bad": ["bad", "bad awful"]}
    assert score(bert, labels).shape == (1, 2)
