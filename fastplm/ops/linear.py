"""``ops.linear``: checks, schema, fake, autograd formula and backends."""

from __future__ import annotations

import math

import torch

from fastplm._backends import is_recorded, requested
from fastplm._checks import (
    FLOATING,
    check,
    check_dtype,
    check_same,
    check_same_device,
    check_shape,
    check_tensor,
)
from fastplm._measured import CallClass, slower
from fastplm._registry import OldOp as Op, is_watched
from fastplm.ops._common import rejects_of_csrc
from fastplm.reference.linear import linear_ref

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
#: That a tensor made in csrc/ may have.
_MOST_DIMS = 8


def linear(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """``torch.nn.functional.linear``, by a product of fastplm's own where PyTorch's is slow.

    ``out = input weight^T + bias``

    Which it is on a CPU, where it was measured to be faster there (``fastplm measure``):

    - few rows, as in generation of a batch or with beams: PyTorch packs the weight, which costs
      more than reading it; ``csrc/linear_few_rows.h`` reads it once;
    - fp16 and bf16 on a CPU that does not compute in them: the same, for any number of rows;
    - fp32 on CPUs with AVX-512 that are not Intel's: MKL does not use it there,
      ``csrc/linear.h`` does.

    Everything else is PyTorch's.

    Args:
        input: [..., K], floating.
        weight: [M, K] in the dtype of ``input``.
        bias: [M].

    Returns:
        [..., M] in the dtype of ``input``; under autocast in that of autocast.

    Numerics:
        Backend "cpp" adds up in fp32, 384 products at a time, as MKL does; of few rows, and of fp16
        and bf16, in shorter sums, which are rounded once, with the bias added.

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
    check_tensor("linear", "input", input)
    check_tensor("linear", "weight", weight, ndim=2)
    if bias is not None:
        check_tensor("linear", "bias", bias)
    out = _short_way(input, weight, bias)
    if out is not None:
        return out
    _check(input, weight, bias)
    backend = OP.resolve(input, weight, bias)
    if backend == "eager":
        return linear_ref(input, weight, bias)
    rows = input.reshape(math.prod(input.shape[:-1]), input.shape[-1])
    out = OP.call(dense(rows), dense(weight), bias, backend)
    return out.view(*input.shape[:-1], weight.shape[0])


def if_faster(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor | None:
    """``linear`` where it does not end up with PyTorch's own, and None there.

    For layers, which have ``torch.nn.functional.linear`` at hand. A token of a decoder is some
    fifty of them, of few rows, so the question that most calls end with comes first.
    """
    wanted = requested("linear")
    if not _BUILT or wanted not in ("auto", "cpp") or _is_traced():
        return None
    if wanted == "auto" and slower("linear", _measured(input, weight)) is not None:
        return None
    if not is_recorded() and _fits(input, weight, bias) and _is_simple(input, weight, bias):
        return torch.ops.fastplm_C.linear.default(input, weight, bias)
    return linear(input, weight, bias) if OP.is_faster(input, weight, bias) else None


def multiply(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``a b + bias`` on the CPU, by csrc/: [M, K], [K, N], [N] -> [M, N]."""
    out = a.new_empty(a.shape[0], b.shape[1])
    if a.numel() == 0 or b.numel() == 0:
        return out.zero_() if bias is None else out.copy_(bias)
    torch.ops.fastplm_C.product(dense(a), dense(b), bias, out)
    return out


def is_ours(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether ``multiply`` of a [M, K] and b [K, N], as they lie, is faster than PyTorch's."""
    return (
        _BUILT
        and requested("linear") in ("auto", "cpp")
        and a.dtype in _DTYPES
        and 1 in a.stride()
        and 1 in b.stride()
        and min(a.numel(), b.numel()) > 0
        and slower("linear", _class_of(a.shape[0], b, *b.stride())) is None
    )


def dense(matrix: torch.Tensor) -> torch.Tensor:
    """The matrix, or a copy if neither its rows nor its columns lie together."""
    return matrix if 1 in matrix.stride() else matrix.contiguous()


def _check(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    check_dtype("linear", "input", input, FLOATING)
    check(input.dim() > 0, "linear", "input", "0 dimensions", "[..., K]", "Pass a row.")
    check_shape(
        "linear", "input", input, (*input.shape[:-1], weight.shape[1]), "[..., K], weight is [M, K]"
    )
    same = check_same_device if torch._C._is_any_autocast_enabled() else check_same
    same("linear", input=input, weight=weight, bias=bias)
    if bias is not None:
        check_shape("linear", "bias", bias, (weight.shape[0],), "[M]")


# --- backend "cpp" --------------------------------------------------------------------------------


def _cpp_rejects(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    forced: bool,
) -> str | None:
    reason = _CSRC_REJECTS(input, forced=forced)
    if reason is not None:
        return reason
    dtype = input.dtype
    if (
        dtype not in _DTYPES
        or weight.dtype is not dtype
        or (bias is not None and bias.dtype is not dtype)
        or torch.is_autocast_enabled("cpu")
    ):
        return "csrc/ multiplies matrices of one dtype, fp32, fp16 or bf16, outside autocast"
    if not forced and torch.compiler.is_compiling():
        return "a traced product, of any number of rows, is PyTorch's"
    return None


def _measured(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> CallClass:
    of_n, of_k = weight.stride()
    return _class_of(math.prod(input.shape[:-1]), weight, of_k, of_n)


def _class_of(rows: int, b: torch.Tensor, of_k: int, of_n: int) -> CallClass:
    """Of a product of that many rows with b, whose K and N have these strides: nn.Linear's weight
    or Conv1D's."""
    form = "conv1d" if of_n == 1 and of_k != 1 else "linear"
    return CallClass(form, b.dtype, (rows, b.numel()))


def _short_way(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor | None:
    """A call without an error in it by what ``resolve`` would find, or None.

    Between the layers of a model the caches forget all Python, most of what a small call costs.
    """
    wanted = requested("linear")
    if (
        wanted not in ("auto", "cpp")
        or _is_traced()
        or is_recorded()
        or not _fits(input, weight, bias)
    ):
        return None
    # Asked of a forced call, too, as `fastplm measure` times calls with their question.
    if slower("linear", _measured(input, weight)) is not None and wanted == "auto":
        return torch.nn.functional.linear(input, weight, bias)
    if _is_simple(input, weight, bias):
        return torch.ops.fastplm_C.linear.default(input, weight, bias)
    return None


def _is_traced() -> bool:
    return torch.compiler.is_compiling() or torch.jit.is_tracing()


def _fits(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether there is no error in a call, on a CPU and of one dtype."""
    dtype = weight.dtype
    return (
        dtype in FLOATING
        and input.dtype is dtype
        and input.shape[-1:] == weight.shape[1:]
        and input.is_cpu
        and weight.is_cpu
        and (
            bias is None or (bias.is_cpu and bias.dtype is dtype and bias.shape == weight.shape[:1])
        )
    )


def _is_simple(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether ``fastplm_C::linear`` takes what fits, and nobody asks for more than the product."""
    return (
        _BUILT
        and weight.dtype in _DTYPES
        and 1 in weight.stride()
        and min(input.numel(), weight.numel()) > 0
        and input.dim() <= _MOST_DIMS
        and not is_watched((input, weight, bias))
        and not torch.is_autocast_enabled("cpu")
        and not (torch.is_grad_enabled() and torch._C._any_requires_grad(input, weight, bias))
    )


def _cpp_forward(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    return multiply(input, weight.t(), bias)


def _cpp_backward(
    grad_out: torch.Tensor,
    input: torch.Tensor,
    weight: torch.Tensor,
    of_input: bool,
    of_weight: bool,
    of_bias: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    nothing = grad_out.new_empty(0)
    return (
        multiply(grad_out, weight) if of_input else nothing,
        multiply(grad_out.t(), input) if of_weight else nothing,
        grad_out.sum(0) if of_bias else nothing,
    )


# --- registration ---------------------------------------------------------------------------------


def _fake_forward(input, weight, bias, backend):
    _check(input, weight, bias)
    return input.new_empty(input.shape[0], weight.shape[0])


def _fake_backward(grad_out, input, weight, of_input, of_weight, of_bias, backend):
    nothing = grad_out.new_empty(0)
    return (
        grad_out.new_empty(input.shape) if of_input else nothing,
        grad_out.new_empty(weight.shape) if of_weight else nothing,
        grad_out.new_empty(weight.shape[0]) if of_bias else nothing,
    )


def _setup_context(ctx, inputs, output):
    input, weight, _, ctx.backend = inputs
    ctx.forced = requested("linear") == "cpp"
    ctx.save_for_backward(input, weight)


def _backward(ctx, grad_out):
    input, weight = ctx.saved_tensors
    of_input, of_weight, of_bias = needed = ctx.needs_input_grad[:3]
    if torch.is_grad_enabled():  # somebody wants the gradient's gradient
        grads = (grad_out @ weight, grad_out.t() @ input, grad_out.sum(0))
        return *(g if wanted else None for g, wanted in zip(grads, needed, strict=True)), None
    # What were few rows in the forward are many, or of another layout, in these products.
    grad_out = dense(grad_out)
    rows, columns = grad_out.shape
    ours_of_input = of_input and (ctx.forced or _pays(rows, weight))
    ours_of_weight = of_weight and (ctx.forced or _pays(columns, input))
    grad_input, grad_weight, grad_bias = OP.call_backward(
        grad_out, input, weight, ours_of_input, ours_of_weight, of_bias, ctx.backend
    )
    if of_input and not ours_of_input:
        grad_input = grad_out @ weight
    if of_weight and not ours_of_weight:
        grad_weight = grad_out.t() @ input
    grads = (grad_input, grad_weight, grad_bias)
    return *(g if wanted else None for g, wanted in zip(grads, needed, strict=True)), None


def _pays(rows: int, b: torch.Tensor) -> bool:
    return slower("linear", _class_of(rows, b, *b.stride())) is None


def _smoke(device: torch.device) -> None:
    input = torch.randn(5, 16, device=device, requires_grad=True)
    linear(input, torch.randn(3, 16, device=device), torch.randn(3, device=device)).sum().backward()


_CSRC_REJECTS = rejects_of_csrc("linear")["cpp"]
_BUILT = _CSRC_REJECTS(torch.empty(0), forced=False) is None

OP = Op("linear", reference=linear_ref, smoke=_smoke)
OP.backend(
    "cpp",
    forward=_cpp_forward,
    backward=_cpp_backward,
    rejects=_cpp_rejects,
    measured=_measured,
)
OP.define_differentiable(
    "(Tensor input, Tensor weight, Tensor? bias, str backend) -> Tensor",
    "(Tensor grad_out, Tensor input, Tensor weight, bool of_input, bool of_weight, bool of_bias, "
    "str backend) -> (Tensor, Tensor, Tensor)",
    fake_forward=_fake_forward,
    fake_backward=_fake_backward,
    setup_context=_setup_context,
    backward=_backward,
    twice=True,
)
