"""ops.linear_distillation against its eager reference, PyTorch's losses on stored logits, and the
algorithm of liger-kernel, whose own kernels need a GPU.

85 % of the rows of the batch do not count, as in masked language modelling.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import peers
from fastplm import ops
from fastplm.reference.linear_distillation import linear_distillation_ref
from harness import Case, default_device

GPU = default_device().type == "cuda"
DTYPE = torch.bfloat16 if GPU else torch.float32
#: Bytes of kept logits: without a limit, and none.
FLOWS = {"fastplm, logits kept": 1 << 40, "fastplm, recomputed": 0}
PER_ROW = ("input", "teacher_input", "target", "mask")


@dataclass(frozen=True)
class Shape:
    """A call; ``ignored`` is the share of its rows that do not count."""

    rows: int
    vocab: int
    width: int
    teacher_width: int
    divergence: str = "forward_kl"
    temperature: float = 2.0
    hard: float = 0.0
    ignored: float = 0.85

    @property
    def counted(self) -> int:
        return self.rows - round(self.rows * self.ignored)

    @property
    def options(self) -> dict[str, Any]:
        return dict(
            divergence=self.divergence,
            temperature=self.temperature,
            cross_entropy_weight=self.hard,
        )

    def make(self, device: torch.device) -> dict[str, Any]:
        def draw(*shape):
            return torch.randn(shape, device=device, dtype=DTYPE)

        mask = torch.zeros(self.rows, dtype=torch.bool, device=device)
        mask[torch.randperm(self.rows, device=device)[: self.counted]] = True
        return dict(
            input=draw(self.rows, self.width),
            linear_weight=draw(self.vocab, self.width) * self.width**-0.5,
            teacher_input=draw(self.rows, self.teacher_width),
            teacher_weight=draw(self.vocab, self.teacher_width) * self.teacher_width**-0.5,
            target=torch.randint(0, self.vocab, (self.rows,), device=device),
            linear_bias=draw(self.vocab),
            teacher_bias=draw(self.vocab),
            mask=mask,
        )

    def make_small(self, device: torch.device) -> dict[str, Any]:
        torch.manual_seed(0)
        return replace(self, rows=min(self.rows, 65), vocab=min(self.vocab, 999)).make(device)


# --- what is compared -----------------------------------------------------------------------------


def loss_of(function: Callable[..., Any], **options: Any) -> Callable[..., Tensor]:
    def run(**inputs):
        return function(**inputs, **options).loss

    return run


def full_logits(shape: Shape) -> Callable[..., Tensor]:
    """A hand-written distillation: the logits of both models, ``kl_div`` and ``cross_entropy``.

    The divergences are computed as in TRL's GKD."""

    def rows(log_p, log_q):
        def kl(log_a, log_b):
            return F.kl_div(log_b, log_a, reduction="none", log_target=True).sum(1)

        if shape.divergence == "forward_kl":
            return kl(log_p, log_q)
        if shape.divergence == "reverse_kl":
            return kl(log_q, log_p)
        half = torch.tensor(0.5, device=log_p.device).log()
        log_m = torch.logsumexp(torch.stack([log_p + half, log_q + half]), 0)
        return 0.5 * kl(log_p, log_m) + 0.5 * kl(log_q, log_m)

    def run(
        input,
        linear_weight,
        teacher_input,
        teacher_weight,
        target,
        linear_bias,
        teacher_bias,
        mask,
    ):
        temperature = shape.temperature
        with torch.no_grad():
            teacher = F.linear(teacher_input, teacher_weight, teacher_bias).float()
            log_p = (teacher / temperature).log_softmax(1)
        logits = F.linear(input, linear_weight, linear_bias).float()
        found = rows(log_p, (logits / temperature).log_softmax(1))
        loss = temperature**2 * torch.where(mask, found, 0.0).sum() / mask.sum()
        if shape.hard:
            loss = loss + shape.hard * F.cross_entropy(logits, target.masked_fill(~mask, -100))
        return loss

    return run


def rows_that_count(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Select the rows first, which waits for the device to count them."""

    def run(mask, **inputs):
        counts = mask.nonzero().squeeze(1)
        some = {name: inputs.pop(name)[counts] for name in PER_ROW[:3]}
        return function(**some, **inputs, mask=mask[counts])

    return run


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(ctx, loss_of_rows, size, per_row, *parameters):
        rows, weight, bias = parameters
        learned = [one.detach().requires_grad_() for one in (weight, bias)]
        grads, total = [torch.zeros_like(one) for one in learned], 0.0
        grad_rows = torch.empty_like(rows)
        for start in range(0, rows.shape[0], size):
            here = slice(start, start + size)
            some = rows[here].detach().requires_grad_()
            with torch.enable_grad():
                loss = loss_of_rows(some, *learned, {n: v[here] for n, v in per_row.items()})
            grad_rows[here], *more = torch.autograd.grad(loss, (some, *learned))
            for grad, one in zip(grads, more, strict=True):
                grad += one
            total = total + loss.detach()
        ctx.save_for_backward(grad_rows, *grads)
        return total

    @staticmethod
    def backward(ctx, grad):
        return None, None, None, *(grad * one for one in ctx.saved_tensors)


def chunks_of_rows(shape: Shape) -> Callable[..., Tensor]:
    """The algorithm of liger-kernel's fused linear losses, in PyTorch: the forward computes all
    gradients, in chunks of rows whose logits take about as much memory as the rows, and sums those
    of the weight."""
    loss = full_logits(shape)
    parts = -(-shape.vocab // shape.width)
    size = 1 << (-(-shape.rows // parts) - 1).bit_length()

    def run(input, linear_weight, linear_bias, teacher_weight, teacher_bias, **per_row):
        count = per_row["mask"].sum()

        def of_rows(rows, weight, bias, some):
            share = some["mask"].sum() / count
            whole = dict(linear_weight=weight, linear_bias=bias, teacher_weight=teacher_weight)
            found = loss(input=rows, **whole, teacher_bias=teacher_bias, **some)
            return torch.where(share > 0, found * share, 0.0 * rows.sum())

        return _Chunked.apply(of_rows, size, per_row, input, linear_weight, linear_bias)

    return run


def variants(shape: Shape, compiling: bool) -> dict[str, Callable[..., Any]]:
    eager = loss_of(linear_distillation_ref, **shape.options)
    distil = functools.partial(loss_of, ops.linear_distillation, **shape.options)
    # Models call the op in this way, as a collator knows how many rows count.
    found = {"eager": eager, "fastplm": distil(expected_targets=shape.counted)}
    logits = full_logits(shape)
    if compiling:
        found["compiled"] = peers.compiled("linear_distillation", eager)
        found["compiled on rows that count"] = peers.compiled(
            "linear_distillation, counted", rows_that_count(logits), eager, dynamic=True
        )
        return found
    found |= {name: distil(logits_budget=budget) for name, budget in FLOWS.items()}
    found["full logits"] = logits
    found["full logits on rows that count"] = rows_that_count(logits)
    found["chunks of rows, as liger-kernel"] = rows_that_count(chunks_of_rows(shape))
    return found


# --- cases ----------------------------------------------------------------------------------------


def case(label: str, shape: Shape, compiling: bool = False) -> Case:
    size = DTYPE.itemsize
    tables = size * shape.vocab * (shape.width + 1)
    taught = size * shape.vocab * (shape.teacher_width + 1)
    moved = tables + taught + size * shape.counted * (shape.width + shape.teacher_width)
    product = 2 * shape.counted * shape.vocab
    return Case(
        op="linear_distillation",
        label=label,
        make=shape.make,
        make_small=shape.make_small,
        variants=variants(shape, compiling),
        gated=("fastplm",) if compiling else ("fastplm", *FLOWS),
        wrt=("input", "linear_weight", "linear_bias"),
        bytes=moved,
        # The task needs one product of each side in the forward, two of the student's in the
        # backward.
        flops=product * (shape.width + shape.teacher_width),
        training_bytes=2 * moved + tables + size * shape.rows * shape.width,
        training_flops=product * (3 * shape.width + shape.teacher_width),
        dtype=DTYPE,
        rounds=None if GPU else 5,
    )


BASE = Shape(32768 if GPU else 1024, 30522, 768, 768)
SMALL = replace(BASE, width=384, teacher_width=384)
ARGUMENTS = [
    ("BERT-base, 15 % of rows", BASE),
    ("BERT-base, 15 % of rows, hard targets", replace(BASE, hard=0.5)),
    ("BERT-base, 15 % of rows, reverse KL", replace(BASE, divergence="reverse_kl")),
    ("BERT-base, 15 % of rows, Jensen-Shannon", replace(BASE, divergence="js")),
    ("MiniLM of BERT-base, 15 % of rows", replace(BASE, width=384)),
    ("MiniLM, all rows", replace(SMALL, rows=4096 if GPU else 256, ignored=0.0)),
]
CASES = [case(label, shape) for label, shape in ARGUMENTS]
CASES += [case(label, shape, compiling=True) for label, shape in ARGUMENTS[:1]]


def test_linear_distillation(case, direction, bench):
    bench(case, direction)
