"""Reference of ``ops.corrupt_spans``: the specification, in plain PyTorch without host syncs."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from fastplm.reference.philox import Stream, draw

#: The kept tokens draw their keys from here on, the noise tokens from 0: no row has 2^31 tokens.
KEPT_POSITION = 2**31


class CorruptedSpans(NamedTuple):
    """What ``ops.corrupt_spans`` returns; see there."""

    input_ids: Tensor
    labels: Tensor
    input_lengths: Tensor
    label_lengths: Tensor
    dropped: Tensor


def fixed_point_scales(noise_density: float, mean_span_length: float) -> tuple[int, int]:
    """The density and the spans per noise token times 2^32, so that all counting is in integers.

    Rounded up: the float 0.15 is below the decimal 0.15, so halves would be rounded down.
    """
    return math.ceil(noise_density * 2**32), math.ceil(2**32 / mean_span_length)


def span_counts(
    length: int, noise_scale: int, span_scale: int, sentinels: int
) -> tuple[int, int, int]:
    """(noise tokens, spans, spans asked for) of a row of ``length`` tokens.

    One more token in a row adds one to the noise tokens or to the kept tokens, so the number of
    spans does not fall. Therefore both outputs of a longer row are at least as long.
    """
    if length < 2:
        return 0, 0, 0
    noise = min(max(_share(length, noise_scale), 1), length - 1)
    asked = min(max(_share(noise, span_scale), 1), noise, length - noise)
    return noise, min(asked, sentinels), asked


def output_lengths(
    length: int, noise_scale: int, span_scale: int, sentinels: int, has_eos: bool
) -> tuple[int, int]:
    """(input tokens, label tokens) that a row of ``length`` tokens becomes."""
    noise, spans, _ = span_counts(length, noise_scale, span_scale, sentinels)
    eos = int(has_eos)  # torch 2.11 cannot add a bool to a symbolic length
    return length - noise + spans + eos, noise + spans + eos


def corrupt_spans_ref(
    input_ids: Tensor,
    *,
    sentinel_ids: Tensor,
    eos_token_id: int | None = None,
    pad_token_id: int = 0,
    noise_density: float = 0.15,
    mean_span_length: float = 3.0,
    lengths: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    sample_index: Tensor | None = None,
    seed: int | Tensor,
    step: int = 0,
) -> CorruptedSpans:
    """Replace spans of tokens by sentinels, as ``ops.corrupt_spans`` describes it.

    Args:
        input_ids: int64 or int32, [B, T] or, with ``cu_seqlens`` and ``max_seqlen``, [N].
        The others as in ``ops.corrupt_spans``.

    Returns:
        CorruptedSpans of input_ids [B, Ti], labels [B, To], input_lengths [B], label_lengths [B]
        and dropped [].
    """
    return corrupt_spans_by_plan(
        input_ids,
        lengths,
        cu_seqlens,
        sentinel_ids,
        sample_index,
        seed,
        step,
        input_ids.shape[-1] if max_seqlen is None else max_seqlen,
        *fixed_point_scales(noise_density, mean_span_length),
        -1 if eos_token_id is None else eos_token_id,
        pad_token_id,
    )


def corrupt_spans_by_plan(
    input_ids: Tensor,
    lengths: Tensor | None,
    cu_seqlens: Tensor | None,
    sentinel_ids: Tensor,
    sample_index: Tensor | None,
    seed: int | Tensor,
    step: int,
    max_length: int,
    noise_scale: int,
    span_scale: int,
    eos_token_id: int,
    pad_token_id: int,
) -> CorruptedSpans:
    """``corrupt_spans_ref`` in the integers that every backend is given; no EOS is -1."""
    tokens, n = _padded(input_ids, lengths, cu_seqlens, max_length)
    batch, device = tokens.shape[0], tokens.device
    if sample_index is None:
        sample_index = torch.arange(batch, device=device)
    sentinels, has_eos = sentinel_ids.shape[0], eos_token_id >= 0

    noise = _share(n, noise_scale).clamp(min=1).minimum(n - 1).clamp(min=0)
    kept = n - noise
    asked = _share(noise, span_scale).clamp(min=1).minimum(noise).minimum(kept)
    spans = asked.clamp(max=sentinels)

    # The part that each token is in, and how many tokens lie before a part or up to its end.
    random = (seed, sample_index, step)
    noise_part = _random_parts(noise, spans, max_length, 0, *random)
    kept_part = _random_parts(kept, spans, max_length, KEPT_POSITION, *random)
    most_spans = span_counts(max_length, noise_scale, span_scale, sentinels)[1]
    part = torch.arange(max(most_spans, 1), device=device).repeat(batch, 1)
    noise_before = torch.searchsorted(noise_part, part)
    kept_until = torch.searchsorted(kept_part, part, right=True)

    # Row: kept 0, noise 0, kept 1, …; input: kept 0, sentinel 0, kept 1, …; labels: sentinel 0, …
    place = torch.arange(max_length, device=device)
    part_of = kept_part.clamp(max=part.shape[1] - 1)
    kept_tokens = _take(tokens, place + noise_before.gather(-1, part_of))
    kept_column = _or_outside(place + part_of, place < kept)
    part_of = noise_part.clamp(max=part.shape[1] - 1)
    noise_tokens = _take(tokens, place + kept_until.gather(-1, part_of))
    noise_column = _or_outside(place + part_of + 1, place < noise)

    sentinel = sentinel_ids[: part.shape[1]].expand(batch, -1)
    is_span = part < spans
    ends = torch.full_like(n, has_eos, dtype=torch.bool)
    eos = torch.full_like(n, eos_token_id)
    input_width, label_width = output_lengths(
        max_length, noise_scale, span_scale, sentinels, has_eos
    )
    input_row = _scatter(
        torch.full((batch, input_width), pad_token_id, device=device),
        (kept_column, kept_tokens),
        (_or_outside(kept_until + part, is_span), sentinel),
        (_or_outside(kept + spans, ends), eos),
    )
    label_row = _scatter(
        torch.full((batch, label_width), -100, device=device),
        (noise_column, noise_tokens),
        (_or_outside(noise_before + part, is_span), sentinel),
        (_or_outside(noise + spans, ends), eos),
    )
    return CorruptedSpans(
        input_row.to(input_ids.dtype),
        label_row,
        (kept + spans + has_eos).squeeze(-1),
        (noise + spans + has_eos).squeeze(-1),
        (asked - spans).sum(),
    )


def _share(n, scale):
    """``n * scale / 2^32``, halves rounded up; of ints or of tensors."""
    return (n * scale + 2**31) >> 32


def _padded(
    input_ids: Tensor, lengths: Tensor | None, cu_seqlens: Tensor | None, max_length: int
) -> tuple[Tensor, Tensor]:
    """The rows as int64 [B, T] and their lengths [B, 1]; boundaries are held to what is there."""
    if cu_seqlens is None:
        if lengths is None:
            lengths = torch.full((input_ids.shape[0],), max_length, device=input_ids.device)
        return input_ids.long(), lengths.clamp(0, max_length)[:, None]
    size = input_ids.shape[0]
    bounds = cu_seqlens.long().clamp(0, size)
    begin = bounds[:-1, None]
    n = (bounds[1:, None] - begin).clamp(0, max_length)
    column = begin + torch.arange(max_length, device=input_ids.device)
    return torch.nn.functional.pad(input_ids.long(), (0, 1))[column.clamp(max=size)], n


def _random_parts(
    size: Tensor,
    parts: Tensor,
    width: int,
    position: int,
    seed: int | Tensor,
    sample_index: Tensor,
    step: int,
) -> Tensor:
    """Cut ``size`` [B, 1] items in ``parts`` [B, 1] parts, every composition equally likely.

    Returns:
        int64 [B, width], the part that each item is in, ascending; ``width`` from ``size`` on.
    """
    item = torch.arange(width, device=size.device)
    quads = torch.arange(position, position + (width + 3) // 4, device=size.device)
    words = draw(seed, Stream.SPAN, sample_index=sample_index[:, None], position=quads, step=step)
    key = torch.stack(words, -1).flatten(1)[:, :width]
    # Boundary i lies between the items i and i + 1; those with the smallest keys are cut.
    by_key = key.masked_fill(item >= size - 1, 2**32).argsort(dim=-1, stable=True)
    cut = torch.zeros_like(key).scatter(-1, by_key, (item < parts - 1).long())
    part = cut.cumsum(-1) - cut
    return torch.where(item < size, part, width)


def _take(tokens: Tensor, place: Tensor) -> Tensor:
    return tokens.gather(-1, place.clamp(max=max(tokens.shape[1] - 1, 0)))


def _or_outside(column: Tensor, inside: Tensor) -> Tensor:
    return torch.where(inside, column, -1)


def _scatter(row: Tensor, *pieces: tuple[Tensor, Tensor]) -> Tensor:
    """Write (columns, values) into the rows; column -1 is not written."""
    width = row.shape[1]
    row = torch.nn.functional.pad(row, (0, 1))
    for column, value in pieces:
        row = row.scatter(-1, column.remainder(width + 1), value)
    return row[:, :width].contiguous()
