"""Every Python block of README.md and docs/ works, and every example in a docstring.

The blocks of a page are executed one after another in one namespace, in a folder that has the files
which the pages name: ``path/to/bert`` is a BERT of two layers.
"""

from __future__ import annotations

import copy
import doctest
import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from pages import BLOCKS, ROOT, sentence

import fastplm
from fastplm import ops
from fastplm._registry import OPS
from fastplm.data import train_tokenizer


def given(page: str, files: Path) -> dict[str, Any]:
    """What the blocks of a page take for granted."""
    from fastplm import models
    from fastplm.train.presets import configuration

    generator = torch.Generator().manual_seed(0)
    tokenizer = transformers.AutoTokenizer.from_pretrained(files / "path/to/bert")
    if page == "README.md":
        return {
            "hidden": torch.randn(6, 16, generator=generator, requires_grad=True),
            "embedding": torch.randn(40, 16, generator=generator, requires_grad=True),
            "targets": torch.tensor([3, -100, 39, -100, 0, 7]),
            "bias": torch.zeros(40),
        }
    if page == "docs/quickstart.md":
        return {
            "ids": torch.randint(5, 1000, (2, 64), generator=generator),
            "table": torch.randn(1000, 16, generator=generator, requires_grad=True),
            "bias": torch.zeros(1000),
        }
    if page == "docs/models.md":
        return {"model": transformers.BertModel.from_pretrained(files / "path/to/bert")}
    if page == "docs/corruption.md":
        return {"tokenizer": tokenizer, "dataset": []}
    if page == "docs/pretraining.md":
        texts = [sentence(i) for i in range(60)]
        pieces = train_tokenizer(texts, 400, files / "cache", "unigram")
        ids = torch.randint(5, 100, (2, 32), generator=generator)
        joint = configuration("electra-tiny", vocab_size=100)
        return {
            "tokenizer": pieces,
            "dataset": [pieces(text) | {"sample_index": i} for i, text in enumerate(texts[:4])],
            "model": models.T5ForConditionalGeneration(
                configuration("t5-tiny", vocab_size=len(pieces), tokenizer=pieces)
            ),
            "electra": models.ElectraForJointPreTraining(joint),
            "vocab_size": 100,
            "mask_token_id": 4,
            "ids": ids,
            "mask": torch.ones_like(ids),
            "maskable": ids > 10,
            "sample_index": torch.arange(2),
        }
    return {}


@pytest.mark.parametrize("page", sorted({b.page for b in BLOCKS if b.language == "python"}))
def test_python_of_a_page(page, files, here):
    namespace = given(page, files)
    for block in BLOCKS:
        if (block.page, block.language) == (page, "python"):
            # As many lines before it as on the page, so that a traceback names the page's.
            exec(compile("\n" * block.line + block.code, page, "exec"), namespace)


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == "pycon"], ids=str)
def test_console_of_a_page(block):
    test = doctest.DocTestParser().get_doctest(block.code, {}, str(block), block.page, block.line)
    assert run_doctest(test) > 0


# --- docstrings -----------------------------------------------------------------------------------


def examples() -> list[Any]:
    found = []
    for path in sorted((ROOT / "fastplm").rglob("*.py")):
        if ">>> " in path.read_text(encoding="utf-8"):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            found.append(pytest.param(name, id=name))
    return found


@pytest.mark.parametrize("module", examples())
def test_examples_of_docstrings(module, here):
    names = {"fastplm": fastplm, "ops": ops, "torch": torch}
    tests = doctest.DocTestFinder().find(importlib.import_module(module), extraglobs=names)
    assert sum(run_doctest(test) for test in tests if test.examples) > 0


def run_doctest(test: doctest.DocTest) -> int:
    """How many examples it has, all of which hold."""
    said: list[str] = []
    runner = doctest.DocTestRunner(verbose=False)
    result = runner.run(copy.copy(test), out=said.append)
    assert result.failed == 0, "".join(said)
    return result.attempted


@pytest.mark.parametrize("op", sorted(OPS))
def test_every_op_has_an_example(op):
    assert ">>> " in getattr(ops, op).__doc__
