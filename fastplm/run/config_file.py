"""Settings in a file: what ``--config FILE`` reads, and what a run writes for the next one."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import stat
from collections.abc import Mapping
from dataclasses import Field, fields
from pathlib import Path
from typing import Any, ClassVar, NoReturn, Protocol

import yaml  # type: ignore[import-untyped]

from fastplm.errors import FastplmError, fail, nearest
from fastplm.run.settings import CALL, Numbers, Settings, takes_several

#: The file of a run's settings in its folder.
NAME = "settings.yaml"
_HEAD = """\
# The settings that were given; all others had their defaults (run.json has them all).
# The same again: fastplm {command} --config {name} --out ANOTHER_FOLDER
"""
#: The files that come with the library, in a folder for each command: ``--config overnight``.
SHIPPED = Path(__file__).parent / "configs"
_LARGEST = 1 << 20  # bytes


def path_of(command: str, path: str) -> str:
    """The path of a file, or of one that comes with the library, which has its name."""
    shipped = SHIPPED / command / f"{path}.yaml"
    if os.path.isfile(path):
        return path
    known = sorted(each.stem for each in shipped.parent.glob("*.yaml"))
    if path in known:
        return str(shipped)
    if fix := nearest(path, known, ""):
        got, expected = f"{path!r}, which is no file", "a file of settings, or a name"
        fail(command, "config", got, expected, fix)
    return path  # to be read, which says what is wrong


class Refuse(Protocol):
    """Raises an error about a file, which it names."""

    def __call__(self, got: str, expected: str, fix: str) -> NoReturn: ...


def named(settings: type[Settings], given: Mapping[str, Any], refuse: Refuse) -> dict[str, Any]:
    """What a file gives, by the names of the settings."""
    known: dict[str, tuple[str, Any]] = {}  # the setting of each name, and what alone it means
    for each in fields(settings):
        also = {each.name: None, **each.metadata["also"]}
        known |= {name: (each.name, value) for name, value in also.items()}
    found: dict[str, Any] = {}
    for spelling, value in given.items():
        if spelling.replace("-", "_") not in known:
            fix = nearest(
                spelling.replace("-", "_"), known, f"See fastplm {settings.where} --help."
            )
            refuse(f"the setting {spelling[:60]!r}", f"settings of {settings.where}", fix)
        name, meant = known[spelling.replace("-", "_")]
        if name in found:
            refuse(f"{spelling} in two spellings", "it once", "Leave one out.")
        if meant is not None:
            if value not in (True, False, None):
                refuse(f"{spelling}: {_shown(value)}", "true or false", "Change it.")
            value = meant if value else None
        found[name] = value
    return found


def values_of(settings: type[Settings], given: Mapping[str, Any], refuse: Refuse) -> dict[str, Any]:
    """The values of settings, each read by its declaration.

    Args:
        settings: the class of a command's arguments.
        given: what a file gives, see ``read``: a value that is null counts as not given.
        refuse: raises the error.
    """
    values = {n: v for n, v in named(settings, given, refuse).items() if v is not None}
    found: dict[str, Any] = {}
    groups: dict[str, str] = {}
    for each in fields(settings):
        if each.name in values:
            found[each.name] = _value_of(each, values[each.name], refuse)
            other = groups.setdefault(each.metadata["excludes"] or each.name, each.name)
            if other != each.name:
                refuse(f"{other} and {each.name}", "one of the two", "Leave one out.")
    return found


def _value_of(each: Field[Any], value: Any, refuse: Refuse) -> Any:
    name, number, choices = each.name, each.metadata["number"], each.metadata["choices"]
    if each.type == "bool":
        if not isinstance(value, bool):
            refuse(f"{name}: {_shown(value)}", "true or false", "Change it.")
        return value
    parts = value if isinstance(value, list) else [value]
    for part in parts:
        if isinstance(part, bool) or not isinstance(part, str | int | float):
            fix = "Write it in quotes." if isinstance(part, bool) else "Change it."
            refuse(f"{name}: {_shown(part)}", "a text or a number", fix)
    several = takes_several(each)
    if isinstance(value, list) and not several and not isinstance(number, Numbers):
        refuse(f"{name}: a list", "one value", "Change it.")
    if not parts:
        refuse(f"{name}: nothing", "a value or several", "Leave it out.")
    texts = [str(part) for part in parts]
    texts = texts if several else [",".join(texts)]
    for text in texts:
        if choices is not None and text not in choices:
            refuse(f"{name}: {_shown(text)}", " | ".join(choices), nearest(text, choices))
    try:
        found = texts if number is None else [number(text) for text in texts]
    except argparse.ArgumentTypeError:
        refuse(f"{name}: {_shown(value)}", number.expected, "Change it.")
    return found if several else found[0]


def write_settings(out: Path, args: Settings) -> None:
    """Write what was given to a run to its folder, for ``--config``."""
    given = {
        name: _plain(value)
        for name, value in args.given.items()
        if name not in CALL and value is not None
    }
    text = yaml.safe_dump(given, sort_keys=False, allow_unicode=True)
    try:
        same = yaml.safe_load(text) == given
    except yaml.YAMLError:
        same = False
    if not same:  # of characters that end a line in YAML alone
        text = yaml.safe_dump(given, sort_keys=False)
    name = shlex.quote(str(out / NAME))
    name = name if name.isprintable() else ascii(name)  # a line end would begin a setting
    (out / NAME).write_text(_HEAD.format(command=args.where, name=name) + text, "utf-8")


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return os.fspath(value) if isinstance(value, Path) else value


def read(command: str, path: str, argument: str = "config") -> Mapping[str, Any]:
    """The mapping in a file, which holds each name once; numbers are texts, as on a command line.

    YAML would take 010 for 8 and 1:30 for 90.

    Args:
        command, argument: what names the file, for errors.
        path: of the file.

    Raises:
        ArgumentValueError: the file cannot be read, or holds something else.
    """
    expected = "a YAML or JSON file of settings"
    try:
        there = os.stat(path)
        if not stat.S_ISREG(there.st_mode) or there.st_size > _LARGEST:
            got = f"{path!r}, which is no regular file, or larger than {_LARGEST:,} bytes"
            fail(command, argument, got, expected, "Check the path.")
        text = Path(path).read_text("utf-8-sig")
        if path.endswith(".json"):
            found = json.loads(text, object_pairs_hook=_once, parse_int=str, parse_float=str)
        else:
            found = yaml.load(text, _Loader)
    except FastplmError:
        raise
    except Exception as error:  # explicit tags of YAML raise whatever their contents lead to
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        fail(command, argument, f"{path!r} ({reason:.200})", expected, "Check the file.")
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        fail(command, argument, f"{path}, which holds no settings", expected, "Write 'steps: 100'.")
    return found


def _once(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    found = dict(pairs)
    names = [name for name, _ in pairs]
    if len(found) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"it has {twice!r} twice")
    return found


class _Loader(yaml.SafeLoader):
    """Refuses a name that stands twice, of which YAML's own loader takes the last value; what is
    not true, false or null is a text."""

    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {
        first: [each for each in known if each[0].rpartition(":")[2] in ("bool", "null")]
        for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        return _once(
            [tuple(self.construct_object(part, True) for part in pair) for pair in node.value]
        )


def _shown(value: Any) -> str:
    """A value for a message; a list or mapping, which anchors can make huge, by its type alone."""
    return f"a {type(value).__name__}" if isinstance(value, list | dict) else f"{value!r:.60}"
