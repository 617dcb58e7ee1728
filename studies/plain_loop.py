"""A pre-training by fastplm, and the same one by Transformers' class in a plain loop.

    python studies/plain_loop.py --rows FILE -- --arch bert-tiny --objective mlm --steps 300 …

After ``--`` come the options of ``fastplm pretrain``, with an objective of masked words or of the
next word. Both start from the same weights and see the same batches in the same order: those that
fastplm's collator makes. The loop is AdamW with the same groups, schedule, clipping and autocast.
Without dropout both have one loss curve, but for rounding; with it they draw other numbers.

The row has both mean losses of the last tenth of the steps, the largest difference of a step, the
seconds of CPU time of each, and their ratio. CPU time hardly depends on what else runs.
"""

from __future__ import annotations

import argparse
import copy
import operator
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from fastplm.pretrain.run import build, read
from fastplm.pretrain.settings import PretrainArguments
from fastplm.pretrain.stream import training_settings
from fastplm.run.options import add_settings
from fastplm.run.threads import using_threads

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
from harness import append_row, machine_line

FIELDS = (
    *("date", "machine", "torch", "triton", "commit"),
    *("options", "steps", "precision", "loss", "loss_plain", "largest_difference"),
    *("cpu_s", "cpu_s_plain", "ratio"),
)


class Losses(transformers.TrainerCallback):
    """The loss of each step, and the CPU time of all but the first ones."""

    def __init__(self, skip: int) -> None:
        self.skip, self.losses, self.seconds = skip, [], 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.skip:
            self.seconds = -time.process_time()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.seconds += time.process_time()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if logs and "loss" in logs:
            self.losses.append(logs["loss"])


def plain(model: nn.Module, batches: list[dict], trainer: Any, skip: int) -> tuple[list, float]:
    """Train Transformers' model: the losses of all steps, and the CPU time after the first ones."""
    settings, decays = trainer.args, set(trainer.get_decay_parameter_names(model))
    named = list(model.named_parameters())
    groups = [
        {"params": [p for n, p in named if n in decays], "weight_decay": settings.weight_decay},
        {"params": [p for n, p in named if n not in decays], "weight_decay": 0.0},
    ]
    betas = (settings.adam_beta1, settings.adam_beta2)
    optimizer = torch.optim.AdamW(
        groups, lr=settings.learning_rate, betas=betas, eps=settings.adam_epsilon
    )
    schedule = transformers.get_linear_schedule_with_warmup(
        optimizer, settings.warmup_steps, len(batches)
    )
    losses, seconds = [], 0.0
    model.train()
    for step, batch in enumerate(batches):
        if step == skip:
            seconds = -time.process_time()
        with torch.autocast("cpu", torch.bfloat16, enabled=settings.bf16):
            loss = model(**batch).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), settings.max_grad_norm)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, seconds + time.process_time()


def compare(args: PretrainArguments, skip: int) -> dict[str, Any]:
    plan, listener = args.plan(), Losses(skip)
    settings = training_settings(plan)
    plan, data = read(plan, settings, None)
    training = build(plan, settings, data, listener)
    trainer, collator = training.trainer, training.collator
    ours: Any = trainer.model
    theirs = getattr(transformers, type(ours).__name__)(copy.deepcopy(ours.config))
    theirs.load_state_dict(ours.state_dict())
    wanted = ("input_ids", "attention_mask", "token_type_ids", "labels")
    batches = []
    for padded in trainer.get_train_dataloader():
        batch = padded if "labels" in padded else collator.corrupt(dict(padded))
        batches.append({name: batch[name] for name in wanted if batch.get(name) is not None})
    trainer.train()
    losses, seconds = plain(theirs, batches, trainer, skip)
    last = max(len(losses) // 10, 1)
    return {
        "steps": len(losses),
        "precision": "bf16" if trainer.args.bf16 else "fp32",
        "loss": f"{sum(listener.losses[-last:]) / last:.4f}",
        "loss_plain": f"{sum(losses[-last:]) / last:.4f}",
        "largest_difference": f"{max(map(abs, map(operator.sub, listener.losses, losses))):.4f}",
        "cpu_s": f"{listener.seconds:.1f}",
        "cpu_s_plain": f"{seconds:.1f}",
        "ratio": f"{seconds / listener.seconds:.2f}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=Path, required=True, help="CSV file that the row goes to")
    parser.add_argument(
        "--skip", type=int, default=10, help="first steps whose time does not count"
    )
    parser.add_argument("options", nargs="+", help="after --: options of fastplm pretrain")
    own = parser.parse_args()
    with tempfile.TemporaryDirectory() as out:
        pretrain = argparse.ArgumentParser("fastplm pretrain")
        add_settings(pretrain, PretrainArguments)
        options = [*own.options, "--log-every", "1", "--report-to", "none", "--out", out]
        args = PretrainArguments(**vars(pretrain.parse_args(options)))
        with using_threads(args.threads):
            row = compare(args, own.skip)
    row = machine_line() | {"options": " ".join(Path(word).name for word in own.options)} | row
    append_row(own.rows, FIELDS, row)
    print(row)


if __name__ == "__main__":
    sys.exit(main())
