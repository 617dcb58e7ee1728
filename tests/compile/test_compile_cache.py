"""The compile cache that is filled without a GPU: a second run compiles nothing."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.compile

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "compile_cache.py"


def fill(folder: Path, arch: int, *steps: str) -> dict[str, tuple[int, int]]:
    """By step, the number of its kernels and of those that were compiled."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, SCRIPT, folder, "--arch", arch, "--jobs", 1, *steps]
    done = subprocess.run(
        list(map(str, command)), env=environment, capture_output=True, text=True, check=True
    )
    found = re.findall(r"(\w+): (\d+) kernels, (\d+) compiled", done.stdout)
    return {step: (int(asked), int(made)) for step, asked, made in found}


def test_a_cache_that_was_filled_and_moved_is_hit(tmp_path):
    there, here = tmp_path / "there", tmp_path / "here"
    asked, made = fill(there, 90, "gather_rows")["gather_rows"]
    assert asked == made > 0
    left = {path.suffix for path in there.glob("*/*")}
    assert left == {".cubin", ".json"}
    there.rename(here)
    assert fill(here, 90, "gather_rows") == {"gather_rows": (asked, 0)}
    for group in here.glob("*/__grp__*.json"):
        assert all(Path(p).exists() for p in json.loads(group.read_text())["child_paths"].values())
