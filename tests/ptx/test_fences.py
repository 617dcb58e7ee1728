"""Products that need a ``wgmma.fence`` by the PTX ISA, in hand-written PTX."""

from __future__ import annotations

import re

import pytest

from ptx.fences import unfenced
from ptx.machine import Program
from ptx.parse import PtxError, parse

KERNEL = """
.visible .entry kernel(.param .u64 in)
.reqntid 128
{{
    .reg .pred %p<9>;
    .reg .b32 %r<99>;
    .reg .b64 %rd<9>;
{code}
    ret;
}}
"""


def product(first: int, width: int = 8, a: str = "%rd1") -> str:
    sums = ",".join(f"%r{first + i}" for i in range(width // 2))
    shape = f"wgmma.mma_async.sync.aligned.m64n{width}k16.f32.bf16.bf16"
    return f"{shape} {{{sums}}}, {a}, %rd2, %p1, 1, 1, 0;"


FRAGMENT = "{%r50,%r51,%r52,%r53}"
FENCE = "wgmma.fence.sync.aligned;"
WAIT = "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;"


def loop(before: str, after: str) -> str:
    return f"$again: {before} {product(0)} {WAIT} {after} @%p2 bra $again;"


@pytest.mark.parametrize(
    ("code", "register"),
    [
        (f"{product(0)}", "before it"),
        (f"{FENCE} {product(0)}", None),
        (f"{FENCE} {product(0)} {product(0)}", None),
        (f"{FENCE} {product(0)} {product(4)}", None),
        # Other instructions wrote or read the sums since the fence.
        (f"{FENCE} add.f32 %r2, %r2, %r2; {product(0)}", "%r2 was accessed"),
        (f"add.f32 %r2, %r2, %r2; {FENCE} {product(0)}", None),
        (f"{FENCE} {product(0)} {WAIT} add.f32 %r60, %r2, %r2; {product(0)}", "%r2 was accessed"),
        (f"{FENCE} {product(0)} {WAIT} add.f32 %r60, %r2, %r2; {FENCE} {product(0)}", None),
        (f"{FENCE} st.shared.b32 [%r70], %r3; {product(0)}", "%r3 was accessed"),
        (f"{FENCE} mov.b32 %r1, 0; {product(0)}", "%r1 was accessed"),
        # A product of one shape follows one of another.
        (f"{FENCE} {product(0)} {product(0, 16)}", "%r0 was accessed"),
        # Other instructions accessed fragments of A.
        (f"{FENCE} add.s32 %r51, %r60, 1; {product(0, a=FRAGMENT)}", "%r51 was accessed"),
        (f"{FENCE} {product(0, a=FRAGMENT)} {product(4, a=FRAGMENT)}", None),
        (f"{FENCE} {product(50)} {product(0, a=FRAGMENT)}", "%r50 was accessed"),
        # A move is no access, but the value that it moves may be new.
        (f"add.s32 %r60, %r61, 1; {FENCE} mov.b32 %r1, %r60; {product(0)}", None),
        (f"{FENCE} add.s32 %r60, %r61, 1; mov.b32 %r1, %r60; {product(0)}", "%r1 was accessed"),
        # Paths that meet, and loops.
        (f"@%p2 bra $on; {FENCE} $on: {product(0)}", "before it"),
        (f"{FENCE} @%p2 bra $on; add.f32 %r2, %r2, %r2; $on: {product(0)}", "%r2 was accessed"),
        (FENCE + loop("", ""), None),
        (FENCE + loop("", "mul.f32 %r2, %r2, %r60;"), "%r2 was accessed"),
        (loop(FENCE, "mul.f32 %r2, %r2, %r60;"), None),
    ],
)
def test_a_product_needs_a_fence_between_it_and_other_accesses(code, register):
    kernel = KERNEL.format(code=re.sub(r"(\$\w+:)", r"\n\1\n", code))
    found = unfenced(parse(kernel))
    assert bool(found) == bool(register)
    if register:
        assert found[0].startswith("line ") and found[0].endswith(register)
        with pytest.raises(PtxError, match="wgmma.fence"):
            Program(kernel, 1024, 128)
