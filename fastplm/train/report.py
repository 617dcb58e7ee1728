"""The figures and the picture of a run."""

from __future__ import annotations

import json
import platform
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch


def curve(log_history: list[dict[str, float]]) -> list[dict[str, float]]:
    """The logged steps of a Trainer's history: step, losses, learning rate, tokens/s."""
    return [
        {name: value for name, value in entry.items() if name != "epoch"}
        for entry in log_history
        if "loss" in entry
    ]


def settings_of(arguments: Any) -> dict[str, Any]:
    """The fields of a dataclass of arguments, as JSON has them."""
    return json.loads(json.dumps(asdict(arguments), default=str))


def versions() -> dict[str, str]:
    """The versions of the libraries."""
    import tokenizers
    import transformers

    import fastplm

    return {
        "fastplm": fastplm.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "tokenizers": tokenizers.__version__,
        "platform": platform.platform(),
    }


def plot_losses(path: Path, title: str, history: list[dict[str, float]]) -> None:
    """One panel for the loss, or one for each part where it has parts."""
    from matplotlib.figure import Figure

    names = sorted({name for entry in history for name in entry if name.endswith("_loss")})
    names = names or ["loss"]
    figure = Figure(figsize=(5.5 * len(names), 4), layout="constrained")
    axes = figure.subplots(1, len(names), squeeze=False)
    for name, axis in zip(names, axes[0], strict=True):
        points = [(entry["step"], entry[name]) for entry in history if name in entry]
        axis.plot(*zip(*points, strict=True))
        axis.set_title(name.replace("_", " "))
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("nats")
    figure.suptitle(title)
    figure.savefig(path, dpi=120)


def summary(metrics: dict[str, Any]) -> str:
    """The result of a run as a table for the terminal."""
    history = metrics["history"]
    rows = []
    for name in (name for name in history[-1] if name.endswith("loss")):
        first = next(entry[name] for entry in history if name in entry)
        rows.append((name.replace("_", " "), f"{first:.4f} -> {history[-1][name]:.4f}"))
    held_out = dict(metrics.get("held_out", {}))
    words = held_out.pop("words", {})
    held_out.update({f"words: {name}": value for name, value in words.items()})
    for name, value in held_out.items():
        shown = f"{value:.4f}" if isinstance(value, float) else str(value)
        rows.append((f"held out: {name.replace('_', ' ')}", shown))
    rows += [
        ("parameters", f"{metrics['parameters']:,}"),
        ("precision", metrics["precision"]),
        ("tokens/s", f"{metrics['tokens_per_second']:,.0f}{_of_all(metrics)}"),
        ("training time", f"{metrics['train_seconds']:.1f} s{_of_all(metrics)}"),
        *metrics["models"].items(),
        ("picture", metrics["picture"]),
    ]
    return block(dict(rows))


def block(rows: dict[str, str]) -> str:
    """Two columns of names and texts."""
    width = max(map(len, rows))
    return "\n".join(f"{name:<{width}}  {text}" for name, text in rows.items())


def _of_all(metrics: dict[str, Any]) -> str:
    """Says of a resumed run that a figure is of all its steps."""
    resumed = ", ".join(f"{step:,}" for step in metrics.get("starts", []) if step)
    return f" (all steps; resumed at {resumed})" if resumed else ""
