"""Tables that are no text: Parquet, Arrow and data sets of the Hugging Face Hub, as JSON lines."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fastplm.data._files import check_regular, refuse
from fastplm.errors import DataError, first_line

HUB = "hf:"
_FORMATS = {".parquet": "parquet", ".arrow": "arrow"}
_EXPECTED = "a file of text or a table: .parquet, .arrow, or hf:OWNER/NAME[/CONFIG][:SPLIT]"


def is_table(path: str | Path) -> bool:
    """Whether it is read by the library ``datasets``: a .parquet or .arrow file, or "hf:…"."""
    return str(path).startswith(HUB) or Path(path).suffix in _FORMATS


def json_lines(path: str | Path) -> Iterator[str]:
    """The rows of a table, one JSON object a line; a class label by its name, or null for -1.

    Args:
        path: a .parquet or .arrow file; or "hf:" and the name of a data set on the Hub, perhaps
            with a configuration behind it and a split ("hf:nyu-mll/glue/sst2:validation"). The
            split is "train" by default. The cache of ``datasets`` and ``HF_HUB_OFFLINE`` count.

    Raises:
        DataError: the library is not installed, or the table cannot be read.
    """
    table = _load(str(path))
    labels = {name: feature.names for name, feature in table.features.items() if _is_label(feature)}
    for row in table:
        for name, names in labels.items():
            label = row[name]
            row[name] = None if label is None or label < 0 else names[label]
        yield json.dumps(row, ensure_ascii=False, default=str) + "\n"


def fingerprint(path: str | Path) -> str:
    """What changes with the rows of a table: the state of its file, or what ``datasets`` says."""
    if str(path).startswith(HUB):
        return str(_load(str(path))._fingerprint)
    found = os.stat(path)
    return repr((os.path.abspath(path), found.st_size, found.st_mtime_ns))


def _is_label(feature: Any) -> bool:
    return type(feature).__name__ == "ClassLabel"


def _load(path: str) -> Any:
    if importlib.util.find_spec("datasets") is None:
        refuse(path, "without the library that reads it", "pip install datasets.", _EXPECTED)
    import datasets

    if not path.startswith(HUB):
        check_regular(Path(path))
        with _quietly(path):
            kind = _FORMATS[Path(path).suffix]
            return datasets.load_dataset(kind, data_files=path, split="train").flatten()
    name, _, split = path.removeprefix(HUB).partition(":")
    owner, *others = name.split("/")
    ways: list[tuple[str, str | None]] = [(name, None)]
    if len(others) > 1:
        ways = [(f"{owner}/{others[0]}", "/".join(others[1:]))]
    elif others:  # "glue/sst2": an owner and a name, or an old name and its configuration
        ways.append((owner, others[0]))
    for way in ways:
        with contextlib.suppress(Exception):
            return datasets.load_dataset(*way, split=split or "train").flatten()
    with _quietly(path):
        return datasets.load_dataset(*ways[0], split=split or "train").flatten()


@contextlib.contextmanager
def _quietly(path: str) -> Iterator[None]:
    """Errors of ``datasets`` in one line."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:  # of its own, of Arrow, HTTP and the system
        fix = "Check the name, the split and the network, or download it first."
        refuse(path, f"which datasets cannot read ({first_line(error):.200})", fix, _EXPECTED)
