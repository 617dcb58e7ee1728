"""Reference of ``ops.gelu``: the specification, in plain differentiable PyTorch."""

from __future__ import annotations

import torch


def gelu_ref(input: torch.Tensor, *, approximate: str = "none") -> torch.Tensor:
    """``out = x Phi(x)``, or ``x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))) / 2`` with "tanh":
    PyTorch's own.

    Args: those of ``ops.gelu``.
    """
    return torch.nn.functional.gelu(input, approximate=approximate)
