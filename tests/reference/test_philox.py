"""Philox against the known answers of its authors, and the counter layout."""

from __future__ import annotations

import pytest
import torch

from fastplm.reference.philox import DROPOUT_ROUNDS, Stream, draw, fixed_point, philox4x32, uniform

ALL_ONES = 0xFFFFFFFF

# Random123's kat_vectors for philox4x32-10 (below, for -7): counter, key (low word first), answer.
KNOWN_ANSWERS = [
    (
        (0, 0, 0, 0),
        0,
        (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
    ),
    (
        (ALL_ONES, ALL_ONES, ALL_ONES, ALL_ONES),
        -1,
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        0x299F31D0_A4093822,
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]

KNOWN_ANSWERS_OF_7_ROUNDS = [
    ((0, 0, 0, 0), 0, (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
    (
        (ALL_ONES, ALL_ONES, ALL_ONES, ALL_ONES),
        -1,
        (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662),
    ),
]


@pytest.mark.parametrize(("counter", "seed", "answer"), KNOWN_ANSWERS)
def test_known_answers(counter, seed, answer):
    assert tuple(word.item() for word in philox4x32(seed, *counter)) == answer


@pytest.mark.parametrize(("counter", "seed", "answer"), KNOWN_ANSWERS_OF_7_ROUNDS)
def test_known_answers_of_the_dropout_rounds(counter, seed, answer):
    assert DROPOUT_ROUNDS == 7
    words = philox4x32(seed, *counter, rounds=DROPOUT_ROUNDS)
    assert tuple(word.item() for word in words) == answer


def test_counters_broadcast_and_each_element_stands_for_itself():
    position, sample = torch.arange(5), torch.tensor([[3], [2**40 + 1]])
    grid = draw(7, Stream.SAMPLE, sample_index=sample, position=position, step=9)
    assert all(word.shape == (2, 5) and word.dtype == torch.int64 for word in grid)
    alone = philox4x32(7, 4, 1, 2**8, 9 << 4 | 2)
    assert [word[1, 4].item() for word in grid] == [word.item() for word in alone]


def test_words_fill_uint32():
    words = torch.stack(draw(1, Stream.SHUFFLE, sample_index=torch.arange(4096)))
    assert words.min() >= 0 and words.max() <= ALL_ONES
    # The largest and smallest of 16,384 words are within 1 % of the ends, except with probability
    # e^-163.
    assert words.max() > 0.99 * 2**32 and words.min() < 0.01 * 2**32


def test_any_index_changes_the_words():
    base = {"sample_index": 5, "position": 6, "step": 7}
    reference = draw(1, Stream.MASK_SELECT, **base)
    changed = [draw(1, Stream.MASK_SELECT, **{**base, name: 1000}) for name in base]
    changed += [draw(2, Stream.MASK_SELECT, **base), draw(1, Stream.MASK_REPLACE, **base)]
    changed += [draw(1 + 2**32, Stream.MASK_SELECT, **base)]
    changed += [draw(1, Stream.MASK_SELECT, **{**base, "sample_index": 5 + 2**32})]
    for words in changed:
        assert all(word != other for word, other in zip(words, reference, strict=True))


def test_uniform_stays_inside_the_open_interval():
    ends = uniform(torch.tensor([0, ALL_ONES]))
    assert ends.dtype == torch.float64
    assert 0 < ends[0] and ends[1] < 1
    assert ends[0] == 1 - ends[1]


def test_fixed_point():
    assert fixed_point(0) == 0 and fixed_point(0.5) == 2**31 and fixed_point(1) == 2**32
