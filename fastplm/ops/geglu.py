"""``ops.geglu``: its arguments, and its backends."""

from __future__ import annotations

from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from fastplm._declare import Arg
from fastplm._registry import Op
from fastplm.errors import check_choice, fail
from fastplm.ops._common import kernels, rows_of, triton_rejects
from fastplm.reference.geglu import geglu_ref

#: The choices of ``activation``.
ACTIVATIONS = ("gelu", "gelu_tanh", "silu")


class Call(NamedTuple):
    input: Annotated[Tensor, Arg("[..., F > 0]")]
    activation: str = "gelu"

    def check(self, where: str) -> None:
        check_choice(where, "activation", self.activation, ACTIVATIONS)
        if self.input.shape[-1] % 2:
            got, fix = f"rows of {self.input.shape[-1]} elements", "Pass the whole product."
            fail(where, "input", got, "an even number: what is activated, and its factor", fix)


def geglu(input: Tensor, activation: str = "gelu") -> Tensor:
    """The gate of a feed-forward whose two products are one: GeGLU or SwiGLU in one pass.

    ``out = activation(a) b`` with ``a, b = input.chunk(2, -1)``.

    Args:
        input: [..., F], fp64, fp32, fp16 or bf16; F is even; any strides whose last is 1.
        activation: "gelu", as in ModernBERT, "gelu_tanh", or "silu", as in Llama.

    Returns:
        [..., F / 2] in the dtype of ``input``. Nothing but the input is kept for the backward,
        which writes the gradients of both halves side by side.

    Numerics:
        In fp32 (fp64 in fp64), rounded once.

    Determinism:
        Forward and backward repeat bit for bit.

    Raises:
        ArgumentValueError, ArgumentTypeError: arguments that do not fit.
        BackendError: a forced backend cannot run the call.

    Examples:
        >>> ops.geglu(torch.tensor([[1.0, 0.0, 2.0, 3.0]]))
        tensor([[1.6827, 0.0000]])

    Source: Shazeer 2020, "GLU Variants Improve Transformer" (arXiv 2002.05202), equation 6.
    Reference: ``fastplm.reference.geglu.geglu_ref``.
    """
    return OP(Call(input, activation))


# --- backend "triton" -----------------------------------------------------------------------------


def _triton_forward(call: Call) -> Tensor:
    input, activation = call
    out = kernels("geglu").geglu_fwd(rows_of(input), activation)
    return out.view(*input.shape[:-1], -1) if out.numel() else _fake(call, "triton")


def _triton_backward(grad: Tensor, saved: Call) -> Tensor:
    input, activation = saved
    found = kernels("geglu").geglu_bwd(rows_of(grad), rows_of(input), activation)
    return found.view(input.shape)


# --- registration ---------------------------------------------------------------------------------


def _fake(call: Call, backend: str) -> Tensor:
    return call.input.new_empty(*call.input.shape[:-1], call.input.shape[-1] // 2)


def _second(grad: Tensor, saved: Call, backend: str) -> Tensor:
    input, activation = saved
    (first, factor), grad = input.float().chunk(2, -1), grad.float()
    if activation == "silu":
        share = first.sigmoid()
        active, of_first = first * share, grad * factor * share * (1 + first * (1 - share))
    else:
        form = "tanh" if activation == "gelu_tanh" else "none"
        active = torch.nn.functional.gelu(first, approximate=form)
        of_first = torch.ops.aten.gelu_backward(grad * factor, first, approximate=form)
    return torch.cat((of_first, grad * active), -1).to(input.dtype)


def _smoke(device: torch.device) -> None:
    geglu(torch.randn(5, 16, device=device, requires_grad=True)).sum().backward()


OP = Op(
    "geglu",
    Call,
    fake=_fake,
    reference=geglu_ref,
    smoke=_smoke,
    saved=Call,
    gradients=("input",),
    fake_backward=lambda grad, saved: saved.input.new_empty(saved.input.shape),
    second=_second,
)
OP.backend("triton", forward=_triton_forward, backward=_triton_backward, rejects=triton_rejects)
