"""A column of vectors or scores beside a column of texts, a batch at a time.

``map_batches`` of Ray Data and ``map`` of Hugging Face's datasets call these classes in many
processes. Neither library is imported here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fastplm._checks import check_int
from fastplm.data import load_tokenizer
from fastplm.errors import check, check_choice, check_type
from fastplm.inference._checkpoint import head_of, load_encoder, load_model
from fastplm.inference.embed import embed
from fastplm.inference.score import log_likelihood, pseudo_log_likelihood
from fastplm.inference.sentence_folder import sentence_transformers_settings
from fastplm.run.checkpoint import config_at
from fastplm.run.hub import folder_of
from fastplm.run.settings import MATMUL_PRECISIONS
from fastplm.run.threads import computing, fp32_products

_SCORES: dict[str, Callable[..., Any]] = {
    "log-likelihood": log_likelihood,
    "pseudo-log-likelihood": pseudo_log_likelihood,
}


class _Column:
    """A function of batches, with a model that each process loads at its first batch.

    A pickle holds the settings, and names, sizes and times of the checkpoint's files instead of the
    model: it is small, and a cache whose key is a hash of it (datasets) sees a model that changed.
    """

    def __init__(
        self,
        where: str,
        function: Callable[..., Any],
        model: str | Path,
        columns: tuple[str, ...],
        into: tuple[str, ...],
        settings: dict[str, Any],
        how: tuple[bool, str, int | None],
    ) -> None:
        inspect.signature(function).bind(None, None, (), **settings)  # TypeError of unknown ones
        self._bf16, self._precision, self._threads = how
        check_choice(where, "matmul_precision", self._precision, MATMUL_PRECISIONS)
        if self._threads is not None:
            check_int(where, "threads", self._threads, 1, 1024, "Pass a number of threads.")
        self._model = Path(folder_of(where, "model", model))
        config_at(where, "model", self._model)
        self._where, self._columns, self._into, self._settings = where, columns, into, settings
        known = ((path.name, path.stat()) for path in self._model.iterdir())
        self._files = sorted((name, stat.st_size, stat.st_mtime_ns) for name, stat in known)

    @cached_property
    def _loaded(self) -> tuple[Any, Any]:
        """The model and its tokenizer."""
        raise NotImplementedError

    def _added(self, *texts: list[str]) -> tuple[Any, ...]:
        """The new columns, of the texts of each of ``columns``."""
        raise NotImplementedError

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_loaded"}

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """The batch with the new columns; texts are a list or an array [B] of strings."""
        expected = "a dictionary of columns, as map_batches and map(batched=True) give it"
        check_type(self._where, "batch", batch, Mapping, expected)
        got = f"the columns {', '.join(batch)}"
        for name in self._columns:
            fix = "Name the column of the texts with `column`."
            check(name in batch, self._where, "batch", got, f"a column {name} among them", fix)
        for name in self._into:
            fix = "Name another one with `into`."
            check(name not in batch, self._where, "into", got, f"no column {name} yet", fix)
        with computing(self._threads), fp32_products(self._precision):
            added = self._added(*(list(batch[name]) for name in self._columns))
        return {**batch, **dict(zip(self._into, added, strict=True))}


class TextEmbedder(_Column):
    """Adds the vectors of a column of texts, as ``embed`` gives them, to each batch.

    Args:
        model: folder of a checkpoint and its tokenizer, or its name on the Hub. If it has the
            ``modules.json`` of sentence-transformers, and neither ``pooling`` nor ``words`` is
            given, its files say what is not given of pooling, normalisation and the longest text.
        column: of the texts.
        into: the new column: fp32 [B, width]; with ``words`` a list of arrays.
        bf16: compute in bfloat16.
        matmul_precision: "highest" or "high", see ``torch.set_float32_matmul_precision``.
        threads: of PyTorch in this process; None = as it is set.
        settings: the other arguments of ``embed``, such as ``pooling`` and ``normalize``.

    Raises:
        TypeError: ``embed`` has no such argument.
        ArgumentValueError, DataError: an argument or the checkpoint does not fit; of a batch, it
            has no such column.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        column: str = "text",
        into: str = "embedding",
        bf16: bool = False,
        matmul_precision: str = "highest",
        threads: int | None = None,
        **settings: Any,
    ) -> None:
        how = bf16, matmul_precision, threads
        super().__init__("embed", embed, model, (column,), (into,), settings, how)
        if not {"pooling", "words"} & settings.keys():
            self._settings = (sentence_transformers_settings(self._model) or {}) | settings

    @cached_property
    def _loaded(self) -> tuple[Any, Any]:
        layers, split = self._settings.get("layers", (-1,)), self._settings.get("words") is not None
        return load_encoder(self._where, self._model, layers, bf16=self._bf16, split=split)

    def _added(self, *texts: list[str]) -> tuple[Any, ...]:
        return (embed(*self._loaded, *texts, **self._settings),)


class TextScorer(_Column):
    """Adds the (pseudo-)log-likelihood of a column of texts, and its number of tokens.

    Args:
        model: folder of a checkpoint and its tokenizer, or its name on the Hub.
        column: of the texts.
        source: column of their sources, of an encoder-decoder; None = empty ones.
        into: the new column, fp64 [B], the sum over the tokens of a text. Beside it ``into_tokens``
            is how many tokens are scored, int64 [B].
        metric: "log-likelihood" or "pseudo-log-likelihood"; default that of the model.
        bf16: compute under autocast to bfloat16.
        matmul_precision, threads: as of ``TextEmbedder``.
        settings: the other arguments of the metric's function, ``log_likelihood`` or
            ``pseudo_log_likelihood``, such as ``method``.

    Raises:
        TypeError: the metric's function has no such argument.
        ArgumentValueError, DataError: an argument or the checkpoint does not fit; of a batch, it
            has no such column.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        column: str = "text",
        source: str | None = None,
        into: str = "score",
        metric: str | None = None,
        bf16: bool = False,
        matmul_precision: str = "highest",
        threads: int | None = None,
        **settings: Any,
    ) -> None:
        where, model = "score", folder_of("score", "model", model)
        self._head = head_of(config_at(where, "model", model))
        default = "pseudo-log-likelihood" if self._head == "MaskedLM" else "log-likelihood"
        self._metric = metric or default
        check_choice(where, "metric", self._metric, tuple(_SCORES))
        got, fix = f"{source} with metric {self._metric}", "Leave it out."
        reads = source is None or self._metric == "log-likelihood"
        check(reads, where, "source", got, "None, as no source is read", fix)
        columns = (column,) if source is None else (column, source)
        both, how = (into, f"{into}_tokens"), (bf16, matmul_precision, threads)
        super().__init__(where, _SCORES[self._metric], model, columns, both, settings, how)

    @cached_property
    def _loaded(self) -> tuple[Any, Any]:
        model = load_model(self._where, self._model, self._head)
        return model, load_tokenizer(self._model, needs=())

    def _added(self, *texts: list[str]) -> tuple[Any, ...]:
        model, tokenizer = self._loaded
        given = dict(zip(("texts", "sources"), texts, strict=False))
        with torch.autocast(model.device.type, torch.bfloat16, enabled=self._bf16):
            scores = _SCORES[self._metric](model, tokenizer, **given, **self._settings)
        counts = [len(score.tokens) for score in scores]
        return np.array([score.sum for score in scores]), np.array(counts, np.int64)
