"""The compile lane: every Triton kernel becomes machine code for every architecture, with no GPU.

Runs in a process of its own, because this one may have switched Triton's interpreter on.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from fastplm.triton_kernels._compile import ARCHS, Report, kernel_modules, table

pytestmark = pytest.mark.compile


def compile_reports(*flags: str) -> list[Report]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "fastplm.triton_kernels._compile", "--json", *flags]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    reports = [Report(**json.loads(line)) for line in run.stdout.splitlines()]
    assert reports, run.stderr
    return reports


def assert_shippable(reports: list[Report]) -> None:
    bad = [(f"{r.kernel} [{r.case}] sm_{r.arch}", r.problems()) for r in reports if r.problems()]
    assert not bad


@pytest.fixture(scope="module")
def reports() -> list[Report]:
    return compile_reports()


def test_every_kernel_compiles_for_every_architecture(reports, capsys):
    with capsys.disabled():
        print("\n" + table(reports))
    compiled = {(report.op, report.arch) for report in reports}
    assert compiled == {(op, arch) for op in kernel_modules() for arch in ARCHS}


def test_no_spills_shared_memory_fits_and_hopper_matmuls_use_hgmma(reports):
    assert_shippable(reports)


@pytest.mark.slow
def test_the_long_list_of_configurations():
    assert_shippable(compile_reports("--all"))


def test_the_gate_sees_a_spill(tmp_path, monkeypatch):
    """A kernel planted with far too large a tile must be reported, or the gate proves nothing."""
    script = (
        "import torch\n"
        "from fastplm.triton_kernels import _compile, attention\n"
        "attention._CONFIGS[90, True, 64] = ((256, 256, 4, 1),) * 3\n"
        "reports = _compile.compile_op('attention', 90)\n"
        "print([p for r in reports if 'bfloat16 D=64' in r.case for p in r.problems()])\n"
    )
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    assert "register spills" in run.stdout
