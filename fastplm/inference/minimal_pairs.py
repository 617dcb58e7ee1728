"""Minimal pairs: how often a model finds the acceptable one of two sentences more probable.

pairs -> distinct sentences -> their scores under the model -> of each pair, which is higher
-> the share of right ones by paradigm, term and field, with 95 % intervals
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from statistics import NormalDist
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastplm.data.minimal_pairs import MinimalPair
from fastplm.errors import DataError, check, check_choice
from fastplm.inference._batches import check_texts
from fastplm.inference.score import (
    TextScore,
    log_likelihood,
    originality,
    pseudo_log_likelihood,
    start_token,
)
from fastplm.inference.score_settings import EMPTY_SOURCE, METHODS, PAIR_METHODS
from fastplm.models._heads import CausalLM, MaskedLM
from fastplm.models._seq2seq import ConditionalGeneration
from fastplm.models.electra import ElectraForPreTraining
from fastplm.models.encoder_decoder import EncoderDecoderModel
from fastplm.run.settings import BATCH_TOKENS

_WHERE = "minimal_pairs"
# Sentences whose tokens and scores are in memory at once.
_AT_ONCE = 4096
#: The number of standard deviations of a 95 % interval.
_Z = NormalDist().inv_cdf(0.975)
#: What is counted together, from all pairs to those of one paradigm.
LEVELS = ("overall", "field", "term", "paradigm")


class Accuracy(NamedTuple):
    """The share of pairs whose acceptable sentence has the higher score, and its 95 % interval.

    Args:
        level: "overall", "field", "term" or "paradigm".
        name: of the field, term or paradigm; "" of all pairs.
        paradigms, pairs: how many were counted.
        ties: pairs with two equal scores, which count as wrong.
        accuracy: of a paradigm the share of right pairs, else the mean over paradigms.
        low, high: the ends of the interval.
    """

    level: str
    name: str
    paradigms: int
    pairs: int
    ties: int
    accuracy: float
    low: float
    high: float


class PairScores(NamedTuple):
    """The scores of minimal pairs.

    Args:
        pairs: the N pairs.
        good, bad: fp64 [N], the scores of the acceptable sentences and of the others.
        scorer: what the scores are.
        truncated: how many distinct sentences were cut.
    """

    pairs: Sequence[MinimalPair]
    good: Tensor
    bad: Tensor
    scorer: str
    truncated: int = 0

    @property
    def correct(self) -> Tensor:
        """bool [N]: where the acceptable sentence has the higher score; False of a tie."""
        return self.good > self.bad

    def accuracies(self) -> list[Accuracy]:
        """The accuracy of all pairs, then of each field, term and paradigm, by name.

        A paradigm has Wilson's interval of a share. A mean over paradigms has the interval that
        follows from theirs, as of independent shares: each end is as far from the mean as the root
        of the sum of squares of (the same end's distance in the paradigm / number of paradigms).

        Source: Wilson 1927, "Probable inference, the law of succession, and statistical inference";
            Zou and Donner 2008, "Construction of confidence limits about effect measures".
        """
        counts: dict[str, list[int]] = {}  # right, ties, pairs
        scores = zip(self.pairs, self.good.tolist(), self.bad.tolist(), strict=True)
        for pair, good, bad in scores:
            of = counts.setdefault(pair.paradigm, [0, 0, 0])
            for i, value in enumerate((good > bad, good == bad, 1)):
                of[i] += value
        return [
            _accuracy(level, name, [counts[each] for each in paradigms])
            for (level, name), paradigms in _groups(self.pairs).items()
        ]


def minimal_pairs(
    model: Any,
    tokenizer: Any,
    pairs: Iterable[MinimalPair | tuple[str, ...]],
    *,
    method: str | None = None,
    bos: bool = True,
    normalize: bool = False,
    batch_tokens: int = BATCH_TOKENS,
    truncate: bool = False,
    progress: Callable[[int, int], object] | None = None,
) -> PairScores:
    """The scores of minimal pairs under a language model.

    A sentence's score is the sum of the log-probabilities of its tokens:

    - of a decoder (GPT, GPT-2) the log-likelihood. The beginning-of-text token stands before each
      sentence, so that its first token is scored, too; a model without such a token does not score
      it. Other tokens that the tokenizer adds are left out.
    - of a masked language model (BERT, RoBERTa, ALBERT, ELECTRA's generator), BART and T5 the
      pseudo-log-likelihood, see ``pseudo_log_likelihood``.
    - of BERT2BERT, and with ``method="empty_source"`` of BART and T5, the log-likelihood of the
      decoder, the source being an empty text.
    - of ELECTRA's discriminator how much it takes the tokens for original, see ``originality``.

    Each distinct sentence is computed once, and a beginning that sentences share is scored once by
    a decoder. Both are exact. The masked copies of two sentences differ unless all tokens are
    masked in which the sentences do, so they are computed all.

    Args:
        model: a language model of ``fastplm.models``.
        tokenizer: that of the checkpoint.
        pairs: ``MinimalPair``, or (good, bad).
        method: "original" (default) or "within_word_l2r" of a pseudo-log-likelihood;
            "empty_source" of BART and T5.
        bos: whether the beginning-of-text token stands before the sentences of a decoder.
        normalize: divide each sum by the number of tokens.
        batch_tokens, truncate: as of ``pseudo_log_likelihood``.
        progress: called after each batch with (sentences scored, distinct sentences).

    Returns:
        ``PairScores``, in the order of the pairs.

    Raises:
        ArgumentValueError, ArgumentTypeError: a model, tokenizer or choice of another kind.
        DataError: there is no pair, or a sentence without a token to score.

    Source: Warstadt et al. 2020 (arXiv 1912.00582), section 4, of decoders; Salazar et al. 2020
        (arXiv 1910.14659), section 4.2, of masked language models.
    """
    pairs = list(pairs)
    check_texts(_WHERE, "pairs", pairs, "pairs of strings", (tuple, list))
    given = [each if isinstance(each, MinimalPair) else MinimalPair(*each) for each in pairs]
    for one in given:
        check_texts(_WHERE, "pairs", one[:2], "pairs of strings")
    check(bool(given), _WHERE, "pairs", "none", "one at least", "Give some.", DataError)
    name, score = _scorer(model, tokenizer, method, bos)
    options: dict[str, Any] = {"batch_tokens": batch_tokens, "truncate": truncate}
    # In this order, sentences with the same beginning are scored together.
    texts = sorted({text for pair in given for text in pair[:2]})
    values: dict[str, float] = {}
    cut = 0
    for first in range(0, len(texts), _AT_ONCE):
        some = texts[first : first + _AT_ONCE]

        def show(done: int, total: int, first: int = first, count: int = len(some)) -> None:
            if progress is not None:
                progress(first + count * done // total, len(texts))

        for text, found in zip(some, score(some, progress=show, **options), strict=True):
            values[text] = _value(text, found, normalize)
            cut += found.truncated
    good, bad = (
        torch.tensor([values[pair[i]] for pair in given], dtype=torch.float64, device="cpu")
        for i in (0, 1)
    )
    return PairScores(given, good, bad, f"{name}{', mean over tokens' if normalize else ''}", cut)


def published_means(
    scores: PairScores, published: Mapping[str, Mapping[str, float]]
) -> dict[str, list[float | None]]:
    """The accuracies of other systems in the rows of ``PairScores.accuracies``.

    Args:
        scores: the scores.
        published: {paradigm: {system: accuracy}}, as ``read_published`` gives it.

    Returns:
        One number a row for each system, the mean over the paradigms of the row; None where one of
        these was not published.
    """
    groups = _groups(scores.pairs).values()

    def mean(system: str, paradigms: Sequence[str]) -> float | None:
        if not {*paradigms} <= published.keys():
            return None
        return math.fsum(published[each][system] for each in paradigms) / len(paradigms)

    systems = dict.fromkeys(system for row in published.values() for system in row)
    return {system: [mean(system, paradigms) for paradigms in groups] for system in systems}


def draw(
    path: Path, title: str, rows: Sequence[Accuracy], published: Mapping[str, Sequence[Any]]
) -> None:
    """A picture of the accuracy of each term, or else paradigm, with intervals."""
    from matplotlib.figure import Figure

    level = "term" if any(row.level == "term" for row in rows) else "paradigm"
    chosen = [i for i, row in enumerate(rows) if row.level in (level, "overall")][::-1]
    shown = [rows[i] for i in chosen]
    places = list(range(len(shown)))
    figure = Figure(figsize=(7, 1.6 + 0.3 * len(shown)), layout="constrained")
    axis = figure.subplots()
    for marker, (system, beside) in zip(cycle("sDv^<>Px*"), published.items(), strict=False):
        known = [(beside[i], place) for i, place in zip(chosen, places, strict=True)]
        known = [(value, place) for value, place in known if value is not None]
        if known:
            x, y = zip(*known, strict=True)
            axis.plot(x, y, marker, label=system, color="0.55", markersize=4, fillstyle="none")
    values = [row.accuracy for row in shown]
    ends = [[row.accuracy - row.low for row in shown], [row.high - row.accuracy for row in shown]]
    axis.errorbar(values, places, xerr=ends, fmt="o", capsize=2, label="this model, 95 % interval")
    axis.axvline(0.5, color="0.7", linestyle=":", label="chance")
    axis.set_yticks(places, [(row.name or "overall").replace("_", " ") for row in shown])
    axis.set_xlabel("accuracy")
    axis.grid(axis="x", alpha=0.3)
    figure.suptitle(title)
    figure.legend(loc="outside lower center", ncols=3, fontsize="small", frameon=False)
    figure.savefig(path, dpi=120, format="png")


# --- scores ---------------------------------------------------------------------------------------


def _scorer(
    model: Any, tokenizer: Any, method: str | None, bos: bool
) -> tuple[str, Callable[..., list[TextScore]]]:
    """What a model scores sentences by: its name, and a function of texts and options."""
    infills = isinstance(model, ConditionalGeneration)
    masked = isinstance(model, MaskedLM)
    paired = isinstance(model, EncoderDecoderModel)
    known = isinstance(model, ElectraForPreTraining | CausalLM)
    got, expected = f"a {type(model).__name__}", "a language model of fastplm.models"
    fix = "Load it with an Auto class of fastplm.models, such as AutoModelForMaskedLM."
    check(infills or masked or paired or known, _WHERE, "model", got, expected, fix)
    choices: tuple[str, ...] = PAIR_METHODS if infills else METHODS if masked else ()
    if paired:
        choices = (EMPTY_SOURCE,)
    if method is not None:
        expected, fix = f"none for a {type(model).__name__}", "Leave it out."
        check(bool(choices), _WHERE, "method", method, expected, fix)
        check_choice(_WHERE, "method", method, choices)

    def by(function: Any, **chosen: Any) -> Callable[..., list[TextScore]]:
        return lambda texts, **options: function(model, tokenizer, texts, **chosen, **options)

    if isinstance(model, ElectraForPreTraining):
        return "log-probability of original tokens", by(originality)
    if choices:
        method = choices[0] if method is None else method
        if method == EMPTY_SOURCE:
            return "log-likelihood, empty source", by(log_likelihood)
        return f"pseudo-log-likelihood, {method}", by(pseudo_log_likelihood, method=method)
    start = start_token(model, tokenizer)
    begins = bos and start is not None
    name = f"log-likelihood, {'with' if begins else 'without'} that of the first token"
    return name, by(log_likelihood, bos=begins, special_tokens=start is None)


def _value(text: str, score: TextScore, normalize: bool) -> float:
    count = len(score.tokens)
    expected = "a token at least, two without a beginning-of-text token"
    got = f"no token to score in {text[:60]!r}"
    check(count > 0, _WHERE, "pairs", got, expected, "Leave the pair out.", DataError)
    return score.sum / count if normalize else score.sum


# --- accuracies -----------------------------------------------------------------------------------


def _groups(pairs: Iterable[MinimalPair]) -> dict[tuple[str, str], list[str]]:
    """{(level, name): its paradigms}, in the order of the rows."""
    kinds = {pair.paradigm: ("", pair.field, pair.term, pair.paradigm) for pair in pairs}
    found: dict[tuple[int, str], list[str]] = {}
    for paradigm, names in sorted(kinds.items()):
        for level, name in enumerate(names):
            if name or not level:
                found.setdefault((level, name), []).append(paradigm)
    return {(LEVELS[level], name): found[level, name] for level, name in sorted(found)}


def _accuracy(level: str, name: str, counts: Sequence[Sequence[int]]) -> Accuracy:
    """From (right, ties, pairs) of each paradigm."""
    shares = [right / pairs for right, _, pairs in counts]
    ends = [wilson(right, pairs) for right, _, pairs in counts]
    mean = math.fsum(shares) / len(shares)
    below, above = (
        math.hypot(*(end[i] - share for end, share in zip(ends, shares, strict=True))) / len(shares)
        for i in (0, 1)
    )
    ties, pairs = (sum(of[i] for of in counts) for i in (1, 2))
    return Accuracy(level, name, len(counts), pairs, ties, mean, mean - below, mean + above)


def wilson(right: int, count: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share.

    Source: Wilson 1927, "Probable inference, the law of succession, and statistical inference".
    """
    share, square = right / count, _Z**2
    middle = (share + square / (2 * count)) / (1 + square / count)
    half = _Z * math.sqrt(share * (1 - share) / count + square / (4 * count**2))
    half /= 1 + square / count
    # It holds the share, also where rounding says otherwise.
    return max(0.0, min(share, middle - half)), min(1.0, max(share, middle + half))
