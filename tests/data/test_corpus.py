from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from fastplm._checks import DataError
from fastplm.data import embedded_corpus, read_documents
from fastplm.data.corpus import fingerprint


def write(path, text, encoding="utf-8"):
    path.write_bytes(text.encode(encoding))
    return path


def test_blank_lines_separate_documents(tmp_path):
    file = write(tmp_path / "a.txt", "\none\n  two \n\n\nthree\n\t\nfour")
    assert list(read_documents([file])) == ["one\ntwo", "three", "four"]


def test_titles_begin_documents_and_blank_lines_do_not(tmp_path):
    file = write(
        tmp_path / "a.txt",
        " \n = First = \n \n one . \n \n = = Part = = \n \n two . \n = Second = \n \n three . \n",
    )
    assert list(read_documents([file])) == [
        "= First =\none .\n= = Part = =\ntwo .",
        "= Second =\nthree .",
    ]


def test_each_line_is_a_document_where_nothing_separates_them(tmp_path):
    file = write(tmp_path / "a.txt", "\nfirst abstract\nsecond abstract\n\n\n")
    assert list(read_documents([file])) == ["first abstract", "second abstract"]


def test_folders_are_read_in_order_and_again(tmp_path):
    (tmp_path / "sub").mkdir()
    write(tmp_path / "sub" / "b.txt", "b")
    write(tmp_path / "a.txt", "a")
    write(tmp_path / "empty.txt", " \n")
    write(tmp_path / "notes.md", "not text to train on")
    documents = read_documents([tmp_path])
    assert list(documents) == list(documents) == ["a", "b"]


def test_byte_order_mark_is_no_text(tmp_path):
    assert list(read_documents([write(tmp_path / "a.txt", "\ufeffone")])) == ["one"]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("missing.txt", None, "does not exist"),
        ("empty.txt", b"", "empty"),
        ("blank.txt", b" \n\n\t\n", "empty"),
        ("latin.txt", "déjà vu".encode("latin-1"), "not UTF-8"),
        ("folder", "folder", "no text"),
    ],
)
def test_bad_corpus_is_named(tmp_path, name, content, words):
    path = tmp_path / name
    if content == "folder":
        path.mkdir()
    elif content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=words) as error:
        read_documents([path])
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_no_paths():
    with pytest.raises(DataError):
        read_documents([])


def test_fingerprint_sees_boundaries():
    assert fingerprint(["ab", "c"]) != fingerprint(["a", "bc"])
    assert fingerprint(["ab"]) == fingerprint(iter(["ab"]))


def test_embedded_corpus_is_english_of_a_useful_size(embedded):
    documents = embedded
    text = " ".join(documents)
    assert len(documents) > 300
    assert 1_000_000 < len(text) < 20_000_000
    assert min(map(len, documents)) >= 200
    words = text.lower().split()
    assert words.count("the") / len(words) > 0.02
    assert not any(line.startswith(">>>") for line in text.splitlines())


def test_embedded_corpus_is_the_same_in_every_process(tmp_path, monkeypatch):
    # A part of the library shows it, and is parsed at once.
    for part in ("pydoc_data", "email", "json"):
        shutil.copytree(Path(sysconfig.get_path("stdlib")) / part, tmp_path / part)
    command = (
        "import sys; from fastplm.data import corpus;"
        "corpus.sysconfig.get_path = lambda name: sys.argv[1];"
        "print(corpus.fingerprint(corpus.embedded_corpus()))"
    )
    other = subprocess.run(
        [sys.executable, "-c", command, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONHASHSEED": "7", "PATH": ""},
    )
    monkeypatch.setattr("fastplm.data.corpus.sysconfig.get_path", lambda name: str(tmp_path))
    documents = embedded_corpus()
    assert len(documents) > 100
    assert other.stdout.strip() == fingerprint(documents)


def test_real_text(real_text):
    articles = list(read_documents([real_text / "wikitext-2.valid.txt"]))
    assert 50 < len(articles) < 70
    assert all(article.startswith("= ") for article in articles)
    assert len(list(read_documents([real_text / "shakespeare.txt"]))) > 5000
