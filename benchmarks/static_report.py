"""What the kernels' machine code allows, found without a GPU, and whether the code got worse.

    python benchmarks/static_report.py             compile, write the rows and the page
    python benchmarks/static_report.py --check     compile, name every kernel that got worse
    python benchmarks/static_report.py --long      compile all configurations, for sm_89 and sm_120
                                                   too: results/static/long.csv and the page

``--long`` takes about an hour on 2 free cores if every row is out of date. A row of today's code is
kept. sm_86 has no rows: its launches are those of sm_89.

Every kernel in every shipped configuration is compiled for sm_80, sm_90 and sm_100. A row of
``results/static/kernels.csv``, and of kernels.md beside it, which explains the columns, describes
the inner loop: its instructions by kind, the cycles of an iteration by unit, the largest of these
(the bound), and the FLOPs and bytes of the tile with the cycles of the roofline. The numbers are
exact, as nothing is measured. So a regression in generated code shows without a GPU.

How to read a row: ``bound_cycles`` over ``roofline_cycles`` says how far the instructions are from
the tile's own work. A matmul loop is ideal at 1. A kernel without matmuls waits for memory alone
below 1; above 1 its instructions take the time. ``bound_unit`` names the unit to relieve. With few
``warps_per_sm`` a loop will hardly reach its bound.

For ``--check`` these are worse: a bound of more cycles for the same work (FLOPs of the tile, or
bytes without a matmul, so that tiles of different size can be compared), more bytes for the same
FLOPs, more registers or spills, fewer warps on an SM, or matmuls without HGMMA that had it. Every
difference counts, as nothing is noisy: for a change that should cost something, write the file
again. A file of another Triton version has other code and cannot be compared.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import csv
import itertools
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import triton

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

from compile_kernels import (
    ARCHS,
    SMALLER_ARCHS,
    Report,
    compile_all,
    compile_op,
    kernel_modules,
    launches_digest,
    page,
)
from fastplm.triton_kernels._launch import shared_limit
from machine_code import KINDS

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "static" / "kernels.csv"
LONG = RESULTS.with_name("long.csv")
PAGE = RESULTS.with_name("kernels.md")
LONG_ARCHS = tuple(arch for arch in ARCHS + SMALLER_ARCHS if arch != 86)

Row = dict[str, str]
Key = tuple[str, ...]
#: A kernel may be launched several times in one case; ``launch`` counts them.
KEY = ("op", "kernel", "case", "arch", "launch")


def rows(reports: Iterable[Report]) -> list[Row]:
    """The reports as the lines of the file."""
    seen: Counter[tuple[object, ...]] = Counter()
    found = []
    for r in reports:
        where = (r.op, r.kernel, r.case, r.arch)
        seen[where] += 1
        unit, cycles = r.bound()
        line, roof = r.roofline()
        numbers = dict(
            triton=triton.__version__,
            **dict(zip(KEY, (*where, seen[where]), strict=True)),
            tiles=r.tiles,
            warps=r.warps,
            stages=r.stages,
            registers=r.registers,
            spills=r.spills,
            shared_bytes=r.shared,
            blocks_per_sm=r.blocks,
            warps_per_sm=r.blocks * r.warps,
            hgmma=int(r.hgmma),
            **{f"n_{kind}": r.mix[kind] for kind in KINDS},
            **{f"cycles_{name}": f"{count:.6g}" for name, count in r.cycles.items()},
            bound_unit=unit,
            bound_cycles=f"{cycles:.6g}",
            tile_flops=r.flops,
            tile_bytes=r.moved,
            roofline_of=line,
            roofline_cycles=f"{roof:.6g}",
        )
        found.append({name: str(value) for name, value in numbers.items()})
    return found


def read(path: Path) -> list[Row]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def write(path: Path, lines: list[Row]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(lines[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)


def long_row(op: str, arch: int, digest: str, reports: Iterable[Report]) -> Row:
    """The row of an op on one architecture, in all configurations: the launches that may not ship,
    and why."""
    reports = list(reports)
    bad = sorted({f"{r.kernel} [{r.case}]: {why}" for r in reports for why in r.problems()})
    numbers = dict(
        op=op,
        arch=arch,
        triton=triton.__version__,
        code=digest,
        launches=len(reports),
        shared_bytes=max(r.shared for r in reports),
        refused=sum(r.shared > shared_limit(arch) for r in reports),
        races=sum(bool(r.hazards["races"]) for r in reports),
        loop_spills=sum(bool(r.loop_spills) for r in reports),
        spills=sum(r.spills > r.loop_spills for r in reports),
        may_not_ship=sum(bool(r.problems()) for r in reports),
        problems="; ".join(bad),
    )
    return {name: str(value) for name, value in numbers.items()}


_LONG = "## Every configuration"


def long_section(lines: Iterable[Row]) -> str:
    """The rows of ``long_row`` as the last section of the page."""
    head = "op|arch|Triton|launches|most shared KB|of|refused|races|spill in a loop|spill outside"
    rows: list[tuple[str, ...]] = [(*head.split("|"), "may not ship")]
    rows.append(("---",) * len(rows[0]))
    for line in lines:
        most, limit = int(line["shared_bytes"]), shared_limit(int(line["arch"]))
        names = (line["op"], f"sm_{line['arch']}", line["triton"], line["launches"])
        counts = (line[name] for name in ("refused", "races", "loop_spills", "spills"))
        bad = line["may_not_ship"] + (f": {line['problems']}" if line["problems"] else "")
        rows.append((*names, f"{most / 1024:.1f}", f"{limit / 1024:.0f}", *counts, bad))
    about = (
        "Written by `python benchmarks/static_report.py --long`: how many different launches all\n"
        "compile cases have, and how many of these have each fault. Refused is what needs more\n"
        "shared memory than a block may have. A few spills outside loops, once for a program, may\n"
        "ship."
    )
    return f"{_LONG}\n\n{about}\n\n" + "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n"


def text(reports: Iterable[Report]) -> str:
    """The page; its last section is left out until an architecture has a row."""
    return page(reports) + (f"\n{long_section(read(LONG))}" if LONG.exists() else "")


def write_long(row: Row) -> None:
    """Write one row of ``long_row`` to the file and the page."""
    lines = {(line["op"], line["arch"]): line for line in (read(LONG) if LONG.exists() else [])}
    lines[row["op"], row["arch"]] = row
    write(LONG, [lines[key] for key in sorted(lines, key=lambda key: (key[0], int(key[1])))])
    before = PAGE.read_text(encoding="utf-8").split(f"\n{_LONG}")[0]
    PAGE.write_text(f"{before}\n{long_section(read(LONG))}", encoding="utf-8")


def stale(lines: Iterable[Row], archs: Iterable[int]) -> dict[tuple[str, int], str]:
    """The ops and architectures without a row of today's code, and the digest of that code."""
    known = {(line["op"], int(line["arch"]), line["triton"], line["code"]) for line in lines}
    found = {}
    for op, arch in itertools.product(kernel_modules(), archs):
        digest = launches_digest(op, arch)[1]
        if (op, arch, triton.__version__, digest) not in known:
            found[op, arch] = digest
    return found


def compile_stale(archs: Iterable[int]) -> int:
    """Compile what has no row of today's code, one process a core. Returns how many launches may
    not ship."""
    wanted, bad = stale(read(LONG) if LONG.exists() else [], archs), 0
    print(f"{len(wanted)} lists to compile")
    with concurrent.futures.ProcessPoolExecutor() as pool:
        jobs = {pool.submit(compile_op, *where, True): where for where in wanted}
        for job in concurrent.futures.as_completed(jobs):
            op, arch = where = jobs[job]
            write_long(row := long_row(op, arch, wanted[where], job.result()))
            bad += int(row["may_not_ship"])
            count = f"{row['launches']} launches, {row['may_not_ship']} may not ship"
            print(f"{op} sm_{arch}: {count} {row['problems']}", flush=True)
    return bad


def by_key(lines: Iterable[Row]) -> dict[Key, Row]:
    return {tuple(line[name] for name in KEY): line for line in lines}


def _cycles_per_work(row: Row) -> float:
    """Cycles for the same work: a smaller tile has shorter iterations, but more of them."""
    return float(row["bound_cycles"]) / (int(row["tile_flops"]) or int(row["tile_bytes"]) or 1)


def _bytes_per_flop(row: Row) -> float:
    return int(row["tile_bytes"]) / int(row["tile_flops"]) if int(row["tile_flops"]) else 0.0


def _column(name: str, sign: int = 1) -> Callable[[Row], float]:
    return lambda row: sign * float(row[name])


#: Numbers that may not grow, and the columns that explain them.
_MEASURES: Mapping[str, tuple[Callable[[Row], float], tuple[str, ...]]] = {
    "more cycles for the same work": (
        _cycles_per_work,
        ("bound_cycles", "bound_unit", "tile_flops", "tile_bytes"),
    ),
    "more bytes for the same FLOPs": (_bytes_per_flop, ("tile_flops", "tile_bytes")),
    "more registers": (_column("registers"), ("registers",)),
    "spills": (_column("spills"), ("spills",)),
    "fewer warps on an SM": (_column("warps_per_sm", -1), ("warps_per_sm", "warps")),
    "no HGMMA": (_column("hgmma", -1), ("hgmma",)),
}


def worse(now: Iterable[Row], before: Iterable[Row]) -> list[str]:
    """A line for every kernel of both lists that got worse: its name, and the numbers."""
    known = by_key(before)
    found = []
    for key, row in by_key(now).items():
        old = known.get(key)
        if old is None:
            continue
        reasons = []
        for name, (measure, columns) in _MEASURES.items():
            is_now, was = measure(row), measure(old)
            if is_now > was:
                changes = (f"{c} {old[c]} -> {row[c]}" for c in columns if old[c] != row[c])
                times = f", {is_now / was:.2f}x" if was > 0 else ""
                reasons.append(f"{name}{times} ({', '.join(changes)})")
        if reasons and row["tiles"] != old["tiles"]:
            reasons.append(f"tiles were {old['tiles']}, are {row['tiles']}")
        if reasons:
            found.append(f"{name_of(key)}: {'; '.join(reasons)}")
    return found


def changed(now: Iterable[Row], before: Iterable[Row]) -> list[str]:
    """A line for every kernel that is new, gone, or differs from the file."""
    now, before = by_key(now), by_key(before)
    found = [f"{name_of(key)}: gone" for key in before if key not in now]
    for key, row in now.items():
        if key not in before:
            found.append(f"{name_of(key)}: new")
        elif row != before[key]:
            names = (name for name in row if row[name] != before[key].get(name))
            found.append(f"{name_of(key)}: other {', '.join(names)}")
    return found


def name_of(key: Key) -> str:
    _, kernel, case, arch, launch = key
    return f"{kernel} [{case}{f', launch {launch}' if launch != '1' else ''}] sm_{arch}"


def not_comparable(before: Iterable[Row]) -> str | None:
    """Why today's machine code cannot be compared with these rows; None if it can."""
    versions = {row["triton"] for row in before}
    if versions == {triton.__version__}:
        return None
    return f"the rows are of Triton {', '.join(sorted(versions))}, this is {triton.__version__}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare with the committed rows")
    parser.add_argument("--long", action="store_true", help="all configurations")
    parser.add_argument("--arch", type=int, action="append", choices=LONG_ARCHS)
    options = parser.parse_args()
    if options.long:
        return 1 if compile_stale(options.arch or LONG_ARCHS) else 0
    before = read(RESULTS) if options.check else []
    if options.check and (reason := not_comparable(before)):
        print(f"cannot compare: {reason}", file=sys.stderr)
        return 2
    reports = list(compile_all(kernel_modules(), ARCHS))
    now = rows(reports)
    if not options.check:
        write(RESULTS, now)
        PAGE.write_text(text(reports), encoding="utf-8")
        print(f"{len(now)} rows: {RESULTS}, {PAGE}")
        return 0
    slower, other = worse(now, before), changed(now, before)
    for line in slower:
        print(f"WORSE {line}")
    for line in other:
        print(f"changed {line}")
    if other:
        print("If that is meant: python benchmarks/static_report.py writes the rows and the page.")
    print(f"{len(now)} kernels, {len(slower)} worse, {len(other)} changed")
    return 1 if other else 0


if __name__ == "__main__":
    sys.exit(main())
