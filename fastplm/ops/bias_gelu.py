"""``ops.bias_gelu``: its arguments, and its backends."""

from __future__ import annotations

from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from fastplm._declare import Arg
from fastplm._registry import Op
from fastplm.errors import check_choice
from fastplm.ops._common import csrc_rejects, kernels, rows_of, triton_rejects
from fastplm.ops.gelu import FORMS
from fastplm.reference.bias_gelu import bias_gelu_ref


class Call(NamedTuple):
    input: Annotated[Tensor, Arg("[..., F > 0]")]
    bias: Annotated[Tensor | None, Arg("[F]")]
    approximate: str = "none"

    def check(self, where: str) -> None:
        check_choice(where, "approximate", self.approximate, FORMS)


class Saved(NamedTuple):
    input: Tensor
    bias: Tensor | None
    approximate: str
    need_bias: bool


def bias_gelu(input: Tensor, bias: Tensor | None, *, approximate: str = "none") -> Tensor:
    """The bias of a linear layer and the GELU after it, in one pass; so are their gradients.

    ``out = z Phi(z)`` with ``z = input + bias``, Phi the distribution function of the normal
    distribution; or its approximation ``z (1 + tanh(sqrt(2/pi) (z + 0.044715 z^3))) / 2``.

    Args:
        input: [..., F], fp64, fp32, fp16 or bf16: a product without its bias.
        bias: [F], of any of these dtypes: fp32 beside an input in 16 bits is as exact as it looks.
            None: the GELU alone.
        approximate: "none", as in BERT, or "tanh", as in GPT-2 and ALBERT ("gelu_new").

    Returns:
        [..., F] in the dtype of ``input``. Nothing but the inputs is kept for the backward.

    Numerics:
        In fp32 (fp64 in fp64), rounded once; the sum with the bias is not rounded. The bias's
        gradient is summed in fp32, of slopes that are not rounded to 16 bits.

    Determinism:
        Forward and backward repeat bit for bit: sums over a number of row groups that the shape
        fixes, then over the groups in order; no atomics.

    Raises:
        ArgumentValueError, ArgumentTypeError: arguments that do not fit.
        BackendError: a forced backend cannot run the call.

    Examples:
        >>> ops.bias_gelu(torch.tensor([[-1.0, 0.0]]), torch.tensor([0.0, 1.0]))
        tensor([[-0.1587,  0.8413]])

    Source: Hendrycks and Gimpel 2016, "Gaussian Error Linear Units" (arXiv 1606.08415), §2.
    Reference: ``fastplm.reference.bias_gelu.bias_gelu_ref``.
    """
    return OP(Call(input, bias, approximate))


# --- backend "cpp" --------------------------------------------------------------------------------

_CSRC_REJECTS = csrc_rejects("bias_gelu", fp64=False)


def _cpp_rejects(call: Call, *, forced: bool) -> str | None:
    if call.bias is not None and call.bias.dtype is torch.float64:
        return "float64: csrc/ takes fp32, fp16 and bf16"
    return _CSRC_REJECTS(call, forced=forced)


def _cpp_forward(call: Call) -> Tensor:
    input, bias, approximate = call
    out = input.new_empty(input.shape)
    torch.ops.fastplm_C.bias_gelu(input, bias, approximate == "tanh", out)
    return out


def _cpp_backward(grad: Tensor, saved: Saved) -> tuple[Tensor, Tensor]:
    input, bias, approximate, _ = saved
    grad_input, grad_bias = _fake_backward(grad, saved)
    torch.ops.fastplm_C.bias_gelu_backward(
        grad, input, bias, approximate == "tanh", grad_input, grad_bias
    )
    return grad_input, grad_bias


# --- backend "triton" -----------------------------------------------------------------------------


def _triton_rejects(call: Call, *, forced: bool) -> str | None:
    if call.bias is not None and call.bias.dtype is torch.float64:
        return "float64: the kernels take fp32, fp16 and bf16"
    return triton_rejects(call, forced=forced)


def _triton_forward(call: Call) -> Tensor:
    input, bias, approximate = call
    bias = None if bias is None else bias.contiguous()
    out = kernels("bias_gelu").bias_gelu_fwd(rows_of(input), bias, approximate)
    return out.view(input.shape)


def _triton_backward(grad: Tensor, saved: Saved) -> tuple[Tensor, Tensor]:
    input, bias, *others = saved
    bias = None if bias is None else bias.contiguous()
    grad_input, grad_bias = kernels("bias_gelu").bias_gelu_bwd(
        rows_of(grad), rows_of(input), bias, *others
    )
    return grad_input.view(input.shape), grad_bias


# --- registration ---------------------------------------------------------------------------------


def _fake_backward(grad: Tensor, saved: Saved) -> tuple[Tensor, Tensor]:
    input, bias, _, need_bias = saved
    found = input.new_empty(0)
    if need_bias and bias is not None:
        found = bias.new_empty(bias.shape)
    return input.new_empty(input.shape), found


def _second(grad: Tensor, saved: Saved, backend: str) -> tuple[Tensor, Tensor]:
    input, bias, approximate, need_bias = saved
    wide = torch.promote_types(input.dtype, torch.float32)
    z = input.to(wide) if bias is None else input.to(wide) + bias.to(wide)
    dz = torch.ops.aten.gelu_backward(grad.to(wide), z, approximate=approximate)
    found = input.new_empty(0)
    if need_bias and bias is not None:
        found = dz.reshape(-1, dz.shape[-1]).sum(0).to(bias.dtype)
    return dz.to(input.dtype), found


def _smoke(device: torch.device) -> None:
    input, bias = torch.randn(5, 16, device=device), torch.randn(16, device=device)
    bias_gelu(input.requires_grad_(), bias.requires_grad_()).sum().backward()


OP = Op(
    "bias_gelu",
    Call,
    fake=lambda call, backend: call.input.new_empty(call.input.shape),
    reference=bias_gelu_ref,
    smoke=_smoke,
    saved=Saved,
    gradients=("input", "bias"),
    fake_backward=_fake_backward,
    second=_second,
)
OP.backend("cpp", forward=_cpp_forward, backward=_cpp_backward, rejects=_cpp_rejects)
OP.backend("triton", forward=_triton_forward, backward=_triton_backward, rejects=_triton_rejects)
