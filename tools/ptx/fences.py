"""Registers of a ``wgmma`` that no ``wgmma.fence`` orders, found in a kernel's PTX.

The PTX ISA asks for a ``wgmma.fence`` before the first ``wgmma.mma_async``, and for another one if
other instructions have accessed registers of a product (its sums, or fragments of A) since the last
fence. Products of one shape may add to the same sums without a fence.

A move from one register to another is no access: LLVM writes moves anywhere, and ptxas gives both
names one register. The copy keeps the accesses of its source. Every path through the kernel counts,
also one that no launch takes. No schedule of the emulator could show this fault, as it lies in the
order in which the hardware accesses registers.
"""

from __future__ import annotations

from collections.abc import Iterator

from ptx.parse import Instruction, Kernel

_JUMPS = ("bra", "ret", "exit")
#: (register, how it was accessed since the last fence): a product of a shape added to it, or read
#: it as "A"; another instruction "read" it, or it was "written".
Access = tuple[str, str]
_START: Access = ("", "start")  # there was no fence yet


def unfenced(kernel: Kernel) -> list[str]:
    """The products that lack a fence, each with a register that shows it."""
    products = [ins for ins in kernel.code if _is_product(ins)]
    if not products:
        return []
    watched = {name for ins in products for name in (*ins.operands[0], *_fragment(ins))}
    while more := {s for ins in kernel.code for s in _moved(kernel, ins, watched)} - watched:
        watched |= more
    effects = [_effect(kernel, ins, watched) for ins in kernel.code]
    starts = sorted({0, *kernel.labels.values(), *(i + 1 for i in _jumps(kernel))})
    starts = [start for start in starts if start < len(kernel.code)]
    stops = dict(zip(starts, [*starts[1:], len(kernel.code)], strict=True))
    before: dict[int, set[Access]] = {start: set() for start in starts}
    before[0].add(_START)
    waiting = [0]
    reached = set()
    while waiting:
        start = waiting.pop()
        reached.add(start)
        state = set(before[start])
        for index in range(start, stops[start]):
            state = _after(state, effects[index])
        for follower in _followers(kernel, stops[start]):
            if follower in before and not (follower in reached and state <= before[follower]):
                before[follower] |= state
                waiting.append(follower)
    found: dict[str, None] = {}
    for start in sorted(reached):
        state = before[start]
        for index in range(start, stops[start]):
            ins = kernel.code[index]
            if _is_product(ins):
                found.update(dict.fromkeys(_faults(ins, state)))
            state = _after(state, effects[index])
    return list(found)


def _is_product(ins: Instruction) -> bool:
    return ins.name.startswith("wgmma.mma_async")


def _fragment(ins: Instruction) -> tuple[str, ...]:
    return ins.operands[1] if isinstance(ins.operands[1], tuple) else ()


def _jumps(kernel: Kernel) -> Iterator[int]:
    return (i for i, ins in enumerate(kernel.code) if ins.parts[0] in _JUMPS)


def _followers(kernel: Kernel, stop: int) -> Iterator[int]:
    """The places that may be executed after the piece of code that ends before ``stop``."""
    last = kernel.code[stop - 1]
    if last.parts[0] == "bra":
        yield kernel.labels[last.operands[0]]
    if last.parts[0] not in _JUMPS or last.guard is not None:
        yield stop


def _moved(kernel: Kernel, ins: Instruction, watched: set[str]) -> tuple[str, ...]:
    """The register that a move copies into one of ``watched``."""
    if ins.parts[0] != "mov" or ins.guard or ins.operands[0] not in watched:
        return ()
    source = ins.operands[1]
    return (source,) if source in kernel.registers else ()


class _Move(tuple):
    """(to, from)"""


def _effect(kernel: Kernel, ins: Instruction, watched: set[str]) -> set[Access] | _Move | None:
    """The accesses of an instruction; None for a fence."""
    if ins.name.startswith("wgmma.fence"):
        return None
    if _is_product(ins):
        accesses = {(name, ins.parts[4]) for name in ins.operands[0]}
        return accesses | {(name, "A") for name in _fragment(ins)}
    if source := _moved(kernel, ins, watched):
        return _Move((ins.operands[0], *source))
    names = [operand if isinstance(operand, tuple) else (operand,) for operand in ins.operands]
    return {
        (name, "read" if place else "written")
        for place, operand in enumerate(names)
        for name in operand
        if isinstance(name, str) and name in watched
    }


def _after(state: set[Access], effect: set[Access] | _Move | None) -> set[Access]:
    if effect is None:
        return set()
    if isinstance(effect, _Move):
        to, source = effect
        return state | {(to, how) for name, how in state if name == source and how != "read"}
    return state | effect if effect else state


def _faults(ins: Instruction, state: set[Access]) -> Iterator[str]:
    where = f"line {ins.line}: {ins.name}"
    if _START in state:
        yield f"{where} with no wgmma.fence before it"
        return
    by: dict[str, set[str]] = {}
    for name, how in state:
        by.setdefault(name, set()).add(how)
    for names, allowed in ((ins.operands[0], ins.parts[4]), (_fragment(ins), "A")):
        for name in names:
            if by.get(name, set()) - {allowed}:
                yield f"{where} with no wgmma.fence since {name} was accessed"
                return
