"""LAMB against algorithm 2 of its paper, without bias correction as in ALBERT's training."""

from __future__ import annotations

import pytest
import torch

from fastplm.testing import FORWARD_FACTOR, check_error
from fastplm.train.optimizer import Lamb
from fastplm.train.presets import lamb_learning_rate

LR, DECAY, EPS = 0.05, 0.1, 1e-6


def algorithm(weight, gradients, *, decay, scaled):
    """The weight after each gradient, by the definition."""
    first = second = torch.zeros_like(weight)
    for gradient in gradients:
        first = 0.9 * first + 0.1 * gradient
        second = 0.999 * second + 0.001 * gradient**2
        update = first / (second.sqrt() + EPS) + decay * weight
        ratio = weight.norm() / update.norm() if scaled else 1.0
        weight = weight - LR * ratio * update
    return weight


# The norm of the larger is above the 10 that some implementations stop at.
@pytest.mark.parametrize("size", [0.3, 3.0])
@pytest.mark.parametrize("decay", [DECAY, 0.0], ids=["weight", "bias or norm"])
def test_steps_by_the_definition(size, decay):
    torch.manual_seed(0)
    start = size * torch.randn(12, 8)
    gradients = torch.randn(4, 12, 8)
    parameter = torch.nn.Parameter(start.clone())
    optimizer = Lamb([{"params": [parameter], "weight_decay": decay}], lr=LR, eps=EPS)
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()
    expected = {"decay": decay, "scaled": decay > 0}
    gold = algorithm(start.double(), gradients.double(), **expected)
    base = algorithm(start, gradients, **expected)
    check_error("weight", parameter.detach(), gold, [base], FORWARD_FACTOR)


def test_the_learning_rate_of_a_batch():
    assert lamb_learning_rate(32768) == 5e-3  # You et al., table 4
    assert lamb_learning_rate(512) == 5e-3 / 2**3
    assert round(lamb_learning_rate(4096), 5) == 0.00177  # ALBERT: 0.00176
