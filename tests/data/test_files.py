"""The lines of a text file, in any encoding and compression, and the one line about another."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import random
import shlex
import socket
import sys
import zipfile

import pytest

from fastplm.data._files import lines_of
from fastplm.errors import DataError

TEXT = "One line.\nAnother line.\n\nA second document, of one line.\n" * 40
#: The contents of a file, and its lines.
LINES = {
    "unix": ("a\nb\n", ["a\n", "b\n"]),
    "windows": ("a\r\n\r\nb\r\nc", ["a\n", "\n", "b\n", "c"]),
    "inside a line": ("a\rb\nc\n", ["a\rb\n", "c\n"]),
    "inside a line of windows": ("a\rb\r\n\rc\r\n", ["a\rb\n", "\rc\n"]),
    "twice before the end": ("a\r\r\nb\r\r\n", ["a\n", "b\n"]),
    "at the end of the file": ("a\nb\r", ["a\n", "b\n"]),
    "old mac": ("a\r\rb\rc", ["a\n", "\n", "b\n", "c"]),
    "one line": ("a\r", ["a\n"]),
    "other separators": ("a\u2028b\x0cc\x85d\n", ["a\u2028b\x0cc\x85d\n"]),
    "nothing": ("", []),
}


@pytest.mark.parametrize("name", LINES)
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32"])
@pytest.mark.parametrize("compress", [bytes, gzip.compress])
def test_what_ends_a_line(name, encoding, compress, tmp_path):
    text, expected = LINES[name]
    path = tmp_path / "a.txt"
    path.write_bytes(compress(text.encode(encoding)))
    assert list(lines_of(path)) == expected


def test_a_carriage_return_where_a_file_is_read_in_parts(tmp_path):
    """``"\\r"`` and ``"\\n"`` may be read one after the other."""
    path = tmp_path / "a.txt"
    for length in range(8180, 8200):  # Python decodes 8192 bytes at once
        path.write_bytes(b"x" * length + b"\r\n" + b"y\rz\r\n")
        assert list(lines_of(path)) == ["x" * length + "\n", "y\rz\n"]


def zipped():
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as opened:
        opened.writestr("a.txt", TEXT)
    return file.getvalue()


def flipped(data, place):
    return data[:place] + bytes([data[place] ^ 0x10]) + data[place + 1 :]


def zstd(data):
    zstandard = pytest.importorskip("zstandard")
    return zstandard.ZstdCompressor(level=3, write_checksum=True).compress(data)


PACKED = gzip.compress(TEXT.encode())
RANDOM = random.Random(0).randbytes(3000).hex().encode()
CUT, DAMAGED = "a compressed file that ends too early", "a compressed file that is damaged"
#: The bytes of one file, and the message about it.
CONTENTS = {
    "latin-1": ("ab\ncd déjà vu".encode("latin-1"), "not UTF-8: byte 0xe9 in line 2"),
    "latin-1-packed": (gzip.compress("déjà".encode("latin-1")), "iconv -f <its encoding> -t utf-8"),
    "half-a-letter": (TEXT.encode() + "é".encode()[:1], "not UTF-8: byte 0xc3 in line 161"),
    "far-away": (TEXT.encode() * 99 + b"\xff", "byte 0xff in line 15,841"),
    "surrogate": (b"ab\xed\xa0\x80", "not UTF-8: byte 0xed in line 1"),
    "nul": (b"text\nte\0xt", "a binary file: NUL in line 2"),
    "png": (b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", "a PNG image"),
    "pdf": (b"%PDF-1.7\nall of it letters", "a PDF document"),
    "zip": (zipped(), "a zip archive"),
    "parquet": (b"PAR1\x15\0\x15", "a Parquet table"),
    "utf-16-no-mark": (TEXT.encode("utf-16-le"), "iconv -f utf-16-le -t utf-8"),
    "utf-16-be-no-mark": (TEXT.encode("utf-16-be"), "iconv -f utf-16-be -t utf-8"),
    "utf-16-odd": (TEXT.encode("utf-16") + b"x", "not UTF-16-LE"),
    "utf-32-wrong": (b"\xff\xfe\0\0\xff\xff\xff\xff", "not UTF-32-LE"),
    "gzip-cut": (PACKED[:-9], CUT),
    "gzip-flipped": (flipped(PACKED, 40), DAMAGED),
    "gzip-sum": (flipped(PACKED, -6), DAMAGED),
    "gzip-and-more": (PACKED + b"more", DAMAGED),
    "bzip2-flipped": (flipped(bz2.compress(TEXT.encode()), 12), DAMAGED),
    "xz-cut": (lzma.compress(TEXT.encode())[:-1], CUT),
    "zstd-cut": (lambda: zstd(RANDOM)[:-700], CUT),
    "zstd-flipped": (lambda: flipped(zstd(RANDOM), 1500), DAMAGED),
}


def refuses(words, path):
    with pytest.raises(DataError) as error:
        list(lines_of(path))
    said = str(error.value)
    assert words in said and str(path) in said and "\n" not in said and "; expected " in said, said


@pytest.mark.parametrize("name", CONTENTS)
def test_contents_that_are_no_text(name, tmp_path):
    data, words = CONTENTS[name]
    path = tmp_path / "a.txt"
    path.write_bytes(data if isinstance(data, bytes) else data())
    refuses(words, path)


@pytest.mark.parametrize("text", [b"ok\n\xff\xfe", TEXT.encode("utf-16-le")])
def test_a_command_to_copy_quotes_the_path(text, tmp_path):
    path = tmp_path / "it's a text.txt"
    path.write_bytes(text)
    with pytest.raises(DataError) as error:
        list(lines_of(path))
    assert shlex.quote(str(path)) in str(error.value)


def below_a_file(path):
    path.parent.joinpath("file").write_text("text")
    return path.parent / "file" / "a.txt"


def unix_socket(path):
    here = os.getcwd()
    os.chdir(path.parent)  # the path of a socket must be short
    with socket.socket(socket.AF_UNIX) as opened:
        opened.bind(path.name)
    os.chdir(here)


#: What lies at a path, or makes another path, and the message about it.
PATHS = {
    "missing": (lambda path: None, "a path that does not exist"),
    "below a file": (below_a_file, "a path that does not exist"),
    "dangling": (lambda path: path.symlink_to("nowhere"), "a link to a file that does not exist"),
    "a link to itself": (lambda path: path.symlink_to("a.txt"), "a path that cannot be read (Too"),
    "a pipe": (os.mkfifo, "a pipe, which can be read only once"),
    "a socket": (unix_socket, "a socket"),
    "nothing": (lambda path: os.devnull, "an empty file"),
    "a device": (lambda path: "/dev/zero", "a device"),
    "a folder": (lambda path: path.parent, "a folder"),
    "NUL": (lambda path: path.parent / "a\0b", "a path that cannot be read"),
    "too long": (lambda path: path.parent / ("a" * 300), "a path that cannot be read (File name"),
}


@pytest.mark.skipif(sys.platform == "win32", reason="such paths are POSIX")
@pytest.mark.parametrize("name", PATHS)
def test_paths(name, tmp_path):
    make, words = PATHS[name]
    path = tmp_path / "a.txt"
    refuses(words, type(path)(make(path) or path))


def test_zstd_without_a_library(tmp_path, monkeypatch):
    for name in ("compression", "zstandard"):
        monkeypatch.setitem(sys.modules, name, None)
    path = tmp_path / "a.txt.zst"
    path.write_bytes(b"\x28\xb5\x2f\xfd\x04\x00")
    refuses("pip install zstandard", path)
