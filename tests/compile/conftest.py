"""Kernels are compiled in another process, as this one may have TRITON_INTERPRET set."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def _run(*arguments: str) -> list:
    """Runs a Python script; returns the JSON values that it prints, one a line."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    folders = [str(ROOT / "tools"), str(ROOT / "benchmarks"), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, folders))
    command = [sys.executable, *arguments]
    run = subprocess.run(command, env=environment, capture_output=True, cwd=ROOT)
    assert run.returncode in (0, 1) and run.stdout, run.stderr.decode()
    return [json.loads(line) for line in run.stdout.splitlines()]


def _run_reports(*arguments: str):
    from compile_kernels import Report

    return [Report(**report) for report in _run(*arguments)]


@pytest.fixture(scope="session")
def run():
    return _run


@pytest.fixture(scope="session")
def run_reports():
    return _run_reports


@pytest.fixture(scope="session")
def reports(tmp_path_factory):
    """The reports of every kernel. If pytest has several workers, one compiles for all of them."""
    from compile_kernels import Report

    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    kept = folder / "reports.json"
    with Path(folder, "reports.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not kept.exists():
            kept.write_text(json.dumps(_run("tools/compile_kernels.py", "--json")))
    return [Report(**report) for report in json.loads(kept.read_text())]
