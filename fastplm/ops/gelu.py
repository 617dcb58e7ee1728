"""``ops.gelu``: checks, schema, fake, autograd formula and backends."""

from __future__ import annotations

import torch

from fastplm._checks import FLOATING, check_choice, check_dtype, check_tensor
from fastplm._measured import CallClass, training
from fastplm._registry import Op
from fastplm.ops._common import rejects_of_csrc
from fastplm.reference.gelu import gelu_ref

FORMS = ("none", "tanh")


def gelu(input: torch.Tensor, *, approximate: str = "none") -> torch.Tensor:
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
    check_tensor("gelu", "input", input)
    check_dtype("gelu", "input", input, FLOATING)
    check_choice("gelu", "approximate", approximate, FORMS)
    backend = OP.resolve(input, approximate)
    if backend == "eager":
        return gelu_ref(input, approximate=approximate)
    return OP.call(input, approximate, backend)


# --- backend "cpp" --------------------------------------------------------------------------------

_CSRC_REJECTS = rejects_of_csrc("gelu_tanh")["cpp"]


def _cpp_rejects(input: torch.Tensor, approximate: str, *, forced: bool) -> str | None:
    if approximate != "tanh":
        return "PyTorch's is as fast without a tanh"
    if input.dtype is torch.float64:
        return "float64: csrc/ takes fp32, fp16 and bf16"
    return _CSRC_REJECTS(input, forced=forced)


def _measured(input: torch.Tensor, approximate: str) -> CallClass:
    return CallClass(training(input), input.dtype, (input.numel(),))


def _cpp_forward(input: torch.Tensor, approximate: str) -> torch.Tensor:
    input = input.contiguous()
    out = torch.empty_like(input)
    torch.ops.fastplm_C.gelu_tanh(input, out)
    return out


def _cpp_backward(grad_out: torch.Tensor, input: torch.Tensor, approximate: str) -> torch.Tensor:
    grad_out, input = grad_out.contiguous(), input.contiguous()
    grad = torch.empty_like(input)
    torch.ops.fastplm_C.gelu_tanh_backward(grad_out, input, grad)
    return grad


# --- registration ---------------------------------------------------------------------------------


def _fake_forward(input, approximate, backend):
    return torch.empty_like(input, memory_format=torch.contiguous_format)


def _fake_backward(grad_out, input, approximate, backend):
    return torch.empty_like(input, memory_format=torch.contiguous_format)


def _setup_context(ctx, inputs, output):
    input, ctx.approximate, ctx.backend = inputs
    ctx.save_for_backward(input)


def _backward(ctx, grad_out):
    (input,) = ctx.saved_tensors
    if torch.is_grad_enabled():  # somebody wants the gradient's gradient, which PyTorch has
        grad = torch.ops.aten.gelu_backward(grad_out, input, approximate=ctx.approximate)
    else:
        grad = OP.call_backward(grad_out, input, ctx.approximate, ctx.backend)
    return grad, None, None


def _smoke(device: torch.device) -> None:
    input = torch.randn(5, 16, device=device, requires_grad=True)
    gelu(input, approximate="tanh").sum().backward()


OP = Op("gelu", reference=gelu_ref, smoke=_smoke)
OP.backend(
    "cpp",
    forward=_cpp_forward,
    backward=_cpp_backward,
    rejects=_cpp_rejects,
    measured=_measured,
)
OP.define_differentiable(
    "(Tensor input, str approximate, str backend) -> Tensor",
    "(Tensor grad_out, Tensor input, str approximate, str backend) -> Tensor",
    fake_forward=_fake_forward,
    fake_backward=_fake_backward,
    setup_context=_setup_context,
    backward=_backward,
    twice=True,
)
