"""The walks of docs/dev/walks.md list the functions that run."""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import torch
from transformers import BertConfig

import fastplm
from fastplm import ops
from fastplm.cli import main
from fastplm.models import BertForMaskedLM

TEXT = (Path(__file__).parents[1] / "docs/dev/walks.md").read_text()


def written(title: str) -> list[str]:
    """The steps of a walk, as "file function"; those of an outline keep their indentation."""
    block = TEXT.split(title)[1].split("\n\n")[1]
    indents = [line[: len(line) - len(line.lstrip())] for line in block.splitlines()]
    steps = [" ".join(line.split()[:2]) for line in block.splitlines()]
    return [
        indent[4:] + step if len(set(indents)) > 1 else step
        for indent, step in zip(indents, steps, strict=True)
    ]


def trips(outline: list[str]) -> list[list[str]]:
    """The paths from the first line of an outline to each line without lines below it."""
    found: list[list[str]] = []
    stack: list[str] = []
    for line in outline:
        depth = (len(line) - len(line.lstrip())) // 2
        if depth < len(stack):
            found.append(list(stack))
        stack = [*stack[:depth], line.strip()]
    return [*found, stack]


def roads(run, *ends: str) -> list[list[str]]:
    """For each end ("file function"), the stack of fastplm's functions when it is first called."""
    stack: list[str] = []
    found: dict[str, list[str]] = {}

    def profile(frame, event, _):
        module = frame.f_globals.get("__name__", "")
        if not module.startswith("fastplm.") or "<" in frame.f_code.co_name:
            return
        if event == "call":
            file = module.removeprefix("fastplm.").replace(".", "/")
            stack.append(f"{file}.py {frame.f_code.co_name}")
            if stack[-1] in ends:
                found.setdefault(stack[-1], list(stack))
        elif event == "return" and stack:
            stack.pop()

    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
    return [found.get(end, []) for end in ends]


def masked_lm_step():
    torch.manual_seed(0)
    sizes = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)
    model = BertForMaskedLM(BertConfig(**sizes, vocab_size=50)).train()
    ids = torch.arange(5, 37).view(2, 16)
    mask = (torch.arange(16) < torch.tensor([[16], [9]])).long()
    labels = ids.where(ids % 8 == 0, -100)
    return model, {"input_ids": ids, "attention_mask": mask, "labels": labels}


def test_a_masked_lm_step_to_the_kernel_of_attention_and_back():
    model, inputs = masked_lm_step()
    found = []

    def step():
        found.append(model(**inputs).loss)

    with fastplm.use_backend("cpp", "attention"):
        for run, title in (
            (step, "**`input_ids` of a masked-LM step"),
            (lambda: found[-1].backward(), "and back:"),
        ):
            walk = written(title)
            assert roads(run, walk[-1]) == [walk]


def test_a_layers_norm_on_a_gpu_to_the_kernel_and_back():
    model, inputs = masked_lm_step()
    loss = []
    with fastplm.use_backend("triton", "dropout_add_layer_norm", "bias_gelu"):
        for run, title in (
            (lambda: loss.append(model(**inputs).loss), "**A layer's norm on a GPU"),
            (lambda: loss[0].backward(), "and its gradient:"),
        ):
            walk = written(title)
            assert roads(run, walk[-1]) == [walk]


def test_a_query_to_a_launched_kernel():
    query = torch.randn(1, 2, 8, 16, requires_grad=True)
    with fastplm.use_backend("triton", "attention"):
        walk = written("**A query through `ops.attention`")
        run = functools.partial(ops.attention, query, query, query)
        assert roads(run, walk[-1]) == [walk]


def test_a_line_of_text_to_the_loss(tmp_path):
    text = tmp_path / "corpus.txt"
    words = "the of and to in a is that it was for on are as with his they be at one".split()
    lines = [" ".join(words[i % 20 :] + words[: i % 7]) + "." for i in range(600)]
    text.write_text("\n".join("\n" * (i % 5 == 0) + line for i, line in enumerate(lines)))
    arguments = f"pretrain --arch bert-tiny --vocab-size 100 --corpus {text} --steps 2 --threads 1"
    arguments += f" --out {tmp_path}/run --cache {tmp_path}/cache --batch-size 4 --block-size 32"
    walk = trips(written("**A line of text through"))
    found = roads(lambda: main(arguments.split()), *(trip[-1] for trip in walk))
    assert found == walk
