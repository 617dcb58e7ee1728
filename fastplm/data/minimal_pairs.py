"""Reads minimal pairs, two sentences of which one is acceptable, and published accuracies."""

from __future__ import annotations

import io
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from fastplm.data._folder import say
from fastplm.data.examples import _value, subset
from fastplm.data.sources import Rows, rows_of, table_of
from fastplm.errors import DataError, check, fail

_WHERE = "read_pairs"
_GOOD, _BAD, _PARADIGM, _TERM, _FIELD = (
    *("sentence_good", "sentence_bad", "UID", "linguistics_term", "field"),
)
#: Of a damaged zip, one that is encrypted, and a file in it that is no UTF-8.
_ZIP_ERRORS = (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, UnicodeDecodeError)
#: The UID of published rows that are means over others.
_MEAN = "overall"


class MinimalPair(NamedTuple):
    """Two sentences that differ in little, of which one is acceptable.

    Args:
        good, bad: the acceptable sentence and the other one.
        paradigm: what the pair tests; pairs of one paradigm are counted together.
        term, field: the phenomenon of the paradigm and its field, such as "island_effects" and
            "syntax"; "" where none is known.
        where: for messages: the file and the line.
    """

    good: str
    bad: str
    paradigm: str = ""
    term: str = ""
    field: str = ""
    where: str = ""


def read_pairs(path: str | Path) -> list[MinimalPair]:
    """The minimal pairs of a file.

    A line on stderr says how many pairs are twice the same sentence, as 7 of BLiMP are.

    Args:
        path: JSON lines, or a header and rows separated by tabs (without quotes) or commas, plain
            or compressed, with the columns ``sentence_good`` and ``sentence_bad`` and, if there
            are any, ``UID`` (the paradigm; by default the name of the file), ``linguistics_term``
            and ``field``; or a zip of such ``.jsonl`` files, as BLiMP is published.

    Raises:
        DataError: the file is wrong; the message names the line.

    Source: of the format Warstadt et al. 2020 (arXiv 1912.00582), BLiMP.
    """
    path = Path(path)
    pairs: list[MinimalPair] = []
    files: dict[str, Path] = {}  # of each paradigm
    for file, rows in _files(path):
        own = [_pair(file, line, row) for line, row in rows]
        for paradigm in {pair.paradigm for pair in own}:
            got = f"the UID {paradigm!r} in {files.get(paradigm)} and in {file}"
            fix = "Rename one of them, or join the files."
            _check(paradigm not in files, got, "a UID for each file of the zip", fix)
            files[paradigm] = file
        pairs += own
    _check(bool(pairs), f"{path}: nothing", "a pair at least")
    same = [pair for pair in pairs if pair.good == pair.bad]
    if same:
        count = f"{len(same)} of {len(pairs):,}, such as {same[0].where}"
        say(f"pairs of twice the same sentence, which count as wrong: {count}")
    known: dict[str, MinimalPair] = {}
    for pair in pairs:
        first = known.setdefault(pair.paradigm, pair)
        for name, key in ((_TERM, "term"), (_FIELD, "field")):
            value, one = getattr(pair, key), getattr(first, key)
            got = f"{pair.where}: {name} {value!r} of the UID {pair.paradigm!r}"
            _check(value == one, got, f"{one!r}, as in {first.where}")
            got = f"{pair.where}: {'a' if value else 'no'} {name!r}"
            alike = bool(value) == bool(getattr(pairs[0], key))
            _check(alike, got, f"one in all rows or in none ({pairs[0].where})")
    return pairs


def some_of_each(pairs: list[MinimalPair], count: int | None) -> list[MinimalPair]:
    """``count`` random pairs of each paradigm, the same ones every time, in order; None = all."""
    places: dict[str, list[int]] = {}
    for place, pair in enumerate(pairs):
        places.setdefault(pair.paradigm, []).append(place)
    return [pairs[i] for i in sorted(i for own in places.values() for i in subset(own, count))]


def read_published(path: str | Path) -> dict[str, dict[str, float]]:
    """Published accuracies: {paradigm: {system: accuracy from 0 to 1}}.

    Args:
        path: a table as of ``read_pairs`` with the column ``UID`` and one of numbers for each
            system. A column ``linguistics_term`` or ``field`` is left out, and so are rows with the
            UID "overall": they are means over the other ones.

    Raises:
        DataError: the file is wrong; the message names the line.
    """
    path, found = Path(path), {}
    for line, row in rows_of(path):
        where = f"{path}:{line}"
        paradigm = _text(where, row, _PARADIGM)
        if paradigm == _MEAN:
            continue
        _check(paradigm not in found, f"{where}: the UID {paradigm!r} again", "each UID once")
        found[paradigm] = {
            system: _share(where, system, value)
            for system, value in row.items()
            if system not in (_PARADIGM, _TERM, _FIELD)
        }
        first = next(iter(found.values()))
        _check(bool(first), f"{where}: no column but UID", "a column for each system")
        got = f"{where}: the systems {list(found[paradigm])}"
        _check(first.keys() == found[paradigm].keys(), got, f"{list(first)}, as before")
    _check(bool(found), f"{path}: nothing", "a row at least")
    return found


def _files(path: Path) -> Iterator[tuple[Path, Rows]]:
    """(name for messages, rows) of a file, or of each file of JSON lines in a zip."""
    if not path.is_file() or not zipfile.is_zipfile(path):
        yield path, rows_of(path)
        return
    try:
        with zipfile.ZipFile(path) as archive:
            names = sorted(name for name in archive.namelist() if name.endswith(".jsonl"))
            names = [name for name in names if not name.startswith("__MACOSX/")]
            got = f"{path}, a zip without a .jsonl file"
            _check(bool(names), got, "a zip with the files of BLiMP")
            for name in names:
                with archive.open(name) as file:
                    text = io.TextIOWrapper(file, "utf-8-sig").read()
                    yield path / name, table_of(path / name, io.StringIO(text))
    except _ZIP_ERRORS as error:
        got = f"{path}, a zip that cannot be read ({error})"
        fail(_WHERE, "path", got, "a zip of UTF-8 files", "Copy it again, or unpack it.", DataError)


def _pair(file: Path, line: int, row: dict[str, Any]) -> MinimalPair:
    where = f"{file}:{line}"
    good, bad = _text(where, row, _GOOD), _text(where, row, _BAD)
    given = (_text(where, row, name) if name in row else "" for name in (_PARADIGM, _TERM, _FIELD))
    paradigm, term, field = given
    return MinimalPair(good, bad, paradigm or file.name.split(".")[0], term, field, where)


def _text(where: str, row: dict[str, Any], name: str) -> str:
    expected = f"one named {name!r}"
    _check(name in row, f"{where}: columns {list(row)[:8]}", expected, "Rename the column.")
    return _value(where, name, row[name], is_text=True)


def _share(where: str, system: str, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = float("nan")
    got = f"{where}: {system} {value!r:.40}"
    _check(0.0 <= number <= 1.0, got, "an accuracy from 0 to 1", "Correct or delete the column.")
    return number


def _check(fits: bool, got: str, expected: str, fix: str = "Correct the file.") -> None:
    check(fits, _WHERE, "path", got, expected, fix, DataError)
