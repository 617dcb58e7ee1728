"""Reference of ``ops.dropout_add_layer_norm``: the specification, in differentiable PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from fastplm.reference.dropout import dropout_ref


def dropout_add_layer_norm_ref(
    input: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    linear_bias: Tensor | None = None,
    dropout_p: float = 0.0,
    eps: float = 1e-12,
    seed: int | Tensor | None = None,
    sample_index: Tensor | None = None,
    position: Tensor | None = None,
    is_rms: bool = False,
) -> tuple[Tensor, Tensor]:
    """``sum = dropout(input + linear_bias) + residual``, ``out = layer_norm(sum) weight + bias``.

    Args: those of ``ops.dropout_add_layer_norm``; with ``is_rms`` rows are scaled to a root mean
        square of 1 and keep their mean, as in ``ops.dropout_add_rms_norm``.

    Returns:
        (out in the dtype of ``input``, sum in that of ``residual``). The statistics are those of
        the sum as it is returned, after its one rounding.
    """
    wide = torch.float32
    for tensor in (input, residual, weight, bias, linear_bias):
        if tensor is not None:
            wide = torch.promote_types(wide, tensor.dtype)
    x = input.to(wide)
    if linear_bias is not None:
        x = x + linear_bias.to(wide)
    if dropout_p > 0.0:
        assert seed is not None
        x = dropout_ref(x, dropout_p, seed=seed, sample_index=sample_index, position=position)
    sum = (x + residual.to(wide)).to(residual.dtype)
    z = sum.to(wide)
    if not is_rms:
        z = z - z.mean(-1, keepdim=True)
    out = z * torch.rsqrt(z.pow(2).mean(-1, keepdim=True) + eps) * weight.to(wide)
    if bias is not None:
        out = out + bias.to(wide)
    return out.to(input.dtype), sum
