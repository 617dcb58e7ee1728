"""``ops.gelu``: its arguments, and its backends."""

from __future__ import annotations

from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from fastplm._declare import Arg
from fastplm._registry import Op
from fastplm._rules import CallClass, training
from fastplm.errors import check_choice
from fastplm.ops._common import csrc_rejects
from fastplm.reference.gelu import gelu_ref

FORMS = ("none", "tanh")


class Call(NamedTuple):
    input: Annotated[Tensor, Arg()]
    approximate: str = "none"

    def check(self, where: str) -> None:
        check_choice(where, "approximate", self.approximate, FORMS)


def gelu(input: Tensor, *, approximate: str = "none") -> Tensor:
    """``torch.nn.functional.gelu``, whose form with a tanh is C++ on a CPU, where PyTorch is slow.

    ``out = x Phi(x)``, Phi the distribution function of the normal distribution; or its
    approximation ``x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))) / 2``.

    Args:
        input: of any shape, fp64, fp32, fp16 or bf16.
        approximate: "none", as in BERT, or "tanh", as in GPT-2, ALBERT and T5 1.1, which
            Transformers calls "gelu_new" and writes as eight operations.

    Returns:
        The shape and dtype of ``input``. Nothing but ``input`` is kept for the backward.

    Numerics:
        In fp32 (fp64 in fp64), rounded once. "cpp" writes (1 + tanh u) / 2 as a logistic function,
        so that small values far below 0 keep their digits.

    Determinism:
        Forward and backward repeat bit for bit, with any number of threads.

    Raises:
        ArgumentValueError, ArgumentTypeError: arguments that do not fit.
        BackendError: a forced backend cannot run the call.

    Examples:
        >>> ops.gelu(torch.tensor([-1.0, 0.0, 1.0]), approximate="tanh")
        tensor([-0.1588,  0.0000,  0.8412])

    Source: Hendrycks and Gimpel 2016, "Gaussian Error Linear Units" (arXiv 1606.08415), §2.
    Reference: ``fastplm.reference.gelu.gelu_ref``.
    """
    return OP(Call(input, approximate))


# --- backend "cpp" --------------------------------------------------------------------------------

_CSRC_REJECTS = csrc_rejects("gelu_tanh", fp64=False)


def _cpp_rejects(call: Call, *, forced: bool) -> str | None:
    if call.approximate != "tanh":
        return "PyTorch's is as fast without a tanh"
    return _CSRC_REJECTS(call, forced=forced)


def _measured(input: Tensor, approximate: str) -> CallClass:
    return training(input), input.dtype, (input.numel(),)


def _cpp_forward(call: Call) -> Tensor:
    input = call.input.contiguous()
    out = torch.empty_like(input)
    torch.ops.fastplm_C.gelu_tanh(input, out)
    return out


def _cpp_backward(grad: Tensor, saved: Call) -> Tensor:
    grad, input = grad.contiguous(), saved.input.contiguous()
    grad_input = torch.empty_like(input)
    torch.ops.fastplm_C.gelu_tanh_backward(grad, input, grad_input)
    return grad_input


# --- backend "stock" ------------------------------------------------------------------------------


def _stock(call: Call) -> Tensor:
    return torch.nn.functional.gelu(call.input, approximate=call.approximate)


# --- registration ---------------------------------------------------------------------------------


def _second(grad: Tensor, saved: Call, backend: str) -> Tensor:
    return torch.ops.aten.gelu_backward(grad, saved.input, approximate=saved.approximate)


def _smoke(device: torch.device) -> None:
    input = torch.randn(5, 16, device=device, requires_grad=True)
    gelu(input, approximate="tanh").sum().backward()


OP = Op(
    "gelu",
    Call,
    fake=lambda call, backend: torch.empty_like(call.input, memory_format=torch.contiguous_format),
    reference=gelu_ref,
    smoke=_smoke,
    saved=Call,
    gradients=("input",),
    fake_backward=lambda grad, saved: torch.empty_like(
        saved.input, memory_format=torch.contiguous_format
    ),
    second=_second,
)
OP.backend("stock", forward=_stock)
OP.backend(
    "cpp",
    forward=_cpp_forward,
    backward=_cpp_backward,
    rejects=_cpp_rejects,
    measured=_measured,
)
