"""An encoder in one call of csrc/, for inference on a CPU.

With one or two short texts, Python and PyTorch's calls between the operators of a layer take longer
than its products. ``fastplm_C::backbone`` runs a model from its ids on, and ``fastplm_C::encoder``
all layers. They read the weights where they are, as they are at that moment, so there is no copy
that could be out of date. The modules themselves are their specification. They run wherever one is
not as ``_Plan`` knows it.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.utils.generic import ModelOutput

from fastplm import _extension
from fastplm._backends import requested, takes_notes
from fastplm._rules import ALONE, slower
from fastplm.hf import NAME
from fastplm.models._plan import (
    BUILT,
    HOOKS,
    METHODS,
    Known,
    Planner,
    Unlike,
    forget,
    is_intercepted,
    kept_by,
)
from fastplm.models._ragged import LastRows, RaggedBatch, Rows
from fastplm.nn import Dropout, Linear, LinearInt8

_BUILT = BUILT and _extension.lacks("encoder", "CPU") is None
_LINEAR = (Linear, LinearInt8)


class _Ends(NamedTuple):
    """What is before and after the layers, see ``backbone`` in csrc/layers/encoder.cpp."""

    embeddings: list[Tensor]
    projection: list[Tensor]
    pooler: list[Tensor]
    padding_id: int  # -1: positions do not depend on the ids
    eps: float


class _Plan(NamedTuple):
    """What the layers of an encoder are, so that each call can see whether they still are."""

    kind: type  # of the encoder
    known: Known  # of its layers, and of a model's configuration
    order: list[str]  # the names of the layers
    layers: dict
    weights: list[Tensor]  # 16 of each layer, or 22 in 8 bits, see csrc/layers/encoder.cpp
    head_size: int
    eps: float
    tanh: bool
    ends: _Ends | None  # of a model

    def holds(self, encoder: nn.Module, owner: nn.Module) -> bool:
        return (
            type(encoder) is self.kind
            and self.known.holds(vars(encoder), vars(owner))
            and list(self.layers) == self.order
        )


class _Planner(Planner):
    """Collects the plan of an encoder."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.numbers: set[tuple[int, float, bool]] = set()

    def layer(self, layer: Any) -> None:
        """The modules of ``fastplm.models._encoder.EncoderLayer``."""
        kind, of_self, of_join, of_inner, of_outer = layer._around
        attention = self.child(layer, "attention", kind)
        own = self.child(attention, "self", of_self)
        for name in ("query", "key", "value"):
            self.pair(own, name, *_LINEAR)
        self.child(own, "dropout", nn.Dropout, Dropout)
        eps = self._end(attention, of_join)
        tanh = self._activation(self.child(layer, "intermediate", of_inner))
        self.need(self._end(layer, of_outer) == eps, "eps")
        self.need(own.config is self.config, "config")
        self.need(own.scaling == own.attention_head_size**-0.5, "scaling")
        self.need(not own.is_decoder and not layer.is_decoder, "is_decoder")
        self.numbers.add((own.attention_head_size, eps, tanh))

    def _end(self, block: nn.Module, kind: type) -> float:
        """A linear layer, dropout, the residual and a norm."""
        output = self.child(block, "output", kind)
        self.pair(output, "dense", *_LINEAR)
        self.child(output, "dropout", nn.Dropout, Dropout)
        norm: Any = self.pair(output, "LayerNorm", nn.LayerNorm)
        return norm.eps

    def _activation(self, block: nn.Module) -> bool:
        """Whether the GELU is the form with a tanh."""
        self.pair(block, "dense", *_LINEAR)
        return self.gelu(block, "intermediate_act_fn")

    def part(self, model: nn.Module, name: str, family: str) -> Any:
        """A module of the class that this family's models have."""
        kind: Any = type(model._modules.get(name))
        self.need(kind.__module__.startswith(("transformers.models.", "fastplm.models.")), name)
        self.need(kind.__name__ == type(model).__name__.replace("Model", family), name)
        return self.child(model, name, kind)

    def ends(self, model: Any) -> _Ends:
        """The modules of an ``EncoderModel`` before and after its layers."""
        own, config, parts = vars(model), self.config, model._modules
        self.need(own.get("config") is config and config._attn_implementation == NAME, "config")
        self.need(not (config.is_decoder or config.chunk_size_feed_forward), "config")
        self.need(not (config.output_hidden_states or config.output_attentions), "config")
        self.facts += [(own, name, own[name]) for name in ("_modules", "config")]
        self.need("_create_attention_masks" not in own, "_create_attention_masks")
        self.facts += [(own, "_create_attention_masks", None), (parts, "encoder", model.encoder)]
        shadows = ("embeddings", "encoder", "embeddings_project", "pooler")
        self.need(all(own.get(name) is None for name in shadows), "shadows")
        self.facts += [(own, name, None) for name in shadows]
        embeddings = self.part(model, "embeddings", "Embeddings")
        tables: list[Tensor] = []
        self.weights = tables
        for name in ("word_embeddings", "position_embeddings", "token_type_embeddings"):
            table = self.child(embeddings, name, nn.Embedding)
            self.need(table.max_norm is None, "max_norm")
            self.tensor(table, table._parameters, "weight", nn.Parameter)
        norm: Any = self.pair(embeddings, "LayerNorm", nn.LayerNorm)
        self.child(embeddings, "dropout", nn.Dropout, Dropout)
        for name in ("position_ids", "token_type_ids"):
            self.tensor(embeddings, embeddings._buffers, name, Tensor)
        projection: list[Tensor] = []
        self.weights = projection
        if "embeddings_project" not in parts:
            self.facts.append((parts, "embeddings_project", None))
        else:
            self.pair(model, "embeddings_project", *_LINEAR)
        pooler: list[Tensor] = []
        self.weights = pooler
        if parts.get("pooler") is None:
            self.facts.append((parts, "pooler", None))
        else:
            pools = self.part(model, "pooler", "Pooler")
            self.pair(pools, "dense", *_LINEAR)
            self.child(pools, "activation", nn.Tanh)
        counts = hasattr(type(embeddings), "create_position_ids_from_input_ids")
        self.need("create_position_ids_from_input_ids" not in vars(embeddings), "positions")
        padding_id = vars(embeddings).get("padding_idx") if counts else -1
        self.need(type(padding_id) is int and (padding_id >= 0) == counts, "padding_idx")
        return _Ends(tables, projection, pooler, padding_id, norm.eps)


def _made(encoder: nn.Module, model: nn.Module | None = None) -> _Plan | None:
    """The plan of an encoder or of a whole model; None if a call does not know some part of it."""
    kind, planner = type(encoder), _Planner(vars(encoder).get("config"))
    if not kind.__module__.startswith("transformers.models."):
        return None
    try:
        planner.module(encoder, kind)
        planner.modules.clear()  # its attributes have the plan
        own = vars(encoder)
        planner.facts += [(own, name, own[name]) for name in ("_modules", "config", *HOOKS)]
        planner.need("layer" not in own, "layer")
        planner.facts += [(own, name, None) for name in (*METHODS, "layer")]
        ends = None if model is None else planner.ends(model)
        planner.weights = []
        layers: Any = encoder._modules["layer"]
        planner.need(type(layers) is nn.ModuleList, "layer")
        planner.facts.append((encoder._modules, "layer", layers))
        for name in layers._modules:
            planner.layer(planner.child(layers, name))
        (head_size, eps, tanh), *others = planner.numbers
        planner.need(not others, "numbers")
        weights = planner.weights
        planner.need(torch.ops.fastplm_C.encoder_fits(weights, head_size), "shapes")
    except (Unlike, AttributeError, KeyError, ValueError):
        return None
    typed = (layers, *planner.modules, *weights)
    watched: list[Any] = [*planner.modules, layers]
    if ends is not None:
        typed += (*ends.embeddings, *ends.projection, *ends.pooler)
        watched.append(planner.config)
    return _Plan(
        kind=kind,
        known=planner.known(kind, watched, typed, own, vars(encoder if model is None else model)),
        order=list(layers._modules),
        layers=layers._modules,
        weights=weights,
        head_size=head_size,
        eps=eps,
        tanh=tanh,
        ends=ends,
    )


def _plan_of(encoder: nn.Module, model: nn.Module | None = None) -> _Plan | None:
    owner = encoder if model is None else model
    kept = kept_by(owner)
    if kept.plan is None or not kept.plan.holds(encoder, owner):
        kept.plan = _made(encoder, model)
    return kept.plan


def may_call(model: Any, rows: int | Callable[[], int]) -> bool:
    """Whether one call would be faster, and no gradient or choice of a backend is in its way.

    This is asked first, and of every forward, so it takes no more than a few microseconds. ``rows``
    are counted only if they decide.
    """
    encoder: Any = model._modules["encoder"]
    if torch.compiler.is_compiling():
        return False
    if encoder.training:  # the plan would keep weights alive that were replaced since
        forget(encoder, model)
    if torch.is_grad_enabled() or encoder.training or not _BUILT:
        return False
    if torch._C._is_tracing():
        return False
    try:
        first = encoder._modules["layer"]._modules["0"]
        dense: Any = first._modules["intermediate"]._modules["dense"]
        if type(dense) is LinearInt8:
            wanted = requested("attention"), requested("linear_int8")
            return all(one in ("auto", "cpp") for one in wanted)
        weight = dense._parameters["weight"]
    except (AttributeError, KeyError):
        weight = None
    if type(weight) is not nn.Parameter or weight.dtype is not torch.float32 or not weight.is_cpu:
        forget(encoder, model)  # whose former weights nobody needs
        return False
    if requested("attention") not in ("auto", "cpp"):
        return False
    return _is_faster(rows if isinstance(rows, int) else rows(), weight.shape[1])


def _is_dense_on_cpu(tensor: Any) -> bool:
    if not isinstance(tensor, Tensor) or tensor.is_quantized or tensor.is_nested:
        return False
    return tensor.is_cpu and tensor.layout is torch.strided


def _tokens(input_ids: Tensor, mask: Any) -> int:
    """How many rows go through the layers: padding does not."""
    if not _is_dense_on_cpu(mask) or is_intercepted((mask,)):
        return input_ids.numel()
    return max(1, int(mask.count_nonzero()))


def backbone_call(
    model: Any,
    input_ids: Tensor | None,
    mask: Tensor | None,
    types: Tensor | None,
    first_only: bool = False,
    keeps_padding: bool = False,
) -> list[Tensor]:
    """A model's forward from ids on, wherever one call can run all of it and is faster.

    Args:
        model: an ``EncoderModel``.
        input_ids, mask, types: as in its ``forward``.
        first_only: whether the last layer computes only the first token of each sequence.
        keeps_padding: whether the modules must compute padding, if there is any.

    Returns:
        The last hidden state [B, T, E], with zeros for padding, or [B, 1, E]; and of a model with a
        pooler its output [B, E]; [] if the modules must run themselves, or find what is wrong.
    """
    if type(input_ids) is not Tensor:
        return []
    rows = input_ids.numel() if mask is None else functools.partial(_tokens, input_ids, mask)
    if not may_call(model, rows) or takes_notes():
        return []
    given = tuple(each for each in (input_ids, mask, types) if each is not None)
    if is_intercepted(given) or not all(map(_is_dense_on_cpu, given)):
        return []
    if any(requested(op) not in ("auto", "cpp") for op in ("linear", "linear_int8")):
        return []
    if keeps_padding and mask is not None and not mask.all():
        return []
    encoder: Any = model._modules["encoder"]
    plan = _plan_of(encoder, model)
    if plan is None or (plan.tanh and requested("gelu") not in ("auto", "cpp")):
        return []
    ends: Any = plan.ends
    return torch.ops.fastplm_C.backbone.default(
        *(input_ids, mask, types),
        *(ends.embeddings, ends.projection, plan.weights, ends.pooler),
        *(ends.padding_id, plan.head_size, ends.eps, plan.eps, plan.tanh, first_only),
    )


def output_of(kind: Any, given: dict[str, Tensor]) -> ModelOutput:
    """``kind(**given)``, without its constructor if that gives the same: it reads all fields once
    for each of them."""
    names = _names_of(kind)
    return _filled(kind, names, given) if names else kind(**given)


def _filled(kind: Any, names: tuple[str, ...], given: dict[str, Tensor]) -> Any:
    made = kind.__new__(kind)
    fields = vars(made)
    for name in names:
        fields[name] = given.get(name)
        if name in given:
            OrderedDict.__setitem__(made, name, given[name])
    return made


@functools.cache
def _names_of(kind: Any) -> tuple[str, ...]:
    """The fields of a class of outputs; () if its constructor does more than to set them."""
    names = tuple(field.name for field in dataclasses.fields(kind))
    for count in range(1, len(names) + 1):
        given = {name: torch.empty(0, device="cpu") for name in names[:count]}
        made, right = _filled(kind, names, given), kind(**given)
        for some, other in ((vars(made), vars(right)), (dict(made), dict(right))):
            if list(some) != list(other) or not all(
                map(operator.is_, some.values(), other.values())
            ):
                return ()
    return names


def encoder_call(
    encoder: nn.Module, given: Tensor, embedded: Callable[[], Tensor], rows: Rows
) -> Tensor | None:
    """All layers of ``encoder``, if ``may_call``; None if they must run themselves.

    Args:
        encoder: a module with layers of ``fastplm.models._encoder`` in ``layer``.
        given: ids [B, T], or embeddings [B, T, E]; without ``rows.own`` none of it is padding.
        embedded: gives the first layer's input, [B, T, E], or [1, N, E] of packed rows.
        rows: which of them are computed, as the layers would get it.

    Returns:
        The shape of the first layer's input; [1, P, E] if the last layer computes P rows only.
    """
    own, last = rows.own, rows.last
    if is_intercepted((given,)) or not _is_dense(own) or not _is_dense(last):
        return None
    plan = _plan_of(encoder)
    if plan is None or (plan.tanh and requested("gelu") not in ("auto", "cpp")):
        return None
    hidden = embedded()
    batch, seqlen = given.shape[:2]
    if own is None:
        shape, starts = (batch, seqlen), _starts(batch, seqlen)
    else:
        shape, starts = (1, own.positions.shape[0]), own.cu_seqlens
    if type(hidden) is not Tensor or hidden.shape[:-1] != shape:
        return None
    source, of_source = (None, None) if last is None else (last.source, last.cu_seqlens_q)
    out = torch.ops.fastplm_C.encoder.default(
        hidden.flatten(0, 1),
        plan.weights,
        *(starts, source, of_source),
        *(plan.head_size, plan.eps, plan.tanh),
    )
    if out is None:
        forget(encoder)  # a weight has other data, of another dtype or shape
        return None
    return out.view(hidden.shape) if last is None else out[None]


def _is_dense(rows: RaggedBatch | LastRows | None) -> bool:
    """Whether all of these rows may be attended to, and none is an unused slot."""
    if rows is None:
        return True
    if rows.key_mask is not None:
        return False
    if isinstance(rows, RaggedBatch):
        return rows.positions.shape[0] == int(rows.cu_seqlens[-1])
    return rows.source.shape[0] == int(rows.cu_seqlens_q[-1])


@functools.lru_cache(maxsize=256)
def _starts(batch: int, seqlen: int) -> Tensor:
    """int32 [B + 1]: the offsets of sequences of one length."""
    with torch.inference_mode(False):
        return torch.arange(batch + 1, dtype=torch.int32, device="cpu") * seqlen


def _is_faster(rows: int, width: int) -> bool:
    """Whether one call is faster than the modules."""
    wanted = requested("linear")
    if wanted == "cpp":
        return True
    if wanted != "auto":
        return False
    alone = ALONE if torch.get_num_threads() == 1 else ""
    return slower("encoder", ("forward" + alone, torch.float32, (rows, width))) is None
