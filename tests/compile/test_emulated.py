"""csrc/*/<op>.h on CPUs that this machine need not have: QEMU runs the programs of test_csrc_asan
and others on Arm with NEON, and on x86 without AVX, where an AVX instruction ends the program."""

from __future__ import annotations

import shutil
import signal
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.compile

ROOT = Path(__file__).parents[2]
SOURCES = sorted(ROOT.glob("tests/compile/*_asan.cpp")) + [ROOT / "tests/compile/row_groups.cpp"]
# Compiler, emulator and the emulated CPU.
CPUS = {
    "arm": ("aarch64-linux-gnu-g++", "qemu-aarch64-static", "neoverse-n1"),
    "sse": ("x86_64-linux-gnu-g++", "qemu-x86_64-static", "Nehalem"),
}
# On x86 without AVX only programs with vector code differ from those of other levels.
CASES = [
    pytest.param(source, cpu, id=f"{source.stem}-{cpu}")
    for source in SOURCES
    for cpu in CPUS
    if cpu == "arm" or "one_level.h" in source.read_text()
]


def build(cpu: str, source: Path, program: Path) -> list[str | Path]:
    """The command that runs the program on the CPU."""
    compiler, emulator, model = CPUS[cpu]
    for tool in (compiler, emulator):
        if shutil.which(tool) is None:
            pytest.skip(f"no {tool} on the PATH")
    command = [compiler, "-std=c++17", "-O1", "-Wno-psabi", "-static", "-pthread"]
    command += [f"-I{ROOT / 'csrc'}", str(source), "-o", str(program)]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return [emulator, "-cpu", model, program]


@pytest.mark.parametrize(("source", "cpu"), CASES)
def test_it_is_right(source, cpu, tmp_path):
    command = build(cpu, source, tmp_path / source.stem)
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr


def test_an_instruction_of_a_higher_level_is_seen(tmp_path):
    """The emulated CPU must refuse AVX, or the tests on it prove nothing."""
    source = tmp_path / "avx.cpp"
    source.write_text('int main() { __asm__ volatile("vzeroupper"); }')
    command = build("sse", source, tmp_path / "avx")
    assert subprocess.run(command, capture_output=True).returncode == -signal.SIGILL
