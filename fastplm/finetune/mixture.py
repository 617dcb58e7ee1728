"""Several tasks of sequence to sequence for one model, as T5 was trained."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import replace

from fastplm.data.examples import Example
from fastplm.errors import DataError
from fastplm.finetune.settings import FinetuneArguments
from fastplm.run.config_file import read

#: What a part of a mixture may say; all else is the same for all parts.
_OF_A_PART = ("data", "targets", "eval_data", "eval_targets", "text_columns", "prefix")
_EXPECTED = "YAML: a name for each task, with its data, prefix and the like"


def read_parts(args: FinetuneArguments) -> dict[str, FinetuneArguments]:
    """The settings of each task of a mixture, by its name; none if ``--data`` is no YAML file.

    The file holds, by name, what else would be options: ``summaries: {data: a.tsv, prefix:
    "summarize: "}``.

    Raises:
        FastplmError: the file cannot be read, holds something else, or says something wrong of a
            task.
    """
    if not args.is_mixture:
        return {}

    def check(able: bool, got: str, expected: str = _EXPECTED, fix: str = "Correct it.") -> None:
        args.check("data", able, expected, fix, f"{args.data}{got}", DataError)

    found = read(args.where, str(args.data), "data")
    check(len(found) > 1, ", which has no two tasks by name")
    parts = {}
    for name, given in found.items():
        check(isinstance(given, dict), f", where {name} has no settings")
        for key, value in given.items():
            close = difflib.get_close_matches(str(key), _OF_A_PART, n=1)
            expected = f"some of {', '.join(_OF_A_PART)}"
            fix = f"Did you mean {close[0]}?" if close else "Leave it out."
            check(key in _OF_A_PART, f", where {name} has {key!r}", expected, fix)
            several = isinstance(value, list) and key in ("eval_targets", "text_columns")
            texts = value if several else [value]
            able = all(isinstance(text, str) for text in texts)
            check(able, f", where {key} of {name} is {value!r}", "a text", "Put it in quotes.")
        check("data" in given, f", where {name} has no data", "a file for each task")
        check(not str(given["data"]).endswith((".yaml", ".yml")), f", where {name} is a mixture")
        parts[str(name)] = replace(args, mixture_cap=None, mixture_temperature=1.0, **given)
    return parts


def marked(examples: list[Example], number: int, name: str, prefix: str) -> list[Example]:
    """The examples of a task, with its name and its prefix, and groups that no other task has."""
    first = number << 40
    return [replace(e, group=first | e.group, part=name, prefix=prefix) for e in examples]


def indices_of_parts(examples: Sequence[Example]) -> dict[str, list[int]]:
    """The places of the examples of each task; none if there are no tasks with names."""
    found: dict[str, list[int]] = {}
    for index, example in enumerate(examples):
        if example.part:
            found.setdefault(example.part, []).append(index)
    return found


def counts_of_epoch(args: FinetuneArguments, sizes: Sequence[int]) -> list[int]:
    """How many examples of each task an epoch reads: of n the share of ``min(n, K) ** (1 / T)``.

    They are as many together as with T = 1, which is examples-proportional mixing.

    Args:
        args: ``mixture_cap`` is K, ``mixture_temperature`` T.
        sizes: the examples of each task.

    Source: Raffel et al. 2020 (arXiv 1910.10683), §3.5.2.
    """
    limited = [min(size, args.mixture_cap or size) for size in sizes]
    if args.mixture_temperature == 1:
        return limited
    total, rates = sum(limited), [size ** (1 / args.mixture_temperature) for size in limited]
    exact = [total * rate / sum(rates) for rate in rates]
    counts = [int(each) for each in exact]
    nearest = sorted(range(len(sizes)), key=lambda i: counts[i] - exact[i])
    for i in nearest[: total - sum(counts)]:  # those that lose most by rounding down
        counts[i] += 1
    return counts


def of_epoch(parts: Sequence[Sequence[int]], counts: Sequence[int], epoch: int) -> list[int]:
    """What an epoch reads: of each task the next ones, and again from the first where they end.

    Args:
        parts: the examples of each task, in a random order.
        counts: how many of each.
        epoch: counted from 0.
    """
    chosen = []
    for part, count in zip(parts, counts, strict=True):
        chosen += [part[(epoch * count + i) % len(part)] for i in range(count)]
    return chosen
