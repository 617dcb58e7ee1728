"""The tasks of fine-tuning: the one list of their names.

Nothing here imports PyTorch, for which ``fastplm --help`` would wait: the class of a task is loaded
when it is used.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fastplm.finetune.tasks._task import Task

#: Settings of a new encoder-decoder, of a new encoder of a BART, and of all that write texts.
WARM_START = ("decoder", "warm", "share", "target_vocab_size")
SOURCE_ENCODER = ("source_encoder_layers", "source_vocab_size", "source_encoder_steps")
SEQ2SEQ = (
    *("targets", "eval_targets", "prefix", "max_target_length", "beams", "length_penalty"),
    *("stemmer", "mixture_cap", "mixture_temperature", "encoder", *WARM_START, *SOURCE_ENCODER),
)
_HEADS = ("features", "head")
_TABLE = ("text_columns", "label_column", "pooling", *_HEADS, "teacher", "lm_weight")
_SEGMENTS = ("own_head", "pooling", *_HEADS, "teacher")


@dataclass(frozen=True)
class Entry:
    """What is known of a task before its class is loaded.

    Args:
        kind: its class, after the module of this package that has it.
        learns: what, in the words of the help.
        options: the settings that it has and that not every task has.
        max_length, batch_size: the defaults of these settings.
        running_text: whether its examples are made of running text, as those of a pre-training.
    """

    kind: str
    learns: str
    options: tuple[str, ...]
    max_length: int = 128
    batch_size: int = 32
    running_text: bool = False


TASKS = {
    "classification": Entry(
        "classification.Classification", "a label for a text", (*_TABLE, "threshold")
    ),
    "pair": Entry(
        "classification.Pair", "a label for two texts", (*_TABLE, "threshold", "both_orders")
    ),
    "regression": Entry(
        "regression.Regression", "a score for one text or two", (*_TABLE, "both_orders")
    ),
    "tagging": Entry("tagging.Tagging", "a tag for each word", (*_HEADS, "teacher")),
    "qa": Entry(
        "question_answering.QuestionAnswering",
        "the place of an answer in a text",
        ("null_threshold", "teacher"),
        max_length=384,
        batch_size=16,
    ),
    "choice": Entry(
        "choice.Choice",
        "the right one of several answers",
        ("teacher", "lm_weight"),
        max_length=64,
        batch_size=16,
    ),
    "seq2seq": Entry("seq2seq.Seq2Seq", "a text for a text", ("text_columns", *SEQ2SEQ)),
    "sop": Entry(
        "segments.SentenceOrder",
        "whether two segments of running text were swapped",
        _SEGMENTS,
        running_text=True,
    ),
    "nsp": Entry(
        "segments.NextSentence",
        "whether the second of two is of another document",
        _SEGMENTS,
        running_text=True,
    ),
}


def task_class(name: str) -> type[Task]:
    """The class of a task."""
    module, _, kind = TASKS[name].kind.partition(".")
    return getattr(importlib.import_module(f"{__name__}.{module}"), kind)
