"""Launches on meta tensors, for tools that compile the kernels without a GPU."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from fastplm.triton_kernels._launch import cdiv
from fastplm.triton_kernels.linear_cross_entropy.products import whole_vectors
from fastplm.triton_kernels.linear_cross_entropy.rows import mean
from fastplm.triton_kernels.linear_cross_entropy.tiles import ORDER_START
from fastplm.triton_kernels.linear_distillation.launch import (
    linear_distillation_bwd,
    linear_distillation_fwd,
)
from fastplm.triton_kernels.linear_distillation.tiles import DIVERGENCES

_KEPT = {0: "", 512: " kept"}


def compile_cases() -> Iterator[tuple[str, Callable[[], object]]]:
    """Every shipped configuration: a label ("slow: …" for the long lane) and what launches it."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for width in (768, 128):
            for kept_rows in (0, 512):  # of 512
                for divergence in DIVERGENCES:
                    for hard in (True, False):
                        label = f"{str(dtype)[6:]} E={width}{_KEPT[kept_rows]} {divergence}"
                        label += ", hard targets" * hard
                        # The KLs run the kernels of JS's first pass, with one more sum.
                        always = dtype is torch.bfloat16 and width == 768 and hard
                        always &= divergence in ("js", "given")
                        options = dict(
                            divergence=divergence,
                            cross_entropy_weight=0.5 * hard,
                            products=not always,
                        )
                        case = functools.partial(meta_case, dtype, width, kept_rows, **options)
                        yield label if always else f"slow: {label}", case


def meta_case(
    dtype: torch.dtype,
    width: int,
    kept_rows: int,
    *,
    rows: int = 512,
    vocab: int = 30522,
    teacher_width: int = 1024,
    divergence: str = "forward_kl",
    temperature: float = 2.0,
    cross_entropy_weight: float = 0.5,
    words: int = 64,
    products: bool = True,
) -> None:
    """Launch forward and backward on meta tensors. The divergence "given" has ``words`` words a
    row. The backward is dz alone, or has also the ``products`` of ``linear_cross_entropy``."""

    def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    loss, distillation, cross_entropy = (meta(rows) for _ in range(3))
    statistics = meta(7, rows)
    columns = cdiv(vocab, 64) * 64
    grad_logits = meta(kept_rows, columns, dtype=dtype) if kept_rows else meta(0, dtype=dtype)
    copied = whole_vectors(vocab) if kept_rows else 0
    slots = meta(copied + kept_rows, width, dtype=dtype)
    order = meta(ORDER_START + rows, dtype=torch.int64)
    given = divergence == "given"
    same: dict[str, Any] = dict(
        input=meta(rows, width, dtype=dtype),
        linear_weight=meta(vocab, width, dtype=dtype),
        linear_bias=meta(vocab, dtype=dtype),
        teacher_input=None if given else meta(rows, teacher_width, dtype=dtype),
        teacher_weight=None if given else meta(vocab, teacher_width, dtype=dtype),
        teacher_bias=None if given else meta(vocab, dtype=dtype),
        teacher_indices=meta(rows, words, dtype=torch.int64) if given else None,
        teacher_probabilities=meta(rows, words) if given else None,
        target=meta(rows, dtype=torch.int64),
        divergence="forward_kl" if given else divergence,
        beta=0.5,
        temperature=temperature,
        distillation_weight=1.0,
        cross_entropy_weight=cross_entropy_weight,
    )
    linear_distillation_fwd(
        loss,
        distillation,
        cross_entropy,
        statistics,
        grad_logits,
        slots,
        order,
        has_target=cross_entropy_weight > 0,
        ignore_index=-100,
        kept_rows=kept_rows,
        **same,
    )
    total, _ = mean(loss, order, None)
    linear_distillation_bwd(
        meta(rows, width, dtype=dtype),
        meta(vocab, width, dtype=dtype),
        meta(vocab, dtype=dtype),
        grad_loss=total.expand(rows),
        statistics=statistics,
        grad_logits=grad_logits,
        slots=slots,
        order=order,
        need_input=products,
        need_weight=products,
        need_bias=products,
        **same,
    )
