"""Fine-tuning to write texts: summaries, translation, sentence fusion, splitting.

A T5, BART or encoder-decoder checkpoint is trained on sources and targets, or an encoder-decoder
is warm-started from encoder checkpoints. What the model writes for the test sources is scored.
"""

from __future__ import annotations

import functools
import importlib.util
import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel, Trainer, TrainerCallback

import fastplm.hf
import fastplm.models
from fastplm.data import load_tokenizer, train_tokenizer
from fastplm.data._folder import default_cache, say
from fastplm.data.examples import Example
from fastplm.errors import DataError
from fastplm.finetune.mixture import indices_of_parts
from fastplm.finetune.scores import text_scores
from fastplm.finetune.settings import FinetuneArguments
from fastplm.finetune.tasks import (
    ADVICE,
    Collator,
    Feature,
    Featured,
    Scored,
    Task,
    feature_length,
)
from fastplm.models._base import most_positions
from fastplm.nn._rows import IGNORE_INDEX
from fastplm.run.checkpoint import config_at, set_dropout, weights_at

#: The folder of the tokenizer of the targets, inside that of a model with two tokenizers.
TARGET_TOKENIZER = "target_tokenizer"
_SOURCE_VOCABULARY = 8000


class Seq2Seq(Task):
    """A text for a text. See ``Task``, whose ``tokenizer`` is that of the sources."""

    auto = "AutoModelForSeq2SeqLM"
    metrics: tuple[str, ...] = ("bleu", "chrf", "rouge1", "rouge2", "rougeLsum", "exact_match")
    # A few texts may differ, such as those of the longest sources.
    same_answer = 0.9
    #: A model that writes few texts, each for this many sources, hardly reads the source either.
    sources_of_a_text = 10
    #: The least share of the loss that the sources must save, or the model hardly reads them.
    least_gain = 0.05

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
        usual = "max_target_length" not in args.given
        fits = usual or args.max_target_length <= most
        args.check("max_target_length", fits, f"{most}, the decoder's positions", "Lower it.")
        self.target_length = min(args.max_target_length, most)
        self.target_tokenizer = self._target_tokenizer()
        if args.source_encoder_layers is not None:
            got = f"{args.model}, a {self.family}"
            args.check("model", self.family == "bart", "a BART", "Choose another.", got)
            sources = [example.texts[0] for example in self.train]
            self.tokenizer = _trained(sources, args.source_vocab_size or _SOURCE_VOCABULARY)
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
    def tokenizers(self) -> dict[str, Any]:
        if self.target_tokenizer is self.tokenizer:
            return super().tokenizers
        return {**super().tokenizers, TARGET_TOKENIZER: self.target_tokenizer}

    @property
    def end(self) -> int:
        """The token that ends a target."""
        tokenizer = self.target_tokenizer
        eos = tokenizer.eos_token_id
        return tokenizer.sep_token_id if eos is None else eos

    def features(self, examples: list[Example]) -> Featured:
        rows, targets = _rows(self.sources(examples)), self.targets(examples)
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

    def generate(self, trainer: Trainer) -> list[str]:
        """What the model writes for the test sources."""
        model: Any = trainer.model
        encoded = self.test_sources
        lengths = [len(ids) for ids in encoded["input_ids"]]
        order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
        written = [""] * len(order)
        options: dict[str, Any] = {"do_sample": False, "num_beams": self.args.beams}
        options |= {"length_penalty": self.args.length_penalty}
        options |= {"max_new_tokens": self.target_length}
        model.eval()
        size = trainer.args.eval_batch_size
        for begin in range(0, len(order), size):
            chosen = order[begin : begin + size]
            batch = self.tokenizer.pad(_rows(encoded, chosen), return_tensors="pt")
            with torch.no_grad(), trainer.compute_loss_context_manager():
                ids = model.generate(**batch.to(trainer.args.device), **options)
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
        rows = _rows(self.test_sources, sources)
        features = [{**row, "labels": ids} for row, ids in zip(rows, targets, strict=True)]
        features.sort(key=feature_length, reverse=True)
        model, collate, size = trainer.model.eval(), self.collator(), trainer.args.eval_batch_size
        total = torch.zeros((), dtype=torch.float64, device=trainer.args.device)
        for begin in range(0, len(features), size):
            chosen = features[begin : begin + size]
            count = sum(len(feature["labels"]) for feature in chosen)
            batch = trainer._prepare_inputs(collate(chosen))
            with torch.no_grad(), trainer.compute_loss_context_manager():
                total += model(**batch, output_logits=False).loss * count
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

    def most_frequent(self, predictions: Any) -> dict[str, Any] | None:
        """Also a sign if there are few different texts, and many different targets."""
        found = super().most_frequent(predictions)
        written = self._listed(predictions)
        texts, targets = len({*written}), len({example.target for example in self.test})
        few = texts * self.sources_of_a_text <= len(written) and 2 * targets > len(written)
        if found is None or found["share"] >= self.same_answer or not few:
            return found
        sign = f"there are {texts} different texts for {len(written):,} sources"
        return {**found, "sign": sign}

    def records(self, predictions: Any) -> list[dict[str, Any]]:
        """The label of an example with several targets is the list of them."""
        records = super().records(predictions)
        for record, example in zip(records, self.test, strict=True):
            if example.part:
                record["task"] = example.part
            if example.others:
                record["label"] = [example.target, *example.others]
        return records

    def new_model(self) -> Any:
        return None if self.args.encoder is None else warm_started(self.args, self)

    def adapted(self, model: Any) -> Any:
        layers = self.args.source_encoder_layers
        if layers is None:
            return model
        size, padding = len(self.tokenizer), self.tokenizer.pad_token_id
        from fastplm.finetune.bart_translation import BartForTranslation

        return BartForTranslation.from_bart(model, size, layers, padding)


def _rows(encoded: Any, indices: Iterable[int] | None = None) -> list[Feature]:
    """Some of the texts that a tokenizer has encoded, by default all."""
    indices = range(len(encoded["input_ids"])) if indices is None else indices
    return [{name: encoded[name][index] for name in encoded} for index in indices]


def _trained(texts: list[str], size: int) -> Any:
    """A byte-level tokenizer, which keeps case, accents and spaces, trained on texts."""
    tokenizer: Any = train_tokenizer(texts, size, default_cache(), "bytelevel")
    return tokenizer


# --- a new source encoder -------------------------------------------------------------------------


class TwoSteps(TrainerCallback):
    """Freezes most of a ``BartForTranslation`` in the first steps.

    A parameter without a gradient has no state in the optimizer and is not changed by it.
    """

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any, **kwargs: Any) -> None:
        # In every step: after a resume, the first one may be any.
        model.requires_grad_(state.global_step >= self.steps)
        for parameter in model.first_step_parameters():
            parameter.requires_grad_(True)


# --- warm start -----------------------------------------------------------------------------------


def warm_started(args: FinetuneArguments, task: Seq2Seq) -> PreTrainedModel:
    """An encoder-decoder whose parts are loaded from checkpoints or newly initialized.

    Source: Rothe et al. 2020 (arXiv 1907.12461), §2: RND2RND, BERT2RND, RND2BERT, BERT2BERT,
    BERTSHARE, BERT2GPT, …
    """
    assert args.encoder is not None
    paths = {"encoder": args.encoder, "decoder": args.decoder or args.encoder}
    configs = {part: config_at("finetune", part, path) for part, path in paths.items()}
    target, config = task.target_tokenizer, configs["decoder"]
    name = "encoder" if args.decoder is None else "decoder"
    able = type(config) in transformers.AutoModelForCausalLM._model_mapping
    expected = "a checkpoint of a family with a decoder: BERT, RoBERTa, ELECTRA, GPT-2"
    got = f"{paths['decoder']}, a {config.model_type}"
    args.check(name, able, expected, "Choose another --decoder.", got, DataError)
    config.is_decoder = config.add_cross_attention = True
    if args.target_vocab_size is not None:
        config.vocab_size = len(target)
        config.bos_token_id, config.eos_token_id = task.start, task.end
        config.pad_token_id = target.pad_token_id
    # ``fastplm.hf`` has registered the attention.
    ours = args.library == "fastplm"
    options = {"attn_implementation": fastplm.hf.NAME} if ours else {}
    encoder, decoder = (_part(args, part, paths[part], configs[part], options) for part in paths)
    if args.target_vocab_size is not None:  # rows of other tokens may have been loaded
        std = getattr(config, "initializer_range", 0.02)
        torch.nn.init.normal_(decoder.get_input_embeddings().weight, std=std)
    ids = {"decoder_start_token_id": task.start, "eos_token_id": task.end}
    ids["pad_token_id"] = target.pad_token_id
    joint = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(
        encoder.config, decoder.config, **ids
    )
    if args.share:
        joint.tie_encoder_decoder = True
    library: Any = fastplm.models if ours else transformers
    model = library.EncoderDecoderModel(joint, encoder, decoder)
    for name, value in ids.items():
        setattr(model.generation_config, name, value)
    return model


def _part(
    args: FinetuneArguments, part: str, path: str | Path, config: Any, options: dict[str, Any]
) -> Any:
    """The encoder, or the decoder with new cross-attention."""
    encodes = part == "encoder"
    auto: Any = transformers.AutoModel if encodes else transformers.AutoModelForCausalLM
    set_dropout(config, args.dropout)
    if args.warm not in ("both", part):
        return auto.from_config(config, **options)
    options = {**options, "config": config, "dtype": torch.float32}
    options["ignore_mismatched_sizes"] = not encodes and args.target_vocab_size is not None

    def is_new(model: Any, name: str) -> bool:
        """A decoder's cross-attention and head, its embeddings of other tokens, and a pooler."""
        backbone = "" if encodes else f"{model.base_model_prefix}."
        table = model.get_input_embeddings().weight if options["ignore_mismatched_sizes"] else None
        is_table = table is not None and model.get_parameter(name) is table
        return "cross" in name or "pooler." in name or is_table or not name.startswith(backbone)

    expected = f"a checkpoint for the {part}"
    model, _ = weights_at("finetune", part, path, expected, auto, is_new, **options)
    return model
