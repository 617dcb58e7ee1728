"""A graph that Inductor cached for AVX-512 is not used where there is AVX2 alone."""

import os
import subprocess
import sys

import pytest
import torch

SCRIPT = """
import torch

def function(x):
    return torch.sin(x) * 2 + 1

x = torch.linspace(-3, 3, 1000)
torch.testing.assert_close(torch.compile(function)(x), function(x))
"""


@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() != "AVX512", reason="the CPU has one level to test"
)
def test_two_levels_with_one_cache(tmp_path):
    for level in ("avx512", "avx2"):
        settings = {"ATEN_CPU_CAPABILITY": level, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
        command = [sys.executable, "-c", SCRIPT]
        done = subprocess.run(
            command, env={**os.environ, **settings}, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{level}: {done.stderr[-2000:]}"
