"""ops.linear_cross_entropy against its eager reference, PyTorch's fused loss and the libraries."""

from __future__ import annotations

import functools
import importlib.util

import pytest
import torch
import torch.nn.functional as F

from fastplm import ops
from fastplm.reference.linear_cross_entropy import linear_cross_entropy_ref
from harness import Case, default_device

GPU = default_device().type == "cuda"
DTYPE = torch.bfloat16 if GPU else torch.float32


def inputs(rows, vocab, width, ignored):
    def make(device: torch.device):
        target = torch.randint(0, vocab, (rows,), device=device)
        target[torch.rand(rows, device=device) < ignored] = -100
        return dict(
            input=torch.randn(rows, width, device=device, dtype=DTYPE),
            linear_weight=torch.randn(vocab, width, device=device, dtype=DTYPE) * width**-0.5,
            linear_bias=torch.randn(vocab, device=device, dtype=DTYPE),
            target=target,
        )

    return make


def rows_that_count(function):
    """Select the rows first, as a hand-written head does: it waits for the device to count them."""

    def run(input, linear_weight, linear_bias, target):
        counts = (target != -100).nonzero().squeeze(1)
        return function(input[counts], linear_weight, target[counts], linear_bias=linear_bias)

    return run


def optional_variants():
    if hasattr(F, "linear_cross_entropy"):
        chunked = functools.partial(
            F.linear_cross_entropy, options=torch.nn.LinearCrossEntropyOptions()
        )
        yield "torch chunked", chunked
    if GPU:
        yield "compiled", torch.compile(linear_cross_entropy_ref)
    if GPU and importlib.util.find_spec("liger_kernel"):
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy as liger

        yield (
            "liger",
            lambda input, linear_weight, linear_bias, target: liger(
                input, linear_weight, target, bias=linear_bias
            ),
        )
    if GPU and importlib.util.find_spec("cut_cross_entropy"):
        from cut_cross_entropy import linear_cross_entropy as cut

        yield (
            "cut-cross-entropy",
            lambda input, linear_weight, linear_bias, target: cut(
                input, linear_weight, target, bias=linear_bias, filter_eps=None
            ),
        )


def case(label, rows, vocab, width, ignored=0.0):
    size = DTYPE.itemsize
    moved = size * (rows * width + vocab * width + vocab) + 8 * rows
    # What the task needs: of the rows that count, one product forward and two more backward.
    product = 2 * round(rows * (1 - ignored)) * vocab * width
    return Case(
        op="linear_cross_entropy",
        label=label,
        make=inputs(rows, vocab, width, ignored),
        make_small=inputs(min(rows, 65), min(vocab, 999), width, ignored),
        variants={
            "eager": linear_cross_entropy_ref,
            "fastplm": ops.linear_cross_entropy,
            "eager on rows that count": rows_that_count(linear_cross_entropy_ref),
            **dict(optional_variants()),
        },
        wrt=("input", "linear_weight", "linear_bias"),
        bytes=moved,
        flops=product,
        training_bytes=2 * moved,
        training_flops=3 * product,
    )


if GPU:
    CASES = [
        case("BERT-base N 4915", 4915, 30522, 768),
        case("BERT-base N 32768, 85 % ignored", 32768, 30522, 768, ignored=0.85),
        case("BERT-large N 4915", 4915, 30522, 1024),
        case("RoBERTa-base N 4915", 4915, 50265, 768),
        case("GPT-2 N 16384", 16384, 50257, 768),
        case("ELECTRA-small generator N 2458", 2458, 30522, 128),
    ]
else:
    CASES = [
        case("BERT-base N 154", 154, 30522, 768),
        case("ELECTRA-small generator N 512", 512, 30522, 128),
        case("ELECTRA-small N 1024, 85 % ignored", 1024, 30522, 128, ignored=0.85),
    ]


@pytest.mark.parametrize("direction", ("forward", "training"))
@pytest.mark.parametrize("case", CASES, ids=str)
def test_linear_cross_entropy(case, direction, bench):
    bench(case, direction)
