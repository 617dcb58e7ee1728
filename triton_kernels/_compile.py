"""Compile every kernel to machine code with no GPU, and read what the compiler made of it.

Each kernel file has a ``compile_cases()`` that calls its launchers on meta tensors. Their launches
are recorded, so what is compiled is what would be launched: the same argument types, the same
specialisation of ones and multiples of 16, the launch table of the architecture. The assembler and
disassembler come with the Triton wheel.

    python -m fastplm.triton_kernels._compile [--all] [--arch 90] [name …]     prints the table
"""

from __future__ import annotations

import argparse
import concurrent.futures
import importlib
import json
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
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fastplm.triton_kernels._launch import Launch, record_launches

ARCHS = (80, 90, 100)
#: Bytes of shared memory one block may take (CUDA C++ programming guide, table of capabilities).
SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
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


@dataclass(frozen=True)
class Report:
    """What one kernel became in one configuration on one architecture."""

    op: str
    kernel: str
    case: str
    arch: int
    tiles: str
    registers: int
    spills: int
    shared: int
    hgmma: bool
    dots: bool
    half: bool

    def problems(self) -> list[str]:
        """Why this kernel must not ship; empty if it may."""
        found = []
        if self.spills:
            found.append(f"{self.spills} local-memory instructions (register spills)")
        if self.shared > SHARED_LIMIT[self.arch]:
            found.append(f"{self.shared} bytes of shared memory over {SHARED_LIMIT[self.arch]}")
        if self.arch == 90 and self.dots and self.half and not self.hgmma:
            found.append("a 16-bit matmul without HGMMA")
        return found


def kernel_modules() -> list[str]:
    """The stems of the kernel files."""
    package = importlib.import_module("fastplm.triton_kernels")
    names = (module.name for module in pkgutil.iter_modules(package.__path__))
    return sorted(name for name in names if not name.startswith("_"))


def compile_op(op: str, arch: int, all_cases: bool = False) -> list[Report]:
    """Compile the cases of one kernel file (those labelled "slow: …" only with ``all_cases``)."""
    module = importlib.import_module(f"fastplm.triton_kernels.{op}")
    reports, seen = [], set()
    for label, case in module.compile_cases():
        if label.startswith("slow: ") and not all_cases:
            continue
        with record_launches(arch) as launches:
            case()
        for launch in launches:
            source, options, key = _source(launch)
            if key not in seen:
                seen.add(key)
                reports.append(_compile(op, label, arch, launch, source, options))
    return reports


def _source(launch: Launch) -> tuple[ASTSource, dict[str, int], str]:
    """The launch as the JIT would specialise it, its compile options, and a key for both."""
    kernel, given = launch.kernel, dict(launch.arguments)
    options = {name: given.pop(name) for name in ("num_warps", "num_stages") if name in given}
    signature, constants, attributes = {}, {}, {}
    for index, parameter in enumerate(kernel.params):
        value = given.pop(parameter.name)
        if parameter.is_constexpr or value is None or (type(value) is int and value == 1):
            signature[parameter.name] = "constexpr"
            constants[index,] = value
            continue
        signature[parameter.name] = _type(value)
        if isinstance(value, torch.Tensor) or (type(value) is int and value % 16 == 0):
            attributes[index,] = [["tt.divisibility", 16]]
    if given:
        raise TypeError(f"{kernel.__name__} has no arguments {sorted(given)}")
    source = ASTSource(kernel, signature, constants, attributes)
    return source, options, f"{kernel.__name__} {signature} {constants} {attributes} {options}"


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
    blocks = (
        f"{name[6:].lower()}={value}"
        for name, value in launch.arguments.items()
        if name.startswith("BLOCK_")
    )
    return Report(
        op=op,
        kernel=launch.kernel.__name__.strip("_").removesuffix("_kernel"),
        case=label.removeprefix("slow: "),
        arch=arch,
        tiles=" ".join([*blocks, f"w={options.get('num_warps', 4)}"]),
        registers=int(re.search(r"REG:(\d+)", usage).group(1)),
        spills=len(re.findall(r"\b(?:LDL|STL)\b", sass)),
        shared=compiled.metadata.shared,
        hgmma="HGMMA" in sass,
        dots="tt.dot" in compiled.asm["ttir"],
        half=any(kind in str(source.signature) for kind in ("*fp16", "*bf16")),
    )


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
    ops: Iterable[str], archs: Iterable[int], all_cases: bool = False, workers: int | None = None
) -> Iterator[Report]:
    """Compile many ops for many architectures, a process per core."""
    jobs = [(op, arch, all_cases) for op in ops for arch in archs]
    with concurrent.futures.ProcessPoolExecutor(workers or os.cpu_count()) as pool:
        for reports in pool.map(compile_op, *zip(*jobs, strict=True)):
            yield from reports


def table(reports: Iterable[Report]) -> str:
    """The reports as aligned text."""
    rows = [("kernel", "configuration", "arch", "tiles", "regs", "spills", "shared", "HGMMA")]
    for r in reports:
        hgmma = ("yes" if r.hgmma else "no") if r.dots else "-"
        row = (r.kernel, r.case, f"sm_{r.arch}", r.tiles, r.registers, r.spills, r.shared, hgmma)
        rows.append(tuple(map(str, row)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("ops", nargs="*", metavar="name", help="kernel files; default all")
    parser.add_argument("--arch", type=int, action="append", choices=ARCHS)
    parser.add_argument("--all", action="store_true", help="the slow cases too")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    options = parser.parse_args()
    reports = list(compile_all(options.ops or kernel_modules(), options.arch or ARCHS, options.all))
    if options.json:
        print("\n".join(json.dumps(asdict(report)) for report in reports))
    else:
        print(table(reports))
    bad = [(report, problem) for report in reports for problem in report.problems()]
    for report, problem in bad:
        print(f"{report.kernel} [{report.case}] sm_{report.arch}: {problem}", file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
