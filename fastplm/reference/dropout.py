"""Reference of ``ops.dropout``: the specification, in plain differentiable PyTorch."""

from __future__ import annotations

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
    """Which elements survive: bool [size].

    One Philox draw decides for 8 elements. In each block of 128 of them, choice j of draw i (half
    ``j mod 2``, the low one first, of word ``j div 2``) is that of element ``16 j + i``.

    Args:
        seed: int or 0-d int64 tensor.
        size: the number of elements, which are counted in row-major order.
        p: see ``dropout_threshold``.
        device: of the mask.
    """
    blocks = -(-size // (_LANES * _CHOICES))
    number = torch.arange(blocks * _LANES, device=device).view(blocks, _LANES)
    words = draw(
        seed, Stream.HIDDEN, sample_index=number >> 32, position=number, rounds=DROPOUT_ROUNDS
    )
    halves = torch.stack([word >> shift & 0xFFFF for word in words for shift in (0, 16)], 1)
    return halves.flatten()[:size] >= dropout_threshold(p)


def dropout_ref(input: Tensor, p: float = 0.5, *, seed: int | Tensor) -> Tensor:
    """``out = input / (1 - p)`` where an element survives, else 0.

    Args:
        input: of any shape, floating.
        p: see ``dropout_threshold``.
        seed: int or 0-d int64 tensor.

    Returns:
        The shape and dtype of ``input``. What is dropped is 0 even if it was not finite, and passes
        no gradient.
    """
    keep = keep_mask(seed, input.numel(), p, input.device).view(input.shape)
    wide = input if input.dtype is torch.float64 else input.float()
    return torch.where(keep, wide * dropout_scale(dropout_threshold(p)), 0.0).to(input.dtype)
