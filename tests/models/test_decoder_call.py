"""A decoder's layer in one call of csrc/ for the next tokens: results, and when it runs itself."""

from __future__ import annotations

import copy
import functools
import gc
import weakref

import pytest
import torch
import transformers
from torch import nn
from torch.nn.utils import parametrize
from transformers.cache_utils import DynamicCache, DynamicLayer, StaticCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.gpt2 import modeling_gpt2
from transformers.models.t5 import modeling_t5

import fastplm
from fastplm import models
from fastplm._backends import record_decisions, record_notes
from fastplm.hf import NAME
from fastplm.models import _decoder_call
from fastplm.testing import (
    FORWARD_FACTOR,
    GRADIENT_FACTOR,
    ReversedReductions,
    ShuffledReductions,
    check_error,
    rerounded,
)

pytestmark = pytest.mark.skipif(not _decoder_call._BUILT, reason="csrc/ is not built")

GPT2 = dict(
    vocab_size=60, n_embd=48, n_layer=3, n_head=4, n_positions=300, initializer_range=0.2,
    bos_token_id=1, eos_token_id=1,
)  # fmt: skip
T5 = dict(
    vocab_size=60, d_model=48, d_kv=10, num_heads=4, d_ff=70, num_layers=3,
    initializer_factor=2.0, decoder_start_token_id=0,
)  # fmt: skip
FAMILIES = {
    "gpt2": {},
    "gpt2 with erf": dict(activation_function="gelu"),
    "gpt2 scaled by layers": dict(scale_attn_by_inverse_layer_idx=True),
    "t5": {},
    "t5 gated": dict(feed_forward_proj="gated-gelu"),
}


def made(family="gpt2", **changed):
    """A drop-in model and its parent in evaluation, with the same weights, biases and all."""
    torch.manual_seed(0)
    if family.startswith("gpt2"):
        config = transformers.GPT2Config(**{**GPT2, **FAMILIES[family], **changed})
        model = models.GPT2LMHeadModel(config)
    else:
        config = transformers.T5Config(**{**T5, **FAMILIES[family], **changed})
        model = models.T5ForConditionalGeneration(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
    model.eval()
    return model, fastplm.restore(copy.deepcopy(model))


def prompt(padding=(0, 3, 0), length=7):
    """Ids and a mask, whose padding is at the left."""
    generator = torch.Generator().manual_seed(1)
    mask = torch.arange(length) >= torch.tensor(padding)[:, None]
    ids = torch.randint(2, 60, mask.shape, generator=generator).masked_fill(~mask, 0)
    return {"input_ids": ids, "attention_mask": mask.long()}


def steps(model, given, count=3, seed=2):
    """The logits of ``count`` tokens after the prompt, [B, count, V], and the cache."""
    generator, batch = torch.Generator().manual_seed(seed), given["input_ids"].shape[0]
    tokens = torch.randint(2, 60, (batch, count), generator=generator)
    logits, mask = [], given["attention_mask"]
    if model.config.is_encoder_decoder:
        out = model(**given, decoder_input_ids=tokens[:, :1], use_cache=True)
    else:
        out = model(**given, use_cache=True)
    for i in range(count):
        cache = out.past_key_values
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
        out = step(model, given, tokens[:, i : i + 1], cache, mask)
        logits.append(out.logits)
    return torch.cat(logits, 1), out.past_key_values


def step(model, given, token, cache, mask, **others):
    if not model.config.is_encoder_decoder:
        places = (mask.cumsum(1) - 1)[:, -1:]
        others = {"position_ids": places, **others}
        return model(token, attention_mask=mask, past_key_values=cache, **others)
    states = (torch.zeros(*given["input_ids"].shape, model.config.d_model),)  # it is in the cache
    return model(
        attention_mask=given["attention_mask"],
        decoder_input_ids=token,
        encoder_outputs=states,
        past_key_values=cache,
        **others,
    )


def layers_of(model):
    return model.transformer.h if hasattr(model, "transformer") else model.decoder.block


@pytest.fixture(autouse=True)
def of_csrc():
    """csrc/ multiplies, whatever was measured on this machine."""
    with fastplm.use_backend("cpp", "linear"):
        yield


@pytest.fixture
def calls(monkeypatch):
    """Whether each call of a layer gave a result."""
    seen, called = [], _decoder_call._called

    def noted(*given):
        out = called(*given)
        seen.append(out is not None)
        return out

    monkeypatch.setattr(_decoder_call, "_called", noted)
    return seen


def hold(name, ours, parent, run):
    """The error of ``ours`` is within that of ``run(parent)``; the parent is fp64 afterwards."""
    measures = [run(parent)]
    with ReversedReductions():
        measures.append(run(parent))
    measures += [run(other) for other in rerounded(parent)]
    check_error(name, ours, run(parent.double()), measures, FORWARD_FACTOR)


# --- what it computes -----------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("padding", [(0,), (0, 3, 0), (2, 0, 1, 0, 6)], ids=len)
def test_its_error_is_that_of_the_parent(family, padding, calls):
    model, parent = made(family)
    given = prompt(padding)
    # The keys of padding are anything.
    seen = torch.arange(8 + 2) >= torch.tensor(padding)[:, None]
    seen = seen if family.startswith("gpt2") else seen[:, :4] | True

    def rows(which, each):
        cache = steps(each, given)[1]
        layers = getattr(cache, "self_attention_cache", cache).layers
        return torch.stack([getattr(layer, which).transpose(1, 2)[seen] for layer in layers])

    with torch.no_grad():
        logits, cache = steps(model, given)
        assert len(calls) == 9 and all(calls)
        for which in ("keys", "values"):
            run = functools.partial(rows, which)
            hold(which, run(model), copy.deepcopy(parent), run)
        theirs = steps(parent, given)[1]
        hold("logits", logits, parent, lambda each: steps(each, given)[0])
    layers = [getattr(each, "self_attention_cache", each).layers for each in (cache, theirs)]
    for one, other in zip(*layers, strict=True):
        assert one.keys.shape == other.keys.shape and one.keys.stride() == other.keys.stride()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_error_in_8_bits(family, calls, monkeypatch):
    """A rounding more or less moves a number to another of 255 steps, so as in ``test_quantize``
    the budget is that of gradients."""
    model, parent = map(fastplm.quantize, made(family))

    def run(each):
        return steps(each, prompt())[0]

    with torch.no_grad():
        out = run(model)
        assert len(calls) == 9 and all(calls)
        measures = [run(parent)]
        for mode in (ReversedReductions(), ShuffledReductions(0), ShuffledReductions(1)):
            with mode:
                measures.append(run(parent))
        monkeypatch.setattr(_decoder_call, "_BUILT", False)
        measures += [run(other) for each in (model, parent) for other in rerounded(each)]
        check_error("logits", out, run(parent.double()), measures, GRADIENT_FACTOR)
    assert len(calls) == 9


@pytest.mark.parametrize("family", ["gpt2", "t5"])
def test_layers_of_both_kinds_run_themselves(family, calls):
    model, parent = made(family)
    for each in (model, parent):
        fastplm.quantize(each, skip=["c_proj"] if family == "gpt2" else ["wo"])
    with torch.no_grad():
        steps(model, prompt())
    assert not calls


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"do_sample": True}], ids=str)
def test_what_is_generated(family, options, calls):
    model, parent = made(family)
    sequences = []
    for each in (model, parent):
        torch.manual_seed(5)
        given = {**prompt(), "max_new_tokens": 9, "pad_token_id": 0, **options}
        sequences.append(each.generate(**given))
    assert torch.equal(*sequences) and calls and all(calls)


@pytest.mark.parametrize("family", ["gpt2", "t5"])
def test_the_bits_do_not_depend_on_threads(family, calls):
    model, _ = made(family)
    outputs, before = [], torch.get_num_threads()
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            with torch.no_grad():
                outputs.append(steps(model, prompt(length=150))[0])
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(outputs[0], other) for other in outputs[1:]) and all(calls)


@pytest.mark.parametrize("family", ["gpt2", "t5"])
def test_nan_stays_in_its_sequence(family, calls):
    model, _ = made(family)
    model.get_input_embeddings().weight.data[2] = float("nan")
    given = prompt((0, 0))
    given["input_ids"][given["input_ids"] == 2] = 3
    with torch.no_grad():
        out = model(**given, use_cache=True, **_first(model))
        token, mask = torch.tensor([[2], [5]]), torch.ones(2, 8, dtype=torch.long)
        logits = step(model, given, token, out.past_key_values, mask).logits
    assert logits[0].isnan().all() and logits[1].isfinite()[:, 3:].all() and all(calls) and calls


@pytest.mark.parametrize("family", ["gpt2", "t5"])
def test_nan_in_a_score_is_in_the_result(family, calls):
    model, parent = made(family)
    given, token = prompt((0, 0)), torch.tensor([[3], [5]])
    with torch.no_grad():
        for each in (model, parent):
            cache = each(**given, use_cache=True, **_first(each)).past_key_values
            getattr(cache, "self_attention_cache", cache).layers[1].keys[0, 0, 0, 0] = float("nan")
            mask = torch.ones(2, 8, dtype=torch.long)
            logits = step(each, given, token, cache, mask).logits
            assert logits[0].isnan().any() and logits[1].isfinite().all()
    assert calls == [True] * 3


def _first(model):
    """The first token of a decoder."""
    if not model.config.is_encoder_decoder:
        return {}
    return {"decoder_input_ids": torch.tensor([[3], [4]])}


def test_a_token_that_sees_no_key_has_no_attention():
    model, _ = made()
    layer = layers_of(model)[0]
    cache = DynamicCache(config=model.config)
    cache.update(torch.randn(1, 4, 5, 12), torch.randn(1, 4, 5, 12), 0)
    x, mask = torch.randn(1, 1, 48), torch.zeros(1, 1, 1, 6, dtype=torch.bool)
    with torch.no_grad():
        out = layer(x, cache, mask)
        alone = x + layer.attn.c_proj.bias
        expected = alone + layer.mlp(layer.ln_2(alone))
    torch.testing.assert_close(out, expected)


# --- weights are never out of date ----------------------------------------------------------------


def _linears(layer):
    """The first and the last product of a layer."""
    if hasattr(layer, "attn"):
        return layer.attn.c_attn, layer.mlp.c_proj
    return layer.layer[0].SelfAttention.q, layer.layer[2].DenseReluDense.wo


def _norm(layer):
    return layer.ln_2 if hasattr(layer, "ln_2") else layer.layer[2].layer_norm


def _optimizer(layer):
    for parameter in layer.parameters():
        parameter.grad = torch.ones_like(parameter)
    torch.optim.SGD(layer.parameters(), lr=0.05).step()


def _copied(layer):
    _linears(layer)[1].weight.data.copy_(_linears(layer)[1].weight * 2)


def _other_data(layer):
    _linears(layer)[0].weight.data = _linears(layer)[0].weight.data * 2


def _new_parameter(layer):
    _linears(layer)[1].weight = nn.Parameter(_linears(layer)[1].weight.detach() * 2)


def _loaded(layer):
    layer.load_state_dict({name: value * 1.5 for name, value in layer.state_dict().items()})


def _swapped(layer):
    product = _linears(layer)[1]
    torch.utils.swap_tensors(product.weight, nn.Parameter(product.weight.detach() * 2))


def _merged(layer):
    weight = _linears(layer)[0].weight.data
    torch.manual_seed(1)
    weight += torch.randn(weight.shape[0], 2) @ torch.randn(2, weight.shape[1])


def _frozen(layer):
    layer.requires_grad_(False)
    _linears(layer)[0].weight.mul_(2)


def _hook(layer):
    _linears(layer)[1].register_forward_hook(lambda module, given, out: out * 2)


def _pre_hook(layer):
    _norm(layer).register_forward_pre_hook(lambda module, given: (given[0] * torch.arange(48),))


def _forward(layer):
    product = _linears(layer)[1]
    product.forward = lambda x: type(product).forward(product, x) * 2


def _own_class(layer):
    class Own(type(layer)):
        def forward(self, hidden_states, *args, **kwargs):
            return super().forward(-hidden_states, *args, **kwargs)

    layer.__class__ = Own


def _scaling(layer):
    attention = layer.attn if hasattr(layer, "attn") else layer.layer[0].SelfAttention
    attention.scaling = 0.01


def _activation(layer):
    (layer.mlp if hasattr(layer, "mlp") else layer.layer[2].DenseReluDense).act = nn.Tanh()


def _eps(layer):
    norm = _norm(layer)
    setattr(norm, "eps" if hasattr(norm, "eps") else "variance_epsilon", 10.0)


def _parametrized(layer):
    class Doubled(nn.Module):
        def forward(self, weight):
            return weight * 2

    parametrize.register_parametrization(_linears(layer)[0], "weight", Doubled())


def _with_bias(layer):
    _linears(layer)[1].bias = nn.Parameter(torch.arange(48.0))


def _adapter(layer):
    class Adapter(nn.Module):
        def __init__(self, base, outputs):
            super().__init__()
            self.base = base
            torch.manual_seed(1)
            self.up = nn.Parameter(torch.randn(1, outputs))

        def forward(self, x):
            return self.base(x) + x.mean(-1, keepdim=True) @ self.up

    if hasattr(layer, "mlp"):
        layer.mlp.c_fc = Adapter(layer.mlp.c_fc, 192)
    else:
        inner = layer.layer[2].DenseReluDense
        inner.wi = Adapter(inner.wi, 70)


def _sampling(layer):
    """A dropout that stays on, as in Gal and Ghahramani 2016; with p = 1, which leaves nothing."""
    dropout = layer.mlp.dropout if hasattr(layer, "mlp") else layer.layer[2].dropout
    dropout.p = 1.0
    dropout.train()


def _property(layer):
    """A subclass that finds its norm in another way."""

    class Own(type(layer)):
        ln_2 = property(lambda self: self._modules["other"])

    if hasattr(layer, "ln_2"):
        layer.other = copy.deepcopy(layer.ln_2)
        layer.other.weight.data *= 2
        layer.__class__ = Own
    else:
        _eps(layer)


def _more_parts(layer):
    """A T5's layer ends with the last of its parts."""
    if hasattr(layer, "layer"):
        layer.layer.append(copy.deepcopy(layer.layer[2]))
        layer.layer[3].layer_norm.weight.data *= 2
    else:
        _eps(layer)


#: What changes a layer, and whether one call still runs it, perhaps of a family.
CHANGES = {
    _optimizer: True,
    _copied: True,
    _other_data: True,
    _new_parameter: True,
    _loaded: True,
    _swapped: True,
    _merged: True,
    _frozen: True,
    _hook: False,
    _pre_hook: False,
    _forward: False,
    _own_class: False,
    _scaling: {"gpt2": True, "t5": False},
    _activation: False,
    _eps: False,
    _parametrized: False,
    _with_bias: {"gpt2": True, "t5": False},
    _adapter: False,
    _sampling: False,
    _more_parts: False,
    _property: False,
}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("family", ["gpt2", "t5"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__.strip("_"))
def test_a_change_is_seen(change, family, mode, calls):
    model, parent = made(family)
    with mode():
        steps(model, prompt())
    assert calls == [True] * 9
    calls.clear()
    for each in (model, parent):
        change(layers_of(each)[1])
    with mode():
        logits = steps(model, prompt())[0]
    runs = CHANGES[change][family] if isinstance(CHANGES[change], dict) else CHANGES[change]
    assert len(calls) == (9 if runs else 6)
    with torch.no_grad():
        hold("logits", logits, parent, lambda each: steps(each, prompt())[0])


@pytest.mark.parametrize("family", ["gpt2", "t5"])
def test_what_hides_a_weight_is_read(family, calls):
    model, _ = made(family)
    with torch.no_grad():
        before = steps(model, prompt())[0]
        norm = _norm(layers_of(model)[1])
        vars(norm)["weight"] = norm.weight.detach() * 2
        calls.clear()
        after = steps(model, prompt())[0]
    assert len(calls) == 6 and (after - before).abs().mean() > 0.01 * before.abs().mean()


PATCHED = {
    "gpt2": (modeling_gpt2.GPT2Attention, modeling_gpt2.GPT2Block, modeling_gpt2.GPT2MLP),
    "t5": (modeling_t5.T5Attention, modeling_t5.T5DenseActDense, modeling_t5.T5LayerNorm),
}


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("decorate", [functools.wraps, lambda original: torch.no_grad()])
@pytest.mark.parametrize(
    "family, kind", [(family, kind) for family, kinds in PATCHED.items() for kind in kinds]
)
def test_a_patched_class_of_transformers_runs(family, kind, decorate, before, calls, monkeypatch):
    model, _ = made(family)
    with torch.no_grad():
        if not before:
            steps(model, prompt())
            calls.clear()
        original, ran = kind.forward, []

        @decorate(original)
        def forward(self, *args, **kwargs):
            ran.append(self)
            return original(self, *args, **kwargs)

        monkeypatch.setattr(kind, "forward", forward)
        steps(model, prompt())
    assert not calls and len(ran) >= 9


@pytest.mark.parametrize("name", ["__call__", "_call_impl"])
def test_a_class_that_runs_its_modules_in_another_way_does_so(name, calls, monkeypatch):
    model, _ = made()
    kind, ran = modeling_gpt2.GPT2MLP, []
    original = getattr(kind, name)

    def noted(self, *args, **kwargs):
        ran.append(self)
        return original(self, *args, **kwargs)

    with torch.no_grad():
        steps(model, prompt())
        calls.clear()
        monkeypatch.setattr(kind, name, noted, raising=False)
        steps(model, prompt())
    assert not calls and len(ran) == 12


@pytest.mark.parametrize("family", ["gpt2", "t5"])
def test_layers_that_checkpoint_in_their_call_are_known(family, calls, checkpointing_call):
    model, _ = made(family)
    with torch.no_grad():
        steps(model, prompt())
    assert calls == [True] * 9


def test_a_model_is_not_kept_alive():
    model, _ = made()
    with torch.no_grad():
        steps(model, prompt())
    alive = [weakref.ref(weight) for weight in layers_of(model).parameters()]
    gc.disable()
    try:
        del model
        assert not any(each() for each in alive)
    finally:
        gc.enable()


def test_a_layer_without_a_plan_is_not_looked_at_for_each_token(calls, monkeypatch):
    model, _ = made(activation_function="relu")
    looked, original = [], _decoder_call._of_gpt2
    monkeypatch.setattr(
        _decoder_call, "_of_gpt2", lambda block: looked.append(block) or original(block)
    )
    with torch.no_grad():
        steps(model, prompt(), count=10)
    assert not calls and len(looked) == 3


def test_copies_have_plans_of_their_own(calls):
    model, _ = made()
    with torch.no_grad():
        steps(model, prompt())
        other = copy.deepcopy(model)
        for parameter in other.parameters():
            parameter.mul_(1.5)
        changed = steps(other, prompt())[0]
        parent = fastplm.restore(copy.deepcopy(other))
        hold("logits", changed, parent, lambda each: steps(each, prompt())[0])
    assert all(calls)


# --- when the modules run -------------------------------------------------------------------------


def _grad(run):
    with torch.enable_grad():
        return run()


def _eager(run):
    with fastplm.use_backend("eager"):
        return run()


def _stock(run):
    with fastplm.use_backend("stock", "linear"):
        return run()


def _autocast(run):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return run()


def _notes(run):
    with record_notes():
        return run()


def _global_hook(run):
    handle = nn.modules.module.register_module_forward_hook(lambda *given: None)
    try:
        return run()
    finally:
        handle.remove()


def _other_attention(run):
    original = ALL_ATTENTION_FUNCTIONS[NAME]
    ALL_ATTENTION_FUNCTIONS.register(NAME, lambda *args, **kwargs: original(*args, **kwargs))
    try:
        return run()
    finally:
        ALL_ATTENTION_FUNCTIONS.register(NAME, original)


def _traced_modules(run):
    original = nn.Module.__call__
    nn.Module.__call__ = lambda self, *args, **kwargs: original(self, *args, **kwargs)
    try:
        return run()
    finally:
        nn.Module.__call__ = original


def _decisions(run):
    with record_decisions():
        return run()


@pytest.mark.parametrize("family", ["gpt2", "t5"])
@pytest.mark.parametrize(
    "way",
    [
        _grad,
        _eager,
        _stock,
        _autocast,
        _notes,
        _global_hook,
        _other_attention,
        _traced_modules,
        _decisions,
    ],
)
def test_the_modules_run_themselves(way, family, calls):
    model, _ = made(family)
    with torch.no_grad():
        way(functools.partial(steps, model, prompt()))
        assert not calls
        steps(model, prompt())
    assert all(calls) and len(calls) == 9


@pytest.mark.parametrize("family", ["gpt2", "t5"])
def test_attention_weights_are_those_of_the_modules(family, calls):
    model, _ = made(family)
    out = model.generate(
        **prompt(), max_new_tokens=3, pad_token_id=0, output_attentions=True,
        return_dict_in_generate=True,
    )  # fmt: skip
    found = out.attentions if family == "gpt2" else out.decoder_attentions
    assert len(found) == 3 and found[1][0].shape[1] == 4 and not calls


@pytest.mark.parametrize("family", ["gpt2", "t5"])
def test_hidden_states_are_those_of_the_layers(family, calls):
    model, parent = made(family)
    given = dict(max_new_tokens=3, pad_token_id=0, output_hidden_states=True)
    outputs = [each.generate(**prompt(), **given, return_dict_in_generate=True)
               for each in (model, parent)]  # fmt: skip
    name = "hidden_states" if family == "gpt2" else "decoder_hidden_states"
    for ours, theirs in zip(*(out[name] for out in outputs), strict=True):
        assert len(ours) == len(theirs) == 4
        for one, other in zip(ours, theirs, strict=True):
            seen = slice(1 - int(family == "gpt2"), None)
            torch.testing.assert_close(one[::2, seen], other[::2, seen])


def test_other_caches_are_the_modules(calls):
    model, parent = made()
    given = prompt((0, 0, 0))
    tokens = torch.tensor([[3], [4], [5]])
    logits = []
    for each in (model, parent):
        cache = StaticCache(config=each.config, max_cache_len=20)
        with torch.no_grad():
            each(**given, past_key_values=cache)
            out = each(tokens, past_key_values=cache, position_ids=torch.full((3, 1), 7))
        logits.append(out.logits)
    torch.testing.assert_close(*logits)
    assert not calls


@pytest.mark.parametrize("of", ["class", "layer", "cache", "all"])
def test_a_cache_with_an_update_of_its_own_is_asked(of, calls, monkeypatch):
    model, _ = made()
    given, asked, original = prompt((0, 0, 0)), [], DynamicLayer.update

    def update(self, keys, values, *others):
        asked.append(keys.shape)
        return original(self, keys, values, *others[:0])

    class Noted(DynamicLayer):
        pass

    with torch.no_grad():
        cache = model(**given).past_key_values
        if of == "class":
            Noted.update = update
            cache.layers[1].__class__ = Noted
        elif of == "layer":
            cache.layers[1].update = functools.partial(update, cache.layers[1])
        elif of == "cache":
            cache.update = lambda keys, values, layer: update(cache.layers[layer], keys, values)
        else:
            monkeypatch.setattr(DynamicLayer, "update", update)
        model(torch.tensor([[3], [4], [5]]), past_key_values=cache)
    count = 1 if of in ("class", "layer") else 3
    assert asked == [(3, 4, 1, 12)] * count and calls == [True] * (3 - count)


def test_it_runs_where_all_products_are_faster_by_the_rules(calls, measured):
    model, _ = made()
    for least, count in ((1, 9), (4, 0)):  # rows
        measured.ours = lambda op, form, dtype, sizes, least=least: sizes[0] >= least
        calls.clear()
        with fastplm.use_backend("auto", "linear"), torch.no_grad():
            steps(model, prompt())
        assert len(calls) == count


@pytest.mark.parametrize("family", ["gpt2", "t5"])
def test_the_operator_refuses_what_does_not_fit(family):
    model, _ = made(family)
    made_by = _decoder_call._of_gpt2 if family == "gpt2" else _decoder_call._of_t5
    plan = made_by(layers_of(model)[0])
    head = plan.head_size

    def run(x=(2, 1, 48), keys=(2, 4, 5, head), mask=None, bias=None, **other):
        states = other.get("states", () if plan.gpt2 else [(2, 4, 3, head)] * 2)
        return torch.ops.fastplm_C.decoder_layer(
            torch.randn(x),
            other.get("weights", plan.weights),
            torch.randn(keys),
            torch.randn(other.get("values", keys)),
            None if mask is None else torch.ones(mask, dtype=torch.bool),
            None if bias is None else torch.randn(bias),
            [torch.randn(each) for each in states],
            None,
            *(other.get("size", head), plan.eps, plan.scale),
            *(other.get("act", plan.activation), plan.gpt2, other.get("int8", False)),
        )

    assert [tuple(each.shape) for each in run()] == [(2, 1, 48), *[(2, 4, 6, head)] * 2]
    assert run(mask=(2, 1, 1, 6)) and run(mask=(1, 1, 1, 0)) and run(bias=(1, 4, 1, 6))
    wrong = (
        dict(x=(2, 2, 48)), dict(x=(2, 48)), dict(x=(0, 1, 48)), dict(x=(2, 1, 47)),
        dict(keys=(3, 4, 5, head)), dict(keys=(2, 3, 5, head)), dict(keys=(2, 4, 0, head)),
        dict(keys=(2, 4, head)), dict(values=(2, 4, 6, head)), dict(values=(2, 4, 5, head + 1)),
        dict(mask=(1, 1, 1, 6)), dict(act=-1), dict(act=3), dict(int8=True),
        dict(mask=(2, 1, 1, 5)), dict(mask=(3, 1, 1, 6)), dict(mask=(2, 6)), dict(size=0),
        dict(mask=(2, 4, 1, 6)), dict(bias=(2, 4, 1, 6)), dict(bias=(1, 4, 1, 5)),
        dict(bias=(4, 6)), dict(size=-head), dict(size=head + 1), dict(weights=plan.weights[:-1]),
        dict(weights=[*plan.weights[1:], plan.weights[0]]), dict(weights=[]),
        dict(weights=[*plan.weights[:-1], torch.randn(3)]),
        dict(weights=[each.double() for each in plan.weights]),
        dict(states=[(2, 4, 3, head)] if plan.gpt2 else ()),
        dict(states=[(2, 4, 3, head), (2, 4, 2, head)]),
        dict(states=[(1, 4, 3, head)] * 2),
    )  # fmt: skip
    for each in wrong:
        assert not run(**each), each
