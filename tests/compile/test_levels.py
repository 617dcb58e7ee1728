"""The machine code of csrc/ on x86: each level's loops are its own vector multiply-adds."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import fastplm

pytestmark = pytest.mark.compile

LIBRARIES = list(Path(fastplm.__file__).parent.glob("_C.*"))
SETUP = Path(__file__).parents[2] / "setup.py"
#: A level's multiply-add instruction, and the registers that only this level and higher ones use.
LEVELS = {"avx2": "ymm", "avx512": "zmm"}
#: Multiply-adds in a step of the largest tile, one for each vector of sums.
TILES = {
    ("attention", "avx2"): 6 * 2,
    ("attention", "avx512"): 6 * 4,
    ("linear", "avx2"): 6 * 2,
    ("linear", "avx512"): 12 * 2,
    ("linear in place", "avx2"): 3 * 4,
    ("linear in place", "avx512"): 6 * 4,
}
#: Functions of the largest tiles.
KERNELS = {
    "attention": "product_columns",
    "linear": "product_packed",
    "linear in place": "quad_tiles",
}
_FUNCTION = re.compile(r"^[0-9a-f]+ <(?P<name>.*)>:$")
_INSTRUCTION = re.compile(r"^ *(?P<at>[0-9a-f]+):\t(?P<text>.*)$")
_JUMP = re.compile(r"^j\w+ +(?P<to>[0-9a-f]+)")
_MULTIPLY_ADD = re.compile(r"^vfn?m(?:add|sub)\d+ps ")
#: Instructions on one lane, or on the function's own stack memory.
_LANES = re.compile(r"^v?(?:movss|insertps|pinsr|pextr|extractps)")
_STACK = re.compile(r"\(%r[sb]p")
#: How a function takes its frame, or one of several pages, each of which is touched first.
_FRAME = re.compile(r"^(?:sub +\$|lea +-)0x(?P<bytes>[0-9a-f]{1,8})(?:,%rsp|\(%rsp\),%r)")
MOST_FRAME = int(re.search(r"MOST_FRAME = (\d+)", SETUP.read_text())[1])


class Loop(NamedTuple):
    """An innermost loop: the instructions from the target of its jump to the jump."""

    function: str
    instructions: tuple[str, ...]

    def multiply_adds(self, register: str) -> int:
        return sum(
            bool(_MULTIPLY_ADD.match(text)) and f"%{register}" in text for text in self.instructions
        )


@pytest.fixture(scope="module")
def functions() -> dict[str, list[tuple[int, str]]]:
    """(address, instruction) of each function by its name."""
    if not LIBRARIES:
        pytest.skip("csrc/ is not built")
    if shutil.which("objdump") is None:
        pytest.skip("objdump is not on the PATH")
    command = ["objdump", "-d", "-C", "--no-show-raw-insn", str(LIBRARIES[0])]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    if "file format elf64-x86-64" not in listing:
        pytest.skip("not a library for x86-64 Linux")
    found: dict[str, list[tuple[int, str]]] = {}
    here: list[tuple[int, str]] = []
    for line in listing.splitlines():
        if match := _FUNCTION.match(line):
            here = found.setdefault(match["name"], [])
        elif match := _INSTRUCTION.match(line):
            here.append((int(match["at"], 16), match["text"]))
    if not any("fastplm::avx2::" in name for name in found):
        pytest.skip("csrc/ was built without levels")
    return found


def innermost_loops(name: str, code: list[tuple[int, str]]) -> Iterator[Loop]:
    first, last = code[0][0], code[-1][0]
    ends = []
    for at, text in code:
        jump = _JUMP.match(text)
        if jump and first <= int(jump["to"], 16) <= at <= last:
            ends.append((int(jump["to"], 16), at))
    for begin, end in ends:
        if not any((b, e) != (begin, end) and begin <= b and e <= end for b, e in ends):
            yield Loop(name, tuple(text for at, text in code if begin <= at <= end))


@pytest.fixture(scope="module")
def loops(functions) -> list[Loop]:
    return [
        loop
        for name, code in functions.items()
        if code and any(f"fastplm::{level}::" in name for level in LEVELS)
        for loop in innermost_loops(name, code)
    ]


@pytest.mark.parametrize(("op", "level"), TILES)
def test_the_largest_tile_is_all_in_registers(loops, op, level):
    tiles = [
        loop
        for loop in loops
        if f"fastplm::{level}::" in loop.function
        and KERNELS[op] in loop.function
        and loop.multiply_adds(LEVELS[level]) >= TILES[op, level]
    ]
    assert tiles, f"no loop of {KERNELS[op]} at {level} has {TILES[op, level]} multiply-adds"
    for tile in tiles:
        apart = [text for text in tile.instructions if _STACK.search(text) or _LANES.match(text)]
        assert not apart, f"{tile.function}: {apart}"


@pytest.mark.parametrize("level", LEVELS)
def test_no_loop_of_products_takes_vectors_apart(loops, level):
    """Planted: code as a compiler makes it of vectors wider than the unit."""
    looked_at = 0
    for loop in loops:
        work = loop.multiply_adds(LEVELS[level])
        # A loop with mostly other instructions is an outer loop, whose inner loop was not found.
        if f"fastplm::{level}::" not in loop.function or work < max(4, len(loop.instructions) / 8):
            continue
        looked_at += 1
        lanes = [text for text in loop.instructions if _LANES.match(text)]
        assert not lanes, f"{loop.function}: {lanes}"
    assert looked_at >= 10


def _is_of(level: str, name: str) -> bool:
    """objdump does not demangle some names of lambdas within lambdas."""
    return f"{level}::" in name or f"7fastplm{len(level)}{level}" in name


def test_no_level_is_used_outside_of_its_namespace(functions):
    """Code that all levels share must run on any CPU."""
    for name, code in functions.items():
        levels = {level for level in LEVELS if _is_of(level, name)}
        wide = [text for _, text in code if "%zmm" in text]
        if wide:
            assert "avx512" in levels, f"{name}: {wide[0]}"
        vex = [text for _, text in code if "%ymm" in text or text.startswith("vmov")]
        if vex:
            assert levels, f"{name}: {vex[0]}"


def frame_of(code: list[tuple[int, str]]) -> int:
    frames = (_FRAME.match(text) for _, text in code)
    return max((int(found["bytes"], 16) for found in frames if found), default=0)


@pytest.mark.parametrize("level", ["baseline", *LEVELS])
def test_no_function_takes_much_of_a_small_stack(functions, level):
    """What -Wframe-larger-than warns of when csrc/ is built; planted: a tile of 96 KB."""
    frames = {name: frame_of(code) for name, code in functions.items() if _is_of(level, name)}
    assert max(frames.values()) > 256, frames
    assert not {name: size for name, size in frames.items() if size > MOST_FRAME}


def test_the_gate_sees_what_it_looks_for():
    code = [
        (0x10, "vmovups (%rax),%ymm1"),
        (0x14, "vmovss %xmm0,0x8(%rsp)"),
        (0x18, "vfmadd231ps %ymm2,%ymm1,%ymm3"),
        (0x1C, "jne    14 <f+0x4>"),
        (0x20, "jne    10 <f>"),
    ]
    (loop,) = innermost_loops("f", code)
    assert loop.instructions == tuple(text for _, text in code[1:4])
    assert loop.multiply_adds("ymm") == 1 and loop.multiply_adds("zmm") == 0
    assert _LANES.match(loop.instructions[0]) and _STACK.search(loop.instructions[0])
    assert frame_of([(0, "sub    $0x18040,%rsp"), (7, "sub    $0x20,%rsp")]) == 0x18040
    assert frame_of([(0, "lea    -0x18000(%rsp),%r11"), (8, "sub    $0x1000,%rsp")]) == 0x18000
