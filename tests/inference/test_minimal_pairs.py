"""Minimal pairs: accuracies known by hand, scores against plain loops, files and errors."""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
import re
import zipfile
from pathlib import Path

import pytest
import torch
import transformers
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers import models as backends
from transformers import PreTrainedTokenizerFast

from fastplm import models
from fastplm.cli import main
from fastplm.data import train_tokenizer
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
from fastplm.inference.score import (
    log_likelihood,
    originality,
    pseudo_log_likelihood,
    start_token,
)
from fastplm.models.electra_joint import ElectraJointConfig
from fastplm.testing import KeptDouble, check_in_fp64

from .conftest import BART, GPT, SMALL, T5

BLIMP = Path(__file__).parents[3] / "shared" / "data" / "blimp"
SENTENCES = ["the lazy dogs jump", "the lazy dogs jumps", "a fox", "unbelievably lazy", "a dog"]
_KINDS = {
    "BertForMaskedLM": ("BertConfig", SMALL, "wordpiece"),
    "ElectraForPreTraining": ("ElectraConfig", SMALL | dict(embedding_size=8), "wordpiece"),
    "GPT2LMHeadModel": ("GPT2Config", GPT, "bytelevel"),
    "BartForConditionalGeneration": ("BartConfig", BART, "bytelevel"),
    "T5ForConditionalGeneration": ("T5Config", T5, "unigram"),
}
_VOCABULARY = {"wordpiece": 60, "bytelevel": 285, "unigram": 130}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(a drop-in model, its parent with the same weights, the tokenizer), by the class's name."""
    cache = tmp_path_factory.mktemp("tokenizers")

    def build(name):
        kind, sizes, vocabulary = _KINDS[name]
        corpus = [*SENTENCES, "jumping", "believe", "able", "foxes over dogs"] * 3
        tokenizer = train_tokenizer(corpus, _VOCABULARY[vocabulary], cache, vocabulary)
        special = {
            f"{role}_token_id": getattr(tokenizer, f"{role}_token_id")
            for role in ("bos", "eos", "pad")
        }
        torch.manual_seed(0)
        config = getattr(transformers, kind)(vocab_size=len(tokenizer), **special | sizes)
        model = getattr(models, name)(config)
        parent = getattr(transformers, name)(config).eval()
        parent.load_state_dict(model.state_dict())
        parent.set_attn_implementation("eager")
        return model, parent, tokenizer

    return build


# --- a model whose probabilities are known --------------------------------------------------------

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


def test_what_stands_before_a_sentence(made):
    """The tokenizer's, or the special token of the configuration; nothing behind the sentence."""
    gpt, _, letters = made("GPT2LMHeadModel")
    for named, known in ((0, letters.bos_token_id), (50256, letters.bos_token_id), (2, 2)):
        gpt.config.bos_token_id = named
        assert start_token(gpt, letters) == known
    assert letters.eos_token_id == 2
    scores = minimal_pairs(gpt, letters, [("a fox", "a dog")])
    gpt.config.bos_token_id = letters.bos_token_id
    assert scores.good != minimal_pairs(gpt, letters, [("a fox", "a dog")]).good
    _, _, words = made("BertForMaskedLM")
    sizes = SMALL | dict(vocab_size=len(words), is_decoder=True)
    bert = models.BertLMHeadModel(transformers.BertConfig(**sizes))
    (score,) = log_likelihood(bert, words, ["a fox"])  # with [SEP] at the end
    assert score.tokens[-1] == "[SEP]"
    scores = minimal_pairs(bert, words, [("a fox", "a dog")])
    assert float(scores.good) == pytest.approx(float(score.log_probs[:-1].sum()), rel=1e-5)


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


# --- scorers against plain loops ------------------------------------------------------------------


def _check(ours, loop, model, parent):
    single = {"scores": loop(parent)}
    with KeptDouble():
        gold, found = {"scores": loop(parent.double())}, {"scores": ours(model.double())}
    check_in_fp64(found, gold, single)


def _scores_of(pairs):
    return torch.cat([pairs.good, pairs.bad])


_PAIRS = [(SENTENCES[0], SENTENCES[1]), (SENTENCES[2], SENTENCES[3]), (SENTENCES[4], SENTENCES[2])]
_TEXTS = [pair[0] for pair in _PAIRS] + [pair[1] for pair in _PAIRS]


def test_a_decoder_reads_its_beginning_of_text_and_nothing_else(made):
    model, parent, tokenizer = made("GPT2LMHeadModel")
    assert tokenizer("a")["input_ids"][-1] == tokenizer.eos_token_id, "which is left out"

    @torch.no_grad()
    def loop(parent):
        found = []
        for text in _TEXTS:
            ids = [tokenizer.bos_token_id, *tokenizer(text, add_special_tokens=False)["input_ids"]]
            logits = parent(torch.tensor([ids]), use_cache=False).logits[0].log_softmax(-1)
            found.append(sum(logits[i, ids[i + 1]] for i in range(len(ids) - 1)))
        return torch.stack(found).double()

    _check(lambda model: _scores_of(minimal_pairs(model, tokenizer, _PAIRS)), loop, model, parent)


def test_the_discriminator_adds_up_what_it_takes_for_original(made):
    model, parent, tokenizer = made("ElectraForPreTraining")

    @torch.no_grad()
    def loop(parent):
        found = []
        for text in _TEXTS:
            logits = parent(torch.tensor([tokenizer(text)["input_ids"]])).logits[0]
            found.append((1 - logits.double().sigmoid()).log()[1:-1].sum())
        return torch.stack(found)

    _check(lambda model: _scores_of(minimal_pairs(model, tokenizer, _PAIRS)), loop, model, parent)
    (score,) = originality(model, tokenizer, ["a fox"])
    assert score.tokens == tokenizer.tokenize("a fox") and (score.log_probs < 0).all()
    assert originality(model, tokenizer, [""])[0].tokens == []


def _spans(tokenizer, text, method):
    """(ids, [(first, end) of each span that is masked at once])."""
    encoded = tokenizer(text)
    words = encoded.word_ids()
    places = [i for i, word in enumerate(words) if word is not None]
    if method == "original":
        return encoded["input_ids"], [(i, i + 1) for i in places]
    spans = {}
    for i in places:
        first, _ = spans.get(words[i], (i, i))
        spans[words[i]] = first, i + 1
    return encoded["input_ids"], list(spans.values())


@pytest.mark.parametrize("method", ["original", "within_word_l2r"])
@pytest.mark.parametrize("name", ["BartForConditionalGeneration", "T5ForConditionalGeneration"])
def test_an_encoder_decoder_fills_in_each_span(name, method, made):
    model, parent, tokenizer = made(name)
    pairs = _PAIRS[1:]  # the short ones
    texts = [pair[i] for i in (0, 1) for pair in pairs]
    t5 = name.startswith("T5")
    mask = tokenizer.convert_tokens_to_ids("<extra_id_0>") if t5 else tokenizer.mask_token_id
    start = parent.config.decoder_start_token_id

    @torch.no_grad()
    def loop(parent):
        found = []
        for text in texts:
            ids, spans = _spans(tokenizer, text, method)
            total = 0
            for first, end in spans:
                source = torch.tensor([[*ids[:first], mask, *ids[end:]]])
                before = [start, mask] if t5 else [start, *ids[:first]]
                written = torch.tensor([[*before, *ids[first:end]]])
                out = parent(input_ids=source, decoder_input_ids=written, use_cache=False)
                logs = out.logits[0].log_softmax(-1)
                at = len(before) - 1
                total = total + sum(logs[at + i, ids[first + i]] for i in range(end - first))
            found.append(total)
        return torch.stack(found).double()

    _check(
        lambda model: _scores_of(minimal_pairs(model, tokenizer, pairs, method=method)),
        loop,
        model,
        parent,
    )
    (score,) = pseudo_log_likelihood(model, tokenizer, [SENTENCES[3]], method=method)
    ids, spans = _spans(tokenizer, SENTENCES[3], method)
    assert score.tokens == tokenizer.convert_ids_to_tokens(ids[spans[0][0] : spans[-1][1]])
    assert method == "original" or len(spans) < len(score.tokens), "a word has several tokens"
    assert pseudo_log_likelihood(model, tokenizer, [""], method=method)[0].tokens == []


@pytest.mark.parametrize("name", ["BartForConditionalGeneration", "T5ForConditionalGeneration"])
def test_an_empty_source_is_the_log_likelihood(name, made):
    model, _, tokenizer = made(name)
    found = minimal_pairs(model, tokenizer, _PAIRS, method="empty_source")
    known = [score.sum for score in log_likelihood(model, tokenizer, _TEXTS)]
    assert _scores_of(found).tolist() == pytest.approx(known, rel=1e-5)
    assert found.scorer == "log-likelihood, empty source"
    assert minimal_pairs(model, tokenizer, _PAIRS).scorer == "pseudo-log-likelihood, original"


@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "T5ForConditionalGeneration"])
def test_a_common_beginning_is_scored_once(name, made, monkeypatch):
    """Also where texts are the same; each token of a beginning that is new is scored."""
    model, _, tokenizer = made(name)
    loss, rows = scoring.vocabulary_loss, []

    def counted(hidden, *args, **options):
        rows.append(hidden.shape[0])
        return loss(hidden, *args, **options)

    monkeypatch.setattr("fastplm.models._heads.vocabulary_loss", counted)
    texts = [SENTENCES[1], SENTENCES[0], SENTENCES[1], "a fox", "", "a dog", "the lazy"]
    alone = [log_likelihood(model, tokenizer, [text])[0] for text in texts]
    rows.clear()
    together = log_likelihood(model, tokenizer, texts)
    first = 1 if name.startswith("GPT2") else 0
    ids = [tokenizer(text)["input_ids"] for text in texts]
    beginnings = {tuple(row[: i + 1]) for row in ids for i in range(first, len(row))}
    assert sum(rows) == len(beginnings) < sum(len(row) - first for row in ids)
    for one, other in zip(alone, together, strict=True):
        assert one.tokens == other.tokens
        torch.testing.assert_close(one.log_probs, other.log_probs)
    assert torch.equal(together[0].log_probs, together[2].log_probs)


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
    discriminator = made("ElectraForPreTraining")[0]
    for call, error, said in (
        (lambda: minimal_pairs(bert, words, []), DataError, "`pairs` got none"),
        (lambda: minimal_pairs(bert, words, ["ab"]), ArgumentTypeError, "`pairs` got a str at 0"),
        (
            lambda: minimal_pairs(bert, words, [("a", 3)]),
            ArgumentTypeError,
            "a int at 1; expected pairs of strings",
        ),
        (
            lambda: minimal_pairs(bert, words, _PAIRS, method="empty_source"),
            ArgumentValueError,
            "expected original | within_word_l2r",
        ),
        (
            lambda: minimal_pairs(*unigram, PAIRS, method="original"),
            ArgumentValueError,
            "none for a GPT2LMHeadModel",
        ),
        (
            lambda: minimal_pairs(bert.bert, words, _PAIRS),
            ArgumentValueError,
            "`model` got a BertModel",
        ),
        (lambda: originality(bert, words, ["a"]), ArgumentValueError, "an ElectraForPreTraining"),
        (
            lambda: pseudo_log_likelihood(discriminator, words, ["a"]),
            ArgumentValueError,
            "`model` got a ElectraForPreTraining",
        ),
        (
            lambda: log_likelihood(
                *made("T5ForConditionalGeneration")[::2], ["a"], special_tokens=False
            ),
            ArgumentValueError,
            "`special_tokens`",
        ),
    ):
        with pytest.raises(error, match=said.replace("|", r"\|")):
            call()


# --- files ----------------------------------------------------------------------------------------

_ROWS = [
    dict(sentence_good="the dogs jump", sentence_bad="the dogs jumps", UID="sv", pairID="0"),
    dict(sentence_good="a fox", sentence_bad="foxes a", UID="order", pairID="0"),
]
_TERMS = [dict(linguistics_term="agreement", field="syntax"), dict(linguistics_term="order")]


def _lines(rows):
    return "".join(f"{json.dumps(row)}\n" for row in rows)


def test_the_formats_of_pairs(tmp_path):
    rows = [row | of | dict(field="syntax") for row, of in zip(_ROWS, _TERMS, strict=True)]
    (tmp_path / "a.jsonl").write_text(_lines(rows))
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(_lines(rows).encode()))
    for name, separator in (("a.tsv", "\t"), ("a.csv", ",")):
        table = [separator.join(rows[0]), *(separator.join(row.values()) for row in rows)]
        rows[0] |= {}
        keys = list(rows[0])
        table = [separator.join(keys), *(separator.join(row[key] for key in keys) for row in rows)]
        (tmp_path / name).write_text("\n".join(table))
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("README.md", "not read")
        for row in rows:
            archive.writestr(f"data/{row['UID']}.jsonl", _lines([row]))
    known = {("the dogs jump", "the dogs jumps", "sv", "agreement", "syntax")}
    known |= {("a fox", "foxes a", "order", "order", "syntax")}
    for path in sorted(tmp_path.iterdir()):
        assert {pair[:5] for pair in read_pairs(path)} == known, path
    assert read_pairs(tmp_path / "a.zip")[0].where.endswith("a.zip/data/order.jsonl:1")
    (tmp_path / "mine.jsonl").write_text(_lines([dict(sentence_good="a", sentence_bad="b")]))
    assert read_pairs(tmp_path / "mine.jsonl")[0][:5] == ("a", "b", "mine", "", "")


@pytest.mark.parametrize(
    "content, said",
    [
        ("", "nothing; expected a pair"),
        (_lines([dict(sentence_good="a", bad="b")]), "1: columns .*one named 'sentence_bad'"),
        ("sentence_good\tbad\na\tb\n", "2: columns .*one named 'sentence_bad'"),
        (_lines([_ROWS[0] | dict(sentence_bad=" ")]), "1: nothing in column 'sentence_bad'"),
        (_lines([_ROWS[0] | dict(sentence_bad=3)]), "1: the int 3 in column 'sentence_bad'"),
        (_lines([_ROWS[0] | _TERMS[0], _ROWS[1]]), "2: no 'linguistics_term'; expected one in all"),
        (_lines([_ROWS[0] | of for of in _TERMS]), "2: linguistics_term 'order' of the UID 'sv'"),
        ("[1]", "1: a list; expected one JSON object"),
    ],
)
def test_wrong_pairs(content, said, tmp_path):
    path = tmp_path / "pairs.jsonl"
    path.write_text(content)
    with pytest.raises(DataError, match=said):
        read_pairs(path)


def test_a_pair_of_the_same_sentence_is_a_tie(tmp_path, unigram, capsys):
    path = tmp_path / "pairs.tsv"
    path.write_text("sentence_good\tsentence_bad\na b\ta b\na\tb\n")
    pairs = read_pairs(path)
    assert f"count as wrong: 1 of 2, such as {path}:2" in capsys.readouterr().err
    (row, _) = minimal_pairs(*unigram, pairs).accuracies()
    assert (row.ties, row.accuracy) == (1, 0.5)


def test_wrong_zips(tmp_path):
    def zipped(**files):
        path = tmp_path / "pairs.zip"
        with zipfile.ZipFile(path, "w") as archive:
            for name, text in files.items():
                archive.writestr(name, text)
        return path

    with pytest.raises(DataError, match=r"a zip without a \.jsonl file"):
        read_pairs(zipped(**{"a.txt": "text"}))
    twice = _lines([_ROWS[0]])
    with pytest.raises(DataError, match=r"the UID 'sv' in .*a\.jsonl and in .*b\.jsonl"):
        read_pairs(zipped(**{"a.jsonl": twice, "b.jsonl": twice}))
    with pytest.raises(DataError, match="a zip that cannot be read .*codec"):
        read_pairs(zipped(**{"a.jsonl": b"\xff\xfe"}))
    path = zipped(**{"a.jsonl": twice * 100})
    damaged = bytearray(path.read_bytes())
    damaged[60:70] = b"x" * 10
    path.write_bytes(damaged)
    with pytest.raises(DataError, match="a zip that cannot be read"):
        read_pairs(path)
    with pytest.raises(DataError, match="does not exist"):
        read_pairs(tmp_path / "none.zip")


def test_published_rows(tmp_path, unigram):
    path = tmp_path / "published.jsonl"
    rows = [dict(UID=uid, linguistics_term="t", lstm=share) for uid, share in (("one", 0.5),)]
    rows += [dict(UID="two", lstm=1.0), dict(UID="overall", linguistics_term="t", lstm=0.1)]
    path.write_text(_lines(rows))
    published = read_published(path)
    assert published == {"one": {"lstm": 0.5}, "two": {"lstm": 1.0}}
    scores = minimal_pairs(*unigram, PAIRS)
    beside = published_means(scores, published)["lstm"]
    named = {
        (row.level, row.name): value for row, value in zip(scores.accuracies(), beside, strict=True)
    }
    assert named["term", "agreement"] == 0.75 and named["paradigm", "one"] == 0.5
    assert named["overall", ""] is named["paradigm", "three"] is None
    for content, said in (
        (_lines([rows[0], rows[0]]), "2: the UID 'one' again"),
        (_lines([rows[0] | dict(lstm="good")]), "1: lstm 'good'; expected an accuracy"),
        (_lines([rows[0] | dict(lstm=61.2)]), "1: lstm 61.2; expected an accuracy from 0 to 1"),
        (_lines([dict(UID="one")]), "1: no column but UID"),
        (_lines([rows[0], dict(UID="two", gpt=0.5)]), "2: the systems"),
        ("", "nothing; expected a row"),
        (_lines([dict(lstm=0.5)]), "one named 'UID'"),
    ):
        path.write_text(content)
        with pytest.raises(DataError, match=said):
            read_published(path)


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


# --- the command ----------------------------------------------------------------------------------


_FOLDERS = {
    "bert": "BertForMaskedLM",
    "electra": "ElectraForPreTraining",
    "t5": "T5ForConditionalGeneration",
}


@pytest.fixture
def folder(tmp_path, made):
    """Folders of checkpoints, and the file of pairs ``pairs.jsonl``."""
    for short, name in _FOLDERS.items():
        model, _, tokenizer = made(name)
        for part in (model, tokenizer):
            part.save_pretrained(tmp_path / short)
    rows = [row | of | dict(field="syntax") for row, of in zip(_ROWS, _TERMS, strict=True)]
    (tmp_path / "pairs.jsonl").write_text(_lines(rows))
    known = [dict(UID="sv", lstm=0.7), dict(UID="order", lstm=0.6)]
    (tmp_path / "published.jsonl").write_text(_lines(known))
    return tmp_path


def _run(folder, model, *options):
    words = ["score", "--metric", "minimal-pairs", "--model", folder / model]
    words += ["--data", folder / "pairs.jsonl", *options]
    return main([str(word) for word in words])


@pytest.mark.parametrize("model", _FOLDERS)
def test_the_command(model, folder, capsys):
    loaded = getattr(models, _FOLDERS[model]).from_pretrained(folder / model)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / model)
    scores = minimal_pairs(loaded, tokenizer, read_pairs(folder / "pairs.jsonl"))
    assert _run(folder, model, "--published", folder / "published.jsonl") == 0
    shown = capsys.readouterr()
    rows = list(csv.DictReader(io.StringIO(shown.out), delimiter="\t"))
    for row, known in zip(rows, scores.accuracies(), strict=True):
        assert (row["level"], row["name"], int(row["pairs"])) == (
            known.level,
            known.name,
            known.pairs,
        )
        numbers = [float(row[name]) for name in ("accuracy", "low", "high")]
        assert numbers == pytest.approx(known[5:], rel=1e-6)
    assert [row["lstm"] for row in rows][:3] == ["0.65", "0.65", "0.7"]
    assert f"by {scores.scorer}; published: lstm 0.650" in shown.err
    assert _run(folder, model, "--by", "pair", "--format", "json") == 0
    found = json.loads(capsys.readouterr().out)
    assert [pair["good"] for pair in found["pairs"]] == scores.good.tolist()
    assert [bool(pair["correct"]) for pair in found["pairs"]] == scores.correct.tolist()
    assert found["scorer"] == scores.scorer and len(found["accuracies"]) == len(rows)
    assert _run(folder, model, "--by", "corpus") == 0
    assert len(capsys.readouterr().out.splitlines()) == 2


@pytest.mark.parametrize("part", ["generator", "discriminator"])
def test_a_checkpoint_of_two_models(part, folder, made, capsys):
    """ELECTRA's pre-training saves generator and discriminator in one."""
    discriminator, _, tokenizer = made("ElectraForPreTraining")
    config = ElectraJointConfig.from_discriminator(discriminator.config, generator_size=0.5)
    joint = models.ElectraForJointPreTraining(config)
    for saved in (joint, tokenizer):
        saved.save_pretrained(folder / "joint")
    assert _run(folder, "joint", "--part", part, "--by", "pair", "--format", "json") == 0
    found = json.loads(capsys.readouterr().out)["pairs"]
    model = getattr(joint, part).eval()
    known = minimal_pairs(model, tokenizer, read_pairs(folder / "pairs.jsonl"))
    assert [pair["good"] for pair in found] == pytest.approx(known.good.tolist(), rel=1e-5)
    assert _run(folder, "bert", "--metric", "log-likelihood", "--part", part) == 2
    assert "`part` got" in capsys.readouterr().err


def test_options_of_the_command(folder, capsys):
    assert _run(folder, "bert", "--by", "pair", "--normalize", "--method", "within_word_l2r") == 0
    (row, _) = csv.DictReader(io.StringIO(capsys.readouterr().out), delimiter="\t")
    model = models.BertForMaskedLM.from_pretrained(folder / "bert")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "bert")
    texts = [row["sentence_good"], row["sentence_bad"]]
    known = pseudo_log_likelihood(model, tokenizer, texts, method="within_word_l2r")
    means = [score.sum / len(score.tokens) for score in known]
    assert [float(row["good"]), float(row["bad"])] == pytest.approx(means, rel=1e-5)
    assert _run(folder, "bert", "--threads", "1") == 0
    assert "1 CPU thread\n" in capsys.readouterr().err


def test_some_pairs_of_each_paradigm(folder, capsys):
    """The same ones every time, in the order of the file, with the scores that they have in it."""
    rows = [
        row | {"sentence_good": " ".join([row["sentence_good"], *["dogs"] * i])}
        for i in range(4)
        for row in _ROWS
    ]
    (folder / "pairs.jsonl").write_text(_lines(rows))
    found = []
    for options in ((), ("--max-pairs", "2"), ("--max-pairs", "2"), ("--max-pairs", "9")):
        assert _run(folder, "electra", "--by", "pair", *options) == 0
        table = csv.DictReader(io.StringIO(capsys.readouterr().out), delimiter="\t")
        found.append({(row["paradigm"], row["sentence_good"]): float(row["good"]) for row in table})
    every, some, again, most = found
    assert len(every) == 8 and every == most and some == again
    assert [paradigm for paradigm, _ in some].count("sv") == len(some) - 2 == 2
    assert list(some) == [row for row in every if row in some]
    assert some == pytest.approx({row: every[row] for row in some}, rel=1e-5)


def test_texts_that_an_encoder_decoder_fills_in(folder, capsys):
    """The same scores for a file of texts, whose tabs part no sources."""
    texts = folder / "texts.txt"
    texts.write_text("the lazy\tdogs\n")
    words = ["score", "--model", folder / "t5", "--data", texts, "--format", "json"]
    words += ["--metric", "pseudo-log-likelihood", "--method", "within_word_l2r"]
    assert main([str(word) for word in words]) == 0
    (row,) = json.loads(capsys.readouterr().out)["texts"]
    model = models.T5ForConditionalGeneration.from_pretrained(folder / "t5")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "t5")
    (known,) = pseudo_log_likelihood(model, tokenizer, ["the lazy\tdogs"], method="within_word_l2r")
    assert row["pseudo_log_likelihood"] == pytest.approx(known.sum, rel=1e-6)


def test_a_picture_beside_the_table(folder, capsys):
    out, picture = folder / "found.tsv", folder / "found.png"
    options = ("--out", out, "--picture", "--published", folder / "published.jsonl")
    assert _run(folder, "electra", *options) == 0
    assert picture.read_bytes().startswith(b"\x89PNG") and out.read_text().startswith("level\t")
    assert f"drawn as {picture}" in capsys.readouterr().err
    out.unlink()
    assert _run(folder, "electra", *options) == 2
    assert "found.png, which exists" in capsys.readouterr().err and not out.exists()
    assert _run(folder, "electra", *options, "--overwrite") == 0


@pytest.mark.parametrize(
    "words, said",
    [
        ("--by text", "`by` got text; expected corpus | pair | paradigm"),
        ("--metric log-likelihood --by pair", "`by` got pair; expected token | text | corpus"),
        ("--metric log-likelihood --normalize", "`normalize` got True; expected nothing with"),
        ("--metric pseudo-log-likelihood --method empty_source", "`method` got empty_source"),
        ("--bos", "`bos` got True"),
        ("--picture", "--out FILE with another ending"),
        ("--picture --out a.png", "--out FILE with another ending"),
        ("--method empty_source", "expected original | within_word_l2r"),
        ("--published OTHER", "with no UID of"),
        ("--published TAKEN", "with a column accuracy, ties; expected a column for each system"),
        ("--metric log-likelihood --max-pairs 3", "`max_pairs` got 3; expected nothing with"),
        ("--part generator", "a checkpoint of one model"),
        ("--no-bos", "`no_bos` got True; expected false with a BertForMaskedLM"),
        ("--idf", "`idf` got True; expected nothing with another metric"),
    ],
)
def test_wrong_options(words, said, folder, capsys):
    files = {"OTHER": dict(UID="none", lstm=0.5), "TAKEN": dict(UID="sv", accuracy=0.9, ties=0)}
    for name, row in files.items():
        (folder / name).write_text(_lines([row]))
    given = [str(folder / word) if word in files else word for word in words.split()]
    assert _run(folder, "bert", *given) == 2
    shown = capsys.readouterr()
    assert said in shown.err.splitlines()[-1] and "Traceback" not in shown.err and not shown.out
    assert re.match("fastplm: error: ", shown.err.splitlines()[-1])


def test_a_model_that_gives_nan(folder, capsys):
    model = models.ElectraForPreTraining.from_pretrained(folder / "electra")
    torch.nn.init.constant_(model.discriminator_predictions.dense_prediction.bias, 3e38)
    torch.nn.init.constant_(model.discriminator_predictions.dense_prediction.weight, 3e38)
    model.save_pretrained(folder / "electra")
    assert _run(folder, "electra") == 2
    assert "gives NaN or infinity" in capsys.readouterr().err
