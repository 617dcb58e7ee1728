"""Folders that are built once, whoever comes first."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from fastplm._checks import DataError, message


def default_cache() -> Path:
    """``$XDG_CACHE_HOME/fastplm``, by default ``~/.cache/fastplm``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fastplm"


def build_once(cache: str | Path, key: str, build: Callable[[Path], None]) -> Path:
    """The folder ``cache/key``, built by ``build(folder)`` unless it is there.

    A folder appears under its name only when it is complete: processes that build the same one at
    the same time, or die while building, leave nothing half-written behind that name.

    Raises:
        DataError: the cache folder cannot be written.
    """
    final = Path(cache) / key
    if final.is_dir():
        return final
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{key}-", dir=final.parent))
    except OSError as error:
        raise DataError(
            message(
                "build_once",
                "cache",
                f"{cache} ({error.strerror})",
                "a folder that can be written",
                "Choose another one (--cache DIR).",
            )
        ) from error
    try:
        build(scratch)
        os.rename(scratch, final)
    except OSError:
        if not final.is_dir():
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return final
