"""csrc/ without a GPU: machine code without spills, and row algorithms on many threads."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from torch.utils.cpp_extension import include_paths

pytestmark = pytest.mark.compile

ROOT = Path(__file__).parents[2]
NVCC = shutil.which("nvcc")
COMPILER = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
STABLE_ABI = re.search(r"-DTORCH_TARGET_VERSION=\w+", (ROOT / "setup.py").read_text())[0]

_ENTRY = re.compile(r"Compiling entry function '(?P<name>\w+)'")
_SPILLS = re.compile(r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores")
_USED = re.compile(r"Used (?P<registers>\d+) registers.*?(?P<shared>\d+) bytes smem")


@pytest.mark.skipif(NVCC is None, reason="no nvcc on the PATH: csrc/index/cuda.cu is not compiled")
# No kernel depends on the architecture (__CUDA_ARCH__), so one architecture tests nearly all.
@pytest.mark.parametrize(
    "arch", [90, *(pytest.param(a, marks=pytest.mark.slow) for a in (80, 100))]
)
def test_kernels_compile_without_spills(arch, tmp_path, capsys):
    known = subprocess.run([NVCC, "--list-gpu-arch"], capture_output=True, text=True).stdout
    if f"compute_{arch}" not in known.split():
        pytest.skip(f"this nvcc does not know sm_{arch}")
    includes = [f"-isystem={path}" for path in include_paths()]
    # The host code is the same for all architectures, so it is compiled once.
    kind = "-c" if arch == 90 else "-cubin"
    command = [NVCC, "-std=c++20", "-O3", f"-arch=sm_{arch}", kind, "-Xptxas", "-v", "-DUSE_CUDA"]
    command += [STABLE_ABI, f"-I{ROOT / 'csrc'}", *includes, str(ROOT / "csrc/index/cuda.cu")]
    command += ["-o", tmp_path / "out.o"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr

    kernels = (ROOT / "csrc/index/kernels.cuh").read_text()
    compiled = dict.fromkeys(re.findall(r"(\w+_kernel)\(", kernels), 0)
    lines = iter((result.stdout + result.stderr).splitlines())
    for line in lines:
        entry = _ENTRY.search(line)
        if entry is None:
            continue
        kernel = next(name for name in compiled if name in entry["name"])
        compiled[kernel] += 1
        next(lines)
        spills, used = _SPILLS.search(next(lines)), _USED.search(next(lines))
        with capsys.disabled():
            print(
                f"\n{kernel} sm_{arch}: {used['registers']} registers, "
                f"{spills['stores']} bytes spilled, {used['shared']} bytes shared",
                end="",
            )
        assert spills["stack"] == spills["stores"] == "0", f"{entry['name']} spills"
        assert int(used["shared"]) <= 48 * 1024
    # int32 and int64 tokens
    assert compiled and set(compiled.values()) == {2}, compiled


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler on the PATH")
@pytest.mark.parametrize(
    "sanitizer", ("thread", pytest.param("address,undefined", marks=pytest.mark.slow))
)
def test_a_group_of_threads_does_what_one_does(sanitizer, tmp_path):
    program = tmp_path / "row_groups"
    source = ROOT / "tests/compile/row_groups.cpp"
    build = [COMPILER, "-std=c++17", "-O1", "-g", "-Wall", "-Werror", f"-I{ROOT / 'csrc'}"]
    build += [str(source), "-o", str(program), "-pthread"]
    # Not every compiler ships the sanitizers, and not every kernel lets them map their memory.
    flags = [f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all"]
    missing = subprocess.run([*build, *flags], capture_output=True, text=True).stderr
    if missing:
        subprocess.run(build, check=True)
    # A missing barrier may also hang; the whole program takes only seconds.
    result = subprocess.run([program], capture_output=True, text=True, timeout=300)
    if "unexpected memory mapping" in result.stderr:
        missing = result.stderr
        subprocess.run(build, check=True)
        result = subprocess.run([program], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    if missing:
        pytest.skip(f"right, but looked at without a sanitizer: {missing.splitlines()[0]}")
