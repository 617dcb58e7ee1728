"""Every command refuses a checkpoint with missing weights, with too many, or with NaN."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPT2Config

from fastplm.cli import main
from fastplm.errors import DataError
from fastplm.inference._encoder import load_encoder
from fastplm.models import BertForMaskedLM, GPT2LMHeadModel
from fastplm.run.checkpoint import config_at, weights_at

COMMANDS = {
    "embed": "embed --model MODEL --data texts.txt --out out.npy",
    "score": "score --model MODEL --data texts.txt --out out.tsv",
    "bertscore": "score --metric bertscore --model MODEL --data texts.txt --references texts.txt "
    "--out out.tsv",
    "prompt": "prompt --model MODEL --prompt prompt.json --data table.tsv --out out.tsv",
    "finetune": "finetune --task classification --model MODEL --data table.tsv --out out --steps 1",
    "seq2seq": "finetune --task seq2seq --encoder MODEL --data pairs.tsv --out out --steps 1 "
    "--target-vocab-size 300 --max-target-length 16",
    "distill": "distill --recipe distilbert --teacher MODEL --corpus corpus.txt --steps 1 "
    "--block-size 8 --cache cache --out out",
}
NO_HEAD = ("embed", "bertscore", "finetune", "seq2seq")


def renamed(change):
    def fault(weights, config):
        return {change(name): value for name, value in weights.items()}, config

    return fault


def without(part):
    def fault(weights, config):
        return {name: value for name, value in weights.items() if part not in name}, config

    return fault


def with_value(number):
    def fault(weights, config):
        weights["bert.encoder.layer.1.output.dense.weight"][3, 2] = number
        return weights, config

    return fault


#: Changes of a checkpoint, and the error's message.
FAULTS = {
    "DDP": (renamed(lambda name: f"module.{name}"), ["DistributedDataParallel", "'module.'"]),
    "compiled": (renamed(lambda name: f"_orig_mod.{name}"), ["torch.compile", "'_orig_mod.'"]),
    "no attention": (without("1.attention.self.query"), ["lacks 2 weights", "1.attention.self"]),
    "another type": (
        lambda weights, config: (weights, config | {"model_type": "roberta", "type_vocab_size": 2}),
        ["lacks", "bert.", "model type roberta"],
    ),
    "NaN": (with_value(float("nan")), ["layer.1.output.dense.weight holds NaN"]),
    "infinity": (with_value(float("-inf")), ["layer.1.output.dense.weight holds NaN or inf"]),
    "fewer layers": (
        lambda weights, config: (weights, config | {"num_hidden_layers": 1}),
        ["more layers than its config.json says", "layer.1."],
    ),
    "whole numbers": (
        lambda weights, config: ({name: value.char() for name, value in weights.items()}, config),
        ["is of type I8"],
    ),
    "a NaN in the configuration": (
        lambda weights, config: (weights, config | {"layer_norm_eps": float("nan")}),
        ["layer_norm_eps: nan"],
    ),
}


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts.txt").write_text("a b\nc d e\n")
    (tmp_path / "corpus.txt").write_text("\n\n".join("a b c d e f g h i j k" for _ in range(400)))
    rows = [f"{'a b c' if i % 2 else 'd e'}\t{'no' if i % 2 else 'yes'}" for i in range(40)]
    (tmp_path / "table.tsv").write_text("\n".join(["text\tlabel", *rows]) + "\n")
    pairs = [f"a b c {'d' * (i % 3)}\tthe e f {i}" for i in range(40)]
    (tmp_path / "pairs.tsv").write_text("\n".join(["source\ttarget", *pairs]) + "\n")
    prompt = {"template": "{text} {label}", "labels": {"yes": ["a"], "no": ["b"]}}
    (tmp_path / "prompt.json").write_text(json.dumps(prompt))
    return tmp_path


def words_of(command, model):
    return [str(model) if word == "MODEL" else word for word in COMMANDS[command].split()]


def broken(checkpoint, fault, to):
    shutil.copytree(checkpoint, to)
    config = json.loads((to / "config.json").read_text())
    weights, config = fault(load_file(to / "model.safetensors"), config)
    save_file(weights, to / "model.safetensors", metadata={"format": "pt"})
    (to / "config.json").write_text(json.dumps(config))
    return to


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_broken_checkpoint_is_refused(command, fault, checkpoint, place, capsys):
    change, said = FAULTS[fault]
    model = broken(checkpoint, change, place / "broken")
    assert main(words_of(command, model)) == 2
    shown = capsys.readouterr()
    line = shown.err.splitlines()[-1]
    assert line.startswith("fastplm: error: ") and "broken" in line, shown.err
    assert all(each in line for each in said), line
    assert not (place / "out.npy").exists() and not (place / "out.tsv").exists()


@pytest.mark.parametrize("command", ["finetune", "seq2seq", "distill"])
def test_a_broken_checkpoint_moves_nothing(command, checkpoint, place):
    model = broken(checkpoint, FAULTS["NaN"][0], place / "broken")
    (place / "out").mkdir()
    (place / "out" / "mine").write_text("mine")
    assert main([*words_of(command, model), "--overwrite"]) == 2
    assert (place / "out" / "mine").exists() and not (place / "out.old-1").exists()


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_a_head_that_is_not_needed_may_be_missing(command, checkpoint, place, capsys):
    model = broken(checkpoint, without("cls."), place / "broken")
    assert main(words_of(command, model)) == (0 if command in NO_HEAD else 2)
    if command not in NO_HEAD:
        assert "lacks" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_a_whole_checkpoint_is_read(command, checkpoint, place):
    assert main(words_of(command, checkpoint)) == 0


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8])
def test_the_masks_in_files_of_gpt2_are_no_weights(dtype, tmp_path):
    config = GPT2Config(vocab_size=9, n_positions=8, n_embd=8, n_layer=1, n_head=2)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    masks = {"transformer.h.0.attn.bias": torch.ones(1, 1, 8, 8).tril().to(dtype)}
    save_file(load_file(file) | masks, file, metadata={"format": "pt"})
    model, missing = weights_at("score", "model", tmp_path, "", GPT2LMHeadModel)
    assert not missing and model.config.n_layer == 1


@pytest.mark.parametrize("command", ["embed", "score"])
@pytest.mark.parametrize("most", [-5, 2, "16"])
def test_a_tokenizer_without_room(command, most, checkpoint, place, capsys):
    change = {"model_max_length": most}
    model = shutil.copytree(checkpoint, place / "m")
    settings = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps(settings | change))
    assert main(words_of(command, model)) == 2
    assert f"model_max_length: {most!r}" in capsys.readouterr().err


def test_large_finite_weights_are_no_infinity(checkpoint, place):
    """Only the sum of these weights is infinite."""

    def large(weights, config):
        weights["bert.encoder.layer.1.output.dense.weight"][:] = torch.finfo(torch.float32).max / 2
        return weights, config

    folder = broken(checkpoint, large, place / "large")
    model, missing = weights_at("embed", "model", folder, "a checkpoint", BertForMaskedLM)
    assert not missing and not model.bert.encoder.layer[1].output.dense.weight.sum().isfinite()


@pytest.fixture
def edited(checkpoint, tmp_path):
    """A checkpoint whose config.json has another value."""

    def edit(**settings):
        folder = shutil.copytree(checkpoint, tmp_path / "run" / "checkpoint-3")
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | settings))
        return folder

    return edit


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"hidden_dropout_prob": float("nan")}, "hidden_dropout_prob: nan; expected a probability"),
        ({"attention_probs_dropout_prob": 1.5}, "attention_probs_dropout_prob: 1.5; expected"),
        ({"architectures": 5}, "architectures: 5; expected a list of names"),
        ({"architectures": [5]}, "architectures: a list; expected a list of names"),
        ({"chunk_size_feed_forward": 7}, "chunk_size_feed_forward: 7; expected 0: the parts"),
        ({"return_dict": False}, "return_dict: False; expected true"),
        ({"hidden_size": "x"}, "'hidden_size'"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"num_hidden_layers": 0}, "num_hidden_layers: 0; expected 1 to"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers: 1000000000; expected 1 to"),
        ({"position_embedding_type": "relative_key"}, "'relative_key'; expected absolute"),
        ({"initializer_range": float("nan")}, "initializer_range: nan; expected a small positive"),
    ],
)
def test_settings_that_fail_later(edited, settings, words):
    folder = edited(**settings)
    # Some versions of Transformers refuse some of these values, with their own messages.
    with pytest.raises(DataError) as caught:
        config_at("finetune", "model", folder)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_the_configuration_is_looked_at_before_the_tokenizer(edited):
    with pytest.raises(DataError, match="`model` got .*'hidden_size': TypeError"):
        load_encoder("embed", edited(hidden_size="x"))


def test_a_weight_of_another_shape(edited):
    from fastplm.models import BertForMaskedLM

    with pytest.raises(DataError) as caught:
        weights_at("score", "model", edited(vocab_size=77), "a checkpoint", BertForMaskedLM)
    said = str(caught.value)
    assert "word_embeddings.weight has shape (21, 16), and (77, 16) by config.json" in said
    assert "above report" not in said
