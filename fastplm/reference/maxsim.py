"""Reference of ``ops.maxsim``: the specification, in plain differentiable PyTorch."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fastplm.reference.attention import _padded_rows

#: A row is divided by its norm, or by this if that is smaller.
NORM_EPS = 1e-12


class MaxSim(NamedTuple):
    """The best match of every row of two ragged batches.

    Attributes:
        query_score: fp32 [Nq], the largest similarity of a query row and the keys of its set.
        query_index: int64 [Nq], the row of ``key`` that it belongs to.
        key_score: fp32 [Nk], the same of a key row and the queries of its set.
        key_index: int64 [Nk], the row of ``query``.
    """

    query_score: Tensor
    query_index: Tensor
    key_score: Tensor
    key_index: Tensor


def maxsim_ref(
    query: Tensor,
    key: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    normalize: bool = True,
) -> MaxSim:
    """Rows and columns of the similarities ``[B, Tq, Tk]``, each by its largest entry.

    Args: those of ``ops.maxsim``.

    Returns:
        ``MaxSim``; score 0 and index -1 where there is no row to match, and of spare rows.
    """
    if cu_seqlens_q.numel() == 1:  # as of one pair of empty sets
        cu_seqlens_q, cu_seqlens_k = cu_seqlens_q.expand(2), cu_seqlens_k.expand(2)
    rows_q, exists_q = _padded_rows(cu_seqlens_q, max(max_seqlen_q, 1))  # [B, Tq]
    rows_k, exists_k = _padded_rows(cu_seqlens_k, max(max_seqlen_k, 1))  # [B, Tk]

    def pad(packed: Tensor, rows: Tensor, exists: Tensor) -> Tensor:  # -> [B, T, E]
        if packed.shape[0] == 0:
            packed = F.pad(packed, (0, 0, 0, 1))
        packed = packed if packed.dtype is torch.float64 else packed.float()
        padded = packed[rows].masked_fill(~exists[:, :, None], 0.0)
        return F.normalize(padded, dim=-1, eps=NORM_EPS) if normalize else padded

    similarity = pad(query, rows_q, exists_q) @ pad(key, rows_k, exists_k).mT  # [B, Tq, Tk]
    of_queries = similarity.masked_fill(~exists_k[:, None, :], -torch.inf)
    of_keys = similarity.mT.masked_fill(~exists_q[:, None, :], -torch.inf)
    return MaxSim(
        *_best(of_queries, query.shape[0], cu_seqlens_q, cu_seqlens_k),
        *_best(of_keys, key.shape[0], cu_seqlens_k, cu_seqlens_q),
    )


def _best(similarity: Tensor, count: int, own: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """(score [N], index [N]) of the packed rows, from similarities [B, T, T of the other side]."""
    largest, place = similarity.max(-1)  # [B, T], the first of equal ones
    row = torch.arange(count, device=own.device)
    pair = torch.bucketize(row, own[1:], right=True).clamp(max=len(largest) - 1)
    position = (row - own[pair]).clamp(max=largest.shape[1] - 1)
    none = (row >= own[-1]) | (other.diff() == 0)[pair]
    score = largest[pair, position].masked_fill(none, 0.0)
    index = other[pair].long() + place[pair, position]
    return score, index.masked_fill(none, -1)
