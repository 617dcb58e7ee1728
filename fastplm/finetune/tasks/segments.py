"""Pairs of segments of running text: sentence order, and next sentences.

ALBERT's paper (table 5) judges models by both tasks, whatever they were pre-trained on. The pairs
here are made of words, not of tokens: models with other tokenizers get the same ones.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from fastplm.data.blocks import split_sentences
from fastplm.data.corpus import read_documents
from fastplm.data.examples import Example
from fastplm.errors import DataError, fail
from fastplm.finetune.models import check_reads_both_ways
from fastplm.finetune.settings import FinetuneArguments
from fastplm.finetune.tasks.classification import Pair
from fastplm.run.losses import pair_logits


class SegmentPairs(Pair):
    """Whether the second segment follows the first, in balanced classes.

    Half of the examples, the same ones every time, get the second label of ``classes``, and the
    segments that belong to it.
    """

    metrics = ("accuracy",)
    #: In the order of Transformers' pre-training classes.
    classes: tuple[str, str]

    @classmethod
    def check_model(cls, args: FinetuneArguments, config: Any) -> None:
        if not args.own_head:
            return
        check_reads_both_ways(args, config)
        expected = "a BERT or ALBERT, which are pre-trained with pairs"
        fix = "Leave the option out: a new head is then trained, alone with --freeze."
        got = f"True with --model {args.model}, a {config.model_type}"
        args.check("own_head", config.model_type in ("bert", "albert"), expected, fix, got)

    @classmethod
    def read(cls, args: FinetuneArguments, path: Any, targets: Any, length: int) -> list[Example]:
        """Pairs of consecutive segments of the documents of a text, all of them in order.

        Sentences are added to a run until it has half as many words as a feature has tokens, or its
        document ends. A run is split at a random sentence, the same one every time; one of a single
        sentence is left out. The pairs of one document are a group.

        Raises:
            DataError: the text cannot be read, or has no document of two sentences.
        """
        generator = torch.Generator().manual_seed(0)
        examples = []
        for group, document in enumerate(read_documents([path]), 1):
            sentences = [" ".join(s.split()) for s in split_sentences(document) if s.strip()]
            begin = count = pairs = 0
            for end, sentence in enumerate(sentences, 1):
                count += len(sentence.split())
                full = count >= length // 2 or end == len(sentences)
                if not full or end - begin < 2:
                    continue
                middle = int(torch.randint(begin + 1, end, (), generator=generator, device="cpu"))
                texts = " ".join(sentences[begin:middle]), " ".join(sentences[middle:end])
                pairs += 1
                place = f"document {group}, pair {pairs}"
                where = f"{path}, {place}"
                examples.append(Example(texts, cls.classes[0], group, where, place))
                begin, count = end, 0
        if not examples:
            got, expected = f"{path}: no document of two sentences", "one at least"
            fix = "Separate documents by blank lines, and sentences by '.', '!', '?' or line ends."
            fail("finetune", "data", got, expected, fix, DataError)
        return examples

    def prepare(self) -> None:
        if self.args.own_head:
            self.auto, self.output_names = "AutoModelForPreTraining", ("logits",)
        self.train, self.test = self._spoiled(self.train), self._spoiled(self.test)
        self.known = self.train
        super().prepare()

    def _spoiled(self, examples: list[Example]) -> list[Example]:
        """The examples, every second one of a random order with the second label.

        Examples that have such labels already, as a teacher's have, stay as they are.
        """
        if any(example.target == self.classes[1] for example in examples):
            return examples
        generator = torch.Generator().manual_seed(0)
        order = torch.randperm(len(examples), generator=generator, device="cpu").tolist()
        found = list(examples)
        for index in order[1::2]:
            texts = self.spoiled(examples, examples[index], generator)
            found[index] = replace(examples[index], texts=texts, target=self.classes[1])
        return found

    def spoiled(
        self, examples: list[Example], example: Example, generator: torch.Generator
    ) -> tuple[str, str]:
        """The segments of an example of the second label."""
        raise NotImplementedError

    @property
    def config(self) -> dict[str, Any]:
        return {} if self.args.own_head else super().config

    def _outputs(self, model: Any, **batch: Any) -> Any:
        if not self.args.own_head:
            return super()._outputs(model, **batch)
        # Given a label of pairs and none of tokens, the model computes no logits of a vocabulary.
        label = batch["input_ids"].new_zeros(len(batch["input_ids"]))
        return {"logits": pair_logits(model(**batch, next_sentence_label=label))}


class SentenceOrder(SegmentPairs):
    """Whether two segments were swapped."""

    classes = ("in order", "swapped")

    def spoiled(
        self, examples: list[Example], example: Example, generator: torch.Generator
    ) -> tuple[str, str]:
        first, second = example.texts
        return second, first


class NextSentence(SegmentPairs):
    """Whether the second segment is that of an example of another document."""

    classes = ("next", "random")

    def _spoiled(self, examples: list[Example]) -> list[Example]:
        if len({example.group for example in examples}) < 2:
            got = f"pairs of one document alone ({examples[0].where})"
            expected = "two documents or more, as a random segment comes from another one"
            fix = "Separate documents by blank lines, or give --eval-data."
            fail("finetune", "data", got, expected, fix, DataError)
        return super()._spoiled(examples)

    def spoiled(
        self, examples: list[Example], example: Example, generator: torch.Generator
    ) -> tuple[str, str]:
        other = example
        while other.group == example.group:
            place = torch.randint(len(examples), (), generator=generator, device="cpu")
            other = examples[int(place)]
        return example.texts[0], other.texts[1]
