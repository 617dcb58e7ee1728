"""The files of a finished study: table.tsv, table.json, rates.tsv, study.md and times.tsv.

The first three depend on the figures alone: they are the same bit for bit however often the study
was interrupted. Times are of the machine and the day, so they have a file of their own; study.md
has both.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fastplm.data._folder import atomic_write
from fastplm.run.report import tsv
from fastplm.study.claims import Comparison
from fastplm.study.held_out import CLEAR_NATS
from fastplm.study.results import TIMES, UNRECORDED, Results, Row, Scores

EARLY = "too early to tell"
_NONE = "–"


def write_tables(out: Path, results: Results, claims: Sequence[Comparison], picture: bool) -> None:
    """Write the files of a study to its folder."""
    files = {
        "table.tsv": _table_of_scores(results),
        "table.json": json.dumps(content(results, claims), indent=1) + "\n",
        "rates.tsv": _table_of_rates(results),
        "times.tsv": _table_of_times(results),
        "study.md": page(results, claims, picture),
    }
    for name, text in files.items():
        with atomic_write(out / name) as part:
            part.write_text(text, encoding="utf-8")


def content(results: Results, claims: Sequence[Comparison]) -> dict[str, Any]:
    """All figures, as JSON has them."""
    grid = results.grid
    return {
        "study": grid.name,
        "size": grid.size,
        "question": grid.question,
        "paper": grid.paper,
        "tokenizers": results.tokenizers,
        "published": {name: dict(each) for name, each in results.published.items()},
        "variants": [
            {
                "name": row.name,
                "flops": _flops(row),
                **row.facts,
                "scores": {name: _scores(each) for name, each in row.scores.items()},
                "states": {
                    name: [{"share": share, **_scores(each)} for share, each in milestones]
                    for name, milestones in row.milestones.items()
                },
            }
            for row in results.rows.values()
        ],
        "spread": {name: asdict(each) for name, each in results.spreads.items()},
        "claims": [
            {
                "better": each.claim.better,
                "than": each.claim.than,
                "on": each.on,
                "paper": each.claim.paper,
                "difference": each.difference and asdict(each.difference.interval),
                "p": each.difference and each.difference.p,
                "p_holm": each.p,
                "early": list(each.early),
                "verdict": each.verdict,
                "text": each.text,
            }
            for each in claims
        ],
    }


def _scores(scores: Scores) -> dict[str, Any]:
    return {
        **asdict(scores.interval),
        "values": scores.values.tolist(),
        "lower_is_better": scores.lower,
        "early": list(scores.early),
    }


def _flops(row: Row) -> float | None:
    """The FLOPs of a training with four digits: the count is a product with a measured speed."""
    return None if row.flops is None else float(f"{row.flops:.4g}")


def _digits(value: float | None, form: str, nothing: str = "") -> str:
    return nothing if value is None else format(value, form)


def _table_of_scores(results: Results) -> str:
    facts = ("parameters", "vocab_size", "learning_rate", "seeds")
    ends = ("", " low", " high", " early")
    names = [f"{name}{end}" for name in results.columns for end in ends]
    rows: list[list[Any]] = [["variant", "flops", *facts, *names]]
    for row in results.rows.values():
        rows.append([row.name, _flops(row), *(row.facts[name] for name in facts)])
        for name in results.columns:
            scores = row.scores.get(name)
            if scores is None:
                rows[-1] += [None] * len(ends)
                continue
            rows[-1] += [_digits(value, ".6g") for value in asdict(scores.interval).values()]
            rows[-1].append(EARLY if scores.early else None)
    return tsv(rows)


def _table_of_rates(results: Results) -> str:
    """Each rate that was tried has its held-out loss at seed 0, none where that diverged."""
    rows: list[Sequence[Any]] = [("variant", "learning_rate", "held_out_loss", "taken")]
    for row in results.rows.values():
        taken = row.facts["learning_rate"]
        for rate, loss in row.facts["rates"].items():
            rows.append((row.name, rate, _digits(loss, ".6g"), "yes" if rate == taken else "no"))
    return tsv(rows)


def _table_of_times(results: Results) -> str:
    rows: list[Sequence[Any]] = [("variant", "flops", *TIMES)]
    for row in results.rows.values():
        shown = [_digits(row.times[name], ".1f") for name in TIMES]
        rows.append((row.name, _flops(row), *shown))
    return tsv(rows)


# --- the page -------------------------------------------------------------------------------------


def page(results: Results, claims: Sequence[Comparison], picture: bool) -> str:
    """The study as a page of Markdown: question, table, picture, claims."""
    grid = results.grid
    size = f", size {grid.size}" if grid.size else ""
    lines = [f"# {grid.name}{size}", ""]
    lines += [grid.question, ""] if grid.question else []
    lines += [f"Paper: {grid.paper}.", ""] if grid.paper else []
    lines += [*_table(results), ""]
    if picture:
        lines += ["![scores with their 95 % intervals](picture.png)", ""]
    lines += [*(each.text + "\n" for each in claims)]
    lines += [*_spreads(results), *_notes(results), ""]
    return "\n".join(lines)


def _table(results: Results) -> list[str]:
    columns = results.columns
    head = ["variant", "FLOPs", "CPU s", "rate", *columns]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for row in results.rows.values():
        cells = [
            row.name,
            _digits(_flops(row), ".3g", _NONE),
            _digits(row.times["train_cpu_seconds"], ",.0f", _NONE),
            row.facts["learning_rate"] or _NONE,
            *(_cell(row.scores.get(name)) for name in columns),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _cell(scores: Scores | None) -> str:
    if scores is None:
        return _NONE
    found = scores.interval
    text = f"{found.mean:.3f}"
    if found.low is not None:
        text += f" [{found.low:.3f}, {found.high:.3f}]"
    return f"{text} ({EARLY})" if scores.early else text


def _spreads(results: Results) -> list[str]:
    """How much the seeds vary, and how many a claim of one point needs."""
    if not results.spreads:
        return []
    lines = [
        "| standard deviation | between pre-training seeds | between fine-tuning seeds | "
        "seeds for one point |",
        "|---|---|---|---|",
    ]
    for name, each in results.spreads.items():
        within = _digits(each.columns, ".4f", _NONE)
        scores = (row.scores[name].values for row in results.rows.values() if name in row.scores)
        point = 1.0 if max(values.max() for values in scores) > 1 else 0.01
        seeds, low, high = each.needed(point)
        columns = "" if each.columns is None else f" × {each.number}"
        needed = f"{seeds}{columns} ({low} to {high})"
        lines.append(f"| {name} | {each.rows:.4f} | {within} | {needed} |")
    lines += [
        "",
        "Over the variants that are not too early to tell, or all where none is. Fine-tuning seeds "
        "are those of one pre-training. The last column: the seeds of each of two variants with "
        "which a difference of one point is found in four of five studies (t-test, two-sided, 5 %, "
        "not paired); in brackets: for the 95 % interval of the deviation.",
        "",
    ]
    return lines


def _notes(results: Results) -> list[str]:
    notes = [
        "FLOPs and CPU seconds are those of one training. In brackets: the 95 % interval of a "
        "bootstrap over pre-training and fine-tuning seeds, of the examples that are there; "
        "without one there is one seed.",
    ]
    early = {
        f"{row.name}: {reason}"
        for row in results.rows.values()
        for each in row.scores.values()
        for reason in each.early
    }
    for name, others in results.published.items():
        shown = ", ".join(f"{system} {value:.3f}" for system, value in others.items())
        notes.append(f"{name}, as published: {shown}.")
    notes += [f"Too early to tell, {reason}." for reason in sorted(early)]
    lost = dict.fromkeys(label for row in results.rows.values() for label in row.diverged)
    notes += [
        f"{label}: it diverged, or what it needs did, and so it has no figures." for label in lost
    ]
    of_rates: dict[str, list[str]] = {}  # variants of one model have the same ones
    for row in results.rows.values():
        if row.facts["rates"]:
            text = json.dumps([row.facts["learning_rate"], row.facts["rates"]])
            of_rates.setdefault(text, []).append(row.name)
    for text, names in of_rates.items():
        name, (chosen, tried) = ", ".join(names), json.loads(text)
        shown = ", ".join(f"{rate}: {_digits(loss, '.4f', _NONE)}" for rate, loss in tried.items())
        start = f"Held-out loss of {name} by learning rate (seed 0)"
        notes.append(f"{start}: {shown}.{_edge(chosen, tried)}")
    if of_rates:
        notes.append(
            "The losses by learning rate are sums of all that a training minimises, and of an "
            "ELECTRA its generator's alone."
        )
    if results.tokenizers > 1:
        notes.append(f"The variants have {results.tokenizers} different tokenizers.")
    if len(results.codes) > 1:
        notes.append(
            f"The cells were made by {len(results.codes)} states of the code, "
            f"{', '.join(results.codes)}: see docs/studies.md."
        )
    if results.versions:
        shown = ", ".join(f"{name} {value}" for name, value in results.versions.items())
        notes.append(f"Made with {shown}.")
    if {*results.devices} - {UNRECORDED}:
        notes.append(f"Trained on {' and '.join(results.devices)}.")
    if len(results.devices) > 1:
        notes.append("CPU seconds of trainings on different devices do not compare.")
    return [line for note in notes for line in (note, "")]


def _edge(chosen: str, tried: Mapping[str, float | None]) -> str:
    """Sentences where the best rate is at an end of those that were tried, or hardly the best.

    The one that was chosen has another loss than the lowest if that is of an ELECTRA whose
    discriminator has learned nothing.
    """
    known = {float(rate): (loss, rate) for rate, loss in tried.items() if loss is not None}
    ordered = sorted(known, key=lambda rate: (known[rate][0], rate))
    rates, said = sorted(map(float, tried)), ""
    if not ordered or len(rates) == 1:
        return ""
    best = float(chosen)
    before, others = ordered[: ordered.index(best)], ordered[ordered.index(best) + 1 :]
    if before:
        passed = ", ".join(known[rate][1] for rate in before)
        said = f" {chosen} is taken, as at {passed} the discriminator learned nothing."
    if best in (rates[0], rates[-1]):
        end, beyond = ("lowest", "lower") if best == rates[0] else ("highest", "higher")
        said += f" The {end} of them is the best: a {beyond} one may be better."
    as_good = [known[rate][1] for rate in others if known[rate][0] < known[best][0] + CLEAR_NATS]
    if as_good:
        said += f" Within {CLEAR_NATS} nats of it: {', '.join(as_good)}."
    return said
