"""``fastplm study``: plan the cells, let the engine run them, and write what they found."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fastplm.data._folder import (
    acquire_lock,
    atomic_write,
    default_cache,
    release_lock,
    say,
)
from fastplm.errors import DataError, check, fail
from fastplm.run.folder import LOCK
from fastplm.run.report import block, counted, drawn
from fastplm.study.cells import Plan, Planner, Store
from fastplm.study.claims import Comparison, compare
from fastplm.study.costs import amount, product_speed
from fastplm.study.engine import check_engine, run
from fastplm.study.grid import COMMANDS, TRAINS, Grid, read_grid
from fastplm.study.options import CELLS
from fastplm.study.picture import draw
from fastplm.study.progress import Speeds, clock, seconds_of, write_plan
from fastplm.study.results import results
from fastplm.study.table import page, write_tables

_STUDIES = Path("runs/studies")
#: The width of the product by which a machine without a finished cell is timed.
_WIDTH = 256


def study(
    name: str,
    *,
    size: str | None = None,
    data: str | Path | None = None,
    folder: str | Path | None = None,
    cells: str | Path = CELLS,
    cache: str | Path | None = None,
    jobs: int | None = None,
    threads: int = 1,
    dry_run: bool = False,
    engine: str = "",
) -> str:
    """Run a study; what is finished of it, or of its cells in another study, is not run again.

    Args:
        name, size, …: as the options of the command, see ``options.add_options``.

    Returns:
        The page of the study, as Markdown; of a dry run a table.

    Raises:
        FastplmError: the file, its data or the folder is wrong, or a cell failed.
    """
    grid = read_grid(name, size)
    store = Store(cells)
    jobs = jobs or max(1, _cores() // threads)
    planner = Planner(grid, store, data, threads, Path(cache or default_cache()).resolve())
    if dry_run:
        return _shown(grid, planner.plan(), store, jobs, threads)
    check_engine()
    named = f"{grid.name}-{grid.size}" if grid.size else grid.name
    out = Path(folder or _STUDIES / named.replace(" ", "-")).resolve()
    try:
        out.mkdir(parents=True, exist_ok=True)
        store.folder.mkdir(parents=True, exist_ok=True)
        handle = acquire_lock(out / LOCK, lambda holder: _refuse(out, holder))
    except OSError as error:
        got, fix = f"{error.filename} ({error.strerror})", "Choose another --out or --cells."
        fail("study", "out", got, "folders that can be written", fix, DataError)
    try:
        plan = _run(grid, planner, store, out, jobs, shlex.split(engine))
        return _written(grid, plan, store, out)
    except KeyboardInterrupt:
        kept = f"{store.folder} keeps what is finished, and the same command goes on."
        say(f"fastplm study: interrupted; {kept}")
        raise
    finally:
        release_lock(out / LOCK, handle)


def _cores() -> int:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # there is none on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _refuse(folder: Path, holder: str) -> Any:
    got, fix = f"{folder}, where process {holder} runs a study", "Wait for it, or choose another."
    fail("study", "out", got, "a folder that no other process uses", fix, DataError)


def _run(
    grid: Grid, planner: Planner, store: Store, folder: Path, jobs: int, options: Sequence[str]
) -> Plan:
    """Run all cells: first those whose settings are known, then those that depend on a choice."""
    while True:
        plan = planner.plan()
        ready = [cell for cell in plan.cells.values() if not cell.provisional]
        left = [cell for cell in ready if store.done(cell) is None]
        if not left:
            check(plan.complete, "study", "cells", "a choice without a result", "none left")
            return plan
        write_plan(folder / "plan.json", plan.cells.values(), store.folder, jobs)
        say(
            f"{grid.name}: {counted(len(plan.cells), 'cell')}, {len(left)} to run now, "
            f"{jobs} at once; results in {folder}"
        )
        run(left, store, folder, folder / "plan.json", jobs, options)


def _written(grid: Grid, plan: Plan, store: Store, folder: Path) -> str:
    found = results(grid, plan, store)
    claims: list[Comparison] = compare(found)
    path = folder / "picture.png"

    def make() -> None:
        with atomic_write(path) as part:
            draw(part, found)

    picture = drawn(path, make)
    write_tables(folder, found, claims, picture)
    return f"{page(found, claims, picture=False)}\nWritten to {folder}.\n"


# --- a dry run ------------------------------------------------------------------------------------


def _shown(grid: Grid, plan: Plan, store: Store, jobs: int, threads: int) -> str:
    """The cells of a study, their FLOPs and hours."""
    cells = list(plan.cells.values())
    done = {cell.key: store.done(cell) for cell in cells}
    left = [cell for cell in cells if done[cell.key] is None]
    times = ((cell, done[cell.key]) for cell in cells)
    finished = [(cell.command, cell.cost, seconds_of(of)) for cell, of in times if of is not None]
    speeds, basis = Speeds(finished), "at the speed of the finished cells"
    if not speeds.known:
        # As if each command had done a second of products.
        speed = product_speed(_WIDTH, threads)
        speeds = Speeds([(command, speed, 1.0) for command in COMMANDS])
        basis = f"at least: at the speed of a matrix product of width {_WIDTH} on this machine"
    lines = []
    for cell in cells:
        state = "" if done[cell.key] is None else " (done)"
        state = " (after a choice of rate or state)" if cell.provisional else state
        hours = clock(speeds.seconds(cell.command, cell.cost))
        key = "" if cell.provisional else cell.key
        lines.append(
            f"{key:20}  {cell.command:8}  {amount(cell.cost, 'FLOP'):>12}  {hours:>10}  "
            f"{cell.label}{state}"
        )
    seconds = sum(speeds.seconds(cell.command, cell.cost) for cell in left) / jobs
    trained, judged = (
        amount(sum(cell.cost for cell in cells if (cell.command in TRAINS) == trains), "FLOP")
        for trains in (True, False)
    )
    each = {
        name: amount(max(cells.cost for cells in found.trainings), "FLOP")
        for name, found in plan.variants.items()
        if found.trainings
    }
    size = f", size {grid.size} of {', '.join(grid.sizes)}" if grid.size else ""
    rows = {
        "study": grid.name + size,
        "cells": f"{len(cells)}, {len(left)} of them to run: "
        + ", ".join(
            counted(sum(cell.command == name for cell in cells), name)
            for name in dict.fromkeys(cell.command for cell in cells)
        ),
        "one training": ", ".join(f"{name}: {cost}" for name, cost in each.items()),
        "FLOPs": f"{trained} of trainings, about {judged} of judges",
        "time": f"{clock(seconds)} with {counted(jobs, 'job')} of {counted(threads, 'thread')}, "
        f"{basis}",
        "written": "nothing",
    }
    return "\n".join([*lines, "", block(rows)])
