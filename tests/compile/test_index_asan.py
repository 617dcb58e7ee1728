"""csrc/index.h reads files that others may have spoilt: AddressSanitizer looks on."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.compile

ROOT = Path(__file__).parents[2]
COMPILER = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler on the PATH")
def test_the_index_builder_stays_within_its_arrays(tmp_path):
    program = tmp_path / "index_asan"
    source = ROOT / "tests/compile/index_asan.cpp"
    build = [COMPILER, "-std=c++17", "-O1", "-g", "-Wall", "-Werror", f"-I{ROOT / 'csrc'}"]
    build += [str(source), "-o", str(program)]
    sanitizers = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    sanitized = subprocess.run([*build, *sanitizers], capture_output=True, text=True)
    if sanitized.returncode != 0:  # not every compiler ships the libraries of its sanitizers
        plain = subprocess.run(build, capture_output=True, text=True)
        assert plain.returncode == 0, plain.stderr
    result = subprocess.run([program], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    if sanitized.returncode != 0:
        pytest.skip("it passed without AddressSanitizer, which this compiler does not have")
