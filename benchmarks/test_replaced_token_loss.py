"""ops.replaced_token_loss against its eager reference and the Hugging Face class's formula."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fastplm import ops
from fastplm.reference.replaced_token_loss import replaced_token_loss_ref
from harness import Case, default_device

GPU = default_device().type == "cuda"
DTYPE = torch.bfloat16 if GPU else torch.float32


def inputs(rows, width, padding):
    def make(device: torch.device):
        made = dict(
            input=torch.randn(rows, width, device=device, dtype=DTYPE),
            weight=(torch.randn(width, device=device) * width**-0.5).to(DTYPE),
            replaced=torch.rand(rows, device=device) < 0.1,
            bias=torch.randn(1, device=device, dtype=DTYPE),
        )
        if padding:
            made["mask"] = torch.rand(rows, device=device) >= padding
        return made

    return make


def logits_then_bce(input, weight, replaced, bias, mask=None):
    """What ``transformers.ElectraForPreTraining`` does; its boolean index waits for the device."""
    logits, labels = F.linear(input, weight[None, :], bias).squeeze(1), replaced.to(input.dtype)
    if mask is not None:
        logits, labels = logits[mask], labels[mask]
    return F.binary_cross_entropy_with_logits(logits, labels)


def case(label, rows, width, padding=0.0):
    variants = {
        "eager": replaced_token_loss_ref,
        "fastplm": ops.replaced_token_loss,
        "logits, then BCE": logits_then_bce,
    }
    if GPU:
        variants["compiled"] = torch.compile(replaced_token_loss_ref)
    elements = rows * width
    return Case(
        op="replaced_token_loss",
        label=label,
        make=inputs(rows, width, padding),
        make_small=inputs(257, width, padding),
        variants=variants,
        # Not the bias: its gradient is one number, whose rounding error is luck in the gate.
        wrt=("input", "weight"),
        bytes=elements * DTYPE.itemsize,
        flops=2 * elements,
        # Read the rows once, write their gradient once.
        training_bytes=2 * elements * DTYPE.itemsize,
        training_flops=5 * elements,
    )


if GPU:
    CASES = [
        case("BERT-base 256x128", 256 * 128, 768),
        case("BERT-base 256x128 padded 40 %", 256 * 128, 768, padding=0.4),
        case("ELECTRA-small 128x128", 128 * 128, 256),
    ]
else:
    CASES = [
        case("BERT-base 8x128", 8 * 128, 768),
        case("BERT-base 8x128 padded 40 %", 8 * 128, 768, padding=0.4),
        case("ELECTRA-small 32x128", 32 * 128, 256),
    ]


@pytest.mark.parametrize("direction", ("forward", "training"))
@pytest.mark.parametrize("case", CASES, ids=str)
def test_replaced_token_loss(case, direction, bench):
    bench(case, direction)
