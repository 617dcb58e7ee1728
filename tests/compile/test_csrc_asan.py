"""csrc/*/<op>.h at each level of vector instructions, once with sanitizers; index.h, too.

The library has the code of all levels, but a machine runs only one.
"""

from __future__ import annotations

import itertools
import shutil
import subprocess
from pathlib import Path

import pytest

from fastplm import _machine

pytestmark = pytest.mark.compile

ROOT = Path(__file__).parents[2]
COMPILER = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
CPUINFO = Path("/proc/cpuinfo")
WIDTHS = {
    "default": ("", ()),
    "avx2": ("avx2", ("-march=x86-64-v3",)),
    "avx512": ("avx512bw", ("-march=x86-64-v4",)),
}


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler on the PATH")
@pytest.mark.parametrize(
    ("op", "width"),
    [
        # tests/ops tests csrc/ at this process's own level, so that level is in the slow lane here.
        *(
            pytest.param(op, width, marks=pytest.mark.slow if width == _machine.level() else ())
            for op, width in itertools.product(
                (
                    *("attention", "bias_gelu", "dropout", "dropout_add_layer_norm", "gelu"),
                    *("linear", "linear_int8", "replaced_token_loss", "rms_norm", "rotary"),
                ),
                ("default", "avx2", "avx512"),
            )
        ),
        ("index", "default"),  # reads files that other programs may have damaged
    ],
)
def test_it_stays_within_its_arrays_and_is_right(op, width, tmp_path):
    feature, flags = WIDTHS[width]
    if feature and (not CPUINFO.exists() or feature not in CPUINFO.read_text().split()):
        pytest.skip(f"this CPU has no {feature}")
    flags = (*flags, "-Werror") if op == "index" else flags
    program = tmp_path / f"{op}_asan"
    source = ROOT / f"tests/compile/{op}_asan.cpp"
    build = [
        COMPILER,
        "-std=c++17",
        "-O1",
        "-Wall",
        "-Werror",
        "-Wno-psabi",
        f"-I{ROOT / 'csrc'}",
        *flags,
    ]
    build += [str(source), "-o", str(program)]
    sanitizers = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    # One width is enough for sanitizers: the accesses are the same, and compiling takes long.
    options = sanitizers if width == "default" else []
    built = subprocess.run([*build, *options], capture_output=True, text=True)
    if built.returncode != 0 and options:  # not every compiler ships the sanitizers' libraries
        plain = subprocess.run(build, capture_output=True, text=True)
        assert plain.returncode == 0, plain.stderr
    else:
        assert built.returncode == 0, built.stderr
    result = subprocess.run([program], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    if built.returncode != 0:
        pytest.skip("it passed without sanitizers, which this compiler does not have")
