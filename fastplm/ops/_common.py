"""What the public functions of several ops share."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from fastplm import _extension
from fastplm._backends import warn_unless_forced, why_not_cpu, why_not_nvidia, why_not_triton
from fastplm._checks import check_same_device, check_seed_form, check_tensor
from fastplm.errors import check_choice, fail


def last_dim_contiguous(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy if its last stride is not 1: the one layout that kernels ask for."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def rows_of(tensor: torch.Tensor) -> torch.Tensor:
    """[..., E] -> [N, E], neighbours in a row side by side."""
    rows = tensor.reshape(-1, tensor.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()


@functools.cache
def kernels(op: str) -> ModuleType:
    """``triton_kernels/<op>.py``, imported when a kernel is first called: Triton need not be there.

    An import statement that finds its module still takes a microsecond.
    """
    return importlib.import_module(f"fastplm.triton_kernels.{op}")


def csrc_rejects(
    operator: str, device: str = "CPU", *, fp64: bool = True
) -> Callable[..., str | None]:
    """``rejects`` of "cpp" (``device`` "CPU") or "cuda" ("CUDA"), by the first argument.

    Args:
        operator: of csrc/, which PyTorch dispatches by device.
        device: which of its implementations.
        fp64: whether it takes float64.
    """
    lacks = _extension.lacks(operator, device)

    def rejects(call: Any, *, forced: bool) -> str | None:
        input = call[0]
        if not fp64 and input.dtype is torch.float64:
            return "float64: csrc/ takes fp32, fp16 and bf16"
        if device == "CPU":
            return why_not_cpu(input) or lacks
        if input.device.type != "cuda":
            return f"it runs on CUDA tensors, not {input.device}"
        return warn_unless_forced(why_not_nvidia(input.device) or lacks, forced)

    return rejects


def torch_rejects(call: Any, *, forced: bool) -> str | None:
    """``rejects`` of "torch"."""
    return why_not_cpu(call[0])


def triton_rejects(call: Any, *, forced: bool) -> str | None:
    """``rejects`` of "triton", by the first argument."""
    if call[0].dtype is torch.float64:
        return "float64: the kernels take fp32, fp16 and bf16"
    return why_not_triton(call[0], forced)


def seed_tensor(
    where: str, seed: int | torch.Tensor | None, beside: torch.Tensor, *, optional: bool = False
) -> torch.Tensor:
    """A seed as the operators take it: 0-d int64, on the device of ``beside``.

    A tensor is returned as it is. None, where it is ``optional``, is a new seed from PyTorch's
    generator.
    """
    if seed is None and optional:
        return torch.randint(2**63 - 1, (), device=beside.device)
    if isinstance(seed, torch.Tensor):
        return seed
    check_seed_form(where, seed)
    assert seed is not None
    return torch.full((), seed, dtype=torch.int64, device=beside.device)


def cast_for_autocast(*tensors: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """Cast floating tensors as autocast does for ``nn.Linear``, if autocast is on.

    The first one is never None.
    """
    if not torch._C._is_any_autocast_enabled():
        return tensors
    device = tensors[0].device.type  # type: ignore[union-attr]
    if not (torch._C._is_autocast_available(device) and torch.is_autocast_enabled(device)):
        return tensors
    dtype, cast = torch.get_autocast_dtype(device), list(tensors)
    for at, tensor in enumerate(tensors):
        if tensor is not None and tensor.is_floating_point() and tensor.dtype is not torch.float64:
            cast[at] = tensor.to(dtype)
    return tuple(cast)


def cached_by_settings(function: Callable[..., Any]) -> Callable[..., Any]:
    """Call a function of settings once for each of them: settings hardly ever change.

    Traced code calls the function itself, as does a setting that has no hash.
    """
    cached = functools.lru_cache(maxsize=256, typed=True)(function)

    @functools.wraps(function)
    def call(*settings: Any) -> Any:
        if torch.compiler.is_compiling():
            return function(*settings)
        try:
            return cached(*settings)
        except TypeError:
            return function(*settings)

    return call


def check_reduction(
    where: str, input: torch.Tensor, reduction: str, normalizer: torch.Tensor | None
) -> None:
    """``reduction`` is a known one, and ``normalizer`` a 0-d tensor only with "mean"."""
    check_choice(where, "reduction", reduction, ("mean", "sum", "none"))
    if normalizer is None:
        return
    check_tensor(where, "normalizer", normalizer, ndim=0)
    check_same_device(where, input=input, normalizer=normalizer)
    if reduction != "mean":
        fail(
            where,
            "normalizer",
            f"a tensor with reduction={reduction!r}",
            "None, as only a mean has a denominator",
            "Leave it out, or use reduction='mean'.",
        )
