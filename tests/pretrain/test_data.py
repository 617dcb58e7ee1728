"""The data of a run: who prepares it, what is held out, and counts of tokens."""

from __future__ import annotations

import contextlib

import pytest
import torch
import transformers

from fastplm.cli import _parser
from fastplm.data import TokenStore, load_tokenizer, tokenize
from fastplm.pretrain import data as pretrain_data
from fastplm.pretrain.objectives import objective_of


@pytest.mark.parametrize(
    ("arch", "lacking"),
    [
        ("bert-tiny", "1 document, of 2 that a sample takes"),
        ("albert-tiny", "documents of one token each"),
    ],
)
def test_why_nothing_is_held_out(
    settings, bert, corpus, arguments, refused, tmp_path, arch, lacking
):
    """Pairs take two documents, or one of two tokens, which the tail may lack."""
    text = ["The river follows the old house. " * 200] * 3
    if arch == "albert-tiny":
        text = [*corpus.read_text().split("\n\n")[:100], *["a"] * 600]
    tokenizer = load_tokenizer(bert / "tokenizer")
    objective = objective_of(settings(tmp_path, arch=arch), tokenizer)
    store = tokenize(text, tokenizer, tmp_path)
    rest, held_out, why = pretrain_data.hold_out(objective, store)
    assert (rest, held_out) == (store, None)
    assert why == f"the last 5% of this corpus has {lacking}"
    (tmp_path / "text").write_text("\n\n".join(text))
    words = arguments(tmp_path / "out", arch=arch, corpus=tmp_path / "text", eval_every=1)
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
