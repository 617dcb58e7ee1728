"""Sentence embeddings with MiniLM, against Transformers: ``python benchmarks/embeddings.py``.

Real sentences in their own order, 32 a batch, so that lengths are mixed; the mean over the tokens
of the last hidden states. The models have the same weights and take turns, batch by batch. First
the embeddings must agree within the error budget.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from torch import Tensor

from fastplm.models import BertModel
from fastplm.testing import FORWARD_FACTOR, check_error

Batch = dict[str, Tensor]


def embed(model: torch.nn.Module, batch: Batch) -> Tensor:
    """The mean over the tokens: [B, E]."""
    with torch.inference_mode():
        hidden = model(**batch).last_hidden_state
        mask = batch["attention_mask"][..., None]
        return (hidden * mask).sum(1) / mask.sum(1)


def batches(tokenizer: Callable, texts: list[str], size: int) -> list[Batch]:
    return [
        dict(tokenizer(texts[i : i + size], padding=True, truncation=True, return_tensors="pt"))
        for i in range(0, len(texts) - size + 1, size)
    ]


def gate(ours: torch.nn.Module, theirs: list[torch.nn.Module], batch: Batch) -> None:
    """Raises BudgetExceeded where ours is less exact than Transformers may be."""
    gold = embed(theirs[0].double(), batch)
    theirs[0].float()
    bases = [embed(model, batch) for model in theirs]
    check_error("embeddings", embed(ours, batch).clone(), gold, bases, FORWARD_FACTOR)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--texts", type=Path, required=True, help="lines that end in a text")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--batches", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()

    lines = args.texts.read_text(encoding="utf-8").splitlines()[1:]
    texts = [line.split("\t")[-1] for line in lines][: args.batches * args.batch_size]
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.model)
    given = batches(tokenizer, texts, args.batch_size)
    load = transformers.BertModel.from_pretrained
    models = {
        "fastplm": BertModel.from_pretrained(args.model),
        "transformers sdpa": load(args.model, attn_implementation="sdpa"),
        "transformers eager": load(args.model, attn_implementation="eager"),
    }
    for model in models.values():
        model.eval()
    ours, *theirs = models.values()
    for batch in given[:3]:
        gate(ours, theirs, batch)

    tokens = sum(int(batch["attention_mask"].sum()) for batch in given)
    slots = sum(batch["attention_mask"].numel() for batch in given)
    print(
        f"{len(given)} batches of {args.batch_size}, {tokens / slots:.0%} of {slots} slots are "
        f"tokens; {torch.get_num_threads()} threads"
    )
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for turn in range(args.rounds + 1):
        spent = dict.fromkeys(models, 0.0)
        for batch in given:
            for name, model in models.items():
                start = time.perf_counter()
                embed(model, batch)
                spent[name] += time.perf_counter() - start
        if turn:  # the first round warms up
            for name, total in spent.items():
                seconds[name].append(total)
    median = {name: statistics.median(times) for name, times in seconds.items()}
    for name, times in seconds.items():
        print(
            f"{name:20} {1e3 * median[name] / len(given):8.1f} ms a batch "
            f"({1e3 * min(times) / len(given):.1f} to {1e3 * max(times) / len(given):.1f}), "
            f"{median['transformers sdpa'] / median[name]:.2f} x sdpa"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
