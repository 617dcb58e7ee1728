"""Every command refuses a checkpoint with missing weights, with too many, or with NaN."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import GPT2Config

from fastplm.cli import main
from fastplm.data import load_tokenizer
from fastplm.errors import ArgumentValueError, DataError
from fastplm.inference._checkpoint import load_encoder, load_model
from fastplm.models import BertForMaskedLM, GPT2LMHeadModel
from fastplm.run.checkpoint import config_at, weights_at
from fastplm.testing import check_in_fp64

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


def edited(checkpoint, name, change, to):
    shutil.copytree(checkpoint, to)
    content = json.loads((to / name).read_text())
    change(content)
    (to / name).write_text(json.dumps(content))
    return to


def outputs(model, tokenizer):
    batch = tokenizer(["The river follows the old house."], return_tensors="pt")
    with torch.no_grad():
        found = model.eval()(**batch)
    return next(found[name] for name in ("logits", "last_hidden_state") if name in found)


@pytest.mark.parametrize(
    ("where", "argument", "head", "part"),
    [
        ("embed", "model", "", "discriminator"),
        ("distill", "generator", "MaskedLM", "generator"),
        ("score", "model", "MaskedLM", "generator"),
    ],
)
def test_a_joint_checkpoint_is_read_as_one_of_its_models(electra, where, argument, head, part):
    """As the run saves its models by themselves at the end."""
    checkpoint, saved = electra / "checkpoint-6", electra / part
    config = config_at(where, argument, checkpoint)
    own = transformers.AutoConfig.from_pretrained(saved)
    assert type(config) is transformers.ElectraConfig
    assert config.architectures == own.architectures
    assert config.hidden_size == own.hidden_size
    kind = getattr(transformers, f"AutoModel{head and 'For'}{head}")
    found, _ = weights_at(
        where, argument, checkpoint, "a checkpoint", kind, lambda model, name: "pooler" in name
    )
    tokenizer = load_tokenizer(checkpoint, needs=("mask",))
    expected = outputs(kind.from_pretrained(saved), tokenizer)
    assert torch.equal(outputs(found, tokenizer), expected)
    if where != "distill":
        ours = load_model(where, checkpoint, head) if head else load_encoder(where, checkpoint)[0]
        assert type(ours).__module__.startswith("fastplm.models")
        gold = outputs(kind.from_pretrained(saved).double(), tokenizer)
        found = outputs(ours.double(), tokenizer)
        check_in_fp64({"outputs": found}, {"outputs": gold}, {"outputs": expected})


def test_a_joint_checkpoint_with_what_the_caller_adds(electra):
    """As a fine-tuning does: labels in the configuration, and a head that is new."""
    checkpoint, kind = electra / "checkpoint-4", transformers.AutoModelForSequenceClassification
    config = config_at("finetune", "model", checkpoint, num_labels=3)
    assert config.num_labels == 3
    model, missing = weights_at(
        *("finetune", "model", checkpoint, "a checkpoint", kind),
        lambda model, name: name.startswith("classifier"),
        config=config,
    )
    assert {name.split(".")[0] for name in missing} == {"classifier"}
    with safe_open(checkpoint / "model.safetensors", "pt") as file:
        name = "electra.encoder.layer.1.output.dense.weight"
        assert torch.equal(model.state_dict()[name], file.get_tensor(f"discriminator.{name}"))
    config = config_at("score", "model", checkpoint, part="discriminator")
    assert config.architectures == ["ElectraForPreTraining"]


@pytest.mark.slow  # another process, as this one knows ELECTRA's configuration
def test_its_tokenizer_loads_without_a_word(electra):
    process = [sys.executable, "-c", "import sys; from fastplm.data import load_tokenizer; "]
    process[-1] += "print(len(load_tokenizer(sys.argv[1])))"
    found = subprocess.run([*process, electra / "checkpoint-6"], capture_output=True, text=True)
    size = len(load_tokenizer(electra / "tokenizer"))
    assert (found.stdout, found.stderr) == (f"{size}\n", "")


def test_a_joint_checkpoint_that_lacks_what_is_read(electra, tmp_path):
    checkpoint = electra / "checkpoint-6"

    def other(name, **fields):
        return edited(checkpoint, "config.json", lambda c: c.update(fields), tmp_path / name)

    unigram = other("unigram", generator_type="unigram")
    with pytest.raises(DataError, match="draws tokens by their frequency"):
        config_at("score", "model", unigram)
    stage = {"embedding_sharing": "none", "stage": 1, "second_stage_from": "scratch"}
    first = other("first", **stage)
    with pytest.raises(DataError, match="in which the generator alone is trained"):
        weights_at("embed", "model", first, "a checkpoint", transformers.AutoModel)
    assert config_at("score", "model", first).architectures == ["ElectraForMaskedLM"]
    # Where the discriminator predicts tokens, it is the language model.
    detector = other("detector", objective="replace_mlm")
    assert config_at("prompt", "model", detector).hidden_size == 128
    with pytest.raises(DataError, match="lacks .* weights of a ElectraForJointPreTraining"):
        weights_at("prompt", "model", detector, "a checkpoint", transformers.AutoModelForMaskedLM)
    (first / "config.json").write_text('{"model_type": "fastplm-electra-joint", "stage": 7}')
    with pytest.raises(ArgumentValueError, match="`stage` got 7"):
        config_at("embed", "model", first)


@pytest.fixture
def with_setting(checkpoint, tmp_path):
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
def test_settings_that_fail_later(with_setting, settings, words):
    folder = with_setting(**settings)
    # Some versions of Transformers refuse some of these values, with their own messages.
    with pytest.raises(DataError) as caught:
        config_at("finetune", "model", folder)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_the_configuration_is_looked_at_before_the_tokenizer(with_setting):
    with pytest.raises(DataError, match="`model` got .*'hidden_size': TypeError"):
        load_encoder("embed", with_setting(hidden_size="x"))


def test_a_weight_of_another_shape(with_setting):
    with pytest.raises(DataError) as caught:
        weights_at("score", "model", with_setting(vocab_size=77), "a checkpoint", BertForMaskedLM)
    said = str(caught.value)
    assert "word_embeddings.weight has shape (21, 16), and (77, 16) by config.json" in said
    assert "above report" not in said
