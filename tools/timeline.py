"""The time that compiled code takes on one SM, simulated from the waits in its machine code.

ptxas writes into every instruction when the next one may issue, which scoreboards it sets, and
which it waits for. The simulation issues the instructions of each warp in order by these rules, on
the pipes of an SM: one cycle of a scheduler for each instruction, matrix products that run beside
the warps until a wait, copies ahead, barriers, memory with a latency and a rate. So work that
overlaps in the code overlaps here, too. A program's start and end are simulated, and whole waves of
programs.

The simulation does not know which of two ready warps the hardware prefers (here the one that waited
longest), caches (here loads in a loop come from the L2, others from memory), branches inside a loop
(here the code continues in its order, also where Triton made one loop of two), clocks that fall
under load, and the matrix units of sm_100, which signal by other means. It was never compared with
a device. The rates and latencies below are the only measured numbers.
"""

from __future__ import annotations

import heapq
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import machine_code
from machine_code import Instruction

#: Architectures whose code can be simulated.
ARCHS = (80, 86, 89, 90, 120)

#: Cycles until a result can be used, on an H100, measured by Luo et al. (2024, arXiv 2402.13499).
#: The latencies of special functions, barriers and the end of a product are assumed.
LATENCY = {"shared": 29, "l1": 41, "l2": 263, "memory": 479} | {
    "mufu": 22,
    "shuffle": 24,
    "other": 20,
}
BARRIER, PRODUCT_END, OPERANDS_READ, NEXT_PROGRAM = 16, 24, 12, 400
#: Bytes that the L2 gives one SM in a cycle, if all SMs read. On an H100 28 were measured
#: (Chips and Cheese 2023: 5.6 TB/s for 114 SMs); products with tiles of 128x256 that reach 650
#: TFLOP/s without multicast read 30.
L2_BYTES = 30.0
#: The longest queue in front of a pipe that is beside the schedulers, in cycles of work.
QUEUE = 48.0


class Control(NamedTuple):
    """The control bits of an instruction (bits 105 to 121), the same since Volta."""

    stall: int
    writes: int  # scoreboard that is set until the result is there; 7: none
    reads: int  # scoreboard that is set until the operands are read; 7: none
    waits: tuple[int, ...]


def controls(text: bytes) -> list[Control]:
    """The control bits of each instruction in the text section of a cubin."""
    found = []
    for place in range(0, len(text), 16):
        bits = int.from_bytes(text[place : place + 16], "little") >> 105
        waits = tuple(i for i in range(6) if bits >> 11 & 1 << i)
        found.append(Control(bits & 15, bits >> 5 & 7, bits >> 8 & 7, waits))
    return found


class Step(NamedTuple):
    """An instruction, as the simulation needs it."""

    name: str
    kind: str
    control: Control
    pipe: str  # "" if the instruction takes an issue slot alone
    cycles: float  # cycles of that pipe
    latency: int
    bytes: float  # bytes that a warp loads from or stores to global memory
    pending: int  # groups that a wait leaves in flight


@dataclass
class Timing:
    """The result of a simulation, in cycles."""

    cycles: float
    #: Cycles that all warps together waited, by what they waited for.
    waited: dict[str, float]
    #: Cycles that each pipe worked; a scheduler's own pipe counts as the mean of the four.
    worked: dict[str, float]

    def reason(self) -> str:
        """The busiest pipe and the longest wait, as shares of the time."""
        pipe, busy = max(self.worked.items(), key=lambda item: item[1])
        total = sum(self.waited.values())
        name, wait = max(self.waited.items(), key=lambda item: item[1])
        return f"{pipe} {busy / self.cycles:.0%}, warps wait for {name} {wait / total:.0%}"


_BASE = re.compile(r"\[(U?R\d+)")
_WAITS = {"WARPGROUP.DEPBAR.LE": "products", "DEPBAR.LE": "copies"}
_PENDING = re.compile(r"(0x[0-9a-f]+)\s*$")
#: Bytes that a thread moves, by a part of the name.
_WIDTHS = {"128": 16, "64": 8, "U16": 2, "S16": 2, "U8": 1, "S8": 1}
#: Instructions for which a scheduler has 16 lanes, not 32.
_ALU = set(machine_code._GROUPS["integer"].split()) - {"IMAD", "MOV", "F2F", "F2I", "I2F", "CS2R"}


def step(code: list[Instruction], place: int, control: Control, arch: int, in_loop: bool) -> Step:
    """The step of one instruction."""
    one = code[place]
    root, *parts = one.name.split(".")
    memory = "l2" if in_loop else "memory"
    wide = next((_WIDTHS[part] for part in parts if part in _WIDTHS), 4)
    if one.kind == "tensor":
        flops, operands = machine_code._tensor_work(code, place, 4)
        cycles = max(flops / machine_code.TENSOR_FLOPS[arch], operands / 128)
        kind = "product" if root == "HGMMA" else "plain"
        return Step(root, kind, control, "tensor", cycles, 0, 0, int("gsb0" in one.operands))
    if one.name == "WARPGROUP.DEPBAR.LE":
        return Step(
            root, "products", control, "", 0, 0, 0, int(_PENDING.search(one.operands)[1], 16)
        )
    if one.name == "DEPBAR.LE":
        return Step(root, "copies", control, "", 0, 0, 0, int(_PENDING.search(one.operands)[1], 16))
    if root == "LDGDEPBAR":
        return Step(root, "group", control, "", 0, 0, 0, 0)
    if root == "BAR":
        if "SYNC" not in parts or "," in one.operands:
            raise ValueError(f"a barrier of some warps is not modelled: {one.name} {one.operands}")
        return Step(root, "barrier", control, "", 0, 0, 0, 0)
    if root.startswith(("UTC", "SYNCS", "UTMA", "UBLKCP")):
        raise ValueError(f"not modelled: {one.name}")
    if one.predicated and one.operands.startswith("RZ"):  # padding of ptxas, never executed
        return Step(root, "plain", control, "", 0, 0, 0, 0)
    if root == "LDGSTS":
        return Step(root, "copy", control, "shared", wide / 4, LATENCY[memory], 32 * wide, 0)
    if root in ("LDG", "STG", "LD", "ST", "RED", "REDG", "ATOM", "ATOMG", "LDL", "STL"):
        return Step(root, "global", control, "shared", wide / 4, LATENCY[memory], 32 * wide, 0)
    if one.kind == "shared":
        cycles = machine_code._width(one.name) / 128
        return Step(root, "beside", control, "shared", cycles, LATENCY["shared"], 0, 0)
    if one.kind == "shuffle":
        return Step(root, "beside", control, "shared", 1, LATENCY["shuffle"], 0, 0)
    if one.kind == "mufu" or root in ("I2F", "F2I", "F2F", "I2FP", "POPC", "FLO"):
        return Step(root, "beside", control, "MUFU", 8, LATENCY["mufu"], 0, 0)
    pipe, cycles = "", 0.0
    if one.kind == "fp32" or root in ("IMAD", "MOV"):
        half = arch == 80 or root == "IMAD"
        pipe, cycles = "FMA", 2 if half else 1
    elif root in _ALU:
        pipe, cycles = "ALU", 2
    return Step(root, "plain", control, pipe, cycles, LATENCY["other"], 0, 0)


def nest(code: list[Instruction]) -> list[set[int]]:
    """The inner loop and those around it, as places in ``code``; none if there is no loop."""
    place = {instruction.address: i for i, instruction in enumerate(code)}
    inner = {place[instruction.address] for instruction in machine_code.inner_loop(code)}
    if len(inner) == len(code):
        return []
    around = [body for body in machine_code._loops(code) if inner < body]
    return [inner, *sorted(around, key=len)]


def path(code: list[Instruction], loops: list[set[int]], turns: Sequence[int]) -> list[int]:
    """The places that a warp executes, from the beginning through the loops to the end.

    Args:
        loops: as ``nest`` gives them, the inner one first.
        turns: turns of each loop, for one turn of the loop around it.

    Other loops run once. After any other branch the path continues with the next instruction.
    """
    edges = machine_code._successors(code)
    backward: list[list[int]] = [[] for _ in code]
    for node, following in enumerate(edges):
        for other in following:
            backward[other].append(node)
    ends = [i for i, one in enumerate(code) if one.name == "EXIT"]
    to_end = set().union(*(machine_code._reach(backward, node) for node in ends))
    to_inner = machine_code._reach(backward, min(loops[0])) if loops else set()
    heads = [min(body) for body in loops]
    left, wants = list(turns), bool(loops)
    place, found, seen = 0, [], Counter()
    while code[place].name != "EXIT" or code[place].predicated:
        found.append(place)
        seen[place] += 1
        if place in heads:
            level = heads.index(place)
            left[level] -= 1
            left[:level] = turns[:level]
            wants = level > 0
        options = edges[place][::-1]  # the next instruction before a jump
        stays = [body for body, turn in zip(loops, left, strict=True) if place in body and turn > 0]
        done = [body for body, turn in zip(loops, left, strict=True) if place in body and not turn]
        if code[place].name == "EXIT" and done and not stays and not wants:
            return found  # the loop ends in the program's EXIT
        if wants:  # the path has yet to enter the inner loop
            inside = [o for o in options if o in to_inner and (o > place or o in heads)]
        elif stays and stays[0] is loops[0]:
            inside = [o for o in options if o in loops[0]]
        else:
            inside = [o for o in options if not any(o in body for body in done)]
            inside = [o for o in inside if all(o in body for body in stays)] or inside
            inside = [o for o in inside if o > place or o in heads]
        forward = [o for o in options if o > place]
        place = next(iter([*inside, *forward, *(o for o in options if o in to_end)]), -1)
        if place < 0 or len(found) > 100_000:
            raise ValueError("no way through the code was found")
    return [*found, place]


@dataclass
class _Warp:
    number: int  # number of the warp in its block
    at: int = 0
    ready: float = 0.0
    #: When each scoreboard is free, and what it waits for.
    scoreboards: list[tuple[float, str]] = field(default_factory=lambda: [(0.0, "")] * 6)
    copied: float = 0.0  # when the copies since the last group have landed
    groups: list[float] = field(default_factory=list)  # when each group of copies has landed
    products: int = 0  # products that the warp has issued
    commits: list[int] = field(default_factory=list)  # the last product of each group


@dataclass
class _Block:
    warps: list[_Warp]
    arrived: list[_Warp] = field(default_factory=list)
    #: By warp group and product: how many of the four warps have issued it, and when it ends.
    issued: dict[tuple[int, int], int] = field(default_factory=Counter)
    ends: dict[tuple[int, int], float] = field(default_factory=dict)
    waiting: dict[tuple[int, int], list[_Warp]] = field(default_factory=dict)
    running: int = 0


def simulate(steps: list[Step], warps: int, blocks: int, programs: int) -> Timing:
    """The time of ``programs`` programs of a kernel, on an SM with room for ``blocks`` at once."""
    waited: Counter[str] = Counter()
    worked: Counter[str] = Counter()
    issue = [0.0] * 4
    pipes: dict[tuple[str, int], float] = {}
    memory = end = 0.0
    heap: list[tuple[float, int, _Block, _Warp]] = []
    every: list[_Block] = []
    serial, begun = 0, 0

    def push(time: float, block: _Block, warp: _Warp) -> None:
        nonlocal serial
        serial += 1
        warp.ready = time
        heapq.heappush(heap, (time, serial, block, warp))

    def begin(time: float) -> None:
        nonlocal begun
        begun += 1
        block = _Block([_Warp(number) for number in range(warps)], running=warps)
        every.append(block)
        for warp in block.warps:
            push(time, block, warp)

    def after(block: _Block, warp: _Warp, time: float) -> None:
        """The warp continues at ``time``, or when its next instruction's scoreboards are free."""
        nonlocal end
        warp.at += 1
        if warp.at == len(steps):
            block.running -= 1
            end = max(end, time)
            if not block.running and begun < programs:
                begin(time + NEXT_PROGRAM)
            return
        boards = [warp.scoreboards[i] for i in steps[warp.at].control.waits]
        free, name = max(boards, default=(time, ""))
        if free > time:
            waited[name] += free - time
        push(max(time, free), block, warp)

    for _ in range(min(blocks, programs)):
        begin(0.0)
    while heap:
        time, _, block, warp = heapq.heappop(heap)
        one, scheduler = steps[warp.at], warp.number % 4
        # The instruction starts when it has an issue slot and the pipe has room.
        start = max(time, issue[scheduler])
        side = one.kind in ("beside", "copy", "global")
        key = (one.pipe, -1 if one.pipe == "shared" else scheduler)
        if one.pipe and one.kind != "product":
            start = max(start, pipes.get(key, 0.0) - (QUEUE if side else 0.0))
        if start > time:
            if start > issue[scheduler]:
                waited[one.pipe] += start - time
            push(start, block, warp)
            continue
        issue[scheduler] = start + 1
        worked["issue"] += 0.25
        control, done = one.control, start
        following = start + max(control.stall, 1)
        if one.kind == "product":
            group = warp.number // 4
            which = (group, warp.products)
            warp.products += 1
            block.issued[which] += 1
            if one.pending:
                warp.commits.append(which[1])
            if block.issued[which] == min(4, warps):
                # The four warps multiply together, and the tiles in shared memory are read once.
                begun_at = max(start, *(pipes.get(("tensor", s), 0.0) for s in range(4)))
                finish = begun_at + one.cycles
                for s in range(4):
                    pipes["tensor", s] = finish
                worked["tensor"] += one.cycles
                block.ends[which] = finish + PRODUCT_END
                for other in block.waiting.pop(which, ()):
                    waited["products"] += max(0.0, finish + PRODUCT_END - other.ready)
                    after(block, other, max(other.ready, finish + PRODUCT_END))
        elif one.pipe:
            begun_at = max(start, pipes.get(key, 0.0))
            pipes[key] = begun_at + one.cycles
            worked[one.pipe] += one.cycles / (1 if key[1] < 0 else 4)
            done = begun_at + one.cycles + (one.latency if side else 0)
            if one.bytes:
                memory = max(memory, start) + one.bytes / L2_BYTES
                worked["L2"] += one.bytes / L2_BYTES
                done = max(done, memory + one.latency)
        else:
            done = start + one.latency
        name = one.kind if one.kind != "beside" else one.name
        if control.writes < 6 and one.kind != "group":
            board = warp.scoreboards[control.writes]
            warp.scoreboards[control.writes] = max(board, (done, name))
        if control.reads < 6:
            board = warp.scoreboards[control.reads]
            warp.scoreboards[control.reads] = max(board, (start + OPERANDS_READ, "operands"))
        if one.kind == "copy":
            warp.copied = max(warp.copied, done)
        elif one.kind == "group":
            warp.groups.append(max(warp.copied, warp.groups[-1] if warp.groups else 0.0))
        elif one.kind == "copies" and len(warp.groups) > one.pending:
            there = warp.groups[len(warp.groups) - 1 - one.pending]
            if there > following:
                waited["copies"] += there - following
                following = there
        elif one.kind == "products":
            if len(warp.commits) > one.pending:
                which = (warp.number // 4, warp.commits[len(warp.commits) - 1 - one.pending])
                if which not in block.ends:
                    warp.ready = following
                    block.waiting.setdefault(which, []).append(warp)
                    continue
                if block.ends[which] > following:
                    waited["products"] += block.ends[which] - following
                    following = block.ends[which]
        elif one.kind == "barrier":
            warp.ready = following
            block.arrived.append(warp)
            if len(block.arrived) == warps:
                release = start + BARRIER
                for other in block.arrived:
                    waited["a barrier"] += max(0.0, release - other.ready)
                    after(block, other, max(other.ready, release))
                block.arrived = []
            continue
        after(block, warp, following)
    if begun < programs or any(block.running for block in every):
        raise ValueError("the warps wait for each other for ever")
    return Timing(end, dict(waited), dict(worked))


def follow(
    sass: str, text: bytes, arch: int, warps: int, blocks: int, turns: Sequence[int], programs: int
) -> Timing:
    """The time of ``programs`` programs on one SM.

    Args:
        text: the instructions, see ``compile_kernels``.
        blocks: blocks that the SM holds at once.
        turns: turns of the inner loop, then of the loops around it; 1 for loops not given. If the
            code has fewer loops, the numbers of the inner two are multiplied.

    Long runs are extrapolated from their last waves and outermost turns, which repeat.
    """
    if arch not in ARCHS:
        raise ValueError(f"arch must be one of {ARCHS}, got {arch}: its waits are not modelled")
    code, control = machine_code.parse(sass), controls(text)
    if len(code) != len(control):
        raise ValueError(f"{len(control)} instructions, {len(code)} of them read")
    loops = nest(code)
    inside = loops[0] if loops else set()
    every = [step(code, i, control[i], arch, i in inside) for i in range(len(code))]
    seen: set[str] = set()
    for i in sorted(inside):
        if every[i].name == "LDG" and "128" not in code[i].name:
            base = _BASE.search(code[i].operands)[1]
            if base in seen:  # in a cache line that was just loaded
                every[i] = every[i]._replace(latency=LATENCY["l1"], bytes=0)
            seen.add(base)
    while len(turns) > len(loops) > 0:
        turns = [turns[0] * turns[1], *turns[2:]]
    turns = [*turns, *[1] * len(loops)][: len(loops)]
    outer = max((i for i, turn in enumerate(turns) if turn > 1), default=0)

    def run(most: int, count: int) -> Timing:
        some = [min(turn, most) if i == outer else turn for i, turn in enumerate(turns)]
        return simulate([every[i] for i in path(code, loops, some)], warps, blocks, count)

    few, waves = (_TURNS if outer == 0 else _OUTER_TURNS), min(programs, _WAVES * blocks)
    found = run(few, waves)
    cycles = found.cycles
    if programs > waves:
        cycles += (cycles - run(few, waves - blocks).cycles) * (programs - waves) / blocks
    if turns and turns[outer] > few:
        turn = (found.cycles - run(few // 2, waves).cycles) / (few - few // 2)
        cycles *= 1 + turn * (turns[outer] - few) / found.cycles
    scale = cycles / found.cycles
    return Timing(
        cycles,
        {name: value * scale for name, value in found.waited.items()},
        {name: value * scale for name, value in found.worked.items()},
    )


#: So much of a run is simulated: turns of an inner loop, turns of an outer loop, waves of programs.
_TURNS, _OUTER_TURNS, _WAVES = 8, 2, 3
