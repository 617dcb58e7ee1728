"""A training step of every family, launch by launch, without a GPU: ``python
benchmarks/step_report.py``.

``tools/step_model.py`` counts launches, bytes and FLOPs on a device that does not exist, and says
how long an H100 needs for them at the least. This script has the cases, and writes the rows of
``results/static/steps.csv`` and the page ``docs/step-model.md``.

A step has forward and backward by bf16 autocast with dropout 0.1, clipping, and AdamW. Models with
2 and 3 layers are counted; each further layer costs as much as the third. An encoder-decoder has a
layer on each side. Of ModernBERT, whose every third layer has no window, 3 and 6 are counted.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

import step_model
from step_model import Batch, Launch

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "static" / "steps.csv"
CALLS = RESULTS.with_name("layer_calls.csv")
PAGE = ROOT / "docs" / "step-model.md"
ARCHS = """
    bert-base bert-large roberta-base albert-base electra-small gpt2-small bart-base t5-base
    xlm-roberta-base modernbert-base deberta-v3-base
""".split()
SHAPES, PADDINGS = ("256x128", "64x512"), (0.0, 0.35)
#: Transformers with SDPA as a flash kernel; the same as Inductor fuses it; fastplm with a capacity
#: (``unpad=N``, ``masked_positions``), as a captured step has it; that one compiled; fastplm with
#: what Transformers' collator returns.
VARIANTS = ("transformers", "compiled", "fastplm", "fastplm compiled", "fastplm, no capacity")
MOST_NAMED = 8

Row = dict[str, str]
#: (part, operator) and its launches, bytes, FLOPs, seconds, seconds of products.
Totals = dict[tuple[str, str], tuple[float, ...]]


def totals(launches: Iterable[Launch]) -> Totals:
    found: Totals = {}
    for one in launches:
        cost = (1, one.bytes, one.flops, one.seconds, one.seconds * one.is_product)
        before = found.get((one.part, one.name), (0.0,) * len(cost))
        found[one.part, one.name] = tuple(map(sum, zip(before, cost, strict=True)))
    return found


def plus(one: Totals, other: Totals, times: float) -> Totals:
    nothing = (0.0,) * 5
    return {
        key: tuple(
            a + times * b
            for a, b in zip(one.get(key, nothing), other.get(key, nothing), strict=True)
        )
        for key in {**one, **other}
    }


def count(arch: str, shape: str, padding: float, variant: str) -> tuple[Totals, Totals, int]:
    """(a step, a layer in it, elements of a tensor [N, E])."""
    import transformers

    from fastplm import models
    from fastplm.pretrain.presets import PRESETS
    from steps import IGNORED, PlainElectra, Step, replaced

    rows, length = map(int, shape.split("x"))
    case = Step(arch, rows, length, padding, PRESETS[arch].dropout)
    config, given, lengths = case.config(), case.make("cpu"), case.lengths().double()
    labelled = int((given["labels"] != IGNORED).sum())
    batch = Batch(labelled, float(lengths.square().mean() / lengths.mean() ** 2))
    ours, own = variant.startswith("fastplm"), ("masked_positions", "sample_index")
    if not ours or variant == "fastplm, no capacity":
        given = {name: value for name, value in given.items() if name not in own}
    if ours and variant != "fastplm, no capacity":
        given["unpad"] = int(lengths.sum())
        if case.family.target_share:
            given["decoder_unpad"] = int(case.target_lengths().sum())
    if not ours and not padding:  # a mask of ones is read, and left out
        del given["attention_mask"]
    if not ours and case.family.batch is replaced:
        # No draws, and a loss that takes the logits of padding, too: both would read values.
        given |= dict(replaced_ids=given["input_ids"], attention_mask=None)

    def run(layers: int) -> list[Launch]:
        changed = replace(case, layers=layers).config()

        def make() -> Any:
            if ours:
                made = getattr(models, case.family.model)(changed)
            elif case.family.batch is replaced:
                made = PlainElectra(changed, "sdpa")
            else:
                kind = getattr(transformers, case.family.model)
                made = kind._from_config(changed, attn_implementation=case.family.attention)
            return made.train()

        if "compiled" in variant:
            found = step_model.compiled_step(make, given, batch)
        else:
            found = step_model.step(make, given, batch, may_read=variant != "fastplm")
        return found + step_model.update(make)

    few, more = (3, 6) if getattr(config, "layer_types", None) else (2, 3)
    begun = totals(run(few))
    layer = plus(totals(run(more)), begun, -1)
    if more - few > 1:
        layer = plus({}, layer, 1 / (more - few))
    sizes = getattr(config, "discriminator", config)
    elements = rows * length * sizes.hidden_size
    return plus(begun, layer, sizes.num_hidden_layers - few), layer, elements


def row(arch: str, shape: str, padding: float, variant: str) -> Row:
    import transformers

    from harness import machine_line

    step, layer, elements = count(arch, shape, padding, variant)

    def total(found: Totals, column: int, *parts: str) -> float:
        chosen = parts or ("forward", "backward", "optimizer")
        return sum(cost[column] for (part, _), cost in found.items() if part in chosen)

    beside = {
        key: cost
        for key, cost in layer.items()
        if key[0] != "optimizer" and not cost[2]  # no product, no attention
    }
    by_operator: dict[str, float] = {}
    for (_, name), cost in step.items():
        by_operator[name] = by_operator.get(name, 0.0) + cost[1] / 1e9
    largest = sorted(by_operator.items(), key=lambda item: -item[1])[:MOST_NAMED]
    about = machine_line()
    numbers = dict(
        date=about["date"],
        commit=about["commit"],
        torch=about["torch"],
        transformers=transformers.__version__,
        arch=arch,
        shape=shape,
        padding=f"{padding:g}",
        variant=variant,
        launches=round(total(step, 0)),
        gb=f"{total(step, 1) / 1e9:.1f}",
        tflop=f"{total(step, 2) / 1e12:.2f}",
        ms=f"{total(step, 3) * 1e3:.1f}",
        ms_products=f"{total(step, 4) * 1e3:.1f}",
        ms_forward=f"{total(step, 3, 'forward') * 1e3:.2f}",
        ms_backward=f"{total(step, 3, 'backward') * 1e3:.2f}",
        ms_optimizer=f"{total(step, 3, 'optimizer') * 1e3:.2f}",
        layer_forward=round(total(layer, 0, "forward")),
        layer_backward=round(total(layer, 0, "backward")),
        layer_tensors=f"{total(beside, 1) / (2 * elements):.1f}" if not padding else "",
        gb_by_operator=", ".join(f"{name} {size:.1f}" for name, size in largest),
    )
    return {name: str(value) for name, value in numbers.items()}


def cases(
    archs: Iterable[str], shapes: Iterable[str], paddings: Iterable[float], variants: Any
) -> Iterator[Any]:
    for arch in archs:
        for shape in shapes:
            for padding in paddings:
                for variant in variants:
                    if not (padding and variant == "fastplm, no capacity"):  # needs values
                        yield arch, shape, padding, variant


def read(path: Path) -> list[Row]:
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


# --- the page -------------------------------------------------------------------------------------

ABOUT = """
# A training step, launch by launch

Written by `python benchmarks/step_report.py`, without a GPU: a model of the step, no measurement.
A library that is preloaded (`tools/fake_cuda.cpp`) lets fake tensors lie on "cuda", so a step
runs as on a GPU and computes nothing. Each operator that reaches PyTorch counts as one launch
that reads its inputs and writes its outputs. An H100 needs for it at least the largest of its
bytes over 2.9 TB/s, its FLOPs over 700 TFLOP/s, and 2 µs; the table has the sum. Rows are in
`benchmarks/results/static/steps.csv`.

- **The step**: forward and backward by bf16 autocast, dropout 0.1 (ModernBERT: none), clipping,
  and AdamW with one kernel for all parameters (`fused=True`, the default of Trainer). With
  `foreach` the update has 26 launches instead of 10, and of BERT-base 2.6 ms instead of 0.9. Steps
  of the optimizer's counts that a CPU makes are no launches.
- **Transformers**: SDPA counts as one flash kernel in each direction, also with a mask or T5's
  bias, for which PyTorch has none. ELECTRA is its generator and its discriminator one after the
  other, and its draws are not counted. DeBERTa has eager attention, and learns masked tokens.
- **Compiled**: Transformers as `torch.compile` runs it: traced, fused by Inductor's own scheduler
  for an H100, and counted before Triton. The optimizer is not compiled.
- **fastplm** has a capacity and `masked_positions`, as a step in a CUDA graph: at 35 % padding
  the capacity is the number of tokens. Before is the first commit in the file, now the last. *No
  capacity* has what Transformers' collator returns; it is counted without padding alone, as no
  number of tokens can be read.
- 15 % of the tokens have labels. Models with 2 and 3 layers are counted; each further layer costs
  as much as the third. A layer of BART or T5 is one on each side. Of ModernBERT 3 and 6 layers are
  counted, as every third one has no window.
"""

LAYER = """
## A layer

Launches of a layer, and how many tensors [N, E] in bf16 move through operators that are neither
products nor attention (256x128, no padding). The calls are those of Python functions, and of C
functions from Python, that a layer makes forward and backward with stubs below (`python
benchmarks/host_time.py --layers`), in a small model of the family.

"""

ERROR = """
## How far it is from a device

An H100 was profiled without an optimizer ([Measured on an H100](gpu.md)), in 256x128 without
padding. The model is too fast by about a fifth, as real kernels do not reach its rates (the
gradients of LayerNorm's weights ran at 1.3 TB/s), and some operators have several:

| | kernels of the H100, ms | the model, ms | of it |
|---|---|---|---|
"""
#: ms of all kernels of forward and backward in ``results/nvidia-h100-80gb-hbm3/profile.csv``.
MEASURED = {"bert-base": 63.9, "albert-base": 59.8, "bart-base": 101.7}

UNKNOWN = """
It knows no caches, no overlap, no wait for the host, and no work inside an operator of ours
beyond its inputs and outputs, its products and attention excepted. A kernel that PyTorch splits
in two counts once, a view that copies not at all. DeBERTa's attention turns its products with
positions inside a program, tile by tile, which is not counted either.
"""


def table(head: str, rows: Iterable[Iterable[str]]) -> str:
    lines = [head, "|" + "---|" * (head.count("|") - 1)]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)]) + "\n"


def page(rows: list[Row], calls: list[Row]) -> str:
    first: dict[tuple[str, ...], Row] = {}
    last: dict[tuple[str, ...], Row] = {}
    for one in rows:
        key = one["arch"], one["shape"], one["padding"], one["variant"]
        first.setdefault(key, one)
        last[key] = one

    def numbers(one: Row | None) -> str:
        return "–" if one is None else f"{one['ms']} ({int(one['launches']):,}; {one['gb']})"

    def ratio(slow: Row | None, fast: Row | None) -> str:
        return f"{float(slow['ms']) / float(fast['ms']):.2f}" if slow and fast else "–"

    steps, layers, where, error = [], [], [], []
    for arch in ARCHS:
        for shape in SHAPES:
            for padding in (f"{one:g}" for one in PADDINGS):
                found = {name: last.get((arch, shape, padding, name)) for name in VARIANTS}
                before = first.get((arch, shape, padding, "fastplm"))
                steps.append(
                    [
                        f"{arch} {shape}, {float(padding):.0%} padding",
                        *(numbers(found[name]) for name in ("transformers", "compiled")),
                        *map(numbers, (before, found["fastplm"], found["fastplm compiled"])),
                        numbers(found["fastplm, no capacity"]),
                        ratio(found["transformers"], found["fastplm"]),
                        ratio(found["compiled"], found["fastplm"]),
                    ]
                )
                if (shape, padding) != (SHAPES[0], "0"):
                    continue
                family = [one for one in calls if one["arch"].split("-")[0] == arch.split("-")[0]]
                called = {one["variant"]: one for one in family}
                called["fastplm before"] = {one["variant"]: one for one in reversed(family)}.get(
                    "fastplm"
                )
                for name, one in {"fastplm before": before, **found}.items():
                    if one is None or name == VARIANTS[-1]:
                        continue
                    made = called.get(name)
                    made = f"{made['python_calls']} + {made['c_calls']}" if made else "–"
                    counts = (one[f"layer_{part}"] for part in ("forward", "backward", "tensors"))
                    layers.append([arch, name, *counts, made])
                    if arch == ARCHS[0]:
                        where.append([name, one["gb_by_operator"]])
                if before is not None and arch in MEASURED:
                    ms = float(before["ms_forward"]) + float(before["ms_backward"])
                    share = f"{ms / MEASURED[arch]:.0%}"
                    error.append([arch, f"{MEASURED[arch]}", f"{ms:.1f}", share])
    head = (
        "| ms (launches; GB) | Transformers | compiled | fastplm before | now | now, compiled "
        "| no capacity | Transformers / now | compiled / now |"
    )
    return "".join(
        [
            ABOUT.lstrip(),
            "\n## The step\n\n",
            table(head, steps),
            LAYER,
            table("| model | | forward | backward | tensors | calls |", layers),
            "\n## Where the bytes go\n\nBERT-base, 256x128: GB of the operators with the most.\n\n",
            table("| | GB |", where),
            ERROR,
            "".join(f"| {' | '.join(row)} |\n" for row in error),
            UNKNOWN,
        ]
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", nargs="+", default=ARCHS)
    parser.add_argument("--shape", nargs="+", default=SHAPES)
    parser.add_argument("--padding", nargs="+", type=float, default=PADDINGS)
    parser.add_argument("--variant", nargs="+", default=VARIANTS, choices=VARIANTS)
    parser.add_argument("--json", action="store_true", help="print the rows, write nothing")
    parser.add_argument("--page", action="store_true", help="write the page from the rows alone")
    options = parser.parse_args()
    if not options.page:
        if (status := step_model.run_preloaded()) is not None:
            return status
        from harness import append_row

        for case in cases(options.arch, options.shape, options.padding, options.variant):
            found = row(*case)
            if options.json:
                print(json.dumps(found), flush=True)
            else:
                append_row(RESULTS, list(found), found)
                sizes = f"{found['launches']} launches, {found['gb']} GB, {found['ms']} ms"
                print(*case, sizes, flush=True)
    if not options.json:
        PAGE.write_text(page(read(RESULTS), read(CALLS)), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
