"""The files by which the engine runs cells."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fastplm.cli import main
from fastplm.study.cells import Store
from fastplm.study.engine import meaning, rules, words_of

from .conftest import plan_of


def test_the_rules_of_the_engine(place):
    plan = plan_of()
    ready = [cell for cell in plan.cells.values() if not cell.provisional]
    text = rules(ready, Path("plan.json"))
    compile(text.split("rule all")[0], "Snakefile", "exec")
    assert text.count("\nrule ") == len(ready)
    judge = next(cell for cell in ready if cell.command == "score")
    rule = text.split(f"rule score_{judge.key}:")[1].split("rule ")[0]
    assert f'ancient("{judge.needs[0].key}/done.json")' in rule
    assert f'output: "{judge.key}/done.json"' in rule


@pytest.mark.parametrize("options, cores", [([], True), (["--executor", "slurm"], False)])
def test_the_words_of_the_engine(options, cores):
    """On a cluster the cores of this machine are no limit."""
    words = words_of(Path("a/Snakefile"), Path("cells"), 2, options)
    assert ("--cores" in words) == cores and words[len(words) - len(options) :] == options
    assert {"--nolock", "--ignore-incomplete", "--keep-going"} <= {*words}


def test_what_a_cell_says_it_is(place):
    from fastplm.study.engine import describe

    cell = next(iter(plan_of().cells.values()))
    describe(cell, Store("cells"))
    content = json.loads((Store("cells").at(cell) / "cell.json").read_text())
    assert content["facts"]["settings"]["mlm_probability"] == 0.15
    assert content["words"] == list(cell.words) and len(content["code"]) == 16


def test_without_the_engine(place, capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["study", "grid.yaml"]) == 2
    assert "pip install 'snakemake>=9'" in capsys.readouterr().err
    assert not (place / "runs").exists()


def test_docstrings_and_comments_are_not_the_code():
    code = 'def f(x):\n    """One."""\n    return x + 1\n'
    assert meaning(code) == meaning('# A comment.\ndef f(x):\n    """Two."""\n    return x + 1')
    assert meaning(code) != meaning(code.replace("+ 1", "+ 2"))
