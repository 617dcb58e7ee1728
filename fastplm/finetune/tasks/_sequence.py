"""Tasks with one target for a text or a pair of texts, which a table holds."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from fastplm.data.examples import Example, read_table
from fastplm.finetune.labels import number
from fastplm.finetune.losses import in_both_orders
from fastplm.finetune.settings import FinetuneArguments
from fastplm.finetune.tasks._task import (
    Collator,
    Feature,
    Featured,
    Task,
    data_error,
    features_of,
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


def score_of(example: Example) -> float:
    """The label as a number; an error if it is not one."""
    score = number(example.target)
    if score is None or abs(score) > _MOST_SCORE:
        expected = 'a number, such as 1200.5: finite, up to 1e18, and without "_" or ","'
        raise data_error(example.where, f"the label {example.target!r}", expected)
    return score
