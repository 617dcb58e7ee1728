"""The reference of attention: T5's buckets, the bits of dropout, packed batches, gradcheck."""

from __future__ import annotations

import functools

import pytest
import torch
from transformers.models.t5.modeling_t5 import T5Attention

from fastplm.reference.attention import (
    T5RelativeBias,
    attention_ref,
    attention_varlen_ref,
    dropout_keep_mask,
    dropout_threshold,
    t5_buckets,
)
from fastplm.reference.philox import DROPOUT_ROUNDS, Stream, philox4x32

#: A fair generator fails a test of this file for one of a thousand seeds, and the seeds are fixed.
SIGNIFICANCE = 1e-3


def chi_square_p(observed: torch.Tensor, expected: torch.Tensor) -> float:
    """The probability that a fair generator is further from ``expected`` than ``observed`` is.

    The statistic of k free cells is chi-square distributed; its tail is the regularised upper
    incomplete gamma function Q(k / 2, x / 2).
    """
    observed, expected = observed.double(), expected.double()
    statistic = ((observed - expected).square() / expected).sum()
    half_free = torch.tensor((len(observed) - 1) / 2).double()
    return torch.special.gammaincc(half_free, statistic / 2).item()


def normal_quantile(tests: int) -> float:
    """The value that the largest of ``tests`` standard normal values exceeds with probability
    SIGNIFICANCE."""
    return torch.special.ndtri(torch.tensor(1 - SIGNIFICANCE / 2 / tests).double()).item()


# --- T5's buckets ---------------------------------------------------------------------------------


@pytest.mark.parametrize("bidirectional", (True, False), ids=("both", "past"))
@pytest.mark.parametrize(
    ("num_buckets", "max_distance"),
    ((32, 128), (32, 256), (16, 64), (8, 20), (8, 5), (12, 100), (6, 50), (4, 3), (64, 1000)),
)
def test_buckets_are_those_of_transformers(num_buckets, bidirectional, max_distance):
    distance = torch.arange(-3 * max_distance, 3 * max_distance + 1)
    theirs = T5Attention._relative_position_bucket(
        distance, bidirectional, num_buckets, max_distance
    )
    ours = t5_buckets(num_buckets, bidirectional, max_distance)
    assert torch.equal(ours[distance.clamp(-max_distance, max_distance) + max_distance], theirs)
    assert ours.min() == 0 and ours.max() == num_buckets - 1


def test_the_fewest_buckets():
    assert t5_buckets(2, False, 2).tolist() == [1, 1, 0, 0, 0]
    assert t5_buckets(4, True, 2).tolist() == [1, 1, 0, 3, 3]


# --- dropout --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dropout_p", "threshold"),
    ((0.0, 0), (1e-9, 1), (0.001, 1), (0.1, 26), (0.5, 128), (0.999, 255), (1.0, 256)),
)
def test_dropout_threshold(dropout_p, threshold):
    assert dropout_threshold(dropout_p) == threshold


@pytest.mark.parametrize("seed", (0, -1, 2**63 - 1, -(2**63), 2**32 + 5))
@pytest.mark.parametrize("sample", (0, 2**32 + 3, 2**63 - 1))
def test_each_bit_is_the_byte_that_the_layout_names(seed, sample):
    mask = dropout_keep_mask(seed, torch.tensor([7, sample]), 3, 5, 150, 0.3)
    assert mask.shape == (2, 3, 5, 150) and mask.dtype is torch.bool
    for head, query, key in ((0, 0, 0), (2, 4, 149), (1, 3, 63), (1, 2, 64), (0, 4, 77), (2, 1, 6)):
        call = key // 64 * 4 + key % 8 // 2
        step = call << 12 | head
        words = philox4x32(
            seed, query, sample & 0xFFFFFFFF, sample >> 32, step << 4 | Stream.DROPOUT, 7
        )
        byte = key % 64 // 8 * 2 + key % 2
        value = words[byte // 4].item() >> byte % 4 * 8 & 0xFF
        assert mask[1, head, query, key] == (value >= round(0.3 * 256))
    assert DROPOUT_ROUNDS == 7


def test_a_mask_is_a_piece_of_any_larger_one():
    small = dropout_keep_mask(3, torch.tensor([4]), 1, 20, 70, 0.5)
    large = dropout_keep_mask(torch.tensor(3), torch.tensor([9, 4]), 3, 33, 200, 0.5)
    assert torch.equal(small[0, 0], large[1, 0, :20, :70])


def bytes_drawn(seed: int) -> torch.Tensor:
    """The byte of every place: the number of thresholds 1 … 255 at which it is kept."""
    place = functools.partial(dropout_keep_mask, seed, torch.arange(2), 2, 64, 96)
    return sum(place(threshold / 256).long() for threshold in range(1, 256))


def test_bytes_are_uniform():
    counts = bytes_drawn(11).flatten().bincount(minlength=256)
    assert len(counts) == 256
    p = chi_square_p(counts, counts.sum() / 256 * torch.ones(256))
    assert SIGNIFICANCE < p < 1 - SIGNIFICANCE


@pytest.mark.parametrize("dropout_p", (0.001, 0.1, 0.5, 0.999))
def test_the_rate_is_the_threshold_over_256(dropout_p):
    keep = dropout_keep_mask(1, torch.arange(4), 3, 256, 256, dropout_p)
    kept = 1 - dropout_threshold(dropout_p) / 256
    expected = torch.tensor([1 - kept, kept]) * keep.numel()
    assert chi_square_p(keep.flatten().long().bincount(minlength=2), expected) > SIGNIFICANCE


def test_neighbours_are_independent():
    """The mask does not correlate with itself moved by one along any index it depends on."""
    keep = functools.partial(
        dropout_keep_mask, heads=5, seqlen_q=65, seqlen_k=192, dropout_p=26 / 256
    )
    mask = keep(5, torch.arange(4))
    pairs = [(mask.narrow(d, 0, n - 1), mask.narrow(d, 1, n - 1)) for d, n in enumerate(mask.shape)]
    # the keys that share a Philox call, a word of it, and the next calls
    pairs += [(mask[..., :-step], mask[..., step:]) for step in (2, 7, 8, 16, 32, 64, 128)]
    for other in (6, 5 + 2**32, -5):
        pairs.append((mask, keep(other, torch.arange(4))))
    pairs.append((mask, keep(5, torch.arange(4) + 2**32)))
    rate = 1 - 26 / 256
    for a, b in pairs:
        product = (a.double() - rate) * (b.double() - rate) / (rate * (1 - rate))
        assert abs(product.mean()) * product.numel() ** 0.5 < normal_quantile(len(pairs))


def test_kept_probabilities_are_scaled_by_the_rate_really_used():
    value = torch.ones(1, 1, 40, 1).double()
    query = torch.zeros_like(value)
    out = attention_ref(query, query, value, dropout_p=0.1, seed=2)
    keep = dropout_keep_mask(2, torch.arange(1), 1, 40, 40, 0.1)
    expected = keep.double().sum(-1, keepdim=True) / 40 * 256 / (256 - 26)
    assert (out - expected).abs().max() <= 40 * torch.finfo(torch.float64).eps


# --- packed batches -------------------------------------------------------------------------------

CU_SEQLENS_Q = torch.tensor([0, 3, 3, 8], dtype=torch.int32)
CU_SEQLENS_K = torch.tensor([0, 6, 10, 15], dtype=torch.int32)


def everything(bidirectional: bool = True) -> dict:
    """Every option at once, in fp64; two spare rows of query and one of key."""
    draw = functools.partial(torch.randn, dtype=torch.float64)
    key_mask = torch.ones(16, dtype=torch.bool)
    key_mask[[1, 4, 11]] = False
    return dict(
        query=draw(10, 2, 4),
        key=draw(16, 2, 4),
        value=draw(16, 2, 4),
        weight=draw(8, 2),
        bidirectional=bidirectional,
        key_mask=key_mask,
        is_causal=not bidirectional,
        dropout_p=0.3,
        seed=-9,
        sample_index=torch.tensor([5, 2**40, 1]),
    )


def varlen(query, key, value, weight, bidirectional, **options):
    bias = T5RelativeBias(weight, bidirectional, 5)
    lengths = (CU_SEQLENS_Q, CU_SEQLENS_K, 5, 6)
    return attention_varlen_ref(query, key, value, *lengths, relative_bias=bias, **options)


@pytest.mark.parametrize("bidirectional", (True, False), ids=("full", "causal"))
def test_each_sequence_is_as_if_it_were_alone(bidirectional):
    inputs = everything(bidirectional)
    out = varlen(**inputs)
    for b, (q0, q1, k0, k1) in enumerate(
        zip(CU_SEQLENS_Q, CU_SEQLENS_Q[1:], CU_SEQLENS_K, CU_SEQLENS_K[1:], strict=False)
    ):
        alone = attention_ref(
            inputs["query"][None, q0:q1].transpose(1, 2),
            *(inputs[name][None, k0:k1].transpose(1, 2) for name in ("key", "value")),
            key_mask=inputs["key_mask"][None, k0:k1],
            is_causal=inputs["is_causal"],
            dropout_p=inputs["dropout_p"],
            relative_bias=T5RelativeBias(inputs["weight"], bidirectional, 5),
            seed=inputs["seed"],
            sample_index=inputs["sample_index"][b, None],
        )
        torch.testing.assert_close(out[q0:q1], alone[0].transpose(0, 1))
    assert not out[8:].any()


@pytest.mark.parametrize("bidirectional", (True, False), ids=("full", "causal"))
def test_gradcheck_ragged(bidirectional):
    inputs = everything(bidirectional)
    names = ("query", "key", "value", "weight")
    tensors = [inputs.pop(name).requires_grad_() for name in names]

    def function(*tensors):
        return varlen(**dict(zip(names, tensors, strict=True)), **inputs)

    assert torch.autograd.gradcheck(function, tensors)
