"""LAMB against algorithm 2 of its paper, without bias correction as in ALBERT's training;
Adafactor against algorithm 4 of its paper, and T5's schedule."""

from __future__ import annotations

import pytest
import torch

from fastplm.pretrain.presets import PRESETS, usual_peak
from fastplm.run.lamb import Lamb
from fastplm.run.optimizer import Adafactor, inverse_square_root
from fastplm.testing import FORWARD_FACTOR, check_error

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


# The norm of the larger one is above 10, where some implementations clip.
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
    peak = usual_peak(PRESETS["bert-base"], "lamb")
    assert peak.scaled(32768) == 5e-3  # You et al., table 4
    assert peak.scaled(512) == 5e-3 / 2**3
    assert round(peak.scaled(4096), 5) == 0.00177  # ALBERT: 0.00176


def adafactor(weight, gradients):
    """The matrix after each gradient, by the definition, with moments of rows and columns."""
    rows, columns = 0.0, 0.0
    for step, gradient in enumerate(gradients, 1):
        decay = 1 - step**-0.8
        squares = gradient**2 + 1e-30
        rows = decay * rows + (1 - decay) * squares.mean(1)
        columns = decay * columns + (1 - decay) * squares.mean(0)
        update = gradient / torch.outer(rows / rows.mean(), columns).sqrt()
        update = update / update.square().mean().sqrt().clamp(min=1)
        weight = weight - LR * weight.square().mean().sqrt().clamp(min=1e-3) * update
    return weight


@pytest.mark.parametrize("size", [0.3, 3.0])
def test_adafactor_by_the_definition(size):
    torch.manual_seed(0)
    start = size * torch.randn(12, 8)
    gradients = torch.randn(4, 12, 8)
    parameter = torch.nn.Parameter(start.clone())
    optimizer = Adafactor([{"params": [parameter]}], lr=LR)
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()
    gold = adafactor(start.double(), gradients.double())
    check_error("weight", parameter.detach(), gold, [adafactor(start, gradients)], FORWARD_FACTOR)


def test_the_inverse_square_root_of_the_step():
    """The rate is 1e-2 for ten thousand steps, then 1 / sqrt(n) (Raffel et al., §3.1.2)."""
    for step in (1, 10_000, 40_000, 2**19):
        share = inverse_square_root(step - 1, 10_000)
        assert 1e-2 * share == pytest.approx(1 / max(step, 10_000) ** 0.5)
    assert [inverse_square_root(step, 0) for step in (0, 3)] == [1.0, 0.5]
