"""A pre-training step of RoBERTa against Transformers' class of the same name: steps.py."""

from __future__ import annotations

from steps import cases

CASES = cases("roberta")


def test_roberta(case, bench):
    bench(case, "training")
