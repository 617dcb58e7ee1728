"""Fine-tuning in bf16 on a CPU with numbers of rows that recur, and with those of the tokens.

    python benchmarks/row_numbers.py --rows FILE -- --task classification --data FILE --model DIR …

After ``--`` come the options of ``fastplm finetune``. Each turn is a process of its own, as PyTorch
keeps the programs that oneDNN compiles; the two kinds take turns. The row has the median over the
turns of the seconds of a step, after the first ``--skip``.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import transformers
from transformers import AutoConfig

from fastplm.cli import main as fastplm
from fastplm.nn import _rows
from harness import append_row, machine_line

KINDS = ("recurring", "exact")
FIELDS = (
    *("date", "machine", "torch", "triton", "commit", "options", "model", "steps", "turns"),
    *("recurring_ms", "exact_ms", "ratio"),
)


def one_turn(kind: str, skip: int, steps: int, options: list[str]) -> None:
    """Print the seconds of a step, and end."""
    if kind == "exact":  # as the library was before; no option brings that back
        _rows.bucketed_rows = lambda count, most: count  # type: ignore[assignment]
    plain, done, begun = transformers.Trainer.training_step, 0, 0.0

    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal done, begun
        if done == skip:
            begun = time.perf_counter()
        if done == skip + steps:
            print((time.perf_counter() - begun) / steps, flush=True)
            os._exit(0)
        done += 1
        return plain(self, *args, **kwargs)

    transformers.Trainer.training_step = step
    with tempfile.TemporaryDirectory() as out:
        fastplm(["finetune", "--bf16", "--report-to", "none", "--out", f"{out}/run", *options])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=Path, required=True, help="CSV file that the row goes to")
    parser.add_argument("--skip", type=int, default=30, help="first steps, which do not count")
    parser.add_argument("--steps", type=int, default=100, help="steps that count")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--one", choices=KINDS, help=argparse.SUPPRESS)
    parser.add_argument("options", nargs="+", help="after --: options of fastplm finetune")
    own = parser.parse_args()
    if own.one:
        one_turn(own.one, own.skip, own.steps, own.options)
        sys.exit("fewer steps than --skip and --steps need")
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for _ in range(own.turns):
        for kind, found in seconds.items():
            command = [sys.executable, __file__, "--one", kind, *sys.argv[1:]]
            shown = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            found.append(float(shown.stdout.split()[-1]))
    fast, exact = (1e3 * statistics.median(seconds[kind]) for kind in KINDS)
    options = " ".join(Path(word).name for word in own.options)
    config = AutoConfig.from_pretrained(own.options[own.options.index("--model") + 1])
    size = f"{config.num_hidden_layers} layers of {config.hidden_size}"
    row = machine_line() | {"options": options, "model": size}
    row |= {"steps": own.steps, "turns": own.turns}
    row |= {"recurring_ms": f"{fast:.1f}", "exact_ms": f"{exact:.1f}"}
    row["ratio"] = f"{exact / fast:.2f}"
    append_row(own.rows, FIELDS, row)
    print(row)


if __name__ == "__main__":
    main()
