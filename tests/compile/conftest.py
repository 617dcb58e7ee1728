"""The compilations that several files of this lane look at, made once for all of them."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


def _run_reports(*arguments: str):
    """The reports that a Python prints as JSON lines, in a process without the interpreter."""
    from fastplm.triton_kernels._compile import Report

    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, *arguments]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    reports = [Report(**json.loads(line)) for line in run.stdout.splitlines()]
    assert reports, run.stderr
    return reports


@pytest.fixture(scope="session")
def run_reports():
    return _run_reports


@pytest.fixture(scope="session")
def reports(tmp_path_factory):
    """Of every kernel; where pytest has several workers, one compiles and the others wait."""
    from fastplm.triton_kernels._compile import Report

    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    kept = folder / "reports.json"
    with Path(folder, "reports.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not kept.exists():
            found = _run_reports("-m", "fastplm.triton_kernels._compile", "--json")
            kept.write_text(json.dumps([vars(report) for report in found]))
    return [Report(**report) for report in json.loads(kept.read_text())]
