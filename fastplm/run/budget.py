"""A number of steps, or a budget of floating-point operations in its place."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from fastplm.run.settings import COUNT, POSITIVE, Rule, Settings, apart, resolve_warmup, setting

if TYPE_CHECKING:
    from typing_extensions import Self

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

#: Samples of a run; beyond it the libraries below end the process.
_MOST_SAMPLES = 1 << 62
SAMPLES = Rule(
    "batch_size",
    lambda args: args.steps is None or args.samples <= _MOST_SAMPLES,
    f"a run of {_MOST_SAMPLES} samples at most, and not of {{args.samples}}",
    fix="Lower it.",
)


def steps() -> Any:
    """The setting of the steps: None where ``flops`` is given, until ``with_flops`` counts them."""
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
    batch_size: int
    gradient_accumulation: int

    @property
    def samples(self) -> int:
        """The samples of the run in one process."""
        return self.steps * self.batch_size * self.gradient_accumulation

    @property
    def samples_a_step(self) -> int:
        """The samples of an optimizer step, of all processes."""
        processes = int(os.environ.get("WORLD_SIZE") or "1")
        return self.batch_size * self.gradient_accumulation * processes

    @property
    def stages(self) -> int:
        """The stages of a training, of as many steps each."""
        return 1

    @property
    def first_stage(self) -> int:
        """The steps of the first stage, or of the run."""
        return self.steps // self.stages

    def with_steps(self, steps: int | None) -> Self:
        """The plan of so many steps, if they are known: its warm-up, which keeps the rules."""
        plan = self.changed(steps=steps)
        if steps is not None:
            plan = plan.with_warmup(resolve_warmup(plan.first_stage, self.given.get("warmup")))
        return plan.checked()

    def with_warmup(self, warmup: int) -> Self:
        """The plan with another warm-up, such as that with which a resumed run has begun."""
        return self.changed(warmup=warmup)

    def with_flops(self, flops_a_step: float) -> Self:
        """The plan of the steps that its budget pays for, as many for each stage.

        Raises:
            ArgumentValueError: it pays for none, or for more than a run may have.
        """
        assert self.flops is not None
        steps = int(self.flops // (self.stages * flops_a_step)) * self.stages
        enough = self.stages * flops_a_step * 1.0005  # what is shown, rounded, pays for it, too
        expected = f"{enough:.4g} or more, the FLOPs of {self.stages} of its steps"
        fix = "Raise it, or take a smaller model or batch."
        self.check("flops", steps > 0, expected, fix)
        self.check("flops", COUNT.holds(steps), f"{COUNT.high} steps at most", "Lower it.")
        return self.with_steps(steps)


def described(args: Any, flops_a_step: float) -> str:
    """The budget, and what it pays for."""
    spent = flops_a_step * args.steps
    pays = f"{args.flops:.4g} FLOPs pay for {args.steps:,} steps of {flops_a_step:.4g}"
    return f"{pays}, {spent:.4g} in all"
