"""A user's mistakes with a corpus, a tokenizer or a cache, and the one line that explains each."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import shlex
import socket
import sqlite3
import sys
import tarfile
import zipfile

import numpy as np
import pytest

from fastplm.data import load_tokenizer, read_documents, tokenize, train_tokenizer
from fastplm.errors import ArgumentTypeError, ArgumentValueError, DataError

TEXT = "One line.\nAnother line.\n\nA second document, of one line.\n" * 40
ICONV = "iconv -f <its encoding> -t utf-8"


def archive(kind):
    file = io.BytesIO()
    if kind == "zip":
        with zipfile.ZipFile(file, "w") as opened:
            opened.writestr("a.txt", TEXT)
    else:
        with tarfile.open(fileobj=file, mode=kind) as opened:
            info = tarfile.TarInfo("a.txt")
            info.size = len(TEXT)
            opened.addfile(info, io.BytesIO(TEXT.encode()))
    return file.getvalue()


def array():
    file = io.BytesIO()
    np.save(file, np.arange(9))
    return file.getvalue()


def flipped(data, place):
    return data[:place] + bytes([data[place] ^ 0x10]) + data[place + 1 :]


with open(sys.executable, "rb") as opened:
    PROGRAM = opened.read(4096)

#: The bytes of one file, and the message about it.
CONTENTS = {
    "empty": (b"", "an empty file"),
    "blank": (b" \n\n\t\n", "an empty file"),
    "packed-empty": (gzip.compress(b""), "an empty file"),
    "latin-1": ("ab\ncd déjà vu".encode("latin-1"), "not UTF-8: byte 0xe9 at byte 7 (line 2)"),
    "latin-1-fix": ("déjà vu".encode("latin-1"), ICONV),
    "half-a-letter": (TEXT.encode() + "é".encode()[:1], "not UTF-8: byte 0xc3 at byte 2,280"),
    "far-away": (TEXT.encode() * 99 + b"\xff", "at byte 225,720 (line 15,841)"),
    "surrogate": (b"ab\xed\xa0\x80", "not UTF-8: byte 0xed at byte 2"),
    "nul": (b"text\nte\0xt", "a binary file: NUL at byte 7 (line 2)"),
    "program": (PROGRAM, "an ELF program" if PROGRAM[:4] == b"\x7fELF" else "a binary file"),
    "png": (b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", "a PNG image"),
    "jpeg": (b"\xff\xd8\xff\xe0\0\x10JFIF", "a JPEG image"),
    "gif": (b"GIF89a\x01\0\x01\0", "a GIF image"),
    "pdf": (b"%PDF-1.7\nall of it letters", "a PDF document"),
    "zip": (archive("zip"), "a zip archive"),
    "tar": (archive("w"), "a tar archive"),
    "tar.gz": (archive("w:gz"), "a tar archive"),
    "parquet": (b"PAR1\x15\0\x15", "a Parquet table"),
    "npy": (array(), "a NumPy array"),
    "safetensors": (b'\x40\0\0\0\0\0\0\0{"a":', "a safetensors file"),
    "utf-16-no-mark": (TEXT.encode("utf-16-le"), "iconv -f utf-16-le -t utf-8"),
    "utf-16-be-no-mark": (TEXT.encode("utf-16-be"), "iconv -f utf-16-be -t utf-8"),
    "utf-16-odd": (TEXT.encode("utf-16") + b"x", "not UTF-16-LE: byte 0x78 at byte 4,562"),
    "utf-16-half": (b"\xff\xfea\0\0\xd8b\0", "not UTF-16-LE: byte 0x00 at byte 4"),
    "utf-16-nul": ("a\0b".encode("utf-16"), "a binary file: NUL at byte 4"),
    "utf-32-wrong": (b"\xff\xfe\0\0\xff\xff\xff\xff", "not UTF-32-LE: byte 0xff at byte 4"),
    "gzip-cut": (gzip.compress(TEXT.encode())[:-9], "a compressed file that ends too early"),
    "gzip-flipped": (flipped(gzip.compress(TEXT.encode()), 40), "a compressed file that is damage"),
    "gzip-sum": (flipped(gzip.compress(TEXT.encode()), -6), "a compressed file that is damaged"),
    "gzip-and-more": (gzip.compress(TEXT.encode()) + b"more", "a compressed file that is damaged"),
    "bzip2-flipped": (flipped(bz2.compress(TEXT.encode()), 12), "a compressed file that is damage"),
    "bzip2-cut": (bz2.compress(TEXT.encode())[:-1], "a compressed file that ends too early"),
    "xz-cut": (lzma.compress(TEXT.encode())[:-1], "a compressed file that ends too early"),
    "packed-latin-1": (gzip.compress("déjà".encode("latin-1")), "not UTF-8: byte 0xe9 at byte 1"),
}


@pytest.mark.parametrize("name", CONTENTS)
def test_contents_of_a_file(name, tmp_path):
    data, words = CONTENTS[name]
    path = tmp_path / "a.txt"
    path.write_bytes(data)
    refuses(DataError, words, str(path), lambda: read_documents([path]))
    # A file in a folder is named, too, unless it is empty.
    folder = words == "an empty file"
    words = "1 .txt files and no text in them" if folder else words
    named = str(tmp_path if folder else path)
    refuses(DataError, words, named, lambda: read_documents([tmp_path]))


def test_a_database(tmp_path):
    path = tmp_path / "a.txt"
    with sqlite3.connect(path) as opened:
        opened.execute("CREATE TABLE texts (text)")
    opened.close()
    refuses(DataError, "an SQLite database", str(path), lambda: read_documents([path]))


def missing(folder):
    return folder / "missing.txt"


def below_a_file(folder):
    (folder / "file").write_text("text")
    return folder / "file" / "a.txt"


def dangling(folder):
    (folder / "a.txt").symlink_to("nowhere")
    return folder / "a.txt"


def link_to_itself(folder):
    (folder / "a.txt").symlink_to("a.txt")
    return folder / "a.txt"


def fifo(folder):
    os.mkfifo(folder / "a.txt")
    return folder / "a.txt"


def fifo_inside(folder):
    fifo(folder)
    return folder


def unix_socket(folder):
    here = os.getcwd()
    os.chdir(folder)  # the path of a socket must be short
    with socket.socket(socket.AF_UNIX) as opened:
        opened.bind("a.txt")
    os.chdir(here)
    return folder / "a.txt"


def twice(folder):
    (folder / "a.txt").write_text(TEXT)
    (folder / "a.txt.gz").write_bytes(gzip.compress(TEXT.encode()))
    return folder


#: A function that makes a path, and the message about the path.
PATHS = {
    missing: "a path that does not exist",
    below_a_file: "a path that does not exist",
    dangling: "a link to a file that does not exist",
    link_to_itself: "a path that cannot be read (Too many levels of symbolic links)",
    fifo: "a pipe, which can be read only once",
    fifo_inside: "write it to a file first (cat ",
    unix_socket: "a socket",
    twice: "the same text twice",
    (lambda folder: os.devnull): "an empty file",
    (lambda folder: "/dev/zero"): "a device",
    (lambda folder: folder): "a folder with 0 .txt files and no text in them",
    (lambda folder: ""): "an empty name",
    (lambda folder: folder / "a\0b"): "a path that cannot be read",
    (lambda folder: folder / ("a" * 300)): "a path that cannot be read (File name too long)",
}


@pytest.mark.skipif(sys.platform == "win32", reason="such paths are POSIX")
@pytest.mark.parametrize("make", PATHS)
def test_paths(make, tmp_path):
    path = make(tmp_path)
    refuses(DataError, PATHS[make], str(path).rstrip("."), lambda: read_documents([path]))


def test_zstd_without_a_library(tmp_path, monkeypatch):
    for name in ("compression", "zstandard"):
        monkeypatch.setitem(sys.modules, name, None)
    path = tmp_path / "a.txt.zst"
    path.write_bytes(b"\x28\xb5\x2f\xfd\x04\x00")
    refuses(DataError, "pip install zstandard", str(path), lambda: read_documents([path]))


def generator():
    yield "a text"


#: A wrong call, its error and the error's message.
CALLS = [
    (lambda t, d: read_documents([]), DataError, "`paths` got no path"),
    (lambda t, d: read_documents("a.txt"), ArgumentTypeError, "Pass ['a.txt']"),
    (lambda t, d: tokenize(generator(), t, d), ArgumentTypeError, "which is read only once"),
    (lambda t, d: tokenize("a text", t, d), ArgumentTypeError, "`documents` got a str"),
    (lambda t, d: tokenize(None, t, d), ArgumentTypeError, "`documents` got a NoneType"),
    (lambda t, d: tokenize(["a", 3], t, d), DataError, "3 as document 1"),
    (lambda t, d: tokenize(["a", b"b"], t, d), DataError, "b'b' as document 1"),
    (lambda t, d: tokenize(["ab\ud800"], t, d), DataError, "document 0, where letter 2 is half"),
    (lambda t, d: tokenize([], t, d), DataError, "no tokens"),
    (lambda t, d: tokenize([" \n"], t, d), DataError, "no tokens"),
    (lambda t, d: tokenize(["a"], t, d / "file"), DataError, "a folder that can be written"),
    (lambda t, d: tokenize(["a"], t, d / "file" / "c"), DataError, "Choose another one (--cache"),
    (lambda t, d: train_tokenizer(generator(), 300, d), ArgumentTypeError, "Pass a list"),
    (lambda t, d: train_tokenizer(["a"], 10**12, d), ArgumentValueError, "1 to 10,000,000"),
    (lambda t, d: train_tokenizer(["a"], 0, d), ArgumentValueError, "`vocab_size` got 0"),
    (lambda t, d: train_tokenizer(["a"], "300", d), ArgumentValueError, "got '300'"),
    (lambda t, d: train_tokenizer(["a"], 300, d, "bpe"), ArgumentValueError, "bytelevel"),
    (lambda t, d: train_tokenizer(["abc"], 5, d), DataError, "the alphabet of this corpus"),
    (lambda t, d: train_tokenizer(["a"], 300, d / "file"), DataError, "a folder that can be"),
    (lambda t, d: load_tokenizer(d / "missing"), DataError, "Check the path"),
    (lambda t, d: load_tokenizer(d / "file"), DataError, "that tokenizer.save_pretrained wrote"),
    (lambda t, d: load_tokenizer(d), DataError, "that tokenizer.save_pretrained wrote"),
    (lambda t, d: load_tokenizer(d, needs=("eos",)), DataError, "Check the path"),
]


@pytest.mark.parametrize("call, error, words", CALLS, ids=map(str, range(len(CALLS))))
def test_calls(call, error, words, tokenizer, tmp_path):
    (tmp_path / "file").write_text("no folder")
    refuses(error, words, "", lambda: call(tokenizer, tmp_path))


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("data", [None, b"", b"[]", b"null", b'{"a": 1', b"\xff\0"], ids=repr)
def test_damaged_tokenizers(name, data, tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / name).unlink()
    if data is not None:
        (tmp_path / name).write_bytes(data)
    refuses(DataError, "", str(tmp_path), lambda: load_tokenizer(tmp_path))


def refuses(kind, words, name, call):
    with pytest.raises(kind) as error:
        call()
    said = str(error.value)
    assert words in said and name in said, said
    assert "\n" not in said and "latin1" not in said
    assert "; expected " in said


@pytest.mark.parametrize("text", [b"ok\n\xff\xfe", TEXT.encode("utf-16-le")])
def test_a_command_to_copy_quotes_the_path(text, tmp_path):
    path = tmp_path / "it's a text.txt"
    path.write_bytes(text)
    with pytest.raises(DataError) as error:
        read_documents([path])
    assert shlex.quote(str(path)) in str(error.value)
