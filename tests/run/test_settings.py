"""What all settings have: what is given stays as it is, and a plan says what follows from it."""

from __future__ import annotations

import dataclasses

import pytest

from fastplm import cli
from fastplm.errors import ArgumentValueError
from fastplm.pretrain.settings import PretrainArguments
from fastplm.run.settings import Number, Plan, resolve_warmup

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


@pytest.mark.parametrize("kind", COMMANDS)
def test_one_value_stands_for_a_sequence_of_it_and_a_text_for_no_number(kind):
    given = NEEDED[kind.where]
    for each in dataclasses.fields(kind):
        if "Sequence" in str(each.type) and each.name in given:
            plan = kind(**given | {each.name: given[each.name][0]}).plan()
            assert getattr(plan, each.name) == given[each.name]
            assert plan.inputs()[each.name] == given[each.name]
        elif type(each.metadata["number"]) is Number:
            with pytest.raises(ArgumentValueError, match=f"`{each.name}` got 3; expected"):
                kind(**given | {each.name: "3"})


#: Words with a file that is not there, or no model, and the setting that the error names.
WRONG_PATHS = {
    "pretrain --arch bert-tiny --corpus NONE --steps 1 --out OUT": "corpus",
    "pretrain --arch bert-tiny --corpus SHORT --steps 1 --out OUT": "corpus",
    "pretrain --arch bert-tiny --corpus SHORT --tokenizer EMPTY --steps 1 --out OUT": "tokenizer",
    "distill --recipe minilm --teacher EMPTY --corpus SHORT --steps 1 --out OUT": "teacher",
    "distill --recipe minilm --teacher MODEL --corpus NONE --steps 1 --block-size 9 --out OUT": (
        "corpus"
    ),
    "classic --system quick-thoughts --corpus NONE --out OUT": "corpus",
    "finetune --task classification --model EMPTY --data SHORT --out OUT": "model",
    "finetune --task classification --model RUN --data SHORT --out OUT": "model",
    "finetune --task classification --model MODEL --data NONE --out OUT": "data",
    "finetune --task classification --model MODEL --data SHORT --out OUT": "data",
    "embed --model MODEL --data NONE --out OUT.npy": "data",
    "embed --model EMPTY --data SHORT --out OUT.npy": "model",
    "score --model MODEL --data NONE": "data",
    "score --metric minimal-pairs --model MODEL --data NONE": "data",
    "prompt --model MODEL --prompt PROMPT --data NONE": "data",
}


@pytest.mark.parametrize("words", WRONG_PATHS)
def test_an_error_names_the_setting_whose_path_is_wrong(words, checkpoint, tmp_path, capsys):
    (tmp_path / "SHORT").write_text("a b\n")
    (tmp_path / "PROMPT").write_text(
        '{"template": "{text} {label}", "labels": {"x": ["a"], "y": ["b"]}}'
    )
    (tmp_path / "EMPTY").mkdir()
    (tmp_path / "RUN" / "model").mkdir(parents=True)
    for file in ("run.json", "model/config.json"):
        (tmp_path / "RUN" / file).write_text("{}")
    paths = {
        "MODEL": checkpoint,
        **{n: tmp_path / n for n in "NONE OUT SHORT EMPTY RUN PROMPT".split()},
    }
    argv = [str(paths.get(word, word)) for word in words.split()]
    assert cli.main(argv) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith(f"fastplm: error: {argv[0]}: `{WRONG_PATHS[words]}` got "), line
    if "RUN" in words:
        assert f"Give {tmp_path / 'RUN' / 'model'}." in line
