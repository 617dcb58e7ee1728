"""Judges the rules of ``fastplm/_rules.py`` by all measured rows of CPUs.

    python benchmarks/judge_rules.py [--cells] [FILE…]

A line for each op and file: how many times as fast as stock PyTorch the choice by rule is (the
geometric mean over all cells), the same with the faster one in each cell, what the rules keep of
it, the cells where the other one is faster by more than 2 %, and the worst of them. Then the same
for the calls of models, between measured sizes interpolated. ``--cells`` lists all losing cells.
Without FILE the committed rows are judged, and docs/rules.md is written.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from fastplm._judge import Series, cells_of, judge, load
from fastplm._rules import aspect

ROOT = Path(__file__).parent.parent
ROWS = ROOT / "benchmarks/results/cpu/rules"
#: Widths of ELECTRA-small, MiniLM, T5-small, and of BERT-base, GPT-2 and T5-base.
WIDTHS = (256, 384, 512, 768)
#: Rows of a step of generation, of short texts and of batches.
MODEL_ROWS = (1, 2, 4, 8, 16, 24, 32, 64, 100, 128, 200, 256, 512, 1024)
#: (queries, keys) of a step of generation, and of texts.
LENGTHS = ((1, 64), (1, 256), (1, 512), (16, 16), (32, 32), (64, 64), (128, 128), (512, 512))


def within(series: Series, *sizes: int) -> bool:
    """Whether sizes lie between measured ones."""
    pairs = zip(sizes, series.axes, strict=False)
    return all(axis[0] <= size <= axis[-1] for size, axis in pairs)


def of_models(op: str, form: str, series: Series) -> Iterable[tuple[int, ...]]:
    """The sizes that an op has in models, as far as a series was measured."""
    if op == "linear":
        widths = (768,) if form.startswith("conv1d") else WIDTHS  # GPT-2
        shapes = [(n * e, k * e) for e in widths for n, k in ((1, 1), (4, 1), (1, 4), (3, 1))]
        for rows, (n, k) in itertools.product(MODEL_ROWS, shapes):
            if within(series, rows, n * k):
                yield rows, n * k, aspect(n, k)
    elif op == "attention":
        for (queries, keys), heads in itertools.product(LENGTHS, (4, 8, 12, 24, 96)):
            yield queries, keys, heads
    elif op == "encoder":
        yield from itertools.product((8, 16, 32, 64, 128, 256, 512, 2048), WIDTHS)
    else:
        inner = 4 if op == "gelu" else 1
        for elements in sorted({rows * e * inner for rows in MODEL_ROWS for e in WIDTHS}):
            if within(series, elements):
                yield (elements,)


def lines(files: list[dict[str, Any]], sizes_of: Any, show_cells: bool) -> Iterator[str]:
    """The lines of a table."""
    yield "| op | rows | cells | by rule | at best | kept | lose | worst |"
    yield "|---|---|---|---|---|---|---|---|"
    for op in sorted({op for contents in files for op in contents["ops"]}):
        for contents in files:
            if op not in contents["ops"]:
                continue
            cells = cells_of({**contents, "ops": {op: contents["ops"][op]}}, sizes_of)
            found = judge(cells)
            worst = str(found.losing[0]) if found.losing else ""
            yield (
                f"| {op} | {contents['kind']} | {found.cells} | {found.chosen:.3f} "
                f"| {found.best:.3f} | {found.kept:.1%} | {len(found.losing)} | {worst} |"
            )
            if show_cells:
                yield from (f"    {cell.rule.backend} {cell}" for cell in found.losing)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cells", action="store_true")
    parser.add_argument("files", nargs="*", type=Path)
    options = parser.parse_args()
    files = [load(path) for path in options.files or sorted(ROWS.glob("*.json"))]
    for sizes_of in (None, of_models):
        print("\n".join(lines(files, sizes_of, options.cells)), end="\n\n")


if __name__ == "__main__":
    main()
