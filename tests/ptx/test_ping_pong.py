"""The ping-pong kernel (``attention/ping_pong.py``) as machine code, and in the emulator.

All schedules must give the reference's numbers and the same bits, and the emulator must notice a
fault in the order of the roles.
"""

from __future__ import annotations

import itertools
import re

import pytest

from fastplm.triton_kernels._launch import shared_limit

pytestmark = pytest.mark.compile
slow = pytest.mark.slow
KERNEL = "_attention_ping_pong_fwd_kernel"

# dtype, (B, H, Tq, Tk, D), options. 700 keys are more tiles than there are buffers.
CASES = [
    ("bfloat16", (2, 1, 40, 700, 64), "ragged"),
    pytest.param("float16", (2, 1, 130, 200, 64), "mask causal", marks=slow),
    pytest.param("float16", (1, 2, 200, 300, 64), "", marks=slow),
    pytest.param("bfloat16", (2, 1, 70, 650, 64), "mask", marks=slow),
    pytest.param("bfloat16", (3, 1, 130, 130, 64), "ragged causal", marks=slow),
    pytest.param("float16", (3, 1, 300, 140, 64), "ragged causal mask", marks=slow),
]


@pytest.mark.parametrize(("dtype", "shape", "option"), CASES)
def test_every_schedule(emulate, request, dtype, shape, option):
    seeds = list(range(6 if request.node.get_closest_marker("slow") else 2))
    arguments = dict(arch=90, dtype=dtype, shape=shape, option=option, seeds=seeds)
    assert KERNEL in emulate("with_ping_pong", name="attention", **arguments)


def fault(emulate, fault, place=None, seeds=(0, 1)):
    arguments = dict(arch=90, dtype="bfloat16", shape=(1, 1, 100, 1300, 64), kernel=KERNEL)
    found = dict(fault=fault, place=place, seeds=list(seeds), **arguments)
    return emulate("with_ping_pong", name="faulty", check="attention", **found)


@pytest.mark.parametrize(
    "name",
    ("products not waited for", pytest.param("no fence before products", marks=slow)),
)
def test_a_product_that_is_not_waited_for_or_not_fenced_is_seen(emulate, name):
    assert fault(emulate, name) == "numbers"


def test_copies_that_nobody_is_told_of_hang(emulate):
    assert "hangs" in fault(emulate, "no word of copies")


# Waits in the PTX of Triton 3.7.1: those of the producer, then of the second and first consumer.
# Waits that others imply are left out: if K has landed so has Q, and V of the last tile; the second
# consumer gets its turn from the first one, which has waited for K; buffers of Q and the first turn
# matter only if a program takes several tiles of queries.
@slow
@pytest.mark.parametrize("place", (1, 2, 5, 8, 9, 11, 13, 15, 16))
def test_every_phase_must_be_waited_for(emulate, place):
    assert fault(emulate, "one phase not waited for", place, range(6)) != "passes"


# --- machine code ---------------------------------------------------------------------------------

ALWAYS = (("bfloat16", True, True, False),)
VARIANTS = list(itertools.product(("bfloat16", "float16"), *[(False, True)] * 3))


@pytest.mark.parametrize(
    ("dtype", "is_causal", "ragged", "has_mask"),
    [variant if variant in ALWAYS else pytest.param(*variant, marks=slow) for variant in VARIANTS],
)
def test_machine_code(emulate, dtype, is_causal, ragged, has_mask):
    options = dict(dtype=dtype, is_causal=is_causal, ragged=ragged, has_mask=has_mask)
    kernel, warps, shared, sass = emulate("with_ping_pong", name="machine_code", **options)
    assert (kernel, warps) == (KERNEL, 12)
    assert shared <= shared_limit(90)
    assert not re.findall(r"\b(?:LDL|STL)\b", sass), "spills"
    # Each consumer's loop has the products of scores and output, and a wait for the scores alone.
    names = re.findall(r"HGMMA\.64x\d+|DEPBAR\.LE gsb0, 0x\d", sass)
    steps = [name for name, _ in itertools.groupby(names)]
    loop = ["HGMMA.64x128", "HGMMA.64x64", "DEPBAR.LE gsb0, 0x1", "DEPBAR.LE gsb0, 0x0"]
    assert sum(steps[i : i + 4] == loop for i in range(len(steps))) == 2


@pytest.mark.parametrize("options", (dict(has_dropout=True), dict(has_bias=True)))
def test_what_it_does_not_serve_is_left_alone(emulate, options):
    options |= dict(dtype="bfloat16", name="machine_code")
    assert emulate("with_ping_pong", **options)[0] != KERNEL


def test_nobody_gets_it_unasked(emulate):
    assert emulate("machine_code", dtype="bfloat16")[0] != KERNEL
