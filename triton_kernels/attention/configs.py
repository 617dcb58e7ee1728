"""The launch configurations, and for which shapes each kernel is chosen.

None was measured on a device yet. They are chosen by the machine code (static_report.py), among the
configurations that spill no register in an inner loop under Triton 3.7.1 in any use of the kernel
(under 3.6.0 the fp32 forward with a bias spills). On sm_90 and sm_120, head dims up to 64 are
chosen by simulated waits (tools/timeline.py).

With n stages, a loop issues the copies of a later tile after the products of this one, then waits
for all tiles but the n - 2 latest (LDGDEPBAR and DEPBAR in the machine code of every architecture):
no copy is in flight while it computes with 2 stages, and one tile is with 3. Where 3 stages would
leave an SM room for one block instead of two, the table has 2: the blocks then fill each other's
waits. sm_100 still has many entries with 2 stages.

The entries of 86 are for GPUs with 99 KB of shared memory a block, where those of sm_80 do not fit;
120 stands beside 86 (``_launch.table_arch``).
"""

from __future__ import annotations

from typing import Any

import torch

from fastplm.triton_kernels._launch import (
    INTERPRETED,
    arch_of,
    nearest_arch,
    next_power_of_2,
)

_LENGTHS = (64, 128)
_TILE_KINDS = (64, 128, "128 and more")
#: "mask": with an attention mask, whatever the other options.
STREAM_KINDS = ("plain", "dropout", "bias", "bias dropout", "mask")

# "tf32 …": fp32 multiplied in TF32. The tensor cores of sm_90 take 32-bit operands in one layout
# only: there V is copied 4 bytes at a time, and K, which two products of dQ read, is not pipelined.
# Configurations: BLOCK_Q, BLOCK_K, num_warps, num_stages (and TRANSPOSED for dK and dV, PERSISTENT
# for tile_bwd), keyed by (arch, 16 bit?, BLOCK_D), in the order of the kinds above. The last one
# serves all further kinds; an architecture without an entry takes that of the nearest older one
# (entries of 86 are for cards with less shared memory alone, so 90 has one beside them); head dims
# below 64 without an entry take that of 64.
_TABLE: dict[str, dict[tuple[int, bool, int], tuple[tuple[int, ...], ...]]] = {
    "row_fwd": {
        (80, True, 64): ((64, 64, 4, 1), (64, 128, 4, 1)),
        (80, True, 128): ((64, 64, 4, 1), (64, 128, 8, 1)),
        (90, True, 128): ((64, 64, 4, 1), (64, 128, 4, 1)),
    },
    "tile_bwd": {
        (80, True, 16): ((64, 64, 4, 1, 0), (128, 128, 8, 1, 0)),
        (90, True, 16): ((64, 64, 4, 1, 0), (128, 128, 8, 3, 1), (128, 128, 8, 1, 0)),
        (100, True, 16): ((64, 64, 4, 1, 0), (128, 128, 8, 1, 0)),
        (80, True, 32): ((64, 64, 4, 1, 0), (16, 128, 8, 1, 0)),
        (90, True, 32): ((64, 64, 4, 1, 0), (128, 128, 8, 3, 1), (128, 128, 8, 1, 0)),
        (100, True, 32): ((64, 64, 4, 1, 0), (128, 128, 8, 1, 0)),
        (80, True, 64): ((64, 64, 4, 1, 0), (32, 128, 8, 1, 0)),
        (90, True, 64): ((64, 64, 4, 1, 0), (128, 128, 8, 3, 1), (128, 128, 8, 1, 0)),
        (100, True, 64): ((64, 64, 4, 1, 0), (128, 128, 8, 1, 0)),
        (80, True, 128): ((64, 64, 8, 1, 0),),
        (100, True, 128): ((64, 64, 4, 1, 0),),
    },
    "stream_fwd": {
        (80, True, 64): ((128, 64, 8, 3),),
        (86, True, 64): ((128, 64, 8, 3), (128, 64, 8, 3), (128, 64, 8, 2)),
        (90, True, 64): ((128, 32, 4, 3), (128, 64, 4, 3), (128, 32, 4, 3)),
        (100, True, 64): ((64, 64, 4, 2), (128, 64, 8, 2), (128, 64, 8, 1)),
        (120, True, 64): ((64, 32, 4, 3), (64, 32, 4, 3), (128, 32, 4, 2), (64, 32, 4, 3)),
        (80, True, 128): ((64, 64, 8, 1), (64, 64, 8, 1), (32, 64, 8, 1)),
        (90, True, 128): ((128, 64, 8, 3),),
        (100, True, 128): ((128, 64, 8, 2), (64, 64, 8, 1)),
        (80, True, 256): ((64, 64, 8, 1), (64, 64, 8, 1), (32, 64, 8, 1)),
        (100, True, 256): ((64, 64, 8, 1), (64, 64, 8, 1), (64, 64, 8, 2)),
        (80, False, 64): ((16, 64, 8, 1), (32, 64, 8, 1), (16, 64, 4, 1)),
        (80, False, 128): ((32, 64, 8, 1), (32, 64, 8, 1), (16, 32, 8, 1)),
    },
    "decode": {
        (80, True, 64): ((16, 64, 4, 3),),
        (100, True, 64): ((16, 64, 4, 2),),
        (80, True, 128): ((16, 64, 4, 2),),
        (90, True, 128): ((16, 64, 4, 3),),
        (100, True, 128): ((16, 64, 4, 2),),
        (80, True, 256): ((16, 64, 4, 2), (16, 64, 4, 2), (16, 64, 8, 1)),
        (100, True, 256): ((16, 64, 4, 2), (16, 64, 4, 2), (16, 64, 4, 1)),
        (80, False, 64): ((16, 64, 4, 1),),
        (80, False, 128): ((16, 64, 8, 1), (16, 64, 8, 1), (16, 64, 16, 1)),
    },
    "stream_dq": {
        (80, True, 64): ((32, 64, 4, 1), (64, 64, 4, 2), (32, 64, 8, 1)),
        (86, True, 64): ((32, 64, 4, 1), (64, 64, 4, 2), (32, 64, 8, 1), (16, 64, 4, 1)),
        (90, True, 64): (
            (128, 32, 8, 3),
            (64, 64, 4, 3),
            (128, 32, 4, 3),
            (64, 64, 4, 3),
            (64, 64, 4, 2),
        ),
        (100, True, 64): ((64, 64, 4, 2), (64, 64, 4, 2), (64, 64, 4, 1)),
        (120, True, 64): (
            (64, 32, 4, 3),
            (64, 64, 4, 2),
            (64, 32, 4, 3),
            (128, 32, 8, 2),
            (16, 64, 4, 1),
        ),
        (80, True, 128): ((64, 64, 8, 1), (64, 64, 8, 1), (32, 64, 4, 1)),
        (90, True, 128): ((64, 64, 4, 2), (64, 64, 4, 2), (32, 64, 8, 3)),
        (100, True, 128): (
            (64, 64, 4, 2),
            (64, 64, 4, 2),
            (128, 64, 8, 1),
            (64, 64, 4, 1),
            (128, 64, 8, 1),
        ),
        (80, True, 256): ((32, 64, 8, 1),),
        (86, True, 256): ((16, 64, 8, 1),),
        (90, True, 256): ((32, 64, 8, 1), (32, 64, 8, 1), (16, 64, 8, 1)),
        (100, True, 256): ((64, 64, 8, 1), (64, 64, 8, 1), (32, 64, 8, 1)),
        (80, False, 64): ((16, 64, 8, 1),),
        (120, False, 64): ((16, 64, 8, 1), (16, 64, 8, 1), (16, 64, 8, 1), (16, 32, 8, 1)),
        (80, False, 128): ((16, 16, 8, 1),),
    },
    "stream_dkdv": {
        (80, True, 64): (
            (32, 64, 4, 1, 1),
            (16, 64, 4, 1, 0),
            (32, 64, 4, 1, 1),
            (32, 64, 8, 1, 1),
        ),
        (90, True, 64): (
            (64, 64, 4, 3, 1),
            (64, 64, 4, 3, 0),
            (32, 64, 4, 3, 1),
            (64, 64, 4, 3, 0),
            (32, 64, 4, 3, 1),
        ),
        (100, True, 64): ((64, 64, 4, 3, 0), (64, 64, 4, 3, 0), (32, 64, 4, 1, 1)),
        (120, True, 64): (
            (32, 64, 4, 2, 1),
            (32, 64, 4, 3, 1),
            (32, 64, 4, 3, 1),
            (32, 64, 4, 2, 1),
        ),
        (80, True, 128): ((32, 64, 4, 1, 1), (64, 64, 8, 1, 0), (32, 64, 8, 1, 1)),
        (90, True, 128): (
            (32, 64, 8, 3, 1),
            (128, 64, 8, 1, 0),
            (16, 64, 8, 3, 1),
            # One stage: a copy of Q ahead would overwrite what a product still reads.
            (16, 64, 8, 1, 0),
        ),
        (100, True, 128): ((64, 64, 4, 1, 1), (64, 64, 4, 1, 0), (32, 64, 4, 2, 1)),
        (80, True, 256): ((32, 64, 8, 1, 1), (16, 64, 8, 1, 0)),
        (86, True, 256): (
            (16, 64, 8, 1, 0),
            (16, 64, 8, 1, 0),
            (16, 64, 8, 1, 0),
            (16, 32, 8, 1, 0),
        ),
        (90, True, 256): (
            (32, 64, 8, 1, 0),
            (32, 64, 8, 1, 0),
            (16, 64, 8, 1, 0),
            (16, 32, 8, 1, 0),
        ),
        (100, True, 256): ((32, 64, 8, 1, 1), (32, 64, 8, 1, 1), (32, 64, 8, 1, 0)),
        (80, False, 64): ((16, 64, 8, 1, 0), (16, 64, 8, 1, 0), (16, 32, 8, 1, 0)),
        (86, False, 64): ((16, 64, 8, 1, 0), (16, 32, 8, 1, 0), (16, 32, 8, 1, 0)),
        (90, False, 64): ((16, 64, 8, 1, 0), (16, 64, 8, 1, 0), (16, 32, 8, 1, 0)),
        (100, False, 64): ((16, 64, 8, 1, 0), (16, 64, 8, 1, 0), (32, 32, 8, 1, 0)),
        (80, False, 128): ((16, 16, 8, 1, 0), (16, 16, 8, 1, 0), (16, 32, 8, 1, 0)),
        (90, False, 128): ((16, 32, 8, 1, 0), (16, 32, 8, 1, 0), (16, 16, 4, 1, 0)),
        (100, False, 128): ((16, 32, 8, 1, 0),),
    },
    "dbias": {
        (80, True, 64): ((32, 64, 4, 1),),
        (90, True, 64): ((64, 64, 8, 1),),
        (80, True, 128): ((32, 64, 8, 1),),
        (90, True, 128): ((64, 64, 8, 1),),
        (100, True, 128): ((32, 64, 8, 1),),
        (80, True, 256): ((32, 64, 8, 1),),
        (100, True, 256): ((32, 64, 4, 1),),
        (80, False, 64): ((16, 64, 8, 1),),
        (80, False, 128): ((16, 64, 16, 1),),
        (100, False, 128): ((16, 64, 16, 1),),
    },
    "tf32 stream_fwd": {
        (80, False, 64): ((128, 64, 8, 3), (128, 64, 8, 3), (128, 64, 8, 3), (128, 32, 8, 2)),
        (86, False, 64): ((128, 64, 8, 3), (128, 64, 8, 3), (128, 32, 8, 2)),
        (90, False, 64): ((128, 64, 8, 3),),
        # Triton 3.6 does not compile the last one for 4 warps.
        (100, False, 64): ((128, 64, 8, 2), (64, 64, 4, 1), (128, 64, 8, 2), (64, 32, 8, 1)),
        (80, False, 128): ((64, 64, 8, 1), (32, 64, 8, 1), (64, 64, 8, 1), (32, 64, 8, 1)),
        (90, False, 128): ((128, 64, 8, 2), (128, 32, 8, 2), (128, 32, 8, 2), (32, 64, 8, 1)),
        (100, False, 128): ((64, 64, 8, 1), (32, 64, 8, 1), (64, 64, 8, 1), (32, 64, 8, 1)),
    },
    "tf32 decode": {
        (80, False, 64): ((16, 64, 4, 2),),
        (90, False, 64): ((16, 64, 4, 3),),
        (80, False, 128): ((16, 64, 8, 1),),
    },
    "tf32 stream_dq": {
        (80, False, 64): ((64, 32, 4, 2), (32, 64, 4, 2), (64, 32, 4, 2), (32, 64, 4, 2)),
        (90, False, 64): ((64, 64, 4, 2), (64, 64, 4, 1), (64, 32, 4, 2), (64, 64, 8, 2)),
        (100, False, 64): ((64, 64, 4, 2), (64, 64, 4, 2), (64, 32, 4, 1)),
        (80, False, 128): ((32, 64, 8, 1),),
        (86, False, 128): ((16, 64, 8, 1),),
        (90, False, 128): ((32, 32, 8, 1), (32, 32, 8, 1), (32, 32, 8, 1), (16, 32, 8, 1)),
        (100, False, 128): ((64, 64, 8, 1), (32, 64, 8, 1)),
    },
    "tf32 stream_dkdv": {
        (80, False, 64): (
            (32, 64, 4, 1, 1),
            (32, 64, 8, 1, 1),
            (32, 64, 4, 1, 1),
            (32, 32, 8, 1, 0),
        ),
        (90, False, 64): (
            (32, 64, 4, 1, 1),
            (32, 64, 8, 1, 1),
            (32, 64, 4, 1, 1),
            (32, 64, 8, 1, 0),
        ),
        (100, False, 64): (
            (32, 64, 4, 1, 1),
            (32, 64, 4, 1, 0),
            (32, 64, 4, 1, 1),
            (32, 64, 8, 1, 0),
        ),
        (80, False, 128): ((32, 64, 8, 1, 0), (32, 64, 8, 1, 0), (16, 64, 8, 1, 0)),
        (86, False, 128): ((16, 64, 8, 1, 0),),
        (90, False, 128): ((32, 64, 8, 1, 0), (32, 64, 8, 1, 0), (16, 64, 8, 1, 0)),
        (100, False, 128): ((32, 64, 8, 1, 0),),
    },
    "tf32 dbias": {
        (80, False, 64): ((32, 64, 8, 1),),
        (90, False, 64): ((64, 64, 8, 1),),
        (100, False, 64): ((32, 64, 8, 1),),
        (80, False, 128): ((32, 64, 8, 1),),
    },
}

#: With an attention mask these replace the last configuration of an entry, which would spill.
_MASKED: dict[tuple[str, int, bool, int], tuple[int, ...]] = {
    ("dbias", 80, False, 64): (16, 64, 4, 1),
    ("dbias", 80, False, 128): (16, 32, 16, 1),
    ("dbias", 100, False, 128): (32, 32, 16, 1),
    ("dbias", 100, True, 256): (16, 64, 4, 1),
    ("stream_dkdv", 80, True, 64): (16, 64, 8, 1, 1),
    ("stream_dkdv", 80, False, 64): (16, 32, 8, 1, 1),
    ("stream_dkdv", 100, False, 64): (16, 32, 8, 1, 0),
    ("stream_dkdv", 80, True, 128): (32, 64, 8, 1, 0),
    ("stream_dkdv", 90, True, 128): (16, 32, 8, 1, 0),
    ("stream_dkdv", 100, True, 128): (32, 64, 4, 1, 1),
    ("stream_dkdv", 120, True, 64): (16, 64, 8, 1, 1),
    ("stream_dkdv", 80, False, 128): (16, 16, 8, 1, 0),
    ("stream_dkdv", 80, True, 256): (16, 32, 8, 1, 0),
    ("stream_dkdv", 90, True, 256): (16, 16, 8, 1, 0),
    ("stream_dq", 80, False, 64): (16, 32, 8, 1),
    ("stream_dq", 80, True, 128): (16, 64, 4, 1),
    ("stream_dq", 80, True, 256): (16, 64, 8, 1),
    ("stream_dq", 100, True, 256): (16, 64, 8, 1),
    ("stream_fwd", 80, True, 64): (64, 32, 4, 2),
    ("stream_fwd", 90, True, 128): (64, 64, 8, 3),
    ("stream_fwd", 100, True, 128): (32, 64, 8, 1),
    ("stream_fwd", 120, True, 64): (64, 32, 4, 2),
    ("stream_fwd", 80, True, 256): (16, 64, 8, 1),
    ("tf32 dbias", 90, False, 64): (32, 64, 8, 1),
    ("tf32 stream_dkdv", 90, False, 64): (16, 64, 8, 1, 0),
    ("tf32 stream_dkdv", 100, False, 64): (32, 64, 8, 1, 1),
    ("tf32 stream_dkdv", 80, False, 128): (16, 16, 8, 1, 0),
    ("tf32 stream_dkdv", 90, False, 128): (16, 32, 8, 1, 0),
    ("tf32 stream_dq", 80, False, 64): (16, 64, 4, 2),
    ("tf32 stream_dq", 90, False, 64): (32, 64, 8, 1),
    ("tf32 stream_dq", 80, False, 128): (16, 64, 8, 1),
    ("tf32 stream_dq", 100, False, 128): (16, 64, 8, 1),
    ("tf32 stream_fwd", 80, False, 64): (64, 32, 8, 2),
    ("tf32 stream_fwd", 80, False, 128): (16, 32, 8, 1),
    ("tf32 stream_fwd", 90, False, 128): (16, 64, 8, 1),
    ("tf32 stream_fwd", 100, False, 128): (16, 64, 8, 1),
}

#: With so few queries (decoding with a cache) a tile of queries is as small as a matmul allows.
DECODE_QUERIES = 16


def block_d_of(head_dim: int) -> int:
    return max(16, next_power_of_2(head_dim))


def row_limit(dtype: torch.dtype, head_dim: int) -> int:
    """The longest row of keys that the forward holds in one tile; fp32 always streams."""
    return 128 if dtype.itemsize == 2 and block_d_of(head_dim) <= 128 else 0


def tile_limit(dtype: torch.dtype, head_dim: int) -> int:
    """The longest queries and keys of a head that the backward holds in one program."""
    if dtype.itemsize != 2:
        return 0
    return {16: 128, 32: 128, 64: 128, 128: 64}.get(block_d_of(head_dim), 0)


def needs_statistics(
    dtype: torch.dtype, head_dim: int, max_seqlen_q: int, max_seqlen_k: int, has_bias: bool
) -> bool:
    """Whether the backward streams: it then reads O and row statistics, which the forward saves."""
    return has_bias or max(max_seqlen_q, max_seqlen_k) > tile_limit(dtype, head_dim)


#: Tiles of queries for which a program of the row kernel keeps its keys and values.
_ROW_TILES = 2


def length_class(seqlen: int) -> int:
    """The tile that holds a whole row: 64 or 128."""
    return max(64, next_power_of_2(seqlen))


def tile_kind(shape: Any) -> str | int:
    longest = length_class(max(shape.seqlen_q, shape.seqlen_k))
    more = shape.has_window or shape.kind in ("dropout", "mask")  # which takes more registers
    return "128 and more" if longest == 128 and more else longest


def config_of(kernel: str, shape: Any, kind: str | int) -> dict[str, int]:
    """The launch configuration of a kernel: ``kind`` is a length class or what a stream carries."""
    if INTERPRETED:
        config = _interpreter_config(kernel, kind, shape.dtype)
    else:
        name = f"tf32 {kernel}" if shape.precision == "tf32" else kernel
        table = _TABLE[name]
        half, block_d = shape.dtype.itemsize == 2, shape.block_d
        if all(entry[1:] != (half, block_d) for entry in table):
            block_d = 64
        known = tuple(entry[0] for entry in table if entry[1:] == (half, block_d))
        arch = nearest_arch(arch_of(shape.device), known)
        last = "PERSISTENT" if kernel == "tile_bwd" else "TRANSPOSED"
        names = ("BLOCK_Q", "BLOCK_K", "num_warps", "num_stages", last)
        kinds = {"row_fwd": _LENGTHS, "tile_bwd": _TILE_KINDS}.get(kernel, STREAM_KINDS)
        chosen = table[arch, half, block_d]
        config = chosen[min(kinds.index(kind), len(chosen) - 1)]
        if kind == "mask":  # the tiles of 80 are small enough for 86, too
            config = _MASKED.get((name, 80 if arch == 86 else arch, half, block_d), config)
        config = dict(zip(names, config, strict=False))
    return config | dict(tiles_q=_ROW_TILES) if kernel == "row_fwd" else config


def _interpreter_config(kernel: str, kind: str | int, dtype: torch.dtype) -> dict[str, int]:
    if kernel == "row_fwd":
        return dict(BLOCK_Q=64, BLOCK_K=int(kind))
    if kernel == "tile_bwd":
        block = 64 if kind == 64 else 128
        return dict(BLOCK_Q=block, BLOCK_K=block, PERSISTENT=kind == 128)
    # The backward computes the forward's scores again and must get the same bits. Tensor cores sum
    # over D in one order for any tile; the interpreter's BLAS does not, so all tiles are equal.
    config = dict(BLOCK_Q=32, BLOCK_K=64)
    if kernel == "stream_dkdv":
        config["TRANSPOSED"] = dtype.itemsize == 2 and kind != "dropout"
    return config
