"""Each barrier of a kernel is left out once, and the emulator must notice it.

A call may not need every barrier: Triton also places barriers for branches that this call does not
take, and some between accesses that another barrier orders already. The emulator's first schedule
reports every pair of accesses by two warps that no barrier orders. So a barrier whose absence it
does not report orders nothing in this call.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.compile

CASES = {
    "attention": dict(dtype="bfloat16", option="mask causal", shape=(2, 1, 40, 70, 64)),
    "gather_rows": dict(dtype="bfloat16", width=40),
    "replaced_token_loss": dict(dtype="bfloat16", width=40),
    "disentangled_attention": dict(dtype="bfloat16", width=32, packed=True),
    "linear_cross_entropy": dict(dtype="bfloat16", shape=(70, 200, 64)),
}


@pytest.mark.slow
@pytest.mark.parametrize("arch", (80, 90))
@pytest.mark.parametrize("check", CASES)
def test_a_barrier_that_is_left_out_is_seen(emulate, check, arch):
    found = emulate("removed_barriers", check=check, seeds=[0, 1], arch=arch, **CASES[check])
    print(found)
    assert found
    seen = [seed is not None for seeds in found.values() for seed in seeds]
    assert sum(seen) >= 0.7 * len(seen)


def test_every_planted_bug_on_the_page_has_its_test():
    tests = Path(__file__).parents[1]
    page = (tests.parent / "docs" / "instruments.md").read_text()
    rows = re.findall(r"`(test_\w+\.py)::(test_\w+)`", page)
    assert len(rows) > 15
    for file, name in rows:
        (path,) = (path for lane in ("compile", "ptx") for path in (tests / lane).glob(file))
        functions = {
            node.name
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.FunctionDef)
        }
        assert name in functions, f"{file} has no {name}"
