"""ops.rms_norm against PyTorch's, its compiler's and Transformers', on a CPU: hidden states."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from transformers.models.t5.modeling_t5 import T5LayerNorm

from fastplm import ops
from fastplm.reference.rms_norm import rms_norm_ref
from harness import Case, Unavailable, default_device

GPU = default_device().type == "cuda"
DIRECTIONS = ("forward", "backward")
EPS = 1e-6


def torch_rms_norm(input, weight):
    return F.rms_norm(input, weight.shape, weight, EPS)


def transformers_t5(input, weight):
    layer = T5LayerNorm(len(weight), EPS)
    return torch.func.functional_call(layer, {"weight": weight}, (input,))


def fastplm(input, weight):
    if GPU:
        raise Unavailable("csrc/ computes on the CPU")
    return ops.rms_norm(input, weight, eps=EPS)


compiled = torch.compile(torch_rms_norm)


def inputs(rows, columns, dtype):
    def make(device):
        options = {"device": device, "dtype": dtype}
        return {
            "input": torch.randn(rows, columns, **options),
            "weight": 1 + torch.randn(columns, **options) / 8,
        }

    return make


def case(rows, dtype):
    size = dtype.itemsize * rows * 768
    return Case(
        op="rms_norm",
        label=f"{rows}x768 {str(dtype).removeprefix('torch.')}",
        make=inputs(rows, 768, dtype),
        make_small=inputs(9, 33, dtype),
        variants={
            "eager": rms_norm_ref,
            "transformers": transformers_t5,
            "torch": torch_rms_norm,
            "compile": compiled,
            "fastplm": fastplm,
        },
        # Transformers rounds twice.
        gated=("torch", "compile", "fastplm"),
        wrt=("input", "weight"),
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


def test_rms_norm(case, direction, bench):
    bench(case, direction)
