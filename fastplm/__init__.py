"""fastplm: BERT-era language models, fast and correct. See the README for a first example."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastplm import ops
    from fastplm._backends import use_backend
    from fastplm._explain import explain, info
    from fastplm._machine import keep_memory
    from fastplm.errors import FastplmError
    from fastplm.models._accelerate import accelerate, restore
    from fastplm.models._freeze import freeze
    from fastplm.models._quantize import dequantize, quantize

__version__ = "0.1.0"
__all__ = [
    "FastplmError",
    "accelerate",
    "dequantize",
    "explain",
    "freeze",
    "info",
    "keep_memory",
    "ops",
    "quantize",
    "restore",
    "use_backend",
    "__version__",
]

_MODULES = {
    "FastplmError": "errors",
    "accelerate": "models._accelerate",
    "dequantize": "models._quantize",
    "explain": "_explain",
    "freeze": "models._freeze",
    "info": "_explain",
    "keep_memory": "_machine",
    "quantize": "models._quantize",
    "restore": "models._accelerate",
    "use_backend": "_backends",
}


def __getattr__(name: str) -> Any:
    # PyTorch takes seconds to import, and `fastplm --help` needs none of it.
    if name == "ops":
        return importlib.import_module("fastplm.ops")
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value  # what is there from now on is no matter of this function
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
