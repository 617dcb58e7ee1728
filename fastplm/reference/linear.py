"""Reference of ``ops.linear``: the specification, in plain differentiable PyTorch."""

from __future__ import annotations

import torch


def linear_ref(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """``out = input weight^T + bias``, which is PyTorch's own.

    Args: those of ``ops.linear``.
    """
    return torch.nn.functional.linear(input, weight, bias)
