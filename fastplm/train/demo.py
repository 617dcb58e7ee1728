"""``fastplm demo``: a small ELECTRA on Python's own documentation, and what to make of it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch

from fastplm.train.compare import compare, table
from fastplm.train.pretrain import (
    PretrainArguments,
    make_collator,
    make_dataset,
    open_corpus,
    pretrain,
)
from fastplm.train.report import summary, write_json

_COMPARED_BATCHES = 4


def demo(out: str | Path = "runs/demo", *, steps: int = 2200) -> bool:
    """Pre-train, print the results, compare with Hugging Face, and load the checkpoints there.

    Args:
        out: the folder of the run; a demo that is already there is replaced.
        steps: of the training.

    Returns:
        Whether everything that the demo is to show was seen.
    """
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # of Transformers' loading and saving, in the middle of our tables
    out = Path(out)
    if (out / "demo.json").is_file():
        shutil.rmtree(out)
    args = PretrainArguments(
        arch="electra-tiny",
        corpus=["embedded"],
        steps=steps,
        out=out,
        vocab_size=4096,
        block_size=64,
        batch_size=32,
        save_every=steps,
        log_every=max(1, steps // 40),
        dropout=0.0,
        cache=out / "cache",
    )
    print(f"Pre-training {args.arch} on the English documentation inside Python ...", flush=True)
    metrics = pretrain(args)
    write_json(out / "demo.json", {"steps": steps})
    print(f"\n{summary(metrics)}\n")

    print("Fused path against Hugging Face: forward and backward of the same batches, same weights")
    comparison = _compare(args, metrics["precision"] == "bf16")
    print(f"{comparison}\n")

    checks = {
        **_learned(metrics),
        **_loads_in_transformers(out),
    }
    for text, seen in checks.items():
        print(f"{'ok  ' if seen else 'FAIL'}  {text}")
    return all(checks.values())


def _compare(args: PretrainArguments, bf16: bool) -> str:
    from fastplm.data import load_tokenizer, tokenize
    from fastplm.models.electra_joint import ElectraForJointPreTraining
    from fastplm.train.trainer import last_checkpoint

    model = ElectraForJointPreTraining.from_pretrained(last_checkpoint(Path(args.out)))
    tokenizer = load_tokenizer(Path(args.out) / "tokenizer")
    store = tokenize(open_corpus(args.corpus), tokenizer, args.cache)
    stream = make_dataset(args, store, tokenizer)
    collator = make_collator(args, tokenizer)
    size = args.batch_size
    batches = [
        collator([stream[i] for i in range(begin, begin + size)])
        for begin in range(0, _COMPARED_BATCHES * size, size)
    ]
    return table(compare(model, batches, bf16=bf16))


def _learned(metrics: dict[str, Any]) -> dict[str, bool]:
    first, last = metrics["history"][0], metrics["history"][-1]
    held_out = metrics["held_out"]
    checks = {}
    for name, part in (("generator", "mlm_loss"), ("discriminator", "rtd_loss")):
        text = f"the loss of the {name} falls: {first[part]:.3f} -> {last[part]:.3f}"
        checks[text] = last[part] < first[part]
    words = held_out["words"]
    balanced, error = words["balanced_accuracy"], words["balanced_accuracy_error"]
    checks[
        f"on held-out words, replaced ones are found with precision {words['precision']:.3f} "
        f"(their share is {words['share_replaced']:.3f}) and recall {words['recall']:.3f}: "
        f"balanced accuracy {balanced:.3f} ± {error:.3f} against 0.5 of always answering original"
    ] = balanced - 0.5 > 3 * error
    checks[
        f"its loss there, {words['loss']:.4f}, is below the "
        f"{words['loss_of_best_constant']:.4f} of the best constant answer"
    ] = words["loss"] < words["loss_of_best_constant"]
    print(
        f"At even odds: accuracy {held_out['accuracy']:.4f} against "
        f"{held_out['accuracy_of_always_original']:.4f} of always answering original, precision "
        f"{held_out['replaced_precision']:.3f}, recall {held_out['replaced_recall']:.3f}"
    )
    return checks


@torch.no_grad()
def _loads_in_transformers(out: Path) -> dict[str, bool]:
    """Each checkpoint as our class and as Transformers' own, on a padded batch of English."""
    import transformers

    import fastplm.models
    from fastplm.testing import FORWARD_FACTOR, BudgetExceeded, check_error

    tokenizer = transformers.AutoTokenizer.from_pretrained(out / "discriminator")
    text = ["A module is a file with Python definitions.", "Return the absolute value of x."]
    batch = tokenizer([*text, " ".join(text)], padding=True, return_tensors="pt")
    tokens = batch["attention_mask"].bool()  # padding has no logits that mean anything
    checks = {}
    for name, kind in (
        ("generator", "ElectraForMaskedLM"),
        ("discriminator", "ElectraForPreTraining"),
    ):
        ours = getattr(fastplm.models, kind).from_pretrained(out / name).eval()
        plain = getattr(transformers, kind)
        logits = ours(**batch).logits[tokens]
        bases = []
        for attention in ("eager", "sdpa"):
            loaded = plain.from_pretrained(out / name, attn_implementation=attention).eval()
            bases.append(loaded(**batch).logits[tokens])
        gold = loaded.double()(**batch).logits[tokens]
        difference = (logits - bases[0]).abs().max().item()
        try:
            check_error("logits", logits, gold, bases, FORWARD_FACTOR)
            equal = True
        except BudgetExceeded:
            equal = False
        checks[
            f"{out / name} loads in plain Transformers as {kind} with equal outputs (largest "
            f"difference {difference:.1e})"
        ] = equal
    return checks
