"""Reference of ``ops.corrupt_spans``: the specification, in plain PyTorch without host syncs."""

from __future__ import annotations

import math
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

from fastplm._declare import Arg, Size
from fastplm._modes import values_are_known
from fastplm.errors import fail
from fastplm.reference._token_rows import (
    ENDS,
    PER_ROW,
    SEED,
    TOKENS,
    check_row_values,
    padded_rows,
    samples_of,
    share,
)
from fastplm.reference.philox import Stream, draw_words

_SENTINELS = Arg("[K > 0]", (torch.int64,), "Add <extra_id_0>, <extra_id_1>, … to the tokenizer.")
#: The kept tokens draw their keys from here on, the noise tokens from 0: no row has 2^31 tokens.
KEPT_POSITION = 2**31


class CorruptedSpans(NamedTuple):
    """What ``ops.corrupt_spans`` returns; see there."""

    input_ids: Tensor
    labels: Tensor
    input_lengths: Tensor
    label_lengths: Tensor
    dropped: Tensor


class Call(NamedTuple):
    """The arguments of the operator, which are those of ``ops.corrupt_spans`` in integers.

    No EOS is -1, and the scales are those of ``fixed_point_scales``.
    """

    input_ids: Annotated[Tensor, TOKENS]
    lengths: Annotated[Tensor | None, PER_ROW]
    cu_seqlens: Annotated[Tensor | None, ENDS]
    sentinel_ids: Annotated[Tensor, _SENTINELS]
    sample_index: Annotated[Tensor | None, PER_ROW]
    seed: Annotated[Tensor, SEED]
    step: Size
    max_length: Size
    noise_scale: int
    span_scale: int
    eos_token_id: int
    pad_token_id: int

    @property
    def packed(self) -> bool:
        return self.cu_seqlens is not None

    @property
    def scales(self) -> tuple[int, int, int]:
        """What ``span_counts`` takes beside a length."""
        return self.noise_scale, self.span_scale, self.sentinel_ids.shape[0]

    @property
    def widths(self) -> tuple[int, int]:
        """The lengths of the rows of inputs and labels."""
        return output_lengths(self.max_length, *self.scales, self.eos_token_id >= 0)

    def check(self, where: str) -> None:
        check_row_values(where, self, self.max_length)
        if values_are_known(self.sentinel_ids):
            low, fix = int(self.sentinel_ids.min()), "Pass their ids."
            if low < 0:
                fail(where, "sentinel_ids", f"id {low}", "ids from 0 on", fix)


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
    noise = min(max(share(length, noise_scale), 1), length - 1)
    asked = min(max(share(noise, span_scale), 1), noise, length - noise)
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

    Args: those of ``ops.corrupt_spans``.
    """
    return corrupt_spans_by_plan(
        *(input_ids, lengths, cu_seqlens, sentinel_ids, sample_index, seed, step),
        input_ids.shape[-1] if max_seqlen is None else max_seqlen,
        *fixed_point_scales(noise_density, mean_span_length),
        *(-1 if eos_token_id is None else eos_token_id, pad_token_id),
    )


def corrupt_spans_by_plan(*arguments: Any) -> CorruptedSpans:
    """``corrupt_spans_ref`` of the fields of ``Call``: what every backend is given."""
    call = Call(*arguments)
    tokens, n = padded_rows(call, call.max_length)
    tokens = tokens.long()
    batch, device = tokens.shape[0], tokens.device
    sentinels, has_eos = call.sentinel_ids.shape[0], call.eos_token_id >= 0

    noise = share(n, call.noise_scale).clamp(min=1).minimum(n - 1).clamp(min=0)
    kept = n - noise
    asked = share(noise, call.span_scale).clamp(min=1).minimum(noise).minimum(kept)
    spans = asked.clamp(max=sentinels)

    # The part that each token is in, and how many tokens lie before a part or up to its end.
    noise_part = _random_parts(call, noise, spans, 0)
    kept_part = _random_parts(call, kept, spans, KEPT_POSITION)
    most_spans = span_counts(call.max_length, *call.scales)[1]
    part = torch.arange(max(most_spans, 1), device=device).repeat(batch, 1)
    noise_before = torch.searchsorted(noise_part, part)
    kept_until = torch.searchsorted(kept_part, part, right=True)

    # Row: kept 0, noise 0, kept 1, …; input: kept 0, sentinel 0, kept 1, …; labels: sentinel 0, …
    place = torch.arange(call.max_length, device=device)
    part_of = kept_part.clamp(max=part.shape[1] - 1)
    kept_tokens = _take(tokens, place + noise_before.gather(-1, part_of))
    kept_column = _or_outside(place + part_of, place < kept)
    part_of = noise_part.clamp(max=part.shape[1] - 1)
    noise_tokens = _take(tokens, place + kept_until.gather(-1, part_of))
    noise_column = _or_outside(place + part_of + 1, place < noise)

    sentinel = call.sentinel_ids[: part.shape[1]].expand(batch, -1)
    is_span = part < spans
    ends = torch.full_like(n, has_eos, dtype=torch.bool)
    eos = torch.full_like(n, call.eos_token_id)
    input_width, label_width = call.widths
    input_row = _scatter(
        torch.full((batch, input_width), call.pad_token_id, device=device),
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
        input_row.to(call.input_ids.dtype),
        label_row,
        (kept + spans + has_eos).squeeze(-1),
        (noise + spans + has_eos).squeeze(-1),
        (asked - spans).sum(),
    )


def _random_parts(call: Call, size: Tensor, parts: Tensor, position: int) -> Tensor:
    """Cut ``size`` [B, 1] items in ``parts`` [B, 1] parts, every composition equally likely: int64
    [B, T], the part that each item is in, ascending; T from ``size`` on."""
    width, sample = call.max_length, samples_of(call)
    item = torch.arange(width, device=size.device)
    numbers: dict[str, Any] = {"sample_index": sample, "first_quad": position, "step": call.step}
    key = draw_words(call.seed, Stream.SPAN, width, **numbers)
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
