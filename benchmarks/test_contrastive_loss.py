"""nn.ContrastiveLoss on embeddings, beside the matrix of similarities and rows in mini-batches.

"mini-batches" is the formula of sentence-transformers' CachedMultipleNegativesRankingLoss: 32 rows
of similarities at a time, which are computed again in the backward.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from fastplm.nn import ContrastiveLoss
from harness import Case, default_device

GPU = default_device().type == "cuda"
DTYPE = torch.bfloat16 if GPU else torch.float32
SCALE = 20.0


def inputs(rows, width):
    def make(device: torch.device):
        query = torch.randn(rows, width, device=device)
        document = query + torch.randn_like(query)
        return dict(query=query.to(DTYPE), document=document.to(DTYPE))

    return make


def unit(rows):
    wide = rows if rows.dtype is torch.float64 else rows.float()
    return F.normalize(wide, dim=-1).to(rows.dtype)


def eager(query, document):
    logits = (unit(query) * SCALE) @ unit(document).T
    wide = logits if logits.dtype is torch.float64 else logits.float()
    return F.cross_entropy(wide, torch.arange(len(query), device=query.device))


def mini_batches(query, document):
    query, document = unit(query) * SCALE, unit(document)

    def part(rows, targets):
        return F.cross_entropy((rows @ document.T).float(), targets, reduction="sum")

    targets = torch.arange(len(query), device=query.device)
    parts = zip(query.split(32), targets.split(32), strict=True)
    return sum(checkpoint(part, *one, use_reentrant=False) for one in parts) / len(query)


def case(rows, width):
    product = 2 * rows * rows * width
    moved = 2 * DTYPE.itemsize * rows * width
    return Case(
        op="contrastive_loss",
        label=f"{rows} x {width}",
        make=inputs(rows, width),
        make_small=inputs(50, width),
        variants={
            "eager": eager,
            "fastplm": ContrastiveLoss(1 / SCALE),
            "fastplm, similarities kept": ContrastiveLoss(1 / SCALE, logits_budget=None),
            "mini-batches": mini_batches,
        },
        gated=("fastplm", "fastplm, similarities kept"),
        wrt=("query", "document"),
        directions=("forward", "training"),
        flops=product,
        bytes=moved,
        training_flops=3 * product,
        training_bytes=3 * moved,
        dtype=DTYPE,
    )


CASES = [case(1024, 384), case(8192, 384)]
if GPU:
    CASES.append(case(65536, 384))


def test_contrastive_loss(case, direction, bench):
    bench(case, direction)
