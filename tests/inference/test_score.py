"""Scores of texts against plain loops over the parent classes, one text after another."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from tokenizers import pre_tokenizers
from torch import Tensor

from fastplm import models, ops
from fastplm.errors import ArgumentTypeError, ArgumentValueError
from fastplm.inference.score import (
    METHODS,
    TextScore,
    _parts,
    log_likelihood,
    originality,
    perplexity,
    pseudo_log_likelihood,
    start_token,
)
from fastplm.nn._rows import vocabulary_loss
from fastplm.testing import KeptDouble, check_in_fp64

from .conftest import DECODERS, MASKED, PAIRED, SMALL

TEXTS = ["the lazy foxes jump", "a", "", "unbelievably lazy", "dogs  and dogs"]
SOURCES = ["dogs", "the lazy dogs jump", "a fox", "", "over and over"]


def _begins_a_word(kind: str, token: str, first: bool) -> bool:
    if kind == "wordpiece":
        return not token.startswith("##")
    return first or token.startswith("Ġ" if kind == "bytelevel" else "▁")


def _tokens(tokenizer: Any, text: str) -> list[str]:
    """The tokens of a text. ``tokenize`` is not used, as it may return an unknown token's text."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return tokenizer.convert_ids_to_tokens(ids)


@torch.no_grad()
def masked_loop(parent: Any, tokenizer: Any, kind: str, text: str, method: str) -> Tensor:
    """The copies of one text, each with other tokens masked."""
    ids = tokenizer(text)["input_ids"]
    tokens = _tokens(tokenizer, text)
    written = tokenizer.convert_ids_to_tokens(ids)
    start = next(i for i in range(len(ids)) if written[i : i + len(tokens)] == tokens)
    if not tokens:
        return torch.empty(0, dtype=parent.dtype)
    rows = []
    for place in range(len(tokens)):
        row = list(ids)
        row[start + place] = tokenizer.mask_token_id
        for later in range(place + 1, len(tokens)):
            if method == "original" or _begins_a_word(kind, tokens[later], False):
                break
            row[start + later] = tokenizer.mask_token_id
        rows.append(row)
    logits = parent(torch.tensor(rows)).logits
    found = [logits[i, start + i].log_softmax(-1)[ids[start + i]] for i in range(len(tokens))]
    return torch.stack(found)


@torch.no_grad()
def causal_loop(parent: Any, ids: list[int]) -> Tensor:
    if len(ids) < 2:
        return torch.empty(0, dtype=parent.dtype)
    logits = parent(torch.tensor([ids]), use_cache=False).logits[0]
    return torch.stack([logits[i].log_softmax(-1)[ids[i + 1]] for i in range(len(ids) - 1)])


def paired_labels(parent: Any, tokenizer: Any, text: str) -> list[int]:
    """All tokens of a text, but the [CLS] with which the decoder of a BERT2BERT begins."""
    first = isinstance(parent, transformers.EncoderDecoderModel)
    return tokenizer(text)["input_ids"][first:]


@torch.no_grad()
def paired_loop(parent: Any, tokenizer: Any, source: str, text: str) -> Tensor:
    given = torch.tensor([tokenizer(source)["input_ids"]])
    start, labels = parent.config.decoder_start_token_id, paired_labels(parent, tokenizer, text)
    before = torch.tensor([[start, *labels[:-1]]])
    logits = parent(input_ids=given, decoder_input_ids=before, use_cache=False).logits[0]
    return torch.stack([logits[i].log_softmax(-1)[label] for i, label in enumerate(labels)])


def hold(
    model: Any,
    parent: Any,
    ours: Callable[[Any], list[TextScore]],
    loop: Callable[[Any], list[Tensor]],
) -> list[TextScore]:
    """Checks fastplm's scores in fp64 against those of the loop over the parent."""

    def named(values: list[Tensor]) -> dict[str, Tensor]:
        return {str(i): value for i, value in enumerate(values)}

    single = named(loop(parent))
    with KeptDouble():
        gold, scores = named(loop(parent.double())), ours(model.double())
    check_in_fp64(named([score.log_probs for score in scores]), gold, single)
    return scores


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", MASKED)
def test_pseudo_log_likelihood_is_that_of_a_loop(made, name, method):
    model, parent, tokenizer = made(name)
    kind = MASKED[name][2]
    scores = hold(
        model,
        parent,
        lambda model: pseudo_log_likelihood(
            model, tokenizer, TEXTS, method=method, batch_tokens=70
        ),
        lambda parent: [masked_loop(parent, tokenizer, kind, text, method) for text in TEXTS],
    )
    for score, text in zip(scores, TEXTS, strict=True):
        assert score.tokens == _tokens(tokenizer, text)
        assert score.log_probs.shape == (len(score.tokens),)
    words = sum(len(text.split()) for text in TEXTS)
    assert sum(len(score.tokens) for score in scores) > words, "some words have several tokens"


@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize("name", DECODERS)
def test_log_likelihood_of_a_decoder_is_that_of_a_loop(made, name, bos):
    model, parent, tokenizer = made(name)
    if tokenizer.bos_token is None:
        tokenizer = copy.deepcopy(tokenizer)
        tokenizer.bos_token = tokenizer.cls_token
    ids = [tokenizer(text)["input_ids"] for text in TEXTS]
    if bos:  # the tokenizers of these checkpoints write it themselves, or none
        before = [tokenizer.bos_token_id]
        ids = [row if row[:1] == before else before + row for row in ids]
    scores = hold(
        model,
        parent,
        lambda model: log_likelihood(model, tokenizer, TEXTS, bos=bos, batch_tokens=20),
        lambda parent: [causal_loop(parent, row) for row in ids],
    )
    for score, row in zip(scores, ids, strict=True):
        assert score.tokens == tokenizer.convert_ids_to_tokens(row[1:])


@pytest.mark.parametrize("lone", [False, True], ids=["pairs", "lone texts"])
@pytest.mark.parametrize("name", PAIRED)
def test_log_likelihood_of_an_encoder_decoder_is_that_of_a_loop(made, name, lone):
    model, parent, tokenizer = made(name)
    sources = [""] * len(TEXTS) if lone else SOURCES
    scores = hold(
        model,
        parent,
        lambda model: log_likelihood(
            model, tokenizer, TEXTS, sources=None if lone else sources, batch_tokens=30
        ),
        lambda parent: [
            paired_loop(parent, tokenizer, source, text)
            for source, text in zip(sources, TEXTS, strict=True)
        ],
    )
    for score, text in zip(scores, TEXTS, strict=True):
        labels = paired_labels(parent, tokenizer, text)
        assert score.tokens == tokenizer.convert_ids_to_tokens(labels)


def test_the_discriminator_tells_what_it_takes_for_original(made):
    model, parent, tokenizer = made("ElectraForPreTraining")

    @torch.no_grad()
    def loop(parent):
        logits = (parent(torch.tensor([tokenizer(text)["input_ids"]])).logits[0] for text in TEXTS)
        return [(1 - each.sigmoid()).log()[1:-1] for each in logits]

    scores = hold(model, parent, lambda model: originality(model, tokenizer, TEXTS), loop)
    for score, text in zip(scores, TEXTS, strict=True):
        assert score.tokens == _tokens(tokenizer, text) and (score.log_probs < 0).all()


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


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["BartForConditionalGeneration", "T5ForConditionalGeneration"])
def test_an_encoder_decoder_fills_in_each_span(name, method, made):
    model, parent, tokenizer = made(name)
    t5 = name.startswith("T5")
    mask = tokenizer.convert_tokens_to_ids("<extra_id_0>") if t5 else tokenizer.mask_token_id
    start = parent.config.decoder_start_token_id

    @torch.no_grad()
    def of_span(parent, ids, first, end):
        source = torch.tensor([[*ids[:first], mask, *ids[end:]]])
        before = [start, mask] if t5 else [start, *ids[:first]]
        written = torch.tensor([[*before, *ids[first:end]]])
        out = parent(input_ids=source, decoder_input_ids=written, use_cache=False)
        logs = out.logits[0].log_softmax(-1)
        return [logs[len(before) - 1 + i, ids[first + i]] for i in range(end - first)]

    def loop(parent):
        found = []
        for text in TEXTS[1:]:
            ids, spans = _spans(tokenizer, text, method)
            each = [log for first, end in spans for log in of_span(parent, ids, first, end)]
            found.append(torch.stack(each) if each else torch.empty(0, dtype=parent.dtype))
        return found

    def ours(model):
        return pseudo_log_likelihood(model, tokenizer, TEXTS[1:], method=method)

    for score, text in zip(hold(model, parent, ours, loop), TEXTS[1:], strict=True):
        assert score.tokens == _tokens(tokenizer, text)
    word = _spans(tokenizer, "unbelievably", method)[1]
    assert len(word) > 1 if method == "original" else len(word) == 1


def test_no_padding_and_no_other_row_is_computed(made, monkeypatch):
    """The layers get the tokens of all copies, the last one and the head the masked tokens."""
    model, _, tokenizer = made("BertForMaskedLM")
    rows: dict[str, int] = {"first": 0, "last": 0, "vocabulary": 0}

    def count(name: str) -> Callable:
        def hook(module: Any, args: tuple[Tensor, ...]) -> None:
            rows[name] += args[0].numel() // args[0].shape[-1]

        return hook

    layers = model.bert.encoder.layer
    layers[0].intermediate.dense.register_forward_pre_hook(count("first"))
    layers[1].intermediate.dense.register_forward_pre_hook(count("last"))
    loss = ops.linear_cross_entropy

    def counted(input: Tensor, *args: Any, **options: Any) -> Tensor:
        rows["vocabulary"] += input.shape[0]
        return loss(input, *args, **options)

    monkeypatch.setattr(ops, "linear_cross_entropy", counted)
    lengths = [len(_tokens(tokenizer, text)) for text in TEXTS]
    pseudo_log_likelihood(model, tokenizer, TEXTS, batch_tokens=64)
    assert rows == {
        "first": sum(n * (n + 2) for n in lengths),
        "last": sum(lengths),
        "vocabulary": sum(lengths),
    }


def test_the_head_waits_for_rows_of_several_batches(made, monkeypatch):
    model, _, tokenizer = made("BertForMaskedLM")
    loss, calls = ops.linear_cross_entropy, []

    def counted(input: Tensor, *args: Any, **options: Any) -> Tensor:
        calls.append(input.shape[0])
        return loss(input, *args, **options)

    monkeypatch.setattr(ops, "linear_cross_entropy", counted)
    scores = {}
    for rows in (1, 7):
        calls.clear()
        monkeypatch.setattr("fastplm.inference.score._HEAD_ROWS", rows)
        scores[rows] = pseudo_log_likelihood(model, tokenizer, TEXTS, batch_tokens=16)
        assert sum(calls) == sum(len(score.tokens) for score in scores[rows])
        assert len(calls) > 2 and min(calls[:-1]) >= rows
    for alone, together in zip(scores[1], scores[7], strict=True):
        assert alone.tokens == together.tokens
        assert torch.allclose(alone.log_probs, together.log_probs, rtol=1e-5)


def test_batches_hold_all_copies_once_and_no_more_tokens_than_allowed():
    sizes = [(3, 5), (0, 2), (7, 9), (1, 30), (4, 1), (2, 5)]
    made = list(_parts(sizes, 20))
    seen = sorted(
        (i, copy) for parts in made for i, first, last in parts for copy in range(first, last)
    )
    assert seen == [(i, copy) for i, (copies, _) in enumerate(sizes) for copy in range(copies)]
    for parts in made:
        tokens = sum((last - first) * sizes[i][1] for i, first, last in parts)
        assert tokens <= 20 or parts == [(3, 0, 1)]
    lengths = [sizes[i][1] for parts in made for i, *_ in parts]
    assert lengths == sorted(lengths, reverse=True)
    assert list(_parts([], 20)) == list(_parts([(0, 4)], 20)) == []


def test_a_model_in_training_scores_without_dropout_and_stays_in_training(made):
    model, _, tokenizer = made("BertForMaskedLM")
    assert model.config.hidden_dropout_prob > 0
    model.train()
    first, second = (pseudo_log_likelihood(model, tokenizer, TEXTS) for _ in range(2))
    assert model.training and not first[0].log_probs.requires_grad
    assert all(torch.equal(a.log_probs, b.log_probs) for a, b in zip(first, second, strict=True))


def test_progress_ends_with_all_tokens(made):
    model, _, tokenizer = made("BertForMaskedLM")
    told: list[tuple[int, int]] = []
    pseudo_log_likelihood(
        model, tokenizer, TEXTS, batch_tokens=64, progress=lambda *of: told.append(of)
    )
    lengths = [len(_tokens(tokenizer, text)) for text in TEXTS]
    total = sum(n * (n + 2) for n in lengths)
    assert told == sorted(told) and told[-1] == (total, total) and len(told) > 2
    assert told[0] != told[-1] and {of[1] for of in told} == {total}


@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "T5ForConditionalGeneration"])
def test_a_common_beginning_is_scored_once(name, made, monkeypatch):
    """Also where texts are the same; each token of a beginning that is new is scored."""
    model, _, tokenizer = made(name)
    rows = []

    def counted(hidden, *args, **options):
        rows.append(hidden.shape[0])
        return vocabulary_loss(hidden, *args, **options)

    monkeypatch.setattr("fastplm.models._heads.vocabulary_loss", counted)
    longest = "the lazy dogs jumps"
    texts = [longest, "the lazy dogs jump", longest, "a fox", "", "a dog", "the lazy"]
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


def test_what_stands_before_a_text(made):
    """The tokenizer's beginning, or the special token of the configuration."""
    gpt, _, letters = made("GPT2LMHeadModel")
    assert letters.eos_token_id == 2
    for named, known in ((0, letters.bos_token_id), (50256, letters.bos_token_id), (2, 2)):
        gpt.config.bos_token_id = named
        assert start_token(gpt, letters) == known
    changed = log_likelihood(gpt, letters, ["a fox"], bos=True)[0].sum
    gpt.config.bos_token_id = letters.bos_token_id
    assert changed != log_likelihood(gpt, letters, ["a fox"], bos=True)[0].sum


def test_perplexity():
    scores = [
        TextScore(["a", "b"], torch.tensor([-1.0, -3.0])),
        TextScore(["c"], torch.tensor([-2.0])),
    ]
    assert (scores[0].sum, scores[0].perplexity) == (-4.0, math.exp(2))
    assert perplexity(scores) == math.exp(2)
    nothing = TextScore([], torch.empty(0))
    assert nothing.sum == 0 and math.isnan(nothing.perplexity) and math.isnan(perplexity([]))
    assert TextScore(["a"], torch.tensor([-1e4])).perplexity == math.inf


def test_special_tokens_in_a_text_are_scored(made):
    """Only the special tokens that the tokenizer adds are left out."""
    model, _, tokenizer = made("BertForMaskedLM")
    (score,) = pseudo_log_likelihood(model, tokenizer, ["dogs [SEP] [MASK] dogs"])
    assert score.tokens == ["dogs", "[SEP]", "[MASK]", "dogs"]


def test_texts_that_are_too_long(made):
    model, _, tokenizer = made("BertForMaskedLM")
    texts = ["dogs", "dogs " * 80]
    with pytest.raises(
        ArgumentValueError, match=r"text 1, 'dogs dogs .*, of 82 tokens.*64 at most"
    ):
        pseudo_log_likelihood(model, tokenizer, texts)
    short, cut = pseudo_log_likelihood(model, tokenizer, texts, truncate=True)
    (same,) = pseudo_log_likelihood(model, tokenizer, ["dogs " * 62])
    assert cut.truncated and not short.truncated and not same.truncated
    assert cut.tokens == same.tokens
    torch.testing.assert_close(cut.log_probs, same.log_probs)
    model, _, tokenizer = made("GPT2LMHeadModel")
    with pytest.raises(ArgumentValueError, match="64 at most"):
        log_likelihood(model, tokenizer, ["a " * 80])
    cut = log_likelihood(model, tokenizer, ["a " * 80], bos=True, truncate=True)[0]
    assert cut.truncated and len(cut.tokens) == 63
    model, _, tokenizer = made("BartForConditionalGeneration")
    with pytest.raises(ArgumentValueError, match="`sources` got text 0"):
        log_likelihood(model, tokenizer, ["a"], sources=["a " * 80])
    cut = log_likelihood(model, tokenizer, ["a"], sources=["a " * 80], truncate=True)[0]
    assert cut.truncated
    model, _, tokenizer = made("T5ForConditionalGeneration")
    assert not log_likelihood(model, tokenizer, ["a " * 600])[0].truncated, "T5 has no limit"


def test_wrong_calls(made):
    bert, _, words = made("BertForMaskedLM")
    gpt, _, bytes_ = made("GPT2LMHeadModel")
    bart, t5 = (made(f"{name}ForConditionalGeneration")[0] for name in ("Bart", "T5"))
    both = models.BertLMHeadModel(transformers.BertConfig(vocab_size=len(words), **SMALL))
    plain = transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=len(words), **SMALL))
    discriminator = made("ElectraForPreTraining")[0]
    without, one_word = copy.deepcopy(words), copy.deepcopy(words)
    without.mask_token = None
    one_word.backend_tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(split=False)
    masked, causal, some = pseudo_log_likelihood, log_likelihood, ["a"]
    for said, function, model, tokenizer, texts, options in (
        ("that takes a text for one", masked, bert, one_word, ["a b"], {"method": METHODS[1]}),
        ("expected original | within", masked, bert, words, some, {"method": "l2r"}),
        ("`model` got a GPT2LMHeadModel", masked, gpt, bytes_, some, {}),
        ("`model` got a BertForMaskedLM", masked, plain, words, some, {}),
        ("`model` got a ElectraForPreTraining", masked, discriminator, words, some, {}),
        ("without a mask token", masked, bert, without, some, {}),
        ("`texts` got a str", masked, bert, words, "a", {}),
        ("a NoneType at 1", masked, bert, words, ["a", None], {}),
        ("`batch_tokens` got 0", masked, bert, words, some, {"batch_tokens": 0}),
        ("Use pseudo_log_likelihood", causal, bert, words, some, {}),
        ("without is_decoder", causal, both, words, some, {}),
        ("`sources`", causal, gpt, bytes_, some, {"sources": some}),
        ("`sources` got 1", causal, bart, bytes_, ["a", "a"], {"sources": some}),
        ("`bos`", causal, bart, bytes_, some, {"bos": True}),
        ("`special_tokens`", causal, t5, words, some, {"special_tokens": False}),
        ("an ElectraForPreTraining", originality, bert, words, some, {}),
    ):
        with pytest.raises((ArgumentValueError, ArgumentTypeError), match=re.escape(said)):
            function(model, tokenizer, texts, **options)
    assert masked(bert, words, []) == causal(gpt, bytes_, []) == []
