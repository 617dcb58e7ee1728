"""ops.bias_gelu against PyTorch's bias and GELU, alone and compiled: a feed-forward block."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fastplm import ops
from fastplm.reference.bias_gelu import bias_gelu_ref
from harness import Case, default_device

GPU = default_device().type == "cuda"
DIRECTIONS = ("forward", "backward", "training")


def torch_bias_gelu(input, bias):
    return F.gelu(input + bias.to(input.dtype))


compiled = torch.compile(torch_bias_gelu)


def case(rows, width, dtype):
    size = dtype.itemsize * rows * width

    def inputs(rows, columns):
        return lambda device: {
            "input": torch.randn(rows, columns, device=device, dtype=dtype),
            "bias": torch.randn(columns, device=device),
        }

    return Case(
        op="bias_gelu",
        label=f"{rows}x{width} {str(dtype).removeprefix('torch.')}",
        make=inputs(rows, width),
        make_small=inputs(9, 33),
        variants={
            "eager": bias_gelu_ref,
            "torch": torch_bias_gelu,
            "compile": compiled,
            "fastplm": ops.bias_gelu,
        },
        # PyTorch's rounds the bias and the sum.
        gated=("fastplm",),
        wrt=("input", "bias"),
        directions=DIRECTIONS,
        bytes=2 * size,
        flops=0,
        training_bytes=5 * size,
        training_flops=0,
        dtype=dtype,
    )


CASES = [
    case(rows, width, dtype)
    for rows, width in (((32768, 3072), (32768, 1024)) if GPU else ((1024, 3072),))
    for dtype in ((torch.bfloat16,) if GPU else (torch.float32, torch.bfloat16))
]


def test_bias_gelu(case, direction, bench):
    bench(case, direction)
