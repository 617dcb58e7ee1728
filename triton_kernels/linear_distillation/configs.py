"""The launch configurations of what ``linear_cross_entropy`` has no kernel for."""

from __future__ import annotations

import functools

import torch

from fastplm.triton_kernels._launch import arch_of, is_recording, nearest_arch
from fastplm.triton_kernels.linear_cross_entropy.configs import config_of, is_wide

# (arch, 16-bit?, which) -> (BLOCK_N, BLOCK_V, BLOCK_E, num_warps, num_stages), for the kernels that
# multiply a tile of both sides: their accumulators are two tiles in fp32. "js": the mixture's pass.
# None was measured on a device yet: the compile tests, which allow no spills in an inner loop, and
# the simulated cycles of a tile (not on sm_100) chose them. A tile of 128x128 moves half the bytes
# of one of 64x64, which outweighs its spills, once for all of E.
_TABLE = {
    (80, True, "forward"): (64, 128, 32, 4, 3),
    (90, True, "forward"): (128, 128, 64, 8, 3),
    (100, True, "forward"): (128, 128, 64, 8, 4),
    (120, True, "forward"): (64, 64, 64, 4, 2),
    (80, True, "js"): (64, 128, 32, 4, 3),
    (86, True, "js"): (64, 64, 64, 4, 2),
    (90, True, "js"): (128, 128, 64, 8, 3),
    (100, True, "js"): (128, 128, 64, 8, 4),
    (120, True, "js"): (64, 64, 64, 4, 2),
    (80, True, "dz"): (64, 128, 32, 4, 3),
    (90, True, "dz"): (128, 128, 64, 8, 3),
    (100, True, "dz"): (128, 128, 64, 8, 4),
    (120, True, "dz"): (64, 64, 64, 4, 2),
    (80, False, "forward"): (32, 64, 32, 4, 1),
    (80, False, "js"): (32, 64, 32, 4, 1),
    (80, False, "dz"): (32, 64, 32, 4, 1),
}
_OF_ONE_SIDE = {"forward": "wide forward with more", "dz": "wide dZ"}
# The kernel that reads and writes stored logits: BLOCK_N, BLOCK_V, num_warps.
ROWS_TILE = (1, 1024, 4)


def tile_config(which: str, input: torch.Tensor, taught: torch.Tensor | None) -> dict[str, int]:
    """The launch configuration of tiles of both sides, in 16 bits if both are.

    Wide rows without a teacher's take the tiles of ``linear_cross_entropy``. In narrow ones these
    would spill, as the loop over E has one or two turns and is unrolled: they take those of "js",
    which has room for more accumulators.
    """
    if taught is None:
        if is_wide(input.shape[1]):
            return config_of(_OF_ONE_SIDE[which], input)
        which = "js"
    half = input.dtype.itemsize == 2 and (taught is None or taught.dtype.itemsize == 2)
    look_up = _look_up.__wrapped__ if is_recording() else _look_up
    return look_up(which, half, arch_of(input.device))


@functools.lru_cache
def _look_up(which: str, half: bool, arch: int) -> dict[str, int]:
    known = tuple(arch for arch, h, name in _TABLE if (h, name) == (half, which))
    config = _TABLE[nearest_arch(arch, known), half, which]
    names = ("BLOCK_N", "BLOCK_V", "BLOCK_E", "num_warps", "num_stages")
    return dict(zip(names, config, strict=True))
