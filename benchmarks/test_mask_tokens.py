"""ops.mask_tokens against its eager reference and the collator of Transformers."""

from __future__ import annotations

import functools

import torch

from fastplm import ops
from fastplm.reference.mask_tokens import mask_tokens_ref
from harness import Case, assert_same_bits, default_device

GPU = default_device().type == "cuda"
VOCAB, MASK = 30_522, 103


def make(batch, length, device):
    input_ids = torch.randint(1_000, VOCAB, (batch, length), device=device)
    maskable = torch.ones(batch, length, dtype=torch.bool, device=device)
    maskable[:, 0] = maskable[:, -1] = False
    return dict(input_ids=input_ids, maskable=maskable)


def with_options(function):
    return functools.partial(function, vocab_size=VOCAB, mask_token_id=MASK, seed=0)


@functools.cache
def transformers_collator():
    """The masking step of Transformers' collator: Bernoulli draws of other bits, not compacted."""
    from transformers import DataCollatorForLanguageModeling, PreTrainedTokenizerBase

    class Tokenizer(PreTrainedTokenizerBase):
        """The four facts that the masking needs from a tokenizer."""

        mask_token = "[MASK]"

        def __init__(self):
            pass

        def convert_tokens_to_ids(self, token):
            return MASK

        def __len__(self):
            return VOCAB

    return DataCollatorForLanguageModeling(Tokenizer())


def transformers_masking(input_ids, maskable):
    return transformers_collator().torch_mask_tokens(input_ids.clone(), ~maskable)


def case(label, batch, length, targets=None):
    tokens = batch * length
    return Case(
        op="mask_tokens",
        label=label,
        make=functools.partial(make, batch, length),
        make_small=functools.partial(make, min(batch, 8), length),
        variants={
            "eager": with_options(mask_tokens_ref),
            "fastplm": with_options(ops.mask_tokens),
            "transformers": transformers_masking,
        },
        gate=assert_same_bits,
        # Reads ids and the mask; writes ids, and int64 positions and labels of 15 % of the tokens.
        bytes=int(tokens * (8 + 8 + 1 + 2 * 8 * 0.15)),
        tokens=tokens,
        targets=targets or {},
    )


def gpu_cases():
    # Targets on an H200, in microseconds.
    targets = {"forward": (2.5, 6)}
    return [case("BERT-base 256x128", 256, 128, targets), case("BERT-base 64x512", 64, 512)]


def cpu_cases():
    return [case("BERT-base 32x128", 32, 128), case("BERT-base 32x512", 32, 512)]


CASES = gpu_cases() if GPU else cpu_cases()


def test_mask_tokens(case, bench):
    bench(case, "forward")
