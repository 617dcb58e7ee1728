"""A pre-training step of DistilBERT against Transformers' class of the same name: steps.py."""

from __future__ import annotations

from steps import cases

CASES = cases("distilbert")


def test_distilbert(case, bench):
    bench(case, "training")
