from __future__ import annotations

import gzip
import json
import random
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fastplm.run.folder import write_hashed
from fastplm.study.cells import Planner, Store
from fastplm.study.grid import Claim, read_grid
from fastplm.study.progress import DONE
from fastplm.study.results import TIMES, Results, Row, Scores

GRID = """\
study: masking
question: Is a masking rate of 40 % better than 15 %?
paper: Wettig et al. 2023
pretrain:
  arch: bert-tiny
  objective: mlm
  corpus: stories.txt
  steps: 3
  batch_size: 4
  block_size: 32
  vocab_size: 120
  precision: fp32
  seeds: 2
finetune: {seeds: 2, steps: 3, batch_size: 4, max_length: 32}
variants:
  "15 %": {mlm_probability: 0.15, lr: [5.0e-4, 1.0e-3]}
  "40 %": {mlm_probability: 0.40, lr: 1.0e-3}
judges:
  sentiment: {task: classification, data: train.tsv}
  pairs: {score: minimal-pairs, data: pairs.jsonl}
claims:
  - better: "40 %"
    than: "15 %"
    on: [sentiment, pairs, "held out: mlm_loss"]
    paper: Wettig et al. 2023, table 1
"""


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    """A folder with a small study and its files, which is the working directory."""
    nouns = "river house teacher garden train letter window forest engine island".split()
    verbs = "follows carries remembers builds opens paints".split()
    stories = [
        " ".join(
            f"The {nouns[(i + j) % 10]} {verbs[(i * 5 + j) % 6]} the {nouns[(i * 3 + j * 7) % 10]}."
            for j in range(4 + i % 7)
        )
        for i in range(150)
    ]
    (tmp_path / "stories.txt").write_text("\n\n".join(stories))
    rng = random.Random(0)
    rows = [
        f"The {rng.choice(nouns)} {verbs[i % 2]} the {rng.choice(nouns)}.\t{('yes', 'no')[i % 2]}"
        for i in range(40)
    ]
    (tmp_path / "train.tsv").write_text("\n".join(["text\tlabel", *rows]))
    pairs = [
        {
            "sentence_good": f"The {rng.choice(nouns)} {verbs[number]} the house.",
            "sentence_bad": f"The {verbs[number]} the {rng.choice(nouns)} house.",
            "UID": f"order_{number}",
        }
        for number in range(4)
        for _ in range(5)
    ]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    (tmp_path / "grid.yaml").write_text(GRID)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def plan_of(study="grid.yaml", size=None, data=None, threads=1):
    """The cells of a study, by what is finished of them in ``cells``."""
    return Planner(read_grid(study, size), Store("cells"), data, threads, "cache").plan()


def finish(cell, **figures):
    """Write what a finished cell has."""
    folder = Store("cells").at(cell)
    folder.mkdir(parents=True, exist_ok=True)
    times = {"seconds": 10.0, "cpu_seconds": 9.0, "train_seconds": 8.0}
    content = {"label": cell.label, "diverged": False, "code": "0", "flops": 1e9, "times": times}
    write_hashed(folder / DONE, {**content, **figures})


def changed(place, before, after):
    file = place / "grid.yaml"
    text = file.read_text()
    assert before in text
    file.write_text(text.replace(before, after))


def _write(folder, name, *lines):
    """A file of the data that the studies name, plain or compressed as its name says."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    opened = gzip.open if name.endswith(".gz") else open
    with opened(path, "wt", encoding="utf-8") as file:
        file.write("\n".join(lines) + "\n")


@pytest.fixture(scope="session")
def all_data(tmp_path_factory):
    """The files of all studies, with a few lines each."""
    folder = tmp_path_factory.mktemp("data")
    for part in ("train", "valid"):
        _write(folder, f"text/books-10m.{part}.txt.gz", *["One sentence. Another one."] * 40)
        pair = {"premise": "He sleeps.", "hypothesis": "He does.", "label": 0}
        _write(folder, f"nli/mnli.{part}.jsonl.gz", *map(json.dumps, [pair, pair | {"label": 1}]))
    for part in ("train", "dev"):
        _write(folder, f"sentiment/movie.{part}.tsv", "score\ttext", "1.5\tGood.", "-1.5\tBad.")
    for part in ("train", "test"):
        head = "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String"
        rows = [f"{label}\t1\t2\tHe sleeps.\tHe does." for label in (0, 1)]
        _write(folder, f"pairs/mrpc.{part}.txt", head, *rows)
        for language in ("en", "de"):
            _write(folder, f"translation/multi30k.{part}.{language}.gz", *["He sleeps."] * 9)
    for part in ("dev", "test"):
        _write(folder, f"tagging/ewt-pos.{part}.tsv", "He\tPRON", "sleeps\tVERB", "", "No\tINTJ")
    pairs = {"sentence_good": "He sleeps.", "sentence_bad": "He sleep.", "UID": "agreement"}
    with zipfile.ZipFile(folder / "x.zip", "w") as file:
        file.writestr("agreement.jsonl", json.dumps(pairs) + "\n")
    (folder / "blimp").mkdir()
    (folder / "x.zip").rename(folder / "blimp/blimp.zip")
    _write(folder, "text/wikitext-2.valid.txt", *["One sentence. Another one."] * 40)
    _write(folder, "blimp/models_summary.jsonl", json.dumps({"UID": "agreement", "gpt2": 0.9}))
    return folder


BASE = [[0.70, 0.71], [0.72, 0.71], [0.69, 0.70]]
BETTER = [[0.80, 0.82], [0.82, 0.80], [0.79, 0.80]]


@pytest.fixture
def study(place):
    """A function that makes the results of two variants from scores."""
    grid = read_grid("grid.yaml")

    def make(ours, theirs, on="sentiment", **options):
        claims = (Claim("40 %", "15 %", (on,), "Wettig et al. 2023"),)
        facts = {"steps": None, "parameters": None, "vocab_size": None, "tokenizer": "a"}
        facts |= {"learning_rate": "1e-3", "rates": {"1e-3": 3.5, "1e-2": None}, "seeds": 3}
        rows = {}
        for name, values in {"15 %": theirs, "40 %": ours}.items():
            scores = {on: Scores(np.array(values), **options)}
            rows[name] = Row(name, scores, {}, 2.00001e13, facts, dict.fromkeys(TIMES, 60.0))
        return Results(replace(grid, claims=claims), rows, ("c0de",), {"torch": "2.13"})

    return make
