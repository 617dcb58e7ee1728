"""The example with three families runs, on little text."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

import pytest

from fastplm.data import embedded_corpus

LETTERS = 300_000
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "pretrain_families.py"


@pytest.fixture
def text(tmp_path) -> str:
    """The beginning of a real text if there is one, else of Python's own English text."""
    folder = os.environ.get("FASTPLM_TEST_DATA")
    if folder is None:
        content = "\n\n".join(embedded_corpus())[:LETTERS]
    else:
        with (Path(folder) / "text" / "wikitext-2.valid.txt").open(encoding="utf-8") as file:
            content = file.read(LETTERS)
    path = tmp_path / "text.txt"
    path.write_text(content, encoding="utf-8")
    return str(path)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "lamb"])
def test_families_learn_and_load_in_transformers(text, optimizer, tmp_path, monkeypatch, capsys):
    options = {
        "corpus": text,
        "out": tmp_path / "out",
        "steps": 80,
        "vocab-size": 600,
        "block-size": 32,
        "batch-size": 16,
        "optimizer": optimizer,
    }
    words = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), *words])
    # The example itself asserts that the losses fall and that Transformers agrees.
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    shown = capsys.readouterr().out
    for family in ("t5", "bart", "albert"):
        assert f"{family}-tiny: " in shown


def test_one_logged_loss_is_not_compared():
    learned = runpy.run_path(str(EXAMPLE), run_name="example")["learned"]
    assert learned({"history": [{"loss": 2.0}]}) == (2.0, 2.0)
    with pytest.raises(AssertionError, match="does not fall"):
        learned({"history": [{"loss": 2.0}] * 2})
