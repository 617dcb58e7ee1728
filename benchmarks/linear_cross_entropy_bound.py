"""What the machine code of the vocabulary pass allows on an H200, beside the targets.

    python benchmarks/linear_cross_entropy_bound.py [--markdown docs/linear_cross_entropy.md]

For every shape with a target the launches are recorded, compiled for sm_90 with no GPU and read:
each kernel's inner loop takes at least the cycles of its busiest unit (``Report.bound``), times the
iterations that the shape needs, over the SMs that its programs fill. The kernel between the
products is held against memory as well. A bound by arithmetic, not a measurement: it leaves out
latency, launches, what stands outside the inner loop, and what does not overlap.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import NamedTuple

import torch
import triton

from fastplm.triton_kernels import linear_cross_entropy
from fastplm.triton_kernels._compile import compile_launch
from fastplm.triton_kernels._launch import Launch, record_launches
from fastplm.triton_kernels._sass import DEVICES

ARCH = 90
_, SMS, CLOCK, BYTES_PER_S = DEVICES[ARCH]

_PAGE = """# The vocabulary pass: its kernels against their targets, by arithmetic

Written by `python benchmarks/linear_cross_entropy_bound.py --markdown docs/linear_cross_entropy.md`
with Triton {triton}. **No time on this page is measured.** H200: {sms} SMs at {clock:.3f} GHz,
4.3 TB/s; bf16, forward and backward, every row counts, with a bias.

- `kernels`: cycles of the busiest unit of each kernel's inner loop ([kernels.md](kernels.md)) times
  the iterations that the shape needs; the kernel between the products: the time of its memory,
  where that is more. Kernels under 2 µs are summed up in the last number.
- `bound`: their sum, what the shipped machine code could reach if nothing waited.
- `floor`: the matrix products alone at 790 TFLOP/s, 6NVE kept and 8NVE recomputed; `must`: the
  target.

**Which flow runs**: keeping 16-bit logits costs two passes over them that nothing hides, computing
them again costs a product; on this device they break even at 2 x 184 columns, whatever N. Rows of
368 columns or more keep them, as many as fit into 2 GiB; narrower ones never. `logits_budget`
overrides it.

{table}
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


def iterations(launch: Launch, name: str, shape: Shape) -> int:
    """How often all programs together run the inner loop, or the whole code if there is none."""
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
        columns = min(given["split_columns"] * launch.grid[2], shape.vocab)
        return launch.grid[0] * launch.grid[1] * triton.cdiv(columns, given["BLOCK_V"])
    if name == "bwd_weight":
        return programs * triton.cdiv(shape.rows, given["BLOCK_N"])
    if name == "combine":
        return programs * triton.cdiv(shape.vocab, given["split_columns"])
    if name == "reduce_input":
        return programs * given["num_splits"]
    if name == "order":
        return 2 * triton.cdiv(shape.rows, given["BLOCK"])
    return programs


def times(shape: Shape, kept: bool) -> dict[str, float]:
    """Microseconds by kernel."""
    with record_launches(ARCH) as recorded:
        linear_cross_entropy.meta_case(
            torch.bfloat16,
            shape.width,
            shape.rows if kept else 0,
            rows=shape.rows,
            vocab=shape.vocab,
            temperature=1.0 if shape.samples else None,
        )
    found: dict[str, float] = {}
    reports: dict[tuple, float] = {}
    for launch in recorded:
        name = launch.kernel.__name__.removeprefix("_linear_cross_entropy_").removesuffix("_kernel")
        key = name, launch.arguments.get("NEED_BIAS"), launch.arguments.get("g_ptr") is None
        if key not in reports:
            report = compile_launch("linear_cross_entropy", shape.label, ARCH, launch)
            reports[key] = report.bound()[1]
        programs = torch.Size(launch.grid).numel()
        time = iterations(launch, name, shape) * reports[key] / min(SMS, programs) / CLOCK
        if name == "grad_logits":  # reads and writes all logits
            time = max(time, 4 * shape.rows * shape.vocab / BYTES_PER_S)
        found[name] = found.get(name, 0.0) + time * 1e6
    return found


def rows() -> list[tuple[str, ...]]:
    table = [("shape", "flow", "kernels, µs", "**bound**, ms", "floor", "must")]
    for shape in SHAPES:
        for kept in (True, False):
            by_kernel = times(shape, kept)
            total = sum(by_kernel.values()) / 1e3
            large = [f"{name} {time:.0f}" for name, time in by_kernel.items() if time >= 2]
            small = sum(time for time in by_kernel.values() if time < 2)
            parts = ", ".join([*large, f"the rest {small:.0f}"])
            flow = "kept" if kept else "recomputed"
            default = kept == (shape.width >= 368)
            flow, number = (
                (f"**{flow}**", f"**{total:.3g}**") if default else (flow, f"{total:.3g}")
            )
            table.append(
                (shape.label, flow, parts, number, f"{shape.floors[not kept]}", f"{shape.must}")
            )
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    head, *body = rows()
    lines = [head, ("---",) * len(head), *body]
    table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    page = _PAGE.format(triton=triton.__version__, sms=SMS, clock=CLOCK / 1e9, table=table)
    if options.markdown:
        options.markdown.write_text(page)
    print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
