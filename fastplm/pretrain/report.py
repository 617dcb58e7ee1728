"""What a run over text prints before its first step and at its end, and its picture."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fastplm import _backends, _extension
from fastplm._machine import device_label
from fastplm.data import NextSentencePairs, TextFiles
from fastplm.pretrain.blocks import ShortPairs
from fastplm.pretrain.model import flops_a_step
from fastplm.pretrain.objectives import Objective
from fastplm.run.budget import described
from fastplm.run.report import block, counted, drawn, precision

if TYPE_CHECKING:
    from transformers import TrainingArguments

    from fastplm.pretrain.data import RunData
    from fastplm.pretrain.settings import PretrainPlan
    from fastplm.pretrain.stream import Training

_NAMED_FILES = 3
# The most that is advised: the peak rate of fastplm's own small sizes.
_LARGEST_RATE = 1e-3
# The share of lone sentences from which on next sentences are hardly learned.
_MANY = 0.5


def announcement(
    plan: Any, settings: TrainingArguments, data: RunData, training: Training, done: int
) -> str:
    """What a run over text prints, of which so many steps are done."""
    processes, kept = settings.world_size, plan.keep_checkpoints
    of_them = "all" if kept == "all" else f"the last {kept}"
    some = f"{plan.samples_a_step:,} samples of {'at most ' if training.at_most else ''}"
    some += f"{plan.block_size} tokens each"
    return block(
        {
            "corpus": f"{_files(plan, data)}: {len(data.all.documents) - 1:,} documents, "
            f"{len(data.all):,} tokens{_from_cache('tokens', plan, data)}",
            **training.rows,
            "training": f"steps {done + 1:,} to {plan.steps:,}, {some}"
            if done < plan.steps
            else f"all {done:,} steps are done",
            **training.rows_of_learning,
            "precision": precision(plan),
            "device": f"{device(settings)}, {processes} process{'es' if processes > 1 else ''}",
            "backends": _backends_here(settings.device),
            "results": f"{plan.out} (a checkpoint each {plan.save_every:,} steps, of which "
            f"{of_them} are kept)",
        }
    )


def rows_of_model(
    plan: PretrainPlan, data: RunData, model: Any, objective: Objective
) -> dict[str, str]:
    """The lines of a pre-training about its data and its model."""
    tail = f"nothing: {data.too_short}"
    if data.held_out is not None:
        count, share = data.held_out_tokens, data.held_out_tokens / len(data.all)
        tail = f"the last {count:,} tokens ({share:.1%}), judged by "
        tail += f"{data.held_out_samples:,} samples of them"
    size = f"{sum(weight.numel() for weight in model.parameters()):,}"
    flops = f"{objective.flops_a_token(model.config) / 1e6:,.1f}"
    rows = {
        "held out": tail,
        "vocabulary": vocabulary(plan, data),
        "model": f"{plan.arch} ({plan.preset.source or 'a size of its own'}), {plan.objective}: "
        f"{size} parameters, {flops} MFLOP a token (forward and backward of full samples)",
    }
    if plan.start_from is not None:
        new = model.new_weights
        what = f"; {counted(len(new), 'weight')} of new heads, such as {new[0]}" if new else ""
        rows["begun with"] = f"the weights of {plan.start_from}{what}"
    if plan.short_block_size is not None:
        kind = "short pairs" if objective.has_pairs else "pieces of blocks"
        pieces = f"{kind}, {plan.short_block_size} tokens each"
        steps = " and ".join(f"{len(part):,}" for part in plan.short_steps)
        of = " of the two stages" if plan.two_stage else ""
        rows["short blocks"] = f"the first {steps} steps{of} are of {pieces}"
    if plan.flops is not None:
        rows["budget"] = described(plan, flops_a_step(plan, data.tokenizer))
    return rows


def pairs(data: RunData) -> dict[str, str]:
    """A row about runs that cannot be cut into two segments, if there are any."""
    found: dict[str, Any] = {"pairs": data.samples}
    if isinstance(data.samples, ShortPairs):
        found = {"short pairs": data.samples.pairs, "pairs": data.samples.whole}
    rows = {}
    for name, each in found.items():
        if isinstance(each, NextSentencePairs) and each.chunks.lone:
            share = each.chunks.lone
            fix = "; for so many train without pairs (--no-nsp)" if share > _MANY else ""
            rows[name] = f"{share:.0%} are of one sentence, whose next one is always random{fix}"
    return rows


def vocabulary(plan: PretrainPlan, data: RunData) -> str:
    """The tokens of a vocabulary, and whether the corpus was too small for those asked for."""
    size = len(data.tokenizer)
    trained = plan.tokenizer is None and plan.start_from is None
    few = f" instead of {plan.vocab_size or 0:,}, as this text gives no more"
    missing = few if trained and size < (plan.vocab_size or 0) else ""
    return f"{size:,} tokens{missing}{_from_cache('vocabulary', plan, data)}"


def learning_rate(plan: PretrainPlan) -> str:
    """The peak, and how it follows from a published one; and whether the run is too short for it.

    A step of Adam or LAMB moves a weight by the rate at most, about. Where all steps together move
    it by less than a tenth of the spread that it begins with, little is learned.
    """
    peak, samples = plan.peak, plan.samples_a_step
    if peak is None:
        return f"{plan.lr:.3g} with {plan.optimizer}, as given"
    scaled = f", times sqrt({samples:,} / {peak.samples:,})" if samples != peak.samples else ""
    what = f"{peak.rate:.3g} for {peak.samples:,} samples a step ({peak.source}){scaled}"
    assert plan.lr is not None
    spread = plan.preset.initializer_range
    moved = plan.lr * plan.steps / 2  # a line up and a line down
    if plan.optimizer == "adamw" and moved < spread / 10:
        lr = min(_LARGEST_RATE, 2 * spread / plan.steps)
        what += (
            f". In a run this short it moves weights by {moved:.1g} at most, of {spread:g} at the "
            f"start: little is learned. To see the loss fall, give --lr {lr:.1g}"
        )
    return f"{plan.lr:.3g} with {plan.optimizer}: {what}"


def _files(plan: PretrainPlan, data: RunData) -> str:
    if not isinstance(data.documents, TextFiles):
        return ", ".join(map(str, plan.corpus))
    names = [str(path) for path, *_ in data.documents.files]
    more = len(names) - _NAMED_FILES
    return ", ".join(names[:_NAMED_FILES]) + (f" and {more:,} more files" if more > 0 else "")


def _from_cache(what: str, plan: PretrainPlan, data: RunData) -> str:
    return f" (found in {plan.cache})" if what in data.cached else ""


def device(training_arguments: TrainingArguments) -> str:
    there = training_arguments.device
    if there.type == "cuda":
        return device_label(there)
    return f"{there} ({platform.machine()}), {counted(torch.get_num_threads(), 'thread')}"


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


# --- the results ----------------------------------------------------------------------------------

#: Figures by their names, of growing steps.
Curve = list[dict[str, float]]
#: How a summary calls the figures of ``evaluate.detection_at_base_rate``, and what they are.
_BY_SHARE = "by share"
_WHAT_BY_SHARE = (
    "only tokens that may be replaced, found if their probability is above the share replaced; the "
    "other figures are of all tokens, found if it is above 0.5"
)


def numbers_of(held_out: Mapping[str, Any], start: str = "") -> dict[str, float]:
    """The numbers of nested dicts, with names such as ``words_precision``."""
    found: dict[str, float] = {}
    for name, value in held_out.items():
        if isinstance(value, Mapping):
            found |= numbers_of(value, f"{start}{name}_")
        elif isinstance(value, int | float):
            found[f"{start}{name}"] = value
    return found


def plot_losses(
    path: Path,
    title: str,
    history: Curve,
    held_out: Curve,
    token_loss: str | None,
    beside: Sequence[str] = (),
) -> bool:
    """One panel for the loss, or one for each part where it has parts; held-out text as points.

    The ``token_loss`` of held-out text is beside the whole loss if that has no parts; and beside
    it are the losses ``beside``, such as those of a unigram and a bigram. Returns whether the
    picture was drawn.
    """

    def draw() -> None:
        from matplotlib.figure import Figure

        names = sorted({name for entry in history for name in entry if name.endswith("_loss")})
        names = names or ["loss"]
        figure = Figure(figsize=(5.5 * len(names), 4), layout="constrained")
        axes = figure.subplots(1, len(names), squeeze=False)
        for name, axis in zip(names, axes[0], strict=True):
            same = token_loss if name == "loss" else name
            axis.plot(*_points(history, name), label="training")
            if held_out and same in held_out[-1]:
                axis.plot(*_points(held_out, same), "o-", label="held out")
                losses = beside if same == token_loss else ()
                for each, style in zip(losses, (":", "--"), strict=False):
                    label = f"held out, {each.removesuffix('_loss')}"
                    axis.axhline(held_out[-1][each], color="grey", linestyle=style, label=label)
                axis.legend()
            axis.set_title(name.replace("_", " "))
            axis.set_xlabel("step")
            axis.grid(alpha=0.3)
        axes[0][0].set_ylabel("nats")
        figure.suptitle(title)
        figure.savefig(path, dpi=120)

    if drawn(path, draw):
        return True
    path.unlink(missing_ok=True)
    return False


def _points(entries: Curve, name: str) -> tuple[list[float], list[float]]:
    """The steps and the figures of the entries that have this figure."""
    having = [entry for entry in entries if name in entry]
    return [entry["step"] for entry in having], [entry[name] for entry in having]


def write_cards(plan: Any, data: RunData, training: Training, metrics: dict[str, Any]) -> None:
    """Write the model card of each model that a run over text has saved."""
    from fastplm.run.card import FACTS, write_card

    if hasattr(plan, "recipe"):  # of a distillation
        base = plan.teacher
        how = f"by the recipe `{plan.recipe}` with the teacher `{plan.given['teacher']}`"
    else:
        base, begun = plan.start_from, "random weights"
        if base is not None:
            begun = f"the weights of `{plan.given['start_from']}`"
        how = f"from {begun}, with the objective `{plan.objective}`,"
    files = _files(plan, data)
    most = "at most " if training.at_most else ""
    trained = (
        f"Trained {how} on {files} ({len(data.all.documents) - 1:,} documents, "
        f"{len(data.all):,} tokens): {plan.steps:,} steps of {plan.samples_a_step:,} samples of "
        f"{most}{plan.block_size} tokens."
    )
    scores = numbers_of(metrics.get("held_out", {}))
    scores.pop("samples", None)
    for name, model in training.models.items():
        write_card(
            Path(plan.out) / name,
            plan,
            model,
            trained=trained,
            data=[str(path) for path in plan.corpus],
            base=base,
            scores=scores,
            scored=f"the last {data.held_out_tokens:,} tokens of {files}",
            facts={name: metrics[name] for name in FACTS}
            | {"training loss": metrics["history"][-1]["loss"]},
        )


def summary(metrics: dict[str, Any]) -> str:
    """The result of a run as a table for the terminal."""
    history = metrics["history"]
    rows = []
    for name in (name for name in history[-1] if name.endswith("loss")):
        first = next(entry[name] for entry in history if name in entry)
        rows.append((name.replace("_", " "), f"{first:.4f} -> {history[-1][name]:.4f}"))
    held_out = dict(metrics.get("held_out", {}))
    by_share = held_out.pop("words", {})
    for title, values in (("held out", held_out), (f"held out, {_BY_SHARE}", by_share)):
        for name, value in values.items():
            shown = f"{value:.4f}" if isinstance(value, float) else str(value)
            rows.append((f"{title}: {name.replace('_', ' ')}", shown))
    if by_share:
        rows.append((f"({_BY_SHARE}", f"{_WHAT_BY_SHARE})"))
    rows += [
        ("parameters", f"{metrics['parameters']:,}"),
        ("precision", metrics["precision"]),
        ("tokens/s", f"{metrics['tokens_per_second']:,.0f}{_of_all(metrics)}"),
        ("training time", f"{metrics['train_seconds']:.1f} s{_of_all(metrics)}"),
        *metrics["models"].items(),
        ("picture", metrics["picture"] or "none was drawn"),
    ]
    return block(dict(rows))


def _of_all(metrics: dict[str, Any]) -> str:
    """Says of a resumed run that a figure is of all its steps."""
    resumed = ", ".join(f"{step:,}" for step in metrics.get("starts", []) if step)
    return f" (all steps; resumed at {resumed})" if resumed else ""
