"""A step in a process that has trained other models: ``python benchmarks/after_others.py FAMILY``.

    python benchmarks/after_others.py t5                 # after three other models
    python benchmarks/after_others.py t5 --others 0      # in a fresh process

It prints a line of JSON: for fastplm and for Transformers (SDPA) the median of a training step with
AdamW in milliseconds, and its minor page faults. What differs between a fresh process and one that
has trained is where glibc's allocator finds memory: memory that it gives back to the system after
a step is mapped again, page by page, in the next one.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import time
from collections.abc import Callable

import torch

from steps import NARROW, PATHS, Step, backward, build

KINDS = {"fastplm": "fastplm", "sdpa": "transformers sdpa"}


def steps_of(family: str) -> dict[str, Callable[[], None]]:
    """A training step of both libraries' models, by the kind of model."""
    step = Step(f"{family}-{NARROW[family]}", 4, 128, padding=0.3, dropout=0.1)
    cpu = torch.device("cpu")
    batch = step.make(cpu)

    def made(kind: str) -> Callable[[], None]:
        model = build(step, kind, cpu)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-4)

        def run() -> None:
            backward(PATHS[KINDS[kind]], model, step, batch)
            optimizer.step()

        return run

    return {kind: made(kind) for kind in KINDS}


def measure(family: str, others: int, rounds: int) -> dict[str, object]:
    """Milliseconds and faults of a step, after ``others`` models were trained for 6 steps each."""
    first = [name for name in ("bert", "electra", "gpt2", "roberta") if name != family]
    for other in first[:others]:
        trained = steps_of(other)
        for _ in range(6):
            for run in trained.values():
                run()
    timed = steps_of(family)
    found: dict[str, list[tuple[float, int]]] = {kind: [] for kind in timed}
    for _ in range(rounds + 4):
        for kind, run in timed.items():
            faults, start = resource.getrusage(resource.RUSAGE_SELF).ru_minflt, time.perf_counter()
            run()
            took = time.perf_counter() - start
            now = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            found[kind].append((took * 1e3, now - faults))
    line: dict[str, object] = {"family": family, "others": others, "torch": torch.__version__}
    for kind, each in found.items():
        times, counts = zip(*each[4:], strict=True)  # the first ones warm up
        line[f"{kind} ms"] = round(statistics.median(times), 1)
        line[f"{kind} faults"] = round(statistics.median(counts))
    return line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("family", choices=NARROW)
    parser.add_argument("--others", type=int, default=3, choices=range(4))
    parser.add_argument("--rounds", type=int, default=12)
    options = parser.parse_args()
    print(json.dumps(measure(options.family, options.others, options.rounds)))


if __name__ == "__main__":
    main()
