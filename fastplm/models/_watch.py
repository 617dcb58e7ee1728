"""Modules of a frozen model: they are looked at once, and from then on watched.

Each has a subclass of its class, and dicts in the place of its dicts, that thaw the model before
they change anything. So a call checks nothing of the modules. Weights are read where they lie, as
they are at that moment.
"""

from __future__ import annotations

import functools
import operator
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import logging

from fastplm._modes import needs_dispatch
from fastplm.hf import NAME
from fastplm.models._layer import activation_of, stand_for_frozen
from fastplm.nn import Linear, LinearInt8
from fastplm.nn._rows import RECORDER, THAWED, is_known, kind_of

LINEAR = (Linear, LinearInt8)
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_DICTS = ("_parameters", "_modules", "_buffers", *_HOOKS)
#: What an instance may have in the place of its class's: a module that has it is not frozen.
_METHODS = (
    *("forward", "_call_impl", "_compiled_call_impl"),
    *("feed_forward_chunk", "_create_attention_masks", "create_position_ids_from_input_ids"),
)
_RECORDS = "_output_capturing_hooks_installed"
lock = threading.RLock()


def thaw(model: nn.Module, why: str) -> None:
    """Undo ``freeze`` of all that modules of ``model`` are part of."""
    for module in list(model.modules()):
        freeze_of(module).thaw(why)


class UnsupportedModule(Exception):
    """Why one call cannot stand for a module."""


def require(right: bool, why: str, *details: Any) -> None:
    if not right:
        raise UnsupportedModule(why.format(*details))


# --- watched modules ------------------------------------------------------------------------------


class Freeze:
    """What one call of ``freeze`` froze. It keeps no module alive."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.modules: list[weakref.ref[nn.Module]] = []

    def watch(
        self,
        module: nn.Module,
        plan: Any = None,
        call: Callable[..., Any] | None = None,
        layers_call: Callable[..., Any] | None = None,
    ) -> None:
        """Thaw before the module changes; a module with a plan runs by ``call`` where it can."""
        attributes: Any = vars(module)
        for name in _DICTS:
            if type(attributes[name]) not in _WATCHED.values():
                attributes[name] = _WATCHED.get(type(attributes[name]), _WatchedDict)(
                    attributes[name]
                )
            attributes[name].freeze = self
        watched = attributes if type(attributes) is _WatchedDict else _WatchedDict(attributes)
        watched.freeze, watched.plan = self, plan
        object.__setattr__(module, "__dict__", watched)
        kind = kind_of(module)
        object.__setattr__(module, "__class__", _frozen_class(kind, call, layers_call))
        self.modules.append(weakref.ref(module))

    def end(self) -> None:
        """Give all modules their classes back. Their dicts stay, as others may hold them."""
        modules, self.modules = self.modules, []
        for module in filter(None, (reference() for reference in modules)):
            attributes: Any = vars(module)
            held: Any
            for held in (attributes, *map(attributes.get, _DICTS)):
                if type(held) in _WATCHED.values():
                    held.freeze = held.plan = None
            object.__setattr__(module, "__class__", kind_of(module))

    def thaw(self, why: str, *details: Any) -> None:
        with lock:
            is_frozen = bool(self.modules)
            self.end()
        if is_frozen:
            logging.get_logger(__name__).warning(
                "%s is not frozen any more, as %s: its modules run one by one. Call fastplm.freeze "
                "again when it is as it shall be.",
                *(self.name, why.format(*details)),
            )


_NOTHING = Freeze("")


def freeze_of(module: nn.Module) -> Freeze:
    return getattr(vars(module), "freeze", None) or _NOTHING


def plan_in(module: nn.Module) -> Any:
    """The plan of a frozen module; None of others."""
    return getattr(vars(module), "plan", None)


_WRITE = (
    *("__setitem__", "__delitem__", "__ior__", "clear", "pop", "popitem"),
    *("setdefault", "update", "move_to_end"),
)


def _watched(kind: Any) -> Any:
    """A subclass of a dict that thaws before it is written."""

    def writer(name: str) -> Any:
        write = getattr(kind, name)

        @functools.wraps(write)
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            same = name == "__setitem__" and self.get(args[0], _NOTHING) is args[1]
            if self.freeze is not None and not (same or _records(*args[1:])):
                self.freeze.thaw("`{}` was written", *args[:1] or ("a dict",))
            return write(self, *args, **kwargs)

        return method

    body: dict[str, Any] = {"freeze": None, "plan": None, "copy": lambda self: kind(self)}
    body |= {name: writer(name) for name in _WRITE if hasattr(kind, name)}
    body["__reduce_ex__"] = lambda self, protocol: (kind, (), None, None, iter(self.items()))
    return type("_Watched", (kind,), body)


def _records(*values: Any) -> bool:
    return any(getattr(value, "__module__", None) == RECORDER for value in values)


_WatchedDict = _watched(dict)
_WATCHED: dict[type, Any] = {dict: _WatchedDict, OrderedDict: _watched(OrderedDict)}


@functools.cache
def _frozen_class(
    kind: Any, call: Callable[..., Any] | None, layers_call: Callable[..., Any] | None
) -> type:
    """The subclass of frozen modules. ``call`` gets what ``forward`` gets, and returns its result,
    or None if the modules must run."""

    def set_attribute(self: Any, name: str, value: Any) -> None:
        if vars(self).get(name, _NOTHING) is value:  # as by ``eval()``
            return
        if name != _RECORDS:
            freeze_of(self).thaw("`{}` of its {} was set", name, kind.__name__)
        kind.__setattr__(self, name, value)

    def delete_attribute(self: Any, name: str) -> None:
        freeze_of(self).thaw("`{}` of its {} was deleted", name, kind.__name__)
        kind.__delattr__(self, name)

    def apply(self: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        tensors = (*self._parameters.values(), *self._buffers.values())
        if any(one is not None and function(one) is not one for one in tensors):
            freeze_of(self).thaw("its {} was moved or given another dtype", kind.__name__)
        return kind._apply(self, function, *args, **kwargs)

    def requires_grad(self: Any, requires_grad: bool = True) -> Any:
        if requires_grad:
            freeze_of(self).thaw("its {} shall have gradients", kind.__name__)
        return kind.requires_grad_(self, requires_grad)

    def reduce(self: Any, protocol: Any) -> Any:
        return object.__new__, (kind_of(self),), dict(vars(self))

    body: dict[str, Any] = {
        "__setattr__": set_attribute,
        "__delattr__": delete_attribute,
        "__reduce_ex__": reduce,
        "_apply": apply,
        "requires_grad_": requires_grad,
    }
    if call is not None:

        @functools.wraps(kind.forward)
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            if not torch.compiler.is_compiling():
                out = call(self, *args, **kwargs)
                if out is not None:
                    return out
            return kind.forward(self, *args, **kwargs)

        body["forward"] = forward
    if layers_call is not None:
        body["_layers_in_one_call"] = layers_call
    # With one of fastplm ``FastplmModel.__init_subclass__`` would register it; it is set below.
    body["__module__"] = ""
    frozen: Any = type(kind.__name__, (kind,), body)
    frozen.__module__, frozen.__qualname__ = kind.__module__, kind.__qualname__
    THAWED[frozen], _OWN[frozen] = kind, vars(frozen).get("forward")
    stand_for_frozen(frozen, kind)
    return frozen


# --- what is looked at once -----------------------------------------------------------------------


def tensor(module: nn.Module, held: dict[str, Any], name: str, kind: type = nn.Parameter) -> Tensor:
    found: Any = held.get(name)
    right: bool = type(found) is kind and name not in vars(module)
    right = right and found.layout is torch.strided and found.is_cpu
    require(right, "a `{}` is not an ordinary one on a CPU", name)
    return found


def tensors(module: Any, biased: bool = True) -> list[Tensor]:
    """A weight, or one in 8 bits with its scale; and the bias."""
    if type(module) is LinearInt8:
        found = [tensor(module, module._buffers, name, Tensor) for name in ("packed", "scale")]
    else:
        found = [tensor(module, module._parameters, "weight")]
    if biased:
        return [*found, tensor(module, module._parameters, "bias")]
    require(module._parameters.get("bias") is None, "a module has a bias")
    return found


def child(parent: nn.Module, name: str, *kinds: type) -> Any:
    """A module of just one of these classes."""
    return of_kind(parent._modules.get(name), name, *kinds)


def of_kind(module: Any, name: str, *kinds: type) -> Any:
    require(type(module) in kinds, "its `{}` is a {}", name, type(module).__name__)
    return module


def norm(parent: nn.Module, name: str, weights: list[Tensor]) -> float:
    """Add the tensors of a norm; its epsilon."""
    return norm_of(parent._modules.get(name), weights, name)


def norm_of(module: Any, weights: list[Tensor], name: str = "norm") -> float:
    weights += tensors(of_kind(module, name, nn.LayerNorm))
    require(module.normalized_shape == weights[-1].shape, "a norm is of another shape")
    return module.eps


def gelu_of(activation: Any) -> str:
    """The form of a GELU, as ``ops.gelu`` calls it."""
    form = activation_of(activation)
    require(form in ("none", "tanh"), "its activation is a {}", type(activation).__name__)
    return str(form)


_ATTENTION = "_attn_implementation_internal"
_RECORDED = ("output_hidden_states", "_output_attentions")
_FLAGS = (_ATTENTION, *_RECORDED, "return_dict", "is_decoder", "chunk_size_feed_forward")
_RUNS = operator.attrgetter("forward", "__call__", "_call_impl")
#: The methods ``forward`` that classes of frozen modules were made with; None = the thawed class's.
_OWN: dict[type, Any] = {}


class Facts(NamedTuple):
    """What nothing watches, so each call looks at it."""

    settings: dict[str, Any]  # of a configuration, with these flags
    flags: tuple[Any, ...]
    kinds: tuple[type, ...]  # the classes of modules and their bases, which they may call ...
    runs: tuple[Any, ...]  # ... and how they run

    def with_frozen(self, root: nn.Module) -> Facts:
        """The same with the classes that the modules in ``root`` have now that they are watched:
        these are what a user finds by ``type(module)``, and may give another ``forward``."""
        frozen = tuple({type(module) for module in root.modules()})
        thawed = [(kind, *_RUNS(THAWED[kind])) for kind in frozen]
        runs = tuple((_OWN[kind] or forward, *others) for kind, forward, *others in thawed)
        return self._replace(kinds=self.kinds + frozen, runs=self.runs + runs)

    def may_call(self, given: tuple[Tensor, ...]) -> bool:
        """Whether no gradient is needed, and nobody would see the calls of the modules."""
        return not (
            torch.is_grad_enabled()
            or needs_dispatch(given)
            or torch.is_autocast_enabled("cpu")
            or _has_global_hook()
            or _len_function_modes() > 0
            or tuple(map(self.settings.get, _FLAGS)) != self.flags
            or _functions() != _FUNCTIONS
            or tuple(map(_RUNS, self.kinds)) != self.runs
        )


def facts_of(root: nn.Module, config: Any) -> Facts:
    """These facts of all modules in ``root``; raises unless they are as their classes made them."""
    bases: Any = {base for module in root.modules() for base in type(module).__mro__}
    kinds = tuple(base for base in bases if issubclass(base, nn.Module))
    for kind in kinds:
        known = kind._call_impl is nn.Module._call_impl
        known = known and is_known(kind.__call__) and is_known(kind.forward)
        require(known, "the class {} runs in a way of its own", kind.__name__)
    for module in root.modules():
        attributes = vars(module)
        hidden = attributes.keys() & {
            *module._modules,
            *module._parameters,
            *module._buffers,
            *_METHODS,
        }
        require(all(attributes[name] is None for name in hidden), "{} is replaced", hidden)
        hooks = (hook for name in _HOOKS for hook in attributes[name].values())
        require(all(map(_records, hooks)), "there is a hook")
        require(not module.training, "a module trains")
    settings = object.__getattribute__(config, "__dict__")
    require(settings.get(_ATTENTION) == NAME, "its attention is not fastplm's")
    require(not any(map(settings.get, _RECORDED)), "its configuration asks for more outputs")
    return Facts(settings, tuple(map(settings.get, _FLAGS)), kinds, tuple(map(_RUNS, kinds)))


def _functions() -> tuple[Callable[..., Any], ...]:
    """What runs modules and what they call, which a profiler may replace."""
    return (
        *(F.linear, F.gelu, F.relu, F.layer_norm, F.embedding, F.dropout),
        F.scaled_dot_product_attention,
        ALL_ATTENTION_FUNCTIONS[NAME],
    )


_FUNCTIONS = _functions()
_has_global_hook = torch.nn.modules.module._has_any_global_hook
_len_function_modes = torch._C._len_torch_function_stack
#: What the call of a module gets, and the methods for ``Freeze.watch``.
Plans = Iterator[tuple[Any, Iterable[Callable[..., Any]]]]
