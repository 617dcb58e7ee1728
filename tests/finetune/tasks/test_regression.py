"""Scores of texts."""

from __future__ import annotations

import pytest
import torch

from fastplm.errors import ArgumentValueError, DataError
from fastplm.finetune.data import prepare_task

from ..conftest import copied, sentence


def test_scores_are_not_classes(arguments, tmp_path):
    """Labels with fractions are refused unless the settings say that they are scores."""
    path = tmp_path / "scores.tsv"
    texts = [f"{score}\t{sentence(i)}" for i, score in enumerate((4.8, 0.5, 1.2, 2.6, 0, 5))]
    path.write_text("\n".join(("score\ttext", *texts)))
    expected = r"`task` got classification, and labels with fractions, such as 4.8 .*tsv:2"
    with pytest.raises(DataError, match=expected + ".*--task regression.*--threshold"):
        prepare_task(arguments("classification", data=path))
    task = prepare_task(arguments("classification", data=path, eval_data=copied(path), threshold=1))
    assert [f["labels"] for f in task.features(task.train)[0]] == [1, 0, 1, 1, 0, 1]
    task = prepare_task(arguments("regression", data=path, eval_data=copied(path)))
    assert [f["labels"] for f in task.features(task.train)[0]] == [4.8, 0.5, 1.2, 2.6, 0, 5]
    found = [(torch.tensor([score]),) for score in (5.0, 1.0, 1.0, 2.0, 0.0, 5.0)]
    scores, predictions = task.score(task.test, [], found)
    assert predictions == [5, 1, 1, 2, 0, 5]
    squares = 0.2**2 + 0.5**2 + 0.2**2 + 0.6**2
    assert scores["mse"] == pytest.approx(squares / 6) and 0.9 < scores["pearson"] < 1
    # The ranks are 5.5 2.5 2.5 4 1 5.5 and 5 2 3 4 1 6.
    assert scores["spearman"] == pytest.approx(16.5 / (16.5 * 17.5) ** 0.5)


@pytest.mark.parametrize(
    "scores, expected",
    [
        ([".5", "2", "?"], r":4: .*a number"),
        ([".5", ".5"], "one score alone"),
        ([".5", "1_000"], r":3: the label '1_000'; .*\"_\""),
        ([".5", "nan"], r":3: the label 'nan'; .*finite"),
        ([".5", "-inf"], r":3: the label '-inf'; .*finite"),
        ([".5", "1e39"], r":3: the label '1e39'; .*1e18"),
    ],
)
def test_scores_that_are_refused(scores, expected, arguments, tmp_path):
    path = tmp_path / "data.tsv"
    path.write_text("\n".join(("text\tlabel", *(f"a\t{score}" for score in scores))))
    with pytest.raises(DataError, match=expected):
        prepare_task(arguments("regression", data=path, eval_data=copied(path)))


def test_both_orders_are_of_two_texts(arguments, files):
    args = arguments("regression", "gpt2", data=files["letters classification"], both_orders=True)
    with pytest.raises(ArgumentValueError, match="`both_orders` got True with one text"):
        prepare_task(args)


def test_scores_to_judge_by_are_checked_before_the_training(arguments, tmp_path):
    path = tmp_path / "eval.tsv"
    path.write_text("sentence1\tsentence2\tscore\na\tb\t1\na\tb\tinf\n")
    with pytest.raises(DataError, match=r"eval.tsv:3: the label 'inf'; expected a number"):
        prepare_task(arguments("regression", eval_data=path))
