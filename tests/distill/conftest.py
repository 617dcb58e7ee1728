"""What the tests of distillation share: command lines, parallel text, and sizes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ..commands import rules_of_this_machine as measured  # noqa: F401

B, T, HEADS = 3, 7, 2
WORDS = 40
DOUBLE = torch.float64
SIZES = {
    "vocab_size": WORDS,
    "num_attention_heads": HEADS,
    "intermediate_size": 24,
    "max_position_embeddings": 16,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "initializer_range": 0.5,
}


def mask_of(*lengths: int) -> torch.Tensor:
    return torch.arange(T) < torch.tensor(lengths)[:, None]


MASK = mask_of(T, 4, 1)


@pytest.fixture(scope="session")
def distilled(corpus, tmp_path_factory):
    """The command line of a distillation that takes seconds, with options added or replaced."""
    cache = tmp_path_factory.mktemp("cache")

    def build(out: Path, teacher: Path, recipe: str = "distilbert", **options: object) -> list[str]:
        given = {"recipe": recipe, "teacher": teacher, "corpus": corpus, "out": out, "cache": cache}
        given |= {"student-layers": 1, "steps": 4, "save-every": 2, "log-every": 1, "lr": 1e-3}
        given |= {"block-size": 32, "batch-size": 4, "precision": "fp32"}
        given |= {name.replace("_", "-"): value for name, value in options.items()}
        words = ["distill"]
        for name, value in given.items():
            if value is not None:
                words += [f"--{name}"] + ([] if value is True else [str(value)])
        return words

    return build


@pytest.fixture(scope="session")
def parallel(tmp_path_factory):
    """Two files whose lines belong together; two pairs have a blank side."""
    folder = tmp_path_factory.mktemp("parallel")
    nouns = {"river": "Fluss", "house": "Haus", "train": "Zug", "garden": "Garten"}
    lines = [
        (f"The {a} sees the {b}.", f"Der {x} sieht den {y}.")
        for a, x in nouns.items()
        for b, y in nouns.items()
    ] * 4
    lines[3], lines[5] = ("", lines[3][1]), (lines[5][0], " ")
    for name, side in zip(("en", "de"), zip(*lines, strict=True), strict=True):
        (folder / f"{name}.txt").write_text("\n".join(side) + "\n")
    return {"corpus": folder / "en.txt", "translation": folder / "de.txt"}
