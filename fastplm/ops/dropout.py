"""``ops.dropout``: its arguments, and its backends."""

from __future__ import annotations

import math
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

from fastplm._backends import requested
from fastplm._checks import check_probability, check_shape, check_tensor
from fastplm._declare import Arg
from fastplm._modes import is_eager
from fastplm._registry import Op, compiled_rule
from fastplm._rules import CallClass, training
from fastplm.errors import fail
from fastplm.ops._common import csrc_rejects, seed_tensor
from fastplm.reference.dropout import dropout_ref, dropout_scale, dropout_threshold

#: The elements that speak for those of a compiled program.
_MANY = 1 << 19


_ROW_INDEX = Arg("[N]", (torch.int64,))


class Call(NamedTuple):
    input: Annotated[Tensor, Arg()]
    p: float
    seed: Annotated[Tensor, Arg("[]", (torch.int64,))]
    sample_index: Annotated[Tensor | None, _ROW_INDEX]
    position: Annotated[Tensor | None, _ROW_INDEX]

    def check(self, where: str) -> None:
        if self.sample_index is None:
            if self.position is not None:
                fix = "Say of which samples the rows are, too."
                fail(where, "position", "a value without sample_index", "None", fix)
            return
        if self.input.dim() == 0:
            fail(where, "input", "a scalar with sample_index", "rows [..., E]", "Unsqueeze it.")
        fix = "Repeat the index of a sample for each of its rows."
        rows = (math.prod(self.input.shape[:-1]),)
        check_shape(where, "sample_index", self.sample_index, rows, "[rows of input]", fix)


class Saved(NamedTuple):
    p: float
    seed: Tensor
    sample_index: Tensor | None
    position: Tensor | None


def dropout(
    input: Tensor,
    p: float = 0.5,
    *,
    seed: int | Tensor | None = None,
    sample_index: Tensor | None = None,
    position: Tensor | None = None,
) -> Tensor:
    """Dropout that a seed repeats, and of which nothing but the seed is kept for the backward.

    ``out = input / (1 - p)`` where an element survives, else 0

    Args:
        input: of any shape, fp64, fp32, fp16 or bf16.
        p: the probability of dropping an element, in steps of 1/65536 (0 and 1 alone are never and
            always).
        seed: int, or 0-d int64 tensor on the device of ``input``; default a new one from PyTorch's
            generator. The same seed drops the same elements, on every backend and device.
        sample_index: int64 [N], the sample indices of the rows of ``input`` [..., E]. Then what is
            dropped of a row depends only on the seed, its sample and its position, not on where in
            a batch it is. Default: elements are counted through ``input``.
        position: int64 [N], the positions of the rows in their samples, below 2^32; default 0.

    Returns:
        The shape and dtype of ``input``. What is dropped is 0 even if it was not finite, and passes
        no gradient.

    Numerics:
        Elements that survive are multiplied in fp32 (fp64 in fp64) and rounded once.

    Determinism:
        Forward and backward are functions of the arguments, bit for bit.

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
    seed = seed_tensor("dropout", seed, input, optional=True)
    call = Call(input, float(p), seed, sample_index, position)
    if p > 0.0:
        return OP(call)
    OP.check(call)
    return input.clone()


def draws_by_row(input: Tensor) -> bool:
    """Whether a layer may draw by the samples and positions of rows: that it does not is slower
    only where csrc/ does not run, as on a GPU and in fp64."""
    wanted = requested("dropout")
    if wanted not in ("auto", "cpp", "eager") or not is_eager(input):
        return False
    cpp = OP.backends["cpp"]
    return wanted == "eager" or cpp.rejects((input,), forced=False) is None


# --- backend "cpp" --------------------------------------------------------------------------------


def _measured(input: Tensor, *others: Any) -> CallClass:
    return training(input), input.dtype, (input.numel(),)


def _cpp_forward(call: Call) -> Tensor:
    input = call.input.contiguous()
    out = torch.empty_like(input)
    threshold = dropout_threshold(call.p)
    scale = dropout_scale(threshold)
    if call.sample_index is None:
        torch.ops.fastplm_C.dropout(input, call.seed, threshold, scale, out)
        return out
    sample_index = call.sample_index.contiguous()
    position = torch.zeros_like(sample_index) if call.position is None else call.position
    torch.ops.fastplm_C.dropout_rows(
        input, call.seed, threshold, scale, sample_index, position.contiguous(), out
    )
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
    smoke=_smoke,
    public=lambda input, p, *_: dropout(input, p),
    saved=Saved,
    gradients=("input",),
    fake_backward=lambda grad, saved: _fake(Call(grad, *saved), ""),
    second=_second,
)
OP.backend(
    "cpp",
    forward=_cpp_forward,
    backward=_cpp_backward,
    rejects=csrc_rejects("dropout", fp64=False),
    measured=_measured,
    compiled=compiled_rule("dropout", lambda dtype: ("training", dtype, (_MANY,))),
)
