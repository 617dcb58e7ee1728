"""Labels: spellings that may be one, and how many there are of each."""

from __future__ import annotations

from fastplm.finetune.labels import doubtful_labels, shown_counts


def test_labels_that_may_be_one():
    alike = [
        ("good", "Good"),
        ("not sure", "not  sure"),
        ("caf\u00e9", "cafe\u0301"),
        ("good", "go\u200bod"),
        ("1", "01"),
        ("1", "1.0"),
        ("\u2764", "\u2764\ufe0f"),
        ("\uff21", "a"),
    ]
    for pair in alike:
        (line,) = doubtful_labels({pair[0]: 20, pair[1]: 3, "other": 9})
        assert f"{ascii(pair[0])} (20) and {ascii(pair[1])} (3) differ only in " in line
        assert ("how a number is written" in line) == (pair[0] == "1")
    assert (
        doubtful_labels(dict.fromkeys(["1", "-1", "10", "a", "b", "1_0", "good", "goods"], 1)) == []
    )
    for missing in ("nan", "None", "NULL", "n/a", "\u200b"):
        (line,) = doubtful_labels({"a": 1, missing: 2})
        assert f"{ascii(missing)} (2) may stand for labels that are missing" in line
    many = {f"{letter}{i}": 1 for i in range(9) for letter in "aA"}
    lines = doubtful_labels(many)
    assert len(lines) == 6 and "4 more such groups" in lines[-1]


def test_counts_of_labels():
    assert shown_counts({"rare": 1, "usual": 2000, "b": 7}) == "usual 2,000, b 7, rare 1"
    shown = shown_counts({f"l{i}": 100 - i for i in range(50)} | {"x" * 100: 200})
    assert shown.startswith(f"51 labels: {'x' * 39}… 200, l0 100, ")
    assert shown.endswith(", l10 90, … 35 more …, l46 54, l47 53, l48 52, l49 51")
    assert shown_counts({"a\tb": 1}) == r"'a\tb' 1"
