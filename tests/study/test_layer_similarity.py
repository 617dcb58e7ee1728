"""fastplm.study.layer_similarity: how much each layer changes its input."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from fastplm import models
from fastplm.errors import ArgumentValueError
from fastplm.study.layer_similarity import layer_similarity

from ..models.conftest import LENGTH, PADDINGS, ROWS, same, small_config

LAYERS, MASK = 3, PADDINGS["right"]


def batch():
    ids = torch.randint(4, 37, (ROWS, LENGTH)) * MASK
    return ids, ids.masked_fill(torch.rand(ROWS, LENGTH) > 0.3, -100)


class Fixed(nn.Module):
    """A model with given hidden states."""

    def __init__(self, *states, name="hidden_states"):
        super().__init__()
        self.states, self.name = tuple(torch.as_tensor(state) for state in states), name

    def forward(self, output_hidden_states, return_dict, attention_mask=None):
        assert output_hidden_states and return_dict
        return {self.name: self.states}


# Two sequences of two tokens in two dimensions.
STATES = (
    [[[3.0, 0.0], [1.0, 0.0]], [[0.0, 2.0], [7.0, 7.0]]],
    [[[3.0, 4.0], [0.0, 1.0]], [[0.0, -2.0], [1e6, 0.0]]],
    [[[3.0, 4.0], [0.0, 2.0]], [[0.0, -2.0], [0.0, 1e6]]],
)


@pytest.mark.parametrize("name", ["hidden_states", "encoder_hidden_states"])
def test_layer_similarity_by_hand(name):
    report = layer_similarity(
        Fixed(*STATES, name=name), attention_mask=torch.tensor([[1, 1], [1, 0]])
    )
    angle = math.degrees(math.acos(0.6))
    expected = (
        [(4 + math.sqrt(2) + 4) / 3, 1 / 3],
        [(0.6 + 0 - 1) / 3, 1.0],
        [(angle + 90 + 180) / 3, 0.0],
    )
    assert report._fields == ("distance", "cosine", "degrees")
    for values, numbers in zip(report, expected, strict=True):
        assert values.tolist() == pytest.approx(numbers, rel=4 * torch.finfo(torch.float32).eps)


def test_layer_similarity_without_a_mask_counts_every_token():
    report = layer_similarity(Fixed([[[1.0, 0.0], [1.0, 0.0]]], [[[1.0, 0.0], [-3.0, 0.0]]]))
    assert [values.tolist() for values in report] == [[2.0], [0.0], [90.0]]


def test_layer_similarity_ignores_padding():
    mask = torch.tensor([[1, 1], [1, 0]])
    spoiled = copy.deepcopy(STATES)
    spoiled[1][1][1] = [math.nan, math.inf]
    both = [layer_similarity(Fixed(*states), attention_mask=mask) for states in (STATES, spoiled)]
    assert same(*both)


@pytest.mark.parametrize("name", ["Bert", "Roberta", "Albert", "Electra"])
def test_layer_similarity_of_every_encoder(name):
    ids, labels = batch()
    made = small_config(name.lower(), num_hidden_layers=LAYERS)
    model = getattr(models, f"{name}ForMaskedLM")(made).eval()
    report = layer_similarity(model, input_ids=ids, attention_mask=MASK, labels=labels)
    states = model(ids, attention_mask=MASK, output_hidden_states=True).hidden_states
    again = layer_similarity(Fixed(*states), attention_mask=MASK)
    assert all(values.shape == (LAYERS,) and values.isfinite().all() for values in report)
    assert same(report, again)


def test_layer_similarity_of_choices():
    ids, _ = batch()
    choices = {"input_ids": ids[:, None].repeat(1, 2, 1), "attention_mask": MASK[:, None]}
    choices["attention_mask"] = choices["attention_mask"].repeat(1, 2, 1)
    model = models.AlbertForMultipleChoice(small_config("albert", num_hidden_layers=LAYERS)).eval()
    report = layer_similarity(model, **choices)
    assert report.distance.shape == (LAYERS,)


def test_layer_similarity_raises_on_bad_input():
    with pytest.raises(ArgumentValueError, match="without hidden states"):
        layer_similarity(Fixed(*STATES, name="others"))
    with pytest.raises(ArgumentValueError, match="attention_mask"):
        layer_similarity(Fixed(*STATES), attention_mask=torch.ones(2, 3))
