"""Sentence embeddings with MiniLM, against Transformers and sentence-transformers.

    python benchmarks/embeddings.py --model DIR --texts FILE [--paragraphs] [--from-text]

The texts are real sentences in their own order, 1 to 32 a batch, so that lengths are mixed. An
embedding is the mean of the last hidden states over the tokens. The models have the same weights
and take turns, batch by batch. The shortest round of each batch counts: by the clock, and by the
time of the process, which other load on the machine disturbs less. With --paragraphs, FILE is text
like WikiText's, whose paragraphs are cut into sentences.
First the embeddings must agree within the error budget. With --from-text the tokenizer's time
counts, and ``fastplm.inference.embed`` and sentence-transformers, if installed, take part.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from fastplm.inference.embed import embed as embed_texts
from fastplm.models import BertModel
from fastplm.testing import FORWARD_FACTOR, check_error
from harness import machine_line

Batch = dict[str, Tensor]
_GATED = 3  # batches of the gate


def embed(model: torch.nn.Module, batch: Batch) -> Tensor:
    """The mean over the tokens: [B, E]."""
    with torch.inference_mode():
        hidden = model(**batch).last_hidden_state
        mask = batch["attention_mask"][..., None]
        return (hidden * mask).sum(1) / mask.sum(1)


def padded(tokenizer: Callable, texts: list[str]) -> Batch:
    return dict(tokenizer(texts, padding=True, truncation=True, return_tensors="pt"))


def gate(variants: dict[str, Callable[[Any], Tensor]], model: Any, given: Any) -> None:
    """Raise BudgetExceeded if a variant's error is above that of Transformers' variants."""
    theirs = [variant(given) for name, variant in variants.items() if "transformers " in name]
    model.double()
    gold = variants["transformers eager"](given)
    model.float()
    for name, variant in variants.items():
        check_error(name, variant(given).clone(), gold, theirs, FORWARD_FACTOR)


def from_text(args: argparse.Namespace, models: dict[str, Any], tokenizer: Any) -> dict:
    """The variants by name: functions from texts to their vectors."""
    variants: dict[str, Callable[[list[str]], Tensor]] = {
        "fastplm embed": lambda texts: torch.from_numpy(
            embed_texts(models["fastplm"], tokenizer, texts)  # type: ignore[arg-type]
        )
    }
    if importlib.util.find_spec("sentence_transformers") is None:
        print("sentence-transformers is not installed, and left out")
    else:
        from sentence_transformers import SentenceTransformer

        whole = SentenceTransformer(str(args.model), device="cpu")
        modules = [module for module in whole if type(module).__name__ != "Normalize"]
        plain = SentenceTransformer(modules=modules, device="cpu")
        plain.max_seq_length = tokenizer.model_max_length
        variants["sentence-transformers"] = lambda texts: plain.encode(
            texts, batch_size=len(texts), convert_to_tensor=True, show_progress_bar=False
        )
    for name, model in models.items():
        variants[name] = lambda texts, model=model: embed(model, padded(tokenizer, texts))
    return variants


def compare(
    variants: dict[str, Callable], given: list[Any], rounds: int
) -> dict[str, tuple[list[list[float]], list[float]]]:
    """By variant: (seconds by the clock of each round and batch, least seconds of the process)."""
    seconds: dict[str, list[list[float]]] = {name: [] for name in variants}
    least = {name: [math.inf] * len(given) for name in variants}
    for turn in range(rounds + 1):
        for each in seconds.values():
            each.append([])
        for at, batch in enumerate(given):
            for name, variant in variants.items():
                start, process = time.perf_counter(), time.process_time()
                variant(batch)
                process = time.process_time() - process
                seconds[name][-1].append(time.perf_counter() - start)
                if turn:  # the first round warms up
                    least[name][at] = min(least[name][at], process)
    return {name: (seconds[name][1:], least[name]) for name in variants}


def sentences(text: str) -> list[str]:
    """The sentences of a text like WikiText's, with spaces around words, without headings."""
    paragraphs = [line.strip() for line in text.splitlines()]
    cut = [line.split(" . ") for line in paragraphs if line and not line.startswith("= ")]
    return [f"{each.strip(' .')} ." for part in cut for each in part if len(each.split()) > 3]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--texts", type=Path, required=True, help="lines that end in a text")
    parser.add_argument("--paragraphs", action="store_true", help="FILE is running text")
    parser.add_argument("--batch-size", type=int, nargs="+", default=[1, 2, 4, 8, 32])
    parser.add_argument("--threads", type=int, help="default: PyTorch's")
    parser.add_argument("--batches", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--from-text", action="store_true", help="the tokenizer's time counts")
    args = parser.parse_args()

    if args.threads is not None:
        torch.set_num_threads(args.threads)
    text = args.texts.read_text(encoding="utf-8")
    if args.paragraphs:
        lines = sentences(text)
    else:
        lines = [line.split("\t")[-1] for line in text.splitlines()[1:]]
    print(", ".join(machine_line().values()))
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.model)
    load = transformers.BertModel.from_pretrained
    models: dict[str, Any] = {
        "fastplm": BertModel.from_pretrained(args.model),
        "transformers sdpa": load(args.model, attn_implementation="sdpa"),
        "transformers eager": load(args.model, attn_implementation="eager"),
    }
    for model in models.values():
        model.eval()
    variants: dict[str, Callable] = {name: partial(embed, model) for name, model in models.items()}
    if args.from_text:
        variants = from_text(args, models, tokenizer)

    for size in args.batch_size:
        texts = lines[: args.batches * size]
        parts = [texts[i : i + size] for i in range(0, len(texts) - size + 1, size)]
        batches = [padded(tokenizer, part) for part in parts]
        given: list[Any] = parts if args.from_text else batches
        for each in given[:_GATED]:
            gate(variants, models["transformers eager"], each)
        tokens = sum(int(batch["attention_mask"].sum()) for batch in batches)
        slots = sum(batch["attention_mask"].numel() for batch in batches)
        print(
            f"{len(batches)} batches of {size}, {tokens / slots:.0%} of {slots} slots are tokens; "
            f"{torch.get_num_threads()} threads"
        )
        taken = compare(variants, given, args.rounds)
        wall = {
            name: sum(map(min, zip(*rounds, strict=True))) for name, (rounds, _) in taken.items()
        }
        process = {name: sum(least) for name, (_, least) in taken.items()}
        for name, (rounds, _) in taken.items():
            median = statistics.median(map(sum, rounds))
            print(
                f"{name:22} {1e3 * median / len(given):8.2f} ms a batch in the median, "
                f"{1e3 * wall[name] / len(given):.2f} at least, "
                f"{wall['transformers sdpa'] / wall[name]:.3f} x sdpa; of the process "
                f"{1e3 * process[name] / len(given):.2f}, "
                f"{process['transformers sdpa'] / process[name]:.3f} x"
            )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
