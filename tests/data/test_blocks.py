from __future__ import annotations

import json
import os
import pickle
import shutil

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastplm.data import BlockDataset, PackedDocuments, SentenceChunks, TokenStore, tokenize
from fastplm.data.blocks import split_sentences
from fastplm.errors import ArgumentTypeError, ArgumentValueError, DataError

SPECIAL = {"cls_token_id": 2, "sep_token_id": 3}


def test_store_holds_every_token_in_order(store, documents, tokenizer):
    expected = tokenizer(documents, add_special_tokens=False)["input_ids"]
    assert store.tokens.tolist() == [token for ids in expected for token in ids]
    for document, ids in enumerate(expected):
        begin, end = store.documents[document], store.documents[document + 1]
        assert store.tokens[store.sentences[begin] : store.sentences[end]].tolist() == ids
        assert end - begin == len(split_sentences(documents[document]))
    assert len(store.documents) == len(documents) + 1


@given(st.text(alphabet="ab. !?\n\t", max_size=60))
@settings(max_examples=200, deadline=None)
def test_sentences_joined_are_the_document(text):
    assert "".join(split_sentences(text)) == text


@pytest.mark.parametrize("special", [SPECIAL, {}, {"cls_token_id": 2}, {"sep_token_id": 3}])
@pytest.mark.parametrize("room", [1, 14, 65])
def test_blocks_cover_the_tokens(store, room, special):
    blocks = BlockDataset(store, room + len(special), **special)
    rows = np.stack([blocks[i]["input_ids"].numpy() for i in range(len(blocks))])
    assert rows.shape[1] == room + len(special) and rows.dtype == np.int64
    if "cls_token_id" in special:
        assert (rows[:, 0] == 2).all()
        rows = rows[:, 1:]
    if "sep_token_id" in special:
        assert (rows[:, -1] == 3).all()
        rows = rows[:, :-1]
    covered = rows.reshape(-1)
    assert 0 <= len(store) - len(covered) < room
    assert (covered == store.tokens[: len(covered)]).all()
    with pytest.raises(IndexError):
        blocks[len(blocks)]


@pytest.mark.parametrize("special", [SPECIAL, {}])
def test_one_block_at_least(store, special):
    assert len(BlockDataset(store, len(store) + len(special), **special)) == 1
    with pytest.raises(DataError, match=f"{len(store)} tokens"):
        BlockDataset(store, len(store) + len(special) + 1, **special)
    with pytest.raises(ArgumentValueError, match=f"expected {len(special) + 1} or more"):
        BlockDataset(store, len(special), **special)


def test_split_loses_nothing(store):
    train, held_out = store.split(0.1)
    assert len(train) + len(held_out) == len(store)
    assert 0.05 < len(held_out) / len(store) < 0.15
    assert np.concatenate([train.tokens, held_out.tokens]).tolist() == store.tokens.tolist()
    for part in (train, held_out):
        assert part.documents[0] == 0 == part.sentences[0]
        assert part.documents[-1] == len(part.sentences) - 1
        assert part.sentences[-1] == len(part)
        assert (np.diff(part.sentences) > 0).all() and (np.diff(part.documents) > 0).all()
    again, _ = train.split(0.5)
    assert again.tokens.tolist() == store.tokens[: len(again)].tolist()


def test_pickle_does_not_copy_the_tokens(store):
    _, held_out = store.split(0.2)
    data = pickle.dumps(held_out)
    assert len(data) < 2000
    assert pickle.loads(data).tokens.tolist() == held_out.tokens.tolist()


def test_cache_is_keyed_by_corpus_and_tokenizer(documents, tokenizer, tmp_path, monkeypatch):
    tokenize(documents, tokenizer, tmp_path)
    tokenize(documents[:-1], tokenizer, tmp_path)
    assert len(list(tmp_path.iterdir())) == 2
    monkeypatch.setattr("fastplm.data.blocks._write_tokens", None)
    tokenize(documents, tokenizer, tmp_path)


def test_padding_and_truncation_of_the_tokenizer_do_not_count(documents, tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path / "saved")
    other = type(tokenizer).from_pretrained(tmp_path / "saved")
    other(documents[:3], truncation=True, max_length=5, padding="max_length")
    assert other.backend_tokenizer.truncation is not None
    expected = sum(map(len, tokenizer(documents, add_special_tokens=False)["input_ids"]))
    assert len(tokenize(documents, other, tmp_path / "tokens")) == expected


def test_large_vocabularies_need_wider_ids(documents, tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path / "saved")
    wide = type(tokenizer).from_pretrained(tmp_path / "saved")
    wide.add_tokens([f"word{i}" for i in range(1 << 16)])
    store = tokenize(["word65535 is a token", *documents], wide, tmp_path / "tokens")
    assert isinstance(store, TokenStore)
    assert store.tokens[0] == len(tokenizer) + (1 << 16) - 1


def test_vocabularies_with_holes_need_wider_ids(documents, tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path / "saved")
    file = tmp_path / "saved" / "tokenizer.json"
    description = json.loads(file.read_text())
    description["model"]["vocab"]["anna"] = 1 << 16
    file.write_text(json.dumps(description))
    store = tokenize(documents, type(tokenizer).from_pretrained(tmp_path / "saved"), tmp_path)
    assert store.vocab_size == (1 << 16) + 1 and (store.tokens == 1 << 16).any()


@pytest.mark.parametrize(
    "wrong, error, words",
    [
        (iter(["a text"]), ArgumentTypeError, "which is read only once"),
        ("a text", ArgumentTypeError, "`documents` got a str"),
        (None, ArgumentTypeError, "`documents` got a NoneType"),
        (["a", 3], DataError, "3 as document 1"),
        (["ab\ud800"], DataError, "document 0, where letter 2 is half"),
        ([" \n"], DataError, "no tokens"),
    ],
)
def test_documents_that_are_none(wrong, error, words, tokenizer, tmp_path):
    with pytest.raises(error, match=words):
        tokenize(wrong, tokenizer, tmp_path)


def test_a_cache_that_cannot_be_written(tokenizer, tmp_path):
    (tmp_path / "file").write_text("no folder")
    for cache in (tmp_path / "file", tmp_path / "file" / "c"):
        with pytest.raises(DataError, match=r"a folder that can be .* Choose another one \(--cac"):
            tokenize(["a"], tokenizer, cache)


# --- files that are not what tokenize wrote -------------------------------------------------------

FILES = ("meta.json", "tokens.bin", "sentences.bin", "documents.bin")


@pytest.fixture
def copy(store, tmp_path):
    """A folder with the files of a store, to damage."""
    for name in FILES:
        shutil.copy(store.directory / name, tmp_path)
    return tmp_path


def change(file, place, value):
    numbers = np.fromfile(file, dtype=np.uint16 if file.name == "tokens.bin" else np.int64)
    numbers[place] = value
    numbers.tofile(file)


@pytest.mark.parametrize("name", FILES)
def test_files_missing_empty_cut_or_too_long(copy, name):
    file = copy / name
    data = file.read_bytes()
    for wrong in (b"", data[:-1], data[:-8], data + b"x", data + data[-8:], b"\xff" * len(data)):
        file.write_bytes(wrong)
        with pytest.raises(DataError, match=name) as error:
            BlockDataset(TokenStore(copy), 16, **SPECIAL)
        assert f"Delete the folder {copy}" in str(error.value)
    file.unlink()
    with pytest.raises(DataError, match="No such file"):
        TokenStore(copy)
    file.mkdir()
    with pytest.raises(DataError, match=name):
        TokenStore(copy)


@pytest.mark.parametrize(
    "meta",
    [
        "[]",
        '{"dtype": "float64"}',
        '{"dtype": "object"}',
        '{"dtype": "uint16", "vocab_size": true}',
        '{"dtype": "uint16", "vocab_size": 4294967296}',
        "[" * 100_000,
        "\x00",
    ],
    ids=lambda meta: meta[:40],
)
def test_meta_of_another_kind(copy, meta):
    (copy / "meta.json").write_text(meta)
    with pytest.raises(DataError, match="meta.json"):
        TokenStore(copy)


@pytest.mark.parametrize(
    "name, place, value, expected",
    [
        ("tokens.bin", 5, 65_535, "token 5 is 65535; expected 0 to 119"),
        ("sentences.bin", 3, 0, "entries 2 and 3 are"),
        ("sentences.bin", 3, 1 << 40, "entries 3 and 4 are"),
        ("documents.bin", 1, -1, "entries 0 and 1 are 0 and -1"),
        ("documents.bin", 7, 1 << 62, "entries 7 and 8 are"),
        ("sentences.bin", 0, 1, "from 1 to"),
    ],
)
@pytest.mark.parametrize(
    "read",
    [
        lambda store: BlockDataset(store, 16, **SPECIAL),
        lambda store: SentenceChunks(store, 16),
        lambda store: PackedDocuments(store, 16),
        lambda store: BlockDataset(store.split(0.1)[1], 16, **SPECIAL),
    ],
    ids=["blocks", "chunks", "packed", "part"],
)
def test_impossible_numbers(copy, name, place, value, expected, read):
    change(copy / name, place, value)
    with pytest.raises(DataError, match=expected):
        read(TokenStore(copy))


def test_files_are_read_again_when_they_change(copy):
    TokenStore(copy).validate()
    TokenStore(copy).validate()
    assert len(list(copy.glob("valid-*"))) == 1
    stat = (copy / "tokens.bin").stat()
    change(copy / "tokens.bin", 5, 65_535)
    os.utime(copy / "tokens.bin", ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    with pytest.raises(DataError, match="token 5"):
        TokenStore(copy).validate()


def test_ranges_outside_the_store(store):
    count = len(store.sentences) - 1
    for first, last in ((-1, 3), (4, 3), (0, count + 1)):
        with pytest.raises(ArgumentValueError, match="first, last"):
            TokenStore(store.directory, first, last)
    assert len(TokenStore(store.directory, count, count)) == 0
