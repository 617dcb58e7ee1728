from __future__ import annotations

import errno
import os

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from fastplm.cli import _line_of
from fastplm.data import _numbers, index
from fastplm.errors import ArgumentValueError, DataError

compiled = pytest.mark.skipif(not index._COMPILED, reason="the extension was not built")
INT64 = np.iinfo(np.int64)


def both(name):
    """A function and its reference."""
    functions = [getattr(index, name), getattr(index, f"{name}_ref")]
    return pytest.mark.parametrize(name, functions, ids=["used", "reference"])


@pytest.mark.parametrize(
    "boundaries, expected",
    [([], -1), ([7], -1), ([0, 3, 9], -1), ([0, 0], 0), ([0, 5, 4, 3], 1), ([-2, -1, 8, 8], 2)],
)
def test_first_descent(boundaries, expected):
    assert _numbers.first_descent(np.array(boundaries, dtype=np.int64)) == expected


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
@pytest.mark.parametrize("place", [0, 500, 9999])
def test_first_outside(dtype, place):
    ids = np.arange(10_000, dtype=dtype) % 1000
    assert _numbers.first_outside(ids, 1000) == -1
    assert _numbers.first_outside(ids, 999) == 999
    ids[place] = ids[-1] = 1000
    assert _numbers.first_outside(ids, 1000) == place
    ids[place] = -1 if dtype == np.int32 else 65535
    assert _numbers.first_outside(ids, 1000) == place
    assert _numbers.first_outside(ids[:0], 0) == -1


@both("sentence_chunks")
def test_sentence_chunks(sentence_chunks):
    # Sentences of 3, 2, 4, 1, 10 and 1 tokens; documents of four, one and one sentences.
    sentences = np.array([0, 3, 5, 9, 10, 20, 21])
    chunks = sentence_chunks(sentences, np.array([0, 4, 5, 6]), 5)
    # The run of sentences 2 and 3 ends with its document, and the last sentence is too short.
    assert chunks.tolist() == [[0, 2, 4], [2, 4, 5], [0, 0, 1]]
    with pytest.raises(DataError, match="documents"):
        sentence_chunks(sentences, np.array([0, 7]), 5)


@both("pack_sequences")
def test_pack_sequences(pack_sequences):
    # 7 | 5 | 4 open three blocks; 3 fills that of 5; 2 goes where 4 is; 1 fills that of 7.
    offsets, members = pack_sequences(np.array([3, 5, 2, 7, 1, 4]), 8)
    assert offsets.tolist() == [0, 2, 4, 6] and members.tolist() == [3, 4, 1, 0, 5, 2]
    # If two bins have the same room, the one that was filled last is taken.
    offsets, members = pack_sequences(np.array([6, 6, 3]), 10)
    assert offsets.tolist() == [0, 1, 3] and members.tolist() == [0, 1, 2]
    assert [part.tolist() for part in pack_sequences(np.array([], dtype=np.int64), 3)] == [[0], []]


@pytest.mark.parametrize("lengths, capacity", [([0], 4), ([5], 4), ([-1], 4), ([1], 0)])
def test_pack_sequences_refuses(lengths, capacity):
    with pytest.raises(ArgumentValueError, match="pack_sequences"):
        index.pack_sequences(np.array(lengths), capacity)


@st.composite
def corpora(draw):
    sentences = np.cumsum([0, *draw(st.lists(st.integers(1, 30), min_size=1, max_size=60))])
    inside = draw(st.sets(st.integers(1, len(sentences) - 1)))
    documents = sorted({0, *inside, len(sentences) - 1})
    return sentences, np.array(documents)


@given(corpora(), st.integers(1, 70))
@settings(max_examples=200, deadline=None)
def test_chunks_follow_their_definition(corpus, room):
    sentences, documents = corpus
    chunks = index.sentence_chunks(sentences, documents, room)
    assert (chunks == index.sentence_chunks_ref(sentences, documents, room)).all()
    tokens = sentences[chunks[1]] - sentences[chunks[0]]
    before_last = sentences[chunks[1] - 1] - sentences[chunks[0]]
    assert (tokens >= 2).all() and (before_last < room).all()
    ends_document = chunks[1] == documents[chunks[2] + 1]
    assert (ends_document | (tokens >= room)).all()
    assert (documents[chunks[2]] <= chunks[0]).all()
    single = sum(sentences[1:] - sentences[:-1] == 1)
    assert sentences[-1] - tokens.sum() <= single


def packed(lengths, capacity):
    """Checks that the packing is the reference's, and returns it."""
    found = index.pack_sequences(lengths, capacity)
    for part, expected in zip(found, index.pack_sequences_ref(lengths, capacity), strict=True):
        assert part.tolist() == expected.tolist()
    return found


@given(st.lists(st.integers(1, 40), max_size=80), st.integers(40, 70))
@settings(max_examples=200, deadline=None)
def test_packing_follows_its_definition(lengths, capacity):
    lengths = np.array(lengths, dtype=np.int64)
    offsets, members = packed(lengths, capacity)
    assert sorted(members) == list(range(len(lengths)))
    bins = [lengths[members[i:j]] for i, j in zip(offsets, offsets[1:], strict=False)]
    assert all(0 < sum(members) <= capacity for members in bins)
    assert sum(2 * sum(members) <= capacity for members in bins) <= 1
    # Best fit: when a sequence was placed, no other open bin with enough room had less room.
    room, where = {}, np.empty(len(lengths), dtype=np.int64)
    where[members] = np.repeat(np.arange(len(bins)), np.diff(offsets))
    for sequence in np.argsort(-lengths, kind="stable"):
        length, chosen = lengths[sequence], where[sequence]
        enough = [left for left in room.values() if left >= length]
        assert room.get(chosen, capacity) == min(enough, default=capacity)
        room[chosen] = room.get(chosen, capacity) - length


@given(st.lists(st.integers(1, 5000), max_size=300))
@settings(max_examples=20, deadline=None)
def test_packing_at_other_capacities(lengths):
    for capacity in (5000, 8192, 1 << 14):
        packed(np.array(lengths, dtype=np.int64), capacity)


def test_checks_work_in_pieces(monkeypatch):
    monkeypatch.setattr(_numbers, "_AT_ONCE", 3)
    for size in range(1, 9):
        for wrong in range(size):
            boundaries, ids = np.arange(size + 1), np.zeros(size, dtype=np.int32)
            boundaries[wrong + 1] = boundaries[wrong]
            ids[wrong] = 5
            assert _numbers.first_descent(boundaries) == wrong
            assert _numbers.first_outside(ids, 5) == wrong


@compiled
@given(
    arrays.arrays(np.int64, st.integers(1, 30)),
    arrays.arrays(np.int64, st.integers(1, 30), elements=st.integers(-3, 33)),
    st.integers(1, 100),
)
@settings(max_examples=300, deadline=None)
def test_garbage_is_refused_or_cut_within_bounds(sentences, documents, room):
    valid = 0 <= documents[0] and (np.diff(documents) >= 0).all()
    valid = len(documents) == 1 or (valid and documents[-1] < len(sentences))
    if not valid:
        with pytest.raises(DataError):
            index.sentence_chunks(sentences, documents, room)
        return
    begin, end, document = index.sentence_chunks(sentences, documents, room)
    assert (begin < end).all() and (end < len(sentences)).all()
    assert (document < len(documents) - 1).all()


@compiled
def test_operators_refuse_what_would_be_out_of_bounds():
    boundaries = torch.arange(4)
    with pytest.raises(RuntimeError, match=r"out \[3, C\] does not fit"):
        torch.ops.fastplm_C.sentence_chunks(boundaries, boundaries, 2, boundaries)
    with pytest.raises(RuntimeError, match="every length must be 1 to capacity"):
        torch.ops.fastplm_C.pack_sequences(torch.tensor([1, 9]), 8)
    with pytest.raises(RuntimeError, match="takes Long"):
        torch.ops.fastplm_C.pack_sequences(torch.tensor([1], dtype=torch.int32), 8)


def test_memory_maps_in_and_out(tmp_path):
    sentences, documents = np.arange(0, 500, 5), np.array([0, 40, 99])
    sentences.tofile(tmp_path / "in.bin")
    mapped = _numbers.map_file(tmp_path / "in.bin", np.int64)
    chunks = index.sentence_chunks(mapped, documents, 12, _numbers.new_file(tmp_path / "out.bin"))
    assert not mapped.flags.writeable
    stored = np.fromfile(tmp_path / "out.bin", dtype=np.int64).reshape(3, -1)
    assert stored.tolist() == chunks.tolist()
    assert stored.tolist() == index.sentence_chunks(sentences, documents, 12).tolist()


def test_too_many_open_files_say_nothing_about_a_folder(tmp_path, monkeypatch):
    path = tmp_path / "tokens.bin"
    np.arange(4).tofile(path)

    def memmap(*_):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))

    monkeypatch.setattr(np, "memmap", memmap)
    with pytest.raises(OSError) as caught:
        _numbers.map_file(path, np.int64)
    line = _line_of(caught.value)
    assert line.startswith("this process has too many open files, at ") and "ulimit -n" in line
