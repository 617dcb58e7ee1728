"""LAMB with the settings of ALBERT's recipe."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import pytorch_optimizer


class Lamb(pytorch_optimizer.Lamb):
    """LAMB: Adam's update of each tensor, as long as its share of that tensor's norm.

    ``x -= lr * |x| / |r| * r``, where ``r = m / (sqrt(v) + eps) + weight_decay * x``.
    Groups without weight decay, which hold biases and norms, are not scaled either, as in ALBERT's
    own training.

    Args:
        groups: of parameters, each with its ``weight_decay``.
        settings: ``lr``, ``betas``, ``eps``.

    Source: You et al. 2020 (arXiv 1904.00962), algorithm 2; Lan et al. 2020 (arXiv 1909.11942).
    """

    # The bound of |x|: the parent's 10 would slow down large matrices; ALBERT's training did not.
    clamp = math.inf

    def __init__(self, groups: Iterable[dict[str, Any]], **settings: Any) -> None:
        super().__init__(
            [{**group, "adam": group["weight_decay"] == 0} for group in groups],
            # Decay is a part of the update whose norm is taken.
            weight_decouple=False,
            # Without this the first step is ten times as long as the learning rate says: the update
            # is divided by its norm, and by the bias of the first moment, which that contains.
            adam_debias=True,
            **settings,
        )
