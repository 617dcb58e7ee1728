"""A pre-training step of ModernBERT against Transformers' class of the same name: steps.py."""

from __future__ import annotations

from steps import cases

CASES = cases("modernbert")


def test_modernbert(case, bench):
    bench(case, "training")
