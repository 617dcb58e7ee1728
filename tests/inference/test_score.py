"""Scores of texts against plain loops over the parent classes, one text after another."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from tokenizers import pre_tokenizers
from torch import Tensor

from fastplm import models, ops
from fastplm.data import train_tokenizer
from fastplm.errors import ArgumentTypeError, ArgumentValueError
from fastplm.inference.score import (
    METHODS,
    TextScore,
    _parts,
    log_likelihood,
    perplexity,
    pseudo_log_likelihood,
)
from fastplm.testing import KeptDouble, check_in_fp64

from .conftest import BART, GPT, SMALL, T5

# Words consist of letters alone, so that a tokenizer's marks tell where words begin.
TEXTS = ["the lazy foxes jump", "a", "", "unbelievably lazy", "dogs  and dogs"]
SOURCES = ["dogs", "the lazy dogs jump", "a fox", "", "over and over"]
_CORPUS = [*TEXTS[:2], *TEXTS[3:], *SOURCES[:3], "jumping", "believe", "able"] * 3
#: Vocabularies of each kind of tokenizer, so small that words have several tokens.
_SIZES = {"wordpiece": 60, "bytelevel": 285, "unigram": 130}
#: The classes: their configuration, its sizes, and the kind of their tokenizer.
MASKED = {
    "BertForMaskedLM": ("BertConfig", SMALL, "wordpiece"),
    "AlbertForMaskedLM": ("AlbertConfig", SMALL | dict(embedding_size=8), "unigram"),
    "ElectraForMaskedLM": ("ElectraConfig", SMALL | dict(embedding_size=8), "wordpiece"),
    "RobertaForMaskedLM": ("RobertaConfig", SMALL, "bytelevel"),
}
DECODERS = {
    "GPT2LMHeadModel": ("GPT2Config", GPT, "bytelevel"),
    "OpenAIGPTLMHeadModel": ("OpenAIGPTConfig", GPT, "wordpiece"),
    "BertLMHeadModel": ("BertConfig", SMALL | dict(is_decoder=True), "wordpiece"),
    "BartForCausalLM": ("BartConfig", BART, "bytelevel"),
}
PAIRED = {
    "BartForConditionalGeneration": ("BartConfig", BART, "bytelevel"),
    "T5ForConditionalGeneration": ("T5Config", T5, "unigram"),
    "EncoderDecoderModel": ("EncoderDecoderConfig", SMALL, "wordpiece"),
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Callable[[str], Any]:
    """A small tokenizer of each kind."""
    cache = tmp_path_factory.mktemp("tokenizers")
    found: dict[str, Any] = {}

    def get(kind: str) -> Any:
        if kind not in found:
            found[kind] = train_tokenizer(_CORPUS, _SIZES[kind], cache, kind)
            if kind == "unigram":
                found[kind].add_special_tokens({"mask_token": "<extra_id_0>"})
        return found[kind]

    return get


def _config(name: str, tokenizer: Any) -> Any:
    kind, sizes, _ = (MASKED | DECODERS | PAIRED)[name]
    special = {
        f"{role}_token_id": getattr(tokenizer, f"{role}_token_id") for role in ("bos", "eos", "pad")
    }
    if kind == "EncoderDecoderConfig":
        part = transformers.BertConfig(vocab_size=len(tokenizer), pad_token_id=0, **sizes)
        config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(
            part, copy.deepcopy(part)
        )
        config.decoder_start_token_id = tokenizer.cls_token_id
        config.pad_token_id = tokenizer.pad_token_id
        return config
    return getattr(transformers, kind)(vocab_size=len(tokenizer), **special | sizes)


@pytest.fixture
def pair(tokenizer) -> Callable[[str], tuple[Any, Any, Any]]:
    """(a drop-in model, its parent with the same weights, the tokenizer), by the class's name."""

    def build(name: str) -> tuple[Any, Any, Any]:
        own = tokenizer((MASKED | DECODERS | PAIRED)[name][2])
        config = _config(name, own)
        model = getattr(models, name)(copy.deepcopy(config))
        parent = getattr(transformers, name)(copy.deepcopy(config)).eval()
        parent.set_attn_implementation("eager")
        if hasattr(model, "final_logits_bias"):
            torch.nn.init.normal_(model.final_logits_bias)
        parent.load_state_dict(model.state_dict())
        return model, parent, own

    return build


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


@torch.no_grad()
def paired_loop(parent: Any, tokenizer: Any, source: str, text: str) -> Tensor:
    given = torch.tensor([tokenizer(source)["input_ids"]])
    labels = tokenizer(text)["input_ids"]
    before = torch.tensor([[parent.config.decoder_start_token_id, *labels[:-1]]])
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
def test_pseudo_log_likelihood_is_that_of_a_loop(pair, name, method):
    model, parent, tokenizer = pair(name)
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
def test_log_likelihood_of_a_decoder_is_that_of_a_loop(pair, name, bos):
    model, parent, tokenizer = pair(name)
    if tokenizer.bos_token is None:
        tokenizer = copy.deepcopy(tokenizer)
        tokenizer.bos_token = tokenizer.cls_token
    before = [tokenizer.bos_token_id] if bos else []
    ids = [[*before, *tokenizer(text)["input_ids"]] for text in TEXTS]
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
def test_log_likelihood_of_an_encoder_decoder_is_that_of_a_loop(pair, name, lone):
    model, parent, tokenizer = pair(name)
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
        assert score.tokens == tokenizer.convert_ids_to_tokens(tokenizer(text)["input_ids"])


def test_no_padding_and_no_other_row_is_computed(pair, monkeypatch):
    """The layers get the tokens of all copies, the last one and the head the masked tokens."""
    model, _, tokenizer = pair("BertForMaskedLM")
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


def test_the_head_waits_for_rows_of_several_batches(pair, monkeypatch):
    model, _, tokenizer = pair("BertForMaskedLM")
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


def test_a_model_in_training_scores_without_dropout_and_stays_in_training(pair):
    model, _, tokenizer = pair("BertForMaskedLM")
    assert model.config.hidden_dropout_prob > 0
    model.train()
    first, second = (pseudo_log_likelihood(model, tokenizer, TEXTS) for _ in range(2))
    assert model.training and not first[0].log_probs.requires_grad
    assert all(torch.equal(a.log_probs, b.log_probs) for a, b in zip(first, second, strict=True))


def test_progress_ends_with_all_tokens(pair):
    model, _, tokenizer = pair("BertForMaskedLM")
    told: list[tuple[int, int]] = []
    pseudo_log_likelihood(
        model, tokenizer, TEXTS, batch_tokens=64, progress=lambda *of: told.append(of)
    )
    lengths = [len(_tokens(tokenizer, text)) for text in TEXTS]
    total = sum(n * (n + 2) for n in lengths)
    assert told == sorted(told) and told[-1] == (total, total) and len(told) > 2
    assert told[0] != told[-1] and {of[1] for of in told} == {total}


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


def test_special_tokens_in_a_text_are_scored(pair):
    """Only the special tokens that the tokenizer adds are left out."""
    model, _, tokenizer = pair("BertForMaskedLM")
    (score,) = pseudo_log_likelihood(model, tokenizer, ["dogs [SEP] [MASK] dogs"])
    assert score.tokens == ["dogs", "[SEP]", "[MASK]", "dogs"]


def test_texts_that_are_too_long(pair):
    model, _, tokenizer = pair("BertForMaskedLM")
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
    model, _, tokenizer = pair("GPT2LMHeadModel")
    with pytest.raises(ArgumentValueError, match="64 at most"):
        log_likelihood(model, tokenizer, ["a " * 80])
    cut = log_likelihood(model, tokenizer, ["a " * 80], bos=True, truncate=True)[0]
    assert cut.truncated and len(cut.tokens) == 63
    model, _, tokenizer = pair("BartForConditionalGeneration")
    with pytest.raises(ArgumentValueError, match="`sources` got text 0"):
        log_likelihood(model, tokenizer, ["a"], sources=["a " * 80])
    cut = log_likelihood(model, tokenizer, ["a"], sources=["a " * 80], truncate=True)[0]
    assert cut.truncated
    model, _, tokenizer = pair("T5ForConditionalGeneration")
    assert not log_likelihood(model, tokenizer, ["a " * 600])[0].truncated, "T5 has no limit"


def test_wrong_calls(pair):
    bert, _, words = pair("BertForMaskedLM")
    gpt, _, bytes_ = pair("GPT2LMHeadModel")
    bart, _, _ = pair("BartForConditionalGeneration")
    both = models.BertLMHeadModel(_config("BertForMaskedLM", words))
    plain = transformers.BertForMaskedLM(_config("BertForMaskedLM", words))
    without = copy.deepcopy(words)
    without.mask_token = None
    whole = copy.deepcopy(words)
    whole.backend_tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(split=False)
    by_words = {"method": "within_word_l2r"}
    value, kind = ArgumentValueError, ArgumentTypeError
    for error, said, call in (
        (
            value,
            "that takes a text for one word",
            lambda: pseudo_log_likelihood(bert, whole, ["a b"], **by_words),
        ),
        (
            value,
            "expected original | within",
            lambda: pseudo_log_likelihood(bert, words, ["a"], method="l2r"),
        ),
        (value, "`model` got a GPT2LMHeadModel", lambda: pseudo_log_likelihood(gpt, bytes_, ["a"])),
        (
            value,
            "`model` got a BertForMaskedLM",
            lambda: pseudo_log_likelihood(plain, words, ["a"]),
        ),
        (value, "without a mask token", lambda: pseudo_log_likelihood(bert, without, ["a"])),
        (kind, "`texts` got a str", lambda: pseudo_log_likelihood(bert, words, "a")),
        (kind, "a NoneType at 1", lambda: pseudo_log_likelihood(bert, words, ["a", None])),
        (
            value,
            "`batch_tokens` got 0",
            lambda: pseudo_log_likelihood(bert, words, ["a"], batch_tokens=0),
        ),
        (value, "Use pseudo_log_likelihood", lambda: log_likelihood(bert, words, ["a"])),
        (value, "without is_decoder", lambda: log_likelihood(both, words, ["a"])),
        (value, "`sources`", lambda: log_likelihood(gpt, bytes_, ["a"], sources=["a"])),
        (value, "`sources` got 1", lambda: log_likelihood(bart, bytes_, ["a"] * 2, sources=["a"])),
        (value, "`bos`", lambda: log_likelihood(bart, bytes_, ["a"], bos=True)),
    ):
        with pytest.raises(error, match=said.replace("|", r"\|")):
            call()
    assert pseudo_log_likelihood(bert, words, []) == log_likelihood(gpt, bytes_, []) == []
