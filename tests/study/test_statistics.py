"""Intervals and tests against known values, and on variants that are equal by construction."""

from __future__ import annotations

import numpy as np
import pytest

from fastplm.study.statistics import (
    Spread,
    chi_square,
    difference,
    holm,
    interval,
    paired_p,
    spread,
)


def test_paired_p_is_students():
    stats = pytest.importorskip("scipy.stats", reason="scipy gives the p-values to compare with")
    rng = np.random.default_rng(1)
    for n in (2, 3, 5, 9):
        ours, theirs = rng.normal(0.3, 1, n), rng.normal(0, 1, n)
        expected = stats.ttest_rel(ours, theirs).pvalue
        assert paired_p(ours - theirs) == pytest.approx(expected, rel=1e-9)


def test_paired_p_by_hand():
    """With two rows Student's t has one degree of freedom: p = 1 - 2 / pi * atan(t)."""
    assert paired_p(np.array([1.0, 3.0])) == pytest.approx(1 - 2 / np.pi * np.arctan(2.0))
    assert paired_p(np.array([0.0, 0.0])) == 1
    for no_test in ([1.0], [1.0, 1.0], [1.0, np.nan], [1.0, np.inf]):
        assert paired_p(np.array(no_test)) is None


def test_holm():
    """The example of Holm 1979, table 1, multiplied by hand."""
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([None, 0.02, None]) == [None, 0.02, None]
    assert holm([0.5, 0.9]) == [1.0, 1.0]


def test_one_seed_has_no_interval():
    found = interval(np.array([[1.0, 2.0, 6.0]]))
    assert (found.mean, found.low, found.high) == (3.0, None, None)


def test_the_interval_of_many_rows_is_students():
    """With one column and many rows the widened bootstrap is the t interval, but for its draws."""
    values = np.random.default_rng(2).normal(5, 2, (200, 1))
    found, error = interval(values), values.std(ddof=1) / 200**0.5
    assert found.high - found.mean == pytest.approx(1.972 * error, rel=0.05)
    assert found.mean - found.low == pytest.approx(1.972 * error, rel=0.05)
    assert interval(values) == found, "the same scores give the same bits"


def test_the_draws_are_a_percentile_bootstrap():
    """Without the widening, one column has the interval of SciPy's percentile bootstrap."""
    stats = pytest.importorskip("scipy.stats", reason="scipy has the bootstrap to compare with")
    values = np.random.default_rng(7).gamma(2.0, size=6)
    found = interval(values[:, None])
    expected = stats.bootstrap(
        (values,), np.mean, n_resamples=10_000, method="percentile", random_state=0
    ).confidence_interval
    widening = stats.t.ppf(0.975, 5) / stats.norm.ppf(0.975) * (6 / 5) ** 0.5
    spread = expected.high - expected.low
    for ours, theirs in ((found.low, expected.low), (found.high, expected.high)):
        assert (ours - values.mean()) / widening == pytest.approx(
            theirs - values.mean(), abs=0.03 * spread
        )


def test_fixed_columns_are_no_sample():
    """However much paradigms differ, the interval is that of the rows' means."""
    values = np.random.default_rng(3).random((1, 20)) + np.linspace(0, 0.1, 8)[:, None]
    fixed, nested = interval(values, fixed=True), interval(values)
    means = interval(values.mean(1, keepdims=True))
    assert (fixed.low, fixed.high) == pytest.approx((means.low, means.high), rel=1e-12)
    assert nested.high - nested.low > 1.5 * (fixed.high - fixed.low)


def test_the_spread_of_both_kinds_of_seeds():
    rng = np.random.default_rng(8)
    variants = [
        level + rng.normal(0, 0.03, (400, 1)) + rng.normal(0, 0.05, (400, 4)) for level in (0, 9)
    ]
    found = spread(variants)
    assert (found.rows, found.columns, found.number) == pytest.approx((0.03, 0.05, 4), rel=0.1)
    # Where pre-training seeds add nothing, nothing is left for them.
    alike = np.tile(rng.normal(0, 0.05, (1, 4)), (5, 1))
    assert spread([alike]).rows == 0 and spread([alike], fixed=True).rows == 0
    assert spread([variants[0][:1]]) is None and spread([variants[0][:, :1]]) is None
    paradigms = spread([variants[0][:, :1] + np.linspace(0, 1, 9)], fixed=True)
    assert paradigms.columns is None
    assert paradigms.rows == pytest.approx(variants[0][:, 0].std(ddof=1))


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_so_many_seeds_find_a_difference_in_four_of_five_studies(share):
    """By SciPy's t-test on drawn studies; half of the seeds find it less often."""
    stats = pytest.importorskip("scipy.stats", reason="scipy has the test of two samples")
    rng = np.random.default_rng(9)
    needed = max(2, round(share * Spread(0.012, 0.02, 5, 4).needed(0.01)[0]))

    def study(level):
        rows = level + rng.normal(0, 0.012, (4000, needed, 1))
        return (rows + rng.normal(0, 0.02, (4000, needed, 5))).mean(2)

    power = (stats.ttest_ind(study(0.01), study(0.0), axis=1).pvalue < 0.05).mean()
    assert 0.79 < power < 0.85 if share == 1 else power < 0.6


def test_the_seeds_that_are_needed_have_an_interval():
    """The variance of a normal sample of five is known within .36 and 8.26 (SciPy's quantiles)."""
    stats = pytest.importorskip("scipy.stats", reason="scipy has the chi-square distribution")
    for degrees in (1, 2, 4, 40, 400):
        for level in (0.025, 0.5, 0.975):
            found = chi_square(level, degrees)
            assert found == pytest.approx(stats.chi2.ppf(level, degrees), rel=1e-7)
    seeds, low, high = Spread(0.05, 0.0, 5, 4).needed(0.01)
    assert low / seeds == pytest.approx(0.36, rel=0.03)
    assert high / seeds == pytest.approx(8.26, rel=0.01)
    scores = np.random.default_rng(5).normal(0, 1, (400, 5, 1)) * np.ones(2)
    ends = [spread([each]).needed(0.3)[1:] for each in scores]
    inside = np.mean([low <= 176 <= high for low, high in ends])
    assert 0.93 < inside < 0.97, "176 are needed of a deviation of 1"


@pytest.mark.parametrize("seeds", [3, 5])
def test_intervals_of_few_seeds_hold_the_truth(seeds, monkeypatch):
    """The mean of normal seeds is inside in 95 % of studies; a plain bootstrap of 3 has 78 %."""
    monkeypatch.setattr("fastplm.study.statistics._DRAWS", 600)
    rng, inside, studies = np.random.default_rng(4), 0, 300
    for _ in range(studies):
        values = rng.normal(0, 1, (seeds, 1)) + rng.normal(0, 0.5, (seeds, 3))
        found = interval(values)
        inside += found.low <= 0 <= found.high
    assert inside / studies > 0.92


def test_equal_variants_are_rarely_told_apart(monkeypatch):
    """A planted null: two variants whose seeds are drawn from one distribution."""
    monkeypatch.setattr("fastplm.study.statistics._DRAWS", 600)
    rng, told, studies = np.random.default_rng(5), 0, 400
    for _ in range(studies):
        ours, theirs = (
            0.7 + rng.normal(0, 0.02, (3, 1)) + rng.normal(0, 0.01, (3, 3)) for _ in range(2)
        )
        found = difference(ours, theirs)
        told += found.p < 0.05 and not found.interval.low <= 0 <= found.interval.high
    assert told / studies < 0.08


def test_a_planted_difference_is_found():
    rng = np.random.default_rng(6)
    theirs = 0.7 + rng.normal(0, 0.01, (3, 3))
    found = difference(theirs + 0.1 + rng.normal(0, 0.002, (3, 3)), theirs)
    assert found.interval.low > 0.05 and found.p < 0.01
