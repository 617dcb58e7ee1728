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
programs owns a group of rows and keeps the sums of dw, db and dlinear_bias over them in registers,
in fp32. It writes them into partials [R, 3, E], which a second kernel adds up. There are no
atomics, and the groups follow from N alone, so the bits repeat.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from fastplm.triton_kernels._launch import (
    INTERPRETED,
    arch_of,
    cast,
    cdiv,
    launch,
    next_power_of_2,
)
from fastplm.triton_kernels._philox import philox

# A row has parts of 8 elements for each of its threads (16 bytes, in 16 bits; what one draw of
# dropout decides), so its width need not be a power of two (768 = 3 x 256). It gets so many warps
# that a thread holds few of its elements: the backward has five to seven registers for each.
_ELEMENTS = 24
_PER_WARP = 32 * 8
# Tiles of the backward's loop that are in registers or on their way.
_STAGES = 3
#: Rows that are wider do not fit into the registers.
MAX_WIDTH = 4096
# The rows of a group are a multiple of this. 32,768 rows are then 256 groups: two for each SM of
# an H200, which has room for both.
_ROWS = 16
_MAX_GROUPS = 256

# The stream of ``reference.philox.Stream.HIDDEN`` and its number of rounds.
_STREAM = tl.constexpr(11)
_ROUNDS = tl.constexpr(7)
_IS_INTERPRETED = tl.constexpr(INTERPRETED)


class _Tile(NamedTuple):
    """Columns of a part, parts, rows side by side, warps."""

    part: int
    parts: int
    rows: int
    warps: int


@lru_cache
def _tile(width: int) -> _Tile:
    """The tile for rows of ``width`` elements."""
    warps_per_row = next_power_of_2(cdiv(width, 32 * _ELEMENTS))
    part = min(warps_per_row * _PER_WARP, max(16, next_power_of_2(width)))
    if width == 3 * part // 2:
        part //= 2  # three parts, and no columns that do not exist
    warps = max(4, warps_per_row)
    rows = warps * _PER_WARP // part
    return _Tile(part, cdiv(width, part), min(_ROWS, max(1, rows)), warps)


@lru_cache(maxsize=1024)
def _groups(rows: int) -> tuple[int, int]:
    """(number of groups, rows of each); without rows there is one group, which finds none."""
    blocks = max(1, cdiv(rows, _ROWS))
    blocks_per_group = cdiv(blocks, _MAX_GROUPS)
    return cdiv(blocks, blocks_per_group), blocks_per_group * _ROWS


@triton.jit
def _load_rows(
    ptr,
    offs_n,
    exists,
    stride,
    WIDTH: tl.constexpr,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
):
    """A tile of rows as it is in memory, 0 where there is nothing: PARTS of [BLOCK_N, PART]."""
    tile = ()
    for i in tl.static_range(PARTS):
        offs_e = i * PART + tl.arange(0, PART)
        ptrs = ptr + offs_n[:, None] * stride + offs_e[None, :]
        mask = exists[:, None] & (offs_e < WIDTH)[None, :]
        tile = tile + (tl.load(ptrs, mask=mask, other=0.0),)
    return tile


@triton.jit
def _load_vector(ptr, i, WIDTH: tl.constexpr, BLOCK_N: tl.constexpr, PART: tl.constexpr):
    """Part ``i`` of a vector in fp32, once for each row: [BLOCK_N, PART].

    So each thread loads what it needs. A vector [PART] would be handed over in shared memory.
    """
    offs_e = tl.zeros([BLOCK_N, 1], tl.int32) + (i * PART + tl.arange(0, PART))[None, :]
    return tl.load(ptr + offs_e, mask=offs_e < WIDTH, other=0.0).to(tl.float32)


@triton.jit
def _rounded(tile, dtype: tl.constexpr):
    """An fp32 tile in ``dtype``."""
    return cast(tile, dtype, _IS_INTERPRETED and dtype == tl.bfloat16)


@triton.jit
def _store_part(ptr, tile, i, offs_n, exists, WIDTH: tl.constexpr, PART: tl.constexpr):
    """Store part ``i`` [BLOCK_N, PART] of rows that lie one after another."""
    offs_e = i * PART + tl.arange(0, PART)
    ptrs = ptr + offs_n[:, None] * WIDTH + offs_e[None, :]
    tl.store(
        ptrs,
        _rounded(tile, ptr.dtype.element_ty),
        mask=exists[:, None] & (offs_e < WIDTH)[None, :],
    )


@triton.jit
def _load_seed(seed_ptr, BLOCK_N: tl.constexpr, PART: tl.constexpr):
    """The seed, once for each draw of a part: [BLOCK_N, 16 * BLOCKS].

    A load decides which thread has what, and here a thread has one draw. Otherwise each draw would
    be made by all 8 threads whose elements it decides for. Rows must be loaded later, as the
    compiler starts from the last load.
    """
    BLOCKS: tl.constexpr = (PART + 127) // 128
    return tl.load(seed_ptr + tl.zeros([BLOCK_N, 16 * BLOCKS], tl.int32))


@triton.jit
def _choices(seed, c0, c1, c2, c3, threshold):
    """What draws decide, as the reference has it: bit j is set where choice j keeps its element."""
    words = philox(seed, c0, c1, c2, c3, _ROUNDS)
    choices = tl.zeros(c0.shape, tl.int32)
    for j in tl.static_range(8):
        half = ((words[j // 2] >> (j % 2 * 16)) & 0xFFFF).to(tl.int32)
        choices |= (half >= threshold).to(tl.int32) << j
    return choices


@triton.jit
def _draws(
    random,
    threshold,
    offs_n,
    exists,
    WIDTH: tl.constexpr,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
):
    """What decides which elements of rows dropout keeps: PARTS of ``_choices`` for ``_kept``.

    The draws are those of ``reference.dropout``: ``keep_mask_of_rows`` with sample indices, else
    ``keep_mask``. One decides for 8 elements, 16 apart, of a block of 128.
    """
    seed, sample_ptr, position_ptr = random
    BLOCKS: tl.constexpr = (PART + 127) // 128
    zero = tl.zeros([offs_n.shape[0], 16 * BLOCKS], tl.uint32)
    draw = tl.arange(0, 16 * BLOCKS)[None, :]
    tile = ()
    for i in tl.static_range(PARTS):
        if sample_ptr is not None:
            sample = tl.load(sample_ptr + offs_n, mask=exists, other=0)[:, None]
            at = zero
            if position_ptr is not None:
                at += tl.load(position_ptr + offs_n, mask=exists, other=0).to(tl.uint32)[:, None]
            low, high = zero + sample.to(tl.uint32), zero + (sample >> 32).to(tl.uint32)
            last = zero + ((i * PART // 8 + draw) << 4 | _STREAM).to(tl.uint32)
            choices = _choices(seed, at, low, high, last, threshold)
        else:
            # Element e of a part is element s + e of a block: a draw of lane (s + e) mod 16.
            first = (offs_n * WIDTH + i * PART)[:, None]  # [BLOCK_N, 1] int64
            place = (first % 128).to(tl.int32)  # s
            lane = place % 16 + draw % 16
            number = first // 128 * 16 + draw // 16 * 16 + lane % 16  # [BLOCK_N, 16 * BLOCKS]
            low, high = number.to(tl.uint32), (number >> 32).to(tl.uint32)
            choices = _choices(seed, low, high, zero, zero + _STREAM, threshold)
            if WIDTH % 128 != 0:  # some elements of a lane are in the next block
                number += 16
                low, high = number.to(tl.uint32), (number >> 32).to(tl.uint32)
                choices |= _choices(seed, low, high, zero, zero + _STREAM, threshold) << 8
                choices = choices >> (place // 16 + lane // 16)
        tile = tile + (choices,)
    return tile


@triton.jit
def _kept(choices, PART: tl.constexpr):
    """[BLOCK_N, PART] bool: the elements of a part that its draws [BLOCK_N, 16 * BLOCKS] keep."""
    BLOCKS: tl.constexpr = (PART + 127) // 128
    UNITS: tl.constexpr = PART // BLOCKS // 16
    choices = tl.reshape(choices, [choices.shape[0], BLOCKS, 1, 16])
    unit = tl.reshape(tl.arange(0, UNITS), [1, 1, UNITS, 1])
    return tl.reshape(choices >> unit & 1, [choices.shape[0], PART]) != 0


@triton.jit
def _statistics(z, eps, IS_RMS: tl.constexpr, WIDTH: tl.constexpr, PART: tl.constexpr):
    """xhat before it is scaled, in parts of fp32 [BLOCK_N, PART], and rstd [BLOCK_N]."""
    PARTS: tl.constexpr = len(z)
    centred = ()
    mean = tl.zeros([z[0].shape[0]], tl.float32)
    if not IS_RMS:
        total = z[0].to(tl.float32)
        for i in tl.static_range(1, PARTS):
            total += z[i].to(tl.float32)
        mean = tl.sum(total, 1) / WIDTH
    squares = tl.zeros(z[0].shape, tl.float32)
    for i in tl.static_range(PARTS):
        x = z[i].to(tl.float32)
        if not IS_RMS:
            x -= mean[:, None]
            if (i + 1) * PART > WIDTH:
                x = tl.where((i * PART + tl.arange(0, PART) < WIDTH)[None, :], x, 0.0)
        squares += x * x
        centred = centred + (x,)
    variance = tl.sum(squares, 1) / WIDTH
    return centred, tl.div_rn(1.0, tl.sqrt_rn(variance + eps))


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
        random = (_load_seed(seed_ptr, BLOCK_N, PART), sample_ptr, position_ptr)
        draws = _draws(random, threshold, offs_n, exists, WIDTH, PART, PARTS)
    x = _load_rows(x_ptr, offs_n, exists, stride_xn, WIDTH, PART, PARTS)
    residual = _load_rows(residual_ptr, offs_n, exists, stride_rn, WIDTH, PART, PARTS)
    z = ()
    for i in tl.static_range(PARTS):
        x_i = x[i].to(tl.float32)  # [BLOCK_N, PART]
        if linear_bias_ptr is not None:
            x_i += _load_vector(linear_bias_ptr, i, WIDTH, BLOCK_N, PART)
        if seed_ptr is not None:
            x_i = tl.where(_kept(draws[i], PART), x_i * keep_scale, 0.0)
        z_i = _rounded(x_i + residual[i].to(tl.float32), sum_ptr.dtype.element_ty)
        _store_part(sum_ptr, z_i.to(tl.float32), i, offs_n, exists, WIDTH, PART)
        z = z + (z_i,)
    xhat, rstd = _statistics(z, eps, IS_RMS, WIDTH, PART)
    for i in tl.static_range(PARTS):
        w_i = _load_vector(w_ptr, i, WIDTH, BLOCK_N, PART)
        y = xhat[i] * rstd[:, None] * w_i  # [BLOCK_N, PART]
        if b_ptr is not None:
            y += _load_vector(b_ptr, i, WIDTH, BLOCK_N, PART)
        _store_part(out_ptr, y, i, offs_n, exists, WIDTH, PART)


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
        random = (_load_seed(seed_ptr, BLOCK_N, PART), sample_ptr, position_ptr)
    group = tl.program_id(0).to(tl.int64)
    dw, db, dlinear, w = (), (), (), ()
    for i in tl.static_range(PARTS):
        zero = tl.zeros([BLOCK_N, PART], tl.float32)
        dw, db, dlinear = dw + (zero,), db + (zero,), dlinear + (zero,)
        w = w + (_load_vector(w_ptr, i, WIDTH, BLOCK_N, PART),)

    first = group * rows_per_group
    end = tl.minimum(first + rows_per_group, num_rows)
    for start in tl.range(0, (end - first).to(tl.int32), BLOCK_N, num_stages=STAGES):
        offs_n = first + start + tl.arange(0, BLOCK_N)
        exists = offs_n < end
        if seed_ptr is not None:
            if dx_ptr is not None or NEED_DLINEAR:
                draws = _draws(random, threshold, offs_n, exists, WIDTH, PART, PARTS)
        dy = _load_rows(dy_ptr, offs_n, exists, stride_dyn, WIDTH, PART, PARTS)
        z = _load_rows(sum_ptr, offs_n, exists, stride_zn, WIDTH, PART, PARTS)
        if dsum_ptr is not None:
            dsum = _load_rows(dsum_ptr, offs_n, exists, stride_dsn, WIDTH, PART, PARTS)
        xhat, rstd = _statistics(z, eps, IS_RMS, WIDTH, PART)
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
                _store_part(dresidual_ptr, dz, i, offs_n, exists, WIDTH, PART)
            dx = dz
            if seed_ptr is not None:
                if dx_ptr is not None or NEED_DLINEAR:
                    dx = tl.where(_kept(draws[i], PART), dz * keep_scale, 0.0)
            if dx_ptr is not None:
                _store_part(dx_ptr, dx, i, offs_n, exists, WIDTH, PART)
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


@triton.jit
def _store_sum(ptr, total, offs_e, mask):
    if ptr is not None:
        tl.store(ptr + offs_e, _rounded(total, ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_groups"])
def _dropout_add_layer_norm_sum_kernel(
    # pointers
    partial_ptr,
    dw_ptr,
    db_ptr,
    dlinear_ptr,
    # sizes
    num_groups,
    # constexprs
    WIDTH: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    # One program adds up all partials of some columns of one vector.
    offs_r = tl.arange(0, BLOCK_R)
    offs_e = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    mask_e = offs_e < WIDTH
    which = tl.program_id(1).to(tl.int64)
    ptrs = partial_ptr + offs_r.to(tl.int64)[:, None] * (3 * WIDTH)
    ptrs += (which * WIDTH + offs_e)[None, :]
    partial = tl.load(ptrs, mask=(offs_r < num_groups)[:, None] & mask_e[None, :], other=0.0)
    total = tl.sum(partial, 0)  # [BLOCK_E]
    _store_sum(dw_ptr, total, offs_e, mask_e & (which == 0))
    _store_sum(db_ptr, total, offs_e, mask_e & (which == 1))
    _store_sum(dlinear_ptr, total, offs_e, mask_e & (which == 2))


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
    tile = _tile(width)
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
    tile = _tile(width)
    groups, rows_per_group = _groups(rows)
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
        launch(
            _dropout_add_layer_norm_sum_kernel,
            (-(-width // 16), 3 if needs[4] else 2 if needs[3] else 1),
            grad.device,
            partial_ptr=partial,
            dw_ptr=pointers[2],
            db_ptr=pointers[3],
            dlinear_ptr=pointers[4],
            num_groups=groups,
            WIDTH=width,
            BLOCK_R=_MAX_GROUPS,
            BLOCK_E=16,
            num_warps=4,
        )
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
