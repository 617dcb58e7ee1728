"""The static report: the committed rows match today's machine code; worse code is reported."""

from __future__ import annotations

import importlib
import itertools
from pathlib import Path

import pytest

import machine_code
from compile_kernels import kernel_modules

pytestmark = pytest.mark.compile


@pytest.fixture
def static_report(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    return importlib.import_module("static_report")


@pytest.fixture
def committed(static_report):
    rows = static_report.read(static_report.RESULTS)
    if reason := static_report.not_comparable(rows):
        pytest.skip(reason)
    return rows


def test_no_kernel_is_worse_than_the_committed_rows_and_these_are_todays(
    static_report, committed, reports
):
    now = static_report.rows(reports)
    assert not static_report.worse(now, committed)
    meant = "if this is meant: python benchmarks/static_report.py"
    assert not static_report.changed(now, committed), meant
    assert static_report.PAGE.read_text(encoding="utf-8") == static_report.text(reports), meant


SAME = """
import json
from compile_kernels import kernel_modules, launches_digest

same = {op: launches_digest(op, 86) == launches_digest(op, 89) for op in kernel_modules()}
print(json.dumps([op for op in same if not same[op]]))
"""


STALE = """
import json, sys
from static_report import LONG, read, stale

print(json.dumps(list(stale(read(LONG), map(int, sys.argv[1:])))))
"""


RACES = """
import sys
import compile_kernels
from fastplm.triton_kernels import attention
from fastplm.triton_kernels._launch import record_launches
cases = dict(attention.compile_cases())
for label in sys.argv[1:]:
    with record_launches(90) as launches:
        cases[label]()
    for launch in launches:
        report = compile_kernels.compile_launch("attention", label, 90, launch)
        print(len(report.hazards["races"]))
"""


@pytest.mark.slow
def test_dk_and_dv_with_bias_and_dropout_have_no_race(run):
    """A kernel of the long list: with three stages a copy of Q overwrote a product's rows."""
    counts = run("-c", RACES, "slow: bfloat16 D=128 T=64 everything and bias")
    assert len(counts) >= 3 and not any(counts)


def test_every_op_and_architecture_has_been_compiled_in_all_configurations(static_report):
    rows = static_report.read(static_report.LONG)
    expected = set(itertools.product(kernel_modules(), static_report.LONG_ARCHS))
    assert {(row["op"], int(row["arch"])) for row in rows} == expected
    assert all(row["may_not_ship"] == "0" for row in rows)
    page = static_report.PAGE.read_text(encoding="utf-8")
    assert page.endswith(static_report.long_section(rows))


@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 89, 90, 100, 120])
def test_the_rows_of_all_configurations_are_of_todays_code(run, arch):
    assert run("-c", STALE, str(arch)) == [[]], "run: python benchmarks/static_report.py --long"


@pytest.mark.slow
def test_sm_86_has_the_launches_of_sm_89(run):
    assert run("-c", SAME) == [[]]


def test_the_machine_code_does_the_work_of_the_tile(reports):
    redundant = set()
    for r in reports:
        where = (r.kernel, r.case, r.arch)
        done = r.cycles["tensor"] * machine_code.TENSOR_FLOPS[r.arch]
        done /= 1 + ("tf32" in r.case)  # TF32 has half the rate
        if done:
            assert r.flops <= done, where
            if r.flops < done:
                redundant.add(r.kernel)
        elif r.flops:  # fp32 lanes, whose instructions may do two operations on sm_100
            lanes = 2 * 32 * r.warps * r.mix["fp32"]
            assert 0.5 * r.flops <= lanes <= 1.2 * r.flops, where
        else:
            assert r.roofline()[0] == "bytes" and r.moved > 0, where
    # A tile with fewer rows than its warps have in one instruction is multiplied more than once. If
    # ptxas unrolls a loop over columns, the report has the loop over tiles around it.
    unrolled = {"linear_distillation_fwd"}
    streams = {"attention_stream_bwd_dkdv", "attention_stream_bwd_dq"}
    assert redundant <= {*streams, "disentangled_attention_bwd_dkdv"} | unrolled
