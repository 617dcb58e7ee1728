"""Which of two implementations on a CPU is the faster one, from a table of measurements.

``fastplm measure`` (``fastplm/_measure.py``) times every op against the best that stock PyTorch has
for the same, over a grid of sizes, and writes the table of this kind of CPU: ``fastplm/measured/``
has those that were made so far, and the user's own, of exactly this CPU, comes before them. A call
takes the speedup of the sizes around its own; where that is small, and where nothing was measured,
it is PyTorch's.
"""

from __future__ import annotations

import bisect
import functools
import json
import math
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fastplm import _extension

X86 = ("x86_64", "AMD64")
LEVELS = ("baseline", "avx2", "avx512")
#: The end of a form that was measured with one thread. Where none was, that of all threads counts.
ALONE = ", 1 thread"
#: From how much faster on ours is taken. A shipped table is the worse of two hours of one CPU.
LEAST_GAIN = 1.02
#: How much faster a product of fewer rows must be in a table that was made with one weight, which
#: was always in the caches: in a model it is not, and the gain is smaller.
_HOT, _HOT_ROWS = 1.25, 64
#: What ``aspect`` is of a square weight, and at most.
SQUARE, LONGEST = 64, 64**2
#: Doublings from the nearest measurement from which on it says nothing.
_FAR = 6


def aspect(n: int, k: int) -> int:
    """The form of a weight [N, K]: N for ``SQUARE`` of K; the longest are taken for one form."""
    return min(max(SQUARE * n // max(k, 1), 1), LONGEST)


class CallClass(NamedTuple):
    """What the speed of a call depends on."""

    form: str  # of the op's own, such as "forward" and "training"
    dtype: torch.dtype
    sizes: tuple[int, ...]


class Series(NamedTuple):
    """The measurements of one form and dtype of an op: times over a grid, the last axis fastest."""

    axes: list[list[int]]
    ours: list[float]  # microseconds
    stock: list[float]
    weights: int = 1  # that took turns, of a product

    def speedup(self, sizes: Sequence[int]) -> float | None:
        """That of these sizes, None where all that were measured are far away.

        Between sizes that were measured it is interpolated, all on a logarithmic scale; beyond them
        it is that of the nearest.
        """
        cells = [(0, 1.0)]  # places in the grid, and their weights
        # Tables of before an axis was added say nothing of it: it is the last one.
        for size, axis in zip(sizes, self.axes, strict=False):
            size = max(size, 1)
            if min(abs(math.log2(size / point)) for point in axis) > _FAR:
                return None
            above = bisect.bisect_left(axis, size)
            if 0 < above < len(axis):
                step = math.log(axis[above] / axis[above - 1])
                share = math.log(size / axis[above - 1]) / step
                around = [(above - 1, 1 - share), (above, share)]
            else:
                around = [(min(above, len(axis) - 1), 1.0)]
            cells = [
                (place * len(axis) + at, weight * part)
                for place, weight in cells
                for at, part in around
            ]
        return math.prod(
            (self.stock[place] / self.ours[place]) ** weight for place, weight in cells
        )


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


@functools.cache
def _cpuinfo(field: str, otherwise: str) -> str:
    """A field of the first processor, where Linux says it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return otherwise
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith(field)), otherwise
    )


def own_table() -> Path:
    """Where ``fastplm measure`` writes: a file for each level of this CPU."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fastplm"
    return cache / f"measured-{cpu_kind()}.json"


def shipped_table() -> Path:
    return Path(__file__).parent / "measured" / f"{cpu_kind()}.json"


def dtype_key(dtype: torch.dtype) -> str:
    """A dtype, and whether this CPU computes in it: products of others are slow in PyTorch."""
    name = str(dtype).removeprefix("torch.")
    return f"{name} native" if computes_in(dtype) else name


def computes_in(dtype: torch.dtype) -> bool:
    """Whether the CPU of this process has instructions for products of a dtype.

    Those that its level has no use for do not count: the CPU of ``ATEN_CPU_CAPABILITY=avx2`` is one
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


def hardware_has_bf16() -> bool:
    """Whether what models run on, the GPU or else the CPU, multiplies bf16 in hardware."""
    if torch.cuda.is_available():
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return computes_in(torch.bfloat16)


class Table:
    """The table in use, read when it is first needed."""

    def __init__(self, path: Path | None, contents: dict[str, Any]) -> None:
        self.path = path
        self.contents = contents
        self.speedup = functools.lru_cache(maxsize=4096)(self._speedup)

    def _speedup(
        self, op: str, form: str, dtype: torch.dtype, sizes: tuple[int, ...]
    ) -> float | None:
        """How much faster than PyTorch ours is; None where it was not measured."""
        of_op, key = self.contents.get("ops", {}).get(op, {}), dtype_key(dtype)
        given = of_op.get(f"{form} {key}") or of_op.get(f"{form.removesuffix(ALONE)} {key}")
        if given is None:
            return None
        series = Series(**given)
        speedup = series.speedup(sizes)
        if speedup is not None and op == "linear" and series.weights == 1 and sizes[0] < _HOT_ROWS:
            speedup /= _HOT
        return speedup


def read_table(path: Path) -> dict[str, Any] | None:
    """The contents of a file; None if it is not there, or is no table."""
    try:
        contents = json.loads(path.read_text())
        for forms in contents["ops"].values():
            for given in forms.values():
                series = Series(**given)
                cells = math.prod(map(len, series.axes))
                if not len(series.ours) == len(series.stock) == cells > 0:
                    return None
    except (OSError, ValueError, RecursionError, AttributeError, TypeError, KeyError):
        return None
    return contents


@functools.cache
def table() -> Table:
    """The user's own table of this CPU, or the one of its kind, or an empty one."""
    for path, of_this_cpu in ((own_table(), True), (shipped_table(), False)):
        contents = read_table(path)
        if contents is not None and (not of_this_cpu or contents.get("cpu") == cpu_model()):
            return Table(path, contents)
    return Table(None, {})


def slower(op: str, call: CallClass) -> str | None:
    """Why a call is PyTorch's; None if ours was seen to be faster."""
    speedup = table().speedup(op, *call)
    return None if speedup is not None and speedup >= LEAST_GAIN else _why(speedup)


@functools.lru_cache(maxsize=4096)  # a sentence takes longer than a small call
def _why(speedup: float | None) -> str:
    if speedup is None:
        return f"it was not measured on a CPU of the kind {cpu_kind()} (fastplm measure)"
    said = f"PyTorch's was measured {1 / speedup:.2f}x as fast on this kind of CPU"
    return said if speedup < 1.0 else f"{said}, which is too little a difference"


def training(*tensors: torch.Tensor | None) -> str:
    """The form of a call: "training" if it can have a gradient, else "forward"."""
    grad = torch.is_grad_enabled() and torch._C._any_requires_grad(*tensors)
    return "training" if grad else "forward"
