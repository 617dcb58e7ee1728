"""Hazards of compiled kernels: races, and what costs time. Counts of instructions show neither.

Races are found in the Triton GPU IR (``races``). After that IR, Triton adds thread barriers between
ordinary accesses, and proxy fences after copies. Missing ones are found in the PTX: ``unordered``
finds copies that overwrite what other warps have read with no barrier in between (in innermost
loops, as far as source lines tell instructions apart), ``unfenced`` finds missing proxy fences, and
``ptx.fences`` registers that a ``wgmma`` accesses with no ``wgmma.fence``.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from typing import NamedTuple

from ptx.fences import unfenced as unfenced_registers
from ptx.parse import PtxError, parse
from races import LOOPS, TENSOR, Distances, Followed, Module, Op, find_races, search

_DOTS = ("tt.dot", "ttng.warp_group_dot", "ttng.tc_gen5_mma")
_FILE = re.compile(r'\s*\.file\s+(\d+) .*?([^"/]*)"$')
_PLACE = re.compile(r"\s*\.loc\s+(\d+) (\d+) (\d+)(?:.*inlined_at (\d+) (\d+) (\d+))?")
_CALLER = re.compile(r"@\[ ([^\s:]+:\d+:\d+)")
_LABEL = re.compile(r"(\$\w+):")
_BRANCH = re.compile(r"\bbra(?:\.uni)?\s+(\$\w+);")
_GLOBAL = re.compile(r"\b(ld|st)\.global[\w.:]*?(?:\.v(\d))?\.[bfsu](\d+)\b")
_COPY = re.compile(r"\bcp\.async\.c[ag]\.shared\.global .*?\], 0x([0-9a-f]+)")
_ORDERS = {
    "barrier": "bar.sync",
    "wgmma.wait": "wgmma.wait_group",
    "shared": "ld.shared",
    "shared ": "ldmatrix",
}
_KINDS = {
    "tt.load": "ld",
    "tt.store": "st",
    "ttg.async_copy_global_to_local": "cp.async",
}


Place = tuple[str, str]  # source line of an instruction, and of the call that was inlined


class Access(NamedTuple):
    """A load, store or copy with its bytes for one thread, or an instruction that orders these."""

    kind: str
    width: int
    place: Place


def loop_accesses(ptx: str) -> list[list[Access]]:
    """The memory instructions and barriers of each innermost loop."""
    lines = ptx.splitlines()
    labels, files = {}, {}
    for number, line in enumerate(lines):
        if label := _LABEL.match(line):
            labels[label[1]] = number
        elif file := _FILE.match(line):
            files[file[1]] = file[2]
    places, place, inline = [], ("", ""), False
    for before, line in zip(["", *lines], lines, strict=False):
        inline = "// begin inline asm" in line or (inline and "// end inline asm" not in line)
        # LLVM numbers the further lines of inline assembly from its first line on: skip those.
        counted = inline and "// begin inline asm" not in before
        if not counted and (at := _PLACE.match(line)):
            caller = _CALLER.search(line)
            inlined = f"{files.get(at[4], at[4])}:{at[5]}:{at[6]}" if at[4] else ""
            place = f"{files.get(at[1], at[1])}:{at[2]}:{at[3]}", caller[1] if caller else inlined
        places.append(place)
    loops: dict[int, int] = {}
    for number, line in enumerate(lines):
        if (branch := _BRANCH.search(line)) and labels.get(branch[1], number) < number:
            loops[labels[branch[1]]] = number
    inner = (
        range(start, end)
        for start, end in loops.items()
        if not any(start < other and last <= end for other, last in loops.items())
    )
    return [[a for i in loop if (a := _access(lines[i], places[i]))] for loop in inner]


def _access(line: str, place: Place) -> Access | None:
    if found := _GLOBAL.search(line):
        return Access(found[1], int(found[2] or 1) * int(found[3]) // 8, place)
    if found := _COPY.search(line):
        return Access("cp.async", int(found[1], 16), place)
    for kind, pattern in _ORDERS.items():
        if pattern in line:
            return Access(kind.strip(), 0, place)
    return None


def _where(module: Module, op: Op) -> Place:
    """The place of an operation, written as in the PTX."""
    place, *callers = module.place(op.loc).split(" @[ ")
    return place, callers[0].rstrip(" ]") if callers else ""


def _instructions(module: Module, op: Op, kind: str, loop: list[Access]) -> list[int]:
    """The indices of an operation in a loop's code; operations of one place keep their order."""
    place = _where(module, op)
    found = [i for i, access in enumerate(loop) if (access.kind, access.place) == (kind, place)]
    alike = [
        other
        for other in module.ops
        if (other.name, other.loop) == (op.name, op.loop) and _where(module, other) == place
    ]
    each = len(found) // len(alike)
    if each * len(alike) != len(found):
        return found
    start = next(i for i, other in enumerate(alike) if other is op) * each
    return found[start : start + each]


def unordered(module: Module, seen: Followed, loops: list[list[Access]]) -> list[str]:
    """Copies into a buffer that other warps may still read, as no barrier is in between."""
    found: dict[str, None] = {}
    for reader, copy in seen.ordered.values():
        for loop in loops if copy.loop and reader.loop is copy.loop else ():
            if reader.name == "ttng.warp_group_dot":  # its reads end where a thread waits for it
                reads = [i for i, access in enumerate(loop) if access.kind == "wgmma.wait"]
            else:
                reads = _instructions(module, reader, "shared", loop)
            for i in _instructions(module, copy, "cp.async", loop):
                for j in (*range(i - 1, -1, -1), *range(len(loop) - 1, i, -1)):
                    if loop[j].kind == "barrier":
                        break
                    if j in reads:
                        at = module.place(copy.loc).split(" @[")[0].rsplit(":", 1)[0]
                        found[f"race: a copy ({at}) with no barrier since {reader.name}"] = None
                        break
    return list(found)


_PROXIES = re.compile(
    r"(?P<copies>cp\.async\.wait_\w+)|(?P<fence>fence\.proxy\.async)|wgmma\.mma_async|tcgen05\.mma\b"
)


def unfenced(ptx: str) -> list[str]:
    """Matmuls after a wait for copies, with no fence that shows these to the asynchronous proxy.

    On sm_90 this is a race. On sm_100 it is a finding, as Triton leaves some fences out there.
    """
    found: dict[str, None] = {}
    fenced = True
    for each in _PROXIES.finditer(ptx):
        if not fenced and not each.lastgroup:
            kind = "race" if each[0].startswith("wgmma") else "unfenced"
            found[f"{kind}: {each[0]} with no fence since copies were waited for"] = None
        fenced = each.lastgroup != "copies"
    return list(found)


def unordered_registers(ptx: str) -> list[str]:
    """Products of sm_90 that lack a ``wgmma.fence``."""
    if "wgmma.mma_async" not in ptx:
        return []
    try:
        return [f"race: {fault}" for fault in unfenced_registers(parse(ptx))]
    except PtxError as error:  # another version of Triton may write other PTX
        return [f"not modelled: {error}"]


def narrow(module: Module, accesses: list[Access], threads: int) -> list[str]:
    """Accesses in innermost loops that could be wider.

    If a tile has 16 bytes or more for each thread, every access should move 16. A smaller tile is
    reported if a thread needs 8 accesses or more of 1 or 2 bytes: its layout repeats it in threads.
    """
    found: dict[str, None] = {}
    for op in module.ops:
        tile = TENSOR.search(op.text)
        if op.loop is None or op.name not in _KINDS or tile is None:
            continue
        kind = _KINDS[op.name]
        key = kind, _where(module, op)
        widths = [access.width for access in accesses if (access.kind, access.place) == key]
        share = math.prod(map(int, tile[1].split("x")[:-1])) * int(tile[3]) // 8 / threads
        if widths and min(widths) < (16 if share >= 16 else 4 if len(widths) >= 8 else 0):
            pointer = module.pointer(op.operands[0])
            found[f"narrow: {min(widths)}-byte {kind} of {pointer}"] = None
    return list(found)


def unpipelined(module: Module) -> list[str]:
    """Loads whose data a matmul of the same iteration reads, so that it waits for memory."""
    users: dict[str, list[Op]] = {}
    for op in module.ops:
        for name in op.operands:
            users.setdefault(name, []).append(op)
    found: dict[str, None] = {}
    for load in module.ops:
        if load.name != "tt.load" or load.loop is None:
            continue
        reached, stack = set(load.results), list(load.results)
        while stack:
            name = stack.pop()
            for op in users.get(name, ()):
                if op.name in _DOTS and name in op.operands[:2] and _within(op, load.loop):
                    pointer = module.pointer(load.operands[0])
                    found[f"unpipelined: {pointer} is loaded for a matmul that waits for it"] = None
                for result in _handed_on(op, name):
                    if result not in reached:
                        reached.add(result)
                        stack.append(result)
    return list(found)


def _within(op: Op, loop: Op) -> bool:
    inner = op.loop
    while inner is not None and inner is not loop:
        inner = inner.parent.loop if inner.parent else None
    return inner is loop


def _handed_on(op: Op, name: str) -> list[str]:
    """The values that hold the data of value ``name`` after ``op``, in the same iteration."""
    if op.name in ("tt.load", "ttg.async_copy_global_to_local", *_DOTS):
        return []  # the value is a pointer or a mask, or a matmul has multiplied it
    if op.name in ("ttg.local_store", "ttng.tmem_store"):
        return [op.operands[1]] if name == op.operands[0] else []
    if op.name == "scf.yield":
        if op.parent and op.parent.name == "scf.if":
            places = [i for i, operand in enumerate(op.operands) if operand == name]
            return [op.parent.results[i] for i in places]
        return []
    return [] if op.regions and not op.name.endswith(("reduce", "scan")) else op.results


def shallow(module: Module, ahead: Distances, stages: int) -> list[str]:
    """Copies that are issued later than the stages allow, and loops that wait for all copies."""
    found: dict[str, None] = {}
    for loop in (op for op in module.ops if op.name in LOOPS):
        late: dict[int, set[str]] = {}
        for (place, pointer), distances in ahead.items():
            if place == id(loop) and min(distances) < stages - 1:
                late.setdefault(min(distances), set()).add(pointer)
        for distance, pointers in late.items():
            names = ", ".join(sorted(pointers))
            found[f"late: {distance} iterations ahead of {stages - 1}, the copies of {names}"] = (
                None
            )
        inside = [op for op in module.ops if op.loop is loop]
        waits = [op.number("num") for op in inside if op.name == "ttg.async_wait"]
        if waits and stages > 2 and not any(waits) and not late:
            copies = (op for op in inside if op.name == "ttg.async_copy_global_to_local")
            names = ", ".join(sorted({module.pointer(op.operands[0]) for op in copies}))
            found[f"drained: a loop waits for all of its copies, of {names}"] = None
    return list(found)


def find_hazards(ttgir: str, ptx: str, stages: int) -> dict[str, list[str]]:
    """Faults ("races"), costs of time ("findings"), and for the loops the widths of their accesses
    ("widths") and the number of iterations that copies are ahead ("ahead").
    """
    try:
        module = Module(ttgir)
        seen = find_races(module)
    except (ValueError, LookupError) as error:  # another version of Triton may print another IR
        wrong = [f"not modelled: {type(error).__name__}: {error}"]
        return {"races": wrong, "findings": [], "widths": [], "ahead": []}
    loops = loop_accesses(ptx)
    accesses = [access for loop in loops for access in loop if access.width]
    threads = 32 * int(search(r'"ttg\.num-warps" = (\d+)', ttgir)[1])
    proxies = unfenced(ptx)
    findings = narrow(module, accesses, threads)
    findings += (line for line in proxies if line.startswith("unfenced"))
    waiting = unpipelined(module)
    if stages > 1:
        findings += waiting + shallow(module, seen.ahead, stages)
    elif waiting:
        findings.append("unpipelined: one stage, nothing is loaded ahead")
    counts = Counter((access.kind, access.width) for access in accesses)
    return {
        "races": [
            *seen.wrong,
            *unordered(module, seen, loops),
            *(line for line in proxies if line.startswith("race")),
            *unordered_registers(ptx),
        ],
        "findings": findings,
        "widths": [f"{kind} {width}: {count}" for (kind, width), count in sorted(counts.items())],
        "ahead": sorted(f"{name}: {sorted(each)}" for (_, name), each in seen.ahead.items()),
    }
