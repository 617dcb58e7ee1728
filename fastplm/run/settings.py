"""The settings of a command, each declared once: for the command line and for Python.

Nothing here imports PyTorch: ``fastplm --help`` does not wait for it.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from fastplm.errors import ArgumentValueError, FastplmError, check_choice, first_line, message

if TYPE_CHECKING:
    from typing_extensions import Self

PRECISIONS = ("auto", "fp32", "bf16")
#: Where a run logs, and the package that it takes.
#: Where losses are logged, as Transformers' ``report_to`` names it, and the package that it needs.
REPORTS = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow", "none": ""}


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
    def kind(self) -> type:
        return self.each.kind

    @property
    def expected(self) -> str:
        return f"{self.each.expected}, or several with commas between them"

    def __call__(self, text: str) -> Any:
        values = [self.each(part) for part in text.split(",")]
        return values if len(values) > 1 else values[0]

    def holds(self, value: Any) -> bool:
        """Whether every number is in the range."""
        return all(map(self.each.holds, value if isinstance(value, list | tuple) else [value]))


@dataclass(frozen=True)
class NumberOr:
    """A number, or a word in its place."""

    each: Number
    word: str

    @property
    def kind(self) -> type:
        return self.each.kind

    @property
    def expected(self) -> str:
        return f"{self.each.expected}, or {self.word}"

    def __call__(self, text: str) -> Any:
        try:
            return text if text == self.word else self.each(text)
        except argparse.ArgumentTypeError:
            got = f"got {text[:40]!r}; expected {self.expected}"
            raise argparse.ArgumentTypeError(got) from None

    def holds(self, value: Any) -> bool:
        """Whether the value is the word, or a number in the range."""
        return value == self.word if isinstance(value, str) else self.each.holds(value)


def integer(low: int = 1, high: int = 10**9) -> Number:
    """Whole numbers in a range; by default of sizes, and no memory holds more than that."""
    return Number(int, low, high, f"a whole number from {low} to {high}")


#: Settings of one call, which are not those of its run: no file of settings has them.
CALL = ("resume", "overwrite", "dry_run")
#: What a setting is that takes a checkpoint: a folder, or a name on the Hugging Face Hub.
MODEL = "DIR|NAME"
_LARGEST = sys.float_info.max
ANY = Number(float, -_LARGEST, _LARGEST, "a number")
POSITIVE = Number(float, math.nextafter(0, 1), _LARGEST, "a number above 0")
NOT_NEGATIVE = Number(float, 0, _LARGEST, "a number, 0 or more")
SHARE = Number(float, 0, math.nextafter(1, 0), "a number, 0 or more and below 1")
SEED = integer(0, 2**32 - 1)
BATCH = WIDTH = integer(1, 2**16)  # of what is in memory at once
THREADS = integer(1, 1024)
WEIGHT = Number(float, 0, 1e6, "a number from 0 to 1e6")
#: The tokens of a batch. More are no faster on a CPU: its caches hold what a layer makes of these.
BATCH_TOKENS = 1024
MATMUL_PRECISIONS = ("highest", "high")
COUNT = integer(1, 2**40)  # of steps or examples; beyond it a number is a mistake


def setting(
    help: str,
    default: Any = MISSING,
    *,
    number: Number | Numbers | NumberOr | None = None,
    choices: Sequence[str] | None = None,
    metavar: str | None = None,
    path: str | None = None,
    excludes: str | None = None,
    of: Sequence[str] = (),
    on_command_line: Any = None,
    default_factory: Any = MISSING,
    required: bool = False,
    also: Mapping[str, str | None] | None = None,
) -> Any:
    """A field of the arguments of a command.

    Args:
        help: of the option.
        default: of the field; without one the option is required.
        number: the range of its values.
        choices: its values.
        metavar: how the help calls its value; by default N of a whole number.
        path: the same of a value that is a path: DIR of a folder, FILE of a file, PATH of either.
        excludes: the name of a group of options of which at most one is given.
        of: the families of architectures that it is for; without any it is for all.
        on_command_line: the default of an option whose field has none.
        default_factory: of the field.
        required: whether the option must be given although the field has a default; of a group of
            options, one of them.
        also: its other names, which are options, too; one with a value stands for this value.
    """
    metadata = {
        "help": help,
        "number": number,
        "choices": choices,
        "metavar": metavar or path or ("N" if number and number.kind is int else None),
        "path": path,
        "excludes": excludes,
        "of": of,
        "default": on_command_line,
        "required": required,
        "also": also or {},
    }
    return field(default=default, default_factory=default_factory, metadata=metadata)


def takes_several(each: Field[Any]) -> bool:
    """Whether a setting takes several values, with spaces between them."""
    return "Sequence" in str(each.type)


@dataclass(frozen=True)
class Rule:
    """What a setting must be beside the others.

    Args:
        name: the setting that the error names.
        keeps: whether the settings keep the rule.
        expected: what the error says was expected; ``{args.steps}`` in it is the run's own value.
        beside: another setting, which the error names with its value.
        fix: what the error advises.
    """

    name: str
    keeps: Callable[[Any], bool]
    expected: str
    beside: str = ""
    fix: str = "Leave one of the two options out."


def apart(name: str, other: str, expected: str, fix: str = Rule.fix) -> Rule:
    """The rule that at most one of two settings is given."""

    def keeps(args: Any) -> bool:
        return args.is_default(name) or args.is_default(other)

    return Rule(name, keeps, expected, other, fix)


def needs(
    name: str,
    other: str,
    values: Sequence[Any],
    expected: str,
    *,
    names_other: bool = False,
    beside: str = "",
    fix: str = Rule.fix,
) -> Rule:
    """The rule that where a setting is given, another one has one of some values.

    Its error names the first one, or with ``names_other`` the other one, beside its partner, or
    ``beside`` another setting.
    """

    def keeps(args: Any) -> bool:
        return args.is_default(name) or getattr(args, other) in values

    named, partner = (other, name) if names_other else (name, other)
    return Rule(named, keeps, expected, beside or partner, fix)


#: The rule of a command with several seeds, of which each is one of PyTorch and NumPy.
SEEDS = Rule(
    "seeds",
    lambda args: args.seed + args.seeds - 1 <= SEED.high,
    "seeds below 2^32",
    "seed",
    "Lower one of the two.",
)


#: The rule of a command whose model may be sharded.
SHARDED = needs(
    "fsdp",
    "optimizer",
    ("adamw", "lamb"),
    "adamw or lamb, as Adafactor takes means of whole rows and columns",
    names_other=True,
    fix="Choose another --optimizer, which has another rate, too, or leave --fsdp out.",
)


class Settings:
    """Base of the arguments of a command: frozen dataclasses of what is given.

    A field that is None follows from the others. ``plan`` says what: it gives the same settings
    with all their values. Both check each value by its declaration, and the rules between them.
    """

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]
    #: The name of the command.
    where: ClassVar[str]
    #: The names of the settings under each title of the help, in its order.
    topics: ClassVar[Mapping[str, Sequence[str]]] = {}
    #: Checked one after another by ``checked``.
    rules: ClassVar[Sequence[Rule]] = ()
    out: str | Path

    def __post_init__(self) -> None:
        self.check_values()
        self.plan()  # whose values the rules are about

    def plan(self) -> Any:
        """The same settings, each with its value: an object of a subclass, a ``Plan``."""
        plan: Any = object.__new__(_plan_of(type(self)))
        vars(plan).update(vars(self), given=self.given)
        for each in fields(plan):  # one value may stand for a sequence of it
            value = getattr(plan, each.name)
            if "Sequence" in str(each.type) and isinstance(value, str | Path):
                vars(plan)[each.name] = [value]
        return plan.resolved()

    def resolved(self) -> Self:
        """A plan with the values that follow from others, whose rules were checked."""
        return self.checked()

    def changed(self, **values: Any) -> Self:
        """A copy with other values, which are not checked."""
        other = object.__new__(type(self))
        vars(other).update(vars(self) | values)
        return other

    @functools.cached_property
    def given(self) -> Mapping[str, Any]:
        """The settings that differ from their defaults, as they were given."""
        found = {}
        for each in fields(self):
            value = getattr(self, each.name)
            default = each.default_factory() if callable(each.default_factory) else each.default
            if value != default:
                found[each.name] = value
        return found

    def is_default(self, name: str) -> bool:
        """Whether a setting has its default, given or not."""
        return name not in self.given

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

    def checked(self) -> Self:
        """The plan itself, which keeps the rules between the settings.

        A rule may rely on those before it.
        """
        for rule in self.rules:
            if rule.keeps(self):
                continue
            got = self.given.get(rule.name, getattr(self, rule.name))
            got = "nothing" if got is None else got
            if rule.beside:
                option, other = f"--{rule.beside.replace('_', '-')}", getattr(self, rule.beside)
                value = "" if isinstance(other, bool) else f" {other}"
                got = f"{got} {'without' if other is False else 'with'} {option}{value}"
            self.check(rule.name, False, rule.expected.format(args=self), rule.fix, got)
        return self

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

    def with_models(self) -> Self:
        """With the folders of models in the place of their names on the Hub."""
        from fastplm.run.hub import folder_of, name_of

        found: dict[str, Any] = {}
        given = dict(self.given)
        for each in fields(self):
            value = getattr(self, each.name)
            if each.metadata["path"] != MODEL or value is None:
                continue
            folder = folder_of(self.where, each.name, value, weights=each.name != "tokenizer")
            if str(folder) != str(value):
                found[each.name] = folder
            # The revision is written down with the name, which alone is another model one day.
            given[each.name] = name_of(folder) or value
        return self.changed(given=given, **found)

    def inputs(self) -> dict[str, Sequence[str | Path]]:
        """The paths that the command reads, by their settings."""
        found: dict[str, Sequence[str | Path]] = {}
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name not in ("out", "cache") and each.metadata["path"] and value:
                found[each.name] = value if isinstance(value, list | tuple) else (value,)
        return found

    def check_values(self) -> None:
        """Check the range and the choices of each setting."""
        for each in fields(self):
            given = getattr(self, each.name)
            number, choices = each.metadata["number"], each.metadata["choices"]
            for value in given if isinstance(given, list | tuple) else (given,):
                if value is not None and number is not None:
                    held = not isinstance(value, str) or isinstance(number, NumberOr)
                    held = held and number.holds(value)
                    self.check(each.name, held, number.expected, "Change it.", value)
                if value is not None and choices is not None:
                    check_choice(self.where, each.name, value, tuple(choices))
            if each.metadata["path"] and given is not None:
                for path in given if isinstance(given, list | tuple) else (given,):
                    self._check_path(each.name, str(path))
            if each.metadata["path"] in ("DIR", MODEL) or each.name == "out":
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
            if sys.getfilesystemencoding() != "utf-8":
                got = f"{ascii(path)}, under a locale whose encoding is not UTF-8"
                fix = "Choose another locale (export LC_ALL=C.UTF-8), or set PYTHONUTF8=1."
            self.check(name, False, "a name in UTF-8", fix, got)


class Plan(Settings):
    """Settings that have all their values; ``given`` says which of them were given."""

    def __init_subclass__(cls) -> None:
        _PLANS[cls.__mro__[2]] = cls

    def __post_init__(self) -> None:
        # Of ``dataclasses.replace``: the values of the other plan count as given.
        self.check_values()
        vars(self).update(vars(super().plan()))

    def plan(self) -> Any:
        return self


#: The plans of each class of arguments.
_PLANS: dict[type[Settings], type[Plan]] = {}


def _plan_of(kind: type[Settings]) -> type[Plan]:
    if issubclass(kind, Plan):
        return kind
    return _PLANS.get(kind) or type(f"{kind.__name__}Plan", (Plan, kind), {})


def resolve_warmup(steps: int, given: int | None) -> int:
    """The steps of the warm-up of a run: a tenth of it, 10000 at most, unless it was given."""
    return min(10_000, steps // 10) if given is None else given


def _default_cache() -> Path:
    from fastplm.data._folder import default_cache

    return default_cache()


@dataclass
class _Common:
    """The settings that several commands have, each declared once; ``common`` takes one."""

    corpus: Sequence[str | Path] = setting(
        "text files, plain or compressed, or folders of .txt files; or JSON, .csv, "
        ".tsv, .parquet, .arrow, or hf:NAME of a data set on the Hugging Face Hub; documents are "
        "separated by blank lines, by WikiText titles or, without either, by line ends; 'embedded' "
        "is the English documentation inside Python",
        path="PATH",
        on_command_line=["embedded"],
    )
    model: str | Path = setting(
        "folder of the checkpoint and its tokenizer, or its name on the Hugging Face Hub",
        path=MODEL,
    )
    steps: int = setting("optimizer steps of the run", number=COUNT)
    out: str | Path = setting("folder of all results", path="DIR")
    block_size: int = setting("tokens of a sample", 128, number=integer(8))
    batch_size: int = setting("samples of a micro-batch in each process", 32, number=BATCH)
    batch_tokens: int = setting("most tokens of a batch", BATCH_TOKENS, number=integer())
    gradient_accumulation: int = setting("micro-batches of a step", 1, number=BATCH)
    dropout: float | None = setting(
        "every dropout of the model (default: those of the checkpoint)", None, number=SHARE
    )
    seed: int = setting("seed of weights, order, masks and samples", 0, number=SEED)
    save_every: int = setting("steps between checkpoints", 1000, number=COUNT)
    keep_checkpoints: int | str = setting(
        "checkpoints that the run keeps, the newest ones; or all of them",
        2,
        number=NumberOr(integer(), "all"),
        metavar="N|all",
    )
    log_every: int = setting("steps between logged losses", 10, number=COUNT)
    eval_every: int | None = setting(
        "also score what is held out every N steps, for a curve",
        None,
        number=COUNT,
    )
    report_to: str = setting(
        "where losses and scores are logged, as the Trainer of Transformers does it, beside "
        "metrics.json: OUT/tensorboard, Weights & Biases, MLflow, or nowhere",
        "tensorboard",
        choices=tuple(REPORTS),
    )
    resume: bool = setting("continue from the last checkpoint in --out", False)
    overwrite: bool = setting(
        "rename what --out holds to OUT.old-1 (2, 3, ...) before it is written", False
    )
    precision: str = setting(
        "auto: bf16 where the hardware multiplies it",
        "auto",
        choices=PRECISIONS,
        excludes="precision",
        also={"bf16": "bf16"},
    )
    fsdp: bool = setting(
        "with several processes, shard weights, gradients and the optimizer over them (FSDP2)",
        False,
    )
    workers: int = setting(
        "processes that prepare batches; 0: the training process", 0, number=integer(0, 256)
    )
    threads: int | None = setting("CPU threads (default: PyTorch's choice)", None, number=THREADS)
    text_columns: Sequence[str] | None = setting(
        "columns of the texts in a table (default: the usual names)", None, metavar="NAME"
    )
    label_column: str | None = setting(
        "column of the labels in a table (default: the usual names)", None, metavar="NAME"
    )
    matmul_precision: str = setting(
        "of products of fp32, as torch.set_float32_matmul_precision: high is TF32, faster on a GPU",
        "highest",
        choices=MATMUL_PRECISIONS,
    )
    cache: str | Path = setting(
        "folder of vocabularies and token ids (default: ~/.cache/fastplm)",
        path="DIR",
        default_factory=_default_cache,
    )


def common(name: str, help: str | None = None, default: Any = None) -> Any:
    """The field of ``_Common`` of this name, with another help or default where one is given."""
    found = next(each for each in fields(_Common) if each.name == name)
    return field(
        default=found.default if default is None else default,
        default_factory=found.default_factory,
        metadata=found.metadata if help is None else {**found.metadata, "help": help},
    )
