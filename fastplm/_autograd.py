"""The gradients of ops: what a forward saves, and its backward, as autograd functions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch.autograd import forward_ad

from fastplm._modes import is_batched, needs_dispatch, transform
from fastplm.errors import UnsupportedError


def outside_autocast(function: Any, *arguments: Any) -> Any:
    """Run a function without autocast: the public function has already cast the arguments."""
    if torch._C._is_any_autocast_enabled():
        with torch._C._DisableAutocast():
            return function(*arguments)
    return function(*arguments)


class Gradient:
    """The autograd formula that follows from the declaration of an op.

    Args:
        op, results, gradients: see ``Op``.
        unused: ``unused(call, outputs, needs, backend)``, the names of the tensors in ``op.saved``
            that the backward of this call does not read; ``needs`` as ``ctx.needs_input_grad``.
        tracked: names of further outputs that are not marked as non-differentiable.
        second: ``second(grad, saved, backend)``, the gradients as a differentiable formula, for
            gradients of gradients. Without it these raise an error.
        finish: ``finish(gradients, saved)``, of what a backward returned; default: as they are.
    """

    def __init__(
        self,
        op: Any,
        results: tuple[str, ...],
        gradients: tuple[str, ...],
        *,
        unused: Callable[..., Sequence[str]] | None = None,
        tracked: tuple[str, ...] = (),
        second: Callable[..., Any] | None = None,
        finish: Callable[..., Any] | None = None,
    ) -> None:
        self.op, self.unused, self.second, self.finish = op, unused, second, finish
        names, saved = op.arguments.names, op.saved.names
        self.arguments, self.outputs = len(names), len(results)
        # What may be saved: what a forward has, and properties of the call. A gradient of a further
        # output is not there yet.
        values = [*names, "backend", *results, *(f"need_{name}" for name in names), ""]
        grads = [f"grad_{name}" for name in results[1:]]
        self.properties = [name for name in saved if name not in (*values, *grads)]
        values += self.properties
        self.places = {name: place for place, name in enumerate(saved)}
        self.sources = [values.index("" if name in grads else name) for name in saved]
        #: The place among what is saved of the gradient of each further output; None if not there.
        self.further = [self.places.get(name) for name in grads]
        self.tensors = [
            place
            for place, kind in enumerate(op.saved.types)
            if kind.startswith("Tensor") and place not in self.further
        ]
        self.of_arguments = [gradients.index(name) if name in gradients else None for name in names]
        tracked = (results[0], *tracked)
        tracked += tuple(name for name in results if f"grad_{name}" in saved)
        self.nondifferentiable = [at for at, name in enumerate(results) if name not in tracked]

    def setup(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """For the operator's kernel of autograd, which PyTorch makes."""
        self.save(ctx, self.op.call(*inputs[:-1]), inputs[-1], output)

    def function(self) -> Callable[..., Any]:
        """The same for eager calls: an autograd function whose forward runs the backend itself."""
        op, save = self.op, self.save

        class Direct(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, *arguments: Any) -> Any:
                call, backend = op.call(*arguments[:-1]), arguments[-1]
                output = op.backends[backend].forward(call)
                save(ctx, call, backend, output)
                return output

        Direct.backward = staticmethod(self.backward)  # type: ignore
        return applied(Direct)

    def save(self, ctx: Any, call: Any, backend: str, output: Any) -> None:
        outputs = (output,) if self.outputs == 1 else output
        needs = ctx.needs_input_grad[: self.arguments]
        values = [*call, backend, *outputs, *needs, None]
        for name in self.properties:
            values.append(getattr(call, name))
        saved = [*map(values.__getitem__, self.sources)]
        if self.unused is not None:
            for name in self.unused(call, outputs, needs, backend):
                saved[self.places[name]] = None
        ctx.save_for_backward(*map(saved.__getitem__, self.tensors))
        for place in self.tensors:
            saved[place] = None
        ctx.saved, ctx.backend = saved, backend
        if self.outputs > 1:
            first = outputs[0]
            ctx.zeros = partial(torch.zeros, first.shape, dtype=first.dtype, device=first.device)
            ctx.mark_non_differentiable(*map(outputs.__getitem__, self.nondifferentiable))
            # Otherwise autograd would allocate zeros as the gradient of each such output.
            ctx.set_materialize_grads(False)

    def backward(
        self, ctx: Any, grad: torch.Tensor | None, *further: Any, tensors: Any = None
    ) -> tuple[Any, ...]:
        op, backend, arguments = self.op, ctx.backend, [*ctx.saved]
        results: list[Any] = [None] * (self.arguments + 1)
        batched = grad is not None and is_batched(grad)
        for place, one in zip(self.further, further, strict=True):
            if place is not None:
                arguments[place] = one
                batched = batched or (one is not None and is_batched(one))
        if grad is None:
            if all(place is None or arguments[place] is None for place in self.further):
                return tuple(results)
            grad = ctx.zeros()
        # Unpacked only once: inside a checkpoint, a second ``ctx.saved_tensors`` is an error.
        tensors = ctx.saved_tensors if tensors is None else tensors
        if self.second is None and torch.is_grad_enabled():  # create_graph=True
            compute = partial(self.backward, ctx, grad, *further, tensors=tensors)
            return _once(op.name, compute, (grad, *further, *tensors))
        for place, one in zip(self.tensors, tensors, strict=True):
            arguments[place] = one
        saved = op.saved.build(arguments)
        if self.second is not None and torch.is_grad_enabled():
            grads = self.second(grad, saved, backend)
        elif needs_dispatch((grad, *arguments)) or batched:
            grads = op._backward_operator(grad, *arguments, backend)
        elif torch._C._is_any_autocast_enabled():
            grads = outside_autocast(op.backends[backend].backward, grad, saved)
        else:
            grads = op.backends[backend].backward(grad, saved)
        if self.finish is not None:
            grads = self.finish(grads, saved)
        grads = (grads,) if isinstance(grads, torch.Tensor) else grads
        for at, place in enumerate(self.of_arguments):
            if place is not None and ctx.needs_input_grad[at]:
                results[at] = grads[place]
        return tuple(results)


def _once(op: str, compute: Callable[[], Any], read: Iterable[Any]) -> tuple[Any, ...]:
    """Gradients that raise an error, naming ``op``, if they are differentiated.

    Otherwise autograd would treat them as constants, and a gradient penalty as 0.

    Args:
        compute: returns the gradients.
        read: the tensors, or None, on which they depend.
    """
    with torch.no_grad():
        results = compute()
    read = [one for one in read if one is not None and one.requires_grad]
    if not read:
        return results
    return tuple(
        None if one is None else _RaiseOnDoubleBackward.apply(op, one, *read) for one in results
    )


class _RaiseOnDoubleBackward(torch.autograd.Function):
    """The identity on a gradient; its backward raises an error. It also takes what the gradient
    depends on, so that autograd calls that backward."""

    @staticmethod
    def forward(ctx: Any, op: str, gradient: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        ctx.op = op
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise UnsupportedError(
            f"{ctx.op}: its gradient has no gradient of its own (create_graph=True). Run what is "
            f"differentiated twice inside `with fastplm.use_backend('eager', '{ctx.op}')`."
        )


def applied(kind: type[torch.autograd.Function]) -> Callable[..., Any]:
    """``kind.apply`` where no transform of ``torch.func`` is, in half of the time."""
    return super(torch.autograd.Function, kind).apply  # type: ignore[misc]


def once_differentiable(op: str) -> Callable[[Callable[..., Any]], Any]:
    """For ``backward(ctx, saved tensors, *gradients)``: its results have no gradient, and to ask
    for one, or for a batch of gradients, is an error that names ``op``."""

    def decorate(backward: Callable[..., Any]) -> Any:
        def call(ctx: Any, *grads: Any) -> Any:
            refused = transform() is not None or forward_ad._current_level >= 0
            for grad in grads:
                refused = refused or (grad is not None and is_batched(grad))
            if refused:
                raise UnsupportedError(
                    f"{op}: its gradients come one at a time, and outside of torch.func (vmap, "
                    "is_grads_batched=True, vectorize=True). Compute them in a loop, or run the "
                    "model inside `with fastplm.use_backend('eager')`."
                )
            saved = ctx.saved_tensors
            if torch.is_grad_enabled():
                return _once(op, partial(backward, ctx, saved, *grads), (*grads, *saved))
            return backward(ctx, saved, *grads)

        return call

    return decorate
