"""The one place that calls ``torch.library``: schema, fake, autograd and backends of each op.

An op ``<op>`` has a public function ``ops.<op>`` and, for its fused backends, the opaque operators
``fastplm::<op>_fwd`` and ``fastplm::<op>_bwd`` (one operator ``fastplm::<op>`` if it has no
gradient). The last argument of their schemas is ``str backend``. The eager backend is not behind an
operator: ``ops.<op>`` calls the reference itself, so it stays ordinary differentiable PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch.autograd import forward_ad

from fastplm._backends import (
    _DECISIONS,
    BACKENDS,
    DIFFERENTIABLE,
    OP_NAMES,
    Backend,
    accepts_all,
    requested,
    resolve,
)
from fastplm._declare import Signature, from_fields
from fastplm._modes import (
    TENSORS,
    is_batched,
    is_exporting,
    is_traced,
    is_transformed,
    needs_dispatch,
    needs_plain_pytorch,
)
from fastplm._rules import slower
from fastplm.errors import UnsupportedError

_LIBRARY = torch.library.Library("fastplm", "DEF")
_TRANSFORMED = "FuncTorchDynamicLayerFrontMode"
#: Every op by name, in the order of definition.
OPS: dict[str, Op] = {}


class Op:
    """An op: one declaration, and its backends.

    Args:
        name: the name of the op, and of its files in every folder.
        call: a ``NamedTuple``, the arguments of the operator (see ``_declare``). It may have a
            method ``check(where)`` with checks that annotations cannot express, and a property
            ``packed``: whether the rows are packed.
        results: the names of the outputs. If the op has a gradient, the first one has one, and so
            have those named in ``saved``.
        fake: ``fake(call, backend)`` returns the outputs, allocated but not computed.
        reference: the eager reference, ``<op>_ref``.
        smoke: runs the op once on tiny inputs of a device (``smoke(device)``); used by
            ``fastplm info`` to say what works by trying it.
        eager: ``eager(call)`` runs the reference. Default: with the fields of its names.
        public: ``public(*call)``, with which ``layer`` runs a call. Default: run ``call`` itself.
        fast: ``fast(*arguments)``, the fast path of plain calls on a CPU, which has the same result
            with less Python code; None for other calls. The public function and ``layer`` try it.

    An op with a gradient also has

        saved: a ``NamedTuple``, what the backward reads beside the gradient of the first output.
            The name of a field says what it holds: an argument or output of the forward, a property
            of ``call``, or, as ``need_<argument>``, whether that argument requires a gradient, or,
            as ``grad_<output>``, the gradient of a further output (None if nothing depends on it).
            A field whose type is ``call`` holds all arguments.
        gradients: the names of the arguments whose gradients a backward returns, in its order.
        fake_backward: ``fake_backward(grad, saved)`` returns the gradients, allocated only.
        finish: ``finish(gradients, saved)``, of what a backward returned; default: as they are.
        unused: ``unused(call, outputs, needs, backend)``, the names of the tensors in ``saved``
            that the backward of this call does not read; ``needs`` as ``ctx.needs_input_grad``.
        tracked: names of further outputs that are not marked as non-differentiable.
        second: ``second(grad, saved, backend)``, the gradients as a differentiable formula, for
            gradients of gradients. Without it these raise an error.
    """

    def __init__(
        self,
        name: str,
        call: Any,
        *,
        results: tuple[str, ...] = ("out",),
        fake: Callable[..., Any],
        reference: Callable[..., Any],
        smoke: Callable[[torch.device], Any],
        eager: Callable[..., Any] | None = None,
        public: Callable[..., Any] | None = None,
        fast: Callable[..., Any] | None = None,
        saved: Any = None,
        gradients: tuple[str, ...] = (),
        fake_backward: Callable[..., Any] | None = None,
        finish: Callable[..., Any] | None = None,
        unused: Callable[..., Sequence[str]] | None = None,
        tracked: tuple[str, ...] = (),
        second: Callable[..., Any] | None = None,
    ) -> None:
        if name not in OP_NAMES or name in OPS:
            raise ValueError(f"op {name!r} is not the name of a file of ops/, or is defined twice")
        OPS[name] = self
        self.name, self.reference, self.smoke = name, reference, smoke
        self.call, self.arguments = call, Signature(call)
        self.fast, self.public = fast, public or (lambda *arguments: self(call(*arguments)))
        self.backends: dict[str, Backend] = {}
        self.backend("eager", forward=eager or from_fields(reference))
        self._extra_checks, self._may_be_packed = hasattr(call, "check"), hasattr(call, "packed")
        self._function: Callable[..., Any] | None = None

        def fake_forward(*arguments: Any) -> Any:
            call, backend = self.call(*arguments[:-1]), arguments[-1]
            self.check(call)
            return fake(call, backend)

        outputs = ", ".join(f"Tensor {result}" for result in results)
        outputs = "Tensor" if len(results) == 1 else f"({outputs})"
        schema = f"({self.arguments.schema}, str backend) -> {outputs}"
        if saved is None:
            self._operator = self._define(name, schema, self._run_forward, fake_forward)
            return
        self._operator = self._define(f"{name}_fwd", schema, self._run_forward, fake_forward)
        self.saved = Signature(saved)
        outputs = ", ".join(["Tensor"] * len(gradients))
        schema = (
            f"(Tensor grad, {self.saved.schema}, str backend) -> "
            f"{outputs if len(gradients) == 1 else f'({outputs})'}"
        )

        def fake_backward_of(grad: Any, *arguments: Any) -> Any:
            return fake_backward(grad, self.saved.build(arguments[:-1]))  # type: ignore[misc]

        self._backward_operator = self._define(
            f"{name}_bwd", schema, self._run_backward, fake_backward_of
        )
        gradient = _Gradient(self, results, gradients, unused, tracked, second, finish)
        self._function = gradient.function()
        torch.library.register_autograd(
            f"fastplm::{name}_fwd", gradient.backward, setup_context=gradient.setup, lib=_LIBRARY
        )

    def backend(
        self,
        name: str,
        *,
        forward: Callable[..., Any],
        backward: Callable[..., Any] | None = None,
        rejects: Callable[..., str | None] = accepts_all,
        **options: Any,
    ) -> None:
        """Add an implementation, see ``Backend``. "stock" calls PyTorch's own function for the op.

        ``resolve`` tries the backends in the order of ``BACKENDS``.
        """
        self.backends[name] = Backend(forward, backward, rejects, **options)
        self.backends = {
            known: self.backends[known] for known in BACKENDS if known in self.backends
        }

    def __call__(self, call: Any, backend: str = "") -> Any:
        """Run a call: check it, choose its backend, and run that.

        A call that does not need PyTorch's dispatcher runs the backend directly, inside an
        autograd function if a gradient is needed: dispatch to Python takes tens of microseconds.

        Args:
            backend: what ``resolve`` chose for this call, which was checked. Default: do both here.
        """
        if not backend:
            self.check(call)
            backend = self.resolve(call)
        # Without a gradient the operator takes the reference, too: a graph then has one node.
        if backend in DIFFERENTIABLE and (self._function is not None or is_transformed()):
            return self.backends[backend].forward(call)
        if needs_dispatch(call):
            _refuse_dtensors(self.name, call)
            return self._operator(*call, backend)
        if torch._C._is_any_autocast_enabled():
            with torch._C._DisableAutocast():
                return self(call, backend)
        if (
            self._function is not None
            and torch.is_grad_enabled()
            and not torch.is_inference_mode_enabled()  # inside of it gradients may be "enabled"
            and torch._C._any_requires_grad(*call)
        ):
            return self._function(*call, backend)
        return self.backends[backend].forward(call)

    def check(self, call: Any, where: str = "") -> None:
        """Raise an error that names the first argument that is not as declared."""
        where = where or self.name
        self.arguments.check(where, call, self._may_be_packed and call.packed)
        if self._extra_checks:
            call.check(where)

    def resolve(self, call: Any) -> str:
        """The backend that runs a call (see ``_backends.resolve``)."""
        return resolve(self.name, self.backends, call)

    def run(self, call: Any, backend: str) -> Any:
        """The outputs of a checked call, as constants: for functions with a gradient of their own,
        which runs ``gradients``."""
        if _DECISIONS.open:
            self.resolve(call)  # which records it
        if needs_dispatch(call):
            return self._operator(*call, backend)
        return self.backends[backend].forward(call)

    def gradients(self, grad: torch.Tensor, saved: Any, backend: str) -> Any:
        """The gradients of a call that ``run`` ran, from what its backward reads."""
        if needs_dispatch((grad, *saved)):
            return self._backward_operator(grad, *saved, backend)
        return self.backends[backend].backward(grad, saved)

    def layer(self, *arguments: Any) -> Any:
        """The result by csrc/ if it is faster than PyTorch's own function, which a layer calls if
        this is None.

        PyTorch's is the faster one for most calls of a model, so the rules are asked first; on
        another device than a CPU nothing is. It also runs calls that are transformed, or traced
        (unless the backend has ``compiled``).
        """
        cpp, first = self.backends["cpp"], arguments[0]
        if type(first) not in TENSORS or not first.is_cpu:  # the sizes of others may be unknown
            return None
        wanted = requested(self.name)
        if wanted != "auto" and wanted != "cpp":
            return None
        if is_traced():
            if is_exporting() or cpp.compiled is None:
                return None
            if wanted == "auto" and cpp.compiled(first.dtype) is not None:
                return None
        else:
            measured = cpp.measured(*arguments) if wanted == "auto" else None  # type: ignore[misc]
            if measured and slower(self.name, measured) is not None:
                return None
            out = None if self.fast is None else self.fast(*arguments)
            if out is not None:
                return out
        if (
            needs_plain_pytorch() is not None
            or any(isinstance(one, torch.Tensor) and type(one) not in TENSORS for one in arguments)
            or cpp.rejects(self.call(*arguments), forced=wanted == "cpp") is not None
        ):
            return None
        return self.public(*arguments)

    def _run_forward(self, *arguments: Any) -> Any:
        *inputs, backend = arguments
        if forward_ad._current_level >= 0:
            _refuse_transform(self.name)
        return _outside_autocast(self.backends[backend].forward, self.call(*inputs))

    def _run_backward(self, grad: torch.Tensor, *arguments: Any) -> Any:
        saved = self.saved.build(arguments[:-1])
        return _outside_autocast(self.backends[arguments[-1]].backward, grad, saved)

    def _define(
        self, operator: str, schema: str, run: Callable[..., Any], fake: Callable[..., Any]
    ) -> torch._ops.OpOverload:
        _LIBRARY.define(operator + schema, tags=(torch.Tag.pt2_compliant_tag,))
        _LIBRARY.impl(operator, run, "CompositeExplicitAutograd")
        # Where any transform of torch.func begins to handle a call.
        _LIBRARY.impl(operator, partial(_refuse_transform, operator), _TRANSFORMED)
        torch.library.register_fake(f"fastplm::{operator}", fake, lib=_LIBRARY)
        return getattr(torch.ops.fastplm, operator).default


def in_place(name: str, schema: str, run: Callable[..., None]) -> torch._ops.OpOverload:
    """Define ``fastplm::<name>``, which writes into its arguments and returns nothing."""
    _LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fastplm::{name}", lambda *_: None, lib=_LIBRARY)
    return getattr(torch.ops.fastplm, name).default


def _outside_autocast(function: Any, *arguments: Any) -> Any:
    """Run a function without autocast: the public function has already cast the arguments."""
    if torch._C._is_any_autocast_enabled():
        with torch._C._DisableAutocast():
            return function(*arguments)
    return function(*arguments)


class _Gradient:
    """The autograd formula that follows from the declaration of an op."""

    def __init__(
        self,
        op: Op,
        results: tuple[str, ...],
        gradients: tuple[str, ...],
        unused: Callable[..., Sequence[str]] | None,
        tracked: tuple[str, ...],
        second: Callable[..., Any] | None,
        finish: Callable[..., Any] | None,
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
        self.constant = [
            at
            for at, name in enumerate(results)
            if name not in tracked and f"grad_{name}" not in saved
        ]

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
            ctx.mark_non_differentiable(*map(outputs.__getitem__, self.constant))
            # Otherwise autograd would allocate zeros as the gradient of each such output.
            ctx.set_materialize_grads(False)

    def backward(
        self, ctx: Any, grad: torch.Tensor | None, *further: Any, tensors: Any = None
    ) -> tuple[Any, ...]:
        op, backend, arguments = self.op, ctx.backend, [*ctx.saved]
        results: list[Any] = [None] * (self.arguments + 1)
        for place, one in zip(self.further, further, strict=True):
            if place is not None:
                arguments[place] = one
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
        elif needs_dispatch((grad, *arguments)) or is_batched(grad, *further):
            grads = op._backward_operator(grad, *arguments, backend)
        elif torch._C._is_any_autocast_enabled():
            grads = _outside_autocast(op.backends[backend].backward, grad, saved)
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


def _refuse_dtensors(op: str, arguments: tuple[Any, ...]) -> None:
    """Raise an error that says what to do. PyTorch's says only that there is no sharding rule."""
    if torch.compiler.is_compiling():
        return
    if any(type(value).__module__.startswith("torch.distributed.tensor") for value in arguments):
        raise UnsupportedError(
            f"{op}: got a DTensor, and its operator has no sharding rule. Call it on local tensors "
            "(tensor.to_local()), or wrap the function that calls it in "
            "torch.distributed.tensor.experimental.local_map."
        )


def _refuse_transform(operator: str, *_: Any) -> NoReturn:
    """For a graph of operators that was made before a transform or forward-mode AD began: these
    would drop its tangents silently. An eager call is plain PyTorch there."""
    op = operator.removesuffix("_fwd").removesuffix("_bwd")
    raise UnsupportedError(
        f"{op}: its operator stands in a graph that was traced outside of this transform of "
        "torch.func or forward-mode AD, and has no rule for it. Trace it inside `with "
        f"fastplm.use_backend('eager', '{op}')`, or transform what is not compiled."
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
            if is_batched(*grads):
                raise UnsupportedError(
                    f"{op}: its gradients come one at a time (is_grads_batched=True or "
                    "vectorize=True). Compute them in a loop, or run the model inside `with "
                    "fastplm.use_backend('eager')`."
                )
            saved = ctx.saved_tensors
            if torch.is_grad_enabled():
                return _once(op, partial(backward, ctx, saved, *grads), (*grads, *saved))
            return backward(ctx, saved, *grads)

        return call

    return decorate


def autocast(*tensors: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """Cast floating tensors as autocast does for ``nn.Linear``, if autocast is on.

    The first one is never None.
    """
    if not torch._C._is_any_autocast_enabled():
        return tensors
    device = tensors[0].device.type  # type: ignore[union-attr]
    if not (torch._C._is_autocast_available(device) and torch.is_autocast_enabled(device)):
        return tensors
    dtype, cast = torch.get_autocast_dtype(device), list(tensors)
    for at, tensor in enumerate(tensors):
        if tensor is not None and tensor.is_floating_point() and tensor.dtype is not torch.float64:
            cast[at] = tensor.to(dtype)
    return tuple(cast)
