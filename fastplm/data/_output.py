"""Where a command may write: to nothing that it reads, and not where another process writes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from fastplm.data._folder import acquire_lock, atomic_write, release_lock, say
from fastplm.errors import DataError, fail

#: Settings whose folders are read as texts, so that no result may lie in them.
_TEXTS = ("corpus", "translation")
Inputs = Mapping[str, Sequence[str | Path]]
_AT_ONCE = 1 << 22
_OTHER = "Choose another --out,"


def check_apart(where: str, out: Path, inputs: Inputs) -> None:
    """Check that writing ``out`` cannot change or move what a command reads.

    It is none of the ``inputs`` (the paths of each setting), no link to one, no folder around one,
    no file of one that is a folder, and not in a folder of texts. Paths that do not exist are left
    to those who read them.
    """
    written = out.resolve()
    for name, paths in inputs.items():
        for path in map(Path, paths):
            if not path.exists():
                continue
            read = path.resolve()
            if read == written or (written.exists() and os.path.samefile(read, written)):
                what = f"which is --{name.replace('_', '-')}"
            elif written in read.parents:
                what = f"a folder around --{name.replace('_', '-')} {path}"
            elif read in written.parents and (written.is_file() or name in _TEXTS):
                what = f"which is in --{name.replace('_', '-')} {path}"
            else:
                continue
            linked = f", a link to {written}" if out.is_symlink() else ""
            got, expected = f"{out}{linked}, {what}", "a path apart from all that is read"
            fail(where, "out", got, expected, "Choose another --out.", DataError)


@contextlib.contextmanager
def results(
    where: str, paths: Sequence[Path], inputs: Inputs, *, overwrite: bool
) -> Iterator[None]:
    """Check the files of results, and keep other processes from writing them in this block."""
    held: list[tuple[Path, int]] = []
    try:
        for path in paths:
            check_apart(where, path, inputs)
            held.append(_hold_result(where, path, overwrite))
        yield
    finally:
        for lock_file, handle in held:
            release_lock(lock_file, handle)


def _hold_result(where: str, path: Path, overwrite: bool) -> tuple[Path, int]:
    """Check and lock a file of results; gives the file of the lock and its descriptor."""

    def refuse(got: str, expected: str, fix: str = "Choose another --out.") -> NoReturn:
        fail(where, "out", f"{path}{got}", expected, fix, DataError)

    def held_by(holder: str) -> NoReturn:
        expected = "a file that no other process writes"
        refuse(f", which process {holder} writes", expected, f"{_OTHER} or wait for it to end.")

    real = path.resolve()
    if os.path.lexists(path) and not overwrite:
        refuse(", which exists", "a new file", f"{_OTHER} or move it aside with --overwrite.")
    if not real.parent.is_dir() or real.is_dir():
        refuse("", "a file in an existing folder", "Make the folder, or choose another file.")
    if real.exists() and not real.is_file():
        refuse(", a device or a pipe", "a file")
    lock_file = real.with_name(f".{real.name}.lock")
    try:
        handle = acquire_lock(lock_file, held_by)
    except OSError as error:
        refuse(f", in a folder that cannot be written ({error.strerror})", "a file in another one")
    return lock_file, handle


@contextlib.contextmanager
def result(path: Path) -> Iterator[Path]:
    """``atomic_write`` of results; what had their name is renamed when the new file is there."""
    with atomic_write(path) as part:
        yield part
        if path.exists():
            make_room(path)


def make_room(path: Path) -> Path:
    """Rename a folder or a file, as --overwrite asks, and say so; gives the new path.

    Of a link the target is renamed, and the link stays.
    """
    old = move_aside(path)
    what = "folder" if old.is_dir() else "file"
    say(f"The {what} {path} was moved to {old}, as --overwrite asks.")
    return old


def move_aside(path: Path) -> Path:
    """Give a folder or a file the name ``<path>.old-<n>``, with the first n that is free."""
    path, number = path.resolve(), 1
    while (old := path.with_name(f"{path.name}.old-{number}")).exists():
        number += 1
    os.rename(path, old)
    return old


def reserve(path: Path) -> None:
    """Take the room on the disk for a file that was made with holes.

    A page of a memory map for which there is no room would end the process.

    Raises:
        OSError: the disk is full.
    """
    with path.open("r+b") as file:
        size = os.fstat(file.fileno()).st_size
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, size)
        else:  # macOS
            for begin in range(0, size, _AT_ONCE):
                here = os.pread(file.fileno(), _AT_ONCE, begin)
                file.seek(begin)
                file.write(here)
