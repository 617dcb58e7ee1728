"""``ops.rms_norm``: checks, schema, fake, autograd formula and backends."""

from __future__ import annotations

import math

import torch

from fastplm._checks import (
    FLOATING,
    check_dtype,
    check_number,
    check_same_device,
    check_shape,
    check_tensor,
)
from fastplm._measured import CallClass, training
from fastplm._registry import Op
from fastplm.ops._common import rejects_of_csrc
from fastplm.reference.rms_norm import rms_norm_ref


def rms_norm(input: torch.Tensor, weight: torch.Tensor, *, eps: float = 1e-6) -> torch.Tensor:
    """T5's layer norm: rows scaled to a root mean square of 1, in one pass.

    ``out = weight x / sqrt(mean(x^2) + eps)``, the mean over the last dimension.

    ``torch.nn.functional.rms_norm``, except that the result has the dtype of ``weight``: the
    hidden states of a T5 in 16 bits may be fp32, and what follows takes 16.

    Args:
        input: [..., E], fp64, fp32, fp16 or bf16.
        weight: [E], fp64, fp32, fp16 or bf16.
        eps: what is added to the mean, 0 or more.

    Returns:
        [..., E] in the dtype of ``weight``. Nothing but the inputs is kept for the backward.

    Numerics:
        In fp32 (fp64 if there is fp64), rounded once. The weight's gradient is summed over 32 rows
        in fp32, and over those sums in fp64.

    Determinism:
        Forward and backward repeat bit for bit, with any number of threads.

    Raises:
        ArgumentValueError, ArgumentTypeError: shapes, dtypes, devices or numbers that do not fit.
        BackendError: a forced backend cannot run the call.

    Examples:
        >>> ops.rms_norm(torch.tensor([[3.0, 4.0]]), torch.tensor([1.0, 10.0]))
        tensor([[ 0.8485, 11.3137]])

    Source: Zhang and Sennrich 2019, "Root Mean Square Layer Normalization" (arXiv 1910.07467),
        equation 4.
    Reference: ``fastplm.reference.rms_norm.rms_norm_ref``.
    """
    check_tensor("rms_norm", "input", input)
    check_tensor("rms_norm", "weight", weight, ndim=1)
    _check(input, weight, eps)
    backend = OP.resolve(input, weight)
    if backend == "eager":
        return rms_norm_ref(input, weight, eps=eps)
    return OP.call(input, weight, eps, backend)


def _check(input: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    check_dtype("rms_norm", "input", input, FLOATING)
    check_dtype("rms_norm", "weight", weight, FLOATING)
    check_same_device("rms_norm", input=input, weight=weight)
    check_shape(
        "rms_norm", "weight", weight, input.shape[-1:], "[E], the last dimension of `input`"
    )
    fix = "Pass the model's, such as 1e-6."
    check_number("rms_norm", "eps", eps, 0.0, math.inf, "0 or more", fix)


# --- backend "cpp" --------------------------------------------------------------------------------

_CSRC_REJECTS = rejects_of_csrc("rms_norm")["cpp"]


def _cpp_rejects(input: torch.Tensor, weight: torch.Tensor, *, forced: bool) -> str | None:
    if torch.float64 in (input.dtype, weight.dtype):
        return "float64: csrc/ takes fp32, fp16 and bf16"
    return _CSRC_REJECTS(input, forced=forced)


def _measured(input: torch.Tensor, weight: torch.Tensor) -> CallClass:
    return CallClass(training(input, weight), input.dtype, (input.numel(),))


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """[..., E] -> [N, E], dense."""
    return tensor.reshape(-1, tensor.shape[-1]).contiguous()


def _cpp_forward(input: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    out = torch.empty(input.shape, dtype=weight.dtype)
    if out.numel() > 0:
        torch.ops.fastplm_C.rms_norm(_rows(input), weight.contiguous(), eps, _rows(out))
    return out


def _cpp_backward(
    grad_out: torch.Tensor, input: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    if input.numel() == 0:
        return torch.empty_like(input), torch.zeros_like(weight)
    grad_input = torch.empty(input.shape, dtype=input.dtype)
    grad_weight = torch.empty(weight.shape, dtype=weight.dtype)
    torch.ops.fastplm_C.rms_norm_backward(
        _rows(grad_out), _rows(input), weight.contiguous(), eps, _rows(grad_input), grad_weight
    )
    return grad_input, grad_weight


# --- registration ---------------------------------------------------------------------------------


def _fake_forward(input, weight, eps, backend):
    return input.new_empty(input.shape, dtype=weight.dtype)


def _fake_backward(grad_out, input, weight, eps, backend):
    return input.new_empty(input.shape), weight.new_empty(weight.shape)


def _setup_context(ctx, inputs, output):
    input, weight, ctx.eps, ctx.backend = inputs
    ctx.save_for_backward(input, weight)


def _backward(ctx, grad_out):
    input, weight = ctx.saved_tensors
    if torch.is_grad_enabled():  # somebody wants the gradient's gradient
        grads = _differentiable_grads(grad_out, input, weight, ctx.eps)
    else:
        grads = OP.call_backward(grad_out, input, weight, ctx.eps, ctx.backend)
    needed = ctx.needs_input_grad[:2]
    return *(g if wanted else None for g, wanted in zip(grads, needed, strict=True)), None, None


def _differentiable_grads(grad_out, input, weight, eps):
    x, grad = input.float(), grad_out.float()
    scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    weighted = grad * weight.float()
    along = scale.pow(2) * (weighted * x).mean(-1, keepdim=True)
    of_weight = (grad * x * scale).reshape(-1, x.shape[-1]).sum(0)
    return (scale * (weighted - x * along)).to(input.dtype), of_weight.to(weight.dtype)


def _smoke(device: torch.device) -> None:
    input = torch.randn(5, 16, device=device, requires_grad=True)
    rms_norm(input, torch.randn(16, device=device)).sum().backward()


OP = Op("rms_norm", reference=rms_norm_ref, smoke=_smoke)
OP.backend(
    "cpp",
    forward=_cpp_forward,
    backward=_cpp_backward,
    rejects=_cpp_rejects,
    measured=_measured,
)
OP.define_differentiable(
    "(Tensor input, Tensor weight, float eps, str backend) -> Tensor",
    "(Tensor grad_out, Tensor input, Tensor weight, float eps, str backend) -> (Tensor, Tensor)",
    fake_forward=_fake_forward,
    fake_backward=_fake_backward,
    setup_context=_setup_context,
    backward=_backward,
    twice=True,
)
