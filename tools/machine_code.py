"""What a kernel's machine code says about its speed, by arithmetic alone.

The inner loop is a natural loop of the control flow graph: its head dominates a branch back to it.
(A backward branch alone is not enough: the out-of-line waits that ptxas places behind a kernel end
in one, too.) Every instruction in the loop is counted once for every warp, so a branch inside the
loop counts as taken. A load or store counts all its bytes, without bank conflicts.

Rates per SM and clock: CUDA C++ programming guide, table of arithmetic throughput (16 special
functions, 32 shuffled lanes, 4 schedulers of one warp instruction each, 128 bytes of shared
memory); the dense 16-bit tensor rates are those of the architectures' white papers. Limits of an
SM: its table of compute capabilities.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from fastplm.triton_kernels._launch import SHARED_PER_SM


class Device(NamedTuple):
    """A GPU of an architecture: its SMs, their clock, and the bandwidth of its memory."""

    name: str
    sms: int
    clock: float
    bytes_per_s: float

    @property
    def bytes_per_cycle(self) -> float:
        """The share of memory that one SM has, if all of them read."""
        return self.bytes_per_s / self.sms / self.clock


#: Numbers of the data sheets of A100 80GB, A40, L40S, RTX PRO 6000 Blackwell and B200 (its clock
#: follows from its dense bf16 FLOPs). The H200 has a clock of 1.755 GHz and the measured bandwidth
#: of a copy, read and write.
DEVICES = {
    80: Device("A100", 108, 1.41e9, 2.039e12),
    86: Device("A40", 84, 1.74e9, 0.696e12),
    89: Device("L40S", 142, 2.52e9, 0.864e12),
    90: Device("H200", 132, 1.755e9, 4.3e12),
    100: Device("B200", 148, 1.855e9, 8.0e12),
    120: Device("RTX PRO 6000", 188, 2.617e9, 1.792e12),
}
#: 16-bit FLOPs of the tensor cores per SM and clock. GeForce cards with sm_86 to sm_120 have half
#: of these if the sum is fp32.
TENSOR_FLOPS = {80: 2048, 86: 1024, 89: 1024, 90: 4096, 100: 8192, 120: 1024}
#: FLOPs of the fp32 lanes per SM and clock: 64 lanes, later 128, one multiply-add each.
FP32_FLOPS = {80: 128, 86: 256, 89: 256, 90: 256, 100: 256, 120: 256}
#: (blocks, warps) that an SM holds at most.
_RESIDENT = {80: (32, 64), 86: (16, 48), 89: (24, 48), 90: (32, 64), 100: (32, 64), 120: (24, 48)}


_LINE = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?([A-Z][\w.]*)\s*([^;]*);", re.M)
_TENSOR = re.compile(r"(UTC)?[A-Z]*MMA$")
_GROUPS = {
    "mufu": "MUFU",
    "fp32": "FFMA FMUL FADD FFMA2 FMUL2 FADD2 HFMA2 HMUL2 HADD2",
    # Conversions, selections and comparisons run on the lanes that do integers and logic.
    "integer": """IMAD IADD IADD2 IADD3 IABS IMNMX VIADD VIMNMX VIMNMX3 VIADDMNMX ISETP LOP3
        PLOP3 SEL FSEL FSETP FMNMX FMNMX3 HSETP2 HMNMX2 PRMT SHF SHL SHR LEA MOV P2R R2P P2UR R2UR
        SGXT BMSK FLO POPC F2F F2FP F2I I2F I2FP I2I CS2R""",
    "shared": "LDS STS LDSM STSM",
    "global": "LDG LDGSTS STG LD ST RED REDG ATOM ATOMG UBLKCP UTMALDG UTMASTG",
    "shuffle": "SHFL REDUX",
    "barrier": "BAR SYNCS WARPSYNC WARPGROUP",
}
_GROUP = {root: group for group, roots in _GROUPS.items() for root in roots.split()}
#: The kinds that the instructions of a loop are counted by; ``ex2`` is part of ``mufu``.
KINDS = ("tensor", *_GROUPS, "other", "ex2")


@dataclass(frozen=True)
class Instruction:
    address: int
    predicated: bool
    name: str
    operands: str

    @property
    def kind(self) -> str:
        root = self.name.split(".")[0]
        if _TENSOR.match(root):
            return "tensor"
        return _GROUP.get(root) or _GROUP.get(root.removeprefix("U"), "other")


def parse(sass: str) -> list[Instruction]:
    """The instructions of one function, as nvdisasm prints them."""
    found = _LINE.findall(sass)
    return [Instruction(int(at, 16), bool(when), name, ops) for at, when, name, ops in found]


def _successors(code: list[Instruction]) -> list[list[int]]:
    index = {instruction.address: i for i, instruction in enumerate(code)}
    reconverge: dict[str, int | None] = {}
    result = []
    for i, instruction in enumerate(code):
        root = instruction.name.split(".")[0]
        operands = instruction.operands.replace(",", " ").split()
        target = next((index.get(int(o, 16)) for o in operands[-1:] if o.startswith("0x")), None)
        if root == "BSSY":
            reconverge[operands[0]] = target
        elif root == "BSYNC":
            target = reconverge.get(operands[0])
        conditional = instruction.predicated or (root == "BRA" and len(operands) > 1)
        jumps = root in ("BRA", "BSYNC", "CALL")
        following = [target] if jumps and target is not None else []
        ends = root in ("EXIT", "RET") or (following and root != "CALL")
        if (conditional or not ends) and i + 1 < len(code):
            following.append(i + 1)
        result.append(following)
    return result


def _reach(edges: list[list[int]], start: int, without: int | None = None) -> set[int]:
    seen, stack = set(), [start]
    while stack:
        node = stack.pop()
        if node != without and node not in seen:
            seen.add(node)
            stack.extend(edges[node])
    return seen


def _loops(code: list[Instruction]) -> list[set[int]]:
    """The natural loops, as sets of places in ``code``."""
    edges = _successors(code)
    backward: list[list[int]] = [[] for _ in code]
    for node, following in enumerate(edges):
        for other in following:
            backward[other].append(node)
    alive = _reach(edges, 0)
    bodies: dict[int, set[int]] = {}
    for tail in alive:
        for head in edges[tail]:
            if head <= tail and (head == tail or tail not in _reach(edges, 0, without=head)):
                body = {head} | _reach(backward, tail, without=head)
                bodies.setdefault(head, set()).update(body)
    return list(bodies.values())


#: A loop that does none of these waits on a barrier.
_WORK = {"mufu", "fp32", "shared", "global"}


def _innermost(bodies: list[set[int]], kinds: list[str], wanted: Iterable[str]) -> list[set[int]]:
    """The innermost of the loops that hold instructions of the wanted kinds."""
    bodies = [body for body in bodies if any(kinds[i] in wanted for i in body)]
    return [body for body in bodies if not any(other < body for other in bodies)]


def spills(sass: str) -> tuple[int, int]:
    """(all accesses of local memory, those that an inner loop repeats).

    Inner loops are the innermost loops with tensor work, and the innermost with any work. If a
    kernel has none, all of its code counts as one.
    """
    code = parse(sass)
    kinds = [instruction.kind for instruction in code]
    places = {i for i, one in enumerate(code) if one.name.split(".")[0] in ("LDL", "STL")}
    loops = _loops(code)
    bodies = [*_innermost(loops, kinds, {"tensor"}), *_innermost(loops, kinds, _WORK)]
    inner = set().union(*bodies) if bodies else set(range(len(code)))
    return len(places), len(places & inner)


def inner_loop(code: list[Instruction]) -> list[Instruction]:
    """The innermost loop with the most tensor work, else the longest one; else all of the code.

    All of the code is also taken if the tensor work is outside of every loop.

    The shorter one of several loops with equal tensor work is taken: if a kernel has a loop for
    whole tiles and one for masked tiles, most iterations are in the former.
    """
    if not code:
        return []
    kinds = [instruction.kind for instruction in code]

    def tensor_work(body: set[int]) -> int:
        return sum(kinds[i] == "tensor" for i in body)

    loops = _loops(code)
    if "tensor" in kinds and not _innermost(loops, kinds, {"tensor"}):
        return code
    best = max(
        _innermost(loops, kinds, {"tensor"}) or _innermost(loops, kinds, _WORK),
        key=lambda body: (tensor_work(body), -len(body) if tensor_work(body) else len(body)),
        default=range(len(code)),
    )
    return [code[i] for i in sorted(best)]


_REGISTER = re.compile(r"R(\d+)\b")


def _written(instruction: Instruction) -> range:
    """The registers that an instruction writes, except the sums of an HGMMA."""
    root, *parts = instruction.name.split(".")
    operands = instruction.operands.split(", ")
    behind_predicate = root in ("LOP3", "SHFL", "ATOM", "ATOMG", "ATOMS")
    first = operands[behind_predicate and operands[0].startswith("P")]
    if root == "HGMMA" or not (register := _REGISTER.match(first)):
        return range(0)
    if root in ("LDSM", "HMMA"):
        count = 4 if root == "HMMA" else _width(instruction.name) // 128
    elif "128" in parts:
        count = 4
    else:
        wide = root == "CS2R" and "32" not in parts
        count = 2 if wide or not {"64", "WIDE"}.isdisjoint(parts) else 1
    return range(int(register[1]), int(register[1]) + count)


def overwritten(sass: str) -> list[str]:
    """Registers that are written while a wgmma in flight may still read an operand from them.

    They are free only after the wait, but some versions of ptxas load the next iteration's data
    into them before it.
    """
    code = parse(sass)
    edges, found = _successors(code), []
    for start, matmul in enumerate(code):
        operands = matmul.operands.split(", ")
        if not matmul.name.startswith("HGMMA") or not (a := _REGISTER.match(operands[1])):
            continue
        reads = range(int(a[1]), int(a[1]) + 4)
        seen: set[tuple[int, int]] = set()
        # Places that are reached, each with the number of groups committed since the matmul began.
        stack = [(place, int("gsb0" in matmul.operands)) for place in edges[start]]
        while stack:
            place, groups = stack.pop()
            instruction = code[place]
            if (place, groups) in seen:
                continue
            seen.add((place, groups))
            if instruction.name == "WARPGROUP.DEPBAR.LE":
                if int(instruction.operands.split(", ")[1], 16) < groups:
                    continue
            if not set(reads).isdisjoint(_written(instruction)):
                found.append(
                    f"race: {matmul.name} ({matmul.address:#x}) reads R{a[1]}, which"
                    f" {instruction.name} ({instruction.address:#x}) writes before its wait"
                )
                break
            groups += instruction.name.startswith("HGMMA") and "gsb0" in instruction.operands
            stack += [(other, min(groups, 8)) for other in edges[place]]
    return found


def _width(name: str) -> int:
    """Bytes of shared memory that one warp moves with one instruction."""
    root, *parts = name.split(".")
    if root in ("LDSM", "STSM"):  # 8x8 matrices of 16-bit elements
        return 128 * next((n for n in (4, 2) if str(n) in parts), 1)
    return 128 * next((n // 32 for n in (128, 64) if str(n) in parts), 1)


def _tensor_work(code: list[Instruction], place: int, warps: int) -> tuple[int, int]:
    """(16-bit FLOPs, bytes of operands in shared memory) of one instruction, for the whole block.

    One step in k reads 32 bytes of every row, for any dtype.
    """
    instruction = code[place]
    halves = 2 if "TF32" in instruction.name else 1
    if match := re.search(r"\.64x(\d+)x(\d+)", instruction.name):  # one warp group
        n, k = map(int, match.groups())
        rows = n + (64 if instruction.operands.split(",")[1].strip().startswith("gdesc") else 0)
        return 2 * 64 * n * k * halves * warps // 4, 32 * rows * warps // 4
    if match := re.search(r"\.16(8)(4|8|16|32)\b", instruction.name):  # one warp
        n, k = map(int, match.groups())
        return 2 * 16 * n * k * halves * warps, 0
    if match := re.search(r"idesc\[(\w+)\]", instruction.operands):  # one thread, for the block
        # PTX ISA, instruction descriptor: N / 8 in bits 17-22, M / 16 in bits 24-28.
        value = re.compile(rf"{match[1]}, (0x[0-9a-f]+)")
        for earlier in reversed(code[:place]):
            if earlier.name == "UMOV" and (found := value.match(earlier.operands)):
                bits = int(found[1], 16)
                n, m = 8 * (bits >> 17 & 63), 16 * (bits >> 24 & 31)
                rows = n + (m if instruction.operands.startswith("gdesc") else 0)
                return 2 * m * n * 16, 32 * rows  # TF32: half the k at half the rate
    raise ValueError(f"no shape found for {instruction.name} {instruction.operands}")


def loop_mix(sass: str, warps: int, arch: int) -> tuple[dict[str, int], dict[str, float]]:
    """(instructions of the inner loop by kind, cycles of one iteration by unit).

    The cycles are those of one block that has an SM to itself, if that unit were the only limit.
    """
    code = parse(sass)
    loop = inner_loop(code)
    mix = Counter(instruction.kind for instruction in loop)
    mix["ex2"] = sum(instruction.name.startswith("MUFU.EX2") for instruction in loop)
    place = {instruction.address: i for i, instruction in enumerate(code)}
    flops = moved = 0
    for instruction in loop:
        if instruction.kind == "tensor":
            work, operands = _tensor_work(code, place[instruction.address], warps)
            flops += work
            moved += operands
        elif instruction.kind == "shared" or instruction.name.startswith("LDGSTS"):
            moved += _width(instruction.name) * warps
    cycles = {
        "tensor": flops / TENSOR_FLOPS[arch],
        "MUFU": mix["mufu"] * warps * 32 / 16,
        "issue": len(loop) * warps / 4,
        "shared": moved / 128 + mix["shuffle"] * warps,
    }
    return {kind: mix[kind] for kind in KINDS}, cycles


def blocks_per_sm(
    arch: int, warps: int, registers: int, shared: int, tensor_columns: int = 0
) -> int:
    """The number of blocks that an SM holds at once.

    A warp gets registers in units of 256, from the 16,384 of its scheduler (one of four). A block
    takes 1 KB of shared memory more than it asks for. Tensor memory (sm_100) has 512 columns.
    """
    per_warp = -(-registers * 32 // 256) * 256
    blocks, resident = _RESIDENT[arch]
    limits = [
        blocks,
        resident // warps,
        4 * (16384 // per_warp) // warps,
        SHARED_PER_SM[arch] // (shared + 1024),
    ]
    if tensor_columns:
        limits.append(512 // tensor_columns)
    return min(limits)
