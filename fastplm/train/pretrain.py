"""One pre-training run, from text to checkpoints, figures and a picture."""

from __future__ import annotations

import functools
import json
import os
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fastplm._checks import ArgumentValueError, DataError, check, check_choice, message
from fastplm.data import (
    PretrainingStream,
    TokenStore,
    embedded_corpus,
    load_tokenizer,
    read_documents,
    tokenize,
    train_tokenizer,
)
from fastplm.data._cache import default_cache
from fastplm.models import _electra_options
from fastplm.train.choices import FAMILIES, PRECISIONS
from fastplm.train.objectives import (
    OBJECTIVES,
    Objective,
    build_model,
    choose_objective,
    choose_unit,
)
from fastplm.train.presets import (
    OPTIMIZERS,
    Preset,
    configuration,
    lamb_learning_rate,
    preset,
)

if TYPE_CHECKING:
    from torch.utils.data import Dataset
    from transformers import (
        PreTrainedModel,
        PreTrainedTokenizerBase,
        TrainerCallback,
        TrainingArguments,
    )

#: The name of the corpus that needs no file.
EMBEDDED = "embedded"

_ELECTRA_CHOICES = {
    "electra_objective": _electra_options.OBJECTIVES,
    "electra_sharing": _electra_options.SHARINGS,
    "electra_generator": _electra_options.GENERATORS,
}
_HELD_OUT = 0.05
#: The most samples of held-out text that a run is judged by.
HELD_OUT_SAMPLES = 512
_TOKENS_AT_ONCE = 1 << 24
_KEPT_CHECKPOINTS = 2
# What may differ between a run and its continuation without changing the loss curve.
_FREE_ON_RESUME = {"resume", "out", "cache", "workers", "save_every", "log_every"}
# These are recorded as the token ids that they give.
_IN_THE_DATA = {"corpus", "tokenizer", "vocab_size"}


@dataclass
class PretrainArguments:
    """The settings of a run; see ``fastplm pretrain --help``.

    Raises:
        ArgumentValueError: a value is out of its range.
    """

    arch: str
    corpus: Sequence[str | Path]
    steps: int
    out: str | Path
    tokenizer: str | Path | None = None
    vocab_size: int = 30522
    block_size: int = 128
    batch_size: int = 32
    lr: float | None = None
    warmup: int | None = None
    seed: int = 0
    save_every: int = 1000
    log_every: int = 10
    resume: bool = False
    dropout: float = 0.1
    attention_dropout: float = 0.0
    precision: str = "auto"
    workers: int = 0
    gradient_accumulation: int = 1
    objective: str | None = None
    unit: str | None = None
    optimizer: str = "adamw"
    electra_objective: str = "rtd"
    electra_sharing: str | None = None
    electra_generator: str = "model"
    two_stage: bool = False
    cache: str | Path = field(default_factory=default_cache)

    def __post_init__(self) -> None:
        family = self.preset.family
        check_choice("pretrain", "precision", self.precision, PRECISIONS)
        check_choice("pretrain", "optimizer", self.optimizer, OPTIMIZERS)
        self.corpus = [str(path) for path in self.corpus]
        self.objective = choose_objective(self.arch, family, self.objective)
        self.unit = choose_unit(family, self.objective, self.unit)
        self._check_electra(family)
        for name, low in (
            ("steps", 1),
            ("vocab_size", 6),
            ("block_size", 8),
            ("batch_size", 1),
            ("save_every", 1),
            ("log_every", 1),
            ("workers", 0),
            ("gradient_accumulation", 1),
        ):
            value = getattr(self, name)
            check(value >= low, "pretrain", name, value, f"{low} or more", "Raise it.")
        if self.lr is None:
            self.lr = self.preset.learning_rate
            if self.optimizer == "lamb":
                processes = int(os.environ.get("WORLD_SIZE", "1"))
                self.lr = lamb_learning_rate(
                    self.batch_size * self.gradient_accumulation * processes
                )
        if self.warmup is None:
            self.warmup = min(10_000, self.first_stage // 10)
        check(
            0 <= self.warmup <= self.first_stage,
            "pretrain",
            "warmup",
            self.warmup,
            f"0 to {self.first_stage}, the steps of {'a stage' if self.two_stage else 'the run'}",
            "Choose a number of steps in between.",
        )
        check(self.lr > 0, "pretrain", "lr", self.lr, "more than 0", "Raise it.")
        for name in ("dropout", "attention_dropout"):
            value = getattr(self, name)
            check(0 <= value < 1, "pretrain", name, value, "0 or more, below 1", "Change it.")
        if family == "t5":
            check(
                self.attention_dropout in (0, self.dropout),
                "pretrain",
                "attention_dropout",
                self.attention_dropout,
                f"nothing or {self.dropout}, as T5 has one rate for all its dropout",
                "Choose it by --dropout.",
            )
            self.attention_dropout = self.dropout
        check(
            0 <= self.seed < 1 << 32, "pretrain", "seed", self.seed, "0 to 2^32 - 1", "Change it."
        )

    @property
    def preset(self) -> Preset:
        """The architecture's."""
        return preset(self.arch)

    @property
    def first_stage(self) -> int:
        """The steps of the first stage of a two-stage training, or of the run."""
        return self.steps // 2 if self.two_stage else self.steps

    def _check_electra(self, family: str) -> None:
        for name, choices in _ELECTRA_CHOICES.items():
            if getattr(self, name) is not None:
                check_choice("pretrain", name, getattr(self, name), choices)
        for name in (*_ELECTRA_CHOICES, "two_stage"):
            default = type(self).__dataclass_fields__[name].default
            check(
                family == "electra" or getattr(self, name) == default,
                "pretrain",
                name,
                f"{getattr(self, name)} with {self.arch}",
                "an ELECTRA",
                "Leave the option out, or choose an electra architecture.",
            )
        if family != "electra":
            return
        if self.electra_sharing is None:
            self.electra_sharing = "none" if self.two_stage else "embeddings"
        for name, wanted, expected in (
            ("electra_generator", "model", "model, a generator that can be trained first"),
            ("electra_sharing", "none", "none, as the generator is frozen in the second stage"),
        ):
            check(
                not self.two_stage or getattr(self, name) == wanted,
                "pretrain",
                name,
                f"{getattr(self, name)} in a two-stage training",
                expected,
                "Leave one of the two options out.",
            )
        check(
            not self.two_stage or self.steps > 1,
            "pretrain",
            "steps",
            self.steps,
            "2 or more, for two stages",
            "Raise it.",
        )

    def joint_settings(self) -> dict[str, Any]:
        """The fields of ``ElectraJointConfig`` that the settings name."""
        return {
            "objective": self.electra_objective,
            "embedding_sharing": self.electra_sharing,
            "generator_type": self.electra_generator,
            "stage": 1 if self.two_stage else None,
            "sampling_seed": self.seed,
        }


def pretrain(args: PretrainArguments) -> dict[str, Any]:
    """Run a pre-training; write checkpoints, ``metrics.json``, ``loss.png``, TensorBoard logs.

    Under torchrun every process calls it; the first one writes.

    Args:
        args: the settings.

    Returns:
        The content of ``metrics.json``.

    Raises:
        FastplmError: the corpus, the tokenizer, the output folder or a setting is of no use.
    """
    from transformers import set_seed
    from transformers.integrations import TensorBoardCallback

    from fastplm.train.trainer import last_checkpoint

    out = Path(args.out)
    checkpoint = last_checkpoint(out)
    _check_output(args, out, checkpoint)
    training_arguments = _training_arguments(args, out)
    tokenizer, store, train_dataset, held_out = _load(args, out, training_arguments)
    set_seed(args.seed)
    model = make_model(args, tokenizer)
    if args.electra_generator == "unigram":
        model.set_token_counts(count_tokens(store, tokenizer))
    collator = make_collator(args, tokenizer)
    first = training_arguments.process_index == 0
    if first:
        _record_run(args, out, tokenizer, store, training_arguments, checkpoint)
    callbacks = []
    if first:
        from torch.utils.tensorboard import SummaryWriter

        done = 0 if checkpoint is None else int(checkpoint.name.removeprefix("checkpoint-"))
        # What the killed run had logged beyond its last checkpoint is logged again.
        writer = SummaryWriter(str(out / "tensorboard"), purge_step=done + 1)
        callbacks.append(TensorBoardCallback(writer))
    trainer = _make_trainer(
        args, training_arguments, model, tokenizer, collator, train_dataset, callbacks
    )
    trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    metrics = _finish(args, out, trainer, tokenizer, collator, held_out) if first else {}
    trainer.accelerator.wait_for_everyone()
    return metrics


def seconds_a_step(args: PretrainArguments) -> float:
    """The median time of a step of such a run, taken with a model that is thrown away.

    Nothing is printed or written, but the cache, where the run finds its tokenizer and tokens.
    """
    from fastplm.train.trainer import Progress, Stopwatch

    out = Path(args.out)
    training_arguments = _training_arguments(args, out)
    tokenizer, _, train_dataset, _ = _load(args, out, training_arguments)
    model, collator = make_model(args, tokenizer), make_collator(args, tokenizer)
    stopwatch = Stopwatch()
    trainer = _make_trainer(
        args, training_arguments, model, tokenizer, collator, train_dataset, [stopwatch]
    )
    trainer.remove_callback(Progress)
    trainer.train()
    return stopwatch.median


def open_corpus(corpus: Sequence[str | Path]) -> Iterable[str]:
    """The documents of the paths named, or of Python itself for the one name "embedded".

    Raises:
        DataError: see ``read_documents``.
    """
    return embedded_corpus() if list(corpus) == [EMBEDDED] else read_documents(corpus)


def make_dataset(
    args: PretrainArguments,
    store: TokenStore,
    tokenizer: PreTrainedTokenizerBase,
    *,
    length: int | None = None,
    at_most: int | None = None,
) -> Dataset:
    """The training stream over a store: blocks of text, or pairs of segments.

    Args:
        length: the number of samples; by default each block or run of sentences once.
        at_most: an upper bound of it.
    """
    objective = _objective(args)
    source: Any = objective.source(args, store, tokenizer)
    length = length or len(source)
    if at_most is not None:
        length = min(length, at_most)
    stream = PretrainingStream(source, seed=args.seed, length=length)
    return objective.samples(stream, tokenizer)


def hold_out(
    args: PretrainArguments, store: TokenStore, tokenizer: PreTrainedTokenizerBase
) -> tuple[TokenStore, Dataset | None]:
    """The tokens to train on, and samples of a tail held out where both parts are large enough."""
    rest, tail = store.split(_HELD_OUT)
    try:
        make_dataset(args, rest, tokenizer)
        return rest, make_dataset(args, tail, tokenizer, at_most=HELD_OUT_SAMPLES)
    except DataError:
        return store, None


def make_collator(args: PretrainArguments, tokenizer: PreTrainedTokenizerBase) -> Any:
    """What corrupts the samples of a run."""
    return _objective(args).collator(args, tokenizer)


def make_model(args: PretrainArguments, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """The untrained model of a run."""
    family = args.preset.family
    config = configuration(
        args.arch,
        vocab_size=len(tokenizer),
        block_size=args.block_size,
        dropout=args.dropout,
        attention_dropout=args.attention_dropout,
        tokenizer=tokenizer,
        joint=args.joint_settings() if family == "electra" else None,
    )
    return build_model(family, str(args.objective), config)


def count_tokens(store: TokenStore, tokenizer: PreTrainedTokenizerBase) -> torch.Tensor:
    """How often each token occurs, for a unigram generator: int64 [V].

    0 for special tokens, which are never masked; nothing is added for tokens that do not occur.
    """
    counts = torch.zeros(len(tokenizer), dtype=torch.int64)
    for start in range(0, len(store), _TOKENS_AT_ONCE):
        tokens = store.tokens[start : start + _TOKENS_AT_ONCE].astype("int64")
        counts += torch.from_numpy(tokens).bincount(minlength=len(counts))
    counts[torch.tensor(tokenizer.all_special_ids)] = 0
    return counts


def hardware_has_bf16() -> bool:
    """Whether the device of a run multiplies bf16 in hardware."""
    if torch.cuda.is_available():
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def corrupts_on_device() -> bool:
    """Whether samples are corrupted where the model is, and not by the workers that read them."""
    return torch.cuda.is_available()


def _objective(args: PretrainArguments) -> Objective:
    return OBJECTIVES[str(args.objective)]


def _collation(collator: Any) -> dict[str, Any]:
    if corrupts_on_device():
        return {"data_collator": collator.pad, "corrupt": collator.corrupt}
    return {"data_collator": collator}


def _load(
    args: PretrainArguments, out: Path, training_arguments: TrainingArguments
) -> tuple[PreTrainedTokenizerBase, TokenStore, Dataset, Dataset | None]:
    """The tokenizer, the tokens to train on, the run's samples of them, and those held out."""
    with training_arguments.main_process_first(desc="preparing the data"):
        documents = open_corpus(args.corpus)
        tokenizer = _tokenizer(args, out, documents)
        store, held_out = hold_out(args, tokenize(documents, tokenizer, args.cache), tokenizer)
        samples = args.steps * args.gradient_accumulation * args.batch_size
        train_dataset = make_dataset(
            args, store, tokenizer, length=samples * training_arguments.world_size
        )
    return tokenizer, store, train_dataset, held_out


def _make_trainer(
    args: PretrainArguments,
    training_arguments: TrainingArguments,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    collator: Any,
    train_dataset: Dataset,
    callbacks: list[TrainerCallback],
) -> Any:
    return _trainer_class(args)(
        model=model,
        args=training_arguments,
        train_dataset=train_dataset,
        processing_class=tokenizer,
        callbacks=callbacks,
        optimizer_cls_and_kwargs=_optimizer(args),
        **_collation(collator),
    )


def _trainer_class(args: PretrainArguments) -> Any:
    from fastplm.train.trainer import PretrainingTrainer
    from fastplm.train.two_stage import TwoStageTrainer

    if args.two_stage:
        return functools.partial(TwoStageTrainer, first_stage=args.first_stage)
    return PretrainingTrainer


def _optimizer(args: PretrainArguments) -> tuple[Any, dict[str, Any]] | None:
    """What the Trainer makes its optimizer of; by itself it makes AdamW."""
    if args.optimizer == "adamw":
        return None
    from fastplm.train.optimizer import Lamb

    return Lamb, {"lr": args.lr, "betas": (0.9, 0.999), "eps": 1e-6}


def _check_output(args: PretrainArguments, out: Path, checkpoint: Path | None) -> None:
    check(
        checkpoint is not None or not args.resume,
        "pretrain",
        "resume",
        f"{out}, which holds no complete checkpoint",
        "the output folder of an interrupted run",
        "Check --out, or start afresh without --resume.",
        DataError,
    )
    check(
        checkpoint is None or args.resume,
        "pretrain",
        "out",
        f"{out}, which holds checkpoints of another run",
        "an empty or new folder",
        "Choose another --out, or go on with that run by --resume.",
        DataError,
    )
    check(
        not out.exists() or out.is_dir(),
        "pretrain",
        "out",
        f"{out}, a file",
        "a folder",
        "Choose another --out.",
        DataError,
    )


def _training_arguments(args: PretrainArguments, out: Path) -> TrainingArguments:
    from transformers import TrainingArguments

    on_gpu = torch.cuda.is_available()
    bf16 = hardware_has_bf16() if args.precision == "auto" else args.precision == "bf16"
    check(
        not (bf16 and on_gpu) or hardware_has_bf16(),
        "pretrain",
        "precision",
        "bf16",
        "a GPU that has it",
        "Use --precision fp32.",
    )
    return TrainingArguments(
        output_dir=str(out),
        max_steps=args.steps,
        per_device_train_batch_size=args.batch_size,
        gradient_accumulation_steps=args.gradient_accumulation,
        learning_rate=args.lr,
        warmup_steps=args.warmup,
        lr_scheduler_type="linear",
        weight_decay=0.01,
        adam_epsilon=1e-6,
        max_grad_norm=1.0,
        bf16=bf16,
        use_cpu=not on_gpu,
        seed=args.seed,
        train_sampling_strategy="sequential",
        remove_unused_columns=False,
        dataloader_num_workers=args.workers,
        dataloader_persistent_workers=args.workers > 0,
        dataloader_pin_memory=on_gpu,
        ddp_find_unused_parameters=args.two_stage,  # each stage trains one of two models
        logging_steps=args.log_every,
        logging_first_step=True,
        logging_nan_inf_filter=False,
        save_steps=args.save_every,
        save_total_limit=_KEPT_CHECKPOINTS,
        disable_tqdm=True,
        report_to="none",
    )


def _tokenizer(
    args: PretrainArguments, out: Path, documents: Iterable[str]
) -> PreTrainedTokenizerBase:
    needs = _objective(args).needs
    if args.resume:
        return load_tokenizer(out / "tokenizer", needs)
    if args.tokenizer is not None:
        return load_tokenizer(args.tokenizer, needs)
    kind = FAMILIES[args.preset.family].tokenizer
    return train_tokenizer(documents, args.vocab_size, args.cache, kind)


def _record_run(
    args: PretrainArguments,
    out: Path,
    tokenizer: PreTrainedTokenizerBase,
    store: TokenStore,
    training_arguments: TrainingArguments,
    checkpoint: Path | None,
) -> None:
    """Keep what the loss curve depends on, and refuse to go on with anything else."""
    from fastplm.train.report import write_json

    settings = asdict(args)
    names = sorted(settings.keys() - _FREE_ON_RESUME - _IN_THE_DATA)
    run = {name: settings[name] for name in names}
    run["corpus"] = store.directory.name
    run["processes"] = training_arguments.world_size
    run["precision"] = "bf16" if training_arguments.bf16 else "fp32"
    record = out / "run.json"
    if checkpoint is None:
        out.mkdir(parents=True, exist_ok=True)
        tokenizer.save_pretrained(out / "tokenizer")
        write_json(record, run)
        return
    before = json.loads(record.read_text()) if record.is_file() else run
    for name, value in run.items():
        if before.get(name) != value:
            raise ArgumentValueError(
                message(
                    "pretrain",
                    name,
                    value,
                    f"{before.get(name)}, as in the run that is resumed",
                    "Give the same arguments, or another --out.",
                )
            )


def _finish(
    args: PretrainArguments,
    out: Path,
    trainer: Any,
    tokenizer: PreTrainedTokenizerBase,
    collator: Any,
    held_out: Dataset | None,
) -> dict[str, Any]:
    from fastplm.train.evaluate import evaluate
    from fastplm.train.report import curve, plot_losses, versions, write_json

    model = trainer.model
    models = {"model": model}
    if args.preset.family == "electra":
        models = {"discriminator": model.discriminator}
        if model.generator is not None:
            models["generator"] = model.generator
    for name, part in models.items():
        scratch = out / f".{name}"
        shutil.rmtree(scratch, ignore_errors=True)
        part.save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
        shutil.rmtree(out / name, ignore_errors=True)
        os.rename(scratch, out / name)
    history = curve(trainer.state.log_history)
    metrics = {
        "arguments": json.loads(json.dumps(asdict(args), default=str)),
        "versions": versions(),
        "device": str(trainer.args.device),
        "precision": "bf16" if trainer.args.bf16 else "fp32",
        "processes": trainer.args.world_size,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "vocab_size": len(tokenizer),
        "history": history,
        "tokens_per_second": trainer.tokens_per_second,
        "train_seconds": trainer.train_seconds,
        # Of the first process since it was started, by --resume perhaps; workers keep their count
        # to themselves, but for a warning.
        "dropped_tokens": None
        if args.workers > 0 and not corrupts_on_device()
        else collator.dropped,
        "models": {name: str(out / name) for name in models},
        "picture": str(out / "loss.png"),
    }
    if held_out is not None:
        metrics["held_out"] = evaluate(
            model, held_out, collator, args.batch_size, _objective(args).token_loss
        )
    plot_losses(out / "loss.png", f"{args.arch}: pre-training loss", history)
    write_json(out / "metrics.json", metrics)
    return metrics
