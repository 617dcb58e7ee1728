"""The settings of a run, each declared once: for the command line and for Python.

Nothing here imports PyTorch: ``fastplm --help`` does not wait for it.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar

from fastplm.errors import ArgumentValueError, FastplmError, check_choice, message
from fastplm.models import _electra_options
from fastplm.train.presets import (
    FAMILIES,
    MASKED,
    OBJECTIVES,
    OPTIMIZERS,
    PRESETS,
    Family,
    Preset,
    lamb_learning_rate,
    preset,
)

#: The minutes of a demo, without the installation.
MINUTES = 3.0
PRECISIONS = ("auto", "fp32", "bf16")
UNITS = ("token", "word", "ngram")
#: The tasks of fine-tuning, with the usual size of their batches.
BATCH_SIZES = {"classification": 32, "pair": 32, "tagging": 32, "qa": 16, "choice": 16}
LIBRARIES = ("fastplm", "transformers")
#: Samples of a run; beyond it the libraries below end the process.
_MOST_SAMPLES = 1 << 62
_TABLES = ("classification", "pair")


@dataclass(frozen=True)
class Number:
    """A finite number in a range; called, it reads one from the command line."""

    kind: type
    low: float
    high: float
    expected: str

    def __call__(self, text: str) -> Any:
        try:
            value = self.kind(text)
        except ValueError:
            value = math.nan
        if not self.holds(value):
            raise argparse.ArgumentTypeError(f"got {text[:40]!r}; expected {self.expected}")
        return value

    def holds(self, value: float) -> bool:
        """Whether the number is in the range."""
        return self.low <= value <= self.high


def whole(low: int = 1, high: int = 10**9) -> Number:
    """Whole numbers in a range; by default of sizes, and no memory holds more than that."""
    return Number(int, low, high, f"a whole number from {low} to {high}")


_LARGEST = sys.float_info.max
_ANY = Number(float, -_LARGEST, _LARGEST, "a number")
_POSITIVE = Number(float, math.nextafter(0, 1), _LARGEST, "a number above 0")
NOT_NEGATIVE = Number(float, 0, _LARGEST, "a number, 0 or more")
_SHARE = Number(float, 0, math.nextafter(1, 0), "a number, 0 or more and below 1")
_SEED = whole(0, 2**32 - 1)
_COUNT = whole(1, 2**40)  # of steps or examples; beyond it a number is a mistake


def setting(
    help: str,
    default: Any = MISSING,
    *,
    number: Number | None = None,
    choices: Sequence[str] | None = None,
    metavar: str | None = None,
    excludes: str | None = None,
    on_command_line: Any = None,
    default_factory: Any = MISSING,
) -> Any:
    """A field of the arguments of a command.

    Args:
        help: of the option.
        default: of the field; without one the option is required.
        number: the range of its values.
        choices: its values.
        metavar: how the help calls its value.
        excludes: the name of a group of options of which at most one is given.
        on_command_line: the default of an option whose field has none.
        default_factory: of the field.
    """
    metadata = {
        "help": help,
        "number": number,
        "choices": choices,
        "metavar": metavar,
        "excludes": excludes,
        "default": on_command_line,
    }
    return field(default=default, default_factory=default_factory, metadata=metadata)


def as_in(arguments: type, name: str) -> Any:
    """The field of another class of arguments, so that it is declared once."""
    found = next(each for each in fields(arguments) if each.name == name)
    return field(
        default=found.default, default_factory=found.default_factory, metadata=found.metadata
    )


def add_settings(parser: argparse.ArgumentParser, arguments: type) -> dict[str, Any]:
    """Add an option for each field of a class of arguments; returns the groups by name."""
    groups: dict[str, Any] = {}
    for each in fields(arguments):
        known = each.metadata
        group = known["excludes"]
        if group is not None and group not in groups:
            groups[group] = parser.add_mutually_exclusive_group()
        default = each.default if known["default"] is None else known["default"]
        options: dict[str, Any] = {"action": "store_true"}
        if each.type != "bool":
            options = {"type": known["number"], "choices": known["choices"]}
            options["metavar"] = known["metavar"]
            options["nargs"] = "+" if "Sequence" in str(each.type) else None
            options["required"] = default is MISSING and each.default_factory is MISSING
        # Without a default of its own an option has none to show: its help says what happens.
        shown = each.type != "bool" and default not in (None, MISSING)
        (groups[group] if group else parser).add_argument(
            f"--{each.name.replace('_', '-')}",
            help=known["help"],
            default=default if shown else argparse.SUPPRESS,
            **options,
        )
    return groups


class Settings:
    """Base of the arguments of a command, which checks each value against its declaration."""

    #: The name of the command.
    where: ClassVar[str]
    out: str | Path

    def check(
        self,
        name: str,
        condition: bool,
        expected: str,
        fix: str,
        got: object = None,
        error: type[FastplmError] = ArgumentValueError,
    ) -> None:
        """Raise the error of a setting unless ``condition`` holds; it got its value by default."""
        if not condition:
            got = getattr(self, name) if got is None else got
            raise error(message(self.where, name, got, expected, fix))

    def check_values(self) -> None:
        """Check the range and the choices of each setting."""
        # An empty name would be the current folder.
        self.check("out", str(self.out).strip() != "", "a folder", "Name one.", repr(self.out))
        for each in fields(self):  # type: ignore[arg-type]
            value = getattr(self, each.name)
            number, choices = each.metadata["number"], each.metadata["choices"]
            if value is not None and number is not None:
                self.check(each.name, number.holds(value), number.expected, "Change it.")
            if value is not None and choices is not None:
                check_choice(self.where, each.name, value, tuple(choices))


def _default_cache() -> Path:
    from fastplm.data._folder import default_cache

    return default_cache()


_USUAL_OBJECTIVES = ", ".join(
    f"{name} {next(iter(family.classes))}" for name, family in FAMILIES.items()
)


@dataclass
class PretrainArguments(Settings):
    """The settings of a pre-training; see ``fastplm pretrain --help``.

    Raises:
        ArgumentValueError: a value is out of its range.
    """

    where = "pretrain"

    arch: str = setting("architecture", choices=tuple(PRESETS))
    corpus: Sequence[str | Path] = setting(
        "text files, plain or compressed, or folders of .txt files; documents are separated by "
        "blank lines, by WikiText titles or, without either, by line ends; 'embedded' is the "
        "English documentation inside Python",
        metavar="PATH",
        on_command_line=["embedded"],
    )
    steps: int = setting("optimizer steps of the run", number=_COUNT)
    out: str | Path = setting("folder of all results", metavar="DIR")
    tokenizer: str | Path | None = setting(
        "folder of a saved tokenizer (default: train one)",
        None,
        metavar="DIR",
        excludes="vocabulary",
    )
    vocab_size: int = setting(
        "most tokens of a trained tokenizer",
        30522,
        number=whole(6, 2**22),
        excludes="vocabulary",
    )
    block_size: int = setting("tokens of a sample", 128, number=whole(8))
    batch_size: int = setting("samples of a micro-batch in each process", 32, number=whole())
    lr: float | None = setting(
        "peak learning rate (default: the published one)", None, number=_POSITIVE
    )
    warmup: int | None = setting(
        "steps of linear warm-up (default: a tenth of the run, 10000 at most)",
        None,
        number=whole(0, 2**40),
    )
    seed: int = setting("seed of weights, order, masks and samples", 0, number=_SEED)
    save_every: int = setting("steps between checkpoints", 1000, number=_COUNT)
    log_every: int = setting("steps between logged losses", 10, number=_COUNT)
    resume: bool = setting("continue from the last checkpoint in --out", False)
    overwrite: bool = setting("first rename the folder --out to OUT.old-1 (2, 3, ...)", False)
    dropout: float = setting("dropout of hidden states and embeddings", 0.1, number=_SHARE)
    attention_dropout: float = setting(
        "dropout of attention weights; 0 keeps attention on the fused kernel", 0.0, number=_SHARE
    )
    precision: str = setting(
        "auto: bf16 where the hardware multiplies it", "auto", choices=PRECISIONS
    )
    workers: int = setting(
        "processes that prepare batches; 0: the training process", 0, number=whole(0)
    )
    threads: int | None = setting("CPU threads (default: PyTorch's choice)", None, number=whole())
    gradient_accumulation: int = setting("micro-batches of a step", 1, number=whole())
    objective: str | None = setting(
        f"what the model learns (default: that of the architecture: {_USUAL_OBJECTIVES})",
        None,
        choices=OBJECTIVES,
        excludes="objective",
    )
    unit: str | None = setting(
        "what is masked as a whole: tokens, words, or up to three words in a row (default: "
        "token; for ALBERT ngram)",
        None,
        choices=UNITS,
    )
    optimizer: str = setting(
        "lamb is ALBERT's; its default learning rate follows from the batch size",
        "adamw",
        choices=OPTIMIZERS,
    )
    electra_objective: str = setting(
        "what ELECTRA's discriminator learns: which tokens are replaced, of all tokens or of the "
        "masked ones; or the original tokens, of the masked ones or of all",
        "rtd",
        choices=_electra_options.OBJECTIVES,
    )
    electra_sharing: str | None = setting(
        "weights that ELECTRA's two models share (default: embeddings)",
        None,
        choices=_electra_options.SHARINGS,
    )
    electra_generator: str = setting(
        "what replaces ELECTRA's tokens: a model, or draws by the frequency of tokens (unigram)",
        "model",
        choices=_electra_options.GENERATORS,
    )
    two_stage: bool = setting(
        "ELECTRA: half of the steps train the generator, then half train the discriminator, which "
        "begins with its weights; each half has its own warm-up",
        False,
    )
    cache: str | Path = setting(
        "folder of vocabularies and token ids (default: ~/.cache/fastplm)",
        metavar="DIR",
        default_factory=_default_cache,
    )

    def __post_init__(self) -> None:
        self.check_values()
        family = self.preset.family
        self.corpus = [str(path) for path in self.corpus]
        self._choose_objective(FAMILIES[family])
        self._check_electra(family)
        samples = self.steps * self.batch_size * self.gradient_accumulation
        self.check(
            "batch_size",
            samples <= _MOST_SAMPLES,
            f"{_MOST_SAMPLES} at most",
            "Lower it.",
            f"{self.batch_size}, which makes {samples} samples of the run",
        )
        if self.lr is None:
            self.lr = self.preset.learning_rate
            if self.optimizer == "lamb":
                processes = int(os.environ.get("WORLD_SIZE", "1"))
                self.lr = lamb_learning_rate(
                    self.batch_size * self.gradient_accumulation * processes
                )
        self.usual_warmup = self.warmup is None
        if self.warmup is None:
            self.warmup = min(10_000, self.first_stage // 10)
        what = "a stage" if self.two_stage else "the run"
        self.check(
            "warmup",
            self.warmup <= self.first_stage,
            f"0 to {self.first_stage}, the steps of {what}",
            "Choose a number of steps in between.",
        )
        if family == "t5":
            self.check(
                "attention_dropout",
                self.attention_dropout in (0, self.dropout),
                f"nothing or {self.dropout}, as T5 has one rate for all its dropout",
                "Choose it by --dropout.",
            )
            self.attention_dropout = self.dropout

    @property
    def preset(self) -> Preset:
        """The architecture's."""
        return preset(self.arch)

    @property
    def first_stage(self) -> int:
        """The steps of the first stage of a two-stage training, or of the run."""
        return self.steps // 2 if self.two_stage else self.steps

    def _choose_objective(self, family: Family) -> None:
        """Check the objective and the unit of its masks, or set them to the family's usual ones."""
        able = tuple(family.classes)
        if self.objective is None:
            self.objective = able[0]
        self.check(
            "objective",
            self.objective in able,
            f"{' or '.join(able)}, what {self.arch} can learn",
            "Leave the option out, or choose another architecture.",
            f"{self.objective} with {self.arch}",
        )
        masked = self.objective in MASKED
        self.check(
            "unit",
            masked or self.unit is None,
            "no unit, as this objective does not mask tokens",
            "Leave the option out.",
            f"{self.unit} with objective {self.objective}",
        )
        if masked and self.unit is None:
            self.unit = family.unit

    def _check_electra(self, family: str) -> None:
        for each in fields(self):
            if each.name.startswith("electra_") or each.name == "two_stage":
                self.check(
                    each.name,
                    family == "electra" or getattr(self, each.name) == each.default,
                    "an ELECTRA",
                    "Leave the option out, or choose an electra architecture.",
                    f"{getattr(self, each.name)} with {self.arch}",
                )
        if family == "electra" and self.electra_sharing is None:
            self.electra_sharing = "none" if self.two_stage else "embeddings"
        if not self.two_stage:
            return
        for name, wanted, why in (
            ("electra_generator", "model", "a generator that can be trained first"),
            ("electra_sharing", "none", "as the generator is frozen in the second stage"),
        ):
            self.check(
                name,
                getattr(self, name) == wanted,
                f"{wanted}, {why}",
                "Leave one of the two options out.",
                f"{getattr(self, name)} in a two-stage training",
            )
        self.check("steps", self.steps > 1, "2 or more, for two stages", "Raise it.")

    def joint_settings(self) -> dict[str, Any]:
        """The fields of ``ElectraJointConfig`` that the settings name."""
        return {
            "objective": self.electra_objective,
            "embedding_sharing": self.electra_sharing,
            "generator_type": self.electra_generator,
            "stage": 1 if self.two_stage else None,
            "sampling_seed": self.seed,
        }


@dataclass
class FinetuneArguments(Settings):
    """The settings of a fine-tuning; see ``fastplm finetune --help``.

    Raises:
        ArgumentValueError: a value is out of its range.
    """

    where = "finetune"

    task: str = setting(
        "a label for a text (classification) or for two (pair), a tag for each word, the place of "
        "an answer in a text (qa), or the right one of several answers (choice)",
        choices=tuple(BATCH_SIZES),
    )
    model: str | Path = setting("folder of the checkpoint and its tokenizer", metavar="DIR")
    data: str | Path = setting("file of examples to train on", metavar="FILE")
    out: str | Path = setting("folder of all results", metavar="DIR")
    eval_data: str | Path | None = setting(
        "file of examples to score (default: a tenth of --data is held out)",
        None,
        metavar="FILE",
    )
    text_columns: Sequence[str] | None = setting(
        "columns of the texts in a table; two for pair (default: the usual names)",
        None,
        metavar="NAME",
    )
    label_column: str | None = setting(
        "column of the labels in a table (default: the usual names)", None, metavar="NAME"
    )
    threshold: float | None = setting(
        "labels are scores, and scores above it are the positive class (default: 0 if labels are "
        "numbers with fractions)",
        None,
        number=_ANY,
    )
    epochs: float = setting(
        "passes over the examples",
        3.0,
        number=Number(float, math.nextafter(0, 1), 1e9, "a number above 0, 1e9 at most"),
        excludes="length",
    )
    steps: int | None = setting(
        "optimizer steps instead of --epochs", None, number=_COUNT, excludes="length"
    )
    batch_size: int | None = setting(
        "samples of a batch (default: 32; 16 for qa and choice)", None, number=whole()
    )
    learning_rate: float | None = setting(
        "peak learning rate (default: 1e-4 for models narrower than 768, else 5e-5; 2e-5 from 1024 "
        "on)",
        None,
        number=_POSITIVE,
    )
    warmup: int | None = setting(
        "steps of linear warm-up (default: a tenth of them)", None, number=whole(0, 2**40)
    )
    weight_decay: float = setting("weight decay of AdamW", 0.01, number=NOT_NEGATIVE)
    max_length: int | None = setting(
        "most tokens of a sample (default: 128; qa 384, choice 64)", None, number=whole(16)
    )
    dropout: float | None = setting(
        "every dropout of the model (default: those of the checkpoint)", None, number=_SHARE
    )
    max_samples: int | None = setting("train on N examples", None, number=_COUNT, metavar="N")
    max_eval_samples: int | None = setting("score N examples", None, number=_COUNT, metavar="N")
    seeds: int = setting(
        "number of runs, each with a seed of its own", 1, number=whole(), metavar="N"
    )
    seed: int = setting("seed of the first run: of head, order and dropout", 0, number=_SEED)
    bf16: bool = setting("train under autocast to bfloat16", False)
    library: str = setting(
        "whose classes are trained: the same samples in the same order, from the same weights",
        "fastplm",
        choices=LIBRARIES,
    )
    save_every: int = setting("steps between checkpoints", 1000, number=_COUNT)
    log_every: int = setting("steps between logged losses", 10, number=_COUNT)
    threads: int | None = setting("CPU threads (default: PyTorch's choice)", None, number=whole())
    resume: bool = setting("continue the run in --out", False)
    overwrite: bool = setting("first rename the folder --out to OUT.old-1 (2, 3, ...)", False)

    def __post_init__(self) -> None:
        self.check_values()
        self.batch_size = self.batch_size or BATCH_SIZES[self.task]
        self.check(
            "seed",
            self.seed + self.seeds <= 1 << 32,
            "seeds below 2^32",
            "Lower it.",
            f"{self.seed}, and {self.seeds} seeds from it on",
        )
        for name in ("text_columns", "label_column", "threshold"):
            self.check(
                name,
                self.task in _TABLES or getattr(self, name) is None,
                " or ".join(_TABLES),
                "Leave the option out.",
                f"{getattr(self, name)} with the task {self.task}",
            )


@dataclass(frozen=True)
class Recipe:
    """A published way to distil.

    Args:
        learning_rate: its peak.
        weights: of the losses that it adds up, by the names of the settings.
    """

    learning_rate: float
    weights: Mapping[str, float]


#: Rates and weights are the published ones; ELECTRA students have none, and these are ours.
RECIPES: Mapping[str, Recipe] = {
    "distilbert": Recipe(5e-4, {"hard_weight": 2.0, "soft_weight": 5.0, "hidden_weight": 1.0}),
    "tinybert": Recipe(1e-4, {"hidden_weight": 1.0, "attention_weight": 1.0}),
    "minilm": Recipe(5e-4, {"attention_weight": 1.0}),
    "minilm-v2": Recipe(6e-4, {"attention_weight": 1.0}),
    "electra": Recipe(5e-4, {"hard_weight": 1.0, "soft_weight": 1.0, "hidden_weight": 1.0}),
    "multilingual": Recipe(2e-5, {}),
}
WEIGHTS = ("hard_weight", "soft_weight", "hidden_weight", "attention_weight")
DIVERGENCES = ("forward_kl", "reverse_kl", "js")
POOLINGS = ("mean", "cls")


def _weight(what: str) -> Any:
    usual = ", ".join(
        f"{name} {recipe.weights[what]:g}"
        for name, recipe in RECIPES.items()
        if what in recipe.weights
    )
    described = {
        "hard_weight": "the loss without a teacher: of the labels",
        "soft_weight": "the divergence from the teacher's predictions, times temperature^2",
        "hidden_weight": "the distance of hidden states",
        "attention_weight": "the distance of attention, or of relations",
    }
    help = f"weight of {described[what]} (default: the published one: {usual})"
    return setting(help, None, number=NOT_NEGATIVE)


@dataclass
class DistillArguments(Settings):
    """The settings of a distillation; see ``fastplm distill --help``.

    Raises:
        ArgumentValueError: a value is out of its range.
    """

    where = "distill"
    #: What a pre-training has settings for.
    two_stage: ClassVar[bool] = False
    optimizer: ClassVar[str] = "adamw"

    recipe: str = setting("what the student learns from the teacher", choices=tuple(RECIPES))
    teacher: str | Path = setting("folder of the teacher and its tokenizer", metavar="DIR")
    corpus: Sequence[str | Path] = as_in(PretrainArguments, "corpus")
    steps: int = as_in(PretrainArguments, "steps")
    out: str | Path = as_in(PretrainArguments, "out")
    student: str | Path | None = setting(
        "folder of the student (default: made of layers of the teacher)",
        None,
        metavar="DIR",
        excludes="student",
    )
    student_layers: int | None = setting(
        "layers of the student, copied from the teacher at equal distances (default: half of them)",
        None,
        number=whole(),
        excludes="student",
        metavar="N",
    )
    student_hidden: int | None = setting(
        "width of a student whose weights are all new (default: the teacher's)",
        None,
        number=whole(),
        metavar="N",
    )
    student_heads: int | None = setting(
        "attention heads of such a student (default: the teacher's)",
        None,
        number=whole(),
        metavar="N",
    )
    translation: Sequence[str | Path] | None = setting(
        "multilingual: text files whose lines are the translations of the lines of --corpus, "
        "file by file",
        None,
        metavar="PATH",
    )
    tokenizer: str | Path | None = setting(
        "multilingual: folder of the student's tokenizer (default: the student's or the teacher's)",
        None,
        metavar="DIR",
        excludes="vocabulary",
    )
    vocab_size: int | None = setting(
        "multilingual: train a WordPiece vocabulary of at most N tokens on both sides of the text; "
        "what it shares with the teacher's keeps its embedding",
        None,
        number=whole(6, 2**22),
        excludes="vocabulary",
        metavar="N",
    )
    pooling: str = setting("multilingual: a sentence's vector", "mean", choices=POOLINGS)
    generator: str | Path | None = setting(
        "electra: folder of the generator that replaces tokens; it is not trained",
        None,
        metavar="DIR",
    )
    temperature: float = setting(
        "divides the logits of both models before the divergence", 2.0, number=_POSITIVE
    )
    divergence: str = setting(
        "of the student's predictions from the teacher's: KL(teacher || student), "
        "KL(student || teacher), or Jensen-Shannon",
        "forward_kl",
        choices=DIVERGENCES,
    )
    hard_weight: float | None = _weight("hard_weight")
    soft_weight: float | None = _weight("soft_weight")
    hidden_weight: float | None = _weight("hidden_weight")
    attention_weight: float | None = _weight("attention_weight")
    teacher_layer: int | None = setting(
        "minilm-v2: the layer of the teacher, counted from 1 (default: the last one)",
        None,
        number=whole(),
        metavar="N",
    )
    relation_heads: int | None = setting(
        "minilm-v2: parts into which queries, keys and values are split (default: the teacher's "
        "attention heads)",
        None,
        number=whole(),
        metavar="N",
    )
    block_size: int = as_in(PretrainArguments, "block_size")
    batch_size: int = as_in(PretrainArguments, "batch_size")
    gradient_accumulation: int = as_in(PretrainArguments, "gradient_accumulation")
    lr: float | None = setting(
        "peak learning rate (default: the published one, of large batches)", None, number=_POSITIVE
    )
    warmup: int | None = setting(
        "steps of linear warm-up (default: a tenth of the run, 10000 at most)",
        None,
        number=whole(0, 2**40),
    )
    dropout: float | None = as_in(FinetuneArguments, "dropout")
    seed: int = as_in(PretrainArguments, "seed")
    save_every: int = as_in(PretrainArguments, "save_every")
    log_every: int = as_in(PretrainArguments, "log_every")
    resume: bool = as_in(PretrainArguments, "resume")
    overwrite: bool = as_in(PretrainArguments, "overwrite")
    precision: str = as_in(PretrainArguments, "precision")
    workers: int = as_in(PretrainArguments, "workers")
    threads: int | None = as_in(PretrainArguments, "threads")
    cache: str | Path = as_in(PretrainArguments, "cache")

    def __post_init__(self) -> None:
        self.check_values()
        self.corpus = [str(path) for path in self.corpus]
        recipe = RECIPES[self.recipe]
        for name in WEIGHTS:
            given = getattr(self, name)
            self._only(name, recipe=name in recipe.weights)
            setattr(self, name, recipe.weights.get(name) if given is None else given)
        weights = [getattr(self, name) for name in recipe.weights]
        self.check(
            next(iter(recipe.weights), "recipe"),
            not weights or any(weights),
            "one weight above 0",
            "Leave one of them out.",
            "0, as all of them are",
        )
        for name in ("translation", "tokenizer", "vocab_size"):
            self._only(name, recipe=self.recipe == "multilingual")
        for name in ("teacher_layer", "relation_heads"):
            self._only(name, recipe=self.recipe == "minilm-v2")
        self._only("generator", recipe=self.recipe == "electra")
        for recipe_name, name, fix in (
            ("multilingual", "translation", "Give --translation."),
            ("electra", "generator", "Give --generator, such as OUT/generator of a pre-training."),
        ):
            there = self.recipe != recipe_name or getattr(self, name) is not None
            self.check(name, there, f"a value with the recipe {recipe_name}", fix, "nothing")
        for name in ("student_hidden", "student_heads", "tokenizer", "vocab_size"):
            self.check(
                name,
                self.student is None or getattr(self, name) is None,
                "no value beside --student",
                "Leave one of the two options out.",
            )
        if self.translation is not None:
            self.translation = [str(path) for path in self.translation]
        self.lr = self.lr or recipe.learning_rate
        self.usual_warmup = self.warmup is None
        if self.warmup is None:
            self.warmup = min(10_000, self.steps // 10)
        self.check(
            "warmup",
            self.warmup <= self.steps,
            f"0 to {self.steps}, the steps of the run",
            "Choose a number of steps in between.",
        )

    def _only(self, name: str, *, recipe: bool) -> None:
        self.check(
            name,
            recipe or getattr(self, name) is None,
            "another recipe",
            "Leave the option out.",
            f"{getattr(self, name)} with the recipe {self.recipe}",
        )
