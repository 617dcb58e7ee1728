"""ops.geglu against PyTorch's functions, alone and compiled."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fastplm import ops
from fastplm.reference.geglu import geglu_ref
from harness import Case, default_device

GPU = default_device().type == "cuda"
DIRECTIONS = ("forward", "backward", "training")


def stock(input, activation="gelu"):
    first, factor = input.chunk(2, -1)
    active = F.silu(first) if activation == "silu" else F.gelu(first)
    return active * factor


def case(rows, width, activation):
    dtype = torch.bfloat16
    size = dtype.itemsize * rows * width

    def inputs(rows, width):
        return lambda device: {"input": torch.randn(rows, 2 * width, device=device, dtype=dtype)}

    def of(function):
        return lambda input: function(input, activation)

    return Case(
        op="geglu",
        label=f"{rows}x{width} {activation}",
        make=inputs(rows, width),
        make_small=inputs(9, 40),
        variants={
            "eager": of(geglu_ref),
            "stock": of(stock),
            "compile": of(torch.compile(stock)),
            "fastplm": of(ops.geglu),
        },
        gated=("stock", "compile", "fastplm"),
        wrt=("input",),
        directions=DIRECTIONS,
        bytes=3 * size,
        flops=0,
        training_bytes=8 * size,
        training_flops=0,
        dtype=dtype,
    )


ROWS = 32768 if GPU else 2048
CASES = [case(ROWS, width, activation) for width, activation in ((1152, "gelu"), (3072, "silu"))]


def test_geglu(case, direction, bench):
    bench(case, direction)
