"""Bars from committed rows: ``python benchmarks/plots.py results/<machine> out.png``."""

from __future__ import annotations

import csv
import sys
from pathlib import Path


def latest_rows(folder: Path) -> list[dict[str, str]]:
    """The last row of each (op, case, direction, variant) under a machine's folder."""
    latest = {}
    for path in sorted(folder.glob("*.csv")):
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                latest[row["op"], row["case"], row["direction"], row["variant"]] = row
    return list(latest.values())


def draw(folder: Path, target: Path) -> None:
    """One bar a variant and case: how many times faster than the eager reference, log scale."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [row for row in latest_rows(folder) if row["vs_eager"] and row["variant"] != "eager"]
    variants = list(dict.fromkeys(row["variant"] for row in rows))
    variants.sort(key=lambda name: name != "fastplm")
    labels = list(dict.fromkeys((row["op"], row["case"], row["direction"]) for row in rows))
    values = {
        (row["op"], row["case"], row["direction"], row["variant"]): float(row["vs_eager"])
        for row in rows
    }
    height = 0.8 / max(len(variants), 1)
    figure, axes = plt.subplots(figsize=(9, 1.2 + 0.33 * len(labels)), layout="constrained")
    for index, variant in enumerate(variants):
        bars = [(y, values.get((*label, variant))) for y, label in enumerate(labels)]
        bars = [(y + index * height, value) for y, value in bars if value]
        color = "#2a6f97" if variant == "fastplm" else f"C{index + 1}"
        ys, widths = zip(*bars, strict=True)
        axes.barh(ys, [w - 1 for w in widths], height, left=1, label=variant, color=color)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_yticks(
        [y + 0.4 - height / 2 for y in range(len(labels))],
        [f"{op}: {case}, {direction}" for op, case, direction in labels],
        fontsize=8,
    )
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}×")
    axes.invert_yaxis()
    axes.set_xlabel(f"speed relative to the eager reference, {rows[0]['machine']}")
    axes.legend(loc="lower right", fontsize=8)
    figure.savefig(target, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    draw(Path(sys.argv[1]), Path(sys.argv[2]))
