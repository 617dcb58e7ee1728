"""A number of steps, or a budget of floating-point operations in its place."""

from __future__ import annotations

from typing import Any

from fastplm.run.settings import COUNT, POSITIVE, Rule, apart, setting

#: What a run with these two settings has among its ``rules``.
RULES = (
    Rule(
        "steps",
        lambda args: args.steps is not None or args.flops is not None,
        "a number of steps, or a budget (flops) in its place",
        fix="Give --steps N, or --flops F.",
    ),
    apart("flops", "steps", "one of the two, as the budget says how many steps there are"),
)


def steps() -> Any:
    """The setting of the steps: None where ``flops`` is given, until ``pay`` has said how many."""
    what = "optimizer steps of the run"
    return setting(what, None, number=COUNT, excludes="budget", required=True)


def flops() -> Any:
    """The setting of the budget."""
    what = "in the place of --steps: as many steps as a budget of floating-point operations pays "
    what += "for, by the count of docs/pretraining.md"
    return setting(what, None, number=POSITIVE, excludes="budget")


def pay(args: Any, flops_a_step: float, at_once: int = 1) -> int:
    """The steps that the budget of a run pays for, ``at_once`` of them or a multiple.

    Raises:
        ArgumentValueError: it pays for none, or for more than a run may have.
    """
    steps = int(args.flops // (at_once * flops_a_step)) * at_once
    enough = at_once * flops_a_step * 1.0005  # what is shown, rounded, pays for it, too
    expected = f"{enough:.4g} or more, the FLOPs of {at_once} of its steps"
    args.check("flops", steps > 0, expected, "Raise it, or take a smaller model or batch.")
    args.check("flops", COUNT.holds(steps), f"{COUNT.high} steps at most", "Lower it.")
    return steps


def described(args: Any, flops_a_step: float) -> str:
    """The budget, and what it pays for."""
    spent = flops_a_step * args.steps
    pays = f"{args.flops:.4g} FLOPs pay for {args.steps:,} steps of {flops_a_step:.4g}"
    return f"{pays}, {spent:.4g} in all"
