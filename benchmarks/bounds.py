"""What arithmetic expects of a kernel's time on an H200.

Nothing here is measured on a device but the two rates of memory and matrix products. A kernel of
ours is followed instruction by instruction (``tools/timeline.py``), with its start, its end and
whole waves of its programs; memory and plain products reach a share of their rates, as good kernels
do; each launch has a start and an end.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

from compile_kernels import Report, timing
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


def moved(size: float) -> float:
    """Microseconds of ``size`` bytes, read or written."""
    return size / BYTES_PER_S / REACHED * 1e6 + LAUNCH


def product(m: int, n: int, k: int) -> float:
    """Microseconds of a plain [m, k] by [k, n]; few tiles are split along k."""
    tiles = math.ceil(m / _TILE[0]) * math.ceil(n / _TILE[1])
    of_tile = 2 * _TILE[0] * _TILE[1] * k / (PRODUCT_FLOPS / SMS)
    waves = min(
        math.ceil(tiles * split / SMS) * of_tile / split
        + (2 * 4 * split * m * n / BYTES_PER_S if split > 1 else 0.0)
        for split in (1, 2, 4, 8)
    )
    return waves / REACHED * 1e6 + LAUNCH


def executed(
    report: Report, launch: Launch, iterations: float, persistent: bool = False, inner: int = 1
) -> tuple[float, str]:
    """(microseconds, what takes them) of a launch.

    Args:
        iterations: turns of the inner loop by all programs together.
        persistent: the device has as many programs as it has places.
        inner: turns of the inner loop in each of the loop around it.
    """
    places = SMS * report.blocks
    programs = places if persistent else torch.Size(launch.grid).numel()
    turns = [inner, max(1, round(iterations / programs / inner))]
    found = timing(launch, report, turns, math.ceil(programs / SMS))
    return found.cycles / CLOCK * 1e6 + LAUNCH, found.reason()
