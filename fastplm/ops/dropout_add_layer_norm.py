"""``ops.dropout_add_layer_norm`` and ``dropout_add_rms_norm``: the arguments, and the backends.

One op: T5's norm is the layer norm without the mean and the bias.
"""

from __future__ import annotations

import functools
import math
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

from fastplm._checks import check_bool, check_number, check_probability, check_shape, check_tensor
from fastplm._declare import Arg
from fastplm._registry import Op
from fastplm.errors import fail
from fastplm.ops._common import (
    csrc_rejects,
    kernels,
    rows_of,
    seed_tensor,
    triton_rejects,
)
from fastplm.reference.dropout import dropout_ref, dropout_scale, dropout_threshold
from fastplm.reference.dropout_add_layer_norm import dropout_add_layer_norm_ref

#: ``MAX_WIDTH`` of the kernels, which are imported when one is first called.
_MAX_WIDTH = 4096
_ROW_INDEX = Arg("[N]", (torch.int64,))


class Call(NamedTuple):
    """``seed`` is None exactly if ``dropout_p`` is 0, and then so are the numbers of rows."""

    input: Annotated[Tensor, Arg("[..., E > 0]")]
    residual: Annotated[Tensor, Arg("[..., E]")]
    weight: Annotated[Tensor, Arg("[E]")]
    bias: Annotated[Tensor | None, Arg("[E]")]
    linear_bias: Annotated[Tensor | None, Arg("[E]")]
    seed: Annotated[Tensor | None, Arg("[]", (torch.int64,))]
    sample_index: Annotated[Tensor | None, _ROW_INDEX]
    position: Annotated[Tensor | None, _ROW_INDEX]
    dropout_p: float
    eps: float
    is_rms: bool = False

    def check(self, where: str) -> None:
        fix = "The rows of both have the same places."
        shape = self.input.shape
        check_shape(where, "residual", self.residual, shape, "the shape of `input`", fix)
        check_number(where, "eps", self.eps, 0.0, math.inf, "0 or more", "Pass the model's.")
        if self.sample_index is not None:
            fix = "Repeat the index of a sample for each of its rows."
            rows = (math.prod(shape[:-1]),)
            check_shape(where, "sample_index", self.sample_index, rows, "[rows of input]", fix)
        elif self.position is not None:
            fix = "Say of which samples the rows are, too."
            fail(where, "position", "a value without sample_index", "None", fix)


class Saved(NamedTuple):
    """The norm's statistics are computed again from ``sum``."""

    sum: Tensor
    weight: Tensor
    bias: Tensor | None
    linear_bias: Tensor | None
    grad_sum: Tensor | None
    seed: Tensor | None
    sample_index: Tensor | None
    position: Tensor | None
    dropout_p: float
    eps: float
    is_rms: bool
    need_input: bool
    need_residual: bool
    need_weight: bool
    need_bias: bool
    need_linear_bias: bool


def dropout_add_layer_norm(
    input: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor,
    *,
    linear_bias: Tensor | None = None,
    dropout_p: float = 0.0,
    eps: float = 1e-12,
    seed: int | Tensor | None = None,
    sample_index: Tensor | None = None,
    position: Tensor | None = None,
    return_sum: bool = False,
) -> Any:
    """What follows each sublayer of a Transformer: bias, dropout, residual and layer norm at once.

    ``sum = dropout(input + linear_bias) + residual``, ``out = layer_norm(sum) * weight + bias``

    Args:
        input: [..., E], what the sublayer's product gave; fp64, fp32, fp16 or bf16.
        residual: [..., E], the shape of ``input``; of any of these dtypes.
        weight, bias: [E], those of the layer norm; of any of these dtypes, such as fp32 beside an
            ``input`` of 16 bits.
        linear_bias: [E], the bias of the product that gave ``input``; of any of these dtypes.
        dropout_p: the probability of dropping an element, as the ``p`` of ``ops.dropout``.
        eps: what is added to the variance, 0 or more.
        seed: int, or 0-d int64 tensor on the device of ``input``; default a new one from PyTorch's
            generator. The elements dropped are those that ``ops.dropout`` drops.
        sample_index, position: int64 [N], of the rows, as in ``ops.dropout``.
        return_sum: return (out, sum), as a model needs whose norm comes before the sublayer: the
            sum is the next residual. It has the dtype of ``residual`` and passes a gradient.

    Returns:
        [..., E] in the dtype of ``input``.

    Numerics:
        In fp32 (fp64 if there is fp64). The sum is rounded once, to the dtype of ``residual``; mean
        and variance are those of the rounded sum, about the mean. They are not kept: the backward
        computes them again. The gradients of weight and biases are summed in fp32.

    Determinism:
        Forward and backward repeat bit for bit on one backend; no atomics. A row of the result does
        not depend on the rows beside it.

    Raises:
        ArgumentValueError, ArgumentTypeError: shapes, dtypes, devices or numbers that do not fit.
        BackendError: a forced backend cannot run the call.

    Examples:
        >>> x = torch.tensor([[1.0, 2.0, 3.0]])
        >>> ops.dropout_add_layer_norm(x, x, torch.ones(3), torch.zeros(3))
        tensor([[-1.2247,  0.0000,  1.2247]])

    Source: Ba, Kiros and Hinton 2016, "Layer Normalization" (arXiv 1607.06450), equation 4; Devlin
        et al. 2019 (BERT, arXiv 1810.04805) for where it stands.
    Reference: ``fastplm.reference.dropout_add_layer_norm.dropout_add_layer_norm_ref``.
    """
    where = "dropout_add_layer_norm"
    check_tensor(where, "bias", bias)
    call = Call(
        *(input, residual, weight, bias, linear_bias),
        *(seed, sample_index, position, dropout_p, eps),  # type: ignore[arg-type]
    )
    return _run(where, call, return_sum)


def dropout_add_rms_norm(
    input: Tensor,
    residual: Tensor,
    weight: Tensor,
    *,
    dropout_p: float = 0.0,
    eps: float = 1e-6,
    seed: int | Tensor | None = None,
    sample_index: Tensor | None = None,
    position: Tensor | None = None,
    return_sum: bool = False,
) -> Any:
    """``dropout_add_layer_norm`` with T5's norm: no bias, and rows keep their mean.

    ``sum = dropout(input) + residual``, ``out = weight sum / sqrt(mean(sum^2) + eps)``

    Args:
        input, residual, weight, dropout_p, eps, seed, sample_index, position, return_sum: as in
            ``dropout_add_layer_norm``.

    Returns, Numerics, Determinism, Raises: those of ``dropout_add_layer_norm``.

    Examples:
        >>> x = torch.tensor([[1.5, 2.0]])
        >>> ops.dropout_add_rms_norm(x, x, torch.tensor([1.0, 10.0]))
        tensor([[ 0.8485, 11.3137]])

    Source: Zhang and Sennrich 2019, "Root Mean Square Layer Normalization" (arXiv 1910.07467),
        equation 4.
    Reference: ``fastplm.reference.dropout_add_layer_norm.dropout_add_layer_norm_ref``.
    """
    call = Call(
        *(input, residual, weight, None, None),
        *(seed, sample_index, position, dropout_p, eps, True),  # type: ignore[arg-type]
    )
    return _run("dropout_add_rms_norm", call, return_sum)


def _run(where: str, call: Call, return_sum: bool) -> Any:
    """The public result of a call whose seed is as the user passed it."""
    check_tensor(where, "input", call.input)
    check_probability(where, "dropout_p", call.dropout_p, "Pass the share of elements to drop.")
    check_bool(where, "return_sum", return_sum)
    drops = call.dropout_p > 0.0
    if drops or call.seed is not None:
        seed = seed_tensor(where, call.seed, call.input, optional=True)
        call = call._replace(seed=seed)
    OP.check(call, where)
    if not drops:
        call = call._replace(seed=None, sample_index=None, position=None)
    out, sum = OP(call, OP.resolve(call))
    return (out, sum) if return_sum else out


@functools.lru_cache(typed=True)
def _settings(dropout_p: float, eps: float, is_rms: bool) -> dict[str, Any]:
    threshold = dropout_threshold(dropout_p)
    scale = dropout_scale(threshold)
    return dict(threshold=threshold, keep_scale=scale, eps=eps, is_rms=is_rms)


def _has_fp64(call: Call) -> bool:
    floating = call.input, call.residual, call.weight, call.bias, call.linear_bias
    return any(one is not None and one.dtype is torch.float64 for one in floating)


# --- backend "cpp" --------------------------------------------------------------------------------

_CSRC_REJECTS = csrc_rejects("dropout_add_layer_norm")


def _cpp_rejects(call: Call, *, forced: bool) -> str | None:
    if _has_fp64(call):
        return "float64: csrc/ takes fp32, fp16 and bf16"
    return _CSRC_REJECTS(call, forced=forced)


def _cpp_forward(call: Call) -> tuple[Tensor, Tensor]:
    out, sum = _fake(call, "cpp")
    torch.ops.fastplm_C.dropout_add_layer_norm(
        *(call.input, call.residual, call.weight, call.bias, call.linear_bias),
        *(call.seed, call.sample_index, call.position),
        **_settings(call.dropout_p, call.eps, call.is_rms),
        out=out,
        sum=sum,
    )
    return out, sum


def _cpp_backward(grad: Tensor, saved: Saved) -> tuple[Tensor, ...]:
    found = _fake_backward(grad, saved)
    of_input, of_residual, of_weight, of_bias, of_linear_bias = found
    torch.ops.fastplm_C.dropout_add_layer_norm_backward(
        *(grad, saved.sum, saved.weight, saved.grad_sum),
        *(saved.seed, saved.sample_index, saved.position),
        **_settings(saved.dropout_p, saved.eps, saved.is_rms),
        grad_input=of_input,
        grad_residual=of_residual,
        grad_weight=of_weight,
        grad_bias=of_bias,
        grad_linear_bias=of_linear_bias,
    )
    return found


# --- backend "triton" -----------------------------------------------------------------------------


def _triton_rejects(call: Call, *, forced: bool) -> str | None:
    if _has_fp64(call):
        return "float64: the kernels take fp32, fp16 and bf16"
    if call.input.shape[-1] > _MAX_WIDTH:
        return f"rows of more than {_MAX_WIDTH} elements: they do not fit into the registers"
    return triton_rejects(call, forced=forced)


def _triton_forward(call: Call) -> tuple[Tensor, Tensor]:
    shape = call.input.shape
    dense: list[Any] = [one.contiguous() if isinstance(one, Tensor) else one for one in call]
    input, residual, weight, bias, linear_bias, seed, sample_index, position, *_ = dense
    out, sum = kernels("dropout_add_layer_norm").dropout_add_layer_norm_fwd(
        input=rows_of(input),
        residual=rows_of(residual),
        weight=weight,
        bias=bias,
        linear_bias=linear_bias,
        seed=seed,
        sample_index=sample_index,
        position=position,
        **_settings(call.dropout_p, call.eps, call.is_rms),
    )
    return out.view(shape), sum.view(shape)


def _triton_backward(grad: Tensor, saved: Saved) -> tuple[Tensor, ...]:
    dense: list[Any] = [one.contiguous() if isinstance(one, Tensor) else one for one in saved]
    sum, weight, bias, linear_bias, grad_sum, seed, sample_index, position, *_ = dense
    needs = (saved.need_input, saved.need_residual)
    of_input, of_residual, *others = kernels("dropout_add_layer_norm").dropout_add_layer_norm_bwd(
        grad=rows_of(grad),
        sum=rows_of(sum),
        weight=weight,
        bias=bias,
        linear_bias=linear_bias,
        grad_sum=None if grad_sum is None else rows_of(grad_sum),
        seed=seed,
        sample_index=sample_index,
        position=position,
        needs=(*needs, saved.need_weight, saved.need_bias, saved.need_linear_bias),
        **_settings(saved.dropout_p, saved.eps, saved.is_rms),
    )
    of_input = of_input.view(saved.sum.shape) if saved.need_input else of_input
    of_residual = of_residual.view(saved.sum.shape) if saved.need_residual else of_residual
    return of_input, of_residual, *others


# --- registration ---------------------------------------------------------------------------------


def _fake(call: Call, backend: str) -> tuple[Tensor, Tensor]:
    return call.input.new_empty(call.input.shape), call.residual.new_empty(call.residual.shape)


def _fake_backward(grad: Tensor, saved: Saved) -> tuple[Tensor, ...]:
    """What is not needed has no elements."""
    sum, weight, bias, linear_bias = saved.sum, saved.weight, saved.bias, saved.linear_bias

    def like(tensor: Tensor | None, shape: Any, need: bool) -> Tensor:
        return (weight if tensor is None else tensor).new_empty(shape if need else (0,))

    return (
        like(grad, sum.shape, saved.need_input),
        like(sum, sum.shape, saved.need_residual),
        like(weight, weight.shape, saved.need_weight),
        like(bias, weight.shape, saved.need_bias),
        like(linear_bias, weight.shape, saved.need_linear_bias),
    )


def _second(grad: Tensor, saved: Saved, backend: str) -> tuple[Tensor | None, ...]:
    sum, weight, bias, linear_bias = saved.sum, saved.weight, saved.bias, saved.linear_bias
    x, dy = sum.float(), grad.float()
    if not saved.is_rms:
        x = x - x.mean(-1, keepdim=True)
    scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + saved.eps)
    unit, weighted = x * scale, dy * weight.float()
    dx = weighted - unit * (weighted * unit).mean(-1, keepdim=True)
    if not saved.is_rms:
        dx = dx - weighted.mean(-1, keepdim=True)
    of_sum = dx * scale
    if saved.grad_sum is not None:
        of_sum = of_sum + saved.grad_sum.float()
    of_input = of_sum
    if saved.seed is not None:
        numbers = dict(sample_index=saved.sample_index, position=saved.position)
        of_input = dropout_ref(of_sum, saved.dropout_p, seed=saved.seed, **numbers)

    def over_rows(each: Tensor, like: Tensor | None) -> Tensor | None:
        return None if like is None else each.reshape(-1, each.shape[-1]).sum(0).to(like.dtype)

    return (
        of_input.to(grad.dtype),
        of_sum.to(sum.dtype),
        over_rows(dy * unit, weight),
        over_rows(dy, bias),
        over_rows(of_input, linear_bias),
    )


def _smoke(device: torch.device) -> None:
    input, residual = torch.randn(2, 5, 16, device=device, requires_grad=True)
    weight, bias = torch.randn(2, 16, device=device, requires_grad=True)
    dropout_add_layer_norm(input, residual, weight, bias, dropout_p=0.1).sum().backward()


OP = Op(
    "dropout_add_layer_norm",
    Call,
    results=("out", "sum"),
    fake=_fake,
    reference=dropout_add_layer_norm_ref,
    smoke=_smoke,
    saved=Saved,
    gradients=("input", "residual", "weight", "bias", "linear_bias"),
    fake_backward=_fake_backward,
    second=_second,
)
OP.backend("cpp", forward=_cpp_forward, backward=_cpp_backward, rejects=_cpp_rejects)
OP.backend("triton", forward=_triton_forward, backward=_triton_backward, rejects=_triton_rejects)
