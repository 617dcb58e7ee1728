"""Training of the systems before BERT, on the runs of ``fastplm pretrain``."""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch

from fastplm.classic.elmo import ElmoConfig, ElmoForLanguageModeling, batch_of_words
from fastplm.classic.sentences import QuickThoughtsModel, SkipThoughtsModel, ThoughtsConfig, pad
from fastplm.classic.settings import ClassicArguments
from fastplm.classic.words import PAD, Sentences, Words
from fastplm.data.corpus import fingerprint, read_documents
from fastplm.errors import DataError, TooLittleTextError, about, message
from fastplm.run.folder import checkpoint_to_resume, ending, save_models, writing
from fastplm.run.report import block, curve, settings_of, versions
from fastplm.run.runner import Run
from fastplm.run.settings import resolve_warmup
from fastplm.run.trainer import RunTrainer, trained, training_arguments

_HELD_OUT, _MOST_HELD_OUT = 0.05, 2000


class _Trainer(RunTrainer):
    """``RunTrainer`` that counts words."""

    where = "classic"

    def count(self, batches: list[dict[str, Any]]) -> int:
        return sum(batch.pop("count") for batch in batches)


def classic(args: ClassicArguments) -> dict[str, Any]:
    """Train one of the systems; write its model, words and ``metrics.json``.

    Returns the content of ``metrics.json``.

    Raises:
        FastplmError: the corpus, the output folder or a setting is wrong.
    """
    return (_Word2Vec if args.system == "word2vec" else _Steps)(args).run()


class _Classic(Run):
    """A run over sentences."""

    ignored_on_resume = frozenset(
        "resume overwrite out save_every log_every threads corpus".split()
    )
    args: ClassicArguments

    def read(self) -> dict[str, Any]:
        with about(self.args.where, "corpus"):
            self.documents = read_documents(self.args.corpus)
            self.sentences = Sentences(self.documents, self.args.max_length)
        return {"text": fingerprint(self.documents)}


class _Steps(_Classic):
    """A run of the systems that are trained in steps."""

    def read(self) -> dict[str, Any]:
        facts = super().read()
        args, sentences = self.args, self.sentences
        able = args.system == "elmo" or not all(sentences.begins)
        got = "documents of one sentence each"
        expected = "documents of several sentences, as a sentence is learned from those beside it"
        fix = "Put blank lines between documents alone."
        args.check("corpus", able, expected, fix, got, TooLittleTextError)
        # Two at least, as one has no neighbour.
        self.held_out = max(2, min(_MOST_HELD_OUT, math.ceil(_HELD_OUT * len(sentences))))
        texts = (" ".join(words) for words in sentences.words[: len(sentences) - self.held_out])
        self.words = Words.train(texts, args.vocab_size)
        return facts

    def compare(self, before: dict[str, Any]) -> None:
        got = f"{' '.join(map(str, self.args.corpus))}, which is another text"
        fix = "Give the same files, or another --out."
        same = self.record["text"] == before.get("text")
        self.args.check("corpus", same, "the text of the run that is resumed", fix, got)
        super().compare(before)

    def build(self) -> str:
        from transformers import set_seed

        args, sentences = self.args, self.sentences
        assert args.steps is not None  # of a plan
        if self.before is not None:
            self.checkpoint = checkpoint_to_resume("classic", self.out)
        # Every step would warn; there is no other implementation on a CPU.
        what = "LSTM with projections is not supported with oneDNN"
        warnings.filterwarnings("ignore", message=what)
        set_seed(args.seed)
        model = make_model(args, len(self.words))
        settings = training_arguments(
            args,
            self.out,
            max_steps=args.steps,
            learning_rate=args.learning_rate,
            warmup_steps=resolve_warmup(args.steps, None),
            # Neighbours are in one batch only if the text keeps its order.
            train_sampling_strategy="sequential" if args.system == "quick-thoughts" else "random",
        )
        self.device = settings.device
        self.collate = _Collator(args.system, sentences, self.words)
        train = torch.utils.data.Subset(sentences, range(len(sentences) - self.held_out))
        self.trainer = _Trainer(
            model=model, args=settings, train_dataset=train, data_collator=self.collate
        )
        size = sum(weight.numel() for weight in model.parameters())
        cut = sentences.cut
        return block(
            {
                "system": f"{self.args.system}, {size:,} parameters",
                "text": f"{len(sentences) - self.held_out:,} sentences to train on, "
                f"{self.held_out:,} held out, {len(self.words):,} words"
                + (f"; {cut:,} words beyond --max-length left out" if cut else ""),
                "results": str(self.out),
            }
        )

    def train(self) -> dict[str, Any]:
        trainer, out, count = self.trainer, self.out, len(self.sentences)
        model: Any = trainer.model
        saved = [out / "model"]
        with trained(trainer, self.checkpoint):
            with writing("classic", out):  # before anything else that may fail
                save_models(out, {"model": model}, {"": self.words})
            with ending("the evaluation on held-out text", saved):
                held_out = _held_out(trainer, self.collate, range(count - self.held_out, count))
                trainer.check_held_out(held_out)
        with ending("the writing of metrics.json", saved), writing("classic", out):
            metrics = {
                "arguments": settings_of(self.args),
                "versions": versions(),
                "parameters": sum(parameter.numel() for parameter in model.parameters()),
                "words": len(self.words),
                "history": curve(trainer.state.log_history),
                "held_out": held_out,
                "train_seconds": trainer.train_seconds,
                "tokens_per_second": trainer.tokens_per_second,
                "model": str(out / "model"),
            }
            return self.finish(metrics, ["model"])


def make_model(args: ClassicArguments, words: int) -> Any:
    """The untrained model of a run."""
    if args.system == "elmo":
        config = ElmoConfig(
            vocab_size=words, projection=args.embedding, lstm_size=args.hidden, layers=args.layers
        )
        return ElmoForLanguageModeling(config)
    sizes = ThoughtsConfig(vocab_size=words, embedding_size=args.embedding, hidden_size=args.hidden)
    kind = SkipThoughtsModel if args.system == "skip-thoughts" else QuickThoughtsModel
    return kind(sizes)


@torch.no_grad()
def _held_out(trainer: _Trainer, collate: Any, places: range) -> dict[str, float]:
    """The mean loss over held-out sentences, in batches of the training's size."""
    trainer.model.eval()
    total, count, size = 0.0, 0, trainer.args.train_batch_size
    for start in range(0, len(places), size):
        chosen = places[start : start + size]
        if len(chosen) > 1:
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

    def __init__(self, system: str, sentences: Sentences, words: Words) -> None:
        self.system, self.sentences, self.words = system, sentences, words

    def __call__(self, samples: list[dict[str, int]]) -> dict[str, Any]:
        places, begins = [sample["index"] for sample in samples], self.sentences.begins
        text = [self.sentences.words[place] for place in places]
        count = sum(map(len, text))
        if self.system == "elmo":
            return {**batch_of_words(text, self.words), "count": count}
        batch = {"input_ids": pad([*map(self.words.encode, text)]), "count": count}
        if self.system == "quick-thoughts":  # the sentences are in their order
            return {**batch, "begins": torch.tensor([begins[i] for i in places], device="cpu")}
        ends = [*begins[1:], True]
        before = [[PAD] if begins[i] else self.ids(i - 1) for i in places]
        after = [[PAD] if ends[i] else self.ids(i + 1) for i in places]
        return {**batch, "previous": pad(before), "next": pad(after)}

    def ids(self, place: int) -> list[int]:
        return self.words.encode(self.sentences.words[place])


# --- word2vec -------------------------------------------------------------------------------------


class _Word2Vec(_Classic):
    """Skip-gram with negative sampling by gensim (Mikolov et al. 2013, arXiv 1310.4546)."""

    device = torch.device("cpu")

    def read(self) -> dict[str, Any]:
        try:
            from gensim.models import Word2Vec
        except ImportError as error:
            got = f"word2vec, without its library ({error})"
            fix = "pip install gensim"
            raise DataError(message("classic", "system", got, "the library gensim", fix)) from error
        args, facts = self.args, super().read()
        self.model = Word2Vec(
            vector_size=args.hidden,
            sg=1,
            negative=5,
            min_count=1,
            max_final_vocab=args.vocab_size,
            epochs=args.steps,
            seed=args.seed % (2**32 - 1) + 1,  # 0 would be no seed
            workers=1,  # with several the vectors would depend on how they take turns
        )
        self.model.build_vocab(self.sentences.words)
        fix = "Raise it: gensim leaves out all words as rare as the first one without room."
        there = len(self.model.wv) > 0
        args.check("vocab_size", there, "room for the most frequent words", fix)
        return facts

    def build(self) -> str:
        text = f"{len(self.sentences):,} sentences"
        return block({"system": "word2vec", "text": text, "results": str(self.out)})

    def train(self) -> dict[str, Any]:
        model, out = self.model, self.out
        words = self.sentences.words
        model.train(words, total_examples=model.corpus_count, epochs=self.args.steps)
        vectors = out / "vectors.kv"
        with writing("classic", out):
            model.wv.save(str(vectors))
        with (
            ending("the writing of metrics.json", [vectors], self.args.resumable),
            writing("classic", out),
        ):
            metrics = {
                "arguments": settings_of(self.args),
                "versions": versions(),
                "words": len(model.wv),
                "train_seconds": model.total_train_time,
                "model": str(vectors),
            }
            kept = [path.name for path in out.iterdir() if path.suffix in (".kv", ".npy")]
            return self.finish(metrics, kept)


def summary(metrics: dict[str, Any]) -> str:
    """The result of a run as a table for the terminal."""
    rows = {"words": f"{metrics['words']:,}", "time": f"{metrics['train_seconds']:.1f} s"}
    if "history" in metrics:
        first, last = (metrics["history"][i]["loss"] for i in (0, -1))
        rows["loss"] = f"{first:.4f} -> {last:.4f}"
        rows["held out: loss"] = f"{metrics['held_out']['loss']:.4f}"
    return block({**rows, "model": metrics["model"]})
