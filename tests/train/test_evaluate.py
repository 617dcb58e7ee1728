"""What is said of a detector must not flatter one that looks at nothing."""

from __future__ import annotations

import math

import pytest
import torch
import transformers

from fastplm.train.evaluate import detection_at_base_rate, evaluate

SHARE = 0.2
REPLACED = torch.rand(50_000, generator=torch.Generator().manual_seed(0)) < SHARE


@pytest.mark.parametrize("answer", (-9.0, 0.0, 9.0))
def test_a_constant_answer_has_balanced_accuracy_one_half(answer):
    result = detection_at_base_rate(torch.full((len(REPLACED),), answer), REPLACED)
    assert result["balanced_accuracy"] == 0.5
    assert result["loss"] > result["loss_of_best_constant"]


def test_the_best_constant_is_the_share():
    share = REPLACED.double().mean()
    result = detection_at_base_rate(torch.full((len(REPLACED),), share.logit().item()), REPLACED)
    assert math.isclose(result["loss"], result["loss_of_best_constant"], rel_tol=1e-5)
    assert result["share_replaced"] == share


def test_a_detector_that_knows_something_beats_every_constant():
    noise = torch.randn(len(REPLACED), generator=torch.Generator().manual_seed(1))
    # The log-odds of unit normal evidence whose mean differs by 1 between the classes.
    evidence = noise + REPLACED
    scores = evidence - 0.5 + math.log(SHARE / (1 - SHARE))
    result = detection_at_base_rate(scores, REPLACED)
    exact = 0.5 * (1 + math.erf(0.5 / math.sqrt(2)))  # both recalls of the threshold at the middle
    assert abs(result["balanced_accuracy"] - exact) < 4 * result["balanced_accuracy_error"]
    assert result["loss"] < result["loss_of_best_constant"]
    assert result["precision"] > 1.5 * SHARE


def test_a_perfect_detector():
    result = detection_at_base_rate((REPLACED.float() - 0.5) * 40, REPLACED)
    assert result["precision"] == result["recall"] == result["balanced_accuracy"] == 1.0
    assert result["balanced_accuracy_error"] == 0.0


def test_nothing_replaced_is_no_division_by_zero():
    result = detection_at_base_rate(torch.zeros(3), torch.zeros(3, dtype=torch.bool))
    assert result["recall"] == 0.0 and result["loss_of_best_constant"] == 0.0


def test_a_loss_of_no_labels_is_left_out():
    sizes = {"hidden_size": 8, "num_attention_heads": 1, "num_hidden_layers": 1}
    config = transformers.BertConfig(vocab_size=9, intermediate_size=8, **sizes)
    row = {"input_ids": torch.zeros(4).long(), "labels": torch.full((4,), -100)}
    model = transformers.BertForMaskedLM(config)
    assert evaluate(model, [row] * 3, torch.utils.data.default_collate, 2) == {"samples": 3}
