"""``ops.gather_rows``: checks, schema, fake, autograd formula and backends."""

from __future__ import annotations

from typing import Any

import torch

from fastplm._backends import needs_cpu, needs_triton
from fastplm._checks import (
    FLOATING,
    ArgumentValueError,
    check,
    check_dtype,
    check_same_device,
    check_tensor,
    message,
    values_are_known,
)
from fastplm._registry import Op
from fastplm.ops._common import kernels, rejects_of_csrc
from fastplm.reference.gather_rows import gather_rows_ref


def gather_rows(input: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
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
        That of reading P and writing N rows. On "triton" the gradient of a row that is named by
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
    check_tensor("gather_rows", "input", input, ndim=2)
    check_tensor("gather_rows", "positions", positions, ndim=1)
    _check(input, positions)
    backend = OP.resolve(input, positions)
    if backend == "eager":
        _check_range(input, positions)
        return gather_rows_ref(input, positions)
    if input.stride(1) != 1:
        input = input.contiguous()
    return OP.call(input, positions.contiguous(), backend)


def _check(input: torch.Tensor, positions: torch.Tensor) -> None:
    check_dtype("gather_rows", "input", input, FLOATING)
    check_dtype("gather_rows", "positions", positions, (torch.int64,))
    check_same_device("gather_rows", input=input, positions=positions)
    check(
        input.shape[1] > 0,
        "gather_rows",
        "input",
        "row width 0",
        "at least 1",
        "Check the reshape.",
    )


def _check_range(input: torch.Tensor, positions: torch.Tensor) -> None:
    """Every position of a CPU tensor lies in [-1, N)."""
    if positions.numel() == 0 or not values_are_known(positions):
        return
    rows = input.shape[0]
    low, high = (int(bound) for bound in positions.aminmax())
    if low < -1 or high >= rows:
        raise ArgumentValueError(
            message(
                "gather_rows",
                "positions",
                f"position {low if low < -1 else high}",
                f"-1 or 0 … {rows - 1}, a row of `input`" if rows else "-1, as `input` has no rows",
                "Check that the positions were made for this batch; mark unused slots with -1.",
            )
        )


# --- backend "cpp": whole rows are copied ---------------------------------------------------------


def _cpp_forward(input: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    try:
        return torch.ops.fastplm_C.gather_rows.default(input, positions)
    except RuntimeError:
        _check_range(input, positions)  # csrc/ looks itself, and this says what it found
        raise


def _cpp_backward(grad_out: torch.Tensor, positions: torch.Tensor, rows: int) -> torch.Tensor:
    return torch.ops.fastplm_C.gather_rows_backward.default(grad_out, positions, rows)


# --- backend "torch": index_select, and index_add in fp32 -----------------------------------------


def _torch_rejects(input: torch.Tensor, *_: Any, forced: bool) -> str | None:
    return needs_cpu(input)


def _torch_forward(input: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    _check_range(input, positions)
    if input.shape[0] == 0:
        return input.new_zeros(positions.shape[0], input.shape[1])
    out = input.index_select(0, positions.clamp(min=0))
    return out.index_fill_(0, (positions < 0).nonzero().squeeze(1), 0.0)


def _torch_backward(grad_out: torch.Tensor, positions: torch.Tensor, rows: int) -> torch.Tensor:
    used = (positions >= 0).nonzero().squeeze(1)
    positions, grad_out = positions[used], grad_out.index_select(0, used)
    grad_input = grad_out.new_zeros(rows, grad_out.shape[1])
    if grad_out.dtype in (torch.float32, torch.float64):
        return grad_input.index_add_(0, positions, grad_out)
    # Sums in fp32, for the rows that are hit only: a whole fp32 matrix would cost more than it all.
    hit, inverse = positions.unique(return_inverse=True)
    total = grad_out.new_zeros(hit.shape[0], grad_out.shape[1], dtype=torch.float32)
    total.index_add_(0, inverse, grad_out.float())
    return grad_input.index_copy_(0, hit, total.to(grad_out.dtype))


# --- backend "triton" -----------------------------------------------------------------------------


def _triton_rejects(input: torch.Tensor, *_: Any, forced: bool) -> str | None:
    if input.dtype is torch.float64:
        return "float64: the kernels take fp32, fp16 and bf16"
    return needs_triton(input, forced)


def _triton_forward(input: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    _check_range(input, positions)
    return kernels("gather_rows").gather_rows_fwd(input, positions)


def _triton_backward(grad_out: torch.Tensor, positions: torch.Tensor, rows: int) -> torch.Tensor:
    return kernels("gather_rows").gather_rows_bwd(grad_out, positions, rows)


# --- registration ---------------------------------------------------------------------------------


def _fake_forward(input, positions, backend):
    _check(input, positions)
    return input.new_empty(positions.shape[0], input.shape[1])


def _fake_backward(grad_out, positions, rows, backend):
    return grad_out.new_empty(rows, grad_out.shape[1])


def _setup_context(ctx, inputs, output):
    input, positions, ctx.backend = inputs
    ctx.rows = input.shape[0]
    ctx.save_for_backward(positions)


def _backward(ctx, grad_out):
    (positions,) = ctx.saved_tensors
    if grad_out.stride(1) != 1:
        grad_out = grad_out.contiguous()
    grad = OP.call_backward(grad_out, positions, ctx.rows, ctx.backend)
    return grad, None, None


def _smoke(device: torch.device) -> None:
    input = torch.randn(5, 16, device=device, requires_grad=True)
    positions = torch.tensor([4, 0, 4, -1], device=device)
    gather_rows(input, positions).sum().backward()


OP = Op("gather_rows", reference=gather_rows_ref, smoke=_smoke)
OP.backend(
    "cpp",
    forward=_cpp_forward,
    backward=_cpp_backward,
    rejects=rejects_of_csrc("gather_rows")["cpp"],
)
OP.backend("torch", forward=_torch_forward, backward=_torch_backward, rejects=_torch_rejects)
OP.backend("triton", forward=_triton_forward, backward=_triton_backward, rejects=_triton_rejects)
OP.define_differentiable(
    "(Tensor input, Tensor positions, str backend) -> Tensor",
    "(Tensor grad_out, Tensor positions, SymInt rows, str backend) -> Tensor",
    fake_forward=_fake_forward,
    fake_backward=_fake_backward,
    setup_context=_setup_context,
    backward=_backward,
)
