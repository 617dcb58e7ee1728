"""Reference of ``ops.linear_int8``: the specification, in plain PyTorch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

#: The largest quantum: the numbers -127 … 127 are as far apart on both sides of 0.
MOST = 127
#: Rows with no larger number are taken as zeros: 127 divided by it would overflow.
LEAST_PEAK = 2.0**-119
#: A packed weight has so many columns side by side, with so many of their elements.
PANEL, STEP = 16, 4


def linear_int8_ref(
    input: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None
) -> Tensor:
    """``out = (q(input) weight^T) (s(input) scale) + bias``, with exact sums of integers.

    ``q(x) = round(x 127 / max |x|)`` and ``s(x) = max |x| / 127`` of each row, see
    ``quantize_rows``.

    Args: those of ``ops.linear_int8``.
    """
    wide = torch.promote_types(input.dtype, torch.float32)
    quanta, of_rows = quantize_rows(input.to(wide))
    columns = unpack_int8(weight, scale.shape[0], input.shape[-1])
    sums = quanta.double() @ columns.double().t()  # of integers below 2^53: exact
    out = sums.to(wide) * (of_rows[..., None] * scale.to(wide))
    return (out if bias is None else out + bias.to(wide)).to(input.dtype)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Each row as integers from -127 to 127 and what they are multiplied by.

    Args:
        x: [..., K], fp32 or fp64.

    Returns:
        (integers in the dtype of ``x`` [..., K], scales [...]). Halves are rounded to even. The
        scale of a row with NaN or infinity is NaN, so a product of it is NaN.
    """
    peak = F.pad(x.abs(), (0, 1)).amax(-1)
    finite = peak.isfinite()
    some = finite & (peak >= LEAST_PEAK)
    factor = torch.where(some, torch.full_like(peak, MOST) / peak, 0.0)
    quanta = torch.round(torch.where(some[..., None], x, 0.0) * factor[..., None])
    return quanta, torch.where(finite, torch.where(some, peak / MOST, 0.0), torch.nan)


def quantize_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """The weight of a linear layer in 8 bits, with a scale for each output.

    Args:
        weight: [M, K], floating.

    Returns:
        (uint8 [ceil(M / 16), ceil(K / 4), 16, 4], fp32 [M]), ``weight`` and ``scale`` of
        ``ops.linear_int8``.

    Examples:
        >>> weight, scale = ops.quantize_int8(torch.tensor([[1.0, -2.0], [0.5, 0.0]]))
        >>> ops.dequantize_int8(weight, scale, 2)
        tensor([[ 1.0079, -2.0000],
                [ 0.5000,  0.0000]])
    """
    quanta, scale = quantize_rows(weight.detach().float())
    return pack_int8(quanta.to(torch.int8)), scale


def dequantize_int8(weight: Tensor, scale: Tensor, in_features: int) -> Tensor:
    """The numbers that a weight in 8 bits stands for: fp32 [M, K].

    Args:
        weight, scale: those of ``quantize_int8``.
        in_features: K.
    """
    return unpack_int8(weight, scale.shape[0], in_features).float() * scale[:, None]


def pack_int8(quanta: Tensor) -> Tensor:
    """int8 [M, K] -> uint8 [ceil(M / 16), ceil(K / 4), 16, 4], as q + 128, filled up with zeros.

    A product reads 4 elements of 16 columns at a time, and processors multiply bytes without a sign
    by bytes with one.
    """
    columns, depth = quanta.shape
    panels, steps = -(-columns // PANEL), -(-depth // STEP)
    filled = F.pad(quanta, (0, steps * STEP - depth, 0, panels * PANEL - columns))
    packed = filled.view(panels, PANEL, steps, STEP).transpose(1, 2)
    return (packed.to(torch.int16) + 128).to(torch.uint8).contiguous()


def unpack_int8(packed: Tensor, columns: int, depth: int) -> Tensor:
    """The inverse of ``pack_int8``: int8 [M, K]."""
    panels, steps = packed.shape[:2]
    rows = packed.transpose(1, 2).reshape(panels * PANEL, steps * STEP)[:columns, :depth]
    return (rows.to(torch.int16) - 128).to(torch.int8)
