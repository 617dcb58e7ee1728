"""``models._layer``: the functions of a layer, beside the modules that they stand for."""

import contextlib

import pytest
import torch
import transformers
from torch import nn

import fastplm
from fastplm import _extension, models
from fastplm.errors import UnsupportedError
from fastplm.models import _layer

from .conftest import (
    CLASSES,
    FAMILIES,
    LANGUAGE_MODELS,
    PADDINGS,
    config_of,
    gradients,
    inputs_of,
    pair,
    parent_of,
    same,
    small_config,
)

pytestmark = pytest.mark.skipif(
    _extension.lacks("dropout_add_layer_norm", "CPU") is not None, reason="csrc/ is not built"
)
FUSED = ("dropout_add_layer_norm", "bias_gelu")
NAMES = ["BertForMaskedLM", "RobertaForMaskedLM", "ElectraForMaskedLM", "AlbertForMaskedLM"]
NAMES += ["BartForConditionalGeneration", "OpenAIGPTLMHeadModel", "GPT2LMHeadModel"]
DESCRIBED = [f"{name}ForMaskedLM" for name in ("Esm", "NomicBert", "EuroBert", "ModernBert")]
NAMES += ["RobertaPreLayerNormForMaskedLM", *DESCRIBED]
every_model = pytest.mark.parametrize("name", NAMES)


def model_of(name, dropout=0.1):
    kind = getattr(models, name)
    config = small_config(CLASSES[name])
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


@every_model
@pytest.mark.parametrize("of", ["loss", "states"])
def test_a_gradient_of_a_gradient_is_refused(name, of, ran):
    """Also where the gradient that comes in is a constant, so that nothing in it says so."""
    model = model_of(name, 0.0)
    inputs = inputs_of(name, model.config, PADDINGS["none"])
    if of == "loss":
        out = model(**inputs).loss
    else:
        inputs.pop("labels")
        model.config.use_cache = False
        out = model.base_model(**inputs)[0].sum()
    assert ran
    weight = model.get_input_embeddings().weight
    (grad,) = torch.autograd.grad(out, weight, create_graph=True)
    with pytest.raises(UnsupportedError, match=r"use_backend\('eager', '"):
        grad.square().sum().backward()


@every_model
@pytest.mark.parametrize("padding", ["none", "right"])
def test_batched_gradients_are_those_of_the_modules(name, padding, ran):
    """The functions of a layer refuse them, and say so."""
    model = model_of(name, 0.0)
    inputs = inputs_of(name, model.config, PADDINGS[padding])
    weights, batch = list(model.parameters()), torch.tensor([1.0, -2.0])
    options = dict(allow_unused=True, retain_graph=True)
    with pytest.raises(UnsupportedError, match=r"use_backend\('eager'\)"):
        torch.autograd.grad(model(**inputs).loss, weights, batch, is_grads_batched=True, **options)
    assert ran
    with fastplm.use_backend("eager"):
        loss = model(**inputs).loss
    found = torch.autograd.grad(loss, weights, batch, is_grads_batched=True, **options)
    for one, both in zip(torch.autograd.grad(loss, weights, **options), found, strict=True):
        assert (one is None) == (both is None)
        if one is not None:
            torch.testing.assert_close(both, torch.stack((one, -2 * one)))


class Bare(nn.Module):
    """An adapter without the attributes of what it adapts."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return 2 * self.inner(x)


@pytest.mark.parametrize("name", [*NAMES, "T5ForConditionalGeneration"])
def test_any_linear_module_may_be_one_without_a_weight(name):
    """Each in turn, if the parent runs so."""
    model, parent = (one.eval() for one in pair(name))
    inputs = inputs_of(name, model.config, PADDINGS["right"])
    kinds = (nn.Linear, transformers.pytorch_utils.Conv1D)
    last = [path for path, one in parent.named_modules() if isinstance(one, kinds)]
    swapped = 0
    for path in last:
        where, _, attribute = path.rpartition(".")
        both = [one.get_submodule(where) for one in (model, parent)]
        made = [getattr(one, attribute) for one in both]
        for one, module in zip(both, made, strict=True):
            setattr(one, attribute, Bare(module))
        try:
            gold = parent(**inputs).loss
        except AttributeError:
            gold = None  # the parent reads a weight, too
        if gold is not None:
            swapped += 1
            torch.testing.assert_close(model(**inputs).loss, gold)
        for one, module in zip(both, made, strict=True):
            setattr(one, attribute, module)
    assert swapped


@pytest.mark.parametrize("name", [*NAMES, "T5ForConditionalGeneration"])
def test_a_model_runs_on_the_meta_device(name):
    config = config_of(name)
    config.use_cache = False
    inputs = inputs_of(name, config, PADDINGS["none"])
    inputs = {key: inputs[key].to("meta") for key in ("input_ids", "labels")}
    assert getattr(models, name)(config).to("meta")(**inputs).loss.is_meta


@every_model
def test_autocast_leaves_fp64(name):
    """As PyTorch's does, so a model in fp64 computes in fp64."""
    model = model_of(name, 0.0).double()
    inputs = inputs_of(name, model.config, PADDINGS["right"])
    expected = model(**inputs).loss
    with torch.autocast("cpu", torch.bfloat16), fastplm.use_backend("cpp", *FUSED):
        torch.testing.assert_close(model(**inputs).loss, expected)


@pytest.mark.parametrize(
    "change",
    [lambda attn: attn.attn_dropout.eval(), lambda attn: setattr(attn, "attn_dropout", nn.ReLU())],
    ids=["not training", "another class"],
)
def test_gpt_calls_its_dropout_of_attention(change):
    """A module of its own, unlike that of the other families: whether it drops is its affair."""
    model, parent = (one.train() for one in pair("OpenAIGPTLMHeadModel"))
    for one in (model, parent):
        for module in one.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        for block in one.transformer.h:
            block.attn.attn_dropout.p = 1.0
            change(block.attn)
    inputs = inputs_of("OpenAIGPTLMHeadModel", model.config, PADDINGS["none"])
    torch.testing.assert_close(model(**inputs).loss, parent(**inputs).loss)


@pytest.mark.parametrize("name", [*NAMES, "T5ForConditionalGeneration"])
def test_functions_run_after_hidden_states_were_asked_for(name, ran):
    """Transformers' hooks stay on a model that has recorded outputs once."""
    model = model_of(name) if name in NAMES else models.T5ForConditionalGeneration(config_of(name))
    inputs, counts = inputs_of(name, model.config, PADDINGS["none"]), []
    for more in ({}, {"output_hidden_states": True}, {"output_attentions": True}, {}):
        ran.clear()
        out = model(**inputs, **more)
        counts.append(len(ran))
        for asked in more:
            field = asked.removeprefix("output_")
            found = out.get(field, out.get("decoder_" + field))
            assert found and None not in found
    assert counts[0] == counts[3] > 0


def test_a_batch_of_no_sequences():
    """In Transformers GPT alone takes one."""
    model, parent = (one.train() for one in pair("OpenAIGPTLMHeadModel"))
    ids = torch.zeros(0, 5, dtype=torch.int64)
    assert model(ids).logits.shape == parent(ids).logits.shape
    for name in NAMES[:4]:
        assert model_of(name)(ids).logits.shape[:2] == ids.shape


def test_a_class_whose_forward_was_replaced_is_called(monkeypatch, ran):
    model = model_of("BertForMaskedLM", 0.0)
    inputs = inputs_of("BertForMaskedLM", model.config, PADDINGS["none"])
    before = model(**inputs).loss
    assert ran
    original = nn.LayerNorm.forward
    monkeypatch.setattr(nn.LayerNorm, "forward", lambda self, x: 2 * original(self, x))
    ran.clear()
    assert not torch.allclose(model(**inputs).loss, before) and not ran


class _Counts(contextlib.AbstractContextManager):
    """Counts the calls of a class, whose forward is another one inside."""

    def __init__(self, kind):
        self.kind, self.forward, self.count = kind, kind.forward, 0
        self.own = "forward" in vars(kind)

    def __enter__(self):
        def forward(module, *args, **kwargs):
            self.count += 1
            return self.forward(module, *args, **kwargs)

        self.kind.forward = forward
        return self

    def __exit__(self, *_):
        if self.own:
            self.kind.forward = self.forward
        else:
            del self.kind.forward


def _first(out):
    return out[0].detach()


@pytest.mark.parametrize("frozen", [False, True], ids=["", "frozen"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_forward_set_on_the_class_of_a_module_is_called_where_the_parents_is(family, frozen):
    """``type(module).forward = f`` of each module, and then as before."""
    name = LANGUAGE_MODELS[family]
    ours, parent = pair(name)
    given = inputs_of(name, ours.config, PADDINGS["right"])
    fastplm.freeze(ours) if frozen else None
    kinds = {}
    for module, theirs in zip(ours.modules(), parent.modules(), strict=True):
        kinds.setdefault(type(module), type(theirs))
    with torch.set_grad_enabled(not frozen):
        expected = _first(ours(**given))
        for kind, theirs in kinds.items():
            with _Counts(theirs) as of_parent:
                parent(**given)
            with _Counts(kind) as counted:
                out = _first(ours(**given))
            # Of a frozen model's classes others may not be frozen; attention draws its own dropout.
            few = frozen or issubclass(kind, nn.Dropout | nn.Identity)
            assert counted.count >= (min(1, of_parent.count) if few else of_parent.count), kind
            torch.testing.assert_close(out, expected, rtol=1e-3, atol=1e-4)
            assert torch.equal(_first(ours(**given)), expected)


@pytest.mark.parametrize("family", [one for one in FAMILIES if one != "bart"])
def test_a_forward_set_on_transformers_class_of_a_layer_is_called(family):
    """But that of BART's layers: fastplm has another one in its place."""
    ours, parent = pair(LANGUAGE_MODELS[family])
    given = inputs_of(LANGUAGE_MODELS[family], ours.config, PADDINGS["right"])
    with _Counts(type(_layer_of(parent))) as counted:
        ours(**given)
    assert counted.count


def _layer_of(model):
    """The first module in a list that holds others: a layer."""
    lists = [one for one in model.modules() if isinstance(one, nn.ModuleList)]
    first = lists[0][0]
    return first.albert_layers[0] if hasattr(first, "albert_layers") else first


def test_a_class_that_is_replaced_before_its_family_is_imported_is_called(monkeypatch):
    monkeypatch.setattr(_layer, "_STANDS_FOR", dict(_layer._STANDS_FOR))
    original = nn.LayerNorm.forward
    monkeypatch.setattr(nn.LayerNorm, "forward", lambda self, x: original(self, x))
    assert _layer.is_patched()
    _layer.stand_for(nn.LayerNorm)
    assert _layer.is_patched()
