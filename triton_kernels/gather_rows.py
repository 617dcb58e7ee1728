"""Rows of a matrix by position, and their gradient back to the matrix.

    out[p] = input[positions[p]]                   0 where the position is not in [0, N)
    grad_input[n] = sum of grad_out[p] over the slots p with positions[p] = n

The backward is a gather, not a scatter, and needs neither a sort nor a gradient filled with zeros.
A first kernel counts the slots of each row and stores up to eight of them, in any order. Then each
program handles a tile of rows: it adds the slots of each row in ascending order and writes every
row once. Nothing else runs if no position occurs more than eight times.

A row with more slots is called long. Programs at the end of the grid search for its slots again, in
chunks of 512 slots, and only in chunks where a bit says that the row occurs. So a row costs at most
512 comparisons for each of its slots. A long row is added up by one program. If it has more than a
sixteenth of all slots, each chunk gets a program, and the one that finishes last adds the partial
sums. The positions alone fix the order of all sums, so results repeat bit for bit. Atomics are used
on integers only; their order decides which program does the work, not the result.

Legend: N rows · P slots · E row width · K chunks of slots
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import triton
import triton.language as tl

from fastplm.triton_kernels._launch import cdiv, launch, next_power_of_2, sm_count

# Elements of a program's tile: with 4 warps, two to eight 16-byte loads in flight for each thread.
# Not measured on a device yet.
_TILE = 4096
_MAX_BLOCK_E = 256
# Slots of a chunk; slots that are compared as one vector; slots of a row that are added side by
# side.
_CHUNK, _BLOCK_P, _BLOCK_S = 512, 256, 16
# A row of more slots than this is long. One sector of memory (32 bytes) stores so many slots.
_SHORT = 8
# A row is split if it has more than _SPLIT slots, and more than 1/_PART of all slots.
_SPLIT, _PART = 128, 16


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
    # The column tiles of a row are neighbours, so that they read its memory together.
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


@triton.jit
def _lists(
    state_ptr,
    num_rows,
    num_slots,
    CHUNK: tl.constexpr,
    SHORT: tl.constexpr,
    SPLIT: tl.constexpr,
    PART: tl.constexpr,
):
    """(words of bits a row, above how many slots a row is split, and where there are: two totals,
    the split rows, the long rows, arrivals). All lie behind the counts and bits of the rows."""
    words = (num_slots + 64 * CHUNK - 1) // (64 * CHUNK)
    limit = tl.maximum(SPLIT, num_slots // PART)
    totals_ptr = state_ptr + num_rows.to(tl.int64) * (1 + words)
    long_ptr = totals_ptr + 2 + num_slots // (limit + 1)
    return words, limit, totals_ptr, totals_ptr + 2, long_ptr, long_ptr + num_slots // (SHORT + 1)


# If 16 divides the number of slots, they are loaded two at a time.
@triton.jit(do_not_specialize=["num_rows"])
def _gather_rows_count_kernel(
    # pointers
    positions_ptr,
    state_ptr,
    slots_ptr,
    # sizes
    num_rows,
    num_slots,
    # constexprs
    CHUNK: tl.constexpr,
    SHORT: tl.constexpr,
    SPLIT: tl.constexpr,
    PART: tl.constexpr,
):
    words, limit, totals_ptr, split_ptr, long_ptr, _ = _lists(
        state_ptr, num_rows, num_slots, CHUNK, SHORT, SPLIT, PART
    )
    chunk = tl.program_id(0).to(tl.int64)
    offs_p = chunk * CHUNK + tl.arange(0, CHUNK)
    row = tl.load(positions_ptr + offs_p, mask=offs_p < num_slots, other=-1)  # [CHUNK] int64
    used = (row >= 0) & (row < num_rows)
    one = tl.full([CHUNK], 1, tl.int64)
    rank = tl.atomic_add(state_ptr + row, one, mask=used, sem="relaxed")
    slot = offs_p.to(slots_ptr.dtype.element_ty)
    tl.store(slots_ptr + row * SHORT + rank, slot, mask=used & (rank < SHORT))
    bits_ptr = state_ptr + num_rows + row * words + chunk // 64
    tl.atomic_or(bits_ptr, one << (chunk % 64), mask=used, sem="relaxed")

    # Of all slots of a row, one gets the rank that makes it long, or split.
    totals_ptrs = totals_ptr + tl.zeros([CHUNK], tl.int64)
    longs, splits = used & (rank == SHORT), used & (rank == limit)
    place = tl.atomic_add(totals_ptrs, one, mask=longs, sem="relaxed")
    tl.store(long_ptr + place, row, mask=longs)
    place = tl.atomic_add(totals_ptrs + 1, one, mask=splits, sem="relaxed")
    tl.store(split_ptr + place, row, mask=splits)


@triton.jit
def _add_chunk(
    acc,
    row,
    chunk,
    offs_e,
    dout_ptr,
    positions_ptr,
    num_slots,
    stride_dop,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """``acc`` and the slots of a chunk that are the row's, in turn to each line of ``acc``."""
    for start in range(0, CHUNK, BLOCK_P):
        first_slot = chunk.to(tl.int64) * CHUNK + start
        offs_p = tl.arange(0, BLOCK_P)
        mask_p = first_slot + offs_p < num_slots
        owned = tl.load(positions_ptr + first_slot + offs_p, mask=mask_p, other=-1) == row
        count = tl.sum(owned.to(tl.int32), 0)
        rank = tl.where(owned, tl.cumsum(owned.to(tl.int32), 0), 0)  # [BLOCK_P], from 1 on
        for first in range(1, count + 1, BLOCK_S):
            offs_s = first + tl.arange(0, BLOCK_S)
            here = rank[None, :] == offs_s[:, None]  # [BLOCK_S, BLOCK_P]
            slot = first_slot + tl.sum(tl.where(here, offs_p[None, :], 0), 1)
            ptrs = dout_ptr + slot[:, None] * stride_dop + offs_e[None, :]
            mask = (offs_s <= count)[:, None] & (offs_e < WIDTH)[None, :]
            acc += tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)  # [BLOCK_S, BLOCK_E]
    return acc


@triton.jit(do_not_specialize=["num_rows", "num_slots"])
def _gather_rows_bwd_kernel(
    # pointers
    dout_ptr,
    positions_ptr,
    state_ptr,
    slots_ptr,
    partial_ptr,
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
    BLOCK_P: tl.constexpr,
    BLOCK_S: tl.constexpr,
    CHUNK: tl.constexpr,
    SHORT: tl.constexpr,
    SPLIT: tl.constexpr,
    PART: tl.constexpr,
):
    num_tiles_e: tl.constexpr = (WIDTH + BLOCK_E - 1) // BLOCK_E
    num_tiles = (num_rows + BLOCK_N - 1) // BLOCK_N * num_tiles_e
    pid = tl.program_id(0)
    if pid < num_tiles:
        tile_n, tile_e = pid // num_tiles_e, pid % num_tiles_e
        offs_n = tile_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
        offs_e = tile_e * BLOCK_E + tl.arange(0, BLOCK_E)
        count = tl.load(state_ptr + offs_n, mask=offs_n < num_rows, other=SHORT + 1)  # [BLOCK_N]
        short = count <= SHORT
        offs_s = tl.arange(0, SHORT)
        noted_ptrs = slots_ptr + offs_n[:, None] * SHORT + offs_s[None, :]
        noted = short[:, None] & (offs_s[None, :] < count[:, None])
        none = tl.full([], num_slots, slots_ptr.dtype.element_ty)
        slots = tl.load(noted_ptrs, mask=noted, other=none)  # [BLOCK_N, SHORT]
        slot = tl.full([BLOCK_N], -1, slots_ptr.dtype.element_ty)
        acc = tl.zeros([BLOCK_N, BLOCK_E], tl.float32)
        for _ in range(0, tl.max(tl.where(short, count, 0), 0)):
            slot = tl.min(tl.where(slots > slot[:, None], slots, none), 1)  # the next
            ptrs = dout_ptr + slot.to(tl.int64)[:, None] * stride_dop + offs_e[None, :]
            mask = (slot < none)[:, None] & (offs_e < WIDTH)[None, :]
            acc += tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)  # [BLOCK_N, BLOCK_E]
        ptrs = dinput_ptr + offs_n[:, None] * WIDTH + offs_e[None, :]
        mask = short[:, None] & (offs_e < WIDTH)[None, :]
        tl.store(ptrs, acc.to(dinput_ptr.dtype.element_ty), mask=mask)
    else:
        words, limit, totals_ptr, split_ptr, long_ptr, arrivals_ptr = _lists(
            state_ptr, num_rows, num_slots, CHUNK, SHORT, SPLIT, PART
        )
        num_chunks = (num_slots + CHUNK - 1) // CHUNK
        # A unit is one tile of columns: of a chunk of a split row, or of a whole row that is long.
        num_parts = tl.load(totals_ptr + 1) * num_chunks
        num_units = (num_parts + tl.load(totals_ptr)) * num_tiles_e
        step = tl.num_programs(0) - num_tiles
        for unit in range(pid - num_tiles, num_units.to(tl.int32), step):
            tile_e, index = unit % num_tiles_e, unit // num_tiles_e
            is_part = index < num_parts
            place = (index // num_chunks).to(tl.int64)
            row = tl.load(tl.where(is_part, split_ptr + place, long_ptr + (index - num_parts)))
            is_split = tl.load(state_ptr + row) > limit
            chunk = tl.where(is_part, index % num_chunks, 0)
            stop = tl.where(is_part, chunk + 1, tl.where(is_split, 0, num_chunks))
            part_ptr = partial_ptr + (place * num_chunks + chunk) * WIDTH
            offs_e = tile_e * BLOCK_E + tl.arange(0, BLOCK_E)
            mask_e = offs_e < WIDTH
            acc = tl.zeros([BLOCK_S, BLOCK_E], tl.float32)
            while chunk < stop:
                bits = tl.load(state_ptr + num_rows + row * words + chunk // 64) >> (chunk % 64)
                if bits & 1 != 0:
                    acc = _add_chunk(
                        acc, row, chunk, offs_e, dout_ptr, positions_ptr, num_slots, stride_dop,
                        WIDTH, CHUNK, BLOCK_P, BLOCK_S,
                    )  # fmt: skip
                chunk = tl.where(bits == 0, (chunk // 64 + 1) * 64, chunk + 1)
            total = tl.sum(acc, 0)  # [BLOCK_E]
            out_ptrs = dinput_ptr + row * WIDTH + offs_e
            if is_part:
                tl.store(part_ptr + offs_e, total, mask=mask_e)
                tl.debug_barrier()  # all threads have written before one says so
                if tl.atomic_add(arrivals_ptr + place * num_tiles_e + tile_e, 1) == num_chunks - 1:
                    acc = tl.zeros([BLOCK_S, BLOCK_E], tl.float32)
                    for first in range(0, num_chunks, BLOCK_S):
                        offs_k = first + tl.arange(0, BLOCK_S)
                        offs = (place * num_chunks + offs_k)[:, None] * WIDTH + offs_e[None, :]
                        mask = (offs_k < num_chunks)[:, None] & mask_e[None, :]
                        acc += tl.load(partial_ptr + offs, mask=mask, other=0.0)
                    total = tl.sum(acc, 0)
                    tl.store(out_ptrs, total.to(dinput_ptr.dtype.element_ty), mask=mask_e)
            elif not is_split:
                tl.store(out_ptrs, total.to(dinput_ptr.dtype.element_ty), mask=mask_e)


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
    slots, width = grad_out.shape
    device = grad_out.device
    grad_input = grad_out.new_empty(rows, width)
    chunks = cdiv(slots, _CHUNK)
    block_n, block_e = _blocks(width)
    block_n //= 2  # a whole tile, with the slots of its rows, would spill on sm_120
    tiles_e = cdiv(width, block_e)
    sizes = dict(num_rows=rows, num_slots=slots)
    limits = dict(CHUNK=_CHUNK, SHORT=_SHORT, SPLIT=_SPLIT, PART=_PART)
    # A count and bits for each row, and the lists of `_lists`, each with room for the most rows.
    max_split = slots // (max(_SPLIT, slots // _PART) + 1)
    lists = 2 + max_split * (1 + tiles_e) + slots // (_SHORT + 1)
    state = torch.zeros(rows * (1 + cdiv(chunks, 64)) + lists, dtype=torch.int64, device=device)
    index = torch.int32 if slots < 2**31 else torch.int64
    noted = torch.empty(rows * _SHORT, dtype=index, device=device)
    launch(
        _gather_rows_count_kernel,
        (chunks,),
        device,
        positions_ptr=positions,
        state_ptr=state,
        slots_ptr=noted,
        **sizes,
        **limits,
        num_warps=4,
    )
    tiles = cdiv(rows, block_n) * tiles_e
    helpers = 2 * sm_count(device) if slots > _SHORT and rows else 0
    partial = torch.empty(max_split * chunks * width, dtype=torch.float32, device=device)
    launch(
        _gather_rows_bwd_kernel,
        (tiles + helpers,),
        device,
        dout_ptr=grad_out,
        positions_ptr=positions,
        state_ptr=state,
        slots_ptr=noted,
        partial_ptr=partial,
        dinput_ptr=grad_input,
        **sizes,
        stride_dop=grad_out.stride(0),
        WIDTH=width,
        BLOCK_N=block_n,
        BLOCK_E=block_e,
        BLOCK_P=_BLOCK_P,
        BLOCK_S=_BLOCK_S,
        **limits,
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
