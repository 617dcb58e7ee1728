"""What runs where: ``fastplm.explain`` for one call, ``fastplm.info`` for this machine."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Callable
from typing import Any

import torch
from packaging.specifiers import SpecifierSet

from fastplm import _backends, _extension, _measured
from fastplm._registry import OPS

#: The versions between those that the tests have run with (CONTRIBUTING, "Tested versions").
TESTED = {
    "torch": SpecifierSet(">=2.11,<2.16"),
    "triton": SpecifierSet(">=3.6,<3.10"),
    "transformers": SpecifierSet(">=5.17,<5.24"),
}


def explain(model_or_op: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """Run a model or an op once and say which backend ran each of its ops, and why not the others.

    Args:
        model_or_op: anything callable: ``fastplm.ops.attention``, a module, a whole model.
        args, kwargs: what it is called with; it really runs, without gradient.

    Returns:
        One block a distinct call: ``op(arguments) -> backend``, then a line for each backend that
        was passed over, with its reason. A repeated call is counted, not repeated.
    """
    with torch.no_grad(), _backends.record_decisions() as decisions:
        model_or_op(*args, **kwargs)
    counts: dict[str, int] = {}
    for decision in decisions:
        counts[str(decision)] = counts.get(str(decision), 0) + 1
    blocks = [
        text if count == 1 else text.replace("\n", f"  ({count} calls)\n", 1)
        for text, count in counts.items()
    ]
    return "\n".join(blocks) or "no fastplm op was called"


def info() -> str:
    """Versions, devices, and what works on this machine: every op is tried on every backend."""
    lines = [
        f"python {platform.python_version()} on {platform.platform()}",
        *(f"{name} {_version(name)}" for name in ("fastplm", *TESTED)),
    ]
    devices = [torch.device("cpu")]
    for index in range(torch.cuda.device_count()):
        devices.append(torch.device("cuda", index))
        major, minor = torch.cuda.get_device_capability(index)
        lines.append(f"cuda:{index} {torch.cuda.get_device_name(index)}, sm_{major}{minor}")
    table = _measured.table().path
    lines.append(f"vector instructions of csrc/: {_measured.level()}, {_measured.cpu_model()}")
    lines.append(f"the CUDA code of csrc/ {_extension.cuda_code()}")
    lines.append(f"measured speeds: {table or 'none for this CPU, see fastplm measure'}")
    lines.append(f"backend asked for: {_backends.requested('')}")
    width = max(map(len, OPS))
    for device in devices:
        for name, op in OPS.items():
            for backend in _backends.BACKENDS:
                lines.append(f"{device!s:7} {name:{width}} {backend:6} {_try(op, backend, device)}")
    return "\n".join(lines)


def _try(op: Any, backend: str, device: torch.device) -> str:
    if backend not in op.backends:
        return "-   no implementation of this op"
    try:
        with _backends.use_backend(backend, op.name):
            op.smoke(device)
    except _backends.BackendError as error:
        reason = str(error).splitlines()[0].split("): ", 1)[-1]
        return f"no  {reason}"
    # A report on what works must survive whatever does not: the error is its answer.
    except Exception as error:
        return f"BROKEN  {type(error).__name__}: {error}"
    return "ok"


def _version(package: str) -> str:
    try:
        version = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "is not installed"
    tested = TESTED.get(package)
    if tested is None or tested.contains(version, prereleases=True):
        return version
    return f"{version}  NOT TESTED: fastplm's tests have run with {package}{tested}"
