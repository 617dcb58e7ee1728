"""The command line: ``fastplm pretrain``, ``finetune``, ``score`` and the other commands."""

from __future__ import annotations

import argparse
import errno
import os
import pkgutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import fastplm
from fastplm.errors import DivergenceError, FastplmError, fail, nearest
from fastplm.run.stdio import lasting_streams

if TYPE_CHECKING:
    from fastplm.run.settings import Settings


#: What torchrun tells the processes of a training.
_NUMBERS = ("MASTER_PORT", "RANK")
_LAUNCH = ("MASTER_ADDR", *_NUMBERS)
_A_MOMENT = 2.0  # seconds
_MORE_FILES = "Allow more (ulimit -n 4096), or take fewer --workers."


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand and return its exit code.

    0: done. 1: the demo did not show all that it should. 2: one line said what is wrong with the
    input or the machine. 3: a training diverged. 130: Ctrl-C. 143: SIGTERM.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    with lasting_streams():
        try:
            _check_folder()
            args = vars(_parser().parse_args(words))
            command = args.pop("command")
            _check_config(command, args.pop("config", None), args.get("out"))
            if "out" not in args or args.get("dry_run"):
                return command(**args)
            from fastplm.run.interrupt import interruptible

            known = getattr(getattr(command, "settings", None), "__dataclass_fields__", ())
            asked = {name: name in args for name in ("resume", "overwrite") if name in known}
            with interruptible(words, args["out"], **asked):
                return command(**args)
        except KeyboardInterrupt as stop:
            return 128 + (stop.args[0] if stop.args else signal.SIGINT)
        except Exception as error:
            line = _line_of(error)
            if line is None or os.environ.get("FASTPLM_TRACEBACK") == "1":
                raise
            diverged, rank = isinstance(error, DivergenceError), ""
            if _processes() > 1:
                rank = f"rank {os.environ.get('RANK') or '0'}: "
            # All processes diverge together, and only the first one knows of checkpoints.
            if not diverged or (os.environ.get("RANK") or "0") == "0":
                line = f"fastplm: error: {rank}{' '.join(line.split())}"
                print(line, file=sys.stderr, flush=True)
            return DivergenceError.EXIT_CODE if diverged else 2


def _processes() -> int:
    """The processes of this training, as torchrun says; 1 without it."""
    count = os.environ.get("WORLD_SIZE") or "1"
    return int(count) if count.isdecimal() else 1


def _check_launch(command: str) -> None:
    """The variables by which the processes of one training find each other are all there."""
    given = os.environ.get("WORLD_SIZE") or "1"
    missing = [name for name in _LAUNCH if not os.environ.get(name)]
    wrong = [name for name in _NUMBERS if not os.environ.get(name, "").isdecimal()]
    got = ""
    if not given.isdecimal() or int(given) < 1:
        got = repr(given)
    elif int(given) > 1 and missing:
        got = f"{given} without {', '.join(missing)}"
    elif int(given) > 1 and wrong:
        got = f"{given} with {wrong[0]}={os.environ[wrong[0]]!r}"
    if got:
        count = given if given.isdecimal() else "N"
        fix = f"Start it with torchrun --nproc-per-node {count} -m fastplm {command} …"
        fix += ", or unset WORLD_SIZE to train with one process."
        fail(command, "WORLD_SIZE", got, "the variables that torchrun sets", fix)


def _check_folder() -> None:
    """Paths are relative to a folder that is there."""
    try:
        os.getcwd()
    except FileNotFoundError:
        fix = "Change to another one (cd)."
        fail("fastplm", "current folder", "one that was deleted", "a folder", fix)


def _check_config(command: Any, config: str | None, out: Any) -> None:
    """A result is not written over the settings that were read."""
    if config is not None and out is not None and os.path.exists(out):
        if os.path.samefile(config, out):
            where, got = command.settings.where, f"{out}, which is --config"
            fail(where, "out", got, "another file", "Choose another --out.")


def _line_of(error: Exception) -> str | None:
    """One line about an error of the input or the machine; None for a bug of the program."""
    if isinstance(error, FastplmError):
        return str(error)
    if _lost_another(error):
        # The process that failed is to end first: torchrun names the first as the cause, and ends
        # the others.
        time.sleep(_A_MOMENT)
        return "it lost another process of this training, which ended: see the line of that one."
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        where = f", at {error.filename}" if error.filename else ""
        return f"this process has too many open files{where}. {_MORE_FILES}"
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


def _lost_another(error: Exception) -> bool:
    """Whether an error is only the consequence of what happened in another process."""
    if _processes() == 1 or not isinstance(error, RuntimeError):
        return False
    import torch

    from fastplm.run.folder import is_of_a_connection

    # What NCCL and the store raise is of this class; Gloo raises RuntimeErrors.
    kinds = getattr(torch.distributed, "DistError", ())
    return isinstance(error, kinds) or is_of_a_connection(error)


def _info(*, all: bool) -> int:
    print(fastplm.info(all=all))
    return 0


def _measure(ops: list[str], rows: str) -> int:
    from fastplm._judge import better_bounds, table
    from fastplm._measure import measure
    from fastplm.models._measure import plans

    contents = measure(print, Path(rows), tuple(ops), plans)
    print(f"The rows are in {rows}. What the rules keep there:\n")
    print(*table([contents]), "", *better_bounds(contents), sep="\n")
    return 0


@dataclass(frozen=True)
class _Command:
    """A command that has a class of settings; called with their values, it runs.

    Args:
        settings: the class.
        work: the function that does the work, of the settings, and gives the text to print.
        several: whether torchrun may start several processes of it.
    """

    settings: type[Settings]
    work: Callable[[Any], str]
    help: str
    description: str
    several: bool = False

    def __call__(self, **values: Any) -> int:
        if self.several:
            _check_launch(self.settings.where)
        import torch
        from transformers.utils import logging

        import fastplm._backends  # noqa: F401 (checks FASTPLM_BACKEND)

        logging.disable_progress_bar()  # its bars for the writing of checkpoints would break ours
        try:
            text = self.work(self.settings(**values))
        finally:
            # A process that ends while its threads run may abort.
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()
        if text:
            print(text.removesuffix("\n"))
        return 0


def _call(work: str, text: str = "builtins:str") -> Callable[[Any], str]:
    """What calls a function of the settings, and another one of what that gives, if it is any.

    Both are named as "module:function", so that a module is imported when its command runs.
    """

    def call(args: Any) -> str:
        done = pkgutil.resolve_name(work)(args)
        return pkgutil.resolve_name(text)(done) if done else ""

    return call


def _pretrain(args: Any) -> str:
    if args.dry_run:
        return _call(*(f"fastplm.pretrain.dry_run:{name}" for name in ("dry_run", "summary")))(args)
    summary = "seeds" if args.seeds > 1 else "report"
    return _call("fastplm.pretrain.run:pretrain", f"fastplm.pretrain.{summary}:summary")(args)


def _finetune(args: Any) -> str:
    from fastplm.data._folder import first_process
    from fastplm.finetune.report import summary
    from fastplm.finetune.run import finetune

    if first_process():
        return summary(finetune(args, print))
    finetune(args)
    return ""


_classic = _call("fastplm.classic.train:classic", "fastplm.classic.train:summary")
_embed = _call("fastplm.inference.embed:embed_file")
_prompt = _call("fastplm.inference.prompt:run_prompt")
_score = _call("fastplm.inference.score_command:score_file")
_distill = _call("fastplm.distill.run:distill", "fastplm.pretrain.report:summary")


def _demo(**settings: Any) -> int:
    from fastplm.pretrain.demo import demo

    return 0 if demo(**settings) else 1


def _study(**settings: Any) -> int:
    from fastplm.study.study import study

    print(study(settings.pop("study"), **settings).removesuffix("\n"))
    return 0


class _Parser(argparse.ArgumentParser):
    """Prints an error as one line, with the valid choice that is closest."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        for word in args or ():  # which argparse would take for an empty list
            if word.endswith("=--") and word[:-3] in self._option_string_actions:
                self.error(f"argument {word[:-3]}: expected one argument, another one than --")
        # The parser of a command names its own options, not the one above it.
        known, unknown = super().parse_known_args(args, namespace)
        if unknown:
            meant = nearest(unknown[0].split("=")[0], self._option_string_actions, "")
            self.error(f"unrecognized arguments: {' '.join(unknown)}. {meant}".rstrip(". "))
        if "--config" in self._option_string_actions:
            from fastplm.run.options import with_file

            with_file(self, known)
        return known, unknown

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            expected, fix = " | ".join(action.choices), nearest(value, action.choices, "")
            raise argparse.ArgumentError(
                action, f"got {value!r}; expected {expected}. {fix}".rstrip(". ")
            )


def _commands() -> Iterator[_Command]:
    """The commands that have a class of settings."""
    from fastplm.classic.settings import ClassicArguments
    from fastplm.distill.settings import DistillArguments
    from fastplm.finetune.settings import FinetuneArguments
    from fastplm.inference.score_settings import ScoreArguments
    from fastplm.inference.settings import EmbedArguments, PromptArguments
    from fastplm.pretrain.settings import PretrainArguments

    yield _Command(
        *(PretrainArguments, _pretrain, "pre-train a language model on text files"),
        "Pre-train BERT, RoBERTa, ALBERT, ELECTRA, GPT, GPT-2, T5 or BART. With several processes "
        "the batch is so many times as large: torchrun --nproc-per-node N -m fastplm pretrain …",
        several=True,
    )
    yield _Command(
        *(FinetuneArguments, _finetune, "fine-tune a checkpoint on labelled examples"),
        "Fine-tune a checkpoint once for each seed; the last line is the mean score and its 95 % "
        "confidence interval (Student's t). Formats of files: docs/finetuning.md.",
        several=True,
    )
    yield _Command(
        *(ClassicArguments, _classic),
        "train a system from before BERT: ELMo, Skip-thoughts, Quick-thoughts, word2vec",
        "Train a small ELMo, Skip-thoughts, Quick-thoughts or word2vec on text files, as a "
        "baseline.",
    )
    yield _Command(
        *(EmbedArguments, _embed, "write vectors of texts or of their words"),
        "Write vectors of texts, or of their words, from the hidden states of a checkpoint. How to "
        "read the file: docs/embedding.md.",
    )
    yield _Command(
        *(PromptArguments, _prompt),
        "classify texts by the label words that a language model finds most probable",
        "Classify labelled texts without training, by the label words that a language model finds "
        "most probable, and print the accuracy with and without calibration. Format of the prompt: "
        "docs/prompting.md.",
    )
    yield _Command(
        *(ScoreArguments, _score, "how probable a language model finds texts"),
        "Print the log-likelihood, or under a masked language model the pseudo-log-likelihood, and "
        "the perplexity of the texts in a file; or how often a model finds the acceptable one of "
        "two sentences more probable (BLiMP). More: docs/scoring.md.",
    )
    yield _Command(
        *(DistillArguments, _distill, "train a small model to answer as a larger one does"),
        "Distil a teacher into a smaller student. Recipes: distilbert (predictions at the masked "
        "tokens, labels and last hidden states; also GPT-2), tinybert (attention and hidden states "
        "of several layers), minilm and minilm-v2 (attention and relations of one layer), electra "
        "(a discriminator), multilingual (sentence vectors, from parallel text).",
        several=True,
    )


def _parser() -> argparse.ArgumentParser:
    from fastplm.pretrain.settings import MINUTES
    from fastplm.run.options import add_settings
    from fastplm.run.settings import NOT_NEGATIVE, integer

    parser = _Parser(prog="fastplm", description="BERT-era language models, fast and correct.")
    parser.add_argument("--version", action="version", version=f"fastplm {fastplm.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, run: Callable[..., int], help: str, **options: Any) -> _Parser:
        added = commands.add_parser(name, help=help, **options)
        added.set_defaults(command=run)
        return added

    info = add("info", _info, "what works on this machine, checked by running it")
    help = "every op on every backend, with the reason where not"
    info.add_argument("--all", action="store_true", help=help)
    help = "time the ops on this CPU, and judge the rules that choose what runs (nothing changes)"
    measure = add("measure", _measure, help)
    help = "ops to measure (default: all that have rules)"
    measure.add_argument("ops", nargs="*", default=[], metavar="OP", help=help)
    help = "where the measured rows are written (default: %(default)s)"
    measure.add_argument("--rows", default="measured.json", metavar="FILE", help=help)
    help = "pre-train a small ELECTRA on Python's own documentation, and compare"
    demo = add("demo", _demo, help)
    demo.add_argument("--out", default="runs/demo", metavar="DIR", help="default: %(default)s")
    help = "what all of it is to take: the steps are fewer on a slow machine (default: %(default)s)"
    demo.add_argument("--minutes", type=NOT_NEGATIVE, default=MINUTES, help=help)
    demo.add_argument("--threads", type=integer(), help="CPU threads (default: PyTorch's choice)")
    for each in _commands():
        added = add(each.settings.where, each, each.help, description=each.description)
        add_settings(added, each.settings)
    from fastplm.study.options import add_options

    help = "a grid of trainings and judges, to one table with intervals"
    told: dict[str, Any] = {"formatter_class": argparse.ArgumentDefaultsHelpFormatter}
    told["description"] = f"Run {help}. How to write a grid: docs/studies.md."
    add_options(add("study", _study, help, **told))
    return parser
