"""Rows of a matrix by position, and their gradient back to the matrix.

    out[p] = input[positions[p]]                   0 where the position is not in [0, N)
    grad_input[n] = sum of grad_out[p] over the slots p with positions[p] = n, in ascending p

The backward turns the scatter into a gather: a first kernel notes the first and the last slot of
each row (a maximum of integers, so that the order of its atomics changes nothing), then one program
owns each tile of rows, adds up the slots from the first to the last that are its row's, and writes
every row once. Where positions ascend, as masked ones do, no other slot lies between; a row whose
slots are far apart looks at all those in between. No sort, no zero fill of the gradient, and the
bits repeat.

Legend: N rows · P slots · E row width
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import triton
import triton.language as tl

from fastplm.triton_kernels._launch import cdiv, launch, next_power_of_2

# Elements of a program's tile: at 4 warps, two to eight 16-byte loads in flight per thread.
# Not measured on a device yet.
_TILE = 4096
_MAX_BLOCK_E = 256
# Slots that a program looks at to find the ends of rows.
_BLOCK_P = 512


def _blocks(width: int) -> tuple[int, int]:
    """(rows or slots, columns) of a tile for rows of ``width`` elements."""
    block_e = min(_MAX_BLOCK_E, max(16, next_power_of_2(width)))
    return _TILE // block_e, block_e


@triton.jit(do_not_specialize=["num_rows", "num_slots"])
def _gather_rows_fwd_kernel(
    # pointers
    input_ptr,
    positions_ptr,
    out_ptr,
    # sizes
    num_rows,
    num_slots,
    # strides
    stride_in,
    # constexprs
    WIDTH: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    # The column tiles of a row are neighbours, so that its memory is read in one go.
    num_tiles_e: tl.constexpr = (WIDTH + BLOCK_E - 1) // BLOCK_E
    tile_p, tile_e = tl.program_id(0) // num_tiles_e, tl.program_id(0) % num_tiles_e
    offs_p = tile_p.to(tl.int64) * BLOCK_P + tl.arange(0, BLOCK_P)
    offs_e = tile_e * BLOCK_E + tl.arange(0, BLOCK_E)
    mask_p = offs_p < num_slots
    mask_e = offs_e < WIDTH

    row = tl.load(positions_ptr + offs_p, mask=mask_p, other=-1)  # [BLOCK_P] int64
    used = (row >= 0) & (row < num_rows)
    ptrs = input_ptr + row[:, None] * stride_in + offs_e[None, :]
    x = tl.load(ptrs, mask=used[:, None] & mask_e[None, :], other=0.0)  # [BLOCK_P, BLOCK_E]
    ptrs = out_ptr + offs_p[:, None] * WIDTH + offs_e[None, :]
    tl.store(ptrs, x, mask=mask_p[:, None] & mask_e[None, :])


# A multiple of 16 slots is loaded two at a time.
@triton.jit(do_not_specialize=["num_rows"])
def _gather_rows_ends_kernel(
    # pointers
    positions_ptr,
    ends_ptr,
    # sizes
    num_rows,
    num_slots,
    # constexprs
    BLOCK_P: tl.constexpr,
):
    offs_p = tl.program_id(0).to(tl.int64) * BLOCK_P + tl.arange(0, BLOCK_P)
    row = tl.load(positions_ptr + offs_p, mask=offs_p < num_slots, other=-1)  # [BLOCK_P] int64
    used = (row >= 0) & (row < num_rows)
    # Counted from the end, the first slot is a maximum too: one value means "none" for both.
    slot = offs_p.to(ends_ptr.dtype.element_ty)
    from_end = (num_slots - 1 - offs_p).to(ends_ptr.dtype.element_ty)
    tl.atomic_max(ends_ptr + row, from_end, mask=used)
    tl.atomic_max(ends_ptr + num_rows + row, slot, mask=used)


@triton.jit(do_not_specialize=["num_rows", "num_slots"])
def _gather_rows_bwd_kernel(
    # pointers
    dout_ptr,
    positions_ptr,
    ends_ptr,
    dinput_ptr,
    # sizes
    num_rows,
    num_slots,
    # strides
    stride_dop,
    # constexprs
    WIDTH: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    num_tiles_e: tl.constexpr = (WIDTH + BLOCK_E - 1) // BLOCK_E
    tile_n, tile_e = tl.program_id(0) // num_tiles_e, tl.program_id(0) % num_tiles_e
    offs_n = tile_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_e = tile_e * BLOCK_E + tl.arange(0, BLOCK_E)
    mask_n = offs_n < num_rows
    mask_e = offs_e < WIDTH

    # A row with no slot has its last one, -1, before its first one.
    from_end = tl.load(ends_ptr + offs_n, mask=mask_n, other=-1).to(tl.int64)  # [BLOCK_N]
    first = num_slots - 1 - from_end
    last = tl.load(ends_ptr + num_rows + offs_n, mask=mask_n, other=-1).to(tl.int64)
    acc = tl.zeros([BLOCK_N, BLOCK_E], tl.float32)
    for i in range(0, tl.max(last - first + 1, 0)):
        slot = first + i
        between = (i > 0) & (slot < last)
        row = tl.load(positions_ptr + slot, mask=between, other=-1)
        owned = (slot <= last) & (~between | (row == offs_n))
        ptrs = dout_ptr + slot[:, None] * stride_dop + offs_e[None, :]
        g = tl.load(ptrs, mask=owned[:, None] & mask_e[None, :], other=0.0)  # [BLOCK_N, BLOCK_E]
        acc += g.to(tl.float32)
    ptrs = dinput_ptr + offs_n[:, None] * WIDTH + offs_e[None, :]
    mask = mask_n[:, None] & mask_e[None, :]
    tl.store(ptrs, acc.to(dinput_ptr.dtype.element_ty), mask=mask)


def gather_rows_fwd(input: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Launch the forward: [P, E]."""
    width, slots = input.shape[1], positions.shape[0]
    out = input.new_empty(slots, width)
    block_p, block_e = _blocks(width)
    launch(
        _gather_rows_fwd_kernel,
        (cdiv(slots, block_p) * cdiv(width, block_e),),
        input.device,
        input_ptr=input,
        positions_ptr=positions,
        out_ptr=out,
        num_rows=input.shape[0],
        num_slots=slots,
        stride_in=input.stride(0),
        WIDTH=width,
        BLOCK_P=block_p,
        BLOCK_E=block_e,
        num_warps=4,
    )
    return out


def gather_rows_bwd(grad_out: torch.Tensor, positions: torch.Tensor, rows: int) -> torch.Tensor:
    """Launch the backward: [N, E] of ``rows`` rows."""
    width = grad_out.shape[1]
    grad_input = grad_out.new_empty(rows, width)
    slots = positions.shape[0]
    index = torch.int32 if slots < 2**31 else torch.int64
    ends = torch.full((2, rows), -1, dtype=index, device=positions.device)
    launch(
        _gather_rows_ends_kernel,
        (cdiv(slots, _BLOCK_P),),
        grad_out.device,
        positions_ptr=positions,
        ends_ptr=ends,
        num_rows=rows,
        num_slots=slots,
        BLOCK_P=_BLOCK_P,
        num_warps=4,
    )
    block_n, block_e = _blocks(width)
    launch(
        _gather_rows_bwd_kernel,
        (cdiv(rows, block_n) * cdiv(width, block_e),),
        grad_out.device,
        dout_ptr=grad_out,
        positions_ptr=positions,
        ends_ptr=ends,
        dinput_ptr=grad_input,
        num_rows=rows,
        num_slots=slots,
        stride_dop=grad_out.stride(0),
        WIDTH=width,
        BLOCK_N=block_n,
        BLOCK_E=block_e,
        num_warps=4,
    )
    return grad_input


def compile_cases() -> Iterator[tuple[str, Callable[[], object]]]:
    """Every shipped configuration, as a label and a function that launches it (on meta tensors)."""
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        for width in (40, 768, 1):
            slow = "slow: " if width == 1 else ""
            yield f"{slow}{str(dtype)[6:]} E={width}", lambda d=dtype, e=width: _case(d, e)


def _case(dtype: torch.dtype, width: int) -> None:
    input = torch.empty(4096, width, dtype=dtype, device="meta")
    positions = torch.empty(640, dtype=torch.int64, device="meta")
    gather_rows_bwd(gather_rows_fwd(input, positions), positions, 4096)
