"""The examples of a run: which are held out, and which files are refused."""

from __future__ import annotations

import pytest

from fastplm.data.examples import Example
from fastplm.errors import ArgumentValueError, DataError
from fastplm.finetune.data import hold_out, prepare_task
from fastplm.finetune.tasks import task_class

from .conftest import COUNT, FILES, SOURCES


def test_held_out_examples(arguments, files):
    for task in FILES:
        examples = task_class(task).read(arguments(task), files[task], None, 64)
        train, test = hold_out(examples, 0.1)
        assert (train, test) == hold_out(examples, 0.1)
        assert len(test) == COUNT // 10 and len(train) + len(test) == COUNT
        assert not {e.group for e in train} & {e.group for e in test}
        if task == "qa":
            assert not {e.texts[1] for e in train} & {e.texts[1] for e in test}


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


def test_the_argument_at_fault_is_named(arguments, tmp_path):
    path = tmp_path / "data.tsv"

    def prepare(rows, **options):
        path.write_text("\n".join(("text\tlabel", *(f"a {i}\t{r}" for i, r in enumerate(rows)))))
        return prepare_task(arguments("classification", data=path, **options))

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


def test_the_training_file_is_not_judged_by(arguments, files, tmp_path):
    link = tmp_path / "link.tsv"
    link.symlink_to(files["pair"])
    for eval_data in (files["pair"], link):
        with pytest.raises(ArgumentValueError, match="`eval_data` got .*, the file of --data; "):
            prepare_task(arguments("pair", eval_data=eval_data))


def test_targets_to_judge_by_are_others(writing, writers, tmp_path):
    files = {"data": writers / "sources.txt", "targets": writers / "targets.txt"}
    other = tmp_path / "other.txt"
    other.write_text("x\n" * len(SOURCES))
    for name, paths in (
        ("eval_data", {"eval_data": files["data"], "eval_targets": other}),
        ("eval_targets", {"eval_data": other, "eval_targets": files["targets"]}),
    ):
        with pytest.raises(ArgumentValueError, match=f"`{name}` got .*, the file of --"):
            prepare_task(writing("bart", **files, **paths))


def test_features_are_no_longer_than_the_model(arguments):
    with pytest.raises(ArgumentValueError, match="`max_length` got 129; expected 128"):
        prepare_task(arguments("pair", max_length=129))
