"""32-bit products that become offsets into memory, found in a kernel's Triton IR."""

from __future__ import annotations

import re
import tempfile
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
    sources: list[int]  # the operands that decide how large it is
    operands: list[int]
    number: int = 0  # of a constant; the last place of a range; the limit of a program's number
    place: str | None = None  # of a 32-bit product
    factor: int = 0  # of that product, if it is a constant


def offset_overflows(ttir: str, launch: Launch, signature: dict[str, str]) -> list[str]:
    """The places ("file.py:line") of 32-bit products that become pointer offsets.

    A product of two run-time values (``row * stride``) can exceed 2^31 in a large tensor, even if
    it is converted to 64 bits afterwards. The search ends at a bound: a minimum is as small as its
    smaller operand, a loop counter as the end of its loop. A product inside a tile
    (``arange * stride``) is allowed: launchers ensure that rows are less than 2^23 elements apart.

    The index of a program, or the number of programs, times a constant (``tile * BLOCK``) is
    allowed if it is a row or a column, of which there are fewer than 2^31. The launch, whose grid
    and sizes are known, tells which it is: a row or column exceeds the longest dimension of the
    matrices by at most one tile, a count of elements does not stay below that. A bound does not
    help here, because a number that has wrapped around is negative.
    """
    values, offsets, arguments = _read_ttir(ttir, launch.grid)
    names = (name for name, kind in signature.items() if kind != "constexpr")
    given = (launch.arguments[name] for name in names)
    sizes = {
        argument: value
        for argument, value in zip(arguments, given, strict=True)
        if isinstance(value, int)
    }
    matrices = (v for v in launch.arguments.values() if isinstance(v, torch.Tensor) and v.dim() > 1)
    longest = max((max(matrix.shape) for matrix in matrices), default=0)
    by_program = _products_of_programs(values, offsets, sizes, longest)
    return sorted(_products_at_run_time(values, offsets) | by_program)


def _products_at_run_time(values: dict[int, _Value], offsets: list[int]) -> frozenset[str]:
    found: dict[int, frozenset[str]] = {}

    def products(value: int) -> frozenset[str]:
        if value not in found and value in values:
            found[value] = frozenset()  # a loop carries the value into itself
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
    values: dict[int, _Value], offsets: list[int], sizes: dict[int, int], longest: int
) -> frozenset[str]:
    known: dict[int, tuple[int, bool]] = {}

    def limit(value: int) -> tuple[int, bool]:
        """(what it is at most in this launch, whether the number of a program is in it).

        What is read from memory counts as 0: it is no number of a program.
        """
        if value in known:
            return known[value]
        known[value] = sizes.get(value, 0), False  # also where a loop carries it into itself
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

    found, seen, open_ = set(), set(), list(offsets)
    while open_:
        value = open_.pop()
        if value in seen or value not in values:
            continue
        seen.add(value)
        origin = values[value]
        open_ += origin.operands if origin.made_by == "counter" else origin.sources
        size, of_program = limit(value)
        if origin.place and origin.factor and of_program and size >= longest + abs(origin.factor):
            found.add(origin.place)
    return frozenset(found)


def _read_ttir(ttir: str, grid: tuple[int, ...]) -> tuple[dict[int, _Value], list[int], list[int]]:
    """(what every value is made from, the offsets of all pointer additions, the arguments)."""
    context = ir.context()
    ir.load_dialects(context)
    with tempfile.NamedTemporaryFile("w", suffix=".ttir") as file:
        file.write(ttir)
        file.flush()
        module = ir.parse_mlir_module(file.name, context)
    # Triton 3.6 does not tell attributes of an operation; they stand in the text in the same order.
    constants = iter(re.findall(r"arith\.constant (?:dense<)?([^\s>]+)", ttir))
    programs = iter(re.findall(r"tt\.get_(program_id|num_programs) ([xyz])", ttir))
    values: dict[int, _Value] = {}
    offsets: list[int] = []
    arguments: list[int] = []
    blocks: dict[int, list[Any]] = {}  # the blocks of a region
    ends: dict[int, list[int]] = {}  # what the last operation of a block hands on

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
            return
        sources = operands
        if name == "scf.if":
            sources = []
        elif name in ("arith.divsi", "arith.divui", "arith.remsi", "arith.remui"):
            sources = operands[:1]
        elif name == "arith.select":
            sources = operands[1:]
        elif name in ("tt.load", "arith.cmpi"):
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
            if name == "arith.muli" and re.search(r"(^|x)i(8|16|32)>?$", kind):
                origins = [_origin(values, operand) for operand in operands]
                if all(origin is None or origin.made_by != "tt.make_range" for origin in origins):
                    made.place = _place(result)
                    made.factor = next(
                        (o.number for o in origins if o and o.made_by == "arith.constant"), 0
                    )

    module.walk(visit)
    return values, offsets, arguments


def _origin(values: dict[int, _Value], value: int) -> _Value | None:
    """What a value was made from, whatever its shape became since; None for an argument."""
    while value in values and values[value].made_by in _SHAPING:
        (value,) = values[value].sources
    return values.get(value)


def _arguments(block: Any) -> list[int]:
    return [block.arg(i).id() for i in range(block.get_num_arguments())]


def _place(value: Any) -> str:
    found = re.search(r'"([^"]*)":(\d+)', str(value.get_loc()))
    return f"{Path(found[1]).name}:{found[2]}" if found else "unknown place"
