"""The CPU's backend of ``ops.linear_distillation``: stock matrix products on the rows that count.

The two data flows are those of ``_linear_cross_entropy_torch.py``, with the student's gradient kept
and the teacher's logits never: they are made again, or exist for a group of rows. A tile is whole
rows of kept logits, or a chunk of the vocabulary; both flows do the same on it. "js" looks at each
tile twice, as its mixture needs both sums of exponentials.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastplm.ops import _linear_cross_entropy_torch as cross_entropy
from fastplm.ops._linear_cross_entropy_call import Gradients
from fastplm.ops._linear_cross_entropy_torch import (
    Chunk,
    backward_of_chunks,
    cpu_positions,
    locate,
    logit_chunks,
    multiplies_in,
    parts_of_rows,
    pivot,
    product,
    row_blocks,
)
from fastplm.ops._linear_distillation_call import Call, Saved

#: Bytes of the teacher's logits that are made at once, where the student's are kept: so many rows
#: that their product reads the weight seldom.
_TEACHER_BYTES = 1 << 25
_LARGEST_GAP = 80.0  # exp of it and of its negative are normal fp32 numbers


class _Tile(NamedTuple):
    """Logits of both sides, [rows, columns] in fp32, from the column ``start`` on; without
    a teacher's weight only the student's. Three pieces of memory of that shape."""

    start: int
    student: Tensor
    teacher: Tensor | None
    scratch: tuple[Tensor, Tensor, Tensor]


class _Rows(NamedTuple):
    """What is known of rows, [rows] each (see ``STATISTICS``)."""

    m: Tensor
    l: Tensor  # noqa: E741
    l_hard: Tensor
    teacher_m: Tensor
    teacher_l: Tensor
    mean: Tensor
    log_probability: Tensor

    def of(self, here: slice) -> _Rows:
        return _Rows(*(one[here] for one in self))


def torch_forward(call: Call, outputs: tuple[Tensor, ...]) -> None:
    """Write the outputs of ``fastplm::linear_distillation_fwd`` that this backend knows."""
    loss, distillation, cross_entropy_of, statistics, grad_logits, *_ = outputs
    for output in (loss, distillation, cross_entropy_of, statistics):
        output.zero_()
    rows = cpu_positions(call.target != call.ignore_index)
    if rows.numel() == 0:
        return
    for counted, kept in parts_of_rows(rows, call.kept_rows):
        if kept:
            found, divergence = _keep_logits(call, counted, grad_logits)
        else:
            found, divergence = _stream_logits(call, counted)
        statistics[:, counted] = torch.stack(found)
        distillation[counted] = divergence
        cross_entropy_of[counted] = 0.0 - found.log_probability
    # A weight of 0 takes out even what is infinite.
    for weight, part in (
        (call.distillation_weight * call.temperature**2, distillation),
        (call.cross_entropy_weight, cross_entropy_of),
    ):
        if weight != 0:
            loss.add_(part, alpha=weight)


def torch_backward(grad_loss: Tensor, saved: Saved, grads: Gradients) -> None:
    """Write the outputs of ``fastplm::linear_distillation_bwd``."""
    cross_entropy.torch_backward(grad_loss, saved, grads, recomputed=_backward_of_recomputed)


# --- the two data flows ---------------------------------------------------------------------------


def _keep_logits(call: Call, rows: Tensor, grad_logits: Tensor) -> tuple[_Rows, Tensor]:
    """(what is known of the rows, their divergence); their logits become D in ``grad_logits``."""
    logits = grad_logits[: rows.shape[0]]
    product(call.input[rows], call.linear_weight, call.linear_bias, logits, call.input.dtype)
    found = []
    for here, tile in _tiles_of_rows(call, rows, logits):
        some = rows[here]
        parts = [_fold(call, tile, some)]
        known, divergence = _combine(call, parts, some)
        if call.divergence == "js":
            known, divergence = _combine_mixture(call, [_fold_mixture(call, tile, known)], known)
        found.append((known, divergence))
        target = call.target[some]
        kept = logits[here]
        d = _grad_logits(call, tile, known, target, _sparse_of(call, some))
        if d.dtype is not kept.dtype:  # else it is in that place
            kept.copy_(d)
    of_blocks, divergences = zip(*found, strict=True)
    return _Rows(*map(torch.cat, zip(*of_blocks, strict=True))), torch.cat(divergences)


def _stream_logits(call: Call, rows: Tensor) -> tuple[_Rows, Tensor]:
    """The same without keeping anything."""
    compact = _student_rows(call, rows)
    parts = [_fold(call, tile, rows) for tile, _ in _tiles_of_columns(call, rows, compact)]
    known, divergence = _combine(call, parts, rows)
    if call.divergence == "js":
        tiles = _tiles_of_columns(call, rows, compact)
        sums = [_fold_mixture(call, tile, known) for tile, _ in tiles]
        known, divergence = _combine_mixture(call, sums, known)
    return known, divergence


def _backward_of_recomputed(
    grad_loss: Tensor, saved: Saved, rows: Tensor, grads: Gradients
) -> None:
    known, target = _Rows(*saved.statistics[:, rows]), saved.target[rows]
    g, sparse = grad_loss[rows, None], _sparse_of(saved, rows)
    compact = _student_rows(saved, rows)

    def chunks() -> Iterator[Chunk]:
        for tile, chunk in _tiles_of_columns(saved, rows, compact):
            _grad_logits(saved, tile, known, target, sparse).mul_(g)
            yield chunk

    backward_of_chunks(chunks(), saved, rows, compact, grads)


def _student_rows(call: Any, rows: Tensor) -> Tensor:
    """In the dtype of their products."""
    return call.input[rows].to(multiplies_in(call.input))


def _tiles_of_rows(call: Call, rows: Tensor, logits: Tensor) -> Iterator[tuple[slice, _Tile]]:
    """Blocks of whole rows, with their places; the student's logits are views of ``logits`` where
    these are not of 16 bits."""
    count, vocab = logits.shape
    blocks = list(row_blocks(count, vocab))
    memory = logits.new_empty(5, len(logits[blocks[0]]) * vocab, dtype=torch.float32)
    group, teacher = slice(0, 0), None
    for here in blocks:
        if call.teacher_input is not None and here.start >= group.stop:
            assert call.teacher_weight is not None
            if teacher is None:
                at_once = _TEACHER_BYTES // (vocab * call.teacher_input.dtype.itemsize)
                block = here.stop - here.start
                size = min(max(1, at_once // block) * block, count)
                teacher_dtype = multiplies_in(call.teacher_input)
                teacher = call.teacher_input.new_empty(size, vocab, dtype=teacher_dtype)
            group = slice(here.start, here.start + teacher.shape[0])
            compact = call.teacher_input[rows[group]].to(teacher.dtype)
            made = teacher[: compact.shape[0]]
            dtype_of_input = call.teacher_input.dtype
            product(compact, call.teacher_weight, call.teacher_bias, made, dtype_of_input)
        z, t = logits[here], None
        buffers = [piece[: z.numel()].view(z.shape) for piece in memory]
        if z.dtype is not torch.float32:
            z = buffers[3].copy_(z)
        if teacher is not None:
            t = teacher[here.start - group.start : here.stop - group.start][: z.shape[0]]
            if t.dtype is not torch.float32:
                t = buffers[4].copy_(t)
        yield here, _Tile(0, z, t, tuple(buffers[:3]))


def _tiles_of_columns(call: Any, rows: Tensor, compact: Tensor) -> Iterator[tuple[_Tile, Chunk]]:
    """Chunks of the vocabulary of these rows, whose student's are ``compact``; with the chunk that
    the student's logits are of."""
    chunks = logit_chunks(compact, call.linear_weight, call.linear_bias, call.input.dtype)
    teachers: Iterator[Chunk] | None = None
    if call.teacher_input is not None:
        taught = call.teacher_input[rows].to(multiplies_in(call.teacher_input))
        parameters = call.teacher_weight, call.teacher_bias
        teachers = logit_chunks(taught, *parameters, call.teacher_input.dtype)
    memory = compact.new_empty(0)
    for chunk in chunks:
        z = chunk.logits
        if memory.numel() == 0:  # the first chunk is the largest
            memory = z.new_empty(3, z.numel())
        t = None
        if teachers is not None:
            t = next(teachers).logits
        buffers = tuple(piece[: z.numel()].view(z.shape) for piece in memory)
        yield _Tile(chunk.start, z, t, buffers), chunk


# --- on a tile ------------------------------------------------------------------------------------


def _sparse_of(call: Any, rows: Tensor) -> tuple[Tensor, Tensor] | None:
    """The teacher's indices and probabilities of these rows, where they are all there is of it."""
    if call.teacher_indices is None:
        return None
    return call.teacher_indices[rows], call.teacher_probabilities[rows]


def _locate_given(indices: Tensor, tile: _Tile) -> tuple[Tensor, Tensor]:
    """(column of each index in this tile, whether it lies there), both [rows, K]."""
    column, inside = locate(indices.flatten(), tile.start, tile.student)
    return column.view_as(indices), inside.view_as(indices)


def _softened(call: Any, logits: Tensor, m: Tensor, out: Tensor) -> Tensor:
    """``(logits - m) / T`` in ``out``."""
    torch.sub(logits, m[:, None], out=out)
    return out if call.temperature == 1.0 else out.mul_(1.0 / call.temperature)


def _fold(call: Call, tile: _Tile, rows: Tensor) -> tuple[Tensor, ...]:
    """(m, l and l_hard of the student, m and l of the teacher, the mean of the difference of logits
    by weights of exponentials, the target's logit [rows]; the logits of given indices [rows, K]).

    Logits are relative to the largest of the tile and divided by T, but for l_hard and the last
    two.
    """
    z, t = tile.student, tile.teacher
    soft, other, exps = tile.scratch
    m = z.amax(1)
    nothing = m.new_zeros(m.shape)
    picked = l_hard = teacher_m = teacher_l = mean = nothing
    if call.has_target:
        column, inside = locate(call.target[rows], tile.start, z)
        picked = torch.where(inside, z.gather(1, column).squeeze(1), nothing)
        if call.temperature != 1.0:
            l_hard = torch.sub(z, pivot(m)[:, None], out=soft).exp_().sum(1)
    _softened(call, z, pivot(m), soft)
    l_i = torch.exp(soft, out=exps).sum(1)
    if call.has_target and call.temperature == 1.0:
        l_hard = l_i
    given = nothing[:, None]
    if t is not None:
        teacher_m = t.amax(1)
        _softened(call, t, pivot(teacher_m), other)
        if call.divergence == "reverse_kl":
            mean = _mean(exps, l_i, soft.sub_(other))
            teacher_l = torch.exp(other, out=exps).sum(1)
        else:
            teacher_l = torch.exp(other, out=exps).sum(1)
            if call.divergence == "forward_kl":
                mean = _mean(exps, teacher_l, other.sub_(soft))
    else:
        assert call.teacher_indices is not None
        column, inside = _locate_given(call.teacher_indices[rows], tile)
        given = torch.where(inside, z.gather(1, column), 0.0)
    return m, l_i, l_hard, teacher_m, teacher_l, mean, picked, given


def _combine(call: Call, parts: list[tuple[Tensor, ...]], rows: Tensor) -> tuple[_Rows, Tensor]:
    """(what is known of the rows, their divergence), of all their tiles; of "js" the second is
    not known yet."""
    *each, picked, given = (torch.stack(one) for one in zip(*parts, strict=True))  # [tiles, rows]
    m_c, l_c, hard_c, teacher_m_c, teacher_l_c, mean_c = each
    inverse = 1.0 / call.temperature
    m, teacher_m = m_c.amax(0), teacher_m_c.amax(0)
    weight = ((m_c - m) * inverse).exp()
    l_i = (weight * l_c).sum(0)
    l_hard = ((m_c - m).exp() * hard_c).sum(0)
    log_probability = l_hard
    if call.has_target:
        log_probability = picked.sum(0) - m - l_hard.log()
    if call.teacher_weight is None:
        _, p = _sparse_of(call, rows)  # type: ignore[misc]
        log_q = (given.sum(0) - m[:, None]) * inverse - l_i.log()[:, None]
        divergence = _expected(p, p.log() - log_q)
        known = _Rows(m, l_i, l_hard, teacher_m, p.sum(1), teacher_m, log_probability)
        return known, divergence
    teacher_weight = ((teacher_m_c - teacher_m) * inverse).exp()
    teacher_l = (teacher_weight * teacher_l_c).sum(0)
    # The tile's difference of logits counts from its own maxima.
    shift = ((pivot(teacher_m_c) - teacher_m) - (pivot(m_c) - m)) * inverse
    ratio = teacher_l.log() - l_i.log()
    if call.divergence == "forward_kl":
        mean = _sum_of_tiles(teacher_weight * teacher_l_c / teacher_l, mean_c + shift)
        divergence = mean - ratio
    else:
        mean = _sum_of_tiles(weight * l_c / l_i, mean_c - shift)
        divergence = mean + ratio
    known = _Rows(m, l_i, l_hard, teacher_m, teacher_l, mean, log_probability)
    return known, divergence


def _sum_of_tiles(weight: Tensor, value: Tensor) -> Tensor:
    """[rows], of [tiles, rows]: a tile of no weight counts nothing, infinite as it may be."""
    return torch.where(weight == 0.0, 0.0, weight * value).sum(0)


def _log_ratio(call: Any, tile: _Tile, rows: _Rows) -> tuple[Tensor, Tensor, Tensor]:
    """(q, p, log p / q) in the scratch."""
    assert tile.teacher is not None
    q, p, gap = tile.scratch
    _softened(call, tile.student, rows.m, q).sub_(rows.l.log()[:, None])
    _softened(call, tile.teacher, rows.teacher_m, p).sub_(rows.teacher_l.log()[:, None])
    # Beyond these the smaller of the two, which such a ratio is multiplied by, counts for nothing.
    torch.sub(p, q, out=gap).clamp_(-_LARGEST_GAP, _LARGEST_GAP)
    return q.exp_(), p.exp_(), gap


def _over_mixture(gap: Tensor, share: float) -> Tensor:
    """``log q / m`` in the place of the gap log p / q, with m = share p + (1 - share) q.

    No logarithm of q or m is taken: where p and q are close, the result is as small as it is exact.
    """
    return gap.expm1_().mul_(share).log1p_().neg_()


def _fold_mixture(call: Call, tile: _Tile, rows: _Rows) -> tuple[Tensor, Tensor]:
    """The parts of KL(q || m) and KL(p || m) of one tile, each [rows]."""
    q, p, gap = _log_ratio(call, tile, rows)
    of_p = _expected(p, _over_mixture(gap.neg(), 1 - call.beta))
    return _expected(q, _over_mixture(gap, call.beta)), of_p


def _combine_mixture(
    call: Call, sums: list[tuple[Tensor, Tensor]], rows: _Rows
) -> tuple[_Rows, Tensor]:
    student, teacher = (torch.stack(one).sum(0) for one in zip(*sums, strict=True))
    divergence = call.beta * teacher + (1 - call.beta) * student
    return rows._replace(mean=student), divergence


def _grad_logits(
    call: Any,
    tile: _Tile,
    rows: _Rows,
    target: Tensor,
    sparse: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """The gradient of a tile's logits at grad_loss = 1, in the place of the student's."""
    z, t = tile.student, tile.teacher
    soft, other, exps = tile.scratch
    scale = call.distillation_weight * call.temperature
    hard = None
    if call.cross_entropy_weight:
        hard = torch.sub(z, rows.m[:, None], out=exps).exp_()
        hard.mul_((call.cross_entropy_weight / rows.l_hard)[:, None])
        if call.divergence == "js":  # which needs all of the scratch
            hard = hard.clone()
    if not call.distillation_weight:
        z.zero_()
    elif sparse is not None:
        indices, p = sparse
        torch.exp(_softened(call, z, rows.m, soft), out=z)
        z.mul_((scale * rows.teacher_l / rows.l)[:, None])
        column, inside = _locate_given(indices, tile)
        z.scatter_add_(1, column, torch.where(inside, p * -scale, 0.0))
    elif call.divergence == "js":
        q, _, gap = _log_ratio(call, tile, rows)
        value = _over_mixture(gap, call.beta).sub_(rows.mean[:, None]).masked_fill_(q == 0, 0.0)
        torch.mul(q, value, out=z).mul_(scale * (1 - call.beta))
    else:
        assert t is not None
        _softened(call, z, rows.m, soft)
        _softened(call, t, rows.teacher_m, other)
        torch.exp(soft, out=z).mul_((scale / rows.l)[:, None])
        if call.divergence == "forward_kl":
            z.sub_(other.exp_().mul_((scale / rows.teacher_l)[:, None]))
        else:
            soft.sub_(other).sub_(rows.mean[:, None])
            z.mul_(soft.masked_fill_(z == 0, 0.0))  # 0 times an infinite difference is 0
    if hard is not None:
        column, inside = locate(target, tile.start, z)
        # Not softmax - 1 of rounded logits: this is exact where the row is certain.
        exact = z.gather(1, column)
        exact += call.cross_entropy_weight * rows.log_probability.expm1()[:, None]
        z.add_(hard)
        z.scatter_(1, column, torch.where(inside[:, None], exact, z.gather(1, column)))
    return z


def _mean(weight: Tensor, total: Tensor, value: Tensor) -> Tensor:
    """[rows], the mean of ``value`` by weights that sum to ``total``; 0 times infinity is 0."""
    mean = torch.linalg.vecdot(weight, value) / total
    if bool(mean.isfinite().all()):
        return mean
    return _expected(weight / total[:, None], value)


def _expected(weight: Tensor, value: Tensor) -> Tensor:
    """[rows], the sum of ``value`` by weights; 0 times an infinite value is 0."""
    total = torch.linalg.vecdot(weight, value)
    if bool(total.isfinite().all()):
        return total
    return torch.linalg.vecdot(weight, value.masked_fill(weight == 0, 0.0))
