"""The examples of a run: which are held out, and which files are refused."""

from __future__ import annotations

import pytest

from fastplm.errors import ArgumentValueError
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
