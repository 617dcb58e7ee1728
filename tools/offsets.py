"""32-bit products that become offsets into memory, found in a kernel's Triton IR."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from triton._C.libtriton import ir

from fastplm.triton_kernels._launch import Launch

_SHAPING = ("tt.splat", "tt.expand_dims", "tt.broadcast", "tt.reshape", "tt.trans")


@dataclass
class _Value:
    """Where a value of the Triton IR comes from."""

    made_by: str
    sources: list[int]  # the operands that decide how large the value is
    operands: list[int]
    number: int = 0  # a constant's value, a range's last element, or a program id's limit
    place: str | None = None  # the source line of a 32-bit product
    factor: int = 0  # the constant factor of that product, if it has one
    wide: str | None = None  # the source line of a 64-bit product of run-time values
    sum: str | None = None  # the source line of a 32-bit sum
    is_integer: bool = False  # an integer of 16 bits or more


@dataclass
class _Carried:
    """A value that a loop carries: its id in a round, at the start, and in the next round."""

    value: int
    start: int
    following: int
    counter: _Value | None  # the loop's counter, if it has one


def offset_overflows(ttir: str, launch: Launch, signature: dict[str, str]) -> list[str]:
    """The places ("file.py:line") of 32-bit products that become pointer offsets.

    A product of two run-time values (``row * stride``) can exceed 2^31 in a large tensor, even if
    it is converted to 64 bits afterwards. The search ends at a bound: a minimum is at most its
    smaller operand, a loop counter at most the end of its loop. A product inside a tile
    (``arange * stride``) is allowed: launchers ensure that rows are less than 2^23 elements apart.

    A program id, or the number of programs, times a constant (``tile * BLOCK``) is allowed if it is
    the index of a row or column, of which there are fewer than 2^31. The grid and sizes of the
    launch tell: a row or column exceeds the longest dimension of the matrices by at most one tile,
    an element count by more. A bound does not help here, because a number that has wrapped around
    is negative.

    A left shift counts as a product. So does a sum that a loop carries: the step is a run-time
    value (``o += stride``), or a constant that the rounds of this launch multiply. A number that
    was loaded has no bound: no constant may multiply it, and no 64-bit product may become 32 bits
    again.
    """
    values, offsets, arguments, carried = _read_ttir(ttir, launch.grid)
    names = (name for name, kind in signature.items() if kind != "constexpr")
    given = (launch.arguments[name] for name in names)
    sizes = {
        argument: value
        for argument, value in zip(arguments, given, strict=True)
        if isinstance(value, int)
    }
    matrices = (v for v in launch.arguments.values() if isinstance(v, torch.Tensor) and v.dim() > 1)
    longest = max((max(matrix.shape) for matrix in matrices), default=0)
    sums = list(_running_sums(values, carried))
    for value, step, _ in sums:
        if _reaches(values, step, lambda source: source in arguments):
            values[value].place, values[value].factor = values[value].sum, 0
    by_program = _products_of_programs(values, offsets, sizes, longest, sums)
    found = _products_at_run_time(values, offsets) | by_program
    found |= _products_of_loads(values, offsets) | _products_cut_off(values, offsets)
    return sorted(found)


def _reaches(
    values: dict[int, _Value],
    value: int,
    wanted: Callable[[int], bool],
    bounds: Callable[[_Value], bool] = lambda origin: False,
) -> bool:
    """Whether a wanted value decides how large ``value`` is. ``bounds``: values known to be small,
    where the search ends."""
    seen, open_ = set(), [value]
    while open_:
        value = open_.pop()
        if wanted(value):
            return True
        if value in values and value not in seen and not bounds(values[value]):
            seen.add(value)
            open_ += values[value].sources
    return False


def _running_sums(
    values: dict[int, _Value], carried: list[_Carried]
) -> Iterator[tuple[int, int, _Carried]]:
    """(sum, step, carried value) of each 32-bit sum that a loop adds to in every round."""
    kept = (*_SHAPING, "arith.addi", "arith.subi", "arith.select")
    for each in carried:
        seen, open_ = set(), [each.following]
        while open_:
            value = open_.pop()
            if value in seen or value not in values or values[value].made_by not in kept:
                continue
            seen.add(value)
            open_ += values[value].sources
            if values[value].sum:
                for term, step in (values[value].operands, values[value].operands[::-1]):
                    if _reaches(values, term, each.value.__eq__):
                        yield value, step, each


def _reachable(
    values: dict[int, _Value], offsets: list[int], through_bounds: bool = True
) -> Iterator[int]:
    """All values that decide how large an offset is, with the bounds and steps of loops."""
    seen, open_ = set(), list(offsets)
    while open_:
        value = open_.pop()
        if value not in seen and value in values:
            seen.add(value)
            origin = values[value]
            if origin.made_by != "counter":
                open_ += origin.sources
            elif through_bounds:
                open_ += origin.operands
            yield value


def _is_loaded(values: dict[int, _Value], value: int, factor: int = 1) -> bool:
    """Whether ``value`` times ``factor`` may be larger than an integer that was loaded."""

    def loads(source: int) -> bool:
        origin = values.get(source)
        return origin is not None and origin.made_by == "tt.load" and origin.is_integer

    def bounds(origin: _Value) -> bool:
        if origin.made_by in ("arith.divsi", "arith.divui"):
            divisor = _origin(values, origin.operands[1])
            return divisor is not None and divisor.number >= abs(factor)
        return origin.made_by in ("arith.remsi", "arith.remui")

    return _reaches(values, value, loads, bounds)


def _products_of_loads(values: dict[int, _Value], offsets: list[int]) -> frozenset[str]:
    found = set()
    for value in _reachable(values, offsets):
        origin = values[value]
        if origin.place and abs(origin.factor) > 1:
            if any(_is_loaded(values, operand, origin.factor) for operand in origin.operands):
                found.add(origin.place)
    return frozenset(found)


def _products_cut_off(values: dict[int, _Value], offsets: list[int]) -> frozenset[str]:
    """64-bit products of run-time values that become 32 bits, and then offsets."""

    def products(value: int) -> set[str]:
        origin = values.get(value)
        if origin is None or value in seen or origin.made_by == "counter":
            return set()
        seen.add(value)
        sources = [products(source) for source in origin.sources]
        if origin.made_by in ("arith.minsi", "arith.minui") and not all(sources):
            return set()
        return set().union(*sources, [origin.wide] if origin.wide else [])

    found = set()
    for value in _reachable(values, offsets, through_bounds=False):
        if values[value].made_by == "arith.trunci":
            seen: set[int] = set()
            found |= products(value)
    return frozenset(found)


def _products_at_run_time(values: dict[int, _Value], offsets: list[int]) -> frozenset[str]:
    found: dict[int, frozenset[str]] = {}

    def products(value: int) -> frozenset[str]:
        if value not in found and value in values:
            found[value] = frozenset()  # ends the recursion if a loop carries the value
            origin = values[value]
            sources = [products(source) for source in origin.sources]
            inherited = frozenset().union(*sources)
            if origin.made_by in ("arith.minsi", "arith.minui") and not all(sources):
                inherited = frozenset()
            if origin.place and not origin.factor:
                inherited |= {origin.place}
            found[value] = inherited
        return found.get(value, frozenset())

    return frozenset().union(*map(products, offsets))


def _products_of_programs(
    values: dict[int, _Value],
    offsets: list[int],
    sizes: dict[int, int],
    longest: int,
    sums: list[tuple[int, int, _Carried]],
) -> frozenset[str]:
    known: dict[int, tuple[int, bool]] = {}

    def limit(value: int) -> tuple[int, bool]:
        """(the largest value in this launch, whether it depends on a program id).

        A value that was loaded counts as 0, as it does not depend on a program id.
        """
        if value in known:
            return known[value]
        known[value] = sizes.get(value, 0), False  # ends the recursion if a loop carries the value
        if value not in values or values[value].made_by == "tt.load":
            return known[value]
        origin = values[value]
        operands = [limit(operand) for operand in origin.operands]
        most = [size for size, _ in operands]
        size = max(most, default=0)
        operation = origin.made_by.removeprefix("arith.")
        if origin.number:
            size = origin.number
        elif operation == "addi":
            size = max(sum(most), 0)
        elif operation == "subi":
            size = most[0]
        elif operation == "muli":
            size = abs(most[0] * most[1])
        elif operation == "shli":
            size = abs(most[0]) << min(most[1], 63)
        elif operation in ("divsi", "divui"):
            size = most[0] // max(most[1], 1)
        elif operation in ("remsi", "remui") and most[1] > 0:
            size = min(most[0], most[1] - 1)
        elif operation in ("minsi", "minui"):
            size = min((bound for bound in most if bound), default=0)
        elif operation == "select":
            size = max(most[1:])
        is_program = origin.made_by.startswith("tt.get_")
        known[value] = size, is_program or any(of_program for _, of_program in operands)
        return known[value]

    found = set()
    reachable = list(_reachable(values, offsets))
    for value in reachable:
        origin = values[value]
        size, of_program = limit(value)
        if origin.place and origin.factor and of_program and size >= longest + abs(origin.factor):
            found.add(origin.place)
    for value, step, each in sums:
        constant = _origin(values, step)
        if value not in reachable or constant is None or not constant.number or not each.counter:
            continue
        _, stop, by = each.counter.operands
        length, stride = abs(constant.number), max(limit(by)[0], 1)
        rounds = -(-limit(stop)[0] // stride)
        is_long = limit(each.start)[0] + rounds * length >= longest + length
        if length > stride and (is_long or _is_loaded(values, stop)):
            found.add(values[value].sum)
    return frozenset(found)


def _read_ttir(
    ttir: str, grid: tuple[int, ...]
) -> tuple[dict[int, _Value], list[int], list[int], list[_Carried]]:
    """(where every value comes from, the offsets of all pointer additions, the arguments, the
    values that loops carry)."""
    context = ir.context()
    ir.load_dialects(context)
    with tempfile.NamedTemporaryFile("w", suffix=".ttir") as file:
        file.write(ttir)
        file.flush()
        module = ir.parse_mlir_module(file.name, context)
    # Triton 3.6 has no access to an operation's attributes; the text has them in the same order.
    constants = iter(re.findall(r"arith\.constant (?:dense<)?([^\s>]+)", ttir))
    programs = iter(re.findall(r"tt\.get_(program_id|num_programs) ([xyz])", ttir))
    values: dict[int, _Value] = {}
    offsets: list[int] = []
    arguments: list[int] = []
    loops: list[_Carried] = []
    blocks: dict[int, list[Any]] = {}  # the blocks of a region
    ends: dict[int, list[int]] = {}  # the operands of a block's last operation

    def number(name: str, kind: str) -> int:
        if name == "arith.constant":
            text = next(constants)
            return int(text) if re.fullmatch(r"-?\d+", text) else 0
        if name == "tt.make_range":
            return int(re.search(r"<(\d+)x", kind)[1]) - 1
        if name in ("tt.get_program_id", "tt.get_num_programs"):
            what, axis = next(programs)
            return (*grid, 1, 1)["xyz".index(axis)] - (what == "program_id")
        return 0

    def visit(operation: Any) -> None:
        name = operation.get_name()
        operands = [operation.get_operand(i).id() for i in range(operation.get_num_operands())]
        results = [operation.get_result(i) for i in range(operation.get_num_results())]
        block = operation.get_block()
        if block is not None:
            ends[block.id()] = operands
            region = blocks.setdefault(block.get_parent().id(), [])
            if all(block.id() != other.id() for other in region):
                region.append(block)
        inside = [
            inner
            for i in range(operation.get_num_regions())
            for inner in blocks.get(operation.get_region(i).id(), [])
        ]
        if name == "tt.addptr":
            offsets.append(operands[1])
        if name == "tt.func":
            arguments.extend(_arguments(inside[0]))
        if name == "scf.for":
            counter, *carried = _arguments(inside[0])
            values[counter] = _Value("counter", operands[1:2], operands[:3])
            rounds = zip(operands[3:], ends[inside[0].id()], strict=True)
            for argument, result, sources in zip(carried, results, rounds, strict=True):
                made = _Value(name, list(sources), list(sources))
                values[argument] = values[result.id()] = made
                loops.append(_Carried(argument, *sources, values[counter]))
            return
        if name == "scf.while":
            before, after = inside
            tested = ends[before.id()][1:]
            rounds = zip(_arguments(before), operands, ends[after.id()], strict=True)
            for argument, *sources in rounds:
                values[argument] = _Value(name, list(sources), list(sources))
                loops.append(_Carried(argument, *sources, None))
            for argument, result, source in zip(_arguments(after), results, tested, strict=True):
                values[argument] = values[result.id()] = _Value(name, [source], [source])
            return
        sources = operands
        if name == "scf.if":
            sources = []
        elif name in ("arith.divsi", "arith.divui", "arith.remsi", "arith.remui"):
            sources = operands[:1]
        elif name == "arith.select":
            sources = operands[1:]
        elif name in ("tt.load", "arith.cmpi", "arith.cmpf"):
            sources = []
        if name.startswith("scf."):
            sources = sources + [value for inner in inside for value in ends[inner.id()]]
            operands = sources
            for inner in inside:
                values.update(
                    (value, _Value(name, sources, sources)) for value in _arguments(inner)
                )
        for result in results:
            kind = str(result.get_type())
            made = values[result.id()] = _Value(name, sources, operands, number(name, kind))
            bits = re.search(r"(?:^|x)i(\d+)>?$", kind)
            made.is_integer = bits is not None and int(bits[1]) >= 16
            if bits is None or name not in ("arith.muli", "arith.shli", "arith.addi"):
                continue
            is_narrow = int(bits[1]) <= 32
            if name == "arith.addi":
                made.sum = _place(result) if is_narrow else None
                continue
            origins = [_origin(values, operand) for operand in operands]
            if any(origin is not None and origin.made_by == "tt.make_range" for origin in origins):
                continue
            constants_of = [o.number if o and o.made_by == "arith.constant" else 0 for o in origins]
            if name == "arith.shli":
                if constants_of[0]:
                    continue  # a bit of a mask
                constants_of = [1 << min(constants_of[1], 63)] if constants_of[1] else []
            factor = next(filter(None, constants_of), 0)
            if is_narrow:
                made.place, made.factor = _place(result), factor
            elif not factor:
                made.wide = _place(result)

    module.walk(visit)
    return values, offsets, arguments, loops


def _origin(values: dict[int, _Value], value: int) -> _Value | None:
    """The value that this one was reshaped or broadcast from; None for an argument."""
    while value in values and values[value].made_by in _SHAPING:
        (value,) = values[value].sources
    return values.get(value)


def _arguments(block: Any) -> list[int]:
    return [block.arg(i).id() for i in range(block.get_num_arguments())]


def _place(value: Any) -> str:
    found = re.search(r'"([^"]*)":(\d+)', str(value.get_loc()))
    return f"{Path(found[1]).name}:{found[2]}" if found else "unknown place"
