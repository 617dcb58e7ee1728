"""Checks that the ops on rows of token ids share: of values, and of numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastplm._checks import INTEGER, check_int, values_are_known
from fastplm._declare import Arg
from fastplm.errors import fail

# What they declare alike.
TOKENS = Arg("[B, T]", INTEGER, packed="[N]")
ENDS = Arg("[B + 1 > 0]", (torch.int32,), "Pass the first places of all rows and the end, .int().")
PER_ROW = Arg("[B]", (torch.int64,))
IDS = Arg("[S]", (torch.int64,))
SEED = Arg("[]", (torch.int64,))

#: Counters of different draws of a row are at least so far apart.
_MOST_TOKENS = 2**29


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


def check_row_values(where: str, call: Any, longest: int) -> None:
    """The values of ``lengths`` or ``cu_seqlens``, where looking at them is free."""
    if call.lengths is not None:
        check_length_values(where, call.lengths, call.input_ids)
    if call.cu_seqlens is None or not values_are_known(call.cu_seqlens):
        return
    check_boundary_values(where, call.cu_seqlens, call.input_ids)
    if call.cu_seqlens.shape[0] > 1:
        found = int(call.cu_seqlens.diff().max())
        if found > longest:
            expected = f"at least {found}, the longest row of `cu_seqlens`"
            fail(where, "max_seqlen", longest, expected, "Raise it, or cut the row.")


def check_row_length(where: str, input_ids: Tensor) -> None:
    """Short enough for the counters of random draws."""
    length = input_ids.shape[-1]
    if length >= _MOST_TOKENS:  # only then as text, which would make a symbolic size a constant
        expected = f"fewer than {_MOST_TOKENS}"
        fail(where, "input_ids", f"rows of {length} tokens", expected, "Cut them.")


def check_token_ids(
    where: str, argument: str, ids: Tensor | None, vocab_size: int | None = None
) -> None:
    """The values of a set of token ids, where looking at them is free."""
    if ids is None:
        return
    values = _values_on_cpu(ids)
    if not values:
        return
    expected, fix = "each id once, ascending", "Pass torch.unique(ids)."
    rises = values == sorted(set(values))  # of so few numbers Python is the fastest
    if not rises:
        fail(where, argument, "ids that do not rise", expected, fix)
    low, high = values[0], values[-1]
    if vocab_size is not None and (low < 0 or high >= vocab_size):
        expected = f"ids from 0 to {vocab_size - 1}"
        fix = "Pass the length of the tokenizer as vocab_size."
        fail(where, argument, low if low < 0 else high, expected, fix)


def check_boundary_values(where: str, cu_seqlens: Tensor, input_ids: Tensor) -> None:
    """The values of ``cu_seqlens``, where looking at them is free."""
    if not values_are_known(cu_seqlens):
        return
    tokens = input_ids.shape[0]
    first, last = int(cu_seqlens[0]), int(cu_seqlens[-1])
    rises = bool((cu_seqlens[1:] >= cu_seqlens[:-1]).all())
    if first != 0 or last > tokens or not rises:
        got = "values that fall" if last <= tokens else f"{last} at its end"
        got = got if first == 0 else f"{first} at its beginning"
        expected = f"values that rise from 0 to at most the {tokens} tokens"
        fix = "Pass the first places of all rows and the end of the last, [0, …]."
        fail(where, "cu_seqlens", got, expected, fix)


def check_length_values(where: str, lengths: Tensor, input_ids: Tensor) -> None:
    """The values of ``lengths``, where looking at them is free."""
    if not values_are_known(lengths) or lengths.shape[0] == 0:
        return
    length = input_ids.shape[1]
    low, high = (int(bound) for bound in lengths.aminmax())
    if low < 0 or high > length:
        expected = f"values from 0 to the {length} columns of `input_ids`"
        fix = "Pass the number of tokens of each row."
        fail(where, "lengths", low if low < 0 else high, expected, fix)


def check_step(where: str, step: int) -> None:
    """A step that fits into the last counter word, which also holds the stream."""
    check_int(where, "step", step, 0, 2**28, "Count from 0.")


def _values_on_cpu(tensor: Tensor) -> list[int]:
    """The numbers of a tensor where looking at them is free, else none."""
    return tensor.tolist() if values_are_known(tensor) else []
