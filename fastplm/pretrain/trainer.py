"""The Trainer of a pre-training: its losses, and how long its steps take."""

from __future__ import annotations

import functools
import inspect
import math
import statistics
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from transformers import TrainerCallback
from transformers.optimization import _get_linear_schedule_with_warmup_lr_lambda

from fastplm.run.losses import (
    PAIR_LABELS,
    check_counts_all_batches,
    pair_logits,
    shifts_labels,
    summed,
    tokens_and_sequences,
)
from fastplm.run.trainer import RunTrainer

#: What ELECTRA's joint model counts, see ``ElectraJointOutput``.
DETECTION_COUNTS = ("true_positives", "predicted_positives", "positives", "correct", "total")

# How long a ``Stopwatch`` looks at the steps, and at how many at least.
_WARM_UP_STEPS, _TIMED_STEPS, _TIMED_SECONDS = 5, 3, 5.0


class PretrainingTrainer(RunTrainer):
    """``RunTrainer`` whose losses add up over processes.

    - Every mean of a loss is taken over all that one optimizer step sees, whichever process or
      micro-batch it is in: labelled tokens for losses over the vocabulary, sequences for those
      over pairs of segments, tokens for replaced-token detection. So two processes, or two
      accumulated batches, give the loss and gradient of one batch of twice the size.
    - The parts of the loss and the tokens a second are logged beside the loss. An ``eval_dataset``
      is corrupted as the training's batches are and leaves no trace among them; its ``eval_loss``
      is Transformers' mean over batches (``fastplm.pretrain.evaluate`` takes that over all labels).

    Args:
        args, kwargs: of ``transformers.Trainer``.
        corrupt: the second half of a collator whose first one, ``pad``, is the ``data_collator``:
            it then runs on the device of the model.
    """

    where = "pretrain"

    lr_scheduler: LRScheduler | None

    def __init__(
        self, *args: Any, corrupt: Callable[[dict], dict] | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._corrupt = corrupt
        parameters = inspect.signature(self.model.forward).parameters
        names = ("num_sequences_in_batch", "num_tokens_in_batch")
        self._denominators = [name for name in names if name in parameters]
        self._has_logits = "output_logits" in parameters
        check_counts_all_batches("PretrainingTrainer", self.model)
        if shifts_labels(self.model):
            # GPT-2's class does not say so, and Transformers, which asks once, before this line,
            # would count the first label of each row, too.
            self.model.loss_type = "ForCausalLM"
            self._loss_shifts_labels = True
        self._in_step: dict[str, Tensor] = {}
        self._in_window: dict[str, Tensor] = {}

    def create_scheduler(
        self, num_training_steps: int, optimizer: Optimizer | None = None
    ) -> LRScheduler | None:
        if self.args.lr_scheduler_type == "inverse_sqrt" and self.lr_scheduler is None:
            from fastplm.run.optimizer import inverse_square_root

            # Transformers' of this name rises from 0 at first.
            factor = functools.partial(
                inverse_square_root, warmup=self.args.get_warmup_steps(num_training_steps)
            )
            self.lr_scheduler = LambdaLR(optimizer or self.optimizer, factor)
            self._created_lr_scheduler = True
        return super().create_scheduler(num_training_steps, optimizer)

    def as_read(self, batches: Iterator) -> Iterator:
        # Not just before the forward, as the labels of all batches are counted first.
        return batches if self._corrupt is None else map(self._corrupted, batches)

    def count(self, batches: list[dict[str, Any]]) -> Tensor:
        """What losses are divided by; returns the tokens, an encoder-decoder's of both sides."""
        counts = torch.zeros(3, dtype=torch.int64, device=self.args.device)
        for batch in batches:
            tokens, sequences = tokens_and_sequences(batch)
            counts[0] += tokens.to(counts.device)
            counts[1] += sequences
            if self.model.config.is_encoder_decoder and "labels" in batch:
                counts[2] += batch["labels"].ne(-100).sum().to(counts.device)
        counts = self.accelerator.reduce(counts, reduction="sum")
        self._in_step = {"num_tokens_in_batch": counts[0], "num_sequences_in_batch": counts[1]}
        return counts[0] + counts[2]

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        if self._corrupt is not None:
            inputs = self._corrupted(inputs)
        self.count([inputs])
        inputs = inputs | {name: self._in_step[name] for name in self._denominators}
        if prediction_loss_only and self._has_logits:
            inputs["output_logits"] = False
        return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)

    def _corrupted(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        assert self._corrupt is not None
        return self._corrupt(self._prepare_inputs(batch))

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None
    ) -> Tensor:
        inputs = inputs | {name: self._in_step[name] for name in self._denominators}
        loss = super().training_step(model, inputs, num_items_in_batch)
        for name, value in self.found.items():
            self._in_window[name] = self._in_window.get(name, 0.0) + value.double()
        return loss

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        loss, outputs = super().compute_loss(
            model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch
        )
        if self.model.training:
            counts = {name: outputs[name] for name in DETECTION_COUNTS if name in outputs}
            self.found = self._parts(loss.detach(), inputs, outputs) | counts
        return (loss, outputs) if return_outputs else loss

    def _parts(
        self, loss: Tensor, inputs: dict[str, Any], outputs: dict[str, Any]
    ) -> dict[str, Tensor]:
        """This process's share of each part of the loss; the shares of a step sum to its mean."""
        parts = {
            name: value.detach()
            for name, value in outputs.items()
            if name.endswith("_loss") and value is not None
        }
        answers = pair_logits(outputs)
        for label, name in PAIR_LABELS.items():
            if label not in inputs or answers is None:
                continue
            total = summed(answers.detach(), inputs[label])
            parts[f"{name}_loss"] = total / inputs["num_sequences_in_batch"]
            # The Trainer scales the loss up because gradients are averaged over processes.
            share = loss / self.accelerator.num_processes
            parts["mlm_loss"] = share - parts[f"{name}_loss"]
        return parts

    def window_parts(self) -> dict[str, float]:
        steps = self.state.global_step - self._window_step
        sums = {
            name: self.accelerator.reduce(value, reduction="sum").item()
            for name, value in sorted(self._in_window.items())
        }
        self._in_window = {}
        parts = {name: value / steps for name, value in sums.items() if name.endswith("_loss")}
        if "positives" in sums:
            parts.update(detection(sums))
        return parts


class TwoStageTrainer(PretrainingTrainer):
    """ELECTRA's: trains a model of ``config.stage`` 1, and from a step on in stage 2.

    Each stage has its own warm-up and linear decay; ``first_stage`` is the steps of the first one.
    The optimizer is not reset: it has no moments of the discriminator before its first gradient.

    Source: Clark et al. 2020 (arXiv 2003.10555), §3.2, Training Algorithms.
    """

    lr_scheduler: LRScheduler | None

    def __init__(self, *args: Any, first_stage: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._first_stage = first_stage
        self.add_callback(_ChangeOfStage(first_stage))

    def create_scheduler(
        self, num_training_steps: int, optimizer: Optimizer | None = None
    ) -> LRScheduler:
        if self.lr_scheduler is None:
            first, warmup = self._first_stage, self.args.get_warmup_steps(num_training_steps)

            def factor(step: int) -> float:
                begin, end = (0, first) if step < first else (first, num_training_steps)
                return _get_linear_schedule_with_warmup_lr_lambda(
                    step - begin, num_warmup_steps=warmup, num_training_steps=end - begin
                )

            self.lr_scheduler = LambdaLR(optimizer or self.optimizer, factor)
            self._created_lr_scheduler = True
        return self.lr_scheduler


class _ChangeOfStage(TrainerCallback):
    """The stage is a function of the step, so that a resumed run is in the right one."""

    def __init__(self, first_stage: int) -> None:
        self.first_stage = first_stage

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        if state.global_step > self.first_stage:
            model.config.stage = 2  # the weights are those of the checkpoint

    def on_step_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        if state.global_step == self.first_stage and model.config.stage == 1:
            model.start_second_stage()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.first_stage:
            control.should_log = True  # no mean of losses runs over both stages


def detection(counts: dict[str, float]) -> dict[str, float]:
    """How well replaced tokens are found, from ``DETECTION_COUNTS`` summed over batches.

    The balanced accuracy is the mean of both classes' recalls: 0.5 for any answer that does not
    look at the token.
    """
    positives, total = counts["positives"], counts["total"]
    false_positives = counts["predicted_positives"] - counts["true_positives"]
    recall = counts["true_positives"] / max(positives, 1)
    specificity = 1 - false_positives / max(total - positives, 1)
    return {
        "replaced_precision": counts["true_positives"] / max(counts["predicted_positives"], 1),
        "replaced_recall": recall,
        "balanced_accuracy": (recall + specificity) / 2,
        "accuracy": counts["correct"] / max(total, 1),
        "accuracy_of_always_original": 1 - positives / max(total, 1),
    }


class Stopwatch(TrainerCallback):
    """Times steps, after some that warm up, and ends the training after a few seconds of them.

    Args:
        patience: seconds after which the steps so far, one at least, have warmed up.
    """

    def __init__(self, patience: float = math.inf) -> None:
        self._ends: list[float] = []
        self._patience = patience

    @property
    def timed(self) -> int:
        """The number of timed steps."""
        return len(self._ends) - 1

    @property
    def median(self) -> float:
        """The median time of a step."""
        return statistics.median(after - before for before, after in pairwise(self._ends))

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._began = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        waited = time.perf_counter() - self._began > self._patience
        if state.global_step < _WARM_UP_STEPS and not waited:
            return
        self._ends.append(time.perf_counter())
        long_enough = self._ends[-1] - self._ends[0] >= _TIMED_SECONDS
        if long_enough and len(self._ends) > _TIMED_STEPS:
            control.should_training_stop = True
