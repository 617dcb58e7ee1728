"""The errors that fastplm raises on purpose, and the checks that need no tensor (and no torch)."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import UnionType
from typing import NoReturn


class FastplmError(Exception):
    """Base class of every error that fastplm raises on purpose."""


class ArgumentValueError(FastplmError, ValueError):
    """An argument has a wrong shape, size, device or value."""


class ArgumentTypeError(FastplmError, TypeError):
    """An argument has a wrong type or dtype."""


class BackendError(FastplmError, RuntimeError):
    """A backend was forced that cannot run this call; the message holds every reason.

    Args:
        text: the message.
        reason: why the forced backend cannot run it.
    """

    def __init__(self, text: str, reason: str = "") -> None:
        super().__init__(text)
        self.reason = reason


class UnsupportedError(FastplmError, NotImplementedError):
    """A documented argument that no backend implements yet; the message says what to use."""


class DataError(FastplmError, ValueError):
    """A corpus, tokenizer, checkpoint or file on disk is missing, empty or of the wrong kind."""


class TooLittleTextError(DataError):
    """A corpus is readable, but too small for what is asked of it."""


class DivergenceError(FastplmError, ArithmeticError):
    """A training came to a loss, gradient or weight that is not finite."""

    EXIT_CODE = 3  # of a command; no other error has it


_CHOOSE = "Choose one of these."
#: The longest text of a value that a message repeats.
_LONGEST = 60


def message(where: str, argument: str, got: object, expected: str, fix: str) -> str:
    """The one form every error takes: ``where: `argument` got …; expected …; fix.``"""
    if type(got) is int:
        got = shown(got)
    return f"{where}: `{argument}` got {got}; expected {expected}. {fix}"


def shown(value: object) -> str:
    """How a message names a value, in one short line."""
    if isinstance(value, int):
        # Python refuses to write an int of thousands of digits.
        return repr(value) if value.bit_length() < 1000 else f"an int of {value.bit_length()} bits"
    if isinstance(value, (str, bytes)):
        text = repr(value[:_LONGEST])
        return text if len(value) <= _LONGEST else f"{text} and more"
    if value is None or isinstance(value, (float, complex)):
        return repr(value)
    return f"a {type(value).__name__}"


def first_line(error: Exception) -> str:
    """What an error of a library says, in a line."""
    lines = str(error).strip().splitlines()
    if not lines:
        return type(error).__name__
    # A line that ends so says where, and the next one what.
    shown = lines[: 1 + lines[0].rstrip().endswith(":")]
    return " ".join(" ".join(shown).split())


def fail(
    where: str,
    argument: str,
    got: object,
    expected: str,
    fix: str = "Correct it.",
    error: type[FastplmError] = ArgumentValueError,
) -> NoReturn:
    """Raise ``error`` with the house message; ``fix`` only where it says more than "Correct it."

    Code that is traced (ops, nn, models, hf) writes ``if …: fail(…)``, so that no message is built
    before it is needed: an f-string with a size would make the size a constant of the graph.
    """
    raise error(message(where, argument, got, expected, fix))


def check(
    condition: bool,
    where: str,
    argument: str,
    got: object,
    expected: str,
    fix: str = "Correct it.",
    error: type[FastplmError] = ArgumentValueError,
) -> None:
    """``fail`` unless ``condition`` holds; for code that is never traced."""
    if not condition:
        fail(where, argument, got, expected, fix, error)


@contextmanager
def about(where: str, argument: str) -> Iterator[None]:
    """In this block an error of a function that reads a path names the argument that it is of."""
    try:
        yield
    except FastplmError as error:
        found = re.match(r"(\w+): `(?:directory|paths?|store)` got ", str(error))
        if found is None or found[1] == where:
            raise
        text = f"{where}: `{argument}` got {str(error)[found.end() :]}"
        raise type(error)(text) from error


def nearest(word: str, known: Iterable[str], otherwise: str = _CHOOSE) -> str:
    """What to do about a word that is none of those that are known."""
    close = difflib.get_close_matches(word, [*known], n=1)
    return f"Did you mean {close[0]}?" if close else otherwise


def check_choice(where: str, argument: str, value: object, choices: Sequence[str]) -> None:
    """``value`` is one of ``choices``."""
    if not isinstance(value, str) or value not in choices:
        asked = value.strip().lower() if isinstance(value, str) else ""
        nearest = difflib.get_close_matches(asked, choices, 1)
        fix = f"Choose {nearest[0]!r}, or another one of these." if nearest else _CHOOSE
        fail(where, argument, shown(value), " | ".join(choices), fix)


def check_type(
    where: str,
    argument: str,
    value: object,
    kind: type | UnionType | tuple[type, ...],
    expected: str,
    fix: str = "Correct it.",
) -> None:
    """``value`` is of ``kind``, which ``expected`` puts in words."""
    if not isinstance(value, kind):
        fail(where, argument, f"a {type(value).__name__}", expected, fix, ArgumentTypeError)
