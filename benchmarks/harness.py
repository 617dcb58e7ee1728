"""How every benchmark measures: gate, interleaved rounds, medians, GB/s and GFLOP/s, rows.

A benchmark is a ``Case``: inputs, the variants to compare, and the bytes and FLOPs that the task
needs (each input read once, each output written once), from which the rates follow. First every
fused variant must pass the error budget on the case's small inputs: no speed on a red result. Then
the variants take turns, one call each a round, so that whatever else the machine does hits all of
them alike; medians and the 20th and 80th percentile are kept, slower rows too. A variant that fails
becomes a row that says so.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import functools
import importlib
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from fastplm.testing import assert_within_budget, peak_bytes

Inputs = dict[str, Any]

TARGETS_GPU = "H200"


@dataclass(frozen=True)
class Case:
    """One shape of one op.

    Args:
        op: name of the op.
        label: the shape, in words.
        make: builds the inputs, ``make(device)``; called several times, as buffers are rotated.
        make_small: the same for the correctness gate, small enough for fp64.
        variants: functions of the inputs by name; "eager" is the reference.
        gated: the variants that must agree with "eager" before anything is timed.
        gate: ``gate(variant, eager, inputs)`` raises AssertionError if it does not; by default the
            error budget, outputs and gradients.
        wrt: inputs that get gradients (none: the op has no backward).
        directions: what is measured if there are gradients, of "forward", "backward", "training".
            A variant that makes its own, such as a model's step, names them without ``wrt``.
        bytes: moved by a forward that reads each input and writes each output once.
        flops: of the forward.
        training_bytes, training_flops: the same for forward and backward together.
        rounds: how often all variants run, where that is not the harness' own choice.
        targets: (floor, must) of a direction: the microseconds that the arithmetic allows on the
            ``TARGETS_GPU``, and those that fastplm must not exceed there.
    """

    op: str
    label: str
    make: Callable[[torch.device], Inputs]
    make_small: Callable[[torch.device], Inputs]
    variants: Mapping[str, Callable[..., Any]]
    gated: Sequence[str] = ("fastplm",)
    gate: Callable[[Callable[..., Any], Callable[..., Any], Inputs], None] | None = None
    wrt: Sequence[str] = ()
    directions: Sequence[str] = ("forward", "training")
    bytes: int = 0
    flops: int = 0
    training_bytes: int = 0
    training_flops: int = 0
    rounds: int | None = None
    targets: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.label.replace(" ", "_")


@dataclass
class Row:
    """One line of ``results/<machine>/<op>.csv``; times in microseconds, status "ok" or why not."""

    date: str
    machine: str
    torch: str
    triton: str
    commit: str
    op: str
    case: str
    direction: str
    variant: str
    p20_us: float | None
    p50_us: float | None
    p80_us: float | None
    gb_per_s: float | None
    gflop_per_s: float | None
    peak_mb: float | None  # MiB held at once beside the inputs
    vs_eager: float | None
    status: str


@dataclass
class Session:
    """Rows of this run; the plug-in in conftest.py prints and writes them."""

    rows: list[Row] = field(default_factory=list)
    #: (floor, must) by (op, case, direction), on the GPU that they are meant for
    targets: dict[tuple[str, str, str], tuple[float, float]] = field(default_factory=dict)


SESSION = Session()


def default_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def measure(
    case: Case, direction: str, benchmark: Any = None, rounds: int | None = None
) -> list[Row]:
    """Gate and time all variants of ``case``; ``direction`` is one of ``case.directions``.

    ``benchmark`` is pytest-benchmark's fixture, if there is one: it then drives the rounds, each of
    which runs every variant once.
    """
    device = default_device()
    runners: dict[str, _Runner] = {}
    failures: dict[str, str] = {}
    for name, function in case.variants.items():
        try:
            if name in case.gated:
                gate = case.gate or functools.partial(assert_within_budget, wrt=case.wrt)
                gate(function, case.variants["eager"], case.make_small(device))
            runners[name] = _Runner(case, function, direction, device)
            runners[name].step()
        # Whatever a variant dies of is its row; the others are measured all the same.
        except Exception as error:
            failures[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"
            runners.pop(name, None)

    def one_round() -> None:
        for runner in runners.values():
            runner.step()

    rounds = rounds or case.rounds or (50 if device.type == "cuda" else 7)
    one_round()
    for runner in runners.values():
        runner.times.clear()
    if benchmark is not None:
        benchmark.pedantic(one_round, rounds=rounds, iterations=1)
    else:
        for _ in range(rounds):
            one_round()
    rows = [_row(case, direction, name, runner) for name, runner in runners.items()]
    rows += [_row(case, direction, name, None, status) for name, status in failures.items()]
    eager = next((row.p50_us for row in rows if row.variant == "eager"), None)
    for row in rows:
        if eager and row.p50_us:
            row.vs_eager = round(eager / row.p50_us, 2)
    SESSION.rows += rows
    SESSION.targets |= targets([case])
    gate = [f"{name}: {failures[name]}" for name in case.gated if name in failures]
    if gate:
        raise AssertionError("; ".join(gate))
    return rows


class _Runner:
    """One variant of one case: its rotated inputs and its times."""

    #: Inputs are rotated so that a GPU's L2 (60 MB on an H200) does not serve a repeated call.
    _ROTATED_BYTES = 256 * 2**20
    #: About half a millisecond.
    _SLEEP_CYCLES = 10**6

    def __init__(
        self, case: Case, function: Callable[..., Any], direction: str, device: torch.device
    ) -> None:
        self.function, self.device = function, device
        self.wrt = () if direction == "forward" else case.wrt
        self.forward_timed = direction != "backward"
        copies = 1
        if device.type == "cuda":
            copies = min(8, 1 + self._ROTATED_BYTES // max(case.bytes, 2**20))
        self.sets = [self._prepare(case.make(device)) for _ in range(copies)]
        self.times: list[float] = []
        self.calls = 0

    def _prepare(self, inputs: Inputs) -> Inputs:
        return {
            name: value.detach().requires_grad_() if name in self.wrt else value
            for name, value in inputs.items()
        }

    def step(self) -> None:
        """Run the variant once and keep the time in seconds."""
        inputs = self.sets[self.calls % len(self.sets)]
        self.calls += 1
        out = None if self.forward_timed else self._forward(inputs)
        if self.device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            # The device sleeps while the call is enqueued: its own time is measured, not Python's.
            torch.cuda._sleep(self._SLEEP_CYCLES)
            start.record()
            self._call(inputs, out)
            end.record()
            end.synchronize()
            self.times.append(start.elapsed_time(end) / 1e3)
        else:
            started = time.perf_counter()
            self._call(inputs, out)
            self.times.append(time.perf_counter() - started)

    def peak(self) -> int:
        """Bytes that one more run holds at once; not while its time is taken."""
        out = None if self.forward_timed else self._forward(self.sets[0])
        return peak_bytes(lambda: self._call(self.sets[0], out), self.device)

    def _call(self, inputs: Inputs, out: Any) -> None:
        out = self._forward(inputs) if self.forward_timed else out
        if self.wrt:
            leaves = [inputs[name] for name in self.wrt]
            # A variant may leave an input out, to show what it costs.
            torch.autograd.grad(out, leaves, torch.ones_like(out), allow_unused=True)

    def _forward(self, inputs: Inputs) -> Any:
        with torch.set_grad_enabled(bool(self.wrt)):
            return self.function(**inputs)


def _row(
    case: Case, direction: str, variant: str, runner: _Runner | None, status: str = "ok"
) -> Row:
    p20 = p50 = p80 = gbs = flops = peak = None
    if runner is not None:
        times = torch.tensor(runner.times, dtype=torch.float64)
        p20, p50, p80 = (round(1e6 * float(times.quantile(q)), 2) for q in (0.2, 0.5, 0.8))
        moved, done = {
            "forward": (case.bytes, case.flops),
            "training": (case.training_bytes, case.training_flops),
            "backward": (case.training_bytes - case.bytes, case.training_flops - case.flops),
        }[direction]
        gbs = round(moved / p50 / 1e3, 2) if moved else None
        flops = round(done / p50 / 1e3, 2) if done else None
        peak = round(runner.peak() / 2**20, 1)
    return Row(
        **machine_line(),
        op=case.op,
        case=case.label,
        direction=direction,
        variant=variant,
        p20_us=p20,
        p50_us=p50,
        p80_us=p80,
        gb_per_s=gbs,
        gflop_per_s=flops,
        peak_mb=peak,
        vs_eager=None,
        status=status,
    )


def targets(cases: Sequence[Case]) -> dict[tuple[str, str, str], tuple[float, float]]:
    """(floor, must) by (op, case, direction), if this is the GPU that they are meant for."""
    if TARGETS_GPU not in machine_line()["machine"]:
        return {}
    return {
        (case.op, case.label, direction): pair
        for case in cases
        for direction, pair in case.targets.items()
    }


@functools.cache
def machine_line() -> dict[str, str]:
    """What every row says of where and when it was measured."""
    if torch.cuda.is_available():
        machine = torch.cuda.get_device_name()
    else:
        machine = f"cpu {_cpu_name()} ({torch.get_num_threads()} threads)"
    try:
        import triton

        triton_version = triton.__version__
    except ImportError:
        triton_version = "none"
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
    ).stdout.strip()
    return dict(
        date=datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M"),
        machine=machine,
        torch=torch.__version__,
        triton=triton_version,
        commit=commit or "unknown",
    )


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def machine_folder() -> str:
    """Name of this machine's folder under results/."""
    if not torch.cuda.is_available():
        return "cpu"
    return torch.cuda.get_device_name().lower().replace(" ", "-")


def write_rows(rows: Sequence[Row], results: Path) -> list[Path]:
    """Append rows to ``results/<machine>/<op>.csv``; returns the files written."""
    written = []
    for op in dict.fromkeys(row.op for row in rows):
        path = results / machine_folder() / f"{op}.csv"
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = not path.exists()
        with path.open("a", newline="") as file:
            writer = csv.writer(file)
            if fresh:
                writer.writerow([f.name for f in fields(Row)])
            for row in rows:
                if row.op == op:
                    writer.writerow([getattr(row, f.name) for f in fields(Row)])
        written.append(path)
    return written


def table(rows: Sequence[Row]) -> str:
    """The rows as aligned text."""
    head = (
        "op",
        "case",
        "direction",
        "variant",
        "p50 us",
        "p20-p80",
        "GB/s",
        "GFLOP/s",
        "vs eager",
        "floor/must us",
    )
    lines = [head]
    for row in rows:
        if row.status != "ok":
            lines.append((row.op, row.case, row.direction, row.variant, row.status, *[""] * 5))
            continue
        targets = SESSION.targets.get((row.op, row.case, row.direction))
        lines.append(
            (
                row.op,
                row.case,
                row.direction,
                row.variant,
                f"{row.p50_us:,.0f}",
                f"{row.p20_us:,.0f}-{row.p80_us:,.0f}",
                "" if row.gb_per_s is None else f"{row.gb_per_s:.1f}",
                "" if row.gflop_per_s is None else f"{row.gflop_per_s:.1f}",
                "" if row.vs_eager is None else f"{row.vs_eager:.2f}x",
                "" if targets is None else "{:g}/{:g}".format(*targets),
            )
        )
    # A failure's message runs over the columns to its right instead of widening one.
    widths = [max(len(line[i]) for line in lines if i < 4 or line[5]) for i in range(len(head))]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def main() -> int:
    """``python benchmarks/harness.py OP --rows DIR``: one op, rows kept as they come."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("op")
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--rounds", type=int)
    options = parser.parse_args()
    sys.modules["harness"] = sys.modules["__main__"]  # the benchmark files import us by that name
    failed = False
    for case in importlib.import_module(f"test_{options.op}").CASES:
        default = Case.__dataclass_fields__["directions"].default
        forward_alone = not case.wrt and case.directions == default
        for direction in ("forward",) if forward_alone else case.directions:
            SESSION.rows.clear()
            try:
                measure(case, direction, rounds=options.rounds)
            except AssertionError as error:  # the gate: its rows say "failed", with no speed
                failed = True
                print(f"RED {case.label}, {direction}: {error}")
            write_rows(SESSION.rows, options.rows)
            print(table(SESSION.rows), flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
