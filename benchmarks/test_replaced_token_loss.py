"""ops.replaced_token_loss against its eager reference and a head written by hand in PyTorch."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F

import peers
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
            # Every draw has the same number of rows that count, by which the rates are computed.
            order = torch.rand(rows, device=device).argsort()
            made["mask"] = order >= round(rows * padding)
        return made

    return make


def with_counts(function):
    def run(**inputs):
        return function(**inputs, return_counts=True)[0]

    return run


def logits_then_bce(input, weight, replaced, bias, mask=None):
    """The loss of ``transformers.ElectraForPreTraining``, whose boolean index waits for the
    device."""
    logits, labels = F.linear(input, weight[None, :], bias).squeeze(1), replaced.to(input.dtype)
    if mask is not None:
        logits, labels = logits[mask], labels[mask]
    return F.binary_cross_entropy_with_logits(logits, labels)


def logits_then_bce_and_metrics(**inputs):
    """The counts in a separate pass, as a training loop logs them."""
    with torch.no_grad():
        flagged = F.linear(inputs["input"], inputs["weight"][None, :], inputs["bias"])[:, 0] > 0
        replaced = inputs["replaced"]
        counted = inputs.get("mask", torch.ones_like(replaced))
        flagged, replaced = flagged & counted, replaced & counted
        for flags in (flagged & replaced, flagged, replaced, (flagged == replaced) & counted):
            flags.sum()
        counted.sum()
    return logits_then_bce(**inputs)


def by_hand():
    """The peers, with the counts that a training loop logs beside the loss."""
    eager, fused = replaced_token_loss_ref, ops.replaced_token_loss
    return {
        "eager": eager,
        "eager, counts": with_counts(eager),
        "fastplm": fused,
        "fastplm, counts": with_counts(fused),
        "logits, then BCE": peers.plain(logits_then_bce, eager),
        "logits, then BCE, counts": peers.plain(logits_then_bce_and_metrics, eager),
    }


def compiled():
    op, eager = "replaced_token_loss", replaced_token_loss_ref
    return {
        "eager": eager,
        "fastplm": ops.replaced_token_loss,
        "compiled": peers.compiled(op, eager, dynamic=False),
        "compiled logits, then BCE": peers.compiled(
            f"{op}, logits", logits_then_bce, eager, dynamic=False
        ),
        "compiled, counts": peers.compiled(f"{op}, counts", with_counts(eager), dynamic=False),
    }


def case(label, rows, width, padding=0.0, targets=None, variants=by_hand):
    known, size = variants(), width * DTYPE.itemsize
    counted = rows - round(rows * padding)
    # A row that counts is read, with its label, and its entry in the mask if there is one.
    forward_bytes = counted * (size + 1) + (rows if padding else 0)
    return Case(
        op="replaced_token_loss",
        label=label,
        make=inputs(rows, width, padding),
        make_small=inputs(257, width, padding),
        variants=known,
        gated=[name for name in known if name.startswith("fastplm")],
        # The bias is left out: its gradient is one number, so its rounding error is chance.
        wrt=("input", "weight"),
        bytes=forward_bytes,
        flops=2 * counted * width,
        # The backward writes the gradient of every row, and does not read the rows again.
        training_bytes=forward_bytes + rows * size,
        # A product and a sum for the logit and for the weight's gradient, a product for the row's.
        training_flops=5 * counted * width,
        dtype=DTYPE,
        targets=targets or {},
    )


def gpu_cases():
    # Targets on an H200, in microseconds, for forward and gradient together.
    base = functools.partial(
        case, "BERT-base 256x128", 256 * 128, 768, targets={"training": (23, 29)}
    )
    return [
        base(),
        case("BERT-base 256x128 padded 40 %", 256 * 128, 768, padding=0.4),
        case("ELECTRA-small 128x128", 128 * 128, 256),
        base(variants=compiled),
    ]


def cpu_cases():
    return [
        case("BERT-base 8x128", 8 * 128, 768),
        case("BERT-base 8x128 padded 40 %", 8 * 128, 768, padding=0.4),
        case("ELECTRA-small 32x128", 32 * 128, 256),
        case("BERT-base 8x128", 8 * 128, 768, variants=compiled),
    ]


CASES = gpu_cases() if GPU else cpu_cases()


def test_replaced_token_loss(case, direction, bench):
    bench(case, direction)
