"""``pytest benchmarks/ --benchmark-only``: prints one table of all rows. Further options:

--rows DIR              append the rows to DIR/<machine>/<op>.csv
--compare REF           compare the rows with those of another commit, or with a folder of rows
--full                  also measure cases that take minutes: BERT-base at full size on a CPU,
                        compiled models on a GPU
--benchmark-json FILE   an option of pytest-benchmark: the rows are in each entry's extra_info
"""

from __future__ import annotations

import functools
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
    parser.addoption("--compare", metavar="REF", help="compare the rows with those of REF")
    parser.addoption(
        "--full", action="store_true", help="measure cases and variants that take minutes too"
    )


def pytest_configure(config):
    harness.SESSION.full = config.getoption("--full", False)


def pytest_collection_modifyitems(config, items):
    if config.getoption("--full", False):
        return
    left_out = [item for item in items if _is_full(item)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not _is_full(item)]


def _is_full(item) -> bool:
    callspec = getattr(item, "callspec", None)
    return callspec is not None and getattr(callspec.params.get("case"), "full", False)


def pytest_generate_tests(metafunc):
    """Parametrize a benchmark with each case of its file, in each direction of the case."""
    names = [name for name in ("case", "direction") if name in metafunc.fixturenames]
    if not names or metafunc.definition.get_closest_marker("parametrize"):
        return
    runs = [
        (case, direction)
        for case in metafunc.module.CASES
        for direction in (case.directions if len(names) > 1 else ("",))
    ]
    metafunc.parametrize(names, [run[: len(names)] for run in runs], ids=str)


@pytest.fixture
def bench(benchmark):
    """``bench(case, direction)``: gate, time, and add the result to the final table."""
    return functools.partial(harness.measure, benchmark=benchmark)


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter, config):
    rows = harness.SESSION.rows
    if not rows:
        return
    terminalreporter.section(f"fastplm benchmarks on {rows[0].machine}")
    terminalreporter.write_line(harness.table(rows))
    ref = config.getoption("--compare", None)
    if ref is not None:
        import compare

        terminalreporter.section(f"compared with {ref}")
        terminalreporter.write_line(compare.against(ref, rows))
    target = config.getoption("--rows", None)
    if target is not None:
        for path in harness.write_rows(rows, target):
            terminalreporter.write_line(f"rows appended to {path}")
