"""ops.dropout_add_layer_norm against PyTorch's functions one after another, and its compiler."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fastplm import ops
from fastplm.reference.dropout_add_layer_norm import dropout_add_layer_norm_ref
from harness import Case, default_device

GPU = default_device().type == "cuda"
EPS = 1e-12


def inputs(rows, width, dtype, dropout_p):
    def make(device):
        options = {"device": device, "dtype": dtype}
        made = {
            "input": torch.randn(rows, width, **options),
            "residual": torch.randn(rows, width, **options),
            "weight": 1 + torch.randn(width, device=device) / 8,
            "bias": torch.randn(width, device=device) / 8,
            "linear_bias": torch.randn(width, device=device) / 8,
        }
        if dropout_p:
            made |= {"dropout_p": dropout_p, "seed": torch.full((), 5, device=device)}
        return made

    return make


def eager(**inputs):
    return dropout_add_layer_norm_ref(**inputs, eps=EPS)[0]


def fastplm(**inputs):
    return ops.dropout_add_layer_norm(**inputs, eps=EPS)


def separate(input, residual, weight, bias, linear_bias, dropout_p=0.0, seed=None):
    """What a layer of Transformers does behind a product, under autocast where there are 16 bits:
    the product adds the bias itself, so here it is added in the dtype of the product."""
    hidden = F.dropout(input + linear_bias.to(input.dtype), dropout_p)
    width = weight.shape
    return F.layer_norm((hidden + residual).float(), width, weight, bias, EPS).to(input.dtype)


def case(label, rows, width, dtype, dropout_p):
    size = dtype.itemsize * rows * width
    return Case(
        op="dropout_add_layer_norm",
        label=f"{label} {rows}x{width} {str(dtype).removeprefix('torch.')} p={dropout_p}",
        make=inputs(rows, width, dtype, dropout_p),
        make_small=inputs(9, 40, dtype, dropout_p),
        variants={
            "eager": eager,
            "torch": separate,
            "compile": torch.compile(separate),
            "fastplm": fastplm,
        },
        # PyTorch's dropout draws other numbers, and rounds between the steps.
        gated=("fastplm",) if dropout_p or dtype.itemsize < 4 else ("torch", "compile", "fastplm"),
        wrt=("input", "residual", "weight", "bias", "linear_bias"),
        directions=("forward", "training"),
        # Two tensors are read and two written; the backward reads two and writes two.
        bytes=4 * size,
        flops=0,
        training_bytes=8 * size,
        training_flops=0,
        dtype=dtype,
    )


FAMILIES = (("BERT-base", 32768, 768), ("BERT-large", 32768, 1024), ("ELECTRA-small", 32768, 256))
CASES = [
    case(label, rows if GPU else rows // 16, width, dtype, dropout_p)
    for label, rows, width in FAMILIES
    for dtype in (torch.bfloat16, torch.float32)
    for dropout_p in (0.1, 0.0)
]


def test_dropout_add_layer_norm(case, direction, bench):
    bench(case, direction)
