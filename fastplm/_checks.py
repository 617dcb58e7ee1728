"""Argument checks: every error names the argument, what it got, what was expected and the fix.

The public function of an op and its fake kernel call the same ``check_*`` helpers, so a wrong call
fails with the same words in eager mode, under ``torch.compile`` and on a meta tensor.
"""

from __future__ import annotations

import numbers
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import guard_or_true

from fastplm.errors import ArgumentTypeError, ArgumentValueError, fail, shown

_STRIDED = torch.strided
FLOATING = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
INTEGER = (torch.int64, torch.int32)
#: No float is as large.
_HUGE = 1 << 1024
_LAYOUT_FIX = "Check the layout of the tensors of this call."


def read(*numbers: Tensor) -> list[int]:
    """The values of 0-d tensors, in one wait for their device: the only one of a forward."""
    if len(numbers) == 1:
        return [int(numbers[0])]
    return torch.stack(numbers).tolist()


def check_tensor(where: str, argument: str, value: object, *, ndim: int | None = None) -> None:
    """``value`` is a dense tensor, of ``ndim`` dimensions where that is given."""
    if not isinstance(value, Tensor):
        got = f"a {type(value).__name__}"
        fail(where, argument, got, "a torch.Tensor", "Pass a tensor.", ArgumentTypeError)
    if value.layout is not _STRIDED or value.is_nested:
        got, fix = f"a tensor of layout {value.layout}", "Call .to_dense()."
        if value.is_nested:
            got, fix = "a nested tensor", "Pad it (.to_padded_tensor), or pass its values packed."
        fail(where, argument, got, "a dense torch.Tensor", fix, ArgumentTypeError)
    if ndim is not None and value.dim() != ndim:
        got = f"{value.dim()} dimensions {tuple(value.shape)}"
        fail(where, argument, got, f"{ndim} dimensions", "Reshape it first.")


def check_tensors(where: str, ndim: int, **tensors: object) -> None:
    """The same of several, in less time than a call of ``check_tensor`` each."""
    for name, value in tensors.items():
        if not (
            isinstance(value, Tensor)
            and value.dim() == ndim
            and value.layout is _STRIDED
            and not value.is_nested
        ):
            check_tensor(where, name, value, ndim=ndim)


def same_size(first: int, second: int) -> bool:
    """Whether two sizes are equal. If a size depends on the values of a tensor, as that of
    ``rows[mask]`` does, a traced graph asserts that it is."""
    if not guard_or_true(first == second):
        return False
    if torch.compiler.is_compiling():
        torch._check(first == second)
    return True


def same_sizes(first: Sequence[int], second: Sequence[int]) -> bool:
    """The same of all sizes of two shapes."""
    if not torch.compiler.is_compiling():
        return tuple(first) == tuple(second)
    return len(first) == len(second) and all(map(same_size, first, second))


def check_shape(
    where: str, argument: str, value: Tensor, shape: Sequence[int], names: str, fix: str = ""
) -> None:
    """``value.shape == shape``; ``names`` spells the dimensions, e.g. ``"[batch, key length]"``."""
    if not same_sizes(value.shape, shape):
        got, expected = f"shape {tuple(value.shape)}", f"{names} = {tuple(shape)}"
        fail(where, argument, got, expected, fix or _LAYOUT_FIX)


def check_dtype(
    where: str,
    argument: str,
    value: Tensor,
    dtypes: Sequence[torch.dtype],
    fix: str = "Convert it with .to(dtype).",
) -> None:
    """``value.dtype`` is one of ``dtypes``."""
    if value.dtype not in dtypes:
        expected = " or ".join(str(dtype) for dtype in dtypes)
        fail(where, argument, value.dtype, expected, fix, ArgumentTypeError)


def check_same(where: str, **tensors: Tensor | None) -> None:
    """All tensors given share the dtype and device of the first one."""
    (first_name, first), *others = [(name, one) for name, one in tensors.items() if one is not None]
    for name, tensor in others:
        if tensor.dtype != first.dtype:
            expected = f"{first.dtype}, the dtype of `{first_name}`"
            fix = f"Convert one of the two, e.g. {name}.to({first_name}.dtype)."
            fail(where, name, tensor.dtype, expected, fix, ArgumentTypeError)
    check_same_device(where, **tensors)


def check_same_device(where: str, **tensors: Tensor | None) -> None:
    """All tensors given lie on the device of the first one."""
    (first_name, first), *others = [(name, one) for name, one in tensors.items() if one is not None]
    for name, tensor in others:
        if tensor.device != first.device:
            expected = f"{first.device}, the device of `{first_name}`"
            fix = f"Move it with {name}.to({first_name}.device)."
            fail(where, name, f"device {tensor.device}", expected, fix)


def check_int(where: str, argument: str, value: int, low: int, high: int, fix: str) -> None:
    """An int in ``[low, high)``."""
    is_int = isinstance(value, int) and not isinstance(value, bool)
    if not is_int or not low <= value < high:
        got, expected = value if is_int else shown(value), f"an int from {low} to {high - 1}"
        error = ArgumentValueError if is_int else ArgumentTypeError
        fail(where, argument, got, expected, fix, error)


def _is_int(value: object) -> bool:
    """Whether an operator takes this as an int."""
    # Inside of ``torch.jit.trace`` sizes are tensors.
    sizes = (Tensor,) if torch.jit.is_tracing() else ()
    kinds = (int, torch.SymInt, numbers.Integral, *sizes)
    return isinstance(value, kinds) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """Whether an operator takes this as a float."""
    return _is_int(value) or isinstance(value, (float, torch.SymFloat, numbers.Real))


def check_bool(where: str, argument: str, value: object) -> None:
    """True or False; a number or a text is neither."""
    if not isinstance(value, (bool, torch.SymBool)):
        fail(where, argument, shown(value), "a bool", "Pass True or False.", ArgumentTypeError)


def check_scalar(where: str, argument: str, value: object, kind: type) -> None:
    """``value`` is what the schema of an operator calls a bool, int or float."""
    if kind is bool:
        check_bool(where, argument, value)
    elif kind is int:
        if not _is_int(value):
            fail(where, argument, shown(value), "an int", "Pass an int.", ArgumentTypeError)
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            fail(where, argument, value, "an int of 64 bits", "Pass a smaller one.")
    elif not is_number(value):
        fail(where, argument, shown(value), "a number", "Pass a float.", ArgumentTypeError)


def check_number(
    where: str, argument: str, value: object, low: float, high: float, expected: str, fix: str
) -> None:
    """A number in ``[low, high]``; NaN is in none.

    Inside of ``torch.jit.trace`` sizes are tensors, and what is computed from them.
    """
    if isinstance(value, Tensor) and torch.jit.is_tracing():
        value = value.item()
    if not isinstance(value, (int, float, torch.SymInt, torch.SymFloat)):
        fail(where, argument, shown(value), expected, fix, ArgumentTypeError)
    # The second test is of an int that no float can hold.
    if not low <= value <= high or (type(value) is int and not -_HUGE < value < _HUGE):
        fail(where, argument, value, expected, fix)


def check_probability(where: str, argument: str, value: object, fix: str) -> None:
    """A number in [0, 1]."""
    check_number(where, argument, value, 0.0, 1.0, "a probability in [0, 1]", fix)


def check_seed_form(where: str, seed: object) -> None:
    """An int of 64 bits, or a 0-d int64 tensor, of any device."""
    if isinstance(seed, Tensor):
        check_tensor(where, "seed", seed, ndim=0)
        check_dtype(where, "seed", seed, (torch.int64,))
    else:
        check_int(where, "seed", seed, -(2**63), 2**63, "Pass an int or a 0-d int64 tensor.")  # type: ignore[arg-type]
