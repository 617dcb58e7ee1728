"""Means over two kinds of seeds, their intervals, and the test of a difference.

The scores of a variant by a judge are fp64 [n, m]: a row for each pre-training seed; a column for
each fine-tuning seed, or for each paradigm of minimal pairs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from fastplm.run.seeds import probability_within, student_t

_DRAWS = 10_000
_SEED = 0
_LEVEL = 0.95
#: The quantile of the normal distribution for ``_LEVEL``, and that of a power of four fifths.
_NORMAL, _POWER = 1.959963984540054, 0.8416212335729143


@dataclass(frozen=True)
class Interval:
    """A mean and its 95 % interval; without ends where one seed says nothing of others."""

    mean: float
    low: float | None = None
    high: float | None = None


def interval(scores: np.ndarray, *, fixed: bool = False) -> Interval:
    """The mean of scores, and a 95 % interval by a bootstrap over rows and columns.

    Rows are drawn with replacement. In each drawn row the columns are drawn anew, as fine-tuning
    seeds are nested in pre-training seeds; ``fixed`` columns are the same in all rows and all that
    there are, as the paradigms of a benchmark, and only rows are drawn. The examples that a judge
    has are fixed, too. A bootstrap over few rows is too narrow: its variance
    is ``(n - 1) / n`` of the unbiased one, and it takes a normal quantile for Student's. So the
    deviations by rows are multiplied by ``t * sqrt(n / (n - 1)) / 1.96``, which is 2.69 for three
    rows and 1.43 for five.

    Args:
        scores: fp64 [n, m]. With one row there is no interval.
        fixed: whether the columns are no sample of others.

    Determinism:
        The same scores give the same bits.

    Source: Davison & Hinkley 1997, Bootstrap Methods and their Application, §3.8 (nested);
    Hesterberg 2015, What Teachers Should Know about the Bootstrap, §3.2 (few rows).
    """
    n, m = scores.shape
    mean = float(scores.mean())
    if n == 1:
        return Interval(mean)
    rng = np.random.default_rng(_SEED)
    rows = rng.integers(n, size=(_DRAWS, n))
    means = scores.mean(1)
    by_rows = means[rows].mean(1) - mean
    drawn = _widening(n) * by_rows
    if not fixed:
        columns = rng.integers(m, size=(_DRAWS, n, m))
        drawn = drawn + (scores[rows[..., None], columns].mean(2) - means[rows]).mean(1)
    low, high = np.quantile(drawn, ((1 - _LEVEL) / 2, (1 + _LEVEL) / 2))
    return Interval(mean, mean + float(low), mean + float(high))


def _widening(rows: int) -> float:
    return student_t(_LEVEL, rows - 1) / _NORMAL * math.sqrt(rows / (rows - 1))


@dataclass(frozen=True)
class Difference:
    """What one variant has more than another: an interval of paired differences, and a p-value."""

    interval: Interval
    p: float | None


def difference(ours: np.ndarray, theirs: np.ndarray, *, fixed: bool = False) -> Difference:
    """The paired difference of two variants: row by row, and column by column.

    ``p`` is that of Student's paired t-test over rows, two-sided; None with one row.

    Args:
        ours, theirs: fp64 [n, m], the same seeds in the same order.
        fixed: see ``interval``.
    """
    each = ours - theirs
    return Difference(interval(each, fixed=fixed), paired_p(each.mean(1)))


@dataclass(frozen=True)
class Spread:
    """How much scores vary with the seeds.

    Args:
        rows: the standard deviation between pre-training seeds.
        columns: that between fine-tuning seeds of one pre-training; None of fixed columns.
        number: fine-tuning seeds of each pre-training.
        degrees: of freedom of the variance of pre-training seeds.
    """

    rows: float
    columns: float | None
    number: int
    degrees: int

    def needed(self, difference: float) -> tuple[int, int, int]:
        """The pre-training seeds of two variants that show a difference in four of five studies.

        By a two-sided t-test of 5 %, not paired, each seed with ``number`` fine-tuning seeds.

        Returns:
            The number for the variance that was found, and those for the ends of the variance's
            95 % interval, as of normal scores.

        Source: Guenther 1981, Sample size formulas for normal theory t tests.
        """
        variance = self.rows**2 + (self.columns or 0.0) ** 2 / self.number

        def seeds(variance: float) -> int:
            needed = 2 * variance * ((_NORMAL + _POWER) / difference) ** 2 + _NORMAL**2 / 4
            return max(2, math.ceil(needed))

        low, high = (
            seeds(variance * self.degrees / chi_square(level, self.degrees))
            for level in ((1 + _LEVEL) / 2, (1 - _LEVEL) / 2)
        )
        return seeds(variance), low, high


def spread(variants: Sequence[np.ndarray], *, fixed: bool = False) -> Spread | None:
    """How much the scores of a study's variants vary with the seeds, one spread for all of them.

    The variances of a one-way layout: that of fine-tuning seeds is the mean of the rows' variances,
    that of pre-training seeds what the rows' means vary more than these explain, or 0.

    Args:
        variants: fp64 [n, m] of each.
        fixed: see ``interval``.

    Returns:
        None where a variant has one pre-training seed, or one fine-tuning seed.

    Source: Searle, Casella & McCulloch 1992, Variance Components, §3.6.
    """
    if any(len(each) < 2 or (each.shape[1] < 2 and not fixed) for each in variants):
        return None
    means = float(np.mean([each.mean(1).var(ddof=1) for each in variants]))
    degrees = sum(len(each) - 1 for each in variants)
    if fixed:
        return Spread(math.sqrt(means), None, 1, degrees)
    within = float(np.mean([each.var(1, ddof=1).mean() for each in variants]))
    number = min(each.shape[1] for each in variants)
    return Spread(math.sqrt(max(means - within / number, 0.0)), math.sqrt(within), number, degrees)


@lru_cache
def chi_square(probability: float, degrees: int) -> float:
    """The quantile of the chi-square distribution, to 1e-9 of it, by bisection."""
    low, high = 0.0, 20.0 * degrees + 100.0
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        shape, limit = torch.tensor([degrees / 2, middle / 2], dtype=torch.float64, device="cpu")
        if torch.special.gammainc(shape, limit) < probability:
            low = middle
        else:
            high = middle
    return high


def paired_p(differences: np.ndarray) -> float | None:
    """The two-sided p-value of Student's t-test that the mean of differences is 0.

    None where there is no test: of one difference, of some that are not finite, and of several
    that are the same and not 0, as scores of few examples may be.

    Args:
        differences: fp64 [n].
    """
    n = len(differences)
    if n < 2 or not np.isfinite(differences).all():
        return None
    mean, error = differences.mean(), differences.std(ddof=1) / math.sqrt(n)
    if error == 0:
        return None if mean else 1.0
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
