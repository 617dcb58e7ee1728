"""The place of an answer in a text: SQuAD 1.1, and 2.0 with questions that have none.

Offsets of tokenizers are not believed: those of accents and vowel signs that a tokenizer takes away
belong to no token, a byte-level one may begin after its first letter, and others hold white space.
"""

from __future__ import annotations

import math
import statistics
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fastplm.data._folder import say
from fastplm.data.examples import Example, read_questions
from fastplm.errors import DataError
from fastplm.finetune.losses import OUTSIDE
from fastplm.finetune.metrics import exact_match, null_threshold, words_f1
from fastplm.finetune.models import CAUSAL
from fastplm.finetune.settings import FinetuneArguments
from fastplm.finetune.tasks._task import (
    Collator,
    Featured,
    Labels,
    Logits,
    Scored,
    Task,
    features_of_windows,
    windows,
)

#: (first character, last character + 1) of a token.
Place = tuple[int, int]
Places = Sequence[Place | None]


class QuestionAnswering(Task):
    """Find where the answer stands in a text (SQuAD 1.1 and 2.0); see docs/finetuning.md."""

    auto = "AutoModelForQuestionAnswering"
    metrics: tuple[str, ...] = ("f1", "exact_match")
    label_names = ("start_positions", "end_positions")
    output_names = ("start_logits", "end_logits")
    of_tokens = True
    # The answer that is given too often is "none", which may be right for most questions.
    same_answer = 0.95
    #: The longest span in tokens, and the number of spans that are written.
    span_tokens, best = 30, 20

    @classmethod
    def read(cls, args: FinetuneArguments, path: Any, targets: Any, length: int) -> list[Example]:
        return read_questions(path)

    @classmethod
    def labels(cls, examples: list[Example], args: FinetuneArguments) -> Labels:
        if all(example.target for example in examples):
            return lambda example: ()
        return lambda example: ("an answer" if example.target else "no answer",)

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

    def features(self, examples: list[Example]) -> Featured:
        overlap = self.limit // 3
        encoded = self.tokenizer(
            [self._shortened(example.texts[0], overlap) for example in examples],
            [example.texts[1] for example in examples],
            return_offsets_mapping=True,
            verbose=False,
        )
        found = windows(encoded, 1, self.limit, overlap)
        features, notes = features_of_windows(encoded, found), []
        raw: list[Places] = []
        for index, offsets in enumerate(encoded["offset_mapping"]):
            parts = zip(offsets, encoded.sequence_ids(index), strict=True)
            raw.append([tuple(offset) if part == 1 else None for offset, part in parts])
        known = [
            places_of(example.texts[1], filter(None, offsets))
            for example, offsets in zip(examples, raw, strict=True)
        ]
        wanted = self._targets(examples, known)
        for feature, (sample, window) in zip(features, found, strict=True):
            of_tokens = [raw[sample][token] for token in window]
            places = [None if place is None else known[sample].get(place) for place in of_tokens]
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

    def distance(self, ours: Tensor, theirs: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        ours = ours.masked_fill(~batch["attention_mask"].bool(), OUTSIDE)
        return super().distance(ours, theirs, batch)

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
        return scores | given, texts

    def right(self, example: Example) -> list[str]:
        return [words for _, words in example.target] or [""]

    def most_frequent(self, predictions: list[list[str]]) -> dict[str, Any] | None:
        """Also a sign if the answers are different words, but always the first ones of the text."""
        found = super().most_frequent(predictions)
        first = [
            bool(given[0]) and example.texts[1].startswith(given[0])
            for example, given in zip(self.test, predictions, strict=True)
        ]
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


def places_of(text: str, offsets: Iterable[Place]) -> dict[Place, Place]:
    """{the offsets of a token: the characters that it stands for}, of all tokens of a text.

    White space is left out, and so are tokens of white space alone. Marks that no token has belong
    to the token before them; letters and digits that no token has, to the one after them.
    """
    found: dict[Place, Place] = {}
    before, end = None, 0  # the token that ends last, and where

    def take_marks(until: int) -> None:
        nonlocal end
        while before is not None and end < until and _is_mark(text[end]):
            end += 1
            found[before] = found[before][0], end

    for offset in sorted(set(offsets)):
        first, last = offset
        while first < last and text[first].isspace():
            first += 1
        while first < last and text[last - 1].isspace():
            last -= 1
        if first == last:
            continue
        take_marks(first)
        while first > end and (text[first - 1].isalnum() or _is_mark(text[first - 1])):
            first -= 1
        found[offset] = first, last
        if last >= end:
            before, end = offset, last
    take_marks(len(text))
    return found


def _is_mark(letter: str) -> bool:
    return unicodedata.category(letter)[0] == "M"


def answer_places(known: Iterable[Place], start: int, end: int) -> Place | None:
    """The characters that the tokens of an answer stand for; None if it has no token.

    Args:
        known: the places of all tokens of the text.
        start, end: the characters of the answer.
    """
    inside = [place for place in known if place[0] < end and place[1] > start]
    return (min(inside)[0], max(last for _, last in inside)) if inside else None


def answer_tokens(places: Places, wanted: Place | None) -> tuple[int, int]:
    """The first and last token of an answer; (0, 0) if the window does not hold all of it.

    Args:
        places: of each token of a window; None for those that are not of the text.
        wanted: ``answer_places``.
    """
    first, last = wanted or (0, 0)
    inside = [(i, p) for i, p in enumerate(places) if p and p[0] < last and p[1] > first]
    whole = inside and (inside[0][1][0], inside[-1][1][1]) == wanted
    return (inside[0][0], inside[-1][0]) if whole else (0, 0)


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
