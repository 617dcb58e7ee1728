"""ops.rotary against Transformers' function, alone and compiled: query and key of one product."""

from __future__ import annotations

import torch
from transformers.models.modernbert.modeling_modernbert import apply_rotary_pos_emb

from fastplm import ops
from fastplm.reference.rotary import rotary_ref
from harness import Case, default_device

GPU = default_device().type == "cuda"
DIRECTIONS = ("forward", "backward", "training")


def both(function):
    """The heads of query and key are those of one tensor, as the harness takes one result."""

    def call(product, cos, sin):
        heads = product[:, :, :2].flatten(2, 3).transpose(1, 2)
        return function(heads, heads[:, :0], cos, sin)[0]

    return call


compiled = torch.compile(apply_rotary_pos_emb)


def case(batch, length, heads, dim, dtype):
    size = dtype.itemsize * batch * length * heads * dim

    def inputs(batch, length, heads, dim):
        def make(device):
            turns = torch.arange(length, device=device)[:, None] / 1e4 ** torch.linspace(
                0, 1, dim // 2, device=device
            )
            turns = turns.repeat(1, 2)[None]
            heads_of = torch.randn(batch, length, 3, heads, dim, device=device, dtype=dtype)
            return {"product": heads_of, "cos": turns.cos(), "sin": turns.sin()}

        return make

    return Case(
        op="rotary",
        label=f"{batch}x{length} {heads}x{dim} {str(dtype).removeprefix('torch.')}",
        make=inputs(batch, length, heads, dim),
        make_small=inputs(2, 9, 2, 16),
        variants={
            "eager": both(rotary_ref),
            "transformers": both(apply_rotary_pos_emb),
            "compile": both(compiled),
            "fastplm": both(ops.rotary),
        },
        gated=("transformers", "compile", "fastplm"),
        wrt=("product",),
        directions=DIRECTIONS,
        # Query and key are read and written; the gradient of the product is written whole.
        bytes=4 * size,
        flops=0,
        training_bytes=8 * size,
        training_flops=0,
        dtype=dtype,
    )


CASES = [
    case(*shape, dtype)
    for shape in (((256, 128, 12, 64), (64, 512, 12, 64)) if GPU else ((16, 128, 12, 64),))
    for dtype in ((torch.bfloat16,) if GPU else (torch.float32, torch.bfloat16))
]


def test_rotary(case, direction, bench):
    bench(case, direction)
