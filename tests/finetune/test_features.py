"""Frozen encoders, and heads that read more of an encoder than Transformers' classes do."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from fastplm.data import train_tokenizer
from fastplm.errors import ArgumentValueError
from fastplm.finetune import frozen
from fastplm.finetune import run as module
from fastplm.finetune.features import (
    FeaturesConfig,
    FeaturesForSequenceClassification,
    FeaturesForTokenClassification,
    ScalarMix,
    pooled,
)
from fastplm.finetune.run import FeatureDataset, build_model, finetune, make_trainer, prepare_task
from fastplm.finetune.settings import LIBRARIES, FinetuneArguments
from fastplm.finetune.tasks import predict
from fastplm.testing import FORWARD_FACTOR, check_error

NOUNS = "river house teacher garden train letter window forest engine island".split()
COUNT = 24
SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}


def text(i: int) -> str:
    return " ".join(NOUNS[(i * 3 + j) % 10] for j in range(2 + i % 5))


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> dict[str, Path]:
    """Tiny encoders without a head; "new" has no weights for its pooler."""
    folder = tmp_path_factory.mktemp("checkpoints")
    tokenizer = train_tokenizer([text(i) for i in range(COUNT)], 60, folder / "cache")
    torch.manual_seed(0)
    sizes = {**SIZES, "vocab_size": len(tokenizer)}
    models = {
        "bert": transformers.BertModel(transformers.BertConfig(**sizes)),
        "new": transformers.BertForMaskedLM(transformers.BertConfig(**sizes)),
        "albert": transformers.AlbertForMaskedLM(
            transformers.AlbertConfig(embedding_size=16, **sizes)
        ),
        "electra": transformers.ElectraModel(
            transformers.ElectraConfig(embedding_size=16, **sizes)
        ),
    }
    for name, model in models.items():
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return {name: folder / name for name in models}


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("files")
    rows = [f"{text(i)}\t{'even' if i % 2 else 'odd'}" for i in range(COUNT)]
    scored = [f"{text(i)}\t{text(i + 1)}\t{i / 8}" for i in range(COUNT)]
    tagged = ["\n".join(f"{word}\t{word[0]}" for word in text(i).split()) for i in range(COUNT)]
    contents = {
        "classification": "\n".join(("text\tlabel", *rows)),
        "regression": "\n".join(("text1\ttext2\tscore", *scored)),
        "tagging": "\n\n".join(tagged),
    }
    for task, content in contents.items():
        (folder / task).write_text(content)
    return {task: folder / task for task in contents}


@pytest.fixture
def arguments(checkpoints, files, tmp_path):
    def build(task: str, model: str = "bert", out: str = "out", **options) -> FinetuneArguments:
        settings = {
            "model": checkpoints[model],
            "data": files[task],
            "eval_data": shutil.copy(files[task], tmp_path / f"eval-{task}"),
            "out": tmp_path / out,
            "batch_size": 4,
            "steps": 8,
            "log_every": 1,
            "learning_rate": 1e-2,
            **options,
        }
        return FinetuneArguments(task=task, **settings).plan()

    return build


def trained(args: FinetuneArguments, kept: dict | None = None) -> tuple:
    """The losses of a run in fp64, and its trainer."""
    task = prepare_task(args)
    features = FeatureDataset(task.features(task.train)[0])
    model = build_model(args, task, 3, kept).double()
    trainer = make_trainer(args, task, model, features, 3, Path(args.out))
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return torch.tensor(losses, dtype=torch.float64), trainer


# --- heads ----------------------------------------------------------------------------------------


def test_pooling_by_hand():
    states = torch.tensor([[[1.0, -9.0], [3.0, -5.0], [50.0, 50.0]], [[2.0, 4.0]] * 3])
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    assert pooled(states, mask, "cls").tolist() == [[1, -9], [2, 4]]
    assert pooled(states, mask, "mean").tolist() == [[2, -7], [2, 4]]
    assert pooled(states, mask, "max").tolist() == [[3, -5], [2, 4]]
    assert pooled(states, mask, "last").tolist() == [[3, -5], [2, 4]]


def test_a_scalar_mix_by_hand():
    mix = ScalarMix(2)
    states = (torch.tensor([1.0]), torch.tensor([5.0]))
    assert mix(states).item() == 3
    with torch.no_grad():
        mix.weight.copy_(torch.tensor([3.0, 1.0]).log())
        mix.gamma.fill_(10)
    torch.testing.assert_close(mix(states), torch.tensor([20.0]))  # 10 (3/4 * 1 + 1/4 * 5)


@pytest.mark.parametrize("family", ["bert", "albert", "electra"])
def test_what_the_head_reads(family, checkpoints):
    """The features are the states of Transformers' encoder, with any padding."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoints[family])
    theirs = transformers.AutoModel.from_pretrained(checkpoints[family]).double().eval()
    batch = tokenizer([text(1), text(4)], padding=True, return_tensors="pt")
    states = theirs(**batch, output_hidden_states=True).hidden_states
    expected = {
        "last": states[-1],
        "last-four": torch.cat(states[1:], -1),
        "mix": sum(states) / 5,
    }
    for features, gold in expected.items():
        config = FeaturesConfig(
            encoder=theirs.config.to_dict(), features=features, dropout=0.0, num_labels=3
        )
        model = FeaturesForTokenClassification(config).double().eval()
        weights = {n: w for n, w in theirs.state_dict().items() if "pooler." not in n}
        model.encoder.load_state_dict(weights)
        assert type(model.encoder).__module__.startswith("fastplm.")
        kept = batch["attention_mask"].bool()
        logits = model(**batch).logits[kept]
        torch.testing.assert_close(logits, model.classifier(gold[kept]))


def test_an_lstm_sees_no_padding(checkpoints):
    encoder = transformers.BertConfig.from_pretrained(checkpoints["bert"])
    config = FeaturesConfig(encoder=encoder.to_dict(), head="bilstm", pooling="max", num_labels=2)
    torch.manual_seed(0)
    model = FeaturesForSequenceClassification(config).double().eval()
    ids = torch.randint(5, 40, (1, 7))
    padded = torch.nn.functional.pad(ids, (0, 4), value=9)
    mask = torch.arange(11)[None] < 7
    torch.testing.assert_close(model(padded, mask).logits, model(ids).logits)
    assert model.lstm.num_layers == 2 and model.lstm.bidirectional
    assert model.classifier.in_features == 32


@pytest.mark.slow
@pytest.mark.parametrize(
    "task, options",
    [
        ("classification", {"pooling": "mean"}),
        ("classification", {"features": "mix", "head": "bilstm", "freeze": True}),
        pytest.param(
            "tagging",
            {"features": "last-four", "head": "bilstm", "freeze": True},
            marks=pytest.mark.slow,
        ),
        pytest.param("regression", {"pooling": "max"}, marks=pytest.mark.slow),
        pytest.param("tagging", {"features": "mix"}, marks=pytest.mark.slow),
    ],
)
def test_a_run_with_such_a_head_loads_again(task, options, arguments):
    args = arguments(task, **options)
    metrics = finetune(args)
    assert all(metrics["arguments"][name] == value for name, value in options.items())
    path = metrics["seeds"][0]["model"]
    tokens = task == "tagging"
    kind = FeaturesForTokenClassification if tokens else FeaturesForSequenceClassification
    model, loading = kind.from_pretrained(path, output_loading_info=True)
    assert not loading["missing_keys"] and not loading["unexpected_keys"]
    prepared = prepare_task(args)
    features, notes = prepared.features(prepared.test)
    trainer = make_trainer(args, prepared, model, FeatureDataset(features), 0, Path(args.out))
    scores, predictions = prepared.evaluate(trainer)
    assert scores == pytest.approx(metrics["seeds"][0]["scores"], abs=1e-5)
    written = json.loads((Path(path).parent / "predictions.json").read_text())["predictions"]
    if task == "classification":
        assert [each["prediction"] for each in written] == predictions
        assert model.config.id2label == {0: "even", 1: "odd"}


# --- frozen ---------------------------------------------------------------------------------------


def calls_of(monkeypatch) -> list[int]:
    """A list to which each forward of an encoder adds its number of texts."""
    calls: list[int] = []
    forward = transformers.BertModel.forward

    def counted(self, input_ids=None, **inputs):
        given = inputs["attention_mask"] if input_ids is None else input_ids
        calls.append(given.shape[0])
        return forward(self, input_ids, **inputs)

    monkeypatch.setattr(transformers.BertModel, "forward", counted)
    return calls


@pytest.mark.slow
@pytest.mark.parametrize(
    "task, options", [("classification", {}), ("tagging", {"features": "mix"})]
)
def test_each_example_is_computed_once(task, options, arguments, monkeypatch):
    """No epoch or seed computes an example twice. The encoder's weights stay, the head's change."""
    args = arguments(task, freeze=True, library="transformers", steps=20, seeds=2, **options)
    calls = calls_of(monkeypatch)
    metrics = finetune(args)
    # The examples to train on are also those to score, and some of them are equal.
    assert sum(calls) <= COUNT
    before = transformers.AutoModel.from_pretrained(args.model).state_dict()
    heads = []
    for run in metrics["seeds"]:
        state = load_file(Path(run["model"]) / "model.safetensors")
        for name, value in before.items():
            for prefix in ("bert.", "encoder."):
                if prefix + name in state:
                    assert torch.equal(state[prefix + name], value)
                    break
            else:
                assert "pooler." in name and options
        heads.append(state["classifier.weight"])
        losses = [entry["loss"] for entry in run["history"]]
        assert losses[-1] < losses[0]
    assert not torch.equal(*heads)


@pytest.mark.slow
@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize(
    "task, options",
    [
        ("regression", {}),
        ("tagging", {"features": "last-four"}),
        pytest.param(
            "classification", {"pooling": "cls", "model": "albert"}, marks=pytest.mark.slow
        ),
        pytest.param("tagging", {}, marks=pytest.mark.slow),
        pytest.param("classification", {"head": "bilstm"}, marks=pytest.mark.slow),
        pytest.param("classification", {"model": "electra"}, marks=pytest.mark.slow),
    ],
)
def test_what_is_remembered_changes_no_loss(task, options, library, arguments, monkeypatch):
    """Remembered states change no loss, nor does the library, nor an encoder without gradients."""
    args = arguments(task, freeze=True, dropout=0.0, library=library, **options)
    losses, _ = trained(args)  # this run remembers nothing
    kept: dict = {}
    task_ = prepare_task(args)
    features = FeatureDataset(task_.features(task_.train)[0])
    model = build_model(args, task_, 3, kept).double()
    trainer = make_trainer(args, task_, model, features, 3, Path(args.out))
    module._compute_once(trainer, model.frozen, features)
    assert len(kept) == len({tuple(feature["input_ids"]) for feature in features})
    trainer.train()
    again = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    # The remembered states are fp32.
    torch.testing.assert_close(torch.tensor(again).double(), losses, rtol=1e-5, atol=1e-6)
    other = arguments(task, freeze=True, dropout=0.0, library=LIBRARIES[0], **options)
    theirs, _ = trained(other)
    check_error("losses", losses.float(), theirs, [theirs.float()], FORWARD_FACTOR)


@pytest.mark.slow
def test_a_new_pooler_is_trained(arguments):
    for model, name in (("new", "bert.pooler.dense.weight"), ("albert", "albert.pooler.weight")):
        for library in LIBRARIES:
            args = arguments("classification", model, freeze=True, library=library, steps=6)
            task = prepare_task(args)
            before = build_model(args, task, 3).state_dict()[name].clone()
            _, trainer = trained(args)
            learned = [n for n, p in trainer.model.named_parameters() if p.requires_grad]
            assert name in learned and len([n for n in learned if "encoder" in n]) == 0
            assert not torch.equal(trainer.model.state_dict()[name].float(), before)
    model = build_model(arguments("classification", freeze=True), task, 3)
    assert not any(p.requires_grad for n, p in model.named_parameters() if "pooler" in n)


def test_too_many_states_are_not_kept(arguments, monkeypatch):
    monkeypatch.setattr(frozen, "MOST_BYTES", 100)
    args = arguments("classification", freeze=True)
    task = prepare_task(args)
    features = FeatureDataset(task.features(task.train)[0])
    model = build_model(args, task, 3, features.kept)
    trainer = make_trainer(args, task, model, features, 3, Path(args.out))
    module._compute_once(trainer, model.frozen, features)
    assert not features.kept
    found = predict(trainer, task, features.features)
    assert len(found) == COUNT


@pytest.mark.slow
def test_resume_of_a_frozen_run(arguments, monkeypatch):
    options = {"freeze": True, "features": "mix", "head": "bilstm", "steps": 20}
    whole = finetune(arguments("tagging", out="whole", **options))
    step = module.FinetuningTrainer.training_step
    calls = []

    def killed(self, *args, **kwargs):
        calls.append(0)
        if len(calls) == 14:
            raise KeyboardInterrupt
        return step(self, *args, **kwargs)

    monkeypatch.setattr(module.FinetuningTrainer, "training_step", killed)
    with pytest.raises(KeyboardInterrupt):
        finetune(arguments("tagging", out="parts", save_every=8, **options))
    parts = finetune(arguments("tagging", out="parts", save_every=8, resume=True, **options))
    assert len(calls) == 14 + 12
    for entry in ("loss", "scores"):
        assert whole["seeds"][0][entry] == parts["seeds"][0][entry]


# --- what is refused ------------------------------------------------------------------------------


def test_wrong_settings(arguments, files):
    with pytest.raises(ArgumentValueError, match="`from_scratch` got True with --freeze"):
        arguments("classification", freeze=True, from_scratch=True)
    with pytest.raises(ArgumentValueError, match="`pooling` got max with --task tagging"):
        arguments("tagging", pooling="max")
    for name, value in {"features": "mix", "head": "bilstm"}.items():
        with pytest.raises(ArgumentValueError, match=f"`{name}` got {value} with --task qa"):
            FinetuneArguments(task="qa", model="m", data="d", out="o", **{name: value})
    with pytest.raises(ArgumentValueError, match="features` got 'first'"):
        arguments("tagging", features="first")


def test_gpt_is_refused(arguments, checkpoints, tmp_path):
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoints["bert"])
    tokenizer.save_pretrained(tmp_path)
    transformers.GPT2Config(vocab_size=len(tokenizer), n_layer=1).save_pretrained(tmp_path)
    for name, value in {"freeze": True, "pooling": "mean", "head": "bilstm"}.items():
        args = arguments("classification", **{name: value})
        args = args.changed(model=tmp_path)
        with pytest.raises(ArgumentValueError, match=f"`{name}` got .*gpt2; expected an encoder"):
            prepare_task(args)
