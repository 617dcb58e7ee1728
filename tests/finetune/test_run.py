"""Fine-tuning, end to end on tiny models: from files to scores, resumed, killed and in parts."""

from __future__ import annotations

import importlib.machinery
import json
import re
import runpy
import sys
import types
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fastplm import _machine, cli
from fastplm.data.examples import Example
from fastplm.errors import ArgumentValueError, DataError, DivergenceError
from fastplm.finetune import run as module
from fastplm.finetune.data import prepare_task
from fastplm.finetune.models import DELIMITER, EXTRACT, START
from fastplm.finetune.report import summary
from fastplm.finetune.run import finetune
from fastplm.finetune.settings import FinetuneArguments
from fastplm.finetune.tasks import task_class
from fastplm.finetune.tasks._task import Task
from fastplm.finetune.tasks.classification import Classification
from fastplm.finetune.tasks.tagging import Tagging
from fastplm.finetune.trainer import FinetuningTrainer
from fastplm.run.folder import read_hashed, write_hashed

from .conftest import COUNT, FILES, LETTERS, copied, needs_csrc, sentence

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("task", FILES)
def test_from_file_to_score(task, arguments, files, tmp_path, capsys):
    out, model = tmp_path / "out", arguments(task).model
    words = f"finetune --task {task} --model {model} --data {files[task]} --out {out} "
    words += "--steps 2 --batch-size 8 --seeds 2 --learning-rate 1e-3 --max-samples 30"
    assert cli.main(words.split()) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines[:2]] == ["seed 0", "seed 1"]
    assert "95 % interval of 2 seeds" in lines[2]
    metrics = json.loads((out / "metrics.json").read_text())
    assert lines[2] == summary(metrics)
    assert metrics["train_examples"] == 30 and len(metrics["seeds"]) == 2
    auto = getattr(transformers, task_class(task).auto)
    for result in metrics["seeds"]:
        assert result["steps"] == 2 and result["tokens_per_second"] > 0
        _, loading = auto.from_pretrained(result["model"], output_loading_info=True)
        assert not loading["missing_keys"] and not loading["unexpected_keys"]
    transformers.AutoTokenizer.from_pretrained(result["model"])
    check_predictions(task, files[task], out, prepare_task(arguments(task)).test)


def check_predictions(task: str, path: Path, out: Path, examples: list[Example]) -> None:
    """Each prediction of a run leads back to its line of the file."""
    text = (out / "seed-0" / "predictions.json").read_text(encoding="utf-8")
    found = json.loads(text)
    assert found["file"] == str(path)
    records = found["predictions"]
    assert len(records) == COUNT // 10 == text.count("\n") - 3
    lines = path.read_text(encoding="utf-8-sig").splitlines()
    for record, example in zip(records, examples, strict=True):
        assert record["texts"] == list(example.texts)
        assert type(record["prediction"]) is type(record["label"])
        if task == "qa":
            assert record["label"] == [words for _, words in example.target]
            assert f"question {record['id']}" in example.where
            continue
        begin = record["line"] - 1
        if task == "choice":
            assert str(record["texts"][0]) in lines[begin] and record["label"] == example.target
        elif task == "tagging":
            tagged = list(map("\t".join, zip(record["texts"], record["label"], strict=True)))
            assert lines[begin : begin + len(tagged)] == tagged
        else:
            values = set(re.split("[\t,]", lines[begin].replace('"', "")))
            assert values == {*record["texts"], str(record["label"])}


@pytest.mark.parametrize("family", LETTERS)
@pytest.mark.parametrize("task", ["pair", "choice", "regression"])
def test_a_gpt_that_transformers_loads(family, task, arguments):
    args = arguments(task, family, lm_weight=0.5, both_orders=task == "regression")
    path = finetune(args)["seeds"][0]["model"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    config = transformers.AutoConfig.from_pretrained(path)
    kind = getattr(transformers, config.architectures[0])
    model, loading = kind.from_pretrained(path, output_loading_info=True)
    assert not loading["missing_keys"] and not loading["unexpected_keys"]
    before = transformers.AutoModel.from_pretrained(args.model).get_input_embeddings()
    rows = model.get_input_embeddings().weight
    added = rows[before.num_embeddings :]
    assert added.shape[0] == len(tokenizer) - before.num_embeddings
    assert added.shape[0] == (3 if family == "gpt2" else 4)
    # The new embeddings differ, and have the standard deviation of the others.
    assert 0.5 < added.std() / rows.std() < 2 and torch.cdist(added, added).topk(2).values.min() > 0
    shown = tokenizer.convert_ids_to_tokens(tokenizer("ab", "cd")["input_ids"])
    assert (shown[0], shown[3], shown[-1]) == (START, DELIMITER, EXTRACT)
    if task == "pair":
        transformers.pipeline("text-classification", model=str(path))("ab")


@pytest.mark.slow
@pytest.mark.parametrize("task", ["classification", "tagging"])
def test_learns(task, arguments, files):
    options = {"steps": 40, "batch_size": 16, "learning_rate": 3e-3, "dropout": 0.0}
    metrics = finetune(arguments(task, eval_data=copied(files[task]), **options))
    assert metrics["chance"] < metrics["scores"]["accuracy"]["mean"] == 1


@pytest.mark.parametrize(
    "precision, there, expected",
    [
        ("bf16", False, torch.bfloat16),
        ("auto", True, torch.bfloat16),
        ("auto", False, torch.float32),
        ("fp32", True, torch.float32),
    ],
)
def test_the_precision(precision, there, expected, arguments, monkeypatch, capsys):
    """By default that of the machine; a run that is resumed keeps the one with which it began."""
    monkeypatch.setattr(_machine, "hardware_has_bf16", lambda: there)
    seen = set()
    handle = torch.nn.modules.module.register_module_forward_hook(
        lambda m, a, o: seen.add(o.dtype) if isinstance(m, torch.nn.Linear) else None
    )
    try:
        args = arguments("classification", precision=precision, steps=1)
        metrics = finetune(args)
    finally:
        handle.remove()
    assert seen == {expected}
    name = "bf16" if expected == torch.bfloat16 else "fp32"
    assert metrics["precision"] == name and f"precision  {name}" in capsys.readouterr().err
    monkeypatch.setattr(_machine, "hardware_has_bf16", lambda: not there)
    record = read_hashed(args.out / "run.json")
    assert record["precision"] == name
    for before in ({"precision": name}, {"bf16": name == "bf16"}):
        kept = {key: value for key, value in record.items() if key != "precision"}
        write_hashed(args.out / "run.json", kept | before)
        auto = arguments("classification", steps=1, precision="auto", resume=True, seeds=2)
        assert finetune(auto)["precision"] == name
        other = {"precision": "fp32" if name == "bf16" else "bf16"}
        with pytest.raises(ArgumentValueError, match=f"`precision` got .* expected {name}, as in"):
            finetune(arguments("classification", steps=1, resume=True, **other))


def test_each_seed_is_logged(arguments, tmp_path):
    result = finetune(arguments("classification", report_to="tensorboard"))["seeds"][0]
    folder = tmp_path / "out" / "seed-0" / "tensorboard"
    # A file of the training and one of its scores, of which a reader of folders may miss one.
    files = [EventAccumulator(str(path), {"scalars": 0}).Reload() for path in folder.iterdir()]
    found = {tag: file.Scalars(tag) for file in files for tag in file.Tags()["scalars"]}
    losses = [event.value for event in found["train/loss"]]
    assert losses == [torch.tensor(entry["loss"]).item() for entry in result["history"]]
    (last,) = found["eval/accuracy"]
    assert last.step == 3 and last.value == torch.tensor(result["scores"]["accuracy"]).item()
    assert not result["scores_by_step"]


def test_mlflow_has_a_run_for_each_seed_with_its_scores(arguments, monkeypatch):
    """Its callback ends the run that it has started with the training, before the scores."""
    seen = []
    library = types.ModuleType("mlflow")
    library.__spec__ = importlib.machinery.ModuleSpec("mlflow", None)
    library.start_run = lambda run_name: seen.append(run_name)
    library.end_run = lambda: seen.append("end")

    class Callback(transformers.TrainerCallback):
        def setup(self, args, state, model):
            seen.append("set up")

        def on_log(self, args, state, control, logs, **kwargs):
            seen.append("score" if "eval_accuracy" in logs else "loss")

    monkeypatch.setitem(sys.modules, "mlflow", library)
    monkeypatch.setitem(
        transformers.integrations.integration_utils.INTEGRATION_TO_CALLBACK, "mlflow", Callback
    )
    finetune(arguments("classification", report_to="mlflow", seeds=2, steps=1, log_every=1))
    each = [[f"seed-{seed}", "set up", "loss", "loss", "score", "end"] for seed in (0, 1)]
    assert seen == each[0] + each[1]


@needs_csrc
@pytest.mark.slow
@pytest.mark.parametrize("task", FILES)
def test_two_processes_are_one_with_twice_the_batch(
    task, checkpoint, files, in_two_processes, tmp_path
):
    def words(name: str, size: int) -> list[str]:
        text = (
            f"finetune --task {task} --model {checkpoint('bert')} --data {files[task]} --steps 3 "
        )
        text += f"--batch-size {size} --dropout 0.1 --log-every 1 --learning-rate 1e-3 --threads 1 "
        return f"{text} --precision fp32 --out {tmp_path / name}".split()

    def losses(name: str) -> list[float]:
        result = json.loads((tmp_path / name / "metrics.json").read_text())["seeds"][0]
        return [entry["loss"] for entry in result["history"]]

    assert cli.main(words("one", 8)) == 0
    in_two_processes(words("two", 4))
    assert losses("two") == pytest.approx(losses("one"), rel=1e-5)


def test_one_answer_for_all_is_said(arguments, tmp_path, capsys, monkeypatch):
    """A model whose answer is always the same has the accuracy of the most frequent label."""
    score = Classification.score

    def constant(self, examples, notes, logits):
        return score(self, examples, notes, [(torch.tensor([0.0, 1.0]),)] * len(logits))

    path, printed = tmp_path / "data.tsv", []
    rows = (f"{sentence(i)}\t{'bad' if i % 4 else 'good'}" for i in range(COUNT))
    path.write_text("\n".join(("text\tlabel", *rows)))
    args = arguments("classification", data=path, eval_data=copied(path), steps=1)
    with monkeypatch.context() as patched:
        patched.setattr(Classification, "score", constant)
        metrics = finetune(args, printed.append)
    assert metrics["most_frequent_label"] == {"label": "bad", "accuracy": 0.75}
    predictions = json.loads((tmp_path / "out" / "seed-0" / "predictions.json").read_text())
    assert predictions["file"] == str(args.eval_data)
    (result,) = metrics["seeds"]
    assert result["most_frequent_prediction"] == {"prediction": "good", "share": 1.0}
    assert json.loads((tmp_path / "out" / "seed-0" / "result.json").read_text()) == result
    shown = "(1 seed, no interval; always the most frequent label: accuracy 0.7500; "
    assert summary(metrics).endswith(f"{shown}1 of 1 seed gave one answer to all)")
    assert result["one_answer"] == "all predictions are 'good'"
    assert metrics["seeds_with_one_answer"] == 1
    assert "matthews 0.0000  [all predictions are 'good']  training loss" in "".join(printed)
    said = capsys.readouterr().err
    expected = "all predictions are 'good', which is the right answer of 25% of the examples"
    assert f"Warning: {expected}" in said and said.count("Warning") == 1


# --- resumed --------------------------------------------------------------------------------------


def test_other_settings_are_another_run(arguments):
    finetune(arguments("classification", steps=1))
    for name, value in {"pooling": "mean", "learning_rate": 1.0, "steps": 2}.items():
        with pytest.raises(ArgumentValueError, match=f"`{name}` got .*, as in the run that is re"):
            finetune(arguments("classification", **{"steps": 1, name: value}, resume=True))


_HEAD = {"freeze": True, "features": "mix", "head": "bilstm", "learning_rate": 1e-2}


@pytest.mark.slow
@pytest.mark.parametrize("start", ["tagging", "frozen", "bertshare", "new source"])
def test_resume_within_a_seed(start, arguments, writing, monkeypatch):
    """In the second of two epochs, and after scores on the way."""

    def settings(out: str, **options) -> FinetuneArguments:
        options |= {"steps": 20, "save_every": 8, "eval_every": 15, "dropout": 0.1}
        if start in ("tagging", "frozen"):
            return arguments("tagging", out=out, **options, **_HEAD if start == "frozen" else {})
        return writing(start, out, batch_size=4, beams=1, **options)

    whole = finetune(settings("whole"))["seeds"][0]
    step, steps = FinetuningTrainer.training_step, []

    def killed(self, *args, **kwargs):
        steps.append(self.state.global_step)
        if len(steps) == 18:
            raise KeyboardInterrupt
        return step(self, *args, **kwargs)

    monkeypatch.setattr(FinetuningTrainer, "training_step", killed)
    with pytest.raises(KeyboardInterrupt):
        finetune(settings("parts"))
    parts = finetune(settings("parts", resume=True))["seeds"][0]
    assert steps[18:] == [16, 17, 18, 19]
    for entry in ("loss", "scores", "scores_by_step"):
        assert whole[entry] == parts[entry]
    assert [e["loss"] for e in parts["history"]] == [e["loss"] for e in whole["history"]]
    models = [load_file(Path(run["model"]) / "model.safetensors") for run in (whole, parts)]
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[0])
    assert not list(Path(parts["model"]).parent.glob("checkpoint-*"))


@pytest.mark.slow
def test_resume_after_the_last_step_of_a_seed(arguments, monkeypatch):
    """The run was killed after its last step, in the middle of an epoch: resuming adds no step."""
    whole = finetune(arguments("tagging", out="whole"))
    evaluate, step, steps = Tagging.evaluate, FinetuningTrainer.training_step, []

    def killed(*args):
        raise KeyboardInterrupt

    def counted(self, *args, **kwargs):
        steps.append(self.state.global_step)
        return step(self, *args, **kwargs)

    monkeypatch.setattr(FinetuningTrainer, "training_step", counted)
    monkeypatch.setattr(Tagging, "evaluate", killed)
    with pytest.raises(KeyboardInterrupt):
        finetune(arguments("tagging", out="parts"))
    monkeypatch.setattr(Tagging, "evaluate", evaluate)
    (parts,) = finetune(arguments("tagging", out="parts", resume=True))["seeds"]
    assert steps == [0, 1, 2] and parts["steps"] == 3
    assert [parts[name] for name in ("loss", "scores")] == [
        whole["seeds"][0][name] for name in ("loss", "scores")
    ]


@pytest.mark.slow
def test_a_curve_over_numbers_of_examples(arguments, files, tmp_path, monkeypatch, capsys):
    """The run is killed at the second of three numbers and resumed; each set contains the one
    before."""
    whole = finetune(arguments("pair", out="whole", max_samples=20))
    out = tmp_path / "out"
    args = arguments("pair", max_samples=[10, 20, 30], seeds=2)
    train, sizes = module.train_seed, []

    def counted(task, *rest, **options):
        sizes.append({example.where for example in task.train})
        if len(sizes) == 4:
            raise KeyboardInterrupt
        return train(task, *rest, **options)

    monkeypatch.setattr(module, "train_seed", counted)
    with pytest.raises(KeyboardInterrupt):
        finetune(args)
    assert {path.name for path in out.glob("*/seed-*")} == {"seed-0", "seed-1"}
    with pytest.raises(DataError, match="continue that run with --resume"):
        finetune(args)
    words = f"finetune --task pair --model {args.model} --data {args.data} --out {out} --seeds 2"
    words += " --steps 3 --batch-size 4 --learning-rate 1e-3 --log-every 1 --resume"
    capsys.readouterr()
    assert cli.main([*words.split(), "--max-samples", "10,20,30"]) == 0
    assert [len(examples) for examples in sizes] == [10, 10, 20, 20, 20, 30, 30]
    assert sizes[0] < sizes[2] < sizes[-1]
    metrics = json.loads((out / "metrics.json").read_text())
    assert [point["train_examples"] for point in metrics["curve"]] == [10, 20, 30]
    assert metrics["scores"] == metrics["curve"][2]["scores"]
    assert metrics["curve"][1]["seeds"][0]["scores"] == whole["seeds"][0]["scores"]
    shown = capsys.readouterr().out.splitlines()
    assert shown[:2] == [line for line in shown if line.startswith("10 examples, seed ")]
    assert [line.split(" acc")[0] for line in shown[-3:]] == [
        f"{n} examples:" for n in (10, 20, 30)
    ]
    assert cli._parser().parse_args([*words.split(), "--max-samples", "7"]).max_samples == 7


# --- the learning rate ----------------------------------------------------------------------------


@pytest.fixture
def rated(arguments, files):
    """The settings of a run with other examples to judge by."""

    def build(**options) -> FinetuneArguments:
        options = {
            "steps": 2,
            "batch_size": 8,
            "eval_data": copied(files["classification"]),
            **options,
        }
        return arguments("classification", **options)

    return build


def test_the_best_rate_of_a_list_trains_all_seeds(rated, files, tmp_path, monkeypatch, capsys):
    """The run is killed at the second rate and resumed. The test file chooses nothing."""
    scores = {1e-4: 0.5, 1e-3: 0.75, 1e-2: 0.25}
    train_seed, seen = module.train_seed, []

    def scored(task, seed, *rest, **options):
        on = {example.where.rpartition(":")[0] for example in task.test}
        seen.append((task.args.learning_rate, seed, on, len(task.train), len(task.test)))
        if len(seen) == 2:
            raise KeyboardInterrupt
        return train_seed(task, seed, *rest, **options)

    evaluate = Task.evaluate

    def chosen(self, trainer):
        found, predictions = evaluate(self, trainer)
        if len(self.train) < COUNT:
            found["accuracy"] = scores[trainer.args.learning_rate]
        return found, predictions

    monkeypatch.setattr(Task, "evaluate", chosen)
    monkeypatch.setattr(module, "train_seed", scored)
    options = {"learning_rate": [1e-4, 1e-3, 1e-2], "seeds": 2}
    test, train = str(copied(files["classification"])), str(files["classification"])
    with pytest.raises(KeyboardInterrupt):
        finetune(rated(**options))
    with pytest.raises(DataError, match="continue that run with --resume"):
        finetune(rated(**options))
    metrics = finetune(rated(resume=True, **options), print)
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
    monkeypatch.setattr(module, "train_seed", train_seed)
    alone = finetune(rated(out="alone", learning_rate=1e-3, seeds=2))
    assert [s["loss"] for s in alone["seeds"]] == [s["loss"] for s in metrics["seeds"]]
    assert alone["scores"] == metrics["scores"]


def test_a_rate_that_diverges_is_not_chosen(rated, monkeypatch, capsys):
    train_seed = module.train_seed

    def diverges(task, *rest, **options):
        if task.args.learning_rate > least:
            raise DivergenceError("At step 1 the loss is not finite.")
        return train_seed(task, *rest, **options)

    monkeypatch.setattr(module, "train_seed", diverges)
    least = 1e-4
    words = {"learning_rate": [1.0, 1e-4], "steps": 1}
    choice = finetune(rated(**words), print)["learning_rate_choice"]
    assert choice["learning_rate"] == 1e-4 and choice["rates"][0]["scores"] is None
    said = capsys.readouterr()
    assert "learning rate 1, seed 0, on held-out examples: it diverged" in said.out
    assert "It is the lowest of the rates" in said.err
    again = finetune(rated(resume=True, **words))  # the one that diverged is not tried again
    assert again["learning_rate_choice"] == choice
    least = 0.0
    with pytest.raises(DivergenceError, match="At each rate: At step 1"):
        finetune(rated(out="other", **words))


@pytest.mark.slow
def test_rates_on_the_command_line(checkpoint, files, tmp_path, capsys):
    words = f"finetune --task classification --model {checkpoint('bert')} --steps 1 "
    words += f"--data {files['classification']} --batch-size 8 --out"
    options = ["--learning-rate", "1e-4,2e-4"]
    assert cli.main([*words.split(), str(tmp_path / "a"), *options]) == 0
    shown = capsys.readouterr()
    assert "the best of 0.0001, 0.0002 on 5 of the examples to train on" in shown.err
    settings = tmp_path / "a" / "settings.yaml"
    assert cli.main([*words.split(), str(tmp_path / "b"), "--config", str(settings)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == shown.out.splitlines()[-1]


def test_rates_that_are_refused(rated, tmp_path):
    few = tmp_path / "few.tsv"
    few.write_text("text\tlabel\na\t-1\nb\t1\n")
    with pytest.raises(DataError, match="Give one --learning-rate."):
        finetune(rated(data=few, learning_rate=[1e-4, 1e-3]))


# --- examples and benchmark -----------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, task",
    [("finetune_classification", "classification"), ("finetune_question_answering", "qa")],
)
def test_examples(name, task, checkpoint, files, tmp_path, monkeypatch, capsys):
    path = REPOSITORY / "examples" / f"{name}.py"
    words = [str(path), str(checkpoint("bert")), str(files[task])]
    words += [str(files[task])] if task == "classification" else []
    monkeypatch.setattr(sys, "argv", [*words, "1"])
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(path), run_name="__main__")
    assert ("accuracy" if task == "classification" else "exact_match") in capsys.readouterr().out
    assert list((tmp_path / "runs").rglob("model.safetensors"))


@pytest.mark.slow
def test_benchmark(checkpoint, files, tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(REPOSITORY / "benchmarks"))
    benchmark = runpy.run_path(str(REPOSITORY / "benchmarks" / "finetuning.py"), run_name="test")
    setting = benchmark["Setting"](files["pair"].name, None, 2, 4, 32, 1e-3, 8)
    monkeypatch.setitem(benchmark["SETTINGS"], "pair", setting)
    options = f"--model {checkpoint('bert')} --data {files['pair'].parent} --tasks pair --seeds 2"
    words = ["finetuning.py", *options.split(), "--results", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", words)
    assert benchmark["main"]() == 0
    shown = capsys.readouterr().out
    (page,) = tmp_path.rglob("finetuning.md")
    (rows,) = tmp_path.rglob("finetuning.csv")
    assert page.read_text().splitlines()[-1] in shown
    assert len(rows.read_text().splitlines()) == 1 + 3 * 2  # three scores, two libraries
