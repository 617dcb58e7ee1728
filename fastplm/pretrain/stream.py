"""One training over a stream of samples: of a pre-training, and of a distillation."""

from __future__ import annotations

import hashlib
import threading
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch

from fastplm import _extension
from fastplm._machine import device_label, hardware_has_bf16
from fastplm.data._folder import MANIFEST, first_process, say, verify
from fastplm.pretrain.data import RunData
from fastplm.run.folder import check_same, checkpoint_to_resume, save_models, step_of, writing
from fastplm.run.report import settings_of
from fastplm.run.runner import Run

if TYPE_CHECKING:
    from transformers import TrainerCallback, TrainingArguments

_A_WHILE = 2.0  # seconds, after which the preparation of data is announced


class StreamRun(Run):
    """What a training over a stream of samples reads and writes.

    Attributes:
        settings: of its Trainer.
        data: what it reads.
        trainer: of an untrained model.
        collator: of its samples.
        done: the steps that were made before it was resumed.
    """

    huge_pages = True
    # Another number of threads may change the last digits of the losses, and another interval of
    # the log its points. The text and the tokenizer are compared by the token ids, and a run may
    # become longer.
    free = frozenset(
        "resume overwrite dry_run out cache workers save_every log_every eval_every threads "
        "report_to corpus tokenizer vocab_size steps flops seeds keep_checkpoints states "
        "no_graphs".split()
    )
    #: The title of the picture of the losses; ``{args.steps}`` in it is the run's own value.
    title: str
    settings: TrainingArguments
    data: RunData
    trainer: Any
    collator: Any
    done = 0
    #: What is not as a finished run wrote it; None if all is.
    _wrong: str | None = ""

    # --- what a recipe says -----------------------------------------------------------------------

    def check_kind(self, before: dict[str, Any]) -> None:
        """Check that the record of a resumed run is of one such run."""

    def resumed(self, before: dict[str, Any]) -> None:
        """Check the settings of a resumed run, and take those that the run began with."""
        if self.args.usual_warmup:
            self.args.warmup = before["warmup"]

    def trainer_settings(self, **settings: Any) -> TrainingArguments:
        """The settings of the Trainer: the usual ones, and those of the recipe."""
        from fastplm.run.trainer import training_arguments

        args = self.args
        usual = {
            "bf16": hardware_has_bf16() if args.precision == "auto" else args.precision == "bf16",
            # Where a budget says how many, they are set when the data is read.
            "max_steps": args.steps or -1,
            "gradient_accumulation_steps": args.gradient_accumulation,
            "learning_rate": args.lr,
            "warmup_steps": args.warmup or 0,
            "save_total_limit": None if args.keep_checkpoints == "all" else args.keep_checkpoints,
            "weight_decay": 0.01,
            "adam_epsilon": 1e-6,
            "train_sampling_strategy": "sequential",
            "dataloader_num_workers": args.workers,
            "dataloader_persistent_workers": args.workers > 0,
            "ddp_find_unused_parameters": False,
        }
        return training_arguments(args, self.out, **usual | settings)

    def read(self) -> RunData:
        """The tokenizer and the samples."""
        raise NotImplementedError

    @property
    def states(self) -> frozenset[int]:
        """The steps whose states are kept beside the newest ones."""
        return frozenset()

    @property
    def token_loss(self) -> str | None:
        """The name of the loss over tokens of held-out text, if there is one."""
        return None

    def models(self, model: Any) -> dict[str, Any]:
        """The models that are saved, by the names of their folders."""
        return {"model": model}

    def flops_a_token(self, model: Any) -> float | None:
        """The FLOPs of a step's forward and backward, see ``flops``; None: they are not counted."""
        return None

    def held_out(self, model: Any, samples: Any) -> dict[str, Any]:
        """The losses of held-out text."""
        raise NotImplementedError

    def remark(self, held_out: dict[str, Any]) -> None:
        """Say what the losses of the trained model on held-out text warn of."""

    def make_trainer(self, *callbacks: TrainerCallback) -> tuple[Any, Any]:
        """The trainer of an untrained model, and the collator of its samples."""
        raise NotImplementedError

    def trainer_of(self, kind: Any, model: Any, collator: Any, **settings: Any) -> Any:
        """A ``PretrainingTrainer`` of a model on the samples of the run."""
        collation = {"data_collator": collator}
        if corrupts_on_device(collator.op) and not collator.needs_cpu:
            collation = {"data_collator": collator.pad, "corrupt": collator.corrupt}
        return kind(
            model=model,
            args=self.settings,
            train_dataset=self.data.samples,
            processing_class=self.data.tokenizer,
            **collation,
            **settings,
        )

    def lines(self) -> str:
        """What the run will do."""
        raise NotImplementedError

    # --- the run ----------------------------------------------------------------------------------

    def prepare(self) -> None:
        args = self.args
        if self.before is not None:
            self.check_kind(self.before)
            self._wrong = verify(self.out)
            self.checkpoint = checkpoint_to_resume(args.where, self.out)
            self.done = step_of(self.checkpoint)
        known = args.steps is not None  # the budget of a pre-training says it when it is read
        if known:
            self._check_resumed()
        self.settings = self.trainer_settings()
        slow = "Preparing the data: a vocabulary is trained or the text tokenized ..."
        timer = threading.Timer(_A_WHILE, say, [slow])
        timer.start()
        try:
            self.data = self.read()
        finally:
            timer.cancel()
        if not known:
            self._check_resumed()
            self.settings.max_steps, self.settings.warmup_steps = args.steps, args.warmup
        able = args.eval_every is None or self.data.held_out is not None
        expected, fix = "nothing, as the text is too short to hold a part out", "Leave it out."
        args.check("eval_every", able, expected, fix)

    def _check_resumed(self) -> None:
        """Check a resumed run's steps, and the settings that depend on them."""
        if self.before is None:
            return
        expected = f"{self.done} or more, the steps that are done"
        self.args.check("steps", self.args.steps >= self.done, expected, "Raise it.")
        self.resumed(self.before)

    def facts(self) -> dict[str, Any]:
        """What the loss curve depends on, and some of what it does not."""
        args, data = self.args, self.data
        description = data.tokenizer.backend_tokenizer.to_str()
        samples = 0 if data.held_out is None else len(data.held_out)  # type: ignore[arg-type]
        return {
            "steps": args.steps,
            "corpus": {
                "paths": list(args.corpus),
                "documents": len(data.all.documents) - 1,
                "tokens": len(data.all),
                "hash": data.all.directory.name,
            },
            "tokenizer": hashlib.blake2b(description.encode(), digest_size=16).hexdigest(),
            "held_out": {"tokens": len(data.all) - len(data.store), "samples": samples},
            "processes": self.settings.world_size,
            "precision": "bf16" if self.settings.bf16 else "fp32",
            "threads": torch.get_num_threads(),
        }

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
        apart |= {name for name in later if args.usual(name)}
        check_same(args.where, {name: record[name] for name in record if name not in apart}, before)
        samples, kept = record["held_out"]["samples"], before["held_out"]["samples"]
        expected = f"{kept}, as in the run that is resumed"
        fix = "Delete the tokens there: they are made again."
        got = f"{args.cache}, which gives {samples} held-out samples"
        args.check("cache", record["held_out"] == before["held_out"], expected, fix, got)
        if record["threads"] != before["threads"]:
            say(
                f"The run began with {before['threads']} threads and continues with "
                f"{record['threads']}: the last digits of its losses may differ "
                f"(--threads {before['threads']})."
            )

    def finished(self, before: dict[str, Any]) -> bool:
        if self._wrong is not None and (self.out / MANIFEST).is_file():
            what = f"is not complete, and is written again: {self._wrong}."
            say(f"What the finished run wrote {what}")
        return self._wrong is None and before["steps"] == self.args.steps

    def build(self) -> None:
        self.device = self.settings.device
        self.trainer, self.collator = self.make_trainer()
        self.trainer.milestones, self.trainer.eval_every = self.states, self.args.eval_every
        if self.args.eval_every is not None:
            self.trainer.score_fn = self._scores

    def write_first(self) -> None:
        self.data.tokenizer.save_pretrained(self.out / "tokenizer")
        starts = [] if self.before is None else self.before["starts"]
        self.record["starts"] = [*starts, self.done]

    def announcement(self) -> str:
        text, args = self.lines(), self.args
        if self.before is not None and self.before["steps"] != args.steps:
            text += (
                f"\nThe run is now {args.steps:,} steps long instead of {self.before['steps']:,}: "
                f"from step {self.done + 1} on its learning rate is that of a schedule over all of "
                "them."
            )
        return text

    def train(self) -> dict[str, Any]:
        from fastplm.run.trainer import trained

        metrics = {}
        with trained(self.trainer, self.checkpoint, self.args.report_to):
            if first_process():
                held_out = self._judged()  # an error of it is none of the disk
                self.remark(held_out)
                with writing(self.args.where, self.out):
                    metrics = self._results(held_out)
        self.trainer.accelerator.wait_for_everyone()
        return metrics

    def _judged(self) -> dict[str, Any]:
        """The losses of held-out text, which are finite; nothing if there is no such text."""
        if self.data.held_out is None:
            return {}
        held_out = self.held_out(self.trainer.model, self.data.held_out)
        self.trainer.check_held_out(held_out)
        return held_out

    def _scores(self) -> dict[str, float]:
        """The numbers of ``_judged`` in the first process, for which the others wait."""
        from fastplm.pretrain.report import numbers_of

        scores = numbers_of(self._judged()) if first_process() else {}
        self.trainer.accelerator.wait_for_everyone()
        return scores

    def _results(self, held_out: dict[str, Any]) -> dict[str, Any]:
        from fastplm.pretrain.report import numbers_of, plot_losses
        from fastplm.run.report import curve, scores_by_step, versions

        args, out, data, trainer = self.args, self.out, self.data, self.trainer
        model: Any = trainer.model
        models = self.models(model)
        save_models(out, models, {"": data.tokenizer})
        history = curve(trainer.state.log_history)
        flops = self.flops_a_token(model)
        on_device = corrupts_on_device(self.collator.op) and not self.collator.needs_cpu
        counted_elsewhere = args.workers > 0 and not on_device
        metrics = {
            "arguments": settings_of(args),
            "versions": versions(),
            "device": device_label(trainer.args.device),
            "precision": "bf16" if trainer.args.bf16 else "fp32",
            "processes": trainer.args.world_size,
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            # All steps count: the FLOPs of a token in full samples, times the tokens without
            # padding.
            "flops": flops and flops * trainer.tokens_per_second * trainer.train_seconds,
            "flops_per_token": flops,
            "vocab_size": len(data.tokenizer),
            "history": history,
            "tokens_per_second": trainer.tokens_per_second,
            "train_seconds": trainer.train_seconds,
            # The steps at which it was begun and resumed: the two figures are of all of them.
            "starts": self.record["starts"],
            # The count of the first process since it was started, by --resume perhaps; workers
            # keep their count to themselves, but for a warning.
            "dropped_tokens": None if counted_elsewhere else self.collator.dropped,
            "models": {name: str(out / name) for name in models},
            "picture": str(out / "loss.png"),
        }
        if held_out:
            metrics["held_out"] = held_out
            trainer.log({f"eval_{name}": value for name, value in numbers_of(held_out).items()})
            metrics["held_out_by_step"] = scores_by_step(trainer.state.log_history)
        title = self.title.format(args=args)
        judged = metrics.get("held_out_by_step", [])
        if not plot_losses(out / "loss.png", title, history, judged, self.token_loss):
            metrics["picture"] = None
        picture = ["loss.png"] if metrics["picture"] else []
        return self.finish(metrics, [*models, "tokenizer", *picture])


def _described(corpus: dict[str, Any], changed: str = "") -> str:
    paths = ", ".join(corpus["paths"])
    return f"{paths}{changed} ({corpus['documents']:,} documents, {corpus['tokens']:,} tokens)"


def corrupts_on_device(operator: str | None) -> bool:
    """Whether samples are corrupted where the model is, and not by the workers that read them.

    On a GPU without the CUDA code of the operator the reference would run, token by token: the
    CPU's C++ gives the same samples sooner.
    """
    able = operator is None or _extension.lacks(operator, "CUDA") is None
    return torch.cuda.is_available() and able
