"""``fastplm study`` from the grid to the table, with kill -9 in between."""

from __future__ import annotations

import gzip
import importlib.util
import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest

from fastplm.cli import main

ENGINE = pytest.mark.skipif(
    importlib.util.find_spec("snakemake") is None, reason="Snakemake is not installed"
)
COMMAND = [sys.executable, "-m", "fastplm", "study", "grid.yaml", "--jobs", "2", "--cache", "cache"]
TABLES = ("table.tsv", "table.json")
#: Seconds after which a study is killed, at most.
LATEST = 40


def begun(*options: str) -> subprocess.Popen:
    return subprocess.Popen(
        [*COMMAND, *options],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def one_seed(place, name="grid.yaml"):
    text = (place / "grid.yaml").read_text()
    (place / name).write_text(text.replace("seeds: 2\nfine", "seeds: 1\nfine"))


@ENGINE
@pytest.mark.slow
def test_killed_three_times_it_ends_with_the_same_table(place):
    """At random moments: once the study alone, whose cells go on, then all of its processes."""
    one_seed(place)
    text = (place / "grid.yaml").read_text()
    # With checkpoints, so that a killed training goes on at one.
    longer = "steps: 60\n  save_every: 2\n  batch_size"
    (place / "grid.yaml").write_text(text.replace("steps: 3\n  batch_size", longer))
    done = begun("--out", "whole", "--cells", "cells-of-whole")
    assert done.wait(900) == 0, done.stderr.read()
    rng = random.Random()
    for only_the_study in (True, False, False):
        study = begun("--out", "killed")
        time.sleep(rng.uniform(8, LATEST))
        if only_the_study:
            os.kill(study.pid, signal.SIGKILL)
        else:
            os.killpg(study.pid, signal.SIGKILL)
        study.wait()
    last = begun("--out", "killed")
    assert last.wait(900) == 0, last.stderr.read()
    for name in TABLES:
        assert (place / "killed" / name).read_bytes() == (place / "whole" / name).read_bytes()
    table = json.loads((place / "whole/table.json").read_text())
    assert [row["name"] for row in table["variants"]] == ["15 %", "40 %"]
    assert {*table["variants"][0]["rates"]} == {"5.0e-4", "1.0e-3"}
    assert {claim["verdict"] for claim in table["claims"]} == {"cannot be told at this size"}
    assert (place / "whole/picture.png").is_file() and "| 40 % |" in (
        place / "whole/study.md"
    ).read_text()
    # Another study takes the cells that it shares, and a finished one runs nothing.
    begun_at = time.time()
    again = begun("--out", "again")
    assert again.wait(120) == 0 and "to run now" not in again.stderr.read()
    made = (place / "runs/cells").glob("*/done.json")
    assert all(path.stat().st_mtime < begun_at for path in made)


@ENGINE
@pytest.mark.slow
def test_two_studies_in_one_folder(place):
    first = begun("--out", "both")
    while not (place / "both/plan.json").exists():
        assert first.poll() is None, first.stderr.read()
        time.sleep(0.2)
    second = begun("--out", "both")
    assert second.wait(120) == 2 and "runs a study" in second.stderr.read()
    os.killpg(first.pid, signal.SIGKILL)


@ENGINE
@pytest.mark.slow
def test_a_cell_that_fails_is_named(place):
    one_seed(place)
    lines = (place / "grid.yaml").read_text().split("claims:")[0].splitlines()
    (place / "grid.yaml").write_text("\n".join(each for each in lines if '"15 %":' not in each))
    (place / "train.tsv").write_text("text\tlabel\nonly one\tyes\n")
    study = begun("--out", "failed")
    code, said = study.wait(900), study.stderr.read()
    assert code == 2 and "the same command goes on" in said and "log.txt" in said
    # The others went on.
    labels = [json.loads(p.read_text())["label"] for p in place.glob("runs/cells/*/done.json")]
    assert any("pairs" in label for label in labels)
    assert not any("sentiment" in label for label in labels)


def test_a_dry_run_writes_nothing(place, capsys):
    before = sorted(place.iterdir())
    assert main(["study", "grid.yaml", "--dry-run", "--jobs", "2"]) == 0
    shown = capsys.readouterr().out
    assert sorted(place.iterdir()) == before
    assert "pretrain" in shown and "40 %, seed 1: pairs" in shown
    assert "at least: at the speed of a matrix product" in shown and "with 2 jobs" in shown


def test_a_file_that_is_not_there(place, capsys):
    (place / "pairs.jsonl").unlink()
    assert main(["study", "grid.yaml", "--dry-run"]) == 2
    assert f"`data` got {place / 'pairs.jsonl'}; expected a file" in capsys.readouterr().err
    assert main(["study", "masking", "--dry-run"]) == 2
    assert "Give --data DIR" in capsys.readouterr().err


def test_the_grid_of_the_page(place, monkeypatch, capsys):
    """The grid of docs/studies.md as it is written there: 25 lines at most."""
    from pathlib import Path

    page = (Path(__file__).parents[2] / "docs/studies.md").read_text()
    grid = page.split("```text\n")[1].split("```")[0]
    assert len(grid.splitlines()) <= 25
    (place / "page.yaml").write_text(grid)
    examples = (place / "train.tsv").read_bytes()
    for folder in ("text", "sentiment"):
        (place / folder).mkdir()
    with gzip.open(place / "text/books-10m.train.txt.gz", "wb") as text:
        text.write((place / "stories.txt").read_bytes())
    for name in ("train", "dev"):
        (place / f"sentiment/movie.{name}.tsv").write_bytes(examples)
    assert main(["study", "page.yaml", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "vocab_size 2000, mlm_probability 0.40" in shown and "8 pretrains, 10 finetunes" in shown
