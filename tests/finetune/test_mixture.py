"""One model of several tasks of sequence to sequence."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from fastplm.errors import ArgumentValueError, DataError, FastplmError
from fastplm.finetune.data import prepare_task
from fastplm.finetune.mixture import counts_of_epoch, of_epoch
from fastplm.finetune.models import build_model
from fastplm.finetune.run import finetune
from fastplm.finetune.settings import FinetuneArguments
from fastplm.finetune.trainer import make_trainer

from .conftest import GERMAN

WORDS = [*GERMAN][:10]
SOURCES = [f"the {a} on the {b}" for a in WORDS for b in WORDS[:4]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A table of 40 examples, and aligned files of 10 and 4."""
    path = tmp_path_factory.mktemp("mixture")
    rows = (f"{source}\t{source}" for source in SOURCES)
    (path / "copy.tsv").write_text("\n".join(("source\ttarget", *rows)))
    for name, lines in (("train", SOURCES[::4]), ("test", SOURCES[1::10])):
        (path / name).write_text("\n".join(lines))
        (path / f"{name}.last").write_text("\n".join(line.split()[-1] for line in lines))
    return path


@pytest.fixture
def arguments(folder, writing, tmp_path):
    def build(parts: str | None = None, **options) -> FinetuneArguments:
        path = tmp_path / "tasks.yaml"
        last = {name: str(folder / name) for name in ("train", "test")}
        path.write_text(
            parts
            or f"copying: {{data: {folder}/copy.tsv, prefix: 'the red '}}\n"
            "last:\n"
            f"  data: {last['train']}\n"
            f"  targets: {last['train']}.last\n"
            f"  eval_data: {last['test']}\n"
            f"  eval_targets: [{last['test']}.last]\n"
            "  prefix: 'the big '\n"
        )
        settings = {"data": path, "prefix": "", "beams": 1, "steps": 2, "batch_size": 4}
        return writing("t5", "out", **settings | {"max_target_length": 8} | options)

    return build


def test_each_task_has_its_prefix_and_its_scores(arguments, tmp_path, capsys):
    pytest.importorskip("sacrebleu")
    pytest.importorskip("rouge_score")
    args = arguments()
    task = prepare_task(args)
    assert Counter(example.part for example in task.train) == {"copying": 36, "last": 10}
    assert Counter(example.part for example in task.test) == {"copying": 4, "last": 4}
    assert len({example.group for example in task.train}) == 46
    features, _ = task.features(task.train)
    for feature, example in zip(features, task.train, strict=True):
        source = task.tokenizer.decode(feature["input_ids"], skip_special_tokens=True)
        start = {"copying": "the red ", "last": "the big "}[example.part]
        assert source == start + example.texts[0]
    metrics = finetune(args)
    scores = {name: score["mean"] for name, score in metrics["scores"].items()}
    assert len(scores) == 3 * 6 and metrics["main_score"] == "bleu"
    for name in ("bleu", "rouge1", "exact_match"):
        mean = (scores[f"copying/{name}"] + scores[f"last/{name}"]) / 2
        assert scores[name] == pytest.approx(mean)
    records = json.loads((tmp_path / "out" / "seed-0" / "predictions.json").read_text())
    assert Counter(record["task"] for record in records["predictions"]) == {"copying": 4, "last": 4}
    assert "an epoch   36 of copying, 10 of last" in capsys.readouterr().err


def test_another_source_is_one_of_the_same_task(arguments, monkeypatch):
    """With one of another task, a model that reads its prefix alone would seem to read it all."""
    task, asked = prepare_task(arguments()), []
    monkeypatch.setattr(task, "_loss", lambda trainer, sources, targets: asked.append(sources) or 1)
    assert task.reading(None)["source"]["gain"] == 0
    own, others = asked
    assert own == [*range(8)] == sorted(others)
    pairs = [(i, task.test[i].part, j, task.test[j].part) for i, j in enumerate(others)]
    assert all(i != j and part == other for i, part, j, other in pairs)


def test_a_task_with_more_examples_than_the_cap_reads_others_in_each_epoch(arguments, tmp_path):
    """With 36 and 10 examples and a cap of 12, an epoch has 12 and 10 of them: 6 steps of 4."""
    args = arguments(mixture_cap=12, steps=None, epochs=3)
    task = prepare_task(args)
    assert task.dataset.epoch == 22 and len(task.dataset) == 46
    trainer = make_trainer(task, build_model(task, 0), 0, tmp_path)
    assert trainer.args.max_steps == 18
    seen, collate = [], trainer.data_collator

    def record(batch):
        seen.append([feature["sample_index"] for feature in batch])
        return collate(batch)

    trainer.data_collator = record
    trainer.train()
    epochs = [[i for batch in seen[at : at + 6] for i in batch] for at in (0, 6, 12)]
    for epoch in epochs:
        assert len({*epoch}) == len(epoch) == 22
        assert Counter(task.train[i].part for i in epoch) == {"copying": 12, "last": 10}
    first = [{i for i in epoch if task.train[i].part == "copying"} for epoch in epochs]
    assert len(first[0] | first[1] | first[2]) == 36
    assert of_epoch([[7, 8, 9], [1]], [2, 1], 1) == [9, 7, 1]


@pytest.mark.parametrize(
    "options, counts",
    [
        ({}, [36, 10]),
        ({"mixture_temperature": 2.0}, [30, 16]),  # 6 to sqrt(10)
        ({"mixture_temperature": 1e6}, [23, 23]),
        ({"mixture_cap": 16, "mixture_temperature": 2.0}, [15, 11]),  # 4 to sqrt(10)
    ],
)
def test_a_temperature_gives_small_tasks_more(arguments, tmp_path, capsys, options, counts):
    args = arguments(**options, steps=None, epochs=1)
    assert counts_of_epoch(args, [36, 10]) == counts
    task = prepare_task(args)
    assert task.dataset.epoch == sum(counts)
    trainer = make_trainer(task, build_model(task, 0), 0, tmp_path)
    order = [index for index in trainer._get_train_sampler()]
    assert Counter(task.train[i].part for i in order) == dict(
        zip(("copying", "last"), counts, strict=True)
    )
    # The examples of a task that is read more than once come as often as each other, but for one.
    times = Counter(i for i in order if task.train[i].part == "last").values()
    assert max(times) - min(times) <= 1


@pytest.mark.parametrize(
    "parts, said",
    [
        ("a: {data: x}", "has no two tasks by name"),
        ("a: {data: x}\nb: 3", "where b has no settings"),
        ("a: {data: x}\nb: {prefix: y}", "where b has no data"),
        ("a: {data: x}\nb: {data: y, prefx: z}", "where b has 'prefx'; .*Did you mean prefix?"),
        ("a: {data: x}\nb: {data: y, prefix: yes}", "where prefix of b is True; .*quotes"),
        ("a: {data: x}\na: {data: y}\nb: {data: z}", r"tasks.yaml' \(it has 'a' twice"),
        ("a: {data: x}\nb: {data: y.yaml}", "where b is a mixture"),
        ("a: {data: x", r"tasks.yaml' \(while parsing"),
    ],
)
def test_bad_mixtures(parts, said, arguments):
    with pytest.raises(FastplmError, match=f"`data` got .*{said}"):
        prepare_task(arguments(parts))


def test_settings_that_do_not_fit_a_mixture(arguments, folder, tmp_path):
    with pytest.raises(ArgumentValueError, match="`prefix` got a with --data .*; expected nothing"):
        arguments(prefix="a")
    with pytest.raises(ArgumentValueError, match="`mixture_cap` got 3 with --data .*copy.tsv"):
        arguments(data=folder / "copy.tsv", mixture_cap=3)
    with pytest.raises(ArgumentValueError, match="`mixture_temperature` got 2.0 with --data .*tsv"):
        arguments(data=folder / "copy.tsv", mixture_temperature=2.0)
    path, name = folder / "copy.tsv", "`eval_data` got .*copy.tsv, the file of --data"
    with pytest.raises(ArgumentValueError, match=name):
        prepare_task(arguments(f"a: {{data: {path}, eval_data: {path}}}\nb: {{data: {path}}}"))
    with pytest.raises(DataError, match="missing.tsv, a path that does not exist"):
        prepare_task(arguments(f"a: {{data: {tmp_path}/missing.tsv}}\nb: {{data: {path}}}"))
