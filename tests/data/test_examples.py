"""Files of labelled examples: tables, tagged words, questions, choices, sources and targets."""

from __future__ import annotations

import functools
import gzip
import json
import os
import re
from pathlib import Path

import pytest

from fastplm.data.examples import (
    read_choices,
    read_questions,
    read_sources,
    read_table,
    read_tagged,
)
from fastplm.errors import ArgumentValueError, DataError

from ..finetune.conftest import COUNT, qa

pairs = functools.partial(read_table, counts=(2,))
scored = functools.partial(read_table, counts=(2, 1))
#: For each reader: what a file holds, and what the error says.
MALFORMED = {
    read_table: [
        ("nothing but text\nmore", r":1: 'nothing but text'"),
        ("text\tlabel\nfine\t1\nnot fine\n", r":3: 1 columns; expected 2"),
        ("text\tlabel\nfine\t1\nwell\t\n", r":3: nothing in column 'lab"),
        ('text,label\na,b\n"c"d,e\n', r":3: "),
        ('{"text": "a", "label": 1}\n{"text": \n', r":2: no JSON"),
        ('{"text": "a\\ud800", "label": 1}\n', r":1: half of a surr"),
        ('{"text": "a", "label": 1}\n3\n', r":2: a int"),
        ("text\tlabel\n\n", "nothing; expected one example"),
        ("text,label,Note,label\na,x,y,z\n", r":1: the column 'label' 2 times \(2, 4\)"),
        ("Text\ttext\tlabel\na\tb\tc\n", r"columns \['Text', 'text'\]"),
        (
            '{"text": "a", "label": 1}\n{"text": ["a", "b"], "label": 2}\n',
            r":2: a list in column 'text'; expected a text",
        ),
        ('{"text": {"a": 1}, "label": 1}', r":1: a dict in column"),
        ('{"text": 3, "label": 1}', r":1: the int 3 .*quotation"),
        ('{"text": "a", "label": [1]}', r":1: a list in column 'la"),
        ('{"text": "a", "label": NaN}', r":1: nothing in column 'label"),
        ('{"text": "a", "label": 1' + "0" * 5000, ":1: JSON that cannot"),
        ("text,label\na,x\nb\rc,y\n", ":3: a carriage return inside a value"),
    ],
    pairs: [
        ("a,b,c\n1,2,3\n", r":1: columns \['a', 'b', 'c'\].*--text-columns"),
        ("text,label\na,b\n", "2 columns of texts: sentence1 and sentence2"),
        ('{"text1": "a", "text2": true, "label": 1}', r":1: the bool True"),
    ],
    read_questions: [
        (
            qa().replace('"0 1"', '"0 0"'),
            r"the id '0 0' of two different questions, data\[0\].paragraphs\[0\].qas\[0\] and "
            r"data\[0\].paragraphs\[0\].qas\[1\]",
        ),
        ('{"data": [\n{]}', r":2: no JSON"),
        ("{}", "an object without 'data'"),
        ('{"data": [3]}', "a int where an object with 'paragraphs'"),
        (re.sub(r'"answers": \[[^]]*\]', '"answers": []', qa()), "0 answers and no"),
        (
            qa().replace('"question":', '"is_impossible": true, "question":'),
            "1 answers and 'is_impossible'",
        ),
        (
            re.sub(r'"answer_start": \d+', '"answer_start": true', qa()),
            "'answer_start' that is no int",
        ),
        (qa().replace('"answer_start": 4', '"answer_start": 5'), "character 5"),
    ],
    scored: [
        ("a\tlabel\na\t.5\n", "2 or 1 columns of texts"),
    ],
    read_tagged: [
        ("a\tX\n\nb\tY\nword\n", r":4: 'word'"),
        ("a\tX\n\nb\tY\nc\tX\tY\n", r":4: "),
    ],
    read_choices: [
        (
            '{"question": {"stem": "a", "choices": [{"label": "A", "text": "b"}, '
            '{"label": "A", "text": "c"}]}, "answerKey": "A"}',
            r":1: two choices labelled 'A'",
        ),
        ('{"question": "a", "choices": ["b", "c"], "answer": 2}', r":1: .*answer 2"),
        (
            '{"question": "a", "choices": ["b", "c"], "answer": 0}\n'
            '{"question": "a", "choices": ["b", "c", "d"], "answer": 0}',
            r":2: 3 choices; expected 2",
        ),
    ],
}


@pytest.mark.parametrize(
    "read, content, expected", [(read, *each) for read in MALFORMED for each in MALFORMED[read]]
)
def test_malformed_files(read, content, expected, tmp_path):
    path = tmp_path / "broken.txt"
    path.write_text(content)
    with pytest.raises(DataError, match=expected) as raised:
        read(path)
    assert str(path) in str(raised.value)


def test_fields_of_any_length_and_letters_beyond_the_first_plane(tmp_path):
    path = tmp_path / "long.csv"
    path.write_text("text,label\n" + "a" * 200_000 + ",x\nb,y\n")
    assert len(read_table(path)[0].texts[0]) == 200_000
    path.write_text('{"text": "\\ud83d\\ude00", "label": "x"}\n{"text": "b", "label": "y"}\n')
    assert read_table(path)[0].texts == ("\U0001f600",)


def test_unreadable_files(tmp_path):
    path = tmp_path / "latin.tsv"
    with pytest.raises(DataError, match="does not exist"):
        read_tagged(path)
    path.write_bytes(b"text\tlabel\nfine\t1\ncaf\xe9\t0\n")
    with pytest.raises(DataError, match="latin.tsv, which is not UTF-8: byte 0xe9 in line 3"):
        read_table(path)


def test_columns_are_different(tmp_path):
    path = tmp_path / "data.tsv"
    path.write_text("text\tlabel\tother\na\t1\tb\n")
    with pytest.raises(ArgumentValueError, match=r"`label_column` got 'text', .*data.tsv:1\)"):
        read_table(path, ["text"], "text")
    with pytest.raises(ArgumentValueError, match=r"`text_columns` got \['text', 'text'\]"):
        pairs(path, ["text", "text"], "label")
    with pytest.raises(ArgumentValueError, match=r"`text_columns` got \['text', 'text'\]"):
        read_sources(path, ["text", "text"])
    # Columns without a name are common, and are not read.
    path.write_text("text,label,,\na,1,,\n")
    assert read_table(path)[0].texts == ("a",)
    path.write_text('{"source": "a", "target": 3}')
    with pytest.raises(DataError, match=r"data.tsv:1: the int 3 in column 'target'"):
        read_sources(path)


def test_a_carriage_return_ends_a_line_only_where_no_other_does(tmp_path):
    path = tmp_path / "data.tsv"
    path.write_bytes(b"text\tlabel\na\rb\t1\r\nc\t2\n")
    assert [e.texts for e in read_table(path)] == [("a\rb",), ("c",)]
    path.write_bytes(b"text\tlabel\ra\t1\rc\t2\r")
    assert [e.texts for e in read_table(path)] == [("a",), ("c",)]


def test_the_same_question_twice_is_read_once(tmp_path, capsys):
    path = tmp_path / "squad.json"
    content = json.loads(qa())
    content["data"].append({"paragraphs": content["data"][0]["paragraphs"][:1]})
    path.write_text(json.dumps(content))
    examples = read_questions(path)
    assert len(examples) == len({example.place for example in examples}) == COUNT
    said = capsys.readouterr().err
    assert "2 questions are there twice" in said and said.count("\n") == 1
    assert "'0 0' (data[0].paragraphs[0].qas[0] and data[1].paragraphs[0].qas[0])" in said


REAL = {
    read_table: ("sentiment/movie.dev.tsv", 1060),
    pairs: ("pairs/mrpc.test.txt", 1725),
    read_tagged: ("tagging/ewt-pos.dev.tsv", 2001),
    read_questions: ("qa/xquad.en.json", 1190),
    read_choices: ("choice/commonsenseqa.dev.jsonl", 950),
}


@pytest.mark.parametrize("read", REAL)
def test_real_files(read):
    folder = os.environ.get("FASTPLM_TEST_DATA")
    root = Path(__file__).resolve().parents[3] / "shared" / "data"
    name, count = REAL[read]
    path = (Path(folder) if folder else root) / name
    if not path.is_file():
        pytest.skip(f"no {path}: set FASTPLM_TEST_DATA to the folder that has {name}")
    assert len(read(path)) == count


def test_several_targets_in_files(tmp_path):
    (tmp_path / "table.jsonl").write_text(
        '{"source": "a", "target": ["b", " c "]}\n{"source": "d", "target": "e"}\n'
    )
    for name, text in (("x", "a\nd\n"), ("y", "b\ne\n"), ("z", "c\nf\n")):
        (tmp_path / name).write_text(text)
    found = read_sources(tmp_path / "table.jsonl")
    assert [(e.target, e.others) for e in found] == [("b", ("c",)), ("e", ())]
    found = read_sources(tmp_path / "x", targets=[tmp_path / "y", tmp_path / "z"])
    assert [(e.target, e.others) for e in found] == [("b", ("c",)), ("e", ("f",))]
    for wrong, said in (
        ("[]", "an empty list"),
        ('["a", 3]', "the int 3"),
        ('["a", ""]', "nothing"),
    ):
        (tmp_path / "table.jsonl").write_text(f'{{"source": "a", "target": {wrong}}}')
        with pytest.raises(DataError, match=f":1: {said}.* in column 'target'"):
            read_sources(tmp_path / "table.jsonl")
    (tmp_path / "z").write_text("c\n")
    with pytest.raises(DataError, match="z:2: no such line; expected as many lines as .*x and .*z"):
        read_sources(tmp_path / "x", targets=[tmp_path / "y", tmp_path / "z"])


def test_tables_and_aligned_files_are_the_same(tmp_path):
    sources, targets = ["a cat", "a dog"], ["ein Kater", "ein Hund"]
    packed, aligned, table = (
        tmp_path / name for name in ("sources.gz", "targets.txt", "pairs.tsv")
    )
    packed.write_bytes(gzip.compress("\n".join(sources).encode()))
    aligned.write_text("\n".join(targets))
    rows = map("\t".join, zip(sources, targets, strict=True))
    table.write_text("\n".join(("source\ttarget", *rows)))
    for found in (
        read_sources(table),
        read_sources(table, ["source", "target"]),
        read_sources(packed, targets=aligned),
    ):
        assert [(e.texts[0], e.target) for e in found] == list(zip(sources, targets, strict=True))


@pytest.mark.parametrize(
    "content, options, expected",
    [
        ("a\tb\nx\ty\n", {}, "one of sources and one of targets"),
        ("source\ttarget\nx\t\n", {}, ":2"),
        ("source\ttarget\nx\ty\n", {"text_columns": ["source"]}, "two"),
        ("", {}, "nothing"),
        ("one\ntwo\n", {"targets": "un\n"}, "targets.txt:2: no such line"),
        ("one\n\n", {"targets": "un\ndeux\n"}, ":2: an empty line"),
    ],
)
def test_malformed_sources(content, options, expected, tmp_path):
    path = tmp_path / "data.txt"
    path.write_text(content)
    if "targets" in options:
        (tmp_path / "targets.txt").write_text(options["targets"])
        options = {"targets": tmp_path / "targets.txt"}
    with pytest.raises((DataError, ArgumentValueError), match=expected):
        read_sources(path, **options)
