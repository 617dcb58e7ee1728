"""The layers of an encoder in one call of csrc/, for inference on a CPU.

With one or two short texts, Python and PyTorch's calls between the operators of a layer take longer
than its products. ``fastplm_C::encoder`` runs all layers: it reads the weights where they are, as
they are at that moment, so there is no copy that could be out of date. The layers themselves are
its specification. They run wherever a module is not as ``_Plan`` knows it.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import GELUActivation

from fastplm import _extension
from fastplm._backends import requested
from fastplm._measured import ALONE, aspect, slower
from fastplm._registry import needs_dispatch
from fastplm.models._base import DROP_INS, GELUTanh, NewGELUActivation
from fastplm.models._ragged import LastRows, RaggedBatch, Rows
from fastplm.nn import Dropout, Linear, LinearInt8
from fastplm.ops.linear import is_split

_BUILT = _extension.lacks("encoder", "CPU") is None
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
#: What an instance may have in the place of its class: a plan of one that has it is refused.
_METHODS = ("forward", "feed_forward_chunk", "_compiled_call_impl")
#: The functions that the layers call, which a profiler may replace.
_FUNCTIONS = (F.linear, F.gelu, F.layer_norm)
_LINEAR = (Linear, LinearInt8)
_has_global_hook = torch.nn.modules.module._has_any_global_hook
_len_function_modes = torch._C._len_torch_function_stack
#: The attribute of an encoder with its plan.
_KEY = "_fastplm_encoder_call"


class _Plan(NamedTuple):
    """What the layers of an encoder are, so that each call can see whether they still are."""

    kind: type  # of the encoder
    modules: tuple[nn.Module, ...]  # of its layers, with all attributes of each ...
    attributes: list[dict]  # ... as they were, but for what their dicts have in them:
    dicts: tuple[dict, ...]  # entries of dicts by keys, which are modules and parameters
    keys: tuple[str, ...]
    values: tuple[Any, ...]
    hooks: tuple[dict, ...]  # dicts of hooks, all of them empty ...
    recording: tuple[dict, ...]  # ... but for Transformers' own, and how many these have
    sizes: tuple[int, ...]
    typed: tuple[Any, ...]  # modules and parameters, and their classes
    classes: tuple[type, ...]
    kinds: tuple[type, ...]  # the classes of modules, and their forwards
    forwards: tuple[Callable, ...]
    names: list[str]  # of the layers, in their order
    layers: dict
    weights: list[Tensor]  # 16 of each layer, or 22 in 8 bits, see csrc/encoder.cpp
    head_size: int
    eps: float
    tanh: bool

    def holds(self, encoder: nn.Module) -> bool:
        try:
            return (
                type(encoder) is self.kind
                and all(map(operator.is_, map(dict.get, self.dicts, self.keys), self.values))
                and list(map(vars, self.modules)) == self.attributes
                and all(map(operator.is_, map(type, self.typed), self.classes))
                and all(map(operator.is_, map(_forward_of, self.kinds), self.forwards))
                and not any(self.hooks)
                and tuple(map(len, self.recording)) == self.sizes
                and list(self.layers) == self.names
            )
        except (RuntimeError, TypeError, ValueError):  # tensors that were compared
            return False


_forward_of = operator.attrgetter("forward")


class _Kept:
    """Holds the plan of an encoder; a copy or a pickle of the encoder begins without one."""

    def __init__(self) -> None:
        self.plan: _Plan | None = None

    def __deepcopy__(self, memo: Any) -> _Kept:
        return _Kept()

    def __reduce__(self) -> Any:
        return _Kept, ()


class _Unlike(Exception):
    """A part of a layer that the call does not know."""


class _Planner:
    """Collects a plan; raises ``_Unlike`` at the first part that the call does not know."""

    def __init__(self, config: Any) -> None:
        self.config = config
        self.facts: list[tuple[dict, str, Any]] = []
        self.modules: list[nn.Module] = []
        self.hooks: list[dict] = []
        self.recording: list[dict] = []
        self.weights: list[Tensor] = []
        self.numbers: set[tuple[int, float, bool]] = set()

    def need(self, right: bool, what: str) -> None:
        if not right:
            raise _Unlike(what)

    def without_hooks(self, module: nn.Module) -> None:
        """The module has none but those by which Transformers records outputs when asked to."""
        for name in _HOOKS:
            hooks = vars(module)[name]
            for key, hook in hooks.items():
                recorder = "transformers.utils.output_capturing"
                self.need(getattr(hook, "__module__", None) == recorder, "hook")
                self.facts.append((hooks, key, hook))
            (self.recording if hooks else self.hooks).append(hooks)

    def module(self, module: Any, *kinds: type) -> Any:
        """A module of just one of these classes, in evaluation, which runs its class's methods."""
        kind = type(module)
        self.need(kind in kinds, kind.__name__)
        self.need(not module.training, "training")
        self.need(not any(name in vars(module) for name in _METHODS), "method")
        self.need(getattr(kind.forward, "__name__", "") == "forward", "forward")
        self.without_hooks(module)
        self.modules.append(module)
        return module

    def child(self, parent: nn.Module, name: str, *kinds: type) -> Any:
        found = parent._modules.get(name)
        self.facts.append((parent._modules, name, found))
        return self.module(found, *(kinds or tuple(DROP_INS.values())))

    def pair(self, parent: nn.Module, name: str, *kinds: type) -> nn.Module:
        """A module with a weight and a bias, or in 8 bits with a scale, too."""
        module = self.child(parent, name, *kinds)
        int8 = type(module) is LinearInt8
        parameters, buffers = module._parameters, module._buffers
        keys = [(buffers, "packed"), (buffers, "scale")] if int8 else [(parameters, "weight")]
        for held, key in (*keys, (parameters, "bias")):
            found: Any = held.get(key)
            kind = nn.Parameter if held is parameters else Tensor
            self.need(type(found) is kind and found.layout is torch.strided, key)
            self.facts.append((held, key, found))
            self.weights.append(found)
        return module

    def layer(self, layer: nn.Module) -> None:
        """The modules that ``fastplm.models._encoder`` has mixins for."""
        attention = self.child(layer, "attention")
        own = self.child(attention, "self")
        for name in ("query", "key", "value"):
            self.pair(own, name, *_LINEAR)
        self.child(own, "dropout", nn.Dropout, Dropout)
        eps = self._end(attention)
        tanh = self._activation(self.child(layer, "intermediate"))
        self.need(self._end(layer) == eps, "eps")
        self.need(own.config is self.config, "config")
        self.need(own.scaling == own.attention_head_size**-0.5, "scaling")
        self.need(not own.is_decoder and not layer.is_decoder, "is_decoder")
        self.numbers.add((own.attention_head_size, eps, tanh))

    def _end(self, block: nn.Module) -> float:
        """``EncoderOutput``: a linear layer, dropout, the residual and a norm."""
        output = self.child(block, "output")
        self.pair(output, "dense", *_LINEAR)
        self.child(output, "dropout", nn.Dropout, Dropout)
        norm: Any = self.pair(output, "LayerNorm", nn.LayerNorm)
        return norm.eps

    def _activation(self, block: nn.Module) -> bool:
        """Whether the GELU is the form with a tanh."""
        self.pair(block, "dense", *_LINEAR)
        kinds = (GELUActivation, NewGELUActivation, GELUTanh)
        act = self.child(block, "intermediate_act_fn", *kinds)
        if type(act) is GELUActivation:
            self.need(act.act is F.gelu, "act")
        elif type(act) is GELUTanh:
            self.need(isinstance(act.act, functools.partial), "act")
        return type(act) is not GELUActivation


def _made(encoder: nn.Module) -> _Plan | None:
    """The plan of an encoder; None if the call does not know some part of it."""
    kind, planner = type(encoder), _Planner(vars(encoder).get("config"))
    if not kind.__module__.startswith("transformers.models."):
        return None
    try:
        planner.module(encoder, kind)
        planner.modules.clear()  # its attributes have the plan
        own = vars(encoder)
        planner.facts += [(own, name, own[name]) for name in ("_modules", "config", *_HOOKS)]
        planner.facts += [(own, name, None) for name in _METHODS]
        layers: Any = encoder._modules["layer"]
        planner.need(type(layers) is nn.ModuleList, "layer")
        planner.facts.append((encoder._modules, "layer", layers))
        for name in layers._modules:
            planner.layer(planner.child(layers, name))
        (head_size, eps, tanh), *others = planner.numbers
        planner.need(not others, "numbers")
        planner.need(torch.ops.fastplm_C.encoder_fits(planner.weights, head_size), "shapes")
    except (_Unlike, AttributeError, KeyError, ValueError):
        return None
    dicts, keys, values = zip(*planner.facts, strict=True)
    modules, typed = planner.modules, (layers, *planner.modules, *planner.weights)
    kinds = tuple({kind, *map(type, modules)})
    return _Plan(
        kind=kind,
        modules=tuple(modules),
        attributes=[dict(vars(module)) for module in modules],
        dicts=dicts,
        keys=keys,
        values=values,
        hooks=tuple(planner.hooks),
        recording=tuple(planner.recording),
        sizes=tuple(map(len, planner.recording)),
        typed=typed,
        classes=tuple(map(type, typed)),
        kinds=kinds,
        forwards=tuple(map(_forward_of, kinds)),
        names=list(layers._modules),
        layers=layers._modules,
        weights=planner.weights,
        head_size=head_size,
        eps=eps,
        tanh=tanh,
    )


def _plan_of(encoder: nn.Module) -> _Plan | None:
    kept = encoder.__dict__.get(_KEY)
    if kept is None:
        kept = encoder.__dict__[_KEY] = _Kept()
    if kept.plan is None or not kept.plan.holds(encoder):
        kept.plan = _made(encoder)
    return kept.plan


def forget(encoder: nn.Module) -> None:
    """Forget what is known of an encoder."""
    encoder.__dict__.pop(_KEY, None)


def may_call(encoder: nn.Module, rows: int) -> bool:
    """Whether one call would be faster, and no gradient or choice of a backend is in its way.

    This is asked first, and of every forward, so it takes no more than a few microseconds.
    """
    if torch.is_grad_enabled() or encoder.training or not _BUILT:
        return False
    if torch._C._is_tracing() or torch.compiler.is_compiling():
        return False
    try:
        first = encoder._modules["layer"]._modules["0"]  # type: ignore[union-attr]
        dense: Any = first._modules["intermediate"]._modules["dense"]  # type: ignore[union-attr]
        if type(dense) is LinearInt8:
            wanted = requested("attention"), requested("linear_int8")
            return all(one in ("auto", "cpp") for one in wanted)
        weight = dense._parameters["weight"]
    except (AttributeError, KeyError):
        weight = None
    if type(weight) is not nn.Parameter or weight.dtype is not torch.float32 or not weight.is_cpu:
        forget(encoder)  # whose former weights nobody needs
        return False
    return requested("attention") in ("auto", "cpp") and _is_faster(rows, *weight.shape)


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
    if (
        needs_dispatch((given,))
        or torch.is_autocast_enabled("cpu")
        or _has_global_hook()
        or _len_function_modes() > 0
        or (F.linear, F.gelu, F.layer_norm) != _FUNCTIONS
        or not _is_dense(own)
        or not _is_dense(last)
    ):
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
