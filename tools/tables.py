"""Launch configurations of a kernel beside each other, by the machine code that each becomes.

    python tools/tables.py linear_distillation --kernel linear_distillation_fwd --arch 90 \\
        --case "bfloat16 E=768 js" --try "BLOCK_N=64,128 BLOCK_V=64 num_warps=4,8 num_stages=2,3"

The launch that a case of the op makes is compiled as shipped (marked ``*``), then with every
combination of the values that are tried; the best stand last. No GPU is needed, nothing is
measured, and no table is written. A launcher may derive other arguments from a configuration, its
grid before all: none of them changes the code of an iteration.

Columns: ``tiles``, where they differ; ``regs``; ``spills``, accesses of local memory in an inner
loop and outside; ``smem_KB``; ``blocks``, and ``warps`` in all, that an SM holds; ``memory``, what
an iteration of the inner loop asks of it (LDGSTS is waited for in a later one, LDG in this);
``ahead``, how many iterations each copy runs ahead; ``bound``, the cycles of an iteration of one
block and the unit that sets them; ``per_work``, the same for a million FLOPs of the matmuls, or for
a KB moved where there are none, and ``sum_per_work``, if matmuls and what they read never overlap
arithmetic; ``KB/MFLOP``, what small tiles read again and again; ``waits``, what ``--findings`` of
``compile_kernels`` says, and why a configuration may not ship.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import re
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from compile_kernels import ARCHS, SMALLER_ARCHS, Report, aligned, compile_launch, launches_of
from fastplm.triton_kernels._launch import Launch

Config = dict[str, int]


def configs_of(texts: Iterable[str]) -> list[Config]:
    """Every combination of each text, ``"BLOCK_N=64,128 num_warps=4"``."""
    found = []
    for text in texts:
        pairs = (each.split("=") for each in text.split())
        values = {name: [int(value) for value in each.split(",")] for name, each in pairs}
        found += [
            dict(zip(values, each, strict=True)) for each in itertools.product(*values.values())
        ]
    return found


def chosen_launches(op: str, arch: int, kernel: str, case: str) -> Iterator[tuple[str, Launch]]:
    """The first launch of every kernel whose name matches, of the cases whose label does.

    Both are regular expressions that must match to the end; a case's "slow: " is no part of it.
    """
    seen = set()
    for label, launch in launches_of(op, arch, all_cases=True):
        name = launch.kernel.__name__.strip("_").removesuffix("_kernel")
        label = label.removeprefix("slow: ")
        key = name, label
        if key not in seen and re.fullmatch(kernel, name) and re.fullmatch(case, label):
            seen.add(key)
            yield label, launch


def tried(
    op: str, label: str, arch: int, launch: Launch, configs: Iterable[Config]
) -> Iterator[tuple[bool, Report | str]]:
    """(whether it is the shipped one, its report, or why there is none) of each configuration."""
    known = {parameter.name for parameter in launch.kernel.params} | {"num_warps", "num_stages"}
    shipped = launch.arguments
    alike: list[dict[str, Any]] = []
    for config in ({}, *configs):
        if unknown := config.keys() - known:
            raise SystemExit(f"{launch.kernel.__name__} has no {', '.join(sorted(unknown))}")
        arguments = shipped | config
        if arguments in alike:
            continue
        alike.append(arguments)
        try:
            each = dataclasses.replace(launch, arguments=arguments)
            yield not config, compile_launch(op, label, arch, each)
        except Exception as error:  # of Triton's compiler or the assembler: it is no candidate
            what = " ".join(f"{name}={value}" for name, value in config.items())
            yield False, f"{what}: {type(error).__name__}: {str(error).strip().splitlines()[-1]}"


def costs(report: Report) -> tuple[float, float]:
    """Cycles for the same work, a million FLOPs or else a KB: at best, and if nothing overlaps."""
    unit = report.cycles
    summed = max(unit["tensor"], unit["shared"]) + max(unit["issue"], unit["MUFU"])
    work = report.flops / 1e6 if report.flops else report.moved / 1024
    return report.bound()[1] / (work or 1), summed / (work or 1)


def table(found: Iterable[tuple[bool, Report]]) -> str:
    """The configurations as aligned text, the best last; those that may not ship come first."""
    head = (
        "tiles warps stages regs spills smem_KB blocks warps memory ahead bound per_work "
        "sum_per_work KB/MFLOP waits"
    )
    rows: list[tuple[Any, ...]] = [("", *head.split())]
    found = sorted(found, key=lambda each: (not each[1].problems(), [-c for c in costs(each[1])]))
    alike = set.intersection(*(set(r.tiles.split()) for _, r in found)) if len(found) > 1 else ()
    for shipped, r in found:
        unit, cycles = r.bound()
        best, summed = costs(r)
        again = f"{r.moved / 1024 / (r.flops / 1e6):.1f}" if r.flops else "-"
        memory = " ".join(f"{name}:{count}" for name, count in r.accesses.items())
        waits = "; ".join([*r.problems(), *r.hazards["findings"]])
        outside = r.spills - r.loop_spills
        rows.append(
            (
                "*" * shipped,
                " ".join(tile for tile in r.tiles.split() if tile not in alike) or "-",
                r.warps,
                r.stages,
                r.registers,
                f"{r.loop_spills}/{outside}",
                f"{r.shared / 1024:.0f}",
                r.blocks,
                r.blocks * r.warps,
                memory or "-",
                ", ".join(r.hazards["ahead"]) or "-",
                f"{unit} {cycles:.0f}",
                f"{best:.0f}",
                f"{summed:.0f}",
                again,
                waits or "-",
            )
        )
    return aligned(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("op")
    parser.add_argument("--kernel", default=".*", help="regular expression, without _ and _kernel")
    parser.add_argument("--case", default=".*", help="regular expression of the case's label")
    parser.add_argument("--arch", type=int, action="append", choices=ARCHS + SMALLER_ARCHS)
    parser.add_argument(
        "--try", dest="tries", action="append", default=[], metavar="NAME=1,2 …", help="repeatable"
    )
    options = parser.parse_args()
    configs, any_launch = configs_of(options.tries), False
    for arch in options.arch or ARCHS:
        for label, launch in chosen_launches(options.op, arch, options.kernel, options.case):
            any_launch = True
            print(f"{launch.kernel.__name__.strip('_')} [{label}] sm_{arch}")
            reports = []
            for shipped, report in tried(options.op, label, arch, launch, configs):
                if isinstance(report, str):
                    print(f"  does not compile: {report}")
                else:
                    reports.append((shipped, report))
            print(table(reports) + "\n", flush=True)
    if not any_launch:
        print("no launch matches", file=sys.stderr)
    return 0 if any_launch else 1


if __name__ == "__main__":
    sys.exit(main())
