"""Reads labelled examples from files: tables, tagged words, SQuAD's JSON and multiple choice."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from fastplm.data._files import lines_of
from fastplm.data._folder import say
from fastplm.data.sources import (
    check_is_text,
    is_arrow,
    is_missing,
    json_of,
    rows_of,
    texts_of,
)
from fastplm.data.sources import refuse_row as _refuse
from fastplm.errors import check

_WHERE = "examples"
_T = TypeVar("_T")
_LABELS = ("label", "labels", "class", "score", "sentiment", "quality", "gold_label")
_TEXTS = ("text", "sentence", "review", "content")
_SOURCES = (
    ("source", "target"),
    ("src", "tgt"),
    ("input", "output"),
    ("document", "summary"),
    ("article", "highlights"),
    ("article", "summary"),
    ("text", "summary"),
)
_PAIRS = (
    ("sentence1", "sentence2"),
    ("text1", "text2"),
    ("text_a", "text_b"),
    ("question1", "question2"),
    ("premise", "hypothesis"),
    ("question", "sentence"),
    ("#1 string", "#2 string"),
)
_USUAL: dict[int, Sequence[tuple[str, ...]]] = {1: [(name,) for name in _TEXTS], 2: _PAIRS}


@dataclass(frozen=True)
class Example:
    """One labelled example.

    Args:
        texts: (text,), (first, second), the words, (question, context) or (question, *choices).
        target: the label; one tag for each word; ((start, text), ...) of the answers, empty for a
            question without one; the index of the right choice; the target text.
        group: examples of one group stay together when some examples are held out.
        where: for messages: the file and the line or the question's id.
        place: the line (for tagged words the first line of the sentence), the question's id, or
            of running text the document and the pair in it.
        others: further right target texts, which are judged by and not trained on.
        part, prefix: in a mixture of tasks, the name of its task and what it has before a source.
    """

    texts: tuple[str, ...]
    target: Any
    group: int
    where: str
    place: int | str = 0
    others: tuple[str, ...] = ()
    part: str = ""
    prefix: str = ""


def read_table(
    path: str | Path,
    text_columns: Sequence[str] | None = None,
    label_column: str | None = None,
    counts: Sequence[int] = (1,),
) -> list[Example]:
    """One example for each row: its texts and its label.

    Args:
        path: JSON lines, or a header and rows, separated by tabs (without quotes) or commas, in a
            UTF-8 file, with or without byte order mark; or a .parquet or .arrow file, or a data set
            of the Hugging Face Hub (``data.sources``).
        text_columns, label_column: names of columns. Default: the first usual names that the table
            has.
        counts: how many texts an example may have, the usual number first.

    Raises:
        DataError: the file is wrong; the message names the line. So in the functions below.
    """
    path = Path(path)
    return _some(path, _rows(path, rows_of(path), counts, text_columns, label_column))


def read_sources(
    path: str | Path,
    text_columns: Sequence[str] | None = None,
    targets: str | Path | Sequence[str | Path] | None = None,
) -> list[Example]:
    """Sources and their targets: a table with a column of each, or files with one in each line.

    Args:
        path: a table, as ``read_table`` reads it; with ``targets`` a file of sources.
        text_columns: those of sources and targets. A list of texts is several right targets.
        targets: a file of targets; several files hold several right targets of each source. All may
            be compressed.
    """
    path = Path(path)
    if targets is not None:
        files = [targets] if isinstance(targets, str | Path) else targets
        return list(_aligned(path, [Path(file) for file in files]))
    rows = list(rows_of(path))
    source, target = _source_and_target(path, rows, text_columns)
    return _some(path, _rows(path, rows, (1,), (source,), target, of_texts=True))


def read_tagged(path: str | Path) -> list[Example]:
    """Sentences of words with tags: lines token<TAB>tag, with a blank line between sentences."""
    return _some(Path(path), _sentences(Path(path), _read(Path(path))))


def read_questions(path: str | Path) -> list[Example]:
    """Questions about paragraphs, in the JSON of SQuAD 1.1 or 2.0."""
    return _some(Path(path), _questions(Path(path), _read(Path(path))))


def read_choices(path: str | Path) -> list[Example]:
    """Questions with several answers, one of them right, in JSON lines."""
    return _some(Path(path), _choices(Path(path)))


def _some(path: Path, found: Iterator[Example]) -> list[Example]:
    examples = list(found)
    if not examples:
        _refuse(str(path), "nothing", "one example at least")
    return examples


def subset(examples: list[_T], count: int | None) -> list[_T]:
    """``count`` random examples, the same ones every time; None = all."""
    if count is None or count >= len(examples):
        return examples
    order = torch.randperm(len(examples), generator=torch.Generator().manual_seed(0), device="cpu")
    return [examples[index] for index in sorted(order[:count].tolist())]


# --- tables ---------------------------------------------------------------------------------------


def _rows(
    path: Path,
    rows: Iterable[tuple[int, dict[str, Any]]],
    counts: Sequence[int],
    text_columns: Sequence[str] | None,
    label_column: str | None,
    *,
    of_texts: bool = False,
) -> Iterator[Example]:
    """The rows of a table; ``of_texts`` says that the labels are texts, too, perhaps several."""
    columns: list[str] = []
    for group, (line, row) in enumerate(rows):
        if not columns:
            columns = _columns(path, list(row), counts, text_columns, label_column)
        where, last = f"{path}:{line}", len(columns) - 1
        others: tuple[str, ...] = ()
        if of_texts and isinstance(row.get(columns[-1]), list):
            row, others = _several_targets(where, columns[-1], row)
        *texts, label = (
            _value(where, column, row.get(column), is_text=of_texts or number < last)
            for number, column in enumerate(columns)
        )
        yield Example(tuple(texts), label, group, where, line, others)


def _several_targets(
    where: str, column: str, row: dict[str, Any]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The row with the first of its right targets, and the other ones."""
    targets = row[column]
    if not targets:
        _refuse(where, f"an empty list in column {column!r}", "one target at least")
    first, *others = (_value(where, column, each, is_text=True) for each in targets)
    return {**row, column: first}, tuple(others)


def _value(where: str, column: str, value: Any, *, is_text: bool) -> str:
    """The text or label in a column. A value of another type is an error."""
    if is_missing(value):
        _refuse(where, f"nothing in column {column!r}", "a value in each row")
    if is_text or isinstance(value, bytes):
        check_is_text(where, column, value)
    elif isinstance(value, (list, dict)):
        got = f"a {type(value).__name__} in column {column!r}"
        fix = "Make one value of it, or name another column."
        _refuse(where, got, "a name or a number", fix)
    return str(value).strip()


def _columns(
    path: Path,
    names: list[str],
    counts: Sequence[int],
    text_columns: Sequence[str] | None,
    label_column: str | None,
) -> list[str]:
    """The names of the text columns, followed by that of the label column."""
    either = f"{' or '.join(map(str, counts))} column{'' if counts == (1,) else 's'}"
    if text_columns is None:
        usual = [group for count in counts for group in _USUAL[count]]
        text_columns = _usual(path, names, usual, f"{either} of texts", "--text-columns")
    if label_column is None:
        usual = [(name,) for name in _LABELS]
        (label_column,) = _usual(path, names, usual, "a column of labels", "--label-column")
    for name in (*text_columns, label_column):
        if name not in names:
            _refuse(f"{path}:1", f"columns {names}", f"one named {name!r}")
    fits, fix = len(text_columns) in counts, "Choose the task with that number of texts."
    check(fits, _WHERE, "text_columns", list(text_columns), either, fix)
    for argument, same, got in (
        ("label_column", label_column in text_columns, f"{label_column!r}, a column of texts, too"),
        ("text_columns", len({*text_columns}) < len(text_columns), f"{list(text_columns)}"),
    ):
        expected = "another column for each text and for the label"
        fix = f"Name others of the columns {names} with --text-columns and --label-column."
        check(not same, _WHERE, argument, f"{got} ({path}:1)", expected, fix)
    return [*text_columns, label_column]


def _usual(
    path: Path, names: list[str], groups: Sequence[tuple[str, ...]], expected: str, option: str
) -> list[str]:
    """The columns of the first group whose names the table has, ignoring case and spaces."""
    lower = [name.strip().lower() for name in names]
    found = next((group for group in groups if {*group} <= {*lower}), None)
    if found is None:
        got = f"columns {names}" if names else "nothing"
        known = " | ".join(" and ".join(group) for group in groups)
        _refuse(f"{path}:1", got, f"{expected}: {known}", f"Name {option}.")
    columns = []
    for usual in found:
        same = [name for name, known in zip(names, lower, strict=True) if known == usual]
        if len(same) > 1:
            got = f"the columns {same}, which differ only in case or spaces"
            _refuse(f"{path}:1", got, f"one column {usual!r}", f"Rename one, or name {option}.")
        columns += same
    return columns


# --- sources and targets --------------------------------------------------------------------------


def _source_and_target(
    path: Path, rows: Sequence[tuple[int, dict[str, Any]]], columns: Sequence[str] | None
) -> tuple[str, str]:
    """The columns of sources and targets."""
    if columns is not None:
        expected = "two: that of the sources and that of the targets"
        fits = len(columns) == 2 and columns[0] != columns[1]
        check(fits, _WHERE, "text_columns", list(columns), expected, "Name two.")
        return columns[0], columns[1]
    row = rows[0][1] if rows else {}
    expected = "one of sources and one of targets"
    source, target = _usual(path, list(row), _SOURCES, expected, "--text-columns")
    return source, target


def _aligned(path: Path, targets: list[Path]) -> Iterator[Example]:
    """One example for each line of the files: a source and its targets."""
    files = [path, *targets]
    each = ((text or "" for _, text in texts_of(file)) for file in files)
    for line, texts in enumerate(itertools.zip_longest(*each), 1):
        for file, text in zip(files, texts, strict=True):
            if text is None or not text.strip():
                got = "no such line" if text is None else "an empty line"
                expected = f"as many lines as {' and '.join(map(str, files))} have texts"
                _refuse(f"{file}:{line}", got, expected)
        source, target, *others = (text.strip() for text in texts)
        yield Example((source,), target, line, f"{path}:{line}", line, tuple(others))


# --- sentences of tagged words --------------------------------------------------------------------


def _sentences(path: Path, text: str) -> Iterator[Example]:
    words: list[str] = []
    tags: list[str] = []
    group, first = 0, 1
    for line, content in enumerate([*text.split("\n"), ""], 1):
        content = content.rstrip("\r")
        if content.strip():
            parts = content.split("\t")
            if len(parts) != 2 or not all(part.strip() for part in parts):
                _refuse(f"{path}:{line}", repr(content[:60]), "token<TAB>tag or a blank line")
            if not words:
                first = line
            words.append(parts[0])
            tags.append(parts[1].strip())
        elif words:
            yield Example(tuple(words), tuple(tags), group, f"{path}:{first}", first)
            group, words, tags = group + 1, [], []


# --- questions about paragraphs -------------------------------------------------------------------


def _questions(path: Path, text: str) -> Iterator[Example]:
    content = json_of(path, text)
    where = str(path)
    group = 0
    known: dict[str, tuple[str, Example]] = {}
    again: list[str] = []
    for i, article in enumerate(_listed(where, content, "data")):
        for j, paragraph in enumerate(_listed(where, article, "paragraphs")):
            context = _named(where, paragraph, "context", str)
            for k, question in enumerate(_listed(where, paragraph, "qas")):
                place = f"data[{i}].paragraphs[{j}].qas[{k}]"
                identity = _named(where, question, "id", str)
                name = f"{path}, question {identity}"
                answers = tuple(_answers(name, context, question))
                if bool(answers) == (question.get("is_impossible") is True):
                    said = "'is_impossible'" if answers else "no 'is_impossible' that is true"
                    got = f"{len(answers)} answers and {said}"
                    _refuse(name, got, "one of the two, as in SQuAD 2.0")
                texts = (_named(name, question, "question", str).strip(), context)
                example = Example(texts, answers, group, name, identity)
                first, other = known.setdefault(identity, (place, example))
                if other is example:
                    yield example
                elif (other.texts, other.target) == (texts, answers):
                    again.append(f"{identity!r} ({first} and {place})")
                else:
                    got = f"the id {identity!r} of two different questions, {first} and {place}"
                    fix = "Give each an id of its own: by it, predictions are told apart."
                    _refuse(where, got, "an id for each question", fix)
            group += 1
    if again:
        say(
            f"{path}: {len(again):,} questions are there twice, with the same id, context and "
            f"answers, such as {again[0]}. Each of them is read once."
        )


def _answers(where: str, context: str, question: dict) -> Iterator[tuple[int, str]]:
    for answer in _listed(where, question, "answers"):
        words = _named(where, answer, "text", str)
        start = _named(where, answer, "answer_start", int)
        if not words or context[start : start + len(words)] != words or start < 0:
            got = f"the answer {words[:60]!r}, which does not stand at character {start}"
            _refuse(where, got, "answers as they stand in the context")
        yield start, words


def _listed(where: str, value: Any, name: str) -> list[Any]:
    return _named(where, value, name, list)


def _named(where: str, value: Any, name: str, kind: type) -> Any:
    found = value.get(name) if isinstance(value, dict) else None
    if not isinstance(found, kind) or (kind is int and isinstance(found, bool)):
        what = f"{name!r} that is no {kind.__name__}"
        if not isinstance(value, dict):
            what = f"a {type(value).__name__} where an object with {name!r} belongs"
        elif name not in value:
            what = f"an object without {name!r}"
        _refuse(where, what, "the format in docs/finetuning.md")
    return found


# --- multiple choice ------------------------------------------------------------------------------


def _choices(path: Path) -> Iterator[Example]:
    count = 0
    for group, (line, row) in enumerate(rows_of(path)):
        where = f"{path}:{line}"
        inner = row.get("question")
        nested = isinstance(inner, dict)
        question = _named(where, inner if nested else row, "stem" if nested else "question", str)
        given = _listed(where, inner if nested else row, "choices")
        names: list[Any] = list(range(len(given)))
        if nested:
            names = [_named(where, choice, "label", str) for choice in given]
            given = [_named(where, choice, "text", str) for choice in given]
            twice = [name for name, n in Counter(names).items() if n > 1]
            if twice:
                _refuse(where, f"two choices labelled {twice[0]!r}", "a label for each choice")
        if not all(isinstance(choice, str) for choice in given) or len(given) < 2:
            _refuse(where, "'choices' that are no texts", "two texts or more")
        answer = row.get("answerKey" if nested else "answer")
        if isinstance(answer, bool) or answer not in names:
            _refuse(where, f"the answer {answer!r}", f"one of {names}")
        count = count or len(given)
        if len(given) != count:
            _refuse(where, f"{len(given)} choices", f"{count}, as in the first line")
        texts = (question.strip(), *(choice.strip() for choice in given))
        yield Example(texts, names.index(answer), group, where, line)


# --- files ----------------------------------------------------------------------------------------


def _read(path: Path) -> str:
    if is_arrow(path):
        _refuse(str(path), "a table", "a file of text, as this task has no table")
    return "".join(lines_of(path))
