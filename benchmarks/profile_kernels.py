"""The time of each kernel of a call: ``python benchmarks/profile_kernels.py --rows DIR``.

Reads the rows under DIR and profiles the three that are furthest from their targets, then the first
case of each other benchmark, always with fastplm's default. PyTorch's profiler gives launches and
microseconds a call by kernel (on a CPU: by operator), which are appended to
DIR/<machine>/profile.csv. If Nsight Compute is on the PATH, its figures for the kernels of the
three are appended to ncu.csv.
"""

from __future__ import annotations

import argparse
import csv
import functools
import importlib
import io
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType

import harness
import plots
import targets

CALLS = 5
#: The number of kernels of a case that get their own row.
KEPT = 12
FIELDS = (
    *("date", "machine", "torch", "triton", "commit", "op", "case", "direction"),
    *("kernel", "launches", "us", "share"),
)
#: Nsight Compute's metrics, and their columns.
METRICS = {
    "gpu__time_duration.sum": "ncu_time",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "dram_percent",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed": "sm_percent",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "warps_percent",
    "launch__registers_per_thread": "registers",
}
NCU_FIELDS = (*FIELDS[:8], "kernel", *METRICS.values())

Profiled = list[tuple[str, float, float]]


# --- what is profiled -----------------------------------------------------------------------------


@functools.cache
def cases(op: str) -> list[harness.Case]:
    return list(importlib.import_module(f"test_{op}").CASES)


def ops() -> list[str]:
    """Names of the benchmarks. Several may have cases of one op, and one may have several ops."""
    here = Path(__file__).resolve().parent
    return sorted(path.stem.removeprefix("test_") for path in here.glob("test_*.py"))


def chosen(rows: Sequence[plots.Row], machine: str) -> Iterator[tuple[harness.Case, str, bool]]:
    """Cases to profile with a direction and whether it is one of the three, these first."""
    seen = set()
    benchmarks = ops()
    for _, row in targets.worst(targets.Rows(rows), machine):
        # The benchmark with the name of the row's op is searched first.
        for name in sorted(benchmarks, key=lambda name: name != row["op"]):
            wanted = (row["op"], row["case"])
            found = [case for case in _known(name) if (case.op, case.label) == wanted]
            if found:
                seen.add((row["op"], row["case"], row["direction"]))
                yield found[0], row["direction"], True
                break
    for name in benchmarks:
        for case in _known(name)[:1]:
            direction = case.directions[-1] if _learns(case) else "forward"
            if (case.op, case.label, direction) not in seen:
                yield case, direction, False


def _known(name: str) -> list[harness.Case]:
    try:
        return cases(name)
    except Exception as error:  # a benchmark that cannot be imported must not stop the others
        print(f"no cases of {name}: {type(error).__name__}: {error}")
        return []


def _learns(case: harness.Case) -> bool:
    return bool(case.wrt) or "forward" not in case.directions


def call_of(case: harness.Case, direction: str, device: torch.device) -> Callable[[], object]:
    """The call that the row of that direction times; a backward includes its forward."""
    function = case.variants[plots.OURS]
    wrt = () if direction == "forward" else tuple(case.wrt)
    inputs = {
        name: value.detach().requires_grad_() if name in wrt else value
        for name, value in case.make(device).items()
    }

    def call() -> None:
        with torch.set_grad_enabled(bool(wrt)):
            out = function(**inputs)
            if wrt:
                leaves = [inputs[name] for name in wrt]
                torch.autograd.grad(out, leaves, torch.ones_like(out), allow_unused=True)

    return call


# --- PyTorch's profiler ---------------------------------------------------------------------------


def profile(call: Callable[[], object], device: torch.device, calls: int = CALLS) -> Profiled:
    """(kernel, launches a call, microseconds a call), the longest first; operators on a CPU."""
    for _ in range(2):
        call()
    on_gpu = device.type == "cuda"
    seen = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[seen.CUDA if on_gpu else seen.CPU]) as profiler:
        for _ in range(calls):
            call()
        if on_gpu:
            torch.cuda.synchronize()
    found: dict[str, tuple[float, float]] = {}
    if on_gpu:
        for event in profiler.profiler.kineto_results.events():
            # The profiler also lists the host's named ranges as events of the device.
            if event.device_type() == DeviceType.CUDA and not event.is_user_annotation():
                launches, spent = found.get(event.name(), (0, 0.0))
                found[event.name()] = launches + 1, spent + event.duration_ns() / 1e3
    else:
        for event in profiler.key_averages():
            found[event.key] = event.count, event.self_cpu_time_total
    spent = [(name, n / calls, us / calls) for name, (n, us) in found.items() if us > 0]
    return sorted(spent, key=lambda entry: -entry[2])


def write_profile(
    folder: Path, op: str, case: str, direction: str, profiled: Profiled
) -> list[dict[str, Any]]:
    """Append to profile.csv: the longest kernels one by one, the others together."""
    total = sum(us for *_, us in profiled) or 1.0
    kept, rest = profiled[:KEPT], profiled[KEPT:]
    if rest:
        name = f"{len(rest)} others"
        kept = [*kept, (name, sum(n for _, n, _ in rest), sum(us for *_, us in rest))]
    rows = [
        {
            **harness.machine_line(),
            **dict(op=op, case=case, direction=direction, kernel=name[:160]),
            **dict(launches=round(n, 2), us=round(us, 2), share=round(us / total, 4)),
        }
        for name, n, us in kept
    ]
    _append(folder / "profile.csv", FIELDS, rows)
    return rows


def _append(path: Path, names: Sequence[str], rows: Sequence[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    begins = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, names)
        if begins:
            writer.writeheader()
        writer.writerows(rows)


# --- Nsight Compute -------------------------------------------------------------------------------


def ask_ncu(folder: Path, case: harness.Case, direction: str, limit: float = 60) -> str:
    """Append Nsight Compute's figures of one call to ncu.csv. Returns a line about the outcome."""
    command = [
        *("ncu", "--csv", "--page", "raw", "--metrics", ",".join(METRICS)),
        *("--profile-from-start", "off", "--launch-count", "40"),
        *(sys.executable, str(Path(__file__).resolve())),
        *("--only", case.op, case.label, direction),
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"ncu: {type(error).__name__} of {case.label}, {direction}"
    rows = [
        {
            **harness.machine_line(),
            **dict(op=case.op, case=case.label, direction=direction),
            **figures,
        }
        for figures in read_ncu(done.stdout)
    ]
    if not rows:
        said = [line for line in done.stdout.splitlines() if "ERR" in line or "error" in line]
        return f"ncu: nothing of {case.label}, {direction}: {' '.join(said)[:200] or 'no rows'}"
    _append(folder / "ncu.csv", NCU_FIELDS, rows)
    return f"ncu: {len(rows)} launches of {case.label}, {direction}"


def read_ncu(text: str) -> list[dict[str, str]]:
    """The launches in the output of ``ncu --csv --page raw``: names, units, a line a launch."""
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        return []
    table = list(csv.DictReader(io.StringIO("\n".join(lines[start:]))))
    units, launches = table[:1], table[1:]
    rows = []
    for launch in launches:
        row = {"kernel": launch["Kernel Name"][:160]}
        for metric, column in METRICS.items():
            unit = units[0].get(metric) or ""
            value = launch.get(metric) or ""
            row[column] = f"{value} {unit}".strip() if column == "ncu_time" else value
        rows.append(row)
    return rows


def only(op: str, label: str, direction: str) -> int:
    """One call between the marks that Nsight Compute waits for."""
    device = harness.default_device()
    for name in sorted(ops(), key=lambda name: name != op):
        for case in _known(name):
            if (case.op, case.label) == (op, label):
                call = call_of(case, direction, device)
                for _ in range(2):
                    call()
                torch.cuda.synchronize()
                torch.cuda.profiler.start()
                call()
                torch.cuda.synchronize()
                torch.cuda.profiler.stop()
                return 0
    print(f"no case {op}, {label}")
    return 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=Path, help="read from, and written to, DIR/<machine>/")
    parser.add_argument("--most", type=int, default=1 << 30, help="cases to profile")
    parser.add_argument("--only", nargs=3, metavar=("OP", "CASE", "DIRECTION"))
    options = parser.parse_args()
    if options.only:
        return only(*options.only)
    folder = options.rows / harness.machine_folder()
    device = harness.default_device()
    machine = harness.machine_line()["machine"]
    has_ncu = device.type == "cuda" and shutil.which("ncu") is not None
    failed, asked = 0, []
    wanted = chosen(plots.latest_rows(folder), machine)
    for _, (case, direction, is_worst) in zip(range(options.most), wanted, strict=False):
        title = f"{case.op}, {case.label}, {direction}"
        try:
            profiled = profile(call_of(case, direction, device), device)
        # A case that cannot run has a row of the benchmark that says so; profile the others.
        except Exception as error:
            failed += 1
            print(f"FAILED {title}: {type(error).__name__}: {str(error).splitlines()[:1]}")
            continue
        rows = write_profile(folder, case.op, case.label, direction, profiled)
        print(title)
        for row in rows[:3]:
            print(f"  {row['share']:6.1%}  {row['us']:10.1f} us  {row['kernel']}")
        sys.stdout.flush()
        if is_worst and has_ncu:
            asked.append((case, direction))
    for case, direction in asked:
        print(ask_ncu(folder, case, direction), flush=True)
    print("ncu: " + ("asked" if has_ncu else "not on the PATH, or no GPU"))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
