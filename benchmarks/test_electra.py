"""A pre-training step of ELECTRA, both models jointly, against those of Transformers: steps.py."""

from __future__ import annotations

from steps import cases

CASES = cases("electra")


def test_electra(case, bench):
    bench(case, "training")
