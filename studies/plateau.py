"""Runs of ``fastplm pretrain`` side by side: one row a run, and their losses in one picture.

    python studies/plateau.py RUN [RUN ...] --out studies/results/plateau

A RUN is the folder of a finished run. OUT.tsv has what differs between them, the losses of held-out
text, whose masks are alike for all, and the step at which the training loss, of the run's own
masks, had made half of its way from the unigram's loss to the bigram's; OUT.png has the training
losses less that of the unigram, over the steps.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

SHOWN = ("arch", "objective", "layers", "hidden", "vocab_size", "block_size", "batch_size", "lr")
SHOWN += ("short_block_size", "short_share", "dropout", "mlm_probability", "steps")
#: Logged figures whose mean is one point of a curve.
_SMOOTH = 5
#: (step, figure)
Curve = list[tuple[int, float]]
#: What is written of a run, and its curve.
Row = tuple[dict[str, Any], Curve]


def smoothed(logged: Curve) -> Curve:
    groups = [logged[at : at + _SMOOTH] for at in range(0, len(logged), _SMOOTH)]
    return [(group[-1][0], sum(figure for _, figure in group) / len(group)) for group in groups]


def row(run: Path) -> Row:
    metrics = json.loads((run / "metrics.json").read_text())
    settings, held_out = metrics["arguments"], metrics["held_out"]
    curve = smoothed(
        [(each["step"], each["loss"]) for each in metrics["history"] if "loss" in each]
    )
    half = (held_out["unigram_loss"] + held_out["bigram_loss"]) / 2
    passed = next((step for step, loss in curve if loss < half), None)
    found = {name: settings.get(name) for name in SHOWN}
    if found["short_block_size"] is None:
        found["short_share"] = None
    found["tflop"] = round(metrics["flops"] / 1e12, 1)
    ours = "clm_loss" if "clm_loss" in held_out else "mlm_loss"
    for name, key in (("loss", ours), ("unigram", "unigram_loss"), ("bigram", "bigram_loss")):
        found[name] = round(held_out[key], 3)
    if settings.get("objective") == "rtd":  # the loss above is that of its generator
        found["electra_objective"] = settings["electra_objective"]
        for name in ("discriminator_mlm_loss", "discriminator_chosen_loss"):
            found[name] = _rounded(held_out.get(name))
        found["balanced_accuracy"] = _rounded(held_out.get("words", {}).get("balanced_accuracy"))
    found |= {"half_way_at_step": passed, "cpu_s": round(metrics["train_seconds"])}
    for name in ("precision", "device"):
        found[name] = metrics[name]
    level = [(step, loss - held_out["unigram_loss"]) for step, loss in curve]
    return found, level


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def _kind(row: dict[str, Any]) -> tuple[str, int, int]:
    """What has a colour of its own."""
    return row["objective"], row["block_size"], row["short_block_size"] or 0


def draw(axes: Any, found: Sequence[Row]) -> None:
    drawn: set[str] = set()
    kinds = {_kind(each): None for each, _ in found}
    colors = dict(
        zip(sorted(kinds), pyplot.rcParams["axes.prop_cycle"].by_key()["color"], strict=False)
    )
    for each, curve in found:
        kind = _kind(each)
        label = f"{kind[0]}, blocks of {kind[1]} tokens"
        label += f", first of {kind[2]}" if kind[2] else ""
        shown = {"label": label} if colors[kind] not in drawn else {}
        drawn.add(colors[kind])
        axes.plot(*zip(*curve, strict=True), color=colors[kind], linewidth=1.2, **shown)
    axes.axhline(0, color="gray", linewidth=0.8)
    axes.set(xlabel="step", ylabel="training loss, less the unigram's (nats)", ylim=(-3, 1))
    axes.legend(frameon=False, fontsize=8, loc="lower right")


def compare(
    title: str, row: Callable[[Path], Row], draw: Callable[[Any, Sequence[Row]], None]
) -> None:
    """The command of a script: a row of each run in OUT.tsv, and their curves in OUT.png."""
    parser = argparse.ArgumentParser(description=title)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN")
    parser.add_argument("--out", type=Path, required=True, help="path of the files, without suffix")
    options = parser.parse_args()
    found = [row(run) for run in options.runs]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with options.out.with_suffix(".tsv").open("w", newline="") as file:
        names = list(dict.fromkeys(name for each, _ in found for name in each))
        writer = csv.DictWriter(file, names, delimiter="\t", lineterminator="\n")
        writer.writeheader()
        writer.writerows(each for each, _ in found)
    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    draw(axes, found)
    figure.tight_layout()
    figure.savefig(options.out.with_suffix(".png"), dpi=110)


if __name__ == "__main__":
    compare(__doc__.splitlines()[0], row, draw)
