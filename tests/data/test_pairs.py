from __future__ import annotations

import hashlib
import pickle

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from fastplm.data import (
    NextSentencePairs,
    PretrainingStream,
    SentenceChunks,
    SentenceOrderPairs,
    tokenize,
)
from fastplm.data.pairs import _truncate
from fastplm.errors import DataError

SPECIAL = {"cls_token_id": 2, "sep_token_id": 3}
BLOCK = 40


def pairs_of(store, length=1000, seed=0, block_size=BLOCK, kind=NextSentencePairs):
    stream = PretrainingStream(SentenceChunks(store, block_size), seed=seed, length=length)
    return kind(stream, **SPECIAL)


@pytest.fixture
def numbered(store_of):
    """445 documents of 1 to 17 sentences of 1 to 29 tokens; no token id occurs twice."""
    n = np.arange(4000)
    sentences = np.cumsum([0, *(1 + (n * n * 7 + n * 3) % 29)])
    documents = np.cumsum([0, *(1 + (np.arange(444) * 13) % 17)])
    documents = [*documents[documents < 4000], 4000]
    return store_of(10 + np.arange(sentences[-1]), sentences, documents)


def items_of(dataset):
    return dataset.__getitems__(range(len(dataset)))


def segments(item):
    ids, types = item["input_ids"].tolist(), item["token_type_ids"].tolist()
    assert ids[0] == 2 and ids[-1] == 3 and ids.count(3) == 2
    middle = ids.index(3)
    assert types == [0] * (middle + 1) + [1] * (len(ids) - middle - 1)
    return ids[1:middle], ids[middle + 1 : -1]


def test_chunks_cover_every_sentence(store):
    chunks = SentenceChunks(store, BLOCK)
    assert chunks.begin[0] == 0 and chunks.end[-1] == len(store.sentences) - 1
    assert (chunks.begin[1:] == chunks.end[:-1]).all()
    assert (store.documents[chunks.document] <= chunks.begin).all()
    assert (chunks.end <= store.documents[chunks.document + 1]).all()


@pytest.mark.parametrize("kind", [NextSentencePairs, SentenceOrderPairs])
def test_pairs_are_what_their_label_says(numbered, kind):
    pairs = pairs_of(numbered, 4000, kind=kind)
    chunks, ends = pairs.stream.dataset, numbered.sentences[numbered.documents]
    labels, lone = [], []
    for item, source in zip(items_of(pairs), pairs.stream, strict=True):
        first, second = (np.array(segment) - 10 for segment in segments(item))
        assert len(first) and len(second) and len(first) + len(second) <= BLOCK - 3
        assert (np.diff(first) == 1).all() and (np.diff(second) == 1).all()
        chunk, label = source["chunk"], item[kind.label]
        begin, end = (numbered.sentences[at[chunk]] for at in (chunks.begin, chunks.end))
        earlier, later = first, second
        if kind is SentenceOrderPairs and label:
            earlier, later = second, first
        assert begin <= earlier[0] and earlier[-1] < end
        if kind is SentenceOrderPairs or not label:
            assert earlier[-1] < later[0] and later[-1] < end
            if end - begin == len(first) + len(second):  # no token was cut off
                assert earlier[0] == begin and earlier[-1] + 1 == later[0] and later[-1] + 1 == end
        else:  # token ids are places in the store, which tell the document
            document = np.searchsorted(ends, second[0], side="right") - 1
            assert second[-1] < ends[document + 1] and document != chunks.document[chunk]
        if kind is NextSentencePairs and chunks.end[chunk] - chunks.begin[chunk] == 1:
            lone.append(label)
        else:
            labels.append(label)
    # One degree of freedom, p = 0.001.
    assert (sum(labels) - len(labels) / 2) ** 2 / (len(labels) / 4) < 10.83
    assert all(lone) and (len(lone) > 100) == (kind is NextSentencePairs)


def test_one_pair_in_ten_is_short(store):
    lengths = np.array([len(item["input_ids"]) for item in items_of(pairs_of(store, 3000))])
    # Half of the short pairs are below half a block. So are some runs at the end of a document,
    # hence the loose upper bound.
    assert 0.025 < (lengths < BLOCK / 2).mean() < 0.4
    assert (lengths == BLOCK).mean() > 0.3


@pytest.mark.parametrize("kind", [NextSentencePairs, SentenceOrderPairs])
@pytest.mark.parametrize("block_size", [16, 40])
def test_the_length_that_is_expected(store_of, kind, block_size):
    """The mean of 4,096 pairs of long documents is as near to it as chance allows."""
    sentences = 9 * np.arange(6001)
    store = store_of(10 + np.arange(sentences[-1]), sentences, [0, 3000, 6000])
    pairs = pairs_of(store, 4096, block_size=block_size, kind=kind)
    lengths = np.array([len(item["input_ids"]) for item in items_of(pairs)])
    error = 4 * lengths.std() / 4096**0.5
    assert abs(lengths.mean() - kind.expected_length(block_size)) < error < block_size / 20


def test_truncation_takes_from_the_longer_segment_at_both_ends():
    first, second = np.arange(30), np.arange(100, 110)
    words = np.random.default_rng(0).integers(0, 1 << 32, size=(2, 4))
    a, b = _truncate(first, second, 24, words)
    assert len(a) == 14 and len(b) == 10
    assert a[0] > 0 and a[-1] < 29 and (np.diff(a) == 1).all()
    a, b = _truncate(first, second, 9, words)
    assert len(a) == 5 and len(b) == 4  # at equal lengths the second one is cut first
    a, b = _truncate(first, second, 40, words)
    assert len(a) == 30 and len(b) == 10


def test_a_sentence_longer_than_a_block(tokenizer, tmp_path):
    documents = [" ".join(["anna builds the house"] * 40), "boris reads."]
    for item in pairs_of(tokenize(documents, tokenizer, tmp_path), 50, block_size=16):
        first, second = segments(item)
        assert first and second and len(first) + len(second) <= 13


def test_next_sentence_pairs_do_not_change(numbered):
    """The pairs are those of the first version, except for runs of one sentence, which it cut."""
    digest = hashlib.sha256()
    for item in items_of(pairs_of(numbered, 500, seed=5)):
        digest.update(np.array([*item["input_ids"], item["next_sentence_label"]]).tobytes())
    assert digest.hexdigest()[:16] == "ecc64a2ff6e99dde"


def test_lengths_do_not_reveal_the_order(store_of):
    # Both halves of each sentence of 100 tokens are cut to the 13 tokens of a pair: 7 and 6.
    store = store_of(np.arange(400), [0, 100, 200, 300, 400], [0, 4])
    lengths = {0: set(), 1: set()}
    for item in items_of(pairs_of(store, 200, block_size=16, kind=SentenceOrderPairs)):
        if len(item["input_ids"]) == 16:  # not one of the short pairs
            first = item["input_ids"].tolist()[1:].index(3)
            lengths[item["sentence_order_label"]].add(first)
    assert lengths == {0: {7}, 1: {7}}


def test_both_objectives_cut_the_same_runs(numbered):
    different = 0
    for torn, ordered in zip(
        items_of(pairs_of(numbered, 300)),
        items_of(pairs_of(numbered, 300, kind=SentenceOrderPairs)),
        strict=True,
    ):
        if torn["next_sentence_label"] != ordered["sentence_order_label"]:
            different += 1  # the run has one sentence
            assert torn["next_sentence_label"] == 1
        if not torn["next_sentence_label"]:
            assert torch.equal(torn["input_ids"], ordered["input_ids"])
    lone = pairs_of(numbered, 300).chunks.lone
    assert 0 < different < 2 * 300 * lone / 2


def test_a_lone_sentence_is_whole_and_its_pair_random(store_of):
    """As in BERT's create_pretraining_data.py: ``len(current_chunk) == 1`` has a random next."""
    # Documents of one sentence of 10 tokens each; no token id occurs twice.
    store = store_of(10 + np.arange(60), np.arange(0, 61, 10), np.arange(7))
    pairs = pairs_of(store, 200)
    assert pairs.chunks.lone == 1.0
    whole = 0
    for item in items_of(pairs):
        first, second = segments(item)
        assert item["next_sentence_label"] == 1
        assert (first[0] - 10) // 10 != (second[0] - 10) // 10
        whole += len(first) == 10 and len(second) == 10
    assert whole > 150  # all but the short ones
    for item in items_of(pairs_of(store, 20, kind=SentenceOrderPairs)):
        assert [len(segment) <= 5 for segment in segments(item)] == [True, True]


def test_chunks_are_computed_once_and_pickled_by_path(numbered, monkeypatch):
    chunks = SentenceChunks(numbered, BLOCK)
    monkeypatch.setattr("fastplm.data.pairs.sentence_chunks", None)
    again = pickle.loads(pickle.dumps(chunks))
    assert len(pickle.dumps(chunks)) < 1000
    for name in ("begin", "end", "document"):
        assert (getattr(again, name) == getattr(chunks, name)).all()
    with pytest.raises(TypeError):  # another range has other runs
        SentenceChunks(numbered.split(0.5)[0], BLOCK)


def test_documents_of_one_token(store_of):
    store = store_of(np.arange(9), np.arange(10), np.arange(10))
    with pytest.raises(DataError, match="documents of one token"):
        SentenceChunks(store, 5)


@pytest.mark.parametrize("kind", [NextSentencePairs, SentenceOrderPairs])
@pytest.mark.parametrize("workers", [0, 2])
def test_workers_and_batches_change_nothing(store, workers, kind):
    pairs = pairs_of(store, 48, seed=9, kind=kind)
    loader = DataLoader(pairs, batch_size=7, num_workers=workers, collate_fn=list)
    for index, item in enumerate(item for batch in loader for item in batch):
        for key, value in pairs[index].items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(item[key])), key


def test_needs_two_documents_and_a_block(tokenizer, tmp_path, store):
    one = tokenize(["anna reads. boris builds a house. clara cooks."], tokenizer, tmp_path)
    with pytest.raises(DataError, match="one document"):
        pairs_of(one, block_size=8)
    with pytest.raises(DataError, match="tokens"):
        SentenceChunks(store, len(store) + 4)
