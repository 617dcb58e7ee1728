"""The tasks of fine-tuning: their features, batches and scores."""

from __future__ import annotations

import functools
import math
import re
import statistics
import string
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.loss.loss_utils import ForSequenceClassificationLoss

from fastplm import ops
from fastplm.data._folder import say
from fastplm.data.examples import Example
from fastplm.errors import ArgumentValueError, DataError, message, shown
from fastplm.finetune.data import doubtful_labels, essence, number
from fastplm.finetune.scores import ENTITY_SCORES, entity_scores, mark_entities
from fastplm.finetune.settings import FinetuneArguments
from fastplm.finetune.spans import Place, Places, answer_places, answer_tokens, places_of
from fastplm.finetune.teacher import with_teacher
from fastplm.models._heads import shifted
from fastplm.nn._rows import IGNORE_INDEX, batch_share

Feature = dict[str, Any]
#: A function that makes a padded batch of features.
Collator = Callable[[list[Feature]], Any]
#: The outputs of the model for one feature.
Logits = tuple[Tensor, ...]
#: Features, and for each of them a note that ``Task.score`` needs.
Featured = tuple[list[Feature], list[Any]]
#: Scores by name, and the predictions for ``predictions.json``.
Scored = tuple[dict[str, float], Any]
#: A function from an example to its labels.
Labels = Callable[[Example], Collection[str]]

_WHERE = "finetune"
#: What the warnings about a trained model advise.
ADVICE = "Train longer, or with another --learning-rate."
#: The families with a causal backbone, whose classifiers read the last token.
CAUSAL = ("gpt2", "openai-gpt")
#: The largest absolute value of a score: its square is still finite in fp32.
_MOST_SCORE = 1e18
_BOOKKEEPING = ("overflow_to_sample_mapping", "offset_mapping", "special_tokens_mask")


class Task:
    """One kind of labelled example: how a model reads it, what it learns and how it is scored.

    A task whose model generates text overrides ``evaluate``. A task that does not call the model
    in the plain way, or whose loss is not the model's own, overrides ``_outputs``.

    Args:
        args: the settings of the run.
        config: the model's configuration, as the checkpoint has it.
        train, test: the examples.
        tokenizer: a fast tokenizer.
        max_length: the maximum number of tokens of a feature.
        known: the examples whose labels become the classes of the model. Default: ``train``.
    """

    #: The names of two Transformers classes: the Auto class of the model, and the data collator.
    auto: str
    collator_class = "DataCollatorWithPadding"
    #: The names of the scores; the first is the main one.
    metrics: tuple[str, ...] = ("accuracy",)
    #: If at least this share of the predictions is the same answer, the model has most likely
    #: learned nothing.
    same_answer = 1.0
    #: The default of the argument ``max_length``.
    max_length = 128
    #: The names of the labels in a feature, and of the model outputs that ``score`` reads.
    label_names: tuple[str, ...] = ("labels",)
    output_names: tuple[str, ...] = ("logits",)

    def __init__(
        self,
        args: FinetuneArguments,
        config: Any,
        train: list[Example],
        test: list[Example],
        tokenizer: Any,
        max_length: int,
        known: list[Example] | None = None,
    ) -> None:
        self.args = args
        self.checkpoint_config = config
        self.family = config.model_type
        self.train, self.test = train, test
        self.known = train if known is None else known
        self.tokenizer = tokenizer
        self.limit = max_length
        self.prepare()

    def prepare(self) -> None:
        """Find the classes in the examples, and check them."""

    @classmethod
    def labels(cls, examples: list[Example], args: FinetuneArguments) -> Labels:
        """A function for ``hold_out``, which keeps each of its labels in the training examples."""
        return lambda example: ()

    @property
    def config(self) -> dict[str, Any]:
        """The fields to set in the model's configuration."""
        return {}

    @property
    def tokenizers(self) -> dict[str, Any]:
        """The tokenizers to save with the model: {subfolder of the model's folder: tokenizer}."""
        return {"": self.tokenizer}

    def features(self, examples: list[Example]) -> Featured:
        """The inputs of the model."""
        raise NotImplementedError

    def collator(self) -> Collator:
        """A function that makes a padded batch of features."""
        return getattr(transformers, self.collator_class)(self.tokenizer)

    def new_model(self) -> Any:
        """A model made of several checkpoints; None if the model comes from a single one."""
        return None

    def adapted(self, model: Any) -> Any:
        """Change the model of a checkpoint as the task needs it, and return it."""
        return model

    def outputs(self, model: Any, **batch: Any) -> Any:
        """Run a model: ``loss``, if the batch has labels, and what ``output_names`` lists."""
        teacher = batch.pop("teacher", None)
        if self.args.lm_weight:
            outputs = with_language_model(model, batch, self.args.lm_weight, self._outputs)
        else:
            outputs = self._outputs(model, **batch)
        if teacher is None:
            return outputs
        return with_teacher(self.args, self.output_names, outputs, teacher, batch)

    def _outputs(self, model: Any, **batch: Any) -> Any:
        """``outputs`` without the additional losses of a language model and of a teacher."""
        return model(**batch)

    def score(self, examples: list[Example], notes: list[Any], logits: list[Logits]) -> Scored:
        """Compare the outputs of the model with the targets."""
        raise NotImplementedError

    def evaluate(self, trainer: Any) -> Scored:
        """Score the trained model on the evaluation examples."""
        features, notes = self.features(self.test)
        return self.score(self.test, notes, predict(trainer, self, features))

    def chance(self) -> float:
        """The first metric's value for a model that has learned nothing."""
        return 0.0

    def right(self, example: Example) -> Any:
        """The right answer, in the same form as a prediction."""
        return example.target

    def counted(self, answer: Any) -> list[Any]:
        """The parts of a right answer or a prediction that are counted one by one, such as tags."""
        return [answer]

    def baseline(self) -> dict[str, Any] | None:
        """The most frequent right answer of the evaluation examples, and the accuracy of always
        predicting it; None if the first metric is not the accuracy."""
        if self.metrics[0] != "accuracy":
            return None
        usual, share = self._most_frequent(map(self.right, self.test))
        return {"label": usual, "accuracy": share}

    def most_frequent(self, predictions: Any) -> dict[str, Any] | None:
        """The most frequent prediction and its share; None if predictions are seldom equal.

        A task that knows of another sign that the model tells no example from another adds it in
        words, under "sign".
        """
        answer, share = self._most_frequent(self._listed(predictions))
        return {"prediction": answer, "share": share}

    def one_answer(self, most_frequent: Mapping[str, Any] | None) -> str:
        """In words, that (nearly) all examples have one answer and the targets differ; else ""."""
        if most_frequent is None:
            return ""
        if "sign" in most_frequent:
            return most_frequent["sign"]
        share = most_frequent["share"]
        _, right = self._most_frequent(map(self.right, self.test))
        if share < self.same_answer or right >= self.same_answer:
            return ""
        how_many = "all predictions are" if share == 1 else f"{share:.0%} of the predictions are"
        return f"{how_many} {shown(most_frequent['prediction'])}"

    def reading(self, trainer: Any) -> dict[str, Any]:
        """What else is known of a trained model, for its result: nothing, of most tasks."""
        return {}

    def warnings(self, result: Mapping[str, Any]) -> list[str]:
        """Warnings about a model's result: if ``one_answer`` has something to say."""
        most_frequent = result.get("most_frequent_prediction")
        said = self.one_answer(most_frequent)
        if not said or most_frequent is None:
            return []
        if "sign" not in most_frequent:
            right = self._share_of(most_frequent["prediction"])
            said += f", which is the right answer of {right:.0%} of the examples"
        return [f"Warning: {said}: the model tells none from another. {ADVICE}"]

    def _share_of(self, answer: Any) -> float:
        """The share of the right answers that are this answer."""
        right = [each for example in self.test for each in self.counted(self.right(example))]
        return right.count(answer) / len(right)

    def _most_frequent(self, answers: Iterable[Any]) -> tuple[Any, float]:
        counts = Counter(each for answer in answers for each in self.counted(answer))
        ((usual, count),) = counts.most_common(1)
        return usual, count / counts.total()

    @staticmethod
    def _listed(predictions: Any) -> list[Any]:
        """One prediction for each evaluation example."""
        return list(predictions.values() if isinstance(predictions, dict) else predictions)

    def records(self, predictions: Any) -> list[dict[str, Any]]:
        """For each example: its place in the file, its texts, the right answer, the prediction."""
        return [
            {
                "id" if isinstance(example.place, str) else "line": example.place,
                "texts": list(example.texts),
                "label": self.right(example),
                "prediction": prediction,
            }
            for example, prediction in zip(self.test, self._listed(predictions), strict=True)
        ]

    def label_counts(self, examples: list[Example]) -> dict[str, int] | None:
        """How often each label occurs; None for a task without labels."""
        return None

    def doubts(self) -> list[str]:
        """A line for each thing about the labels that may be a mistake."""
        return []


def predict(trainer: Any, task: Task, features: list[Feature]) -> list[Logits]:
    """The outputs of the trained model for each feature, on the CPU."""
    order = sorted(range(len(features)), key=lambda index: feature_length(features[index]))
    found: dict[int, Logits] = {}
    trainer.model.eval()
    size = trainer.args.eval_batch_size
    for start in range(0, len(order), size):
        chosen = order[start : start + size]
        batch = trainer.data_collator([dict(features[index]) for index in chosen])
        inputs = {
            name: value.to(trainer.args.device) if isinstance(value, Tensor) else value
            for name, value in batch.items()
            if name not in task.label_names
        }
        with torch.no_grad(), trainer.compute_loss_context_manager():
            outputs = task.outputs(trainer.model, **inputs)
        logits = [outputs[name].float().cpu() for name in task.output_names]
        found.update(zip(chosen, zip(*logits, strict=True), strict=True))
    return [found[index] for index in range(len(features))]


def feature_length(feature: Feature) -> int:
    """The number of tokens of a feature, or of its longest text if it holds several."""
    ids = feature["input_ids"]
    return max(map(len, ids)) if isinstance(ids[0], list) else len(ids)


class Labelled(Task):
    """A task whose targets are labels with names."""

    names: list[str]

    @property
    def config(self) -> dict[str, Any]:
        return {
            "num_labels": len(self.names),
            "id2label": dict(enumerate(self.names)),
            "label2id": self.ids,
        }

    @functools.cached_property
    def ids(self) -> dict[str, int]:
        """The number of each label."""
        return {name: index for index, name in enumerate(self.names)}

    def answers(self, examples: list[Example]) -> list[Any]:
        """All labels of the examples."""
        raise NotImplementedError

    def chance(self) -> float:
        usual = Counter(self.answers(self.train)).most_common(1)[0][0]
        right = self.answers(self.test)
        return accuracy([usual] * len(right), right)

    def check_label(self, label: str, example: Example, kind: str) -> None:
        """Check that the label of an evaluation example is one that the model knows."""
        if label not in self.names:
            expected = f"one of the training {kind}s, {', '.join(self.names[:20])}"
            got = f"the {kind} {label!r}"
            alike = [name for name in self.names if essence(name) == essence(label)]
            if alike:  # two spellings that may look the same on a screen
                other = f"which is written otherwise than {ascii(alike[0])}"
                got = f"the {kind} {ascii(label)}, {other}"
            raise _data_error(example.where, got, expected, "eval_data")

    def label_counts(self, examples: list[Example]) -> dict[str, int] | None:
        return Counter(label for e in examples for label in self.counted(self.right(e)))

    def doubts(self) -> list[str]:
        return doubtful_labels(self.label_counts([*self.known, *self._others()]) or {})

    def _others(self) -> list[Example]:
        """The evaluation examples that are not in ``known``."""
        known = {id(example) for example in self.known}
        return [example for example in self.test if id(example) not in known]


class SequenceTask(Task):
    """A task with one target for a text or a pair of texts."""

    auto = "AutoModelForSequenceClassification"

    def answers(self, examples: list[Example]) -> list[Any]:
        """The targets of the examples."""
        raise NotImplementedError

    def features(self, examples: list[Example]) -> Featured:
        columns = [list(column) for column in zip(*(e.texts for e in examples), strict=True)]
        features = _unzipped(self._encoded(columns))
        if self.args.both_orders:
            others = _unzipped(self._encoded(columns[::-1]))
            features = [
                {name: [first[name], second[name]] for name in first}
                for first, second in zip(features, others, strict=True)
            ]
        for feature, target in zip(features, self.answers(examples), strict=True):
            feature["labels"] = target
        return features, [None] * len(features)

    def _encoded(self, columns: list[list[str]]) -> Any:
        return self.tokenizer(*columns, truncation=True, max_length=self.limit)

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

    metrics: tuple[str, ...] = ("accuracy", "matthews")

    def prepare(self) -> None:
        self.threshold = self.args.threshold
        if self.threshold is None:
            _check_names(self.args, self.known)
            self.names = sorted({example.target for example in self.known}, key=_label_order)
        else:
            self.names = ["negative", "positive"]
        self.targets = {
            id(example): self._target(example) for example in (*self.train, *self.test, *self.known)
        }
        self._check_classes()

    def _check_classes(self) -> None:
        """Check that the training examples have two classes; else name the wrong argument."""
        if len({self.targets[id(example)] for example in self.train}) > 1:
            return
        expected = "two classes at least"
        if len({self.targets[id(example)] for example in self.known}) > 1:
            got = f"{len(self.train)}, and these examples have one label alone"
            error = message(_WHERE, "max_samples", got, expected, "Raise it.")
        elif self.threshold is not None:
            scores = [score for e in self.known if (score := number(e.target)) is not None]
            got = f"{self.threshold:g}, and all labels are on one side of it"
            expected += f"; the labels are {min(scores):g} to {max(scores):g}"
            error = message(_WHERE, "threshold", got, expected, "Choose one in between.")
        else:
            raise _data_error(self.train[0].where, "one label alone", expected)
        raise ArgumentValueError(error)

    @classmethod
    def labels(cls, examples: list[Example], args: FinetuneArguments) -> Labels:
        threshold = args.threshold
        if threshold is None:
            _check_names(args, examples)
            return lambda example: (example.target,)
        # ``_target`` raises an error for a label that is not a number.
        return lambda example: (str((number(example.target) or 0.0) > threshold),)

    def _target(self, example: Example) -> int:
        if self.threshold is not None:
            return int(_score(example) > self.threshold)
        self.check_label(example.target, example, "label")
        return self.ids[example.target]

    def score(self, examples: list[Example], notes: list[Any], logits: list[Logits]) -> Scored:
        chosen = [int(scores.argmax()) for (scores,) in logits]
        right = self.answers(examples)
        scores = {"accuracy": accuracy(chosen, right), "matthews": matthews(chosen, right)}
        scores["f1"] = f1(chosen, right, len(self.names))
        predictions = [self.names[index] for index in chosen]
        return {name: scores[name] for name in self.metrics}, predictions

    def answers(self, examples: list[Example]) -> list[int]:
        return [self.targets[id(example)] for example in examples]

    def right(self, example: Example) -> str:
        return self.names[self.targets[id(example)]]


class Pair(Classification):
    """One label for two texts. F1 is that of the second class if there are two, else the mean."""

    metrics: tuple[str, ...] = ("accuracy", "f1", "matthews")


class Regression(SequenceTask):
    """A score for a text or a pair of texts; the loss is the mean squared error."""

    metrics = ("pearson", "spearman", "mse")
    #: Predictions are one value if they vary less than this share of what the scores do.
    spread = 1e-4

    def prepare(self) -> None:
        # A label that is not a number is an error now, not after the training.
        self.answers([*self.known, *self.test])
        able = not self.args.both_orders or len(self.train[0].texts) == 2
        fix = "Leave the option out, or name --text-columns."
        got = f"True with one text ({self.train[0].where})"
        self.args.check("both_orders", able, "two texts an example", fix, got)
        if len(set(self.answers(self.train))) == 1:
            raise _data_error(self.train[0].where, "one score alone", "two different ones at least")

    @property
    def config(self) -> dict[str, Any]:
        return {"num_labels": 1, "problem_type": "regression"}

    def answers(self, examples: list[Example]) -> list[float]:
        return [_score(example) for example in examples]

    def right(self, example: Example) -> float:
        return _score(example)

    def most_frequent(self, predictions: Any) -> dict[str, Any] | None:
        """None, unless all predictions are one value but for rounding, and the scores are not."""
        if statistics.pstdev(predictions) > self.spread * statistics.pstdev(
            self.answers(self.test)
        ):
            return None
        value = statistics.fmean(predictions)
        sign = f"all predictions are {value:.4g}, so no correlation is defined: it is given as 0"
        return {"prediction": value, "share": 1.0, "sign": sign}

    def score(self, examples: list[Example], notes: list[Any], logits: list[Logits]) -> Scored:
        found = [float(score) for (score,) in logits]
        right = self.answers(examples)
        errors = ((a - b) ** 2 for a, b in zip(found, right, strict=True))
        correlations = {"pearson": pearson(found, right)}
        correlations["spearman"] = pearson(ranks(found), ranks(right))
        return {**correlations, "mse": statistics.fmean(errors)}, found


class Tagging(Labelled):
    """One tag for each word. The first token of the word gets the label.

    A sentence that is too long is split into several features, so that no word is left out. Tags
    that mark entities (B-PER, I-PER, O) are scored by entity, and by word.
    """

    auto = "AutoModelForTokenClassification"
    collator_class = "DataCollatorForTokenClassification"

    def prepare(self) -> None:
        self.names = sorted({tag for example in self.known for tag in example.target})
        if mark_entities(self.names):
            self.metrics = (*ENTITY_SCORES, *self.metrics)
        for example in self.test:
            for tag in example.target:
                self.check_label(tag, example, "tag")

    @classmethod
    def labels(cls, examples: list[Example], args: FinetuneArguments) -> Labels:
        return lambda example: set(example.target)

    def features(self, examples: list[Example]) -> Featured:
        encoded = self.tokenizer(
            [list(example.texts) for example in examples],
            is_split_into_words=True,
            truncation=True,
            max_length=self.limit,
            return_overflowing_tokens=True,
        )
        samples = encoded["overflow_to_sample_mapping"]
        features, notes = _unzipped(encoded), []
        last = (-1, -1)
        for index, feature in enumerate(features):
            sample, labels, places = samples[index], [], []
            for place, word in enumerate(encoded.word_ids(index)):
                if word is None or (sample, word) <= last:
                    labels.append(IGNORE_INDEX)
                    continue
                last = (sample, word)
                labels.append(self.ids[examples[sample].target[word]])
                places.append((sample, word, place))
            feature["labels"] = labels
            notes.append(places)
        if not any(notes):
            got = f"words of which the tokenizer makes no token, such as {examples[0].texts[0]!r}"
            raise _data_error(examples[0].where, got, "words that this model knows")
        return features, notes

    def score(self, examples: list[Example], notes: list[Any], logits: list[Logits]) -> Scored:
        # A word without a token has no prediction. It counts as wrong.
        tags: list[list[str | None]] = [[None] * len(example.texts) for example in examples]
        for places, (scores,) in zip(notes, logits, strict=True):
            chosen = scores.argmax(-1).tolist()
            for sample, word, place in places:
                tags[sample][word] = self.names[chosen[place]]
        found = [tag for sentence in tags for tag in sentence]
        of_words = {"accuracy": accuracy(found, self.answers(examples))}
        if self.metrics[0] == "accuracy":
            return of_words, tags
        by_sentence = [[tag or "O" for tag in sentence] for sentence in tags]
        right = [example.target for example in examples]
        return entity_scores(by_sentence, right) | of_words, tags

    def answers(self, examples: list[Example]) -> list[str]:
        return [tag for example in examples for tag in example.target]

    def chance(self) -> float:
        """The tag of most words, which is "O" where tags mark entities, finds none of these."""
        return super().chance() if self.metrics[0] == "accuracy" else 0.0

    def counted(self, answer: Any) -> list[Any]:
        return list(answer)


class QuestionAnswering(Task):
    """Find where the answer stands in a text (SQuAD 1.1 and 2.0); see docs/finetuning.md."""

    auto = "AutoModelForQuestionAnswering"
    metrics: tuple[str, ...] = ("f1", "exact_match")
    max_length = 384
    label_names = ("start_positions", "end_positions")
    output_names = ("start_logits", "end_logits")
    # The answer that is given too often is "none", which may be right for most questions.
    same_answer = 0.95
    #: The longest span in tokens, and the number of spans that are written.
    span_tokens, best = 30, 20

    def prepare(self) -> None:
        self.may_be_null = any(not example.target for example in (*self.known, *self.test))
        args, fix = self.args, "Leave the option out."
        able = self.may_be_null or args.null_threshold is None
        expected = "questions without an answer, as in SQuAD 2.0"
        got = f"{args.null_threshold}, and every question has an answer"
        args.check("null_threshold", able, expected, fix, got)
        able, fix = not (self.may_be_null and self.family in CAUSAL), "Choose another --model."
        expected = "an encoder, as the state at the first token says that there is none"
        got = f"{args.data}, with questions without an answer, and a {self.family}"
        args.check("data", able, expected, fix, got, DataError)
        if self.may_be_null:
            kinds = {bool(example.target) for example in self.test}
            names = {True: "has_answer_f1", False: "no_answer_f1"}
            self.metrics += tuple(names[kind] for kind in sorted(kinds, reverse=True))

    def collator(self) -> Collator:
        """Models of fastplm also get ``exclude_padding``: their softmax leaves padding out."""
        collator, ours = super().collator(), self.args.library == "fastplm"
        return (lambda f: {**collator(f), "exclude_padding": True}) if ours else collator

    @classmethod
    def labels(cls, examples: list[Example], args: FinetuneArguments) -> Labels:
        if all(example.target for example in examples):
            return lambda example: ()
        return lambda example: ("an answer" if example.target else "no answer",)

    def features(self, examples: list[Example]) -> Featured:
        overlap = self.limit // 3
        encoded = self.tokenizer(
            [self._shortened(example.texts[0], overlap) for example in examples],
            [example.texts[1] for example in examples],
            truncation="only_second",
            max_length=self.limit,
            stride=overlap,
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
        )
        samples, offsets = encoded["overflow_to_sample_mapping"], encoded["offset_mapping"]
        features, notes = _unzipped(encoded), []
        raw: list[set[Place]] = [set() for _ in examples]
        windows = []
        for index, sample in enumerate(samples):
            parts = zip(offsets[index], encoded.sequence_ids(index), strict=True)
            windows.append([tuple(offset) if part == 1 else None for offset, part in parts])
            raw[sample].update(place for place in windows[-1] if place)
        known = [places_of(e.texts[1], places) for e, places in zip(examples, raw, strict=True)]
        wanted = self._targets(examples, known)
        for feature, sample, window in zip(features, samples, windows, strict=True):
            places = [None if place is None else known[sample].get(place) for place in window]
            first, last = answer_tokens(places, wanted[sample])
            feature["start_positions"], feature["end_positions"] = first, last
            notes.append((sample, places))
        return features, notes

    def _targets(
        self, examples: list[Example], known: list[dict[Place, Place]]
    ) -> list[Place | None]:
        """The characters of the target of each example; a line says which are not its answer."""
        targets: list[Place | None] = []
        wrong = []
        for example, places in zip(examples, known, strict=True):
            targets.append(None)
            for start, words in example.target[:1]:
                target = answer_places(places.values(), start, start + len(words))
                targets[-1] = target
                text = "" if target is None else example.texts[1][slice(*target)]
                wrong += [(words, text)] if text != words.strip() else []
        if wrong:
            words, text = wrong[0]
            answered = sum(bool(example.target) for example in examples)
            lost = sum(not text for _, text in wrong)
            say(
                f"{len(wrong):,} of {answered:,} answers do not begin and end with a token: their "
                f"targets are the tokens around them, as {text!r} for {words!r}"
                + (f"; {lost:,} have no token, and no target." if lost else ".")
            )
        return targets

    def _shortened(self, question: str, tokens: int) -> str:
        """The question, cut to its first ``tokens`` tokens, so that the text has room."""
        encoded = self.tokenizer(question, add_special_tokens=False, return_offsets_mapping=True)
        offsets = encoded["offset_mapping"]
        return question if len(offsets) <= tokens else question[: offsets[tokens - 1][1]]

    def score(self, examples: list[Example], notes: list[Any], logits: list[Logits]) -> Scored:
        spans: list[list[tuple[float, int, int]]] = [[] for _ in examples]
        nulls = [math.inf] * len(examples)
        for (sample, places), (start, end) in zip(notes, logits, strict=True):
            spans[sample] += best_spans(start, end, places, self.best, self.span_tokens)
            nulls[sample] = min(nulls[sample], float(start[0].double() + end[0].double()))
        texts = []
        for example, found in zip(examples, spans, strict=True):
            found.sort(key=lambda span: -span[0])
            words = [example.texts[1][first:last] for _, first, last in found]
            texts.append(list(dict.fromkeys(words))[: self.best] or [""])
        given: dict[str, float] = {}
        if self.may_be_null:
            # ``found`` is empty if no window of an example holds a token of its text.
            differences = [
                null - (found[0][0] if found else -math.inf)
                for null, found in zip(nulls, spans, strict=True)
            ]
            threshold = self.args.null_threshold
            if threshold is None:
                gains = [
                    _best(words_f1, answers[0], example) - _best(words_f1, "", example)
                    for answers, example in zip(texts, examples, strict=True)
                ]
                threshold = null_threshold(differences, gains)
            for answers, difference in zip(texts, differences, strict=True):
                answers.insert(0 if difference > threshold else 1, "")
            given["null_threshold"] = threshold
        overlaps = [_best(words_f1, t[0], e) for t, e in zip(texts, examples, strict=True)]
        exact = [_best(exact_match, t[0], e) for t, e in zip(texts, examples, strict=True)]
        parts = {"f1": overlaps, "exact_match": exact}
        for name, kind in (("has_answer_f1", True), ("no_answer_f1", False)):
            pairs = zip(overlaps, examples, strict=True)
            parts[name] = [overlap for overlap, e in pairs if bool(e.target) == kind]
        scores = {name: statistics.fmean(parts[name]) for name in self.metrics}
        names = [example.place for example in examples]
        return scores | given, dict(zip(names, texts, strict=True))

    def right(self, example: Example) -> list[str]:
        return [words for _, words in example.target] or [""]

    def most_frequent(self, predictions: Any) -> dict[str, Any] | None:
        """Also a sign if the answers are different words, but always the first ones of the text."""
        found = super().most_frequent(predictions)
        pairs = list(zip(self.test, self._listed(predictions), strict=True))
        first = [bool(given[0]) and e.texts[1].startswith(given[0]) for e, given in pairs]
        share = sum(first) / len(first)
        if found is None or share < self.same_answer or found["share"] >= self.same_answer:
            return found
        if sum(start == 0 for e in self.test for start, _ in e.target[:1]) / len(first) >= share:
            return found  # they are right
        return {**found, "sign": f"{share:.0%} of the answers are the beginning of their text"}

    def counted(self, answer: Any) -> list[Any]:
        return answer[:1]  # the best answer


def _best(metric: Callable[[str, str], float], answer: str, example: Example) -> float:
    """The best score of an answer over all right answers; '' is right if a question has none."""
    return max(metric(answer, words) for words in [w for _, w in example.target] or [""])


class Choice(Task):
    """Choose one of several answers. The model reads the question with each of them."""

    auto = "AutoModelForMultipleChoice"
    collator_class = "DataCollatorForMultipleChoice"
    max_length = 64

    def prepare(self) -> None:
        self.with_lm_head = self.family in _DOUBLE_HEADS
        if self.with_lm_head:
            self.auto, self.output_names = _DOUBLE_HEADS[self.family], ("mc_logits",)

    def collator(self) -> Collator:
        """A double-heads GPT classifies the last token of each choice, its extract token."""
        collator = super().collator()

        def collate(features: list[Feature]) -> Any:
            batch = collator(features)
            batch["mc_labels"] = batch.pop("labels")
            batch["mc_token_ids"] = batch["attention_mask"].sum(-1) - 1
            return batch

        return collate if self.with_lm_head else collator

    def _outputs(self, model: Any, **batch: Any) -> Any:
        if "sample_index" in batch:
            batch["sample_index"] = batch["sample_index"].flatten()
        if not self.with_lm_head:
            return model(**batch)
        if self.args.library == "transformers":
            # Transformers' GPT takes no mask [B, C, T]. It needs none: attention is causal, and
            # padding comes after the text.
            batch.pop("attention_mask")
        else:
            batch["output_logits"] = False
        outputs = model(**batch)
        outputs["loss"] = outputs.get("mc_loss")
        return outputs

    def features(self, examples: list[Example]) -> Featured:
        pairs = [(e.texts[0], choice) for e in examples for choice in e.texts[1:]]
        first, second = (list(column) for column in zip(*pairs, strict=True))
        encoded = self.tokenizer(first, second, truncation=True, max_length=self.limit)
        features, start = [], 0
        for example in examples:
            end = start + len(example.texts) - 1
            feature = {name: encoded[name][start:end] for name in encoded}
            features.append({**feature, "labels": example.target})
            start = end
        return features, [None] * len(features)

    def score(self, examples: list[Example], notes: list[Any], logits: list[Logits]) -> Scored:
        chosen = [int(scores.argmax()) for (scores,) in logits]
        return {"accuracy": accuracy(chosen, [e.target for e in examples])}, chosen

    def chance(self) -> float:
        return 1 / (len(self.test[0].texts) - 1)


#: The model classes of the families that ``AutoModelForMultipleChoice`` does not know.
_DOUBLE_HEADS = {"gpt2": "GPT2DoubleHeadsModel", "openai-gpt": "OpenAIGPTDoubleHeadsModel"}


TASKS: Mapping[str, type[Task]] = {
    "classification": Classification,
    "pair": Pair,
    "regression": Regression,
    "tagging": Tagging,
    "qa": QuestionAnswering,
    "choice": Choice,
}


# --- what a GPT does ------------------------------------------------------------------------------


def in_both_orders(
    model: Any,
    *,
    labels: Tensor | None = None,
    num_items_in_batch: int | Tensor | None = None,
    output_hidden_states: bool = False,
    **batch: Tensor,
) -> dict[str, Any]:
    """Classify pairs of texts, given in both orders [B, 2, T], by the sum of their two states.

    The code adds the logits of the two orders. Their sum equals the logits of the summed states, as
    the classifier of a GPT is linear and has no bias.

    Source: Radford et al. 2018, §3.3, Similarity.
    """
    outputs = model(
        **{name: value.flatten(0, 1) for name, value in batch.items()},
        output_hidden_states=output_hidden_states,
    )
    logits = outputs["logits"].unflatten(0, (-1, 2)).sum(1)  # [B, labels]
    loss = None
    if labels is not None:
        config = getattr(model, "module", model).config
        loss = ForSequenceClassificationLoss(labels, logits, config)
        loss = loss * batch_share(labels, num_items_in_batch)
    return {"loss": loss, "logits": logits, "hidden_states": outputs.get("hidden_states")}


def with_language_model(
    model: Any, batch: dict[str, Any], weight: float, run: Callable[..., Any]
) -> Any:
    """The outputs of ``run``, with ``weight`` times a language-model loss added to their loss.

    Every token is predicted from the tokens before it. No language-model head is needed: the token
    embeddings of a GPT are also the weight of its output projection.

    Source: Radford et al. 2018, §3.2, equation 5.
    """
    labels = batch.get("labels", batch.get("mc_labels"))
    if labels is None:
        return run(model, **batch)
    outputs = run(model, **batch, output_hidden_states=True)
    ids, kept = batch["input_ids"], batch["attention_mask"].bool()
    targets = shifted(ids.masked_fill(~kept, IGNORE_INDEX).flatten(0, -2))
    assert targets is not None
    table = getattr(model, "module", model).get_input_embeddings().weight
    loss = ops.linear_cross_entropy(
        outputs["hidden_states"][-1].flatten(0, -2), table, targets.flatten()
    )
    share = batch_share(labels, batch.get("num_items_in_batch"))
    outputs["loss"] = outputs["loss"] + weight * share * loss
    return outputs


# --- scores ---------------------------------------------------------------------------------------


def accuracy(found: Sequence[Any], right: Sequence[Any]) -> float:
    """The share of the answers that are right."""
    return sum(map(lambda a, b: a == b, found, right)) / len(right)


def f1(found: Sequence[int], right: Sequence[int], classes: int) -> float:
    """F1 of class 1 if there are two classes, else the mean of all classes' F1."""
    values = []
    for label in [1] if classes == 2 else range(classes):
        hits = sum(a == b == label for a, b in zip(found, right, strict=True))
        said = sum(a == label for a in found) + sum(b == label for b in right)
        values.append(2 * hits / said if said else 0.0)
    return sum(values) / len(values)


def matthews(found: Sequence[int], right: Sequence[int]) -> float:
    """Matthews' correlation of two or more classes; 0 if all answers or all targets are one class.

    ``(c s - sum_k p_k t_k) / sqrt((s^2 - sum_k p_k^2) (s^2 - sum_k t_k^2))`` with s examples, c
    right answers, and p_k answers and t_k targets of class k.

    Source: Gorodkin 2004, "Comparing two K-category assignments by a K-category correlation
    coefficient"; for two classes Matthews 1975.
    """
    count, said, true = len(right), Counter(found), Counter(right)
    hits = sum(map(lambda a, b: a == b, found, right))
    above = hits * count - sum(said[label] * true[label] for label in true)
    below = math.prod(count**2 - sum(n**2 for n in each.values()) for each in (said, true))
    return above / math.sqrt(below) if below else 0.0


def pearson(found: Sequence[float], right: Sequence[float]) -> float:
    """Pearson's correlation; 0 if one of the two is constant, where it is not defined."""
    try:
        return statistics.correlation(found, right)
    except statistics.StatisticsError:
        return 0.0


def ranks(values: Sequence[float]) -> list[float]:
    """The rank of each value, from 1; equal values have the mean of their ranks.

    Pearson's correlation of the ranks is Spearman's.
    """
    places: dict[float, list[int]] = {}
    for rank, value in enumerate(sorted(values), 1):
        places.setdefault(value, []).append(rank)
    return [statistics.fmean(places[value]) for value in values]


def normalized(answer: str) -> str:
    """Lower case, without punctuation, articles and surplus spaces.

    Source: Rajpurkar et al. 2016 (arXiv 1606.05250), §6.1 and the evaluation script.
    """
    answer = "".join(letter for letter in answer.lower() if letter not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", answer).split())


def exact_match(answer: str, right: str) -> float:
    """1 if the answers are the same once normalized."""
    return float(normalized(answer) == normalized(right))


def words_f1(answer: str, right: str) -> float:
    """F1 of the words that two answers have in common; 1 if both have no word."""
    found, wanted = normalized(answer).split(), normalized(right).split()
    if not found or not wanted:
        return float(found == wanted)
    common = sum((Counter(found) & Counter(wanted)).values())
    return 2 * common / (len(found) + len(wanted)) if common else 0.0


def best_spans(
    start: Tensor, end: Tensor, places: Places, count: int, longest: int
) -> list[tuple[float, int, int]]:
    """The ``count`` best spans of a window: (score, first character, last character + 1).

    ``start`` and ``end`` are the logits [T] of a span's first and last token. ``places`` (see
    ``answer_tokens``) may be shorter than T: padding has no entry. ``longest`` is the maximum
    number of tokens of a span.
    """
    inside = torch.tensor([place is not None for place in places], device="cpu")
    allowed = (inside[:, None] & inside).triu()
    allowed &= ~allowed.triu(longest)
    scores = start[: len(places), None].double() + end[: len(places)].double()
    scores = scores.masked_fill(~allowed, -torch.inf).flatten()
    values, order = scores.topk(min(count, int(allowed.sum())))
    spans = []
    for value, index in zip(values.tolist(), order.tolist(), strict=True):
        first, last = places[index // len(places)], places[index % len(places)]
        assert first is not None and last is not None
        spans.append((value, first[0], last[1]))
    return spans


def null_threshold(differences: Sequence[float], gains: Sequence[float]) -> float:
    """The threshold on the null score difference that gives the highest sum of scores.

    The null score difference is the score of "no answer" minus that of the best span. A question
    is answered if its difference is not above the threshold.

    Args:
        differences: the null score difference of each question.
        gains: what each question's score gains if it is answered.

    Returns:
        The lowest threshold with the highest sum: the difference of one of the questions, or 1 less
        than the lowest difference, so that no question is answered.

    Source: Devlin et al. 2019, §4.3; the evaluation script of SQuAD 2.0.
    """
    gain_at: dict[float, float] = {}
    for difference, gain in zip(differences, gains, strict=True):
        gain_at[difference] = gain_at.get(difference, 0.0) + gain
    total = most = 0.0
    threshold = min(differences) - 1
    for difference in sorted(gain_at):
        total += gain_at[difference]
        if total > most:
            most, threshold = total, difference
    return threshold


def _unzipped(encoded: Any) -> list[Feature]:
    names = [name for name in encoded if name not in _BOOKKEEPING]
    return [
        dict(zip(names, values, strict=True))
        for values in zip(*(encoded[name] for name in names), strict=True)
    ]


def _score(example: Example) -> float:
    """The label as a number; an error if it is not one."""
    score = number(example.target)
    if score is None or abs(score) > _MOST_SCORE:
        expected = 'a number, such as 1200.5: finite, up to 1e18, and without "_" or ","'
        raise _data_error(example.where, f"the label {example.target!r}", expected)
    return score


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


def _data_error(where: str, got: str, expected: str, argument: str = "data") -> DataError:
    return DataError(message(_WHERE, argument, f"{where}: {got}", expected, "Correct the file."))
