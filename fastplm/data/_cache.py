"""Folders that are built once, by the process that comes first, and again when damaged."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from fastplm._checks import DataError, message
from fastplm.data._folder import damage, locked, say, seal


def default_cache() -> Path:
    """``$XDG_CACHE_HOME/fastplm``, by default ``~/.cache/fastplm``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fastplm"


def build_once(cache: str | Path, key: str, build: Callable[[Path], None]) -> Path:
    """The folder ``cache/key``, built by ``build(folder)`` unless it is there and whole.

    A folder gets its name only when it is complete: processes that build the same one at the same
    time, or are killed meanwhile, leave nothing incomplete under that name. A folder that is not
    whole (see ``damage``) is built again and replaced, and one line on stderr says so. A whole one
    is never replaced, so that processes that read it keep it.

    Raises:
        DataError: the cache folder cannot be written.
    """
    cache, final = Path(cache), Path(cache) / key
    if os.path.lexists(final):
        with locked(cache, exclusive=False):
            wrong = damage(final, cache=True)
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
            seal(scratch)
            with locked(cache):
                if damage(final, cache=True) is not None:
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


def _remove_abandoned(cache: Path, key: str) -> None:
    """Remove what processes left that were killed while they built this folder."""
    for path in cache.glob(f".{key}-*"):
        with contextlib.suppress(OSError), locked(path, wait=False) as abandoned:
            if abandoned:
                shutil.rmtree(path, ignore_errors=True)
