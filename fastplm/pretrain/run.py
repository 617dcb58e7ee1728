"""One pre-training run, from text to checkpoints, figures and a picture."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fastplm.data._folder import say
from fastplm.pretrain.data import (
    RunData,
    count_tokens,
    held_out_collator,
    make_collator,
    prepare_data,
)
from fastplm.pretrain.model import make_model
from fastplm.pretrain.objectives import objective_of
from fastplm.pretrain.settings import COLLAPSED, PretrainArguments, PretrainPlan
from fastplm.pretrain.short_blocks import ShortFirst
from fastplm.pretrain.stream import StreamRun

if TYPE_CHECKING:
    from transformers import TrainerCallback, TrainingArguments


def pretrain(args: PretrainArguments) -> dict[str, Any]:
    """Run a pre-training; write checkpoints, ``metrics.json``, ``loss.png``, and logs.

    Under torchrun every process calls it and the first one writes. Returns the content of
    ``metrics.json``. With several ``seeds`` each has a run of its own in ``out/seed-0`` …, and
    ``out/metrics.json`` has the means and 95 % intervals of their losses.

    Raises:
        FastplmError: the corpus, the tokenizer, the output folder or a setting is wrong.
    """
    args.check("dry_run", not args.dry_run, "False", "Call fastplm.pretrain.dry_run.dry_run.")
    if args.seeds > 1:
        from fastplm.pretrain.seeds import Seeds

        return Seeds(args, lambda part: Pretraining(part).run()).run()
    return Pretraining(args).run()


class Pretraining(StreamRun):
    """A run of ``fastplm pretrain``."""

    args: PretrainPlan

    title = "{args.arch}: pre-training loss"

    def check_kind(self, before: dict[str, Any]) -> None:
        # The record of several seeds has no steps: each seed has a record of its own.
        expected, fix = "2 or more, as in the runs that are resumed", "Give the same number."
        self.args.check("seeds", "steps" in before, expected, fix)

    def trainer_settings(self, **settings: Any) -> TrainingArguments:
        adafactor = self.args.optimizer == "adafactor"
        return super().trainer_settings(
            lr_scheduler_type="inverse_sqrt" if adafactor else "linear",
            weight_decay=0.0 if adafactor else 0.01,
            ddp_find_unused_parameters=self.args.two_stage,  # each stage trains one of two models
        )

    def resumed(self, before: dict[str, Any]) -> None:
        args, share = self.args, "the first stage of a two-stage training is half"
        if not args.two_stage and args.short_block_size is None:
            return super().resumed(before)
        if not args.two_stage:
            share = f"the first {args.short_share:g} are of short blocks"
        same, fix = args.steps == before["steps"], "Give the same steps, or another --out."
        args.check("steps", same, f"{before['steps']}, of which {share}", fix)

    def read(self) -> RunData:
        return prepare_data(self.args, self.settings, self.checkpoint)

    def facts(self) -> dict[str, Any]:
        # Version 2: the pair of a run of one sentence is a random one.
        pairs = 2 if self.args.objective == "mlm+nsp" else None
        return super().facts() | {"pairs": pairs, "flops": self.args.flops}

    def lines(self) -> str:
        from fastplm.pretrain.announce import pretraining

        return pretraining(self)

    @property
    def states(self) -> frozenset[int]:
        count = self.args.states or 1
        return frozenset(round(self.args.steps * number / count) for number in range(1, count))

    @property
    def token_loss(self) -> str:
        return objective_of(self.args).token_loss

    def models(self, model: Any) -> dict[str, Any]:
        if self.args.objective != "rtd":
            return {"model": model}
        models = {"discriminator": model.discriminator}
        if model.generator is not None:
            models["generator"] = model.generator
        return models

    def flops_a_token(self, model: Any) -> float | None:
        return objective_of(self.args)(self.args, self.data.tokenizer).flops_a_token(model.config)

    def held_out(self, model: Any, samples: Any) -> dict[str, Any]:
        from fastplm.pretrain.evaluate import evaluate

        args, data = self.args, self.data
        judge = held_out_collator(args, data.tokenizer)
        found = evaluate(model, samples, judge, args.batch_size, self.token_loss)
        return found | self._counted

    def remark(self, held_out: dict[str, Any]) -> None:
        if held_out.get("encoder_similarity", 0.0) > COLLAPSED:
            say(
                "Warning: the encoder gives all tokens one output (their mean cosine is "
                f"{held_out['encoder_similarity']:.4f}), so the decoder cannot read its source. "
                "Lower --lr, or raise --warmup."
            )

    @functools.cached_property
    def _counted(self) -> dict[str, float]:
        """The losses of counts on held-out text."""
        from fastplm.pretrain.evaluate import ngram_losses

        data = self.data
        tail = data.all.tokens[len(data.store) :]
        return ngram_losses(data.store.tokens, tail, len(data.tokenizer))

    def make_trainer(self, *callbacks: TrainerCallback) -> tuple[Any, Any]:
        from transformers import set_seed

        from fastplm.pretrain.trainer import PretrainingTrainer
        from fastplm.pretrain.two_stage import TwoStageTrainer
        from fastplm.run.optimizer import Adafactor

        args, data = self.args, self.data
        set_seed(args.seed)
        model: Any = make_model(args, data.tokenizer)
        if args.electra_generator == "unigram":
            model.set_token_counts(count_tokens(data.store, data.tokenizer))
        # Counting rows makes a GPU wait for nothing but this; a CPU counts them at once.
        on_gpu = self.settings.device.type == "cuda"
        collator = make_collator(args, data.tokenizer, unpad=on_gpu)
        settings: dict[str, Any] = {"callbacks": list(callbacks)}
        kind: type[PretrainingTrainer] = PretrainingTrainer
        if args.two_stage:
            kind = TwoStageTrainer
            settings["first_stage"] = args.first_stage
        if args.optimizer == "lamb":  # by itself the Trainer makes AdamW
            from fastplm.run.lamb import Lamb

            lamb = {"lr": args.lr, "betas": (0.9, 0.999), "eps": 1e-6}
            settings["optimizer_cls_and_kwargs"] = Lamb, lamb
        if args.optimizer == "adafactor":
            settings["optimizer_cls_and_kwargs"] = Adafactor, {"lr": args.lr}
        feed: Any = collator
        if args.short_block_size is not None:
            feed = ShortFirst(collator, args.pieces)
        trainer = self.trainer_of(kind, model, feed, **settings)
        trainer.graphs = on_gpu and not args.no_graphs
        return trainer, collator


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
    from fastplm.pretrain.trainer import Stopwatch
    from fastplm.run.trainer import Progress

    training, stopwatch = Pretraining(args), Stopwatch(patience)
    training.settings = training.trainer_settings()
    training.data = prepare_data(training.args, training.settings, None, documents)
    trainer, _ = training.make_trainer(stopwatch)
    trainer.remove_callback(Progress)
    if second_stage:
        trainer.model.start_second_stage()
    trainer.train()
    return Rehearsal(trainer, training.data, stopwatch.median, stopwatch.timed)
