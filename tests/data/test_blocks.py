from __future__ import annotations

import multiprocessing
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastplm._checks import DataError
from fastplm.data import BlockDataset, TokenStore, tokenize
from fastplm.data.blocks import split_sentences

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


@pytest.mark.parametrize("block_size", [3, 16, 67])
def test_blocks_cover_the_tokens(store, block_size):
    blocks = BlockDataset(store, block_size, **SPECIAL)
    rows = np.stack([blocks[i]["input_ids"].numpy() for i in range(len(blocks))])
    assert rows.shape[1] == block_size
    assert (rows[:, 0] == 2).all() and (rows[:, -1] == 3).all()
    covered = rows[:, 1:-1].reshape(-1)
    assert 0 <= len(store) - len(covered) < block_size - 2
    assert (covered == store.tokens[: len(covered)]).all()
    with pytest.raises(IndexError):
        blocks[len(blocks)]


def test_one_block_at_least(store):
    assert len(BlockDataset(store, len(store) + 2, **SPECIAL)) == 1
    with pytest.raises(DataError, match=f"{len(store)} tokens"):
        BlockDataset(store, len(store) + 3, **SPECIAL)


def test_no_tokens(tokenizer, tmp_path):
    with pytest.raises(DataError, match="no tokens"):
        tokenize([" \n "], tokenizer, tmp_path)
    assert list(tmp_path.iterdir()) == []


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


def _tokenize_at_once(barrier, documents, tokenizer_path, cache, results):
    from fastplm.data import load_tokenizer

    tokenizer = load_tokenizer(tokenizer_path)
    barrier.wait()
    results.put(tokenize(documents, tokenizer, cache).tokens.tolist())


def test_processes_do_not_spoil_each_others_cache(documents, tokenizer, store, tmp_path):
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(2), context.Queue()
    arguments = (barrier, documents, tmp_path / "tokenizer", tmp_path / "cache", results)
    workers = [context.Process(target=_tokenize_at_once, args=arguments) for _ in range(2)]
    for worker in workers:
        worker.start()
    assert [results.get(timeout=120) for _ in workers] == [store.tokens.tolist()] * 2
    for worker in workers:
        worker.join()
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_large_vocabularies_need_wider_ids(documents, tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path / "saved")
    wide = type(tokenizer).from_pretrained(tmp_path / "saved")
    wide.add_tokens([f"word{i}" for i in range(1 << 16)])
    store = tokenize(["word65535 is a token", *documents], wide, tmp_path / "tokens")
    assert isinstance(store, TokenStore)
    assert store.tokens[0] == len(tokenizer) + (1 << 16) - 1
