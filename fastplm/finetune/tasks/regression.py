"""A score for a text or for two."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from fastplm.data.examples import Example
from fastplm.finetune.metrics import pearson, ranks
from fastplm.finetune.tasks._task import Logits, Scored, refuse
from fastplm.finetune.tasks.classification import SequenceTask, score_of


class Regression(SequenceTask):
    """A score for a text or a pair of texts; the loss is the mean squared error."""

    metrics = ("pearson", "spearman", "mse")
    texts = (2, 1)
    #: Predictions are one value if they vary less than this share of what the scores do.
    spread = 1e-4

    def prepare(self) -> None:
        self.check_texts()
        # A label that is not a number is an error now, not after the training.
        self.targets([*self.known, *self.test])
        able = not self.args.both_orders or len(self.train[0].texts) == 2
        fix = "Leave the option out, or name --text-columns."
        got = f"True with one text ({self.train[0].where})"
        self.args.check("both_orders", able, "two texts an example", fix, got)
        if len(set(self.targets(self.train))) == 1:
            refuse(self.train[0].where, "one score alone", "two different ones at least")

    @property
    def config(self) -> dict[str, Any]:
        return {"num_labels": 1, "problem_type": "regression"}

    def teacher_order(self, config: Any) -> list[int]:
        outputs = getattr(config, "num_labels", 1)
        fix = "Fine-tune it with --task regression."
        self.check_teacher(outputs == 1, f"which has {outputs} outputs", "one output", fix)
        return []

    def distance(self, ours: Tensor, theirs: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        return (ours - theirs).square().mean()

    def target(self, example: Example) -> float:
        return score_of(example)

    def right(self, example: Example) -> float:
        return self.target(example)

    def most_frequent(self, predictions: list[float]) -> dict[str, Any] | None:
        """None, unless all predictions are one value but for rounding, and the scores are not."""
        spread = self.spread * statistics.pstdev(self.targets(self.test))
        if statistics.pstdev(predictions) > spread:
            return None
        value = statistics.fmean(predictions)
        sign = f"all predictions are {value:.4g}, so no correlation is defined: it is given as 0"
        return {"prediction": value, "share": 1.0, "sign": sign}

    def score(self, examples: list[Example], notes: list[Any], logits: list[Logits]) -> Scored:
        found = [float(score) for (score,) in logits]
        right = self.targets(examples)
        errors = ((a - b) ** 2 for a, b in zip(found, right, strict=True))
        scores = {
            "pearson": pearson(found, right),
            "spearman": pearson(ranks(found), ranks(right)),
            "mse": statistics.fmean(errors),
        }
        return scores, found
