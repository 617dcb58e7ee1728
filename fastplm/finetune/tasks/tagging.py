"""A tag for each word."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from fastplm.data.examples import Example, read_tagged
from fastplm.finetune.losses import divergence
from fastplm.finetune.metrics import ENTITY_SCORES, accuracy, entity_scores, mark_entities
from fastplm.finetune.settings import FinetuneArguments
from fastplm.finetune.tasks._task import (
    Featured,
    Labelled,
    Labels,
    Logits,
    Scored,
    features_of_windows,
    refuse,
    windows,
)
from fastplm.nn._rows import IGNORE_INDEX


class Tagging(Labelled):
    """One tag for each word. The first token of the word gets the label.

    A sentence that is too long is split into several features, so that no word is left out. Tags
    that mark entities (B-PER, I-PER, O) are scored by entity, and by word.
    """

    auto = "AutoModelForTokenClassification"
    collator_class = "DataCollatorForTokenClassification"
    inputs = "words"
    label = "tag"
    of_tokens = True

    @classmethod
    def read(cls, args: FinetuneArguments, path: Any, targets: Any, length: int) -> list[Example]:
        return read_tagged(path)

    @classmethod
    def labels(cls, examples: list[Example], args: FinetuneArguments) -> Labels:
        return lambda example: set(example.target)

    def prepare(self) -> None:
        self.names = sorted({tag for example in self.known for tag in example.target})
        if mark_entities(self.names):
            self.metrics = (*ENTITY_SCORES, *self.metrics)
        for example in self.test:
            for tag in example.target:
                self.check_label(tag, example)

    def features(self, examples: list[Example]) -> Featured:
        encoded = self.tokenizer(
            [list(example.texts) for example in examples],
            is_split_into_words=True,
            verbose=False,
        )
        found = windows(encoded, 0, self.limit)
        features, notes = features_of_windows(encoded, found), []
        last = (-1, -1)
        for feature, (sample, window) in zip(features, found, strict=True):
            labels, places, words = [], [], encoded.word_ids(sample)
            for place, word in enumerate(words[token] for token in window):
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
            refuse(examples[0].where, got, "words that this model knows")
        return features, notes

    def distance(self, ours: Tensor, theirs: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        labels = batch.get("labels")
        counted = None if labels is None else labels != IGNORE_INDEX
        return divergence(ours, theirs, self.args.teacher_temperature, counted)

    def score(self, examples: list[Example], notes: list[Any], logits: list[Logits]) -> Scored:
        # A word without a token has no prediction. It counts as wrong.
        tags: list[list[str | None]] = [[None] * len(example.texts) for example in examples]
        for places, (scores,) in zip(notes, logits, strict=True):
            chosen = scores.argmax(-1).tolist()
            for sample, word, place in places:
                tags[sample][word] = self.names[chosen[place]]
        right = [example.target for example in examples]
        words = ([tag for sentence in each for tag in sentence] for each in (tags, right))
        of_words = {"accuracy": accuracy(*words)}
        if self.metrics[0] == "accuracy":
            return of_words, tags
        by_sentence = [[tag or "O" for tag in sentence] for sentence in tags]
        return entity_scores(by_sentence, right) | of_words, tags

    def chance(self) -> float:
        """The tag of most words, which is "O" where tags mark entities, finds none of these."""
        return super().chance() if self.metrics[0] == "accuracy" else 0.0

    def counted(self, answer: Any) -> list[Any]:
        return list(answer)
