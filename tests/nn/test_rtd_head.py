"""nn.RTDHead against binary cross-entropy on the tokens that count."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.func import functional_call

from fastplm.errors import ArgumentTypeError, ArgumentValueError
from fastplm.nn import ElectraRTDHead, RTDHead
from fastplm.nn.rtd_head import rtd_loss
from fastplm.testing import assert_within_budget

BATCH, LENGTH, WIDTH = 3, 7, 16


def head():
    return RTDHead(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, 1))


@pytest.mark.parametrize("normalizer", [None, 40, torch.tensor(40.0)])
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64])
@pytest.mark.parametrize("masked", [False, True])
def test_equals_the_formula(masked, dtype, normalizer):
    module = head()
    replaced = (torch.rand(BATCH, LENGTH) < 0.3).to(dtype)
    mask = (torch.rand(BATCH, LENGTH) < 0.8).to(dtype) if masked else None

    def candidate(hidden, **parameters):
        options = {"normalizer": normalizer}
        return functional_call(module, parameters, (hidden, replaced, mask), options)

    def reference(hidden, **parameters):
        dense = nn.functional.linear(hidden, parameters["dense.weight"], parameters["dense.bias"])
        logits = nn.functional.linear(
            nn.functional.gelu(dense),
            parameters["prediction.weight"],
            parameters["prediction.bias"],
        ).squeeze(-1)
        counted = torch.ones_like(replaced).bool() if mask is None else mask.bool()
        logits, target = logits[counted], replaced[counted].to(logits.dtype)
        bce = nn.functional.binary_cross_entropy_with_logits
        total = bce(logits, target, reduction="sum")
        return total / (counted.sum() if normalizer is None else normalizer)

    inputs = {
        "hidden": torch.randn(BATCH, LENGTH, WIDTH),
        **{name: parameter.detach() for name, parameter in module.named_parameters()},
    }
    assert_within_budget(candidate, reference, inputs, wrt=list(inputs))


@pytest.mark.parametrize("normalizer", [None, 0])
def test_nothing_counted_is_0_with_gradients_0(normalizer):
    module = head()
    loss = module(
        torch.randn(5, WIDTH), torch.ones(5).bool(), torch.zeros(5).bool(), normalizer=normalizer
    )
    loss.backward()
    assert loss.item() == 0.0 and not any(p.grad.any() for p in module.parameters())


def judged():
    """Ids, original ids, some of which differ, and a mask."""
    original = torch.randint(9, (BATCH, LENGTH))
    ids = torch.where(torch.rand(BATCH, LENGTH) < 0.3, 9, original)
    return ids, original, ids != original, torch.rand(BATCH, LENGTH) < 0.8


def counts_of(logits, replaced, mask):
    flagged, replaced = (logits > 0)[mask], replaced[mask]
    correct = flagged == replaced
    return [int(x.sum()) for x in (flagged & replaced, flagged, replaced, correct, mask)]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ids_and_counts_pass_through(dtype):
    module = head()
    ids, original, replaced, mask = judged()
    hidden = torch.randn(BATCH, LENGTH, WIDTH)
    pair = (ids.to(dtype), original.to(dtype))
    loss, counts = module(hidden, pair, mask, normalizer=7, return_counts=True)
    assert torch.equal(loss, module(hidden, replaced, mask, normalizer=7))
    logits = module.prediction(module.activation(module.dense(hidden))).squeeze(-1)
    assert [int(count) for count in counts] == counts_of(logits, replaced, mask)
    features = module.activation(module.dense(hidden))
    assert torch.equal(loss, rtd_loss(features, pair, module.prediction, mask, normalizer=7))


@pytest.fixture
def electra():
    """fastplm's head and that of Transformers, with the same weights."""
    from transformers import ElectraConfig
    from transformers.models.electra.modeling_electra import ElectraDiscriminatorPredictions

    config = ElectraConfig(hidden_size=WIDTH, hidden_act="gelu_new")
    module, parent = ElectraRTDHead(config), ElectraDiscriminatorPredictions(config)
    assert list(module.state_dict()) == list(parent.state_dict())
    module.load_state_dict(parent.state_dict())
    return module, parent


def test_the_electra_head_gives_the_logits_of_transformers(electra):
    module, parent = electra
    hidden = torch.randn(BATCH, LENGTH, WIDTH)
    assert torch.equal(module(hidden), parent(hidden))


def test_the_electra_head_gives_the_loss_and_counts_of_the_head(electra):
    module, _ = electra
    ids, original, replaced, mask = judged()
    hidden = torch.randn(BATCH, LENGTH, WIDTH)
    plain = RTDHead(module.dense, module.activation, module.dense_prediction)
    options = {"normalizer": 40, "return_counts": True}
    loss, counts = module.loss(hidden, (ids, original), mask, **options)
    expected, expected_counts = plain(hidden, replaced, mask, **options)
    assert torch.equal(loss, expected)
    assert [int(count) for count in counts] == [int(count) for count in expected_counts]


def test_bad_labels_raise_typed_errors():
    hidden = torch.randn(BATCH, LENGTH, WIDTH)
    ids = torch.zeros(BATCH, LENGTH, dtype=torch.int64)
    with pytest.raises(ArgumentValueError, match="`labels` got shape"):
        head()(hidden, (ids, ids[1:]))
    with pytest.raises(ArgumentTypeError, match="`labels` got a NoneType"):
        head()(hidden, None)
    with pytest.raises(ArgumentTypeError, match="`labels` got a NoneType"):
        head()(hidden, (ids, None))
    with pytest.raises(ArgumentTypeError, match=r"`replaced\[1\]` got torch.int32"):
        head()(hidden, (ids, ids.int()))
    with pytest.raises(ArgumentValueError, match="`replaced` got a tuple of 3"):
        head()(hidden, (ids, ids, ids))


def test_bad_shapes_raise_typed_errors():
    hidden = torch.randn(BATCH, LENGTH, WIDTH)
    with pytest.raises(ArgumentValueError, match="labels"):
        head()(hidden, torch.zeros(BATCH, LENGTH + 1))
    with pytest.raises(ArgumentValueError, match="attention_mask"):
        head()(hidden, torch.zeros(BATCH, LENGTH), torch.zeros(BATCH * LENGTH))
