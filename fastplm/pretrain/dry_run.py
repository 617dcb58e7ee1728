"""What a pre-training would cost, from a few real steps on this machine; nothing is left behind."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from fastplm._machine import peak_bytes
from fastplm.data._folder import first_process
from fastplm.pretrain.settings import PretrainArguments, PretrainPlan
from fastplm.run.report import block, precision
from fastplm.run.threads import computing

# Letters of the text that are read: enough for any published vocabulary, and soon tokenized.
_LETTERS = 1 << 23
_STEPS = 1000
# Seconds after which the steps that warm up are enough, however few they are.
_PATIENCE = 30.0


def dry_run(args: PretrainArguments) -> dict[str, Any]:
    """Take some steps of a run in a temporary folder, and say what all of them will need.

    The vocabulary is trained on the first 8 million letters of the text, and the tokens of the
    rest are estimated from theirs. ``--out`` and ``--cache`` are neither read nor written.

    Returns:
        The figures: ``parameters``, ``flops_per_token``, ``flops`` of the whole run, ``tokens`` of
        it, ``corpus_tokens`` (estimated), ``memory_bytes`` and its parts, ``seconds_per_step``,
        ``tokens_per_second``, ``seconds`` of the whole run; and ``rows``, the same as text. Under
        torchrun the first process has them.
    """
    plan = args.plan().with_models()
    with (
        tempfile.TemporaryDirectory(prefix="fastplm-dry-run-") as folder,
        computing(plan.threads, huge_pages=True),  # as the run itself
    ):
        return _dry_run(plan, Path(folder))


def summary(figures: dict[str, Any]) -> str:
    """The figures as a table for the terminal."""
    return block(figures["rows"])


def _dry_run(plan: PretrainPlan, folder: Path) -> dict[str, Any]:
    from fastplm.pretrain import report
    from fastplm.pretrain import run as pretrain
    from fastplm.pretrain.data import open_corpus
    from fastplm.pretrain.model import flops_a_step
    from fastplm.pretrain.objectives import objective_of

    text, letters = _beginning(open_corpus(plan.corpus))
    changes: dict[str, Any] = {"flops": None, "save_every": 1 << 40, "dry_run": False}
    changes |= {"out": folder / "out", "cache": folder / "cache"}
    rehearsed = plan.changed(**changes).with_steps(max(plan.steps or 0, _STEPS))
    # The stages of a training have equal shares of its steps, and a time each.
    rehearsals = [
        pretrain.rehearse(rehearsed, text, patience=_PATIENCE, second_stage=second)
        for second in ((False, True) if plan.two_stage else (False,))
    ]
    trainer, data = rehearsals[-1].trainer, rehearsals[-1].data
    a_step_takes = sum(each.seconds for each in rehearsals) / len(rehearsals)
    if plan.steps is None:
        plan = plan.with_flops(flops_a_step(plan, data.tokenizer))
    objective = objective_of(plan, data.tokenizer)
    flops = objective.flops_a_token(trainer.model.config)
    a_step = objective.tokens_of(plan.samples_a_step)
    tokens = plan.steps * a_step
    seconds = a_step_takes * plan.steps
    scale = letters / sum(map(len, text))
    corpus_tokens = round(scale * len(data.all))
    memory = max((_memory(each.trainer) for each in rehearsals), key=lambda m: m["memory_bytes"])
    figures = {
        "steps": plan.steps,
        "parameters": sum(weight.numel() for weight in trainer.model.parameters()),
        "vocab_size": len(data.tokenizer),
        "learning_rate": plan.lr,
        "flops_per_token": flops,
        "flops": flops * tokens,
        "tokens": tokens,
        "corpus_tokens": corpus_tokens,
        **memory,
        "seconds_per_step": a_step_takes,
        "tokens_per_second": a_step / a_step_takes,
        "seconds": seconds,
    }
    timed = " and of ".join(str(each.timed) for each in rehearsals)
    epochs = plan.steps * plan.samples_a_step * plan.block_size / max(corpus_tokens, 1)
    about = "about " if scale > 1 else ""
    rows = report.rows_of_model(plan, data, trainer.model, objective)
    figures["rows"] = {
        "model": rows["model"],
        "corpus": f"{about}{corpus_tokens:,} tokens"
        + (f", estimated from the first {sum(map(len, text)):,} letters" if scale > 1 else ""),
        "vocabulary": rows["vocabulary"].partition(" (found")[0],
        "training": f"{plan.steps:,} steps of {a_step:,.0f} tokens "
        f"({plan.samples_a_step:,} samples): {tokens:,.0f} tokens, "
        f"the text {epochs:,.{1 if epochs < 10 else 0}f} times",
        "learning rate": report.learning_rate(plan),
        "FLOPs": f"{flops * tokens:.3g}",
        **({} if plan.flops is None else {"budget": rows["budget"]}),
        "memory": _bytes_of(memory),
        "precision": precision(plan),
        "device": report.device(trainer.args),
        "speed": f"{_duration(a_step_takes)} a step (median of {timed}), "
        f"{figures['tokens_per_second']:,.0f} tokens/s, "
        f"{flops * figures['tokens_per_second'] / 1e9:,.1f} GFLOP/s",
        "time": f"{_duration(seconds)} at this speed, without checkpoints",
        **({} if plan.seeds == 1 else {"seeds": f"{plan.seeds} runs; the figures are of one"}),
        "written": "nothing",
    }
    return figures if first_process() else {}


def _beginning(documents: Iterable[str]) -> tuple[list[str], int]:
    """The first documents, and the letters of all of them."""
    text: list[str] = []
    taken = letters = 0
    for document in documents:
        if taken < _LETTERS:
            text.append(document)
            taken += len(document)
        letters += len(document)
    return text, letters


def _memory(trainer: Any) -> dict[str, int]:
    """The bytes of tensors: what stays, and the most that a micro-batch needs beyond it."""
    weights = sum(weight.numel() * weight.element_size() for weight in trainer.model.parameters())
    states = (value for each in trainer.optimizer.state.values() for value in each.values())
    tensors = (value for value in states if isinstance(value, torch.Tensor))
    state = sum(value.numel() * value.element_size() for value in tensors)
    trainer.optimizer.zero_grad(set_to_none=True)
    batches = iter(trainer.get_train_dataloader())
    (batch,), labels = trainer.get_batch_samples(batches, 1, trainer.args.device)
    device = trainer.args.device
    trainer._in_window.clear()  # tensors that the step would release, and nobody counted
    trainer.found, trainer.graphs = {}, False  # a replay allocates nothing
    step = peak_bytes(lambda: trainer.training_step(trainer.model, batch, labels), device)
    parts = {"weights_bytes": weights, "optimizer_bytes": state, "micro_batch_bytes": step}
    return parts | {"memory_bytes": sum(parts.values())}


def _amount(value: float, units: dict[str, float]) -> str:
    """A number in the largest of these units of which it has one at least, with three digits."""
    fitting = [name for name, size in units.items() if value >= size]
    name = fitting[-1] if fitting else next(iter(units))
    number = value / units[name]
    return f"{number:,.{0 if number >= 99.95 else 1 if number >= 9.995 else 2}f} {name}"


def _duration(seconds: float) -> str:
    return _amount(seconds, {"ms": 1e-3, "s": 1, "minutes": 60, "hours": 3600, "days": 86400})


def _bytes(count: int) -> str:
    return _amount(count, {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40})


def _bytes_of(memory: dict[str, int]) -> str:
    def shown(name: str) -> str:
        return _bytes(memory[name])

    return (
        f"{shown('memory_bytes')} of tensors: weights {shown('weights_bytes')}, optimizer "
        f"{shown('optimizer_bytes')}, gradients and activations {shown('micro_batch_bytes')}"
    )
