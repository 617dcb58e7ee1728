"""Argument checks: every error names the argument, what it got, what was expected and the fix.

The public function of an op and its fake kernel call the same ``check_*`` helpers, so a wrong call
fails with the same words in eager mode, under ``torch.compile`` and on a meta tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from fastplm.errors import (  # noqa: F401 (checks and errors are taken from here alike)
    ArgumentTypeError,
    ArgumentValueError,
    BackendError,
    DataError,
    FastplmError,
    UnsupportedError,
    check,
    check_choice,
    message,
)


def check_tensor(where: str, argument: str, value: object, *, ndim: int | None = None) -> None:
    """``value`` is a tensor, of ``ndim`` dimensions where that is given."""
    if not isinstance(value, torch.Tensor):
        raise ArgumentTypeError(
            message(
                where, argument, f"a {type(value).__name__}", "a torch.Tensor", "Pass a tensor."
            )
        )
    if ndim is not None and value.dim() != ndim:
        raise ArgumentValueError(
            message(
                where,
                argument,
                f"{value.dim()} dimensions {tuple(value.shape)}",
                f"{ndim} dimensions",
                "Reshape it first.",
            )
        )


def check_shape(
    where: str, argument: str, value: torch.Tensor, shape: Sequence[int], names: str, fix: str = ""
) -> None:
    """``value.shape == shape``; ``names`` spells the dimensions, e.g. ``"[batch, key length]"``."""
    if tuple(value.shape) != tuple(shape):
        raise ArgumentValueError(
            message(
                where,
                argument,
                f"shape {tuple(value.shape)}",
                f"{names} = {tuple(shape)}",
                fix or "Check the layout of the tensors of this call.",
            )
        )


def check_dtype(
    where: str,
    argument: str,
    value: torch.Tensor,
    dtypes: Sequence[torch.dtype],
    fix: str = "Convert it with .to(dtype).",
) -> None:
    """``value.dtype`` is one of ``dtypes``."""
    if value.dtype not in dtypes:
        expected = " or ".join(str(dtype) for dtype in dtypes)
        raise ArgumentTypeError(message(where, argument, value.dtype, expected, fix))


def check_same(where: str, **tensors: torch.Tensor | None) -> None:
    """All tensors given share the dtype and device of the first one."""
    _check_alike(where, tensors, dtype=True)


def check_same_device(where: str, **tensors: torch.Tensor | None) -> None:
    """All tensors given lie on the device of the first one."""
    _check_alike(where, tensors, dtype=False)


def _check_alike(where: str, tensors: Mapping[str, torch.Tensor | None], *, dtype: bool) -> None:
    first_name, first = "", None
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if first is None:
            first_name, first = name, tensor
            first_dtype, first_device = first.dtype, first.device
        elif dtype and tensor.dtype != first_dtype:
            raise ArgumentTypeError(
                message(
                    where,
                    name,
                    tensor.dtype,
                    f"{first_dtype}, the dtype of `{first_name}`",
                    f"Convert one of the two, e.g. {name}.to({first_name}.dtype).",
                )
            )
        elif tensor.device != first_device:
            raise ArgumentValueError(
                message(
                    where,
                    name,
                    f"device {tensor.device}",
                    f"{first_device}, the device of `{first_name}`",
                    f"Move it with {name}.to({first_name}.device).",
                )
            )


FLOATING = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
INTEGER = (torch.int64, torch.int32)
