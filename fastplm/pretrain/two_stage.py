"""ELECTRA's two-stage training: the generator first, then the discriminator from its weights."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from transformers import TrainerCallback
from transformers.optimization import _get_linear_schedule_with_warmup_lr_lambda

from fastplm.pretrain.trainer import PretrainingTrainer


class TwoStageTrainer(PretrainingTrainer):
    """Trains a model of ``config.stage`` 1, and from a step on in stage 2.

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
