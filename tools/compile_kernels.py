"""Compile every kernel to machine code without a GPU, and report on the result.

The ``compile_cases()`` of each op call its launchers on meta tensors, and their launches are
recorded. So the code is that of a real launch: the same argument types, the same specialisation of
ones and multiples of 16, the launch table of the architecture. The assembler and the disassembler
come with the Triton wheel.

    python tools/compile_kernels.py [--all] [--arch 90] [name …]     prints the table
    python tools/compile_kernels.py --findings [--uneven]            what costs time
    python tools/compile_kernels.py --once [--arch 90]               the faults of a first launch
"""

from __future__ import annotations

import argparse
import concurrent.futures
import hashlib
import importlib
import itertools
import json
import math
import os
import pkgutil
import re
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from timeline import Timing, follow
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

import machine_code
from fastplm.triton_kernels._launch import Launch, record_launches, shared_limit
from hazards import find_hazards
from offsets import offset_overflows

#: The architectures that have launch tables of their own, and that results/static/kernels.md shows.
ARCHS = (80, 90, 100)
#: Other architectures, with less shared memory, which use these tables.
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
    """The compiled code of one kernel in one configuration on one architecture."""

    op: str
    kernel: str
    case: str
    arch: int
    tiles: str
    warps: int
    stages: int
    registers: int
    spills: int  # accesses of local memory
    loop_spills: int  # accesses of local memory in an inner loop
    shared: int
    blocks: int  # blocks that an SM holds at once
    hgmma: bool
    dots: bool  # whether a matmul has the 64 rows that a warp group needs
    half: bool
    mix: dict[str, int]  # instructions of the inner loop, by kind
    cycles: dict[str, float]  # cycles of one iteration of one block, by unit
    flops: int  # FLOPs of the matmuls of an iteration
    moved: int  # bytes that an iteration loads and stores
    overflows: list[str]
    hazards: dict[str, list[str]]  # "races", "findings" and what they follow from

    def bound(self) -> tuple[str, float]:
        """The unit that an iteration of the inner loop keeps busy longest, and its cycles."""
        return max(self.cycles.items(), key=lambda item: item[1])

    def roofline(self) -> tuple[str, float]:
        """The limit of an iteration that has the SM to itself, and its cycles.

        The limit is "FLOPs": the iteration's matmuls at the full rate, as their tiles may come from
        the L2. Without matmuls it is "bytes", at the rate of memory.
        """
        if self.flops:
            rates = machine_code.TENSOR_FLOPS if self.mix["tensor"] else machine_code.FP32_FLOPS
            return "FLOPs", self.flops / rates[self.arch]
        return "bytes", self.moved / machine_code.DEVICES[self.arch].bytes_per_cycle

    def problems(self) -> list[str]:
        """Why this kernel must not ship; empty if it may."""
        found = []
        if self.loop_spills:  # a few spills outside of loops cost less than a smaller tile
            count = self.loop_spills
            found.append(f"{count} local-memory instructions in a loop (register spills)")
        limit = shared_limit(self.arch)
        if self.shared > limit:
            found.append(f"{self.shared} bytes of shared memory over {limit}")
        if self.arch == 90 and self.dots and self.half and not self.hgmma:
            found.append("a 16-bit matmul without HGMMA")
        found += (f"32-bit offset arithmetic: {place}" for place in self.overflows)
        found += self.hazards["races"]
        return found


def kernel_modules() -> list[str]:
    """The names of the ops that have Triton kernels."""
    package = importlib.import_module("fastplm.triton_kernels")
    names = (module.name for module in pkgutil.iter_modules(package.__path__))
    return sorted(name for name in names if not name.startswith("_"))


def compile_op(op: str, arch: int, all_cases: bool = False, uneven: bool = False) -> list[Report]:
    """Compile the cases of one op (those labelled "slow: …" only with ``all_cases``).

    ``uneven``: as if no size or stride were a multiple of 16.
    """
    found, seen = [], set()
    for label, launch in _launches(op, arch, all_cases):
        source, options, key = source_of(launch, uneven)
        if key not in seen:
            seen.add(key)
            found.append((label, launch, _compile(source, arch, options)))
    return _reports(op, arch, found)


def compile_once(op: str, arch: int) -> list[Report]:
    """Compile the first launch of each kernel of an op."""
    first = {}
    for label, launch in _launches(op, arch):
        first.setdefault(launch.kernel.__name__, (label, launch))
    sources = (source_of(launch) for _, launch in first.values())
    code = [_compile(source, arch, options) for source, options, _ in sources]
    found = zip(first.values(), code, strict=True)
    return _reports(op, arch, [(*each, compiled) for each, compiled in found])


def launches_digest(op: str, arch: int) -> tuple[int, str]:
    """How many different launches all cases of an op have, and a hash of these and their code."""
    keys = {
        f"{launch.kernel.cache_key} {source_of(launch)[2]}"
        for _, launch in _launches(op, arch, all_cases=True)
    }
    return len(keys), hashlib.sha256("\n".join(sorted(keys)).encode()).hexdigest()[:16]


def _launches(op: str, arch: int, all_cases: bool = False) -> Iterator[tuple[str, Launch]]:
    """The launches of an op's cases, each with the label of its case."""
    for label, case in importlib.import_module(f"fastplm.triton_kernels.{op}").compile_cases():
        if all_cases or not label.startswith("slow: "):
            with record_launches(arch) as launches:
                case()
            yield from ((label, launch) for launch in launches)


def source_of(launch: Launch, uneven: bool = False) -> tuple[ASTSource, dict[str, int], str]:
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
    source = ASTSource(kernel, signature, constants, attributes)
    return source, options, f"{kernel.__name__} {signature} {constants} {attributes} {options}"


def compile_launch(op: str, label: str, arch: int, launch: Launch) -> Report:
    """Compile one recorded launch."""
    source, options, _ = source_of(launch)
    return _reports(op, arch, [(label, launch, _compile(source, arch, options))])[0]


def timing(launch: Launch, report: Report, turns: Sequence[int], programs: int) -> Timing:
    """How long an SM takes for programs of a launch, see ``timeline.follow``."""
    source, options, _ = source_of(launch)
    cubin = _compile(source, report.arch, options).asm["cubin"]
    ((sass, _),) = disassemble([cubin], report.arch)
    where = (report.arch, report.warps, report.blocks)
    return follow(sass, _text(cubin), *where, turns, programs)


def _type(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return "*" + _TYPES[value.dtype]
    if isinstance(value, bool):
        return "u1"
    if isinstance(value, int):
        return "i32" if -(2**31) <= value < 2**31 else "i64"
    return "fp32"


def _compile(source: ASTSource, arch: int, options: dict[str, int]) -> CompiledKernel:
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def _reports(op: str, arch: int, found: list[tuple[str, Launch, CompiledKernel]]) -> list[Report]:
    """The reports of some (label of the case, launch, compiled kernel)."""
    codes = disassemble([compiled.asm["cubin"] for _, _, compiled in found], arch)
    return [
        _report(op, arch, *each, sass, usage)
        for each, (sass, usage) in zip(found, codes, strict=True)
    ]


def _report(
    op: str, arch: int, label: str, launch: Launch, compiled: CompiledKernel, sass: str, usage: str
) -> Report:
    registers = int(re.search(r"REG:(\d+)", usage).group(1))
    metadata = compiled.metadata
    mix, cycles = machine_code.loop_mix(sass, metadata.num_warps, arch)
    flops, moved = tile_work(compiled.asm["ttir"])
    hazards = find_hazards(compiled.asm["ttgir"], compiled.asm["ptx"], metadata.num_stages)
    hazards["races"] += machine_code.overwritten(sass)
    spills, loop_spills = machine_code.spills(sass)
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
        spills=spills,
        loop_spills=loop_spills,
        shared=metadata.shared,
        blocks=machine_code.blocks_per_sm(
            arch, metadata.num_warps, registers, metadata.shared, metadata.tmem_size
        ),
        hgmma="HGMMA" in sass,
        dots=any(int(rows) >= 64 for rows in _DOT.findall(compiled.asm["ttir"])),
        half=any(kind in str(compiled.src.signature) for kind in ("*fp16", "*bf16")),
        mix=mix,
        cycles=cycles,
        flops=flops,
        moved=moved,
        overflows=offset_overflows(compiled.asm["ttir"], launch, compiled.src.signature),
        hazards=hazards,
    )


_MATMUL = re.compile(r"tt\.dot .*: tensor<(\d+)x(\d+)x\w+> \* tensor<\d+x(\d+)x")
_MEMORY = re.compile(
    r"tt\.(?:load|store|atomic_\w+) .*?(?:tensor<((?:\d+x)+))?!tt\.ptr<[a-z]+(\d+)>"
)


def tile_work(ttir: str) -> tuple[int, int]:
    """(FLOPs of matmuls, bytes loaded and stored) of one iteration of the inner loop.

    They are read from the Triton IR, so they do not depend on the machine code. The loop is chosen
    by the rules of ``machine_code.inner_loop``.
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


_ELF = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_INSTRUCTION = 16  # bytes


def _text(cubin: bytes) -> bytes:
    """The instructions of the one kernel in a cubin, which is an ELF file."""
    header = _ELF.unpack_from(cubin)
    start, count, names = header[6], header[12], header[13]
    sections = [_SECTION.unpack_from(cubin, start + _SECTION.size * i) for i in range(count)]
    texts = []
    for name, _, _, _, offset, size, *_ in sections:
        if cubin.startswith(b".text.", sections[names][4] + name):
            texts.append(cubin[offset : offset + size])
    (text,) = texts
    return text


def disassemble(cubins: list[bytes], arch: int) -> list[tuple[str, str]]:
    """(SASS, resource usage) of each cubin; the addresses continue from cubin to cubin.

    The disassembler takes a third of a second to start, so it starts once for all cubins.
    """
    tools = Path(triton.__file__).parent / "backends/nvidia/bin"

    def printed(content: bytes, tool: str, *options: str) -> str:
        with tempfile.NamedTemporaryFile() as file:
            file.write(content)
            file.flush()
            command = [tools / tool, *options, file.name]
            return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    texts = [_text(cubin) for cubin in cubins]
    name = f"SM{arch}{'a' * (arch >= 90)}"
    sass = printed(b"".join(texts), "nvdisasm", "--binary", name).splitlines()
    lines = [line for line in sass if line.lstrip().startswith("/*")]
    ends = list(itertools.accumulate(len(text) // _INSTRUCTION for text in texts))
    if len(lines) != ends[-1]:
        raise RuntimeError(f"{ends[-1]} instructions were disassembled to {len(lines)} lines")
    return [
        ("\n".join(lines[start:end]), printed(cubin, "cuobjdump", "--dump-resource-usage"))
        for start, end, cubin in zip([0, *ends], ends, cubins, strict=False)
    ]


def compile_all(
    ops: Iterable[str],
    archs: Iterable[int],
    all_cases: bool = False,
    workers: int | None = None,
    uneven: bool = False,
) -> Iterator[Report]:
    """Compile many ops for many architectures, with one process for each core."""
    jobs = [(op, arch, all_cases, uneven) for op in ops for arch in archs]
    with concurrent.futures.ProcessPoolExecutor(workers or os.cpu_count()) as pool:
        for reports in pool.map(compile_op, *zip(*jobs, strict=True)):
            yield from reports


def faults(reports: Iterable[Report]) -> dict[str, int]:
    """How many kernels have each fault, and how many instructions spill."""
    reports = list(reports)
    return {
        "refused": sum(r.shared > shared_limit(r.arch) for r in reports),
        "with a race": sum(bool(r.hazards["races"]) for r in reports),
        "spilled instructions in loops": sum(r.loop_spills for r in reports),
        "outside": sum(r.spills - r.loop_spills for r in reports),
    }


def _print_once(ops: Iterable[str], archs: Iterable[int]) -> int:
    jobs = [(op, arch) for op in ops for arch in archs]
    with concurrent.futures.ProcessPoolExecutor() as pool:
        found = list(itertools.chain(*pool.map(compile_once, *zip(*jobs, strict=True))))
    refused = 0
    for arch in archs:
        kernels = [r for r in found if r.arch == arch]
        counts = faults(kernels)
        refused += counts["refused"]
        shown = ", ".join(f"{count} {name}" for name, count in counts.items())
        print(
            f"Triton {triton.__version__}: {len(kernels)} kernels compiled for sm_{arch}, {shown}"
        )
    return 1 if refused else 0  # races and spills under another Triton are counted alone


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
        spills = f"{r.loop_spills}/{r.spills}"
        code = (r.registers, spills, r.shared, r.blocks, hgmma, f"{unit} {cycles:.0f}")
        rows.append((r.kernel, r.case, f"sm_{r.arch}", r.tiles, r.warps, r.stages, *code))
    return "\n".join("  ".join(row).rstrip() for row in _aligned(rows))


_PAGE = """# The kernels, as compiled

Written by `python benchmarks/static_report.py` with Triton {triton}, without a GPU. Registers,
shared memory and instructions are read from the machine code; blocks, warps and cycles follow from
them by arithmetic. **No time on this page is measured**; [Measured on an
H100](../../../docs/gpu.md) has times.

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
    rates = ", ".join(f"{machine_code.TENSOR_FLOPS[arch]} (sm_{arch})" for arch in ARCHS)
    rates = f"`tensor`: {rates} 16-bit FLOPs a clock; `MUFU`: 16 results a clock."
    devices = ((arch, machine_code.DEVICES[arch]) for arch in ARCHS)
    shares = (f"{d.bytes_per_cycle:.1f} (sm_{arch}, {d.name})" for arch, d in devices)
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
    parser.add_argument("--once", action="store_true", help="count faults of first launches")
    options = parser.parse_args()
    ops, archs = options.ops or kernel_modules(), options.arch or ARCHS
    if options.once:
        return _print_once(ops, archs)
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
