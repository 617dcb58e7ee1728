"""What the kernels do on a tile of logits of both sides, [BLOCK_N, BLOCK_V] fp32 each."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from fastplm.triton_kernels.linear_cross_entropy.tiles import LOG2E

#: Divergences by number; "given" is the forward KL to given probabilities.
DIVERGENCES = {"forward_kl": 1, "reverse_kl": 2, "js": 3, "given": 4}
FORWARD = tl.constexpr(1)
REVERSE = tl.constexpr(2)
JS = tl.constexpr(3)
GIVEN = tl.constexpr(4)
#: Places in the statistics [7, N] that the forward leaves. With given probabilities, TEACHER_MAX is
#: the largest logit u of the given words, TEACHER_SUM the sum of p (log p - (z - u) / T), and MEAN
#: the sum of p.
MAX = tl.constexpr(0)
SUM = tl.constexpr(1)
HARD_SUM = tl.constexpr(2)
TEACHER_MAX = tl.constexpr(3)
TEACHER_SUM = tl.constexpr(4)
MEAN = tl.constexpr(5)
LOG_PROBABILITY = tl.constexpr(6)
#: exp(80) and exp(-80) are normal numbers. A larger ratio is only multiplied by 0.
_LARGEST_GAP = tl.constexpr(80.0)
#: Sums of differences of logits are kept times this, so that they are finite where their mean is.
TOTAL_SCALE = tl.constexpr(2.0**-20)


class Setting(NamedTuple):
    """What is the same for all rows."""

    inverse_temperature: Any
    beta: Any
    distillation_scale: Any
    cross_entropy_weight: Any


class Running(NamedTuple):
    """What is known of rows after the tiles seen, [BLOCK_N] each."""

    m: Any
    l: Any  # noqa: E741
    hard_l: Any
    teacher_m: Any
    teacher_l: Any
    total: Any
    picked: Any


class Statistics(NamedTuple):
    """What the forward finds out about rows, [BLOCK_N] each."""

    m: Any
    l: Any  # noqa: E741
    hard_l: Any
    teacher_m: Any
    teacher_l: Any
    mean: Any
    log_probability: Any


class Row(NamedTuple):
    """What dz of rows is made from, once all logits were seen, [BLOCK_N] each."""

    target: Any
    m: Any
    one_over_l: Any
    one_over_hard_l: Any
    teacher_m: Any
    one_over_teacher_l: Any
    log_ratio: Any
    mean: Any
    d_target: Any


@triton.jit
def finite(m):
    """-inf - -inf is NaN: a row that has seen no finite logit yet keeps a reference point of 0."""
    return tl.where(m == float("-inf"), 0.0, m)


@triton.jit
def expected(weight, value):
    """The sum over columns, where 0 times an infinite value is 0."""
    return tl.sum(tl.where(weight == 0.0, 0.0, weight * value), 1)


@triton.jit
def moved(x, weight, old, new, by, inverse_temperature):
    """A scaled sum of differences ``x``, by weights that sum to ``weight``, from a maximum ``old``
    to ``new``; the other side's maximum rises by ``by``. What has become too small for a weight
    counts no longer, infinite as it may be."""
    shift = (by - (finite(new) - finite(old))) * (inverse_temperature * TOTAL_SCALE)
    factor = tl.exp2((old - finite(new)) * inverse_temperature * LOG2E)
    return tl.where(factor == 0.0, 0.0, factor * (x + weight * shift))


@triton.jit
def nothing_seen(BLOCK_N: tl.constexpr):
    """What is known before the first tile."""
    m = tl.full([BLOCK_N], float("-inf"), tl.float32)
    zero = tl.zeros([BLOCK_N], tl.float32)
    return m, zero, zero, m, zero, zero, zero


@triton.jit
def fold(
    z,
    t,
    offs_v,
    target,
    running,
    setting,
    DIVERGENCE: tl.constexpr,
    TEMPERED: tl.constexpr,
    HAS_TARGET: tl.constexpr,
):
    """What is known after one tile more."""
    inverse = setting.inverse_temperature
    m = tl.maximum(running.m, tl.max(z, 1))
    teacher_m = running.teacher_m
    if DIVERGENCE != GIVEN:
        teacher_m = tl.maximum(running.teacher_m, tl.max(t, 1))
    picked, hard_l = running.picked, running.hard_l
    if HAS_TARGET:
        picked += tl.sum(tl.where(offs_v[None, :] == target[:, None], z, 0.0), 1)
    z -= finite(m)[:, None]
    t -= finite(teacher_m)[:, None]
    if HAS_TARGET and TEMPERED:
        hard_l *= tl.exp2((running.m - finite(m)) * LOG2E)
        hard_l += tl.sum(tl.exp2(z * LOG2E), 1)
    if TEMPERED:
        z *= inverse
        t *= inverse
    q = tl.exp2(z * LOG2E)
    p = tl.exp2(t * LOG2E)
    total = running.total
    if DIVERGENCE == FORWARD:
        rise = finite(m) - finite(running.m)
        total = moved(total, running.teacher_l, running.teacher_m, teacher_m, rise, inverse)
        total += expected(p, (t - z) * TOTAL_SCALE)
    if DIVERGENCE == REVERSE:
        rise = finite(teacher_m) - finite(running.teacher_m)
        total = moved(total, running.l, running.m, m, rise, inverse)
        total += expected(q, (z - t) * TOTAL_SCALE)
    l_i = running.l * tl.exp2((running.m - finite(m)) * inverse * LOG2E) + tl.sum(q, 1)
    teacher_l = running.teacher_l
    if DIVERGENCE != GIVEN:
        teacher_l *= tl.exp2((running.teacher_m - finite(teacher_m)) * inverse * LOG2E)
        teacher_l += tl.sum(p, 1)
    return m, l_i, hard_l, teacher_m, teacher_l, total, picked


@triton.jit
def softened(z, t, row, setting, TEMPERED: tl.constexpr):
    """Both logits relative to their row's maximum and over T."""
    z -= row.m[:, None]
    t -= row.teacher_m[:, None]
    if TEMPERED:
        z *= setting.inverse_temperature
        t *= setting.inverse_temperature
    return z, t


@triton.jit
def over_mixture(gap, share):
    """``log q / m`` from the gap log p / q, with m = share p + (1 - share) q."""
    return 0.0 - tl.log((1.0 - share) + share * tl.exp2(gap * LOG2E))


@triton.jit
def gap_of(z, t, row):
    """log p / q of softened logits."""
    gap = (t - z) + row.log_ratio[:, None]
    # A GPU's maximum of NaN and a number is the number, unless it is told otherwise.
    all_nan: tl.constexpr = tl.PropagateNan.ALL
    gap = tl.maximum(gap, -_LARGEST_GAP, propagate_nan=all_nan)
    return tl.minimum(gap, _LARGEST_GAP, propagate_nan=all_nan)


@triton.jit
def fold_mixture(z, t, row, setting, TEMPERED: tl.constexpr):
    """The parts of KL(q || m) and of KL(p || m) of one tile, [BLOCK_N] each."""
    z, t = softened(z, t, row, setting, TEMPERED)
    gap = gap_of(z, t, row)
    q = tl.exp2(z * LOG2E) * row.one_over_l[:, None]
    p = tl.exp2(t * LOG2E) * row.one_over_teacher_l[:, None]
    student = expected(q, over_mixture(gap, setting.beta))
    return student, expected(p, over_mixture(0.0 - gap, 1.0 - setting.beta))


@triton.jit
def grad_logits(
    z,
    t,
    offs_v,
    row,
    setting,
    DIVERGENCE: tl.constexpr,
    TEMPERED: tl.constexpr,
    DISTILLS: tl.constexpr,
    HARD: tl.constexpr,
):
    """dz of one tile at an upstream gradient of 1, of given probabilities without their own part
    in it, ``-distillation_scale p``."""
    hard = tl.zeros(z.shape, tl.float32)
    if HARD:
        hard = tl.exp2((z - row.m[:, None]) * LOG2E)
        hard *= (setting.cross_entropy_weight * row.one_over_hard_l)[:, None]
    d = tl.zeros(z.shape, tl.float32)
    if DISTILLS:
        scale = setting.distillation_scale
        z, t = softened(z, t, row, setting, TEMPERED)
        q = tl.exp2(z * LOG2E) * (scale * row.one_over_l)[:, None]
        if DIVERGENCE == FORWARD:
            d = q - tl.exp2(t * LOG2E) * (scale * row.one_over_teacher_l)[:, None]
        elif DIVERGENCE == GIVEN:
            d = q * row.mean[:, None]
        elif DIVERGENCE == REVERSE:
            d = tl.where(q == 0.0, 0.0, q * ((z - t) - row.mean[:, None]))
        else:
            r = over_mixture(gap_of(z, t, row), setting.beta) - row.mean[:, None]
            d = tl.where(q == 0.0, 0.0, q * (1.0 - setting.beta) * r)
    if HARD:
        # Not softmax - 1 of rounded logits: this is exact where the row is certain.
        d += tl.where(offs_v[None, :] == row.target[:, None], row.d_target[:, None], hard)
    return d


@triton.jit
def row_from(target, known, setting, HARD: tl.constexpr):
    """What dz is made from, of the statistics of rows."""
    d_target = known.mean * 0.0
    one_over_hard_l = 1.0 / known.hard_l
    if HARD:
        # No column is that of a target outside the vocabulary: so the whole row says it.
        unknown = known.log_probability != known.log_probability
        one_over_hard_l = tl.where(unknown, float("nan"), one_over_hard_l)
        d_target = setting.cross_entropy_weight * (tl.exp2(known.log_probability * LOG2E) - 1.0)
    log_ratio = tl.log(known.l) - tl.log(known.teacher_l)
    return Row(
        target,
        known.m,
        1.0 / known.l,
        one_over_hard_l,
        known.teacher_m,
        1.0 / known.teacher_l,
        log_ratio,
        known.mean,
        d_target,
    )


@triton.jit
def row_of(statistics_ptr, rows, used, target, N, setting, HARD: tl.constexpr):
    """From the statistics of the forward; harmless numbers in unused slots."""
    at = statistics_ptr + rows
    m = tl.load(at + MAX * N, mask=used, other=0.0)
    l_i = tl.load(at + SUM * N, mask=used, other=1.0)
    teacher_m = tl.load(at + TEACHER_MAX * N, mask=used, other=0.0)
    teacher_l = tl.load(at + TEACHER_SUM * N, mask=used, other=1.0)
    mean = tl.load(at + MEAN * N, mask=used, other=0.0)
    hard_l = l_i
    log_probability = mean
    if HARD:
        hard_l = tl.load(at + HARD_SUM * N, mask=used, other=1.0)
        log_probability = tl.load(at + LOG_PROBABILITY * N, mask=used, other=0.0)
    known = Statistics(m, l_i, hard_l, teacher_m, teacher_l, mean, log_probability)
    return row_from(target, known, setting, HARD)
