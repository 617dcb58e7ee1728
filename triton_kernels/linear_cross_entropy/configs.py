"""The launch configurations, and how the work is cut into splits and chunks."""

from __future__ import annotations

import functools

import torch

from fastplm.triton_kernels._launch import (
    arch_of,
    cdiv,
    is_recording,
    nearest_arch,
    next_power_of_2,
)

# Columns of a split: few enough that the 20 row tiles of a small batch fill a device, enough that
# the partial results of a split cost little. The number does not depend on N, as only the device
# knows how many rows count.
_SPLIT_COLUMNS = 4096
# Elements of the buffer for dZ: enough columns that dW fills a large device, in at most 512 MiB of
# 16 bits; at most a quarter of the vocabulary, or a small batch would store all its logits.
_SCRATCH_ELEMENTS = 1 << 28
_SCRATCH_PARTS = 4

# (arch, 16-bit?, which) -> (BLOCK_N, BLOCK_V, BLOCK_E, num_warps, num_stages). BLOCK_E is the width
# of a row, or for wide rows the part of it that an iteration reads (forward, dZ) or that a program
# computes (dX, dW). "with more": argmax, label smoothing, or for dW the sum of another part, or the
# dZ of another op's narrow rows, take more registers. An architecture without an entry takes that
# of the nearest older one. Entries of 86 are for sm_86, 89 and 120 alone, where the tiles of sm_80
# spill; 90 then needs its own entry.
# None was measured on a device yet: the compile tests, which allow no spills in an inner loop, and
# on sm_80 and sm_90 simulated waits (tools/timeline.py) chose them.
_TABLE = {
    (80, True, "forward 16"): (128, 64, 16, 4, 2),
    (80, True, "forward 32"): (128, 64, 32, 4, 2),
    (86, True, "forward 32"): (128, 32, 32, 4, 2),
    (90, True, "forward 32"): (128, 64, 32, 8, 2),
    (100, True, "forward 32"): (128, 64, 32, 4, 2),
    (80, True, "forward 64"): (64, 64, 64, 4, 2),
    (90, True, "forward 64"): (128, 128, 64, 8, 3),
    (100, True, "forward 64"): (128, 64, 64, 4, 3),
    (80, True, "forward 128"): (64, 64, 128, 4, 2),
    (86, True, "forward 128"): (128, 32, 128, 8, 2),
    (90, True, "forward 128"): (64, 64, 128, 4, 3),
    (100, True, "forward 128"): (128, 64, 128, 8, 3),
    (80, True, "dX 16"): (64, 64, 16, 4, 2),
    (80, True, "dX 32"): (64, 64, 32, 4, 2),
    (80, True, "dX 64"): (64, 64, 64, 4, 2),
    (90, True, "dX 64"): (128, 64, 64, 8, 3),
    (80, True, "dX 128"): (32, 64, 128, 4, 2),
    (90, True, "dX 128"): (64, 32, 128, 4, 3),
    (80, True, "dW 16"): (64, 64, 16, 4, 2),
    (100, True, "dW 16"): (64, 64, 16, 8, 2),
    (80, True, "dW 32"): (64, 64, 32, 4, 2),
    (100, True, "dW 32"): (64, 64, 32, 8, 2),
    (80, True, "dW 64"): (64, 64, 64, 4, 2),
    (90, True, "dW 64"): (64, 128, 64, 8, 3),
    (100, True, "dW 64"): (64, 64, 64, 8, 3),
    (80, True, "dW 128"): (64, 64, 128, 4, 2),
    (90, True, "dW 128"): (64, 128, 128, 8, 2),
    (100, True, "dW 128"): (64, 64, 128, 8, 3),
    (80, True, "wide forward"): (128, 128, 32, 8, 3),
    (90, True, "wide forward"): (128, 256, 32, 8, 3),
    (100, True, "wide forward"): (128, 64, 64, 8, 4),
    (80, True, "wide forward with more"): (128, 64, 32, 4, 3),
    (86, True, "wide forward with more"): (128, 32, 32, 4, 3),
    (90, True, "wide forward with more"): (128, 256, 32, 8, 3),
    (80, True, "wide dZ"): (128, 128, 32, 4, 3),
    (90, True, "wide dZ"): (128, 256, 64, 8, 3),
    (120, True, "wide dZ"): (128, 64, 32, 4, 3),
    (80, True, "wide dX"): (128, 32, 128, 4, 4),
    (90, True, "wide dX"): (128, 64, 256, 8, 3),
    (100, True, "wide dX"): (128, 64, 128, 8, 4),
    (80, True, "wide dW"): (32, 64, 128, 4, 3),
    (90, True, "wide dW"): (64, 128, 256, 8, 4),
    (80, True, "wide dW with more"): (64, 64, 128, 4, 2),
    (90, True, "wide dW with more"): (64, 128, 256, 8, 4),
    (100, True, "wide dW with more"): (64, 128, 128, 8, 4),
    (80, False, "forward 16"): (64, 32, 16, 4, 1),
    (80, False, "forward 32"): (32, 64, 32, 4, 1),
    (80, False, "forward 64"): (32, 32, 64, 4, 1),
    (80, False, "forward 128"): (32, 32, 128, 8, 1),
    (80, False, "dX 16"): (32, 32, 16, 4, 1),
    (80, False, "dX 32"): (32, 32, 32, 4, 1),
    (80, False, "dX 64"): (32, 32, 64, 8, 1),
    (80, False, "dX 128"): (32, 32, 128, 8, 1),
    (86, False, "dX 128"): (32, 16, 128, 8, 1),
    (90, False, "dX 128"): (32, 32, 128, 8, 1),
    (80, False, "dW 16"): (32, 32, 16, 4, 1),
    (80, False, "dW 32"): (32, 32, 32, 4, 1),
    (80, False, "dW 64"): (32, 32, 64, 8, 1),
    (80, False, "dW 128"): (32, 32, 128, 8, 1),
    (80, False, "wide forward"): (64, 64, 32, 8, 2),
    (86, False, "wide forward"): (64, 64, 32, 8, 1),
    (90, False, "wide forward"): (64, 64, 32, 8, 2),
    (80, False, "wide forward with more"): (64, 64, 32, 8, 2),
    (86, False, "wide forward with more"): (64, 64, 32, 8, 1),
    (90, False, "wide forward with more"): (64, 64, 32, 8, 2),
    (80, False, "wide dZ"): (64, 64, 32, 8, 2),
    (80, False, "wide dX"): (64, 32, 64, 8, 2),
    (80, False, "wide dW"): (32, 64, 64, 8, 2),
    (80, False, "wide dW with more"): (32, 64, 64, 8, 1),
}
# The two kernels that only read and write stored logits (BLOCK_N, BLOCK_V, num_warps): each load of
# a thread has 16 bytes. With BERT's vocabulary, four rows an SM are 32 MB, which the L2 of an H100
# holds until they are read again. It would not hold more rows, or a vocabulary of 100,000.
_ROWS_TABLE = {
    (80, True): (1, 4096, 16),
    (80, False): (1, 4096, 16),
    (86, False): (1, 2048, 8),
    (90, False): (1, 4096, 16),
}
BIAS_TILE = (128, 64, 4)
# Programs that the kernel of dX should have for wide rows: a few for each SM of a large device.
_WANTED_PROGRAMS = 512


def config_of(which: str, input: torch.Tensor) -> dict[str, int]:
    half, width = input.dtype.itemsize == 2, input.shape[1]
    if which in ("forward", "dX", "dW"):
        which = f"{which} {min(max(16, next_power_of_2(width)), 128)}"
    # Tools change the table between recordings.
    look_up = _look_up.__wrapped__ if is_recording() else _look_up
    return look_up(which, half, arch_of(input.device))


@functools.lru_cache
def _look_up(which: str, half: bool, arch: int) -> dict[str, int]:
    known = tuple(arch for arch, h, name in _TABLE if (h, name) == (half, which))
    config = _TABLE[nearest_arch(arch, known), half, which]
    names = ("BLOCK_N", "BLOCK_V", "BLOCK_E", "num_warps", "num_stages")
    return dict(zip(names, config, strict=True))


def rows_config(input: torch.Tensor) -> tuple[int, int, int]:
    half = input.dtype.itemsize == 2
    known = tuple(arch for arch, h in _ROWS_TABLE if h == half)
    return _ROWS_TABLE[nearest_arch(arch_of(input.device), known), half]


def forward_config(more: bool, input: torch.Tensor) -> dict[str, int]:
    """``more``: argmax or label smoothing, which take more registers."""
    which = "forward"
    if is_wide(input.shape[1]):
        which = "wide forward with more" if more else "wide forward"
    return config_of(which, input)


def is_wide(width: int) -> bool:
    return width > 128


def split_columns_of(block_v: int) -> int:
    return cdiv(_SPLIT_COLUMNS, block_v) * block_v


def wide_split_columns(rows: int, width: int, chunk_columns: int, config: dict[str, int]) -> int:
    """Columns of a split of dX: without splits, few rows would leave most of a device idle.

    The partial sums of all splits, in fp32, take no more memory than a buffer of 16 bits for dZ.
    """
    tiles = cdiv(rows, config["BLOCK_N"]) * cdiv(width, config["BLOCK_E"])
    splits = min(_WANTED_PROGRAMS // max(tiles, 1), chunk_columns // (2 * width))
    splits = max(splits, 1)
    return cdiv(cdiv(chunk_columns, splits), config["BLOCK_V"]) * config["BLOCK_V"]


def chunk_columns_of(rows: int, vocab: int, *configs: dict[str, int]) -> int:
    """Columns of the buffer for dZ: whole tiles of every kernel that writes or reads it."""
    block = max(config["BLOCK_V"] for config in configs)
    wanted = min(cdiv(vocab, _SCRATCH_PARTS), _SCRATCH_ELEMENTS // max(rows, 1))
    return max(cdiv(wanted, block), 1) * block
