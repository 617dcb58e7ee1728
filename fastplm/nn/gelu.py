"""``nn.GELU`` on ``ops.gelu``."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fastplm.ops.gelu import OP


def gelu(input: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    """``ops.gelu`` if it is faster, else ``torch.nn.functional.gelu``: [...] -> [...]."""
    out = OP.layer(input, approximate)
    return F.gelu(input, approximate=approximate) if out is None else out


class GELU(torch.nn.GELU):
    """``torch.nn.GELU`` that uses ``ops.gelu`` for the tanh approximation on a CPU.

    Drop-in models use it instead of ``torch.nn.GELU``, and do the same for Transformers'
    activations "gelu_new" and "gelu_pytorch_tanh".
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[...] -> [...]."""
        return gelu(input, self.approximate)
