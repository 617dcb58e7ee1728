"""The layers of an encoder in one call of csrc/, for inference on a CPU.

With one or two short texts, Python and PyTorch's calls between the operators of a layer take longer
than its products. ``fastplm_C::encoder`` runs all layers: it reads the weights where they are, as
they are at that moment, so there is no copy that could be out of date. The layers themselves are
its specification, and run whenever anything about them is not as ``_Plan`` knows it.
"""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import GELUActivation

from fastplm import _extension
from fastplm._backends import is_traced, requested
from fastplm._measured import ALONE, aspect, slower
from fastplm._registry import needs_dispatch
from fastplm.models._base import DROP_INS, GELUTanh, NewGELUActivation
from fastplm.models._ragged import Rows
from fastplm.nn import Dropout, Linear
from fastplm.nn._rows import is_plain
from fastplm.ops.linear import is_split

_BUILT = _extension.lacks("encoder", "CPU") is None
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_has_global_hook = torch.nn.modules.module._has_any_global_hook


class _Plan(NamedTuple):
    """What the layers of an encoder are, and how to see in a few microseconds that they still are.

    ``dict.get(dicts[i], keys[i]) is values[i]`` for each i: the modules and parameters where they
    were, no forward on an instance, all in evaluation, the numbers that the call takes. The plan
    does not hold the encoder itself, at whose end it ends.
    """

    kind: type  # of the encoder

    dicts: tuple[dict, ...]
    keys: tuple[str, ...]
    values: tuple[Any, ...]
    modules: tuple[nn.Module, ...]
    classes: tuple[type, ...]
    hooks: tuple[dict, ...]  # all of them empty
    layers: nn.ModuleList
    weights: list[nn.Parameter]  # 16 of each layer, see csrc/encoder.cpp
    heads: int
    eps: float
    tanh: bool

    def holds(self, encoder: nn.Module) -> bool:
        return (
            type(encoder) is self.kind
            and 16 * len(self.layers) == len(self.weights)
            and all(map(operator.is_, map(dict.get, self.dicts, self.keys), self.values))
            and all(map(operator.is_, map(type, self.modules), self.classes))
            and not any(self.hooks)
        )


class _Unlike(Exception):
    """A part of a layer that the call does not know."""


class _Planner:
    """Collects a plan; raises ``_Unlike`` at the first part that the call does not know."""

    def __init__(self) -> None:
        self.facts: list[tuple[dict, str, Any]] = []
        self.modules: list[nn.Module] = []
        self.hooks: list[dict] = []
        self.weights: list[nn.Parameter] = []
        self.numbers: set[tuple[int, float, bool]] = set()

    def fact(self, owner: Any, key: str, value: Any) -> None:
        if vars(owner).get(key) is not value:
            raise _Unlike(key)
        self.facts.append((vars(owner), key, value))

    def module(self, module: Any, *kinds: type) -> Any:
        """A module of just one of these classes, without hooks; in evaluation."""
        if not is_plain(module, *kinds):
            raise _Unlike(type(module).__name__)
        self.fact(module, "forward", None)
        self.fact(module, "training", False)
        self.hooks += [getattr(module, name) for name in _HOOKS]
        return module

    def child(self, parent: nn.Module, name: str, *kinds: type) -> Any:
        found = parent._modules.get(name)
        self.facts.append((parent._modules, name, found))
        self.modules.append(self.module(found, *(kinds or tuple(DROP_INS.values()))))
        return found

    def pair(self, parent: nn.Module, name: str, *kinds: type) -> nn.Module:
        """A module with a weight and a bias."""
        module = self.child(parent, name, *kinds)
        for key in ("weight", "bias"):
            found = module._parameters.get(key)
            if type(found) is not nn.Parameter:
                raise _Unlike(f"{name}.{key}")
            self.facts.append((module._parameters, key, found))
            self.weights.append(found)
        return module

    def norm(self, parent: nn.Module) -> float:
        norm = self.pair(parent, "LayerNorm", nn.LayerNorm)
        eps: Any = norm.eps
        self.fact(norm, "eps", eps)
        return eps

    def layer(self, layer: nn.Module) -> None:
        """The modules that ``fastplm.models._encoder`` has mixins for."""
        attention = self.child(layer, "attention")
        own = self.child(attention, "self")
        for name in ("query", "key", "value"):
            self.pair(own, name, Linear)
        self.child(own, "dropout", nn.Dropout, Dropout)
        eps = self._end(attention)
        self._activation(self.child(layer, "intermediate"))
        if self._end(layer) != eps:
            raise _Unlike("eps")
        heads = own.num_attention_heads
        self.fact(own, "num_attention_heads", heads)
        self.fact(own, "scaling", own.scaling)
        if own.scaling != own.attention_head_size**-0.5 or heads * own.attention_head_size != len(
            own.query.weight
        ):
            raise _Unlike("scaling")
        for module in (layer, own):
            self.fact(module, "is_decoder", False)
        self.numbers.add((heads, eps, self.tanh))

    def _end(self, block: nn.Module) -> float:
        """``EncoderOutput``: a linear layer, dropout, the residual and a norm."""
        output = self.child(block, "output")
        self.pair(output, "dense", Linear)
        self.child(output, "dropout", nn.Dropout, Dropout)
        return self.norm(output)

    def _activation(self, block: nn.Module) -> None:
        self.pair(block, "dense", Linear)
        kinds = (GELUActivation, NewGELUActivation, GELUTanh)
        act = self.child(block, "intermediate_act_fn", *kinds)
        self.tanh = type(act) is not GELUActivation
        if type(act) is GELUActivation:
            self.fact(act, "act", F.gelu)
        elif type(act) is GELUTanh:
            self.fact(act, "act", act.act)
            if not isinstance(act.act, functools.partial):
                raise _Unlike("act")


def _made(encoder: nn.Module) -> _Plan | None:
    """The plan of an encoder; None if the call does not know some part of it."""
    planner, kind = _Planner(), type(encoder)
    if not kind.__module__.startswith("transformers.models."):
        return None
    try:
        planner.module(encoder, kind)
        layers: Any = encoder._modules["layer"]
        planner.fact(layers, "_modules", layers._modules)
        planner.facts.append((encoder._modules, "layer", layers))
        for name in layers._modules:
            planner.layer(planner.child(layers, name))
        (heads, eps, tanh), *others = planner.numbers
    except (_Unlike, AttributeError, KeyError, ValueError):
        return None
    if others:
        return None
    dicts, keys, values = zip(*planner.facts, strict=True)
    return _Plan(
        kind,
        *(dicts, keys, values),
        modules=tuple(planner.modules),
        classes=tuple(map(type, planner.modules)),
        hooks=tuple(planner.hooks),
        layers=layers,
        weights=planner.weights,
        heads=heads,
        eps=eps,
        tanh=tanh,
    )


_plans: weakref.WeakKeyDictionary[nn.Module, _Plan] = weakref.WeakKeyDictionary()


def _plan_of(encoder: nn.Module) -> _Plan | None:
    plan = _plans.get(encoder)
    if plan is None or not plan.holds(encoder):
        plan = _made(encoder)
        if plan is None:
            _plans.pop(encoder, None)
        else:
            _plans[encoder] = plan
    return plan


def may_call(encoder: nn.Module, rows: int) -> bool:
    """Whether one call would be faster, and no gradient or choice of a backend is in its way.

    This is asked first, and of every forward, so it takes no more than a few microseconds.
    """
    if torch.is_grad_enabled() or encoder.training or is_traced() or not _BUILT:
        return False
    try:
        first = encoder._modules["layer"]._modules["0"]  # type: ignore[union-attr]
        weight: Any = first._modules["intermediate"]._modules["dense"]._parameters["weight"]  # type: ignore[union-attr]
    except (AttributeError, KeyError):
        return False
    if type(weight) is not nn.Parameter or weight.dtype is not torch.float32 or not weight.is_cpu:
        return False
    return requested("attention") in ("auto", "cpp") and _is_faster(rows, *weight.shape)


def encoder_call(
    encoder: nn.Module, given: Tensor, embedded: Callable[[], Tensor], rows: Rows
) -> Tensor | None:
    """All layers of ``encoder``, if ``may_call``; None if they must run themselves.

    Args:
        encoder: a module with layers of ``fastplm.models._encoder`` in ``layer``.
        given: ids [B, T], or embeddings [B, T, E], every row of which may be attended to.
        embedded: gives the first layer's input, [B, T, E], or [1, N, E] of packed rows.
        rows: which of them are computed, as the layers would get it.

    Returns:
        The shape of the first layer's input; [1, P, E] if the last layer computes P rows only.
    """
    own, last = rows.own, rows.last
    if (
        (own is not None and own.key_mask is not None)
        or (last is not None and last.key_mask is not None)
        or needs_dispatch((given,))
        or torch.is_autocast_enabled("cpu")
        or _has_global_hook()
    ):
        return None
    plan = _plan_of(encoder)
    if plan is None or (plan.tanh and requested("gelu") not in ("auto", "cpp")):
        return None
    hidden = embedded()
    source, of_source = (None, None) if last is None else (last.source, last.cu_seqlens_q)
    out = torch.ops.fastplm_C.encoder.default(
        hidden.flatten(0, 1),
        plan.weights,
        _starts(*given.shape[:2]) if own is None else own.cu_seqlens,
        *(source, of_source),
        *(plan.heads, plan.eps, plan.tanh),
    )
    if out is None:
        return None
    return out.view(hidden.shape) if last is None else out[None]


@functools.lru_cache(maxsize=256)
def _starts(batch: int, seqlen: int) -> Tensor:
    """int32 [B + 1]: the offsets of sequences of one length."""
    with torch.inference_mode(False):
        return torch.arange(batch + 1, dtype=torch.int32) * seqlen


def _is_faster(rows: int, inner: int, width: int) -> bool:
    """Whether csrc/ was measured to multiply faster than PyTorch, in all products of a layer."""
    wanted = requested("linear")
    if wanted == "cpp":
        return True
    if wanted != "auto" or is_split(rows, torch.float32):
        return False
    form = "linear" + ALONE if torch.get_num_threads() == 1 else "linear"
    for n, k in ((width, width), (inner, width), (width, inner)):
        if slower("linear", (form, torch.float32, (rows, n * k, aspect(n, k)))) is not None:
            return False
    return True
