"""A pre-training step of XLM-RoBERTa against Transformers' class of the same name: steps.py."""

from __future__ import annotations

from steps import cases

CASES = cases("xlm-roberta")


def test_xlm_roberta(case, bench):
    bench(case, "training")
