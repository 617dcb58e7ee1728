"""Text files, compressed or not, in UTF-8, UTF-16 or UTF-32, read as a stream."""

from __future__ import annotations

import bz2
import codecs
import io
import lzma
import os
import re
import shlex
import stat
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from fastplm.errors import DataError, fail

_EXPECTED = "text files in UTF-8, or in UTF-16 or UTF-32 with a byte-order mark, or folders of them"
_AT_ONCE = 1 << 16
_PACKED_AT_ONCE = 1 << 13  # bytes, which may expand to a thousand times as many
_HEAD = 1 << 12

#: What the names of text files in a folder end with.
SUFFIXES = tuple(f".txt{suffix}" for suffix in ("", ".gz", ".bz2", ".xz", ".zst"))

# The longer mark first: UTF-16's is the beginning of UTF-32's.
_MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
_BINARY = (
    (rb"\x7fELF", "an ELF program or library"),
    (rb"MZ.{60}\0\0", "a Windows program or library"),
    (rb"\x89PNG\r\n\x1a\n", "a PNG image"),
    (rb"\xff\xd8\xff", "a JPEG image"),
    (rb"GIF8[79]a", "a GIF image"),
    (rb"%PDF-", "a PDF document"),
    (rb"PK\x03\x04", "a zip archive (.zip, .docx, .xlsx, .npz, .pt)"),
    (rb"7z\xbc\xaf\x27\x1c", "a 7z archive"),
    (rb"Rar!\x1a\x07", "a RAR archive"),
    (rb".{257}ustar", "a tar archive"),
    (rb"SQLite format 3\0", "an SQLite database"),
    (rb"PAR1", "a Parquet table"),
    (rb"\x93NUMPY", "a NumPy array"),
    (rb"\x89HDF\r\n\x1a\n", "an HDF5 file"),
    (rb".{7}\0\{", "a safetensors file"),
)


def lines_of(path: Path) -> Iterator[str]:
    """The lines of a text file, with their line ends as ``"\\n"``.

    A line ends with ``"\\n"`` or ``"\\r\\n"``. A ``"\\r"`` elsewhere is a character of its line, as
    programs leave it in texts that they copy; it ends a line only in a file without any ``"\\n"``,
    as Excel writes it for a Mac.

    Raises:
        DataError: the path is not a file that can be read more than once, or not a text.
    """
    check_regular(path)
    encoding = "utf-8"
    try:
        opened, encoding = _open(path)
        with opened, io.TextIOWrapper(opened, encoding, newline="\n") as text:
            if opened.peek(_HEAD).startswith(b"%PDF-"):  # which may be all letters
                _refuse_contents(path, encoding)
            for number, line in enumerate(text):
                if "\0" in line:
                    _refuse_contents(path, encoding)
                if not number:
                    line = line.removeprefix("\ufeff")
                    if not line:  # a byte-order mark and no text
                        continue
                    if "\r" in line and not line.endswith("\n"):
                        yield from io.StringIO(line, newline=None)
                        continue
                if "\r" in line and (kept := line.rstrip("\r\n")) != line:
                    # So the last line may end with "\r", and each line with "\r\r\n".
                    line = f"{kept}\n"
                yield line
    except UnicodeDecodeError:
        _refuse_contents(path, encoding)
    except _DamagedError as error:
        refuse(path, f"a compressed file that {error}", "Copy or download it again.")
    except OSError as error:
        refuse(path, f"a file that cannot be read ({error.strerror or error})")


def check_regular(path: Path) -> os.stat_result:
    """What the system says of a path, which must be a file that can be read several times."""
    try:
        found = os.stat(path)
        mode = found.st_mode
        null = os.path.samefile(path, os.devnull)
    except (FileNotFoundError, NotADirectoryError):
        if path.is_symlink():
            refuse(path, "a link to a file that does not exist", "Correct or delete the link.")
        refuse(path, "a path that does not exist")
    except (OSError, ValueError) as error:  # ValueError: a name that holds "\0"
        refuse(path, f"a path that cannot be read ({getattr(error, 'strerror', '') or error})")
    if null:
        refuse(path, "an empty file", "Name a file with text.")
    if not stat.S_ISREG(mode):
        kinds = {
            stat.S_IFIFO: "a pipe, which can be read only once",
            stat.S_IFSOCK: "a socket",
            stat.S_IFCHR: "a device",
            stat.S_IFBLK: "a device",
            stat.S_IFDIR: "a folder",
        }
        fix = f"A corpus is read several times: write it to a file first (cat {path} > corpus.txt)."
        if stat.S_ISDIR(mode):
            fix = "Name a file in it."
        refuse(path, kinds[stat.S_IFMT(mode)], fix)
    return found


def refuse(
    path: str | Path, got: str, fix: str = "Check the path.", expected: str = _EXPECTED
) -> NoReturn:
    """Raise the error of a path that gives no text."""
    fail("read", "path", f"{path}, {got}", expected, fix, DataError)


def _open(path: Path) -> tuple[io.BufferedReader, str]:
    """The bytes of the text, decompressed, and their encoding."""
    file: io.BufferedReader = path.open("rb")
    try:
        head = file.peek(_HEAD)
        for magic, decompressor in _COMPRESSED.items():
            if re.match(magic, head):
                file = io.BufferedReader(_Decompressed(file, decompressor(path)), _AT_ONCE)
                head = file.peek(_HEAD)
                break
    except BaseException:
        file.close()
        raise
    return file, next((name for mark, name in _MARKS if head.startswith(mark)), "utf-8")


_CONVERT = "Give the text in it, as a text file."
#: NUL, and what Python reads in the place of a byte that is not UTF-8.
_NO_TEXT = re.compile("[\0\udc80-\udcff]")


def _refuse_contents(path: Path, encoding: str) -> NoReturn:
    """Say what a file holds that is not text: its kind where that is known, and the line."""
    if encoding != "utf-8":
        fix = "Its byte-order mark says so: repair or convert the file."
        refuse(path, f"which is not {encoding.upper()}, or has NUL in it", fix)
    file, _ = _open(path)
    with file:
        head = file.peek(_HEAD)
        for magic, kind in _BINARY:
            if re.match(magic, head, re.DOTALL):
                refuse(path, f"a binary file: {kind}", _CONVERT)
        lines = io.TextIOWrapper(file, "utf-8", "surrogateescape", newline="\n")
        matches = ((number, _NO_TEXT.search(line)) for number, line in enumerate(lines, 1))
        number, found = next((number, match[0]) for number, match in matches if match)
    name = shlex.quote(str(path))
    if found == "\0":
        odd, even = head[1::2].count(0), head[::2].count(0)
        if 3 * max(odd, even) > len(head) > 8 * min(odd, even):
            likely = "utf-16-le" if odd > even else "utf-16-be"
            fix = f"If it is {likely.upper()}, convert it: iconv -f {likely} -t utf-8 {name} > NEW"
            refuse(path, "a binary file, or UTF-16 without a byte-order mark", fix)
        refuse(path, f"a binary file: NUL in line {number:,}", _CONVERT)
    fix = f"Convert it: iconv -f <its encoding> -t utf-8 {name} > NEW"
    refuse(path, f"which is not UTF-8: byte 0x{ord(found) - 0xDC00:02x} in line {number:,}", fix)


class _DamagedError(Exception):
    """What is wrong with a compressed file."""


class _Decompressed(io.RawIOBase):
    """The bytes of a compressed file, of all its frames, one after the other.

    Args:
        file: the compressed bytes.
        decompressor: makes an object like ``bz2.BZ2Decompressor``, for one frame.
    """

    def __init__(self, file: io.BufferedReader, decompressor: Callable[[], Any]) -> None:
        self._file, self._new = file, decompressor
        self._frame = decompressor()
        self._ready = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        # A byte-order mark may lie in two frames, so a few bytes are no answer.
        while len(self._ready) < min(_HEAD, len(buffer)):
            part = self._file.read1(_PACKED_AT_ONCE)
            ended = not part
            if self._frame.eof:
                part = (self._frame.unused_data + part).lstrip(b"\0")  # files are padded with zeros
                if ended and not part:
                    break
                if not part:
                    continue
                self._frame = self._new()
            elif ended:
                raise _DamagedError("ends too early")
            try:
                self._ready += self._frame.decompress(part)
            except Exception as error:  # each library has errors of its own
                raise _DamagedError(f"is damaged ({error})") from error
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    def close(self) -> None:
        self._file.close()
        super().close()


def _zstd(path: Path) -> Callable[[], Any]:
    try:
        from compression import zstd  # since Python 3.14
    except ImportError:
        pass
    else:
        return zstd.ZstdDecompressor
    try:
        import zstandard
    except ImportError:
        fix = f"Run: pip install zstandard (or unpack the file: zstd -d {path})."
        refuse(path, "which zstd has compressed, and no library is there to read it", fix)
    return lambda: zstandard.ZstdDecompressor().decompressobj()


#: The first bytes of compressed files, and what gives for a path the decompressor of one frame.
_COMPRESSED: dict[bytes, Callable[[Path], Callable[[], Any]]] = {
    rb"\x1f\x8b\x08": lambda path: lambda: zlib.decompressobj(wbits=31),
    rb"BZh[1-9](1AY&SY|\x17rE8P\x90)": lambda path: bz2.BZ2Decompressor,
    rb"\xfd7zXZ\0": lambda path: lzma.LZMADecompressor,
    rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18": _zstd,
}
