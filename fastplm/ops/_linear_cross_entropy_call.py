"""The arguments of ``fastplm::linear_cross_entropy_fwd``, and what its backends share, also with
those of ``linear_distillation``."""

from __future__ import annotations

import math
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fastplm._checks import check_dtype, check_number
from fastplm._declare import Arg, Size
from fastplm.errors import fail
from fastplm.ops._common import cast_for_autocast

# Rows of kept logits begin at whole cache lines of 16 bits: 30,528 columns for 30,522.
_LOGITS_ALIGNMENT = 64
# Products of 16 bits read whole vectors of 16 bytes.
_VECTOR = 8
# Before the order of rows stand their counts.
ORDER_HEAD = 4

_ROW_INDEX = Arg("[N]", (torch.int64,), "Pass one a row.")


class Call(NamedTuple):
    """``overflow_unlikely``: that more than ``kept_rows`` rows count is unlikely."""

    input: Annotated[Tensor, Arg("[N, E > 0]")]
    linear_weight: Annotated[Tensor, Arg("[V > 0, E]")]
    linear_bias: Annotated[Tensor | None, Arg("[V]")]
    target: Annotated[Tensor, Arg("[N]", (torch.int64,), "Use target.long(), one for each row.")]
    seed: Annotated[Tensor | None, Arg("[]", (torch.int64,))]
    sample_index: Annotated[Tensor | None, _ROW_INDEX]
    position: Annotated[Tensor | None, _ROW_INDEX]
    ignore_index: int
    label_smoothing: float
    temperature: float
    need_argmax: bool
    kept_rows: Size
    overflow_unlikely: bool
    normalizer: Tensor | None
    reduction: str

    def check(self, where: str) -> None:
        check_parameters(where, self, "input", "linear_weight", "linear_bias")


class Saved(NamedTuple):
    """``denominator`` is that of "mean", else None."""

    denominator: Tensor | None
    input: Tensor
    linear_weight: Tensor
    linear_bias: Tensor | None
    target: Tensor
    log_probability: Tensor
    row_max: Tensor
    row_sum: Tensor
    grad_logits: Tensor
    slots: Tensor
    order: Tensor
    ignore_index: int
    label_smoothing: float
    overflow_unlikely: bool
    need_input: bool
    need_linear_weight: bool
    need_linear_bias: bool


def check_parameters(where: str, call: Any, rows: str, *parameters: str) -> None:
    """The parameters of a layer have the dtype of its rows, or beside 16-bit rows fp32."""
    dtype = getattr(call, rows).dtype
    half = dtype in (torch.float16, torch.bfloat16)
    for name in parameters:
        value = getattr(call, name)
        if value is not None:
            dtypes = (dtype, torch.float32) if half else (dtype,)
            check_dtype(where, name, value, dtypes, f"Convert it with {name}.to({rows}.dtype).")


def check_budget(where: str, logits_budget: int | None, expected_targets: int | None) -> None:
    """What says how many logits are kept is a number of bytes, or of rows, if it is given."""
    for name, value, unit, hint in (
        ("logits_budget", logits_budget, "bytes", "0 never keeps logits; None goes by the width."),
        ("expected_targets", expected_targets, "rows", "Leave it out if it is unknown."),
    ):
        if value is not None:
            check_number(where, name, value, 0, math.inf, f"{unit}, 0 or more, or None", hint)


def check_targets(call: Any, where: str = "linear_cross_entropy") -> None:
    """Every target of a CPU tensor is ``ignore_index`` or lies in [0, V)."""
    target, ignored, vocab = call.target, call.ignore_index, call.linear_weight.shape[0]
    if target.device.type != "cpu" or target.numel() == 0:
        return
    low, high = (int(end) for end in target.masked_fill(target == ignored, 0).aminmax())
    if low < 0 or high >= vocab:
        fail(
            where,
            "target",
            f"target {low if low < 0 else high}",
            f"{ignored} (ignore_index) or 0 … {vocab - 1}, as V = {vocab}",
            "Check that tokenizer and vocabulary fit; rows without target take ignore_index.",
        )


def autocast_layer(
    input: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """As ``nn.Linear`` would see them, but for fp32 parameters, which the op rounds itself: so
    their gradients stay fp32."""
    (input,) = cast_for_autocast(input)  # type: ignore[assignment]
    if weight.dtype is not torch.float32:
        weight, bias = cast_for_autocast(weight, bias)  # type: ignore[assignment]
    return input, weight, bias


def learns(call: Any) -> bool:
    """Whether there will be a backward, which may read kept logits."""
    return torch.is_grad_enabled() and any(
        one is not None and one.requires_grad
        for one in (call.input, call.linear_weight, call.linear_bias)
    )


def logit_columns(vocab: int) -> int:
    """Columns of a row of kept logits: V, up to whole tiles."""
    return -(-vocab // _LOGITS_ALIGNMENT) * _LOGITS_ALIGNMENT


def copied_rows(weight: Tensor, dtype: torch.dtype, kept_rows: int) -> int:
    """Rows of the copy of a weight [V, E] that a GPU's products read; 0: they read the weight.

    The forward makes it, and the backward reads it again.
    """
    vocab = weight.shape[0]
    if weight.dtype is dtype and (vocab % _VECTOR == 0 or statically_known_true(kept_rows == 0)):
        return 0
    return -(-vocab // _VECTOR) * _VECTOR


def empty_outputs(call: Call, backend: str) -> tuple[Tensor, ...]:
    """Empty outputs of a forward of rows, to be written.

    Loss, log-probability of the target, maximum and sum of exponentials above it, each [N];
    argmax and sample, int64 [N] or without elements; then ``empty_for_backward``.

    Maximum and sum, not their logsumexp: its rounding would be an error of the softmax, e.g. 0.05 %
    at logits around 1e4.
    """
    rows = call.input.shape[0]
    return (
        *(call.input.new_empty(rows, dtype=torch.float32) for _ in range(4)),
        call.target.new_empty(rows if call.need_argmax else 0),
        call.target.new_empty(rows if call.seed is not None else 0),
        *empty_for_backward(call, backend),
    )


def empty_for_backward(call: Any, backend: str) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs of a forward that its backward reads, to be written.

    The gradient of kept logits at grad_loss = 1, [kept_rows, columns], of the first rows that
    count; what is left over is 0 on the Triton backend, and is never written on the other. Then
    what the Triton backend needs again: the copy of the weight and the rows of kept logits,
    [copied_rows + kept_rows, E], and the order in which it took all rows, int64.
    """
    (rows, width), vocab = call.input.shape, call.linear_weight.shape[0]
    on_triton, kept_rows = backend == "triton", call.kept_rows
    copied = copied_rows(call.linear_weight, call.input.dtype, kept_rows)
    return (
        call.input.new_empty((kept_rows, logit_columns(vocab) if on_triton else vocab)),
        call.input.new_empty((copied + kept_rows, width) if on_triton else (0,)),
        call.target.new_empty(ORDER_HEAD + rows if on_triton else 0),
    )


class Gradients(NamedTuple):
    """The gradients of input, weight and bias; without elements where not needed."""

    input: Tensor
    weight: Tensor
    bias: Tensor


def empty_gradients(saved: Any) -> Gradients:
    """Gradients to be written."""
    input, weight = saved.input, saved.linear_weight
    bias = weight if saved.linear_bias is None else saved.linear_bias
    return Gradients(
        input.new_empty(input.shape if saved.need_input else (0,)),
        weight.new_empty(weight.shape if saved.need_linear_weight else (0,)),
        bias.new_empty(weight.shape[:1] if saved.need_linear_bias else (0,)),
    )
