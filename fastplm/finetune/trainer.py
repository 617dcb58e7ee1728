"""The Trainer of a fine-tuning, whose batches depend on the seed alone."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, Trainer, TrainingArguments
from transformers.trainer_pt_utils import LengthGroupedSampler

from fastplm.finetune.bart_translation import TwoSteps
from fastplm.finetune.layers import set_layer_rates
from fastplm.finetune.losses import of_batch
from fastplm.finetune.mixture import of_epoch
from fastplm.finetune.models import usual_learning_rate
from fastplm.finetune.tasks._task import Collator, Feature, Task
from fastplm.models._base import FastplmModel
from fastplm.run.optimizer import Adafactor
from fastplm.run.settings import resolve_warmup
from fastplm.run.trainer import RunTrainer, training_arguments


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
        return sum(map(self.task.tokens, batches))


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


def make_trainer(task: Task, model: PreTrainedModel, seed: int, out: Path) -> FinetuningTrainer:
    """The Trainer that trains a model of ``build_model`` on the examples of a task."""
    args, settings = task.args, arguments_of(task, seed, out)
    if args.learning_rate is None:
        settings.learning_rate = usual_learning_rate(args, model.config)
    ours = args.library == "fastplm" and isinstance(model, FastplmModel)
    adafactor = (Adafactor, {"lr": settings.learning_rate})
    trainer = FinetuningTrainer(
        model=model,
        args=settings,
        train_dataset=task.dataset,
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


def arguments_of(task: Task, seed: int, out: Path) -> TrainingArguments:
    """The ``TrainingArguments`` of a seed.

    Raises:
        ArgumentValueError: the warm-up is longer than the training.
    """
    args = task.args
    rate = args.learning_rate
    assert not isinstance(rate, list), "see FinetuneArguments.rates"
    settings = training_arguments(
        args,
        out,
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
        steps = max(1, math.ceil(args.epochs * math.ceil(task.dataset.epoch / batch)))
    warmup = resolve_warmup(steps, args.warmup)
    expected = f"0 to {steps}, the steps of the run"
    args.check("warmup", warmup <= steps, expected, "Lower it.", warmup)
    settings.max_steps, settings.warmup_steps = steps, warmup
    return settings
