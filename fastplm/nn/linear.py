"""``nn.Linear`` on ``ops.linear``."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch
import torch.nn.functional as F

from fastplm.ops.linear import OP


class Linear(torch.nn.Linear):
    """``torch.nn.Linear`` that uses ``ops.linear`` if PyTorch is slower, which it is on some CPUs.

    Parameters and results are the same. Drop-in models use it instead of ``torch.nn.Linear``;
    ``fastplm.restore`` replaces it again, for code that tests for exactly ``torch.nn.Linear``.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[..., K] -> [..., M]."""
        weight, bias = self._weights()
        dense = weight.layout is torch.strided
        out = OP.layer(input, weight, bias) if dense else None
        return F.linear(input, weight, bias) if out is None else out

    def _weights(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """``self.weight, self.bias``, without ``nn.Module``'s search, which takes 1.5 us."""
        try:
            # An attribute of the instance hides the parameter of its name.
            hidden = "weight" in self.__dict__ or "bias" in self.__dict__
            if not (hidden or torch.compiler.is_compiling()):
                return self._parameters["weight"], self._parameters["bias"]  # type: ignore[return-value]
        except KeyError:  # parametrized, pruned, or sharded
            pass
        return self.weight, self.bias

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "qconfig":  # torch.ao.quantization finds only modules of exactly nn.Linear
            _warn_of_quantization()
        super().__setattr__(name, value)


@functools.cache  # of all layers of a model once, whatever the filters of warnings
def _warn_of_quantization() -> None:
    warnings.warn(
        "torch.ao.quantization does not know fastplm's linear layers and leaves them as they are. "
        "Quantize fastplm.restore(model), then call fastplm.accelerate again",
        stacklevel=3,
    )
