"""Launches of Triton kernels on CPU tensors, compiled for a GPU and run by the emulator.

    with emulated(arch=90, seed=1):
        ops.attention(q, k, v)

``TRITON_INTERPRET`` must not be set when the kernels are imported, or ``triton.jit`` makes
interpreted kernels of them.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import struct
from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

from compile_kernels import kernel_modules, source_of
from fastplm import use_backend
from fastplm.testing import poisoned_memory
from fastplm.triton_kernels import _launch
from fastplm.triton_kernels._launch import Launch, record_launches
from ptx.machine import Program, Schedule
from ptx.memory import GlobalMemory
from ptx.parse import PtxError

#: The ``struct`` format of a plain parameter, by its type in PTX.
_PACKED = {"u8": "<B", "u16": "<H", "u32": "<I", "u64": "<Q", "f32": "<f", "f64": "<d"}
#: The last programs; each may hold 100 MB once it has run.
_programs: dict[Any, Program] = {}
_MOST_PROGRAMS = 16

# The kernels are imported before ``emulated`` sets TRITON_INTERPRET.
for _name in kernel_modules():
    importlib.import_module(f"fastplm.triton_kernels.{_name}")


def span(tensor: torch.Tensor) -> tuple[int, int]:
    """The first byte of a tensor's elements and the one after the last."""
    start = tensor.data_ptr()
    if tensor.numel() == 0:
        return start, start
    last = sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return start, start + (last + 1) * tensor.element_size()


def compile_program(
    launch: Launch, arch: int, edit: Callable[[str], str] | None = None
) -> tuple[Program, list[str]]:
    """The program of a launch, its text changed by ``edit``, and the names of its parameters."""
    source, options, key = source_of(launch)
    names = [parameter.name for parameter in launch.kernel.params]
    for index, name in enumerate(names):
        value = launch.arguments.get(name)
        if isinstance(value, torch.Tensor) and value.data_ptr() % 16:
            source.attrs.pop((index,), None)
            key += f" {name} is not aligned"
    passed = [name for name in names if source.signature[name] != "constexpr"]
    known = arch, key, edit
    if known not in _programs:
        compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
        text = compiled.asm["ptx"]
        metadata = compiled.metadata
        if edit is not None:
            edited = edit(text)
            if edited == text:
                raise ValueError(f"the edit changes nothing in {launch.kernel.__name__}")
            text = edited
        if len(_programs) == _MOST_PROGRAMS:
            del _programs[next(iter(_programs))]
        _programs[known] = Program(text, metadata.shared, 32 * metadata.num_warps)
    return _programs[known], passed


def run_launch(
    launch: Launch, arch: int, schedule: Schedule, edit: Callable[[str], str] | None = None
) -> None:
    """Run one launch on the memory of its CPU tensors."""
    program, passed = compile_program(launch, arch, edit)
    params, spans = {}, {}
    for index, (name, kind) in enumerate(program.kernel.params.items()):
        # Further parameters are scratch memory, which these kernels do not ask for.
        value = launch.arguments[passed[index]] if index < len(passed) else 0
        if isinstance(value, torch.Tensor):
            spans[passed[index]] = span(value)
            value = value.data_ptr()
        if kind[0] == "u":
            value = int(value) % (1 << int(kind[1:]))
        params[name] = struct.pack(_PACKED[kind], value)
    try:
        program.run(launch.grid, params, GlobalMemory(spans), schedule)
    except PtxError as error:
        raise PtxError(f"{launch.kernel.__name__}, {error}") from error


class _Runs(list):
    """The list that launches are recorded in; it also runs each of them."""

    def __init__(self, run: Callable[[Launch], None]) -> None:
        super().__init__()
        self.run = run

    def append(self, launch: Launch) -> None:
        super().append(launch)
        self.run(launch)


@contextlib.contextmanager
def emulated(
    arch: int,
    seed: int = 0,
    *,
    schedule: Schedule | None = None,
    edits: dict[str, Callable[[str], str]] | None = None,
) -> Iterator[list[Launch]]:
    """Run the Triton backend's launches in the emulator; yields the launches that were made.

    Memory that is allocated inside holds NaN, or the largest integer, until a launch writes it.
    ``edits`` changes the PTX of kernels, by their names.
    """
    if _launch.INTERPRETED:
        raise RuntimeError("unset TRITON_INTERPRET: interpreted kernels cannot be compiled")
    schedule = schedule or Schedule(seed)

    def run(launch: Launch) -> None:
        run_launch(launch, arch, schedule, (edits or {}).get(launch.kernel.__name__))

    interpreted = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"  # else the Triton backend refuses tensors of the CPU
    try:
        with record_launches(arch), use_backend("triton"), poisoned_memory():
            _launch._Recorder.launches = launches = _Runs(run)
            yield launches
    finally:
        if interpreted is None:
            del os.environ["TRITON_INTERPRET"]
        else:
            os.environ["TRITON_INTERPRET"] = interpreted
