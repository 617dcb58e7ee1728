"""The rows of tables: JSON, values separated by commas or tabs, Parquet, Arrow, and the Hub's.

All commands read tables through ``rows_of``, and one text of each line or row through ``texts_of``.
"""

from __future__ import annotations

import contextlib
import csv
import importlib.util
import itertools
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from fastplm.data._files import check_regular, lines_of, refuse
from fastplm.errors import DataError, fail, first_line

HUB = "hf:"
_ARROW = (".parquet", ".arrow", ".feather")
_JSON = (".jsonl", ".ndjson", ".json")
_SEPARATED = (".csv", ".tsv")
_EXPECTED = "a file of text or a table: .parquet, .arrow, or hf:OWNER/NAME[/CONFIG][:SPLIT]"
_ROWS_AT_ONCE = 1000
#: The maximum length of a CSV field: the largest C long, which has 32 bits on Windows.
_MOST_LETTERS = 2**31 - 1
#: The escape of half a surrogate pair in JSON.
_HALF_PAIR = re.compile(r"\\u[dD][89a-fA-F]")
#: The names of the column of texts; the first one that a row has counts.
_TEXTS = ("text", "content")
_NAME_IT = f'Name the column of the texts "{_TEXTS[0]}".'

#: The line or row from 1 on, and the values by column.
Rows = Iterator[tuple[int, dict[str, Any]]]


def is_arrow(path: str | Path) -> bool:
    """Whether a path is of a table that is no text: .parquet, .arrow, .feather, or "hf:…"."""
    return str(path).startswith(HUB) or Path(path).suffix.lower() in _ARROW


def is_table(path: str | Path) -> bool:
    """Whether the name of a file is that of a table, perhaps compressed, or of a data set."""
    return is_arrow(path) or _kind(path) in (*_JSON, *_SEPARATED)


def _kind(path: str | Path) -> str:
    """The last ending of a name that says what the file holds: ".jsonl" of "a.jsonl.gz"."""
    known = (*_JSON, *_SEPARATED, ".txt")
    endings = (ending.lower() for ending in Path(path).suffixes[::-1])
    return next((ending for ending in endings if ending in known), "")


def rows_of(path: str | Path) -> Rows:
    """The rows of a table; a class label by its name, or None for -1.

    Args:
        path: a .parquet, .arrow or .feather file; "hf:" and the name of a data set on the Hub,
            perhaps with a configuration behind it and a split ("hf:nyu-mll/glue/sst2:validation"),
            where the split is "train" by default, and the cache of ``datasets`` and
            ``HF_HUB_OFFLINE`` count; or a file of another name, as ``table_of`` reads it.

    Raises:
        DataError: the library is not installed, or the table cannot be read; the message has the
            line or the row.
    """
    if not is_arrow(path):
        yield from table_of(path, lines_of(Path(path)))
        return
    row = 0
    with _quietly(str(path)):
        for table, labels in _arrow_tables(path):
            for values in _values(path, table, row):
                row += 1
                for name, names in labels.items():
                    label = values[name]
                    values[name] = None if label is None or label < 0 else names[label]
                yield row, values


def table_of(path: str | Path, lines: Iterable[str]) -> Rows:
    """The rows of lines, which begin with "{" for JSON lines, "[" for a list in JSON, or a header.

    Columns are separated by tabs (without quotes) if the header has one, else by commas.
    """
    lines, head = iter(lines), []
    for line in lines:
        head.append(line)
        if line.strip():
            break
    begin = "".join(head).lstrip()[:1]
    lines = itertools.chain(head, lines)
    if begin == "[":
        content = json_of(path, "".join(lines))
        yield from ((row, _object(f"{path}:{row}", each)) for row, each in enumerate(content, 1))
    elif begin in ("{", ""):
        for number, line in enumerate(lines, 1):
            if line.strip():
                content = json_of(path, line.rstrip("\n"), number)
                yield number, _object(f"{path}:{number}", content)
    else:
        yield from _separated(path, lines)


def texts_of(path: str | Path, *, lines: bool = False) -> Iterator[tuple[int, str | None]]:
    """The line or row from 1 on, and its text: of a file of text, or of a table by its name.

    With ``lines`` a .csv or .tsv is a file of text. A row has its text in the column "text" or else
    "content"; a table with neither, but for a header and rows, in its only column of strings. The
    text is None where a row has none.

    Raises:
        DataError: the file is wrong, or a row has its text elsewhere; the message has the line.
    """
    by_name = not is_arrow(path) and _kind(path) in _SEPARATED
    if not is_table(path) or (lines and by_name):
        yield from ((row, line.rstrip("\n")) for row, line in enumerate(lines_of(Path(path)), 1))
        return
    only: str | None = None
    for row, values in rows_of(path):
        where = f"{path}:{row}"
        usual = [name for name in _TEXTS if name in values]
        by_name |= bool(usual)
        if only is None and not by_name:
            texts = [name for name, value in values.items() if isinstance(value, str)]
            only = texts[0] if len(texts) == 1 else None
        names = usual or [name for name in values if name == only]
        if not names and not all(map(is_missing, values.values())):
            got, expected = f"a row with the columns {', '.join(values)}", "one of its text"
            refuse_row(where, got, expected, _NAME_IT)
        name = next((name for name in names if not is_missing(values[name])), None)
        if name is not None:
            check_is_text(where, name, values[name])
        yield row, None if name is None else values[name]


def is_missing(value: Any) -> bool:
    """Whether a table has nothing here: null, NaN, as pandas writes for it, or white space."""
    return value is None or value != value or (isinstance(value, str) and not value.strip())


def check_is_text(where: str, column: str, value: Any) -> None:
    """Refuse a value that is not a text."""
    if isinstance(value, str):
        return
    if isinstance(value, bytes):
        got, fix = f"bytes that are not UTF-8, {value[:20]!r},", "Convert them to UTF-8."
    elif isinstance(value, (list, dict)):
        got, fix = f"a {type(value).__name__}", "Make one value of it, or name another column."
    else:
        got = f"the {type(value).__name__} {value!r:.40}"
        fix = "Put it in quotation marks, or name another column."
    refuse_row(where, f"{got} in column {column!r}", "a text", fix)


def fingerprint(path: str | Path) -> str:
    """What changes with the rows of a table: the state of its file, or what ``datasets`` says."""
    if str(path).startswith(HUB):
        with _quietly(str(path)):
            return str(_of_hub(str(path))._fingerprint)
    found = check_regular(Path(path))
    return repr((os.path.abspath(path), found.st_size, found.st_mtime_ns))


def refuse_row(where: str, got: str, expected: str, fix: str = "Correct the file.") -> NoReturn:
    """Raise the error of a row; ``where`` is the file and the line."""
    fail("read", "path", f"{where}: {got}", expected, fix, DataError)


# --- JSON -----------------------------------------------------------------------------------------


def json_of(path: str | Path, text: str, number: int | None = None) -> Any:
    """What a text in JSON stands for; ``number`` is its line in a file of JSON lines."""
    try:
        content = json.loads(text, object_pairs_hook=_with_different_names)
        if _HALF_PAIR.search(text):  # valid JSON, but not valid UTF-8
            json.dumps(content, ensure_ascii=False).encode()
        return content
    except json.JSONDecodeError as error:
        line = (number or 1) + error.lineno - 1
        fix = f"Correct {'the file.' if number is None else 'it: each line is one object.'}"
        got = f"no JSON ({error.msg}, column {error.colno})"
        refuse_row(f"{path}:{line}", got, "JSON", fix)
    except UnicodeEncodeError:
        got = "half of a surrogate pair, such as \\ud800, without the other half"
        refuse_row(f"{path}:{number or 1}", got, "text")
    except (ValueError, RecursionError) as error:  # e.g. a number of thousands of digits
        refuse_row(f"{path}:{number or 1}", f"JSON that cannot be read ({error})", "JSON")


def _with_different_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        ((twice, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"an object has the name {twice!r:.60} twice")
    return found


def _object(where: str, row: Any) -> dict[str, Any]:
    if not isinstance(row, dict):
        fix = "Write one object a line, or a list of objects."
        refuse_row(where, f"a {type(row).__name__}", "one JSON object a line", fix)
    return row


# --- values separated by tabs or commas -----------------------------------------------------------


def _separated(path: str | Path, lines: Iterator[str]) -> Rows:
    head = next(lines).removesuffix("\n")
    if "\t" in head or ("," not in head and _kind(path) == ".tsv"):
        names = head.rstrip("\r").split("\t")
        rows = (line.rstrip("\r\n").split("\t") for line in lines)
        numbered: Iterator[tuple[int, list[str]]] = enumerate(rows, 2)
    else:
        names = next(csv.reader([head]), [])
        numbered = _csv_rows(path, lines)
    if len(names) < 2 and names not in ([name] for name in _TEXTS):
        fix = "Write a header, or name a file of plain text .txt."
        expected = "a header of two columns or more, or JSON lines"
        refuse_row(f"{path}:1", repr(head[:60]), expected, fix)
    # Several columns without a name are allowed: spreadsheets write them, and no task reads them.
    found = [name for name, count in Counter(map(str.strip, names)).items() if name and count > 1]
    if found:
        places = [place for place, name in enumerate(names, 1) if name.strip() == found[0]]
        got = f"the column {found[0]!r} {len(places)} times ({', '.join(map(str, places))})"
        refuse_row(f"{path}:1", got, "a name of its own for each column", "Rename or delete one.")
    for line, values in numbered:
        if values in ([], [""]):
            continue
        if len(values) != len(names):
            expected = f"{len(names)}, as in the header"
            refuse_row(f"{path}:{line}", f"{len(values)} columns", expected)
        yield line, dict(zip(names, values, strict=True))


def _csv_rows(path: str | Path, lines: Iterable[str]) -> Iterator[tuple[int, list[str]]]:
    csv.field_size_limit(_MOST_LETTERS)  # by default 131,072
    # A "\r" without "\n" does not end a line; see ``lines_of``.
    reader = csv.reader(lines, strict=True)
    while True:
        line = reader.line_num + 2
        try:
            yield line, next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            if str(error).startswith("new-line character"):
                got, fix = "a carriage return inside a value", "Delete it, or quote the value."
                refuse_row(f"{path}:{line}", got, "comma-separated values", fix)
            refuse_row(f"{path}:{line}", str(error), "comma-separated values")


# --- Parquet, Arrow and the Hub -------------------------------------------------------------------


def _arrow_tables(path: str | Path) -> Iterator[tuple[Any, dict[str, list[str]]]]:
    """Tables of some rows each, without columns in columns, and the names of their labels."""
    if importlib.util.find_spec("datasets") is None:
        refuse(path, "without the library that reads it", "pip install datasets.", _EXPECTED)
    if str(path).startswith(HUB):
        data = _of_hub(str(path))
        labels = _labels(data.features)
        for table in data.with_format("arrow").iter(_ROWS_AT_ONCE):
            yield table, labels
        return
    import pyarrow as pa
    import pyarrow.parquet as pq

    check_regular(Path(path))
    with Path(path).open("rb") as file:
        # Opened here, as libraries read names with *, ? or [ as those of several files.
        if Path(path).suffix.lower() == ".parquet":
            batches = pq.ParquetFile(file).iter_batches(_ROWS_AT_ONCE)
        elif file.peek(6).startswith(b"ARROW1"):
            reader = pa.ipc.open_file(file)
            batches = map(reader.get_batch, range(reader.num_record_batches))
        else:
            batches = iter(pa.ipc.open_stream(file))
        for batch in batches:
            table = pa.Table.from_batches([batch])
            labels = {}
            if b"huggingface" in (table.schema.metadata or {}):
                import datasets

                labels = _labels(datasets.Features.from_arrow_schema(table.schema).flatten())
            while any(pa.types.is_struct(field.type) for field in table.schema):
                table = table.flatten()
            names = Counter(table.column_names)
            if twice := [name for name, count in names.items() if count > 1]:
                expected, fix = "a name of its own for each column", "Rename or delete one."
                refuse_row(f"{path}:1", f"the column {twice[0]!r} twice", expected, fix)
            yield table, labels


def _labels(features: Any) -> dict[str, list[str]]:
    known = features.items()
    return {name: kind.names for name, kind in known if type(kind).__name__ == "ClassLabel"}


def _values(path: str | Path, table: Any, before: int) -> Iterator[dict[str, Any]]:
    """The rows of a table; bytes as the text that they are in UTF-8, if they are."""
    for first in range(0, len(table), _ROWS_AT_ONCE):
        part = table.slice(first, _ROWS_AT_ONCE)
        try:
            rows = part.to_pylist()
        except Exception:  # of texts, times and numbers that Python does not know
            for row in range(len(part)):
                where = f"{path}:{before + first + row + 1}"
                for name in part.column_names:
                    try:
                        part[name].slice(row, 1).to_pylist()
                    except UnicodeDecodeError as error:
                        got = f"a string that is not UTF-8 in column {name!r} ({error})"
                        refuse_row(where, got, "texts", "Convert it to UTF-8.")
                    except Exception as error:
                        got = f"a {part[name].type} in column {name!r} that cannot be read"
                        got += f" ({first_line(error):.200})"
                        refuse_row(where, got, "a value", "Correct the file.")
            raise
        for values in rows:
            for name, value in values.items():
                if isinstance(value, bytes):
                    with contextlib.suppress(UnicodeDecodeError):
                        values[name] = value.decode()
            yield values


def _of_hub(path: str) -> Any:
    """The data set of a name, without columns in columns."""
    import datasets

    name, _, split = path.removeprefix(HUB).partition(":")
    owner, *others = name.split("/")
    ways: list[tuple[str, str | None]] = [(name, None)]
    if len(others) > 1:
        ways = [(f"{owner}/{others[0]}", "/".join(others[1:]))]
    elif others:  # "glue/sst2": an owner and a name, or an old name and its configuration
        ways.append((owner, others[0]))
    for way in ways:
        with contextlib.suppress(Exception):
            return datasets.load_dataset(*way, split=split or "train").flatten()
    return datasets.load_dataset(*ways[0], split=split or "train").flatten()


@contextlib.contextmanager
def _quietly(path: str) -> Iterator[None]:
    """Errors of ``datasets`` and ``pyarrow`` in one line."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:  # of their own, of HTTP and the system
        fix = "Check the name, the split and the network, or download it first."
        refuse(path, f"which datasets cannot read ({first_line(error):.200})", fix, _EXPECTED)
