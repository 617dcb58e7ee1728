"""A text for a text: summaries, translation, sentence fusion, splitting.

A T5, BART or encoder-decoder checkpoint is trained on sources and targets, or an encoder-decoder
is warm-started from encoder checkpoints. What the model writes for the test sources is scored.
"""

from __future__ import annotations

import functools
import importlib.util
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastplm.data import load_tokenizer, train_tokenizer
from fastplm.data._folder import default_cache, say
from fastplm.data.examples import Example, read_sources
from fastplm.errors import DataError
from fastplm.finetune.bart_translation import BartForTranslation
from fastplm.finetune.metrics import text_scores
from fastplm.finetune.mixture import indices_of_parts
from fastplm.finetune.settings import FinetuneArguments
from fastplm.finetune.tasks._task import (
    ADVICE,
    Collator,
    Feature,
    Featured,
    Scored,
    Task,
    batches_of,
    features_of,
)
from fastplm.finetune.warm_start import warm_started
from fastplm.models._base import most_positions
from fastplm.nn._rows import IGNORE_INDEX
from fastplm.run.checkpoint import config_at

#: The folder of the tokenizer of the targets, inside that of a model with two tokenizers.
TARGET_TOKENIZER = "target_tokenizer"
_SOURCE_VOCABULARY = 8000


class Seq2Seq(Task):
    """A text for a text. See ``Task``, whose ``tokenizer`` is that of the sources."""

    auto = "AutoModelForSeq2SeqLM"
    inputs = "source"
    metrics: tuple[str, ...] = ("bleu", "chrf", "rouge1", "rouge2", "rougeLsum", "exact_match")
    # A few texts may differ, such as those of the longest sources.
    same_answer = 0.9
    #: A model that writes few texts, each for this many sources, hardly reads the source either.
    sources_of_a_text = 10
    #: The least share of the loss that the sources must save, or the model hardly reads them.
    least_gain = 0.05

    @classmethod
    def check_model(cls, args: FinetuneArguments, config: Any) -> None:
        able = config.is_encoder_decoder or args.encoder is not None
        expected = "a model that writes texts from texts, such as T5 or BART"
        fix = "Choose another, or start one from an encoder: --encoder in place of --model."
        args.check("model", able, expected, fix, f"{args.model}, a {config.model_type}")

    @classmethod
    def read(cls, args: FinetuneArguments, path: Any, targets: Any, length: int) -> list[Example]:
        return read_sources(path, args.text_columns, targets)

    def prepare(self) -> None:
        """Find the tokenizers, some of which are trained on the texts."""
        args = self.args
        names = indices_of_parts(self.test)
        self.metrics += tuple(f"{name}/{metric}" for name in names for metric in Seq2Seq.metrics)
        for library in ("sacrebleu", "rouge_score"):  # now, and not after the training
            there = importlib.util.find_spec(library) is not None
            got = f"seq2seq, without {library}"
            expected = f"the library {library}, which scores the texts"
            fix = "pip install sacrebleu rouge-score"
            args.check("task", there, expected, fix, got, DataError)
        most = most_positions(self._decoder_config()) or args.max_target_length
        fits = args.is_default("max_target_length") or args.max_target_length <= most
        args.check("max_target_length", fits, f"{most}, the decoder's positions", "Lower it.")
        self.target_length = min(args.max_target_length, most)
        self.target_tokenizer = self._target_tokenizer()
        if args.source_encoder_layers is not None:
            got = f"{args.model}, a {self.family}"
            args.check("model", self.family == "bart", "a BART", "Choose another.", got)
            sources = [example.texts[0] for example in self.train]
            self.tokenizer = _trained(sources, args.source_vocab_size or _SOURCE_VOCABULARY)
        self.tokenizers = {"": self.tokenizer}
        if self.target_tokenizer is not self.tokenizer:
            self.tokenizers[TARGET_TOKENIZER] = self.target_tokenizer
        # Whether the decoder starts with a token that the tokenizer puts before each text, as
        # BERT's [CLS]: the labels then begin after it.
        self.starts = args.encoder is not None or self.family == "encoder-decoder"

    def _decoder_config(self) -> Any:
        args = self.args
        if args.encoder is not None:
            name = "encoder" if args.decoder is None else "decoder"
            return config_at("finetune", name, getattr(args, name))
        return getattr(self.checkpoint_config, "decoder", self.checkpoint_config)

    def _target_tokenizer(self) -> Any:
        """The tokenizer of the targets: trained on them, the decoder's, or that of the sources."""
        args = self.args
        if args.target_vocab_size is not None:
            return _trained([example.target for example in self.train], args.target_vocab_size)
        inside = Path(args.checkpoint) / TARGET_TOKENIZER
        if args.decoder is None and not inside.is_dir():
            return self.tokenizer
        found: Any = load_tokenizer(inside if args.decoder is None else args.decoder, needs=())
        if found.pad_token is None:
            found.pad_token = found.eos_token
        return found

    @property
    def end(self) -> int:
        """The token that ends a target."""
        tokenizer = self.target_tokenizer
        eos = tokenizer.eos_token_id
        return tokenizer.sep_token_id if eos is None else eos

    def features(self, examples: list[Example]) -> Featured:
        rows, targets = features_of(self.sources(examples)), self.targets(examples)
        features = [{**row, "labels": ids} for row, ids in zip(rows, targets, strict=True)]
        return features, [None] * len(features)

    def targets(self, examples: list[Example]) -> list[list[int]]:
        """The targets as labels; a line says how many were too long."""
        labels, cut = [], 0
        for example in examples:
            ids = self.target_tokenizer(example.target)["input_ids"]
            ids = ids[1:] if self.starts and ids[:1] == [self.start] else ids
            ids = ids if ids[-1:] == [self.end] else [*ids, self.end]
            if len(ids) > self.target_length:
                cut, ids = cut + 1, [*ids[: self.target_length - 1], self.end]
            labels.append(ids)
        if cut:
            say(f"{cut:,} of {len(examples):,} targets were cut to --max-target-length.")
        return labels

    @property
    def start(self) -> int | None:
        """The token that the target tokenizer puts first, if any."""
        tokenizer = self.target_tokenizer
        bos = tokenizer.bos_token_id
        return tokenizer.cls_token_id if bos is None else bos

    @functools.cached_property
    def test_sources(self) -> Any:
        """The sources of the examples that are scored, perhaps several times."""
        return self.sources(self.test)

    def sources(self, examples: list[Example]) -> Any:
        """The sources as tokens, with the prefix; a line says how many were too long."""
        texts = [(e.prefix or self.args.prefix) + e.texts[0] for e in examples]
        encoded = self.tokenizer(texts, truncation=True, max_length=self.limit)
        full = [i for i, ids in enumerate(encoded["input_ids"]) if len(ids) == self.limit]
        longer = self.tokenizer([texts[i] for i in full])["input_ids"] if full else []
        cut = sum(len(ids) > self.limit for ids in longer)
        if cut:
            say(f"{cut:,} of {len(examples):,} sources were cut to --max-length {self.limit}.")
        return encoded

    def collator(self) -> Collator:
        """Pads the sources with their tokenizer's padding and the labels with -100.

        An encoder-decoder's class finds padding in the decoder's inputs by its id, which may be
        that of the first token, as in GPT-2; so its batches have the decoder's mask.
        """

        def collate(features: list[Feature]) -> dict[str, Tensor]:
            targets = [torch.tensor(feature.pop("labels"), device="cpu") for feature in features]
            batch = dict(self.tokenizer.pad(features, return_tensors="pt"))
            labels = torch.nn.utils.rnn.pad_sequence(targets, True, IGNORE_INDEX)
            batch["labels"] = labels
            if self.starts:
                batch["decoder_attention_mask"] = (labels != IGNORE_INDEX).long()
            return batch

        return collate

    def tokens(self, batch: Mapping[str, Tensor]) -> int:
        return super().tokens(batch) + int((batch["labels"] != IGNORE_INDEX).sum())

    def generate(self, trainer: Any) -> list[str]:
        """What the model writes for the test sources."""
        written = [""] * len(self.test)
        options: dict[str, Any] = {"do_sample": False, "num_beams": self.args.beams}
        options |= {"length_penalty": self.args.length_penalty}
        options |= {"max_new_tokens": self.target_length}
        sources = features_of(self.test_sources)
        pad = functools.partial(self.tokenizer.pad, return_tensors="pt")
        for chosen, batch in batches_of(trainer, sources, pad, longest_first=True):
            with torch.no_grad(), trainer.compute_loss_context_manager():
                ids = trainer.model.generate(**batch, **options)
            texts = self.target_tokenizer.batch_decode(ids, skip_special_tokens=True)
            for index, text in zip(chosen, texts, strict=True):
                written[index] = text.strip()
        return written

    def evaluate(self, trainer: Any) -> Scored:
        written = self.generate(trainer)
        references = [(example.target, *example.others) for example in self.test]
        score = functools.partial(text_scores, stemmer=self.args.stemmer)
        of_each = {
            name: score([written[i] for i in part], [references[i] for i in part])
            for name, part in indices_of_parts(self.test).items()
        }
        if not of_each:
            return score(written, references), written
        scores = {m: statistics.fmean(x[m] for x in of_each.values()) for m in Seq2Seq.metrics}
        for name, its in of_each.items():
            scores |= {f"{name}/{metric}": value for metric, value in its.items()}
        return scores, written

    def reading(self, trainer: Any) -> dict[str, Any]:
        """Whether the model reads its sources: the loss with its own ones, and with others.

        Returns:
            Under "source": ``loss``, the mean over the tokens of the first targets in nats, the
            same where each example has the source of another one of its task, and ``gain``, the
            difference; nothing if no example has another source.
        """
        own, others = list(range(len(self.test))), list(range(len(self.test)))
        for part in indices_of_parts(self.test).values() or [own]:
            for place, index in enumerate(part):
                # Half of the file away: neighbours may be of one document.
                others[index] = part[(place + max(1, len(part) // 2)) % len(part)]
        if all(self.test[i].texts == self.test[j].texts for i, j in enumerate(others)):
            return {}
        targets = self.targets(self.test)
        loss, other = (self._loss(trainer, sources, targets) for sources in (own, others))
        return {"source": {"loss": loss, "loss_with_another": other, "gain": other - loss}}

    def _loss(self, trainer: Any, sources: list[int], targets: list[list[int]]) -> float:
        """The mean loss of targets, each given the source of the test example named."""
        rows = features_of(self.test_sources, sources)
        features = [{**row, "labels": ids} for row, ids in zip(rows, targets, strict=True)]
        total = torch.zeros((), dtype=torch.float64, device=trainer.args.device)
        for chosen, batch in batches_of(trainer, features, self.collator(), longest_first=True):
            count = sum(len(features[index]["labels"]) for index in chosen)
            with torch.no_grad(), trainer.compute_loss_context_manager():
                total += trainer.model(**batch, output_logits=False).loss * count
        return total.item() / sum(map(len, targets))

    def warnings(self, result: Mapping[str, Any]) -> list[str]:
        """Also if the model hardly reads its sources."""
        found, source = super().warnings(result), result.get("source")
        if source is None or source["gain"] >= self.least_gain * source["loss_with_another"]:
            return found
        optimizer = ""
        if self.family == "t5" and self.args.optimizer != "adafactor":
            optimizer = " T5 learns it with --optimizer adafactor."
        said = (
            f"the loss of the targets is {source['loss']:.3f}, and with the sources of other "
            f"examples {source['loss_with_another']:.3f}: the model hardly reads its source"
        )
        return [*found, f"Warning: {said}. {ADVICE}{optimizer}"]

    def most_frequent(self, predictions: list[str]) -> dict[str, Any] | None:
        """Also a sign if there are few different texts, and many different targets."""
        found = super().most_frequent(predictions)
        texts, targets = len({*predictions}), len({example.target for example in self.test})
        few = texts * self.sources_of_a_text <= len(predictions) and 2 * targets > len(predictions)
        if found is None or found["share"] >= self.same_answer or not few:
            return found
        sign = f"there are {texts} different texts for {len(predictions):,} sources"
        return {**found, "sign": sign}

    def records(self, predictions: list[str]) -> list[dict[str, Any]]:
        """The label of an example with several targets is the list of them."""
        records = super().records(predictions)
        for record, example in zip(records, self.test, strict=True):
            if example.part:
                record["task"] = example.part
            if example.others:
                record["label"] = [example.target, *example.others]
        return records

    def make_model(self, of_checkpoint: Callable[[], Any]) -> Any:
        if self.args.encoder is not None:
            return warm_started(self.args, self.target_tokenizer, self.start, self.end)
        model, layers = of_checkpoint(), self.args.source_encoder_layers
        if layers is None:
            return model
        size, padding = len(self.tokenizer), self.tokenizer.pad_token_id
        return BartForTranslation.from_bart(model, size, layers, padding)


def _trained(texts: list[str], size: int) -> Any:
    """A byte-level tokenizer, which keeps case, accents and spaces, trained on texts."""
    tokenizer: Any = train_tokenizer(texts, size, default_cache(), "bytelevel")
    return tokenizer
