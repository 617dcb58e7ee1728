"""Every barrier of every kernel is left out once: the emulator must see it."""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.compile, pytest.mark.slow]

# Check, its arguments, and the calls that launch its kernels.
CASES = {
    "attention in one tile": (
        "attention",
        dict(dtype="bfloat16", option="mask causal"),
        [dict(shape=(2, 1, 40, 70, 64))],
    ),
    "attention": (
        "attention",
        dict(dtype="bfloat16", option="mask dropout bias"),
        [dict(shape=(1, 1, 70, 300, 64))],
    ),
    "attention in fp32": (
        "attention",
        dict(dtype="float32", option="mask"),
        [dict(shape=(1, 1, 70, 150, 64))],
    ),
    "gather_rows": ("gather_rows", dict(dtype="bfloat16", width=40), [{}]),
    "maxsim": ("maxsim", dict(dtype="bfloat16", width=64), [{}]),
    "replaced_token_loss": ("replaced_token_loss", dict(dtype="bfloat16", width=40), [{}]),
    "linear_cross_entropy": (
        "linear_cross_entropy",
        dict(dtype="bfloat16", shape=(70, 200, 64)),
        [{}],
    ),
    "linear_cross_entropy of wide rows": (
        "linear_cross_entropy",
        dict(dtype="bfloat16", shape=(70, 200, 192)),
        [{}],
    ),
    "linear_distillation": (
        "linear_distillation",
        dict(dtype="bfloat16", shape=(70, 200, 64), teacher_width=96, divergence="forward_kl"),
        [{}],
    ),
}


@pytest.mark.parametrize("arch", (80, 90))
@pytest.mark.parametrize("case", CASES)
def test_no_barrier_can_be_left_out(emulate, case, arch):
    check, arguments, calls = CASES[case]
    found = emulate("removed_barriers", check=check, calls=calls, arch=arch, **arguments)
    print(found)
    assert found
    assert all(None not in seeds for seeds in found.values()), found
