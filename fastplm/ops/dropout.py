"""``ops.dropout``: its arguments, and its backends."""

from __future__ import annotations

from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from fastplm._backends import of_any_size
from fastplm._checks import check_probability, check_tensor
from fastplm._declare import Arg
from fastplm._measured import CallClass, training
from fastplm._registry import Op
from fastplm.ops._common import csrc_rejects, seed_tensor
from fastplm.reference.dropout import dropout_ref, dropout_scale, dropout_threshold

#: The elements that speak for those of a compiled program.
_MANY = 1 << 19


class Call(NamedTuple):
    input: Annotated[Tensor, Arg()]
    p: float
    seed: Annotated[Tensor, Arg("[]", (torch.int64,))]


class Saved(NamedTuple):
    p: float
    seed: Tensor


def dropout(input: Tensor, p: float = 0.5, *, seed: int | Tensor | None = None) -> Tensor:
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
    check_probability("dropout", "p", p, "Pass the share of elements to drop.")
    call = Call(input, float(p), seed_tensor("dropout", seed, input, optional=True))
    if p > 0.0:
        return OP(call)
    OP.check(call)
    return input.clone()


def is_faster(input: Tensor, p: float) -> bool:
    """Whether ``dropout`` runs by csrc/, and faster than ``torch.nn.functional.dropout``.

    For layers, which may draw the random bits of either.
    """
    return 0.0 < p < 1.0 and OP.is_faster(input, p, None)


# --- backend "cpp" --------------------------------------------------------------------------------


def _measured(call: Call) -> CallClass:
    return CallClass(training(call.input), call.input.dtype, (call.input.numel(),))


def _cpp_forward(call: Call) -> Tensor:
    input = call.input.contiguous()
    out = torch.empty_like(input)
    threshold = dropout_threshold(call.p)
    torch.ops.fastplm_C.dropout(input, call.seed, threshold, dropout_scale(threshold), out)
    return out


def _cpp_backward(grad: Tensor, saved: Saved) -> Tensor:
    return _cpp_forward(Call(grad, *saved))


# --- registration ---------------------------------------------------------------------------------


def _fake(call: Call, backend: str) -> Tensor:
    return torch.empty_like(call.input, memory_format=torch.contiguous_format)


def _second(grad: Tensor, saved: Saved, backend: str) -> Tensor:
    """The gradient is a dropout itself."""
    return OP(Call(grad, *saved), backend)


def _smoke(device: torch.device) -> None:
    dropout(torch.randn(5, 16, device=device, requires_grad=True), 0.5).sum().backward()


OP = Op(
    "dropout",
    Call,
    fake=_fake,
    reference=dropout_ref,
    eager=lambda call: dropout_ref(call.input, call.p, seed=call.seed),
    smoke=_smoke,
    saved=Saved,
    gradients=("input",),
    fake_backward=lambda grad, saved: _fake(Call(grad, *saved), ""),
    second=_second,
)
OP.backend(
    "cpp",
    forward=_cpp_forward,
    backward=_cpp_backward,
    rejects=csrc_rejects("dropout"),
    measured=_measured,
    measured_for_layers=True,
    compiled=of_any_size("dropout", lambda dtype: CallClass("training", dtype, (_MANY,))),
)
