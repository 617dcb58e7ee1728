"""The data of a run: who prepares it, what is held out, and counts of tokens."""

from __future__ import annotations

import contextlib

import torch
import transformers

from fastplm.cli import _parser
from fastplm.data import TokenStore, tokenize
from fastplm.pretrain import data as pretrain_data


def test_why_nothing_is_held_out(run, arguments, refused, tmp_path, capsys):
    one = tmp_path / "one.txt"
    one.write_text("\n\n".join(["The river follows the old house. " * 200] * 3))
    run(tmp_path / "out", steps=1, corpus=one)
    assert "1 document, of 2 that a sample takes" in capsys.readouterr().err
    words = arguments(tmp_path / "curve", steps=1, corpus=one, eval_every=1)
    refused(words, "eval_every", "too short to hold a part out")


def test_counts_of_a_unigram_generator(bert, arguments):
    settings = vars(_parser().parse_args(arguments(bert)))
    tokenizer = transformers.AutoTokenizer.from_pretrained(bert / "tokenizer")
    store = tokenize(pretrain_data.open_corpus(settings["corpus"]), tokenizer, settings["cache"])
    counts = pretrain_data.count_tokens(store, tokenizer)
    tokens = torch.from_numpy(store.tokens.astype("int64"))
    for token in range(len(tokenizer)):
        special = token in tokenizer.all_special_ids
        assert counts[token] == (0 if special else (tokens == token).sum())


def test_all_of_the_data_is_prepared_by_the_first_process_alone(run, tmp_path, monkeypatch):
    """The data of the evaluation, too, is prepared before the training."""
    inside, prepared = False, []

    @contextlib.contextmanager
    def first(self, *args, **kwargs):
        nonlocal inside
        inside = True
        yield
        inside = False

    derive = TokenStore._derive

    def recorded(self, name, build):
        prepared.append((name.split("-")[0], inside))
        return derive(self, name, build)

    monkeypatch.setattr(transformers.TrainingArguments, "main_process_first", first)
    monkeypatch.setattr(TokenStore, "_derive", recorded)
    assert "held_out" in run(tmp_path / "out", steps=1)
    assert ("chunks", True) in prepared and all(in_context for _, in_context in prepared)


def test_a_tail_that_gives_no_samples_is_not_held_out(run, corpus, tmp_path):
    """Documents of one token give no pairs, which must not be an error after the training."""
    path = tmp_path / "corpus.txt"
    stories = corpus.read_text().split("\n\n")[:100]
    path.write_text("\n\n".join(stories + ["a"] * 600))
    metrics = run(tmp_path / "out", arch="albert-tiny", corpus=path, steps=1)
    assert "held_out" not in metrics
