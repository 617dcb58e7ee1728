"""``nn.RMSNorm`` on ``ops.rms_norm``."""

from __future__ import annotations

import torch

from fastplm.ops.rms_norm import OP


class RMSNorm(torch.nn.RMSNorm):
    """``torch.nn.RMSNorm`` that uses ``ops.rms_norm`` on a CPU.

    Drop-in models use it instead of ``torch.nn.RMSNorm``; T5 does the same for ``T5LayerNorm``.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[..., E] -> [..., E]."""
        weight = self.weight
        out = None
        if (
            weight is not None
            and self.normalized_shape == input.shape[-1:]
            and weight.dtype is input.dtype
        ):
            eps = torch.finfo(input.dtype).eps if self.eps is None else self.eps
            out = OP.layer(input, weight, eps)
        return super().forward(input) if out is None else out
