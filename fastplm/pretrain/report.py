"""The figures and the picture of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fastplm.run.report import block, drawn

#: Figures by their names, of growing steps.
Curve = list[dict[str, float]]
#: How a summary calls the figures of ``evaluate.detection_at_base_rate``, and what they are.
_BY_SHARE = "by share"
_WHAT_BY_SHARE = (
    "only tokens that may be replaced, found if their probability is above the share replaced; the "
    "other figures are of all tokens, found if it is above 0.5"
)


def numbers_of(held_out: Mapping[str, Any], start: str = "") -> dict[str, float]:
    """The numbers of nested dicts, with names such as ``words_precision``."""
    found: dict[str, float] = {}
    for name, value in held_out.items():
        if isinstance(value, Mapping):
            found |= numbers_of(value, f"{start}{name}_")
        elif isinstance(value, int | float):
            found[f"{start}{name}"] = value
    return found


def plot_losses(
    path: Path,
    title: str,
    history: Curve,
    held_out: Curve,
    token_loss: str | None,
    beside: Sequence[str] = (),
) -> bool:
    """One panel for the loss, or one for each part where it has parts; held-out text as points.

    The ``token_loss`` of held-out text is beside the whole loss if that has no parts; and beside
    it are the losses ``beside``, such as those of a unigram and a bigram. Returns whether the
    picture was drawn.
    """

    def draw() -> None:
        from matplotlib.figure import Figure

        names = sorted({name for entry in history for name in entry if name.endswith("_loss")})
        names = names or ["loss"]
        figure = Figure(figsize=(5.5 * len(names), 4), layout="constrained")
        axes = figure.subplots(1, len(names), squeeze=False)
        for name, axis in zip(names, axes[0], strict=True):
            same = token_loss if name == "loss" else name
            axis.plot(*_points(history, name), label="training")
            if held_out and same in held_out[-1]:
                axis.plot(*_points(held_out, same), "o-", label="held out")
                losses = beside if same == token_loss else ()
                for each, style in zip(losses, (":", "--"), strict=False):
                    label = f"held out, {each.removesuffix('_loss')}"
                    axis.axhline(held_out[-1][each], color="grey", linestyle=style, label=label)
                axis.legend()
            axis.set_title(name.replace("_", " "))
            axis.set_xlabel("step")
            axis.grid(alpha=0.3)
        axes[0][0].set_ylabel("nats")
        figure.suptitle(title)
        figure.savefig(path, dpi=120)

    if drawn(path, draw):
        return True
    path.unlink(missing_ok=True)
    return False


def _points(entries: Curve, name: str) -> tuple[list[float], list[float]]:
    """The steps and the figures of the entries that have this figure."""
    having = [entry for entry in entries if name in entry]
    return [entry["step"] for entry in having], [entry[name] for entry in having]


def summary(metrics: dict[str, Any]) -> str:
    """The result of a run as a table for the terminal."""
    history = metrics["history"]
    rows = []
    for name in (name for name in history[-1] if name.endswith("loss")):
        first = next(entry[name] for entry in history if name in entry)
        rows.append((name.replace("_", " "), f"{first:.4f} -> {history[-1][name]:.4f}"))
    held_out = dict(metrics.get("held_out", {}))
    by_share = held_out.pop("words", {})
    for title, values in (("held out", held_out), (f"held out, {_BY_SHARE}", by_share)):
        for name, value in values.items():
            shown = f"{value:.4f}" if isinstance(value, float) else str(value)
            rows.append((f"{title}: {name.replace('_', ' ')}", shown))
    if by_share:
        rows.append((f"({_BY_SHARE}", f"{_WHAT_BY_SHARE})"))
    rows += [
        ("parameters", f"{metrics['parameters']:,}"),
        ("precision", metrics["precision"]),
        ("tokens/s", f"{metrics['tokens_per_second']:,.0f}{_of_all(metrics)}"),
        ("training time", f"{metrics['train_seconds']:.1f} s{_of_all(metrics)}"),
        *metrics["models"].items(),
        ("picture", metrics["picture"] or "none was drawn"),
    ]
    return block(dict(rows))


def _of_all(metrics: dict[str, Any]) -> str:
    """Says of a resumed run that a figure is of all its steps."""
    resumed = ", ".join(f"{step:,}" for step in metrics.get("starts", []) if step)
    return f" (all steps; resumed at {resumed})" if resumed else ""
