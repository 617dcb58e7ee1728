"""Labels of texts: their classes, and scores that are none."""

from __future__ import annotations

import pytest

from fastplm.errors import DataError
from fastplm.finetune.data import prepare_task

from ..conftest import copied


def test_labels(tmp_path, arguments):
    path = tmp_path / "data.tsv"
    path.write_text("stars\tsaid\n10\ta\n9\tb\n-1\tc\n9\td\n")
    given = dict(data=path, text_columns=["said"], label_column="stars")
    task = prepare_task(arguments("classification", eval_data=copied(path), **given))
    assert task.names == ["-1", "9", "10"]
    assert [f["labels"] for f in task.features(task.train)[0]] == [2, 1, 0, 1]
    task = prepare_task(arguments("classification", eval_data=copied(path), threshold=9, **given))
    assert task.names == ["negative", "positive"]
    assert [f["labels"] for f in task.features(task.train)[0]] == [1, 0, 0, 0]
    other = tmp_path / "other.tsv"
    other.write_text("stars\tsaid\n8\ta\n")
    with pytest.raises(DataError, match=r"other.tsv:2: the label '8'; expected .*-1, 9, 10"):
        prepare_task(arguments("classification", eval_data=other, **given))


def test_one_label_alone(arguments, tmp_path):
    path = tmp_path / "data.tsv"
    path.write_text("text\tlabel\na\tx\nb\tx\nc\tx\n")
    with pytest.raises(DataError, match="one label alone"):
        prepare_task(arguments("classification", data=path, eval_data=copied(path)))


def test_a_label_to_judge_by_that_looks_the_same(arguments, tmp_path):
    paths = [tmp_path / "train.tsv", tmp_path / "eval.tsv"]
    paths[0].write_text("text\tlabel\na\tcaf\u00e9\nb\tbar\n", encoding="utf-8")
    paths[1].write_text("text\tlabel\na\tcafe\u0301\n", encoding="utf-8")
    expected = r"eval.tsv:2: the label 'cafe\\u0301', which is written otherwise than 'caf\\xe9'"
    with pytest.raises(DataError, match=expected):
        prepare_task(arguments("classification", data=paths[0], eval_data=paths[1]))
