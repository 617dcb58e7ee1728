"""A label for a text, or for two; and what scores of texts have in common with them."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from fastplm.data.examples import Example, read_table
from fastplm.errors import DataError, fail
from fastplm.finetune.labels import number
from fastplm.finetune.losses import in_both_orders
from fastplm.finetune.metrics import accuracy, f1, matthews
from fastplm.finetune.settings import FinetuneArguments
from fastplm.finetune.tasks._task import (
    Collator,
    Feature,
    Featured,
    Labelled,
    Labels,
    Logits,
    Scored,
    Task,
    features_of,
    refuse,
)

#: The largest absolute value of a score: its square is still finite in fp32.
_MOST_SCORE = 1e18


class SequenceTask(Task):
    """A task with one target for a text or a pair of texts."""

    auto = "AutoModelForSequenceClassification"
    #: How many texts an example may have, the usual number first.
    texts: tuple[int, ...] = (1,)

    @classmethod
    def read(cls, args: FinetuneArguments, path: Any, targets: Any, length: int) -> list[Example]:
        return read_table(path, args.text_columns, args.label_column, cls.texts)

    def target(self, example: Example) -> int | float:
        """What the model learns of an example; an error if it is not one of this task."""
        raise NotImplementedError

    def targets(self, examples: list[Example]) -> list[Any]:
        """The targets of the examples."""
        return [self.target(example) for example in examples]

    def features(self, examples: list[Example]) -> Featured:
        columns = [list(column) for column in zip(*(e.texts for e in examples), strict=True)]
        features = self._encoded(columns)
        if self.args.both_orders:
            features = [
                {name: [first[name], second[name]] for name in first}
                for first, second in zip(features, self._encoded(columns[::-1]), strict=True)
            ]
        for feature, target in zip(features, self.targets(examples), strict=True):
            feature["labels"] = target
        return features, [None] * len(features)

    def _encoded(self, columns: list[list[str]]) -> list[Feature]:
        return features_of(self.tokenizer(*columns, truncation=True, max_length=self.limit))

    def collator(self) -> Collator:
        """With ``both_orders``, input ids are [B, 2, T]; labels that are scores stay floats."""
        if not self.args.both_orders:
            return super().collator()
        pairs = transformers.DataCollatorForMultipleChoice(self.tokenizer)

        def collate(features: list[Feature]) -> Any:
            labels = torch.tensor([feature["labels"] for feature in features], device="cpu")
            return {**pairs(features), "labels": labels}

        return collate

    def _outputs(self, model: Any, **batch: Any) -> Any:
        return in_both_orders(model, **batch) if self.args.both_orders else model(**batch)


class Classification(SequenceTask, Labelled):
    """One label for a text.

    With ``threshold``, labels are scores: those above it become the class "positive", the others
    "negative".
    """

    inputs = "text"
    metrics: tuple[str, ...] = ("accuracy", "matthews")

    def prepare(self) -> None:
        self.threshold = self.args.threshold
        if self.threshold is None:
            _check_names(self.args, self.known)
            self.names = sorted({example.target for example in self.known}, key=_label_order)
        else:
            self.names = ["negative", "positive"]
        self.targets([*self.train, *self.test, *self.known])  # for its checks
        self._check_classes()

    def _check_classes(self) -> None:
        """Check that the training examples have two classes; else name the wrong argument."""
        if len({*self.targets(self.train)}) > 1:
            return
        expected = "two classes at least"
        if len({*self.targets(self.known)}) > 1:
            got = f"{len(self.train)}, and these examples have one label alone"
            fail("finetune", "max_samples", got, expected, "Raise it.")
        if self.threshold is not None:
            scores = [score_of(example) for example in self.known]
            got = f"{self.threshold:g}, and all labels are on one side of it"
            expected += f"; the labels are {min(scores):g} to {max(scores):g}"
            fail("finetune", "threshold", got, expected, "Choose one in between.")
        refuse(self.train[0].where, "one label alone", expected)

    @classmethod
    def labels(cls, examples: list[Example], args: FinetuneArguments) -> Labels:
        threshold = args.threshold
        if threshold is None:
            _check_names(args, examples)
            return lambda example: (example.target,)
        # ``target`` raises an error for a label that is not a number.
        return lambda example: (str((number(example.target) or 0.0) > threshold),)

    def target(self, example: Example) -> int:
        if self.threshold is not None:
            return int(score_of(example) > self.threshold)
        self.check_label(example.target, example)
        return self.ids[example.target]

    def right(self, example: Example) -> str:
        return self.names[self.target(example)]

    def score(self, examples: list[Example], notes: list[Any], logits: list[Logits]) -> Scored:
        chosen = [int(scores.argmax()) for (scores,) in logits]
        right = self.targets(examples)
        scores = {
            "accuracy": accuracy(chosen, right),
            "matthews": matthews(chosen, right),
            "f1": f1(chosen, right, len(self.names)),
        }
        return {name: scores[name] for name in self.metrics}, [self.names[i] for i in chosen]


class Pair(Classification):
    """One label for two texts. F1 is that of the second class if there are two, else the mean."""

    inputs = "texts"
    texts = (2,)
    metrics: tuple[str, ...] = ("accuracy", "f1", "matthews")


def _check_names(args: FinetuneArguments, examples: list[Example]) -> None:
    """Check that no label has a fraction: each value of a score would become a class."""
    expected = "names or whole numbers as labels"
    fix = "For scores give --task regression, or make two classes of them with --threshold, such "
    fix += "as --threshold 0."
    for example in examples:
        whole = (number(example.target) or 0.0) % 1 == 0
        got = f"{args.task}, and labels with fractions, such as {example.target} ({example.where})"
        args.check("task", whole, expected, fix, got, DataError)


def _label_order(name: str) -> tuple[float, str]:
    """A sort key: first numbers by their value, then words."""
    value = number(name)
    return (float("inf") if value is None else value, name)


def score_of(example: Example) -> float:
    """The label as a number; an error if it is not one."""
    score = number(example.target)
    if score is None or abs(score) > _MOST_SCORE:
        expected = 'a number, such as 1200.5: finite, up to 1e18, and without "_" or ","'
        refuse(example.where, f"the label {example.target!r}", expected)
    return score
