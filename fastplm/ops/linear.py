"""``ops.linear``: checks, schema, fake, autograd formula and backends."""

from __future__ import annotations

import torch

from fastplm._backends import is_recorded, requested
from fastplm._checks import FLOATING, check_dtype, check_same_device, check_shape, check_tensor
from fastplm._registry import Op, is_watched
from fastplm.ops._common import is_eager, rejects_of_csrc
from fastplm.reference.linear import linear_ref

# Below this many multiplications the threads cost more than the product; and of dtypes that the CPU
# does not compute in.
_WORTH_IT = 1 << 22
_HALF_WORTH_IT = 1 << 16
# Rows of the input up to which we are faster than MKL, with the elements of a weight from which it
# is so: by the floats in a vector, for nn.Linear's weight and for one that lies the other way.
_FEW: dict[int, dict[str, tuple[tuple[int, int], ...]]] = {
    16: {"linear": ((56, 1 << 17), (96, 1 << 20)), "conv1d": ((48, 1 << 18),)},
    8: {"linear": ((8, 1 << 17),), "conv1d": ((8, 1 << 18),)},
    0: {"linear": (), "conv1d": ()},
}
_MOST = {
    vector: max((rows for limits in layouts.values() for rows, _ in limits), default=0)
    for vector, layouts in _FEW.items()
}
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def linear(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """``torch.nn.functional.linear``, by a product of fastplm's own where PyTorch's is slow.

    ``out = input weight^T + bias``

    Which it is on a CPU with vectors that csrc/ was compiled for (AVX2, AVX-512):

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
    _check(input, weight, bias)
    backend = OP.resolve(input, weight, bias)
    if backend == "eager":
        return linear_ref(input, weight, bias)
    rows = input.reshape(-1, input.shape[-1])
    out = OP.call(dense(rows), dense(weight), bias, backend)
    return out.view(*input.shape[:-1], weight.shape[0])


def if_faster(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor | None:
    """``linear`` where it does not end up with PyTorch's own, and None there.

    For layers, which have ``torch.nn.functional.linear`` at hand. A token of a decoder is some
    fifty of them, of few rows: checks that were made need no second time.
    """
    if not may_be_worth_it(input):
        return None
    wanted = requested("linear")
    # The question that most calls end with comes first.
    by_rows = weight.stride(0) == 1
    if wanted == "auto" and _as_fast_by_torch(_rows(input), input.dtype, weight.numel(), by_rows):
        return None
    if (
        wanted != "auto"
        or is_recorded()
        or is_watched((input, weight, bias))
        or torch.jit.is_tracing()
        or (torch.is_grad_enabled() and torch._C._any_requires_grad(input, weight, bias))
        or not _fits_layer(input, weight, bias)
    ):
        return linear(input, weight, bias) if is_worth_it(input, weight) else None
    return torch.ops.fastplm_C.linear.default(input, weight, bias)


def is_worth_it(input: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether ``linear`` would run by anything but PyTorch's own, without looking at the bias."""
    return (
        is_eager(input, weight)
        and _cpp_rejects(input, weight, forced=requested("linear") == "cpp") is None
    )


def may_be_worth_it(input: torch.Tensor) -> bool:
    """Whether ``is_worth_it`` says yes of some weight: a glance, which costs little."""
    wanted = requested("linear")
    if wanted != "auto":
        return wanted == "cpp"
    if not _VECTOR or torch.compiler.is_compiling():
        return False
    if input.dtype is not torch.float32:
        return input.dtype in _SLOW_DTYPES
    width = input.shape[-1]
    return _BLAS_IS_SLOW or width < input.numel() <= _MOST[_VECTOR] * width


def multiply(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``a b + bias`` on the CPU, by csrc/: [M, K], [K, N], [N] -> [M, N]."""
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
    dtype = input.dtype
    if (
        dtype not in _DTYPES
        or weight.dtype is not dtype
        or (bias is not None and bias.dtype is not dtype)
        or torch.is_autocast_enabled("cpu")
    ):
        return "csrc/ multiplies matrices of one dtype, fp32, fp16 or bf16, outside autocast"
    if forced:
        return None
    return _as_fast_by_torch(_rows(input), dtype, weight.numel(), weight.stride(0) == 1)


def _as_fast_by_torch(rows: int, dtype: torch.dtype, size: int, by_rows: bool) -> str | None:
    """Why PyTorch's product of that many rows with b [K, N] takes no longer than ours.

    Args:
        rows: of a.
        dtype: of both.
        size: elements of b.
        by_rows: whether the rows of b lie together.
    """
    if dtype is not torch.float32:
        if dtype not in _SLOW_DTYPES:
            return f"this CPU computes in {dtype}"
        if rows * size < _HALF_WORTH_IT:
            return "the product is small"
        if rows == 1 and dtype is torch.float16 and not by_rows:
            return "PyTorch reads the weight of one row as fast"
        return None
    if _BLAS_IS_SLOW and rows * size >= _WORTH_IT:
        return None
    if rows <= (1 if by_rows else 2):
        return "PyTorch reads the weight of so few rows as fast"
    for most, least in _FEW[_VECTOR]["conv1d" if by_rows else "linear"]:
        if rows <= most and size >= least:
            return None
    return "PyTorch's product uses all of this CPU"


def _slow_dtypes() -> frozenset[torch.dtype]:
    """Of fp16 and bf16 those that this CPU does not compute in."""
    matrices = torch.cpu._is_amx_tile_supported()
    native = {
        torch.float16: matrices,  # the CPUs that have them have AVX512-FP16, too
        torch.bfloat16: matrices or torch.cpu._is_avx512_bf16_supported(),
    }
    return frozenset(dtype for dtype in native if _VECTOR and not native[dtype])


def _fits_layer(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether ``fastplm_C::linear`` takes them as they are; if not, ``linear`` says why."""
    dtype = input.dtype
    return (
        input.is_cpu
        and weight.is_cpu
        and weight.dtype is dtype
        and input.shape[-1] == weight.shape[1]
        and 1 in weight.stride()
        and (
            bias is None or (bias.is_cpu and bias.dtype is dtype and bias.shape == weight.shape[:1])
        )
        and not torch.is_autocast_enabled("cpu")
    )


def _rows(input: torch.Tensor) -> int:
    return input.numel() // max(input.shape[-1], 1)


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
    return _as_fast_by_torch(rows, b.dtype, b.numel(), b.stride(1) == 1) is None


def _smoke(device: torch.device) -> None:
    input = torch.randn(5, 16, device=device, requires_grad=True)
    linear(input, torch.randn(3, 16, device=device), torch.randn(3, device=device)).sum().backward()


_CSRC_REJECTS = rejects_of_csrc("linear")["cpp"]
#: Floats in a vector of this CPU, 0 if csrc/ was not compiled for it.
_VECTOR = (
    (0, 8, 16)[torch.ops.fastplm_C.level()] if _CSRC_REJECTS(torch.empty(0), forced=False) is None else 0
)
_BLAS_IS_SLOW = (
    _VECTOR > 0
    and torch.backends.mkl.is_available()
    and torch.ops.fastplm_C.mkl_leaves_avx512_unused()
)
_SLOW_DTYPES = _slow_dtypes()

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
