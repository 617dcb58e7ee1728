"""The documents of text files, or of the English text inside every CPython."""

from __future__ import annotations

import ast
import hashlib
import json
import mmap
import os
import re
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from fastplm.data._files import SUFFIXES, check_regular, lines_of, refuse
from fastplm.data._folder import build_once, say
from fastplm.data.sources import fingerprint as fingerprint_of
from fastplm.data.sources import is_arrow, is_table, texts_of
from fastplm.errors import ArgumentTypeError, DataError, check, message

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
            where a file has neither, every line of its own. Each row of a table is a document,
            and has a blank line behind it.
    """

    def __init__(self, files: Sequence[tuple[Path, Boundary]]) -> None:
        self.files = list(files)

    def __iter__(self) -> Iterator[str]:
        for path, boundary in self.files:
            yield from _documents_of(_lines_of(path), boundary)

    def release(self) -> None:
        """Give back the disk space of a copy of the text, see ``read_documents``."""


class _CachedFiles(TextFiles):
    """``TextFiles`` that are read once by this process, or not at all.

    The cache keeps their boundaries and their fingerprint under the names, sizes and times of the
    files. Documents come from a copy of the text, which is made when they are first asked for, in a
    file without a name: it ends with ``release``, or with the process. ``boundaries`` has None for
    a file without text, which has no documents.
    """

    def __init__(self, paths: Sequence[Path], cache: str | Path) -> None:
        self._paths, self._cache = list(paths), Path(cache)
        self._parts: list[tuple[int, int]] = []
        self._left_out: list[str] = []
        self._text: mmap.mmap | bytes = b""
        self._state = self._state_of_files()
        # Version 3: rows have their text in either column, and .json, .csv and .tsv have rows.
        key = hashlib.sha256(f"3 {self._state}".encode()).hexdigest()
        folder = build_once(cache, f"corpus-{key[:32]}", self._build)
        known = json.loads((folder / "corpus.json").read_text("utf-8"))
        self.boundaries: list[Boundary | None] = known["boundaries"]
        self.fingerprint: str = known["fingerprint"]
        say("\n".join(known["left_out"]))
        found = zip(self._paths, self.boundaries, strict=True)
        super().__init__([(path, boundary) for path, boundary in found if boundary is not None])

    def __iter__(self) -> Iterator[str]:
        if not self._parts:
            self._read()
        yield from self._copied_documents()

    def release(self) -> None:
        self._parts, self._text = [], b""  # the space is free when nothing maps the copy

    def _state_of_files(self) -> str:
        return repr([*map(_state_of, self._paths)])

    def _build(self, folder: Path) -> None:
        self._read()
        digest = fingerprint(self._copied_documents())
        known = {"boundaries": self.boundaries, "fingerprint": digest, "left_out": self._left_out}
        (folder / "corpus.json").write_text(json.dumps(known), "utf-8")

    def _read(self) -> None:
        """Read all files, check them, and copy their text."""
        self._parts, self.boundaries, end = [], [], 0
        self._left_out.clear()
        with tempfile.TemporaryFile(prefix=".corpus-", dir=self._cache) as copy:
            for path in self._paths:
                begin = end

                def lines(path: Path = path) -> Iterator[str]:
                    nonlocal end
                    for line in _lines_of(path, self._left_out):
                        end += copy.write(line.encode())
                        yield line

                self.boundaries.append(_boundary_of(path, lines()))
                self._parts.append((begin, end))
            copy.flush()
            self._text = mmap.mmap(copy.fileno(), 0, access=mmap.ACCESS_READ) if end else b""
        if self._state != self._state_of_files():
            fix = "Start again when nothing writes to it."
            refuse(self._paths[0], "a corpus that changed while it was read", fix)

    def _copied_documents(self) -> Iterator[str]:
        text = self._text
        for (begin, end), boundary in zip(self._parts, self.boundaries, strict=True):
            if boundary is not None:
                yield from _documents_of(_lines_within(text, begin, end), boundary)


def _state_of(path: Path) -> tuple[Any, ...]:
    if is_arrow(path):
        return (fingerprint_of(path),)
    found = check_regular(path)
    return os.path.abspath(path), found.st_size, found.st_mtime_ns


def _lines_within(text: mmap.mmap | bytes, begin: int, end: int) -> Iterator[str]:
    while begin < end:
        line_end = text.find(b"\n", begin, end) + 1 or end
        yield text[begin:line_end].decode()
        begin = line_end


def read_documents(paths: Iterable[str | Path], *, cache: str | Path | None = None) -> TextFiles:
    """The documents of the files named and of every ``*.txt`` file below the folders named.

    Files are UTF-8, or UTF-16 or UTF-32 with a byte-order mark, and may be compressed by gzip,
    bzip2, xz or zstd (``*.txt.gz`` and so on in a folder): the same text gives the same documents.
    Before Python 3.14 zstd needs the package ``zstandard``. A row of a table (``sources.texts_of``)
    is a document; a line on stderr says how many rows have no text, and how many files of a folder
    are no text files.

    Args:
        paths: files or folders; files of a folder come in sorted order.
        cache: a folder that keeps what is to be known of the files while their sizes and times
            stay. A process then reads them once, or not at all if ``train_tokenizer`` and
            ``tokenize`` find their results there; until ``TextFiles.release`` the folder needs room
            for a copy of the text. By default files are read now and at every iteration.

    Returns:
        An iterable that may be iterated many times and gives one ``str`` a document.

    Raises:
        DataError: a path is missing or cannot be read twice, a file is empty, binary, damaged or in
            another encoding, a folder has no text in it or a file both packed and unpacked, or a
            row of a table has its text elsewhere.
        ArgumentTypeError: one path instead of several.
    """
    if isinstance(paths, (str, Path)):
        got, fix = f"{type(paths).__name__} {str(paths)!r}", f"Pass [{str(paths)!r}]."
        raise ArgumentTypeError(message("read_documents", "paths", got, "a list of paths", fix))
    named: list[tuple[Path, list[Path]]] = []
    for name in paths:
        path = Path(name)
        if str(name) == "":
            refuse(path, "which an empty name stands for", "Name a file or a folder.")
        named.append((path, _texts_in(path) if os.path.isdir(path) else [path]))
    where, fix = "read_documents", "Name a file."
    check(bool(named), where, "paths", "no path", "one at least", fix, DataError)
    files = [file for _, inside in named for file in inside]
    if cache is None:
        left_out: list[str] = []
        marks = [(file, _boundary_of(file, _lines_of(file, left_out))) for file in files]
        documents = TextFiles([(file, mark) for file, mark in marks if mark is not None])
        say("\n".join(left_out))
    else:
        documents = _CachedFiles(files, cache)
    found = {file for file, _ in documents.files}
    for path, inside in named:
        if found.isdisjoint(inside):
            if os.path.isdir(path):
                got = f"a folder with {len(inside)} .txt files and no text in them"
                refuse(path, got, "Name its files, if they have other names.")
            refuse(path, "a table without a text" if is_table(path) else "an empty file")
    return documents


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
    got, expected = f"no source files in {library}", "CPython's standard library as .py files"
    fix = "Give a corpus of your own (--corpus PATH)."
    check(bool(cleaned), "embedded_corpus", "library", got, expected, fix, DataError)
    return sorted(cleaned, key=lambda text: hashlib.sha256(text.encode()).digest())


def check_documents(where: str, documents: object) -> None:
    """Refuse what is not texts that can be read several times: one text, or a generator."""
    one = isinstance(documents, (str, bytes))
    if one or not isinstance(documents, Iterable) or iter(documents) is documents:
        got = f"a {type(documents).__name__}{', which is read only once' if not one else ''}"
        expected = "a list of texts, or another iterable that can be read several times"
        raise ArgumentTypeError(message(where, "documents", got, expected, "Pass a list."))


def fingerprint(documents: Iterable[str]) -> str:
    """A hex digest of the documents and their boundaries; the key of caches."""
    if isinstance(documents, _CachedFiles):
        return documents.fingerprint
    digest = hashlib.sha256()
    for number, document in enumerate(documents):
        try:
            encoded = document.encode()
        except (AttributeError, UnicodeEncodeError) as error:
            got = f"{document!r:.60} as document {number}"
            if isinstance(error, UnicodeEncodeError):
                got = f"document {number}, where letter {error.start} is half a surrogate pair"
            fix = "Pass a list of texts, e.g. of read_documents."
            raise DataError(message("fingerprint", "documents", got, "texts", fix)) from error
        digest.update(len(encoded).to_bytes(8, "little"))
        digest.update(encoded)
    return digest.hexdigest()


def _texts_in(folder: Path) -> list[Path]:
    """The text files below a folder, sorted; a line says how many others are left out."""
    # Links to folders are not followed.
    found = [path for path in sorted(folder.rglob("*")) if path.is_symlink() or not path.is_dir()]
    texts = [path for path in found if path.name.endswith(SUFFIXES) and not path.is_dir()]
    seen = (path for path in found if "/." not in f"/{path.relative_to(folder).as_posix()}")
    others = [path for path in seen if path not in {*texts}]
    if others:
        say(f"{folder}: {len(others):,} files that are no .txt are left out, such as {others[0]}.")
    unpacked: dict[str, Path] = {}
    for path in texts:
        name = str(path)[: str(path).rindex(".txt")]
        if name in unpacked:
            fix = "Delete one of the two, or name the files."
            refuse(path, f"beside {unpacked[name].name}, the same text twice", fix)
        unpacked[name] = path
    return texts


def _lines_of(path: Path, left_out: list[str] | None = None) -> Iterator[str]:
    """The lines of a file; those of a row of a table have a blank one behind them.

    ``left_out`` gets a line about the rows that have no text, if there are any.
    """
    if not is_table(path):
        yield from lines_of(path)
        return
    count, lacking = 0, []
    for row, text in texts_of(path):
        count += 1
        if text is None:
            lacking.append(row)
            continue
        yield from (f"{line.strip()}\n" for line in text.splitlines() if line.strip())
        yield "\n"
    if lacking and left_out is not None:
        left_out.append(
            f"{path}: {len(lacking):,} of {count:,} rows have no text and are left out, the first "
            f"of them at {lacking[0]}."
        )


def _boundary_of(path: Path, lines: Iterable[str]) -> Boundary | None:
    """What marks the documents of a file; None for a file without text. Takes all lines, so that
    a file that is not text fails before any work is done."""
    text = blank = blank_inside = title = False
    for line in lines:
        if line.isspace():
            blank = text
        else:
            blank_inside |= blank
            title |= _TITLE.fullmatch(line) is not None
            text = True
    if not text:
        return None
    if is_table(path):
        return "blank"
    return "title" if title else "blank" if blank_inside else "line"


def _documents_of(lines: Iterable[str], boundary: Boundary) -> Iterator[str]:
    document: list[str] = []
    for line in lines:
        blank = line.isspace()
        begins = _TITLE.fullmatch(line) if boundary == "title" else blank or boundary == "line"
        if begins and document:
            yield "\n".join(document)
            document = []
        if not blank:
            document.append(line.strip())
    if document:
        yield "\n".join(document)


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
