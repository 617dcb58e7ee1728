"""The faster of two implementations on a CPU, from a table of measurements.

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
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fastplm import _machine

#: The end of a form that was measured with one thread. Where none was, that of all threads counts.
ALONE = ", 1 thread"
#: From how much faster on ours is taken. A shipped table is the worse of two hours of one CPU.
LEAST_GAIN = 1.02
#: How much faster a product of fewer rows must be in a table that was made with one weight, which
#: was always in the caches: in a model it is not, and the gain is smaller.
_HOT, _HOT_ROWS = 1.25, 64
#: What ``aspect`` is of a square weight, and at most.
SQUARE, LONGEST = 64, 64**2
#: A measurement says nothing of a size that is more than this many doublings away.
_FAR = 6


def aspect(n: int, k: int) -> int:
    """The form of a weight [N, K]: N for ``SQUARE`` of K; the longest are taken for one form."""
    return min(max(SQUARE * n // max(k, 1), 1), LONGEST)


#: What the speed of a call depends on: a form of the op's own, such as "forward" and "training",
#: the dtype, and sizes. (A plain tuple, as every layer of a model makes one.)
CallClass = tuple[str, torch.dtype, tuple[int, ...]]


class Series(NamedTuple):
    """The measurements of one form and dtype of an op: times over a grid, the last axis fastest."""

    axes: list[list[int]]
    ours: list[float]  # microseconds
    stock: list[float]
    weights: int = 1  # that took turns, of a product

    def speedup(self, sizes: Sequence[int]) -> float | None:
        """The speedup at these sizes; None where all measured sizes are far away.

        Between measured sizes it is interpolated, all on a logarithmic scale; beyond them it is
        the speedup at the nearest size.
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


def own_table() -> Path:
    """Where ``fastplm measure`` writes: a file for each level of this CPU."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fastplm"
    return cache / f"measured-{_machine.cpu_kind()}.json"


def shipped_table() -> Path:
    return Path(__file__).parent / "measured" / f"{_machine.cpu_kind()}.json"


def dtype_key(dtype: torch.dtype) -> str:
    """A dtype, and whether this CPU computes in it: products of others are slow in PyTorch."""
    name = str(dtype).removeprefix("torch.")
    return f"{name} native" if _machine.computes_in(dtype) else name


class Table:
    """The table in use, read when it is first needed."""

    def __init__(self, path: Path | None, contents: dict[str, Any]) -> None:
        self.path = path
        self.contents = contents
        #: The speedup of a call, and ``reason_of`` it: layers ask, so the answers are kept.
        self.gain = functools.lru_cache(maxsize=4096)(self.speedup)
        self.slower = functools.lru_cache(maxsize=4096)(
            lambda *call: reason_of(self.speedup(*call))
        )

    def speedup(
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
        contents = json.loads(path.read_text("utf-8"))
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
        if contents is not None and (
            not of_this_cpu or contents.get("cpu") == _machine.cpu_model()
        ):
            return Table(path, contents)
    return Table(None, {})


def slower(op: str, call: CallClass) -> str | None:
    """Why a call is PyTorch's; None if csrc/ was seen to be faster."""
    return table().slower(op, *call)


def reason_of(speedup: float | None) -> str | None:
    """Why a call with this speedup of csrc/ is PyTorch's; None if it is not."""
    if speedup is None:
        return f"it was not measured on a CPU of the kind {_machine.cpu_kind()} (fastplm measure)"
    if speedup >= LEAST_GAIN:
        return None
    said = f"PyTorch's was measured {1 / speedup:.2f}x as fast on this kind of CPU"
    return said if speedup < 1.0 else f"{said}, which is too little a difference"


def training(*tensors: torch.Tensor | None) -> str:
    """The form of a call: "training" if it can have a gradient, else "forward"."""
    grad = torch.is_grad_enabled() and torch._C._any_requires_grad(*tensors)
    return "training" if grad else "forward"
