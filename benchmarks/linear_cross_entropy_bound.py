"""The time that the machine code of the vocabulary pass allows on an H200, beside the targets.

    python benchmarks/linear_cross_entropy_bound.py [--markdown docs/linear_cross_entropy.md]

For every shape with a target all launches are recorded. Triton's kernels are compiled for sm_90
without a GPU, and simulated (``bounds``); plain products and copies have measured rates. All of
this is arithmetic, not a measurement.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton
from bounds import ARCH, CLOCK, SMS, executed, moved, product

from compile_kernels import compile_launch
from fastplm.triton_kernels import linear_cross_entropy
from fastplm.triton_kernels._launch import Launch, record_launches
from fastplm.triton_kernels.linear_cross_entropy import products

_PAGE = """# The vocabulary pass: its kernels against their targets, by arithmetic

Written by `python benchmarks/linear_cross_entropy_bound.py --markdown docs/linear_cross_entropy.md`
with Triton {triton}. **No time on this page is measured**
([those of an H100](gpu.md#the-vocabulary-loss) are). H200: {sms} SMs at {clock:.3f} GHz,
4.3 TB/s; bf16, forward and backward, every row counts, with a bias.

- `launches`: every one, in its order: Triton's kernels by what their machine code issues and waits
  for (`tools/timeline.py`), those that only walk over stored logits by the bytes, at 80 % of the
  rate of memory; `z`, `dX`, `dW`: plain products by the vendor's library, 80 % of 790 TFLOP/s in
  whole waves; `copies`: the weight in whole vectors, the scaled gradient of the weight.
- `expected`: their sum.
- `floor`: the matrix products alone at 790 TFLOP/s, 6NVE kept and 8NVE recomputed; `must`: the
  target.

**Which flow runs**: keeping 16-bit logits costs two passes over them that nothing hides, computing
them again costs a product; by these rates they break even at 2 x 184 columns, but an H100 was
measured to do so between 128 and 256 (products of so few columns are slower). So rows of
192 columns or more keep them, as many as `expected_targets` says and as fit into 2 GiB; narrower
ones never. `logits_budget` overrides it.

{table}

**Why the kept flow has a pass over rows**: a product of our own could keep the statistics of `z` in
its epilogue, and make D in the prologues of `dX` and `dW`. The recomputed flow has such a forward:
for {label} it takes {forward:.0f} µs, and `z` with the pass {passes:.0f}. Its `bwd_input` and
`bwd_weight` take {backward:.0f} µs before they would make D, and `dX` with `dW` {products:.0f}. The
pass costs less time than the vendor's products save.
"""


class Shape(NamedTuple):
    """Rows, vocabulary, width; floor and must of forward + backward in ms; whether it samples."""

    label: str
    rows: int
    vocab: int
    width: int
    floors: tuple[float, float]
    must: float
    samples: bool = False


SHAPES = (
    Shape("BERT-base N 4,915", 4915, 30522, 768, (0.88, 1.17), 1.15),
    Shape("BERT-large N 4,915", 4915, 30522, 1024, (1.17, 1.56), 1.5),
    Shape("RoBERTa N 4,915", 4915, 50265, 768, (1.44, 1.92), 1.9),
    Shape("GPT-2 N 16,384", 16384, 50257, 768, (4.8, 6.4), 6.2),
    Shape("ELECTRA-small generator N 2,458", 2458, 30522, 128, (0.073, 0.097), 0.24),
    Shape("the same with sampling", 2458, 30522, 128, (0.073, 0.11), 0.27, samples=True),
)


class Product(NamedTuple):
    """A plain product, [m, k] by [k, n]."""

    m: int
    n: int
    k: int


def iterations(launch: Launch, name: str, shape: Shape) -> int:
    """How often all programs together run the inner loop, or all of the code without a loop."""
    programs, given = 1, launch.arguments
    for size in launch.grid:
        programs *= size
    steps_e = triton.cdiv(shape.width, given["BLOCK_E"]) if "BLOCK_E" in given else 1
    if name == "fwd":
        tiles = triton.cdiv(shape.vocab, given["BLOCK_V"])
        return launch.grid[0] * tiles * steps_e
    if name == "bwd_logits":
        return programs * steps_e
    if name == "bwd_input":
        first = given["chunk_start"]
        columns = min(given["chunk_columns"], shape.vocab - first)
        return launch.grid[0] * launch.grid[1] * triton.cdiv(columns, given["BLOCK_V"])
    if name == "bwd_weight":
        return programs * triton.cdiv(shape.rows, given["BLOCK_N"])
    if name == "combine":
        return programs * triton.cdiv(shape.vocab, given["split_columns"])
    if name == "reduce_input":
        return programs * given["num_splits"]
    if name in ("order", "mean"):  # "order" reads the rows twice
        return (1 + (name == "order")) * triton.cdiv(shape.rows, given["BLOCK"])
    return programs


def recorded(shape: Shape, kept: bool) -> list[Launch | Product]:
    """The launches of a step of that shape, in their order."""
    with record_launches(ARCH) as found:
        steps: list[Any] = found

        def multiply(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
            steps.append(Product(*a.shape[:1], *b.shape[1:], *b.shape[:1]))

        with mock.patch.object(products, "multiply", multiply):
            linear_cross_entropy.meta_case(
                torch.bfloat16,
                shape.width,
                shape.rows if kept else 0,
                rows=shape.rows,
                vocab=shape.vocab,
                temperature=1.0 if shape.samples else None,
            )
    return steps


def passes(launch: Launch, name: str, shape: Shape) -> float | None:
    """The time of a kernel that only reads and writes stored logits.

    A program's rows are in the L2 when it reads them again.
    """
    logits = 2.0 * shape.rows * shape.vocab
    if name == "rows":
        return moved(logits * (1 + launch.arguments["WRITES"]))
    return moved(logits) if name == "bwd_bias" else None


def times(shape: Shape, kept: bool) -> dict[str, float]:
    """Microseconds by launch; those of one name are summed."""
    found: dict[str, float] = {}
    reports: dict[tuple, Any] = {}
    products = iter(("z", "dX", "dW"))
    for step in recorded(shape, kept):
        if isinstance(step, Product):
            name, time = next(products), product(*step)
        else:
            name = step.kernel.__name__
            name = name.removeprefix("_linear_cross_entropy_").removesuffix("_kernel")
            time = passes(step, name, shape)
            if time is None:
                key = name, step.arguments.get("NEED_BIAS")
                if key not in reports:
                    reports[key] = compile_launch("linear_cross_entropy", shape.label, ARCH, step)
                steps_e = triton.cdiv(shape.width, step.arguments.get("BLOCK_E", shape.width))
                inner = steps_e if name == "fwd" else 1
                total = iterations(step, name, shape)
                time, _ = executed(reports[key], step, total, inner=inner)
        found[name] = found.get(name, 0.0) + time
    if kept:
        weight = 2.0 * shape.vocab * shape.width
        padded = 2 * 2 * weight if shape.vocab % 8 else 0.0
        found["copies"] = moved(padded + 3 * weight)
    return found


def rows() -> tuple[list[tuple[str, ...]], dict[str, float]]:
    """The table, and for the first shape the times of parts in both data flows."""
    compared: dict[str, float] = {}
    table = [("shape", "flow", "launches, µs", "**expected**, ms", "floor", "must")]
    for shape in SHAPES:
        for kept in (True, False):
            by_kernel = times(shape, kept)
            total = sum(by_kernel.values())
            if shape is SHAPES[0] and kept:
                compared["passes"] = by_kernel["z"] + by_kernel["rows"]
                compared["products"] = by_kernel["dX"] + by_kernel["dW"]
            elif shape is SHAPES[0]:
                compared["forward"] = by_kernel["fwd"]
                compared["backward"] = by_kernel["bwd_input"] + by_kernel["bwd_weight"]
            parts = ", ".join(f"{name} {time:.0f}" for name, time in by_kernel.items())
            flow = "kept" if kept else "recomputed"
            default = kept == (shape.width >= 192)
            number = f"{total / 1e3:.3g}"
            if default:
                flow, number = f"**{flow}**", f"**{number}**"
            table.append(
                (shape.label, flow, parts, number, f"{shape.floors[not kept]}", f"{shape.must}")
            )
    return table, compared


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    (head, *body), compared = rows()
    lines = [head, ("---",) * len(head), *body]
    table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    names = dict(triton=triton.__version__, sms=SMS, clock=CLOCK / 1e9, label=SHAPES[0].label)
    page = _PAGE.format(**names, **compared, table=table)
    if options.markdown:
        options.markdown.write_text(page)
    print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
