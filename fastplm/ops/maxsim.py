"""``ops.maxsim``: its arguments, and its backends.

The operator has one result for both sides, of the rows of ``query`` and then those of ``key``: each
row has one match, and the gradient is the same formula for all.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from fastplm._checks import check_number
from fastplm._declare import Arg, Size, from_fields
from fastplm._modes import values_are_known
from fastplm._registry import Op
from fastplm.ops._attention_call import check_lengths_on_cpu
from fastplm.ops._common import kernels, torch_rejects, triton_rejects
from fastplm.ops.gather_rows import OP as GATHER_ROWS
from fastplm.reference.maxsim import NORM_EPS, MaxSim, maxsim_ref

_ENDS = Arg("[B + 1 > 0]", (torch.int32,), "Pass pad(sizes.cumsum(0), (1, 0)).int().")


class Call(NamedTuple):
    query: Annotated[Tensor, Arg("[Nq, E > 0]")]
    key: Annotated[Tensor, Arg("[Nk, E]", "query")]
    cu_seqlens_q: Annotated[Tensor, _ENDS]
    cu_seqlens_k: Annotated[Tensor, _ENDS]
    max_seqlen_q: Size
    max_seqlen_k: Size
    normalize: bool

    def check(self, where: str) -> None:
        for name in ("max_seqlen_q", "max_seqlen_k"):
            expected, fix = "the size of the largest set", "Pass it, or any upper bound."
            check_number(where, name, getattr(self, name), 0, math.inf, expected, fix)

    def check_lengths(self) -> None:
        """The values of ``cu_seqlens``, on the CPU, where looking at them waits for nothing."""
        for name, cu_seqlens, rows, longest in (
            ("q", self.cu_seqlens_q, self.query, self.max_seqlen_q),
            ("k", self.cu_seqlens_k, self.key, self.max_seqlen_k),
        ):
            if values_are_known(cu_seqlens):
                check_lengths_on_cpu(name, cu_seqlens, rows.shape[0], longest, "maxsim")


class Saved(NamedTuple):
    query: Tensor
    key: Tensor
    match: Tensor
    normalize: bool


def maxsim(
    query: Tensor,
    key: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    normalize: bool = True,
) -> MaxSim:
    """The best match of every token among those of another text, in both directions at once.

    ``query_score[i] = max_j cos(query[i], key[j])`` over the keys j of the set of i, and
    ``key_score[j] = max_i cos(query[i], key[j])`` over the queries i of the set of j

    Args:
        query: [Nq, E], fp64, fp32, fp16 or bf16; any strides whose last is 1. Set b owns the rows
            ``cu_seqlens_q[b]`` to ``cu_seqlens_q[b + 1]``.
        key: [Nk, E], dtype and device of ``query``, cut by ``cu_seqlens_k`` into as many sets.
        cu_seqlens_q: int32 [B + 1], where sets begin and the last one ends, on the same device.
        cu_seqlens_k: int32 [B + 1].
        max_seqlen_q: the size of the largest set, or any upper bound: an int, so that no device is
            waited for.
        max_seqlen_k: the same of the keys.
        normalize: cosine similarity; False is the dot product, for rows that are normalized or are
            not to be.

    Returns:
        ``MaxSim(query_score, query_index, key_score, key_index)``: fp32 [Nq] (fp64 for fp64
        inputs), int64 [Nq] (a row of ``key``), fp32 [Nk] and int64 [Nk] (a row of ``query``). Among
        equal similarities the first row is the match. A row without anything to match, and spare
        rows past ``cu_seqlens[-1]``, have score 0 and index -1, and pass no gradient.

        Both scores have gradients with respect to ``query`` and ``key``, through the matches alone.

    Numerics:
        Products and sums in fp32 (16-bit rows on a GPU: exact products, fp32 sums); norms are fp32
        and at least 1e-12, as in ``torch.nn.functional.normalize``. Two keys that are equal to the
        last bit may differ by a rounding in their similarities; that is not "equal" above. A score
        that meets a NaN is NaN, with any index of its set.

    Determinism:
        Forward and backward repeat bit for bit on one backend; the gradient of a row that several
        rows chose is a sum in an order that the matches alone decide (``ops.gather_rows``).

    Cost:
        One product of each pair of sets; the similarities exist in tiles only, no [Tq, Tk]. The
        backward is linear in the rows.

    Raises:
        ArgumentValueError, ArgumentTypeError: shapes, dtypes, devices or lengths that do not fit.
        BackendError: a forced backend cannot run the call.

    Examples:
        >>> query = torch.tensor([[1.0, 0.0], [0.0, 2.0]])
        >>> key = torch.tensor([[0.0, 1.0], [3.0, 4.0], [0.0, 3.0]])
        >>> ends = torch.tensor([0, 2]).int(), torch.tensor([0, 3]).int()
        >>> match = ops.maxsim(query, key, *ends, 2, 3)
        >>> match.query_score, match.query_index
        (tensor([0.6000, 1.0000]), tensor([1, 0]))
        >>> match.key_score, match.key_index
        (tensor([1.0000, 0.8000, 1.0000]), tensor([1, 1, 1]))

    Source: Zhang et al. 2020, "BERTScore" (arXiv 1904.09675), section 3, R and P; Khattab and
        Zaharia 2020, "ColBERT" (arXiv 2004.12832), equation 3, whose MaxSim is the sum of
        ``query_score`` over a query.
    Reference: ``fastplm.reference.maxsim.maxsim_ref``.
    """
    call = Call(query, key, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, normalize)
    OP.check(call)
    backend = OP.resolve(call)
    call.check_lengths()
    if backend == "eager":
        return _reference(call)
    call = OP.arguments.laid_out(call)
    score, index = OP(call, backend)
    queries = query.shape[0]
    return MaxSim(score[:queries], index[:queries], score[queries:], index[queries:])


_reference = from_fields(maxsim_ref)


def _wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype is torch.float64 else tensor.float()


def _results(call: Call) -> tuple[Tensor, Tensor]:
    """(score 0, index -1) of all rows."""
    rows = call.query.shape[0] + call.key.shape[0]
    dtype = torch.float64 if call.query.dtype is torch.float64 else torch.float32
    score = call.query.new_zeros(rows, dtype=dtype)
    return score, score.new_full((rows,), -1, dtype=torch.int64)


# --- the gradient: each row gets that of its match, and of all rows whose match it is -------------


def _gradients(grad: Tensor, saved: Saved, backend: str | None) -> tuple[Tensor, Tensor]:
    """By the rows of ``ops.gather_rows``'s ``backend``; None: by PyTorch's own indexing."""
    query, key, index, normalize = saved
    queries = query.shape[0]
    alone = index < 0
    # Rows without a match, which may be NaN, are the match of nobody either.
    rows = torch.cat([_wide(query), _wide(key)]).masked_fill_(alone[:, None], 0.0)
    if normalize:
        norm = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
        scale = norm.clamp(min=NORM_EPS).reciprocal_()
        rows.mul_(scale)
    match = torch.cat([index[:queries] + queries, index[queries:]]).masked_fill_(alone, -1)
    weight = grad.masked_fill(alone, 0.0)[:, None]
    if backend is None:
        place, there = match.clamp(min=0), ~alone[:, None]
        total = torch.where(there, rows.index_select(0, place), 0.0) * weight
        # Not ``index_add_``, whose sums on a GPU are in no order.
        total.index_put_((place,), torch.where(there, rows * weight, 0.0), accumulate=True)
    else:
        gather = GATHER_ROWS.backends[backend]
        total = gather.forward(GATHER_ROWS.call(rows, match)) * weight
        total += gather.backward(rows * weight, GATHER_ROWS.saved.build((match, rows.shape[0])))
    if normalize:
        along = (rows * total).sum(1, keepdim=True).masked_fill_(norm < NORM_EPS, 0.0)
        total = total.sub_(rows.mul_(along)).mul_(scale)
    return (
        total[:queries].to(query.dtype, copy=True),
        total[queries:].to(key.dtype, copy=True),
    )


# --- backend "torch": products of pairs of about one size, in buffers that are used again ---------

#: Numbers in the buffers of a group of pairs: 8 MB in fp32.
_GROUP = 1 << 21
#: Sets of queries of one group differ by less than this.
_STEP = 16


class _Group(NamedTuple):
    """Pairs, with the first rows and the sizes of their sets, int64 [G] each."""

    start_q: Tensor
    size_q: Tensor
    start_k: Tensor
    size_k: Tensor


def _torch_groups(call: Call) -> Iterator[_Group]:
    """Pairs without an empty set, by size, so many at a time as the buffers hold."""
    width = call.query.shape[1]
    starts = [ends[:-1].long() for ends in (call.cu_seqlens_q, call.cu_seqlens_k)]
    sizes = [ends.diff().long() for ends in (call.cu_seqlens_q, call.cu_seqlens_k)]
    pairs = torch.stack([starts[0], sizes[0], starts[1], sizes[1]], 1)
    lengths = [(-(-q // _STEP), k, at) for at, (_, q, _, k) in enumerate(pairs.tolist()) if q and k]
    group: list[int] = []
    steps = 0
    for step, size_k, at in sorted(lengths):
        size_q = step * _STEP
        held = (len(group) + 1) * (size_q * size_k + (size_q + size_k) * width)
        if group and (step != steps or held > _GROUP):
            yield _Group(*pairs[group].unbind(1))
            group = []
        group.append(at)
        steps = step
    if group:
        yield _Group(*pairs[group].unbind(1))


def _torch_padded(start: Tensor, size: Tensor, first: int, last: int) -> tuple[Tensor, Tensor]:
    """(row [G, T], whether it exists [G, T]) of places in sets.

    A place past the end has the first row of the set: so it never wins against that row.
    """
    place = torch.arange(first, last, device="cpu")
    exists = place < size[:, None]
    return torch.where(exists, place, 0) + start[:, None], exists


def _torch_forward(call: Call) -> tuple[Tensor, Tensor]:
    call.check_lengths()
    score, index = _results(call)
    score_k, index_k = score[len(call.query) :], index[len(call.query) :]
    buffer = score.new_empty(0)
    for group in _torch_groups(call):
        pairs, longest_q, longest_k = len(group[0]), int(group[1].max()), int(group[3].max())
        rows_k, exists_k = _torch_padded(group.start_k, group.size_k, 0, longest_k)
        keys = _torch_rows(call.key, rows_k, call.normalize)
        step = min(longest_q, max(1, _GROUP // (longest_k * pairs)))
        if buffer.numel() < pairs * step * longest_k:
            buffer = score.new_empty(pairs * step * longest_k)
        best_k: Tensor | None = None
        for first in range(0, longest_q, step):
            last = min(first + step, longest_q)
            rows_q, exists_q = _torch_padded(group.start_q, group.size_q, first, last)
            queries = _torch_rows(call.query, rows_q, call.normalize)
            tile = buffer[: pairs * (last - first) * longest_k].view(pairs, last - first, longest_k)
            torch.bmm(queries, keys.mT, out=tile)
            best, place = tile.max(2)
            real = rows_q[exists_q]
            score[real] = best[exists_q]
            index[real] = rows_k.gather(1, place)[exists_q]
            best, place = tile.max(1)
            match = rows_q.gather(1, place)
            if best_k is None:
                best_k, match_k = best, match
            else:  # the earlier one, of equal similarities
                best_k, later = torch.stack([best_k, best]).max(0)
                match_k = torch.where(later.bool(), match, match_k)
        assert best_k is not None
        real = rows_k[exists_k]
        score_k[real] = best_k[exists_k]
        index_k[real] = match_k[exists_k]
    return score, index


def _torch_rows(packed: Tensor, rows: Tensor, normalize: bool) -> Tensor:
    """[G, T, E] in fp32 or fp64."""
    padded = _wide(packed.index_select(0, rows.flatten()))
    if normalize:
        norm = torch.linalg.vector_norm(padded, dim=1, keepdim=True)
        padded.div_(norm.clamp_(min=NORM_EPS))
    return padded.view(*rows.shape, -1)


def _torch_backward(grad: Tensor, saved: Saved) -> tuple[Tensor, Tensor]:
    # Its C++ where that was built.
    lacks = "cpp" not in GATHER_ROWS.backends or GATHER_ROWS.backends["cpp"].rejects(
        (saved.query,), forced=False
    )
    return _gradients(grad, saved, None if lacks else "cpp")


# --- backend "triton" -----------------------------------------------------------------------------


def _triton_forward(call: Call) -> tuple[Tensor, Tensor]:
    call.check_lengths()
    score, index = _results(call)

    def scale(rows: Tensor) -> Tensor | None:
        if not call.normalize:
            return None
        norm = torch.linalg.vector_norm(rows, dim=1, dtype=score.dtype)
        return norm.clamp_(min=NORM_EPS).reciprocal_()

    kernels("maxsim").maxsim_fwd(
        query=call.query,
        key=call.key,
        scale_q=scale(call.query),
        scale_k=scale(call.key),
        cu_seqlens_q=call.cu_seqlens_q,
        cu_seqlens_k=call.cu_seqlens_k,
        max_seqlen_q=call.max_seqlen_q,
        max_seqlen_k=call.max_seqlen_k,
        score=score,
        index=index,
    )
    return score, index


def _triton_backward(grad: Tensor, saved: Saved) -> tuple[Tensor, Tensor]:
    return _gradients(grad, saved, "triton")


# --- registration ---------------------------------------------------------------------------------


def _smoke(device: torch.device) -> None:
    query = torch.randn(5, 16, device=device, requires_grad=True)
    ends = torch.tensor([0, 2, 5], dtype=torch.int32, device=device)
    match = maxsim(query, torch.randn(5, 16, device=device), ends, ends, 3, 3)
    (match.query_score.sum() + match.key_score.sum()).backward()


OP = Op(
    "maxsim",
    Call,
    results=("score", "match"),
    fake=lambda call, backend: _results(call),
    reference=maxsim_ref,
    eager=_reference,
    smoke=_smoke,
    saved=Saved,
    gradients=("query", "key"),
    fake_backward=lambda grad, saved: (
        saved.query.new_empty(saved.query.shape),
        saved.key.new_empty(saved.key.shape),
    ),
)
OP.backend("torch", forward=_torch_forward, backward=_torch_backward, rejects=torch_rejects)
OP.backend("triton", forward=_triton_forward, backward=_triton_backward, rejects=triton_rejects)
