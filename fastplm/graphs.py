"""CUDA graphs of training steps: a whole forward and backward is one launch.

    step = GraphedStep(model, optimizer, max_grad_norm=1.0)
    for batch in batches:  # of collator(unpad=True)
        loss = step(**batch)

A graph repeats the kernels of one step, with the addresses and numbers that it had then. So a step
is replayed only if all that it depends on is as it was, and what changes from step to step lies
where the graph reads it: the batch and the learning rate are copied there, and PyTorch's generator
gives each replay new random numbers. Everything else that changes makes a new graph.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook
from transformers.utils import logging

from fastplm._backends import requested
from fastplm._registry import OPS
from fastplm.errors import check
from fastplm.models._base import FastplmModel

_WHERE = "GraphedStep"
#: What a graphed optimizer may be: PyTorch clips inside of their one kernel.
_OPTIMIZERS = (torch.optim.AdamW, torch.optim.Adam)
#: The most shapes of which there are graphs.
_MOST = 64


class _Graph(NamedTuple):
    replay: Callable[[], None]
    inputs: list[Tensor]
    outputs: Any
    trained: list[nn.Parameter]  # those that get a gradient


class GraphedStep:
    """The training step of a model, replayed as CUDA graphs.

    The first batch of its shapes is computed as usual, the second is captured, and from then on a
    step has three launches: forward with backward, the norm of the gradient, the optimizer. What
    would make a replay wrong makes new graphs: ``train()`` or ``eval()``, a weight that was
    replaced or has another dtype, ``requires_grad``, an attribute of a module or its configuration,
    autocast, a backend, a setting or a loaded state of the optimizer. Learning rates are copied.

    A step is computed as usual, and one line says so, on a CPU, in several processes, with hooks or
    gradient checkpointing, and for a batch whose rows the model must count: one with an
    ``attention_mask`` and without ``unpad``.

    Args:
        model: on one GPU.
        optimizer: ``torch.optim.AdamW`` or ``Adam`` with ``fused=True``. Any other, or None: only
            forward and backward are graphs.
        max_grad_norm: the norm to which the gradient is clipped; None = not clipped.
        function: what is captured: a function of the inputs that calls ``backward`` and returns
            tensors, in tuples, lists and dicts. Default: the loss of ``model(**inputs)``.
        say: prints a line. Default: Transformers' logger.

    Attributes:
        able: whether the last batch was one that can be replayed.

    Raises:
        ArgumentValueError: a ``max_grad_norm`` that is not above 0.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        max_grad_norm: float | None = None,
        function: Callable[..., Any] | None = None,
        say: Callable[[str], object] | None = None,
    ) -> None:
        fits = max_grad_norm is None or max_grad_norm > 0
        fix = "Leave it out for no clipping."
        check(fits, _WHERE, "max_grad_norm", max_grad_norm, "above 0, or None", fix)
        self.model, self.optimizer, self.max_grad_norm = model, optimizer, max_grad_norm
        self._function = self._trained_by_loss if function is None else function
        self._say = logging.get_logger(__name__).warning_once if say is None else say
        self._said: set[str] = set()
        self._state: _State | None = None
        # A graph for each kind of batch; None: it was met once; a text: why there is no graph.
        self._graphs: dict[Any, _Graph | str | None] = {}
        self._gradients: dict[nn.Parameter, Tensor] = {}
        self._updates: dict[str, _Update] = {}
        self._rates: list[Tensor] = []
        self._scale: Tensor | None = None
        self._clipped = self.able = False
        self._beside = _Beside()

    def __call__(self, **inputs: Any) -> Any:
        """A whole step: forward, backward, clipping, the optimizer; the gradients are then None.

        Returns:
            The loss, 0-d, detached; or what ``function`` returns.

        Raises:
            ArgumentValueError: a capacity (``unpad=N``) below the tokens of a batch on the CPU.
        """
        outputs = self.backward(**inputs)
        self.update()
        self.model.zero_grad()
        return outputs

    def _trained_by_loss(self, **inputs: Any) -> Tensor:
        loss = self.model(**inputs).loss
        loss.backward()
        return loss

    # --- forward and backward ---------------------------------------------------------------------

    def backward(self, **inputs: Any) -> Any:
        """Forward and backward, which adds gradients to ``.grad`` as ``loss.backward()`` does.

        So several calls before ``update`` accumulate gradients. A batch may be on the CPU.
        """
        _check_capacity(inputs)
        self._clipped = False  # of a gradient that was not used
        state = _State(self.model)
        device, kind, given = state.device, *_split(inputs)
        reason = state.reason or self._why_not(inputs, given, device)
        self.able = reason is None
        if reason is not None:
            self._tell(f"{reason}, so steps are computed without CUDA graphs")
            return self._as_usual(kind, given, device)
        if self._state is None or not state.equals(self._state):
            self._graphs.clear()
            self._gradients.clear()
            self._state = state
        weights = state.weights
        first = all(weight.grad is None for weight in weights)
        key = (kind, first, _settings(device))
        if key not in self._graphs:
            if len(self._graphs) < _MOST:
                self._graphs[key] = None
            else:
                fix = "pass unpad=True to the collator, whose batches have few shapes"
                self._tell(f"A batch has a shape beyond {_MOST} others and no CUDA graph: {fix}")
            return self._as_usual(kind, given, device)
        graph = self._graphs[key] or self._captured(kind, given, device, weights, first)
        self._graphs[key] = graph
        if isinstance(graph, str):
            self._tell(f"A step cannot be captured ({graph}) and is computed as usual")
            return self._as_usual(kind, given, device)
        for ours, theirs in zip(graph.inputs, given, strict=True):
            ours.copy_(theirs, non_blocking=True)
        for weight in () if first else graph.trained:
            ours = self._gradients[weight]  # where the graph adds to the gradient
            if weight.grad is None:
                ours.zero_()
            elif weight.grad is not ours:
                ours.copy_(weight.grad)
        graph.replay()
        for weight in graph.trained:
            weight.grad = self._gradients[weight]
        return _each(graph.outputs, Tensor.clone)  # which no later step overwrites

    def _why_not(self, inputs: dict[str, Any], given: list[Tensor], device: Any) -> str | None:
        """Why a batch cannot be replayed; None if it can."""
        if not _has_graphs(device):
            return f"The model is on {device}, not on the current GPU"
        if any(tensor.requires_grad for tensor in given):
            return "An input needs a gradient"
        mask, unpad, model = inputs.get("attention_mask"), inputs.get("unpad"), self.model
        counts = mask is not None and (unpad is None or unpad is True)
        if counts and isinstance(model, FastplmModel) and model._has_our_attention():
            return "A batch has an attention_mask and no unpad (collators give it by unpad=True)"
        return None

    def _tell(self, line: str) -> None:
        if line not in self._said:
            self._said.add(line)
            self._say(f"{line}.")

    def _as_usual(self, kind: Any, given: list[Tensor], device: torch.device) -> Any:
        inputs = _joined(kind, iter([each.to(device, non_blocking=True) for each in given]))
        torch.clear_autocast_cache()  # an open block would give the weights of the last step
        with self._beside:
            outputs = _each(self._function(**inputs), Tensor.detach)
        torch.clear_autocast_cache()
        for weight in self._state.weights if self.able and self._state else ():
            # Not in a capture: the memory that a graph allocates is its scratch memory, too.
            if weight.grad is not None and weight not in self._gradients:
                self._gradients[weight] = torch.empty_like(weight.grad)
        return outputs

    def _captured(
        self, kind: Any, given: list[Tensor], device: torch.device, weights: list, first: bool
    ) -> _Graph | str:
        inputs = [torch.empty_like(each, device=device).copy_(each) for each in given]
        before = [weight.grad for weight in weights]

        def body() -> tuple[Any, list[nn.Parameter]]:
            torch.clear_autocast_cache()  # the graph reads the weights themselves
            outputs = _each(self._function(**_joined(kind, iter(inputs))), Tensor.detach)
            torch.clear_autocast_cache()
            trained = [weight for weight in weights if weight.grad is not None]
            found: list[Any] = [weight.grad for weight in trained]
            ours = [self._gradients[weight] for weight in trained]
            if first:
                torch._foreach_copy_(ours, found)
            else:
                torch._foreach_add_(ours, found)
            return outputs, trained

        for weight in weights:
            weight.grad = None
        try:
            replay, (outputs, trained) = self._beside.captured(body)
        except RuntimeError as error:
            return str(error).splitlines()[0]
        finally:
            for weight, grad in zip(weights, before, strict=True):
                weight.grad = grad
        return _Graph(replay, inputs, outputs, trained)

    # --- the optimizer ----------------------------------------------------------------------------

    def clip(self) -> Tensor | None:
        """The norm of the gradient, 0-d. It is clipped now, or by the ``update`` that follows."""
        if self.max_grad_norm is None:
            return None
        self._clipped = True
        found: list[Any] = [weight.grad for weight in self.model.parameters()]
        grads: list[Tensor] = [grad for grad in found if grad is not None]
        if not self._is_graphed() or not grads:
            return nn.utils.clip_grad_norm_(self.model.parameters(), self.max_grad_norm)
        if self._scale is None:
            self._scale = torch.ones((), device=grads[0].device)
        norm = functools.partial(self._norm, grads, self.max_grad_norm, self._scale)
        places = (self.max_grad_norm, *map(_place, grads))
        return self._replayed("norm", places, norm).clone()

    def update(self) -> None:
        """The step of the optimizer, with the gradient clipped."""
        if not self._clipped:
            self.clip()
        self._clipped = False
        if self.optimizer is None:
            return
        if not self._is_graphed():
            self.optimizer.step()
            return
        groups, places = self.optimizer.param_groups, [_place(self.max_grad_norm is None)]
        if len(self._rates) != len(groups):
            device = groups[0]["params"][0].device
            self._rates = [torch.zeros((), device=device) for _ in groups]
        for rate, group in zip(self._rates, groups, strict=True):
            if isinstance(group["lr"], Tensor):
                rate.copy_(group["lr"])
            else:
                rate.fill_(group["lr"])
            places += [(name, group[name]) for name in group if name not in ("params", "lr")]
            for weight in group["params"]:
                if weight.grad is not None:
                    state = self.optimizer.state.get(weight, {}).values()
                    places += map(_place, (weight, weight.grad, *state))
        self._replayed("step", tuple(places), self._stepped)

    def _is_graphed(self) -> bool:
        optimizer = self.optimizer
        if not self.able or optimizer is None:
            return False
        if type(optimizer) in _OPTIMIZERS and all(g.get("fused") for g in optimizer.param_groups):
            return not (optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)
        fix = "Make it torch.optim.AdamW(..., fused=True)"
        self._tell(f"{type(optimizer).__name__} is not a fused AdamW and steps as usual. {fix}")
        return False

    def _replayed(self, name: str, places: tuple, body: Callable[[], Any]) -> Any:
        """``body``, captured if it finds all tensors at these places for the second time."""
        update = self._updates.setdefault(name, _Update())
        if places != update.places:
            if places != update.met:
                update.met = places
                return body()
            update.replay, update.outputs = self._beside.captured(body)
            update.places = places
        update.replay()
        return update.outputs

    @staticmethod
    def _norm(grads: list[Tensor], most: float, scale: Tensor) -> Tensor:
        norm = nn.utils.get_total_norm(grads, foreach=True)
        # What gradients are divided by; 1e-6 as in PyTorch's clip_grad_norm_.
        scale.copy_(((norm + 1e-6) / most).clamp(min=1.0))
        return norm

    def _stepped(self) -> None:
        """The step with the learning rates and the clipping where a graph reads them."""
        optimizer: Any = self.optimizer
        before = [(group["lr"], group["capturable"]) for group in optimizer.param_groups]
        for rate, group in zip(self._rates, optimizer.param_groups, strict=True):
            group["lr"], group["capturable"] = rate, True
        if self._scale is not None and self.max_grad_norm is not None:
            optimizer.grad_scale, optimizer.found_inf = self._scale, torch.zeros_like(self._scale)
        try:
            optimizer.step()
        finally:
            optimizer.grad_scale = optimizer.found_inf = None
            for (rate, capturable), group in zip(before, optimizer.param_groups, strict=True):
                group["lr"], group["capturable"] = rate, capturable


class _Update:
    """A graph of the optimizer, and where all of its tensors are."""

    places: tuple | None = None
    met: tuple | None = None
    replay: Callable[[], None]
    outputs: Any = None


class _Beside:
    """A stream of its own, on which steps run and are captured: autograd keeps one to a weight."""

    def __init__(self) -> None:
        self._block = contextlib.ExitStack()
        self._stream: Any = None
        self._pool: Any = None

    def __enter__(self) -> None:
        if torch.cuda.is_available():
            self._stream = self._stream or torch.cuda.Stream()
            self._stream.wait_stream(torch.cuda.current_stream())
            self._block.enter_context(torch.cuda.stream(self._stream))

    def __exit__(self, *error: object) -> None:
        self._block.close()
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)

    def captured(self, body: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """(what replays ``body``, its results, which each replay writes); it does not run now."""
        graph = torch.cuda.CUDAGraph()
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        # Not "global": a thread of a DataLoader may lock memory meanwhile.
        mode = "thread_local"
        with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode=mode):
            outputs = body()
        return graph.replay, outputs


def _has_graphs(device: torch.device) -> bool:
    return device.type == "cuda" and device.index == torch.cuda.current_device()


class _State:
    """What a step of a model depends on beside its batch, and why it cannot be a graph.

    Every step makes one, so it takes the fast way through the modules.
    """

    def __init__(self, model: nn.Module) -> None:
        self.reason: str | None = "A module has global hooks" if _has_any_global_hook() else None
        self.weights: list[nn.Parameter] = []  # those that are trained
        self._values: list[Any] = []
        self._places: list[Any] = []
        if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            self.reason = f"The model is in {type(model).__name__}"
        elif torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
            self.reason = "There are several processes"
        modules: list[nn.Module | None] = [model]
        tensors: dict[int, Tensor] = {}
        seen, configs, checkpoints = {id(None)}, {}, False
        while modules:
            module = modules.pop()
            if id(module) in seen:
                continue
            seen.add(id(module))
            own = vars(module)
            self._values.append(type(module))
            self._values += own.values()
            modules += own["_modules"].values()
            for owned in (own["_parameters"], own["_buffers"]):
                for tensor in owned.values():
                    tensors[id(tensor)] = tensor
            if "config" in own:
                configs[id(own["config"])] = own["config"]
            hooks = own["_forward_hooks"] or own["_forward_pre_hooks"]
            if hooks or own["_backward_hooks"] or own["_backward_pre_hooks"]:
                self.reason = f"A {type(module).__name__} has hooks"
            if own.get("gradient_checkpointing") and own["training"]:
                checkpoints = True
        if checkpoints:
            self.reason = "Gradient checkpointing is on"
        tensors.pop(id(None), None)
        for tensor in tensors.values():
            self._values.append(tensor)
            self._places.append((*_place(tensor), tensor.requires_grad))
            if tensor.requires_grad:
                self.weights.append(tensor)  # type: ignore[arg-type]
                if tensor._backward_hooks or tensor._post_accumulate_grad_hooks:
                    self.reason = "A weight has hooks"
        for config in configs.values():
            held = config if isinstance(config, dict) else getattr(config, "__dict__", {})
            self._values += held.values()
            if any(str(name).endswith("layerdrop") and p for name, p in held.items()):
                self.reason = "Python draws which layers are dropped (layerdrop)"
        self.device = next(iter(tensors.values())).device

    def equals(self, other: _State) -> bool:
        """Whether all attributes are the same objects, and all tensors lie at the same places."""
        same = len(self._values) == len(other._values) and self._places == other._places
        return same and all(map(operator.is_, self._values, other._values))


def _settings(device: torch.device) -> tuple:
    """What the whole process may have set that changes a step."""
    kind = device.type
    return (
        torch.is_autocast_enabled(kind),
        torch.get_autocast_dtype(kind),
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
        *(requested(op) for op in OPS),
    )


def _place(tensor: Any) -> tuple:
    """Where a tensor is and what is there; a number is itself."""
    if not isinstance(tensor, Tensor):
        return (tensor,)
    return tensor.data_ptr(), tensor.dtype, tensor.numel(), tensor.stride()


def _split(value: Any) -> tuple[Any, list[Tensor]]:
    """(a value with the shape in place of each tensor, which can be a key; the tensors)."""
    tensors: list[Tensor] = []

    def split(value: Any) -> Any:
        if isinstance(value, Tensor):
            tensors.append(value)
            return Tensor, value.shape, value.dtype
        if is_dataclass(value) and not isinstance(value, type):
            held = {field.name: getattr(value, field.name) for field in fields(value)}
            return fields, type(value), split(held | getattr(value, "__dict__", {}))
        if isinstance(value, dict):
            pairs = tuple((name, split(each)) for name, each in value.items())
            return dict, type(value), getattr(value, "default_factory", None), pairs
        if isinstance(value, (list, tuple)):
            return tuple, type(value), tuple(map(split, value))
        return type(value), value

    return split(value), tensors


def _joined(kind: Any, tensors: Iterator[Tensor]) -> Any:
    """The inverse of ``_split``, with other tensors."""
    if kind[0] is Tensor:
        return next(tensors)
    if kind[0] is fields:
        made, held = kind[1], _joined(kind[2], tensors)
        if issubclass(made, dict):  # an output of Transformers
            return made(**held)
        made = made.__new__(made)
        for name, each in held.items():
            object.__setattr__(made, name, each)
        return made
    if kind[0] is dict:
        made = kind[1]() if kind[2] is None else kind[1](kind[2])
        made.update((name, _joined(each, tensors)) for name, each in kind[3])
        return made
    if kind[0] is tuple:
        each = [_joined(one, tensors) for one in kind[2]]
        return kind[1](*each) if hasattr(kind[1], "_fields") else kind[1](each)
    return kind[1]


def _each(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """The value with ``function`` of each tensor in it."""
    kind, tensors = _split(value)
    return _joined(kind, map(function, tensors))


def _check_capacity(inputs: dict[str, Any]) -> None:
    """Before any kernel runs: on a GPU a batch that does not fit ends the process."""
    mask, unpad = inputs.get("attention_mask"), inputs.get("unpad")
    if type(unpad) is int and isinstance(mask, Tensor) and mask.device.type == "cpu":
        tokens = int((mask != 0).sum())
        got, expected = f"{unpad} for a batch of {tokens} tokens", "at least the number of tokens"
        check(tokens <= unpad, _WHERE, "unpad", got, expected, "Raise it.")
