"""ops.dropout against PyTorch's, on a CPU: the hidden states of a batch."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fastplm import ops
from fastplm.reference.dropout import dropout_ref
from harness import Case, Unavailable, default_device

GPU = default_device().type == "cuda"
# A step measures both directions: PyTorch saves its mask, so its forward does more than fastplm's,
# and its backward less.
DIRECTIONS = ("forward", "training")
SEED = 3


def torch_dropout(input):
    return F.dropout(input, 0.1)


def eager(input):
    return dropout_ref(input, 0.1, seed=SEED)


def fastplm(input):
    if GPU:
        raise Unavailable("csrc/ draws on the CPU")
    return ops.dropout(input, 0.1, seed=SEED)


def inputs(rows, columns, dtype):
    return lambda device: {"input": torch.randn(rows, columns, device=device, dtype=dtype)}


def case(label, rows, columns, dtype):
    size = 2 * dtype.itemsize * rows * columns
    return Case(
        op="dropout",
        label=label,
        make=inputs(rows, columns, dtype),
        make_small=inputs(9, 33, dtype),
        variants={"eager": eager, "torch": torch_dropout, "fastplm": fastplm},
        gated=("fastplm",),  # PyTorch's dropout draws other elements
        wrt=("input",),
        directions=DIRECTIONS,
        bytes=size,
        flops=0,
        training_bytes=2 * size,
        training_flops=0,
        dtype=dtype,
    )


CASES = [
    case(f"hidden states {rows}x768 {name}", rows, 768, dtype)
    for rows in ((65536,) if GPU else (1024, 4096))
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16))
]


def test_dropout(case, direction, bench):
    bench(case, direction)
