"""``ops.replaced_token_loss``: its arguments, and its backends.

With "mean" and "sum" its one output has one upstream gradient, whatever follows: that of the weight
is then this number times a sum over rows which the forward can take, and the backward need not read
the rows again.
"""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

from fastplm._checks import INTEGER, check_bool, check_dtype, check_shape, check_tensor
from fastplm._declare import Arg, from_fields
from fastplm._registry import Op
from fastplm.errors import ArgumentTypeError, fail
from fastplm.ops._common import (
    cast_for_autocast,
    check_reduction,
    csrc_rejects,
    kernels,
    triton_rejects,
)
from fastplm.ops._reduction import run_loss
from fastplm.reference.replaced_token_loss import DetectionCounts, replaced_token_loss_ref

Replaced = Tensor | tuple[Tensor, Tensor]


class Call(NamedTuple):
    input: Annotated[Tensor, Arg("[N, E > 0]")]
    weight: Annotated[Tensor, Arg("[E]", "input")]
    bias: Annotated[Tensor | None, Arg("[]", "input")]
    replaced: Annotated[Tensor, Arg(None, (torch.bool, *INTEGER))]
    original: Annotated[Tensor | None, Arg("[N]", (torch.bool, *INTEGER), name="replaced[1]")]
    mask: Annotated[Tensor | None, Arg("[N]", (torch.bool,), "Use mask.bool(), flattened.")]
    normalizer: Tensor | None
    reduction: str
    need_counts: bool
    sum_weight: bool

    def check(self, where: str) -> None:
        original = self.original
        # A pair of ids, or one tensor of booleans: errors call them by what was passed.
        name, dtypes = ("replaced", (torch.bool,)) if original is None else ("replaced[0]", INTEGER)
        fix = "Use replaced.bool(), or pass (ids, original_ids)."
        check_dtype(where, name, self.replaced, dtypes, fix)
        shape, names = self.input.shape[:1], "[N] of `input` [N, E]"
        check_shape(where, name, self.replaced, shape, names, "Use .flatten().")
        if original is not None and original.dtype is not self.replaced.dtype:
            got, expected = original.dtype, f"{self.replaced.dtype}, the dtype of `replaced[0]`"
            fail(where, "replaced[1]", got, expected, "Convert one of the two.", ArgumentTypeError)


class Saved(NamedTuple):
    """``slope`` [N] is that of a row's loss by its logit. With "mean" and "sum" there are the
    denominator [] and the sum of the slopes [], and perhaps the sum of slope times row [E]."""

    slope: Tensor
    denominator: Tensor | None
    weight: Tensor
    mask: Tensor | None
    input: Tensor | None
    weight_sum: Tensor | None
    bias_sum: Tensor | None
    need_input: bool
    need_weight: bool


def replaced_token_loss(
    input: Tensor,
    weight: Tensor,
    replaced: Replaced,
    *,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    reduction: str = "mean",
    normalizer: Tensor | None = None,
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
    flags, original = _labels(replaced)
    if bias is not None:
        check_tensor(where, "bias", bias)
        if bias.numel() != 1:
            fix, got = "Pass the bias of the one output.", f"shape {tuple(bias.shape)}"
            fail(where, "bias", got, "one element, [] or [1]", fix)
        bias = bias.reshape(())
    check_tensor(where, "input", input, ndim=2)
    check_reduction(where, input, reduction, normalizer)
    check_bool(where, "return_counts", return_counts)
    input, weight, bias = cast_for_autocast(input, weight, bias)  # type: ignore[assignment]
    call = Call(
        input, weight, bias, flags, original, mask, normalizer, reduction, return_counts, False
    )
    OP.check(call)
    backend = OP.resolve(call)
    if backend == "eager":
        return _eager(call)
    needs_sum = reduction != "none" and torch.is_grad_enabled() and weight.requires_grad
    call = OP.arguments.laid_out(call)
    if needs_sum and _sums_weight(call.input, backend):
        call = call._replace(sum_weight=True)
    loss, *_, counts = run_loss(OP, call, backend)
    return (loss, DetectionCounts(*counts.unbind())) if return_counts else loss


_reference = from_fields(replaced_token_loss_ref)


def _eager(call: Call) -> Any:
    original = call.original
    labels = call.replaced if original is None else (call.replaced, original)
    return _reference(call, replaced=labels, return_counts=call.need_counts)


def _labels(replaced: Replaced) -> tuple[Tensor, Tensor | None]:
    """(flags, None) or (ids, original ids)."""
    where = "replaced_token_loss"
    if not isinstance(replaced, (tuple, list)):
        check_tensor(where, "replaced", replaced, ndim=1)
        return replaced, None
    if len(replaced) != 2:
        fail(
            where,
            "replaced",
            f"a {type(replaced).__name__} of {len(replaced)}",
            "bool [N], or the pair (ids, original ids)",
            "Pass one tensor or two.",
        )
    for i, ids in enumerate(replaced):
        check_tensor(where, f"replaced[{i}]", ids, ndim=1)
    return replaced[0], replaced[1]


# --- backend "cpp": logit, loss and the weight's sum while a row is in the cache ------------------


def _cpp_forward(call: Call) -> tuple[Tensor, ...]:
    *tensors, normalizer, reduction, need_counts, sum_weight = call
    return torch.ops.fastplm_C.replaced_token_loss.default(
        *tensors,
        None if normalizer is None else normalizer.float(),
        reduction != "none",
        reduction == "mean",
        need_counts,
        sum_weight,
    )


def _cpp_backward(grad: Tensor, saved: Saved) -> tuple[Tensor, Tensor, Tensor]:
    return torch.ops.fastplm_C.replaced_token_loss_backward.default(grad.contiguous(), *saved)


# --- backend "triton" -----------------------------------------------------------------------------


def _triton_forward(call: Call) -> tuple[Tensor, ...]:
    return kernels("replaced_token_loss").replaced_token_loss_fwd(*call)


def _triton_backward(grad: Tensor, saved: Saved) -> tuple[Tensor, Tensor, Tensor]:
    return kernels("replaced_token_loss").replaced_token_loss_bwd(grad, *saved)


def _sums_weight(input: Tensor, backend: str) -> bool:
    """Whether the forward of this backend can take the sum that the weight's gradient needs."""
    if backend != "triton":
        return True
    from fastplm.triton_kernels.replaced_token_loss import sums_weight_gradient

    return sums_weight_gradient(input)


# --- registration ---------------------------------------------------------------------------------


def _fake(call: Call, backend: str) -> tuple[Tensor, ...]:
    rows, width = call.input.shape
    reduced = call.reduction != "none"
    slope = call.input.new_empty(rows, dtype=torch.float32)
    return (
        slope.new_empty(() if reduced else (rows,)),
        slope,
        slope.new_empty(() if reduced else (0,)),
        slope.new_empty(width if call.sum_weight else 0),
        slope.new_empty(() if reduced else (0,)),
        slope.new_empty(5 if call.need_counts else 0, dtype=torch.int64),
    )


def _fake_backward(grad: Tensor, saved: Saved) -> tuple[Tensor, ...]:
    rows, width, weight = saved.slope.shape[0], saved.weight.shape[0], saved.weight
    return (
        weight.new_empty((rows, width) if saved.need_input else (0,)),
        weight.new_empty(width if saved.need_weight else 0),
        weight.new_empty(()),
    )


def _unused(call: Call, outputs: Any, needs: Any, backend: str) -> list[str]:
    """The rows are kept only for a gradient whose sum the forward did not take."""
    names = ["denominator", "bias_sum"] if call.reduction == "none" else []
    if not call.sum_weight:
        names.append("weight_sum")
    if call.sum_weight or not needs[1]:
        names.append("input")
    return names


def _smoke(device: torch.device) -> None:
    input = torch.randn(5, 16, device=device, requires_grad=True)
    weight = torch.randn(16, device=device, requires_grad=True)
    replaced = torch.tensor([True, False, True, False, False], device=device)
    replaced_token_loss(input, weight, replaced, mask=~replaced).backward()


OP = Op(
    "replaced_token_loss",
    Call,
    results=("loss", "slope", "denominator", "weight_sum", "bias_sum", "counts"),
    fake=_fake,
    reference=replaced_token_loss_ref,
    eager=_eager,
    smoke=_smoke,
    saved=Saved,
    gradients=("input", "weight", "bias"),
    fake_backward=_fake_backward,
    unused=_unused,
    tracked=("slope",),  # what the gradients are made of: it tells that they depend on the inputs
)
OP.backend(
    "cpp",
    forward=_cpp_forward,
    backward=_cpp_backward,
    rejects=csrc_rejects("replaced_token_loss", fp64=False),
)
OP.backend("triton", forward=_triton_forward, backward=_triton_backward, rejects=triton_rejects)
