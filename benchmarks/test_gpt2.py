"""A pre-training step of GPT-2 against Transformers' class of the same name: steps.py."""

from __future__ import annotations

from steps import cases

CASES = cases("gpt2")


def test_gpt2(case, bench):
    bench(case, "training")
