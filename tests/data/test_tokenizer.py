from __future__ import annotations

import subprocess
import sys

import pytest
from transformers import AutoTokenizer

from fastplm._checks import DataError
from fastplm.data import load_tokenizer, train_tokenizer


def test_special_tokens_and_round_trip(tokenizer, documents, tmp_path):
    assert len(tokenizer) == 120
    assert tokenizer.convert_ids_to_tokens(range(5)) == [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
    ]
    tokenizer.save_pretrained(tmp_path)
    for loaded in (AutoTokenizer.from_pretrained(tmp_path), load_tokenizer(tmp_path)):
        assert loaded(documents[3])["input_ids"] == tokenizer(documents[3])["input_ids"]
        assert loaded.mask_token_id == 4
    decoded = tokenizer.decode(tokenizer(documents[0])["input_ids"], skip_special_tokens=True)
    assert decoded.replace(" .", ".") == documents[0]


def test_vocabulary_is_the_same_in_every_process(tmp_path):
    # The trainer of the tokenizers library numbers pieces in the order of a randomised hash map.
    script = (
        "import sys, hashlib;"
        "from fastplm.data.tokenizer import train_tokenizer;"
        "text = ['the quick brown fox jumps over lazy dogs while zebras watch quietly'] * 3;"
        "vocabulary = train_tokenizer(text, 90, sys.argv[1]).get_vocab();"
        "print(hashlib.sha256(repr(sorted(vocabulary.items())).encode()).hexdigest())"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", script, str(tmp_path / str(process))],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for process in range(3)
    }
    assert len(digests) == 1


def test_cached(documents, tmp_path, monkeypatch):
    first = train_tokenizer(documents, 100, tmp_path)
    monkeypatch.setattr("fastplm.data.tokenizer._wordpiece", None)
    assert train_tokenizer(documents, 100, tmp_path).get_vocab() == first.get_vocab()


def test_small_corpus_gives_a_smaller_vocabulary(tmp_path):
    assert len(train_tokenizer(["only a few words"], 1000, tmp_path)) < 60


def test_vocabulary_smaller_than_the_alphabet(documents, tmp_path):
    with pytest.raises(DataError, match="alphabet"):
        train_tokenizer(documents, 12, tmp_path)
    assert not any(path.name[0] != "." for path in tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["missing", "empty"])
def test_load_refuses(tmp_path, kind):
    path = tmp_path / kind
    if kind == "empty":
        path.mkdir()
    with pytest.raises(DataError) as error:
        load_tokenizer(path)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_load_refuses_a_tokenizer_without_a_mask(tmp_path):
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(tmp_path)
    with pytest.raises(DataError, match="pad_token"):
        load_tokenizer(tmp_path)
