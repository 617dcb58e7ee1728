"""Training of the systems before BERT, on the runs of ``fastplm pretrain``."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastplm.classic.elmo import ElmoConfig, ElmoForLanguageModeling, batch_of_words
from fastplm.classic.sentences import (
    QuickThoughtsModel,
    SkipThoughtsModel,
    ThoughtsConfig,
    pad,
)
from fastplm.classic.settings import ClassicArguments
from fastplm.classic.words import BEGIN, END, PAD, UNK, Sentences, Words
from fastplm.data._folder import MANIFEST, damage, say, seal, write_json
from fastplm.data.corpus import TextFiles, fingerprint, read_documents
from fastplm.errors import DataError, TooLittleTextError, message
from fastplm.run.begin import begin, describe, started
from fastplm.run.folder import RECORD, check_same, checkpoint_to_resume, save_models, writing
from fastplm.run.interrupt import saved_when_stopped
from fastplm.run.report import block, curve, settings_of, versions
from fastplm.run.trainer import RunTrainer, training_arguments

_FREE_ON_RESUME = {"resume", "overwrite", "out", "save_every", "log_every", "threads", "corpus"}
_HELD_OUT, _MOST_HELD_OUT = 0.05, 2000


class _Trainer(RunTrainer):
    """``RunTrainer`` that counts words."""

    where = "classic"
    _words = 0

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        batches, num_items = super().get_batch_samples(*args, **kwargs)
        self._words += sum(batch.pop("count") for batch in batches)
        return batches, num_items

    def window_tokens(self) -> float:
        words, self._words = self._words, 0
        return words


def classic(args: ClassicArguments) -> dict[str, Any]:
    """Train one of the systems; write its model, words and ``metrics.json``.

    Returns the content of ``metrics.json``.

    Raises:
        FastplmError: the corpus, the output folder or a setting is wrong.
    """
    with started(args) as (before, make_room):
        documents = read_documents(args.corpus)
        if args.system == "word2vec":
            return _word2vec(args, documents, make_room)
        return _train(args, documents, before, make_room)


def _train(
    args: ClassicArguments,
    documents: TextFiles,
    before: dict[str, Any] | None,
    make_room: Callable[[], None],
) -> dict[str, Any]:
    from transformers import set_seed

    out, checkpoint = Path(args.out), None
    assert args.steps is not None, "see ClassicArguments.__post_init__"
    sentences = Sentences(documents, args.max_length)
    args.check(
        "corpus",
        args.system == "elmo" or not all(sentences.begins),
        "documents of several sentences, as a sentence is learned from those beside it",
        "Put blank lines between documents alone.",
        "documents of one sentence each",
        TooLittleTextError,
    )
    # Two at least, as one has no neighbour.
    held_out = max(2, min(_MOST_HELD_OUT, math.ceil(_HELD_OUT * len(sentences))))
    train = torch.utils.data.Subset(sentences, range(len(sentences) - held_out))
    words = Words.train((" ".join(s) for s in sentences.words[: len(train)]), args.vocab_size)
    run = describe(args, _FREE_ON_RESUME, text=fingerprint(documents))
    if before is not None:
        got = f"{' '.join(map(str, args.corpus))}, which is another text"
        fix = "Give the same files, or another --out."
        same = run["text"] == before.get("text")
        args.check("corpus", same, "the text of the run that is resumed", fix, got)
        check_same("classic", run, before)
        if damage(out) is None:
            say(f"The run in {out} is finished, all {args.steps} steps of it: nothing was changed.")
            return json.loads((out / "metrics.json").read_text())
        checkpoint = checkpoint_to_resume("classic", out)
        (out / MANIFEST).unlink(missing_ok=True)
    # Every step would warn; there is no other implementation on a CPU.
    warnings.filterwarnings("ignore", message="LSTM with projections is not supported with oneDNN")
    set_seed(args.seed)
    model = make_model(args, len(words))
    settings = training_arguments(
        args,
        out,
        bf16=False,
        max_steps=args.steps,
        per_device_train_batch_size=args.batch_size,
        learning_rate=args.learning_rate,
        warmup_steps=args.steps // 10,
        seed=args.seed,
        # Neighbours are in one batch only if the text keeps its order.
        train_sampling_strategy="sequential" if args.system == "quick-thoughts" else "random",
    )
    collate = COLLATORS[args.system](sentences, words)
    trainer = _Trainer(model=model, args=settings, train_dataset=train, data_collator=collate)
    facts = {
        "system": f"{args.system}, {sum(p.numel() for p in model.parameters()):,} parameters",
        "text": f"{len(train):,} sentences to train on, {held_out:,} held out, {len(words):,} words"
        + (f"; {sentences.cut:,} words beyond --max-length left out" if sentences.cut else ""),
        "results": str(out),
    }
    begin(args, run, block(facts), settings.device, make_room)
    with saved_when_stopped(trainer):
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    held_out_loss = _held_out(trainer, collate, range(len(train), len(sentences)))
    trainer.check_held_out(held_out_loss)
    metrics = {
        "arguments": settings_of(args),
        "versions": versions(),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "words": len(words),
        "history": curve(trainer.state.log_history),
        "held_out": held_out_loss,
        "train_seconds": trainer.train_seconds,
        "tokens_per_second": trainer.tokens_per_second,
        "model": str(out / "model"),
    }
    with writing("classic", out):
        save_models(out, {"model": model}, {"": words})
        write_json(out / "metrics.json", metrics)
        seal(out, ["model", "metrics.json", RECORD])
    return metrics


def make_model(args: ClassicArguments, words: int) -> Any:
    """The untrained model of a run."""
    if args.system == "elmo":
        config = ElmoConfig(
            vocab_size=words,
            projection=args.embedding,
            lstm_size=args.hidden,
            layers=args.layers,
        )
        return ElmoForLanguageModeling(config)
    sizes = ThoughtsConfig(vocab_size=words, embedding_size=args.embedding, hidden_size=args.hidden)
    kind = SkipThoughtsModel if args.system == "skip-thoughts" else QuickThoughtsModel
    return kind(sizes)


@torch.no_grad()
def _held_out(trainer: _Trainer, collate: Any, places: range) -> dict[str, float]:
    """The mean loss over held-out sentences, in batches of the training's size."""
    trainer.model.eval()
    total, count = 0.0, 0
    for start in range(places.start, places.stop, trainer.args.train_batch_size):
        chosen = places[start - places.start :][: trainer.args.train_batch_size]
        if len(chosen) < 2:
            continue
        batch = collate([{"index": index} for index in chosen])
        weight = batch.pop("count")
        batch = {name: value.to(trainer.args.device) for name, value in batch.items()}
        total += float(trainer.model(**batch).loss) * weight
        count += weight
    loss = total / max(count, 1)
    return {"loss": loss, "perplexity": math.exp(min(loss, 700.0))}


# --- batches --------------------------------------------------------------------------------------


class _Collator:
    """Makes a batch of sentences by their places in the text, and counts its words."""

    def __init__(self, sentences: Sentences, words: Words) -> None:
        self.sentences, self.words = sentences, words

    def __call__(self, samples: list[dict[str, int]]) -> dict[str, Any]:
        places = [sample["index"] for sample in samples]
        count = sum(len(self.sentences.words[place]) for place in places)
        return {**self.batch(places), "count": count}

    def batch(self, places: list[int]) -> dict[str, Tensor]:
        raise NotImplementedError

    def ids(self, place: int) -> list[int]:
        known = self.words.ids
        return [BEGIN, *(known.get(word, UNK) for word in self.sentences.words[place]), END]


class _WithCharacters(_Collator):
    def batch(self, places: list[int]) -> dict[str, Tensor]:
        return batch_of_words([self.sentences.words[place] for place in places], self.words)


class _WithNeighbours(_Collator):
    def batch(self, places: list[int]) -> dict[str, Tensor]:
        begins, last = self.sentences.begins, len(self.sentences) - 1
        before = [[PAD] if begins[i] else self.ids(i - 1) for i in places]
        after = [[PAD] if i == last or begins[i + 1] else self.ids(i + 1) for i in places]
        return {
            "input_ids": pad([self.ids(i) for i in places]),
            "previous": pad(before),
            "next": pad(after),
        }


class _InOrder(_Collator):
    def batch(self, places: list[int]) -> dict[str, Tensor]:
        begins = torch.tensor([self.sentences.begins[i] for i in places])
        return {"input_ids": pad([self.ids(i) for i in places]), "begins": begins}


COLLATORS: dict[str, Callable[[Sentences, Words], _Collator]] = {
    "elmo": _WithCharacters,
    "skip-thoughts": _WithNeighbours,
    "quick-thoughts": _InOrder,
}


# --- word2vec -------------------------------------------------------------------------------------


def _word2vec(
    args: ClassicArguments, documents: TextFiles, make_room: Callable[[], None]
) -> dict[str, Any]:
    """Skip-gram with negative sampling by gensim (Mikolov et al. 2013, arXiv 1310.4546)."""
    try:
        from gensim.models import Word2Vec
    except ImportError as error:
        got = f"word2vec, without its library ({error})"
        fix = "pip install gensim"
        raise DataError(message("classic", "system", got, "the library gensim", fix)) from error
    out = Path(args.out)
    sentences = Sentences(documents, args.max_length)
    run = describe(args, _FREE_ON_RESUME, text=fingerprint(documents))
    facts = {"system": "word2vec", "text": f"{len(sentences):,} sentences", "results": str(out)}
    trained = Word2Vec(
        vector_size=args.hidden,
        sg=1,
        negative=5,
        min_count=1,
        max_final_vocab=args.vocab_size,
        epochs=args.steps,
        seed=args.seed % (2**32 - 1) + 1,  # 0 would be no seed
        workers=1,  # with several the vectors would depend on how they take turns
    )
    trained.build_vocab(sentences.words)
    args.check(
        "vocab_size",
        len(trained.wv) > 0,
        "room for the most frequent words",
        "Raise it: gensim leaves out all words that are as rare as the first one without room.",
    )
    begin(args, run, block(facts), torch.device("cpu"), make_room)
    trained.train(sentences.words, total_examples=trained.corpus_count, epochs=args.steps)
    metrics = {
        "arguments": settings_of(args),
        "versions": versions(),
        "words": len(trained.wv),
        "train_seconds": trained.total_train_time,
        "model": str(out / "vectors.kv"),
    }
    with writing("classic", out):
        trained.wv.save(str(out / "vectors.kv"))
        write_json(out / "metrics.json", metrics)
        seal(out, [path.name for path in out.iterdir() if path.suffix in (".kv", ".npy", ".json")])
    return metrics


def summary(metrics: dict[str, Any]) -> str:
    """The result of a run as a table for the terminal."""
    rows = {"words": f"{metrics['words']:,}", "time": f"{metrics['train_seconds']:.1f} s"}
    if "history" in metrics:
        first, last = (metrics["history"][i]["loss"] for i in (0, -1))
        rows["loss"] = f"{first:.4f} -> {last:.4f}"
        rows["held out: loss"] = f"{metrics['held_out']['loss']:.4f}"
    return block({**rows, "model": metrics["model"]})
