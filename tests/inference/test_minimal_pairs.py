"""Minimal pairs: accuracies known by hand, their intervals, and what a model scores them by."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import transformers
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers import models as backends
from transformers import PreTrainedTokenizerFast

from fastplm import models
from fastplm.data.minimal_pairs import MinimalPair, read_pairs, read_published
from fastplm.errors import ArgumentTypeError, ArgumentValueError, DataError
from fastplm.inference import score as scoring
from fastplm.inference.minimal_pairs import (
    PairScores,
    _accuracy,
    minimal_pairs,
    published_means,
    wilson,
)
from fastplm.inference.score import log_likelihood, originality, pseudo_log_likelihood

from .conftest import GPT

BLIMP = Path(__file__).parents[3] / "shared" / "data" / "blimp"

#: The probability of each word, whatever is before it. "z" and "x" are equally probable.
WORDS = {"<s>": 0.05, "a": 0.4, "b": 0.2, "c": 0.15, "x": 0.1, "z": 0.1}


@pytest.fixture(scope="module")
def unigram():
    """A GPT-2 that gives the probabilities of ``WORDS``, and a tokenizer of words."""
    backend = Tokenizer(backends.WordLevel(dict(zip(WORDS, range(6), strict=True)), "<s>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", unk_token="<s>")
    config = transformers.GPT2Config(vocab_size=6, bos_token_id=0, eos_token_id=0, **GPT)
    config.tie_word_embeddings = False
    model = models.GPT2LMHeadModel(config).double()
    with torch.no_grad():
        # The last norm gives 1 in the first place and 0 elsewhere, whatever it reads.
        model.transformer.ln_f.weight.zero_()
        model.transformer.ln_f.bias.copy_(torch.eye(16)[0])
        model.lm_head.weight.zero_()
        model.lm_head.weight[:, 0] = torch.tensor(list(WORDS.values())).log()
    return model, tokenizer


PAIRS = [
    MinimalPair("a b", "a c", "one", "agreement", "syntax"),  # right
    MinimalPair("c a", "b a", "one", "agreement", "syntax"),  # wrong
    MinimalPair("a x", "a z", "two", "agreement", "syntax"),  # a tie: wrong
    MinimalPair("b", "c", "two", "agreement", "syntax"),  # right: the first word counts
    MinimalPair("a a", "b", "two", "agreement", "syntax"),  # 0.16 against 0.2: wrong
    MinimalPair("a", "x", "three", "binding", "syntax"),  # right
]


def _logs(text):
    return sum(math.log(WORDS[word]) for word in text.split())


def test_accuracies_known_by_hand(unigram):
    scores = minimal_pairs(*unigram, PAIRS)
    for i, pair in enumerate(PAIRS):
        assert math.isclose(scores.good[i], _logs(pair.good), rel_tol=1e-6)
        assert math.isclose(scores.bad[i], _logs(pair.bad), rel_tol=1e-6)
    assert scores.correct.tolist() == [True, False, False, True, False, True]
    rows = {(row.level, row.name): row for row in scores.accuracies()}
    assert list(rows) == [
        ("overall", ""),
        ("field", "syntax"),
        *(("term", name) for name in ("agreement", "binding")),
        *(("paradigm", name) for name in ("one", "three", "two")),
    ]
    assert rows["paradigm", "one"].accuracy == 1 / 2
    two = rows["paradigm", "two"]
    assert (two.accuracy, two.pairs, two.ties, two.paradigms) == (1 / 3, 3, 1, 1)
    # Means over paradigms, not over pairs.
    assert rows["term", "agreement"].accuracy == (1 / 2 + 1 / 3) / 2
    overall = rows["overall", ""]
    assert math.isclose(overall.accuracy, (1 / 2 + 1 / 3 + 1) / 3)
    assert (overall.paradigms, overall.pairs, overall.ties) == (3, 6, 1)
    assert rows["field", "syntax"][2:] == overall[2:]


def test_means_over_tokens_change_the_answer(unigram):
    scores = minimal_pairs(*unigram, PAIRS, normalize=True)
    assert scores.correct.tolist() == [True, False, False, True, True, True]
    assert math.isclose(scores.good[4], math.log(0.4), rel_tol=1e-6)
    assert scores.scorer.endswith("mean over tokens")


def test_the_other_order_gives_the_same_scores(unigram, made):
    for model, tokenizer, pairs in (
        (*unigram, PAIRS),
        (*made("BertForMaskedLM")[::2], [("a fox", "a dog"), ("the lazy dogs", "the dogs")]),
    ):
        one = minimal_pairs(model, tokenizer, pairs)
        other = minimal_pairs(model, tokenizer, [(pair[1], pair[0]) for pair in pairs[::-1]])
        assert torch.equal(one.good, other.bad.flip(0))
        assert torch.equal(one.bad, other.good.flip(0))
        ties = one.good == one.bad
        assert torch.equal(one.correct | ties, ~other.correct.flip(0))


def test_without_the_first_token(unigram):
    pairs = [("a b", "b b"), ("b a", "a b")]
    scores = minimal_pairs(*unigram, pairs, bos=False)
    assert scores.good.tolist() == pytest.approx([math.log(0.2), math.log(0.4)])
    assert scores.correct.tolist() == [False, True] and "without" in scores.scorer
    with pytest.raises(DataError, match="no token to score in 'c'"):
        minimal_pairs(*unigram, [("a b", "c")], bos=False)


# --- intervals ------------------------------------------------------------------------------------


def test_wilson_is_that_of_scipy():
    stats = pytest.importorskip("scipy.stats")
    for right, count in ((0, 10), (1, 1), (612, 1000), (10, 10), (3, 7)):
        known = stats.binomtest(right, count).proportion_ci(method="wilson")
        assert wilson(right, count) == pytest.approx((known.low, known.high), abs=1e-12)


def test_wilson_is_as_published():
    """Newcombe 1998, "Two-sided confidence intervals for the single proportion", table I."""
    for right, count, low, high in (
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0000, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ):
        assert wilson(right, count) == pytest.approx((low, high), abs=5e-5)


def test_the_interval_of_a_mean_holds_it_as_often_as_it_says(unigram):
    """Paradigms of known shares are drawn again and again."""
    shares, count, draws = torch.tensor([0.95, 0.7, 0.5, 0.62]), 60, 4000
    generator = torch.Generator().manual_seed(1)
    drawn = torch.rand(draws, len(shares), count, generator=generator) < shares[:, None]
    held = 0
    for right in drawn.sum(-1).tolist():
        of = [(each, 0, count) for each in right]
        row = _accuracy("overall", "", of)
        held += row.low <= float(shares.mean()) <= row.high
    assert 0.94 < held / draws < 0.965
    # One paradigm alone has Wilson's interval, and a mean a shorter one than each of its parts.
    assert _accuracy("paradigm", "", [(42, 0, 60)])[6:] == pytest.approx(wilson(42, 60))
    part = wilson(30, 60)
    mean = _accuracy("overall", "", [(30, 0, 60)] * 4)
    assert mean.high - mean.low == pytest.approx((part[1] - part[0]) / 2)


# --- what a model scores by -----------------------------------------------------------------------

_PAIRS = [("the lazy dogs jump", "the lazy dogs jumps"), ("a fox", "unbelievably lazy"), ("a", "a")]
_TEXTS = [pair[i] for i in (0, 1) for pair in _PAIRS]


_PSEUDO, _LAST = "pseudo-log-likelihood", "within_word_l2r"
_EMPTY = "log-likelihood, empty source"
_BEGUN = "log-likelihood, with that of the first token"  # and nothing stands behind the text


@pytest.mark.parametrize(
    "name, method, scorer, function, options",
    [
        ("BertForMaskedLM", None, f"{_PSEUDO}, original", pseudo_log_likelihood, {}),
        (
            *("T5ForConditionalGeneration", _LAST, f"{_PSEUDO}, {_LAST}"),
            *(pseudo_log_likelihood, {"method": _LAST}),
        ),
        ("BartForConditionalGeneration", "empty_source", _EMPTY, log_likelihood, {}),
        ("EncoderDecoderModel", None, _EMPTY, log_likelihood, {}),
        ("GPT2LMHeadModel", None, _BEGUN, log_likelihood, {"bos": True, "special_tokens": False}),
        ("BertLMHeadModel", None, _BEGUN, log_likelihood, {"bos": True, "special_tokens": False}),
        ("ElectraForPreTraining", None, "log-probability of original tokens", originality, {}),
    ],
)
def test_what_a_model_scores_sentences_by(name, method, scorer, function, options, made):
    model, _, tokenizer = made(name)
    found = minimal_pairs(model, tokenizer, _PAIRS, method=method)
    known = [score.sum for score in function(model, tokenizer, _TEXTS, **options)]
    assert torch.cat([found.good, found.bad]).tolist() == pytest.approx(known, rel=1e-5)
    assert found.scorer == scorer


def test_a_sentence_is_computed_once(made, monkeypatch):
    model, _, tokenizer = made("BertForMaskedLM")
    asked = []
    real = scoring._encoded

    def count(where, argument, tokenizer, texts, *args, **options):
        asked.extend(texts)
        return real(where, argument, tokenizer, texts, *args, **options)

    monkeypatch.setattr(scoring, "_encoded", count)
    monkeypatch.setattr("fastplm.inference.minimal_pairs._AT_ONCE", 2)
    told = []
    pairs = [*_PAIRS, *_PAIRS]
    scores = minimal_pairs(model, tokenizer, pairs, progress=lambda *of: told.append(of))
    assert sorted(asked) == sorted(set(_TEXTS))
    assert torch.equal(scores.good[:3], scores.good[3:])
    assert told == sorted(told) and told[-1] == (5, 5)


def test_wrong_calls(made, unigram):
    bert, _, words = made("BertForMaskedLM")
    for said, error, model, tokenizer, pairs, options in (
        ("`pairs` got none", DataError, bert, words, [], {}),
        ("`pairs` got a str at 0", ArgumentTypeError, bert, words, ["ab"], {}),
        ("a int at 1; expected pairs of", ArgumentTypeError, bert, words, [("a", 3)], {}),
        ("`model` got a BertModel", ArgumentValueError, bert.bert, words, _PAIRS, {}),
        (
            r"expected original \| within_word_l2r",
            *(ArgumentValueError, bert, words, _PAIRS, {"method": "empty_source"}),
        ),
        (
            "none for a GPT2LMHeadModel",
            *(ArgumentValueError, *unigram, PAIRS, {"method": "original"}),
        ),
    ):
        with pytest.raises(error, match=said):
            minimal_pairs(model, tokenizer, pairs, **options)


def test_published_means(unigram):
    """Those of rows, all of whose paradigms were published."""
    published = {"one": {"lstm": 0.5}, "two": {"lstm": 1.0}}
    scores = minimal_pairs(*unigram, PAIRS)
    beside = published_means(scores, published)["lstm"]
    rows = zip(scores.accuracies(), beside, strict=True)
    named = {(row.level, row.name): value for row, value in rows}
    assert named["term", "agreement"] == 0.75 and named["paradigm", "one"] == 0.5
    assert named["overall", ""] is named["paradigm", "three"] is None


def test_blimp_as_it_was_published(capsys):
    """The published means are those over the paradigms of the zip, by its terms."""
    if not BLIMP.is_dir():
        pytest.skip(f"BLiMP is not in {BLIMP}")
    pairs = read_pairs(BLIMP / "blimp.zip")
    assert "count as wrong: 7 of 67,000, such as" in capsys.readouterr().err
    assert len(pairs) == 67_000 and len({pair.paradigm for pair in pairs}) == 67
    published = read_published(BLIMP / "models_summary.jsonl")
    nothing = torch.zeros(len(pairs), dtype=torch.float64)
    scores = PairScores(pairs, nothing, nothing, "none")
    rows, means = scores.accuracies(), published_means(scores, published)
    assert rows[0].paradigms == 67 and rows[0].ties == 67_000 and rows[0].accuracy == 0
    shown = {name: round(of[0], 3) for name, of in means.items()}
    assert shown == {"ngram": 0.612, "lstm": 0.698, "txl": 0.696, "gpt2": 0.830}
    assert all(value is not None for of in means.values() for value in of)
