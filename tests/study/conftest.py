from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

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
