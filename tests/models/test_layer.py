"""``models._layer``: the functions of a layer, beside the modules that they stand for."""

import contextlib

import pytest
import torch
from torch import nn

import fastplm
from fastplm import _extension, models
from fastplm.models import _layer

from .conftest import PADDINGS, gradients, inputs_of, parent_of, same, small_config

pytestmark = pytest.mark.skipif(
    _extension.lacks("dropout_add_layer_norm", "CPU") is not None, reason="csrc/ is not built"
)
FUSED = ("dropout_add_layer_norm", "bias_gelu")
NAMES = ["BertForMaskedLM", "RobertaForMaskedLM", "ElectraForMaskedLM", "AlbertForMaskedLM"]
NAMES += ["BartForConditionalGeneration", "OpenAIGPTLMHeadModel", "GPT2LMHeadModel"]
every_model = pytest.mark.parametrize("name", NAMES)


def model_of(name, dropout=0.1):
    kind = getattr(models, name)
    family = next(
        one
        for one in ("bert", "roberta", "electra", "albert", "bart", "openai", "gpt2")
        if name.lower().startswith(one)
    )
    config = small_config(family)
    for option in vars(config):
        if "drop" in option and isinstance(getattr(config, option), float):
            setattr(config, option, 0.0 if option.startswith("activation") else dropout)
    torch.manual_seed(0)
    return kind(config).train()


def loss_and_gradients(model, inputs, seed=3):
    torch.manual_seed(seed)
    loss = model(**inputs).loss
    return gradients(model, loss) | {"loss": loss.detach()}


@pytest.fixture
def ran(monkeypatch):
    """The functions that ran."""
    names = []
    for name in ("project", "join", "expand"):
        function = getattr(_layer, name)

        def recorded(*given, _function=function, _name=name, **more):
            names.append(_name)
            return _function(*given, **more)

        monkeypatch.setattr(_layer, name, recorded)
    return names


@every_model
@pytest.mark.parametrize("padding", ["none", "right"])
def test_functions_equal_modules_with_dropout(name, padding, ran):
    """The same values are dropped, so only rounding differs."""
    model = model_of(name)
    inputs = inputs_of(name, model.config, PADDINGS[padding])
    by_functions = loss_and_gradients(model, inputs)
    assert {"project", "join", "expand"} <= set(ran)
    ran.clear()
    with fastplm.use_backend("eager", *FUSED):
        by_modules = loss_and_gradients(model, inputs)
    assert not ran
    torch.testing.assert_close(by_functions, by_modules)


@every_model
def test_gradients_are_repeatable(name):
    model = model_of(name)
    inputs = inputs_of(name, model.config, PADDINGS["right"])
    assert same(loss_and_gradients(model, inputs), loss_and_gradients(model, inputs))


@every_model
@pytest.mark.parametrize(
    "frozen",
    ["query|q_proj|c_attn", "dense|fc2|c_proj", "LayerNorm|layer_norm|ln_", "bias", "c_fc"],
)
def test_frozen_parameters(name, frozen):
    model = model_of(name)
    inputs = inputs_of(name, model.config, PADDINGS["right"])
    for parameter, value in model.named_parameters():
        value.requires_grad = not any(part in parameter for part in frozen.split("|"))
    by_functions = loss_and_gradients(model, inputs)
    with fastplm.use_backend("eager", *FUSED):
        torch.testing.assert_close(by_functions, loss_and_gradients(model, inputs))


class Twice(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *args, **kwargs):
        return 2 * self.inner(*args, **kwargs)


CHANGES = {
    "an adapter": lambda layer, end: setattr(end, "dense", Twice(end.dense)),
    "a hook": lambda layer, end: end.dense.register_forward_hook(lambda *given: 2 * given[2]),
    "a hook around": lambda layer, end: layer.intermediate.register_forward_hook(
        lambda *given: 2 * given[2]
    ),
    "an activation": lambda layer, end: setattr(
        layer.intermediate, "intermediate_act_fn", nn.ReLU()
    ),
    "a norm": lambda layer, end: setattr(end, "LayerNorm", nn.Identity()),
    "a shadow": lambda layer, end: vars(end).__setitem__("dropout", nn.Identity()),
    "a projection": lambda layer, end: setattr(
        layer.attention.self, "query", Twice(layer.attention.self.query)
    ),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("at", ["attention", "output"])
def test_a_changed_block_runs_by_its_modules(change, at):
    model = model_of("BertForMaskedLM", 0.0)
    parent = parent_of(type(model))._from_config(model.config, attn_implementation="sdpa").train()
    parent.load_state_dict(model.state_dict())
    inputs = inputs_of("BertForMaskedLM", model.config, PADDINGS["right"])
    for one in (model, parent):
        layer = one.bert.encoder.layer[0]
        change(layer, layer.attention.output if at == "attention" else layer.output)
    torch.testing.assert_close(model(**inputs).loss, parent(**inputs).loss)


@pytest.mark.parametrize("name", NAMES[:2])
def test_tied_weights_of_different_layers_are_not_mixed_up(name):
    """Copies under autocast lie side by side; a shared query is followed by another key."""
    model = model_of(name, 0.0)
    first, second = model.base_model.encoder.layer[:2]
    second.attention.self.query.weight = first.attention.self.query.weight
    inputs = inputs_of(name, model.config, PADDINGS["right"])
    losses = []
    for backend in ("cpp", "eager"):
        asked = fastplm.use_backend(backend, *FUSED)
        with torch.autocast("cpu", torch.bfloat16), asked:
            losses.append(model(**inputs).loss)
    torch.testing.assert_close(*losses, rtol=2e-2, atol=2e-2)


@every_model
def test_under_autocast_the_gradients_of_weights_are_fp32(name, ran):
    model = model_of(name)
    inputs = inputs_of(name, model.config, PADDINGS["right"])
    with torch.autocast("cpu", torch.bfloat16), fastplm.use_backend("cpp", *FUSED):
        torch.manual_seed(3)
        model(**inputs).loss.backward()
    assert ran
    found = [p.grad for p in model.parameters() if p.grad is not None]
    assert all(grad.dtype is torch.float32 and grad.isfinite().all() for grad in found)
    ran.clear()
    with torch.autocast("cpu", torch.bfloat16), contextlib.suppress(RuntimeError):
        model(**inputs)
    assert not ran, "on a CPU the modules run under autocast"


def test_a_gradient_of_a_gradient_is_refused():
    model = model_of("BertForMaskedLM", 0.0)
    inputs = inputs_of("BertForMaskedLM", model.config, PADDINGS["none"])
    weight = model.bert.embeddings.word_embeddings.weight
    (grad,) = torch.autograd.grad(model(**inputs).loss, weight, create_graph=True)
    with pytest.raises(RuntimeError):
        grad.square().sum().backward()


def test_a_class_whose_forward_was_replaced_is_called(monkeypatch, ran):
    model = model_of("BertForMaskedLM", 0.0)
    inputs = inputs_of("BertForMaskedLM", model.config, PADDINGS["none"])
    before = model(**inputs).loss
    assert ran
    original = nn.LayerNorm.forward
    monkeypatch.setattr(nn.LayerNorm, "forward", lambda self, x: 2 * original(self, x))
    ran.clear()
    assert not torch.allclose(model(**inputs).loss, before) and not ran
