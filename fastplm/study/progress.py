"""How far a study is, and the time to go, by the FLOPs of cells and the times of finished ones."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fastplm.data._folder import write_json
from fastplm.run.folder import read_hashed

#: The files of a cell: what it is, what its command prints, and the figures of a finished one.
CELL, LOG, DONE = "cell.json", "log.txt", "done.json"


class Speeds:
    """FLOPs a second of each command, by the cells that are finished.

    Args:
        finished: (command, cost, seconds) of each.
    """

    def __init__(self, finished: Iterable[tuple[str, float, float]]) -> None:
        self._costs: dict[str, float] = {}
        self._seconds: dict[str, float] = {}
        for command, cost, seconds in finished:
            self._costs[command] = self._costs.get(command, 0.0) + cost
            self._seconds[command] = self._seconds.get(command, 0.0) + seconds

    @property
    def known(self) -> bool:
        """Whether a cell is finished."""
        return sum(self._seconds.values()) > 0

    def seconds(self, command: str, cost: float) -> float:
        """The time of a cell; of a command without a finished one by the speed of the others."""
        if self._seconds.get(command, 0) > 0:
            return cost * self._seconds[command] / self._costs[command]
        costs = sum(self._costs.values())
        return cost * sum(self._seconds.values()) / costs if costs else 0.0


def write_plan(path: Path, cells: Iterable[Any], folder: Path, jobs: int) -> None:
    """Write what ``progress`` reads: all cells of a study, and the folder where they are."""
    rows = [
        {"key": cell.key, "command": cell.command, "cost": cell.cost, "label": cell.label}
        for cell in cells
    ]
    write_json(path, {"folder": str(folder), "jobs": jobs, "cells": rows})


def seconds_of(done: dict[str, Any]) -> float:
    """The time of a finished cell: of its training from beginning to end, or of its last piece."""
    times = done["times"]
    return float(max(times["seconds"], times["train_seconds"] or 0.0))


def progress(plan: Path) -> tuple[int, int, float | None]:
    """(finished cells, all cells, seconds to go); None before the first one is finished."""
    content = json.loads(plan.read_text("utf-8"))
    finished, left = [], []
    for cell in content["cells"]:
        done = read_hashed(Path(content["folder"]) / cell["key"] / DONE)
        if done is None:
            left.append(cell)
        else:
            finished.append((cell["command"], cell["cost"], seconds_of(done)))
    speeds = Speeds(finished)
    to_go = None
    if speeds.known:
        each = [speeds.seconds(cell["command"], cell["cost"]) for cell in left]
        # One cell cannot be divided among jobs.
        to_go = max(sum(each) / content["jobs"], max(each, default=0.0))
    return len(finished), len(content["cells"]), to_go


def clock(seconds: float) -> str:
    """Hours, minutes and seconds, as 1:02:03."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"
