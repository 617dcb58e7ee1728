"""The picture of a study: a panel for each evaluation, with means and intervals."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastplm.study.grid import HELD_OUT
from fastplm.study.results import Results

_MOST_PANELS = 12


def panels(results: Results) -> list[str]:
    """The columns that are drawn: those of evaluations; where there is none, of held-out text."""
    evaluated = [name for name in results.columns if not name.startswith(HELD_OUT)]
    return (evaluated or results.columns)[:_MOST_PANELS]


def draw(path: Path, results: Results) -> None:
    """Draw a study: against FLOPs where milestones of a training were evaluated, else by variant.

    Filled marks are past their plateau; empty ones are too early to tell, as a mark at the end of a
    curve says of its training. Strokes are the means of the pre-training seeds.
    """
    from matplotlib.figure import Figure

    names = panels(results)
    curves = any(row.milestones for row in results.rows.values())
    across = min(2 if len(names) < 5 else 3, len(names))
    down = -(-len(names) // across)
    height = 3.2 if curves else 1.0 + 0.32 * len(results.rows)
    size = (1.2 + 3.2 * across, height * down + 0.5)
    figure = Figure(figsize=size, layout="constrained")
    axes = list(figure.subplots(down, across, squeeze=False).flat)
    for place, (axis, name) in enumerate(zip(axes, names, strict=False)):
        (_curves if curves else _points)(axis, results, name)
        if not curves and place % across:
            axis.tick_params(labelleft=False)  # the variants are named once in a line of panels
        _published(axis, results.published.get(name, {}), curves)
        axis.set_title(name, fontsize=10)
        axis.grid(alpha=0.3)
    for axis in axes[len(names) :]:
        axis.set_axis_off()
    if curves:
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=8)
    title = results.grid.name + (f", size {results.grid.size}" if results.grid.size else "")
    figure.suptitle(title)
    figure.savefig(path, dpi=120, format="png")


def _published(axis: Any, others: Mapping[str, float], curves: bool) -> None:
    """Dotted lines of other systems, their names at three places, as some have equal scores."""
    for number, (system, value) in enumerate(others.items()):
        at = 0.01 + number % 3 / 3
        style = {"color": "grey", "fontsize": 7}
        if curves:
            axis.axhline(value, color="grey", linestyle=":", linewidth=1)
            axis.text(at, value, f" {system}", transform=axis.get_yaxis_transform(), **style)
        else:
            axis.axvline(value, color="grey", linestyle=":", linewidth=1)
            style["rotation"] = 90
            axis.text(value, at, f" {system}", transform=axis.get_xaxis_transform(), **style)


def _points(axis: Any, results: Results, name: str) -> None:
    rows = list(results.rows.values())
    shown = [*results.published.get(name, {}).values()]
    wide: list[float] = []
    for place, row in enumerate(rows):
        scores = row.scores.get(name)
        if scores is None:
            continue
        found = scores.interval
        shown += [found.mean, *scores.values.mean(1)]
        ends = [end for end in (found.low, found.high) if end is not None]
        (wide if scores.early else shown).extend(ends)
        if found.low is not None:
            axis.plot([found.low, found.high], [place, place], color=f"C{place % 10}")
        if len(scores.values) > 1:
            of_seeds = scores.values.mean(1)
            axis.plot(of_seeds, [place] * len(of_seeds), "|", color=f"C{place % 10}", alpha=0.6)
        fill = "none" if scores.early else f"C{place % 10}"
        axis.plot([found.mean], [place], "o", color=f"C{place % 10}", markerfacecolor=fill)
    # Where few seeds vary much, the interval of what is too early to tell is wider than a picture.
    low, high = min(shown), max(shown)
    more = 0.1 * (high - low)
    low, high = max(min([low, *wide]), low - more), min(max([high, *wide]), high + more)
    margin = 0.05 * (high - low) or 0.01
    axis.set_xlim(low - margin, high + margin)
    axis.locator_params(axis="x", nbins=5)
    axis.set_yticks(range(len(rows)), [row.name for row in rows], fontsize=9)
    axis.set_ylim(len(rows) - 0.5, -0.5)


def _curves(axis: Any, results: Results, name: str) -> None:
    for number, row in enumerate(results.rows.values()):
        scores, flops = row.scores.get(name), row.flops or 0.0
        if scores is None:
            continue
        milestones = [*row.milestones.get(name, ()), (1.0, scores)]
        places = [share * flops for share, _ in milestones]
        found = [each.interval for _, each in milestones]
        means = [each.mean for each in found]
        color = f"C{number % 10}"
        fill = "none" if scores.early else color
        axis.plot(places, means, ".-", color=color, markersize=2)
        mark = {"color": color, "markerfacecolor": fill, "markersize": 5}
        axis.plot(places[-1:], means[-1:], "o-", label=row.name, **mark)
        if all(each.low is not None for each in found):
            low = [float(each.low or 0.0) for each in found]
            high = [float(each.high or 0.0) for each in found]
            axis.fill_between(places, low, high, color=color, alpha=0.15)
    axis.set_xlabel("FLOPs of the training", fontsize=8)
