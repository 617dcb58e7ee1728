"""The settings of ``fastplm distill``. Nothing here imports PyTorch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastplm.run import budget
from fastplm.run.settings import (
    MODEL,
    POSITIVE,
    WEIGHT,
    WIDTH,
    Rule,
    apart,
    common,
    integer,
    setting,
)

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True)
class Method:
    """A published way to distil.

    Args:
        learning_rate: its peak.
        weights: of the losses that it adds up, by the names of the settings.
    """

    learning_rate: float
    weights: Mapping[str, float]


#: Rates and weights are the published ones; ELECTRA students have none, and these are ours.
METHODS: Mapping[str, Method] = {
    "distilbert": Method(5e-4, {"hard_weight": 2.0, "soft_weight": 5.0, "hidden_weight": 1.0}),
    "tinybert": Method(1e-4, {"hidden_weight": 1.0, "attention_weight": 1.0}),
    "minilm": Method(5e-4, {"attention_weight": 1.0}),
    "minilm-v2": Method(6e-4, {"attention_weight": 1.0}),
    "electra": Method(5e-4, {"hard_weight": 1.0, "soft_weight": 1.0, "hidden_weight": 1.0}),
    "multilingual": Method(2e-5, {}),
}
WEIGHTS = ("hard_weight", "soft_weight", "hidden_weight", "attention_weight")
#: Recipes with other sequence lengths or heads, whose FLOPs are not counted.
UNCOUNTED = ("electra", "multilingual")
DIVERGENCES = ("forward_kl", "reverse_kl", "js")
POOLINGS = ("mean", "cls")


def _weight(what: str) -> Any:
    usual = ", ".join(
        f"{name} {method.weights[what]:g}"
        for name, method in METHODS.items()
        if what in method.weights
    )
    described = {
        "hard_weight": "the loss without a teacher: of the labels",
        "soft_weight": "the divergence from the teacher's predictions, times temperature^2",
        "hidden_weight": "the distance of hidden states",
        "attention_weight": "the distance of attention, or of relations",
    }
    help = f"weight of {described[what]} (default: the published one: {usual})"
    return setting(help, None, number=WEIGHT)


@dataclass(frozen=True)
class DistillArguments(budget.BudgetSettings):
    """The settings of a distillation; see ``fastplm distill --help``.

    Raises:
        ArgumentValueError: a value is out of its range.
    """

    where = "distill"
    topics = {
        "the run": (
            *("recipe", "teacher", "student", "student_layers", "corpus", "out", "steps", "flops"),
            *("batch_size", "lr", "resume", "overwrite"),
        ),
        "the student": ("student_hidden", "student_heads", "tokenizer", "vocab_size"),
        "what it learns": (
            *("translation", "pooling", "generator", "temperature", "divergence", *WEIGHTS),
            *("teacher_layer", "relation_heads", "block_size"),
        ),
        "how it learns": ("warmup", "gradient_accumulation", "dropout", "precision", "seed"),
        "the machine, and what is written": (
            *("threads", "workers", "cache", "save_every", "keep_checkpoints", "log_every"),
            *("eval_every", "report_to"),
        ),
    }

    recipe: str = setting("what the student learns from the teacher", choices=tuple(METHODS))
    teacher: str | Path = setting("folder of the teacher and its tokenizer", path=MODEL)
    corpus: Sequence[str | Path] = common("corpus")
    #: None where ``flops`` is given, until the models are read, see ``with_flops``.
    steps: int = budget.steps()
    out: str | Path = setting("folder of all results", "", path="DIR", required=True)
    flops: float | None = budget.flops()
    student: str | Path | None = setting(
        "folder of the student (default: made of layers of the teacher)",
        None,
        path=MODEL,
        excludes="student",
    )
    student_layers: int | None = setting(
        "layers of the student, copied from the teacher at equal distances (default: half of them)",
        None,
        number=integer(),
        excludes="student",
    )
    student_hidden: int | None = setting(
        "width of a student whose weights are all new (default: the teacher's)",
        None,
        number=WIDTH,
    )
    student_heads: int | None = setting(
        "attention heads of such a student (default: the teacher's)",
        None,
        number=integer(),
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
        path=MODEL,
        excludes="vocabulary",
    )
    vocab_size: int | None = setting(
        "multilingual: train a WordPiece vocabulary of at most N tokens on both sides of the text; "
        "what it shares with the teacher's keeps its embedding",
        None,
        number=integer(6, 2**22),
        excludes="vocabulary",
    )
    pooling: str = setting(
        "multilingual: a sentence's vector is the mean of its tokens' last hidden states, or the "
        "first token's (cls)",
        "mean",
        choices=POOLINGS,
    )
    generator: str | Path | None = setting(
        "electra: folder of the generator that replaces tokens; it is not trained", None, path=MODEL
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
        number=integer(),
    )
    relation_heads: int | None = setting(
        "minilm-v2: parts into which queries, keys and values are split (default: the teacher's "
        "attention heads)",
        None,
        number=integer(),
    )
    block_size: int = common("block_size")
    batch_size: int = common("batch_size")
    gradient_accumulation: int = common("gradient_accumulation")
    lr: float | None = setting(
        "peak learning rate (default: the published one, of large batches)",
        None,
        number=POSITIVE,
        also={"learning_rate": None},
    )
    warmup: int | None = setting(
        "steps of linear warm-up (default: a tenth of the run, 10000 at most)",
        None,
        number=integer(0, 2**40),
    )
    dropout: float | None = common("dropout")
    seed: int = common("seed")
    save_every: int = common("save_every")
    keep_checkpoints: int | str = common("keep_checkpoints")
    log_every: int = common("log_every")
    eval_every: int | None = common("eval_every")
    report_to: str = common("report_to")
    resume: bool = common("resume")
    overwrite: bool = common("overwrite")
    precision: str = common("precision")
    workers: int = common("workers")
    threads: int | None = common("threads")
    cache: str | Path = common("cache")

    rules = (
        Rule(
            "translation",
            lambda args: args.recipe != "multilingual" or args.translation is not None,
            "a value with the recipe multilingual",
            fix="Give --translation.",
        ),
        Rule(
            "generator",
            lambda args: args.recipe != "electra" or args.generator is not None,
            "a value with the recipe electra",
            fix="Give --generator, such as OUT/generator of a pre-training.",
        ),
        *budget.RULES,
        budget.SAMPLES,
        Rule(
            "flops",
            lambda args: args.flops is None or args.recipe not in UNCOUNTED,
            "no budget with the recipe {args.recipe}, whose FLOPs are not counted",
            "recipe",
            "Give --steps N in its place.",
        ),
        *(
            apart(name, "student", "no value beside --student")
            for name in ("student_hidden", "student_heads", "tokenizer", "vocab_size")
        ),
        Rule(
            "warmup",
            lambda args: args.steps is None or args.warmup <= args.steps,
            "0 to {args.steps}, the steps of the run",
            fix="Choose a number of steps in between.",
        ),
    )
    #: The settings that only some recipes have, with these recipes.
    recipes_of = {
        **{
            name: tuple(key for key, method in METHODS.items() if name in method.weights)
            for name in WEIGHTS
        },
        **dict.fromkeys(("translation", "tokenizer", "vocab_size", "pooling"), ("multilingual",)),
        **dict.fromkeys(("teacher_layer", "relation_heads"), ("minilm-v2",)),
        "generator": ("electra",),
        "temperature": ("distilbert", "electra"),
        "divergence": ("distilbert",),
    }

    def resolved(self) -> Self:
        for name, recipes in self.recipes_of.items():
            able = self.recipe in recipes or self.is_default(name)
            expected = f"the recipe {' or '.join(recipes)}"
            got = f"{getattr(self, name)} with the recipe {self.recipe}"
            self.check(name, able, expected, "Leave the option out.", got)
        method = METHODS[self.recipe]
        weights = {name: self.given.get(name, method.weights.get(name)) for name in WEIGHTS}
        able = not method.weights or any(weights[name] for name in method.weights)
        name, fix = next(iter(method.weights), "recipe"), "Leave one of them out."
        self.check(name, able, "one weight above 0", fix, "0, as all of them are")
        text = {"corpus": self.corpus, "translation": self.translation}
        paths = {name: each and [str(path) for path in each] for name, each in text.items()}
        plan = self.changed(lr=self.lr or method.learning_rate, **weights, **paths)
        return plan.with_steps(self.steps)
