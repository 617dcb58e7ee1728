"""The data of a run over text: the corpus, its token ids, and samples of them."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fastplm.data import TextFiles, TokenStore, embedded_corpus, read_documents, tokenize
from fastplm.errors import DataError, check
from fastplm.pretrain.objectives import Objective

if TYPE_CHECKING:
    from torch.utils.data import Dataset
    from transformers import PreTrainedTokenizerBase

#: The name of the corpus that needs no file.
EMBEDDED = "embedded"

#: The share of the tokens, the last ones, that is held out where they are enough.
HELD_OUT = 0.05
#: The most samples of held-out text that a run is judged by.
HELD_OUT_SAMPLES = 512
_TOKENS_AT_ONCE = 1 << 24


@dataclass(frozen=True)
class RunData:
    """What a run over text reads."""

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
    cached: tuple[str, ...] = ()
    #: Why nothing is held out.
    too_short: str = ""
    #: What the results depend on beside the text and the settings.
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def held_out_samples(self) -> int:
        """The number of held-out samples."""
        return 0 if self.held_out is None else len(self.held_out)  # type: ignore[arg-type]

    @property
    def held_out_tokens(self) -> int:
        """The tokens that are not trained on."""
        return len(self.all) - len(self.store)


def read_text(
    documents: Iterable[str], objective: Objective, cache: str | Path, length: int
) -> RunData:
    """The tokens of documents, and the samples of a training of this length."""
    there, tokenizer = in_cache(cache), objective.tokenizer
    everything = tokenize(documents, tokenizer, cache)
    store, held_out, lacking = hold_out(objective, everything)
    samples = objective.dataset(store, length)
    if isinstance(documents, TextFiles):
        documents.release()
    cached = ("tokens",) if everything.directory.name in there else ()
    return RunData(tokenizer, everything, store, samples, held_out, documents, cached, lacking)


def in_cache(cache: str | Path) -> set[str]:
    """The names of what is in a cache."""
    return {path.name for path in Path(cache).iterdir()} if Path(cache).is_dir() else set()


def hold_out(objective: Objective, store: TokenStore) -> tuple[TokenStore, Dataset | None, str]:
    """The tokens to train on, and samples of a tail held out where both parts are large enough.

    The third is what they have too little of, if anything.
    """
    rest, tail = store.split(HELD_OUT)
    if lacking := objective.lacks(tail):
        return store, None, f"the last {HELD_OUT:.0%} of this corpus has {lacking}"
    if lacking := objective.lacks(rest):
        return store, None, f"what would be left of this corpus has {lacking}"
    return rest, objective.dataset(tail, at_most=HELD_OUT_SAMPLES), ""


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
