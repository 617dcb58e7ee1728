"""``ops.replaced_token_loss``: checks, schema, fake, autograd formula and backends."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from fastplm._backends import needs_cpu, needs_triton
from fastplm._checks import (
    FLOATING,
    check,
    check_dtype,
    check_same,
    check_same_device,
    check_shape,
    check_tensor,
)
from fastplm._registry import Op, autocast
from fastplm.ops._common import check_reduction, last_dim_contiguous
from fastplm.reference._reduce import reduce_loss
from fastplm.reference.replaced_token_loss import replaced_token_loss_ref


def replaced_token_loss(
    input: torch.Tensor,
    weight: torch.Tensor,
    replaced: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    reduction: str = "mean",
    normalizer: torch.Tensor | None = None,
) -> torch.Tensor:
    """Binary cross-entropy of "was this token replaced?", from hidden rows in one pass.

    ``z = input @ weight + bias``, ``loss = softplus(z) - y z`` with ``y = 1`` where replaced

    Args:
        input: [N, E], fp64, fp32, fp16 or bf16; any strides whose last is 1.
        weight: [E], dtype and device of ``input``.
        replaced: bool [N], True = the token is not the original one.
        bias: [] or [1], dtype and device of ``input``.
        mask: bool [N], True = the row counts. The content of a row that does not never matters.
        reduction: "mean" over the rows that count, "sum", or "none".
        normalizer: 0-d tensor to divide the sum by in place of the number of rows that count; only
            with "mean". Gradient accumulation passes the count of all its batches.

    Returns:
        [] or, with "none", [N]; fp32 (fp64 for fp64 inputs). A row that does not count is 0 and
        passes no gradient; the mean over no row is 0.

    Numerics:
        Products, sums, logits and loss in fp32; gradients in the input dtype. No difference of
        large numbers is taken, so logits of any size are safe.

    Determinism:
        Forward and backward repeat bit for bit on one backend; no atomics.

    Raises:
        ArgumentValueError, ArgumentTypeError: shapes, dtypes, devices or values that do not fit.
        BackendError: a forced backend cannot run the call.

    Source: Clark et al. 2020 (ELECTRA, arXiv 2003.10555), section 2, L_Disc.
    Reference: ``fastplm.reference.replaced_token_loss.replaced_token_loss_ref``.
    """
    check_tensor("replaced_token_loss", "input", input, ndim=2)
    check_tensor("replaced_token_loss", "weight", weight, ndim=1)
    check_tensor("replaced_token_loss", "replaced", replaced, ndim=1)
    if bias is not None:
        check_tensor("replaced_token_loss", "bias", bias)
        check(
            bias.numel() == 1,
            "replaced_token_loss",
            "bias",
            f"shape {tuple(bias.shape)}",
            "one element, [] or [1]",
            "Pass the bias of the one output.",
        )
        bias = bias.reshape(())
    if mask is not None:
        check_tensor("replaced_token_loss", "mask", mask, ndim=1)
    check_reduction("replaced_token_loss", input, reduction, normalizer)
    input, weight, bias = autocast(input, weight, bias)  # type: ignore[assignment]
    _check(input, weight, bias, replaced, mask)
    backend = OP.resolve(input, weight, bias, replaced, mask)
    if backend == "eager":
        return replaced_token_loss_ref(
            input,
            weight,
            replaced,
            bias=bias,
            mask=mask,
            reduction=reduction,
            normalizer=normalizer,
        )
    loss, _ = torch.ops.fastplm.replaced_token_loss_fwd(
        last_dim_contiguous(input),
        weight.contiguous(),
        bias,
        replaced.contiguous(),
        None if mask is None else mask.contiguous(),
        backend,
    )
    return reduce_loss(loss, mask, reduction, normalizer)


def _check(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    replaced: torch.Tensor,
    mask: torch.Tensor | None,
) -> None:
    where = "replaced_token_loss"
    check_dtype(where, "input", input, FLOATING)
    check_same(where, input=input, weight=weight, bias=bias)
    rows, width = input.shape
    check(width > 0, where, "input", "row width 0", "at least 1", "Check the reshape.")
    check_shape(where, "weight", weight, (width,), "[E] of `input` [N, E]")
    for name, flags in (("replaced", replaced), ("mask", mask)):
        if flags is not None:
            check_dtype(where, name, flags, (torch.bool,), f"Use {name}.bool().")
            check_shape(where, name, flags, (rows,), "[N] of `input` [N, E]", "Use .flatten().")
    check_same_device(where, input=input, replaced=replaced, mask=mask)


# --- backend "torch": two matrix-vector products --------------------------------------------------


def _torch_rejects(input: torch.Tensor, *_: Any, forced: bool) -> str | None:
    return needs_cpu(input)


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """In the dtype of the loss: fp32, or fp64 as it is."""
    return tensor if tensor.dtype is torch.float64 else tensor.float()


def _torch_forward(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    replaced: torch.Tensor,
    mask: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    logit = torch.mv(_wide(input), _wide(weight))
    if bias is not None:
        logit += bias
    loss = 0.0 - F.logsigmoid(torch.where(replaced, logit, -logit))
    if mask is not None:
        loss.masked_fill_(~mask, 0.0)
    return loss, logit


def _torch_backward(
    grad_loss: torch.Tensor,
    input: torch.Tensor,
    weight: torch.Tensor,
    logit: torch.Tensor,
    replaced: torch.Tensor,
    mask: torch.Tensor | None,
    need_input: bool,
    need_weight: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    slope = torch.where(replaced, -logit, logit).sigmoid_()
    grad_logit = torch.where(replaced, -slope, slope).mul_(grad_loss)
    if mask is not None:
        grad_logit.masked_fill_(~mask, 0.0)
    grad_input, grad_weight, grad_bias = input.new_empty(0), weight.new_empty(0), grad_logit.sum()
    if need_input:
        grad_input = (grad_logit[:, None] * _wide(weight)).to(input.dtype)
        if mask is not None and not weight.isfinite().all():
            grad_input.masked_fill_(~mask[:, None], 0.0)
    if need_weight:
        grad_weight = torch.mv(_wide(input).t(), grad_logit)
        if mask is not None and not grad_weight.isfinite().all():
            # Perhaps from a row that does not count: 0 * NaN. Rare, so the copy is made only then.
            grad_weight = torch.mv(_wide(input.masked_fill(~mask[:, None], 0.0)).t(), grad_logit)
    return grad_input, grad_weight.to(weight.dtype), grad_bias.to(weight.dtype)


# --- backend "triton" -----------------------------------------------------------------------------


def _triton_rejects(input: torch.Tensor, *_: Any, forced: bool) -> str | None:
    if input.dtype is torch.float64:
        return "float64: the kernels take fp32, fp16 and bf16"
    return needs_triton(input, forced)


def _triton_forward(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    from fastplm.triton_kernels.replaced_token_loss import replaced_token_loss_fwd

    return replaced_token_loss_fwd(*arguments)


def _triton_backward(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    from fastplm.triton_kernels.replaced_token_loss import replaced_token_loss_bwd

    return replaced_token_loss_bwd(*arguments)


# --- registration ---------------------------------------------------------------------------------


def _fake_forward(input, weight, bias, replaced, mask, backend):
    _check(input, weight, bias, replaced, mask)
    dtype = torch.float64 if input.dtype is torch.float64 else torch.float32
    loss = input.new_empty(input.shape[0], dtype=dtype)
    return loss, torch.empty_like(loss)


def _fake_backward(
    grad_loss, input, weight, logit, replaced, mask, need_input, need_weight, backend
):
    return (
        input.new_empty(input.shape if need_input else (0,)),
        weight.new_empty(weight.shape if need_weight else (0,)),
        weight.new_empty(()),
    )


def _setup_context(ctx, inputs, output):
    input, weight, _, replaced, mask, ctx.backend = inputs
    ctx.save_for_backward(input, weight, output[1], replaced, mask)


def _backward(ctx, grad_loss, _grad_logit):
    input, weight, logit, replaced, mask = ctx.saved_tensors
    need_input, need_weight, need_bias, *_ = ctx.needs_input_grad
    grad_input, grad_weight, grad_bias = torch.ops.fastplm.replaced_token_loss_bwd(
        grad_loss, input, weight, logit, replaced, mask, need_input, need_weight, ctx.backend
    )
    return (
        grad_input if need_input else None,
        grad_weight if need_weight else None,
        grad_bias if need_bias else None,
        None,
        None,
        None,
    )


def _smoke(device: torch.device) -> None:
    input = torch.randn(5, 16, device=device, requires_grad=True)
    weight = torch.randn(16, device=device, requires_grad=True)
    replaced = torch.tensor([True, False, True, False, False], device=device)
    replaced_token_loss(input, weight, replaced, mask=~replaced).backward()


OP = Op("replaced_token_loss", reference=replaced_token_loss_ref, smoke=_smoke)
OP.backend("torch", forward=_torch_forward, backward=_torch_backward, rejects=_torch_rejects)
OP.backend("triton", forward=_triton_forward, backward=_triton_backward, rejects=_triton_rejects)
OP.define_differentiable(
    "(Tensor input, Tensor weight, Tensor? bias, Tensor replaced, Tensor? mask, str backend) "
    "-> (Tensor loss, Tensor logit)",
    "(Tensor grad_loss, Tensor input, Tensor weight, Tensor logit, Tensor replaced, Tensor? mask, "
    "bool need_input, bool need_weight, str backend) -> (Tensor, Tensor, Tensor)",
    fake_forward=_fake_forward,
    fake_backward=_fake_backward,
    setup_context=_setup_context,
    backward=_backward,
)
