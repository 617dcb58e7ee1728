"""A pre-training step of BART against Transformers' class of the same name: steps.py."""

from __future__ import annotations

from steps import cases

CASES = cases("bart")


def test_bart(case, bench):
    bench(case, "training")
