"""Launches on meta tensors, for tools that compile the kernels without a GPU."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from fastplm.triton_kernels._launch import cdiv
from fastplm.triton_kernels.linear_cross_entropy import products
from fastplm.triton_kernels.linear_cross_entropy.launch import (
    linear_cross_entropy_bwd,
    linear_cross_entropy_fwd,
)
from fastplm.triton_kernels.linear_cross_entropy.rows import mean
from fastplm.triton_kernels.linear_cross_entropy.tiles import ORDER_START

_KEPT = {0: "", 512: " kept", 256: " half kept"}
_OPTIONS: dict[str, dict[str, Any]] = {
    "": {},
    " smoothed": {"label_smoothing": 0.1},
    " of rows": {"reduces": False},
    " sampled, argmax, smoothed": {
        "temperature": 1.0,
        "need_argmax": True,
        "label_smoothing": 0.1,
    },
    " sampled at T": {"temperature": 0.5},
    " few rows": {"overflow_unlikely": True},
}


def compile_cases() -> Iterator[tuple[str, Callable[[], object]]]:
    """Every shipped configuration: a label ("slow: …" for the long lane) and what launches it."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for width in (128, 768, 17, 16, 64, 256, 1024):
            for kept_rows in (0, 512, 256):  # of 512
                # Wide rows of any width run the same kernels, except for the masks.
                if kept_rows and width in (17, 16, 64):
                    continue
                label = f"{str(dtype)[6:]} E={width}{_KEPT[kept_rows]}"
                default = (width, kept_rows) in ((128, 0), (768, 0), (768, 512))
                for option, arguments in _OPTIONS.items():
                    if option and not (default or width == 64 or dtype is torch.bfloat16):
                        continue
                    if option and (kept_rows == 256) != (option == " few rows"):
                        continue
                    always = default and (dtype is torch.bfloat16 or (width == 128 and not option))
                    if (width, kept_rows) == (768, 0):  # its options are for the long lane
                        always &= not option
                    always |= option == " few rows" and (width, dtype) == (768, torch.bfloat16)
                    case = functools.partial(meta_case, dtype, width, kept_rows, **arguments)
                    yield label + option if always else f"slow: {label}{option}", case


def meta_case(
    dtype: torch.dtype,
    width: int,
    kept_rows: int,
    *,
    rows: int = 512,
    vocab: int = 30522,
    label_smoothing: float = 0.0,
    need_argmax: bool = False,
    temperature: float | None = None,
    reduces: bool = True,
    overflow_unlikely: bool = False,
    weight_dtype: torch.dtype | None = None,
) -> None:
    """Launch forward and backward on meta tensors; with a ``temperature`` it samples.

    Unless it ``reduces`` to a mean, each row has an upstream gradient of its own.
    """

    def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    ids = functools.partial(meta, rows, dtype=torch.int64)
    loss, log_probability, row_max, row_sum = (meta(rows) for _ in range(4))
    columns = cdiv(vocab, 64) * 64
    grad_logits = meta(kept_rows, columns, dtype=dtype) if kept_rows else meta(0, dtype=dtype)
    weight_dtype = dtype if weight_dtype is None else weight_dtype
    whole = products.whole_vectors(vocab)
    copied = whole if weight_dtype is not dtype or (kept_rows and whole > vocab) else 0
    slots = meta(copied + kept_rows, width, dtype=dtype)
    order = meta(ORDER_START + rows, dtype=torch.int64)
    same = dict(
        input=meta(rows, width, dtype=dtype),
        linear_weight=meta(vocab, width, dtype=weight_dtype),
        linear_bias=meta(vocab, dtype=dtype),
        target=ids(),
        ignore_index=-100,
        label_smoothing=label_smoothing,
    )
    linear_cross_entropy_fwd(
        loss,
        log_probability,
        row_max,
        row_sum,
        ids(),
        ids(),
        grad_logits,
        slots,
        order,
        seed=None if temperature is None else meta(dtype=torch.int64),
        sample_index=ids(),
        position=ids(),
        temperature=temperature or 1.0,
        need_argmax=need_argmax,
        kept_rows=kept_rows,
        **same,
    )
    grad_loss = loss
    if reduces:
        total, _ = mean(loss, order, None)
        grad_loss = total.expand(rows)
    linear_cross_entropy_bwd(
        meta(rows, width, dtype=dtype),
        meta(vocab, width, dtype=weight_dtype),
        meta(vocab, dtype=dtype),
        grad_loss=grad_loss,
        log_probability=log_probability,
        row_max=row_max,
        row_sum=row_sum,
        grad_logits=grad_logits,
        slots=slots,
        order=order,
        overflow_unlikely=overflow_unlikely,
        need_input=True,
        need_weight=True,
        need_bias=True,
        **same,
    )
