"""A pre-training step of BART against Transformers' class of the same name: steps.py."""

from __future__ import annotations

import pytest

from steps import cases

CASES = cases("bart")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_bart(case, bench):
    bench(case, "training")
