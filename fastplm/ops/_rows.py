"""What the ops on rows of tokens share: packed rows, lengths, and where their randomness begins."""

from __future__ import annotations

from typing import Any

import torch

from fastplm._checks import (
    check,
    check_dtype,
    check_int,
    check_same_device,
    check_seed_form,
    check_shape,
    check_tensor,
    values_are_known,
)

#: Counters of different draws of a row are at least so far apart.
_MOST_TOKENS = 2**29


def check_rows(
    where: str,
    input_ids: torch.Tensor,
    lengths: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    max_seqlen: int | None,
) -> None:
    """The rows are padded ones, perhaps with lengths, or packed ones with all that these need."""
    fix = "Pass it with `cu_seqlens` alone: it fixes the width of what comes out of packed rows."
    if cu_seqlens is None:
        check(max_seqlen is None, where, "max_seqlen", max_seqlen, "None for padded rows", fix)
        if lengths is not None:
            check_lengths(where, lengths, input_ids)
        return
    boundaries = "`cu_seqlens` says how long packed rows are."
    check(lengths is None, where, "lengths", "a tensor", "None for packed rows", boundaries)
    most: Any = max_seqlen
    check_int(where, "max_seqlen", most, 0, _MOST_TOKENS, fix)
    check_cu_seqlens(where, cu_seqlens, input_ids)
    if values_are_known(cu_seqlens) and cu_seqlens.shape[0] > 1:
        longest = int(cu_seqlens.diff().max())
        expected = f"at least {longest}, the longest row of `cu_seqlens`"
        check(longest <= most, where, "max_seqlen", most, expected, "Raise it, or cut the row.")


def check_row_length(where: str, input_ids: torch.Tensor) -> None:
    """Short enough for the counters of random draws."""
    length = input_ids.shape[-1]
    if length >= _MOST_TOKENS:  # spelled out only then: a size in words is no symbol any more
        expected = f"fewer than {_MOST_TOKENS}"
        check(False, where, "input_ids", f"rows of {length} tokens", expected, "Cut them.")


def check_token_ids(
    where: str,
    argument: str,
    ids: torch.Tensor | None,
    input_ids: torch.Tensor,
    vocab_size: int | None = None,
) -> None:
    """A set of token ids: its form, and on the CPU its values."""
    if ids is None:
        return
    check_tensor(where, argument, ids, ndim=1)
    check_dtype(where, argument, ids, (torch.int64,))
    check_same_device(where, **{"input_ids": input_ids, argument: ids})
    values = _values_on_cpu(ids)
    if not values:
        return
    expected, fix = "each id once, ascending", "Pass torch.unique(ids)."
    rises = values == sorted(set(values))  # of so few numbers Python is the fastest
    check(rises, where, argument, "ids that do not rise", expected, fix)
    if vocab_size is None:
        return
    low, high = values[0], values[-1]
    expected = f"ids from 0 to {vocab_size - 1}"
    fix = "Pass the length of the tokenizer as vocab_size."
    check(low >= 0 and high < vocab_size, where, argument, low if low < 0 else high, expected, fix)


def check_cu_seqlens(where: str, cu_seqlens: torch.Tensor, input_ids: torch.Tensor) -> None:
    """Boundaries of packed rows: their form, and on the CPU their values."""
    check_boundaries(where, cu_seqlens, input_ids)
    check_boundary_values(where, cu_seqlens, input_ids)


def check_boundaries(where: str, cu_seqlens: torch.Tensor, input_ids: torch.Tensor) -> None:
    """The form of ``cu_seqlens``."""
    check_tensor(where, "cu_seqlens", cu_seqlens, ndim=1)
    check_dtype(where, "cu_seqlens", cu_seqlens, (torch.int32,), "Convert it with .int().")
    check_same_device(where, input_ids=input_ids, cu_seqlens=cu_seqlens)
    fix = "Pass the first places of all rows and the end of the last, [0, …]."
    check(cu_seqlens.shape[0] > 0, where, "cu_seqlens", "no element", "B + 1 of them", fix)


def check_boundary_values(where: str, cu_seqlens: torch.Tensor, input_ids: torch.Tensor) -> None:
    """The values of ``cu_seqlens``, where looking at them is free."""
    if not values_are_known(cu_seqlens):
        return
    fix = "Pass the first places of all rows and the end of the last, [0, …]."
    tokens = input_ids.shape[0]
    first, last = int(cu_seqlens[0]), int(cu_seqlens[-1])
    expected = f"values that rise from 0 to at most the {tokens} tokens"
    check(first == 0, where, "cu_seqlens", f"{first} at its beginning", expected, fix)
    check(last <= tokens, where, "cu_seqlens", f"{last} at its end", expected, fix)
    rises = bool((cu_seqlens[1:] >= cu_seqlens[:-1]).all())
    check(rises, where, "cu_seqlens", "values that fall", expected, fix)


def check_lengths(where: str, lengths: torch.Tensor, input_ids: torch.Tensor) -> None:
    """Lengths of padded rows: their form, and on the CPU their values."""
    check_tensor(where, "lengths", lengths, ndim=1)
    check_dtype(where, "lengths", lengths, (torch.int64,), "Convert it with .long().")
    check_same_device(where, input_ids=input_ids, lengths=lengths)
    batch, length = input_ids.shape
    check_shape(where, "lengths", lengths, (batch,), "[B] of `input_ids`")
    if not values_are_known(lengths) or batch == 0:
        return
    low, high = (int(bound) for bound in lengths.aminmax())
    check(
        low >= 0 and high <= length,
        where,
        "lengths",
        low if low < 0 else high,
        f"values from 0 to the {length} columns of `input_ids`",
        "Pass the number of tokens of each row.",
    )


def check_sample_index(
    where: str,
    sample_index: torch.Tensor | None,
    input_ids: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
) -> None:
    """One sample index for each row, if any are given."""
    if sample_index is None:
        return
    rows = input_ids.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    names = "[B] of `input_ids`" if cu_seqlens is None else "[B] of `cu_seqlens`"
    check_tensor(where, "sample_index", sample_index)
    check_dtype(where, "sample_index", sample_index, (torch.int64,))
    check_same_device(where, input_ids=input_ids, sample_index=sample_index)
    check_shape(where, "sample_index", sample_index, (rows,), names)


def check_seed(where: str, input_ids: torch.Tensor, seed: int | torch.Tensor) -> None:
    """An int of 64 bits, or a 0-d int64 tensor beside the tokens."""
    check_seed_form(where, seed)
    if isinstance(seed, torch.Tensor):
        check_same_device(where, input_ids=input_ids, seed=seed)


def check_step(where: str, step: int) -> None:
    """What fits beside the stream in the last counter word."""
    check_int(where, "step", step, 0, 2**28, "Count from 0.")


def seed_tensor(seed: int | torch.Tensor, device: torch.device) -> torch.Tensor:
    """The seed as a 0-d int64 tensor, as the operators take it."""
    if isinstance(seed, torch.Tensor):
        return seed
    return torch.full((), seed, dtype=torch.int64, device=device)


def _values_on_cpu(tensor: torch.Tensor) -> list[int]:
    """The numbers of a tensor where looking at them is free, else none."""
    return tensor.tolist() if values_are_known(tensor) else []
