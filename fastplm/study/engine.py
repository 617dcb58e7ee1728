"""Snakemake runs the cells of a study: a rule for each, whose output is its ``done.json``."""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import importlib.util
import json
import os
import shlex
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import fastplm
from fastplm.data._folder import write_json
from fastplm.errors import DataError, check, fail
from fastplm.study.cells import Cell, Store
from fastplm.study.progress import CELL, DONE, LOG

_ROOT = Path(fastplm.__file__).parent
#: What only shows or plans, and changes no figure of a run.
_ASIDE = ("study", "triton_kernels")
#: Options that say where cells run and how many at once.
_PLACES = frozenset(("--executor", "-e", "--profile", "--cores", "-c", "--jobs", "-j"))
_HEAD = """\
# Written by fastplm study, which runs it, as this does:
# snakemake --snakefile {name} --directory {cells}
"""


def check_engine() -> None:
    """Check that the engine is installed.

    Raises:
        DataError: it is not.
    """
    there = importlib.util.find_spec("snakemake") is not None
    fix = "pip install 'snakemake>=9', with Python 3.11 or later."
    got = "no Snakemake, which runs the cells"
    check(there, "study", "engine", got, "a package that is installed", fix, DataError)


def run(
    cells: Sequence[Cell], store: Store, out: Path, plan: Path, jobs: int, options: Sequence[str]
) -> None:
    """Run cells, each after those that it needs, and go on with the others where one fails.

    Args:
        cells: to be run.
        store: where they are.
        out: the folder of the study, which this process has locked.
        plan: of all cells, for the progress.
        jobs: how many cells run at once.
        options: of Snakemake, added to those that are needed.

    Raises:
        DataError: not all cells were finished.
    """
    for cell in cells:
        describe(cell, store)
        if store.done(cell) is None:  # damaged, if it is there: it would be taken for finished
            (store.at(cell) / DONE).unlink(missing_ok=True)
    snakefile = out / "Snakefile"
    head = _HEAD.format(name=shlex.quote(str(snakefile)), cells=shlex.quote(str(store.folder)))
    snakefile.write_text(head + rules(cells, plan), "utf-8")
    cores = jobs * max(cell.threads for cell in cells)
    code = _snakemake(words_of(snakefile, store.folder, cores, options))
    left = [cell for cell in cells if store.done(cell) is None]
    if left or code:
        logs = store.at(left[0]) / LOG if left else snakefile
        got = f"Snakemake's exit code {code}"
        if left:
            got = f"{len(left)} of {len(cells)} cells that are not finished, {left[0].label} first"
        fix = f"See {logs}; the same command goes on."
        fail("study", "cells", got, "all of them finished", fix, DataError)


def words_of(snakefile: Path, folder: Path, cores: int, options: Sequence[str]) -> list[str]:
    """The words of Snakemake's command line.

    Args:
        snakefile: its file.
        folder: of the cells.
        cores: that it may use here, unless ``options`` say where it runs.
        options: added to those that are needed.
    """
    here = [] if _PLACES.intersection(options) else ["--cores", str(cores)]
    return [
        *("--snakefile", str(snakefile), "--directory", str(folder), *here),
        *("--keep-going", "--quiet", "all"),
        # A cell is another one as soon as anything that matters is different, so neither times of
        # files nor the text of a rule make one run again; and its file is there whole or not at
        # all. Snakemake's own lock would outlive kill -9: the folder of the study is locked by
        # this process, and each cell by its own, as every run of a command is.
        *("--rerun-triggers", "mtime", "--ignore-incomplete", "--nolock", "--drop-metadata"),
        *options,
    ]


def _snakemake(words: Sequence[str]) -> int:
    """Run Snakemake in this process, so that it ends with it; returns its exit code."""
    from snakemake.cli import main

    before = os.getcwd()
    try:
        main(list(words))
    except SystemExit as end:
        return int(end.code or 0)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.chdir(before)
    return 0


def describe(cell: Cell, store: Store) -> None:
    """Write what a cell is to its folder, where the engine reads it."""
    folder = store.at(cell)
    folder.mkdir(parents=True, exist_ok=True)
    content = {
        "label": cell.label,
        "command": cell.command,
        "words": list(cell.words),
        "out": cell.out,
        "threads": cell.threads,
        "folder": str(cell.folder),
        "needs": [need.key for need in cell.needs],
        "facts": dict(cell.facts),
        "code": digest(),
    }
    write_json(folder / CELL, content)


@functools.cache
def digest() -> str:
    """The hash of the code of the library: another one says that it is another code, not that
    results are others."""
    found = hashlib.blake2b(digest_size=8)
    for path in sorted(_ROOT.rglob("*.py")):
        if path.relative_to(_ROOT).parts[0] not in _ASIDE:
            found.update(meaning(path.read_text("utf-8")).encode())
    return found.hexdigest()


def meaning(source: str) -> str:
    """A text of what a module does, which its comments and docstrings do not change."""
    tree = ast.parse(source)
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(tree):
        if isinstance(node, documented) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return ast.dump(tree)


def rules(cells: Iterable[Cell], plan: Path) -> str:
    """The rules of a Snakefile for these cells; those that are done have none."""
    cells = list(cells)
    lines = ["rule all:", "    input:"]
    lines += [f"        {json.dumps(f'{cell.key}/{DONE}')}," for cell in cells]
    for cell in cells:
        words = [sys.executable, "-m", "fastplm.study.cell", cell.key, str(plan)]
        command = shlex.join(words).replace("{", "{{").replace("}", "}}")
        label = " ".join(ascii(cell.label)[1:-1].split())
        lines += ["", f"# {label}", f"rule {cell.command}_{cell.key}:"]
        if cell.needs:
            lines.append("    input:")
            lines += [
                f"        ancient({json.dumps(f'{need.key}/{DONE}')})," for need in cell.needs
            ]
        lines += [
            f"    output: {json.dumps(f'{cell.key}/{DONE}')}",
            f"    threads: {cell.threads}",
            f"    shell: {json.dumps(command)}",
        ]
    return "\n".join(lines) + "\n"
