"""``fastplm score``: files in, tables and JSON out, and one line for each error."""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from fastplm.cli import main
from fastplm.data import train_tokenizer
from fastplm.inference import score_command
from fastplm.inference.bertscore import bert_score
from fastplm.inference.score import log_likelihood, perplexity, pseudo_log_likelihood
from fastplm.models import AutoModel, BertForMaskedLM, GPT2LMHeadModel, T5ForConditionalGeneration

TEXTS = ["the lazy dogs jump", "a", "dogs over foxes"]
_SIZES = dict(
    num_hidden_layers=2,
    num_attention_heads=2,
    hidden_size=16,
    intermediate_size=24,
    max_position_embeddings=32,
)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> Path:
    """Folders ``bert``, ``headless``, ``gpt2`` and ``t5``, each a model and its tokenizer."""
    out = tmp_path_factory.mktemp("checkpoints")
    corpus = [*TEXTS, "jumping", "fox", "lazily"] * 3
    torch.manual_seed(0)
    words = train_tokenizer(corpus, 60, out / "cache")
    config = transformers.BertConfig(vocab_size=len(words), **_SIZES)
    BertForMaskedLM(config).save_pretrained(out / "bert")
    transformers.BertModel(config).save_pretrained(out / "headless")
    for name in ("bert", "headless"):
        words.save_pretrained(out / name)
    letters = train_tokenizer(corpus, 285, out / "cache", "bytelevel")
    sizes = dict(n_embd=16, n_layer=2, n_head=2, n_positions=32)
    gpt = transformers.GPT2Config(vocab_size=len(letters), **sizes)
    GPT2LMHeadModel(gpt).save_pretrained(out / "gpt2")
    letters.save_pretrained(out / "gpt2")
    pieces = train_tokenizer(corpus, 150, out / "cache", "unigram")
    t5 = dict(d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, decoder_start_token_id=0)
    T5ForConditionalGeneration(transformers.T5Config(vocab_size=len(pieces), **t5)).save_pretrained(
        out / "t5"
    )
    pieces.save_pretrained(out / "t5")
    return out


@pytest.fixture
def data(tmp_path) -> Path:
    """The texts, with a blank line before the last one."""
    path = tmp_path / "texts.txt"
    path.write_text("\n".join([*TEXTS[:2], "", TEXTS[2]]) + "\n", encoding="utf-8")
    return path


@pytest.fixture
def score(checkpoints, capsys) -> Callable[..., str]:
    """Runs the command for the model in a folder; returns what it printed."""

    def run(model: str, data: Path, *options: object) -> str:
        capsys.readouterr()
        words = ["score", "--model", checkpoints / model, "--data", data, *options]
        assert main([str(word) for word in words]) == 0
        return capsys.readouterr().out

    return run


def _rows(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text), delimiter="\t"))


def _loaded(folder: Path, kind: Any) -> tuple[Any, Any]:
    return kind.from_pretrained(folder), transformers.AutoTokenizer.from_pretrained(folder)


def _near(shown: str, value: float) -> bool:
    return math.isclose(float(shown), value, rel_tol=1e-6)  # eight digits are shown


def test_a_masked_model_by_text_token_and_corpus(score, data, checkpoints):
    model, tokenizer = _loaded(checkpoints / "bert", BertForMaskedLM)
    scores = pseudo_log_likelihood(model, tokenizer, TEXTS)
    rows = _rows(score("bert", data))
    assert [row["line"] for row in rows] == ["1", "2", "4"]
    for row, known in zip(rows, scores, strict=True):
        assert int(row["tokens"]) == len(known.tokens)
        assert _near(row["pseudo_log_likelihood"], known.sum)
        assert _near(row["pseudo_perplexity"], known.perplexity)
    rows = _rows(score("bert", data, "--by", "token"))
    tokens = [token for known in scores for token in known.tokens]
    values = torch.cat([known.log_probs for known in scores]).tolist()
    assert [row["token"] for row in rows] == tokens
    assert all(_near(row["log_prob"], value) for row, value in zip(rows, values, strict=True))
    (row,) = _rows(score("bert", data, "--by", "corpus"))
    assert (row["texts"], row["tokens"]) == ("3", str(len(tokens)))
    assert _near(row["pseudo_perplexity"], perplexity(scores))
    (other,) = _rows(score("bert", data, "--by", "corpus", "--method", "within_word_l2r"))
    expected = pseudo_log_likelihood(model, tokenizer, TEXTS, method="within_word_l2r")
    assert _near(other["pseudo_perplexity"], perplexity(expected))
    assert other["pseudo_perplexity"] != row["pseudo_perplexity"]


def test_json(score, data, checkpoints):
    model, tokenizer = _loaded(checkpoints / "gpt2", GPT2LMHeadModel)
    scores = log_likelihood(model, tokenizer, TEXTS)
    found = json.loads(score("gpt2", data, "--format", "json", "--by", "token"))
    assert (found["metric"], found["corpus"]["texts"]) == ("log-likelihood", 3)
    for text, known, content in zip(found["texts"], scores, TEXTS, strict=True):
        assert text["text"] == content and "source" not in text
        assert [token["token"] for token in text["by_token"]] == known.tokens
        assert [token["log_prob"] for token in text["by_token"]] == known.log_probs.tolist()
        assert (text["log_likelihood"], text["perplexity"]) == (known.sum, known.perplexity)
    by_text = json.loads(score("gpt2", data, "--format", "json"))
    assert [text["tokens"] for text in by_text["texts"]] == [len(known.tokens) for known in scores]
    assert "texts" not in json.loads(score("gpt2", data, "--format", "json", "--by", "corpus"))
    bos = json.loads(score("gpt2", data, "--format", "json", "--bos"))
    assert bos["corpus"]["tokens"] == found["corpus"]["tokens"] + 3


def test_pairs(score, tmp_path, checkpoints):
    model, tokenizer = _loaded(checkpoints / "t5", T5ForConditionalGeneration)
    sources = ["jump", "dogs", "a"]
    path = tmp_path / "pairs.tsv.gz"
    pairs = zip(sources, TEXTS, strict=True)
    path.write_bytes(gzip.compress("".join(f"{a}\t{b}\n" for a, b in pairs).encode()))
    scores = log_likelihood(model, tokenizer, TEXTS, sources=sources)
    found = json.loads(score("t5", path, "--format", "json"))["texts"]
    assert [text["source"] for text in found] == sources
    assert [text["log_likelihood"] for text in found] == [known.sum for known in scores]
    assert [text["text"] for text in found] == TEXTS
    lone = tmp_path / "lone.txt"
    lone.write_text("\n".join(TEXTS))
    found = json.loads(score("t5", lone, "--format", "json"))["texts"]
    scores = log_likelihood(model, tokenizer, TEXTS)
    assert [text["log_likelihood"] for text in found] == [known.sum for known in scores]


def test_settings_change_what_they_say(score, data, capsys):
    before = torch.get_num_threads()
    plain = score("bert", data, "--batch-tokens", 7, "--threads", 1)
    assert torch.get_num_threads() == before
    for row, same in zip(_rows(plain), _rows(score("bert", data)), strict=True):
        assert math.isclose(
            float(row["pseudo_log_likelihood"]), float(same["pseudo_log_likelihood"]), rel_tol=1e-4
        )
    rounded = score("bert", data, "--bf16")
    assert rounded != plain
    for row, near in zip(_rows(plain), _rows(rounded), strict=True):
        assert math.isclose(
            float(row["pseudo_log_likelihood"]), float(near["pseudo_log_likelihood"]), rel_tol=0.05
        )


def test_products_of_fp32_are_as_precise_as_it_is_told(score, data, monkeypatch):
    seen = []
    real = score_command.pseudo_log_likelihood

    def look(*arguments, **options):
        seen.append(torch.get_float32_matmul_precision())
        return real(*arguments, **options)

    monkeypatch.setattr(score_command, "pseudo_log_likelihood", look)
    plain = score("bert", data)
    near = score("bert", data, "--matmul-precision", "high")
    assert seen == ["highest", "high"] and torch.get_float32_matmul_precision() == "highest"
    for row, other in zip(_rows(plain), _rows(near), strict=True):
        assert math.isclose(
            float(row["pseudo_log_likelihood"]), float(other["pseudo_log_likelihood"]), rel_tol=1e-5
        )


def test_a_file_is_written_whole_and_never_replaced_unasked(score, data, tmp_path, refused):
    out = tmp_path / "scores.tsv"
    shown = score("bert", data)
    assert score("bert", data, "--out", out) == "" and out.read_text() == shown
    refused("bert", data, "--out", out, said="scores.tsv, which exists")
    assert out.read_text() == shown
    assert score("bert", data, "--out", out, "--by", "corpus", "--overwrite") == ""
    assert out.read_text() != shown
    refused("bert", data, "--out", tmp_path / "none" / "a.tsv", said="a file in an existing folder")
    (tmp_path / "folder").mkdir()
    refused("bert", data, "--out", tmp_path / "folder", said="which exists")
    (tmp_path / "folder").rmdir()
    assert {path.name for path in tmp_path.iterdir()} == {"scores.tsv", "texts.txt"}


@pytest.fixture
def refused(checkpoints, capsys) -> Callable[..., None]:
    """The command ends with exit code 2 and one line of an error that says so."""

    def run(model: str, data: Path, *options: object, said: str) -> None:
        capsys.readouterr()
        words = ["score", "--model", checkpoints / model, "--data", data, *options]
        try:
            code = main([str(word) for word in words])
        except SystemExit as exit:  # argparse raises it
            code = exit.code
        shown = capsys.readouterr()
        line = shown.err.splitlines()[-1]
        assert code == 2 and not shown.out, shown
        assert re.match("fastplm( score)?: error: ", line) and said in line, shown.err
        assert "Traceback" not in shown.err

    return run


def test_what_is_wrong_is_said_in_one_line(refused, data, tmp_path):
    empty, blank, long = (tmp_path / name for name in ("empty", "blank", "long"))
    empty.write_text("")
    blank.write_text("\n \n")
    long.write_text("dogs\n" + "dogs " * 40)
    tabs, mixed = tmp_path / "tabs", tmp_path / "mixed"
    tabs.write_text("a\tb\na\tb\tc\n")
    mixed.write_text("a\tb\na\n")
    for path in (empty, blank):
        refused("bert", path, said=f"{path}, a file without text")
    refused("bert", tmp_path / "none.txt", said="none.txt, a path that does not exist")
    refused("bert", tmp_path, said=f"{tmp_path}, a folder; ")
    refused("bert", tmp_path, said="Name a file in it.")
    refused("none", data, said="none (no such file or folder); expected a checkpoint with its conf")
    refused(
        "headless", data, said="lacks 6 weights of a BertForMaskedLM, such as cls.predictions.bias"
    )
    refused("bert", long, said="text 1, 'dogs dogs")
    refused("bert", data, "--metric", "log-likelihood", said="expected pseudo-log-likelihood")
    refused("gpt2", data, "--metric", "pseudo-log-likelihood", said="expected log-likelihood")
    refused("gpt2", data, "--method", "original", said="`method` got original")
    refused("bert", data, "--bos", said="`bos`")
    refused("bert", data, "--method", "l2r", said="--method: got 'l2r'; expected original")
    refused("bert", data, "--by", "word", said="--by: got 'word'; expected token | text | corpus")
    refused("bert", data, "--batch-tokens", 0, said="--batch-tokens: got '0'")
    refused("t5", tabs, said=f"{tabs}:2: 2 tabs")
    refused("t5", mixed, said=f"{mixed}:2: 0 tabs")


def test_no_mask_token(refused, data, checkpoints, tmp_path):
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoints / "bert")
    model = BertForMaskedLM.from_pretrained(checkpoints / "bert")
    tokenizer.mask_token = None
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    refused(tmp_path / "model", data, said="a tokenizer without a mask_token")


def test_texts_that_are_cut_are_counted(checkpoints, tmp_path, capsys):
    path = tmp_path / "long.txt"
    path.write_text("dogs\n" + "dogs " * 40)
    words = ["score", "--model", checkpoints / "bert", "--data", path, "--truncate"]
    assert main([str(word) for word in words]) == 0
    shown = capsys.readouterr()
    assert "texts longer than the model takes, cut: 1 of 2" in shown.err
    assert int(_rows(shown.out)[1]["tokens"]) == 30


# --- BERTScore ------------------------------------------------------------------------------------


@pytest.fixture
def references(tmp_path) -> list[Path]:
    """Two files of references, line by line those of ``data``."""
    paths = [tmp_path / name for name in ("first.txt", "second.txt")]
    for path, texts in zip(paths, (TEXTS[::-1], TEXTS), strict=True):
        path.write_text("\n".join([*texts[:2], "never read", texts[2]]), encoding="utf-8")
    return paths


@pytest.mark.parametrize("model", ["bert", "headless", "t5"])
def test_bertscore(model, score, data, references, checkpoints):
    options = ("--metric", "bertscore", "--layer", 1, "--idf", "--references")
    rows = _rows(score(model, data, *options, *references))
    assert [row["line"] for row in rows] == ["1", "2", "4"]
    loaded, tokenizer = _loaded(checkpoints / model, AutoModel)
    both = list(zip(TEXTS[::-1], TEXTS, strict=True))
    known = bert_score(TEXTS, both, loaded, tokenizer, idf=True, layer=1)
    for name, values in known._asdict().items():
        assert all(
            _near(row[name], value) for row, value in zip(rows, values.tolist(), strict=True)
        )
    (row,) = _rows(score(model, data, "--by", "corpus", *options, references[0]))
    alone = bert_score(TEXTS, TEXTS[::-1], loaded, tokenizer, idf=True, layer=1)
    assert _near(row["f1"], alone.f1.mean().item())
    assert not torch.equal(alone.f1, known.f1)


@pytest.mark.parametrize(
    "words, expected",
    [
        ("--metric bertscore", "references.*Give --references FILE"),
        ("--metric bertscore --references DATA --by token", "by.*text or corpus"),
        ("--metric bertscore --references DATA --bos", "bos.*nothing with bertscore"),
        ("--references DATA", "references.*or give --metric bertscore"),
        ("--idf", "idf.*or give --metric bertscore"),
        ("--metric bertscore --references SHORT", "SHORT, a file of 1 lines; expected 4"),
    ],
)
def test_wrong_bertscore(words, expected, data, checkpoints, tmp_path, capsys):
    short = tmp_path / "SHORT"
    short.write_text("one\n")
    places = {"DATA": str(data), "SHORT": str(short)}
    given = [places.get(word, word) for word in words.split()]
    start = ["score", "--model", str(checkpoints / "bert"), "--data", str(data)]
    assert main([*start, *given]) == 2
    said = capsys.readouterr().err
    errors = [line for line in said.splitlines() if "blank lines" not in line]
    assert len(errors) == 1 and re.search(expected, errors[0]), said
