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
    """Two bars a case, log scale: how many times faster than the eager reference are the default
    path and the fastest of all that is not ours, by name."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    cases: dict[tuple[str, ...], dict[str, float]] = {}
    rows = [row for row in latest_rows(folder) if row["vs_eager"] and row["variant"] != "eager"]
    for row in rows:
        case = cases.setdefault((row["op"], row["case"], row["direction"]), {})
        case[row["variant"]] = float(row["vs_eager"])
    figure, axes = plt.subplots(figsize=(9, 1.2 + 0.33 * len(cases)), layout="constrained")
    for y, variants in enumerate(cases.values()):
        others = {
            speed: name
            for name, speed in variants.items()
            if not name.startswith(("fastplm", "eager,"))
        }
        if "fastplm" in variants:
            axes.barh(y - 0.2, variants["fastplm"] - 1, 0.4, left=1, color="C0")
        if others:
            fastest = max(others)
            axes.barh(y + 0.2, fastest - 1, 0.4, left=1, color="0.7")
            axes.text(max(fastest, 1) * 1.03, y + 0.2, others[fastest], va="center", fontsize=6)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_yticks(
        range(len(cases)),
        [f"{op}: {case}, {direction}" for op, case, direction in cases],
        fontsize=8,
    )
    axes.set_ylim(len(cases) - 0.4, -0.6)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}×")
    axes.set_xlabel(f"speed relative to the eager reference, {rows[0]['machine']}")
    handles = [plt.Rectangle((0, 0), 1, 1, color=color) for color in ("C0", "0.7")]
    axes.legend(handles, ("fastplm", "the fastest other"), loc="lower right", fontsize=8)
    figure.savefig(target, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    draw(Path(sys.argv[1]), Path(sys.argv[2]))
