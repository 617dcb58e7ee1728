"""``nn.Dropout`` on ``ops.dropout``."""

from __future__ import annotations

import torch

from fastplm import ops
from fastplm.ops.dropout import is_faster


class Dropout(torch.nn.Dropout):
    """``torch.nn.Dropout`` that draws by ``ops.dropout`` on a CPU, where PyTorch's is slow.

    The probability is the same to within 1/131072, and the random bits are others. Models have it
    in place of ``torch.nn.Dropout``.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[...] -> [...]."""
        if self.training and not self.inplace and is_faster(input, self.p):
            return ops.dropout(input, self.p)
        return super().forward(input)
