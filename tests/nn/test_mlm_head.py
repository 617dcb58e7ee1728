"""nn.MLMHead and the search for labelled rows."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.func import functional_call

from fastplm.errors import ArgumentValueError
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
    """Both searches for labels: with a count, and with one slot for each token."""
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


def logits_of(module, hidden, labels):
    positions = labelled_positions(labels)
    return module.decoder(module.transform(hidden.flatten(0, 1)[positions])), labels.flatten()[
        positions
    ]


@pytest.mark.parametrize("budget", [None, 0, 1 << 20])
def test_options_reach_the_op(budget):
    module, hidden, labels = head(), torch.randn(BATCH, LENGTH, WIDTH), some_labels()
    options = {"label_smoothing": 0.25, "logits_budget": budget}
    loss, statistics = module(hidden, labels, return_statistics=True, **options)
    logits, targets = logits_of(module, hidden, labels)
    assert torch.equal(statistics.argmax, logits.argmax(1))
    expected = nn.functional.cross_entropy(logits, targets, label_smoothing=0.25)
    torch.testing.assert_close(loss, expected)
    assert torch.equal(module(hidden, labels, **options), loss)
    assert module(hidden, labels) != loss
    with pytest.raises(ArgumentValueError, match="logits_budget"):
        module(hidden, labels, logits_budget=-1)


@pytest.mark.slow
def test_the_modules_do_not_import_transformers():
    script = (
        "import sys, json, fastplm.nn\n"
        "print(json.dumps([name for name in sys.modules if name.split('.')[0] == 'transformers']))"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout) == []
