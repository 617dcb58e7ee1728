"""What a run prints before its first step."""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fastplm import _backends, _extension
from fastplm.data import TextFiles
from fastplm.train.report import block

if TYPE_CHECKING:
    from transformers import PreTrainedModel, TrainingArguments

    from fastplm.train.arguments import PretrainArguments
    from fastplm.train.pretrain_data import RunData

_NAMED_FILES = 3


def pretraining(
    args: PretrainArguments,
    data: RunData,
    model: PreTrainedModel,
    training_arguments: TrainingArguments,
    done: int,
) -> str:
    """The lines that a pre-training prints first."""
    from fastplm.train.pretrain_data import HELD_OUT

    held_out = len(data.all) - len(data.store)
    if data.held_out is None:
        tail = f"nothing, as {HELD_OUT:.0%} of this corpus is too little for samples"
    else:
        samples = len(data.held_out)  # type: ignore[arg-type]
        share = held_out / len(data.all)
        tail = f"the last {held_out:,} tokens ({share:.1%}), judged by {samples:,} samples of them"
    sizes = f"{sum(weight.numel() for weight in model.parameters()):,}"
    processes = training_arguments.world_size
    samples_a_step = args.batch_size * args.gradient_accumulation * processes
    rows = {
        "corpus": f"{_files(args, data)}: {len(data.all.documents) - 1:,} documents, "
        f"{len(data.all):,} tokens{_from_cache('tokens', args, data)}",
        "held out": tail,
        "vocabulary": f"{len(data.tokenizer):,} tokens{_from_cache('vocabulary', args, data)}",
        "model": f"{args.arch}, {args.objective}: {sizes} parameters, about "
        f"{flops_a_token(model, args.block_size) / 1e6:,.1f} MFLOP a token (6 N + 12 layers width "
        "length; N without embeddings and vocabulary head)",
        "training": f"steps {done + 1:,} to {args.steps:,}, {samples_a_step:,} samples of "
        f"{args.block_size} tokens each"
        if done < args.steps
        else f"all {done:,} steps are done",
        "precision": _precision(args, training_arguments),
        "device": f"{_device(training_arguments)}, {processes} process"
        f"{'es' if processes > 1 else ''}",
        "backends": _backends_here(training_arguments.device),
        "results": f"{args.out} (a checkpoint each {args.save_every:,} steps)",
    }
    return block(rows)


def flops_a_token(model: nn.Module, length: int) -> float:
    """Forward and backward of one token, without the heads over the vocabulary.

    ``6 N + 12 layers width length``: each weight takes part in a product of the forward and in two
    of the backward, of two operations each; so does attention, whose scores and sums have ``2 width
    length`` products a layer.

    Source: Kaplan et al. 2020 (arXiv 2001.08361), §2.1.
    """
    parts = [getattr(model, name, None) for name in ("generator", "discriminator")]
    models: list[Any] = [part for part in parts if part is not None] or [model]
    total = 0.0
    for part in models:
        config = part.config
        layers = config.num_hidden_layers + (getattr(config, "decoder_layers", 0) or 0)
        looked_up = {
            id(module.weight) for module in part.modules() if isinstance(module, nn.Embedding)
        }
        used = layers / getattr(config, "num_hidden_groups", layers)  # of ALBERT's shared layers
        for name, weight in part.named_parameters():
            if id(weight) not in looked_up and weight.dim() > 1:
                total += 6 * weight.numel() * (used if "layer_groups" in name else 1)
        total += 12 * layers * config.hidden_size * length
    return total


def _files(args: PretrainArguments, data: RunData) -> str:
    if not isinstance(data.documents, TextFiles):
        return ", ".join(map(str, args.corpus))
    names = [str(path) for path, *_ in data.documents.files]
    more = len(names) - _NAMED_FILES
    return ", ".join(names[:_NAMED_FILES]) + (f" and {more:,} more files" if more > 0 else "")


def _from_cache(what: str, args: PretrainArguments, data: RunData) -> str:
    return f" (found in {args.cache})" if what in data.cached else ""


def distilling(
    args: Any, data: RunData, model: Any, training_arguments: TrainingArguments, done: int
) -> str:
    """The lines that a distillation prints first; ``model`` is a ``Distillation``."""
    held_out = 0 if data.held_out is None else len(data.held_out)  # type: ignore[arg-type]
    processes = training_arguments.world_size
    samples = args.batch_size * args.gradient_accumulation * processes
    rows = {
        "corpus": f"{_files(args, data)}: {len(data.all.documents) - 1:,} documents, "
        f"{len(data.all):,} tokens{_from_cache('tokens', args, data)}",
        "held out": f"{held_out:,} samples of the last {len(data.all) - len(data.store):,} tokens",
        "vocabulary": f"{len(data.tokenizer):,} tokens",
        "teacher": f"{args.teacher}: {_size(model.teacher)}",
        "student": _size(model.student),
        "recipe": args.recipe,
        "training": f"steps {done + 1:,} to {args.steps:,}, {samples:,} samples of at most "
        f"{args.block_size} tokens each"
        if done < args.steps
        else f"all {done:,} steps are done",
        "precision": _precision(args, training_arguments),
        "device": f"{_device(training_arguments)}, {processes} process"
        f"{'es' if processes > 1 else ''}",
        "backends": _backends_here(training_arguments.device),
        "results": f"{args.out} (a checkpoint each {args.save_every:,} steps)",
    }
    return block(rows)


def _size(model: Any) -> str:
    config, count = model.config, sum(weight.numel() for weight in model.parameters())
    return (
        f"{type(model).__name__}, {config.num_hidden_layers} layers, width {config.hidden_size}, "
        f"{config.num_attention_heads} heads: {count:,} parameters"
    )


def _precision(args: PretrainArguments, training_arguments: TrainingArguments) -> str:
    name = "bf16" if training_arguments.bf16 else "fp32"
    if args.precision != "auto":
        return f"{name}, as --precision says"
    return f"{name}: this hardware {'multiplies' if training_arguments.bf16 else 'has no'} bf16"


def _device(training_arguments: TrainingArguments) -> str:
    device = training_arguments.device
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    return f"{device} ({platform.machine()}), {torch.get_num_threads()} threads"


def _backends_here(device: torch.device) -> str:
    requested = _backends.requested("")
    missing = _extension._MISSING
    if device.type == "cuda":
        there = ["triton"] if _backends.triton_installed() else []
        there += ["cuda"] if missing is None else []
    else:
        there = ["cpp", "torch"] if missing is None else ["torch"]
    why = f"; without csrc/: {missing}" if missing is not None else ""
    return f"{requested}, of {', '.join([*there, 'eager'])}{why} (fastplm info has all)"
