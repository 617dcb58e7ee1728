"""``ops.rms_norm``: its arguments, and its backends."""

from __future__ import annotations

import math
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from fastplm._checks import check_number
from fastplm._declare import Arg
from fastplm._registry import Op
from fastplm._rules import CallClass, training
from fastplm.ops._common import csrc_rejects
from fastplm.reference.rms_norm import rms_norm_ref


class Call(NamedTuple):
    input: Annotated[Tensor, Arg("[..., E]")]
    weight: Annotated[Tensor, Arg("[E]")]
    eps: float = 1e-6

    def check(self, where: str) -> None:
        fix = "Pass the model's, such as 1e-6."
        check_number(where, "eps", self.eps, 0.0, math.inf, "0 or more", fix)


def rms_norm(input: Tensor, weight: Tensor, *, eps: float = 1e-6) -> Tensor:
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
    return OP(Call(input, weight, eps))


# --- backend "cpp" --------------------------------------------------------------------------------

_CSRC_REJECTS = csrc_rejects("rms_norm", fp64=False)


def _cpp_rejects(call: Call, *, forced: bool) -> str | None:
    if call.weight.dtype is torch.float64:
        return "float64: csrc/ takes fp32, fp16 and bf16"
    return _CSRC_REJECTS(call, forced=forced)


def _measured(input: Tensor, weight: Tensor, eps: float) -> CallClass:
    return training(input, weight), input.dtype, (input.numel(),)


def _rows(tensor: Tensor) -> Tensor:
    """[..., E] -> [N, E], dense."""
    return tensor.reshape(-1, tensor.shape[-1]).contiguous()


def _cpp_forward(call: Call) -> Tensor:
    out = torch.empty(call.input.shape, dtype=call.weight.dtype, device="cpu")
    if out.numel() > 0:
        torch.ops.fastplm_C.rms_norm(
            _rows(call.input), call.weight.contiguous(), call.eps, _rows(out)
        )
    return out


def _cpp_backward(grad: Tensor, saved: Call) -> tuple[Tensor, Tensor]:
    input, weight, eps = saved
    if input.numel() == 0:
        return torch.empty_like(input), torch.zeros_like(weight)
    grad_input = torch.empty(input.shape, dtype=input.dtype, device="cpu")
    grad_weight = torch.empty(weight.shape, dtype=weight.dtype, device="cpu")
    torch.ops.fastplm_C.rms_norm_backward(
        _rows(grad), _rows(input), weight.contiguous(), eps, _rows(grad_input), grad_weight
    )
    return grad_input, grad_weight


# --- backend "stock" ------------------------------------------------------------------------------


def _stock_rejects(call: Call, *, forced: bool) -> str | None:
    if call.input.dtype is not call.weight.dtype:
        return "PyTorch's takes one dtype"
    if torch._C._is_any_autocast_enabled():
        return "autocast makes the result of PyTorch's fp32 on a GPU"
    return None


def _stock(call: Call) -> Tensor:
    if torch.compiler.is_compiling():  # PyTorch 2.11 takes no unknown width there, for CUDA
        return rms_norm_ref(call.input, call.weight, eps=call.eps)
    return torch.nn.functional.rms_norm(call.input, call.weight.shape, call.weight, call.eps)


# --- registration ---------------------------------------------------------------------------------


def _second(grad: Tensor, saved: Call, backend: str) -> tuple[Tensor, Tensor]:
    input, weight, eps = saved
    x, grad = input.float(), grad.float()
    scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    weighted = grad * weight.float()
    along = scale.pow(2) * (weighted * x).mean(-1, keepdim=True)
    of_weight = (grad * x * scale).reshape(-1, x.shape[-1]).sum(0)
    return (scale * (weighted - x * along)).to(input.dtype), of_weight.to(weight.dtype)


def _smoke(device: torch.device) -> None:
    input = torch.randn(5, 16, device=device, requires_grad=True)
    rms_norm(input, torch.randn(16, device=device)).sum().backward()


OP = Op(
    "rms_norm",
    Call,
    fake=lambda call, backend: call.input.new_empty(call.input.shape, dtype=call.weight.dtype),
    reference=rms_norm_ref,
    smoke=_smoke,
    saved=Call,
    gradients=("input", "weight"),
    fake_backward=lambda grad, saved: (
        saved.input.new_empty(saved.input.shape),
        saved.weight.new_empty(saved.weight.shape),
    ),
    second=_second,
)
OP.backend("stock", forward=_stock, rejects=_stock_rejects)
OP.backend(
    "cpp",
    forward=_cpp_forward,
    backward=_cpp_backward,
    rejects=_cpp_rejects,
    measured=_measured,
)
