"""The reduction of the losses: a denominator of 0 must not make a step NaN."""

from __future__ import annotations

import pytest
import torch

from fastplm.reference._reduce import reduce_loss

LOSS = torch.tensor([3.0, 0.0, 1.0])
COUNTED = torch.tensor([True, False, True])


@pytest.mark.parametrize(
    ("counted", "reduction", "normalizer", "expected"),
    (
        (COUNTED, "mean", None, 2.0),
        (None, "mean", None, 4.0 / 3),
        (COUNTED, "sum", None, 4.0),
        (COUNTED, "mean", torch.tensor(8), 0.5),
        (COUNTED, "mean", torch.tensor(8.0), 0.5),
    ),
)
def test_reductions(counted, reduction, normalizer, expected):
    assert reduce_loss(LOSS, counted, reduction, normalizer) == torch.tensor(expected)


def test_none_keeps_the_rows():
    assert reduce_loss(LOSS, COUNTED, "none", None) is LOSS


@pytest.mark.parametrize("normalizer", (None, torch.tensor(0), torch.tensor(0.0)))
def test_the_mean_over_no_row_is_zero_with_zero_gradient(normalizer):
    loss = torch.zeros(3, requires_grad=True)
    mean = reduce_loss(loss * 0, torch.zeros(3, dtype=torch.bool), "mean", normalizer)
    mean.backward()
    assert mean == 0 and not loss.grad.any()
