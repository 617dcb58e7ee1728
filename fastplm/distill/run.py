"""Knowledge distillation: trains a smaller student from a teacher and text."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, Dataset

from fastplm.data import PretrainingStream, TokenStore, load_tokenizer, train_tokenizer
from fastplm.distill.data import (
    ParallelCollator,
    ParallelText,
    PlainCollator,
    parallel_lines,
    parallel_stores,
)
from fastplm.distill.models import (
    check_pair,
    check_vocabulary,
    hash_of_model,
    is_causal,
    load_model,
    make_student,
)
from fastplm.distill.objectives import KINDS, Distillation
from fastplm.distill.settings import UNCOUNTED, DistillArguments
from fastplm.errors import about
from fastplm.pretrain.data import HELD_OUT, HELD_OUT_SAMPLES, RunData, open_corpus, read_text
from fastplm.pretrain.objectives import CausalTokens, MaskedTokens, Objective, ReplacedTokens
from fastplm.pretrain.stream import TextRun, Training, trainer_of
from fastplm.pretrain.trainer import DETECTION_COUNTS, PretrainingTrainer, detection
from fastplm.run.budget import described
from fastplm.run.checkpoint import check_vocabulary_fits
from fastplm.run.flops import MASKED, flops_a_token
from fastplm.run.losses import counted_labels, tokens_and_sequences
from fastplm.run.report import counted

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, TrainingArguments


def distill(args: DistillArguments) -> dict[str, Any]:
    """Train a student; write checkpoints, ``model/``, ``metrics.json``, ``loss.png``.

    A run can be stopped and resumed like a pre-training. Returns the content of ``metrics.json``.

    Raises:
        FastplmError: a model, the corpus, the output folder or a setting is wrong.
    """
    distilling = Distilling()
    return TextRun(args, distilling.read, distilling.build).run()


class DistillationTrainer(PretrainingTrainer):
    """``PretrainingTrainer`` for models whose batches may have no labels."""

    where = "distill"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for model in self.model.constants():
            model.to(self.args.device)

    @property
    def items(self) -> torch.Tensor:  # type: ignore[override]
        # Given a number, Trainer does not also divide the loss by the number of micro-batches.
        return self._in_step["num_tokens_in_batch"]


class Distilling:
    """What ``fastplm distill`` reads and builds. The models are loaded before the text is read."""

    teacher: Any
    teacher_tokenizer: Any
    model: Distillation

    def read(
        self, plan: DistillArguments, settings: TrainingArguments, checkpoint: Any
    ) -> tuple[DistillArguments, RunData]:
        """The teacher and the student, which are checked, and the text."""
        self.teacher = load_model(plan, "teacher")
        with about(plan.where, "teacher"):
            self.teacher_tokenizer = load_tokenizer(
                plan.teacher, ("eos",) if is_causal(self.teacher.config) else ("pad", "cls", "sep")
            )
        known = self.teacher.get_input_embeddings().num_embeddings
        check_vocabulary_fits(plan, "teacher", len(self.teacher_tokenizer), known)
        parallel = plan.recipe == "multilingual"
        if parallel:
            data = self._read_pairs(plan, settings)
        self.model = self._model(plan, data.tokenizer if parallel else self.teacher_tokenizer)
        if plan.steps is None:
            plan = plan.with_flops(
                self._flops_a_token(plan) * plan.samples_a_step * plan.block_size
            )
        if not parallel:
            preparing = settings.main_process_first(desc="preparing the data")
            with preparing, about(plan.where, "corpus"):
                documents, kind = open_corpus(plan.corpus, plan.cache), _kind(plan, self.teacher)
                tokenizer = load_tokenizer(plan.teacher, kind.needs)
                objective = kind(tokenizer, plan.block_size, plan.seed)
                length = plan.steps * plan.samples_a_step
                data = read_text(documents, objective, plan.cache, length)
        paths = {name: getattr(plan, name) for name in ("teacher", "student", "generator")}
        models = {
            name: None if path is None else f"files whose hash is {hash_of_model(path)}"
            for name, path in paths.items()
        }
        facts = {**models, "translation": None, **data.facts, "flops": plan.flops}
        return plan, replace(data, facts=facts)

    def _read_pairs(self, plan: DistillArguments, settings: TrainingArguments) -> RunData:
        assert plan.translation is not None
        preparing = settings.main_process_first(desc="preparing the data")
        with preparing, about(plan.where, "corpus"):
            lines = parallel_lines(plan.corpus, plan.translation)
            given = plan.student if plan.tokenizer is None else plan.tokenizer
            if plan.vocab_size is not None:
                tokenizer = train_tokenizer([*lines[0], *lines[1]], plan.vocab_size, plan.cache)
            else:
                tokenizer = load_tokenizer(given or plan.teacher, ("pad", "cls", "sep"))
            tokenizers = self.teacher_tokenizer, tokenizer
            stores = parallel_stores(lines, *tokenizers, plan.cache)
        ends = tuple((each.cls_token_id, each.sep_token_id) for each in tokenizers)
        count, source = len(lines[0]), stores[1]
        held_out = min(int(count * HELD_OUT), HELD_OUT_SAMPLES)

        def samples(first: int, last: int, length: int) -> Dataset:
            text = ParallelText(stores, ends, plan.block_size, first, last)  # type: ignore[arg-type]
            return PretrainingStream(text, seed=plan.seed, length=length)

        return RunData(
            tokenizer,
            source,
            TokenStore(source.directory, 0, int(source.documents[count - held_out])),
            samples(0, count - held_out, plan.steps * plan.samples_a_step),
            samples(count - held_out, count, held_out) if held_out else None,
            lines[0],
            facts={"translation": f"lines whose hash is {stores[2].directory.name}"},
        )

    def _model(self, plan: DistillArguments, tokenizer: PreTrainedTokenizerBase) -> Distillation:
        """The untrained model of the recipe, with student and teacher."""
        from transformers import set_seed

        set_seed(plan.seed)
        student = make_student(plan, self.teacher, tokenizer, self.teacher_tokenizer)
        check_pair(plan, student, self.teacher)
        kind: Any = KINDS[plan.recipe]
        if plan.recipe == "electra":
            generator = load_model(plan, "generator")
            check_vocabulary(plan, "generator", plan.generator, self.teacher_tokenizer)
            return kind(student, self.teacher, plan, generator)
        return kind(student, self.teacher, plan)

    def _flops_a_token(self, plan: DistillArguments) -> Any:
        """The FLOPs of the student's training and of the teacher's forward, of a token.

        None for the recipes that are not counted.
        """
        if plan.recipe in UNCOUNTED:
            return None
        masked = MASKED if plan.recipe == "distilbert" else 0.0
        student, teacher = (
            flops_a_token(part.config, plan.block_size, masked=masked)
            for part in (self.model.student, self.model.teacher)
        )
        return student + teacher / 3  # the teacher has no backward

    def build(self, plan: DistillArguments, settings: TrainingArguments, data: RunData) -> Training:
        """The trainer of the student, and what is saved and printed."""
        model, flops = self.model, self._flops_a_token(plan)
        # MiniLM trains only what comes before the attention of the last layer.
        settings.ddp_find_unused_parameters = not model.trains_all
        collator: Any = PlainCollator(data.tokenizer, block_size=plan.block_size)
        eval_collator = collator
        if plan.recipe == "multilingual":
            collator = ParallelCollator(data.tokenizer, teacher_tokenizer=self.teacher_tokenizer)
            eval_collator = collator
        elif model.labelled:
            kind = _kind(plan, self.teacher)
            objective = kind(data.tokenizer, plan.block_size, plan.seed)
            collator, eval_collator = objective.collator(), objective.eval_collator()
        trainer = trainer_of(DistillationTrainer, model, collator, settings, data)
        rows = {
            "held out": f"{data.held_out_samples:,} samples of the last "
            f"{data.held_out_tokens:,} tokens",
            "vocabulary": f"{len(data.tokenizer):,} tokens",
            "teacher": f"{plan.teacher}: {_size(model.teacher)}",
            "student": _size(model.student),
            "recipe": plan.recipe,
        }
        if plan.flops is not None:
            rows["budget"] = described(plan, flops * plan.samples_a_step * plan.block_size)
        return Training(
            trainer=trainer,
            collator=collator,
            models={"model": model.student},
            score=lambda: held_out_losses(
                trainer.model, data.held_out, eval_collator, plan.batch_size
            ),
            flops_a_token=flops,
            title=f"{plan.recipe}: distillation",
            rows=rows,
            at_most=True,
        )


def _kind(plan: DistillArguments, teacher: Any) -> type[Objective]:
    """The objective of a pre-training that reads the same samples."""
    if is_causal(teacher.config):
        return CausalTokens
    return ReplacedTokens if plan.recipe == "electra" else MaskedTokens


@torch.no_grad()
def held_out_losses(model: Any, samples: Any, collator: Any, batch_size: int) -> dict[str, Any]:
    """The losses of a distillation on all samples, as of one batch."""
    was_training, device = model.training, next(model.parameters()).device
    model.eval()
    batches = list(DataLoader(samples, batch_size=batch_size, collate_fn=collator))
    tokens, sequences = (
        sum(each) for each in zip(*map(tokens_and_sequences, batches), strict=True)
    )
    labels = (counted_labels(model, batch["labels"]) for batch in batches if "labels" in batch)
    everything = {
        "num_items_in_batch": sum(each.ne(-100).sum() for each in labels),
        "num_tokens_in_batch": tokens,
        "num_sequences_in_batch": sequences,
    }
    sums: dict[str, float] = {}
    for batch in batches:
        moved = {name: value.to(device) for name, value in batch.items()}
        for name, value in model(**moved, **everything).items():
            if name.endswith("_loss") or name in DETECTION_COUNTS:
                sums[name] = sums.get(name, 0.0) + float(value)
    model.train(was_training)
    result: dict[str, Any] = {"samples": len(samples)}
    result |= {name: value for name, value in sums.items() if name.endswith("_loss")}
    return result | (detection(sums) if "positives" in sums else {})


def _size(model: Any) -> str:
    """The size of a teacher or a student, in words."""
    config, count = model.config, sum(weight.numel() for weight in model.parameters())
    return (
        f"{type(model).__name__}, {counted(config.num_hidden_layers, 'layer')}, "
        f"width {config.hidden_size}, "
        f"{config.num_attention_heads} heads: {count:,} parameters"
    )
