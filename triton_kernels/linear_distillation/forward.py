"""The forward: row statistics from logits that are kept, or computed tile by tile."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from fastplm.triton_kernels._launch import cast, cdiv, launch
from fastplm.triton_kernels.linear_cross_entropy import configs, products
from fastplm.triton_kernels.linear_cross_entropy.forward import kept_logits
from fastplm.triton_kernels.linear_cross_entropy.rows import Part, fill_slots
from fastplm.triton_kernels.linear_cross_entropy.tiles import (
    Operands,
    Tile,
    load_bias,
    load_slots,
    streamed_products,
)
from fastplm.triton_kernels.linear_distillation.configs import ROWS_TILE, tile_config
from fastplm.triton_kernels.linear_distillation.given import Given, pick_logits, place_gradients
from fastplm.triton_kernels.linear_distillation.tiles import (
    FORWARD,
    GIVEN,
    HARD_SUM,
    JS,
    LOG2E,
    LOG_PROBABILITY,
    MAX,
    MEAN,
    REVERSE,
    SUM,
    TEACHER_MAX,
    TEACHER_SUM,
    TOTAL_SCALE,
    Running,
    Setting,
    Statistics,
    finite,
    fold,
    fold_mixture,
    grad_logits,
    moved,
    nothing_seen,
    row_from,
    row_of,
)

#: Partial results of a split, and the places of two of them; JS's second pass has only two results.
_PARTS = tl.constexpr(7)
_TOTAL = tl.constexpr(5)
_PICKED = tl.constexpr(6)


class Losses(NamedTuple):
    """Where to write the loss of each row and its parts, [N] each, and their weights."""

    loss_ptr: Any
    distillation_ptr: Any
    cross_entropy_ptr: Any
    temperature_squared: Any
    distillation_weight: Any
    cross_entropy_weight: Any


@triton.jit
def tile_of_both(
    student, teacher, rows, used, start_v, STUDENT: tl.constexpr, TEACHER: tl.constexpr
):
    """(z, t) of one tile, with their biases: -inf past V. [BLOCK_N, BLOCK_V]"""
    offs_v = start_v + tl.arange(0, STUDENT.BLOCK_V)
    z = streamed_products(student, rows, used, start_v, STUDENT)
    z += load_bias(student, offs_v, STUDENT.HAS_BIAS)[None, :]
    t = streamed_products(teacher, rows, used, start_v, TEACHER)
    t += load_bias(teacher, offs_v, TEACHER.HAS_BIAS)[None, :]
    return z, t


@triton.jit
def store_losses(losses, rows, exists, used, distillation, log_probability):
    """Loss and its parts; 0 in ignored rows. A weight of 0 takes out even what is infinite."""
    scale = losses.distillation_weight * losses.temperature_squared
    weight, cross_entropy = losses.cross_entropy_weight, 0.0 - log_probability
    loss = tl.where(scale == 0.0, 0.0, scale * distillation)
    loss += tl.where(weight == 0.0, 0.0, weight * cross_entropy)
    tl.store(losses.loss_ptr + rows, tl.where(used, loss, 0.0), mask=exists)
    tl.store(losses.distillation_ptr + rows, tl.where(used, distillation, 0.0), mask=exists)
    tl.store(losses.cross_entropy_ptr + rows, tl.where(used, cross_entropy, 0.0), mask=exists)


@triton.jit
def store_statistics(at, rows_total, exists, used, known):
    """The statistics of rows; 0 in ignored ones."""
    tl.store(at + MAX * rows_total, tl.where(used, known.m, 0.0), mask=exists)
    tl.store(at + SUM * rows_total, tl.where(used, known.l, 0.0), mask=exists)
    tl.store(at + HARD_SUM * rows_total, tl.where(used, known.hard_l, 0.0), mask=exists)
    tl.store(at + TEACHER_MAX * rows_total, tl.where(used, known.teacher_m, 0.0), mask=exists)
    tl.store(at + TEACHER_SUM * rows_total, tl.where(used, known.teacher_l, 0.0), mask=exists)
    tl.store(at + MEAN * rows_total, tl.where(used, known.mean, 0.0), mask=exists)
    log_probability = tl.where(used, known.log_probability, 0.0)
    tl.store(at + LOG_PROBABILITY * rows_total, log_probability, mask=exists)


@triton.jit
def hard_part(target, m, hard_l, picked, V, HAS_TARGET: tl.constexpr):
    """The target's log-probability: 0 without targets, NaN where no tile has met it."""
    log_probability = m * 0.0
    if HAS_TARGET:
        log_probability = (picked - m) - tl.log(hard_l)
        known = (target >= 0) & (target < V)
        log_probability = tl.where(known, log_probability, float("nan"))
    return log_probability


@triton.jit
def load_teacher(at, N, used):
    """(teacher_m, teacher_l, total) of given probabilities, which are known before the student."""
    teacher_m = tl.load(at + TEACHER_MAX * N, mask=used, other=0.0)
    teacher_l = tl.load(at + TEACHER_SUM * N, mask=used, other=1.0)
    return teacher_m, teacher_l, tl.load(at + MEAN * N, mask=used, other=0.0)


@triton.jit
def divergence_of(
    m, l_i, teacher_m, teacher_l, total, inverse_temperature, DIVERGENCE: tl.constexpr
):
    """(mean, divergence) of a KL: of JS nothing is known yet."""
    log_ratio = tl.log(l_i) - tl.log(teacher_l)
    mean = m * 0.0
    divergence = mean
    if DIVERGENCE == FORWARD:
        mean = total / (teacher_l * TOTAL_SCALE)
        divergence = mean + log_ratio
    if DIVERGENCE == REVERSE:
        mean = total / (l_i * TOTAL_SCALE)
        divergence = mean - log_ratio
    if DIVERGENCE == GIVEN:
        mean = total
        rest = (m - teacher_m) * inverse_temperature + tl.log(l_i)
        divergence = teacher_l + tl.where(mean == 0.0, 0.0, mean * rest)
    return mean, divergence


@triton.jit(do_not_specialize=["N", "rows_total"])
def _linear_distillation_fwd_kernel(
    # pointers
    x_ptr,
    w_ptr,
    bias_ptr,
    teacher_x_ptr,
    teacher_w_ptr,
    teacher_bias_ptr,
    target_ptr,
    order_ptr,
    count_ptr,
    statistics_ptr,
    split_ptr,
    # sizes
    N,
    rows_total,
    V,
    split_columns,
    inverse_temperature,
    beta,
    # strides
    stride_xn,
    stride_wv,
    stride_teacher_xn,
    stride_teacher_wv,
    # constexprs
    E: tl.constexpr,
    TEACHER_E: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_E: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    TEACHER_HAS_BIAS: tl.constexpr,
    DIVERGENCE: tl.constexpr,
    TEMPERED: tl.constexpr,
    HAS_TARGET: tl.constexpr,
    MIXTURE: tl.constexpr,
    UPCAST: tl.constexpr,
    TEACHER_UPCAST: tl.constexpr,
):
    """A tile of rows and one split of the vocabulary; with ``MIXTURE`` the second pass of JS."""
    STUDENT: tl.constexpr = Tile(E, BLOCK_N, BLOCK_V, BLOCK_E, HAS_BIAS, UPCAST)
    TEACHER: tl.constexpr = Tile(
        TEACHER_E, BLOCK_N, BLOCK_V, BLOCK_E, TEACHER_HAS_BIAS, TEACHER_UPCAST
    )
    student = Operands(x_ptr, w_ptr, bias_ptr, V, stride_xn, stride_wv)
    teacher = Operands(
        teacher_x_ptr, teacher_w_ptr, teacher_bias_ptr, V, stride_teacher_xn, stride_teacher_wv
    )
    setting = Setting(inverse_temperature, beta, 0.0, 0.0)
    start_n, split = tl.program_id(0) * BLOCK_N, tl.program_id(1)
    count = tl.load(count_ptr).to(tl.int32)
    if start_n >= count:
        return
    rows, used = load_slots(order_ptr, count, start_n, BLOCK_N)
    offs_n = start_n + tl.arange(0, BLOCK_N)
    first_v = split * split_columns
    end_v = tl.minimum(first_v + split_columns, V)
    if MIXTURE:
        row = row_of(statistics_ptr, rows, used, rows, rows_total, setting, False)
        of_q = tl.zeros([BLOCK_N], tl.float32)
        of_p = tl.zeros([BLOCK_N], tl.float32)
        for start_v in range(first_v, end_v, BLOCK_V):
            z, t = tile_of_both(student, teacher, rows, used, start_v, STUDENT, TEACHER)
            more_q, more_p = fold_mixture(z, t, row, setting, TEMPERED)
            of_q += more_q
            of_p += more_p
        offs_s = split.to(tl.int64) * 2 * N + offs_n
        tl.store(split_ptr + offs_s, of_q, mask=used)
        tl.store(split_ptr + offs_s + N, of_p, mask=used)
    else:
        # A target that does not fit in 32 bits is out of range, which the combining kernel sees.
        target = tl.load(target_ptr + rows, mask=used, other=-1).to(tl.int32)
        m, l_i, hard_l, teacher_m, teacher_l, total, picked = nothing_seen(BLOCK_N)
        for start_v in range(first_v, end_v, BLOCK_V):
            z, t = tile_of_both(student, teacher, rows, used, start_v, STUDENT, TEACHER)
            m, l_i, hard_l, teacher_m, teacher_l, total, picked = fold(
                z,
                t,
                start_v + tl.arange(0, BLOCK_V),
                target,
                Running(m, l_i, hard_l, teacher_m, teacher_l, total, picked),
                setting,
                DIVERGENCE,
                TEMPERED,
                HAS_TARGET,
            )
        ptrs = split_ptr + split.to(tl.int64) * _PARTS * N + offs_n
        tl.store(ptrs + MAX * N, m, mask=used)
        tl.store(ptrs + SUM * N, l_i, mask=used)
        tl.store(ptrs + HARD_SUM * N, hard_l, mask=used)
        tl.store(ptrs + TEACHER_MAX * N, teacher_m, mask=used)
        tl.store(ptrs + TEACHER_SUM * N, teacher_l, mask=used)
        tl.store(ptrs + _TOTAL * N, total, mask=used)
        tl.store(ptrs + _PICKED * N, picked, mask=used)


@triton.jit(do_not_specialize=["N", "rows_total"])
def _linear_distillation_combine_kernel(
    # pointers
    target_ptr,
    order_ptr,
    count_ptr,
    split_ptr,
    loss_ptr,
    distillation_ptr,
    cross_entropy_ptr,
    statistics_ptr,
    # sizes
    N,
    rows_total,
    V,
    num_splits,
    inverse_temperature,
    temperature_squared,
    beta,
    distillation_weight,
    cross_entropy_weight,
    # constexprs
    BLOCK_N: tl.constexpr,
    DIVERGENCE: tl.constexpr,
    TEMPERED: tl.constexpr,
    HAS_TARGET: tl.constexpr,
    MIXTURE: tl.constexpr,
):
    """What the forward says of each row, from its splits; 0 for ignored rows."""
    losses = Losses(
        loss_ptr,
        distillation_ptr,
        cross_entropy_ptr,
        temperature_squared,
        distillation_weight,
        cross_entropy_weight,
    )
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    exists = offs_n < N
    used = offs_n < tl.load(count_ptr).to(tl.int32)
    rows = tl.load(order_ptr + offs_n, mask=exists, other=0)
    at = statistics_ptr + rows
    ptrs = split_ptr + offs_n.to(tl.int64)
    if MIXTURE:
        of_q = tl.zeros([BLOCK_N], tl.float32)
        of_p = tl.zeros([BLOCK_N], tl.float32)
        for _ in range(0, num_splits):
            of_q += tl.load(ptrs, mask=used, other=0.0)
            of_p += tl.load(ptrs + N, mask=used, other=0.0)
            ptrs += 2 * N
        distillation = beta * of_p + (1.0 - beta) * of_q
        log_probability = tl.load(at + LOG_PROBABILITY * rows_total, mask=used, other=0.0)
        tl.store(at + MEAN * rows_total, tl.where(used, of_q, 0.0), mask=exists)
    else:
        inverse = inverse_temperature
        m, l_i, hard_l, teacher_m, teacher_l, total, picked = nothing_seen(BLOCK_N)
        for _ in range(0, num_splits):
            m_s = tl.load(ptrs + MAX * N, mask=used, other=0.0)
            l_s = tl.load(ptrs + SUM * N, mask=used, other=1.0)
            teacher_m_s = tl.load(ptrs + TEACHER_MAX * N, mask=used, other=0.0)
            teacher_l_s = tl.load(ptrs + TEACHER_SUM * N, mask=used, other=1.0)
            total_s = tl.load(ptrs + _TOTAL * N, mask=used, other=0.0)
            picked += tl.load(ptrs + _PICKED * N, mask=used, other=0.0)
            m_new = tl.maximum(m, m_s)
            teacher_m_new = tl.maximum(teacher_m, teacher_m_s)
            if HAS_TARGET and TEMPERED:
                hard_s = tl.load(ptrs + HARD_SUM * N, mask=used, other=0.0)
                hard_l *= tl.exp2((m - finite(m_new)) * LOG2E)
                hard_l += hard_s * tl.exp2((m_s - finite(m_new)) * LOG2E)
            if DIVERGENCE == FORWARD:
                rise = finite(m_new) - finite(m)
                total = moved(total, teacher_l, teacher_m, teacher_m_new, rise, inverse)
                rise = finite(m_new) - finite(m_s)
                total += moved(total_s, teacher_l_s, teacher_m_s, teacher_m_new, rise, inverse)
            if DIVERGENCE == REVERSE:
                rise = finite(teacher_m_new) - finite(teacher_m)
                total = moved(total, l_i, m, m_new, rise, inverse)
                rise = finite(teacher_m_new) - finite(teacher_m_s)
                total += moved(total_s, l_s, m_s, m_new, rise, inverse)
            l_i *= tl.exp2((m - finite(m_new)) * inverse * LOG2E)
            l_i += l_s * tl.exp2((m_s - finite(m_new)) * inverse * LOG2E)
            teacher_l *= tl.exp2((teacher_m - finite(teacher_m_new)) * inverse * LOG2E)
            teacher_l += teacher_l_s * tl.exp2(
                (teacher_m_s - finite(teacher_m_new)) * inverse * LOG2E
            )
            m = m_new
            teacher_m = teacher_m_new
            ptrs += _PARTS * N
        if not TEMPERED:
            hard_l = l_i
        target = tl.load(target_ptr + rows, mask=used, other=0)
        log_probability = hard_part(target, m, hard_l, picked, V, HAS_TARGET)
        if DIVERGENCE == GIVEN:
            teacher_m, teacher_l, total = load_teacher(at, rows_total, used)
        mean, distillation = divergence_of(m, l_i, teacher_m, teacher_l, total, inverse, DIVERGENCE)
        known = Statistics(m, l_i, hard_l, teacher_m, teacher_l, mean, log_probability)
        store_statistics(at, rows_total, exists, used, known)
    if MIXTURE or DIVERGENCE != JS:
        store_losses(losses, rows, exists, used, distillation, log_probability)


@triton.jit(do_not_specialize=["N", "rows_total"])
def _linear_distillation_rows_kernel(
    # pointers
    bias_ptr,
    teacher_bias_ptr,
    target_ptr,
    order_ptr,
    count_ptr,
    loss_ptr,
    distillation_ptr,
    cross_entropy_ptr,
    statistics_ptr,
    z_ptr,
    t_ptr,
    # sizes
    N,
    rows_total,
    V,
    inverse_temperature,
    temperature_squared,
    beta,
    distillation_scale,
    distillation_weight,
    cross_entropy_weight,
    # strides
    stride_zn,
    stride_tn,
    # constexprs
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    TEACHER_HAS_BIAS: tl.constexpr,
    DIVERGENCE: tl.constexpr,
    TEMPERED: tl.constexpr,
    HAS_TARGET: tl.constexpr,
    DISTILLS: tl.constexpr,
    HARD: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Rows of stored logits of both sides: their statistics, then D in the place of the student's.

    D of an unused slot is 0, whatever its memory holds, because the products read it too.
    """
    losses = Losses(
        loss_ptr,
        distillation_ptr,
        cross_entropy_ptr,
        temperature_squared,
        distillation_weight,
        cross_entropy_weight,
    )
    setting = Setting(inverse_temperature, beta, distillation_scale, cross_entropy_weight)
    start_n = tl.program_id(0) * BLOCK_N
    offs_n = start_n + tl.arange(0, BLOCK_N)
    exists = offs_n < N
    count = tl.load(count_ptr).to(tl.int32)
    used = offs_n < count
    rows = tl.load(order_ptr + offs_n, mask=exists, other=0)
    target = tl.load(target_ptr + rows, mask=used, other=-1)
    narrow_target = target.to(tl.int32)
    m, l_i, hard_l, teacher_m, teacher_l, total, picked = nothing_seen(BLOCK_N)
    end_v = tl.where(start_n < count, V, 0)
    for start_v in range(0, end_v, BLOCK_V):
        z = kept_logits(z_ptr, bias_ptr, offs_n, used, start_v, V, stride_zn, BLOCK_V, HAS_BIAS)
        t = kept_logits(
            t_ptr, teacher_bias_ptr, offs_n, used, start_v, V, stride_tn, BLOCK_V, TEACHER_HAS_BIAS
        )
        m, l_i, hard_l, teacher_m, teacher_l, total, picked = fold(
            z,
            t,
            start_v + tl.arange(0, BLOCK_V),
            narrow_target,
            Running(m, l_i, hard_l, teacher_m, teacher_l, total, picked),
            setting,
            DIVERGENCE,
            TEMPERED,
            HAS_TARGET,
        )
    if not TEMPERED:
        hard_l = l_i
    log_probability = hard_part(target, m, hard_l, picked, V, HAS_TARGET)
    if DIVERGENCE == GIVEN:
        teacher_m, teacher_l, total = load_teacher(statistics_ptr + rows, rows_total, used)
    mean, distillation = divergence_of(
        m, l_i, teacher_m, teacher_l, total, inverse_temperature, DIVERGENCE
    )
    # What unused slots take is not stored, and D is 0 there.
    known = Statistics(m, l_i, hard_l, teacher_m, teacher_l, mean, log_probability)
    row = row_from(narrow_target, known, setting, HARD)
    if DIVERGENCE == JS:
        of_q = tl.zeros([BLOCK_N], tl.float32)
        of_p = tl.zeros([BLOCK_N], tl.float32)
        for start_v in range(0, end_v, BLOCK_V):
            z = kept_logits(z_ptr, bias_ptr, offs_n, used, start_v, V, stride_zn, BLOCK_V, HAS_BIAS)
            t = kept_logits(
                t_ptr,
                teacher_bias_ptr,
                offs_n,
                used,
                start_v,
                V,
                stride_tn,
                BLOCK_V,
                TEACHER_HAS_BIAS,
            )
            more_q, more_p = fold_mixture(z, t, row, setting, TEMPERED)
            of_q += more_q
            of_p += more_p
        distillation = beta * of_p + (1.0 - beta) * of_q
        known = Statistics(m, l_i, hard_l, teacher_m, teacher_l, of_q, log_probability)
        row = row_from(narrow_target, known, setting, HARD)
    store_statistics(statistics_ptr + rows, rows_total, exists, used, known)
    store_losses(losses, rows, exists, used, distillation, log_probability)
    for start_v in range(0, V, BLOCK_V):
        z = kept_logits(z_ptr, bias_ptr, offs_n, used, start_v, V, stride_zn, BLOCK_V, HAS_BIAS)
        t = kept_logits(
            t_ptr, teacher_bias_ptr, offs_n, used, start_v, V, stride_tn, BLOCK_V, TEACHER_HAS_BIAS
        )
        offs_v = start_v + tl.arange(0, BLOCK_V)
        d = grad_logits(z, t, offs_v, row, setting, DIVERGENCE, TEMPERED, DISTILLS, HARD)
        d = tl.where(used[:, None] & (offs_v < V)[None, :], d, 0.0)
        ptrs = z_ptr + offs_n.to(tl.int64)[:, None] * stride_zn + offs_v[None, :]
        mask = exists[:, None] & (offs_v < stride_zn)[None, :]
        tl.store(ptrs, cast(d, z_ptr.dtype.element_ty, UPCAST), mask=mask)


def forward_kept(
    part: Part,
    student: dict[str, Any],
    teacher: dict[str, Any],
    weights: tuple[torch.Tensor, torch.Tensor],
    setting: dict[str, Any],
    results: dict[str, Any],
    grad_logits: torch.Tensor,
    slots: torch.Tensor,
    given: Given | None,
) -> None:
    """Launch the forward of the rows that keep D, which ends in ``grad_logits``."""
    input, vocab = student["x_ptr"], student["V"]
    columns = products.whole_vectors(vocab)
    sides, teacher_logits = [(student, slots, grad_logits)], grad_logits
    if given is None:
        taught = teacher["x_ptr"]
        teacher_slots = taught.new_empty(part.rows, taught.shape[1])
        teacher_logits = taught.new_empty(part.rows, grad_logits.shape[1])
        sides.append((teacher, teacher_slots, teacher_logits))
    for (side, rows, logits), weight in zip(sides, weights, strict=False):
        fill_slots(part, side, rows)
        products.multiply(rows, weight.t(), logits[:, :columns])
    if given is not None:
        picked = pick_logits(part, student, given, setting, results, grad_logits)
    block_n, block_v, num_warps = ROWS_TILE
    launch(
        _linear_distillation_rows_kernel,
        (cdiv(part.rows, block_n),),
        input.device,
        bias_ptr=student["bias_ptr"],
        teacher_bias_ptr=teacher["bias_ptr"],
        z_ptr=grad_logits,
        t_ptr=teacher_logits,
        N=part.rows,
        V=vocab,
        stride_zn=grad_logits.stride(0),
        stride_tn=teacher_logits.stride(0),
        BLOCK_N=block_n,
        BLOCK_V=block_v,
        HAS_BIAS=student["HAS_BIAS"],
        TEACHER_HAS_BIAS=teacher["HAS_BIAS"],
        UPCAST=student["UPCAST"],
        num_warps=num_warps,
        **part.arguments(),
        **setting,
        **results,
    )
    if given is not None:
        place_gradients(part, student, given, picked, setting, results, grad_logits, 0, vocab)


def both_sides(student: dict[str, Any], teacher: dict[str, Any]) -> dict[str, Any]:
    """The keywords of the kernels that multiply tiles of both sides."""
    return dict(
        **student,
        teacher_x_ptr=teacher["x_ptr"],
        teacher_w_ptr=teacher["w_ptr"],
        teacher_bias_ptr=teacher["bias_ptr"],
        stride_teacher_xn=teacher["stride_xn"],
        stride_teacher_wv=teacher["stride_wv"],
        TEACHER_E=teacher["E"],
        TEACHER_HAS_BIAS=teacher["HAS_BIAS"],
        TEACHER_UPCAST=teacher["UPCAST"],
    )


def forward_recomputed(
    part: Part,
    student: dict[str, Any],
    teacher: dict[str, Any],
    setting: dict[str, Any],
    results: dict[str, Any],
    given: Given | None,
) -> None:
    """Launch the forward of the rows whose logits are never stored."""
    input, rows, vocab = student["x_ptr"], part.rows, student["V"]
    taught = teacher["x_ptr"]
    if given is not None:
        taught = None
        pick_logits(part, student, given, setting, results)
    of_setting = {
        name: setting[name]
        for name in ("inverse_temperature", "beta", "DIVERGENCE", "TEMPERED", "HAS_TARGET")
    }
    of_rows = {
        name: value
        for name, value in setting.items()
        if name not in ("DISTILLS", "HARD", "distillation_scale")
    }
    passes = (False, True) if setting["DIVERGENCE"] == JS.value else (False,)
    for mixture in passes:
        config = tile_config("js" if mixture else "forward", input, taught)
        columns = configs.split_columns_of(config["BLOCK_V"])
        splits = cdiv(vocab, columns)
        split = input.new_empty(splits, 2 if mixture else _PARTS.value, rows, dtype=torch.float32)
        launch(
            _linear_distillation_fwd_kernel,
            (cdiv(rows, config["BLOCK_N"]), splits),
            input.device,
            target_ptr=results["target_ptr"],
            statistics_ptr=results["statistics_ptr"],
            split_ptr=split,
            N=rows,
            rows_total=results["rows_total"],
            split_columns=columns,
            MIXTURE=mixture,
            **part.arguments(),
            **both_sides(student, teacher),
            **of_setting,
            **config,
        )
        launch(
            _linear_distillation_combine_kernel,
            (cdiv(rows, 128),),
            input.device,
            split_ptr=split,
            N=rows,
            V=vocab,
            num_splits=splits,
            BLOCK_N=128,
            MIXTURE=mixture,
            **part.arguments(),
            **of_rows,
            **results,
        )
