"""What the record and the summary of every run hold."""

from __future__ import annotations

import csv
import io
import json
import platform
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from fastplm._machine import computes_in, cpu_kind, cpu_model, in_bf16
from fastplm.data._folder import say


def curve(log_history: list[dict[str, float]], name: str = "loss") -> list[dict[str, float]]:
    """The entries of a Trainer's history with a figure: step, losses, learning rate, tokens/s."""
    kept = (entry for entry in log_history if name in entry)
    return [{name: value for name, value in entry.items() if name != "epoch"} for entry in kept]


def scores_by_step(log_history: list[dict[str, float]]) -> list[dict[str, float]]:
    """The scores that ``RunTrainer.evaluate`` has logged, each with its step."""
    start = "eval_"
    return [
        {name.removeprefix(start): entry[name] for name in ("step", *entry) if name != "epoch"}
        for entry in log_history
        if any(name.startswith(start) for name in entry)
    ]


def settings_of(arguments: Any) -> dict[str, Any]:
    """The fields of a dataclass of arguments, as JSON has them."""
    return json.loads(json.dumps(asdict(arguments), default=str))


def versions() -> dict[str, str]:
    """The versions of the libraries, and what they run on."""
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
        "cpu": f"{cpu_model()} ({cpu_kind()}{', bf16' if computes_in(torch.bfloat16) else ''})",
    }


def precision(args: Any) -> str:
    """The precision of a training, and why."""
    bf16 = in_bf16(args.precision)
    name = "bf16" if bf16 else "fp32"
    if args.precision != "auto":
        why = "the run began" if args.is_default("precision") else "--precision says"
        return f"{name}, as {why}"
    return f"{name}: this hardware {'multiplies' if bf16 else 'has no'} bf16"


def counted(number: int, noun: str) -> str:
    """The number and the noun, in the plural where there is not one."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def block(rows: dict[str, str]) -> str:
    """Two columns of names and texts."""
    width = max(map(len, rows))
    return "\n".join(f"{name:<{width}}  {text}" for name, text in rows.items())


def tsv(rows: Iterable[Sequence[Any]]) -> str:
    """Rows of strings and numbers, separated by tabs; nothing stands for None."""
    text = io.StringIO()
    csv.writer(text, delimiter="\t", lineterminator="\n").writerows(rows)
    return text.getvalue()


def drawn(path: Path, draw: Callable[[], None]) -> bool:
    """Draw a picture; returns whether it was drawn.

    Where matplotlib fails, a line on stderr says why, as a result is worth more than its picture.
    """
    try:
        draw()
    except Exception as error:  # of whatever kind, from its settings to the fonts of the system
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        say(f"fastplm: {path} was not drawn, as matplotlib failed: {reason:.200}")
        return False
    return True
