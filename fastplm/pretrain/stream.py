"""One training over a stream of samples of text: of a pre-training, and of a distillation.

``TextRun`` has its order. A command gives it two functions: ``read``, from the settings to the
data, and ``build``, from these to a ``Training``.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fastplm import _extension
from fastplm._machine import device_label
from fastplm.data._folder import MANIFEST, first_process, say, verify
from fastplm.pretrain.data import RunData
from fastplm.pretrain.settings import COLLAPSED
from fastplm.run.folder import (
    check_same,
    checkpoint_to_resume,
    ending,
    save_models,
    step_of,
    writing,
)
from fastplm.run.fsdp import states_of
from fastplm.run.report import counted, settings_of
from fastplm.run.runner import Run

if TYPE_CHECKING:
    from transformers import TrainingArguments

#: The weights of models, by the names of their folders.
States = Mapping[str, Mapping[str, Any]]
_A_WHILE = 2.0  # seconds, after which the preparation of data is announced


@dataclass(frozen=True)
class Training:
    """What a run over text trains, saves and prints.

    Args:
        trainer: of an untrained model.
        collator: of its samples.
        models: those that are saved, by the names of their folders.
        whole: of the weights of those that are sharded, by the same names, the weights that are
            saved where they are others than the model's.
        score: the losses of held-out text, of the model as it is.
        flops_a_token: the FLOPs of a step's forward and backward; None: they are not counted.
        title: of the picture of the losses.
        rows, rows_of_learning: what is printed before the first step, by its title.
        at_most: whether most samples are shorter than ``block_size``.
        token_loss: the name of the loss over tokens of held-out text, if there is one.
        beside_ngrams: whether that is drawn beside the losses of a unigram and a bigram.
    """

    trainer: Any
    collator: Any
    models: Mapping[str, Any]
    score: Callable[[], dict[str, Any]]
    flops_a_token: float | None
    title: str
    rows: Mapping[str, str]
    rows_of_learning: Mapping[str, str] = field(default_factory=dict)
    at_most: bool = False
    token_loss: str | None = None
    beside_ngrams: bool = False
    whole: Callable[[States], States] = lambda states: states


Read = Callable[[Any, "TrainingArguments", Path | None], tuple[Any, RunData]]
Build = Callable[[Any, "TrainingArguments", RunData], Training]


class TextRun(Run):
    """A run that trains on text, and saves models.

    Args:
        args: the settings.
        read: of the plan, the settings of the Trainer and the checkpoint that it continues from,
            the plan with its steps, and the data.
        build: what is trained, of the plan, the settings of the Trainer and the data.

    Attributes:
        done: the steps that were made before it was resumed.
    """

    huge_pages = True
    # Another number of threads may change the last digits of the losses, and another interval of
    # the log its points. The text and the tokenizer are compared by the token ids, the models of a
    # distillation by their files, and a run may become longer.
    ignored_on_resume = frozenset(
        "resume overwrite dry_run out cache workers save_every log_every eval_every threads "
        "report_to corpus tokenizer vocab_size steps flops seeds keep_checkpoints states "
        "no_graphs teacher student generator translation".split()
    )
    settings: TrainingArguments
    data: RunData
    training: Training
    done = 0

    def __init__(self, args: Any, read: Read, build: Build) -> None:
        super().__init__(args)
        self._read, self._build = read, build

    def read(self) -> dict[str, Any]:
        plan, known = self.args, self.args.steps is not None
        if self.before is not None:
            # The record of several seeds has no steps: each seed has a record of its own.
            expected, fix = "2 or more, as in the runs that are resumed", "Give the same number."
            plan.check("seeds", "steps" in self.before, expected, fix)
            self.checkpoint = checkpoint_to_resume(plan.where, self.out)
            self.done = step_of(self.checkpoint)
            plan = continued(plan, self.before, self.done) if known else plan
        self.settings = training_settings(plan)
        slow = "Preparing the data: a vocabulary is trained or the text tokenized ..."
        timer = threading.Timer(_A_WHILE, say, [slow])
        timer.start()
        try:
            plan, self.data = self._read(plan, self.settings, self.checkpoint)
        finally:
            timer.cancel()
        if not known:  # the budget said how many steps there are when the data was read
            if self.before is not None:
                plan = continued(plan, self.before, self.done)
            self.settings.max_steps, self.settings.warmup_steps = plan.steps, plan.warmup
        able = plan.eval_every is None or self.data.held_out is not None
        expected, fix = "nothing, as the text is too short to hold a part out", "Leave it out."
        plan.check("eval_every", able, expected, fix)
        self.args = plan
        return facts_of(plan, self.settings, self.data)

    def compare(self, before: dict[str, Any]) -> None:
        args, record = self.args, self.record
        ours, theirs = record["corpus"], before["corpus"]
        changed = ", whose text has changed since" if ours["paths"] == theirs["paths"] else ""
        same, fix = ours["hash"] == theirs["hash"], "Give the same text, or another --out."
        expected = f"{_described(theirs)}, as in the run that is resumed"
        args.check("corpus", same, expected, fix, _described(ours, changed))
        apart = {"corpus", "held_out", "steps", "flops", "threads"}
        # A run of before these settings were there has had their defaults.
        later = {each.name for each in fields(args)} - before.keys()
        apart |= {name for name in later if args.is_default(name)}
        own = {name: record[name] for name in record if name not in apart}
        check_same(args.where, own, before)
        samples, kept = record["held_out"]["samples"], before["held_out"]["samples"]
        expected = f"{kept}, as in the run that is resumed"
        fix = "Delete the tokens there: they are made again."
        got = f"{args.cache}, which gives {samples} held-out samples"
        args.check("cache", record["held_out"] == before["held_out"], expected, fix, got)
        if record["threads"] != before["threads"]:
            say(
                f"The run began with {counted(before['threads'], 'thread')} and continues with "
                f"{record['threads']}: the last digits of its losses may differ "
                f"(--threads {before['threads']})."
            )

    def finished(self, before: dict[str, Any]) -> bool:
        wrong = verify(self.out)
        if wrong is not None and (self.out / MANIFEST).is_file():
            say(f"What the finished run wrote is not complete, and is written again: {wrong}.")
        return wrong is None and before["steps"] == self.args.steps

    def build(self) -> str:
        from fastplm.pretrain.report import announcement

        self.device = self.settings.device
        self.training = self._build(self.args, self.settings, self.data)
        trainer, count = self.training.trainer, getattr(self.args, "states", None) or 1
        milestones = frozenset(round(self.args.steps * i / count) for i in range(1, count))
        trainer.milestones, trainer.eval_every = milestones, self.args.eval_every
        if self.args.eval_every is not None:
            trainer.score_fn = self._numbers
        starts = [] if self.before is None else self.before["starts"]
        self.record["starts"] = [*starts, self.done]
        said = announcement(self.args, self.settings, self.data, self.training, self.done)
        if self.before is not None and self.before["steps"] != self.args.steps:
            said += (
                f"\nThe run is now {self.args.steps:,} steps long instead of "
                f"{self.before['steps']:,}: from step {self.done + 1} on its learning rate is that "
                "of a schedule over all of them."
            )
        return said

    def train(self) -> dict[str, Any]:
        from fastplm.run.trainer import trained

        trainer, metrics = self.training.trainer, {}
        if first_process():
            with writing(self.args.where, self.out):
                self.data.tokenizer.save_pretrained(self.out / "tokenizer")
        models, held_out = self.training.models, {}
        saved = [self.out / name for name in models]
        with trained(trainer, self.checkpoint, self.args.report_to):
            states = self.training.whole(states_of(trainer.model, models))
            if first_process():  # before anything else that may fail
                with writing(self.args.where, self.out):
                    save_models(self.out, models, {"": self.data.tokenizer}, states)
            # A model that is sharded runs in all processes together.
            if first_process() or trainer.args.fsdp:
                with ending("the evaluation on held-out text", saved):
                    held_out = self._scores()
            if first_process():
                warn_of_collapse(held_out)
                metrics = self._reported(held_out, saved)
        trainer.accelerator.wait_for_everyone()
        return metrics

    def _scores(self) -> dict[str, Any]:
        """The losses of held-out text, which are finite; nothing if there is no such text."""
        if self.data.held_out is None:
            return {}
        held_out = self.training.score()
        self.training.trainer.check_held_out(held_out)
        return held_out

    def _numbers(self) -> dict[str, float]:
        """The numbers of ``_scores`` in the first process, for which the others wait."""
        from fastplm.pretrain.report import numbers_of

        trainer = self.training.trainer
        runs = first_process() or trainer.args.fsdp
        scores = numbers_of(self._scores()) if runs else {}
        trainer.accelerator.wait_for_everyone()
        return scores

    def _reported(self, held_out: dict[str, Any], saved: list[Path]) -> dict[str, Any]:
        """Draw the picture, and write the cards and ``metrics.json``, which it returns."""
        from fastplm.pretrain.report import numbers_of, plot_losses, write_cards
        from fastplm.run.report import scores_by_step

        out, training = self.out, self.training
        picture, log = out / "loss.png", training.trainer.state.log_history

        @contextmanager
        def step(what: str) -> Iterator[None]:
            with ending(what, saved), writing(self.args.where, out):
                yield

        with step("the report of the scores"):
            metrics = metrics_of(self.args, self.data, training, self.record["starts"], out)
            if held_out:
                metrics["held_out"] = held_out
                scores = {f"eval_{name}": value for name, value in numbers_of(held_out).items()}
                training.trainer.log(scores)
                metrics["held_out_by_step"] = scores_by_step(log)
        with step("the picture of the losses"):
            judged = metrics.get("held_out_by_step", [])
            ngrams = ("unigram_loss", "bigram_loss") if training.beside_ngrams else ()
            losses = (metrics["history"], judged, training.token_loss, ngrams)
            drawn = plot_losses(picture, training.title, *losses)
            metrics["picture"] = str(picture) if drawn else None
        with step("the model card"):
            write_cards(self.args, self.data, training, metrics)
        with step("the writing of metrics.json"):
            return self.finish(metrics, [*training.models, "tokenizer", *[picture.name] * drawn])


def continued(plan: Any, before: Mapping[str, Any], done: int) -> Any:
    """The plan of a resumed run, of which so many steps are done, with the warm-up it began with.

    Args:
        before: its record.
    """
    expected = f"{done} or more, the steps that are done"
    plan.check("steps", plan.steps >= done, expected, "Raise it.")
    part = ""
    if plan.stages > 1:
        part = "the first stage of a two-stage training is half"
    elif getattr(plan, "short_block_size", None) is not None:
        part = f"the first {plan.short_share:g} are of short blocks"
    if part:
        same, fix = plan.steps == before["steps"], "Give the same steps, or another --out."
        plan.check("steps", same, f"{before['steps']}, of which {part}", fix)
        return plan
    return plan.with_warmup(before["warmup"]) if plan.is_default("warmup") else plan


def training_settings(plan: Any) -> TrainingArguments:
    """The settings of the Trainer of a run."""
    from fastplm.run.trainer import training_arguments

    adafactor = getattr(plan, "optimizer", "") == "adafactor"
    return training_arguments(
        plan,
        Path(plan.out),
        # Where a budget says how many, they are set when the data is read.
        max_steps=plan.steps or -1,
        gradient_accumulation_steps=plan.gradient_accumulation,
        learning_rate=plan.lr,
        warmup_steps=plan.warmup or 0,
        lr_scheduler_type="inverse_sqrt" if adafactor else "linear",
        save_total_limit=None if plan.keep_checkpoints == "all" else plan.keep_checkpoints,
        weight_decay=0.0 if adafactor else 0.01,
        adam_epsilon=1e-6,
        train_sampling_strategy="sequential",
        dataloader_num_workers=plan.workers,
        dataloader_persistent_workers=plan.workers > 0,
        ddp_find_unused_parameters=False,
    )


def trainer_of(
    kind: Any, model: Any, collator: Any, settings: Any, data: RunData, **options: Any
) -> Any:
    """A ``PretrainingTrainer`` of a model on the samples of a run."""
    collation = {"data_collator": collator}
    if corrupts_on_device(collator):
        collation = {"data_collator": collator.pad, "corrupt": collator.corrupt}
    return kind(
        model=model,
        args=settings,
        train_dataset=data.samples,
        processing_class=data.tokenizer,
        **collation,
        **options,
    )


def corrupts_on_device(collator: Any) -> bool:
    """Whether samples are corrupted where the model is, and not by the workers that read them.

    On a GPU without the CUDA code of the operator the reference would run, token by token: the
    CPU's C++ gives the same samples sooner.
    """
    able = collator.op is None or _extension.lacks(collator.op, "CUDA") is None
    return torch.cuda.is_available() and able and not collator.needs_cpu


def facts_of(plan: Any, settings: TrainingArguments, data: RunData) -> dict[str, Any]:
    """What the loss curve depends on beside the settings, and some of what it does not."""
    description = data.tokenizer.backend_tokenizer.to_str()
    return {
        "steps": plan.steps,
        "corpus": {
            "paths": list(plan.corpus),
            "documents": len(data.all.documents) - 1,
            "tokens": len(data.all),
            "hash": data.all.directory.name,
        },
        "tokenizer": hashlib.blake2b(description.encode(), digest_size=16).hexdigest(),
        "held_out": {"tokens": data.held_out_tokens, "samples": data.held_out_samples},
        "processes": settings.world_size,
        "precision": "bf16" if settings.bf16 else "fp32",
        "threads": torch.get_num_threads(),
        **data.facts,
    }


def _described(corpus: Mapping[str, Any], changed: str = "") -> str:
    paths = ", ".join(corpus["paths"])
    return f"{paths}{changed} ({corpus['documents']:,} documents, {corpus['tokens']:,} tokens)"


def warn_of_collapse(held_out: Mapping[str, Any]) -> None:
    """Say it where an encoder has one output for all tokens."""
    if held_out.get("encoder_similarity", 0.0) > COLLAPSED:
        say(
            "Warning: the encoder gives all tokens one output (their mean cosine is "
            f"{held_out['encoder_similarity']:.4f}), so the decoder cannot read its source. "
            "Lower --lr, or raise --warmup."
        )


def metrics_of(
    plan: Any, data: RunData, training: Training, starts: list[int], out: Path
) -> dict[str, Any]:
    """The figures of ``metrics.json`` but those of held-out text."""
    from fastplm.run.report import curve, versions

    trainer, flops, collator = training.trainer, training.flops_a_token, training.collator
    counted_elsewhere = plan.workers > 0 and not corrupts_on_device(collator)
    return {
        "arguments": settings_of(plan),
        "versions": versions(),
        "device": device_label(trainer.args.device),
        "precision": "bf16" if trainer.args.bf16 else "fp32",
        "processes": trainer.args.world_size,
        "parameters": sum(parameter.numel() for parameter in trainer.model.parameters()),
        # All steps count: the FLOPs of a token in full samples, times the tokens without padding.
        "flops": flops and flops * trainer.tokens_per_second * trainer.train_seconds,
        "flops_per_token": flops,
        "vocab_size": len(data.tokenizer),
        "history": curve(trainer.state.log_history),
        "tokens_per_second": trainer.tokens_per_second,
        "train_seconds": trainer.train_seconds,
        # The steps at which it was begun and resumed: the two figures are of all of them.
        "starts": starts,
        # The count of the first process since it was started, by --resume perhaps; workers keep
        # their count to themselves, but for a warning.
        "dropped_tokens": None if counted_elsewhere else collator.dropped,
        "models": {name: str(out / name) for name in training.models},
        "picture": None,
    }
