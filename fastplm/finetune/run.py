"""Fine-tuning runs on labelled files: several seeds, one task, with fastplm or Transformers."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset
from transformers import PreTrainedModel, Trainer, TrainingArguments
from transformers.trainer_pt_utils import LengthGroupedSampler

from fastplm._machine import device_label
from fastplm.data._folder import MANIFEST, first_process, say, verify, write_json, write_manifest
from fastplm.data.examples import Example, read_examples, subset
from fastplm.errors import DataError, DivergenceError
from fastplm.finetune.data import hold_out, shown_counts
from fastplm.finetune.frozen import Frozen, Kept
from fastplm.finetune.layers import set_layer_rates
from fastplm.finetune.mixture import (
    counts_of_epoch,
    indices_of_parts,
    marked,
    of_epoch,
    read_parts,
)
from fastplm.finetune.models import (
    build_model,
    check_teacher,
    longest,
    read_config,
    read_tokenizer,
    teacher_logits,
    usual_learning_rate,
)
from fastplm.finetune.pairs import NAMES, SegmentPairs, read_segments
from fastplm.finetune.seq2seq import Seq2Seq, TwoSteps
from fastplm.finetune.settings import FinetuneArguments
from fastplm.finetune.tasks import (
    TASKS,
    Collator,
    Feature,
    Logits,
    Task,
    feature_length,
    predict,
)
from fastplm.finetune.teacher import of_batch
from fastplm.models._base import FastplmModel
from fastplm.run.folder import (
    check_same,
    checkpoints,
    last_checkpoint,
    move_aside,
    read_hashed,
    save_models,
    write_hashed,
    writing,
)
from fastplm.run.optimizer import Adafactor
from fastplm.run.report import block, counted, curve, scores_by_step, settings_of, versions
from fastplm.run.runner import Run
from fastplm.run.seeds import interval
from fastplm.run.trainer import RunTrainer, trained, training_arguments

KINDS: dict[str, type[Task]] = {
    **TASKS,
    "seq2seq": Seq2Seq,
    **dict.fromkeys(NAMES, SegmentPairs),
}
_HELD_OUT = 0.1


def finetune(
    args: FinetuneArguments, print_fn: Callable[[str], object] = lambda line: None
) -> dict[str, Any]:
    """Fine-tune once for each seed; write models, predictions, scores and ``metrics.json``.

    ``out/seed-0/`` … hold ``model/``, which loads in Transformers, ``predictions.json`` and
    ``result.json``; with several ``max_samples`` they are in ``out/samples-100/`` …. The order of
    the samples, the initial weights of the head and the steps depend only on the seed, so fastplm
    and Transformers get the same. Under torchrun every process calls this function, and the first
    process writes the files.

    Args:
        args: the settings.
        print_fn: called with one line of text for each seed.

    Returns:
        The content of ``metrics.json``.

    Raises:
        FastplmError: a file, the model, the output folder or a setting is wrong.
    """
    return Finetuning(args, print_fn).run()


class Point(NamedTuple):
    """One point of the learning curve: the fine-tuning with one number of examples."""

    folder: Path
    args: FinetuneArguments
    task: Task


class Finetuning(Run):
    """A run of ``fastplm finetune``: a training for each seed and number of examples.

    Attributes:
        processes: Accelerate's ``PartialState``: the processes of torchrun.
        points: one for each number of examples. ``task`` is the task of the last one.
        trials: one for each learning rate to choose from, all with one task: it has examples of
            the training data only, a tenth of them to judge by. ``on_trial`` are the others.
        trains: the training features of each point.
        ready: models that are already built, by the folder of their seed.
        trained: the seeds that this call has trained.
    """

    #: ``seeds`` is among them: a resumed run may have more seeds.
    free = frozenset("resume overwrite out save_every log_every seeds threads report_to".split())
    args: FinetuneArguments

    def __init__(self, args: FinetuneArguments, print_fn: Callable[[str], object]) -> None:
        from accelerate import PartialState

        super().__init__(args)
        self.print_fn = print_fn
        self.processes: Any = PartialState(cpu=not torch.cuda.is_available())
        self.device = self.processes.device
        self.ready: dict[Path, PreTrainedModel] = {}
        self.trained: list[int] = []

    def prepare(self) -> None:
        rates = self.args.rates()
        # Until a rate is chosen, the settings have one of them.
        curve = [("", rates[0][1])] if rates else self.args.curve()
        self.points = [Point(self.out / name, each, prepare_task(each)) for name, each in curve]
        self.task = self.points[-1].task
        if self.args.teacher is not None:
            check_teacher(self.args, self.task)
        task = prepare_task(rates[0][1], choosing=True) if rates else self.task
        self.trials = [Point(self.out / name, each, task) for name, each in rates]

    def facts(self) -> dict[str, Any]:
        args, task = self.args, self.task
        found: dict[str, Any] = {"processes": int(os.environ.get("WORLD_SIZE") or "1")}
        if args.learning_rate is None:
            found["learning_rate"] = usual_learning_rate(args, read_config(args))
        digest = hashlib.sha256()
        for example in (*task.train, *task.test):
            right = (example.target, *example.others) if example.others else example.target
            texts = (example.prefix, *example.texts) if example.prefix else example.texts
            digest.update(repr((texts, right)).encode())
        return {**found, "examples": digest.hexdigest()}

    def compare(self, before: dict[str, Any]) -> None:
        args, task, record = self.args, self.task, self.record
        for name in ("steps", "epochs"):
            expected = (
                f"{before[name]}, as in the run that is resumed: its learning rate falls to 0 over "
                "these steps, and a mean is taken over seeds of one schedule"
            )
            fix = "Train longer in another --out, or with --overwrite."
            args.check(name, record[name] == before[name], expected, fix, record[name])
        check_same("finetune", {n: record[n] for n in record if n != "examples"}, before)
        files = " and ".join(map(str, filter(None, (args.data, args.eval_data))))
        now = f"{len(task.train)} and {len(task.test)} now"
        got = f"{files}, whose examples have changed since ({now})"
        same = record["examples"] == before["examples"]
        fix = "Give the same file, or another --out."
        args.check("data", same, "the examples of the run that is resumed", fix, got)

    def build(self) -> None:
        self.trains = [_dataset(task) for _, _, task in self.points]
        first = self.trains[0]
        if self.trials:
            self.on_trial = first = _dataset(self.trials[0].task)
        for (folder, each, _), train in zip(self.points, self.trains, strict=True):
            # Called here for its checks: an error is raised before the first model is built.
            _training_arguments(each, train.epoch, self.args.seed, folder)
        if self.before is None:  # a model that cannot be built leaves the folder as it was
            (folder, each, task), seed = [*self.trials, *self.points][0], self.args.seed
            model = build_model(each, task, seed, first.kept)
            self.ready[folder / f"seed-{seed}"] = model
            if each.teacher is not None:
                first.teacher = teacher_logits(each, task, first.features, self.device)

    def train(self) -> dict[str, Any]:
        self.processes.wait_for_everyone()  # the first process moves the old files of the folder
        choice = self._choose_rate() if self.trials else {}
        points = [
            self._train_seeds(point, train)
            for point, train in zip(self.points, self.trains, strict=True)
        ]
        metrics = {
            "arguments": settings_of(self.args),
            "versions": versions(),
            "device": device_label(self.device),
            "eval_examples": len(self.task.test),
            "chance": self.task.chance(),
            "most_frequent_label": self.task.baseline(),
            "main_score": self.task.metrics[0],
            **choice,
            **points[-1],
        }
        if len(points) > 1:
            metrics["curve"] = points
        written = read_hashed(self.out / "metrics.json")
        if not self.trained and written is not None and written["seeds"] == metrics["seeds"]:
            say(f"The run in {self.out} is finished, all its seeds: nothing was changed.")
            return written
        self.processes.wait_for_everyone()
        if self.processes.is_main_process:
            with writing("finetune", self.out):
                write_hashed(self.out / "metrics.json", metrics)
        return metrics

    def _choose_rate(self) -> dict[str, Any]:
        """Train the first seed at each learning rate, and give the best one to all points.

        The best one has the highest first score on the examples held out for it; of equal ones it
        is the first that was given. A rate at which the training diverges is none to choose.
        """
        seed, task, examples = self.args.seed, self.trials[0].task, self.on_trial
        del self.on_trial  # what a frozen backbone keeps of them may be large
        rates: list[dict[str, Any]] = []
        for folder, args, _ in self.trials:
            # The examples to judge by are of --data.
            args = replace(args, eval_data=None, eval_targets=None)
            folder = folder / f"seed-{seed}"
            result = _finished(folder, self.processes)
            if result is None:
                self.trained.append(seed)
                model = self.ready.pop(folder, None)
                try:
                    result = _run(args, task, examples, seed, folder, model, keep=False)
                except DivergenceError as error:
                    result = {"scores": None, "diverged": str(error)}
                    if first_process():
                        with writing("finetune", folder):
                            folder.mkdir(parents=True, exist_ok=True)
                            write_json(folder / "result.json", result)
                            write_manifest(folder, ["result.json"])
                self.processes.wait_for_everyone()
            scores, rate = result["scores"], args.learning_rate
            shown = "it diverged" if scores is None else _shown(task, result)
            self.print_fn(f"learning rate {rate:g}, seed {seed}, on held-out examples: {shown}")
            rates.append({"learning_rate": rate, **result})
        name = task.metrics[0]
        able = [each for each in rates if each["scores"] is not None]
        if not able:
            raise DivergenceError(f"At each rate: {rates[0]['diverged']}")
        found = max(able, key=lambda each: each["scores"][name])
        best = found["learning_rate"]
        of_all = [each["learning_rate"] for each in rates]
        self.print_fn(f"learning rate {best:g} is taken, by its {name} on held-out examples")
        if best in (min(of_all), max(of_all)):
            end = "lowest" if best == min(of_all) else "highest"
            say(f"It is the {end} of the rates: one beyond it may be better still.")
        if found["one_answer"]:
            say(f"Warning: at this rate {found['one_answer']}, so the choice tells little.")
        self.points = [
            point._replace(args=replace(point.args, learning_rate=best)) for point in self.points
        ]
        held = {"train_examples": len(task.train), "eval_examples": len(task.test), "seed": seed}
        choice = {"learning_rate": best, "score": name, **held, "rates": rates}
        return {"learning_rate_choice": choice}

    def _train_seeds(self, point: Point, train: FeatureDataset) -> dict[str, Any]:
        """Train all seeds on one set of examples, or read their results."""
        out, args, task = point
        results = []
        for seed in range(args.seed, args.seed + args.seeds):
            folder = out / f"seed-{seed}"
            result = _finished(folder, self.processes)
            if result is None:
                self.trained.append(seed)
                try:
                    model, keep = self.ready.pop(folder, None), not args.own_head
                    result = _run(args, task, train, seed, folder, model, keep)
                except DivergenceError as error:
                    raise DivergenceError(f"{error} This was seed {seed} in {out}.") from error
                self.processes.wait_for_everyone()
            results.append(result)
            what = "" if out == self.out else f"{len(task.train)} examples, "
            self.print_fn(f"{what}seed {seed}: {_shown(task, result)}")
            for said in task.warnings(result):
                say(said)
        scores_of = {name: [result["scores"][name] for result in results] for name in task.metrics}
        return {
            "train_examples": len(task.train),
            "train_features": len(train),
            "seeds": results,
            "scores": {name: interval(values) for name, values in scores_of.items()},
            "seeds_with_one_answer": sum(bool(result.get("one_answer")) for result in results),
        }

    def announcement(self) -> str:
        args, task, device = self.args, self.task, self.device
        held_out = "" if args.eval_data is not None else ", held out of the same file"
        threads = f", {torch.get_num_threads()} threads" if device.type == "cpu" else ""
        counts, to_judge = task.label_counts(task.train), task.label_counts(task.test)
        train = f"{len(task.train):,} examples ({len(self.trains[-1]):,} features) to train on, "
        if args.own_head:
            train, held_out = "", ", and nothing is trained"
        rows = {"data": f"{args.data}: {train}{len(task.test):,} to judge by{held_out}"}
        if self.trials:
            on = self.trials[0].task
            rates = ", ".join(f"{each.args.learning_rate:g}" for each in self.trials)
            rows["rate"] = (
                f"the best of {rates} on {len(on.test):,} of the examples to train on, when seed "
                f"{args.seed} was trained on the other {len(on.train):,}"
            )
        if counts is not None and to_judge is not None:
            rows["labels"] = f"{shown_counts(counts)}; to judge by: {shown_counts(to_judge)}"
        parts = indices_of_parts(task.train)
        if parts:
            each = counts_of_epoch(args, [len(part) for part in parts.values()])
            read = zip(each, parts, strict=True)
            rows["an epoch"] = ", ".join(f"{count:,} of {name}" for count, name in read)
        if args.teacher is not None:
            share = f"{args.teacher_weight:g} of the loss, temperature {args.teacher_temperature:g}"
            rows["teacher"] = f"{args.teacher}: {share}"
        rows |= {
            "model": f"{_source(args)}, with the classes of {args.library}",
            "precision": "bf16, as --bf16 says" if args.bf16 else "fp32, as --bf16 was not given",
            "device": f"{device}{threads}",
            "results": f"{args.out}, {counted(args.seeds, 'seed')}",
        }
        return "\n".join([block(rows), *task.doubts()])


def _shown(task: Task, result: dict[str, Any]) -> str:
    """The scores of a seed; beside them, if its model gives all examples one answer."""
    scores = "  ".join(f"{name} {result['scores'][name]:.4f}" for name in task.metrics)
    if result.get("one_answer"):
        scores += f"  [{result['one_answer']}]"
    if "source" in result:
        scores += f"  source gain {result['source']['gain']:.4f}"
    if result["loss"] is None:
        return scores
    return f"{scores}  loss {result['loss']:.4f}  {result['train_seconds']:.1f} s"


def _source(args: FinetuneArguments) -> str:
    """Where the weights of a run come from."""
    if args.encoder is None:
        return str(args.model)
    parts = [
        f"{part} {path}{'' if args.warm in ('both', part) else ' (new weights)'}"
        for part, path in (("encoder", args.encoder), ("decoder", args.decoder or args.encoder))
    ]
    return " and ".join(parts) + (", one set of weights" if args.share else "")


def _finished(out: Path, processes: Any) -> dict[str, Any] | None:
    """The result of a seed that an earlier call trained, if all its files are complete."""
    if not (out / MANIFEST).exists():
        return None
    wrong = verify(out)
    if wrong is None:
        return json.loads((out / "result.json").read_text("utf-8"))
    processes.wait_for_everyone()
    if processes.is_main_process:
        old = move_aside(out)
        say(f"{out} is not complete: {wrong}. It is trained again, and what was there is in {old}.")
    processes.wait_for_everyone()
    return None


def summary(metrics: dict[str, Any]) -> str:
    """The last line that a run prints: each score's mean and half the width of its interval.

    A run with several numbers of examples prints a line for each of them.
    """
    count = len(metrics["seeds"])
    what = "1 seed, no interval" if count == 1 else f"95 % interval of {count} seeds"
    usual = metrics["most_frequent_label"]
    if usual is not None:
        what += f"; always the most frequent label: accuracy {usual['accuracy']:.4f}"
    lines = []
    for point in metrics.get("curve", [metrics]):
        start = f"{point['train_examples']} examples: " if "curve" in metrics else ""
        parts = []
        for name, score in point["scores"].items():
            width = "" if score["half_width"] is None else f" ± {score['half_width']:.4f}"
            parts.append(f"{name} {score['mean']:.4f}{width}")
        same = point.get("seeds_with_one_answer", 0)
        told = f"; {same} of {counted(count, 'seed')} gave one answer to all" if same else ""
        lines.append(f"{start}{'  '.join(parts)}  ({what}{told})")
    return "\n".join(lines)


# --- data ----------------------------------------------------------------------------------------


def prepare_task(args: FinetuneArguments, *, choosing: bool = False) -> Task:
    """The task of a run, with its examples and tokenizer.

    Args:
        args: the settings.
        choosing: whether it is to choose a setting by: its training examples are then divided
            again, and those that the run is judged by are not in it.
    """
    tokenizer, config = read_tokenizer(args), read_config(args)
    kind = KINDS[args.task]
    length = longest(args, kind.max_length, config, tokenizer)
    train, test, known = _divided(args, kind, length)
    if args.task in ("choice", "regression"):
        ours, theirs = len(train[0].texts), len(test[0].texts)
        expected, fix = f"{ours}, as in the training data", "Give data of one kind."
        got = f"{theirs} texts an example, the choices among them"
        args.check("eval_data", ours == theirs, expected, fix, got, DataError)
    assert not isinstance(args.max_samples, list), "see FinetuneArguments.curve"
    train = subset(train, args.max_samples)
    if choosing:
        fix = "Give one --learning-rate."
        train, test = hold_out(train, _HELD_OUT, kind.labels(known, args), fix)
        test = subset(test, args.max_eval_samples)
    return kind(args, config, train, test, tokenizer, length, known)


def _divided(
    args: FinetuneArguments, kind: type[Task], length: int
) -> tuple[list[Example], list[Example], list[Example]]:
    """The examples to train on, those to judge by, and those whose labels are the classes."""
    train: list[Example] = []
    test: list[Example] = []
    for number, (name, part) in enumerate(read_parts(args).items()):
        to_train, to_judge, _ = _divided(part, kind, length)
        train += marked(to_train, number, name, part.prefix)
        test += marked(to_judge, number, name, part.prefix)
    if train:
        return train, test, train
    _check_other_files(args)
    train = known = _read(args, args.data, args.targets, length)
    if args.own_head:
        train = test = known
    elif args.eval_data is None:
        train, test = hold_out(train, _HELD_OUT, kind.labels(train, args))
    else:
        test = _read(args, args.eval_data, args.eval_targets, length)
    test = subset(test, args.max_eval_samples)
    return test if args.own_head else train, test, known


def _read(args: FinetuneArguments, path: str | Path, targets: Any, length: int) -> list[Example]:
    """The examples of a file; pairs of text have half as many words as tokens."""
    if args.task in NAMES:
        return read_segments(args.task, path, length // 2)
    columns = (args.text_columns, args.label_column)
    return read_examples(args.task, path, *columns, targets=targets)


def _check_other_files(args: FinetuneArguments) -> None:
    """Check that a model is not judged by what it was trained on."""
    targets = [("eval_targets", path, "targets") for path in args.eval_targets or ()]
    for name, path, other in (("eval_data", args.eval_data, "data"), *targets):
        trained_on = getattr(args, other)
        try:
            same = None not in (path, trained_on) and os.path.samefile(str(path), trained_on)
        except (OSError, ValueError):
            continue  # reading the file will raise an error about its path
        expected = "a file of examples that the model is not trained on"
        fix = "Give another file, or leave it out: a tenth of --data is then held out."
        args.check(name, not same, expected, fix, f"{path}, the file of --{other}")


class FeatureDataset(Dataset):
    """Features, their lengths, and the outputs that a frozen backbone has computed for them.

    ``teacher`` has the logits of a teacher for each, if there is one. With ``counts``, an epoch
    reads so many of each of the ``parts``, and ``epoch`` is how many that is in all.
    """

    def __init__(
        self, features: list[Feature], parts: Iterable[list[int]] = (), counts: Iterable[int] = ()
    ) -> None:
        self.features = features
        self.parts, self.counts = list(parts), list(counts)
        self.epoch = sum(self.counts) or len(features)
        self.lengths = [feature_length(feature) for feature in features]
        self.kept: dict[Any, Kept] = {}
        self.teacher: list[Logits] = []

    def __len__(self) -> int:
        return len(self.features)

    def __getitem__(self, index: int) -> Feature:
        feature = {**self.features[index], "sample_index": index}
        return {**feature, "teacher": self.teacher[index]} if self.teacher else feature


def _dataset(task: Task) -> FeatureDataset:
    """The training examples of a task."""
    args, parts = task.args, list(indices_of_parts(task.train).values())
    counts: list[int] = []
    if args.mixture_cap is not None or args.mixture_temperature != 1:
        counts = counts_of_epoch(args, [len(part) for part in parts])
    return FeatureDataset(task.features(task.train)[0], parts, counts)


# --- one seed -------------------------------------------------------------------------------------


class FinetuningTrainer(RunTrainer):
    """``RunTrainer`` whose batches depend on the seed alone.

    Samples of similar length share a batch, as with ``group_by_length``. The order comes from a
    separate generator, so random numbers drawn for dropout do not change the next epoch.
    """

    where = "finetune"
    task: Task

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(
            functools.partial(self.task.outputs, model), inputs, *args, **kwargs
        )

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        there = self.optimizer is not None
        optimizer = super().create_optimizer(*args, **kwargs)
        if self.task.args.layer_decay != 1 and not there:
            set_layer_rates(optimizer, self.model, self.task.args.layer_decay)
        return optimizer

    def get_train_dataloader(self) -> DataLoader:
        loader = DataLoader(
            self.train_dataset,
            self.args.train_batch_size,
            sampler=_LengthSampler(self),
            collate_fn=self.data_collator,
            pin_memory=self.args.dataloader_pin_memory,
        )
        return self.accelerator.prepare(loader)

    def count(self, batches: list[dict[str, Any]]) -> int:
        tokens = sum(int(batch["attention_mask"].sum()) for batch in batches)
        if self.task.args.task == "seq2seq":
            tokens += sum(int((batch["labels"] != -100).sum()) for batch in batches)
        return tokens


class _LengthSampler(LengthGroupedSampler):
    lengths: list[int]

    def __init__(self, trainer: Trainer) -> None:
        dataset: Any = trainer.train_dataset
        batch = trainer.args.train_batch_size * trainer.args.world_size
        # The examples that an epoch of a mixture reads are known when it begins, their number now.
        super().__init__(batch, lengths=dataset.lengths[: dataset.epoch])
        self.trainer, self.dataset = trainer, dataset
        generator = torch.Generator().manual_seed(trainer.args.seed)
        self.parts = [
            [part[i] for i in torch.randperm(len(part), generator=generator, device="cpu").tolist()]
            for part in (dataset.parts if dataset.counts else ())
        ]

    def __iter__(self) -> Iterator[int]:
        # The step gives the epoch also after a resume.
        epoch = self.trainer.state.global_step // math.ceil(len(self.lengths) / self.batch_size)
        chosen = of_epoch(self.parts, self.dataset.counts, epoch)
        if chosen:
            self.lengths = [self.dataset.lengths[index] for index in chosen]
        # PyTorch's generator uses 32 bits of a seed, which cannot hold both seed and epoch.
        seeds = torch.Generator().manual_seed(self.trainer.args.seed)
        seed = int(torch.randint(1 << 32, (epoch + 1,), generator=seeds, device="cpu")[-1])
        self.generator = torch.Generator().manual_seed(seed)
        order = super().__iter__()
        return (chosen[index] for index in order) if chosen else order


def make_trainer(
    args: FinetuneArguments,
    task: Task,
    model: PreTrainedModel,
    features: FeatureDataset,
    seed: int,
    out: Path,
) -> FinetuningTrainer:
    """The Trainer that trains a model of ``build_model`` on ``features``."""
    settings = _training_arguments(args, features.epoch, seed, out)
    if args.learning_rate is None:
        settings.learning_rate = usual_learning_rate(args, model.config)
    ours = args.library == "fastplm" and isinstance(model, FastplmModel)
    adafactor = (Adafactor, {"lr": settings.learning_rate})
    trainer = FinetuningTrainer(
        model=model,
        args=settings,
        train_dataset=features,
        data_collator=_numbered(task.collator(), takes_index=ours),
        processing_class=task.tokenizer,
        optimizer_cls_and_kwargs=adafactor if args.optimizer == "adafactor" else None,
    )
    trainer.task = task
    if args.source_encoder_layers is not None:
        first = args.source_encoder_steps
        trainer.add_callback(TwoSteps(settings.max_steps // 2 if first is None else first))
    trainer.eval_every = args.eval_every
    if args.eval_every is not None:
        trainer.score_fn = lambda: task.evaluate(trainer)[0]
    return trainer


def _numbered(collator: Collator, *, takes_index: bool) -> Collator:
    """A collator that adds ``sample_index`` if ``takes_index``: fastplm's dropout depends on it.

    ``sample_index`` is int64 [B], or [B, C] if an example consists of C sequences. Where features
    have the logits of a teacher, so has the batch.
    """

    def collate(features: list[Feature]) -> Any:
        index = [feature.pop("sample_index", None) for feature in features]
        teacher = [feature.pop("teacher", None) for feature in features]
        batch = collator(features)
        if None not in teacher:
            batch["teacher"] = of_batch(teacher)
        if takes_index and None not in index:
            of_each = batch["input_ids"].shape[1:-1].numel()
            numbers = torch.tensor(index, device="cpu")[:, None] * of_each
            numbers = numbers + torch.arange(of_each, device="cpu")
            batch["sample_index"] = numbers.view(batch["input_ids"].shape[:-1])
        return batch

    return collate


def _run(
    args: FinetuneArguments,
    task: Task,
    features: FeatureDataset,
    seed: int,
    out: Path,
    model: PreTrainedModel | None,
    keep: bool = True,
) -> dict[str, Any]:
    """Train and judge one seed, and write its files; the model only if it is to be kept."""
    checkpoint = last_checkpoint(out, say)
    if checkpoint is None and checkpoints(out):
        say(f"No checkpoint of seed {seed} is complete: it is trained from its beginning.")
    if model is None:
        model = build_model(args, task, seed, features.kept)
    trainer = make_trainer(args, task, model, features, seed, out)
    if args.teacher is not None and not features.teacher:
        features.teacher = teacher_logits(args, task, features.features, trainer.args.device)
    if args.freeze:
        _compute_once(trainer, model.frozen, features)
    training = trained(trainer, checkpoint, args.report_to)
    with contextlib.nullcontext() if args.own_head else training:
        scores, predictions = task.evaluate(trainer)
        read = task.reading(trainer)
        history = curve(trainer.state.log_history)
        by_step = scores_by_step(trainer.state.log_history)
        trainer.log({f"eval_{name}": value for name, value in scores.items()})
    most_frequent = task.most_frequent(predictions)
    result = {
        "seed": seed,
        "scores": scores,
        "most_frequent_prediction": most_frequent,
        "one_answer": task.one_answer(most_frequent) or None,
        "steps": trainer.state.global_step,
        "loss": history[-1]["loss"] if history else None,
        # The time of all steps, including those before a resume.
        "train_seconds": trainer.train_seconds,
        "tokens_per_second": trainer.tokens_per_second,
        "learning_rate": trainer.args.learning_rate,
        "model": str(out / "model" if keep else args.checkpoint),
        "history": history,
        "scores_by_step": by_step,
        **read,
    }
    if first_process():
        with writing("finetune", out):
            if keep:
                save_models(out, {"model": model}, task.tokenizers)
            _write_predictions(out / "predictions.json", args, task.records(predictions))
            write_json(out / "result.json", result)
            write_manifest(out, ["model", "predictions.json", "result.json"][0 if keep else 1 :])
        for _, checkpoint in checkpoints(out):
            shutil.rmtree(checkpoint)
    return result


def _write_predictions(path: Path, args: FinetuneArguments, records: list[Any]) -> None:
    """Write JSON with one example a line; the folder's manifest says whether it is complete."""
    file = args.data if args.eval_data is None else args.eval_data
    lines = ",\n".join(json.dumps(record, ensure_ascii=False) for record in records)
    text = f'{{"file": {json.dumps(str(file))},\n"predictions": [\n{lines}\n]}}\n'
    # JSON may hold half a surrogate pair, UTF-8 may not: it is written as an escape.
    path.write_bytes(text.encode("utf-8", "backslashreplace"))


def _compute_once(trainer: FinetuningTrainer, frozen: Frozen, features: FeatureDataset) -> None:
    """Let a frozen backbone compute all examples before the training, if the run reads them all.

    They are always computed in the same order, so the outputs that a resumed run reads do not
    depend on where it stopped.
    """
    if trainer.args.max_steps * trainer.args.train_batch_size < len(features) or features.kept:
        return
    frozen.keeps = True
    predict(trainer, trainer.task, features.features)
    frozen.keeps = False


def _training_arguments(
    args: FinetuneArguments, samples: int, seed: int, out: Path
) -> TrainingArguments:
    rate = args.learning_rate
    assert not isinstance(rate, list), "see FinetuneArguments.rates"
    settings = training_arguments(
        args,
        out,
        bf16=args.bf16,
        per_device_eval_batch_size=args.batch_size,
        learning_rate=5e-5 if rate is None else rate,
        weight_decay=args.weight_decay,
        lr_scheduler_type="linear" if args.optimizer == "adamw" else "constant_with_warmup",
        seed=seed,
        save_total_limit=1,
    )
    steps = args.steps
    if steps is None:
        batch = settings.train_batch_size * settings.world_size
        steps = max(1, math.ceil(args.epochs * math.ceil(samples / batch)))
    warmup = steps // 10 if args.warmup is None else args.warmup
    expected = f"0 to {steps}, the steps of the run"
    args.check("warmup", warmup <= steps, expected, "Lower it.", warmup)
    settings.max_steps, settings.warmup_steps = steps, warmup
    return settings
