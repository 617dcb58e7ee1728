"""``make gpu-report``: build, test and measure on this machine's GPU, with the Python it is given.

Steps, each with its own time limit, each leaving what it has even if it is stopped:

1. build the package (with csrc/, if a compiler is there) into build/site, from this checkout alone;
2. the gpu lane of the tests, ``pytest -m gpu``;
3. every op's benchmark: rows appended to RESULTS/<gpu>/<op>.csv;
4. one page, RESULTS/<gpu>/report.md, and a bar chart beside it, speedup.png.

Nothing is downloaded. What is missing (a compiler, pytest, matplotlib, the GPU itself) is said on
the page, and the other steps run. Without a GPU the same steps run on the CPU's small shapes.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent
SITE = ROOT / "build" / "site"


@dataclass
class Step:
    """One step: its outcome and the end of what it printed."""

    name: str
    outcome: str
    seconds: float
    output: str


def run(name: str, command: list[str], limit: float, log: Path) -> Step:
    """Run a command in build/ (or ./fastplm would hide the built one) and keep its output."""
    print(f"== {name}: {' '.join(command)}", flush=True)
    started = time.perf_counter()
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(_paths()), "PYTHONUNBUFFERED": "1"}
    with log.open("w") as sink:
        try:
            status = subprocess.run(
                command,
                cwd=ROOT / "build",
                env=environment,
                stdout=sink,
                stderr=subprocess.STDOUT,
                timeout=limit,
            ).returncode
            outcome = "ok" if status == 0 else f"exit status {status}"
        except subprocess.TimeoutExpired:
            outcome = f"stopped after {limit:.0f} s"
    output = log.read_text(errors="replace").strip()
    print("\n".join(output.splitlines()[-25:]), flush=True)
    return Step(name, outcome, time.perf_counter() - started, output)


def _paths() -> list[str]:
    inherited = os.environ.get("PYTHONPATH")
    return [str(SITE), *([inherited] if inherited else [])]


def build(logs: Path) -> Step:
    """The package into build/site; plain copies where pip cannot build it."""
    shutil.rmtree(SITE, ignore_errors=True)
    flags = ["--no-index", "--no-deps", "--no-build-isolation", "--quiet", "--target", str(SITE)]
    command = [sys.executable, "-m", "pip", "install", *flags, str(ROOT)]
    step = run("build", command, 240, logs / "build.log")
    if step.outcome != "ok":
        shutil.rmtree(SITE, ignore_errors=True)
        shutil.copytree(ROOT / "fastplm", SITE / "fastplm")
        shutil.copytree(ROOT / "triton_kernels", SITE / "fastplm" / "triton_kernels")
        step.outcome += "; the Python sources were copied and csrc/ is not built"
    return step


def benchmarked_ops() -> list[str]:
    return sorted(p.stem.removeprefix("test_") for p in (ROOT / "benchmarks").glob("test_*.py"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--rounds", type=int, help="timed rounds of each case")
    parser.add_argument("--ops", nargs="*", help="default: every op with a benchmark")
    parser.add_argument("--skip-tests", action="store_true")
    parser.add_argument("--budget", type=float, default=520, help="seconds for everything")
    options = parser.parse_args()
    deadline = time.perf_counter() + options.budget
    logs = ROOT / "build" / "gpu-report"
    logs.mkdir(parents=True, exist_ok=True)

    def left() -> float:
        return max(10.0, deadline - time.perf_counter())

    steps = [build(logs)]
    info = [sys.executable, "-m", "fastplm", "info"]
    steps.append(run("info", info, min(120, left()), logs / "info.log"))
    if not options.skip_tests:
        pytest = ["-m", "pytest", str(ROOT / "tests"), "-m", "gpu", "-q", "--rootdir", str(ROOT)]
        pytest = [
            sys.executable,
            *pytest,
            "-p",
            "no:cacheprovider",
            "-c",
            str(ROOT / "pyproject.toml"),
        ]
        steps.append(run("gpu tests", pytest, 0.5 * left(), logs / "tests.log"))
    for op in options.ops or benchmarked_ops():
        rows = ["--rows", str(options.results.resolve())]
        rounds = ["--rounds", str(options.rounds)] if options.rounds else []
        command = [sys.executable, str(ROOT / "benchmarks" / "harness.py"), op, *rows, *rounds]
        steps.append(run(f"benchmark {op}", command, left(), logs / f"{op}.log"))
    page = write_page(options.results, steps)
    print(f"report: {page}")
    return 0 if all(step.outcome == "ok" for step in steps) else 1


def write_page(results: Path, steps: list[Step]) -> Path:
    """RESULTS/<machine>/report.md from the latest rows of each op."""
    sys.path[:0] = [str(ROOT / "benchmarks"), str(SITE)]
    import harness
    import plots

    folder = results / harness.machine_folder()
    folder.mkdir(parents=True, exist_ok=True)
    machine = harness.machine_line()
    lines = [
        f"# fastplm on {machine['machine']}",
        "",
        f"{datetime.date.today()}, torch {machine['torch']}, triton {machine['triton']}, commit "
        f"{machine['commit']}. Made by `make gpu-report`; raw rows beside this page.",
        "",
        "| step | outcome | seconds |",
        "|---|---|---|",
    ]
    for step in steps:
        last = step.output.splitlines()[-1:] if step.name == "gpu tests" else []
        outcome = "; ".join([step.outcome, *last]).replace("|", "/")
        lines.append(f"| {step.name} | {outcome} | {step.seconds:.0f} |")
    rows = plots.latest_rows(folder)
    try:
        plots.draw(folder, folder / "speedup.png")
        picture = "![speed relative to the eager reference](speedup.png)"
    except ImportError:
        picture = "No picture: matplotlib is not installed."
    lines += [
        "",
        picture,
        "",
        "Median of interleaved rounds, 20th to 80th percentile in brackets; a slower row is a row.",
        "",
        "Floor and must: what the arithmetic allows, and what fastplm is to reach, on an "
        f"{harness.TARGETS_GPU}.",
        "",
        "| op | case | direction | variant | µs | floor µs | must µs | GB/s | GFLOP/s | peak MB | "
        "vs eager | status |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    targets = _targets(harness)
    for row in rows:
        time_us = f"{row['p50_us']} [{row['p20_us']}–{row['p80_us']}]" if row["p50_us"] else ""
        key = (row["op"], row["case"], row["direction"])
        goals = [f"{goal:g}" for goal in targets.get(key, ())] or ["", ""]
        rates = (row["gb_per_s"], row["gflop_per_s"], row["peak_mb"], row["vs_eager"])
        cells = (*key, row["variant"], time_us, *goals, *rates)
        lines.append("| " + " | ".join([*cells, row["status"].replace("|", "/")]) + " |")
    page = folder / "report.md"
    page.write_text("\n".join(lines) + "\n")
    return page


def _targets(harness: ModuleType) -> dict[tuple[str, str, str], tuple[float, float]]:
    """What the benchmarks know of floors; nothing of those that cannot be imported here."""
    known: dict[tuple[str, str, str], tuple[float, float]] = {}
    for op in benchmarked_ops():
        try:
            known |= harness.targets(importlib.import_module(f"test_{op}").CASES)
        except ImportError as error:
            print(f"no targets of {op}: {error}")
    return known


if __name__ == "__main__":
    sys.exit(main())
