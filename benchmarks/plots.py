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
    colors = {name: f"C{index}" for index, name in enumerate(variants)}
    figure, axes = plt.subplots(figsize=(9, 1.2 + 0.33 * len(labels)), layout="constrained")
    drawn = set()
    for y, label in enumerate(labels):
        present = [name for name in variants if (*label, name) in values]
        height = 0.8 / len(present)
        for index, name in enumerate(present):
            axes.barh(
                y + (index + 0.5) * height - 0.4,
                values[(*label, name)] - 1,
                height,
                left=1,
                color=colors[name],
                label=None if name in drawn else name,
            )
            drawn.add(name)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_yticks(
        range(len(labels)),
        [f"{op}: {case}, {direction}" for op, case, direction in labels],
        fontsize=8,
    )
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}×")
    axes.invert_yaxis()
    axes.set_xlabel(f"speed relative to the eager reference, {rows[0]['machine']}")
    axes.legend(loc="upper left", fontsize=8)
    figure.savefig(target, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    draw(Path(sys.argv[1]), Path(sys.argv[2]))
