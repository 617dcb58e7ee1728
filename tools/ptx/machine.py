"""Blocks of threads that execute a kernel, with their barriers and asynchronous work.

The warps of a block are split into random groups. A group runs until its next barrier, then the
next group does; their order is drawn again at every barrier. So accesses that no barrier orders
happen in an order that the hardware may take, too, but seldom does. Several blocks run side by
side: they are independent, and a group holds the same warps of all of them.

``Schedule`` decides when a copy (``cp.async``) lands, and when a product (``wgmma``) reads shared
memory and writes its registers: at once, or not before a wait forces it. In the same way, other
blocks see a store to global memory at once, or not before they must (``GlobalMemory``). A copy that
an ``mbarrier`` tracks lands when no thread can continue without it.

Warps of different roles meet at numbered barriers and at ``mbarrier`` objects. A thread that waits
for a phase tries again after every round of the groups. One random group only runs if no other
group can continue. If no thread can continue, the kernel hangs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import product

import numpy as np

from ptx.fences import unfenced
from ptx.instructions import NUMPY, bind, releases, trying
from ptx.memory import GlobalMemory, SharedMemory
from ptx.parse import Instruction, Kernel, PtxError, number, parse

#: Threads that run side by side, all groups together: more cost memory, fewer cost time.
THREADS = 1024
_STORAGE = {1: np.bool_, 16: np.uint16, 32: np.uint32, 64: np.uint64}
_DONE = 1 << 30


@dataclass
class Schedule:
    """A seed's decisions where the memory model leaves the order open.

    ``copies`` and ``products``: "late" (when a wait forces them), "early" (at once), or "random"
    (drawn for each warp). By default the first seeds are the extremes: seed 0 has both late; seed 1
    has early copies and late products, which finds a copy that overwrites what a product still
    reads.
    ``fenced``: products see what threads wrote to shared memory only after a fence; true of seed 0.
    ``stores``: when other blocks see stores to global memory; late with seed 0, early with seed 1.
    ``watched``: accesses to shared memory that no barrier orders are an error; true of seed 0, for
    kernels whose barriers are all for the whole block.
    Seeds from 2 on draw everything, with four groups of warps instead of two, which takes longer.
    """

    seed: int = 0
    copies: str = ""
    products: str = ""
    groups: int = 0
    fenced: bool | None = None
    stores: str = ""
    watched: bool | None = None
    random: np.random.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.copies = self.copies or {0: "late", 1: "early"}.get(self.seed, "random")
        self.products = self.products or {0: "late", 1: "late"}.get(self.seed, "random")
        self.stores = self.stores or {0: "late", 1: "early"}.get(self.seed, "random")
        if self.watched is None:
            self.watched = self.seed == 0
        self.groups = self.groups or (2 if self.seed < 2 else 4)
        self.random = np.random.default_rng(self.seed)
        if self.fenced is None:
            self.fenced = self.seed == 0 or (self.seed > 1 and bool(self.random.integers(2)))


class Asynchronous:
    """Work in flight: what every thread (or warp) issued, committed and has not waited for."""

    def __init__(self, size: int, unit: int, ordered: bool) -> None:
        self.committed = np.zeros(size, np.int64)
        self.unit = unit  # threads that issue together: 1, or a warp
        self.ordered = ordered  # whether a warp's work is finished in the order of its issue
        self.pending: list[tuple[np.ndarray, np.ndarray, np.ndarray, Callable]] = []
        self.signals: set[Callable] = set()  # entries of ``pending`` that only signal a barrier
        self.mode = "late"
        self.random = np.random.default_rng(0)

    def reset(self, mode: str, random: np.random.Generator) -> None:
        self.committed.fill(0)
        self.pending.clear()
        self.signals.clear()
        self.mode, self.random = mode, random

    def issue(self, who: np.ndarray, land: Callable[[np.ndarray], None]) -> None:
        """Issue work of ``who``; ``land(which)`` finishes that of ``who[which]``."""
        which = np.arange(len(who))
        if self.mode == "early":
            return land(which)
        if self.mode == "random":
            warps = who * self.unit // 32
            early = self.random.integers(0, 2, warps.max(initial=0) + 1).astype(bool)[warps]
            if early.any():
                if self.ordered:
                    self._finish(lambda others, _: np.isin(others, who[early]))
                land(which[early])
            which = which[~early]
        if len(which):
            self.pending.append((who[which], self.committed[who[which]], which, land))

    def signal(self, who: np.ndarray, arrive: Callable[[np.ndarray], None]) -> None:
        """Call ``arrive(which)`` once all earlier work of ``who[which]`` is done."""
        early = np.full(len(who), self.mode == "early")
        if self.mode == "random":
            warps = who * self.unit // 32
            early = self.random.integers(0, 2, warps.max(initial=0) + 1).astype(bool)[warps]
        self._finish(lambda others, _: np.isin(others, who[early]))
        which = np.arange(len(who))
        if early.any():
            arrive(which[early])
        if not early.all():
            self.signals.add(arrive)
            late = which[~early]
            self.pending.append((who[late], self.committed[who[late]], late, arrive))

    def next_signals(self) -> bool:
        """Finish the work of some warps up to their first signals. Returns whether any waited."""
        waiting = [who for who, _, _, land in self.pending if land in self.signals]
        if not waiting:
            return False
        warps = np.unique(np.concatenate(waiting) * self.unit // 32)
        chosen = self.random.permutation(warps)[: self.random.integers(1, len(warps) + 1)]
        left = np.zeros(len(self.committed) * self.unit // 32, bool)
        left[chosen] = True
        signalled = set()

        def is_due(who: np.ndarray, group: np.ndarray) -> np.ndarray:
            return left[who * self.unit // 32]

        pending, self.pending = self.pending, []
        for item in pending:
            who, _, _, land = item
            if land in self.signals:
                signalled.update(np.unique(who[is_due(*item[:2])] * self.unit // 32).tolist())
            self.pending.append(item)
            before, self.pending = self.pending[:-1], self.pending[-1:]
            self._finish(is_due)
            self.pending = before + self.pending
            left[list(signalled)] = False
        return True

    def commit(self, mask: np.ndarray | None) -> None:
        if mask is None:
            self.committed += 1
        else:
            self.committed[mask[:: self.unit]] += 1

    def wait(self, left: int, mask: np.ndarray | None) -> None:
        """Finish all groups but the ``left`` youngest (-1: also work that is not committed)."""

        def is_due(who: np.ndarray, group: np.ndarray) -> np.ndarray:
            due = group < self.committed[who] - left
            return due if mask is None else due & mask[:: self.unit][who]

        self._finish(is_due)

    def _finish(self, is_due: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> None:
        pending = []
        for who, group, which, land in self.pending:
            due = is_due(who, group)
            if due.any():
                land(which[due])
            if not due.all():
                pending.append((who[~due], group[~due], which[~due], land))
        self.pending = pending


class Group:
    """The registers of some warps of several blocks, and every instruction bound to them."""

    def __init__(self, program: Program, blocks: int, warps: int) -> None:
        self.kernel = program.kernel
        self.lanes = blocks * warps * 32
        self.blocks, self.warps = blocks, warps
        self.storage = {
            bits: np.empty((count, self.lanes), _STORAGE[bits])
            for bits, count in self.kernel.counts.items()
        }
        self.lane = np.tile(np.arange(32, dtype=np.uint32), blocks * warps)
        self.block = np.repeat(np.arange(blocks), warps * 32)
        self.warp = np.empty(self.lanes, np.int64)
        self.block_start = self.block * program.shared_stride
        self.number = np.empty(self.lanes, np.int32)  # number of the block in its launch, from 1
        # These times order accesses to global memory. A thread sees other blocks' stores until
        # ``acquired``, and would see those until ``observed`` if it acquired now. A fence last
        # released its own stores at ``released``. ``clock`` counts barriers.
        self.acquired, self.observed = np.empty((2, self.lanes), np.int64)
        self.released, self.clock = np.empty((2, self.lanes), np.int64)
        self.releases, self.has_phases = program.releases, program.has_phases
        self.passed = np.empty(self.lanes, np.int64)  # 1 + barriers of the block that it passed
        self.special = {
            f"%{name}": np.zeros(self.lanes, np.uint32)
            for name in ("tid.x", "ctaid.x", "ctaid.y", "ctaid.z", "nctaid.x", "nctaid.y")
            + ("nctaid.z", "ntid.x", "tid.y", "tid.z")
        }
        self.special["%laneid"] = self.lane
        self.special["%ntid.x"].fill(program.threads)
        self.copies = Asynchronous(self.lanes, 1, ordered=False)
        self.products = Asynchronous(blocks * warps, 32, ordered=True)
        self.params: dict[str, bytes] = {}
        self.memory: GlobalMemory
        self.shared: SharedMemory
        self.pcs = np.empty(self.lanes, np.int64)
        self.blocked = np.empty(self.lanes, bool)
        self.at = np.empty(self.lanes, np.int64)  # the barrier waited at (``_barrier``), or -1
        self._constants: dict[tuple[int, str], np.ndarray] = {}
        self._place_warps = self.warp.reshape(blocks, warps, 32)
        self.code = [
            [bind(self, ins) for ins in program.kernel.code[start:stop]]
            for start, stop in program.spans
        ]
        self.every = [[every for every, _ in code] for code in self.code]
        self.masked = [[masked for _, masked in code] for code in self.code]
        self.ends = self._ends = [self._end(program, i) for i in range(len(program.spans))]
        self.meets = [_barrier(ins) if ins else -1 for ins in program.ends]
        self.trying = [
            trying(self, ins) if ins and ins.parts[0] == "mbarrier" else None
            for ins in program.ends
        ]

    # --- operands that an instruction is bound to ---

    def is_register(self, name: str) -> bool:
        return name in self.kernel.registers

    def row(self, name: str) -> np.ndarray:
        bits, index = self.kernel.registers[name]
        return self.storage[bits][index]

    def width(self, name: str) -> int:
        return self.kernel.registers[name][0] // 8

    def bank(self, names: tuple[str, ...]) -> tuple[np.ndarray, np.ndarray]:
        """(all registers of the width of these, the indices of these)."""
        bits = self.kernel.registers[names[0]][0]
        return self.storage[bits], np.array([self.kernel.registers[name][1] for name in names])

    def target(self, name: str, kind: str) -> np.ndarray:
        """The register, viewed as numbers of a type of its width."""
        row = self.row(name)
        if kind != "pred" and row.dtype.itemsize != np.dtype(NUMPY[kind]).itemsize:
            raise PtxError(f"{name} is not of the width of {kind}")
        return row.view(NUMPY[kind])

    def extending(self, name: str, kind: str) -> Callable[[np.ndarray], None]:
        """A function that writes numbers of a type into a register, which may be wider."""
        row = self.row(name)
        if row.dtype.itemsize == np.dtype(NUMPY[kind]).itemsize:
            typed = row.view(NUMPY[kind])
            return lambda values: np.copyto(typed, values)
        signed = row.view(f"i{row.dtype.itemsize}") if kind[0] == "s" else row
        raw = f"u{np.dtype(NUMPY[kind]).itemsize}"
        if kind[0] == "s":
            return lambda values: np.copyto(signed, values)
        return lambda values: np.copyto(row, values.view(raw))

    def source(self, operand: str, kind: str) -> np.ndarray:
        """A register (its low part, if the type is narrower), a symbol or an immediate."""
        if operand in self.kernel.registers:
            row = self.row(operand)
            if kind == "pred":
                return row
            typed = row.view(NUMPY[kind])
            if len(typed) < self.lanes:
                raise PtxError(f"{operand} is narrower than {kind}")
            return typed[:: len(typed) // self.lanes]
        if operand in self.special:
            return self.special[operand].view(NUMPY[kind])
        return self.constant(operand, kind)

    def constant(self, operand: str, kind: str) -> np.ndarray:
        value = self.kernel.symbols.get(operand, number(operand))
        if value is None:
            raise PtxError(f"{operand}: an operand that the emulator does not know")
        key = value, kind
        if key not in self._constants:
            element = np.dtype(NUMPY[kind])
            if kind == "pred":
                found = np.full(self.lanes, value != 0)
            else:
                bits = value % (1 << 8 * element.itemsize)
                found = np.full(self.lanes, bits, f"u{element.itemsize}").view(element)
            self._constants[key] = found
        return self._constants[key]

    # --- execution ---

    def _end(self, program: Program, index: int) -> tuple:
        """(kind of instruction that ends a piece of code, target, predicate, value that jumps)."""
        ins = program.ends[index]
        if ins is None:
            return "next", index + 1, None, True
        head = ins.parts[0]
        if head == "bra":
            target = program.targets[ins.operands[0]]
        else:
            target = _DONE if head in ("ret", "exit") else index + 1
        kind = {"bar": "barrier", "barrier": "barrier", "mbarrier": "try"}.get(head, "jump")
        if ins.guard is None:
            return kind, target, None, True
        if kind != "jump":
            raise ins.error("a barrier with a predicate")
        return kind, target, self.row(ins.guard), not ins.negated

    def start(
        self,
        warps: np.ndarray,
        places: np.ndarray,
        first: int,
        grid: tuple[int, int, int],
        params: dict[str, bytes],
        memory: GlobalMemory,
        shared: SharedMemory,
        schedule: Schedule,
        left_out: int | None,
    ) -> None:
        """Begin ``warps`` of the blocks at ``places`` [blocks, 3]; ``first`` is the number of the
        first block."""
        self._place_warps[:] = warps[None, :, None]
        self.number[:] = first + self.block
        for times in (self.acquired, self.observed, self.released, self.clock):
            times.fill(0)
        self.passed.fill(1)
        self.special["%tid.x"][:] = self.warp * 32 + self.lane
        for axis, name in enumerate("xyz"):
            self.special[f"%ctaid.{name}"][:] = places[self.block, axis]
            self.special[f"%nctaid.{name}"].fill(grid[axis])
        self.params, self.memory, self.shared = params, memory, shared
        self.ends = self._ends if left_out is None else [*self._ends]
        if left_out is not None:
            self.ends[left_out] = "next", left_out + 1, None, True
        self.copies.reset(schedule.copies, schedule.random)
        self.products.reset(schedule.products, schedule.random)
        for bits, rows in self.storage.items():
            rows.view(np.uint8).fill(0 if bits == 1 else 0xFF)
        self.pcs.fill(0)
        self.blocked.fill(False)
        self.at.fill(-1)

    def advance(self) -> bool:
        """Run until every thread waits or is done. Returns whether any thread ran."""
        moved = False
        while True:
            running = ~self.blocked & (self.pcs < _DONE)
            if not running.any():
                return moved
            pc = int(self.pcs[running].min())
            mask = running & (self.pcs == pc)
            if self.ends[pc][0] == "try":
                passed = self.trying[pc](mask)
                self.pcs[passed] = pc + 1
                self.blocked[mask & ~passed] = True
                moved |= bool(passed.any())
                continue
            moved = True
            if mask.all():
                self._run_all(pc)
            else:
                self._run_some(pc, mask)

    def _run_all(self, pc: int) -> None:
        """Run from ``pc``, where all threads are, until they separate or wait."""
        while True:
            kind, target, guard, wanted = self.ends[pc]
            if kind == "try":
                self.pcs.fill(pc)
                return
            for run in self.every[pc]:
                run()
            if guard is not None:
                taken = np.count_nonzero(guard)
                if taken not in (0, self.lanes):
                    self.pcs[:] = np.where(guard == wanted, target, pc + 1)
                    return
                target = target if (taken > 0) == wanted else pc + 1
            if kind == "barrier" or target == _DONE:
                self.pcs.fill(target)
                self.blocked.fill(kind == "barrier")
                self.at.fill(self.meets[pc])
                return
            pc = target

    def _run_some(self, pc: int, mask: np.ndarray) -> None:
        for run in self.masked[pc]:
            run(mask)
        kind, target, guard, wanted = self.ends[pc]
        if guard is None:
            self.pcs[mask] = target
        else:
            self.pcs[mask] = np.where(guard[mask] == wanted, target, pc + 1)
        if kind == "barrier":
            self.blocked[mask] = True
            self.at[mask] = self.meets[pc]


class Program:
    """A kernel ready to run."""

    def __init__(self, text: str, shared: int, threads: int) -> None:
        self.kernel: Kernel = parse(text)
        self.threads = threads
        if self.kernel.threads not in (0, threads):
            raise PtxError(f"{self.kernel.name} is for {self.kernel.threads} threads")
        self.shared = self.kernel.static_shared + shared
        self.shared_stride = SharedMemory(0, self.shared).stride
        if missing := unfenced(self.kernel):
            raise PtxError(missing[0])
        self.has_phases = any(ins.parts[0] == "mbarrier" for ins in self.kernel.code)
        self.releases = any(map(releases, self.kernel.code))
        meetings = [ins for ins in self.kernel.code if _is_end(ins) and _barrier(ins) >= 0]
        self.watchable = not any(map(_barrier, meetings))
        self.left_out: int | None = None
        self._split()
        self._groups: dict[tuple[int, int], list[Group]] = {}

    def _split(self) -> None:
        """Cut the code at labels, and behind jumps and barriers."""
        code = self.kernel.code
        cuts = {0, *self.kernel.labels.values()}
        ends = {i: ins for i, ins in enumerate(code) if _is_end(ins)}
        cuts |= {i + 1 for i in ends}
        cuts |= {i for i, ins in ends.items() if ins.parts[0] == "mbarrier"}  # runs repeatedly
        starts = sorted(cut for cut in cuts if cut <= len(code))
        self.spans, self.ends = [], []
        for start, stop in zip(starts, [*starts[1:], len(code)], strict=True):
            end = ends.get(stop - 1) if stop > start else None
            self.spans.append((start, stop - (end is not None)))
            self.ends.append(end)
        places = {start: index for index, start in enumerate(starts)}
        self.targets = {label: places[at] for label, at in self.kernel.labels.items()}

    def bind(self, blocks: int, groups: int) -> list[Group]:
        key = blocks, groups
        if key not in self._groups:
            warps = self.threads // 32 // groups
            self._groups[key] = [Group(self, blocks, warps) for _ in range(groups)]
        return self._groups[key]

    @property
    def barriers(self) -> list[int]:
        """The places of barriers, as ``without`` takes them."""
        heads = [ins.parts[0] if ins else "" for ins in self.ends]
        return [index for index, head in enumerate(heads) if head in ("bar", "barrier")]

    @contextlib.contextmanager
    def without(self, barrier: int) -> Iterator[None]:
        """Leave out one of the kernel's barriers: a planted fault, for any schedule."""
        self.left_out = barrier
        try:
            yield
        finally:
            self.left_out = None

    def run(
        self,
        grid: tuple[int, ...],
        params: dict[str, bytes],
        memory: GlobalMemory,
        schedule: Schedule,
    ) -> None:
        whole = (*grid, 1, 1)[:3]
        places = np.array(list(product(*map(range, whole))), np.uint32).reshape(-1, 3)
        places = places[schedule.random.permutation(len(places))]
        warps = self.threads // 32
        chunks = -(-len(places) * self.threads // THREADS)
        groups = min(schedule.groups, warps)
        memory.start(schedule.stores, schedule.random)
        first = 1
        with np.errstate(all="ignore"):
            for chunk in np.array_split(places, min(chunks, len(places))):
                bound = self.bind(len(chunk), groups)
                watched = schedule.watched and self.watchable
                shared = SharedMemory(len(chunk), self.shared, schedule.fenced, watched)
                order = schedule.random.permutation(warps)
                for group, part in zip(bound, np.split(order, groups), strict=True):
                    given = first, whole, params, memory, shared, schedule, self.left_out
                    group.start(part, chunk, *given)
                first += len(chunk)
                memory.unreleased.clear()
                lazy = -1
                while self._alive(bound):
                    if self.has_phases and schedule.random.random() < 0.2:
                        lazy = schedule.random.integers(groups)
                    order = schedule.random.permutation(groups)
                    moved = any([bound[index].advance() for index in order if index != lazy])
                    moved |= self._open_barriers(bound, len(chunk))
                    if not moved and lazy >= 0:
                        moved = bound[lazy].advance() | self._open_barriers(bound, len(chunk))
                    if not (moved or any(bound[index].copies.next_signals() for index in order)):
                        raise PtxError(f"{self.kernel.name} hangs: no thread can go on")
                    for group in bound:
                        group.blocked[group.at < 0] = False

    @staticmethod
    def _alive(groups: list[Group]) -> bool:
        return any((group.pcs < _DONE).any() for group in groups)

    def _open_barriers(self, groups: list[Group], blocks: int) -> bool:
        """Release threads from barriers where all have arrived. Returns whether there were any."""
        at = np.concatenate([group.at for group in groups])
        block = np.concatenate([group.block for group in groups])
        alive = np.concatenate([group.pcs < _DONE for group in groups])
        opened = False
        for meeting in np.unique(at[at >= 0]):
            number, threads = divmod(int(meeting), 1 << 16)
            if ((at >= 0) & (at >> 16 == number) & (at != meeting)).any():
                raise PtxError(f"barrier {number} is for unlike numbers of threads")
            there = np.bincount(block[at == meeting], minlength=blocks)
            expected = np.bincount(block[alive], minlength=blocks) if threads == 0 else threads
            if (there > expected).any():
                raise PtxError(
                    f"barrier {number} is for {threads} threads: {there.max()} are there"
                )
            full = (there == expected) & (there > 0)
            passing = [(group.at == meeting) & full[group.block] for group in groups]
            if self.releases:
                self._meet(groups, passing, blocks)
            for group, which in zip(groups, passing, strict=True):
                group.at[which] = -1
                group.passed[which] += 1
            opened |= bool(full.any())
        return opened

    @staticmethod
    def _meet(groups: list[Group], passing: list[np.ndarray], blocks: int) -> None:
        """After a barrier, each of its threads sees the stores that any of them has seen."""
        for name, later in (("acquired", 0), ("clock", 1)):
            most = np.zeros(blocks, np.int64)
            for group, which in zip(groups, passing, strict=True):
                np.maximum.at(most, group.block[which], getattr(group, name)[which])
            for group, which in zip(groups, passing, strict=True):
                getattr(group, name)[which] = most[group.block[which]] + later


def _is_end(ins: Instruction) -> bool:
    if ins.parts[0] in ("bar", "barrier"):
        return not ins.name.startswith("bar.warp")
    return ins.parts[0] in ("bra", "ret", "exit") or ins.name.startswith("mbarrier.try_wait")


def _barrier(ins: Instruction) -> int:
    """2^16 times the number of a barrier, plus its number of threads (0: all of the block)."""
    if ins.parts[0] not in ("bar", "barrier"):
        return -1
    numbers = [number(operand) for operand in ins.operands]
    if ins.name not in ("bar.sync", "barrier.sync") or None in numbers:
        raise ins.error("a barrier that the emulator does not know")
    return (numbers[0] << 16) + sum(numbers[1:])
