"""A Trainer for runs that may be stopped at any moment, and functions around it."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from tqdm import tqdm
from transformers import Trainer, TrainerCallback, TrainerState, TrainingArguments
from transformers.trainer_callback import PrinterCallback

from fastplm._machine import hardware_has_bf16, in_bf16
from fastplm.data._folder import say
from fastplm.errors import DataError, DivergenceError, fail, first_line
from fastplm.graphs import GraphedStep
from fastplm.models._base import FastplmModel
from fastplm.ops.dropout import draws_by_row
from fastplm.run.folder import last_checkpoint, place_checkpoint, step_of, writing
from fastplm.run.fsdp import layers_of, own, shard_here, sharding
from fastplm.run.interrupt import checkpoint_on_signal

# After so many steps and seconds, a run without a terminal prints how long it will take.
_ESTIMATE_STEPS, _ESTIMATE_SECONDS = 3, 5.0

_SCRATCH = ".incomplete"


def training_arguments(args: Any, out: Path, **settings: Any) -> TrainingArguments:
    """The ``TrainingArguments`` of a run: what all runs share, and ``settings``."""
    on_gpu, bf16 = torch.cuda.is_available(), in_bf16(getattr(args, "precision", "fp32"))
    able = not (bf16 and on_gpu) or hardware_has_bf16()
    args.check("precision", able, "fp32, as this GPU has no bf16", "Train in fp32.", "bf16")
    made = TrainingArguments(
        output_dir=str(out),
        bf16=bf16,
        use_cpu=not on_gpu,
        max_grad_norm=1.0,
        remove_unused_columns=False,
        dataloader_pin_memory=on_gpu,
        logging_steps=args.log_every,
        logging_first_step=True,
        logging_nan_inf_filter=False,
        save_steps=args.save_every,
        disable_tqdm=True,
        report_to="none",
        per_device_train_batch_size=args.batch_size,
        ddp_broadcast_buffers=False,  # they are constants, such as the numbers of positions
        # If the newest checkpoint is damaged, a run is resumed from the one before.
        **{"lr_scheduler_type": "linear", "save_total_limit": 2, "seed": args.seed} | settings,
        **({"fsdp": True, "fsdp_config": {"version": 2}} if getattr(args, "fsdp", False) else {}),
    )
    fix = f"Start it with torchrun --nproc-per-node N -m fastplm {args.where} …, or leave it out."
    one = made.fsdp and made.world_size == 1
    args.check("fsdp", not one, "several processes", fix, "True in one process")
    return made


@contextlib.contextmanager
def trained(
    trainer: RunTrainer, checkpoint: Path | None, report_to: str = "none"
) -> Iterator[None]:
    """Train, then run the block, in which scores may still be logged.

    After a resume, the steps after the checkpoint are trained and logged again.

    Args:
        trainer: the trainer of a run.
        checkpoint: the checkpoint to resume from; None = train from the beginning.
        report_to: one of ``REPORTS``: where the trainer also logs.

    Raises:
        KeyboardInterrupt: a signal has ended the training; see ``checkpoint_on_signal``.
        Exception: what failed after the last step, such as a report; after the block.
    """
    failed: Exception | None = None
    with _reporting(trainer, report_to, 0 if checkpoint is None else step_of(checkpoint)):
        with checkpoint_on_signal(trainer):
            try:
                resumed = None if checkpoint is None else str(checkpoint)
                trainer.train(resume_from_checkpoint=resumed)
            except DivergenceError:
                raise
            except Exception as error:
                if not 0 < trainer.state.max_steps <= trainer.state.global_step:
                    raise
                failed, trainer.is_in_train = error, False
        yield
    if failed is not None:
        reason = f"{type(failed).__name__}: {first_line(failed)}"
        say(
            f"fastplm: after the last step, the end of the training failed ({reason}). What was "
            f"trained is in {trainer.args.output_dir}."
        )
        raise failed


@contextlib.contextmanager
def _reporting(trainer: RunTrainer, name: str, done: int) -> Iterator[None]:
    """In this block a trainer also logs to what ``--report-to`` names."""
    from transformers.integrations import INTEGRATION_TO_CALLBACK

    out = Path(trainer.args.output_dir)
    if name == "none" or not trainer.is_world_process_zero():
        yield
        return
    trainer.args.run_name = out.name
    if name == "tensorboard":
        from torch.utils.tensorboard import SummaryWriter

        folder = str(out / "tensorboard")
        callback = INTEGRATION_TO_CALLBACK[name](SummaryWriter(folder, purge_step=done + 1))
        callback.logging_dir = folder  # for scores that are logged after the training
    else:
        library = importlib.import_module(name)
        try:
            if name == "mlflow":  # a run that its callback starts ends with the training
                library.start_run(run_name=out.name)
            callback = INTEGRATION_TO_CALLBACK[name]()
            callback.setup(trainer.args, trainer.state, trainer.model)
        except Exception as error:  # each has its own, such as for a missing key
            fix = f"Set {name} up (a login, a server, its offline mode), or choose another one."
            reason = " ".join(str(error).split())
            got = f"{name} ({reason:.200})"
            fail(trainer.where, "report_to", got, "a way to log there", fix, DataError)
    trainer.add_callback(callback)
    try:
        yield
    finally:
        if name == "wandb":
            library.finish()
        elif name == "mlflow":
            library.end_run()  # the next seed is another run


@contextlib.contextmanager
def _drawing(seed: int, step: int) -> Iterator[None]:
    """Seed PyTorch's generator of the CPU by seed and step; restore its state after the block."""
    number = hashlib.blake2b(f"{seed} {step}".encode(), digest_size=8).digest()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(int.from_bytes(number, "little") >> 1)
        yield


class RunTrainer(Trainer):
    """Trainer of a run that may be killed, run out of disk or diverge at any moment.

    - A checkpoint is written to a scratch folder, given a manifest and renamed when all
      processes are done. Only then is an older one removed.
    - The run stops at a loss, gradient or weight that is not finite, before it gets into a
      checkpoint. On the CPU it stops in that step. On a GPU it stops a step or two later, as the
      check is never a sync. Several processes must stop together: they stop when the loss is
      logged.
    - The loss is logged at each checkpoint, so no log entry covers steps on both sides of one. The
      loss curve and the sums of ``seconds`` and tokens then do not depend on how often the run was
      resumed.

    See docs/pretraining.md, "Stopping and resuming".

    Args:
        args, kwargs: the arguments of ``transformers.Trainer``.
    """

    #: The name of the command, for error messages.
    where: str
    #: What scores the model in ``evaluate``, in the place of an ``eval_dataset``.
    score_fn: Callable[[], dict[str, float]] | None = None
    #: Steps after which a checkpoint is written, and kept beside the newest ones.
    milestones: Collection[int] = ()
    #: After each such number of steps ``evaluate`` is called.
    eval_every: int | None = None
    #: The ``num_items_in_batch`` of a step whose batches have no labels.
    items: Tensor | None = None
    #: Whether steps are replayed as CUDA graphs, see ``GraphedStep``.
    graphs = False
    #: What ``compute_loss`` found beside the loss of a batch.
    found: Mapping[str, Tensor] = {}

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.args.world_size == 1 and self.args.n_gpu > 1:
            # With several GPUs Trainer would split a batch by rows, but not its flat positions.
            self.args._n_gpu = 1
        if self.args.fsdp:
            plugin = self.accelerator.state.fsdp_plugin
            plugin.transformer_cls_names_to_wrap = layers_of(self.model)
        self.remove_callback(PrinterCallback)
        self.add_callback(Schedule(self))
        self.add_callback(Progress())
        self._finite = FiniteCheck(self.args.device)
        self._window_began = 0.0
        self._window_step = 0
        self._window_tokens: Tensor | int = 0
        self._graphed: GraphedStep | None = None
        self._tokenizer: Any = None

    @property
    def train_seconds(self) -> float:
        """The time of all steps, without checkpoints, including steps before a resume."""
        return sum(entry.get("seconds", 0.0) for entry in self.state.log_history)

    @property
    def tokens_per_second(self) -> float:
        """The tokens of all processes, divided by the time of the same steps."""
        entries = (entry for entry in self.state.log_history if "seconds" in entry)
        tokens = sum(entry["tokens_per_second"] * entry["seconds"] for entry in entries)
        return tokens / max(self.train_seconds, 1e-9)

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        if self.args.fsdp:
            shard_here(self)

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        self.processing_class = self._tokenizer
        # Private, as no hook of Transformers is called around Accelerate's ``prepare``.
        with sharding(self) if self.args.fsdp else contextlib.nullcontext():
            return super()._prepare_for_training(*args, **kwargs)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        # Else Transformers says at a resume that all names but one of a tied weight are missing.
        handle = self.model.register_load_state_dict_post_hook(_tied_are_not_missing)
        # With a tokenizer Transformers gives the configuration its special tokens. But a GPT-2 has
        # read the end of a document before each text, and no <s>: its configuration says so.
        self._tokenizer, self.processing_class = self.processing_class, None
        try:
            return super().train(*args, **kwargs)
        finally:
            self.processing_class = self._tokenizer
            handle.remove()

    def get_batch_samples(
        self, epoch_iterator: Iterator, num_batches: int, device: torch.device
    ) -> Any:
        batches, num_items = [], None
        if self.state.global_step >= self.state.max_steps:
            # The run is resumed after its last step; Trainer would check that only after a step.
            self.control.should_training_stop = True
        else:
            if not self._window_began:
                self._window_began, self._window_step = time.perf_counter(), self.state.global_step
            read = self.as_read(epoch_iterator)
            batches, num_items = super().get_batch_samples(read, num_batches, device)
        self._window_tokens = self._window_tokens + self.count(batches)
        return batches, self.items if num_items is None and batches else num_items

    def as_read(self, batches: Iterator) -> Iterator:
        """Change the batches of a loader before they are counted; here nothing changes."""
        return batches

    def count(self, batches: list[dict[str, Any]]) -> Tensor | int:
        """The number of tokens in all batches of a step; called before its first forward."""
        raise NotImplementedError

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None
    ) -> Tensor:
        # One seed for all micro-batches and processes of a step.
        numbered = _drawing(self.args.seed, self.state.global_step)
        step = self._replayed if self.graphs else super().training_step
        with numbered if self.draws_by_sample(inputs) else contextlib.nullcontext():
            loss = step(model, inputs, num_items_in_batch)
        self._check_finite("the loss", loss)
        return loss

    def _replayed(self, model: nn.Module, inputs: dict[str, Any], items: Any) -> Tensor:
        """Transformers' ``training_step``, as a CUDA graph where that can be."""
        own: Any = self.optimizer  # Accelerate's, around PyTorch's
        there = self._graphed
        if there is None or there.model is not model or there.optimizer is not own.optimizer:
            as_usual, clipped = own.step, self.args.max_grad_norm or None
            whole = functools.partial(self._whole_step, model)
            graphed = GraphedStep(
                model, own.optimizer, max_grad_norm=clipped, function=whole, say=say
            )

            @functools.wraps(as_usual)  # whose marks the learning rate's schedule looks for
            def step(*args: Any) -> None:
                own._opt_called = True
                graphed.update() if graphed.able else as_usual(*args)

            own.step, self._graphed = step, graphed
        assert self._graphed is not None
        model.train()
        # The last step of an epoch may have fewer batches.
        count, given = self.current_gradient_accumulation_steps, self._prepare_inputs(inputs)
        loss, self.found = self._graphed.backward(**given, batches=count, num_items_in_batch=items)
        return loss

    def _whole_step(
        self, model: nn.Module, *, batches: int, num_items_in_batch: Any, **inputs: Any
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        return super().training_step(model, inputs, num_items_in_batch), self.found

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        # Private, as no hook of Transformers is given the norm: ``on_pre_optimizer_step`` comes
        # after the clipping, and a second norm is another pass over all gradients.
        if self._graphed is not None and self._graphed.able:
            norm = self._graphed.clip()
        else:
            norm = super()._clip_grad_norm(model)
        if type(norm) is Tensor:  # a DTensor is checked when it is logged
            self._check_finite("the norm of the gradient", norm.to(self.args.device))
        return norm

    def draws_by_sample(self, inputs: dict[str, Any]) -> bool:
        """Whether all dropout of the model depends on the samples of this batch.

        If it does not, one seed for a step would drop the same elements in all micro-batches.
        """
        parts = (getattr(self.model, name, None) for name in ("discriminator", "student"))
        trained: Any = next((part for part in parts if part is not None), self.model)
        return (
            "sample_index" in inputs
            and self.args.device.type == "cpu"
            and isinstance(trained, FastplmModel)
            and trained._has_our_attention()
            and draws_by_row(torch.empty(0, dtype=self.model.dtype, device="cpu"))
        )

    def _check_finite(self, name: str, value: Tensor) -> None:
        self._finite.add(name, value.detach(), self.state.global_step + 1)
        # Several processes stop together: one alone would leave the others waiting for it.
        if self.args.world_size == 1:
            self._stop_at(self._finite.known())

    def window_parts(self) -> dict[str, float]:
        """Further values to log for the steps since the last log."""
        return {}

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs:
            # No further sync: the logged loss is already a number on the host.
            self._stop_at(self.accelerator.gather(self._finite.steps[None]))
            if not math.isfinite(logs.get("grad_norm", 0.0)):
                self._diverged(self.state.global_step, f"{FiniteCheck.NAMES[1]} is not finite")
            logs.update(self.window_parts())
            tokens, self._window_tokens = float(self._window_tokens), 0
            now = time.perf_counter()
            seconds = max(now - self._window_began, 1e-9)
            logs.update(tokens_per_second=tokens / seconds, seconds=seconds)
            self._window_began, self._window_step = now, self.state.global_step
        with self._keeping_steps("the report of the loss"):
            super().log(logs, start_time)

    @contextlib.contextmanager
    def _keeping_steps(self, what: str) -> Iterator[None]:
        """If this block fails during a training, the steps since the last checkpoint are saved.

        One process of several would wait for the others, which do not fail with it.
        """
        try:
            yield
        except DivergenceError:
            raise
        except Exception as error:
            step = self.state.global_step
            place = Path(self.args.output_dir) / f"checkpoint-{step}"
            if self.is_in_train and step and self.args.world_size == 1 and not place.exists():
                with contextlib.suppress(Exception):  # as after an error of the GPU
                    self._save_checkpoint(self.model, None)
                    reason = f"{type(error).__name__}: {first_line(error)}"
                    say(
                        f"fastplm: at step {step} {what} failed ({reason}). The training so far is "
                        f"saved in {place}. The same command with --resume continues it."
                    )
            raise

    def _stop_at(self, steps: Tensor) -> None:
        """Stop if ``steps`` of ``FiniteCheck`` holds a step at which a value was not finite."""
        first, name = min(
            (step, name)
            for row in steps.reshape(-1, len(FiniteCheck.NAMES)).tolist()
            for step, name in zip(row, FiniteCheck.NAMES, strict=True)
        )
        if first < FiniteCheck.NEVER:
            self._diverged(first, f"{name} is not finite")

    def _diverged(self, step: int, what: str) -> NoReturn:
        out = Path(self.args.output_dir)
        last = last_checkpoint(out) if self.args.should_save else None
        kept = "no checkpoint was written yet" if last is None else f"{last} is the last good state"
        if self.state.global_step == 0:  # no learning rate has changed a weight yet
            raise DivergenceError(
                f"{self.where}: at step {step} {what}, before any weight was changed: "
                f"{why_not_finite(self.model)} No model was written."
            )
        raise DivergenceError(
            f"{self.where}: at step {step} {what}: the training has diverged. {kept[0].upper()}"
            f"{kept[1:]}, and no model was written. Start again with a lower learning rate (it was "
            f"{self.args.learning_rate:g}) or a longer warm-up."
        )

    def check_held_out(self, scores: Mapping[str, Any]) -> None:
        """Stop if a held-out loss is not finite, as after a last step that was too large."""
        for name, value in scores.items():
            if name.endswith("loss") and not math.isfinite(value):
                self._diverged(self.state.global_step, f"the {name} of held-out text is not finite")

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Score the model, by ``score_fn`` if there is one, and log the scores.

        It takes no time of the training, and draws none of its random numbers.
        """
        devices = [] if self.args.device.type == "cpu" else [self.args.device]
        with self._keeping_steps("the evaluation"):
            with self.outside_window(), torch.random.fork_rng(devices):
                if self.score_fn is None:
                    return super().evaluate(*args, **kwargs)
                scores = self.score_fn()
        self.control.should_evaluate = False  # as Transformers' own evaluate does
        self.model.train()
        self.log({f"eval_{name}": value for name, value in scores.items()})
        losses = {name: value for name, value in scores.items() if name.endswith("_loss")}
        shown = "  ".join(f"{name} {value:.4f}" for name, value in (losses or scores).items())
        say(f"step {self.state.global_step}/{self.state.max_steps}  held out: {shown}")
        return scores

    @contextlib.contextmanager
    def outside_window(self) -> Iterator[None]:
        """The time of this block does not count as training time."""
        began = time.perf_counter()
        yield
        if self._window_began:
            self._window_began += time.perf_counter() - began

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        # Private, as no hook of Transformers comes before a checkpoint is written: until
        # ``on_save`` it would lie under its name half written, and older ones would be gone.
        began, step = time.perf_counter(), self.state.global_step
        # Of a sharded model each process sees its part, and all stop together.
        bad = self.accelerator.reduce((~all_finite(self.model)).int(), reduction="sum")
        if bad.item():
            self._diverged(step, "a weight is not finite")
        output = Path(self.args.output_dir)
        scratch = output / _SCRATCH
        if self.args.should_save:
            shutil.rmtree(scratch, ignore_errors=True)
        self.accelerator.wait_for_everyone()
        self.args.output_dir = str(scratch)
        try:
            with writing(self.where, output):
                super()._save_checkpoint(model, trial)
                self.accelerator.wait_for_everyone()
                if self.args.should_save:
                    keep = self.args.save_total_limit
                    made = scratch / f"checkpoint-{step}"
                    place_checkpoint(made, output, step, keep, self.milestones)
        finally:
            self.args.output_dir = str(output)
            if self.args.should_save:
                shutil.rmtree(scratch, ignore_errors=True)
        self.accelerator.wait_for_everyone()
        self._window_began += time.perf_counter() - began


def _tied_are_not_missing(model: Any, keys: Any) -> None:
    """A checkpoint holds tied parameters under one of their names."""
    missing: list[str] = keys.missing_keys
    missing[:] = [name for name in missing if name not in model.all_tied_weights_keys]


def why_not_finite(model: nn.Module) -> str:
    """One or two sentences: what in a model makes the loss not finite, and what to do."""
    size, largest = 0.0, ""
    for name, weight in model.named_parameters():
        if not weight.isfinite().all():
            return (
                f"the weight {name} holds NaN or infinity. Start from another checkpoint, or from "
                "new weights."
            )
        of_this = weight.detach().abs().max().item() if weight.numel() else 0.0
        size, largest = max((size, largest), (of_this, name))
    return (
        f"all weights are finite, the largest is {size:.3g} in {largest}. If that is too large for "
        "the products of this precision, start from another checkpoint or with --precision fp32; "
        "else look at the data."
    )


def all_finite(model: nn.Module) -> Tensor:
    """Whether no weight of a model that is in this process is NaN or infinite, bool, 0-d."""
    return torch.stack([own(weight).isfinite().all() for weight in model.parameters()]).all()


class FiniteCheck:
    """Finds the first steps at which values were not finite, without a sync.

    ``steps`` is int64 [len(NAMES)] on the device of the values: for each name the first step at
    which its value was not finite, or ``NEVER``.
    """

    NAMES = ("the loss", "the norm of the gradient")
    NEVER = torch.iinfo(torch.int64).max

    def __init__(self, device: torch.device) -> None:
        self.steps = torch.full((len(self.NAMES),), self.NEVER, device=device)
        self._each = dict(zip(self.NAMES, self.steps.unbind(), strict=True))
        self._on_gpu = device.type == "cuda"
        if self._on_gpu:
            self._copy = torch.full_like(self.steps, self.NEVER, device="cpu").pin_memory()
            self._copied = torch.cuda.Event()

    def add(self, name: str, value: Tensor, step: int) -> None:
        """Check the value of a step, a 0-d tensor."""
        seen = self._each[name]
        torch.minimum(seen, torch.where(value.isfinite(), self.NEVER, step), out=seen)

    def known(self) -> Tensor:
        """``steps`` on the CPU; those of a GPU are copied without a sync, a step or two late."""
        if not self._on_gpu:
            return self.steps
        known = self._copy
        if self._copied.query():  # returns at once
            known = self._copy.clone()
            self._copy.copy_(self.steps, non_blocking=True)
            self._copied.record()
        return known


class Schedule(TrainerCallback):
    """After which steps a run logs, scores the model and writes a checkpoint, beside its arguments.

    The loss is logged at each checkpoint and at the last step, whatever ``logging_steps`` is, so no
    logged mean covers steps before and after a step from which a run may be resumed. At the last
    step the run itself takes the scores.
    """

    def __init__(self, trainer: RunTrainer) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # After a resume the learning rate follows this run's schedule, which may be longer.
        rates = kwargs["lr_scheduler"]
        if state.global_step and hasattr(rates, "lr_lambdas"):
            each = zip(rates.base_lrs, rates.lr_lambdas, strict=True)
            rates._last_lr = [base * factor(rates.last_epoch) for base, factor in each]
            for group, rate in zip(kwargs["optimizer"].param_groups, rates._last_lr, strict=True):
                group["lr"] = rate

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        step, every, last = state.global_step, self.trainer.eval_every, state.max_steps
        if step in self.trainer.milestones:
            control.should_save = control.should_log = True
        if every is not None and step % every == 0 and step < last:
            control.should_evaluate = control.should_log = True
        if step % args.save_steps == 0 or step >= last:
            control.should_log = True


class Progress(TrainerCallback):
    """Shows a progress bar with loss and tokens/s, or lines of text without a terminal."""

    def __init__(self) -> None:
        self.bar: tqdm | None = None
        self._began = 0.0
        self._first_step = 0
        self._estimated = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            self._began, self._first_step = time.perf_counter(), state.global_step
            self._estimated = False
            self.bar = tqdm(
                total=state.max_steps,
                initial=state.global_step,
                unit="step",
                dynamic_ncols=True,
                disable=not _is_terminal(),
            )

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.bar is None:
            return
        self.bar.update()
        done, gone = state.global_step - self._first_step, time.perf_counter() - self._began
        enough = done >= _ESTIMATE_STEPS and gone >= _ESTIMATE_SECONDS
        if self.bar.disable and enough and not self._estimated:
            self._estimated = True
            say(f"about {duration(self._to_go(state))} to go")

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if self.bar is None or logs is None or "loss" not in logs:
            return
        shown = {
            name.removesuffix("_loss"): f"{value:.4f}"
            for name, value in logs.items()
            if name.endswith("loss")
        }
        shown["tokens/s"] = f"{logs['tokens_per_second']:,.0f}"
        if self.bar.disable:
            shown["gone"] = duration(time.perf_counter() - self._began)
            shown["to go"] = duration(self._to_go(state))
            text = "  ".join(f"{name} {value}" for name, value in shown.items())
            say(f"step {state.global_step}/{state.max_steps}  {text}")
        else:
            self.bar.set_postfix(shown)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.bar is not None:
            self.bar.close()
            self.bar = None

    def _to_go(self, state: TrainerState) -> float:
        done = max(state.global_step - self._first_step, 1)
        return (time.perf_counter() - self._began) / done * (state.max_steps - state.global_step)


def duration(seconds: float) -> str:
    """Hours, minutes and seconds, as 1:02:03."""
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"


def _is_terminal() -> bool:
    """Whether a bar can be drawn on stderr; some terminals report 0 columns."""
    try:
        return sys.stderr.isatty() and os.get_terminal_size(sys.stderr.fileno()).columns > 0
    except (OSError, ValueError):
        return False
