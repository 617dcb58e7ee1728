"""fastplm: BERT-era language models, fast and correct. See the README for a first example."""

from __future__ import annotations

from fastplm import ops
from fastplm._accelerate import accelerate, restore
from fastplm._backends import use_backend
from fastplm._checks import FastplmError
from fastplm._explain import explain, info

__version__ = "0.1.0"
__all__ = [
    "FastplmError",
    "accelerate",
    "explain",
    "info",
    "ops",
    "restore",
    "use_backend",
    "__version__",
]
