"""Settings in a file: what ``--config FILE`` reads, and what a run writes for the next one."""

from __future__ import annotations

import argparse
import difflib
import json
import os
import shlex
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import yaml  # type: ignore[import-untyped]

from fastplm.errors import FastplmError, fail
from fastplm.run.settings import CALL, Numbers, Settings

#: The file of a run's settings in its folder.
NAME = "settings.yaml"
_HEAD = """\
# The settings that were given; all others had their defaults (run.json has them all).
# The same again: fastplm {command} --config {name} --out ANOTHER_FOLDER
"""
#: The files that come with the library, in a folder for each command: ``--config overnight``.
SHIPPED = Path(__file__).parent / "configs"
_LARGEST = 1 << 20  # bytes
# What argparse takes for --config, as no other option begins so.
_SHORTEST = "--con"


def with_config(parser: argparse.ArgumentParser, words: Sequence[str]) -> list[str]:
    """The words of a command, those of its ``--config FILE`` first, so that all others count.

    If two options exclude each other, the one among the words takes the place of the one in the
    file. The name of a file that comes with the library is replaced by its path.

    Args:
        parser: of the command.
        words: what follows its name.

    Raises:
        ArgumentValueError: the file cannot be read, or holds what is no setting.
    """
    given = [word.split("=", 1)[0] for word in words]
    at = [
        i
        for i, name in enumerate(given)
        if len(name) >= len(_SHORTEST) and "--config".startswith(name)
    ]
    if not at or (at[-1] == len(words) - 1 and "=" not in words[-1]):
        return list(words)  # argparse says that the file is missing
    command, last = parser.prog.split()[-1], at[-1]
    joined = "=" in words[last]
    path = words[last].partition("=")[2] if joined else words[last + 1]
    shipped = SHIPPED / command / f"{path}.yaml"
    if not os.path.isfile(path):
        known = sorted(each.stem for each in shipped.parent.glob("*.yaml"))
        names = difflib.get_close_matches(path, known, n=1)
        if path in known:
            path = str(shipped)
        elif names:
            got, expected = f"{path!r}, which is no file", "a file of settings, or a name"
            fail(command, "config", got, expected, f"Did you mean {names[0]}?")
    groups = [
        [option for action in group._group_actions for option in action.option_strings]
        for group in parser._mutually_exclusive_groups
    ]
    replaced = {option for group in groups if not {*group}.isdisjoint(given) for option in group}
    actions = {
        option: action
        for option, action in parser._option_string_actions.items()
        if option.startswith("--") and option not in ("--help", "--config")
    }
    added: list[str] = []
    seen = set()
    for name, value in read(command, path).items():
        option = f"--{name.replace('_', '-')}"
        if option not in actions:
            close = difflib.get_close_matches(option, actions, n=1)
            fix = f"Did you mean {close[0][2:]}?" if close else f"See fastplm {command} --help."
            _refuse(command, path, f"the setting {name[:60]!r}", f"settings of {command}", fix)
        if option in seen:
            _refuse(command, path, f"{name} in two spellings", "it once", "Leave one out.")
        seen.add(option)
        if option[2:].replace("-", "_") in CALL:
            fix = f"Give {option} on the command line."
            _refuse(command, path, f"the setting {name}", "no setting of one call", fix)
        checked = _words(command, path, option, actions[option], value)
        added += checked if option not in replaced else []
    following = words[last + (1 if joined else 2) :]
    return [*added, *words[:last], f"--config={path}", *following]


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


def _words(command: str, path: str, option: str, action: argparse.Action, value: Any) -> list[str]:
    """An option and its value as on a command line."""
    name = option[2:]
    if value is None:
        return []
    if action.nargs == 0:
        if not isinstance(value, bool):
            _refuse(command, path, f"{name}: {_shown(value)}", "true or false", "Change it.")
        return [option] if value else []
    several = isinstance(value, list)
    parts = value if several else [value]
    for part in parts:
        if isinstance(part, bool) or not isinstance(part, str | int | float):
            fix = "Write it in quotes." if isinstance(part, bool) else "Change it."
            _refuse(command, path, f"{name}: {_shown(part)}", "a text or a number", fix)
    if several and action.nargs is None and not isinstance(action.type, Numbers):
        _refuse(command, path, f"{name}: a list", "one value", "Change it.")
    if action.nargs is None:
        return [f"{option}={','.join(map(str, parts))}"]
    for part in map(str, parts):
        if part.startswith("-") and not part[1:].replace(".", "", 1).isdecimal():
            expected = "values that do not begin with -"
            _refuse(command, path, f"{name}: {_shown(part)}", expected, "Write ./-NAME of a file.")
    if not parts:
        _refuse(command, path, f"{name}: nothing", "a value or several", "Leave it out.")
    return [option, *map(str, parts)]


def _shown(value: Any) -> str:
    """A value for a message; a list or mapping, which anchors can make huge, by its type alone."""
    return f"a {type(value).__name__}" if isinstance(value, list | dict) else f"{value!r:.60}"


def _refuse(command: str, path: str, got: str, expected: str, fix: str) -> NoReturn:
    fail(command, "config", f"{path}, with {got}", expected, fix)
