"""A run, and what it leaves behind."""

from __future__ import annotations

import json

import pytest
import torch
import transformers

import fastplm.models
from fastplm.testing import check_in_fp64

from .conftest import check_logged, scalars

TEXT = ["The river follows the old house.", "A teacher opens. The train carries the letter away."]


# --- a run, and what it leaves behind -------------------------------------------------------------


def test_bert_run(bert):
    metrics = json.loads((bert / "metrics.json").read_text())
    history = metrics["history"]
    assert [entry["step"] for entry in history] == [1, 2, 3, 4, 5, 6]
    for entry in history:
        assert entry["tokens_per_second"] > 0
        parts = torch.tensor([entry["mlm_loss"], entry["next_sentence_loss"]]).sum()
        check_logged(parts, entry["loss"])
    assert history[-1]["loss"] < history[0]["loss"]
    assert metrics["held_out"]["samples"] > 0
    assert metrics["arguments"]["arch"] == "bert-tiny"
    assert metrics["versions"]["torch"] == torch.__version__
    assert (bert / "loss.png").read_bytes().startswith(b"\x89PNG")
    names = {path.name for path in bert.iterdir()}
    assert {"checkpoint-4", "checkpoint-6", "model", "tokenizer", "tensorboard"} <= names
    assert not any(name.startswith(".") for name in names)
    logged = [value for _, value in scalars(bert)]
    assert torch.equal(torch.tensor(logged), torch.tensor([entry["loss"] for entry in history]))


def test_electra_run(electra):
    metrics = json.loads((electra / "metrics.json").read_text())
    first, last = metrics["history"][0], metrics["history"][-1]
    assert last["mlm_loss"] < first["mlm_loss"] and last["rtd_loss"] < first["rtd_loss"]
    assert {"replaced_precision", "replaced_recall", "balanced_accuracy"} <= set(
        metrics["held_out"]
    )
    assert 0.8 < metrics["held_out"]["accuracy_of_always_original"] < 0.95


@pytest.mark.parametrize(
    ("run_of", "folder", "kind", "outputs"),
    [
        ("bert", "model", "BertForPreTraining", ("prediction_logits", "seq_relationship_logits")),
        ("electra", "generator", "ElectraForMaskedLM", ("logits",)),
        ("electra", "discriminator", "ElectraForPreTraining", ("logits",)),
    ],
)
def test_loads_in_plain_transformers(run_of, folder, kind, outputs, request):
    path = request.getfixturevalue(run_of) / folder
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    batch = tokenizer(TEXT, padding=True, return_tensors="pt")
    tokens = batch["attention_mask"].bool()

    def shown(cls, dtype):
        """The outputs without those of padding, which are not defined."""
        model = cls.from_pretrained(path, dtype=dtype).eval()
        with torch.no_grad():
            results = model(**batch)
        every = {name: results[name] for name in outputs}
        return {
            name: value[tokens if value.shape[:2] == tokens.shape else slice(None)]
            for name, value in every.items()
        }

    plain = getattr(transformers, kind)
    out = shown(getattr(fastplm.models, kind), torch.float64)
    check_in_fp64(out, shown(plain, torch.float64), shown(plain, torch.float32))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "parts", "kind"),
    [
        (
            {"electra_objective": "rtd_masked", "electra_sharing": "all"},
            ["mlm_loss", "rtd_loss"],
            "ElectraForPreTraining",
        ),
        (
            {"electra_objective": "all_tokens_mlm"},
            ["discriminator_mlm_loss", "mlm_loss"],
            "ElectraForMaskedLM",
        ),
        ({"electra_generator": "unigram"}, ["rtd_loss"], "ElectraForPreTraining"),
        (
            {"adversarial": True, "generator_size": 0.5, "rtd_weight": 20.0},
            ["baseline_loss", "generator_loss", "mlm_loss", "rtd_loss"],
            "ElectraForPreTraining",
        ),
    ],
    ids=str,
)
def test_electra_options(run, tmp_path, options, parts, kind):
    out = tmp_path / "out"
    metrics = run(out, arch="electra-tiny", **options)
    recorded = json.loads((out / "run.json").read_text())
    assert {name: recorded[name] for name in options} == options
    for entry in metrics["history"]:
        assert sorted(name for name in entry if name.endswith("_loss")) == parts
    adversarial, learnt = "adversarial" in options, ["loss", *parts]
    if adversarial:  # the generator does not learn the tokens, but its loss is in the sum
        config = json.loads((out / "checkpoint-6" / "config.json").read_text())
        assert config["discriminator_weight"] == 20.0 and config["adversarial"]
        assert config["generator"]["hidden_size"] == config["discriminator"]["hidden_size"] / 2
        parts = learnt = ["rtd_loss"]
    for name in learnt:
        assert metrics["history"][-1][name] < metrics["history"][0][name]
        assert name == "loss" or 0 < metrics["held_out"][name] < 2 * metrics["history"][0][name]
    assert ("words" in metrics["held_out"]) == ("rtd_loss" in parts)
    assert (out / "generator").is_dir() == ("mlm_loss" in parts or adversarial)
    config = json.loads((out / "discriminator" / "config.json").read_text())
    assert config["architectures"] == [kind]
    assert getattr(transformers, kind).from_pretrained(out / "discriminator")


@pytest.mark.slow
def test_without_pairs_and_with_a_given_tokenizer(run, bert, tmp_path, capsys):
    metrics = run(
        tmp_path / "out",
        no_nsp=True,
        vocab_size=None,
        tokenizer=bert / "tokenizer",
        workers=2,
        steps=2,
    )
    assert "next_sentence_loss" not in metrics["history"][0]
    assert transformers.BertForMaskedLM.from_pretrained(tmp_path / "out" / "model")
    captured = capsys.readouterr()
    assert "step 2/2" in captured.err and "tokens/s" in captured.err
    assert str(tmp_path / "out" / "model") in captured.out


# --- bad input ------------------------------------------------------------------------------------


def test_links_in_a_circle(arguments, refused, tmp_path):
    (tmp_path / "out").symlink_to(tmp_path / "out")
    refused(arguments(tmp_path / "out"), "`out`", "loop")


def test_the_documentation_is_a_corpus_of_its_own(arguments, refused, tmp_path):
    words = arguments(tmp_path / "out", corpus="embedded")
    words.insert(words.index("embedded") + 1, "text.txt")
    refused(words, "`corpus` got embedded text.txt; expected files, or embedded alone")


def test_a_tokenizer_without_what_an_objective_needs(arguments, refused, bert, tmp_path):
    options = {"arch": "t5-tiny", "vocab_size": None, "tokenizer": bert / "tokenizer"}
    refused(arguments(tmp_path / "out", **options), "without a eos_token")


# --- options that do not fit ----------------------------------------------------------------------


@pytest.mark.slow
def test_a_second_stage_from_scratch_may_have_a_narrow_generator(run, tmp_path):
    out = tmp_path / "out"
    options = {"two_stage": True, "second_stage_from": "scratch", "generator_size": 0.5}
    metrics = run(out, arch="electra-tiny", steps=4, **options)
    assert metrics["history"][-1].keys() & {"mlm_loss", "rtd_loss"} == {"mlm_loss", "rtd_loss"}
    sizes = [
        json.loads((out / part / "config.json").read_text())["hidden_size"]
        for part in ("generator", "discriminator")
    ]
    assert sizes == [64, 128]
    # The first stage has only the generator, the second its forward and the discriminator.
    assert metrics["flops"] > 0
