"""ops.gather_rows against its eager reference and index_select, at the masked share of 15 %."""

from __future__ import annotations

import torch

import peers
from fastplm import ops
from fastplm.reference.gather_rows import gather_rows_ref
from harness import Case, default_device

GPU = default_device().type == "cuda"
DTYPE = torch.bfloat16 if GPU else torch.float32
#: The targets on a GPU are for the two halves of a step; a CPU measures the whole step.
DIRECTIONS = ("forward", "backward") if GPU else ("forward", "training")


def inputs(rows, width, slots):
    def make(device: torch.device):
        # Positions are ascending and unique, with spare slots at the end, as from mask_tokens.
        used = slots - slots // 20
        positions = torch.randperm(rows, device=device)[:used].sort().values
        spare = positions.new_full((slots - used,), -1)
        return dict(
            input=torch.randn(rows, width, device=device, dtype=DTYPE),
            positions=torch.cat([positions, spare]),
        )

    return make


def index_select(input, positions):
    """The library call alone. It leaves row 0 in the spare slots, so it is a mark, not a peer."""
    return input.index_select(0, positions.clamp(min=0))


def case(label, rows, width, targets=None):
    slots = rows * 15 // 100
    row = DTYPE.itemsize * width
    moved = (2 * row + 8) * slots
    return Case(
        op="gather_rows",
        label=label,
        make=inputs(rows, width, slots),
        make_small=inputs(257, width, 38),
        variants={
            "eager": gather_rows_ref,
            "fastplm": ops.gather_rows,
            "index_select, spare slots wrong": index_select,
            "compiled": peers.compiled("gather_rows", gather_rows_ref),
        },
        wrt=("input",),
        directions=DIRECTIONS,
        bytes=moved,
        # The backward reads the gradient of each slot and writes the gradient of every row.
        training_bytes=moved + (row + 8) * slots + row * rows,
        dtype=DTYPE,
        targets=targets or {},
    )


def gpu_cases():
    # Targets on an H200, in microseconds.
    targets = {"forward": (3.5, 5), "backward": (13.5, 16)}
    return [
        case("BERT-base 256x128", 256 * 128, 768, targets),
        case("ELECTRA-small 128x128", 128 * 128, 256),
    ]


def cpu_cases():
    return [
        case("BERT-base 8x128", 8 * 128, 768),
        case("ELECTRA-small 32x128", 32 * 128, 256),
    ]


CASES = gpu_cases() if GPU else cpu_cases()


def test_gather_rows(case, direction, bench):
    bench(case, direction)
