"""Budgets, seeds, checkpoints that are kept and read, shares of masks, and runs begun elsewhere."""

from __future__ import annotations

import functools
import json
import math
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch
import transformers
from safetensors import safe_open

import fastplm.models
from fastplm.cli import _parser
from fastplm.data import load_tokenizer, pairs
from fastplm.errors import ArgumentValueError, DataError
from fastplm.finetune.features import FeaturesForSequenceClassification
from fastplm.finetune.models import read_config
from fastplm.finetune.run import build_model, prepare_task
from fastplm.finetune.settings import FinetuneArguments
from fastplm.inference._checkpoint import load_encoder, load_model
from fastplm.pretrain.data import held_out_collator, prepare_data
from fastplm.pretrain.dry_run import dry_run
from fastplm.pretrain.evaluate import evaluate, ngram_losses
from fastplm.pretrain.objectives import DocumentBlocks, MaskedTokens, objective_of
from fastplm.pretrain.run import Pretraining
from fastplm.pretrain.settings import PretrainArguments
from fastplm.pretrain.short_blocks import ShortPairs
from fastplm.run.checkpoint import config_at, weights_at
from fastplm.run.flops import flops_a_token
from fastplm.run.folder import read_hashed, write_hashed
from fastplm.study.costs import cost_of
from fastplm.testing import FORWARD_FACTOR, check_error, check_in_fp64

CLASSES = {
    "model": transformers.BertForPreTraining,
    "generator": transformers.ElectraForMaskedLM,
    "discriminator": transformers.ElectraForPreTraining,
}


_STAGES = ("first", "second")
SHORT = {"short_block_size": 16, "short_share": 0.9}
slow = functools.partial(pytest.param, marks=pytest.mark.slow)


@pytest.fixture
def settings(arguments):
    """The settings of a command line."""

    def settings(out, **options):
        found = vars(_parser().parse_args(arguments(out, **options)))
        found.pop("command")
        return PretrainArguments(**found)

    return settings


# --- short blocks first ---------------------------------------------------------------------------


def batches_of(args):
    """What each step of a run reads, on its way to the model, with the tokens that were masked."""
    training = Pretraining(args)
    training.settings = training.trainer_settings()
    training.data = prepare_data(args, training.settings, None)
    trainer, collator = training.make_trainer()
    found = []
    for batch in trainer.as_read(iter(trainer.get_train_dataloader())):
        batch["originals"] = batch["input_ids"]
        if collator.random:
            batch["originals"] = batch["labels"].where(batch["labels"] != -100, batch["input_ids"])
        found.append(batch)
    return found, collator


@pytest.mark.parametrize("arch", ["bert-tiny", "electra-tiny", "gpt2-tiny"])
def test_the_first_blocks_are_short(settings, tmp_path, arch):
    """The same tokens in the same order, cut; each piece has masks of its own."""
    options = {"arch": arch, "batch_size": 4, "steps": 5, "vocab_size": 300}
    if arch == "bert-tiny":
        options["objective"] = "mlm"
    whole, _ = batches_of(settings(tmp_path / "whole", **options))
    options |= {"short_block_size": 8, "short_share": 0.6}
    short, collator = batches_of(settings(tmp_path / "short", **options))
    assert [tuple(batch["input_ids"].shape) for batch in short] == [(16, 8)] * 3 + [(4, 32)] * 2
    assert collator.block_size == 32, "held-out text is whole"
    for ours, theirs in zip(short, whole, strict=True):
        assert torch.equal(ours["originals"].flatten(), theirs["originals"].flatten())
        indices = ours["sample_index"].tolist()
        assert len({*indices}) == len(indices) and ours["attention_mask"].all()
    for ours, theirs in zip(short[3:], whole[3:], strict=True):
        assert torch.equal(ours["input_ids"], theirs["input_ids"])
    if collator.random:
        masks = (short[0]["labels"] != -100).view(4, 4, 8)
        assert not torch.equal(masks[:, 0], masks[:, 1])


def test_pairs_in_the_place_of_a_sample():
    """Whichever samples a batch has, of datasets that give one item at a time."""
    short, whole = ([{"sample_index": at + n} for n in range(8)] for at in (0, 100))
    items = ShortPairs(short, whole, 2, [range(3)]).__getitems__([1, 4, 0])
    found = [[pair["sample_index"] - (1 << 40) for pair in items[n]["pieces"]] for n in (0, 2)]
    assert found == [[2, 3], [0, 1]] and items[1] == {"sample_index": 104}


@pytest.mark.parametrize("objective", ["mlm+nsp", "mlm+sop"])
def test_the_first_pairs_are_short(settings, tmp_path, objective):
    """They are pairs of their own, with a label each; the whole ones are those of any run."""
    options = {"objective": objective, "batch_size": 4, "steps": 5, "vocab_size": 300}
    options |= {"arch": "albert-tiny" if objective == "mlm+sop" else "bert-tiny"}
    whole, _ = batches_of(settings(tmp_path / "whole", **options))
    args = settings(tmp_path / "short", **options, short_block_size=16, short_share=0.6)
    with mock.patch.object(pairs, "draw", wraps=pairs.draw) as draws:
        short, collator = batches_of(args)
    assert draws.call_count == len(short), "pairs are made one by one"
    assert [tuple(batch["input_ids"].shape) for batch in short] == [(8, 16)] * 3 + [(4, 32)] * 2
    label = "sentence_order_label" if objective == "mlm+sop" else "next_sentence_label"
    for batch in short[:3]:
        assert batch[label].shape == (8,) and 0 < batch["token_type_ids"].sum()
        assert (batch["originals"][:, 0] == collator.tokenizer.cls_token_id).all()
        assert ((batch["originals"] == collator.tokenizer.sep_token_id).sum(1) == 2).all()
    rows = torch.cat([batch["originals"] for batch in short[:3]])
    assert len({tuple(row) for row in rows.tolist()}) > 12, "the pieces of a sample are one pair"
    assert {*torch.cat([batch[label] for batch in short[:3]]).tolist()} == {0, 1}
    indices = [index for batch in short for index in batch["sample_index"].tolist()]
    assert len({*indices}) == len(indices)
    for ours, theirs in zip(short[3:], whole[3:], strict=True):
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_each_of_two_stages_begins_with_short_blocks(
    settings, run, arguments, refused, tmp_path, capsys
):
    options = {"arch": "electra-tiny", "batch_size": 4, "steps": 7, "vocab_size": 300}
    options |= {"short_block_size": 16, "short_share": 0.5, "two_stage": True}
    batches, _ = batches_of(settings(tmp_path, **options))
    short, whole = (8, 16), (4, 32)
    shapes = [tuple(batch["input_ids"].shape) for batch in batches]
    assert shapes == [short, short, whole, short, short, whole, whole]
    indices = [index for batch in batches for index in batch["sample_index"].tolist()]
    assert len({*indices}) == len(indices)
    del options["vocab_size"], options["batch_size"]
    metrics = run(tmp_path / "run", **options)
    said = capsys.readouterr().err
    assert "the first 2 and 2 steps of the two stages are of pieces of blocks, 16 tokens" in said
    assert metrics["history"][-1]["step"] == 7
    said = "`steps` got 9; expected 7, of which the first stage of a two-stage training is half"
    refused(arguments(tmp_path / "run", resume=True, **options | {"steps": 9}), said)


def test_static_masks_of_short_blocks_come_again(settings, tmp_path):
    options = {"arch": "bert-tiny", "objective": "mlm", "batch_size": 64, "steps": 16}
    options |= {"vocab_size": 300, "short_block_size": 16, "short_share": 0.7, "static_masks": 1}
    batches, _ = batches_of(settings(tmp_path, **options))
    assert {batch["input_ids"].shape[1] for batch in batches[11:]} == {32}
    for steps in (batches[:11], batches[11:]):
        masks: dict[int, list] = {}
        for batch in steps:
            rows = zip(batch["sample_index"].tolist(), batch["labels"].tolist(), strict=True)
            for index, labels in rows:
                masks.setdefault(index, []).append(labels)
        again = [found for found in masks.values() if len(found) > 1]
        assert len(again) > 100 and all(found[0] == each for found in again for each in found)


def test_a_run_of_short_blocks_and_its_budget(run, arguments, refused, tmp_path, capsys):
    short = {"objective": "mlm", "short_block_size": 16, "short_share": 0.5}
    metrics = run(tmp_path / "a", steps=4, **short)
    assert "the first 2 steps are of pieces of blocks, 16 tokens each" in capsys.readouterr().err
    config = transformers.AutoConfig.from_pretrained(tmp_path / "a" / "model")
    each = [flops_a_token(config, length, masked=0.15) for length in (16, 32)]
    assert metrics["flops"] == pytest.approx(4 * 4 * 32 * sum(each) / 2, rel=1e-6)
    said = "`steps` got 8; expected 4, of which the first 0.5 are of short blocks"
    refused(arguments(tmp_path / "a", steps=8, resume=True, **short), said)


def test_a_run_of_short_pairs(run, curve, tmp_path, capsys):
    """It is resumed in its short part and in its whole one, with the same losses."""
    short = {"objective": "mlm+nsp", "short_block_size": 16, "keep_checkpoints": "all"}
    short["short_share"] = 0.5
    whole = run(tmp_path / "a", steps=6, **short)
    said = capsys.readouterr().err
    assert "the first 3 steps are of short pairs, 16 tokens each" in said
    assert "short pairs " in said and "are of one sentence, whose next one is always random" in said
    for done in (2, 4):
        out = tmp_path / str(done)
        shutil.copytree(tmp_path / "a", out)
        for path in (*out.glob("checkpoint-*"), *out.glob("m*.json")):
            if path.suffix or int(path.name.split("-")[1]) > done:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        resumed = run(out, steps=6, resume=True, **short)
        assert curve(resumed) == curve(whole) and resumed["starts"] == [0, done]


@pytest.mark.parametrize(
    "options, said",
    [
        ({"short_block_size": 12}, "got 12 with --block-size 32; expected a half"),
        ({"short_block_size": 2}, "expected a half, a third … of 32, an eighth at least"),
        ({"short_share": 0.5}, "`short_share` got 0.5 with --short-block-size None"),
        ({"short_block_size": 4, "objective": "mlm+nsp"}, "expected 5 or more with mlm+nsp"),
        (
            {"short_block_size": 16, "objective": "denoise", "arch": "bart-tiny"},
            "expected mlm with or without nsp or sop, rtd or clm",
        ),
    ],
)
def test_short_blocks_that_are_refused(settings, tmp_path, options, said):
    with pytest.raises(ArgumentValueError, match=re.escape(said)):
        settings(tmp_path, **{"objective": "mlm"} | options)


# --- a budget of FLOPs ----------------------------------------------------------------------------


def flops_of(metrics, out, folder="model"):
    """The FLOPs of a step of full samples, or of the mean pairs."""
    config = transformers.AutoConfig.from_pretrained(out / folder)
    args = metrics["arguments"]
    masked, length = args["mlm_probability"] or 0.15, args["block_size"]
    if args["objective"] in ("mlm+nsp", "mlm+sop"):
        length = pairs.NextSentencePairs.expected_length(length)
    return args["batch_size"] * length * flops_a_token(config, round(length), masked=masked)


def test_a_budget_says_how_many_steps(run, tmp_path, bert, capsys):
    a_step = flops_of(json.loads((bert / "metrics.json").read_text()), bert)
    out = tmp_path / "out"
    metrics = run(out, steps=None, flops=3.99 * a_step, save_every=2)
    assert metrics["history"][-1]["step"] == metrics["arguments"]["steps"] == 3
    assert metrics["arguments"]["flops"] == 3.99 * a_step
    said = capsys.readouterr().err
    assert f"budget         {3.99 * a_step:.4g} FLOPs pay for 3 steps of {a_step:.4g}" in said
    assert said.index("budget") < said.index("step 1/3")
    assert "flops: " in (out / "settings.yaml").read_text()
    record = read_hashed(out / "run.json")
    assert (record["steps"], record["flops"]) == (3, 3.99 * a_step)
    # With a larger budget the run becomes longer, and a smaller one does not reach its steps.
    more = run(out, steps=None, flops=5 * a_step, resume=True)
    assert more["history"][-1]["step"] == 5 and more["starts"] == [0, 3]


@pytest.mark.parametrize(
    ("arch", "objective", "short"),
    [
        pytest.param("bart-tiny", "denoise", {}, id="denoise"),
        slow("bert-tiny", "mlm+nsp", {}, id="nsp"),
        slow("albert-tiny", "mlm+sop", SHORT, id="sop, short"),
    ],
)
def test_a_budget_pays_for_the_tokens_that_are_read(
    run, settings, corpus, tmp_path, monkeypatch, arch, objective, short
):
    """BART's span that became one token is not read, nor what was cut from a pair."""
    monkeypatch.setattr("fastplm.pretrain.trainer._TIMED_SECONDS", 0.0)
    few = corpus.read_text().replace("\n\n", "\n").split("\n", 70)  # 70 short, and a long one
    (tmp_path / "few.txt").write_text("\n".join(few[:-1]) + "\n\n" + few[-1])
    budget = {"steps": None, "flops": 4e10, "block_size": 64, "vocab_size": 300}
    budget |= {"arch": arch, "objective": objective, "corpus": tmp_path / "few.txt", **short}
    metrics = run(tmp_path / "out", **budget)
    a_step = 4e10 / metrics["arguments"]["steps"]
    assert abs(metrics["flops"] - 4e10) < 2 * a_step
    args = settings(tmp_path / "no", dry_run=True, **budget)
    figures = dry_run(args)
    assert args.steps == metrics["arguments"]["steps"]
    assert 4e10 - a_step < figures["flops"] <= 4e10
    config = transformers.AutoConfig.from_pretrained(tmp_path / "out" / "model")
    expected = pytest.approx(figures["flops"], rel=1e-12)
    assert cost_of("pretrain", replace(args, flops=None), config) == expected
    if short:
        of_pieces, of_whole = map(pairs.SentenceOrderPairs.expected_length, (16, 64))
        length = objective_of(args)(args, None).source_length
        assert length == pytest.approx(0.9 * 4 * of_pieces + 0.1 * of_whole)


def test_a_budget_of_two_stages(run, tmp_path, electra):
    sizes = {"arch": "electra-tiny", "two_stage": True}
    joint = transformers.ElectraConfig.from_pretrained(electra / "discriminator")
    config = fastplm.models.ElectraJointConfig.from_discriminator(
        joint, generator_size=1.0, embedding_sharing="none", stage=1
    )
    a_step = 4 * 32 * flops_a_token(config, 32)
    metrics = run(tmp_path / "out", steps=None, flops=5 * a_step, **sizes)
    assert metrics["history"][-1]["step"] == 4  # as many of each stage
    assert metrics["flops"] <= 5 * a_step


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


def test_a_dry_run_of_a_budget(settings, tmp_path, bert, monkeypatch):
    monkeypatch.setattr("fastplm.pretrain.trainer._TIMED_SECONDS", 0.0)
    options = {"flops": 1e9, "seeds": 2, "start_from": bert / "model", "vocab_size": None}
    args = settings(tmp_path / "out", steps=None, dry_run=True, **options)
    figures = dry_run(args)
    a_step = flops_of(json.loads((bert / "metrics.json").read_text()), bert)
    assert args.steps == 1e9 // a_step > 1 and figures["flops"] == args.steps * a_step
    assert f"1e+09 FLOPs pay for {args.steps} steps" in figures["rows"]["budget"]
    assert figures["rows"]["seeds"] == "2 runs; the figures are of one"
    assert not (tmp_path / "out").exists()


# --- checkpoints ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("keep", "there"), [("all", [2, 4, 6]), (1, [6])])
def test_checkpoints_that_are_kept(run, tmp_path, keep, there, capsys):
    out = tmp_path / "out"
    run(out, keep_checkpoints=keep)
    assert sorted(int(path.name[11:]) for path in out.glob("checkpoint-*")) == there
    assert f"a checkpoint each 2 steps, of which {'all' if keep == 'all' else 'the'}" in (
        capsys.readouterr().err
    )


def test_states_that_are_kept_for_a_curve(run, tmp_path):
    """States at equal distances stay beside the newest ones, also in a resumed run."""
    out = tmp_path / "out"
    options = {"steps": 10, "states": 3, "save_every": 2, "keep_checkpoints": 1}
    run(out, **options)
    there = sorted(path.name for path in out.glob("checkpoint-*"))
    assert there == ["checkpoint-10", "checkpoint-3", "checkpoint-7"]
    shutil.rmtree(out / "checkpoint-10")
    (out / "manifest.json").unlink()
    run(out, resume=True, **options)
    assert sorted(path.name for path in out.glob("checkpoint-*")) == there
    # A run of twice the steps has other states.
    run(out, resume=True, **options | {"steps": 20})
    there = sorted(int(path.name[11:]) for path in out.glob("checkpoint-*"))
    assert there == [7, 13, 20]


def test_how_many_checkpoints_there_may_be(arguments, refused, tmp_path):
    words = arguments(tmp_path / "out", keep_checkpoints="some")
    refused(words, "--keep-checkpoints", "'some'; expected a whole number from 1", "or all")
    with pytest.raises(ArgumentValueError, match="`keep_checkpoints` got 0"):
        PretrainArguments("bert-tiny", ["-"], 9, tmp_path, keep_checkpoints=0)


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
        ours = load_model(where, checkpoint, head)
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


def edited(checkpoint, folder, **fields):
    """A copy of a checkpoint whose config.json has other fields."""
    shutil.copytree(checkpoint, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))
    return folder


def test_a_joint_checkpoint_that_lacks_what_is_read(electra, tmp_path):
    checkpoint = electra / "checkpoint-6"
    unigram = edited(checkpoint, tmp_path / "unigram", generator_type="unigram")
    with pytest.raises(DataError, match="draws tokens by their frequency"):
        config_at("score", "model", unigram)
    first = edited(
        checkpoint,
        tmp_path / "first",
        embedding_sharing="none",
        stage=1,
        second_stage_from="scratch",
    )
    with pytest.raises(DataError, match="in which the generator alone is trained"):
        weights_at("embed", "model", first, "a checkpoint", transformers.AutoModel)
    assert config_at("score", "model", first).architectures == ["ElectraForMaskedLM"]
    # Where the discriminator predicts tokens, it is the language model.
    other = edited(checkpoint, tmp_path / "other", objective="replace_mlm")
    assert config_at("prompt", "model", other).hidden_size == 128
    with pytest.raises(DataError, match="lacks .* weights of a ElectraForJointPreTraining"):
        weights_at("prompt", "model", other, "a checkpoint", transformers.AutoModelForMaskedLM)
    (first / "config.json").write_text('{"model_type": "fastplm-electra-joint", "stage": 7}')
    with pytest.raises(ArgumentValueError, match="`stage` got 7"):
        config_at("embed", "model", first)


# --- several seeds --------------------------------------------------------------------------------


def test_seeds(run, tmp_path, curve, capsys):
    out, options = tmp_path / "out", {"seeds": 2, "steps": 4}
    run(out, **options)
    done = (out / "seed-0" / "metrics.json").read_bytes()
    # As a process leaves it that was killed in the second run, after its first checkpoint.
    for folder, names in ((out, ()), (out / "seed-1", ("model", "checkpoint-4"))):
        for name in ("metrics.json", "manifest.json"):
            (folder / name).unlink()
        for name in names:
            shutil.rmtree(folder / name)
    capsys.readouterr()
    metrics = run(out, resume=True, **options)
    said = capsys.readouterr()
    assert "all 4 steps of it: nothing was changed" in said.err and "seed 1" in said.out
    assert (out / "seed-0" / "metrics.json").read_bytes() == done
    parts = [json.loads((out / f"seed-{i}" / "metrics.json").read_text()) for i in range(2)]
    assert parts[1]["starts"] == [0, 2] and [each["seed"] for each in metrics["seeds"]] == [0, 1]
    losses = torch.tensor([part["held_out"]["mlm_loss"] for part in parts], dtype=torch.float64)
    assert losses[0] != losses[1]
    found = metrics["held_out"]["mlm_loss"]
    assert found["mean"] == pytest.approx(losses.mean().item())
    # Student's t of one degree of freedom.
    width = math.tan(math.pi * 0.475) * losses.std().item() / 2**0.5
    assert found["half_width"] == pytest.approx(width)
    assert "held out: mlm loss" in said.out
    # One seed is the run that it was, without folders.
    alone = run(tmp_path / "one", steps=4, seed=1)
    assert curve(alone) == curve(parts[1])
    assert not list((tmp_path / "one").glob("seed-*"))


@pytest.mark.slow
def test_killed_seeds_are_resumed(run, arguments, killed, tmp_path, curve):
    out, options = tmp_path / "out", {"seeds": 2, "steps": 4}
    whole = run(tmp_path / "whole", threads=1, **options)
    # Before the first checkpoint of a seed it begins again; after it, it continues.
    for steps, seed in ((1, 0), (3, 0), (1, 1), (3, 1)):
        again = {"resume": True} if out.exists() else {}
        killed(arguments(out, threads=1, **options, **again), steps, seed)
    metrics = run(out, resume=True, threads=1, **options)
    assert metrics["held_out"] == whole["held_out"] and metrics["loss"] == whole["loss"]
    for seed in ("seed-0", "seed-1"):
        assert curve(out / seed) == curve(tmp_path / "whole" / seed)
    # More seeds continue the run.
    metrics = run(out, resume=True, steps=4, seeds=3)
    assert [each["seed"] for each in metrics["seeds"]] == [0, 1, 2]


@pytest.mark.slow
def test_seeds_in_two_processes(arguments, in_two_processes, run, tmp_path):
    options = {"seeds": 2, "steps": 2, "dropout": 0}
    in_two_processes(arguments(tmp_path / "two", batch_size=2, **options))
    two = json.loads((tmp_path / "two" / "metrics.json").read_text())
    one = run(tmp_path / "one", **options)
    assert two["loss"]["mean"] == pytest.approx(one["loss"]["mean"], rel=1e-4)
    in_two_processes(arguments(tmp_path / "two", batch_size=2, resume=True, **options))


def test_seeds_that_do_not_fit(arguments, refused, run, tmp_path, bert):
    words = arguments(tmp_path / "out", seed=2**32 - 1, seeds=2)
    refused(words, "`seeds` got 2 with --seed 4294967295")
    # One run has no folders of seeds, and several have no checkpoint of their own.
    metrics = (bert / "metrics.json").read_bytes()
    refused(arguments(bert, seeds=2, resume=True), "`seeds` got 2; expected 1, as in the run")
    assert (bert / "metrics.json").read_bytes() == metrics and not list(bert.glob("seed-*"))
    run(tmp_path / "two", seeds=2, steps=1)
    words = arguments(tmp_path / "two", seeds=1, resume=True)
    refused(words, "`seeds` got 1; expected 2 or more, as in the runs")


# --- shares of masks, and what a model has to beat ------------------------------------------------


@pytest.mark.parametrize(
    ("options", "shares"),
    [
        ({}, (0.15, 0.8, 0.1)),
        ({"mask_replace_prob": 1.0}, (0.15, 1.0, 0.0)),
        ({"mlm_probability": 0.4, "random_replace_prob": 0.2}, (0.4, 0.8, 0.2)),
        ({"arch": "electra-large"}, (0.25, 1.0, 0.0)),
        ({"arch": "electra-large", "mask_replace_prob": 0.85}, (0.25, 0.85, 0.0)),
        ({"arch": "electra-large", "objective": "mlm"}, (0.15, 0.8, 0.1)),
    ],
    ids=str,
)
def test_shares_of_masks(bert, options, shares):
    args = PretrainArguments(
        **{"arch": "bert-tiny", "corpus": ["-"], "steps": 9, "out": "-"} | options
    )
    assert args.mask_shares == shares
    tokenizer = load_tokenizer(bert / "tokenizer")
    objective = MaskedTokens(args, tokenizer)
    collator = objective.collator()
    names = ("mlm_probability", "mask_replace_prob", "random_replace_prob")
    assert tuple(getattr(collator, name) for name in names) == shares
    ids = torch.randint(5, len(tokenizer), (64, 100), generator=torch.Generator().manual_seed(0))
    batch = collator([{"input_ids": row, "sample_index": i} for i, row in enumerate(ids)])
    chosen = batch["labels"] != -100
    assert chosen.sum() == round(100 * shares[0]) * 64
    masked = (batch["input_ids"][chosen] == tokenizer.mask_token_id).double().mean()
    assert abs(masked - shares[1]) < 0.03
    config = transformers.BertConfig()
    assert objective.flops_a_token(config) == flops_a_token(config, 128, masked=shares[0])
    # Whatever it learns from, held-out text is masked alike.
    assert tuple(getattr(held_out_collator(args, tokenizer), name) for name in names) == (
        0.15,
        1,
        0,
    )


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


def test_a_temperature(run, tmp_path, electra):
    """Hotter draws are more often another token than the original one."""
    hot = run(tmp_path / "out", arch="electra-tiny", temperature=30.0)
    config = json.loads((tmp_path / "out" / "checkpoint-6" / "config.json").read_text())
    assert config["temperature"] == 30.0
    usual = json.loads((electra / "metrics.json").read_text())
    shares = [each["held_out"]["words"]["share_replaced"] for each in (hot, usual)]
    assert shares[0] > shares[1]


def test_held_out_masks_are_not_those_of_the_run(run, tmp_path):
    """A model that has learned nothing is not better for being shown the tokens it is asked for."""
    shown = {"mask_replace_prob": 0.0, "random_replace_prob": 0.0, "mlm_probability": 0.4}
    usual, easy = (
        run(tmp_path / str(len(options)), steps=1, lr=1e-30, **options)["held_out"]
        for options in ({}, shown)
    )
    assert easy == usual


def test_what_a_model_has_to_beat(bert, electra):
    held_out = json.loads((bert / "metrics.json").read_text())["held_out"]
    # The sentences have few words in a fixed order: the one before says much.
    assert 0 < held_out["bigram_loss"] < held_out["unigram_loss"] < math.log(120)
    assert 0 <= held_out["mlm_accuracy"] <= 1
    assert "mlm_accuracy" in json.loads((electra / "metrics.json").read_text())["held_out"]


def test_ngram_losses_by_hand():
    train, held_out = np.array([0, 1, 0, 1, 2], dtype=np.uint16), np.array([0, 1, 3, 2], np.uint16)
    alone = {0: 3 / 9, 1: 3 / 9, 2: 2 / 9, 3: 1 / 9}
    found = ngram_losses(train, held_out, 4)
    expected = -sum(math.log(alone[i]) for i in (0, 1, 3, 2)) / 4
    assert found["unigram_loss"] == pytest.approx(expected)
    # 0 was followed by 1 twice; 1 by 0 and 2, and never by 3; nothing followed 3.
    pairs = (2 + alone[1]) / 3, 2 * alone[3] / 4, alone[2]
    assert found["bigram_loss"] == pytest.approx(-sum(map(math.log, pairs)) / 3)
    # The probabilities after a token add up to 1.
    for token in range(4):
        each = [ngram_losses(train, np.array([token, i]), 4)["bigram_loss"] for i in range(4)]
        assert sum(math.exp(-loss) for loss in each) == pytest.approx(1)


@pytest.mark.parametrize("folder", ["model", "generator"])
def test_the_accuracy_of_masked_tokens(bert, electra, folder):
    path = (bert if folder == "model" else electra) / folder
    plain = CLASSES[folder].from_pretrained(path).eval()
    ids = torch.randint(5, 100, (6, 16), generator=torch.Generator().manual_seed(0))
    labels = torch.where(ids % 3 == 0, (ids * 7) % 100, -100)
    with torch.no_grad():
        logits = plain(ids)[0]
    wanted = labels != -100
    labels[wanted] = labels[wanted].where(ids[wanted] % 2 == 0, logits.argmax(-1)[wanted])
    expected = (logits.argmax(-1) == labels)[wanted].double().mean()
    rows = [{"input_ids": ids[i], "labels": labels[i]} for i in range(6)]
    ours = getattr(fastplm.models, type(plain).__name__).from_pretrained(path)
    found = evaluate(ours, rows, torch.utils.data.default_collate, 4)
    assert 0.3 < expected < 1 and found["mlm_accuracy"] == pytest.approx(expected.item())
    # As a Trainer in bf16 leaves a model: its forward runs under autocast.
    ours.forward = torch.autocast("cpu", torch.bfloat16)(ours.forward)
    found = evaluate(ours, rows, torch.utils.data.default_collate, 4)
    assert abs(found["mlm_accuracy"] - expected) < 0.2


# --- separators, and an encoder that reads from left to right ------------------------------------


def test_separators_between_documents(settings, bert, tmp_path):
    from fastplm.data import tokenize
    from fastplm.pretrain.data import make_dataset, open_corpus

    tokenizer = load_tokenizer(bert / "tokenizer")
    args = settings(tmp_path / "out", objective="mlm", separators=True)
    store = tokenize(open_corpus(args.corpus), tokenizer, args.cache)
    without = make_dataset(settings(tmp_path / "out", objective="mlm"), store, tokenizer).dataset
    blocks = make_dataset(args, store, tokenizer).dataset
    assert isinstance(blocks, DocumentBlocks)
    cls, sep = tokenizer.cls_token_id, tokenizer.sep_token_id
    text = []
    for block in (blocks[i]["input_ids"].tolist() for i in range(len(blocks))):
        assert len(block) == 32 and block[0] == cls and block[-1] == sep
        text += block[1:-1]
    expected = []
    for first, last in zip(store.documents[:-1], store.documents[1:], strict=True):
        expected += [*store.tokens[store.sentences[first] : store.sentences[last]].tolist(), sep]
    assert text == expected[: len(text)] and len(expected) - len(text) < 30
    assert sep not in torch.cat([without[i]["input_ids"][:-1] for i in range(len(without))])


ENCODERS = [
    ("bert-tiny", transformers.BertLMHeadModel, 120),
    pytest.param("roberta-tiny", transformers.RobertaForCausalLM, 300, marks=pytest.mark.slow),
    pytest.param("electra-tiny", transformers.ElectraForCausalLM, 120, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("arch", "kind", "size"), ENCODERS)
def test_an_encoder_that_reads_from_left_to_right(run, tmp_path, arch, kind, size):
    out = tmp_path / "out"
    metrics = run(out, arch=arch, objective="clm", vocab_size=size, dropout=0.0)
    first, last = metrics["history"][0], metrics["history"][-1]
    assert last["loss"] < first["loss"] and "clm_loss" in metrics["held_out"]
    config = transformers.AutoConfig.from_pretrained(out / "model")
    assert config.is_decoder and config.architectures == [kind.__name__]
    # Half of the pairs attend, and all tokens but one are predicted.
    layer = 4 * 128**2 + 2 * 128 * 512
    pairs, head = 2 * 2 * 128 * (32 * 33 // 2), 31 * (128**2 + 128 * config.vocab_size)
    assert metrics["flops_per_token"] == 6 * (2 * 32 * layer + pairs + head) / 32
    # Transformers' class gives the same loss, and what comes later changes nothing.
    tokenizer = load_tokenizer(out / "model", needs=())
    batch = tokenizer(["The river follows the old house."], return_tensors="pt")

    def found(cls, dtype):
        model = cls.from_pretrained(out / "model", dtype=dtype).eval()
        with torch.no_grad():
            return model(**batch, labels=batch["input_ids"]).loss, model(**batch).logits

    ours = getattr(fastplm.models, kind.__name__)
    exact = found(kind, torch.float64)[1]
    gold = torch.nn.functional.cross_entropy(exact[0, :-1], batch["input_ids"][0, 1:])
    single = found(kind, torch.float32)
    check_error("loss", found(ours, torch.float32)[0], gold, [single[0]], FORWARD_FACTOR)
    logits = found(ours, torch.float64)[1], exact, single[1]
    check_in_fp64(*({"logits": each} for each in logits))
    backbone, _ = load_encoder("embed", out / "checkpoint-6")
    ids = batch["input_ids"]
    changed = torch.cat([ids[:, :-2], ids[:, -2:].flip(1)], 1)
    with torch.no_grad():
        states = [backbone(one).last_hidden_state for one in (ids, changed)]
    assert torch.equal(states[0][:, :-2], states[1][:, :-2])
    assert not torch.equal(states[0][:, -1], states[1][:, -1])


def test_the_classifier_of_an_encoder_that_reads_from_left_to_right(run, tmp_path):
    """It reads the last token; the first one sees nothing of the text."""
    out = tmp_path / "out"
    run(out, objective="clm", steps=2)
    table = tmp_path / "table.tsv"
    rows = [f"{i % 2}\tThe river follows the {'house garden'.split()[i % 2]}." for i in range(40)]
    table.write_text("\n".join(["label\ttext", *rows]))
    model, given = out / "checkpoint-2", {"data": str(table), "out": tmp_path / "ft"}
    args = FinetuneArguments(task="classification", model=model, **given)
    task = prepare_task(args)
    assert args.pooling == "last"
    model = build_model(args, task, 0).eval()
    assert type(model) is FeaturesForSequenceClassification and model.encoder.config.is_decoder
    batch = task.tokenizer(["The river.", "The old old river."], padding=True, return_tensors="pt")
    batch.pop("token_type_ids", None)
    with torch.no_grad():
        states = model.encoder(**batch).last_hidden_state
        last = states[torch.arange(2), batch["attention_mask"].sum(1) - 1]
        torch.testing.assert_close(model(**batch).logits, model.classifier(last))
    assert not torch.equal(last[0], last[1]) and torch.allclose(states[0, 0], states[1, 0])
    with pytest.raises(ArgumentValueError, match="which reads from left to right; expected an"):
        read_config(FinetuneArguments(task="choice", model=out / "checkpoint-2", **given))


# --- runs that begin with a checkpoint ------------------------------------------------------------


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
    "arch", ["gpt2", "t5", *(slow(each) for each in ("roberta", "albert", "gpt", "bart"))]
)
def test_each_family_begins_with_a_checkpoint(run, tmp_path, arch):
    options = {"arch": f"{arch}-tiny", "vocab_size": 300}
    run(tmp_path / "first", steps=8, **options)
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


# --- runs of before -------------------------------------------------------------------------------


def test_a_run_of_before_these_settings_is_resumed(run, arguments, refused, tmp_path):
    out = tmp_path / "out"
    run(out, steps=2)
    later = "flops seeds keep_checkpoints temperature separators start_from mlm_probability "
    later += "mask_replace_prob random_replace_prob"
    record = read_hashed(out / "run.json")
    write_hashed(out / "run.json", {n: record[n] for n in record if n not in later.split()})
    (out / "manifest.json").unlink()
    refused(arguments(out, steps=4, resume=True, mlm_probability=0.3), "`mlm_probability` got 0.3")
    assert run(out, steps=4, resume=True)["starts"] == [0, 2]
