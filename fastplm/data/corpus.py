"""Text to documents: files and folders of the user, or the English that every CPython carries."""

from __future__ import annotations

import ast
import hashlib
import re
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal, NoReturn

from fastplm._checks import DataError, check, message

#: How a file marks where a document begins.
Boundary = Literal["title", "blank", "line"]

# ` = Robert Boulter = ` begins an article of WikiText; ` = = Career = = ` only a section of it.
_TITLE = re.compile(r"\s*= [^=\s](.*[^=\s])? =\s*")
_DOCTEST = re.compile(r"\s*(>>>|\.\.\.( |$))")
_NOT_THE_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3"}


class TextFiles(Iterable[str]):
    """The documents of text files, read anew at every iteration and never all in memory.

    Args:
        files: each file and what marks its documents: a WikiText title, a blank line or,
            where a file has neither, every line of its own.
    """

    def __init__(self, files: Sequence[tuple[Path, Boundary]]) -> None:
        self.files = list(files)

    def __iter__(self) -> Iterator[str]:
        for path, boundary in self.files:
            yield from _documents_of(path, boundary)


def read_documents(paths: Iterable[str | Path]) -> TextFiles:
    """The documents of the files named and of every ``*.txt`` file below the folders named.

    Args:
        paths: files or folders; files of a folder come in sorted order.

    Returns:
        An iterable that may be iterated many times and gives one ``str`` a document.

    Raises:
        DataError: a path is missing, a file is empty or not UTF-8, a folder has no text in it.
    """
    files: list[tuple[Path, Boundary]] = []
    for path in map(Path, paths):
        if path.is_dir():
            inside = [(file, _boundary_of(file)) for file in sorted(path.rglob("*.txt"))]
            found = [(file, boundary) for file, boundary in inside if boundary is not None]
            if not found:
                _refuse(path, f"a folder with {len(inside)} .txt files and no text in them")
            files += found
        elif path.is_file():
            boundary = _boundary_of(path)
            if boundary is None:
                _refuse(path, "an empty file")
            files.append((path, boundary))
        else:
            _refuse(path, "a path that does not exist")
    check(
        bool(files), "read_documents", "paths", "no path", "one at least", "Name a file.", DataError
    )
    return TextFiles(files)


def embedded_corpus() -> list[str]:
    """The English text inside every CPython: pydoc's topics and the standard library's docstrings.

    Sources are parsed, never imported. One document is one topic or one module; the order follows
    a hash of the text, so that it is the same on every machine with the same Python and any slice
    is a fair sample.

    Raises:
        DataError: the standard library is not there as source files.
    """
    library = Path(sysconfig.get_path("stdlib"))
    documents = _pydoc_topics(library / "pydoc_data" / "topics.py")
    for source in sorted(library.rglob("*.py")):
        if not _NOT_THE_LIBRARY.intersection(source.relative_to(library).parts):
            documents.append("\n".join(_docstrings(source)))
    cleaned = {text for text in map(_clean, documents) if len(text) >= 200}
    check(
        bool(cleaned),
        "embedded_corpus",
        "library",
        f"no source files in {library}",
        "CPython's standard library as .py files",
        "Give a corpus of your own (--corpus PATH).",
        DataError,
    )
    return sorted(cleaned, key=lambda text: hashlib.sha256(text.encode()).digest())


def fingerprint(documents: Iterable[str]) -> str:
    """A hex digest of the documents and their boundaries; the key of caches."""
    digest = hashlib.sha256()
    for document in documents:
        encoded = document.encode()
        digest.update(len(encoded).to_bytes(8, "little"))
        digest.update(encoded)
    return digest.hexdigest()


def _lines(path: Path) -> Iterator[str]:
    try:
        with path.open(encoding="utf-8-sig") as file:
            yield from file
    except UnicodeDecodeError as error:
        raise DataError(
            message(
                "read_documents",
                "paths",
                f"{path}, which is not UTF-8 ({error.reason})",
                "UTF-8 text",
                f"Convert it, e.g. iconv -f latin1 -t utf-8 {path}.",
            )
        ) from error
    except OSError as error:
        _refuse(path, f"a file that cannot be read ({error.strerror})")


def _boundary_of(path: Path) -> Boundary | None:
    """What marks the documents of a file; None for a file without text. Reads the whole file, so
    that a file that is not UTF-8 fails before any work is done."""
    text = blank = blank_inside = title = False
    for line in _lines(path):
        if line.isspace():
            blank = text
        else:
            blank_inside |= blank
            title |= _TITLE.fullmatch(line) is not None
            text = True
    if not text:
        return None
    return "title" if title else "blank" if blank_inside else "line"


def _documents_of(path: Path, boundary: Boundary) -> Iterator[str]:
    document: list[str] = []
    for line in _lines(path):
        blank = line.isspace()
        begins = {
            "title": _TITLE.fullmatch(line) is not None,
            "blank": blank,
            "line": True,
        }[boundary]
        if begins and document:
            yield "\n".join(document)
            document = []
        if not blank:
            document.append(line.strip())
    if document:
        yield "\n".join(document)


def _refuse(path: Path, got: str) -> NoReturn:
    raise DataError(
        message(
            "read_documents",
            "paths",
            f"{path}, {got}",
            "UTF-8 text files, or folders of .txt files",
            "Check the path.",
        )
    )


def _pydoc_topics(source: Path) -> list[str]:
    if not source.is_file():
        return []
    for node in ast.parse(source.read_bytes()).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            return list(ast.literal_eval(node.value).values())
    return []


def _docstrings(source: Path) -> Iterator[str]:
    try:
        tree = ast.parse(source.read_bytes())
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            docstring = ast.get_docstring(node)
            if docstring:
                yield docstring


def _clean(text: str) -> str:
    """Single spaces, no empty lines, no doctest prompts: the prose."""
    lines = (" ".join(line.split()) for line in text.splitlines() if not _DOCTEST.match(line))
    return "\n".join(line for line in lines if line)
