"""What the settings of a pre-training may be, and what they may not be together."""

from __future__ import annotations

import re

import pytest

from fastplm.errors import ArgumentValueError
from fastplm.pretrain.settings import PretrainArguments

# --- short blocks first ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, said",
    [
        ({"short_block_size": 12}, "got 12 with --block-size 32; expected a half"),
        ({"short_block_size": 2}, "expected a half, a third … of 32, an eighth at least"),
        ({"short_share": 0.5}, "`short_share` got 0.5 with --short-block-size None"),
        ({"short_block_size": 4, "objective": "mlm+nsp"}, "expected 5 or more with mlm+nsp"),
        (
            {"short_block_size": 16, "objective": "denoise", "arch": "bart-tiny"},
            "expected mlm+nsp or mlm+sop or mlm or clm or rtd",
        ),
    ],
)
def test_short_blocks_that_are_refused(settings, tmp_path, options, said):
    with pytest.raises(ArgumentValueError, match=re.escape(said)):
        settings(tmp_path, **{"objective": "mlm"} | options)


# --- a budget of FLOPs ----------------------------------------------------------------------------


def test_steps_or_a_budget(arguments, refused, settings, tmp_path):
    refused(arguments(tmp_path / "out", steps=None), "one of the arguments --steps --flops")
    refused(arguments(tmp_path / "out", flops=1e12), "--flops", "not allowed with", "--steps")
    refused(arguments(tmp_path / "out", steps=None, flops=3), "`flops` got 3.0", "of 1 of its")
    with pytest.raises(ArgumentValueError, match=r"`steps` got nothing; expected .*--flops F"):
        PretrainArguments("bert-tiny", ["-"], out=tmp_path)
    with pytest.raises(ArgumentValueError, match="`flops` got .* with --steps 9"):
        PretrainArguments("bert-tiny", ["-"], 9, tmp_path, flops=1e12)
    with pytest.raises(ArgumentValueError, match="`out` got ''; expected a path"):
        PretrainArguments("bert-tiny", ["-"], 9)
    assert not (tmp_path / "out").exists()


# --- checkpoints ----------------------------------------------------------------------------------


def test_how_many_checkpoints_there_may_be(arguments, refused, tmp_path):
    words = arguments(tmp_path / "out", keep_checkpoints="some")
    refused(words, "--keep-checkpoints", "'some'; expected a whole number from 1", "or all")
    with pytest.raises(ArgumentValueError, match="`keep_checkpoints` got 0"):
        PretrainArguments("bert-tiny", ["-"], 9, tmp_path, keep_checkpoints=0)


# --- shares of masks, and what a model has to beat ------------------------------------------------


def test_shares_that_do_not_fit(arguments, refused, tmp_path):
    for options, *words in (
        ({"mlm_probability": 0}, "--mlm-probability", "above 0"),
        (
            {"mask_replace_prob": 0.9, "random_replace_prob": 0.2},
            "`random_replace_prob` got 0.2; expected 1 at most",
            "mask_replace_prob, which is 0.9",
        ),
        (
            {"random_replace_prob": 0.3},
            "`random_replace_prob` got 0.3; expected 1 at most",
            "mask_replace_prob, which is 0.8",
        ),
        ({"arch": "gpt2-tiny", "mlm_probability": 0.3}, "mlm_probability", "objective clm"),
        ({"arch": "gpt2-tiny", "separators": True}, "separators", "mlm or rtd"),
        ({"arch": "electra-tiny", "temperature": 0}, "--temperature", "above 0"),
        ({"temperature": 2}, "temperature", "electra", "bert-tiny"),
        (
            {"arch": "electra-tiny", "temperature": 2, "electra_generator": "unigram"},
            "temperature",
            "electra-generator unigram",
        ),
    ):
        refused(arguments(tmp_path / "out", **options), *words)


# --- runs of before -------------------------------------------------------------------------------


#: The name of a text, further options of a BERT, and words of the line that refuses them.
REFUSED = [
    (None, {"corpus": "nowhere.txt"}, "nowhere.txt", "not exist"),
    ("\n \n", {}, "text.txt", "empty"),
    (None, {"batch_size": 10**9}, "--batch-size", "65536"),
    (None, {"threads": 10**5}, "--threads", "1024"),
    (None, {"corpus": ""}, "`corpus` got ''"),
    (None, {"corpus": "zero\0byte"}, "`corpus`", "null byte"),
    ("two words.\n\nand three more.", {}, "tokens of one block"),
    ("two words.\n\nand three more.", {"no_nsp": True}, "tokens of one block"),
    ("= One =\n" + "\n".join(["The river follows. A teacher opens."] * 50), {}, "--no-nsp"),
    (None, {"vocab_size": None, "tokenizer": "."}, "`tokenizer`", "save_pretrained"),
    (None, {"warmup": 99}, "warmup", "0 to 6"),
    (None, {"lr": 0}, "--lr", "above 0"),
    (None, {"dropout": 1.0}, "--dropout", "below 1"),
    (None, {"vocab_size": 8}, "vocab_size", "alphabet"),
    (None, {"precision": "fp64"}, "--precision", "bf16"),
    (None, {"objective": "rtd"}, "rtd with bert-tiny", "mlm+nsp or mlm"),
    (None, {"objective": "mlm", "no_nsp": True}, "no-nsp", "not allowed"),
    (None, {"electra_objective": "replace_mlm"}, "electra_objective", "bert-tiny"),
    (None, {"electra_sharing": "all"}, "electra_sharing", "bert-tiny"),
    (None, {"two_stage": True}, "two_stage", "bert-tiny"),
    (None, {"arch": "gpt2-tiny", "no_nsp": True}, "mlm with gpt2-tiny", "clm"),
    (None, {"arch": "t5-tiny", "objective": "denoise"}, "denoise with t5-tiny", "spans"),
    (None, {"arch": "t5-tiny", "unit": "word"}, "word with --objective spans"),
    (None, {"arch": "t5-tiny", "attention_dropout": 0.3}, "attention_dropout", "one rate"),
    (None, {"arch": "albert-tiny", "unit": "letter"}, "--unit", "ngram"),
    (None, {"arch": "albert-tiny", "optimizer": "sgd"}, "--optimizer", "lamb"),
    (None, {"parameter_sharing": "none"}, "parameter_sharing", "albert", "bert-tiny"),
    (None, {"embedding_size": 64}, "embedding_size", "electra", "bert-tiny"),
    (None, {"noise": "token_masking"}, "noise", "bart", "bert-tiny"),
    (None, {"adversarial": True}, "adversarial", "electra", "bert-tiny"),
    (None, {"rtd_weight": 3}, "rtd_weight", "electra", "bert-tiny"),
    (None, {"static_masks": 10}, "static_masks", "objective mlm+nsp"),
    (None, {"heads": 3}, "heads", "hidden", "128"),
    (None, {"hidden": 100, "heads": 8}, "heads", "hidden", "100"),
    (None, {"arch": "bart-tiny", "vocab_size": 99}, "vocab_size", "got 99"),
]
REFUSED += [
    (None, {"arch": "electra-tiny", **options}, *words)
    for options, *words in (
        ({"electra_objective": "mlm"}, "electra-objective", "rtd_masked"),
        ({"electra_sharing": "some"}, "electra-sharing", "embeddings"),
        ({"electra_generator": "bigram"}, "electra-generator", "unigram"),
        ({"two_stage": True, "electra_generator": "unigram"}, "electra_generator", "two-stage"),
        ({"two_stage": True, "electra_sharing": "embeddings"}, "electra_sharing", "two-stage"),
        ({"two_stage": True, "steps": 1}, "steps", "2 or more"),
        ({"objective": "mlm", "rtd_weight": 3}, "rtd_weight", "objective mlm"),
        ({"objective": "mlm", "two_stage": True}, "two_stage", "objective mlm"),
        (
            {"adversarial": True, "electra_generator": "unigram"},
            "adversarial",
            "--electra-generator unigram",
        ),
        (
            {"adversarial": True, "electra_objective": "replace_mlm"},
            "adversarial",
            "--electra-objective replace_mlm",
        ),
        ({"adversarial": True, "two_stage": True}, "adversarial", "two_stage"),
        (
            {"generator_size": 0.5, "electra_generator": "unigram"},
            "generator_size",
            "--electra-generator unigram",
        ),
        (
            {"generator_size": 0.5, "electra_sharing": "all"},
            "generator_size",
            "--electra-sharing all",
        ),
        (
            {"generator_size": 0.5, "two_stage": True},
            "generator_size",
            "--two-stage",
            "second-stage-from",
        ),
        ({"second_stage_from": "scratch"}, "second_stage_from", "two_stage"),
        ({"rtd_weight": 3, "two_stage": True}, "rtd_weight", "two_stage"),
        ({"optimizer": "adafactor", "two_stage": True}, "optimizer", "adafactor", "two-stage"),
        ({"two_stage": True, "steps": 8, "warmup": 5}, "warmup", "0 to 4"),
    )
]


@pytest.mark.parametrize("text, options, words", [(a, b, c) for a, b, *c in REFUSED], ids=str)
def test_refused(text, options, words, arguments, refused, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if text is not None:
        (tmp_path / "text.txt").write_text(text)
        options = {"corpus": "text.txt", **options}
    refused(arguments(tmp_path / "out", **options), *words)
    assert not (tmp_path / "out").exists()
