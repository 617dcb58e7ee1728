"""A pre-training step of T5 against Transformers' class of the same name: steps.py."""

from __future__ import annotations

from steps import cases

CASES = cases("t5")


def test_t5(case, bench):
    bench(case, "training")
