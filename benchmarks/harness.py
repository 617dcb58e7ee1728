"""How every benchmark measures: gate, interleaved rounds, medians, rates beside ceilings, rows.

A benchmark is a ``Case``: inputs, the variants to compare, and the bytes and FLOPs that the task
needs (each input read once, each output written once), from which the rates follow. First every
fused variant must pass the error budget on the case's small inputs: no speed on a red result. Then
the variants take turns: each round calls every variant once, in a new random order, so that other
load on the machine, and the state that a variant leaves, affect all of them alike. The row has the
median and the 20th and 80th percentile, also if fastplm is slower. A variant that fails gets a row
with the error, and one that cannot run here (``Unavailable``) a row with the reason.

    python benchmarks/harness.py OP --rows DIR           # every case of test_OP.py
    python benchmarks/harness.py OP --rows DIR --quick   # those of `pytest benchmarks/` alone
    python benchmarks/harness.py --from-json FILE --rows DIR   # of pytest's --benchmark-json FILE
"""

from __future__ import annotations

import argparse
import csv
import datetime
import functools
import importlib
import json
import platform
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from fastplm._machine import level, peak_bytes
from fastplm.testing import assert_within_budget, hold_to_level

hold_to_level()

Inputs = dict[str, Any]

TARGETS_GPU = "H200"
#: Rounds of ``--quick`` on a GPU, where the times of rounds differ little.
_QUICK_ROUNDS = 20


class Unavailable(Exception):
    """A variant needs a package, a version or a device that is not here; the message says which.

    A variant raises it when it runs or in its gate: its row is "skipped", and nothing has failed.
    """


class Differs(Exception):
    """A variant that is not gated gives another result than the reference: it has no speed."""


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
        directions: the directions to measure if there are gradients, of "forward", "backward" and
            "training". A variant that computes its own gradients, such as a model's step, has
            directions without ``wrt``.
        bytes: bytes moved by a forward that reads each input and writes each output once.
        flops: FLOPs of the forward.
        training_bytes, training_flops: the same for forward and backward together.
        dtype: dtype of the products, which sets the ceiling of the FLOPs.
        tokens: tokens of one call without padding; 0 if there are none.
        rounds: how often all variants run, if the harness should not choose.
        replayed: on a GPU, time a CUDA graph of repeated calls, in which no launch waits for the
            host. Not for a whole step, to whose time the host belongs.
        full: the case takes too long for every run: `pytest benchmarks/` leaves it out without
            ``--full``, and this file's command with ``--quick``.
        targets: (floor, must[, stretch]) of a direction, in microseconds on the ``TARGETS_GPU``:
            the least that the arithmetic allows, the most that fastplm may take, and a goal below.
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
    dtype: torch.dtype = torch.float32
    tokens: int = 0
    rounds: int | None = None
    replayed: bool = True
    full: bool = False
    targets: Mapping[str, tuple[float, ...]] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.label.replace(" ", "_")

    def needs(self, direction: str) -> tuple[int, int]:
        """The bytes and FLOPs of a direction."""
        return {
            "forward": (self.bytes, self.flops),
            "training": (self.training_bytes, self.training_flops),
            "backward": (self.training_bytes - self.bytes, self.training_flops - self.flops),
        }[direction]


@dataclass
class Row:
    """One line of ``results/<machine>/<op>.csv``; times in microseconds.

    The status is "ok", "skipped: why", "differs: how" (a peer's result), "refused: why" (by the
    gate), or "failed: why".
    """

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
    of_roofline: float | None = None  # the least time that the ceilings allow, over the median
    mfu: float | None = None  # FLOPs needed per second, over the data sheet's dense peak
    tokens_per_s: float | None = None
    launches: int | None = None  # kernels of one call, on CUDA


COLUMNS = [column.name for column in fields(Row)]


@dataclass
class Session:
    """Rows of this run; the plug-in in conftest.py prints and writes them."""

    rows: list[Row] = field(default_factory=list)
    #: (floor, must[, stretch]) by (op, case, direction), on the GPU of the targets
    targets: dict[tuple[str, str, str], tuple[float, ...]] = field(default_factory=dict)
    #: whether to measure cases and variants that take minutes, too
    full: bool = False


SESSION = Session()


def default_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def measure(
    case: Case, direction: str, benchmark: Any = None, rounds: int | None = None
) -> list[Row]:
    """Gate and time all variants of ``case``; ``direction`` is one of ``case.directions``.

    ``benchmark`` is pytest-benchmark's fixture, if there is one: it then drives the rounds, each of
    which runs every variant once, and its JSON has the rows.

    Raises:
        AssertionError: a gated variant was refused, or failed; the rows are in ``SESSION`` before.
    """
    device = default_device()
    runners: dict[str, _Runner] = {}
    statuses: dict[str, str] = {}

    def attempt(name: str, verdict: str, action: Callable[..., Any], *args: Any) -> Any:
        """Call ``action``. An error becomes the variant's row; the others are still measured."""
        try:
            return action(*args)
        except Unavailable as reason:
            statuses[name] = f"skipped: {_first_line(reason)}"
        except Differs as how:
            statuses[name] = f"differs: {_first_line(how)}"
        except Exception as error:
            statuses[name] = f"{verdict}: {type(error).__name__}: {_first_line(error)}"
        runners.pop(name, None)
        return None

    for name, function in case.variants.items():
        if name in case.gated:
            attempt(name, "refused", _check, case, function, device)
        if name not in statuses:
            runner = attempt(name, "failed", _Runner, case, function, direction, device)
            if runner is not None:
                runners[name] = runner
                attempt(name, "failed", runner.step)

    order = random.Random(0)

    def one_round() -> None:
        # If a variant frees much memory, the next one takes longer: so each round has a new order.
        for name in order.sample(list(runners), len(runners)):
            attempt(name, "failed", runners[name].step)

    rounds = rounds or case.rounds or (50 if device.type == "cuda" else 9)
    one_round()
    for runner in runners.values():
        runner.times.clear()
    if benchmark is not None:
        benchmark.group = f"{case.op}, {case.label}, {direction} (one round: every variant once)"
        benchmark.pedantic(one_round, rounds=rounds, iterations=1)
    else:
        for _ in range(rounds):
            one_round()
    rows = []
    for name in case.variants:
        row = None
        if name in runners:
            row = attempt(name, "failed", _row, case, direction, name, runners[name])
        rows.append(row or _row(case, direction, name, None, statuses[name]))
    eager = next((row.p50_us for row in rows if row.variant == "eager"), None)
    for row in rows:
        if eager and row.p50_us:
            row.vs_eager = round(eager / row.p50_us, 2)
    SESSION.rows += rows
    SESSION.targets |= targets([case])
    if benchmark is not None:
        benchmark.extra_info["rows"] = [asdict(row) for row in rows]
    red = [
        f"{name}: {statuses[name]}"
        for name in case.gated
        if not statuses.get(name, "skipped").startswith("skipped")
    ]
    if red:
        raise AssertionError("; ".join(red))
    return rows


def _check(case: Case, function: Callable[..., Any], device: torch.device) -> None:
    gate = case.gate or functools.partial(assert_within_budget, wrt=case.wrt)
    gate(function, case.variants["eager"], case.make_small(device))


def assert_same_bits(
    variant: Callable[..., Any], eager: Callable[..., Any], inputs: Inputs
) -> None:
    """The gate of an op whose results, a named tuple, must be exact."""
    expected = eager(**inputs)
    for name, got, wanted in zip(expected._fields, variant(**inputs), expected, strict=True):
        assert torch.equal(got, wanted), f"{name} differs from the reference"


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "")[:160]


class _Runner:
    """One variant of one case: its rotated inputs and its times."""

    #: Inputs are rotated so that a GPU's L2 (60 MB on an H200) does not serve a repeated call.
    _ROTATED_BYTES = 256 * 2**20
    #: Seconds of the calls in a graph, and the most of them.
    _REPLAYED_SECONDS, _MOST_REPEATS = 2e-3, 32
    #: Cycles of about half a millisecond.
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
        self.upstream: torch.Tensor | None = None
        self.times: list[float] = []
        self.calls = 0
        self.replays = case.replayed and device.type == "cuda"
        self.replay: Callable[[], object] | None = None
        self.repeats = 1

    def _prepare(self, inputs: Inputs) -> Inputs:
        return {
            name: value.detach().requires_grad_() if name in self.wrt else value
            for name, value in inputs.items()
        }

    def step(self) -> None:
        """Run the variant once, or replay its graph, and keep the seconds of a call.

        The second call, which compiles nothing any more, says how many calls its graph has. A
        variant that cannot be captured is timed behind a sleep, in which the host enqueues it.
        """
        self.calls += 1
        if self.replay is not None:
            self.times.append(_seconds(self.replay, self.device) / self.repeats)
            return
        inputs = self.sets[self.calls % len(self.sets)]
        out = None if self.forward_timed else self._forward(inputs)
        if self.replays:
            torch.cuda._sleep(self._SLEEP_CYCLES)
        self.times.append(_seconds(lambda: self._call(inputs, out), self.device))
        if self.replays and self.calls == 2:
            repeats = int(self._REPLAYED_SECONDS / max(self.times[-1], 1e-6))
            self.repeats = min(max(repeats, 2), self._MOST_REPEATS)
            self.replay = _captured(self._repeated)

    def _repeated(self) -> Callable[[], None]:
        """What a graph holds: calls on the sets of inputs in turns. A backward's forwards run here,
        and keep what it reads."""
        outs = [None if self.forward_timed else self._forward(inputs) for inputs in self.sets]

        def run() -> None:
            for number in range(self.repeats):
                place = number % len(self.sets)
                self._call(self.sets[place], outs[place], keep=not self.forward_timed)

        return run

    def peak(self) -> int:
        """The most bytes that a further run, which is not timed, holds at once."""
        out = None if self.forward_timed else self._forward(self.sets[0])
        return peak_bytes(lambda: self._call(self.sets[0], out), self.device)

    def launches(self) -> int | None:
        """Kernels that a further run launches on a GPU; None if the profiler sees none."""
        if self.device.type != "cuda":
            return None
        out = None if self.forward_timed else self._forward(self.sets[0])
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            self._call(self.sets[0], out)
            torch.cuda.synchronize()
        return count_kernels(profile.events()) or None

    def _call(self, inputs: Inputs, out: Any, keep: bool = False) -> None:
        out = self._forward(inputs) if self.forward_timed else out
        if self.wrt:
            leaves = [inputs[name] for name in self.wrt]
            if self.upstream is None:  # made once, as no variant should be timed with it
                self.upstream = torch.ones_like(out)
            # A variant may leave an input out, to show what it costs.
            options = dict(allow_unused=True, retain_graph=keep)
            torch.autograd.grad(out, leaves, self.upstream, **options)

    def _forward(self, inputs: Inputs) -> Any:
        with torch.set_grad_enabled(bool(self.wrt)):
            return self.function(**inputs)


def _captured(make: Callable[[], Callable[[], None]]) -> Callable[[], object] | None:
    """What replays the function that ``make`` returns as a CUDA graph; None if nothing can."""
    # A gradient is computed on the stream of its forward, and what is allocated lazily may not be
    # in a capture: so the function is made, and runs once, on the stream of the capture.
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        body = make()
        body()
    torch.cuda.synchronize()
    try:
        with torch.cuda.graph(graph, stream=side):
            body()
    except RuntimeError:
        torch.cuda.synchronize()
        return None
    return graph.replay


def _seconds(call: Callable[[], Any], device: torch.device) -> float:
    if device.type != "cuda":
        started = time.perf_counter()
        call()
        return time.perf_counter() - started
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def count_kernels(events: Iterable[Any]) -> int:
    """The kernels among a profiler's events, without copies, fills and named ranges."""
    return sum(
        event.device_type == torch.autograd.DeviceType.CUDA
        and not event.is_user_annotation
        and not event.name.startswith(("Memcpy", "Memset"))
        for event in events
    )


# --- ceilings -------------------------------------------------------------------------------------


def ceilings(device: torch.device, dtype: torch.dtype) -> tuple[float, float]:
    """The measured ceilings: bytes/s of a copy, FLOP/s of a matrix product in ``dtype``.

    They are measured once a process: the fastest of some calls, after one to warm up. The copy goes
    from one fp32 buffer to another of 256 MiB (1 GiB on a GPU); its reads and writes count. That is
    more than the caches hold, so a call whose inputs are in the caches may exceed this roofline.
    The product multiplies two square matrices, 2048 wide (8192 on a GPU). All numbers are random,
    as a GPU multiplies zeros faster.
    """
    return _copy_rate(device), _product_rate(device, dtype)


@functools.cache
def _copy_rate(device: torch.device) -> float:
    rows = 256 if device.type == "cuda" else 64
    source = torch.randn(2**20, device=device).repeat(rows)
    target = torch.empty_like(source)
    return 2 * source.nbytes / _fastest(lambda: target.copy_(source), device)


@functools.cache
def _product_rate(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of a large product in the dtype, or on a CPU in fp32 if that is faster."""
    width = 8192 if device.type == "cuda" else 2048
    a, b = (torch.randn(width, width, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    rate = 2 * width**3 / _fastest(lambda: torch.mm(a, b.t(), out=out), device)
    if device.type == "cpu" and dtype in (torch.float16, torch.bfloat16):
        return max(rate, _product_rate(device, torch.float32))
    return rate


def _fastest(call: Callable[[], Any], device: torch.device) -> float:
    """The fewest seconds of a call, among ten or as many as fit in a second."""
    times = [_seconds(call, device)]
    while len(times) < 2 or (len(times) < 11 and sum(times) < 1):
        times.append(_seconds(call, device))
    return min(times[1:])


def allowed_seconds(
    moved: int, done: int, device: torch.device, dtype: torch.dtype
) -> float | None:
    """The least time that the roofline allows for so many bytes and FLOPs."""
    by_bytes = moved / _copy_rate(device) if moved else 0.0
    by_flops = done / _product_rate(device, dtype) if done else 0.0
    return max(by_bytes, by_flops) or None


_HOPPER = {torch.bfloat16: 989.5e12, torch.float16: 989.5e12, torch.float32: 67e12}
#: Dense FLOP/s of the data sheets by a part of the GPU's name; the first that matches counts. fp32
#: is without TF32, as PyTorch multiplies by default.
PEAKS: dict[str, dict[torch.dtype, float]] = {
    "H100 PCIe": {torch.bfloat16: 756e12, torch.float16: 756e12, torch.float32: 51e12},
    "H100 NVL": {torch.bfloat16: 835e12, torch.float16: 835e12, torch.float32: 60e12},
    "H100": _HOPPER,
    "H200": _HOPPER,
    "A100": {torch.bfloat16: 312e12, torch.float16: 312e12, torch.float32: 19.5e12},
    "L40S": {torch.bfloat16: 362e12, torch.float16: 362e12, torch.float32: 91.6e12},
    "L4": {torch.bfloat16: 121e12, torch.float16: 121e12, torch.float32: 30.3e12},
}


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """The data sheet's dense FLOP/s; None if it is not known, as for a CPU or a slice of a GPU."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    if "MIG" in name:
        return None
    known = next((peaks for part, peaks in PEAKS.items() if part in name), {})
    return known.get(dtype)


# --- rows -----------------------------------------------------------------------------------------


def _row(
    case: Case, direction: str, variant: str, runner: _Runner | None, status: str = "ok"
) -> Row:
    row = Row(
        **machine_line(),
        op=case.op,
        case=case.label,
        direction=direction,
        variant=variant,
        **dict.fromkeys(COLUMNS[COLUMNS.index("p20_us") : COLUMNS.index("status")]),
        status=status,
    )
    if runner is None:
        return row
    times = torch.tensor(runner.times, dtype=torch.float64)
    p20, p50, p80 = (float(times.quantile(q)) for q in (0.2, 0.5, 0.8))
    row.p20_us, row.p50_us, row.p80_us = (round(1e6 * p, 2) for p in (p20, p50, p80))
    moved, done = case.needs(direction)
    row.gb_per_s = round(moved / p50 / 1e9, 2) if moved else None
    row.gflop_per_s = round(done / p50 / 1e9, 2) if done else None
    row.peak_mb = round(runner.peak() / 2**20, 1)
    allowed = allowed_seconds(moved, done, runner.device, case.dtype)
    row.of_roofline = round(allowed / p50, 4) if allowed else None
    peak = peak_flops(runner.device, case.dtype)
    row.mfu = round(done / p50 / peak, 4) if peak and done else None
    row.tokens_per_s = round(case.tokens / p50, 1) if case.tokens else None
    row.launches = runner.launches()
    return row


def targets(cases: Sequence[Case]) -> dict[tuple[str, str, str], tuple[float, ...]]:
    """(floor, must[, stretch]) by (op, case, direction), if this is the GPU of the targets."""
    if TARGETS_GPU not in machine_line()["machine"]:
        return {}
    return {
        (case.op, case.label, direction): pair
        for case in cases
        for direction, pair in case.targets.items()
    }


@functools.cache
def machine_line() -> dict[str, str]:
    """The columns that say where and when a row was measured."""
    if torch.cuda.is_available():
        machine = torch.cuda.get_device_name() + _driver()
    else:
        machine = f"cpu {_cpu_name()} ({torch.get_num_threads()} threads, {level()})"
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


def _driver() -> str:
    try:
        found = re.search(r"\b\d+\.\d+(\.\d+)?\b", Path("/proc/driver/nvidia/version").read_text())
    except OSError:
        found = None
    return f" (driver {found[0]})" if found else ""


def machine_folder(machine: str | None = None) -> str:
    """Name of a machine's folder under results/; by default of this machine."""
    machine = machine_line()["machine"] if machine is None else machine
    if machine.startswith("cpu "):
        return "cpu"
    return machine.split(" (")[0].lower().replace(" ", "-")


def append_row(path: Path, names: Sequence[str], row: Mapping[str, Any]) -> None:
    """Add a row to a file that has one header."""
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, names, lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerow(row)


def write_rows(rows: Sequence[Row], results: Path) -> list[Path]:
    """Append rows to ``results/<machine>/<op>.csv``; returns the files written.

    Raises:
        ValueError: a file has other columns, and is left as it is; the other files are written.
    """
    files: dict[Path, list[Row]] = {}
    for row in rows:
        files.setdefault(results / machine_folder(row.machine) / f"{row.op}.csv", []).append(row)
    refused = []
    for path, its_rows in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        head = []
        if path.exists():
            with path.open(newline="") as file:
                head = next(csv.reader(file), [])
        if head and head != COLUMNS:
            refused.append(path)
            continue
        with path.open("a", newline="") as file:
            writer = csv.writer(file)
            if not head:
                writer.writerow(COLUMNS)
            writer.writerows([getattr(row, name) for name in COLUMNS] for row in its_rows)
    if refused:
        raise ValueError(
            f"{', '.join(map(str, refused))}: other columns than {', '.join(COLUMNS)}; no row was "
            "appended there. Move the file away, or give its rows the missing columns."
        )
    return list(files)


def rows_of_json(path: Path) -> list[Row]:
    """The rows in the file of pytest-benchmark's ``--benchmark-json``."""
    entries = json.loads(path.read_text())["benchmarks"]
    return [Row(**row) for entry in entries for row in entry["extra_info"].get("rows", ())]


def table(rows: Sequence[Row]) -> str:
    """The rows as aligned text, without the columns that are empty in all rows."""
    head = (
        "op",
        "case",
        "direction",
        "variant",
        "p50 us",
        "p20-p80",
        "GB/s",
        "GFLOP/s",
        "roofline",
        "MFU",
        "tokens/s",
        "launches",
        "peak MiB",
        "vs eager",
        "floor/must us",
    )
    lines = []
    for row in rows:
        name = (row.op, row.case, row.direction, row.variant)
        if row.status != "ok":
            lines.append((*name, row.status, *[""] * (len(head) - 5)))
            continue
        targets = SESSION.targets.get((row.op, row.case, row.direction))
        lines.append(
            (
                *name,
                f"{row.p50_us:,.0f}",
                f"{row.p20_us:,.0f}-{row.p80_us:,.0f}",
                "" if row.gb_per_s is None else f"{row.gb_per_s:.1f}",
                "" if row.gflop_per_s is None else f"{row.gflop_per_s:.1f}",
                "" if row.of_roofline is None else f"{row.of_roofline:.0%}",
                "" if row.mfu is None else f"{row.mfu:.1%}",
                "" if row.tokens_per_s is None else f"{row.tokens_per_s:,.0f}",
                "" if row.launches is None else str(row.launches),
                "" if row.peak_mb is None else f"{row.peak_mb:.1f}",
                "" if row.vs_eager is None else f"{row.vs_eager:.2f}x",
                "" if targets is None else "{:g}/{:g}".format(*targets),
            )
        )
    used = [i for i in range(len(head)) if i < 6 or any(line[i] for line in lines)]
    lines = [tuple(line[i] for i in used) for line in (head, *lines)]
    # A failure's message runs over the columns to its right instead of widening one.
    widths = [max(len(line[i]) for line in lines if i < 4 or line[5]) for i in range(len(used))]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def main() -> int:
    """Measure ops and append each row at once, or append the rows that pytest-benchmark wrote."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("ops", nargs="*", metavar="op", help="of test_OP.py")
    parser.add_argument("--rows", type=Path, required=True, help="append to DIR/<machine>/<op>.csv")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--quick", action="store_true", help="only what every run has time for")
    parser.add_argument("--only", default="", help="cases with this in their label")
    parser.add_argument("--from-json", type=Path, help="what --benchmark-json wrote")
    options = parser.parse_args()
    if bool(options.ops) == bool(options.from_json):
        parser.error("either OP or --from-json")
    if options.from_json:
        for path in write_rows(rows_of_json(options.from_json), options.rows):
            print(f"rows appended to {path}")
        return 0
    sys.modules["harness"] = sys.modules["__main__"]  # benchmark files import this file as harness
    SESSION.full = not options.quick
    failed = False
    cases = [case for op in options.ops for case in importlib.import_module(f"test_{op}").CASES]
    rounds = options.rounds
    if rounds is None and options.quick and default_device().type == "cuda":
        rounds = _QUICK_ROUNDS
    for case in cases:
        if (case.full and options.quick) or options.only not in case.label:
            continue
        default = Case.__dataclass_fields__["directions"].default
        forward_alone = not case.wrt and case.directions == default
        for direction in ("forward",) if forward_alone else case.directions:
            SESSION.rows.clear()
            try:
                measure(case, direction, rounds=rounds)
            except AssertionError as error:  # the gate's rows say "refused" and have no speed
                failed = True
                print(f"RED {case.label}, {direction}: {error}")
            write_rows(SESSION.rows, options.rows)
            print(table(SESSION.rows), flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
