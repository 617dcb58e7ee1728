"""Reference of ``ops.mask_tokens``: the specification, in plain PyTorch without host syncs."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from fastplm.reference.philox import Stream, draw, fixed_point


class MaskedTokens(NamedTuple):
    """What ``ops.mask_tokens`` returns; see there."""

    input_ids: torch.Tensor
    positions: torch.Tensor
    labels: torch.Tensor
    count: torch.Tensor  # type: ignore[assignment]  # tuple.count is of no use here


def fixed_point_plan(
    length: int,
    mlm_probability: float,
    mask_replace_prob: float,
    random_replace_prob: float,
    max_predictions: int | None,
) -> tuple[int, int, int, int]:
    """The probabilities as integers, so that no device's floating point rounds a choice its way.

    Returns:
        capacity: the most tokens that can be chosen in a row.
        quota_scale: ``(n * quota_scale + 2^31) >> 32`` is the share of n, halves rounded up.
        mask_below, random_below: a word below the first makes [MASK], else one below the second a
            random id.
    """
    # Rounded up, or a float just below its decimal, as 0.15 is, would round its halves down.
    quota_scale = math.ceil(mlm_probability * 2**32)
    capacity = max(1, (length * quota_scale + 2**31) >> 32)
    mask_below = fixed_point(mask_replace_prob)
    return (
        capacity if max_predictions is None else max_predictions,
        quota_scale,
        mask_below,
        mask_below + fixed_point(random_replace_prob),
    )


def mask_tokens_ref(
    input_ids: torch.Tensor,
    *,
    vocab_size: int,
    mask_token_id: int,
    maskable: torch.Tensor | None = None,
    mlm_probability: float = 0.15,
    mask_replace_prob: float = 0.8,
    random_replace_prob: float = 0.1,
    max_predictions: int | None = None,
    sample_index: torch.Tensor | None = None,
    seed: int | torch.Tensor,
    step: int = 0,
) -> MaskedTokens:
    """Choose, corrupt and compact the tokens to predict, as ``ops.mask_tokens`` describes it.

    Args:
        input_ids: int64 or int32 [B, T].
        maskable: bool [B, T], True = may be chosen; default all.
        sample_index: int64 [B]; default 0 … B - 1.
        The others as in ``ops.mask_tokens``.

    Returns:
        MaskedTokens of input_ids [B, T], positions [P], labels [P] and count [].
    """
    plan = fixed_point_plan(
        input_ids.shape[1], mlm_probability, mask_replace_prob, random_replace_prob, max_predictions
    )
    return mask_tokens_by_plan(
        input_ids, maskable, sample_index, seed, step, *plan, mask_token_id, vocab_size
    )


def mask_tokens_by_plan(
    input_ids: torch.Tensor,
    maskable: torch.Tensor | None,
    sample_index: torch.Tensor | None,
    seed: int | torch.Tensor,
    step: int,
    capacity: int,
    quota_scale: int,
    mask_below: int,
    random_below: int,
    mask_token_id: int,
    vocab_size: int,
) -> MaskedTokens:
    """``mask_tokens_ref`` with the numbers of ``fixed_point_plan``: what every backend is given."""
    batch, length = input_ids.shape
    device = input_ids.device
    if maskable is None:
        maskable = torch.ones_like(input_ids, dtype=torch.bool)
    if sample_index is None:
        sample_index = torch.arange(batch, device=device)
    sample = sample_index[:, None]
    position = torch.arange(length, device=device)

    n = maskable.sum(-1, keepdim=True)
    quota = (n * quota_scale + 2**31) >> 32
    quota = quota.clamp(min=1).minimum(n).clamp(max=capacity)

    high, low, _, _ = draw(
        seed, Stream.MASK_SELECT, sample_index=sample, position=position, step=step
    )
    # As int64, the unsigned 64-bit key less 2^63: the same order.
    key = (high - 2**31) * 2**32 + low
    by_key = key.argsort(dim=-1, stable=True)
    candidate = maskable.gather(-1, by_key)
    taken = candidate & (candidate.cumsum(-1) <= quota)
    chosen = torch.zeros_like(taken).scatter(-1, by_key, taken)

    decision, choice, _, _ = draw(
        seed, Stream.MASK_REPLACE, sample_index=sample, position=position, step=step
    )
    random_ids = ((choice * vocab_size) >> 32).to(input_ids.dtype)
    corrupted = torch.where(decision < random_below, random_ids, input_ids)
    corrupted = corrupted.masked_fill(decision < mask_below, mask_token_id)

    # A token that is not chosen writes to a slot past the end.
    slots = batch * capacity
    slot = torch.where(chosen.flatten(), chosen.flatten().cumsum(0) - 1, slots)
    flat = torch.arange(batch * length, device=device)
    positions = torch.full((slots + 1,), -1, device=device).scatter(0, slot, flat)
    labels = torch.full((slots + 1,), -100, device=device)
    labels = labels.scatter(0, slot, input_ids.flatten().long())
    return MaskedTokens(
        torch.where(chosen, corrupted, input_ids), positions[:slots], labels[:slots], chosen.sum()
    )
