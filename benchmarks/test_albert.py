"""A pre-training step of ALBERT against Transformers' class of the same name: steps.py."""

from __future__ import annotations

from steps import cases

CASES = cases("albert")


def test_albert(case, bench):
    bench(case, "training")
