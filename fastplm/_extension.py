"""The compiled part of fastplm, ``csrc/``: loaded if it was built, its absence explained if not.

The library registers operators under ``torch.ops.fastplm_C`` and holds no Python symbol, so it is
loaded rather than imported.
"""

from __future__ import annotations

from pathlib import Path

import torch


def _load() -> str | None:
    libraries = [
        path for path in Path(__file__).parent.glob("_C.*") if path.suffix in (".so", ".pyd")
    ]
    if not libraries:
        return "the extension was not built (pip install -v says why)"
    try:
        torch.ops.load_library(str(libraries[0]))
    except OSError as error:
        return f"the extension cannot be loaded: {error}"
    return None


_MISSING = _load()


def lacks(operator: str, dispatch_key: str) -> str | None:
    """Why ``fastplm_C::<operator>`` cannot run on "CPU" or "CUDA"; None if it can.

    Ask when a module is imported: torch.compile cannot trace this.
    """
    if _MISSING is not None:
        return _MISSING
    name = f"fastplm_C::{operator}"
    if not torch._C._dispatch_has_kernel(name):
        return f"the extension has no {operator}: it is of other sources, install fastplm again"
    if torch._C._dispatch_has_kernel_for_dispatch_key(name, dispatch_key):
        return None
    return f"the extension was built without {dispatch_key}"
