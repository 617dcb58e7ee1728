"""Folders that are built once, whoever comes first, and built again when they are damaged."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fastplm._checks import DataError, message

try:
    import fcntl
except ImportError:  # there is none on Windows, where folders are not locked
    fcntl = None  # type: ignore[assignment]

#: The sizes and hashes of a folder's files; written last.
MANIFEST = "manifest.json"
_READ_WHOLE = 1 << 30  # bytes of the largest file that is read whole at every start
_SAMPLES, _PAGE = 256, 1 << 12  # what is read of a larger one
_AT_ONCE = 1 << 22


def default_cache() -> Path:
    """``$XDG_CACHE_HOME/fastplm``, by default ``~/.cache/fastplm``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fastplm"


def say(line: str) -> None:
    """One line for whoever watches the run."""
    print(f"fastplm: {line}", file=sys.stderr, flush=True)


def build_once(cache: str | Path, key: str, build: Callable[[Path], None]) -> Path:
    """The folder ``cache/key``, built by ``build(folder)`` unless it is there and whole.

    A folder appears under its name only when it is complete: processes that build the same one at
    the same time, or die while building, leave nothing half-written behind that name. One that is
    not whole (``damage``) is built anew and then replaced, and one line on stderr says so; a whole
    one is never replaced, so that those who read it keep it.

    Raises:
        DataError: the cache folder cannot be written.
    """
    cache, final = Path(cache), Path(cache) / key
    if os.path.lexists(final):
        with _locked(cache, exclusive=False):
            wrong = damage(final)
        if wrong is None:
            return final
        say(f"the cache {final} is damaged ({wrong}): it is made anew")
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _locked(cache):
            _remove_abandoned(cache, key)
            scratch = Path(tempfile.mkdtemp(prefix=f".{key}-", dir=cache))
            building = contextlib.ExitStack()
            building.enter_context(_locked(scratch))
        try:
            build(scratch)
            _write_manifest(scratch)
            with _locked(cache):
                if damage(final) is not None:
                    # Into the scratch folder's place: there it is removed below.
                    if os.path.lexists(final):
                        os.rename(final, f"{scratch}-old")
                    os.rename(scratch, final)
        finally:
            building.close()
            for path in scratch, Path(f"{scratch}-old"):
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink(missing_ok=True)
    except OSError as error:
        raise DataError(
            message(
                "build_once",
                "cache",
                f"{cache} ({error.strerror or error})",
                "a folder that can be written and has room",
                "Choose another one (--cache DIR).",
            )
        ) from error
    return final


def damage(folder: Path) -> str | None:
    """What is wrong with a folder of ``build_once``, or None.

    The size of every file is compared, and the hash of all its bytes. Of a file above 1 GiB whose
    time of change is still the one that was noted, 256 pages are hashed instead. There may be no
    other file beside them.
    """
    try:
        text = (folder / MANIFEST).read_bytes()
        files = json.loads(text)["files"]
        if text != _manifest_of(files):
            return f"{MANIFEST} is not what was written"
    except FileNotFoundError:
        return f"there is no {MANIFEST}: it is incomplete, or of an older version"
    except OSError as error:
        return f"{MANIFEST} cannot be read: {error.strerror}"
    # Not what we wrote: no JSON, no dict or without these keys.
    except (ValueError, RecursionError, TypeError, KeyError):
        return f"{MANIFEST} is not what was written"
    for name, noted in files.items():
        path = folder / name
        try:
            if not path.is_file():
                return f"{name} is missing"
            stat = path.stat()
            if stat.st_size != noted["size"]:
                return f"{name} has {stat.st_size} bytes of {noted['size']}"
            sampled = stat.st_size > _READ_WHOLE and stat.st_mtime_ns == noted["changed"]
            if file_hash(path, sampled) != noted["sample" if sampled else "hash"]:
                return f"{name} has other contents"
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"
    # Folders are what was derived later; a file could change what a library reads of this one.
    for path in folder.iterdir():
        if path.name not in {MANIFEST, *files} and path.name[0] != "." and path.is_file():
            return f"{path.name} was not written with it"
    return None


def _write_manifest(folder: Path) -> None:
    files: dict[str, dict[str, Any]] = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        stat = path.stat()
        noted = {"size": stat.st_size, "changed": stat.st_mtime_ns, "hash": file_hash(path)}
        if stat.st_size > _READ_WHOLE:
            noted["sample"] = file_hash(path, sampled=True)
        files[path.relative_to(folder).as_posix()] = noted
    (folder / MANIFEST).write_bytes(_manifest_of(files))


def _manifest_of(files: dict[str, Any]) -> bytes:
    digest = hashlib.blake2b(json.dumps(files).encode(), digest_size=16).hexdigest()
    return json.dumps({"files": files, "digest": digest}, indent=1).encode()


def file_hash(path: Path, sampled: bool = False) -> str:
    """BLAKE2b of a file, or of pages at equal distances, the last one among them."""
    digest, size = hashlib.blake2b(digest_size=16), path.stat().st_size
    with path.open("rb", buffering=0) as file:
        if sampled:
            for i in range(1, _SAMPLES + 1):
                file.seek(max(0, size - _PAGE) * i // _SAMPLES)
                digest.update(file.read(_PAGE))
        else:
            while part := file.read(_AT_ONCE):
                digest.update(part)
    return digest.hexdigest()


@contextlib.contextmanager
def _locked(folder: Path, exclusive: bool = True, wait: bool = True) -> Iterator[bool]:
    """Alone with a folder, or with others that only read; True if that was granted.

    A lock ends with its process. Where the file system has none, nobody waits.
    """
    if fcntl is None:
        yield False
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        kind = fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH
        try:
            fcntl.flock(descriptor, kind if wait else kind | fcntl.LOCK_NB)
            granted = True
        except OSError:
            granted = False
        yield granted
    finally:
        # Not by closing alone: a process that was forked meanwhile holds the same lock.
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def _remove_abandoned(cache: Path, key: str) -> None:
    """Remove what processes left behind that were killed while they built this folder."""
    for path in cache.glob(f".{key}-*"):
        with contextlib.suppress(OSError), _locked(path, wait=False) as abandoned:
            if abandoned:
                shutil.rmtree(path, ignore_errors=True)
