"""Fine-tuning runs on labelled files: several seeds, one task, with fastplm or Transformers."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from fastplm._machine import device_label, in_bf16
from fastplm.data._folder import MANIFEST, first_process, say, verify, write_json, write_manifest
from fastplm.data._output import move_aside
from fastplm.errors import DivergenceError
from fastplm.finetune.data import prepare_task
from fastplm.finetune.models import build_model, usual_learning_rate
from fastplm.finetune.report import announcement, scores_of, write_seeds_card
from fastplm.finetune.settings import FinetuneArguments
from fastplm.finetune.tasks._task import Task, predict
from fastplm.finetune.teacher import order_of_labels, teacher_logits
from fastplm.finetune.trainer import FinetuningTrainer, arguments_of, make_trainer
from fastplm.run.folder import (
    check_same,
    checkpoints,
    ending,
    last_checkpoint,
    read_hashed,
    save_models,
    write_hashed,
    writing,
)
from fastplm.run.fsdp import states_of
from fastplm.run.report import curve, scores_by_step, settings_of, versions
from fastplm.run.runner import Run
from fastplm.run.seeds import interval
from fastplm.run.trainer import trained


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


class Finetuning(Run):
    """A run of ``fastplm finetune``: a training for each seed and number of examples.

    Attributes:
        processes: Accelerate's ``PartialState``: the processes of torchrun.
        points: (folder, task) for each number of examples. ``task`` is the last of them.
        trials: the same for each learning rate to choose from. Their examples are of the training
            data only, a tenth of them to judge by.
        ready: the model of the first seed, which is built before anything is written.
        changed: whether this call has trained a seed.
    """

    #: ``seeds`` is among them: a resumed run may have more seeds.
    ignored_on_resume = frozenset(
        "resume overwrite out save_every log_every seeds threads report_to".split()
    )
    args: FinetuneArguments

    def __init__(self, args: FinetuneArguments, print_fn: Callable[[str], object]) -> None:
        from accelerate import PartialState

        super().__init__(args)
        self.print_fn = print_fn
        self.processes: Any = PartialState(cpu=not torch.cuda.is_available())
        self.device = self.processes.device
        self.ready: PreTrainedModel | None = None
        self.changed = False

    # --- before the first step --------------------------------------------------------------------

    def read(self) -> dict[str, Any]:
        args = self.args
        if self.before is not None and args.is_default("precision"):
            args = args.changed(precision=_precision_of(self.before))
        rates = args.rates()
        # Until a rate is chosen, the settings have one of them.
        curve = [("", rates[0][1])] if rates else args.curve()
        self.points = [(self.out / name, prepare_task(each)) for name, each in curve]
        self.task = self.points[-1][1]
        if args.teacher is not None:
            order_of_labels(self.task)  # an error now, if it has others
        self.trials: list[tuple[Path, Task]] = []
        if rates:
            task = prepare_task(rates[0][1], choosing=True)
            # The examples to judge by are of --data.
            own: dict[str, Any] = {"eval_data": None, "eval_targets": None}
            for name, each in rates:
                trial = task.with_settings(learning_rate=each.learning_rate, **own)
                self.trials.append((self.out / name, trial))
        self.args = args.changed(pooling=self.task.args.pooling)
        return self._facts()

    def _facts(self) -> dict[str, Any]:
        """What the results depend on beside the settings."""
        args, task = self.args, self.task
        found: dict[str, Any] = {"processes": int(os.environ.get("WORLD_SIZE") or "1")}
        found["precision"] = "bf16" if in_bf16(args.precision) else "fp32"
        if args.learning_rate is None:
            found["learning_rate"] = usual_learning_rate(args, task.checkpoint_config)
        digest = hashlib.sha256()
        for example in (*task.train, *task.test):
            right = (example.target, *example.others) if example.others else example.target
            texts = (example.prefix, *example.texts) if example.prefix else example.texts
            digest.update(repr((texts, right)).encode())
        return {**found, "examples": digest.hexdigest()}

    def compare(self, before: dict[str, Any]) -> None:
        args, task, record = self.args, self.task, self.record
        same = {n: record[n] for n in record if n != "examples"}
        began = {"fsdp": False} | before | {"precision": _precision_of(before)}
        if args.is_default("pooling") and began.get("pooling") is None:
            began["pooling"] = args.pooling  # runs of several points once had none of the model's
        check_same("finetune", same, began)
        files = " and ".join(map(str, filter(None, (args.data, args.eval_data))))
        now = f"{len(task.train)} and {len(task.test)} now"
        got = f"{files}, whose examples have changed since ({now})"
        same = record["examples"] == before["examples"]
        fix = "Give the same file, or another --out."
        args.check("data", same, "the examples of the run that is resumed", fix, got)

    def build(self) -> str:
        for folder, task in (*self.trials, *self.points):
            # Called here for its checks: an error is raised before the first model is built.
            arguments_of(task, self.args.seed, folder)
        if self.before is None:  # a model that cannot be built leaves the folder as it was
            _, task = [*self.trials, *self.points][0]
            self.ready = build_model(task, self.args.seed)
            if task.args.teacher is not None:
                task.dataset.teacher = teacher_logits(task, self.device)
        return announcement(self)

    # --- the training -----------------------------------------------------------------------------

    def train(self) -> dict[str, Any]:
        self.processes.wait_for_everyone()  # the first process moves the old files of the folder
        choice = self._choose_rate() if self.trials else {}
        points = [self._train_seeds(out, task) for out, task in self.points]
        metrics = {
            "arguments": settings_of(self.args),
            "versions": versions(),
            "device": device_label(self.device),
            "precision": self.record["precision"],
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
        if not self.changed and written is not None and written["seeds"] == metrics["seeds"]:
            say(f"The run in {self.out} is finished, all its seeds: nothing was changed.")
            return written
        self.processes.wait_for_everyone()
        if self.processes.is_main_process:
            with ending("the writing of metrics.json", []), writing("finetune", self.out):
                write_hashed(self.out / "metrics.json", metrics)
        return metrics

    def _choose_rate(self) -> dict[str, Any]:
        """Train the first seed at each learning rate, and give the best one to all points.

        The best one has the highest first score on the examples held out for it; of equal ones it
        is the first that was given. A rate at which the training diverges is none to choose.
        """
        seed, rates = self.args.seed, []
        for out, task in self.trials:
            rate = task.args.learning_rate
            try:
                result = self._seed(out, task, seed, keep=False)
            except DivergenceError as error:
                result = {"scores": None, "diverged": str(error)}
                if first_process():
                    write_result(out / f"seed-{seed}", result)
                self.processes.wait_for_everyone()
            shown = "it diverged" if result["scores"] is None else scores_of(task, result)
            self.print_fn(f"learning rate {rate:g}, seed {seed}, on held-out examples: {shown}")
            rates.append({"learning_rate": rate, **result})
        self.trials.clear()  # what a frozen backbone keeps of their examples may be large
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
        self.points = [(out, each.with_settings(learning_rate=best)) for out, each in self.points]
        held = {"train_examples": len(task.train), "eval_examples": len(task.test), "seed": seed}
        choice = {"learning_rate": best, "score": name, **held, "rates": rates}
        return {"learning_rate_choice": choice}

    def _train_seeds(self, out: Path, task: Task) -> dict[str, Any]:
        """Train all seeds on one set of examples, or read their results."""
        args, results = task.args, []
        for seed in range(args.seed, args.seed + args.seeds):
            try:
                result = self._seed(out, task, seed, keep=not args.own_head)
            except DivergenceError as error:
                raise DivergenceError(f"{error} This was seed {seed} in {out}.") from error
            results.append(result)
            what = "" if out == self.out else f"{len(task.train)} examples, "
            self.print_fn(f"{what}seed {seed}: {scores_of(task, result)}")
            for said in task.warnings(result):
                say(said)
        scores = {name: [result["scores"][name] for result in results] for name in task.metrics}
        return {
            "train_examples": len(task.train),
            "train_features": len(task.dataset),
            "seeds": results,
            "scores": {name: interval(values) for name, values in scores.items()},
            "seeds_with_one_answer": sum(bool(result.get("one_answer")) for result in results),
        }

    def _seed(self, out: Path, task: Task, seed: int, *, keep: bool) -> dict[str, Any]:
        """Train and judge one seed, or read what an earlier call has written of it."""
        folder = out / f"seed-{seed}"
        result = self._finished(folder)
        if result is None:
            self.changed = True
            model, self.ready = self.ready, None
            result = train_seed(task, seed, folder, model, keep=keep)
            self.processes.wait_for_everyone()
        return result

    def _finished(self, out: Path) -> dict[str, Any] | None:
        """The result of a seed that an earlier call trained, if all its files are complete."""
        if not (out / MANIFEST).exists():
            return None
        wrong = verify(out)
        if wrong is None:
            return json.loads((out / "result.json").read_text("utf-8"))
        self.processes.wait_for_everyone()
        if self.processes.is_main_process:
            old = f"what was there is in {move_aside(out)}"
            say(f"{out} is not complete: {wrong}. It is trained again, and {old}.")
        self.processes.wait_for_everyone()
        return None


def _precision_of(record: dict[str, Any]) -> str:
    """The precision of a run; one of before the setting had this name said whether it is bf16."""
    return record.get("precision") or ("bf16" if record.get("bf16") else "fp32")


def train_seed(
    task: Task, seed: int, out: Path, model: PreTrainedModel | None = None, *, keep: bool
) -> dict[str, Any]:
    """Train and judge one seed, and write its files; the model only if it is to be kept."""
    args = task.args
    checkpoint = last_checkpoint(out, say)
    if checkpoint is None and checkpoints(out):
        say(f"No checkpoint of seed {seed} is complete: it is trained from its beginning.")
    if model is None:
        model = build_model(task, seed)
    trainer = make_trainer(task, model, seed, out)
    if args.teacher is not None and not task.dataset.teacher:
        task.dataset.teacher = teacher_logits(task, trainer.args.device)
    if args.freeze:
        compute_once(trainer)
    training = trained(trainer, checkpoint, args.report_to)
    saved = [out / "model"] if keep else []
    with contextlib.nullcontext() if args.own_head else training:
        states = states_of(model, {"model": model}) if keep else {}
        if keep and first_process():  # before anything else that may fail
            with writing("finetune", out):
                save_models(out, {"model": model}, task.tokenizers, states)
        with ending(f"the evaluation of seed {seed}", saved):
            scores, predictions = task.evaluate(trainer)
            read = task.reading(trainer)
            most_frequent = task.most_frequent(predictions)
            history = curve(trainer.state.log_history)
            by_step = scores_by_step(trainer.state.log_history)
            trainer.log({f"eval_{name}": value for name, value in scores.items()})
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
        with ending(f"the model card of seed {seed}", saved), writing("finetune", out):
            if keep:
                write_seeds_card(out / "model", task, model, result)
        with ending(f"the writing of the predictions of seed {seed}", saved):
            file = args.data if args.eval_data is None else args.eval_data
            with writing("finetune", out):
                _write_predictions(out / "predictions.json", file, task.records(predictions))
            write_result(out, result, "predictions.json", *["model"] * keep)
        for _, checkpoint in checkpoints(out):
            shutil.rmtree(checkpoint)
    return result


def write_result(out: Path, result: dict[str, Any], *beside: str) -> None:
    """Write ``result.json``, and the manifest of it and the files beside it: the seed is done."""
    with writing("finetune", out):
        out.mkdir(parents=True, exist_ok=True)
        write_json(out / "result.json", result)
        write_manifest(out, ["result.json", *beside])


def _write_predictions(path: Path, file: str | Path, records: list[Any]) -> None:
    """Write JSON with one example a line; the folder's manifest says whether it is complete."""
    lines = ",\n".join(json.dumps(record, ensure_ascii=False) for record in records)
    text = f'{{"file": {json.dumps(str(file))},\n"predictions": [\n{lines}\n]}}\n'
    # JSON may hold half a surrogate pair, UTF-8 may not: it is written as an escape.
    path.write_bytes(text.encode("utf-8", "backslashreplace"))


def compute_once(trainer: FinetuningTrainer) -> None:
    """Let a frozen backbone compute all examples before the training, if the run reads them all.

    They are always computed in the same order, so the outputs that a resumed run reads do not
    depend on where it stopped.
    """
    examples, frozen = trainer.task.dataset, trainer.model.frozen
    if trainer.args.max_steps * trainer.args.train_batch_size < len(examples) or examples.kept:
        return
    frozen.keeps = True
    predict(trainer, trainer.task, examples.features)
    frozen.keeps = False
