"""What a model learned over the hours of one pre-training: minimal pairs and held-out losses.

    python studies/night.py RUN --pairs blimp.zip --published models_summary.jsonl --out night

RUN is the folder of a finished ``fastplm pretrain --config overnight``. Each of the states that it
kept is scored by ``fastplm score --metric minimal-pairs``, unless RUN/pairs has its table already.
OUT.tsv has a row for each of them, and for each loss of held-out text; OUT.png has the losses, and
the accuracies beside published ones, over the hours of training. The accuracy that is said of more
hours lies on a straight line over their logarithm, through the states of the run's second half; a
state is behind a run that ends there, whose rate has fallen to 0, so the line is steeper than that
of finished runs.
"""

from __future__ import annotations

import argparse
import csv
import json
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

from fastplm.inference.score_command import score_file
from fastplm.inference.score_settings import ScoreArguments
from fastplm.run.folder import checkpoints

matplotlib.use("Agg")
from matplotlib import pyplot

#: The systems of a table of minimal pairs that are drawn.
_OTHERS = ("ngram", "lstm", "gpt2")


def accuracy(run: Path, step: int, checkpoint: Path, options: argparse.Namespace) -> dict[str, str]:
    """The first row of the table of a state: that of all paradigms."""
    table = run / "pairs" / f"{step}.tsv"
    if not table.exists():
        table.parent.mkdir(exist_ok=True)
        files = {"data": options.pairs, "published": options.published, "out": table}
        score_file(ScoreArguments(model=checkpoint, metric="minimal-pairs", **files))
    with table.open(newline="") as file:
        return next(csv.DictReader(file, delimiter="\t"))


def rows(run: Path, options: argparse.Namespace) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """A row of each state and each loss of held-out text, and the record of the run."""
    metrics = json.loads((run / "metrics.json").read_text())
    history, judged = metrics["history"], metrics["held_out_by_step"]
    (loss,) = {"clm_loss", "mlm_loss"} & judged[-1].keys()
    losses = {entry["step"]: entry[loss] for entry in judged}
    states = dict(checkpoints(run))
    found = []
    for step in sorted({*states, *losses}):
        seconds = sum(entry["seconds"] for entry in history if entry["step"] <= step)
        of_all = accuracy(run, step, states[step], options) if step in states else {}
        found.append(
            {
                "step": step,
                "hours": round(seconds / 3600, 4),
                "tflop": round(metrics["flops"] / 1e12 * step / history[-1]["step"], 1),
                "held_out_loss": losses.get(step),
                **{name: of_all.get(name) for name in ("accuracy", "low", "high", *_OTHERS)},
            }
        )
    return found, metrics


def expected(found: list[dict[str, Any]], hours: float) -> float:
    """The accuracy after so many hours, on a line through the second half of the states."""
    half = [row for row in found if row["accuracy"] and row["hours"] >= found[-1]["hours"] / 2]
    logs = np.log([row["hours"] for row in half])
    slope, level = np.polyfit(logs, [float(row["accuracy"]) for row in half], 1)
    return level + slope * np.log(hours)


def draw(path: Path, found: list[dict[str, Any]], metrics: dict[str, Any]) -> None:
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    history, judged = metrics["history"], metrics["held_out_by_step"]
    hours = np.cumsum([entry["seconds"] for entry in history]) / 3600
    at = dict(zip((entry["step"] for entry in history), hours, strict=True))
    left.plot(hours, [entry["loss"] for entry in history], linewidth=0.8, label="training")
    (loss,) = {"clm_loss", "mlm_loss"} & judged[-1].keys()
    places = [at[entry["step"]] for entry in judged]
    left.plot(places, [entry[loss] for entry in judged], ".-", label="held out")
    bigram = judged[-1]["bigram_loss"]
    left.axhline(bigram, color="grey", linestyle="--", label="held out, bigram")
    left.set(xlabel="hours", ylabel="loss (nats a token)", ylim=(None, bigram + 1.5))
    left.legend(frameon=False, fontsize=8)
    found = [row for row in found if row["accuracy"]]
    places = [row["hours"] for row in found]
    middle, low, high = (
        [float(row[name]) for row in found] for name in ("accuracy", "low", "high")
    )
    errors = np.abs(np.array([low, high]) - middle)
    right.errorbar(places, middle, errors, fmt="o-", markersize=4, label="this model")
    for name in _OTHERS:
        level = float(found[-1][name])
        right.axhline(level, color="grey", linestyle=":")
        right.text(0, level, f" {name}", color="grey", fontsize=8, verticalalignment="bottom")
    right.set(xlabel="hours", ylabel="accuracy of minimal pairs", xlim=(0, None))
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="folder of the finished run")
    parser.add_argument("--pairs", type=Path, required=True, help="minimal pairs, as for score")
    parser.add_argument("--published", type=Path, required=True, help="published accuracies")
    parser.add_argument("--out", type=Path, required=True, help="path of the files, without suffix")
    parser.add_argument("--hours", type=float, default=8.0, help="what is expected after these")
    options = parser.parse_args()
    found, metrics = rows(options.run, options)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with options.out.with_suffix(".tsv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(found[0]), delimiter="\t", lineterminator="\n")
        writer.writeheader()
        writer.writerows(found)
    draw(options.out.with_suffix(".png"), found, metrics)
    print(f"on that line after {options.hours:g} hours: {expected(found, options.hours):.3f}")


if __name__ == "__main__":
    main()
