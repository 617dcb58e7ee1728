"""Distillations through the command."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import safetensors.torch
import torch
import transformers
from huggingface_hub import ModelCard

import fastplm.models
from fastplm import _extension
from fastplm.cli import _parser, main
from fastplm.data import load_tokenizer
from fastplm.distill.models import hash_of_model
from fastplm.distill.objectives import sentence_vectors
from fastplm.distill.run import distill
from fastplm.distill.settings import METHODS, DistillArguments
from fastplm.errors import ArgumentValueError
from fastplm.run.flops import training_flops
from fastplm.testing import check_in_fp64

from .conftest import DOUBLE


def loads_as(kind: str, path: Path, **options) -> None:
    """Transformers' class reads each weight of a folder, and gives the results of fastplm's."""
    plain, loading = getattr(transformers, kind).from_pretrained(
        path, output_loading_info=True, dtype=DOUBLE, **options
    )
    assert not any(loading.values()), loading
    assert json.loads((path / "config.json").read_text())["architectures"] == [kind]
    ours = getattr(fastplm.models, kind).from_pretrained(path, dtype=DOUBLE, **options)
    single = getattr(transformers, kind).from_pretrained(path, dtype=torch.float32, **options)
    batch = transformers.AutoTokenizer.from_pretrained(path)(
        "The river follows.", return_tensors="pt"
    )
    shown = []
    for model in (ours, plain, single):
        with torch.no_grad():
            shown.append({"out": model.eval()(**batch)[0]})
    check_in_fp64(*shown)


@pytest.mark.parametrize(
    ("recipe", "kind", "parts"),
    [
        ("distilbert", "BertForMaskedLM", {"mlm", "soft", "hidden"}),
        ("tinybert", "BertModel", {"attention", "hidden", "embedding"}),
        ("minilm", "BertModel", {"attention", "value_relation"}),
        ("minilm-v2", "BertModel", {"query_relation", "key_relation", "value_relation"}),
    ],
)
def test_a_run(recipe, kind, parts, distilled, bert, tmp_path):
    out, before = tmp_path / "out", hash_of_model(bert / "model")
    width = {"student_hidden": 64} if recipe in ("tinybert", "minilm-v2") else {}
    assert main(distilled(out, bert / "model", recipe, **width)) == 0
    assert hash_of_model(bert / "model") == before
    metrics = json.loads((out / "metrics.json").read_text())
    for entry in (*metrics["history"], metrics["held_out"]):
        found = {name.removesuffix("_loss") for name in entry if name.endswith("_loss")}
        assert found == parts
    assert metrics["history"][-1]["loss"] < metrics["history"][0]["loss"]
    headless = {} if kind == "BertForMaskedLM" else {"add_pooling_layer": False}
    loads_as(kind, out / "model", **headless)
    card = ModelCard.load(out / "model" / "README.md")
    assert f"by the recipe `{recipe}` with the teacher `{bert / 'model'}` on " in card.text
    assert f"The class is `{kind}`" in card.text
    assert {each.metric_type for each in card.data.eval_results} == {
        f"{part}_loss" for part in parts
    }
    config = json.loads((out / "model" / "config.json").read_text())
    assert config["num_hidden_layers"] == 1 and config["hidden_size"] == width.get(
        "student_hidden", 128
    )
    # The checkpoint holds the trained parameters, without the teacher.
    saved = safetensors.torch.load_file(out / "checkpoint-4" / "model.safetensors")
    assert {name.split(".")[0] for name in saved} <= {
        "student",
        "projection",
        "embedding_projection",
    }
    assert ("projection.weight" in saved) == (recipe == "tinybert")
    student = safetensors.torch.load_file(out / "model" / "model.safetensors")
    for name, value in student.items():
        assert torch.equal(value, saved[f"student.{name}"])


def test_tinybert_learns_from_a_teacher_that_was_fine_tuned(distilled, bert, tmp_path):
    """The second step of TinyBERT, of hidden states and attention, as docs/finetuning.md has it."""
    kind = transformers.BertForSequenceClassification
    teacher = kind.from_pretrained(bert / "model", num_labels=3)
    with torch.no_grad():  # as if it was trained
        for weight in teacher.bert.encoder.parameters():
            weight.mul_(1.5)
    teacher.save_pretrained(tmp_path / "teacher")
    load_tokenizer(bert / "model").save_pretrained(tmp_path / "teacher")
    general = tmp_path / "general"
    assert main(distilled(general, bert / "model", "tinybert", student_hidden=64)) == 0
    options = {"student": general / "model", "student_layers": None}
    losses = {}
    for name, path in (("task", tmp_path / "teacher"), ("other", bert / "model")):
        assert main(distilled(tmp_path / name, path, "tinybert", **options)) == 0
        metrics = json.loads((tmp_path / name / "metrics.json").read_text())
        losses[name] = [entry["loss"] for entry in metrics["history"]]
    assert losses["task"][-1] < losses["task"][0] and losses["task"] != losses["other"]
    loads_as("BertModel", tmp_path / "task" / "model", add_pooling_layer=False)


def test_a_budget_of_flops(distilled, bert, tmp_path, capsys):
    """The student's training and the teacher's forward are paid for, whole steps alone."""
    counted = {}
    for name, layers in (("student", 1), ("teacher", None)):
        config = transformers.AutoConfig.from_pretrained(bert / "model")
        config.num_hidden_layers = layers or config.num_hidden_layers
        counted[name] = training_flops(config, (32,), masked=0.0)
    a_step = 4 * (counted["student"] + counted["teacher"] / 3)
    options = {"recipe": "tinybert", "steps": None}
    words = distilled(tmp_path / "out", bert / "model", **options, flops=3.99 * a_step)
    assert main(words) == 0
    assert "FLOPs pay for 3 steps of" in capsys.readouterr().err
    metrics = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert metrics["arguments"]["steps"] == 3
    assert metrics["flops"] == pytest.approx(3 * a_step, rel=1e-3)
    assert main([*words, "--resume"]) == 0, "a finished run stays as it is"
    for more, said in (
        ({**options, "flops": 0.9 * a_step}, "the FLOPs of 1 of its steps"),
        ({"flops": 1e9}, "not allowed with argument --steps"),
        ({"steps": None}, "--steps"),
        ({"steps": None, "flops": 1e9, "recipe": "multilingual"}, "whose FLOPs are not counted"),
    ):
        given = distilled(tmp_path / "no", bert / "model", **more)
        if more.get("recipe") == "multilingual":
            given += ["--translation", "-"]
        try:
            assert main(given) == 2
        except SystemExit as error:
            assert error.code == 2
        assert said in capsys.readouterr().err


@pytest.mark.slow
def test_electra_and_gpt2_runs(distilled, electra, run, tmp_path):
    out = tmp_path / "electra"
    files = {"recipe": "electra", "generator": electra / "generator"}
    assert main(distilled(out, electra / "discriminator", **files)) == 0
    loads_as("ElectraForPreTraining", out / "model")
    held_out = json.loads((out / "metrics.json").read_text())["held_out"]
    assert {"rtd_loss", "soft_loss", "hidden_loss", "replaced_recall"} <= held_out.keys()

    run(tmp_path / "gpt", arch="gpt2-tiny", vocab_size=300, steps=2)
    assert main(distilled(tmp_path / "distilgpt", tmp_path / "gpt" / "model")) == 0
    loads_as("GPT2LMHeadModel", tmp_path / "distilgpt" / "model")


@pytest.mark.slow
def test_a_multilingual_run(distilled, parallel, bert, tmp_path, capsys):
    out = tmp_path / "out"
    more = {**parallel, "recipe": "multilingual", "vocab_size": 100, "steps": 8}
    assert main(distilled(out, bert / "model", **more)) == 0
    assert "2 pairs of lines are left out" in capsys.readouterr().err
    metrics = json.loads((out / "metrics.json").read_text())
    for name in ("source_loss", "translation_loss"):
        assert metrics["history"][-1][name] < metrics["history"][0][name]
        assert 0 < metrics["held_out"][name]
    loads_as("BertModel", out / "model", add_pooling_layer=False)
    tokenizer = load_tokenizer(out / "model")
    assert len(tokenizer) == metrics["vocab_size"] <= 100
    assert tokenizer.tokenize("der zug") == ["der", "zug"]
    with torch.no_grad():
        model = fastplm.models.BertModel.from_pretrained(out / "model", add_pooling_layer=False)
        batch = tokenizer(["The river.", "Der Fluss."], padding=True, return_tensors="pt")
        vectors = sentence_vectors(model.eval(), batch["input_ids"], batch["attention_mask"])
    assert vectors.shape == (2, 128)


@pytest.mark.slow
def test_resumed_as_if_never_killed(distilled, bert, killed, curve, tmp_path):
    undisturbed, out = tmp_path / "one", tmp_path / "two"
    options = {"recipe": "tinybert", "student_hidden": 64, "steps": 5}
    assert main(distilled(undisturbed, bert / "model", **options)) == 0
    killed(distilled(out, bert / "model", **options), steps=3)
    assert not (out / "model").exists() and (out / "checkpoint-2").is_dir()
    assert main(distilled(out, bert / "model", **options, resume=True)) == 0
    assert curve(out) == curve(undisturbed)
    files = [folder / "model" / "model.safetensors" for folder in (undisturbed, out)]
    assert files[0].read_bytes() == files[1].read_bytes()
    # A finished run is not continued with another teacher, either.
    other = shutil.copytree(bert / "model", tmp_path / "teacher")
    weights = safetensors.torch.load_file(other / "model.safetensors")
    next(iter(weights.values())).add_(1)
    safetensors.torch.save_file(weights, other / "model.safetensors", {"format": "pt"})
    with pytest.raises(ArgumentValueError, match="`teacher` got files"):
        distill(DistillArguments(**vars_of(distilled(out, other, **options, resume=True))))


def vars_of(words: list[str]) -> dict:
    given = vars(_parser().parse_args(words))
    given.pop("command")
    return given


@pytest.mark.parametrize(
    "recipe",
    ["distilbert", "multilingual"]
    + [pytest.param(name, marks=pytest.mark.slow) for name in METHODS],
)
def test_accumulated_batches_are_one_large_batch(
    recipe, distilled, bert, electra, parallel, in_two_processes, tmp_path, request
):
    teacher, own = bert / "model", {}
    if recipe == "electra":
        teacher, own = electra / "discriminator", {"generator": electra / "generator"}
    elif recipe == "multilingual":
        own = {**parallel, "vocab_size": 100}
    elif recipe in ("tinybert", "minilm-v2"):
        own = {"student_hidden": 64}
    knows_samples = _extension.lacks("dropout_rows", "CPU") is None

    def losses(name: str, **options: object) -> list[float]:
        options = {"recipe": recipe, "steps": 2, **own, **options}
        assert main(distilled(tmp_path / name, teacher, **options)) == 0
        history = json.loads((tmp_path / name / "metrics.json").read_text())["history"]
        return [entry["loss"] for entry in history]

    rate = 0.1 if knows_samples else 0
    one = losses("one", batch_size=4, dropout=rate)
    two = losses("two", batch_size=2, gradient_accumulation=2, dropout=rate)
    assert two == pytest.approx(one, rel=1e-5)
    if request.node.get_closest_marker("slow"):
        options = {"recipe": recipe, "steps": 2, **own, "batch_size": 2, "dropout": rate}
        in_two_processes(distilled(tmp_path / "processes", teacher, **options))
        history = json.loads((tmp_path / "processes" / "metrics.json").read_text())["history"]
        assert [entry["loss"] for entry in history] == pytest.approx(one, rel=1e-5)
    if knows_samples:
        assert losses("other", batch_size=4, dropout=0.11)[0] != pytest.approx(one[0], rel=1e-5)


def test_without_a_teacher_only_the_labels_count(distilled, bert, tmp_path):
    out = tmp_path / "out"
    weights = {"soft_weight": 0, "hidden_weight": 0, "hard_weight": 1}
    assert main(distilled(out, bert / "model", **weights)) == 0
    for entry in json.loads((out / "metrics.json").read_text())["history"]:
        assert entry["loss"] == pytest.approx(entry["mlm_loss"], rel=1e-6)
        assert "hidden_loss" not in entry


@pytest.fixture(scope="module")
def places(bert, electra, word_tokenizer, tmp_path_factory):
    """Folders of models that fit and that do not."""
    folder = tmp_path_factory.mktemp("models")
    headless, other, causal = (folder / name for name in ("headless", "other", "causal"))
    shutil.copytree(bert / "model", causal)
    config = json.loads((causal / "config.json").read_text()) | {"is_decoder": True}
    (causal / "config.json").write_text(json.dumps(config))
    shutil.copytree(bert / "model", other)
    word_tokenizer(["[PAD]", "a"], pad_token="[PAD]").save_pretrained(other)
    transformers.BertModel.from_pretrained(bert / "model").save_pretrained(headless)
    load_tokenizer(bert / "model").save_pretrained(headless)
    models = {"teacher": bert / "model", "run": bert, "generator": electra / "generator"}
    return {**models, "headless": headless, "other words": other, "causal": causal}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"student_layers": 3}, ["`student_layers` got 3", "1 to 2, the layers of the teacher"]),
        (
            {"student_layers": None, "student": "other words"},
            ["`student` got", "the vocabulary of the teacher"],
        ),
        ({"teacher": "run"}, ["`teacher` got", "the folder of a run"]),
        ({"teacher": "headless"}, ["`teacher` got", "lacks", "cls.predictions", "need no head"]),
        ({"recipe": "electra", "generator": "generator"}, ["`teacher` got", "family bert"]),
        ({"teacher": "causal"}, ["`teacher` got", "which reads from left to right"]),
        ({"recipe": "minilm", "teacher": "causal"}, ["`teacher` got", "from left to right"]),
        (
            {"recipe": "minilm", "student_hidden": 96, "student_heads": 3},
            ["3 attention heads", "minilm-v2"],
        ),
        (
            {"recipe": "minilm-v2", "relation_heads": 3},
            ["`relation_heads` got 3", "a divisor of both"],
        ),
        ({"recipe": "minilm-v2", "teacher_layer": 9}, ["`teacher_layer` got 9", "1 to 2"]),
        ({"block_size": 600}, ["`block_size` got 600", "at most 512"]),
        ({"student_hidden": 63}, ["`student_hidden` got 63", "a multiple of the 2"]),
    ],
    ids=lambda value: None if isinstance(value, list) else "-".join(map(str, value)),
)
def test_errors_of_one_line(options, said, distilled, places, tmp_path, refused):
    given = {name: places.get(value, value) for name, value in options.items()}
    teacher = given.pop("teacher", places["teacher"])
    refused(distilled(tmp_path / "out", teacher, **given), *said)
    assert not (tmp_path / "out").exists()
