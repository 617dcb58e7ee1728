"""The backends: which one the user chose, and why one cannot run on this machine.

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
from pathlib import Path
from typing import Any

import torch

from fastplm.errors import check_choice

#: In the order of preference of "auto"; "eager" can run anything, so it is last.
BACKENDS = ("cuda", "cpp", "cudnn", "triton", "stock", "torch", "eager")
#: Backends in plain PyTorch: autograd differentiates them, without an operator of fastplm.
DIFFERENTIABLE = ("stock", "eager")
#: Every op is named after its file. ``_registry.OPS`` has the ops once ``fastplm.ops`` is imported.
OP_NAMES = tuple(sorted(path.stem for path in (Path(__file__).parent / "ops").glob("[!_]*.py")))


class _Block:
    """A ``with`` block: its value, the block around it, and whether a thread that is in no block
    follows it: one of the main thread, outside of coroutines."""

    def __init__(self, value: Any, outer: _Block | None, leads: bool) -> None:
        self.value, self.outer, self.leads = value, outer, leads


class _Blocks:
    """The ``with`` blocks of one kind that the threads and coroutines of this process are in."""

    def __init__(self, name: str) -> None:
        self.open: list[_Block] = []  # all of them, the newest last: most calls are in no block
        self.here: ContextVar[_Block | None] = ContextVar(f"fastplm.{name}", default=None)
        # Dynamo cannot trace a ContextVar, so traced code reads the blocks of its thread. It guards
        # on them: a compiled function is traced again when they change.
        self.of_thread = threading.local()

    def innermost(self) -> Any:
        """The value of the block that this thread or coroutine is in; None if it is in none."""
        if not self.open:
            return None
        if torch.compiler.is_compiling():
            blocks = getattr(self.of_thread, "blocks", None)
            return blocks[-1].value if blocks else self.leading()
        block = self.here.get()
        while block is not None and block not in self.open:  # coroutines end theirs in any order
            block = block.outer
        return None if block is None else block.value

    def leading(self, of_any: bool = False) -> Any:
        """The value of the newest block that threads without one follow, or of all; or None."""
        values = [block.value for block in self.open if of_any or block.leads]
        return values[-1] if values else None

    @contextlib.contextmanager
    def block(self, value: Any) -> Iterator[Any]:
        if torch.compiler.is_compiling():
            block = _Block(value, None, False)
        else:
            in_main = threading.current_thread() is threading.main_thread()
            block = _Block(value, self.here.get(), in_main and asyncio._get_running_loop() is None)
            self.here.set(block)
        blocks = getattr(self.of_thread, "blocks", None)
        if blocks is None:
            blocks = self.of_thread.blocks = []
        self.open.append(block)
        blocks.append(block)
        try:
            yield value
        finally:
            self.open.remove(block)
            blocks.remove(block)


#: The backend chosen for each op, and under "" for all others.
_Choice = dict[str, str]
_CHOICES, _DECISIONS, _NOTES = _Blocks("choices"), _Blocks("decisions"), _Blocks("notes")
_DEFAULT: _Choice = {"": os.environ.get("FASTPLM_BACKEND") or "auto"}  # an empty one is as none
check_choice("fastplm", "FASTPLM_BACKEND", _DEFAULT[""], ("auto", *BACKENDS))


def _choice() -> _Choice:
    """What counts for this thread or coroutine.

    A thread without a block follows the main thread, but none of its coroutines. One that Python
    did not start is PyTorch's: it runs a backward on a GPU, where a checkpoint must recompute on
    the backend of the forward, in whichever thread that was.
    """
    choice = _CHOICES.innermost()
    if choice is None and not torch.compiler.is_compiling():
        thread = threading.current_thread()
        if thread is not threading.main_thread():
            choice = _CHOICES.leading(of_any=isinstance(thread, threading._DummyThread))
    return choice or _DEFAULT


def requested(op: str) -> str:
    """The backend that the user chose for ``op``, or "auto"."""
    choice = _choice() if _CHOICES.open else _DEFAULT  # every layer asks, mostly of no block
    return choice.get(op) or choice[""]


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
    choice = {**_choice(), **dict.fromkeys(ops, backend)} if ops else {"": backend}
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
def record_decisions() -> Iterator[list[Any]]:
    """Collect a ``Decision`` for every op that this thread or coroutine calls inside the block."""
    with _DECISIONS.block([]) as record:
        yield record


def fast_choice(op: str) -> str | None:
    """What the user chose for an op, for the fast path of its plain calls on a CPU: "auto" or
    "cpp"; None if ``Op.__call__`` must choose."""
    wanted = requested(op)
    return None if is_recorded() or wanted not in ("auto", "cpp") else wanted


# --- reasons that several ops share --------------------------------------------------------------


def accepts_all(*arguments: Any, forced: bool) -> str | None:
    """The ``rejects`` of a backend that runs everything: the reference."""
    return None


def why_not_cpu(tensor: torch.Tensor) -> str | None:
    """Why a CPU implementation cannot run a call on this tensor; None if it can."""
    return None if tensor.device.type == "cpu" else _not_cpu(tensor.device)


@functools.cache
def _not_cpu(device: torch.device) -> str:
    """The text is cached, as every call on a GPU needs it."""
    return f"it runs on CPU tensors, not {device}"


def why_not_nvidia(device: torch.device) -> str | None:
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


def why_not_triton(tensor: torch.Tensor, forced: bool) -> str | None:
    """Why a Triton kernel cannot run: it needs CUDA tensors, or the interpreter when forced."""
    if tensor.device.type not in ("cuda", "cpu"):
        return f"Triton runs on CUDA tensors, not {tensor.device}"
    if tensor.device.type == "cpu":
        if not forced:
            return "CPU tensors: Triton's interpreter is for tests and runs only when forced"
        interpreted = os.environ.get("TRITON_INTERPRET", "").lower()
        if interpreted not in ("1", "true", "yes", "on", "y"):  # as Triton reads it
            return "CPU tensors: set TRITON_INTERPRET=1 before Python starts to interpret kernels"
    reason = None if tensor.device.type == "cpu" else why_not_nvidia(tensor.device)
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
