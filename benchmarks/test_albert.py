"""A pre-training step of ALBERT against Transformers' class of the same name: steps.py."""

from __future__ import annotations

import pytest

from steps import cases

CASES = cases("albert")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_albert(case, bench):
    bench(case, "training")
