"""nn.MLMHead and the search for labelled rows."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
import transformers
from torch import nn
from torch.func import functional_call

from fastplm.errors import ArgumentTypeError, ArgumentValueError
from fastplm.nn import AlbertMLMHead, BertMLMHead, ElectraMLMHead, MLMHead, RobertaMLMHead
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


# --- the heads of Transformers' models ------------------------------------------------------------

SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "embedding_size": WIDTH - 4,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "initializer_range": 0.3,
}


class Joined(nn.Module):
    """In ELECTRA the model has the head as two modules."""

    def __init__(self, model):
        super().__init__()
        self.generator_predictions = model.generator_predictions
        self.generator_lm_head = model.generator_lm_head

    def forward(self, hidden):
        return self.generator_lm_head(self.generator_predictions(hidden))


class Loss(nn.Module):
    """The head's ``forward``, for ``functional_call``."""

    def __init__(self, head):
        super().__init__()
        self.head = head

    def forward(self, *args):
        return self.head.loss(*args)


PARENTS = {
    BertMLMHead: (transformers.BertForMaskedLM, lambda model: model.cls),
    AlbertMLMHead: (transformers.AlbertForMaskedLM, lambda model: model.predictions),
    ElectraMLMHead: (transformers.ElectraForMaskedLM, Joined),
    RobertaMLMHead: (transformers.RobertaForMaskedLM, lambda model: model.lm_head),
}


def parent_head(cls, **options):
    """The head of a Transformers model whose parameters all differ from their initial values."""
    model_cls, select = PARENTS[cls]
    sizes = {**SIZES, "max_position_embeddings": 12, **options}
    if cls in (BertMLMHead, RobertaMLMHead):
        del sizes["embedding_size"]
    model = model_cls(model_cls.config_class(**sizes))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return select(model), model.config


@pytest.mark.parametrize("activation", ["gelu", "gelu_new", "relu"])
@pytest.mark.parametrize("cls", PARENTS)
def test_a_head_is_that_of_transformers(cls, activation, search):
    parent, config = parent_head(cls, hidden_act=activation)
    ours = cls(config)
    assert list(ours.state_dict()) == list(parent.state_dict())
    ours.load_state_dict(parent.state_dict(), strict=True)
    assert dict(ours.named_parameters()).keys() == dict(parent.named_parameters()).keys()
    labels = some_labels()
    parameters = {name: value.detach() for name, value in parent.named_parameters()}
    # Several losses are compared, as PyTorch's error on one batch is chance.
    inputs = {"hidden": torch.randn(8, BATCH, LENGTH, WIDTH), **parameters}

    def logits(module):
        return lambda hidden, **values: functional_call(module, values, (hidden,))

    def losses(hidden, **values):
        values = {f"head.{name}": value for name, value in values.items()}
        return torch.stack([functional_call(Loss(ours), values, (h, labels)) for h in hidden])

    def parent_losses(hidden, **values):
        cross_entropy = nn.functional.cross_entropy
        rows = logits(parent)(hidden, **values).flatten(1, 2)
        return torch.stack([cross_entropy(row, labels.flatten()) for row in rows])

    assert_within_budget(logits(ours), logits(parent), inputs, wrt=list(inputs))
    assert_within_budget(losses, parent_losses, inputs, wrt=list(inputs))


@pytest.mark.parametrize("cls", PARENTS)
def test_a_heads_loss_takes_the_options_of_mlm_head(cls):
    parent, config = parent_head(cls)
    ours = cls(config)
    ours.load_state_dict(parent.state_dict())
    plain = MLMHead(nn.Identity(), ours.output_projection)
    hidden, labels = torch.randn(BATCH, LENGTH, WIDTH), some_labels()
    positions = torch.cat((labelled_positions(labels), torch.full((4,), -1)))
    options = {"normalizer": 11, "label_smoothing": 0.1, "return_statistics": True}
    loss, statistics = ours.loss(hidden, labels, positions, **options)
    rows = ours.transform(hidden)
    expected, expected_statistics = plain(rows, labels, positions, **options)
    torch.testing.assert_close(loss, expected)
    assert torch.equal(statistics.argmax, expected_statistics.argmax)
    with pytest.raises(ArgumentTypeError, match=cls.__name__):
        ours.loss(hidden, labels.float())


@pytest.mark.parametrize("cls", [BertMLMHead, AlbertMLMHead, RobertaMLMHead])
def test_a_heads_two_names_of_the_bias_are_one_parameter(cls):
    parent, config = parent_head(cls)
    ours = cls(config)
    ours.load_state_dict(parent.state_dict())
    names = [name for name in ours.state_dict() if ours.get_parameter(name).shape == (VOCAB,)]
    assert len(names) == 2
    assert all(ours.get_parameter(name) is ours.output_projection.bias for name in names)
    ours.loss(torch.randn(BATCH, LENGTH, WIDTH), some_labels()).backward()
    assert all(parameter.grad.any() for parameter in ours.parameters())


@pytest.mark.slow
def test_the_modules_do_not_import_transformers():
    script = (
        "import sys, json, fastplm.nn\n"
        "print(json.dumps([name for name in sys.modules if name.split('.')[0] == 'transformers']))"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout) == []
