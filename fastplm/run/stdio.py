"""Standard output and error of a command, which no locale or reader that left makes fail."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class _Raw(io.RawIOBase):
    """What a stream writes to; where nobody reads any more, what is written is gone.

    Args:
        below: a binary stream without a buffer.
        counts: whether what is written is a result, which a full disk must not lose in silence.
    """

    def __init__(self, below: Any, counts: bool) -> None:
        self.below = below
        self.counts = counts and not below.isatty()  # a terminal fails when it is closed

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return self.below.isatty()

    def fileno(self) -> int:
        return self.below.fileno()

    def write(self, data: Any) -> int:
        try:
            return self.below.write(data)
        except OSError as error:
            if self.counts and not isinstance(error, BrokenPipeError):
                raise
            return len(data)


@contextmanager
def lasting_streams() -> Iterator[None]:
    """In this block no print, log line or progress bar fails for what it holds or who reads it.

    Characters that the encoding lacks are written as backslash escapes, as Python does on stderr.
    A stream that was closed becomes the null device, so that no file that is opened later takes
    its number, and what libraries write there.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_RDWR)  # it gets the lowest number, which is this
            os.set_inheritable(nowhere, True)
            setattr(sys, name, open(nowhere, "w" if number else "r", encoding="utf-8"))
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = _lasting(sys.stdout, True), _lasting(sys.stderr, False)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def _lasting(stream: Any, counts: bool) -> Any:
    buffer = getattr(stream, "buffer", None)
    if buffer is None:  # one that keeps text, such as that of a notebook
        return stream
    stream.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(_Raw(getattr(buffer, "raw", buffer), counts)),
        encoding=stream.encoding,
        errors="backslashreplace",
        line_buffering=True,  # a line is read while the work goes on
    )
