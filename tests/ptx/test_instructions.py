"""What hardware may decide, in hand-written PTX: an order that no barrier gives, and late copies.

That instructions compute what the PTX ISA says is seen by the kernels (test_emulate.py): all of
theirs give the reference's numbers.
"""

from __future__ import annotations

import struct

import numpy as np
import pytest

from ptx.machine import Program, Schedule
from ptx.memory import GlobalMemory
from ptx.parse import PtxError

KERNEL = """
.version 8.7
.target sm_90
.address_size 64
.extern .shared .align 16 .b8 global_smem[];
.visible .entry kernel(.param .u64 in, .param .u64 out)
.reqntid {threads}
{{
    .reg .pred %p<9>;
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
    cvt.u32.u64 %r4, %rd4;
    cvt.u32.u64 %r5, %rd5;
    mov.b64 %rd7, 0;
    {code}
    st.global.b64 [%rd2], %rd7;
    ret;
}}
"""
LINE = KERNEL[: KERNEL.index("{code}")].count("\n") + 1


def run(
    code: str,
    words: np.ndarray,
    seed: int = 0,
    blocks: int = 1,
    watched: bool | None = None,
) -> np.ndarray:
    """The 64-bit result of every thread; each thread reads four 64-bit words."""
    threads = len(words)
    given = np.ascontiguousarray(words, np.uint64)
    out = np.zeros((threads, 4), np.uint64)
    program = Program(KERNEL.format(code=code, threads=threads), 1024, threads)
    spans = {n: (a.ctypes.data, a.ctypes.data + a.nbytes) for n, a in dict(x=given, y=out).items()}
    params = {n: struct.pack("<Q", a.ctypes.data) for n, a in {"in": given, "out": out}.items()}
    program.run((blocks,), params, GlobalMemory(spans), Schedule(seed, watched=watched))
    return out[:, 0]


def by_thread(threads: int = 32) -> np.ndarray:
    """The inputs of threads: each thread's number, and 1000 more."""
    words = np.zeros((threads, 4), np.uint64)
    words[:, 0] = np.arange(threads)
    words[:, 1] = 1000 + np.arange(threads)
    return words


def test_blocks_run_in_an_order_of_their_own_by_each_seed():
    """All threads write to one place, and the last write stays."""
    code = "mov.u32 %r7, %ctaid.x; cvt.u64.u32 %rd7, %r7;"
    last = [set(run(code, by_thread(), seed, blocks=40).tolist()) for seed in range(6)]
    assert all(len(found) == 1 and found <= set(range(40)) for found in last)
    assert len(set().union(*last)) > 1


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
