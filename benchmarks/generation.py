"""Tokens a second of ``generate()``, against Transformers: ``python benchmarks/generation.py``.

Models of published sizes with the same random weights take turns, with greedy search or beams, and
with the cache. Prompts are random and of one length. In fp32 both must give the same tokens. In
half precision, where both round differently, the logits of the prompt must agree within the error
budget.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import fastplm
from fastplm import models
from fastplm.pretrain.presets import configuration
from fastplm.testing import FORWARD_FACTOR, check_error

CLASSES = {
    "gpt2": "GPT2LMHeadModel",
    "bart": "BartForConditionalGeneration",
    "t5": "T5ForConditionalGeneration",
}
VOCABULARY = {"gpt2": 50_257, "bart": 50_265, "t5": 32_128}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def make(arch: str, dtype: torch.dtype) -> dict[str, nn.Module]:
    family = arch.split("-")[0]
    config = configuration(arch, vocab_size=VOCABULARY[family])
    config.use_cache = True
    torch.manual_seed(0)
    theirs = getattr(transformers, CLASSES[family])._from_config(
        copy.deepcopy(config), attn_implementation="sdpa"
    )
    ours = getattr(models, CLASSES[family])(copy.deepcopy(config))
    ours.load_state_dict(theirs.state_dict())
    return {"fastplm": fastplm.freeze(ours.to(dtype)), "transformers sdpa": theirs.to(dtype).eval()}


def generate(model: Any, prompts: Tensor, tokens: int, beams: int) -> Tensor:
    options = dict(max_new_tokens=tokens, min_new_tokens=tokens, num_beams=beams, pad_token_id=0)
    with torch.inference_mode():
        mask = torch.ones_like(prompts)
        return model.generate(prompts, attention_mask=mask, do_sample=False, **options)


def logits(model: Any, prompts: Tensor) -> Tensor:
    decoded = {"decoder_input_ids": prompts} if model.config.is_encoder_decoder else {}
    with torch.inference_mode():
        return model(input_ids=prompts, **decoded).logits.clone()


def gate(ours: nn.Module, theirs: nn.Module, prompts: Tensor, tokens: int, beams: int) -> None:
    """Raise an error unless fastplm's model gives the tokens, or in 16 bits the logits, of
    Transformers' model."""
    if next(ours.parameters()).dtype is torch.float32:
        expected = generate(theirs, prompts, tokens, beams)
        if not torch.equal(generate(ours, prompts, tokens, beams), expected):
            raise SystemExit("the tokens are not those of Transformers")
        return
    gold = logits(copy.deepcopy(theirs).double(), prompts)
    bases = [logits(theirs, prompts)]
    check_error("logits", logits(ours, prompts), gold, bases, FORWARD_FACTOR)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", default="gpt2-small", help="t5-base, bart-base, ...")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--beams", type=int, default=1)
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    parser.add_argument("--prompt", type=int, default=32, help="its tokens")
    parser.add_argument("--tokens", type=int, default=16, help="new ones a row")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()

    made = make(args.arch, DTYPES[args.dtype])
    vocab = VOCABULARY[args.arch.split("-")[0]]
    prompts = torch.randint(1000, vocab - 1000, (args.batch_size, args.prompt))
    gate(made["fastplm"], made["transformers sdpa"], prompts, args.tokens, args.beams)
    seconds: dict[str, list[float]] = {name: [] for name in made}
    for turn in range(args.rounds + 1):
        for name, model in made.items():
            start = time.perf_counter()
            generate(model, prompts, args.tokens, args.beams)
            if turn:  # the first round warms up
                seconds[name].append(time.perf_counter() - start)
    median = {name: statistics.median(times) for name, times in seconds.items()}
    print(
        f"{args.arch} {args.dtype}, {args.batch_size} prompts of {args.prompt} tokens, beams: "
        f"{args.beams}, {args.tokens} new tokens; {torch.get_num_threads()} threads"
    )
    for name, times in seconds.items():
        print(
            f"{name:20} {1e3 * median[name] / args.tokens:8.1f} ms a step "
            f"({1e3 * min(times) / args.tokens:.1f} to {1e3 * max(times) / args.tokens:.1f}), "
            f"{median['transformers sdpa'] / median[name]:.2f} x sdpa"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
