"""Makes pages.py importable for these tests, and a folder with the files that pages name."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

if str(Path(__file__).parent) not in sys.path:
    sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def files(tmp_path_factory) -> Path:
    """A folder with all files that pages name."""
    from pages import write_files

    folder = tmp_path_factory.mktemp("files")
    write_files(folder)
    return folder


@pytest.fixture
def here(files, tmp_path, monkeypatch) -> Path:
    """The test's working directory: its own folder with these files."""
    for path in files.iterdir():
        (tmp_path / path.name).symlink_to(path)
    monkeypatch.chdir(tmp_path)
    # Vocabularies of the same text are trained once.
    monkeypatch.setenv("XDG_CACHE_HOME", str(files / "cache"))
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    return tmp_path
