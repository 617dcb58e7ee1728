"""What a task of fine-tuning is."""

from __future__ import annotations

import copy
import functools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, NoReturn

import torch
import transformers
from torch import Tensor
from torch.utils.data import Dataset

from fastplm.data.examples import Example
from fastplm.errors import DataError, fail, shown
from fastplm.finetune.frozen import Kept
from fastplm.finetune.labels import doubtful_labels, essence
from fastplm.finetune.losses import divergence, with_language_model, with_teacher
from fastplm.finetune.mixture import counts_of_epoch, indices_of_parts
from fastplm.finetune.settings import FinetuneArguments

Feature = dict[str, Any]
#: A function that makes a padded batch of features.
Collator = Callable[[list[Feature]], Any]
#: The outputs of the model for one feature.
Logits = tuple[Tensor, ...]
#: Features, and for each of them a note that ``Task.score`` needs.
Featured = tuple[list[Feature], list[Any]]
#: Scores by name, and the prediction for each example.
Scored = tuple[dict[str, float], list[Any]]
#: A function from an example to its labels.
Labels = Callable[[Example], Collection[str]]

#: What the warnings about a trained model advise.
ADVICE = "Train longer, or with another --learning-rate."
_BOOKKEEPING = ("offset_mapping", "special_tokens_mask")


class FeatureDataset(Dataset):
    """Features, their lengths, and the outputs that a frozen backbone has computed for them.

    ``teacher`` has the logits of a teacher for each, if there is one. With ``counts``, an epoch
    reads so many of each of the ``parts``, and ``epoch`` is how many that is in all.
    """

    def __init__(
        self, features: list[Feature], parts: Iterable[list[int]] = (), counts: Iterable[int] = ()
    ) -> None:
        self.features = features
        self.parts, self.counts = list(parts), list(counts)
        self.epoch = sum(self.counts) or len(features)
        self.lengths = [feature_length(feature) for feature in features]
        self.kept: dict[Any, Kept] = {}
        self.teacher: list[Logits] = []

    def __len__(self) -> int:
        return len(self.features)

    def __getitem__(self, index: int) -> Feature:
        feature = {**self.features[index], "sample_index": index}
        return {**feature, "teacher": self.teacher[index]} if self.teacher else feature


class Task:
    """One kind of labelled example: how a model reads it, what it learns and how it is scored.

    A task has ``read``, ``features`` and ``score``, and what differs of the rest. One whose model
    generates text overrides ``evaluate``. One that does not call the model in the plain way, or
    whose loss is not the model's own, overrides ``_outputs``.

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
    #: What the tokenizer gets: a "text", "texts" with a token between them, "words", or a "source",
    #: which is read as the model was pre-trained.
    inputs = "texts"
    #: The names of the scores; the first is the main one.
    metrics: tuple[str, ...] = ("accuracy",)
    #: If at least this share of the predictions is the same answer, the model has most likely
    #: learned nothing.
    same_answer = 1.0
    #: The names of the labels in a feature, and of the model outputs that ``score`` reads.
    label_names: tuple[str, ...] = ("labels",)
    output_names: tuple[str, ...] = ("logits",)
    #: Whether these outputs are of tokens: a teacher must then have the model's tokens.
    of_tokens = False

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
        #: The tokenizers to save with the model: {subfolder of the model's folder: tokenizer}.
        self.tokenizers = {"": tokenizer}
        self.limit = max_length
        self.prepare()

    def with_settings(self, **changes: Any) -> Task:
        """The same examples and features under other settings."""
        other = copy.copy(self)
        other.args = self.args.changed(**changes)
        return other

    # --- the examples -----------------------------------------------------------------------------

    @classmethod
    def check_model(cls, args: FinetuneArguments, config: Any) -> None:
        """Check that the task is one for a model, before the data is read."""

    @classmethod
    def read(cls, args: FinetuneArguments, path: Any, targets: Any, length: int) -> list[Example]:
        """The examples of a file.

        Args:
            args: the settings.
            path: the file, of examples to train on or to judge by.
            targets: the files of targets beside it, if any.
            length: the maximum number of tokens of a feature.
        """
        raise NotImplementedError

    @classmethod
    def labels(cls, examples: list[Example], args: FinetuneArguments) -> Labels:
        """A function for ``hold_out``, which keeps each of its labels in the training examples."""
        return lambda example: ()

    def prepare(self) -> None:
        """Find the classes in the examples, and check them."""

    def check_texts(self) -> None:
        """Check that the examples to judge by have as many texts as the others."""
        ours, theirs = len(self.train[0].texts), len(self.test[0].texts)
        expected, fix = f"{ours}, as in the training data", "Give data of one kind."
        got = f"{theirs} texts an example, the choices among them"
        self.args.check("eval_data", ours == theirs, expected, fix, got, DataError)

    # --- the model --------------------------------------------------------------------------------

    @property
    def config(self) -> dict[str, Any]:
        """The fields to set in the model's configuration."""
        return {}

    def make_model(self, of_checkpoint: Callable[[], Any]) -> Any:
        """The model: as it is loaded from its checkpoint, or one that is made in another way."""
        return of_checkpoint()

    # --- training ---------------------------------------------------------------------------------

    @functools.cached_property
    def dataset(self) -> FeatureDataset:
        """The features of the training examples."""
        args, parts = self.args, list(indices_of_parts(self.train).values())
        counts: list[int] = []
        if args.mixture_cap is not None or args.mixture_temperature != 1:
            counts = counts_of_epoch(args, [len(part) for part in parts])
        return FeatureDataset(self.features(self.train)[0], parts, counts)

    def features(self, examples: list[Example]) -> Featured:
        """The inputs of the model."""
        raise NotImplementedError

    def collator(self) -> Collator:
        """A function that makes a padded batch of features."""
        return getattr(transformers, self.collator_class)(self.tokenizer)

    def tokens(self, batch: Mapping[str, Tensor]) -> int:
        """How many tokens a batch has, padding left out."""
        return int(batch["attention_mask"].sum())

    def outputs(self, model: Any, **batch: Any) -> Any:
        """Run a model: ``loss``, if the batch has labels, and what ``output_names`` lists."""
        teacher = batch.pop("teacher", None)
        if self.args.lm_weight:
            outputs = with_language_model(model, batch, self.args.lm_weight, self._outputs)
        else:
            outputs = self._outputs(model, **batch)
        if teacher is None:
            return outputs
        pairs = [(outputs[n], logits) for n, logits in zip(self.output_names, teacher, strict=True)]
        return with_teacher(self.args, outputs, pairs, batch, self.distance)

    def _outputs(self, model: Any, **batch: Any) -> Any:
        """``outputs`` without the additional losses of a language model and of a teacher."""
        return model(**batch)

    # --- a teacher --------------------------------------------------------------------------------

    def teacher_order(self, config: Any) -> list[int]:
        """The number that each label of the task has in the head of a teacher; none to reorder.

        Raises:
            DataError: the teacher of this configuration has learned something else.
        """
        return []

    def check_teacher(self, able: bool, does: str, expected: str, fix: str) -> None:
        """Raise the error of a teacher that has, or does, something else."""
        got = f"{self.args.teacher}, {does}"
        self.args.check("teacher", able, expected, fix, got, DataError)

    def distance(self, ours: Tensor, theirs: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """How far logits are from a teacher's: ``T^2 KL(teacher || student)`` at temperature T.

        The mean over what is classified: examples, labelled words, the ends of answers. Scores are
        compared by their squared difference.
        """
        return divergence(ours, theirs, self.args.teacher_temperature)

    # --- scores -----------------------------------------------------------------------------------

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

    def reading(self, trainer: Any) -> dict[str, Any]:
        """What else is known of a trained model, for its result: nothing, of most tasks."""
        return {}

    def right(self, example: Example) -> Any:
        """The right answer, in the same form as a prediction."""
        return example.target

    def counted(self, answer: Any) -> list[Any]:
        """The parts of a right answer or a prediction that are counted one by one, such as tags."""
        return [answer]

    def counts(self, answers: Iterable[Any]) -> Counter:
        """How often each part of the answers is there."""
        return Counter(part for answer in answers for part in self.counted(answer))

    def baseline(self) -> dict[str, Any] | None:
        """The most frequent right answer of the evaluation examples, and the accuracy of always
        predicting it; None if the first metric is not the accuracy."""
        if self.metrics[0] != "accuracy":
            return None
        usual, share = _most_frequent(self.counts(map(self.right, self.test)))
        return {"label": usual, "accuracy": share}

    def most_frequent(self, predictions: list[Any]) -> dict[str, Any] | None:
        """The most frequent prediction and its share; None if predictions are seldom equal.

        A task that knows of another sign that the model tells no example from another adds it in
        words, under "sign".
        """
        answer, share = _most_frequent(self.counts(predictions))
        return {"prediction": answer, "share": share}

    def one_answer(self, most_frequent: Mapping[str, Any] | None) -> str:
        """In words, that (nearly) all examples have one answer and the targets differ; else ""."""
        if most_frequent is None:
            return ""
        if "sign" in most_frequent:
            return most_frequent["sign"]
        share = most_frequent["share"]
        _, right = _most_frequent(self.counts(map(self.right, self.test)))
        if share < self.same_answer or right >= self.same_answer:
            return ""
        how_many = "all predictions are" if share == 1 else f"{share:.0%} of the predictions are"
        return f"{how_many} {shown(most_frequent['prediction'])}"

    def warnings(self, result: Mapping[str, Any]) -> list[str]:
        """Warnings about a model's result: if ``one_answer`` has something to say."""
        most_frequent = result.get("most_frequent_prediction")
        said = self.one_answer(most_frequent)
        if not said or most_frequent is None:
            return []
        if "sign" not in most_frequent:
            right = self.counts(map(self.right, self.test))
            share = right[most_frequent["prediction"]] / right.total()
            said += f", which is the right answer of {share:.0%} of the examples"
        return [f"Warning: {said}: the model tells none from another. {ADVICE}"]

    def records(self, predictions: list[Any]) -> list[dict[str, Any]]:
        """For each example: its place in the file, its texts, the right answer, the prediction."""
        return [
            {
                "id" if isinstance(example.place, str) else "line": example.place,
                "texts": list(example.texts),
                "label": self.right(example),
                "prediction": prediction,
            }
            for example, prediction in zip(self.test, predictions, strict=True)
        ]

    def label_counts(self, examples: list[Example]) -> dict[str, int] | None:
        """How often each label occurs; None for a task without labels."""
        return None

    def doubts(self) -> list[str]:
        """A line for each thing about the labels that may be a mistake."""
        return []


class Labelled(Task):
    """A task whose targets are labels with names."""

    names: list[str]
    #: What an error calls one.
    label = "label"

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

    def teacher_order(self, config: Any) -> list[int]:
        numbers = {str(name): number for number, name in config.id2label.items()}
        does = f"with the labels {', '.join(sorted(numbers))}"
        expected = f"those of this run: {', '.join(self.names)}"
        fix = "Fine-tune it on labels that are called so."
        self.check_teacher({*numbers} == {*self.names}, does, expected, fix)
        return [numbers[name] for name in self.names]

    def chance(self) -> float:
        (usual, _), *_ = self.label_counts(self.train).most_common(1)
        right = self.label_counts(self.test)
        return right[usual] / right.total()

    def check_label(self, label: str, example: Example) -> None:
        """Check that the label of an evaluation example is one that the model knows."""
        if label not in self.names:
            expected = f"one of the training {self.label}s, {', '.join(self.names[:20])}"
            got = f"the {self.label} {label!r}"
            alike = [name for name in self.names if essence(name) == essence(label)]
            if alike:  # two spellings that may look the same on a screen
                other = f"which is written otherwise than {ascii(alike[0])}"
                got = f"the {self.label} {ascii(label)}, {other}"
            refuse(example.where, got, expected, "eval_data")

    def label_counts(self, examples: list[Example]) -> Counter:
        return self.counts(map(self.right, examples))

    def doubts(self) -> list[str]:
        known = {id(example) for example in self.known}
        others = [example for example in self.test if id(example) not in known]
        return doubtful_labels(self.label_counts([*self.known, *others]))


def predict(trainer: Any, task: Task, features: list[Feature]) -> list[Logits]:
    """The outputs of the trained model for each feature, on the CPU."""
    found: dict[int, Logits] = {}
    for chosen, batch in batches_of(trainer, features, trainer.data_collator):
        inputs = {name: value for name, value in batch.items() if name not in task.label_names}
        with torch.no_grad(), trainer.compute_loss_context_manager():
            outputs = task.outputs(trainer.model, **inputs)
        logits = [outputs[name].float().cpu() for name in task.output_names]
        found.update(zip(chosen, zip(*logits, strict=True), strict=True))
    return [found[index] for index in range(len(features))]


def batches_of(
    trainer: Any, features: list[Feature], collate: Collator, *, longest_first: bool = False
) -> Iterator[tuple[list[int], dict[str, Any]]]:
    """The numbers of features of about one length, and their batch, for the model to evaluate."""
    order = sorted(
        range(len(features)), key=lambda i: feature_length(features[i]), reverse=longest_first
    )
    trainer.model.eval()
    size = trainer.args.eval_batch_size
    for start in range(0, len(order), size):
        chosen = order[start : start + size]
        batch = collate([dict(features[index]) for index in chosen])
        yield (
            chosen,
            {
                name: value.to(trainer.args.device) if isinstance(value, Tensor) else value
                for name, value in batch.items()
            },
        )


def feature_length(feature: Feature) -> int:
    """The number of tokens of a feature, or of its longest text if it holds several."""
    ids = feature["input_ids"]
    return max(map(len, ids)) if isinstance(ids[0], list) else len(ids)


def features_of(encoded: Any, indices: Iterable[int] | None = None) -> list[Feature]:
    """A feature for each text that a tokenizer has encoded, or for some of them."""
    names = [name for name in encoded if name not in _BOOKKEEPING]
    indices = range(len(encoded["input_ids"])) if indices is None else indices
    return [{name: encoded[name][index] for name in names} for index in indices]


def features_of_windows(encoded: Any, found: list[tuple[int, list[int]]]) -> list[Feature]:
    """A feature for each of ``windows``."""
    wholes = features_of(encoded)
    return [
        {name: [values[place] for place in places] for name, values in wholes[example].items()}
        for example, places in found
    ]


def windows(encoded: Any, part: int, limit: int, overlap: int = 0) -> list[tuple[int, list[int]]]:
    """(example, its tokens) of each window of at most ``limit`` tokens of whole texts.

    The windows of an example have all tokens of its text number ``part``, ``overlap`` of them
    twice, between the tokens before and behind it. Overflowing tokens of a tokenizer are not asked
    for: tokenizers 0.23.1 and 0.23.2 leave out most of them.
    """
    found = []
    for example, ids in enumerate(encoded["input_ids"]):
        inside = [i for i, own in enumerate(encoded.sequence_ids(example)) if own == part]
        begin, end = (inside[0], inside[-1] + 1) if inside else (0, 0)
        room = limit - (len(ids) - (end - begin))
        for first in range(begin, end, max(1, room - overlap)) if end else [0]:
            last = min(first + room, end)
            found.append((example, [*range(begin), *range(first, last), *range(end, len(ids))]))
            if last == end:
                break
    return found


def refuse(where: str, got: str, expected: str, argument: str = "data") -> NoReturn:
    """Raise the error of an example, which ``where`` names."""
    fail("finetune", argument, f"{where}: {got}", expected, "Correct the file.", DataError)


def _most_frequent(counts: Counter) -> tuple[Any, float]:
    ((usual, count),) = counts.most_common(1)
    return usual, count / counts.total()
