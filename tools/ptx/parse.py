"""PTX text to instructions, for the part of the language that Triton's compiler writes."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from functools import cached_property


class PtxError(Exception):
    """Something that the emulator does not know, or that a kernel must not do."""


@dataclass(frozen=True)
class Address:
    """``[base + offset]``: a register, a parameter or a symbol of shared memory."""

    base: str
    offset: int


@dataclass(frozen=True)
class Instruction:
    line: int
    text: str
    name: str  # with all its suffixes
    operands: tuple  # each a str, an Address, or a tuple of str for {…}
    guard: str | None = None  # the predicate of @p or @!p
    negated: bool = False

    @cached_property
    def parts(self) -> list[str]:
        return self.name.split(".")

    def error(self, why: str) -> PtxError:
        return PtxError(f"line {self.line}: {self.text}: {why}")


@dataclass
class Kernel:
    name: str
    params: dict[str, str]  # name -> type
    registers: dict[str, tuple[int, int]] = field(default_factory=dict)  # name -> (bits, index)
    symbols: dict[str, int] = field(default_factory=dict)  # places in shared memory
    static_shared: int = 0
    threads: int = 0  # threads of a block; 0 if the text does not say
    code: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)  # name -> index in code
    counts: dict[int, int] = field(default_factory=dict)  # bits -> number of registers


#: Shared memory begins here: the system reserves its first KB, as on sm_90.
SHARED_BASE = 1024
_ENTRY = re.compile(r"\.entry\s+([\w$]+)\s*\(([^)]*)\)([^{]*)\{")
_SHARED = re.compile(r"\.shared\s+\.align\s+(\d+)\s+\.b8\s+([\w$]+)\[(\d*)\]\s*;")
_TOKEN = re.compile(
    r"\s*(?:(?P<label>[\w$]+):|(?P<brace>[{}])|(?P<text>[^;{}]*(?:\{[^}]*\}[^;{}]*)*;))"
)
_REGISTERS = re.compile(r"\.reg\s+\.(\w+)\s+(.*);", re.DOTALL)
_BITS = {"pred": 1}


def parse(text: str) -> Kernel:
    """The one kernel of a PTX module."""
    clean = re.sub(r"//[^\n]*", "", text)
    entry = _ENTRY.search(clean)
    if entry is None:
        raise PtxError("no kernel (.entry) in this PTX")
    params = {}
    for param in entry[2].split(","):
        words = param.split()
        if words:
            params[words[-1]] = words[1].removeprefix(".")
    kernel = Kernel(entry[1], params)
    threads = re.search(r"\.(?:reqntid|maxntid)\s+(\d+)", entry[3])
    kernel.threads = int(threads[1]) if threads else 0
    _place_shared(kernel, clean)
    _read_body(kernel, clean, entry.end())
    return kernel


def _place_shared(kernel: Kernel, text: str) -> None:
    dynamic = []
    for align, name, size in _SHARED.findall(text):
        if size:
            start = -(-kernel.static_shared // int(align)) * int(align)
            kernel.symbols[name] = SHARED_BASE + start
            kernel.static_shared = start + int(size)
        else:
            dynamic.append(name)
    kernel.static_shared = -(-kernel.static_shared // 1024) * 1024
    for name in dynamic:
        kernel.symbols[name] = SHARED_BASE + kernel.static_shared


def _read_body(kernel: Kernel, text: str, position: int) -> None:
    line, counted = text.count("\n", 0, position) + 1, position
    scopes: list[tuple[int, list[str]]] = [(0, [])]  # (index of its first instruction, labels)
    while scopes:
        skipped = re.compile(r"\s*\.(?:loc|file)\b[^\n]*").match(text, position)
        if skipped:
            position = skipped.end()
            continue
        token = _TOKEN.match(text, position)
        if token is None:
            raise PtxError(f"line {line}: cannot read {text[position : position + 60]!r}")
        start = token.start(token.lastgroup)
        line, counted = line + text.count("\n", counted, start), start
        position = token.end()
        if token["label"]:
            kernel.labels[token["label"]] = len(kernel.code)
            scopes[-1][1].append(token["label"])
        elif token["brace"] == "{":
            scopes.append((len(kernel.code), []))
        elif token["brace"]:
            begin, labels = scopes.pop()
            if scopes:
                _make_local(kernel, begin, labels)
        else:
            _read_statement(kernel, token["text"][:-1].strip(), line)


def _make_local(kernel: Kernel, begin: int, labels: list[str]) -> None:
    """Rename the labels of a scope that ends, as the next scope may have the same."""
    for label in labels:
        name = f"{label}@{begin}"
        kernel.labels[name] = kernel.labels.pop(label)
        for index, ins in enumerate(kernel.code[begin:], begin):
            if ins.parts[0] == "bra" and ins.operands == (label,):
                kernel.code[index] = replace(ins, operands=(name,))


def _read_statement(kernel: Kernel, text: str, line: int) -> None:
    if text.startswith(".reg"):
        kind, names = _REGISTERS.match(text + ";").groups()
        bits = _BITS.get(kind) or int(kind[1:])
        for name in names.split(","):
            name, _, many = name.strip().partition("<")
            count = int(many[:-1]) if many else None
            for each in [name] if count is None else [f"{name}{i}" for i in range(count)]:
                if each not in kernel.registers:
                    kernel.registers[each] = bits, kernel.counts.get(bits, 0)
                    kernel.counts[bits] = kernel.counts.get(bits, 0) + 1
        return
    if text.startswith(".pragma"):
        return
    if text.startswith("."):
        raise PtxError(f"line {line}: {text}: a directive that the emulator does not know")
    match = re.match(r"(?:@(!?)([\w$%]+)\s+)?([\w.:]+)\s*(.*)", text, re.DOTALL)
    if match is None:
        raise PtxError(f"line {line}: cannot read {text!r}")
    negated, guard, name, operands = match.groups()
    short = " ".join(text.split())
    kernel.code.append(Instruction(line, short, name, _operands(operands), guard, bool(negated)))


def _operands(text: str) -> tuple:
    found = []
    for part in re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*", text):
        part = part.strip()
        if part[0] == "{":
            found.append(tuple(word.strip() for word in part[1:-1].split(",")))
        elif part[0] == "[":
            base, _, offset = part[1:-1].replace("+ -", "+-").partition("+")
            found.append(Address(base.strip(), int(offset or "0", 0)))
        else:
            found.append(part)
    return tuple(found)


def number(text: str) -> int | None:
    """The bits of an immediate; None if the text is not one."""
    if re.fullmatch(r"0[fF][0-9a-fA-F]{8}|0[dD][0-9a-fA-F]{16}", text):
        return int(text[2:], 16)
    if re.fullmatch(r"-?(0[xX][0-9a-fA-F]+|\d+)U?", text):
        return int(text.rstrip("U"), 0)
    return None
