"""Log-probabilities of some tokens of texts that are token ids, and whether each is the highest.

parts of texts -> the rows of logits that they ask for, each once -> batches without padding
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from fastplm.inference._batches import batches, evaluating, padded
from fastplm.models._heads import CausalLM
from fastplm.nn._rows import in_fp32

#: The log-probability of a token, and whether no other token has a higher one in its place.
Found = tuple[float, bool]
#: What is found of a row of logits, by the tokens that are asked for there.
_Row = dict[int, Found]


class Part(NamedTuple):
    """A text, and which of its tokens are scored: those from ``first`` to before ``end``."""

    ids: list[int]
    first: int
    end: int


class _Reading(NamedTuple):
    """What the model reads once, and by its places the rows of logits that are computed of it."""

    ids: list[int]
    rows: dict[int, _Row]
    mask: int | None = None  # the place of the token that is masked


def token_scores(
    model: Any, tokenizer: Any, parts: Sequence[Part], batch_tokens: int
) -> list[list[Found]]:
    """What is found of each scored token of each part.

    A decoder reads the tokens before it, and a masked language model all others. A row of logits
    is computed once: by a decoder for all parts that begin with the same tokens, also where
    others follow in each; by a masked language model for the same text.

    Args:
        model: a decoder or a masked language model of ``fastplm.models``.
        tokenizer: that of the checkpoint; of a masked language model with a mask token.
        parts: with one scored token at least, and before it another one if a decoder scores it.
        batch_tokens: the most tokens of a batch; a longer text is a batch of its own.
    """
    causal = isinstance(model, CausalLM)
    readings: list[_Reading] = []
    rows: dict[Any, _Row] = {}
    beginnings: dict[tuple[int, int], int] = {}  # a number of each, by the one before and a token
    asked: list[list[tuple[_Row, int]]] = [[] for _ in parts]
    # The longest first: what it begins with is then not read by itself.
    for number in sorted(range(len(parts)), key=lambda i: -len(parts[i].ids)):
        ids, first, end = parts[number]
        reading, beginning = _Reading(ids[:-1], {}), 0
        whole = () if causal else tuple(ids)
        for place, token in enumerate(ids[:end]):
            if place >= first:
                key: Any = beginning if causal else (whole, place)
                if key not in rows:
                    reading = reading if causal else _Reading(ids, {}, place)
                    if not reading.rows:
                        readings.append(reading)
                    reading.rows[place - causal] = rows[key] = {}
                rows[key][token] = (0.0, False)  # until it is computed
                asked[number].append((rows[key], token))
            beginning = beginnings.setdefault((beginning, token), len(beginnings) + 1)
    lengths = np.array([len(reading.ids) for reading in readings], np.int64)
    with evaluating(model):
        for batch in batches(lengths, batch_tokens):
            _compute(model, tokenizer, [readings[i] for i in batch])
    return [[row[token] for row, token in of_part] for of_part in asked]


def _compute(model: Any, tokenizer: Any, readings: Sequence[_Reading]) -> None:
    """Fill the rows of a batch."""
    ids = [torch.tensor(reading.ids, device="cpu") for reading in readings]
    for one, reading in zip(ids, readings, strict=True):
        if reading.mask is not None:
            one[reading.mask] = tokenizer.mask_token_id
    inputs: dict[str, Any] = padded(ids, tokenizer.pad_token_id, model.device)
    width = inputs["input_ids"].shape[1]
    places = [i * width + place for i, each in enumerate(readings) for place in each.rows]
    inputs["output_rows"] = torch.tensor(places, device=model.device)
    if isinstance(model, CausalLM):
        inputs["use_cache"] = False
    logits = in_fp32(model(**inputs).logits[:, 0])
    rows = [row for reading in readings for row in reading.rows.values()]
    pairs = [(i, token) for i, row in enumerate(rows) for token in row]
    at, tokens = torch.tensor(pairs, device=logits.device).T
    best = (logits.argmax(-1)[at] == tokens).tolist()
    values = logits.log_softmax(-1)[at, tokens].tolist()
    for (i, token), *found in zip(pairs, values, best, strict=True):
        rows[i][token] = (found[0], found[1])
