"""Train a tiny T5, BART and ALBERT on your own text, and load them in plain Transformers.

    python examples/pretrain_families.py --corpus my-text.txt

T5 learns the text that its sentinels replace, BART the text before the noise, ALBERT masked n-grams
and the order of two segments. Each takes about a minute on two cores. From the command line:

    fastplm pretrain --arch t5-tiny --objective spans --corpus my-text.txt --steps 200 --out runs/t5
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForPreTraining, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from fastplm.data import tokenize
from fastplm.pretrain.data import hold_out, open_corpus
from fastplm.pretrain.objectives import Objective, objective_of
from fastplm.pretrain.run import PretrainArguments, pretrain
from fastplm.testing import FORWARD_FACTOR, check_error

ARCHITECTURES = ("t5-tiny", "bart-tiny", "albert-tiny")
# How many logged losses are averaged, first and last: a model that learns has a lower mean last.
WINDOW = 5


def main() -> None:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--corpus", nargs="+", default=["embedded"])
    parser.add_argument("--out", default="runs/families")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--vocab-size", type=int, default=2000)
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument(
        "--optimizer", choices=("adamw", "lamb"), default="adamw", help="of ALBERT, as published"
    )
    options = vars(parser.parse_args())
    disable_progress_bar()  # of the writing and loading of checkpoints
    optimizer, out = options.pop("optimizer"), Path(options.pop("out"))
    for arch in ARCHITECTURES:
        args = PretrainArguments(
            arch=arch,
            out=out / arch,
            log_every=max(1, options["steps"] // 40),
            # LAMB's default rate for so small a batch is meant for a long run.
            lr=0.01 if optimizer == "lamb" and arch.startswith("albert") else None,
            optimizer=optimizer if arch.startswith("albert") else "adamw",
            dropout=0.0,
            precision="fp32",
            **options,
        )
        metrics = pretrain(args)
        assert "held_out" in metrics, "the corpus is too small to hold text out of it"
        first, last = learned(metrics)
        tokenizer = AutoTokenizer.from_pretrained(metrics["models"]["model"])
        plan = args.plan()
        objective = objective_of(plan, tokenizer)
        held_out = metrics["held_out"][objective.token_loss]
        difference = loads_in_transformers(plan, objective, metrics)
        print(
            f"{arch}: {objective.name}, loss {first:.3f} -> {last:.3f}, of held-out tokens "
            f"{held_out:.3f}; plain Transformers differs by {difference:.1e}"
        )


def learned(metrics: dict[str, Any]) -> tuple[float, float]:
    """The loss at the beginning and at the end, which must be lower by at least a tenth.

    With a single logged loss there is nothing to compare.
    """
    losses = [entry["loss"] for entry in metrics["history"]]
    window = max(1, min(WINDOW, len(losses) // 2))
    first, last = statistics.fmean(losses[:window]), statistics.fmean(losses[-window:])
    fell = last < 0.9 * first
    assert fell or len(losses) == 1, f"the loss does not fall: {first} -> {last}"
    return first, last


def loads_in_transformers(plan: Any, objective: Objective, metrics: dict[str, Any]) -> float:
    """Check that plain Transformers computes the loss and logits of the trained model."""
    path = metrics["models"]["model"]
    store = tokenize(open_corpus(plan.corpus), objective.tokenizer, plan.cache)
    _, dataset, _ = hold_out(objective, store)
    batch = objective.collator()([dataset[i] for i in range(8)])
    # ALBERT's class has a loss for both of its labels or for none.
    names = ("input_ids", "attention_mask", "token_type_ids", "labels", "sentence_order_label")
    batch = {name: batch[name] for name in names if name in batch}

    def outputs(model: torch.nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.no_grad():
            loss, logits, *_ = model.eval()(**batch).to_tuple()
        return loss, logits

    fused, eager, sdpa = (
        outputs(AutoModelForPreTraining.from_pretrained(path, attn_implementation=attention))
        for attention in ("fastplm", "eager", "sdpa")
    )
    double = outputs(AutoModelForPreTraining.from_pretrained(path).double())
    for name, out, gold, *bases in zip(("loss", "logits"), fused, double, eager, sdpa, strict=True):
        check_error(name, out, gold, bases, FORWARD_FACTOR)
    return (fused[1] - eager[1]).abs().max().item()


if __name__ == "__main__":
    main()
