"""Philox4x32-10: random words as a pure function of logical indices.

Every random choice of fastplm is drawn here (in C: ``csrc/common/philox.h``). The counter is made
of logical indices, such as sample and position, never of the thread, tile or worker that draws. So
the same seed and sample indices give the same bits on CPU and GPU, eager and fused, padded and
packed, at any world size, and after a resume.

Source: Salmon, Moraes, Dror and Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

import enum
from typing import Any

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
#: Ten rounds are the authors' default; seven are the fewest that pass all of BigCrush.
_ROUNDS = 10
DROPOUT_ROUNDS = 7


class Stream(enum.IntEnum):
    """What a word is drawn for: the low four bits of the last counter word.

    The values are part of the randomness contract and of csrc/common/philox.h: never renumber them.
    """

    MASK_SELECT = 0
    MASK_REPLACE = 1
    SAMPLE = 2
    DROPOUT = 3
    SHUFFLE = 4
    PAIR = 5
    NGRAM = 6
    SPAN = 7
    NOISE = 8
    INFILL = 9
    ORDER = 10
    HIDDEN = 11


def philox4x32(
    seed: int | Tensor,
    c0: int | Tensor,
    c1: int | Tensor,
    c2: int | Tensor,
    c3: int | Tensor,
    rounds: int = _ROUNDS,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Encrypt counters with Philox4x32.

    Args:
        seed: the 64-bit key, an int or an int64 tensor; its low half is the first key word.
        c0, c1, c2, c3: the counter words, ints or int64 tensors that broadcast; taken modulo 2^32.
        rounds: the rounds of the cipher.

    Returns:
        Four int64 tensors of the broadcast shape that hold uint32 values.
    """
    # Ints and tensors have the same operators. If all are ints, one becomes a tensor.
    if not any(isinstance(value, Tensor) for value in (seed, c0, c1, c2, c3)):
        c0 = torch.tensor(c0 & _WORD, device="cpu")
    x: list[Any] = [word & _WORD for word in (c0, c1, c2, c3)]
    key: list[Any] = [seed & _WORD, (seed >> 32) & _WORD]
    for _ in range(rounds):
        high0, low0 = _multiply(_MULTIPLIERS[0], x[0])
        high1, low1 = _multiply(_MULTIPLIERS[1], x[2])
        x = [high1 ^ x[1] ^ key[0], low1, high0 ^ x[3] ^ key[1], low0]
        key = [(word + weyl) & _WORD for word, weyl in zip(key, _WEYL, strict=True)]
    return x[0], x[1], x[2], x[3]


def draw(
    seed: int | Tensor,
    stream: Stream,
    *,
    sample_index: int | Tensor,
    position: int | Tensor = 0,
    step: int | Tensor = 0,
    rounds: int = _ROUNDS,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four random words for one position of one sample: the counter layout of all of fastplm.

    Args:
        seed, rounds: as in ``philox4x32``, and so is what is returned.
        stream: what the words are for.
        sample_index: the number of the sample in the training, int or int64 tensor.
        position: the position in the sequence, int or int64 tensor.
        step: the number of an independent draw for the same sample, below 2^28.
    """
    low, high = sample_index, sample_index >> 32
    return philox4x32(seed, position, low, high, step << 4 | int(stream), rounds)


def draw_words(
    seed: int | Tensor,
    stream: Stream,
    size: int,
    *,
    sample_index: Tensor,
    first_quad: int = 0,
    step: int | Tensor = 0,
) -> Tensor:
    """One random word for each of ``size`` neighbours: one draw serves four of them.

    Item i takes word ``i mod 4`` of the draw at position ``first_quad + i div 4``. ``sample_index``
    is [..., 1], what is returned [..., size].
    """
    quads = first_quad + torch.arange((size + 3) // 4, device=sample_index.device)
    words = draw(seed, stream, sample_index=sample_index, position=quads, step=step)
    return torch.stack(words, -1).flatten(-2)[..., :size]


def choice(word: Tensor, many: int) -> Tensor:
    """A number of ``0 … many - 1`` for each uint32 word, with equal probabilities within 2^-32."""
    return (word * many) >> 32


def uniform(word: Tensor) -> Tensor:
    """Map uint32 words to float64 in the open interval (0, 1): ``(word + 0.5) * 2^-32``."""
    return (word.double() + 0.5) * 2.0**-32


def fixed_point(probability: float) -> int:
    """``round(probability * 2^32)``: a uint32 word is below it with that probability.

    Comparing integers keeps a choice free of the rounding of any device's floating point.
    """
    return round(probability * 2**32)


def _multiply(multiplier: int, word: Any) -> tuple[Any, Any]:
    """High and low word of a 32 x 32 bit product; with a negative factor int64 never overflows."""
    product = (multiplier - 2**32) * word
    return (product >> 32) + word, product & _WORD
