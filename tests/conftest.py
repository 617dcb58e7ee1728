"""Lanes and devices of the test suite.

Without a GPU the Triton kernels run under Triton's interpreter, which must be switched on before a
kernel module is imported; with one they are compiled and run on it, so the same tests serve both.
"""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_collection_modifyitems(config, items):
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="gpu lane: no CUDA device on this machine")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


def _devices():
    yield pytest.param("cpu", id="cpu")
    yield pytest.param("cuda", id="cuda", marks=pytest.mark.gpu)


@pytest.fixture(params=_devices())
def device(request) -> torch.device:
    """CPU tensors in the interpreter lane, CUDA tensors in the gpu lane."""
    return torch.device(request.param)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)
