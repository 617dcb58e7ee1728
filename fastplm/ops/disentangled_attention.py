"""``ops.disentangled_attention``: its arguments, and its backends."""

from __future__ import annotations

import math
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

from fastplm._checks import check_number, check_probability, check_seed_form, check_tensors
from fastplm._declare import Arg, Size
from fastplm._modes import needs_dispatch, values_are_known
from fastplm._registry import Op
from fastplm.errors import fail
from fastplm.ops._attention_call import (
    _threshold,
    check_dropout_counters,
    check_lengths_on_cpu,
    empty_like_projection,
    table_on,
)
from fastplm.ops._common import (
    cast_for_autocast,
    csrc_rejects,
    kernels,
    last_dim_contiguous,
    seed_tensor,
    triton_rejects,
)
from fastplm.reference.disentangled_attention import (
    disentangled_attention_ref,
    disentangled_buckets,
)

_ROWS = Arg("[B, H, T, D > 0]", packed="[N, H, D > 0]")
_LIKE = Arg("[B, H, T, D]", "query", packed="[N, H, D]")
_TABLE = Arg("[buckets, H, D]", "query")
_MASK_FIX = "Pass one bool for each key, attention_mask.bool()."
_ENDS_FIX = "Pass pad(lengths.cumsum(0), (1, 0)).int()."


class Call(NamedTuple):
    """Both layouts: a call of packed rows has ``cu_seqlens``, a dense one does not."""

    query: Annotated[Tensor, _ROWS]
    key: Annotated[Tensor, _LIKE]
    value: Annotated[Tensor, _LIKE]
    pos_key: Annotated[Tensor | None, _TABLE]
    pos_query: Annotated[Tensor | None, _TABLE]
    max_distance: int
    key_mask: Annotated[Tensor | None, Arg("[B, T]", (torch.bool,), _MASK_FIX, packed="[N]")]
    cu_seqlens: Annotated[Tensor | None, Arg("[B + 1 > 0]", (torch.int32,), _ENDS_FIX)]
    max_seqlen: Size
    seed: Annotated[Tensor | None, Arg("[]", (torch.int64,))]
    sample_index: Annotated[Tensor | None, Arg("[B]", (torch.int64,))]
    dropout_p: float
    scale: float

    @property
    def packed(self) -> bool:
        return self.cu_seqlens is not None

    @property
    def longest(self) -> int:
        """An upper bound of the lengths, at least 1."""
        return torch.sym_max(self.max_seqlen if self.packed else self.query.shape[2], 1)

    @property
    def reach(self) -> int:
        """The distances of the tables that kernels make are below it."""
        return -(-self.longest // 64) * 64  # a round number, as batches differ in their lengths

    @property
    def table_rows(self) -> int:
        table = self.pos_query if self.pos_key is None else self.pos_key
        return 0 if table is None else table.shape[0]

    @property
    def dropout_threshold(self) -> int:
        """Random bytes below it drop a probability."""
        return 0 if self.seed is None else _threshold(self.dropout_p)

    @property
    def buckets(self) -> Tensor:
        """int64 [2 reach - 1]: the row of the tables of each distance of a query and a key."""
        settings = self.table_rows, self.max_distance, self.reach
        return table_on(self.query.device, disentangled_buckets, *settings)

    @property
    def ends(self) -> Tensor:
        """int64 [rows of the tables + 1]: the first of the distances of each row, by its place."""
        settings = self.table_rows, self.max_distance, self.reach
        return table_on(self.query.device, _ends_of_buckets, *settings)

    def check(self, where: str) -> None:
        if self.packed:
            expected, fix = "the length of the longest sequence", "Pass it, or any upper bound."
            check_number(where, "max_seqlen", self.max_seqlen, 0, math.inf, expected, fix)
        if self.pos_key is None and self.pos_query is None:
            expected, fix = "a table for one of the two terms", "Without one, use ops.attention."
            fail(where, "pos_key", "None beside pos_query None", expected, fix)
        name = "pos_query" if self.pos_key is None else "pos_key"
        rows, least = self.table_rows, 4 if self.max_distance else 2
        if rows < least or rows % 2 != 0:
            fix = "Pass the rows of both sides, 2 * span."
            expected = f"an even number of rows, at least {least}"
            fail(where, name, f"shape {tuple(getattr(self, name).shape)}", expected, fix)
        if self.max_distance != 0 and self.max_distance < rows // 4 + 2:
            expected = f"0, or at least {rows // 4 + 2}: {rows // 4} distances have a row alone"
            fix = "Pass max_relative_positions, 512 of DeBERTa-v3."
            fail(where, "max_distance", self.max_distance, expected, fix)
        if self.seed is not None:
            check_dropout_counters(where, self.dropout_p, self.query.shape[1], self.longest)

    def check_lengths(self) -> None:
        """The values of ``cu_seqlens``, on the CPU, where looking at them waits for nothing."""
        if self.cu_seqlens is not None and values_are_known(self.cu_seqlens):
            sizes = self.cu_seqlens, self.query.shape[0], self.max_seqlen
            check_lengths_on_cpu("", *sizes, "disentangled_attention")


class Saved(NamedTuple):
    call: Call
    out: Tensor | None  # None where the backward computes it again
    stats: Tensor


def _ends_of_buckets(rows: int, max_distance: int, reach: int) -> Tensor:
    buckets = disentangled_buckets(rows, max_distance, reach)
    return torch.searchsorted(buckets, torch.arange(rows + 1, device="cpu"))


def disentangled_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pos_key: Tensor | None,
    pos_query: Tensor | None,
    *,
    max_distance: int = 0,
    key_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int = 0,
    dropout_p: float = 0.0,
    scale: float | None = None,
    seed: int | Tensor | None = None,
    sample_index: Tensor | None = None,
) -> Tensor:
    """DeBERTa's attention to contents and relative positions, without a matrix of all scores.

    ``S[i, j] = scale * (q_i · k_j + q_i · pos_key[b] + k_j · pos_query[b])`` with the bucket
    ``b`` of the distance i - j; ``O = dropout(softmax(S + mask)) V``

    Args:
        query: [B, H, T, D], fp64, fp32, fp16 or bf16, any strides whose last is 1; or [N, H, D] of
            packed sequences, with ``cu_seqlens``.
        key, value: [B, H, T, D], or [N, H, D]; dtype and device of ``query``.
        pos_key: [buckets, H, D], the projected embeddings of relative positions that queries
            attend to (content to position), or None = no such term.
        pos_query: [buckets, H, D], those that attend to keys (position to content), or None.
        max_distance: 0 = each distance d below ``span``, half of the buckets, has its own, number
            ``d + span``, and those beyond share the first or last. Otherwise distances up to
            ``span // 2`` have their own, and the others share them by the logarithm up to here
            (DeBERTa-v3: 512, with 512 buckets).
        key_mask: bool [B, T] or [N], True = attend. The content of a masked key never matters.
        cu_seqlens: int32 [B + 1], from 0, not decreasing: sequence b owns the rows from
            ``cu_seqlens[b]`` to ``cu_seqlens[b + 1]``. Rows past the last are spare; their content
            never matters.
        max_seqlen: an upper bound of the lengths of packed sequences.
        dropout_p, seed: as in ``ops.attention``, which drops the same probabilities.
        sample_index: int64 [B], as in ``ops.attention``.
        scale: factor on the scores; default ``(D * (1 + terms)) ** -0.5`` with the number of terms
            of positions.

    Returns:
        The shape and dtype of ``query``. A row that may attend to nothing is 0 and passes no
        gradient, as are spare rows. Packed sequences give what the batch gives that is padded at
        the right, bit for bit on one backend.

    Numerics:
        As ``ops.attention``: products in the input dtype (C++: fp32), scores and sums in fp32.

    Determinism:
        Forward and backward repeat bit for bit on one backend, the gradients of the tables
        included; no atomics.

    Cost:
        The products of positions exist a tile at a time; nothing of the size of the scores is
        kept for the backward.

    Raises:
        ArgumentValueError, ArgumentTypeError: shapes, dtypes, devices or values that do not fit.
        BackendError: a forced backend cannot run the call.

    Examples:
        >>> query = torch.ones(1, 1, 3, 1)
        >>> value = torch.tensor([1.0, 3.0, 7.0]).view(1, 1, 3, 1)
        >>> table = torch.tensor([0.0, 0.0, 0.0, 100.0]).view(4, 1, 1)  # the keys before
        >>> ops.disentangled_attention(query, query, value, table, None)[0, 0, 1:, 0]
        tensor([1., 2.])

    Source: He et al. 2020, "DeBERTa" (arXiv 2006.03654), equation 4; buckets as in Transformers'
        DeBERTa-v2.
    Reference: ``fastplm.reference.disentangled_attention.disentangled_attention_ref``.
    """
    where = "disentangled_attention"
    check_tensors(where, 3 if cu_seqlens is not None else 4, query=query, key=key, value=value)
    query, key, value, pos_key, pos_query = cast_for_autocast(  # type: ignore[assignment]
        query, key, value, pos_key, pos_query
    )
    fix = "Pass the share of attention probabilities to drop."
    check_probability(where, "dropout_p", dropout_p, fix)
    if dropout_p > 0.0:
        seed = seed_tensor(where, seed, query, optional=True)
    elif seed is not None:
        check_seed_form(where, seed)
        seed = None
    terms = 1 + (pos_key is not None) + (pos_query is not None)
    if scale is None:
        scale = (max(query.shape[-1], 1) * terms) ** -0.5
    check_number(where, "scale", scale, -math.inf, math.inf, "a number", "None is the paper's.")
    call = Call(
        *(query, key, value, pos_key, pos_query, max_distance, key_mask, cu_seqlens, max_seqlen),
        *(seed, sample_index, float(dropout_p), float(scale)),
    )
    OP.check(call)
    dispatches = needs_dispatch(call)
    backend = OP.resolve(call, dispatches)
    if backend != "eager":
        call = OP.arguments.laid_out(call)
    return OP(call, backend, dispatches)[0]


def _eager(call: Call) -> tuple[Tensor, None]:
    call.check_lengths()
    options = {name: getattr(call, name) for name in _OPTIONS}
    return disentangled_attention_ref(*call[:5], **options), None


_OPTIONS = (
    *("max_distance", "key_mask", "cu_seqlens", "max_seqlen"),
    *("dropout_p", "scale", "seed", "sample_index"),
)


# --- backend "cpp": csrc/attention/disentangled_attention.h ---------------------------------------


def _cpp_arguments(call: Call) -> tuple[Any, ...]:
    return (
        *call[:5],
        *(call.buckets, call.key_mask, call.cu_seqlens, call.longest),
        *(call.seed, call.sample_index, call.dropout_threshold, call.scale),
    )


def _cpp_forward(call: Call) -> tuple[Tensor, Tensor]:
    try:
        return torch.ops.fastplm_C.disentangled_attention.default(*_cpp_arguments(call))
    except RuntimeError:
        call.check_lengths()  # csrc/ found wrong lengths; this raises an error that names them
        raise


def _cpp_backward(grad: Tensor, saved: Saved) -> tuple[Tensor, ...]:
    backward = torch.ops.fastplm_C.disentangled_attention_backward.default
    call, grad = saved.call, last_dim_contiguous(grad)
    *grads, pos_key, pos_query = backward(*_cpp_arguments(call), saved.stats, grad)
    for by_group in (pos_key, pos_query):
        if by_group.dim() == 4:  # [groups, H, buckets, D]
            by_group = by_group.sum(0).transpose(0, 1).to(call.query.dtype).contiguous()
        grads.append(by_group)
    return tuple(grads)


# --- backend "triton" -----------------------------------------------------------------------------


def _triton_rejects(call: Call, *, forced: bool) -> str | None:
    most, dim = {2: 128, 4: 64}.get(call.query.dtype.itemsize, math.inf), call.query.shape[-1]
    if dim > most:
        return f"head dim {dim} is over {most}"
    if call.scale <= 0.0:
        return f"scale {call.scale}: the kernels take a positive one"
    return triton_rejects(call, forced=forced)


def _triton_forward(call: Call) -> tuple[Tensor, Tensor]:
    call.check_lengths()
    return kernels("disentangled_attention").disentangled_attention_fwd(call)


def _triton_backward(grad: Tensor, saved: Saved) -> tuple[Tensor, ...]:
    return kernels("disentangled_attention").disentangled_attention_bwd(
        grad, *saved, saved.call.ends
    )


# --- registration ---------------------------------------------------------------------------------


def _statistics(call: Call) -> Tensor:
    """An empty [2, H, rows]: what the backward needs to rebuild the softmax of a row."""
    query = call.query
    rows = query.shape[0] if call.packed else query.shape[0] * query.shape[2]
    return query.new_empty((2, query.shape[1], rows), dtype=torch.float32)


def _fake_backward(grad: Tensor, saved: Saved) -> tuple[Tensor, ...]:
    call = saved.call
    grads = [empty_like_projection(one) for one in call[:3]]
    return *grads, *(call.query.new_empty(0 if t is None else t.shape) for t in call[3:5])


def _smoke(device: torch.device) -> None:
    query = torch.randn(1, 2, 4, 16, device=device, requires_grad=True)
    table = torch.randn(4, 2, 16, device=device, requires_grad=True)
    disentangled_attention(query, query, query, table, table).sum().backward()


OP = Op(
    "disentangled_attention",
    Call,
    results=("out", "stats"),
    fake=lambda call, backend: (empty_like_projection(call.query), _statistics(call)),
    reference=disentangled_attention_ref,
    eager=_eager,
    smoke=_smoke,
    saved=Saved,
    gradients=("query", "key", "value", "pos_key", "pos_query"),
    fake_backward=_fake_backward,
    unused=lambda call, outputs, needs, backend: ("out",) if backend == "cpp" else (),
)
OP.backend(
    "cpp",
    forward=_cpp_forward,
    backward=_cpp_backward,
    rejects=csrc_rejects("disentangled_attention", fp64=False),
)
OP.backend("triton", forward=_triton_forward, backward=_triton_backward, rejects=_triton_rejects)
