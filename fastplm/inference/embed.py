"""``fastplm embed``: vectors of texts or of their words, from the hidden states of a model.

texts -> token ids -> batches of similar length -> hidden states on packed rows -> pooling
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fastplm._checks import check_int
from fastplm.data._folder import say
from fastplm.data._output import make_room, reserve, result
from fastplm.data.sources import texts_of
from fastplm.errors import DataError, about, check, check_choice, fail
from fastplm.inference._batches import Tokens, batches, limit_of, offsets_of, progress_bar
from fastplm.inference._checkpoint import (
    announce,
    check_numbers,
    computing_results,
    load_encoder,
    warnings_said,
)
from fastplm.inference._encoder import Encoder
from fastplm.inference.sentence_folder import sentence_transformers_settings
from fastplm.inference.settings import (
    COMBINATIONS,
    POOLINGS,
    TOO_LONG,
    WORD_POOLINGS,
    EmbedArguments,
)
from fastplm.run.folder import writing
from fastplm.run.settings import BATCH_TOKENS

_WHERE = "embed"
_ROWS = 1 << 14  # looked at together
#: Poolings that choose one token of a text or word.
_CHOOSE = ("cls", "first", "last")


def embed(
    model: Any,
    tokenizer: Any,
    texts: Sequence[str] | Sequence[Sequence[str]],
    *,
    words: str | None = None,
    pooling: str | Sequence[str] = "mean",
    layers: Sequence[int] = (-1,),
    combine: str = "concat",
    layer_weights: Sequence[float] | None = None,
    normalize: bool = False,
    max_length: int | None = None,
    too_long: str = "truncate",
    batch_tokens: int = BATCH_TOKENS,
    progress: bool = False,
    allocate: Callable[[tuple[int, int], Any], np.ndarray] = np.zeros,
) -> np.ndarray | list[np.ndarray]:
    """Vectors of texts, or of their words.

    Texts of similar length share a batch, and padding is not computed. The vectors are those that
    the model would give for each text alone.

    Args:
        model: of ``fastplm.models`` or Transformers; heads and decoders are left out.
        tokenizer: its fast tokenizer. Words have the tokens that they have inside a text.
        texts: strings, or with ``words`` also lists of words.
        words: "first" (the first token of a word), "mean", "max" or "sum" of its tokens: a vector
            for each word. Strings are split at whitespace. None = a vector for each text.
        pooling: of the tokens of a text, special tokens among them: "mean", "max", "sum", "cls"
            (the first token), "last", "mean_sqrt_len" (the sum over the root of the length) or
            "weighted_mean" (weights 1, 2, 3, …). Several give their vectors one after the other.
        layers: hidden states: 0 = the embeddings, i = those after layer i, -1 = the last ones.
            Layers above them are not computed.
        combine: of several layers: "concat", "mean" or "sum".
        layer_weights: the layers are added, each times its weight; replaces ``combine``.
        normalize: divide each vector by its Euclidean length.
        max_length: tokens of a text at most, special tokens among them; default what the model
            takes.
        too_long: "truncate" = cut longer texts off, with a warning; "error".
        batch_tokens: tokens of a batch; only speed and memory depend on it.
        progress: show a bar on stderr.
        allocate: makes the array of zeros that is filled, of a shape and a type: a memory map, say.

    Returns:
        [texts, width] in the order of the texts; with ``words`` a list of [words of the text,
        width]. fp32 (fp64 of a model in fp64). A word of which no token is left has zeros, as
        has a text without any token.

    Raises:
        ArgumentTypeError, ArgumentValueError: an argument does not fit.

    Source: Devlin et al. 2018 (arXiv 1810.04805), §5.3 (the first token of a word, the last four
        layers concatenated); Reimers & Gurevych 2019 (arXiv 1908.10084), §3 (pooling).
    """
    kinds = (pooling,) if isinstance(pooling, str) else tuple(pooling)
    check(len(kinds) > 0, _WHERE, "pooling", "nothing", " | ".join(POOLINGS), "Name one.")
    for kind in kinds:
        check_choice(_WHERE, "pooling", kind, POOLINGS)
    if words is not None:
        check_choice(_WHERE, "words", words, WORD_POOLINGS)
        kinds = (words,)
        texts = [text.split() if isinstance(text, str) else list(text) for text in texts]
    check_choice(_WHERE, "combine", combine, COMBINATIONS)
    check_choice(_WHERE, "too_long", too_long, TOO_LONG)
    check_int(_WHERE, "batch_tokens", batch_tokens, 1, 2**40, "Pass a number of tokens.")
    encoder = Encoder(_WHERE, model, layers)
    count, weights = len(encoder.layers), layer_weights  # None = the layers are concatenated
    if weights is not None:
        got, expected = f"{len(weights)} numbers", f"{count}, one for each of `layers`"
        check(len(weights) == count, _WHERE, "layer_weights", got, expected, "Pass both.")
    elif combine != "concat" and count > 1:
        weights = [1 / count if combine == "mean" else 1.0] * count
    limit = limit_of(_WHERE, tokenizer, encoder.config, max_length)
    tokens = Tokens.of(_WHERE, tokenizer, texts, limit, split=words is not None)
    if tokens.cut and too_long == "error":
        got = f"text {tokens.cut[0]}, which has more than {limit} tokens"
        fix = "Split it, or allow too_long='truncate'."
        fail(_WHERE, "texts", got, "texts that the model takes whole", fix)
    offsets = None if words is None else offsets_of([len(text) for text in texts])
    height = len(texts) if offsets is None else int(offsets[-1])
    width = encoder.width * len(kinds) * (len(encoder.layers) if weights is None else 1)
    exact = encoder.backbone.dtype == torch.float64
    target = allocate((height, width), np.float64 if exact else np.float32)

    with encoder.ready(), progress_bar(len(tokens.ids), _WHERE, progress) as bar:
        for numbers in batches(tokens.lengths, batch_tokens):
            rows, places, counts = _groups(tokens, numbers, offsets)
            bar.update(int(tokens.lengths[numbers].sum()))
            if len(rows) == 0:  # no text of the batch has a word
                continue
            pool = _Pool(places, counts, encoder.device)
            only = pool.one(kinds[0]) if len(kinds) == 1 and kinds[0] in _CHOOSE else None
            states = encoder(tokens.batch(numbers, encoder.config.pad_token_id or 0), only)
            if states[0].dtype not in (torch.float32, torch.float64):
                states = [state.float() for state in states]
            if weights is not None:
                states = [sum(w * state for w, state in zip(weights, states, strict=True))]  # type: ignore[list-item]
            if only is None:
                states = [pool(state, kind) for kind in kinds for state in states]
            vectors = states[0] if len(states) == 1 else torch.cat(states, 1)
            target[rows] = (F.normalize(vectors) if normalize else vectors).cpu().numpy()
    if tokens.cut:
        warnings.warn(_what_was_cut(tokens, offsets, limit), stacklevel=2)
    if offsets is None:
        return target
    return np.split(target, offsets[1:-1]) if len(offsets) > 1 else []


def _groups(
    tokens: Tokens, numbers: np.ndarray, offsets: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(rows of the result, tokens of the batch, how many of these belong to each row).

    Words without a token are left out.
    """
    lengths = tokens.lengths[numbers]
    if offsets is None:
        return numbers, np.arange(lengths.sum()), lengths
    assert tokens.words is not None
    words = tokens.words[tokens.places(numbers)]
    places = np.flatnonzero(words >= 0)
    words = (words + np.repeat(offsets[numbers], lengths))[places]
    starts = np.flatnonzero(np.diff(words, prepend=-1))
    return words[starts], places, np.diff(starts, append=len(words))


class _Pool:
    """Makes one vector of the tokens of each group.

    ``places``, int64 [M], are tokens of the batch, group by group, and ``counts``, int64 [G], how
    many each group has, 1 at least.
    """

    def __init__(self, places: np.ndarray, counts: np.ndarray, device: torch.device) -> None:
        self.places = torch.from_numpy(places).to(device)
        self.counts = torch.from_numpy(counts).to(device)
        self.ends = self.counts.cumsum(0)

    def one(self, kind: str) -> Tensor:
        """int64 [G]: the token that "cls", "first" or "last" chooses."""
        return self.places[self.ends - 1 if kind == "last" else self.ends - self.counts]

    def __call__(self, states: Tensor, kind: str) -> Tensor:
        """[N, E] -> [G, E]."""
        if kind in _CHOOSE:
            return states[self.one(kind)]
        starts = self.ends - self.counts
        mode = kind if kind in ("mean", "max") else "sum"
        weights = None
        if kind == "weighted_mean":
            order = torch.arange(len(self.places), device=states.device)
            order = order - starts.repeat_interleave(self.counts) + 1
            totals = self.counts * (self.counts + 1) // 2
            weights = order.to(states.dtype) / totals.repeat_interleave(self.counts)
        elif kind == "mean_sqrt_len":
            roots = self.counts.to(states.dtype).rsqrt()
            weights = roots.repeat_interleave(self.counts)
        return F.embedding_bag(self.places, states, starts, mode=mode, per_sample_weights=weights)


def _what_was_cut(tokens: Tokens, offsets: np.ndarray | None, limit: int | None) -> str:
    line = f"{len(tokens.cut):,} of {len(tokens.lengths):,} texts were cut off after {limit} tokens"
    if offsets is None:
        return f"{line}."
    assert tokens.words is not None
    lost = 0
    for number in tokens.cut:
        begin, end = tokens.offsets[number : number + 2]
        last = tokens.words[begin:end].max(initial=-1)
        lost += int(offsets[number + 1] - offsets[number] - last - 1)
    return f"{line}; {lost:,} words have a vector of zeros."


# --- the command ----------------------------------------------------------------------------------


def embed_file(args: EmbedArguments) -> str:
    """``fastplm embed``: write the vectors of a file's texts; returns the line that sums it up.

    Raises:
        FastplmError: a file, the model or a setting is wrong.
    """
    args = args.plan().with_models()
    out = Path(args.out)
    of_words = out.with_suffix(".offsets.npy")
    with computing_results(args, out, of_words):
        return _embed_file(args, out, of_words)


def _embed_file(args: EmbedArguments, out: Path, of_words: Path) -> str:
    asked = args.words is not None or args.pooling is not None
    theirs = None if asked else sentence_transformers_settings(args.model)
    known = theirs or {"pooling": args.pooling or ("mean",), "normalize": False, "max_length": None}
    names = ("words", "layers", "combine", "layer_weights", "too_long", "batch_tokens")
    options: dict[str, Any] = {name: getattr(args, name) for name in names} | known
    options["normalize"] |= args.normalize
    options["max_length"] = args.max_length or known["max_length"]
    layers = options["layers"] = args.layers or (-1,)
    with about(_WHERE, "data"):
        given = [text for _, text in texts_of(args.data)]
    texts = [text or "" for text in given]
    if None in given:
        say(f"rows of {args.data} without a text, taken as empty ones: {given.count(None):,}")
    some = any(text.strip() for text in texts)
    args.check("data", some, "a file with texts", "Check it.", error=DataError)
    split = args.words is not None
    model, tokenizer = load_encoder(_WHERE, args.model, layers, bf16=args.bf16, split=split)
    of_each = "word" if split else "text"
    what = f"{args.words or ' and '.join(known['pooling'])} of the tokens of each {of_each}"
    if args.layers is not None:
        how = "weighted sum" if args.layer_weights else args.combine
        what += f", {how} of layers {' '.join(map(str, layers))}"
    what += ", normalized" if options["normalize"] else ""
    what += ", as modules.json says" if theirs else ""
    announce(args, model, f"{len(texts):,} texts", vectors=what)

    start = time.perf_counter()
    with _array(out, args.dtype) as (allocate, made):
        with warnings_said():
            found = embed(model, tokenizer, texts, **options, progress=True, allocate=allocate)
        (vectors,) = made
        finite = all(
            np.isfinite(vectors[start : start + _ROWS]).all()
            for start in range(0, len(vectors), _ROWS)
        )
        check_numbers(args, finite, ", or --layer-weights and --dtype")
        if split:
            with result(of_words) as part, part.open("wb") as file:
                np.save(file, offsets_of([len(each) for each in found]))
        elif of_words.exists():  # of the vectors before
            make_room(of_words)
    what = f"words of {len(texts):,} texts" if split else "texts"
    seconds = time.perf_counter() - start
    return f"{len(vectors):,} {what}, {vectors.shape[1]} numbers each, in {seconds:.1f} s: {out}"


@contextmanager
def _array(path: Path, dtype: str) -> Iterator[Any]:
    """Gives what makes the array of a file, and a list of it; the file is there when all of it is
    written."""
    made: list[np.memmap] = []
    with result(path) as part:

        def allocate(shape: tuple[int, int], _: Any) -> np.ndarray:
            made.append(np.lib.format.open_memmap(part, "w+", np.dtype(dtype), shape))
            with writing(_WHERE, path, "Make room, or choose another --out."):
                reserve(part)
            return made[0]

        yield allocate, made
        made[0].flush()
