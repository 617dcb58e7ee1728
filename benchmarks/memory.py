"""Peak memory of the vocabulary loss by the size of the vocabulary, with its time beside it.

    python benchmarks/memory.py --rows benchmarks/results [--sizes 1024 2048]

The rows have the op "loss_memory": the loss of BERT-base's masked tokens among all tokens of a
batch, forward and backward, gradients included. Transformers' classes compute "full logits";
fastplm's classes select the rows that count before the head ("fastplm, as in the heads").
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

import test_linear_cross_entropy as loss

import harness
from fastplm import ops

SIZES = tuple(1024 << power for power in range(8))
VARIANTS = ("eager", "full logits", "fastplm", "fastplm, recomputed")
HEADS = "fastplm, as in the heads"


def gathered(input, linear_weight, target, linear_bias):
    positions = (target != -100).nonzero().flatten()
    rows = ops.gather_rows(input, positions)
    return ops.linear_cross_entropy(rows, linear_weight, target[positions], linear_bias=linear_bias)


def case(vocab: int) -> harness.Case:
    rows = 32768 if loss.GPU else 1024
    shape = loss.Shape(rows, vocab, 768, ignored=0.85)
    dtype = "bf16" if loss.GPU else "fp32"
    label = f"N {rows}, 85 % ignored, E {shape.width}, {dtype}, V {vocab}"
    known = loss.case(label, shape)
    variants = {name: known.variants[name] for name in VARIANTS} | {HEADS: gathered}
    return replace(
        known,
        op="loss_memory",
        variants=variants,
        gated=[name for name in variants if name.startswith("fastplm")],
        directions=("training",),
        rounds=3,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=Path, required=True, help="DIR/<machine>/loss_memory.csv")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="of the vocabulary")
    options = parser.parse_args()
    failed = False
    for vocab in options.sizes:
        harness.SESSION.rows.clear()
        try:
            harness.measure(case(vocab), "training")
        except AssertionError as error:  # the gate's rows say "refused"
            failed = True
            print(f"RED V {vocab}: {error}")
        harness.write_rows(harness.SESSION.rows, options.rows)
        print(harness.table(harness.SESSION.rows), flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
