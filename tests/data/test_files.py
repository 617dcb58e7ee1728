"""The lines of a text file and their ends, in any encoding and compression."""

from __future__ import annotations

import gzip

import pytest

from fastplm.data._files import lines_of

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
