"""What a run prints before its first step."""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING, Any

import torch

from fastplm import _backends, _extension
from fastplm._machine import device_label
from fastplm.data import NextSentencePairs, TextFiles
from fastplm.pretrain.short_blocks import ShortPairs
from fastplm.run.budget import described
from fastplm.run.report import block, counted

if TYPE_CHECKING:
    from transformers import PreTrainedModel, TrainingArguments

    from fastplm.pretrain.data import RunData
    from fastplm.pretrain.run import Pretraining
    from fastplm.pretrain.settings import PretrainPlan
    from fastplm.pretrain.stream import StreamRun

_NAMED_FILES = 3
# The most that is advised: the peak rate of fastplm's own small sizes.
_LARGEST_RATE = 1e-3
# The share of lone sentences from which on next sentences are hardly learned.
_MANY = 0.5


def rows_of_run(
    run: StreamRun, before: dict[str, str], after: dict[str, str], samples: str = "samples of"
) -> str:
    """The lines of a run: those of any, and its own before and after that of its training."""
    args, data, processes = run.args, run.data, run.settings.world_size
    in_a_step = args.batch_size * args.gradient_accumulation * processes
    rows = {
        "corpus": f"{_files(args, data)}: {len(data.all.documents) - 1:,} documents, "
        f"{len(data.all):,} tokens{_from_cache('tokens', args, data)}",
        **before,
        "training": f"steps {run.done + 1:,} to {args.steps:,}, {in_a_step:,} {samples} "
        f"{args.block_size} tokens each"
        if run.done < args.steps
        else f"all {run.done:,} steps are done",
        **after,
        "precision": _precision(args, run.settings),
        "device": f"{_device(run.settings)}, {processes} process{'es' if processes > 1 else ''}",
        "backends": _backends_here(run.settings.device),
        "results": f"{args.out} (a checkpoint each {args.save_every:,} steps, {_kept(args)})",
    }
    return block(rows)


def pretraining(run: Pretraining) -> str:
    """The lines that a pre-training prints first."""
    args, data = run.args, run.data
    held_out = len(data.all) - len(data.store)
    if data.held_out is None:
        tail = nothing_held_out(args, data)
    else:
        samples = len(data.held_out)  # type: ignore[arg-type]
        share = held_out / len(data.all)
        tail = f"the last {held_out:,} tokens ({share:.1%}), judged by {samples:,} samples of them"
    model = model_line(args, data, run.trainer.model)
    before = {"held out": tail, "vocabulary": vocabulary(args, data), "model": model}
    if args.start_from is not None:
        before["begun with"] = _begun(args, run.trainer.model)
    if args.short_block_size is not None:
        kind = "short pairs" if "+" in str(args.objective) else "pieces of blocks"
        pieces = f"{kind}, {args.short_block_size} tokens each"
        steps = " and ".join(f"{len(part):,}" for part in args.short_steps)
        of = " of the two stages" if args.two_stage else ""
        before["short blocks"] = f"the first {steps} steps{of} are of {pieces}"
    if args.flops is not None:
        before["budget"] = budget(args, data)
    return rows_of_run(run, before, {"learning rate": learning_rate(args), **_pairs(data)})


def _kept(args: Any) -> str:
    """How many checkpoints a run keeps."""
    kept = args.keep_checkpoints
    return "of which all are kept" if kept == "all" else f"of which the last {kept} are kept"


def _begun(args: PretrainPlan, model: Any) -> str:
    """Where the weights come from, and which are new."""
    new = model.new_weights
    what = f"; {counted(len(new), 'weight')} of new heads, such as {new[0]}" if new else ""
    return f"the weights of {args.start_from}{what}"


def budget(args: PretrainPlan, data: RunData) -> str:
    """The budget, and what it pays for."""
    from fastplm.pretrain.model import flops_a_step

    return described(args, flops_a_step(args, data.tokenizer))


def nothing_held_out(args: PretrainPlan, data: RunData) -> str:
    """Why there is no held-out text."""
    from fastplm.pretrain.data import HELD_OUT
    from fastplm.pretrain.objectives import objective_of

    objective = objective_of(args)(args, data.tokenizer)
    rest, tail = data.all.split(HELD_OUT)
    last = objective.lacks(tail)
    which = f"the last {HELD_OUT:.0%}" if last else "what would be left"
    return f"nothing: {which} of this corpus has {last or objective.lacks(rest)}"


def model_line(args: PretrainPlan, data: RunData, model: PreTrainedModel) -> str:
    """The size of a model, and what a token costs."""
    from fastplm.pretrain.objectives import objective_of

    size = f"{sum(weight.numel() for weight in model.parameters()):,}"
    flops = objective_of(args)(args, data.tokenizer).flops_a_token(model.config)
    return (
        f"{args.arch} ({args.preset.source or 'a size of its own'}), {args.objective}: {size} "
        f"parameters, {flops / 1e6:,.1f} MFLOP a token (forward and backward of full samples)"
    )


def _pairs(data: RunData) -> dict[str, str]:
    """A row about runs that cannot be cut into two segments, if there are any."""
    found: dict[str, Any] = {"pairs": data.samples}
    if isinstance(data.samples, ShortPairs):
        found = {"short pairs": data.samples.pairs, "pairs": data.samples.whole}
    rows = {}
    for name, pairs in found.items():
        if isinstance(pairs, NextSentencePairs) and pairs.chunks.lone:
            share = pairs.chunks.lone
            fix = "; for so many train without pairs (--no-nsp)" if share > _MANY else ""
            rows[name] = f"{share:.0%} are of one sentence, whose next one is always random{fix}"
    return rows


def vocabulary(args: PretrainPlan, data: RunData) -> str:
    """The tokens of a vocabulary, and whether the corpus was too small for those asked for."""
    size = len(data.tokenizer)
    trained = args.tokenizer is None and args.start_from is None
    few = f" instead of {args.vocab_size or 0:,}, as this text gives no more"
    missing = few if trained and size < (args.vocab_size or 0) else ""
    return f"{size:,} tokens{missing}{_from_cache('vocabulary', args, data)}"


def learning_rate(args: PretrainPlan) -> str:
    """The peak, and how it follows from a published one; and whether the run is too short for it.

    A step of Adam or LAMB moves a weight by the rate at most, about. Where all steps together move
    it by less than a tenth of the spread that it begins with, little is learned.
    """
    peak, samples = args.peak, args.samples_a_step
    if peak is None:
        return f"{args.lr:.3g} with {args.optimizer}, as given"
    scaled = f", times sqrt({samples:,} / {peak.samples:,})" if samples != peak.samples else ""
    what = f"{peak.rate:.3g} for {peak.samples:,} samples a step ({peak.source}){scaled}"
    assert args.lr is not None
    spread = args.preset.initializer_range
    moved = args.lr * args.steps / 2  # a line up and a line down
    if args.optimizer == "adamw" and moved < spread / 10:
        lr = min(_LARGEST_RATE, 2 * spread / args.steps)
        what += (
            f". In a run this short it moves weights by {moved:.1g} at most, of {spread:g} at the "
            f"start: little is learned. To see the loss fall, give --lr {lr:.1g}"
        )
    return f"{args.lr:.3g} with {args.optimizer}: {what}"


def _files(args: PretrainPlan, data: RunData) -> str:
    if not isinstance(data.documents, TextFiles):
        return ", ".join(map(str, args.corpus))
    names = [str(path) for path, *_ in data.documents.files]
    more = len(names) - _NAMED_FILES
    return ", ".join(names[:_NAMED_FILES]) + (f" and {more:,} more files" if more > 0 else "")


def _from_cache(what: str, args: PretrainPlan, data: RunData) -> str:
    return f" (found in {args.cache})" if what in data.cached else ""


def _precision(args: PretrainPlan, training_arguments: TrainingArguments) -> str:
    name = "bf16" if training_arguments.bf16 else "fp32"
    if args.precision != "auto":
        return f"{name}, as --precision says"
    return f"{name}: this hardware {'multiplies' if training_arguments.bf16 else 'has no'} bf16"


def _device(training_arguments: TrainingArguments) -> str:
    device = training_arguments.device
    if device.type == "cuda":
        return device_label(device)
    return f"{device} ({platform.machine()}), {counted(torch.get_num_threads(), 'thread')}"


def _backends_here(device: torch.device) -> str:
    requested = _backends.requested("")
    missing = _extension._MISSING
    if device.type == "cuda":
        missing = _extension._CUDA_MISSING
        there = ["triton"] if _backends.triton_installed() else []
        there += ["cuda"] if missing is None else []
    else:
        there = ["cpp", "torch"] if missing is None else ["torch"]
    why = f"; without csrc/, whose code {missing}" if missing is not None else ""
    return f"{requested}, of {', '.join([*there, 'eager'])}{why} (fastplm info has all)"
