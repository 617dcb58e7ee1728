"""A decoder's layer in one call of csrc/, for the next token of each sequence on a CPU.

With one sequence, Python and PyTorch's calls between the products of such a step take as long as
the products. ``fastplm_C::decoder_layer`` reads weights and caches where they are, as they are at
that moment. The modules themselves are its specification. They run wherever one of them, the cache
or an argument is not as it is known here.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache, DynamicLayer, EncoderDecoderCache

from fastplm import _extension
from fastplm._backends import is_recorded, requested, takes_notes
from fastplm._rules import ALONE, aspect, slower
from fastplm.hf import NAME
from fastplm.models._base import DROP_INS, Conv1D
from fastplm.models._plan import (
    BUILT,
    KEY,
    METHODS,
    Known,
    Planner,
    Unlike,
    forget,
    is_intercepted,
    kept_by,
)
from fastplm.nn import Dropout, Linear, LinearInt8

_BUILT = BUILT and _extension.lacks("decoder_layer", "CPU") is None
#: What csrc/layers/decoder.cpp calls activations.
_RELU, _GELU, _GELU_TANH = range(3)


class _Plan(NamedTuple):
    """What a layer is, so that each call can see whether it still is so."""

    kind: type
    known: Known
    order: dict | None  # the parts of a T5's layer, whose names are _PARTS
    weights: list[Tensor]  # see csrc/layers/decoder.cpp
    products: tuple[tuple[int, ...], ...]  # their outputs and inputs
    head_size: int
    eps: float
    scale: float
    activation: int
    place: int  # of the layer in a cache
    gpt2: bool
    int8: bool

    def holds(self, block: nn.Module) -> bool:
        return (
            type(block) is self.kind
            and self.known.holds(vars(block))
            and (self.order is None or tuple(self.order) == _PARTS)
        )


_PARTS = ("0", "1", "2")
_PRODUCTS = (Conv1D, Linear, LinearInt8)


class _Planner(Planner):
    """Collects the plan of a decoder's layer."""

    def dropout(self, parent: nn.Module, name: str) -> None:
        self.child(parent, name, nn.Dropout, Dropout)

    def without_bias(self, parent: nn.Module, name: str) -> None:
        """A linear layer that has no bias."""
        module = self.child(parent, name, Linear, LinearInt8)
        self.weight(module)
        self.need(module._parameters["bias"] is None and "bias" not in vars(module), "bias")
        self.facts.append((module._parameters, "bias", None))

    def norm(self, parent: nn.Module, name: str) -> float:
        """T5's; its epsilon."""
        module = self.child(parent, name)
        self.need(type(module).__name__ == "T5LayerNorm", name)
        self.tensor(module, module._parameters, "weight", nn.Parameter)
        return module.variance_epsilon

    def part(self, parent: nn.Module, name: str, kind: str) -> Any:
        """A module of this name of Transformers, or of its drop-in class."""
        found = type(parent._modules.get(name))
        self.need(found.__name__ == kind, name)
        self.need(found.__module__.startswith(("transformers.models.", "fastplm.models.")), name)
        return self.child(parent, name, found)

    def attention(self, module: Any) -> None:
        config = module.config
        self.need(config is self.config and config._attn_implementation == NAME, "config")
        self.need(not (config.output_attentions or config.output_hidden_states), "config")

    def planned(self, block: nn.Module, parts: Any = None, **numbers: Any) -> _Plan:
        """The plan of a layer, which may have a list of parts."""
        lists, own = [] if parts is None else [parts], vars(block)
        modules = [module for module in self.modules if module is not block]
        typed = (*lists, *modules, *self.weights)
        hidden = (*METHODS, *block._modules)  # what could stand before a method or module
        self.facts += [(own, name, None) for name in hidden]
        self.facts += [(own, name, own[name]) for name in own if name != KEY]
        known = self.known(type(block), [*modules, self.config, *lists], typed, own)
        kinds = {type(each) is LinearInt8 for each in self.modules if type(each) in _PRODUCTS}
        self.need(len(kinds) == 1, "int8")
        self.need(type(numbers["place"]) is int, "layer_idx")
        conv1d = numbers["gpt2"]
        shapes = [tuple(each.shape) for each in self.weights if each.dim() == 2]
        products = tuple({(shape[1], shape[0]) if conv1d else shape for shape in shapes})
        order = None if parts is None else parts._modules
        int8 = kinds.pop()
        return _Plan(
            type(block), known, order, self.weights, products=products, int8=int8, **numbers
        )


def _of_gpt2(block: Any) -> _Plan:
    plan = _Planner(block.attn.config)
    plan.module(block, *DROP_INS.values())
    norms = [plan.pair(block, "ln_1", nn.LayerNorm)]
    attention = plan.part(block, "attn", "GPT2Attention")
    plan.attention(attention)
    plan.need(not attention.is_cross_attention, "is_cross_attention")
    plan.need(attention.split_size == attention.num_heads * attention.head_dim, "heads")
    for name in ("c_attn", "c_proj"):
        plan.pair(attention, name, Conv1D, LinearInt8)
    plan.dropout(attention, "attn_dropout")
    plan.dropout(attention, "resid_dropout")
    norms.append(plan.pair(block, "ln_2", nn.LayerNorm))
    inner = plan.part(block, "mlp", "GPT2MLP")
    for name in ("c_fc", "c_proj"):
        plan.pair(inner, name, Conv1D, LinearInt8)
    plan.dropout(inner, "dropout")
    tanh = plan.gelu(inner, "act")
    plan.need(norms[0].eps == norms[1].eps, "eps")
    return plan.planned(
        block,
        head_size=attention.head_dim,
        eps=norms[0].eps,
        scale=attention.scaling,
        activation=_GELU_TANH if tanh else _GELU,
        place=attention.layer_idx,
        gpt2=True,
    )


def _of_t5(block: Any) -> _Plan:
    layers = block.layer
    plan = _Planner(layers[0].SelfAttention.config)
    plan.module(block, *DROP_INS.values())
    plan.need(block.is_decoder, "is_decoder")
    order = layers._modules
    plan.need(type(layers) is nn.ModuleList and "layer" not in vars(block), "layer")
    plan.facts.append((block._modules, "layer", layers))
    plan.need(tuple(order) == _PARTS, "layer")
    eps, indices = set(), set()
    kinds = {"SelfAttention": "T5LayerSelfAttention", "EncDecAttention": "T5LayerCrossAttention"}
    for key, (name, kind) in zip(order, kinds.items(), strict=False):
        part = plan.part(layers, key, kind)
        eps.add(plan.norm(part, "layer_norm"))
        attention = plan.part(part, name, "T5Attention")
        plan.attention(attention)
        plan.need(attention.inner_dim == attention.n_heads * attention.key_value_proj_dim, "heads")
        plan.need(attention.scaling == layers[0].SelfAttention.scaling, "scaling")
        for each in ("q", "k", "v", "o"):
            before = list(plan.weights)
            plan.without_bias(attention, each)
            if each in ("k", "v") and name == "EncDecAttention":
                plan.weights = before  # its keys and values are in the cache
        plan.dropout(part, "dropout")
        indices.add(attention.layer_idx)
    part = plan.part(layers, "2", "T5LayerFF")
    eps.add(plan.norm(part, "layer_norm"))
    gated = type(part.DenseReluDense).__name__ == "T5DenseGatedActDense"
    inner = plan.part(
        part, "DenseReluDense", "T5DenseGatedActDense" if gated else "T5DenseActDense"
    )
    for name in ("wi_0", "wi_1", "wo") if gated else ("wi", "wo"):
        plan.without_bias(inner, name)
    plan.dropout(inner, "dropout")
    plan.dropout(part, "dropout")
    if isinstance(inner.act, nn.ReLU):
        plan.child(inner, "act", nn.ReLU)
        activation = _RELU
    else:
        activation = _GELU_TANH if plan.gelu(inner, "act") else _GELU
    plan.need(len(eps) == len(indices) == 1, "numbers")
    own = layers[0].SelfAttention
    return plan.planned(
        block,
        layers,
        head_size=own.key_value_proj_dim,
        eps=eps.pop(),
        scale=own.scaling,
        activation=activation,
        place=own.layer_idx,
        gpt2=False,
    )


#: A layer that has no plan is looked at again after so many tokens, as that takes 0.1 to 0.2 ms.
_WAITS = 32


def _plan_of(block: nn.Module, made: Any, rows: int) -> _Plan | None:
    """The plan of a layer, if one call can run it and is faster."""
    kept = kept_by(block)
    if kept.waits > 0:
        kept.waits -= 1
        return None
    if kept.plan is not None:
        if not _is_faster(kept.plan, rows):
            return None
        if kept.plan.holds(block):
            return kept.plan
    try:
        kept.plan = made(block)
    except (Unlike, AttributeError, KeyError, IndexError, TypeError, ValueError):
        kept.plan, kept.waits = None, _WAITS
        return None
    return kept.plan if _is_faster(kept.plan, rows) else None


def _may_call(block: nn.Module, hidden: Any, mask: Any) -> bool:
    """Whether these are the next tokens, and no gradient or choice of a backend is in the way."""
    if torch.compiler.is_compiling():
        return False
    if block.training:  # the plan would keep weights alive that were replaced since
        forget(block)
    if torch.is_grad_enabled() or block.training or not _BUILT:
        return False
    if torch._C._is_tracing() or type(hidden) is not Tensor or hidden.dim() != 3:
        return False
    return (
        hidden.shape[1] == 1
        and hidden.dtype is torch.float32
        and _is_keys(mask)
        and all(requested(op) in ("auto", "cpp") for op in ("attention", "linear", "gelu"))
        and not (takes_notes() or is_recorded())
        and not (is_intercepted((hidden,)) or _updates() != _UPDATES)
    )


def _is_keys(mask: Any) -> bool:
    """Whether it masks keys, or none; see ``fastplm_mask``."""
    if mask is None:
        return True
    return type(mask) is Tensor and mask.dtype is torch.bool and mask.dim() == 4


def _is_faster(plan: _Plan, rows: int) -> bool:
    if plan.int8:
        return requested("linear_int8") in ("auto", "cpp")
    if requested("linear") == "cpp":
        return True
    form = ("conv1d" if plan.gpt2 else "linear") + (ALONE if _is_alone() else "")
    return all(
        slower("linear", (form, torch.float32, (rows, n * k, aspect(n, k)))) is None
        for n, k in plan.products
    )


def _is_alone() -> bool:
    return torch.get_num_threads() == 1


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


def gpt2_layer_call(
    block: nn.Module, hidden: Any, cache: Any, mask: Any, others: dict[str, Any]
) -> Tensor | None:
    """The forward of a ``GPT2Block`` for the next tokens, [B, 1, E], if one call can run it.

    Args:
        hidden, cache, mask: of its arguments.
        others: its other arguments.
    """
    if not _may_call(block, hidden, mask) or type(cache) is not DynamicCache:
        return None
    if any(value is not None for name, value in others.items() if name not in _IGNORED):
        return None
    plan = _plan_of(block, _of_gpt2, hidden.shape[0])
    if plan is None:
        return None
    layer = _layer_of(cache, plan.place)
    return None if layer is None else _called(block, plan, hidden, layer, mask, None, [], None)


#: Arguments of a layer that change nothing in it.
_IGNORED = frozenset(("use_cache", "position_ids", "cache_position"))


def t5_layer_call(
    block: Any,
    hidden: Any,
    cache: Any,
    mask: Any,
    bias: Any,
    states_mask: Any,
    others: dict[str, Any],
) -> tuple[Tensor, Tensor] | None:
    """The same of a ``T5Block`` of a decoder, and the bias of its scores.

    Args:
        bias: the position bias [1, H, 1, T + 1], or None: the layer has its table.
        states_mask: of the encoder's states.
    """
    if not _may_call(block, hidden, mask) or type(cache) is not EncoderDecoderCache:
        return None
    if not _is_keys(states_mask) or not (bias is None or type(bias) is Tensor and bias.dim() == 4):
        return None
    if any(value is not None for name, value in others.items() if name not in _IGNORED):
        return None
    plan = _plan_of(block, _of_t5, hidden.shape[0])
    if plan is None or requested("rms_norm") not in ("auto", "cpp"):
        return None
    layer = _layer_of(cache.self_attention_cache, plan.place)
    states = _layer_of(cache.cross_attention_cache, plan.place)
    if layer is None or states is None or not cache.is_updated.get(plan.place):
        return None
    if bias is None:
        own, seen = block.layer[0].SelfAttention, layer.keys.shape[2]
        if not own.has_relative_attention_bias:
            return None
        bias = own.compute_bias(1, seen + 1, device=hidden.device, past_seen_tokens=seen)
    of_states = [states.keys, states.values]
    out = _called(block, plan, hidden, layer, mask, bias, of_states, states_mask)
    return None if out is None else (out, bias)


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
    if not results:
        kept = kept_by(block)  # a weight may have other data, of another dtype or shape
        kept.plan, kept.waits = None, _WAITS
        return None
    out, layer.keys, layer.values = results
    return out
