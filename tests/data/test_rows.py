"""Nothing is lost: each row of each kind of table is read, refused by its line, or counted.

The tables are every kind of value in every form of file, and are read as each command reads them.
"""

from __future__ import annotations

import ast
import bz2
import csv
import gzip
import io
import json
import lzma
import re
from pathlib import Path

import pytest

import fastplm
from fastplm.data.corpus import read_documents
from fastplm.data.examples import read_choices, read_sources, read_table
from fastplm.data.minimal_pairs import read_pairs
from fastplm.data.sources import texts_of
from fastplm.distill.data import parallel_lines
from fastplm.errors import DataError
from fastplm.inference.score_command import read_lines
from fastplm.inference.score_settings import ScoreArguments

pa = pytest.importorskip("pyarrow", reason="pyarrow not installed: pip install datasets")
pq = pytest.importorskip("pyarrow.parquet")
pf = pytest.importorskip("pyarrow.feather")

TEXTS = ["a b", "é c", "d e", "f g"]


# --- kinds of tables ------------------------------------------------------------------------------


def second(value, **others):
    """Four rows, of which the second one has another value, and perhaps other columns."""
    rows = [{"text": text} for text in TEXTS]
    rows[1] = {"text": value, **others} if value is not ... else others
    return rows


#: The rows, and what becomes of the second one: its text, 0 = counted as left out, "" = refused.
KINDS = {
    "texts": (second(TEXTS[1]), TEXTS[1]),
    "null": (second(None), 0),
    "not a number": (second(float("nan")), 0),
    "blank": (second("  "), 0),
    "the other column": (second(..., content="in content"), "in content"),
    "both columns": (second(None, content="in content"), "in content"),
    "both and other text": (second("in text", content="in content"), "in text"),
    "another column": (second(..., body="elsewhere"), ""),
    "a number": (second(5), ""),
    "a truth": (second(True), ""),
    "a list": (second(["a", "b"]), ""),
    "an object": (second({"a": "b"}), ""),
}
#: Lines of JSON in place of the second one, all of which are refused.
LINES = {
    "deep": '{"text": ' + "[" * 100_000 + "]" * 100_000 + "}",
    "half a pair": '{"text": "a\\ud800"}',
    "half a name": '{"text": "a", "\\udc00": 1}',
    "twice": '{"text": "a", "text": "b"}',
    "cut": '{"text": "a',
    "two objects": '{"text": "a"} {"text": "b"}',
    "no object": '"a"',
    "a long number": '{"text": ' + "1" * 5000 + "}",
}


def json_lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def separated(rows, delimiter=","):
    """Only of texts and nothing: a table has no other values."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    file = io.StringIO()
    writer = csv.DictWriter(file, [*names, "n"], delimiter=delimiter, lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({name: "" if row.get(name) is None else row[name] for name in names})
    return file.getvalue().encode()


def arrow_table(rows, kind=None):
    names = list(dict.fromkeys(name for row in rows for name in row))
    return pa.table({name: pa.array([row.get(name) for row in rows], kind) for name in names})


def stream(rows, make=pa.ipc.new_stream, kind=None):
    table, file = arrow_table(rows, kind), io.BytesIO()
    with make(file, table.schema) as writer:
        for batch in table.to_batches(max_chunksize=3):
            writer.write_batch(batch)
    return file.getvalue()


def parquet(rows, kind=None):
    file = io.BytesIO()
    pq.write_table(arrow_table(rows, kind), file, row_group_size=3)
    return file.getvalue()


def feather(rows):
    file = io.BytesIO()
    pf.write_feather(arrow_table(rows), file)
    return file.getvalue()


#: How each form is written, and how far its first row is from its first line.
FORMS = {
    ".jsonl": (json_lines, 0),
    ".ndjson": (lambda rows: b"\n".join(json_lines(rows).splitlines()), 0),
    ".JSONL": (json_lines, 0),
    ".json": (lambda rows: json.dumps(rows, indent=1).encode(), 0),
    ".csv": (separated, 1),
    ".tsv": (lambda rows: separated(rows, "\t"), 1),
    ".parquet": (parquet, 0),
    ".PARQUET": (parquet, 0),
    ".arrow": (stream, 0),
    ".file.arrow": (lambda rows: stream(rows, pa.ipc.new_file), 0),
    ".feather": (feather, 0),
}


# --- as the commands read them --------------------------------------------------------------------


def documents(path, **options):
    return list(read_documents([path], **options))


def lines_to_score(path):
    return [line.text for line in read_lines(ScoreArguments(model="none", data=path), paired=False)]


def beside(path):
    """As of ``distill --translation`` and of targets: each row has a partner in another file."""
    other = Path(path).parent / "other.txt"
    other.write_text("x\n" * len(TEXTS))
    return parallel_lines([path], [other])[0]


#: What reads the texts of a command.
READERS = {
    "pretrain, distill, classic, study, sop and nsp": documents,
    "the same with a cache": lambda path: documents(path, cache=Path(path).parent / "cache"),
    "embed": lambda path: [text or "" for _, text in texts_of(path)],
    "score": lines_to_score,
    "distill --translation": beside,
}


def outcome(read, path, capsys):
    """(texts, None), or (None, the error), after a check that it is one line."""
    capsys.readouterr()
    try:
        return read(path), None
    except DataError as error:
        assert "\n" not in str(error) and "; expected " in str(error) and str(path) in str(error)
        return None, str(error)


def held(read, path, becomes, line, capsys):
    """Check what becomes of the second row, on ``line`` of a file."""
    found, error = outcome(read, path, capsys)
    if becomes == "":
        assert found is None and re.search(rf"{re.escape(str(path))}:{line}\b", error), (
            found,
            error,
        )
        return
    assert error is None, error
    said = capsys.readouterr().err
    expected = [*TEXTS]
    expected[1:2] = [] if becomes == 0 else [becomes]
    if becomes == 0 and len(found) == len(TEXTS):  # embed has a vector for it
        assert not found[1].strip()
        del found[1]
    elif becomes == 0:
        assert re.search(r"\b1\b", said) and said.count("\n") == 1, said
    assert found == expected


CASES = [(kind, form) for kind in KINDS for form in FORMS]


@pytest.mark.parametrize("kind, form", CASES)
def test_each_row_is_read_refused_or_counted(kind, form, tmp_path, capsys):
    rows, becomes = KINDS[kind]
    write, before = FORMS[form]
    path, line = tmp_path / f"train[0-9]{form}", 2 + before
    if before:
        values = [value for row in rows for value in row.values()]
        if not all(value is None or isinstance(value, str) for value in values):
            pytest.skip("all values are texts")
        becomes = 0 if becomes == "" else becomes  # all rows have all columns
    try:
        path.write_bytes(write(rows))
    except (pa.ArrowException, TypeError):
        pytest.skip("a column has one type")
    if form.endswith(("arrow", "feather", "parquet", "PARQUET")) and kind == "another column":
        becomes = 0  # all rows have all columns
    # What a library that takes the name for a pattern would read.
    (tmp_path / f"train1{form}").write_bytes(write([{"text": "of another file"}]))
    for read in READERS.values():
        held(read, path, becomes, line, capsys)


@pytest.mark.parametrize("name", LINES)
def test_lines_that_are_no_row_are_refused_by_their_line(name, tmp_path, capsys):
    path = tmp_path / "train.jsonl"
    lines = json_lines(second(TEXTS[1])).decode().splitlines()
    path.write_text("\n".join([lines[0], LINES[name], *lines[2:]]))
    for read in READERS.values():
        held(read, path, "", 2, capsys)
    path.write_text(f"\n{LINES[name]}\n" if LINES[name].startswith("{") else f"{{}}\n{LINES[name]}")
    for read in (read_table, read_sources, read_choices, read_pairs):
        found, error = outcome(read, path, capsys)
        assert found is None and re.search(rf"{re.escape(str(path))}:[12]\b", error)


#: Arrow's types of texts, all of which are read; and of others, which are refused.
OF_TEXTS = {
    **{name: getattr(pa, name)() for name in ("string", "large_string", "string_view")},
    **{name: getattr(pa, name)() for name in ("binary", "large_binary", "binary_view")},
    "dictionary": pa.dictionary(pa.int8(), pa.string()),
}
OTHERS = {
    "number": (pa.int64(), 7),
    "fraction": (pa.float32(), 0.5),
    "truth": (pa.bool_(), True),
    "time": (pa.timestamp("s"), 0),
    "list": (pa.list_(pa.string()), ["a"]),
    "bytes": (pa.binary(), b"\xff"),
}


@pytest.mark.parametrize("form", [".parquet", ".arrow"])
def test_types_of_arrow(form, tmp_path, capsys):
    path, write = tmp_path / f"train*{form}", FORMS[form][0]
    for name, kind in OF_TEXTS.items():
        rows = [{"text": text.encode() if "binary" in name else text} for text in TEXTS]
        path.write_bytes(write(rows, kind=kind))
        for read in READERS.values():
            held(read, path, TEXTS[1], 2, capsys)
    for kind, value in OTHERS.values():
        path.write_bytes(write([{"text": None}, {"text": value}], kind=kind))
        for read in READERS.values():
            held(read, path, "", 2, capsys)
        table = [{"text": b"a", "label": b"0"}, {"text": b"a", "label": b"\xff"}]
        path.write_bytes(write(table, kind=pa.binary()))
        held(read_table, path, "", 2, capsys)
    wrong = pa.array([b"a", b"\xff"]).view(pa.string())  # Arrow does not look
    with pa.ipc.new_stream(path, pa.schema([("text", pa.string())])) as writer:
        writer.write_table(pa.table({"text": wrong}))
    if form == ".arrow":
        held(documents, path, "", 2, capsys)


def test_columns_of_arrow(tmp_path, capsys):
    """A column in a column has both names; two of one name are refused; no row is no text."""
    path = tmp_path / "train.parquet"
    inner = pa.array([{"text": text} for text in TEXTS])
    pq.write_table(pa.table({"a": inner, "n": pa.array(range(4))}), path)
    assert documents(path) == TEXTS
    pq.write_table(pa.table([pa.array(TEXTS)] * 2, ["text", "text"]), path)
    held(documents, path, "", 1, capsys)
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), path)
    with pytest.raises(DataError, match="a table without a text"):
        documents(path)


@pytest.mark.parametrize("form", [".jsonl", ".json", ".csv", ".tsv"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "latin-1"])
def test_encodings_and_packed_files(form, encoding, tmp_path, capsys):
    rows = [{"text": text} for text in TEXTS]
    write = FORMS[form][0]
    if form in (".jsonl", ".json"):

        def write(rows):
            lines = [json.dumps(row, ensure_ascii=False) for row in rows]
            return ("\n".join(lines) if form == ".jsonl" else f"[{','.join(lines)}]").encode()

    data = write(rows).decode().encode(encoding)
    for suffix, pack in (("", bytes), (".gz", gzip.compress), (".xz", lzma.compress)):
        path = tmp_path / f"train{form}{suffix}"
        path.write_bytes(pack(data))
        for read in READERS.values():
            found, error = outcome(read, path, capsys)
            if encoding == "latin-1":
                assert re.search(r"not UTF-8: byte 0xe9 in line \d", error)
            else:
                assert found == TEXTS, error
    path = tmp_path / f"train{form}.bz2"
    path.write_bytes(bz2.compress(data)[:-4])
    assert "a compressed file that ends too early" in outcome(documents, path, capsys)[1]


def test_packed_tables_and_others_names_are_refused(tmp_path, capsys):
    data = parquet(second(TEXTS[1]))
    for name, content in (
        ("train.parquet.gz", gzip.compress(data)),
        ("train", data),
        ("train.ipc", stream(second(TEXTS[1]), pa.ipc.new_file)),
        ("empty.arrow", b""),
        ("text.parquet", b"a b"),
    ):
        path = tmp_path / name
        path.write_bytes(content)
        for read in (*READERS.values(), read_table):
            assert outcome(read, path, capsys)[1]


def test_what_a_folder_leaves_out_is_said(tmp_path, capsys):
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.txt").write_text("a\n")
    (folder / "b.jsonl").write_text('{"text": "b"}\n')
    (folder / ".hidden").write_text("c")
    assert documents(folder) == ["a"]
    said = capsys.readouterr().err
    assert "1 files that are no .txt are left out, such as" in said and "b.jsonl" in said
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list([{"text": "a"}]).save_to_disk(tmp_path / "saved")
    with pytest.raises(DataError, match="0 .txt files.*Name its files"):
        documents(tmp_path / "saved")
    (file,) = (tmp_path / "saved").glob("*.arrow")
    assert documents(file) == ["a"]


def test_a_cache_says_again_what_is_left_out(tmp_path, capsys):
    path = tmp_path / "train.jsonl"
    path.write_bytes(json_lines(second(None)))
    for _ in range(2):
        assert len(documents(path, cache=tmp_path / "cache")) == 3
        assert "1 of 4 rows have no text and are left out, the first of them at 2." in (
            capsys.readouterr().err
        )


def test_all_commands_read_through_one_reader():
    """Lines of a file are read by ``sources``, by ``corpus`` and ``examples`` for text that is no
    table, and for the numbers of a baseline."""
    root = Path(fastplm.__file__).parent
    users = set()
    for file in root.rglob("*.py"):
        tree = ast.parse(file.read_text("utf-8"))
        names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        if names & {"lines_of", "parquet", "load_dataset"}:
            users.add(file.relative_to(root).as_posix())
    known = {"sources", "corpus", "examples", "_files"}
    assert users - {"inference/bertscore.py"} <= {f"data/{name}.py" for name in known}


@pytest.mark.parametrize(
    ("kind", "values"),
    {
        "date32": [0, 2**30, 1],
        "duration": [0, 2**62, 1],
        "string": [b"a", b"\xff", b"b"],
    }.items(),
)
@pytest.mark.parametrize("ending", [".parquet", ".arrow"])
def test_a_value_that_python_cannot_hold_is_refused_with_its_row_and_column(
    kind, values, ending, tmp_path
):
    if kind == "string":  # made of bytes that are none
        whole = pa.array(values, pa.binary())
        column = pa.Array.from_buffers(pa.string(), len(values), whole.buffers())
    else:
        column = pa.array(values, pa.duration("s") if kind == "duration" else pa.date32())
    table = pa.table({"text": ["a", "b", "c"], "other": column})
    path = tmp_path / f"table{ending}"
    if ending == ".parquet":
        pq.write_table(table, path)
    else:
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)
    with pytest.raises(DataError, match=rf"table{re.escape(ending)}:2: .* in column 'other'"):
        list(texts_of(path))
