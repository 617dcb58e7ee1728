"""An extension of griffe: our docstrings in the words that its Google parser reads.

A docstring here is written to be read as it stands. Griffe knows one name an argument and sections
of its own alone, so before it parses one,

- ``key, value: …`` becomes two arguments, and ``the others: …`` all that are not named elsewhere;
- sections of ours (Numerics, Determinism, …) and ``Source:``, ``Reference:`` become paragraphs that
  begin in bold, as does what a class returns when it is called, for which griffe has no type;
- the arguments of a class without a constructor of its own become attributes;
- ``<s>`` is text and no tag.

A class of ``fastplm.models`` without a docstring gets that of ``documented``.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Sequence
from typing import Any

import griffe

_PARSED = ("Args", "Attributes", "Examples", "Raises", "Returns", "Warns", "Yields")
_OURS = ("Cost", "Determinism", "Numerics", "Randomness", "Reference", "Source")
_NAME = "|".join((*_PARSED, *_OURS))
_HEADER = re.compile(rf"((?:{_NAME})(?:, (?:{_NAME}))*):(?: (\S.*))?")
_ITEM = re.compile(r"    ([\w*]+(?:, [\w*]+)*|the others): ?(.*)")


def tidy(text: str, parameters: Sequence[str] | None) -> str:
    """The docstring for griffe.

    Args:
        text: a docstring without common indentation.
        parameters: of the function, in their order; None for what takes no arguments itself.
    """
    out: list[str] = []
    lines = text.split("\n")
    at = 0
    while at < len(lines):
        header = _HEADER.fullmatch(lines[at])
        body = _indented(lines, at + 1)
        if header is None or not (body or header[2]):
            out.append(_escaped(lines[at]))
            at += 1
            continue
        at += 1 + len(body)
        name, rest = header.groups()
        if name == "Args" and parameters is not None:
            out += ["Args:", *_arguments(body, parameters)]
        elif name in ("Args", "Attributes"):
            out += ["Attributes:", *_arguments(body, ())]
        elif name in _PARSED and rest is None and (name != "Returns" or parameters is not None):
            if name == "Returns":  # what stands before a colon would be taken for the type
                body[0] = _outside_code(":(?= |$)", "&#58;", body[0])
            out += [f"{name}:", *map(_escaped, body)]
        else:
            first = [f"**{name}.** {_escaped(rest)}"] if rest else [f"**{name}**", ""]
            out += ["", *first, *(_escaped(line[4:]) for line in body), ""]
    return "\n".join(out)


def _indented(lines: Sequence[str], start: int) -> list[str]:
    """The lines of a section's body, without the empty ones behind it."""
    end = start
    while end < len(lines) and (lines[end].startswith("    ") or not lines[end].strip()):
        end += 1
    while end > start and not lines[end - 1].strip():
        end -= 1
    return list(lines[start:end])


def _arguments(body: Sequence[str], parameters: Sequence[str]) -> list[str]:
    """The items of a section, one name each."""
    # Where the names of one item do not fit into a line, the next line goes on.
    body = re.sub(r"(?m)^(    \w.*,)\n    (?=\w)", r"\1 ", "\n".join(body)).split("\n")
    items: list[tuple[list[str], list[str]]] = []
    for line in body:
        match = _ITEM.fullmatch(line)
        if match:
            items.append((match[1].split(", "), [_escaped(match[2])]))
        elif items:
            items[-1][1].append(_escaped(line))
    named = {name for names, _ in items for name in names}
    others = [name for name in parameters if name not in named and name != "self"]
    out = []
    for names, text in items:
        for name in others if names == ["the others"] else names:
            out += [f"    {name}: {text[0]}", *text[1:]]
    return out


def _escaped(line: str) -> str:
    return re.sub("::$", ":", _outside_code(r"<(?=[\w/])", "&lt;", line))


def _outside_code(pattern: str, replacement: str, line: str) -> str:
    parts = re.split(r"(`+[^`]+`+)", line)
    parts[::2] = [re.sub(pattern, replacement, part) for part in parts[::2]]
    return "".join(parts)


class Docstrings(griffe.Extension):
    """Puts every docstring through ``tidy``."""

    def on_instance(self, *, obj: Any, **_: Any) -> None:
        if not obj.is_class:
            _tidy(obj, obj if obj.is_function else None)

    def on_class_members(self, *, cls: Any, **_: Any) -> None:
        if cls.docstring is None and cls.path.startswith("fastplm.models."):
            made = getattr(importlib.import_module(cls.module.path), cls.name, None)
            if made is not None:
                cls.docstring = griffe.Docstring(inspect.getdoc(made) or "", parent=cls)
        _tidy(cls, cls.members.get("__init__"))


def _tidy(obj: Any, called: Any) -> None:
    if obj.docstring is not None:
        parameters = None if called is None else [given.name for given in called.parameters]
        obj.docstring.value = tidy(obj.docstring.value, parameters)
