"""The CPU's backend of ``ops.linear_cross_entropy``: stock matrix products on the rows that count,
and csrc/ for the softmax of their logits.

Two data flows; the first ``kept_rows`` rows that count take the first, the others the second:

Kept logits: one product makes the logits of all rows, in the tensor that leaves the forward; there,
a block of rows at a time, they become the gradient of the logits at grad_loss = 1. The backward is
two products, with the upstream gradients on the rows of X.

Recompute: chunks of the vocabulary, not of rows: each row of the weight is read once and its
gradient is written once, from one product over all rows, so it needs no accumulator of its size.
The backward computes the logits of each chunk again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastplm._machine import computes_in
from fastplm.ops._common import csrc_rejects
from fastplm.ops._linear_cross_entropy_call import Call, Gradients, Saved
from fastplm.ops.linear import product as multiply
from fastplm.reference.linear_cross_entropy import uniform_level

_CHUNK_ELEMENTS = 1 << 20  # logits worked on at once: fp32, they stay in the cache
_CHUNK_COLUMNS = 512  # at least, or the products of a chunk get too narrow
_LARGE = 1 << 23  # bytes, of which each page fault counts
#: For fp64, and where csrc/ is not built, the reference makes all logits of the rows that count.
vocabulary_rejects = csrc_rejects("softmax_statistics", fp64=False)


def torch_forward(call: Call, outputs: tuple[Tensor, ...]) -> None:
    """Write the outputs of ``fastplm::linear_cross_entropy_fwd`` that this backend knows."""
    loss, log_probability, row_max, row_sum, argmax, sample, grad_logits, *_ = outputs
    for output in (loss, log_probability, row_max, row_sum):
        output.zero_()
    argmax.fill_(-1)
    sample.fill_(-1)
    rows = cpu_positions(call.target != call.ignore_index)
    if rows.numel() == 0:
        return
    for counted, kept in parts_of_rows(rows, call.kept_rows):
        statistics = _Statistics(call, counted)
        if kept:
            _keep_logits(call, counted, statistics, grad_logits)
        else:
            _stream_logits(call, counted, statistics)
        loss[counted] = statistics.loss(call)
        log_probability[counted] = statistics.log_probability()
        row_max[counted], row_sum[counted] = statistics.m_i, statistics.l_i
        if call.need_argmax:
            argmax[counted] = statistics.argmax
        if call.seed is not None:
            sample[counted] = statistics.sample


def torch_backward(
    grad_loss: Tensor, saved: Any, grads: Gradients, recomputed: Callable[..., None] | None = None
) -> None:
    """Write the outputs of ``fastplm::linear_cross_entropy_bwd``, or of an op that keeps the same:
    ``recomputed`` is then its backward of rows without logits."""
    recomputed = recomputed or _backward_of_recomputed
    grads.input.zero_()
    if grads.weight.nbytes >= _LARGE:
        torch.ops.fastplm_C.ask_for_huge_pages(grads.weight)
    rows = cpu_positions(saved.target != saved.ignore_index)
    parts = parts_of_rows(rows, saved.grad_logits.shape[0])
    if not parts:
        grads.weight.zero_()
        grads.bias.zero_()
    for number, (counted, kept) in enumerate(parts):
        backward, own = _backward_of_kept if kept else recomputed, grads
        if number:
            own = Gradients(grads.input, *map(torch.empty_like, grads[1:]))
        backward(grad_loss, saved, counted, own)
        if number:
            grads.weight.add_(own.weight)
            grads.bias.add_(own.bias)


def parts_of_rows(rows: Tensor, kept_rows: int) -> list[tuple[Tensor, bool]]:
    """The rows that keep their logits and those that do not, without empty parts."""
    parts = (rows[:kept_rows], True), (rows[kept_rows:], False)
    return [(counted, kept) for counted, kept in parts if counted.numel()]


class _Statistics:
    """What a forward finds out about the rows that count, each [rows]."""

    def __init__(self, call: Call, rows: Tensor) -> None:
        count = rows.shape[0]
        values = call.input.new_empty(4, count, dtype=torch.float32)
        self.m_i, self.l_i, self.picked, self.mean = values  # the last two relative to m_i
        self.argmax, self.sample = rows.new_zeros(2, count)
        self.level = rows.new_empty(0)
        if call.seed is not None:
            count, device = call.input.shape[0], call.input.device
            level = uniform_level(call.seed, count, call.sample_index, call.position, device)
            self.level = level[rows]

    def log_probability(self) -> Tensor:
        return self.picked - self.l_i.log()

    def loss(self, call: Call) -> Tensor:
        log_sum = self.l_i.log()
        loss = log_sum - self.picked
        if call.label_smoothing:
            loss = (1 - call.label_smoothing) * loss
            loss += call.label_smoothing * (log_sum - self.mean)
        return loss


# --- kept logits ----------------------------------------------------------------------------------


def _keep_logits(call: Call, rows: Tensor, statistics: _Statistics, grad_logits: Tensor) -> None:
    compact = call.input[rows]
    logits = grad_logits[: rows.shape[0]]
    product(compact, call.linear_weight, call.linear_bias, logits, call.input.dtype)
    target = call.target[rows, None]
    for here in row_blocks(*logits.shape):
        kept = logits[here]
        z = kept.float()
        _softmax_of_block(call, z, target[here], statistics, here)
        grad_target = _grad_target(statistics.log_probability()[here], call, z.shape[1])
        if call.label_smoothing:
            z.sub_(call.label_smoothing / z.shape[1])
        z.scatter_(1, target[here], grad_target[:, None])
        if z is not kept:
            kept.copy_(z)


def _softmax_of_block(
    call: Call, z: Tensor, target: Tensor, statistics: _Statistics, here: slice
) -> None:
    """Statistics of whole rows of logits, which become their softmax, in place."""
    if call.need_argmax:
        statistics.argmax[here] = z.argmax(1)
    weights = z
    if call.seed is not None and call.temperature != 1.0:
        weights = ((z - z.amax(1, keepdim=True)) / call.temperature).exp_()
    picked = z.gather(1, target).squeeze(1)
    m_i, l_i, below, _ = torch.ops.fastplm_C.softmax_statistics.default(z, False, True, 0.0)
    statistics.m_i[here], statistics.l_i[here] = m_i, l_i
    statistics.picked[here] = picked.sub_(m_i)
    if call.label_smoothing:
        statistics.mean[here] = below / z.shape[1]
    if call.seed is not None:
        statistics.sample[here] = _inverse_cdf(weights, statistics.level[here])


def _backward_of_kept(grad_loss: Tensor, saved: Any, rows: Tensor, grads: Gradients) -> None:
    grad_logits = saved.grad_logits[: rows.shape[0]]
    grad_loss = grad_loss[rows]
    if saved.need_input:
        grad_rows = grad_logits @ saved.linear_weight.to(grad_logits.dtype)
        grads.input[rows] = (grad_rows * grad_loss[:, None]).to(grads.input.dtype)
    # The gradient of a mean is one number: off the rows it comes, which then take no rounding.
    scale = grad_loss.abs().amax()
    share = grad_loss / scale.masked_fill(scale == 0, 1.0)
    if saved.need_linear_weight:
        compact = (saved.input[rows] * share[:, None]).to(grad_logits.dtype)
        mm_into(grads.weight, grad_logits.t(), compact)
        grads.weight.mul_(scale)
    if saved.need_linear_bias:
        total = grad_loss.new_zeros(saved.linear_weight.shape[0])
        for here in row_blocks(*grad_logits.shape):
            total += grad_loss[here] @ grad_logits[here].to(total.dtype)
        grads.bias.copy_(total)


def row_blocks(count: int, vocab: int) -> Iterator[slice]:
    size = max(1, _CHUNK_ELEMENTS // vocab)
    for start in range(0, count, size):
        yield slice(start, start + size)


# --- recompute ------------------------------------------------------------------------------------


def _stream_logits(call: Call, rows: Tensor, statistics: _Statistics) -> None:
    compact, target = call.input[rows].to(multiplies_in(call.input)), call.target[rows]
    vocab = call.linear_weight.shape[0]
    picked = statistics.picked
    maxima, sums, means, sampled_sums, likeliest = [], [], [], [], []
    parameters = call.linear_weight, call.linear_bias
    temperature = 0.0 if call.seed is None or call.temperature == 1.0 else call.temperature
    for start, _, logits, _ in logit_chunks(compact, *parameters, call.input.dtype):
        column, inside = locate(target, start, logits)
        picked = torch.where(inside, logits.gather(1, column).squeeze(1), picked)
        if call.need_argmax:
            likeliest.append(logits.argmax(1) + start)
        m_c, l_c, below, cooled = torch.ops.fastplm_C.softmax_statistics.default(
            logits, True, False, temperature
        )
        maxima.append(m_c)
        sums.append(l_c)
        if call.label_smoothing:
            means.append(below / vocab)
        if temperature:
            sampled_sums.append(cooled)
    m_c, l_c = torch.stack(maxima), torch.stack(sums)  # [chunks, rows]
    statistics.m_i, best = m_c.max(0)
    statistics.l_i = ((m_c - statistics.m_i).exp() * l_c).sum(0)
    statistics.picked = picked - statistics.m_i
    if call.need_argmax:
        statistics.argmax = torch.stack(likeliest).gather(0, best[None]).squeeze(0)
    if call.label_smoothing:
        columns = _chunk_sizes(rows.shape[0], vocab)
        share = torch.tensor(columns, dtype=m_c.dtype, device="cpu")[:, None] / vocab
        statistics.mean = (torch.stack(means) + share * (pivot(m_c) - statistics.m_i)).sum(0)
    if call.seed is not None:
        l_c = torch.stack(sampled_sums) if sampled_sums else l_c
        weights = ((m_c - statistics.m_i) / call.temperature).exp() * l_c
        statistics.sample = _sample_in_chunks(call, compact, weights.t(), statistics)


def _sample_in_chunks(
    call: Call, compact: Tensor, weights: Tensor, statistics: _Statistics
) -> Tensor:
    """The uniform number of a row chooses one of the chunks, whose ``weights`` are [rows, chunks];
    that chunk alone is computed again."""
    chosen, rest = _inverse_cdf_and_rest(weights, statistics.level)
    sample = torch.zeros_like(chosen)
    start = 0
    for chunk, columns in enumerate(_chunk_sizes(compact.shape[0], call.linear_weight.shape[0])):
        here = cpu_positions(chosen == chunk)
        if here.numel():
            tile = slice(start, start + columns)
            bias = None if call.linear_bias is None else call.linear_bias[tile]
            logits = compact.new_empty(here.shape[0], columns)
            product(compact[here], call.linear_weight[tile], bias, logits, call.input.dtype)
            z = logits.float() - statistics.m_i[here, None]
            # Its own maximum, or a tile far below the row's would underflow.
            z -= pivot(z.amax(1))[:, None]
            sample[here] = start + _inverse_cdf((z / call.temperature).exp_(), rest[here])
        start += columns
    return sample.masked_fill_(~weights.sum(1).isfinite(), 0)


def _backward_of_recomputed(
    grad_loss: Tensor, saved: Saved, rows: Tensor, grads: Gradients
) -> None:
    compact, target = saved.input[rows].to(multiplies_in(saved.input)), saved.target[rows]
    grad_loss, row_max = grad_loss[rows, None], saved.row_max[rows, None]
    vocab = saved.linear_weight.shape[0]
    scale = grad_loss / saved.row_sum[rows, None]
    grad_picked = grad_loss * _grad_target(saved.log_probability[rows, None], saved, vocab)

    def chunks() -> Iterator[Chunk]:
        parameters = saved.linear_weight, saved.linear_bias
        for chunk in logit_chunks(compact, *parameters, saved.input.dtype):
            column, inside = locate(target, chunk.start, chunk.logits)
            grad_logits = chunk.logits.sub_(row_max).exp_().mul_(scale)
            if saved.label_smoothing:
                grad_logits.sub_(grad_loss, alpha=saved.label_smoothing / vocab)
            grad_target = torch.where(inside[:, None], grad_picked, grad_logits.gather(1, column))
            grad_logits.scatter_(1, column, grad_target)
            yield chunk

    backward_of_chunks(chunks(), saved, rows, compact, grads)


def backward_of_chunks(
    chunks: Iterable[Chunk], saved: Any, rows: Tensor, compact: Tensor, grads: Gradients
) -> None:
    """Write the gradients of rows from chunks whose logits became their gradients."""
    grad_rows = compact.new_zeros(compact.shape, dtype=torch.float32)
    for start, weight, grad_logits, scratch in chunks:
        here = slice(start, start + weight.shape[0])
        if saved.need_linear_bias:
            grads.bias[here] = grad_logits.sum(0)
        grad_logits = scratch.copy_(grad_logits)
        if saved.need_linear_weight:
            mm_into(grads.weight[here], grad_logits.t(), compact)
        if saved.need_input:
            grad_rows += grad_logits @ weight
    if saved.need_input:
        grads.input[rows] = grad_rows.to(grads.input.dtype)


class Chunk(NamedTuple):
    """Columns of the logits of some rows, from ``start`` on.

    Logits and scratch are [rows, columns] and the caller's to overwrite: one piece of memory serves
    all chunks, as touching a fresh one costs more than the arithmetic on it.
    """

    start: int
    weight: Tensor  # its rows of these columns, in the dtype of the products
    logits: Tensor  # fp32
    scratch: Tensor  # in the dtype of the products


def logit_chunks(
    rows: Tensor, linear_weight: Tensor, linear_bias: Tensor | None, dtype: torch.dtype
) -> Iterator[Chunk]:
    """The rows are in the dtype of the products, weight and bias are rounded to ``dtype``."""
    count, vocab = rows.shape[0], linear_weight.shape[0]
    sizes = _chunk_sizes(count, vocab)
    products = rows.new_empty(count * sizes[0])
    logits = products
    if rows.dtype is not torch.float32:
        logits = products.new_empty(count * sizes[0], dtype=torch.float32)
    start = 0
    for columns in sizes:
        tile = slice(start, start + columns)
        weight = linear_weight[tile].to(dtype).to(rows.dtype)
        scratch = products[: count * columns].view(count, columns)
        bias = None if linear_bias is None else linear_bias[tile].to(dtype)
        product(rows, weight, bias, scratch, rows.dtype)
        chunk = scratch
        if logits is not products:
            chunk = logits[: scratch.numel()].view(count, columns).copy_(scratch)
        yield Chunk(start, weight, chunk, scratch)
        start += columns


def _chunk_sizes(count: int, vocab: int) -> list[int]:
    columns = min(vocab, max(_CHUNK_COLUMNS, _CHUNK_ELEMENTS // count))
    return [min(columns, vocab - start) for start in range(0, vocab, columns)]


def locate(target: Tensor, start: int, chunk: Tensor) -> tuple[Tensor, Tensor]:
    """(column of each target in this chunk [rows, 1], whether it lies there [rows])."""
    column = target - start
    inside = (column >= 0) & (column < chunk.shape[1])
    return column.clamp(0, chunk.shape[1] - 1)[:, None], inside


def pivot(maximum: Tensor) -> Tensor:
    return maximum.masked_fill(maximum.isneginf(), 0.0)


# --- both -----------------------------------------------------------------------------------------


def _grad_target(log_probability: Tensor, call: Call | Saved, vocab: int) -> Tensor:
    """The gradient of the target's logit at grad_loss = 1.

    Not softmax - 1 of rounded logits: this is exact where the row is certain.
    """
    return log_probability.expm1() + (call.label_smoothing - call.label_smoothing / vocab)


def _inverse_cdf(weights: Tensor, level: Tensor) -> Tensor:
    """The first column at which the running share of ``weights`` [rows, columns] exceeds ``level``
    fp64 [rows]; 0 in a row that is not finite."""
    return _inverse_cdf_and_rest(weights, level)[0]


def _inverse_cdf_and_rest(weights: Tensor, level: Tensor) -> tuple[Tensor, Tensor]:
    """The same, and how far into that column the level lies: fp64, in [0, 1)."""
    # fp64: in fp32 the sum over a vocabulary would favour or starve the tokens at its end.
    distribution = weights.double().cumsum(1)
    total = distribution[:, -1:]
    # The first column strictly above: never one that adds nothing, and always one.
    threshold = torch.minimum(level[:, None] * total, total.nextafter(total.new_zeros(())))
    column = torch.searchsorted(distribution, threshold, right=True)
    column.masked_fill_(~total.isfinite(), 0)
    end, weight = distribution.gather(1, column), weights.gather(1, column)
    rest = (threshold - (end - weight)) / weight
    return column.squeeze(1), rest.clamp_(0, 1).squeeze(1)


def cpu_positions(mask: Tensor) -> Tensor:
    return mask.nonzero().squeeze(1)


def product(
    rows: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, dtype: torch.dtype
) -> None:
    """``out = rows weight^T + bias``, of numbers rounded to ``dtype``, in the dtype of ``rows``."""
    weight = weight.to(dtype).to(rows.dtype)
    bias = None if bias is None else bias.to(dtype).to(rows.dtype)
    multiply(rows, weight.t(), bias, out=out)


def mm_into(out: Tensor, a: Tensor, b: Tensor) -> None:
    if out.dtype is not a.dtype:
        out.copy_(a @ b)
    else:
        multiply(a, b, out=out)


def multiplies_in(tensor: Tensor) -> torch.dtype:
    """The dtype of a tensor's products: fp32 where this CPU has no instructions for its own.

    The numbers are the same in both, so what is multiplied by ``tensor`` is rounded to its dtype
    first.
    """
    known = tensor.device.type != "cpu" or computes_in(tensor.dtype)
    return tensor.dtype if known else torch.float32
