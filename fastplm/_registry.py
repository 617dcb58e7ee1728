"""The one place that calls ``torch.library``: schema, fake, autograd and backends of each op.

An op ``<op>`` has a public function ``ops.<op>`` and, for its fused backends, the opaque operators
``fastplm::<op>_fwd`` and ``fastplm::<op>_bwd`` (one operator ``fastplm::<op>`` if it has no
gradient). The last argument of their schemas is ``str backend``. The eager backend is not behind an
operator: ``ops.<op>`` calls the reference itself, so it stays ordinary differentiable PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
from torch.autograd import forward_ad

from fastplm import _rules
from fastplm._autograd import Gradient, outside_autocast
from fastplm._backends import _DECISIONS, BACKENDS, DIFFERENTIABLE, OP_NAMES, accepts_all, requested
from fastplm._declare import Signature, from_fields
from fastplm._modes import (
    TENSORS,
    is_exporting,
    is_traced,
    is_transformed,
    needs_dispatch,
    why_plain_pytorch,
)
from fastplm._rules import CallClass, slower
from fastplm.errors import BackendError, UnsupportedError

#: Under ``torch.ops``; a Hub kernel has another one, unique to its build (tools/hub_kernel.py).
NAMESPACE = "fastplm"
_LIBRARY = torch.library.Library(NAMESPACE, "DEF")
#: Every op by name, in the order of definition.
OPS: dict[str, Op] = {}


@dataclass(frozen=True)
class Backend:
    """One implementation of an op.

    Args:
        forward, backward: ``forward(call)`` and ``backward(grad, saved)``, the implementations of
            ``fastplm::<op>_fwd`` and ``fastplm::<op>_bwd``.
        rejects: ``rejects(call, forced=…)`` returns why this backend cannot run a call, or None if
            it can; ``forced``: whether the user chose this backend.
        measured: ``measured(*call)`` returns the sizes and the dtype on which the speed of a call
            depends. The backend runs a call if it is faster by the rules of ``_rules.py``. Without
            ``measured``, or if it returns None, it runs every call that it can.
        compiled: ``compiled(dtype)`` returns why a compiled program, which serves calls of any
            size, should not use this backend, or None (see ``compiled_rule``). Without it an op
            that is compiled runs this backend, and a layer PyTorch's function.
    """

    forward: Callable[..., Any]
    backward: Any  # None without one
    rejects: Callable[..., str | None]
    measured: Callable[..., CallClass | None] | None = None
    compiled: Callable[[torch.dtype], str | None] | None = None

    def slower(self, op: str, call: Any) -> str | None:
        """Why PyTorch's own function is faster for a call, or None."""
        if self.measured is None:
            return None
        if torch.compiler.is_compiling():
            return None if self.compiled is None else self.compiled(call[0].dtype)
        measured = self.measured(*call)
        return None if measured is None else slower(op, measured)


def compiled_rule(
    op: str, typical: Callable[[torch.dtype], CallClass]
) -> Callable[[torch.dtype], str | None]:
    """A ``compiled`` for a backend that runs if it is faster for the ``typical`` call of a dtype.

    It refuses exported programs, which may run on another machine.
    """

    def reason(dtype: torch.dtype) -> str | None:
        if torch.compiler.is_exporting():
            return "the program is exported"
        return slower(op, typical(dtype))

    # Dynamo takes the result as a constant: see ``_allows_tf32`` in ops/attention.py.
    reason._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return reason


@dataclass(frozen=True)
class Decision:
    """One resolved call: the op, the backend that runs it, and why each other one does not."""

    op: str
    backend: str
    arguments: str
    rejected: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        lines = [f"{self.op}({self.arguments}) -> {self.backend}"]
        lines += [f"    not {name}: {reason}" for name, reason in self.rejected]
        return "\n".join(lines)


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
        options: see ``_autograd.Gradient``.
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
        **options: Any,
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

        schema = f"({self.arguments.schema}, str backend) -> {_tensors(len(results))}"
        if saved is None:
            self._operator = define(name, schema, self._run_forward, fake_forward)
            return
        self._operator = define(f"{name}_fwd", schema, self._run_forward, fake_forward)
        self.saved = Signature(saved)

        def fake_gradients(grad: Any, *arguments: Any) -> Any:
            return fake_backward(grad, self.saved.build(arguments[:-1]))  # type: ignore[misc]

        schema = f"(Tensor grad, {self.saved.schema}, str backend) -> {_tensors(len(gradients))}"
        self._backward_operator = define(f"{name}_bwd", schema, self._run_backward, fake_gradients)
        gradient = Gradient(self, results, gradients, **options)
        self._function = gradient.function()
        torch.library.register_autograd(
            f"{NAMESPACE}::{name}_fwd",
            gradient.backward,
            setup_context=gradient.setup,
            lib=_LIBRARY,
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

    def __call__(self, call: Any, backend: str = "", dispatches: bool | None = None) -> Any:
        """Run a call: check it, choose its backend, and run that.

        A call that does not need PyTorch's dispatcher runs the backend directly, inside an
        autograd function if a gradient is needed: dispatch to Python takes tens of microseconds.

        Args:
            backend: what ``resolve`` chose for this call, which was checked. Default: do both here.
            dispatches: ``needs_dispatch(call)``, if it is known.
        """
        if not backend:
            self.check(call)
            dispatches = needs_dispatch(call)
            backend = self.resolve(call, dispatches)
        # Without a gradient the operator takes the reference, too: a graph then has one node.
        if backend in DIFFERENTIABLE and (self._function is not None or is_transformed()):
            return self.backends[backend].forward(call)
        if needs_dispatch(call) if dispatches is None else dispatches:
            _refuse_dtensors(self.name, call)
            return self._operator(*call, backend)
        if torch._C._is_any_autocast_enabled():
            return outside_autocast(self, call, backend, False)
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

    def resolve(self, call: Any, dispatches: bool | None = None) -> str:
        """The backend that runs a call: the one that the user chose, or else the first one that
        can and is not slower than PyTorch's own function. ``dispatches``: as of ``__call__``.

        Raises:
            BackendError: the chosen backend cannot run it.
        """
        wanted = requested(self.name)
        dispatches = needs_dispatch(call) if dispatches is None else dispatches
        plain = why_plain_pytorch() if dispatches else None
        record = _DECISIONS.innermost() if _DECISIONS.open else None
        if record is None:
            for name in self.backends if wanted == "auto" else (wanted,):
                if self._why_not(name, call, wanted, plain) is None:
                    return name
        reasons = {name: self._why_not(name, call, wanted, plain) for name in BACKENDS}
        chosen = wanted
        if wanted == "auto":
            chosen = next(name for name, reason in reasons.items() if reason is None)
        if record is not None:
            record.append(self._decision(call, wanted, chosen, reasons))
        if reasons[chosen] is not None:
            raise self._refusal(call, chosen, reasons)
        return chosen

    def _why_not(self, name: str, call: Any, wanted: str, plain: str | None) -> str | None:
        """Why a backend does not run a call: it cannot, or PyTorch's own function is faster; or
        None. ``plain``: the result of ``why_plain_pytorch``."""
        if name not in self.backends:
            return "no implementation of this op"
        if plain is not None and name not in DIFFERENTIABLE:
            return plain
        backend, forced = self.backends[name], name == wanted
        reason = backend.rejects(call, forced=forced)
        if reason is None and not forced and "stock" in self.backends:
            reason = backend.slower(self.name, call)
        return reason

    def _decision(
        self, call: Any, wanted: str, chosen: str, reasons: dict[str, str | None]
    ) -> Decision:
        passed = f"{chosen} was forced" if wanted != "auto" else f"{chosen} is preferred"
        rejected = {name: why or passed for name, why in reasons.items() if name != chosen}
        if wanted == "auto" and chosen == "cpp" and reasons["stock"] is None:
            measured = self.backends[chosen].measured
            by_rule = None if measured is None else measured(*call)
            if by_rule is not None:
                rejected["stock"] = str(_rules.decide(self.name, by_rule))
        return Decision(self.name, chosen, _describe(call), tuple(rejected.items()))

    def _refusal(self, call: Any, wanted: str, reasons: dict[str, str | None]) -> BackendError:
        lines = [
            f"{self.name}: backend '{wanted}' was forced (use_backend or FASTPLM_BACKEND) and "
            f"cannot run {self.name}({_describe(call)}): {reasons[wanted]}."
        ]
        for name, reason in reasons.items():
            if name != wanted:
                lines.append(f"  {name}: {reason or 'can run it'}")
        lines.append("Choose a backend that can run it, or 'auto'.")
        return BackendError("\n".join(lines), reasons[wanted] or "")

    def forward_only(self, call: Any, backend: str) -> Any:
        """The outputs of a checked call, for an autograd function that contains this op; its
        backward calls ``backward_only``."""
        if _DECISIONS.open:
            self.resolve(call)  # which records it
        if needs_dispatch(call):
            return self._operator(*call, backend)
        return self.backends[backend].forward(call)

    def backward_only(self, grad: torch.Tensor, saved: Any, backend: str) -> Any:
        """The gradients of a call of ``forward_only``, from what the backward reads."""
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
            why_plain_pytorch() is not None
            or any(isinstance(one, torch.Tensor) and type(one) not in TENSORS for one in arguments)
            or cpp.rejects(self.call(*arguments), forced=wanted == "cpp") is not None
        ):
            return None
        return self.public(*arguments)

    def _run_forward(self, *arguments: Any) -> Any:
        _refuse_tangents(self.name, arguments)
        call, backend = self.call(*arguments[:-1]), arguments[-1]
        return outside_autocast(self.backends[backend].forward, call)

    def _run_backward(self, grad: torch.Tensor, *arguments: Any) -> Any:
        _refuse_tangents(self.name, (grad, *arguments))
        saved, backend = self.saved.build(arguments[:-1]), arguments[-1]
        return outside_autocast(self.backends[backend].backward, grad, saved)


def define(
    operator: str, schema: str, run: Callable[..., Any], fake: Callable[..., Any]
) -> torch._ops.OpOverload:
    """Define ``fastplm::<operator>``."""
    _LIBRARY.define(operator + schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(operator, run, "CompositeExplicitAutograd")
    # Where any transform of torch.func begins to handle a call.
    _LIBRARY.impl(operator, partial(_refuse_transform, operator), "FuncTorchDynamicLayerFrontMode")
    torch.library.register_fake(f"{NAMESPACE}::{operator}", fake, lib=_LIBRARY)
    return getattr(getattr(torch.ops, NAMESPACE), operator).default


def _tensors(count: int) -> str:
    """So many results, as a schema writes them."""
    return "Tensor" if count == 1 else f"({', '.join(['Tensor'] * count)})"


def _describe(call: Any) -> str:
    parts = []
    for name, value in zip(call._fields, call, strict=True):
        if isinstance(value, torch.Tensor):
            dtype = str(value.dtype).removeprefix("torch.")
            parts.append(f"{dtype}{list(value.shape)}@{value.device}")
        elif value is not None:
            parts.append(f"{name}={value!r}")
    return ", ".join(parts)


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
    """For an operator in a graph, of autograd or of a tracer, that was made before a transform
    began. (A call inside of one is plain PyTorch.)"""
    op = operator.removesuffix("_fwd").removesuffix("_bwd")
    raise UnsupportedError(
        f"{op}: its operator has no rule for transforms of torch.func and forward-mode AD, and was "
        "called or traced before this one began. Do that inside of the transform, or inside `with "
        f"fastplm.use_backend('eager', '{op}')`."
    )


def _refuse_tangents(op: str, arguments: tuple[Any, ...]) -> None:
    """The same of tensors with tangents, where forward-mode AD runs without ``torch.func``."""
    if forward_ad._current_level < 0:
        return
    for value in arguments:
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            if forward_ad.unpack_dual(value).tangent is not None:
                _refuse_transform(op)
