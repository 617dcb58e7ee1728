"""The settings of ``fastplm pretrain``. Nothing here imports PyTorch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastplm.models import (
    ELECTRA_GENERATORS,
    ELECTRA_OBJECTIVES,
    ELECTRA_SECOND_STAGES,
    ELECTRA_SHARINGS,
)
from fastplm.pretrain.objectives import (
    JOINT_FAMILIES,
    MASKING,
    NAMES,
    NOISES,
    Objective,
    learned_as,
    names_of,
)
from fastplm.pretrain.presets import (
    FAMILIES,
    OPTIMIZERS,
    PRESETS,
    Peak,
    Preset,
    learned_by,
    preset,
    usual_peak,
)
from fastplm.run import budget
from fastplm.run.settings import (
    MODEL,
    POSITIVE,
    SEEDS,
    SHARDED,
    SHARE,
    Number,
    Plan,
    Rule,
    apart,
    common,
    integer,
    needs,
    setting,
)

if TYPE_CHECKING:
    from typing_extensions import Self

#: The minutes of a demo, without the installation.
MINUTES = 3.0
#: What ELECTRA's discriminator learns of replaced tokens.
_DETECTION = ("rtd", "rtd_masked")
#: A mean cosine of two tokens' states above which an encoder tells no token from another.
COLLAPSED = 0.99
UNITS = ("token", "word", "ngram")
#: The most pieces of a block, and the share of the steps of BERT with short blocks.
_MOST_PIECES, _SHORT_SHARE = 8, 0.9
_PART = Number(float, 0, 1, "a number from 0 to 1")
_SOME = Number(float, math.nextafter(0, 1), 1, "a number above 0, 1 at most")


_USUAL_OBJECTIVES = ", ".join(f"{name} {family.objective}" for name, family in FAMILIES.items())
_USUAL_VOCABULARIES = ", ".join(f"{name} {family.vocab_size}" for name, family in FAMILIES.items())
_OWN = ", ".join(name for name, chosen in PRESETS.items() if not chosen.source)


@dataclass(frozen=True)
class PretrainArguments(budget.BudgetSettings):
    """The settings of a pre-training; see ``fastplm pretrain --help``.

    Raises:
        ArgumentValueError: a value is out of its range.
    """

    where = "pretrain"
    topics = {
        "the run": (
            *("arch", "corpus", "out", "steps", "flops", "batch_size", "lr", "vocab_size"),
            *("tokenizer", "start_from", "seeds", "resume", "overwrite", "dry_run"),
        ),
        "what it learns": (
            *("objective", "unit", "mlm_probability", "mask_replace_prob", "random_replace_prob"),
            *("static_masks", "separators", "noise"),
            *("block_size", "short_block_size", "short_share"),
        ),
        "how it learns": (
            *("optimizer", "warmup", "gradient_accumulation", "dropout", "attention_dropout"),
            *("precision", "seed"),
        ),
        "another size than that of --arch": (
            *("layers", "hidden", "heads", "embedding_size", "parameter_sharing"),
        ),
        "of ELECTRA": (
            *("electra_objective", "electra_sharing", "electra_generator", "generator_size"),
            *("temperature", "rtd_weight", "adversarial", "two_stage", "second_stage_from"),
        ),
        "the machine, and what is written": (
            *(
                "threads",
                "workers",
                "fsdp",
                "no_graphs",
                "cache",
                "save_every",
                "keep_checkpoints",
                "states",
            ),
            *("log_every", "eval_every", "report_to"),
        ),
    }

    arch: str = setting(
        f"architecture: the published one of this name, but for {_OWN}, which are fastplm's own",
        choices=tuple(PRESETS),
    )
    corpus: Sequence[str | Path] = common("corpus")
    #: None where ``flops`` is given, until the vocabulary is known, see ``with_flops``.
    steps: int = budget.steps()
    out: str | Path = setting("folder of all results", "", path="DIR", required=True)
    flops: float | None = budget.flops()
    tokenizer: str | Path | None = setting(
        "folder of a saved tokenizer (default: train one)", None, path=MODEL, excludes="vocabulary"
    )
    vocab_size: int | None = setting(
        "most tokens of a trained tokenizer (default: the published number: "
        f"{_USUAL_VOCABULARIES})",
        None,
        number=integer(6, 2**22),
        excludes="vocabulary",
    )
    start_from: str | Path | None = setting(
        "folder of a checkpoint of this architecture, whose weights and tokenizer the run begins "
        "with; its optimizer and its schedule are new",
        None,
        path=MODEL,
        excludes="vocabulary",
    )
    block_size: int = common("block_size")
    short_block_size: int | None = setting(
        "cut the blocks of the first steps into pieces of N tokens, as many in a step: BERT was "
        "trained on 128 tokens before 512",
        None,
        number=integer(2),
    )
    short_share: float = setting(
        "of --short-block-size: the share of the steps with short blocks (with --two-stage: of the "
        "steps of each stage)",
        _SHORT_SHARE,
        number=SHARE,
    )
    batch_size: int = common("batch_size")
    lr: float | None = setting(
        "peak learning rate (default: the published one, times the square root of the samples of a "
        "step over those of the published run)",
        None,
        number=POSITIVE,
        also={"learning_rate": None},
    )
    warmup: int | None = setting(
        "steps of linear warm-up; of a constant rate with adafactor (default: a tenth of the run, "
        "10000 at most)",
        None,
        number=integer(0, 2**40),
    )
    seed: int = common("seed")
    seeds: int = setting(
        "runs, each with a seed of its own from --seed on; with several ones they are in "
        "OUT/seed-0, OUT/seed-1, ...",
        1,
        number=integer(1, 10_000),
    )
    save_every: int = common("save_every")
    keep_checkpoints: int | str = common("keep_checkpoints")
    states: int | None = setting(
        "also keep the states after 1/N, 2/N, ... of the steps, for a curve of scores",
        None,
        number=integer(2, 1000),
    )
    log_every: int = common("log_every")
    eval_every: int | None = common("eval_every")
    report_to: str = common("report_to")
    resume: bool = common("resume")
    overwrite: bool = common("overwrite")
    dry_run: bool = setting(
        "take a few steps, print what the run would need (parameters, FLOPs, tokens, memory, "
        "hours on this machine), and write nothing",
        False,
    )
    dropout: float | None = setting(
        "dropout of hidden states and embeddings (default: 0.1)", None, number=SHARE
    )
    attention_dropout: float | None = setting(
        "dropout of attention weights, in the fused kernel too (default: 0.1; 0 for the sizes that "
        "are fastplm's own)",
        None,
        number=SHARE,
    )
    precision: str = common("precision")
    workers: int = common("workers")
    threads: int | None = common("threads")
    fsdp: bool = common("fsdp")
    no_graphs: bool = setting(
        "on a GPU, launch each kernel of a step, and do not replay the step as CUDA graphs", False
    )
    gradient_accumulation: int = common("gradient_accumulation")
    objective: str | None = setting(
        f"what the model learns (default: that of the architecture: {_USUAL_OBJECTIVES})",
        None,
        choices=NAMES,
        excludes="objective",
        also={"no_nsp": "mlm"},
    )
    unit: str | None = setting(
        "what is masked as a whole: tokens, words, or up to three words in a row (default: "
        "token; for ALBERT ngram)",
        None,
        choices=UNITS,
    )
    mlm_probability: float | None = setting(
        "share of the tokens that is chosen to be predicted (default: 0.15; 0.25 for the objective "
        "rtd of electra-large)",
        None,
        number=_SOME,
    )
    mask_replace_prob: float | None = setting(
        "share of the chosen tokens that becomes [MASK] (default: 0.8; 1 for the objective rtd)",
        None,
        number=_PART,
    )
    random_replace_prob: float | None = setting(
        "share of the chosen tokens that becomes a random token; the rest stays as it is (default: "
        "0.1, or less where --mask-replace-prob leaves less)",
        None,
        number=_PART,
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
        number=integer(1, 1000),
    )
    hidden: int | None = setting(
        "width of the layers; the feed-forward part is four times as wide (default: that of "
        "--arch)",
        None,
        number=integer(1, 2**16),
    )
    heads: int | None = setting(
        "attention heads, of which --hidden is a multiple (default: those of --arch)",
        None,
        number=integer(1, 2**16),
    )
    embedding_size: int | None = setting(
        "of ALBERT and ELECTRA: width of the embeddings (default: that of --arch)",
        None,
        number=integer(1, 2**16),
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
        number=integer(),
    )
    separators: bool = setting(
        "put the separator token between two documents of a block, as RoBERTa does; without it "
        "they follow each other",
        False,
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
        choices=ELECTRA_OBJECTIVES,
        of=JOINT_FAMILIES,
    )
    electra_sharing: str | None = setting(
        "weights that ELECTRA's two models share (default: embeddings)",
        None,
        choices=ELECTRA_SHARINGS,
        of=JOINT_FAMILIES,
    )
    electra_generator: str = setting(
        "what replaces ELECTRA's tokens: a model, or draws by the frequency of tokens (unigram)",
        "model",
        choices=ELECTRA_GENERATORS,
        of=JOINT_FAMILIES,
    )
    generator_size: float | None = setting(
        "width and heads of ELECTRA's generator as a share of the discriminator's (default: that "
        "of --arch)",
        None,
        number=_SOME,
        of=JOINT_FAMILIES,
    )
    temperature: float = setting(
        "of the softmax from which ELECTRA's generator draws tokens",
        1.0,
        number=POSITIVE,
        of=JOINT_FAMILIES,
    )
    rtd_weight: float | None = setting(
        "factor of the loss of ELECTRA's discriminator (default: 50; 1 where it predicts tokens)",
        None,
        number=POSITIVE,
        of=JOINT_FAMILIES,
    )
    adversarial: bool = setting(
        "ELECTRA: train the generator to make the discriminator's loss large, by REINFORCE, "
        "instead of to predict tokens",
        False,
        of=JOINT_FAMILIES,
    )
    two_stage: bool = setting(
        "ELECTRA: half of the steps train the generator, then half train the discriminator, which "
        "begins with its weights; each half has its own warm-up",
        False,
        of=JOINT_FAMILIES,
    )
    second_stage_from: str = setting(
        "with --two-stage: the discriminator begins with the weights of the generator, or with its "
        "own (scratch), and the generator may be narrower",
        "generator",
        choices=ELECTRA_SECOND_STAGES,
        of=JOINT_FAMILIES,
    )
    cache: str | Path = common("cache")

    rules = (
        apart("dry_run", "resume", "no --dry-run, or no --resume, as a dry run writes nothing"),
        apart(
            "dry_run", "overwrite", "no --dry-run, or no --overwrite, as a dry run writes nothing"
        ),
        SHARDED,
        apart("fsdp", "two_stage", "no two_stage, which copies weights from model to model"),
        *budget.RULES,
        apart("start_from", "tokenizer", "no tokenizer beside it, as the checkpoint has its own"),
        apart("start_from", "vocab_size", "no vocab_size beside it, as the checkpoint has its own"),
        *(
            needs(name, "objective", MASKING, f"no {name}, as this objective does not mask tokens")
            for name in ("unit", "mlm_probability", "mask_replace_prob", "random_replace_prob")
        ),
        Rule(
            "random_replace_prob",
            lambda args: sum(args.mask_shares[1:]) <= 1 + 2**-32,
            "1 at most together with mask_replace_prob, which is {args.mask_shares[1]}",
            fix="The two are shares of the chosen tokens; the rest stays as it is.",
        ),
        needs(
            "separators",
            "objective",
            names_of("has_separators"),
            f"{' or '.join(names_of('has_separators'))}, whose blocks may be of several documents",
        ),
        needs(
            "short_block_size",
            "objective",
            names_of("has_short_blocks"),
            f"{' or '.join(names_of('has_short_blocks'))}",
        ),
        Rule(
            "short_block_size",
            lambda args: not args.learns.has_pairs or (args.short_block_size or 5) >= 5,
            "5 or more with {args.objective}: two segments and what is around them",
            "objective",
            "Raise it.",
        ),
        Rule(
            "short_block_size",
            lambda args: (
                args.short_block_size is None
                or args.block_size
                in [args.short_block_size * n for n in range(2, _MOST_PIECES + 1)]
            ),
            "a half, a third … of {args.block_size}, an eighth at least",
            "block_size",
            "Change one of the two.",
        ),
        Rule(
            "short_share",
            lambda args: args.short_block_size is not None or args.is_default("short_share"),
            "short_block_size beside it",
            "short_block_size",
            "Add --short-block-size, or leave the option out.",
        ),
        SEEDS,
        Rule(
            "heads",
            lambda args: args.preset.hidden % args.preset.heads == 0,
            "a divisor of {args.preset.hidden}, the width (hidden)",
            fix="Change --heads or --hidden.",
        ),
        *(
            needs(name, other, values, f"{other} {' or '.join(values)}, {why}")
            for name, other, values, why in (
                ("adversarial", "electra_generator", ("model",), "which can be trained"),
                ("adversarial", "electra_objective", _DETECTION, "whose loss is the reward"),
                ("generator_size", "electra_generator", ("model",), "which has a size"),
                ("temperature", "electra_generator", ("model",), "which has a softmax"),
            )
        ),
        Rule(
            "generator_size",
            lambda args: args.electra_sharing != "all" or args.generator_size in (None, 1.0),
            "1, as both models have all weights in common",
            "electra_sharing",
        ),
        Rule(
            "generator_size",
            lambda args: (
                not args.two_stage
                or args.second_stage_from != "generator"
                or args.generator_size in (None, 1.0)
            ),
            "1, as the discriminator begins with the generator's weights",
            "two_stage",
            "Leave one of the two options out, or add --second-stage-from scratch.",
        ),
        Rule(
            "second_stage_from",
            lambda args: args.two_stage or args.second_stage_from == "generator",
            "two_stage beside it",
            "two_stage",
            "Add --two-stage, or leave the option out.",
        ),
        apart(
            "adversarial", "two_stage", "no two_stage, as no discriminator rewards the first stage"
        ),
        apart("rtd_weight", "two_stage", "no two_stage, where each loss stands alone"),
        *(
            needs("two_stage", name, values, f"{' or '.join(values)}, {why}", names_other=True)
            for name, values, why in (
                ("optimizer", ("adamw", "lamb"), "as each stage has a schedule of its own"),
                ("electra_generator", ("model",), "a generator that can be trained first"),
                ("electra_sharing", ("none",), "as the generator is frozen in the second stage"),
            )
        ),
        Rule(
            "steps",
            lambda args: args.steps is None or not args.two_stage or args.steps > 1,
            "2 or more, for two stages",
            fix="Raise it.",
        ),
        needs(
            "static_masks",
            "objective",
            names_of("has_static_masks"),
            f"no --static-masks, or --objective {' or '.join(names_of('has_static_masks'))}, whose "
            "blocks are the same in every epoch",
        ),
        budget.SAMPLES,
        Rule(
            "warmup",
            lambda args: args.steps is None or args.warmup <= args.first_stage,
            "0 to {args.first_stage}, the steps of the run or of its first stage",
            fix="Choose a number of steps in between.",
        ),
        Rule(
            "attention_dropout",
            lambda args: (
                args.preset.family != "t5"
                or args.given.get("attention_dropout") in (None, 0, args.dropout)
            ),
            "nothing or {args.dropout}, as T5 has one rate for all its dropout",
            fix="Choose it by --dropout.",
        ),
    )


class PretrainPlan(Plan, PretrainArguments):
    """The settings of a pre-training with all their values, and what follows from them.

    Attributes:
        peak: the published learning rate that ``lr`` follows from; None if it was given.
    """

    lr: float
    objective: str
    optimizer: str
    dropout: float
    attention_dropout: float
    warmup: int
    peak: Peak | None = None

    def resolved(self) -> Self:
        named = preset(self.arch)
        family = FAMILIES[named.family]
        objective = self.objective or family.objective
        plan = self.changed(
            corpus=[str(path) for path in self.corpus],
            vocab_size=self.vocab_size or (None if self.start_from else family.vocab_size),
            optimizer=self.optimizer or named.optimizer,
            objective=objective,
            noise=None if self.noise is None else sorted(set(self.noise)),
            dropout=named.dropout if self.dropout is None else self.dropout,
        )
        plan.check_families()
        attention = named.attention_dropout
        if self.attention_dropout is not None:
            attention = self.attention_dropout
        sharing = "gdes" if named.family == "deberta-v3" else "embeddings"
        sharing = "none" if self.two_stage else sharing
        plan = plan.changed(
            unit=self.unit or (family.unit if objective in MASKING else None),
            attention_dropout=plan.dropout if named.family == "t5" else attention,
            electra_sharing=self.electra_sharing or (sharing if plan.learns.is_joint else None),
        )
        if self.lr is None:
            peak = usual_peak(plan.preset, plan.optimizer)
            plan = plan.changed(peak=peak, lr=peak.scaled(plan.samples_a_step))
        return plan.with_steps(self.steps)

    def check_families(self) -> None:
        """Check that the architecture can learn the objective, and that each setting is for it."""
        able = self.objective in (learned := learned_by(self.preset.family))
        fix = "Leave the option out, or choose another architecture."
        expected = f"{' or '.join(learned)}, what {self.arch} can learn"
        self.check("objective", able, expected, fix, f"{self.objective} with {self.arch}")
        for each in fields(self):
            of = each.metadata["of"]
            if not of or self.is_default(each.name):
                continue
            value = self.given[each.name]
            able, fix = self.preset.family in of, "Leave the option out, or choose another --arch."
            expected = " or ".join(f"an architecture of the family {name}" for name in of)
            self.check(each.name, able, expected, fix, f"{value} with {self.arch}")
            able = of != JOINT_FAMILIES or self.learns.is_joint
            fix = "Leave one of the two options out."
            expected = "the objective rtd, as another one has no generator"
            self.check(each.name, able, expected, fix, f"{value} with objective {self.objective}")

    @property
    def learns(self) -> type[Objective]:
        """The objective, as this family of architectures learns it."""
        return learned_as(self.objective, self.preset.family)

    @property
    def preset(self) -> Preset:
        """The architecture's, with the sizes that the settings change."""
        named = preset(self.arch)
        changes: dict[str, Any] = {"layers": self.layers, "hidden": self.hidden}
        changes |= {"heads": self.heads, "embedding": self.embedding_size}
        changes |= {"generator": self.generator_size}
        changes = {name: value for name, value in changes.items() if value is not None}
        if self.parameter_sharing != "all":
            changes["sharing"] = self.parameter_sharing
        if changes and named.source:
            changes["source"] = f"{named.source}, with other {', '.join(changes)}"
        if self.objective == "mlm":  # ELECTRA-Large masks more for its generator
            changes["mlm_probability"] = 0.15
        if self.mlm_probability is not None:
            changes["mlm_probability"] = self.mlm_probability
        return replace(named, **changes)

    @property
    def short_steps(self) -> list[range]:
        """The steps with short blocks: the first of the run, or of each stage."""
        if self.short_block_size is None:
            return []
        stages = {0: self.first_stage, self.first_stage: self.steps}
        return [
            range(begin, begin + round(self.short_share * (end - begin)))
            for begin, end in stages.items()
            if begin < end
        ]

    @property
    def short_samples(self) -> list[range]:
        """The samples of these steps, of all processes, before they are cut."""
        each = self.samples_a_step
        return [range(steps.start * each, steps.stop * each) for steps in self.short_steps]

    @property
    def mask_shares(self) -> tuple[float, float, float]:
        """The share of the tokens that is chosen; of these, the masked and the random ones."""
        shares = learned_as(str(self.objective), self.preset.family).shares or (0.8, 0.1)
        masked, random = self.mask_replace_prob, self.random_replace_prob
        masked = shares[0] if masked is None else masked
        random = min(shares[1], 1 - masked) if random is None else random
        return self.preset.mlm_probability, masked, random

    @property
    def stages(self) -> int:
        return 2 if self.two_stage else 1

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
            "temperature": self.temperature,
            "second_stage_from": self.second_stage_from,
        }
