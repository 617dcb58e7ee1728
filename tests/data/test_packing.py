from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from fastplm.data import PackedDocuments, PretrainingStream, sequence_index
from fastplm.errors import ArgumentValueError

SPECIAL = {"cls_token_id": 2, "sep_token_id": 3}
OPTIONS = [{}, {"cls_token_id": 2}, {"sep_token_id": 3}, SPECIAL]


@pytest.fixture
def documents_of(store_of):
    """A store of documents of one sentence each, in which token i is 10 + i."""

    def build(lengths):
        ends = np.cumsum([0, *lengths])
        return store_of(10 + np.arange(ends[-1]), ends, np.arange(len(ends)))

    return build


@pytest.fixture
def numbered(documents_of):
    return documents_of([1 + i * i * 7 % 61 for i in range(300)])


def sequences_of(blocks):
    for block in blocks:
        parts = block["input_ids"].split(block["sequence_lengths"])
        yield from (part.numpy() for part in parts)


def test_small_packing(documents_of):
    # 12 tokens become pieces of 8 and 4; 3 joins 5, and 2 joins 4.
    blocks = PackedDocuments(documents_of([5, 3, 12, 2]), 8)
    assert [block["sequence_lengths"] for block in blocks] == [[8], [5, 3], [4, 2]]
    ids = [(block["input_ids"] - 10).tolist() for block in blocks]
    assert ids == [
        [8, 9, 10, 11, 12, 13, 14, 15],
        [0, 1, 2, 3, 4, 5, 6, 7],
        [16, 17, 18, 19, 20, 21],
    ]


@pytest.mark.parametrize("options", OPTIONS, ids=["none", "first", "last", "both"])
@pytest.mark.parametrize("block_size", [3, 16, 64, 5000])
def test_every_token_is_in_one_piece(numbered, block_size, options):
    blocks = PackedDocuments(numbered, block_size, **options)
    ends = numbered.sentences[numbered.documents]
    seen = []
    for block in blocks:
        assert block["input_ids"].dtype == torch.int64
        assert 0 < len(block["input_ids"]) <= block_size
    for ids in sequences_of(blocks):
        if "cls_token_id" in options:
            assert ids[0] == 2
            ids = ids[1:]
        if "sep_token_id" in options:
            assert ids[-1] == 3
            ids = ids[:-1]
        tokens = ids - 10
        assert len(tokens) and (np.diff(tokens) == 1).all()
        first, last = np.searchsorted(ends, tokens[[0, -1]], side="right")
        assert first == last  # both are in one document
        seen.append(tokens)
    assert np.sort(np.concatenate(seen)).tolist() == list(range(len(numbered)))


def test_little_room_is_left(numbered):
    blocks = PackedDocuments(numbered, 256, **SPECIAL)
    total = sum(sum(block["sequence_lengths"]) for block in blocks)
    assert len(blocks) == -(-total // 256)  # the fewest blocks possible


@pytest.mark.parametrize("workers", [0, 2])
def test_under_a_stream(numbered, workers):
    blocks = PackedDocuments(numbered, 64, **SPECIAL)
    stream = PretrainingStream(blocks, seed=4, length=2 * len(blocks))
    loader = DataLoader(stream, batch_size=5, num_workers=workers, collate_fn=list)
    samples = [sample for batch in loader for sample in batch]
    assert [sample["sample_index"] for sample in samples] == list(range(len(stream)))
    for sample, expected in zip(samples, stream, strict=False):
        assert torch.equal(sample["input_ids"], expected["input_ids"])
        assert sample["sequence_lengths"] == expected["sequence_lengths"]
    for epoch in samples[: len(blocks)], samples[len(blocks) :]:
        tokens = np.concatenate([ids[1:-1] for ids in sequences_of(epoch)])
        assert np.sort(tokens - 10).tolist() == list(range(len(numbered)))


def test_each_sequence_has_its_own_index():
    places = torch.arange(64)
    indices = torch.cat([sequence_index(torch.tensor(i), places) for i in (0, 1, 7, 2**42)])
    assert len(indices.unique()) == 4 * 64 and (indices >= 0).all()
    assert sequence_index(3, 5) == 3 * 2**20 + 5


def test_packing_is_computed_once_and_pickled_by_path(numbered, monkeypatch):
    blocks = PackedDocuments(numbered, 32, **SPECIAL)
    monkeypatch.setattr("fastplm.data.packing.pack_sequences", None)
    data = pickle.dumps(blocks)
    assert len(data) < 1000
    again = pickle.loads(data)
    assert len(again) == len(blocks)
    assert torch.equal(again[3]["input_ids"], blocks[3]["input_ids"])
    with pytest.raises(IndexError):
        blocks[len(blocks)]


def test_parts_of_a_store(numbered):
    for part in numbered.split(0.3):
        tokens = np.concatenate(list(sequences_of(PackedDocuments(part, 32)))) - 10
        assert np.sort(tokens).tolist() == (part.tokens - 10).tolist()


def test_refuses(numbered):
    with pytest.raises(ArgumentValueError, match="3 or more"):
        PackedDocuments(numbered, 2, **SPECIAL)
