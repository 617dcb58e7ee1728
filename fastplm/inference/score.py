"""How probable a language model finds texts: log-likelihood and pseudo-log-likelihood.

    texts -> token ids -> longest first -> batches of so many tokens, without padding
    -> the loss of each label -> log-probabilities, in the order of the texts

Under a masked language model a text of n tokens is computed n times, each time with another token
masked. The last layer and the head compute only the masked tokens, and there are no full logits.
The head computes the masked tokens of several batches at once, as it reads the whole vocabulary.
Tokens that several texts begin with are scored once by a decoder, as it reads nothing after them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise, takewhile
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import softplus
from torch.nn.utils.rnn import pad_sequence

from fastplm._checks import check_int
from fastplm.errors import check, check_choice
from fastplm.inference._batches import (
    ONLY_IDS,
    around,
    batches,
    check_texts,
    evaluating,
    padded,
)
from fastplm.inference.score_settings import METHODS
from fastplm.models._base import most_positions
from fastplm.models._heads import CausalLM, MaskedLM, requested_rows
from fastplm.models._seq2seq import ConditionalGeneration
from fastplm.models.electra import ElectraForPreTraining
from fastplm.models.encoder_decoder import EncoderDecoderModel
from fastplm.nn._rows import IGNORE_INDEX, vocabulary_loss
from fastplm.run.settings import BATCH_TOKENS

# Texts that the tokenizer gets at once.
_ENCODED_TOGETHER = 1024
# Letters of a text that an error shows.
_SHOWN = 30
# Masked tokens that the head computes at once; with fewer it waits for the vocabulary's weights.
_HEAD_ROWS = 256
#: What T5's encoder reads in place of the first span of its pre-training.
_SENTINEL = "<extra_id_0>"


class TextScore(NamedTuple):
    """The scores of a text.

    Args:
        tokens: the n tokens that are scored, as the tokenizer writes them.
        log_probs: [n], natural logarithms, on the CPU; fp32, or fp64 of a model in fp64.
        truncated: whether the text, or its source, was longer than the model takes and was cut.
    """

    tokens: list[str]
    log_probs: Tensor
    truncated: bool = False

    @property
    def sum(self) -> float:
        """The (pseudo-)log-likelihood of the text; 0 without tokens."""
        return float(self.log_probs.double().sum())

    @property
    def perplexity(self) -> float:
        """As ``perplexity`` of this text alone."""
        return perplexity([self])


def perplexity(scores: Iterable[TextScore]) -> float:
    """The (pseudo-)perplexity of texts, ``exp(-sum of log-probabilities / number of tokens)``.

    NaN without tokens, infinity where it is too large for a float.

    Source: Salazar et al. 2020 (arXiv 1910.14659), section 2.
    """
    total, count = 0.0, 0
    for score in scores:
        total, count = total + score.sum, count + len(score.tokens)
    try:
        return math.exp(-total / count) if count else math.nan
    except OverflowError:
        return math.inf


def pseudo_log_likelihood(
    model: Any,
    tokenizer: Any,
    texts: Sequence[str],
    *,
    method: str = "original",
    batch_tokens: int = BATCH_TOKENS,
    truncate: bool = False,
    progress: Callable[[int, int], object] | None = None,
) -> list[TextScore]:
    """The pseudo-log-likelihood of texts under a model that fills in masked tokens.

    ``PLL(w) = sum over t of log p(w_t | the other tokens)``. With "original" w_t alone is masked;
    with "within_word_l2r" the tokens after w_t in its word are masked, too, because a word of many
    tokens would else get too high a score: each token is easy to guess from the others.

    - A masked language model (BERT, RoBERTa, ALBERT, ELECTRA's generator) computes a copy of the
      text for each token.
    - BART and T5 fill in what is masked as in their pre-training. Their encoder reads the text with
      one mask token in place of a span: of w_t, or with "within_word_l2r" of a whole word, whose
      tokens the decoder then writes from left to right. BART's mask token is ``<mask>``, and its
      decoder is given the text up to the span; T5's is ``<extra_id_0>``, and its decoder is given
      that alone.

    Tokens that the tokenizer adds, such as [CLS] and [SEP], are not scored.

    Args:
        model: a masked language model of ``fastplm.models``, such as ``BertForMaskedLM`` (of
            ELECTRA it is the generator, ``ElectraForMaskedLM``), or BART or T5.
        tokenizer: that of the checkpoint, with a mask token; for "within_word_l2r" a fast one.
        texts: any number. An empty one has no tokens and the sum 0.
        method: "original" or "within_word_l2r".
        batch_tokens: the most tokens of a batch; a longer text is a batch of its own.
        truncate: cut texts that are longer than the model's positions.
        progress: called after each batch with (tokens computed, all tokens to compute).

    Returns:
        One ``TextScore`` a text, in the order of the texts.

    Raises:
        ArgumentValueError, ArgumentTypeError: a model, tokenizer or choice of another kind; a text
            that is longer than the model's positions, without ``truncate``.

    Source: Salazar et al. 2020 (arXiv 1910.14659), section 2; Kauf and Ivanova 2023 (arXiv
        2305.10588), PLL-word-l2r. BART and T5 fill in masks in their pre-training (Lewis et al.
        2020, arXiv 1910.13461, section 2.2, text infilling; Raffel et al. 2020, arXiv 1910.10683,
        section 3.1.4), and BabyLM's evaluation of 2025 masks their tokens one by one.
    """
    where = "pseudo_log_likelihood"
    check_choice(where, "method", method, METHODS)
    paired = isinstance(model, ConditionalGeneration)
    got, fix = f"a {type(model).__name__}", "Use log_likelihood for other language models."
    expected = "a masked language model of fastplm.models, such as BertForMaskedLM, or BART or T5"
    check(paired or isinstance(model, MaskedLM), where, "model", got, expected, fix)
    mask_id: Any = getattr(tokenizer, "mask_token_id", None)
    sentinel = paired and _SENTINEL in tokenizer.get_vocab()
    if sentinel:
        mask_id = tokenizer.convert_tokens_to_ids(_SENTINEL)
    by_words, lacks = method == "within_word_l2r", ""
    if mask_id is None:
        lacks = "without a mask token"
    elif by_words and not tokenizer.is_fast:
        lacks = "that is not a fast one"
    elif by_words and not _knows_words(tokenizer):
        lacks = "that takes a text for one word"
    got, fix = f"a {type(tokenizer).__name__} {lacks}", "Use that of the checkpoint."
    check(not lacks, where, "tokenizer", got, "a fast tokenizer with a mask token", fix)
    limit = most_positions(model.config)
    encoded = _encoded(where, "texts", tokenizer, texts, limit, truncate)
    if not paired:
        work = _masked(model, tokenizer, encoded, mask_id, method)
        return _scores(where, model, tokenizer, encoded, work, batch_tokens, progress)
    copies = [_infilled(text, method, mask_id, sentinel) for text in encoded]
    each = [copy for of_one in copies for copy in of_one]
    work = _written(model, tokenizer, each)
    found = iter(_scores(where, model, tokenizer, each, work, batch_tokens, progress))
    return [
        _joined([next(found) for _ in of_one], text.truncated, _empty(model))
        for text, of_one in zip(encoded, copies, strict=True)
    ]


def log_likelihood(
    model: Any,
    tokenizer: Any,
    texts: Sequence[str],
    *,
    sources: Sequence[str] | None = None,
    bos: bool = False,
    special_tokens: bool = True,
    batch_tokens: int = BATCH_TOKENS,
    truncate: bool = False,
    progress: Callable[[int, int], object] | None = None,
) -> list[TextScore]:
    """The log-likelihood of texts under a model that writes them from left to right.

    ``log p(w) = sum over t of log p(w_t | w_1, …, w_(t-1))``, of an encoder-decoder also given a
    source text.

    - A decoder (GPT, GPT-2) has no probability for the first token, since nothing is before it.
      It is not scored, unless ``bos`` puts a token there.
    - An encoder-decoder (BART, T5, BERT2BERT) scores all tokens that its tokenizer makes of the
      text, also those that it adds, such as </s>: they are the labels of its training. The decoder
      of a BERT2BERT begins with [CLS], which is then no label.

    What texts begin with is scored once: if two begin with the same tokens (and have the same
    source), so do their log-probabilities, exactly.

    Args:
        model: a decoder or an encoder-decoder of ``fastplm.models`` with a language-model head.
        tokenizer: that of the checkpoint.
        texts: any number.
        sources: of an encoder-decoder, one for each text; None = empty texts, of which the encoder
            reads the tokens that the tokenizer adds.
        bos: put the beginning-of-text token (see ``start_token``) before each text of a decoder, in
            the place of what the tokenizer puts there.
        special_tokens: False = without the tokens that the tokenizer adds to a decoder's text.
        batch_tokens: the most tokens of a batch, those of the sources among them; a longer text is
            a batch of its own.
        truncate: cut texts and sources that are longer than the model's positions.
        progress: called after each batch with (tokens computed, all tokens to compute).

    Returns:
        One ``TextScore`` a text, in the order of the texts.

    Raises:
        ArgumentValueError, ArgumentTypeError: a model or tokenizer of another kind; sources for a
            decoder, or not one for each text; a text that is longer than the model's positions,
            without ``truncate``.

    Source: Bengio et al. 2003, "A Neural Probabilistic Language Model", section 1; of pairs Yuan
        et al. 2021 (BARTScore, arXiv 2106.11520), section 3.
    """
    where = "log_likelihood"
    paired = isinstance(model, ConditionalGeneration | EncoderDecoderModel)
    backbone = getattr(model, "base_model", None)
    writes = isinstance(model, CausalLM)
    causal = writes and getattr(backbone, "_is_causal", lambda: True)()
    got = f"a {type(model).__name__}{' without is_decoder' if writes else ''}"
    expected = "a decoder or an encoder-decoder of fastplm.models with a language-model head"
    fix = "Use pseudo_log_likelihood for masked language models."
    check(paired or causal, where, "model", got, expected, fix)
    start = start_token(model, tokenizer)
    fix = "Leave it out."
    check(paired or sources is None, where, "sources", "some for a decoder", "None", fix)
    check(not (paired and bos), where, "bos", "True for an encoder-decoder", "False", fix)
    got, expected = "False for an encoder-decoder", "True, as they are labels of its training"
    check(special_tokens or not paired, where, "special_tokens", got, expected, fix)
    expected = "a tokenizer with a beginning-of-text token"
    check(not bos or start is not None, where, "bos", "True for another", expected, fix)
    limit = most_positions(getattr(model.config, "decoder", model.config))
    written, _ = around(tokenizer) if special_tokens else ([], [])
    joined = isinstance(model, EncoderDecoderModel)
    # As in its training, what the decoder begins with is no label.
    is_start = joined and written == [model.config.decoder_start_token_id]
    options: dict[str, Any] = {"start": start if bos else None, "special": special_tokens}
    options["left_out"] = len(written) if bos or is_start else 0
    encoded = _encoded(where, "texts", tokenizer, texts, limit, truncate, **options)
    if paired:
        given = [""] * len(texts) if sources is None else sources
        fix = "Give one for each text."
        check(len(given) == len(texts), where, "sources", len(given), f"{len(texts)}", fix)
        limit = most_positions(getattr(model.config, "encoder", model.config))
        read = _encoded(where, "sources", tokenizer, given, limit, truncate)
        encoded = [
            _Text(text.ids, text.scored, text.words, source.ids, text.truncated or source.truncated)
            for text, source in zip(encoded, read, strict=True)
        ]
        empty = [i for i, source in enumerate(read) if not len(source.ids)]
        got = f"no token in text {empty[:1]}"
        check(not empty, where, "sources", got, "a token or more", "Give other sources.")
    first = 0 if paired else 1
    order, known = _known_prefixes(encoded, first)
    encoded = [
        text._replace(scored=torch.arange(first + shared, max(first, len(text.ids)), device="cpu"))
        for text, shared in zip(encoded, known, strict=True)
    ]
    work = _written(model, tokenizer, encoded)
    found = _scores(where, model, tokenizer, encoded, work, batch_tokens, progress)
    last = TextScore([], _empty(model))
    for i in order:
        begin = TextScore(last.tokens[: known[i]], last.log_probs[: known[i]])
        found[i] = last = _joined([begin, found[i]], found[i].truncated, _empty(model))
    return found


def originality(
    model: Any,
    tokenizer: Any,
    texts: Sequence[str],
    *,
    batch_tokens: int = BATCH_TOKENS,
    truncate: bool = False,
    progress: Callable[[int, int], object] | None = None,
) -> list[TextScore]:
    """How much ELECTRA's discriminator takes the tokens of texts for the original ones.

    ``sum over t of log(1 - sigmoid(D(w, t)))``, where ``D(w, t)`` is the discriminator's logit of
    "replaced" for token t. It is no likelihood: it is no distribution over texts. A text is
    computed once, without masks. Tokens that the tokenizer adds are not scored.

    Args:
        model: ``fastplm.models.ElectraForPreTraining``.
        tokenizer, texts, batch_tokens, truncate, progress: as of ``pseudo_log_likelihood``.

    Returns:
        One ``TextScore`` a text, whose ``log_probs`` are those of "original".

    Raises:
        ArgumentValueError, ArgumentTypeError: as ``pseudo_log_likelihood``.

    Source: Clark et al. 2020 (arXiv 2003.10555), section 2, D. To compare texts by it, without
        training: Ni and Kao 2022 (arXiv 2207.08141), section 3; Xia et al. 2022 (arXiv 2205.15223),
        who add up the tokens of a phrase.
    """
    where = "originality"
    got, fix = f"a {type(model).__name__}", "Load the discriminator with AutoModelForPreTraining."
    expected = "an ElectraForPreTraining of fastplm.models"
    check(isinstance(model, ElectraForPreTraining), where, "model", got, expected, fix)
    limit = most_positions(model.config)
    encoded = _encoded(where, "texts", tokenizer, texts, limit, truncate)

    def losses(parts: list[_Part]) -> Tensor:
        ids = [text.ids for text, _ in parts]
        inputs = padded(ids, tokenizer.pad_token_id, model.device)
        logits = model(**inputs).logits
        places = [text.scored + row * logits.shape[1] for row, (text, _) in enumerate(parts)]
        logits = logits.flatten()[torch.cat(places).to(model.device)]
        # -log(1 - sigmoid(x)) = log(1 + e^x)
        return softplus(logits.to(torch.promote_types(logits.dtype, torch.float32)))

    work = _Work([(min(1, len(text.scored)), len(text.ids)) for text in encoded], losses)
    return _scores(where, model, tokenizer, encoded, work, batch_tokens, progress)


def start_token(model: Any, tokenizer: Any) -> int | None:
    """The token that stands before a text of a decoder, its beginning-of-text token; or None.

    It is the tokenizer's, of BERT's [CLS], unless the model's configuration names another one of
    its special tokens: a model that read documents with an end between them knows the end alone.
    """
    start: int | None = getattr(model.config, "bos_token_id", None)
    special = getattr(tokenizer, "all_special_ids", ())
    if start in special:
        return start
    roles = (getattr(tokenizer, f"{role}_token_id", None) for role in ("bos", "cls"))
    return next((each for each in roles if each is not None), None)


# --- texts as tokens ------------------------------------------------------------------------------


class _Text(NamedTuple):
    """The tokens of a text."""

    ids: Tensor  # int64 [T]
    scored: Tensor  # int64 [n], the places of the tokens that are scored, ascending
    words: Tensor  # int64 [T], the same number in tokens of one word
    source: Tensor  # int64 [S], of an encoder-decoder
    truncated: bool


#: A text of a batch, and which of its scored tokens belong to it.
_Part = tuple[_Text, slice]
#: The number of a text, its first copy in a batch, and its last one + 1.
_Copies = tuple[int, int, int]


class _Work(NamedTuple):
    """What is computed of texts.

    Args:
        sizes: of each text the number of its copies, one for each scored token or one for all of
            them, and the tokens of one.
        compute: the loss of each scored token of the parts of a batch; or, with ``head``, the row
            [E] that the head reads for it.
        head: the losses from these rows, of several batches; None = there is nothing left to do.
    """

    sizes: list[tuple[int, int]]
    compute: Callable[[list[_Part]], Tensor]
    head: Callable[[Tensor, list[_Part]], Tensor] | None = None


def _encoded(
    where: str,
    argument: str,
    tokenizer: Any,
    texts: Sequence[str],
    limit: int | None,
    truncate: bool,
    start: int | None = None,
    special: bool = True,
    left_out: int = 0,
) -> list[_Text]:
    """The tokens of texts; scored are those of the text itself.

    Args:
        start: the token that each text begins with, whoever puts it there; None = any.
        special: whether the tokenizer adds its tokens.
        left_out: how many of these, at the beginning, are left out.
    """
    check_texts(where, argument, texts)
    limit = 1 << 40 if limit is None else limit
    options = {"add_special_tokens": special}
    found: list[_Text] = []

    def begun(tokens: list[Any]) -> list[Any]:
        tokens = tokens[left_out:]
        # The first token of the text itself, and not one that the tokenizer puts after it.
        begins = start is None or (tokens and tokens[0][:2] == (start, 0))
        return tokens if begins else [(start, 1, None), *tokens]

    for number, written in enumerate(_tokens(tokenizer, texts, **options)):
        tokens = begun(written)
        length = len(tokens)
        truncated = length > limit
        if truncated:
            got = f"text {number}, {texts[number][:_SHOWN]!r}…, of {length} tokens"
            expected = f"{limit} at most, the positions of this model"
            fix = "Shorten it, or cut it with truncate=True (--truncate)."
            check(truncate, where, argument, got, expected, fix)
            room = {"truncation": True, "max_length": limit + len(written) - length}
            (written,) = _tokens(tokenizer, [texts[number]], **room, **options)
            tokens = begun(written)
        # A token of no word is a word of its own.
        rows = [(*of, -1 - j if word is None else word) for j, (*of, word) in enumerate(tokens)]
        ids, added, words = torch.tensor(rows, dtype=torch.int64, device="cpu").reshape(-1, 3).T
        scored = (added == 0).nonzero().flatten()
        found.append(_Text(ids, scored, words, ids.new_empty(0), truncated))
    return found


def _tokens(tokenizer: Any, texts: Sequence[str], **options: Any) -> Iterator[list[Any]]:
    """Of each text (id, whether the tokenizer added it, the number of its word) of each token."""
    options |= {"return_special_tokens_mask": True, **ONLY_IDS}
    for start in range(0, len(texts), _ENCODED_TOGETHER):
        some = list(texts[start : start + _ENCODED_TOGETHER])
        encoded = tokenizer(some, **options)
        for i, ids in enumerate(encoded["input_ids"]):
            words = encoded.word_ids(i) if tokenizer.is_fast else [None] * len(ids)
            yield list(zip(ids, encoded["special_tokens_mask"][i], words, strict=True))


def _knows_words(tokenizer: Any) -> bool:
    """Whether a tokenizer splits a text at white space before it makes tokens."""
    found = tokenizer("a b 1", add_special_tokens=False, verbose=False).word_ids()
    return len({*found}) > 1 or not found


def _hidden(text: _Text, scored: Tensor, method: str) -> Tensor:
    """bool [n, T]: the tokens that are masked where each of ``scored`` [n] is scored."""
    places, scored = torch.arange(len(text.ids), device="cpu"), scored[:, None]
    if method == "original":
        return places == scored
    return (text.words == text.words[scored]) & (places >= scored)


def _infilled(text: _Text, method: str, mask_id: int, sentinel: bool) -> list[_Text]:
    """A copy of a text for each token or word: the encoder reads one mask token in its place.

    What the decoder writes ends with the span, which alone is scored. It begins with the sentinel,
    or with the text before the span.
    """
    place = text.scored
    if method == "original":
        starts = torch.arange(len(place), device="cpu")
    else:
        words = text.words[place]
        begins = (words[1:] != words[:-1]) | (place[1:] != place[:-1] + 1)
        starts = torch.cat([place.new_zeros(min(1, len(place))), begins.nonzero().flatten() + 1])
    mask = torch.tensor([mask_id], device="cpu")
    copies = []
    for some in place.tensor_split(starts[1:]) if len(place) else ():
        first, end = int(some[0]), int(some[-1]) + 1
        source = torch.cat([text.ids[:first], mask, text.ids[end:]])
        ids = torch.cat([mask, text.ids[first:end]]) if sentinel else text.ids[:end]
        scored = torch.arange(len(ids) - len(some), len(ids), device="cpu")
        copies.append(_Text(ids, scored, text.words[:0], source, text.truncated))
    return copies


def _known_prefixes(texts: list[_Text], first: int) -> tuple[list[int], list[int]]:
    """(an order of the texts, of each text how many scored tokens the one before it has, too).

    A decoder scores tokens by those before them alone, so these have the same log-probabilities.
    Scored are the tokens from ``first`` on.
    """
    ids = [text.ids.tolist() for text in texts]
    sources = [text.source.tolist() for text in texts]
    order = sorted(range(len(texts)), key=lambda i: (sources[i], ids[i]))
    known = [0] * len(texts)
    for before, i in pairwise(order):
        if sources[before] == sources[i]:
            both = zip(ids[before], ids[i], strict=False)
            alike = takewhile(lambda pair: pair[0] == pair[1], both)
            known[i] = max(0, sum(1 for _ in alike) - first)
    return order, known


# --- losses ---------------------------------------------------------------------------------------


def _masked(model: Any, tokenizer: Any, texts: list[_Text], mask_id: int, method: str) -> _Work:
    """What a masked language model computes, a copy of the text for each token."""

    def rows(parts: list[_Part]) -> Tensor:
        """[P, E]: the last hidden state of the masked token of each copy."""
        copies: list[Tensor] = []
        for text, chosen in parts:
            hidden = _hidden(text, text.scored[chosen], method)
            copies += text.ids.expand_as(hidden).masked_fill(hidden, mask_id)
        inputs = padded(copies, tokenizer.pad_token_id, model.device)
        places = torch.cat([text.scored[chosen] for text, chosen in parts])
        places += torch.arange(len(copies), device="cpu") * inputs["input_ids"].shape[1]
        places = places.to(model.device)
        outputs = model.base_model(**inputs, output_rows=places, return_dict=True)
        return requested_rows(model, outputs.last_hidden_state, places)

    transform, decoder = model._head()

    def losses(rows: Tensor, parts: list[_Part]) -> Tensor:
        labels = torch.cat([text.ids[text.scored[chosen]] for text, chosen in parts])
        rows = rows if transform is None else transform(rows)
        labels = labels.to(rows.device)
        return vocabulary_loss(rows, decoder, labels, None, dense=True, reduction="none")

    return _Work([(len(text.scored), len(text.ids)) for text in texts], rows, losses)


def _written(model: Any, tokenizer: Any, texts: list[_Text]) -> _Work:
    """What a decoder computes, which scores the last tokens of each text."""
    causal = isinstance(model, CausalLM)

    def losses(parts: list[_Part]) -> Tensor:
        texts = [text for text, _ in parts]
        ids = pad_sequence([text.ids for text in texts], True, IGNORE_INDEX)
        first = torch.tensor([int(text.scored[0]) for text in texts], device="cpu")
        labels = ids.masked_fill(
            torch.arange(ids.shape[1], device="cpu") < first[:, None], IGNORE_INDEX
        )
        read = [text.ids[:-1] if causal else text.source for text in texts]
        inputs = padded(read, tokenizer.pad_token_id, model.device)
        if causal:
            inputs["shift_labels"] = labels[:, 1:].to(model.device)
        else:
            shifted = model.prepare_decoder_input_ids_from_labels(ids)
            inputs["decoder_input_ids"] = shifted.to(model.device)
            inputs["labels"] = labels.to(model.device)
        # Where labels are not counted, those of unused slots come last.
        count = sum(len(text.scored) for text in texts)
        return model(**inputs, reduction="none", output_logits=False).loss[:count]

    # A text without tokens to score is not computed.
    return _Work([(min(1, len(t.scored)), len(t.ids) + len(t.source)) for t in texts], losses)


def _empty(model: Any) -> Tensor:
    """[0], of the type of log-probabilities."""
    return torch.empty(0, dtype=torch.promote_types(model.dtype, torch.float32), device="cpu")


def _joined(parts: list[TextScore], truncated: bool, empty: Tensor) -> TextScore:
    """The scores of the parts of a text as one."""
    tokens = [token for part in parts for token in part.tokens]
    return TextScore(tokens, torch.cat([empty, *(part.log_probs for part in parts)]), truncated)


# --- batches --------------------------------------------------------------------------------------


def _parts(sizes: Sequence[tuple[int, int]], batch_tokens: int) -> Iterator[list[_Copies]]:
    """The texts of each batch, and which of their copies are in it; the longest texts come first.

    ``sizes`` are the number of copies of each text, and the tokens of one.
    """
    counts, lengths = np.array(sizes, np.int64).reshape(-1, 2).T
    texts = np.repeat(np.arange(len(sizes)), counts)  # of each copy
    places = np.arange(len(texts)) - np.repeat(np.cumsum(counts) - counts, counts)  # in its text
    for copies in batches(lengths[texts], batch_tokens):
        text, place = texts[copies], places[copies]
        first = np.flatnonzero(np.diff(text, prepend=-1))
        last = place[[*(first[1:] - 1), -1]] + 1
        yield list(zip(text[first].tolist(), place[first].tolist(), last.tolist(), strict=True))


def _scores(
    where: str,
    model: Any,
    tokenizer: Any,
    texts: list[_Text],
    work: _Work,
    batch_tokens: int,
    progress: Callable[[int, int], object] | None,
) -> list[TextScore]:
    """The scores of all texts."""
    fix = "Lower it if memory is short."
    check_int(where, "batch_tokens", batch_tokens, 1, 1 << 40, fix)
    sizes, losses = work.sizes, [[_empty(model)] for _ in texts]
    waiting: list[tuple[int, _Part]] = []
    rows: list[Tensor] = []

    def finish() -> None:
        """Split what is waiting into the losses of each text."""
        if not waiting:
            return
        parts = [part for _, part in waiting]
        found = torch.cat(rows)
        found = (found if work.head is None else work.head(found, parts)).cpu()
        counts = [len(text.scored[chosen]) for text, chosen in parts]
        for (index, _), some in zip(waiting, found.split(counts), strict=True):
            losses[index].append(some)
        waiting.clear()
        rows.clear()

    done, total = 0, sum(copies * length for copies, length in sizes)
    with evaluating(model):
        for planned in _parts(sizes, batch_tokens):
            parts = [
                (texts[index], slice(first, last) if sizes[index][0] > 1 else slice(None))
                for index, first, last in planned
            ]
            rows.append(work.compute(parts))
            waiting += [(index, part) for (index, *_), part in zip(planned, parts, strict=True)]
            if work.head is None or sum(map(len, rows)) >= _HEAD_ROWS:
                finish()
            done += sum((last - first) * sizes[index][1] for index, first, last in planned)
            if progress is not None:
                progress(done, total)
        finish()
    names = tokenizer.convert_ids_to_tokens
    return [
        TextScore(names(text.ids[text.scored].tolist()), -torch.cat(some), text.truncated)
        for text, some in zip(texts, losses, strict=True)
    ]
