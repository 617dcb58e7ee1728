"""The one place that calls ``torch.library``: schema, fake, autograd and backends of each op.

An op ``<op>`` has a public function ``ops.<op>`` and, for its fused backends, the opaque operators
``fastplm::<op>_fwd`` and ``fastplm::<op>_bwd`` (one operator ``fastplm::<op>`` if it has no
gradient). The last argument of their schemas is ``str backend``. The eager backend is not behind an
operator: ``ops.<op>`` calls the reference itself, so it stays ordinary differentiable PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch._functorch.autograd_function import enable_single_level_autograd_function
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad

from fastplm._backends import (
    _DECISIONS,
    BACKENDS,
    DIFFERENTIABLE,
    OP_NAMES,
    Backend,
    accepts_all,
    is_traced,
    requested,
    resolve,
)
from fastplm._declare import Signature, from_fields
from fastplm._rules import slower
from fastplm.errors import UnsupportedError

_LIBRARY = torch.library.Library("fastplm", "DEF")
_TENSORS = (torch.Tensor, torch.nn.Parameter)
#: Argument types that need no dispatch: no tensor subclasses and no symbolic sizes.
_PLAIN = frozenset((*_TENSORS, type(None), bool, int, float, str))

# Every call uses these, so they are looked up once. A tensor is "batched" inside of
# autograd.grad(…, is_grads_batched=True).
is_batched = torch._C._functorch.is_legacy_batchedtensor
_is_tracing, _dispatch_modes = torch._C._is_tracing, torch._C._len_torch_dispatch_stack
_alive = torch._C._functorch.unwrap_if_dead
_transforms, _profiler = torch._C._functorch.peek_interpreter_stack, torch.autograd.profiler
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
        self.finish = finish
        self.call, self.arguments = call, Signature(call)
        self.fast, self.public = fast, public or (lambda *arguments: self(call(*arguments)))
        self.backends: dict[str, Backend] = {}
        self.backend("eager", forward=eager or from_fields(reference))
        self._extra_checks, self._may_be_packed = hasattr(call, "check"), hasattr(call, "packed")
        self._formula: Callable[..., Any] | None = None

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
        formula = _Formula(self, results, gradients, unused, tracked, second)
        kernel = _autograd_kernel(self._operator, self.call, formula.save, formula.backward)
        _LIBRARY.impl(f"{name}_fwd", kernel, "Autograd", with_keyset=True)
        self._formula = _direct_formula(self, formula.save, formula.backward)

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
        self.backends[name] = Backend(name, forward, backward, rejects, **options)
        self.backends = {
            known: self.backends[known] for known in BACKENDS if known in self.backends
        }

    def __call__(self, call: Any, backend: str = "", dispatches: bool | None = None) -> Any:
        """Run a call: check it, choose its backend, and run that.

        A call that does not need PyTorch's dispatcher runs the backend directly, inside an
        autograd function if a gradient is needed: dispatch to Python takes tens of microseconds.

        Args:
            backend: the backend to run; the call must be checked, and the backend must accept it.
                Default: check the call and choose the backend.
            dispatches: the result of ``needs_dispatch(call)``; None = compute it.
        """
        if not backend:
            self.check(call)
            dispatches = needs_dispatch(call)
            backend = self.resolve(call, dispatches)
        if backend in DIFFERENTIABLE and self._formula is not None:
            return self.backends[backend].forward(call)
        if needs_dispatch(call) if dispatches is None else dispatches:
            _refuse_dtensors(self.name, call)
            return self._operator(*call, backend)
        if torch._C._is_any_autocast_enabled():
            with torch._C._DisableAutocast():
                return self(call, backend, dispatches=False)
        if (
            self._formula is not None
            and torch.is_grad_enabled()
            and not torch.is_inference_mode_enabled()  # inside of it gradients may be "enabled"
            and torch._C._any_requires_grad(*call)
        ):
            # A tensor may come from inside of a transform that has ended.
            tensors = [_alive(one) if isinstance(one, torch.Tensor) else one for one in call]
            return self._formula(*tensors, backend)
        return self.backends[backend].forward(call)

    def check(self, call: Any, where: str = "") -> None:
        """Raise an error that names the first argument that is not as declared."""
        where = where or self.name
        self.arguments.check(where, call, self._may_be_packed and call.packed)
        if self._extra_checks:
            call.check(where)

    def resolve(self, call: Any, dispatches: bool = True) -> str:
        """The backend that runs a call (see ``_backends.resolve``)."""
        return resolve(self.name, self.backends, call, dispatches)

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
        """The result by csrc/ if it is faster than PyTorch's own function, else None.

        A layer calls PyTorch's function if this returns None. It does so, too, if a call is
        transformed, or traced (unless the backend has ``compiled``). PyTorch's function is the
        faster one for most calls of a model, so the rules are asked first; on another device than a
        CPU nothing is.
        """
        cpp = self.backends.get("cpp")
        if (
            cpp is None
            or cpp.measured is None
            or type(arguments[0]) not in _TENSORS  # whose sizes may be unknown
            or not arguments[0].is_cpu
        ):
            return None
        wanted = requested(self.name)
        if wanted != "auto" and wanted != "cpp":
            return None
        if not is_traced():
            measured = cpp.measured(*arguments) if wanted == "auto" else None
            if measured and slower(self.name, measured) is not None:
                return None
            out = None if self.fast is None else self.fast(*arguments)
            if out is not None:
                return out
            if is_transformed():
                return None
        elif not torch.compiler.is_compiling() or cpp.compiled is None:
            return None
        call = self.call(*arguments)
        if (
            any(isinstance(one, torch.Tensor) and type(one) not in _TENSORS for one in arguments)
            or cpp.refuses(self.name, call, forced=wanted == "cpp") is not None
        ):
            return None
        return self.public(*arguments)

    def _run_forward(self, *arguments: Any) -> Any:
        *inputs, backend = arguments
        return _outside_autocast(self.backends[backend].forward, self.call(*inputs))

    def _run_backward(self, grad: torch.Tensor, *arguments: Any) -> Any:
        saved = self.saved.build(arguments[:-1])
        return _outside_autocast(self.backends[arguments[-1]].backward, grad, saved)

    def _define(
        self, operator: str, schema: str, run: Callable[..., Any], fake: Callable[..., Any]
    ) -> torch._ops.OpOverload:
        _LIBRARY.define(operator + schema, tags=(torch.Tag.pt2_compliant_tag,))
        _LIBRARY.impl(operator, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"fastplm::{operator}", fake, lib=_LIBRARY)
        overload = getattr(torch.ops.fastplm, operator).default
        torch.library.register_vmap(f"fastplm::{operator}", _one_by_one(overload), lib=_LIBRARY)
        return overload


def in_place(name: str, schema: str, run: Callable[..., None]) -> torch._ops.OpOverload:
    """Define ``fastplm::<name>``, which writes into its arguments and returns nothing."""
    _LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fastplm::{name}", lambda *_: None, lib=_LIBRARY)
    return getattr(torch.ops.fastplm, name).default


def _one_by_one(overload: torch._ops.OpOverload) -> Callable[..., Any]:
    """The batching rule of an operator: a call for each sample.

    PyTorch does the same for an operator without a rule, but prints a warning that this is slow and
    asks the user to file an issue.
    """

    def rule(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[Any, Any]:
        size = info.batch_size
        if size == 0:  # the results have the shapes of those of a sample of zeros
            arguments = tuple(
                one if dim is None else one.new_zeros((*one.shape[:dim], 1, *one.shape[dim + 1 :]))
                for one, dim in zip(arguments, in_dims, strict=True)
            )
        pairs = list(zip(arguments, in_dims, strict=True))
        results = [
            overload(*(one if dim is None else one.select(dim, at) for one, dim in pairs))
            for at in range(max(size, 1))
        ]
        if isinstance(results[0], torch.Tensor):
            return torch.stack(results)[:size], 0
        outputs = tuple(torch.stack(each)[:size] for each in zip(*results, strict=True))
        return outputs, (0,) * len(outputs)

    return rule


def _outside_autocast(function: Any, *arguments: Any) -> Any:
    """Run a function without autocast: the public function has already cast the arguments."""
    if torch._C._is_any_autocast_enabled():
        with torch._C._DisableAutocast():
            return function(*arguments)
    return function(*arguments)


class _Formula:
    """The autograd formula that follows from the declaration of an op."""

    def __init__(
        self,
        op: Op,
        results: tuple[str, ...],
        gradients: tuple[str, ...],
        unused: Callable[..., Sequence[str]] | None,
        tracked: tuple[str, ...],
        second: Callable[..., Any] | None,
    ) -> None:
        self.op, self.gradients, self.unused, self.second = op, gradients, unused, second
        arguments, saved = op.arguments.names, op.saved
        self.results = results
        #: The names of the values that a forward has, and of the gradients that a backward gets.
        self.values = (*arguments, "backend", *results)
        needs = {f"need_{name}": at for at, name in enumerate(arguments)}
        self.needs = [(name, at) for name, at in needs.items() if name in saved.names]
        self.grads = tuple(f"grad_{name}" for name in results[1:])
        self.properties = [
            name for name in saved.names if name not in (*self.values, *needs, *self.grads)
        ]
        of_forward = [
            pair for pair in zip(saved.names, saved.types, strict=True) if pair[0] not in self.grads
        ]
        self.tensors = [name for name, kind in of_forward if kind.startswith("Tensor")]
        self.others = [name for name, kind in of_forward if not kind.startswith("Tensor")]
        self.reads_grads = any(name in self.grads for name in saved.names)
        tracked = (results[0], *tracked)
        self.constant = [
            at
            for at, name in enumerate(results)
            if name not in tracked and f"grad_{name}" not in saved.names
        ]

    def save(self, ctx: Any, call: Any, backend: str, output: Any) -> None:
        outputs = (output,) if len(self.results) == 1 else output
        needs = ctx.needs_input_grad
        values = dict(zip(self.values, (*call, backend, *outputs), strict=True))
        for name, at in self.needs:
            values[name] = needs[at]
        for name in self.properties:
            values[name] = getattr(call, name)
        if self.unused is not None:
            values |= dict.fromkeys(self.unused(call, outputs, needs, backend))
        ctx.save_for_backward(*map(values.__getitem__, self.tensors))
        ctx.others, ctx.backend = [*map(values.__getitem__, self.others)], backend
        if self.reads_grads:
            ctx.first = outputs[0].shape, outputs[0].dtype, outputs[0].device
        if len(outputs) > 1:
            ctx.mark_non_differentiable(*map(outputs.__getitem__, self.constant))
            # Otherwise autograd would allocate zeros as the gradient of each such output.
            ctx.set_materialize_grads(False)

    def backward(
        self, ctx: Any, grad: torch.Tensor | None, *further: Any, tensors: Any = None
    ) -> tuple[Any, ...]:
        op, backend = self.op, ctx.backend
        values = dict(zip(self.grads, further, strict=True))
        if grad is None:
            if all(values[name] is None for name in op.saved.names if name in values):
                return (None,) * (len(op.arguments.names) + 1)
            shape, dtype, device = ctx.first
            grad = torch.zeros(shape, dtype=dtype, device=device)
        # Unpacked only once: inside a checkpoint, a second ``ctx.saved_tensors`` is an error.
        tensors = ctx.saved_tensors if tensors is None else tensors
        if self.second is None and torch.is_grad_enabled():  # create_graph=True
            return self._once(ctx, tensors, grad, *further)
        values |= zip(self.tensors, tensors, strict=True)
        values |= zip(self.others, ctx.others, strict=True)
        arguments = [*map(values.__getitem__, op.saved.names)]
        saved = op.saved.build(arguments)
        if self.second is not None and torch.is_grad_enabled():
            grads = self.second(grad, saved, backend)
        elif (
            needs_dispatch((grad, *arguments))
            or is_batched(grad)
            or (self.reads_grads and any(is_batched(one) for one in further if one is not None))
        ):
            grads = op._backward_operator(grad, *arguments, backend)
        elif torch._C._is_any_autocast_enabled():
            grads = _outside_autocast(op.backends[backend].backward, grad, saved)
        else:
            grads = op.backends[backend].backward(grad, saved)
        if op.finish is not None:
            grads = op.finish(grads, saved)
        grads = (grads,) if len(self.gradients) == 1 else grads
        found = dict(zip(self.gradients, grads, strict=True))
        results: list[Any] = [None] * (len(op.arguments.names) + 1)
        for at, name in enumerate(op.arguments.names):
            if ctx.needs_input_grad[at]:
                results[at] = found.get(name)
        return tuple(results)

    def _once(self, ctx: Any, tensors: tuple[Any, ...], *grads: Any) -> tuple[Any, ...]:
        compute = partial(self.backward, ctx, *grads, tensors=tensors)
        return _once(self.op.name, compute, (*grads, *tensors))


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


def _refuse_tangents(operator: torch._ops.OpOverload, arguments: tuple[Any, ...]) -> None:
    """Raise an error for a tangent in a traced graph: the operator would drop it silently."""
    if forward_ad._current_level < 0:
        return
    for value in arguments:
        if (
            isinstance(value, torch.Tensor)
            and value.is_floating_point()
            and forward_ad.unpack_dual(value).tangent is not None
        ):
            op = operator._schema.name.split("::")[1].removesuffix("_fwd")
            raise UnsupportedError(
                f"{op}: its operator makes no tangent, and the call was traced before forward-mode "
                f"AD began. Trace it inside `with fastplm.use_backend('eager', '{op}')`, or do not "
                "compile what forward-mode AD differentiates."
            )


def needs_dispatch(arguments: tuple[Any, ...]) -> bool:
    """Whether a call must go through PyTorch's dispatcher as an operator.

    It must while operators are traced, profiled, transformed or intercepted.
    """
    return (
        torch.compiler.is_dynamo_compiling()  # where others compile, there is a mode
        or _is_tracing()
        or _dispatch_modes() > 0
        or _profiler._is_profiler_enabled
        or _transforms() is not None
        or forward_ad._current_level >= 0
        or not _PLAIN.issuperset(map(type, arguments))
        or arguments[0].is_meta  # then all are: the tensors of a call are on one device
    )


def is_eager(*tensors: torch.Tensor) -> bool:
    """Whether a call on these tensors is plain: not traced, not transformed, no subclass."""
    return (
        _PLAIN.issuperset(map(type, tensors))
        and not torch.compiler.is_compiling()
        and not torch.jit.is_tracing()
        and not is_transformed()
    )


def is_fake(x: torch.Tensor) -> bool:
    """Whether it is a tensor without data, which may be on a device that is not there."""
    return type(x) is FakeTensor and not torch.compiler.is_compiling()


def is_transformed() -> bool:
    """Whether a call runs inside a transform of ``torch.func`` or inside forward-mode AD."""
    return (
        torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0
    )


class _RaiseOnDoubleBackward(torch.autograd.Function):
    """The identity on a gradient; its backward raises an error. It also takes what the gradient
    depends on, so that autograd calls that backward."""

    generate_vmap_rule = True  # torch.func.jacrev runs a backward under vmap

    @staticmethod
    def forward(op: str, gradient: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: torch.Tensor) -> None:
        ctx.op = inputs[0]

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
    for one is an error that names ``op``; batched gradients are computed one by one."""

    def decorate(backward: Callable[..., Any]) -> Any:
        def call(ctx: Any, *grads: Any) -> Any:
            saved = ctx.saved_tensors
            for grad in grads:
                if grad is not None and is_batched(grad):
                    return _each_of_batch(partial(backward, ctx, saved), grads)
            if torch.is_grad_enabled():
                return _once(op, partial(backward, ctx, saved, *grads), (*grads, *saved))
            return backward(ctx, saved, *grads)

        return call

    return decorate


def _each_of_batch(backward: Callable[..., Any], grads: Sequence[Any]) -> tuple[Any, ...]:
    """``backward`` of each of batched gradients, some of which are None or not batched."""
    level = torch._C._vmapmode_increment_nesting() - 1
    torch._C._vmapmode_decrement_nesting()
    batched = [one is not None and is_batched(one) for one in grads]
    given = [
        torch._remove_batch_dim(one, level, 1, 0) if many else one
        for one, many in zip(grads, batched, strict=True)
    ]
    count = given[batched.index(True)].shape[0]
    results = [
        backward(*(one[at] if many else one for one, many in zip(given, batched, strict=True)))
        for at in range(count)
    ]
    return tuple(
        None if each[0] is None else torch._add_batch_dim(torch.stack(each), 0, level)
        for each in zip(*results, strict=True)
    )


def _direct_formula(
    op: Op, save: Callable[..., None], backward: Callable[..., Any]
) -> Callable[..., Any]:
    """The formula of ``_autograd_kernel``, with a forward that calls the backend directly."""

    class Direct(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *arguments: Any) -> Any:
            call, backend = op.call(*arguments[:-1]), arguments[-1]
            output = op.backends[backend].forward(call)
            save(ctx, call, backend, output)
            return output

    Direct.backward = staticmethod(backward)  # type: ignore[method-assign]
    return applied(Direct)


def _autograd_kernel(
    operator: torch._ops.OpOverload,
    call: Callable[..., Any],
    save: Callable[..., None],
    backward: Callable[..., Any],
) -> Callable[..., Any]:
    """The kernel that ``torch.library.register_autograd`` makes, which also runs inside of the
    transforms of ``torch.func``: PyTorch's raises there."""

    def below_autograd(keyset: Any, arguments: tuple[Any, ...]) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return operator.redispatch(keyset & torch._C._after_autograd_keyset, *arguments)

    # It handles a single level: torch.func applies its transforms around this kernel, one by one.
    class Differentiable(torch.autograd.function._SingleLevelFunction):
        @staticmethod
        def forward(ctx: Any, *arguments: Any) -> Any:
            *inputs, keyset = arguments  # last, so that the gradients of the inputs come first
            # An autograd function disables gradients, but the transforms below still need them.
            below = torch._C._functorch.peek_interpreter_stack() is not None
            with torch.set_grad_enabled(below):
                output = below_autograd(keyset, tuple(inputs))
            save(ctx, call(*inputs[:-1]), inputs[-1], output)
            return output

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return *backward(ctx, *grads), None

    def kernel(keyset: Any, *arguments: Any) -> Any:
        _refuse_tangents(operator, arguments)
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*arguments):
            with enable_single_level_autograd_function():
                return Differentiable.apply(*arguments, keyset)  # type: ignore[attr-defined]
        return below_autograd(keyset, arguments)

    return kernel


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
