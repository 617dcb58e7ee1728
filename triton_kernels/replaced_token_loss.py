"""Replaced-token detection: dot product, sigmoid and binary cross-entropy of each row in one pass.

    z = h . w + b        loss = softplus(x)             x = -z where the token is replaced, else z
    dz = dloss * sigmoid(x) * (-1 where replaced)       dh = dz w     dw = sum dz h     db = sum dz

Source: Clark et al. 2020 (ELECTRA, arXiv 2003.10555), section 2, L_Disc.

Legend: N rows · E row width · R row groups; h a tile of rows, w the weight, b the bias.

In the backward one program owns one column tile of one group of rows. It writes dh, and its sums of
dz h and dz into fp32 partials [R, E] and [R], which a second kernel adds up in order: no atomics,
and since groups follow from the shapes alone, the bits repeat. A row that does not count is loaded
as 0 and its dz is 0, so that even a NaN in it cannot reach a sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import triton
import triton.language as tl

from fastplm.triton_kernels._launch import launch

# A tile of 16 x 256 at 4 warps: four to eight 16-byte loads in flight per thread. Taller tiles of
# narrow rows would repeat the sigmoid of each row in many threads, and spill.
# A group is at least 4 tiles, so that the partials stay a few percent of the rows' own traffic, and
# there are at most 1024 groups, as a single program adds up a column of them. Not measured yet.
_BLOCK_N = 16
_MAX_BLOCK_E = 256
_MIN_TILES_PER_GROUP = 4
_MAX_GROUPS = 1024


def _block_e(width: int) -> int:
    return min(_MAX_BLOCK_E, max(16, triton.next_power_of_2(width)))


@triton.jit
def _softplus(x):
    """``log(1 + exp(x))``, to full relative precision on both sides."""
    # log(1 + e) = 2 atanh(t) with t = e / (2 + e) <= 1/3: this many terms of the series are exact
    # in fp32, where the hardware's logarithm of a number near 1 is not.
    e = tl.exp(-tl.abs(x))
    t = e / (2.0 + e)
    s = t * t
    series = 1.0 / 13 + s * (1.0 / 15)
    series = 1.0 / 11 + s * series
    series = 1.0 / 9 + s * series
    series = 1.0 / 7 + s * series
    series = 1.0 / 5 + s * series
    series = 1.0 / 3 + s * series
    return tl.maximum(x, 0.0) + 2.0 * t * (1.0 + s * series)


@triton.jit
def _sigmoid(x):
    e = tl.exp(-tl.abs(x))
    return tl.where(x >= 0.0, 1.0, e) / (1.0 + e)


@triton.jit
def _counted_rows(mask_ptr, offs_n, num_rows, HAS_MASK: tl.constexpr):
    """[BLOCK_N] bool: the rows of this tile that exist and that count."""
    counted = offs_n < num_rows
    if HAS_MASK:
        counted = counted & (tl.load(mask_ptr + offs_n, mask=counted, other=0) != 0)
    return counted


@triton.jit
def _replaced_token_loss_fwd_kernel(
    # pointers
    h_ptr,
    w_ptr,
    b_ptr,
    replaced_ptr,
    mask_ptr,
    loss_ptr,
    logit_ptr,
    # sizes
    num_rows,
    # strides
    stride_hn,
    # constexprs
    WIDTH: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_E: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_MASK: tl.constexpr,
):
    offs_n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    exists = offs_n < num_rows
    counted = _counted_rows(mask_ptr, offs_n, num_rows, HAS_MASK)

    acc = tl.zeros([BLOCK_N, BLOCK_E], tl.float32)
    for start_e in range(0, WIDTH, BLOCK_E):
        offs_e = start_e + tl.arange(0, BLOCK_E)
        mask_e = offs_e < WIDTH
        w = tl.load(w_ptr + offs_e, mask=mask_e, other=0.0).to(tl.float32)  # [BLOCK_E]
        ptrs = h_ptr + offs_n[:, None] * stride_hn + offs_e[None, :]
        h = tl.load(ptrs, mask=counted[:, None] & mask_e[None, :], other=0.0)  # [BLOCK_N, BLOCK_E]
        acc += h.to(tl.float32) * w[None, :]
    z = tl.sum(acc, 1)  # [BLOCK_N]
    if HAS_BIAS:
        z += tl.load(b_ptr).to(tl.float32)

    replaced = tl.load(replaced_ptr + offs_n, mask=exists, other=0) != 0
    loss = _softplus(tl.where(replaced, -z, z))
    tl.store(loss_ptr + offs_n, tl.where(counted, loss, 0.0), mask=exists)
    tl.store(logit_ptr + offs_n, z, mask=exists)


@triton.jit
def _replaced_token_loss_bwd_kernel(
    # pointers
    dloss_ptr,
    h_ptr,
    w_ptr,
    logit_ptr,
    replaced_ptr,
    mask_ptr,
    dh_ptr,
    partial_dw_ptr,
    partial_db_ptr,
    # sizes
    num_rows,
    tiles_per_group,
    # strides
    stride_dloss,
    stride_hn,
    # constexprs
    WIDTH: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_E: tl.constexpr,
    HAS_MASK: tl.constexpr,
    NEED_DH: tl.constexpr,
    NEED_DW: tl.constexpr,
):
    tile_e, group = tl.program_id(0), tl.program_id(1)
    offs_e = tile_e * BLOCK_E + tl.arange(0, BLOCK_E)
    mask_e = offs_e < WIDTH
    w = tl.load(w_ptr + offs_e, mask=mask_e, other=0.0).to(tl.float32)  # [BLOCK_E]
    dw = tl.zeros([BLOCK_N, BLOCK_E], tl.float32)
    db = tl.zeros([BLOCK_N], tl.float32)

    first = group.to(tl.int64) * tiles_per_group
    for tile in range(0, tiles_per_group):
        offs_n = (first + tile) * BLOCK_N + tl.arange(0, BLOCK_N)
        exists = offs_n < num_rows
        counted = _counted_rows(mask_ptr, offs_n, num_rows, HAS_MASK)
        dloss = tl.load(dloss_ptr + offs_n * stride_dloss, mask=counted, other=0.0)
        z = tl.load(logit_ptr + offs_n, mask=counted, other=0.0)
        replaced = tl.load(replaced_ptr + offs_n, mask=counted, other=0) != 0
        dz = dloss * tl.where(replaced, -_sigmoid(-z), _sigmoid(z))  # [BLOCK_N]
        db += dz
        if NEED_DW:
            ptrs = h_ptr + offs_n[:, None] * stride_hn + offs_e[None, :]
            h = tl.load(ptrs, mask=counted[:, None] & mask_e[None, :], other=0.0)
            dw += dz[:, None] * h.to(tl.float32)  # [BLOCK_N, BLOCK_E]
        if NEED_DH:
            dh = (dz[:, None] * w[None, :]).to(dh_ptr.dtype.element_ty)  # [BLOCK_N, BLOCK_E]
            ptrs = dh_ptr + offs_n[:, None] * WIDTH + offs_e[None, :]
            # A row that does not count is written 0 even if the weight is not finite.
            dh = tl.where(counted[:, None], dh, 0.0)
            tl.store(ptrs, dh, mask=exists[:, None] & mask_e[None, :])

    if NEED_DW:
        tl.store(partial_dw_ptr + group * WIDTH + offs_e, tl.sum(dw, 0), mask=mask_e)
    if tile_e == 0:
        tl.store(partial_db_ptr + group, tl.sum(db, 0))


@triton.jit
def _replaced_token_loss_sum_kernel(
    # pointers
    partial_dw_ptr,
    partial_db_ptr,
    dw_ptr,
    db_ptr,
    # sizes
    num_groups,
    # constexprs
    WIDTH: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_E: tl.constexpr,
    NEED_DW: tl.constexpr,
):
    offs_e = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    mask_e = offs_e < WIDTH
    dw = tl.zeros([BLOCK_R, BLOCK_E], tl.float32)
    db = tl.zeros([BLOCK_R], tl.float32)
    for start_r in range(0, num_groups, BLOCK_R):
        offs_r = start_r + tl.arange(0, BLOCK_R)
        mask_r = offs_r < num_groups
        db += tl.load(partial_db_ptr + offs_r, mask=mask_r, other=0.0)
        if NEED_DW:
            ptrs = partial_dw_ptr + offs_r[:, None] * WIDTH + offs_e[None, :]
            dw += tl.load(ptrs, mask=mask_r[:, None] & mask_e[None, :], other=0.0)
    if NEED_DW:
        tl.store(dw_ptr + offs_e, tl.sum(dw, 0).to(dw_ptr.dtype.element_ty), mask=mask_e)
    if tl.program_id(0) == 0:
        tl.store(db_ptr, tl.sum(db, 0).to(db_ptr.dtype.element_ty))


def _mask_arguments(mask: torch.Tensor | None, replaced: torch.Tensor) -> dict[str, object]:
    # Without a mask the pointer is never read; any tensor will do.
    mask_ptr = (replaced if mask is None else mask).view(torch.uint8)
    return dict(mask_ptr=mask_ptr, HAS_MASK=mask is not None)


def replaced_token_loss_fwd(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    replaced: torch.Tensor,
    mask: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the forward: (loss fp32 [N], logit fp32 [N])."""
    rows, width = input.shape
    loss = input.new_empty(rows, dtype=torch.float32)
    logit = torch.empty_like(loss)
    launch(
        _replaced_token_loss_fwd_kernel,
        (triton.cdiv(rows, _BLOCK_N),),
        input.device,
        h_ptr=input,
        w_ptr=weight,
        b_ptr=weight if bias is None else bias,
        replaced_ptr=replaced.view(torch.uint8),
        loss_ptr=loss,
        logit_ptr=logit,
        num_rows=rows,
        stride_hn=input.stride(0),
        WIDTH=width,
        BLOCK_N=_BLOCK_N,
        BLOCK_E=_block_e(width),
        HAS_BIAS=bias is not None,
        num_warps=4,
        **_mask_arguments(mask, replaced),
    )
    return loss, logit


def replaced_token_loss_bwd(
    grad_loss: torch.Tensor,
    input: torch.Tensor,
    weight: torch.Tensor,
    logit: torch.Tensor,
    replaced: torch.Tensor,
    mask: torch.Tensor | None,
    need_input: bool,
    need_weight: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Launch the backward: of input [N, E], weight [E], bias []; empty where not needed."""
    rows, width = input.shape
    tiles = triton.cdiv(rows, _BLOCK_N)
    tiles_per_group = max(_MIN_TILES_PER_GROUP, triton.cdiv(tiles, _MAX_GROUPS))
    groups = triton.cdiv(tiles, tiles_per_group)
    grad_input = input.new_empty(input.shape if need_input else 0)
    grad_weight = weight.new_empty(width if need_weight else 0)
    grad_bias = weight.new_empty(())
    partial_weight = logit.new_empty((groups, width) if need_weight else 0)
    partial_bias = logit.new_empty(groups)
    launch(
        _replaced_token_loss_bwd_kernel,
        (triton.cdiv(width, _block_e(width)), groups),
        input.device,
        dloss_ptr=grad_loss,
        h_ptr=input,
        w_ptr=weight,
        logit_ptr=logit,
        replaced_ptr=replaced.view(torch.uint8),
        dh_ptr=grad_input,
        partial_dw_ptr=partial_weight,
        partial_db_ptr=partial_bias,
        num_rows=rows,
        tiles_per_group=tiles_per_group,
        stride_dloss=grad_loss.stride(0),
        stride_hn=input.stride(0),
        WIDTH=width,
        BLOCK_N=_BLOCK_N,
        BLOCK_E=_block_e(width),
        NEED_DH=need_input,
        NEED_DW=need_weight,
        num_warps=4,
        **_mask_arguments(mask, replaced),
    )
    launch(
        _replaced_token_loss_sum_kernel,
        (triton.cdiv(width, 32) if need_weight else 1,),
        input.device,
        partial_dw_ptr=partial_weight,
        partial_db_ptr=partial_bias,
        dw_ptr=grad_weight,
        db_ptr=grad_bias,
        num_groups=groups,
        WIDTH=width,
        BLOCK_R=128,
        BLOCK_E=32,
        NEED_DW=need_weight,
        num_warps=8,
    )
    return grad_input, grad_weight, grad_bias


def compile_cases() -> Iterator[tuple[str, Callable[[], object]]]:
    """Every shipped configuration, as a label and a function that launches it (on meta tensors)."""
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        for width, has_mask in ((40, False), (768, True), (1, True), (256, False)):
            slow = "slow: " if width in (1, 256) else ""
            label = f"{slow}{str(dtype)[6:]} E={width} {'mask' if has_mask else 'no mask'}"
            yield label, lambda d=dtype, e=width, m=has_mask: _case(d, e, m)


def _case(dtype: torch.dtype, width: int, has_mask: bool) -> None:
    input = torch.empty(4096, width, dtype=dtype, device="meta")
    weight = torch.empty(width, dtype=dtype, device="meta")
    flags = torch.empty(4096, dtype=torch.bool, device="meta")
    mask = flags if has_mask else None
    loss, logit = replaced_token_loss_fwd(input, weight, weight[0], flags, mask)
    for need_input, need_weight in ((True, True), (True, False), (False, True)):
        replaced_token_loss_bwd(loss, input, weight, logit, flags, mask, need_input, need_weight)
