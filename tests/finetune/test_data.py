"""The examples of a fine-tuning: which are held out, and what is wrong with them."""

from __future__ import annotations

import pytest

from fastplm.data.examples import Example
from fastplm.errors import ArgumentValueError, DataError
from fastplm.finetune.data import hold_out
from fastplm.finetune.run import FinetuneArguments, prepare_task


def _example(label, number, group=None):
    group = number if group is None else group
    return Example((f"text {number}",), label, group, f"file:{number}")


def test_each_label_is_held_out_alike():
    labels = ["common"] * 80 + ["usual"] * 20 + ["rare"]
    examples = [_example(label, number) for number, label in enumerate(labels)]
    rest, held = hold_out(examples, 0.1, lambda example: (example.target,))
    found = [example.target for example in held]
    assert found.count("common") == 8 and found.count("usual") == 2 and "rare" not in found
    assert sorted((*rest, *held), key=lambda e: e.group) == examples
    tags = [
        _example(("A", "B") if number % 2 else ("A", f"C{number}"), number) for number in range(9)
    ]
    rest, held = hold_out(tags, 0.5, lambda example: example.target)
    assert {tag for e in held for tag in e.target} <= {tag for e in rest for tag in e.target}
    with pytest.raises(DataError, match="the only one with its label.*--eval-data"):
        hold_out([_example(str(i), i) for i in range(9)], 0.1, lambda example: (example.target,))


def test_the_argument_at_fault_is_named(bert, tmp_path):
    path = tmp_path / "data.tsv"

    def prepare(rows, **options):
        path.write_text("\n".join(("text\tlabel", *(f"a {i}\t{r}" for i, r in enumerate(rows)))))
        given = {"task": "classification", "model": bert / "model", "out": tmp_path / "out"}
        return prepare_task(FinetuneArguments(data=path, max_length=16, **given, **options))

    rare = [*"xy" * 20, *(f"rare{i}" for i in range(9))]
    task = prepare(rare)
    assert len(task.names) == 11 and task.names == prepare(rare, max_samples=30).names
    with pytest.raises(ArgumentValueError, match="`max_samples` got 1.*Raise it"):
        prepare(rare, max_samples=1)
    with pytest.raises(ArgumentValueError, match="`threshold` got 99.*0 to 1;|`threshold` got 99"):
        prepare([0, 1] * 20, threshold=99)
    with pytest.raises(DataError, match="`data` got .*one label alone.*Correct the file"):
        prepare(["x"] * 20)
    other = tmp_path / "other.tsv"
    other.write_text("text\tlabel\na\tz\n")
    with pytest.raises(DataError, match="`eval_data` got .*other.tsv:2: the label 'z'"):
        prepare(rare, eval_data=other)
