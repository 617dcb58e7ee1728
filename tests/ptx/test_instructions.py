"""Single instructions in hand-written PTX give the results of the PTX ISA."""

from __future__ import annotations

import math
import struct

import numpy as np
import pytest

from ptx.machine import Program, Schedule
from ptx.memory import GlobalMemory
from ptx.parse import PtxError, parse

KERNEL = """
.version 8.7
.target sm_90
.address_size 64
.extern .shared .align 16 .b8 global_smem[];
.visible .entry kernel(.param .u64 in, .param .u64 out)
.reqntid {threads}
{{
    .reg .pred %p<9>;
    .reg .b16 %rs<9>;
    .reg .b32 %r<20>;
    .reg .b64 %rd<20>;
    ld.param.b64 %rd1, [in];
    ld.param.b64 %rd2, [out];
    mov.u32 %r9, %tid.x;
    mul.wide.u32 %rd3, %r9, 32;
    add.s64 %rd1, %rd1, %rd3;
    add.s64 %rd2, %rd2, %rd3;
    ld.global.b64 %rd4, [%rd1];
    ld.global.b64 %rd5, [%rd1+8];
    ld.global.b64 %rd6, [%rd1+16];
    cvt.u32.u64 %r4, %rd4;
    cvt.u32.u64 %r5, %rd5;
    cvt.u32.u64 %r6, %rd6;
    cvt.u16.u32 %rs4, %r4;
    cvt.u16.u32 %rs5, %r5;
    cvt.u16.u32 %rs6, %r6;
    mov.b64 %rd7, 0;
    {code}
    st.global.b64 [%rd2], %rd7;
    ret;
}}
"""
LINE = KERNEL[: KERNEL.index("{code}")].count("\n") + 1
# PTX that stores a result from a 16-bit, a 32-bit and a 64-bit register, and from a predicate.
FROM = {
    "rs": "cvt.u64.u16 %rd7, %rs7;",
    "r": "cvt.u64.u32 %rd7, %r7;",
    "rd": "",
    "p": "selp.b64 %rd7, 1, 0, %p1;",
}


def run(
    code: str,
    words: np.ndarray,
    seed: int = 0,
    shared: int = 1024,
    blocks: int = 1,
    watched: bool | None = None,
) -> np.ndarray:
    """The 64-bit result of every thread; each thread reads four 64-bit words."""
    threads = len(words)
    given = np.ascontiguousarray(words, np.uint64)
    out = np.zeros((threads, 4), np.uint64)
    program = Program(KERNEL.format(code=code, threads=threads), shared, threads)
    spans = {n: (a.ctypes.data, a.ctypes.data + a.nbytes) for n, a in dict(x=given, y=out).items()}
    params = {n: struct.pack("<Q", a.ctypes.data) for n, a in {"in": given, "out": out}.items()}
    program.run((blocks,), params, GlobalMemory(spans), Schedule(seed, watched=watched))
    return out[:, 0]


def bits(value) -> int:
    """The 64-bit word of a number: the fp32 bits of a float, or an integer itself."""
    if isinstance(value, float):
        return struct.unpack("<I", struct.pack("<f", value))[0]
    return value % 2**64


def one(code: str, kind: str, *given) -> int:
    words = np.zeros((32, 4), np.uint64)
    words[:, : len(given)] = [bits(value) for value in given]
    found = set(run(f"{code}; {FROM[kind]}", words).tolist())
    assert len(found) == 1
    return found.pop()


NAN, INF = math.nan, math.inf
DOWN = 1.0 - 2.0**-24  # the fp32 below 1
ARITHMETIC = [
    ("add.s32 %r7, %r4, %r5", "r", (2**31 - 1, 1), 2**31),
    ("add.s16x2 %r7, %r4, %r5", "r", (0x0001FFFF, 0x00020001), 0x00030000),
    ("sub.s32 %r7, %r4, %r5", "r", (0, 1), 2**32 - 1),
    ("mul.lo.s32 %r7, %r4, %r5", "r", (2**31, 3), 2**31),
    ("mul.hi.u32 %r7, %r4, %r5", "r", (0xD2511F53, 0xCD9E8D57), 0xD2511F53 * 0xCD9E8D57 >> 32),
    ("mul.hi.s32 %r7, %r4, %r5", "r", (-2, 5), 2**32 - 1),
    ("mul.wide.s32 %rd7, %r4, %r5", "rd", (-2, 5), -10),
    ("mul.wide.u32 %rd7, %r4, 4", "rd", (2**32 - 1,), 4 * (2**32 - 1)),
    ("mul.wide.s16 %r7, %rs4, %rs5", "r", (-2, 5), 2**32 - 10),
    ("mad.wide.s32 %rd7, %r4, -4, %rd5", "rd", (3, 2**40), 2**40 - 12),
    ("mad.lo.s32 %r7, %r4, %r5, %r6", "r", (3, 4, -2), 10),
    ("div.s32 %r7, %r4, %r5", "r", (-7, 2), 2**32 - 3),
    ("rem.s32 %r7, %r4, %r5", "r", (-7, 2), 2**32 - 1),
    ("div.u32 %r7, %r4, %r5", "r", (-7, 2), (2**32 - 7) // 2),
    ("div.s64 %rd7, %rd4, %rd5", "rd", (-(2**40) - 1, 2**10), -(2**30)),
    ("min.s32 %r7, %r4, %r5", "r", (-1, 1), 2**32 - 1),
    ("min.u32 %r7, %r4, %r5", "r", (-1, 1), 1),
    ("min.relu.s32 %r7, %r4, %r5", "r", (-1, 1), 0),
    ("neg.s32 %r7, %r4", "r", (5,), 2**32 - 5),
    ("and.b32 %r7, %r4, 0x0F", "r", (0xAB,), 0xB),
    ("xor.b64 %rd7, %rd4, %rd5", "rd", (2**40 + 1, 1), 2**40),
    ("not.b32 %r7, %r4", "r", (1,), 2**32 - 2),
    ("shl.b32 %r7, %r4, 33", "r", (1,), 0),
    ("shl.b32 %r7, %r4, %r5", "r", (1, 40), 0),
    ("shl.b64 %rd7, %rd4, 33", "rd", (1,), 2**33),
    ("shr.u32 %r7, %r4, 4", "r", (-1,), 2**28 - 1),
    ("shr.s32 %r7, %r4, %r5", "r", (-64, 3), 2**32 - 8),
    ("shr.s32 %r7, %r4, %r5", "r", (-64, 99), 2**32 - 1),
    ("bfe.u32 %r7, %r4, 4, 8", "r", (0xABCDE,), 0xCD),
    ("bfe.s32 %r7, %r4, 4, 8", "r", (0xABCDE,), 2**32 - 0x33),
    ("bfe.s32 %r7, %r4, %r5, %r6", "r", (0x7CDE, 12, 1), 2**32 - 1),
    ("bfi.b32 %r7, %r4, %r5, 8, 4", "r", (0xFA, 0x1234), 0x1A34),
    ("popc.b32 %r7, %r4", "r", (0xFF01,), 9),
    ("clz.b32 %r7, %r4", "r", (1,), 31),
    ("brev.b32 %r7, %r4", "r", (1,), 2**31),
    ("prmt.b32 %r7, %r4, %r5, 0x5410", "r", (0xAABBCCDD, 0x11223344), 0x3344CCDD),
    ("prmt.b32 %r7, %r4, %r5, %r6", "r", (0xAABBCCDD, 0x11223344, 0x7632), 0x1122AABB),
    ("prmt.b32 %r7, %r4, 0, 0x9180", "r", (0x7F80,), 0x007FFF80 & 0xFFFF | 0x007F0000),
    ("shf.l.wrap.b32 %r7, %r4, %r5, 8", "r", (0xAB000000, 0x1), 0x1AB),
    ("lop3.b32 %r7, %r4, %r5, %r6, 0x96", "r", (0b1100, 0b1010, 0b1), 0b0111),
    ("add.f32 %r7, %r4, %r5", "r", (1.0, 2.0**-25), 1.0),
    ("fma.rn.f32 %r7, %r4, %r5, %r6", "r", (DOWN, DOWN, -1.0), DOWN * DOWN - 1.0),
    ("mul.f32 %r7, %r4, %r5", "r", (2.0**-100, 2.0**-40), 2.0**-140),
    ("mul.ftz.f32 %r7, %r4, %r5", "r", (2.0**-100, 2.0**-40), 0.0),
    ("add.sat.f32 %r7, %r4, %r5", "r", (1.0, 2.0), 1.0),
    ("max.f32 %r7, %r4, %r5", "r", (NAN, -1.0), -1.0),
    ("min.f32 %r7, %r4, %r5", "r", (INF, -INF), -INF),
    ("max.NaN.f32 %r7, %r4, %r5", "r", (NAN, -1.0), NAN),
    ("max.f32 %r7, %r4, %r5, %r6", "r", (NAN, -1.0, 3.0), 3.0),
    ("ex2.approx.ftz.f32 %r7, %r4", "r", (-INF,), 0.0),
    ("ex2.approx.ftz.f32 %r7, %r4", "r", (3.0,), 8.0),
    ("ex2.approx.ftz.f32 %r7, %r4", "r", (-140.0,), 0.0),
    ("lg2.approx.f32 %r7, %r4", "r", (0.0,), -INF),
    ("rcp.approx.f32 %r7, %r4", "r", (8.0,), 0.125),
    ("div.full.f32 %r7, %r4, %r5", "r", (1.0, 3.0), 1 / 3),
    ("abs.f32 %r7, %r4", "r", (-2.5,), 2.5),
    ("fma.rn.bf16x2 %r7, %r4, %r5, %r6", "r", (0x3F803F80, 0x40003F80, 0x3F803F80), 0x40404000),
    (
        "mul.f32x2 %rd7, %rd4, %rd5",
        "rd",
        (0x400000003F800000, 0x40000000C0000000),
        0x40800000C0000000,
    ),
    ("mul.f16 %rs7, %rs4, %rs5", "rs", (0x3E00, 0x4000), 0x4200),  # 1.5 * 2 = 3
]
CONVERSIONS = [
    ("cvt.s64.s32 %rd7, %r4", "rd", (-5,), -5),
    ("cvt.u64.u32 %rd7, %r4", "rd", (-5,), 2**32 - 5),
    ("cvt.u64.s32 %rd7, %r4", "rd", (-5,), -5),
    ("cvt.u32.u16 %r7, %rs4", "r", (0x12345,), 0x2345),
    ("cvt.s32.s8 %r7, %rs4", "r", (0x180,), 2**32 - 128),
    ("cvt.u32.u8 %r7, %rs4", "r", (0x180,), 0x80),
    ("cvt.rn.f32.s32 %r7, %r4", "r", (-(2**24) - 1,), -(2.0**24)),
    ("cvt.rzi.s32.f32 %r7, %r4", "r", (-2.7,), 2**32 - 2),
    ("cvt.rni.s32.f32 %r7, %r4", "r", (2.5,), 2),
    ("cvt.rpi.s32.f32 %r7, %r4", "r", (2.1,), 3),
    ("cvt.rzi.s32.f32 %r7, %r4", "r", (3e9,), 2**31 - 1),
    ("cvt.rzi.u32.f32 %r7, %r4", "r", (-1.0,), 0),
    ("cvt.rzi.s32.f32 %r7, %r4", "r", (NAN,), 0),
    ("cvt.rmi.f32.f32 %r7, %r4", "r", (-2.5,), -3.0),
    ("cvt.sat.f32.f32 %r7, %r4", "r", (-2.5,), 0.0),
    ("cvt.rn.f16.f32 %rs7, %r4", "rs", (1.0 + 2.0**-11,), 0x3C00),  # a tie rounds to even
    ("cvt.rn.f16.f32 %rs7, %r4", "rs", (65520.0,), 0x7C00),
    ("cvt.rn.bf16.f32 %rs7, %r4", "rs", (1.0 + 2.0**-8,), 0x3F80),
    ("cvt.rn.bf16.f32 %rs7, %r4", "rs", (1.0 + 3 * 2.0**-8,), 0x3F82),
    ("cvt.rn.bf16.f32 %rs7, %r4", "rs", (NAN,), 0x7FFF),
    ("cvt.rn.bf16x2.f32 %r7, %r4, %r5", "r", (1.0, 2.0), 0x3F804000),
    ("cvt.f32.bf16 %r7, %rs4", "r", (0xC000,), -2.0),
    ("cvt.f32.f16 %r7, %rs4", "r", (0xC000,), -2.0),
    ("cvt.rna.tf32.f32 %r7, %r4", "r", (1.0 + 2.0**-11,), 1.0 + 2.0**-10),
    ("mov.b32 {%rs7, _}, %r4", "rs", (0x12345678,), 0x5678),
    ("mov.b64 {_, %r7}, %rd4", "r", (0x12345678 << 32,), 0x12345678),
    ("mov.b32 %r7, {%rs4, %rs5}", "r", (0x12345678, 0xAAAABBBB), 0xBBBB5678),
    ("mov.b32 %r7, 0fBF800000", "r", (), -1.0),
    ("mov.u32 %r7, 0xffffffffffffffff", "r", (), 2**32 - 1),
]
COMPARISONS = [
    ("setp.lt.s32 %p1, %r4, %r5", (-1, 1), 1),
    ("setp.lt.u32 %p1, %r4, %r5", (-1, 1), 0),
    ("setp.eq.f32 %p1, %r4, %r5", (NAN, NAN), 0),
    ("setp.ne.f32 %p1, %r4, %r5", (NAN, NAN), 0),
    ("setp.neu.f32 %p1, %r4, %r5", (NAN, NAN), 1),
    ("setp.geu.f32 %p1, %r4, %r5", (NAN, 1.0), 1),
    ("setp.geu.f32 %p1, %r4, %r5", (0.0, 1.0), 0),
    ("setp.nan.f32 %p1, %r4, %r5", (1.0, NAN), 1),
    ("setp.num.f32 %p1, %r4, %r5", (1.0, NAN), 0),
    ("setp.gt.bf16 %p1, %rs4, %rs5", (0x4000, 0xC000), 1),
    ("setp.lt.s32 %p2, %r4, %r5; setp.eq.and.s32 %p1, %r6, 0, %p2", (1, 2, 1), 0),
    ("setp.lt.s32 %p2, %r4, %r5; not.pred %p1, %p2", (1, 2), 0),
]


@pytest.mark.parametrize(("code", "kind", "given", "expected"), ARITHMETIC + CONVERSIONS)
def test_result(code, kind, given, expected):
    assert one(code, kind, *given) == bits(expected)


@pytest.mark.parametrize(("code", "given", "expected"), COMPARISONS)
def test_comparison(code, given, expected):
    assert one(code, "p", *given) == expected


def by_thread(threads: int = 32) -> np.ndarray:
    """The inputs of threads: each thread's number, and 1000 more."""
    words = np.zeros((threads, 4), np.uint64)
    words[:, 0] = np.arange(threads)
    words[:, 1] = 1000 + np.arange(threads)
    return words


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("shfl.sync.bfly.b32 %r7, %r4, 5, 31, -1", lambda i: i ^ 5),
        ("shfl.sync.up.b32 %r7, %r4, 3, 0, -1", lambda i: i - 3 if i >= 3 else i),
        ("shfl.sync.down.b32 %r7, %r4, 3, 31, -1", lambda i: i + 3 if i < 29 else i),
        ("shfl.sync.idx.b32 %r7, %r5, %r4, 31, -1", lambda i: 1000 + i),
        ("shfl.sync.idx.b32 %r7, %r4, 1, 0x181f, -1", lambda i: i // 8 * 8 + 1),
        ("redux.sync.add.s32 %r7, %r4, %r5", lambda i: 496),
        ("setp.lt.s32 %p1, %r4, 4; vote.sync.ballot.b32 %r7, %p1, -1", lambda i: 15),
        (
            "mov.b32 %r7, 7; setp.eq.s32 %p1, %r4, 4; @!%p1 add.s32 %r7, %r4, 1",
            lambda i: 7 if i == 4 else i + 1,
        ),
    ],
)
def test_between_the_threads_of_a_warp(code, expected):
    found = run(f"{code}; {FROM['r']}", by_thread())
    assert found.tolist() == [expected(i) for i in range(32)]


def test_blocks_run_in_an_order_of_their_own_by_each_seed():
    """All threads write to one place, and the last write stays."""
    code = "mov.u32 %r7, %ctaid.x; cvt.u64.u32 %rd7, %r7;"
    last = [set(run(code, by_thread(), seed, blocks=40).tolist()) for seed in range(6)]
    assert all(len(found) == 1 and found <= set(range(40)) for found in last)
    assert len(set().union(*last)) > 1


DIVERGENT = """
    mov.b32 %r7, 0;
    and.b32 %r10, %r9, 3;
$again:
    add.s32 %r7, %r7, %r9;
    add.s32 %r10, %r10, -1;
    setp.ge.s32 %p1, %r10, 0;
    @%p1 bra $again;
    setp.lt.s32 %p2, %r9, 16;
    @%p2 bra $low;
    add.s32 %r7, %r7, 1000;
    bra.uni $end;
$low:
    add.s32 %r7, %r7, 1;
$end:
    cvt.u64.u32 %rd7, %r7;
"""


def test_threads_that_take_different_ways_meet_again():
    expected = [i * (i % 4 + 1) + (1 if i < 16 else 1000) for i in range(64)]
    for seed in range(3):
        assert run(DIVERGENT, by_thread(64), seed).tolist() == expected


EXCHANGE = """
    shl.b32 %r10, %r9, 2;
    mov.b32 %r11, global_smem;
    add.s32 %r12, %r11, %r10;
    st.shared.b32 [%r12], %r5;
    {barrier}
    xor.b32 %r13, %r10, 128;
    add.s32 %r14, %r11, %r13;
    ld.shared.b32 %r7, [%r14];
    cvt.u64.u32 %rd7, %r7;
"""


def test_a_barrier_orders_and_without_it_memory_is_not_written_yet():
    """Warps 0 and 1, and 2 and 3, exchange their numbers."""
    expected = [1000 + (i ^ 32) for i in range(128)]
    found = {True: set(), False: set()}
    for barrier in (True, False):
        code = EXCHANGE.format(barrier="bar.sync 0;" if barrier else "")
        for seed in range(4):
            found[barrier].add(tuple(run(code, by_thread(128), seed, watched=False).tolist()))
    assert found[True] == {tuple(expected)}
    wrong = {value for result in found[False] for value in result} - set(expected)
    assert wrong == {0xFFFFFFFF}


def test_accesses_that_no_barrier_orders_are_an_error_in_every_order_of_warps():
    code = EXCHANGE.format(barrier="")
    for seed in range(4):
        message = "with no barrier in between: 4 bytes at [0-9]+ of shared memory"
        with pytest.raises(PtxError, match=message):
            run(code, by_thread(128), seed, watched=True)
        run(code, by_thread(32), seed, watched=True)  # a single warp needs no barrier


OVERWRITE = (
    EXCHANGE.format(barrier="bar.sync 0;")
    + """
    {barrier}
    cp.async.ca.shared.global [%r12], [%rd1], 0x4;
    cp.async.wait_all;
"""
)


def test_a_copy_over_memory_that_another_warp_still_reads_is_an_error():
    """The copy lands early or late, as the hardware may copy at once."""
    assert run(OVERWRITE.format(barrier="bar.sync 0;"), by_thread(128), 0)[0] == 1032
    with pytest.raises(PtxError, match="with no barrier in between"):
        run(OVERWRITE.format(barrier=""), by_thread(128), 0)


COPY = """
    shl.b32 %r10, %r9, 4;
    mov.b32 %r11, global_smem;
    add.s32 %r12, %r11, %r10;
    setp.ne.s32 %p1, %r9, 3;
    selp.b32 %r13, 16, 0, %p1;
    cp.async.cg.shared.global [%r12], [%rd1], 0x10, %r13;
    cp.async.commit_group;
    {wait}
    ld.shared.b64 %rd7, [%r12+8];
"""


@pytest.mark.parametrize("wait", ("cp.async.wait_group 0;", "cp.async.wait_all;"))
def test_a_copy_that_is_waited_for_has_landed_and_a_skipped_one_is_zero(wait):
    for seed in range(4):
        found = run(COPY.format(wait=wait), by_thread(), seed)
        assert found.tolist() == [0 if i == 3 else 1000 + i for i in range(32)]


def test_a_copy_that_is_not_waited_for_lands_late_early_or_by_chance():
    copies = [run(COPY.format(wait="cp.async.wait_group 1;"), by_thread(), s) for s in range(2)]
    assert set(copies[0].tolist()) == {2**64 - 1}
    assert 0xFFFFFFFFFFFFFFFF not in copies[1].tolist()


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("frob.b32 %r7, %r4", r"frob.b32 %r7, %r4: an instruction that the emulator"),
        ("add.rz.f32 %r7, %r4, %r5", r"modifiers that the emulator does not know"),
        ("ld.local.b32 %r7, [%rd1]", "local: a modifier that the emulator does not know"),
        ("@%p1 bar.sync 0", "barrier"),
        ("ld.global.b32 %r7, [%rd1+1024]", "in no tensor: the nearest tensor is x"),
        ("ld.global.b32 %r7, [%rd1+2]", "not aligned"),
        ("st.global.b32 [%rd2+-4], %r4", "in no tensor: the nearest tensor is y"),
        ("ld.shared.b32 %r7, [global_smem+1024]", "4 bytes at 1024 of 1024 bytes"),
        ("mov.u32 %r7, %clock", "%clock: an operand that the emulator does not know"),
    ],
)
def test_what_is_not_known_or_not_allowed_is_named(code, message):
    with pytest.raises(PtxError, match=f"line {LINE}: .*{message}"):
        run(code + ";", by_thread())


def test_a_barrier_that_too_few_threads_reach_hangs():
    code = "bar.sync 1, 64"
    with pytest.raises(PtxError, match="kernel hangs: no thread can go on"):
        run(code + ";", by_thread())


def test_a_text_without_a_kernel():
    with pytest.raises(PtxError, match="no kernel"):
        parse("// nothing")


TILE = """
    shl.b32 %r10, %r9, 4;
    mov.b32 %r11, global_smem;
    add.s32 %r12, %r11, %r10;
    st.shared.v2.b64 [%r12], {%rd4, %rd5};
    bar.sync 0;
    MOVE
    cvt.u64.u32 %rd7, %r7;
"""


@pytest.mark.parametrize("transposed", (False, True))
def test_a_tile_of_a_matrix_and_back(transposed):
    """Thread 4 g + t holds elements 2 t and 2 t + 1 of row g, or of column g."""
    tile = np.arange(64, dtype=np.uint16).reshape(8, 8)
    words = np.zeros((32, 4), np.uint64)
    words[:8, :2] = tile.view(np.uint64)
    load = f"ldmatrix.sync.aligned.m8n8.x1{'.trans' * transposed}.shared.b16 {{%r7}}, [%r12];"
    found = run(TILE.replace("MOVE", load), words, shared=512).astype(np.uint32)
    seen = tile.T if transposed else tile
    assert (found.view(np.uint16).reshape(8, 8) == seen).all()
    store = load.replace("ld", "st", 1).replace("{%r7}, [%r12]", "[%r12], {%r4}")
    move = f"{store} bar.sync 0; shl.b32 %r13, %r9, 2; add.s32 %r14, %r11, %r13;"
    words = np.zeros((32, 4), np.uint64)
    words[:, 0] = tile.reshape(32, 2).view(np.uint32)[:, 0]
    found = run(TILE.replace("MOVE", move + "ld.shared.b32 %r7, [%r14];"), words, shared=512)
    assert (found.astype(np.uint32).view(np.uint16).reshape(8, 8) == seen).all()


PRODUCT = """
    mov.b64 {{%r10, %r11}}, %rd4;
    mov.b64 {{%r12, %r13}}, %rd5;
    mov.b64 {{%r14, %r15}}, %rd6;
    mov.b32 %r16, 0;
    mma.sync.aligned.m16n8k{k}.row.col.f32.tf32.tf32.f32
        {{%r16, %r17, %r18, %r19}}, {a}, {b}, {{%r16, %r16, %r16, %r16}};
    mov.b64 %rd7, {{%r{first}, %r{second}}};
"""


@pytest.mark.parametrize("k", (4, 8))
def test_a_product_in_tf32_ignores_the_low_13_bits(k):
    """Thread 4 g + t holds a in rows g and g + 8, b in column g, both at places t and t + 4 of k,
    and columns 2 t and 2 t + 1 of the result. Numbers that were rounded, not truncated, would be
    one step larger."""
    draw = np.random.default_rng(0)
    whole = draw.integers(-15, 16, 16 * k), draw.integers(-15, 16, k * 8)
    a, b = (part.astype(np.float32).reshape(-1, n) for part, n in zip(whole, (k, 8), strict=True))
    g, t = np.divmod(np.arange(32), 4)
    words = np.zeros((32, 6), np.float32)
    for half in range(k // 4):
        words[:, 2 * half], words[:, 2 * half + 1] = a[g, t + 4 * half], a[g + 8, t + 4 * half]
        words[:, 4 + half] = b[t + 4 * half, g]
    filled = np.zeros((32, 4), np.uint64)
    filled.view(np.uint32)[:, :6] = words.view(np.uint32) | 0x1FFF * (words != 0)
    operands = dict(a="{%r10, %r11}", b="{%r14}")
    if k == 8:
        operands = dict(a="{%r10, %r11, %r12, %r13}", b="{%r14, %r15}")
    for row, (first, second) in enumerate(((16, 17), (18, 19))):
        code = PRODUCT.format(k=k, first=first, second=second, **operands)
        found = run(code, filled).copy().view(np.float32).reshape(8, 8)  # [g, 2 t and 2 t + 1]
        assert (found == (a @ b)[8 * row : 8 * row + 8]).all()
