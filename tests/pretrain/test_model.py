"""Runs that begin with the weights of a checkpoint."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace

import pytest
from transformers import AutoTokenizer, GPT2Config

from fastplm.inference.score import start_token

_STAGES = ("first", "second")


def test_a_second_stage_of_longer_sequences(run, tmp_path, capsys):
    first, second = tmp_path / "first", tmp_path / "second"
    run(first, objective="mlm", steps=16, save_every=16)
    capsys.readouterr()
    options = {"objective": "mlm", "vocab_size": None, "start_from": first / "model"}
    metrics = run(second, block_size=64, steps=4, dropout=0.2, **options)
    assert f"begun with     the weights of {first / 'model'}\n" in capsys.readouterr().err
    before = json.loads((first / "metrics.json").read_text())["history"]
    assert metrics["history"][0]["loss"] < (before[0]["loss"] + before[-1]["loss"]) / 2
    assert metrics["history"][0]["learning_rate"] == 1e-3  # a schedule of its own
    assert metrics["vocab_size"] == json.loads((first / "metrics.json").read_text())["vocab_size"]
    config = json.loads((second / "model" / "config.json").read_text())
    assert config["hidden_dropout_prob"] == 0.2 and not config["is_decoder"]
    # The same weights under a causal mask, and with the heads of another objective.
    left = {"objective": "clm", "start_from": second / "checkpoint-4"}
    run(tmp_path / "left", steps=1, **options | left)
    config = json.loads((tmp_path / "left" / "model" / "config.json").read_text())
    assert config["is_decoder"] and config["architectures"] == ["BertLMHeadModel"]
    run(tmp_path / "pairs", steps=1, **options | {"objective": "mlm+nsp"})
    assert "4 weights of new heads, such as bert.pooler.dense.bias" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arch",
    [
        "gpt2",
        "t5",
        *(
            pytest.param(each, marks=pytest.mark.slow)
            for each in ("roberta", "albert", "gpt", "bart")
        ),
    ],
)
def test_each_family_begins_with_a_checkpoint(run, tmp_path, arch):
    options = {"arch": f"{arch}-tiny", "vocab_size": 300}
    run(tmp_path / "first", steps=8, save_every=8, **options)
    checkpoint = AutoTokenizer.from_pretrained(tmp_path / "first" / "checkpoint-8")
    config = json.loads((tmp_path / "first/model/config.json").read_text())
    if "gpt" in arch:  # it has read ends of documents, and no beginning
        assert config["bos_token_id"] == config["eos_token_id"] == checkpoint.eos_token_id
        assert (
            start_token(SimpleNamespace(config=GPT2Config(**config)), checkpoint)
            == checkpoint.eos_token_id
        )
    options |= {"vocab_size": None, "start_from": tmp_path / "first" / "model"}
    metrics = run(tmp_path / "second", steps=1, **options)
    before = json.loads((tmp_path / "first" / "metrics.json").read_text())
    assert metrics["held_out"].keys() == before["held_out"].keys()
    name = next(name for name in before["held_out"] if name.endswith("_loss"))
    assert metrics["held_out"][name] < before["held_out"][name] + 0.1
    parts = [json.loads((tmp_path / out / "model/config.json").read_text()) for out in _STAGES]
    assert parts[0] == parts[1]


def test_what_an_albert_shares_is_that_of_its_checkpoint(run, tmp_path, refused, arguments):
    """Any of three choices has as many groups as layers."""
    first = tmp_path / "first"
    run(first, arch="albert-tiny", parameter_sharing="none", steps=1)
    options = {"arch": "albert-tiny", "vocab_size": None, "start_from": first / "model"}
    run(tmp_path / "second", parameter_sharing="none", steps=1, **options)
    line = "`parameter_sharing` got attention with albert-tiny; expected none, the parameter_shar"
    options |= {"parameter_sharing": "attention"}
    refused(arguments(tmp_path / "other", **options), line)


def test_a_joint_training_that_begins_with_another(run, tmp_path, electra, refused, arguments):
    options = {"arch": "electra-tiny", "vocab_size": None, "steps": 2}
    joint = {"start_from": electra / "checkpoint-6", "electra_objective": "rtd", "temperature": 0.5}
    metrics = run(tmp_path / "out", **options, **joint)
    before = json.loads((electra / "metrics.json").read_text())["history"]
    assert metrics["history"][0]["mlm_loss"] < before[0]["mlm_loss"]
    config = json.loads((tmp_path / "out" / "checkpoint-2" / "config.json").read_text())
    assert config["temperature"] == 0.5
    for words, start_from, more in (
        ("`start_from` got .* not both models", electra / "discriminator", {}),
        (
            "`start_from` got .*lacks .*copy_head",
            electra / "checkpoint-6",
            {"electra_objective": "all_tokens_mlm"},
        ),
        (
            "`generator_size` got 64 .* expected 32, the hidden_size of the generator",
            electra / "checkpoint-6",
            {"generator_size": 0.5},
        ),
        (
            "`generator_size` got 128 .* expected 32, the hidden_size of the generator",
            electra / "checkpoint-6",
            {"two_stage": True},
        ),
        (
            "`hidden` got 64 .* expected 128, the hidden_size of the discriminator",
            electra / "checkpoint-6",
            {"hidden": 64},
        ),
    ):
        line = refused(arguments(tmp_path / "no", **options, start_from=start_from, **more))
        assert re.search(words, line), line


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"layers": 3}, ["`layers` got 3 with bert-tiny; expected 2, the num_hidden_layers"]),
        ({"hidden": 64}, ["`hidden` got 64", "expected 128"]),
        ({"arch": "bert-mini"}, ["`layers` got 4 with bert-mini"]),
        ({"arch": "electra-tiny", "objective": "mlm"}, ["`start_from`", "a bert"]),
        ({"block_size": 1024}, ["`block_size` got 1024; expected 512 at most"]),
        ({"start_from": "nowhere"}, ["nowhere", "no folder"]),
        ({"vocab_size": 99}, ["--vocab-size", "not allowed", "--start-from"]),
    ],
    ids=str,
)
def test_a_checkpoint_that_does_not_fit(arguments, refused, tmp_path, bert, options, words):
    options = {"start_from": bert / "model", "vocab_size": None} | options
    refused(arguments(tmp_path / "out", **options), *words)
