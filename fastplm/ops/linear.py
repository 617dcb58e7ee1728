"""``ops.linear``: checks, schema, fake, autograd formula and backends."""

from __future__ import annotations

import torch

from fastplm._backends import requested
from fastplm._checks import FLOATING, check_dtype, check_same_device, check_shape, check_tensor
from fastplm._registry import Op
from fastplm.ops._common import is_eager, rejects_of_csrc
from fastplm.reference.linear import linear_ref

# Below this many multiplications the threads cost more than the product.
_WORTH_IT = 1 << 22


def linear(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """``torch.nn.functional.linear``, by a product of fastplm's own where PyTorch's is slow.

    ``out = input weight^T + bias``

    PyTorch multiplies fp32 matrices on the CPU with MKL, which uses AVX-512 on Intel's CPUs alone.
    On another CPU that has it, and there alone, products of some size run in ``csrc/linear.h``.
    Everything else is PyTorch's: other dtypes, other devices, other CPUs.

    Args:
        input: [..., K], floating.
        weight: [M, K] in the dtype of ``input``.
        bias: [M].

    Returns:
        [..., M] in the dtype of ``input``; under autocast in that of autocast.

    Numerics:
        Backend "cpp" adds up in fp32, 384 products at a time, as MKL does.

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
    _check(input, weight, bias)
    backend = OP.resolve(input, weight, bias)
    if backend == "eager":
        return linear_ref(input, weight, bias)
    rows = input.reshape(-1, input.shape[-1])
    out = OP.call(dense(rows), dense(weight), bias, backend)
    return out.view(*input.shape[:-1], weight.shape[0])


def is_worth_it(input: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether ``linear`` would run by anything but PyTorch's own, without looking at every reason.

    For those who have ``torch.nn.functional.linear`` at hand, and call it where this says no.
    """
    forced = requested("linear") == "cpp"
    return (
        may_be_worth_it()
        and is_eager(input, weight)
        and _cpp_rejects(input, weight, forced=forced) is None
    )


def may_be_worth_it() -> bool:
    """Whether there are products here for which ``is_worth_it`` says yes."""
    wanted = requested("linear")
    return _BLAS_IS_SLOW if wanted == "auto" else wanted == "cpp"


def multiply(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``a b + bias`` in fp32 on the CPU, by csrc/: [M, K], [K, N], [N] -> [M, N]."""
    out = a.new_empty(a.shape[0], b.shape[1])
    if a.numel() == 0 or b.numel() == 0:
        return out.zero_() if bias is None else out.copy_(bias)
    torch.ops.fastplm_C.product(dense(a), dense(b), bias, out)
    return out


def dense(matrix: torch.Tensor) -> torch.Tensor:
    """The matrix, or a copy if neither its rows nor its columns lie together."""
    return matrix if 1 in matrix.stride() else matrix.contiguous()


def _check(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    check_dtype("linear", "input", input, FLOATING)
    check_shape(
        "linear", "input", input, (*input.shape[:-1], weight.shape[1]), "[..., K], weight is [M, K]"
    )
    check_same_device("linear", input=input, weight=weight, bias=bias)
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
    dtypes = {tensor.dtype for tensor in (input, weight, bias) if tensor is not None}
    if dtypes != {torch.float32} or torch.is_autocast_enabled("cpu"):
        return "csrc/ multiplies fp32 matrices, outside autocast"
    if forced:
        return None
    if not _BLAS_IS_SLOW:
        return "PyTorch's product uses all of this CPU"
    if input.numel() * weight.shape[0] < _WORTH_IT:
        return "the product is small"
    return None


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
    ctx.save_for_backward(input, weight)


def _backward(ctx, grad_out):
    input, weight = ctx.saved_tensors
    needed = ctx.needs_input_grad[:3]
    if torch.is_grad_enabled():  # somebody wants the gradient's gradient
        grads = (grad_out @ weight, grad_out.t() @ input, grad_out.sum(0))
    else:
        grads = OP.call_backward(dense(grad_out), input, weight, *needed, ctx.backend)
    return *(g if wanted else None for g, wanted in zip(grads, needed, strict=True)), None


def _smoke(device: torch.device) -> None:
    input = torch.randn(5, 16, device=device, requires_grad=True)
    linear(input, torch.randn(3, 16, device=device), torch.randn(3, device=device)).sum().backward()


_CSRC_REJECTS = rejects_of_csrc("product")["cpp"]
_BLAS_IS_SLOW = (
    torch.backends.mkl.is_available()
    and _CSRC_REJECTS(torch.empty(0), forced=False) is None
    and torch.ops.fastplm_C.mkl_leaves_avx512_unused()
)

OP = Op("linear", reference=linear_ref, smoke=_smoke)
OP.backend("cpp", forward=_cpp_forward, backward=_cpp_backward, rejects=_cpp_rejects)
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
