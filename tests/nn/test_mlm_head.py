"""nn.MLMHead and the search for labelled rows."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.func import functional_call

from fastplm._checks import ArgumentTypeError, ArgumentValueError
from fastplm.nn import MLMHead
from fastplm.nn._rows import labelled_positions
from fastplm.testing import assert_within_budget

BATCH, LENGTH, WIDTH, VOCAB = 3, 7, 16, 29


def head():
    transform = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH))
    return MLMHead(transform, nn.Linear(WIDTH, VOCAB))


def some_labels():
    labels = torch.randint(0, VOCAB, (BATCH, LENGTH))
    labels[torch.rand(BATCH, LENGTH) < 0.6] = -100
    labels[0, 0], labels[-1, -1] = 0, 0
    return labels


@pytest.fixture(params=["exact", "static"])
def search(request, monkeypatch):
    """Both ways to find labels: counting them, and one slot a token."""
    if request.param == "static":
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    return request.param


@pytest.mark.parametrize("count", [0, 1, 10, BATCH * LENGTH])
def test_every_label_is_found_in_order(search, count):
    labels = torch.full((BATCH * LENGTH,), -100)
    chosen = torch.randperm(BATCH * LENGTH)[:count].sort().values
    labels[chosen] = 0
    positions = labelled_positions(labels.view(BATCH, LENGTH))
    assert torch.equal(positions[:count], chosen)
    assert (positions[count:] == -1).all()
    assert len(positions) == (BATCH * LENGTH if search == "static" else count)


@pytest.mark.parametrize("normalizer", [None, 11, torch.tensor(11)])
@pytest.mark.parametrize("given", [False, True])
def test_equals_a_head_on_all_rows(search, given, normalizer):
    labels = some_labels()
    module = head()
    positions = None
    if given:
        positions = torch.cat((labelled_positions(labels), torch.full((4,), -1)))
    parameters = {name: p.detach() for name, p in module.named_parameters()}

    def candidate(hidden, **parameters):
        options = {"normalizer": normalizer}
        return functional_call(module, parameters, (hidden, labels, positions), options)

    def reference(hidden, **parameters):
        logits = functional_call(
            nn.Sequential(module.transform, module.decoder),
            {
                name.replace("transform", "0").replace("decoder", "1"): parameter
                for name, parameter in parameters.items()
            },
            (hidden,),
        )
        total = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        return total / ((labels != -100).sum() if normalizer is None else normalizer)

    inputs = {"hidden": torch.randn(BATCH, LENGTH, WIDTH), **parameters}
    assert_within_budget(candidate, reference, inputs, wrt=list(inputs))


def test_nothing_labelled_is_0_with_gradients_0(search):
    module = head()
    hidden = torch.randn(5, WIDTH, requires_grad=True)
    loss = module(hidden, torch.full((5,), -100))
    loss.backward()
    assert loss.item() == 0.0
    assert not hidden.grad.any() and not any(p.grad.any() for p in module.parameters())


def test_bad_arguments_raise_typed_errors():
    module, hidden = head(), torch.randn(BATCH, LENGTH, WIDTH)
    with pytest.raises(ArgumentValueError, match="labels"):
        module(hidden, torch.zeros(BATCH, LENGTH + 1, dtype=torch.int64))
    with pytest.raises(ArgumentTypeError, match="labels"):
        module(hidden, torch.zeros(BATCH, LENGTH))
    with pytest.raises(ArgumentTypeError, match="masked_positions"):
        module(hidden, some_labels(), torch.zeros(2, dtype=torch.int32))
