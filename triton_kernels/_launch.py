"""``launch``, the one function that launches kernels. It can record launches instead.

The compile tests record the launches that a launcher makes on meta tensors, and compile exactly
those signatures for each architecture. So no test writes a kernel's arguments a second time.

On a GPU, Triton's JIT compiles a kernel at its first launch and looks it up at each later one. The
look-up takes the host as long as a small kernel takes the device. ``_CompiledKernels`` looks up in
half that time. It asks Triton's own function which arguments a kernel is specialised on.
"""

from __future__ import annotations

import contextlib
import os
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import repeat
from typing import Any

import torch
import triton
import triton.language as tl
from triton import knobs
from triton._C import libtriton
from triton.compiler import CompiledKernel

#: Whether Triton interprets the kernels of this process: ``triton.jit`` decides when it decorates.
INTERPRETED = os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")
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


def is_recording() -> bool:
    """Whether launches are recorded. Tools that record may change launch tables between calls."""
    return _Recorder.launches is not None


class _Compiled:
    """How a compiled kernel is launched: ``launch(x, y, z, stream, *place, …)``, and then the
    arguments of the kernel, or if ``packed`` a tuple of them."""

    def __init__(self, kernel: CompiledKernel) -> None:
        # No launch metadata, and no hooks before and after a launch.
        self.launch, nothing, self.packed = kernel.run, (None, None, None), False
        self.place = kernel.function, kernel.packed_metadata, *nothing
        own = self.launch
        # The order of the C function's arguments is that of one release.
        if _release(triton.__version__) == (3, 7, 1) and type(own).__name__ == "CudaLauncher":
            if own.global_scratch_size == own.profile_scratch_size == 0:
                # All that Triton's launcher does then is to call a C function.
                self.launch, self.packed = own.launch, True
                head = kernel.function, own.launch_cooperative_grid, own.launch_pdl
                metadata = kernel.packed_metadata, *nothing
                self.place = *head, *metadata, None, None, own.arg_annotations, own.kernel_signature


class Fixed(dict[str, Any]):
    """The arguments, without pointers, of repeated launches of one kernel. Do not change it.

    A launcher that is called again with the same sizes passes the same object. The compiled kernel
    is then looked up by the other arguments alone.
    """

    def __init__(self, **arguments: Any) -> None:
        super().__init__(arguments)
        self.compiled: dict[tuple[Any, ...], _Compiled] = {}


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    device: torch.device,
    *,
    fixed: Fixed | None = None,
    **arguments: Any,
) -> None:
    """``kernel[grid](**fixed, **arguments)`` on ``device``; an empty grid launches nothing."""
    if 0 in grid:
        return
    every = arguments if fixed is None else {**fixed, **arguments}
    if _Recorder.launches is not None:
        _Recorder.launches.append(Launch(kernel, grid, every))
        return
    if device.type != "cuda":
        kernel[grid](**every)
        return
    index = device.index
    if index != torch._C._cuda_getDevice():
        with torch.cuda.device(device):
            launch(kernel, grid, device, fixed=fixed, **arguments)
        return
    place = (kernel.fn, index, *arguments)  # the hash of a kernel itself is Python code
    if place not in _KERNELS:
        _KERNELS[place] = _compiled_kernels(kernel, index, tuple(arguments))
    kernels = _KERNELS[place]
    runtime = knobs.runtime
    before, after = runtime.launch_enter_hook, runtime.launch_exit_hook
    if (  # hooks, debugging or instrumentation ask for a launch by Triton's JIT
        kernels is None
        or getattr(before, "calls", before)
        or getattr(after, "calls", after)
        or runtime.debug
        or knobs.compilation.instrumentation_mode
        or getattr(runtime, "add_stages_inspection_hook", None)
        or getattr(kernel, "pre_run_hooks", None)
    ):
        kernel[grid](**every)
        return
    known = kernels.compiled if fixed is None else fixed.compiled
    key = kernels.key(arguments)
    compiled = known.get(key)
    if compiled is None:
        new = kernel[grid](**every)
        if isinstance(new, CompiledKernel) and kernels.agrees(key, every):
            known[key] = _Compiled(new)
        return
    stream = torch._C._cuda_getCurrentRawStream(index)
    x, y, z = (*grid, 1, 1)[:3]
    given = tuple(map(every.__getitem__, kernels.places))
    compiled.launch(x, y, z, stream, *compiled.place, *((given,) if compiled.packed else given))


class _CompiledKernels:
    """What the JIT compiled for launches of one kernel on one device.

    Args:
        names: the keywords that change (parameters of the kernel and compile options), in order.

    A key holds the same as the JIT's own key: the constants, and for every other argument its type
    and specialisation (a pointer or integer divisible by 16, the integer 1, None), as Triton's
    ``native_specialize_impl`` gives them. The first launch of a key is made by the JIT, and
    ``agrees`` checks that the JIT's specialisation is the key's. The JIT also checks that no global
    constant of the kernel has changed; this class does not.
    """

    def __init__(self, kernel: Any, index: int, names: tuple[str, ...]) -> None:
        *_, self.backend, self.binder = kernel.device_caches[index]
        parameters = {parameter.name: parameter for parameter in kernel.params}
        self.places = {name: place for place, name in enumerate(parameters)}
        self.names = [n for n in names if n in parameters and not parameters[n].is_constexpr]
        changing = [parameters[name] for name in self.names]
        self.is_const = [parameter.is_const for parameter in changing]
        self.specialized = [not parameter.do_not_specialize for parameter in changing]
        self.aligned = [not parameter.do_not_specialize_on_alignment for parameter in changing]
        self.constants = [name for name in names if name not in self.names]
        self.compiled: dict[tuple[Any, ...], _Compiled] = {}

    def key(self, arguments: dict[str, Any]) -> tuple[Any, ...]:
        return (
            self,
            *map(arguments.__getitem__, self.constants),
            *map(
                libtriton.native_specialize_impl,
                repeat(self.backend),
                map(arguments.__getitem__, self.names),
                self.is_const,
                self.specialized,
                self.aligned,
            ),
        )

    def agrees(self, key: tuple[Any, ...], arguments: dict[str, Any]) -> bool:
        """Whether the JIT specialises the arguments of a launch as the key does."""
        _, specialization, _ = self.binder(**arguments)
        return key[1 + len(self.constants) :] == tuple(
            specialization[self.places[name]] for name in self.names
        )


def _compiled_kernels(kernel: Any, index: int, names: tuple[str, ...]) -> _CompiledKernels | None:
    """None if the JIT must launch this kernel, as this file does not know its type."""
    if type(kernel) is not triton.JITFunction or not hasattr(libtriton, "native_specialize_impl"):
        return None
    try:
        return _CompiledKernels(kernel, index, names)
    except (AttributeError, TypeError, ValueError):  # this file does not know this Triton
        return None


_KERNELS: dict[tuple[Any, ...], _CompiledKernels | None] = {}


def cdiv(a: int, b: int) -> int:
    """``a / b`` rounded up. Triton's own function costs the host microseconds."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of 2 that is not less than ``n``, for ``n`` of 1 or more."""
    return 1 << (n - 1).bit_length()


#: Bytes of shared memory that an SM has, by architecture.
SHARED_PER_SM = {
    arch: 1024 * size
    for arch, size in {80: 164, 86: 100, 89: 100, 90: 228, 100: 228, 120: 100}.items()
}


def shared_limit(arch: int) -> int:
    """Bytes of shared memory that a block may ask for: CUDA reserves 1 KB of each SM."""
    return SHARED_PER_SM[arch] - 1024


def arch_of(device: torch.device) -> int:
    """The architecture that launch configurations are looked up for (see ``table_arch``)."""
    if _Recorder.arch is not None:
        return table_arch(_Recorder.arch, shared_limit(_Recorder.arch))
    return _table_arch(device.index or 0) if device.type == "cuda" else 80


def table_arch(arch: int, shared: int) -> int:
    """The architecture whose launch configurations sm_<arch> uses.

    Args:
        shared: bytes of shared memory that a block may ask for.

    86 means the instructions of sm_80 with 99 KB of shared memory. 120 means the same with more of
    everything: it has neither wgmma (sm_90) nor tensor memory (sm_100).
    """
    if arch >= 120 and shared < shared_limit(100):
        return 120
    usable = [86]
    usable += [
        known
        for known in (80, 90, 100)
        if known <= (arch if arch < 120 else 80) and shared_limit(known) <= shared
    ]
    return usable[-1]


def sm_count(device: torch.device) -> int:
    """The number of SMs."""
    if device.type != "cuda":
        return 4  # interpreted: few, so that a program handles several tiles
    return _multiprocessors(device.index or 0)


#: For each launch table, the first version of Triton that puts a proxy fence between copies to
#: shared memory and the wgmma or tcgen05 that reads them. Triton 3.7.1 leaves some out on sm_100.
_FENCED = {90: (3, 7, 1), 100: (3, 9)}


def _release(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)[:3]))


@lru_cache
def _table_arch(index: int) -> int:
    device = torch.cuda.get_device_properties(index)
    arch = 10 * device.major + device.minor
    table = table_arch(arch, device.shared_memory_per_block_optin)
    if _release(triton.__version__) < _FENCED.get(table, ()):
        warnings.warn(
            f"matmuls on this GPU may be wrong with Triton {triton.__version__}: it puts no fence "
            f"between copies to shared memory and the tensor cores of sm_{arch} that read them. "
            f"Install Triton {'.'.join(map(str, _FENCED[table]))} or later, or call "
            "use_backend('eager')",
            stacklevel=2,
        )
    return table


@lru_cache
def _multiprocessors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def nearest_arch(arch: int, known: tuple[int, ...]) -> int:
    """The newest architecture in ``known`` that is not newer than ``arch``, else the oldest.

    sm_120 skips the entries of 90 and 100: it has neither their instructions nor their memory.
    """
    older = (entry for entry in known if entry <= arch and (arch < 120 or entry not in (90, 100)))
    return max(older, default=min(known))


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
