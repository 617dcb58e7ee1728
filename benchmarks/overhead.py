"""The host's time for an op beside its work: ``python benchmarks/overhead.py [--rows DIR]``.

Each op runs on inputs so small that its work takes almost no time: through its public function, and
by a direct call of the backend's function. The difference is the time that fastplm and PyTorch's
registration add: checks, the choice of the backend, dispatch and autograd. A backward is run by
``torch.autograd.grad``; the time of a graph with one node, which computes nothing, is subtracted.

On a GPU the host never waits for the device, as these kernels are shorter than the calls that
enqueue them. Variants take turns; the median of the rounds counts.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fastplm import ops
from fastplm._backends import record_decisions
from fastplm._registry import OPS
from harness import Row, default_device, machine_line, write_rows

#: Microseconds that a call may cost beside its work.
MUST_US = 30.0
CALLS_A_ROUND = 50

Call = Callable[[], Any]


def small_calls(device: torch.device, grad: bool) -> dict[str, Call]:
    """A tiny call of every op, by name."""
    generator = torch.Generator(device).manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, generator=generator).requires_grad_(grad)

    query, packed, rows, table, weight = (
        draw(*shape) for shape in ((1, 1, 8, 16), (8, 1, 16), (4, 16), (32, 16), (16,))
    )
    starts = torch.tensor([0, 5, 8], dtype=torch.int32, device=device)
    seen = torch.ones(1, 8, dtype=torch.bool, device=device)
    target = torch.tensor([3, -100, 7, 1], device=device)
    replaced = target > 2
    positions = torch.tensor([2, -1], device=device)
    calls: dict[str, Call] = {
        # Attention with a mask never takes the fast path to PyTorch's SDPA.
        "attention": lambda: ops.attention(query, query, query, key_mask=seen),
        "attention_varlen": lambda: ops.attention_varlen(
            packed, packed, packed, starts, starts, 5, 5
        ),
        "linear_cross_entropy": lambda: ops.linear_cross_entropy(rows, table, target),
        "replaced_token_loss": lambda: ops.replaced_token_loss(rows, weight, replaced),
        "gather_rows": lambda: ops.gather_rows(rows, positions),
    }
    if grad:
        return calls
    ids = torch.randint(5, 32, (1, 8), device=device)
    sentinels = torch.tensor([31, 30], device=device)
    seed = torch.tensor(1, device=device)
    return calls | {
        "mask_tokens": lambda: ops.mask_tokens(ids, vocab_size=32, mask_token_id=4, seed=seed),
        "corrupt_spans": lambda: ops.corrupt_spans(ids, sentinel_ids=sentinels, seed=seed),
        "bart_noise": lambda: ops.bart_noise(
            ids, vocab_size=32, mask_token_id=4, pad_token_id=0, seed=seed
        ),
    }


def work_of(name: str, call: Call, attribute: str) -> Call:
    """The backend's own part of a call: its function with the arguments of the call."""
    op = OPS[name.removesuffix("_varlen")]
    seen: list[Call] = []

    def recorded(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            seen.append(lambda: function(*arguments))
            return function(*arguments)

        return run

    backends = dict(op.backends)
    op.backends |= {
        name: dataclasses.replace(backend, **{attribute: recorded(getattr(backend, attribute))})
        for name, backend in backends.items()
    }
    try:
        with record_decisions():  # makes the call go through its backend, without a fast path
            call()
    finally:
        op.backends.update(backends)
    return seen[-1]


def backward_of(call: Call) -> Call:
    """The backward of a call, repeated on one graph."""
    out = call()
    node, leaves = out.grad_fn, []
    while node is not None and not leaves:  # finds the op's own node
        leaves = [after.variable for after, _ in node.next_functions if hasattr(after, "variable")]
        node = next((after for after, _ in node.next_functions if after is not None), None)
    ones = torch.ones_like(out)
    return lambda: torch.autograd.grad(out, leaves, ones, retain_graph=True)


def nothing_backward(device: torch.device) -> Call:
    """The backward of a graph that computes nothing: autograd's own time."""

    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad

    leaf = torch.zeros(4, device=device, requires_grad=True)
    out = Nothing.apply(leaf)
    ones = torch.ones_like(out)
    return lambda: torch.autograd.grad(out, leaf, ones, retain_graph=True)


def microseconds(calls: dict[str, Call], rounds: int) -> dict[str, list[float]]:
    """Microseconds per call, by variant and round."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds + 1):
        for name, call in calls.items():
            started = time.perf_counter()
            for _ in range(CALLS_A_ROUND):
                call()
            times[name].append((time.perf_counter() - started) / CALLS_A_ROUND * 1e6)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
    return {name: found[1:] for name, found in times.items()}  # the first round warms up


def measure(rounds: int, device: torch.device) -> list[Row]:
    """Two rows for each op and direction: "call", the whole, and "beside its work"."""
    timed: dict[str, Call] = {}
    with torch.no_grad():
        plain = small_calls(device, False)
        works = {name: work_of(name, call, "forward") for name, call in plain.items()}
    differentiable = small_calls(device, True)
    for name, call in plain.items():
        timed[f"{name} forward call"] = torch.no_grad()(call)
        timed[f"{name} forward work"] = torch.no_grad()(works[name])
    for name, call in differentiable.items():
        back = backward_of(call)
        timed[f"{name} backward call"] = back
        timed[f"{name} backward work"] = torch.no_grad()(work_of(name, back, "backward"))
    timed["nothing"] = nothing_backward(device)
    timed["nothing, no gradient"] = torch.no_grad()(lambda: None)
    times = microseconds(timed, rounds)
    rows = []
    for name in timed:
        if not name.endswith(" call"):
            continue
        op, direction, _ = name.split()
        bare = times["nothing" if direction == "backward" else "nothing, no gradient"]
        work = times[f"{op} {direction} work"]
        beside = [a - b - c for a, b, c in zip(times[name], work, bare, strict=True)]
        rows.append(_row(op, direction, "call", times[name]))
        rows.append(_row(op, direction, "beside its work", beside))
    return rows


def _row(op: str, direction: str, variant: str, times: list[float]) -> Row:
    low, *_, high = statistics.quantiles(times, n=5)
    values = dict.fromkeys((field.name for field in dataclasses.fields(Row)), None)
    values |= machine_line()
    values |= dict(op="overhead", case=op, direction=direction, variant=variant, status="ok")
    values |= dict(p20_us=round(low, 2), p50_us=round(statistics.median(times), 2))
    return Row(**values | dict(p80_us=round(high, 2)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=Path, help="append rows to DIR/<machine>/overhead.csv")
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    rows = measure(options.rounds, default_device())
    if options.rows is not None:
        write_rows(rows, options.rows)
    print(f"{'µs a call on the host':<44}  whole  beside its work (must: {MUST_US:g})")
    over = False
    for whole, beside in zip(rows[::2], rows[1::2], strict=True):
        assert whole.p50_us is not None and beside.p50_us is not None
        late = beside.p50_us > MUST_US
        over |= late
        label = f"{whole.case}, {whole.direction}"
        mark = "  OVER" if late else ""
        print(f"{label:<44} {whole.p50_us:6.1f} {beside.p50_us:6.1f}{mark}")
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
