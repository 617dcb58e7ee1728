"""One training over a stream of samples: of a pre-training, and of a distillation."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fastplm import _extension
from fastplm._machine import hardware_has_bf16
from fastplm.data._folder import MANIFEST, damage, first_process, say, seal, write_json
from fastplm.run.begin import begin, check_ranks, describe, started
from fastplm.run.folder import RECORD, check_same, checkpoint_to_resume, save_models, writing
from fastplm.run.interrupt import saved_when_stopped
from fastplm.run.report import settings_of
from fastplm.train.pretrain_data import (
    RunData,
)

if TYPE_CHECKING:
    from transformers import (
        TrainerCallback,
        TrainingArguments,
    )


_A_WHILE = 2.0  # seconds
# Settings that may differ when a run is resumed. Another number of threads may change the last
# digits of the losses, and another interval of the log its points.
_FREE_ON_RESUME = {
    *("resume", "overwrite", "dry_run", "out", "cache", "workers", "save_every", "log_every"),
    *("threads", "report_to"),
}
# Settings that are compared in other ways: by the token ids, and as a longer run.
_COMPARED_OTHERWISE = {"corpus", "tokenizer", "vocab_size", "steps"}


class StreamRun:
    """What a training over a stream of samples reads and writes, see ``train_on_stream``."""

    #: The settings of folders that are compared by their contents when a run is resumed.
    compared_otherwise: frozenset[str] = frozenset()

    def __init__(self, args: Any) -> None:
        self.args = args

    @property
    def title(self) -> str:
        """The title of the picture of the losses."""
        raise NotImplementedError

    def training_arguments(self, out: Path) -> TrainingArguments:
        """The settings of the Trainer; a subclass adds those of its own."""
        return self._training_arguments(out)

    def _training_arguments(self, out: Path, **settings: Any) -> TrainingArguments:
        from fastplm.run.trainer import training_arguments

        args = self.args
        usual = {
            "bf16": hardware_has_bf16() if args.precision == "auto" else args.precision == "bf16",
            "max_steps": args.steps,
            "per_device_train_batch_size": args.batch_size,
            "gradient_accumulation_steps": args.gradient_accumulation,
            "learning_rate": args.lr,
            "warmup_steps": args.warmup,
            "weight_decay": 0.01,
            "adam_epsilon": 1e-6,
            "seed": args.seed,
            "train_sampling_strategy": "sequential",
            "dataloader_num_workers": args.workers,
            "dataloader_persistent_workers": args.workers > 0,
            "ddp_find_unused_parameters": False,
        }
        return training_arguments(args, out, **usual | settings)

    def resumed(self, before: dict[str, Any]) -> None:
        """Check the settings of a resumed run, and take those that the run began with."""
        if self.args.usual_warmup:
            self.args.warmup = before["warmup"]

    def prepare(self, training_arguments: TrainingArguments, checkpoint: Path | None) -> RunData:
        """The tokenizer and the samples."""
        raise NotImplementedError

    def facts(self) -> dict[str, Any]:
        """What the losses depend on beside settings and data."""
        return {}

    def trainer(
        self,
        training_arguments: TrainingArguments,
        data: RunData,
        callbacks: list[TrainerCallback],
    ) -> tuple[Any, Any]:
        """The trainer of an untrained model, and the collator of its samples."""
        raise NotImplementedError

    def announcement(
        self, data: RunData, model: Any, training_arguments: TrainingArguments, done: int
    ) -> str:
        """What is printed before the first step."""
        raise NotImplementedError

    def models(self, model: Any) -> dict[str, Any]:
        """The models that are saved, by the names of their folders."""
        return {"model": model}

    def flops_a_token(self, model: Any, tokenizer: Any) -> float | None:
        """The FLOPs of a step's forward and backward, see ``flops``; None: they are not counted."""
        return None

    def held_out(self, model: Any, samples: Any, collator: Any) -> dict[str, Any]:
        """The losses of held-out text."""
        raise NotImplementedError


def train_on_stream(training: StreamRun) -> dict[str, Any]:
    """Run, or resume, a training over a stream of samples; returns ``metrics.json``."""
    with started(training.args, own=[Path(training.args.cache)]) as (before, make_room):
        return _train(training, Path(training.args.out), before, make_room)


def _train(
    training: StreamRun,
    out: Path,
    before: dict[str, Any] | None,
    make_room: Callable[[], None],
) -> dict[str, Any]:
    from fastplm.run.trainer import reporting

    args, checkpoint, done = training.args, None, 0
    wrong: str | None = ""
    if before is not None:
        wrong = damage(out)
        checkpoint = checkpoint_to_resume(args.where, out)
        done = int(checkpoint.name.removeprefix("checkpoint-"))
        expected = f"{done} or more, the steps that are done"
        args.check("steps", args.steps >= done, expected, "Raise it.")
        training.resumed(before)
    training_arguments = training.training_arguments(out)
    with _printed_if_slow("Preparing the data: a vocabulary is trained or the text tokenized ..."):
        data = training.prepare(training_arguments, checkpoint)
    run = _record(training, data, training_arguments)
    if before is not None:
        _check_same_run(args, run, before)
        if wrong is None and before["steps"] == args.steps:
            say(f"The run in {out} is finished, all {args.steps} steps of it: nothing was changed.")
            return json.loads((out / "metrics.json").read_text()) if first_process() else {}
        if wrong is not None and (out / MANIFEST).is_file():
            say(f"What the finished run wrote is not complete, and is written again: {wrong}.")
    trainer, collator = training.trainer(training_arguments, data, [])
    writes = training_arguments.process_index == 0
    check_ranks(args)
    if writes:
        with writing(args.where, out):
            make_room()
            (out / MANIFEST).unlink(missing_ok=True)  # the run is no longer a finished one
            data.tokenizer.save_pretrained(out / "tokenizer")
        run["starts"] = [*(before or {"starts": []})["starts"], done]
        text = training.announcement(data, trainer.model, training_arguments, done)
        if before is not None and before["steps"] != args.steps:
            text += (
                f"\nThe run is now {args.steps:,} steps long instead of {before['steps']:,}: from "
                f"step {done + 1} on its learning rate is that of a schedule over all of them."
            )
        begin(args, run, text, training_arguments.device, make_room)
    metrics = {}
    with reporting(trainer, args.report_to, out, done):
        with saved_when_stopped(trainer):
            trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        if writes:
            with writing(args.where, out):
                metrics = _finish(training, out, trainer, data, collator, run)
    trainer.accelerator.wait_for_everyone()
    return metrics


@contextmanager
def _printed_if_slow(line: str) -> Iterator[None]:
    """Print a line if the block takes longer than two seconds."""
    timer = threading.Timer(_A_WHILE, say, [line])
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def corrupts_on_device(operator: str | None) -> bool:
    """Whether samples are corrupted where the model is, and not by the workers that read them.

    On a GPU without the CUDA code of the operator the reference would run, token by token: the
    CPU's C++ gives the same samples sooner.
    """
    able = operator is None or _extension.lacks(operator, "CUDA") is None
    return torch.cuda.is_available() and able


def collation(collator: Any) -> dict[str, Any]:
    """What a ``PretrainingTrainer`` is told of a collator."""
    if corrupts_on_device(collator.op):
        return {"data_collator": collator.pad, "corrupt": collator.corrupt}
    return {"data_collator": collator}


# --- what a run is, and whether it is the same one ------------------------------------------------


def _record(
    training: StreamRun, data: RunData, training_arguments: TrainingArguments
) -> dict[str, Any]:
    """What the loss curve depends on, and some of what it does not."""
    args = training.args
    description = data.tokenizer.backend_tokenizer.to_str()
    samples = 0 if data.held_out is None else len(data.held_out)  # type: ignore[arg-type]
    return describe(
        args,
        _FREE_ON_RESUME | _COMPARED_OTHERWISE | training.compared_otherwise,
        steps=args.steps,
        corpus={
            "paths": list(args.corpus),
            "documents": len(data.all.documents) - 1,
            "tokens": len(data.all),
            "hash": data.all.directory.name,
        },
        tokenizer=hashlib.blake2b(description.encode(), digest_size=16).hexdigest(),
        held_out={"tokens": len(data.all) - len(data.store), "samples": samples},
        processes=training_arguments.world_size,
        precision="bf16" if training_arguments.bf16 else "fp32",
        threads=torch.get_num_threads(),
        **training.facts(),
    )


def _check_same_run(args: Any, run: dict[str, Any], before: dict[str, Any]) -> None:
    ours, theirs = run["corpus"], before["corpus"]
    changed = ", whose text has changed since" if ours["paths"] == theirs["paths"] else ""
    args.check(
        "corpus",
        ours["hash"] == theirs["hash"],
        f"{_described(theirs)}, as in the run that is resumed",
        "Give the same text, or another --out.",
        _described(ours, changed),
    )
    apart = {"corpus", "held_out", "steps", "threads", "starts"}
    check_same(args.where, {name: run[name] for name in run if name not in apart}, before)
    samples, kept = run["held_out"]["samples"], before["held_out"]["samples"]
    args.check(
        "cache",
        run["held_out"] == before["held_out"],
        f"{kept}, as in the run that is resumed",
        "Delete the tokens there: they are made again.",
        f"{args.cache}, which gives {samples} held-out samples",
    )
    if run["threads"] != before["threads"]:
        say(
            f"The run began with {before['threads']} threads and continues with {run['threads']}: "
            f"the last digits of its losses may differ (--threads {before['threads']})."
        )


def _described(corpus: dict[str, Any], changed: str = "") -> str:
    paths = ", ".join(corpus["paths"])
    return f"{paths}{changed} ({corpus['documents']:,} documents, {corpus['tokens']:,} tokens)"


def _finish(
    training: StreamRun,
    out: Path,
    trainer: Any,
    data: RunData,
    collator: Any,
    run: dict[str, Any],
) -> dict[str, Any]:
    from fastplm.run.report import curve, versions
    from fastplm.train.report import numbers_of, plot_losses

    args, model = training.args, trainer.model
    models, held_out = training.models(model), {}
    if data.held_out is not None:
        held_out = training.held_out(model, data.held_out, collator)
        trainer.check_held_out(held_out)
    save_models(out, models, {"": data.tokenizer})
    history = curve(trainer.state.log_history)
    flops = training.flops_a_token(model, data.tokenizer)
    metrics = {
        "arguments": settings_of(args),
        "versions": versions(),
        "device": str(trainer.args.device),
        "precision": "bf16" if trainer.args.bf16 else "fp32",
        "processes": trainer.args.world_size,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        # All steps count: the FLOPs of a token in full samples, times the tokens without padding.
        "flops": flops and flops * trainer.tokens_per_second * trainer.train_seconds,
        "flops_per_token": flops,
        "vocab_size": len(data.tokenizer),
        "history": history,
        "tokens_per_second": trainer.tokens_per_second,
        "train_seconds": trainer.train_seconds,
        # The steps at which it was begun and resumed: the two figures are of all of them.
        "starts": run["starts"],
        # The count of the first process since it was started, by --resume perhaps; workers keep
        # their count to themselves, but for a warning.
        "dropped_tokens": None
        if args.workers > 0 and not corrupts_on_device(collator.op)
        else collator.dropped,
        "models": {name: str(out / name) for name in models},
        "picture": str(out / "loss.png"),
    }
    if held_out:
        metrics["held_out"] = held_out
        trainer.log({f"eval_{name}": value for name, value in numbers_of(held_out).items()})
    if not plot_losses(out / "loss.png", training.title, history, held_out):
        metrics["picture"] = None
    write_json(out / "metrics.json", metrics)
    picture = ["loss.png"] if metrics["picture"] else []
    seal(out, [*models, "tokenizer", *picture, "metrics.json", RECORD])
    return metrics
