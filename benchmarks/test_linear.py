"""ops.linear against PyTorch's own: the layers of BERT-base, and what each of them is of a step.

On a CPU whose AVX-512 PyTorch uses "fastplm" is PyTorch's product; "csrc" is always ours.
"""

from __future__ import annotations

import pytest
import torch

import fastplm
from fastplm import ops
from fastplm.reference.linear import linear_ref
from harness import Case, Unavailable, default_device

GPU = default_device().type == "cuda"
DTYPE = torch.bfloat16 if GPU else torch.float32
DIRECTIONS = ("forward", "backward")


def csrc(**inputs):
    if GPU:
        raise Unavailable("csrc/ multiplies on the CPU")
    with fastplm.use_backend("cpp", "linear"):
        return ops.linear(**inputs)


def inputs(rows, depth, columns):
    def make(device: torch.device):
        return {
            name: torch.randn(*shape, device=device, dtype=DTYPE)
            for name, shape in dict(
                input=(rows, depth), weight=(columns, depth), bias=(columns,)
            ).items()
        }

    return make


def case(label, rows, depth, columns):
    flops = 2 * rows * depth * columns
    size = DTYPE.itemsize * (rows * depth + columns * depth + rows * columns)
    return Case(
        op="linear",
        label=label,
        make=inputs(rows, depth, columns),
        make_small=inputs(63, 65, 33),
        variants={"eager": linear_ref, "fastplm": ops.linear, "csrc": csrc},
        wrt=("input", "weight", "bias"),
        directions=DIRECTIONS,
        bytes=size,
        flops=flops,
        training_bytes=3 * size,
        training_flops=3 * flops,
        dtype=DTYPE,
    )


CASES = [
    case("projection 1024x768 to 768", 1024, 768, 768),
    case("into the middle 1024x768 to 3072", 1024, 768, 3072),
    case("out of the middle 512x3072 to 768", 512, 3072, 768),
]


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_linear(case, direction, bench):
    bench(case, direction)
