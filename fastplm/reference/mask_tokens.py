"""Reference of ``ops.mask_tokens``: the specification, in plain PyTorch.

Padded rows cause no host sync; packed ones do, for the length of the longest.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

from fastplm._declare import Arg, Size
from fastplm.reference._token_rows import (
    ENDS,
    IDS,
    PER_ROW,
    SEED,
    TOKENS,
    check_token_ids,
    is_one_of,
    ordinary_id,
    samples_of,
    share,
)
from fastplm.reference.philox import Stream, choice, draw, draw_words, fixed_point

#: ``max_ngram`` of the units that are not n-grams.
UNITS = {"token": 0, "word": 1}
#: The longest run of words: 840 is divisible by all numbers up to it.
MAX_NGRAM = 8
_NGRAM_TOTAL = 840

_MASKABLE = Arg("[B, T]", (torch.bool,), "Pass one bool for each token, True = may.", packed="[N]")
_WORDS = Arg("[B, T]", (torch.int64,), "Pass one id for each token, with .long().", packed="[N]")


class MaskedTokens(NamedTuple):
    """What ``ops.mask_tokens`` returns; see there."""

    input_ids: Tensor
    positions: Tensor
    labels: Tensor
    count: Tensor  # type: ignore[assignment]  # hides tuple.count
    dropped: Tensor


class Call(NamedTuple):
    """The arguments of the operator: integers, so that no choice depends on how a device rounds.

    Attributes:
        capacity: the most tokens that can be chosen in a row.
        slots: P, the length of positions and labels.
        quota_scale: ``(n * quota_scale + 2^31) >> 32`` is the share of n, halves rounded up.
        chosen_below: a unit is chosen if its key is below; -1 where the share is exact.
        mask_below, random_below: a word below the first makes [MASK], else one below the second a
            random id.
        max_ngram: 0 for units of one token, 1 for words, n for runs of 1 to n words.

    The others are those of ``ops.mask_tokens``.
    """

    input_ids: Annotated[Tensor, TOKENS]
    maskable: Annotated[Tensor | None, _MASKABLE]
    special_ids: Annotated[Tensor | None, IDS]
    word_ids: Annotated[Tensor | None, _WORDS]
    cu_seqlens: Annotated[Tensor | None, ENDS]
    sample_index: Annotated[Tensor | None, PER_ROW]
    seed: Annotated[Tensor, SEED]
    step: Size
    capacity: Size
    slots: Size
    quota_scale: int
    chosen_below: int
    mask_below: int
    random_below: int
    mask_token_id: int
    vocab_size: int
    max_ngram: int

    @property
    def packed(self) -> bool:
        return self.cu_seqlens is not None

    def check(self, where: str) -> None:
        check_token_ids(where, "special_ids", self.special_ids, self.vocab_size)


def shape_of_rows(input_ids: Tensor, cu_seqlens: Tensor | None) -> tuple[int, int | None, int]:
    """(B, T of padded rows and None of packed ones, tokens)."""
    if cu_seqlens is None:
        return input_ids.shape[0], input_ids.shape[1], input_ids.numel()
    return cu_seqlens.shape[0] - 1, None, input_ids.numel()


def mask_plan(
    rows: int,
    length: int | None,
    tokens: int,
    mlm_probability: float,
    mask_replace_prob: float,
    random_replace_prob: float,
    max_predictions: int | None,
    sampling: str,
) -> tuple[int, int, int, int, int, int]:
    """Six fields of ``Call``, from capacity to random_below, of rows as ``shape_of_rows`` says."""
    # Rounded up: the float 0.15 is below the decimal 0.15, so halves would be rounded down.
    quota_scale = math.ceil(mlm_probability * 2**32)
    if length is None and rows == 0:
        tokens = 0  # no token belongs to a row
    bernoulli = sampling == "bernoulli"
    mask_below = fixed_point(mask_replace_prob)
    if max_predictions is not None:
        capacity, slots = max_predictions, rows * max_predictions
    elif length is None:
        # Rounding adds less than one token to a row, and a row gets at least one.
        capacity = tokens
        slots = min(tokens, (tokens * quota_scale >> 32) + rows)
        if bernoulli:
            slots = _bernoulli_capacity(tokens, quota_scale)
    else:
        capacity = max(1, share(length, quota_scale))
        if bernoulli:
            capacity = _bernoulli_capacity(length, quota_scale)
        slots = rows * capacity
    chosen_below = fixed_point(mlm_probability) if bernoulli else -1
    random_below = mask_below + fixed_point(random_replace_prob)
    return capacity, slots, quota_scale, chosen_below, mask_below, random_below


def mask_tokens_ref(
    input_ids: Tensor,
    *,
    vocab_size: int,
    mask_token_id: int,
    maskable: Tensor | None = None,
    special_ids: Tensor | None = None,
    mlm_probability: float = 0.15,
    mask_replace_prob: float = 0.8,
    random_replace_prob: float = 0.1,
    max_predictions: int | None = None,
    sampling: str = "exact",
    unit: str = "token",
    word_ids: Tensor | None = None,
    max_ngram: int = 3,
    cu_seqlens: Tensor | None = None,
    sample_index: Tensor | None = None,
    seed: int | Tensor,
    step: int = 0,
) -> MaskedTokens:
    """Choose, corrupt and compact the tokens to predict, as ``ops.mask_tokens`` describes it.

    Args: those of ``ops.mask_tokens``.
    """
    shape = shape_of_rows(input_ids, cu_seqlens)
    shares = mlm_probability, mask_replace_prob, random_replace_prob
    plan = mask_plan(*shape, *shares, max_predictions, sampling)
    return mask_tokens_by_plan(
        *(input_ids, maskable, special_ids, word_ids, cu_seqlens, sample_index, seed, step),
        *(*plan, mask_token_id, vocab_size, UNITS.get(unit, max_ngram)),
    )


def mask_tokens_by_plan(*arguments: Any) -> MaskedTokens:
    """``mask_tokens_ref`` of the fields of ``Call``: what every backend is given."""
    call = Call(*arguments)
    input_ids, maskable, special_ids, word_ids, cu_seqlens, _, seed, step, *_ = call
    device, slots = input_ids.device, call.slots
    if maskable is None:
        maskable = torch.ones_like(input_ids, dtype=torch.bool)
    if special_ids is None:
        special_ids = torch.empty(0, dtype=torch.int64, device=device)
    maskable = maskable & ~is_one_of(input_ids, special_ids)
    if word_ids is None:
        word_ids = torch.zeros_like(input_ids)
    place, inside = _places(input_ids, cu_seqlens)
    length, sample = place.shape[1], samples_of(call)
    candidate = maskable.flatten()[place] & inside
    token = input_ids.flatten()[place].long()

    starts = unit_starts(candidate, word_ids.flatten()[place], call.max_ngram, seed, sample, step)
    keys = draw_words(seed, Stream.MASK_SELECT, length, sample_index=sample, step=step)
    chosen, dropped = _chosen(call, candidate, starts, keys)
    # If all rows together have more tokens than slots, the last tokens are dropped.
    slot = chosen.flatten().cumsum(0) - 1
    dropped = dropped + (chosen.flatten() & (slot >= slots)).sum()
    chosen = chosen & (slot < slots).view(chosen.shape)

    position = torch.arange(length, device=device)
    decision, word, _, _ = draw(
        seed, Stream.MASK_REPLACE, sample_index=sample, position=position, step=step
    )
    random_ids = ordinary_id(choice(word, call.vocab_size - len(special_ids)), special_ids)
    corrupted = torch.where(decision < call.random_below, random_ids, token)
    corrupted = corrupted.masked_fill(decision < call.mask_below, call.mask_token_id)

    # Tokens that are not chosen are written to an additional last element.
    flat = place.where(chosen, input_ids.numel()).flatten()
    output_ids = torch.cat([input_ids.flatten(), input_ids.new_zeros(1)])
    output_ids = output_ids.scatter(0, flat, corrupted.flatten().to(input_ids.dtype))[:-1]
    slot = slot.where(chosen.flatten(), slots)
    positions = torch.full((slots + 1,), -1, device=device).scatter(0, slot, place.flatten())
    labels = torch.full((slots + 1,), -100, device=device).scatter(0, slot, token.flatten())
    output_ids = output_ids.view(input_ids.shape)
    return MaskedTokens(output_ids, positions[:slots], labels[:slots], chosen.sum(), dropped)


def _places(input_ids: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """(the flat position of each token of padded rows, whether it belongs to the row): [B, T].

    Packed rows are padded to the longest.
    """
    if cu_seqlens is None:
        place = torch.arange(input_ids.numel(), device=input_ids.device).view(input_ids.shape)
        return place, torch.ones_like(place, dtype=torch.bool)
    boundary = cu_seqlens.long().clamp(0, input_ids.shape[0])[:, None]
    begin, end = boundary[:-1], boundary[1:]
    end = end.where((cu_seqlens[1:] >= cu_seqlens[:-1]).all(), begin)  # or rows would overlap
    length = int((end - begin).max()) if len(begin) else 0
    place = begin + torch.arange(length, device=input_ids.device)
    inside = place < end
    return place.where(inside, 0), inside


def _chosen(call: Call, candidate: Tensor, starts: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """(the tokens chosen, bool [B, T]; how many more the call wants, int64 []).

    Args:
        candidate, starts: bool [B, T], the tokens that may be chosen, and the first of each unit.
        keys: int64 [B, T]; the key of a unit is that of its first token, and low keys are chosen.
    """
    unit = (starts.cumsum(-1) - 1).clamp(min=0)  # of each candidate, counted from 0 in its row
    sizes = torch.zeros_like(unit).scatter_add(-1, unit, candidate.long())
    key_of_unit = torch.full_like(unit, 2**32).scatter_reduce(
        -1, unit, torch.where(starts, keys, 2**32), "amin"
    )
    exact = call.chosen_below < 0
    if exact:
        n = candidate.sum(-1, keepdim=True)
        wanted = share(n, call.quota_scale).clamp(min=1).minimum(n)
    else:
        sizes = sizes.where(key_of_unit < call.chosen_below, 0)
        wanted = sizes.sum(-1, keepdim=True)
    quota = wanted.clamp(max=call.capacity)
    by_key = key_of_unit.argsort(dim=-1, stable=True)
    in_order = _take(sizes.gather(-1, by_key), quota, one_by_one=call.max_ngram == 0)
    taken = torch.zeros_like(candidate).scatter(-1, by_key, in_order)
    chosen = candidate & taken.gather(-1, unit)
    # With exact sampling, a rest in which no whole unit fits does not count as dropped.
    return chosen, (wanted - (quota if exact else chosen.sum(-1, keepdim=True))).sum()


def unit_starts(
    candidate: Tensor,
    word_ids: Tensor,
    max_ngram: int,
    seed: int | Tensor,
    sample: Tensor,
    step: int,
) -> Tensor:
    """The first token of each unit, which is chosen as a whole: bool [B, T], of the tokens that may
    be chosen, their words (both [B, T]) and the samples of the rows [B, 1]."""
    if max_ngram == 0:
        return candidate
    follows = torch.zeros_like(candidate)  # a candidate after a candidate
    follows[:, 1:] = candidate[:, :-1] & candidate[:, 1:]
    same_word = torch.zeros_like(candidate)
    same_word[:, 1:] = word_ids[:, :-1] == word_ids[:, 1:]
    words = candidate & ~(follows & same_word)
    if max_ngram == 1:
        return words

    length = candidate.shape[1]
    drawn = ngram_length(
        draw_words(seed, Stream.NGRAM, length, sample_index=sample, step=step), max_ngram
    )
    starts = torch.zeros_like(candidate)
    left = torch.zeros_like(sample[:, 0])  # words that the current run may still take
    for t in range(length):
        goes_on = follows[:, t] & (left > 0)
        starts[:, t] = words[:, t] & ~goes_on
        left = torch.where(words[:, t], torch.where(goes_on, left, drawn[:, t]) - 1, left)
    return starts


def ngram_length(word: Tensor, max_ngram: int) -> Tensor:
    """Draw n from 1 … max_ngram with ``p(n) = (1/n) / (1/1 + … + 1/max_ngram)``, by uint32 words.

    Source: Lan et al. 2020 (arXiv 1909.11942), §4.2.
    """
    shares = [_NGRAM_TOTAL // n for n in range(1, max_ngram + 1)]
    drawn = choice(word, sum(shares))
    return torch.stack([drawn >= sum(shares[:n]) for n in range(max_ngram)]).sum(0)


def _take(sizes: Tensor, quota: Tensor, *, one_by_one: bool) -> Tensor:
    """The units that are taken in order, each if it still fits: bool [B, T].

    Args:
        sizes: int64 [B, T], tokens of each unit in the order of their keys; 0 for none.
        quota: int64 [B, 1], tokens to take.
        one_by_one: every unit is one token, so that a cumulative sum is enough.
    """
    if one_by_one:
        return (sizes > 0) & (sizes.cumsum(-1) <= quota)
    taken = torch.zeros_like(sizes, dtype=torch.bool)
    left = quota[:, 0]
    for i in range(sizes.shape[1]):
        taken[:, i] = (sizes[:, i] > 0) & (sizes[:, i] <= left)
        left = left - torch.where(taken[:, i], sizes[:, i], 0)
    return taken


def _bernoulli_capacity(tokens: int, scale: int) -> int:
    """At least six standard deviations above the expected number.

    ``6 sqrt(v) <= 3 (v / 8 + 8)`` (the geometric mean is at most the arithmetic one); a symbolic
    size has no square root.
    """
    variance = (tokens * scale * (2**32 - scale) >> 64) + 1
    return min(tokens, (tokens * scale >> 32) + 1 + 3 * (variance // 8 + 1) + 24)
