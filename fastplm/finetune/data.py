"""The examples that are held out, and what their labels are."""

from __future__ import annotations

import math
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence

import torch

from fastplm.data.examples import Example
from fastplm.errors import DataError, check


def hold_out(
    examples: Sequence[Example],
    share: float,
    labels: Callable[[Example], Collection[str]] = lambda example: (),
    fix: str = "Give --eval-data.",
) -> tuple[list[Example], list[Example]]:
    """Examples to train on, and about ``share`` of them to judge by; the same ones every time.

    Examples of one group (the questions about one paragraph) land on one side. The same
    share of the examples of each label is held out, and never all of them.

    Args:
        examples: all of a file.
        share: of the groups.
        labels: of an example; the rarest is the one that it counts for.
        fix: what the error advises.

    Raises:
        DataError: there is one group alone, or none without which all labels are there.
    """
    groups: dict[int, set[str]] = defaultdict(set)
    for example in examples:
        groups[example.group].update(labels(example))
    names = sorted(groups)
    order = torch.randperm(
        len(names), generator=torch.Generator().manual_seed(0), device="cpu"
    ).tolist()
    left = Counter(label for found in groups.values() for label in found)
    strata: dict[str, list[int]] = defaultdict(list)
    for index in order:
        found = groups[names[index]]
        strata[min(found, key=lambda label: (left[label], label), default="")].append(names[index])
    # The first of ten has place 0.05, of a hundred 0.005: so small places are a share of each.
    places = {
        group: (rank + 0.5) / len(stratum)
        for stratum in strata.values()
        for rank, group in enumerate(stratum)
    }
    held: set[int] = set()
    for index in sorted(order, key=lambda index: places[names[index]]):
        found = groups[names[index]]
        wanted = len(held) < max(1, round(share * len(names)))
        if wanted and len(names) > 1 and all(left[label] > 1 for label in found):
            left.subtract(found)
            held.add(names[index])
    why = " of one kind of origin" if len(names) == 1 else ", each the only one with its label"
    got, expected = f"{len(examples)} examples{why}", "enough to hold some out"
    check(bool(held), "read_examples", "data", got, expected, fix, DataError)
    rest = [example for example in examples if example.group not in held]
    return rest, [example for example in examples if example.group in held]


# --- labels ---------------------------------------------------------------------------------------

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
