"""Races of pipelined kernels, found by a simulation of their Triton GPU IR.

``find_races`` executes the integers of a kernel and follows what is in flight: copies to shared
memory by commit group, asynchronous matmuls (wgmma on sm_90, tcgen05 on sm_100), barriers and their
phases. It draws numbers that only a launch knows, until each pipelined loop ran with many trip
counts. A race is an access that nothing orders after one that is in flight:

- a buffer is written while a matmul may still read it, or read before its copy was waited for;
- two copies go into one buffer at once; an accumulator is used before its matmul was waited for;
- a matmul reads data that was stored from registers, with no proxy fence in between;
- a buffer is freed while in flight; an index lies past its buffers; a wait can never end.

Not modelled: the addresses of allocations (two with the same address count as separate); on sm_100
the order of threads' own accesses to tensor memory, barriers of several arrivals, TMA, clusters and
warp specialisation. A slice of a buffer counts as the whole buffer, a masked copy as a full one. An
unknown operation of the GPU dialects is reported, never ignored.

Triton has no pass that proves this: its concurrency sanitizer instruments a kernel that then runs.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

# --- The IR as printed -----------------------------------------------------------------------

_NAME = r"%[\w$.-]+(?:#\d+)?"
_VALUE = re.compile(_NAME)
_BASE = re.compile(r"%[\w$.-]+")
_OP = re.compile(rf"(?:((?:{_NAME}(?::\d+)?(?:, )?)+) = )?\"?([\w.]+)\"?(.*)")
_FOR = re.compile(rf"({_NAME}) = ({_NAME}) to ({_NAME}) step ({_NAME})(?: iter_args\((.*?)\) ->)?")
_LOC = re.compile(r"(#loc\d*) = loc\((.*)\)$")
TENSOR = re.compile(r"tensor<((?:\d+x)+)(?:!tt\.ptr<)?([a-z]+)(\d+)")


LOOPS = ("scf.for", "scf.while")


@dataclass(eq=False)
class Op:
    """One operation: ``text`` is the text after its name, ``loc`` its source location."""

    name: str
    results: list[str]
    text: str
    loc: str = ""
    regions: list[list[Block]] = field(default_factory=list)
    parent: Op | None = None
    loop: Op | None = None  # the innermost loop around it

    @cached_property
    def operands(self) -> list[str]:
        return _VALUE.findall(self.text.split(" : ")[0])

    @cached_property
    def arithmetic(self) -> Callable[..., int] | None:
        if self.name == "arith.cmpi":
            return _COMPARE[self.text.split()[0].rstrip(",")[-2:]]
        name = _INTEGER.fullmatch(self.name)
        return _ARITHMETIC.get(name[1]) if name else None

    def number(self, attribute: str) -> int:
        return int(search(rf"\b{attribute} = (-?\d+)", self.text)[1])

    def result_type(self) -> str:
        return self.text.rsplit("->", 1)[-1].rsplit(" : ", 1)[-1]


@dataclass
class Block:
    label: str = ""
    arguments: list[str] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)


class Module:
    """The function of a printed module, and the operations that make its values."""

    def __init__(self, text: str) -> None:
        self._locs: dict[str, str] = {}
        self.ops: list[Op] = []
        self.made_by: dict[str, Op] = {}
        self.carries: dict[str, str] = {}  # argument or result of a loop -> its initial value
        top = Op("top", [], "", regions=[[Block()]])
        stack, loops = [top], [None]
        self._seen: set[str] = set()
        self._renamed: list[dict[str, str]] = [{}]  # by region, as regions may use the same names
        for line in map(str.strip, text.splitlines()):
            if line.startswith("#") or not line:
                if alias := _LOC.match(line):
                    self._locs[alias[1]] = alias[2]
                continue
            code, _, loc = line.rpartition(" loc(") if line.endswith(")") else (line, "", "")
            code, loc = (code, loc[:-1]) if loc else (line, "")
            if code.startswith("}"):
                op = stack.pop()
                loops.pop()
                self._renamed.pop()
                op.loc = op.loc or loc
                if code.endswith("{"):
                    self._open(op, stack, loops)
                else:
                    op.text += code
                continue
            block = stack[-1].regions[-1][-1]
            if code.startswith("^"):
                label, _, arguments = code.partition("(")
                if block.ops or block.label:
                    stack[-1].regions[-1].append(block := Block())
                block.label = label.split(":")[0].strip()
                names = re.findall(rf"({_NAME}): ", arguments)
                block.arguments = [self._define(name) for name in names]
                continue
            op = self._op(code, loc, stack, loops)
            block.ops.append(op)
            self.ops.append(op)
        self._steps: dict[int, list[Op]] = {}
        made = (op for op in self.ops if op.name.startswith(("ttng.warp_group_dot", "scf.")))
        carried = (name for op in self.ops if op.name == "scf.for" for name, _ in iter_args(op))
        self._accumulators = {name for op in made for name in op.results}.union(carried)
        functions = (op for op in self.ops if op.name == "tt.func")
        (self.function,) = (op for op in functions if " public " in f" {op.text}")
        header = re.findall(rf"({_NAME}): ([^{{,]*)", self.function.text)
        self.arguments = {name: kind.strip().split(" loc(")[0] for name, kind in header}

    def steps(self, block: Block) -> list[Op]:
        """The operations of a block that a simulation executes: all but tensor arithmetic."""
        if id(block) not in self._steps:
            self._steps[id(block)] = [op for op in block.ops if self._matters(op)]
        return self._steps[id(block)]

    def _matters(self, op: Op) -> bool:
        if op.name in _ENDS or op.name in _CONTROL or op.name in _SHARED or _unknown(op):
            return True
        if op.results and "tensor<" not in op.result_type():
            return True
        # The simulation checks whether an accumulator is used too early.
        return any(name in self._accumulators for name in op.operands)

    def _open(self, op: Op, stack: list[Op], loops: list[Any]) -> None:
        op.regions.append([Block()])
        stack.append(op)
        loops.append(op if op.name in LOOPS else loops[-1])
        self._renamed.append(dict(self._renamed[-1]))

    def _define(self, name: str) -> str:
        """Define a value; it gets a new name if another region has a value of this name."""
        if name in self._seen:
            self._renamed[-1][name] = f"{name}.{len(self._seen)}"
            name = self._renamed[-1][name]
        self._seen.add(name)
        return name

    def _current(self, text: str) -> str:
        renamed = self._renamed[-1]
        return _BASE.sub(lambda m: renamed.get(m[0], m[0]), text) if renamed else text

    def _op(self, code: str, loc: str, stack: list[Op], loops: list[Any]) -> Op:
        results, name, text = search(_OP, code).groups()
        op = Op(name, [], self._current(text), loc, parent=stack[-1], loop=loops[-1])
        for result in (results or "").split(", ") if results else ():
            result, _, count = result.partition(":")
            result = self._define(result)
            op.results += [f"{result}#{i}" for i in range(int(count))] if count else [result]
        self.made_by.update(dict.fromkeys(op.results, op))
        if code.endswith("{"):
            self._open(op, stack, loops)
            if name in LOOPS:
                for argument in re.findall(rf"({_NAME}) = ", text):
                    self._define(argument)
            op.text = self._current(text)
        if name == "scf.for":
            for (argument, start), result in zip(iter_args(op), op.results, strict=True):
                self.carries[argument] = self.carries[result] = start
        return op

    def place(self, loc: str) -> str:
        """ "file.py:line:column @[ caller ]", as the PTX writes it."""
        loc = self._locs.get(loc, loc)
        if call := re.fullmatch(r"callsite\((.*) at (.*)\)", loc):
            return f"{self.place(call[1])} @[ {self.place(call[2])} ]"
        if named := re.fullmatch(r'"[^"]*"\((.*)\)', loc):
            return self.place(named[1])
        if fused := re.match(r"fused\[(#loc\d+)", loc):
            return self.place(fused[1])
        found = re.match(r'"([^"]*)":(\d+:\d+)', loc)
        return f"{Path(found[1]).name}:{found[2]}" if found else "unknown place"

    def base(self, value: str) -> str:
        """A loop's bound before a constant was added to it, as for peeled last iterations."""
        op = self.made_by.get(value)
        if op and op.name in ("arith.addi", "arith.subi"):
            other = self.made_by.get(op.operands[1])
            if other and other.name == "arith.constant":
                return self.base(op.operands[0])
        return value

    def pointer(self, value: str) -> str:
        """The argument that a pointer comes from."""
        seen = set()
        while value not in seen:
            seen.add(value)
            if value in self.carries:
                value = self.carries[value]
            elif value in self.made_by and self.made_by[value].operands:
                op = self.made_by[value]
                value = op.operands[op.name == "arith.select"]
        return value.removeprefix("%")


def _header(op: Op) -> re.Match[str]:
    """(counter, start, stop, step, carried values) of a loop."""
    return search(_FOR, op.text.strip())


def search(pattern: str | re.Pattern[str], text: str) -> re.Match[str]:
    match = re.search(pattern, text)
    if match is None:
        raise ValueError(f"not as Triton prints it: {text}")
    return match


def iter_args(op: Op) -> list[tuple[str, str]]:
    """(argument, initial value) of each value that a loop carries."""
    carried = _header(op)[5]
    pairs = (pair.split(" = ") for pair in (carried or "").split(", ") if carried)
    return [(argument, start) for argument, start in pairs]


# --- What is in flight -----------------------------------------------------------------------


@dataclass(frozen=True)
class View:
    """A buffer: its allocation, and the indices into it."""

    alloc: str
    index: tuple[int, ...] = ()

    def overlaps(self, other: View) -> bool:
        return self.alloc == other.alloc and all(
            a == b for a, b in zip(self.index, other.index, strict=False)
        )


@dataclass(eq=False)
class Copy:
    """An asynchronous copy into a buffer, and when it was issued."""

    view: View
    op: Op
    iteration: int | None


@dataclass(eq=False)
class Matmul:
    """An asynchronous matmul: the buffers it reads, and (tcgen05) the accumulator it writes."""

    op: Op
    reads: list[View]
    writes: View | None = None


#: By loop and pointer: the number of iterations from a copy's issue to its use.
Distances = dict[tuple[int, str], set[int]]


class Drawn(int):
    """A number that only a launch knows, so the simulation drew it."""


class _Abandoned(Exception):
    """The numbers that were drawn make the simulation too long."""


def _divide(a: int, b: int) -> int:
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


_COMPARE: dict[str, Callable[[int, int], bool]] = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
}
#: By name without "arith." and suffix. No drawn number is negative, so unsigned equals signed.
_ARITHMETIC: dict[str, Callable[..., int]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": _divide,
    "rem": lambda a, b: a - b * _divide(a, b),
    "ceildiv": lambda a, b: -(-a // b),
    "floordiv": lambda a, b: a // b,
    "min": min,
    "max": max,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "shl": lambda a, b: a << min(b, 63),
    "shr": lambda a, b: a >> b,
    "select": lambda condition, a, b: a if condition else b,
    "ext": int,
    "trunc": int,
    "index_cast": int,
}
_INTEGER = re.compile(r"arith\.(\w+?)(?:[su]?i)?")
#: Operations of the GPU dialects that use registers, or their own scratch memory alone.
_INERT = {"ttg.convert_layout"}
_GPU_DIALECTS = ("ttg", "ttng", "gpu", "nvgpu", "nvvm", "nvws", "gluon", "tti", "llvm")
_CONTROL = ("scf.for", "scf.while", "scf.if", "cf.br", "cf.cond_br")
_ENDS = ("scf.yield", "scf.condition", "tt.return")
#: The largest number drawn in each run, in turn, so that loops run few, some and many times.
_SCALES = (700, 3000, 150, 6000, 300, 1500, 70, 6000)
_WORLDS, _LEAST_WORLDS = 24, 8
#: A loop was simulated enough once it ran this often: more than its buffers and its stages.
_TRIPS = 8
_MOST_TRIPS, _MOST_STEPS = 100, 60_000


class Simulation:
    """One run of a kernel's integers, with numbers drawn by ``world``.

    ``stretched`` is a loop whose bounds are moved apart, as soon as both are known.
    """

    def __init__(self, module: Module, world: int, stretched: Op | None = None) -> None:
        self.module = module
        bounds = _header(stretched).groups()[1:4] if stretched else ()
        self._bounds = tuple(map(module.base, bounds))
        self._random = random.Random(world)
        self._scale = _SCALES[world % len(_SCALES)]
        self._env: dict[str, Any] = {}
        self._memory: dict[Any, Drawn] = {}
        self._iteration: dict[int, int] = {}
        self._steps = 0
        self._open: list[Copy] = []
        self._groups: list[list[Copy]] = []
        self._matmuls: list[Matmul] = []
        self._unfenced: list[tuple[View, Op]] = []
        self._landed: dict[View, Copy] = {}
        self._commits: dict[View, list[Matmul | None]] = {}  # last matmul before each arrival
        self._passed: dict[View, int] = {}  # phases of a barrier known to be over
        self._read_since: list[tuple[View, Op]] = []  # this thread's reads since the last barrier
        self.found: dict[str, None] = {}  # in order
        self.ordered: dict[tuple[int, int], tuple[Op, Op]] = {}  # pairs that need a barrier between
        self.reached: set[int] = set()  # asynchronous operations that ran
        self.trips: dict[int, int] = {}
        self.distances: Distances = {}

    def run(self) -> None:
        for name, kind in self.module.arguments.items():
            self._env[name] = (name, 0) if "tt.ptr" in kind else self._draw(kind)
        try:
            self._region(self.module.function.regions[0])
        except _Abandoned:
            pass

    # Values

    def _draw(self, kind: str = "") -> Drawn | None:
        if kind.startswith(("f", "bf", "!")):
            return None
        return Drawn(self._random.randint(0, 1 if kind == "i1" else self._scale))

    def _number(self, name: str) -> int:
        value = self._env.get(name)
        if isinstance(value, int):
            return value
        drawn = self._env[name] = Drawn(self._random.randint(0, self._scale))
        return drawn

    def _view(self, name: str) -> View | None:
        value = self._env.get(name.split("[")[0])
        return value if isinstance(value, View) else None

    # Control flow

    def _region(self, blocks: list[Block]) -> list[Any]:
        """Run the region. Returns the values that its last operation passes on."""
        labels = {block.label: block for block in blocks}
        block = blocks[0]
        while True:
            for op in self.module.steps(block):
                if op.name in _ENDS:
                    if op.name == "scf.condition":
                        self._number(op.operands[0])
                    return [self._env.get(name) for name in op.operands]
                if op.name in ("cf.br", "cf.cond_br"):
                    block = self._jump(op, labels)
                    break
                self._step(op)
            else:
                return []

    def _jump(self, op: Op, labels: dict[str, Block]) -> Block:
        targets = re.findall(r"(\^\w+)(?:\(([^)]*)\))?", op.text)
        taken = op.name == "cf.cond_br" and not self._number(op.operands[0])
        label, handed = targets[taken]
        block = labels[label]
        values = [self._env.get(name) for name in _VALUE.findall(handed.split(" : ")[0])]
        self._env.update(zip(block.arguments, values, strict=True))
        self._tick()
        return block

    def _tick(self) -> None:
        self._steps += 1
        if self._steps > _MOST_STEPS:
            raise _Abandoned

    def _for(self, op: Op) -> None:
        counter, start, stop, step, _ = _header(op).groups()
        carried = iter_args(op)
        values = [self._env.get(name) for _, name in carried]
        first, end, by = map(self._number, (start, stop, step))
        trips = len(range(first, end, by)) if by > 0 else 0
        for i in range(min(trips, _MOST_TRIPS)):
            self._iteration[id(op)] = i
            self._env[counter] = first + i * by
            self._env.update(zip((name for name, _ in carried), values, strict=True))
            values = self._region(op.regions[0])
            self.trips[id(op)] = max(self.trips.get(id(op), 0), i + 1)
        self._iteration.pop(id(op), None)
        if trips > _MOST_TRIPS:
            raise _Abandoned
        self._env.update(zip(op.results, values, strict=True))

    def _while(self, op: Op) -> None:
        pairs = re.findall(rf"({_NAME}) = ({_NAME})", op.text.split(" : ")[0])
        values = [self._env.get(name) for _, name in pairs]
        for i in range(_MOST_TRIPS):
            self._iteration[id(op)] = i
            self._env.update(zip((name for name, _ in pairs), values, strict=True))
            handed = self._region(op.regions[0])
            if not handed[0]:
                self._iteration.pop(id(op), None)
                self._env.update(zip(op.results, handed[1:], strict=True))
                return
            body = op.regions[1]
            self._env.update(zip(body[0].arguments, handed[1:], strict=True))
            values = self._region(body)
            self.trips[id(op)] = max(self.trips.get(id(op), 0), i + 1)
        raise _Abandoned

    def _if(self, op: Op) -> None:
        taken = op.regions[:1] if self._number(op.operands[0]) else op.regions[1:]
        for region in taken:
            self._env.update(zip(op.results, self._region(region), strict=False))

    def _step(self, op: Op) -> None:
        self._tick()
        if op.name in ASYNCHRONOUS:
            self.reached.add(id(op))
        handler = _HANDLERS.get(op.name)
        if handler not in _TAKES_RESULTS:
            for name in op.operands:
                value = self._env.get(name)
                if isinstance(value, Matmul) and value in self._matmuls:
                    self._report(op, f"uses the result of {self._at(value.op)} before its wait")
        if handler:
            handler(self, op)
        elif op.arithmetic:
            self._compute(op, op.arithmetic)
        elif _unknown(op):
            self.found[f"not modelled: {op.name}"] = None
        elif len(op.results) == 1:
            self._env[op.results[0]] = self._draw("i1" if ".cmp" in op.name else op.result_type())
        if self._bounds and not set(op.results).isdisjoint(self._bounds):
            self._stretch(op)

    def _stretch(self, op: Op) -> None:
        start, stop, step = map(self._env.get, self._bounds)
        if isinstance(start, int) and isinstance(stop, int) and isinstance(step, int):
            if self._bounds[1] in op.results:
                self._env[self._bounds[1]] = start + (_TRIPS + 6) * step - 1
            elif self._bounds[0] in op.results:
                self._env[self._bounds[0]] = stop - (_TRIPS + 6) * step + 1

    # Numbers

    def _compute(self, op: Op, operation: Callable[..., int]) -> None:
        values = [self._number(name) for name in op.operands]
        if values[-1] == 0 and ("div" in op.name or "rem" in op.name):
            raise _Abandoned
        result = operation(*values)
        self._env[op.results[0]] = result & 1 if op.result_type() == "i1" else result

    def _constant(self, op: Op) -> None:
        literal = op.text.split(" : ")[0].split()[0]
        numbers = {"true": 1, "false": 0}
        if literal in numbers or re.fullmatch(r"-?\d+", literal):
            self._env[op.results[0]] = numbers[literal] if literal in numbers else int(literal)

    def _advance(self, op: Op) -> None:
        pointer, offset = op.operands
        start = self._env.get(pointer)
        if isinstance(start, tuple):
            self._env[op.results[0]] = (start[0], start[1] + self._number(offset))

    def _load(self, op: Op) -> None:
        """A place always has the same number; later places have larger ones, as offsets do."""
        place = self._env.get(op.operands[0])
        if not isinstance(place, tuple):
            self._env[op.results[0]] = self._draw()
            return
        pointer, offset = place
        unit = self._memory.setdefault(pointer, Drawn(self._random.randint(0, self._scale)))
        self._env[op.results[0]] = Drawn(unit * (1 + offset % 16))

    def _program(self, op: Op) -> None:
        count = op.name == "tt.get_num_programs"
        key = op.name, op.text.split()[0]
        drawn = Drawn(self._random.randint(4, 8) if count else self._random.choice((0, 0, 1, 3)))
        self._env[op.results[0]] = self._memory.setdefault(key, drawn)

    # Buffers

    def _allocate(self, op: Op) -> None:
        view = self._env[op.results[0]] = View(op.results[0])
        if op.operands:
            store = self._store_to if op.name == "ttg.local_alloc" else self._write
            store(view, op)

    def _index(self, op: Op) -> None:
        parent, index = self._view(op.operands[0]), self._env.get(op.operands[1])
        if parent is None or not isinstance(index, int) or isinstance(index, Drawn):
            self.found[f"not modelled: a buffer that nothing computes ({self._at(op)})"] = None
            self._env[op.results[0]] = parent
            return
        count = int(search(r"memdesc<(\d+)x", op.text)[1])
        if not 0 <= index < count:
            self._report(op, f"takes buffer {index} of {count}")
        self._env[op.results[0]] = View(parent.alloc, (*parent.index, index))

    def _same(self, op: Op) -> None:
        self._env[op.results[0]] = self._view(op.operands[0])

    def _free(self, op: Op) -> None:
        if view := self._view(op.operands[0]):
            self._clash(view, op, "gives {} back")

    def _load_local(self, op: Op) -> None:
        view = self._view(op.operands[0])
        self._read(view, op)
        if view:
            self._read_since.append((view, op))

    def _store_local(self, op: Op) -> None:
        self._store_to(self._view(op.operands[1]), op)

    def _store_to(self, view: View | None, op: Op) -> None:
        self._write(view, op)
        if view:
            self._unfenced.append((view, op))

    def _fence(self, op: Op) -> None:
        self._unfenced.clear()

    def _pending(self) -> Iterator[Copy]:
        yield from self._open
        for group in self._groups:
            yield from group

    def _read(self, view: View | None, op: Op, by_matmul: bool = False) -> None:
        if view is None:
            self.found[f"not modelled: what {op.name} reads"] = None
            return
        self._clash(view, op, "reads {}")
        if by_matmul:
            for stored, at in self._unfenced:
                if stored.overlaps(view):
                    self._report(op, f"reads {self._of(view)} with no fence since {self._at(at)}")
        landed = self._landed.get(view)
        if landed and op.loop and landed.op.loop is op.loop and landed.iteration is not None:
            ahead = self._iteration[id(op.loop)] - landed.iteration
            self.distances.setdefault((id(op.loop), landed.op.operands[0]), set()).add(ahead)

    def _write(self, view: View | None, op: Op) -> None:
        if view is None:
            self.found[f"not modelled: what {op.name} writes"] = None
        else:
            self._clash(view, op, "writes {}")

    def _clash(self, view: View, op: Op, does: str, adds: bool = False) -> None:
        """Report copies and matmuls in flight that conflict with ``op``, which ``does`` this.

        ``adds``: ``op`` is a matmul, which may add to the accumulator of earlier matmuls.
        """
        does = does.format(self._of(view))
        for copy in self._pending():
            if copy.view.overlaps(view):
                self._report(op, f"{does} while {self._at(copy.op)} fills it")
        for matmul in self._matmuls:
            if not does.startswith("reads") and any(view.overlaps(read) for read in matmul.reads):
                self._report(op, f"{does} while {self._at(matmul.op)} reads it")
            if not adds and matmul.writes and matmul.writes.overlaps(view):
                self._report(op, f"{does} while {self._at(matmul.op)} writes it")

    # Asynchronous copies

    def _copy(self, op: Op) -> None:
        view = self._view(op.operands[1])
        self._write(view, op)
        for read, by in self._read_since:
            if view and read.overlaps(view):
                self.ordered[id(by), id(op)] = by, op
        if view:
            iteration = self._iteration.get(id(op.loop)) if op.loop else None
            copy = self._landed[view] = Copy(view, op, iteration)
            self._open.append(copy)

    def _commit(self, op: Op) -> None:
        self._groups.append(self._open)
        self._open = []

    def _wait(self, op: Op) -> None:
        kept = op.number("num")
        self._groups = self._groups[-kept:] if kept else []
        self._barrier(op)  # Triton places a barrier behind the wait

    def _barrier(self, op: Op) -> None:
        self._read_since.clear()

    # Matmuls of sm_90

    def _warp_group_dot(self, op: Op) -> None:
        # An operand that is not a buffer is in registers.
        reads = [view for name in op.operands[:2] if (view := self._view(name))]
        for view in reads:
            self._read(view, op, by_matmul=True)
        matmul = Matmul(op, reads)
        self._matmuls.append(matmul)
        self._env[op.results[0]] = matmul
        if "isAsync = true" not in op.text:
            self._matmuls.clear()

    def _warp_group_dot_wait(self, op: Op) -> None:
        kept = op.number("pendings")
        # Other warps may not have finished these matmuls.
        for matmul in self._matmuls[:-kept] if kept else self._matmuls:
            self._read_since += [(view, matmul.op) for view in matmul.reads]
        self._matmuls = self._matmuls[-kept:] if kept else []
        for result, name in zip(op.results, op.operands, strict=True):
            self._env[result] = self._env.get(name)

    # Matmuls of sm_100, which end in the order of their issue and then signal a barrier

    def _tensor_core(self, op: Op) -> None:
        parts = op.text.split(" : ")[0].split(" {")[0].split(", ")
        views = [self._view(part.strip()) for part in parts]
        operands, barriers = views[: 2 if op.name == "ttng.tmem_copy" else 3], []
        for part, view in list(zip(parts, views, strict=True))[len(operands) :]:
            if view:
                when = _VALUE.findall(part)[1:]
                barriers += [view] if all(map(self._number, when)) else []
        if op.name != "ttng.tmem_copy" and not self._number(parts[4].strip()):
            return
        *reads, target = operands
        for view in reads:
            self._read(view, op, by_matmul=True)
        if target:
            self._clash(target, op, "writes {}", adds=True)
        self._matmuls.append(Matmul(op, [view for view in reads if view], target))
        for barrier in barriers:
            self._arrive(barrier)

    def _arrive(self, barrier: View) -> None:
        last = self._matmuls[-1] if self._matmuls else None
        self._commits.setdefault(barrier, []).append(last)

    def _commit_matmuls(self, op: Op) -> None:
        barrier, *when = op.operands
        if all(map(self._number, when)) and (view := self._view(barrier)):
            self._arrive(view)

    def _begin_barrier(self, op: Op) -> None:
        view = self._view(op.operands[0])
        if view is None or not op.text.split(" : ")[0].rstrip().endswith(", 1"):
            self.found[f"not modelled: a barrier of several arrivals ({self._at(op)})"] = None
        else:
            self._commits[view], self._passed[view] = [], 0

    def _wait_barrier(self, op: Op) -> None:
        barrier, phase, *when = _VALUE.findall(op.text.split(" : ")[0].split(" deps ")[0])
        if not all(map(self._number, when)):
            return
        view = self._view(barrier)
        if view not in self._passed:
            self.found[f"not modelled: a wait for {barrier} ({self._at(op)})"] = None
            return
        # A wait for a parity ends if the phase before the current one has this parity.
        passed, commits = self._passed[view], self._commits[view]
        passed += (passed + self._number(phase) + 1) % 2
        if passed > len(commits):
            self._report(op, "waits for a barrier that nothing arrives at")
            raise _Abandoned
        self._passed[view] = passed
        last = commits[passed - 1] if passed else None
        if last in self._matmuls:
            self._matmuls = self._matmuls[self._matmuls.index(last) + 1 :]

    def _load_tensor(self, op: Op) -> None:
        self._read(self._view(op.operands[0]), op)

    def _store_tensor(self, op: Op) -> None:
        parts = op.text.split(" : ")[0].split(", ")
        if self._number(parts[2].strip()):
            self._write(self._view(parts[1].strip()), op)

    # Messages

    def _report(self, op: Op, what: str) -> None:
        self.found[f"race: {self._at(op)} {what}"] = None

    def _at(self, op: Op) -> str:
        place = self.module.place(op.loc).split(" @[")[0].rsplit(":", 1)[0]
        return f"{op.name.split('.')[1]} ({place})"

    def _of(self, view: View) -> str:
        name = re.sub(r"_\d+$", "", view.alloc.removeprefix("%"))
        return f"{name}{''.join(f'[{i}]' for i in view.index)}"


_HANDLERS: dict[str, Callable[[Simulation, Op], None]] = {
    "scf.for": Simulation._for,
    "scf.while": Simulation._while,
    "scf.if": Simulation._if,
    "arith.constant": Simulation._constant,
    "tt.addptr": Simulation._advance,
    "tt.load": Simulation._load,
    "tt.get_program_id": Simulation._program,
    "tt.get_num_programs": Simulation._program,
    "ttg.local_alloc": Simulation._allocate,
    "ttg.local_dealloc": Simulation._free,
    "ttg.local_load": Simulation._load_local,
    "ttg.local_store": Simulation._store_local,
    "ttg.memdesc_index": Simulation._index,
    "ttg.memdesc_trans": Simulation._same,
    "ttg.memdesc_reshape": Simulation._same,
    "ttg.memdesc_reinterpret": Simulation._same,
    "ttg.memdesc_subslice": Simulation._same,
    "ttg.async_copy_global_to_local": Simulation._copy,
    "ttg.async_commit_group": Simulation._commit,
    "ttg.async_wait": Simulation._wait,
    "ttg.barrier": Simulation._barrier,
    "ttg.local_barrier": Simulation._barrier,
    "gpu.barrier": Simulation._barrier,
    "ttng.fence_async_shared": Simulation._fence,
    "ttng.warp_group_dot": Simulation._warp_group_dot,
    "ttng.warp_group_dot_wait": Simulation._warp_group_dot_wait,
    "ttng.tc_gen5_mma": Simulation._tensor_core,
    "ttng.tmem_copy": Simulation._tensor_core,
    "ttng.tc_gen5_commit": Simulation._commit_matmuls,
    "ttng.init_barrier": Simulation._begin_barrier,
    "ttng.inval_barrier": Simulation._free,
    "ttng.wait_barrier": Simulation._wait_barrier,
    "ttng.tmem_alloc": Simulation._allocate,
    "ttng.tmem_load": Simulation._load_tensor,
    "ttng.tmem_store": Simulation._store_tensor,
    "ttng.tmem_subslice": Simulation._same,
}
_SHARED = {name for name in _HANDLERS if name.startswith(("ttg.", "ttng."))}
#: Handlers of operations that may get an accumulator before its matmul is done.
_TAKES_RESULTS = {
    Simulation._for,
    Simulation._while,
    Simulation._if,
    Simulation._warp_group_dot,
    Simulation._warp_group_dot_wait,
}


def _unknown(op: Op) -> bool:
    """Whether an operation may touch shared memory in a way that is not modelled."""
    if op.name in _HANDLERS or op.name in _INERT:
        return False
    if op.name in _ENDS:  # these only pass values on
        return False
    foreign = op.name.split(".")[0] in _GPU_DIALECTS or op.name == "tt.call"
    return foreign or "memdesc" in op.text or "tt.descriptor_" in op.name


@dataclass
class Followed:
    """The results of a kernel's simulations."""

    wrong: dict[str, None] = field(default_factory=dict)  # in order
    ahead: Distances = field(default_factory=dict)
    ordered: dict[tuple[int, int], tuple[Op, Op]] = field(default_factory=dict)


def find_races(module: Module) -> Followed:
    """Every race of a kernel, and what else the simulations of its loops found."""
    seen = Followed()
    trips: dict[int, int] = {}
    missing = {id(op): op for op in module.ops if op.name in ASYNCHRONOUS}
    pipelined = [op for op in module.ops if op.name in LOOPS and _pipelined(module, op)]
    seen.wrong.update((f"not modelled: {op.name}", None) for op in module.ops if _unknown(op))

    def run(world: int, stretched: Op | None = None) -> None:
        simulation = Simulation(module, world, stretched)
        simulation.run()
        seen.wrong.update(simulation.found)
        seen.ordered.update(simulation.ordered)
        for reached in simulation.reached:
            missing.pop(reached, None)
        for loop, count in simulation.trips.items():
            trips[loop] = max(trips.get(loop, 0), count)
        for (loop, pointer), values in simulation.distances.items():
            key = loop, module.pointer(pointer)
            seen.ahead.setdefault(key, set()).update(values)

    def short(loop: Op) -> bool:
        return trips.get(id(loop), 0) < _TRIPS and not _fixed(module, loop)

    for world in range(_WORLDS if missing else 0):
        run(world)
        if world >= _LEAST_WORLDS and not missing and not any(map(short, pipelined)):
            break
    for loop in filter(short, pipelined):
        for world in range(_WORLDS if loop.name == "scf.for" else 0):
            run(world, loop)
            if not short(loop):
                break
        else:
            place = module.place(loop.loc)
            seen.wrong[f"not modelled: a loop that never ran {_TRIPS} times ({place})"] = None
    places = (f"{op.name} ({module.place(op.loc)})" for op in missing.values())
    seen.wrong.update((f"not modelled: never reached {place}", None) for place in places)
    return seen


ASYNCHRONOUS = (
    "ttg.async_copy_global_to_local",
    "ttng.warp_group_dot",
    "ttng.tc_gen5_mma",
)


def _pipelined(module: Module, loop: Op) -> bool:
    return any(op.loop is loop and op.name in ASYNCHRONOUS for op in module.ops)


def _fixed(module: Module, loop: Op) -> bool:
    """Whether constants alone decide how often a loop runs."""
    bounds = _header(loop).groups()[1:4] if loop.name == "scf.for" else ()
    makers = [module.made_by.get(bound) for bound in bounds]
    return bool(bounds) and all(op is not None and op.name == "arith.constant" for op in makers)
