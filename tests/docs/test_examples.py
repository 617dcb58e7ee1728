"""Every Python block of README.md and docs/ works, and every example in a docstring.

The blocks of a page are executed one after another in one namespace, empty at first, in a folder
that has the files which the pages name: ``google-bert/bert-base-uncased`` is a BERT of two layers.
"""

from __future__ import annotations

import copy
import doctest
import importlib.util
from typing import Any

import pytest
import torch
from pages import BLOCKS, ROOT

import fastplm
from fastplm import ops
from fastplm._registry import OPS


@pytest.mark.parametrize("page", sorted({b.page for b in BLOCKS if b.language == "python"}))
def test_python_of_a_page(page, here):
    namespace: dict[str, Any] = {}
    for block in BLOCKS:
        if "torch.onnx" in block.code and not importlib.util.find_spec("onnxscript"):
            continue
        if (block.page, block.language) == (page, "python"):
            # Empty lines before the block give tracebacks the page's line numbers.
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
    """The number of examples in a docstring; all of them must hold."""
    said: list[str] = []
    runner = doctest.DocTestRunner(verbose=False)
    result = runner.run(copy.copy(test), out=said.append)
    assert result.failed == 0, "".join(said)
    return result.attempted


@pytest.mark.parametrize("op", sorted(OPS))
def test_every_op_has_an_example(op):
    assert ">>> " in getattr(ops, op).__doc__
