"""What a paper found, what was found here, and whether the two agree."""

from __future__ import annotations

from dataclasses import dataclass

from fastplm.study.grid import Claim, is_of
from fastplm.study.results import Results, Row, Scores
from fastplm.study.statistics import Difference, difference, holm

_LEVEL = 0.05
AGREES, DISAGREES, CANNOT = "agrees", "does not agree", "cannot be told at this size"


@dataclass(frozen=True)
class Comparison:
    """A claim by one judge.

    Args:
        claim: what the paper found.
        on: the judge.
        difference: of "better" minus "than", so that more is better; None if they cannot be paired.
        p: the p-value after Holm's correction over all comparisons of the study.
        early: why it is too early to tell.
        verdict: ``AGREES``, ``DISAGREES`` or ``CANNOT``.
        text: all of it, in sentences.
    """

    claim: Claim
    on: str
    difference: Difference | None
    p: float | None
    early: tuple[str, ...]
    verdict: str
    text: str


def compare(results: Results) -> list[Comparison]:
    """All claims of a study by all their judges, corrected together."""
    asked = [
        (claim, column, *_pair(results, claim, column))
        for claim in results.grid.claims
        for on in claim.on
        for column in _columns(results, on)
    ]
    found = [_difference(ours, theirs) for *_, ours, theirs in asked]
    known = [each.p if each is not None else None for each in found]
    corrected = holm(known)
    count = sum(p is not None for p in known)
    return [
        _compared(results, claim, on, ours, theirs, each, p, count)
        for (claim, on, ours, theirs), each, p in zip(asked, found, corrected, strict=True)
    ]


def _columns(results: Results, on: str) -> list[str]:
    """The columns of a judge: one, or one for each number of examples to train on."""
    points = [name for name in results.columns if name.startswith(f"{on} ")]
    return [on] if on in results.columns or not points else points


def _pair(results: Results, claim: Claim, on: str) -> tuple[Scores | None, Scores | None]:
    rows: tuple[Row, Row] = results.rows[claim.better], results.rows[claim.than]
    return rows[0].scores.get(on), rows[1].scores.get(on)


def _difference(ours: Scores | None, theirs: Scores | None) -> Difference | None:
    if ours is None or theirs is None or ours.values.shape != theirs.values.shape:
        return None
    sign = -1.0 if ours.lower else 1.0
    return difference(sign * ours.values, sign * theirs.values, fixed=ours.fixed)


def _compared(
    results: Results,
    claim: Claim,
    on: str,
    ours: Scores | None,
    theirs: Scores | None,
    found: Difference | None,
    p: float | None,
    count: int,
) -> Comparison:
    names = (claim.better, claim.than)
    reasons: dict[str, list[str]] = {}
    for name, scores in zip(names, (ours, theirs), strict=True):
        for reason in scores.early if scores is not None else ():
            reasons.setdefault(reason, []).append(name)
    early = tuple(f"{' and '.join(of)}: {reason}" for reason, of in reasons.items())
    paper = f" ({claim.paper})" if claim.paper else ""
    beyond = ", which the paper does not have" if is_of(on, claim.beyond) else ""
    start = f"The paper found {claim.better} better than {claim.than}{paper}. By {on}{beyond}: "
    if found is None:
        text = f"{start}the two were not scored in the same way, or by as many seeds: {CANNOT}."
        return Comparison(claim, on, None, None, early, CANNOT, text)
    verdict = _verdict(found, p) if not early else CANNOT
    inside = found.interval
    between = ""
    if inside.low is not None and inside.high is not None:
        between = f", 95 % interval {inside.low:+.4f} to {inside.high:+.4f}"
    shown = "no test"
    if p is not None:
        corrected = f" after Holm's correction for {count} comparisons" if count > 1 else ""
        shown = f"p = {p:.3g}{corrected}"
    assert ours is not None
    seeds = " × ".join(map(str, ours.values.shape[:1] if ours.fixed else ours.values.shape))
    seeds += " pre-training seeds" if ours.fixed else " seeds"
    here = f"here the difference is {inside.mean:+.4f}{between} ({seeds}; {shown}): {verdict}."
    if early:
        here += f" Too early to tell: {'; '.join(early)}."
    return Comparison(claim, on, found, p, early, verdict, start + here)


def _verdict(found: Difference, p: float | None) -> str:
    """An order is said only where the interval leaves 0 out and the test says so, too."""
    low, high = found.interval.low, found.interval.high
    if p is None or low is None or high is None or p >= _LEVEL:
        return CANNOT
    if low > 0:
        return AGREES
    return DISAGREES if high < 0 else CANNOT
