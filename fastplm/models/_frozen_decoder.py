"""A frozen decoder's layer in one call of csrc/, for the next token of each sequence on a CPU.

With one sequence, Python and PyTorch's calls between the products of such a step take as long as
the products. ``fastplm_C::decoder_layer`` reads weights and caches where they are, as they are at
that moment. The modules themselves are its specification. They run wherever the cache or an
argument is not as it is known here.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache, DynamicLayer, EncoderDecoderCache
from transformers.models.gpt2 import modeling_gpt2
from transformers.models.t5 import modeling_t5

from fastplm import _extension
from fastplm._backends import is_recorded, requested, takes_notes
from fastplm._rules import ALONE, aspect, slower
from fastplm.models._base import Conv1D
from fastplm.models._watch import (
    LINEAR,
    Facts,
    Plans,
    child,
    facts_of,
    gelu_of,
    norm,
    plan_in,
    require,
    tensor,
    tensors,
    thaw,
)
from fastplm.models.gpt2 import GPT2Attention, GPT2Block
from fastplm.models.t5 import (
    T5Attention,
    T5Block,
    T5DenseActDense,
    T5DenseGatedActDense,
    T5LayerNorm,
)
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
        yield _plan_of_gpt2(module), (gpt2_layer_call,)
    if type(module) is T5Block and module.is_decoder:
        yield _plan_of_t5(module), (t5_layer_call,)


def _plan_of_gpt2(block: Any) -> _Plan:
    own = block.attn
    facts = facts_of(block, own.config)
    child(block, "attn", GPT2Attention)
    inner = child(block, "mlp", modeling_gpt2.GPT2MLP)
    require(not own.is_cross_attention, "its attention is to an encoder")
    require(own.split_size == own.num_heads * own.head_dim, "its heads are not of one size")
    weights: list[Tensor] = []
    eps = {norm(block, "ln_1", weights)}
    for name in ("c_attn", "c_proj"):
        weights += tensors(child(own, name, Conv1D, LinearInt8))
    eps.add(norm(block, "ln_2", weights))
    for name in ("c_fc", "c_proj"):
        weights += tensors(child(inner, name, Conv1D, LinearInt8))
    for parent, name in ((own, "attn_dropout"), (own, "resid_dropout"), (inner, "dropout")):
        child(parent, name, *_DROPOUT)
    form = gelu_of(inner.act)
    return _planned(block, facts, weights, eps, own.head_dim, own.scaling, form, own.layer_idx)


def _plan_of_t5(block: Any) -> _Plan:
    layers = child(block, "layer", nn.ModuleList)
    require(len(layers) == 3, "it has another number of parts")
    own = layers[0].SelfAttention
    facts = facts_of(block, own.config)
    weights: list[Tensor] = []
    eps, places = set(), set()

    def add_norm(part: Any) -> None:
        found = child(part, "layer_norm", T5LayerNorm)
        weights.append(tensor(found, found._parameters, "weight"))
        eps.add(found.variance_epsilon)

    kinds = (modeling_t5.T5LayerSelfAttention, modeling_t5.T5LayerCrossAttention)
    names = (("SelfAttention", "qkvo"), ("EncDecAttention", "qo"))
    for index, (kind, (name, products)) in enumerate(zip(kinds, names, strict=True)):
        part = child(layers, str(index), kind)
        add_norm(part)
        attention = child(part, name, T5Attention)
        require(attention.config is own.config, "a layer has another configuration")
        size = attention.n_heads * attention.key_value_proj_dim
        require(attention.inner_dim == size, "its heads are not of one size")
        require(attention.scaling == own.scaling, "its attentions are scaled apart")
        for each in products:  # keys and values of the encoder's states are in the cache
            weights += tensors(child(attention, each, *LINEAR), biased=False)
        child(part, "dropout", *_DROPOUT)
        places.add(attention.layer_idx)
    part = child(layers, "2", modeling_t5.T5LayerFF)
    add_norm(part)
    inner = child(part, "DenseReluDense", T5DenseActDense, T5DenseGatedActDense)
    gated = type(inner) is T5DenseGatedActDense
    for name in ("wi_0", "wi_1", "wo") if gated else ("wi", "wo"):
        weights += tensors(child(inner, name, *LINEAR), biased=False)
    for parent in (inner, part):
        child(parent, "dropout", *_DROPOUT)
    form = "relu" if type(inner.act) is nn.ReLU else gelu_of(inner.act)
    require(len(places) == 1, "its layer_idx")
    numbers = own.key_value_proj_dim, own.scaling, form, own.layer_idx
    return _planned(block, facts, weights, eps, *numbers)


def _planned(
    block: nn.Module,
    facts: Facts,
    weights: list[Tensor],
    eps: set[float],
    head_size: int,
    scale: float,
    form: str,
    place: Any,
) -> _Plan:
    require(_LACKS is None, _LACKS or "")
    require(len(eps) == 1 and type(place) is int, "its numbers")
    gpt2 = type(block) is GPT2Block
    products = [each for each in block.modules() if type(each) in (Conv1D, *LINEAR)]
    kinds = {type(each) is LinearInt8 for each in products}
    require(len(kinds) == 1, "some of its products are in 8 bits")
    shapes = {tuple(each.shape) for each in weights if each.dim() == 2}
    ops = ("attention", "linear", "gelu", *(() if gpt2 else ("rms_norm",)))
    int8 = kinds.pop()
    if int8:
        ops += ("linear_int8",)
    turned = tuple(shape[::-1] if gpt2 else shape for shape in shapes)
    activation = _ACTIVATIONS.index(form)
    return _Plan(
        *(facts, ops, weights, _forms_of(weights), turned, head_size, eps.pop(), scale),
        *(activation, place, gpt2, int8),
    )


def _forms_of(weights: list[Tensor]) -> list[Any]:
    return [(each.dtype, each.shape, each.device) for each in weights]


# --- the calls ------------------------------------------------------------------------------------


def _may_call(plan: _Plan | None, hidden: Any, mask: Any, others: dict[str, Any]) -> bool:
    """Whether these are the next tokens, and no gradient or choice of a backend is in the way."""
    return (
        plan is not None
        and type(hidden) is Tensor
        and hidden.dim() == 3
        and hidden.shape[1] == 1
        and hidden.dtype is torch.float32
        and hidden.is_contiguous()
        and _is_keys(mask)
        and not any(value is not None for name, value in others.items() if name not in _IGNORED)
        and all(requested(op) in ("auto", "cpp") for op in plan.ops)
        and not (takes_notes() or is_recorded())
        and plan.facts.may_call((hidden,))
        and _updates() == _UPDATES
        and (plan.int8 or _is_faster(plan, hidden.shape[0]))
    )


def _is_keys(mask: Any) -> bool:
    """Whether it masks keys, or none; see ``fastplm_mask``."""
    if mask is None:
        return True
    return type(mask) is Tensor and mask.dtype is torch.bool and mask.dim() == 4


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


#: Arguments of a layer that change nothing in it.
_IGNORED = frozenset(("use_cache", "position_ids", "cache_position"))


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
    if type(past_key_values) is not DynamicCache or encoder_hidden_states is not None:
        return None
    if not _may_call(plan, hidden_states, attention_mask, others):
        return None
    layer = _layer_of(past_key_values, plan.place)
    if layer is None:
        return None
    return _called(block, plan, hidden_states, layer, attention_mask, None, [], None)


def t5_layer_call(
    block: Any,
    hidden_states: Any,
    attention_mask: Any = None,
    position_bias: Any = None,
    encoder_hidden_states: Any = None,
    encoder_attention_mask: Any = None,
    encoder_decoder_position_bias: Any = None,
    past_key_values: Any = None,
    **others: Any,
) -> tuple[Tensor, Tensor, Any] | None:
    """The same of a ``T5Block`` of a decoder. ``position_bias`` is [1, H, 1, T + 1], or None in the
    layer that has its table."""
    plan, bias = plan_in(block), position_bias
    if type(past_key_values) is not EncoderDecoderCache or encoder_hidden_states is None:
        return None
    if not (bias is None or type(bias) is Tensor and bias.dim() == 4):
        return None
    if not _is_keys(encoder_attention_mask):
        return None
    if not _may_call(plan, hidden_states, attention_mask, others):
        return None
    layer = _layer_of(past_key_values.self_attention_cache, plan.place)
    states = _layer_of(past_key_values.cross_attention_cache, plan.place)
    if layer is None or states is None or not past_key_values.is_updated.get(plan.place):
        return None
    if bias is None:
        own, seen = block.layer[0].SelfAttention, layer.keys.shape[2]
        if not own.has_relative_attention_bias:
            return None
        device = hidden_states.device
        bias = own.compute_bias(1, seen + 1, device=device, past_seen_tokens=seen)
    given = hidden_states, layer, attention_mask, bias, [states.keys, states.values]
    out = _called(block, plan, *given, encoder_attention_mask)
    return None if out is None else (out, bias, encoder_decoder_position_bias)


def _called(
    block: nn.Module,
    plan: _Plan,
    hidden: Tensor,
    layer: Any,
    mask: Tensor | None,
    bias: Tensor | None,
    states: list[Tensor],
    states_mask: Tensor | None,
) -> Tensor | None:
    """The layer's output; keys and values of the new tokens are in the cache's ``layer``."""
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
