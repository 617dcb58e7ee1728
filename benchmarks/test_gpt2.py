"""A pre-training step of GPT-2 against Transformers' class of the same name: steps.py."""

from __future__ import annotations

import pytest

from steps import cases

CASES = cases("gpt2")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gpt2(case, bench):
    bench(case, "training")
