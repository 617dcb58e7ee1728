"""What the ops on rows of token ids share: declarations, checks of values, and steps of the
references."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor

from fastplm._checks import INTEGER, check_int, check_tensor
from fastplm._declare import Arg
from fastplm._modes import values_are_known
from fastplm.errors import fail

TOKENS = Arg("[B, T]", INTEGER, packed="[N]")
ENDS = Arg("[B + 1 > 0]", (torch.int32,), "Pass the first places of all rows and the end, .int().")
PER_ROW = Arg("[B]", (torch.int64,))
IDS = Arg("[S]", (torch.int64,))
SEED = Arg("[]", (torch.int64,))

#: Counters of different draws of a row are at least so far apart.
_MOST_TOKENS = 2**29

_Count = TypeVar("_Count", int, Tensor)


# --- checks ---------------------------------------------------------------------------------------


def check_input_ids(where: str, input_ids: Tensor, cu_seqlens: Tensor | None) -> None:
    """Padded or packed rows, short enough for the counters of random draws."""
    check_tensor(where, "input_ids", input_ids, ndim=2 if cu_seqlens is None else 1)
    length = input_ids.shape[-1]
    if length >= _MOST_TOKENS:  # only then as text, which would make a symbolic size a constant
        expected = f"fewer than {_MOST_TOKENS}"
        fail(where, "input_ids", f"rows of {length} tokens", expected, "Cut them.")


def check_rows(
    where: str, lengths: Tensor | None, cu_seqlens: Tensor | None, max_seqlen: int | None
) -> None:
    """Padded rows may have lengths; packed ones need the length of the longest row."""
    fix = "Pass it with `cu_seqlens` alone: it fixes the width of what comes out of packed rows."
    if cu_seqlens is None:
        if max_seqlen is not None:
            fail(where, "max_seqlen", max_seqlen, "None for padded rows", fix)
        return
    boundaries = "`cu_seqlens` says how long packed rows are."
    if lengths is not None:
        fail(where, "lengths", "a tensor", "None for packed rows", boundaries)
    most: Any = max_seqlen
    check_int(where, "max_seqlen", most, 0, _MOST_TOKENS, fix)


def check_step(where: str, step: int) -> None:
    """A step that fits into the last counter word, which also holds the stream."""
    check_int(where, "step", step, 0, 2**28, "Count from 0.")


def check_row_values(where: str, call: Any, longest: int) -> None:
    """The values of ``lengths`` or ``cu_seqlens``, where looking at them is free."""
    lengths, cu_seqlens = call.lengths, call.cu_seqlens
    if lengths is not None and values_are_known(lengths) and lengths.shape[0] > 0:
        low, high = (int(bound) for bound in lengths.aminmax())
        if low < 0 or high > call.input_ids.shape[1]:
            expected = f"values from 0 to the {call.input_ids.shape[1]} columns of `input_ids`"
            fix = "Pass the number of tokens of each row."
            fail(where, "lengths", low if low < 0 else high, expected, fix)
    if cu_seqlens is None or not values_are_known(cu_seqlens):
        return
    check_boundary_values(where, call)
    if cu_seqlens.shape[0] > 1:
        found = int(cu_seqlens.diff().max())
        if found > longest:
            expected = f"at least {found}, the longest row of `cu_seqlens`"
            fail(where, "max_seqlen", longest, expected, "Raise it, or cut the row.")


def check_boundary_values(where: str, call: Any) -> None:
    """The values of ``cu_seqlens``, where looking at them is free."""
    cu_seqlens, tokens = call.cu_seqlens, call.input_ids.shape[0]
    if cu_seqlens is None or not values_are_known(cu_seqlens):
        return
    first, last = int(cu_seqlens[0]), int(cu_seqlens[-1])
    rises = bool((cu_seqlens[1:] >= cu_seqlens[:-1]).all())
    if first != 0 or last > tokens or not rises:
        got = "values that fall" if last <= tokens else f"{last} at its end"
        got = got if first == 0 else f"{first} at its beginning"
        expected = f"values that rise from 0 to at most the {tokens} tokens"
        fix = "Pass the first places of all rows and the end of the last, [0, …]."
        fail(where, "cu_seqlens", got, expected, fix)


def check_token_ids(
    where: str, argument: str, ids: Tensor | None, vocab_size: int | None = None
) -> None:
    """The values of a set of token ids, where looking at them is free."""
    if ids is None or not values_are_known(ids) or ids.shape[0] == 0:
        return
    values = ids.tolist()
    expected, fix = "each id once, ascending", "Pass torch.unique(ids)."
    rises = values == sorted(set(values))  # of so few numbers Python is the fastest
    if not rises:
        fail(where, argument, "ids that do not rise", expected, fix)
    low, high = values[0], values[-1]
    if vocab_size is not None and (low < 0 or high >= vocab_size):
        expected = f"ids from 0 to {vocab_size - 1}"
        fix = "Pass the length of the tokenizer as vocab_size."
        fail(where, argument, low if low < 0 else high, expected, fix)


# --- steps of the references ----------------------------------------------------------------------


def rows_of(call: Any) -> int:
    return call.input_ids.shape[0] if call.cu_seqlens is None else call.cu_seqlens.shape[0] - 1


def samples_of(call: Any) -> Tensor:
    """The place of each row in the training stream: int64 [B, 1]."""
    sample_index = call.sample_index
    if sample_index is None:
        sample_index = torch.arange(rows_of(call), device=call.input_ids.device)
    return sample_index[:, None]


def padded_rows(call: Any, longest: int) -> tuple[Tensor, Tensor]:
    """Padded rows [B, T] and their lengths [B, 1]; boundaries are held to what is there."""
    input_ids = call.input_ids
    if call.cu_seqlens is None:
        rows, length = input_ids.shape
        lengths = call.lengths
        if lengths is None:
            lengths = torch.full((rows,), length, device=input_ids.device)
        return input_ids, lengths.clamp(0, length)[:, None]
    boundary = call.cu_seqlens.long().clamp(0, input_ids.shape[0])
    begin, end = boundary[:-1, None], boundary[1:, None]
    place = begin + torch.arange(longest, device=input_ids.device)
    # One more token, so that an empty tensor can be indexed.
    padded = torch.nn.functional.pad(input_ids, (0, 1))
    return padded[place.clamp(max=input_ids.shape[0])], (end - begin).clamp(0, longest)


def share(n: _Count, scale: int) -> _Count:
    """``n * scale / 2^32``, halves rounded up."""
    return (n * scale + 2**31) >> 32


def is_one_of(input_ids: Tensor, ids: Tensor) -> Tensor:
    """A mask of the tokens among ``ids``, int64 [S], ascending; ``torch.isin`` may wait for the
    device."""
    ids = ids.contiguous()
    place = torch.searchsorted(ids, input_ids.long().contiguous())
    none = torch.iinfo(torch.int64).min
    return torch.nn.functional.pad(ids, (0, 1), value=none)[place] == input_ids


def ordinary_id(rank: Tensor, special_ids: Tensor) -> Tensor:
    """The id with ``rank`` smaller ids that are not special; ``special_ids`` [S] are ascending."""
    below = special_ids - torch.arange(special_ids.shape[0], device=rank.device)
    return rank + torch.searchsorted(below, rank, right=True)
