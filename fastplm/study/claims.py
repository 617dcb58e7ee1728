"""What a paper found, what was found here, and whether the two agree."""

from __future__ import annotations

from dataclasses import dataclass

from fastplm.study.grid import Claim, is_of
from fastplm.study.results import Results, Scores
from fastplm.study.statistics import Difference, difference, holm

_LEVEL = 0.05
AGREES, DISAGREES, CANNOT = "agrees", "does not agree", "cannot be told at this size"


@dataclass(frozen=True)
class Comparison:
    """A claim by one evaluation.

    Args:
        claim: what the paper found.
        on: the evaluation.
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
    """All claims of a study by all their evaluations, corrected together."""
    asked = [
        (
            claim,
            column,
            [results.rows[name].scores.get(column) for name in (claim.better, claim.than)],
        )
        for claim in results.grid.claims
        for on in claim.on
        for column in _columns(results, on)
    ]
    found = [_difference(*scores) for *_, scores in asked]
    p_values = holm([each.p if each is not None else None for each in found])
    count = sum(p is not None for p in p_values)
    return [
        _compared(*each, difference, p, count)
        for each, difference, p in zip(asked, found, p_values, strict=True)
    ]


def _columns(results: Results, on: str) -> list[str]:
    """The columns of an evaluation: one, or one for each number of examples to train on."""
    points = [name for name in results.columns if name.startswith(f"{on} ")]
    return [on] if on in results.columns or not points else points


def _difference(ours: Scores | None, theirs: Scores | None) -> Difference | None:
    if ours is None or theirs is None or ours.values.shape != theirs.values.shape:
        return None
    sign = -1.0 if ours.lower else 1.0
    return difference(sign * ours.values, sign * theirs.values, fixed=ours.fixed)


def _compared(
    claim: Claim,
    on: str,
    scores: list[Scores | None],
    found: Difference | None,
    p: float | None,
    count: int,
) -> Comparison:
    reasons: dict[str, list[str]] = {}
    for name, of in zip((claim.better, claim.than), scores, strict=True):
        for reason in of.early if of is not None else ():
            reasons.setdefault(reason, []).append(name)
    early = tuple(f"{' and '.join(names)}: {reason}" for reason, names in reasons.items())
    paper = f" ({claim.paper})" if claim.paper else ""
    beyond = ", which the paper does not have" if is_of(on, claim.beyond) else ""
    start = f"The paper found {claim.better} better than {claim.than}{paper}. By {on}{beyond}: "
    ours = scores[0]
    if found is None or ours is None:
        text = f"{start}the two were not scored in the same way, or by as many seeds: {CANNOT}."
        return Comparison(claim, on, None, None, early, CANNOT, text)
    verdict = _verdict(found, p) if not early else CANNOT
    inside, between, test = found.interval, "", "no test"
    if inside.low is not None and inside.high is not None:
        between = f", 95 % interval {inside.low:+.4f} to {inside.high:+.4f}"
    if p is not None:
        corrected = f" after Holm's correction for {count} comparisons" if count > 1 else ""
        test = f"p = {p:.3g}{corrected}"
    seeds = " × ".join(map(str, ours.values.shape))
    seeds = f"{len(ours.values)} pre-training seeds" if ours.fixed else f"{seeds} seeds"
    text = (
        f"{start}here the difference is {inside.mean:+.4f}{between} ({seeds}; {test}): {verdict}."
    )
    if early:
        text += f" Too early to tell: {'; '.join(early)}."
    return Comparison(claim, on, found, p, early, verdict, text)


def _verdict(found: Difference, p: float | None) -> str:
    """An order is said only where the interval leaves 0 out and the test says so, too."""
    low, high = found.interval.low, found.interval.high
    if p is None or low is None or high is None or p >= _LEVEL or low <= 0 <= high:
        return CANNOT
    return AGREES if low > 0 else DISAGREES
