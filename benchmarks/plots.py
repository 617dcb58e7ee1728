"""Pictures from the rows alone: ``python benchmarks/plots.py [RESULTS [IMAGES]]``.

For each machine with rows, IMAGES/<picture>-<machine>.png: "roofline" (each kernel under what the
machine can do), "speed" (bars against peers), "padding" (a model's step by its share of padding),
"memory" (a loss by the size of its vocabulary) and, from peers_cpu.csv, "peers" (inference on a
CPU). A picture without its rows is not drawn; a message names the missing rows.
"""

from __future__ import annotations

import csv
import re
import statistics
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Row = dict[str, str]
Key = tuple[str, str, str]

OURS = "fastplm"
KEY = ("op", "case", "direction", "variant")
PEERS_KEY = ("task", "model", "order", "padding", "batch")
# Okabe and Ito's colours, which colour-blind people can tell apart.
BLUE, ORANGE, GREEN, RED, PURPLE, SKY, YELLOW = (
    *("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#F0E442"),
)
GREY, PALE = "#666666", "#C8C8C8"
COLOURS = {
    "attention": BLUE,
    "linear_cross_entropy": RED,
    "linear_distillation": YELLOW,
    "replaced_token_loss": GREEN,
    "gather_rows": ORANGE,
    "mask_tokens": PURPLE,
    "corrupt_spans": SKY,
    "bart_noise": GREY,
}
#: The number of an op's cases in the picture of bars, if more than one.
SHOWN = {"attention": 3, "linear_cross_entropy": 3, "bert": 2}
MARKERS = {"forward": "o", "backward": "v", "training": "s"}


# --- rows -----------------------------------------------------------------------------------------


def latest_rows(folder: Path, key: tuple[str, ...] = KEY) -> list[Row]:
    """The rows of each (op, case, direction) under a machine's folder, from its last run alone, as
    only variants that took turns can be compared. ``key`` names other columns, the variant last."""
    latest: dict[tuple[str, ...], dict[str, Row]] = {}
    for path in sorted(folder.glob("*.csv")):
        with path.open(newline="") as file:
            reader = csv.DictReader(file)
            if not set(key) <= set(reader.fieldnames or ()):
                continue  # a table of another kind, such as that of fine-tuning
            for row in reader:
                variants = latest.setdefault(tuple(row[name] for name in key[:-1]), {})
                if any(other["date"] != row["date"] for other in variants.values()):
                    variants.clear()
                variants[row["variant"]] = row
    return [row for variants in latest.values() for row in variants.values()]


def number(row: Row, name: str) -> float | None:
    """A column as a number; None if it is empty, or if the row is older than the column."""
    text = row.get(name)
    return float(text) if text else None


def by_case(rows: Iterable[Row]) -> dict[Key, dict[str, Row]]:
    """The rows that have a time, by (op, case, direction) and variant."""
    cases: dict[Key, dict[str, Row]] = {}
    for row in rows:
        if row["status"] == "ok" and number(row, "p50_us"):
            cases.setdefault((row["op"], row["case"], row["direction"]), {})[row["variant"]] = row
    return cases


def fastest_other(variants: dict[str, Row]) -> Row | None:
    """The fastest variant that is neither fastplm nor the reference."""
    others = [
        row
        for name, row in variants.items()
        # A variant that calls its own result wrong is a mark to compare with, not a peer.
        if name != "eager" and not name.startswith((OURS, "eager,")) and "wrong" not in name
    ]
    return min(others, key=lambda row: float(row["p50_us"]), default=None)


def of_one_machine(rows: Iterable[Row]) -> list[Row]:
    """The rows of the machine with the most cases, and of equal ones of that with the newest row:
    one picture must not mix two machines' times."""
    by_machine: dict[str, list[Row]] = {}
    for row in rows:
        by_machine.setdefault(row["machine"], []).append(row)

    def size(found: list[Row]) -> tuple[int, str]:
        return len(by_case(found)), max(row["date"] for row in found)

    return max(by_machine.values(), key=size, default=[])


def machine_text(rows: Iterable[Row]) -> str:
    """The machine of the rows, and the versions of the newest row."""
    row = max(rows, key=lambda row: row["date"])
    commit = row["commit"].replace("-dirty", " with local changes")
    return (
        f"{row['machine']} · torch {row['torch']} · triton {row['triton']} · commit "
        f"{commit} · {row['date']} UTC · medians of interleaved rounds"
    )


# --- pictures: a figure, or the reason why there is none ------------------------------------------


def _figure(title: str, rows: Iterable[Row], size: tuple[float, float]) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    figure.suptitle(title, x=0.008, ha="left", fontsize=12, fontweight="bold")
    figure.supxlabel(machine_text(rows), x=0.008, ha="left", fontsize=7.5, color=GREY)
    return figure


def _clean(axes: Axes, grid: str = "both") -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis=grid, color="0.92", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=9)


def roofline(rows: list[Row]) -> Figure | str:
    """Rate by arithmetic intensity; beside it, the bandwidth of kernels without arithmetic."""
    from matplotlib.lines import Line2D

    def rates(row: Row | None) -> tuple[float, float] | None:
        """(FLOP/byte, GFLOP/s)."""
        moved, done = (row and number(row, name) for name in ("gb_per_s", "gflop_per_s"))
        return (done / moved, done) if moved and done else None

    rows = of_one_machine(row for row in rows if row["op"] != "loss_memory")
    kernels = {key: found for key, found in by_case(rows).items() if OURS in found}
    both = {key: found for key, found in kernels.items() if rates(found[OURS])}
    moving = {
        key: found
        for key, found in kernels.items()
        if key[0] in COLOURS and number(found[OURS], "gb_per_s") and key not in both
    }
    if not both:
        return "no row of fastplm has both bytes and FLOPs"
    drawn = [row for found in both.values() for row in found.values() if rates(row)]
    intensities = [rates(row)[0] for row in drawn]
    roofs = [
        (*rates(row), share) for row in drawn if (share := number(row, "of_roofline")) is not None
    ]
    if roofs:
        peak = max(rate / share for _, rate, share in roofs)
        bandwidth = max(rate / share / intensity for intensity, rate, share in roofs)
        shares: dict[str, list[float]] = {}
        for (op, *_), found in both.items():
            if share := number(found[OURS], "of_roofline"):
                shares.setdefault(op, []).append(share)
        parts = [
            f"{op.replace('_', ' ')} {statistics.median(shares[op]):.0%}"
            for op in COLOURS
            if op in shares
        ]
        title = "Share of the roofline, median over shapes: " + ", ".join(parts[:2])
    else:
        peak = max(rates(row)[1] for row in drawn)
        bandwidth = max(number(row, "gb_per_s") or 0 for row in rows if row["status"] == "ok")
        best = max(
            (found[OURS] for found in both.values()), key=lambda row: number(row, "gflop_per_s")
        )
        title = (
            f"{best['op'].replace('_', ' ').capitalize()} comes to "
            f"{number(best, 'gflop_per_s'):,.0f} of the {peak:,.0f} GFLOP/s that any path reached"
        )
    figure = _figure(title, drawn, (9, 5.2))
    left, right = figure.subplots(1, 2, width_ratios=(1, 3 if moving else 1000))
    left.set_visible(bool(moving))

    def mark(axes: Axes, at: float, value: float, op: str, direction: str, filled: bool) -> None:
        colour = COLOURS.get(op, GREY)
        axes.plot(
            at,
            value,
            MARKERS.get(direction, "o"),
            markersize=6.5,
            color=colour,
            markerfacecolor=colour if filled else "white",
            alpha=0.9 if filled else 0.6,
            zorder=4 if filled else 3,
        )

    for (op, _, direction), found in both.items():
        if other := rates(fastest_other(found)):
            mark(right, *other, op, direction, False)
        mark(right, *rates(found[OURS]), op, direction, True)
    style = "-" if roofs else "--"
    low, high = min(intensities) / 2, max(*intensities, 2 * peak / bandwidth) * 1.6
    ridge = peak / bandwidth
    right.plot([low, ridge, high], [low * bandwidth, peak, peak], style, color="black", zorder=2)
    means = "measured" if roofs else "best in these rows"
    top = f"{peak:,.0f} GFLOP/s" if peak < 1e4 else f"{peak / 1e3:,.0f} TFLOP/s"
    right.text(high, peak * 1.06, f"{top}, {means} ", ha="right", fontsize=9)
    middle = low**0.7 * ridge**0.3
    slope = f"{bandwidth:,.1f} GB/s" if bandwidth < 1e3 else f"{bandwidth / 1e3:,.1f} TB/s"
    right.annotate(
        f"{slope}, {means}",
        (middle, middle * bandwidth),
        xytext=(12, -6),
        textcoords="offset points",
        fontsize=9,
    )
    # Inputs in a cache may exceed the roofline.
    most = max(peak, *(rates(row)[1] for row in drawn if row["variant"] == OURS))
    right.set(xscale="log", yscale="log", xlim=(low, high), ylim=(None, 1.6 * most))
    right.set_xlabel("FLOP per byte that the task needs", fontsize=10)
    right.set_ylabel("GFLOP/s", fontsize=10)
    _clean(right)
    ops = list(dict.fromkeys(op for op, *_ in both))
    directions = list(dict.fromkeys(direction for *_, direction in both))
    handles = [
        *(Line2D([], [], linestyle="", marker="o", color=COLOURS.get(op, GREY)) for op in ops),
        *(Line2D([], [], linestyle="", marker=MARKERS.get(d, "o"), color=GREY) for d in directions),
        Line2D([], [], linestyle="", marker="o", color=GREY, markerfacecolor="white"),
    ]
    names = [op.replace("_", " ") for op in ops]
    right.legend(
        handles,
        [*names, *directions, "the fastest other (hollow)"],
        loc="lower right",
        fontsize=8.5,
        frameon=False,
    )
    columns = list(dict.fromkeys(op for op, *_ in moving))
    for (op, _, direction), found in moving.items():
        at = columns.index(op)
        other = fastest_other(found)
        if other is not None and number(other, "gb_per_s"):
            mark(left, at, number(other, "gb_per_s"), op, direction, False)
        mark(left, at, number(found[OURS], "gb_per_s"), op, direction, True)
    if moving:
        left.axhline(bandwidth, linestyle=style, color="black", zorder=2)
        left.set(yscale="log", xlim=(-0.6, len(columns) - 0.4))
        left.set_xticks(range(len(columns)), [op.replace("_", "\n") for op in columns])
        left.set_ylabel("GB/s, of what does no arithmetic", fontsize=10)
        _clean(left, "y")
        left.tick_params(axis="x", labelsize=7)
    return figure


def speed(rows: list[Row]) -> Figure | str:
    """Two bars a case: how many times faster than the eager reference fastplm is, and the fastest
    other variant, by name. Only the first cases of each op are shown."""
    rows = of_one_machine(row for row in rows if row["op"] != "loss_memory")
    cases = {
        key: found
        for key, found in by_case(rows).items()
        if OURS in found and number(found[OURS], "vs_eager")
    }
    if not cases:
        return "no row of fastplm beside an eager reference"
    compared = [(found[OURS], other) for found in cases.values() if (other := fastest_other(found))]
    ahead = sum(float(ours["p50_us"]) <= float(other["p50_us"]) for ours, other in compared)
    used = [found[OURS] for found in cases.values()]
    # A whole step is shown rather than its forward half, if there are both.
    shown: dict[str, list[Key]] = {}
    for key in sorted(cases, key=lambda key: key[2] == "forward"):
        of_op = shown.setdefault(key[0], [])
        if len(of_op) < SHOWN.get(key[0], 1) and all(key[1] != case for _, case, _ in of_op):
            of_op.append(key)
    # Kernels, then models, then the preparation of data.
    host = {"collators", "index"}
    models = sorted(set(shown) - set(COLOURS) - host)
    order = [op for op in (*COLOURS, *models, *sorted(host)) if op in shown]
    keys = [key for op in order for key in shown[op]]
    title = f"fastplm is at least as fast as any other path in {ahead} of {len(compared)} cases"
    figure = _figure(title, used, (9, 1.5 + 0.36 * len(keys)))
    axes = figure.subplots()
    for y, key in enumerate(keys):
        ours, other = cases[key][OURS], fastest_other(cases[key])
        gain = number(ours, "vs_eager")
        axes.barh(y - 0.2, gain - 1, 0.38, left=1, color=BLUE)
        axes.text(max(gain, 1) * 1.02, y - 0.2, f"{gain:.2f}×", va="center", fontsize=8, color=BLUE)
        if other is not None and number(other, "vs_eager"):
            gain = number(other, "vs_eager")
            axes.barh(y + 0.2, gain - 1, 0.38, left=1, color=PALE)
            text = f"{gain:.2f}× {other['variant']}"
            axes.text(max(gain, 1) * 1.02, y + 0.2, text, va="center", fontsize=8, color=GREY)
    axes.axvline(1, color="black", linewidth=0.9)
    labels = [
        f"{op.replace('_', ' ')}: {case}" + (", forward" if direction == "forward" else "")
        for op, case, direction in keys
    ]
    axes.set_yticks(range(len(keys)), labels)
    axes.set_ylim(len(keys) - 0.4, -0.6)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}×")
    axes.set_xlabel("speed relative to the eager reference (1×)", fontsize=10)
    _clean(axes, "x")
    axes.tick_params(axis="y", labelsize=8.5)
    axes.margins(x=0.14)
    handles = [axes.barh(0, 0, color=colour) for colour in (BLUE, PALE)]
    axes.legend(
        handles,
        ("fastplm", "the fastest other"),
        loc="upper right",
        fontsize=9,
        frameon=True,
        edgecolor="none",
    )
    return figure


_PADDED = re.compile(r"(?P<before>.*?) ?padding (?P<share>\d+) ?%(?P<after>.*)")
_PEERS = {
    "transformers sdpa": (ORANGE, "o", "SDPA"),
    "eager": (GREY, "s", "eager"),
    "transformers compiled": (GREEN, "^", "compiled"),
}


def padding(rows: list[Row]) -> Figure | str:
    """How many times faster than Transformers' class, by share of padding; one panel a setting. All
    of it is of the newest commit."""
    from matplotlib.patheffects import withStroke

    panels: dict[str, dict[int, dict[str, Row]]] = {}
    of_bert = [row for row in rows if row["op"] == "bert" and _PADDED.fullmatch(row["case"])]
    newest = max(of_bert, key=lambda row: row["date"], default={})
    same = ("machine", "commit")
    of_bert = [row for row in of_bert if all(row[name] == newest[name] for name in same)]
    for (_, case, _), found in by_case(of_bert).items():
        match = _PADDED.fullmatch(case)
        if match and OURS in found:
            setting = f"BERT-{match['before']}{match['after'].replace('dropout 0 ', '')}"
            panels.setdefault(setting, {})[int(match["share"])] = found
    panels = {setting: found for setting, found in panels.items() if len(found) > 2}
    if not panels:
        return "no rows of BERT's step at several shares of padding"
    measured = [variants for found in panels.values() for variants in found.values()]
    used = [row for variants in measured for row in variants.values()]

    def gain(variants: dict[str, Row], peer: str, ours: str = "p50_us", theirs: str = "p50_us"):
        return float(variants[peer][theirs]) / float(variants[OURS][ours])

    most = max(share for found in panels.values() for share in found)
    peer = "transformers sdpa"
    spans = []
    for share in (0, most):
        of_share = [found[share] for found in panels.values() if peer in found.get(share, ())]
        gains = [gain(variants, peer) for variants in of_share]
        if gains:
            at = f"at {share} % padding" if share else "unpadded"
            spans.append(f"{min(gains):.1f}–{max(gains):.1f}× {at}")
    title = f"BERT's step against Transformers' (SDPA): {', '.join(spans)}"
    figure = _figure(title, used, (9, 3.9))
    axes_row = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, (setting, found) in zip(axes_row, panels.items(), strict=True):
        shares = sorted(found)
        # If shares are closer to each other, their labels would overlap.
        apart = {b for a, b in zip([-10, *shares], shares, strict=False) if b - a >= 10}
        axes.axhline(1, color="black", linewidth=0.9)
        for peer, (colour, marker, name) in _PEERS.items():
            at = [share for share in shares if peer in found[share]]
            if not at:
                continue
            middle = [gain(found[share], peer) for share in at]
            # The widest range of ratios that the middle three fifths of both variants' times allow.
            low = [gain(found[share], peer, "p80_us", "p20_us") for share in at]
            high = [gain(found[share], peer, "p20_us", "p80_us") for share in at]
            spread = [
                [m - edge for m, edge in zip(middle, low, strict=True)],
                [edge - m for m, edge in zip(middle, high, strict=True)],
            ]
            axes.errorbar(
                at,
                middle,
                spread,
                color=colour,
                marker=marker,
                label=f"against Transformers, {name}",
                capsize=3,
                linewidth=1.8,
                elinewidth=1,
                markersize=6,
            )
            if peer == "transformers sdpa":
                for share, value in zip(at, middle, strict=True):
                    if share not in apart:
                        continue
                    lower = "eager" in found[share] and value < gain(found[share], "eager")
                    axes.annotate(
                        f"{value:.2f}×",
                        (share, value),
                        xytext=(0, -19 if lower else 9),
                        textcoords="offset points",
                        ha="center",
                        fontsize=9,
                        path_effects=[withStroke(linewidth=3, foreground="white")],
                        zorder=5,
                    )
        axes.set_title(setting, fontsize=9.5, loc="left")
        labels = [f"{share} %" if share in apart else "" for share in shares]
        axes.set_xticks(shares, labels)
        axes.set_xlabel("padding", fontsize=9.5)
        axes.margins(x=0.12, y=0.12)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}×")
        _clean(axes, "y")
    axes_row[0].set_ylabel("times as fast", fontsize=10)
    # The legend stands where the lines leave the most room above them.
    free = min(axes_row, key=lambda axes: max(max(line.get_ydata()) for line in axes.lines))
    free.legend(loc="upper left", fontsize=9, frameon=False)
    return figure


_VOCABULARY = re.compile(
    r"(?P<setting>N (?P<rows>\d+),.* E (?P<width>\d+), (?P<dtype>fp32|bf16)), V (?P<size>\d+)"
)
HEADS = "fastplm, as in the heads"
_LOSSES = {
    "full logits": (RED, "s", "full logits, as Transformers' classes"),
    OURS: (SKY, "v", "fastplm, all rows given"),
    "fastplm, recomputed": (GREEN, "^", "fastplm, all rows given, logits recomputed"),
    HEADS: (BLUE, "o", "fastplm, as in its models: the rows that count"),
}


def memory(rows: list[Row]) -> Figure | str:
    """Peak memory of the loss and its gradients by the size of the vocabulary."""
    found: dict[str, dict[int, float]] = {}
    used, gradients, setting = [], {}, ""
    for row in of_one_machine(row for row in rows if row["op"] == "loss_memory"):
        match = _VOCABULARY.fullmatch(row["case"])
        if match and (peak := number(row, "peak_mb")):
            size = int(match["size"])
            found.setdefault(row["variant"], {})[size] = peak
            used.append(row)
            setting = match["setting"]
            # The gradients of the rows, the weight and the bias.
            entries = (int(match["rows"]) + size) * int(match["width"]) + size
            gradients[size] = entries * (4 if match["dtype"] == "fp32" else 2) / 2**20
    if not {"full logits", HEADS} <= set(found):
        return "no rows of loss_memory (python benchmarks/memory.py)"
    largest = max(set(found["full logits"]) & set(found[HEADS]))
    theirs, ours = found["full logits"][largest], found[HEADS][largest]
    title = (
        f"A vocabulary of {largest:,}: the loss takes {ours:,.0f} MiB, with full logits "
        f"{theirs:,.0f} ({theirs / ours:.1f}×)"
    )
    figure = _figure(title, used, (9, 4.6))
    axes = figure.subplots()
    for name, (colour, marker, label) in _LOSSES.items():
        if name in found:
            line = zip(*sorted(found[name].items()), strict=True)
            axes.plot(*line, marker=marker, color=colour, label=label, markersize=6)
    line = zip(*sorted(gradients.items()), strict=True)
    axes.plot(*line, "--", color=GREY, label="the gradients themselves (arithmetic)")
    sizes = sorted(found[HEADS])
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sizes, [f"{size // 1024}k" for size in sizes])
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    axes.set_xlabel("tokens in the vocabulary", fontsize=10)
    axes.set_ylabel("MiB at once, forward and backward", fontsize=10)
    axes.set_title(setting, fontsize=9.5, loc="left")
    _clean(axes)
    axes.legend(loc="upper left", fontsize=9, frameon=False)
    return figure


_ORDERS = {
    "natural": (BLUE, "o", "in their own order"),
    "sorted": (GREEN, "^", "sorted by length"),
}


def rows_of_peers(folder: Path) -> list[Row]:
    """The rows of peers_cpu.csv of the newest commit and of its highest level. Not all of its
    variants can run in one process, so those of several runs are put together."""
    path = folder / "peers_cpu.csv"
    if not path.exists():
        return []
    with path.open(newline="") as file:
        rows = [r for r in csv.DictReader(file) if r["task"] == "embed" and r["order"] in _ORDERS]
    newest = max(rows, key=lambda row: row["date"], default=None)
    rows = [row for row in rows if newest and row["commit"] == newest["commit"]]
    highest = max((row["machine"] for row in rows), key=lambda text: "avx512" in text, default="")
    return [row for row in rows if row["machine"] == highest]


def peers(rows: list[Row]) -> Figure | str:
    """Hidden states of texts: fastplm's rate over that of the best other variant in fp32, by the
    number of texts at once; one panel a model, one line an order of the texts."""
    gains: dict[str, dict[str, dict[int, tuple[float, str, Row]]]] = {}
    settings: dict[tuple[str, ...], dict[str, Row]] = {}
    for row in rows:
        if number(row, "texts_per_s") and "int8" not in row["variant"]:
            setting = tuple(row[name] for name in PEERS_KEY)
            settings.setdefault(setting, {})[row["variant"]] = row
    for (_, model, order, _, batch), found in settings.items():
        others = [row for name, row in found.items() if name != OURS]
        if OURS in found and others:
            best = max(others, key=lambda row: number(row, "texts_per_s"))
            gain = number(best, "ms") / number(found[OURS], "ms")
            of_order = gains.setdefault(model, {}).setdefault(order, {})
            of_order[int(batch)] = (gain, best["variant"], found[OURS])
    points = [at for orders in gains.values() for of in orders.values() for at in of.values()]
    if not points:
        return "no rows of fastplm beside others (python benchmarks/peers_cpu.py)"
    ahead = sum(gain >= 1 for gain, _, _ in points)
    title = f"Hidden states on a CPU: fastplm is the fastest in {ahead} of {len(points)} cases"
    figure = _figure(title, [row for _, _, row in points], (9, 3.9))
    axes_row = figure.subplots(1, len(gains), sharey=True, squeeze=False)[0]
    for axes, (model, orders) in zip(axes_row, gains.items(), strict=True):
        axes.axhline(1, color="black", linewidth=0.9)
        for order, found in orders.items():
            colour, marker, label = _ORDERS[order]
            sizes = sorted(found)
            heights = [found[size][0] for size in sizes]
            axes.plot(sizes, heights, marker=marker, color=colour, label=f"texts {label}")
            for size in sizes:
                gain, best, row = found[size]
                text = f"{100 * number(row, 'padding'):.0f} %\n{best}"
                place = dict(xytext=(0, 7), textcoords="offset points", ha="center")
                axes.annotate(text, (size, gain), **place, fontsize=6.5, color=colour)
        sizes = sorted({size for found in orders.values() for size in found})
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, list(map(str, sizes)))
        axes.set_xlabel("texts at once", fontsize=10)
        axes.set_title(model, fontsize=9.5, loc="left")
        axes.margins(x=0.2, y=0.2)
        _clean(axes)
    axes_row[0].set_ylabel("rate relative to the best other in fp32", fontsize=9)
    axes_row[0].yaxis.set_major_formatter(lambda value, _: f"{value:g}×")
    axes_row[0].legend(fontsize=8.5, frameon=False, loc="upper left", title_fontsize=8)
    return figure


PICTURES: dict[str, Callable[[list[Row]], Figure | str]] = {
    "roofline": roofline,
    "speed": speed,
    "padding": padding,
    "memory": memory,
}


def draw(
    folder: Path, images: Path, suffix: str = "", without: Iterable[str] = ()
) -> tuple[list[Path], list[str]]:
    """The pictures of one machine's rows as images/<picture><suffix>.png, ``without`` some ops.

    Returns:
        The files, and the name and reason of each picture that is not drawn.
    """
    rows = [row for row in latest_rows(folder) if row["op"] not in without]
    images.mkdir(parents=True, exist_ok=True)
    drawn, missing = [], []
    figures = {name: picture(rows) for name, picture in PICTURES.items()}
    if of_peers := rows_of_peers(folder):
        figures["peers"] = peers(of_peers)
    for name, figure in figures.items():
        if isinstance(figure, str):
            missing.append(f"{name}{suffix}: {figure}")
            continue
        drawn.append(images / f"{name}{suffix}.png")
        figure.savefig(drawn[-1], dpi=150)
    return drawn, missing


def draw_all(results: Path, images: Path) -> tuple[list[Path], list[str]]:
    """``draw`` for every machine that has rows, images/<picture>-<machine>.png."""
    drawn, missing = [], []
    for folder in sorted(path for path in results.iterdir() if path.is_dir()):
        if latest_rows(folder):
            done = draw(folder, images, f"-{folder.name}")
            drawn += done[0]
            missing += done[1]
    return drawn, missing


def main() -> int:
    here = Path(__file__).resolve().parent
    results = Path(sys.argv[1]) if len(sys.argv) > 1 else here / "results"
    images = Path(sys.argv[2]) if len(sys.argv) > 2 else here.parent / "docs" / "images"
    drawn, missing = draw_all(results, images)
    for path in drawn:
        print(path)
    for reason in missing:
        print(f"not drawn: {reason}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
