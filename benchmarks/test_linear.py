"""ops.linear against PyTorch's own: the layers of BERT-base, in training and in generation.

"fastplm" uses PyTorch's product where that is as fast; "csrc" always uses csrc/. A few rows are one
token for each sequence or beam, for nn.Linear and for GPT-2's Conv1D, whose weight lies by rows.
"""

from __future__ import annotations

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


def inputs(rows, depth, columns, dtype, by_rows=False):
    def make(device: torch.device):
        made = {
            name: torch.randn(*shape, device=device, dtype=dtype)
            for name, shape in dict(
                input=(rows, depth), weight=(columns, depth), bias=(columns,)
            ).items()
        }
        if by_rows:
            made["weight"] = made["weight"].t().contiguous().t()
        return made

    return make


def case(label, rows, depth, columns, directions=DIRECTIONS, dtype=DTYPE, by_rows=False):
    flops = 2 * rows * depth * columns
    size = dtype.itemsize * (rows * depth + columns * depth + rows * columns)
    return Case(
        op="linear",
        label=label,
        make=inputs(rows, depth, columns, dtype, by_rows),
        make_small=inputs(min(rows, 63), 65, 33, dtype, by_rows),
        variants={"eager": linear_ref, "fastplm": ops.linear, "csrc": csrc},
        wrt=("input", "weight", "bias"),
        directions=directions,
        bytes=size,
        flops=flops,
        training_bytes=3 * size,
        training_flops=3 * flops,
        dtype=dtype,
    )


def few(label, rows, depth, columns, dtype=DTYPE, by_rows=False):
    return case(label, rows, depth, columns, ("forward",), dtype, by_rows)


CASES = [
    case("projection 1024x768 to 768", 1024, 768, 768),
    case("into the middle 1024x768 to 3072", 1024, 768, 3072),
    case("out of the middle 512x3072 to 768", 512, 3072, 768),
    few("4 rows of 768 to 3072", 4, 768, 3072),
    few("8 rows of 768 to 3072", 8, 768, 3072),
    few("16 rows of 3072 to 768", 16, 3072, 768),
    few("Conv1D 8 rows of 768 to 3072", 8, 768, 3072, by_rows=True),
    few("vocabulary 8 rows of 768 to 50257", 8, 768, 50257),
    few("a sentence 24x768 to 3072", 24, 768, 3072),
]
if not GPU:
    HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
    CASES += [
        *(few(f"8 rows of 768 to 3072 {n}", 8, 768, 3072, dtype) for n, dtype in HALF.items()),
        *(
            few(f"Conv1D 8 rows of 768 to 3072 {n}", 8, 768, 3072, dtype, by_rows=True)
            for n, dtype in HALF.items()
        ),
        case("projection 256x768 to 768 bf16", 256, 768, 768, dtype=torch.bfloat16),
    ]


def test_linear(case, direction, bench):
    bench(case, direction)
