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
from typing import Annotated, Any, NamedTuple, get_args, get_origin, get_type_hints

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
    is_bool,
    is_int,
    is_number,
    same_size,
)
from fastplm.errors import ArgumentValueError, message

#: An int that torch.compile may trace as a symbol.
Size = Annotated[int, "SymInt"]

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


class _Scalar(NamedTuple):
    place: int
    name: str
    kind: type


#: For each kind of scalar, whether a value that is not just of this type fits all the same.
#: A str is one of some choices, which each op checks itself.
_FITS_TOO: dict[type, str] = {
    bool: "is_bool(a{0})",
    int: "is_int(a{0})",
    float: "is_number(a{0})",
}


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
        #: What to check of the tensors, in calls of padded and of packed rows.
        self.tensors = tuple(_tensor_arguments(hints, packed) for packed in (False, True))
        kinds = {**{kind: kind for kind in _FITS_TOO}, Size: int}
        #: What to check of the other arguments.
        self.scalars = tuple(
            _Scalar(place, name, kinds[hint])
            for place, (name, hint) in enumerate(hints.items())
            if hint in kinds
        )
        self._fits, self._fits_traced = (
            [_compiled(len(hints), tensors, self.scalars, traced) for tensors in self.tensors]
            for traced in (False, True)
        )
        shaped = [one for one in self.tensors[0] if one.shape is not None]
        self._dimensions = {one.name: (one.place, one.optional, one.dimensions) for one in shaped}
        self._rows = tuple(one.place for one in self.tensors[0] if one.dimensions != 0)

    @property
    def schema(self) -> str:
        return ", ".join(
            f"{kind} {name}" for kind, name in zip(self.types, self.names, strict=True)
        )

    def build(self, arguments: Sequence[Any]) -> Any:
        """A value of the class declared, from the arguments of the operator."""
        if self._parts is None:
            return self.declared(*arguments)
        values, start = [], 0
        for part in self._parts:
            count = 1 if part is None else len(part.names)
            given = arguments[start : start + count]
            values.append(given[0] if part is None else part.build(given))
            start += count
        return self.declared(*values)

    def check(self, where: str, call: Any, packed: bool = False) -> None:
        """Every tensor of a call is what its ``Arg`` says, and on the device of the first one;
        every bool, int and float is of its type.

        Raises:
            ArgumentValueError, ArgumentTypeError: with the name of the argument.
        """
        fits = self._fits_traced if torch.compiler.is_compiling() else self._fits
        if not fits[1 if packed else 0](call):  # torch 2.11 cannot trace a bool as an index
            self._explain(where, call, packed)

    def check_dimensions(self, where: str, call: Any, *names: str) -> None:
        """These arguments are tensors of as many dimensions as declared: what code may rely on that
        looks at them before the other checks."""
        for name in names:
            place, optional, dimensions = self._dimensions[name]
            if call[place] is not None or not optional:
                check_tensor(where, name, call[place], ndim=dimensions)

    def laid_out(self, call: Any) -> Any:
        """The call with tensors whose last stride is 1: the one layout that kernels ask for."""
        for place in self._rows:
            tensor = call[place]
            if tensor is not None and tensor.stride(-1) != 1:
                call = call._replace(**{self.names[place]: tensor.contiguous()})
        return call

    def _explain(self, where: str, call: Any, packed: bool) -> None:
        """Raise the error of a call that does not fit."""
        sizes: dict[str, int] = {}
        for place, name, optional, dtypes, dtype_of, shape, fix in self.tensors[packed]:
            tensor = call[place]
            if tensor is None and optional:
                continue
            check_tensor(where, name, tensor)
            if shape is not None:
                _check_shape(where, name, tensor, shape, sizes, fix)
            if dtype_of is not None:
                check_same(where, **{self.names[dtype_of]: call[dtype_of], name: tensor})
            else:
                check_dtype(where, name, tensor, dtypes, fix or "Convert it with .to(dtype).")
            check_same_device(where, **{self.names[0]: call[0], name: tensor})
        for place, name, kind in self.scalars:
            check_scalar(where, name, call[place], kind)


def from_fields(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` for a call: each of its arguments is the field of that name, or a keyword."""
    names = tuple(inspect.signature(function).parameters)

    def run(call: Any, **others: Any) -> Any:
        fields = {name: getattr(call, name) for name in names if name not in others}
        return function(**fields, **others)

    return run


def _compiled(
    count: int, tensors: Sequence[_TensorArgument], scalars: Sequence[_Scalar], traced: bool
) -> Callable[[Any], bool]:
    """``fits(call)``: whether ``_explain`` would find no error in a call of so many fields.

    It is source code written for these arguments, as ``NamedTuple`` writes its own: a loop over
    their declarations would cost several microseconds in each call. In traced code a size may be
    unknown: the graph asserts what cannot be compared.
    """
    lines = [f"{', '.join(f'a{at}' for at in range(count))}, = call"]
    sure: set[str] = set()  # letters whose size is known, and those of an optional tensor
    maybe = {letter for one in tensors if one.shape for letter, _ in one.shape.sizes}
    lines += [f"{letter} = None" for letter in sorted(maybe)]
    for at, (place, _, optional, _, dtype_of, shape, _) in enumerate(tensors):
        tensor = f"a{place}"
        wrong = [f"not isinstance({tensor}, Tensor)", f"{tensor}.layout is not strided"]
        wrong.append(
            f"{tensor}.dtype not in dtypes[{at}]"
            if dtype_of is None
            else f"{tensor}.dtype is not a{dtype_of}.dtype"
        )
        if place:
            wrong.append(f"{tensor}.device != device")
        if shape is None:
            wrong.append(f"{tensor}.is_nested")  # else its shape is asked for, which raises
        body = [f"if {' or '.join(wrong)}: return False"]
        if not place and len(tensors) > 1:
            body.append("device = a0.device")
        if shape is not None:
            body.append(f"shape = {tensor}.shape")
            count = len(shape.sizes)
            body.append(f"if len(shape) {'<' if shape.leading else '!='} {count}: return False")
            for dimension, (letter, more) in enumerate(shape.sizes):
                size = f"shape[{dimension - count}]"
                if dimension in shape.positive:
                    none = f"guard_or_false({size} == 0)" if traced else f"{size} == 0"
                    body.append(f"if {none}: return False")
                size += f" - {more}" if more else ""
                if letter not in sure:
                    body.append(f"if {letter} is None: {letter} = {size}")
                differs = f"not same_size({letter}, {size})" if traced else f"{letter} != {size}"
                body.append(f"if {differs}: return False")
                if not optional:
                    sure.add(letter)
        if optional:
            body = [f"if {tensor} is not None:", *(f"    {line}" for line in body)]
        lines += body
    for place, _, kind in scalars:
        value, fits = f"a{place}", _FITS_TOO[kind].format(place)
        lines.append(f"if type({value}) is not {kind.__name__} and not {fits}: return False")
        if kind is int and not traced:
            lines.append(
                f"if type({value}) is int and not {-(2**63)} <= {value} < {2**63}: return False"
            )
    lines.append("return True")
    if not traced:  # a nested tensor raises where its shape is asked for
        lines = ["try:", *(f"    {line}" for line in lines), "except RuntimeError: return False"]
    source = "\n    ".join(["def fits(call):", *lines])
    names: dict[str, Any] = {"Tensor": Tensor, "dtypes": [frozenset(one.dtypes) for one in tensors]}
    names |= {"same_size": same_size, "guard_or_false": guard_or_false, "strided": torch.strided}
    names |= {"is_bool": is_bool, "is_int": is_int, "is_number": is_number}
    exec(source, names)  # of this file's own words and the letters of declarations
    return names["fits"]


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


def _check_shape(
    where: str, name: str, tensor: Tensor, shape: _Shape, sizes: dict[str, int], fix: str
) -> None:
    """The tensor has this shape, whose letters are added to ``sizes``."""
    found, letters = tensor.shape, shape.sizes
    if len(found) > len(letters) and shape.leading:
        found = found[len(found) - len(letters) :]
    got, known = f"shape {tuple(tensor.shape)}", ""
    if len(found) != len(letters):
        if not shape.leading:
            got = f"{tensor.dim()} dimensions {tuple(tensor.shape)}"
    elif all(found[at] > 0 for at in shape.positive):
        pairs = [(letter, size - more) for size, (letter, more) in zip(found, letters, strict=True)]
        before = {letter: sizes[letter] for letter, _ in pairs if letter in sizes}
        if all(sizes.setdefault(letter, size) == size for letter, size in pairs):
            return
        known = " with " * bool(before) + ", ".join(f"{key} = {before[key]}" for key in before)
    fix = fix or "Check the layout of the tensors of this call."
    raise ArgumentValueError(message(where, name, got, shape.text + known, fix))
