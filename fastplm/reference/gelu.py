"""Reference of ``ops.gelu``: the specification, in plain differentiable PyTorch."""

from __future__ import annotations

import torch


def gelu_ref(input: torch.Tensor, *, approximate: str = "none") -> torch.Tensor:
    """``out = x Phi(x)``, or ``x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))) / 2``: PyTorch's own.

    Args:
        input: of any shape, floating.
        approximate: "none" for the first, "tanh" for the second.

    Returns:
        The shape and dtype of ``input``.
    """
    return torch.nn.functional.gelu(input, approximate=approximate)
