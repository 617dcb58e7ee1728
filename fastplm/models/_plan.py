"""What is known of modules, so that each call can see whether they still are so.

A call of csrc/ that runs many modules at once takes their weights from a plan. Such a plan is made
of the modules as they are, or not made if one is unlike those that the call can stand for. It is
used as long as ``Known.holds``.
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
from fastplm._extension import unchanged
from fastplm._registry import needs_dispatch
from fastplm.models._base import DROP_INS, GELUTanh, NewGELUActivation
from fastplm.nn import LinearInt8

#: Whether plans can be held to.
BUILT = _extension.unchanged is not None
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
#: What an instance may have in the place of its class: a plan of one that has it is refused.
METHODS = ("forward", "feed_forward_chunk", "_compiled_call_impl")
#: The functions that the modules call, which a profiler may replace.
_FUNCTIONS = (F.linear, F.gelu, F.layer_norm, F.embedding)
_has_global_hook = torch.nn.modules.module._has_any_global_hook
_len_function_modes = torch._C._len_torch_function_stack
#: The attribute of a module with its plan.
_KEY = "_fastplm_call"
_forward_of = operator.attrgetter("forward")


class Known(NamedTuple):
    """Modules as they were."""

    modules: tuple[Any, ...]  # the modules, and perhaps a configuration, with all attributes ...
    names: tuple[tuple[str, ...], ...]  # ... by their names ...
    attributes: tuple[tuple, ...]  # ... as they were, but for what their dicts have in them:
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

    def holds(self) -> bool:
        return (
            unchanged.entries(self.dicts, self.keys, self.values)
            and unchanged.attributes(self.modules, self.names, self.attributes)
            and unchanged.types(self.typed, self.classes)
            and all(map(operator.is_, map(_forward_of, self.kinds), self.forwards))
            and not any(self.hooks)
            and tuple(map(len, self.recording)) == self.sizes
        )


class Kept:
    """Holds the plan of an encoder or model; a copy or a pickle of it begins without one."""

    def __init__(self, owner: nn.Module | None = None) -> None:
        self.plan: Any = None
        self.owner = None if owner is None else weakref.ref(owner)

    def is_of(self, owner: nn.Module) -> bool:
        """False in a shallow copy of its owner, too."""
        return self.owner is not None and self.owner() is owner

    def __deepcopy__(self, memo: Any) -> Kept:
        return Kept()

    def __reduce__(self) -> Any:
        return Kept, ()


def kept_by(owner: nn.Module) -> Kept:
    """What holds the plan of a module."""
    kept = owner.__dict__.get(_KEY)
    if kept is None or not kept.is_of(owner):
        kept = owner.__dict__[_KEY] = Kept(owner)
    return kept


def forget(*modules: nn.Module) -> None:
    """Forget what is known of modules."""
    for module in modules:
        module.__dict__.pop(_KEY, None)


class Unlike(Exception):
    """A part of a module that the call does not know."""


class Planner:
    """Collects a plan; raises ``Unlike`` at the first part that the call does not know."""

    def __init__(self, config: Any) -> None:
        self.config = config
        self.facts: list[tuple[dict, str, Any]] = []
        self.modules: list[nn.Module] = []
        self.hooks: list[dict] = []
        self.recording: list[dict] = []
        self.weights: list[Tensor] = []

    def need(self, right: bool, what: str) -> None:
        if not right:
            raise Unlike(what)

    def without_hooks(self, module: nn.Module) -> None:
        """The module has none but those by which Transformers records outputs when asked to."""
        for name in HOOKS:
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
        self.need(not any(name in vars(module) for name in METHODS), "method")
        self.need(getattr(kind.forward, "__name__", "") == "forward", "forward")
        self.need(kind.__call__ is nn.Module.__call__, "__call__")
        # Where it was written: a wrapper has the name of what it wraps.
        written = getattr(kind.forward, "__globals__", {}).get("__name__", "").split(".")[0]
        self.need(written in ("fastplm", "torch", "transformers"), "forward")
        self.without_hooks(module)
        self.modules.append(module)
        return module

    def child(self, parent: nn.Module, name: str, *kinds: type) -> Any:
        found = parent._modules.get(name)
        self.need(name not in vars(parent), name)  # which would be found first
        self.facts.append((parent._modules, name, found))
        return self.module(found, *(kinds or tuple(DROP_INS.values())))

    def tensor(self, module: nn.Module, held: dict, key: str, kind: type) -> None:
        found: Any = held.get(key)
        right: bool = type(found) is kind and key not in vars(module)
        self.need(right and found.layout is torch.strided and found.is_cpu, key)
        self.facts.append((held, key, found))
        self.weights.append(found)

    def weight(self, module: nn.Module) -> None:
        if type(module) is LinearInt8:
            self.tensor(module, module._buffers, "packed", Tensor)
            self.tensor(module, module._buffers, "scale", Tensor)
        else:
            self.tensor(module, module._parameters, "weight", nn.Parameter)

    def pair(self, parent: nn.Module, name: str, *kinds: type) -> nn.Module:
        """A module with a weight and a bias, or in 8 bits with a scale, too."""
        module = self.child(parent, name, *kinds)
        self.weight(module)
        self.tensor(module, module._parameters, "bias", nn.Parameter)
        shape = vars(module).get("normalized_shape")
        self.need(shape is None or shape == self.weights[-1].shape, "normalized_shape")
        return module

    def gelu(self, parent: nn.Module, name: str) -> bool:
        """A GELU; whether it is the form with a tanh."""
        act = self.child(parent, name, GELUActivation, NewGELUActivation, GELUTanh)
        if type(act) is GELUActivation:
            self.need(act.act is F.gelu, "act")
        elif type(act) is GELUTanh:
            self.need(isinstance(act.act, functools.partial), "act")
        return type(act) is not GELUActivation

    def known(self, kind: type, watched: list[Any], typed: tuple[Any, ...]) -> Known:
        """What was collected, of a module of class ``kind``.

        Args:
            watched: what must keep its attributes.
            typed: what must keep its class.
        """
        dicts, keys, values = zip(*self.facts, strict=True)
        kinds = tuple({kind, *map(type, self.modules)})
        attributes = list(map(vars, watched))
        shared: dict[tuple[int, ...], tuple[str, ...]] = {}  # one tuple for all of the same names
        return Known(
            modules=tuple(watched),
            names=tuple(
                shared.setdefault(tuple(map(id, each)), tuple(each)) for each in attributes
            ),
            attributes=tuple(tuple(each.values()) for each in attributes),
            dicts=dicts,
            keys=keys,
            values=values,
            hooks=tuple(self.hooks),
            recording=tuple(self.recording),
            sizes=tuple(map(len, self.recording)),
            typed=typed,
            classes=tuple(map(type, typed)),
            kinds=kinds,
            forwards=tuple(map(_forward_of, kinds)),
        )


def is_intercepted(given: tuple[Tensor, ...]) -> bool:
    """Whether somebody would see the calls of the modules and of their functions."""
    return (
        needs_dispatch(given)
        or torch.is_autocast_enabled("cpu")
        or _has_global_hook()
        or _len_function_modes() > 0
        or (F.linear, F.gelu, F.layer_norm, F.embedding) != _FUNCTIONS
    )
