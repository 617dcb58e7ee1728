"""The emulator runs in another process, as this one has Triton's interpreter switched on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


class Worker:
    """Runs the functions of ``checks.py``; their errors become AssertionErrors."""

    def __init__(self) -> None:
        environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        environment["CUDA_VISIBLE_DEVICES"] = ""
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("checks.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def __call__(self, check: str, /, **arguments):
        self.process.stdin.write(json.dumps([check, arguments]) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        assert answer, f"the emulator's process ended with {self.process.wait()}"
        found, error = json.loads(answer)
        if error:
            pytest.fail(error, pytrace=False)
        return found


@pytest.fixture(scope="session")
def emulate():
    worker = Worker()
    yield worker
    worker.process.kill()
    worker.process.wait()
