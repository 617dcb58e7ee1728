"""ops.gelu against PyTorch's, its compiler's and Transformers', on a CPU: a feed-forward block."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from transformers.activations import ACT2FN

from fastplm import ops
from fastplm.reference.gelu import gelu_ref
from harness import Case, Unavailable, default_device

GPU = default_device().type == "cuda"
DIRECTIONS = ("forward", "backward")


eager = functools.partial(gelu_ref, approximate="tanh")


def fastplm(input):
    if GPU:
        raise Unavailable("csrc/ computes on the CPU")
    return ops.gelu(input, approximate="tanh")


compiled = torch.compile(functools.partial(F.gelu, approximate="tanh"))


def case(rows, dtype):
    size = dtype.itemsize * rows * 3072

    def inputs(rows, columns):
        return lambda device: {"input": torch.randn(rows, columns, device=device, dtype=dtype)}

    return Case(
        op="gelu",
        label=f"{rows}x3072 {str(dtype).removeprefix('torch.')}",
        make=inputs(rows, 3072),
        make_small=inputs(9, 33),
        variants={
            "eager": eager,
            "transformers": ACT2FN["gelu_new"],
            "compile": compiled,
            "fastplm": fastplm,
        },
        # Transformers rounds after each of eight operations.
        gated=("compile", "fastplm"),
        wrt=("input",),
        directions=DIRECTIONS,
        bytes=2 * size,
        flops=0,
        training_bytes=5 * size,
        training_flops=0,
        dtype=dtype,
    )


CASES = [
    case(rows, dtype)
    for rows in ((65536,) if GPU else (1024,))
    for dtype in (torch.float32, torch.bfloat16)
]


def test_gelu(case, direction, bench):
    bench(case, direction)
