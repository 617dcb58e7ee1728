"""``nn.Linear`` on ``ops.linear``."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.nn.functional as F

from fastplm.ops.linear import if_faster


class Linear(torch.nn.Linear):
    """``torch.nn.Linear`` that multiplies by ``ops.linear`` where PyTorch is slow, on some CPUs.

    The same parameters and the same results. Models have it in place of ``torch.nn.Linear``, and
    ``fastplm.restore`` puts that back, for who looks for it by its exact class.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[..., K] -> [..., M]."""
        out = if_faster(input, self.weight, self.bias)
        return F.linear(input, self.weight, self.bias) if out is None else out

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "qconfig":  # torch.ao.quantization asks for nn.Linear by its exact class
            warnings.warn(
                "torch.ao.quantization does not know fastplm's linear layers and leaves them as "
                "they are. Quantize fastplm.restore(model), then call fastplm.accelerate again",
                stacklevel=2,
            )
        super().__setattr__(name, value)
