"""``nn.Linear`` on ``ops.linear``."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fastplm.ops.linear import if_faster


class Linear(torch.nn.Linear):
    """``torch.nn.Linear`` that multiplies by ``ops.linear`` where PyTorch is slow, on some CPUs.

    The same parameters and the same results. Models have it in place of ``torch.nn.Linear``.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[..., K] -> [..., M]."""
        out = if_faster(input, self.weight, self.bias)
        return F.linear(input, self.weight, self.bias) if out is None else out
