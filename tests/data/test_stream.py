from __future__ import annotations

import pytest
import torch

from fastplm.data import PretrainingStream
from fastplm.data.stream import permute
from fastplm.errors import DataError

COUNT = 37


def elements(count=COUNT):
    return [{"value": i} for i in range(count)]


@pytest.mark.parametrize("size", [1, 2, 3, 10, 37, 64, 1000, 4097])
def test_permutation_is_a_bijection_and_differs_by_epoch_and_seed(size):
    index = torch.arange(size)
    orders = [
        permute(index, size, seed, torch.tensor(epoch)).tolist()
        for seed in (0, 2**40)
        for epoch in (0, 1)
    ]
    assert all(sorted(order) == index.tolist() for order in orders)
    if size >= 10:
        assert len({tuple(order) for order in orders}) == 4


def test_permutation_looks_random():
    # Over many epochs every place must get every element equally often. Chi-square has 63 degrees
    # of freedom for each of 64 places; the mean of the 64 values is further from 63 than 8 once in
    # a million runs.
    size, epochs = 64, 640
    epoch = torch.arange(epochs)[:, None].expand(epochs, size)
    order = permute(torch.arange(size).expand(epochs, size), size, 5, epoch)
    counts = torch.zeros(size, size).scatter_add_(1, order.T, torch.ones(size, epochs))
    chi_square = ((counts - epochs / size) ** 2 / (epochs / size)).sum(1)
    assert abs(chi_square.mean() - 63) < 8
    neighbours = (order[:, 1:] - order[:, :-1] == 1).double().mean()
    assert neighbours < 3 / size


def test_every_epoch_visits_every_element():
    stream = PretrainingStream(elements(), seed=1, length=3 * COUNT)
    items = [stream[i] for i in range(len(stream))]
    assert [item["sample_index"] for item in items] == list(range(3 * COUNT))
    for epoch in range(3):
        values = [item["value"] for item in items[epoch * COUNT : (epoch + 1) * COUNT]]
        assert sorted(values) == list(range(COUNT))
        assert values != list(range(COUNT))


def test_a_longer_run_changes_nothing():
    short = PretrainingStream(elements(), seed=1, length=50)
    long = PretrainingStream(elements(), seed=1, length=500)
    assert [short[i] for i in range(50)] == [long[i] for i in range(50)]


def test_bounds():
    stream = PretrainingStream(elements(), seed=1, length=5)
    with pytest.raises(IndexError):
        stream[5]
    with pytest.raises(DataError):
        PretrainingStream([], seed=1, length=5)
