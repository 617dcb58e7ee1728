"""Makes the modules of benchmarks/ importable, and a harness that measures no ceilings."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
if str(BENCHMARKS) not in sys.path:
    sys.path.insert(0, str(BENCHMARKS))


@pytest.fixture
def harness(monkeypatch):
    """The harness without rows, and with ceilings of 1 GB/s and 1 GFLOP/s."""
    import harness

    monkeypatch.setattr(harness, "SESSION", harness.Session())
    monkeypatch.setattr(harness, "_copy_rate", lambda device: 1e9)
    monkeypatch.setattr(harness, "_product_rate", lambda device, dtype: 1e9)
    return harness
