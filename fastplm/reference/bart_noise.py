"""Reference of ``ops.bart_noise``: the specification, in plain PyTorch without host syncs."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

from fastplm._declare import Arg, Size
from fastplm.errors import fail
from fastplm.reference._token_rows import (
    ENDS,
    IDS,
    PER_ROW,
    SEED,
    TOKENS,
    check_row_values,
    check_token_ids,
    is_one_of,
    ordinary_id,
    padded_rows,
    samples_of,
    share,
)
from fastplm.reference.philox import Stream, choice, draw, draw_words, fixed_point

#: Where the counters of a stream begin, after those from 0. Stream INFILL draws the lengths of
#: spans, then their layout, then which of them is last. Stream ORDER draws which sentences move,
#: then their order, then the rotation.
SECOND_DRAW, THIRD_DRAW = 1 << 30, 1 << 31
#: A row with m tokens to cover has at most 2 m + 16 spans.
SPARE_SPANS = 16
#: So many fields at the end of ``Call`` are shares, and the mean length of a span.
SHARES = 7


class NoisedText(NamedTuple):
    """What ``ops.bart_noise`` returns; see there."""

    input_ids: Tensor
    lengths: Tensor
    dropped: Tensor


class NoisePlan(NamedTuple):
    """The probabilities of a call as integers, so that no choice depends on rounding.

    ``(n * scale + 2^31) >> 32`` is a share of n, halves rounded up; a word below a threshold is an
    event. A span's length is the number of thresholds that its word is not below.
    """

    infill_scale: int
    span_below: tuple[int, ...]
    permute_scale: int
    rotate_below: int
    delete_below: int
    noise_below: int
    random_below: int


@functools.lru_cache(maxsize=256)
def noise_plan(
    mask_probability: float,
    delete_probability: float,
    infill_probability: float,
    poisson_lambda: float,
    permute_sentences: float,
    rotate_probability: float,
    random_replace_prob: float,
) -> NoisePlan:
    """The integers that every backend is given."""
    delete_below = fixed_point(delete_probability)
    return NoisePlan(
        # Rounded up: the float 0.3 is below the decimal 0.3, so halves would be rounded down.
        infill_scale=math.ceil(infill_probability * 2**32),
        span_below=poisson_thresholds(poisson_lambda),
        permute_scale=math.ceil(permute_sentences * 2**32),
        rotate_below=fixed_point(rotate_probability),
        delete_below=delete_below,
        noise_below=delete_below + fixed_point(mask_probability),
        random_below=fixed_point(random_replace_prob),
    )


def poisson_thresholds(poisson_lambda: float) -> tuple[int, ...]:
    """``round(P(X <= k) * 2^32)`` for k = 0, 1, … while a uint32 word can reach it."""
    probability = cumulated = math.exp(-poisson_lambda)
    thresholds: list[int] = []
    while fixed_point(cumulated) < 2**32:
        thresholds.append(fixed_point(cumulated))
        probability *= poisson_lambda / len(thresholds)
        cumulated += probability
    return tuple(thresholds)


class Call(NamedTuple):
    """The arguments of the operator, which are those of ``ops.bart_noise`` with all defaults filled
    in; -1 is no BOS or EOS."""

    input_ids: Annotated[Tensor, TOKENS]
    sentence_end_ids: Annotated[Tensor | None, Arg("[K]", (torch.int64,))]
    special_ids: Annotated[Tensor | None, IDS]
    lengths: Annotated[Tensor | None, PER_ROW]
    cu_seqlens: Annotated[Tensor | None, ENDS]
    sample_index: Annotated[Tensor | None, PER_ROW]
    seed: Annotated[Tensor, SEED]
    step: Size
    longest: Size
    capacity: Size
    vocab_size: int
    mask_token_id: int
    pad_token_id: int
    bos_token_id: int
    eos_token_id: int
    mask_probability: float
    delete_probability: float
    infill_probability: float
    poisson_lambda: float
    permute_sentences: float
    rotate_probability: float
    random_replace_prob: float

    @property
    def packed(self) -> bool:
        return self.cu_seqlens is not None

    @property
    def plan(self) -> NoisePlan:
        return noise_plan(*self[-SHARES:])

    @property
    def with_plan(self) -> tuple[Any, ...]:
        """What csrc/ takes: the plan in the place of the shares."""
        return *self[:-SHARES], *self.plan

    def check(self, where: str) -> None:
        check_row_values(where, self, self.longest)
        ids, vocab_size = self.special_ids, self.vocab_size
        check_token_ids(where, "special_ids", ids, vocab_size)
        if ids is not None and ids.shape[0] >= vocab_size:
            fail(
                where,
                "special_ids",
                f"all {vocab_size} ids",
                "fewer than the vocabulary has, or there is no random id to draw",
                "Pass only the ids of the special tokens.",
            )
        check_token_ids(where, "sentence_end_ids", self.sentence_end_ids)


def bart_noise_ref(
    input_ids: Tensor,
    *,
    vocab_size: int,
    mask_token_id: int,
    pad_token_id: int,
    bos_token_id: int | None = None,
    eos_token_id: int | None = None,
    sentence_end_ids: Tensor | None = None,
    special_ids: Tensor | None = None,
    mask_probability: float = 0.0,
    delete_probability: float = 0.0,
    infill_probability: float = 0.3,
    poisson_lambda: float = 3.0,
    permute_sentences: float = 1.0,
    rotate_probability: float = 0.0,
    random_replace_prob: float = 0.1,
    lengths: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    capacity: int | None = None,
    sample_index: Tensor | None = None,
    seed: int | Tensor,
    step: int = 0,
) -> NoisedText:
    """Permute, rotate, infill, mask and delete the tokens of each row.

    Args: those of ``ops.bart_noise``; its docstring describes what is done.
    """
    longest = input_ids.shape[1] if max_seqlen is None else max_seqlen
    edges = (bos_token_id is not None) + (eos_token_id is not None)
    return bart_noise_by_plan(
        *(input_ids, sentence_end_ids, special_ids, lengths, cu_seqlens, sample_index, seed, step),
        *(longest, longest + edges if capacity is None else capacity),
        *(vocab_size, mask_token_id, pad_token_id),
        *(-1 if token_id is None else token_id for token_id in (bos_token_id, eos_token_id)),
        *(mask_probability, delete_probability, infill_probability, poisson_lambda),
        *(permute_sentences, rotate_probability, random_replace_prob),
    )


def bart_noise_by_plan(*arguments: Any) -> NoisedText:
    """``bart_noise_ref`` of the fields of ``Call``: what every backend is given."""
    call = Call(*arguments)
    plan = call.plan
    tokens, n = padded_rows(call, call.longest)
    length, device = tokens.shape[1], tokens.device
    sample = samples_of(call)
    words = functools.partial(draw, call.seed, sample_index=sample, step=call.step)
    keys = functools.partial(draw_words, call.seed, sample_index=sample, step=call.step)

    def replacement(kind: Tensor, word: Tensor) -> Tensor:
        """The mask, or a random id that is not special."""
        special = call.special_ids if call.special_ids is not None else n.new_empty(0)
        random_id = ordinary_id(choice(word, call.vocab_size - special.shape[0]), special)
        token = torch.where(kind < plan.random_below, random_id, call.mask_token_id)
        return token.to(tokens.dtype)

    # Noise of single tokens, then each to its place of the new order.
    place = _places(call, tokens, n, words, keys)
    fate, word, kind, _ = words(Stream.NOISE, position=torch.arange(length, device=device))
    deleted = fate < plan.delete_below
    masked = ~deleted & (fate < plan.noise_below)
    noisy = torch.where(masked, replacement(kind, word), tokens)
    noisy = torch.zeros_like(noisy).scatter(1, place, noisy)
    deleted = torch.zeros_like(deleted).scatter(1, place, deleted)

    # Spans in the order drawn: they cover [first, next first) of the m tokens to cover.
    m = share(n, plan.infill_scale)
    most_covered = share(length, plan.infill_scale)
    span = torch.arange(2 * most_covered + SPARE_SPANS, device=device)
    drawn, word, kind, _ = words(Stream.INFILL, position=span)
    fill = replacement(kind, word)
    span_length = sum(((drawn >= below).long() for below in plan.span_below), 0 * drawn)
    is_last = span == 2 * m + SPARE_SPANS - 1
    span_length = torch.where(is_last, m, span_length)
    first = exclusive_cumsum(span_length)
    spans = (first < m).sum(1, keepdim=True)
    rotation = (words(Stream.INFILL, position=THIRD_DRAW)[0] * spans) >> 32
    first_rotated = first.gather(1, rotation)

    # Items: the spans among the tokens that none of them covers.
    item = torch.arange(length + most_covered + SPARE_SPANS, device=device)
    items = n - m + spans
    layout = keys(Stream.INFILL, len(item), first_quad=SECOND_DRAW)
    is_span = smallest(layout, item < items, spans)
    spans_before = exclusive_cumsum(is_span.long())
    index = spans_before + rotation
    wrapped = index >= spans
    index = torch.where(wrapped, index - spans, index)
    covered_before = first.gather(1, index) - first_rotated + torch.where(wrapped, m, 0)
    source = (item - spans_before + covered_before).clamp(max=length)
    kept = torch.nn.functional.pad(noisy, (0, 1)).gather(1, source)
    deleted = torch.nn.functional.pad(deleted, (0, 1)).gather(1, source)
    content = torch.where(is_span, fill.gather(1, index), kept)
    written = (item < items) & (is_span | ~deleted)
    return _in_rows(call, content, written)


def _places(
    call: Call,
    tokens: Tensor,
    n: Tensor,
    words: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]],
    keys: Callable[..., Tensor],
) -> Tensor:
    """Where each token of a row goes when sentences are permuted and the row is rotated."""
    plan, (batch, length) = call.plan, tokens.shape
    position = torch.arange(length, device=tokens.device).expand(batch, -1)
    real = position < n
    ends = position == n - 1
    if call.sentence_end_ids is not None:
        ends = ends | (real & is_one_of(tokens, call.sentence_end_ids))
    sentence = exclusive_cumsum(ends.long()).clamp(max=length - 1)
    sentences = ends.sum(1, keepdim=True)
    size = torch.zeros_like(sentence).scatter_add(1, sentence, real.long())

    moving = share(sentences, plan.permute_scale)
    moves = smallest(keys(Stream.ORDER, length), position < sentences, moving)
    site = (~moves).long().argsort(dim=1, stable=True)
    shuffle = keys(Stream.ORDER, length, first_quad=SECOND_DRAW)
    by_key = torch.where(position < moving, shuffle, 2**32).argsort(dim=1, stable=True)
    order = torch.zeros_like(site).scatter(1, site, site.gather(1, by_key))
    moved = torch.zeros_like(site).scatter(1, order, exclusive_cumsum(size.gather(1, order)))
    place = moved.gather(1, sentence) + position
    place = place - exclusive_cumsum(size).gather(1, sentence)

    event, word, _, _ = words(Stream.ORDER, position=THIRD_DRAW)
    start = torch.where(event < plan.rotate_below, (word * n) >> 32, 0)
    place = torch.where(place >= start, place - start, place - start + n)
    return torch.where(real, place, position)


def _in_rows(call: Call, content: Tensor, written: Tensor) -> NoisedText:
    """The tokens of ``content`` that are ``written``, both [B, ·], between BOS and EOS: [B, C]."""
    capacity, has_bos, has_eos = call.capacity, call.bos_token_id >= 0, call.eos_token_id >= 0
    room = capacity - has_bos - has_eos
    total = written.sum(1, keepdim=True)
    fitting = total.clamp(max=room)
    slot = exclusive_cumsum(written.long())
    # What does not fit is written to an additional last column.
    slot = torch.where(written & (slot < room), slot + has_bos, capacity)
    out = content.new_full((content.shape[0], capacity + 1), call.pad_token_id)
    out = out.scatter(1, slot, content)
    if has_bos:
        out[:, 0] = call.bos_token_id
    if has_eos:
        out = out.scatter(1, fitting + has_bos, call.eos_token_id)
    return NoisedText(
        out[:, :capacity].contiguous(), fitting[:, 0] + has_bos + has_eos, (total - fitting).sum()
    )


def smallest(key: Tensor, candidate: Tensor, count: Tensor) -> Tensor:
    """The ``count`` [B, 1] candidates with the smallest keys, ties by position, as a mask."""
    by_key = key.argsort(dim=1, stable=True)
    candidate = candidate.gather(1, by_key)
    taken = candidate & (candidate.cumsum(1) <= count)
    return torch.zeros_like(taken).scatter(1, by_key, taken)


def exclusive_cumsum(values: Tensor) -> Tensor:
    """The sum of all values to the left of each one."""
    return values.cumsum(1) - values
