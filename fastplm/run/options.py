"""The options of a command: those of its settings, and the file that holds some of them."""

from __future__ import annotations

import argparse
from dataclasses import MISSING, fields
from typing import Any, NoReturn

from fastplm.errors import fail
from fastplm.run.config_file import path_of, read, values_of
from fastplm.run.settings import CALL, Settings, takes_several

#: The help of ``--config``.
CONFIG = (
    "YAML or JSON file of the options' names and values, as a run writes it (OUT/settings.yaml), "
    "or the name of one that comes along (fastplm/run/configs); "
    "an option on the command line takes precedence"
)


def option_of(name: str) -> str:
    """The option of the command line of this name."""
    return f"--{name.replace('_', '-')}"


def add_settings(parser: argparse.ArgumentParser, arguments: type[Settings]) -> None:
    """Add the options of each field of a class of arguments, under its topic.

    A parser gives only what it was given, and the defaults ``on_command_line``.
    """
    none: Any = {"default": argparse.SUPPRESS, "metavar": "FILE"}
    parser.add_argument("--config", action=FromFile, settings=arguments, help=CONFIG, **none)
    topics: dict[str, Any] = {}
    for title, names in arguments.topics.items():
        topics |= dict.fromkeys(names, parser.add_argument_group(title))
    groups: dict[str, Any] = {}
    needed = []
    for each in fields(arguments):
        known, option = each.metadata, option_of(each.name)
        topic, group = topics.get(each.name, parser), known["excludes"]
        if group is not None and group not in groups:
            groups[group] = topic.add_mutually_exclusive_group()
        place = groups[group] if group else topic
        default = each.default if known["default"] is None else known["default"]
        help = known["help"]
        given: dict[str, Any] = {"action": "store_true"}
        if each.type != "bool":
            given = {"type": known["number"], "choices": known["choices"]}
            given["metavar"] = known["metavar"]
            given["nargs"] = "+" if takes_several(each) else None
            given["required"] = known["required"] and group is None
            given["required"] |= default is MISSING and each.default_factory is MISSING
            # Without a default of its own an option has none to show: its help says what happens.
            help += "" if default in (None, "", MISSING) else f" (default: {default})"
        own: dict[str, Any] = {"dest": each.name, "default": argparse.SUPPRESS}
        same = [option_of(name) for name, value in known["also"].items() if value is None]
        place.add_argument(option, *same, help=help, **own, **given)
        if known["default"] is not None:
            parser.set_defaults(**{each.name: known["default"]})
        for name, value in known["also"].items():
            if value is not None:
                own |= {"action": "store_const", "const": value}
                place.add_argument(option_of(name), help=f"the same as {option} {value}", **own)
        if group is not None:
            place.required |= known["required"]
        if known["required"] or given.get("required"):
            needed.append(f"{option} {known['metavar'] or each.name.upper()}")
    parser.usage = f"%(prog)s {' '.join(needed)} [option ...]"


class FromFile(argparse.Action):
    """``--config FILE``: the values of a file, for ``with_file``.

    Args:
        settings: the class of the command's arguments.

    Raises:
        ArgumentValueError: the file cannot be read, or holds what is no setting.
    """

    def __init__(self, *args: Any, settings: type[Settings], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.settings = settings

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: Any, path: Any, option: Any = None
    ) -> None:
        command = self.settings.where
        path = path_of(command, path)

        def refuse(got: str, expected: str, fix: str) -> NoReturn:
            fail(command, "config", f"{path}, with {got}", expected, fix)

        given = read(command, path)
        for name in given:
            if name.replace("-", "_") in CALL:
                fix = f"Give --{name.replace('_', '-')} on the command line."
                refuse(f"the setting {name}", "no setting of one call", fix)
        found = {"config": path, **values_of(self.settings, given, refuse)}
        namespace.file = {**getattr(namespace, "file", {}), **found}
        each: Any
        for each in (*parser._actions, *parser._mutually_exclusive_groups):
            names = {action.dest for action in getattr(each, "_group_actions", [each])}
            each.required = each.required and names.isdisjoint(found)


def with_file(parser: argparse.ArgumentParser, namespace: Any) -> None:
    """Add the values of ``--config`` to those of the command line, which take precedence.

    Of two options that exclude each other the one on the command line takes the place of the one in
    the file.
    """
    found = vars(namespace).pop("file", {})
    given = {n for n, value in vars(namespace).items() if value is not parser.get_default(n)}
    for group in parser._mutually_exclusive_groups:
        names = {action.dest for action in group._group_actions}
        given |= set() if names.isdisjoint(given) else names
    vars(namespace).update({n: value for n, value in found.items() if n not in given})
