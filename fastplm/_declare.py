"""The declaration of an op's arguments: a ``NamedTuple`` whose annotations say all about them.

::

    class Call(NamedTuple):
        input: Annotated[Tensor, Arg("[N, E]")]
        positions: Annotated[Tensor, Arg("[P]", (torch.int64,))]

The schema of the operator follows from it, and so do the checks of a call, in the op's public
function as in its fake kernel: a wrong call fails with the same words everywhere. So do the layout
that kernels ask for (``Signature.laid_out``) and the arguments of the reference (``from_fields``).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Annotated, Any, NamedTuple, NoReturn, get_args, get_origin, get_type_hints

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import guard_or_false

from fastplm._checks import (
    FLOATING,
    check_dtype,
    check_same,
    check_same_device,
    check_scalar,
    check_tensor,
    same_size,
)
from fastplm.errors import fail

#: An int that torch.compile may trace as a symbol.
Size = Annotated[int, "SymInt"]

_STRIDED = torch.strided
_MOST_INT = 1 << 63  # int64
_SCHEMA: dict[Any, str] = {
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    Size: "SymInt",
    **{kind: kind.__name__ for kind in (bool, int, float, str)},
}


class Arg(NamedTuple):
    """What a tensor must be.

    Args:
        shape: "[N, E]" with a letter for each size; a letter is one size in all arguments of a
            call. "..." stands for any leading dimensions, "B + 1" for one more than B, "E > 0" for
            a size that may not be 0. None: any shape.
        dtypes: the dtypes allowed, or the name of the argument whose dtype it has.
        fix: what a user does about a wrong shape or dtype.
        packed: the shape in a call of packed rows, where that is another one.
        name: how errors call the argument, where not by the name of the field.
    """

    shape: str | None = None
    dtypes: tuple[torch.dtype, ...] | str = FLOATING
    fix: str = ""
    packed: str | None = None
    name: str = ""


class _Shape(NamedTuple):
    text: str
    sizes: tuple[tuple[str, int], ...]  # letter, and what is added to it
    positive: tuple[int, ...]  # the dimensions that may not be 0
    leading: bool  # whether any dimensions may come first


class _TensorArgument(NamedTuple):
    place: int
    name: str
    optional: bool
    dtypes: tuple[torch.dtype, ...]
    dtype_of: int | None  # the place of the argument whose dtype it has
    shape: _Shape | None
    fix: str

    @property
    def dimensions(self) -> int | None:
        return None if self.shape is None else len(self.shape.sizes)


class Signature:
    """The arguments of an operator, as a ``NamedTuple`` declares them.

    A field that is such a ``NamedTuple`` itself stands for all of its fields.
    """

    def __init__(self, declared: Any) -> None:
        self.declared = declared
        hints = get_type_hints(declared, include_extras=True)
        parts = [Signature(hint) if hasattr(hint, "_fields") else None for hint in hints.values()]
        #: A signature for each field that is one, or None where no field is.
        self._parts = parts if any(parts) else None
        self.names: list[str] = []
        self.types: list[str] = []
        for (name, hint), part in zip(hints.items(), parts, strict=True):
            if part is not None:
                self.names += part.names
                self.types += part.types
            else:
                arg = _arg_of(hint)
                self.names.append(name)
                self.types.append(_SCHEMA[hint if arg is None else get_args(hint)[0]])
        #: What to check of the tensors of a call, and of a call of packed rows.
        self.tensors = _tensor_arguments(hints, packed=False)
        self.packed_tensors = _tensor_arguments(hints, packed=True)
        kinds = {bool: bool, int: int, float: float, Size: int}
        #: What to check of the other arguments; each op checks a str, one of some choices, itself.
        self.scalars = tuple(
            (place, name, kinds[hint])
            for place, (name, hint) in enumerate(hints.items())
            if hint in kinds
        )
        self._with_rows = tuple(one.place for one in self.tensors if one.dimensions != 0)

    @property
    def schema(self) -> str:
        return ", ".join(
            f"{kind} {name}" for kind, name in zip(self.types, self.names, strict=True)
        )

    def build(self, arguments: Sequence[Any]) -> Any:
        """A value of the class declared, from the arguments of the operator."""
        if self._parts is None:
            return self.declared(*arguments)
        values = iter(arguments)
        return self.declared(
            *[
                next(values) if part is None else part.build([*islice(values, len(part.names))])
                for part in self._parts
            ]
        )

    def check(self, where: str, call: Any, packed: bool = False) -> None:
        """Every tensor of a call is what its ``Arg`` says, and on the device of the first one;
        every bool, int and float is of its type.

        Raises:
            ArgumentValueError, ArgumentTypeError: with the name of the argument.
        """
        sizes: dict[str, int] = {}
        traced = torch.compiler.is_compiling()
        for place, name, optional, dtypes, dtype_of, shape, fix in (
            self.packed_tensors if packed else self.tensors
        ):
            tensor = call[place]
            if tensor is None and optional:
                continue
            if not isinstance(tensor, Tensor) or tensor.layout is not _STRIDED or tensor.is_nested:
                check_tensor(where, name, tensor)
            if shape is not None:
                # Each letter has one size: the one of the tensor in which it came first.
                found, letters, earlier = tensor.shape, shape.sizes, len(sizes)
                extra = len(found) - len(letters)
                fits = extra == 0 or (extra > 0 and shape.leading)
                for at, (letter, added) in enumerate(letters if fits else ()):
                    size = found[extra + at]
                    if at in shape.positive and (guard_or_false(size == 0) if traced else not size):
                        fits = False
                        break
                    size = size - added if added else size
                    expected = sizes.setdefault(letter, size)
                    if not (same_size(expected, size) if traced else expected == size):
                        fits = False
                        break
                if not fits:
                    before = dict(list(sizes.items())[:earlier])
                    _refuse_shape(where, name, tensor, shape, before, fix)
            if dtype_of is None:
                if tensor.dtype not in dtypes:
                    check_dtype(where, name, tensor, dtypes, fix or "Convert it with .to(dtype).")
            elif tensor.dtype is not call[dtype_of].dtype:
                check_same(where, **{self.names[dtype_of]: call[dtype_of], name: tensor})
            if place and tensor.device != call[0].device:
                check_same_device(where, **{self.names[0]: call[0], name: tensor})
        for place, name, kind in self.scalars:
            value: Any = call[place]
            is_kind: bool = type(value) is kind  # in a name, or mypy takes it for an object
            asks = kind is int and not traced  # a traced int may be a symbol without a value
            if not is_kind or (asks and not -_MOST_INT <= value < _MOST_INT):
                check_scalar(where, name, value, kind)

    def check_dimensions(self, where: str, call: Any, *names: str) -> None:
        """These arguments are tensors of as many dimensions as declared: what code may rely on that
        looks at them before the other checks."""
        for one in self.tensors:
            if one.name in names and (call[one.place] is not None or not one.optional):
                check_tensor(where, one.name, call[one.place], ndim=one.dimensions)

    def laid_out(self, call: Any) -> Any:
        """The call with tensors whose last stride is 1: the one layout that kernels ask for."""
        for place in self._with_rows:
            tensor = call[place]
            if tensor is not None and tensor.stride(-1) != 1:
                call = call._replace(**{self.names[place]: tensor.contiguous()})
        return call


def from_fields(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` as one that takes a call: its arguments are the fields of the same names, or
    keywords."""
    names = tuple(inspect.signature(function).parameters)

    def run(call: Any, **others: Any) -> Any:
        fields = {name: getattr(call, name) for name in names if name not in others}
        return function(**fields, **others)

    return run


def _arg_of(hint: Any) -> Arg | None:
    if get_origin(hint) is Annotated and isinstance(hint.__metadata__[0], Arg):
        return hint.__metadata__[0]
    return None


def _tensor_arguments(hints: dict[str, Any], packed: bool) -> list[_TensorArgument]:
    found = []
    for place, (field, hint) in enumerate(hints.items()):
        arg = _arg_of(hint)
        if arg is None:
            continue
        optional = type(None) in get_args(get_args(hint)[0])
        dtype_of, dtypes = None, arg.dtypes
        if isinstance(dtypes, str):
            dtype_of, dtypes = list(hints).index(dtypes), ()
        shape = _shape(arg.packed if packed and arg.packed is not None else arg.shape)
        name = arg.name or field
        found.append(_TensorArgument(place, name, optional, dtypes, dtype_of, shape, arg.fix))
    return found


def _shape(text: str | None) -> _Shape | None:
    if text is None:
        return None
    words = [word for word in text.strip("[]").split(", ") if word]
    named = [word for word in words if word != "..."]
    sizes = [word.removesuffix(" > 0").split(" + ") for word in named]
    pairs = tuple((letter, int(more[0]) if more else 0) for letter, *more in sizes)
    positive = tuple(at for at, word in enumerate(named) if word.endswith(" > 0"))
    return _Shape(text, pairs, positive, "..." in words)


def _refuse_shape(
    where: str, name: str, tensor: Tensor, shape: _Shape, known: dict[str, int], fix: str
) -> NoReturn:
    """The error of a tensor of another shape; ``known``: the sizes of letters from before it."""
    got = f"shape {tuple(tensor.shape)}"
    if tensor.dim() != len(shape.sizes) and not shape.leading:
        got = f"{tensor.dim()} dimensions {tuple(tensor.shape)}"
    used = dict.fromkeys(letter for letter, _ in shape.sizes if letter in known)
    given = " with " * bool(used) + ", ".join(f"{key} = {known[key]}" for key in used)
    fix = fix or "Check the layout of the tensors of this call."
    fail(where, name, got, shape.text + given, fix)
