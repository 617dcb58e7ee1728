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


def test_another_pythons_triton_gives_other_keys(tmp_path):
    """The releases have the same files but for Triton's library."""
    code = """
import shutil, sys
from pathlib import Path
import compile_cache, triton
from triton.runtime import cache
own, other = Path(triton.__file__).parent, Path(sys.argv[1])
(other / "runtime").mkdir(parents=True)
assert compile_cache.key_of(own) == cache.triton_key()
for name in ("compiler", "backends", "language"):
    (other / name).symlink_to(own / name)
(other / "runtime" / "cache.py").symlink_to(own / "runtime" / "cache.py")
(other / "_C").mkdir()
(other / "_C" / "libtriton.so").write_bytes(b"of another Python")
parts = [key.split("-") for key in (cache.triton_key(), compile_cache.key_of(other))]
print(sum(a != b for a, b in zip(*parts, strict=True)))
"""
    command = [sys.executable, "-c", code, str(tmp_path / "triton")]
    done = subprocess.run(command, cwd=SCRIPT.parent, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "1"
