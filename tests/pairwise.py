"""Tables of cases instead of full products: any two values of two parameters meet in a case."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import pytest

Values = Iterable[Any] | Mapping[str, Any]


def table(sizes: tuple[int, ...], strength: int = 2) -> list[tuple[int, ...]]:
    """Rows of indices in which every ``strength`` columns hold every combination of their values.

    The search is greedy: the next row is the first that holds the most combinations not yet seen.
    """
    strength = min(strength, len(sizes))
    columns = list(itertools.combinations(range(len(sizes)), strength))

    def held(row: tuple[int, ...]) -> set[tuple[tuple[int, int], ...]]:
        return {tuple((column, row[column]) for column in group) for group in columns}

    candidates = {row: held(row) for row in itertools.product(*map(range, sizes))}
    missing = set().union(*candidates.values())
    rows = []
    while missing:
        row = max(candidates, key=lambda row: len(candidates[row] & missing))
        missing -= candidates.pop(row)
        rows.append(row)
    return sorted(rows)


def pairwise(strength: int = 2, **parameters: Values) -> pytest.MarkDecorator:
    """``pytest.mark.parametrize`` over a table of these values; the keys of a mapping are ids."""
    named = [
        list(values.items()) if isinstance(values, Mapping) else [(str(v), v) for v in values]
        for values in parameters.values()
    ]
    cases = []
    for row in table(tuple(map(len, named)), strength):
        chosen = [values[index] for values, index in zip(named, row, strict=True)]
        cases.append(
            pytest.param(*(value for _, value in chosen), id="-".join(name for name, _ in chosen))
        )
    return pytest.mark.parametrize(tuple(parameters), cases)
