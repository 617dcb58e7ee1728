"""``nn.RMSNorm`` on ``ops.rms_norm``."""

from __future__ import annotations

import torch

from fastplm import ops
from fastplm.ops.rms_norm import OP as RMS_NORM


class RMSNorm(torch.nn.RMSNorm):
    """``torch.nn.RMSNorm`` that uses ``ops.rms_norm`` on a CPU.

    Drop-in models use it instead of ``torch.nn.RMSNorm``; T5 does the same for ``T5LayerNorm``.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[..., E] -> [..., E]."""
        weight = self.weight
        if (
            weight is None
            or self.normalized_shape != input.shape[-1:]
            or weight.dtype != input.dtype
            or not RMS_NORM.is_faster(input, weight)
        ):
            return super().forward(input)
        eps = torch.finfo(input.dtype).eps if self.eps is None else self.eps
        return ops.rms_norm(input, weight, eps=eps)
