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
from fastplm._rules import RULES, SQUARE, Rule, first, with_words

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


#: ``sizes_of(op, form, series)``: the sizes to judge.
SizesOf = Callable[[str, str, Series], Iterable[tuple[int, ...]]]


class Cell(NamedTuple):
    """The sizes of a call, and how many times as fast as stock PyTorch csrc/ is there."""

    series: str
    op: str
    words: frozenset[str]
    sizes: tuple[int, ...]
    named: dict[str, int]
    speedup: float

    @property
    def rule(self) -> Rule:
        return first(with_words(RULES[self.op], self.words), self.named)

    @property
    def ratio(self) -> float:
        """The speed of what the rules choose over that of the other one."""
        return self.speedup if self.rule.backend == "cpp" else 1 / self.speedup

    def __str__(self) -> str:
        return f"{self.ratio:.2f} at {self.series} {' '.join(map(str, self.sizes))}"


def load(path: Path) -> dict[str, Any]:
    """The contents of a file of rows."""
    return json.loads(path.read_text("utf-8"))


def cells_of(contents: dict[str, Any], op: str, sizes_of: SizesOf | None = None) -> list[Cell]:
    """The measured sizes of an op, or those of ``sizes_of(op, form, series)``, interpolated."""
    found = []
    for key, fields in contents["ops"][op].items():
        series = Series(**fields)
        form, dtype = key.removesuffix(" native").rsplit(" ", 1)
        native = key.endswith(" native")
        words = _rules.words_of(form, getattr(torch, dtype), contents["kind"], native)
        for sizes in sizes_of(op, form, series) if sizes_of else itertools.product(*series.axes):
            speedup = series.speedup(sizes)
            if op == "linear":
                sizes = (*sizes, SQUARE)[:3]  # older series are of square weights
                if series.weights == 1 and sizes[0] < _FEW_ROWS:
                    speedup /= _WARM_CACHE_DISCOUNT
            found.append(Cell(key, op, words, sizes, _rules.sizes_by_name(op, sizes), speedup))
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
    chosen = _gain(cells, RULES[cells[0].op])
    losing = sorted((cell for cell in cells if cell.ratio < LOSES), key=lambda cell: cell.ratio)
    return Judgement(len(cells), math.exp(best), math.exp(chosen), losing)


def better_bounds(contents: dict[str, Any]) -> Iterator[str]:
    """A line for each bound of a rule with which all cells of its op would be faster."""
    for op in contents["ops"]:
        cells, rules = cells_of(contents, op), RULES[op]
        now = _gain(cells, rules)
        for place, rule in enumerate(rules):
            for part, (size, sign, _) in rule.bounds.items():
                best = (now, part)
                for value in sorted({cell.named[size] for cell in cells}):
                    other = rule._replace(when=rule.when.replace(part, f"{size} {sign} {value}"))
                    tried = _gain(cells, (*rules[:place], other, *rules[place + 1 :]))
                    best = max(best, (tried, f"{size} {sign} {value}"))
                if (factor := math.exp(best[0] - now)) > _BETTER:
                    yield f'{op}: "{best[1]}" in "{rule.when}" is {factor:.3f} times as fast'


def _gain(cells: Sequence[Cell], rules: tuple[Rule, ...]) -> float:
    chosen = (first(with_words(rules, cell.words), cell.named).backend for cell in cells)
    return statistics.fmean(
        math.log(cell.speedup) if backend == "cpp" else 0.0
        for cell, backend in zip(cells, chosen, strict=True)
    )


def table(
    files: Sequence[dict[str, Any]], sizes_of: SizesOf | None = None, list_losing: bool = False
) -> Iterator[str]:
    """A line for each op and file of rows, in Markdown."""
    yield "| op | CPU | cells | by rule | at best | kept | lose | worst |"
    yield "|---|---|---|---|---|---|---|---|"
    for op in RULES:
        for contents in files:
            if op in contents["ops"]:
                found = judge(cells_of(contents, op, sizes_of))
                worst = str(found.losing[0]) if found.losing else ""
                yield (
                    f"| {op} | {contents['kind']} | {found.cells} | {found.chosen:.3f} "
                    f"| {found.best:.3f} | {found.kept:.1%} | {len(found.losing)} | {worst} |"
                )
                if list_losing:
                    yield from (f"    {cell.rule.backend} {cell}" for cell in found.losing)
