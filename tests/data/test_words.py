from __future__ import annotations

import copy
import os
import re
from pathlib import Path

import pytest
import torch

from fastplm.data import read_documents, train_tokenizer
from fastplm.data.tokenizer import KINDS
from fastplm.data.words import word_ids, word_starts
from fastplm.errors import ArgumentTypeError, DataError

SUFFIXES = ("s", "t", "re", "ve", "m", "ll", "d")


@pytest.fixture(scope="module")
def text(request) -> list[str]:
    """Real text: from $FASTPLM_TEST_DATA, else Python's own."""
    folder = os.environ.get("FASTPLM_TEST_DATA")
    if folder:
        documents = list(read_documents([Path(folder) / "text"]))
    else:
        documents = request.getfixturevalue("embedded")
    # "<unk>" is a word of WikiText and a special token of two kinds.
    return [document.replace("<unk>", "unknown") for document in documents[:200] + documents[-15:]]


@pytest.fixture(scope="module", params=KINDS)
def trained(request, text, tmp_path_factory):
    return train_tokenizer(text, 2500, tmp_path_factory.mktemp("tokenizer"), kind=request.param)


@pytest.fixture(scope="module")
def bytelevel(text, tmp_path_factory):
    return train_tokenizer(text, 2500, tmp_path_factory.mktemp("tokenizer"), kind="bytelevel")


def disagreements(tokenizer, starts, document):
    """(left token, right token, whether a word begins between them by fastplm's table), at every
    place where the tokenizer disagrees."""
    encoding = tokenizer(document)
    tokens, theirs = encoding.tokens(), encoding.word_ids()
    ours = word_ids(torch.tensor(encoding["input_ids"]), starts).tolist()
    for j in range(1, len(tokens)):
        begins = theirs[j] is None or theirs[j] != theirs[j - 1]
        if (ours[j] != ours[j - 1]) != begins:
            yield tokens[j - 1], tokens[j], not begins


@pytest.mark.slow
def test_words_are_those_of_the_tokenizer(trained, text):
    starts = word_starts(trained)
    for document in text[::3]:
        if trained.cls_token == "<s>":  # the next test has the cases that no table can know
            document = " ".join(re.sub(r"[^!-&(-~\s]", "", document).split())
        assert not list(disagreements(trained, starts, document))


def test_byte_level_differs_only_where_it_says(bytelevel, text):
    starts = word_starts(bytelevel)
    boundaries = differing = 0
    for document in text:
        boundaries += len(bytelevel(document).input_ids) - 1
        for left, right, ours_begins in disagreements(bytelevel, starts, document):
            differing += 1
            if ours_begins:
                cut_contraction = left.endswith("'") and right.startswith(SUFFIXES)
                white_space = right[0] in "ĠĊ"
                assert cut_contraction or white_space or not whole(left + right), (left, right)
            else:
                after_contraction = left.removeprefix("'") in SUFFIXES
                assert after_contraction or not whole(left) or not whole(right), (left, right)
    assert 0 < 1000 * differing < boundaries


def whole(token: str) -> bool:
    """The tokens hold no part of a character of several bytes: all letters stand for ASCII."""
    return all("!" <= letter <= "~" or letter in "ĠĊ" for letter in token)


def table(vocabulary, kind):
    """A tokenizer of few tokens."""
    from transformers import BertTokenizer, RobertaTokenizer, T5Tokenizer

    if kind == "wordpiece":
        special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
        return BertTokenizer(vocab={token: i for i, token in enumerate(special + vocabulary)})
    if kind == "bytelevel":
        special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
        return RobertaTokenizer(vocab={token: i for i, token in enumerate(special + vocabulary)})
    special = ["<pad>", "</s>", "<unk>"]
    vocabulary = [(token, -1.0) for token in special + vocabulary]
    return T5Tokenizer(vocab=vocabulary, extra_ids=2)


# A bar stands where a word begins.
@pytest.mark.parametrize(
    "kind, row",
    [
        ("wordpiece", "[CLS]|un ##affa ##ble|,|un|[UNK]|un|[SEP]|[PAD]|[PAD]"),
        ("unigram", "▁un affa ble , <unk> ble|▁|▁un|<extra_id_0>|▁un|</s>|<pad>"),
        ("unigram", "▁ un|▁un"),
        ("bytelevel", '<s>|Hello lo|,|Ġworld s|Ġ20 14|km|-|based|ĠM|3|Ġ( "|Ċ|Hello|</s>|<pad>'),
        ("bytelevel", "Ġit|'s|Ġ lo|Ġ 14|Ċ|Ċ|lo|<mask>|Ġlo"),
        # An emoji and a Greek letter in parts.
        ("bytelevel", "ĠðŁ ĺ Ģ lo"),
        ("bytelevel", "lo Î ± lo"),
    ],
)
def test_where_words_begin(kind, row):
    words = [word.split() for word in row.split("|")]
    tokens = [token for word in words for token in word]
    tokenizer = table(list(dict.fromkeys(tokens)), kind)
    ids = torch.tensor(tokenizer.convert_tokens_to_ids(tokens))
    expected = [i for i, word in enumerate(words, start=1) for _ in word]
    assert word_ids(ids, word_starts(tokenizer)).tolist() == expected


def test_layouts(trained):
    starts = word_starts(trained)
    assert starts.dtype == torch.uint8
    assert len(starts) == len(trained)
    ids = torch.randint(len(trained), (3, 50), generator=torch.Generator().manual_seed(0))
    numbers = word_ids(ids, starts)
    assert numbers.dtype == torch.int64
    for row, number in zip(ids, numbers, strict=True):
        assert torch.equal(word_ids(row, starts), number)
    assert torch.equal(word_ids(ids.int(), starts), numbers)
    assert torch.equal(word_ids(ids.T.contiguous().T, starts), numbers)
    assert word_ids(ids[:, :1], starts).tolist() == [[1], [1], [1]]
    assert word_ids(ids[:, :0], starts).shape == (3, 0)
    # Nothing reads a value of a tensor, so nothing waits for a device.
    assert word_ids(ids.to("meta"), starts.to("meta")).shape == ids.shape


def test_added_tokens_are_words(trained):
    tokenizer = copy.deepcopy(trained)
    before = len(tokenizer)
    tokenizer.add_tokens(["addedword"])
    starts = word_starts(tokenizer)
    assert len(starts) == before + 1
    row = torch.tensor([before, before, before])
    assert word_ids(row, starts).tolist() == [1, 2, 3]


def test_refuses_what_is_no_table(trained):
    with pytest.raises(ArgumentTypeError, match="word_starts"):
        word_ids(torch.tensor([1]), word_starts(trained) > 0)
    with pytest.raises(ArgumentTypeError, match="input_ids"):
        word_ids(torch.tensor([1.0]), word_starts(trained))


def unknown_kinds():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import ByT5Tokenizer, OpenAIGPTTokenizer, PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return [
        PreTrainedTokenizerFast(tokenizer_object=backend),  # has no decoder
        OpenAIGPTTokenizer(),  # marks the ends of words, not their beginnings
        ByT5Tokenizer(),  # does not use the tokenizers library
    ]


@pytest.mark.parametrize("which", range(3))
def test_unknown_kinds(which):
    with pytest.raises(DataError, match="WordPiece, byte-level BPE or SentencePiece") as error:
        word_starts(unknown_kinds()[which])
    assert "\n" not in str(error.value)
