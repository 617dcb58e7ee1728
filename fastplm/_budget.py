"""The error budget: how far a tensor may be from the truth, see ``fastplm.testing``."""

from __future__ import annotations

from collections.abc import Sequence

import torch

FORWARD_FACTOR = 2.0
GRADIENT_FACTOR = 3.0
RMS_FACTOR = 1.5


class BudgetExceeded(AssertionError):
    """An output or gradient is further from the truth than its budget allows."""


def check_error(
    name: str,
    out: torch.Tensor,
    gold: torch.Tensor,
    bases: Sequence[torch.Tensor],
    factor: float,
    siblings: Sequence[torch.Tensor] = (),
) -> None:
    """Hold one tensor to its budget.

    Args:
        name: how the message calls it.
        out: the tensor under test.
        gold: the same in fp64.
        bases: the reference's results in the dtype of ``out``; the largest error counts.
        factor: of the maximum norm.
        siblings: for a gradient, the gold gradients of the same call.

    Raises:
        BudgetExceeded: shape, dtype, non-finite pattern or error do not fit.
    """
    if out.shape != gold.shape or out.dtype != bases[0].dtype:
        raise BudgetExceeded(
            f"{name}: {out.dtype}{list(out.shape)} instead of {bases[0].dtype}{list(gold.shape)}"
        )
    if out.numel() == 0:
        return
    check_non_finite(name, out, bases[0])
    finite = torch.isfinite(out) & torch.isfinite(gold)
    out, gold = out.double()[finite], gold[finite]
    if out.numel() == 0:
        return
    errors = [(base.double()[finite] - gold) for base in bases]
    dtype = bases[0].dtype
    rounding = torch.finfo(dtype).eps
    accumulation = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    for norm, label, allowed in (
        (max_norm, "max", factor),
        (rms_norm, "rms", RMS_FACTOR),
    ):
        if label == "rms" and out.numel() == 1:
            continue  # of one number, the maximum norm has said it all
        base_error = max(norm(error) for error in errors)
        floor = rounding * norm(gold)
        if out.numel() == 1:  # which PyTorch may have got right by luck: half a rounding at least
            base_error = max(base_error, floor / 2)
        error = norm(out - gold)
        if error <= allowed * base_error + floor:
            continue  # without a look at all siblings
        cancelled = max((norm(sibling[sibling.isfinite()]) for sibling in siblings), default=0.0)
        floor += accumulation * cancelled
        budget = allowed * base_error + floor
        if not error <= budget:
            raise BudgetExceeded(
                f"{name}: {label} error {error:.3e} exceeds the budget {budget:.3e} "
                f"= {allowed} * {base_error:.3e} (PyTorch's own) + {floor:.3e} (rounding)"
            )


def check_non_finite(name: str, out: torch.Tensor, base: torch.Tensor) -> None:
    for kind, test in (("nan", torch.isnan), ("+inf", torch.isposinf), ("-inf", torch.isneginf)):
        if not torch.equal(test(out), test(base)):
            raise BudgetExceeded(
                f"{name}: {int(test(out).sum())} {kind} where the reference has "
                f"{int(test(base).sum())}, or in other places"
            )


def max_norm(tensor: torch.Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def rms_norm(tensor: torch.Tensor) -> float:
    return float(tensor.square().mean().sqrt()) if tensor.numel() else 0.0
