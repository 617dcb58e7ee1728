"""What a fine-tuning prints: what it will do, and what came of it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fastplm.finetune.labels import shown_counts
from fastplm.finetune.mixture import counts_of_epoch, indices_of_parts
from fastplm.finetune.settings import FinetuneArguments
from fastplm.finetune.tasks._task import Task
from fastplm.run.report import block, counted, precision

if TYPE_CHECKING:
    from fastplm.finetune.run import Finetuning


def announcement(run: Finetuning) -> str:
    """What is printed before the first step."""
    args, task, device = run.args, run.task, run.device
    held_out = "" if args.eval_data is not None else ", held out of the same file"
    cpu = device.type == "cpu"
    threads = f", {counted(torch.get_num_threads(), 'thread')}" if cpu else ""
    counts, to_judge = task.label_counts(task.train), task.label_counts(task.test)
    train = f"{len(task.train):,} examples ({len(task.dataset):,} features) to train on, "
    if args.own_head:
        train, held_out = "", ", and nothing is trained"
    rows = {"data": f"{args.data}: {train}{len(task.test):,} to judge by{held_out}"}
    if run.trials:
        on = run.trials[0][1]
        rates = ", ".join(f"{each.args.learning_rate:g}" for _, each in run.trials)
        rows["rate"] = (
            f"the best of {rates} on {len(on.test):,} of the examples to train on, when seed "
            f"{args.seed} was trained on the other {len(on.train):,}"
        )
    if counts is not None and to_judge is not None:
        rows["labels"] = f"{shown_counts(counts)}; to judge by: {shown_counts(to_judge)}"
    parts = indices_of_parts(task.train)
    if parts:
        each = counts_of_epoch(args, [len(part) for part in parts.values()])
        read = zip(each, parts, strict=True)
        rows["an epoch"] = ", ".join(f"{count:,} of {name}" for count, name in read)
    if args.teacher is not None:
        share = f"{args.teacher_weight:g} of the loss, temperature {args.teacher_temperature:g}"
        rows["teacher"] = f"{args.teacher}: {share}"
    rows |= {
        "model": f"{_source(args)}, with the classes of {args.library}",
        "precision": precision(args),
        "device": f"{device}{threads}",
        "results": f"{args.out}, {counted(args.seeds, 'seed')}",
    }
    return "\n".join([block(rows), *task.doubts()])


def write_seeds_card(out: Path, task: Task, model: Any, result: dict[str, Any]) -> None:
    """Write the model card of a seed's model."""
    from fastplm.run.card import write_card

    args = task.args
    base = args.given.get("encoder" if args.model is None else "model", args.checkpoint)
    begun = "the sizes" if args.from_scratch else "the weights"
    held_out = args.data if args.eval_data is None else args.eval_data
    names = ("seed", "steps", "loss", "learning_rate", "tokens_per_second", "train_seconds")
    write_card(
        out,
        args,
        model,
        trained=f"Trained from {begun} of `{base}` for the task `{args.task}` on "
        f"{len(task.train):,} examples of {args.data}.",
        data=[str(args.data)],
        base=args.checkpoint,
        scores=result["scores"],
        scored=f"{len(task.test):,} examples of {held_out}",
        facts={name: result[name] for name in names},
    )


def scores_of(task: Task, result: dict[str, Any]) -> str:
    """The scores of a seed; beside them, if its model gives all examples one answer."""
    scores = "  ".join(f"{name} {result['scores'][name]:.4f}" for name in task.metrics)
    if result.get("one_answer"):
        scores += f"  [{result['one_answer']}]"
    if "source" in result:
        scores += f"  source gain {result['source']['gain']:.4f}"
    if result["loss"] is None:
        return scores
    return f"{scores}  training loss {result['loss']:.4f}  {result['train_seconds']:.1f} s"


def _source(args: FinetuneArguments) -> str:
    """Where the weights of a run come from."""
    if args.encoder is None:
        return str(args.model)
    parts = [
        f"{part} {path}{'' if args.warm in ('both', part) else ' (new weights)'}"
        for part, path in (("encoder", args.encoder), ("decoder", args.decoder or args.encoder))
    ]
    return " and ".join(parts) + (", one set of weights" if args.share else "")


def summary(metrics: dict[str, Any]) -> str:
    """The last line that a run prints: each score's mean and half the width of its interval.

    A run with several numbers of examples prints a line for each of them.
    """
    count = len(metrics["seeds"])
    what = "1 seed, no interval" if count == 1 else f"95 % interval of {count} seeds"
    usual = metrics["most_frequent_label"]
    if usual is not None:
        what += f"; always the most frequent label: accuracy {usual['accuracy']:.4f}"
    lines = []
    for point in metrics.get("curve", [metrics]):
        start = f"{point['train_examples']} examples: " if "curve" in metrics else ""
        parts = []
        for name, score in point["scores"].items():
            width = "" if score["half_width"] is None else f" ± {score['half_width']:.4f}"
            parts.append(f"{name} {score['mean']:.4f}{width}")
        same = point.get("seeds_with_one_answer", 0)
        told = f"; {same} of {counted(count, 'seed')} gave one answer to all" if same else ""
        lines.append(f"{start}{'  '.join(parts)}  ({what}{told})")
    return "\n".join(lines)
