"""Bias, dropout, residual and norm of each row in one pass, and their gradients in another.

    z = dropout(x + linear_bias) + residual            rounded once: the sum, which is kept
    y = xhat w + b        xhat = (z - mean) rstd       rstd = 1 / sqrt(mean((z - mean)^2) + eps)
    dz = rstd (dy w - mean(dy w) - xhat mean(dy w xhat)) + dsum
    dx = dz where kept / (1 - p)        dw = sum dy xhat     db = sum dy     dlinear_bias = sum dx

With IS_RMS (T5) the mean is left out: xhat = z rstd, rstd = 1 / sqrt(mean(z^2) + eps).

Source: Ba, Kiros and Hinton 2016 (arXiv 1607.06450), equation 4; Zhang and Sennrich 2019 (arXiv
1910.07467), equation 4.

Legend: N rows · E row width · R row groups; x, z, y tiles of rows, w the weight, b the bias.

The backward computes mean and rstd again from the sum, and the mask from the seed. Each of its
programs keeps the sums of dw, db and dlinear_bias over its group of rows in registers, in fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import triton
import triton.language as tl

from fastplm.triton_kernels._launch import arch_of, launch
from fastplm.triton_kernels._rows import (
    add_groups,
    draws_of,
    groups_of,
    kept,
    load_rows,
    load_seed,
    load_vector,
    rounded,
    statistics,
    store_part,
    tile_of,
)

# Tiles of the backward's loop that are in registers or on their way.
_STAGES = 3
#: Rows that are wider do not fit into the registers.
MAX_WIDTH = 4096


@triton.jit(do_not_specialize=["num_rows", "threshold"])
def _dropout_add_layer_norm_fwd_kernel(
    # pointers
    x_ptr,
    residual_ptr,
    w_ptr,
    b_ptr,
    linear_bias_ptr,
    seed_ptr,
    sample_ptr,
    position_ptr,
    out_ptr,
    sum_ptr,
    # sizes
    num_rows,
    threshold,
    keep_scale,
    eps,
    # strides
    stride_xn,
    stride_rn,
    # constexprs
    WIDTH: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
    IS_RMS: tl.constexpr,
):
    offs_n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    exists = offs_n < num_rows
    if seed_ptr is not None:
        random = (load_seed(seed_ptr, BLOCK_N, PART), sample_ptr, position_ptr)
        draws = draws_of(random, threshold, offs_n, exists, WIDTH, PART, PARTS)
    x = load_rows(x_ptr, offs_n, exists, stride_xn, WIDTH, PART, PARTS)
    residual = load_rows(residual_ptr, offs_n, exists, stride_rn, WIDTH, PART, PARTS)
    z = ()
    for i in tl.static_range(PARTS):
        x_i = x[i].to(tl.float32)  # [BLOCK_N, PART]
        if linear_bias_ptr is not None:
            x_i += load_vector(linear_bias_ptr, i, WIDTH, BLOCK_N, PART)
        if seed_ptr is not None:
            x_i = tl.where(kept(draws[i], PART), x_i * keep_scale, 0.0)
        z_i = rounded(x_i + residual[i].to(tl.float32), sum_ptr.dtype.element_ty)
        store_part(sum_ptr, z_i.to(tl.float32), i, offs_n, exists, WIDTH, PART)
        z = z + (z_i,)
    xhat, rstd = statistics(z, eps, IS_RMS, WIDTH, PART)
    for i in tl.static_range(PARTS):
        w_i = load_vector(w_ptr, i, WIDTH, BLOCK_N, PART)
        y = xhat[i] * rstd[:, None] * w_i  # [BLOCK_N, PART]
        if b_ptr is not None:
            y += load_vector(b_ptr, i, WIDTH, BLOCK_N, PART)
        store_part(out_ptr, y, i, offs_n, exists, WIDTH, PART)


@triton.jit(do_not_specialize=["num_rows", "threshold"])
def _dropout_add_layer_norm_bwd_kernel(
    # pointers
    dy_ptr,
    sum_ptr,
    dsum_ptr,
    w_ptr,
    seed_ptr,
    sample_ptr,
    position_ptr,
    dx_ptr,
    dresidual_ptr,
    partial_ptr,
    # sizes
    num_rows,
    rows_per_group,
    threshold,
    keep_scale,
    eps,
    # strides
    stride_dyn,
    stride_zn,
    stride_dsn,
    # constexprs
    WIDTH: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
    IS_RMS: tl.constexpr,
    STAGES: tl.constexpr,
    NEED_DW: tl.constexpr,
    NEED_DB: tl.constexpr,
    NEED_DLINEAR: tl.constexpr,
):
    if seed_ptr is not None:
        random = (load_seed(seed_ptr, BLOCK_N, PART), sample_ptr, position_ptr)
    group = tl.program_id(0).to(tl.int64)
    dw, db, dlinear, w = (), (), (), ()
    for i in tl.static_range(PARTS):
        zero = tl.zeros([BLOCK_N, PART], tl.float32)
        dw, db, dlinear = dw + (zero,), db + (zero,), dlinear + (zero,)
        w = w + (load_vector(w_ptr, i, WIDTH, BLOCK_N, PART),)

    first = group * rows_per_group
    end = tl.minimum(first + rows_per_group, num_rows)
    for start in tl.range(0, (end - first).to(tl.int32), BLOCK_N, num_stages=STAGES):
        offs_n = first + start + tl.arange(0, BLOCK_N)
        exists = offs_n < end
        if seed_ptr is not None:
            if dx_ptr is not None or NEED_DLINEAR:
                draws = draws_of(random, threshold, offs_n, exists, WIDTH, PART, PARTS)
        dy = load_rows(dy_ptr, offs_n, exists, stride_dyn, WIDTH, PART, PARTS)
        z = load_rows(sum_ptr, offs_n, exists, stride_zn, WIDTH, PART, PARTS)
        if dsum_ptr is not None:
            dsum = load_rows(dsum_ptr, offs_n, exists, stride_dsn, WIDTH, PART, PARTS)
        xhat, rstd = statistics(z, eps, IS_RMS, WIDTH, PART)
        rstd = tl.where(exists, rstd, 0.0)  # infinite where there is no row and eps is 0
        along = tl.zeros([BLOCK_N, PART], tl.float32)
        total = tl.zeros([BLOCK_N, PART], tl.float32)
        for i in tl.static_range(PARTS):
            weighted = dy[i].to(tl.float32) * w[i]
            along += weighted * (xhat[i] * rstd[:, None])
            total += weighted
        mean_along = tl.sum(along, 1) / WIDTH  # [BLOCK_N]
        mean = tl.sum(total, 1) / WIDTH
        new_dw, new_db, new_dlinear = (), (), ()
        for i in tl.static_range(PARTS):
            dy_i, xhat_i = dy[i].to(tl.float32), xhat[i] * rstd[:, None]
            dz = dy_i * w[i] - xhat_i * mean_along[:, None]  # [BLOCK_N, PART]
            if not IS_RMS:
                dz -= mean[:, None]
            dz *= rstd[:, None]
            if dsum_ptr is not None:
                dz += dsum[i].to(tl.float32)
            if dresidual_ptr is not None:
                store_part(dresidual_ptr, dz, i, offs_n, exists, WIDTH, PART)
            dx = dz
            if seed_ptr is not None:
                if dx_ptr is not None or NEED_DLINEAR:
                    dx = tl.where(kept(draws[i], PART), dz * keep_scale, 0.0)
            if dx_ptr is not None:
                store_part(dx_ptr, dx, i, offs_n, exists, WIDTH, PART)
            new_dw = new_dw + (dw[i] + dy_i * xhat_i if NEED_DW else dw[i],)
            new_db = new_db + (db[i] + dy_i if NEED_DB else db[i],)
            new_dlinear = new_dlinear + (dlinear[i] + dx if NEED_DLINEAR else dlinear[i],)
        dw, db, dlinear = new_dw, new_db, new_dlinear

    for i in tl.static_range(PARTS):
        offs_e = i * PART + tl.arange(0, PART)
        ptrs = partial_ptr + group * (3 * WIDTH) + offs_e
        if NEED_DW:
            tl.store(ptrs, tl.sum(dw[i], 0), mask=offs_e < WIDTH)
        if NEED_DB:
            tl.store(ptrs + WIDTH, tl.sum(db[i], 0), mask=offs_e < WIDTH)
        if NEED_DLINEAR:
            tl.store(ptrs + 2 * WIDTH, tl.sum(dlinear[i], 0), mask=offs_e < WIDTH)


def dropout_add_layer_norm_fwd(
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    linear_bias: torch.Tensor | None,
    seed: torch.Tensor | None,
    sample_index: torch.Tensor | None,
    position: torch.Tensor | None,
    *,
    threshold: int,
    keep_scale: float,
    eps: float,
    is_rms: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the forward on rows [N, E]: out in the dtype of ``input``, sum in ``residual``'s.

    Args:
        threshold: how many of the 65536 values of 16 bits drop an element; ``keep_scale``: what an
            element is multiplied by that stays. Neither is read without ``seed``.
    """
    rows, width = input.shape
    tile = tile_of(width)
    if arch_of(input.device) >= 120:  # where draws by sample spill beside so many rows
        tile = tile._replace(rows=max(1, tile.rows // 2))
    out, sum = input.new_empty(rows, width), residual.new_empty(rows, width)
    launch(
        _dropout_add_layer_norm_fwd_kernel,
        (-(-rows // tile.rows),),
        input.device,
        x_ptr=input,
        residual_ptr=residual,
        w_ptr=weight,
        b_ptr=bias,
        linear_bias_ptr=linear_bias,
        seed_ptr=seed,
        sample_ptr=sample_index,
        position_ptr=position,
        out_ptr=out,
        sum_ptr=sum,
        num_rows=rows,
        threshold=threshold,
        keep_scale=keep_scale,
        eps=eps,
        stride_xn=input.stride(0),
        stride_rn=residual.stride(0),
        WIDTH=width,
        BLOCK_N=tile.rows,
        PART=tile.part,
        PARTS=tile.parts,
        IS_RMS=is_rms,
        num_warps=tile.warps,
    )
    return out, sum


def dropout_add_layer_norm_bwd(
    grad: torch.Tensor,
    sum: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    linear_bias: torch.Tensor | None,
    grad_sum: torch.Tensor | None,
    seed: torch.Tensor | None,
    sample_index: torch.Tensor | None,
    position: torch.Tensor | None,
    *,
    threshold: int,
    keep_scale: float,
    eps: float,
    is_rms: bool,
    needs: tuple[bool, bool, bool, bool, bool],
) -> tuple[torch.Tensor, ...]:
    """Launch the backward on rows [N, E].

    Args:
        needs: which of the gradients are needed, in the order of what is returned.

    Returns:
        Gradients of input and residual [N, E], of weight, bias and linear_bias [E]; those that are
        not needed have no elements.
    """
    rows, width = sum.shape
    tile = tile_of(width)
    groups, rows_per_group = groups_of(rows)
    like = (grad, sum, weight, weight if bias is None else bias)
    like = (*like, weight if linear_bias is None else linear_bias)
    shapes = (sum.shape, sum.shape, weight.shape, weight.shape, weight.shape)
    grads = [
        one.new_empty(shape if need else (0,))
        for one, shape, need in zip(like, shapes, needs, strict=True)
    ]
    pointers = [one if need else None for one, need in zip(grads, needs, strict=True)]
    over_rows = any(needs[2:])
    partial = grad.new_empty((groups, 3, width) if over_rows else 0, dtype=torch.float32)
    launch(
        _dropout_add_layer_norm_bwd_kernel,
        (groups,),
        grad.device,
        dy_ptr=grad,
        sum_ptr=sum,
        dsum_ptr=grad_sum,
        w_ptr=weight,
        seed_ptr=seed,
        sample_ptr=sample_index,
        position_ptr=position,
        dx_ptr=pointers[0],
        dresidual_ptr=pointers[1],
        partial_ptr=partial,
        num_rows=rows,
        rows_per_group=rows_per_group,
        threshold=threshold,
        keep_scale=keep_scale,
        eps=eps,
        stride_dyn=grad.stride(0),
        stride_zn=sum.stride(0),
        stride_dsn=width if grad_sum is None else grad_sum.stride(0),
        WIDTH=width,
        BLOCK_N=tile.rows,
        PART=tile.part,
        PARTS=tile.parts,
        IS_RMS=is_rms,
        STAGES=_STAGES,
        NEED_DW=needs[2],
        NEED_DB=needs[3],
        NEED_DLINEAR=needs[4],
        num_warps=tile.warps,
    )
    if over_rows:
        add_groups(partial, pointers[2:])
    return tuple(grads)


def compile_cases() -> Iterator[tuple[str, Callable[[], object]]]:
    """Every shipped configuration, as a label and a function that launches it (on meta tensors)."""
    bf16 = torch.bfloat16
    cases = (
        # dtypes of input and residual, width, by sample, rms, gradient of the sum, slow
        (bf16, bf16, 768, False, False, False, False),
        (bf16, bf16, 1024, True, False, False, False),
        (bf16, torch.float32, 256, False, False, True, False),
        (bf16, bf16, 4096, False, True, True, False),
        (torch.float32, torch.float32, 768, False, False, False, False),
        *((torch.float16, torch.float16, width, False, False, True, True) for width in (128, 1000)),
        *((bf16, torch.float32, width, True, True, True, True) for width in (40, 384, 768, 4096)),
        *((torch.float32, torch.float32, width, True, False, True, True) for width in (312, 4096)),
        (bf16, bf16, 768, True, False, True, True),
    )
    for dtype, residual_dtype, width, by_sample, is_rms, with_sum, slow in cases:
        label = (
            f"{'slow: ' if slow else ''}{str(dtype)[6:]} E={width} "
            f"{'rms' if is_rms else 'layer norm'}, {str(residual_dtype)[6:]} residual"
            f"{', by sample' if by_sample else ''}{', gradient of sum' if with_sum else ''}"
        )
        case = (dtype, residual_dtype, width, by_sample, is_rms, with_sum)
        yield label, lambda case=case: _case(*case)


def _case(
    dtype: torch.dtype,
    residual_dtype: torch.dtype,
    width: int,
    by_sample: bool,
    is_rms: bool,
    with_sum: bool,
) -> None:
    input = torch.empty(4096, width, dtype=dtype, device="meta")
    residual = input.to(residual_dtype)
    weight = torch.empty(width, device="meta")
    bias = None if is_rms else weight
    number = torch.empty(4096, dtype=torch.int64, device="meta")
    rows = (number, number) if by_sample else (None, None)
    settings = dict(threshold=6554, keep_scale=1.1, eps=1e-12, is_rms=is_rms)
    grad_sum = residual if with_sum else None
    for seed in (None, number[0]):
        random = (None, None, None) if seed is None else (seed, *rows)
        biases = (bias, bias, *random)
        dropout_add_layer_norm_fwd(input, residual, weight, *biases, **settings)
        # Without dropout, one gradient serves input and residual of one dtype.
        needs = (seed is not None, True, True, not is_rms, not is_rms)
        saved = (weight, bias, bias, grad_sum, *random)
        dropout_add_layer_norm_bwd(input, residual, *saved, **settings, needs=needs)
