"""The key of a cell: what it depends on, and what not."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

import fastplm
from fastplm import _machine
from fastplm.study import costs
from fastplm.study import keys as module

from .conftest import changed, plan_of


def keys(**options):
    return sorted(plan_of(**options).cells)


def test_the_names_of_what_is_hashed(place):
    """Cells that are stored are found by them."""
    changed(place, "finetune: {", "finetune: {precision: fp32, ")
    planned = plan_of().variants["40 %"]
    training, (score, _) = planned.trainings[0], planned.evaluations["pairs", 1.0]
    start = {"recipe": 1, "version": ".".join(fastplm.__version__.split(".")[:2])}
    data = [module.hash_of(place / "train.tsv")]
    shape = {"arch": "bert-tiny", "vocab_size": 120, "block_size": 32, "name": "model"}
    shape["corpus"] = [module.hash_of(place / "stories.txt")]
    assert training.facts | {"settings": 0} == {
        **start,
        "command": "pretrain",
        "recipe": 2,
        "settings": 0,
    }
    model = {"cell": training.key, "name": "model"}
    settings = {"model": model, "data": [module.hash_of(place / "pairs.jsonl")], "threads": 1}
    settings |= {"metric": "minimal-pairs"}
    assert score.facts == {**start, "command": "score", "recipe": 2, "settings": settings}
    settings = {"model": {"shape of": shape}, "data": data, "task": "classification", "seeds": 2}
    settings |= {"steps": 3, "batch_size": 4, "max_length": 32, "threads": 1, "from_scratch": True}
    scratch = planned.scratch["sentiment"]
    assert scratch.facts == {**start, "command": "finetune", "settings": settings}
    assert training.key == module.key_of(training.facts) and len(training.key) == 20


def test_keys_stay_where_nothing_that_matters_changes(place):
    before = keys()
    changed(place, "question: Is", "question: Truly, is")
    changed(place, "lr: 1.0e-3}", "lr: 0.001, block_size: 32}")  # another spelling of the same
    changed(place, "40 %", "two fifths")
    os.utime(place / "stories.txt", (1, 1))
    assert keys() == before
    elsewhere = place / "elsewhere"
    elsewhere.mkdir()
    for name in ("stories.txt", "train.tsv", "pairs.jsonl"):
        (elsewhere / name).write_bytes((place / name).read_bytes())
    assert keys(data=elsewhere) == keys(), "files count by their contents"


@pytest.mark.parametrize(
    "name, before, after, changes",
    [
        ("grid.yaml", "steps: 3\n  batch", "steps: 4\n  batch", "pretrain finetune score"),
        ("grid.yaml", "mlm_probability: 0.40", "mlm_probability: 0.30", "pretrain finetune score"),
        ("grid.yaml", "{seeds: 2, steps", "{seeds: 3, steps", "finetune"),
        ("stories.txt", "teacher", "preacher", "pretrain finetune score"),
        ("train.tsv", "yes", "no", "finetune"),
        ("pairs.jsonl", "house", "home", "score"),
    ],
)
def test_keys_change_with_what_matters(name, before, after, changes, place):
    """In the variant 40 %: a training that changes makes new cells of all that reads its model."""

    def found():
        planned = plan_of().variants["40 %"]
        judged = [cell for each in planned.evaluations.values() for cell in each]
        return {(cell.command, cell.label): cell.key for cell in (*planned.trainings, *judged)}

    old = found()
    file = place / name
    file.write_text(file.read_text().replace(before, after))
    new = found()
    assert old.keys() == new.keys()
    assert {key[0] for key in old if old[key] != new[key]} == set(changes.split())
    assert all(old[key] != new[key] for key in old if key[0] in changes)


def test_names_of_the_hub_stay_names(place, monkeypatch):
    """A corpus and a data set by name: their keys are those of their rows."""
    changed(place, "data: train.tsv", "data: 'hf:acme/tiny'")
    changed(place, "corpus: stories.txt", "corpus: ['hf:acme/text']")
    rows = {"hf:acme/tiny": "1", "hf:acme/text": "2"}
    monkeypatch.setattr(module, "fingerprint", lambda path: rows[str(path)])
    table = [(row, {"text": "a b c", "label": "yes"}) for row in range(1, 11)]
    monkeypatch.setattr(
        "fastplm.data.examples.rows_of", lambda path: table if rows[str(path)] else []
    )
    costs._counted.cache_clear()
    before = plan_of().variants["40 %"]
    assert "hf:acme/text" in before.trainings[0].words
    rows["hf:acme/tiny"] = "3"
    after = plan_of().variants["40 %"]
    assert [c.key for c in before.trainings] == [c.key for c in after.trainings]
    judged = [plan.evaluations["sentiment", 1.0][0].key for plan in (before, after)]
    assert judged[0] != judged[1]


def test_keys_change_with_threads_and_versions(place, monkeypatch):
    before = keys()
    assert not {*before} & {*keys(threads=2)}
    versions = module.CACHE_VERSIONS
    monkeypatch.setitem(versions, "score", versions["score"] + 1)
    after = {cell.key: cell for cell in plan_of().cells.values()}
    new = [cell for key, cell in after.items() if key not in before]
    assert new and {cell.command for cell in new} == {"score"}


def test_a_change_of_one_objective_makes_new_cells_of_it_alone(all_data, monkeypatch):
    def trained(study="causal-or-masked"):
        plan = plan_of(study, "tiny", all_data)
        return {name: each.trainings[0].key for name, each in plan.variants.items()}

    def raised(versions, name):
        monkeypatch.setitem(versions, name, versions[name] + 1)

    before = trained()
    raised(module.OBJECTIVE_VERSIONS, "denoise")
    after = trained()
    assert [name for name in before if before[name] != after[name]] == ["BART"]
    raised(module.OBJECTIVE_VERSIONS, "rtd")
    last = trained()
    assert [name for name in after if after[name] != last[name]] == ["ELECTRA"]
    before = trained("objectives")
    raised(module.DISCRIMINATOR_VERSIONS, "all_tokens_mlm")
    after = trained("objectives")
    assert [name for name in before if before[name] != after[name]] == ["All-Tokens MLM"]


def test_a_change_of_the_reader_of_tables_makes_new_cells_of_tables(place, monkeypatch):
    """Of texts of tables, that is; a table of a task and a file of text keep their cells."""
    rows = [json.dumps({"text": text}) for text in Path("stories.txt").read_text().split("\n\n")]
    Path("stories.jsonl").write_text("\n".join(rows))
    of_text = {*keys()}
    changed(place, "corpus: stories.txt", "corpus: [stories.txt, stories.jsonl]")
    trained = {key: cell for key, cell in plan_of().cells.items() if cell.command == "pretrain"}
    assert all(cell.facts["recipe of tables"] == module.TABLE_VERSION for cell in trained.values())
    monkeypatch.setattr(module, "TABLE_VERSION", module.TABLE_VERSION + 1)
    assert trained and not {*trained} & {*keys()}
    changed(place, "corpus: [stories.txt, stories.jsonl]", "corpus: stories.txt")
    assert {*keys()} == of_text


@pytest.mark.parametrize(
    ("command", "task", "path", "changes"),
    [
        ("pretrain", None, "a.csv", True),
        ("pretrain", None, "hf:a/b", True),
        ("pretrain", None, "a.txt", False),
        ("distill", None, "a.json.gz", True),
        ("score", None, "a.csv", False),
        ("finetune", "sop", "a.jsonl", True),
        ("finetune", "sop", "a.txt", False),
        ("finetune", "classification", "a.tsv", False),
        ("finetune", "classification", "a.parquet", True),
    ],
)
def test_the_tables_that_are_read_anew(command, task, path, changes):
    assert module._read_anew(command, SimpleNamespace(task=task), path) == changes


def test_cells_of_a_fine_tuning_have_the_keys_of_before(place, monkeypatch):
    """The default was fp32 on any machine, and --bf16 was a setting of its own."""

    def found(there, precision=None):
        monkeypatch.setattr(_machine, "hardware_has_bf16", lambda: there)
        text = (place / "grid.yaml").read_text()
        if precision:
            changed(place, "finetune: {", f"finetune: {{{precision}, ")
        cells = {k: c for k, c in plan_of().cells.items() if c.command == "finetune"}
        (place / "grid.yaml").write_text(text)
        assert not any(
            "precision" in c.facts or "precision" in c.facts["settings"] for c in cells.values()
        )
        has = {c.facts["settings"].get("bf16") for c in cells.values()}
        assert len(has) == 1
        return has.pop(), sorted(cells)

    plain, fast = found(False), found(True)
    assert plain[0] is None and fast[0] is True and plain != fast
    for there in (False, True):
        assert found(there, "precision: fp32") == plain
        assert found(there, "precision: bf16") == found(there, "bf16: true") == fast


def test_cells_of_a_machine_without_bf16_are_its_own(place, monkeypatch):
    """The default precision is the machine's; one that is given is anybody's."""
    changed(place, "finetune: {", "finetune: {precision: fp32, ")
    monkeypatch.setattr(_machine, "hardware_has_bf16", lambda: True)
    given = keys()
    changed(place, "  precision: fp32\n", "")
    usual = keys()
    scratch = [each.scratch for each in plan_of().variants.values()]
    monkeypatch.setattr(_machine, "hardware_has_bf16", lambda: False)
    shared = set(keys()) & set(usual)  # a model without pre-training has no such precision
    assert shared == {cell.key for each in scratch for cell in each.values()}
    changed(place, "pretrain:\n", "pretrain:\n  precision: fp32\n")
    assert keys() == given
