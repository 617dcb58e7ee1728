"""How kernels are launched: one function, so that a launch can be recorded instead of run.

The compile lane records the launches that a launcher makes on meta tensors and compiles exactly
those signatures for each architecture; nothing about a kernel's arguments is written down twice.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl

from fastplm.triton_kernels import _sass

#: Whether the kernels of this process are interpreted: fixed when they are decorated.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
_INTERPRETED = tl.constexpr(INTERPRETED)


@dataclass(frozen=True)
class Launch:
    """A recorded launch: the kernel, its grid and every keyword it was given."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]


class _Recorder:
    arch: int | None = None
    launches: list[Launch] | None = None


@contextlib.contextmanager
def record_launches(arch: int) -> Iterator[list[Launch]]:
    """Record launches instead of making them, with the configurations of ``sm_<arch>``."""
    previous = _Recorder.arch, _Recorder.launches
    _Recorder.arch, _Recorder.launches = arch, []
    try:
        yield _Recorder.launches
    finally:
        _Recorder.arch, _Recorder.launches = previous


def launch(kernel: Any, grid: tuple[int, ...], device: torch.device, **arguments: Any) -> None:
    """``kernel[grid](**arguments)`` on ``device``; an empty grid launches nothing."""
    if 0 in grid:
        return
    if _Recorder.launches is not None:
        _Recorder.launches.append(Launch(kernel, grid, arguments))
        return
    if device.type == "cuda":
        with torch.cuda.device(device):
            kernel[grid](**arguments)
    else:
        kernel[grid](**arguments)


def arch_of(device: torch.device) -> int:
    """The architecture that launch configurations are looked up for (see ``table_arch``)."""
    if _Recorder.arch is not None:
        return table_arch(_Recorder.arch, _sass.shared_limit(_Recorder.arch))
    return _table_arch(device.index or 0) if device.type == "cuda" else 80


def table_arch(arch: int, shared: int) -> int:
    """Whose launch configurations sm_<arch> takes, where a block may have that much shared memory.

    86 stands for sm_80's instructions with 99 KB. That is what sm_120 has, too: neither wgmma nor
    the tensor memory of sm_100, whose numbers its own is above.
    """
    usable = [86]
    usable += [
        known
        for known in (80, 90, 100)
        if known <= (arch if arch < 120 else 80) and _sass.shared_limit(known) <= shared
    ]
    return usable[-1]


def sm_count(device: torch.device) -> int:
    """How many programs run side by side if an SM has room for one."""
    if device.type != "cuda":
        return 4  # the interpreter: few, so that a program takes several turns
    return _multiprocessors(device.index or 0)


@lru_cache
def _table_arch(index: int) -> int:
    device = torch.cuda.get_device_properties(index)
    return table_arch(10 * device.major + device.minor, device.shared_memory_per_block_optin)


@lru_cache
def _multiprocessors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def nearest_arch(arch: int, known: tuple[int, ...]) -> int:
    """The newest architecture of a table that is not newer than ``arch`` (else the oldest)."""
    return max((entry for entry in known if entry <= arch), default=min(known))


def upcast_dot(dtype: torch.dtype) -> bool:
    """Triton's interpreter multiplies bf16 tiles wrongly: there, dots run on exact fp32 copies."""
    return INTERPRETED and dtype is torch.bfloat16


@triton.jit
def dot(a, b, acc, UPCAST: tl.constexpr):
    """``acc + a @ b`` with products in the dtype of the tiles and an fp32 sum (fp32: no TF32)."""
    if UPCAST:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def cast(x, dtype: tl.constexpr, UPCAST: tl.constexpr):
    """fp32 ``x`` in ``dtype``, rounded to nearest even; the interpreter truncates to bf16."""
    if UPCAST:
        bits = x.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        x = tl.where(x == x, rounded.to(tl.float32, bitcast=True), x)
    return x.to(dtype)


@triton.jit
def max_with_index(x):
    """The largest of each row [M, N] and the first place of it, both [M]."""
    if _INTERPRETED:  # Triton 3.9's interpreter raises an error where a row is NaN throughout
        x = tl.where(x == x, x, float("-inf"))
    return tl.max(x, 1, return_indices=True)
