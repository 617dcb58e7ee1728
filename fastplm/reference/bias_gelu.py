"""Reference of ``ops.bias_gelu``: the specification, in plain differentiable PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor


def bias_gelu_ref(input: Tensor, bias: Tensor | None, *, approximate: str = "none") -> Tensor:
    """``out = z Phi(z)``, or ``z (1 + tanh(sqrt(2/pi) (z + 0.044715 z^3))) / 2`` with "tanh", of
    ``z = input + bias``, which is not rounded to 16 bits.

    Args: those of ``ops.bias_gelu``. The dtype is that of ``input``.
    """
    wide = torch.promote_types(input.dtype, torch.float32)
    z = input.to(wide)
    if bias is not None:
        z = z + bias.to(wide)
    return torch.nn.functional.gelu(z, approximate=approximate).to(input.dtype)
