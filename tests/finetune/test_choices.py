"""Rates chosen on held-out examples, rates by layer, and pairs of running text as tasks."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
import transformers

from fastplm import cli
from fastplm.data import train_tokenizer
from fastplm.errors import ArgumentValueError, DataError, DivergenceError
from fastplm.finetune import run as module
from fastplm.finetune.layers import layer_depths
from fastplm.finetune.pairs import NAMES, read_segments
from fastplm.finetune.run import (
    FeatureDataset,
    FinetuneArguments,
    build_model,
    finetune,
    make_trainer,
    prepare_task,
    summary,
)

NOUNS = "river house teacher garden train letter window forest engine island".split()
COUNT = 60
SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
}
GPT = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}


def sentence(i: int) -> str:
    return f"the {NOUNS[i % 10]} saw the {NOUNS[(i * 3 + 1) % 10]}"


def documents(count: int, least: int = 4) -> list[str]:
    """Documents of sentences that no other sentence of them is equal to."""
    return [
        " ".join(f"{sentence(i + j)} {i} {j}." for j in range(least + i % 7)) for i in range(count)
    ]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> dict[str, Path]:
    """Tiny models with a tokenizer."""
    folder = tmp_path_factory.mktemp("checkpoints")
    tokenizer = train_tokenizer(documents(COUNT), 70, folder / "cache")
    sizes = {**SIZES, "vocab_size": len(tokenizer)}
    small = {"embedding_size": 16, **sizes}
    torch.manual_seed(0)
    models = {
        "bert": transformers.BertForPreTraining(transformers.BertConfig(**sizes)),
        "roberta": transformers.RobertaModel(
            transformers.RobertaConfig(**sizes | {"max_position_embeddings": 68})
        ),
        "electra": transformers.ElectraModel(transformers.ElectraConfig(**small)),
        "albert": transformers.AlbertForPreTraining(transformers.AlbertConfig(**small)),
        "gpt2": transformers.GPT2Model(
            transformers.GPT2Config(vocab_size=len(tokenizer), pad_token_id=0, **GPT)
        ),
    }
    for name, model in models.items():
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return {name: folder / name for name in models}


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("files")
    for name, first in (("train", 0), ("test", 7)):
        rows = (f"{sentence(i)}{' saw' * (i % 3)}\t{i % 2}" for i in range(first, first + COUNT))
        (folder / name).write_text("\n".join(("text\tlabel", *rows)))
    (folder / "text").write_text("\n\n".join(documents(40)))
    return {path.name: path for path in folder.iterdir()}


@pytest.fixture
def arguments(checkpoints, files, tmp_path):
    def build(model: str = "bert", out: str = "out", **options) -> FinetuneArguments:
        settings = {
            "task": "classification",
            "model": checkpoints[model],
            "data": files["train"],
            "eval_data": files["test"],
            "out": tmp_path / out,
            "batch_size": 8,
            "steps": 2,
            "log_every": 1,
            **options,
        }
        if settings["task"] in NAMES:
            settings |= {"data": files["text"], "eval_data": None, "max_length": 32}
        if settings.get("own_head"):
            del settings["steps"]
        return FinetuneArguments(**settings).plan()

    return build


# --- the learning rate ----------------------------------------------------------------------------


def test_the_best_rate_of_a_list_trains_all_seeds(arguments, files, tmp_path, monkeypatch, capsys):
    """The run is killed at the second rate and resumed. The test file chooses nothing."""
    scores = {1e-4: 0.5, 1e-3: 0.75, 1e-2: 0.25}
    run, seen = module._run, []

    def scored(args, task, features, seed, out, *rest, **options):
        on = {example.where.rpartition(":")[0] for example in task.test}
        seen.append((args.learning_rate, seed, on, len(task.train), len(task.test)))
        if len(seen) == 2:
            raise KeyboardInterrupt
        return run(args, task, features, seed, out, *rest, **options)

    evaluate = module.Task.evaluate

    def chosen(self, trainer):
        found, predictions = evaluate(self, trainer)
        if len(self.train) < COUNT:
            found["accuracy"] = scores[trainer.args.learning_rate]
        return found, predictions

    monkeypatch.setattr(module.Task, "evaluate", chosen)
    monkeypatch.setattr(module, "_run", scored)
    options = {"learning_rate": [1e-4, 1e-3, 1e-2], "seeds": 2}
    with pytest.raises(KeyboardInterrupt):
        finetune(arguments(**options))
    with pytest.raises(DataError, match="continue that run with --resume"):
        finetune(arguments(**options))
    metrics = finetune(arguments(resume=True, **options), print)
    train, test = str(files["train"]), str(files["test"])
    held = COUNT // 10
    assert seen == [
        *((rate, 0, {train}, COUNT - held, held) for rate in (1e-4, 1e-3, 1e-3, 1e-2)),
        *((1e-3, seed, {test}, COUNT, COUNT) for seed in (0, 1)),
    ]
    choice = metrics["learning_rate_choice"]
    assert choice["learning_rate"] == 1e-3 and choice["score"] == "accuracy"
    assert (choice["train_examples"], choice["eval_examples"]) == (COUNT - held, held)
    assert [each["scores"]["accuracy"] for each in choice["rates"]] == [*scores.values()]
    assert [each["learning_rate"] for each in metrics["seeds"]] == [1e-3, 1e-3]
    assert metrics["arguments"]["learning_rate"] == [*scores]
    shown = capsys.readouterr().out.splitlines()
    assert shown[3] == "learning rate 0.001 is taken, by its accuracy on held-out examples"
    assert [line.split(":")[0] for line in shown[4:6]] == ["seed 0", "seed 1"]
    out = tmp_path / "out"
    # No model of a rate is kept, and the seeds are those of a run with this rate alone.
    assert {path.parent.name for path in out.rglob("model")} == {"seed-0", "seed-1"}
    predictions = json.loads((out / "rate-0.01" / "seed-0" / "predictions.json").read_text())
    assert predictions["file"] == train and len(predictions["predictions"]) == held
    monkeypatch.setattr(module, "_run", run)
    alone = finetune(arguments(out="alone", learning_rate=1e-3, seeds=2))
    assert [s["loss"] for s in alone["seeds"]] == [s["loss"] for s in metrics["seeds"]]
    assert alone["scores"] == metrics["scores"]


def test_a_rate_that_diverges_is_not_chosen(arguments, monkeypatch, capsys):
    run = module._run

    def diverges(args, *rest, **options):
        if args.learning_rate > least:
            raise DivergenceError("At step 1 the loss is not finite.")
        return run(args, *rest, **options)

    monkeypatch.setattr(module, "_run", diverges)
    least = 1e-4
    words = {"learning_rate": [1.0, 1e-4], "steps": 1}
    choice = finetune(arguments(**words), print)["learning_rate_choice"]
    assert choice["learning_rate"] == 1e-4 and choice["rates"][0]["scores"] is None
    said = capsys.readouterr()
    assert "learning rate 1, seed 0, on held-out examples: it diverged" in said.out
    assert "It is the lowest of the rates" in said.err
    again = finetune(arguments(resume=True, **words))  # the one that diverged is not tried again
    assert again["learning_rate_choice"] == choice
    least = 0.0
    with pytest.raises(DivergenceError, match="At each rate: At step 1"):
        finetune(arguments(out="other", **words))


@pytest.mark.slow
def test_rates_on_the_command_line(checkpoints, files, tmp_path, capsys):
    words = f"finetune --task classification --model {checkpoints['bert']} --steps 1 "
    words += f"--data {files['train']} --batch-size 8 --out"
    options = ["--learning-rate", "1e-4,2e-4"]
    assert cli.main([*words.split(), str(tmp_path / "a"), *options]) == 0
    shown = capsys.readouterr()
    assert "the best of 0.0001, 0.0002 on 5 of the examples to train on" in shown.err
    settings = tmp_path / "a" / "settings.yaml"
    assert cli.main([*words.split(), str(tmp_path / "b"), "--config", str(settings)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == shown.out.splitlines()[-1]


def test_rates_that_are_refused(arguments, tmp_path):
    for wrong in ([1e-4, 1e-4], [1e-4, 0.0], [1e-4]):
        with pytest.raises(ArgumentValueError, match="`learning_rate` got"):
            arguments(learning_rate=wrong)
    with pytest.raises(ArgumentValueError, match="with --max-samples .* expected one rate"):
        arguments(learning_rate=[1e-4, 1e-3], max_samples=[10, 20])
    few = tmp_path / "few.tsv"
    few.write_text("text\tlabel\na\t0\nb\t1\n")
    with pytest.raises(DataError, match="Give one --learning-rate."):
        finetune(arguments(data=few, learning_rate=[1e-4, 1e-3]))


# --- the rate of each layer -----------------------------------------------------------------------

#: With two layers and a decay of 0.5: a weight of each part, and its share of the rate.
RATES = {
    "bert": {
        "bert.embeddings.word_embeddings.weight": 1 / 16,
        "bert.embeddings.LayerNorm.bias": 1 / 16,
        "bert.encoder.layer.0.attention.self.query.weight": 1 / 8,
        "bert.encoder.layer.1.output.dense.bias": 1 / 4,
        "bert.pooler.dense.weight": 1 / 2,
        "classifier.weight": 1,
    },
    "roberta": {
        "roberta.embeddings.position_embeddings.weight": 1 / 16,
        "roberta.encoder.layer.0.output.LayerNorm.weight": 1 / 8,
        "roberta.encoder.layer.1.intermediate.dense.weight": 1 / 4,
        "classifier.dense.weight": 1,
        "classifier.out_proj.bias": 1,
    },
    "electra": {
        "electra.embeddings.token_type_embeddings.weight": 1 / 16,
        "electra.embeddings_project.weight": 1 / 16,
        "electra.encoder.layer.0.attention.output.dense.weight": 1 / 8,
        "electra.encoder.layer.1.attention.output.dense.weight": 1 / 4,
        "classifier.dense.weight": 1,
        "classifier.out_proj.weight": 1,
    },
    "gpt2": {
        "transformer.wte.weight": 1 / 16,
        "transformer.wpe.weight": 1 / 16,
        "transformer.h.0.attn.c_attn.weight": 1 / 8,
        "transformer.h.1.mlp.c_proj.bias": 1 / 4,
        "transformer.ln_f.weight": 1 / 2,
        "score.weight": 1,
    },
}


@pytest.mark.parametrize(
    "model, library", [*((model, "fastplm") for model in RATES), ("bert", "transformers")]
)
def test_rates_by_layer(model, library, arguments, tmp_path):
    args = arguments(model, layer_decay=0.5, library=library, learning_rate=0.02, warmup=0)
    task = prepare_task(args)
    features = FeatureDataset(task.features(task.train)[0])
    trainer = make_trainer(args, task, build_model(args, task, 0), features, 0, tmp_path)
    trainer.train()
    names = {id(weight): name for name, weight in trainer.model.named_parameters()}
    groups = trainer.optimizer.param_groups
    found = {names[id(w)]: group["initial_lr"] for group in groups for w in group["params"]}
    assert found.keys() == {*names.values()}
    assert {name: found[name] / 0.02 for name in RATES[model]} == pytest.approx(RATES[model])
    decays = {names[id(w)]: group["weight_decay"] for group in groups for w in group["params"]}
    assert {decays[name] for name in names.values() if name.endswith("bias")} == {0.0}
    # What is logged is the rate of the head; all fall to 0 together.
    rates = [e["learning_rate"] for e in trainer.state.log_history if "loss" in e]
    assert rates == [0.02, 0.01]
    assert [group["lr"] for group in groups] == [0.0] * len(groups)


def test_a_run_with_rates_by_layer(arguments):
    """Without a decay nothing changes, and a feature-based head is above all layers."""
    plain = finetune(arguments(out="plain"))["seeds"][0]
    one = finetune(arguments(out="one", layer_decay=1.0))["seeds"][0]
    less = finetune(arguments(out="less", layer_decay=0.5))["seeds"][0]
    losses = [[entry["loss"] for entry in run["history"]] for run in (plain, one, less)]
    assert losses[0] == losses[1] != losses[2] and losses[0][0] == losses[2][0]
    args = arguments(features="mix", pooling="mean", layer_decay=0.5)
    depths = layer_depths(build_model(args, prepare_task(args), 0))
    assert depths["mix.weight"] == depths["classifier.weight"] == 4
    assert depths["encoder.encoder.layer.1.output.dense.weight"] == 2
    with pytest.raises(ArgumentValueError, match="`layer_decay` got 0.5 with .*, a albert; expect"):
        prepare_task(arguments("albert", layer_decay=0.5))
    for wrong in (0.0, 1.1):
        with pytest.raises(ArgumentValueError, match="`layer_decay` got"):
            arguments(layer_decay=wrong)
    with pytest.raises(
        ArgumentValueError, match="`layer_decay` got 0.5 with --freeze; expected no"
    ):
        arguments(layer_decay=0.5, freeze=True)


# --- pairs of running text ------------------------------------------------------------------------


@pytest.mark.parametrize("task", NAMES)
def test_pairs_of_text(task, arguments, files):
    """Classes are balanced, and each label is right; all models get the same pairs."""
    prepared = prepare_task(arguments(task=task))
    assert prepared.names == list(NAMES[task])
    texts = [" ".join(document.split()) for document in documents(40)]
    others = prepare_task(arguments("gpt2", task=task))
    for examples, same in ((prepared.train, others.train), (prepared.test, others.test)):
        assert examples == same
        labels = [prepared.right(example) for example in examples]
        assert labels.count(NAMES[task][1]) == len(labels) // 2 > 2
        for example, label in zip(examples, labels, strict=True):
            own = texts[int(re.match(r"document (\d+),", example.place)[1]) - 1]
            first, second = example.texts
            follows = f"{first} {second}" in own
            assert follows == (label == NAMES[task][0])
            if not follows and task == "sop":
                assert f"{second} {first}" in own
            elif not follows:
                assert first in own and second not in own
                assert any(second in text for text in texts)
    groups = [{example.group for example in part} for part in (prepared.train, prepared.test)]
    assert not groups[0] & groups[1]


def test_a_probe_of_pairs(arguments, tmp_path):
    metrics = finetune(arguments(task="sop", freeze=True, pooling="mean"), print)
    assert metrics["scores"].keys() == {"accuracy"} and metrics["main_score"] == "accuracy"
    records = json.loads((tmp_path / "out" / "seed-0" / "predictions.json").read_text())
    assert {record["label"] for record in records["predictions"]} == {"in order", "swapped"}
    assert re.fullmatch(r"document \d+, pair \d+", records["predictions"][0]["id"])


@pytest.mark.parametrize("task", NAMES)
@pytest.mark.parametrize("model", ["bert", "albert"])
def test_the_head_of_a_pre_training(model, task, arguments, checkpoints, tmp_path):
    """The predictions are those of Transformers' class, and nothing is trained or copied."""
    metrics = finetune(arguments(model, task=task, own_head=True), print)
    folder = tmp_path / "out" / "seed-0"
    records = json.loads((folder / "predictions.json").read_text())["predictions"]
    loaded = transformers.AutoModelForPreTraining.from_pretrained(checkpoints[model]).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoints[model])
    name = {"bert": "seq_relationship_logits", "albert": "sop_logits"}[model]
    right = 0
    for record in records:
        batch = tokenizer(*record["texts"], truncation=True, max_length=32, return_tensors="pt")
        with torch.no_grad():
            answer = NAMES[task][int(loaded(**batch)[name].argmax())]
        assert answer == record["prediction"]
        right += answer == record["label"]
    (result,) = metrics["seeds"]
    assert result["scores"] == {"accuracy": right / len(records)}
    assert result["steps"] == 0 and not (folder / "model").exists()
    assert len(records) == len(read_segments(task, arguments(task=task).data, 16))
    assert summary(metrics).startswith(f"accuracy {right / len(records):.4f}")


def test_pairs_that_are_refused(arguments, checkpoints, tmp_path):
    one = tmp_path / "one.txt"
    one.write_text(documents(1, least=9)[0])
    args = arguments(task="nsp", own_head=True)
    args = args.changed(data=one)
    with pytest.raises(DataError, match="pairs of one document alone .*expected two documents"):
        prepare_task(args)
    one.write_text("a sentence\n\nanother\n\nand a third\n")
    with pytest.raises(DataError, match="no document of two sentences"):
        prepare_task(args)
    with pytest.raises(
        ArgumentValueError, match="`own_head` got True with .*, a electra; expected"
    ):
        prepare_task(arguments("electra", task="sop", own_head=True))
    with pytest.raises(ArgumentValueError, match="`own_head` got True with --task classification"):
        arguments(own_head=True)
    with pytest.raises(
        ArgumentValueError, match="`own_head` got True with --seeds 2; expected one"
    ):
        arguments(task="sop", own_head=True, seeds=2)
    headless = tmp_path / "headless"
    transformers.BertModel.from_pretrained(checkpoints["bert"]).save_pretrained(headless)
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoints["bert"])
    tokenizer.save_pretrained(headless)
    args = arguments(task="sop", own_head=True)
    args = args.changed(model=headless)
    with pytest.raises(DataError, match=r"lacks \d+ weights of a BertForPreTraining"):
        finetune(args)
