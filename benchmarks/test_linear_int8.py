"""ops.linear_int8 against a linear layer in fp32, PyTorch's and fastplm's, on a CPU."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fastplm import ops
from fastplm.reference.linear_int8 import linear_int8_ref
from harness import Case, Unavailable, default_device

GPU = default_device().type == "cuda"
DTYPE = torch.float32


def eager(input, weight, scale, bias, floats):
    return linear_int8_ref(input, weight, scale, bias)


def fastplm(input, weight, scale, bias, floats):
    if GPU:
        raise Unavailable("csrc/ computes on the CPU")
    return ops.linear_int8(input, weight, scale, bias)


def torch_fp32(input, weight, scale, bias, floats):
    return F.linear(input, floats, bias)


def fastplm_fp32(input, weight, scale, bias, floats):
    return ops.linear(input, floats, bias)


def inputs(rows, columns, depth):
    """``floats`` are the numbers that the weight in 8 bits stands for."""

    def make(device):
        weight, scale = ops.quantize_int8(torch.randn(columns, depth, device=device))
        return {
            "input": torch.randn(rows, depth, device=device),
            "weight": weight,
            "scale": scale,
            "bias": torch.randn(columns, device=device),
            "floats": ops.dequantize_int8(weight, scale, depth),
        }

    return make


def case(rows, columns, depth):
    return Case(
        op="linear_int8",
        label=f"{rows}x{depth} -> {columns}",
        make=inputs(rows, columns, depth),
        make_small=inputs(9, 33, 17),
        variants={
            "eager": eager,
            "torch fp32": torch_fp32,
            "fastplm fp32": fastplm_fp32,
            "fastplm": fastplm,
        },
        # The others do not round the rows.
        gated=("fastplm",),
        wrt=(),
        directions=("forward",),
        bytes=4 * rows * (columns + depth) + columns * depth,
        flops=2 * rows * columns * depth,
        training_bytes=0,
        training_flops=0,
        dtype=DTYPE,
    )


CASES = [case(rows, *size) for rows in (16, 1024) for size in ((1536, 384), (384, 1536))]


def test_linear_int8(case, direction, bench):
    bench(case, direction)
