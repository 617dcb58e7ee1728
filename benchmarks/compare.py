"""Is this tree slower than an earlier commit? Both are measured here, in turns.

    python benchmarks/compare.py REF [--ops attention gather_rows] [--rounds N] [--turns 3]

REF is checked out into a temporary worktree, and the benchmarks of both trees run alternately (REF,
this tree, REF, this tree …), each in its own process, so that other load on the machine affects
both. The table has a line for each (op, case, direction, variant): the median before and after,
their ratio (above 1: slower now), and its spread, the least and the most that the intervals allow.
The interval of one turn is its 20th to 80th percentile. The interval of several turns is the median
of their intervals, widened to the medians of all turns: so one turn on a busy machine hides
nothing.

A line of fastplm is a slow-down if the intervals do not overlap, and if its ratio is beyond the
noise: the largest ratio, either way, of the variants that did not change (the eager reference and
the peers), for this op in the same run. The exit status is 1 if there is a slow-down, or if a
variant that ran before does not run now. Noise is measured, never typed; if it is large, use a
quiet machine or more turns. A change of the reference itself counts as noise.

If csrc/ differs in REF, its library is built there; otherwise this tree's library serves both.

``pytest benchmarks/ --benchmark-only --compare REF`` does the same for the rows of that run:
against the committed rows of REF, if they are of this machine and these versions, else against one
turn of REF, measured afterwards. REF may be a folder of rows there.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import importlib.util
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"


class CannotCompare(Exception):
    """There is nothing to compare with; the message says why."""


class Key(NamedTuple):
    op: str
    case: str
    direction: str
    variant: str

    @property
    def ours(self) -> bool:
        """Whether this is a variant of fastplm, whose time a change of fastplm may change."""
        return self.variant.startswith("fastplm")


def key_of(row: Any) -> Key:
    return Key(row.op, row.case, row.direction, row.variant)


@dataclass(frozen=True)
class Times:
    """Microseconds of one variant over all turns, or the reason why there are none."""

    p20: float
    p50: float
    p80: float
    status: str = "ok"


@dataclass(frozen=True)
class Change:
    """One variant before and after."""

    key: Key
    before: Times | None
    after: Times | None
    #: How far the ratio of an unchanged variant of this op is from 1 in this run.
    noise: float = 1.0

    @property
    def ratio(self) -> float | None:
        """The ratio of the medians; None unless both were measured."""
        if not (self.before and self.after and self.before.p50 and self.after.p50):
            return None
        return self.after.p50 / self.before.p50

    @property
    def spread(self) -> tuple[float, float]:
        return self.after.p20 / self.before.p80, self.after.p80 / self.before.p20

    @property
    def verdict(self) -> str:
        """The verdict; "SLOWER" and "FAILS" make the comparison fail."""
        if self.before is None:
            return "new" if self.after.status == "ok" else f"new, {self.after.status}"
        if self.after is None:
            return "not measured now"
        if self.after.status != "ok":
            ran = self.before.status == "ok" and self.key.ours
            return f"FAILS: {self.after.status}" if ran else self.after.status
        if self.before.status != "ok":
            return f"runs now; before: {self.before.status}"
        low, high = self.spread
        if not self.key.ours:
            return ""
        if low > 1 and self.ratio > self.noise:
            return "SLOWER"
        return "faster" if high < 1 and 1 / self.ratio > self.noise else ""

    @property
    def flagged(self) -> bool:
        return self.verdict.startswith(("SLOWER", "FAILS"))


def compare(before: Iterable[Any], after: Iterable[Any]) -> list[Change]:
    """Compare two lists of rows (``harness.Row`` or its fields), each of several turns."""
    old, new = _times(before), _times(after)
    changes = [Change(key, old.get(key), new.get(key)) for key in dict.fromkeys([*new, *old])]
    noise: dict[str, float] = {}
    for change in changes:
        if not change.key.ours and change.ratio is not None:
            far = max(change.ratio, 1 / change.ratio)
            noise[change.key.op] = max(noise.get(change.key.op, 1.0), far)
    # An op without an unchanged variant has the noise of the noisiest op.
    most = max(noise.values(), default=1.0)
    return [
        Change(change.key, change.before, change.after, noise.get(change.key.op, most))
        for change in changes
    ]


def _times(rows: Iterable[Any]) -> dict[Key, Times]:
    turns: dict[Key, list[Any]] = {}
    for row in rows:
        turns.setdefault(key_of(row), []).append(row)
    found = {}
    for key, each in turns.items():
        bad = next((row.status for row in each if row.status != "ok"), None)
        if bad is not None:
            found[key] = Times(0, 0, 0, bad)
            continue
        low, high = (
            statistics.median(getattr(row, n) for row in each) for n in ("p20_us", "p80_us")
        )
        medians = [row.p50_us for row in each]
        found[key] = Times(min(low, *medians), statistics.median(medians), max(high, *medians))
    return found


def report(changes: Sequence[Change], before: str, after: str) -> str:
    """The table and its conclusion."""
    head = ("op", "case", "direction", "variant", "before us", "after us", "ratio", "spread", "")
    lines = [head]
    for change in changes:
        times = [
            f"{t.p50:,.1f}" if t is not None and t.p50 else "-"
            for t in (change.before, change.after)
        ]
        ratio = spread = ""
        if change.ratio is not None:
            ratio, spread = f"{change.ratio:.2f}", "{:.2f}-{:.2f}".format(*change.spread)
        lines.append((*change.key, *times, ratio, spread, change.verdict))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]
    noise = {change.key.op: f"{change.key.op} {change.noise:.2f}x" for change in changes}
    flagged = [change for change in changes if change.flagged]
    text += [
        "",
        f"before: {before}; after: {after}; ratio above 1: slower now",
        f"noise, by the variants that did not change: {', '.join(noise.values())}",
        f"{len(flagged)} of {len(changes)} flagged" + ":" * bool(flagged),
    ]
    for change in flagged:
        what = ", ".join(change.key) + ": "
        ratio = "" if change.ratio is None else f" {change.ratio:.2f}x"
        text.append(f"  {what}{change.verdict}{ratio}")
    return "\n".join(text)


# --- measuring a tree ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """The fields that a comparison needs from a line of the harness' file, in any version."""

    op: str
    case: str
    direction: str
    variant: str
    p20_us: float
    p50_us: float
    p80_us: float
    status: str

    @classmethod
    def read(cls, line: dict[str, str]) -> Row:
        times = (float(line[name] or 0) for name in ("p20_us", "p50_us", "p80_us"))
        return cls(*(line[name] for name in Key._fields), *times, line["status"])


@dataclass(frozen=True)
class Tree:
    """A checkout whose benchmarks can run."""

    name: str
    root: Path
    site: Path  # the folder of its installed package

    def ops(self) -> list[str]:
        paths = (self.root / "benchmarks").glob("test_*.py")
        return sorted(path.stem.removeprefix("test_") for path in paths)

    def turn(self, op: str, rounds: int | None, quick: bool = True) -> list[Row]:
        """The rows of one op, measured in a process of its own."""
        with tempfile.TemporaryDirectory() as folder:
            harness = self.root / "benchmarks" / "harness.py"
            command = [sys.executable, str(harness), op, "--rows", folder]
            command += [] if rounds is None else ["--rounds", str(rounds)]
            if quick and "--quick" in harness.read_text(encoding="utf-8"):
                command.append("--quick")
            paths = [str(self.site), *filter(None, [os.environ.get("PYTHONPATH")])]
            run = subprocess.run(
                command,
                cwd=folder,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
                capture_output=True,
                text=True,
            )
            # If a gate refused a variant, the process exits with 1, and its rows say so.
            rows = [Row.read(line) for path in Path(folder).rglob("*.csv") for line in _lines(path)]
        if not rows and run.returncode:
            raise CannotCompare(f"{op} of {self.name} left no rows:\n{run.stdout}{run.stderr}")
        return rows


def _lines(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def git(*arguments: str) -> str:
    try:
        run = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    except OSError as error:
        raise CannotCompare(f"git does not run: {error}") from error
    if run.returncode:
        raise CannotCompare(f"git {' '.join(arguments)}: {run.stderr.strip()}")
    return run.stdout.strip()


def describe(ref: str) -> str:
    """The short hash of a commit, as in the rows."""
    return git("describe", "--always", ref)


def library(root: Path = ROOT) -> Path | None:
    """The built libraries of csrc/, in this tree or where fastplm is installed."""
    folders = [root / "fastplm"]
    if root == ROOT and (spec := importlib.util.find_spec("fastplm")) and spec.origin:
        folders.append(Path(spec.origin).parent)
    built = (path for folder in folders for path in folder.glob("_C.*"))
    return next((path for path in built if path.suffix in (".so", ".pyd")), None)


def install(root: Path, built: Path | None, site: Path) -> None:
    """Copy the package to ``site``, so that a later edit of the tree changes nothing."""
    ignored = shutil.ignore_patterns("__pycache__", "_C.*")
    shutil.copytree(root / "fastplm", site / "fastplm", ignore=ignored)
    shutil.copytree(root / "triton_kernels", site / "fastplm" / "triton_kernels", ignore=ignored)
    if built is not None:
        shutil.copy(built, site / "fastplm")


def build(root: Path) -> Path | None:
    """The libraries of a worktree's csrc/; None if they cannot be built."""
    command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
    run = subprocess.run(command, cwd=root, capture_output=True, text=True)
    built = library(root)
    if built is None:
        said = run.stdout + run.stderr
        print(f"csrc/ of the other commit was not built:\n{said}", file=sys.stderr)
    return built


def _csrc_differs(commit: str) -> bool:
    changed = git("diff", "--name-only", commit, "--", "csrc", "setup.py")
    return bool(changed or git("ls-files", "--others", "--exclude-standard", "--", "csrc"))


@contextlib.contextmanager
def checkout(ref: str) -> Iterator[tuple[Tree, Tree]]:
    """(REF in a temporary worktree, this tree), each with its package beside it."""
    commit = git("rev-parse", "--verify", f"{ref}^{{commit}}")
    with tempfile.TemporaryDirectory(prefix="fastplm-compare-") as folder:
        root = Path(folder, "tree")
        git("worktree", "add", "--detach", str(root), commit)
        try:
            built = here = library()
            if here is not None and _csrc_differs(commit):
                built = build(root)
            sites = Path(folder, "before"), Path(folder, "after")
            install(root, built, sites[0])
            install(ROOT, here, sites[1])
            yield Tree(f"{ref} ({describe(commit)})", root, sites[0]), Tree(_now(), ROOT, sites[1])
        finally:
            git("worktree", "remove", "--force", str(root))


def _now() -> str:
    return git("describe", "--always", "--dirty")


# --- the two ways in ----------------------------------------------------------------------------


def against(ref: str, rows: Sequence[Any]) -> str:
    """A table of this run's rows (``harness.Row``) against a commit, or a folder of rows."""
    try:
        return _against(ref, rows) if rows else "nothing was measured"
    except CannotCompare as reason:  # this must not lose the rows of this run
        return f"not compared with {ref}: {reason}"


def _against(ref: str, rows: Sequence[Any]) -> str:
    if Path(ref).is_dir():
        before, name = latest(Path(ref)), ref
    else:
        before, name = stored(ref, rows), f"{ref} ({describe(ref)}), committed rows"
    if before is None:
        import harness

        before = []
        with checkout(ref) as (old, _):
            name = old.name
            for file in _files(rows):
                if file in old.ops():
                    before += old.turn(file, None, quick=not harness.SESSION.full)
    wanted = {key_of(row) for row in rows}
    before = [row for row in before if key_of(row) in wanted]
    return report(compare(before, rows), name, rows[0].commit)


def _files(rows: Sequence[Any]) -> list[str]:
    """The benchmark files of these rows: those that have cases of the op, or have its name."""
    files = {}
    for module in list(sys.modules.values()):
        path = Path(getattr(module, "__file__", None) or "")
        if path.parent == ROOT / "benchmarks" and path.name.startswith("test_"):
            stem = path.stem.removeprefix("test_")
            files |= {case.op: stem for case in getattr(module, "CASES", ())}
    return list(dict.fromkeys(files.get(row.op, row.op) for row in rows))


def latest(folder: Path, **wanted: str) -> list[Row]:
    """The last row of each variant under a folder that has these values."""
    found: dict[Key, Row] = {}
    for path in sorted(folder.rglob("*.csv")):
        for line in _lines(path):
            if "p50_us" in line and wanted.items() <= line.items():
                row = Row.read(line)
                found[key_of(row)] = row
    return list(found.values())


def stored(ref: str, rows: Sequence[Any]) -> list[Row] | None:
    """The committed rows of a commit; None unless this machine measured there all of fastplm's
    variants that this run has."""
    same = {name: getattr(rows[0], name) for name in ("machine", "torch", "triton")}
    found = latest(RESULTS, commit=describe(ref), **same)
    known = {key_of(row) for row in found}
    ours = [key for key in map(key_of, rows) if key.ours]
    return found if known and known.issuperset(ours) else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("ref", help="the commit to compare this tree with")
    parser.add_argument("--ops", nargs="*", help="default: every op that both have a benchmark of")
    parser.add_argument("--rounds", type=int, help="timed rounds of each case in a turn")
    parser.add_argument("--turns", type=int, default=3, help="of each tree")
    parser.add_argument("--full", action="store_true", help="cases that take minutes, too")
    options = parser.parse_args()
    try:
        changes = _measured(options)
    except CannotCompare as reason:
        print(reason, file=sys.stderr)
        return 2
    return 1 if any(change.flagged for change in changes) else 0


def _measured(options: argparse.Namespace) -> list[Change]:
    changes: list[Change] = []
    with checkout(options.ref) as (old, new):
        ops = [op for op in new.ops() if not options.ops or op in options.ops]
        if unknown := set(options.ops or ()) - set(ops):
            raise CannotCompare(f"no benchmarks of {', '.join(sorted(unknown))}")
        for op in ops:
            if op not in old.ops():
                print(f"{op}: {old.name} has no benchmark of it")
                continue
            before: list[Row] = []
            after: list[Row] = []
            for turn in range(options.turns):
                for tree, rows in ((old, before), (new, after)):
                    print(f"{op}, turn {turn + 1} of {options.turns}: {tree.name}", flush=True)
                    rows += tree.turn(op, options.rounds, quick=not options.full)
            found = compare(before, after)
            print(report(found, old.name, new.name), flush=True)  # each turn: a run may be stopped
            changes += found
    return changes


if __name__ == "__main__":
    sys.exit(main())
