"""Means over two kinds of seeds, their intervals, and the test of a difference.

The scores of a variant by a judge are fp64 [n, m]: a row for each pre-training seed; a column for
each fine-tuning seed, or for each paradigm of minimal pairs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fastplm.run.seeds import probability_within, student_t

_DRAWS = 10_000
_SEED = 0
_LEVEL = 0.95
#: The quantile of the normal distribution for ``_LEVEL``.
_NORMAL = 1.959963984540054


@dataclass(frozen=True)
class Interval:
    """A mean and its 95 % interval; without ends where one seed says nothing of others."""

    mean: float
    low: float | None = None
    high: float | None = None


def interval(scores: np.ndarray, *, crossed: bool = False) -> Interval:
    """The mean of scores, and a 95 % interval by a bootstrap over rows and columns.

    Rows are drawn with replacement. In each drawn row the columns are drawn anew, as fine-tuning
    seeds are nested in pre-training seeds; ``crossed`` columns are the same ones in all rows, and
    rows and columns are drawn independently. A bootstrap over few rows is too narrow: its variance
    is ``(n - 1) / n`` of the unbiased one, and it takes a normal quantile for Student's. So the
    deviations by rows are multiplied by ``t * sqrt(n / (n - 1)) / 1.96``, which is 2.69 for three
    rows and 1.43 for five.

    Args:
        scores: fp64 [n, m]. With one row there is no interval.
        crossed: whether a column is the same thing in all rows.

    Determinism:
        The same scores give the same bits.

    Source: Davison & Hinkley 1997, Bootstrap Methods and their Application, §3.8 (nested); Owen
    2007, The pigeonhole bootstrap (crossed); Hesterberg 2015, What Teachers Should Know about the
    Bootstrap, §3.2 (few rows).
    """
    n, m = scores.shape
    mean = float(scores.mean())
    if n == 1:
        return Interval(mean)
    rng = np.random.default_rng(_SEED)
    rows = rng.integers(n, size=(_DRAWS, n))
    means = scores.mean(1)
    by_rows = means[rows].mean(1) - mean
    if crossed:
        columns = rng.integers(m, size=(_DRAWS, m))
        others = scores.mean(0)[columns].mean(1) - mean
    else:
        columns = rng.integers(m, size=(_DRAWS, n, m))
        others = (scores[rows[..., None], columns].mean(2) - means[rows]).mean(1)
    drawn = _widening(n) * by_rows + others
    low, high = np.quantile(drawn, ((1 - _LEVEL) / 2, (1 + _LEVEL) / 2))
    return Interval(mean, mean + float(low), mean + float(high))


def _widening(rows: int) -> float:
    return student_t(_LEVEL, rows - 1) / _NORMAL * math.sqrt(rows / (rows - 1))


@dataclass(frozen=True)
class Difference:
    """What one variant has more than another: an interval of paired differences, and a p-value."""

    interval: Interval
    p: float | None


def difference(ours: np.ndarray, theirs: np.ndarray, *, crossed: bool = False) -> Difference:
    """The paired difference of two variants: row by row, and column by column.

    ``p`` is that of Student's paired t-test over rows, two-sided; None with one row.

    Args:
        ours, theirs: fp64 [n, m], the same seeds in the same order.
        crossed: see ``interval``.
    """
    each = ours - theirs
    return Difference(interval(each, crossed=crossed), paired_p(each.mean(1)))


def paired_p(differences: np.ndarray) -> float | None:
    """The two-sided p-value of Student's t-test that the mean of differences is 0.

    Args:
        differences: fp64 [n].
    """
    n = len(differences)
    if n < 2:
        return None
    mean, error = differences.mean(), differences.std(ddof=1) / math.sqrt(n)
    if error == 0:
        return float(mean == 0)
    return 1 - probability_within(abs(mean / error), n - 1)


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """The p-values of several tests, corrected so that all of them together err in 5 % of studies.

    Source: Holm 1979, A simple sequentially rejective multiple test procedure.
    """
    known = sorted((p, i) for i, p in enumerate(p_values) if p is not None)
    corrected: list[float | None] = [None] * len(p_values)
    largest = 0.0
    for rank, (p, i) in enumerate(known):
        largest = max(largest, min(1.0, p * (len(known) - rank)))
        corrected[i] = largest
    return corrected
