"""Reference of ``ops.rms_norm``: the specification, in plain differentiable PyTorch."""

from __future__ import annotations

import torch


def rms_norm_ref(input: torch.Tensor, weight: torch.Tensor, *, eps: float = 1e-6) -> torch.Tensor:
    """``out = weight x / sqrt(mean(x^2) + eps)``, the mean over the last dimension (equation 4).

    Args: those of ``ops.rms_norm``. The dtype is that of ``weight``.
    """
    wide = torch.promote_types(torch.promote_types(input.dtype, weight.dtype), torch.float32)
    x = input.to(wide)
    scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    return (weight.to(wide) * (x * scale)).to(weight.dtype)
