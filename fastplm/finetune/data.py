"""The examples of a run: read, divided, and made into features."""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Sequence

import torch

from fastplm.data.examples import Example, subset
from fastplm.errors import DataError, about, check
from fastplm.finetune.mixture import marked, read_parts
from fastplm.finetune.models import check_model, longest, pooling_of, read_config, read_tokenizer
from fastplm.finetune.settings import FinetuneArguments
from fastplm.finetune.tasks import task_class
from fastplm.finetune.tasks._task import Task

#: The share of the examples that is held out to judge by.
_HELD_OUT = 0.1


def prepare_task(args: FinetuneArguments, *, choosing: bool = False) -> Task:
    """The task of a run, with its examples and tokenizer.

    Args:
        args: the settings.
        choosing: whether it is to choose a setting by: its training examples are then divided
            again, and those that the run is judged by are not in it.
    """
    args = args.plan()
    kind, tokenizer, config = task_class(args.task), read_tokenizer(args), read_config(args)
    check_model(args, config)
    args = args.changed(pooling=pooling_of(args, config))
    length = longest(args, config, tokenizer)
    train, test, known = _divided(args, kind, length)
    assert not isinstance(args.max_samples, list), "see FinetuneArguments.curve"
    train = subset(train, args.max_samples)
    if choosing:
        fix = "Give one --learning-rate."
        train, test = hold_out(train, _HELD_OUT, kind.labels(known, args), fix)
        test = subset(test, args.max_eval_samples)
    return kind(args, config, train, test, tokenizer, length, known)


def _divided(
    args: FinetuneArguments, kind: type[Task], length: int
) -> tuple[list[Example], list[Example], list[Example]]:
    """The examples to train on, those to judge by, and those whose labels are the classes."""
    train: list[Example] = []
    test: list[Example] = []
    for number, (name, part) in enumerate(read_parts(args).items()):
        to_train, to_judge, _ = _divided(part, kind, length)
        train += marked(to_train, number, name, part.prefix)
        test += marked(to_judge, number, name, part.prefix)
    if train:
        return train, test, train
    _check_other_files(args)
    with about(args.where, "data"):
        train = known = kind.read(args, args.data, args.targets, length)
    if args.own_head:
        test = known
    elif args.eval_data is None:
        train, test = hold_out(train, _HELD_OUT, kind.labels(train, args))
    else:
        with about(args.where, "eval_data"):
            test = kind.read(args, args.eval_data, args.eval_targets, length)
    test = subset(test, args.max_eval_samples)
    return test if args.own_head else train, test, known


def _check_other_files(args: FinetuneArguments) -> None:
    """Check that a model is not judged by what it was trained on."""
    pairs = [("eval_data", args.eval_data, "data")]
    pairs += [("eval_targets", path, "targets") for path in args.eval_targets or ()]
    for name, path, other in pairs:
        trained_on = getattr(args, other)
        try:
            same = None not in (path, trained_on) and os.path.samefile(str(path), trained_on)
        except (OSError, ValueError):
            continue  # reading the file will raise an error about its path
        expected = "a file of examples that the model is not trained on"
        fix = "Give another file, or leave it out: a tenth of --data is then held out."
        args.check(name, not same, expected, fix, f"{path}, the file of --{other}")


def hold_out(
    examples: Sequence[Example],
    share: float,
    labels: Callable[[Example], Collection[str]] = lambda example: (),
    fix: str = "Give --eval-data.",
) -> tuple[list[Example], list[Example]]:
    """Examples to train on, and about ``share`` of them to judge by; the same ones every time.

    Examples of one group (the questions about one paragraph) land on one side. The same
    share of the examples of each label is held out, and never all of them.

    Args:
        examples: all of a file.
        share: of the groups.
        labels: of an example; the rarest is the one that it counts for.
        fix: what the error advises.

    Raises:
        DataError: there is one group alone, or none without which all labels are there.
    """
    groups: dict[int, set[str]] = defaultdict(set)
    for example in examples:
        groups[example.group].update(labels(example))
    names = sorted(groups)
    order = torch.randperm(
        len(names), generator=torch.Generator().manual_seed(0), device="cpu"
    ).tolist()
    left = Counter(label for found in groups.values() for label in found)
    strata: dict[str, list[int]] = defaultdict(list)
    for index in order:
        found = groups[names[index]]
        strata[min(found, key=lambda label: (left[label], label), default="")].append(names[index])
    # The first of ten has place 0.05, of a hundred 0.005: so small places are a share of each.
    places = {
        group: (rank + 0.5) / len(stratum)
        for stratum in strata.values()
        for rank, group in enumerate(stratum)
    }
    held: set[int] = set()
    for index in sorted(order, key=lambda index: places[names[index]]):
        found = groups[names[index]]
        wanted = len(held) < max(1, round(share * len(names)))
        if wanted and len(names) > 1 and all(left[label] > 1 for label in found):
            left.subtract(found)
            held.add(names[index])
    why = " of one kind of origin" if len(names) == 1 else ", each the only one with its label"
    got, expected = f"{len(examples)} examples{why}", "enough to hold some out"
    check(bool(held), "finetune", "data", got, expected, fix, DataError)
    rest = [example for example in examples if example.group not in held]
    return rest, [example for example in examples if example.group in held]
