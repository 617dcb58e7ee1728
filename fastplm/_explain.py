"""What runs where: ``fastplm.explain`` for one call, ``fastplm.info`` for this machine."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from packaging.specifiers import SpecifierSet

import fastplm.ops  # fills OPS
from fastplm import _backends, _extension, _machine, _rules
from fastplm._registry import OPS
from fastplm.errors import BackendError

#: The versions between those that the tests have run with (CONTRIBUTING, "Tested versions").
TESTED = {
    "torch": SpecifierSet(">=2.11,<2.16"),
    "triton": SpecifierSet(">=3.6,<3.10"),
    "transformers": SpecifierSet(">=5.17,<5.25"),
}


def explain(model_or_op: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """Run a model or an op once and say which backend ran each of its ops, and why not the others.

    Args:
        model_or_op: anything callable: ``fastplm.ops.attention``, a module, a whole model.
        args, kwargs: what it is called with; it really runs, without gradient.

    Returns:
        If a drop-in model runs, the text begins with what it computes of this batch: how many
        rows, whether padding is among them and why, the rows of its head, and whose attention.
        Then each distinct call has a block: ``op(arguments) -> backend``, then a line for each
        backend that was passed over, with its reason. A repeated call is counted, not repeated.
    """
    with (
        torch.no_grad(),
        _backends.record_decisions() as decisions,
        _backends.record_notes() as notes,
    ):
        model_or_op(*args, **kwargs)
    blocks = []
    for text, count in Counter([*notes, *map(str, decisions)]).items():
        first, *others = text.splitlines()
        blocks += [first if count == 1 else f"{first}  ({count} calls)", *others]
    return "\n".join(blocks) or "no fastplm op was called"


def info(*, all: bool = False) -> str:
    """What works on this machine, found by trying it, in 15 lines or so.

    Args:
        all: the result of each op on each backend and device instead, with the reason where it does
            not run.
    """
    return "\n".join(_table() if all else _overview())


def _overview() -> list[str]:
    names = [f"fastplm {fastplm.__version__}", *(f"{name} {_version(name)}" for name in TESTED)]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    bf16 = _machine.hardware_has_bf16()
    lines = [
        *names[:1],
        f"python {platform.python_version()} on {platform.platform()}",
        *names[1:],
        f"CPU: {_machine.cpu_model()}; csrc/ uses {_machine.level()}",
        f"threads: {torch.get_num_threads()} on {cores} cores",
        *(_gpu(index) for index in range(torch.cuda.device_count())),
        f"precision 'auto' is {'bf16' if bf16 else 'fp32'}: the "
        f"{'GPU' if torch.cuda.is_available() else 'CPU'} "
        f"{'multiplies' if bf16 else 'does not multiply'} bf16 in hardware",
        f"backend: {_backends.requested('')}, by trying every op on {_device()}",
    ]
    lines += [f"  {name:6} {_sum_up(name)}" for name in _backends.BACKENDS]
    missing = _missing()
    return lines + [f"not there: {text}" for text in missing] + ["op by op: fastplm info --all"]


def _sum_up(backend: str) -> str:
    """In how many ops a backend works, and where it does not."""
    ops = [op for op in OPS.values() if backend in op.backends]
    said = {op.name: _try(op, backend, _device()) for op in ops}
    works = sum(text == "ok" for text in said.values())
    broken = [f"{name} {text}" for name, text in said.items() if text.startswith("BROKEN")]
    refused = dict.fromkeys(
        text[4:].rstrip(".") for text in said.values() if text.startswith("no ")
    )
    return "; ".join([f"{works} of its {len(ops)} ops", *broken, *refused])


def _missing() -> list[str]:
    """What could be there, and how to get it."""
    lines = []
    if reason := _extension.lacks("gather_rows", "CPU"):
        lines.append(f"csrc/: {reason}. With a C++ compiler: pip install --no-build-isolation .")
    if not torch.cuda.is_available():
        for_gpus = torch.version.cuda or torch.version.hip
        why = "finds none" if for_gpus else "is for CPUs alone. With CUDA: pip install torch"
        lines.append(f"a GPU: this PyTorch {why}")
    elif reason := _extension.lacks("mask_tokens", "CUDA"):
        lines.append(f"CUDA code: {reason}. With nvcc: pip install --no-build-isolation .")
    if not _backends.triton_installed():
        lines.append("triton, the kernels for GPUs: pip install triton")
    if _machine.level() not in _rules.LEVELS:
        lines.append("rules for this CPU, so PyTorch's functions run where they can")
    return lines


def _device() -> torch.device:
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def _gpu(index: int) -> str:
    major, minor = torch.cuda.get_device_capability(index)
    return f"cuda:{index} {torch.cuda.get_device_name(index)}, sm_{major}{minor}"


def _table() -> list[str]:
    count = torch.cuda.device_count()
    devices = [torch.device("cpu"), *(torch.device("cuda", index) for index in range(count))]
    lines = [
        f"python {platform.python_version()} on {platform.platform()}",
        f"fastplm {fastplm.__version__}",
        *(f"{name} {_version(name)}" for name in TESTED),
        *(_gpu(index) for index in range(count)),
        f"vector instructions of csrc/: {_machine.level()}, {_machine.cpu_model()}",
        f"the CUDA code of csrc/ {_extension.cuda_code()}",
        f"rules for a CPU of the kind: {_machine.cpu_kind()}",
        f"backend asked for: {_backends.requested('')}",
    ]
    width = max(map(len, OPS))
    for device in devices:
        for name, op in OPS.items():
            for backend in _backends.BACKENDS:
                lines.append(f"{device!s:7} {name:{width}} {backend:6} {_try(op, backend, device)}")
    return lines


def _try(op: Any, backend: str, device: torch.device) -> str:
    if backend not in op.backends:
        return "-   no implementation of this op"
    try:
        with _backends.use_backend(backend, op.name):
            op.smoke(device)
    except BackendError as error:
        return f"no  {error.reason}."
    # A report on what works must survive whatever does not: the error is its answer.
    except Exception as error:
        return f"BROKEN  {type(error).__name__}: {error}"
    return "ok"


def _version(package: str) -> str:
    try:
        version = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "is not installed"
    if TESTED[package].contains(version, prereleases=True):
        return version
    return f"{version}  NOT TESTED: fastplm's tests have run with {package}{TESTED[package]}"
