"""ops.bart_noise against its eager reference and the same noise by NumPy, row by row."""

from __future__ import annotations

import functools

import numpy as np
import torch

from fastplm.ops.bart_noise import bart_noise
from fastplm.reference.bart_noise import bart_noise_ref
from harness import Case, Unavailable, assert_same_bits, default_device

GPU = default_device().type == "cuda"
VOCAB, BOS, PAD, EOS, MASK = 50_265, 0, 1, 2, 50_264
#: About as many tokens of BART's vocabulary end with one of ``.!?``.
ENDS = torch.arange(4, 50_000, 83)
FULL_STOP = int(ENDS[3])
RECIPES = {
    "infilling and permutation": {},
    "all five": dict(mask_probability=0.1, delete_probability=0.1, rotate_probability=0.5),
}


def make(batch, length, device):
    input_ids = torch.randint(4, MASK, (batch, length), device=device)
    input_ids[torch.rand(batch, length, device=device) < 0.05] = FULL_STOP
    special_ids = torch.tensor([BOS, PAD, EOS, 3, MASK], device=device)
    return dict(input_ids=input_ids, sentence_end_ids=ENDS.to(device), special_ids=special_ids)


def with_options(function, recipe):
    tokens = dict(
        mask_token_id=MASK, pad_token_id=PAD, bos_token_id=BOS, eos_token_id=EOS, vocab_size=VOCAB
    )
    return functools.partial(function, seed=0, **tokens, **RECIPES[recipe])


def numpy_masks(rng, count):
    """The mask, or a random token in one of ten cases."""
    return np.where(rng.random(count) < 0.1, rng.integers(4, MASK, count), MASK)


def numpy_row(rng, row, ends, mask_probability, delete_probability, rotate_probability):
    """The noise of one row of text, in arrays of its tokens without any loop."""
    sentences = np.split(row, np.flatnonzero(ends)[: len(row)] + 1)
    rng.shuffle(sentences)
    row = np.concatenate(sentences)
    if rng.random() < rotate_probability:
        row = np.roll(row, -rng.integers(len(row)))
    fate = rng.random(len(row))
    masked = fate < mask_probability
    row = np.where(masked, numpy_masks(rng, len(row)), row)
    deleted = (fate >= mask_probability) & (fate < mask_probability + delete_probability)

    covered = int(0.3 * len(row) + 0.5)
    lengths = rng.poisson(3.0, covered + 16)
    ends_at = np.cumsum(lengths)
    spans = int(np.searchsorted(ends_at, covered)) + 1
    lengths = lengths[:spans]
    lengths[-1] -= ends_at[spans - 1] - covered
    lengths = np.roll(lengths, rng.integers(spans))
    is_span = np.zeros(len(row) - covered + spans, dtype=bool)
    is_span[rng.choice(len(is_span), spans, replace=False)] = True
    skipped = np.concatenate([[0], np.cumsum(lengths)])[np.cumsum(is_span)]
    kept = (np.cumsum(~is_span) - 1 + skipped)[~is_span]
    out = np.empty(len(is_span), dtype=row.dtype)
    out[is_span] = numpy_masks(rng, spans)
    out[~is_span] = row[kept]
    is_span[~is_span] = ~deleted[kept]  # from here on: the tokens that stay
    return out[is_span]


def numpy_collator(recipe):
    """A collator's step on a batch: noise row by row, then padding."""
    options = dict(mask_probability=0.0, delete_probability=0.0, rotate_probability=0.0)
    options |= RECIPES[recipe]

    def call(input_ids, sentence_end_ids, special_ids):
        if input_ids.is_cuda:
            raise Unavailable("runs on the CPU alone")
        rng = np.random.default_rng(0)
        tokens = input_ids.numpy()
        ends = np.isin(tokens, sentence_end_ids.numpy())
        out = np.full((len(tokens), tokens.shape[1] + 2), PAD)
        for i, row in enumerate(tokens):
            noised = numpy_row(rng, row, ends[i], **options)[: tokens.shape[1]]
            out[i, 0] = BOS
            out[i, 1 : len(noised) + 1] = noised
            out[i, len(noised) + 1] = EOS
        return torch.from_numpy(out)

    return call


def case(recipe, batch, length):
    variants = {
        "eager": with_options(bart_noise_ref, recipe),
        "fastplm": with_options(bart_noise, recipe),
        "numpy": numpy_collator(recipe),
    }
    return Case(
        op="bart_noise",
        label=f"BART {batch}x{length}, {recipe}",
        make=functools.partial(make, batch, length),
        make_small=functools.partial(make, min(batch, 8), length),
        variants=variants,
        gate=assert_same_bits,
        # Reads int64 ids, and writes them with BOS and EOS.
        bytes=8 * batch * (2 * length + 2),
        tokens=batch * length,
    )


SHAPES = ((256, 512), (64, 1024)) if GPU else ((32, 512), (128, 128))
CASES = [case(recipe, *shape) for recipe in RECIPES for shape in SHAPES]


def test_bart_noise(case, bench):
    bench(case, "forward")
