"""``pytest benchmarks/ --benchmark-only [--rows DIR]``: prints one table, optionally keeps rows."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import harness  # noqa: E402  (its folder is on the path only now)


def pytest_addoption(parser):
    parser.addoption(
        "--rows",
        type=Path,
        default=None,
        help="append the rows to DIR/<machine>/<op>.csv (the committed ones: benchmarks/results)",
    )


@pytest.fixture
def bench(benchmark):
    """``bench(case, direction)``: gate, time, and let the result show in the final table."""

    def run(case, direction):
        benchmark.group = f"{case.op}, {case.label}, {direction} (one round: every variant once)"
        for row in harness.measure(case, direction, benchmark):
            benchmark.extra_info[row.variant] = row.p50_us

    return run


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter, config):
    rows = harness.SESSION.rows
    if not rows:
        return
    terminalreporter.section(f"fastplm benchmarks on {rows[0].machine}")
    terminalreporter.write_line(harness.table(rows))
    target = config.getoption("--rows")
    if target is not None:
        for path in harness.write_rows(rows, target):
            terminalreporter.write_line(f"rows appended to {path}")
