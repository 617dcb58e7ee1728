"""``ops.replaced_token_loss``: checks, schema, fake, autograd formula and backends.

The operator takes the reduction with it, because with "mean" and "sum" its one output has one
upstream gradient, whatever follows: that of the weight is then this number times a sum over rows
which the forward can take, and the backward need not read the rows again.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from fastplm._backends import needs_cpu, needs_triton
from fastplm._checks import (
    FLOATING,
    INTEGER,
    ArgumentTypeError,
    check,
    check_dtype,
    check_same,
    check_same_device,
    check_shape,
    check_tensor,
)
from fastplm._registry import OldOp as Op, autocast
from fastplm.ops._common import check_reduction, kernels, last_dim_contiguous, rejects_of_csrc
from fastplm.reference._reduce import reduce_loss
from fastplm.reference.replaced_token_loss import DetectionCounts, replaced_token_loss_ref

Replaced = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


def replaced_token_loss(
    input: torch.Tensor,
    weight: torch.Tensor,
    replaced: Replaced,
    *,
    bias: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    reduction: str = "mean",
    normalizer: torch.Tensor | None = None,
    return_counts: bool = False,
) -> Any:
    """Binary cross-entropy of "was this token replaced?", from hidden rows in one pass.

    ``z = input @ weight + bias``, ``loss = softplus(z) - y z`` with ``y = 1`` where replaced

    Args:
        input: [N, E], fp64, fp32, fp16 or bf16; any strides whose last is 1.
        weight: [E], dtype and device of ``input``.
        replaced: bool [N], True = the token is not the original one; or (ids, original ids), two
            int64 or two int32 [N], which are compared on the fly.
        bias: [] or [1], dtype and device of ``input``.
        mask: bool [N], True = the row counts. The content of a row that does not never matters.
        reduction: "mean" over the rows that count, "sum", or "none".
        normalizer: 0-d tensor to divide the sum by in place of the number of rows that count; only
            with "mean". Gradient accumulation passes the count of all its batches.
        return_counts: return (loss, ``DetectionCounts``), with which the tokens told rightly are
            counted in the same pass; a token is taken for replaced where ``z > 0``.

    Returns:
        [] or, with "none", [N]; fp32 (fp64 for fp64 inputs). A row that does not count is 0 and
        passes no gradient; the mean over no row is 0. The counts are int64, 0-d, on the device.

    Numerics:
        Products, sums, logits and loss in fp32; gradients in the input dtype. No difference of
        large numbers is taken, so logits of any size are safe.

    Determinism:
        Forward and backward repeat bit for bit on one backend; no atomics.

    Raises:
        ArgumentValueError, ArgumentTypeError: shapes, dtypes, devices or values that do not fit.
        BackendError: a forced backend cannot run the call.

    Examples:
        >>> ids, original = torch.tensor([5, 6, 7]), torch.tensor([5, 9, 7])
        >>> ops.replaced_token_loss(torch.zeros(3, 8), torch.ones(8), (ids, original))  # log 2
        tensor(0.6931)

    Source: Clark et al. 2020 (ELECTRA, arXiv 2003.10555), section 2, L_Disc.
    Reference: ``fastplm.reference.replaced_token_loss.replaced_token_loss_ref``.
    """
    where = "replaced_token_loss"
    check_tensor(where, "input", input, ndim=2)
    check_tensor(where, "weight", weight, ndim=1)
    flags, original = _labels(replaced)
    if bias is not None:
        check_tensor(where, "bias", bias)
        check(
            bias.numel() == 1,
            where,
            "bias",
            f"shape {tuple(bias.shape)}",
            "one element, [] or [1]",
            "Pass the bias of the one output.",
        )
        bias = bias.reshape(())
    if mask is not None:
        check_tensor(where, "mask", mask, ndim=1)
    check_reduction(where, input, reduction, normalizer)
    input, weight, bias = autocast(input, weight, bias)  # type: ignore[assignment]
    _check(input, weight, bias, flags, original, mask)
    backend = OP.resolve(input, weight, bias, flags, original, mask)
    if backend == "eager":
        return replaced_token_loss_ref(
            input,
            weight,
            replaced,
            bias=bias,
            mask=mask,
            reduction=reduction,
            normalizer=normalizer,
            return_counts=return_counts,
        )
    # The operator passes no gradient to the normalizer; whoever wants one divides here.
    divides = normalizer is not None and normalizer.requires_grad
    sum_weight = (
        reduction != "none"
        and torch.is_grad_enabled()
        and weight.requires_grad
        and _sums_weight(input, backend)
    )
    loss, _, _, _, _, counts = OP.call(
        last_dim_contiguous(input),
        weight.contiguous(),
        bias,
        flags.contiguous(),
        None if original is None else original.contiguous(),
        None if mask is None else mask.contiguous(),
        None if divides else normalizer,
        "sum" if divides else reduction,
        return_counts,
        sum_weight,
        backend,
    )
    if divides:
        loss = reduce_loss(loss, None, reduction, normalizer)
    return (loss, DetectionCounts(*counts.unbind())) if return_counts else loss


def _labels(replaced: Replaced) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(flags, None) or (ids, original ids)."""
    where = "replaced_token_loss"
    if not isinstance(replaced, (tuple, list)):
        check_tensor(where, "replaced", replaced, ndim=1)
        return replaced, None
    check(
        len(replaced) == 2,
        where,
        "replaced",
        f"a {type(replaced).__name__} of {len(replaced)}",
        "bool [N], or the pair (ids, original ids)",
        "Pass one tensor or two.",
    )
    for i, ids in enumerate(replaced):
        check_tensor(where, f"replaced[{i}]", ids, ndim=1)
    return replaced[0], replaced[1]


def _check(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    replaced: torch.Tensor,
    original: torch.Tensor | None,
    mask: torch.Tensor | None,
) -> None:
    where = "replaced_token_loss"
    check_dtype(where, "input", input, FLOATING)
    check_same(where, input=input, weight=weight, bias=bias)
    rows, width = input.shape
    check(width > 0, where, "input", "row width 0", "at least 1", "Check the reshape.")
    check_shape(where, "weight", weight, (width,), "[E] of `input` [N, E]")
    labels = {"replaced": replaced}
    if original is None:
        fix = "Use replaced.bool(), or pass (ids, original_ids)."
        check_dtype(where, "replaced", replaced, (torch.bool,), fix)
    else:
        labels = {"replaced[0]": replaced, "replaced[1]": original}
        check_dtype(where, "replaced[0]", replaced, INTEGER)
        check(
            original.dtype is replaced.dtype,
            where,
            "replaced[1]",
            original.dtype,
            f"{replaced.dtype}, the dtype of `replaced[0]`",
            "Convert one of the two.",
            ArgumentTypeError,
        )
    if mask is not None:
        check_dtype(where, "mask", mask, (torch.bool,), "Use mask.bool().")
        labels["mask"] = mask
    for name, flags in labels.items():
        check_shape(where, name, flags, (rows,), "[N] of `input` [N, E]", "Use .flatten().")
    check_same_device(where, input=input, **labels)


# --- backend "cpp": logit, loss and the weight's sum while a row is in the cache ------------------

_CSRC_REJECTS = rejects_of_csrc("replaced_token_loss")["cpp"]


def _cpp_rejects(input: torch.Tensor, *_: Any, forced: bool) -> str | None:
    if input.dtype is torch.float64:
        return "float64: csrc/ takes fp32, fp16 and bf16"
    return _CSRC_REJECTS(input, forced=forced)


def _cpp_forward(*arguments: Any) -> tuple[torch.Tensor, ...]:
    *tensors, normalizer, reduction, need_counts, sum_weight = arguments
    return torch.ops.fastplm_C.replaced_token_loss.default(
        *tensors,
        None if normalizer is None else normalizer.float(),
        reduction != "none",
        reduction == "mean",
        need_counts,
        sum_weight,
    )


def _cpp_backward(grad_loss: torch.Tensor, *saved: Any) -> tuple[torch.Tensor, ...]:
    return torch.ops.fastplm_C.replaced_token_loss_backward.default(grad_loss.contiguous(), *saved)


# --- backend "torch": two matrix-vector products --------------------------------------------------


def _torch_rejects(input: torch.Tensor, *_: Any, forced: bool) -> str | None:
    return needs_cpu(input)


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """In the dtype of the loss: fp32, or fp64 as it is."""
    return tensor if tensor.dtype is torch.float64 else tensor.float()


# softplus(x) = x beyond: to the last bit of fp32 and fp64.
_SOFTPLUS_THRESHOLD = 40.0


def _torch_forward(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    replaced: torch.Tensor,
    original: torch.Tensor | None,
    mask: torch.Tensor | None,
    normalizer: torch.Tensor | None,
    reduction: str,
    need_counts: bool,
    sum_weight: bool,
) -> tuple[torch.Tensor, ...]:
    rows = _wide(input)
    logit = torch.mv(rows, _wide(weight))
    if bias is not None:
        logit += bias
    if original is not None:
        replaced = replaced != original
    counts = logit.new_empty(0, dtype=torch.int64)
    if need_counts:
        counts = _torch_counts(logit, replaced, mask)
    x = torch.where(replaced, -logit, logit)
    if mask is not None:
        # Of loss 0 and slope 0, even if the row is NaN.
        x.masked_fill_(~mask, -torch.inf)
    loss = F.softplus(x, threshold=_SOFTPLUS_THRESHOLD)
    slope = x.sigmoid_()
    slope = torch.where(replaced, -slope, slope)
    weight_sum = slope.new_empty(0)
    if sum_weight:
        weight_sum = _torch_weight_sum(input, rows, slope, mask)
    if reduction == "none":
        return loss, slope, slope.new_empty(0), weight_sum, slope.new_empty(0), counts
    if reduction == "sum":
        denominator = slope.new_ones(())
    elif normalizer is not None:
        denominator = normalizer.to(slope.dtype, copy=True)
        denominator.masked_fill_(denominator == 0, 1.0)
    elif mask is not None:
        denominator = mask.sum().clamp_(min=1).to(slope.dtype)
    else:
        denominator = slope.new_full((), max(1, len(slope)))
    return loss.sum() / denominator, slope, denominator, weight_sum, slope.sum(), counts


def _torch_counts(
    logit: torch.Tensor, replaced: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    flagged, told = logit > 0, replaced
    counted = torch.ones_like(replaced) if mask is None else mask
    if mask is not None:
        flagged, told = flagged & mask, replaced & mask
    correct = (flagged == told) & counted
    return torch.stack((flagged & told, flagged, told, correct, counted)).sum(1)


def _torch_weight_sum(
    input: torch.Tensor, rows: torch.Tensor, slope: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    """Sum of slope times row; ``rows`` is ``input`` in the dtype of the slope."""
    total = torch.mv(rows.t(), slope)
    if mask is not None and not total.sum().isfinite():
        # Perhaps from a row that does not count: 0 * NaN. Rare, so the copy is made only then.
        total = torch.mv(_wide(input.masked_fill(~mask[:, None], 0.0)).t(), slope)
    return total


def _torch_backward(
    grad_loss: torch.Tensor,
    slope: torch.Tensor,
    denominator: torch.Tensor | None,
    weight: torch.Tensor,
    mask: torch.Tensor | None,
    input: torch.Tensor | None,
    weight_sum: torch.Tensor | None,
    bias_sum: torch.Tensor | None,
    need_input: bool,
    need_weight: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    scale = grad_loss if denominator is None else grad_loss / denominator
    grad_logit = slope
    if need_input or denominator is None or input is not None:
        grad_logit = slope * scale
        if denominator is None and mask is not None:
            grad_logit.masked_fill_(~mask, 0.0)
    grad_input, grad_weight = weight.new_empty(0), weight.new_empty(0)
    if need_input:
        grad_input = torch.outer(grad_logit, _wide(weight)).to(weight.dtype)
        if mask is not None and not weight.isfinite().all():
            grad_input.masked_fill_(~mask[:, None], 0.0)
    if need_weight and weight_sum is not None:
        grad_weight = weight_sum * scale
    elif need_weight:
        assert input is not None
        grad_weight = _torch_weight_sum(input, _wide(input), grad_logit, mask)
    grad_bias = grad_logit.sum() if bias_sum is None else bias_sum * scale
    return grad_input, grad_weight.to(weight.dtype), grad_bias.to(weight.dtype)


# --- backend "triton" -----------------------------------------------------------------------------


def _triton_rejects(input: torch.Tensor, *_: Any, forced: bool) -> str | None:
    if input.dtype is torch.float64:
        return "float64: the kernels take fp32, fp16 and bf16"
    return needs_triton(input, forced)


def _triton_forward(*arguments: Any) -> tuple[torch.Tensor, ...]:
    return kernels("replaced_token_loss").replaced_token_loss_fwd(*arguments)


def _triton_backward(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return kernels("replaced_token_loss").replaced_token_loss_bwd(*arguments)


def _sums_weight(input: torch.Tensor, backend: str) -> bool:
    """Whether the forward of this backend can take the sum that the weight's gradient needs."""
    if backend != "triton":
        return True
    from fastplm.triton_kernels.replaced_token_loss import sums_weight_gradient

    return sums_weight_gradient(input)


# --- registration ---------------------------------------------------------------------------------


def _fake_forward(
    input,
    weight,
    bias,
    replaced,
    original,
    mask,
    normalizer,
    reduction,
    need_counts,
    sum_weight,
    backend,
):
    _check(input, weight, bias, replaced, original, mask)
    rows, width = input.shape
    reduced = reduction != "none"
    dtype = torch.float64 if input.dtype is torch.float64 else torch.float32
    slope = input.new_empty(rows, dtype=dtype)
    return (
        slope.new_empty(() if reduced else (rows,)),
        slope,
        slope.new_empty(() if reduced else (0,)),
        slope.new_empty(width if sum_weight else 0),
        slope.new_empty(() if reduced else (0,)),
        input.new_empty(5 if need_counts else 0, dtype=torch.int64),
    )


def _fake_backward(
    grad_loss,
    slope,
    denominator,
    weight,
    mask,
    input,
    weight_sum,
    bias_sum,
    need_input,
    need_weight,
    backend,
):
    rows, width = slope.shape[0], weight.shape[0]
    return (
        weight.new_empty((rows, width) if need_input else (0,)),
        weight.new_empty(width if need_weight else 0),
        weight.new_empty(()),
    )


def _setup_context(ctx, inputs, output):
    input, weight, _, _, _, mask, _, reduction, _, sum_weight, ctx.backend = inputs
    _, slope, denominator, weight_sum, bias_sum, counts = output
    # Not the slope, which the gradients are made of: it tells that they depend on the inputs.
    ctx.mark_non_differentiable(denominator, weight_sum, bias_sum, counts)
    ctx.set_materialize_grads(False)
    if reduction == "none":
        denominator = bias_sum = None
    # The rows are kept only for a gradient whose sum the forward did not take.
    reads_rows = ctx.needs_input_grad[1] and not sum_weight
    ctx.save_for_backward(
        slope,
        denominator,
        weight,
        mask,
        input if reads_rows else None,
        weight_sum if sum_weight else None,
        bias_sum,
    )


def _backward(ctx, grad_loss, *_):
    if grad_loss is None:
        return (None,) * len(ctx.needs_input_grad)
    need_input, need_weight, need_bias, *others = ctx.needs_input_grad
    grads = OP.call_backward(grad_loss, *ctx.saved_tensors, need_input, need_weight, ctx.backend)
    needed = (need_input, need_weight, need_bias)
    return *(g if n else None for g, n in zip(grads, needed, strict=True)), *(None for _ in others)


def _smoke(device: torch.device) -> None:
    input = torch.randn(5, 16, device=device, requires_grad=True)
    weight = torch.randn(16, device=device, requires_grad=True)
    replaced = torch.tensor([True, False, True, False, False], device=device)
    replaced_token_loss(input, weight, replaced, mask=~replaced).backward()


OP = Op("replaced_token_loss", reference=replaced_token_loss_ref, smoke=_smoke)
OP.backend("cpp", forward=_cpp_forward, backward=_cpp_backward, rejects=_cpp_rejects)
OP.backend("torch", forward=_torch_forward, backward=_torch_backward, rejects=_torch_rejects)
OP.backend("triton", forward=_triton_forward, backward=_triton_backward, rejects=_triton_rejects)
OP.define_differentiable(
    # slope [N]: of a row's loss by its logit. With "mean" and "sum": the denominator [], sum of
    # slope times row [E], if asked for, and sum of the slopes []; else empty.
    "(Tensor input, Tensor weight, Tensor? bias, Tensor replaced, Tensor? original, Tensor? mask, "
    "Tensor? normalizer, str reduction, bool need_counts, bool sum_weight, str backend) "
    "-> (Tensor loss, Tensor slope, Tensor denominator, Tensor weight_sum, Tensor bias_sum, "
    "Tensor counts)",
    "(Tensor grad_loss, Tensor slope, Tensor? denominator, Tensor weight, Tensor? mask, "
    "Tensor? input, Tensor? weight_sum, Tensor? bias_sum, bool need_input, bool need_weight, "
    "str backend) -> (Tensor, Tensor, Tensor)",
    fake_forward=_fake_forward,
    fake_backward=_fake_backward,
    setup_context=_setup_context,
    backward=_backward,
)
