"""A pre-training step of ELECTRA, both models jointly, against those of Transformers: steps.py."""

from __future__ import annotations

import pytest

from steps import cases

CASES = cases("electra")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_electra(case, bench):
    bench(case, "training")
