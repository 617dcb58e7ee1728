"""Files of minimal pairs, and of published accuracies."""

from __future__ import annotations

import gzip
import json
import zipfile

import pytest

from fastplm.data.minimal_pairs import read_pairs, read_published
from fastplm.errors import DataError

_ROWS = [
    dict(sentence_good="the dogs jump", sentence_bad="the dogs jumps", UID="sv", pairID="0"),
    dict(sentence_good="a fox", sentence_bad="foxes a", UID="order", pairID="0"),
]
_TERMS = [dict(linguistics_term="agreement", field="syntax"), dict(linguistics_term="order")]


def _lines(rows):
    return "".join(f"{json.dumps(row)}\n" for row in rows)


def test_the_formats_of_pairs(tmp_path):
    rows = [row | of | dict(field="syntax") for row, of in zip(_ROWS, _TERMS, strict=True)]
    (tmp_path / "a.jsonl").write_text(_lines(rows))
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(_lines(rows).encode()))
    for name, separator in (("a.tsv", "\t"), ("a.csv", ",")):
        keys = list(rows[0])
        table = [separator.join(keys), *(separator.join(row[key] for key in keys) for row in rows)]
        (tmp_path / name).write_text("\n".join(table))
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("README.md", "not read")
        for row in rows:
            archive.writestr(f"data/{row['UID']}.jsonl", _lines([row]))
    known = {("the dogs jump", "the dogs jumps", "sv", "agreement", "syntax")}
    known |= {("a fox", "foxes a", "order", "order", "syntax")}
    for path in sorted(tmp_path.iterdir()):
        assert {pair[:5] for pair in read_pairs(path)} == known, path
    assert read_pairs(tmp_path / "a.zip")[0].where.endswith("a.zip/data/order.jsonl:1")
    (tmp_path / "mine.jsonl").write_text(_lines([dict(sentence_good="a", sentence_bad="b")]))
    assert read_pairs(tmp_path / "mine.jsonl")[0][:5] == ("a", "b", "mine", "", "")


@pytest.mark.parametrize(
    "content, said",
    [
        ("", "nothing; expected a pair"),
        (_lines([dict(sentence_good="a", bad="b")]), "1: columns .*one named 'sentence_bad'"),
        ("sentence_good\tbad\na\tb\n", "2: columns .*one named 'sentence_bad'"),
        (_lines([_ROWS[0] | dict(sentence_bad=" ")]), "1: nothing in column 'sentence_bad'"),
        (_lines([_ROWS[0] | dict(sentence_bad=3)]), "1: the int 3 in column 'sentence_bad'"),
        (_lines([_ROWS[0] | _TERMS[0], _ROWS[1]]), "2: no 'linguistics_term'; expected one in all"),
        (_lines([_ROWS[0] | of for of in _TERMS]), "2: linguistics_term 'order' of the UID 'sv'"),
        ("[1]", "1: a int; expected one JSON object"),
    ],
)
def test_wrong_pairs(content, said, tmp_path):
    path = tmp_path / "pairs.jsonl"
    path.write_text(content)
    with pytest.raises(DataError, match=said):
        read_pairs(path)


def test_a_pair_of_the_same_sentence_is_said(tmp_path, capsys):
    path = tmp_path / "pairs.tsv"
    path.write_text("sentence_good\tsentence_bad\na b\ta b\na\tb\n")
    assert len(read_pairs(path)) == 2
    assert f"count as wrong: 1 of 2, such as {path}:2" in capsys.readouterr().err


def test_wrong_zips(tmp_path):
    def zipped(**files):
        path = tmp_path / "pairs.zip"
        with zipfile.ZipFile(path, "w") as archive:
            for name, text in files.items():
                archive.writestr(name, text)
        return path

    with pytest.raises(DataError, match=r"a zip without a \.jsonl file"):
        read_pairs(zipped(**{"a.txt": "text"}))
    twice = _lines([_ROWS[0]])
    with pytest.raises(DataError, match=r"the UID 'sv' in .*a\.jsonl and in .*b\.jsonl"):
        read_pairs(zipped(**{"a.jsonl": twice, "b.jsonl": twice}))
    with pytest.raises(DataError, match="cannot be read .*utf-8"):
        read_pairs(zipped(**{"a.jsonl": b"\xff\xfe"}))
    path = zipped(**{"a.jsonl": twice * 100})
    damaged = bytearray(path.read_bytes())
    damaged[60:70] = b"x" * 10
    path.write_bytes(damaged)
    with pytest.raises(DataError, match="cannot be read"):
        read_pairs(path)
    with pytest.raises(DataError, match="does not exist"):
        read_pairs(tmp_path / "none.zip")


def test_published_rows(tmp_path):
    path = tmp_path / "published.jsonl"
    rows = [dict(UID="one", linguistics_term="t", lstm=0.5), dict(UID="two", lstm=1.0)]
    path.write_text(_lines([*rows, dict(UID="overall", linguistics_term="t", lstm=0.1)]))
    assert read_published(path) == {"one": {"lstm": 0.5}, "two": {"lstm": 1.0}}
    for content, said in (
        (_lines([rows[0], rows[0]]), "2: the UID 'one' again"),
        (_lines([rows[0] | dict(lstm="good")]), "1: lstm 'good'; expected an accuracy"),
        (_lines([rows[0] | dict(lstm=61.2)]), "1: lstm 61.2; expected an accuracy from 0 to 1"),
        (_lines([dict(UID="one")]), "1: no column but UID"),
        (_lines([rows[0], dict(UID="two", gpt=0.5)]), "2: the systems"),
        ("", "nothing; expected a row"),
        (_lines([dict(lstm=0.5)]), "one named 'UID'"),
    ):
        path.write_text(content)
        with pytest.raises(DataError, match=said):
            read_published(path)
