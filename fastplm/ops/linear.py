"""``ops.linear``: its arguments, and its backends."""

from __future__ import annotations

import math
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from fastplm._backends import DIFFERENTIABLE, fast_choice, requested
from fastplm._checks import FLOATING, check_same, check_shape, check_tensor
from fastplm._declare import Arg
from fastplm._modes import is_traced, needs_dispatch
from fastplm._registry import Op, compiled_rule
from fastplm._rules import ALONE, LONGEST, SQUARE, CallClass, aspect, slower
from fastplm.errors import fail
from fastplm.ops._common import csrc_rejects
from fastplm.reference.linear import linear_ref

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_STRIDED = torch.strided
#: The most dimensions of a tensor that csrc/ makes.
_MOST_DIMS = 8
#: The rows and the size of weight that speak for those of a compiled program.
_MANY = (256, 512 * 512, SQUARE)


class Call(NamedTuple):
    input: Annotated[Tensor, Arg("[...]")]
    weight: Annotated[Tensor, Arg("[M, K]")]
    bias: Annotated[Tensor | None, Arg("[M]")] = None

    @property
    def forced(self) -> bool:
        """Whether the backward, too, must run by csrc/, of whatever speed."""
        return requested("linear") == "cpp"

    def check(self, where: str) -> None:
        fix = "Pass a row."
        if self.input.dim() == 0:
            fail(where, "input", "0 dimensions", "[..., K]", fix)
        shape = (*self.input.shape[:-1], self.weight.shape[1])
        check_shape(where, "input", self.input, shape, "[..., K], K of `weight` [M, K],")
        if not torch._C._is_any_autocast_enabled():
            check_same(where, input=self.input, weight=self.weight, bias=self.bias)


class Saved(NamedTuple):
    input: Tensor
    weight: Tensor
    forced: bool
    need_input: bool
    need_weight: bool
    need_bias: bool


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``torch.nn.functional.linear``, by a product of fastplm's own where PyTorch's is slow.

    ``out = input weight^T + bias``

    csrc/ multiplies on a CPU where it is faster there (``fastplm/_rules.py``):

    - few rows, as in generation or of short sentences: PyTorch packs the weight, which costs
      more than reading it; ``csrc/gemm/linear_few_rows.h`` and ``linear_in_place.h`` read it once;
    - fp16 and bf16 on a CPU that does not compute in them: the same, for any number of rows;
    - fp32 on CPUs with AVX-512 that are not Intel's: MKL does not use it there,
      ``csrc/gemm/linear.h`` does.

    Everything else is PyTorch's. A program made by ``torch.compile`` takes any number of rows:
    where csrc/ is faster for many, it chooses when it runs. An exported program has PyTorch's
    operators.

    Args:
        input: [..., K], floating.
        weight: [M, K] in the dtype of ``input``.
        bias: [M].

    Returns:
        [..., M] in the dtype of ``input``; under autocast in that of autocast.

    Numerics:
        Backend "cpp" adds up in fp32, 384 products at a time, as MKL does, or in shorter sums; of
        few rows, and of fp16 and bf16, these are rounded once, with the bias added.

    Determinism:
        Forward and backward repeat bit for bit, on "cpp" with any number of threads.

    Raises:
        ArgumentValueError, ArgumentTypeError: shapes, dtypes or devices that do not fit.
        BackendError: a forced backend cannot run the call.

    Examples:
        >>> ops.linear(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0], [5.0, 6.0]]))
        tensor([[11., 17.]])

    Source: Goto and van de Geijn 2008, "Anatomy of High-Performance Matrix Multiplication" (ACM
        Transactions on Mathematical Software 34, article 12).
    Reference: ``fastplm.reference.linear.linear_ref``.
    """
    # Most of what ``_check_tensors`` asks, in less time than the call takes.
    if not (
        isinstance(input, Tensor)
        and isinstance(weight, Tensor)
        and weight.dim() == 2
        and input.layout is weight.layout is _STRIDED
        and (bias is None or isinstance(bias, Tensor))
    ):
        _check_tensors(input, weight, bias)
    try:
        out = _fast(input, weight, bias)
    except RuntimeError:  # a nested tensor raises where its shape is asked for
        _check_tensors(input, weight, bias)
        raise
    if out is not None:
        return out
    call = Call(input, weight, bias)
    OP.check(call)
    backend = OP.resolve(call)
    if backend in DIFFERENTIABLE:
        return OP(call, backend)
    rows = input.reshape(math.prod(input.shape[:-1]), input.shape[-1])
    out = OP(Call(dense(rows), dense(weight), bias), backend)
    return out.view(*input.shape[:-1], weight.shape[0])


def _check_tensors(input: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    check_tensor("linear", "input", input)
    check_tensor("linear", "weight", weight, ndim=2)
    if bias is not None:
        check_tensor("linear", "bias", bias)


def product(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None = None,
    *,
    out: Tensor | None = None,
    forced: bool = False,
) -> Tensor:
    """``a b + bias`` on the CPU, by csrc/ or PyTorch: [M, K], [K, N], [N] -> [M, N].

    Args:
        out: [M, N], where it is written; None = a new tensor.
        forced: by csrc/, whether that is faster or not.
    """
    if (out is not None and not out.is_contiguous()) or not (forced or _is_faster(a, b)):
        return torch.mm(a, b, out=out) if bias is None else torch.addmm(bias, a, b, out=out)
    if out is None:
        out = a.new_empty(a.shape[0], b.shape[1])
    if a.numel() == 0 or b.numel() == 0:
        return out.zero_() if bias is None else out.copy_(bias)
    torch.ops.fastplm_C.product.default(dense(a), dense(b), bias, out)
    return out


def _is_faster(a: Tensor, b: Tensor) -> bool:
    """Whether csrc/ multiplies a [M, K] and b [K, N], as they lie, faster than PyTorch."""
    return (
        _BUILT
        and requested("linear") in ("auto", "cpp")
        and a.dtype in _DTYPES
        and 1 in a.stride()
        and 1 in b.stride()
        and min(a.numel(), b.numel()) > 0
        and slower("linear", _measured(a, b.t())) is None
    )


def dense(matrix: Tensor) -> Tensor:
    """The matrix, or a copy if neither its rows nor its columns lie together."""
    return matrix if 1 in matrix.stride() else matrix.contiguous()


# --- backend "cpp" --------------------------------------------------------------------------------


_CSRC_REJECTS = csrc_rejects("linear")
_BUILT = _CSRC_REJECTS((torch.empty(0, device="cpu"),), forced=False) is None


def _cpp_rejects(call: Call, *, forced: bool) -> str | None:
    reason = _CSRC_REJECTS(call, forced=forced)
    if reason is not None:
        return reason
    input, weight, bias = call
    if (
        input.dtype not in _DTYPES
        or weight.dtype is not input.dtype
        or (bias is not None and bias.dtype is not input.dtype)
        or torch.is_autocast_enabled("cpu")
    ):
        return "csrc/ multiplies matrices of one dtype, fp32, fp16 or bf16, outside autocast"
    return None


def _measured(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> CallClass:
    """The class of a product with a weight [N, K], as it lies: of nn.Linear or of Conv1D."""
    (n, k), (of_n, of_k), dtype = weight.shape, weight.stride(), weight.dtype
    rows = input.numel() // (k or 1)
    form = "conv1d" if of_n == 1 and of_k != 1 else "linear"
    if torch.get_num_threads() == 1:
        form += ALONE
    of_weight = SQUARE * n // (k or 1)  # its ``aspect``, of all but the longest
    if not 1 <= of_weight <= LONGEST:
        of_weight = aspect(n, k)
    return form, dtype, (rows, n * k, of_weight)


def _fits(input: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether a call is correct, on the CPU, of one dtype and not traced."""
    dtype = weight.dtype
    return (
        dtype in FLOATING
        and not is_traced()
        and input.dtype is dtype
        and input.shape[-1:] == weight.shape[1:]
        and input.is_cpu
        and weight.is_cpu
        and (
            bias is None or (bias.is_cpu and bias.dtype is dtype and bias.shape == weight.shape[:1])
        )
    )


def _fast(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
    """The fast path: PyTorch's, or csrc/ for a call that needs no gradient and copies nothing."""
    wanted = fast_choice("linear") if input.is_cpu else None
    if wanted is None or not _fits(input, weight, bias):
        return None
    if wanted == "auto" and slower("linear", _measured(input, weight)) is not None:
        return torch.nn.functional.linear(input, weight, bias)
    if (
        not _BUILT
        or weight.dtype not in _DTYPES
        or 1 not in weight.stride()
        or min(input.numel(), weight.numel()) == 0
        or input.dim() > _MOST_DIMS
        or needs_dispatch((input, weight, bias))
        or torch.is_autocast_enabled("cpu")
        or (torch.is_grad_enabled() and torch._C._any_requires_grad(input, weight, bias))
    ):
        return None
    return torch.ops.fastplm_C.linear.default(input, weight, bias)


def _cpp_forward(call: Call) -> Tensor:
    input, b, bias = call.input, call.weight.t(), call.bias
    # A compiled program did not ask, as it takes any number of rows.
    if call.forced or _is_faster(input, b):
        return product(input, b, bias, forced=True)
    return torch.nn.functional.linear(input, call.weight, bias)


def _cpp_backward(grad: Tensor, saved: Saved) -> tuple[Tensor, Tensor, Tensor]:
    grad, nothing, forced = dense(grad), grad.new_empty(0), saved.forced
    # What were few rows in the forward are many, or of another layout, in these products.
    return (
        product(grad, saved.weight, forced=forced) if saved.need_input else nothing,
        product(grad.t(), saved.input, forced=forced) if saved.need_weight else nothing,
        grad.sum(0) if saved.need_bias else nothing,
    )


def _many(dtype: torch.dtype) -> CallClass:
    return "linear" + ALONE if torch.get_num_threads() == 1 else "linear", dtype, _MANY


# --- registration ---------------------------------------------------------------------------------


def _fake_backward(grad: Tensor, saved: Saved) -> tuple[Tensor, Tensor, Tensor]:
    return (
        grad.new_empty(saved.input.shape if saved.need_input else (0,)),
        grad.new_empty(saved.weight.shape if saved.need_weight else (0,)),
        grad.new_empty(saved.weight.shape[:1] if saved.need_bias else (0,)),
    )


def _second(grad: Tensor, saved: Saved, backend: str) -> tuple[Tensor, Tensor, Tensor]:
    return grad @ saved.weight, grad.t() @ saved.input, grad.sum(0)


def _smoke(device: torch.device) -> None:
    input = torch.randn(5, 16, device=device, requires_grad=True)
    linear(input, torch.randn(3, 16, device=device), torch.randn(3, device=device)).sum().backward()


OP = Op(
    "linear",
    Call,
    fake=lambda call, backend: call.input.new_empty(call.input.shape[0], call.weight.shape[0]),
    reference=linear_ref,
    smoke=_smoke,
    public=linear,
    fast=_fast,
    saved=Saved,
    gradients=("input", "weight", "bias"),
    fake_backward=_fake_backward,
    second=_second,
)
OP.backend(
    "cpp",
    forward=_cpp_forward,
    backward=_cpp_backward,
    rejects=_cpp_rejects,
    measured=_measured,
    # For few rows less is won than the operator's call costs.
    compiled=compiled_rule("linear", _many),
)
OP.backend("stock", forward=lambda call: torch.nn.functional.linear(*call))
