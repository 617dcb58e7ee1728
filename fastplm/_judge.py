"""How the rules of ``fastplm/_rules.py`` fare in measured rows of a CPU."""

from __future__ import annotations

import bisect
import itertools
import json
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fastplm import _rules
from fastplm._rules import RULES, SQUARE, Rule

#: How much smaller the gain of a product of fewer rows is in a model than in a series with one
#: weight, which was always in the caches.
_WARM_CACHE_DISCOUNT, _FEW_ROWS = 1.25, 64
#: A cell loses below this ratio; another bound is said if all cells together get so much faster.
LOSES, _BETTER = 0.98, 1.005


class Series(NamedTuple):
    """The measurements of one form and dtype of an op: times over a grid, the last axis fastest."""

    axes: list[list[int]]
    ours: list[float]  # microseconds
    stock: list[float]
    weights: int = 1  # that took turns, of a product

    def speedup(self, sizes: Sequence[int]) -> float:
        """The speedup at these sizes, interpolated on a logarithmic scale, or at the nearest."""
        cells = [(0, 1.0)]  # places in the grid, and their weights
        for size, axis in zip(sizes, self.axes, strict=False):
            above = bisect.bisect_left(axis, size)
            if 0 < above < len(axis):
                share = math.log(size / axis[above - 1]) / math.log(axis[above] / axis[above - 1])
                around = [(above - 1, 1 - share), (above, share)]
            else:
                around = [(min(above, len(axis) - 1), 1.0)]
            cells = [
                (place * len(axis) + at, weight * part)
                for place, weight in cells
                for at, part in around
            ]
        return math.prod(
            (self.stock[place] / self.ours[place]) ** weight for place, weight in cells
        )


class Cell(NamedTuple):
    """The sizes of a call, and how many times as fast as stock PyTorch csrc/ is there."""

    op: str
    series: str
    words: frozenset[str]
    sizes: tuple[int, ...]
    named: dict[str, int]
    speedup: float

    @property
    def rule(self) -> Rule:
        return _rules.rule_of(RULES[self.op], self.words, self.named)

    @property
    def ratio(self) -> float:
        """The speed of what the rules choose over that of the other one."""
        return self.speedup if self.rule.backend == "cpp" else 1 / self.speedup

    def __str__(self) -> str:
        return f"{self.ratio:.2f} at {self.series} {' '.join(map(str, self.sizes))}"


def load(path: Path) -> dict[str, Any]:
    """The contents of a file of rows."""
    return json.loads(path.read_text("utf-8"))


def cells_of(
    contents: dict[str, Any],
    sizes_of: Callable[[str, str, Series], Iterable[tuple[int, ...]]] | None = None,
) -> list[Cell]:
    """What was measured, or what follows from it for ``sizes_of(op, form, series)``."""
    found = []
    for op, forms in contents["ops"].items():
        for key, fields in forms.items():
            series = Series(**fields)
            form, dtype = key.removesuffix(" native").rsplit(" ", 1)
            native = key.endswith(" native")
            words = _rules.words_of(form, getattr(torch, dtype), contents["kind"], native)
            grid = sizes_of(op, form, series) if sizes_of else itertools.product(*series.axes)
            for sizes in grid:
                speedup = series.speedup(sizes)
                if op == "linear":
                    sizes = (*sizes, SQUARE)[:3]  # older series are of square weights
                    if series.weights == 1 and sizes[0] < _FEW_ROWS:
                        speedup /= _WARM_CACHE_DISCOUNT
                named = _rules.sizes_by_name(op, sizes)
                found.append(Cell(op, key, words, sizes, named, speedup))
    return found


class Judgement(NamedTuple):
    """How the rules fare in some cells: geometric means of the speedup over stock PyTorch."""

    cells: int
    best: float  # with the faster one in each cell
    chosen: float
    losing: list[Cell]  # where the other one is faster, the worst first

    @property
    def kept(self) -> float:
        return self.chosen / self.best


def judge(cells: Sequence[Cell]) -> Judgement:
    best = statistics.fmean(max(math.log(cell.speedup), 0.0) for cell in cells)
    chosen = statistics.fmean(
        math.log(cell.speedup) if cell.rule.backend == "cpp" else 0.0 for cell in cells
    )
    losing = sorted((cell for cell in cells if cell.ratio < LOSES), key=lambda cell: cell.ratio)
    return Judgement(len(cells), math.exp(best), math.exp(chosen), losing)


def better_bounds(op: str, cells: Sequence[Cell]) -> Iterator[str]:
    """A line for each bound of a rule of an op with which these cells would be faster."""

    def gain(rules: tuple[Rule, ...]) -> float:
        decided = ((_rules.rule_of(rules, cell.words, cell.named), cell.speedup) for cell in cells)
        return statistics.fmean(
            math.log(s) if rule.backend == "cpp" else 0.0 for rule, s in decided
        )

    rules = RULES[op]
    now = gain(rules)
    for place, rule in enumerate(rules):
        for part, (size, sign, _) in rule.bounds.items():
            best = (now, part)
            for value in sorted({cell.named[size] for cell in cells}):
                other = rule._replace(when=rule.when.replace(part, f"{size} {sign} {value}"))
                tried = gain((*rules[:place], other, *rules[place + 1 :]))
                best = max(best, (tried, f"{size} {sign} {value}"))
            factor = math.exp(best[0] - now)
            if factor > _BETTER:
                yield f'"{best[1]}" in "{rule.when}": {factor:.3f} times as fast'


def report(contents: dict[str, Any]) -> Iterator[str]:
    """Lines about each op: what the rules keep of the gain, where they lose, better bounds."""
    for op in sorted(contents["ops"]):
        cells = cells_of({**contents, "ops": {op: contents["ops"][op]}})
        found = judge(cells)
        yield (
            f"{op}: {found.chosen:.3f} times as fast as stock PyTorch by the rules, "
            f"{found.best:.3f} at best: {found.kept:.1%}"
        )
        if found.losing:
            yield f"  loses in {len(found.losing)} of {found.cells} cells: {found.losing[0]}"
        yield from (f"  better: {line}" for line in better_bounds(op, cells))
