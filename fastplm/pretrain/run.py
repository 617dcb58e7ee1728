"""One pre-training run, from text to checkpoints, figures and a picture."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastplm.data import load_tokenizer, train_tokenizer
from fastplm.errors import DataError, about
from fastplm.pretrain.blocks import ShortFirst
from fastplm.pretrain.data import RunData, count_tokens, in_cache, open_corpus, read_text
from fastplm.pretrain.model import flops_a_step, make_model
from fastplm.pretrain.objectives import learned_as, objective_of
from fastplm.pretrain.presets import FAMILIES
from fastplm.pretrain.settings import PretrainArguments, PretrainPlan
from fastplm.pretrain.stream import TextRun, Training, trainer_of, training_settings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, TrainerCallback, TrainingArguments


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

        return Seeds(args, lambda part: TextRun(part, read, build).run()).run()
    return TextRun(args, read, build).run()


def read(
    plan: PretrainPlan,
    settings: TrainingArguments,
    checkpoint: Path | None,
    documents: Iterable[str] | None = None,
) -> tuple[PretrainPlan, RunData]:
    """What a run reads, which the first process prepares; a resumed run keeps its tokenizer.

    Where a budget says how many steps there are, the plan has them now. ``documents`` take the
    place of ``plan.corpus``.
    """
    with settings.main_process_first(desc="preparing the data"):
        if documents is None:
            with about(plan.where, "corpus"):
                documents = open_corpus(plan.corpus, plan.cache)
        there = in_cache(plan.cache)
        tokenizer = _tokenizer(plan, checkpoint, documents)
        kind = f"{FAMILIES[plan.preset.family].tokenizer}-"
        trained_now = any(name.startswith(kind) for name in in_cache(plan.cache) - there)
        if plan.steps is None:
            plan = plan.with_flops(flops_a_step(plan, tokenizer))
        objective = objective_of(plan, tokenizer)
        with about(plan.where, "corpus"):
            data = read_text(documents, objective, plan.cache, plan.steps * plan.samples_a_step)
        if plan.short_block_size is not None:
            short = objective.short_first(data.samples, data.store, plan.short_samples)
            data = replace(data, samples=short)
    is_trained = plan.tokenizer is None and plan.start_from is None and checkpoint is None
    cached = ("vocabulary",) if is_trained and not trained_now else ()
    facts = {"pairs": objective.pairs_version, "flops": plan.flops}
    return plan, replace(data, cached=(*data.cached, *cached), facts=facts)


def _tokenizer(
    plan: PretrainPlan, checkpoint: Path | None, documents: Iterable[str]
) -> PreTrainedTokenizerBase:
    family = plan.preset.family
    if plan.start_from is not None:
        there = (Path(plan.start_from) / "config.json").is_file()
        expected, got = "a folder with a checkpoint", f"{plan.start_from}, without a config.json"
        plan.check("start_from", there, expected, "Check the path.", got, DataError)
    given = (plan.start_from or plan.tokenizer) if checkpoint is None else checkpoint
    if given is not None:
        with about(plan.where, "tokenizer" if plan.start_from is None else "start_from"):
            return load_tokenizer(given, learned_as(plan.objective, family).needs)
    assert plan.vocab_size is not None
    with about(plan.where, "corpus"):
        return train_tokenizer(documents, plan.vocab_size, plan.cache, FAMILIES[family].tokenizer)


def build(
    plan: PretrainPlan, settings: TrainingArguments, data: RunData, *callbacks: TrainerCallback
) -> Training:
    """The untrained model of a run with its trainer, and what else follows from its objective."""
    from transformers import set_seed

    from fastplm.pretrain import report
    from fastplm.pretrain.evaluate import evaluate, ngram_losses
    from fastplm.pretrain.trainer import PretrainingTrainer, TwoStageTrainer
    from fastplm.run.optimizer import Adafactor

    objective = objective_of(plan, data.tokenizer)
    set_seed(plan.seed)
    model: Any = make_model(plan, data.tokenizer)
    if plan.electra_generator == "unigram":
        model.set_token_counts(count_tokens(data.store, data.tokenizer))
    # Counting rows makes a GPU wait for nothing but this; a CPU counts them at once.
    on_gpu = settings.device.type == "cuda"
    collator: Any = objective.collator(unpad=on_gpu)
    options: dict[str, Any] = {"callbacks": list(callbacks)}
    kind: type[PretrainingTrainer] = PretrainingTrainer
    if plan.two_stage:  # each stage trains one of two models
        settings.ddp_find_unused_parameters = True
        kind, options["first_stage"] = TwoStageTrainer, plan.first_stage
    if plan.optimizer == "lamb":  # by itself the Trainer makes AdamW
        from fastplm.run.lamb import Lamb

        lamb = {"lr": plan.lr, "betas": (0.9, 0.999), "eps": 1e-6}
        options["optimizer_cls_and_kwargs"] = Lamb, lamb
    if plan.optimizer == "adafactor":
        options["optimizer_cls_and_kwargs"] = Adafactor, {"lr": plan.lr}
    feed = collator
    if plan.short_block_size is not None:
        feed = ShortFirst(collator, objective.pieces)
    trainer = trainer_of(kind, model, feed, settings, data, **options)
    trainer.graphs = on_gpu and not plan.no_graphs

    @functools.cache
    def counted() -> dict[str, float]:
        tail = data.all.tokens[len(data.store) :]
        return ngram_losses(data.store.tokens, tail, len(data.tokenizer))

    def score() -> dict[str, Any]:
        batches, size = objective.eval_collator(), plan.batch_size
        held_out: Any = data.held_out
        found = evaluate(trainer.model, held_out, batches, size, objective.token_loss)
        return found | counted()

    return Training(
        trainer=trainer,
        collator=collator,
        models=objective.saved(model),
        **({"whole": model.whole_states} if objective.is_joint else {}),
        score=score,
        flops_a_token=objective.flops_a_token(model.config),
        rows=report.rows_of_model(plan, data, model, objective),
        rows_of_learning={"learning rate": report.learning_rate(plan), **report.pairs(data)},
        title=f"{plan.arch}: pre-training loss",
        token_loss=objective.token_loss,
        beside_ngrams=objective.beside_ngrams,
    )


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

    plan, stopwatch = args.plan(), Stopwatch(patience)
    settings = training_settings(plan)
    plan, data = read(plan, settings, None, documents)
    trainer = build(plan, settings, data, stopwatch).trainer
    trainer.remove_callback(Progress)
    if second_stage:
        trainer.model.start_second_stage()
    trainer.train()
    return Rehearsal(trainer, data, stopwatch.median, stopwatch.timed)
