"""Judges the rules of ``fastplm/_rules.py`` by measured rows of CPUs.

    python benchmarks/judge_rules.py [--cells] [FILE…]   # default: the committed ones
    python benchmarks/judge_rules.py --page > docs/rules.md

A line for each op and file: the geometric mean over all cells of the speedup over stock PyTorch by
the rules, and with the faster one in each cell; what the rules keep of it; the cells where the
other one is faster by more than 2 %, and the worst of them. Then the same for the calls of models,
between measured sizes interpolated. ``--cells`` lists all losing cells.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from fastplm._judge import Series, load, table
from fastplm._rules import RULES, aspect

ROWS = Path(__file__).parent / "results/cpu/rules"
#: Widths of ELECTRA-small, MiniLM, T5-small, and of BERT-base, GPT-2 and T5-base.
WIDTHS = (256, 384, 512, 768)
#: Rows of a step of generation, of short texts and of batches.
MODEL_ROWS = (1, 2, 4, 8, 16, 24, 32, 64, 100, 128, 200, 256, 512, 1024)
#: (queries, keys) of a step of generation, and of texts.
LENGTHS = ((1, 64), (1, 256), (1, 512), (16, 16), (32, 32), (64, 64), (128, 128), (512, 512))


_INTRODUCTION = """# Which implementation runs on a CPU

`python benchmarks/judge_rules.py --page` writes this page.

An op that PyTorch has, too, runs in C++ (`csrc/`) or by PyTorch's function, whichever is faster. An
ordered list of rules decides (`fastplm/_rules.py`): the first one that holds for a call.
`fastplm.explain` shows it. Each rule names the measured row that it stands on: the file in
`benchmarks/results/cpu/rules/`, the series, the sizes, and how many times as fast as PyTorch C++
was there; products of fewer than 64 rows in older series, whose one weight stayed in the caches,
count 1.25 times less. The rules are a few thresholds, so that they hold on other CPUs of the level
as well; the tables below say what that costs on the CPUs that were measured. On other CPUs than x86
with AVX2, and in fp64, PyTorch's function runs.

`fastplm measure` times the same on your machine, writes the rows to a file, and says what the rules
keep there, where they lose, and which other bounds would be better. It does not change what runs.

## The rules

A rule holds if all its words and bounds do. *intel* means that MKL uses the level's vectors
fully, *zen5* an AMD CPU of family 26, *half* fp16 or bf16. *native* says that the CPU has
instructions for products of the dtype, *emulated* that it has none; *training* is a call
that can have a gradient; *conv1d* a weight whose columns lie together, as in GPT-2. K is
2^10, M is 2^20. The sizes: *products* is rows times the elements of the weight; *keys* and
*scores* are those of all heads of all samples.
"""


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


def page(files: list[dict[str, Any]]) -> Iterator[str]:
    """docs/rules.md."""
    yield _INTRODUCTION
    for op, rules in RULES.items():
        yield f"### {op}\n\n| | rule | it runs | row |\n|---|---|---|---|"
        for number, rule in enumerate(rules, 1):
            runs = "csrc/" if rule.backend == "cpp" else "PyTorch"
            yield f"| {number} | {rule.when} | {runs} | {rule.row} |"
        yield ""
    yield "## What they keep\n\nAll measured cells:\n"
    yield from table(files)
    yield "\nThe calls of models, between measured sizes interpolated:\n"
    yield from table(files, of_models)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cells", action="store_true")
    parser.add_argument("--page", action="store_true")
    parser.add_argument("files", nargs="*", type=Path)
    options = parser.parse_args()
    files = [load(path) for path in options.files or sorted(ROWS.glob("*.json"))]
    if options.page:
        print("\n".join(page(files)))
        return
    for sizes_of in (None, of_models):
        print("\n".join(table(files, sizes_of, options.cells)), end="\n\n")


if __name__ == "__main__":
    main()
