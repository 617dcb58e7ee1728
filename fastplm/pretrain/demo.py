"""``fastplm demo``: pre-train a small ELECTRA on Python's documentation, and check the result."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from fastplm.data import TokenStore, load_tokenizer, tokenize
from fastplm.data._folder import write_json
from fastplm.data._output import move_aside
from fastplm.errors import check
from fastplm.pretrain.compare import compare, table
from fastplm.pretrain.data import count_tokens, hold_out, open_corpus
from fastplm.pretrain.objectives import Objective, objective_of
from fastplm.pretrain.report import summary
from fastplm.pretrain.run import pretrain, rehearse
from fastplm.pretrain.settings import MINUTES, PretrainArguments, PretrainPlan
from fastplm.run.folder import claimed, last_checkpoint
from fastplm.run.threads import computing

#: The steps of a training. With fewer the scores on held-out words vary much with the seed.
LEAST_STEPS, MOST_STEPS = 400, 2200
# The share of the training in the time that is left when its speed is known. The rest is for
# evaluation, comparison and loading.
_TRAINING = 0.8
_COMPARED_BATCHES = 4


def demo(
    out: str | Path = "runs/demo",
    *,
    minutes: float = MINUTES,
    seed: int = 0,
    threads: int | None = None,
) -> bool:
    """Pre-train, print the results, compare with Hugging Face, and load the checkpoints there.

    Args:
        out: the folder of the run; a demo that is already there is moved aside.
        minutes: what all of it is to take; the number of steps follows from it and from the speed
            of the machine, within ``LEAST_STEPS`` and ``MOST_STEPS``.
        seed: of the training.
        threads: of the CPU; None = PyTorch's choice.

    Returns:
        Whether all checks of the demo passed.
    """
    with computing(threads):
        return _demo(Path(out), minutes, seed)


def _demo(out: Path, minutes: float, seed: int) -> bool:
    from transformers.utils.logging import disable_progress_bar

    end = time.perf_counter() + 60 * minutes
    check(0 < minutes < math.inf, "demo", "minutes", minutes, "more than 0", "Change it.")
    disable_progress_bar()  # those of Transformers would break our tables
    cache = out / "cache"
    if (cache / "demo.json").is_file():
        print(f"The demo that was there is now in {move_aside(out)}.")
    source: dict[str, Any] = {"corpus": ["embedded"], "vocab_size": 4096, "cache": cache}
    sizes: dict[str, Any] = {"block_size": 64, "batch_size": 32, "steps": MOST_STEPS}
    args = PretrainArguments("electra-tiny", **source, **sizes, out=out, seed=seed, dropout=0.0)
    print(f"Pre-training {args.arch} on the English documentation inside Python ...", flush=True)
    with claimed("demo", out, resume=False, overwrite=None):
        cache.mkdir()
        write_json(cache / "demo.json", {})  # what is here was made by a demo
    steps = _choose_steps(args, end)
    # The schedule of the learning rate depends on the number of steps.
    plan = replace(args, steps=steps, save_every=steps, log_every=max(1, steps // 40)).plan()
    metrics = pretrain(plan)
    print(f"\n{summary(metrics)}\n")

    print("Fused path against Hugging Face: forward and backward of the same batches, same weights")
    comparison = _compare(plan, metrics["precision"] == "bf16", end)
    print(f"{comparison}\n")

    checks = {**_learned(plan, metrics), **_loads_in_transformers(out)}
    for text, seen in checks.items():
        print(f"{'ok  ' if seen else 'FAIL'}  {text}")
    return all(checks.values())


def _choose_steps(args: PretrainArguments, end: float) -> int:
    """As many steps as fit before ``end`` with all that follows them, by the speed of the first."""
    seconds = rehearse(args).seconds
    fitting = int(_TRAINING * (end - time.perf_counter()) / seconds)
    steps = min(max(fitting, LEAST_STEPS), MOST_STEPS)
    thousands = args.batch_size * args.block_size / seconds / 1000
    took = steps * seconds
    duration = f"{took:.0f} seconds" if took < 120 else f"{took / 60:.0f} minutes"
    instead = "" if steps == MOST_STEPS else f", instead of {MOST_STEPS:,}"
    too_few = "; fewer would show too little" if steps > fitting else ""
    steps_in = f"{steps:,} steps in about {duration}{instead}{too_few}"
    print(f"This machine trains at {thousands:,.1f} k tokens/s: {steps_in}.", flush=True)
    return steps


def _text(plan: PretrainPlan) -> tuple[Objective, TokenStore]:
    tokenizer = load_tokenizer(Path(plan.out) / "tokenizer")
    store = tokenize(open_corpus(plan.corpus, plan.cache), tokenizer, plan.cache)
    return objective_of(plan, tokenizer), store


def _compare(plan: PretrainPlan, bf16: bool, end: float) -> str:
    from fastplm.models.electra_joint import ElectraForJointPreTraining

    model = ElectraForJointPreTraining.from_pretrained(last_checkpoint(Path(plan.out)))
    objective, store = _text(plan)
    stream, collator, size = objective.dataset(store), objective.collator(), plan.batch_size
    begins = range(0, _COMPARED_BATCHES * size, size)
    batches = [collator([stream[begin + i] for i in range(size)]) for begin in begins]
    return table(compare(model, batches, bf16=bf16, time_limit=end - time.perf_counter()))


def _learned(plan: PretrainPlan, metrics: dict[str, Any]) -> dict[str, bool]:
    held_out = metrics["held_out"]
    words = held_out["words"]
    loss, constant = words["loss"], words["loss_of_best_constant"]
    balanced, error = words["balanced_accuracy"], words["balanced_accuracy_error"]
    mlm_loss, frequencies = held_out["mlm_loss"], _loss_of_frequencies(plan)
    print(
        f"At even odds: accuracy {held_out['accuracy']:.4f} against "
        f"{held_out['accuracy_of_always_original']:.4f} of always answering original, precision "
        f"{held_out['replaced_precision']:.3f}, recall {held_out['replaced_recall']:.3f}"
    )
    generator = (
        f"on held-out words the generator's loss, {mlm_loss:.3f}, is below the {frequencies:.3f} "
        "of knowing only how often each word occurs"
    )
    found = (
        f"replaced ones are found with precision {words['precision']:.3f} (their share is "
        f"{words['share_replaced']:.3f}) and recall {words['recall']:.3f}: balanced accuracy "
        f"{balanced:.3f} ± {error:.3f} against 0.5 of always answering original"
    )
    discriminator = (
        f"the discriminator's loss there, {loss:.4f}, is below the {constant:.4f} of the best "
        "constant answer"
    )
    return {
        generator: mlm_loss < frequencies,
        found: balanced - 0.5 > 3 * error,
        discriminator: loss < constant,
    }


def _loss_of_frequencies(plan: PretrainPlan) -> float:
    """The loss of a generator that answers every token with its frequency."""
    objective, store = _text(plan)
    held_out: Any
    train_store, held_out, _ = hold_out(objective, store)
    counts = 1.0 + count_tokens(train_store, objective.tokenizer)
    samples = [held_out[index] for index in range(len(held_out))]
    labels = objective.collator()(samples)["labels"]
    return F.cross_entropy(counts.log().expand(labels.numel(), -1), labels.flatten()).item()


@torch.no_grad()
def _loads_in_transformers(out: Path) -> dict[str, bool]:
    """Each checkpoint as our class and as Transformers' own, on a padded batch of English."""
    import transformers

    import fastplm.models
    from fastplm._budget import FORWARD_FACTOR, BudgetExceeded, check_error

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
