"""The choice of the backend that runs an op, and the reason why each other one does not.

A backend is one implementation of an op:

====== ============================================================================
eager  the reference in plain PyTorch: the specification, on any device
torch  fast code of PyTorch's operators (chunked products): CPU tensors
stock  PyTorch's own function for the same, where it has one: the default on the CPU where
       ``csrc/`` was not measured to be faster
cpp    ``csrc/`` on the CPU: the default there for the other calls of the ops that have it
triton ``triton_kernels/``: CUDA tensors, or CPU tensors under Triton's interpreter
cuda   ``csrc/`` on CUDA tensors
====== ============================================================================

The choice is made in the op's public function, once per call, and travels with the call as an
argument: a traced or captured graph keeps the backend it was made with, and a backward always runs
on the backend of its forward, even after ``use_backend`` was left.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.autograd import forward_ad

from fastplm import _measured
from fastplm._measured import CallClass, slower
from fastplm.errors import BackendError, check_choice

#: In the order of preference of "auto"; "eager" can run anything, so it is last.
BACKENDS = ("cuda", "cpp", "triton", "stock", "torch", "eager")
#: Backends of plain differentiable PyTorch, which need no operator and no formula of a gradient.
DIFFERENTIABLE = ("stock", "eager")
_CHOICES = ("auto", *BACKENDS)
#: Every op is named after its file. ``_registry.OPS`` has them once ``fastplm.ops`` is imported.
OP_NAMES = tuple(sorted(path.stem for path in (Path(__file__).parent / "ops").glob("[!_]*.py")))
_TRANSFORMS = torch._C._functorch.TransformType


@dataclass(frozen=True)
class Backend:
    """One implementation of an op.

    Args:
        name: one of ``BACKENDS``.
        rejects: ``rejects(call, forced=…)`` returns why this backend cannot run a call, or None if
            it can.
        functions: returns ``forward(call)`` and ``backward(grad, saved)`` (None without one), the
            implementations of ``fastplm::<op>_fwd`` and ``fastplm::<op>_bwd``. It is called once,
            for the first call, so that it may import a module that need not be there.
        measured: ``measured(*call)`` returns what the speed of a call depends on: the backend runs
            it where the table of ``_measured.py`` says that it is faster. None: wherever it can.
        measured_for_layers: only a layer asks ``measured`` (``Op.layer``), which can call PyTorch's
            function instead; the op itself has no faster way.
        compiled: ``compiled(dtype)`` returns why a compiled program, which takes calls of any size,
            shall not call it, or None. See ``of_any_size``.
    """

    name: str
    rejects: Callable[..., str | None]
    functions: Callable[[], tuple[Callable[..., Any], Callable[..., Any] | None]]
    measured: Callable[..., CallClass | None] | None = None
    measured_for_layers: bool = False
    compiled: Callable[[torch.dtype], str | None] | None = None

    @functools.cached_property
    def forward(self) -> Callable[..., Any]:
        return self.functions()[0]

    @functools.cached_property
    def backward(self) -> Any:
        return self.functions()[1]

    def refuses(
        self,
        op: str,
        call: Any,
        *,
        forced: bool,
        dispatches: bool = True,
        for_layer: bool = False,
    ) -> str | None:
        """Why it does not run a call: it cannot, or PyTorch's own function is faster.

        A compiled program serves calls of any size, so ``compiled`` is asked for it.

        Args:
            op: the name of the op.
            call: its arguments.
            forced: whether the user asked for this backend.
            dispatches: as of ``resolve``.
            for_layer: as of ``Op.layer``.
        """
        if dispatches and self.name != "eager":
            reason = needs_plain_pytorch()
            if reason is not None:
                return reason
        reason = self.rejects(call, forced=forced)
        if reason is not None or self.measured is None or forced:
            return reason
        if self.measured_for_layers and not for_layer:
            return None
        if torch.compiler.is_compiling():
            return None if self.compiled is None else self.compiled(call[0].dtype)
        measured = self.measured(*call)
        return None if measured is None else slower(op, measured)


def of_any_size(
    op: str, typical: Callable[[torch.dtype], CallClass]
) -> Callable[[torch.dtype], str | None]:
    """``compiled`` of a backend that is to run if it is faster for ``typical`` calls of a dtype.

    An exported program may run elsewhere, and a transform would split each call into its samples.
    """

    def reason(dtype: torch.dtype) -> str | None:
        if torch.compiler.is_exporting() or _transforms() or forward_ad._current_level >= 0:
            return "the program is exported or transformed"
        return slower(op, typical(dtype))

    # A constant of a graph: see ops/attention.py.
    reason._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return reason


def needs_plain_pytorch() -> str | None:
    """Why only the reference can run a call: some transforms need to see PyTorch's operators.

    Our operators support gradients of ``torch.func``, and ``vmap`` without gradients.
    """
    if is_written_down():
        return "torch.jit.trace or an ONNX export, which record only PyTorch's own operators"
    if torch.compiler.is_compiling():  # tangents are ``_registry._refuse_tangents``'s there
        return None
    if forward_ad._current_level >= 0:
        return "forward-mode AD: a kernel makes no tangent"
    if _transforms() in (set(), {_TRANSFORMS.Grad}, {_TRANSFORMS.Vmap}):
        return None
    return "several transforms of torch.func at once: a kernel supports vmap or gradients"


def is_vmapped() -> bool:
    """Whether a call that is not traced runs for the samples of a ``torch.vmap``."""
    return not torch.compiler.is_compiling() and _TRANSFORMS.Vmap in _transforms()


def _transforms() -> set[Any]:
    if torch._C._functorch.peek_interpreter_stack() is None:
        return set()
    return {level.key() for level in torch._C._functorch.get_interpreter_stack()}


def is_written_down() -> bool:
    """Whether a call is traced for another program, which has only PyTorch's own operators."""
    if torch.compiler.is_compiling():
        return not torch.compiler.is_dynamo_compiling() and torch.onnx.is_in_onnx_export()
    return torch.jit.is_tracing()


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


class _Choice:
    """What a ``use_backend`` block asks for. (A plain class, which torch.compile can make.)"""

    def __init__(self, default: str, per_op: dict[str, str]) -> None:
        self.default = default
        self.per_op = per_op


# The choices of the ``use_backend`` blocks that a thread is in, the newest last. Not a ContextVar,
# which torch.compile cannot trace. Dynamo guards what it reads here, for each thread, so a compiled
# function is traced again when the choice changes.
_OF_MAIN_THREAD = [_Choice(os.environ.get("FASTPLM_BACKEND", "auto"), {})]
_thread = threading.local()
if threading.current_thread() is threading.main_thread():
    _thread.choices = _OF_MAIN_THREAD


def check_environment() -> None:
    """Check ``FASTPLM_BACKEND`` now, and not at the first op.

    Raises:
        ArgumentValueError: it names no backend.
    """
    check_choice("fastplm", "FASTPLM_BACKEND", _OF_MAIN_THREAD[0].default, _CHOICES)


def _choices() -> list[_Choice]:
    """The choices of this thread, or of the main thread if this one has none: a backward on a GPU
    runs in a thread of PyTorch's, and what it computes again is to take the forward's backend."""
    return getattr(_thread, "choices", None) or _OF_MAIN_THREAD


def requested(op: str) -> str:
    """The backend that the user chose for ``op``, or "auto"."""
    # Asked by every layer: a call of ``_choices`` would cost as much again.
    choice = (getattr(_thread, "choices", None) or _OF_MAIN_THREAD)[-1]
    return choice.per_op.get(op, choice.default)


def is_recorded() -> bool:
    """Whether every call is to leave a ``Decision``."""
    return getattr(_thread, "record", None) is not None


def note(text: Callable[[], str]) -> None:
    """Leave a line for ``fastplm.explain``, which is only made if it listens."""
    notes = getattr(_thread, "notes", None)
    if notes is not None:
        notes.append(text())


@contextlib.contextmanager
def use_backend(backend: str, *ops: str) -> Iterator[None]:
    """Force a backend for all ops, or for the ops named, inside a ``with`` block.

    Args:
        backend: "auto" | "eager" | "torch" | "stock" | "cpp" | "triton" | "cuda".
        ops: names of ops, e.g. ``"attention"``; none means all.

    Raises:
        ArgumentValueError: for an unknown backend or op.
        BackendError: raised later, by the call of an op that the forced backend cannot run; the
            message holds the reason of every backend.

    The setting is the thread's own. A thread that has none follows the main thread, as those do
    that PyTorch starts for a backward. The environment variable ``FASTPLM_BACKEND`` sets the
    initial value of all.
    """
    check_choice("use_backend", "backend", backend, _CHOICES)
    for op in ops:
        check_choice("use_backend", "ops", op, OP_NAMES)
    choices = getattr(_thread, "choices", None)
    if choices is None:
        choices = _thread.choices = []
    choice = _Choice(backend, {})
    if ops:
        outer = _choices()[-1]
        choice = _Choice(outer.default, {**outer.per_op, **dict.fromkeys(ops, backend)})
    choices.append(choice)
    try:
        yield
    finally:
        choices.remove(choice)  # which blocks of coroutines may leave in any order


@contextlib.contextmanager
def record_notes() -> Iterator[list[str]]:
    """Collect the lines that models leave in this thread inside the block (``note``)."""
    notes: list[str] = []
    previous, _thread.notes = getattr(_thread, "notes", None), notes
    try:
        yield notes
    finally:
        _thread.notes = previous


@contextlib.contextmanager
def record_decisions() -> Iterator[list[Decision]]:
    """Collect a ``Decision`` for every op that this thread calls inside the block."""
    record: list[Decision] = []
    previous, _thread.record = getattr(_thread, "record", None), record
    try:
        yield record
    finally:
        _thread.record = previous


def resolve(op: str, backends: dict[str, Backend], call: Any, dispatches: bool = True) -> str:
    """The name of the backend that runs this call.

    Args:
        dispatches: the answer of ``_registry.needs_dispatch(call)``. A call that it is False of is
            neither traced nor transformed.

    Raises:
        BackendError: the requested backend cannot run it.
    """
    wanted = requested(op)
    if is_recorded():
        _thread.record.append(_decide(op, backends, call, wanted))
    if wanted == "auto":
        for backend in backends.values():
            if backend.refuses(op, call, forced=False, dispatches=dispatches) is None:
                return backend.name
    elif wanted in backends and backends[wanted].refuses(op, call, forced=True) is None:
        return wanted
    raise _refusal(op, backends, call, wanted)


def _reasons(
    op: str, backends: dict[str, Backend], call: Any, wanted: str
) -> dict[str, str | None]:
    return {
        name: backends[name].refuses(op, call, forced=name == wanted)
        if name in backends
        else "no implementation of this op"
        for name in BACKENDS
    }


def _decide(op: str, backends: dict[str, Backend], call: Any, wanted: str) -> Decision:
    reasons = _reasons(op, backends, call, wanted)
    able = [name for name in BACKENDS if reasons[name] is None]
    chosen = wanted if wanted != "auto" else able[0]
    rejected = []
    for name in BACKENDS:
        if name == chosen:
            continue
        reason = reasons[name]
        if reason is None:
            reason = f"{chosen} was forced" if wanted != "auto" else f"{chosen} is preferred"
        rejected.append((name, reason))
    return Decision(op, chosen, _describe(call), tuple(rejected))


def _refusal(op: str, backends: dict[str, Backend], call: Any, wanted: str) -> BackendError:
    reasons = _reasons(op, backends, call, wanted)
    why = reasons.get(wanted) or "unknown backend"
    lines = [
        f"{op}: backend '{wanted}' was forced (use_backend or FASTPLM_BACKEND) and cannot run "
        f"{op}({_describe(call)}): {why}."
    ]
    for name, reason in reasons.items():
        if name != wanted:
            lines.append(f"  {name}: {reason or 'can run it'}")
    lines.append("Choose a backend that can run it, or 'auto'.")
    return BackendError("\n".join(lines), why)


def _describe(call: Any) -> str:
    parts = []
    for name, value in zip(call._fields, call, strict=True):
        if isinstance(value, torch.Tensor):
            dtype = str(value.dtype).removeprefix("torch.")
            parts.append(f"{dtype}{list(value.shape)}@{value.device}")
        elif value is not None:
            parts.append(f"{name}={value!r}")
    return ", ".join(parts)


class Short:
    """The short way of plain calls on a CPU without gradients, the one fast path of all ops.

    It ends where ``Op.__call__`` ends, after less Python code, which between the layers of a model
    is not in the CPU's caches, and is most of the cost of a small call.

    Args:
        op: the name of the op.
        csrc: ``csrc(*arguments)``, the result by csrc/, or None for a call that needs more, such as
            a gradient.
        fits: ``fits(*arguments)``, whether a call is correct, on a CPU and not traced. Default:
            ``csrc`` looks itself.
        measured, stock: of the arguments, what ``Backend.measured`` returns, and the result by
            PyTorch's own function. Without them csrc/ runs wherever it can.
    """

    def __init__(
        self,
        op: str,
        *,
        csrc: Callable[..., Any],
        fits: Callable[..., bool] | None = None,
        measured: Callable[..., CallClass] | None = None,
        stock: Callable[..., Any] | None = None,
    ) -> None:
        self.op, self.csrc, self.fits = op, csrc, fits
        self.measured, self.stock = measured, stock

    def __call__(self, *arguments: Any) -> Any:
        """The result, or None: ``Op.__call__`` is to decide, or to say what is wrong."""
        wanted = requested(self.op)
        if (
            (wanted != "auto" and wanted != "cpp")
            or is_recorded()
            or (self.fits is not None and not self.fits(*arguments))
        ):
            return None
        if (
            wanted == "auto"
            and self.measured is not None
            and _measured.table().slower(self.op, *self.measured(*arguments)) is not None
        ):
            return self.stock(*arguments)  # type: ignore[misc]
        return self.csrc(*arguments)


def is_traced() -> bool:
    """Whether a call is traced, by any of PyTorch's tracers."""
    return torch.compiler.is_compiling() or torch._C._is_tracing()


# --- reasons that several ops share --------------------------------------------------------------


def accepts_all(*arguments: Any, forced: bool) -> str | None:
    """The ``rejects`` of a backend that runs everything: the reference."""
    return None


def needs_cpu(tensor: torch.Tensor) -> str | None:
    """Reason of a CPU implementation."""
    return None if tensor.device.type == "cpu" else _not_cpu(tensor.device)


@functools.cache
def _not_cpu(device: torch.device) -> str:
    """Made once: on a GPU every call asks."""
    return f"it runs on CPU tensors, not {device}"


def needs_nvidia(device: torch.device) -> str | None:
    """Reason of a kernel for CUDA devices: an NVIDIA GPU from sm_80 on."""
    index = device.index or 0
    if torch.compiler.is_compiling():  # which reads properties of a device, but fills no cache
        return _why_not_nvidia(index)
    if index not in _WHY_NOT_NVIDIA:
        _WHY_NOT_NVIDIA[index] = _why_not_nvidia(index)
    return _WHY_NOT_NVIDIA[index]


_WHY_NOT_NVIDIA: dict[int, str | None] = {}


def _why_not_nvidia(index: int) -> str | None:
    if torch.version.hip is not None:
        return "ROCm: the kernels are made for NVIDIA GPUs"
    if not torch.cuda.is_available():  # a fake tensor of a device that is elsewhere
        return None
    device = torch.cuda.get_device_properties(index)
    if device.major < 8:
        return f"cuda:{index} is sm_{device.major}{device.minor}: the kernels need sm_80 or later"
    return None


def needs_triton(tensor: torch.Tensor, forced: bool) -> str | None:
    """Reason of a Triton implementation: CUDA tensors, or the interpreter when forced."""
    if tensor.device.type not in ("cuda", "cpu"):
        return f"Triton runs on CUDA tensors, not {tensor.device}"
    if tensor.device.type == "cpu":
        if not forced:
            return "CPU tensors: Triton's interpreter is for tests and runs only when forced"
        if os.environ.get("TRITON_INTERPRET") != "1":
            return "CPU tensors: set TRITON_INTERPRET=1 before Python starts to interpret kernels"
    reason = None if tensor.device.type == "cpu" else needs_nvidia(tensor.device)
    if reason is None and not triton_installed():
        reason = "triton is not installed (pip install triton)"
    return warn_unless_forced(reason, forced)


def warn_unless_forced(reason: str | None, forced: bool) -> str | None:
    """Why CUDA tensors get no kernel, if so; a call that did not choose its backend warns of it."""
    if reason is not None and not (forced or torch.compiler.is_compiling()):
        _warn_of_eager(reason)
    return reason


@functools.cache  # once for each reason
def _warn_of_eager(reason: str) -> None:
    warnings.warn(
        f"fastplm's kernels do not run on these CUDA tensors: {reason}. The eager reference runs "
        "instead, slower and in more memory; use_backend('eager') asks for it without this warning",
        stacklevel=2,
    )


# Looked up once: torch 2.11 cannot trace the question.
_HAS_TRITON = importlib.util.find_spec("triton") is not None


def triton_installed() -> bool:
    """Whether ``import triton`` can work. Nothing is imported, and no device is started."""
    return _HAS_TRITON
