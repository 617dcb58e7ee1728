"""A frozen decoder's layer in one call of csrc/ for the next tokens: results, and what is left."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from transformers.cache_utils import DynamicCache, DynamicLayer, StaticCache

import fastplm
from fastplm.models._watch import plan_in
from fastplm.testing import (
    GRADIENT_FACTOR,
    ReversedReductions,
    ShuffledReductions,
    check_error,
    rerounded,
)

from .frozen import hold, made, prompt, step, steps

pytestmark = pytest.mark.usefixtures("of_csrc")
FAMILIES = {
    "gpt2": ("gpt2", {}),
    "gpt2 with erf": ("gpt2", dict(activation_function="gelu")),
    "gpt2 scaled by layers": ("gpt2", dict(scale_attn_by_inverse_layer_idx=True)),
    "t5": ("t5", {}),
    "t5 gated": ("t5", dict(feed_forward_proj="gated-gelu")),
}


def of_family(name, **others):
    family, changed = FAMILIES[name]
    return made(family, **changed, **others)


def layers_of(model):
    return model.transformer.h if hasattr(model, "transformer") else model.decoder.block


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("padding", [(0,), (0, 3, 0), (2, 0, 1, 0, 6)], ids=len)
def test_its_error_is_that_of_the_parent(family, padding, calls):
    model, parent = of_family(family)
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
        assert len(calls) == 9 and {*calls} == {"decoder_layer"}
        for which in ("keys", "values"):
            run = functools.partial(rows, which)
            hold(which, run(model), copy.deepcopy(parent), run)
        theirs = steps(parent, given)[1]
        hold("logits", logits, parent, lambda each: steps(each, given)[0])
    layers = [getattr(each, "self_attention_cache", each).layers for each in (cache, theirs)]
    for one, other in zip(*layers, strict=True):
        assert one.keys.shape == other.keys.shape and one.keys.stride() == other.keys.stride()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_error_in_8_bits(family, calls):
    """A rounding more or less moves a number to another of 255 steps, so as in ``test_quantize``
    the budget is that of gradients."""
    model, parent = map(fastplm.quantize, of_family(family, freeze=False))
    apart = copy.deepcopy(model)
    fastplm.freeze(model)

    def run(each):
        return steps(each, prompt())[0]

    with torch.no_grad():
        out = run(model)
        assert len(calls) == 9 and {*calls} == {"decoder_layer"}
        measures = [run(parent)]
        for mode in (ReversedReductions(), ShuffledReductions(0), ShuffledReductions(1)):
            with mode:
                measures.append(run(parent))
        measures += [run(other) for each in (apart, parent) for other in rerounded(each)]
        check_error("logits", out, run(parent.double()), measures, GRADIENT_FACTOR)
    assert len(calls) == 9


@pytest.mark.parametrize("family", ["gpt2", "t5"])
def test_layers_of_both_kinds_run_themselves(family, calls):
    model, _ = of_family(family, freeze=False)
    fastplm.quantize(model, skip=["c_proj"] if family == "gpt2" else ["wo"])
    fastplm.freeze(model)
    assert all(plan_in(layer) is None for layer in layers_of(model))
    with torch.no_grad():
        steps(model, prompt())
    assert not calls


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("inner", [70, 48])  # a square weight fits the wrong way round, too
def test_whole_sequences_without_a_cache_are_the_layers(family, inner, calls):
    size = {"n_inner": inner} if family.startswith("gpt2") else {"d_ff": inner}
    name, changed = FAMILIES[family]
    model, parent = made(name, **changed, **size)
    given = {**prompt((0, 0)), "labels": prompt((0, 0))["input_ids"]}

    def run(each):
        return each(**given).logits

    with torch.no_grad():
        hold("logits", run(model), parent, run)
    assert not calls


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"do_sample": True}], ids=str)
def test_what_is_generated(family, options, calls):
    model, parent = of_family(family)
    sequences = []
    for each in (model, parent):
        torch.manual_seed(5)
        given = {**prompt(), "max_new_tokens": 9, "pad_token_id": 0, **options}
        sequences.append(each.generate(**given))
    assert torch.equal(*sequences) and calls and {*calls} == {"decoder_layer"}


@pytest.mark.parametrize("family", ["gpt2", "t5"])
def test_the_bits_do_not_depend_on_threads(family, calls):
    model, _ = of_family(family)
    outputs, before = [], torch.get_num_threads()
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            with torch.no_grad():
                outputs.append(steps(model, prompt(length=150))[0])
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(outputs[0], other) for other in outputs[1:]) and {*calls} == {
        "decoder_layer"
    }


@pytest.mark.parametrize("family", ["gpt2", "t5"])
def test_nan_stays_in_its_sequence(family, calls):
    model, _ = of_family(family)
    model.get_input_embeddings().weight.data[2] = float("nan")
    given = prompt((0, 0))
    given["input_ids"][given["input_ids"] == 2] = 3
    with torch.no_grad():
        out = model(**given, use_cache=True, **_first(model))
        token, mask = torch.tensor([[2], [5]]), torch.ones(2, 8, dtype=torch.long)
        logits = step(model, given, token, out.past_key_values, mask).logits
    assert (
        logits[0].isnan().all()
        and logits[1].isfinite()[:, 3:].all()
        and {*calls} == {"decoder_layer"}
        and calls
    )


@pytest.mark.parametrize("family", ["gpt2", "t5"])
def test_nan_in_a_score_is_in_the_result(family, calls):
    model, parent = of_family(family)
    given, token = prompt((0, 0)), torch.tensor([[3], [5]])
    with torch.no_grad():
        for each in (model, parent):
            cache = each(**given, use_cache=True, **_first(each)).past_key_values
            getattr(cache, "self_attention_cache", cache).layers[1].keys[0, 0, 0, 0] = float("nan")
            mask = torch.ones(2, 8, dtype=torch.long)
            logits = step(each, given, token, cache, mask).logits
            assert logits[0].isnan().any() and logits[1].isfinite().all()
    assert calls == ["decoder_layer"] * 3


def _first(model):
    """The first token of a decoder."""
    if not model.config.is_encoder_decoder:
        return {}
    return {"decoder_input_ids": torch.tensor([[3], [4]])}


def test_a_token_that_sees_no_key_has_no_attention():
    model, _ = made("gpt2")
    layer = layers_of(model)[0]
    cache = DynamicCache(config=model.config)
    cache.update(torch.randn(1, 4, 5, 12), torch.randn(1, 4, 5, 12), 0)
    x, mask = torch.randn(1, 1, 48), torch.zeros(1, 1, 1, 6, dtype=torch.bool)
    with torch.no_grad():
        out = layer(x, cache, mask)
        alone = x + layer.attn.c_proj.bias
        expected = alone + layer.mlp(layer.ln_2(alone))
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("family", ["gpt2", "t5"])
def test_attention_weights_are_those_of_the_modules(family, calls):
    model, _ = of_family(family)
    out = model.generate(
        **prompt(), max_new_tokens=3, pad_token_id=0, output_attentions=True,
        return_dict_in_generate=True,
    )  # fmt: skip
    found = out.attentions if family == "gpt2" else out.decoder_attentions
    assert len(found) == 3 and found[1][0].shape[1] == 4 and not calls


@pytest.mark.parametrize("family", ["gpt2", "t5"])
def test_hidden_states_are_those_of_the_layers(family, calls):
    model, parent = of_family(family)
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
    model, parent = made("gpt2")
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
    model, _ = made("gpt2")
    given, asked, original = prompt((0, 0, 0)), [], DynamicLayer.update

    def update(self, keys, values, *others, **more):
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
            cache.update = lambda keys, values, at, **_: update(cache.layers[at], keys, values)
        else:
            monkeypatch.setattr(DynamicLayer, "update", update)
        model(torch.tensor([[3], [4], [5]]), past_key_values=cache)
    count = 1 if of in ("class", "layer") else 3
    assert asked == [(3, 4, 1, 12)] * count and calls == ["decoder_layer"] * (3 - count)


@pytest.mark.parametrize("mask", [(3, 4, 1, 8), (2, 1, 1, 8)], ids=str)
def test_a_mask_or_a_cache_that_does_not_fit_thaws_nothing(mask, calls):
    model, parent = of_family("gpt2")
    token, mask = torch.tensor([[3], [4], [5]]), torch.ones(mask, dtype=torch.bool)

    def run(each):
        cache = DynamicCache()
        each(**prompt(), past_key_values=cache)
        return each(token, past_key_values=cache, attention_mask=mask).logits

    with torch.no_grad():
        if mask.shape[0] == 3:
            hold("logits", run(model), parent, run)
        else:
            with pytest.raises((ValueError, RuntimeError)):
                run(model)
        assert all(plan_in(layer) is not None for layer in layers_of(model))


def test_a_state_that_is_not_contiguous_thaws_nothing(calls):
    model, parent = of_family("t5")
    given = torch.randn(2, 5, 48)[:, -1:]

    def run(each):
        states = each.encoder(**prompt((0, 0)))
        cache, logits = None, []
        for _ in range(2):
            out = each(
                encoder_outputs=states, decoder_inputs_embeds=given.to(each.dtype),
                past_key_values=cache, use_cache=True,
            )  # fmt: skip
            cache = out.past_key_values
            logits.append(out.logits)
        return torch.cat(logits, 1)

    with torch.no_grad():
        hold("logits", run(model), parent, run)
    assert all(plan_in(layer) is not None for layer in layers_of(model))


def test_it_runs_where_the_rules_say_that_all_products_are_faster(calls, measured):
    model, _ = made("gpt2")
    for least, count in ((1, 9), (4, 0)):  # rows
        measured.ours = lambda op, form, dtype, sizes, least=least: (
            op == "linear" and sizes[0] >= least
        )
        calls.clear()
        with fastplm.use_backend("auto", "linear"), torch.no_grad():
            steps(model, prompt())
        assert len(calls) == count


@pytest.mark.parametrize("family", ["gpt2", "t5"])
def test_the_operator_refuses_what_does_not_fit(family):
    model, _ = of_family(family)
    plan = plan_in(layers_of(model)[0])
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
