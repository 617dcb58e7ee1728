"""Files of numbers, memory-mapped, and the checks that make them safe to read."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NoReturn

import numpy as np

from fastplm.data._folder import too_many_files
from fastplm.errors import DataError, message

_AT_ONCE = 1 << 20  # numbers that are read in one step, so that memory is bounded


def map_file(path: Path, dtype: type[np.generic]) -> np.ndarray:
    """The numbers in a file of a token store, memory-mapped for reading ``[n]``, n > 0.

    Raises:
        DataError: the file cannot be read, is empty or ends within a number.
    """
    expected = f"a file of {np.dtype(dtype).name} numbers"
    try:
        size = path.stat().st_size
        if size == 0 or size % np.dtype(dtype).itemsize:
            refuse_file(path, f"a file of {size} bytes", expected)
        # A plain array over the same memory: indexing a memmap costs several times more.
        return np.memmap(path, dtype, "r").view(np.ndarray)
    except OSError as error:
        refuse_unread(path, error, expected)


def new_file(path: Path) -> Callable[..., np.ndarray]:
    """Like ``numpy.empty``, but in a file; for the functions of ``fastplm.data.index``."""

    def empty(shape: tuple[int, ...], dtype: type[np.generic]) -> np.ndarray:
        with path.open("wb") as file:
            # On a full disk this raises; writing to a map that has no room kills the process.
            if hasattr(os, "posix_fallocate") and (size := math.prod(shape)):
                os.posix_fallocate(file.fileno(), 0, size * np.dtype(dtype).itemsize)
        mode: Literal["r+", "w+"] = "r+" if path.stat().st_size else "w+"
        return np.memmap(path, dtype, mode, shape=shape).view(np.ndarray)

    return empty


def refuse_file(path: Path, got: str, expected: str) -> NoReturn:
    """Raise the error of a file of a token store that is not what it should be."""
    fix = f"Delete the folder {path.parent}: it is built again when it is missing."
    raise DataError(message("TokenStore", "directory", f"{path}, {got}", expected, fix))


def refuse_unread(path: Path, error: OSError, expected: str) -> NoReturn:
    """Raise the error of such a file that could not be read."""
    if too_many_files(error):
        raise error
    got = f"which cannot be read ({error.strerror})"
    if isinstance(error, PermissionError):  # what it holds may be right
        fix = "Check who may read the file and its folder, or choose another cache."
        raise DataError(message("TokenStore", "directory", f"{path}, {got}", expected, fix))
    refuse_file(path, got, expected)


def first_descent(boundaries: np.ndarray) -> int:
    """The first i with ``boundaries[i + 1] <= boundaries[i]``, or -1; int64 ``[n]``."""
    for begin in range(0, len(boundaries) - 1, _AT_ONCE):
        part = boundaries[begin : begin + _AT_ONCE + 1]
        wrong = part[1:] <= part[:-1]
        if wrong.any():
            return begin + int(wrong.argmax())
    return -1


def first_outside(ids: np.ndarray, vocab_size: int) -> int:
    """The first i with ``ids[i]`` below 0 or not below ``vocab_size``, or -1; integers ``[n]``."""
    ids = ids.view(f"u{ids.itemsize}")  # in which a negative id is a very large one
    for begin in range(0, len(ids), _AT_ONCE):
        part = ids[begin : begin + _AT_ONCE]
        if part.max() >= vocab_size:
            return begin + int((part >= vocab_size).argmax())
    return -1
