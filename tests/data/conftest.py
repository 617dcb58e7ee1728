from __future__ import annotations

import os
from pathlib import Path

import pytest

from fastplm.data import TokenStore, embedded_corpus, tokenize, train_tokenizer

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def real_text() -> Path:
    """The folder of real text files: $FASTPLM_TEST_DATA/text or ../shared/data/text."""
    folder = os.environ.get("FASTPLM_TEST_DATA")
    path = (Path(folder) if folder else REPOSITORY.parent / "shared" / "data") / "text"
    if not path.is_dir():
        pytest.skip(f"no real text in {path}: set FASTPLM_TEST_DATA to the folder that has text/")
    return path


@pytest.fixture(scope="session")
def embedded() -> list[str]:
    """Python's own text, which takes seconds to collect: every file of the library is parsed."""
    return embedded_corpus()


def _story(number: int) -> str:
    names = ("anna", "boris", "clara", "dmitri", "emma", "felix", "greta")
    verbs = ("builds", "paints", "reads", "sells", "cooks", "finds")
    things = ("a house", "the red boat", "an old book", "seven apples", "the long road")
    lines = []
    for i in range(5 + number % 9):
        name, verb = names[(number + i) % 7], verbs[(number * 3 + i) % 6]
        lines.append(f"{name} {verb} {things[(number + 2 * i) % 5]} {i} times before evening.")
    return " ".join(lines)


@pytest.fixture(scope="session")
def documents() -> list[str]:
    return [_story(number) for number in range(120)]


@pytest.fixture(scope="session")
def tokenizer(documents, tmp_path_factory):
    return train_tokenizer(documents, 120, tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def store(documents, tokenizer, tmp_path_factory) -> TokenStore:
    return tokenize(documents, tokenizer, tmp_path_factory.mktemp("tokens"))
