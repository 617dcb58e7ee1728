"""``ops.gather_rows``: its arguments, and its backends."""

from __future__ import annotations

from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from fastplm._declare import Arg, Size
from fastplm._modes import values_are_known
from fastplm._registry import Op
from fastplm.errors import fail
from fastplm.ops._common import (
    csrc_rejects,
    kernels,
    last_dim_contiguous,
    triton_rejects,
)
from fastplm.reference.gather_rows import gather_rows_ref


class Call(NamedTuple):
    input: Annotated[Tensor, Arg("[N, E > 0]")]
    positions: Annotated[Tensor, Arg("[P]", (torch.int64,))]

    @property
    def rows(self) -> int:
        return self.input.shape[0]


class Saved(NamedTuple):
    positions: Tensor
    rows: Size


def gather_rows(input: Tensor, positions: Tensor) -> Tensor:
    """Rows of a matrix by position, with a zero row for an unused slot.

    ``out[p] = input[positions[p]]``, and 0 where ``positions[p] == -1``

    Args:
        input: [N, E], fp64, fp32, fp16 or bf16; any strides whose last is 1.
        positions: int64 [P] on the device of ``input``; -1 marks an unused slot, duplicates are
            allowed. Any other position outside [0, N) is an error on the CPU; on CUDA it gives a
            zero row, as finding it would wait for the device.

    Returns:
        [P, E] in the dtype of ``input`` (under autocast too: nothing is multiplied). A zero row
        passes no gradient, whatever its upstream gradient holds.

    Numerics:
        The rows are exact. The gradient of a row adds up its slots in fp32 (of fp64 rows in fp64)
        and is rounded once. The order is ascending; on "triton" that of a row of more than eight
        slots is another, which the positions alone decide.

    Determinism:
        Forward and backward repeat bit for bit on all backends but "eager". The only atomics are of
        integers, and their order does not change a sum.

    Cost:
        P rows are read and N written. On "triton" the gradient of a row that is named by
        more than eight slots also compares, for each of these, at most 512 positions with its own;
        the work of a row that has many of the slots is shared out.

    Raises:
        ArgumentValueError, ArgumentTypeError: shapes, dtypes, devices or positions that do not fit.
        BackendError: a forced backend cannot run the call.

    Examples:
        >>> ops.gather_rows(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([1, -1]))
        tensor([[3., 4.],
                [0., 0.]])

    Source: the masked positions of Devlin et al. 2018 (arXiv 1810.04805), §3.1, gathered before the
        prediction head as in ``run_pretraining.py`` of its authors.
    Reference: ``fastplm.reference.gather_rows.gather_rows_ref``.
    """
    call = Call(input, positions)
    OP.check(call)
    if input.stride(1) != 1 or positions.stride(0) != 1:
        call = OP.arguments.laid_out(call)
    return OP(call, OP.resolve(call))


def _check_range(call: Call) -> None:
    """Every position of a CPU tensor lies in [-1, N)."""
    positions, rows = call.positions, call.rows
    if positions.numel() == 0 or not values_are_known(positions):
        return
    low, high = (int(bound) for bound in positions.aminmax())
    if low < -1 or high >= rows:
        fail(
            "gather_rows",
            "positions",
            f"position {low if low < -1 else high}",
            f"-1 or 0 … {rows - 1}, a row of `input`" if rows else "-1, as `input` has no rows",
            "Check that the positions were made for this batch; mark unused slots with -1.",
        )


def _eager(call: Call) -> Tensor:
    _check_range(call)
    return gather_rows_ref(*call)


# --- backend "cpp": whole rows are copied ---------------------------------------------------------


def _cpp_forward(call: Call) -> Tensor:
    try:
        return torch.ops.fastplm_C.gather_rows.default(*call)
    except RuntimeError:
        _check_range(call)  # csrc/ looks itself, and this says what it found
        raise


def _cpp_backward(grad: Tensor, saved: Saved) -> Tensor:
    return torch.ops.fastplm_C.gather_rows_backward.default(last_dim_contiguous(grad), *saved)


# --- backend "triton" -----------------------------------------------------------------------------


def _triton_forward(call: Call) -> Tensor:
    _check_range(call)
    return kernels("gather_rows").gather_rows_fwd(*call)


def _triton_backward(grad: Tensor, saved: Saved) -> Tensor:
    return kernels("gather_rows").gather_rows_bwd(last_dim_contiguous(grad), *saved)


# --- registration ---------------------------------------------------------------------------------


def _smoke(device: torch.device) -> None:
    input = torch.randn(5, 16, device=device, requires_grad=True)
    positions = torch.tensor([4, 0, 4, -1], device=device)
    gather_rows(input, positions).sum().backward()


OP = Op(
    "gather_rows",
    Call,
    fake=lambda call, backend: call.input.new_empty(call.positions.shape[0], call.input.shape[1]),
    reference=gather_rows_ref,
    eager=_eager,
    smoke=_smoke,
    saved=Saved,
    gradients=("input",),
    fake_backward=lambda grad, saved: grad.new_empty(saved.rows, grad.shape[1]),
)
OP.backend("cpp", forward=_cpp_forward, backward=_cpp_backward, rejects=csrc_rejects("gather_rows"))
OP.backend("triton", forward=_triton_forward, backward=_triton_backward, rejects=triton_rejects)
