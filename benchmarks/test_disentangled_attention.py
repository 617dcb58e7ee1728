"""ops.disentangled_attention against its eager reference, which is DeBERTa's own computation."""

from __future__ import annotations

import torch

import peers
from fastplm import ops
from fastplm.reference.disentangled_attention import disentangled_attention_ref
from harness import Case, default_device

GPU = default_device().type == "cuda"
DTYPE = torch.bfloat16 if GPU else torch.float32
NAMES = ("query", "key", "value", "pos_key", "pos_query")


def inputs(batch, length, heads, dropout_p=0.0):
    """DeBERTa-v3's tables: 512 rows, which the distances share from 128 on."""

    def make(device: torch.device):
        shapes = [(batch, heads, length, 64)] * 3 + [(512, heads, 64)] * 2
        rows = [torch.randn(shape, device=device, dtype=DTYPE) for shape in shapes]
        options = dict(dropout_p=dropout_p, seed=3) if dropout_p else {}
        return dict(zip(NAMES, rows, strict=True)) | dict(max_distance=512) | options

    return make


def case(label, batch, length, heads):
    size, rows = DTYPE.itemsize, batch * length * heads * 64
    product = 2 * batch * heads * length * length * 64
    # Two products of contents, and at least one of each term of positions.
    return Case(
        op="disentangled_attention",
        label=label,
        make=inputs(batch, length, heads),
        make_small=inputs(2, 40, 2),
        variants={
            "eager": disentangled_attention_ref,
            "fastplm": ops.disentangled_attention,
            "compiled": peers.compiled("disentangled_attention", disentangled_attention_ref),
        },
        wrt=NAMES,
        directions=("forward", "training"),
        flops=4 * product,
        bytes=4 * rows * size,
        training_flops=12 * product,
        training_bytes=12 * rows * size,
        dtype=DTYPE,
    )


CASES = [case("DeBERTa-base 8 x 128", 8, 128, 12), case("DeBERTa-base 2 x 512", 2, 512, 12)]
if GPU:
    CASES = [
        case("DeBERTa-base 128 x 128", 128, 128, 12),
        case("DeBERTa-base 32 x 512", 32, 512, 12),
    ]


def test_disentangled_attention(case, direction, bench):
    bench(case, direction)
