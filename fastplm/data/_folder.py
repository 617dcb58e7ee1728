"""What is written to disk: atomic writes, manifests, locks, and caches that are built once."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from fastplm.errors import DataError, message

try:
    import fcntl
except ImportError:  # there is none on Windows, where folders are not locked
    fcntl = None  # type: ignore[assignment]

#: The sizes and hashes of a folder's files; written last.
MANIFEST = "manifest.json"
#: The card of a model, which no manifest has: users may edit it.
CARD = "README.md"
_LARGE = 1 << 30  # bytes; in a cache, of a larger file only some pages are read
_PAGES, _PAGE = 256, 1 << 12
_AT_ONCE = 1 << 22


def first_process() -> bool:
    """Whether this process of torchrun is the one that writes."""
    return (os.environ.get("RANK") or "0") == "0"


def say(line: str) -> None:
    """Print a line about what is done on stderr, beside the results."""
    if line and first_process():
        print(line, file=sys.stderr, flush=True)


def too_many_files(error: OSError) -> bool:
    """Whether this process has too many open files, which says nothing about the one it opens."""
    return error.errno in (errno.EMFILE, errno.ENFILE)


# --- files that are complete ----------------------------------------------------------------------


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Gives the name under which a file is written; it gets its own when all of it is on the disk.

    A link stays, and its target is written. Two processes do not write the same file: each locks
    its folder, or the file (``acquire_lock``).
    """
    path = path.resolve()
    part = path.with_name(f".{path.name}.part")
    try:
        yield part
        with part.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a dict as JSON, atomically."""
    with atomic_write(path) as part:
        part.write_text(json.dumps(content, indent=2) + "\n", "utf-8")


def write_manifest(folder: Path, names: Iterable[str] | None = None, **facts: Any) -> None:
    """Write the manifest of a folder, or of ``names`` in it, when the files are on the disk.

    It records the ``facts``, too.
    """
    roots = [folder] if names is None else [folder / name for name in names]
    inside = [path for root in roots for path in ([root] if root.is_file() else root.rglob("*"))]
    files: dict[str, dict[str, Any]] = {}
    apart = {folder / MANIFEST, *(path for path in inside if path.name == CARD)}
    for path in sorted(path for path in inside if path.is_file() and path not in apart):
        with path.open("rb") as file:
            os.fsync(file.fileno())
        stat = path.stat()
        noted = {"size": stat.st_size, "changed": stat.st_mtime_ns, "hash": file_hash(path)}
        if stat.st_size > _LARGE:
            noted["sample"] = file_hash(path, sampled=True)
        files[path.relative_to(folder).as_posix()] = noted
    with atomic_write(folder / MANIFEST) as part:
        part.write_bytes(_manifest(files, facts))


def verify(folder: Path, *, cache: bool = False, **facts: Any) -> str | None:
    """What is wrong with a folder that has a manifest, or None.

    The size of each file is compared, and the hash of its bytes; the manifest must have the
    ``facts``. A folder of a ``cache`` is read at every start: there a file above 1 GiB whose time
    of change is the recorded one is hashed by 256 pages alone, and no other file may be in it.
    """
    try:
        text = (folder / MANIFEST).read_bytes()
        manifest = json.loads(text)
        files = manifest.pop("files")
        for name, value in facts.items():
            if manifest[name] != value:
                return f"{MANIFEST} is of {name} {manifest[name]}"
        manifest.pop("digest", None)
        if text != _manifest(files, manifest):
            return f"{MANIFEST} is not what was written"
        for name, noted in files.items():
            path = folder / name
            if not path.is_file():
                return f"{name} is missing"
            stat = path.stat()
            if stat.st_size != noted["size"]:
                return f"{name} has {stat.st_size} bytes of {noted['size']}"
            sampled = cache and stat.st_size > _LARGE and stat.st_mtime_ns == noted["changed"]
            expected = noted["sample" if sampled else "hash"]
            if file_hash(path, sampled) != expected:
                return f"{name} has other contents"
        # Folders were derived later; but a file could change what a library reads of this one.
        for path in folder.iterdir() if cache else ():
            if path.name not in {MANIFEST, *files} and path.name[0] != "." and path.is_file():
                return f"{path.name} was not written with it"
    except FileNotFoundError:
        return f"there is no {MANIFEST}, which is written last"
    except OSError as error:
        if too_many_files(error):
            raise
        return f"{Path(error.filename or MANIFEST).name} cannot be read: {error.strerror}"
    # A manifest with other contents is no JSON, no dict or has no such keys.
    except (ValueError, RecursionError, TypeError, AttributeError, KeyError):
        return f"{MANIFEST} is not what was written"
    return None


def file_hash(path: Path, sampled: bool = False) -> str:
    """BLAKE2b of a file, or of pages at equal distances, the last one among them."""
    digest, size = hashlib.blake2b(digest_size=16), path.stat().st_size
    with path.open("rb", buffering=0) as file:
        if sampled:
            for i in range(1, _PAGES + 1):
                file.seek(max(0, size - _PAGE) * i // _PAGES)
                digest.update(file.read(_PAGE))
        else:
            while part := file.read(_AT_ONCE):
                digest.update(part)
    return digest.hexdigest()


def _manifest(files: dict[str, Any], facts: dict[str, Any]) -> bytes:
    digest = hashlib.blake2b(json.dumps(files).encode(), digest_size=16).hexdigest()
    return json.dumps({**facts, "files": files, "digest": digest}, indent=1).encode()


# --- locks, which end with their process ----------------------------------------------------------


def lock(descriptor: int, *, exclusive: bool = True, wait: bool = False) -> bool | None:
    """Lock an open file; False if another process has it, None where there are no locks."""
    if fcntl is None:
        return None
    kind = fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH
    try:
        fcntl.flock(descriptor, kind if wait else kind | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return None


def unlock(descriptor: int) -> None:
    """Unlock and close a file of ``lock``."""
    # Closing is not enough: a process that was forked meanwhile has the same lock.
    if fcntl is not None:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


@contextlib.contextmanager
def locked(folder: Path, *, exclusive: bool = True, wait: bool = True) -> Iterator[bool]:
    """Lock a folder, alone or with others that only read it; gives whether that was granted."""
    descriptor = None
    if fcntl is not None:
        with contextlib.suppress(PermissionError):  # a folder that cannot be read
            descriptor = os.open(folder, os.O_RDONLY)
    if descriptor is None:
        yield False
        return
    try:
        yield lock(descriptor, exclusive=exclusive, wait=wait) is True
    finally:
        unlock(descriptor)


def acquire_lock(path: Path, refuse: Callable[[str], NoReturn]) -> int:
    """Make and lock a file; gives its descriptor, for ``release_lock``.

    ``refuse``, called with the name of the process that has it, raises the error.
    """
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        if lock(handle) is False:
            holder = os.read(handle, 200).decode(errors="replace") or "another one"
            os.close(handle)
            refuse(holder)
        # The process that held the lock may have removed the file after it was opened here.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(handle), os.stat(path)):
                os.ftruncate(handle, 0)
                os.write(handle, f"{os.getpid()} of {platform.node()}".encode())
                return handle
        os.close(handle)


def release_lock(path: Path, handle: int) -> None:
    """Remove and unlock a file of ``acquire_lock``, which may have been moved to ``path``."""
    with contextlib.suppress(OSError):
        path.unlink()
    with contextlib.suppress(OSError):
        unlock(handle)


# --- folders of a cache -------------------------------------------------------------------------


def default_cache() -> Path:
    """``$XDG_CACHE_HOME/fastplm``, by default ``~/.cache/fastplm``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fastplm"


def build_once(cache: str | Path, key: str, build: Callable[[Path], None]) -> Path:
    """The folder ``cache/key``, built by ``build(folder)`` unless it is there and complete.

    A folder gets its name only when it is complete: processes that build the same one at the same
    time, or are killed meanwhile, leave nothing incomplete under that name. A folder that is not
    complete (see ``verify``) is built again and replaced, and one line on stderr says so. A
    complete one is never replaced, so that processes that read it keep it.

    Raises:
        DataError: the cache folder cannot be written.
    """
    cache, final = Path(cache), Path(cache) / key
    if os.path.lexists(final):
        with locked(cache, exclusive=False):
            wrong = verify(final, cache=True)
        if wrong is None:
            return final
        say(f"fastplm: the cache {final} is damaged ({wrong}): it is built again")
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with locked(cache):
            _remove_abandoned(cache, key)
            scratch = Path(tempfile.mkdtemp(prefix=f".{key}-", dir=cache))
            building = contextlib.ExitStack()
            building.enter_context(locked(scratch))
        try:
            build(scratch)
            write_manifest(scratch)
            with locked(cache):
                if verify(final, cache=True) is not None:
                    # Moved to the place of the scratch folder, it is removed below.
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
        if too_many_files(error):
            raise
        got, fix = f"{cache} ({error.strerror or error})", "Choose another one (--cache DIR)."
        expected = "a folder that can be written and has room"
        raise DataError(message("build_once", "cache", got, expected, fix)) from error
    return final


def _remove_abandoned(cache: Path, key: str) -> None:
    """Remove what processes left that were killed while they built this folder."""
    for path in cache.glob(f".{key}-*"):
        with contextlib.suppress(OSError), locked(path, wait=False) as abandoned:
            if abandoned:
                shutil.rmtree(path, ignore_errors=True)
