"""``ops.linear_int8``: its arguments, and its backends."""

from __future__ import annotations

from typing import Annotated, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fastplm._backends import is_recorded, requested
from fastplm._checks import check_shape
from fastplm._declare import Arg
from fastplm._modes import is_traced, needs_dispatch
from fastplm._registry import Op
from fastplm.errors import UnsupportedError, fail
from fastplm.ops._common import csrc_rejects
from fastplm.reference.linear_int8 import PANEL, STEP, linear_int8_ref, quantize_int8

_WHERE = "linear_int8"
_FIX = "Take `weight` and `scale` from ops.quantize_int8."
#: A sum of more products may not fit into 32 bits.
_MOST_DEPTH = (2**31 - 1) // 127**2
#: The most dimensions of a tensor that csrc/ makes.
_MOST_DIMS = 8
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_PLAIN = (Tensor, torch.nn.Parameter)
_STRIDED = torch.strided


class Call(NamedTuple):
    input: Annotated[Tensor, Arg("[...]")]
    weight: Annotated[Tensor, Arg(None, (torch.uint8,), _FIX)]
    scale: Annotated[Tensor, Arg("[M]", (torch.float32,), _FIX)]
    bias: Annotated[Tensor | None, Arg("[M]", "input")] = None

    def check(self, where: str) -> None:
        if self.input.dim() == 0:
            fail(where, "input", "0 dimensions", "[..., K]", "Pass a row.")
        if self.input.shape[-1] > _MOST_DEPTH:
            got, expected = f"rows of {self.input.shape[-1]}", f"at most {_MOST_DEPTH} numbers"
            fail(where, "input", got, expected, "A longer sum may not fit into 32 bits.")
        names = "[ceil(M / 16), ceil(K / 4), 16, 4], M of `scale` and K of `input`,"
        shape = _packed_shape(self.input, self.scale)
        check_shape(where, "weight", self.weight, shape, names, _FIX)


def linear_int8(input: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """A linear layer whose weight is in 8 bits, as are its rows during the product.

    ``out = (q(input) weight^T) (s(input) scale) + bias``, where ``q(x) = round(x 127 / max |x|)``
    and ``s(x) = max |x| / 127`` of each row

    ``weight`` has a scale for each output, and each row of ``input`` gets its own when it is used,
    so nothing must be calibrated. The sums of products of integers are exact.

    Args:
        input: [..., K], fp32, fp16, bf16 or fp64.
        weight: uint8 [ceil(M / 16), ceil(K / 4), 16, 4], packed by ``ops.quantize_int8``.
        scale: fp32 [M], of the same.
        bias: [M] in the dtype of ``input``.

    Returns:
        [..., M] in the dtype of ``input``. There is no gradient.

    Numerics:
        In fp32 (fp64 if there is fp64); a result of 16 bits is rounded once more. Without a bias
        "cpp" is the reference bit for bit, at every level of instructions. What is lost is up to
        half a step of a row's 127 steps, and of a column's. A row with no number of
        2^-119 or more is taken as zeros; one with NaN or infinity is NaN, as is an output whose
        weights have one.

    Determinism:
        It repeats bit for bit with any number of threads, and a row has the same result whatever
        the other rows are.

    Raises:
        ArgumentValueError, ArgumentTypeError: shapes, dtypes or devices that do not fit.
        UnsupportedError: ``input`` or ``bias`` requires a gradient, in either mode of AD.
        BackendError: a forced backend cannot run the call.

    Examples:
        >>> weight, scale = ops.quantize_int8(torch.tensor([[3.0, 4.0], [5.0, 6.0]]))
        >>> ops.linear_int8(torch.tensor([[1.0, 2.0]]), weight, scale)
        tensor([[11.0157, 17.0473]])

    Source: Jacob et al. 2018 (arXiv 1712.05877), section 2, for products of integers; Dettmers et
        al. 2022 (arXiv 2208.07339), section 2.1, for a scale of each row and each output.
    Reference: ``fastplm.reference.linear_int8.linear_int8_ref``.
    """
    if _is_plain(input, weight, scale, bias):
        return torch.ops.fastplm_C.linear_int8.default(input, weight, scale, bias)
    if _has_gradient(input, bias):
        fail(
            _WHERE,
            "input",
            "an input or bias that requires a gradient",
            "none that does, as rounding has none",
            "Call it under torch.inference_mode(); to train a model, fastplm.dequantize it.",
            UnsupportedError,
        )
    return OP(Call(input, weight, scale, bias))


_rejects = csrc_rejects("linear_int8", fp64=False)
_BUILT = _rejects((torch.empty(0, device="cpu"),), forced=False) is None


def _is_plain(input: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> bool:
    """Whether a call is right, and for csrc/, in less time than all checks take: layers ask."""
    return (
        _BUILT
        and not is_traced()
        and not is_recorded()
        and type(input) in _PLAIN
        and type(weight) is type(scale) is Tensor
        and input.layout is weight.layout is scale.layout is _STRIDED
        and not (input.is_nested or weight.is_nested or scale.is_nested)
        and input.is_cpu
        and weight.is_cpu
        and scale.is_cpu
        and input.dtype in _DTYPES
        and weight.dtype is torch.uint8
        and scale.dtype is torch.float32
        and requested("linear_int8") in ("auto", "cpp")
        and not needs_dispatch((input, weight, scale, bias))
        and not _has_gradient(input, bias)
        and 0 < input.dim() <= _MOST_DIMS
        and scale.dim() == 1
        and min(input.numel(), scale.numel()) > 0
        and input.shape[-1] <= _MOST_DEPTH
        and weight.shape == _packed_shape(input, scale)
        and (
            bias is None
            or (
                type(bias) in _PLAIN
                and not bias.is_nested
                and bias.is_cpu
                and bias.dtype is input.dtype
                and bias.shape == scale.shape
            )
        )
    )


def _packed_shape(input: Tensor, scale: Tensor) -> tuple[int, int, int, int]:
    return -(-scale.shape[0] // PANEL), -(-input.shape[-1] // STEP), PANEL, STEP


def _has_gradient(*tensors: Tensor | None) -> bool:
    """Whether one of them asks for a gradient, or has a tangent of forward-mode AD."""
    if forward_ad._current_level >= 0:
        duals = (forward_ad.unpack_dual(one) for one in tensors if isinstance(one, Tensor))
        if any(dual.tangent is not None for dual in duals):
            return True
    return torch.is_grad_enabled() and any(
        isinstance(one, Tensor) and one.requires_grad for one in tensors
    )


def _cpp_rejects(call: Call, *, forced: bool) -> str | None:
    if call.input.dim() > _MOST_DIMS:
        return f"csrc/ takes up to {_MOST_DIMS} dimensions"
    return _rejects(call, forced=forced)


def _cpp(call: Call) -> Tensor:
    if min(call.input.numel(), call.scale.numel()) == 0:
        return linear_int8_ref(*call)
    return torch.ops.fastplm_C.linear_int8(*call)


def _smoke(device: torch.device) -> None:
    weight, scale = quantize_int8(torch.randn(3, 16, device=device))
    linear_int8(torch.randn(5, 16, device=device), weight, scale)


OP = Op(
    "linear_int8",
    Call,
    fake=lambda call, backend: call.input.new_empty(*call.input.shape[:-1], call.scale.shape[0]),
    reference=linear_int8_ref,
    smoke=_smoke,
)
OP.backend("cpp", forward=_cpp, rejects=_cpp_rejects)
