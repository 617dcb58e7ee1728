"""What all tasks have in common: the registry, features and scores, and one answer to all."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fastplm.finetune import tasks
from fastplm.finetune.data import prepare_task
from fastplm.finetune.models import build_model
from fastplm.finetune.settings import FinetuneArguments
from fastplm.finetune.tasks import TASKS, task_class
from fastplm.finetune.tasks._task import FeatureDataset, Task, predict
from fastplm.finetune.tasks.question_answering import QuestionAnswering
from fastplm.finetune.tasks.regression import Regression
from fastplm.finetune.tasks.tagging import Tagging
from fastplm.finetune.trainer import make_trainer

from ..conftest import FILES


def test_each_task_has_its_class_and_its_options():
    files = {path.stem for path in Path(tasks.__file__).parent.glob("[a-z]*.py")}
    assert files == {each.kind.partition(".")[0] for each in TASKS.values()}
    for name, each in TASKS.items():
        assert issubclass(task_class(name), Task)
        assert {*each.options} <= FinetuneArguments.__dataclass_fields__.keys()
    script = "import sys, fastplm.finetune.settings; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True)


def perfect(feature, task):
    """Logits that predict the labels; those of a window without the answer predict none."""
    logits = []
    for name in task.label_names:
        labels = torch.tensor(feature[name])
        scores = torch.zeros(*labels.shape, len(feature["input_ids"]) + 10)
        if isinstance(task, Regression):
            logits.append(labels[None])
        elif isinstance(task, QuestionAnswering) and labels == 0:
            logits.append(scores)
        else:
            logits.append(scores.scatter(-1, labels.clamp(min=0)[..., None], 1.0))
    return tuple(logits)


@pytest.mark.parametrize("task", FILES)
@pytest.mark.parametrize("length", [16, 64])
def test_right_answers_score_one(task, length, arguments):
    """Right answers score one, also for texts that are cut into windows."""
    task = prepare_task(arguments(task, max_length=length))
    for examples in (task.train, task.test):
        features, notes = task.features(examples)
        assert max(FeatureDataset(features).lengths) <= length
        logits = [perfect(feature, task) for feature in features]
        scores, _ = task.score(examples, notes, logits)
        best = dict.fromkeys(task.metrics, 1.0)
        assert scores == pytest.approx(best | ({"mse": 0.0} if "mse" in best else {}))
        first = task.label_names[0]
        others = [dict(feature, **{first: _other(feature[first])}) for feature in features]
        logits = [perfect(feature, task) for feature in others]
        assert task.score(examples, notes, logits)[0][task.metrics[0]] < 0.5


def _other(label):
    if isinstance(label, float):
        return -label
    return [_other(each) for each in label] if isinstance(label, list) else 1 if label != 1 else 0


@pytest.mark.parametrize("task", FILES)
def test_one_answer_of_each_task(task, arguments):
    """One answer to all examples gets a warning, unless it is right for all."""
    task = prepare_task(arguments(task))
    right = [task.right(example) for example in task.test]

    def warnings(predictions) -> list[str]:
        return task.warnings({"most_frequent_prediction": task.most_frequent(predictions)})

    assert warnings(right) == []
    assert (task.baseline() is None) == (task.metrics[0] != "accuracy")
    one = [
        [right[0][0]] * len(each) if isinstance(each, list | tuple) else right[0] for each in right
    ]
    assert task.most_frequent(one)["share"] == 1
    assert "Warning: all predictions are " in warnings(one)[0]
    assert task.one_answer(task.most_frequent(one)).startswith("all predictions are ")
    if isinstance(task, Regression):  # a value that is the same but for rounding
        one[0] *= 1 + 1e-6
        assert "so no correlation is defined" in task.one_answer(task.most_frequent(one))
        one[0] *= 1.01
        assert task.one_answer(task.most_frequent(one)) == ""
        return
    if not isinstance(task, Tagging):  # one example of Tagging has several answers
        task.test = task.test[:1]
        assert warnings(one[:1]) == []
    assert task.warnings({}) == []  # the result of an older version


def test_predictions_do_not_depend_on_the_batch(arguments, tmp_path):
    for name in ("choice", "regression"):
        task = prepare_task(arguments(name, "gpt"))
        trainer = make_trainer(task, build_model(task, 0), 0, tmp_path / name)
        features, _ = task.features(task.test)
        found = predict(trainer, task, features)
        alone = [predict(trainer, task, [feature])[0] for feature in features]
        for (a,), (b,) in zip(found, alone, strict=True):
            torch.testing.assert_close(a, b)
        assert found[0][0].shape == ((3,) if name == "choice" else (1,))
