"""The time of a kernel on an H200, by arithmetic.

Only two numbers here were measured on a device: the rates of memory and of matrix products. The
machine code of fastplm's kernels is simulated (``tools/timeline.py``), with a start, an end and
whole waves of programs. Copies and plain products reach a share of their rates, as good kernels do.
Each launch adds time for its start and end.
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
#: The share of the rates of memory and of products that good kernels reach.
REACHED = 0.8
#: Microseconds from one launch's last program to the next one's full speed.
LAUNCH = 3.0
#: Rows and columns of the tiles of a large product.
_TILE = (128, 256)


def moved(size: float) -> float:
    """Microseconds to read or write ``size`` bytes."""
    return size / BYTES_PER_S / REACHED * 1e6 + LAUNCH


def product(m: int, n: int, k: int) -> float:
    """Microseconds of a plain product [m, k] by [k, n]; if there are few tiles, k is split."""
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
    """(microseconds, the reason for them) of a launch.

    Args:
        iterations: turns of the inner loop, over all programs.
        persistent: there are as many programs as run on the device at once.
        inner: turns of the inner loop in one turn of the loop around it.
    """
    places = SMS * report.blocks
    programs = places if persistent else torch.Size(launch.grid).numel()
    turns = [inner, max(1, round(iterations / programs / inner))]
    found = timing(launch, report, turns, math.ceil(programs / SMS))
    return found.cycles / CLOCK * 1e6 + LAUNCH, found.reason()
