"""Reference of ``ops.geglu``: the specification, in plain differentiable PyTorch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def geglu_ref(input: Tensor, activation: str = "gelu") -> Tensor:
    """``out = activation(a) b`` with ``a, b = input.chunk(2, -1)``, rounded once.

    Args: those of ``ops.geglu``.
    """
    first, factor = input.to(torch.promote_types(input.dtype, torch.float32)).chunk(2, -1)
    if activation == "silu":
        active = F.silu(first)
    else:
        active = F.gelu(first, approximate="tanh" if activation == "gelu_tanh" else "none")
    return (active * factor).to(input.dtype)
