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


def linear_bf16x3_ref(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """``linear_ref`` of numbers that are taken as two bf16, without the product of the low ones.

    ``x ~ hi + lo``, ``hi = bf16(x)``, ``lo = bf16(x - hi)``;
    ``out = lo(input) hi(weight)^T + hi(input) lo(weight)^T + hi(input) hi(weight)^T + bias``

    The products of bf16 are exact in fp32.
    """

    def halves(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        high = x.bfloat16().to(x.dtype)
        return high, (x - high).bfloat16().to(x.dtype)

    (of_input, rest), (of_weight, rest_of_weight) = halves(input), halves(weight)
    return linear_ref(
        torch.cat([rest, of_input, of_input], -1),
        torch.cat([of_weight, rest_of_weight, of_weight], -1),
        bias,
    )
