"""dz of rows whose logits were not stored; dX, dW and db are ``linear_cross_entropy``'s."""

from __future__ import annotations

import triton
import triton.language as tl

from fastplm.triton_kernels.linear_cross_entropy.tiles import (
    Operands,
    Tile,
    load_slots,
    tile_ptrs,
)
from fastplm.triton_kernels.linear_distillation.forward import tile_of_both
from fastplm.triton_kernels.linear_distillation.tiles import Setting, grad_logits, row_of


@triton.jit(do_not_specialize=["rows_total"])
def _linear_distillation_bwd_logits_kernel(
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
    g_ptr,
    statistics_ptr,
    dz_ptr,
    # sizes
    rows_total,
    V,
    chunk_start,
    inverse_temperature,
    beta,
    distillation_scale,
    cross_entropy_weight,
    # strides
    stride_xn,
    stride_wv,
    stride_teacher_xn,
    stride_teacher_wv,
    stride_dzn,
    stride_g,
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
    DISTILLS: tl.constexpr,
    HARD: tl.constexpr,
    UPCAST: tl.constexpr,
    TEACHER_UPCAST: tl.constexpr,
):
    """One tile of dz into a buffer that holds the columns from ``chunk_start`` on."""
    STUDENT: tl.constexpr = Tile(E, BLOCK_N, BLOCK_V, BLOCK_E, HAS_BIAS, UPCAST)
    TEACHER: tl.constexpr = Tile(
        TEACHER_E, BLOCK_N, BLOCK_V, BLOCK_E, TEACHER_HAS_BIAS, TEACHER_UPCAST
    )
    student = Operands(x_ptr, w_ptr, bias_ptr, V, stride_xn, stride_wv)
    teacher = Operands(
        teacher_x_ptr, teacher_w_ptr, teacher_bias_ptr, V, stride_teacher_xn, stride_teacher_wv
    )
    setting = Setting(inverse_temperature, beta, distillation_scale, cross_entropy_weight)
    start_n, start_c = tl.program_id(0) * BLOCK_N, tl.program_id(1) * BLOCK_V
    count = tl.load(count_ptr).to(tl.int32)
    if start_n >= count:
        return
    rows, used = load_slots(order_ptr, count, start_n, BLOCK_N)
    start_v = chunk_start + start_c
    z, t = tile_of_both(student, teacher, rows, used, start_v, STUDENT, TEACHER)
    target = tl.load(target_ptr + rows, mask=used, other=-1).to(tl.int32)
    row = row_of(statistics_ptr, rows, used, target, rows_total, setting, HARD)
    offs_v = start_v + tl.arange(0, BLOCK_V)
    d = grad_logits(z, t, offs_v, row, setting, DIVERGENCE, TEMPERED, DISTILLS, HARD)
    g = tl.load(g_ptr + rows * stride_g, mask=used, other=0.0)
    dz = tl.where((offs_v < V)[None, :], d * g[:, None], 0.0)
    ptrs = tile_ptrs(dz_ptr, start_n, start_c, stride_dzn, BLOCK_N, BLOCK_V)
    tl.store(ptrs, dz.to(dz_ptr.dtype.element_ty), mask=used[:, None])
