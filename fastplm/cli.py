"""The command line: ``fastplm pretrain``, ``finetune``, ``demo``, ``info`` and ``measure``."""

from __future__ import annotations

import argparse
import difflib
import errno
import math
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import fastplm
from fastplm.errors import DivergenceError, FastplmError


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand and return its exit code.

    0: done. 1: the demo did not show all that it should, or a training diverged. 2: one line said
    what is wrong with the input or the machine. 130: Ctrl-C.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    args = vars(_parser().parse_args(words))
    command = args.pop("command")
    try:
        if "out" not in args:
            return command(**args)
        from fastplm.train._interrupt import answered

        with answered(words, args["out"]):
            return command(**args)
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        line = _line_of(error)
        if line is None or os.environ.get("FASTPLM_TRACEBACK") == "1":
            raise
        if os.environ.get("RANK", "0") == "0":
            print(f"fastplm: error: {' '.join(line.split())}", file=sys.stderr)
        return 1 if isinstance(error, DivergenceError) else 2


def _line_of(error: Exception) -> str | None:
    """What to say of an error of the input or the machine; None for one of the program."""
    if isinstance(error, FastplmError):
        return str(error)
    full = isinstance(error, OSError) and error.errno == errno.ENOSPC
    # The libraries written in Rust have errors of their own for what the system says.
    if isinstance(error, OSError) or "(os error " in str(error):
        fix = "Make room on the disk." if full or "(os error 28)" in str(error) else ""
        return f"the system refused: {error}. {fix}"
    if isinstance(error, MemoryError) or "out of memory" in str(error).lower():
        return f"too little memory: {error} A smaller --batch-size may fit."
    if "can't allocate memory" in str(error):
        return "too little memory. A smaller --batch-size or --block-size may fit."
    return None


def _info(*, all: bool) -> int:
    print(fastplm.info(all=all))
    return 0


def _measure(ops: list[str]) -> int:
    from fastplm._measure import measure

    path = measure(lambda line: print(line, flush=True), tuple(ops))
    print(f"Written to {path}; fastplm uses it on this machine from now on.")
    return 0


def _pretrain(**settings: Any) -> int:
    import torch
    from transformers.utils import logging

    from fastplm.train.pretrain import PretrainArguments, pretrain
    from fastplm.train.report import summary

    # Its bars for the writing of each checkpoint would break ours.
    logging.disable_progress_bar()
    try:
        metrics = pretrain(PretrainArguments(**settings))
    finally:
        # A process that leaves its threads running aborts now and then.
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    if metrics:
        print(summary(metrics))
    return 0


def _finetune(**settings: Any) -> int:
    import torch
    from transformers.utils import logging

    from fastplm.train.finetune import FinetuneArguments, finetune, summary

    logging.disable_progress_bar()
    first = os.environ.get("RANK", "0") == "0"

    def tell(line: str) -> None:
        if first:
            print(line, flush=True)

    try:
        metrics = finetune(FinetuneArguments(**settings), tell)
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    tell(summary(metrics))
    return 0


def _demo(**settings: Any) -> int:
    from fastplm.train.demo import demo

    return 0 if demo(**settings) else 1


class _Parser(argparse.ArgumentParser):
    """Says in one line what is wrong, and what may have been meant."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")

    def parse_known_args(self, *args: Any, **kwargs: Any) -> Any:
        # What a command does not know is said by itself, who knows what else there is.
        known, unknown = super().parse_known_args(*args, **kwargs)
        if unknown:
            meant = _perhaps(unknown[0].split("=")[0], self._option_string_actions)
            self.error(f"unrecognized arguments: {' '.join(unknown)}{meant}")
        return known, unknown

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            choices = list(action.choices)
            text = f"got {value!r}; expected {' | '.join(choices)}{_perhaps(value, choices)}"
            raise argparse.ArgumentError(action, text)


def _perhaps(value: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(value, known, n=1)
    return f". Did you mean {close[0]}?" if close else ""


def _number(kind: Callable[[str], Any], expected: str, least: float, most: float) -> Any:
    """The ``type`` of an option: a finite number in a range."""

    def read(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"got {text[:40]!r}; expected {expected}")
        return value

    return read


def _whole(least: int = 1, most: int = 10**9) -> Any:
    """Without a reason for another ``most`` what is more is a slip, and no memory holds it."""
    return _number(int, f"a whole number from {least} to {most}", least, most)


_REAL = _number(float, "a number, 0 or more", 0, sys.float_info.max)
_FINITE = _number(float, "a number", -sys.float_info.max, sys.float_info.max)
_SEED = _whole(0, 2**32 - 1)


def _parser() -> argparse.ArgumentParser:
    from fastplm.models import _electra_options
    from fastplm.train.choices import FAMILIES, MINUTES, PRECISIONS, UNITS
    from fastplm.train.presets import OPTIMIZERS, PRESETS

    parser = _Parser(prog="fastplm", description="BERT-era language models, fast and correct.")
    parser.add_argument("--version", action="version", version=f"fastplm {fastplm.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    info = commands.add_parser("info", help="what works on this machine, checked by running it")
    info.add_argument(
        "--all", action="store_true", help="every op on every backend, with the reason where not"
    )
    info.set_defaults(command=_info)

    measure = commands.add_parser(
        "measure", help="time the ops on this CPU, and let its own figures choose what runs"
    )
    measure.add_argument(
        "ops",
        nargs="*",
        default=[],
        metavar="OP",
        help="ops to measure (default: all that have a choice)",
    )
    measure.set_defaults(command=_measure)

    demo = commands.add_parser(
        "demo", help="pre-train a small ELECTRA on Python's own documentation, and compare"
    )
    demo.add_argument("--out", default="runs/demo", metavar="DIR", help="default: %(default)s")
    demo.add_argument(
        "--minutes",
        type=_REAL,
        default=MINUTES,
        help="what all of it is to take: the steps are fewer on a slow machine (default: "
        "%(default)s)",
    )
    demo.set_defaults(command=_demo)

    run = commands.add_parser(
        "pretrain",
        help="pre-train a language model on text files",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        description="Pre-train BERT, RoBERTa, ALBERT, ELECTRA, GPT-2, T5 or BART. With several "
        "processes the batch is so many times as large: "
        "torchrun --nproc-per-node N -m fastplm pretrain …",
    )
    run.set_defaults(command=_pretrain)
    add = run.add_argument
    # Without a default of its own an option has none to show, so its help says what happens.
    none: Any = {"default": argparse.SUPPRESS}
    add("--arch", required=True, choices=list(PRESETS), help="architecture", **none)
    add(
        "--corpus",
        nargs="+",
        default=["embedded"],
        metavar="PATH",
        help="text files (packed ones, too) or folders of .txt files, documents separated by blank "
        "lines, by WikiText titles or, without either, one a line; 'embedded' is the English "
        "documentation inside Python itself",
    )
    add("--steps", required=True, type=_whole(), help="optimizer steps of the whole run", **none)
    add("--out", required=True, metavar="DIR", help="where everything is written", **none)
    vocabulary = run.add_mutually_exclusive_group()
    vocabulary.add_argument(
        "--tokenizer", metavar="DIR", help="a saved tokenizer (without it one is trained)", **none
    )
    vocabulary.add_argument(
        "--vocab-size",
        type=_whole(6, 2**24),
        default=30522,
        help="at most this many tokens in a trained one",
    )
    add("--block-size", type=_whole(8), default=128, help="tokens a sample")
    add("--batch-size", type=_whole(), default=32, help="samples a step, process and micro-batch")
    add("--gradient-accumulation", type=_whole(), default=1, help="micro-batches a step")
    add("--lr", type=_REAL, help="peak learning rate (without it the published one)", **none)
    add(
        "--warmup",
        type=_whole(0),
        help="steps of linear warm-up (without it a tenth of the run, 10000 at most)",
        **none,
    )
    add("--seed", type=_SEED, default=0, help="of weights, order, masks and samples")
    add("--dropout", type=_REAL, default=0.1, help="of hidden states and embeddings")
    add(
        "--attention-dropout",
        type=_REAL,
        default=0.0,
        help="of attention weights; 0 keeps attention on the fused kernel",
    )
    learned = run.add_mutually_exclusive_group()
    usual = ", ".join(f"{name} {next(iter(family.classes))}" for name, family in FAMILIES.items())
    learned.add_argument(
        "--objective",
        choices=list(
            dict.fromkeys(name for family in FAMILIES.values() for name in family.classes)
        ),
        help=f"what is learned (without it the architecture's own: {usual})",
        **none,
    )
    learned.add_argument(
        "--no-nsp",
        dest="objective",
        action="store_const",
        const="mlm",
        help="the same as --objective mlm",
        **none,
    )
    add(
        "--unit",
        choices=UNITS,
        help="what is masked together: tokens, whole words, or up to three words in a row "
        "(without it tokens, for ALBERT ngram)",
        **none,
    )
    add(
        "--optimizer",
        choices=OPTIMIZERS,
        default="adamw",
        help="lamb is ALBERT's, with a learning rate for the size of the batch",
    )
    add(
        "--electra-objective",
        choices=_electra_options.OBJECTIVES,
        default="rtd",
        help="what ELECTRA's discriminator learns: which tokens are replaced, the same of the "
        "masked tokens alone, the originals of the masked tokens, or of all tokens",
    )
    add(
        "--electra-sharing",
        choices=_electra_options.SHARINGS,
        help="weights that ELECTRA's two models have in common (without it the embeddings)",
        **none,
    )
    add(
        "--electra-generator",
        choices=_electra_options.GENERATORS,
        default="model",
        help="where ELECTRA's replacements come from: unigram draws tokens by their frequency",
    )
    add(
        "--two-stage",
        action="store_true",
        help="ELECTRA: half of the steps for the generator, then half for the discriminator, which "
        "begins with its weights; each with its own warm-up",
        **none,
    )
    add(
        "--precision",
        choices=PRECISIONS,
        default="auto",
        help="auto: bf16 where the hardware multiplies it",
    )
    add("--workers", type=_whole(0), default=0, help="processes that prepare batches")
    add("--save-every", type=_whole(), default=1000, help="steps between checkpoints")
    add("--log-every", type=_whole(), default=10, help="steps between logged losses")
    add("--threads", type=_whole(), help="of the CPU (without it PyTorch's own choice)", **none)
    add("--resume", action="store_true", help="go on from the last checkpoint in --out", **none)
    add("--overwrite", action="store_true", help="move aside what is in --out", **none)
    add("--cache", metavar="DIR", help="of token ids (without it ~/.cache/fastplm)", **none)
    _add_finetune(commands)
    return parser


def _add_finetune(commands: Any) -> None:
    run = commands.add_parser(
        "finetune",
        help="fine-tune a checkpoint on labelled examples",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        description="Fine-tune a checkpoint once for each seed; the last line is the mean score "
        "and its 95 % confidence interval (Student's t). Formats of files: docs/finetuning.md.",
    )
    run.set_defaults(command=_finetune)
    add = run.add_argument
    none: Any = {"default": argparse.SUPPRESS}
    add(
        "--task",
        required=True,
        choices=("classification", "pair", "tagging", "qa", "choice"),
        help="a label for a text, or for two; a tag for each word; where in a text the answer to "
        "a question stands; which of several answers is right",
        **none,
    )
    add("--model", required=True, metavar="DIR", help="checkpoint and tokenizer", **none)
    add("--data", required=True, metavar="FILE", help="examples to train on", **none)
    add(
        "--eval-data",
        metavar="FILE",
        help="examples to score (without it a tenth of --data, held out; for qa, of its texts)",
        **none,
    )
    add("--out", required=True, metavar="DIR", help="where everything is written", **none)
    add(
        "--text-columns",
        nargs="+",
        metavar="NAME",
        help="of a table; two for pair (without it the usual names)",
        **none,
    )
    add("--label-column", metavar="NAME", help="(without it the usual names)", **none)
    add(
        "--threshold",
        type=_FINITE,
        help="labels are scores, and those above it are the positive class (without it 0 if labels "
        "are numbers with fractions)",
        **none,
    )
    length = run.add_mutually_exclusive_group()
    length.add_argument("--epochs", type=_REAL, default=3.0, help="passes over the examples")
    length.add_argument(
        "--steps", type=_whole(), help="optimizer steps instead of --epochs", **none
    )
    add("--batch-size", type=_whole(), help="(without it 32; 16 for qa and choice)", **none)
    add(
        "--learning-rate",
        type=_REAL,
        help="peak (without it 1e-4 for models narrower than 768, 5e-5, or 2e-5 from 1024 on)",
        **none,
    )
    add("--warmup", type=_whole(0), help="steps of linear warm-up (without it a tenth)", **none)
    add("--weight-decay", type=_REAL, default=0.01, help="of AdamW")
    add("--max-length", type=_whole(16), help="tokens (without it 128; qa 384, choice 64)", **none)
    add("--dropout", type=_REAL, help="all of it (without it the checkpoint's own)", **none)
    add("--max-samples", type=_whole(), metavar="N", help="train on so many examples", **none)
    add("--max-eval-samples", type=_whole(), metavar="N", help="score so many examples", **none)
    add("--seeds", type=_whole(), default=1, metavar="N", help="number of runs")
    add("--seed", type=_SEED, default=0, help="the first run's, of head, order and dropout")
    add("--bf16", action="store_true", help="mixed precision", **none)
    add(
        "--library",
        choices=("fastplm", "transformers"),
        default="fastplm",
        help="whose classes are trained: the same samples in the same order, from the same weights",
    )
    add("--save-every", type=_whole(), default=1000, help="steps between checkpoints")
    add("--log-every", type=_whole(), default=10, help="steps between logged losses")
    add("--threads", type=_whole(), help="of the CPU (without it PyTorch's own choice)", **none)
    add("--resume", action="store_true", help="go on with the run in --out", **none)
    add("--overwrite", action="store_true", help="move aside what is in --out", **none)
