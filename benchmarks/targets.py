"""The targets of fastplm, and the figures that the rows give. This file needs no torch.

A time on an H200 in bfloat16 has a floor, the least that the arithmetic of the kernels allows; a
"must", which it may not exceed; and a "stretch", a goal below that. The other targets are shares of
the peak, and ratios within one run.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from plots import HEADS, OURS, Key, Row, number

GPU = "H200"
ELECTRA_STEPS = 1_000_000


class Rows:
    """Rows in which to look up figures."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self.rows = list(rows)

    def find(self, key: Key, variant: str = OURS) -> Row | None:
        """The row of an op, a case and a direction, each a regular expression, and a variant."""
        for row in self.rows:
            names = (row["op"], row["case"], row["direction"])
            if row["variant"] == variant and all(map(re.fullmatch, key, names)):
                return row
        return None

    def of(self, key: Key, column: str = "p50_us", variant: str = OURS) -> float | None:
        row = self.find(key, variant)
        return None if row is None or row["status"] != "ok" else number(row, column)


@dataclass(frozen=True)
class Target:
    """One figure to reach.

    Args:
        what: the figure, in words.
        key: (op, case, direction) of its row, as regular expressions.
        figure: computes the figure from the rows; None if they are missing.
        must, stretch, floor: the limits, in ``unit``.
        higher: whether a higher figure is better.
        machine: part of the name of the target's machine.
        variant: variant of its row.
    """

    what: str
    key: Key
    figure: Callable[[Rows], float | None]
    must: float
    stretch: float | None = None
    floor: float | None = None
    unit: str = "µs"
    higher: bool = False
    machine: str = GPU
    variant: str = OURS


@dataclass(frozen=True)
class Verdict:
    """A target and its figure in the rows; ``miss`` is the factor by which it exceeds ``must``."""

    target: Target
    measured: float | None
    miss: float | None
    text: str


def judge(target: Target, rows: Rows, refused: Mapping[str, str] | None = None) -> Verdict:
    """The figure of a target in the rows; an op in ``refused`` has none, for the reason there."""
    row = rows.find(target.key, target.variant)
    op = target.key[0] if row is None else row["op"]
    if refused and op in refused:
        return Verdict(target, None, None, refused[op])
    value = target.figure(rows)
    if value is None or value <= 0:
        failed = row is not None and row["status"] != "ok"
        return Verdict(target, None, None, str(row["status"]) if failed else "not measured")
    miss = target.must / value if target.higher else value / target.must
    if miss > 1:
        return Verdict(target, value, miss, f"**missed**, {miss:.2f} × the must")
    near = target.stretch
    stretched = near is not None and (value >= near if target.higher else value <= near)
    return Verdict(target, value, miss, "stretch reached" if stretched else "must reached")


# --- how a figure follows from rows ---------------------------------------------------------------


def _time(key: Key, **of: str) -> Callable[[Rows], float | None]:
    return lambda rows: rows.of(key, **of)


def _ratio(
    over: Key,
    under: Key,
    over_variant: str = OURS,
    under_variant: str = OURS,
    column: str = "p50_us",
) -> Callable[[Rows], float | None]:
    def figure(rows: Rows) -> float | None:
        first = rows.of(over, column, over_variant)
        second = rows.of(under, column, under_variant)
        return first / second if first and second else None

    return figure


def _backward(case: str, op: str) -> Callable[[Rows], float | None]:
    """The time of a backward; if the rows have the whole step, its time less the forward's."""

    def figure(rows: Rows) -> float | None:
        whole, half = (rows.of((op, case, direction)) for direction in ("training", "forward"))
        return whole - half if whole and half else rows.of((op, case, "backward"))

    return figure


# --- the targets ----------------------------------------------------------------------------------


def _attention() -> Iterable[Target]:
    for case, floors, musts, stretches in (
        ("BERT-base 256x128", (47, 82), (60, 125), (54, 105)),
        ("BERT-base 64x512", (65, 163), (128, 380), (110, 300)),
        ("ALBERT-xxlarge 16x512", (87, 218), (172, 505), (146, 400)),
        ("ELECTRA-small 128x128", (8, 16), (14, 26), (11, 22)),
        ("GPT-2 16x1024 causal", (33, 82), (80, 215), (65, 175)),
        ("cross 128x512", (30, 59), (42, 95), (36, 80)),
        ("cross 512x128", (30, 59), (42, 95), (36, 80)),
    ):
        for i, direction in enumerate(("forward", "backward")):
            key = ("attention", re.escape(case), direction)
            yield Target(
                f"attention, {case}, {direction}",
                key,
                _time(key),
                must=musts[i],
                stretch=stretches[i],
                floor=floors[i],
            )
    for direction, must, stretch in (("forward", 1.10, 1.05), ("backward", 1.20, 1.12)):
        key = ("attention", "T5-base 64x512", direction)
        yield Target(
            f"attention, T5's bias over none, {direction}",
            key,
            _ratio(key, key, under_variant="fastplm, no bias"),
            must=must,
            stretch=stretch,
            unit="×",
        )
    for shape in ("BERT-base 256x128", "BERT-base 64x512"):
        for layout, plain, must in (("", "", 1.10), (", ragged", " padded 0 %, ragged", 1.12)):
            for direction in ("forward", "backward"):
                key = ("attention", f"{shape} dropout 0.1{layout}", direction)
                yield Target(
                    f"attention, {shape}{layout}, dropout 0.1 over none, {direction}",
                    key,
                    _ratio(key, ("attention", f"{shape}{plain}", direction)),
                    must=must,
                    unit="×",
                )


def _loss() -> Iterable[Target]:
    for case, floor, must, stretch in (
        ("BERT-base N 4915", 880, 1150, 1000),
        ("BERT-large N 4915", 1170, 1500, 1320),
        ("RoBERTa-base N 4915", 1440, 1900, 1650),
        ("GPT-2 N 16384", 4800, 6200, 5500),
        ("ELECTRA-small generator N 2458", 73, 240, 170),
        ("ELECTRA-small generator N 2458, with sample", 110, 270, 190),
    ):
        key = ("linear_cross_entropy", re.escape(case), "training")
        yield Target(
            f"linear cross-entropy, {case}",
            key,
            _time(key),
            must=must,
            stretch=stretch,
            floor=floor,
        )


def _small() -> Iterable[Target]:
    case = "BERT-base 256x128"
    key = ("replaced_token_loss", case, "training")
    yield Target("replaced-token loss, forward + gradient", key, _time(key), must=29, floor=23)
    key = ("mask_tokens", case, "forward")
    yield Target("choose + corrupt + compact", key, _time(key), must=6, floor=2.5)
    key = ("gather_rows", case, "forward")
    yield Target("gather rows", key, _time(key), must=5, floor=3.5)
    key = ("gather_rows", case, "training|backward")
    yield Target("scatter back", key, _backward(case, "gather_rows"), must=16, floor=13.5)


def _steps() -> Iterable[Target]:
    for size, shape, must, stretch in (
        ("base", "256x128", 42, 50),
        ("base", "64x512", 42, 49),
        ("large", "256x128", 47, 55),
        ("large", "64x512", 47, 53),
    ):
        key = ("bert", rf".*{size} {shape}\b.*padding 0 ?%.*bf16.*", "training")

        def share(rows: Rows, key: Key = key) -> float | None:
            mfu = rows.of(key, "mfu")
            return None if mfu is None else 100 * mfu

        yield Target(
            f"BERT-{size} step, {shape}, MFU",
            key,
            share,
            must=must,
            stretch=stretch,
            unit="%",
            higher=True,
        )
    key = ("electra_pretraining", "ELECTRA-small 128x128.*", "training")
    best = "fastplm, CUDA graph"

    def hours(rows: Rows) -> float | None:
        step = rows.of(key, variant=best)
        return None if step is None else step * ELECTRA_STEPS / 3.6e9

    yield Target(
        "ELECTRA-small, 1M steps at B 128, S 128 (by arithmetic from the time of a step)",
        key,
        hours,
        must=2,
        stretch=1.5,
        unit="hours",
        variant=best,
    )


def _gain(dropout: str, dtype: str, share: int) -> tuple[Key, Callable[[Rows], float | None]]:
    case = rf".*base 8x128 padding {share} ?% dropout {re.escape(dropout)} {dtype}"
    key = ("bert", case, "training")
    return key, _ratio(key, key, over_variant="transformers sdpa")


def _between(dropout: str, dtype: str) -> Callable[[Rows], float | None]:
    """The ratio at 35 % padding, from 30 and 50 %: fastplm's time falls linearly with padding,
    that of Transformers does not."""

    def figure(rows: Rows) -> float | None:
        low, high = (_gain(dropout, dtype, share)[1](rows) for share in (30, 50))
        return 1 / (0.75 / low + 0.25 / high) if low and high else None

    return figure


def _cpu() -> Iterable[Target]:
    for dropout, dtype in (("0", "fp32"), ("0", "bf16"), ("0.1", "bf16")):
        for share, must, stretch in ((0, 1.5, 1.7), (35, 2.2, 2.6), (50, 3.0, 3.8)):
            key, figure = _gain(dropout, dtype, 30 if share == 35 else share)
            where = "35 % (by arithmetic from 30 and 50 %)" if share == 35 else f"{share} %"
            yield Target(
                f"BERT-base step, padding {where}, dropout {dropout}, {dtype}, times as fast as "
                "Transformers with SDPA",
                key,
                _between(dropout, dtype) if share == 35 else figure,
                must=must,
                stretch=stretch,
                unit="×",
                higher=True,
                machine="cpu",
            )
    key = ("loss_memory", ".*E 768, fp32, V 32768", "training")
    yield Target(
        "peak memory of the loss and its gradients, as in the heads, over that of full logits",
        key,
        _ratio(key, key, HEADS, "full logits", column="peak_mb"),
        must=0.25,
        unit="×",
        machine="cpu",
        variant=HEADS,
    )


TARGETS = (*_attention(), *_loss(), *_small(), *_steps(), *_cpu())


def worst(rows: Rows, machine: str, count: int = 3) -> list[tuple[str, Row]]:
    """The rows that miss their targets most, and by how much. If this machine has measured no
    target: the rows with the least share of the roofline, among the ops that have targets."""
    verdicts = [judge(target, rows) for target in TARGETS if target.machine in machine]
    known = sorted((v for v in verdicts if v.miss is not None), key=lambda v: -(v.miss or 0))
    ranked = [
        (f"{verdict.target.what}: {verdict.miss:.2f} × the must", row)
        for verdict in known
        if (row := rows.find(verdict.target.key, verdict.target.variant)) is not None
    ]
    if not ranked:
        ops = {target.key[0] for target in TARGETS}
        shares = [
            (share, row)
            for row in rows.rows
            if row["op"] in ops
            and row["variant"] == OURS
            and row["status"] == "ok"
            and (share := number(row, "of_roofline")) is not None
        ]
        ranked = [
            (f"{row['op']}, {row['case']}, {row['direction']}: {share:.1%} of the roofline", row)
            for share, row in sorted(shares, key=lambda pair: pair[0])
        ]
    found: dict[Key, tuple[str, Row]] = {}
    for why, row in ranked:
        found.setdefault((row["op"], row["case"], row["direction"]), (why, row))
    return list(found.values())[:count]
