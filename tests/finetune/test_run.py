"""Fine-tuning, end to end on a tiny BERT: files, features, scores, and both libraries."""

from __future__ import annotations

import argparse
import importlib.machinery
import json
import os
import re
import runpy
import shutil
import statistics
import sys
import types
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tokenizers import normalizers

import fastplm.models
from fastplm import _extension, cli
from fastplm.data import load_tokenizer, train_tokenizer
from fastplm.data.examples import Example, read_examples
from fastplm.errors import ArgumentValueError, DataError
from fastplm.finetune import run as module
from fastplm.finetune.data import doubtful_labels, hold_out, shown_counts
from fastplm.finetune.run import (
    FeatureDataset,
    FinetuneArguments,
    build_model,
    finetune,
    make_trainer,
    prepare_task,
    summary,
)
from fastplm.finetune.settings import LIBRARIES
from fastplm.finetune.tasks import (
    TASKS,
    QuestionAnswering,
    Regression,
    Tagging,
    best_spans,
    exact_match,
    f1,
    matthews,
    null_threshold,
    pearson,
    ranks,
    words_f1,
)
from fastplm.run.seeds import interval, student_t
from fastplm.testing import FORWARD_FACTOR, check_error

needs_csrc = pytest.mark.skipif(
    _extension.lacks("dropout_rows", "CPU") is not None, reason="csrc/ is not there"
)
NOUNS = "river house teacher garden train letter window forest engine island".split()
VERBS = "follows carries remembers builds opens paints".split()
TAGS = {"the": "DET", **dict.fromkeys(NOUNS, "NOUN"), **dict.fromkeys(VERBS, "VERB")}
COUNT = 60
REPOSITORY = Path(__file__).resolve().parents[2]


def sentence(i: int) -> str:
    return f"the {NOUNS[i % 10]} {VERBS[i * 5 % 6]} the {NOUNS[(i * 3 + 1) % 10]}"


def _classification() -> str:
    rows = (
        f"{-1 if 'opens' in sentence(i) else 1}\t{sentence(i)}{' again' * (i % 5)}"
        for i in range(COUNT)
    )
    return "\n".join(("label\ttext", *rows)) + "\n"


def _regression() -> str:
    rows = (
        f"{sentence(i)}\t{sentence(i + i % 3)}{' again' * (i % 5)}\t{(4.75, 0.5, 2.625)[i % 3]}"
        for i in range(COUNT)
    )
    return "\n".join(("sentence1\tsentence2\tscore", *rows)) + "\n"


def _pair() -> str:
    rows = (f'{i % 2},"{sentence(i)}",{sentence(i + 6 * (i % 2))}' for i in range(COUNT))
    return "\r\n".join(("Label,sentence1,sentence2", *rows)) + "\r\n"


def _tagging() -> str:
    lengths = (4 if i % 3 else 8 for i in range(COUNT))
    sentences = ((sentence(i).split() * 2)[:length] for i, length in enumerate(lengths))
    return "\n\n".join("\n".join(f"{w}\t{TAGS[w]}" for w in words) for words in sentences)


def _qa() -> str:
    paragraphs = []
    for i in range(COUNT // 2):
        context = f"{sentence(i)}. then {sentence(i + 1)}."
        questions = []
        for j in range(2):
            noun = sentence(i + j).split()[1]
            verb = sentence(i + j).split()[2]
            answers = [{"text": noun, "answer_start": context.index(noun)}]
            questions.append({"id": f"{i} {j}", "question": f"what {verb}?", "answers": answers})
        paragraphs.append({"context": context, "qas": questions})
    return json.dumps({"data": [{"title": "", "paragraphs": paragraphs}]}, indent=1)


def _qa_with_null() -> str:
    """Questions, of which every third has no answer; its plausible answer is not read."""
    content = json.loads(_qa())
    questions = [q for p in content["data"][0]["paragraphs"] for q in p["qas"]]
    for question in questions:
        question["is_impossible"] = False
    for question in questions[::3]:
        question["plausible_answers"], question["answers"] = question["answers"], []
        question["is_impossible"] = True
    return json.dumps(content)


def _choice() -> str:
    lines = []
    for i in range(COUNT):
        texts = [NOUNS[(i + j) % 10] for j in range(3)]
        question: object = f"what is a {texts[i % 3]}?"
        line = {"question": question, "choices": texts, "answer": i % 3}
        if i % 2:
            choices = [{"label": a, "text": b} for a, b in zip("ABC", texts, strict=True)]
            line = {"question": {"stem": question, "choices": choices}, "answerKey": "ABC"[i % 3]}
        lines.append(json.dumps(line))
    return "\n".join(lines)


FILES = {
    "classification": _classification,
    "pair": _pair,
    "regression": _regression,
    "tagging": _tagging,
    "qa": _qa,
    "choice": _choice,
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    """A tiny BERT without a head, and its tokenizer."""
    path = tmp_path_factory.mktemp("checkpoint")
    texts = [f"{sentence(i)}. then what is a again?" for i in range(COUNT)]
    tokenizer = train_tokenizer(texts, 70, path / "cache")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=128,
        initializer_range=0.2,
    )
    transformers.BertModel(config).save_pretrained(path / "model")
    tokenizer.save_pretrained(path / "model")
    return path / "model"


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("files")
    paths = {task: folder / f"{task}.txt" for task in FILES}
    for task, path in paths.items():
        path.write_text(FILES[task](), encoding="utf-8-sig", newline="")
    return paths


def copied(path: Path) -> Path:
    """The training examples, also in another file, are refused as examples to evaluate on."""
    return Path(shutil.copy(path, path.with_name(f"copied-{path.name}")))


@pytest.fixture
def arguments(checkpoint, files, tmp_path):
    def build(task: str, out: str = "out", **options: object) -> FinetuneArguments:
        settings = {
            "model": checkpoint,
            "data": files[task],
            "out": tmp_path / out,
            "batch_size": 4,
            "learning_rate": 1e-3,
            "log_every": 1,
            "steps": 3,
            **options,
        }
        return FinetuneArguments(task=task, **settings)

    return build


# --- runs -----------------------------------------------------------------------------------------


def test_each_seed_is_logged(arguments, tmp_path):
    result = finetune(arguments("classification", report_to="tensorboard"))["seeds"][0]
    folder = tmp_path / "out" / "seed-0" / "tensorboard"
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    losses = [event.value for event in events.Scalars("train/loss")]
    assert losses == [torch.tensor(entry["loss"]).item() for entry in result["history"]]
    (last,) = events.Scalars("eval/accuracy")
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


def test_a_score_at_the_end_of_an_epoch_is_taken_once(arguments):
    """The Trainer asks for scores after the last step of an epoch, and after the epoch."""
    options = {"steps": None, "epochs": 2, "max_samples": 20, "batch_size": 10, "eval_every": 1}
    result = finetune(arguments("classification", **options))["seeds"][0]
    assert result["steps"] == 4
    assert [entry["step"] for entry in result["scores_by_step"]] == [1, 2, 3]


@pytest.mark.parametrize("task", FILES)
def test_from_file_to_score(task, checkpoint, files, tmp_path, capsys):
    out = tmp_path / "out"
    words = f"finetune --task {task} --model {checkpoint} --data {files[task]} --out {out} "
    words += "--steps 2 --batch-size 8 --seeds 2 --learning-rate 1e-3 --max-samples 30"
    assert cli.main(words.split()) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines[:2]] == ["seed 0", "seed 1"]
    assert "95 % interval of 2 seeds" in lines[2]
    metrics = json.loads((out / "metrics.json").read_text())
    assert lines[2] == summary(metrics)
    assert metrics["train_examples"] == 30 and len(metrics["seeds"]) == 2
    auto = getattr(transformers, TASKS[task].auto)
    for result in metrics["seeds"]:
        assert result["steps"] == 2 and result["tokens_per_second"] > 0
        _, loading = auto.from_pretrained(result["model"], output_loading_info=True)
        assert not loading["missing_keys"] and not loading["unexpected_keys"]
    transformers.AutoTokenizer.from_pretrained(result["model"])


@pytest.mark.slow
@pytest.mark.parametrize("task", ["classification", "tagging"])
def test_learns(task, arguments, files):
    args = arguments(
        task,
        eval_data=copied(files[task]),
        steps=40,
        batch_size=16,
        learning_rate=3e-3,
        dropout=0.0,
    )
    metrics = finetune(args)
    assert metrics["chance"] < metrics["scores"]["accuracy"]["mean"] == 1


@pytest.mark.parametrize(
    "task",
    [
        task if task in ("regression", "qa") else pytest.param(task, marks=pytest.mark.slow)
        for task in FILES
    ],
)
def test_both_libraries_have_the_same_losses(task, arguments, tmp_path):
    """Both libraries have the same batches, order, head and steps, and differ by rounding alone.

    The questions' windows have one length, as Transformers' softmax includes padding.
    """

    def losses(library):
        args = arguments(task, library=library, dropout=0.0)
        prepared_task = prepare_task(args)
        features = FeatureDataset(prepared_task.features(prepared_task.train)[0])
        if task == "qa":
            usual = statistics.mode(features.lengths)
            features = FeatureDataset([f for f in features if len(f["input_ids"]) == usual])
            assert len(features) >= args.batch_size
        model = build_model(args, prepared_task, seed=3).double()
        trainer = make_trainer(args, prepared_task, model, features, 3, tmp_path / "out")
        trainer.train()
        values = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        assert len(values) == args.steps
        return torch.tensor(values, dtype=torch.float64)

    ours, gold = losses("fastplm"), losses("transformers")
    # In fp64, results may differ only by the rounding of an fp32 number.
    check_error("losses", ours.float(), gold, [gold.float()], FORWARD_FACTOR)


@pytest.mark.slow
def test_batches_depend_on_the_seed_alone(arguments, tmp_path):
    def batches(library, seed):
        args = arguments("classification", library=library, steps=18)
        task = prepare_task(args)
        features = FeatureDataset(task.features(task.train)[0])
        model = build_model(args, task, seed)
        trainer = make_trainer(args, task, model, features, seed, tmp_path / "out")
        seen, collate = [], trainer.data_collator

        def record(features):
            batch = collate(features)
            seen.append(batch["input_ids"].tolist())
            return batch

        trainer.data_collator = record
        trainer.train()
        return seen[:18], model.state_dict()

    ours, weights = batches("fastplm", 0)
    again, same_weights = batches("fastplm", 0)
    assert all(torch.equal(weights[name], same_weights[name]) for name in weights)
    other, other_weights = batches("fastplm", 1)
    assert not all(torch.equal(weights[name], other_weights[name]) for name in weights)
    # The runs have dropout, drawn differently by the libraries, and two epochs.
    theirs, _ = batches("transformers", 0)
    assert ours == again == theirs != other
    assert ours[:4] != ours[14:]
    # Samples of similar length share a batch; in the order of the file they would not.
    grouped = sum(len(batch) * len(batch[0]) for batch in ours[:14])
    args = arguments("classification")
    task = prepare_task(args)
    lengths = FeatureDataset(task.features(task.train)[0]).lengths
    parts = [lengths[i : i + args.batch_size] for i in range(0, len(lengths), args.batch_size)]
    assert grouped < sum(len(part) * max(part) for part in parts)


@pytest.mark.slow
@needs_csrc
@pytest.mark.parametrize("task", FILES)
def test_dropout_does_not_depend_on_the_batch(task, arguments, one_step_of):
    whole, *split = one_step_of(arguments(task, dropout=0.1))
    assert split == pytest.approx([whole] * len(split), rel=1e-5)
    other, *_ = one_step_of(arguments(task, dropout=0.11))
    assert abs(other - whole) > 1e-4 * whole, "dropout is seen in these digits"


@needs_csrc
@pytest.mark.slow
@pytest.mark.parametrize("task", FILES)
def test_two_processes_are_one_with_twice_the_batch(
    task, checkpoint, files, in_two_processes, tmp_path
):
    def words(name: str, size: int) -> list[str]:
        text = f"finetune --task {task} --model {checkpoint} --data {files[task]} --steps 3 "
        text += f"--batch-size {size} --dropout 0.1 --log-every 1 --learning-rate 1e-3 --threads 1 "
        return f"{text} --out {tmp_path / name}".split()

    def losses(name: str) -> list[float]:
        result = json.loads((tmp_path / name / "metrics.json").read_text())["seeds"][0]
        return [entry["loss"] for entry in result["history"]]

    assert cli.main(words("one", 8)) == 0
    in_two_processes(words("two", 4))
    assert losses("two") == pytest.approx(losses("one"), rel=1e-5)


def test_initial_weights_are_those_of_transformers(arguments):
    pair = []
    for library in LIBRARIES:
        args = arguments("tagging", library=library, dropout=0.25)
        model = build_model(args, prepare_task(args), seed=5)
        assert model.dropout.p == model.bert.encoder.layer[0].attention.output.dropout.p == 0.25
        pair.append(model)
    ours, theirs = pair
    assert type(ours) is fastplm.models.BertForTokenClassification
    assert type(theirs) is transformers.BertForTokenClassification
    assert (
        ours.config.id2label == theirs.config.id2label == dict(enumerate(sorted({*TAGS.values()})))
    )
    for name, value in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], value)


@pytest.mark.slow
def test_resume_within_a_seed(arguments, monkeypatch):
    whole = finetune(arguments("tagging", "whole", steps=20))
    step = module.FinetuningTrainer.training_step
    calls = []

    def killed(self, *args, **kwargs):
        calls.append(0)
        if len(calls) == 18:
            raise KeyboardInterrupt
        return step(self, *args, **kwargs)

    monkeypatch.setattr(module.FinetuningTrainer, "training_step", killed)
    with pytest.raises(KeyboardInterrupt):
        finetune(arguments("tagging", "parts", steps=20, save_every=8))
    parts = finetune(arguments("tagging", "parts", steps=20, save_every=8, resume=True))
    assert len(calls) == 18 + 4  # those of the second epoch, from step 16 on
    for entry in ("loss", "scores"):
        assert whole["seeds"][0][entry] == parts["seeds"][0][entry]
    weights = [
        transformers.AutoModelForTokenClassification.from_pretrained(run["seeds"][0]["model"])
        for run in (whole, parts)
    ]
    assert all(map(torch.equal, *(model.state_dict().values() for model in weights)))
    assert not list(Path(parts["seeds"][0]["model"]).parent.glob("checkpoint-*"))


@pytest.mark.slow
def test_resume_after_the_last_step_of_a_seed(arguments, monkeypatch):
    """The run was killed after its last step, in the middle of an epoch: resuming adds no step."""
    whole = finetune(arguments("tagging", "whole"))
    evaluate, step, steps = Tagging.evaluate, module.FinetuningTrainer.training_step, []

    def killed(*args):
        raise KeyboardInterrupt

    def counted(self, *args, **kwargs):
        steps.append(self.state.global_step)
        return step(self, *args, **kwargs)

    monkeypatch.setattr(module.FinetuningTrainer, "training_step", counted)
    monkeypatch.setattr(Tagging, "evaluate", killed)
    with pytest.raises(KeyboardInterrupt):
        finetune(arguments("tagging", "parts"))
    monkeypatch.setattr(Tagging, "evaluate", evaluate)
    (parts,) = finetune(arguments("tagging", "parts", resume=True))["seeds"]
    assert steps == [0, 1, 2] and parts["steps"] == 3
    assert [parts[name] for name in ("loss", "scores")] == [
        whole["seeds"][0][name] for name in ("loss", "scores")
    ]


@pytest.mark.slow
def test_a_curve_over_numbers_of_examples(arguments, files, tmp_path, monkeypatch, capsys):
    """The run is killed at the second of three numbers and resumed; each set contains the one
    before."""
    whole = finetune(arguments("pair", "whole", max_samples=20))
    out = tmp_path / "out"
    args = arguments("pair", max_samples=[10, 20, 30], seeds=2)
    run, sizes = module._run, []

    def counted(args, task, *rest):
        sizes.append({example.where for example in task.train})
        if len(sizes) == 4:
            raise KeyboardInterrupt
        return run(args, task, *rest)

    monkeypatch.setattr(module, "_run", counted)
    with pytest.raises(KeyboardInterrupt):
        finetune(args)
    assert {path.name for path in out.glob("*/seed-*")} == {"seed-0", "seed-1"}
    with pytest.raises(DataError, match="continue that run with --resume"):
        finetune(args)
    words = (
        f"finetune --task pair --model {args.model} --data {files['pair']} --out {out} --seeds 2"
    )
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
    for wrong in ([20, 10], [10, 10], [10, 0]):
        with pytest.raises(ArgumentValueError, match="`max_samples` got"):
            arguments("pair", max_samples=wrong)
    assert cli._parser().parse_args([*words.split(), "--max-samples", "7"]).max_samples == 7


def test_bf16(arguments):
    seen = set()

    def spy(module, args, output):
        seen.add(output.dtype)

    handle = torch.nn.modules.module.register_module_forward_hook(
        lambda m, a, o: spy(m, a, o) if isinstance(m, torch.nn.Linear) else None
    )
    try:
        finetune(arguments("classification", bf16=True, steps=1))
    finally:
        handle.remove()
    assert seen == {torch.bfloat16}


def test_questions_leave_padding_out(arguments, tmp_path):
    for library in LIBRARIES:
        args = arguments("qa", library=library)
        task = prepare_task(args)
        features = FeatureDataset(task.features(task.train)[0])
        model = build_model(args, task, 0)
        trainer = make_trainer(args, task, model, features, 0, tmp_path)
        batch = trainer.data_collator([features[0], features[1]])
        assert ("exclude_padding" in batch) == (library == "fastplm")


# --- features and scores --------------------------------------------------------------------------


def perfect(feature, task):
    """Logits that predict the labels; those of a window without the answer predict none."""
    logits = []
    for name in task.label_names:
        labels = torch.tensor(feature[name])
        scores = torch.zeros(*labels.shape, len(feature["input_ids"]) + 10)
        if isinstance(task, Regression):
            logits.append(labels[None])
        elif isinstance(task, QuestionAnswering) and labels == 0:
            logits.append(scores)
        else:
            logits.append(scores.scatter(-1, labels.clamp(min=0)[..., None], 1.0))
    return tuple(logits)


@pytest.mark.parametrize("task", FILES)
@pytest.mark.parametrize("length", [16, 64])
def test_right_answers_score_one(task, length, arguments):
    """Right answers score one, also for texts that are cut into windows."""
    task = prepare_task(arguments(task, max_length=length))
    for examples in (task.train, task.test):
        features, notes = task.features(examples)
        assert max(FeatureDataset(features).lengths) <= length
        logits = [perfect(feature, task) for feature in features]
        scores, _ = task.score(examples, notes, logits)
        best = dict.fromkeys(task.metrics, 1.0)
        assert scores == pytest.approx(best | ({"mse": 0.0} if "mse" in best else {}))
        first = task.label_names[0]
        others = [dict(feature, **{first: _other(feature[first])}) for feature in features]
        logits = [perfect(feature, task) for feature in others]
        assert task.score(examples, notes, logits)[0][task.metrics[0]] < 0.5


def _other(label):
    if isinstance(label, float):
        return -label
    return [_other(each) for each in label] if isinstance(label, list) else 1 if label != 1 else 0


def test_each_word_has_one_label(arguments):
    """A word has the label of its first token, also if the word or sentence continues in another
    feature."""
    for length in (16, 64):
        task = prepare_task(arguments("tagging", max_length=length))
        features, notes = task.features(task.train)
        assert (len(features) > len(task.train)) == (length == 16)
        words = [(i, j) for i, example in enumerate(task.train) for j in range(len(example.texts))]
        assert [place[:2] for places in notes for place in places] == words
        for feature, places in zip(features, notes, strict=True):
            labelled = [i for i, label in enumerate(feature["labels"]) if label != -100]
            assert labelled == [place for _, _, place in places]
            tokens = task.tokenizer.convert_ids_to_tokens(feature["input_ids"])
            assert any(token.startswith("##") for token in tokens)
            assert not any(tokens[place].startswith("##") for place in labelled)


@pytest.mark.parametrize("family", ["own class", "no class"])
def test_tags_of_a_byte_level_tokenizer(family, arguments, checkpoint, tmp_path):
    """Words have the tokens that they have in a text, also those of the saved tokenizer."""
    folder = tmp_path / "model"
    shutil.copytree(checkpoint, folder)
    own = train_tokenizer(NOUNS * 9, 400, tmp_path / "cache", "bytelevel")
    if family == "no class":
        own = transformers.PreTrainedTokenizerFast(
            tokenizer_object=own.backend_tokenizer, **own.special_tokens_map
        )
    (folder / "tokenizer.json").unlink()
    own.save_pretrained(folder)
    tokenizer = prepare_task(arguments("tagging", model=folder)).tokenizer
    tokenizer.save_pretrained(tmp_path / "saved")
    inside = own(" " + " ".join(NOUNS))["input_ids"]
    for each in (tokenizer, load_tokenizer(tmp_path / "saved", ())):
        assert each(NOUNS, is_split_into_words=True)["input_ids"] == inside


def test_windows_overlap_and_hold_the_answer(arguments):
    task = prepare_task(arguments("qa", max_length=16))
    features, notes = task.features(task.train)
    assert len(features) > len(task.train)
    found = set()
    for feature, (sample, places) in zip(features, notes, strict=True):
        first, last = feature["start_positions"], feature["end_positions"]
        if first:
            context, (_, answer) = task.train[sample].texts[1], task.train[sample].target[0]
            assert context[places[first][0] : places[last][1]] == answer
            found.add(sample)
    assert found == set(range(len(task.train)))
    long = task._shortened(" ".join(NOUNS * 3), 5)
    assert len(task.tokenizer(long, add_special_tokens=False)["input_ids"]) == 5


def test_answers_that_are_no_tokens_are_counted(arguments, capsys):
    task = prepare_task(arguments("qa"))
    task.tokenizer.backend_tokenizer.normalizer = normalizers.Replace("☆", "")
    examples = [
        Example(("who", "the cat sat"), [(4, "cat")], 0, "x", 0),
        Example(("who", "the cat sat"), [(4, "ca")], 1, "x", 1),
        Example(("who", "the ☆ sat"), [(4, "☆")], 2, "x", 2),
        Example(("who", "the cat sat"), [], 3, "x", 3),
    ]
    assert len(task.features(examples)[0]) == 4
    assert capsys.readouterr().err == (
        "2 of 3 answers do not begin and end with a token: their targets are the tokens around "
        "them, as 'cat' for 'ca'; 1 have no token, and no target.\n"
    )
    task.features(examples[:1])
    assert not capsys.readouterr().err


def test_best_spans():
    places = [None, (0, 1), (2, 3), (4, 5), None]
    start = torch.tensor([9.0, 1.0, 3.0, 0.0, 9.0, 9.0])
    end = torch.tensor([9.0, 5.0, 1.0, 4.0, 9.0, 9.0])
    spans = [(7.0, 2, 5), (6.0, 0, 1), (5.0, 0, 5), (4.0, 2, 3), (4.0, 4, 5), (2.0, 0, 3)]
    assert sorted(best_spans(start, end, places, 20, 30)) == sorted(spans)
    assert best_spans(start, end, places, 3, 30) == spans[:3]
    assert [span[0] for span in best_spans(start, end, places, 20, 1)] == [6.0, 4.0, 4.0]
    assert sorted(best_spans(start, end, places, 20, 2)) == sorted(spans[:2] + spans[3:])


def test_squad_scores():
    """The scores are computed by hand, with the definition of the evaluation script."""
    assert exact_match("The  Cat!", "a cat") == 1 and exact_match("cats", "cat") == 0
    # Two of "big black cat" (3 words) and "black cat sat down" (4 words) are common: 2*2/7.
    assert words_f1("the big, black cat", "Black cat sat down") == 4 / 7
    assert words_f1("dog dog", "dog") == 2 / 3
    assert words_f1("dog", "cat") == words_f1("", "cat") == 0
    assert words_f1("the", "") == 1  # "the" is no word, as in the evaluation script
    assert exact_match("theory", "ory") == 0


def test_several_answers_and_windows_count_once(arguments):
    task = prepare_task(arguments("qa"))
    example = task.train[0]
    context = example.texts[1]
    start = context.index("then")
    more = replace(example, target=(*example.target, (start, "then")))
    places = [(0, 3), (start, start + 4)]
    logits = [(torch.tensor([0.0, 2]),) * 2, (torch.tensor([5.0, 1]),) * 2]
    # The best span of both windows has characters 0 to 3 of the second.
    scores, predictions = task.score([more], [(0, places), (0, places)], logits)
    assert scores == {"f1": 0.0, "exact_match": 0.0} and context[:3] == "the"
    both = context[: start + 4]
    assert predictions == {"0 0": ["the", both, "then"]}
    logits[1] = (torch.tensor([0.0, 1]),) * 2
    assert task.score([more], [(0, places)] * 2, logits)[0] == {"f1": 1.0, "exact_match": 1.0}


def test_null_threshold_by_hand():
    """Two of five questions have no answer: to answer one loses the point for leaving it open."""
    differences = [-3.0, -1.0, 0.5, 2.0, 2.0]
    # To answer up to 0.5 gains 1 - 1 + 0.8; the two questions at 2.0 together lose 0.4 - 1.
    assert null_threshold(differences, [1.0, -1.0, 0.8, 0.4, -1.0]) == -3.0
    assert null_threshold(differences, [1.0, -0.5, 0.8, 0.4, -1.0]) == 0.5
    assert null_threshold(differences, [1.0, -1.0, 0.8, 0.4, 1.0]) == 2.0
    assert null_threshold(differences, [-1.0, -1.0, 0.8, 0.4, -1.0]) == -4.0


def test_questions_without_an_answer(arguments, tmp_path):
    """Four questions by hand: logits of no answer and of the best span, and the right answer."""
    path = tmp_path / "squad2.json"
    path.write_text(_qa_with_null())
    task = prepare_task(arguments("qa", data=path, eval_data=copied(path)))
    assert task.metrics == ("f1", "exact_match", "has_answer_f1", "no_answer_f1")
    features, notes = task.features(task.test)
    for feature, (sample, _) in zip(features, notes, strict=True):
        null = not task.test[sample].target
        assert null == (sample % 3 == 0)
        assert null == (feature["start_positions"] == feature["end_positions"] == 0)
    examples = [task.test[index] for index in (1, 0, 2, 3)]
    assert [len(example.target) for example in examples] == [1, 0, 1, 0]
    notes, logits = [], []
    for index, example in enumerate(examples):
        noun = example.texts[1].split()[1]
        ((start, words),) = example.target or ((len("the "), noun),)
        for null in (9.0, 0.0):  # the lower logit of two windows counts
            notes.append((index, [None, (start, start + len(words))]))
            # The differences are -4, -2, 3 and 4.
            best = (2.0, 1.0, -1.5, -2.0)[index]
            logits.append((torch.tensor([null, best]),) * 2)
    scores, predictions = task.score(examples, notes, logits)
    # Only the first question is answered, rightly; the two without an answer are right, too.
    assert scores == {
        "f1": 0.75,
        "exact_match": 0.75,
        "has_answer_f1": 0.5,
        "no_answer_f1": 1.0,
        "null_threshold": -4.0,
    }
    words = [example.texts[1].split()[1] for example in examples]
    assert examples[0].target[0][1] in predictions[_id(examples[0])][0]
    assert [predictions[_id(example)][0] for example in examples[1:]] == [""] * 3
    assert predictions[_id(examples[1])] == ["", words[1]]
    task.args.null_threshold = 3.0
    scores, _ = task.score(examples, notes, logits)
    assert scores["has_answer_f1"] == 1 and scores["null_threshold"] == 3
    assert scores["no_answer_f1"] == 0.5


def test_answers_that_are_always_the_beginning(arguments):
    """A model whose states are all the same gives the first words of each text."""
    task = prepare_task(arguments("qa"))
    starts = [[" ".join(e.texts[1].split()[:2]), "x"] for e in task.test]
    said = task.one_answer(task.most_frequent(dict(enumerate(starts))))
    assert said == "100% of the answers are the beginning of their text"
    right = [task.right(example) for example in task.test]
    assert "sign" not in task.most_frequent(dict(enumerate(right)))
    task.test = [replace(e, target=((0, "the"),)) for e in task.test]  # where it is right
    assert "sign" not in task.most_frequent(dict(enumerate(starts)))


def _id(example):
    return example.where.rpartition(", question ")[2]


def test_a_run_with_questions_without_an_answer(arguments, tmp_path):
    path = tmp_path / "squad2.json"
    path.write_text(_qa_with_null())
    metrics = finetune(arguments("qa", data=path, steps=2))
    (result,) = metrics["seeds"]
    assert metrics["scores"].keys() == {"f1", "exact_match", "has_answer_f1", "no_answer_f1"}
    assert result["scores"].keys() - metrics["scores"].keys() == {"null_threshold"}
    predictions = json.loads((tmp_path / "out" / "seed-0" / "predictions.json").read_text())
    assert all(found["prediction"].count("") == 1 for found in predictions["predictions"])
    with pytest.raises(ArgumentValueError, match="`null_threshold` got 1, and every question"):
        prepare_task(arguments("qa", null_threshold=1))


def test_f1_by_hand():
    # Three predictions are 1, two of them right; one label 1 was missed: 2*2 / (3 + 3).
    assert f1([1, 1, 1, 0, 0], [1, 1, 0, 1, 0], 2) == 2 / 3
    assert f1([0, 0], [0, 0], 2) == 0
    # Class 0: 1; class 1: 2*1 / (1 + 2); class 2: 0.
    assert f1([0, 1, 2], [0, 1, 1], 3) == (1 + 2 / 3 + 0) / 3


def test_matthews_by_hand():
    # Two classes: 2 true, 1 false and 1 missed of class 1, 1 true of class 0:
    # (2*1 - 1*1) / sqrt(3 * 3 * 2 * 2).
    assert matthews([1, 1, 1, 0, 0], [1, 1, 0, 1, 0]) == pytest.approx(1 / 6)
    assert matthews([1, 0, 0], [0, 1, 1]) == -1 and matthews([2, 0, 1], [2, 0, 1]) == 1
    assert matthews([1, 1, 1], [1, 1, 0]) == 0
    # Three classes, s = 4, c = 3, p = (1, 2, 1), t = (1, 1, 2): (12 - 5) / (16 - 6).
    assert matthews([0, 1, 2, 1], [0, 1, 2, 2]) == 0.7


def test_correlations_by_hand():
    # Deviations (-2, 0, 2) and (-1, -1, 2): (2 + 4) / sqrt(8 * 6).
    assert pearson([1.0, 3.0, 5.0], [2.0, 2.0, 5.0]) == pytest.approx(6 / 48**0.5)
    assert pearson([1.0, 1.0], [2.0, 5.0]) == 0
    assert ranks([0.5, 2.0, -1.0, 2.0]) == [2.0, 3.5, 1.0, 3.5]


def test_correlations_are_those_of_scipy():
    stats = pytest.importorskip("scipy.stats")
    values = torch.randn(2, 50, generator=torch.Generator().manual_seed(0)).round(decimals=1)
    found, right = values.tolist()
    assert pearson(found, right) == pytest.approx(stats.pearsonr(found, right)[0])
    spearman = pearson(ranks(found), ranks(right))
    assert spearman == pytest.approx(stats.spearmanr(found, right)[0])


def test_scores_are_not_classes(arguments, tmp_path):
    """Labels with fractions are refused unless the settings say that they are scores."""
    path = tmp_path / "scores.tsv"
    texts = [f"{score}\t{sentence(i)}" for i, score in enumerate((4.8, 0.5, 1.2, 2.6, 0, 5))]
    path.write_text("\n".join(("score\ttext", *texts)))
    for options in ({}, {"eval_data": copied(path)}):
        expected = r"`task` got classification, and labels with fractions, such as 4.8 .*tsv:2"
        with pytest.raises(DataError, match=expected + ".*--task regression.*--threshold"):
            prepare_task(arguments("classification", data=path, **options))
    task = prepare_task(arguments("classification", data=path, eval_data=copied(path), threshold=1))
    assert [f["labels"] for f in task.features(task.train)[0]] == [1, 0, 1, 1, 0, 1]
    task = prepare_task(arguments("regression", data=path, eval_data=copied(path)))
    assert [f["labels"] for f in task.features(task.train)[0]] == [4.8, 0.5, 1.2, 2.6, 0, 5]
    found = [(torch.tensor([score]),) for score in (5.0, 1.0, 1.0, 2.0, 0.0, 5.0)]
    scores, predictions = task.score(task.test, [], found)
    assert predictions == [5, 1, 1, 2, 0, 5]
    squares = 0.2**2 + 0.5**2 + 0.2**2 + 0.6**2
    assert scores["mse"] == pytest.approx(squares / 6) and 0.9 < scores["pearson"] < 1
    # The ranks are 5.5 2.5 2.5 4 1 5.5 and 5 2 3 4 1 6.
    assert scores["spearman"] == pytest.approx(16.5 / (16.5 * 17.5) ** 0.5)


def test_interval_by_hand():
    """The quantiles are those of the tables."""
    assert interval([0.25]) == {"mean": 0.25, "half_width": None}
    # s = 1, n = 3: 4.30265273 / sqrt(3)
    result = interval([1.0, 2.0, 3.0])
    assert result["mean"] == 2 and f"{result['half_width']:.6f}" == "2.484138"
    table = {1: "12.706205", 2: "4.302653", 4: "2.776445", 9: "2.262157", 30: "2.042272"}
    assert {n: f"{student_t(0.95, n):.6f}" for n in table} == table
    seeds = [{"scores": {"accuracy": value}} for value in (1.0, 2.0, 3.0)]
    scores = {"accuracy": result}
    shown = "accuracy 2.0000 ± 2.4841  (95 % interval of 3 seeds)"
    assert summary({"seeds": seeds, "scores": scores, "most_frequent_label": None}) == shown
    alone = {
        "most_frequent_label": None,
        "seeds": seeds[:1],
        "scores": {"accuracy": interval([0.25])},
    }
    assert summary(alone) == "accuracy 0.2500  (1 seed, no interval)"


# --- files ----------------------------------------------------------------------------------------

MALFORMED = {
    "no header": ("classification", "nothing but text\nmore", r":1: 'nothing but text'"),
    "columns": ("classification", "text\tlabel\nfine\t1\nnot fine\n", r":3: 1 columns; expected 2"),
    "no label": ("classification", "text\tlabel\nfine\t1\nwell\t\n", r":3: nothing in column 'lab"),
    "unusual names": ("pair", "a,b,c\n1,2,3\n", r":1: columns \['a', 'b', 'c'\].*--text-columns"),
    "one text": ("pair", "text,label\na,b\n", "2 of texts"),
    "quotes": ("classification", 'text,label\na,b\n"c"d,e\n', r":3: "),
    "JSON": ("classification", '{"text": "a", "label": 1}\n{"text": \n', r":2: no JSON"),
    "half a pair": ("classification", '{"text": "a\\ud800", "label": 1}\n', r":1: half of a surr"),
    "no object": ("classification", '{"text": "a", "label": 1}\n3\n', r":2: a int"),
    "nothing": ("classification", "text\tlabel\n\n", "nothing; expected one example"),
    "one label": ("classification", "text\tlabel\na\tx\nb\tx\nc\tx\n", "one label alone"),
    "no number": ("regression", "text\tlabel\na\t.5\nb\t2\nc\t?\n", r":4: .*a number"),
    "one score": ("regression", "text\tlabel\na\t.5\nb\t.5\n", "one score alone"),
    "underscore": (
        "regression",
        "text\tlabel\na\t.5\nb\t1_000\n",
        r":3: the label '1_000'; .*\"_\"",
    ),
    "nan": ("regression", "text\tlabel\na\t.5\nb\tnan\n", r":3: the label 'nan'; .*finite"),
    "inf": ("regression", "text\tlabel\na\t.5\nb\t-inf\n", r":3: the label '-inf'; .*finite"),
    "two headers": (
        "classification",
        "text,label,Note,label\na,x,y,z\n",
        r":1: the column 'label' 2 times \(2, 4\)",
    ),
    "two cases": ("classification", "Text\ttext\tlabel\na\tb\tc\n", r"columns \['Text', 'text'\]"),
    "a list of texts": (
        "classification",
        '{"text": "a", "label": 1}\n{"text": ["a", "b"], "label": 2}\n',
        r":2: a list in column 'text'; expected a text",
    ),
    "an object as text": (
        "classification",
        '{"text": {"a": 1}, "label": 1}',
        r":1: a dict in column",
    ),
    "a number as text": ("classification", '{"text": 3, "label": 1}', r":1: the int 3 .*quotation"),
    "true as text": ("pair", '{"text1": "a", "text2": true, "label": 1}', r":1: the bool True"),
    "a list of labels": (
        "classification",
        '{"text": "a", "label": [1]}',
        r":1: a list in column 'la",
    ),
    "NaN as label": (
        "classification",
        '{"text": "a", "label": NaN}',
        r":1: nothing in column 'label",
    ),
    "a long number": (
        "classification",
        '{"text": "a", "label": 1' + "0" * 5000,
        ":1: JSON that cannot",
    ),
    "lone \\r": (
        "classification",
        "text,label\na,x\nb\rc,y\n",
        ":3: a carriage return inside a value",
    ),
    "two questions": (
        "qa",
        _qa().replace('"0 1"', '"0 0"'),
        r"the id '0 0' of two different questions, data\[0\].paragraphs\[0\].qas\[0\] and "
        r"data\[0\].paragraphs\[0\].qas\[1\]",
    ),
    "no texts": ("regression", "a\tlabel\na\t.5\n", "2 or 1 of texts"),
    "a word": ("tagging", "a\tX\n\nb\tY\nword\n", r":4: 'word'"),
    "three": ("tagging", "a\tX\n\nb\tY\nc\tX\tY\n", r":4: "),
    "not JSON": ("qa", '{"data": [\n{]}', r":2: no JSON"),
    "no data": ("qa", "{}", "an object without 'data'"),
    "wrong kind": ("qa", '{"data": [3]}', "a int where an object with 'paragraphs'"),
    "no answer": (
        "qa",
        re.sub(r'"answers": \[[^]]*\]', '"answers": []', _qa()),
        "0 answers and no",
    ),
    "an answer and none": (
        "qa",
        _qa().replace('"question":', '"is_impossible": true, "question":'),
        "1 answers and 'is_impossible'",
    ),
    "true as a place": (
        "qa",
        re.sub(r'"answer_start": \d+', '"answer_start": true', _qa()),
        "'answer_start' that is no int",
    ),
    "beyond fp32": ("regression", "text\tlabel\na\t.5\nb\t1e39\n", r":3: the label '1e39'; .*1e18"),
    "two labels": (
        "choice",
        '{"question": {"stem": "a", "choices": [{"label": "A", "text": "b"}, '
        '{"label": "A", "text": "c"}]}, "answerKey": "A"}',
        r":1: two choices labelled 'A'",
    ),
    "elsewhere": ("qa", _qa().replace('"answer_start": 4', '"answer_start": 5'), "character 5"),
    "answer": (
        "choice",
        '{"question": "a", "choices": ["b", "c"], "answer": 2}',
        r":1: .*answer 2",
    ),
    "count": (
        "choice",
        '{"question": "a", "choices": ["b", "c"], "answer": 0}\n'
        '{"question": "a", "choices": ["b", "c", "d"], "answer": 0}',
        r":2: 3 choices; expected 2",
    ),
}


@pytest.mark.parametrize("task, content, expected", MALFORMED.values(), ids=MALFORMED)
def test_malformed_files(task, content, expected, arguments, tmp_path):
    path = tmp_path / "broken.txt"
    path.write_text(content)
    with pytest.raises(DataError, match=expected) as raised:
        prepare_task(arguments(task, data=path, eval_data=copied(path)))
    assert str(path) in str(raised.value)


def test_words_without_tokens(arguments, tmp_path):
    path = tmp_path / "tags.txt"
    path.write_text("\u200b\tX\n\u200b\tY\n" * 2)
    task = prepare_task(arguments("tagging", data=path, eval_data=copied(path)))
    with pytest.raises(DataError, match=":1: words of which the tokenizer makes no token"):
        task.features(task.train)


def test_fields_of_any_length_and_letters_beyond_the_first_plane(tmp_path):
    path = tmp_path / "long.csv"
    path.write_text("text,label\n" + "a" * 200_000 + ",x\nb,y\n")
    assert len(read_examples("classification", path, None, None)[0].texts[0]) == 200_000
    path.write_text('{"text": "\\ud83d\\ude00", "label": "x"}\n{"text": "b", "label": "y"}\n')
    assert read_examples("classification", path, None, None)[0].texts == ("\U0001f600",)


def test_unreadable_files(tmp_path):
    path = tmp_path / "latin.tsv"
    with pytest.raises(DataError, match="does not exist"):
        read_examples("tagging", path)
    path.write_bytes(b"text\tlabel\nfine\t1\ncaf\xe9\t0\n")
    with pytest.raises(DataError, match=r"latin.tsv, which is not UTF-8: byte 0xe9 in line 3"):
        read_examples("classification", path)


def test_labels(tmp_path, arguments):
    path = tmp_path / "data.tsv"
    path.write_text("stars\tsaid\n10\ta\n9\tb\n-1\tc\n9\td\n")
    given = dict(data=path, text_columns=["said"], label_column="stars")
    task = prepare_task(arguments("classification", eval_data=copied(path), **given))
    assert task.names == ["-1", "9", "10"]
    assert [f["labels"] for f in task.features(task.train)[0]] == [2, 1, 0, 1]
    task = prepare_task(arguments("classification", eval_data=copied(path), threshold=9, **given))
    assert task.names == ["negative", "positive"]
    assert [f["labels"] for f in task.features(task.train)[0]] == [1, 0, 0, 0]
    other = tmp_path / "other.tsv"
    other.write_text("stars\tsaid\n8\ta\n")
    with pytest.raises(DataError, match=r"other.tsv:2: the label '8'; expected .*-1, 9, 10"):
        prepare_task(arguments("classification", eval_data=other, **given))


def test_columns_are_different(tmp_path):
    path = tmp_path / "data.tsv"
    path.write_text("text\tlabel\tother\na\t1\tb\n")
    with pytest.raises(ArgumentValueError, match=r"`label_column` got 'text', .*data.tsv:1\)"):
        read_examples("classification", path, ["text"], "text")
    with pytest.raises(ArgumentValueError, match=r"`text_columns` got \['text', 'text'\]"):
        read_examples("pair", path, ["text", "text"], "label")
    with pytest.raises(ArgumentValueError, match=r"`text_columns` got \['text', 'text'\]"):
        read_examples("seq2seq", path, ["text", "text"])
    # Columns without a name are common, and are not read.
    path.write_text("text,label,,\na,1,,\n")
    assert read_examples("classification", path)[0].texts == ("a",)
    path.write_text('{"source": "a", "target": 3}')
    with pytest.raises(DataError, match=r"data.tsv:1: the int 3 in column 'target'"):
        read_examples("seq2seq", path)


def test_a_carriage_return_ends_a_line_only_where_no_other_does(tmp_path):
    path = tmp_path / "data.tsv"
    path.write_bytes(b"text\tlabel\na\rb\t1\r\nc\t2\n")
    assert [e.texts for e in read_examples("classification", path)] == [("a\rb",), ("c",)]
    path.write_bytes(b"text\tlabel\ra\t1\rc\t2\r")
    assert [e.texts for e in read_examples("classification", path)] == [("a",), ("c",)]


def test_the_training_file_is_not_judged_by(arguments, files, tmp_path):
    link = tmp_path / "link.tsv"
    link.symlink_to(files["pair"])
    for eval_data in (files["pair"], link):
        with pytest.raises(ArgumentValueError, match="`eval_data` got .*, the file of --data; "):
            prepare_task(arguments("pair", eval_data=eval_data))


def test_the_same_question_twice_is_read_once(tmp_path, capsys):
    path = tmp_path / "squad.json"
    content = json.loads(_qa())
    content["data"].append({"paragraphs": content["data"][0]["paragraphs"][:1]})
    path.write_text(json.dumps(content))
    examples = read_examples("qa", path)
    assert len(examples) == len({example.place for example in examples}) == COUNT
    said = capsys.readouterr().err
    assert "2 questions are there twice" in said and said.count("\n") == 1
    assert "'0 0' (data[0].paragraphs[0].qas[0] and data[1].paragraphs[0].qas[0])" in said


def test_labels_that_may_be_one():
    alike = [
        ("good", "Good"),
        ("not sure", "not  sure"),
        ("caf\u00e9", "cafe\u0301"),
        ("good", "go\u200bod"),
        ("1", "01"),
        ("1", "1.0"),
        ("\u2764", "\u2764\ufe0f"),
        ("\uff21", "a"),
    ]
    for pair in alike:
        (line,) = doubtful_labels({pair[0]: 20, pair[1]: 3, "other": 9})
        assert f"{ascii(pair[0])} (20) and {ascii(pair[1])} (3) differ only in " in line
        assert ("how a number is written" in line) == (pair[0] == "1")
    assert (
        doubtful_labels(dict.fromkeys(["1", "-1", "10", "a", "b", "1_0", "good", "goods"], 1)) == []
    )
    for missing in ("nan", "None", "NULL", "n/a", "\u200b"):
        (line,) = doubtful_labels({"a": 1, missing: 2})
        assert f"{ascii(missing)} (2) may stand for labels that are missing" in line
    many = {f"{letter}{i}": 1 for i in range(9) for letter in "aA"}
    lines = doubtful_labels(many)
    assert len(lines) == 6 and "4 more such groups" in lines[-1]


def test_counts_of_labels():
    assert shown_counts({"rare": 1, "usual": 2000, "b": 7}) == "usual 2,000, b 7, rare 1"
    shown = shown_counts({f"l{i}": 100 - i for i in range(50)} | {"x" * 100: 200})
    assert shown.startswith(f"51 labels: {'x' * 39}… 200, l0 100, ")
    assert shown.endswith(", l10 90, … 35 more …, l46 54, l47 53, l48 52, l49 51")
    assert shown_counts({"a\tb": 1}) == r"'a\tb' 1"


def test_a_label_to_judge_by_that_looks_the_same(arguments, tmp_path):
    paths = [tmp_path / "train.tsv", tmp_path / "eval.tsv"]
    paths[0].write_text("text\tlabel\na\tcaf\u00e9\nb\tbar\n", encoding="utf-8")
    paths[1].write_text("text\tlabel\na\tcafe\u0301\n", encoding="utf-8")
    expected = r"eval.tsv:2: the label 'cafe\\u0301', which is written otherwise than 'caf\\xe9'"
    with pytest.raises(DataError, match=expected):
        prepare_task(arguments("classification", data=paths[0], eval_data=paths[1]))


def test_scores_to_judge_by_are_checked_before_the_training(arguments, tmp_path):
    path = tmp_path / "eval.tsv"
    path.write_text("sentence1\tsentence2\tscore\na\tb\t1\na\tb\tinf\n")
    with pytest.raises(DataError, match=r"eval.tsv:3: the label 'inf'; expected a number"):
        prepare_task(arguments("regression", eval_data=path))


@pytest.mark.slow
def test_labels_are_announced(arguments, tmp_path, capsys):
    path = tmp_path / "data.tsv"
    labels = ["yes"] * 5 + ["no"] * 20 + ["No", "nan"] * 2
    rows = (f"{sentence(i)}\t{label}" for i, label in enumerate(labels))
    path.write_text("\n".join(("text\tlabel", *rows)))
    finetune(arguments("classification", data=path, steps=1))
    said = capsys.readouterr().err
    assert re.search(r"(?m)^labels +no 18, yes 4, No 2, nan 2; to judge by: no 2, yes 1$", said), (
        said
    )
    assert "labels 'no' (20) and 'No' (2) differ only in case" in said
    assert "Warning: 'nan' (2) may stand for labels that are missing" in said
    finetune(arguments("regression", "scores", steps=1))
    assert "\nlabels" not in capsys.readouterr().err


# --- the baseline and what is written -------------------------------------------------------------


def test_one_answer_for_all_is_said(arguments, tmp_path, capsys, monkeypatch):
    """A model whose answer is always the same has the accuracy of the most frequent label."""
    score = TASKS["classification"].score

    def constant(self, examples, notes, logits):
        return score(self, examples, notes, [(torch.tensor([0.0, 1.0]),)] * len(logits))

    path, printed = tmp_path / "data.tsv", []
    rows = (f"{sentence(i)}\t{'bad' if i % 4 else 'good'}" for i in range(COUNT))
    path.write_text("\n".join(("text\tlabel", *rows)))
    args = arguments("classification", data=path, eval_data=copied(path), steps=1)
    with monkeypatch.context() as patched:
        patched.setattr(TASKS["classification"], "score", constant)
        metrics = finetune(args, printed.append)
    assert metrics["most_frequent_label"] == {"label": "bad", "accuracy": 0.75}
    (result,) = metrics["seeds"]
    assert result["most_frequent_prediction"] == {"prediction": "good", "share": 1.0}
    assert json.loads((tmp_path / "out" / "seed-0" / "result.json").read_text()) == result
    shown = "(1 seed, no interval; always the most frequent label: accuracy 0.7500; "
    assert summary(metrics).endswith(f"{shown}1 of 1 seed gave one answer to all)")
    assert result["one_answer"] == "all predictions are 'good'"
    assert metrics["seeds_with_one_answer"] == 1
    assert "matthews 0.0000  [all predictions are 'good']  loss" in "".join(printed)
    said = capsys.readouterr().err
    expected = "all predictions are 'good', which is the right answer of 25% of the examples"
    assert f"Warning: {expected}" in said and said.count("Warning") == 1


@pytest.mark.parametrize("task", FILES)
def test_one_answer_of_each_task(task, arguments):
    """One answer to all examples gets a warning, unless it is right for all."""
    task = prepare_task(arguments(task))
    right = [task.right(example) for example in task.test]

    def warnings(predictions) -> list[str]:
        return task.warnings({"most_frequent_prediction": task.most_frequent(predictions)})

    assert warnings(right) == []
    assert (task.baseline() is None) == (task.metrics[0] != "accuracy")
    one = [
        [right[0][0]] * len(each) if isinstance(each, list | tuple) else right[0] for each in right
    ]
    assert task.most_frequent(one)["share"] == 1
    assert "Warning: all predictions are " in warnings(one)[0]
    assert task.one_answer(task.most_frequent(one)).startswith("all predictions are ")
    if isinstance(task, Regression):  # a value that is the same but for rounding
        one[0] *= 1 + 1e-6
        assert "so no correlation is defined" in task.one_answer(task.most_frequent(one))
        one[0] *= 1.01
        assert task.one_answer(task.most_frequent(one)) == ""
        return
    if not isinstance(task, Tagging):  # one example of Tagging has several answers
        task.test = task.test[:1]
        assert warnings(one[:1]) == []
    assert task.warnings({}) == []  # the result of an older version


@pytest.mark.parametrize("held_out", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("task", FILES)
def test_predictions_lead_back_to_the_file(task, held_out, arguments, files, tmp_path):
    path = files[task]
    if not held_out:
        path = copied(path)
    args = arguments(task, steps=1, **({} if held_out else {"eval_data": path}))
    finetune(args)
    text = (tmp_path / "out" / "seed-0" / "predictions.json").read_text(encoding="utf-8")
    found = json.loads(text)
    assert found["file"] == str(path)
    records = found["predictions"]
    assert len(records) == COUNT // (10 if held_out else 1) == text.count("\n") - 3
    lines = path.read_text(encoding="utf-8-sig").splitlines()
    prepared = prepare_task(args)
    for record, example in zip(records, prepared.test, strict=True):
        assert record["texts"] == list(example.texts)
        assert type(record["prediction"]) is type(record["label"])
        if task == "qa":
            assert record["label"] == [words for _, words in example.target]
            assert f"question {record['id']}" in example.where
            continue
        line = lines[record["line"] - 1]
        if task == "choice":
            assert str(record["texts"][0]) in line and record["label"] == example.target
        elif task == "tagging":
            tagged = [
                f"{word}\t{tag}" for word, tag in zip(record["texts"], record["label"], strict=True)
            ]
            assert lines[record["line"] - 1 : record["line"] - 1 + len(tagged)] == tagged
        else:
            values = set(re.split("[\t,]", line.replace('"', "")))
            assert values == {*record["texts"], str(record["label"])}


def test_held_out_examples(files):
    for task, path in files.items():
        examples = read_examples(task, path)
        train, test = hold_out(examples, 0.1)
        assert (train, test) == hold_out(examples, 0.1)
        assert len(test) == COUNT // 10 and len(train) + len(test) == COUNT
        assert not {e.group for e in train} & {e.group for e in test}
    contexts = [
        {e.texts[1] for e in part} for part in hold_out(read_examples("qa", files["qa"]), 0.1)
    ]
    assert not contexts[0] & contexts[1]


REAL = {
    "classification": ("sentiment/movie.dev.tsv", 1060),
    "pair": ("pairs/mrpc.test.txt", 1725),
    "tagging": ("tagging/ewt-pos.dev.tsv", 2001),
    "qa": ("qa/xquad.en.json", 1190),
    "choice": ("choice/commonsenseqa.dev.jsonl", 950),
}


@pytest.mark.parametrize("task", REAL)
def test_real_files(task):
    folder = os.environ.get("FASTPLM_TEST_DATA")
    root = REPOSITORY.parent / "shared" / "data"
    name, count = REAL[task]
    path = (Path(folder) if folder else root) / name
    if not path.is_file():
        pytest.skip(f"no {path}: set FASTPLM_TEST_DATA to the folder that has {name}")
    assert len(read_examples(task, path)) == count


# --- examples and benchmark -----------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, task",
    [("finetune_classification", "classification"), ("finetune_question_answering", "qa")],
)
def test_examples(name, task, checkpoint, files, tmp_path, monkeypatch, capsys):
    path = REPOSITORY / "examples" / f"{name}.py"
    words = [str(path), str(checkpoint), str(files[task])]
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
    options = f"--model {checkpoint} --data {files['pair'].parent} --tasks pair --seeds 2"
    words = ["finetuning.py", *options.split(), "--results", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", words)
    assert benchmark["main"]() == 0
    shown = capsys.readouterr().out
    (page,) = tmp_path.rglob("finetuning.md")
    (rows,) = tmp_path.rglob("finetuning.csv")
    assert page.read_text().splitlines()[-1] in shown
    assert len(rows.read_text().splitlines()) == 1 + 3 * 2  # three scores, two libraries


# --- what is refused ------------------------------------------------------------------------------


def test_wrong_settings(arguments):
    wrong = {"steps": 10**19, "epochs": 0.0, "dropout": 1.0, "max_length": 8, "library": "keras"}
    for name, value in wrong.items():
        with pytest.raises(ArgumentValueError, match=f"`{name}`"):
            arguments("pair", **{name: value})
    with pytest.raises(ArgumentValueError, match="`threshold` got 0 with --task qa"):
        arguments("qa", threshold=0)
    with pytest.raises(ArgumentValueError, match="`max_length` got 129; expected 128"):
        prepare_task(arguments("pair", max_length=129))
    with pytest.raises(ArgumentValueError, match="`warmup` got 4"):
        finetune(arguments("tagging", warmup=4))
    with pytest.raises(DataError, match="holds no run"):
        finetune(arguments("tagging", "fresh", resume=True))


def test_wrong_models(arguments, checkpoint, tmp_path):
    with pytest.raises(DataError, match="a directory that tokenizer.save_pretrained wrote"):
        finetune(arguments("tagging", model=tmp_path / "missing"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    config = transformers.AutoConfig.from_pretrained(checkpoint)
    for name, lacks, expected in (
        ("other", "", r"lacks \d+ weights of a \w+, such as bert\."),
        ("small", "embeddings", "a tokenizer of"),
    ):
        path = tmp_path / name
        if lacks:
            config.vocab_size = 20
            transformers.BertModel(config).save_pretrained(path)
        else:
            model = transformers.BertModel(config)
            state = {f"encoder.{key}": value for key, value in model.state_dict().items()}
            model.save_pretrained(path, state_dict=state)
        tokenizer.save_pretrained(path)
        args = arguments("tagging", model=path)
        with pytest.raises(DataError, match=expected):
            build_model(args, prepare_task(args), 0)
    path = tmp_path / "distil"
    small = {"dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 16, "vocab_size": 80}
    config = transformers.DistilBertConfig(**small)
    transformers.DistilBertModel(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    args = arguments("tagging", model=path)
    with pytest.raises(DataError, match="a DistilBertForTokenClassification; .*--library"):
        build_model(args, prepare_task(args), 0)
    args.library = "transformers"
    build_model(args, prepare_task(args), 0)


def test_command_line_knows_every_task_and_setting():
    commands = next(
        action
        for action in cli._parser()._actions
        if isinstance(action, argparse._SubParsersAction)
    )
    options = {action.dest: action for action in commands.choices["finetune"]._actions}
    assert set(options["task"].choices) == {*TASKS, "seq2seq", "sop", "nsp"}
    assert set(options["library"].choices) == set(LIBRARIES)
    assert options.keys() - {"help", "config"} == FinetuneArguments.__dataclass_fields__.keys()
