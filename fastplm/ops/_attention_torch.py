"""The "torch" backend of attention: for CPUs where csrc/ is not built, and for fp64.

Every call becomes a dense batch. A ragged batch is padded to its ``max_seqlen`` first, and keys
after the last one that any query may attend to are cut off. So a ragged batch and the same batch
padded to that length run the same products on the same shapes, and get the same bits.

Without dropout and bias, PyTorch's flash kernel for CPUs computes that batch. With either of them
the formula below is computed, in chunks of a few megabytes of scores:

    S = scale * Q K^T + bias + mask      P = softmax(S)      O = c * drop(P) V
    dV = c * drop(P)^T dO     dP = c * drop(dO V^T)     dS = P * (dP - rowsum(P * dP))
    dQ = scale * dS K         dK = scale * dS^T Q       dbias = sums of dS over equal distances

Here c is 1 / (the probability of keeping). The backward computes P again from whole rows, as the
forward did, so it needs no statistics.

fp16 is computed in fp32, as CPUs multiply fp16 slowly. bf16 is multiplied in bf16, except for the
scores; softmax and sums use fp32.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from fastplm.ops._attention_call import (
    Call,
    check_lengths_on_cpu,
    empty_like_projection,
    projection_layout,
    stored_once,
)
from fastplm.reference.attention import dropout_threshold
from fastplm.reference.philox import DROPOUT_ROUNDS, Stream, draw

#: Scores in a chunk: enough to make the time of calling PyTorch small, few enough for a cache.
_CHUNK_SCORES = 2**19

_CACHE_LINE = 64  # bytes; PyTorch aligns new tensors to it


class _Rows(NamedTuple):
    """Where the rows of a packed batch are in the padded batch. A slot is a row of the latter."""

    source: Tensor  # int64 [B * T], the packed row of a slot, 0 if it has none
    slots: Tensor  # int64 [rows in use], the slot of a packed row
    missing: Tensor  # int64, the slots without a row
    exists: Tensor  # bool [B, T], whether a slot has a row


class _Batch(NamedTuple):
    """A call as a dense batch. Masked keys and missing rows are 0, so that they hold no NaN."""

    query: Tensor  # [B, H, Tq, D]
    key: Tensor  # [B, H, Tk, D], up to the last key that is not masked
    value: Tensor
    key_mask: Tensor | None  # bool [B, Tk], None = all
    attn_mask: Tensor | None  # bool [B | 1, H | 1, Tq | 1, Tk], None = all
    shift: Tensor | None  # int64 [B | 1], causal: query i sees the keys j <= i + shift
    rows_q: _Rows | None  # None: the call is not packed
    rows_k: _Rows | None


def attention_fwd(call: Call, stats: Tensor) -> tuple[Tensor, Tensor]:
    """(out, stats); ``stats`` is filled with the flash kernel's log-sum-exp, or with 0."""
    stats.zero_()
    if _is_empty(call):
        return empty_like_projection(call.query).zero_(), stats
    batch = _cpu_batch(call)
    if batch.key.shape[2] == 0:
        return empty_like_projection(call.query).zero_(), stats
    if _explicit(call):
        return _restore(_explicit_fwd(call, batch), batch.rows_q, call.query), stats
    mask, dead, is_causal = _flash_mask(batch)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *batch[:3], 0.0, is_causal, attn_mask=mask, scale=call.scale
    )
    if dead is not None:
        out.masked_fill_(dead, 0.0)
    lse = lse.transpose(0, 1).flatten(1)  # [H, B * Tq]
    if batch.rows_q is not None:
        lse = lse.index_select(1, batch.rows_q.slots)
    stats[0, :, : lse.shape[1]] = lse
    return _restore(out, batch.rows_q, call.query), stats


def attention_bwd(
    call: Call, grad_out: Tensor, out: Tensor, stats: Tensor, bias_grad: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, key, value and of the bias table (no element without ``bias_grad``)."""
    grad_weight = call.query.new_empty(0)
    if bias_grad:
        assert call.bias_weight is not None
        grad_weight = call.bias_weight.new_zeros(call.bias_weight.shape)
    batch = None if _is_empty(call) else _cpu_batch(call)
    if batch is None or batch.key.shape[2] == 0:
        dq, dk, dv = (empty_like_projection(tensor).zero_() for tensor in call[:3])
        return dq, dk, dv, grad_weight
    grad_out = _pad(grad_out, batch.rows_q)
    if _explicit(call):
        grads, by_bucket = _explicit_bwd(call, batch, grad_out, bias_grad)
        if by_bucket is not None:
            grad_weight.copy_(by_bucket)
    else:
        grads = _flash_bwd(call, batch, grad_out, _pad(out, batch.rows_q), stats)
    dq, dk, dv = (
        _restore(grad, rows, like)
        for grad, rows, like in zip(
            grads, (batch.rows_q, batch.rows_k, batch.rows_k), call[:3], strict=True
        )
    )
    return dq, dk, dv, grad_weight


def _explicit(call: Call) -> bool:
    return call.bias_weight is not None or call.seed is not None


def _is_empty(call: Call) -> bool:
    return 0 in (
        *call.query.shape,
        *call.key.shape,
        call.batch,
        call.max_seqlen_q,
        call.max_seqlen_k,
    )


# --- layouts --------------------------------------------------------------------------------------


def _cpu_batch(call: Call) -> _Batch:
    query, key, value, key_mask, attn_mask = call[:5]
    attn_mask = None if attn_mask is None else stored_once(attn_mask)
    rows_q = rows_k = None
    if call.packed:
        assert call.cu_seqlens_q is not None and call.cu_seqlens_k is not None
        rows_q = _cpu_rows("q", call.cu_seqlens_q, query.shape[0], call.max_seqlen_q)
        rows_k = _cpu_rows("k", call.cu_seqlens_k, key.shape[0], call.max_seqlen_k)
        if key_mask is not None:
            key_mask = rows_k.exists & key_mask[rows_k.source].view(rows_k.exists.shape)
        else:
            key_mask = rows_k.exists
        shift = (call.cu_seqlens_k.diff() - call.cu_seqlens_q.diff()).long()
        if (shift == shift[0]).all():
            shift = shift[:1]
        query, key, value = _pad(query, rows_q), _pad(key, rows_k), _pad(value, rows_k)
    else:
        shift = torch.tensor([call.max_seqlen_k - call.max_seqlen_q], device="cpu")
        query, key, value = _aligned(query), _aligned(key), _aligned(value)
    if key_mask is not None:
        visible = key_mask.any(0).nonzero()
        seqlen_k = int(visible[-1]) + 1 if visible.numel() else 0
        key, value, key_mask = key[:, :, :seqlen_k], value[:, :, :seqlen_k], key_mask[:, :seqlen_k]
        attn_mask = None if attn_mask is None else attn_mask[..., :seqlen_k]
        if key_mask.all():
            key_mask = None  # without masked keys, the unmasked kernel is faster
        else:  # 0 * NaN is NaN, so masked keys must be 0
            hidden = ~key_mask[:, None, :, None]
            key, value = key.masked_fill(hidden, 0.0), value.masked_fill(hidden, 0.0)
    causal_shift = shift if call.is_causal else None
    return _Batch(query, key, value, key_mask, attn_mask, causal_shift, rows_q, rows_k)


def _cpu_rows(name: str, cu_seqlens: Tensor, count: int, max_seqlen: int) -> _Rows:
    # In a trace the public function could not check the lengths.
    check_lengths_on_cpu(name, cu_seqlens, count, max_seqlen)
    position = torch.arange(max_seqlen, device="cpu")
    exists = position < cu_seqlens.diff()[:, None]
    source = torch.where(exists, cu_seqlens[:-1, None] + position, 0).flatten()
    slots, missing = (which.flatten().nonzero().flatten() for which in (exists, ~exists))
    return _Rows(source, slots, missing, exists)


def _aligned(tensor: Tensor) -> Tensor:
    """The tensor; if some row is not aligned, a copy with the memory layout of a padded batch.

    CPU libraries may sum a matrix product in another order if a row does not start at a cache line.
    """
    steps = (
        tensor.data_ptr(),
        *(stride * tensor.element_size() for stride in tensor.stride()[:-1]),
    )
    if all(step % _CACHE_LINE == 0 for step in steps):
        return tensor
    return tensor.transpose(1, 2).clone(memory_format=torch.contiguous_format).transpose(1, 2)


def _pad(tensor: Tensor, rows: _Rows | None) -> Tensor:
    """[N, H, D] -> [B, H, T, D], stored as [B, T, H, D]; slots without a row are 0."""
    if rows is None:
        return _aligned(tensor)
    padded = tensor.index_select(0, rows.source)
    padded.index_fill_(0, rows.missing, 0.0)
    return padded.unflatten(0, rows.exists.shape).transpose(1, 2)


def _restore(tensor: Tensor, rows: _Rows | None, like: Tensor) -> Tensor:
    """A dense result in the shape and layout of ``like``; rows without a value are 0."""
    if rows is None:
        if tensor.shape == like.shape:
            return projection_layout(tensor)
        whole = empty_like_projection(like).zero_()
        whole[:, :, : tensor.shape[2]] = tensor
        return whole
    if tensor.shape[2] < rows.exists.shape[1]:  # keys that no query attends to were cut off
        cut = rows.exists.shape[1] - tensor.shape[2]
        tensor = torch.nn.functional.pad(tensor, (0, 0, 0, cut))
    packed = tensor.transpose(1, 2).flatten(0, 1).index_select(0, rows.slots)
    if packed.shape[0] == like.shape[0]:
        return packed
    whole = like.new_zeros(like.shape)
    whole[: packed.shape[0]] = packed
    return whole


def _mask(
    batch: _Batch, dtype: torch.dtype, samples: slice = slice(None), heads: slice = slice(None)
) -> tuple[Tensor | None, Tensor | None]:
    """(additive mask [B | 1, H | 1, Tq | 1, Tk], dead rows [B | 1, H | 1, Tq | 1, 1]), or None.

    A dead row may attend to nothing. Its additive mask is 0, as a softmax over only -inf is NaN.
    """
    allowed = None
    if batch.key_mask is not None:
        allowed = batch.key_mask[samples, None, None, :]
    if batch.shift is not None:
        shift = batch.shift[samples] if batch.shift.numel() > 1 else batch.shift
        sizes = batch.key.shape[2], batch.query.shape[2]
        key, query = (torch.arange(size, device="cpu") for size in sizes)
        distance = key - query[:, None]
        causal = distance[None, None] <= shift[:, None, None, None]
        allowed = causal if allowed is None else causal & allowed
    if batch.attn_mask is not None:
        one_sample, one_head = (size == 1 for size in batch.attn_mask.shape[:2])
        full = slice(None)
        attn_mask = batch.attn_mask[full if one_sample else samples, full if one_head else heads]
        allowed = attn_mask if allowed is None else attn_mask & allowed
    if allowed is None:
        return None, None
    dead = ~allowed.any(-1, keepdim=True)
    additive = torch.zeros(allowed.shape, dtype=dtype, device="cpu")
    additive.masked_fill_(~(allowed | dead), float("-inf"))
    return additive, dead if bool(dead.any()) else None


# --- neither dropout nor bias: PyTorch's kernel ---------------------------------------------------


def _flash_mask(batch: _Batch) -> tuple[Tensor | None, Tensor | None, bool]:
    """The results of ``_mask``, and whether the kernel's own causal mask is used instead."""
    unmasked = batch.key_mask is None and batch.attn_mask is None
    if unmasked and batch.shift is not None and not batch.shift.any():
        return None, None, True
    return *_mask(batch, batch.query.dtype), False


def _flash_bwd(
    call: Call, batch: _Batch, grad_out: Tensor, out: Tensor, stats: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    mask, dead, is_causal = _flash_mask(batch)
    if dead is not None:
        grad_out = grad_out.masked_fill(dead, 0.0)
    lse = stats[0]  # [H, rows]
    if batch.rows_q is not None:
        slots = batch.rows_q.slots
        padded = lse.new_zeros(lse.shape[0], batch.rows_q.exists.numel())
        lse = padded.index_copy_(1, slots, lse[:, : slots.numel()])
    lse = lse.unflatten(1, (batch.query.shape[0], -1)).transpose(0, 1).contiguous()
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad_out, *batch[:3], out, lse, 0.0, is_causal, attn_mask=mask, scale=call.scale
    )


# --- dropout or bias: the formula, over chunks ----------------------------------------------------


class _Chunk:
    """Some heads of some samples, flattened to n. Forward and backward compute the same values."""

    def __init__(self, call: Call, batch: _Batch, samples: slice, heads: slice) -> None:
        self.call, self.batch, self.where = call, batch, (samples, heads)
        self.query, self.key, self.value = (self.part(tensor) for tensor in batch[:3])
        self.rescale = 256 / max(256 - dropout_threshold(call.dropout_p), 1)  # c

    def part(self, tensor: Tensor) -> Tensor:
        """The chunk's part of a [B, H, T, D] tensor as [n, T, D], contiguous."""
        tensor = tensor[self.where]
        if tensor.dtype is torch.float16:
            tensor = tensor.float()
        return tensor.flatten(0, 1).contiguous()

    def write(self, target: Tensor, part: Tensor) -> None:
        """Write [n, T, D] into the chunk's part of a [B, H, T, D] tensor."""
        target[self.where] = part.unflatten(0, self._outer(target))

    def _outer(self, tensor: Tensor) -> torch.Size:
        return tensor[self.where].shape[:2]

    def probs(self) -> Tensor:
        """P [n, Tq, Tk] in fp32 (fp64 for fp64)."""
        query, key, (samples, heads) = self.query, self.key.transpose(1, 2), self.where
        dtype = torch.promote_types(query.dtype, torch.float32)
        scores = query.new_empty(query.shape[0], query.shape[1], key.shape[2], dtype=dtype)
        view = scores.unflatten(0, self._outer(self.batch.query))  # [samples, heads, Tq, Tk]
        mask, dead = _mask(self.batch, dtype, samples, heads)
        if self.call.bias_weight is not None:
            bias = _bias_lines(self.call, self.batch, samples)[:, heads].to(dtype)
            # Window s of a line holds the bias of query Tq - 1 - s.
            view.copy_(bias.unfold(-1, key.shape[2], 1).flip(-2))
            if mask is not None:
                view.add_(mask)
        else:
            view.copy_(scores.new_zeros(()) if mask is None else mask)
        # In fp32 for bf16, too: 16-bit scores would be rounded before the exponential.
        scores.baddbmm_(query.to(dtype), key.to(dtype), alpha=self.call.scale)
        probs = scores.softmax(-1)
        if dead is not None:
            probs.view(view.shape).masked_fill_(dead, 0.0)
        return probs

    def dropped(self) -> Tensor | None:
        """bool [n, Tq, Tk], or None without dropout."""
        call, (samples, heads) = self.call, self.where
        if call.seed is None:
            return None
        index = call.sample_index
        if index is None:
            index = torch.arange(self.batch.query.shape[0], device="cpu")
        drop = _dropout_mask(
            call.seed,
            index[samples],
            torch.arange(self.batch.query.shape[1], device="cpu")[heads],
            self.query.shape[1],
            self.key.shape[1],
            dropout_threshold(call.dropout_p),
        )
        return drop.flatten(0, 1)


def _chunks(call: Call, batch: _Batch) -> Iterator[_Chunk]:
    count, heads = batch.query.shape[:2]
    scores = batch.query.shape[2] * batch.key.shape[2]
    heads_each = min(max(_CHUNK_SCORES // scores, 1), heads)
    samples_each = max(_CHUNK_SCORES // (scores * heads), 1)
    for sample in range(0, count, samples_each):
        for head in range(0, heads, heads_each):
            yield _Chunk(
                call, batch, slice(sample, sample + samples_each), slice(head, head + heads_each)
            )


def _explicit_fwd(call: Call, batch: _Batch) -> Tensor:
    out = empty_like_projection(batch.query)
    for chunk in _chunks(call, batch):
        probs, drop = chunk.probs(), chunk.dropped()
        if drop is not None:
            probs.masked_fill_(drop, 0.0)
        chunk.write(out, _product(probs.to(chunk.value.dtype), chunk.value, chunk.rescale))
    return out


def _explicit_bwd(
    call: Call, batch: _Batch, grad_out: Tensor, bias_grad: bool
) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor | None]:
    dq = empty_like_projection(batch.query)
    dk, dv = empty_like_projection(batch.key), empty_like_projection(batch.value)
    lines = None
    for chunk in _chunks(call, batch):
        upstream = chunk.part(grad_out)
        dtype = upstream.dtype
        probs, drop = chunk.probs(), chunk.dropped()
        grad_probs = _product(upstream, chunk.value.transpose(1, 2), chunk.rescale).to(probs.dtype)
        used = probs
        if drop is not None:
            used = probs.masked_fill(drop, 0.0)
            grad_probs.masked_fill_(drop, 0.0)
        chunk.write(dv, _product(used.to(dtype).transpose(1, 2), upstream, chunk.rescale))
        ds = torch.ops.aten._softmax_backward_data(grad_probs, probs, -1, probs.dtype)
        if bias_grad:
            if lines is None:
                length = ds.shape[1] + ds.shape[2] - 1
                lines = ds.new_zeros(*batch.query.shape[:2], length)
            lines[chunk.where] = _distance_sums(ds).view_as(lines[chunk.where])
        ds = ds.to(dtype)
        chunk.write(dq, _product(ds, chunk.key, call.scale))
        chunk.write(dk, _product(ds.transpose(1, 2), chunk.query, call.scale))
    if lines is None:
        return (dq, dk, dv), None
    assert call.bias_weight is not None
    buckets = _line_buckets(call, batch)  # [B | 1, length]
    # fp64: the gradients of a softmax sum to 0, so cancellation may leave few correct digits.
    lines = lines.double().sum_to_size(buckets.shape[0], *lines.shape[1:])
    by_bucket = lines.new_zeros(call.bias_weight.shape)
    by_bucket.index_add_(0, buckets.flatten(), lines.transpose(1, 2).flatten(0, 1))
    return (dq, dk, dv), by_bucket


def _product(a: Tensor, b: Tensor, factor: float) -> Tensor:
    return torch.baddbmm(a.new_empty(1, 1, 1), a, b, beta=0, alpha=factor)


def _line_buckets(call: Call, batch: _Batch, samples: slice = slice(None)) -> Tensor:
    """int64 [B | 1, Tq + Tk - 1]: the bucket of key j and query i, at index j - i + Tq - 1."""
    assert call.buckets is not None
    seqlen_q, seqlen_k = batch.query.shape[2], batch.key.shape[2]
    distance = torch.arange(1 - seqlen_q, seqlen_k, device="cpu")[None, :]
    if batch.shift is not None:
        shift = batch.shift[samples] if batch.shift.numel() > 1 else batch.shift
        distance = distance - shift[:, None]
    furthest = call.bias_max_distance
    return call.buckets[distance.clamp(-furthest, furthest) + furthest]


def _bias_lines(call: Call, batch: _Batch, samples: slice) -> Tensor:
    """[B | 1, H, Tq + Tk - 1]; see ``_line_buckets``."""
    assert call.bias_weight is not None
    return call.bias_weight[_line_buckets(call, batch, samples)].movedim(-1, 1)


def _distance_sums(ds: Tensor) -> Tensor:
    """[n, Tq, Tk] -> [n, Tq + Tk - 1]: sums over all i, j with equal j - i, in ascending order."""
    count, seqlen_q, seqlen_k = ds.shape
    length = seqlen_q + seqlen_k - 1
    # Each row is shifted one to the left of the row above, so equal j - i share a column.
    skewed = ds.new_zeros(count, seqlen_q, length)
    skewed.as_strided(ds.shape, (seqlen_q * length, length - 1, 1), seqlen_q - 1).copy_(ds)
    return skewed.sum(1)


def _dropout_mask(
    seed: Tensor, sample_index: Tensor, heads: Tensor, seqlen_q: int, seqlen_k: int, threshold: int
) -> Tensor:
    """The negation of ``dropout_keep_mask``: bool [B, H, Tq, Tk], for the heads with these indices.

    One call of the random generator gives 16 bytes: 8 pairs of neighbouring keys. The next call
    belongs to the next pair, so the pairs of one call are 4 pairs apart. On a little-endian machine
    the pairs can be read as 16-bit numbers, and a transposition puts the keys in order.
    """
    groups = (seqlen_k + 63) // 64
    words = draw(
        seed,
        Stream.DROPOUT,
        sample_index=sample_index[:, None, None, None],
        position=torch.arange(seqlen_q, device="cpu")[:, None],
        step=torch.arange(4 * groups, device="cpu") << 12 | heads[:, None, None],
        rounds=DROPOUT_ROUNDS,
    )  # four of [B, H, Tq, 4 * groups]
    calls = torch.stack((words[0] | words[1] << 32, words[2] | words[3] << 32), -1)
    pairs = calls.view(torch.int16).unflatten(-2, (groups, 4))  # [B, H, Tq, groups, 4, 8]
    random = pairs.transpose(-1, -2).flatten(-3).view(torch.uint8)  # [B, H, Tq, 64 * groups]
    return random[..., :seqlen_k] <= threshold - 1
