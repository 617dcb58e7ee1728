"""Does a T5 that is fine-tuned learn to read its source? By optimizer and rate.

    python studies/t5_rates.py RUN --source FILE --target FILE --rows ROWS

RUN is the folder of a pre-training by ``fastplm pretrain --arch t5-…``. Its model is trained on
pairs of lines. A row has the loss of held-out pairs, and that with the sources of other pairs: a
model that does not read has the same of both. "relative" is AdamW whose rate for each weight is a
share of that weight's RMS at the start, as Adafactor's is of its RMS at each step.
"""

from __future__ import annotations

import argparse
import gzip
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers
from torch import Tensor

from fastplm.models import T5ForConditionalGeneration
from fastplm.run.optimizer import Adafactor

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
from harness import append_row, machine_line

FIELDS = ("date", "machine", "torch", "triton", "commit", "optimizer", "rate", "steps", "seed")
FIELDS += ("held_out", "other_sources", "gap")
TRIED = (
    *(("adamw", rate) for rate in (1e-3, 3e-3, 1e-2)),
    *(("adamw, relative", rate) for rate in (1e-2, 3e-2)),
    ("adafactor", 1e-2),
)
_BATCH, _HELD_OUT, _LONGEST = 32, 256, 40
_LEAST = 1e-3  # of an RMS, as Adafactor's


def optimizer_of(kind: str, rate: float, model: torch.nn.Module) -> torch.optim.Optimizer:
    weights = list(model.parameters())
    if kind == "adafactor":
        return Adafactor([{"params": weights}], lr=rate)
    groups = [{"params": weights, "lr": rate}]
    if kind == "adamw, relative":
        sizes = [max(weight.detach().square().mean().sqrt().item(), _LEAST) for weight in weights]
        groups = [{"params": [w], "lr": rate * s} for w, s in zip(weights, sizes, strict=True)]
    return torch.optim.AdamW(groups, weight_decay=0.01)


def trained(
    args: argparse.Namespace, kind: str, rate: float, pairs: Sequence
) -> tuple[float, float]:
    """The losses of held-out pairs, with their own sources and with others'."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.run / "tokenizer")
    form = {"padding": True, "truncation": True, "max_length": _LONGEST, "return_tensors": "pt"}

    def batch(chosen: Sequence[tuple[str, str]]) -> dict[str, Tensor]:
        sources, targets = (tokenizer(list(side), **form) for side in zip(*chosen, strict=True))
        labels = targets["input_ids"].masked_fill(targets["attention_mask"] == 0, -100)
        return {**sources, "labels": labels}

    transformers.set_seed(args.seed)
    model = T5ForConditionalGeneration.from_pretrained(args.run / "model", dropout_rate=0.0).train()
    optimizer = optimizer_of(kind, rate, model)
    warmup = args.steps // 10
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: (
            1.0
            if kind == "adafactor"
            else min((step + 1) / warmup, (args.steps - step) / (args.steps - warmup))
        ),
    )
    draws = torch.Generator().manual_seed(args.seed)
    for _ in range(args.steps):
        chosen = torch.randint(len(pairs) - _HELD_OUT, (_BATCH,), generator=draws)
        model(**batch([pairs[i] for i in chosen.tolist()])).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    held_out = batch(pairs[-_HELD_OUT:])
    order = torch.arange(_HELD_OUT).roll(1)
    others = {name: held_out[name][order] for name in ("input_ids", "attention_mask")}
    with torch.no_grad():
        own, other = (model.eval()(**each).loss.item() for each in (held_out, held_out | others))
    return own, other


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", metavar="RUN", type=Path)
    for name in ("source", "target", "rows"):
        parser.add_argument(f"--{name}", metavar="FILE", required=True, type=Path)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    sides = (gzip.open(path, "rt", encoding="utf-8") for path in (args.source, args.target))
    pairs = [(a.strip(), b.strip()) for a, b in zip(*sides, strict=True)]
    for kind, rate in TRIED:
        own, other = trained(args, kind, rate, pairs)
        row = {"optimizer": kind, "rate": rate, "steps": args.steps, "seed": args.seed}
        losses = {"held_out": own, "other_sources": other, "gap": other - own}
        shown = {name: f"{value:.3f}" for name, value in losses.items()}
        append_row(args.rows, FIELDS, machine_line() | row | shown)


if __name__ == "__main__":
    main()
