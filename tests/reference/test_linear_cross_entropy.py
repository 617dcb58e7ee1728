"""The references of the vocabulary pass, against their definitions computed by hand."""

from __future__ import annotations

import math

import pytest
import torch

from fastplm.reference.linear_cross_entropy import (
    gumbel_sample_ref,
    linear_cross_entropy_ref,
    row_statistics_ref,
    sample_ref,
    uniform_level,
)
from fastplm.reference.philox import philox4x32

CPU = torch.device("cpu")


def of_probabilities(*rows: tuple[float, ...]) -> dict:
    """Inputs with a given softmax: one-hot rows of input pick the logits from the weight."""
    probabilities = torch.tensor(rows, dtype=torch.float64)
    return dict(
        input=torch.eye(len(rows), dtype=torch.float64),
        # -inf is not used, as 0 times -inf would be NaN.
        linear_weight=probabilities.log().clamp(min=-1e4).T.contiguous(),
    )


THREE = of_probabilities((1 / 8, 2 / 8, 5 / 8), (1 / 2, 1 / 2, 0.0), (1 / 4, 1 / 4, 1 / 2))


def test_loss_by_hand():
    loss = linear_cross_entropy_ref(**THREE, target=torch.tensor([1, 0, -100]), reduction="none")
    expected = torch.tensor([math.log(4), math.log(2), 0.0], dtype=torch.float64)
    torch.testing.assert_close(loss, expected)


def test_the_bias_shifts_the_logits():
    bias = torch.tensor([math.log(8), math.log(4), 0.0], dtype=torch.float64)
    loss = linear_cross_entropy_ref(
        **THREE, target=torch.tensor([2, -100, -100]), linear_bias=bias, reduction="sum"
    )
    # The weights are 1, 1 and 5/8, so the third has 5/21 of the sum.
    torch.testing.assert_close(loss, torch.tensor(math.log(21 / 5), dtype=torch.float64))


def test_label_smoothing_by_hand():
    """0.3 of the target goes evenly to all three tokens, the target's own included."""
    loss = linear_cross_entropy_ref(
        **THREE, target=torch.tensor([1, -100, -100]), label_smoothing=0.3, reduction="sum"
    )
    expected = 0.7 * math.log(4) + 0.1 * (math.log(8) + math.log(4) + math.log(8 / 5))
    torch.testing.assert_close(loss, torch.tensor(expected, dtype=torch.float64))


def test_the_gradient_is_softmax_minus_the_smoothed_target():
    inputs = THREE | {"input": THREE["input"].clone().requires_grad_()}
    weight = inputs["linear_weight"] = THREE["linear_weight"][:, :1].clone().requires_grad_()
    inputs["input"] = THREE["input"][:1, :1]
    loss = linear_cross_entropy_ref(**inputs, target=torch.tensor([1]), label_smoothing=0.3)
    loss.backward()
    expected = [1 / 8 - 0.1, 2 / 8 - 0.8, 5 / 8 - 0.1]
    torch.testing.assert_close(weight.grad[:, 0], torch.tensor(expected, dtype=torch.float64))


def test_statistics_by_hand():
    target = torch.tensor([0, 1, -100])
    bias = torch.full((3,), math.log(3), dtype=torch.float64)
    statistics = row_statistics_ref(**THREE, target=target, linear_bias=bias)
    # The second row has two likeliest tokens.
    assert statistics.argmax.tolist() == [2, 0, -1]
    lse = torch.tensor([math.log(3), math.log(3), 0.0], dtype=torch.float64)
    torch.testing.assert_close(statistics.logsumexp, lse)
    expected = torch.tensor([-math.log(8), -math.log(2), 0.0], dtype=torch.float64)
    torch.testing.assert_close(statistics.log_probability, expected)


def test_the_uniform_number_of_a_row_is_the_first_philox_word_of_its_indices():
    index, position = torch.tensor([5, 2**40 + 1, -1]), torch.tensor([0, 7, 2**31])
    level = uniform_level(-9, 3, index, position, CPU)
    for row in range(3):
        i = int(index[row])
        word, *_ = philox4x32(-9, int(position[row]), i, i >> 32, 2)  # stream 2, step 0
        assert level[row] == (int(word) + 0.5) / 2**32
    assert level.dtype is torch.float64
    default = uniform_level(-9, 3, None, None, CPU)
    assert torch.equal(default, uniform_level(-9, 3, torch.arange(3), torch.zeros(3).long(), CPU))
    assert torch.equal(uniform_level(torch.tensor(-9), 3, index, position, CPU), level)


@pytest.mark.parametrize("temperature", (1.0, 0.5, 2.0))
def test_a_sample_is_the_first_token_whose_running_sum_exceeds_the_level(temperature):
    rows = 500
    probabilities = torch.rand(rows, 6, dtype=torch.float64)
    probabilities[:, 2] = 0.0
    inputs = of_probabilities(*probabilities.tolist())
    target = torch.zeros(rows, dtype=torch.int64)
    sample = sample_ref(**inputs, target=target, temperature=temperature, seed=1)
    level = uniform_level(1, rows, None, None, CPU).tolist()
    expected = []
    for u, row in zip(level, probabilities.tolist(), strict=True):
        weights = [p ** (1 / temperature) for p in row]
        running, token = weights[0], 0
        while running <= u * sum(weights):
            token += 1
            running += weights[token]
        expected.append(token)
    assert sample.tolist() == expected
    assert set(expected) == {0, 1, 3, 4, 5}


def test_samples_of_ignored_rows_and_of_rows_that_are_not_finite():
    inputs = of_probabilities(*[(1 / 2, 1 / 2)] * 4)
    inputs["input"][1] = float("nan")
    inputs["input"][2] = float("inf")
    inputs["linear_weight"] += 1  # inf * 0 would be NaN
    inputs["input"][3] = float("nan")
    target = torch.tensor([0, 0, 0, -100])
    for seed in range(10):
        sample = sample_ref(**inputs, target=target, seed=seed)
        assert sample.tolist()[1:] == [0, 0, -1]


def test_the_gumbel_maximum_draws_each_token_as_often_as_its_probability():
    """The counts of four tokens in a hundred thousand draws are within four standard deviations."""
    draws = 100_000
    probabilities = torch.tensor([1 / 8, 0.0, 2 / 8, 5 / 8], dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    for temperature in (1.0, 2.0):
        logits = probabilities.log().expand(draws, 4)
        counts = gumbel_sample_ref(logits, temperature, generator).bincount(minlength=4)
        p = probabilities.pow(1 / temperature)
        p /= p.sum()
        assert counts[1] == 0
        assert ((counts - draws * p).abs() <= 4 * (draws * p * (1 - p)).sqrt()).all()
