"""LAMB with the settings of ALBERT's recipe, and Adafactor with those of T5's."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import pytorch_optimizer
import transformers


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


class Adafactor(transformers.Adafactor):
    """Adafactor as T5 was trained: no first moment, and updates relative to each weight's RMS.

    Args:
        groups: of parameters.
        lr: the rate relative to the RMS of a weight.

    Source: Shazeer and Stern 2018 (arXiv 1804.04235), algorithms 4 and 5; Raffel et al. 2020
        (arXiv 1910.10683), §3.1.2.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], lr: float) -> None:
        super().__init__(
            groups, lr=lr, scale_parameter=True, relative_step=False, warmup_init=False
        )


def inverse_square_root(step: int, warmup: int) -> float:
    """The share of the peak rate at a step, from 0 on: 1 for ``warmup`` steps, then falling.

    ``sqrt(k / max(n, k))`` of step n, counted from 1, and k = ``warmup``.

    Source: Raffel et al. 2020 (arXiv 1910.10683), §3.1.2, which has k = 10,000 and the peak 1e-2.
    """
    least = max(warmup, 1)
    return (least / max(step + 1, least)) ** 0.5
