"""Reference of ``ops.attention`` and ``ops.attention_varlen``, in plain differentiable PyTorch."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fastplm.reference.philox import DROPOUT_ROUNDS, Stream, draw


class T5RelativeBias(NamedTuple):
    """T5's learned bias on the scores: ``weight[bucket(distance), head]``.

    ``distance`` is the position of the key minus that of the query. Key j stands at position j;
    query i at i, or with ``is_causal`` at i + (Tk - Tq), behind the keys of a cache.

    Args:
        weight: [buckets, H], floating; the embedding table of the model.
        bidirectional: half of the buckets are for keys after the query; if False, those keys have
            the bucket of distance 0.
        max_distance: all distances from here on share the last bucket of their side.

    Source: Raffel et al. 2020 (arXiv 1910.10683), §2.1; buckets as in Transformers' T5.
    """

    weight: Tensor
    bidirectional: bool = True
    max_distance: int = 128


def t5_buckets(num_buckets: int, bidirectional: bool, max_distance: int) -> Tensor:
    """The buckets of the distances -max_distance … max_distance: int64 [2 * max_distance + 1].

    Always computed in fp32 on the CPU: where the logarithm falls on a whole number, its rounding
    decides the bucket, and that must not depend on the device.
    """
    distance = torch.arange(-max_distance, max_distance + 1, device="cpu")
    side = torch.zeros_like(distance)
    if bidirectional:
        num_buckets //= 2
        side = (distance > 0) * num_buckets
        distance = distance.abs()
    else:
        distance = (-distance).clamp(min=0)
    exact = num_buckets // 2  # distances below it have a bucket of their own, the others share
    log_ratio = torch.log(distance.float() / exact) / math.log(max_distance / exact)
    shared = exact + (log_ratio.clamp(min=0) * (num_buckets - exact)).long()
    return side + torch.where(distance < exact, distance, shared.clamp(max=num_buckets - 1))


def dropout_threshold(dropout_p: float) -> int:
    """How many of the 256 values of a random byte drop a probability.

    0 only for a probability of 0, and 256 only for 1; the rate really used is ``threshold / 256``.
    """
    if dropout_p in (0.0, 1.0):
        return int(256 * dropout_p)
    return min(max(round(256 * dropout_p), 1), 255)


def dropout_keep_mask(
    seed: int | Tensor,
    sample_index: Tensor,
    heads: int,
    seqlen_q: int,
    seqlen_k: int,
    dropout_p: float,
) -> Tensor:
    """The attention probabilities that are kept: bool [B, H, Tq, Tk].

    One Philox call decides for 16 keys, a byte each. Within every 64 keys, call ``c`` holds the
    keys ``8 n + 2 c`` and ``8 n + 2 c + 1`` for n = 0 … 7, in that order of its bytes: the columns
    that one thread of a tensor-core tile owns, so that no thread draws for another.

    Args:
        seed: int or 0-d int64 tensor.
        sample_index: int64 [B], below 2^63.
        heads, seqlen_q, seqlen_k: H < 2^12, Tq < 2^32, Tk <= 2^20.
        dropout_p: see ``dropout_threshold``.
    """
    device = sample_index.device
    key = torch.arange(seqlen_k, device=device)
    octet, pair = key // 8 % 8, key % 8 // 2
    call = key // 64 * 4 + pair  # [Tk]
    words = draw(
        seed,
        Stream.DROPOUT,
        sample_index=sample_index[:, None, None, None],
        position=torch.arange(seqlen_q, device=device)[:, None],
        step=torch.arange((seqlen_k + 63) // 64 * 4, device=device) << 12
        | torch.arange(heads, device=device)[:, None, None],
        rounds=DROPOUT_ROUNDS,
    )  # four of [B, H, Tq, calls]
    word = torch.stack(words)[octet // 2, :, :, :, call]  # [Tk, B, H, Tq]
    byte = word.permute(1, 2, 3, 0) >> (octet % 2 * 16 + key % 2 * 8) & 0xFF
    return byte >= dropout_threshold(dropout_p)


def attention_ref(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    key_mask: Tensor | None = None,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
    scale: float | None = None,
    relative_bias: T5RelativeBias | None = None,
    seed: int | Tensor | None = None,
    sample_index: Tensor | None = None,
    window: tuple[int | None, int | None] | None = None,
) -> Tensor:
    """``dropout(softmax(scale * Q K^T + bias + mask)) V`` as ``ops.attention`` defines it.

    Args: those of ``ops.attention``; ``dropout_p`` over 0 needs ``seed``.

    Returns:
        [B, H, Tq, D]; a row that may attend to nothing is 0 and passes no gradient.
    """
    seqlen_q, seqlen_k = query.shape[2], key.shape[2]
    distance = _distances(seqlen_q, seqlen_k, query.device)
    distance = distance - (seqlen_k - seqlen_q if is_causal else 0)
    options = is_causal, dropout_p, scale, relative_bias, seed, sample_index, window
    return _attend(query, key, value, distance, key_mask, attn_mask, *options)


def attention_varlen_ref(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    key_mask: Tensor | None = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
    scale: float | None = None,
    relative_bias: T5RelativeBias | None = None,
    seed: int | Tensor | None = None,
    sample_index: Tensor | None = None,
    window: tuple[int | None, int | None] | None = None,
) -> Tensor:
    """``attention_ref`` of every sequence of a ragged batch, as ``ops.attention_varlen`` does.

    Args: those of ``ops.attention_varlen``.

    Returns:
        [Nq, H, D]; rows past ``cu_seqlens_q[-1]`` are 0 and pass no gradient.
    """
    if cu_seqlens_q.numel() == 1:  # the result is that of one sequence of length 0
        cu_seqlens_q, cu_seqlens_k = cu_seqlens_q.expand(2), cu_seqlens_k.expand(2)
    max_seqlen_q, max_seqlen_k = max(max_seqlen_q, 1), max(max_seqlen_k, 1)
    batch, tokens, device = cu_seqlens_q.numel() - 1, query.shape[0], query.device
    rows_q, exists_q = _padded_rows(cu_seqlens_q, max_seqlen_q)  # [B, Tq]
    rows_k, exists_k = _padded_rows(cu_seqlens_k, max_seqlen_k)  # [B, Tk]

    def pad(packed: Tensor, rows: Tensor, exists: Tensor) -> Tensor:  # -> [B, H, T, D]
        if packed.shape[0] == 0:
            packed = nn.functional.pad(packed, (0, 0, 0, 0, 0, 1))
        return packed[rows].masked_fill(~exists[:, :, None, None], 0.0).transpose(1, 2)

    distance = _distances(max_seqlen_q, max_seqlen_k, device)
    if is_causal:
        cached = cu_seqlens_k.diff() - cu_seqlens_q.diff()
        distance = distance - cached[:, None, None, None]  # [B, 1, Tq, Tk]
    query = pad(query, rows_q, exists_q)
    key, value = pad(key, rows_k, exists_k), pad(value, rows_k, exists_k)
    if key_mask is not None:
        exists_k = exists_k & nn.functional.pad(key_mask, (0, 1))[rows_k]
    options = is_causal, dropout_p, scale, relative_bias, seed, sample_index, window
    out = _attend(query, key, value, distance, exists_k, None, *options)
    out = out.transpose(1, 2)  # [B, Tq, H, D]

    row = torch.arange(tokens, device=device)
    sequence = torch.bucketize(row, cu_seqlens_q[1:], right=True).clamp(max=batch - 1)
    position = (row - cu_seqlens_q[sequence]).clamp(max=max_seqlen_q - 1)
    spare = row >= cu_seqlens_q[-1]
    return out[sequence, position].masked_fill(spare[:, None, None], 0.0)


def _padded_rows(cu_seqlens: Tensor, max_seqlen: int) -> tuple[Tensor, Tensor]:
    """(packed row, whether it exists) of the slots of a padded batch, both [B, T]."""
    position = torch.arange(max_seqlen, device=cu_seqlens.device)
    exists = position < cu_seqlens.diff()[:, None]
    return torch.where(exists, cu_seqlens[:-1, None] + position, 0), exists


def _distances(seqlen_q: int, seqlen_k: int, device: torch.device) -> Tensor:
    """[1, 1, Tq, Tk]: the position of the key minus that of the query, both counted from 0."""
    key, query = (torch.arange(size, device=device) for size in (seqlen_k, seqlen_q))
    return (key - query[:, None])[None, None]


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    distance: Tensor,
    key_mask: Tensor | None,
    attn_mask: Tensor | None,
    is_causal: bool,
    dropout_p: float,
    scale: float | None,
    relative_bias: T5RelativeBias | None,
    seed: int | Tensor | None,
    sample_index: Tensor | None,
    window: tuple[int | None, int | None] | None,
    products: Tensor | None = None,
) -> Tensor:
    """Attention of a padded batch; ``distance`` [B | 1, 1, Tq, Tk] is 0 or less for past keys, and
    ``products`` [B, H, Tq, Tk] are added to those of query and key."""
    batch, heads, seqlen_q, head_dim = query.shape
    seqlen_k = key.shape[2]
    scale = head_dim**-0.5 if scale is None else scale
    allowed = distance <= 0 if is_causal else torch.ones_like(distance, dtype=torch.bool)
    left, right = window or (None, None)
    if left is not None:
        allowed = allowed & (distance >= -left)
    if right is not None:
        allowed = allowed & (distance <= right)
    if key_mask is not None:
        allowed = allowed & key_mask[:, None, None, :]
        # A masked key may be NaN, and 0 * NaN is NaN.
        key = key.masked_fill(~key_mask[:, None, :, None], 0.0)
        value = value.masked_fill(~key_mask[:, None, :, None], 0.0)
    if attn_mask is not None:
        allowed = allowed & attn_mask
    alive = allowed.any(-1, keepdim=True)

    scores = torch.matmul(query, key.transpose(-2, -1))  # [B, H, Tq, Tk]
    scores = (scores if products is None else scores + products) * scale
    if relative_bias is not None:
        weight, bidirectional, furthest = relative_bias
        buckets = t5_buckets(weight.shape[0], bidirectional, furthest).to(query.device)
        bucket = buckets[distance.clamp(-furthest, furthest) + furthest]
        # A bucket for every sample even where all are alike: autograd then adds up the table's
        # gradient in one order, and a padded and a ragged batch get the same bits.
        bucket = bucket.expand(batch, 1, seqlen_q, seqlen_k).squeeze(1)
        # Not movedim, which the TorchScript exporter of ONNX writes with an axis of -1.
        scores = scores + weight[bucket].permute(0, 3, 1, 2).to(scores.dtype)
    # Dead rows get finite scores first: softmax over -inf alone is NaN, and so is its gradient.
    scores = scores.masked_fill(~(allowed | ~alive), float("-inf"))
    probs = scores.softmax(-1).masked_fill(~alive, 0.0)
    if dropout_p > 0.0:
        assert seed is not None, "dropout needs a seed"
        if sample_index is None:
            sample_index = torch.arange(batch, device=query.device)
        keep = dropout_keep_mask(seed, sample_index, heads, seqlen_q, seqlen_k, dropout_p)
        kept = 256 - dropout_threshold(dropout_p)
        probs = torch.where(keep, probs * (256 / max(kept, 1)), 0.0)
    return torch.matmul(probs, value)
