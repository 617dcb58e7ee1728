"""``fastplm.freeze``: what is frozen, and what happens to a frozen model that changes."""

from __future__ import annotations

import collections
import functools
import logging

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize, prune
from transformers.activations import GELUActivation

from fastplm.models._watch import freeze_of

from .frozen import batch, hold, made, prompt, steps

needs_csrc = pytest.mark.usefixtures("of_csrc")
pytestmark = needs_csrc
FAMILIES = ("bert", "gpt2", "t5")


def is_frozen(model):
    return any(freeze_of(module).modules for module in model.modules())


def run(model, mode=torch.no_grad):
    """What the changes below are seen in: states of tokens, or logits of the next ones."""
    with mode():
        if model.config.model_type == "bert":
            given = batch([5, 9])
            out = model(**given)
            return torch.cat([out[0][given["attention_mask"].bool()], *out[1:]])
        return steps(model, prompt())[0]


def layers_of(model):
    if model.config.model_type == "bert":
        return model.encoder.layer
    return model.transformer.h if hasattr(model, "transformer") else model.decoder.block


# --- what changes a model -------------------------------------------------------------------------


def linears(model):
    """The first and the last product of a layer."""
    layer = layers_of(model)[1]
    if model.config.model_type == "bert":
        return layer.attention.self.query, layer.output.dense
    if hasattr(layer, "attn"):
        return layer.attn.c_attn, layer.mlp.c_proj
    return layer.layer[0].SelfAttention.q, layer.layer[2].DenseReluDense.wo


def norm(model):
    layer = layers_of(model)[1]
    if model.config.model_type == "bert":
        return layer.output.LayerNorm
    return layer.ln_2 if hasattr(layer, "ln_2") else layer.layer[2].layer_norm


def inner(model):
    """The module with an activation, and the name of that."""
    layer = layers_of(model)[1]
    if model.config.model_type == "bert":
        return layer.intermediate, "intermediate_act_fn"
    return (layer.mlp if hasattr(layer, "mlp") else layer.layer[2].DenseReluDense), "act"


def attention(model):
    layer = layers_of(model)[1]
    if model.config.model_type == "bert":
        return layer.attention.self
    return layer.attn if hasattr(layer, "attn") else layer.layer[0].SelfAttention


def of_class(model, module, **body):
    """The module gets a class of its own."""
    module.__class__ = type("Own", (type(module),), body)


def doubled(module, *given):
    out = given[-1]
    return (out[0] * 2, *out[1:]) if isinstance(out, tuple) else out * 2


class Adapter(nn.Module):
    """A layer of PEFT's form: the former one, and a weight beside it."""

    def __init__(self, base, outputs):
        super().__init__()
        self.base_layer = base
        torch.manual_seed(1)
        self.up = nn.Parameter(torch.randn(1, outputs))

    def forward(self, x):
        return self.base_layer(x) + x.mean(-1, keepdim=True) @ self.up


class Doubled(nn.Module):
    def forward(self, weight):
        return weight * 2


def optimizer(model):
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    torch.optim.SGD(model.parameters(), lr=0.05).step()


def loaded(model, **how):
    model.load_state_dict({n: v * 1.5 for n, v in model.state_dict().items()}, **how)


def in_place(model):
    with torch.no_grad():
        linears(model)[1].weight.mul_(2)


def merged(model):
    weight = linears(model)[0].weight.data
    torch.manual_seed(1)
    weight += torch.randn(weight.shape[0], 2) @ torch.randn(2, weight.shape[1])


def other_data(model):
    linears(model)[0].weight.data = linears(model)[0].weight.data * 2


def swapped(model):
    product = linears(model)[1]
    torch.utils.swap_tensors(product.weight, nn.Parameter(product.weight.detach() * 2))


def new_parameter(model):
    linears(model)[1].weight = nn.Parameter(linears(model)[1].weight.detach() * 2)


def written_parameter(model):
    held = linears(model)[1]._parameters
    held.update(weight=nn.Parameter(held["weight"].detach() * 2))


def new_dict_of_parameters(model):
    dense = linears(model)[1]
    weight = nn.Parameter(dense.weight.detach() * 2)
    dense._parameters = dict(dense._parameters, weight=weight)


def parameter_by_ior(model):
    dense = linears(model)[1]
    dense._parameters |= {"weight": nn.Parameter(dense.weight.detach() * 2)}


def no_bias(model):
    product = linears(model)[1]  # Transformers' Conv1D needs one
    needs = product.bias is None or hasattr(product, "nf")
    product.bias = nn.Parameter(torch.arange(48.0)) if needs else None


def hook(model):
    linears(model)[1].register_forward_hook(doubled)


def first_hook(model):
    linears(model)[1].register_forward_hook(doubled, prepend=True)


def pre_hook(model):
    norm(model).register_forward_pre_hook(lambda module, given: (given[0] * torch.arange(48),))


def hook_of_a_layer(model):
    layers_of(model)[1].register_forward_hook(doubled)


def new_dict_of_hooks(model):
    for module in model.modules():
        module._forward_hooks = collections.OrderedDict()
    hook(model)


def replaced_forward(model):
    product = linears(model)[1]
    forward = functools.partial(type(product).forward, product)
    product.forward = lambda x: forward(x) * 2


def a_forward_in_its_dict(model):
    product = linears(model)[1]
    forward = functools.partial(type(product).forward, product)
    vars(product)["forward"] = lambda x: forward(x) * 2


def class_of_a_norm(model):
    kind = type(norm(model))
    of_class(model, norm(model), forward=lambda self, x: kind.forward(self, x) * 2)


def class_of_a_layer(model):
    kind = type(layers_of(model)[1])

    def forward(self, hidden, *args, **kwargs):
        return kind.forward(self, -hidden, *args, **kwargs)

    of_class(model, layers_of(model)[1], forward=forward)


def activation(model):
    setattr(*inner(model), nn.Tanh())


def function_of_the_activation(model):
    act = GELUActivation()
    act.act = nn.functional.silu
    setattr(*inner(model), act)


def eps(model):
    own = norm(model)
    setattr(own, "eps" if hasattr(own, "eps") else "variance_epsilon", 10.0)


def scaling(model):
    attention(model).scaling = 0.01


def shadowed_weight(model):
    vars(norm(model))["weight"] = norm(model).weight.detach() * 2


def shadowed_by_update(model):
    vars(norm(model)).update(weight=norm(model).weight.detach() * 2)


def adapter(model):
    parent, _ = inner(model)
    name = next(name for name in ("dense", "c_fc", "wi") if hasattr(parent, name))
    outputs = {"dense": 70, "c_fc": 192, "wi": 70}[name]
    setattr(parent, name, Adapter(getattr(parent, name), outputs))


def written_module(model):
    parent, name = inner(model)
    parent._modules[name] = nn.Tanh()


def pruned(model):
    prune.l1_unstructured(linears(model)[1], "weight", amount=0.5)


def parametrized(model):
    parametrize.register_parametrization(linears(model)[0], "weight", Doubled())


def weight_normed(model):
    nn.utils.parametrizations.weight_norm(linears(model)[1])
    linears(model)[1].parametrizations.weight.original0.data *= 2


def sampling(model):
    """A dropout that stays on, as in Gal and Ghahramani 2016; with p = 1, which leaves nothing."""
    dropout = next(m for m in layers_of(model)[1].modules() if isinstance(m, nn.Dropout))
    dropout.p = 1.0
    dropout.train()


def less_layers(model):
    del layers_of(model)[1]


def other_order(model):
    modules = layers_of(model)._modules
    modules["0"] = modules.pop("0")
    modules.move_to_end("2") if hasattr(modules, "move_to_end") else None


def exchanged_dicts(model):
    one, other = layers_of(model)[0], layers_of(model)[2]
    one.__dict__, other.__dict__ = other.__dict__, one.__dict__


def half_and_back(model):
    model.half().float()


THAWS, SEEN = "thaws", "seen"
#: What happens to a frozen model; of a model whose layers alone are frozen, it may be another.
CHANGES = {
    optimizer: SEEN,
    loaded: SEEN,
    in_place: SEEN,
    merged: SEEN,
    other_data: SEEN,
    swapped: SEEN,
    functools.partial(loaded, assign=True): THAWS,
    new_parameter: THAWS,
    written_parameter: THAWS,
    new_dict_of_parameters: THAWS,
    parameter_by_ior: THAWS,
    no_bias: THAWS,
    hook: THAWS,
    first_hook: THAWS,
    pre_hook: THAWS,
    hook_of_a_layer: THAWS,
    new_dict_of_hooks: THAWS,
    replaced_forward: THAWS,
    a_forward_in_its_dict: THAWS,
    class_of_a_norm: THAWS,
    class_of_a_layer: THAWS,
    activation: THAWS,
    function_of_the_activation: THAWS,
    eps: THAWS,
    scaling: THAWS,
    shadowed_weight: THAWS,
    shadowed_by_update: THAWS,
    adapter: THAWS,
    written_module: THAWS,
    pruned: THAWS,
    parametrized: THAWS,
    weight_normed: THAWS,
    sampling: THAWS,
    exchanged_dicts: THAWS,
    half_and_back: THAWS,
    less_layers: {"bert": THAWS, "gpt2": SEEN, "t5": SEEN},
    other_order: {"bert": THAWS, "gpt2": SEEN, "t5": SEEN},
}


def name_of(change):
    return getattr(change, "__name__", "assigned")


@pytest.fixture
def lines(caplog):
    """Each line that the model says when it thaws."""
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    yield lambda: [one.message for one in caplog.records if "not frozen any more" in one.message]
    logger.removeHandler(caplog.handler)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("change", CHANGES, ids=name_of)
def test_a_change_is_seen_or_thaws(change, family, mode, calls, lines):
    model, parent = made(family)
    before = run(model, mode)
    assert calls and is_frozen(model) and not lines()
    for each in (model, parent):
        change(each)
    outcome = CHANGES[change]
    outcome = outcome[family] if isinstance(outcome, dict) else outcome
    assert is_frozen(model) == (outcome == SEEN) and len(lines()) == (outcome == THAWS)
    calls.clear()
    out = run(model, mode)
    assert bool(calls) == (outcome == SEEN)
    if change in (shadowed_weight, shadowed_by_update):  # which no .double() reaches
        torch.testing.assert_close(out, run(parent), rtol=1e-3, atol=1e-3)
    else:
        hold("out", out, parent, run)
    assert (out - before).abs().max() > 1e-3 * before.abs().mean() or change is half_and_back


