"""A number of steps, or a budget of floating-point operations in its place."""

from __future__ import annotations

from typing import Any

from fastplm.run.settings import COUNT, POSITIVE, Rule, Settings, apart, setting

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


class BudgetSettings(Settings):
    """Settings of a run with steps or a budget, and with a warm-up."""

    steps: int
    flops: float | None
    warmup: int | None

    @property
    def stages(self) -> int:
        """The stages of a training, of as many steps each."""
        return 1

    @property
    def first_stage(self) -> int:
        """The steps of the first stage, or of the run."""
        return self.steps // self.stages

    def settle(self) -> None:
        """What depends on the number of steps, where it is known; and the rules."""
        if self.warmup is None and self.steps is not None:
            self.warmup = min(10_000, self.first_stage // 10)
        self.check_rules()

    def pay(self, flops_a_step: float) -> None:
        """Set the steps that the budget pays for, as many for each stage.

        Raises:
            ArgumentValueError: it pays for none, or for more than a run may have.
        """
        assert self.flops is not None
        self.steps = int(self.flops // (self.stages * flops_a_step)) * self.stages
        enough = self.stages * flops_a_step * 1.0005  # what is shown, rounded, pays for it, too
        expected = f"{enough:.4g} or more, the FLOPs of {self.stages} of its steps"
        fix = "Raise it, or take a smaller model or batch."
        self.check("flops", self.steps > 0, expected, fix)
        self.check("flops", COUNT.holds(self.steps), f"{COUNT.high} steps at most", "Lower it.")
        self.settle()


def described(args: Any, flops_a_step: float) -> str:
    """The budget, and what it pays for."""
    spent = flops_a_step * args.steps
    pays = f"{args.flops:.4g} FLOPs pay for {args.steps:,} steps of {flops_a_step:.4g}"
    return f"{pays}, {spent:.4g} in all"
