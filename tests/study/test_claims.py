"""What a paper found, by the figures of a study."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fastplm.study.claims import AGREES, CANNOT, DISAGREES, compare

from .conftest import BASE, BETTER


def test_a_claim_that_holds(study):
    (found,) = compare(study(BETTER, BASE))
    assert found.verdict == AGREES and found.difference.interval.mean == pytest.approx(0.1)
    assert "The paper found 40 % better than 15 % (Wettig et al. 2023)" in found.text
    assert "+0.1000" in found.text and found.text.endswith(f"{AGREES}.")


def test_a_judge_that_the_paper_does_not_have(study):
    results = study(BETTER, BASE)
    claims = tuple(replace(claim, beyond=("sentiment",)) for claim in results.grid.claims)
    (found,) = compare(replace(results, grid=replace(results.grid, claims=claims)))
    assert "Wettig et al. 2023). By sentiment, which the paper does not have: here" in found.text


def test_differences_that_are_all_the_same_are_no_test(study):
    """As of few examples: their variance is 0, and any t would be infinite."""
    ours, theirs = [[0.75, 0.75]] * 2, [[0.5, 0.5]] * 2
    (found,) = compare(study(ours, theirs))
    assert found.verdict == CANNOT and "no test" in found.text


def test_a_claim_that_does_not_hold(study):
    (found,) = compare(study(BASE, BETTER))
    assert found.verdict == DISAGREES
    (loss,) = compare(study(BASE, BETTER, on="held out: mlm_loss", lower=True))
    assert loss.verdict == AGREES, "of a loss, less is more"


@pytest.mark.parametrize(
    "ours, theirs, options",
    [
        ([[0.70, 0.70], [0.75, 0.74], [0.69, 0.71]], BASE, {}),  # inside the noise
        (BASE, BASE, {}),
        ([[0.9, 0.9]], [[0.7, 0.7]], {}),  # one seed
        (BETTER, BASE, {"early": ("its mlm_loss is not clearly below the unigram loss",)}),
        (BETTER[:2], BASE, {}),  # not as many seeds
    ],
)
def test_what_cannot_be_told(ours, theirs, options, study):
    (found,) = compare(study(ours, theirs, **options))
    assert found.verdict == CANNOT and CANNOT in found.text.lower()
    assert ("Too early to tell: 40 % and 15 %: its mlm_loss" in found.text) == bool(options)


def test_several_claims_are_corrected_together(study):
    """One comparison at p = .03 agrees; among five of them none does."""
    ours = np.array(BASE) + np.array([[0.05], [0.08], [0.04]])
    results = study(ours, BASE)
    (alone,) = compare(results)
    many = replace(results.grid, claims=results.grid.claims * 5)
    together = compare(replace(results, grid=many))
    assert alone.verdict == AGREES and {each.verdict for each in together} == {CANNOT}
    assert together[0].p == pytest.approx(5 * alone.p)
    assert "after Holm's correction for 5 comparisons" in together[0].text


def test_a_claim_about_a_curve_is_one_about_each_point(study):
    results = study(BETTER, BASE)
    rows = {
        name: replace(row, scores={f"sentiment {n}": row.scores["sentiment"] for n in (100, 1000)})
        for name, row in results.rows.items()
    }
    found = compare(replace(results, rows=rows))
    assert [each.on for each in found] == ["sentiment 100", "sentiment 1000"]
