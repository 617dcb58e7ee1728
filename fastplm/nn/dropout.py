"""``nn.Dropout`` on ``ops.dropout``."""

from __future__ import annotations

import torch

from fastplm import ops
from fastplm.ops.dropout import is_faster


class Dropout(torch.nn.Dropout):
    """``torch.nn.Dropout`` that uses ``ops.dropout`` on a CPU, where PyTorch's is slow.

    The probability differs by at most 1/131072; the random numbers are different. Drop-in models
    use it instead of ``torch.nn.Dropout``.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[...] -> [...]."""
        if not self.training:
            return input
        if not self.inplace and is_faster(input, self.p):
            return ops.dropout(input, self.p)
        return super().forward(input)
