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
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from fastplm import _extension
from fastplm._extension import unchanged
from fastplm._registry import needs_dispatch
from fastplm.hf import NAME
from fastplm.models._base import DROP_INS, GELUTanh, NewGELUActivation
from fastplm.nn import LinearInt8

#: Whether plans can be held to.
BUILT = _extension.unchanged is not None
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
#: What an instance may have in the place of its class: a plan of one that has it is refused.
METHODS = ("forward", "feed_forward_chunk", "_call_impl", "_compiled_call_impl")


def _functions() -> tuple[Callable, ...]:
    """What runs modules and what they call, which a profiler may replace."""
    return (
        *(F.linear, F.gelu, F.relu, F.layer_norm, F.embedding, F.scaled_dot_product_attention),
        *(nn.Module.__call__, ALL_ATTENTION_FUNCTIONS[NAME]),
    )


_FUNCTIONS = _functions()
_has_global_hook = torch.nn.modules.module._has_any_global_hook
_len_function_modes = torch._C._len_torch_function_stack
#: The attribute of a module with its plan.
KEY = "_fastplm_call"
#: What a class has that runs its modules.
_RUNS = ("forward", "__call__", "_call_impl")
_runs_of = operator.attrgetter(*_RUNS)
_forward_of = operator.attrgetter("forward")


def _bases_of(kind: type) -> list[type]:
    """The class and its bases that have a forward of their own, which may call one another."""
    return [base for base in kind.__mro__ if "forward" in vars(base) and base is not nn.Module]


def _is_known(function: Any) -> bool:
    """Whether it and all that it wraps was written in one of these packages."""
    while function is not None:
        written = getattr(function, "__globals__", {}).get("__name__", "").split(".")[0]
        if written not in ("fastplm", "torch", "transformers"):
            return False
        function = getattr(function, "__wrapped__", None)
    return True


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
    kinds: tuple[type, ...]  # the classes of modules, and how they run ...
    runs: tuple[tuple[Callable, ...], ...]
    bases: tuple[type, ...]  # ... and all classes with a forward behind them
    forwards: tuple[Callable, ...]
    own: tuple[tuple[tuple[str, ...], tuple[Any, ...]], ...]  # entries of the ``homes``

    def holds(self, *homes: dict) -> bool:
        """Whether all is as it was, also in the attributes of those that hold the plan. These are
        given, as a plan that had them would keep its own holder alive."""
        return (
            all(
                unchanged.entries((home,) * len(keys), keys, values)
                for home, (keys, values) in zip(homes, self.own, strict=True)
            )
            and unchanged.entries(self.dicts, self.keys, self.values)
            and unchanged.attributes(self.modules, self.names, self.attributes)
            and unchanged.types(self.typed, self.classes)
            and all(map(operator.eq, map(_runs_of, self.kinds), self.runs))
            and all(map(operator.is_, map(_forward_of, self.bases), self.forwards))
            and not any(self.hooks)
            and tuple(map(len, self.recording)) == self.sizes
        )


class Kept:
    """Holds the plan of an encoder or model; a copy or a pickle of it begins without one."""

    def __init__(self, owner: nn.Module | None = None) -> None:
        self.plan: Any = None
        self.waits = 0  # how many calls there should be before a plan is made again
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
    kept = owner.__dict__.get(KEY)
    if kept is None or not kept.is_of(owner):
        kept = owner.__dict__[KEY] = Kept(owner)
    return kept


def forget(*modules: nn.Module) -> None:
    """Forget what is known of modules."""
    for module in modules:
        module.__dict__.pop(KEY, None)


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
        # In some versions of Transformers it is a layer's own, which checkpoints in training.
        self.need(_is_known(kind.__call__), "__call__")
        self.need(kind._call_impl is nn.Module._call_impl, "_call_impl")
        for base in _bases_of(kind):
            self.need(_is_known(vars(base)["forward"]), "forward")
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

    def known(self, kind: type, watched: list[Any], typed: tuple[Any, ...], *homes: dict) -> Known:
        """What was collected, of a module of class ``kind``.

        Args:
            watched: what must keep its attributes.
            typed: what must keep its class.
            homes: the attributes of those that hold the plan.
        """
        others = [fact for fact in self.facts if not any(fact[0] is home for home in homes)]
        dicts, keys, values = zip(*others, strict=True)
        own = []
        for home in homes:
            entries = [(key, value) for held, key, value in self.facts if held is home]
            own.append((tuple(key for key, _ in entries), tuple(value for _, value in entries)))
        kinds = tuple({kind, *map(type, self.modules)})
        bases = tuple({base for each in kinds for base in _bases_of(each)})
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
            runs=tuple(map(_runs_of, kinds)),
            bases=bases,
            forwards=tuple(map(_forward_of, bases)),
            own=tuple(own),
        )


def is_intercepted(given: tuple[Tensor, ...]) -> bool:
    """Whether somebody would see the calls of the modules and of their functions."""
    return (
        needs_dispatch(given)
        or torch.is_autocast_enabled("cpu")
        or _has_global_hook()
        or _len_function_modes() > 0
        or _functions() != _FUNCTIONS
    )
