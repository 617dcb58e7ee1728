"""Reference of ``ops.dropout``: the specification, in plain differentiable PyTorch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastplm.reference.philox import DROPOUT_ROUNDS, Stream, draw

_LANES = 16  # draws of a block, side by side
_CHOICES = 8  # of a draw, 16 bits each


def dropout_threshold(p: float) -> int:
    """How many of the 65536 values of 16 random bits drop an element.

    0 only for a probability of 0, and 65536 only for 1; the rate really used is
    ``threshold / 65536``.
    """
    if p in (0.0, 1.0):
        return int(65536 * p)
    return min(max(round(65536 * p), 1), 65535)


def dropout_scale(threshold: int) -> float:
    """What an element that stays is multiplied by; 0 if none does."""
    return 65536 / (65536 - threshold) if threshold < 65536 else 0.0


def keep_mask(seed: int | Tensor, size: int, p: float, device: torch.device) -> Tensor:
    """The elements that survive: bool [size].

    One Philox draw decides for 8 elements, which are counted in row-major order. In each block of
    128 of them, choice j of draw i (half ``j mod 2``, the low one first, of word ``j div 2``) is
    that of element ``16 j + i``.
    """
    number = _draws(size, device)
    return _keep(seed, number >> 32, number, 0, size, p)


def keep_mask_of_rows(
    seed: int | Tensor, sample_index: Tensor, position: Tensor, width: int, p: float
) -> Tensor:
    """The elements of rows that survive, by what the rows are: bool [N, width].

    The elements of a row are counted from 0, and its draws are those of its sample and position
    with these numbers as the step. So neither the batch nor the layout of the rows matters.
    ``sample_index`` and ``position`` are int64 [N].
    """
    number = _draws(width, sample_index.device)
    return _keep(seed, sample_index[:, None], position[:, None], number, width, p)


def _draws(size: int, device: torch.device) -> Tensor:
    """The numbers of the draws for so many elements: whole blocks of them."""
    return torch.arange(-(-size // (_LANES * _CHOICES)) * _LANES, device=device)


def _keep(
    seed: int | Tensor, sample: Tensor, position: Tensor, step: int | Tensor, size: int, p: float
) -> Tensor:
    counter: dict[str, Any] = {"sample_index": sample, "position": position, "step": step}
    words = draw(seed, Stream.HIDDEN, **counter, rounds=DROPOUT_ROUNDS)
    halves = torch.stack([word >> shift & 0xFFFF for word in words for shift in (0, 16)], -2)
    blocks = halves.unflatten(-1, (-1, _LANES)).transpose(-3, -2)  # [..., blocks, choices, lanes]
    return blocks.flatten(-3)[..., :size] >= dropout_threshold(p)


def dropout_ref(
    input: Tensor,
    p: float = 0.5,
    *,
    seed: int | Tensor,
    sample_index: Tensor | None = None,
    position: Tensor | None = None,
) -> Tensor:
    """``out = input / (1 - p)`` where an element survives, else 0.

    Args: those of ``ops.dropout``; ``p`` as ``dropout_threshold`` takes it. With ``sample_index``
        the draws are those of ``keep_mask_of_rows``, else of ``keep_mask``.

    Returns:
        The shape and dtype of ``input``. What is dropped is 0 even if it was not finite, and passes
        no gradient.
    """
    if sample_index is None:
        keep = keep_mask(seed, input.numel(), p, input.device)
    else:
        position = torch.zeros_like(sample_index) if position is None else position
        keep = keep_mask_of_rows(seed, sample_index, position, input.shape[-1], p)
    wide = input if input.dtype is torch.float64 else input.float()
    scaled = wide * dropout_scale(dropout_threshold(p))
    return torch.where(keep.view(input.shape), scaled, 0.0).to(input.dtype)
