"""Given probabilities in the place of a teacher's rows.

The other kernels then see the student alone, and write S q, the part of dz that all words have.
The logits of the given words are read from the stored ones, or computed again from K rows of W.
From these follow the divergence's part of the statistics, and all of dz for these words, which
replaces their S q, so that it is rounded once.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from fastplm.triton_kernels._launch import cast, cdiv, launch, next_power_of_2
from fastplm.triton_kernels.linear_cross_entropy.rows import Part
from fastplm.triton_kernels.linear_cross_entropy.tiles import load_slots, load_tile
from fastplm.triton_kernels.linear_distillation.tiles import (
    MEAN,
    TEACHER_MAX,
    TEACHER_SUM,
    Setting,
    finite,
    grad_logits,
    row_of,
)

# Words of a tile, and columns of W.
_BLOCK_K = 32
_BLOCK_E = 128


class Given(NamedTuple):
    """Words of each row and their probabilities, int64 and fp32 [N, K]; 0 where there is none."""

    indices: torch.Tensor
    probabilities: torch.Tensor

    def arguments(self) -> dict[str, Any]:
        words = self.indices.shape[1]
        return dict(
            index_ptr=self.indices,
            probability_ptr=self.probabilities,
            K=words,
            stride_index=self.indices.stride(0),
            stride_probability=self.probabilities.stride(0),
            BLOCK_K=min(_BLOCK_K, next_power_of_2(words)),
        )


@triton.jit
def load_given(index_ptrs, probability_ptrs, offs_k, K):
    """(index, probability) of some words of a row: 0 past K."""
    index = tl.load(index_ptrs + offs_k, mask=offs_k < K, other=0)
    return index, tl.load(probability_ptrs + offs_k, mask=offs_k < K, other=0.0)


@triton.jit(do_not_specialize=["rows_total"])
def _linear_distillation_given_kernel(
    # pointers
    x_ptr,
    w_ptr,
    bias_ptr,
    index_ptr,
    probability_ptr,
    order_ptr,
    count_ptr,
    z_ptr,
    picked_ptr,
    statistics_ptr,
    # sizes
    rows_total,
    V,
    K,
    inverse_temperature,
    # strides
    stride_xn,
    stride_wv,
    stride_zn,
    stride_index,
    stride_probability,
    # constexprs
    E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_E: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """The logits of the given words of one row, from stored products or from W, and what the row's
    divergence needs of them. An index outside the vocabulary makes the row NaN."""
    slot = tl.program_id(0)
    if slot >= tl.load(count_ptr).to(tl.int32):
        return
    row = tl.load(order_ptr + slot)
    slot = slot.to(tl.int64)
    m = tl.full([], float("-inf"), tl.float32)
    total = tl.zeros([], tl.float32)
    rest = tl.zeros([], tl.float32)
    for start_k in range(0, K, BLOCK_K):
        offs_k = start_k + tl.arange(0, BLOCK_K)
        index, p = load_given(
            index_ptr + row * stride_index, probability_ptr + row * stride_probability, offs_k, K
        )
        known = (p != 0.0) & (index >= 0) & (index < V)
        z = tl.zeros([BLOCK_K], tl.float32)
        if z_ptr is not None:
            z += tl.load(z_ptr + slot * stride_zn + index, mask=known, other=0.0).to(tl.float32)
        else:
            for start_e in range(0, E, BLOCK_E):
                offs_e = start_e + tl.arange(0, BLOCK_E)
                x = tl.load(x_ptr + row * stride_xn + offs_e, mask=offs_e < E, other=0.0)
                w = load_tile(w_ptr, index, known, stride_wv, start_e, E, BLOCK_E)
                z += tl.sum(w.to(tl.float32) * x.to(tl.float32)[None, :], 1)
        if HAS_BIAS:
            z += tl.load(bias_ptr + index, mask=known, other=0.0).to(tl.float32)
        tl.store(picked_ptr + slot * K + offs_k, z, mask=offs_k < K)
        if statistics_ptr is not None:
            m_new = tl.maximum(m, tl.max(tl.where(known, z, float("-inf")), 0))
            rest += total * (finite(m_new) - finite(m)) * inverse_temperature
            m = m_new
            term = p * (tl.log(p) - (z - finite(m)) * inverse_temperature)
            rest += tl.sum(tl.where(p == 0.0, 0.0, term), 0)
            total += tl.sum(tl.where(known | (p == 0.0), p, float("nan")), 0)
    if statistics_ptr is not None:
        at = statistics_ptr + row
        tl.store(at + TEACHER_MAX * rows_total, finite(m))
        tl.store(at + TEACHER_SUM * rows_total, rest)
        tl.store(at + MEAN * rows_total, total)


@triton.jit(do_not_specialize=["rows_total", "start_v", "end_v"])
def _linear_distillation_given_dz_kernel(
    # pointers
    index_ptr,
    probability_ptr,
    picked_ptr,
    target_ptr,
    order_ptr,
    count_ptr,
    g_ptr,
    statistics_ptr,
    dz_ptr,
    # sizes
    rows_total,
    K,
    start_v,
    end_v,
    inverse_temperature,
    beta,
    distillation_scale,
    cross_entropy_weight,
    # strides
    stride_index,
    stride_probability,
    stride_dzn,
    stride_g,
    # constexprs
    BLOCK_K: tl.constexpr,
    DIVERGENCE: tl.constexpr,
    TEMPERED: tl.constexpr,
    DISTILLS: tl.constexpr,
    HARD: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """dz of the given words of one row among ``start_v`` … ``end_v``, the columns of the buffer.

    A word that stands several times gets the sum of its probabilities, and is written several times
    with the same bits.
    """
    setting = Setting(inverse_temperature, beta, distillation_scale, cross_entropy_weight)
    slot = tl.program_id(0)
    count = tl.load(count_ptr).to(tl.int32)
    if slot >= count:
        return
    rows, used = load_slots(order_ptr, count, slot, 1)
    row = tl.load(order_ptr + slot)
    offs_k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    index, p = load_given(
        index_ptr + row * stride_index, probability_ptr + row * stride_probability, offs_k, K
    )
    total = tl.zeros([BLOCK_K], tl.float32)
    for k in range(0, K):
        other = tl.load(index_ptr + row * stride_index + k)
        share = tl.load(probability_ptr + row * stride_probability + k)
        total += tl.where(index == other, share, 0.0)
    here = (p != 0.0) & (index >= start_v) & (index < end_v)
    slot = slot.to(tl.int64)
    z = tl.load(picked_ptr + slot * K + offs_k, mask=here, other=0.0)[None, :]
    target = tl.load(target_ptr + rows, mask=used, other=-1).to(tl.int32)
    known = row_of(statistics_ptr, rows, used, target, rows_total, setting, HARD)
    d = grad_logits(z, z, index.to(tl.int32), known, setting, DIVERGENCE, TEMPERED, DISTILLS, HARD)
    d -= (distillation_scale * total)[None, :]  # [1, BLOCK_K]
    if g_ptr is not None:
        d *= tl.load(g_ptr + row * stride_g)
    ptrs = dz_ptr + slot * stride_dzn + (index - start_v)[None, :]
    tl.store(ptrs, cast(d, dz_ptr.dtype.element_ty, UPCAST), mask=here[None, :])


def pick_logits(
    part: Part,
    student: dict[str, Any],
    given: Given,
    setting: dict[str, Any],
    results: dict[str, Any] | None = None,
    logits: torch.Tensor | None = None,
) -> torch.Tensor:
    """Launch the logits of the given words by slot, fp32 [slots, K], from stored ``logits`` or from
    W; with ``results``, the kernel also writes their statistics."""
    input, width = student["x_ptr"], student["E"]
    picked = input.new_empty(part.rows, given.indices.shape[1], dtype=torch.float32)
    of_student = ("x_ptr", "w_ptr", "bias_ptr", "V", "stride_xn", "stride_wv", "E", "HAS_BIAS")
    launch(
        _linear_distillation_given_kernel,
        (part.rows,),
        input.device,
        z_ptr=logits,
        picked_ptr=picked,
        statistics_ptr=None if results is None else results["statistics_ptr"],
        rows_total=0 if results is None else results["rows_total"],
        inverse_temperature=setting["inverse_temperature"],
        stride_zn=0 if logits is None else logits.stride(0),
        BLOCK_E=min(_BLOCK_E, next_power_of_2(width)),
        num_warps=4,
        **part.arguments(),
        **given.arguments(),
        **{name: student[name] for name in of_student},
    )
    return picked


def place_gradients(
    part: Part,
    student: dict[str, Any],
    given: Given,
    picked: torch.Tensor,
    setting: dict[str, Any],
    results: dict[str, Any],
    dz: torch.Tensor,
    start_v: int,
    end_v: int,
    g: torch.Tensor | None = None,
) -> None:
    """Launch dz of the given words, at an upstream gradient of 1 or ``g``, into ``dz``, whose
    columns are those of the vocabulary from ``start_v`` on."""
    if not setting["DISTILLS"]:
        return
    of_setting = ("inverse_temperature", "beta", "distillation_scale", "cross_entropy_weight")
    of_setting += ("DIVERGENCE", "TEMPERED", "DISTILLS", "HARD")
    arguments = given.arguments()
    launch(
        _linear_distillation_given_dz_kernel,
        (part.rows, cdiv(arguments["K"], arguments["BLOCK_K"])),
        dz.device,
        picked_ptr=picked,
        g_ptr=g,
        dz_ptr=dz,
        start_v=start_v,
        end_v=end_v,
        stride_dzn=dz.stride(0),
        stride_g=0 if g is None else g.stride(0),
        UPCAST=student["UPCAST"],
        num_warps=1,
        **{name: results[name] for name in ("target_ptr", "statistics_ptr", "rows_total")},
        **part.arguments(),
        **arguments,
        **{name: setting[name] for name in of_setting},
    )
