"""What arithmetic says of a kernel's time on an H200: from best to what an expert would expect.

Nothing here is measured on a device but the two rates of memory and matrix products. The lower end
takes the busiest unit alone, as if all others worked in its shadow and nothing waited. The upper
end waits: an iteration's matrix products and what they read, then its arithmetic, never both; whole
waves of programs; of the rates of memory and of plain products the share that good kernels reach;
each launch's start and end.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

from compile_kernels import Report
from fastplm.triton_kernels._launch import Launch
from machine_code import DEVICES

ARCH = 90
_, SMS, CLOCK, BYTES_PER_S = DEVICES[ARCH]
#: bf16 products of random data, measured on the device.
PRODUCT_FLOPS = 790e12
#: Of the rate of memory and of products, what kernels without a flaw of their own reach.
REACHED = 0.8
#: Microseconds from one launch's last program to the next one's full speed.
LAUNCH = 3.0
#: Rows and columns of the tile that a large product is made of.
_TILE = (128, 256)


class Span(NamedTuple):
    """Microseconds."""

    low: float
    high: float

    def __add__(self, other: tuple) -> Span:
        return Span(self.low + other[0], self.high + other[1])

    def __str__(self) -> str:
        low, high = (f"{time:.0f}" for time in self)
        return low if low == high else f"{low}–{high}"

    def milliseconds(self) -> str:
        return f"{self.low / 1e3:.3g}–{self.high / 1e3:.3g}"


def moved(size: float) -> Span:
    """The time of ``size`` bytes, read or written."""
    time = size / BYTES_PER_S * 1e6
    return Span(time, time / REACHED + LAUNCH)


def product(m: int, n: int, k: int) -> Span:
    """The time of a plain [m, k] by [k, n]; few tiles are split along k."""
    low = 2 * m * n * k / PRODUCT_FLOPS
    tiles = math.ceil(m / _TILE[0]) * math.ceil(n / _TILE[1])
    of_tile = 2 * _TILE[0] * _TILE[1] * k / (PRODUCT_FLOPS / SMS)
    waves = min(
        math.ceil(tiles * split / SMS) * of_tile / split
        + (2 * 4 * split * m * n / BYTES_PER_S if split > 1 else 0.0)
        for split in (1, 2, 4, 8)
    )
    return Span(low * 1e6, waves / REACHED * 1e6 + LAUNCH)


def executed(report: Report, launch: Launch, iterations: int, persistent: bool = False) -> Span:
    """The time of that many turns of the kernel's inner loop, by all programs together.

    ``persistent``: the device has as many programs as it has places.
    """
    programs = SMS * report.blocks if persistent else torch.Size(launch.grid).numel()
    filled = min(SMS, programs)
    low = iterations * report.bound()[1] / filled / CLOCK
    unit = report.cycles
    cycles = max(unit["tensor"], unit["shared"]) + max(unit["issue"], unit["MUFU"])
    places = SMS * report.blocks
    waves = math.ceil(programs / places) / (programs / places) if programs > places else 1.0
    high = iterations * cycles * waves / filled / CLOCK
    return Span(low * 1e6, high * 1e6 + LAUNCH)
