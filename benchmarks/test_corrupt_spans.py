"""ops.corrupt_spans against its eager reference and the authors' algorithm in NumPy."""

from __future__ import annotations

import functools

import numpy as np
import torch

from fastplm.ops.corrupt_spans import corrupt_spans, span_corruption_lengths
from fastplm.reference.corrupt_spans import corrupt_spans_ref
from harness import Case, Unavailable, assert_same_bits, default_device

GPU = default_device().type == "cuda"
VOCAB, SENTINELS, EOS = 32_100, 100, 1
DENSITY, MEAN = 0.15, 3.0


def make(batch, length, device):
    return dict(
        input_ids=torch.randint(2, VOCAB - SENTINELS, (batch, length), device=device),
        sentinel_ids=torch.arange(VOCAB - 1, VOCAB - SENTINELS - 1, -1, device=device),
    )


def with_options(function):
    return functools.partial(function, eos_token_id=EOS, seed=0)


def numpy_mask(length):
    """The mask of a row's noise tokens, from shuffled boundaries of the noise and of the rest."""
    noise = min(max(round(length * DENSITY), 1), length - 1)
    spans = max(round(noise / MEAN), 1)

    def segments(items):
        starts = np.arange(items - 1) < spans - 1
        np.random.shuffle(starts)
        return np.bincount(np.cumsum(np.concatenate([[False], starts])), minlength=spans)

    runs = np.stack([segments(length - noise), segments(noise)], axis=1).reshape(-1)
    begins = np.zeros(length, dtype=np.int64)
    begins[np.cumsum(runs)[:-1]] = 1
    return np.cumsum(begins) % 2 == 1


def numpy_collator(input_ids, sentinel_ids):
    """A collator's step on a batch: masks row by row, then sentinels in place of masked runs."""
    if input_ids.is_cuda:
        raise Unavailable("runs on the CPU alone")
    tokens, sentinels = input_ids.numpy(), sentinel_ids.numpy()
    batch, length = tokens.shape
    noise = np.stack([numpy_mask(length) for _ in range(batch)])
    eos = np.full((batch, 1), EOS)

    def with_sentinels(masked):
        first = masked & ~np.pad(masked, ((0, 0), (1, 0)))[:, :-1]
        number = np.cumsum(first, axis=1)
        marked = np.where(first, sentinels[number - 1], np.where(masked, -1, tokens))
        return np.concatenate([marked[marked >= 0].reshape(batch, -1), eos], axis=1)

    inputs = with_sentinels(noise)
    # In the labels, each kept run becomes the sentinel of the span behind it.
    labels = with_sentinels(~noise)
    return torch.from_numpy(inputs), torch.from_numpy(labels)


def case(label, batch, length):
    variants = {
        "eager": with_options(corrupt_spans_ref),
        "fastplm": with_options(corrupt_spans),
        "numpy": numpy_collator,
    }
    return Case(
        op="corrupt_spans",
        label=label,
        make=functools.partial(make, batch, length),
        make_small=functools.partial(make, min(batch, 8), length),
        variants=variants,
        gate=assert_same_bits,
        # Reads int64 ids, and writes int64 inputs and labels.
        bytes=8 * batch * (length + sum(span_corruption_lengths(length))),
        tokens=batch * length,
    )


CASES = [case("T5 256x568", 256, 568), case("T5 64x1024", 64, 1024)]
if not GPU:
    CASES = [case("T5 32x568", 32, 568), case("T5 128x128", 128, 128)]


def test_corrupt_spans(case, bench):
    bench(case, "forward")
