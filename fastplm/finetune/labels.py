"""What the labels of examples are: numbers, spellings of one label, and how many of each."""

from __future__ import annotations

import math
import unicodedata
from collections import defaultdict
from collections.abc import Mapping

#: What a label that is missing is often written as, in small letters.
_MISSING = frozenset(("", "nan", "null", "none", "n/a", "na", "<na>", "empty"))
#: Variation selectors, which choose how a character is drawn and are not seen themselves.
_SELECTORS = "\ufe0e\ufe0f"
# If there are more labels than this, the most frequent and the rarest are shown.
_SHOWN, _FREQUENT, _RARE = 20, 12, 4
_WARNINGS, _LONGEST = 5, 40


def number(text: str) -> float | None:
    """The finite number that a text is, if it is one; Python's ``1_000`` is none."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) and "_" not in text else None


def essence(label: str) -> str:
    """What is left of a label without case, spaces, invisible characters and normal form.

    What is left of a number is its value, however it is written.
    """
    value = number(label)
    if value is not None:
        return repr(value + 0.0)  # -0 is 0
    folded = unicodedata.normalize("NFKC", label).casefold()
    kept = (c for c in folded if not c.isspace() and c not in _SELECTORS)
    return unicodedata.normalize(
        "NFKC", "".join(c for c in kept if unicodedata.category(c) != "Cf")
    )


def shown_counts(counts: Mapping[str, int]) -> str:
    """Each label with its count, the rarest last; of very many labels some."""
    order = sorted(counts, key=lambda label: (-counts[label], label))
    parts = [f"{_shown(label)} {counts[label]:,}" for label in order]
    if len(parts) > _SHOWN:
        left = len(parts) - _FREQUENT - _RARE
        parts[_FREQUENT:-_RARE] = [f"… {left:,} more …"]
        return f"{len(order):,} labels: {', '.join(parts)}"
    return ", ".join(parts)


def doubtful_labels(counts: Mapping[str, int]) -> list[str]:
    """A line for each group of labels that may be one, and one for labels that may be missing."""
    groups: dict[str, list[str]] = defaultdict(list)
    for label in sorted(counts, key=lambda label: (-counts[label], label)):
        groups[essence(label)].append(label)
    lines = []
    for same in (labels for labels in groups.values() if len(labels) > 1):
        named = [f"{ascii(label)} ({counts[label]:,})" for label in same]
        how = "only in case, spaces, invisible characters or Unicode's normal form"
        if number(same[0]) is not None:
            how = "only in how a number is written"
        lines.append(
            f"Warning: the labels {' and '.join(named)} differ {how}, and each is a class of its "
            "own. If they are one, write them alike in the file."
        )
    if len(lines) > _WARNINGS:
        lines[_WARNINGS:] = [f"Warning: {len(lines) - _WARNINGS:,} more such groups of labels."]
    missing = [label for key, same in groups.items() if key in _MISSING for label in same]
    if missing:
        named = [f"{ascii(label)} ({counts[label]:,})" for label in missing]
        lines.append(
            f"Warning: {' and '.join(named)} may stand for labels that are missing; here that is a "
            "class. If it is none, delete these rows."
        )
    return lines


def _shown(label: str) -> str:
    label = label if len(label) <= _LONGEST else label[: _LONGEST - 1] + "…"
    return label if label.isprintable() else ascii(label)
