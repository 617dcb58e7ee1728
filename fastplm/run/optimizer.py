"""Adafactor with the settings of T5's recipe; LAMB, which takes long to import, is in lamb.py."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import transformers


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
