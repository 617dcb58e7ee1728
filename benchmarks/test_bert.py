"""A pre-training step of BERT against Transformers' class of the same name: steps.py."""

from __future__ import annotations

from steps import GPU, PADDINGS, Step, case, cases

CASES = cases("bert")
if not GPU:  # takes many minutes, so it is not in every run
    CASES += [
        case(Step("bert-base", 8, 128, padding, dropout, bf16), full=True)
        for dropout, bf16 in ((0.0, True), (0.1, True), (0.0, False), (0.1, False))
        for padding in (*PADDINGS, 0.35)  # the last share is for a target
    ]


def test_bert(case, bench):
    bench(case, "training")
