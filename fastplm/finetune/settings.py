"""The settings of ``fastplm finetune``. Nothing here imports PyTorch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from fastplm.finetune.tasks import SEQ2SEQ, SOURCE_ENCODER, TASKS, WARM_START
from fastplm.run.settings import (
    ANY,
    BATCH,
    COUNT,
    MODEL,
    NOT_NEGATIVE,
    POSITIVE,
    SEEDS,
    SHARDED,
    Number,
    Numbers,
    Rule,
    Settings,
    apart,
    common,
    integer,
    needs,
    setting,
)

if TYPE_CHECKING:
    from typing_extensions import Self

#: Settings of fine-tuning that only an encoder has.
ENCODERS = ("freeze", "features", "head", "pooling")
LIBRARIES = ("fastplm", "transformers")
#: The choices of ``features.FeaturesConfig``.
FEATURES = ("last", "mix", "last-four")
HEADS = ("linear", "bilstm")
POOLINGS = ("cls", "mean", "max", "last")
#: Settings that mean nothing where nothing is trained.
_OF_A_TRAINING = (
    *("steps", "epochs", "learning_rate", "layer_decay", "optimizer", "eval_every", "teacher"),
    "fsdp",
)
_OF_A_TEACHER = ("teacher_weight", "teacher_temperature")


def _defaults(name: str) -> str:
    """In the words of the help: the default of a setting, and those of tasks that have another."""
    of_each = {task: getattr(each, name) for task, each in TASKS.items()}
    (usual, _), *_ = Counter(of_each.values()).most_common(1)
    others = [f"; {task} {value}" for task, value in of_each.items() if value != usual]
    return f"{usual}{''.join(others)}"


def _are_different_rates(args: FinetuneArguments) -> bool:
    rates = args.learning_rate if isinstance(args.learning_rate, list) else []
    return len({f"{rate:g}" for rate in rates}) == len(rates) != 1


@dataclass(frozen=True)
class FinetuneArguments(Settings):
    """The settings of a fine-tuning; see ``fastplm finetune --help``.

    Raises:
        ArgumentValueError: a value is out of its range.
    """

    where = "finetune"
    topics = {
        "the run": (
            *("task", "model", "data", "eval_data", "out", "epochs", "steps", "batch_size"),
            *("learning_rate", "seeds", "resume", "overwrite"),
        ),
        "the data": (
            *("text_columns", "label_column", "max_length", "max_samples", "max_eval_samples"),
            *("threshold", "null_threshold"),
        ),
        "the model": (
            *("from_scratch", "freeze", "own_head", "features", "head", "pooling", "both_orders"),
            *("lm_weight", "library"),
        ),
        "how it learns": (
            *("optimizer", "warmup", "weight_decay", "layer_decay", "dropout", "precision", "seed"),
            *("eval_every", "teacher", "teacher_weight", "teacher_temperature"),
        ),
        "seq2seq: texts to be written": SEQ2SEQ,
        "the machine, and what is written": (
            *("threads", "fsdp", "save_every", "log_every", "report_to"),
        ),
    }

    task: str = setting(
        "what is learned: " + "; ".join(f"{each.learns} ({name})" for name, each in TASKS.items()),
        choices=tuple(TASKS),
    )
    data: str | Path = setting(
        "file of examples to train on, also .parquet, .arrow, or hf:NAME of a data set on the "
        "Hugging Face Hub; text, as pretrain reads it, for sop and nsp; for seq2seq perhaps a "
        ".yaml file of several tasks, each with its data and prefix",
        path="FILE",
    )
    out: str | Path = common("out")
    model: str | Path | None = setting(
        "folder of the checkpoint and its tokenizer, or its name on the Hugging Face Hub; needed "
        "unless there is --encoder",
        None,
        path=MODEL,
    )
    eval_data: str | Path | None = setting(
        "file of examples to score (default: a tenth of --data is held out)", None, path="FILE"
    )
    text_columns: Sequence[str] | None = setting(
        "columns of the texts in a table; two for pair, one or two for regression, source and "
        "target for seq2seq (default: the usual names)",
        None,
        metavar="NAME",
    )
    label_column: str | None = common("label_column")
    threshold: float | None = setting(
        "make two classes of labels that are scores: those above it are positive, all others "
        "negative",
        None,
        number=ANY,
    )
    null_threshold: float | None = setting(
        "questions that may have no answer get none if its score is more than this above the best "
        "span's (default: the value with the highest F1 on the examples that are scored)",
        None,
        number=ANY,
    )
    both_orders: bool = setting(
        "GPT and GPT-2: read the two texts in both orders, and classify the sum of the two states; "
        "for tasks such as similarity, where the order means nothing",
        False,
    )
    lm_weight: float = setting(
        "GPT and GPT-2: weight of a language model's loss on the same texts, beside the task's "
        "(GPT's paper: 0.5)",
        0.0,
        number=NOT_NEGATIVE,
    )
    from_scratch: bool = setting(
        "new weights: only the configuration and the tokenizer of --model are used", False
    )
    freeze: bool = setting(
        "train the head alone: the encoder has no dropout and no gradients, and computes each "
        "example once",
        False,
    )
    own_head: bool = setting(
        "sop and nsp: train nothing, and judge the head for pairs that the pre-training of --model "
        "has left",
        False,
    )
    features: str = setting(
        "states that the head reads: those of the last layer, a learned weighted sum of all "
        "layers' (mix), or the last four layers' one behind the other",
        "last",
        choices=FEATURES,
    )
    head: str = setting(
        "linear, or a bidirectional LSTM of two layers before it",
        "linear",
        choices=HEADS,
    )
    pooling: str | None = setting(
        "the state of a text: its first token's (cls), the mean or maximum over tokens, or its "
        "last token's (default: that of the model's class; mean with --features or --head; last of "
        "an encoder that reads from left to right)",
        None,
        choices=POOLINGS,
    )
    teacher: str | Path | None = setting(
        "folder of a checkpoint that was fine-tuned for the same task and labels: the model learns "
        "its predictions, too",
        None,
        path=MODEL,
    )
    teacher_weight: float = setting(
        "with --teacher: weight of its predictions in the loss; the labels have the rest",
        0.5,
        number=Number(float, 0, 1, "a number from 0 to 1"),
    )
    teacher_temperature: float = setting(
        "with --teacher: what the logits of both are divided by", 2.0, number=POSITIVE
    )
    targets: str | Path | None = setting(
        "seq2seq: file of the targets of --data, line by line (default: --data is a table)",
        None,
        path="FILE",
    )
    eval_targets: Sequence[str | Path] | None = setting(
        "seq2seq: file of the targets of --eval-data; several files hold several right answers",
        None,
        path="FILE",
    )
    prefix: str = setting(
        "seq2seq: text before each source, such as 'translate English to German: '", ""
    )
    max_target_length: int = setting(
        "seq2seq: most tokens of a target",
        128,
        number=integer(2),
    )
    beams: int = setting("seq2seq: beams of the search when texts are written", 4, number=integer())
    length_penalty: float = setting(
        "seq2seq: the power of the length by which a beam's log-probability is divided",
        1.0,
        number=ANY,
    )
    stemmer: bool = setting(
        "seq2seq: ROUGE compares the stems of English words (Porter), as many papers do", False
    )
    mixture_cap: int | None = setting(
        "seq2seq, several tasks in --data: an epoch reads N examples of each task at most, the "
        "next ones each time (default: all)",
        None,
        number=COUNT,
    )
    mixture_temperature: float = setting(
        "seq2seq, several tasks in --data: a task's share of an epoch is that of its examples to "
        "the power of 1/T, so that a large T gives each task as many (default: 1)",
        1.0,
        number=Number(float, 1, 1e6, "a number from 1 to 1e6"),
        metavar="T",
    )
    encoder: str | Path | None = setting(
        "seq2seq: in place of --model, folder of the checkpoint that starts the encoder of a new "
        "encoder-decoder",
        None,
        path=MODEL,
    )
    decoder: str | Path | None = setting(
        "with --encoder: folder of the checkpoint that starts the decoder (default: the same)",
        None,
        path=MODEL,
    )
    warm: str = setting(
        "with --encoder: which parts take their weights from the checkpoints; the others are new",
        "both",
        choices=("both", "encoder", "decoder", "none"),
    )
    share: bool = setting(
        "with --encoder: encoder and decoder share all weights but cross-attention", False
    )
    target_vocab_size: int | None = setting(
        "with --encoder: train a byte-level vocabulary of N tokens on the targets; the decoder's "
        "embeddings are then new",
        None,
        number=integer(300),
    )
    source_encoder_layers: int | None = setting(
        "seq2seq: translate with a pre-trained BART from a language it has not seen: a new encoder "
        "of N layers, with a vocabulary of its own, in place of its word embeddings",
        None,
        number=integer(1, 1000),
    )
    source_vocab_size: int | None = setting(
        "with --source-encoder-layers: tokens of that vocabulary, which is trained on the sources "
        "(default: 8000)",
        None,
        number=integer(300),
    )
    source_encoder_steps: int | None = setting(
        "with --source-encoder-layers: first steps, in which most of BART is frozen (default: half "
        "of all)",
        None,
        number=integer(0, 2**40),
    )
    eval_every: int | None = common("eval_every")
    epochs: float = setting(
        "passes over the examples",
        3.0,
        number=Number(float, math.nextafter(0, 1), 1e9, "a number above 0, 1e9 at most"),
        excludes="length",
    )
    steps: int | None = setting(
        "optimizer steps instead of --epochs", None, number=COUNT, excludes="length"
    )
    batch_size: int | None = setting(
        f"samples of a batch (default: {_defaults('batch_size')})", None, number=BATCH
    )
    learning_rate: float | list[float] | None = setting(
        "peak learning rate; of several, such as 5e-5,1e-4,2e-4, the best one on a tenth of --data "
        "is taken for all seeds (default: 1e-4 for models narrower than 768, else 5e-5; 2e-5 from "
        "1024 on; 1e-3 with --freeze or adafactor)",
        None,
        number=Numbers(POSITIVE),
        metavar="RATE",
        also={"lr": None},
    )
    optimizer: str = setting(
        "adamw, with a rate that falls to 0; or adafactor, as T5 was fine-tuned: a constant rate, "
        "relative to the size of each weight",
        "adamw",
        choices=("adamw", "adafactor"),
    )
    warmup: int | None = setting(
        "steps of linear warm-up (default: a tenth of them, 10000 at most)",
        None,
        number=integer(0, 2**40),
    )
    weight_decay: float | None = setting(
        "weight decay of AdamW (default: 0.01)", None, number=NOT_NEGATIVE
    )
    layer_decay: float = setting(
        "the rate of each layer as a share of that of the layer above it, as ELECTRA is fine-tuned "
        "with 0.8; 1: all layers have one rate",
        1.0,
        number=Number(float, math.nextafter(0, 1), 1.0, "a number above 0, 1 at most"),
    )
    max_length: int | None = setting(
        f"most tokens of a sample (default: {_defaults('max_length')})", None, number=integer(16)
    )
    dropout: float | None = common("dropout")
    max_samples: int | list[int] | None = setting(
        "train on the first N of the examples in a random order, the same in every run; several "
        "growing numbers, such as 100,300,1000, give scores for each",
        None,
        number=Numbers(COUNT),
    )
    max_eval_samples: int | None = setting(
        "score N examples",
        None,
        number=COUNT,
    )
    seeds: int = setting(
        "number of runs, each with a seed of its own",
        1,
        number=integer(),
    )
    seed: int = common("seed", "seed of the first run: of head, order and dropout")
    precision: str = common("precision")
    library: str = setting(
        "whose classes are trained: the same samples in the same order, from the same weights",
        "fastplm",
        choices=LIBRARIES,
    )
    save_every: int = common("save_every")
    log_every: int = common("log_every")
    report_to: str = common("report_to", default="none")
    threads: int | None = common("threads")
    fsdp: bool = common("fsdp")
    resume: bool = common("resume")
    overwrite: bool = common("overwrite")

    rules = (
        SEEDS,
        Rule(
            "source_encoder_layers",
            lambda args: (
                not args.source_encoder_layers or (args.encoder, args.library) == (None, "fastplm")
            ),
            "a BART in --model, and --library fastplm",
            fix="Leave the option out, or --encoder and --library.",
        ),
        apart("model", "encoder", "either --model or --encoder"),
        Rule(
            "model",
            lambda args: bool(str(args.model or "").strip() or args.encoder),
            "the folder of a checkpoint",
            fix="Give --model DIR, or --encoder DIR for a new encoder-decoder.",
        ),
        Rule(
            "eval_targets",
            lambda args: args.eval_targets is None or args.eval_data is not None,
            "--eval-data, too",
            fix="Give both.",
        ),
        Rule(
            "eval_targets",
            lambda args: (
                args.eval_data is None
                or (args.eval_targets is not None) == (args.targets is not None)
            ),
            "a file of targets for both --data and --eval-data, or for none",
            fix="Give the evaluation's texts in the form of the training's.",
        ),
        apart("targets", "text_columns", "a table with --text-columns, or a file of targets"),
        Rule(
            "share",
            lambda args: (
                not args.share
                or (args.library, args.decoder, args.target_vocab_size) == ("fastplm", None, None)
            ),
            "one checkpoint for both parts, with its own vocabulary, and --library fastplm",
            fix="Leave --decoder, --target-vocab-size and --library out.",
        ),
        Rule(
            "warm",
            lambda args: not args.share or args.warm in ("both", "none"),
            "both or none, as --share has one set of weights",
            "share",
            "Choose one of them.",
        ),
        apart(
            "from_scratch", "freeze", "no --freeze, as a frozen encoder has to be trained already"
        ),
        Rule(
            "weight_decay",
            lambda args: args.optimizer == "adamw" or not args.weight_decay,
            "nothing with --optimizer adafactor, which has none here",
            fix="Leave it out.",
        ),
        Rule(
            "max_samples",
            lambda args: (
                not isinstance(args.max_samples, list)
                or (args.max_samples == sorted({*args.max_samples}) and len(args.max_samples) > 1)
            ),
            "two growing numbers or more",
            fix="Sort them.",
        ),
        Rule(
            "learning_rate",
            _are_different_rates,
            "two different rates or more, or one without a list",
            fix="Leave out those that are there twice.",
        ),
        Rule(
            "learning_rate",
            lambda args: (
                not isinstance(args.learning_rate, list) or not isinstance(args.max_samples, list)
            ),
            "one rate, as several numbers of examples have a curve at one rate",
            "max_samples",
            "Choose the rate first, in a run of its own.",
        ),
        *(
            needs(name, "is_mixture", (True,), expected, beside="data", fix="Leave it out.")
            for expected in ("a .yaml file of several tasks in --data",)
            for name in ("mixture_cap", "mixture_temperature")
        ),
        *(
            needs(name, "is_mixture", (False,), expected, beside="data", fix="Write it there.")
            for expected in ("nothing, as each task in the file of --data has its own",)
            for name in ("prefix", "targets", "eval_data", "text_columns")
        ),
        apart("teacher", "both_orders", "one order, as the teacher reads one"),
        apart("layer_decay", "freeze", "no --freeze, as only layers that are trained have a rate"),
        *(
            apart("own_head", name, f"no --{name.replace('_', '-')}, as nothing is trained")
            for name in (*ENCODERS, "from_scratch", "eval_data", "max_samples", *_OF_A_TRAINING)
        ),
        SHARDED,
        apart("fsdp", "freeze", "no --freeze, as a head alone is small"),
        apart(
            "fsdp", "source_encoder_layers", "no new encoder, which trains a part of BART at first"
        ),
        apart("own_head", "seeds", "one seed, as nothing is drawn"),
        apart("own_head", "library", "--library fastplm"),
    )
    #: The settings that only a new encoder-decoder, or a new encoder of a BART, has.
    needs = {
        **dict.fromkeys(WARM_START, "encoder"),
        **dict.fromkeys(SOURCE_ENCODER[1:], "source_encoder_layers"),
        **dict.fromkeys(_OF_A_TEACHER, "teacher"),
    }

    def resolved(self) -> Self:
        for name in dict.fromkeys(name for each in TASKS.values() for name in each.options):
            tasks = [task for task, each in TASKS.items() if name in each.options]
            able = self.task in tasks or self.is_default(name)
            got = f"{getattr(self, name)} with --task {self.task}"
            expected, fix = f"--task {' or '.join(tasks)}", "Leave one of the two options out."
            self.check(name, able, expected, fix, got)
        for name, other in self.needs.items():
            option = f"--{other.replace('_', '-')}"
            given = getattr(self, other) is not None or self.is_default(name)
            self.check(name, given, f"{option} beside it", f"Leave it out, or give {option}.")
        lists = {name: getattr(self, name) for name in ("max_samples", "learning_rate")}
        lists = {n: [*each] if isinstance(each, tuple) else each for n, each in lists.items()}
        alone = isinstance(self.eval_targets, str | Path)
        decay, adamw = self.weight_decay, self.optimizer == "adamw"
        return self.changed(
            **lists,
            eval_targets=[self.eval_targets] if alone else self.eval_targets,
            batch_size=self.batch_size or TASKS[self.task].batch_size,
            weight_decay=(0.01 if adamw else 0.0) if decay is None else decay,
        ).checked()

    def curve(self) -> list[tuple[str, FinetuneArguments]]:
        """(folder inside ``out``, settings) for each number of examples to train on."""
        if not isinstance(self.max_samples, list):
            return [("", self)]
        sizes = self.max_samples
        return [(f"samples-{size}", replace(self, max_samples=size)) for size in sizes]

    def rates(self) -> list[tuple[str, FinetuneArguments]]:
        """(folder inside ``out``, settings) for each learning rate to choose from, if several."""
        if not isinstance(self.learning_rate, list):
            return []
        return [
            (f"rate-{rate:g}", replace(self, learning_rate=rate)) for rate in self.learning_rate
        ]

    @property
    def is_mixture(self) -> bool:
        """Whether ``data`` is a file of several tasks."""
        return self.task == "seq2seq" and str(self.data).endswith((".yaml", ".yml"))

    @property
    def checkpoint(self) -> str | Path:
        """The folder of the model, or of the encoder of a new encoder-decoder."""
        return self.model or self.encoder or ""
