"""Fine-tuning on real tasks: fastplm and Transformers, the same runs, scores and seconds.

    python benchmarks/finetuning.py --model DIR --data DIR [--seeds 3] [--tasks choice pair]

The data's DIR holds sentiment/, pairs/, tagging/ and choice/, with the files that ``SETTINGS``
names; XQuAD's 1,190 questions are too few for a model without SQuAD to learn from. For each seed
both libraries train from the same weights on the same batches in the same order, one after the
other; their order changes from seed to seed. Seconds are those of the steps alone. A first run of
one step warms up each library and does not count.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import io
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

from fastplm.finetune.run import finetune
from fastplm.finetune.settings import LIBRARIES, FinetuneArguments
from fastplm.run.seeds import interval
from harness import machine_folder, machine_line


@dataclass(frozen=True)
class Setting:
    """A task's files, and steps so few that all tasks take a quarter of an hour on two cores
    (MiniLM, three seeds)."""

    data: str
    eval_data: str | None
    steps: int
    batch_size: int
    max_length: int
    learning_rate: float
    max_eval_samples: int
    threshold: float | None = None


SETTINGS = {
    "classification": Setting(
        "sentiment/movie.train.tsv", "sentiment/movie.test.tsv", 60, 16, 64, 2e-4, 500, threshold=0
    ),
    "pair": Setting("pairs/mrpc.train.txt", "pairs/mrpc.test.txt", 160, 16, 64, 1e-4, 500),
    "tagging": Setting(
        "tagging/ewt-pos.dev.tsv", "tagging/ewt-pos.test.tsv", 60, 16, 64, 5e-4, 300
    ),
    "choice": Setting(
        "choice/commonsenseqa.train.jsonl",
        "choice/commonsenseqa.dev.jsonl",
        60,
        16,
        64,
        2e-4,
        300,
    ),
}
FIELDS = (
    *("date", "machine", "torch", "triton", "commit"),
    *("task", "metric", "library", "seeds", "steps", "chance", "score", "half_width"),
    *("seconds", "tokens_per_s", "times_faster"),
)


def one_run(options: argparse.Namespace, task: str, library: str, seed: int, **changed: Any) -> Any:
    """The ``metrics`` of one training."""
    setting = SETTINGS[task]
    eval_data = None if setting.eval_data is None else options.data / setting.eval_data
    with tempfile.TemporaryDirectory() as out, contextlib.redirect_stderr(io.StringIO()):
        settings = {
            "steps": max(1, round(setting.steps * options.scale)),
            "max_eval_samples": setting.max_eval_samples,
            "dropout": options.dropout,
            **changed,
        }
        return finetune(
            FinetuneArguments(
                task=task,
                model=options.model,
                data=options.data / setting.data,
                eval_data=eval_data,
                out=Path(out) / "run",
                batch_size=setting.batch_size,
                max_length=setting.max_length,
                learning_rate=setting.learning_rate,
                threshold=setting.threshold,
                library=library,
                seed=seed,
                save_every=1 << 30,
                precision="bf16" if options.bf16 else "fp32",
                **settings,
            )
        )


def measure(options: argparse.Namespace, task: str) -> list[dict[str, Any]]:
    """A row for each score of each library."""
    runs: dict[str, list[dict[str, Any]]] = {library: [] for library in LIBRARIES}
    for library in LIBRARIES:
        one_run(options, task, library, 0, steps=1, max_samples=64, max_eval_samples=8)
    for seed in range(options.seeds):
        for library in LIBRARIES if seed % 2 == 0 else reversed(LIBRARIES):
            metrics = one_run(options, task, library, seed)
            runs[library].append(metrics)
            (run,) = metrics["seeds"]
            scores = "  ".join(f"{name} {value:.4f}" for name, value in run["scores"].items())
            print(f"{task}  {library:<12}  seed {seed}  {scores}  {run['train_seconds']:.1f} s")
            sys.stdout.flush()
    # The batches differ from seed to seed, so the libraries are compared seed by seed.
    seconds = {name: [m["seeds"][0]["train_seconds"] for m in runs[name]] for name in LIBRARIES}
    ratio = statistics.median(
        theirs / ours
        for ours, theirs in zip(seconds["fastplm"], seconds["transformers"], strict=True)
    )
    rows = []
    for library, done in runs.items():
        for number, name in enumerate(done[0]["scores"]):
            score = interval([metrics["seeds"][0]["scores"][name] for metrics in done])
            width = score["half_width"]
            first = done[0]["seeds"][0]
            rate = statistics.median(m["seeds"][0]["tokens_per_second"] for m in done)
            rows.append(
                {
                    **machine_line(),
                    "task": task,
                    "metric": name,
                    "library": library,
                    "seeds": len(done),
                    "steps": first["steps"],
                    "chance": round(done[0]["chance"], 4) if number == 0 else "",
                    "score": round(float(score["mean"] or 0.0), 4),
                    "half_width": "" if width is None else round(width, 4),
                    "seconds": round(statistics.fmean(seconds[library]), 2),
                    "tokens_per_s": round(rate),
                    "times_faster": round(ratio, 2) if library == "fastplm" else 1.0,
                }
            )
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """The rows in Markdown, one line a task and score, both libraries side by side."""
    seconds = (f"seconds, {library}" for library in LIBRARIES)
    head = ("task", "score", "chance", *LIBRARIES, *seconds, "times faster")
    lines = [head, ("---",) * len(head)]
    for task, metric in dict.fromkeys((row["task"], row["metric"]) for row in rows):
        pair = [row for row in rows if (row["task"], row["metric"]) == (task, metric)]
        scores = [
            f"{row['score']:.4f}" + (f" ± {row['half_width']:.4f}" if row["half_width"] else "")
            for row in pair
        ]
        times = [f"{row['seconds']:.1f}" for row in pair]
        line = (task, metric, str(pair[0]["chance"]), *scores, *times)
        lines.append((*line, f"{pair[0]['times_faster']:.2f}"))
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="a checkpoint's folder")
    parser.add_argument("--data", type=Path, required=True, help="the folder of the tasks' files")
    parser.add_argument("--tasks", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--scale", type=float, default=1.0, help="times the usual steps")
    parser.add_argument("--dropout", type=float, help="by default the checkpoint's own")
    parser.add_argument("--bf16", action="store_true")
    results = Path(__file__).parent / "results"
    parser.add_argument("--results", type=Path, default=results, help="where rows are added")
    options = parser.parse_args()
    logging.disable_progress_bar()
    folder = options.results / machine_folder()
    folder.mkdir(parents=True, exist_ok=True)
    path, rows = folder / "finetuning.csv", []
    for task in options.tasks:
        fresh = measure(options, task)
        rows += fresh
        begins = not path.exists()
        with path.open("a", newline="") as file:
            writer = csv.DictWriter(file, FIELDS)
            if begins:
                writer.writeheader()
            writer.writerows(fresh)
    print(f"\n{machine_line()['machine']}, torch {torch.__version__}\n\n{table(rows)}")
    page = folder / "finetuning.md"
    line = "{machine}, torch {torch}, commit {commit}, {date}".format(**rows[-1])
    page.write_text(f"Written by `python benchmarks/finetuning.py`: {line}.\n\n{table(rows)}\n")
    print(f"\n{path}, {page}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
