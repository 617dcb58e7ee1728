"""The time of each kernel of a call, and the file profile.csv that it is kept in."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType

import harness

CALLS = 5
#: The number of kernels of a case that get their own row.
KEPT = 12
FIELDS = (
    *("date", "machine", "torch", "triton", "commit", "op", "case", "direction"),
    *("kernel", "launches", "us", "share"),
)

Profiled = list[tuple[str, float, float]]


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
    folder: Path,
    op: str,
    case: str,
    direction: str,
    profiled: Profiled,
    kept: int | None = KEPT,
) -> list[dict[str, Any]]:
    """Append to profile.csv: the longest kernels one by one, the others together; None: all."""
    total = sum(us for *_, us in profiled) or 1.0
    own, rest = profiled[:kept], profiled[kept:] if kept else []
    if rest:
        name = f"{len(rest)} others"
        own = [*own, (name, sum(n for _, n, _ in rest), sum(us for *_, us in rest))]
    rows = [
        {
            **harness.machine_line(),
            **dict(op=op, case=case, direction=direction, kernel=name[:160]),
            **dict(launches=round(n, 2), us=round(us, 2), share=round(us / total, 4)),
        }
        for name, n, us in own
    ]
    folder.mkdir(parents=True, exist_ok=True)
    for row in rows:
        harness.append_row(folder / "profile.csv", FIELDS, row)
    return rows
