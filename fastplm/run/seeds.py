"""Means of scores over seeds, with their intervals."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

_CONFIDENCE = 0.95


def interval(values: Sequence[float]) -> dict[str, float | None]:
    """The mean of one score over seeds, and half the width of its 95 % confidence interval.

    ``half_width = t * s / sqrt(n)``, where s is the standard deviation with n - 1 in its
    denominator, and t the quantile of Student's t with n - 1 degrees of freedom; None if n is 1.
    """
    half_width = None
    if len(values) > 1:
        error = statistics.stdev(values) / math.sqrt(len(values))
        half_width = student_t(_CONFIDENCE, len(values) - 1) * error
    return {"mean": statistics.fmean(values), "half_width": half_width}


def student_t(confidence: float, degrees: int) -> float:
    """The t with ``P(|T| < t) = confidence`` for Student's T."""
    low, high = 0.0, 1.0
    while probability_within(high, degrees) < confidence:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (
            (middle, high) if probability_within(middle, degrees) < confidence else (low, middle)
        )
    return high


def probability_within(t: float, degrees: int) -> float:
    """P(|T| < t).

    Source: Abramowitz & Stegun, Handbook of Mathematical Functions, 26.7.3 and 26.7.4.
    """
    angle = math.atan(t / math.sqrt(degrees))
    odd = degrees % 2
    term = math.cos(angle) if odd else 1.0
    total = 0.0
    for i in range(odd, degrees - 1, 2):
        total += term
        term *= math.cos(angle) ** 2 * (i + 1) / (i + 2)
    if odd:
        return 2 / math.pi * (angle + math.sin(angle) * total)
    return math.sin(angle) * total
