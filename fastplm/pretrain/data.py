"""The data of a pre-training: the corpus, its tokenizer, its token ids and samples of them."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fastplm.data import (
    PretrainingStream,
    TextFiles,
    TokenStore,
    embedded_corpus,
    load_tokenizer,
    read_documents,
    tokenize,
    train_tokenizer,
)
from fastplm.errors import DataError, check
from fastplm.pretrain.model import flops_a_step
from fastplm.pretrain.objectives import objective_of
from fastplm.pretrain.presets import FAMILIES
from fastplm.pretrain.settings import PretrainPlan

if TYPE_CHECKING:
    from torch.utils.data import Dataset
    from transformers import PreTrainedTokenizerBase, TrainingArguments

#: The name of the corpus that needs no file.
EMBEDDED = "embedded"

#: The share of the tokens, the last ones, that is held out where they are enough.
HELD_OUT = 0.05
#: The most samples of held-out text that a run is judged by.
HELD_OUT_SAMPLES = 512
_TOKENS_AT_ONCE = 1 << 24


@dataclass(frozen=True)
class RunData:
    """What a run reads."""

    tokenizer: PreTrainedTokenizerBase
    #: The tokens of the corpus, and those to train on.
    all: TokenStore
    store: TokenStore
    #: The samples of the whole training, in order.
    samples: Dataset
    #: Samples of the rest; None if the corpus is too small for them.
    held_out: Dataset | None
    documents: Iterable[str]
    #: What was found in the cache and not made now.
    cached: tuple[str, ...]
    #: Of the run; where a budget says how many, they are known by the size of the vocabulary.
    steps: int


def prepare_data(
    args: PretrainPlan,
    training_arguments: TrainingArguments,
    checkpoint: Path | None,
    documents: Iterable[str] | None = None,
) -> RunData:
    """The data of a run, which the first process prepares; a resumed run keeps its tokenizer.

    ``documents`` take the place of ``args.corpus``.
    """
    with training_arguments.main_process_first(desc="preparing the data"):
        cache = Path(args.cache)
        there = {path.name for path in cache.iterdir()} if cache.is_dir() else set()
        if documents is None:
            documents = open_corpus(args.corpus, args.cache)
        tokenizer = _tokenizer(args, checkpoint, documents)
        if args.steps is None:
            args = args.with_flops(flops_a_step(args, tokenizer))
        everything = tokenize(documents, tokenizer, args.cache)
        store, held_out = hold_out(args, everything, tokenizer)
        samples = args.steps * args.gradient_accumulation * args.batch_size
        train_dataset = make_dataset(
            args, store, tokenizer, length=samples * training_arguments.world_size
        )
        if args.short_block_size is not None:
            objective = objective_of(args)(args, tokenizer)
            train_dataset = objective.short_first(train_dataset, store)
        trained = args.tokenizer is None and args.start_from is None and checkpoint is None
        kind = f"{FAMILIES[args.preset.family].tokenizer}-"
        new = {path.name for path in cache.iterdir()} - there
        if isinstance(documents, TextFiles):
            documents.release()
    cached = {
        "tokens": everything.directory.name not in new,
        "vocabulary": trained and not any(name.startswith(kind) for name in new),
    }
    found = tuple(name for name in cached if cached[name])
    given = (tokenizer, everything, store, train_dataset, held_out, documents)
    return RunData(*given, found, args.steps)


def open_corpus(corpus: Sequence[str | Path], cache: str | Path | None = None) -> Iterable[str]:
    """``read_documents``, or for the one name "embedded" the documentation inside Python."""
    if list(corpus) == [EMBEDDED]:
        return _embedded()
    able, got = EMBEDDED not in corpus or Path(EMBEDDED).exists(), " ".join(map(str, corpus))
    expected = f"files, or {EMBEDDED} alone: the documentation inside Python"
    fix = f"Leave {EMBEDDED} out, or the files."
    check(able, "pretrain", "corpus", got, expected, fix, DataError)
    return read_documents(corpus, cache=cache)


@functools.cache
def _embedded() -> list[str]:
    return embedded_corpus()  # it takes seconds, and the demo needs it several times


def make_dataset(
    args: PretrainPlan,
    store: TokenStore,
    tokenizer: PreTrainedTokenizerBase,
    *,
    length: int | None = None,
    at_most: int | None = None,
) -> Dataset:
    """The training stream over a store; by default each block or run of sentences once."""
    objective = objective_of(args)(args, tokenizer)
    source: Any = objective.source(store)
    length = length or len(source)
    if at_most is not None:
        length = min(length, at_most)
    stream = PretrainingStream(source, seed=args.seed, length=length, copies=args.static_masks)
    return objective.samples(stream)


def hold_out(
    args: PretrainPlan, store: TokenStore, tokenizer: PreTrainedTokenizerBase
) -> tuple[TokenStore, Dataset | None]:
    """The tokens to train on, and samples of a tail held out where both parts are large enough."""
    rest, tail = store.split(HELD_OUT)
    objective = objective_of(args)(args, tokenizer)
    if objective.lacks(rest) or objective.lacks(tail):
        return store, None
    return rest, make_dataset(args, tail, tokenizer, at_most=HELD_OUT_SAMPLES)


def make_collator(args: PretrainPlan, tokenizer: PreTrainedTokenizerBase, **settings: Any) -> Any:
    """The collator of a run, or with other settings than the run's."""
    return objective_of(args)(args, tokenizer).collator(**settings)


def held_out_collator(args: PretrainPlan, tokenizer: PreTrainedTokenizerBase) -> Any:
    """The collator of the held-out text of a run."""
    return objective_of(args)(args, tokenizer).judge()


def count_tokens(store: TokenStore, tokenizer: PreTrainedTokenizerBase) -> torch.Tensor:
    """How often each token occurs, for a unigram generator: int64 [V].

    0 for special tokens, which are never masked; nothing is added for tokens that do not occur.
    """
    counts = torch.zeros(len(tokenizer), dtype=torch.int64, device="cpu")
    for start in range(0, len(store), _TOKENS_AT_ONCE):
        tokens = store.tokens[start : start + _TOKENS_AT_ONCE].astype("int64")
        counts += torch.from_numpy(tokens).bincount(minlength=len(counts))
    counts[torch.tensor(tokenizer.all_special_ids, device="cpu")] = 0
    return counts


def _tokenizer(
    args: PretrainPlan, checkpoint: Path | None, documents: Iterable[str]
) -> PreTrainedTokenizerBase:
    needs = objective_of(args).needs
    if args.start_from is not None:
        there = (Path(args.start_from) / "config.json").is_file()
        expected, got = "a folder with a checkpoint", f"{args.start_from}, without a config.json"
        args.check("start_from", there, expected, "Check the path.", got, DataError)
    given = (args.start_from or args.tokenizer) if checkpoint is None else checkpoint
    if given is not None:
        return load_tokenizer(given, needs)
    kind = FAMILIES[args.preset.family].tokenizer
    assert args.vocab_size is not None
    return train_tokenizer(documents, args.vocab_size, args.cache, kind)
