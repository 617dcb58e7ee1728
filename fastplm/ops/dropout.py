"""``ops.dropout``: checks, schema, fake, autograd formula and backends."""

from __future__ import annotations

import torch

from fastplm._backends import requested
from fastplm._checks import (
    FLOATING,
    check_dtype,
    check_probability,
    check_same_device,
    check_tensor,
)
from fastplm._measured import CallClass, slower, training
from fastplm._registry import Op
from fastplm.ops._common import checked_seed, rejects_of_csrc
from fastplm.reference.dropout import dropout_ref, dropout_scale, dropout_threshold


def dropout(
    input: torch.Tensor, p: float = 0.5, *, seed: int | torch.Tensor | None = None
) -> torch.Tensor:
    """Dropout that a seed repeats, and of which nothing but the seed is kept for the backward.

    ``out = input / (1 - p)`` where an element survives, else 0

    Args:
        input: of any shape, fp64, fp32, fp16 or bf16.
        p: the probability of dropping an element, in steps of 1/65536 (0 and 1 alone are never and
            always).
        seed: int, or 0-d int64 tensor on the device of ``input``; default a new one from PyTorch's
            generator. The same seed drops the same elements, on every backend and device.

    Returns:
        The shape and dtype of ``input``. What is dropped is 0 even if it was not finite, and passes
        no gradient.

    Numerics:
        Elements that survive are multiplied in fp32 (fp64 in fp64) and rounded once.

    Determinism:
        Forward and backward are functions of the input and the seed, bit for bit.

    Raises:
        ArgumentValueError, ArgumentTypeError: arguments that do not fit.
        BackendError: a forced backend cannot run the call.

    Examples:
        >>> ops.dropout(torch.ones(6), 0.5, seed=0)
        tensor([2., 2., 2., 2., 0., 0.])

    Source: Srivastava et al. 2014, "Dropout: A Simple Way to Prevent Neural Networks from
        Overfitting"; random bits of Salmon et al. 2011 (``fastplm.reference.philox``).
    Reference: ``fastplm.reference.dropout.dropout_ref``.
    """
    check_tensor("dropout", "input", input)
    check_dtype("dropout", "input", input, FLOATING)
    check_probability("dropout", "p", p, "Pass the share of elements to drop.")
    seed = checked_seed("dropout", seed, input.device)
    check_same_device("dropout", input=input, seed=seed)
    if p == 0.0:
        return input.clone()
    backend = OP.resolve(input)
    if backend == "eager":
        return dropout_ref(input, p, seed=seed)
    return OP.call(input, seed, float(p), backend)


def is_faster(input: torch.Tensor, p: float) -> bool:
    """Whether ``dropout`` runs by csrc/, and faster than ``torch.nn.functional.dropout``.

    For layers, which may draw either's random bits.
    """
    if not 0.0 < p < 1.0 or not OP.is_faster(input):
        return False
    if requested("dropout") == "cpp":
        return True
    return slower("dropout", CallClass(training(input), input.dtype, (input.numel(),))) is None


# --- backend "cpp" --------------------------------------------------------------------------------

_CSRC_REJECTS = rejects_of_csrc("dropout")["cpp"]


def _cpp_rejects(input: torch.Tensor, *, forced: bool) -> str | None:
    if input.dtype is torch.float64:
        return "float64: csrc/ takes fp32, fp16 and bf16"
    return _CSRC_REJECTS(input, forced=forced)


def _cpp_dropout(input: torch.Tensor, seed: torch.Tensor, p: float) -> torch.Tensor:
    input = input.contiguous()
    out = torch.empty_like(input)
    threshold = dropout_threshold(p)
    torch.ops.fastplm_C.dropout(input, seed, threshold, dropout_scale(threshold), out)
    return out


# --- registration ---------------------------------------------------------------------------------


def _fake(input, seed, p, backend):
    return torch.empty_like(input, memory_format=torch.contiguous_format)


def _setup_context(ctx, inputs, output):
    _, seed, ctx.p, ctx.backend = inputs
    ctx.save_for_backward(seed)


def _backward(ctx, grad_out):
    (seed,) = ctx.saved_tensors
    if torch.is_grad_enabled():  # somebody wants the gradient's gradient, which is of this form
        return OP.call(grad_out, seed, ctx.p, ctx.backend), None, None, None
    return OP.call_backward(grad_out, seed, ctx.p, ctx.backend), None, None, None


def _smoke(device: torch.device) -> None:
    dropout(torch.randn(5, 16, device=device, requires_grad=True), 0.5).sum().backward()


OP = Op("dropout", reference=dropout_ref, smoke=_smoke)
OP.backend("cpp", forward=_cpp_dropout, backward=_cpp_dropout, rejects=_cpp_rejects)
OP.define_differentiable(
    "(Tensor input, Tensor seed, float p, str backend) -> Tensor",
    "(Tensor grad_out, Tensor seed, float p, str backend) -> Tensor",
    fake_forward=_fake,
    fake_backward=_fake,
    setup_context=_setup_context,
    backward=_backward,
    twice=True,
)
