"""One pre-training run, from text to checkpoints, figures and a picture."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastplm.train.objectives import build_model
from fastplm.train.presets import configuration
from fastplm.train.pretrain_data import (
    RunData,
    count_tokens,
    make_collator,
    objective_of,
    prepare_data,
)
from fastplm.train.pretrain_settings import PretrainArguments
from fastplm.train.runner import StreamRun, collation, train_on_stream

if TYPE_CHECKING:
    from transformers import (
        PreTrainedModel,
        PreTrainedTokenizerBase,
        TrainerCallback,
        TrainingArguments,
    )


def pretrain(args: PretrainArguments) -> dict[str, Any]:
    """Run a pre-training; write checkpoints, ``metrics.json``, ``loss.png``, and logs.

    Under torchrun every process calls it and the first one writes. Returns the content of
    ``metrics.json``.

    Raises:
        FastplmError: the corpus, the tokenizer, the output folder or a setting is wrong.
    """
    args.check("dry_run", not args.dry_run, "False", "Call fastplm.train.dry_run.dry_run.")
    return train_on_stream(Pretraining(args))


class Pretraining(StreamRun):
    """A run of ``fastplm pretrain``."""

    args: PretrainArguments

    @property
    def title(self) -> str:
        return f"{self.args.arch}: pre-training loss"

    def training_arguments(self, out: Path) -> TrainingArguments:
        adafactor = self.args.optimizer == "adafactor"
        return self._training_arguments(
            out,
            lr_scheduler_type="inverse_sqrt" if adafactor else "linear",
            weight_decay=0.0 if adafactor else 0.01,
            ddp_find_unused_parameters=self.args.two_stage,  # each stage trains one of two models
        )

    def resumed(self, before: dict[str, Any]) -> None:
        if not self.args.two_stage:
            return super().resumed(before)
        self.args.check(
            "steps",
            self.args.steps == before["steps"],
            f"{before['steps']}, of which the first stage of a two-stage training is half",
            "Give the same steps, or another --out.",
        )

    def prepare(self, training_arguments: TrainingArguments, checkpoint: Path | None) -> RunData:
        return prepare_data(self.args, training_arguments, checkpoint)

    def facts(self) -> dict[str, Any]:
        # Version 2: the pair of a run of one sentence is a random one.
        return {"pairs": 2 if self.args.objective == "mlm+nsp" else None}

    def trainer(
        self,
        training_arguments: TrainingArguments,
        data: RunData,
        callbacks: list[TrainerCallback],
    ) -> tuple[Any, Any]:
        return _make_trainer(self.args, training_arguments, data, callbacks)

    def announcement(
        self, data: RunData, model: Any, training_arguments: TrainingArguments, done: int
    ) -> str:
        from fastplm.train.announce import pretraining

        return pretraining(self.args, data, model, training_arguments, done)

    def models(self, model: Any) -> dict[str, Any]:
        if self.args.objective != "rtd":
            return {"model": model}
        models = {"discriminator": model.discriminator}
        if model.generator is not None:
            models["generator"] = model.generator
        return models

    def flops_a_token(self, model: Any, tokenizer: Any) -> float | None:
        return objective_of(self.args)(self.args, tokenizer).flops_a_token(model.config)

    def held_out(self, model: Any, samples: Any, collator: Any) -> dict[str, Any]:
        from fastplm.train.evaluate import evaluate

        loss = objective_of(self.args).token_loss
        return evaluate(model, samples, collator, self.args.batch_size, loss)


@dataclass(frozen=True)
class Rehearsal:
    """Some steps of a run with a model that is thrown away: the median time of ``timed`` ones."""

    trainer: Any
    data: RunData
    seconds: float
    timed: int


def rehearse(
    args: PretrainArguments,
    documents: Iterable[str] | None = None,
    patience: float = math.inf,
    *,
    second_stage: bool = False,
) -> Rehearsal:
    """Take some steps of such a run.

    Nothing is printed or written, but the cache, where the run finds its tokenizer and tokens.

    Args:
        args: of the run.
        documents: its text, in the place of ``args.corpus``.
        patience: see ``Stopwatch``.
        second_stage: of a two-stage training take the steps of the second one.
    """
    from fastplm.run.trainer import Progress
    from fastplm.train.trainer import Stopwatch

    training_arguments = Pretraining(args).training_arguments(Path(args.out))
    data = prepare_data(args, training_arguments, None, documents)
    stopwatch = Stopwatch(patience)
    trainer, _ = _make_trainer(args, training_arguments, data, [stopwatch])
    trainer.remove_callback(Progress)
    if second_stage:
        trainer.model.start_second_stage()
    trainer.train()
    return Rehearsal(trainer, data, stopwatch.median, stopwatch.timed)


def make_model(args: PretrainArguments, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """The untrained model of a run."""
    family = args.preset.family
    config = configuration(
        args.preset,
        vocab_size=len(tokenizer),
        block_size=args.block_size,
        dropout=args.dropout,
        attention_dropout=args.attention_dropout,
        tokenizer=tokenizer,
        objective=args.objective,
        joint=args.joint_settings() if family == "electra" else None,
    )
    return build_model(family, str(args.objective), config)


def _make_trainer(
    args: PretrainArguments,
    training_arguments: TrainingArguments,
    data: RunData,
    callbacks: list[TrainerCallback],
) -> tuple[Any, Any]:
    """The trainer of an untrained model, and the collator of its samples."""
    from transformers import set_seed

    from fastplm.train.optimizer import Adafactor, Lamb
    from fastplm.train.trainer import PretrainingTrainer
    from fastplm.train.two_stage import TwoStageTrainer

    set_seed(args.seed)
    model = make_model(args, data.tokenizer)
    if args.electra_generator == "unigram":
        model.set_token_counts(count_tokens(data.store, data.tokenizer))
    collator = make_collator(args, data.tokenizer)
    settings = collation(collator)
    kind: type[PretrainingTrainer] = PretrainingTrainer
    if args.two_stage:
        kind = TwoStageTrainer
        settings["first_stage"] = args.first_stage
    if args.optimizer == "lamb":  # by itself the Trainer makes AdamW
        lamb = {"lr": args.lr, "betas": (0.9, 0.999), "eps": 1e-6}
        settings["optimizer_cls_and_kwargs"] = Lamb, lamb
    if args.optimizer == "adafactor":
        settings["optimizer_cls_and_kwargs"] = Adafactor, {"lr": args.lr}
    trainer = kind(
        model=model,
        args=training_arguments,
        train_dataset=data.samples,
        processing_class=data.tokenizer,
        callbacks=callbacks,
        **settings,
    )
    return trainer, collator
