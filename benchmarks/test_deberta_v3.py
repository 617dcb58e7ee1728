"""A masked-LM step of DeBERTa-v3 against Transformers' class of the same name: steps.py."""

from __future__ import annotations

from steps import cases

CASES = cases("deberta-v3")


def test_deberta_v3(case, bench):
    bench(case, "training")
