"""``fastplm.freeze``: what is frozen, and what happens to a frozen model that changes."""

from __future__ import annotations

import collections
import concurrent.futures
import copy
import functools
import gc
import io
import logging
import pickle
import weakref

import pytest
import torch
import transformers
from torch import nn
from torch.nn.utils import parametrize, prune
from transformers.activations import GELUActivation
from transformers.cache_utils import DynamicLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.bert import modeling_bert
from transformers.models.gpt2 import modeling_gpt2

import fastplm
from fastplm import models
from fastplm._backends import record_decisions, record_notes
from fastplm.hf import NAME
from fastplm.models._freeze import freeze_parts
from fastplm.models._watch import freeze_of
from fastplm.nn._rows import THAWED

from .conftest import small_config
from .frozen import batch, hold, made, prompt, steps

pytestmark = pytest.mark.usefixtures("of_csrc")
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
    dropout = [m for m in layers_of(model)[1].modules() if isinstance(m, nn.Dropout)][-1]
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
    if change in (shadowed_weight, shadowed_by_update, pruned):  # which no .double() reaches
        other = made(family, freeze=False)[0]
        change(other)
        assert torch.equal(out, run(other, mode))
    else:
        hold("out", out, parent, run)
    assert (out - before).abs().max() > 1e-3 * before.abs().mean() or change is half_and_back


def of_part(path, name, value):
    """An attribute of a part of a BERT around its layers is set to what ``value()`` gives."""

    def changes(model):
        torch.manual_seed(0)
        setattr(model.get_submodule(path), name, value())

    changes.__name__ = f"{path}.{name}"
    return changes


def words(model):
    generator = torch.Generator().manual_seed(0)
    model.embeddings.word_embeddings.weight.data = torch.randn(50, 48, generator=generator)


def types_by_default(model):
    model.embeddings.token_type_ids.fill_(1)


def pooled(model):
    with torch.no_grad():
        model.pooler.dense.bias.add_(1)


def own_masks(attention_mask, embedding_output, **others):
    return torch.eye(embedding_output.shape[1]).bool()[None, None], None


def buffer(model):
    """Types by default of another buffer."""
    ids = torch.ones(1, 300, dtype=torch.long)
    model.embeddings.register_buffer("token_type_ids", ids, persistent=False)


#: The same around the layers of an encoder.
AROUND = {
    words: SEEN,
    types_by_default: SEEN,
    pooled: SEEN,
    buffer: THAWS,
    of_part("embeddings", "word_embeddings", lambda: nn.Embedding(60, 48).eval()): THAWS,
    of_part("embeddings.LayerNorm", "eps", lambda: 10.0): THAWS,
    of_part("embeddings.word_embeddings", "max_norm", lambda: 0.1): THAWS,
    of_part("pooler", "activation", nn.Sigmoid): THAWS,
    of_part("", "pooler", lambda: None): THAWS,
    of_part("", "_create_attention_masks", lambda: own_masks): THAWS,
    lambda model: model.embeddings.word_embeddings.register_forward_hook(doubled): THAWS,
    lambda model: model.embeddings.register_forward_hook(doubled): THAWS,
    lambda model: model.pooler.dense.register_forward_hook(doubled): THAWS,
    lambda model: setattr(model, "encoder", copy.deepcopy(model.encoder).half().float()): THAWS,
}


@pytest.mark.parametrize("change", AROUND, ids=name_of)
def test_a_change_around_the_layers(change, calls, lines):
    model, parent = made()
    before = run(model)
    for each in (model, parent):
        change(each)
    assert is_frozen(model) == (AROUND[change] == SEEN) and len(lines()) == (not is_frozen(model))
    out = run(model)
    hold("out", out, parent, run)
    assert before.shape != out.shape or not torch.equal(before, out)


#: Calls of the user's that end it, and those that change nothing.
ENDS = {
    "train": lambda model: model.train(),
    "train of a part": lambda model: linears(model)[0].train(),
    "half": lambda model: model.half(),
    "to": lambda model: model.to(torch.float64),
    "apply to a layer": lambda model: layers_of(model)[0].bfloat16(),
    "requires_grad_": lambda model: layers_of(model)[0].requires_grad_(),
    "accelerate": fastplm.accelerate,
    "restore": fastplm.restore,
    "quantize": fastplm.quantize,
    "dequantize": fastplm.dequantize,
    "compile": lambda model: layers_of(model)[0].compile(),
    "functional_call": lambda model: torch.func.functional_call(
        norm(model), {"weight": torch.ones(48)}, (torch.ones(1, 48),)
    ),
    "a parameter is deleted": lambda model: delattr(linears(model)[0], "weight"),
    "popitem": lambda model: norm(model)._parameters.popitem(),
    "clear": lambda model: norm(model)._parameters.clear(),
    "pop": lambda model: norm(model)._parameters.pop("weight"),
    "setdefault": lambda model: norm(model)._parameters.setdefault("other", None),
    "register_module": lambda model: norm(model).register_module("more", nn.Tanh()),
    "register_buffer": lambda model: norm(model).register_buffer("more", torch.ones(1)),
    "a backward hook": lambda model: norm(model).register_full_backward_hook(lambda *_: None),
}
KEEPS = {
    "eval": lambda model: model.eval(),
    "to": lambda model: model.to("cpu", torch.float32),
    "no gradients": lambda model: model.requires_grad_(False),
    "state_dict": lambda model: model.state_dict(),
    "repr": repr,
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
    "torch.save": lambda model: torch.save(model, io.BytesIO()),
    "hidden states": lambda model: model(batch([5])["input_ids"], output_hidden_states=True),
    "attentions": lambda model: model(batch([5])["input_ids"], output_attentions=True),
    "gradients": lambda model: model(batch([5])["input_ids"])[0].sum().backward(),
    "explain": lambda model: fastplm.explain(model, **batch([5])),
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("way", ENDS)
def test_what_thaws(way, family, lines):
    model, _ = made(family)
    ENDS[way](model)
    assert not is_frozen(model) and len(lines()) == 1
    assert not {type(module) for module in model.modules()} & THAWED.keys()


@pytest.mark.parametrize("family", ["bert", "gpt2"])
@pytest.mark.parametrize("way", KEEPS)
def test_what_does_not_thaw(way, family, calls, lines):
    model, _ = made(family)
    out = run(model)
    KEEPS[way](model)
    calls.clear()
    assert is_frozen(model) and not lines() and torch.equal(run(model), out) and calls


@pytest.mark.parametrize("family", FAMILIES)
def test_copies_are_not_frozen(family, calls):
    model, _ = made(family)
    out = run(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    saved = torch.load(file, weights_only=False)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), saved):
        calls.clear()
        assert not is_frozen(other)
        kinds = zip(other.modules(), made(family, freeze=False)[0].modules(), strict=True)
        assert all(type(one) is type(right) for one, right in kinds)
        assert all(type(vars(one)["_parameters"]) is dict for one in other.modules())
        assert torch.equal(run(other), run(made(family, freeze=False)[0]))
        assert not calls and is_frozen(fastplm.freeze(other))
        assert torch.equal(run(other), out) and calls
        with torch.no_grad():
            linears(other)[1].weight.zero_()
        assert not torch.equal(run(other), out)
    assert is_frozen(model) and torch.equal(run(model), out)


def test_a_shallow_copy_is_not_frozen_and_changes_the_model_that_it_shares(lines):
    model, _ = made()
    other = copy.copy(model)
    other._modules = model._modules.copy()
    other.pooler = None
    assert is_frozen(model) and not lines() and model.pooler is not None
    copy.copy(model).pooler = None  # in the modules of both
    assert not is_frozen(model) and model.pooler is None


@pytest.mark.parametrize("family", FAMILIES)
def test_a_thawed_model_is_as_before(family):
    model, parent = made(family)
    names = [name for name, _ in model.named_parameters()]
    fastplm.restore(model)
    assert [name for name, _ in model.named_parameters()] == names
    assert torch.equal(run(model), run(parent))
    assert is_frozen(fastplm.freeze(fastplm.accelerate(model)))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_second_freeze_changes_nothing(family, calls, lines):
    model, _ = made(family)
    out = run(model)
    assert fastplm.freeze(model) is model and torch.equal(run(model), out) and not lines()
    norm(model).register_forward_hook(doubled)
    assert len(lines()) == 1 and not is_frozen(model)


@pytest.mark.parametrize("family", FAMILIES)
def test_no_model_and_no_former_weight_is_kept_alive(family):
    model, _ = made(family)
    run(model)
    weight = weakref.ref(linears(model)[1].weight)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    gc.collect()
    gc.disable()
    try:
        model.load_state_dict(state, assign=True)
        assert weight() is None
        fastplm.freeze(model)
        run(model)
        alive = [weakref.ref(one) for one in model.parameters()]
        del model
        assert not any(one() is not None for one in alive)
    finally:
        gc.enable()


# --- what a call looks at -------------------------------------------------------------------------


def patched(owner, name, of=None):
    """A function of a class or module that somebody replaces while the model is frozen."""

    def way(run_model, monkeypatch):
        original = getattr(owner, name)

        @functools.wraps(original)
        def function(*args, **kwargs):
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, function, raising=False)
        return run_model()

    way.__name__ = f"{getattr(owner, '__name__', owner)}.{name}"
    way.family = of
    return way


def within(context, of=None):
    def way(run_model, monkeypatch):
        with context():
            return run_model()

    way.family = of
    return way


def global_hook(run_model, monkeypatch):
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        return run_model()
    finally:
        handle.remove()


def other_attention(run_model, monkeypatch):
    original = ALL_ATTENTION_FUNCTIONS[NAME]
    ALL_ATTENTION_FUNCTIONS.register(NAME, lambda *args, **kwargs: original(*args, **kwargs))
    try:
        return run_model()
    finally:
        ALL_ATTENTION_FUNCTIONS.register(NAME, original)


WAYS = {
    "gradients": within(torch.enable_grad),
    "eager": within(lambda: fastplm.use_backend("eager")),
    "stock products": within(lambda: fastplm.use_backend("stock", "linear")),
    "eager attention": within(lambda: fastplm.use_backend("eager", "attention")),
    "autocast": within(lambda: torch.autocast("cpu", torch.bfloat16)),
    "notes": within(record_notes, "gpt2"),
    "decisions": within(record_decisions, "gpt2"),
    "a hook of all modules": global_hook,
    "another attention": other_attention,
    "all modules": patched(nn.Module, "__call__"),
    "F.linear": patched(nn.functional, "linear"),
    "F.gelu": patched(nn.functional, "gelu"),
    "LayerNorm": patched(nn.LayerNorm, "forward"),
    "a parent of a drop-in": patched(modeling_bert.BertSelfAttention, "forward", "bert"),
    "embeddings": patched(modeling_bert.BertEmbeddings, "forward", "bert"),
    "nn.Embedding": patched(nn.Embedding, "forward", "bert"),
    "the pooler": patched(modeling_bert.BertPooler, "forward", "bert"),
    "nn.Tanh": patched(nn.Tanh, "forward", "bert"),
    "a block": patched(modeling_gpt2.GPT2Block, "forward", "gpt2"),
    "an MLP": patched(modeling_gpt2.GPT2MLP, "forward", "gpt2"),
    "the call of a class": patched(modeling_gpt2.GPT2MLP, "__call__", "gpt2"),
    "_call_impl of a class": patched(modeling_gpt2.GPT2MLP, "_call_impl", "gpt2"),
    "the cache": patched(DynamicLayer, "update", "gpt2"),
}


@pytest.mark.parametrize(
    "way, family",
    [(way, of) for way, call in WAYS.items() for of in ("bert", "gpt2")
     if getattr(call, "family", None) in (None, of)],
)  # fmt: skip
def test_the_modules_run_themselves(way, family, calls, lines, monkeypatch):
    model, other = made(family)[0], made(family, freeze=False)[0]
    mode = torch.enable_grad if way == "gradients" else torch.no_grad
    outs = []
    for one in (model, other):
        with monkeypatch.context() as patch:
            outs.append(WAYS[way](functools.partial(run, one, mode), patch))
    assert torch.equal(*outs)
    assert not calls and is_frozen(model) and not lines()
    run(model)
    assert calls


@pytest.mark.parametrize("family", ["bert", "gpt2"])
@pytest.mark.parametrize(
    "change",
    [
        lambda model: setattr(model.config, "output_hidden_states", True),
        lambda model: model.set_attn_implementation("sdpa"),
        lambda model: setattr(model.config, "chunk_size_feed_forward", 2),
    ],
)
def test_the_configuration_is_read(change, family, calls):
    model, _ = made(family)
    model.set_attn_implementation(NAME)
    change(model)
    run(model) if family == "gpt2" else model(**batch([6, 6]))
    assert not calls


def test_a_patched_class_is_not_frozen(monkeypatch):
    original = modeling_bert.BertSelfAttention.forward
    monkeypatch.setattr(
        modeling_bert.BertSelfAttention, "forward", lambda *given, **more: original(*given, **more)
    )
    found, left = freeze_parts(made(freeze=False)[0])
    assert not found and "runs in a way of its own" in left[0]


def test_layers_that_checkpoint_in_their_call_are_known(calls, checkpointing_call):
    for family in FAMILIES:
        run(made(family)[0])
    assert {*calls} == {"backbone", "decoder_layer"}


def test_compiled_and_exported():
    model, parent = made()
    given = batch([6, 6])
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            program = torch.compile(lambda ids: model(ids)[0], backend="eager", fullgraph=True)
            out = program(given["input_ids"])
            torch.testing.assert_close(out, parent(**given)[0], rtol=1e-3, atol=1e-3)
    assert is_frozen(model)
    with torch.no_grad():
        torch.export.export(model, (), given)


# --- with others ----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_eight_threads_at_once(family, calls):
    model, _ = made(family)
    given = [
        batch([5 + i, 9, 40], seed=i) if family == "bert" else prompt((0, i % 5)) for i in range(8)
    ]

    def one(i):
        with torch.no_grad(), fastplm.use_backend("cpp", "linear"):
            return model(**given[i])[0] if family == "bert" else steps(model, given[i])[0]

    expected = [one(i) for i in range(8)]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for _ in range(5):
            assert all(map(torch.equal, pool.map(one, range(8)), expected))
    assert all(calls)


def test_a_thaw_while_others_call():
    model, _ = made()
    out, stop = run(model), []

    def one(_):
        with fastplm.use_backend("cpp", "linear"):
            while not stop:
                torch.testing.assert_close(run(model), out, rtol=1e-3, atol=1e-3)

    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        running = [pool.submit(one, i) for i in range(3)]
        try:
            for _ in range(20):
                fastplm.freeze(model)
                model.pooler.dense.other = 1
                del model.pooler.dense.other
        finally:
            stop.append(True)
        assert all(each.result() is None for each in running)


def test_peft(calls):
    peft = pytest.importorskip("peft")
    model, _ = made("gpt2")
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["c_attn"]))
    assert not is_frozen(model)
    merged = adapted.merge_and_unload()
    run(fastplm.freeze(merged))
    assert calls


def test_distributed_and_trainer(tmp_path, calls):
    head = models.BertForSequenceClassification
    model, _ = made(head=head)
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(model)
        with torch.no_grad():
            wrapped(**batch([5, 9]))
        assert calls == ["backbone"] and is_frozen(model)
    finally:
        torch.distributed.destroy_process_group()
    rows = [{**{k: v[0] for k, v in batch([6]).items()}, "labels": torch.tensor(1)}] * 2
    options = dict(report_to=[], save_strategy="no", use_cpu=True, max_steps=1, disable_tqdm=True)
    arguments = transformers.TrainingArguments(str(tmp_path), **options)
    trainer = transformers.Trainer(model, arguments, train_dataset=rows)
    assert trainer.predict(rows).predictions.shape == (2, 2) and is_frozen(model)
    before = model.bert.pooler.dense.weight.clone()
    trainer.train()
    assert not is_frozen(model) and not torch.equal(model.bert.pooler.dense.weight, before)


def test_objects_of_other_libraries(calls):
    """What ``accelerate`` takes."""
    model, _ = made(head=models.BertForSequenceClassification, freeze=False)

    class Holder:
        model_body = model

    assert fastplm.freeze(Holder).model_body is model and is_frozen(model)
    with torch.no_grad():
        model(**batch([5, 9]))
    assert calls == ["backbone"]


def test_what_is_left_is_said(caplog):
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    try:
        model, _ = made(freeze=False)
        model.encoder.layer[1].register_forward_hook(doubled)
        model.train()
        assert fastplm.freeze(model) is model and not model.training and not is_frozen(model)
        assert "`BertModel`, as there is a hook" in caplog.messages[-1]
        described = models.NomicBertModel(small_config("nomic_bert"))
        for other in (nn.Linear(2, 2), described):
            fastplm.freeze(other)
            assert f"no part of this {type(other).__name__} runs" in caplog.messages[-1]
    finally:
        logger.removeHandler(caplog.handler)
