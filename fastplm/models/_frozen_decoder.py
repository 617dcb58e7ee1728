"""A frozen decoder's layer in one call of csrc/, for the next token of each sequence on a CPU.

With one sequence, Python and PyTorch's calls between the products of such a step take as long as
the products. ``fastplm_C::decoder_layer`` reads weights and caches where they are, as they are at
that moment. The modules themselves are its specification. They run wherever the cache or an
argument is not as it is known here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache, DynamicLayer, EncoderDecoderCache

from fastplm import _extension
from fastplm._backends import is_recorded, requested, takes_notes
from fastplm._rules import ALONE, aspect, slower
from fastplm.models._base import CACHE, Conv1D
from fastplm.models._layer import activation_of
from fastplm.models._watch import LINEAR, Facts, Plans, facts_of, plan_in, require, tensors, thaw
from fastplm.models.gpt2 import GPT2Block
from fastplm.models.t5 import T5Block
from fastplm.nn import Dropout, LinearInt8

_LACKS = _extension.lacks("decoder_layer", "CPU")
#: What csrc/layers/decoder.cpp calls activations.
_ACTIVATIONS = ("relu", "none", "tanh")
_DROPOUT = (nn.Dropout, Dropout)


class _Plan(NamedTuple):
    """What ``decoder_layer`` in csrc/layers/decoder.cpp gets of a layer."""

    facts: Facts
    ops: tuple[str, ...]  # whose backends decide, too
    weights: list[Tensor]
    forms: list[Any]  # their dtypes and shapes
    products: tuple[tuple[int, ...], ...]  # their outputs and inputs
    head_size: int
    eps: float
    scale: float
    activation: int
    place: int  # of the layer in a cache
    gpt2: bool
    int8: bool


def plans(module: nn.Module) -> Plans:
    """The plan of a layer, and how it runs."""
    if type(module) is GPT2Block:
        yield _plan_of(module, crossed=False), (gpt2_layer_call,)
    if type(module) is T5Block and module.is_decoder:
        yield _plan_of(module, crossed=True), (t5_layer_call,)


def _plan_of(block: Any, crossed: bool) -> _Plan:
    require(_LACKS is None, _LACKS or "")
    layer = block._parts_up_to(None, crossed)
    require(layer is not None, "a module of it is of another class")
    attention, feed = layer.attentions[0], layer.feed_forward
    module, end, norm = attention.module, feed.outer, layer.norm
    facts, form = facts_of(block, module.config), activation_of(feed.activation)
    biased, weights, products, epsilons = end.rms is None, [], [], set()

    def add(norm: Any, linears: Iterable[Any], dropout: Any) -> None:
        _require_class(norm, end.rms or nn.LayerNorm)
        _require_class(dropout, *_DROPOUT)
        weights.extend(tensors(norm, biased))
        epsilons.add(norm.eps if biased else norm.variance_epsilon)
        for one in linears:
            _require_class(one, Conv1D, *LINEAR)
            products.append(one)
            weights.extend(tensors(one, biased))

    for each in layer.attentions:
        alike = each.module.config is module.config and each.module.scaling == module.scaling
        alike = alike and each.module.layer_idx == module.layer_idx
        require(alike and each.head_size == attention.head_size, "its attentions differ")
        # Keys and values of the encoder's states are in the cache.
        read = each.projections if each is attention else each.projections[:1]
        add(norm, (*read, each.join.dense), each.join.dropout)
        norm = each.join.norm
    up = (feed.inner,) if feed.factor is None else (feed.inner, feed.factor)
    add(norm, (*up, end.dense), end.dropout)
    kinds = {type(each) is LinearInt8 for each in products}
    require(len(kinds) == 1, "some of its products are in 8 bits")
    require(form in _ACTIVATIONS, "its activation is a {}", type(feed.activation).__name__)
    require(len(epsilons) == 1 and type(module.layer_idx) is int, "its numbers")
    shapes = {tuple(each.shape) for each in weights if each.dim() == 2}
    ops, int8 = ("attention", "linear", "gelu", *(() if biased else ("rms_norm",))), kinds.pop()
    return _Plan(
        *(facts, (*ops, "linear_int8") if int8 else ops, weights, _forms_of(weights)),
        tuple(shape[::-1] if biased else shape for shape in shapes),
        *(attention.head_size, epsilons.pop(), module.scaling, _ACTIVATIONS.index(form)),
        *(module.layer_idx, biased, int8),
    )


def _require_class(module: Any, *kinds: type) -> None:
    require(type(module) in kinds, "it has a {}", type(module).__name__)


def _forms_of(weights: list[Tensor]) -> list[Any]:
    return [(each.dtype, each.shape, each.device) for each in weights]


# --- the calls ------------------------------------------------------------------------------------


def gpt2_layer_call(
    block: nn.Module,
    hidden_states: Any,
    past_key_values: Any = None,
    attention_mask: Any = None,
    encoder_hidden_states: Any = None,
    **others: Any,
) -> Tensor | None:
    """The forward of a ``GPT2Block`` for the next tokens, [B, 1, E], if one call can run it."""
    plan = plan_in(block)
    if encoder_hidden_states is not None or not _may_call(plan, hidden_states, others):
        return None
    layer = _layer_of(past_key_values, plan.place)
    return _called(block, plan, hidden_states, layer, attention_mask)


def t5_layer_call(
    block: Any,
    hidden_states: Any,
    attention_mask: Any = None,
    position_bias: Any = None,
    encoder_hidden_states: Any = None,
    encoder_attention_mask: Any = None,
    encoder_decoder_position_bias: Any = None,
    **others: Any,
) -> tuple[Tensor, Tensor, Any] | None:
    """The same of a ``T5Block`` of a decoder. ``position_bias`` is [1, H, 1, T + 1], or None in the
    layer that has its table."""
    plan, bias, past_key_values = plan_in(block), position_bias, others.pop(CACHE, None)
    if type(past_key_values) is not EncoderDecoderCache or encoder_hidden_states is None:
        return None
    if not (bias is None or type(bias) is Tensor and bias.dim() == 4):
        return None
    if not _may_call(plan, hidden_states, others):
        return None
    layer = _layer_of(past_key_values.self_attention_cache, plan.place)
    states = _layer_of(past_key_values.cross_attention_cache, plan.place)
    if layer is None or states is None or not past_key_values.is_updated.get(plan.place):
        return None
    if bias is None:
        first, seen = block.layer[0].SelfAttention, layer.keys.shape[2]
        if not first.has_relative_attention_bias:
            return None
        device = hidden_states.device
        bias = first.compute_bias(1, seen + 1, device=device, past_seen_tokens=seen)
    both = [states.keys, states.values]
    given = hidden_states, layer, attention_mask, bias, both, encoder_attention_mask
    out = _called(block, plan, *given)
    return None if out is None else (out, bias, encoder_decoder_position_bias)


#: Arguments of a layer that change nothing in it.
_IGNORED = frozenset(("use_cache", "position_ids", "cache_position"))


def _may_call(plan: _Plan | None, hidden: Any, others: dict[str, Any]) -> bool:
    """Whether these are the next tokens, and no gradient or choice of a backend is in the way."""
    return (
        plan is not None
        and type(hidden) is Tensor
        and hidden.dim() == 3
        and hidden.shape[1] == 1
        and hidden.dtype is torch.float32
        and hidden.is_contiguous()
        and not any(value is not None for name, value in others.items() if name not in _IGNORED)
        and all(requested(op) in ("auto", "cpp") for op in plan.ops)
        and not (takes_notes() or is_recorded())
        and plan.facts.may_call((hidden,))
        and _updates() == _UPDATES
        and (plan.int8 or _is_faster(plan, hidden.shape[0]))
    )


def _is_faster(plan: _Plan, rows: int) -> bool:
    if requested("linear") == "cpp":
        return True
    form = "conv1d" if plan.gpt2 else "linear"
    form += ALONE if torch.get_num_threads() == 1 else ""
    return all(
        slower("linear", (form, torch.float32, (rows, n * k, aspect(n, k)))) is None
        for n, k in plan.products
    )


def _layer_of(cache: Any, place: int) -> Any:
    """A layer of a cache that grows with each token, and has begun to."""
    if type(cache) is not DynamicCache or cache.offloading or place >= len(cache.layers):
        return None
    layer = cache.layers[place]
    known = type(layer) is DynamicLayer and layer.is_initialized and layer.keys.is_cpu
    if not known or any("update" in vars(each) for each in (cache, layer)):
        return None
    return layer


def _updates() -> tuple[Any, Any]:
    return DynamicCache.update, DynamicLayer.update


_UPDATES = _updates()


def _called(
    block: nn.Module,
    plan: _Plan,
    hidden: Tensor,
    layer: Any,
    mask: Any,
    bias: Tensor | None = None,
    states: Sequence[Tensor] = (),
    states_mask: Any = None,
) -> Tensor | None:
    """The layer's output; keys and values of the new tokens are in the cache's ``layer``."""
    if layer is None or not (_is_of_keys(mask) and _is_of_keys(states_mask)):
        return None
    results = torch.ops.fastplm_C.decoder_layer.default(
        *(hidden, plan.weights, layer.keys, layer.values, mask, bias, states, states_mask),
        *(plan.head_size, plan.eps, plan.scale, plan.activation, plan.gpt2, plan.int8),
    )
    if not results:  # perhaps it is the cache or a mask that does not fit
        if _forms_of(plan.weights) != plan.forms:
            thaw(block, "a weight has another dtype or shape")
        return None
    out, layer.keys, layer.values = results
    return out


def _is_of_keys(mask: Any) -> bool:
    """Whether it masks keys, or none; see ``fastplm_mask``."""
    if mask is None:
        return True
    return type(mask) is Tensor and mask.dtype is torch.bool and mask.dim() == 4
