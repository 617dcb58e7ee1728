"""``nn.Linear`` on ``ops.linear``."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fastplm import ops
from fastplm.ops.linear import is_worth_it


class Linear(torch.nn.Linear):
    """``torch.nn.Linear`` that multiplies by ``ops.linear`` on the CPUs where PyTorch is slow.

    The same parameters and the same results. Models have it in place of ``torch.nn.Linear``.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[..., K] -> [..., M]."""
        if is_worth_it(input, self.weight):
            return ops.linear(input, self.weight, self.bias)
        return F.linear(input, self.weight, self.bias)
