"""What the ops on rows of tokens share: packed rows, lengths, and where their randomness begins."""

from __future__ import annotations

import torch

from fastplm._checks import (
    ArgumentTypeError,
    check,
    check_dtype,
    check_same_device,
    check_shape,
    check_tensor,
    message,
)


def check_cu_seqlens(where: str, cu_seqlens: torch.Tensor, input_ids: torch.Tensor) -> None:
    """Boundaries of packed rows: their form, and on the CPU their values."""
    check_tensor(where, "cu_seqlens", cu_seqlens, ndim=1)
    check_dtype(where, "cu_seqlens", cu_seqlens, (torch.int32,), "Convert it with .int().")
    check_same_device(where, input_ids=input_ids, cu_seqlens=cu_seqlens)
    fix = "Pass the first places of all rows and the end of the last, [0, …]."
    check(cu_seqlens.shape[0] > 0, where, "cu_seqlens", "no element", "B + 1 of them", fix)
    if not has_values(cu_seqlens):
        return
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
    if not has_values(lengths) or batch == 0:
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
    if isinstance(seed, torch.Tensor):
        check_tensor(where, "seed", seed, ndim=0)
        check_dtype(where, "seed", seed, (torch.int64,))
        check_same_device(where, input_ids=input_ids, seed=seed)
    else:
        check_int(where, "seed", seed, -(2**63), 2**63, "Pass an int or a 0-d int64 tensor.")


def check_int(where: str, argument: str, value: int, low: int, high: int, fix: str) -> None:
    """An int in ``[low, high)``."""
    expected = f"an int from {low} to {high - 1}"
    if not isinstance(value, int) or isinstance(value, bool):
        raise ArgumentTypeError(message(where, argument, repr(value), expected, fix))
    check(low <= value < high, where, argument, value, expected, fix)


def check_step(where: str, step: int) -> None:
    """What fits beside the stream in the last counter word."""
    check_int(where, "step", step, 0, 2**28, "Count from 0.")


def seed_tensor(seed: int | torch.Tensor, device: torch.device) -> torch.Tensor:
    """The seed as a 0-d int64 tensor, as the operators take it."""
    if isinstance(seed, torch.Tensor):
        return seed
    return torch.full((), seed, dtype=torch.int64, device=device)


def has_values(tensor: torch.Tensor) -> bool:
    """Whether looking at values is free: not while compiling, and not on another device."""
    return tensor.device.type == "cpu" and not torch.compiler.is_compiling()
