"""Three lookups, their sum, its layer norm and dropout in one pass, and all gradients.

    z = word[id] + position[p] + type[t]        y = dropout(xhat w + b)
    xhat = (z - mean) rstd        rstd = 1 / sqrt(mean((z - mean)^2) + eps)
    g = dy where kept / (1 - p)        dw = sum g xhat        db = sum g
    dz = rstd (g w - mean(g w) - xhat mean(g w xhat))        dword[v] = sum of dz where id = v

Source: Devlin et al. 2018 (arXiv 1810.04805), figure 2; Ba, Kiros and Hinton 2016 (arXiv
1607.06450), equation 4.

Legend: N rows · E row width · R row groups · V rows of a table · T types · K chunks of sorted rows.

Nothing is kept for the backward: it looks up z again, which costs what it costs to read it. Its
programs own groups of rows and sum dw, db and, of up to two types, the types' gradient over them.

The gradient of a table is added to it by sorted ids (``add_rows_``): a program adds up the rows of
a chunk, run by run of equal ids. What begins and ends inside of a chunk is whole and goes into the
table. A second kernel adds up the runs that reach a border, chunk by chunk. There are no atomics,
and the sort is stable, so the bits repeat.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import triton
import triton.language as tl

from fastplm.triton_kernels._launch import cdiv, launch, next_power_of_2
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

# Sorted rows of a chunk, and how many of them are loaded at once.
_CHUNK, _AT_ONCE = 32, 8
_MAX_BLOCK_E = 256
# The gradient of so many types is summed beside dw and db.
_MAX_TYPES = 2


@triton.jit
def _ids(table, offs_n, exists):
    """The ids [BLOCK_N] of (ids, table, rows of the table); 0 without ids. And which it has."""
    ids_ptr, _, num_rows = table
    ids = tl.zeros(offs_n.shape, tl.int64)
    if ids_ptr is not None:
        ids = tl.load(ids_ptr + offs_n, mask=exists, other=0).to(tl.int64)
    return ids, exists & (ids >= 0) & (ids < num_rows)


@triton.jit
def _looked_up(
    words,
    places,
    kinds,
    offs_n,
    exists,
    WIDTH: tl.constexpr,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
):
    """z in PARTS of fp32 [BLOCK_N, PART], the types [BLOCK_N], and the rows whose ids are right."""
    word_ids, known = _ids(words, offs_n, exists)
    place_ids, known_place = _ids(places, offs_n, exists)
    types, known_type = _ids(kinds, offs_n, exists)
    known = known & known_place & known_type
    # A row with a wrong id reads row 0 of each table.
    word_ids = tl.where(known, word_ids, 0)
    place_ids = tl.where(known, place_ids, 0)
    types = tl.where(known, types, 0)
    z = ()
    for i in tl.static_range(PARTS):
        offs_e = (i * PART + tl.arange(0, PART))[None, :]
        mask = exists[:, None] & (offs_e < WIDTH)
        word = tl.load(words[1] + word_ids[:, None] * WIDTH + offs_e, mask=mask, other=0.0)
        place = tl.load(places[1] + place_ids[:, None] * WIDTH + offs_e, mask=mask, other=0.0)
        kind = tl.load(kinds[1] + types[:, None] * WIDTH + offs_e, mask=mask, other=0.0)
        z = z + (word.to(tl.float32) + place.to(tl.float32) + kind.to(tl.float32),)
    return z, types, known


@triton.jit(do_not_specialize=["num_rows", "threshold"])
def _embedding_layer_norm_fwd_kernel(
    # pointers
    ids_ptr,
    word_ptr,
    position_ids_ptr,
    place_ptr,
    type_ids_ptr,
    type_ptr,
    w_ptr,
    b_ptr,
    seed_ptr,
    sample_ptr,
    position_ptr,
    out_ptr,
    # sizes
    num_rows,
    num_words,
    num_places,
    num_types,
    threshold,
    keep_scale,
    eps,
    # constexprs
    WIDTH: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
):
    offs_n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    exists = offs_n < num_rows
    if seed_ptr is not None:
        random = (load_seed(seed_ptr, BLOCK_N, PART), sample_ptr, position_ptr)
        draws = draws_of(random, threshold, offs_n, exists, WIDTH, PART, PARTS)
    words = (ids_ptr, word_ptr, num_words)
    places = (position_ids_ptr, place_ptr, num_places)
    kinds = (type_ids_ptr, type_ptr, num_types)
    z, _, known = _looked_up(words, places, kinds, offs_n, exists, WIDTH, PART, PARTS)
    xhat, rstd = statistics(z, eps, False, WIDTH, PART)
    rstd = tl.where(known, rstd, float("nan"))  # a wrong id is seen in the loss
    for i in tl.static_range(PARTS):
        y = xhat[i] * rstd[:, None] * load_vector(w_ptr, i, WIDTH, BLOCK_N, PART)
        y += load_vector(b_ptr, i, WIDTH, BLOCK_N, PART)  # [BLOCK_N, PART]
        if seed_ptr is not None:
            y = tl.where(kept(draws[i], PART), y * keep_scale, 0.0)
        store_part(out_ptr, y, i, offs_n, exists, WIDTH, PART)


@triton.jit(do_not_specialize=["num_rows", "threshold"])
def _embedding_layer_norm_bwd_kernel(
    # pointers
    dy_ptr,
    ids_ptr,
    word_ptr,
    position_ids_ptr,
    place_ptr,
    type_ids_ptr,
    type_ptr,
    w_ptr,
    seed_ptr,
    sample_ptr,
    position_ptr,
    dz_ptr,
    partial_ptr,
    # sizes
    num_rows,
    rows_per_group,
    num_words,
    num_places,
    num_types,
    threshold,
    keep_scale,
    eps,
    # strides
    stride_dyn,
    # constexprs
    WIDTH: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
    TYPES: tl.constexpr,
):
    if seed_ptr is not None:
        random = (load_seed(seed_ptr, BLOCK_N, PART), sample_ptr, position_ptr)
    words = (ids_ptr, word_ptr, num_words)
    places = (position_ids_ptr, place_ptr, num_places)
    kinds = (type_ids_ptr, type_ptr, num_types)
    group = tl.program_id(0).to(tl.int64)
    dw, db, dtype0, dtype1 = (), (), (), ()
    for _ in tl.static_range(PARTS):
        zero = (tl.zeros([BLOCK_N, PART], tl.float32),)
        dw, db, dtype0, dtype1 = dw + zero, db + zero, dtype0 + zero, dtype1 + zero

    first = group * rows_per_group
    end = tl.minimum(first + rows_per_group, num_rows)
    for start in range(0, (end - first).to(tl.int32), BLOCK_N):
        offs_n = first + start + tl.arange(0, BLOCK_N)
        exists = offs_n < end
        if seed_ptr is not None:
            draws = draws_of(random, threshold, offs_n, exists, WIDTH, PART, PARTS)
        dy = load_rows(dy_ptr, offs_n, exists, stride_dyn, WIDTH, PART, PARTS)
        z, types, known = _looked_up(words, places, kinds, offs_n, exists, WIDTH, PART, PARTS)
        xhat, rstd = statistics(z, eps, False, WIDTH, PART)
        rstd = tl.where(known, rstd, tl.where(exists, float("nan"), 0.0))
        along = tl.zeros([BLOCK_N, PART], tl.float32)
        total = tl.zeros([BLOCK_N, PART], tl.float32)
        g = ()
        for i in tl.static_range(PARTS):
            g_i = dy[i].to(tl.float32)  # [BLOCK_N, PART]
            if seed_ptr is not None:
                g_i = tl.where(kept(draws[i], PART), g_i * keep_scale, 0.0)
            weighted = g_i * load_vector(w_ptr, i, WIDTH, BLOCK_N, PART)
            along += weighted * (xhat[i] * rstd[:, None])
            total += weighted
            g = g + (g_i,)
        mean_along = tl.sum(along, 1) / WIDTH  # [BLOCK_N]
        mean = tl.sum(total, 1) / WIDTH
        new_dw, new_db, new_dtype0, new_dtype1 = (), (), (), ()
        for i in tl.static_range(PARTS):
            xhat_i = xhat[i] * rstd[:, None]
            dz = g[i] * load_vector(w_ptr, i, WIDTH, BLOCK_N, PART) - mean[:, None]
            dz = (dz - xhat_i * mean_along[:, None]) * rstd[:, None]  # [BLOCK_N, PART]
            if dz_ptr is not None:
                store_part(dz_ptr, dz, i, offs_n, exists, WIDTH, PART)
            new_dw = new_dw + (dw[i] + g[i] * xhat_i,)
            new_db = new_db + (db[i] + g[i],)
            dz_0 = tl.where((types == 0)[:, None], dz, 0.0) if TYPES == 2 else dz
            dz_1 = tl.where((types == 1)[:, None], dz, 0.0)
            new_dtype0 = new_dtype0 + (dtype0[i] + dz_0 if TYPES > 0 else dtype0[i],)
            new_dtype1 = new_dtype1 + (dtype1[i] + dz_1 if TYPES == 2 else dtype1[i],)
        dw, db, dtype0, dtype1 = new_dw, new_db, new_dtype0, new_dtype1

    for i in tl.static_range(PARTS):
        offs_e = i * PART + tl.arange(0, PART)
        ptrs = partial_ptr + group * ((2 + TYPES) * WIDTH) + offs_e
        tl.store(ptrs, tl.sum(dw[i], 0), mask=offs_e < WIDTH)
        tl.store(ptrs + WIDTH, tl.sum(db[i], 0), mask=offs_e < WIDTH)
        if TYPES > 0:
            tl.store(ptrs + 2 * WIDTH, tl.sum(dtype0[i], 0), mask=offs_e < WIDTH)
        if TYPES == 2:
            tl.store(ptrs + 3 * WIDTH, tl.sum(dtype1[i], 0), mask=offs_e < WIDTH)


@triton.jit
def _add_to_row(table_ptr, id, sum, num_rows, padding_idx, offs_e, mask_e, WIDTH: tl.constexpr):
    """Add a sum [BLOCK_E] to a row of the table, if it has this row."""
    known = (id >= 0) & (id < num_rows) & (id != padding_idx)
    ptrs = table_ptr + id.to(tl.int64) * WIDTH + offs_e
    sum += tl.load(ptrs, mask=mask_e & known, other=0.0).to(tl.float32)
    tl.store(ptrs, rounded(sum, table_ptr.dtype.element_ty), mask=mask_e & known)


@triton.jit(do_not_specialize=["num_slots", "num_rows", "padding_idx"])
def _add_rows_kernel(
    # pointers
    rows_ptr,
    ids_ptr,
    order_ptr,
    table_ptr,
    partial_ptr,
    # sizes
    num_slots,
    num_rows,
    padding_idx,
    # constexprs
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    AT_ONCE: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    num_tiles_e: tl.constexpr = (WIDTH + BLOCK_E - 1) // BLOCK_E
    chunk, tile_e = tl.program_id(0) // num_tiles_e, tl.program_id(0) % num_tiles_e
    offs_e = tile_e * BLOCK_E + tl.arange(0, BLOCK_E)
    mask_e = offs_e < WIDTH
    first = chunk.to(tl.int64) * CHUNK
    current = tl.load(ids_ptr + first)
    begins = True  # whether this is the first run of the chunk
    sum = tl.zeros([BLOCK_E], tl.float32)
    first_ptrs = partial_ptr + chunk.to(tl.int64) * (2 * WIDTH) + offs_e
    for start in range(0, CHUNK, AT_ONCE):
        ids, rows = (), ()
        for j in tl.static_range(AT_ONCE):
            slot = first + start + j
            here = slot < num_slots
            id = tl.load(ids_ptr + slot, mask=here, other=-1)
            row = tl.load(order_ptr + slot, mask=here, other=0)
            ptrs = rows_ptr + row * WIDTH + offs_e
            ids = ids + (tl.where(here, id, current),)
            rows = rows + (tl.load(ptrs, mask=mask_e & here, other=0.0).to(tl.float32),)
        for j in tl.static_range(AT_ONCE):
            if ids[j] != current:
                if begins:
                    tl.store(first_ptrs, sum, mask=mask_e)
                else:
                    _add_to_row(
                        table_ptr, current, sum, num_rows, padding_idx, offs_e, mask_e, WIDTH
                    )
                begins = False
                sum = tl.zeros([BLOCK_E], tl.float32)
                current = ids[j]
            sum += rows[j]
    if begins:
        tl.store(first_ptrs, sum, mask=mask_e)
    else:
        tl.store(first_ptrs + WIDTH, sum, mask=mask_e)


@triton.jit(do_not_specialize=["num_slots", "num_rows", "padding_idx"])
def _add_runs_kernel(
    # pointers
    ids_ptr,
    table_ptr,
    partial_ptr,
    # sizes
    num_slots,
    num_rows,
    padding_idx,
    # constexprs
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    # The program of a chunk adds up what begins in it and reaches one of its borders.
    num_tiles_e: tl.constexpr = (WIDTH + BLOCK_E - 1) // BLOCK_E
    chunk, tile_e = tl.program_id(0) // num_tiles_e, tl.program_id(0) % num_tiles_e
    offs_e = tile_e * BLOCK_E + tl.arange(0, BLOCK_E)
    mask_e = offs_e < WIDTH
    num_chunks = (num_slots + CHUNK - 1) // CHUNK
    first = chunk.to(tl.int64) * CHUNK
    first_id = tl.load(ids_ptr + first)
    last_id = tl.load(ids_ptr + tl.minimum(first + CHUNK, num_slots) - 1)
    before = tl.load(ids_ptr + first - 1, mask=chunk > 0, other=-1)
    begins = (chunk == 0) | (before != first_id)
    first_ptrs = partial_ptr + chunk.to(tl.int64) * (2 * WIDTH) + offs_e
    sum = tl.load(first_ptrs, mask=mask_e, other=0.0)
    if first_id != last_id:
        if begins:
            _add_to_row(table_ptr, first_id, sum, num_rows, padding_idx, offs_e, mask_e, WIDTH)
        sum = tl.load(first_ptrs + WIDTH, mask=mask_e, other=0.0)
        begins = True
    if begins:
        rest = tl.zeros([BLOCK_K, BLOCK_E], tl.float32)
        next_chunk = chunk + 1
        while next_chunk < num_chunks:
            chunks = next_chunk + tl.arange(0, BLOCK_K)
            ids = tl.load(ids_ptr + chunks.to(tl.int64) * CHUNK, mask=chunks < num_chunks, other=-1)
            goes_on = (ids == last_id) & (chunks < num_chunks)  # the ids are sorted
            ptrs = partial_ptr + chunks.to(tl.int64)[:, None] * (2 * WIDTH) + offs_e[None, :]
            rest += tl.load(ptrs, mask=goes_on[:, None] & mask_e[None, :], other=0.0)
            whole = tl.sum(goes_on.to(tl.int32), 0) == BLOCK_K
            next_chunk = tl.where(whole, next_chunk + BLOCK_K, num_chunks)
        sum += tl.sum(rest, 0)
        _add_to_row(table_ptr, last_id, sum, num_rows, padding_idx, offs_e, mask_e, WIDTH)


def add_rows_(
    table: torch.Tensor, ids: torch.Tensor, rows: torch.Tensor, padding_idx: int = -1
) -> None:
    """``table[ids[n]] += rows[n]`` [V, E] for rows [N, E], with one sort of ``ids`` [N].

    The rows of an id are summed in fp32 in their order, and added to the table with one rounding.
    Ids that the table does not have, and ``padding_idx``, are left out.
    """
    slots, width = rows.shape
    if slots == 0:
        return
    sorted_ids, order = torch.sort(ids.to(torch.int32), stable=True)
    chunks = cdiv(slots, _CHUNK)
    block_e = min(_MAX_BLOCK_E, max(16, next_power_of_2(width)))
    partial = rows.new_empty((chunks, 2, width), dtype=torch.float32)
    shared = dict(
        ids_ptr=sorted_ids,
        table_ptr=table,
        partial_ptr=partial,
        num_slots=slots,
        num_rows=table.shape[0],
        padding_idx=padding_idx,
        WIDTH=width,
        CHUNK=_CHUNK,
        BLOCK_E=block_e,
    )
    grid = (chunks * cdiv(width, block_e),)
    launch(
        _add_rows_kernel,
        grid,
        rows.device,
        rows_ptr=rows,
        order_ptr=order,
        AT_ONCE=_AT_ONCE,
        num_warps=2,
        **shared,
    )
    launch(_add_runs_kernel, grid, rows.device, BLOCK_K=16, num_warps=2, **shared)


def _of_tables(
    input_ids: torch.Tensor,
    word_weight: torch.Tensor,
    position_ids: torch.Tensor,
    position_weight: torch.Tensor,
    token_type_ids: torch.Tensor | None,
    token_type_weight: torch.Tensor,
) -> dict[str, object]:
    return dict(
        ids_ptr=input_ids,
        word_ptr=word_weight,
        position_ids_ptr=position_ids,
        place_ptr=position_weight,
        type_ids_ptr=token_type_ids,
        type_ptr=token_type_weight,
        num_words=word_weight.shape[0],
        num_places=position_weight.shape[0],
        num_types=token_type_weight.shape[0],
    )


def embedding_layer_norm_fwd(
    tables: tuple[torch.Tensor | None, ...],
    weight: torch.Tensor,
    bias: torch.Tensor,
    random: tuple[torch.Tensor | None, ...],
    *,
    threshold: int,
    keep_scale: float,
    eps: float,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Launch the forward: [N, E] in ``dtype``.

    Args:
        tables: ids and table of words, positions and types; ids of types None: all are type 0.
        random: seed, sample indices and positions, each None without dropout.
        threshold, keep_scale: as in ``dropout_add_layer_norm_fwd``.
    """
    (rows,), (width,) = tables[0].shape, weight.shape  # type: ignore[union-attr]
    tile = tile_of(width)
    out = weight.new_empty((rows, width), dtype=dtype)
    seed, sample_index, position = random
    launch(
        _embedding_layer_norm_fwd_kernel,
        (cdiv(rows, tile.rows),),
        weight.device,
        **_of_tables(*tables),  # type: ignore[arg-type]
        w_ptr=weight,
        b_ptr=bias,
        seed_ptr=seed,
        sample_ptr=sample_index,
        position_ptr=position,
        out_ptr=out,
        num_rows=rows,
        threshold=threshold,
        keep_scale=keep_scale,
        eps=eps,
        WIDTH=width,
        BLOCK_N=tile.rows,
        PART=tile.part,
        PARTS=tile.parts,
        num_warps=tile.warps,
    )
    return out


def embedding_layer_norm_bwd(
    grad: torch.Tensor,
    tables: tuple[torch.Tensor | None, ...],
    weight: torch.Tensor,
    bias: torch.Tensor,
    random: tuple[torch.Tensor | None, ...],
    *,
    threshold: int,
    keep_scale: float,
    eps: float,
    paddings: tuple[int, int],
    needs: tuple[bool, bool, bool, bool],
) -> tuple[torch.Tensor, ...]:
    """Launch the backward: gradients of the rows of words, the three tables, weight and bias.

    Args:
        paddings: the ids of words and positions that get no gradient; -1: none.
        needs: which gradients are needed; the others have no elements, but for weight and bias.
    """
    ids, word, position_ids, places, type_ids, types = tables
    assert ids is not None and word is not None and position_ids is not None
    assert places is not None and types is not None
    (rows,), (width,) = ids.shape, weight.shape
    tile = tile_of(width)
    groups, rows_per_group = groups_of(rows)
    few = 1 if type_ids is None else types.shape[0]
    need_rows, need_words, need_places, need_types = needs
    summed = few if need_types and few <= _MAX_TYPES else 0
    by_rows = need_rows or need_words or need_places or (need_types and not summed)
    dtype = torch.promote_types(torch.promote_types(word.dtype, places.dtype), types.dtype)
    grad_rows = grad.new_empty((rows, width) if by_rows else 0, dtype=dtype)
    partial = grad.new_empty((groups, 2 + summed, width), dtype=torch.float32)
    grad_types = torch.zeros_like(types) if need_types else types.new_empty(0)
    grad_weight, grad_bias = torch.empty_like(weight), torch.empty_like(bias)
    seed, sample_index, position = random
    launch(
        _embedding_layer_norm_bwd_kernel,
        (groups,),
        grad.device,
        dy_ptr=grad,
        **_of_tables(*tables),  # type: ignore[arg-type]
        w_ptr=weight,
        seed_ptr=seed,
        sample_ptr=sample_index,
        position_ptr=position,
        dz_ptr=grad_rows if by_rows else None,
        partial_ptr=partial,
        num_rows=rows,
        rows_per_group=rows_per_group,
        threshold=threshold,
        keep_scale=keep_scale,
        eps=eps,
        stride_dyn=grad.stride(0),
        WIDTH=width,
        BLOCK_N=tile.rows,
        PART=tile.part,
        PARTS=tile.parts,
        TYPES=summed,
        num_warps=tile.warps,
    )
    add_groups(partial, [grad_weight, grad_bias, *grad_types[:summed]])
    if need_types and not summed:
        add_rows_(grad_types, type_ids, grad_rows)  # type: ignore[arg-type]
    grad_words, grad_places = word.new_empty(0), places.new_empty(0)
    if need_words:
        grad_words = torch.zeros_like(word)
        add_rows_(grad_words, ids, grad_rows, paddings[0])
    if need_places:
        grad_places = torch.zeros_like(places)
        add_rows_(grad_places, position_ids, grad_rows, paddings[1])
    of_rows = grad_rows if need_rows else grad_rows.new_empty(0)
    return of_rows, grad_words, grad_places, grad_types, grad_weight, grad_bias


def compile_cases() -> Iterator[tuple[str, Callable[[], object]]]:
    """Every shipped configuration, as a label and a function that launches it (on meta tensors)."""
    cases = (
        # width, dropout, types, slow
        (768, True, True, False),
        (128, True, False, False),
        (1024, True, True, True),
        (256, False, False, True),
        (100, True, True, True),
        (4096, True, True, True),
    )
    for dtype in (torch.bfloat16, torch.float32):
        for width, drops, has_types, slow in cases:
            label = f"{'slow: ' if slow else ''}{str(dtype)[6:]} E={width}"
            label += f"{' dropout' if drops else ''}{' types' if has_types else ''}"
            yield label, lambda case=(dtype, width, drops, has_types): _case(*case)


def _case(dtype: torch.dtype, width: int, drops: bool, has_types: bool) -> None:
    """Tables and the results' gradients in fp32 beside 16 bits, as under autocast."""
    ids = torch.empty(4096, dtype=torch.int64, device="meta")
    table = torch.empty(512, width, device="meta")
    vector = torch.empty(width, device="meta")
    tables = (ids, table, ids, table, ids if has_types else None, table[:2])
    random = (ids[0], ids, ids) if drops else (None, None, None)
    settings = dict(threshold=6554, keep_scale=1.1, eps=1e-12)
    out = embedding_layer_norm_fwd(tables, vector, vector, random, dtype=dtype, **settings)
    embedding_layer_norm_bwd(
        *(out, tables, vector, vector, random),
        **settings,
        paddings=(0, -1),
        needs=(True,) * 4,
    )
