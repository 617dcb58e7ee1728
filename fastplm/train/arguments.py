"""The settings of a run, each declared once: for the command line and for Python.

Nothing here imports PyTorch: ``fastplm --help`` does not wait for it.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar

from fastplm.errors import ArgumentValueError, FastplmError, check_choice, first_line, message
from fastplm.models import _electra_options, _features_options
from fastplm.train.presets import (
    FAMILIES,
    MASKED,
    NOISES,
    OBJECTIVES,
    OPTIMIZERS,
    PRESETS,
    Family,
    Peak,
    Preset,
    preset,
    usual_peak,
)

#: The minutes of a demo, without the installation.
MINUTES = 3.0
PRECISIONS = ("auto", "fp32", "bf16")
UNITS = ("token", "word", "ngram")
#: The tasks of fine-tuning, with the usual size of their batches.
BATCH_SIZES = {
    "classification": 32,
    "pair": 32,
    "regression": 32,
    "tagging": 32,
    "qa": 16,
    "choice": 16,
    "seq2seq": 32,
}
#: Settings of fine-tuning that only an encoder has.
ENCODERS = ("freeze", "features", "head", "pooling")
LIBRARIES = ("fastplm", "transformers")
#: Where a run logs, and the package that it takes.
REPORTS = {"tensorboard": "tensorboard", "wandb": "wandb", "none": ""}
#: Samples of a run; beyond it the libraries below end the process.
_MOST_SAMPLES = 1 << 62
_TABLES = ("classification", "pair", "regression")
_WARM_START = ("decoder", "warm", "share", "target_vocab_size")
_SOURCE_ENCODER = ("source_encoder_layers", "source_vocab_size", "source_encoder_steps")
_SEQ2SEQ = (
    "targets",
    "eval_targets",
    "prefix",
    "max_target_length",
    "beams",
    "length_penalty",
    "encoder",
    *_WARM_START,
    *_SOURCE_ENCODER,
)


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


@dataclass(frozen=True)
class Numbers:
    """A number, or several ones with commas between them, as a list."""

    each: Number

    @property
    def expected(self) -> str:
        return f"{self.each.expected}, or several with commas between them"

    def __call__(self, text: str) -> Any:
        values = [self.each(part) for part in text.split(",")]
        return values if len(values) > 1 else values[0]

    def holds(self, value: Any) -> bool:
        """Whether every number is in the range."""
        return all(map(self.each.holds, value if isinstance(value, list | tuple) else [value]))


def whole(low: int = 1, high: int = 10**9) -> Number:
    """Whole numbers in a range; by default of sizes, and no memory holds more than that."""
    return Number(int, low, high, f"a whole number from {low} to {high}")


#: Settings of one call, which are not those of its run: no file of settings has them.
CALL = ("resume", "overwrite", "dry_run")
#: The help of ``--config``.
CONFIG = (
    "YAML or JSON file of the options' names and values, as a run writes it (OUT/settings.yaml); "
    "an option on the command line takes precedence"
)
_LARGEST = sys.float_info.max
_ANY = Number(float, -_LARGEST, _LARGEST, "a number")
POSITIVE = Number(float, math.nextafter(0, 1), _LARGEST, "a number above 0")
NOT_NEGATIVE = Number(float, 0, _LARGEST, "a number, 0 or more")
_SHARE = Number(float, 0, math.nextafter(1, 0), "a number, 0 or more and below 1")
SEED = whole(0, 2**32 - 1)
BATCH = WIDTH = whole(1, 2**16)  # of what is in memory at once
THREADS = whole(1, 1024)
_WEIGHT = Number(float, 0, 1e6, "a number from 0 to 1e6")
COUNT = whole(1, 2**40)  # of steps or examples; beyond it a number is a mistake


def setting(
    help: str,
    default: Any = MISSING,
    *,
    number: Number | Numbers | None = None,
    choices: Sequence[str] | None = None,
    metavar: str | None = None,
    path: str | None = None,
    excludes: str | None = None,
    of: Sequence[str] = (),
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
        path: the same of a value that is a path: DIR of a folder, FILE of a file, PATH of either.
        excludes: the name of a group of options of which at most one is given.
        of: the families of architectures that it is for; without any it is for all.
        on_command_line: the default of an option whose field has none.
        default_factory: of the field.
    """
    metadata = {
        "help": help,
        "number": number,
        "choices": choices,
        "metavar": metavar or path,
        "path": path,
        "excludes": excludes,
        "of": of,
        "default": on_command_line,
    }
    return field(default=default, default_factory=default_factory, metadata=metadata)


def as_in(arguments: type, name: str) -> Any:
    """The field of another class of arguments, so that it is declared once."""
    found = next(each for each in fields(arguments) if each.name == name)
    return field(
        default=found.default, default_factory=found.default_factory, metadata=found.metadata
    )


def add_settings(parser: argparse.ArgumentParser, arguments: type[Settings]) -> dict[str, Any]:
    """Add an option for each field of a class of arguments, under its topic.

    Returns the groups of ``excludes`` by name.
    """
    parser.add_argument("--config", metavar="FILE", default=argparse.SUPPRESS, help=CONFIG)
    topics: dict[str, Any] = {}
    for title, names in arguments.topics.items():
        topics |= dict.fromkeys(names, parser.add_argument_group(title))
    groups: dict[str, Any] = {}
    needed = []
    for each in fields(arguments):  # type: ignore[arg-type]
        known = each.metadata
        topic, group = topics.get(each.name, parser), known["excludes"]
        if group is not None and group not in groups:
            groups[group] = topic.add_mutually_exclusive_group()
        default = each.default if known["default"] is None else known["default"]
        options: dict[str, Any] = {"action": "store_true"}
        if each.type != "bool":
            options = {"type": known["number"], "choices": known["choices"]}
            options["metavar"] = known["metavar"]
            options["nargs"] = "+" if "Sequence" in str(each.type) else None
            options["required"] = default is MISSING and each.default_factory is MISSING
        # Without a default of its own an option has none to show: its help says what happens.
        shown = each.type != "bool" and default not in (None, "", MISSING)
        name = f"--{each.name.replace('_', '-')}"
        (groups[group] if group else topic).add_argument(
            name, help=known["help"], default=default if shown else argparse.SUPPRESS, **options
        )
        if options.get("required"):
            needed.append(f"{name} {known['metavar'] or each.name.upper()}")
    parser.usage = f"%(prog)s {' '.join(needed)} [option ...]"
    return groups


class Settings:
    """Base of the arguments of a command, which checks each value against its declaration."""

    #: The name of the command.
    where: ClassVar[str]
    #: The names of the settings under each title of the help, in its order.
    topics: ClassVar[Mapping[str, Sequence[str]]] = {}
    out: str | Path
    #: The settings that differ from their defaults, as they were given.
    given: dict[str, Any]

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

    @property
    def resumable(self) -> bool:
        """Whether such a run can be continued."""
        return True

    def check_reports(self) -> None:
        """Check that there is what ``report_to`` names."""
        name: str = getattr(self, "report_to", "none")
        there = not REPORTS[name] or importlib.util.find_spec(REPORTS[name]) is not None
        fix = f"pip install {name}, or --report-to none."
        self.check("report_to", there, "a package that is installed", fix)

    def inputs(self) -> dict[str, Sequence[str | Path]]:
        """The paths that the command reads, by their settings."""
        found: dict[str, Sequence[str | Path]] = {}
        for each in fields(self):  # type: ignore[arg-type]
            value = getattr(self, each.name)
            if each.name not in ("out", "cache") and each.metadata["path"] and value:
                found[each.name] = value if isinstance(value, list | tuple) else (value,)
        return found

    def check_values(self) -> None:
        """Check the range and the choices of each setting, and keep what was given."""
        self.given = {}
        for each in fields(self):  # type: ignore[arg-type]
            given = getattr(self, each.name)
            usual = each.default_factory() if callable(each.default_factory) else each.default
            if given != usual:
                self.given[each.name] = given
            number, choices = each.metadata["number"], each.metadata["choices"]
            for value in given if isinstance(given, list | tuple) else (given,):
                if value is not None and number is not None:
                    held = number.holds(value)
                    self.check(each.name, held, number.expected, "Change it.", value)
                if value is not None and choices is not None:
                    check_choice(self.where, each.name, value, tuple(choices))
            if each.metadata["path"] and given is not None:
                for path in given if isinstance(given, list | tuple) else (given,):
                    self._check_path(each.name, str(path))
            if each.metadata["path"] == "DIR" or each.name == "out":
                self._check_name(each.name, str(given))
        self.check_reports()

    def _check_path(self, name: str, path: str) -> None:
        """A path that the system can follow; an empty one would be the current folder."""
        self.check(name, path.strip() != "", "a path", "Name one.", repr(path))
        try:
            Path(path).resolve()
        except (OSError, RuntimeError, ValueError) as error:  # links in a circle, a zero byte
            fix = "Choose another one."
            self.check(name, False, "a path", fix, f"{path!r} ({first_line(error)})")

    def _check_name(self, name: str, path: str) -> None:
        """The libraries that write to a folder, or load a checkpoint, take its name as UTF-8."""
        try:
            path.encode()
        except UnicodeEncodeError:  # Python keeps a byte that is no UTF-8 as half a surrogate pair
            got = f"{ascii(path)}, with a byte that is not UTF-8"
            fix = "Rename the file or folder, or choose another one."
            self.check(name, False, "a name in UTF-8", fix, got)


def _default_cache() -> Path:
    from fastplm.data._folder import default_cache

    return default_cache()


_USUAL_OBJECTIVES = ", ".join(
    f"{name} {next(iter(family.classes))}" for name, family in FAMILIES.items()
)
_USUAL_VOCABULARIES = ", ".join(f"{name} {family.vocab_size}" for name, family in FAMILIES.items())
_OWN = ", ".join(name for name, chosen in PRESETS.items() if not chosen.source)


@dataclass
class PretrainArguments(Settings):
    """The settings of a pre-training; see ``fastplm pretrain --help``.

    Raises:
        ArgumentValueError: a value is out of its range.
    """

    where = "pretrain"
    topics = {
        "the run": (
            *("arch", "corpus", "out", "steps", "batch_size", "lr", "vocab_size", "tokenizer"),
            *("resume", "overwrite", "dry_run"),
        ),
        "what it learns": ("objective", "unit", "static_masks", "noise", "block_size"),
        "how it learns": (
            *("optimizer", "warmup", "gradient_accumulation", "dropout", "attention_dropout"),
            *("precision", "seed"),
        ),
        "another size than that of --arch": (
            *("layers", "hidden", "heads", "embedding_size", "parameter_sharing"),
        ),
        "of ELECTRA": (
            *("electra_objective", "electra_sharing", "electra_generator", "generator_size"),
            *("rtd_weight", "adversarial", "two_stage", "second_stage_from"),
        ),
        "the machine, and what is written": (
            *("threads", "workers", "cache", "save_every", "log_every", "report_to"),
        ),
    }

    arch: str = setting(
        f"architecture: the published one of this name, but for {_OWN}, which are fastplm's own",
        choices=tuple(PRESETS),
    )
    corpus: Sequence[str | Path] = setting(
        "text files, plain or compressed, or folders of .txt files; documents are separated by "
        "blank lines, by WikiText titles or, without either, by line ends; 'embedded' is the "
        "English documentation inside Python",
        path="PATH",
        on_command_line=["embedded"],
    )
    steps: int = setting("optimizer steps of the run", number=COUNT)
    out: str | Path = setting("folder of all results", path="DIR")
    tokenizer: str | Path | None = setting(
        "folder of a saved tokenizer (default: train one)",
        None,
        path="DIR",
        excludes="vocabulary",
    )
    vocab_size: int | None = setting(
        "most tokens of a trained tokenizer (default: the published number: "
        f"{_USUAL_VOCABULARIES})",
        None,
        number=whole(6, 2**22),
        excludes="vocabulary",
    )
    block_size: int = setting("tokens of a sample", 128, number=whole(8))
    batch_size: int = setting("samples of a micro-batch in each process", 32, number=BATCH)
    lr: float | None = setting(
        "peak learning rate (default: the published one, times the square root of the samples of a "
        "step over those of the published run)",
        None,
        number=POSITIVE,
    )
    warmup: int | None = setting(
        "steps of linear warm-up; of a constant rate with adafactor (default: a tenth of the run, "
        "10000 at most)",
        None,
        number=whole(0, 2**40),
    )
    seed: int = setting("seed of weights, order, masks and samples", 0, number=SEED)
    save_every: int = setting("steps between checkpoints", 1000, number=COUNT)
    log_every: int = setting("steps between logged losses", 10, number=COUNT)
    report_to: str = setting(
        "where losses and scores are logged, as the Trainer of Transformers does it, beside "
        "metrics.json: OUT/tensorboard, Weights & Biases, or nowhere",
        "tensorboard",
        choices=tuple(REPORTS),
    )
    resume: bool = setting("continue from the last checkpoint in --out", False)
    overwrite: bool = setting("first rename the folder --out to OUT.old-1 (2, 3, ...)", False)
    dry_run: bool = setting(
        "take a few steps, print what the run would need (parameters, FLOPs, tokens, memory, "
        "hours on this machine), and write nothing",
        False,
    )
    dropout: float | None = setting(
        "dropout of hidden states and embeddings (default: 0.1)", None, number=_SHARE
    )
    attention_dropout: float | None = setting(
        "dropout of attention weights, in the fused kernel too (default: 0.1; 0 for the sizes that "
        "are fastplm's own)",
        None,
        number=_SHARE,
    )
    precision: str = setting(
        "auto: bf16 where the hardware multiplies it", "auto", choices=PRECISIONS
    )
    workers: int = setting(
        "processes that prepare batches; 0: the training process", 0, number=whole(0, 256)
    )
    threads: int | None = setting("CPU threads (default: PyTorch's choice)", None, number=THREADS)
    gradient_accumulation: int = setting("micro-batches of a step", 1, number=BATCH)
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
    optimizer: str | None = setting(
        "default: that of the published run: lamb for ALBERT, adafactor with a rate that falls by "
        "the inverse square root of the step for T5, else adamw",
        None,
        choices=OPTIMIZERS,
    )
    layers: int | None = setting(
        "layers of the encoder, and of the decoder (default: those of --arch)",
        None,
        number=whole(1, 1000),
    )
    hidden: int | None = setting(
        "width of the layers; the feed-forward part is four times as wide (default: that of "
        "--arch)",
        None,
        number=whole(1, 2**16),
    )
    heads: int | None = setting(
        "attention heads, of which --hidden is a multiple (default: those of --arch)",
        None,
        number=whole(1, 2**16),
    )
    embedding_size: int | None = setting(
        "of ALBERT and ELECTRA: width of the embeddings (default: that of --arch)",
        None,
        number=whole(1, 2**16),
        of=("albert", "electra"),
    )
    parameter_sharing: str = setting(
        "of ALBERT: what all layers share: everything, the attention part, the feed-forward part, "
        "or nothing",
        "all",
        choices=("all", "attention", "feed_forward", "none"),
        of=("albert",),
    )
    static_masks: int | None = setting(
        "mask each block in N ways for the whole training, as BERT's data was made; with RoBERTa "
        "10 (default: another mask each time); for --objective mlm",
        None,
        number=whole(),
        metavar="N",
    )
    noise: Sequence[str] | None = setting(
        "of BART: the transformations of the text (default: text_infilling and "
        f"sentence_permutation, as published): {', '.join(NOISES)}",
        None,
        choices=tuple(NOISES),
        metavar="NAME",
        of=("bart",),
    )
    electra_objective: str = setting(
        "what ELECTRA's discriminator learns: which tokens are replaced, of all tokens or of the "
        "masked ones; or the original tokens, of the masked ones or of all",
        "rtd",
        choices=_electra_options.OBJECTIVES,
        of=("electra",),
    )
    electra_sharing: str | None = setting(
        "weights that ELECTRA's two models share (default: embeddings)",
        None,
        choices=_electra_options.SHARINGS,
        of=("electra",),
    )
    electra_generator: str = setting(
        "what replaces ELECTRA's tokens: a model, or draws by the frequency of tokens (unigram)",
        "model",
        choices=_electra_options.GENERATORS,
        of=("electra",),
    )
    generator_size: float | None = setting(
        "width and heads of ELECTRA's generator as a share of the discriminator's (default: that "
        "of --arch)",
        None,
        number=Number(float, math.nextafter(0, 1), 1, "a number above 0, 1 at most"),
        of=("electra",),
    )
    rtd_weight: float | None = setting(
        "factor of the loss of ELECTRA's discriminator (default: 50; 1 where it predicts tokens)",
        None,
        number=POSITIVE,
        of=("electra",),
    )
    adversarial: bool = setting(
        "ELECTRA: train the generator to make the discriminator's loss large, by REINFORCE, "
        "instead of to predict tokens",
        False,
        of=("electra",),
    )
    two_stage: bool = setting(
        "ELECTRA: half of the steps train the generator, then half train the discriminator, which "
        "begins with its weights; each half has its own warm-up",
        False,
        of=("electra",),
    )
    second_stage_from: str = setting(
        "with --two-stage: the discriminator begins with the weights of the generator, or with its "
        "own (scratch), and the generator may be narrower",
        "generator",
        choices=_electra_options.SECOND_STAGES,
        of=("electra",),
    )
    cache: str | Path = setting(
        "folder of vocabularies and token ids (default: ~/.cache/fastplm)",
        path="DIR",
        default_factory=_default_cache,
    )

    def __post_init__(self) -> None:
        self.check_values()
        chosen = self.preset
        family = chosen.family
        for name in ("resume", "overwrite"):
            self.check(
                "dry_run",
                not (self.dry_run and getattr(self, name)),
                f"no --dry-run, or no --{name}, as a dry run writes nothing",
                "Leave one of the two options out.",
                f"True together with {name}",
            )
        self.vocab_size = self.vocab_size or FAMILIES[family].vocab_size
        self.optimizer = self.optimizer or chosen.optimizer
        self.dropout = chosen.dropout if self.dropout is None else self.dropout
        self.corpus = [str(path) for path in self.corpus]
        self._choose_objective(FAMILIES[family])
        self._check_families(family)
        self._check_shape()
        self._check_electra(family)
        self.check(
            "static_masks",
            self.static_masks is None or self.objective == "mlm",
            "no --static-masks, or --objective mlm, whose blocks are the same in every epoch",
            "Leave one of the two options out.",
            f"{self.static_masks} with objective {self.objective}",
        )
        if self.noise is not None:
            self.noise = sorted(set(self.noise))
        samples = self.steps * self.batch_size * self.gradient_accumulation
        self.check(
            "batch_size",
            samples <= _MOST_SAMPLES,
            f"{_MOST_SAMPLES} at most",
            "Lower it.",
            f"{self.batch_size}, which makes {samples} samples of the run",
        )
        self.peak: Peak | None = None
        if self.lr is None:
            self.peak = usual_peak(chosen, self.optimizer)
            self.lr = self.peak.scaled(self.samples_a_step)
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
                self.attention_dropout in (None, 0, self.dropout),
                f"nothing or {self.dropout}, as T5 has one rate for all its dropout",
                "Choose it by --dropout.",
            )
            self.attention_dropout = self.dropout
        if self.attention_dropout is None:
            self.attention_dropout = chosen.attention_dropout

    @property
    def samples_a_step(self) -> int:
        """The samples of an optimizer step, of all processes."""
        processes = int(os.environ.get("WORLD_SIZE", "1"))
        return self.batch_size * self.gradient_accumulation * processes

    @property
    def preset(self) -> Preset:
        """The architecture's, with the sizes that the settings change."""
        named = preset(self.arch)
        changes: dict[str, Any] = {
            "layers": self.layers,
            "hidden": self.hidden,
            "heads": self.heads,
            "embedding": self.embedding_size,
            "generator": self.generator_size,
        }
        changes = {name: value for name, value in changes.items() if value is not None}
        if self.parameter_sharing != "all":
            changes["sharing"] = self.parameter_sharing
        if changes and named.source:
            changes["source"] = f"{named.source}, with other {', '.join(changes)}"
        if self.objective == "mlm":  # ELECTRA-Large masks more for its generator
            changes["mlm_probability"] = 0.15
        return replace(named, **changes)

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

    def _check_families(self, family: str) -> None:
        """Check that each setting is for this architecture, and its objective."""
        for each in fields(self):
            of, value = each.metadata["of"], getattr(self, each.name)
            given = value != each.default
            self.check(
                each.name,
                not of or family in of or not given,
                " or ".join(f"an architecture of the family {name}" for name in of),
                "Leave the option out, or choose another --arch.",
                f"{value} with {self.arch}",
            )
            self.check(
                each.name,
                of != ("electra",) or self.objective == "rtd" or not given,
                "the objective rtd, as another one has no generator",
                "Leave one of the two options out.",
                f"{value} with objective {self.objective}",
            )

    def _check_shape(self) -> None:
        chosen = self.preset
        self.check(
            "heads",
            chosen.hidden % chosen.heads == 0,
            f"a divisor of {chosen.hidden}, the width (hidden)",
            "Change --heads or --hidden.",
            chosen.heads,
        )

    def _check_electra(self, family: str) -> None:
        if family == "electra" and self.objective == "rtd" and self.electra_sharing is None:
            self.electra_sharing = "none" if self.two_stage else "embeddings"
        joint = family == "electra" and self.objective == "rtd"
        self.check(
            "adversarial",
            not self.adversarial or self.electra_generator == "model",
            "electra_generator model, which can be trained",
            "Leave one of the two options out.",
            f"True with electra_generator {self.electra_generator}",
        )
        self.check(
            "adversarial",
            not self.adversarial or self.electra_objective.startswith("rtd"),
            "electra_objective rtd or rtd_masked, whose loss is the reward",
            "Leave one of the two options out.",
            f"True with electra_objective {self.electra_objective}",
        )
        self.check(
            "generator_size",
            self.generator_size is None or self.electra_generator == "model",
            "electra_generator model, which has a size",
            "Leave one of the two options out.",
            f"{self.generator_size} with electra_generator {self.electra_generator}",
        )
        whole = self.electra_sharing == "all" or (
            self.two_stage and self.second_stage_from == "generator"
        )
        why = "electra_sharing all" if self.electra_sharing == "all" else "two_stage"
        self.check(
            "generator_size",
            not joint or not whole or self.generator_size in (None, 1.0),
            f"1, as with {why} the discriminator has the generator's weights",
            "Leave one of the two options out, or add --second-stage-from scratch.",
            f"{self.generator_size} with {why}",
        )
        self.check(
            "second_stage_from",
            self.two_stage or self.second_stage_from == "generator",
            "two_stage beside it",
            "Add --two-stage, or leave the option out.",
            f"{self.second_stage_from} without two_stage",
        )
        if not self.two_stage:
            return
        self.check(
            "two_stage",
            not self.adversarial,
            "no adversarial beside it, as no discriminator rewards the first stage",
            "Leave one of the two options out.",
            "True with adversarial",
        )
        self.check(
            "rtd_weight",
            self.rtd_weight is None,
            "no two_stage, where each loss stands alone",
            "Leave one of the two options out.",
            f"{self.rtd_weight} with two_stage",
        )
        self.check(
            "optimizer",
            self.optimizer != "adafactor",
            "adamw or lamb, as each stage has a schedule of its own",
            "Leave one of the two options out.",
            "adafactor in a two-stage training",
        )
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
            "discriminator_weight": self.rtd_weight,
            "adversarial": self.adversarial,
            "second_stage_from": self.second_stage_from,
        }


@dataclass
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
            *("from_scratch", "freeze", "features", "head", "pooling", "both_orders", "lm_weight"),
            "library",
        ),
        "how it learns": (
            *("optimizer", "warmup", "weight_decay", "dropout", "bf16", "seed", "eval_every"),
        ),
        "seq2seq: texts to be written": _SEQ2SEQ,
        "the machine, and what is written": ("threads", "save_every", "log_every", "report_to"),
    }

    task: str = setting(
        "a label for a text (classification) or for two (pair), a score for one text or two "
        "(regression), a tag for each word (tagging), the place of an answer in a text (qa), the "
        "right one of several answers (choice), or a text for a text (seq2seq)",
        choices=tuple(BATCH_SIZES),
    )
    data: str | Path = setting("file of examples to train on", path="FILE")
    out: str | Path = setting("folder of all results", path="DIR")
    model: str | Path | None = setting(
        "folder of the checkpoint and its tokenizer; needed unless there is --encoder",
        None,
        path="DIR",
    )
    eval_data: str | Path | None = setting(
        "file of examples to score (default: a tenth of --data is held out)",
        None,
        path="FILE",
    )
    text_columns: Sequence[str] | None = setting(
        "columns of the texts in a table; two for pair, one or two for regression, source and "
        "target for seq2seq (default: the usual names)",
        None,
        metavar="NAME",
    )
    label_column: str | None = setting(
        "column of the labels in a table (default: the usual names)", None, metavar="NAME"
    )
    threshold: float | None = setting(
        "make two classes of labels that are scores: those above it are positive, all others "
        "negative",
        None,
        number=_ANY,
    )
    null_threshold: float | None = setting(
        "questions that may have no answer get none if its score is more than this above the best "
        "span's (default: the value with the highest F1 on the examples that are scored)",
        None,
        number=_ANY,
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
    features: str = setting(
        "states that the head reads: those of the last layer, a learned weighted sum of all "
        "layers' (mix), or the last four layers' one behind the other",
        "last",
        choices=_features_options.FEATURES,
    )
    head: str = setting(
        "linear, or a bidirectional LSTM of two layers before it",
        "linear",
        choices=_features_options.HEADS,
    )
    pooling: str | None = setting(
        "the state of a text: its first token's (cls), or the mean or maximum over tokens "
        "(default: that of the model's class; mean with --features or --head)",
        None,
        choices=_features_options.POOLINGS,
    )
    targets: str | Path | None = setting(
        "seq2seq: file of the targets of --data, line by line (default: --data is a table)",
        None,
        path="FILE",
    )
    eval_targets: str | Path | None = setting(
        "seq2seq: file of the targets of --eval-data", None, path="FILE"
    )
    prefix: str = setting(
        "seq2seq: text before each source, such as 'translate English to German: '", ""
    )
    max_target_length: int = setting(
        "seq2seq: most tokens of a target", 128, number=whole(2), metavar="N"
    )
    beams: int = setting("seq2seq: beams of the search when texts are written", 4, number=whole())
    length_penalty: float = setting(
        "seq2seq: the power of the length by which a beam's log-probability is divided",
        1.0,
        number=_ANY,
    )
    encoder: str | Path | None = setting(
        "seq2seq: in place of --model, folder of the checkpoint that starts the encoder of a new "
        "encoder-decoder",
        None,
        path="DIR",
    )
    decoder: str | Path | None = setting(
        "with --encoder: folder of the checkpoint that starts the decoder (default: the same)",
        None,
        path="DIR",
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
        number=whole(300),
        metavar="N",
    )
    source_encoder_layers: int | None = setting(
        "seq2seq: translate with a pre-trained BART from a language it has not seen: a new encoder "
        "of N layers, with a vocabulary of its own, in place of its word embeddings",
        None,
        number=whole(1, 1000),
        metavar="N",
    )
    source_vocab_size: int | None = setting(
        "with --source-encoder-layers: tokens of that vocabulary, which is trained on the sources "
        "(default: 8000)",
        None,
        number=whole(300),
        metavar="N",
    )
    source_encoder_steps: int | None = setting(
        "with --source-encoder-layers: first steps, in which most of BART is frozen (default: half "
        "of all)",
        None,
        number=whole(0, 2**40),
        metavar="N",
    )
    eval_every: int | None = setting(
        "also score every N steps, for a curve", None, number=COUNT, metavar="N"
    )
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
        "samples of a batch (default: 32; 16 for qa and choice)", None, number=BATCH
    )
    learning_rate: float | None = setting(
        "peak learning rate (default: 1e-4 for models narrower than 768, else 5e-5; 2e-5 from 1024 "
        "on; 1e-3 with --freeze or adafactor)",
        None,
        number=POSITIVE,
    )
    optimizer: str = setting(
        "adamw, with a rate that falls to 0; or adafactor, as T5 was fine-tuned: a constant rate, "
        "relative to the size of each weight",
        "adamw",
        choices=("adamw", "adafactor"),
    )
    warmup: int | None = setting(
        "steps of linear warm-up (default: a tenth of them)", None, number=whole(0, 2**40)
    )
    weight_decay: float | None = setting(
        "weight decay of AdamW (default: 0.01)", None, number=NOT_NEGATIVE
    )
    max_length: int | None = setting(
        "most tokens of a sample (default: 128; qa 384, choice 64)", None, number=whole(16)
    )
    dropout: float | None = setting(
        "every dropout of the model (default: those of the checkpoint)", None, number=_SHARE
    )
    max_samples: int | list[int] | None = setting(
        "train on the first N of the examples in a random order, the same in every run; several "
        "growing numbers, such as 100,300,1000, give scores for each",
        None,
        number=Numbers(COUNT),
        metavar="N",
    )
    max_eval_samples: int | None = setting("score N examples", None, number=COUNT, metavar="N")
    seeds: int = setting(
        "number of runs, each with a seed of its own", 1, number=whole(), metavar="N"
    )
    seed: int = setting("seed of the first run: of head, order and dropout", 0, number=SEED)
    bf16: bool = setting("train under autocast to bfloat16", False)
    library: str = setting(
        "whose classes are trained: the same samples in the same order, from the same weights",
        "fastplm",
        choices=LIBRARIES,
    )
    save_every: int = setting("steps between checkpoints", 1000, number=COUNT)
    log_every: int = setting("steps between logged losses", 10, number=COUNT)
    report_to: str = setting(
        "where losses and scores are logged, as the Trainer of Transformers does it, beside "
        "metrics.json: OUT/seed-N/tensorboard, Weights & Biases, or nowhere",
        "none",
        choices=tuple(REPORTS),
    )
    threads: int | None = setting("CPU threads (default: PyTorch's choice)", None, number=THREADS)
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
        self._needs_task(("seq2seq",), *_SEQ2SEQ)
        self._check_seq2seq()
        self._needs_task((*_TABLES, "seq2seq"), "text_columns")
        self._needs_task(_TABLES, "label_column")
        self._needs_task(_TABLES[:2], "threshold")
        self._needs_task(("qa",), "null_threshold")
        self._needs_task(_TABLES, "pooling")
        self._needs_task((*_TABLES, "tagging"), "features", "head")
        self.check(
            "from_scratch",
            not (self.from_scratch and self.freeze),
            "one of --from-scratch and --freeze, as a frozen encoder has to be trained already",
            "Leave one of the two options out.",
            "True with --freeze",
        )
        self._needs_task(("pair", "regression"), "both_orders")
        self._needs_task((*_TABLES, "choice"), "lm_weight")
        decays = self.optimizer == "adamw"
        expected = "nothing with --optimizer adafactor, which has none here"
        self.check("weight_decay", decays or not self.weight_decay, expected, "Leave it out.")
        if self.weight_decay is None:
            self.weight_decay = 0.01 if decays else 0.0

        if isinstance(self.max_samples, list | tuple):
            sizes = self.max_samples = list(self.max_samples)
            growing = sizes == sorted({*sizes}) and len(sizes) > 1
            self.check("max_samples", growing, "two growing numbers or more", "Sort them.")

    def curve(self) -> list[tuple[str, FinetuneArguments]]:
        """(folder inside ``out``, settings) for each number of examples to train on."""
        if not isinstance(self.max_samples, list):
            return [("", self)]
        sizes = self.max_samples
        return [(f"samples-{size}", replace(self, max_samples=size)) for size in sizes]

    @property
    def needs_features(self) -> bool:
        """Whether the head is one that Transformers' classes do not have."""
        others = self.features != "last" or self.head != "linear"
        return others or self.pooling in ("mean", "max")

    def _needs_task(self, tasks: Sequence[str], *names: str) -> None:
        """Check that settings that only some tasks have were given for these alone."""
        for each in fields(self):
            given = getattr(self, each.name)
            self.check(
                each.name,
                each.name not in names or self.task in tasks or given == each.default,
                f"--task {' or '.join(tasks)}",
                "Leave one of the two options out.",
                f"{given} with --task {self.task}",
            )

    @property
    def checkpoint(self) -> str | Path:
        """The folder of the model, or of the encoder of a new encoder-decoder."""
        return self.model or self.encoder or ""

    def _check_seq2seq(self) -> None:
        """Check the settings of texts to be written, which no other task has."""
        for each in fields(self):
            usual = getattr(self, each.name) == each.default
            if each.name in _WARM_START:
                self.check(
                    each.name,
                    self.encoder is not None or usual,
                    "an encoder-decoder that is started from --encoder",
                    "Leave the option out, or give --encoder in place of --model.",
                )
            if each.name in _SOURCE_ENCODER[1:]:
                self.check(
                    each.name,
                    self.source_encoder_layers is not None or usual,
                    "a BART with --source-encoder-layers",
                    "Leave the option out, or give the layers.",
                )
        self.check(
            "source_encoder_layers",
            self.source_encoder_layers is None
            or (self.encoder is None and self.library == "fastplm"),
            "a BART in --model, and --library fastplm",
            "Leave the option out, or --encoder and --library.",
        )
        self.check(
            "model",
            self.model is None or self.encoder is None,
            "either --model or --encoder",
            "Leave one of the two out.",
            f"{self.model} beside --encoder {self.encoder}",
        )
        self.check(
            "model",
            bool(str(self.model or "").strip() or self.encoder),
            "the folder of a checkpoint",
            "Give --model DIR" + (", or --encoder DIR." if self.task == "seq2seq" else "."),
        )
        for name, other in (("data", "targets"), ("eval_data", "eval_targets")):
            given = getattr(self, other) is None or getattr(self, name) is not None
            self.check(other, given, f"--{name.replace('_', '-')}, too", "Give both.")
        aligned = self.targets is not None
        self.check(
            "eval_targets",
            self.eval_data is None or (self.eval_targets is not None) == aligned,
            "a file of targets for both --data and --eval-data, or for none",
            "Give the evaluation's texts in the form of the training's.",
        )
        self.check(
            "targets",
            not aligned or self.text_columns is None,
            "a table with --text-columns, or a file of targets",
            "Leave one of the two out.",
        )
        if self.share:
            self.check(
                "share",
                self.library == "fastplm"
                and self.decoder is None
                and self.target_vocab_size is None,
                "one checkpoint for both parts, with its own vocabulary, and --library fastplm",
                "Leave --decoder, --target-vocab-size and --library out.",
            )
            self.check(
                "warm",
                self.warm in ("both", "none"),
                "both or none, as --share has one set of weights",
                "Choose one of them.",
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
    return setting(help, None, number=_WEIGHT)


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
    topics = {
        "the run": (
            *("recipe", "teacher", "student", "student_layers", "corpus", "out", "steps"),
            *("batch_size", "lr", "resume", "overwrite"),
        ),
        "the student": ("student_hidden", "student_heads", "tokenizer", "vocab_size"),
        "what it learns": (
            *("translation", "pooling", "generator", "temperature", "divergence", *WEIGHTS),
            *("teacher_layer", "relation_heads", "block_size"),
        ),
        "how it learns": ("warmup", "gradient_accumulation", "dropout", "precision", "seed"),
        "the machine, and what is written": (
            *("threads", "workers", "cache", "save_every", "log_every", "report_to"),
        ),
    }

    recipe: str = setting("what the student learns from the teacher", choices=tuple(RECIPES))
    teacher: str | Path = setting("folder of the teacher and its tokenizer", path="DIR")
    corpus: Sequence[str | Path] = as_in(PretrainArguments, "corpus")
    steps: int = as_in(PretrainArguments, "steps")
    out: str | Path = as_in(PretrainArguments, "out")
    student: str | Path | None = setting(
        "folder of the student (default: made of layers of the teacher)",
        None,
        path="DIR",
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
        number=WIDTH,
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
        path="PATH",
    )
    tokenizer: str | Path | None = setting(
        "multilingual: folder of the student's tokenizer (default: the student's or the teacher's)",
        None,
        path="DIR",
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
    pooling: str = setting(
        "multilingual: a sentence's vector is the mean of its tokens' last hidden states, or the "
        "first token's (cls)",
        "mean",
        choices=POOLINGS,
    )
    generator: str | Path | None = setting(
        "electra: folder of the generator that replaces tokens; it is not trained",
        None,
        path="DIR",
    )
    temperature: float = setting(
        "distilbert, electra: divides the logits of both models before the divergence",
        2.0,
        number=POSITIVE,
    )
    divergence: str = setting(
        "distilbert: of the student's predictions from the teacher's: KL(teacher || student), "
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
        "peak learning rate (default: the published one, of large batches)", None, number=POSITIVE
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
    report_to: str = as_in(PretrainArguments, "report_to")
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
        for name in ("translation", "tokenizer", "vocab_size", "pooling"):
            self._only(name, recipe=self.recipe == "multilingual")
        for name in ("teacher_layer", "relation_heads"):
            self._only(name, recipe=self.recipe == "minilm-v2")
        self._only("generator", recipe=self.recipe == "electra")
        self._only("temperature", recipe="soft_weight" in recipe.weights)
        self._only("divergence", recipe=self.recipe == "distilbert")
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
        usual = next(each.default for each in fields(self) if each.name == name)
        self.check(
            name,
            recipe or getattr(self, name) == usual,
            "another recipe",
            "Leave the option out.",
            f"{getattr(self, name)} with the recipe {self.recipe}",
        )
