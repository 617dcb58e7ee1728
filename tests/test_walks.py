"""The walks of CONTRIBUTING.md are what runs."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import BertConfig

import fastplm
from fastplm import ops
from fastplm.models import BertForMaskedLM

TEXT = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text()


def written(title: str) -> list[str]:
    """The steps of a walk, as "file function"."""
    block = TEXT.split(title)[1].split("\n\n")[1]
    return [" ".join(line.split()[:2]) for line in block.splitlines()]


def road(run, end: str) -> list[str]:
    """The functions of fastplm that are being called when one of this name first is."""
    stack: list[str] = []
    found: list[str] = []

    def profile(frame, event, _):
        module = frame.f_globals.get("__name__", "")
        if not module.startswith("fastplm."):
            return
        if event == "call":
            file = module.removeprefix("fastplm.").replace(".", "/")
            stack.append(f"{file}.py {frame.f_code.co_name}")
            if frame.f_code.co_name == end and not found:
                found.extend(stack)
        elif event == "return" and stack:
            stack.pop()

    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
    return found


def test_a_masked_lm_step_to_the_kernel_of_attention_and_back():
    torch.manual_seed(0)
    sizes = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)
    model = BertForMaskedLM(BertConfig(**sizes, vocab_size=50)).train()
    ids = torch.arange(5, 37).view(2, 16)
    mask = (torch.arange(16) < torch.tensor([[16], [9]])).long()
    labels = ids.where(ids % 8 == 0, -100)
    found = []

    def step():
        found.append(model(input_ids=ids, attention_mask=mask, labels=labels).loss)

    with fastplm.use_backend("cpp", "attention"):
        assert road(step, "_cpp_forward") == written("**`input_ids` of a masked-LM step")
        # Of the kernels in a backward, that of attention is not the first: any will do.
        back = road(found[-1].backward, "_cpp_backward")
    there = [line.replace("ops/gather_rows", "ops/attention") for line in back]
    assert there == written("and back:")


def test_a_query_to_a_launched_kernel():
    query = torch.randn(1, 2, 8, 16, requires_grad=True)
    mask = torch.ones(1, 8, dtype=torch.bool)
    with fastplm.use_backend("triton", "attention"):
        found = road(lambda: ops.attention(query, query, query, key_mask=mask), "launch")
    assert found == written("**A query through `ops.attention`")
