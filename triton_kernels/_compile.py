"""Compile every kernel to machine code with no GPU, and read what the compiler made of it.

Each kernel file has a ``compile_cases()`` that calls its launchers on meta tensors. Their launches
are recorded, so what is compiled is what would be launched: the same argument types, the same
specialisation of ones and multiples of 16, the launch table of the architecture. The assembler and
disassembler come with the Triton wheel.

    python -m fastplm.triton_kernels._compile [--all] [--arch 90] [name …]     prints the table
    python -m fastplm.triton_kernels._compile --findings [--uneven]            what costs time
"""

from __future__ import annotations

import argparse
import concurrent.futures
import importlib
import json
import math
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from fastplm.triton_kernels import _hazards, _sass
from fastplm.triton_kernels._launch import Launch, record_launches

#: What launch configurations are made for, and what the page shows.
ARCHS = (80, 90, 100)
#: What runs with them too, in less shared memory.
SMALLER_ARCHS = (86, 89, 120)
_TYPES = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.uint8: "u8",
    torch.bool: "i1",
}


#: The rows of a matmul's result.
_DOT = re.compile(r"tt\.dot .*-> tensor<(\d+)x")


@dataclass(frozen=True)
class Report:
    """What one kernel became in one configuration on one architecture."""

    op: str
    kernel: str
    case: str
    arch: int
    tiles: str
    warps: int
    stages: int
    registers: int
    spills: int
    shared: int
    blocks: int  # that an SM holds at once
    hgmma: bool
    dots: bool  # whether a matmul has the 64 rows that a warp group needs
    half: bool
    mix: dict[str, int]  # instructions of the inner loop, by kind
    cycles: dict[str, float]  # of one block and one iteration, by the unit that needs them
    flops: int  # of the matmuls of an iteration
    moved: int  # bytes that an iteration loads and stores
    overflows: list[str]
    hazards: dict[str, list[str]]  # "races", "findings" and what they follow from

    def bound(self) -> tuple[str, float]:
        """The unit that an iteration of the inner loop keeps busy longest, and its cycles."""
        return max(self.cycles.items(), key=lambda item: item[1])

    def roofline(self) -> tuple[str, float]:
        """What an iteration takes on an SM that does nothing but its work, and the cycles.

        "FLOPs": its matmuls at the full rate, as their tiles may come from the L2; where it has
        none, "bytes" at the rate of memory.
        """
        if self.flops:
            rates = _sass.TENSOR_FLOPS if self.mix["tensor"] else _sass.FP32_FLOPS
            return "FLOPs", self.flops / rates[self.arch]
        return "bytes", self.moved / _sass.DEVICES[self.arch].bytes_per_cycle

    def problems(self) -> list[str]:
        """Why this kernel must not ship; empty if it may."""
        found = []
        if self.spills:
            found.append(f"{self.spills} local-memory instructions (register spills)")
        limit = _sass.shared_limit(self.arch)
        if self.shared > limit:
            found.append(f"{self.shared} bytes of shared memory over {limit}")
        if self.arch == 90 and self.dots and self.half and not self.hgmma:
            found.append("a 16-bit matmul without HGMMA")
        found += (f"32-bit offset arithmetic: {place}" for place in self.overflows)
        found += self.hazards["races"]
        return found


def kernel_modules() -> list[str]:
    """The stems of the kernel files."""
    package = importlib.import_module("fastplm.triton_kernels")
    names = (module.name for module in pkgutil.iter_modules(package.__path__))
    return sorted(name for name in names if not name.startswith("_"))


def compile_op(op: str, arch: int, all_cases: bool = False, uneven: bool = False) -> list[Report]:
    """Compile the cases of one kernel file (those labelled "slow: …" only with ``all_cases``).

    ``uneven``: as if no size or stride were a multiple of 16.
    """
    module = importlib.import_module(f"fastplm.triton_kernels.{op}")
    reports, seen = [], set()
    for label, case in module.compile_cases():
        if label.startswith("slow: ") and not all_cases:
            continue
        with record_launches(arch) as launches:
            case()
        for launch in launches:
            source, options, key = _source(launch, uneven)
            if key not in seen:
                seen.add(key)
                reports.append(_compile(op, label, arch, launch, source, options))
    return reports


def _source(launch: Launch, uneven: bool = False) -> tuple[ASTSource, dict[str, int], str]:
    """The launch as the JIT would specialise it, its compile options, and a key for both."""
    kernel, given = launch.kernel, dict(launch.arguments)
    options = {name: given.pop(name) for name in ("num_warps", "num_stages") if name in given}
    signature, constants, attributes = {}, {}, {}
    for index, parameter in enumerate(kernel.params):
        value = given.pop(parameter.name)
        plain = type(value) is int and not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or (plain and value == 1):
            signature[parameter.name] = "constexpr"
            constants[index,] = value
            continue
        signature[parameter.name] = _type(value)
        if isinstance(value, torch.Tensor) or (plain and value % 16 == 0 and not uneven):
            attributes[index,] = [["tt.divisibility", 16]]
    if given:
        raise TypeError(f"{kernel.__name__} has no arguments {sorted(given)}")
    make = GluonASTSource if kernel.is_gluon() else ASTSource
    source = make(kernel, signature, constants, attributes)
    return source, options, f"{kernel.__name__} {signature} {constants} {attributes} {options}"


def compile_launch(op: str, label: str, arch: int, launch: Launch) -> Report:
    """Compile one recorded launch."""
    return _compile(op, label, arch, launch, *_source(launch)[:2])


def _type(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return "*" + _TYPES[value.dtype]
    if isinstance(value, bool):
        return "u1"
    if isinstance(value, int):
        return "i32" if -(2**31) <= value < 2**31 else "i64"
    return "fp32"


def _compile(
    op: str, label: str, arch: int, launch: Launch, source: ASTSource, options: dict[str, int]
) -> Report:
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    sass, usage = disassemble(compiled.asm["cubin"])
    registers = int(re.search(r"REG:(\d+)", usage).group(1))
    metadata = compiled.metadata
    mix, cycles = _sass.loop_mix(sass, metadata.num_warps, arch)
    flops, moved = tile_work(compiled.asm["ttir"])
    hazards = _hazards.hazards(compiled.asm["ttgir"], compiled.asm["ptx"], metadata.num_stages)
    hazards["races"] += _sass.overwritten(sass)
    tiles = (
        f"{parameter.name}={launch.arguments[parameter.name]}"
        for parameter in launch.kernel.params
        if parameter.is_constexpr and type(launch.arguments[parameter.name]) is int
    )
    return Report(
        op=op,
        kernel=launch.kernel.__name__.strip("_").removesuffix("_kernel"),
        case=label.removeprefix("slow: "),
        arch=arch,
        tiles=" ".join(tiles),
        warps=metadata.num_warps,
        stages=metadata.num_stages,
        registers=registers,
        spills=len(re.findall(r"\b(?:LDL|STL)\b", sass)),
        shared=metadata.shared,
        blocks=_sass.blocks_per_sm(
            arch, metadata.num_warps, registers, metadata.shared, metadata.tmem_size
        ),
        hgmma="HGMMA" in sass,
        dots=any(int(rows) >= 64 for rows in _DOT.findall(compiled.asm["ttir"])),
        half=any(kind in str(source.signature) for kind in ("*fp16", "*bf16")),
        mix=mix,
        cycles=cycles,
        flops=flops,
        moved=moved,
        overflows=offset_overflows(compiled.asm["ttir"], launch),
        hazards=hazards,
    )


_MATMUL = re.compile(r"tt\.dot .*: tensor<(\d+)x(\d+)x\w+> \* tensor<\d+x(\d+)x")
_MEMORY = re.compile(
    r"tt\.(?:load|store|atomic_\w+) .*?(?:tensor<((?:\d+x)+))?!tt\.ptr<[a-z]+(\d+)>"
)


def tile_work(ttir: str) -> tuple[int, int]:
    """(FLOPs of matmuls, bytes loaded and stored) of one iteration of the inner loop.

    The Triton IR says what a tile asks for, however the machine code gets it. The loop is chosen by
    the rules of ``_sass.inner_loop``.
    """
    flops, moved, opened, loops = [], [], [], []
    for number, line in enumerate(ttir.splitlines()):
        matmul, memory, text = _MATMUL.search(line), _MEMORY.search(line), line.strip()
        flops.append(2 * math.prod(map(int, matmul.groups())) if matmul else 0)
        shape = map(int, re.findall(r"\d+", memory[1] or "")) if memory else ()
        moved.append(math.prod(shape) * int(memory[2]) // 8 if memory else 0)
        if text.startswith("}"):
            start, is_loop = opened.pop()
            if is_loop:
                loops.append(range(start, number))
        if text.endswith("{"):
            opened.append((number, "scf.for" in text or "scf.while" in text or text == "} do {"))

    def total(counts: list[int], lines: range) -> int:
        return sum(counts[lines.start : lines.stop])

    def holding(counts: list[int]) -> list[range]:
        found = [loop for loop in loops if total(counts, loop)]
        return [
            loop
            for loop in found
            if not any(loop.start < o.start and o.stop <= loop.stop for o in found)
        ]

    whole = range(len(flops))
    if any(flops):
        best = max(holding(flops), key=lambda loop: (total(flops, loop), -len(loop)), default=whole)
    else:
        best = max(holding(moved), key=len, default=whole)
    return total(flops, best), total(moved, best)


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


def offset_overflows(ttir: str, launch: Launch) -> list[str]:
    """The places ("file.py:line") of 32-bit products that become pointer offsets.

    A product of two run-time values (``row * stride``) runs past 2^31 in a large tensor, also where
    it is widened only afterwards. A bound ends the search: a minimum is as small as its smaller
    side, a loop counter as the loop's end. A place inside a tile (``arange * stride``) is no such
    product: launchers see to it that rows lie less than 2^23 elements apart.

    A program's number, or how many there are, times a constant (``tile * BLOCK``) is harmless if it
    is a row or a column, which are fewer than 2^31. What it is, the launch shows, whose grid and
    sizes are known: it stays within the longest dimension of the matrices that were passed, or a
    tile beyond, where a count of elements does not. A bound does not help here, as what has wrapped
    around is negative.
    """
    values, offsets, arguments = _read_ttir(ttir, launch.grid)
    signature = _source(launch)[0].signature
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


def disassemble(cubin: bytes) -> tuple[str, str]:
    """(SASS, resource usage) of a cubin."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return tuple(
            subprocess.run(
                [tool, flag, file.name], check=True, capture_output=True, text=True
            ).stdout
            for flag in ("--dump-sass", "--dump-resource-usage")
        )


def compile_all(
    ops: Iterable[str],
    archs: Iterable[int],
    all_cases: bool = False,
    workers: int | None = None,
    uneven: bool = False,
) -> Iterator[Report]:
    """Compile many ops for many architectures, a process per core."""
    jobs = [(op, arch, all_cases, uneven) for op in ops for arch in archs]
    with concurrent.futures.ProcessPoolExecutor(workers or os.cpu_count()) as pool:
        for reports in pool.map(compile_op, *zip(*jobs, strict=True)):
            yield from reports


def _aligned(rows: list[tuple[Any, ...]]) -> list[tuple[str, ...]]:
    texts = [tuple(map(str, row)) for row in rows]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    return [tuple(map(str.ljust, row, widths)) for row in texts]


def table(reports: Iterable[Report]) -> str:
    """The reports as aligned text."""
    head = "kernel configuration arch tiles warps stages regs spills shared blocks/SM HGMMA bound"
    rows: list[tuple[Any, ...]] = [tuple(head.split())]
    for r in reports:
        hgmma = ("yes" if r.hgmma else "no") if r.dots else "-"
        unit, cycles = r.bound()
        code = (r.registers, r.spills, r.shared, r.blocks, hgmma, f"{unit} {cycles:.0f}")
        rows.append((r.kernel, r.case, f"sm_{r.arch}", r.tiles, r.warps, r.stages, *code))
    return "\n".join("  ".join(row).rstrip() for row in _aligned(rows))


_PAGE = """# The kernels, as compiled

Written by `python benchmarks/static_report.py` with Triton {triton}, without a GPU. Registers,
shared memory and instructions are read from the machine code; blocks, warps and cycles follow from
them by arithmetic. **No time on this page is measured.**

- `blocks/SM`, `warps/SM`: how many an SM holds at once, as registers, shared memory (and tensor
  memory on sm_100) allow.
- `tensor` … `smem`: instructions of the inner loop that a warp executes in one iteration: tensor
  cores, special functions (how many of them `ex2`), fp32 lanes, integers with logic and selection,
  loads and stores of shared memory. A kernel without a loop is counted as a whole.
- `bound`: the cycles of one iteration of one block, and the unit that sets them, if every unit ran
  at its full rate beside the others and nothing waited.
  {rates}
  `issue` is every instruction, 4 warp instructions a clock; `shared` moves 128 bytes a clock,
  shuffles and the operands that the tensor cores read there included. Code behind a branch inside
  the loop is counted as if taken.
- `kFLOP`, `KB`: of the matmuls of one iteration, and what it loads and stores, from the Triton IR.
- `roofline`: the cycles of those FLOPs at the full rate (their operands may come from the L2), or
  where there is no matmul of those bytes, at the SM's share of memory.
  {devices}
- `over it`: the bound over the roofline. A matmul loop is ideal at 1.00, a kernel without matmuls
  waits for memory alone below 1.
"""


def page(reports: Iterable[Report]) -> str:
    """The reports as a Markdown page, a table for each op."""
    head = (
        "kernel|case|arch|tiles|warps|stages|registers|shared KB|blocks/SM|warps/SM|"
        "tensor|MUFU (ex2)|fp32|int|smem|bound|kFLOP|KB|roofline|over it"
    ).split("|")
    tables: dict[str, list[tuple[Any, ...]]] = {}
    for r in reports:
        rows = tables.setdefault(r.op, [tuple(head), ("---",) * len(head)])
        unit, cycles = r.bound()
        roof = r.roofline()[1]
        work = (f"{r.flops / 1000:.0f}", f"{r.moved / 1024:.1f}", f"{roof:.0f}")
        memory = (f"{r.shared / 1024:.1f}", r.blocks, r.blocks * r.warps)
        special = f"{r.mix['mufu']} ({r.mix['ex2']})"
        counts = (r.mix["tensor"], special, r.mix["fp32"], r.mix["integer"], r.mix["shared"])
        where = (r.kernel, r.case, f"sm_{r.arch}", r.tiles, r.warps, r.stages, r.registers)
        over = f"{cycles / roof:.2f}" if roof else "-"
        rows.append((*where, *memory, *counts, f"{unit} {cycles:.0f}", *work, over))
    rates = ", ".join(f"{_sass.TENSOR_FLOPS[arch]} (sm_{arch})" for arch in ARCHS)
    rates = f"`tensor`: {rates} 16-bit FLOPs a clock; `MUFU`: 16 results a clock."
    shares = (
        f"{_sass.DEVICES[arch].bytes_per_cycle:.1f} (sm_{arch}, {_sass.DEVICES[arch].name})"
        for arch in ARCHS
    )
    devices = f"That is {', '.join(shares)} bytes a clock."
    sections = [_PAGE.format(triton=triton.__version__, rates=rates, devices=devices)]
    for op, rows in tables.items():
        lines = ("| " + " | ".join(map(str, row)) + " |" for row in rows)
        sections.append(f"## {op}\n\n" + "\n".join(lines) + "\n")
    return "\n".join(sections)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("ops", nargs="*", metavar="name", help="kernel files; default all")
    parser.add_argument("--arch", type=int, action="append", choices=ARCHS + SMALLER_ARCHS)
    parser.add_argument("--all", action="store_true", help="the slow cases too")
    parser.add_argument("--uneven", action="store_true", help="no size a multiple of 16")
    parser.add_argument("--findings", action="store_true", help="what costs time, not the table")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    options = parser.parse_args()
    ops, archs = options.ops or kernel_modules(), options.arch or ARCHS
    reports = list(compile_all(ops, archs, options.all, uneven=options.uneven))
    if options.json:
        print("\n".join(json.dumps(asdict(report)) for report in reports))
    elif options.findings:
        for r in reports:
            for finding in r.hazards["findings"]:
                print(f"{r.kernel} [{r.case}] sm_{r.arch}: {finding}")
    else:
        print(table(reports))
    bad = [(report, problem) for report in reports for problem in report.problems()]
    for report, problem in bad:
        print(f"{report.kernel} [{report.case}] sm_{report.arch}: {problem}", file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
