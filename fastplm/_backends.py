"""Chooses the backend that runs an op, and says why each of the others does not run it.

A backend is one implementation of an op:

====== ============================================================================
eager  the reference in plain PyTorch, which is the specification: any device
torch  faster code in PyTorch's operators (chunked products): CPU tensors
stock  PyTorch's own function for the op, if there is one: the default on the CPU, except for calls
       that are faster in ``csrc/`` by the rules
cpp    ``csrc/`` on the CPU: the default there for the other calls, in the ops that have it
triton ``triton_kernels/``: CUDA tensors, or CPU tensors under Triton's interpreter
cuda   ``csrc/`` on CUDA tensors
cudnn  the forward of attention by cuDNN where that was measured to be faster, with the backward of
       "triton", or by its name, from 512 keys on, with its own, which does not repeat bit for bit:
       CUDA tensors
====== ============================================================================

The choice is made in the op's public function, once per call, and travels with the call as an
argument: a traced or captured graph keeps the backend it was made with, and a backward always runs
on the backend of its forward, even after the ``use_backend`` block has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib.util
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fastplm import _rules
from fastplm._modes import needs_dispatch, needs_plain_pytorch
from fastplm._rules import CallClass, slower
from fastplm.errors import BackendError, check_choice

#: In the order of preference of "auto"; "eager" can run anything, so it is last.
BACKENDS = ("cuda", "cpp", "cudnn", "triton", "stock", "torch", "eager")
#: Backends in plain PyTorch: autograd differentiates them, without an operator of fastplm.
DIFFERENTIABLE = ("stock", "eager")
#: Every op is named after its file. ``_registry.OPS`` has the ops once ``fastplm.ops`` is imported.
OP_NAMES = tuple(sorted(path.stem for path in (Path(__file__).parent / "ops").glob("[!_]*.py")))


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
            size, should not use this backend, or None. See ``compiled_rule``.
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


class _Choice:
    """The choice of a ``use_backend`` block. (torch.compile can create a plain class like this.)"""

    def __init__(self, default: str, per_op: dict[str, str]) -> None:
        self.default = default
        self.per_op = per_op


def _of_environment() -> str:
    """The choice of ``FASTPLM_BACKEND``; an empty one is as none."""
    given = os.environ.get("FASTPLM_BACKEND") or "auto"
    check_choice("fastplm", "FASTPLM_BACKEND", given, ("auto", *BACKENDS))
    return given


class _Block:
    """A ``with`` block: its value, and the block around it."""

    def __init__(self, value: Any, outer: _Block | None) -> None:
        self.value, self.outer, self.is_open = value, outer, True


class _Blocks:
    """The ``with`` blocks of one kind that the threads and coroutines of this process are in."""

    def __init__(self, name: str) -> None:
        self.open: list[_Block] = []  # all of them, the newest last: most calls are in no block
        self.of_main: list[_Block] = []  # those of the main thread, outside of coroutines
        self.here: ContextVar[_Block | None] = ContextVar(f"fastplm.{name}", default=None)
        # Dynamo cannot trace a ContextVar, so traced code reads the blocks of its thread. It guards
        # on them: a compiled function is traced again when they change.
        self.of_thread = threading.local()

    def innermost(self) -> Any:
        """The value of the block that this thread or coroutine is in; None if it is in none."""
        if not self.open:
            return None
        if torch.compiler.is_compiling():
            blocks = getattr(self.of_thread, "blocks", None) or self.of_main
            return blocks[-1].value if blocks else None
        block = self.here.get()
        while block is not None and not block.is_open:  # coroutines end their blocks in any order
            block = block.outer
        return None if block is None else block.value

    @contextlib.contextmanager
    def block(self, value: Any) -> Iterator[Any]:
        traced, blocks = torch.compiler.is_compiling(), getattr(self.of_thread, "blocks", None)
        if blocks is None:
            blocks = self.of_thread.blocks = []
        block, among = _Block(value, None if traced else self.here.get()), [self.open, blocks]
        if not traced:
            self.here.set(block)
            if threading.current_thread() is threading.main_thread() and not _is_coroutine():
                among.append(self.of_main)
        for blocks in among:
            blocks.append(block)
        try:
            yield value
        finally:
            block.is_open = False
            for blocks in among:
                blocks.remove(block)


def _is_coroutine() -> bool:
    try:
        return asyncio.get_running_loop() is not None
    except RuntimeError:
        return False


_DEFAULT = _Choice(_of_environment(), {})
_CHOICES, _DECISIONS, _NOTES = _Blocks("choices"), _Blocks("decisions"), _Blocks("notes")


def _choice() -> _Choice:
    """What counts for this thread or coroutine.

    A thread without a block follows the main thread, but none of its coroutines. One that Python
    did not start is PyTorch's: it runs a backward on a GPU, where a checkpoint must recompute on
    the backend of the forward, in whichever thread that was.
    """
    choice = _CHOICES.innermost()
    if choice is not None or torch.compiler.is_compiling():
        return choice or _DEFAULT
    thread = threading.current_thread()
    if isinstance(thread, threading._DummyThread):
        return _CHOICES.open[-1].value
    if thread is threading.main_thread() or not _CHOICES.of_main:
        return _DEFAULT
    return _CHOICES.of_main[-1].value


def requested(op: str) -> str:
    """The backend that the user chose for ``op``, or "auto"."""
    choice = _choice() if _CHOICES.open else _DEFAULT  # every layer asks, mostly of no block
    return choice.per_op.get(op, choice.default)


@contextlib.contextmanager
def use_backend(backend: str, *ops: str) -> Iterator[None]:
    """Force a backend for all ops, or for the ops named, inside a ``with`` block.

    Args:
        backend: "auto" | "eager" | "torch" | "stock" | "cpp" | "cudnn" | "triton" | "cuda".
        ops: names of ops, e.g. ``"attention"``; none means all.

    Raises:
        ArgumentValueError: for an unknown backend or op.
        BackendError: raised later, by the call of an op that the forced backend cannot run; the
            message holds the reason of every backend.

    The choice holds for the current thread and, in a coroutine, for its task alone. A thread
    without a choice of its own follows the main thread. The threads that PyTorch starts for a
    backward follow the newest block. The environment variable ``FASTPLM_BACKEND`` sets the choice
    outside of all blocks; an empty one is as none.
    """
    check_choice("use_backend", "backend", backend, ("auto", *BACKENDS))
    for op in ops:
        check_choice("use_backend", "ops", op, OP_NAMES)
    choice = _Choice(backend, {})
    if ops:
        outer = _choice()
        choice = _Choice(outer.default, {**outer.per_op, **dict.fromkeys(ops, backend)})
    with _CHOICES.block(choice):
        yield


def is_recorded() -> bool:
    """Whether ``record_decisions`` is active in this thread or coroutine."""
    return bool(_DECISIONS.open) and _DECISIONS.innermost() is not None


def takes_notes() -> bool:
    """Whether this is inside ``record_notes``."""
    return _NOTES.innermost() is not None


def note(text: Callable[[], str]) -> None:
    """Add a line for ``fastplm.explain``. ``text`` is only called inside ``record_notes``."""
    notes = _NOTES.innermost()
    if notes is not None:
        notes.append(text())


@contextlib.contextmanager
def record_notes() -> Iterator[list[str]]:
    """Collect the lines that models leave inside the block (``note``)."""
    with _NOTES.block([]) as notes:
        yield notes


@contextlib.contextmanager
def record_decisions() -> Iterator[list[Decision]]:
    """Collect a ``Decision`` for every op that this thread or coroutine calls inside the block."""
    with _DECISIONS.block([]) as record:
        yield record


def resolve(op: str, backends: dict[str, Backend], call: Any) -> str:
    """The name of the backend that runs this call: the one that the user chose, or the first one
    that nothing speaks against.

    Raises:
        BackendError: the requested backend cannot run it.
    """
    wanted = requested(op)
    plain = needs_plain_pytorch() if needs_dispatch(call) else None
    if _DECISIONS.open and (record := _DECISIONS.innermost()) is not None:
        record.append(_decide(op, backends, call, wanted, plain))
    for name in backends if wanted == "auto" else (wanted,):
        if _why_not(name, op, backends, call, wanted, plain) is None:
            return name
    raise _refusal(op, backends, call, wanted, plain)


def _why_not(
    name: str, op: str, backends: dict[str, Backend], call: Any, wanted: str, plain: str | None
) -> str | None:
    """Why a backend does not run a call: it cannot, or PyTorch's own function is faster; or None.

    Args:
        plain: the result of ``needs_plain_pytorch``.
    """
    if name not in backends:
        return "no implementation of this op"
    if plain is not None and name not in DIFFERENTIABLE:
        return plain
    backend, forced = backends[name], name == wanted
    reason = backend.rejects(call, forced=forced)
    if reason is None and not forced and "stock" in backends:
        reason = backend.slower(op, call)
    return reason


def _decide(
    op: str, backends: dict[str, Backend], call: Any, wanted: str, plain: str | None
) -> Decision:
    reasons = {name: _why_not(name, op, backends, call, wanted, plain) for name in BACKENDS}
    chosen = wanted
    if wanted == "auto":
        chosen = next(name for name, reason in reasons.items() if reason is None)
    passed = f"{chosen} was forced" if wanted != "auto" else f"{chosen} is preferred"
    if wanted == "auto" and chosen == "cpp" and reasons["stock"] is None:
        measured = backends[chosen].measured
        by_rule = None if measured is None else measured(*call)
        reasons["stock"] = None if by_rule is None else str(_rules.decide(op, by_rule))
    rejected = [(name, why or passed) for name, why in reasons.items() if name != chosen]
    return Decision(op, chosen, _describe(call), tuple(rejected))


def _refusal(
    op: str, backends: dict[str, Backend], call: Any, wanted: str, plain: str | None
) -> BackendError:
    why = _why_not(wanted, op, backends, call, wanted, plain) or "unknown backend"
    lines = [
        f"{op}: backend '{wanted}' was forced (use_backend or FASTPLM_BACKEND) and cannot run "
        f"{op}({_describe(call)}): {why}."
    ]
    for name in BACKENDS:
        if name != wanted:
            reason = _why_not(name, op, backends, call, wanted, plain)
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


def fast_choice(op: str) -> str | None:
    """What the user chose for an op, for the fast path of its plain calls on a CPU: "auto" or
    "cpp"; None if ``Op.__call__`` must choose."""
    wanted = requested(op)
    return None if is_recorded() or wanted not in ("auto", "cpp") else wanted


# --- reasons that several ops share --------------------------------------------------------------


def accepts_all(*arguments: Any, forced: bool) -> str | None:
    """The ``rejects`` of a backend that runs everything: the reference."""
    return None


def needs_cpu(tensor: torch.Tensor) -> str | None:
    """Why a CPU implementation cannot run a call on this tensor; None if it can."""
    return None if tensor.device.type == "cpu" else _not_cpu(tensor.device)


@functools.cache
def _not_cpu(device: torch.device) -> str:
    """The text is cached, as every call on a GPU needs it."""
    return f"it runs on CPU tensors, not {device}"


def needs_nvidia(device: torch.device) -> str | None:
    """Why a CUDA kernel cannot run on this device; None for an NVIDIA GPU from sm_80 on."""
    index = device.index or 0
    if index in _WHY_NOT_NVIDIA:
        return _WHY_NOT_NVIDIA[index]
    found = _why_not_nvidia(index)
    if not torch.compiler.is_compiling():  # it traces the properties of a device, but no change
        _WHY_NOT_NVIDIA[index] = found
    return found


_WHY_NOT_NVIDIA: dict[int, str | None] = {}


def _why_not_nvidia(index: int) -> str | None:
    if torch.version.hip is not None:
        return "ROCm: the kernels are made for NVIDIA GPUs"
    if not torch.cuda.is_available():  # a fake tensor of a device that this machine lacks
        return None
    device = torch.cuda.get_device_properties(index)
    if device.major < 8:
        return f"cuda:{index} is sm_{device.major}{device.minor}: the kernels need sm_80 or later"
    return None


def needs_triton(tensor: torch.Tensor, forced: bool) -> str | None:
    """Why a Triton kernel cannot run: it needs CUDA tensors, or the interpreter when forced."""
    if tensor.device.type not in ("cuda", "cpu"):
        return f"Triton runs on CUDA tensors, not {tensor.device}"
    if tensor.device.type == "cpu":
        if not forced:
            return "CPU tensors: Triton's interpreter is for tests and runs only when forced"
        interpreted = os.environ.get("TRITON_INTERPRET", "").lower()
        if interpreted not in ("1", "true", "yes", "on", "y"):  # as Triton reads it
            return "CPU tensors: set TRITON_INTERPRET=1 before Python starts to interpret kernels"
    reason = None if tensor.device.type == "cpu" else needs_nvidia(tensor.device)
    if reason is None and not triton_installed():
        reason = "triton is not installed (pip install triton)"
    return None if reason is None else warn_unless_forced(reason, forced)


def warn_unless_forced(reason: str | None, forced: bool) -> str | None:
    """Return ``reason``, why CUDA tensors get no kernel. Warn if the backend was not forced."""
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


# Evaluated at import: torch 2.11 cannot trace ``find_spec``.
_HAS_TRITON = importlib.util.find_spec("triton") is not None


def triton_installed() -> bool:
    """Whether ``import triton`` can work. Nothing is imported, and no device is started."""
    return _HAS_TRITON
