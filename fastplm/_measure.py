"""``fastplm measure``: times the ops on this machine, for ``fastplm/_judge.py``.

Both sides of a comparison are called as a layer would call them, overhead and all, from where it is
known which one runs. They take turns, so that other load on the machine slows both, and the median
of the rounds counts. The caches are as in a model: products take the weights of many layers in
turn, and the attention of a decoder's token is measured with cold caches, since the weights of the
other layers have replaced its keys, values and Python code.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import itertools
import json
import math
import re
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from fastplm import _machine, ops
from fastplm._backends import OP_NAMES, use_backend
from fastplm._judge import Series
from fastplm._rules import ALONE, RULES, SQUARE
from fastplm.errors import check_choice

Call = Callable[[], Any]
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_ROUNDS = 7
#: Seconds to time one side for in a round, far above the clock's grain; most seconds of a cell.
_SLICE, _MOST = 2e-3, 0.5
#: Up to this many queries, as a decoder adds them, attention is timed with cold caches.
_FEW_QUERIES = 4
#: Weights of a model, of 12 layers, which a product finds in no near cache; and the most bytes.
_WEIGHTS, _OF_WEIGHTS = 72, 1 << 28
#: fp32 elements that are read before a cold call, which is timed alone, in more rounds.
_BETWEEN, _COLD_ROUNDS = 1 << 25, 21


class Plan(NamedTuple):
    """A series to measure: ``make(*sizes)`` gives (ours, stock PyTorch's).

    With a first size of at most ``cold`` nothing of a call is in the caches. The ``weights`` of a
    product take turns.
    """

    op: str
    form: str
    dtype: torch.dtype
    axes: list[list[int]]
    make: Callable[..., tuple[Call, Call]]
    cold: int = 0
    weights: int = 1


def plans() -> Iterator[Plan]:
    """Every op whose backend on a CPU follows from rules."""
    for dtype in _DTYPES:
        yield from _linear(dtype)
        yield from _attention(dtype)
        for form in ("forward", "training"):
            yield _pointwise("gelu", form, dtype, _gelu)
            yield _pointwise("dropout", form, dtype, _dropout)
            yield _pointwise("rms_norm", form, dtype, _rms_norm)


def measure(
    write: Callable[[str], None],
    path: Path,
    only: tuple[str, ...] = (),
    more: Callable[[], Iterator[Plan]] = lambda: iter(()),
) -> dict[str, Any]:
    """Measure this machine, write the rows to a file and return its contents.

    Args:
        write: called with a line of text after each series.
        path: the file, written anew after each series.
        only: names of ops; none means all.
        more: series that are measured after the ops.

    Raises:
        ArgumentValueError: an op that has no rules.
    """
    for name in only:
        check_choice("measure", "ops", name, tuple(RULES))
    contents: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "cpu": _machine.cpu_model(),
        "kind": _machine.cpu_kind(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "ops": {},
    }
    path.write_text(dump(contents), "utf-8")  # which may fail, so before minutes are spent
    for plan in itertools.chain(plans(), more()):
        if only and plan.op not in only:
            continue
        dtype = str(plan.dtype).removeprefix("torch.")
        name = f"{plan.form} {dtype}" + " native" * _machine.computes_in(plan.dtype)
        is_op = plan.op in OP_NAMES
        with use_backend("cpp", plan.op) if is_op else contextlib.nullcontext():
            with _threads(plan.form):
                cells = [
                    _cell(*plan.make(*sizes), sizes[0] <= plan.cold)
                    for sizes in itertools.product(*plan.axes)
                ]
        ours, stock = ([float(f"{cell[side]:.4g}") for cell in cells] for side in (0, 1))
        series = Series(plan.axes, ours, stock, plan.weights)
        contents["ops"].setdefault(plan.op, {})[name] = series._asdict()
        ratios = [theirs / mine for mine, theirs in zip(ours, stock, strict=True)]
        span = f"{min(ratios):.2f} to {max(ratios):.2f}"
        write(f"{plan.op} {name}: {span} times as fast as PyTorch's")
        path.write_text(dump(contents), "utf-8")
    return contents


@contextlib.contextmanager
def _threads(form: str) -> Iterator[None]:
    """One thread for a form of one."""
    before = torch.get_num_threads()
    if form.endswith(ALONE):
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def dump(contents: dict[str, Any]) -> str:
    """JSON with one line a list of numbers, which a reader and a diff can follow."""
    text = json.dumps(contents, indent=1)
    return re.sub(r"\[[^][]*\]", lambda found: " ".join(found[0].split()), text) + "\n"


def _cell(ours: Call, stock: Call, cold: bool) -> tuple[float, float]:
    """Microseconds a call of both."""
    took: tuple[list[float], list[float]] = ([], [])
    between = torch.zeros(_BETWEEN if cold else 0, device="cpu")
    calls = []
    for call in (ours, stock):
        call()
        calls.append(1 if cold else max(1, math.ceil(_SLICE / max(_seconds(call, 1), 1e-7))))
    start = time.perf_counter()
    for _ in range(_COLD_ROUNDS if cold else _ROUNDS):
        for call, times, count in zip((ours, stock), took, calls, strict=True):
            between.sum()
            times.append(_seconds(call, count))
        if time.perf_counter() - start > _MOST and len(took[1]) > 1:
            break
    return tuple(statistics.median(times) * 1e6 for times in took)  # type: ignore[return-value]


def _seconds(call: Call, count: int) -> float:
    start = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - start) / count


def _both(form: str, ours: Call, stock: Call, *wrt: torch.Tensor) -> tuple[Call, Call]:
    """The calls; with gradients in training."""
    if form == "forward":

        def plain(call: Call) -> Call:
            def run() -> Any:
                with torch.no_grad():
                    return call()

            return run

        return plain(ours), plain(stock)
    for tensor in wrt:
        tensor.requires_grad_()
    upstream = torch.randn_like(stock())

    def trained(call: Call) -> Call:
        return lambda: torch.autograd.grad(call(), wrt, upstream)

    return trained(ours), trained(stock)


# --- the ops --------------------------------------------------------------------------------------


def _linear(dtype: torch.dtype) -> Iterator[Plan]:
    rows = [1, 2, 3, 4, 8, 16, 32, 48, 56, 64, 96, 128, 256, 1024]
    weight = [1 << 12, 1 << 14, 1 << 16, 384**2, 1 << 18, 1 << 20, 1 << 22, 1 << 24]
    aspects = [SQUARE // 4, SQUARE, SQUARE * 4]  # so N, K are round
    if not _machine.computes_in(dtype):  # where PyTorch's takes seconds
        rows, weight = rows[:-1], weight[:-2]
    for form in ("linear", "conv1d"):

        @functools.cache
        def weights_of(size: int, width: int, form: str = form) -> Iterator[torch.Tensor]:
            """[N, K] of each layer, again and again."""
            count = min(_WEIGHTS, max(2, _OF_WEIGHTS // (size * dtype.itemsize)))
            if form == "linear":
                return itertools.cycle(
                    torch.randn(count, size // width, width, device="cpu").to(dtype)
                )
            return itertools.cycle(
                torch.randn(count, width, size // width, device="cpu").mT.to(dtype)
            )

        def make(rows: int, size: int, aspect: int, form: str = form) -> tuple[Call, Call]:
            width = math.isqrt(size * SQUARE // aspect)
            input = torch.randn(rows, width, device="cpu").to(dtype)
            bias = torch.randn(size // width, device="cpu").to(dtype)
            weights = weights_of(size, width)
            return (
                lambda: torch.ops.fastplm_C.linear.default(input, next(weights), bias),
                lambda: F.linear(input, next(weights), bias),
            )

        for threads in ("", ALONE):
            axes = [rows, weight, aspects]
            yield Plan("linear", form + threads, dtype, axes, make, weights=_WEIGHTS)


def _attention(dtype: torch.dtype) -> Iterator[Plan]:
    axes, dim = [[1, 4, 16, 32, 64, 128, 512], [16, 64, 128, 512], [2, 12, 24, 96]], 64
    for form in ("forward", "training"):

        def make(seqlen_q: int, seqlen_k: int, heads: int, form: str = form) -> tuple[Call, Call]:
            of_sample = min(heads, 12)
            q, k, v = (
                torch.randn(heads // of_sample, length, of_sample, dim, device="cpu")
                .to(dtype)
                .transpose(1, 2)
                for length in (seqlen_q, seqlen_k, seqlen_k)
            )
            return _both(
                form,
                lambda: ops.attention(q, k, v),
                lambda: F.scaled_dot_product_attention(q, k, v),
                q,
                k,
                v,
            )

        cold = _FEW_QUERIES if form == "forward" else 0
        for threads in ("", ALONE):
            yield Plan("attention", form + threads, dtype, axes, make, cold)


def _pointwise(
    op: str, form: str, dtype: torch.dtype, make: Callable[..., tuple[Call, Call]]
) -> Plan:
    sizes = [1 << 9, 1 << 11, 1 << 13, 1 << 14, 1 << 15, 1 << 17, 1 << 19, 1 << 21]
    return Plan(op, form, dtype, [sizes], lambda size: make(form, dtype, size))


def _gelu(form: str, dtype: torch.dtype, size: int) -> tuple[Call, Call]:
    x = torch.randn(size, device="cpu").to(dtype)
    return _both(
        form,
        lambda: ops.gelu(x, approximate="tanh"),
        lambda: F.gelu(x, approximate="tanh"),
        x,
    )


def _dropout(form: str, dtype: torch.dtype, size: int) -> tuple[Call, Call]:
    x = torch.randn(size, device="cpu").to(dtype)
    return _both(form, lambda: ops.dropout(x, 0.1), lambda: F.dropout(x, 0.1), x)


def _rms_norm(form: str, dtype: torch.dtype, size: int) -> tuple[Call, Call]:
    width = min(size, 512)
    x = torch.randn(size // width, width, device="cpu").to(dtype)
    weight = torch.randn(width, device="cpu").to(dtype)
    return _both(
        form,
        lambda: ops.rms_norm(x, weight),
        lambda: F.rms_norm(x, weight.shape, weight, 1e-6),
        x,
        weight,
    )
