"""The tokens of an answer in a text, and the text of a span of tokens.

Offsets of tokenizers are not believed: those of accents and vowel signs that a tokenizer takes away
belong to no token, a byte-level one may begin after its first letter, and others hold white space.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence

#: (first character, last character + 1) of a token.
Place = tuple[int, int]
Places = Sequence[Place | None]


def places_of(text: str, offsets: Iterable[Place]) -> dict[Place, Place]:
    """{the offsets of a token: the characters that it stands for}, of all tokens of a text.

    White space is left out, and so are tokens of white space alone. Marks that no token has belong
    to the token before them; letters and digits that no token has, to the one after them.
    """
    found: dict[Place, Place] = {}
    before, end = None, 0  # the token that ends last, and where

    def take_marks(until: int) -> None:
        nonlocal end
        while before is not None and end < until and _is_mark(text[end]):
            end += 1
            found[before] = found[before][0], end

    for offset in sorted(set(offsets)):
        first, last = offset
        while first < last and text[first].isspace():
            first += 1
        while first < last and text[last - 1].isspace():
            last -= 1
        if first == last:
            continue
        take_marks(first)
        while first > end and (text[first - 1].isalnum() or _is_mark(text[first - 1])):
            first -= 1
        found[offset] = first, last
        if last >= end:
            before, end = offset, last
    take_marks(len(text))
    return found


def _is_mark(letter: str) -> bool:
    return unicodedata.category(letter)[0] == "M"


def answer_places(known: Iterable[Place], start: int, end: int) -> Place | None:
    """The characters that the tokens of an answer stand for; None if it has no token.

    Args:
        known: the places of all tokens of the text.
        start, end: the characters of the answer.
    """
    inside = [place for place in known if place[0] < end and place[1] > start]
    return (min(inside)[0], max(last for _, last in inside)) if inside else None


def answer_tokens(places: Places, wanted: Place | None) -> tuple[int, int]:
    """The first and last token of an answer; (0, 0) if the window does not hold all of it.

    Args:
        places: of each token of a window; None for those that are not of the text.
        wanted: ``answer_places``.
    """
    first, last = wanted or (0, 0)
    inside = [(i, p) for i, p in enumerate(places) if p and p[0] < last and p[1] > first]
    whole = inside and (inside[0][1][0], inside[-1][1][1]) == wanted
    return (inside[0][0], inside[-1][0]) if whole else (0, 0)
