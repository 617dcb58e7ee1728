"""The compiled part of fastplm, ``csrc/``: loaded if it was built, its absence explained if not.

It is two libraries: ``_C`` for CPUs, with the schema of every operator, and ``_C_cuda`` for CUDA
tensors. They register operators under ``torch.ops.fastplm_C`` and hold no Python symbol, so they
are loaded rather than imported.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch


def _load(name: str, torch_lacks: str | None = None) -> str | None:
    """Why a library is not there, None if it is; it stays unloaded if torch lacks its device."""
    libraries = [
        path for path in Path(__file__).parent.glob(f"{name}.*") if path.suffix in (".so", ".pyd")
    ]
    if not libraries:
        return "was not built (pip install -v says why)"
    if torch_lacks is not None:
        return f"is not loaded: this torch has no {torch_lacks}"
    try:
        torch.ops.load_library(str(libraries[0]))
    except OSError as error:
        return f"cannot be loaded: {error.__cause__ or error}"
    return None


def _load_cuda() -> str | None:
    if torch.version.cuda is None:
        return _load("_C_cuda", torch_lacks="CUDA")
    reason = _load("_C_cuda")
    if reason is None:
        reason = _driver_is_older(torch.ops.fastplm_C.cuda_version(), torch.version.cuda)
    return reason


def _driver_is_older(built: int, torch_cuda: str) -> str | None:
    """Whether the driver is too old for the CUDA runtime inside our library, 13000 for CUDA 13.0.

    Within a major version any driver serves any runtime, and a torch that works has such a driver.
    With a torch of an older CUDA the driver may be older, too. Its version is read without
    starting it.
    """
    major, torch_major = built // 1000, int(torch_cuda.split(".")[0])
    if torch_major >= major:
        return None
    version = ctypes.c_int(0)
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return f"is of CUDA {major}, newer than torch's {torch_cuda}, and there is no driver"
    if version.value // 1000 >= major:
        return None
    return (
        f"is of CUDA {major}, and the driver of {version.value // 1000}: update the driver, or "
        f"install fastplm again with an nvcc of CUDA {torch_major}"
    )


_MISSING = _load("_C")
_CUDA_MISSING = _MISSING or _load_cuda()


def cuda_code() -> str:
    """What became of the CUDA code, as the end of a sentence about it."""
    if _CUDA_MISSING is not None:
        return _CUDA_MISSING
    version = torch.ops.fastplm_C.cuda_version()
    return f"is loaded, built with CUDA {version // 1000}.{version % 1000 // 10}"


def lacks(operator: str, dispatch_key: str) -> str | None:
    """Why ``fastplm_C::<operator>`` cannot run on "CPU" or "CUDA"; None if it can.

    Ask when a module is imported: torch.compile cannot trace this.
    """
    if _MISSING is not None:
        return f"the extension {_MISSING}"
    name = f"fastplm_C::{operator}"
    if not torch._C._dispatch_has_kernel(name):
        return f"the extension has no {operator}: it is of other sources, install fastplm again"
    if dispatch_key == "CUDA" and _CUDA_MISSING is not None:
        return f"the CUDA code {_CUDA_MISSING}"
    if torch._C._dispatch_has_kernel_for_dispatch_key(name, dispatch_key):
        return None
    return f"the extension has no {operator} for {dispatch_key}"
