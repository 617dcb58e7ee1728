"""The key of a cell: the hash of all that its figures depend on."""

from __future__ import annotations

import functools
import hashlib
import json
import platform
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import fastplm
from fastplm._machine import in_bf16
from fastplm.data._folder import file_hash
from fastplm.data.sources import HUB, fingerprint, is_arrow, is_table
from fastplm.finetune.tasks import TASKS
from fastplm.pretrain.objectives import OBJECTIVES
from fastplm.run.config_file import read
from fastplm.study.grid import COMMANDS, kind_of_path

#: The code that matters, by command. A change that may change a result of a command raises its
#: number, and so makes new cells; every other change of the code keeps the nights that are done.
CACHE_VERSIONS = {"pretrain": 2, "distill": 2, "finetune": 1, "score": 2}
#: The same of objectives of a pre-training that a change touched alone.
OBJECTIVE_VERSIONS = {kind.name: kind.version for kind in OBJECTIVES if kind.version is not None}
#: The same of what ELECTRA's discriminator learns.
DISCRIMINATOR_VERSIONS = {"all_tokens_mlm": 1}
#: The same of tables, whose rows several commands read.
TABLE_VERSION = 1
#: Settings that change no figure of a run.
_IGNORED = frozenset(
    "out cache resume overwrite dry_run workers save_every keep_checkpoints log_every eval_every "
    "report_to format by".split()
)
#: The commands whose keys have the precision where a machine has no bf16.
_OF_PRECISION = ("pretrain", "distill")


def key_of(facts: Mapping[str, Any]) -> str:
    """The key of a cell with these facts."""
    text = json.dumps(facts, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=10).hexdigest()


def facts_of(command: str, args: Any, models: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """What the figures of a command depend on: its code, and the settings that matter.

    Those are the settings that differ from their defaults, files by their contents.

    Args:
        command: its name.
        args: its settings.
        models: what stands for a model, by the setting that names it.
        folder: of the files that a .yaml file of several tasks names.
    """
    settings: dict[str, Any] = {}
    tables = False
    for each in fields(COMMANDS[command]):
        name = each.name
        if name in _IGNORED or name not in args.given:
            continue
        if name in models:
            settings[name] = models[name]
        elif kind_of_path(command, name):
            value = getattr(args, name)  # of a name on the Hub the folder
            parts = value if isinstance(value, list | tuple) else [value]
            settings[name] = [hash_of(Path(part), folder) for part in parts]
            tables |= any(_read_anew(command, args, part) for part in parts)
        else:
            settings[name] = json.loads(json.dumps(args.given[name]))
    facts = {
        "command": command,
        "recipe": CACHE_VERSIONS[command],
        "version": ".".join(fastplm.__version__.split(".")[:2]),
        "settings": settings,
    }
    if tables:
        facts["recipe of tables"] = TABLE_VERSION
    objective = getattr(args, "objective", None)
    if objective in OBJECTIVE_VERSIONS:
        facts["recipe of the objective"] = OBJECTIVE_VERSIONS[objective]
    if objective == "rtd" and args.electra_objective in DISCRIMINATOR_VERSIONS:
        facts["recipe of the discriminator"] = DISCRIMINATOR_VERSIONS[args.electra_objective]
    if command in _OF_PRECISION and args.precision == "auto" and not in_bf16("auto"):
        facts["precision"] = "fp32"  # "auto" is bf16 elsewhere
    if command == "finetune":  # whose keys of before had --bf16
        settings.pop("precision", None)
        settings |= {"bf16": True} if in_bf16(args.precision) else {}
    return facts


def _read_anew(command: str, args: Any, path: Any) -> bool:
    """Whether a change of ``TABLE_VERSION`` touches a file of data: tables that a command reads
    as texts, and those that are no text themselves. All of score's have its own number."""
    if command == "score":
        return False
    running = command != "finetune" or TASKS[args.task].running_text
    return is_arrow(path) or (running and is_table(path))


@functools.cache
def _hash_at(path: Path, size: int, changed: int) -> str:
    return file_hash(path)


def hash_of(path: Path, folder: Path | None = None) -> Any:
    """The hash of a file, or of the files of a folder with their names.

    Args:
        path: of it.
        folder: of the files that a .yaml file of several tasks names, which count, too.
    """
    if str(path) == "embedded":
        return f"embedded in Python {platform.python_version()}"
    if str(path).startswith(HUB):
        return fingerprint(path)
    if path.is_dir():
        inside = sorted(each for each in path.rglob("*") if each.is_file())
        return [[each.relative_to(path).as_posix(), hash_of(each)] for each in inside]
    stat = path.stat()
    own = _hash_at(path, stat.st_size, stat.st_mtime_ns)
    if folder is None or path.suffix not in (".yaml", ".yml"):
        return own
    texts = sorted({*_texts(read("study", str(path), "data"))})
    named = [Path(text) if text.startswith(HUB) else folder / text for text in texts]
    there = (each for each in named if str(each).startswith(HUB) or each.is_file())
    return [own, *map(hash_of, there)]


def _texts(value: Any) -> Iterator[str]:
    """The texts in what a YAML file holds."""
    if isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _texts(each)
    elif isinstance(value, str):
        yield value
