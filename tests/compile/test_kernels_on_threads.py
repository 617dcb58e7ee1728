"""The CUDA kernels of csrc/ on threads of the CPU: they write the right numbers, and in bounds."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.compile

ROOT = Path(__file__).parents[2]
COMPILER = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]


def _build(source, program, *flags):
    # Not optimised: optimising takes more time than it saves.
    command = [COMPILER, "-std=c++20", "-O0", "-g", "-Wall", "-Werror", f"-I{ROOT / 'csrc'}"]
    command += [str(source), "-o", str(program), "-pthread", *flags]
    return subprocess.run(command, capture_output=True, text=True)


def _run(program):
    # The timeout finds a kernel that never ends; all kernels together take seconds.
    return subprocess.run([program], capture_output=True, text=True, timeout=300)


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler on the PATH")
@pytest.mark.parametrize(
    "flags",
    (
        pytest.param([], id="plain", marks=pytest.mark.slow),
        pytest.param(SANITIZERS, id="sanitized"),
    ),
)
def test_kernels_write_what_the_cpu_path_writes(flags, tmp_path):
    if flags:
        trial = tmp_path / "trial.cpp"
        trial.write_text("int main() { return 0; }\n")
        works = _build(trial, tmp_path / "trial", *flags).returncode == 0
        if not works or _run(tmp_path / "trial").returncode != 0:
            pytest.skip("this compiler has no AddressSanitizer that runs here")
    source = ROOT / "tests/compile/kernels_on_threads.cpp"
    built = _build(source, tmp_path / "kernels", *flags)
    assert built.returncode == 0, built.stderr
    result = _run(tmp_path / "kernels")
    assert result.returncode == 0, result.stdout + result.stderr
