"""A pre-training step of T5 against Transformers' class of the same name: steps.py."""

from __future__ import annotations

import pytest

from steps import cases

CASES = cases("t5")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_t5(case, bench):
    bench(case, "training")
