"""A cell by itself: it runs, goes on, fails, and is left alone."""

from __future__ import annotations

import sys

import pytest

from fastplm.study import cell
from fastplm.study.cells import Planner, Store
from fastplm.study.engine import describe
from fastplm.study.grid import read_grid
from fastplm.study.progress import write_plan


@pytest.fixture
def planned(place):
    """(its store, the plan, a training of it whose folder is ready, the words that run a cell)."""
    store = Store("cells")
    plan = Planner(read_grid("grid.yaml"), store, None, 1, place / "cache").plan()
    one = plan.variants["40 %"].trainings[0]
    describe(one, store)
    write_plan(place / "plan.json", [one], store.folder, 1)
    # A folder without a checkpoint is what a killed start leaves.
    (store.at(one) / "run").mkdir()
    (store.at(one) / "run/run.json").write_text("{}")
    return store, plan, one, lambda cell: [str(store.at(cell)), str(place / "plan.json")]


def test_a_cell_by_itself(planned, capfd):
    """A training in a folder of a cell: its figures, and nothing to do the second time."""
    store, _, one, words = planned
    assert cell.main(words(one)) == 0
    done = store.done(one)
    assert done is not None and done["steps"] == 3 and not done["diverged"]
    assert done["held_out"]["mlm_loss"] > 0 and done["device"].startswith(("cpu", "cuda:0 ("))
    assert done["times"]["train_seconds"] > 0 and "[1 of 1] 40 %, seed 0" in capfd.readouterr().err
    log = (store.at(one) / "log.txt").read_bytes()
    assert cell.main(words(one)) == 0 and (store.at(one) / "log.txt").read_bytes() == log


def test_a_cell_that_goes_on_and_one_that_fails(planned, place, monkeypatch, capfd):
    """With a stand-in for the command: --resume where there is a checkpoint, and exit codes."""
    store, plan, one, words = planned
    program = place / "stand_in.py"
    head = f"#!{sys.executable}\nimport sys\nprint(*sys.argv[1:])\n"
    monkeypatch.setattr(cell.sys, "executable", str(program))

    def stands_in(rest):
        program.write_text(head + rest)
        program.chmod(0o755)
        return cell.main(words(one))

    assert stands_in("print('fastplm: error: the disk is full.'); sys.exit(2)") == 2
    assert "the disk is full." in capfd.readouterr().err
    monkeypatch.setattr(cell, "can_resume", lambda out: True)
    monkeypatch.setattr(cell, "last_checkpoint", lambda out: out)
    (store.at(one) / "run").mkdir()
    (store.at(one) / "run/run.json").write_text("{}")
    assert stands_in("raise SystemExit(4)") == 4
    assert (store.at(one) / "log.txt").read_text().rstrip().endswith("--resume")
    assert stands_in("print('fastplm: error: a bug'); sys.exit(1)") == 1
    assert store.done(one) is None, "a bug is no result"
    diverges = "print('the loss is nan at step 3.\\nand a line of a library'); sys.exit(3)"
    assert stands_in(diverges) == 0 and store.done(one)["diverged"]
    # What would have judged it has no model.
    judge = plan.variants["40 %"].evaluations["pairs", 1.0][0]
    describe(judge, store)
    assert cell.main(words(judge)) == 0 and store.done(judge)["diverged"]
