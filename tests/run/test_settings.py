"""What all settings have: what is given stays as it is, and a plan says what follows from it."""

from __future__ import annotations

import dataclasses

import pytest

from fastplm import cli
from fastplm.errors import ArgumentValueError
from fastplm.pretrain.settings import PretrainArguments
from fastplm.run.settings import Plan, resolve_warmup

_RUN = {"corpus": ["text"], "steps": 40, "out": "out"}
NEEDED = {
    "pretrain": {"arch": "bert-tiny", **_RUN},
    "distill": {"recipe": "distilbert", "teacher": "teacher", **_RUN},
    "finetune": {"task": "classification", "data": "table", "out": "out", "model": "model"},
    "classic": {"system": "elmo", "corpus": ["text"], "out": "out"},
    "embed": {"model": "model", "data": "text", "out": "out.npy"},
    "prompt": {"model": "model", "prompt": "prompt", "data": "table"},
    "score": {"model": "model", "data": "text"},
}
COMMANDS = [pytest.param(each.settings, id=each.settings.where) for each in cli._commands()]


@pytest.mark.parametrize("kind", COMMANDS)
def test_nothing_changes_what_was_given(kind):
    given = NEEDED[kind.where]
    args = kind(**given)
    before = dataclasses.asdict(args)
    plan = args.plan()
    assert isinstance(plan, kind) and isinstance(plan, Plan) and plan.plan() is plan
    assert dataclasses.asdict(args) == before and plan.given == args.given == given
    assert dataclasses.asdict(dataclasses.replace(plan)) == dataclasses.asdict(plan)
    assert plan.changed(out="other").out == "other" and plan.out == args.out
    for each in dataclasses.fields(kind):
        assert plan.is_default(each.name) == (each.name not in given)
        for one in (args, plan):
            with pytest.raises(dataclasses.FrozenInstanceError):
                setattr(one, each.name, 1)


@pytest.mark.parametrize("command", ["pretrain", "distill"])
def test_what_follows_from_the_steps(command):
    kind = {each.settings.where: each.settings for each in cli._commands()}[command]
    given = NEEDED[command]
    plan = kind(**given).plan()
    assert (plan.steps, plan.warmup) == (40, 4) and plan.lr is not None
    more = plan.with_steps(700_000)
    assert (more.steps, more.warmup) == (700_000, 10_000) and plan.steps == 40
    assert plan.with_warmup(7).warmup == 7
    budget = kind(**given | {"steps": None, "flops": 1e6}).plan()
    assert (budget.steps, budget.warmup) == (None, None)
    paid = budget.with_flops(1e4)
    assert (paid.steps, paid.warmup) == (100, 10) and paid.is_default("warmup")
    with pytest.raises(ArgumentValueError, match="`flops` got 1000000.0; expected 2.001e"):
        budget.with_flops(2e6)
    slow = kind(**given | {"warmup": 30}).plan()
    assert slow.with_steps(50).warmup == 30
    with pytest.raises(ArgumentValueError, match="`warmup` got 30; expected 0 to 20"):
        slow.with_steps(20)


def test_a_warm_up_is_a_tenth_of_a_run():
    assert [resolve_warmup(steps, None) for steps in (1, 99, 100_000, 10**9)] == [
        0,
        9,
        10**4,
        10**4,
    ]
    assert resolve_warmup(10**9, 0) == 0


@pytest.mark.parametrize("command", ["pretrain", "finetune"])
def test_every_seed_is_one(command):
    kind = {each.settings.where: each.settings for each in cli._commands()}[command]
    assert kind(**NEEDED[command], seed=2**32 - 3, seeds=3).seeds == 3
    with pytest.raises(
        ArgumentValueError, match="`seeds` got 4 with --seed .*; expected seeds bel"
    ):
        kind(**NEEDED[command], seed=2**32 - 3, seeds=4)


def test_a_plan_of_a_pre_training_is_one_of_its_values():
    """What the values of another plan follow from is not asked again."""
    plan = PretrainArguments(**NEEDED["pretrain"], batch_size=8).plan()
    again = dataclasses.replace(plan, steps=80)
    assert (again.lr, again.warmup) == (plan.lr, 4) and not again.is_default("lr")
