"""A pre-training step of RoBERTa against Transformers' class of the same name: steps.py."""

from __future__ import annotations

import pytest

from steps import cases

CASES = cases("roberta")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_roberta(case, bench):
    bench(case, "training")
