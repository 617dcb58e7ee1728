"""The simulation of the waits in machine code, on hand-written code with known cycles."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from timeline import (  # noqa: E402
    BARRIER,
    L2_BYTES,
    NEXT_PROGRAM,
    PRODUCT_END,
    Control,
    Step,
    controls,
    simulate,
)

pytestmark = pytest.mark.compile


def step(kind="plain", stall=1, writes=7, reads=7, waits=(), pipe="", cycles=0.0, **others):
    control = Control(stall, writes, reads, tuple(waits))
    numbers = {"latency": 0, "bytes": 0, "pending": 0} | others
    return Step(kind.upper(), kind, control, pipe, cycles, **numbers)


def cycles(steps, warps=1, blocks=1, programs=1):
    return simulate(steps, warps, blocks, programs).cycles


def test_a_warp_issues_by_its_stall_counts():
    assert cycles([step(stall=4)] * 10) == 40


def test_warps_of_a_scheduler_share_its_issue_slots():
    # Four warps run on four schedulers; of sixteen warps, the four of a scheduler hide each other's
    # stalls.
    steps = [step(stall=4)] * 100
    assert cycles(steps, warps=4) == 400
    assert cycles(steps, warps=16) == pytest.approx(400, abs=8)
    assert cycles(steps, warps=32) == pytest.approx(800, abs=16)


def test_a_pipe_takes_one_instruction_at_a_time():
    slow = [step(pipe="MUFU", cycles=8, kind="beside", latency=22)] * 50
    assert cycles(slow, warps=16) == pytest.approx(50 * 8 * 4, rel=0.05)


def test_a_scoreboard_holds_back_the_instruction_that_waits_for_it():
    load = step("global", writes=2, pipe="shared", cycles=1, latency=263, bytes=128)
    free = cycles([load, *[step()] * 300])
    assert free == 301
    waits = cycles([load, step(waits=[2]), *[step()] * 299])
    assert waits == pytest.approx(300 + 263 + 128 / L2_BYTES, abs=3)


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_copies_that_are_ahead_are_not_waited_for(ahead):
    copy = step("copy", pipe="shared", cycles=4, latency=263, bytes=0)
    turn = [copy, step("group"), step("copies", pending=ahead), *[step()] * 400]
    alone = cycles([step()] * 403 * 20)
    waited = cycles(turn * 20) - alone
    # A copy one tile ahead has 400 cycles to arrive, which is more than the latency.
    assert waited == pytest.approx(20 * 263 if ahead == 0 else 0, abs=20 * 8)


def test_products_run_beside_the_warps_until_they_are_waited_for():
    product = step("product", pipe="tensor", cycles=200, pending=1)
    work = [step()] * 150
    wait = step("products", pending=0)
    one_after_another = cycles([product, wait, *work] * 10, warps=4)
    beside = cycles([product, *work, wait] * 10, warps=4)
    assert one_after_another == pytest.approx(10 * (200 + PRODUCT_END + 150), rel=0.05)
    assert beside == pytest.approx(10 * (200 + PRODUCT_END), rel=0.05)
    # Two warp groups share the tensor cores: one multiplies during the other's arithmetic.
    assert cycles([product, wait, *work] * 10, warps=8) < 1.25 * one_after_another


def test_a_barrier_lets_warps_go_when_the_last_one_is_there():
    steps = [step("barrier"), step()]
    found = simulate(steps, 16, 1, 1)
    assert found.cycles == pytest.approx(4 + BARRIER, abs=5)
    assert found.waited["a barrier"] > 0


def test_programs_come_in_waves():
    steps = [step(stall=4)] * 250
    one = cycles(steps, warps=4, blocks=2, programs=2)
    three = cycles(steps, warps=4, blocks=2, programs=3)
    assert three == pytest.approx(2 * one + NEXT_PROGRAM, abs=4)


def test_warps_that_wait_for_ever_are_an_error():
    product = step("product", pipe="tensor", cycles=8, pending=1)
    with pytest.raises(ValueError, match="for ever"):
        # A warp group of three never multiplies.
        simulate([product, step("products")], 7, 1, 1)


def test_control_bits_are_read_where_they_stand():
    bits = 4 | 1 << 5 | 3 << 8 | 0b100010 << 11
    text = (bits << 105).to_bytes(16, "little")
    assert controls(text) == [Control(4, 1, 3, (1, 5))]
