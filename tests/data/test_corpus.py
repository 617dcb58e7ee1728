from __future__ import annotations

import bz2
import gzip
import lzma
import os
import sys
import tracemalloc
from pathlib import Path

import pytest

from fastplm.data import read_documents, tokenize, train_tokenizer
from fastplm.data.corpus import fingerprint
from fastplm.data.tokenizer import KINDS
from fastplm.errors import ArgumentTypeError, DataError


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


STORIES = "Größe – 😀 one.\n\ntwo, naïve.\r\nits second line\r\n\r\nthree\u2028four"


def halves(compress):
    """The text compressed in two frames, cut within a letter."""
    return lambda data: compress(data[:3]) + compress(data[3:])


def zstd(data):
    zstandard = pytest.importorskip("zstandard")
    return zstandard.ZstdCompressor(level=3, write_checksum=True).compress(data)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-be", "utf-32"])
@pytest.mark.parametrize("compress", [bytes, gzip.compress, bz2.compress, lzma.compress, zstd])
@pytest.mark.parametrize("frames", [1, 2])
def test_the_same_text_however_it_is_written(tmp_path, encoding, compress, frames):
    expected = list(read_documents([write(tmp_path / "plain.txt", STORIES)]))
    assert expected == ["Größe – 😀 one.", "two, naïve.\nits second line", "three\u2028four"]
    data = STORIES.encode(encoding)
    if encoding == "utf-16-be":
        data = b"\xfe\xff" + data
    if frames == 2 and compress is not bytes:
        compress = halves(compress)
    (tmp_path / "folder").mkdir()
    file = tmp_path / "folder" / "a.txt.gz"  # the contents count, not the name
    file.write_bytes(compress(data))
    for path in file, file.parent:
        documents = read_documents([path])
        assert list(documents) == list(documents) == expected
    assert fingerprint(documents) == fingerprint(expected)


def test_names_of_texts_in_a_folder(tmp_path):
    for name, pack in ("c.txt", bytes), ("b.txt.gz", gzip.compress), ("a.txt.xz", lzma.compress):
        (tmp_path / name).write_bytes(pack(name.encode()))
    for name in ("d.txt.bak", "e.txt~", "f.gz", "g.txt.gz.part"):
        (tmp_path / name).write_text(name)
    (tmp_path / "folder.txt").mkdir()
    assert list(read_documents([tmp_path])) == ["a.txt.xz", "b.txt.gz", "c.txt"]


def test_padding_after_a_compressed_text(tmp_path):
    (tmp_path / "a.txt").write_bytes(gzip.compress(b"one\n") + b"\0" * 70_000)
    assert list(read_documents([tmp_path])) == ["one"]


@pytest.mark.parametrize("text", [b"", b" \n\n\t\n", gzip.compress(b"", mtime=0)], ids=repr)
def test_files_without_text(text, tmp_path):
    (tmp_path / "a.txt").write_bytes(text)
    with pytest.raises(DataError, match=r"a\.txt, an empty file"):
        read_documents([tmp_path / "a.txt"])
    with pytest.raises(DataError, match="1 .txt files and no text in them"):
        read_documents([tmp_path])


def test_paths_that_are_no_corpus(tmp_path):
    """Each error names the path, that of a file in a folder too."""
    with pytest.raises(DataError, match="0 .txt files and no text"):
        read_documents([tmp_path])
    write(tmp_path / "a.txt", "one")
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"one"))
    with pytest.raises(DataError, match=r"a\.txt\.gz, beside a\.txt, the same text twice"):
        read_documents([tmp_path])
    (tmp_path / "a.txt.gz").unlink()
    (tmp_path / "a.txt").write_bytes(b"\xff")
    with pytest.raises(DataError, match=r"a\.txt, which is not UTF-8"):
        read_documents([tmp_path])
    with pytest.raises(DataError, match="an empty name"):
        read_documents([""])
    with pytest.raises(DataError, match="`paths` got no path"):
        read_documents([])
    with pytest.raises(ArgumentTypeError, match=r"Pass \['a.txt'\]"):
        read_documents("a.txt")


def test_compressed_text_is_never_whole_in_memory(tmp_path):
    lines = "".join(f"line {number} of a text that is not long\n" for number in range(9000))
    with gzip.open(tmp_path / "a.txt.gz", "wt", compresslevel=1) as file:
        for _ in range(8):
            file.write(lines)
    tracemalloc.start()
    try:
        assert sum(map(len, read_documents([tmp_path]))) > 2_500_000
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


def test_fingerprint_sees_boundaries():
    assert fingerprint(["ab", "c"]) != fingerprint(["a", "bc"])
    assert fingerprint(["ab"]) == fingerprint(iter(["ab"]))


@pytest.mark.slow
def test_embedded_corpus_is_english_of_a_useful_size(embedded):
    documents = embedded
    text = " ".join(documents)
    assert len(documents) > 300
    assert 1_000_000 < len(text) < 20_000_000
    assert min(map(len, documents)) >= 200
    words = text.lower().split()
    assert words.count("the") / len(words) > 0.02
    assert not any(line.startswith(">>>") for line in text.splitlines())


def test_real_text(real_text):
    articles = list(read_documents([real_text / "wikitext-2.valid.txt"]))
    assert 50 < len(articles) < 70
    assert all(article.startswith("= ") for article in articles)
    assert len(list(read_documents([real_text / "shakespeare.txt"]))) > 5000


# --- how often a corpus is read -------------------------------------------------------------------


@pytest.fixture(scope="module")
def all_opened():
    """All paths that this process opens, by any function."""
    paths, end = [], []

    def audit(event, arguments):
        if event == "open" and not end:
            paths.append(str(arguments[0]))

    sys.addaudithook(audit)  # a hook cannot be removed
    yield paths
    end.append(True)


@pytest.fixture
def opened(tmp_path, all_opened):
    """The names of the files in a folder that were opened since the last call."""
    (tmp_path / "corpus").mkdir()

    def names():
        inside = (Path(path) for path in all_opened if Path(path).parent == tmp_path / "corpus")
        found = sorted(path.name for path in inside)
        all_opened.clear()
        return found

    return names


@pytest.mark.parametrize("kind", KINDS)
def test_a_corpus_is_read_once_and_then_never(kind, documents, opened, tmp_path, capsys):
    folder, cache = tmp_path / "corpus", tmp_path / "cache"
    (folder / "a.txt").write_text("\n\n".join(documents))
    (folder / "b.txt.gz").write_bytes(gzip.compress("\n".join(documents[:9]).encode("utf-16")))
    (folder / "c.txt").write_text(" \n")
    files = ["a.txt", "b.txt.gz", "c.txt"]

    def read(vocab_size=300):
        corpus = read_documents([folder], cache=cache)
        tokenizer = train_tokenizer(corpus, vocab_size, cache, kind)
        return corpus, tokenize(corpus, tokenizer, cache)

    opened()
    corpus, store = read()
    assert opened() == files
    again, same = read()
    assert opened() == [] and capsys.readouterr().err == ""
    assert same.directory == store.directory and again.files == corpus.files
    plain = read_documents([folder])
    assert corpus.files == plain.files and list(corpus) == list(again) == list(plain)
    assert fingerprint(corpus) == fingerprint(list(plain))
    opened()
    corpus.release()
    assert list(corpus) == list(plain) and opened().count("a.txt") == 2
    # Another vocabulary, a damaged cache, and a file that has changed but kept its size.
    opened()
    read(310)
    assert opened() == files
    (known,) = cache.glob("corpus-*/corpus.json")
    known.write_text(known.read_text()[:-1])
    read()
    (line,) = capsys.readouterr().err.splitlines()
    assert opened() == files and f"the cache {known.parent} is damaged" in line
    (folder / "a.txt").write_text("\n\n".join(documents[::-1]))
    os.utime(folder / "a.txt", ns=(0, 0))
    opened()
    assert read()[1].directory != store.directory
    assert opened() == files
    assert not list(cache.glob(".*"))


def test_documents_of_a_cached_corpus_can_be_read_side_by_side(tmp_path):
    write(tmp_path / "a.txt", "".join(f"line {number}\n" for number in range(50)) + "é")
    corpus = read_documents([tmp_path], cache=tmp_path / "cache")
    expected = list(read_documents([tmp_path]))
    assert list(zip(corpus, corpus, strict=True)) == list(zip(expected, expected, strict=True))
    begun = iter(corpus)
    first = next(begun)
    corpus.release()
    assert [first, *begun] == expected


def test_a_corpus_that_changes_while_it_is_read(tmp_path, monkeypatch):
    file = write(tmp_path / "a.txt", "one\n\ntwo")

    def lines(path):
        yield "one\n"
        write(file, "one\n\ntwo\n\nthree")

    monkeypatch.setattr("fastplm.data.corpus.lines_of", lines)
    with pytest.raises(DataError, match="changed while it was read"):
        read_documents([file], cache=tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())
