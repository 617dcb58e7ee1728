"""The arguments of ``fastplm::linear_distillation_fwd``, and what its backends share."""

from __future__ import annotations

from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from fastplm._declare import Arg, Size
from fastplm._modes import values_are_known
from fastplm.errors import fail
from fastplm.ops._linear_cross_entropy_call import check_parameters, empty_for_backward

#: What the forward finds out about each row, in this order: of the student the maximum logit, the
#: sum of exponentials above it at the temperature and at 1; the first two of the teacher; what the
#: gradient of the divergence subtracts (see ``Saved``); the log-probability of the target.
STATISTICS = 7


class Call(NamedTuple):
    """``target`` is ``ignore_index`` in rows that do not count, be there targets or not.

    ``divergence`` is not "js" at its limits, which are the other two. Without a ``teacher_weight``
    the teacher is its indices and probabilities, and the divergence is the forward KL.
    """

    input: Annotated[Tensor, Arg("[N, E > 0]")]
    linear_weight: Annotated[Tensor, Arg("[V > 0, E]")]
    linear_bias: Annotated[Tensor | None, Arg("[V]")]
    teacher_input: Annotated[Tensor | None, Arg("[N, Et > 0]")]
    teacher_weight: Annotated[Tensor | None, Arg("[V, Et]")]
    teacher_bias: Annotated[Tensor | None, Arg("[V]")]
    teacher_indices: Annotated[Tensor | None, Arg("[N, K > 0]", (torch.int64,))]
    teacher_probabilities: Annotated[Tensor | None, Arg("[N, K]")]
    target: Annotated[Tensor, Arg("[N]", (torch.int64,), "Use target.long(), one for each row.")]
    has_target: bool
    ignore_index: int
    divergence: str
    beta: float
    temperature: float
    distillation_weight: float
    cross_entropy_weight: float
    kept_rows: Size
    normalizer: Tensor | None
    reduction: str

    @property
    def where(self) -> str:
        """The public function."""
        return "linear_distillation" + "_topk" * (self.teacher_indices is not None)

    def check(self, where: str) -> None:
        check_parameters(where, self, "input", "linear_weight", "linear_bias")
        if self.teacher_input is not None:
            check_parameters(where, self, "teacher_input", "teacher_weight", "teacher_bias")


class Saved(NamedTuple):
    """``denominator`` is that of "mean", else None.

    The gradient of a student's logit at temperature T, of the divergence times T: q - p, or
    q (r - R) with r = log q/p (reverse KL) or r = (1 - beta) log q/m, and R the mean of r by q.
    """

    denominator: Tensor | None
    input: Tensor
    linear_weight: Tensor
    linear_bias: Tensor | None
    teacher_input: Tensor | None
    teacher_weight: Tensor | None
    teacher_bias: Tensor | None
    teacher_indices: Tensor | None
    teacher_probabilities: Tensor | None
    target: Tensor
    statistics: Tensor
    grad_logits: Tensor
    slots: Tensor
    order: Tensor
    has_target: bool
    ignore_index: int
    divergence: str
    beta: float
    temperature: float
    distillation_weight: float
    cross_entropy_weight: float
    need_input: bool
    need_linear_weight: bool
    need_linear_bias: bool


def check_indices(call: Call) -> None:
    """Every index of a CPU tensor that has a probability, in a row that counts, lies in [0, V)."""
    if call.teacher_indices is None or not values_are_known(call.teacher_indices):
        return
    assert call.teacher_probabilities is not None
    unread = (call.target == call.ignore_index)[:, None] | (call.teacher_probabilities == 0)
    indices, vocab = call.teacher_indices.masked_fill(unread, 0), call.linear_weight.shape[0]
    if indices.numel() == 0:
        return
    low, high = (int(end) for end in indices.aminmax())
    if low < 0 or high >= vocab:
        fail(
            call.where,
            "teacher_indices",
            f"index {low if low < 0 else high}",
            f"0 … {vocab - 1}, as V = {vocab}",
            "Check that both models have one vocabulary; unused places take probability 0.",
        )


def empty_outputs(call: Call, backend: str) -> tuple[Tensor, ...]:
    """Empty outputs of a forward of rows, to be written.

    Loss, divergence and cross-entropy, each [N]; the statistics, [7, N]; the rest as in
    ``linear_cross_entropy``.
    """
    rows = call.input.shape[0]
    return (
        *(call.input.new_empty(rows, dtype=torch.float32) for _ in range(3)),
        call.input.new_empty(STATISTICS, rows, dtype=torch.float32),
        *empty_for_backward(call, backend),
    )
