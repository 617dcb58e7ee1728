"""What this machine is: its CPU, the vector instructions in use, bf16, and memory in use."""

from __future__ import annotations

import functools
import os
import platform
from collections.abc import Callable
from pathlib import Path

import torch

from fastplm import _extension

X86 = ("x86_64", "AMD64")
LEVELS = ("baseline", "avx2", "avx512")


def level() -> str:
    """The vector instructions that csrc/ uses in this process, "none" where it is not built."""
    if _extension.lacks("attention", "CPU") is not None:
        return "none"
    return LEVELS[torch.ops.fastplm_C.level()]


def cpu_kind() -> str:
    """The name of a table: the level or architecture, the maker of the CPU, as MKL differs, and its
    generation where the width of its units does."""
    if platform.machine() not in X86:
        return platform.machine().lower()
    if level() == "avx2" and "Intel" in cpu_model():
        return "avx2-intel"
    if level() != "avx512":
        return level()
    if not torch.ops.fastplm_C.mkl_leaves_avx512_unused():
        return "avx512-intel"
    # Zen 5 is family 26; Zen 4 has half as wide units.
    return "avx512-amd-zen5" if int(_cpuinfo("cpu family", "0")) >= 26 else "avx512-amd"


def cpu_model() -> str:
    """The name that the CPU gives itself, where Linux says it."""
    return _cpuinfo("model name", platform.processor())


def device_label(device: torch.device) -> str:
    """A device, and of a GPU its name."""
    gpu = device.type == "cuda"
    return f"{device} ({torch.cuda.get_device_name(device)})" if gpu else str(device)


@functools.cache
def _cpuinfo(field: str, otherwise: str) -> str:
    """A field of the first processor, where Linux says it."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return otherwise
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith(field)), otherwise
    )


def computes_in(dtype: torch.dtype) -> bool:
    """Whether the CPU of this process has instructions for products of a dtype.

    Instructions above the level in use do not count: the CPU of ``ATEN_CPU_CAPABILITY=avx2`` is one
    without AVX-512, AMX and bf16, whatever the machine has.
    """
    return _computes_in(dtype)


# A constant of a graph (see ops/attention.py): Dynamo would warn of the cache.
computes_in._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.cache
def _computes_in(dtype: torch.dtype) -> bool:
    if dtype not in (torch.float16, torch.bfloat16):
        return True
    if platform.machine() not in X86:
        known = torch.ops.mkldnn
        wide = dtype is torch.bfloat16
        return (known._is_mkldnn_bf16_supported if wide else known._is_mkldnn_fp16_supported)()
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        return False
    matrices = torch.cpu._is_amx_tile_supported()
    if dtype is torch.float16:  # the CPUs that have those have AVX512-FP16, too
        return matrices
    return matrices or torch.cpu._is_avx512_bf16_supported()


def in_bf16(precision: str) -> bool:
    """Whether what has this ``--precision`` computes in bf16 on this machine."""
    return hardware_has_bf16() if precision == "auto" else precision == "bf16"


def hardware_has_bf16() -> bool:
    """Whether what models run on, the GPU or else the CPU, multiplies bf16 in hardware."""
    if torch.cuda.is_available():
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return computes_in(torch.bfloat16)


#: The most addresses that ``keep_memory`` adds to the heap, and its share of the machine's memory.
_RESERVE, _SHARE = 1 << 36, 2


@functools.cache
def keep_memory(*, huge_pages: bool = False) -> bool:
    """Keep freed memory in this process, for the next step.

    On Linux, glibc maps a large tensor anew and gives it back when it is freed. So each step of a
    training on a CPU writes to new pages, and for each 4 KiB of them Linux stops the program and
    clears the page. Call this once before the first step. ``fastplm``'s commands do it. It holds
    for the whole process, which then has the memory of its peak until it ends, and cannot be
    undone. How much it gives: docs/why-fast.md.

    Args:
        huge_pages: ask Linux for pages of 2 MiB. A long training is still faster, but Linux may
            take a second or two to find them. For this, addresses are added to the process, half
            of the machine's memory or 64 GiB, which take no memory before they are used. Nothing
            is added where Linux counts addresses (``vm.overcommit_memory=2``).

    Returns:
        False where nothing changes: without glibc, or without fastplm's extension.

    Determinism:
        No result changes.

    Examples:
        >>> fastplm.keep_memory(huge_pages=True)
        True
    """
    if _extension.lacks("keep_memory", "CompositeExplicitAutograd") is not None:
        return False
    return torch.ops.fastplm_C.keep_memory(_addresses() if huge_pages else 0)


def _addresses() -> int:
    """The bytes of addresses to add for huge pages."""
    try:
        if Path("/proc/sys/vm/overcommit_memory").read_text("utf-8").strip() == "2":
            return 0
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):  # not Linux
        return 0
    return min(memory // _SHARE, _RESERVE)


def peak_bytes(function: Callable[[], object], device: torch.device) -> int:
    """The most memory that PyTorch holds at once for ``function``, beyond what it held before."""
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        function()
        return torch.cuda.max_memory_allocated(device) - before
    # PyTorch keeps no such count for the CPU; its profiler sees every allocation and release.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        function()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak
